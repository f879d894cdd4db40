//! Several devices, and what a program that uses HIP itself sees of us.

use std::sync::Arc;

use growspan::driver::hip::quirks::Quirk;
use growspan::driver::hip::{HipDriver, HipOptions};
use growspan::driver::{Call, Driver, DriverErrorKind};
use growspan::{Bytes, Device, DeviceOptions, Granularity, GrowableBuffer, Mode, Quiesce};

use crate::child::Child;
use crate::personalities;
use crate::stand_in::StandIn;
use crate::world::MIB;

pub(crate) fn as_child(role: &str) {
    match role {
        "two" => two_devices(),
        "errors" => errors_of_ours_are_not_the_application_s(),
        "all" => all_devices(),
        "fork" => fork(),
        "exit" => leave_live_buffers(),
        "lost" => lost(),
        "two maps" => a_silent_failure_before_a_loud_one(),
        "pieces" => a_copy_that_fails_in_the_middle(),
        "peer" => work_of_a_peer(),
        "behind" => behind_a_hang(),
        "freed" => freed_once(),
        "chip" => chip_by_capability(),
        "spans" => large_spans_come_and_go(),
        "import" => an_import_moves(),
        "hang" => personalities::hang(),
        "forced" => personalities::forced(),
        other => match other.strip_prefix("aside ") {
            Some(aside) => set_aside(aside),
            None => panic!("no role {other}"),
        },
    }
}

#[test]
fn a_chunk_lands_on_the_device_asked_for_whichever_is_current() {
    for personality in ["6.1", "6.4.3", "7.2.4", "7.14.1", "10.0"] {
        Child::of(personality).set("FAKE_AMDHIP_DEVICES", "2").role_well("devices two");
    }
}

fn two_devices() {
    let stand_in = StandIn::get();
    let options = DeviceOptions::new().granularity(Granularity::AtLeast2MiB);
    let devices = [0, 1].map(|ordinal| {
        let driver = HipDriver::open_with(ordinal, HipOptions::new().peers([1 - ordinal])).unwrap();
        options.clone().open(Arc::new(driver)).unwrap()
    });
    for current in [0, 1] {
        stand_in.make_current(current);
        let mut buffers = devices.each_ref().map(|device| {
            assert_eq!(device.verdict().mode(), Mode::Virtual, "{}", device.verdict().report());
            GrowableBuffer::<u8>::builder(device).max_len(64 * MIB).build().unwrap()
        });
        for step in 1..6 {
            for (n, buffer) in (0..).zip(&mut buffers) {
                buffer.append(&vec![n * 10 + step; MIB]).unwrap();
                assert_eq!(stand_in.current(), current, "the caller's device is current again");
            }
        }
        for (ordinal, buffer) in (0..).zip(&buffers) {
            for chunk in buffer.chunks() {
                assert_eq!(stand_in.device_of(chunk.address), ordinal, "with device {current} current");
            }
        }
        let [a, b] = &devices;
        for device in [a, b] {
            let memory = device.memory().unwrap();
            assert_eq!(memory.total - memory.free, device.snapshot().bytes_held().get());
        }
        // Another thread has another current device.
        std::thread::scope(|scope| {
            for buffer in &mut buffers {
                scope.spawn(move || {
                    stand_in.make_current(1 - current);
                    buffer.grow_zeroed(20 * MIB, None).unwrap();
                    buffer.shrink_to(MIB, Quiesce::Device).unwrap();
                    assert_eq!(stand_in.current(), 1 - current);
                });
            }
        });
        assert_eq!(stand_in.current(), current);
        for (n, buffer) in (0..).zip(buffers) {
            let mut back = vec![0; MIB];
            buffer.copy_out(0, &mut back).unwrap();
            assert!(back.iter().all(|byte| *byte == n * 10 + 1));
            buffer.close().unwrap();
        }
    }
    drop(devices);
    for device in [0, 1] {
        let figures = stand_in.figures(device);
        assert_eq!(figures, Default::default(), "device {device}");
    }
}

#[test]
fn an_application_s_check_for_errors_does_not_find_ours() {
    Child::of("7.14.1").role_well("devices errors");
}

