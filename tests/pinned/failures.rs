//! What a failed driver call leaves: everything as it was, and nothing behind.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use growspan::driver::fault::FaultPlan;
use growspan::driver::{Call, DriverErrorKind};
use growspan::pinned::{PinPhase, PinStrategy, PinnedBuffer};
use growspan::{Error, Quiesce, Result};

use crate::{MIB, World, small_pieces};

const CALLS: [Call; 5] = [Call::Pin, Call::Unpin, Call::AllocatePinned, Call::FreePinned, Call::PinnedDevicePtr];

fn plan(k: u64) -> FaultPlan {
    CALLS.into_iter().fold(FaultPlan::nth(k), FaultPlan::of)
}

type Operation = fn(&mut PinnedBuffer<u8>) -> Result<()>;

const OPERATIONS: [(&str, Operation); 5] = [
    ("grow", |buffer| buffer.grow_to(11 * MIB).map(drop)),
    ("append", |buffer| buffer.append(&[1; 3 * MIB])),
    ("shrink", |buffer| buffer.shrink_to(1, Quiesce::Device)),
    ("shrink to a border", |buffer| buffer.shrink_to(2 * MIB, Quiesce::Device)),
    ("shrink exactly", |buffer| buffer.shrink_exact(3 * MIB + 5000, Quiesce::Device)),
];

fn begin(world: &World) -> PinnedBuffer<u8> {
    let mut buffer = small_pieces::<u8>(&world.device, 16 * MIB);
    buffer.grow_to(3 * MIB).unwrap();
    buffer.grow_to(7 * MIB).unwrap();
    for (number, byte) in buffer.iter_mut().enumerate() {
        *byte = (number / 1000) as u8;
    }
    buffer
}

#[test]
fn a_failed_operation_changes_nothing() {
    for world in World::all() {
        for (name, operation) in OPERATIONS {
            let mut struck = 0;
            for k in 1.. {
                let mut buffer = begin(&world);
                let (before, pieces, pins) = (buffer.to_vec(), buffer.pieces().to_vec(), world.pins());
                world.control.arm(plan(k));
                let result = operation(&mut buffer);
                let hit = world.control.struck();
                world.control.disarm();
                if !hit {
                    result.unwrap();
                    break;
                }
                // Giving back is tried twice, so one failure of it is none.
                match result {
                    Ok(()) => assert!(world.control.strikes().iter().all(|strike| strike.call == Call::Unpin)),
                    Err(error) => {
                        struck += 1;
                        assert!(!matches!(error, Error::Rollback { .. }), "{error}");
                        assert!(*buffer == *before, "{} {name} {k}", world.name);
                        // An exact shrink cuts the pieces anew; they cover the same.
                        let covered = |pieces: &[growspan::pinned::PinnedPiece]| {
                            pieces.iter().map(|piece| piece.bytes.get()).sum::<u64>()
                        };
                        assert_eq!(covered(buffer.pieces()), covered(&pieces), "{} {name} {k}", world.name);
                        assert_eq!(world.pins(), pins, "{} {name} {k}", world.name);
                        operation(&mut buffer).unwrap();
                    }
                }
                buffer.close().unwrap();
                world.assert_clean();
            }
            assert!(struck > 0 || name.starts_with("shrink"), "{} {name}: no call was struck", world.name);
        }
    }
}

/// The second failure strikes while the first is being undone.
#[test]
fn two_failures_leave_what_can_be_used_and_closed() {
    for world in World::all() {
        for (name, operation) in OPERATIONS {
            let mut undone = 0;
            for k in 1..=9 {
                for lasting in [false, true] {
                    let mut buffer = begin(&world);
                    let before = buffer.to_vec();
                    let strikes = if lasting { FaultPlan::after(k - 1) } else { FaultPlan::list([k, k + 1, k + 2]) };
                    world.control.arm(CALLS.into_iter().fold(strikes, FaultPlan::of));
                    let result = operation(&mut buffer);
                    world.control.disarm();
                    undone += u32::from(matches!(result, Err(Error::Rollback { .. })));
                    if result.is_err() {
                        // What is left holds what it held, and can go on.
                        let len = buffer.len();
                        assert!(len <= buffer.capacity() && buffer[..] == before[..len], "{} {name} {k}", world.name);
                    }
                    buffer.grow_to(12 * MIB).unwrap();
                    buffer[12 * MIB - 1] = 1;
                    buffer.close().unwrap();
                    world.assert_clean();
                }
            }
            assert!(undone > 0 || name.starts_with("shrink to") || name == "shrink", "{} {name}", world.name);
        }
    }
}

