//! Cases that went wrong once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use growspan::driver::fault::FaultPlan;
use growspan::driver::host::HostOptions;
use growspan::driver::sim::SimDriver;
use growspan::driver::{Call, ChunkProps, RawStream, Shareable};
use growspan::{
    BufferSet, Bytes, Device, DeviceOptions, Error, Fallback, GrowableBuffer, MapHooks, MappedChunk, Mode, Quiesce,
    Sizing,
};

use crate::deferred::pending;
use crate::drivers::card;
use crate::world::{MIB, UNIT, World, look, units};

#[test]
fn closing_waits_for_memory_that_waits_for_an_event() {
    let (world, sim, stream, mut buffer) = pending(Bytes::gib(1), 40);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    buffer.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    buffer.close().unwrap();
    assert_eq!(sim.violations(), []);
    drop(event);
    world.assert_empty("closed");
}

#[test]
fn a_record_that_fails_leaves_the_event_where_it_was() {
    let (world, _, stream, mut buffer) = pending(Bytes::ZERO, 40);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    buffer.shrink_to(30 * UNIT, Quiesce::Deferred(&event)).unwrap();
    world.faults.arm(FaultPlan::nth(1).of(Call::EventRecord));
    assert!(event.record(stream).is_err());
    world.faults.disarm();
    assert!(!event.is_reached().unwrap(), "a failed record made the event reached");
}

#[test]
fn nothing_is_cleared_on_a_stream_that_captures() {
    let (_world, sim, _, mut buffer) = pending(Bytes::ZERO, 4);
    sim.finish_all();
    let stream = sim.stream();
    sim.capture(stream, true);
    let result = buffer.grow_zeroed(40 * UNIT, Some(stream));
    sim.capture(stream, false);
    assert!(matches!(result, Err(Error::Capturing { .. })), "{result:?} {:?}", sim.violations());
}

#[repr(C, align(8192))]
#[derive(Clone, Copy)]
struct Big([u8; 8192]);

#[test]
fn large_alignments_hold_in_contiguous_mode_too() {
    let device =
        DeviceOptions::new().contiguous(true).host(HostOptions::default().with_capacity(Bytes::mib(64))).unwrap();
    let mut bad = Vec::new();
    let mut keep = Vec::new();
    for _ in 0..16 {
        match GrowableBuffer::<Big>::builder(&device).max_len(5).build() {
            Ok(b) => keep.push(b),
            Err(e) => bad.push(e.to_string()),
        }
        keep.push(GrowableBuffer::<Big>::builder(&device).max_len(1).fallback(Fallback::MayMove).build().unwrap());
        let mut odd = GrowableBuffer::<u8>::builder(&device).max_len(4096).build().unwrap();
        odd.grow_to(1).unwrap();
        std::mem::forget(odd);
    }
    assert!(bad.is_empty(), "{}/16: {:?}", bad.len(), bad.first());
}

#[test]
fn a_card_that_is_full_at_the_check_is_not_judged_by_that() {
    let sim = SimDriver::builder().total(Bytes::gib(8)).build();
    sim.set_used_by_others(Bytes::gib(8));
    let device = Device::from_driver(sim.driver()).unwrap();
    let reason = device.verdict().reason().map(ToString::to_string);
    sim.set_used_by_others(Bytes::ZERO);
    assert_eq!(device.verdict().mode(), Mode::Virtual, "{reason:?}");
}

#[test]
fn what_cannot_be_waited_for_goes_when_it_can_be() {
    let (world, sim, _, buffer) = pending(Bytes::ZERO, 40);
    sim.finish_all();
    // What cuCtxSynchronize says while a stream captures.
    world.faults.arm(FaultPlan::every().of(Call::Synchronize));
    drop(buffer);
    world.faults.disarm();
    assert_eq!(world.device.snapshot().bytes_retiring, units(40));
    world.assert_balanced("dropped under capture");
    assert_eq!(world.device.drain(), units(40));
    world.assert_empty("after the capture");
}

#[test]
fn nothing_is_drained_under_capture() {
    let (world, sim, stream, mut buffer) = pending(Bytes::ZERO, 40);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    buffer.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    sim.finish_all();
    sim.capture(RawStream::DEFAULT, true);
    world.device.drain();
    sim.capture(RawStream::DEFAULT, false);
    assert_eq!(sim.violations(), []);
}

