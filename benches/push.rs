//! A host array filled element by element: `GrowableBuffer::push` on host memory against `Vec::push`.
//!
//! ```text
//! cargo bench --bench push
//! GROWSPAN_BENCH_MIB=64 GROWSPAN_BENCH_ROUNDS=1 cargo bench --bench push    # a smoke test
//! ```
//!
//! Every fill is a process of its own, so that peaks do not mix; the two take turns. A fill is timed three times over:
//! from nothing (growth, the kernel's zeroing and page faults included), once more over memory that is there already
//! (the push itself), and in the processor time of the first. The peak is `VmHWM`, what was resident at most.

use std::error::Error;
use std::hint::black_box;
use std::io::{self, Write};
use std::process::{Command, ExitCode};
use std::time::Instant;

use growspan::driver::host::HostOptions;
use growspan::{Bytes, DeviceOptions, GrowableBuffer};

/// Which fill this process is, if it is one.
const CHILD: &str = "GROWSPAN_BENCH_CHILD";
/// The size of the array.
const MIB: &str = "GROWSPAN_BENCH_MIB";
/// How often each is measured.
const ROUNDS: &str = "GROWSPAN_BENCH_ROUNDS";

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What one fill took.
#[derive(Clone, Copy, Debug)]
struct Fill {
    first_ms: f64,
    cpu_ms: f64,
    again_ms: f64,
    peak_mib: f64,
    faults: f64,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "push: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<()> {
    // `cargo test --benches` runs benchmarks too, without this argument: then a small fill will do.
    let benchmark = std::env::args().any(|word| word == "--bench");
    let mib = number(MIB)?.unwrap_or(if benchmark { 4096 } else { 64 });
    let count = usize::try_from(mib)? * (1 << 20) / size_of::<u64>();
    if let Ok(kind) = std::env::var(CHILD) {
        let fill = match kind.as_str() {
            "vec" => fill_vec(count),
            "growspan" => fill_growspan(count)?,
            _ => return Err(format!("{CHILD} is {kind:?}").into()),
        };
        let Fill { first_ms, cpu_ms, again_ms, peak_mib, faults } = fill;
        return Ok(writeln!(io::stdout(), "{first_ms} {cpu_ms} {again_ms} {peak_mib} {faults}")?);
    }
    let rounds = number(ROUNDS)?.unwrap_or(if benchmark { 7 } else { 1 });
    let mut fills = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        // Which goes first alternates: what one leaves behind (free pages, caches) the other finds.
        for n in [round % 2, (round + 1) % 2] {
            let n = usize::try_from(n)?;
            fills[n].push(in_a_child(["growspan", "vec"][n], mib)?);
        }
    }
    table(mib, &fills)
}

fn number(variable: &str) -> Outcome<Option<u64>> {
    let Ok(text) = std::env::var(variable) else { return Ok(None) };
    Ok(Some(text.parse().map_err(|error| format!("{variable} is {text:?}: {error}"))?))
}

/// Measures one fill in a process of its own.
fn in_a_child(kind: &str, mib: u64) -> Outcome<Fill> {
    let output = Command::new(std::env::current_exe()?).env(CHILD, kind).env(MIB, mib.to_string()).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let fields: Vec<f64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let &[first_ms, cpu_ms, again_ms, peak_mib, faults] = fields.as_slice() else {
        return Err(format!("the {kind} fill failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    };
    Ok(Fill { first_ms, cpu_ms, again_ms, peak_mib, faults })
}

fn fill_vec(count: usize) -> Fill {
    let start = Start::now();
    let mut array = Vec::<u64>::new();
    for n in 0..count as u64 {
        array.push(n);
    }
    black_box(&mut array);
    let fill = start.end();
    let again = Instant::now();
    array.clear();
    for n in 0..count as u64 {
        array.push(n);
    }
    black_box(&mut array);
    Fill { again_ms: ms(again), ..fill }
}

fn fill_growspan(count: usize) -> Outcome<Fill> {
    // The check of the device is made once per process, and no part of a fill.
    let capacity = Bytes::new(count as u64 * 8 + (64 << 20));
    let device = DeviceOptions::new().host(HostOptions::default().with_capacity(capacity))?;
    device.verdict();
    let start = Start::now();
    let mut array = GrowableBuffer::<u64>::builder(&device).max_len(count).build()?;
    for n in 0..count as u64 {
        array.push(n)?;
    }
    black_box(&mut array);
    let fill = start.end();
    let again = Instant::now();
    array.truncate(0);
    for n in 0..count as u64 {
        array.push(n)?;
    }
    black_box(&mut array);
    Ok(Fill { again_ms: ms(again), ..fill })
}

/// The clocks at the beginning of a fill.
struct Start {
    wall: Instant,
    cpu_ms: f64,
    faults: f64,
}

impl Start {
    fn now() -> Self {
        let (cpu_ms, faults) = usage();
        Self { wall: Instant::now(), cpu_ms, faults }
    }

    fn end(self) -> Fill {
        let first_ms = ms(self.wall);
        let (cpu_ms, faults) = usage();
        let (cpu_ms, faults) = (cpu_ms - self.cpu_ms, faults - self.faults);
        Fill { first_ms, cpu_ms, again_ms: 0.0, peak_mib: peak_mib(), faults }
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// The processor time of this process in milliseconds, the kernel's for it included, and its page faults.
fn usage() -> (f64, f64) {
    // SAFETY: zeroes are a value of this structure of numbers.
    let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
    // SAFETY: the pointer is valid for the write of such a structure.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let ms = |time: libc::timeval| time.tv_sec as f64 * 1e3 + time.tv_usec as f64 / 1e3;
    (ms(usage.ru_utime) + ms(usage.ru_stime), usage.ru_minflt as f64)
}

/// The most that was resident of this process.
fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0
}

fn median(fills: &[Fill], field: impl Fn(&Fill) -> f64) -> f64 {
    let mut values: Vec<f64> = fills.iter().map(field).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A row's name and its figure.
type Row = (&'static str, fn(&Fill) -> f64);

fn table(mib: u64, [ours, theirs]: &[Vec<Fill>; 2]) -> Outcome<()> {
    let mut out = io::stdout().lock();
    let rounds = ours.len();
    writeln!(out, "{mib} MiB of u64 by pushes, medians of {rounds} rounds in turn\n")?;
    writeln!(out, "| | growspan | Vec | ratio |\n|---|---|---|---|")?;
    let rows: [Row; 5] = [
        ("from nothing, ms", |fill| fill.first_ms),
        ("the same, processor time, ms", |fill| fill.cpu_ms),
        ("once more over memory that is there, ms", |fill| fill.again_ms),
        ("peak resident, MiB", |fill| fill.peak_mib),
        ("page faults", |fill| fill.faults),
    ];
    for (name, field) in rows {
        let (ours, theirs) = (median(ours, field), median(theirs, field));
        writeln!(out, "| {name} | {ours:.0} | {theirs:.0} | {:.3} |", ours / theirs)?;
    }
    Ok(())
}
