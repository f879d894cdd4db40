//! What is in the memory, and where it is.

use core::alloc::Layout;

use growspan::driver::PinFlags;
use growspan::driver::host::HostOptions;
use growspan::driver::sim::SimDriver;
use growspan::pinned::{PinStrategy, PinnedBuffer, ThpPolicy};
use growspan::{Bytes, Device, Error, GrowableBuffer, Quiesce, SpanAllocator};

use crate::{MIB, World, small_pieces};

#[test]
fn sizes_at_every_edge_keep_address_and_contents() {
    for world in World::all() {
        let mut buffer = small_pieces::<u8>(&world.device, 9 * MIB);
        let at = buffer.as_ptr();
        assert!((at.addr()).is_multiple_of(2 * MIB) && buffer.is_empty() && buffer.device_ptr().is_none());
        let mut model = Vec::new();
        let edges = [
            1,
            0,
            4095,
            4096,
            4097,
            0,
            2 * MIB - 1,
            2 * MIB,
            2 * MIB + 1,
            4 * MIB,
            6 * MIB + 1,
            2 * MIB + 1,
            2 * MIB,
            9 * MIB,
            8 * MIB,
            8 * MIB - 1,
            9 * MIB - 1,
            1,
            0,
            9 * MIB,
        ];
        for (step, &len) in edges.iter().enumerate() {
            let exact = step % 3 == 1;
            if len >= model.len() {
                buffer.grow_to(len).unwrap();
            } else if exact {
                buffer.shrink_exact(len, Quiesce::Device).unwrap();
                assert_eq!(buffer.capacity(), len.next_multiple_of(4096).min(9 * MIB), "{}: {len}", world.name);
            } else {
                buffer.shrink_to(len, Quiesce::Device).unwrap();
                assert!(buffer.pieces().last().is_none_or(|piece| (piece.offset.get() as usize) < len));
            }
            let before = model.len().min(len);
            model.truncate(len);
            assert!(buffer[..before] == model[..], "{}: step {step}", world.name);
            model.resize(len, 0);
            for (at, byte) in [(0, 3), (before, 5), (len.saturating_sub(1), 7)] {
                if let Some(place) = model.get_mut(at) {
                    *place = byte + step as u8;
                    buffer[at] = *place;
                }
            }
            model.copy_from_slice(&buffer);
            assert_eq!((buffer.len(), buffer.as_ptr()), (len, at));
            tiles(&buffer);
        }
        buffer.close().unwrap();
        world.assert_clean();
    }
}

/// The pieces cover what is committed, in order, without a gap.
fn tiles<T>(buffer: &PinnedBuffer<T>) {
    let mut end = 0;
    for piece in buffer.pieces() {
        assert_eq!(piece.offset.get(), end);
        assert_eq!(piece.host_ptr, buffer.as_ptr().addr() as u64 + end);
        assert!(piece.bytes.get() > 0 && piece.bytes.get() <= 2 << 20);
        end += piece.bytes.get();
    }
    assert_eq!(buffer.committed().get(), end);
}

#[test]
fn fresh_memory_is_zero_also_where_other_memory_was() {
    for world in World::all() {
        let mut buffer = small_pieces::<u64>(&world.device, MIB);
        buffer.grow_to(MIB).unwrap();
        buffer.fill(!0);
        buffer.shrink_to(0, Quiesce::Device).unwrap();
        assert_eq!(buffer.capacity(), 0);
        buffer.grow_to(MIB).unwrap();
        assert!(buffer.iter().all(|word| *word == 0), "{}", world.name);
        // What stays locked keeps what is in it.
        buffer.fill(7);
        buffer.truncate(1);
        buffer.grow_to(3).unwrap();
        assert_eq!(buffer[..], [7, 7, 7]);
    }
}

#[test]
fn borders_lie_where_pieces_end_and_copies_cross_them() {
    for world in World::all() {
        let mut buffer = small_pieces::<[u8; 3]>(&world.device, 3 * MIB);
        buffer.grow_to(MIB / 3).unwrap();
        buffer.grow_to(2 * MIB).unwrap();
        // The first growth ended on a page, and pieces end at multiples of their size whatever came before.
        let ends: Vec<_> = buffer.borders().map(Bytes::get).collect();
        assert_eq!(ends, [MIB as u64, 2 << 20, 4 << 20]);
        let parts: Vec<_> = buffer.split(0..6 << 20).collect();
        assert_eq!(parts, [0..1 << 20, 1 << 20..2 << 20, 2 << 20..4 << 20, 4 << 20..6 << 20]);
        assert_eq!(buffer.split(5..5).count(), 0);
        assert!(buffer.split(1 << 20..2 << 20).eq(core::iter::once(1 << 20..2 << 20)));

        for (number, element) in buffer.iter_mut().enumerate() {
            *element = [number as u8, (number >> 8) as u8, (number >> 16) as u8];
        }
        let mut there = GrowableBuffer::<[u8; 3]>::builder(&world.device).max_len(3 * MIB).build().unwrap();
        there.append(&buffer).unwrap();
        let mut back = small_pieces::<[u8; 3]>(&world.device, 2 * MIB);
        back.grow_to(2 * MIB).unwrap();
        there.copy_out(0, &mut back).unwrap();
        assert!(*back == *buffer, "{}", world.name);
    }
}

