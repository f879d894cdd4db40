//! What is measured.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use growspan::driver::Driver;
use growspan::{Bytes, Device, DeviceOptions, GrowableBuffer, Quiesce, Sizing};

use crate::raw::{GIB, MIB, Raw, Sizes, Span};
use crate::table::{Bar, Outcome, Table, median, ratios};

/// A part of the benchmark; what it finds goes to the table.
pub(crate) type Section = fn(&Bench<'_>) -> Outcome<()>;

/// The sections by name, in the order that leaves the most memory untouched for those to which it matters.
pub(crate) const SECTIONS: &[(&str, Section)] = &[
    ("steps-of-1-gib", steps_of_1_gib),
    ("steps-of-2-mib", steps_of_2_mib),
    ("inside-committed", inside_committed),
    ("threads", threads),
    ("instead-of-copies", instead_of_copies),
    ("again-and-again", again_and_again),
    ("random-reads", random_reads),
    ("launches", launches),
];

/// How long the card is left alone between turns, to scrub what was released.
const REST: Duration = Duration::from_secs(3);
/// What the context, the kernels and the driver's tables may take beside a section's own memory.
const ASIDE: u64 = 3 * GIB;

/// What the sections share.
pub(crate) struct Bench<'a> {
    raw: &'a Raw,
    pub(crate) table: Table,
    /// How many times smaller than meant everything is.
    shrunk_by: u64,
}

impl<'a> Bench<'a> {
    pub(crate) fn new(raw: &'a Raw, table: Table) -> Outcome<Self> {
        let gib: u64 = match std::env::var("GROWSPAN_BENCH_GIB") {
            Ok(text) => text.parse()?,
            Err(_) => 64,
        };
        let (info, free) = (raw.driver.info(), raw.free()?);
        let device = device(Bytes::ZERO)?;
        if let Some(reason) = device.verdict().reason() {
            return Err(format!("virtual memory is off: {reason}").into());
        }
        let figures = format!("{} ({}), {} MiB free", info.name, info.runtime, free / MIB);
        let shrunk_by = (64 / gib.clamp(1, 64)).max(1);
        match shrunk_by {
            1 => table.head(&figures),
            n => table.head(&format!("{figures}; everything {n} times smaller than meant")),
        }
        Ok(Self { raw, table, shrunk_by })
    }

    /// A size of the plan, as it is in this run.
    fn sized(&self, bytes: u64) -> u64 {
        bytes / self.shrunk_by
    }

    /// The most of `bytes` of which `times` fit the card at once.
    fn fitting(&self, bytes: u64, times: u64) -> Outcome<u64> {
        let bytes = self.sized(bytes);
        let free = self.raw.free()?.saturating_sub(ASIDE / self.shrunk_by);
        let fits = (free / times / GIB * GIB).max(free / times / (64 * MIB) * (64 * MIB) * u64::from(bytes < GIB));
        match bytes.min(fits) {
            0 => Err(format!("no room for {times} times {} MiB", bytes / MIB).into()),
            fits => Ok(fits),
        }
    }

    fn rest(&self) {
        std::thread::sleep(REST / u32::try_from(self.shrunk_by).unwrap_or(1));
    }
}

/// A device of its own, whose pool keeps so much.
fn device(keep: Bytes) -> Outcome<Device> {
    let device = DeviceOptions::new().pool_keep(keep).cuda(0)?;
    device.verdict();
    Ok(device)
}

fn buffer(device: &Device, bytes: u64, sizing: Sizing) -> Outcome<GrowableBuffer<u8>> {
    Ok(GrowableBuffer::builder(device).max_len(usize::try_from(bytes)?).sizing(sizing).build()?)
}

/// Milliseconds of some work.
fn ms(work: impl FnOnce() -> Outcome<()>) -> Outcome<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// Grows a buffer to `to` bytes in steps.
fn grow(buffer: &mut GrowableBuffer<u8>, to: u64, step: u64) -> Outcome<f64> {
    let steps = to / step;
    ms(|| (1..=steps).try_for_each(|n| Ok(buffer.grow_to((n * step) as usize)?)))
}

