//! Memory that waits for an event, graphs under capture, chunks that are shared.

use growspan::driver::fault::FaultPlan;
use growspan::driver::host::HostOptions;
use growspan::driver::sim::SimDriver;
use growspan::driver::{Call, ChunkProps, RawStream, Shareable};
use growspan::{Bytes, DeviceOptions, Error, GrowableBuffer, Quiesce, Sizing};

use crate::drivers::card;
use crate::world::{MIB, UNIT, World, look, stamp, units};

/// A simulated card with a stream, and a buffer of so many units with work pending over all of it.
pub(crate) fn pending(keep: Bytes, len: usize) -> (World, SimDriver, RawStream, GrowableBuffer<u8>) {
    let sim = card().build();
    let world = World::over("sim", sim.driver(), Some(sim.clone()), DeviceOptions::new().pool_keep(keep));
    let stream = sim.stream();
    let mut buffer = world.buffer();
    buffer.grow_to(len * UNIT).unwrap();
    stamp(&mut buffer, 1);
    sim.queue_work(stream, buffer.device_ptr(), (len * UNIT) as u64);
    (world, sim, stream, buffer)
}

#[test]
fn a_deferred_shrink_does_not_wait_and_comes_back_when_the_event_has_passed() {
    let (world, sim, stream, mut buffer) = pending(Bytes::ZERO, 40);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    let calls = sim.count(Call::EventWait) + sim.count(Call::Synchronize);
    let shrunk = buffer.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    assert_eq!((shrunk.released, shrunk.retiring, shrunk.committed), (Bytes::ZERO, units(40), Bytes::ZERO));
    assert_eq!(shrunk.to_string(), "0 B given up, 1.25 MiB wait for their event, 0 B stay");
    assert_eq!(sim.count(Call::EventWait) + sim.count(Call::Synchronize), calls, "nothing waits");
    assert_eq!((buffer.len(), buffer.capacity(), buffer.committed()), (0, 0, Bytes::ZERO));
    assert_eq!(world.device.snapshot().bytes_retiring, units(40));
    world.assert_balanced("retiring");
    assert_eq!(world.device.drain(), Bytes::ZERO, "it has not passed");

    sim.finish_all();
    assert_eq!(world.device.drain(), units(40));
    assert_eq!(world.device.snapshot().bytes_retiring, Bytes::ZERO);
    world.assert_balanced("drained");
    drop((buffer, event));
    world.assert_empty("deferred");
}

#[test]
fn growing_again_takes_memory_back_without_a_driver_call() {
    let (world, sim, stream, mut buffer) = pending(Bytes::gib(1), 60);
    let before = look(&buffer);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    buffer.shrink_to(10 * UNIT, Quiesce::Deferred(&event)).unwrap();
    let calls = world.device.snapshot().driver_calls;
    buffer.grow_to(30 * UNIT).unwrap();
    assert_eq!(world.device.snapshot().driver_calls, calls);
    // Only what was needed came back: the rest still waits.
    assert_eq!(buffer.committed(), units(30));
    assert_eq!(world.device.snapshot().bytes_retiring, units(30));
    buffer.grow_to(60 * UNIT).unwrap();
    assert_eq!(world.device.snapshot().driver_calls, calls);
    assert_eq!(world.device.snapshot().bytes_retiring, Bytes::ZERO);
    assert_eq!(look(&buffer), before, "the same memory, as it was");
    assert_eq!(sim.violations(), []);
    drop((buffer, event));
    world.assert_empty("taken back");
}

#[test]
fn later_shrinks_wait_in_their_order_whatever_their_form() {
    let (world, sim, stream, mut buffer) = pending(Bytes::ZERO, 60);
    let other = sim.stream();
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    buffer.shrink_to(40 * UNIT, Quiesce::Deferred(&event)).unwrap();
    // Recording again must not let go of what waits for the first.
    event.record(other).unwrap();
    assert!(event.is_reached().unwrap());
    assert_eq!(world.device.drain(), Bytes::ZERO);
    // The lower part waits for an event that has passed, the upper one still for the first: nothing may go yet...
    sim.queue_work(other, buffer.device_ptr(), (40 * UNIT) as u64);
    let second = world.device.event().unwrap();
    second.record(other).unwrap();
    buffer.shrink_to(20 * UNIT, Quiesce::Deferred(&second)).unwrap();
    sim.finish(other);
    assert_eq!(world.device.drain(), Bytes::ZERO, "memory goes from the end downwards");
    // ... and a shrink that waits for another stream only waits for the first event as well.
    buffer.shrink_to(0, Quiesce::Stream(other)).unwrap();
    assert_eq!(world.device.snapshot().bytes_retiring, Bytes::ZERO);
    assert_eq!(sim.violations(), []);
    drop((buffer, event, second));
    world.assert_empty("in order");
}

#[test]
fn waiting_memory_is_had_before_memory_is_called_short() {
    let sim = card().total(units(100)).build();
    let world = World::over("sim", sim.driver(), Some(sim.clone()), DeviceOptions::new());
    let stream = sim.stream();
    let mut first = world.buffer();
    first.grow_to(60 * UNIT).unwrap();
    sim.queue_work(stream, first.device_ptr(), UNIT as u64);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    first.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    let mut second = world.buffer();
    match second.grow_to(60 * UNIT) {
        Err(Error::OutOfMemory(figures)) => assert_eq!(figures.retiring, units(60)),
        other => panic!("{other:?}"),
    }
    sim.finish_all();
    second.grow_to(60 * UNIT).unwrap();
    assert_eq!(world.device.snapshot().bytes_retiring, Bytes::ZERO);
    drop((first, second, event));
    world.assert_empty("had in time");
}

