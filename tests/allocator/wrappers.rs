//! What stacks on allocators.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use growspan::driver::Call;
use growspan::driver::fault::FaultPlan;
use growspan::{
    ArenaAllocator, Bytes, DeviceOptions, Error, LimitedAllocator, RawAllocator, RetryAllocator, StatsAllocator,
    TrackingAllocator,
};

use crate::drivers::{card, worlds};
use crate::model::{Model, below, layout};
use crate::world::{Dice, World};
use crate::{GRANULE, on_device};

/// Random steps on a stack of them all: blocks stay what they were, and the books agree.
#[test]
fn a_stack_of_all_of_them() {
    for world in worlds() {
        let spans = on_device(&world);
        let stack = StatsAllocator::new(TrackingAllocator::new(LimitedAllocator::new(
            RetryAllocator::new(spans.clone(), |_| false),
            Bytes::mib(4),
        )));
        let mut model = Model::new(stack.clone(), world.name.clone());
        let mut dice = Dice(7);
        let mut refused = 0;
        for _ in 0..1500 {
            let size = below(&mut dice, &[500, 40_000, 6 * GRANULE]);
            let result = match dice.roll(5) {
                0 => model.allocate(layout(size, 8)),
                1 => model.allocate_zeroed(layout(size, 8)),
                2 if !model.live.is_empty() => {
                    model.free(dice.roll(model.live.len()));
                    Ok(())
                }
                _ if !model.live.is_empty() => {
                    let number = dice.roll(model.live.len());
                    model.resize(number, layout(size, 8), size.is_multiple_of(2))
                }
                _ => Ok(()),
            };
            match result {
                Ok(()) => {}
                Err(Error::OverLimit { limit, .. }) => {
                    assert_eq!(limit, Bytes::mib(4));
                    refused += 1;
                }
                Err(error) => panic!("{error}"),
            }
            let live: u64 = model.live.iter().map(|live| live.layout.size() as u64).sum();
            let stats = stack.stats();
            assert_eq!(stats.bytes_in_use, Bytes::new(live));
            assert!(stats.peak_bytes <= Bytes::mib(4));
            assert_eq!(stack.inner().inner().used(), Bytes::new(live));
            assert_eq!(stack.inner().live().iter().map(|block| block.bytes.get()).sum::<u64>(), live);
        }
        let stats = stack.stats();
        assert!(refused > 0 && stats.failures == refused, "{stats}");
        assert!(stats.grows_moved > 0 && stats.grows_in_place > 0 && stats.shrinks > 0, "{stats}");
        model.check_all();
        model.free_all();
        assert!(stack.inner().live().is_empty());
        assert_eq!(stack.stats().live(), 0);
        drop((model, stack, spans));
        world.assert_empty("after a stack");
    }
}

#[test]
fn what_fails_below_does_not_count_against_a_limit() {
    let world = World::sim(card(), DeviceOptions::new());
    let limited = LimitedAllocator::new(on_device(&world), Bytes::mib(8));
    world.faults.arm(FaultPlan::every().of(Call::Create));
    limited.allocate(layout(1000, 1)).unwrap_err();
    limited.allocate_zeroed(layout(3 << 20, 1)).unwrap_err();
    world.faults.disarm();
    assert_eq!(limited.used(), Bytes::ZERO);
    let block = limited.allocate(layout(1 << 20, 1)).unwrap();
    world.faults.arm(FaultPlan::every().of(Call::Create));
    // SAFETY: live, of that layout, and used by nobody.
    unsafe { limited.grow(block.ptr(), layout(1 << 20, 1), layout(4 << 20, 1)) }.unwrap_err();
    world.faults.disarm();
    assert_eq!(limited.used(), Bytes::mib(1));
    // SAFETY: live, of that layout, and used by nobody.
    unsafe { limited.deallocate(block.ptr(), layout(1 << 20, 1)) };
    assert_eq!(limited.used(), Bytes::ZERO);
}

