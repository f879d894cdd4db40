//! What moving chunks saves: a loan against giving up and making anew, a cut against its bare copy, a warm pool.
//!
//! ```text
//! cargo bench --bench pool                                # host memory, 1 GiB
//! cargo bench --bench pool -- --device cuda:0 --gib 4     # a card
//! cargo bench --bench pool -- --json
//! ```
//!
//! What is compared takes turns in one run, and ratios are medians of the ratios of turns. The raw side of a cut is the
//! driver's own calls through the crate's driver, without pool, span or books: as many as a cut needs, for the same pieces.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use growspan::driver::host::{HostDriver, HostOptions};
use growspan::driver::{ChunkProps, Driver, RawHandle};
use growspan::{Bytes, Device, DeviceOptions, GrowableBuffer, Prewarm, Quiesce, Sizing};

#[path = "gpu/table.rs"]
mod table;

use table::{Bar, Outcome, Table, ratios};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const HELP: &str = "\
Usage: cargo bench --bench pool -- [OPTIONS]

  --device NAME   host or cuda:N [host]
  --gib N         what is lent and grown [1 on the host, 4 on a card]
  --rounds N      turns of each [7]
  --json          lines of JSON instead of a table
";

struct Args {
    device: String,
    gib: Option<u64>,
    rounds: usize,
    json: bool,
    /// Far smaller than meant: does it run?
    smoke: bool,
}

fn main() -> ExitCode {
    let result = arguments().and_then(|args| run(&args));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "pool: {error}\n\n{HELP}");
            ExitCode::FAILURE
        }
    }
}

fn arguments() -> Outcome<Args> {
    let mut args = Args { device: "host".to_owned(), gib: None, rounds: 7, json: false, smoke: true };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
        match word.as_str() {
            "--device" => args.device = value()?,
            "--gib" => args.gib = Some(value()?.parse()?),
            "--rounds" => args.rounds = value()?.parse()?,
            "--json" => args.json = true,
            // What cargo adds, unless it only tries whether benchmarks run.
            "--bench" => args.smoke = false,
            _ => return Err(format!("{word:?} is no option").into()),
        }
    }
    Ok(args)
}

fn run(args: &Args) -> Outcome<()> {
    let on_host = args.device == "host";
    let bench = Bench {
        name: args.device.clone(),
        all: if args.smoke { 32 * MIB } else { args.gib.unwrap_or(if on_host { 1 } else { 4 }) * GIB },
        cut: if args.smoke { 32 * MIB } else { GIB },
        rounds: if args.smoke { 1 } else { args.rounds.max(1) },
    };
    let mut table = Table::new(args.json);
    let device = bench.device(Bytes::ZERO)?;
    if let Some(reason) = device.verdict().reason() {
        return Err(format!("virtual memory is off: {reason}").into());
    }
    table.head(&format!("{} ({})", device.info().name, device.info().runtime));
    for (name, section) in [("loan", loan as fn(&Bench, &Table) -> Outcome<()>), ("cut", cut), ("prewarm", prewarm)] {
        table.section(name);
        // One section's trouble is not the next one's.
        if let Err(error) = section(&bench, &table) {
            table.failed(&error.to_string());
        }
    }
    Ok(())
}

struct Bench {
    name: String,
    /// What is lent and grown, in bytes.
    all: u64,
    /// The chunk that is cut.
    cut: u64,
    rounds: usize,
}

impl Bench {
    /// A device of its own, whose pool keeps so much.
    fn device(&self, keep: Bytes) -> Outcome<Device> {
        let device = DeviceOptions::new().pool_keep(keep).named(&self.name)?;
        device.verdict();
        Ok(device)
    }

    fn buffer(&self, device: &Device, sizing: Sizing) -> Outcome<GrowableBuffer<u8>> {
        let max = usize::try_from(2 * self.all.max(self.cut))?;
        Ok(GrowableBuffer::builder(device).max_len(max).sizing(sizing).build()?)
    }

    /// A driver for calls of our own.
    fn driver(&self) -> Outcome<Arc<dyn Driver>> {
        if self.name == "host" {
            return Ok(Arc::new(HostDriver::open(HostOptions::default())?));
        }
        #[cfg(feature = "cuda")]
        if let Some(ordinal) = self.name.strip_prefix("cuda:") {
            return Ok(Arc::new(growspan::driver::cuda::CudaDriver::open(ordinal.parse()?)?));
        }
        Err(format!("no raw calls for {}", self.name).into())
    }
}

