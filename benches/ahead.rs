//! Growth that nobody waits for: what the caller pays with memory mapped ahead and without, and with shrinks that wait.
//!
//! ```text
//! cargo bench --bench ahead                              # host memory, a minute and a half
//! cargo bench --bench ahead -- --device cuda:0 --json
//! cargo bench --bench ahead -- --steps 50                # does it run?
//! ```
//!
//! The pattern is that of a decode: 64 buffers grow by 128 KiB each per step, and a step takes 10 ms. What a sequence holds
//! is given up now and then, not while the clock runs, so that 64 of them fit the device. Beside each growth the clock is read
//! twice with nothing in between, and beside each step stands how long its wait took: what the machine does to any thread
//! shows there.

#[path = "gpu/table.rs"]
#[allow(dead_code, reason = "it serves another benchmark too")]
mod table;

use std::hint::black_box;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use growspan::driver::RawStream;
use growspan::{AheadPolicy, Bytes, Device, DeviceOptions, GrowableBuffer, Quiesce, Sizing};
use table::{Bar, Outcome, Table};

const BUFFERS: usize = 64;
const TOKEN: usize = 128 << 10;
const STEP: Duration = Duration::from_millis(10);
/// What is kept ahead of each buffer: 32 steps.
const AHEAD: AheadPolicy = AheadPolicy::Bytes(Bytes::mib(4));
const THREADS: usize = 8;

struct Options {
    device: String,
    steps: usize,
    json: bool,
}

fn main() -> ExitCode {
    let mut options = Options { device: "host".to_owned(), steps: 2000, json: false };
    let mut benchmark = false;
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = |words: &mut dyn Iterator<Item = String>| words.next().unwrap_or_default();
        match word.as_str() {
            "--json" => options.json = true,
            "--device" => options.device = value(&mut words),
            "--steps" => match value(&mut words).parse() {
                Ok(steps) => options.steps = steps,
                Err(_) => return usage(),
            },
            // What cargo adds.
            "--bench" => benchmark = true,
            _ => return usage(),
        }
    }
    if !benchmark {
        // As a test: does it run?
        options.steps = options.steps.min(20);
    }
    match run(&options, benchmark) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "ahead: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    let _ = writeln!(io::stderr(), "ahead takes --device NAME, --steps N and --json");
    ExitCode::from(2)
}

fn run(options: &Options, whole: bool) -> Outcome<()> {
    let mut table = Table::new(options.json);
    table.head(&Device::named(&options.device)?.info().name);
    table.section("decode, nothing ahead");
    // The steps are for the rarest of events with memory ahead; without, every sixteenth growth is one.
    let few = options.steps.div_ceil(10);
    decode(&table, options, few, AheadPolicy::Off, [Bar::None, Bar::None])?;
    table.section("decode, 4 MiB ahead");
    decode(&table, options, options.steps, AHEAD, [Bar::AtMost(1.0), Bar::AtMost(50.0)])?;
    table.section("deferred shrink");
    deferred(&table, options, if whole { 20 } else { 2 })?;
    table.section("threads");
    threads(&table, options, if whole { 1 << 22 } else { 1 << 12 })
}

fn open(options: &Options, ahead: AheadPolicy) -> Outcome<Device> {
    let device = DeviceOptions::new().ahead(ahead).named(&options.device)?;
    device.verdict();
    Ok(device)
}