fn errors_of_ours_are_not_the_application_s() {
    let (stand_in, device) = (StandIn::get(), DeviceOptions::new().hip(0).unwrap());
    assert_eq!(device.verdict().mode(), Mode::Virtual);
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    for name in [c"hipMemCreate", c"hipMemMap", c"hipMemSetAccess"] {
        stand_in.fail_call(name, 1, 1);
        buffer.grow_to(MIB).unwrap_err();
        assert_eq!(stand_in.last_error(), 0, "{name:?}");
    }
    let event = device.event().unwrap();
    let stream = crate::stand_in::Stream::new(0);
    buffer.grow_zeroed(MIB, Some(stream.raw())).unwrap();
    event.record(stream.raw()).unwrap();
    while !event.is_reached().unwrap() {
        assert_eq!(stand_in.last_error(), 0, "an event that is not reached is no error");
    }
    buffer.close().unwrap();
}

#[test]
fn every_device_is_listed() {
    Child::of("7.14.1").set("FAKE_AMDHIP_DEVICES", "3").role_well("devices all");
}

fn all_devices() {
    let names: Vec<_> = Device::all().into_iter().flatten().map(|device| device.info().id()).collect();
    assert_eq!(names, ["host", "hip:0", "hip:1", "hip:2"]);
    assert_eq!(HipDriver::count().unwrap(), 3);
    assert_eq!(Device::named("hip:2").unwrap().info().ordinal, 2);
    assert!(Device::named("hip:2").unwrap().is(&Device::hip(2).unwrap()), "the same device each time");
    let error = Device::named("hip:3").unwrap_err().to_string();
    assert!(error.contains("there is no HIP device 3: the runtime shows 3, counted from 0"), "{error}");
    assert_eq!(Device::best().unwrap().info().id(), "hip:0", "before host memory");
}

#[test]
fn a_forked_child_is_told_and_leaves_everything_alone() {
    let text = Child::of("7.14.1").role_well("devices fork");
    assert!(text.contains("child: grow: called from a forked child process"), "{text}");
}

fn fork() {
    let device = DeviceOptions::new().hip(0).unwrap();
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.append(&[3; MIB]).unwrap();
    // SAFETY: the child only calls what this crate promises to bear there, prints, and leaves.
    match unsafe { libc::fork() } {
        0 => {
            let error = buffer.grow_to(9 * MIB).unwrap_err().to_string();
            println!("child: grow: {}", error.rsplit("failed: ").next().unwrap_or_default());
            println!("child: open: {}", HipDriver::open(0).unwrap_err());
            drop(buffer);
            drop(device);
            // SAFETY: nothing of the parent's is to be torn down here.
            unsafe { libc::_exit(0) }
        }
        child => {
            let mut status = 0;
            // SAFETY: the pointer is valid for the write, and the child is ours.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
        }
    }
    let mut back = [0; 10];
    buffer.copy_out(MIB - 10, &mut back).unwrap();
    assert_eq!(back, [3; 10]);
    buffer.close().unwrap();
}

#[test]
fn a_process_may_end_with_live_buffers() {
    Child::of("7.14.1").role_well("devices exit");
    Child::of("5.7").role_well("devices exit");
}

fn leave_live_buffers() {
    let device = Device::hip(0).unwrap();
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.append(&[3; MIB]).unwrap();
    core::mem::forget(buffer);
}

#[test]
fn a_lost_device_is_an_error_everywhere_and_nothing_else() {
    Child::of("7.14.1").role_well("devices lost");
}

/// A kernel went astray: every later call fails at once, and drops are quiet.
fn lost() {
    let (stand_in, device) = (StandIn::get(), DeviceOptions::new().hip(0).unwrap());
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.append(&[3; MIB]).unwrap();
    stand_in.fail_call(c"hipDeviceSynchronize", 1, 700);
    let error = buffer.shrink_to(0, Quiesce::Device).unwrap_err().to_string();
    assert!(error.contains("hipErrorIllegalAddress, 700"), "{error}");
    let error = buffer.grow_to(9 * MIB).unwrap_err().to_string();
    assert!(error.contains("since synchronize failed: the device was lost"), "{error}");
    drop(buffer);
    device.pool().trim(Bytes::ZERO);
}

#[test]
fn wrong_calls_do_not_get_to_the_runtime() {
    for personality in ["6.4.3", "7.14.1"] {
        let ended = Child::of(personality).tests(&["devices::misuse_is_refused", "--exact"]);
        assert!(ended.text.contains("1 passed"), "{}", ended.text);
    }
}

