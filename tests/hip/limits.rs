//! Open files: ROCm 7.14 keeps one for each chunk, and a process starts with a thousand.

use std::fs::File;

use growspan::driver::hip::HipDriver;
use growspan::driver::{ChunkProps, Driver, DriverErrorKind};
use growspan::{Bytes, DeviceOptions, GrowableBuffer, Mode, OpenFileBudget, Sizing};

use crate::child::Child;
use crate::stand_in::StandIn;

const GIB: usize = 1 << 30;

/// The reason of a process that may not hold as many files as 2 MiB chunks of the whole card take: 16,312 for the chunks
/// of 32,624 MiB, and 1,024 for the application.
const TOO_FEW: &str =
    "ROCm keeps an open file per 2 MiB chunk: 17336 needed, and the open-file limit is 4096 (hard 4096;";

fn child(limits: &[&str]) -> Child {
    Child::of("7.14.1").under(limits)
}

pub(crate) fn as_child(role: &str) {
    match role {
        "arena" => whole_arena(Sizing::Ladder),
        "strict" => whole_arena(Sizing::Uniform(Bytes::mib(2))),
        "raw" => raw(),
        "map" => no_file_for_a_map(),
        other => panic!("no role {other}"),
    }
}

/// Maps 24 GiB, or says why not and goes on.
fn whole_arena(sizing: Sizing) {
    let device = DeviceOptions::new().sizing(sizing).hip(0).unwrap();
    let mode = device.verdict().mode();
    println!("mode {mode}");
    if let Some(reason) = device.verdict().reason() {
        println!("reason {reason}");
    }
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(24 * GIB).build().unwrap();
    buffer.grow_to(24 * GIB).unwrap();
    buffer.copy_in(24 * GIB - 3, &[1, 2, 3]).unwrap();
    let files = OpenFileBudget::process().usage();
    println!("chunks {} files {} limit {} hard {}", buffer.chunks().len(), files.ours, files.limit, files.hard);
    if mode == Mode::Virtual {
        assert_eq!(files.ours, StandIn::get().figures(0).open_handle_files);
    }
    buffer.close().unwrap();
    device.pool().trim(Bytes::ZERO);
    assert_eq!(StandIn::get().figures(0).bytes_used, 0);
}

/// The driver alone, which raises nothing: what others meet.
fn raw() {
    let driver = HipDriver::open(0).unwrap();
    let mut handles = Vec::new();
    let error = loop {
        match driver.create(2 << 20, ChunkProps::PLAIN) {
            Ok(handle) => handles.push(handle),
            Err(error) => break error,
        }
    };
    println!("chunks {} then {error}", handles.len());
    assert_eq!(error.kind(), DriverErrorKind::OutOfFiles);
    for handle in handles {
        // SAFETY: the handle is mapped nowhere and not used again.
        unsafe { driver.release(handle) }.unwrap();
    }
}

/// Every version opens a file for the time of a map, and one for the time of granting access.
fn no_file_for_a_map() {
    const CHUNK: u64 = 2 << 20;
    let driver = HipDriver::open(0).unwrap();
    let span = driver.reserve(2 * CHUNK, CHUNK).unwrap();
    let handles = [0, 1].map(|_| driver.create(CHUNK, ChunkProps::PLAIN).unwrap());
    // SAFETY: the chunk is mapped nowhere, whole, within the span.
    unsafe { driver.map(span, CHUNK, handles[0]) }.unwrap();
    let before = StandIn::get().figures(0);
    let all: Vec<_> = core::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    // SAFETY: as above.
    let mapped = unsafe { driver.map(span + CHUNK, CHUNK, handles[1]) };
    // SAFETY: it is mapped just there.
    let granted = unsafe { driver.set_access(span, CHUNK) };
    let silent = mapped.is_ok();
    // SAFETY: as above, as far as the driver has said.
    let unmapped = silent.then(|| unsafe { driver.set_access(span + CHUNK, CHUNK) });
    drop(all);
    for error in [mapped.err(), granted.err(), unmapped.map(Result::unwrap_err)].into_iter().flatten() {
        println!("{error}");
        assert_eq!(error.kind(), DriverErrorKind::OutOfFiles, "{error}");
        assert!(error.to_string().contains(" files open, limit 64"), "{error}");
    }
    // SAFETY: it is mapped just there.
    unsafe { driver.set_access(span, CHUNK) }.unwrap();
    if silent {
        // SAFETY: nothing uses it, and the driver knows that there is nothing.
        unsafe { driver.unmap(span + CHUNK, CHUNK) }.unwrap();
    }
    assert_eq!(StandIn::get().figures(0), before);
    // SAFETY: the mapping is whole, and nothing uses it.
    unsafe { driver.unmap(span, CHUNK) }.unwrap();
    for handle in handles {
        // SAFETY: the handle is mapped nowhere and not used again.
        unsafe { driver.release(handle) }.unwrap();
    }
    // SAFETY: nothing is mapped in the span.
    unsafe { driver.free_span(span, 2 * CHUNK) }.unwrap();
    assert_eq!(StandIn::get().figures(0).bytes_used, 0);
}

#[test]
fn a_map_that_finds_no_file_says_so() {
    for personality in ["6.1", "6.4.3", "7.2.4", "7.14.1", "10.0"] {
        let text = Child::of(personality).under(&["-n 64"]).role_well("limits map");
        // The map, or what follows where it is silent, and the grant.
        assert_eq!(text.matches("no open file left").count(), 2, "{personality}: {text}");
    }
}

#[test]
fn a_24_gib_arena_maps_whole_with_the_default_policy_under_1024_files() {
    for limits in [&["-n 1024"][..], &["-Sn 1024", "-Hn 4096"], &["-Sn 1024", "-Hn 65536"]] {
        let text = child(limits).role_well("limits arena");
        assert!(text.contains("mode virtual") && text.contains(" limit 1024 "), "nothing to raise: {text}");
    }
}

#[test]
fn the_strict_policy_says_how_many_files_are_needed() {
    let text = child(&["-Sn 1024", "-Hn 4096"]).role_well("limits strict");
    assert!(text.contains("mode contiguous") && text.contains(&format!("reason {TOO_FEW}")), "{text}");
    assert!(text.contains("1024 kept for the application; HIP runtime 7.14.60850)"), "{text}");
}

#[test]
fn the_limit_is_raised_where_the_process_may() {
    let text = child(&["-Sn 1024", "-Hn 65536"]).role_well("limits strict");
    assert!(text.contains("open-file limit 1024 -> 17336"), "{text}");
    assert!(text.contains("mode virtual") && text.contains("chunks 12288 files 12288 limit 17336"), "{text}");
}

#[test]
fn without_the_raise_a_process_meets_the_limit_and_is_told() {
    let text = child(&["-Sn 1024", "-Hn 4096"]).role_well("limits raw");
    assert!(text.contains("then create failed: no open file left (hipErrorOutOfMemory, 2)"), "{text}");
    assert!(text.contains("limit 1024"), "{text}");
}

#[test]
fn a_few_files_do_for_the_ladder() {
    let text = child(&["-n 256"]).role_well("limits arena");
    assert!(text.contains("mode virtual"), "{text}");
    let text = child(&["-n 256"]).role_well("limits strict");
    assert!(text.contains("mode contiguous") && text.contains("the open-file limit is 256 (hard 256;"), "{text}");
}

/// ROCm 10 keeps none.
#[test]
fn later_versions_spend_no_files() {
    let text = Child::of("10.0").under(&["-n 256"]).role_well("limits strict");
    assert!(text.contains("mode virtual") && text.contains("chunks 12288 files 0 limit 256"), "{text}");
}
