//! Every function of the runtime fails, at every one of its calls, with every kind of code: nothing crashes, hangs or
//! leaks, and when the failures stop all goes on, unless the device was lost.

use std::collections::HashSet;
use std::ffi::CString;
use std::fmt::Display;
use std::os::fd::AsFd;
use std::sync::Arc;

use growspan::driver::hip::{HipDriver, HipOptions};
use growspan::driver::{ChunkProps, Driver, DriverErrorKind, RawStream, Shareable};
use growspan::pinned::{PinStrategy, PinnedBuffer};
use growspan::{BufferSet, Bytes, Device, DeviceOptions, Error, Granularity, GrowableBuffer, Quiesce};

use crate::child::Child;
use crate::stand_in::{Figures, StandIn};
use crate::world::MIB;

/// Out of memory, a lost device, not supported, unknown, one that nobody knows; and success that is a lie.
const CODES: [u32; 6] = [2, LOST, 801, 999, 4242, 0];

/// After this one nothing of the device can be used any more.
const LOST: u32 = 700;

/// What gives something through a pointer: of these a lie can be found out.
const GIVES: [&str; 17] = [
    "hipGetDeviceCount",
    "hipDeviceGetName",
    "hipDeviceGetPCIBusId",
    "hipDeviceGetAttribute",
    "hipGetDevicePropertiesR0600",
    "hipDeviceCanAccessPeer",
    "hipThreadExchangeStreamCaptureMode",
    "hipMemGetInfo",
    "hipMalloc",
    "hipStreamCreateWithFlags",
    "hipStreamIsCapturing",
    "hipEventCreateWithFlags",
    "hipMemGetAllocationGranularity",
    "hipMemAddressReserve",
    "hipMemCreate",
    "hipHostMalloc",
    "hipMemImportFromShareableHandle",
];

/// All functions that the driver calls, by its own table.
fn functions() -> Vec<&'static str> {
    let table =
        include_str!("../../src/driver/hip/library.rs").lines().filter_map(|line| line.trim().strip_prefix("fn hip"));
    let names: Vec<_> = table.map(|rest| &rest[..rest.find('(').unwrap()]).collect();
    assert!(names.len() > 40, "{names:?}");
    names
}

/// Whether all calls are tried with all codes. Else the first two are, and of the later ones fewer and fewer, with one
/// code after the other.
fn all() -> bool {
    std::env::var_os("GROWSPAN_SWEEP_ALL").is_some()
}

pub(crate) fn as_child(role: &str) {
    match role.split_once(' ') {
        Some(("start", rest)) => start(rest),
        Some(("life", devices)) => sweep(devices.parse().unwrap()),
        _ => panic!("no role {role}"),
    }
}

/// Which of a function's calls fails, and how.
struct Fault {
    function: CString,
    nth: u64,
    code: u32,
}

/// One that is set.
struct Armed<'a> {
    fault: &'a Fault,
    /// How often the function had been called.
    before: u64,
}

impl Fault {
    fn arm(&self) -> Armed<'_> {
        let stand_in = StandIn::get();
        stand_in.fail_call(&self.function, self.nth, self.code);
        Armed { fault: self, before: stand_in.calls(&self.function) }
    }
}

impl Armed<'_> {
    /// Whether it has happened, and so will not again.
    fn is_met(&self) -> bool {
        StandIn::get().calls(&self.fault.function) - self.before >= self.fault.nth
    }
}

/// One run of everything, and what came of it.
#[derive(Default)]
struct Run {
    errors: Vec<String>,
    broken: Vec<String>,
    stranded: u64,
    not_returned: bool,
}