#[test]
#[ignore = "for processes that are one personality"]
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "wrong on purpose; the driver refuses before the runtime is called"
)]
fn misuse_is_refused() {
    const CHUNK: u64 = 2 << 20;
    let driver = HipDriver::open(0).unwrap();
    let span = driver.reserve(4 * CHUNK, CHUNK).unwrap();
    let handle = driver.create(CHUNK, growspan::driver::ChunkProps::PLAIN).unwrap();
    let block = driver.allocate(CHUNK).unwrap();
    // SAFETY: the chunk is mapped nowhere, whole, within the span.
    unsafe { driver.map(span, CHUNK, handle) }.unwrap();
    let other = growspan::driver::RawHandle(99);
    type Wrong = (Call, Box<dyn Fn(&HipDriver) -> Result<(), growspan::driver::DriverError>>);
    let wrong: Vec<Wrong> = vec![
        (Call::Unmap, Box::new(move |driver| unsafe { driver.unmap(span, CHUNK / 2) })),
        (Call::Unmap, Box::new(move |driver| unsafe { driver.unmap(span, 2 * CHUNK) })),
        (Call::Unmap, Box::new(move |driver| unsafe { driver.unmap(span + CHUNK, CHUNK) })),
        (Call::Map, Box::new(move |driver| unsafe { driver.map(span + CHUNK, CHUNK, handle) })),
        (Call::Map, Box::new(move |driver| unsafe { driver.map(span + CHUNK, CHUNK, other) })),
        (Call::SetAccess, Box::new(move |driver| unsafe { driver.set_access(span, 2 * CHUNK) })),
        (Call::SetAccess, Box::new(move |driver| unsafe { driver.set_access(span, CHUNK / 2) })),
        (Call::FreeSpan, Box::new(move |driver| unsafe { driver.free_span(span, 4 * CHUNK) })),
        (Call::FreeSpan, Box::new(move |driver| unsafe { driver.free_span(span + CHUNK, CHUNK) })),
        (Call::FreeSpan, Box::new(move |driver| unsafe { driver.free_span(block, CHUNK) })),
        (Call::Release, Box::new(move |driver| unsafe { driver.release(handle) })),
        (Call::Release, Box::new(move |driver| unsafe { driver.release(other) })),
        (Call::Free, Box::new(move |driver| unsafe { driver.free(span, CHUNK) })),
        (Call::Free, Box::new(move |driver| unsafe { driver.free(block, CHUNK / 2) })),
    ];
    for (call, act) in wrong {
        let error = act(&driver).unwrap_err();
        assert_eq!((error.call(), error.kind(), error.code()), (call, DriverErrorKind::Misuse, None), "{error}");
    }
    // SAFETY: the mapping is whole, and nothing uses it.
    unsafe { driver.unmap(span, CHUNK) }.unwrap();
    // SAFETY: the handle is mapped nowhere and not used again.
    unsafe { driver.release(handle) }.unwrap();
    // SAFETY: it was released, and the driver knows.
    let error = unsafe { driver.release(handle) }.unwrap_err();
    assert!(error.to_string().contains("was released before"), "{error}");
    // SAFETY: nothing is mapped in the span.
    unsafe { driver.free_span(span, 4 * CHUNK) }.unwrap();
    // SAFETY: nothing uses the block.
    unsafe { driver.free(block, CHUNK) }.unwrap();
}

#[test]
fn a_map_that_failed_in_silence_is_not_unmapped_because_of_another() {
    for personality in ["6.1", "6.4.3", "7.2.4", "7.10"] {
        Child::of(personality).role_well("devices two maps");
    }
}

fn all_chunks() -> DeviceOptions {
    DeviceOptions::new().granularity(Granularity::AtLeast2MiB).pool_keep(Bytes::ZERO)
}

fn a_silent_failure_before_a_loud_one() {
    let (stand_in, device) = (StandIn::get(), all_chunks().hip(0).unwrap());
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.append(&[7; MIB]).unwrap();
    let before = stand_in.figures(0);
    for (silent, loud) in [(1, 2), (1, 3), (2, 3), (3, 1)] {
        stand_in.fail_map(silent);
        stand_in.fail_call(c"hipMemMap", loud, 1);
        buffer.grow_to(9 * MIB).unwrap_err();
        assert_eq!(stand_in.last_error(), 0, "to ask after what is not there is our error, not the application's");
        stand_in.fail_map(0);
        stand_in.fail_call(c"hipMemMap", 0, 0);
        assert_eq!(stand_in.figures(0), before, "map {silent} in silence, map {loud} with an error");
    }
    buffer.grow_to(9 * MIB).unwrap();
    buffer.close().unwrap();
    assert_eq!(stand_in.figures(0).bytes_used, 0);
}

/// On 6.1 a copy goes in pieces. One that fails must not return while those before it are on their way.
#[test]
fn no_copy_returns_before_it_is_over() {
    Child::of("6.1").role_well("devices pieces");
}

