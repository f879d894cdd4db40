//! What every CUDA driver does is tested on a card, where there is one (see `card`), and on a stand-in library that is
//! compiled for the test; what a card cannot be made to do, on the stand-in alone.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

mod card;
mod hang;
#[cfg(feature = "sim")]
mod pinned;

use super::*;
use crate::driver::LoadError;

const MIB2: u64 = 2 << 20;

/// A stand-in driver, compiled with these definitions. `None`, with the reason printed, where there is no C compiler.
fn fake(defines: &[&str]) -> Option<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("growspan-fake-cuda-{}-{}.so", std::process::id(), COUNT.fetch_add(1, Relaxed));
    let path = std::env::temp_dir().join(name);
    let compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-pthread", "-x", "c", "-", "-o"])
        .arg(&path)
        .args(defines)
        .stdin(Stdio::piped())
        .spawn();
    let mut compiler = match compiler {
        Ok(compiler) => compiler,
        Err(error) => {
            println!("skipped: no C compiler to make a stand-in driver with: {error}");
            return None;
        }
    };
    compiler.stdin.take().unwrap().write_all(include_bytes!("fake.c")).unwrap();
    assert!(compiler.wait().unwrap().success(), "the stand-in driver does not compile");
    Some(path)
}

/// Loads a stand-in driver. An open library does not need its file any more.
fn load(path: PathBuf) -> Result<Cuda, CudaOpenError> {
    let cuda = Cuda::load(&[path.clone().into_os_string()]);
    std::fs::remove_file(path).unwrap();
    cuda
}

/// Set in the processes that [`in_a_child`] starts.
const CHILD: &str = "GROWSPAN_TEST_CHILD";

/// Runs one of these tests in a process of its own, with an environment variable set. Says whether it passed there.
fn in_a_child(test: &str, variable: &str, value: &OsStr) -> (bool, String) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("driver::cuda::tests::{test}"), "--nocapture", "--include-ignored"])
        .env(CHILD, "1")
        .env(variable, value)
        .output()
        .unwrap();
    let text = [child.stdout, child.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    (child.status.success() && text.contains("1 passed"), format!("{}: {text}", child.status))
}

/// The stand-in driver's device 0, device 1, and its controls.
struct Fake(&'static Cuda);

impl Fake {
    fn new(defines: &[&str]) -> Option<Self> {
        Some(Self(Box::leak(Box::new(load(fake(defines)?).unwrap()))))
    }

    fn open(&self, ordinal: u32) -> CudaDriver {
        CudaDriver::open_in(self.0, ordinal).unwrap()
    }

    fn control<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the tests below name the functions with the types that the C source gives them.
        unsafe { self.0.library.function(name) }.unwrap()
    }

    fn depth(&self) -> i32 {
        // SAFETY: it has no preconditions.
        unsafe { self.control::<unsafe extern "C" fn() -> i32>("fake_depth")() }
    }

    fn alive(&self) -> i64 {
        self.ask("fake_alive")
    }

    fn ask(&self, name: &str) -> i64 {
        // SAFETY: it has no preconditions.
        unsafe { self.control::<unsafe extern "C" fn() -> i64>(name)() }
    }

    fn retained(&self, device: i32) -> i32 {
        // SAFETY: there are two devices.
        unsafe { self.control::<unsafe extern "C" fn(i32) -> i32>("fake_retained")(device) }
    }

    fn set(&self, name: &str, value: i32) {
        // SAFETY: it sets a variable, or resets one of two devices.
        unsafe { self.control::<unsafe extern "C" fn(i32)>(name)(value) }
    }
}