#[test]
fn leaks_have_a_name_a_size_and_where_they_come_from() {
    let world = World::sim(card(), DeviceOptions::new());
    let tracked = TrackingAllocator::with_backtraces(on_device(&world));
    let (weights, cache) = (tracked.named("weights"), tracked.named("cache"));
    let sizes = [(&weights, 4096), (&cache, 9000), (&weights, 100_000)];
    let blocks = sizes.map(|(allocator, size)| allocator.allocate(layout(size, 1)).unwrap());
    let names: Vec<_> =
        tracked.by_name().into_iter().map(|(name, blocks, bytes)| (name.to_string(), blocks, bytes)).collect();
    assert_eq!(names, [("weights".to_owned(), 2, Bytes::new(104_096)), ("cache".to_owned(), 1, Bytes::new(9000))]);
    let live = tracked.live();
    assert!(live.iter().all(|block| block.to_string().contains("leaks_have_a_name")), "{}", live[0]);
    // A block keeps its name when another handle grows it.
    // SAFETY: live, of that layout, and used by nobody.
    let grown = unsafe { tracked.grow(blocks[1].ptr(), layout(9000, 1), layout(50_000, 1)) }.unwrap();
    assert_eq!(tracked.by_name()[1], (Arc::from("cache"), 1, Bytes::new(50_000)));
    for (block, size) in [(blocks[0], 4096), (grown, 50_000), (blocks[2], 100_000)] {
        // SAFETY: live, of that layout, and used by nobody.
        unsafe { tracked.deallocate(block.ptr(), layout(size, 1)) };
    }
    assert!(tracked.live().is_empty());
}

#[test]
fn a_callback_frees_something_and_it_is_tried_again() {
    let world = World::sim(card().total(Bytes::mib(16)), DeviceOptions::new());
    let spans = on_device(&world);
    let hoard = Arc::new(std::sync::Mutex::new(Vec::new()));
    let calls = Arc::new(AtomicU32::new(0));
    let retry = {
        let (spans, hoard, calls) = (spans.clone(), Arc::clone(&hoard), Arc::clone(&calls));
        RetryAllocator::new(spans.clone(), move |failure| {
            calls.fetch_add(1, Relaxed);
            assert!(matches!(failure.error, Error::OutOfMemory(_)) && failure.tries > 0);
            let Some(block): Option<growspan::Block> = hoard.lock().unwrap().pop() else { return false };
            // SAFETY: live, of that layout, and used by nobody.
            unsafe { spans.deallocate(block.ptr(), layout(4 << 20, 1)) };
            true
        })
    };
    for _ in 0..3 {
        let block = spans.allocate(layout(4 << 20, 1)).unwrap();
        hoard.lock().unwrap().push(block);
    }
    let large = retry.allocate(layout(11 << 20, 1)).unwrap();
    assert_eq!((calls.load(Relaxed), hoard.lock().unwrap().len()), (2, 1));
    let error = retry.allocate(layout(14 << 20, 1)).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory(_)));
    assert_eq!(calls.load(Relaxed), 4, "nothing was left to free the second time");
    // Other errors are nobody's business.
    assert!(matches!(retry.allocate(layout(1 << 20, 1 << 30)), Err(Error::Alignment { .. })));
    assert_eq!(calls.load(Relaxed), 4);
    // SAFETY: live, of that layout, and used by nobody.
    unsafe { retry.deallocate(large.ptr(), layout(11 << 20, 1)) };
    drop((retry, spans));
    world.assert_empty("after retries");
}

#[test]
fn an_arena_gives_all_back_at_once() {
    for world in worlds() {
        let stats = StatsAllocator::new(on_device(&world));
        let mut arena = ArenaAllocator::new(stats.clone(), Bytes::kib(96));
        for round in 0..3 {
            let mut model = Model::new(&arena, world.name.clone());
            let mut dice = Dice(round);
            for _ in 0..200 {
                let size = below(&mut dice, &[500, 9_000, 3 * GRANULE]);
                let align = 1 << dice.roll(9);
                match dice.roll(4) {
                    0 => model.allocate(layout(size, align)).unwrap(),
                    1 => model.allocate_zeroed(layout(size, align)).unwrap(),
                    2 if !model.live.is_empty() => model.free(model.live.len() - 1),
                    3 if !model.live.is_empty() => {
                        let number = dice.roll(model.live.len());
                        model.resize(number, layout(size, align), round % 2 == 0).unwrap();
                    }
                    _ => {}
                }
            }
            model.check_all();
            assert!(arena.taken() > Bytes::mib(1));
            arena.reset();
            assert_eq!((arena.taken(), stats.stats().live()), (Bytes::ZERO, 0));
        }
        // The last piece can be given back, and grown where it is.
        let piece = arena.allocate(layout(100, 1)).unwrap();
        // SAFETY: live, of that layout, and used by nobody.
        let grown = unsafe { arena.grow(piece.ptr(), layout(100, 1), layout(5000, 1)) }.unwrap();
        assert_eq!(grown.ptr(), piece.ptr());
        // Not beyond the block it lies in.
        // SAFETY: live, of that layout, and used by nobody.
        let moved = unsafe { arena.grow(grown.ptr(), layout(5000, 1), layout(100 << 10, 1)) }.unwrap();
        assert_ne!(moved.ptr(), piece.ptr());
        assert_eq!(stats.stats().live(), 2);
        arena.reset();
        let piece = arena.allocate(layout(5000, 1)).unwrap();
        // SAFETY: live, of that layout, and used by nobody.
        unsafe { arena.deallocate(piece.ptr(), layout(5000, 1)) };
        assert_eq!(arena.allocate(layout(9000, 1)).unwrap().ptr(), piece.ptr());
        assert_eq!(stats.stats().live(), 1);
        drop(arena);
        assert_eq!(stats.stats().live(), 0);
        drop(stats);
        world.assert_empty("after an arena");
    }
}