fn a_copy_that_fails_in_the_middle() {
    let (stand_in, device) = (StandIn::get(), all_chunks().hip(0).unwrap());
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.append(&vec![7; 8 * MIB]).unwrap();
    let mut back = vec![0; 8 * MIB];
    stand_in.fail_call(c"hipMemcpyDtoHAsync", 3, 999);
    buffer.copy_out(0, &mut back).unwrap_err();
    let seen = back.clone();
    device.synchronize().unwrap();
    assert!(seen == back, "the memory was written after the copy had returned");
    buffer.close().unwrap();
}

/// A peer's work on a buffer is waited for as the owner's is.
#[test]
fn nothing_is_unmapped_under_a_peers_work() {
    for personality in ["6.4.3", "7.14.1"] {
        Child::of(personality).set("FAKE_AMDHIP_DEVICES", "2").role_well("devices peer");
    }
}

fn work_of_a_peer() {
    let stand_in = StandIn::get();
    let driver = HipDriver::open_with(0, HipOptions::new().peers([1])).unwrap();
    let device = all_chunks().open(Arc::new(driver)).unwrap();
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.append(&vec![7; 8 * MIB]).unwrap();
    let mut seen = vec![0; MIB];
    let stream = crate::stand_in::Stream::new(1);
    stand_in.make_current(1);
    stand_in.queue_read(buffer.device_ptr() + 6 * (MIB as u64), &mut seen, &stream);
    stand_in.make_current(0);
    buffer.shrink_to(0, Quiesce::Device).unwrap();
    assert!(seen.iter().all(|byte| *byte == 7), "the peer's work is over");
    buffer.close().unwrap();
}

/// One device hangs in the runtime: the others say so, and nobody waits for ever.
#[test]
fn others_do_not_wait_for_ever_behind_a_hang() {
    let text = Child::of("old-drm").set("FAKE_AMDHIP_DEVICES", "2").role_well("devices behind");
    assert!(text.contains("first: setting access: the driver did not return within 0.3 s"), "{text}");
    assert!(
        text.contains("second: granularity: granularity failed: driver error: another thread has been in"),
        "{text}"
    );
}

fn behind_a_hang() {
    let first = DeviceOptions::new().patience(core::time::Duration::from_millis(300)).hip(0).unwrap();
    println!("first: {}", first.verdict().reason().unwrap());
    let second = DeviceOptions::new().hip(1).unwrap();
    println!("second: {}", second.verdict().reason().unwrap());
    let started = std::time::Instant::now();
    let driver = HipDriver::open(1).unwrap();
    for _ in 0..100 {
        driver.reserve(2 << 20, 2 << 20).unwrap_err();
    }
    assert!(started.elapsed().as_secs() < 5, "those after the first do not wait again");
    // What allocates in one piece would hang with it, and is refused too.
    for device in [&first, &second] {
        let build = || GrowableBuffer::<u8>::builder(device).max_len(MIB).build()?.append(b"in one piece");
        let error = build().unwrap_err().to_string();
        assert!(error.contains("set access hangs"), "{error}");
        println!("{}", device.memory().unwrap().free);
    }
}

/// A chip that shares the host's memory.
#[test]
fn what_was_set_aside_for_a_chip_is_not_the_host_s() {
    for aside in ["all", "little", "unknown"] {
        let child = Child::of("10.0").set("FAKE_AMDHIP_INTEGRATED", "1").set("FAKE_AMDHIP_MEMORY_MIB", "1048576");
        child.role_well(&format!("devices aside {aside}"));
    }
}

fn set_aside(aside: &str) {
    const TOTAL: u64 = 1 << 40;
    let root = std::env::temp_dir().join(format!("growspan-hip-aside-{}", std::process::id()));
    let folder = root.join("bus/pci/devices/0000:03:00.0");
    std::fs::create_dir_all(&folder).unwrap();
    if aside != "unknown" {
        let total = if aside == "all" { TOTAL } else { 512 << 20 };
        std::fs::write(folder.join("mem_info_vram_total"), total.to_string()).unwrap();
        std::fs::write(folder.join("mem_info_vram_used"), "0").unwrap();
    }
    let driver = HipDriver::open_with(0, HipOptions::new().sysfs(&root)).unwrap();
    let memory = driver.memory().unwrap();
    assert_eq!(memory.total, TOTAL);
    if aside == "all" {
        assert_eq!(memory.free, TOTAL, "the host has less, and that does not matter");
        // And the check, which looks at the figure, sees memory go and come back.
        let device = DeviceOptions::new().open(Arc::new(driver)).unwrap();
        assert_eq!(device.verdict().mode(), Mode::Virtual, "{}", device.verdict().report());
    } else {
        assert!(memory.free < TOTAL / 2, "as much as the host has: {memory:?}");
    }
    std::fs::remove_dir_all(&root).unwrap();
}

