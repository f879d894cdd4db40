//! Memory that is mapped ahead of need, on every driver: nobody waits for it, nothing is lost, and it gives way.

use std::sync::atomic::{AtomicBool, Ordering};

use growspan::driver::fault::FaultPlan;
use growspan::driver::{Call, DriverErrorKind, RawStream};
use growspan::{AheadPolicy, BufferSet, Bytes, Error, GrowableBuffer, Quiesce};

use crate::world::{Dice, UNIT, World, contents, look, shrink, stamp};
use crate::{GRANULE, STEPS, worlds};

/// Those devices whose buffers map ahead.
fn ahead_worlds() -> impl Iterator<Item = World> {
    let worlds: Vec<_> = worlds().into_iter().filter(World::maps_ahead).collect();
    assert_eq!(!worlds.is_empty(), crate::expects_virtual_memory(), "whether any device maps ahead");
    worlds.into_iter()
}

/// Whether the background maps, and does not only make chunks ready.
fn maps_in_background(world: &World) -> bool {
    world.device.verdict().quirks().map_beside_kernels
}

/// How many bytes are to be ahead.
fn target(world: &World) -> usize {
    match world.ahead {
        AheadPolicy::Bytes(bytes) => bytes.get() as usize,
        other => panic!("{other:?}"),
    }
}

/// How far past the length there is memory.
fn reach(buffer: &GrowableBuffer<u8>) -> usize {
    let stats = buffer.stats();
    (stats.bytes_committed.get() + stats.bytes_ahead.get()) as usize - buffer.len()
}

pub(crate) fn what_is_ahead_takes_no_call() {
    for world in ahead_worlds() {
        let (name, target) = (&world.name, target(&world));
        let mut buffer = world.buffer();
        let address = buffer.device_ptr();
        world.settle();
        assert!(reach(&buffer) >= target, "{name}: before the first growth");
        for _ in 0..8 {
            let len = buffer.len();
            let before = buffer.stats();
            // Half of what is there: the driver is not asked for anything, so it cannot fail.
            world.faults.arm(if maps_in_background(&world) {
                FaultPlan::every().of_memory().kind(DriverErrorKind::OutOfMemory)
            } else {
                FaultPlan::every().of(Call::Create)
            });
            buffer.grow_to(len + target / 2).unwrap();
            let after = buffer.stats();
            world.settle();
            world.faults.disarm();
            if maps_in_background(&world) {
                assert_eq!(
                    after.grows - before.grows,
                    after.grows_without_calls - before.grows_without_calls,
                    "{name}"
                );
            }
            assert_eq!(buffer.len(), len + target / 2, "{name}");
            stamp(&mut buffer, len);
            // The background has met errors, which are no errors of a growth; the next one asks again.
            buffer.grow_by(target / 8 + 1).unwrap();
            world.settle();
            assert!(reach(&buffer) >= target / 2, "{name}: {:?}", buffer.stats());
            world.assert_balanced("growing inside what is ahead");
        }
        assert_eq!((buffer.device_ptr(), buffer.moves()), (address, 0), "{name}");
        drop(buffer);
        world.assert_empty("grown inside what is ahead");
    }
}

/// Chunks are where they would be, and no more of them than the target asks for.
pub(crate) fn as_much_is_ahead_as_was_asked_for_and_no_more() {
    for world in ahead_worlds() {
        let (name, target) = (&world.name, target(&world));
        let (mut buffer, mut plain) = (world.buffer(), world.buffer());
        plain.grow_ahead(AheadPolicy::Off).unwrap();
        for len in (0..48 * UNIT).step_by(UNIT / 4) {
            buffer.grow_to(len).unwrap();
            plain.grow_to(len).unwrap();
            world.settle();
            let stats = buffer.stats();
            assert_eq!(stats.bytes_committed, plain.committed(), "{name}: {len}: as without anything ahead");
            let there = len + reach(&buffer);
            // Half the target is where more is asked for.
            assert!(there >= len + target / 2, "{name}: {len}: {stats:?}");
            // An eighth of the place or the target itself is the largest chunk that may lie across the goal.
            assert!(there <= len + target + target.max(2 * GRANULE).max(len / 8), "{name}: {len}: {stats:?}");
        }
        buffer.grow_to(64 * UNIT).unwrap();
        world.settle();
        assert_eq!(buffer.stats().bytes_ahead, Bytes::ZERO, "{name}: there is nothing beyond the end");
        drop((buffer, plain));
        world.assert_empty("all the way");
    }
}

