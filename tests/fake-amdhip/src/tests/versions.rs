//! What one version does and another does not.

use std::time::{Duration, Instant};

use super::*;

#[test]
fn before_6_1_there_is_nothing_but_blocks() {
    let hip = Hip::new("5.7");
    assert_eq!(hip.do_("hipDeviceGetAttribute", Kind::Usual, |call| call.attribute(89, 0)), Ok(0));
    assert_eq!(hip.reserve(CHUNK), Ok(0), "success, and a null pointer");
    assert_eq!(hip.create(CHUNK), Err(801));
    assert_eq!(hip.set_access(4096, 4096), Err(801));
    assert_eq!(hip.do_("hipGetDevicePropertiesR0600", Kind::Usual, |call| call.properties(0).map(|_| ())), Err(801));
    assert!(hip.malloc(10).is_ok());
}

#[test]
fn without_a_device_everything_says_so() {
    for (name, code) in [("none", 100), ("5.2", 101)] {
        let hip = Hip::new(name);
        assert_eq!(hip.malloc(10), Err(code));
        assert_eq!(hip.reserve(CHUNK), Err(code));
        assert_eq!(hip.last_error(), code);
        assert!(hip.do_("hipRuntimeGetVersion", Kind::Free, |call| Ok(call.config.rules.version)).is_ok());
        assert_eq!(hip.figures(), Figures::default());
    }
}

#[test]
fn granularities() {
    for (name, recommended) in
        [("6.1", 4096), ("6.4.3", 4096), ("7.2.4", 4096), ("7.10", 4096), ("7.14.1", CHUNK), ("10.0", CHUNK)]
    {
        let hip = Hip::new(name);
        let ask = |option| {
            let ask = |call: &mut Call<'_>| call.granularity(properties(0), option);
            hip.do_("hipMemGetAllocationGranularity", Kind::Vmm, ask)
        };
        assert_eq!((ask(0), ask(1), ask(2)), (Ok(4096), Ok(recommended), Err(1)), "{name}");
    }
}

#[test]
fn sizes_that_do_not_fit() {
    for (name, code) in [("6.1", 2), ("6.4.3", 2), ("7.2.4", 1), ("7.14.1", 1), ("10.0", 1)] {
        let hip = Hip::new(name);
        assert_eq!((hip.reserve(0), hip.reserve(4097)), (Err(1), Err(code)), "{name}");
        assert_eq!(hip.reserve_aligned(CHUNK, 3), Err(code), "{name}");
        assert_eq!((hip.create(0), hip.create(6912), hip.create(6144)), (Err(1), Err(1), Err(2)), "{name}");
        assert_eq!(hip.reserve(1 << 60), Err(2), "{name}");
        assert_eq!(hip.reserve(usize::MAX & !4095), Err(2), "{name}");
    }
}

#[test]
fn alignment_is_ignored_refused_or_honoured() {
    let at = Hip::new("6.4.3").reserve_aligned(CHUNK, 64 * MIB).unwrap();
    assert_eq!(at % (2 * CHUNK), CHUNK, "{at:#x} is 2 MiB aligned and not more");
    for name in ["7.2.4", "7.10"] {
        assert_eq!(Hip::new(name).reserve_aligned(CHUNK, CHUNK), Err(1), "{name}");
    }
    for name in ["7.14.1", "10.0"] {
        let at = Hip::new(name).reserve_aligned(CHUNK, 64 * MIB).unwrap();
        assert_eq!(at % (64 * MIB), 0, "{name}: {at:#x}");
    }
}

#[test]
fn six_makes_no_large_chunks() {
    let memory = [("FAKE_AMDHIP_MEMORY_MIB", "1024")];
    for (name, result) in [("6.1", Err(2)), ("6.4.3", Err(2)), ("7.2.4", Ok(())), ("7.14.1", Ok(()))] {
        let hip = Hip::with(name, &memory);
        assert!(hip.create(256 * MIB).is_ok(), "{name}");
        assert_eq!(hip.create(258 * MIB).map(|_| ()), result, "{name}");
    }
}

