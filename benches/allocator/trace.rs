//! A trace of allocations, replayed.
//!
//! A trace is text, an event a line: `a NUMBER BYTES` allocates a block, `f NUMBER` frees it; the number may then be used
//! again. Lines that begin with `#` are comments, of which those like `# native: reserved_peak=BYTES ns_per_op=NS` say what
//! PyTorch's own allocator made of it.

use core::alloc::Layout;
use std::collections::HashMap;
use std::time::Instant;

use growspan::{Block, Bytes, Device, DeviceMemory, Error, Result, SpanAllocator, SpanAllocatorBuilder};

use crate::{Row, bar, median};

#[derive(Clone, Copy, Debug)]
enum Event {
    /// Allocates so many bytes, as the block of this number.
    Allocate(usize, usize),
    Free(usize),
}

struct Trace {
    name: String,
    events: Vec<Event>,
    /// Block numbers are below this.
    numbers: usize,
    /// Of the comments: whose, the peak of what it reserved, nanoseconds an operation.
    peers: Vec<(String, f64, f64)>,
}

pub(crate) fn run(device: &Device, file: Option<&str>, slot: Option<Bytes>, quick: bool) -> Result<Vec<Row>> {
    let trace = match file {
        Some(file) => match std::fs::read_to_string(file) {
            Ok(text) => Trace::parse(file, &text),
            Err(error) => {
                eprintln!("{file}: {error}");
                return Ok(Vec::new());
            }
        },
        None => Trace::made_up(if quick { 2 } else { 40 }),
    };
    let live_peak = trace.live_peak();
    let against = |peers: &dyn Fn(&(String, f64, f64)) -> String| -> String {
        trace.peers.iter().map(|peer| format!("PyTorch {} {}", peer.0, peers(peer))).collect::<Vec<_>>().join(", ")
    };
    let reserved = against(&|(_, reserved, _)| format!("{:.3} times", reserved / live_peak as f64));
    let times = against(&|(_, _, ns)| format!("{ns:.0} ns"));
    let best = trace.peers.iter().map(|(_, _, ns)| *ns).fold(f64::INFINITY, f64::min);
    let mut rows = Vec::new();
    for (how, turns, build) in BUILDERS {
        let figures = measure(&trace, device, &|| build(device, slot), if quick { 1 } else { turns })?;
        let ratio = figures.committed as f64 / live_peak as f64;
        let (live, held) = (Bytes::new(live_peak), Bytes::new(figures.committed));
        rows.push(Row::new(
            format!("{} of {} events, {how}: committed at the peak", trace.name, trace.events.len()),
            format!("{held}, {ratio:.3} times the live {live}"),
            reserved.clone(),
            bar("1.05 times", ratio <= 1.05),
        ));
        rows.push(Row::new(
            "the same: time per operation, replayed again",
            format!("{:.0} ns, with {} driver calls", figures.warm, figures.calls),
            times.clone(),
            if trace.peers.is_empty() { String::new() } else { bar("under PyTorch's", figures.warm < best) },
        ));
        let cold = format!("{:.0} ns", figures.cold);
        rows.push(Row::new("the same: time per operation, the first time", cold, "", ""));
    }
    Ok(rows)
}

/// What a trace comes to on one kind of allocator.
struct Figures {
    committed: u64,
    /// Nanoseconds an operation.
    cold: f64,
    warm: f64,
    /// Of the driver, by one warm replay.
    calls: u64,
}

fn measure(
    trace: &Trace,
    device: &Device,
    build: &dyn Fn() -> Result<SpanAllocator<DeviceMemory>>,
    turns: usize,
) -> Result<Figures> {
    let (mut cold, mut warm, mut calls) = (Vec::new(), Vec::new(), 0);
    let mut committed = 0;
    for turn in 0..=turns {
        // What one replay left in the pool is nothing the next begins with.
        device.pool().trim(Bytes::ZERO);
        let allocator = build()?;
        if turn == 0 {
            committed = trace.committed_peak(&allocator)?;
        } else {
            cold.push(trace.replay(&allocator)?);
            let before = device.snapshot().driver_calls;
            warm.push(trace.replay(&allocator)?);
            calls = device.snapshot().driver_calls - before;
        }
    }
    device.pool().trim(Bytes::ZERO);
    Ok(Figures { committed, cold: median(&mut cold), warm: median(&mut warm), calls })
}

