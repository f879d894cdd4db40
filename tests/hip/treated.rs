//! What the driver makes of a runtime's ways by itself, below buffers and pools.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::ptr::null_mut;

use growspan::driver::hip::{HipDriver, HipOptions};
use growspan::driver::{ChunkProps, Driver, DriverErrorKind, RawHandle, RawStream, Shareable};

use crate::child::Child;
use crate::stand_in::{StandIn, Stream};

const CHUNK: u64 = 2 << 20;

pub(crate) fn as_child(role: &str) {
    match role {
        "null" => a_null_address(),
        "peer" => a_refused_peer(),
        "cuts" => copies_with_borders_on_both_sides(),
        "divided" => a_part_of_a_card(),
        "capture" => calls_during_a_capture(),
        "import" => an_import_without_a_file(),
        "twice" => a_handle_whose_maps_failed_twice(),
        other => panic!("no role {other}"),
    }
}

/// Maps new chunks under a new span, with access.
fn span_of(driver: &HipDriver, chunks: u64) -> (u64, Vec<RawHandle>) {
    let span = driver.reserve(chunks * CHUNK, CHUNK).unwrap();
    let handles = (0..chunks).map(|n| {
        let handle = driver.create(CHUNK, ChunkProps::PLAIN).unwrap();
        // SAFETY: the chunk is mapped nowhere, whole, within the span.
        unsafe { driver.map(span + n * CHUNK, CHUNK, handle) }.unwrap();
        // SAFETY: it is mapped just there.
        unsafe { driver.set_access(span + n * CHUNK, CHUNK) }.unwrap();
        handle
    });
    (span, handles.collect())
}

fn give_back(driver: &HipDriver, (span, handles): (u64, Vec<RawHandle>)) {
    for (n, handle) in (0..).zip(&handles) {
        // SAFETY: the mapping is whole, and nothing uses it.
        unsafe { driver.unmap(span + n * CHUNK, CHUNK) }.unwrap();
        // SAFETY: the handle is mapped nowhere and not used again.
        unsafe { driver.release(*handle) }.unwrap();
    }
    // SAFETY: nothing is mapped in the span.
    unsafe { driver.free_span(span, handles.len() as u64 * CHUNK) }.unwrap();
    assert_eq!(StandIn::get().figures(0).bytes_used, 0);
}

#[test]
fn success_with_a_null_address_is_an_error() {
    Child::of("5.7").role_well("treated null");
}

fn a_null_address() {
    let error = HipDriver::open(0).unwrap().reserve(CHUNK, CHUNK).unwrap_err().to_string();
    assert!(error.contains("the runtime returned success and a null address"), "{error}");
}

#[test]
fn a_peer_that_is_refused_is_named() {
    Child::of("7.14.1").set("FAKE_AMDHIP_DEVICES", "2").role_well("treated peer");
}

fn a_refused_peer() {
    let driver = HipDriver::open_with(0, HipOptions::new().peers([1])).unwrap();
    let (span, handles) = span_of(&driver, 1);
    let grant = || {
        // SAFETY: the chunk is mapped just there.
        unsafe { driver.set_access(span, CHUNK) }.unwrap_err().to_string()
    };
    StandIn::get().fail_call(c"hipMemSetAccess", 1, 1);
    let error = grant();
    assert!(error.contains("for its peer, device 1"), "{error}");
    StandIn::get().fail_call(c"hipMemSetAccess", 2, 1);
    let error = grant();
    assert!(!error.contains("peer"), "{error}");
    give_back(&driver, (span, handles));
}

#[test]
fn copies_are_cut_at_the_borders_of_both_sides() {
    Child::of("6.1").role_well("treated cuts");
}

fn copies_with_borders_on_both_sides() {
    let driver = HipDriver::open(0).unwrap();
    let (from, to) = (span_of(&driver, 3), span_of(&driver, 3));
    let wrote: Vec<u8> = (0..3 * CHUNK).map(|n| (n / 100 % 251) as u8).collect();
    // SAFETY: the memory is mapped, and the copy is over when this returns.
    unsafe { driver.copy_in(from.0, wrote.as_ptr(), 3 * CHUNK, None) }.unwrap();
    // The last byte before a border of one side's alone, of the other's, and of both.
    for (src, dst, bytes) in [(CHUNK - 1, 5, 10), (5, CHUNK - 1, 10), (CHUNK - 7, 2 * CHUNK - 3, 20), (1, 2, 2 * CHUNK)]
    {
        // SAFETY: as above.
        unsafe { driver.copy_within(to.0 + dst, from.0 + src, bytes, None) }.unwrap();
        let mut read = vec![0; bytes as usize];
        // SAFETY: as above.
        unsafe { driver.copy_out(read.as_mut_ptr(), to.0 + dst, bytes, None) }.unwrap();
        assert!(read == wrote[src as usize..][..bytes as usize], "{bytes} bytes from {src} to {dst}");
    }
    for (span, handles) in [from, to] {
        for (n, handle) in (0..).zip(handles) {
            // SAFETY: the mapping is whole, and nothing uses it.
            unsafe { driver.unmap(span + n * CHUNK, CHUNK) }.unwrap();
            // SAFETY: the handle is mapped nowhere and not used again.
            unsafe { driver.release(handle) }.unwrap();
        }
        // SAFETY: nothing is mapped in the span.
        unsafe { driver.free_span(span, 3 * CHUNK) }.unwrap();
    }
}