pub(crate) fn flushing_and_shrinking_give_back_what_is_ahead() {
    for world in ahead_worlds() {
        let name = &world.name;
        let mut buffer = world.buffer();
        buffer.grow_to(5 * UNIT).unwrap();
        stamp(&mut buffer, 1);
        let event = world.device.event().unwrap();
        event.record(RawStream::DEFAULT).unwrap();
        let what = ["flush", "shrink", "shrink exactly", "shrink to the same length", "defer that", "turn it off"];
        for (n, what) in what.into_iter().enumerate() {
            world.warm(&mut buffer);
            let before = (buffer.stats(), look(&buffer));
            assert!(!before.0.bytes_ahead.is_zero(), "{name}: {what}");
            match n {
                0 => assert_eq!(buffer.flush_ahead().unwrap(), before.0.bytes_ahead, "{name}"),
                1 => shrink(&mut buffer, 5 * UNIT - 1),
                2 => drop(buffer.shrink_exact(5 * UNIT - 2, Quiesce::Device).unwrap()),
                3 => shrink(&mut buffer, 5 * UNIT - 2),
                4 => drop(buffer.shrink_to(5 * UNIT - 2, Quiesce::Deferred(&event)).unwrap()),
                _ => buffer.grow_ahead(AheadPolicy::Off).unwrap(),
            }
            world.settle();
            assert_eq!(buffer.stats().bytes_ahead, Bytes::ZERO, "{name}: {what}");
            let snapshot = world.device.snapshot();
            assert_eq!((snapshot.bytes_ahead, snapshot.bytes_retiring), (Bytes::ZERO, Bytes::ZERO), "{name}: {what}");
            world.assert_balanced(what);
        }
        // Off is off.
        buffer.grow_to(30 * UNIT).unwrap();
        world.settle();
        assert_eq!(buffer.stats().bytes_ahead, Bytes::ZERO, "{name}");
        // On again is on, and counted once.
        buffer.grow_ahead(world.ahead).unwrap();
        world.settle();
        assert!(!buffer.stats().bytes_ahead.is_zero(), "{name}");
        assert_eq!(world.device.snapshot().bytes_ahead, buffer.stats().bytes_ahead, "{name}");
        drop((buffer, event));
        world.assert_empty("given back");
    }
}

/// Every call of the background fails in turn: the error is said once, by a growth that needs memory, and costs nothing.
pub(crate) fn a_failure_in_the_background_is_said_once_and_costs_nothing() {
    for world in ahead_worlds() {
        let mut said = 0;
        for k in 1.. {
            let mut buffer = world.buffer();
            world.settle();
            buffer.grow_to(9 * UNIT).unwrap();
            buffer.flush_ahead().unwrap();
            stamp(&mut buffer, 3);
            let before = (look(&buffer), contents(&buffer));
            let what = format!("{}: call {k} of the background failing", world.name);
            world.settle();
            world.faults.arm(FaultPlan::nth(k).kind(DriverErrorKind::Other));
            buffer.grow_ahead(world.ahead).unwrap();
            world.settle();
            world.faults.disarm();
            let struck = world.faults.struck();
            world.assert_balanced(&what);
            assert_eq!(look(&buffer), before.0, "{what}");

            // What is committed is grown into whatever happened.
            buffer.grow_to(buffer.capacity()).unwrap();
            let grown = look(&buffer);
            match buffer.grow_to(30 * UNIT) {
                Ok(()) => assert!(!struck, "{what}: nothing was said"),
                Err(error @ Error::Ahead { .. }) => {
                    assert!(struck, "{what}: {error}");
                    assert!(error.to_string().contains("the buffer is as it was"), "{error}");
                    assert!(std::error::Error::source(&error).is_some(), "{error}");
                    assert_eq!(look(&buffer), grown, "{what}");
                    said += 1;
                }
                Err(error) => panic!("{what}: {error}"),
            }
            buffer.grow_to(30 * UNIT).unwrap_or_else(|error| panic!("{what}: said again: {error}"));
            assert!(before.1.still_in(&buffer, 9 * UNIT), "{what}");
            drop(buffer);
            world.assert_empty(&what);
            if !struck {
                break;
            }
        }
        assert!(said >= 2, "{}: {said}", world.name);
    }
}

/// A shortage in the background is nobody's error.
pub(crate) fn a_shortage_in_the_background_is_not_said() {
    for world in ahead_worlds() {
        let mut buffer = world.buffer();
        buffer.grow_to(9 * UNIT).unwrap();
        buffer.flush_ahead().unwrap();
        for kind in [DriverErrorKind::OutOfMemory, DriverErrorKind::OutOfFiles] {
            world.device.pool().trim(Bytes::ZERO);
            world.faults.arm(FaultPlan::every().of(Call::Create).kind(kind));
            buffer.grow_ahead(world.ahead).unwrap();
            world.settle();
            assert!(world.faults.struck(), "{}", world.name);
            world.faults.disarm();
            assert_eq!(buffer.stats().bytes_ahead, Bytes::ZERO, "{}", world.name);
            buffer.grow_by(4 * UNIT).unwrap();
            buffer.flush_ahead().unwrap();
        }
        drop(buffer);
        world.assert_empty("short in the background");
    }
}

