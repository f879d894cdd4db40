//! Tests on a real card: run with `--ignored` where there is one.

use std::ffi::OsStr;
use std::time::Instant;

use super::{CHILD, in_a_child, life_cycle};
use crate::driver::cuda::{CudaDriver, CudaOpenError, uuid_text};
use crate::driver::{ChunkProps, Driver, DriverErrorKind, RawStream};

/// The first card.
fn card() -> CudaDriver {
    CudaDriver::open(0).unwrap()
}

#[test]
#[ignore = "needs an NVIDIA card"]
fn the_life_cycle_from_several_threads() {
    let driver = card();
    println!("{driver:?} {:?}", driver.info());
    life_cycle(&driver);
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| life_cycle(&driver));
        }
    });
}

#[test]
#[ignore = "needs an NVIDIA card"]
fn devices_are_named_by_number_and_uuid() {
    let driver = card();
    let uuid = driver.info().uuid.unwrap();
    assert_eq!(CudaDriver::open_uuid_text(&uuid_text(uuid)).unwrap().info().ordinal, 0);
    let count = CudaDriver::count().unwrap();
    assert_eq!(CudaDriver::open(count).unwrap_err(), CudaOpenError::NoSuchOrdinal { ordinal: count, count });
}

#[test]
#[ignore = "needs an NVIDIA card"]
fn how_many_open_files_chunks_keep() {
    let driver = card();
    let step = driver.granularity().unwrap().recommended;
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = files();
    let handles: Vec<_> = (0..64).map(|_| driver.create(step, ChunkProps::PLAIN).unwrap()).collect();
    println!("{} more open files with 64 chunks", files().saturating_sub(before));
    for handle in handles {
        // SAFETY: the handle is not used again.
        unsafe { driver.release(handle) }.unwrap();
    }
}

#[test]
#[ignore = "needs an NVIDIA card"]
fn what_a_call_costs_to_enter() {
    let driver = card();
    let event = driver.event_create().unwrap();
    let nanoseconds = || {
        let start = Instant::now();
        for _ in 0..100_000 {
            // SAFETY: the event is alive.
            assert!(unsafe { driver.event_query(event) }.unwrap());
        }
        start.elapsed().as_nanos() / 100_000
    };
    let pushed = nanoseconds();
    // SAFETY: the context is retained, and popped below.
    assert_eq!(unsafe { (driver.cuda.core.cuCtxPushCurrent_v2)(driver.raw_context()) }, 0);
    let current = nanoseconds();
    let mut popped = core::ptr::null_mut();
    // SAFETY: the pointer is valid for the write.
    assert_eq!(unsafe { (driver.cuda.core.cuCtxPopCurrent_v2)(&raw mut popped) }, 0);
    println!("an event query: {pushed} ns with another context current, {current} ns with the device's own");
    // SAFETY: the event is not used again.
    unsafe { driver.event_destroy(event) }.unwrap();
}

/// A reset takes the whole process's work along, so this test's body runs in a process of its own.
#[test]
#[ignore = "needs an NVIDIA card"]
fn a_reset_by_other_code_is_an_error_and_no_crash() {
    if std::env::var_os(CHILD).is_none() {
        let name = "card::a_reset_by_other_code_is_an_error_and_no_crash";
        let (passed, output) = in_a_child(name, "GROWSPAN_TEST_RESET", OsStr::new("1"));
        println!("{output}");
        assert!(passed, "{output}");
        return;
    }
    let driver = card();
    let step = driver.granularity().unwrap().recommended;
    let chunk = driver.create(step, ChunkProps::PLAIN).unwrap();
    let span = driver.reserve(step, step).unwrap();
    let block = driver.allocate(4096).unwrap();
    let event = driver.event_create().unwrap();
    let reset = driver.symbol("cuDevicePrimaryCtxReset_v2").unwrap().as_ptr();
    // SAFETY: this is the function's type.
    let reset: unsafe extern "C" fn(i32) -> u32 = unsafe { core::mem::transmute(reset) };
    // SAFETY: nothing is queued on the device. What the reset breaks is what this test is about.
    println!("reset: {}", unsafe { reset(driver.raw_device()) });
    let calls = || {
        let mut byte = 0_u8;
        [
            ("synchronize", driver.synchronize()),
            // SAFETY: each of these was valid before the reset, which the driver has to notice.
            ("event query", unsafe { driver.event_query(event) }.map(|_| ())),
            // SAFETY: as above.
            ("fill", unsafe { driver.fill(block, 0, 4096, None) }),
            // SAFETY: as above.
            ("copy out", unsafe { driver.copy_out(&raw mut byte, block, 1, None) }),
            // SAFETY: as above.
            ("fill on the default stream", unsafe { driver.fill(block, 0, 4096, Some(RawStream::DEFAULT)) }),
            // SAFETY: as above.
            ("map", unsafe { driver.map(span, step, chunk) }),
            ("create", driver.create(step, ChunkProps::PLAIN).map(|_| ())),
        ]
    };
    for (call, result) in calls() {
        println!("after the reset, {call}: {result:?}");
        assert_eq!(result.unwrap_err().kind(), DriverErrorKind::DeviceLost, "{call}");
    }
    // Someone else brings the context to life again: still not the one that the handles are of.
    let again = card();
    again.synchronize().unwrap();
    println!("the new context has the old one's handle: {}", again.raw_context() == driver.raw_context());
    for (call, result) in calls() {
        println!("after a new start, {call}: {result:?}");
        assert_eq!(result.unwrap_err().kind(), DriverErrorKind::DeviceLost, "{call}");
    }
    drop(driver);
    again.synchronize().unwrap();
}
