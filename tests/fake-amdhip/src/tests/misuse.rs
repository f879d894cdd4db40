//! What a real runtime would punish with a crash or with silence ends the process here.

use super::*;

/// That the words are in the message of a misuse.
fn refused<R>(words: &str, body: impl FnOnce() -> R) {
    let message = misuse_of(body);
    assert!(message.contains(words), "{message:?} has no {words:?}");
}

#[test]
fn handles_that_are_none() {
    for name in ["6.4.3", "7.2.4", "7.14.1"] {
        let hip = Hip::new(name);
        let (at, handle) = (hip.reserve(CHUNK).unwrap(), hip.create(CHUNK).unwrap());
        refused("hipMemRelease: 0x10 is no handle", || hip.release(16));
        hip.release(handle).unwrap();
        refused("hipMemRelease: ", || hip.release(handle));
        refused("hipMemMap: ", || hip.map(at, CHUNK, handle));
        refused("hipMemExport", || {
            hip.do_("hipMemExportToShareableHandle", Kind::Vmm, |call| call.export(handle, 1, 0))
        });
    }
}

#[test]
fn a_released_handle_is_not_used_though_it_is_mapped() {
    let hip = Hip::new("7.14.1");
    let (at, handles) = hip.span(1);
    let twin = hip.reserve(CHUNK).unwrap();
    hip.release(handles[0]).unwrap();
    refused("hipMemMap: ", || hip.map(twin, CHUNK, handles[0]));
    refused("hipMemRelease: ", || hip.release(handles[0]));
    // Until it is asked for once more.
    assert_eq!(hip.retain(at), Ok(handles[0]));
    hip.map(twin, CHUNK, handles[0]).unwrap();
}

#[test]
fn unmap_on_6_is_right_or_the_end() {
    for name in ["6.1", "6.4.0", "6.4.3"] {
        let hip = Hip::new(name);
        let (at, _) = hip.span(2);
        refused("nothing is mapped", || hip.unmap(at + MIB, CHUNK));
        refused("1048576 bytes", || hip.unmap(at, MIB));
        refused("4194304 bytes", || hip.unmap(at, 2 * CHUNK));
        hip.unmap(at, CHUNK).unwrap();
        refused("nothing is mapped", || hip.unmap(at, CHUNK));
    }
}

#[test]
fn addresses_that_were_not_reserved_so() {
    for name in ["6.4.3", "7.2.4", "7.14.1", "10.0"] {
        let hip = Hip::new(name);
        let at = hip.reserve(2 * CHUNK).unwrap();
        refused("not the start", || hip.free_address(at + CHUNK, CHUNK));
        refused("where 4194304 were reserved", || hip.free_address(at, CHUNK));
        hip.free_address(at, 2 * CHUNK).unwrap();
        refused("not the start", || hip.free_address(at, 2 * CHUNK));
    }
}

#[test]
fn blocks_and_mappings_are_not_the_same() {
    let hip = Hip::new("7.14.1");
    let (at, _) = hip.span(1);
    let block = hip.malloc(100).unwrap();
    refused("virtual memory management", || hip.free(at));
    refused("virtual memory management", || hip.free(at + 4096));
    refused("no block", || hip.free(block + 4096));
    refused("no block", || hip.free(4096));
    refused("hipMemAddressFree", || hip.free_address(block, 4096));
    hip.free(block).unwrap();
    refused("no block", || hip.free(block));
}