/// A chip whose name is not told is known by what it computes.
#[test]
fn a_chip_without_a_name_has_its_rows() {
    Child::of("gfx1201").role_well("devices chip");
}

fn chip_by_capability() {
    StandIn::get().fail_call(c"hipGetDevicePropertiesR0600", 1, 999);
    let driver = HipDriver::open(0).unwrap();
    assert_eq!(driver.info().uuid, None, "it was not told");
    assert!(driver.rows().any(|row| row.quirk == Quirk::Gfx12) && driver.info().quirks.off.is_some());
}

/// The runtime has forgotten a span that it failed to free.
#[test]
fn addresses_are_freed_once() {
    for personality in ["6.4.3", "7.2.4", "7.14.1", "10.0"] {
        Child::of(personality).role_well("devices freed");
    }
}

fn freed_once() {
    const CHUNK: u64 = 2 << 20;
    let (stand_in, driver) = (StandIn::get(), HipDriver::open(0).unwrap());
    let span = driver.reserve(CHUNK, CHUNK).unwrap();
    stand_in.fail_call(c"hipMemAddressFree", 1, 999);
    for words in ["hipErrorUnknown, 999", "failed to free it before", "failed to free it before"] {
        // SAFETY: nothing is mapped in the span.
        let error = unsafe { driver.free_span(span, CHUNK) }.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    // A refusal before the runtime is asked is none of it.
    let span = driver.reserve(CHUNK, CHUNK).unwrap();
    stand_in.fail_call(c"hipGetDevice", 1, 999);
    // SAFETY: nothing is mapped in the span.
    unsafe { driver.free_span(span, CHUNK) }.unwrap_err();
    // SAFETY: as above.
    unsafe { driver.free_span(span, CHUNK) }.unwrap();
    // And what is above tries everything twice.
    let device = all_chunks().hip(0).unwrap();
    let range = device.reserve(Bytes::mib(8)).unwrap();
    stand_in.fail_call(c"hipMemAddressFree", 1, 999);
    let error = range.close().unwrap_err().to_string();
    assert!(error.contains("failed to free it before"), "{error}");
}

/// Where freed addresses rest a while, they do not run out.
#[test]
fn large_spans_may_come_and_go() {
    Child::of("6.4.3").role_well("devices spans");
}

fn large_spans_come_and_go() {
    let device = all_chunks().hip(0).unwrap();
    for _ in 0..150 {
        device.reserve(Bytes::gib(1 << 10)).unwrap().close().unwrap();
    }
}

/// An imported chunk may be mapped as often as any.
#[test]
fn an_imported_chunk_can_be_mapped_again() {
    for personality in ["6.4.3", "7.2.4", "7.14.1", "10.0"] {
        Child::of(personality).role_well("devices import");
    }
}

fn an_import_moves() {
    const CHUNK: u64 = 2 << 20;
    let driver = HipDriver::open(0).unwrap();
    let props = growspan::driver::ChunkProps::PLAIN.with_shareable(growspan::driver::Shareable::PosixFd);
    let (handle, span) = (driver.create(CHUNK, props).unwrap(), driver.reserve(2 * CHUNK, CHUNK).unwrap());
    // SAFETY: the handle is valid.
    let file = unsafe { driver.export(handle) }.unwrap();
    // SAFETY: the file was just exported, for so many bytes.
    let import = unsafe { driver.import(std::os::fd::AsFd::as_fd(&file), CHUNK) }.unwrap();
    drop(file);
    for at in [span, span + CHUNK, span] {
        // SAFETY: the chunk is mapped nowhere, whole, within the span.
        unsafe { driver.map(at, CHUNK, import) }.unwrap();
        // SAFETY: it is mapped just there.
        unsafe { driver.set_access(at, CHUNK) }.unwrap();
        // SAFETY: the mapping is whole, and nothing uses it.
        unsafe { driver.unmap(at, CHUNK) }.unwrap();
    }
    for handle in [import, handle] {
        // SAFETY: the handle is mapped nowhere and not used again.
        unsafe { driver.release(handle) }.unwrap();
    }
    assert_eq!(driver.reserve(CHUNK, 0).unwrap_err().kind(), DriverErrorKind::Misuse);
    assert_eq!(driver.reserve(0, CHUNK).unwrap_err().kind(), DriverErrorKind::Misuse);
    // SAFETY: nothing is mapped in the span.
    unsafe { driver.free_span(span, 2 * CHUNK) }.unwrap();
}
