//! Promise 2: an operation that fails leaves everything as it was. Proved by failing every call it makes, in turn.

use growspan::driver::fault::FaultPlan;
use growspan::driver::{Call, DriverErrorKind};
use growspan::{BufferSet, Bytes, Fallback, GrowableBuffer, Quiesce, Result};

use crate::world::{Look, UNIT, World, contents, look, shrink, stamp, units};
use crate::{KINDS, SPARSE, worlds};

/// A state to start from, and what to do in it.
struct Operation {
    name: &'static str,
    /// The length before, and the most the buffer had committed earlier (so that there are pooled chunks).
    start: usize,
    earlier: usize,
    act: fn(&mut GrowableBuffer<u8>) -> Result<()>,
}

const OPERATIONS: [Operation; 13] = [
    Operation { name: "grow from nothing", start: 0, earlier: 0, act: |buffer| buffer.grow_to(50 * UNIT) },
    Operation {
        name: "grow with half in the pool",
        start: UNIT,
        earlier: 20 * UNIT,
        act: |buffer| buffer.grow_to(50 * UNIT),
    },
    Operation { name: "grow from the pool", start: 1, earlier: 50 * UNIT, act: |buffer| buffer.grow_to(40 * UNIT) },
    Operation { name: "grow inside committed memory", start: UNIT, earlier: 0, act: |buffer| buffer.grow_to(2 * UNIT) },
    Operation {
        name: "grow zeroed",
        start: UNIT,
        earlier: 8 * UNIT,
        act: |buffer| buffer.grow_zeroed(13 * UNIT, None),
    },
    Operation { name: "append", start: 5, earlier: 0, act: |buffer| buffer.append(&vec![7; 9 * UNIT]) },
    Operation { name: "push", start: 2 * UNIT, earlier: 0, act: |buffer| buffer.push(7) },
    Operation {
        name: "shrink to nothing",
        start: 45 * UNIT,
        earlier: 0,
        act: |buffer| buffer.shrink_to(0, Quiesce::Device).map(drop),
    },
    Operation {
        name: "shrink to half",
        start: 45 * UNIT,
        earlier: 0,
        act: |buffer| buffer.shrink_to(20 * UNIT + 1, Quiesce::Device).map(drop),
    },
    Operation {
        name: "shrink within a chunk",
        start: 45 * UNIT,
        earlier: 0,
        act: |buffer| buffer.shrink_to(45 * UNIT - 1, Quiesce::Device).map(drop),
    },
    Operation {
        name: "shrink exactly, in the last chunk",
        start: 44 * UNIT,
        earlier: 0,
        act: |buffer| buffer.shrink_exact(42 * UNIT - 3, Quiesce::Device).map(drop),
    },
    Operation {
        name: "shrink exactly, further down",
        start: 60 * UNIT,
        earlier: 0,
        act: |buffer| buffer.shrink_exact(33 * UNIT, Quiesce::Device).map(drop),
    },
    Operation { name: "fill", start: 5 * UNIT, earlier: 0, act: |buffer| buffer.fill(0..0, 1) },
];

impl Operation {
    fn prepare(&self, world: &World) -> GrowableBuffer<u8> {
        let mut buffer = world.buffer();
        buffer.grow_to(self.earlier.max(self.start)).unwrap();
        shrink(&mut buffer, self.start);
        stamp(&mut buffer, self.start);
        world.warm(&mut buffer);
        buffer
    }
}

/// Runs `act` once for every call it makes, failing that call, until none is left to fail.
fn each_call_fails(world: &World, plan: impl Fn(u64) -> FaultPlan, mut act: impl FnMut(u64) -> bool) -> u64 {
    for k in 1.. {
        assert!(k < 1000, "{}: no end of calls", world.name);
        world.faults.arm(plan(k));
        if !act(k) {
            return k - 1;
        }
    }
    unreachable!()
}