/// Milliseconds of some work.
fn ms<T>(work: impl FnOnce() -> Outcome<T>) -> Outcome<(f64, T)> {
    let start = Instant::now();
    let result = work()?;
    Ok((start.elapsed().as_secs_f64() * 1e3, result))
}

/// One buffer gets what another has: lent and given back, or given up and made anew, without a pool between.
fn loan(bench: &Bench, table: &Table) -> Outcome<()> {
    let device = bench.device(Bytes::ZERO)?;
    let all = usize::try_from(bench.all)?;
    let mut lender = bench.buffer(&device, Sizing::Ladder)?;
    let mut borrower = bench.buffer(&device, Sizing::Ladder)?;
    let (mut lent, mut anew) = (Vec::new(), Vec::new());
    for round in 0..bench.rounds {
        for side in [round % 2, (round + 1) % 2] {
            lender.grow_to(all)?;
            if side == 0 {
                let (took, mut loan) = ms(|| {
                    let loan = lender.lend(0, Quiesce::Device, &mut borrower)?;
                    borrower.grow_to(all)?;
                    Ok(loan)
                })?;
                lent.push(took);
                loan.give_back(&mut borrower, &mut lender, Quiesce::Device)?;
            } else {
                let (took, ()) = ms(|| {
                    lender.shrink_to(0, Quiesce::Device)?;
                    Ok(borrower.grow_to(all)?)
                })?;
                anew.push(took);
            }
            lender.shrink_to(0, Quiesce::Device)?;
            borrower.shrink_to(0, Quiesce::Device)?;
        }
    }
    let mib = bench.all / MIB;
    table.row(&format!("{mib} MiB lent"), "ms", &lent, Bar::None);
    table.row("the same given up, released, made anew", "ms", &anew, Bar::None);
    table.row("the second by the first", "x", &ratios(&anew, &lent), Bar::AtLeast(1.0));
    Ok(())
}

/// A chunk cut at 602 of its 1024 MiB, against a copy of what lives there and the calls that a cut takes.
fn cut(bench: &Bench, table: &Table) -> Outcome<()> {
    let (whole, live) = (bench.cut, bench.cut * 602 / 1024 / (2 * MIB) * (2 * MIB));
    let device = bench.device(Bytes::ZERO)?;
    let driver = bench.driver()?;
    let pieces: Vec<u64> = (0..u64::BITS).rev().map(|bit| live & (1 << bit)).filter(|piece| *piece > 0).collect();
    let (mut ours, mut raw, mut one, mut copies) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..bench.rounds {
        // The ladder cuts into several, `Exact` makes one chunk of just the size.
        for side in 0..3 {
            match (side + round) % 3 {
                0 => ours.push(our_cut(bench, &device, Sizing::Ladder, whole, live)?),
                1 => one.push(our_cut(bench, &device, Sizing::Exact, whole, live)?),
                _ => {
                    let (took, copy) = raw_cut(&*driver, whole, &pieces)?;
                    raw.push(took);
                    copies.push(copy);
                }
            }
        }
    }
    table.row(&format!("{} MiB cut to {}", whole / MIB, live / MIB), "ms", &ours, Bar::None);
    table.row(&format!("by bare calls, for the same {} pieces", pieces.len()), "ms", &raw, Bar::None);
    table.row("of that the copy", "ms", &copies, Bar::None);
    table.row("the first by the second", "x", &ratios(&ours, &raw), Bar::AtMost(1.3));
    table.row("into one chunk of just the size", "ms", &one, Bar::None);
    Ok(())
}

/// What our exact shrink of one chunk of `whole` bytes to `live` takes.
fn our_cut(bench: &Bench, device: &Device, sizing: Sizing, whole: u64, live: u64) -> Outcome<f64> {
    // A chunk so large lies deep in a span on the ladder: it comes on loan.
    let mut source = bench.buffer(device, Sizing::Exact)?;
    source.grow_to(usize::try_from(whole)?)?;
    let mut buffer = bench.buffer(device, sizing)?;
    source.lend(0, Quiesce::Device, &mut buffer)?;
    buffer.grow_to(usize::try_from(whole)?)?;
    let (took, shrunk) = ms(|| Ok(buffer.shrink_exact(usize::try_from(live)?, Quiesce::Device)?))?;
    if buffer.committed().get() != live {
        return Err(format!("{shrunk}").into());
    }
    Ok(took)
}

