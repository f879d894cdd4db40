//! Times page-locked host memory: each strategy, each policy on huge pages, by where the time goes.
//!
//! ```text
//! cargo run --release --example pin -- --size 1GiB --size 4GiB --repeats 5
//! cargo run --release --example pin -- --device hip:0 --size 28GiB --strategy driver --thp all --json
//! cargo run --release --example pin -- --size 4GiB --fill model.safetensors --direct
//! ```

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use growspan::pinned::{FileOptions, Fill, PinStrategy, PinTiming, PinnedBuffer, ThpPolicy};
use growspan::{Bytes, Device};

#[path = "shared/json.rs"]
mod json;

use json::{Value, object};

const HELP: &str = "\
Times page-locked host memory by where the time goes.

Usage: pin [OPTIONS]

  --device NAME      auto, host, cuda:N, cuda:GPU-UUID or hip:N [auto]
  --size SIZE        how much; may be given several times [256MiB]
  --repeats N        how often each is timed [3]
  --strategy NAME    pieces (own memory, put there by many threads, then registered), driver (one allocation of the
                     driver's), blocks (the driver's, 2 GiB each) or all [all]
  --thp POLICY       inherit, advise, avoid, disable (for the whole process, meanwhile), default or all [default]
  --threads N        threads that put pages there [as many as may run, 16 at most]
  --piece SIZE       the most that is registered or allocated at once [the device's]
  --fill FILE        fill it from this file afterwards, timed apart
  --direct           past the file cache
  --json             print one JSON object instead of a table
  --help             print this

Sizes are in units of 1024: 64MiB, 28.47GiB. The exit status is 1 if a combination failed, 2 if nothing could be run.
";

struct Args {
    device: String,
    sizes: Vec<u64>,
    repeats: usize,
    strategies: Vec<Strategy>,
    policies: Vec<Option<ThpPolicy>>,
    threads: Option<usize>,
    piece: Option<Bytes>,
    fill: Option<PathBuf>,
    direct: bool,
    json: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Strategy {
    Pieces,
    Driver,
    Blocks,
}

impl Strategy {
    const ALL: [(&'static str, Self); 3] =
        [("pieces", Self::Pieces), ("driver", Self::Driver), ("blocks", Self::Blocks)];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, strategy)| *strategy == self).map_or("", |(name, _)| name)
    }
}

const POLICIES: [(&str, Option<ThpPolicy>); 5] = [
    ("default", None),
    ("inherit", Some(ThpPolicy::Inherit)),
    ("advise", Some(ThpPolicy::Advise)),
    ("avoid", Some(ThpPolicy::Avoid)),
    ("disable", Some(ThpPolicy::DisableForProcess)),
];

fn policy_name(policy: Option<ThpPolicy>) -> &'static str {
    POLICIES.iter().find(|(_, known)| *known == policy).map_or("", |(name, _)| name)
}

impl Args {
    fn read(mut words: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let mut args = Self {
            device: "auto".into(),
            sizes: Vec::new(),
            repeats: 3,
            strategies: Strategy::ALL.map(|(_, strategy)| strategy).to_vec(),
            policies: vec![None],
            threads: None,
            piece: None,
            fill: None,
            direct: false,
            json: false,
        };
        while let Some(word) = words.next() {
            let (option, inline) = match word.split_once('=') {
                Some((option, value)) => (option.to_owned(), Some(value.to_owned())),
                None => (word, None),
            };
            let flag = ["--help", "-h", "--json", "--direct"].contains(&option.as_str());
            let value = match (flag, inline) {
                (true, None) => String::new(),
                (true, Some(_)) => return Err(format!("{option} takes no value")),
                (false, inline) => inline.or_else(|| words.next()).ok_or_else(|| format!("{option} needs a value"))?,
            };
            let bad = || format!("{option} {value:?} is none that it takes");
            let size = || Bytes::parse(&value).filter(|size| !size.is_zero()).ok_or_else(bad);
            let count = || value.parse().ok().filter(|count| *count > 0).ok_or_else(bad);
            match option.as_str() {
                "--help" | "-h" => return Ok(None),
                "--json" => args.json = true,
                "--direct" => args.direct = true,
                "--device" => args.device = value,
                "--size" => args.sizes.push(size()?.get()),
                "--repeats" => args.repeats = count()?,
                "--threads" => args.threads = Some(count()?),
                "--piece" => args.piece = Some(size()?),
                "--fill" => args.fill = Some(value.into()),
                "--strategy" if value == "all" => {}
                "--strategy" => {
                    let found = Strategy::ALL.iter().find(|(name, _)| *name == value).ok_or_else(bad)?;
                    args.strategies = vec![found.1];
                }
                "--thp" if value == "all" => args.policies = POLICIES[1..].iter().map(|(_, policy)| *policy).collect(),
                "--thp" => {
                    let found = POLICIES.iter().find(|(name, _)| *name == value).ok_or_else(bad)?;
                    args.policies = vec![found.1];
                }
                _ => return Err(format!("there is no option {option}")),
            }
        }
        if args.sizes.is_empty() {
            args.sizes.push(256 << 20);
        }
        Ok(Some(args))
    }
}

