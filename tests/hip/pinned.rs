//! Page-locked memory over the stand-in, whose kernel can be disturbed: it begins a 2 GiB step of the walk over memory
//! again, many times, if it finds a page that is not there.

use core::time::Duration;

use growspan::driver::host::HostOptions;
use growspan::driver::{DriverErrorKind, PinFlags};
use growspan::pinned::{PinPhase, PinStrategy, PinnedBuffer, SlowCause, ThpPolicy};
use growspan::{Bytes, Device, DeviceOptions, Error, GrowableBuffer, Quiesce, SpanAllocator};

use crate::child::Child;
use crate::stand_in::{StandIn, Stream};
use crate::world::MIB;

pub(crate) fn as_child(role: &str) {
    let device = Device::hip(0).unwrap();
    match role {
        "storm" => storm(&device),
        "slow" => slow(&device),
        "life" => life(&device),
        "failures" => failures(&device),
        "refusals" => refusals(&device),
        "unfinished" => unfinished(&device),
        "large" => large(&device),
        "allocator" => allocator(&device),
        other => panic!("no role {other}"),
    }
    if role != "unfinished" {
        assert_eq!(StandIn::get().pins(), 0);
    }
}

#[test]
fn the_default_strategy_finishes_without_a_retry() {
    for version in ["6.4.3", "7.2.4", "7.14.1"] {
        Child::of(version).set("FAKE_AMDHIP_DISTURBED", "20").role_well("pinned storm");
    }
}

fn storm(device: &Device) {
    let stand_in = StandIn::get();
    // The driver's own allocation meets the storm.
    let builder = PinnedBuffer::<u8>::builder(device).max_len(64 * MIB);
    let mut theirs = builder.clone().strategy(PinStrategy::Driver).build().unwrap();
    theirs.grow_to(64 * MIB).unwrap();
    assert_eq!(stand_in.pin_retries(), 20);
    theirs.close().unwrap();
    for policy in [ThpPolicy::Avoid, ThpPolicy::Advise, ThpPolicy::Inherit] {
        let mut ours = builder.clone().thp(policy).build().unwrap();
        for step in 1..=4 {
            let timing = ours.grow_to(step * 16 * MIB).unwrap();
            assert!(timing.register_faults < 16 && timing.retries_seen == 0, "{timing}");
        }
        assert_eq!(stand_in.pin_retries(), 20, "{policy:?}");
        ours.close().unwrap();
    }
    assert_eq!(builder.build().unwrap().thp(), ThpPolicy::Avoid, "unless it is told otherwise");
}

#[test]
fn what_takes_long_is_in_the_log_while_it_goes_on() {
    let text = Child::of("7.2.4").set("FAKE_AMDHIP_DISTURBED", "1500").role_well("pinned slow");
    let (slow, over) = (text.find("page-locking takes long").unwrap(), text.find("it is over").unwrap());
    assert!(slow < over, "{text}");
}

fn slow(device: &Device) {
    let builder = PinnedBuffer::<u8>::builder(device).max_len(16 * MIB).strategy(PinStrategy::Driver);
    let mut buffer = builder.patience(Duration::from_millis(50)).build().unwrap();
    let timing = buffer.grow_to(16 * MIB).unwrap();
    println!("it is over");
    assert_eq!(timing.slow.len(), 1, "{timing}");
    let slow = &timing.slow[0];
    assert_eq!((slow.phase, slow.bytes), (PinPhase::Allocate, Bytes::mib(16)));
    assert!(slow.after >= Duration::from_millis(50) && slow.after < timing.total);
    // Nobody knows what else the machine does, but it is none of our faults.
    assert_ne!(slow.cause, SlowCause::Faults, "{timing}");
    buffer.close().unwrap();
}

#[test]
fn pieces_grow_shrink_and_are_copied_over_their_borders() {
    for version in ["5.7", "6.1", "6.4.3", "7.2.4", "7.14.1"] {
        Child::of(version).set("FAKE_AMDHIP_PIN_OFFSET", "0x4000000000").role_well("pinned life");
    }
}

