//! What the run looked like, for people and for programs.

use std::fmt;
use std::time::Duration;

use growspan::{Bytes, Device, Mode, Sizing};

use crate::args::{Args, Policy};
use crate::engine::Figures;
use crate::json::{Value, object};
use crate::times::Times;

/// One line that says how far a run is.
pub(crate) fn progress(figures: &Figures, requests: usize, took: Duration) -> String {
    let ended = figures.requests + figures.refused;
    format!(
        "{:>5.1} s   {ended:>6} of {requests} requests   {} verified   {} held   {} mismatches",
        took.as_secs_f64(),
        Bytes::new(figures.verified_bytes),
        Bytes::new(figures.held),
        figures.mismatches
    )
}

/// Everything there is to say at the end.
pub(crate) struct Report<'a> {
    pub(crate) device: &'a Device,
    pub(crate) args: &'a Args,
    pub(crate) figures: &'a Figures,
    /// What the slots would take if each allocated all of its tokens at the start.
    pub(crate) preallocation: Bytes,
    /// The sizing rule in force; none in contiguous mode.
    pub(crate) sizing: Option<Sizing>,
    /// The most under the slots at any time.
    pub(crate) peak_committed: Bytes,
    /// Calls that change memory, those of the start-up check left out.
    pub(crate) driver_calls: u64,
    pub(crate) took: Duration,
}