/// So many microseconds.
fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// A value that so many hundredths of all are below; `times` is sorted.
fn percentile(times: &[f64], hundredths: usize) -> f64 {
    times.get((times.len() * hundredths / 100).min(times.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

fn decode(table: &Table, options: &Options, steps: usize, ahead: AheadPolicy, bars: [Bar; 2]) -> Outcome<()> {
    let device = open(options, ahead)?;
    // Half of the memory for what the sequences hold, the rest for what is kept and ahead.
    let most = (device.memory()?.free as usize / 2 / BUFFERS / TOKEN).min(4096);
    let build = || GrowableBuffer::<u8>::builder(&device).max_len((most + 1) * TOKEN).build();
    let mut buffers = (0..BUFFERS).map(|_| build()).collect::<growspan::Result<Vec<_>>>()?;
    // They are of different age, as sequences are.
    for (n, buffer) in buffers.iter_mut().enumerate() {
        buffer.grow_to(n * most / BUFFERS * TOKEN)?;
    }
    device.wait_ahead();
    let mapped = |buffers: &[GrowableBuffer<u8>]| -> u64 {
        buffers.iter().map(GrowableBuffer::stats).map(|stats| stats.grows - stats.grows_without_calls).sum()
    };
    let mut times = Vec::with_capacity(steps * BUFFERS);
    let mut nothing = Vec::with_capacity(steps * BUFFERS);
    let mut first = Vec::with_capacity(steps);
    let mut waits = Vec::with_capacity(steps);
    let (mut steps_that_map, mut growths_that_map) = (0_u64, 0_u64);
    for _ in 0..steps {
        for buffer in &mut buffers {
            if buffer.len() + TOKEN > most * TOKEN {
                buffer.shrink_to(0, Quiesce::Device)?;
                // A new sequence begins with its prompt.
                buffer.grow_to(TOKEN)?;
            }
        }
        let before = mapped(&buffers);
        let step = Instant::now();
        for (n, buffer) in buffers.iter_mut().enumerate() {
            let start = Instant::now();
            buffer.grow_by(black_box(TOKEN))?;
            let time = us(start.elapsed());
            times.push(time);
            if n == 0 {
                first.push(time);
            }
            let start = Instant::now();
            black_box(n);
            nothing.push(us(start.elapsed()));
        }
        let by_caller = mapped(&buffers) - before;
        growths_that_map += by_caller;
        steps_that_map += u64::from(by_caller > 0);
        let wait = Instant::now();
        std::thread::sleep(STEP.saturating_sub(step.elapsed()));
        waits.push(us(wait.elapsed()) / 1e3);
    }
    times.sort_by(f64::total_cmp);
    nothing.sort_by(f64::total_cmp);
    waits.sort_by(f64::total_cmp);
    let all = times.len();
    table.row("grow_by, p50", "us", &[percentile(&times, 50)], Bar::None);
    table.row("grow_by, p99", "us", &[percentile(&times, 99)], bars[0]);
    first.sort_by(f64::total_cmp);
    // A processor that has slept for 10 ms begins slowly, whatever it is asked.
    table.row("the first of each step, p50", "us", &[percentile(&first, 50)], Bar::None);
    table.row("grow_by, max", "us", &[percentile(&times, 100)], bars[1]);
    table.row("no growth, p99", "us", &[percentile(&nothing, 99)], Bar::None);
    table.row("no growth, max", "us", &[percentile(&nothing, 100)], Bar::None);
    table.row("the longest wait for 10 ms", "ms", &[percentile(&waits, 100)], Bar::None);
    table.row(&format!("steps of {steps} in which the caller mapped"), "", &[steps_that_map as f64], Bar::None);
    table.row(&format!("growths of {all} that mapped"), "", &[growths_that_map as f64], Bar::None);
    Ok(())
}

/// Gives up 1 GiB, or what there is room for, behind work that is still running where the device has streams.
fn deferred(table: &Table, options: &Options, rounds: usize) -> Outcome<()> {
    let device = open(options, AHEAD)?;
    let most = (device.memory()?.free as usize / 4).min(1 << 30);
    let event = device.event()?;
    let (mut returned, mut back) = (Vec::new(), Vec::new());
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(2 * most).build()?;
    for _ in 0..rounds {
        buffer.grow_to(most)?;
        device.wait_ahead();
        for _ in 0..8 {
            buffer.fill_bytes_on(.., 1, RawStream::DEFAULT)?;
        }
        event.record(RawStream::DEFAULT)?;
        let start = Instant::now();
        let shrunk = buffer.shrink_to(0, Quiesce::Deferred(&event))?;
        returned.push(us(start.elapsed()));
        black_box(shrunk);
        event.wait()?;
        let passed = Instant::now();
        while !device.snapshot().bytes_retiring.is_zero() {
            std::thread::sleep(Duration::from_micros(20));
        }
        back.push(us(passed.elapsed()) / 1e3);
    }
    let size = Bytes::new(most as u64);
    // The kernel takes a gigabyte of host memory apart page by page.
    let bar = if device.info().host_visible { Bar::None } else { Bar::AtMost(5.0) };
    table.row(&format!("shrink_to of {size}, until it returns"), "us", &returned, Bar::AtMost(20.0));
    table.row("its memory is back after the event", "ms", &back, bar);
    Ok(())
}

/// Time that this thread had a processor.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is that of a local, which the call fills.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Nanoseconds of processor time per call, on so many threads at once, each with a buffer of its own.
fn each(
    threads: usize,
    calls: usize,
    build: impl Fn() -> Outcome<GrowableBuffer<u8>>,
    act: fn(&mut GrowableBuffer<u8>, usize) -> growspan::Result<usize>,
) -> Outcome<Vec<f64>> {
    let buffers = (0..threads).map(|_| build()).collect::<Outcome<Vec<_>>>()?;
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let workers: Vec<_> = buffers
            .into_iter()
            .map(|mut buffer| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    let start = thread_time();
                    let calls = act(&mut buffer, calls)?;
                    Ok((thread_time() - start).as_secs_f64() * 1e9 / calls as f64)
                })
            })
            .collect();
        let joined = workers.into_iter().map(|worker| worker.join().unwrap_or(Ok(f64::NAN)));
        joined.collect::<growspan::Result<Vec<f64>>>().map_err(Into::into)
    })
}