/// Grows a span of raw calls just so.
fn grow_raw(span: &mut Span<'_>, to: u64, step: u64) -> Outcome<f64> {
    let steps = to / step;
    ms(|| (1..=steps).try_for_each(|n| span.grow_to(n * step)))
}

fn shrink(buffer: &mut GrowableBuffer<u8>) -> Outcome<f64> {
    ms(|| Ok(buffer.shrink_to(0, Quiesce::Device).map(drop)?))
}

/// From nothing to 64 GiB in steps of 1 GiB, new chunks and chunks from the pool, against the same calls.
fn steps_of_1_gib(bench: &Bench<'_>) -> Outcome<()> {
    let (all, step) = (bench.fitting(64 * GIB, 2)?, bench.sized(GIB));
    let gib = all as f64 / GIB as f64;
    let device = device(Bytes::ZERO)?;
    let mut buffer = buffer(&device, all, Sizing::Ladder)?;
    let mut span = Span::reserve(bench.raw, all, Sizes::Ladder)?;
    // Ours and the raw calls': new chunks, unmapped, mapped again, all released.
    let mut times: [[Vec<f64>; 4]; 2] = Default::default();
    for round in 0..6 {
        if round > 0 {
            bench.rest();
        }
        // Both hold their memory until both have it, so that neither gets what the other had.
        for side in [round % 2, (round + 1) % 2] {
            let took = if side == 0 { grow(&mut buffer, all, step)? } else { grow_raw(&mut span, all, step)? };
            times[side][0].push(took);
        }
        device.pool().set_keep_limit(Bytes::new(all));
        for side in [round % 2, (round + 1) % 2] {
            let took = if side == 0 {
                [shrink(&mut buffer)?, grow(&mut buffer, all, step)?]
            } else {
                [ms(|| span.unmap())?, grow_raw(&mut span, all, step)?]
            };
            times[side][1].push(took[0]);
            times[side][2].push(took[1]);
        }
        device.pool().set_keep_limit(Bytes::ZERO);
        times[0][3].push(shrink(&mut buffer)?);
        times[1][3].push(ms(|| span.release())?);
    }
    buffer.close()?;
    let table = &bench.table;
    let [ours, raw] = &times;
    let per_gib = |times: &[f64]| -> Vec<f64> { times.iter().map(|ms| ms / gib).collect() };
    let title = format!("0 to {gib} GiB");
    table.row(&format!("{title}, first turn"), "ms per GiB", &per_gib(&ours[0][..1]), Bar::AtMost(0.30));
    table.row("the same by raw calls", "ms per GiB", &per_gib(&raw[0][..1]), Bar::None);
    table.row("ratio to raw calls, first turn", "x", &ratios(&ours[0][..1], &raw[0][..1]), Bar::AtMost(1.10));
    table.row("later turns, memory to be scrubbed", "ms per GiB", &per_gib(&ours[0][1..]), Bar::None);
    table.row("the same by raw calls", "ms per GiB", &per_gib(&raw[0][1..]), Bar::None);
    table.row("ratio to raw calls, later turns", "x", &ratios(&ours[0][1..], &raw[0][1..]), Bar::AtMost(1.10));
    table.row("shrink to the pool", "ms", &ours[1], Bar::None);
    table.row("the same by raw calls", "ms", &raw[1], Bar::None);
    table.row("grow again from the pool", "ms", &ours[2], Bar::None);
    table.row("ratio to raw calls", "x", &ratios(&ours[2], &raw[2]), Bar::None);
    table.row("first growth by growth again, first turn", "x", &ratios(&ours[0][..1], &ours[2]), Bar::AtLeast(1.3));
    table.row("first growth by growth again, later turns", "x", &ratios(&ours[0][1..], &ours[2][1..]), Bar::None);
    table.row("shrink and release all", "ms", &ours[3], Bar::None);
    table.row("the same by raw calls", "ms", &raw[3], Bar::None);
    Ok(())
}

