//! When memory comes back, and the open files.

use super::*;

/// What a program can do about 7.2: takes the addresses for itself.
fn remap(at: usize, size: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: a part of a reservation of the test's, where nothing can be read.
    let got = unsafe { libc::mmap(core::ptr::without_provenance_mut(at), size, libc::PROT_NONE, flags, -1, 0) };
    assert_eq!(got.addr(), at);
}

#[test]
fn on_7_2_memory_stays_while_addresses_map_it() {
    for name in ["7.2.4", "7.10"] {
        let hip = Hip::new(name);
        let (at, handles) = hip.span(3);
        for (i, handle) in handles.iter().enumerate() {
            hip.unmap(at + i * CHUNK, CHUNK).unwrap();
            hip.release(*handle).unwrap();
        }
        let after = hip.figures();
        assert_eq!((after.handles, after.mappings, after.bytes_used), (0, 0, 3 * CHUNK as u64), "{name}");
        assert_eq!(hip.free_bytes(), 64 * MIB - 3 * CHUNK, "{name}");
        assert_eq!(hip.create(59 * MIB), Err(2), "{name}");
        remap(at + CHUNK, CHUNK);
        assert_eq!(hip.free_bytes(), 64 * MIB - 2 * CHUNK, "{name}");
        remap(at, MIB);
        assert_eq!(hip.free_bytes(), 64 * MIB - 2 * CHUNK, "{name}: half is not enough");
        // Another mapping takes the place, too.
        hip.chunk(at + 2 * CHUNK, CHUNK);
        assert_eq!(hip.figures().bytes_used, 2 * CHUNK as u64, "{name}");
        hip.unmap(at + 2 * CHUNK, CHUNK).unwrap();
        hip.free_address(at, 3 * CHUNK).unwrap();
        assert_eq!(hip.figures().bytes_used, CHUNK as u64, "{name}: a handle is left");
    }
}

#[test]
fn on_7_2_a_handle_that_moved_is_held_by_its_old_place() {
    let hip = Hip::new("7.2.4");
    let (at, handles) = hip.span(1);
    let elsewhere = hip.reserve(CHUNK).unwrap();
    hip.unmap(at, CHUNK).unwrap();
    hip.map(elsewhere, CHUNK, handles[0]).unwrap();
    hip.unmap(elsewhere, CHUNK).unwrap();
    remap(elsewhere, CHUNK);
    hip.release(handles[0]).unwrap();
    assert_eq!(hip.free_bytes(), 64 * MIB - CHUNK);
    remap(at, CHUNK);
    assert_eq!(hip.free_bytes(), 64 * MIB);
}

#[test]
fn elsewhere_it_comes_back_at_once() {
    for name in ["6.1", "6.4.3", "7.14.1", "10.0"] {
        let hip = Hip::new(name);
        let (at, handles) = hip.span(1);
        hip.unmap(at, CHUNK).unwrap();
        hip.release(handles[0]).unwrap();
        assert_eq!(hip.free_bytes(), 64 * MIB, "{name}");
    }
}

#[test]
fn on_6_4_0_it_never_comes_back() {
    let hip = Hip::new("6.4.0");
    let (at, handles) = hip.span(1);
    hip.unmap(at, CHUNK).unwrap();
    hip.release(handles[0]).unwrap();
    hip.free_address(at, CHUNK).unwrap();
    let left = Figures { bytes_used: CHUNK as u64, bytes_leaked: CHUNK as u64, ..Figures::default() };
    assert_eq!(hip.figures(), left);
    assert_eq!(hip.create(64 * MIB), Err(2));
    let block = hip.malloc(MIB).unwrap();
    hip.free(block).unwrap();
    assert_eq!(hip.figures(), left, "blocks do come back");
}

#[test]
fn a_file_per_handle_on_7_14_only() {
    for (name, files) in [("6.4.3", 0), ("7.2.4", 0), ("7.14.1", 2), ("old-drm", 2), ("gfx1201", 2), ("10.0", 0)] {
        let hip = Hip::new(name);
        let at = hip.reserve(CHUNK).unwrap();
        let handles = [hip.create(CHUNK).unwrap(), hip.create(CHUNK).unwrap()];
        assert_eq!(hip.figures().open_handle_files, files, "{name}");
        hip.map(at, CHUNK, handles[0]).unwrap();
        hip.release(handles[0]).unwrap();
        hip.release(handles[1]).unwrap();
        assert_eq!(hip.figures().open_handle_files, files / 2, "{name}: the last reference is the mapping");
        hip.unmap(at, CHUNK).unwrap();
        assert_eq!(hip.figures().open_handle_files, 0, "{name}");
    }
}

#[test]
fn what_comes_back_goes_back_to_the_system() {
    use std::os::unix::fs::MetadataExt;
    let hip = Hip::new("7.14.1");
    let pages = || hip.0.look(|state| state.memory.zeros(0).metadata().unwrap().blocks()) * 512 / 4096;
    let (at, handles) = hip.span(2);
    hip.fill(at, 1, CHUNK + 4096, 0).unwrap();
    hip.synchronize(0).unwrap();
    assert!(pages() >= 513, "{} pages", pages());
    hip.unmap(at, CHUNK).unwrap();
    hip.release(handles[0]).unwrap();
    let left = pages();
    assert!((1..=512).contains(&left), "{left} pages, huge ones or not");
    let block = hip.malloc(MIB).unwrap();
    hip.fill(block, 1, MIB, 0).unwrap();
    hip.synchronize(0).unwrap();
    hip.free(block).unwrap();
    assert!(pages() <= left, "{} pages", pages());
}
