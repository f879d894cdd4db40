//! Runtimes that say what cannot be: a clear error, or a device that works.

use std::path::PathBuf;
use std::sync::Arc;

use growspan::driver::hip::{HipDriver, HipOpenError};
use growspan::driver::{ChunkProps, Driver, DriverErrorKind, PinFlags};
use growspan::{Device, DeviceOptions, Granularity, GrowableBuffer};

use crate::child::Child;
use crate::stand_in::{self, StandIn};

pub(crate) fn as_child(role: &str) {
    match role {
        "device" => device(),
        "null" => null(),
        _ => panic!("no role {role}"),
    }
}

/// Prints why there is no device, or the verdict of one that works.
fn device() {
    println!("count: {:?}", HipDriver::count());
    for found in Device::all().into_iter().skip(1) {
        match found {
            Ok(device) => println!("found: {}", device.info().id()),
            Err(error) => println!("missing: {error}"),
        }
    }
    // The devices above are kept.
    let before = StandIn::get().figures(0);
    let driver = match HipDriver::open(0) {
        Ok(driver) => driver,
        Err(error) => return println!("refused: {error}"),
    };
    println!("name: {:?}", driver.info().name);
    let device = DeviceOptions::new().granularity(Granularity::AtLeast2MiB).open(Arc::new(driver)).unwrap();
    println!("{}", device.verdict().report());
    println!("verdict: {}", device.verdict().reason().map_or("virtual".to_owned(), ToString::to_string));
    println!("{}", device.snapshot());
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(8 << 20).build().unwrap();
    buffer.append(&[7; 3 << 20]).unwrap();
    let mut back = vec![0; 3 << 20];
    buffer.copy_out(0, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 7));
    buffer.shrink_to(10, growspan::Quiesce::Device).unwrap();
    buffer.close().unwrap();
    device.pool().trim(growspan::Bytes::ZERO);
    let _ = device.snapshot().to_string();
    drop(device);
    assert_eq!(StandIn::get().figures(0), before);
    println!("it works");
}

/// What the child printed after a word.
fn said<'a>(text: &'a str, word: &str) -> &'a str {
    text.split_once(word).unwrap_or_else(|| panic!("no {word:?} in {text}")).1.lines().next().unwrap_or_default()
}

fn saying(says: &str) -> String {
    Child::of("10.0").set("FAKE_AMDHIP_SAYS", says).role_well("odd device")
}

#[test]
fn numbers_of_devices() {
    for count in ["0", "-1", "-2147483648"] {
        let text = saying(&format!("hipGetDeviceCount={count}"));
        assert!(said(&text, "refused: ").contains("shows this process no device"), "{text}");
    }
    // The runtime's devices are as many as it lets itself be asked about.
    let text = saying("hipGetDeviceCount=1000");
    assert!(text.contains("it works") && text.matches("missing: device hip:").count() == 999, "{text}");
}

#[test]
fn versions() {
    for version in ["0", "-1", "1", "50999999"] {
        let text = saying(&format!("hipRuntimeGetVersion={version}"));
        assert!(said(&text, "verdict: ").contains("HIP has virtual memory on Linux since ROCm 6.1"), "{text}");
        assert!(text.contains("it works"), "{text}");
    }
    // Newer ones are taken to be as the newest that is known.
    for version in ["80000000", "990000000", "2147483647"] {
        let text = saying(&format!("hipRuntimeGetVersion={version}"));
        assert!(said(&text, "verdict: ").starts_with("virtual") && text.contains("it works"), "{text}");
    }
}

#[test]
fn granularities() {
    for granularity in
        ["0,0", "3,3", "2097152,4096", "2097152,0", "4096,-9223372036854775808", "4096,-1", "4096,1099511627776"]
    {
        let text = saying(&format!("hipMemGetAllocationGranularity={granularity}"));
        assert!(said(&text, "verdict: ").contains("which make no sense"), "{granularity}: {text}");
        assert!(text.contains("it works"), "{granularity}: {text}");
    }
}

