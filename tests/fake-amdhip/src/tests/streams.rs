//! Streams do as little as they may, in an order that they may, and captures find out what is called during them.

use super::*;

const NON_BLOCKING: u32 = 1;

#[test]
fn nothing_happens_until_someone_waits() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(64).unwrap();
    let stream = hip.stream(0);
    let mut source = *b"before";
    hip.upload(block, &source, stream).unwrap();
    source = *b"after!";
    let mut back = [0; 6];
    hip.download(&mut back, block, stream).unwrap();
    assert_eq!(back, [0; 6]);
    hip.synchronize(stream).unwrap();
    assert_eq!(&back, b"before", "pageable memory was taken at once; {source:?} came later");
}

#[test]
fn the_null_stream_waits_for_blocking_streams_and_they_for_it() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(64).unwrap();
    let stream = hip.stream(0);
    hip.fill(block, 1, 64, stream).unwrap();
    hip.fill(block, 2, 32, 0).unwrap();
    hip.fill(block, 3, 16, stream).unwrap();
    let mut back = [0; 64];
    hip.download(&mut back, block, stream).unwrap();
    hip.synchronize(stream).unwrap();
    assert_eq!((back[0], back[16], back[32]), (3, 2, 1));

    hip.fill(block, 4, 64, stream).unwrap();
    hip.download(&mut back, block, 0).unwrap();
    hip.synchronize(0).unwrap();
    assert_eq!(back, [4; 64]);
}

#[test]
fn waiting_for_the_null_stream_waits_for_blocking_ones() {
    let hip = Hip::new("7.14.1");
    let (block, others) = (hip.malloc(64).unwrap(), hip.malloc(64).unwrap());
    let (stream, other) = (hip.stream(0), hip.stream(NON_BLOCKING));
    hip.fill(block, 1, 32, stream).unwrap();
    hip.fill(others, 1, 32, other).unwrap();
    hip.synchronize(0).unwrap();
    hip.free(block).unwrap();
    assert!(misuse_of(|| hip.free(others)).contains("hipMemsetD8Async"), "the other stream is not done");
    hip.device_synchronize().unwrap();
    hip.free(others).unwrap();
}

#[test]
fn a_non_blocking_stream_is_by_itself() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(64).unwrap();
    let stream = hip.stream(NON_BLOCKING);
    hip.fill(block, 1, 64, stream).unwrap();
    assert_eq!(hip.read(block, 1), [0], "the null stream did not wait");
    hip.fill(block, 2, 64, 0).unwrap();
    hip.synchronize(stream).unwrap();
    let mut back = [0];
    hip.download(&mut back, block, stream).unwrap();
    hip.synchronize(stream).unwrap();
    assert_eq!(back, [1], "nor did it for the null stream");
    assert_eq!(hip.read(block, 1), [2]);
}

#[test]
fn a_question_about_an_event_moves_one_thing_on() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(64).unwrap();
    let (stream, event) = (hip.stream(0), hip.event());
    assert_eq!(hip.query(event), Ok(()), "never recorded");
    hip.fill(block, 1, 64, stream).unwrap();
    hip.fill(block, 2, 64, stream).unwrap();
    hip.record(event, stream).unwrap();
    assert_eq!((hip.query(event), hip.query(event), hip.query(event)), (Err(600), Err(600), Ok(())));
    assert_eq!(hip.last_error(), 600, "it sticks");
    hip.record(event, stream).unwrap();
    assert_eq!(hip.query(event), Ok(()));
    hip.fill(block, 3, 64, stream).unwrap();
    hip.record(event, stream).unwrap();
    hip.record(event, 0).unwrap();
    hip.do_("hipEventSynchronize", Kind::Usual, |call| call.event_synchronize(event)).unwrap();
    assert_eq!(hip.query(event), Ok(()));
    assert_eq!(hip.read(block, 1), [3]);
}

#[test]
fn what_a_destroyed_stream_had_is_still_to_be_done() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(64).unwrap();
    let (stream, event) = (hip.stream(NON_BLOCKING), hip.event());
    hip.fill(block, 9, 64, stream).unwrap();
    hip.record(event, stream).unwrap();
    hip.destroy_stream(stream).unwrap();
    assert_eq!(hip.figures().streams, 0);
    misuse_of(|| hip.free(block));
    assert!(misuse_of(|| hip.fill(block, 1, 64, stream)).contains("has been destroyed"), "whatever it has to do yet");
    assert_eq!((hip.query(event), hip.query(event)), (Err(600), Ok(())));
    assert_eq!(hip.read(block, 1), [9]);
    hip.do_("hipEventDestroy", Kind::Usual, |call| {
        call.event_destroy(event);
        Ok(())
    })
    .unwrap();
    assert_eq!(hip.figures().events, 0);
}

#[test]
fn waiting_for_one_device_is_not_waiting_for_the_other() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(64).unwrap();
    hip.fill(block, 1, 64, 0).unwrap();
    hip.set_device(1);
    hip.device_synchronize().unwrap();
    hip.synchronize(0).unwrap();
    hip.set_device(0);
    misuse_of(|| hip.free(block));
    hip.synchronize(0).unwrap();
    hip.free(block).unwrap();
}

fn begin(hip: &Hip, stream: u64, mode: u32) -> Result<(), u32> {
    hip.do_("hipStreamBeginCapture", Kind::Usual, |call| call.capture_begin(stream, mode))
}

fn end(hip: &Hip, stream: u64) -> Result<u64, u32> {
    hip.do_("hipStreamEndCapture", Kind::Usual, |call| call.capture_end(stream))
}