#[test]
fn clearing_waits_for_work_on_memory_that_comes_back() {
    let (world, _, stream, mut buffer) = pending(Bytes::ZERO, 40);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    buffer.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    buffer.grow_zeroed(40 * UNIT, None).unwrap();
    assert!(event.is_reached().unwrap(), "cleared while queued work may still write there");
}

#[test]
fn a_member_belongs_to_its_set() {
    let world = World::sim(card(), DeviceOptions::new());
    let (mut a, mut b) = (BufferSet::new(), BufferSet::new());
    let _ = a.add(world.buffer(), 1).unwrap();
    let member = b.add(world.buffer(), 1).unwrap();
    assert!(a.get(member).is_none(), "a member of another set was had");
}

#[test]
fn all_pools_of_a_card_give_way() {
    let world = World::sim(card().total(units(100)), DeviceOptions::new().pool_keep(Bytes::gib(1)));
    let mut first = world.buffer();
    first.grow_to(60 * UNIT).unwrap();
    drop(first);
    let own = world.device.new_pool(ChunkProps::PLAIN, Bytes::ZERO);
    let mut second = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).pool(&own).build().unwrap();
    let result = second.grow_to(60 * UNIT);
    assert!(result.is_ok(), "{}", result.unwrap_err());
}

#[test]
fn the_peak_counts_memory_that_came_back() {
    let (world, _sim, stream, mut buffer) = pending(Bytes::ZERO, 40);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    buffer.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    let mut other = world.buffer();
    other.grow_to(30 * UNIT).unwrap();
    buffer.grow_to(40 * UNIT).unwrap();
    let s = world.device.snapshot();
    assert!(s.peak_bytes >= s.bytes_mapped, "{s}");
}

struct Hook(AtomicUsize, AtomicUsize);
impl MapHooks for Hook {
    fn mapped(&self, c: MappedChunk) {
        self.0.fetch_add(c.bytes.get() as usize, Ordering::Relaxed);
    }
    fn unmapping(&self, c: MappedChunk) {
        self.1.fetch_add(c.bytes.get() as usize, Ordering::Relaxed);
    }
}

#[test]
fn hooks_are_told_what_stays_after_a_failed_shrink() {
    let world = World::sim(card(), DeviceOptions::new());
    let hook = Arc::new(Hook(0.into(), 0.into()));
    let mut b = GrowableBuffer::<u8>::builder(&world.device)
        .max_len(64 * UNIT)
        .hooks(Arc::clone(&hook) as Arc<dyn MapHooks>)
        .build()
        .unwrap();
    b.grow_to(40 * UNIT).unwrap();
    world.faults.arm(FaultPlan::nth(3).of(Call::Unmap));
    assert!(b.shrink_to(0, Quiesce::Device).is_err());
    world.faults.disarm();
    let registered = hook.0.load(Ordering::Relaxed) - hook.1.load(Ordering::Relaxed);
    assert_eq!(registered as u64, b.committed().get(), "hooks think all is gone; the buffer uses it");
}

#[test]
fn the_reason_of_a_slack_is_not_put_on_the_device() {
    let world = World::sim(card(), DeviceOptions::new());
    let mut b = GrowableBuffer::<u8>::builder(&world.device)
        .max_len(64 * UNIT)
        .sizing(Sizing::Uniform(units(8)))
        .build()
        .unwrap();
    b.grow_to(40 * UNIT).unwrap();
    let s = b.shrink_exact(1, Quiesce::Device).unwrap();
    assert!(!s.to_string().contains("this device takes one"), "{s}");
}

#[test]
fn hooks_are_not_called_in_a_forked_child() {
    let world = World::host(DeviceOptions::new());
    let hook = Arc::new(Hook(0.into(), 0.into()));
    let mut b = GrowableBuffer::<u8>::builder(&world.device)
        .max_len(64 * UNIT)
        .hooks(Arc::clone(&hook) as Arc<dyn MapHooks>)
        .build()
        .unwrap();
    b.grow_to(40 * UNIT).unwrap();
    // SAFETY: a test.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(b);
        let told = hook.1.load(Ordering::Relaxed);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(told > 0)) };
    }
    let mut status = 0;
    // SAFETY: our child.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(libc::WEXITSTATUS(status), 0, "hooks were told of unmapping in a forked child");
}

#[test]
fn a_moving_block_takes_less_where_there_is_no_room_for_more() {
    let world = World::sim(card().total(Bytes::mib(95)), DeviceOptions::new().contiguous(true));
    let mut b =
        GrowableBuffer::<u8>::builder(&world.device).max_len(100 * MIB).fallback(Fallback::MayMove).build().unwrap();
    b.grow_to(40 * MIB).unwrap();
    let r = b.grow_to(50 * MIB);
    assert!(r.is_ok(), "40 + 50 of 95 fit: {}", r.unwrap_err());
}