#[test]
fn what_the_driver_keeps_is_told_by_close_and_stays_mapped() {
    for world in World::all() {
        for (call, strategy) in [(Call::Unpin, PinStrategy::Pieces), (Call::FreePinned, PinStrategy::Driver)] {
            let mut buffer =
                PinnedBuffer::<u8>::builder(&world.device).max_len(2 * MIB).strategy(strategy).build().unwrap();
            buffer.grow_to(2 * MIB).unwrap();
            buffer.fill(5);
            let last: *const u8 = &raw const buffer[2 * MIB - 1];
            world.control.arm(FaultPlan::every().of(call));
            let error = buffer.close().unwrap_err();
            world.control.disarm();
            assert!(matches!(error, Error::NotReturned { bytes, .. } if bytes.get() == 2 << 20), "{error}");
            // SAFETY: the driver did not let go of it, so that it is to be there still.
            assert_eq!(unsafe { last.read() }, 5);
        }
        if let Some(sim) = &world.sim {
            assert_eq!(sim.figures().pins, 2);
        }
    }
}

#[test]
fn a_driver_out_of_memory_is_told_with_the_host_s_figures() {
    for world in World::all() {
        for (call, strategy) in [(Call::Pin, PinStrategy::Pieces), (Call::AllocatePinned, PinStrategy::Driver)] {
            let builder = PinnedBuffer::<u8>::builder(&world.device).max_len(3 * MIB).strategy(strategy);
            let mut buffer = builder.build().unwrap();
            world.control.arm(FaultPlan::nth(1).of(call).kind(DriverErrorKind::OutOfMemory));
            let error = buffer.grow_to(3 * MIB).unwrap_err().to_string();
            world.control.disarm();
            assert!(error.contains("3 MiB asked") && error.contains("available on the host"), "{error}");
        }
    }
}

#[test]
fn only_what_the_driver_keeps_stays() {
    for world in World::all() {
        let mut buffer = small_pieces::<u8>(&world.device, 6 * MIB);
        buffer.grow_to(6 * MIB).unwrap();
        let addr = buffer.as_ptr().addr();
        // The middle one of three, tried twice.
        world.control.arm(FaultPlan::list([2, 3]).of(Call::Unpin));
        let error = buffer.close().unwrap_err();
        world.control.disarm();
        assert!(matches!(error, Error::NotReturned { bytes, .. } if bytes.get() == 2 << 20), "{error}");
        let there = |mib: usize| crate::kernel::mapping(addr + mib * MIB, 2 * MIB, "Rss");
        assert_eq!((there(0), there(2), there(4)), (0, 2 << 20, 0), "{}", world.name);
    }
}

#[test]
fn errors_of_the_device_are_passed_on() {
    let world = World::sim();
    let mut buffer = begin(&world);
    world.control.arm(FaultPlan::nth(1).of(Call::Pin).kind(DriverErrorKind::DeviceLost));
    assert!(matches!(buffer.grow_to(9 * MIB), Err(Error::DeviceLost(_))));
    world.control.disarm();
    // The door stays shut; the memory is there for the host as long as the buffer is.
    assert_eq!(buffer[1000], 1);
    assert!(matches!(buffer.grow_to(9 * MIB), Err(Error::DeviceLost(_))));
    buffer.close().unwrap();
}

#[test]
fn who_is_told_can_end_it_at_any_point() {
    for world in World::all() {
        for stop_at in 0.. {
            let mut buffer = begin(&world);
            let (mut told, mut last) = (0, (PinPhase::Prefault, 0));
            let result = buffer.grow_to_with(15 * MIB, |progress| {
                let now = (progress.phase, progress.done.get());
                assert!(progress.done <= progress.total && (now.0 != last.0 || now.1 >= last.1), "{progress:?}");
                last = now;
                told += 1;
                if told > stop_at { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            if told <= stop_at {
                assert_eq!(last, (PinPhase::Register, 8 << 20));
                assert_eq!(result.unwrap().bytes.get(), 8 << 20);
                assert!(stop_at >= 5, "told {told} times");
                break;
            }
            assert!(matches!(result, Err(Error::Cancelled { .. })));
            assert_eq!((buffer.len(), buffer.capacity(), buffer[6_500_000]), (7 * MIB, 8 * MIB, 6500_u32 as u8));
            buffer.close().unwrap();
            world.assert_clean();
        }
    }
}

#[test]
fn a_panic_of_who_is_told_undoes_the_growth() {
    for world in World::all() {
        for at in [PinPhase::Prefault, PinPhase::Register] {
            let mut buffer = begin(&world);
            let (pins, capacity) = (world.pins(), buffer.capacity());
            let grow = AssertUnwindSafe(|| {
                buffer.grow_to_with(15 * MIB, |progress| {
                    assert!(progress.phase != at || progress.done.get() < 2 << 20, "on purpose");
                    ControlFlow::Continue(())
                })
            });
            assert!(catch_unwind(grow).is_err());
            assert_eq!((world.pins(), buffer.capacity(), buffer.len()), (pins, capacity, 7 * MIB));
            buffer.grow_to(15 * MIB).unwrap();
            buffer.close().unwrap();
            world.assert_clean();
        }
    }
}