/// The same by the driver's calls alone: in all, and of that the copy.
fn raw_cut(driver: &dyn Driver, whole: u64, pieces: &[u64]) -> Outcome<(f64, f64)> {
    let live: u64 = pieces.iter().sum();
    let span = driver.reserve(whole, 2 * MIB)?;
    let old = driver.create(whole, ChunkProps::PLAIN)?;
    map(driver, span, &[(old, whole)])?;
    let (took, (copy, fresh)) = ms(|| {
        driver.synchronize()?;
        let fresh = pieces.iter().map(|size| Ok((driver.create(*size, ChunkProps::PLAIN)?, *size)));
        let fresh = fresh.collect::<Outcome<Vec<_>>>()?;
        let side = driver.reserve(whole, 2 * MIB)?;
        unmap(driver, span, &[(old, whole)])?;
        map(driver, side, &[(old, whole)])?;
        map(driver, span, &fresh)?;
        // SAFETY: both are mapped with access and apart; the copy is over when this returns.
        let (copy, ()) = ms(|| Ok(unsafe { driver.copy_within(span, side, live, None) }?))?;
        unmap(driver, side, &[(old, whole)])?;
        // SAFETY: reserved above, and nothing is mapped there any more.
        unsafe { driver.free_span(side, whole) }?;
        // SAFETY: made above, mapped nowhere any more, and not used again.
        unsafe { driver.release(old) }?;
        Ok((copy, fresh))
    })?;
    unmap(driver, span, &fresh)?;
    for (handle, _) in fresh {
        // SAFETY: made above, mapped nowhere any more, and not used again.
        unsafe { driver.release(handle) }?;
    }
    // SAFETY: reserved above, and nothing is mapped there any more.
    unsafe { driver.free_span(span, whole) }?;
    Ok((took, copy))
}

fn map(driver: &dyn Driver, base: u64, chunks: &[(RawHandle, u64)]) -> Outcome<()> {
    let mut at = base;
    for (handle, size) in chunks {
        // SAFETY: the place lies in a span of this program's own where nothing is mapped, and the handle is as large.
        unsafe { driver.map(at, *size, *handle) }?;
        at += size;
    }
    // SAFETY: the chunks just mapped cover exactly this.
    Ok(unsafe { driver.set_access(base, at - base) }?)
}

fn unmap(driver: &dyn Driver, base: u64, chunks: &[(RawHandle, u64)]) -> Outcome<()> {
    let mut at = base;
    for (_, size) in chunks {
        // SAFETY: mapped just so by `map`, and the copy that touched it is over.
        unsafe { driver.unmap(at, *size) }?;
        at += size;
    }
    Ok(())
}

/// Growing from nothing where the chunks have to be made, and where they were made before.
fn prewarm(bench: &Bench, table: &Table) -> Outcome<()> {
    let device = bench.device(Bytes::new(2 * bench.all))?;
    let all = usize::try_from(bench.all)?;
    let mut buffer = bench.buffer(&device, Sizing::Ladder)?;
    let (mut cold, mut warm, mut warming) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..bench.rounds {
        for side in [round % 2, (round + 1) % 2] {
            if side == 1 {
                let (took, made) = ms(|| Ok(device.prewarm(Prewarm::span(Bytes::new(bench.all)))?))?;
                if !made.missing.is_zero() {
                    return Err(made.to_string().into());
                }
                warming.push(took);
            }
            let (took, ()) = ms(|| Ok(buffer.grow_to(all)?))?;
            if side == 1 { &mut warm } else { &mut cold }.push(took);
            buffer.shrink_to(0, Quiesce::Device)?;
            device.pool().trim(Bytes::ZERO);
        }
    }
    table.row(&format!("grown cold to {} MiB", bench.all / MIB), "ms", &cold, Bar::None);
    table.row("grown after a prewarming", "ms", &warm, Bar::None);
    table.row("the prewarming", "ms", &warming, Bar::None);
    table.row("the first by the second", "x", &ratios(&cold, &warm), Bar::AtLeast(1.0));
    Ok(())
}