#[test]
fn copies_from_and_to_nowhere() {
    let hip = Hip::new("7.14.1");
    let (at, _) = hip.span(3);
    let block = hip.malloc(100).unwrap();
    hip.unmap(at + CHUNK, CHUNK).unwrap();
    let hole = format!("nothing is mapped at {:#x}", at + CHUNK);
    refused(&hole, || hip.upload(at + CHUNK - 1, &[0; 2], 0));
    refused(&hole, || hip.download(&mut [0; 2], at + CHUNK - 1, 0));
    refused(&hole, || hip.fill(at, 0, 3 * CHUNK, 0));
    refused(&hole, || hip.copy(at + CHUNK, at, 5, 0));
    refused(&hole, || hip.copy(at, at + CHUNK - 4, 5, 0));
    refused("nothing is mapped", || hip.fill(at + 3 * CHUNK - 1, 0, 2, 0));
    refused("nothing is mapped", || hip.fill(block + 50, 0, 51, 0));
    refused("nothing is mapped", || hip.fill(usize::MAX, 0, 2, 0));
    refused("overlap", || hip.copy(at + 1, at, 2, 0));
    hip.copy(at + 1, at, 1, 0).unwrap();
    refused("host memory", || hip.do_("hipMemcpyDtoHAsync", Kind::Usual, |call| call.download(at, block, 8, 0)));
    assert_eq!(hip.fill(0, 1, 1, 0), Err(1));
    assert_eq!(hip.fill(5, 1, 0, 0), Ok(()));
}

#[test]
fn copies_without_access() {
    let hip = Hip::new("7.14.1");
    let (at, _) = hip.span(1);
    let block = hip.malloc(8).unwrap();
    let handle = hip.create(CHUNK).unwrap();
    let bare = hip.reserve(CHUNK).unwrap();
    hip.map(bare, CHUNK, handle).unwrap();
    refused("device 0 writes 1 bytes", || hip.fill(bare, 1, 1, 0));
    let read_only = hipMemAccessDesc { location: location(0), flags: 1 };
    hip.do_("hipMemSetAccess", Kind::Vmm, |call| call.set_access(bare, CHUNK, &[read_only])).unwrap();
    hip.read(bare, 1);
    refused("without access", || hip.upload(bare, &[1], 0));
    hip.set_device(1);
    refused("device 1 reads 1 bytes", || hip.download(&mut [0], at, 0));
    refused("device 1 writes 1 bytes", || hip.fill(block, 1, 1, 0));
    hip.upload(block, &[5; 8], 0).unwrap();
    assert_eq!(hip.read(block, 1), [5], "copies reach blocks of other devices");
}

#[test]
fn memory_is_not_taken_from_under_work() {
    for name in ["6.4.3", "7.2.4", "7.14.1"] {
        let hip = Hip::new(name);
        let (at, _) = hip.span(4);
        let block = hip.malloc(64).unwrap();
        let stream = hip.stream(1);
        let mut back = [0; 4];
        let queue: [&dyn Fn(usize); 4] = [
            &|at| hip.upload(at, &[1; 4], stream).unwrap(),
            &|at| hip.fill(at, 1, 4, stream).unwrap(),
            &|at| hip.copy(at, block, 4, stream).unwrap(),
            &|at| hip.copy(block, at, 4, stream).unwrap(),
        ];
        for work in queue {
            work(at + CHUNK);
            refused("is queued", || hip.unmap(at + CHUNK, CHUNK));
            hip.unmap(at, CHUNK).unwrap();
            hip.chunk(at, CHUNK);
            hip.synchronize(stream).unwrap();
            hip.unmap(at + CHUNK, CHUNK).unwrap();
            hip.chunk(at + CHUNK, CHUNK);
        }
        hip.download(&mut back, at + CHUNK, stream).unwrap();
        refused("hipMemcpyDtoHAsync is queued", || hip.unmap(at + CHUNK, CHUNK));
        hip.synchronize(stream).unwrap();
        hip.copy(at, block, 4, stream).unwrap();
        refused("is queued", || hip.free(block));
    }
}

#[test]
fn access_that_is_gone_when_the_work_is_done() {
    let hip = Hip::new("7.14.1");
    let (at, _) = hip.span(1);
    hip.fill(at, 1, 4, 0).unwrap();
    let none = hipMemAccessDesc { location: location(0), flags: 0 };
    hip.do_("hipMemSetAccess", Kind::Vmm, |call| call.set_access(at, CHUNK, &[none])).unwrap();
    refused("hipMemsetD8Async: device 0 writes", || hip.synchronize(0));
}