/// The background is in the middle of it.
pub(crate) fn a_buffer_may_shrink_and_go_while_memory_is_mapped_ahead_of_it() {
    for world in ahead_worlds() {
        let mut dice = Dice(7);
        for round in 0..100 {
            let what = format!("{}: round {round}", world.name);
            let mut buffer = world.buffer();
            buffer.grow_to(dice.roll(30 * UNIT)).unwrap();
            stamp(&mut buffer, round);
            for _ in 0..dice.roll(300) {
                std::hint::spin_loop();
            }
            let len = dice.roll(buffer.len() + 1);
            let before = contents(&buffer);
            match round % 5 {
                0 => shrink(&mut buffer, len),
                1 => drop(buffer.shrink_exact(len, Quiesce::Device).unwrap()),
                2 => drop(buffer.flush_ahead().unwrap()),
                3 => buffer.grow_ahead(AheadPolicy::Percent(50)).unwrap(),
                _ => {}
            }
            assert!(before.still_in(&buffer, buffer.len()), "{what}");
            if round % 2 == 0 {
                buffer.close().unwrap();
                // Nothing is left to settle for: closing has waited.
                let held = world.device.snapshot();
                assert_eq!((held.bytes_ahead, held.bytes_in_hand), (Bytes::ZERO, Bytes::ZERO), "{what}");
            }
        }
        world.assert_empty("shrunk and gone");
    }
}

/// Ten thousand random steps by four threads, with what is written compared.
pub(crate) fn threads_with_the_background_among_them() {
    for world in ahead_worlds() {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let meddler = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    world.device.drain();
                    world.device.pool().trim(Bytes::new(8 * GRANULE as u64));
                    let _ = world.device.snapshot();
                    std::thread::yield_now();
                }
            });
            let world = &world;
            let workers: Vec<_> = (0..4).map(|seed| scope.spawn(move || live(world, seed))).collect();
            for worker in workers {
                worker.join().unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            meddler.join().unwrap();
        });
        world.assert_empty("four threads and a background");
    }
}

/// A thread's random life of a buffer.
fn live(world: &World, seed: u64) {
    let mut dice = Dice(seed);
    let event = world.device.event().unwrap();
    let mut buffer = world.buffer();
    let mut model: Vec<u8> = Vec::new();
    for step in 0..STEPS / 4 {
        let what = format!("{}: thread {seed}, step {step}", world.name);
        let len = model.len();
        match dice.roll(16) {
            0..=7 => {
                let to = (len + dice.roll(2 * UNIT)).min(64 * UNIT);
                buffer.grow_to(to).unwrap_or_else(|error| panic!("{what}: {error}"));
                buffer.fill(len..to, seed as u8 + 1).unwrap();
                model.resize(to, seed as u8 + 1);
            }
            8 => {
                let to = (len + dice.roll(UNIT)).min(64 * UNIT);
                buffer.grow_zeroed(to, None).unwrap();
                model.resize(to, 0);
            }
            9 => {
                let to = dice.roll(len + 1);
                buffer.shrink_to(to, Quiesce::Device).unwrap();
                model.truncate(to);
            }
            10 | 11 => {
                let to = dice.roll(len + 1);
                event.record(RawStream::DEFAULT).unwrap();
                buffer.shrink_to(to, Quiesce::Deferred(&event)).unwrap();
                model.truncate(to);
            }
            12 => {
                let to = dice.roll(len + 1);
                buffer.shrink_exact(to, Quiesce::Device).unwrap();
                model.truncate(to);
            }
            13 => drop(buffer.flush_ahead().unwrap()),
            14 if len > 0 => {
                let at = dice.roll(len);
                let end = (at + dice.roll(UNIT)).min(len);
                buffer.fill(at..end, step as u8).unwrap();
                model[at..end].fill(step as u8);
            }
            15 if step % 64 == 0 => {
                drop(std::mem::replace(&mut buffer, world.buffer()));
                model.clear();
            }
            _ => buffer.truncate(usize::MAX),
        }
        assert_eq!(buffer.len(), model.len(), "{what}");
        // The ends of what is there, and now and then all of it.
        let first = if step % 32 == 0 { 0 } else { model.len().saturating_sub(64) };
        let mut bytes = vec![0; model.len() - first];
        buffer.copy_out(first, &mut bytes).unwrap();
        assert!(bytes == model[first..], "{what}: contents differ");
    }
}

pub(crate) fn a_set_grows_inside_what_is_ahead_of_its_members() {
    for world in ahead_worlds() {
        let mut set = BufferSet::new();
        let members = [1, 3, 64].map(|per_row| set.add(world.buffer(), per_row).unwrap());
        set.grow_ahead(world.ahead).unwrap();
        set.grow_to(10).unwrap();
        world.settle();
        world.faults.arm(FaultPlan::every().of(Call::Create).kind(DriverErrorKind::OutOfMemory));
        set.grow_to(target(&world) / 128).unwrap();
        world.settle();
        world.faults.disarm();
        // One that fails takes the others back to where they were.
        let lens = || members.map(|member| set.get(member).map(|member| (member.len(), member.committed())));
        let before = lens();
        assert!(set.get_mut(members[2]).is_some());
        let over = 64 * UNIT / 64 + 1;
        assert!(set.grow_to(over).is_err(), "{}", world.name);
        let lens = || members.map(|member| set.get(member).map(|member| (member.len(), member.committed())));
        assert_eq!(lens(), before, "{}", world.name);
        set.shrink_to(0, &Quiesce::Device).unwrap();
        world.settle();
        assert_eq!(set.committed(), Bytes::ZERO, "{}", world.name);
        drop(set);
        world.assert_empty("a set");
    }
}
