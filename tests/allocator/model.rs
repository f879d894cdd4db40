//! Blocks against a model: where they lie, how they are aligned, what they hold.

use core::alloc::Layout;
use core::ptr::NonNull;
use std::collections::BTreeMap;

use growspan::{Block, RawAllocator, SpanAllocator};

use crate::drivers::worlds;
use crate::world::{Dice, World};
use crate::{GRANULE, builder, on_device};

/// A live block, and the number that its contents count up from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Live {
    pub(crate) block: Block,
    pub(crate) layout: Layout,
    seed: usize,
}

/// All live blocks of an allocator.
pub(crate) struct Model<A> {
    pub(crate) allocator: A,
    pub(crate) live: Vec<Live>,
    next_seed: usize,
    what: String,
}

/// What a block of this seed holds.
fn pattern(seed: usize, range: core::ops::Range<usize>) -> Vec<u8> {
    range.map(|n| (n.wrapping_mul(31) ^ (n >> 8) ^ seed) as u8 | 1).collect()
}

/// The parts of so many bytes that are looked at: all of few, the ends of many and a window in every granule.
fn windows(len: usize) -> Vec<core::ops::Range<usize>> {
    if len <= 2048 {
        return core::iter::once(0..len).filter(|all| !all.is_empty()).collect();
    }
    let inner = (512..len - 512).step_by(GRANULE / 2).map(|at| at..at + 16);
    core::iter::once(0..512).chain(inner).chain(core::iter::once(len - 512..len)).collect()
}

fn at(block: Block, offset: usize) -> NonNull<u8> {
    block.place(offset).unwrap()
}

impl<A: RawAllocator> Model<A> {
    pub(crate) fn new(allocator: A, what: impl Into<String>) -> Self {
        Self { allocator, live: Vec::new(), next_seed: 1, what: what.into() }
    }

    fn read(&self, block: Block, range: core::ops::Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; range.len()];
        // SAFETY: the range lies within a live block of ours.
        unsafe { self.allocator.copy_out(&mut bytes, at(block, range.start)).unwrap() };
        bytes
    }

    fn write(&self, block: Block, seed: usize) {
        for window in windows(block.len()) {
            // SAFETY: the window lies within a live block of ours.
            unsafe { self.allocator.copy_in(at(block, window.start), &pattern(seed, window.clone())).unwrap() };
        }
    }

    /// That a block holds the first `len` bytes of its pattern.
    fn check_contents(&self, live: Live, len: usize) {
        for window in windows(live.layout.size()).into_iter().filter(|window| window.start < len) {
            let window = window.start..window.end.min(len);
            let expected = pattern(live.seed, window.clone());
            assert!(self.read(live.block, window.clone()) == expected, "{}: {live:?} changed at {window:?}", self.what);
        }
    }

    fn check_zero(&self, block: Block, range: core::ops::Range<usize>) {
        for window in windows(range.len()) {
            let bytes = self.read(block, range.start + window.start..range.start + window.end);
            let stale = bytes.iter().filter(|byte| **byte != 0).count();
            assert_eq!(stale, 0, "{}: stale bytes in {block:?} at {window:?}", self.what);
        }
    }

    /// That a new place fits its layout and meets no other block.
    fn check_place(&self, block: Block, layout: Layout) {
        assert_eq!(block.len(), layout.size(), "{}", self.what);
        let start = block.device_ptr();
        assert!(start.is_multiple_of(layout.align() as u64), "{}: {start:#x} for {layout:?}", self.what);
        let end = start + block.len() as u64;
        for other in &self.live {
            let (from, to) = (other.block.device_ptr(), other.block.device_ptr() + other.block.len() as u64);
            assert!(end <= from || to <= start || block.is_empty(), "{}: {block:?} meets {other:?}", self.what);
        }
    }

    /// That all blocks hold what they should.
    pub(crate) fn check_all(&self) {
        for live in &self.live {
            self.check_contents(*live, live.layout.size());
        }
        let starts: BTreeMap<u64, usize> =
            self.live.iter().map(|live| (live.block.device_ptr(), live.layout.size())).collect();
        let pairs = starts.iter().zip(starts.iter().skip(1));
        for ((from, len), (next, _)) in pairs {
            assert!(from + *len as u64 <= *next, "{}", self.what);
        }
    }

    fn adopt(&mut self, block: Block, layout: Layout) {
        let seed = self.next_seed;
        self.next_seed += 1;
        self.write(block, seed);
        self.live.push(Live { block, layout, seed });
    }

    pub(crate) fn allocate(&mut self, layout: Layout) -> growspan::Result<()> {
        let block = self.allocator.allocate(layout)?;
        self.check_place(block, layout);
        self.adopt(block, layout);
        Ok(())
    }

    pub(crate) fn allocate_zeroed(&mut self, layout: Layout) -> growspan::Result<()> {
        let block = self.allocator.allocate_zeroed(layout)?;
        self.check_place(block, layout);
        self.check_zero(block, 0..layout.size());
        self.adopt(block, layout);
        Ok(())
    }

    pub(crate) fn free(&mut self, number: usize) {
        let live = self.live.swap_remove(number);
        self.check_contents(live, live.layout.size());
        // SAFETY: live, of that layout, and used by nobody.
        unsafe { self.allocator.deallocate(live.block.ptr(), live.layout) };
    }

    /// Grows or shrinks a block; its contents stay as far as both reach.
    pub(crate) fn resize(&mut self, number: usize, new: Layout, zeroed: bool) -> growspan::Result<()> {
        let old = self.live[number];
        let (at, from) = (old.block.ptr(), old.layout.size());
        let result = match () {
            // SAFETY: live, of that layout, and used by nobody; the new layout is smaller.
            () if new.size() < from => unsafe { self.allocator.shrink(at, old.layout, new) },
            // SAFETY: the same; the new layout is no smaller.
            () if zeroed => unsafe { self.allocator.grow_zeroed(at, old.layout, new) },
            // SAFETY: as above.
            () => unsafe { self.allocator.grow(at, old.layout, new) },
        };
        let block = match result {
            Ok(block) => block,
            Err(error) => {
                self.check_contents(old, from);
                return Err(error);
            }
        };
        let live = self.live.swap_remove(number);
        self.check_place(block, new);
        // What was written of the old block, as far as the new one reaches.
        self.check_contents(Live { block, ..live }, from.min(new.size()));
        if zeroed && new.size() > from {
            self.check_zero(block, from..new.size());
        }
        self.adopt(block, new);
        Ok(())
    }

    pub(crate) fn free_all(&mut self) {
        while !self.live.is_empty() {
            self.free(self.live.len() - 1);
        }
    }
}

