//! What is returned for arguments that no version takes.

use super::*;
use crate::space;

fn create(hip: &Hip, change: impl FnOnce(&mut hipMemAllocationProp), flags: u64) -> Result<u64, u32> {
    let mut prop = properties(0);
    change(&mut prop);
    hip.do_("hipMemCreate", Kind::Vmm, |call| call.create(CHUNK, prop, flags))
}

#[test]
fn memory_of_other_kinds() {
    for name in ["6.4.3", "7.2.4", "7.14.1", "10.0"] {
        let hip = Hip::new(name);
        assert_eq!(create(&hip, |prop| prop.kind = 0x4000_0000, 0), Err(1), "{name}: uncached");
        assert_eq!(create(&hip, |prop| prop.handle_type = 2, 0), Err(1), "{name}: for Windows");
        assert_eq!(create(&hip, |prop| prop.location.kind = 2, 0), Err(1), "{name}: of the host");
        assert_eq!(create(&hip, |_| {}, 1), Err(1), "{name}: flags");
        assert_eq!(hip.figures(), Figures::default(), "{name}");
        let flags = hip.do_("hipMemAddressReserve", Kind::Vmm, |call| call.reserve(CHUNK, 0, 0, 1));
        assert_eq!(flags, Err(1), "{name}: flags");
    }
}

#[test]
fn places_and_access_of_other_kinds() {
    for name in ["6.4.3", "7.2.4", "7.14.1", "10.0"] {
        let hip = Hip::new(name);
        let (at, handle) = (hip.reserve(2 * CHUNK).unwrap(), hip.create(CHUNK).unwrap());
        assert_eq!(hip.map(at + 2048, CHUNK, handle), Err(1), "{name}: no multiple of a page");
        hip.map(at, CHUNK, handle).unwrap();
        let set = |desc| hip.do_("hipMemSetAccess", Kind::Vmm, |call| call.set_access(at, CHUNK, &[desc]));
        assert_eq!(set(hipMemAccessDesc { location: location(0), flags: 2 }), Err(1), "{name}: writing alone");
        let host = hipMemLocation { kind: 2, id: 0 };
        assert_eq!(set(hipMemAccessDesc { location: host, flags: 3 }), Err(1), "{name}: the host");
        let asked = hip.do_("hipMemGetAccess", Kind::Vmm, |call| call.get_access(at, host));
        assert_eq!(asked, Err(1), "{name}: the host");
        assert_eq!(hip.get_access(at, 0), Ok(0), "{name}: none of it was granted");
    }
}

#[test]
fn ranges_over_the_end_of_a_span() {
    for (name, place) in [("6.4.3", 0x4567_0000_0000), ("7.2.4", 0x4568_0000_0000), ("7.14.1", 0x4569_0000_0000)] {
        let hip = Hip::new(name);
        for at in [place, place + CHUNK] {
            assert_eq!(hip.reserve_near(at), at);
            hip.chunk(at, CHUNK);
        }
        assert_eq!(hip.set_access(place, 2 * CHUNK), Err(1), "{name}");
        if name != "6.4.3" {
            assert_eq!(hip.unmap(place, 2 * CHUNK), Err(1), "{name}");
        }
    }
}

#[test]
fn other_ways_to_share() {
    let hip = Hip::new("7.14.1");
    let handle = hip.create_shareable(CHUNK).unwrap();
    let export = |kind, flags| {
        hip.do_("hipMemExportToShareableHandle", Kind::Vmm, |call| call.export(handle, kind, flags)).map(|_| ())
    };
    assert_eq!((export(2, 0), export(1, 1), export(1, 0)), (Err(1), Err(1), Ok(())));
    let file = hip.do_("hipMemExportToShareableHandle", Kind::Vmm, |call| call.export(handle, 1, 0)).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let import = |kind| hip.do_("hipMemImportFromShareableHandle", Kind::Vmm, |call| call.import(fd, kind)).map(|_| ());
    assert_eq!((import(2), import(1)), (Err(1), Ok(())));
}

#[test]
fn streams_and_events_of_other_kinds() {
    let hip = Hip::new("7.14.1");
    let stream = |flags| hip.do_("hipStreamCreateWithFlags", Kind::Usual, |call| call.stream_create(flags)).map(|_| ());
    assert_eq!((stream(2), stream(1)), (Err(1), Ok(())));
    let event = |flags| hip.do_("hipEventCreateWithFlags", Kind::Usual, |call| call.event_create(flags)).map(|_| ());
    assert_eq!((event(8), event(2)), (Err(1), Ok(())));
    assert_eq!(hip.destroy_stream(0), Err(1));
}

#[test]
fn alignments_are_pages_at_least() {
    // 6.1 wants multiples of a page, later versions powers of two.
    for name in ["6.1", "6.4.3", "7.14.1"] {
        let hip = Hip::new(name);
        let six = name.starts_with('6');
        let refusal = Err(if six { 2 } else { 1 });
        assert_eq!(hip.reserve_aligned(CHUNK, 2048), refusal, "{name}");
        assert_eq!(hip.reserve_aligned(CHUNK, 3 * 4096), refusal, "{name}");
        assert!(hip.reserve_aligned(CHUNK, 4096).is_ok(), "{name}");
    }
}

#[test]
fn virtual_memory_management_can_be_turned_off() {
    for (value, works) in [("0", false), ("1", true)] {
        let hip = Hip::with("7.14.1", &[("HIP_VMEM_MANAGE_SUPPORT", value)]);
        let attribute = hip.do_("hipDeviceGetAttribute", Kind::Usual, |call| call.attribute(89, 0));
        assert_eq!(attribute, Ok(i32::from(works)));
        assert_eq!(hip.create(CHUNK).map(|_| ()), if works { Ok(()) } else { Err(801) });
        assert_eq!(hip.reserve(CHUNK).is_ok_and(|at| at == 0), !works, "success and a null pointer");
    }
}

#[test]
fn mappings_are_entries_of_the_memory_map_since_7() {
    use std::os::unix::fs::MetadataExt;
    for (name, each) in [("6.4.3", 0), ("7.2.4", 1), ("7.14.1", 1), ("10.0", 1)] {
        let hip = Hip::new(name);
        let (at, _) = hip.span(8);
        let inode = hip.0.look(|state| state.memory.zeros(0).metadata().unwrap().ino());
        let entries = || space::file_mappings().unwrap().into_iter().filter(|map| map.inode == inode).count();
        assert_eq!(entries(), 8 * each, "{name}");
        hip.unmap(at + CHUNK, CHUNK).unwrap();
        // On 7.2 the old entry stays.
        assert_eq!(entries(), if name == "7.2.4" { 8 } else { 7 * each }, "{name}");
    }
}
