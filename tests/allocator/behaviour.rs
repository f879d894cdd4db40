//! What the allocator promises of addresses and memory.

use core::alloc::Layout;
use std::sync::Arc;

use growspan::driver::fault::FaultPlan;
use growspan::driver::host::{HostDriver, HostOptions};
use growspan::driver::sim::{Personality, SimDriver};
use growspan::driver::{Call, DriverErrorKind};
use growspan::{
    ArenaAllocator, Bytes, Device, DeviceMemory, DeviceOptions, Error, GrowableBuffer, Headroom, Mode, RawAllocator,
    Sizing, SpanAllocator, TrackingAllocator,
};

use crate::drivers::{card, worlds};
use crate::model::{Model, layout};
use crate::world::World;
use crate::{GRANULE, builder, on_device};

/// Slots of small blocks in these tests are one granule, and hold two of these.
const HALF: usize = GRANULE / 2;

fn allocate(allocator: &SpanAllocator<DeviceMemory>, layout: Layout) -> growspan::Block {
    allocator.allocate(layout).unwrap()
}

fn free(allocator: &SpanAllocator<DeviceMemory>, block: growspan::Block, layout: Layout) {
    // SAFETY: the callers hand over a live block of that layout that nobody uses.
    unsafe { allocator.deallocate(block.ptr(), layout) };
}

#[test]
fn nothing_and_too_much() {
    for world in worlds() {
        let allocator = on_device(&world);
        for align in [1, 64, 4096, 1 << 30] {
            let nothing = allocator.allocate(layout(0, align)).unwrap();
            assert_eq!((nothing.len(), nothing.device_ptr() % align as u64), (0, 0));
            let zeroed = allocator.allocate_zeroed(layout(0, align)).unwrap();
            free(&allocator, zeroed, layout(0, align));
            // From nothing to something and back.
            // SAFETY: a block of size zero, which is nowhere.
            let grown = unsafe { allocator.grow(nothing.ptr(), layout(0, align), layout(10, 1)) }.unwrap();
            // SAFETY: live, of that layout, and used by nobody.
            let shrunk = unsafe { allocator.shrink(grown.ptr(), layout(10, 1), layout(0, align)) }.unwrap();
            assert_eq!((shrunk.len(), shrunk.device_ptr() % align as u64), (0, 0));
        }
        assert_eq!(allocator.figures().blocks, 0);
        let before = world.picture();
        for huge in [1 << 34, 1 << 50, isize::MAX as usize] {
            let error = allocator.allocate(layout(huge, 1)).unwrap_err();
            assert!(!error.to_string().is_empty());
            let block = allocate(&allocator, layout(100, 1));
            // SAFETY: live, of that layout, and used by nobody.
            unsafe { allocator.grow(block.ptr(), layout(100, 1), layout(huge, 1)) }.unwrap_err();
            free(&allocator, block, layout(100, 1));
        }
        let error = allocator.allocate(layout(64, 1 << 40));
        assert!(world.is_virtual() == matches!(error, Err(Error::Alignment { .. })) || error.is_err(), "{error:?}");
        drop(allocator);
        let _ = before;
        world.assert_empty("after huge layouts");
    }
}

#[test]
fn a_large_block_grows_where_it_is_and_gives_back_what_it_shrinks_by() {
    for world in worlds().into_iter().filter(World::is_virtual) {
        let allocator = on_device(&world);
        let mut model = Model::new(allocator.clone(), world.name.clone());
        model.allocate(layout(GRANULE, 8)).unwrap();
        let address = model.live[0].block.device_ptr();
        for granules in [2, 3, 9, 40, 200] {
            model.resize(0, layout(granules * GRANULE, 8), granules == 9).unwrap();
            assert_eq!(model.live[0].block.device_ptr(), address, "{}", world.name);
        }
        let full = allocator.figures().bytes_committed;
        model.resize(0, layout(3 * GRANULE, 8), false).unwrap();
        assert_eq!(model.live[0].block.device_ptr(), address, "{}", world.name);
        let left = allocator.figures().bytes_committed.get();
        let uniform = 4 * GRANULE as u64;
        assert!(left <= 4 * GRANULE as u64 || left <= uniform, "{}: {left} of {full} stay", world.name);
        model.free_all();
        drop((model, allocator));
        world.assert_empty("after a large block");
    }
}