/// Everything that works on a driver with memory, on the stand-in and on the card.
fn life_cycle(driver: &CudaDriver) {
    driver.support().unwrap();
    let unit = driver.granularity().unwrap();
    assert!(unit.minimum >= MIB2 && unit.recommended >= unit.minimum, "{unit:?}");
    let step = unit.recommended;
    let memory = driver.memory().unwrap();
    assert!(memory.free > 0 && memory.free <= memory.total, "{memory:?}");

    let aligned = driver.reserve(step, 1 << 30).unwrap();
    assert!(aligned.is_multiple_of(1 << 30), "{aligned:#x}");
    // SAFETY: the whole span, and nothing is mapped under it.
    unsafe { driver.free_span(aligned, step) }.unwrap();
    let addr = driver.reserve(64 * step, step).unwrap();
    assert!(addr != 0 && addr.is_multiple_of(step));
    let first = driver.create(step, ChunkProps::PLAIN).unwrap();
    let second = driver.create(2 * step, ChunkProps::PLAIN).unwrap();
    let len = usize::try_from(3 * step).unwrap();
    let data: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    let mut back = vec![0; len];
    // SAFETY: the span is reserved and empty, and the handles have these sizes.
    unsafe { driver.map(addr, step, first) }.unwrap();
    // SAFETY: as above.
    unsafe { driver.map(addr + step, 2 * step, second) }.unwrap();
    // SAFETY: the two mappings cover the range.
    unsafe { driver.set_access(addr, 3 * step) }.unwrap();

    // SAFETY: the range is mapped and accessible, and the vector has its size.
    unsafe { driver.copy_in(addr, data.as_ptr(), 3 * step, None) }.unwrap();
    // SAFETY: as above.
    unsafe { driver.copy_out(back.as_mut_ptr(), addr, 3 * step, None) }.unwrap();
    assert!(back == data, "what was copied in came out, across the border of two chunks");
    // SAFETY: as above; the halves do not overlap.
    unsafe { driver.copy_within(addr + 2 * step, addr + 7, step, None) }.unwrap();
    // SAFETY: as above.
    unsafe { driver.fill(addr + step - 5, 0xa5, 10, None) }.unwrap();
    // SAFETY: as above.
    unsafe { driver.copy_out(back.as_mut_ptr(), addr, 3 * step, None) }.unwrap();
    let step_len = usize::try_from(step).unwrap();
    assert!(back[2 * step_len..] == data[7..step_len + 7]);
    assert_eq!(back[step_len - 5..step_len + 5], [0xa5; 10]);
    assert_eq!(back[step_len - 6], data[step_len - 6]);

    // A stream, here the default one.
    let event = driver.event_create().unwrap();
    // SAFETY: the event is alive. One that was not recorded counts as reached.
    assert!(unsafe { driver.event_query(event) }.unwrap());
    // SAFETY: the range is mapped, and stays so until the event was waited for.
    unsafe { driver.fill(addr, 0x3c, step, Some(RawStream::DEFAULT)) }.unwrap();
    // SAFETY: both are alive.
    unsafe { driver.event_record(event, RawStream::DEFAULT) }.unwrap();
    // SAFETY: the event is alive.
    unsafe { driver.event_wait(event) }.unwrap();
    // SAFETY: the event is alive.
    assert!(unsafe { driver.event_query(event) }.unwrap());
    // SAFETY: the event is not used again.
    unsafe { driver.event_destroy(event) }.unwrap();
    // SAFETY: the default stream is always alive.
    assert!(!unsafe { driver.stream_is_capturing(RawStream::DEFAULT) }.unwrap());
    // SAFETY: the default stream is always alive.
    unsafe { driver.synchronize_stream(RawStream::DEFAULT) }.unwrap();
    driver.synchronize().unwrap();
    // SAFETY: the range is mapped and accessible, and the vector is larger.
    unsafe { driver.copy_out(back.as_mut_ptr(), addr, step, None) }.unwrap();
    assert!(back[..step_len].iter().all(|&byte| byte == 0x3c));

    // Kept handles take their contents to another address. The second is mapped when it is released.
    // SAFETY: a whole mapping; all work was waited for.
    unsafe { driver.unmap(addr, step) }.unwrap();
    // SAFETY: the place is reserved and free.
    unsafe { driver.map(addr + 8 * step, step, first) }.unwrap();
    // SAFETY: a whole mapping.
    unsafe { driver.set_access(addr + 8 * step, step) }.unwrap();
    // SAFETY: mapped and accessible, and the vector is larger.
    unsafe { driver.copy_out(back.as_mut_ptr(), addr + 8 * step, step, None) }.unwrap();
    assert!(back[..step_len].iter().all(|&byte| byte == 0x3c));
    // SAFETY: neither handle is used again.
    unsafe { driver.release(second) }.unwrap();
    // SAFETY: a whole mapping; nothing uses it.
    unsafe { driver.unmap(addr + step, 2 * step) }.unwrap();
    // SAFETY: a whole mapping; nothing uses it.
    unsafe { driver.unmap(addr + 8 * step, step) }.unwrap();
    // SAFETY: as above.
    unsafe { driver.release(first) }.unwrap();

    shared_memory(driver, addr, step);

    // SAFETY: the whole span, and nothing is mapped under it.
    unsafe { driver.free_span(addr, 64 * step) }.unwrap();

    let block = driver.allocate(1 << 20).unwrap();
    // SAFETY: the block has this size.
    unsafe { driver.fill(block, 9, 1 << 20, None) }.unwrap();
    // SAFETY: the block has this size, and the vector is larger.
    unsafe { driver.copy_out(back.as_mut_ptr(), block, 1 << 20, None) }.unwrap();
    assert!(back[..1 << 20].iter().all(|&byte| byte == 9));
    // SAFETY: the block is not used again.
    unsafe { driver.free(block, 1 << 20) }.unwrap();

    let error = driver.create(1 << 50, ChunkProps::PLAIN).unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::OutOfMemory, "{error}");
    let error = driver.reserve(1 << 62, step).unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::OutOfAddresses, "{error}");
}