#[test]
fn the_list_is_bounded_and_closing_empties_it() {
    let (world, sim, stream, mut buffer) = pending(Bytes::ZERO, 64);
    let mut small = GrowableBuffer::<u8>::builder(&world.device)
        .max_len(200 * UNIT)
        .sizing(Sizing::Uniform(units(2)))
        .build()
        .unwrap();
    small.grow_to(200 * UNIT).unwrap();
    sim.queue_work(stream, small.device_ptr(), 200 * UNIT as u64);
    let event = world.device.event().unwrap();
    for n in (20..200).rev().step_by(2) {
        event.record(stream).unwrap();
        small.shrink_to((n - 1) * UNIT, Quiesce::Deferred(&event)).unwrap();
    }
    assert_eq!(sim.violations(), [], "the 65th waited");
    buffer.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    buffer.close().unwrap();
    drop((small, event));
    world.assert_empty("bounded");
}

#[test]
fn a_failed_growth_leaves_what_waits_waiting() {
    for k in 1.. {
        let (world, _, stream, mut buffer) = pending(Bytes::ZERO, 20);
        let event = world.device.event().unwrap();
        event.record(stream).unwrap();
        buffer.shrink_to(4 * UNIT, Quiesce::Deferred(&event)).unwrap();
        let before = (look(&buffer), world.picture());
        world.faults.arm(FaultPlan::nth(k));
        let result = buffer.grow_to(50 * UNIT);
        world.faults.disarm();
        match result {
            Err(error) => {
                assert_eq!((look(&buffer), world.picture()), before, "call {k}: {error}");
                world.assert_balanced("after a failed growth");
            }
            Ok(()) => {
                assert!(k > 3);
                break;
            }
        }
    }
}

#[test]
fn no_memory_comes_or_goes_under_capture() {
    let (world, sim, _, mut buffer) = pending(Bytes::ZERO, 20);
    sim.finish_all();
    let stream = sim.stream();
    sim.capture(stream, true);
    assert!(matches!(buffer.shrink_to(0, Quiesce::Stream(stream)), Err(Error::Capturing { .. })));
    sim.capture(stream, false);
    sim.capture(RawStream::DEFAULT, true);
    assert!(matches!(buffer.grow_to(40 * UNIT), Err(Error::Capturing { .. })));
    assert!(matches!(buffer.shrink_to(0, Quiesce::Device), Err(Error::Capturing { .. })));
    assert!(matches!(buffer.shrink_exact(0, Quiesce::Device), Err(Error::Capturing { .. })));
    // What takes no call of the driver goes on.
    buffer.truncate(5 * UNIT);
    buffer.grow_to(20 * UNIT).unwrap();
    sim.capture(RawStream::DEFAULT, false);
    assert_eq!(sim.violations(), []);
    drop(buffer);
    world.assert_empty("captured");
}

#[test]
fn properties_that_do_not_work_are_left_out_and_the_rest_stays() {
    let device = DeviceOptions::new().host(HostOptions::default().with_capacity(Bytes::mib(64))).unwrap();
    let wanted = ChunkProps::PLAIN.with_rdma(true).with_shareable(Shareable::PosixFd);
    let pool = device.new_pool(wanted, Bytes::ZERO);
    assert_eq!(pool.props(), ChunkProps::PLAIN.with_shareable(Shareable::PosixFd));
    let [(name, why)] = pool.left_out() else { panic!("{:?}", pool.left_out()) };
    assert!(*name == "RDMA" && why.contains("not supported"), "{name}: {why}");
    assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
}

#[test]
fn an_exported_chunk_is_the_same_memory_and_never_kept_for_others() {
    let device = DeviceOptions::new().host(HostOptions::default().with_capacity(Bytes::mib(64))).unwrap();
    let pool = device.new_pool(ChunkProps::PLAIN.with_shareable(Shareable::PosixFd), Bytes::mib(64));
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(8 * MIB).pool(&pool).build().unwrap();
    buffer.append(&[5; 3 * MIB]).unwrap();
    let fd = buffer.export_chunk(1).unwrap();
    assert!(matches!(buffer.export_chunk(2), Err(Error::OutOfBounds { start: 2, len: 2, .. })));
    // SAFETY: exported just now by this device, from a chunk of 2 MiB.
    let chunk = unsafe { device.import(std::os::fd::AsFd::as_fd(&fd), Bytes::mib(2)) }.unwrap();
    let mut range = device.reserve(Bytes::mib(2)).unwrap();
    range.append(vec![chunk]).unwrap();
    let theirs = std::ptr::with_exposed_provenance_mut::<u8>(range.base() as usize);
    // SAFETY: 2 MiB of host memory are mapped there.
    unsafe { theirs.write(77) };
    let mut ours = [0; 2];
    buffer.copy_out(2 * MIB, &mut ours).unwrap();
    assert_eq!(ours, [77, 5]);
    // SAFETY: nobody uses it any more.
    let chunks = unsafe { range.take_from(Bytes::ZERO) }.unwrap();
    pool.put(chunks.into_iter().next().unwrap());
    buffer.close().unwrap();
    assert_eq!(pool.classes(), [(Bytes::mib(2), 1)], "only the chunk that nobody else has");
}
