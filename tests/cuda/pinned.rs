//! Page-locked memory and the card: kernels on it, copies from and to it, and what dropping it waits for.

use std::sync::Arc;

use growspan::driver::Call;
use growspan::driver::cuda::CudaDriver;
use growspan::driver::fault::{FaultPlan, Faulty};
use growspan::driver::host::HostOptions;
use growspan::pinned::{PinStrategy, PinnedBuffer};
use growspan::{Bytes, Device, DeviceOptions, GrowableBuffer, Quiesce, SpanAllocator};

use crate::gpu::{Cell, Stream, gpu, value};
use crate::world::MIB;

fn card() -> Device {
    let _ = gpu();
    DeviceOptions::new().cuda(0).unwrap()
}

/// The card writes over the borders of pieces, the host sees it, and the copies that a driver would refuse are cut.
pub(crate) fn kernels_and_copies_cross_the_borders_of_pieces() {
    let device = card();
    let stream = Stream::new();
    let mut buffer = PinnedBuffer::<u32>::builder(&device).max_len(64 * MIB).build().unwrap();
    for words in [3 * MIB, 20 * MIB, 20 * MIB + 5, 32 * MIB] {
        let timing = buffer.grow_to(words).unwrap();
        println!("{timing}");
        let address = buffer.device_ptr().expect("one run of addresses on the card");
        gpu().stamp(&stream, address, words, words as u32);
        stream.wait();
        let wrong = buffer.iter().enumerate().position(|(at, word)| *word != value(at, words as u32));
        assert_eq!(wrong, None);
    }
    assert!(buffer.borders().count() >= 2);
    let mut there = GrowableBuffer::<u32>::builder(&device).max_len(64 * MIB).build().unwrap();
    there.append(&buffer).unwrap();
    let bad = Cell::new();
    gpu().check(&stream, there.device_ptr(), buffer.len(), 32 * MIB as u32, &bad);
    stream.wait();
    bad.assert_none_bad("copied over borders");
    let mut back = PinnedBuffer::<u32>::builder(&device).max_len(64 * MIB).piece(Bytes::mib(6)).build().unwrap();
    back.grow_to(buffer.len()).unwrap();
    there.copy_out(0, &mut back).unwrap();
    assert!(*back == *buffer);
    // Another device over the card had none of it locked, and its copies are cut too.
    let other = card();
    let mut elsewhere = GrowableBuffer::<u32>::builder(&other).max_len(64 * MIB).build().unwrap();
    elsewhere.append(&buffer).unwrap();
    back.fill(0);
    elsewhere.copy_out(0, &mut back).unwrap();
    assert!(*back == *buffer);
    // On a stream too.
    back.fill(0);
    unsafe { there.copy_out_on(0, &mut back, stream.for_growspan()) }.unwrap();
    stream.wait();
    assert!(*back == *buffer);
    back.shrink_exact(MIB + 7, Quiesce::Device).unwrap();
    assert!(back[..] == buffer[..MIB + 7]);
}

/// A kernel that runs for a while and then writes finds the memory there.
pub(crate) fn page_locked_memory_outlives_the_work_on_it() {
    let device = card();
    for strategy in [PinStrategy::Pieces, PinStrategy::Driver] {
        for form in ["drop", "close", "shrink"] {
            let stream = Stream::new();
            let mut buffer = PinnedBuffer::<u32>::builder(&device).max_len(MIB).strategy(strategy).build().unwrap();
            buffer.grow_to(MIB).unwrap();
            buffer.fill(0);
            let done = Cell::new();
            gpu().spin(&stream, buffer.device_ptr().unwrap(), MIB, 50_000_000, &done);
            match form {
                "drop" => drop(buffer),
                "close" => buffer.close().unwrap(),
                _ => buffer.shrink_to(0, Quiesce::Stream(stream.for_growspan())).unwrap(),
            }
            // A block of the driver's goes as a whole: a shrink gives nothing up, and so has nothing to wait for.
            if form == "shrink" && strategy == PinStrategy::Driver {
                stream.wait();
            }
            assert!(!stream.is_busy(), "{form} waits ({strategy:?})");
            assert_eq!(gpu().sync(), 0, "the context is whole");
        }
    }
}

