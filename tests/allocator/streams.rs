//! Blocks freed behind work that still runs.

use growspan::driver::sim::SimDriver;
use growspan::driver::{Call, RawStream};
use growspan::{Block, Bytes, DeviceMemory, DeviceOptions, Error, SpanAllocator};

use crate::drivers::card;
use crate::model::layout;
use crate::world::World;
use crate::{GRANULE, builder};

type Spans = SpanAllocator<DeviceMemory>;

/// A simulated card, an allocator on it, two streams and a handle for each.
fn two_streams() -> (World, SimDriver, [RawStream; 2], Spans, [Spans; 2]) {
    let world = World::sim(card().total(Bytes::mib(32)), DeviceOptions::new());
    let sim = world.sim.clone().unwrap();
    let streams = [sim.stream(), sim.stream()];
    let allocator = builder(&world).keep(Bytes::mib(4)).build_on_device().unwrap();
    let handles = streams.map(|stream| allocator.with_stream(stream).unwrap());
    (world, sim, streams, allocator, handles)
}

const SIZES: [usize; 3] = [1000, 40 << 10, 3 * GRANULE];

fn free(allocator: &Spans, block: Block, size: usize) {
    // SAFETY: the callers hand over a live block of that size, used by nothing but work queued on the stream.
    unsafe { allocator.deallocate(block.ptr(), layout(size, 1)) };
}

#[test]
fn the_same_stream_has_a_block_again_at_once_and_others_after_the_work() {
    for size in SIZES {
        let (world, sim, streams, allocator, [one, two]) = two_streams();
        let block = one.allocate(layout(size, 1)).unwrap();
        sim.queue_work(streams[0], block.device_ptr(), size as u64);
        free(&one, block, size);
        // Nobody else gets it while the work may run.
        for other in [&two, &allocator] {
            let theirs = other.allocate(layout(size, 1)).unwrap();
            assert_ne!(theirs.device_ptr(), block.device_ptr());
            // Nothing uses it.
            free(&allocator, theirs, size);
        }
        let again = one.allocate(layout(size, 1)).unwrap();
        assert_eq!(again, block, "the same stream does");
        sim.queue_work(streams[0], block.device_ptr(), size as u64);
        free(&one, again, size);
        sim.finish(streams[0]);
        let theirs: Vec<_> = (0..4).map(|_| two.allocate(layout(size, 1)).unwrap()).collect();
        assert!(theirs.contains(&block), "after it anybody does");
        for block in theirs {
            free(&two, block, size);
        }
        sim.finish_all();
        drop((allocator, one, two));
        assert!(!sim.is_lost());
        world.assert_empty("after streams");
    }
}

#[test]
fn a_full_card_waits_for_streams_before_it_is_out_of_memory() {
    let (world, sim, streams, allocator, [one, two]) = two_streams();
    let size = 20 << 20;
    let block = one.allocate(layout(size, 1)).unwrap();
    sim.queue_work(streams[0], block.device_ptr(), size as u64);
    free(&one, block, size);
    // There is no room for both.
    let theirs = two.allocate(layout(size, 1)).unwrap();
    assert!(!sim.is_lost() && sim.violations().is_empty());
    free(&two, theirs, size);
    drop((allocator, one, two));
    world.assert_empty("after waiting");
}

#[test]
fn the_allocator_may_go_while_work_runs() {
    let (world, sim, streams, allocator, handles) = two_streams();
    for size in SIZES {
        for (handle, stream) in handles.iter().zip(streams) {
            let block = handle.allocate_zeroed(layout(size, 1)).unwrap();
            sim.queue_work(stream, block.device_ptr(), size as u64);
            free(handle, block, size);
        }
        // Waits for the device before it unmaps anything.
        allocator.trim();
        assert!(!sim.is_lost() && sim.violations().is_empty());
    }
    drop((allocator, handles));
    assert!(!sim.is_lost());
    world.assert_empty("after a drop under work");
}