fn main() -> ExitCode {
    let args = match Args::read(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            let _ = io::stdout().write_all(HELP.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(error) => return fail(&format!("{error}; see --help")),
    };
    let device = match Device::named(&args.device) {
        Ok(device) => device,
        Err(error) => return fail(&error.to_string()),
    };
    let results = run(&args, &device);
    let all_well = results.iter().all(|result| result.outcome.is_ok());
    let mut out = io::stdout().lock();
    let printed =
        if args.json { print_json(&mut out, &device, &results) } else { print_table(&mut out, &device, &results) };
    match printed {
        // Whoever reads has heard enough.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => fail(&error.to_string()),
        _ => ExitCode::from(u8::from(!all_well)),
    }
}

fn fail(text: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "pin: {text}");
    ExitCode::from(2)
}

/// One repeat.
struct Turn {
    timing: PinTiming,
    fill: Option<Fill>,
    free: Duration,
}

struct Outcome {
    size: u64,
    strategy: Strategy,
    policy: Option<ThpPolicy>,
    outcome: Result<Vec<Turn>, String>,
}

fn run(args: &Args, device: &Device) -> Vec<Outcome> {
    let mut results = Vec::new();
    for &size in &args.sizes {
        let mut combinations = Vec::new();
        for &strategy in &args.strategies {
            for &policy in &args.policies {
                // What a driver allocates cannot be advised on.
                let advice = matches!(policy, Some(ThpPolicy::Advise | ThpPolicy::Avoid));
                if strategy == Strategy::Pieces || !advice {
                    combinations.push(Outcome { size, strategy, policy, outcome: Ok(Vec::new()) });
                }
            }
        }
        // They take turns, so that what the machine does meanwhile meets all.
        for _ in 0..args.repeats {
            for combination in &mut combinations {
                let Ok(turns) = &mut combination.outcome else { continue };
                match turn(args, device, size, combination.strategy, combination.policy) {
                    Ok(turn) => turns.push(turn),
                    Err(error) => combination.outcome = Err(error.to_string()),
                }
            }
        }
        results.extend(combinations);
    }
    results
}