#[test]
fn a_block_without_headroom_moves_with_its_contents() {
    for world in worlds() {
        let allocator = builder(&world).headroom(Headroom::NONE).build_on_device().unwrap();
        let mut model = Model::new(allocator.clone(), world.name.clone());
        model.allocate(layout(2 * GRANULE, 8)).unwrap();
        model.allocate(layout(2 * GRANULE, 8)).unwrap();
        model.resize(0, layout(20 * GRANULE, 8), true).unwrap();
        model.check_all();
        model.free_all();
        drop((model, allocator));
        world.assert_empty("after a move");
    }
}

#[test]
fn holes_in_the_middle_give_their_chunks_back() {
    for world in worlds().into_iter().filter(World::is_virtual) {
        let allocator = builder(&world).keep(Bytes::ZERO).build_on_device().unwrap();
        let layout = layout(HALF, 1);
        let blocks: Vec<_> = (0..64).map(|_| allocate(&allocator, layout)).collect();
        let full = allocator.figures().bytes_committed;
        assert_eq!(full, Bytes::new(32 * GRANULE as u64), "{}", world.name);
        // One of each pair is not enough.
        for block in blocks.iter().step_by(2) {
            free(&allocator, *block, layout);
        }
        assert_eq!(allocator.figures().bytes_committed, full);
        for block in blocks.iter().skip(1).step_by(2).skip(3).take(20) {
            free(&allocator, *block, layout);
        }
        assert_eq!(allocator.figures().bytes_committed, Bytes::new(12 * GRANULE as u64), "{}", world.name);
        for block in blocks.iter().skip(1).step_by(2).take(3).chain(blocks.iter().skip(1).step_by(2).skip(23)) {
            free(&allocator, *block, layout);
        }
        assert_eq!(allocator.figures().bytes_committed, Bytes::ZERO, "{}", world.name);
        drop(allocator);
        world.assert_empty("after holes");
    }
}

#[test]
fn what_holds_nothing_stays_up_to_the_limit_and_trim_takes_the_rest() {
    let world = World::sim(card(), DeviceOptions::new());
    let allocator = builder(&world).keep(Bytes::new(8 * GRANULE as u64)).build_on_device().unwrap();
    let layout = layout(HALF, 1);
    let blocks: Vec<_> = (0..64).map(|_| allocate(&allocator, layout)).collect();
    for block in blocks {
        free(&allocator, block, layout);
    }
    let figures = allocator.figures();
    assert!(figures.bytes_idle <= Bytes::new(8 * GRANULE as u64) && !figures.bytes_idle.is_zero(), "{figures}");
    assert_eq!(figures.bytes_idle, figures.bytes_committed);
    assert_eq!(allocator.trim(), figures.bytes_idle);
    assert_eq!(allocator.figures().bytes_committed, Bytes::ZERO);
}