fn sweep(devices: u32) {
    // What starts the runtime is called once.
    drop(HipDriver::open(0).unwrap());
    let mut problems = HashSet::new();
    let (mut runs, mut met_in_all) = (0, 0);
    let mut one = |fault: &Fault| {
        let before = figures(devices);
        let armed = fault.arm();
        let mut run = Run::default();
        run.live(devices, &armed);
        let met = armed.is_met();
        let lost = met && fault.code == LOST;
        StandIn::get().fail_call(&fault.function, 0, 0);
        run.expect(StandIn::get().current() == 0, || "another device is current".to_owned());
        StandIn::get().make_current(0);
        // What a lost device had page-locked meets the next one's.
        let unexpected = !met && fault.code != LOST && !run.errors.is_empty();
        run.expect(!unexpected, || "an error without a fault".to_owned());
        let after = figures(devices);
        let excused = lost || (run.not_returned && run.stranded > 0);
        let stranded = run.stranded;
        run.expect(excused || before == after, || format!("left: {after:?}, before {before:?}, stranded {stranded}"));
        run.expect(StandIn::get().pins() == 0 || fault.code == LOST, || "page-locked pieces are left".to_owned());
        runs += 1;
        met_in_all += u64::from(met);
        for broken in &run.broken {
            let function = fault.function.to_str().unwrap();
            if problems.insert(format!("{function} {} {}", fault.code, broken.split([':', '(']).next().unwrap())) {
                println!(
                    "PROBLEM: {function} call {} gives {}: {broken}\n    errors: {:?}",
                    fault.nth, fault.code, run.errors
                );
            }
        }
        met
    };
    // Lost devices leave everything behind, so they come last.
    for lost in [false, true] {
        for function in functions() {
            let function = format!("hip{function}");
            let codes =
                CODES.into_iter().filter(|code| (*code == LOST) == lost && (*code != 0 || GIVES.contains(&&*function)));
            let codes: Vec<u32> = codes.collect();
            let mut nth = 1;
            let fault = |nth, code| Fault { function: CString::new(&*function).unwrap(), nth, code };
            while all() || nth <= 2 {
                if codes.iter().filter(|code| one(&fault(nth, **code))).count() == 0 {
                    break;
                }
                nth += 1;
            }
            if !all() && nth > 2 {
                while one(&fault(nth, codes[nth as usize % codes.len()])) {
                    nth += 1 + nth / 8;
                }
            }
        }
    }
    println!("{runs} runs, {met_in_all} with a fault");
    assert!(problems.is_empty(), "{} problems", problems.len());
    assert!(met_in_all > 100);
}

fn figures(devices: u32) -> Vec<Figures> {
    (0..devices.cast_signed()).map(|device| StandIn::get().figures(device)).collect()
}