#[test]
fn memory_is_of_the_device_asked_for_or_of_the_current_one() {
    for (name, device) in [("6.1", 1), ("6.4.3", 1), ("7.2.4", 0), ("7.14.1", 0), ("10.0", 0)] {
        let hip = Hip::new(name);
        let handle = hip.create_on(CHUNK, 1).unwrap();
        let at = hip.reserve(CHUNK).unwrap();
        assert_eq!(hip.0.device_of(at), -1);
        hip.map(at, CHUNK, handle).unwrap();
        assert_eq!(hip.0.device_of(at + 5), device, "{name}");
        assert_eq!(hip.create_on(CHUNK, 2), Err(1), "{name}: looked at in any case");
    }
}

#[test]
fn set_access_wants_whole_mappings() {
    for name in ["6.4.3", "7.2.4", "7.14.1", "10.0"] {
        let hip = Hip::new(name);
        let (at, _) = hip.span(3);
        assert_eq!(hip.set_access(at + CHUNK, CHUNK), Ok(()), "{name}");
        assert_eq!(hip.set_access(at + CHUNK, 2 * CHUNK), Ok(()), "{name}");
        assert_eq!(hip.set_access(at, MIB), Err(1), "{name}");
        assert_eq!(hip.set_access(at + MIB, CHUNK), Err(1), "{name}");
        assert_eq!(hip.set_access(at, 4 * CHUNK), Err(1), "{name}");
        assert_eq!(hip.set_access(at, 0), Err(1), "{name}");
        assert_eq!(hip.set_access_for(at, CHUNK, &[]), Err(1), "{name}");
        assert_eq!(hip.set_access_for(at, CHUNK, &[0, 2]), Err(1), "{name}");
        hip.unmap(at + CHUNK, CHUNK).unwrap();
        assert_eq!(hip.set_access(at, 3 * CHUNK), Err(1), "{name}");
    }
}

#[test]
fn mixed_sizes_fail_where_sums_from_the_start_are_compared() {
    for (name, result) in [("6.4.3", Ok(())), ("7.2.4", Err(1)), ("7.10", Err(1)), ("7.14.1", Ok(())), ("10.0", Ok(()))]
    {
        let hip = Hip::new(name);
        let at = hip.reserve(16 * MIB).unwrap();
        for i in 0..3 {
            hip.chunk(at + i * CHUNK, CHUNK);
        }
        let large = hip.create(8 * MIB).unwrap();
        hip.map(at + 3 * CHUNK, 8 * MIB, large).unwrap();
        assert_eq!(hip.set_access(at + 3 * CHUNK, 8 * MIB), result, "{name}");
        assert_eq!(hip.set_access(at, 14 * MIB), Ok(()), "{name}: the whole prefix always works");
    }
}

#[test]
fn sums_from_the_start_end_at_a_gap() {
    let hip = Hip::new("7.2.4");
    let (at, _) = hip.span(4);
    hip.unmap(at + CHUNK, CHUNK).unwrap();
    assert_eq!(hip.set_access(at + 2 * CHUNK, CHUNK), Ok(()));
    assert_eq!(hip.set_access(at + 2 * CHUNK, 2 * CHUNK), Err(1));
}

#[test]
fn a_failed_map_is_silent_until_7_14() {
    for name in ["6.1", "6.4.3", "7.2.4", "7.10"] {
        let hip = Hip::new(name);
        let at = hip.reserve(CHUNK).unwrap();
        let handle = hip.create(CHUNK).unwrap();
        hip.0.fail_map(1);
        assert_eq!(hip.map(at, CHUNK, handle), Ok(()), "{name}");
        assert_eq!(hip.set_access(at, CHUNK), Err(1), "{name}");
        assert_eq!(hip.get_access(at, 0), Err(1), "{name}");
        assert_eq!(hip.retain(at), Err(1), "{name}");
        hip.release(handle).unwrap();
        let left = hip.figures();
        assert_eq!((left.handles, left.bytes_leaked), (1, CHUNK as u64), "{name}");
        hip.release(handle).unwrap();
        assert_eq!(hip.free_bytes(), 64 * MIB, "{name}");
        misuse_of(|| hip.release(handle));
    }
    for name in ["7.14.1", "10.0"] {
        let hip = Hip::new(name);
        let at = hip.reserve(CHUNK).unwrap();
        let handle = hip.create(CHUNK).unwrap();
        hip.0.fail_map(2);
        assert_eq!(hip.map(at, CHUNK, handle), Ok(()), "{name}: the second fails");
        hip.unmap(at, CHUNK).unwrap();
        assert_eq!(hip.map(at, CHUNK, handle), Err(205), "{name}");
        hip.release(handle).unwrap();
        assert_eq!(hip.free_bytes(), 64 * MIB, "{name}");
    }
}