/// How an allocator is built, over a device and with the slots asked for.
type Build = fn(&Device, Option<Bytes>) -> Result<SpanAllocator<DeviceMemory>>;

/// How, how often, and by what.
const BUILDERS: [(&str, usize, Build); 2] = [
    ("packed", 5, |device, slot| with_slots(SpanAllocator::builder(device).packed(), slot)),
    // Many times slower on a card: once will do.
    ("as built without options", 1, |device, slot| with_slots(SpanAllocator::builder(device), slot)),
];

fn with_slots(builder: SpanAllocatorBuilder, slot: Option<Bytes>) -> Result<SpanAllocator<DeviceMemory>> {
    match slot {
        Some(slot) => builder.slot(slot).build_on_device(),
        None => builder.build_on_device(),
    }
}

fn layout(bytes: usize) -> Result<Layout> {
    let overflow = Error::Overflow { what: "a block", count: bytes as u64, size: 1 };
    Layout::from_size_align(bytes.max(1), 256).map_err(|_| overflow)
}

impl Trace {
    fn parse(name: &str, text: &str) -> Self {
        let mut this = Self { name: name.to_owned(), events: Vec::new(), numbers: 0, peers: Vec::new() };
        // Numbers may be anything; ours are small.
        let mut numbers: HashMap<&str, usize> = HashMap::new();
        let mut spare = Vec::new();
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                ["#", name, rest @ ..] if name.ends_with(':') => {
                    let value = |key: &str| rest.iter().find_map(|word| word.strip_prefix(key)?.parse().ok());
                    if let (Some(reserved), Some(ns)) = (value("reserved_peak="), value("ns_per_op=")) {
                        this.peers.push((name.trim_end_matches(':').to_owned(), reserved, ns));
                    }
                }
                ["a", number, bytes, ..] => {
                    let Ok(bytes) = bytes.parse() else { continue };
                    let own = spare.pop().unwrap_or(this.numbers);
                    this.numbers = this.numbers.max(own + 1);
                    numbers.insert(number, own);
                    this.events.push(Event::Allocate(own, bytes));
                }
                ["f", number, ..] => {
                    if let Some(own) = numbers.remove(number) {
                        spare.push(own);
                        this.events.push(Event::Free(own));
                    }
                }
                _ => {}
            }
        }
        this
    }

    /// What training a transformer with sequences of varying lengths asks for: weights and the optimizer's state stay;
    /// activations of each layer live until its backward pass; temporary buffers come and go.
    fn made_up(steps: usize) -> Self {
        const LAYERS: usize = 8;
        const WIDTH: usize = 512;
        const BATCH: usize = 8;
        let mut made = Made { events: Vec::new(), next: 0, spare: Vec::new() };
        for _ in 0..LAYERS {
            for size in [4 * WIDTH * WIDTH, 8 * WIDTH * WIDTH, WIDTH, 4 * WIDTH] {
                // A weight and two moments, of four bytes.
                for _ in 0..3 {
                    made.take(4 * size);
                }
            }
        }
        let mut state = 12_345_u64;
        for _ in 0..steps {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let length = 64 + (state >> 33) as usize % 960;
            let tokens = BATCH * length;
            let mut layers = Vec::new();
            for _ in 0..LAYERS {
                let mut kept =
                    vec![made.take(2 * tokens * WIDTH), made.take(6 * tokens * WIDTH), made.take(4 * tokens)];
                let scores = made.take(2 * BATCH * 8 * length * length);
                let scratch = made.take(1 << 16);
                kept.extend([made.take(2 * BATCH * 8 * length * length), made.take(2 * tokens * WIDTH)]);
                made.give([scores, scratch]);
                kept.extend([
                    made.take(8 * tokens * WIDTH),
                    made.take(8 * tokens * WIDTH),
                    made.take(2 * tokens * WIDTH),
                ]);
                layers.push(kept);
            }
            let logits = made.take(4 * tokens * 8000);
            made.give([logits]);
            let mut grads = Vec::new();
            for kept in layers.into_iter().rev() {
                let back = made.take(8 * tokens * WIDTH);
                let small = made.take(4 * tokens * WIDTH);
                grads.extend([4 * WIDTH * WIDTH, 8 * WIDTH * WIDTH, WIDTH].map(|size| made.take(4 * size)));
                made.give(kept);
                made.give([back, small]);
            }
            made.give(grads);
        }
        let numbers = made.next;
        Self { name: "a made up trace".to_owned(), events: made.events, numbers, peers: Vec::new() }
    }

    /// The most bytes that were asked for at any time.
    fn live_peak(&self) -> u64 {
        let mut sizes = vec![0; self.numbers];
        let (mut live, mut peak) = (0_u64, 0);
        for event in &self.events {
            match *event {
                Event::Allocate(number, bytes) => {
                    sizes[number] = bytes as u64;
                    live += bytes as u64;
                }
                Event::Free(number) => live -= core::mem::take(&mut sizes[number]),
            }
            peak = peak.max(live);
        }
        peak.max(1)
    }

    /// Replays the trace and returns nanoseconds per event.
    fn replay(&self, allocator: &SpanAllocator<DeviceMemory>) -> Result<f64> {
        let mut blocks: Vec<Option<(Block, Layout)>> = vec![None; self.numbers];
        let start = Instant::now();
        for event in &self.events {
            step(allocator, &mut blocks, *event)?;
        }
        let ns = start.elapsed().as_secs_f64() * 1e9 / self.events.len().max(1) as f64;
        free_all(allocator, blocks);
        Ok(ns)
    }

    /// Replays the trace and returns the most that was committed at any time, what the pool kept for it included.
    fn committed_peak(&self, allocator: &SpanAllocator<DeviceMemory>) -> Result<u64> {
        let mut blocks: Vec<Option<(Block, Layout)>> = vec![None; self.numbers];
        let mut peak = 0;
        for event in &self.events {
            step(allocator, &mut blocks, *event)?;
            if matches!(event, Event::Allocate(..)) {
                let held = allocator.figures().bytes_committed.get() + allocator.device().pool().kept().get();
                peak = peak.max(held);
            }
        }
        free_all(allocator, blocks);
        Ok(peak)
    }
}