fn turn(
    args: &Args,
    device: &Device,
    size: u64,
    strategy: Strategy,
    policy: Option<ThpPolicy>,
) -> Result<Turn, Box<dyn Error>> {
    let len = usize::try_from(size)?;
    let mut builder = PinnedBuffer::<u8>::builder(device).max_len(len);
    if let Some(policy) = policy {
        builder = builder.thp(policy);
    }
    if let Some(threads) = args.threads {
        builder = builder.threads(threads);
    }
    if let Some(piece) = args.piece {
        builder = builder.piece(piece);
    }
    if strategy == Strategy::Blocks {
        let blocks = builder.build_blocks()?;
        let timing = blocks.timing().clone();
        let began = Instant::now();
        blocks.close()?;
        return Ok(Turn { timing, fill: None, free: began.elapsed() });
    }
    if strategy == Strategy::Driver {
        builder = builder.strategy(PinStrategy::Driver);
    }
    let mut buffer = builder.build()?;
    let timing = buffer.grow_to(len)?;
    let fill = match &args.fill {
        Some(path) => {
            let there = usize::try_from(std::fs::metadata(path)?.len())?.min(len);
            let options = FileOptions::new().direct(args.direct).threads(args.threads.unwrap_or(0));
            Some(buffer.fill_from_file(0..there, path, options)?)
        }
        None => None,
    };
    let began = Instant::now();
    buffer.close()?;
    Ok(Turn { timing, fill, free: began.elapsed() })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn milliseconds(turns: &[Turn], of: impl Fn(&Turn) -> Duration) -> f64 {
    median(turns.iter().map(|turn| of(turn).as_secs_f64() * 1e3).collect())
}

fn print_table(out: &mut impl Write, device: &Device, results: &[Outcome]) -> io::Result<()> {
    writeln!(out, "page-locked host memory for {} ({})", device.info().id(), device.info().name)?;
    writeln!(out, "medians; milliseconds but where it says otherwise")?;
    let head = ["total", "map", "prefault", "register", "free", "pieces", "GiB/s", "fill GiB/s"];
    write!(out, "{:>10}  {:<7} {:<8}", "size", "by", "huge")?;
    head.iter().try_for_each(|name| write!(out, " {name:>10}"))?;
    writeln!(out)?;
    for result in results {
        let size = Bytes::new(result.size).to_string();
        write!(out, "{size:>10}  {:<7} {:<8}", result.strategy.name(), policy_name(result.policy))?;
        let turns = match &result.outcome {
            Ok(turns) => turns,
            Err(error) => {
                writeln!(out, "  {error}")?;
                continue;
            }
        };
        let total = milliseconds(turns, |turn| turn.timing.total);
        let parts: [fn(&Turn) -> Duration; 4] =
            [|turn| turn.timing.map, |turn| turn.timing.prefault, |turn| turn.timing.register, |turn| turn.free];
        write!(out, " {total:>10.1}")?;
        parts.iter().try_for_each(|part| write!(out, " {:>10.1}", milliseconds(turns, part)))?;
        let pieces = turns.last().map_or(0, |turn| turn.timing.pieces);
        let gib = result.size as f64 / (1_u64 << 30) as f64;
        write!(out, " {pieces:>10} {:>10.2}", gib / total * 1e3)?;
        let fills: Vec<f64> = turns.iter().filter_map(|turn| Some(turn.fill?.bytes_per_second() / 1.074e9)).collect();
        match fills.is_empty() {
            true => writeln!(out, " {:>10}", "-")?,
            false => writeln!(out, " {:>10.2}", median(fills))?,
        }
        for turn in turns {
            writeln!(out, "{:>12}{}", "", turn.timing)?;
        }
    }
    Ok(())
}

fn print_json(out: &mut impl Write, device: &Device, results: &[Outcome]) -> io::Result<()> {
    let ms = |time: Duration| Value::Real(time.as_secs_f64() * 1e3);
    let turn = |turn: &Turn| {
        let timing = &turn.timing;
        object([
            ("total_ms", ms(timing.total)),
            ("map_ms", ms(timing.map)),
            ("prefault_ms", ms(timing.prefault)),
            ("register_ms", ms(timing.register)),
            ("free_ms", ms(turn.free)),
            ("pieces", timing.pieces.into()),
            ("threads", timing.threads.into()),
            ("retries_seen", timing.retries_seen.into()),
            ("register_faults", timing.register_faults.into()),
            ("fill_bytes_per_second", turn.fill.map(|fill| fill.bytes_per_second()).into()),
            ("fill_direct_bytes", turn.fill.map(|fill| fill.direct).into()),
            ("vmstat", Value::Object(timing.vmstat.iter().map(|(name, value)| (name, value.into())).collect())),
            ("slow", Value::List(timing.slow.iter().map(|slow| slow.to_string().into()).collect())),
        ])
    };
    let results = results.iter().map(|result| {
        let (turns, error) = match &result.outcome {
            Ok(turns) => (turns.iter().map(turn).collect(), None),
            Err(error) => (Vec::new(), Some(error.clone())),
        };
        object([
            ("bytes", result.size.into()),
            ("strategy", result.strategy.name().into()),
            ("thp", policy_name(result.policy).into()),
            ("turns", Value::List(turns)),
            ("error", error.into()),
        ])
    });
    let all = object([
        ("device", device.info().id().into()),
        ("name", device.info().name.as_str().into()),
        ("results", Value::List(results.collect())),
    ]);
    writeln!(out, "{all}")
}