pub(crate) fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

/// A size from one of the kinds of blocks: none, small, of a page or so, of a range, and with a span of their own.
fn a_size(dice: &mut Dice) -> usize {
    match dice.roll(16) {
        0 => 0,
        1..=7 => 1 + dice.roll(600),
        8..=10 => 1 + dice.roll(20 << 10),
        11..=13 => (16 << 10) + dice.roll(48 << 10),
        _ => GRANULE + dice.roll(5 * GRANULE),
    }
}

/// A number below one of these, drawn too.
pub(crate) fn below(dice: &mut Dice, bounds: &[usize]) -> usize {
    let bound = bounds[dice.roll(bounds.len())];
    dice.roll(bound)
}

fn live_one_life<A: RawAllocator>(model: &mut Model<A>, dice: &mut Dice, steps: usize, trim: impl Fn()) {
    for step in 0..steps {
        let new = layout(a_size(dice), 1 << dice.roll(13));
        let many = model.live.len() > 60;
        match dice.roll(10) {
            0..=2 if !many => model.allocate(new).unwrap(),
            3..=4 if !many => model.allocate_zeroed(new).unwrap(),
            5..=6 if !model.live.is_empty() => model.free(dice.roll(model.live.len())),
            7..=8 if !model.live.is_empty() => {
                let number = dice.roll(model.live.len());
                model.resize(number, new, dice.roll(2) == 0).unwrap();
            }
            9 if dice.roll(8) == 0 => trim(),
            _ => {}
        }
        if step % 100 == 0 {
            model.check_all();
        }
    }
    model.check_all();
}

#[test]
fn random_lives_on_every_driver() {
    for world in worlds() {
        for seed in 0..3 {
            let allocator = on_device(&world);
            let trimmed = allocator.clone();
            let mut model = Model::new(allocator, format!("{} with seed {seed}", world.name));
            live_one_life(&mut model, &mut Dice(seed), 900, || {
                trimmed.trim();
            });
            world.assert_balanced("in the middle");
            assert_eq!(
                trimmed.figures().blocks,
                model.live.iter().filter(|live| live.layout.size() > 0).count() as u64
            );
            model.free_all();
            let figures = trimmed.figures();
            assert_eq!((figures.blocks, figures.large_blocks, figures.bytes_in_blocks.get()), (0, 0, 0), "{figures}");
            trimmed.trim();
            let held = trimmed.figures().bytes_committed.get();
            // Without virtual memory each heap keeps one empty region.
            assert!(
                held == 0 || !world.is_virtual(),
                "{}: {held} bytes stay after all was freed and trimmed",
                world.name
            );
            drop((model, trimmed));
            world.assert_empty("after a life");
        }
    }
}

/// The host's memory through plain pointers, as containers use it.
#[test]
fn blocks_of_the_host_are_ordinary_memory() {
    let world = World::host(growspan::DeviceOptions::new());
    let allocator: SpanAllocator = builder(&world).build().unwrap();
    for size in [1, 100, 16 << 10, 40 << 10, GRANULE, 9 * GRANULE + 1] {
        let layout = layout(size, 16);
        let block = allocator.allocate_zeroed(layout).unwrap();
        // SAFETY: the block has so many bytes, which hold zeros, and is ours alone.
        let bytes = unsafe { core::slice::from_raw_parts_mut(block.ptr().as_ptr(), size) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes.fill(7);
        // SAFETY: live, of that layout, and not used any more.
        unsafe { allocator.deallocate(block.ptr(), layout) };
    }
    drop(allocator);
    world.assert_empty("after plain use");
}

/// The same on a card, as it is and on a stream. `cargo test --features sim --test allocator -- --ignored`
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA card"]
fn random_lives_on_a_card() {
    use growspan::driver::RawStream;
    use growspan::{Bytes, DeviceOptions};

    for contiguous in [false, true] {
        let device = DeviceOptions::new().contiguous(contiguous).cuda(0).unwrap();
        for on_stream in [false, true] {
            // The card's granularity is larger than these tests' blocks; some are to have a span of their own.
            let builder = SpanAllocator::builder(&device).threshold(Bytes::kib(64)).keep(Bytes::mib(16)).heaps(2);
            let allocator = builder.build_on_device().unwrap();
            let handle = if on_stream { allocator.with_stream(RawStream::DEFAULT).unwrap() } else { allocator.clone() };
            let mut model = Model::new(handle, format!("cuda, contiguous {contiguous}, on a stream {on_stream}"));
            let trimmed = allocator.clone();
            live_one_life(&mut model, &mut Dice(3), 2000, || {
                trimmed.trim();
            });
            model.free_all();
            drop((model, trimmed, allocator));
            device.synchronize().unwrap();
            device.pool().trim(Bytes::ZERO);
            assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO, "{}", device.snapshot());
        }
    }
}
