//! Graphs: captured once, replayed over memory that was given up and came back.

use growspan::{Bytes, DeviceOptions, Error, GrowableBuffer, Quiesce};

use crate::gpu::{CaptureMode, Cell, Graph, Stream, gpu};

/// Words that the graphs write: a kernel the first half, a memset the second.
const WORDS: usize = 24 << 20;
const HALF: usize = WORDS / 2;
const SEED: u32 = 77;

fn record(stream: &Stream, address: u64) {
    gpu().stamp(stream, address, HALF, SEED);
    stream.fill(address + HALF as u64 * 4, 0xABCD_1234, HALF);
}

/// Replays, and checks what was written after everything was overwritten.
fn replay(graph: &Graph, stream: &Stream, buffer: &mut GrowableBuffer<u32>, what: &str) {
    buffer.fill(0..WORDS, 0).unwrap();
    graph.launch(stream);
    let bad = Cell::new();
    gpu().check(stream, buffer.device_ptr(), HALF, SEED, &bad);
    stream.wait();
    bad.assert_none_bad(what);
    for at in [HALF, HALF + 1, HALF + HALF / 2, WORDS - 1] {
        let mut word = [0];
        buffer.copy_out(at, &mut word).unwrap();
        assert_eq!(word, [0xABCD_1234], "{what}: word {at}");
    }
    println!("{what}: right");
}

pub(crate) fn a_graph_replays_after_growing_and_after_shrinking() {
    let _ = gpu();
    for (name, options) in
        [("with a pool", DeviceOptions::new()), ("without", DeviceOptions::new().pool_keep(Bytes::ZERO))]
    {
        let device = options.cuda(0).unwrap();
        let mut buffer = GrowableBuffer::<u32>::builder(&device).max_len(1 << 30).build().unwrap();
        // Takes what comes first out of the pool, so that the same chunks do not come back in the same places.
        let mut other = GrowableBuffer::<u32>::builder(&device).max_len(1 << 30).build().unwrap();
        buffer.grow_to(WORDS).unwrap();
        let stream = Stream::new();
        stream.begin_capture(CaptureMode::ThreadLocal);
        record(&stream, buffer.device_ptr());
        let graph = stream.end_capture().unwrap();
        replay(&graph, &stream, &mut buffer, &format!("{name}: as captured"));
        buffer.grow_to(1 << 28).unwrap();
        replay(&graph, &stream, &mut buffer, &format!("{name}: after growing"));
        let before = buffer.chunks();
        buffer.shrink_to(0, Quiesce::Stream(stream.for_growspan())).unwrap();
        other.grow_to(WORDS / 3).unwrap();
        buffer.grow_to(WORDS).unwrap();
        let moved = buffer.chunks().iter().zip(&before).filter(|(now, then)| now.handle != then.handle).count();
        println!("{name}: {moved} of {} places have another chunk now", buffer.chunks().len());
        replay(&graph, &stream, &mut buffer, &format!("{name}: after shrinking and growing"));
        buffer.shrink_to(0, Quiesce::Device).unwrap();
        device.pool().trim(Bytes::ZERO);
        buffer.grow_to(WORDS).unwrap();
        replay(&graph, &stream, &mut buffer, &format!("{name}: with new chunks"));
    }
}