/// Memory under holes is used for other places before new memory is asked for.
#[test]
fn holes_lend_their_chunks_to_other_places() {
    let world = World::sim(card().total(Bytes::mib(16)), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let allocator = builder(&world).keep(Bytes::mib(64)).threshold(Bytes::mib(4)).build_on_device().unwrap();
    let small = layout(GRANULE, 1);
    let blocks: Vec<_> = (0..200).map(|_| allocate(&allocator, small)).collect();
    let chunks = world.device.snapshot().chunks;
    // Somebody forgot that work still runs there: that costs a wait, not the device.
    let sim = world.sim.as_ref().unwrap();
    sim.queue_work(sim.stream(), blocks[0].device_ptr(), GRANULE as u64);
    for block in blocks.iter().step_by(2) {
        free(&allocator, *block, small);
    }
    // No hole is wide enough, but together they have the chunks.
    let creates = world.sim.as_ref().unwrap().count(Call::Create);
    let wide = layout(3 << 20, 1);
    let block = allocate(&allocator, wide);
    assert_eq!(world.device.snapshot().chunks, chunks);
    assert_eq!(world.sim.as_ref().unwrap().count(Call::Create), creates);
    assert!(!sim.is_lost() && sim.violations().is_empty());
    free(&allocator, block, wide);
    for block in blocks.iter().skip(1).step_by(2) {
        free(&allocator, *block, small);
    }
    drop(allocator);
    world.assert_empty("after lending");
}

#[test]
fn a_buffer_gets_what_an_allocator_does_not_need() {
    let world = World::sim(card().total(Bytes::mib(16)), DeviceOptions::new());
    let allocator = builder(&world).keep(Bytes::mib(64)).build_on_device().unwrap();
    let (small, large) = (layout(HALF, 1), layout(5 << 20, 1));
    let blocks: Vec<_> = (0..160).map(|_| allocate(&allocator, small)).collect();
    let own = allocate(&allocator, large);
    for block in blocks {
        free(&allocator, block, small);
    }
    free(&allocator, own, large);
    assert!(allocator.figures().bytes_idle >= Bytes::mib(10), "{}", allocator.figures());
    let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(16 << 20).build().unwrap();
    buffer.grow_to(15 << 20).unwrap();
    drop((buffer, allocator));
    world.assert_empty("after giving way");
}

#[test]
fn recycled_memory_is_zero_where_zeros_are_asked_for() {
    for world in worlds() {
        let allocator = on_device(&world);
        let mut model = Model::new(allocator.clone(), world.name.clone());
        for size in [16, 100, 5000, 16 << 10, 20 << 10, HALF, GRANULE, 3 * GRANULE + 5] {
            let layout = layout(size, 1);
            for _ in 0..3 {
                model.allocate(layout).unwrap();
            }
            // Their pattern has no zero byte.
            model.free_all();
            for _ in 0..3 {
                model.allocate_zeroed(layout).unwrap();
            }
            model.free_all();
        }
        // The rest of a chunk that was used, shrunk out of, and grown into again.
        for size in [GRANULE + 100, 20 << 10, 3000] {
            model.allocate(layout(size, 1)).unwrap();
            model.resize(0, layout(size * 2 / 3, 1), false).unwrap();
            model.resize(0, layout(size, 1), true).unwrap();
            model.resize(0, layout(size + 90, 1), true).unwrap();
            model.free_all();
        }
        drop((model, allocator));
        world.assert_empty("after recycling");
    }
}

#[test]
fn spans_of_freed_blocks_are_had_again() {
    let world = World::sim(card(), DeviceOptions::new());
    let allocator = builder(&world).recycle(2).build_on_device().unwrap();
    let sim = world.sim.as_ref().unwrap();
    let layout = layout(4 * GRANULE, 1);
    let reserves = || sim.count(Call::Reserve);
    let blocks: Vec<_> = (0..3).map(|_| allocate(&allocator, layout)).collect();
    let before = reserves();
    for block in blocks {
        free(&allocator, block, layout);
    }
    let again: Vec<_> = (0..3).map(|_| allocate(&allocator, layout)).collect();
    assert_eq!(reserves(), before + 1, "two were kept, one was not");
    for block in again {
        free(&allocator, block, layout);
    }
    // One for two chunks does not keep the four that a recycled span had.
    let half = self::layout(2 * GRANULE, 1);
    let block = allocate(&allocator, half);
    assert_eq!(reserves(), before + 1);
    let own = allocator.figures();
    assert_eq!(own.bytes_committed.get() - own.bytes_idle.get(), 2 * GRANULE as u64, "{own}");
    free(&allocator, block, half);
    drop(allocator);
    world.assert_empty("after recycling spans");
}

#[test]
fn blocks_outlive_their_allocator() {
    let driver = HostDriver::open(HostOptions::default().with_capacity(Bytes::mib(64))).unwrap();
    let device = DeviceOptions::new().open(Arc::new(driver)).unwrap();
    let allocator = SpanAllocator::builder(&device).headroom(Headroom::NONE).build().unwrap();
    let kept: Vec<_> = [100, 40 << 10, 3 << 20]
        .map(|size| {
            let block = allocator.allocate_zeroed(layout(size, 1)).unwrap();
            // SAFETY: the block has so many bytes, and is ours alone.
            unsafe { core::slice::from_raw_parts_mut(block.ptr().as_ptr(), size) }
        })
        .into();
    drop(allocator);
    drop(device);
    for bytes in kept {
        bytes.fill(9);
        assert!(bytes.iter().all(|byte| *byte == 9));
    }
}

#[test]
fn allocators_for_the_host_are_refused_on_a_card() {
    let world = World::sim(card(), DeviceOptions::new());
    assert!(matches!(SpanAllocator::new(&world.device), Err(Error::NotHostVisible { .. })));
    let other = World::sim(card(), DeviceOptions::new());
    let error = SpanAllocator::builder(&world.device).pool(other.device.pool()).build_on_device().unwrap_err();
    assert!(matches!(error, Error::OtherDevice { .. }), "{error}");
    for bad in [Bytes::ZERO, Bytes::kib(3), Bytes::gib(100)] {
        let error = SpanAllocator::builder(&world.device).threshold(bad).build_on_device().unwrap_err();
        assert!(matches!(error, Error::ChunkSize { .. }), "{error}");
    }
    for bad in [0, 8, 24, 32 << 10] {
        assert!(SpanAllocator::builder(&world.device).alignment(bad).build_on_device().is_err(), "{bad}");
    }
    for bad in [Bytes::ZERO, Bytes::kib(4), Bytes::kib(65), Bytes::gib(2)] {
        assert!(SpanAllocator::builder(&world.device).slot(bad).build_on_device().is_err(), "{bad}");
    }
}

#[test]
fn addresses_that_cannot_be_had_are_fewer() {
    // A span of twice the memory is too large for this one.
    let world = World::personality(Personality::ReserveLimit(1 << 30), DeviceOptions::new());
    let allocator = SpanAllocator::builder(&world.device).build_on_device().unwrap();
    let (small, large) = (layout(HALF, 1), layout(3 << 20, 1));
    let blocks = [(small, allocate(&allocator, small)), (large, allocate(&allocator, large))];
    assert!(allocator.figures().bytes_reserved <= Bytes::gib(2));
    for (layout, block) in blocks {
        free(&allocator, block, layout);
    }
    drop(allocator);
    world.assert_empty("after few addresses");
}

/// Where all chunks of a span have one size, it is that of the block, not of its headroom.
#[test]
fn blocks_on_a_device_of_uniform_chunks_waste_little() {
    let world = World::sim(card().personality(Personality::UniformChunksOnly), DeviceOptions::new());
    let allocator = builder(&world).headroom(Headroom::default()).keep(Bytes::gib(1)).build_on_device().unwrap();
    let mut blocks = Vec::new();
    for round in 0..3 {
        for granules in [1, 3, 20, 200] {
            let layout = layout(granules * GRANULE, 1);
            blocks.push((layout, allocate(&allocator, layout)));
            let live: u64 = blocks.iter().map(|(layout, _)| layout.size() as u64).sum();
            let figures = allocator.figures();
            assert!(figures.bytes_in_blocks.get() <= live + live / 8, "{round}: {figures} for {live}");
        }
        for (layout, block) in blocks.drain(..) {
            free(&allocator, block, layout);
        }
    }
    drop(allocator);
    world.assert_empty("after uniform chunks");
}

/// Heaps pass on addresses of which they need none: a shared span of two regions serves several in turn.
#[test]
fn addresses_go_round_among_heaps() {
    let world = World::sim(card().total(Bytes::mib(512)), DeviceOptions::new());
    let allocator = builder(&world).small_span(Bytes::mib(128)).heaps(4).build_on_device().unwrap();
    let layout = layout(HALF, 1);
    for _ in 0..6 {
        let allocator = allocator.clone();
        let thread = std::thread::spawn(move || {
            let blocks: Vec<_> = (0..(100 << 20) / HALF).map(|_| allocate(&allocator, layout)).collect();
            for block in blocks {
                free(&allocator, block, layout);
            }
        });
        thread.join().unwrap();
    }
    drop(allocator);
    world.assert_empty("after going round");
}

/// A slab that was emptied stays if it is the only one, so that a block that comes and goes takes none each time.
#[test]
fn the_last_slab_of_a_size_stays() {
    let world = World::sim(card(), DeviceOptions::new());
    let allocator = builder(&world).heaps(1).build_on_device().unwrap();
    for _ in 0..2 {
        let block = allocate(&allocator, layout(100, 1));
        free(&allocator, block, layout(100, 1));
        let figures = allocator.figures();
        assert_eq!((figures.bytes_committed.get(), figures.bytes_idle.get()), (GRANULE as u64, 0), "{figures}");
    }
    allocator.trim();
    assert_eq!(allocator.figures().bytes_committed, Bytes::ZERO);
}

/// Which spans that wait a block gets: one that is wide enough, and whose chunks are not too large.
#[test]
fn spans_are_had_again_where_they_fit() {
    let world = World::sim(card(), DeviceOptions::new());
    let allocator = builder(&world).headroom(Headroom::NONE).build_on_device().unwrap();
    // Of the same doubling.
    for granules in [5, 7] {
        let layout = layout(granules * GRANULE, 1);
        let block = allocate(&allocator, layout);
        free(&allocator, block, layout);
    }
    drop(allocator);
    let world = World::sim(card().personality(Personality::UniformChunksOnly), DeviceOptions::new());
    let allocator = builder(&world).headroom(Headroom::default()).keep(Bytes::gib(1)).build_on_device().unwrap();
    let (large, small) = (layout(200 * GRANULE, 1), layout(GRANULE, 1));
    let block = allocate(&allocator, large);
    free(&allocator, block, large);
    let block = allocate(&allocator, small);
    assert_eq!(allocator.figures().bytes_in_blocks, Bytes::new(GRANULE as u64));
    free(&allocator, block, small);
}

#[test]
fn memory_under_spans_that_wait_is_limited() {
    let world = World::sim(card(), DeviceOptions::new());
    let allocator = builder(&world).keep(Bytes::new(9 * GRANULE as u64)).build_on_device().unwrap();
    let layout = layout(4 * GRANULE, 1);
    let blocks: Vec<_> = (0..4).map(|_| allocate(&allocator, layout)).collect();
    for block in blocks {
        free(&allocator, block, layout);
    }
    assert_eq!(allocator.figures().bytes_idle, Bytes::new(8 * GRANULE as u64), "{}", allocator.figures());
}

#[test]
fn blocks_of_a_device_are_aligned_to_256_bytes() {
    let world = World::sim(card(), DeviceOptions::new());
    let allocator = SpanAllocator::builder(&world.device).build_on_device().unwrap();
    for size in [1, 100, 300, 20 << 10] {
        for block in [0; 3].map(|_| allocate(&allocator, layout(size, 1))) {
            assert!(block.device_ptr().is_multiple_of(256), "{block:?}");
        }
    }
}

/// A block that has much more than it needs moves to where it has not.
#[test]
fn a_block_that_shrank_a_lot_moves() {
    let world = World::sim(card(), DeviceOptions::new());
    let allocator = on_device(&world);
    for (from, to) in [(10_000, 200), (3 * GRANULE, 20 << 10)] {
        let (old, new) = (layout(from, 1), layout(to, 1));
        let block = allocate(&allocator, old);
        // SAFETY: live, of that layout, and used by nobody.
        let moved = unsafe { allocator.shrink(block.ptr(), old, new) }.unwrap();
        let figures = allocator.figures();
        assert!(figures.bytes_in_blocks.get() < 2 * to as u64 && figures.large_blocks == 0, "{figures}");
        free(&allocator, moved, new);
    }
}

/// So many threads that several heaps are theirs.
fn on_threads(allocator: &SpanAllocator<DeviceMemory>, layout: Layout) -> Vec<growspan::Block> {
    let threads: Vec<_> = (0..8)
        .map(|_| {
            let allocator = allocator.clone();
            std::thread::spawn(move || allocator.allocate(layout))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
}

/// One heap has all addresses: the others' threads are served from there.
#[test]
fn threads_share_the_last_region() {
    let world = World::sim(card(), DeviceOptions::new());
    for size in [100, HALF] {
        let allocator = builder(&world).small_span(Bytes::mib(64)).heaps(4).build_on_device().unwrap();
        let layout = layout(size, 1);
        for block in on_threads(&allocator, layout) {
            free(&allocator, block, layout);
        }
        drop(allocator);
        world.assert_empty("after sharing addresses");
    }
}

/// One heap has all memory, and holes in it that are no whole slots: others' threads get those before an error.
#[test]
fn threads_share_holes_on_a_full_card() {
    for contiguous in [false, true] {
        let world = World::sim(card().total(Bytes::mib(32)), DeviceOptions::new().contiguous(contiguous));
        let allocator = builder(&world).threshold(Bytes::kib(64)).keep(Bytes::ZERO).heaps(4).build_on_device().unwrap();
        let layout = layout(20 << 10, 1);
        let mut blocks = Vec::new();
        while let Ok(block) = allocator.allocate(layout) {
            blocks.push(block);
        }
        let chunks = world.device.snapshot().bytes_held();
        for block in blocks.iter().step_by(3).take(40) {
            free(&allocator, *block, layout);
        }
        let shared = on_threads(&allocator, layout);
        assert!(world.device.snapshot().bytes_held() <= chunks, "{}", world.name);
        for block in shared.iter().chain(blocks.iter().step_by(3).skip(40)) {
            free(&allocator, *block, layout);
        }
        for (n, block) in blocks.iter().enumerate() {
            if n % 3 != 0 {
                free(&allocator, *block, layout);
            }
        }
        drop(allocator);
        world.assert_empty("after sharing holes");
    }
}

/// Small blocks that stay do not hold on to the chunks of large ones that came and went beside them.
#[test]
fn small_blocks_keep_no_large_chunks() {
    for world in worlds().into_iter().filter(World::is_virtual) {
        let uniform = world.device.verdict().granularity().max(Bytes::mib(1));
        let builder = builder(&world).slot(uniform).threshold(Bytes::mib(16)).keep(Bytes::ZERO).heaps(1);
        let allocator = builder.build_on_device().unwrap();
        let (small, large) = (layout(20 << 10, 1), layout(uniform.get() as usize * 3 / 2, 1));
        let blocks: Vec<_> = (0..20).map(|_| (allocate(&allocator, small), allocate(&allocator, large))).collect();
        for (_, block) in &blocks {
            free(&allocator, *block, large);
        }
        assert_eq!(allocator.figures().bytes_committed, uniform, "{}", world.name);
        for (block, _) in blocks {
            free(&allocator, block, small);
        }
        drop(allocator);
        world.assert_empty("after small and large");
    }
}

/// What follows a block has no memory and there is none: the block moves to a hole that has.
#[test]
fn a_block_moves_to_a_hole_where_it_cannot_grow() {
    let world = World::sim(card().total(Bytes::mib(16)), DeviceOptions::new());
    let builder = builder(&world).threshold(Bytes::mib(32)).keep(Bytes::ZERO).heaps(1);
    let allocator = builder.build_on_device().unwrap();
    let mut model = Model::new(allocator, world.name.clone());
    // Three quarters of a slot: the fourth and the fifth lie in three slots, of which they fill none.
    let three = 3 * GRANULE / 4;
    while model.allocate(layout(three, 1)).is_ok() {}
    model.live.sort_by_key(|live| live.block.device_ptr());
    let hole = model.live[3].block.device_ptr();
    let last = model.live.len() - 1;
    assert_eq!(model.live[last].block.device_ptr() - hole, ((last - 3) * three) as u64);
    let last = model.live.swap_remove(last);
    model.free(4);
    model.free(3);
    model.live.push(last);
    let last = model.live.len() - 1;
    model.resize(last, layout(2 * three, 1), true).unwrap();
    assert!(model.live.iter().any(|live| live.block.device_ptr() == hole));
    model.check_all();
    model.free_all();
    drop(model);
    world.assert_empty("after moving to a hole");
}

/// A threshold made for spans does not make a contiguous card hold as much for the first small block.
#[test]
fn a_large_threshold_costs_nothing_without_virtual_memory() {
    let world = World::sim(card().total(Bytes::mib(128)), DeviceOptions::new().contiguous(true));
    let allocator = builder(&world).threshold(Bytes::gib(2)).build_on_device().unwrap();
    let blocks = [1000, 3 << 20, 60 << 20].map(|size| (layout(size, 1), allocate(&allocator, layout(size, 1))));
    assert!(allocator.figures().bytes_committed < Bytes::mib(80), "{}", allocator.figures());
    for (layout, block) in blocks {
        free(&allocator, block, layout);
    }
    drop(allocator);
    world.assert_empty("after a large threshold");
}

/// Map entries that ran out are made by unmapping what holds nothing, like memory.
#[test]
fn map_entries_that_ran_out_are_asked_for_once_more() {
    for world in worlds().into_iter().filter(World::is_virtual) {
        let allocator = on_device(&world);
        let own = layout(3 * GRANULE, 1);
        let kept = allocate(&allocator, own);
        for layout in [layout(100, 1), layout(40 << 10, 1), layout(5 * GRANULE, 1)] {
            world.faults.arm(FaultPlan::nth(1).of(Call::Map).kind(DriverErrorKind::OutOfMaps));
            let block = allocate(&allocator, layout);
            world.faults.disarm();
            free(&allocator, block, layout);
            allocator.trim();
        }
        world.faults.arm(FaultPlan::nth(1).of(Call::Map).kind(DriverErrorKind::OutOfMaps));
        let larger = layout(20 * GRANULE, 1);
        // SAFETY: live, of that layout, and used by nobody.
        let grown = unsafe { allocator.grow(kept.ptr(), own, larger) }.unwrap();
        world.faults.disarm();
        free(&allocator, grown, larger);
        drop(allocator);
        world.assert_empty("after map entries ran out");
    }
}

/// A block that is never freed keeps its own memory for the rest of the process, and no more than that.
#[test]
fn a_leak_keeps_what_it_has_and_nothing_else() {
    let world = World::sim(card(), DeviceOptions::new());
    let allocator = builder(&world).keep(Bytes::gib(1)).heaps(1).build_on_device().unwrap();
    let leaked = [layout(100, 1), layout(5 * GRANULE, 1)].map(|layout| allocate(&allocator, layout));
    for layout in [layout(40 << 10, 1), layout(60 << 10, 1), layout(9 * GRANULE, 1)] {
        let blocks: Vec<_> = (0..20).map(|_| allocate(&allocator, layout)).collect();
        for block in blocks {
            free(&allocator, block, layout);
        }
    }
    assert!(allocator.figures().bytes_idle > Bytes::mib(1), "{}", allocator.figures());
    drop(allocator);
    world.device.pool().trim(Bytes::ZERO);
    assert_eq!(world.device.snapshot().bytes_held(), Bytes::new(6 * GRANULE as u64), "{leaked:?}");
}

#[test]
fn nothing_is_mapped_while_a_graph_is_captured() {
    let sim = SimDriver::builder().total(Bytes::gib(1)).build();
    let device = DeviceOptions::new().open(sim.driver()).unwrap();
    assert_eq!(device.verdict().mode(), Mode::Virtual);
    let allocator = SpanAllocator::builder(&device).keep(Bytes::ZERO).sizing(Sizing::Exact).build_on_device().unwrap();
    let (small, range, large) = (layout(1000, 1), layout(100 << 10, 1), layout(8 << 20, 1));
    let first = [small, range, large].map(|layout| (layout, allocate(&allocator, layout)));
    let stream = growspan::driver::RawStream::DEFAULT;
    sim.capture(stream, true);
    // What has memory already may be handed out.
    let inside = allocate(&allocator, small);
    free(&allocator, inside, small);
    assert!(matches!(allocator.allocate(large), Err(Error::Capturing { .. })));
    // Three of them do not fit in what is mapped.
    let range = layout(1500 << 10, 1);
    let results: Vec<_> = (0..3).map(|_| allocator.allocate(range)).collect();
    assert!(results.iter().any(|result| matches!(result, Err(Error::Capturing { .. }))));
    results.into_iter().flatten().for_each(|block| free(&allocator, block, range));
    // Frees succeed, and unmap nothing.
    let unmaps = sim.count(Call::Unmap);
    for (layout, block) in first {
        free(&allocator, block, layout);
    }
    assert_eq!(sim.count(Call::Unmap), unmaps);
    assert_eq!(sim.violations(), []);
    sim.capture(stream, false);
    allocator.trim();
    assert_eq!(allocator.figures().bytes_committed, Bytes::ZERO);
    drop((allocator, device));
    sim.assert_clean();
}

#[test]
fn what_cannot_be_waited_for_goes_when_it_can_be() {
    let world = World::sim(card(), DeviceOptions::new());
    let allocator = builder(&world).build_on_device().unwrap();
    let (small, large) = (layout(1000, 1), layout(8 * GRANULE, 1));
    for layout in [small, large] {
        let block = allocate(&allocator, layout);
        free(&allocator, block, layout);
    }
    let sim = world.sim.as_ref().unwrap();
    let unmaps = sim.count(Call::Unmap);
    // What cuCtxSynchronize says while a stream captures.
    world.faults.arm(FaultPlan::every().of(Call::Synchronize));
    assert_eq!(allocator.trim(), Bytes::ZERO);
    drop(allocator);
    world.faults.disarm();
    assert_eq!(sim.count(Call::Unmap), unmaps);
    assert_eq!(world.device.snapshot().bytes_retiring, Bytes::new(9 * GRANULE as u64));
    world.assert_balanced("dropped under capture");
    world.device.synchronize().unwrap();
    world.assert_empty("after the capture");
}

#[test]
fn a_lost_device_and_the_drop_after_it() {
    let sim = SimDriver::builder().total(Bytes::gib(1)).build();
    let device = DeviceOptions::new().open(sim.driver()).unwrap();
    let allocator = SpanAllocator::builder(&device).build_on_device().unwrap();
    let (small, large) = (layout(1000, 1), layout(8 << 20, 1));
    let blocks = [small, large].map(|layout| (layout, allocate(&allocator, layout)));
    sim.lose();
    assert!(allocator.allocate(layout(16 << 20, 1)).is_err());
    for (layout, block) in blocks {
        free(&allocator, block, layout);
    }
    allocator.trim();
    drop((allocator, device));
}

#[test]
fn a_forked_child_gets_no_memory_and_takes_none_back() {
    let world = World::host(DeviceOptions::new());
    let allocator = builder(&world).build().unwrap();
    let layout = layout(1000, 8);
    let block = allocator.allocate(layout).unwrap();
    let arena = ArenaAllocator::new(allocator.clone(), Bytes::kib(64));
    arena.allocate(layout).unwrap();
    let tracked = TrackingAllocator::new(allocator.clone());
    let noted = tracked.allocate(layout).unwrap();
    // SAFETY: the child calls this crate, which takes no lock there, and exits at once, running no destructors of others.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(allocator.allocate(layout), Err(Error::Forked));
        // SAFETY: live, of that layout, and used by nobody.
        unsafe { allocator.deallocate(block.ptr(), layout) };
        let idle = allocator.trim();
        let none = allocator.figures() == growspan::Figures::default();
        // An arena has room left, of memory that is not there.
        let no_piece = matches!(arena.allocate(layout), Err(Error::Forked)) && arena.taken().is_zero();
        let no_list = tracked.live().is_empty() && tracked.by_name().is_empty();
        drop((allocator, arena, tracked));
        let all = refused && idle.is_zero() && none && no_piece && no_list;
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!all)) };
    }
    let mut status = -1;
    // SAFETY: `status` is ours to write.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    // SAFETY: live, of that layout, and used by nobody.
    unsafe { allocator.deallocate(block.ptr(), layout) };
    // SAFETY: the same.
    unsafe { tracked.deallocate(noted.ptr(), layout) };
    drop((allocator, arena, tracked));
    world.assert_empty("after a child");
}

#[test]
fn figures_read_like_a_sentence() {
    let device = Device::from_driver(SimDriver::builder().total(Bytes::gib(1)).build().driver()).unwrap();
    let allocator = SpanAllocator::builder(&device).headroom(Headroom::NONE).build_on_device().unwrap();
    let block = allocate(&allocator, layout(4 << 20, 1));
    assert_eq!(
        allocator.figures().to_string(),
        "1 blocks of 4 MiB (1 with a span of their own), 4 MiB committed, 0 B idle, 2 GiB reserved"
            .replace("2 GiB", &allocator.figures().bytes_reserved.to_string())
    );
    free(&allocator, block, layout(4 << 20, 1));
}