#[test]
fn za_log_lines_after_a_lost_device() {
    #[derive(Clone, Default)]
    struct Sink(Arc<std::sync::Mutex<Vec<u8>>>);
    impl std::io::Write for Sink {
        fn write(&mut self, b: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(b);
            Ok(b.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let world = World::sim(card(), DeviceOptions::new());
    let mut all: Vec<_> = (0..8).map(|_| world.buffer()).collect();
    all.iter_mut().for_each(|b| b.grow_to(UNIT).unwrap());
    world.sim.as_ref().unwrap().lose();
    let sink = Sink::default();
    let s2 = sink.clone();
    let sub = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(move || s2.clone()).finish();
    tracing::subscriber::with_default(sub, || drop(all));
    let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[test]
fn zb_two_devices_expected_and_leaked_spans() {
    // A driver that returns a misaligned address keeps the span.
    let device = DeviceOptions::new().host(HostOptions::default().with_capacity(Bytes::mib(2))).unwrap();
    assert_eq!(device.verdict().mode(), Mode::Virtual, "{:?}", device.verdict().reason().map(ToString::to_string));
}

/// A buffer whose chunks may be exported.
fn exportable(world: &World) -> GrowableBuffer<u8> {
    let pool = world.device.new_pool(ChunkProps::PLAIN.with_shareable(Shareable::PosixFd), Bytes::gib(1));
    let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).pool(&pool).build().unwrap();
    buffer.append(&[5; UNIT]).unwrap();
    buffer
}

#[test]
fn exported_memory_is_never_had_as_a_slice() {
    let world = World::host(DeviceOptions::new());
    let mut buffer = exportable(&world);
    let _fd = buffer.export_chunk(0).unwrap();
    assert!(matches!(buffer.as_slice(), Err(Error::Shared)));
    assert!(matches!(buffer.as_mut_slice(), Err(Error::Shared)));
    buffer.push(6).unwrap();
    let mut last = [0];
    buffer.copy_out(UNIT, &mut last).unwrap();
    assert_eq!(last, [6]);
    let mut plain = world.buffer();
    plain.grow_to(UNIT).unwrap();
    assert!(matches!(plain.export_chunk(0), Err(Error::Driver(_))), "it has to be asked for when a chunk is made");
}

#[test]
fn an_exported_chunk_is_not_kept_when_its_release_fails() {
    let world = World::host(DeviceOptions::new());
    let mut buffer = exportable(&world);
    let _fd = buffer.export_chunk(0).unwrap();
    world.faults.arm(FaultPlan::every().of(Call::Release));
    buffer.shrink_to(0, Quiesce::Device).unwrap();
    world.faults.disarm();
    let snapshot = world.device.snapshot();
    assert_eq!((snapshot.bytes_pooled, snapshot.bytes_stranded), (Bytes::ZERO, units(2)));
}

#[test]
fn a_deferred_shrink_survives_any_failed_call() {
    for k in 1.. {
        let (world, sim, stream, mut buffer) = pending(Bytes::ZERO, 60);
        let event = world.device.event().unwrap();
        event.record(stream).unwrap();
        buffer.shrink_to(50 * UNIT, Quiesce::Deferred(&event)).unwrap();
        if k % 2 == 0 {
            sim.finish_all();
        }
        let before = (look(&buffer), world.picture());
        world.faults.arm(FaultPlan::nth(k / 2 + 1));
        let result = buffer.shrink_to(20 * UNIT, Quiesce::Deferred(&event));
        let struck = world.faults.struck();
        world.faults.disarm();
        // What is given up goes sooner or later; that it cannot go now is no error.
        if let Err(error) = result {
            assert_eq!((look(&buffer), world.picture()), before, "{error}");
            buffer.shrink_to(20 * UNIT, Quiesce::Deferred(&event)).unwrap();
        }
        assert_eq!((buffer.len(), buffer.committed()), (20 * UNIT, units(20)));
        world.assert_balanced("deferred, with a call failing");
        sim.finish_all();
        world.device.drain();
        assert_eq!(world.device.snapshot().bytes_retiring, Bytes::ZERO, "call {k}");
        drop((buffer, event));
        world.assert_empty("deferred, with a call failing");
        if !struck {
            assert!(k > 4);
            break;
        }
    }
}

#[test]
fn an_exact_shrink_over_waiting_memory_survives_any_failed_call() {
    for k in 1.. {
        let (world, sim, stream, mut buffer) = pending(Bytes::ZERO, 60);
        let event = world.device.event().unwrap();
        event.record(stream).unwrap();
        buffer.shrink_to(50 * UNIT, Quiesce::Deferred(&event)).unwrap();
        let before = (look(&buffer), buffer.committed());
        world.faults.arm(FaultPlan::nth(k));
        let result = buffer.shrink_exact(41 * UNIT, Quiesce::Device);
        let struck = world.faults.struck();
        world.faults.disarm();
        assert_eq!(sim.violations(), []);
        match result {
            Err(error) => assert_eq!((look(&buffer), buffer.committed()), before, "call {k}: {error}"),
            Ok(_) if !struck => break,
            Ok(_) => {}
        }
        world.assert_balanced("exact, with a call failing");
        drop((buffer, event));
        world.assert_empty("exact, with a call failing");
    }
}

#[test]
fn an_event_of_others_is_not_recorded_again_while_memory_waits_for_it() {
    let (world, sim, stream, mut buffer) = pending(Bytes::ZERO, 40);
    let event = world.device.event().unwrap();
    assert!(matches!(buffer.shrink_to(0, Quiesce::Deferred(&event)), Err(Error::EventNotRecorded)));
    assert!(matches!(buffer.shrink_to(0, Quiesce::Event(&event)), Err(Error::EventNotRecorded)));
    let raw = std::ptr::with_exposed_provenance_mut(event.raw().0 as usize);
    // SAFETY: alive, and recorded by nobody else.
    let borrowed = unsafe { world.device.event_from_raw(raw) };
    borrowed.record(stream).unwrap();
    buffer.shrink_to(0, Quiesce::Deferred(&borrowed)).unwrap();
    assert!(matches!(borrowed.record(sim.stream()), Err(Error::EventInUse)));
    world.device.drain();
    assert_eq!(sim.violations(), []);
    sim.finish_all();
    world.device.drain();
    borrowed.record(stream).unwrap();
    drop((buffer, borrowed, event));
    world.assert_empty("an event of others");
}

#[test]
fn a_capacity_says_so_when_it_is_full() {
    let world = World::host(DeviceOptions::new().contiguous(true));
    let builder = || GrowableBuffer::<u32>::builder(&world.device).max_len(MIB);
    let mut buffer = builder().fallback(Fallback::Capacity(Bytes::kib(64))).build().unwrap();
    assert_eq!((buffer.max_len(), buffer.capacity()), (MIB, 16_384));
    match buffer.grow_to(16_385) {
        Err(Error::FallbackFull { asked, capacity }) => {
            assert_eq!((asked, capacity), (Bytes::new(65_540), Bytes::kib(64)));
        }
        other => panic!("{other:?}"),
    }
    for nothing in [Bytes::ZERO, Bytes::new(3)] {
        let built = builder().fallback(Fallback::Capacity(nothing)).build();
        assert!(matches!(built, Err(Error::ZeroLength { .. })), "{nothing}");
    }
}

#[test]
fn an_import_of_no_chunk_is_refused() {
    let world = World::host(DeviceOptions::new());
    let mut buffer = exportable(&world);
    let fd = buffer.export_chunk(0).unwrap();
    for bytes in [Bytes::ZERO, Bytes::new(5)] {
        // SAFETY: the size is refused before the driver sees it.
        let imported = unsafe { world.device.import(std::os::fd::AsFd::as_fd(&fd), bytes) };
        assert!(matches!(imported, Err(Error::ChunkSize { .. })), "{bytes}");
    }
}

#[test]
fn a_lost_device_is_said_once() {
    use std::sync::Mutex;
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let lines = Lines::default();
    let writer = lines.clone();
    let log = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(log, || {
        let world = World::sim(card(), DeviceOptions::new());
        let buffers: Vec<_> = (0..8)
            .map(|_| {
                let mut buffer = world.buffer();
                buffer.grow_to(10 * UNIT).unwrap();
                buffer
            })
            .collect();
        world.sim.as_ref().unwrap().lose();
        drop(buffers);
        assert!(matches!(world.device.synchronize(), Err(Error::DeviceLost(_))));
    });
    let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    assert_eq!(text.matches("ERROR").count(), 1, "{text}");
    assert_eq!(text.matches("WARN").count(), 0, "{text}");
}
