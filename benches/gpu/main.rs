//! What growing costs on a CUDA card, beside the driver's own calls and what programs do without this crate.
//!
//! ```text
//! cargo bench --bench gpu                          # all sections, some two minutes, an otherwise idle card
//! cargo bench --bench gpu -- steps-of-2-mib        # one of them
//! cargo bench --bench gpu -- --json
//! GROWSPAN_BENCH_GIB=1 cargo bench --bench gpu     # everything 64 times smaller: does it run?
//! ```
//!
//! Whatever is compared takes turns in the same run. Memory that was released has to be scrubbed by the driver before it
//! can be had again, so the first turn of a fresh card is another thing than the later ones: they are told apart, and
//! both sides of a first turn get memory that nobody had before, as far as the card has any.

mod raw;
mod sections;
mod table;

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use raw::Raw;
use sections::{Bench, SECTIONS};
use table::{Outcome, Table};

fn main() -> ExitCode {
    let (mut json, mut wanted) = (false, Vec::new());
    for word in std::env::args().skip(1) {
        match word.as_str() {
            "--json" => json = true,
            // What cargo adds.
            "--bench" => {}
            name if SECTIONS.iter().any(|(known, _)| *known == name) => wanted.push(word),
            _ => {
                let known: Vec<&str> = SECTIONS.iter().map(|(name, _)| *name).collect();
                say(&format!("{word:?} is neither --json nor one of {}", known.join(", ")));
                return ExitCode::from(2);
            }
        }
    }
    let raw = match Raw::open(0) {
        Ok(raw) => raw,
        Err(why) => {
            let _ = writeln!(io::stdout(), "skipped: {why}");
            return ExitCode::SUCCESS;
        }
    };
    match run(&raw, json, &wanted) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("gpu: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn run(raw: &Raw, json: bool, wanted: &[String]) -> Outcome<()> {
    let mut bench = Bench::new(raw, Table::new(json))?;
    for (name, section) in SECTIONS {
        if !wanted.is_empty() && !wanted.iter().any(|wanted| wanted == name) {
            continue;
        }
        let start = Instant::now();
        bench.table.section(name);
        // One section's trouble is not the next one's.
        match catch_unwind(AssertUnwindSafe(|| section(&bench))) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => bench.table.failed(&error.to_string()),
            Err(_) => bench.table.failed("it panicked"),
        }
        say(&format!("{name}: {:.1} s", start.elapsed().as_secs_f64()));
    }
    Ok(())
}

fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