/// An exported chunk, imported again, is the same memory.
fn shared_memory(driver: &CudaDriver, addr: u64, step: u64) {
    let props = ChunkProps::PLAIN.with_shareable(Shareable::PosixFd);
    let chunk = driver.create(step, props).unwrap();
    // SAFETY: the handle is valid.
    let fd = unsafe { driver.export(chunk) }.unwrap();
    // SAFETY: the call reads a flag.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    // SAFETY: the descriptor was exported by this driver from a handle of this size.
    let same = unsafe { driver.import(std::os::fd::AsFd::as_fd(&fd), step) }.unwrap();
    drop(fd);
    for (at, handle) in [(addr, chunk), (addr + step, same)] {
        // SAFETY: the place is reserved and free.
        unsafe { driver.map(at, step, handle) }.unwrap();
        // SAFETY: a whole mapping.
        unsafe { driver.set_access(at, step) }.unwrap();
    }
    let mut byte = [0];
    // SAFETY: mapped and accessible.
    unsafe { driver.fill(addr, 0x77, step, None) }.unwrap();
    // SAFETY: mapped and accessible, and the array has one byte.
    unsafe { driver.copy_out(byte.as_mut_ptr(), addr + 2 * step - 1, 1, None) }.unwrap();
    assert_eq!(byte, [0x77]);
    for (at, handle) in [(addr, chunk), (addr + step, same)] {
        // SAFETY: a whole mapping; nothing uses it.
        unsafe { driver.unmap(at, step) }.unwrap();
        // SAFETY: the handle is not used again.
        unsafe { driver.release(handle) }.unwrap();
    }
}

#[test]
fn life_cycle_on_the_stand_in() {
    let Some(fake) = Fake::new(&[]) else { return };
    let driver = fake.open(1);
    life_cycle(&driver);
    assert_eq!(fake.depth(), 0, "every push was popped");
    assert_eq!(driver.memory().unwrap(), MemoryInfo { free: 3 << 30, total: 4 << 30 });
    assert_eq!((driver.info().name.as_str(), driver.info().runtime.as_str()), ("Fake B", "CUDA driver 13.2"));
    std::thread::scope(|threads| {
        threads.spawn(|| driver.synchronize().unwrap());
    });
    drop(driver);
    assert_eq!((fake.alive(), fake.retained(1)), (0, 0), "nothing is left");
    // Captures of other threads, in whatever mode, survive all of it; this thread's own way with them is as it was.
    assert_eq!((fake.ask("fake_broke"), fake.ask("fake_mode")), (0, 0));
}

#[test]
fn the_caller_s_context_is_restored_on_every_path() {
    let Some(fake) = Fake::new(&[]) else { return };
    let (own, other) = (fake.open(0), fake.open(1));
    let core = &fake.0.core;
    // SAFETY: the context is retained.
    assert_eq!(unsafe { (core.cuCtxPushCurrent_v2)(own.raw_context()) }, 0);
    let current = || {
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is valid for the write.
        assert_eq!(unsafe { (core.cuCtxGetCurrent)(&raw mut context) }, 0);
        context
    };
    for driver in [&own, &other] {
        driver.synchronize().unwrap();
        assert_eq!((current(), fake.depth()), (own.raw_context(), 1));
        driver.create(1, ChunkProps::PLAIN).unwrap_err();
        assert_eq!((current(), fake.depth()), (own.raw_context(), 1), "after a failure");
    }
}

