//! What holds on every version: memory is where it is mapped, and all of it comes back.

use super::*;

const WORKING: [&str; 6] = ["6.1", "6.4.3", "7.2.4", "7.10", "7.14.1", "10.0"];

#[test]
fn a_life_from_reserve_to_free() {
    for name in WORKING {
        let hip = Hip::new(name);
        let (at, handles) = hip.span(3);
        for i in 0..3 {
            hip.write(at + i * CHUNK + 5, &[i as u8 + 1; 300]);
        }
        for i in 0..3 {
            assert_eq!(hip.read(at + i * CHUNK + 5, 300), [i as u8 + 1; 300], "{name}");
        }
        let busy = hip.figures();
        assert_eq!((busy.spans, busy.handles, busy.mappings, busy.bytes_used), (1, 3, 3, 3 * CHUNK as u64), "{name}");
        assert_eq!(hip.free_bytes(), 64 * MIB - 3 * CHUNK, "{name}");
        assert_eq!(hip.free_address(at, 3 * CHUNK), Err(999), "{name}");
        for (i, handle) in handles.into_iter().enumerate() {
            hip.unmap(at + i * CHUNK, CHUNK).unwrap();
            hip.release(handle).unwrap();
        }
        hip.free_address(at, 3 * CHUNK).unwrap();
        assert_eq!(hip.figures(), Figures::default(), "{name}");
        assert_eq!(hip.free_bytes(), 64 * MIB, "{name}");
    }
}

#[test]
fn memory_moves_with_its_handle_and_is_scrubbed_with_it() {
    let hip = Hip::new("7.14.1");
    let (at, handles) = hip.span(2);
    hip.write(at, b"first");
    hip.write(at + CHUNK, b"other");
    hip.unmap(at, 2 * CHUNK).unwrap();
    hip.map(at + CHUNK, CHUNK, handles[0]).unwrap();
    hip.set_access(at + CHUNK, CHUNK).unwrap();
    assert_eq!(hip.read(at + CHUNK, 5), b"first");
    hip.release(handles[1]).unwrap();
    hip.chunk(at, CHUNK);
    assert_eq!(hip.read(at, 5), [0; 5]);
}

#[test]
fn release_while_mapped_keeps_the_memory_until_unmap() {
    for name in WORKING {
        let hip = Hip::new(name);
        let (at, handles) = hip.span(1);
        hip.write(at, b"still here");
        hip.release(handles[0]).unwrap();
        assert_eq!(hip.read(at, 10), b"still here", "{name}");
        assert_eq!(hip.figures().handles, 1, "{name}");
        hip.unmap(at, CHUNK).unwrap();
        assert_eq!(hip.figures().handles, 0, "{name}");
        // On 6.x the addresses are lost.
        let six = name.starts_with('6');
        assert_eq!(hip.free_address(at, CHUNK), if six { Err(999) } else { Ok(()) }, "{name}");
        assert_eq!(hip.figures(), Figures { spans: six.into(), ..Figures::default() }, "{name}");
    }
}

#[test]
fn a_reference_that_is_left_lets_addresses_go() {
    let hip = Hip::new("6.4.3");
    let (at, handles) = hip.span(1);
    let twin = hip.reserve(CHUNK).unwrap();
    hip.0.fail_map(1);
    hip.map(twin, CHUNK, handles[0]).unwrap();
    hip.unmap(at, CHUNK).unwrap();
    hip.release(handles[0]).unwrap();
    hip.release(handles[0]).unwrap();
    hip.free_address(at, CHUNK).unwrap();
    hip.free_address(twin, CHUNK).unwrap();
    assert_eq!(hip.figures(), Figures::default());
}

#[test]
fn a_handle_can_be_mapped_twice() {
    let hip = Hip::new("7.14.1");
    let (at, handles) = hip.span(1);
    let twin = hip.reserve(CHUNK).unwrap();
    hip.map(twin, CHUNK, handles[0]).unwrap();
    hip.set_access(twin, CHUNK).unwrap();
    hip.write(at + 77, b"both");
    assert_eq!(hip.read(twin + 77, 4), b"both");
    assert_eq!(hip.figures().mappings, 2);
}

