//! Promise 3 on the card: nothing is unmapped under running work. Each form in a process of its own, since failing
//! means that the context is lost.

use std::time::{Duration, Instant};

use growspan::{Bytes, Device, DeviceOptions, Error, GrowableBuffer, Quiesce};

use crate::child;
use crate::gpu::{Cell, SPINNERS, Stream, gpu};

/// 256 MiB.
const WORDS: usize = 64 << 20;

/// How long the kernel waits before it touches the buffer.
const SPIN: Duration = Duration::from_millis(150);

/// With which code the process ends that loses its context on purpose.
const LOST: i32 = 7;

pub(crate) fn the_device_is_waited_for() {
    child::run_well("device");
}

pub(crate) fn a_stream_is_waited_for() {
    child::run_well("stream");
}

pub(crate) fn an_event_is_waited_for() {
    child::run_well("event");
}

pub(crate) fn a_deferred_shrink_leaves_queued_work_alone() {
    child::run_well("deferred");
}

/// And so that those tests can fail.
pub(crate) fn without_waiting_the_context_is_lost() {
    let ended = child::run("idle");
    assert_eq!(ended.status.code(), Some(LOST));
    assert!(ended.text.contains("everything dropped"), "it did not come to its end");
    assert!(!ended.text.contains("panicked"), "it panicked");
}

/// A buffer without a pool behind it, and a stream whose queued kernel will touch all of it.
fn busy(device: &Device) -> (GrowableBuffer<u32>, Stream, Cell) {
    let gpu = gpu();
    let mut buffer = GrowableBuffer::<u32>::builder(device).max_len(1 << 30).build().unwrap();
    buffer.grow_zeroed(WORDS, None).unwrap();
    let (stream, done) = (Stream::new(), Cell::new());
    // The first launch loads the kernel, which may take its time.
    gpu.spin(&stream, buffer.device_ptr(), WORDS, 0, &done);
    stream.wait();
    gpu.spin(&stream, buffer.device_ptr(), WORDS, SPIN.as_nanos() as u64, &done);
    (buffer, stream, done)
}

pub(crate) fn shrink_under_a_kernel(form: &str) {
    let gpu = gpu();
    let device = DeviceOptions::new().pool_keep(Bytes::ZERO).cuda(0).unwrap();
    let event = device.event().unwrap();
    let (mut buffer, stream, done) = busy(&device);
    let started = Instant::now();
    event.record(stream.for_growspan()).unwrap();
    assert!(stream.is_busy(), "the kernel is over before the shrink");
    let shrunk = match form {
        "device" => buffer.shrink_to(0, Quiesce::Device),
        "stream" => buffer.shrink_to(0, Quiesce::Stream(stream.for_growspan())),
        "event" => buffer.shrink_to(0, Quiesce::Event(&event)),
        _ => buffer.shrink_to(0, Quiesce::Deferred(&event)),
    };
    let returned = started.elapsed();
    let busy = stream.is_busy();
    let shrunk = shrunk.unwrap();
    println!("{form}: {shrunk}; returned after {returned:?}, the kernel still running: {busy}");
    println!("{}", device.snapshot());
    assert_eq!(buffer.len(), 0);
    if form == "deferred" {
        assert!(busy, "the shrink waited");
        assert_eq!((shrunk.retiring, shrunk.committed), (Bytes::mib(256), Bytes::ZERO));
        assert_eq!(device.drain(), Bytes::ZERO, "the kernel runs, and nothing may go");
        // Some of it comes back before the event has passed, without a call that changes memory.
        let calls = device.snapshot().driver_calls;
        buffer.grow_to(WORDS / 4).unwrap();
        assert_eq!(device.snapshot().driver_calls, calls);
        assert!(stream.is_busy(), "the kernel was over too early for this test");
        println!("grown again after {:?}: {}", started.elapsed(), device.snapshot());
    } else {
        assert!(!busy, "the shrink did not wait");
        assert!(returned > SPIN / 2, "the kernel cannot have run in {returned:?}");
        assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
    }
    let code = gpu.sync();
    assert_eq!(code, 0, "the context after the shrink: {}", gpu.name(code));
    println!("{form}: all work was over after {:?}", started.elapsed());
    assert!(started.elapsed() > SPIN / 2);
    assert_eq!(done.read()[0], 2 * u64::from(SPINNERS), "threads that came to their end");
    assert!(event.is_reached().unwrap());
    if form == "deferred" {
        println!("drained: {}", device.drain());
        assert_eq!(device.snapshot().bytes_retiring, Bytes::ZERO);
        assert_eq!(device.snapshot().bytes_held(), buffer.committed());
        // What came back is what the kernel wrote.
        let mut word = [0];
        buffer.copy_out(WORDS / 4 - 1, &mut word).unwrap();
        assert_eq!(word, [2]);
        buffer.shrink_to(0, Quiesce::Device).unwrap();
    }
    // The buffer is as good as before.
    buffer.grow_zeroed(WORDS, None).unwrap();
    gpu.spin(&stream, buffer.device_ptr(), WORDS, 0, &done);
    stream.wait();
    let mut last = [7];
    buffer.copy_out(WORDS - 1, &mut last).unwrap();
    assert_eq!(last, [1]);
    buffer.close().unwrap();
    device.pool().trim(Bytes::ZERO);
    println!("{}", device.snapshot());
    assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
}