#[test]
fn work_on_a_stream_is_queued() {
    let Some(fake) = Fake::new(&[]) else { return };
    let driver = fake.open(0);
    let block = driver.allocate(64).unwrap();
    let mut seen = [0_u8; 64];
    // SAFETY: the block has 64 bytes.
    unsafe { driver.fill(block, 1, 64, None) }.unwrap();
    // SAFETY: the block and the array have 64 bytes, and both stay until the stream was waited for.
    unsafe { driver.copy_out(seen.as_mut_ptr(), block, 64, Some(RawStream::DEFAULT)) }.unwrap();
    let event = driver.event_create().unwrap();
    // SAFETY: both are alive.
    unsafe { driver.event_record(event, RawStream::DEFAULT) }.unwrap();
    // SAFETY: the event is alive.
    assert!(!unsafe { driver.event_query(event) }.unwrap(), "not ready is not an error");
    // SAFETY: the default stream is always alive.
    unsafe { driver.synchronize_stream(RawStream::DEFAULT) }.unwrap();
    // SAFETY: the event is alive.
    assert!(unsafe { driver.event_query(event) }.unwrap());
    assert_eq!(seen, [1; 64]);
    for (status, answer) in [(0, false), (1, true), (2, true), (906, true)] {
        fake.set("fake_capture", status);
        // SAFETY: the default stream is always alive.
        assert_eq!(unsafe { driver.stream_is_capturing(RawStream::DEFAULT) }.unwrap(), answer, "{status}");
    }
    // SAFETY: nothing is copied, so nothing is looked at.
    unsafe { driver.copy_in(0, ptr::null(), 0, None) }.unwrap();
    // SAFETY: the event is not used again.
    unsafe { driver.event_destroy(event) }.unwrap();
    // SAFETY: the block is not used again.
    unsafe { driver.free(block, 64) }.unwrap();
}

#[test]
fn chunks_have_the_properties_asked_for_or_are_refused() {
    let Some(fake) = Fake::new(&[]) else { return };
    let drivers = [fake.open(0), fake.open(1)];
    let rdma = ChunkProps::PLAIN.with_rdma(true).with_shareable(Shareable::PosixFd);
    let refused = drivers[0].create(MIB2, rdma).unwrap_err();
    assert_eq!(refused.to_string(), "create failed: not supported: the device has no GPUDirect RDMA for mapped memory");
    let fabric = ChunkProps::PLAIN.with_shareable(Shareable::Fabric);
    assert_eq!(drivers[1].create(MIB2, fabric).unwrap_err().kind(), DriverErrorKind::NotSupported);
    for (props, expected) in [(rdma, [1, 1, 1, 1]), (ChunkProps::PLAIN, [0, 0, 1, 1])] {
        let handle = drivers[1].create(MIB2, props).unwrap();
        let mut seen = [9_u32; 4];
        // SAFETY: it writes four numbers.
        unsafe { fake.control::<unsafe extern "C" fn(*mut u32)>("fake_rdma_prop")(seen.as_mut_ptr()) };
        assert_eq!(seen, expected);
        // SAFETY: the handle is not used again.
        unsafe { drivers[1].release(handle) }.unwrap();
    }
}

#[test]
fn codes_arrive_with_their_meaning() {
    let Some(fake) = Fake::new(&[]) else { return };
    let driver = fake.open(0);
    for (code, kind, text) in [
        (1, DriverErrorKind::InvalidValue, "create failed: invalid value (CUDA_ERROR_INVALID_VALUE, 1): 2 MiB"),
        (2, DriverErrorKind::OutOfMemory, "create failed: out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2): 2 MiB"),
        (
            700,
            DriverErrorKind::DeviceLost,
            "create failed: the device was lost (CUDA_ERROR_ILLEGAL_ADDRESS, 700): 2 MiB",
        ),
        (
            720,
            DriverErrorKind::Other,
            "create failed: driver error (CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, 720): 2 MiB",
        ),
        (801, DriverErrorKind::NotSupported, "create failed: not supported (CUDA_ERROR_NOT_SUPPORTED, 801): 2 MiB"),
        (12345, DriverErrorKind::Other, "create failed: driver error (code 12345): 2 MiB"),
    ] {
        fake.set("fake_fail", code);
        let error = driver.create(MIB2, ChunkProps::PLAIN).unwrap_err();
        assert_eq!((error.kind(), error.code()), (kind, Some(i64::from(code))));
        assert_eq!(error.to_string(), text);
    }
    fake.set("fake_fail", 2);
    let error = driver.reserve(MIB2, MIB2).unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::OutOfAddresses);
    assert!(error.to_string().ends_with("(CUDA_ERROR_OUT_OF_MEMORY, 2): 2 MiB aligned to 2 MiB"), "{error}");
    fake.set("fake_fail", 0);
}