impl Run {
    fn expect(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.broken.push(what());
        }
    }

    /// What came of a step.
    fn note<T, E: Display>(&mut self, step: &str, result: Result<T, E>) -> Option<T> {
        result.map_err(|error| self.errors.push(format!("{step}: {error}"))).ok()
    }

    fn live(&mut self, devices: u32, armed: &Armed<'_>) {
        // The last, with the others as peers, so that it is not the current one if there are several.
        let options = HipOptions::new().peers(0..devices - 1);
        let Some(driver) = self.note("open", HipDriver::open_with(devices - 1, options)) else { return };
        let driver = Arc::new(driver);
        let options = DeviceOptions::new().granularity(Granularity::AtLeast2MiB);
        let Some(device) = self.note("device", options.open(Arc::clone(&driver) as Arc<dyn Driver>)) else { return };
        let mode = device.verdict().mode();
        if let Some(reason) = device.verdict().reason().map(ToString::to_string) {
            self.expect(!reason.contains("ended early") && !reason.contains("did not return"), || reason.clone());
        }
        let null = std::ptr::null_mut();
        // SAFETY: the null stream is alive always.
        let stream = unsafe { RawStream::from_raw(null) };
        let buffer = GrowableBuffer::<u8>::builder(&device).max_len(32 * MIB).build();
        let mut buffer = self.note("build", buffer);
        if let Some(buffer) = &mut buffer {
            self.grow_and_shrink(&device, buffer, stream);
        }
        self.set(&device);
        self.page_locked(&device, stream);
        if mode == growspan::Mode::Virtual {
            self.share(&driver);
        }
        let _ = device.snapshot().to_string();
        if !armed.is_met() {
            // It may meet what gives things back.
            if let Some(buffer) = buffer.take() {
                self.closed("close", buffer.close());
            }
            device.pool().trim(Bytes::ZERO);
            self.stranded = device.snapshot().bytes_stranded.get();
            drop(device);
            return;
        }
        let lost = device.synchronize().is_err_and(|error| error.to_string().contains("lost"));
        self.expect(!lost || armed.fault.code == LOST, || "lost".to_owned());
        match buffer {
            buffer if !lost => self.all_is_well(&device, buffer),
            buffer => drop(buffer),
        }
        drop(device);
        let others = Arc::strong_count(&driver);
        self.expect(others == 1, || format!("{others} have the driver still"));
    }

    fn grow_and_shrink(&mut self, device: &Device, buffer: &mut GrowableBuffer<u8>, stream: RawStream) {
        let grown = buffer.grow_to(2 * MIB - 100);
        self.note("grow", grown);
        let appended = buffer.append(&[7; 200]);
        let appended = self.note("append", appended).is_some();
        let at = buffer.len().saturating_sub(200);
        let zeroed = buffer.grow_zeroed(9 * MIB, Some(stream));
        let zeroed = self.note("grow zeroed", zeroed).is_some();
        let mut back = vec![1; 200];
        let read = buffer.copy_out(at.min(buffer.len().saturating_sub(200)), &mut back);
        if self.note("copy out", read).is_some() && appended {
            self.expect(back == [7; 200], || "other bytes than were written".to_owned());
        }
        let filled = buffer.fill(0..0, 3);
        self.note("fill", filled);
        let mut back = vec![1; 200];
        let end = buffer.len().saturating_sub(200);
        let read = buffer.copy_out(end, &mut back);
        if self.note("copy out of the end", read).is_some() && zeroed {
            self.expect(back == [0; 200], || "other bytes than zeros".to_owned());
        }
        let event = device.event();
        let event = self.note("event", event);
        let (len, more) = (buffer.len(), 12 * MIB);
        if let Some(event) = &event {
            let recorded = event.record(stream);
            if self.note("record", recorded).is_some() {
                let shrunk = buffer.shrink_to(len.min(7 * MIB), Quiesce::Event(event));
                self.note("shrink behind an event", shrunk);
                let shrunk = buffer.shrink_to(buffer.len().min(5 * MIB), Quiesce::Deferred(event));
                self.note("shrink later", shrunk);
                let reached = event.is_reached();
                self.note("is reached", reached);
                let waited = event.wait();
                self.note("wait", waited);
            }
            let regrown = buffer.grow_to(more);
            self.note("grow again", regrown);
        }
        let shrunk = buffer.shrink_to(buffer.len().min(6 * MIB), Quiesce::Stream(stream));
        self.note("shrink behind a stream", shrunk);
        let synchronized = device.synchronize();
        if self.note("synchronize", synchronized).is_some() {
            // SAFETY: the device has just been waited for, and nothing was queued since.
            let idle = unsafe { Quiesce::already_idle() };
            let shrunk = buffer.shrink_to(buffer.len().min(5 * MIB), idle);
            self.note("shrink", shrunk);
        }
        let shrunk = buffer.shrink_exact(buffer.len().min(3 * MIB), Quiesce::Device);
        self.note("shrink exactly", shrunk);
        let len = buffer.len();
        self.expect(len <= buffer.capacity(), || "longer than its capacity".to_owned());
        device.drain();
    }

    fn set(&mut self, device: &Device) {
        let mut set = BufferSet::new();
        for per_row in [1, 64] {
            let buffer = GrowableBuffer::<u8>::builder(device).max_len(8 * MIB).build();
            let added = buffer.and_then(|buffer| set.add(buffer, per_row));
            self.note("add", added);
        }
        let grown = set.grow_to(50_000);
        self.note("grow the set", grown);
        let shrunk = set.shrink_to(set.rows().min(10), &Quiesce::Device);
        self.note("shrink the set", shrunk);
        self.closed("close the set", set.close());
        device.pool().trim(Bytes::mib(4));
    }

    fn page_locked(&mut self, device: &Device, stream: RawStream) {
        for strategy in [PinStrategy::default(), PinStrategy::Driver] {
            let built = PinnedBuffer::<u8>::builder(device).max_len(MIB).strategy(strategy).build();
            let Some(mut pinned) = self.note("build page-locked", built) else { continue };
            let grown = pinned.grow_to(MIB);
            self.note("lock", grown);
            let _ = pinned.device_ptr();
            let _ = stream;
            self.closed("close page-locked", pinned.close());
        }
    }

    fn share(&mut self, driver: &HipDriver) {
        const CHUNK: u64 = 2 << 20;
        let props = ChunkProps::PLAIN.with_shareable(Shareable::PosixFd);
        let created = driver.create(CHUNK, props);
        if matches!(&created, Err(error) if error.kind() == DriverErrorKind::NotSupported) {
            return;
        }
        let Some(handle) = self.note("create to share", created) else { return };
        // SAFETY: the handle is valid.
        let exported = unsafe { driver.export(handle) };
        if let Some(file) = self.note("export", exported) {
            // SAFETY: the file was just exported, for so many bytes.
            let imported = unsafe { driver.import(file.as_fd(), CHUNK) };
            if let Some(import) = self.note("import", imported) {
                // SAFETY: the handle is mapped nowhere and not used again, but for a second try.
                let released = unsafe { driver.release(import) }.or_else(|_| unsafe { driver.release(import) });
                self.note("release the import", released);
            }
        }
        // SAFETY: the handle is mapped nowhere and not used again, but for a second try.
        let released = unsafe { driver.release(handle) }.or_else(|_| unsafe { driver.release(handle) });
        self.note("release what was shared", released);
    }

    fn closed(&mut self, step: &str, closed: growspan::Result<()>) {
        if let Err(error) = &closed {
            self.not_returned |= matches!(error, Error::NotReturned { .. });
        }
        self.note(step, closed);
    }

    /// The faults have stopped, and the device was not lost.
    fn all_is_well(&mut self, device: &Device, buffer: Option<GrowableBuffer<u8>>) {
        let buffer = buffer.map_or_else(|| GrowableBuffer::<u8>::builder(device).max_len(32 * MIB).build(), Ok);
        let mut buffer = match buffer {
            Ok(buffer) => buffer,
            Err(error) => return self.broken.push(format!("build: {error}")),
        };
        let mut back = vec![1; 3 * MIB];
        let worked = buffer
            .shrink_to(0, Quiesce::Device)
            .and_then(|_| buffer.append(&vec![9; 3 * MIB]))
            .and_then(|()| buffer.copy_out(0, &mut back));
        self.expect(worked.is_ok(), || format!("it does not work again: {worked:?}"));
        self.expect(worked.is_err() || back.iter().all(|byte| *byte == 9), || "bytes went wrong afterwards".to_owned());
        self.balanced(device, "in use");
        let closed = buffer.close();
        self.expect(closed.is_ok(), || format!("close: {closed:?}"));
        device.drain();
        device.pool().trim(Bytes::ZERO);
        self.balanced(device, "closed");
        let snapshot = device.snapshot();
        self.stranded = snapshot.bytes_stranded.get();
        self.expect(snapshot.bytes_held() == snapshot.bytes_stranded, || format!("held: {snapshot}"));
        self.expect(snapshot.bytes_reserved.is_zero(), || format!("reserved: {snapshot}"));
    }

    fn balanced(&mut self, device: &Device, when: &str) {
        let snapshot = device.snapshot();
        let used = snapshot.total.unwrap().get() - snapshot.free.unwrap().get();
        self.expect(used >= snapshot.bytes_held().get(), || {
            format!("{when}, more held than is used: {used}, {snapshot}")
        });
    }
}