/// A limit can be reached and not passed; the peak stays when blocks go; an arena goes on with what a large piece left.
#[test]
fn limits_peaks_and_rests() {
    let world = World::sim(card(), DeviceOptions::new());
    let stats = StatsAllocator::new(LimitedAllocator::new(on_device(&world), Bytes::kib(256)));
    let all = layout(256 << 10, 1);
    let block = stats.allocate(all).unwrap();
    assert!(matches!(stats.allocate(layout(1, 1)), Err(Error::OverLimit { .. })));
    // SAFETY: live, of that layout, and used by nobody.
    unsafe { stats.deallocate(block.ptr(), all) };
    let arena = ArenaAllocator::new(stats.clone(), Bytes::kib(64));
    let first = arena.allocate(layout(1000, 1)).unwrap();
    arena.allocate(layout(100 << 10, 1)).unwrap();
    let next = arena.allocate(layout(1000, 1)).unwrap();
    assert_eq!(first.place(1000), Some(next.ptr()));
    assert_eq!((arena.taken(), stats.stats().peak_bytes), (Bytes::kib(164), Bytes::kib(256)));
}

/// A callback that panics while a wrapper above it is in the middle of something.
#[test]
fn books_agree_after_a_panic() {
    let world = World::sim(card().total(Bytes::mib(64)), DeviceOptions::new());
    let retry = RetryAllocator::new(on_device(&world), |_| panic!("of the callback"));
    let stack = TrackingAllocator::new(LimitedAllocator::new(retry, Bytes::gib(1)));
    let (small, huge) = (layout(1000, 1), layout(512 << 20, 1));
    let block = stack.allocate(small).unwrap();
    let before = (stack.inner().used(), stack.live().len());
    let panics: [&dyn Fn(); 3] = [
        &|| drop(stack.allocate(huge)),
        // SAFETY: live, of that layout, and used by nobody.
        &|| drop(unsafe { stack.grow(block.ptr(), small, huge) }),
        // SAFETY: the same.
        &|| drop(unsafe { stack.grow_zeroed(block.ptr(), small, huge) }),
    ];
    for act in panics {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_err();
        assert_eq!((stack.inner().used(), stack.live().len()), before);
    }
    // A callback is asked again after one that panicked.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics[0])).unwrap_err();
    // SAFETY: live, of that layout, and used by nobody.
    unsafe { stack.deallocate(block.ptr(), small) };
    assert_eq!((stack.inner().used(), stack.live().len()), (Bytes::ZERO, 0));
    drop(stack);
    world.assert_empty("after panics");
}

/// A callback that asks the allocator it is of.
#[test]
fn a_callback_is_not_called_from_within_itself() {
    type Retry = RetryAllocator<growspan::SpanAllocator<growspan::DeviceMemory>>;
    let world = World::sim(card().total(Bytes::mib(16)), DeviceOptions::new());
    let own: Arc<std::sync::OnceLock<Retry>> = Arc::default();
    let calls = Arc::new(AtomicU32::new(0));
    let retry = {
        let (own, calls) = (Arc::clone(&own), Arc::clone(&calls));
        RetryAllocator::new(on_device(&world), move |failure| {
            calls.fetch_add(1, Relaxed);
            // In vain, and that is all.
            own.get().unwrap().allocate(layout(64 << 20, 1)).unwrap_err();
            failure.tries < 3
        })
    };
    own.set(retry.clone()).unwrap();
    retry.allocate(layout(64 << 20, 1)).unwrap_err();
    assert_eq!(calls.load(Relaxed), 3);
}

/// A callback below an arena that asks the arena something: no lock is held that it needs.
#[test]
fn an_arena_answers_while_it_waits_for_memory() {
    type Arena = ArenaAllocator<RetryAllocator<growspan::SpanAllocator<growspan::DeviceMemory>>>;
    let world = World::sim(card().total(Bytes::mib(16)), DeviceOptions::new());
    let own: Arc<std::sync::OnceLock<std::sync::Weak<Arena>>> = Arc::default();
    let answer = Arc::new(AtomicU32::new(0));
    let retry = {
        let (own, answer) = (Arc::clone(&own), Arc::clone(&answer));
        RetryAllocator::new(on_device(&world), move |_| {
            let arena = own.get().unwrap().upgrade().unwrap();
            answer.store(arena.taken().get() as u32, Relaxed);
            false
        })
    };
    let arena = Arc::new(ArenaAllocator::new(retry, Bytes::mib(1)));
    own.set(Arc::downgrade(&arena)).unwrap();
    arena.allocate(layout(100, 1)).unwrap();
    arena.allocate(layout(64 << 20, 1)).unwrap_err();
    assert_eq!(answer.load(Relaxed), 1 << 20);
}