#[test]
fn figures() {
    for figures in ["-1,1000", "0,0", "1000,10", "-1,-1", "0,34359738368"] {
        let text = saying(&format!("hipMemGetInfo={figures}"));
        println!("{figures}: {}", said(&text, "verdict: "));
        assert!(text.contains("it works"), "{figures}: {text}");
    }
}

#[test]
fn names() {
    let long = "gfx".repeat(66);
    for gfx in ["", "gfx", "\u{fffd}", &long] {
        let text = Child::of("10.0").set("FAKE_AMDHIP_GFX", gfx).role_well("odd device");
        assert!(said(&text, "verdict: ").starts_with("virtual") && text.contains("it works"), "{text}");
    }
}

/// A copy of the library in which functions have other names, gone at the end.
struct Renamed(PathBuf);

impl Renamed {
    fn new(functions: &[&str]) -> Self {
        let mut bytes = std::fs::read(stand_in::path()).unwrap();
        for function in functions {
            let name = format!("\0{function}\0");
            let places: Vec<_> =
                (0..bytes.len() - name.len()).filter(|at| bytes[*at..].starts_with(name.as_bytes())).collect();
            assert!(!places.is_empty(), "{function}");
            for at in places {
                bytes[at + 1] = b'_';
            }
        }
        let path = std::env::temp_dir().join(format!("growspan-hip-odd-{}-{}.so", functions.len(), std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }

    fn text(&self) -> String {
        Child::of("10.0").set("GROWSPAN_HIP_LIBRARY", self.0.to_str().unwrap()).role_well("odd device")
    }
}

impl Drop for Renamed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn symbols_that_are_missing() {
    let text = Renamed::new(&["hipFree", "hipMemGetInfo"]).text();
    assert!(said(&text, "refused: ").contains("lacks hipMemGetInfo, hipFree; ROCm 5.2"), "{text}");
    let text = Renamed::new(&["hipMemUnmap"]).text();
    assert!(said(&text, "verdict: ").contains("lacks hipMemUnmap"), "{text}");
    assert!(text.contains("it works"), "{text}");
    let optional = ["hipThreadExchangeStreamCaptureMode", "hipGetDevicePropertiesR0600", "hipHostMalloc"];
    let text = Renamed::new(&optional).text();
    assert!(said(&text, "verdict: ").starts_with("virtual") && text.contains("it works"), "{text}");
}

/// Success, and nothing is given.
fn null() {
    let driver = HipDriver::open(0).unwrap();
    let nothing = |function: &core::ffi::CStr, call: &dyn Fn() -> Result<u64, growspan::driver::DriverError>| {
        StandIn::get().fail_call(function, 1, 0);
        let error = call().unwrap_err();
        assert_eq!(error.kind(), DriverErrorKind::Other, "{function:?}: {error}");
        assert!(error.to_string().contains("success and "), "{function:?}: {error}");
    };
    nothing(c"hipMemCreate", &|| driver.create(2 << 20, ChunkProps::PLAIN).map(|handle| handle.0));
    nothing(c"hipMemAddressReserve", &|| driver.reserve(2 << 20, 2 << 20));
    nothing(c"hipMalloc", &|| driver.allocate(2 << 20));
    nothing(c"hipHostMalloc", &|| driver.allocate_pinned(2 << 20, PinFlags::default()));
    nothing(c"hipEventCreateWithFlags", &|| driver.event_create().map(|event| event.0));
    StandIn::get().fail_call(c"hipStreamCreateWithFlags", 1, 0);
    let error = HipDriver::open(0).unwrap_err();
    assert!(matches!(error, HipOpenError::Call { function: "hipStreamCreateWithFlags", code: 0 }), "{error:?}");
    println!("stream: {error}");
    drop(driver);
    assert_eq!(StandIn::get().figures(0), stand_in::Figures::default());
}

#[test]
fn success_without_a_thing() {
    let text = Child::of("10.0").role_well("odd null");
    assert!(!text.contains("was not given back"), "{text}");
    assert!(said(&text, "stream: ").contains("hipStreamCreateWithFlags returned success and nothing"), "{text}");
}