#[test]
fn a_map_over_a_mapping_is_silent_until_7_14_and_leaves_the_old_one() {
    for (name, result) in [("6.1", Ok(())), ("7.2.4", Ok(())), ("7.14.1", Err(1)), ("10.0", Err(1))] {
        let hip = Hip::new(name);
        let (at, _) = hip.span(1);
        hip.write(at, b"old");
        let handle = hip.create(CHUNK).unwrap();
        assert_eq!(hip.map(at, CHUNK, handle), result, "{name}");
        assert_eq!(hip.read(at, 3), b"old", "{name}");
        hip.release(handle).unwrap();
        assert_eq!(hip.figures().bytes_leaked, if result.is_ok() { CHUNK as u64 } else { 0 }, "{name}");
    }
}

#[test]
fn maps_that_are_refused() {
    for name in ["6.4.3", "7.2.4", "7.14.1"] {
        let hip = Hip::new(name);
        let (at, handle) = (hip.reserve(CHUNK).unwrap(), hip.create(CHUNK).unwrap());
        let map =
            |at, size, offset, flags| hip.do_("hipMemMap", Kind::Vmm, |call| call.map(at, size, offset, handle, flags));
        assert_eq!(map(at, CHUNK, 4096, 0), Err(1), "{name}");
        assert_eq!(map(at, CHUNK, 0, 1), Err(1), "{name}");
        assert_eq!(map(at, MIB, 0, 0), Err(1), "{name}");
        assert_eq!(map(at + 4096, CHUNK, 0, 0), Err(1), "{name}");
        assert_eq!(map(at + CHUNK, CHUNK, 0, 0), Err(1), "{name}");
        assert_eq!(map(0, CHUNK, 0, 0), Err(1), "{name}");
        hip.release(handle).unwrap();
        assert_eq!(hip.figures().handles, 0, "{name}: none of them left a reference");
    }
}

#[test]
fn unmap_refuses_since_7() {
    for name in ["7.2.4", "7.14.1", "10.0"] {
        let hip = Hip::new(name);
        let (at, _) = hip.span(3);
        assert_eq!(hip.unmap(at, MIB), Err(1), "{name}");
        assert_eq!(hip.unmap(at + MIB, CHUNK), Err(1), "{name}");
        assert_eq!(hip.unmap(at, 2 * CHUNK), Ok(()), "{name}: a run of whole mappings");
        assert_eq!(hip.unmap(at, CHUNK), Err(1), "{name}");
        assert_eq!(hip.unmap(at + CHUNK, 2 * CHUNK), Err(1), "{name}");
    }
}

#[test]
fn retaining_adds_a_reference_since_7() {
    for (name, releases) in [("6.4.3", 1), ("7.2.4", 2), ("7.14.1", 2)] {
        let hip = Hip::new(name);
        let (at, handles) = hip.span(1);
        assert_eq!(hip.retain(at + 12), Ok(handles[0]), "{name}");
        for _ in 0..releases {
            hip.release(handles[0]).unwrap();
        }
        misuse_of(|| hip.release(handles[0]));
        assert_eq!(hip.figures().handles, 1, "{name}: mapped");
    }
}