#[test]
fn a_part_of_a_card_does_not_take_the_card_s_figures() {
    Child::of("7.14.1").role_well("treated divided");
}

fn a_part_of_a_card() {
    let root = std::env::temp_dir().join(format!("growspan-hip-part-{}", std::process::id()));
    let folder = root.join("bus/pci/devices/0000:03:00.0");
    fs::create_dir_all(&folder).unwrap();
    // The whole card is twice as large, and the other half is full.
    let total = 32_624_u64 << 20;
    fs::write(folder.join("mem_info_vram_total"), format!("{}\n", 2 * total)).unwrap();
    fs::write(folder.join("mem_info_vram_used"), format!("{}\n", 2 * total - CHUNK)).unwrap();
    let memory = HipDriver::open_with(0, HipOptions::new().sysfs(&root)).unwrap().memory().unwrap();
    fs::remove_dir_all(&root).unwrap();
    assert_eq!((memory.free, memory.total), (total, total));
}

/// A capture that is under way, on any thread and in any mode, is none of our calls' business.
#[test]
fn captures_are_not_broken_by_our_calls() {
    for personality in ["6.4.3", "7.2.4", "7.14.1", "10.0"] {
        Child::of(personality).role_well("treated capture");
    }
}

fn calls_during_a_capture() {
    let (stand_in, driver) = (StandIn::get(), HipDriver::open(0).unwrap());
    let stream = Stream::with(0, 0);
    stand_in.begin_capture(&stream);
    give_back(&driver, span_of(&driver, 2));
    driver.synchronize().unwrap();
    // SAFETY: the null stream is always there.
    let null = unsafe { RawStream::from_raw(null_mut()) };
    for asked in [null, stream.raw()] {
        // SAFETY: both are alive and of this device.
        assert!(unsafe { driver.stream_is_capturing(asked) }.unwrap(), "the null stream waits for what is captured");
    }
    assert_eq!((stand_in.last_error(), stand_in.capture_mode()), (0, 0), "as before our calls");
    assert_eq!(stand_in.end_capture(&stream), 0);
    // SAFETY: as above.
    assert!(!unsafe { driver.stream_is_capturing(null) }.unwrap());
}

#[test]
fn an_import_that_finds_no_file_says_so() {
    Child::of("10.0").under(&["-n 64"]).role_well("treated import");
}

fn an_import_without_a_file() {
    let driver = HipDriver::open(0).unwrap();
    let handle = driver.create(CHUNK, ChunkProps::PLAIN.with_shareable(Shareable::PosixFd)).unwrap();
    // SAFETY: the handle is valid.
    let file = unsafe { driver.export(handle) }.unwrap();
    let all: Vec<_> = core::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    // SAFETY: the file was just exported, for so many bytes.
    let error = unsafe { driver.import(file.as_fd(), CHUNK) }.unwrap_err();
    drop(all);
    assert_eq!(error.kind(), DriverErrorKind::OutOfFiles, "{error}");
    // SAFETY: the handle is mapped nowhere and not used again.
    unsafe { driver.release(handle) }.unwrap();
}

#[test]
fn every_reference_that_failed_maps_left_is_given_back() {
    for personality in ["6.1", "6.4.3", "7.2.4"] {
        Child::of(personality).role_well("treated twice");
    }
}

fn a_handle_whose_maps_failed_twice() {
    let (stand_in, driver) = (StandIn::get(), HipDriver::open(0).unwrap());
    let span = driver.reserve(CHUNK, CHUNK).unwrap();
    let handle = driver.create(CHUNK, ChunkProps::PLAIN).unwrap();
    for _ in 0..2 {
        stand_in.fail_map(1);
        // SAFETY: the chunk is mapped nowhere, whole, within the span.
        unsafe { driver.map(span, CHUNK, handle) }.unwrap();
        // SAFETY: it is mapped just there, as far as the driver has said.
        unsafe { driver.set_access(span, CHUNK) }.unwrap_err();
        // SAFETY: nothing uses it.
        unsafe { driver.unmap(span, CHUNK) }.unwrap();
    }
    // SAFETY: the handle is mapped nowhere and not used again.
    unsafe { driver.release(handle) }.unwrap();
    // SAFETY: nothing is mapped in the span.
    unsafe { driver.free_span(span, CHUNK) }.unwrap();
    drop(driver);
    assert_eq!(stand_in.figures(0), Default::default());
}