/// What is left when the promise of `already_idle` is broken: errors, at once, and a process that can still end.
pub(crate) fn lose_the_context() {
    let gpu = gpu();
    let device = DeviceOptions::new().pool_keep(Bytes::ZERO).cuda(0).unwrap();
    let mut event = Some(device.event().unwrap());
    let mut other = GrowableBuffer::<u8>::builder(&device).max_len(1 << 30).build().unwrap();
    other.grow_to(100 << 20).unwrap();
    let (mut buffer, stream, done) = busy(&device);
    event.as_ref().unwrap().record(stream.for_growspan()).unwrap();
    // SAFETY: not so, which is the point. What is harmed is this process's context on the card.
    let shrunk = buffer.shrink_to(0, unsafe { Quiesce::already_idle() });
    println!("shrinking under the kernel: {shrunk:?}");
    let code = gpu.sync();
    println!("then waiting: {} ({code})", gpu.name(code));
    assert_eq!(code, 700);

    // The first call finds out.
    let started = Instant::now();
    let found = device.synchronize();
    println!("the first call, {:?}: {found:?}", started.elapsed());
    assert!(matches!(found, Err(Error::DeviceLost(_))));

    let mut slowest = Duration::ZERO;
    let mut lost = |call: &str, work: &mut dyn FnMut() -> growspan::Result<()>| {
        let started = Instant::now();
        let result = work();
        let took = started.elapsed();
        println!("{call}, {took:?}: {:?}", result.as_ref().map_err(ToString::to_string));
        assert!(matches!(result, Err(Error::DeviceLost(_))), "{call}: {result:?}");
        assert!(took < Duration::from_millis(1), "{call} took {took:?}");
        slowest = slowest.max(took);
    };
    for _ in 0..2 {
        lost("grow", &mut || buffer.grow_to(WORDS));
        lost("grow zeroed", &mut || buffer.grow_zeroed(WORDS, None));
        lost("grow the other", &mut || other.grow_to(200 << 20));
        lost("append", &mut || other.append(&[1, 2, 3]));
        lost("copy in", &mut || other.copy_in(0, &[1]));
        lost("copy out", &mut || other.copy_out(0, &mut [0]));
        lost("copy within", &mut || other.copy_within(0..10, 50));
        lost("fill", &mut || other.fill(.., 1));
        lost("shrink", &mut || other.shrink_to(0, Quiesce::Device).map(drop));
        lost("shrink exactly", &mut || other.shrink_exact(1, Quiesce::Device).map(drop));
        lost("shrink behind a stream", &mut || other.shrink_to(0, Quiesce::Stream(stream.for_growspan())).map(drop));
        if let Some(event) = &event {
            lost("record", &mut || event.record(stream.for_growspan()));
            lost("query", &mut || event.is_reached().map(drop));
            lost("wait", &mut || event.wait());
            lost("shrink behind an event", &mut || other.shrink_to(0, Quiesce::Event(event)).map(drop));
        }
        lost("synchronize", &mut || device.synchronize());
        lost("memory", &mut || device.memory().map(drop));
        lost("an event", &mut || device.event().map(drop));
        lost("a chunk", &mut || device.chunk(Bytes::mib(2)).map(drop));
        lost("a span", &mut || device.reserve(Bytes::mib(2)).map(drop));
        lost("build", &mut || GrowableBuffer::<u8>::builder(&device).max_len(1 << 30).build().map(drop));
    }
    println!("the slowest of them: {slowest:?}");
    println!("{}", device.snapshot());
    let started = Instant::now();
    let again = DeviceOptions::new().cuda(0).map(|device| device.verdict().reason().map(ToString::to_string));
    println!("opened again, {:?}: {again:?}", started.elapsed());
    println!("closing: {:?}", other.close());
    drop(event.take());
    drop(buffer);
    drop(device);
    drop((stream, done));
    println!("everything dropped");
    std::process::exit(LOST);
}