#[test]
fn a_reset_by_other_code_loses_the_device() {
    // A driver before CUDA 12.0 has no number to tell a reset context by, but says that one that is gone is gone.
    for (defines, again) in [(&[][..], false), (&[][..], true), (&["-DNO_ID"][..], false)] {
        let Some(fake) = Fake::new(defines) else { return };
        let driver = fake.open(0);
        driver.synchronize().unwrap();
        let event = driver.event_create().unwrap();
        fake.set("cuDevicePrimaryCtxReset_v2", 0);
        let other = again.then(|| fake.open(0));
        let error = driver.synchronize().unwrap_err();
        assert_eq!((error.kind(), error.code()), (DriverErrorKind::DeviceLost, Some(709)), "{error}");
        // SAFETY: the event was made by this driver; that it is gone is what the call has to find out.
        assert_eq!(unsafe { driver.event_query(event) }.unwrap_err().kind(), DriverErrorKind::DeviceLost);
        drop((driver, other));
        assert_eq!((fake.depth(), fake.retained(0)), (0, 0), "released all the same");
    }
}

#[test]
fn after_the_driver_has_shut_down_calls_fail_and_drop_is_quiet() {
    let Some(fake) = Fake::new(&[]) else { return };
    let driver = fake.open(0);
    fake.set("fake_fail", 4);
    assert_eq!(driver.synchronize().unwrap_err().kind(), DriverErrorKind::ShutDown);
    drop(driver);
}

#[test]
fn a_driver_without_virtual_memory_still_allocates() {
    let Some(fake) = Fake::new(&["-DNO_VMM"]) else { return };
    let driver = fake.open(0);
    for error in [driver.support().unwrap_err(), driver.reserve(MIB2, MIB2).unwrap_err()] {
        assert_eq!(error.kind(), DriverErrorKind::Missing);
        assert!(error.to_string().contains("lacks cuMemGetAllocationGranularity, cuMemAddressReserve, "), "{error}");
        assert!(error.to_string().ends_with("cuMemImportFromShareableHandle"), "{error}");
    }
    let block = driver.allocate(64).unwrap();
    // SAFETY: the block is not used again.
    unsafe { driver.free(block, 64) }.unwrap();
}

#[test]
fn devices_are_found_by_uuid() {
    let Some(fake) = Fake::new(&[]) else { return };
    let second = core::array::from_fn(|i| 16 + u8::try_from(i).unwrap());
    assert_eq!(fake.0.with_uuid(second).unwrap(), 1);
    let error = fake.0.with_uuid([0xff; 16]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no CUDA device GPU-ffffffff-ffff-ffff-ffff-ffffffffffff: the driver shows \
         GPU-00010203-0405-0607-0809-0a0b0c0d0e0f, GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"
    );
    let error = CudaDriver::open_in(fake.0, 7).unwrap_err();
    assert_eq!(error.to_string(), "there is no CUDA device 7: the driver shows 2, counted from 0");
    assert_eq!(fake.retained(0) + fake.retained(1), 0);
}

/// The caller's memory may go once the call has returned, also with an error.
#[test]
fn copies_are_over_when_waiting_for_them_failed() {
    let Some(fake) = Fake::new(&[]) else { return };
    let driver = fake.open(0);
    let block = driver.allocate(MIB2).unwrap();
    // SAFETY: the block is ours, and the fill is over when this returns.
    unsafe { driver.fill(block, 7, 8, None) }.unwrap();
    for times in [1, 2] {
        fake.set("fake_fail_waits", times);
        let mut back = [0; 8];
        // SAFETY: both sides are alive.
        let error = unsafe { driver.copy_out(back.as_mut_ptr(), block, 8, None) }.unwrap_err();
        assert_eq!((error.code(), back), (Some(999), [7; 8]), "{error}");
    }
    // SAFETY: nothing uses it.
    unsafe { driver.free(block, MIB2) }.unwrap();
}