#[test]
fn host_memory_that_is_gone_when_the_work_is_done() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(8).unwrap();
    let gone = crate::space::reserve(4096, 0, 0).unwrap();
    hip.do_("hipMemcpyDtoHAsync", Kind::Usual, |call| call.download(gone, block, 8, 0)).unwrap();
    refused("hipMemcpyDtoHAsync: cannot write to the host's memory", || hip.synchronize(0));
}

#[test]
fn streams_and_events_of_others() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(8).unwrap();
    let (stream, event) = (hip.stream(0), hip.event());
    refused("no stream", || hip.fill(block, 1, 1, event));
    refused("no event", || hip.record(stream, 0));
    hip.set_device(1);
    refused("a stream of device 0 while device 1 is current", || hip.synchronize(stream));
    refused("a stream of device 0", || hip.destroy_stream(stream));
    refused("a stream of device 0", || hip.fill(block, 1, 1, stream));
    refused("an event of device 0 while device 1 is current", || hip.query(event));
    refused("an event of device 0", || hip.record(event, 0));
    let own = hip.event();
    refused("a stream of device 0", || hip.record(own, stream));
    hip.set_device(0);
    hip.destroy_stream(stream).unwrap();
    refused("no stream", || hip.synchronize(stream));
    refused("no stream", || hip.synchronize(3));
    hip.do_("hipEventDestroy", Kind::Usual, |call| {
        call.event_destroy(event);
        Ok(())
    })
    .unwrap();
    refused("no event", || hip.query(event));
}

#[test]
fn a_devices_own_null_stream_has_no_number() {
    let hip = Hip::with("7.14.1", &[("FAKE_AMDHIP_DEVICES", "3")]);
    hip.set_device(2);
    let block = hip.malloc(8).unwrap();
    hip.fill(block, 1, 8, 0).unwrap();
    // What the stand-in calls it itself.
    refused("0x3 is no stream", || hip.synchronize(3));
}

#[test]
fn a_span_that_was_forgotten_with_the_one_before() {
    // The second one follows the first before its entry has gone, where it goes late; on a busy machine that takes tries.
    let forgotten = |hip: &Hip, place| {
        for _ in 0..1000 {
            let at = hip.reserve_near(place);
            hip.free_address(at, CHUNK).unwrap();
            let freed = std::time::Instant::now();
            let again = hip.reserve_near(place);
            let quick = freed.elapsed() < std::time::Duration::from_millis(40);
            if quick && again == at {
                return Some(misuse_of(|| hip.free_address(again, CHUNK)));
            }
            std::thread::sleep(std::time::Duration::from_millis(60));
        }
        None
    };
    for (name, place) in [("6.1", 0x3456_0000_0000), ("6.4.3", 0x3457_0000_0000)] {
        let message = forgotten(&Hip::new(name), place).expect("never at the same place in time");
        assert!(message.contains("was forgotten with the one that was there"), "{name}: {message}");
    }
    let hip = Hip::new("7.2.4");
    for _ in 0..3 {
        let at = hip.reserve_near(0x3458_0000_0000);
        hip.free_address(at, CHUNK).unwrap();
    }
}

#[test]
fn two_threads_in_virtual_memory_management() {
    // The first one stays inside for ever, so that the second one is sure to find it there.
    let hip: &'static Hip = Box::leak(Box::new(Hip::new("old-drm")));
    let at = hip.reserve(CHUNK).unwrap();
    std::thread::spawn(move || hip.set_access(at, CHUNK));
    while hip.0.calls("hipMemSetAccess") == 0 {
        std::thread::yield_now();
    }
    // Everything else goes on.
    let block = hip.malloc(64).unwrap();
    hip.write(block, &[1; 64]);
    assert_eq!(hip.free_bytes(), 64 * MIB - 4096);
    assert_eq!(hip.figures().spans, 1);
    refused("is inside a call of virtual memory management", || hip.create(CHUNK));
}