fn life(device: &Device) {
    let mut buffer = PinnedBuffer::<u32>::builder(device).max_len(8 * MIB).piece(Bytes::mib(4)).build().unwrap();
    buffer.grow_to(MIB / 2).unwrap();
    buffer.grow_to(5 * MIB).unwrap();
    let ends: Vec<_> = buffer.borders().map(|border| border.get() as usize / MIB).collect();
    assert_eq!(ends, [2, 4, 8, 12, 16]);
    assert_eq!(StandIn::get().pins(), 6);
    assert_eq!(buffer.device_ptr(), Some(buffer.as_ptr().addr() as u64 + (1 << 38)), "asked, not assumed");
    for (number, word) in buffer.iter_mut().enumerate() {
        *word = number as u32;
    }
    let mut there = GrowableBuffer::<u32>::builder(device).max_len(8 * MIB).build().unwrap();
    there.append(&buffer).unwrap();
    let mut back = PinnedBuffer::<u32>::builder(device).max_len(8 * MIB).piece(Bytes::mib(6)).build().unwrap();
    back.grow_to(5 * MIB).unwrap();
    there.copy_out(0, &mut back).unwrap();
    assert!(*back == *buffer);
    // Another device over the card had none of it locked, and its copies are cut too.
    let other = DeviceOptions::new().hip(0).unwrap();
    let mut elsewhere = GrowableBuffer::<u32>::builder(&other).max_len(8 * MIB).build().unwrap();
    elsewhere.append(&buffer).unwrap();
    back.fill(0);
    elsewhere.copy_out(0, &mut back).unwrap();
    assert!(*back == *buffer);
    elsewhere.close().unwrap();
    buffer.shrink_exact(MIB + 1, Quiesce::Device).unwrap();
    assert_eq!((buffer.capacity(), buffer[MIB]), (MIB + 1024, MIB as u32));
    buffer.shrink_to(0, Quiesce::Device).unwrap();
    assert_eq!(buffer.capacity(), 0);
    buffer.grow_to(3).unwrap();
    assert_eq!(buffer[..], [0; 3]);
    buffer.close().unwrap();
    back.close().unwrap();
    there.close().unwrap();
}

#[test]
fn an_error_in_piece_k_gives_back_the_others() {
    Child::of("7.14.1").role_well("pinned failures");
}

fn failures(device: &Device) {
    let stand_in = StandIn::get();
    let mut buffer = PinnedBuffer::<u8>::builder(device).max_len(32 * MIB).piece(Bytes::mib(2)).build().unwrap();
    buffer.grow_to(4 * MIB).unwrap();
    buffer.fill(8);
    for name in [c"hipHostRegister", c"hipHostGetDevicePointer"] {
        for k in 1..=6 {
            stand_in.fail_call(name, k, 2);
            let error = buffer.grow_to(16 * MIB).unwrap_err().to_string();
            assert!(error.contains("hipErrorOutOfMemory"), "{error}");
            assert_eq!((stand_in.pins(), buffer.capacity(), buffer[4 * MIB - 1]), (2, 4 * MIB, 8), "{name:?} {k}");
        }
    }
    // Once is no failure: it is tried again.
    stand_in.fail_call(c"hipHostUnregister", 1, 999);
    buffer.shrink_to(2 * MIB, Quiesce::Device).unwrap();
    assert_eq!(stand_in.pins(), 1);
    buffer.close().unwrap();
}

#[test]
fn what_the_runtime_has_not_is_refused() {
    Child::of("7.14.1").role_well("pinned refusals");
}

fn refusals(device: &Device) {
    let builder = || PinnedBuffer::<u8>::builder(device).max_len(MIB);
    let error = builder().flags(PinFlags::NONE.with_read_only(true)).build().unwrap().grow_to(1).unwrap_err();
    assert!(matches!(&error, Error::Driver(error) if error.kind() == DriverErrorKind::NotSupported), "{error}");
    assert!(error.to_string().contains("coarse-grained"), "{error}");
    let combined = PinFlags::USUAL.with_write_combined(true);
    builder().flags(combined).build().unwrap_err();
    let mut buffer = builder().flags(combined).strategy(PinStrategy::Driver).build().unwrap();
    buffer.grow_to(MIB).unwrap();
    assert_eq!(StandIn::get().pins(), 1);
    buffer.close().unwrap();
}

/// The stand-in reads page-locked memory when the copy's turn comes, and ends the process if it is let go of before.
#[test]
fn nothing_is_let_go_of_under_a_copy() {
    let text = Child::of("7.14.1").role_well("pinned unfinished");
    assert!(text.contains("waited"), "{text}");
    let ended = Child::of("7.14.1").set("GROWSPAN_TEST_IDLE", "1").role("pinned unfinished");
    assert!(!ended.status.unwrap().success(), "{}", ended.text);
    assert!(ended.text.contains("misuse: hipHostUnregister: hipMemcpyHtoDAsync is queued"), "{}", ended.text);
}

