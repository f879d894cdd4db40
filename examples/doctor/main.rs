//! What there is on this machine, whether virtual memory works on it, and what to change where it does not.
//!
//! ```text
//! cargo run --release --example doctor
//! cargo run --release --example doctor -- --json
//! ```
//!
//! Every device of every backend goes through the start-up check, step by step; the limits of the process are held
//! against what the device's memory would need. Nothing is changed but the open-file limit, which the check raises for
//! this process as far as it has to. The exit status is 0 when it could look, whatever it found.

mod advice;
#[path = "../shared/json.rs"]
mod json;
mod process;

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use growspan::verdict::{Outcome, StepReport};
use growspan::{Bytes, Device, Error as GrowspanError, OpenFileBudget, Sizing};

use json::{Value, object};
use process::Process;

const HELP: &str = "\
Says which devices there are, whether virtual memory works on them, and what to change where it does not.

Usage: doctor [--json] [--help]

  --json   print one JSON object instead of a text
  --help   print this
";

/// The chunk size that most systems use for all chunks.
const USUAL_CHUNK: Bytes = Bytes::mib(2);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "doctor: {error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut as_json = false;
    for word in std::env::args_os().skip(1) {
        match word.to_str() {
            Some("--json") => as_json = true,
            Some("--help" | "-h") => return Ok(write!(io::stdout(), "{HELP}")?),
            _ => return Err(format!("{:?} is not an option; see --help", word.display().to_string()).into()),
        }
    }
    // Before the check, which may raise the open-file limit.
    let process = Process::read();
    let devices = Device::all();
    if as_json {
        let devices: Vec<_> = devices.iter().map(device_json).collect();
        writeln!(io::stdout(), "{}", object([("devices", devices.into()), ("process", process.json())]))?;
        return Ok(());
    }
    for device in &devices {
        match device {
            Ok(device) => describe(device)?,
            Err(GrowspanError::NoDevice { asked, why }) => writeln!(io::stdout(), "{asked}: none, {why}\n")?,
            Err(error) => writeln!(io::stdout(), "none: {error}\n")?,
        }
    }
    write!(io::stdout(), "{process}")?;
    Ok(())
}

/// A device, for people.
fn describe(device: &Device) -> io::Result<()> {
    let mut out = io::stdout();
    let (info, verdict) = (device.info(), device.verdict());
    writeln!(out, "{}: {}, {}", info.id(), info.name, info.runtime)?;
    writeln!(out, "{}", verdict.report())?;
    if let Some(reason) = verdict.reason() {
        writeln!(out, "  to do:      {}", advice::on(reason))?;
    }
    if let Some(uuid) = uuid(device) {
        writeln!(out, "  uuid:       {uuid}")?;
    }
    match device.memory() {
        Ok(memory) => writeln!(out, "  memory:     {} free of {}", Bytes::new(memory.free), Bytes::new(memory.total))?,
        Err(error) => writeln!(out, "  memory:     cannot be read: {error}")?,
    }
    let quirks = verdict.quirks();
    write!(out, "  quirks:     chunks of at most {}", quirks.max_chunk)?;
    if quirks.uniform_chunks_only {
        write!(out, ", all of one size per span")?;
    }
    if !quirks.settle.is_zero() {
        write!(out, ", {:.1} ms of waiting after mapping", quirks.settle.as_secs_f64() * 1e3)?;
    }
    writeln!(out, "; granularity {}", verdict.granularity())?;
    for (n, fault) in info.known_faults.iter().enumerate() {
        let label = if n == 0 { "known of it:" } else { "" };
        writeln!(out, "  {label:<11} {}\n              -> {}", fault.what, fault.treatment)?;
    }
    if let Some(files) = FilesNeeded::by(device) {
        let FilesNeeded { per_chunk, ladder, usual } = files;
        writeln!(
            out,
            "  open files: {per_chunk} per chunk; all of its memory in one buffer takes {ladder} on the ladder,"
        )?;
        writeln!(out, "              and {usual} in chunks of {USUAL_CHUNK}")?;
    }
    writeln!(out)
}