/// From nothing to 16 GiB in steps of 2 MiB, on the ladder and in chunks of 2 MiB, against the same calls.
fn steps_of_2_mib(bench: &Bench<'_>) -> Outcome<()> {
    let (all, step) = (bench.fitting(16 * GIB, 4)?, 2 * MIB);
    let gib = all as f64 / GIB as f64;
    let device = device(Bytes::ZERO)?;
    let fixed = Sizing::Uniform(Bytes::new(step));
    let mut times: [Vec<f64>; 4] = Default::default();
    for round in 0..5 {
        // Longer, for the sake of a first turn like that of a fresh card; a run of this section alone has one.
        bench.rest();
        bench.rest();
        let mut ours = [buffer(&device, all, Sizing::Ladder)?, buffer(&device, all, fixed)?];
        let raw = bench.raw;
        let mut spans = [Span::reserve(raw, all, Sizes::Ladder)?, Span::reserve(raw, all, Sizes::Fixed(step))?];
        for turn in 0..4 {
            // The ladder first, while memory that needs no scrubbing lasts; ours and theirs in changing order.
            let (kind, side) = (turn / 2, (turn + round) % 2);
            let took =
                if side == 0 { grow(&mut ours[kind], all, step)? } else { grow_raw(&mut spans[kind], all, step)? };
            times[2 * kind + side].push(took / gib);
        }
        for buffer in ours {
            buffer.close()?;
        }
    }
    let table = &bench.table;
    let [ours, raw, fixed, fixed_raw] = &times;
    let title = format!("0 to {gib} GiB");
    table.row(&format!("{title}, ladder, first turn"), "ms per GiB", &ours[..1], Bar::AtMost(0.8));
    table.row(&format!("{title}, ladder, all turns"), "ms per GiB", ours, Bar::AtMost(0.8));
    table.row("the same by raw calls", "ms per GiB", raw, Bar::None);
    table.row("ratio to raw calls", "x", &ratios(ours, raw), Bar::None);
    table.row("chunks of 2 MiB throughout", "ms per GiB", fixed, Bar::None);
    table.row("the same by raw calls", "ms per GiB", fixed_raw, Bar::None);
    table.row("ratio to raw calls", "x", &ratios(fixed, fixed_raw), Bar::None);
    table.row("chunks of 2 MiB by the ladder", "x", &ratios(fixed, ours), Bar::None);
    Ok(())
}

/// Growing where there is memory already.
fn inside_committed(bench: &Bench<'_>) -> Outcome<()> {
    const GROWTHS: usize = 1_000_000;
    let device = device(Bytes::ZERO)?;
    let mut buffer = buffer(&device, GIB, Sizing::Ladder)?;
    buffer.grow_to(64 << 20)?;
    let mut times = Vec::new();
    for _ in 0..15 {
        buffer.truncate(0);
        let start = Instant::now();
        for n in 1..=GROWTHS {
            buffer.grow_to(black_box(n))?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e9 / GROWTHS as f64);
    }
    bench.table.row("a growth inside committed memory", "ns", &times, Bar::AtMost(50.0));
    Ok(buffer.close()?)
}

/// Eight spans of 64 MiB in chunks of 2 MiB, by one thread and by a thread each, against the same calls.
fn threads(bench: &Bench<'_>) -> Outcome<()> {
    const SPANS: usize = 8;
    let (all, step) = (64 * MIB, 2 * MIB);
    let (device, raw) = (device(Bytes::ZERO)?, bench.raw);
    let ours = || -> Outcome<()> {
        let mut buffer = buffer(&device, all, Sizing::Uniform(Bytes::new(step)))?;
        grow(&mut buffer, all, step)?;
        Ok(buffer.close()?)
    };
    // Ours by one thread and by a thread each, then the raw calls.
    let mut times: [Vec<f64>; 4] = Default::default();
    for round in 0..9 {
        for turn in 0..4 {
            let kind = (turn + round) % 4;
            let threads = [1, SPANS][kind % 2];
            let took = at_once(threads, || {
                for _ in 0..SPANS / threads {
                    match kind / 2 {
                        0 => ours()?,
                        _ => {
                            raw.enter()?;
                            grow_raw(&mut Span::reserve(raw, all, Sizes::Fixed(step))?, all, step)?;
                        }
                    }
                }
                Ok(())
            })?;
            times[kind].push(took);
        }
    }
    let table = &bench.table;
    let [ours, ours_each, raw, raw_each] = &times;
    table.row("8 times 64 MiB in chunks of 2 MiB and back, by one thread", "ms", ours, Bar::None);
    table.row("the same by raw calls", "ms", raw, Bar::None);
    table.row("by a thread each, to one thread", "x", &ratios(ours_each, ours), Bar::None);
    table.row("the same by raw calls", "x", &ratios(raw_each, raw), Bar::None);
    table.row("by a thread each, ratio to raw calls", "x", &ratios(ours_each, raw_each), Bar::AtMost(1.10));
    Ok(())
}