/// As on HIP, where larger pieces would start again as a whole.
#[test]
fn no_piece_is_larger_than_the_driver_bears() {
    let sim = SimDriver::builder().info(|info| info.quirks.max_pin = Some(Bytes::mib(4))).build();
    let device = Device::from_driver(sim.driver()).unwrap();
    for piece in [None, Some(Bytes::mib(6)), Some(Bytes::mib(2))] {
        let mut builder = PinnedBuffer::<u8>::builder(&device).max_len(13 * MIB);
        if let Some(piece) = piece {
            builder = builder.piece(piece);
        }
        let mut buffer = builder.build().unwrap();
        let timing = buffer.grow_to(13 * MIB).unwrap();
        let largest = buffer.pieces().iter().map(|piece| piece.bytes).max().unwrap();
        assert_eq!(largest, piece.map_or(Bytes::mib(4), |piece| piece.min(Bytes::mib(4))));
        assert_eq!(timing.pieces as usize, buffer.pieces().len());
    }
    let allocator = SpanAllocator::builder(&device).build_page_locked(HostOptions::default()).unwrap();
    let layout = Layout::from_size_align(90 * MIB, 1).unwrap();
    let block = allocator.allocate(layout).unwrap();
    let largest = allocator.pinned_pieces(block.as_slice().as_ptr()).iter().map(|piece| piece.bytes).max().unwrap();
    assert_eq!(largest, Bytes::mib(4));
    // SAFETY: the block is live, has this layout, and is used no more.
    unsafe { allocator.deallocate(block.ptr(), layout) };
}

#[test]
fn the_device_s_address_is_what_the_driver_says() {
    let (host, sim) = (World::host(), World::sim());
    let mut buffer = small_pieces::<u8>(&host.device, 4 * MIB);
    buffer.grow_to(4 * MIB).unwrap();
    assert_eq!(buffer.device_ptr(), Some(buffer.as_ptr().addr() as u64));
    let mut buffer = small_pieces::<u8>(&sim.device, 4 * MIB);
    buffer.grow_to(4 * MIB).unwrap();
    let device_ptr = buffer.device_ptr().unwrap();
    assert_eq!(device_ptr, buffer.as_ptr().addr() as u64 + (1 << 57));
    assert!(buffer.pieces().iter().all(|piece| piece.device_ptr == Some(device_ptr + piece.offset.get())));
    let flags = PinFlags::USUAL.with_mapped(false);
    let mut unmapped = PinnedBuffer::<u8>::builder(&sim.device).max_len(10).flags(flags).build().unwrap();
    unmapped.grow_to(10).unwrap();
    assert_eq!((unmapped.device_ptr(), unmapped.flags()), (None, flags));
}

#[test]
fn appending_grows_by_an_eighth_and_no_further_than_the_end() {
    let world = World::sim();
    let mut buffer = PinnedBuffer::<u64>::builder(&world.device).max_len(4 * MIB).build().unwrap();
    let block: Vec<u64> = (0..1000).collect();
    let mut growths = 0;
    while buffer.len() + block.len() <= 4 * MIB {
        let before = buffer.capacity();
        buffer.append(&block).unwrap();
        growths += u32::from(buffer.capacity() > before);
    }
    assert!(growths < 60, "{growths}");
    assert!(buffer.chunks(1000).all(|chunk| *chunk == block[..]));
    let error = buffer.append(&block).unwrap_err();
    assert!(matches!(error, Error::BeyondMax { max_len, .. } if max_len == 4 * MIB), "{error}");
    buffer.append(&block[..4 * MIB % 1000]).unwrap();
    assert_eq!(buffer.len(), 4 * MIB);
}