fn unfinished(device: &Device) {
    let mut there = GrowableBuffer::<u8>::builder(device).max_len(4 * MIB).build().unwrap();
    there.grow_to(4 * MIB).unwrap();
    let stream = Stream::new(0);
    let mut buffer = PinnedBuffer::<u8>::builder(device).max_len(4 * MIB).build().unwrap();
    buffer.grow_to(4 * MIB).unwrap();
    buffer.fill(4);
    // SAFETY: the buffer stays alive and unchanged until the stream was waited for, which is what is tested.
    unsafe { there.copy_in_on(0, &buffer, stream.raw()) }.unwrap();
    if std::env::var_os("GROWSPAN_TEST_IDLE").is_some() {
        // SAFETY: it is not idle, which the stand-in is to notice.
        let _ = buffer.shrink_to(0, unsafe { Quiesce::already_idle() });
    }
    drop(buffer);
    let mut back = vec![0; 4 * MIB];
    there.copy_out(0, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 4));
    println!("waited");
}

#[test]
fn pieces_have_2_gib_at_most() {
    Child::of("7.14.1").role_well("pinned large");
}

/// What a builder cuts at unless told otherwise; that it cuts at what it is told is in the tests above, with less memory.
fn large(device: &Device) {
    assert_eq!(device.info().quirks.max_pin, Some(Bytes::gib(2)));
}

/// Also where virtual memory of the card is off, as on 5.7: the host's is not.
#[test]
fn an_allocator_s_memory_is_registered_and_all_of_it_let_go_of() {
    for version in ["5.7", "6.4.3", "7.2.4", "7.14.1"] {
        let child = Child::of(version).set("FAKE_AMDHIP_PIN_OFFSET", "0x4000000000");
        child.set("FAKE_AMDHIP_DISTURBED", "20").role_well("pinned allocator");
    }
}

fn allocator(device: &Device) {
    use core::alloc::Layout;

    let options = HostOptions::default().with_capacity(Bytes::mib(256));
    let allocator = SpanAllocator::builder(device).build_page_locked(options).unwrap();
    let layout = |words: usize| Layout::array::<u32>(words).unwrap();
    let mut block = allocator.allocate(layout(MIB)).unwrap();
    let address = block.ptr();
    for words in [5 * MIB, 16 * MIB] {
        // SAFETY: the block is live and has the layout of the turn before.
        block = unsafe { allocator.grow(address, layout(block.len() / 4), layout(words)) }.unwrap();
    }
    assert_eq!(block.ptr(), address);
    // SAFETY: the block has so many words, all of them some number, and nobody else uses it.
    let words = unsafe { core::slice::from_raw_parts_mut(address.cast::<u32>().as_ptr(), 16 * MIB) };
    words.iter_mut().enumerate().for_each(|(number, word)| *word = number as u32);
    let words = &*words;
    assert_eq!(allocator.device_ptr(words), Some(address.addr().get() as u64 + (1 << 38)), "asked, not assumed");
    let pieces = allocator.pinned_pieces(words).len() as u64;
    assert!(pieces > 1 && StandIn::get().pins() == pieces, "{pieces}");
    assert_eq!(StandIn::get().pin_retries(), 0, "all was there before the driver came");
    // A copy of ours is cut at the borders, or the stand-in would refuse it.
    let mut there = GrowableBuffer::<u32>::builder(device).max_len(16 * MIB).build().unwrap();
    there.append(words).unwrap();
    let mut back = vec![0; 16 * MIB];
    there.copy_out(0, &mut back).unwrap();
    assert!(back == *words);
    // What is freed while a copy from it is queued waits for it, or the stand-in would end the process.
    let stream = Stream::new(0);
    // SAFETY: the block is not written to again, and is let go of only after waiting, which is what is tested.
    unsafe { there.copy_in_on(0, words, stream.raw()) }.unwrap();
    // SAFETY: the block is live, has this layout, and is used no more.
    unsafe { allocator.deallocate(address, layout(16 * MIB)) };
    allocator.trim();
    assert_eq!(StandIn::get().pins(), 0);
    there.close().unwrap();
    let small = allocator.allocate(layout(100)).unwrap();
    assert_eq!(StandIn::get().pins(), 1);
    // SAFETY: as above.
    unsafe { allocator.deallocate(small.ptr(), layout(100)) };
    drop(allocator);
}