/// Milliseconds until all of so many threads have done their work.
fn at_once(threads: usize, work: impl Fn() -> Outcome<()> + Sync) -> Outcome<f64> {
    ms(|| {
        std::thread::scope(|scope| {
            let work = || work().map_err(|error| error.to_string());
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Ok(())))
        })
        .map_err(Into::into)
    })
}

/// 4 GiB in steps of 64 MiB that keep what is there, against allocating anew, copying and freeing.
fn instead_of_copies(bench: &Bench<'_>) -> Outcome<()> {
    let (all, step) = (bench.sized(4 * GIB), bench.sized(64 * MIB).max(2 * MIB));
    let steps = all / step;
    let device = device(Bytes::ZERO)?;
    let raw = &bench.raw.driver;
    let before = raw.memory()?.free;
    let taken = |most: &mut u64| -> Outcome<()> {
        *most = (*most).max(before.saturating_sub(raw.memory()?.free));
        Ok(())
    };
    // Once with marks in every step, to see that they stay, and with an eye on the memory; not timed.
    let (mut most, mut most_copied) = (0, 0);
    let mut ours = buffer(&device, all, Sizing::Ladder)?;
    for n in 0..steps {
        ours.grow_to(((n + 1) * step) as usize)?;
        ours.copy_in((n * step) as usize, &[n as u8 + 1])?;
        taken(&mut most)?;
    }
    for n in 0..steps {
        let mut mark = [0];
        ours.copy_out((n * step) as usize, &mut mark)?;
        if mark[0] != n as u8 + 1 {
            return Err(format!("the mark of step {n} is {}", mark[0]).into());
        }
    }
    ours.close()?;
    copy_growing(raw, step, steps, |_| taken(&mut most_copied))?;

    let (mut times, mut copied, mut again) = (Vec::new(), Vec::new(), Vec::new());
    let keeping = self::device(Bytes::new(2 * all))?;
    for round in 0..11 {
        // The same from the pool, which the first round fills.
        let mut buffer = buffer(&keeping, all, Sizing::Ladder)?;
        let took = grow(&mut buffer, all, step)?;
        again.extend((round > 0).then_some(took));
        buffer.close()?;
    }
    keeping.pool().trim(Bytes::ZERO);
    for round in 0..10 {
        for side in [round % 2, (round + 1) % 2] {
            if side == 0 {
                let mut buffer = buffer(&device, all, Sizing::Ladder)?;
                times.push(grow(&mut buffer, all, step)?);
                buffer.close()?;
            } else {
                copied.push(ms(|| copy_growing(raw, step, steps, |_| Ok(())))?);
            }
        }
    }
    let table = &bench.table;
    let by_size = |most: u64| [most as f64 / all as f64];
    table.row(&format!("{} MiB in steps of {}", all / MIB, step / MIB), "ms", &times, Bar::None);
    // The copies take memory many times over: only the first turn finds it clean.
    table.row("the same, first turn, clean memory", "ms", times.get(..1).unwrap_or_default(), Bar::None);
    table.row("the same from the pool", "ms", &again, Bar::None);
    table.row("by cuMemAlloc, copy, free", "ms", &copied, Bar::None);
    table.row("the second by the first", "x", &ratios(&copied, &times), Bar::AtLeast(20.0));
    table.row("peak memory by the size", "x", &by_size(most), Bar::AtMost(1.05));
    table.row("peak memory by the size, with copies", "x", &by_size(most_copied), Bar::None);
    Ok(())
}