#[test]
fn the_driver_s_allocation_comes_whole_and_in_blocks() {
    for world in World::all() {
        let builder = PinnedBuffer::<u32>::builder(&world.device).max_len(2 * MIB).strategy(PinStrategy::Driver);
        let mut buffer = builder.clone().build().unwrap();
        assert_eq!((buffer.capacity(), buffer.thp()), (0, ThpPolicy::Inherit));
        assert!(buffer.as_slice().is_empty());
        let timing = buffer.grow_to(5).unwrap();
        assert_eq!((timing.pieces, timing.threads, buffer.capacity(), buffer.len()), (1, 0, 2 * MIB, 5));
        let at = buffer.as_ptr();
        buffer.fill(9);
        assert_eq!(buffer.grow_to(2 * MIB).unwrap().pieces, 0);
        assert_eq!((buffer.as_ptr(), buffer[4]), (at, 9));
        buffer.shrink_exact(1, Quiesce::Device).unwrap();
        assert_eq!((buffer.len(), buffer.capacity()), (1, 2 * MIB), "all of it is the driver's");
        buffer.close().unwrap();

        let mut blocks = builder.clone().piece(Bytes::mib(3)).build_blocks().unwrap();
        let lens: Vec<_> = blocks.slices().map(<[u32]>::len).collect();
        assert_eq!(lens, [3 * MIB / 4, 3 * MIB / 4, MIB / 2]);
        blocks.slices_mut().for_each(|slice| slice.fill(1));
        assert_eq!((blocks.len(), blocks.timing().pieces), (2 * MIB, 3));
        // Any that fails takes the others along.
        world.control.arm(growspan::driver::fault::FaultPlan::nth(2).of(growspan::driver::Call::AllocatePinned));
        builder.piece(Bytes::mib(3)).build_blocks().unwrap_err();
        assert!(world.control.struck());
        blocks.close().unwrap();
        world.assert_clean();
    }
}

#[test]
fn what_does_not_go_together_is_refused_with_a_way_out() {
    let world = World::host();
    let builder = || PinnedBuffer::<u8>::builder(&world.device).max_len(MIB);
    let combined = PinFlags::USUAL.with_write_combined(true);
    let cases = [
        (builder().flags(combined), "PinStrategy::Driver"),
        (builder().strategy(PinStrategy::Driver).flags(PinFlags::NONE.with_read_only(true)), "PinStrategy::Pieces"),
        (builder().strategy(PinStrategy::Driver).thp(ThpPolicy::Avoid), "DisableForProcess"),
        (builder().strategy(PinStrategy::Driver).numa_node(0), "NUMA node"),
        (builder().piece(Bytes::mib(1)), "2 MiB"),
    ];
    for (builder, words) in cases {
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::PinOptions { .. }) && error.to_string().contains(words), "{error}");
    }
    // What the driver has not, the driver refuses.
    let refusals = [
        (builder().flags(PinFlags::NONE.with_read_only(true)), "never kept from writing"),
        (builder().strategy(PinStrategy::Driver).flags(combined), "past its caches"),
    ];
    for (builder, words) in refusals {
        let error = builder.build().unwrap().grow_to(1).unwrap_err().to_string();
        assert!(error.contains("not supported") && error.contains(words), "{error}");
    }
    assert!(matches!(builder().max_len(0).build(), Err(Error::ZeroLength { .. })));
    assert!(matches!(PinnedBuffer::<()>::builder(&world.device).max_len(1).build(), Err(Error::ZeroSizedType { .. })));
    let much = PinnedBuffer::<u64>::builder(&world.device);
    assert!(matches!(much.clone().max_len(usize::MAX).build(), Err(Error::Overflow { .. })));
    assert!(matches!(much.max_len(usize::MAX >> 4).build(), Err(Error::Reserve { .. })));
    let mut buffer = builder().build().unwrap();
    assert!(matches!(buffer.grow_to(MIB + 1), Err(Error::BeyondMax { .. })));
    assert!(matches!(buffer.shrink_to(1, Quiesce::Device), Err(Error::ShrinkAboveLen { asked: 1, len: 0 })));
    let mut buffer = PinnedBuffer::<u8>::builder(&world.device).max_len(1 << 45).build().unwrap();
    let error = buffer.grow_to(1 << 45).unwrap_err();
    assert!(matches!(error, Error::HostMemory { asked, .. } if asked == Bytes::gib(1 << 15)), "{error}");
    assert_eq!(buffer.capacity(), 0);
}

#[test]
fn a_node_that_is_not_there_is_named() {
    let world = World::host();
    let mut buffer = PinnedBuffer::<u8>::builder(&world.device).max_len(MIB).numa_node(999).build().unwrap();
    let error = buffer.grow_to(1).unwrap_err();
    assert!(matches!(error, Error::NumaNode { node: 999, .. }), "{error}");
    assert_eq!(buffer.capacity(), 0);
}
