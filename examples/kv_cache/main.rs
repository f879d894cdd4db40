//! The KV cache of an LLM engine under real traffic.
//!
//! Each slot of the engine owns a [`growspan::GrowableBuffer`] as long as the longest context it may serve. Addresses
//! cost nothing, so the slot takes memory only for the tokens it holds: a prompt's at once, then one per step. When its
//! request ends, the slot shrinks to nothing and its chunks go to the pool, where the next request finds them. No
//! address ever moves. Every byte stored is checked before it is given up.
//!
//! ```text
//! cargo run --release --example kv_cache
//! cargo run --release --example kv_cache -- --trace AzureLLMInferenceTrace_conv.csv --requests 2000
//! cargo run --release --example kv_cache -- --contiguous     # what it takes without virtual memory
//! ```
//!
//! The place to look for how the crate is used is `engine.rs`.

mod args;
mod engine;
#[path = "../shared/json.rs"]
mod json;
mod pattern;
mod report;
mod times;
mod traffic;

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use growspan::{Bytes, Device, DeviceOptions};

use args::Args;
use engine::Engine;
use report::Report;
use traffic::Traffic;

/// Exits with 0 when all bytes were right, 1 when some were not, 2 when it could not run.
fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        // Whoever reads has read enough.
        Err(error)
            if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe) =>
        {
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "kv_cache: {error}");
            ExitCode::from(2)
        }
    }
}

/// The device of that name, a simulated one too where it is built in.
fn open(options: DeviceOptions, name: &str) -> growspan::Result<Device> {
    #[cfg(feature = "sim")]
    if let Some(personality) = name.strip_prefix("sim") {
        use growspan::driver::sim::{Personality, SimDriver};
        let card = SimDriver::builder();
        match personality {
            "" => return options.open(card.build().driver()),
            ":vgpu" => return options.open(card.personality(Personality::VgpuNotSupported).build().driver()),
            _ => {}
        }
    }
    options.named(name)
}

/// Whether all bytes were right.
fn run() -> Result<bool, Box<dyn Error>> {
    let Some(args) = Args::read(std::env::args_os().skip(1))? else {
        write!(io::stdout(), "{}", args::HELP)?;
        return Ok(true);
    };
    let preallocation = args.preallocation()?;
    let traffic = match &args.trace {
        Some(path) => Traffic::from_trace(path)?,
        None => Traffic::built_in(),
    };
    let requests = traffic.at_most(args.requests);
    // What an engine gives its cache: here a quarter of what preallocation would take. The check makes sure that the
    // open files suffice for that, where chunks keep them.
    let budget = Bytes::new(preallocation.get() / 4);
    let options = DeviceOptions::new().contiguous(args.contiguous).sizing(args.policy.sizing());
    let device = open(options.arena(budget).buffers(args.slots.into()), &args.device)?;

    // The verdict is decided at its first use. Asked for here, its check does not count as work of the engine.
    let mode = device.verdict().mode();
    let _ = writeln!(io::stderr(), "kv_cache on {}, {mode} memory", device.info().id());
    let calls_before = device.snapshot().driver_calls;
    let started = Instant::now();

    let mut engine = Engine::new(&device, &args)?;
    let mut told = Instant::now();
    // A terminal sees one line that is written over, a file a line now and then.
    let (every, start, end) = match io::stderr().is_terminal() {
        true => (Duration::from_millis(250), "\r\x1b[K", ""),
        false => (Duration::from_secs(2), "", "\n"),
    };
    engine.run(traffic.take(requests), |figures| {
        if told.elapsed() >= every {
            told = Instant::now();
            let _ = write!(io::stderr(), "{start}{}{end}", report::progress(figures, requests, started.elapsed()));
        }
    })?;
    let _ = write!(io::stderr(), "{start}");
    let sizing = engine.sizing();
    let snapshot = device.snapshot();
    let figures = engine.close()?;
    if figures.requests == 0 {
        return Err(format!(
            "no request was served, so nothing was checked: {} did not fit into a slot; raise --max-context",
            figures.refused
        )
        .into());
    }

    let report = Report {
        preallocation,
        sizing,
        peak_committed: snapshot.peak_bytes,
        driver_calls: snapshot.driver_calls - calls_before,
        took: started.elapsed(),
        device: &device,
        args: &args,
        figures: &figures,
    };
    if args.json {
        writeln!(io::stdout(), "{}", report.json())?;
    } else {
        write!(io::stdout(), "{report}")?;
    }
    Ok(figures.mismatches == 0)
}