#[test]
fn a_device_is_full_when_it_is_full() {
    let hip = Hip::with("7.14.1", &[("FAKE_AMDHIP_GRAPHICS_MIB", "10")]);
    let handles: Vec<_> = (0..27).map(|_| hip.create(CHUNK).unwrap()).collect();
    assert_eq!(hip.free_bytes(), 10 * MIB, "what draws is not seen");
    assert_eq!(hip.create(CHUNK), Err(2));
    assert_eq!(hip.malloc(1), Err(2));
    hip.release(handles[13]).unwrap();
    // Memory is paged: that it comes from here and there is nobody's business.
    hip.release(handles[20]).unwrap();
    hip.create(2 * CHUNK).unwrap();
    assert_eq!(hip.create(4096), Err(2));
    hip.set_device(1);
    hip.create(CHUNK).unwrap();
    assert_eq!((hip.0.figures(0).handles, hip.0.figures(1).handles), (26, 1));
}

#[test]
fn blocks_are_memory_too() {
    let hip = Hip::new("5.7");
    let block = hip.malloc(3 * MIB + 1).unwrap();
    assert_eq!(hip.figures().blocks, 1);
    assert_eq!(hip.free_bytes(), 61 * MIB - 4096);
    hip.write(block + 3 * MIB - 2, b"end");
    hip.fill(block, 7, MIB, 0).unwrap();
    assert_eq!(hip.read(block + 3 * MIB - 2, 3), b"end");
    assert_eq!(hip.read(block + MIB - 1, 2), [7, 0]);
    let other = hip.malloc(2 * MIB).unwrap();
    hip.copy(other + 1, block + 5, MIB, 0).unwrap();
    assert_eq!(hip.read(other, 3), [0, 7, 7]);
    // The last five bytes were past the fill.
    assert_eq!(hip.read(other + 1 + MIB - 6, 7), [7, 0, 0, 0, 0, 0, 0]);
    hip.free(block).unwrap();
    hip.free(other).unwrap();
    assert_eq!((hip.malloc(0), hip.free(0)), (Ok(0), Ok(())));
    assert_eq!(hip.figures(), Figures::default());
}

#[test]
fn fills_and_copies_cross_mappings_and_their_blocks_of_work() {
    let hip = Hip::new("7.14.1");
    let (at, _) = hip.span(4);
    let (from, to) = (at + 12_345, at + 2 * CHUNK - 99);
    hip.fill(from, 0x5a, 3 * MIB, 0).unwrap();
    hip.copy(to + 2 * MIB, from, CHUNK - 5000, 0).unwrap();
    assert_eq!(hip.read(from - 1, 2), [0, 0x5a]);
    assert_eq!(hip.read(from + 3 * MIB - 1, 2), [0x5a, 0]);
    assert!(hip.read(to + 2 * MIB, CHUNK - 5000).iter().all(|byte| *byte == 0x5a));
    assert_eq!(hip.read(to + 2 * MIB + CHUNK - 5000 - 1, 2), [0x5a, 0]);
    hip.fill(from + 10, 0, 3 * MIB - 20, 0).unwrap();
    let cleared = hip.read(from, 3 * MIB);
    assert!(cleared[..10].iter().chain(&cleared[3 * MIB - 10..]).all(|byte| *byte == 0x5a));
    assert!(cleared[10..3 * MIB - 10].iter().all(|byte| *byte == 0));
}

#[test]
fn calls_are_counted_and_fail_as_planned() {
    let hip = Hip::new("7.14.1");
    hip.0.fail_call("hipMemCreate", 2, 77);
    assert!(hip.create(CHUNK).is_ok());
    assert_eq!(hip.last_error(), 0);
    assert_eq!(hip.create(CHUNK), Err(77));
    assert!(hip.create(CHUNK).is_ok());
    assert_eq!(hip.0.calls("hipMemCreate"), 3);
    assert_eq!(hip.figures().handles, 2);
    assert_eq!((hip.last_error(), hip.last_error()), (77, 0));
    hip.0.fail_call("hipMemCreate", 1, 77);
    hip.0.fail_call("hipMemCreate", 0, 0);
    assert!(hip.create(CHUNK).is_ok());
    assert_eq!(hip.0.calls("hipMemMap"), 0);
}

#[test]
fn errors_and_devices_are_a_threads_own() {
    let hip = Hip::new("7.14.1");
    hip.set_device(1);
    assert_eq!(hip.create(1), Err(1));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let device = hip.do_("hipGetDevice", Kind::Usual, |call| Ok(call.thread.device));
            (device, hip.last_error())
        });
        assert_eq!(other.join().unwrap(), (Ok(0), 0));
    });
    assert_eq!(hip.last_error(), 1);
    assert_eq!(hip.do_("hipGetDevice", Kind::Usual, |call| Ok(call.thread.device)), Ok(1));
    assert_eq!(hip.do_("hipSetDevice", Kind::Usual, |call| call.known_device(2)), Err(101));
}