impl Report<'_> {
    /// One object, on one line.
    pub(crate) fn json(&self) -> Value {
        let Self { device, args, figures, .. } = self;
        let verdict = device.verdict();
        let trace = args.trace.as_ref().map(|path| path.display().to_string());
        let micros = |time: Option<Duration>| Value::from(time.map(|time| time.as_nanos() as f64 / 1e3));
        object([
            ("device", device.info().id().into()),
            ("device_name", device.info().name.as_str().into()),
            ("mode", verdict.mode().to_string().into()),
            ("reason", verdict.reason().map(ToString::to_string).into()),
            ("policy", args.policy.to_string().into()),
            ("sizing_in_force", self.sizing.map(|sizing| Policy::from(sizing).to_string()).into()),
            ("trace", trace.into()),
            ("slots", args.slots.into()),
            ("max_context", args.max_context.into()),
            ("bytes_per_token", (args.bytes_per_token as u64).into()),
            ("requests", figures.requests.into()),
            ("refused", figures.refused.into()),
            ("truncated", figures.truncated.into()),
            ("tokens", (figures.prompt_tokens + figures.generated_tokens).into()),
            ("prompt_tokens", figures.prompt_tokens.into()),
            ("generated_tokens", figures.generated_tokens.into()),
            ("verified_bytes", figures.verified_bytes.into()),
            ("mismatches", figures.mismatches.into()),
            ("address_moves", figures.address_moves.into()),
            ("peak_stored_bytes", figures.peak_stored.into()),
            ("peak_committed_bytes", self.peak_committed.into()),
            ("peak_held_bytes", figures.peak_held.into()),
            ("contiguous_bytes", self.preallocation.into()),
            ("driver_calls", self.driver_calls.into()),
            ("open_files_peak", figures.peak_open_files.into()),
            ("grows", figures.grows.calls().into()),
            ("grow_p50_us", micros(figures.grows.percentile(50))),
            ("grow_p99_us", micros(figures.grows.percentile(99))),
            ("grow_max_us", micros(Some(figures.grows.longest()))),
            ("mapping_grows", figures.mapping_grows.calls().into()),
            ("mapping_grow_p50_us", micros(figures.mapping_grows.percentile(50))),
            ("mapping_grow_p99_us", micros(figures.mapping_grows.percentile(99))),
            ("shrink_p50_us", micros(figures.shrinks.percentile(50))),
            ("shrink_p99_us", micros(figures.shrinks.percentile(99))),
            ("grow_and_shrink_seconds", (figures.grows.total() + figures.shrinks.total()).as_secs_f64().into()),
            ("seconds", self.took.as_secs_f64().into()),
        ])
    }

    /// One amount of memory, with its share of preallocation as a bar.
    fn memory(&self, f: &mut fmt::Formatter<'_>, what: &str, bytes: Bytes) -> fmt::Result {
        const WIDTH: usize = 40;
        let share = bytes.get() as f64 / self.preallocation.get() as f64;
        let bar = "#".repeat(((share * WIDTH as f64).round() as usize).min(WIDTH));
        writeln!(f, "  {what:<24} {:>10} {:>6.1} %  {bar:.<WIDTH$}", bytes.to_string(), share * 100.0)
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, args, figures, .. } = self;
        let verdict = device.verdict();
        let info = device.info();

        writeln!(f)?;
        writeln!(f, "  device       {}: {}, {}", info.id(), info.name, info.runtime)?;
        match (verdict.reason(), self.sizing) {
            (Some(reason), _) => writeln!(f, "  memory       {}: {reason}", verdict.mode())?,
            (None, Some(sizing)) => {
                writeln!(f, "  memory       {}, chunks sized {}", verdict.mode(), Policy::from(sizing))?;
            }
            (None, None) => writeln!(f, "  memory       {}", verdict.mode())?,
        }
        let slot = Bytes::new(self.preallocation.get() / u64::from(args.slots));
        let (tokens, size) = (grouped(args.max_context.into()), Bytes::new(args.bytes_per_token as u64));
        writeln!(f, "  slots        {} of at most {tokens} tokens of {size}: {slot} each", args.slots)?;
        match &args.trace {
            Some(path) => writeln!(f, "  traffic      {}", path.display())?,
            None => writeln!(f, "  traffic      built in, with the lengths of the Azure conversation trace of 2023")?,
        }
        write!(f, "  served       {} requests", grouped(figures.requests))?;
        let (prompt, generated) = (figures.prompt_tokens, figures.generated_tokens);
        write!(f, ", {} tokens", grouped(prompt + generated))?;
        writeln!(f, " ({} of prompts, {} of answers)", grouped(prompt), grouped(generated))?;
        if figures.refused + figures.truncated > 0 {
            write!(f, "  too long     {} prompts refused", grouped(figures.refused))?;
            writeln!(f, ", {} answers cut short; see --max-context", grouped(figures.truncated))?;
        }
        write!(f, "  verified     {}: ", Bytes::new(figures.verified_bytes))?;
        match figures.mismatches {
            0 => writeln!(f, "every byte as it was stored")?,
            wrong => writeln!(f, "{} BYTES WRONG", grouped(wrong))?,
        }
        match figures.address_moves {
            0 => writeln!(f, "  addresses    never moved")?,
            moves => writeln!(f, "  addresses    MOVED {} times", grouped(moves))?,
        }

        writeln!(f)?;
        writeln!(f, "  {:<24} {:>10} {:>8}", "memory at its peak", "size", "share")?;
        self.memory(f, "all slots preallocated", self.preallocation)?;
        if verdict.mode() == Mode::Virtual {
            self.memory(f, "held, with the pool", Bytes::new(figures.peak_held))?;
        }
        self.memory(f, "committed under slots", self.peak_committed)?;
        self.memory(f, "tokens stored", Bytes::new(figures.peak_stored))?;

        writeln!(f)?;
        let [p50, p99] = ["p50", "p99"];
        writeln!(f, "  {:<24} {:>10} {p50:>10} {p99:>10} {:>10} {:>10}", "calls", "number", "longest", "together")?;
        times(f, "grow", &figures.grows)?;
        times(f, "  of these, mapping", &figures.mapping_grows)?;
        times(f, "shrink to nothing", &figures.shrinks)?;

        writeln!(f)?;
        let (calls, files) = (grouped(self.driver_calls), grouped(figures.peak_open_files));
        let seconds = self.took.as_secs_f64();
        writeln!(
            f,
            "  {calls} driver calls, at most {files} open files, {seconds:.1} s in all with making and checking bytes"
        )
    }
}

fn times(f: &mut fmt::Formatter<'_>, what: &str, times: &Times) -> fmt::Result {
    write!(f, "  {what:<24} {:>10}", grouped(times.calls()))?;
    match (times.percentile(50), times.percentile(99)) {
        (Some(p50), Some(p99)) => {
            let columns = [p50, p99, times.longest(), times.total()].map(readable);
            columns.iter().try_for_each(|column| write!(f, " {column:>10}"))?;
            writeln!(f)
        }
        _ => writeln!(f),
    }
}

/// A time in the unit that suits it.
fn readable(time: Duration) -> String {
    match time.as_nanos() as f64 {
        nanos if nanos < 1e3 => format!("{nanos:.0} ns"),
        nanos if nanos < 1e6 => format!("{:.1} us", nanos / 1e3),
        nanos if nanos < 1e9 => format!("{:.1} ms", nanos / 1e6),
        nanos => format!("{:.2} s", nanos / 1e9),
    }
}

/// A number with its thousands apart.
fn grouped(n: u64) -> String {
    match n {
        0..1000 => n.to_string(),
        _ => format!("{},{:03}", grouped(n / 1000), n % 1000),
    }
}