#[test]
fn only_on_volta_kernels_are_not_mapped_beside() {
    for (major, minor, beside) in [(6, 1, true), (7, 0, false), (7, 2, false), (7, 5, true), (9, 0, true)] {
        let Some(fake) = Fake::new(&[&format!("-DMAJOR={major}"), &format!("-DMINOR={minor}")]) else { return };
        let driver = fake.open(0);
        assert_eq!(driver.info().quirks.map_beside_kernels, beside, "{major}.{minor}");
        assert_eq!(driver.info().known_faults.is_empty(), beside, "{major}.{minor}");
    }
}

#[test]
fn uuids_are_read_in_full_or_not_at_all() {
    let text = "10111213-1415-1617-1819-1a1b1c1d1e1f";
    for prefix in ["", "GPU-", "MIG-"] {
        assert_eq!(parse_uuid(&format!("{prefix}{text}")).map(|uuid| uuid[15]), Some(0x1f));
    }
    for bad in ["", "GPU-", "GPU-1011", &format!("{text}0"), &text.replace('f', "g"), "CPU-10111213"] {
        assert_eq!(parse_uuid(bad), None, "{bad}");
    }
    let error = CudaDriver::open_uuid_text("GPU-1").unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::InvalidValue);
}

#[test]
fn no_library() {
    let names: Vec<OsString> = vec!["libnocuda.so.1".into(), "libnocuda.so".into()];
    let error = Cuda::load(&names).unwrap_err();
    assert!(matches!(&error, CudaOpenError::Library(LoadError::LibraryMissing { tried, .. }) if tried.len() == 2));
    assert_eq!(error.kind(), DriverErrorKind::Missing);
    let text = error.to_string();
    assert!(text.starts_with("no CUDA driver: could not open libnocuda.so.1 or libnocuda.so ("), "{text}");
    assert!(text.contains("cannot open shared object file") && text.contains("GROWSPAN_CUDA_LIBRARY"), "{text}");
}

#[test]
fn missing_symbols_are_all_named() {
    let Some(path) = fake(&["-DONLY_INIT"]) else { return };
    let error = load(path).unwrap_err();
    let CudaOpenError::Library(LoadError::SymbolsMissing { names, .. }) = &error else { panic!("{error}") };
    assert_eq!(names.len(), 27 + 10, "{names:?}");
    for name in ["cuDriverGetVersion", "cuEventDestroy_v2", "cuMemCreate", "cuMemImportFromShareableHandle"] {
        assert!(names.contains(&name) && error.to_string().contains(name), "{error}");
    }
    assert!(!names.contains(&"cuInit"));
}

#[test]
fn the_toolkit_s_stub_is_called_by_its_name() {
    let Some(path) = fake(&["-DINIT=34"]) else { return };
    let error = load(path).unwrap_err();
    assert!(error.to_string().contains("is the toolkit's stub library, not a driver"), "{error}");
    assert_eq!(error.kind(), DriverErrorKind::Missing);
}

#[test]
fn a_driver_that_does_not_start_says_why() {
    for (define, expected) in [
        ("-DINIT=100", "shows this process no device"),
        ("-DINIT=3", "as in a process forked"),
        ("-DINIT=803", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, 803"),
    ] {
        let Some(path) = fake(&[define]) else { return };
        let error = load(path).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// The environment decides the library, once, so this test's body runs in a process of its own.
#[test]
fn the_environment_names_the_library() {
    if std::env::var_os(CHILD).is_some() {
        assert_eq!(CudaDriver::count().unwrap(), 2);
        let driver = CudaDriver::open(0).unwrap();
        assert_eq!(driver.info().id(), "cuda:0");
        assert!(driver.symbol("cuMemCreate").is_some() && driver.symbol("cuNothing").is_none());
        forked_child(driver);
        return;
    }
    let Some(path) = fake(&[]) else { return };
    let (passed, output) = in_a_child("the_environment_names_the_library", LIBRARY_VARIABLE, path.as_os_str());
    std::fs::remove_file(path).unwrap();
    assert!(passed, "{output}");
}

/// In a forked child nothing is opened, and dropping what the parent opened gives nothing back.
fn forked_child(driver: CudaDriver) {
    let retained = Fake(driver.cuda).retained(0);
    // SAFETY: the child makes no use of what another thread may have locked, and leaves without clean-up.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let fake = Fake(driver.cuda);
        drop(driver);
        let good = fake.retained(0) == retained && matches!(CudaDriver::open(0), Err(CudaOpenError::Forked));
        // SAFETY: it ends the process, which is what a forked child does.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = -1;
    // SAFETY: the pointer is valid for the write.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}