/// What a growth does to a capture, in each mode: recorded here, as the driver does not say.
pub(crate) fn growing_while_a_stream_captures() {
    let _ = gpu();
    let device = DeviceOptions::new().pool_keep(Bytes::ZERO).cuda(0).unwrap();
    let modes = [CaptureMode::Relaxed, CaptureMode::ThreadLocal, CaptureMode::Global];
    for (mode, blocking) in modes.into_iter().flat_map(|mode| [(mode, false), (mode, true)]) {
        let mut buffer = GrowableBuffer::<u32>::builder(&device).max_len(1 << 28).build().unwrap();
        buffer.grow_to(WORDS).unwrap();
        let stream = if blocking { Stream::blocking() } else { Stream::new() };
        stream.begin_capture(mode);
        let mode = format!("{mode:?} on a {} stream", if blocking { "blocking" } else { "non-blocking" });
        record(&stream, buffer.device_ptr());
        let grown = buffer.grow_to(2 * WORDS);
        let status = stream.capture_status();
        let ended = stream.end_capture();
        println!(
            "{mode}: growing: {}; the capture's status: {status:?}; ending it: {}",
            grown.as_ref().map_or_else(ToString::to_string, |()| "fine".to_owned()),
            ended.as_ref().map_or_else(Clone::clone, |_| "fine".to_owned()),
        );
        if blocking {
            assert!(
                matches!(grown, Err(Error::Capturing { .. })),
                "{mode}: the default stream would break the capture"
            );
        }
        // Whatever came of the growth, it is whole or not there.
        assert_eq!(buffer.len(), if grown.is_ok() { 2 * WORDS } else { WORDS });
        if let Ok(graph) = ended {
            replay(&graph, &stream, &mut buffer, &mode);
        }
        // With the capture over everything is possible again, unless the undo of the growth failed as well.
        if !matches!(grown, Err(Error::Rollback { .. })) {
            buffer.grow_to(2 * WORDS).unwrap();
        }
        buffer.shrink_to(0, Quiesce::Device).unwrap();
        buffer.close().unwrap();
        device.pool().trim(Bytes::ZERO);
        assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO, "{mode}");
    }
}

pub(crate) fn shrinking_behind_a_capturing_stream_is_an_error_and_no_harm() {
    let _ = gpu();
    let device = DeviceOptions::new().pool_keep(Bytes::ZERO).cuda(0).unwrap();
    for mode in [CaptureMode::Relaxed, CaptureMode::ThreadLocal, CaptureMode::Global] {
        let mut buffer = GrowableBuffer::<u32>::builder(&device).max_len(1 << 28).build().unwrap();
        buffer.grow_to(WORDS).unwrap();
        let stream = Stream::new();
        stream.begin_capture(mode);
        record(&stream, buffer.device_ptr());
        let error = buffer.shrink_to(0, Quiesce::Stream(stream.for_growspan())).unwrap_err();
        println!("{mode:?}: shrinking: {error} ({error:?}); the capture's status: {:?}", stream.capture_status());
        assert!(matches!(error, Error::Capturing { .. }), "{mode:?}: {error:?}");
        assert_eq!(buffer.len(), WORDS);
        let graph = stream.end_capture();
        let graph = graph.unwrap_or_else(|error| panic!("{mode:?}: the capture did not end well: {error}"));
        replay(&graph, &stream, &mut buffer, &format!("{mode:?}: what was captured"));
        // The capture is over, and the same shrink is right.
        buffer.shrink_to(0, Quiesce::Stream(stream.for_growspan())).unwrap();
        buffer.close().unwrap();
        assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
    }
}

/// Waiting for the device, as a drop does, breaks a capture; the memory is kept until that can be done, and no longer.
pub(crate) fn what_is_dropped_during_a_capture_goes_after_it() {
    let _ = gpu();
    let device = DeviceOptions::new().pool_keep(Bytes::ZERO).cuda(0).unwrap();
    for contiguous in [false, true] {
        let device = match contiguous {
            true => DeviceOptions::new().contiguous(true).cuda(0).unwrap(),
            false => device.clone(),
        };
        for mode in [CaptureMode::Relaxed, CaptureMode::ThreadLocal, CaptureMode::Global] {
            let mut buffer = GrowableBuffer::<u32>::builder(&device).max_len(1 << 25).build().unwrap();
            buffer.grow_to(WORDS).unwrap();
            let stream = Stream::new();
            stream.begin_capture(mode);
            record(&stream, buffer.device_ptr());
            let closed = buffer.close();
            let kept = device.snapshot();
            println!("{mode:?}, contiguous: {contiguous}: closing: {closed:?}; {kept}");
            let ended = stream.end_capture();
            println!("  the capture's end: {:?}", ended.as_ref().map(drop));
            drop(ended);
            assert_eq!(kept.bytes_stranded, Bytes::ZERO);
            assert_eq!(closed.is_err(), !kept.bytes_retiring.is_zero(), "{closed:?}");
            device.synchronize().unwrap();
            assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO, "{}", device.snapshot());
        }
    }
}