fn start(function: &str) {
    let (function, code) = function.split_once(' ').unwrap();
    StandIn::get().fail_call(&CString::new(function).unwrap(), 1, code.parse().unwrap());
    let error = HipDriver::open(0).unwrap_err();
    assert_eq!(HipDriver::open(0).unwrap_err(), error, "what came of it is kept");
    println!("start: {error}");
    println!("device: {}", Device::hip(0).unwrap_err());
}

/// A runtime that does not start says so.
#[test]
fn a_runtime_that_fails_to_start_is_an_error() {
    for function in ["hipRuntimeGetVersion", "hipInit"] {
        for code in CODES.into_iter().filter(|code| *code != 0) {
            let text = Child::of("7.14.1").role_well(&format!("sweep start {function} {code}"));
            assert!(text.contains(&code.to_string()), "{text}");
        }
    }
}

fn survives(personality: &str, devices: u32, force: &str) {
    let child = Child::of(personality).set("FAKE_AMDHIP_DEVICES", devices.to_string()).set("GROWSPAN_HIP_FORCE", force);
    let text = child.role_well(&format!("sweep life {devices}"));
    println!("{personality}: {}", text.lines().rev().find(|line| line.contains(" runs, ")).unwrap());
}

macro_rules! sweeps {
    ($($name:ident: $personality:literal, $devices:literal, $force:literal;)*) => {
        $( #[test] fn $name() { survives($personality, $devices, $force); } )*
    };
}

sweeps! {
    rocm_5_7: "5.7", 1, "0";
    rocm_6_1: "6.1", 1, "0";
    rocm_6_4_0: "6.4.0", 1, "0";
    rocm_6_4_3: "6.4.3", 1, "0";
    rocm_7_2_4: "7.2.4", 1, "0";
    rocm_7_10: "7.10", 1, "0";
    rocm_7_14_1: "7.14.1", 1, "0";
    rocm_10_0: "10.0", 1, "0";
    rdna4_forced: "gfx1201", 1, "1";
    two_devices_on_7_2_4: "7.2.4", 2, "0";
    two_devices_on_7_14_1: "7.14.1", 2, "0";
}