/// A device, for programs.
fn device_json(device: &growspan::Result<Device>) -> Value {
    let device = match device {
        Ok(device) => device,
        Err(GrowspanError::NoDevice { asked, why }) => {
            return object([("id", asked.as_str().into()), ("error", why.as_str().into())]);
        }
        Err(error) => return object([("id", Value::Null), ("error", error.to_string().into())]),
    };
    let (info, verdict) = (device.info(), device.verdict());
    let (report, quirks) = (verdict.report(), verdict.quirks());
    let memory = device.memory().ok();
    let files = FilesNeeded::by(device).map(|files| {
        object([
            ("per_chunk", files.per_chunk.into()),
            ("ladder", files.ladder.into()),
            ("chunks_of_2_mib", files.usual.into()),
        ])
    });
    object([
        ("id", info.id().into()),
        ("name", info.name.as_str().into()),
        ("runtime", info.runtime.as_str().into()),
        ("uuid", uuid(device).into()),
        ("mode", verdict.mode().to_string().into()),
        ("reason", verdict.reason().map(ToString::to_string).into()),
        ("advice", verdict.reason().map(advice::on).into()),
        ("granularity_bytes", verdict.granularity().into()),
        ("free_bytes", memory.map(|memory| memory.free).into()),
        ("total_bytes", memory.map(|memory| memory.total).into()),
        (
            "quirks",
            object([
                ("uniform_chunks_only", quirks.uniform_chunks_only.into()),
                ("max_chunk_bytes", quirks.max_chunk.into()),
                ("settle_ms", (quirks.settle.as_secs_f64() * 1e3).into()),
            ]),
        ),
        (
            "known_faults",
            info.known_faults
                .iter()
                .map(|fault| object([("what", fault.what.into()), ("treatment", fault.treatment.into())]))
                .collect::<Vec<_>>()
                .into(),
        ),
        ("open_files_needed", files.into()),
        (
            "check",
            object([
                ("form", format!("{:?}", report.form).to_lowercase().into()),
                ("ms", (report.took.as_secs_f64() * 1e3).into()),
                ("steps", report.steps.iter().map(step_json).collect::<Vec<_>>().into()),
            ]),
        ),
    ])
}

fn step_json(report: &StepReport) -> Value {
    let (outcome, seen) = match &report.outcome {
        Outcome::Passed(seen) => ("passed", Some(seen)),
        Outcome::Failed(seen) => ("failed", Some(seen)),
        Outcome::Worked(seen) => ("worked around", Some(seen)),
        Outcome::Skipped => ("skipped", None),
        _ => ("other", None),
    };
    object([
        ("step", report.step.name().into()),
        ("outcome", outcome.into()),
        ("seen", seen.filter(|seen| !seen.is_empty()).cloned().into()),
        ("ms", (report.took.as_secs_f64() * 1e3).into()),
    ])
}

fn uuid(device: &Device) -> Option<String> {
    Some(device.info().uuid?.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The open files that all of a device's memory would need.
struct FilesNeeded {
    per_chunk: u32,
    ladder: u64,
    usual: u64,
}

impl FilesNeeded {
    /// None where chunks keep no open file, or the memory cannot be read.
    fn by(device: &Device) -> Option<Self> {
        let per_chunk = device.info().open_files_per_chunk;
        let total = Bytes::new(device.memory().ok().filter(|_| per_chunk > 0)?.total);
        let granularity = device.verdict().granularity();
        let needed = |sizing| OpenFileBudget::needed_for(total, sizing, granularity) * u64::from(per_chunk);
        Some(Self { per_chunk, ladder: needed(Sizing::Ladder), usual: needed(Sizing::Uniform(USUAL_CHUNK)) })
    }
}
