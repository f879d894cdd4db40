//! A small block allocated and freed, by one thread and by two.

use core::alloc::Layout;
use core::hint::black_box;
use std::alloc::{alloc, dealloc};
use std::sync::Barrier;
use std::time::Instant;

use growspan::{Block, Device, DeviceMemory, Result, SpanAllocator};

use crate::{Row, bar, median};

/// Pairs in one timing.
const BATCH: usize = 4096;

pub(crate) fn run(device: &Device, quick: bool) -> Result<Vec<Row>> {
    let batches = if quick { 20 } else { 2000 };
    let allocator = SpanAllocator::builder(device).build_on_device()?;
    let mut rows = Vec::new();
    for (name, sizes) in [("256 bytes", [256; 8]), ("16 bytes to 8 KiB", [16, 64, 96, 300, 777, 1500, 4096, 8192])] {
        let layouts = sizes.map(layout);
        let one = on_threads(1, batches, || SpanPairs::new(&allocator), &layouts);
        let two = on_threads(2, batches, || SpanPairs::new(&allocator), &layouts);
        let global = on_threads(1, batches, || Global, &layouts);
        let global_two = on_threads(2, batches, || Global, &layouts);
        rows.push(Row::new(
            format!("allocate and free {name}, one thread"),
            format!("{one:.1} ns"),
            format!("malloc {global:.1} ns"),
            bar("under 60 ns", one < 60.0),
        ));
        rows.push(Row::new(
            format!("the same, each of two threads ({name})"),
            format!("{two:.1} ns, {:.2} times", two / one),
            format!("malloc {global_two:.1} ns"),
            bar("1.5 times one thread's", two <= 1.5 * one),
        ));
        let (one, two) = (
            on_threads(1, batches, || Churn::new(&allocator), &layouts),
            on_threads(2, batches, || Churn::new(&allocator), &layouts),
        );
        rows.push(Row::new(
            format!("one of 1000 live blocks replaced ({name})"),
            format!("{one:.1} ns; two threads {two:.1} ns each"),
            "",
            bar("under 60 ns", one < 60.0),
        ));
    }
    Ok(rows)
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 16).unwrap_or(Layout::new::<u8>())
}

trait Pairs {
    fn pair(&mut self, layout: Layout);
}

struct SpanPairs<'a>(&'a SpanAllocator<DeviceMemory>);

impl<'a> SpanPairs<'a> {
    fn new(allocator: &'a SpanAllocator<DeviceMemory>) -> Self {
        Self(allocator)
    }
}

impl Pairs for SpanPairs<'_> {
    #[inline]
    fn pair(&mut self, layout: Layout) {
        if let Ok(block) = self.0.allocate(layout) {
            let block = black_box(block);
            // SAFETY: just allocated with this layout; nothing uses it.
            unsafe { self.0.deallocate(block.ptr(), layout) };
        }
    }
}

/// Each pair frees an old block, another than it allocates.
struct Churn<'a> {
    allocator: &'a SpanAllocator<DeviceMemory>,
    live: Vec<Option<(Block, Layout)>>,
    next: usize,
}

impl<'a> Churn<'a> {
    fn new(allocator: &'a SpanAllocator<DeviceMemory>) -> Self {
        Self { allocator, live: vec![None; 1000], next: 0 }
    }
}

impl Pairs for Churn<'_> {
    #[inline]
    fn pair(&mut self, layout: Layout) {
        // 389 and 1000 have no common divisor: all places come in turn, far from each other.
        self.next = (self.next + 389) % 1000;
        let fresh = self.allocator.allocate(layout).ok().map(|block| (block, layout));
        let old = self.live.get_mut(self.next).and_then(|place| core::mem::replace(place, fresh));
        if let Some((block, layout)) = old {
            // SAFETY: live, of that layout, and used by nobody.
            unsafe { self.allocator.deallocate(block.ptr(), layout) };
        }
    }
}

impl Drop for Churn<'_> {
    fn drop(&mut self) {
        for (block, layout) in self.live.drain(..).flatten() {
            // SAFETY: live, of that layout, and used by nobody.
            unsafe { self.allocator.deallocate(block.ptr(), layout) };
        }
    }
}

struct Global;

impl Pairs for Global {
    #[inline]
    fn pair(&mut self, layout: Layout) {
        // SAFETY: the layout has a size.
        let block = black_box(unsafe { alloc(layout) });
        // SAFETY: just allocated with this layout; nothing uses it.
        unsafe { dealloc(block, layout) };
    }
}

/// Nanoseconds per pair on each of so many threads at once, in the median of all batches of the slowest.
fn on_threads<P: Pairs>(threads: usize, batches: usize, make: impl Fn() -> P + Sync, layouts: &[Layout; 8]) -> f64 {
    let barrier = Barrier::new(threads);
    let medians: Vec<f64> = std::thread::scope(|scope| {
        let work = || {
            let mut pairs = make();
            let mut times = Vec::with_capacity(batches);
            barrier.wait();
            for _ in 0..batches {
                let start = Instant::now();
                for n in 0..BATCH {
                    pairs.pair(black_box(layouts[n % 8]));
                }
                times.push(start.elapsed().as_secs_f64() * 1e9 / BATCH as f64);
            }
            median(&mut times)
        };
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        handles.into_iter().filter_map(|handle| handle.join().ok()).collect()
    });
    medians.into_iter().fold(0.0, f64::max)
}