/// Growing on a stream queues the copy there, and the old block waits for it.
#[test]
fn moving_is_queued_on_the_stream() {
    let world = World::sim(card().queue_copies(true), DeviceOptions::new());
    let sim = world.sim.clone().unwrap();
    let stream = sim.stream();
    let allocator = builder(&world).keep(Bytes::ZERO).build_on_device().unwrap();
    let handle = allocator.with_stream(stream).unwrap();
    let block = handle.allocate(layout(3000, 1)).unwrap();
    // SAFETY: the block is live and ours.
    unsafe { handle.copy_in(block.ptr(), &[5; 3000]) }.unwrap();
    // SAFETY: live, of that layout, and used by nobody.
    let grown = unsafe { handle.grow_zeroed(block.ptr(), layout(3000, 1), layout(50 << 10, 1)) }.unwrap();
    assert_ne!(grown.ptr(), block.ptr());
    let other = allocator.allocate(layout(3000, 1)).unwrap();
    assert_ne!(other.ptr(), block.ptr(), "the copy still reads it");
    assert!(sim.figures().pending > 0, "the copy was not waited for");
    sim.finish(stream);
    let mut bytes = vec![1; 50 << 10];
    // SAFETY: the block is live and ours.
    unsafe { handle.copy_out(&mut bytes, grown.ptr()) }.unwrap();
    assert!(bytes[..3000].iter().all(|byte| *byte == 5) && bytes[3000..].iter().all(|byte| *byte == 0));
    free(&handle, grown, 50 << 10);
    free(&allocator, other, 3000);
    drop((allocator, handle));
    world.assert_empty("after a move on a stream");
}

#[test]
fn a_capture_makes_blocks_wait_for_the_device() {
    let (world, sim, streams, allocator, [one, two]) = two_streams();
    let blocks: Vec<_> = (0..3).map(|_| one.allocate(layout(1000, 1)).unwrap()).collect();
    sim.capture(streams[0], true);
    for block in blocks {
        free(&one, block, 1000);
    }
    sim.capture(streams[0], false);
    assert_eq!(sim.violations(), []);
    // No event was recorded, and the blocks are not lost.
    let theirs = two.allocate(layout(1000, 1)).unwrap();
    free(&two, theirs, 1000);
    drop((allocator, one, two));
    world.assert_empty("after a capture");
}

#[test]
fn streams_of_other_devices_are_refused_and_the_hosts_never_wait() {
    let host = World::host(DeviceOptions::new());
    let sim = World::sim(card(), DeviceOptions::new()).sim.unwrap();
    let allocator = builder(&host).build().unwrap();
    assert!(matches!(allocator.with_stream(sim.stream()), Err(Error::OtherDevice { .. })));
    let handle = allocator.with_stream(RawStream::DEFAULT).unwrap();
    let block = handle.allocate(layout(100, 1)).unwrap();
    // SAFETY: live, of that layout, and used by nobody.
    unsafe { handle.deallocate(block.ptr(), layout(100, 1)) };
    assert_eq!(allocator.figures().blocks, 0);
    assert!(handle.is(&allocator));
}

/// One event a block at most, and events are used again.
#[test]
fn events_are_used_again() {
    let (world, sim, streams, allocator, [one, two]) = two_streams();
    for _ in 0..100 {
        let block = one.allocate(layout(1000, 1)).unwrap();
        sim.queue_work(streams[0], block.device_ptr(), 1000);
        free(&one, block, 1000);
        sim.finish(streams[0]);
        let block = two.allocate(layout(1000, 1)).unwrap();
        free(&two, block, 1000);
    }
    assert!(sim.count(Call::EventCreate) < 10, "{}", sim.count(Call::EventCreate));
    drop((allocator, one, two));
    world.assert_empty("after events");
}

/// What clears or moves a block may still be queued when the host wants to read or write it.
#[test]
fn copies_from_and_to_the_host_wait_for_the_stream() {
    let world = World::sim(card().queue_copies(true), DeviceOptions::new());
    let sim = world.sim.clone().unwrap();
    let stream = sim.stream();
    let handle = builder(&world).build_on_device().unwrap().with_stream(stream).unwrap();
    for size in SIZES {
        let block = handle.allocate_zeroed(layout(size, 1)).unwrap();
        // SAFETY: the block is live and ours.
        unsafe { handle.copy_in(block.ptr(), &vec![5; size]) }.unwrap();
        // SAFETY: live, of that layout, and used by nobody.
        let grown = unsafe { handle.grow_zeroed(block.ptr(), layout(size, 1), layout(3 * size, 1)) }.unwrap();
        let mut bytes = vec![1; 3 * size];
        // SAFETY: the block is live and ours.
        unsafe { handle.copy_out(&mut bytes, grown.ptr()) }.unwrap();
        assert!(
            bytes[..size].iter().all(|byte| *byte == 5),
            "{size}: what was copied in was cleared, or did not move yet"
        );
        assert!(bytes[size..].iter().all(|byte| *byte == 0), "{size}: read before it was cleared");
        free(&handle, grown, 3 * size);
    }
    // What a capture records does not run, so it cannot be waited for.
    let block = handle.allocate(layout(10, 1)).unwrap();
    sim.capture(stream, true);
    // SAFETY: the block is live and ours.
    assert!(matches!(unsafe { handle.copy_in(block.ptr(), &[1]) }, Err(Error::Capturing { .. })));
    sim.capture(stream, false);
    free(&handle, block, 10);
    drop(handle);
    world.assert_empty("after copies");
}