/// Grows as one does without virtual memory. `look` is called when the old block and the new one are both there.
fn copy_growing(raw: &impl Driver, step: u64, steps: u64, mut look: impl FnMut(u64) -> Outcome<()>) -> Outcome<()> {
    let mut block = raw.allocate(step)?;
    for n in 1..steps {
        let larger = raw.allocate((n + 1) * step)?;
        // SAFETY: both blocks are alive and at least as large; the copy is over when this returns.
        unsafe { raw.copy_within(larger, block, n * step, None) }?;
        look(n)?;
        // SAFETY: the block is this function's own, and what was queued on it is over.
        unsafe { raw.free(block, n * step) }?;
        block = larger;
    }
    // SAFETY: as above.
    Ok(unsafe { raw.free(block, steps * step) }?)
}

/// 100 GiB grown and shrunk ten times in a row, with a pool and without.
fn again_and_again(bench: &Bench<'_>) -> Outcome<()> {
    let all = bench.fitting(100 * GIB, 1)?;
    let mut cycles: [[Vec<f64>; 2]; 2] = Default::default();
    for (kept, keep) in [Bytes::new(all + all / 10), Bytes::ZERO].into_iter().enumerate() {
        let device = device(keep)?;
        let mut buffer = buffer(&device, all, Sizing::Ladder)?;
        for _ in 0..10 {
            cycles[kept][0].push(grow(&mut buffer, all, all)?);
            cycles[kept][1].push(shrink(&mut buffer)?);
        }
        buffer.close()?;
        device.pool().trim(Bytes::ZERO);
    }
    let table = &bench.table;
    let [pooled, released] = &cycles;
    let title = format!("{} GiB", all as f64 / GIB as f64);
    let both = |[grow, shrink]: &[Vec<f64>; 2]| -> Vec<f64> { grow.iter().zip(shrink).map(|(a, b)| a + b).collect() };
    let rows = [("pool kept", pooled), ("everything released", released)];
    for (name, [grown, shrunk]) in rows {
        table.row(&format!("{title}, {name}: first growth"), "ms", &grown[..1], Bar::None);
        table.row(&format!("{title}, {name}: growths after it"), "ms", &grown[1..], Bar::None);
        table.row(&format!("{title}, {name}: shrinks"), "ms", shrunk, Bar::None);
    }
    let faster = ratios(&released[0][1..], &pooled[0][1..]);
    table.row("growth after the first, released by kept", "x", &faster, Bar::AtLeast(8.0));
    let faster = ratios(&both(released)[1..], &both(pooled)[1..]);
    table.row("growth and shrink after the first, released by kept", "x", &faster, Bar::AtLeast(8.0));
    Ok(())
}

/// Random reads over 32 GiB on the ladder, in one block and in chunks of 2 MiB.
fn random_reads(bench: &Bench<'_>) -> Outcome<()> {
    // A power of two, for the kernel.
    let all = 1 << bench.fitting(32 * GIB, 3)?.ilog2();
    let kernels = bench.raw.kernels()?;
    let device = device(Bytes::ZERO)?;
    let mut ladder = buffer(&device, all, Sizing::Ladder)?;
    let mut small = buffer(&device, all, Sizing::Uniform(Bytes::mib(2)))?;
    ladder.grow_zeroed(all as usize, None)?;
    small.grow_zeroed(all as usize, None)?;
    let block = Block { raw: &bench.raw.driver, at: bench.raw.driver.allocate(all)?, bytes: all };
    // SAFETY: the block is this function's own, and the fill is over when this returns.
    unsafe { block.raw.fill(block.at, 0, all, None) }?;
    let places = [block.at, ladder.device_ptr(), small.device_ptr()];
    let mut times: [Vec<f64>; 3] = Default::default();
    for round in 0..24 {
        for turn in 0..3 {
            let which = (turn + round) % 3;
            let took = kernels.random_reads(places[which], all)?;
            // The first rounds fill the caches of addresses and wake the card's clocks up.
            if round >= 3 {
                times[which].push(took);
            }
        }
    }
    drop(block);
    ladder.close()?;
    small.close()?;
    let table = &bench.table;
    let [block, ladder, small] = &times;
    let title = format!("64 Mi reads of 8 bytes over {} GiB", all as f64 / GIB as f64);
    table.row(&format!("{title}, one cuMemAlloc"), "ms", block, Bar::None);
    table.row("the ladder", "ms", ladder, Bar::None);
    table.row("chunks of 2 MiB", "ms", small, Bar::None);
    table.row("ladder by cuMemAlloc", "x", &ratios(ladder, block), Bar::AtMost(1.02));
    table.row("chunks of 2 MiB by cuMemAlloc", "x", &ratios(small, block), Bar::None);
    Ok(())
}