fn threads(table: &Table, options: &Options, calls: usize) -> Outcome<()> {
    let device = open(options, AheadPolicy::Off)?;
    let room = device.memory()?.free as usize / 4 / THREADS;
    let len = room.min(64 << 20);
    let ahead = Bytes::new(len as u64);
    let small = Sizing::Uniform(Bytes::mib(2));
    for threads in [1, THREADS] {
        let committed = || -> Outcome<_> {
            let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(4 << 20).build()?;
            buffer.grow_to(2 << 20)?;
            Ok(buffer)
        };
        let inside = each(threads, calls, committed, |buffer, calls| {
            for _ in 0..calls {
                buffer.truncate(black_box(0));
                buffer.grow_to(black_box(1 << 20))?;
            }
            Ok(calls)
        })?;
        let ready = || -> Outcome<_> {
            let builder = GrowableBuffer::<u8>::builder(&device).max_len(4 * len).sizing(small);
            let buffer = builder.ahead(AheadPolicy::Bytes(ahead)).build()?;
            device.wait_ahead();
            Ok(buffer)
        };
        // Every growth takes a chunk of what is ahead: half of it, so that nothing is asked for meanwhile.
        let taken = each(threads, len / 2 / (2 << 20), ready, |buffer, calls| {
            for _ in 0..calls {
                buffer.grow_by(black_box(2 << 20))?;
            }
            Ok(calls)
        })?;
        let what = if threads == 1 { "one thread".to_owned() } else { format!("{threads} threads, each") };
        table.row(&format!("growing inside committed memory, {what}"), "ns", &inside, Bar::AtMost(20.0));
        table.row(&format!("taking a chunk that is ahead, {what}"), "ns", &taken, Bar::AtMost(1000.0));
    }
    let what = format!("{THREADS} buffers of {ahead} in chunks of 2 MiB");
    let (mut one, mut many, mut background) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..5 {
        for (threads, policy, times) in [
            (1, AheadPolicy::Off, &mut one),
            (THREADS, AheadPolicy::Off, &mut many),
            (THREADS, AheadPolicy::Bytes(ahead), &mut background),
        ] {
            let build = || GrowableBuffer::<u8>::builder(&device).max_len(len).sizing(small).build();
            let mut buffers = (0..THREADS).map(|_| build()).collect::<growspan::Result<Vec<_>>>()?;
            device.pool().trim(Bytes::ZERO);
            let start = Instant::now();
            buffers.iter_mut().try_for_each(|buffer| buffer.grow_ahead(policy))?;
            device.wait_ahead();
            std::thread::scope(|scope| {
                let pieces = buffers.chunks_mut(THREADS / threads);
                let workers: Vec<_> = pieces.map(|buffers| scope.spawn(move || grow(buffers, len))).collect();
                workers.into_iter().try_for_each(|worker| worker.join().unwrap_or(Ok(())))
            })?;
            times.push(us(start.elapsed()) / 1e3);
        }
    }
    let ratio = |times: &[f64]| -> Vec<f64> { times.iter().zip(&one).map(|(time, one)| time / one).collect() };
    table.row(&format!("{what}, mapped by one thread"), "ms", &one, Bar::None);
    table.row("the same mapped by a thread each", "times", &ratio(&many), Bar::AtMost(1.0));
    table.row("the same mapped ahead, taken by a thread each", "times", &ratio(&background), Bar::None);
    Ok(())
}

/// Grows all of them to `len` bytes, by a chunk of 2 MiB each time.
fn grow(buffers: &mut [GrowableBuffer<u8>], len: usize) -> growspan::Result<()> {
    buffers.iter_mut().try_for_each(|buffer| (1..=len >> 21).try_for_each(|n| buffer.grow_to(n << 21)))
}
