//! Blocks that are packed side by side.

use growspan::driver::host::HostOptions;
use growspan::driver::sim::SimDriver;
use growspan::{Bytes, DeviceOptions, SpanAllocator};

use crate::drivers::worlds;
use crate::model::layout;

const MIB: usize = 1 << 20;

/// What 3 MiB blocks, every second of which is freed, leave mapped, and what a block in a hole adds.
#[test]
fn blocks_of_any_size_lie_side_by_side() {
    let sim = SimDriver::builder().total(Bytes::gib(128)).build();
    let device = DeviceOptions::new().open(sim.driver()).unwrap();
    let allocator = SpanAllocator::builder(&device).packed().build_on_device().unwrap();
    let three = layout(3 * MIB, 256);
    let blocks: Vec<_> = (0..64).map(|_| allocator.allocate(three).unwrap()).collect();
    for pair in blocks.windows(2) {
        assert_eq!(pair[1].device_ptr() - pair[0].device_ptr(), 3 << 20);
    }
    // 192 MiB in slots of 8 MiB.
    assert_eq!(allocator.figures().bytes_committed, Bytes::mib(192));
    let free = |block: growspan::Block, layout| {
        // SAFETY: live, of that layout, and used by nobody.
        unsafe { allocator.deallocate(block.ptr(), layout) };
    };
    for block in blocks.iter().skip(1).step_by(2) {
        free(*block, three);
    }
    // All of it stays mapped, so that what fits a hole calls no driver.
    let calls = device.snapshot().driver_calls;
    let again: Vec<_> = (0..32).map(|_| allocator.allocate(three).unwrap()).collect();
    assert_eq!((device.snapshot().driver_calls, allocator.figures().bytes_committed), (calls, Bytes::mib(192)));
    for block in again.iter().chain(blocks.iter().step_by(2)) {
        free(*block, three);
    }
    assert_eq!(allocator.figures().bytes_committed, Bytes::mib(192));
    allocator.trim();
    assert_eq!(allocator.figures().bytes_committed, Bytes::ZERO);
    // From an eighth of the card on a block has its own span, of just its size.
    let large = layout(16 << 30, 256);
    let block = allocator.allocate(large).unwrap();
    assert_eq!(allocator.figures().bytes_committed, Bytes::gib(16));
    free(block, large);
    assert_eq!(allocator.figures().bytes_committed, Bytes::ZERO);
    drop((allocator, device));
    sim.assert_clean();
}

#[test]
fn what_is_set_beside_it_is_as_set() {
    let sim = SimDriver::builder().total(Bytes::gib(128)).build();
    let device = DeviceOptions::new().pool_keep(Bytes::ZERO).open(sim.driver()).unwrap();
    let builder = SpanAllocator::builder(&device).slot(Bytes::mib(2)).keep(Bytes::ZERO).threshold(Bytes::mib(4));
    let allocator = builder.packed().build_on_device().unwrap();
    for (bytes, committed) in [(100, Bytes::mib(2)), (5 * MIB, Bytes::mib(6))] {
        let block = allocator.allocate(layout(bytes, 1)).unwrap();
        assert_eq!(allocator.figures().bytes_committed, committed);
        // SAFETY: live, of that layout, and used by nobody.
        unsafe { allocator.deallocate(block.ptr(), layout(bytes, 1)) };
        allocator.trim();
        assert_eq!(allocator.figures().bytes_committed, Bytes::ZERO);
    }
    drop((allocator, device));
    sim.assert_clean();
}

#[test]
fn every_kind_of_device_packs() {
    for world in worlds() {
        let allocator = SpanAllocator::builder(&world.device).packed().build_on_device().unwrap();
        let blocks: Vec<_> = (1..40).map(|n| (layout(n * 1500, 16), n)).collect();
        let live: Vec<_> = blocks.iter().map(|(layout, _)| allocator.allocate_zeroed(*layout).unwrap()).collect();
        let mut ends: Vec<_> = live.iter().map(|block| (block.device_ptr(), block.len() as u64)).collect();
        ends.sort_unstable();
        assert!(ends.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "{}", world.name);
        for (block, (layout, _)) in live.iter().zip(&blocks) {
            // SAFETY: live, of that layout, and used by nobody.
            unsafe { allocator.deallocate(block.ptr(), *layout) };
        }
        drop(allocator);
        world.assert_empty("packed");
    }
}

/// Where the share of a slot would be too small for one, the usual slot is taken; and more than a driver bears is not asked for.
#[test]
fn small_and_odd_devices_pack_too() {
    let host = |capacity, granularity| {
        let options = HostOptions::default().with_capacity(capacity).with_granularity(granularity);
        DeviceOptions::new().host(options).unwrap()
    };
    let odd = SimDriver::builder().total(Bytes::gib(128)).info(|info| info.quirks.max_chunk = Bytes::mib(6)).build();
    for device in [
        host(Bytes::mib(512), Bytes::kib(4)),
        host(Bytes::mib(1), Bytes::kib(64)),
        DeviceOptions::new().open(odd.driver()).unwrap(),
    ] {
        let allocator = SpanAllocator::builder(&device).packed().build_on_device().unwrap();
        let block = allocator.allocate(layout(1000, 16)).unwrap();
        // SAFETY: live, of that layout, and used by nobody.
        unsafe { allocator.deallocate(block.ptr(), layout(1000, 16)) };
    }
}
