//! A runtime that hangs, in whichever function: the program goes on, says so, and ends.

use core::time::Duration;
use std::sync::Arc;

use growspan::driver::hip::{HipDriver, HipOpenError, HipOptions};
use growspan::{Device, DeviceOptions, Granularity, GrowableBuffer, Mode};

use crate::child::Child;

/// How long what hangs is waited for. All else has the time that it takes.
const SHORT: Duration = Duration::from_millis(300);

pub(crate) fn as_child(role: &str) {
    match role.split_once(' ') {
        Some(("open", ordinal)) => opening(ordinal.parse().unwrap()),
        None if role == "check" => checking(),
        None if role == "fork" => fork(),
        _ => panic!("no role {role}"),
    }
}

/// Whoever opens what hangs already is not made to wait for it again, whatever his patience.
fn opening(ordinal: u32) {
    let open = |ordinal, patience| HipDriver::open_with(ordinal, HipOptions::new().patience(patience));
    let hangs = |result| match result {
        Err(error @ HipOpenError::Unopened(_)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    println!("first: {}", hangs(open(ordinal, SHORT)));
    println!("second: {}", hangs(open(ordinal, Duration::MAX)));
    println!("device: {}", Device::named(&format!("hip:{ordinal}")).unwrap_err());
    match open(1 - ordinal, Duration::MAX) {
        Ok(driver) => {
            println!("other: opened");
            let device = DeviceOptions::new().open(Arc::new(driver)).unwrap();
            works(&device, Mode::Virtual);
        }
        Err(error) => println!("other: {error}"),
    }
    for device in Device::all() {
        println!("all: {}", device.map_or_else(|error| error.to_string(), |device| device.info().id()));
    }
}

fn works(device: &Device, mode: Mode) {
    let mut buffer = GrowableBuffer::<u8>::builder(device).max_len(1 << 20).build().unwrap();
    assert_eq!(buffer.mode(), mode, "{}", device.verdict().report());
    buffer.append(b"it runs on").unwrap();
    let mut back = [0; 10];
    buffer.copy_out(0, &mut back).unwrap();
    assert_eq!(&back, b"it runs on");
    buffer.close().unwrap();
}

/// What a child said about it.
fn said<'a>(text: &'a str, who: &str) -> &'a str {
    let (_, said) = text.split_once(&format!("{who}: ")).unwrap_or_else(|| panic!("nothing of {who}: {text}"));
    said.lines().next().unwrap_or_default()
}

/// What starts the runtime hangs for all of its devices.
#[test]
fn a_runtime_that_does_not_start_is_left_behind() {
    for function in ["hipRuntimeGetVersion", "hipInit"] {
        let text = Child::of("7.14.1").set("FAKE_AMDHIP_DEVICES", "2").set("FAKE_AMDHIP_HANG", function);
        let text = text.role_well("hangs open 0");
        for who in ["first", "second", "device", "other"] {
            let line = said(&text, who);
            assert!(line.contains("the driver has not returned for "), "{function}: {text}");
        }
        assert!(text.contains("all: host"), "{function}: {text}");
    }
}

/// A child that is forked while the runtime starts does not wait for what its parent does.
#[test]
fn a_child_forked_meanwhile_is_told() {
    let text = Child::of("7.14.1").set("FAKE_AMDHIP_HANG", "hipInit").role_well("hangs fork");
    assert!(said(&text, "child").contains("was started before this process was forked"), "{text}");
}

fn fork() {
    HipDriver::open_with(0, HipOptions::new().patience(SHORT)).unwrap_err();
    // SAFETY: the child only calls what this crate promises to bear there, prints, and leaves.
    match unsafe { libc::fork() } {
        0 => {
            println!("child: {}", HipDriver::open_with(0, HipOptions::new().patience(Duration::MAX)).unwrap_err());
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
}

/// What opens one device hangs for that one.
#[test]
fn a_device_that_does_not_open_is_left_behind() {
    for (function, ordinal) in [
        ("hipGetDeviceCount", 0),
        ("hipDeviceGetName", 0),
        ("hipDeviceGetPCIBusId", 1),
        ("hipDeviceGetAttribute", 0),
        ("hipGetDevicePropertiesR0600", 1),
        ("hipGetDevice", 0),
        // The first is current already.
        ("hipSetDevice", 1),
        ("hipThreadExchangeStreamCaptureMode", 0),
        ("hipStreamCreateWithFlags", 0),
        ("hipMemGetInfo", 0),
    ] {
        let child = Child::of("7.14.1").set("FAKE_AMDHIP_DEVICES", "2").set("FAKE_AMDHIP_HANG", function);
        let text = child.role_well(&format!("hangs open {ordinal}"));
        for who in ["first", "second", "device"] {
            let line = said(&text, who);
            assert!(line.contains("the driver has not returned for "), "{function}: {text}");
        }
        assert!(text.contains("other: opened"), "{function}: {text}");
        assert!(
            text.contains("all: host") && text.contains(&format!("all: hip:{}", 1 - ordinal)),
            "{function}: {text}"
        );
    }
}

fn checking() {
    let options = DeviceOptions::new().granularity(Granularity::AtLeast2MiB).patience(SHORT);
    let device = options.hip(0).unwrap();
    println!("{}", device.verdict().report());
    println!("reason: {}", device.verdict().reason().unwrap());
    let hangs = std::env::var("FAKE_AMDHIP_HANG").unwrap();
    match hangs.split_once(':').map_or(&*hangs, |(function, _)| function) {
        // What hangs in virtual memory has the lock that allocating takes, which waits a while and is refused.
        "hipMemSetAccess" => {
            let build = || GrowableBuffer::<u8>::builder(&device).max_len(1 << 20).build()?.append(b"it runs on");
            let error = build().unwrap_err().to_string();
            assert!(error.contains("another thread has been in the runtime for more than 8 s"), "{error}");
        }
        "hipDeviceGetAttribute" | "hipMemGetInfo" => works(&device, Mode::Contiguous),
        _ => {}
    }
}

/// A verdict names the step that hangs, and buffers live in one piece, where the runtime can still allocate.
#[test]
fn a_check_that_hangs_is_left_behind() {
    for (hang, step) in [
        ("hipDeviceGetAttribute:2", "symbols and attribute"),
        ("hipMemGetAllocationGranularity", "granularity"),
        ("hipMemAddressReserve", "reserving addresses"),
        ("hipMemCreate", "creating chunks"),
        ("hipMemMap", "mapping"),
        ("hipMemSetAccess", "setting access"),
        ("hipMemGetInfo:3", "open files and map entries"),
        ("hipMemGetInfo:4", "free memory falls"),
        ("hipMemGetInfo:5", "free memory falls"),
        ("hipMemcpyHtoDAsync", "reading back"),
        ("hipStreamSynchronize", "reading back"),
        ("hipMemcpyDtoHAsync", "reading back"),
        ("hipMemUnmap", "mapping again"),
        ("hipMemUnmap:3", "unmapping"),
        ("hipMemRelease", "releasing chunks"),
        ("hipMemGetInfo:6", "free memory rises"),
        ("hipMemGetInfo:7", "free memory rises"),
        ("hipMemAddressFree", "giving addresses back"),
    ] {
        let text = Child::of("10.0").set("FAKE_AMDHIP_HANG", hang).role_well("hangs check");
        let reason = said(&text, "reason");
        assert!(reason.contains(&format!("{step}: the driver did not return within 0.3 s")), "{hang}: {text}");
    }
}
