//! The allocators beside others: small blocks, a `Vec` that grows, a recorded trace, a hash map.
//!
//! ```text
//! cargo bench --bench allocator                                  # host memory, a trace made up here
//! cargo bench --bench allocator -- --device cuda:0 --trace t.txt # a card, a recorded trace (benches/peers/torch_trace.py)
//! cargo bench --bench allocator -- --quick --json
//! cargo bench --bench allocator -- --only pairs,trace
//! cargo bench --bench allocator -- --only trace --slot 8MiB       # other chunks under the blocks of the trace
//! ```
//!
//! Where two things are compared they take turns, so that what the machine does meanwhile meets both; figures are medians.

mod map;
mod pairs;
mod trace;
mod vec;

use std::io::{self, Write};

use growspan::{Bytes, Device, Result};

/// What to run, and how.
#[derive(Clone, Debug)]
struct Args {
    device: String,
    trace: Option<String>,
    json: bool,
    quick: bool,
    only: Option<Vec<String>>,
    slot: Option<Bytes>,
}

/// One line of the result.
struct Row {
    what: String,
    ours: String,
    beside: String,
    bar: String,
}

impl Row {
    fn new(
        what: impl Into<String>,
        ours: impl Into<String>,
        beside: impl Into<String>,
        bar: impl Into<String>,
    ) -> Self {
        Self { what: what.into(), ours: ours.into(), beside: beside.into(), bar: bar.into() }
    }
}

/// A bar, and whether it was met.
fn bar(text: &str, met: bool) -> String {
    format!("{text}: {}", if met { "met" } else { "**missed**" })
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [child, rest @ ..] = words.as_slice()
        && child == "--child"
    {
        return vec::child(rest);
    }
    let args = match parse(&words) {
        Ok(args) => args,
        Err(why) => {
            eprintln!("{why}");
            std::process::exit(2);
        }
    };
    // `cargo test --benches` runs this too, without the argument: then it only shows that it runs.
    let benchmark = words.iter().any(|word| word == "--bench");
    let args = Args { quick: args.quick || !benchmark, ..args };
    if let Err(error) = run(&args) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn parse(words: &[String]) -> core::result::Result<Args, String> {
    let mut args = Args { device: "host".to_owned(), trace: None, json: false, quick: false, only: None, slot: None };
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let mut value = || words.next().cloned().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--device" => args.device = value()?,
            "--trace" => args.trace = Some(value()?),
            "--only" => args.only = Some(value()?.split(',').map(str::to_owned).collect()),
            "--slot" => args.slot = Some(Bytes::parse(&value()?).ok_or("--slot needs a size, such as 8MiB")?),
            "--json" => args.json = true,
            "--quick" => args.quick = true,
            "--bench" | "--nocapture" => {}
            other => return Err(format!("{other} is none of --device, --trace, --only, --slot, --json, --quick")),
        }
    }
    Ok(args)
}

fn run(args: &Args) -> Result<()> {
    let device = Device::named(&args.device)?;
    let wanted = |name: &str| args.only.as_ref().is_none_or(|only| only.iter().any(|word| word == name));
    let mut rows = Vec::new();
    if wanted("pairs") {
        rows.extend(pairs::run(&device, args.quick)?);
    }
    if wanted("vec") && device.info().host_visible {
        rows.extend(vec::run(args.quick));
    }
    if wanted("trace") {
        rows.extend(trace::run(&device, args.trace.as_deref(), args.slot, args.quick)?);
    }
    if wanted("map") && device.info().host_visible {
        rows.extend(map::run(&device, args.quick)?);
    }
    print(&rows, args.json, &device);
    Ok(())
}

fn print(rows: &[Row], json: bool, device: &Device) {
    let mut out = io::stdout().lock();
    if json {
        for Row { what, ours, beside, bar } in rows {
            let line = serde_json::json!({
                "device": device.info().id(), "work": what, "growspan": ours, "beside": beside, "bar": bar,
            });
            let _ = writeln!(out, "{line}");
        }
        return;
    }
    let _ = writeln!(out, "on {} ({})\n", device.info().id(), device.info().name);
    let _ = writeln!(out, "| work | growspan | beside it | bar |\n|---|---|---|---|");
    for Row { what, ours, beside, bar } in rows {
        let _ = writeln!(out, "| {what} | {ours} | {beside} | {bar} |");
    }
}

/// The middle one of some figures.
fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}