#[test]
fn access_is_each_devices_own() {
    let hip = Hip::new("7.14.1");
    let at = hip.reserve(CHUNK).unwrap();
    let handle = hip.create(CHUNK).unwrap();
    assert_eq!(hip.get_access(at, 0), Err(1));
    hip.map(at, CHUNK, handle).unwrap();
    assert_eq!((hip.get_access(at, 0), hip.get_access(at, 1)), (Ok(0), Ok(0)));
    hip.set_access_for(at, CHUNK, &[1, 0]).unwrap();
    assert_eq!((hip.get_access(at, 0), hip.get_access(at + 9, 1)), (Ok(3), Ok(3)));
    assert_eq!(hip.get_access(at, 2), Err(1));
    hip.write(at, b"of 0");
    hip.set_device(1);
    assert_eq!(hip.read(at, 4), b"of 0");
}

#[test]
fn access_for_a_peer_after_the_owner_ruins_the_mapping_on_7_14() {
    for (name, read) in [("7.2.4", *b"data"), ("7.14.1", [0; 4]), ("10.0", *b"data")] {
        let hip = Hip::new(name);
        let (at, handles) = hip.span(2);
        hip.write(at, b"data");
        hip.set_access_for(at, CHUNK, &[1]).unwrap();
        assert_eq!(hip.read(at, 4), read, "{name}");
        hip.write(at, b"data");
        assert_eq!(hip.read(at, 4), read, "{name}: nor does it get better");
        hip.write(at + CHUNK, b"data");
        assert_eq!(hip.read(at + CHUNK, 4), *b"data", "{name}: the other mapping is as it was");
        // A fill of zeros and a copy go the same way as a copy from the host.
        hip.copy(at + CHUNK + 8, at, 4, 0).unwrap();
        assert_eq!(hip.read(at + CHUNK + 8, 4), read, "{name}");
        // Nor does what was there come back at another place.
        let elsewhere = hip.reserve(CHUNK).unwrap();
        hip.unmap(at, CHUNK).unwrap();
        hip.map(elsewhere, CHUNK, handles[0]).unwrap();
        hip.set_access(elsewhere, CHUNK).unwrap();
        assert_eq!(hip.read(elsewhere, 4), read, "{name}");
    }
}

#[test]
fn one_copy_reaches_one_mapping_on_6_1() {
    for (name, result) in [("6.1", Err(1)), ("6.4.3", Ok(())), ("7.14.1", Ok(()))] {
        let hip = Hip::new(name);
        let (at, _) = hip.span(4);
        let astride = at + CHUNK - 8;
        assert_eq!(hip.upload(astride, &[1; 16], 0), result, "{name}");
        assert_eq!(hip.download(&mut [0; 16], astride, 0), result, "{name}");
        assert_eq!(hip.fill(astride, 1, 16, 0), result, "{name}");
        assert_eq!(hip.copy(at + 2 * CHUNK, astride, 16, 0), result, "{name}");
        assert_eq!(hip.copy(astride, at + 2 * CHUNK, 16, 0), result, "{name}");
        assert_eq!(hip.fill(at, 1, CHUNK, 0), Ok(()), "{name}");
        hip.device_synchronize().unwrap();
    }
}

#[test]
fn a_gfx12_is_blind_for_a_while() {
    let hip = Hip::new("gfx1201");
    let (at, _) = hip.span(1);
    let seeing = || std::thread::sleep(Duration::from_millis(2));
    let holds = |data: &[u8]| {
        seeing();
        hip.write(at, data);
    };
    // What is seen within a millisecond of the access being set; on a busy machine that takes some tries.
    let while_blind = |before: &[u8], what: &dyn Fn() -> Vec<u8>| {
        for _ in 0..1000 {
            holds(before);
            let start = Instant::now();
            hip.set_access(at, CHUNK).unwrap();
            let seen = what();
            if start.elapsed() < Duration::from_millis(1) {
                return seen;
            }
        }
        panic!("never within a millisecond");
    };
    while_blind(b"kept", &|| {
        hip.write(at, b"lost");
        Vec::new()
    });
    seeing();
    assert_eq!(hip.read(at, 4), b"kept", "the write was lost");
    assert_eq!(while_blind(b"here", &|| hip.read(at, 4)), [0; 4], "and reads give zeros");
    seeing();
    assert_eq!(hip.read(at, 4), b"here");
}