pub(crate) fn a_failed_operation_changes_nothing() {
    for world in worlds() {
        for operation in &OPERATIONS {
            let calls = each_call_fails(&world, FaultPlan::nth, |k| {
                world.faults.disarm();
                let mut buffer = operation.prepare(&world);
                let before: (Look, _) = (look(&buffer), world.picture());
                let what = format!("{}: {} with call {k} failing", world.name, operation.name);

                world.faults.arm(FaultPlan::nth(k));
                let result = (operation.act)(&mut buffer);
                // What the background does for it may fail too.
                world.settle();
                world.faults.disarm();
                let struck = world.faults.struck();

                if let Err(error) = &result {
                    assert!(struck, "{what}: {error}");
                    assert_eq!((look(&buffer), world.picture()), before, "{what}: {error}");
                }
                world.assert_balanced(&what);
                // What failed once succeeds the next time.
                if result.is_err() {
                    (operation.act)(&mut buffer).unwrap_or_else(|error| panic!("{what}, then not: {error}"));
                }
                world.assert_balanced(&what);
                drop(buffer);
                world.assert_empty(&what);
                struck
            });
            if operation.name == "grow from nothing" && world.is_virtual() {
                assert!(calls >= 3, "{}: create, map and set access at least, {calls} seen", world.name);
            }
        }
    }
}

pub(crate) fn building_and_dropping_survive_any_failed_call() {
    for world in worlds() {
        for fallback in [Fallback::Upfront, Fallback::MayMove, Fallback::Capacity(units(16))] {
            each_call_fails(&world, FaultPlan::nth, |k| {
                let what = format!("{}: {fallback:?}, call {k} failing", world.name);
                let before = world.picture();
                let built = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).fallback(fallback).build();
                match built {
                    Err(error) => {
                        assert!(world.faults.struck(), "{what}: {error}");
                        assert_eq!(world.picture(), before, "{what}: {error}");
                    }
                    Ok(mut buffer) => {
                        // An error is fine here; what is left behind is not.
                        let _ = buffer.grow_to(12 * UNIT);
                        drop(buffer);
                    }
                }
                world.faults.disarm();
                world.assert_empty(&what);
                world.faults.struck()
            });
        }
    }
}

pub(crate) fn a_set_grows_as_one_or_not_at_all() {
    for world in worlds() {
        for fallback in [Fallback::Upfront, Fallback::MayMove] {
            each_call_fails(&world, FaultPlan::nth, |k| {
                world.faults.disarm();
                let what = format!("{}: a set, {fallback:?}, call {k} failing", world.name);
                let mut set = BufferSet::new();
                let members: Vec<_> = [1, 8, 512]
                    .into_iter()
                    .map(|per_row| {
                        let buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(16 * UNIT).fallback(fallback);
                        set.add(buffer.build().unwrap(), per_row).unwrap()
                    })
                    .collect();
                set.grow_to(100).unwrap();
                for (seed, member) in members.iter().enumerate() {
                    stamp(set.get_mut(*member).unwrap(), seed);
                }
                let looks = |set: &BufferSet| -> Vec<Look> {
                    members.iter().map(|member| look(set.get(*member).unwrap())).collect()
                };
                let before = (looks(&set), world.picture());

                world.faults.arm(FaultPlan::nth(k));
                let result = set.grow_to(1_000);
                world.settle();
                world.faults.disarm();
                let struck = world.faults.struck();

                match &result {
                    Err(error) => {
                        assert_eq!((looks(&set), world.picture()), before, "{what}: {error}");
                        assert_eq!(set.rows(), 100, "{what}");
                    }
                    Ok(()) => assert_eq!(set.get(members[2]).unwrap().len(), 1_000 * 512, "{what}"),
                }
                set.grow_to(1_000).unwrap();
                drop(set);
                world.assert_empty(&what);
                struck
            });
        }
    }
}

/// Two failures: the undo of the first may meet the second. Lengths may fall then, but what is left is what was there.
pub(crate) fn two_failures_cost_no_byte_of_what_is_left() {
    for world in worlds() {
        for operation in &OPERATIONS {
            let mut buffer = operation.prepare(&world);
            world.faults.arm(FaultPlan::count());
            let _ = (operation.act)(&mut buffer);
            let calls = world.faults.counted();
            world.faults.disarm();
            drop(buffer);
            for first in 1..=calls {
                let seconds = first + 1..=(calls + 6).min(first + 12);
                for second in seconds.filter(|second| (first + second).is_multiple_of(SPARSE)) {
                    let mut buffer = operation.prepare(&world);
                    let (len, before) = (buffer.len(), contents(&buffer));
                    let what = format!("{}: {}, calls {first} and {second} failing", world.name, operation.name);
                    world.faults.arm(FaultPlan::list([first, second]));
                    let result = (operation.act)(&mut buffer);
                    world.faults.disarm();
                    assert!(result.is_ok() || buffer.len() <= len, "{what}: {result:?}");
                    let kept = buffer.len().min(len);
                    assert!(before.still_in(&buffer, kept), "{what}: {result:?}");
                    world.assert_balanced(&what);
                    drop(buffer);
                    world.assert_only_stranded(&what);
                }
            }
        }
    }
}