/// A trace in the making.
struct Made {
    events: Vec<Event>,
    next: usize,
    spare: Vec<usize>,
}

impl Made {
    fn take(&mut self, bytes: usize) -> usize {
        let number = self.spare.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        self.events.push(Event::Allocate(number, bytes));
        number
    }

    fn give(&mut self, numbers: impl IntoIterator<Item = usize>) {
        for number in numbers {
            self.events.push(Event::Free(number));
            self.spare.push(number);
        }
    }
}

fn step(allocator: &SpanAllocator<DeviceMemory>, blocks: &mut [Option<(Block, Layout)>], event: Event) -> Result<()> {
    match event {
        Event::Allocate(number, bytes) => {
            let layout = layout(bytes)?;
            blocks[number] = Some((allocator.allocate(layout)?, layout));
        }
        Event::Free(number) => {
            if let Some((block, layout)) = blocks[number].take() {
                // SAFETY: live, of that layout, and used by nobody.
                unsafe { allocator.deallocate(block.ptr(), layout) };
            }
        }
    }
    Ok(())
}

fn free_all(allocator: &SpanAllocator<DeviceMemory>, blocks: Vec<Option<(Block, Layout)>>) {
    for (block, layout) in blocks.into_iter().flatten() {
        // SAFETY: live, of that layout, and used by nobody.
        unsafe { allocator.deallocate(block.ptr(), layout) };
    }
}