/// Hands out parts of one block, from its end on downwards.
struct Downwards<A: RawAllocator> {
    inner: A,
    block: growspan::Block,
    left: AtomicU32,
}

// SAFETY: parts of a block that is never given back, each handed out once.
unsafe impl<A: RawAllocator> RawAllocator for Downwards<A> {
    fn device(&self) -> &growspan::Device {
        self.inner.device()
    }

    fn allocate(&self, layout: core::alloc::Layout) -> growspan::Result<growspan::Block> {
        let left = self.left.load(Relaxed) as usize - layout.size();
        let left = left - left % layout.align();
        self.left.store(left as u32, Relaxed);
        Ok(growspan::Block::new(self.block.place(left).unwrap(), layout.size()))
    }

    fn allocate_zeroed(&self, layout: core::alloc::Layout) -> growspan::Result<growspan::Block> {
        self.allocate(layout)
    }

    unsafe fn deallocate(&self, _at: core::ptr::NonNull<u8>, _layout: core::alloc::Layout) {}

    unsafe fn grow(
        &self,
        _at: core::ptr::NonNull<u8>,
        _old: core::alloc::Layout,
        new: core::alloc::Layout,
    ) -> growspan::Result<growspan::Block> {
        self.allocate(new)
    }

    unsafe fn grow_zeroed(
        &self,
        _at: core::ptr::NonNull<u8>,
        _old: core::alloc::Layout,
        new: core::alloc::Layout,
    ) -> growspan::Result<growspan::Block> {
        self.allocate(new)
    }

    unsafe fn shrink(
        &self,
        at: core::ptr::NonNull<u8>,
        _old: core::alloc::Layout,
        new: core::alloc::Layout,
    ) -> growspan::Result<growspan::Block> {
        Ok(growspan::Block::new(at, new.size()))
    }

    unsafe fn copy_in(&self, to: core::ptr::NonNull<u8>, from: &[u8]) -> growspan::Result<()> {
        // SAFETY: the contract is the same.
        unsafe { self.inner.copy_in(to, from) }
    }

    unsafe fn copy_out(&self, to: &mut [u8], from: core::ptr::NonNull<u8>) -> growspan::Result<()> {
        // SAFETY: the contract is the same.
        unsafe { self.inner.copy_out(to, from) }
    }

    unsafe fn copy(
        &self,
        to: core::ptr::NonNull<u8>,
        from: core::ptr::NonNull<u8>,
        bytes: usize,
    ) -> growspan::Result<()> {
        // SAFETY: the contract is the same.
        unsafe { self.inner.copy(to, from, bytes) }
    }

    unsafe fn clear(&self, at: core::ptr::NonNull<u8>, bytes: usize) -> growspan::Result<()> {
        // SAFETY: the contract is the same.
        unsafe { self.inner.clear(at, bytes) }
    }
}

/// A piece that has a block of its own ends where the block begins that others are cut from: it does not grow into it.
#[test]
fn pieces_of_an_arena_stay_in_their_block() {
    let world = World::sim(card(), DeviceOptions::new());
    let spans = on_device(&world);
    let whole = layout(1 << 20, 4096);
    let block = spans.allocate(whole).unwrap();
    let below = Downwards { inner: spans.clone(), block, left: AtomicU32::new(1 << 20) };
    let arena = ArenaAllocator::new(below, Bytes::kib(64));
    let first = arena.allocate(layout(256, 1)).unwrap();
    // SAFETY: live, of that layout, and used by nobody.
    unsafe { arena.deallocate(first.ptr(), layout(256, 1)) };
    let own = arena.allocate(layout(128 << 10, 1)).unwrap();
    assert_eq!(own.place(128 << 10), Some(first.ptr()), "the one lies before the other");
    // SAFETY: live, of that layout, and used by nobody.
    let grown = unsafe { arena.grow(own.ptr(), layout(128 << 10, 1), layout(129 << 10, 1)) }.unwrap();
    assert_ne!(grown.ptr(), own.ptr());
    drop(arena);
    // SAFETY: live, of that layout, and used by nobody.
    unsafe { spans.deallocate(block.ptr(), whole) };
    assert_eq!((block.place(whole.size()).is_some(), block.place(whole.size() + 1)), (true, None));
    drop(spans);
    world.assert_empty("after pieces");
}