/// A driver that keeps failing: there is no way back to how it was, but nothing may break, and the books must say so.
pub(crate) fn lasting_failures_are_accounted_for() {
    use Call::{Allocate, CopyIn, CopyOut, CopyWithin, Create, Fill, Free, FreeSpan, Map, Memory, Release, Reserve};
    use Call::{SetAccess, Synchronize, Unmap};
    let memory = [Reserve, FreeSpan, Create, Release, Map, SetAccess, Unmap, Allocate, Free];
    let others = [Memory, CopyIn, CopyOut, CopyWithin, Fill, Synchronize];
    for call in memory.into_iter().chain(others) {
        for kind in KINDS {
            for world in worlds() {
                for operation in &OPERATIONS {
                    for n in [0, 1, 3] {
                        keeps_failing(&world, operation, call, n, *kind);
                    }
                }
            }
        }
    }
}

fn keeps_failing(world: &World, operation: &Operation, call: Call, n: u64, kind: DriverErrorKind) {
    let mut buffer = operation.prepare(world);
    let what = format!("{}: {} with every {call} after {n} failing", world.name, operation.name);
    world.faults.arm(FaultPlan::after(n).of(call).kind(kind));
    let result = (operation.act)(&mut buffer);
    let struck = world.faults.struck();
    world.faults.disarm();
    assert!(struck || result.is_ok(), "{what}: {result:?}");
    assert!(buffer.len() <= buffer.capacity(), "{what}");
    let _ = look(&buffer);
    world.assert_balanced(&what);
    drop(buffer);
    match call {
        Call::FreeSpan => world.assert_gone(&what),
        // What could not be unmapped is given up, and the books say so.
        Call::Unmap => world.assert_only_stranded(&what),
        // Where unmapping waits for the device, that is not done either.
        Call::Synchronize if !world.device.verdict().quirks().map_beside_kernels => world.assert_only_stranded(&what),
        _ => world.assert_empty(&what),
    }
}

/// The same, failing through the drop: what cannot be given back is stranded, and said to be.
pub(crate) fn a_drop_that_cannot_give_back_says_so_and_nothing_else_breaks() {
    for call in [Call::Unmap, Call::Release, Call::FreeSpan, Call::Free, Call::Synchronize] {
        for world in worlds() {
            let mut buffer = world.buffer();
            buffer.grow_to(30 * UNIT).unwrap();
            world.device.pool().trim(Bytes::ZERO);
            world.faults.arm(FaultPlan::every().of(call));
            let closed = buffer.close();
            if closed.is_err() {
                assert!(world.faults.struck(), "{}: {call}", world.name);
            }
            world.device.pool().trim(Bytes::ZERO);
            world.faults.disarm();
            world.assert_balanced(&format!("with every {call} failing at close"));

            let stranded = world.device.snapshot().bytes_stranded;
            match call {
                Call::Unmap if world.is_virtual() => assert!(stranded >= units(30), "{}", world.name),
                Call::Free if !world.is_virtual() => assert!(stranded >= units(30), "{}", world.name),
                Call::Synchronize => {
                    // Nothing is unmapped blindly; it goes when the device can be waited for.
                    assert!(world.device.snapshot().bytes_retiring >= units(30), "{}", world.name);
                    assert!(world.device.drain() >= units(30), "{}", world.name);
                    assert_eq!(world.device.snapshot().bytes_stranded, Bytes::ZERO);
                }
                _ => assert_eq!(stranded, Bytes::ZERO, "{}: {call}", world.name),
            }
            // The device is as good as before for everybody else.
            let mut other = world.buffer();
            other.grow_to(3 * UNIT).unwrap();
            other.close().unwrap();
        }
    }
}