fn status(hip: &Hip, stream: u64) -> Result<u32, u32> {
    hip.do_("hipStreamIsCapturing", Kind::Usual, |call| call.capture_status(stream))
}

fn exchange(hip: &Hip, mode: u32) -> u32 {
    hip.do_("hipThreadExchangeStreamCaptureMode", Kind::Usual, |call| call.capture_exchange(mode)).unwrap()
}

#[test]
fn a_capture_forbids_and_is_broken_by_what_it_forbids() {
    let hip = Hip::new("7.14.1");
    let stream = hip.stream(NON_BLOCKING);
    begin(&hip, stream, 0).unwrap();
    assert_eq!(status(&hip, stream), Ok(1));
    assert_eq!(hip.reserve(CHUNK), Err(900));
    assert_eq!(status(&hip, stream), Ok(2));
    assert_eq!(end(&hip, stream), Err(901));
    assert_eq!(status(&hip, stream), Ok(0));
    begin(&hip, stream, 0).unwrap();
    assert_eq!(hip.device_synchronize(), Err(900));
    assert_eq!(end(&hip, stream), Err(901));
    begin(&hip, stream, 0).unwrap();
    assert_eq!((begin(&hip, stream, 0), begin(&hip, stream, 3)), (Err(401), Err(1)), "once, and in a mode there is");
    assert_eq!(hip.synchronize(stream), Err(900));
    assert_eq!(hip.record(hip.event(), stream), Err(901), "it is broken");
    assert_eq!((end(&hip, stream), end(&hip, stream)), (Err(901), Err(401)));
    assert!(hip.reserve(CHUNK).is_ok());
}

#[test]
fn relaxed_captures_and_threads_forbid_nothing() {
    let hip = Hip::new("7.14.1");
    let stream = hip.stream(NON_BLOCKING);
    begin(&hip, stream, 2).unwrap();
    assert!(hip.reserve(CHUNK).is_ok());
    assert!(end(&hip, stream).is_ok());
    begin(&hip, stream, 0).unwrap();
    assert_eq!(exchange(&hip, 2), 0);
    let wrong = hip.do_("hipThreadExchangeStreamCaptureMode", Kind::Usual, |call| call.capture_exchange(3));
    assert_eq!(wrong, Err(1));
    assert!(hip.reserve(CHUNK).is_ok());
    assert_eq!(exchange(&hip, 0), 2);
    assert!(end(&hip, stream).is_ok());
}

#[test]
fn a_threads_own_capture_forbids_that_thread_only() {
    let hip = Hip::new("7.14.1");
    let stream = hip.stream(NON_BLOCKING);
    begin(&hip, stream, 1).unwrap();
    let elsewhere = || std::thread::scope(|scope| scope.spawn(|| hip.reserve(CHUNK).is_ok()).join().unwrap());
    assert!(elsewhere());
    assert_eq!(status(&hip, stream), Ok(1));
    assert_eq!(hip.reserve(CHUNK), Err(900));
    assert!(end(&hip, stream).is_err());
    begin(&hip, stream, 0).unwrap();
    assert!(!elsewhere());
    assert!(end(&hip, stream).is_err());
}

#[test]
fn what_is_captured_is_not_done() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(64).unwrap();
    let (stream, event) = (hip.stream(NON_BLOCKING), hip.event());
    begin(&hip, stream, 0).unwrap();
    hip.fill(block, 1, 64, stream).unwrap();
    hip.record(event, stream).unwrap();
    assert_eq!(hip.query(event), Err(907));
    assert!(end(&hip, stream).is_ok());
    hip.synchronize(stream).unwrap();
    assert_eq!(hip.read(block, 1), [0]);
    hip.record(event, stream).unwrap();
    assert_eq!(hip.query(event), Ok(()));
}

#[test]
fn the_null_stream_and_a_capture_it_would_wait_for() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(64).unwrap();
    let (blocking, other) = (hip.stream(0), hip.stream(NON_BLOCKING));
    begin(&hip, other, 0).unwrap();
    assert_eq!(status(&hip, 0), Ok(0));
    hip.fill(block, 1, 64, 0).unwrap();
    assert!(end(&hip, other).is_ok());
    begin(&hip, blocking, 0).unwrap();
    assert_eq!(status(&hip, 0), Err(906));
    assert_eq!(hip.fill(block, 1, 64, 0), Err(906));
    assert_eq!(end(&hip, blocking), Err(901));
    assert_eq!(begin(&hip, 0, 0), Err(900));
}

#[test]
fn an_event_in_the_null_stream_is_behind_the_blocking_streams() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(64).unwrap();
    let (stream, event) = (hip.stream(0), hip.event());
    hip.fill(block, 1, 64, stream).unwrap();
    hip.record(event, 0).unwrap();
    hip.fill(block, 2, 64, stream).unwrap();
    hip.do_("hipEventSynchronize", Kind::Usual, |call| call.event_synchronize(event)).unwrap();
    let other = hip.stream(NON_BLOCKING);
    let mut back = [0];
    hip.download(&mut back, block, other).unwrap();
    hip.synchronize(other).unwrap();
    assert_eq!(back, [1], "what came before it is done, what came after is not");
}

#[test]
fn an_event_passes_with_its_latest_record() {
    let hip = Hip::new("7.14.1");
    let block = hip.malloc(64).unwrap();
    let (first, second, event) = (hip.stream(NON_BLOCKING), hip.stream(NON_BLOCKING), hip.event());
    hip.record(event, first).unwrap();
    hip.fill(block, 1, 64, second).unwrap();
    hip.record(event, second).unwrap();
    hip.synchronize(first).unwrap();
    assert_eq!((hip.query(event), hip.query(event)), (Err(600), Ok(())));
}