/// A block of its own that grows, and a buffer: both get what was freed on a stream.
#[test]
fn growing_on_a_full_card_waits_for_streams_too() {
    for waits in [true, false] {
        let (world, sim, streams, allocator, [one, two]) = two_streams();
        let own = allocator.allocate(layout(8 << 20, 1)).unwrap();
        let block = one.allocate(layout(14 << 20, 1)).unwrap();
        sim.queue_work(streams[0], block.device_ptr(), 14 << 20);
        free(&one, block, 14 << 20);
        if waits {
            // SAFETY: live, of that layout, and used by nobody.
            let grown = unsafe { allocator.grow(own.ptr(), layout(8 << 20, 1), layout(24 << 20, 1)) }.unwrap();
            assert_eq!(grown.ptr(), own.ptr());
            free(&allocator, grown, 24 << 20);
        } else {
            sim.finish(streams[0]);
            let mut buffer = growspan::GrowableBuffer::<u8>::builder(&world.device).max_len(32 << 20).build().unwrap();
            buffer.grow_to(20 << 20).unwrap();
            free(&allocator, own, 8 << 20);
        }
        assert!(!sim.is_lost() && sim.violations().is_empty());
        drop((allocator, one, two));
        world.assert_empty("after growing");
    }
}

/// A block without an event, and those behind it, are not kept until memory runs out.
#[test]
fn trim_frees_what_waits_for_the_whole_device() {
    let (world, sim, streams, allocator, [one, two]) = two_streams();
    let blocks = [0; 3].map(|_| one.allocate(layout(1000, 1)).unwrap());
    sim.capture(streams[0], true);
    free(&one, blocks[0], 1000);
    sim.capture(streams[0], false);
    free(&one, blocks[1], 1000);
    free(&one, blocks[2], 1000);
    assert_eq!(allocator.figures().blocks, 3);
    allocator.trim();
    assert_eq!((allocator.figures().blocks, allocator.figures().bytes_committed), (0, Bytes::ZERO));
    drop((allocator, one, two));
    world.assert_empty("after trimming");
}

/// A block that was freed on the stream is only had again where it is aligned as asked.
#[test]
fn what_is_had_again_on_a_stream_is_aligned() {
    let (world, _, _, allocator, [one, two]) = two_streams();
    let size = 40 << 10;
    let blocks = [0; 5].map(|_| one.allocate(layout(size, 1)).unwrap());
    assert!(blocks.iter().any(|block| !block.device_ptr().is_multiple_of(32 << 10)));
    for block in blocks {
        free(&one, block, size);
    }
    for _ in 0..5 {
        let block = one.allocate(layout(size, 32 << 10)).unwrap();
        assert!(block.device_ptr().is_multiple_of(32 << 10));
    }
    drop((allocator, one, two));
    drop(world);
}

/// What a block on a stream gives up by shrinking may still be used by what is queued there.
#[test]
fn shrinking_on_a_stream_takes_nothing_from_under_work() {
    let (world, sim, streams, _, _) = two_streams();
    let builder = builder(&world).threshold(Bytes::mib(2)).keep(Bytes::ZERO).heaps(1);
    let allocator = builder.build_on_device().unwrap();
    let handle = allocator.with_stream(streams[0]).unwrap();
    for size in [16 * GRANULE, 64 * GRANULE] {
        let block = handle.allocate(layout(size, 1)).unwrap();
        let end = block.device_ptr() + size as u64;
        sim.queue_work(streams[0], block.device_ptr(), size as u64);
        let smaller = if size == 16 * GRANULE { GRANULE } else { 40 * GRANULE };
        // SAFETY: live, of that layout, and used by work on the stream alone.
        let shrunk = unsafe { handle.shrink(block.ptr(), layout(size, 1), layout(smaller, 1)) }.unwrap();
        assert_eq!(shrunk.ptr(), block.ptr());
        let other = allocator.allocate(layout(2 * GRANULE, 1)).unwrap();
        let within = block.device_ptr()..end;
        assert!(!within.contains(&other.device_ptr()) || sim.figures().pending == 0);
        assert!(!sim.is_lost() && sim.violations().is_empty());
        free(&allocator, other, 2 * GRANULE);
        free(&handle, shrunk, smaller);
        sim.finish_all();
    }
    drop((allocator, handle));
    world.assert_empty("after shrinking under work");
}
