//! Handles between processes; here both are this one. `tests/loaded.rs` has two.

use std::fs::File;
use std::os::fd::AsRawFd;

use super::*;

fn export(hip: &Hip, handle: u64) -> Result<File, u32> {
    hip.do_("hipMemExportToShareableHandle", Kind::Vmm, |call| call.export(handle, 1, 0))
}

fn import(hip: &Hip, fd: i32) -> Result<u64, u32> {
    hip.do_("hipMemImportFromShareableHandle", Kind::Vmm, |call| call.import(fd, 1))
}

#[test]
fn memory_is_the_same_on_both_sides() {
    for name in ["6.4.3", "7.2.4", "7.14.1", "10.0"] {
        let (hip, other) = (Hip::new(name), Hip::new(name));
        let handle = hip.create_shareable(CHUNK).unwrap();
        let at = hip.reserve(CHUNK).unwrap();
        hip.map(at, CHUNK, handle).unwrap();
        hip.set_access(at, CHUNK).unwrap();
        hip.write(at + 9, b"shared");
        let file = export(&hip, handle).unwrap();
        let theirs = import(&other, file.as_raw_fd()).unwrap();
        let there = other.reserve(CHUNK).unwrap();
        assert_eq!(other.map(there, MIB, theirs), Err(1), "{name}: the size came along");
        other.map(there, CHUNK, theirs).unwrap();
        other.set_access(there, CHUNK).unwrap();
        assert_eq!(other.read(there + 9, 6), b"shared", "{name}");
        assert_eq!(other.figures().bytes_used, 0, "{name}: it is the exporter's");
        assert_eq!(hip.figures().bytes_used, CHUNK as u64, "{name}");
        hip.unmap(at, CHUNK).unwrap();
        hip.release(handle).unwrap();
        assert_eq!(other.read(there + 9, 6), b"shared", "{name}: and stays as long as anyone has it");
        other.unmap(there, CHUNK).unwrap();
        other.release(theirs).unwrap();
        assert_eq!((other.figures().handles, other.figures().open_handle_files), (0, 0), "{name}");
    }
}

#[test]
fn not_everything_can_be_shared() {
    let hip = Hip::new("7.14.1");
    let usual = hip.create(CHUNK).unwrap();
    assert_eq!(export(&hip, usual).err(), Some(1));
    assert_eq!(import(&hip, -1), Err(1));
    assert_eq!(import(&hip, 1), Err(1), "a file, but not memory");
    let other = File::open("/proc/self/maps").unwrap();
    assert_eq!(import(&hip, other.as_raw_fd()), Err(1));
    let hip = Hip::new("6.1");
    assert_eq!(hip.create_shareable(CHUNK), Err(801));
    let usual = hip.create(CHUNK).unwrap();
    assert_eq!(export(&hip, usual).err(), Some(801));
}

#[test]
fn the_file_must_stay_open_until_access_is_set() {
    for (name, result) in [("7.2.4", Ok(())), ("7.14.1", Err(1)), ("10.0", Err(1))] {
        let hip = Hip::new(name);
        let handle = hip.create_shareable(CHUNK).unwrap();
        let file = export(&hip, handle).unwrap();
        let theirs = import(&hip, file.as_raw_fd()).unwrap();
        let at = hip.reserve(2 * CHUNK).unwrap();
        hip.map(at, CHUNK, theirs).unwrap();
        hip.set_access(at, CHUNK).unwrap();
        drop(file);
        hip.map(at + CHUNK, CHUNK, theirs).unwrap();
        assert_eq!(hip.set_access(at + CHUNK, CHUNK), result, "{name}");
    }
}

#[test]
fn shareable_memory_is_counted_and_held_like_any_other() {
    let hip = Hip::new("7.2.4");
    let handle = hip.create_shareable(60 * MIB).unwrap();
    assert_eq!(hip.create_shareable(6 * MIB), Err(2));
    let at = hip.reserve(60 * MIB).unwrap();
    hip.map(at, 60 * MIB, handle).unwrap();
    hip.unmap(at, 60 * MIB).unwrap();
    hip.release(handle).unwrap();
    assert_eq!(hip.free_bytes(), 4 * MIB);
    hip.free_address(at, 60 * MIB).unwrap();
    assert_eq!(hip.free_bytes(), 64 * MIB);
}