/// A block of the driver's, freed on drop.
struct Block<'a, D: Driver> {
    raw: &'a D,
    at: u64,
    bytes: u64,
}

impl<D: Driver> Drop for Block<'_, D> {
    fn drop(&mut self) {
        // SAFETY: the block is this value's own; every kernel that reads it was waited for.
        let _ = unsafe { self.raw.free(self.at, self.bytes) };
    }
}

/// What a kernel launch takes, alone and beside a thread that maps and unmaps without pause.
fn launches(bench: &Bench<'_>) -> Outcome<()> {
    const LAUNCHES: usize = 20_000;
    let kernels = bench.raw.kernels()?;
    let measure = || -> Outcome<[f64; 2]> {
        let mut times = Vec::with_capacity(LAUNCHES);
        for n in 0..LAUNCHES {
            let start = Instant::now();
            kernels.nothing()?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
            // The queue never fills up.
            if n % 64 == 63 {
                bench.raw.driver.synchronize()?;
            }
        }
        times.sort_by(f64::total_cmp);
        Ok([median(&times), times[LAUNCHES * 99 / 100]])
    };
    measure()?;
    let mut alone: [Vec<f64>; 2] = Default::default();
    let mut beside: [Vec<f64>; 2] = Default::default();
    let mut cycles = 0;
    for _ in 0..5 {
        let [p50, p99] = measure()?;
        alone[0].push(p50);
        alone[1].push(p99);
        let (running, stop) = (AtomicBool::new(false), AtomicBool::new(false));
        let (measured, mapped) = std::thread::scope(|threads| {
            let mapper = threads.spawn(|| {
                let result = map_until(&running, &stop).map_err(|error| error.to_string());
                running.store(true, Relaxed);
                result
            });
            while !running.load(Relaxed) {
                std::thread::yield_now();
            }
            let measured = measure();
            stop.store(true, Relaxed);
            (measured, mapper.join())
        });
        cycles += mapped.map_err(|_| "the mapping thread panicked")??;
        let [p50, p99] = measured?;
        beside[0].push(p50);
        beside[1].push(p99);
    }
    let table = &bench.table;
    table.row("launch alone, p50", "us", &alone[0], Bar::None);
    table.row("launch alone, p99", "us", &alone[1], Bar::None);
    table.row(&format!("beside {cycles} cycles of 16 chunks, p50"), "us", &beside[0], Bar::None);
    table.row("the same, p99", "us", &beside[1], Bar::None);
    Ok(())
}

/// Maps 16 chunks one by one and unmaps them, over and over; counts how often.
fn map_until(running: &AtomicBool, stop: &AtomicBool) -> Outcome<u64> {
    let device = device(Bytes::gib(1))?;
    let mut buffer = buffer(&device, GIB, Sizing::Uniform(Bytes::mib(2)))?;
    let mut cycles = 0;
    while !stop.load(Relaxed) {
        grow(&mut buffer, 32 * MIB, 2 * MIB)?;
        // SAFETY: no work of the device touches the buffer.
        buffer.shrink_to(0, unsafe { Quiesce::already_idle() })?;
        running.store(true, Relaxed);
        cycles += 1;
    }
    Ok(cycles)
}