/// Failures in piece k on the card's own driver give back the others.
pub(crate) fn a_failed_growth_gives_its_pieces_back() {
    let _ = gpu();
    let faulty = Faulty::new(Arc::new(CudaDriver::open(0).unwrap()), FaultPlan::count());
    let control = faulty.control();
    let device = Device::from_driver(Arc::new(faulty)).unwrap();
    let mut buffer = PinnedBuffer::<u8>::builder(&device).max_len(64 * MIB).piece(Bytes::mib(4)).build().unwrap();
    buffer.grow_to(8 * MIB).unwrap();
    buffer.fill(3);
    for call in [Call::Pin, Call::PinnedDevicePtr] {
        for k in 1..=5 {
            control.arm(FaultPlan::nth(k).of(call));
            buffer.grow_to(28 * MIB).unwrap_err();
            assert!(control.struck() && buffer.capacity() == 8 * MIB);
        }
    }
    control.disarm();
    buffer.grow_to(28 * MIB).unwrap();
    assert!(buffer[..8 * MIB].iter().all(|byte| *byte == 3) && buffer[8 * MIB..].iter().all(|byte| *byte == 0));
    buffer.close().unwrap();
}

/// Blocks of an allocator over page-locked memory: the card writes to them over the borders of chunks, copies from them
/// are cut, they grow in place, and what is freed under a kernel stays locked until it is over.
pub(crate) fn an_allocator_s_page_locked_blocks_are_the_card_s_too() {
    use core::alloc::Layout;

    let device = card();
    let stream = Stream::new();
    let options = HostOptions::default().with_capacity(Bytes::gib(1));
    // Nothing that holds nothing stays.
    let allocator = SpanAllocator::builder(&device).keep(Bytes::ZERO).build_page_locked(options).unwrap();
    let layout = |words: usize| Layout::array::<u32>(words).unwrap();
    let mut block = allocator.allocate(layout(MIB)).unwrap();
    let address = block.ptr();
    for words in [3 * MIB, 20 * MIB + 5, 64 * MIB] {
        block = unsafe { allocator.grow(address, layout(block.len() / 4), layout(words)) }.unwrap();
        assert_eq!(block.ptr(), address);
        let slice = unsafe { core::slice::from_raw_parts(address.cast::<u32>().as_ptr(), words) };
        let device_ptr = allocator.device_ptr(slice).expect("one run of addresses on the card");
        gpu().stamp(&stream, device_ptr, words, words as u32);
        stream.wait();
        let wrong = slice.iter().enumerate().position(|(at, word)| *word != value(at, words as u32));
        assert_eq!(wrong, None);
        let mut there = GrowableBuffer::<u32>::builder(&device).max_len(64 * MIB).build().unwrap();
        there.append(slice).unwrap();
        let bad = Cell::new();
        gpu().check(&stream, there.device_ptr(), words, words as u32, &bad);
        stream.wait();
        bad.assert_none_bad("copied over the borders of chunks");
    }
    let slice = unsafe { core::slice::from_raw_parts(address.cast::<u32>().as_ptr(), 64 * MIB) };
    assert!(allocator.pinned_pieces(slice).len() > 2);
    let done = Cell::new();
    gpu().spin(&stream, allocator.device_ptr(slice).unwrap(), 64 * MIB, 50_000_000, &done);
    unsafe { allocator.deallocate(address, layout(64 * MIB)) };
    assert!(!stream.is_busy(), "it waits before it lets go");
    assert_eq!((gpu().sync(), allocator.figures().bytes_committed), (0, Bytes::ZERO));
    // On a stream a block is nobody's until its kernel is over.
    let handle = allocator.with_stream(stream.for_growspan()).unwrap();
    let small = layout(1000);
    let first = handle.allocate_zeroed(small).unwrap();
    let seen = unsafe { core::slice::from_raw_parts(first.ptr().as_ptr(), 4000) };
    gpu().spin(&stream, allocator.device_ptr(seen).unwrap(), 1000, 50_000_000, &done);
    unsafe { handle.deallocate(first.ptr(), small) };
    let second = handle.allocate(small).unwrap();
    assert!(stream.is_busy() && second.ptr() != first.ptr());
    stream.wait();
    unsafe { handle.deallocate(second.ptr(), small) };
    drop((handle, allocator));
    assert_eq!(gpu().sync(), 0, "the context is whole");
}
