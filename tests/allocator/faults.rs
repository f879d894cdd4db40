//! Out of memory, and every other failure, in the middle of every step.

use growspan::driver::fault::FaultPlan;
use growspan::driver::{Call, DriverErrorKind};
use growspan::{Bytes, DeviceMemory, Headroom, SpanAllocator};

use crate::drivers::worlds;
use crate::model::{Model, layout};
use crate::world::World;
use crate::{GRANULE, builder};

type Blocks = Model<SpanAllocator<DeviceMemory>>;

struct Step {
    name: &'static str,
    act: fn(&mut Blocks) -> growspan::Result<()>,
}

/// Each from a state with a few blocks of each kind, numbered as `prepare` makes them.
const STEPS: [Step; 11] = [
    Step { name: "a small block of a new class", act: |model| model.allocate(layout(3000, 1)) },
    Step { name: "a small block, zeroed", act: |model| model.allocate_zeroed(layout(9000, 1)) },
    Step { name: "a range", act: |model| model.allocate(layout(60 << 10, 4096)) },
    Step { name: "a wide range", act: |model| model.allocate_zeroed(layout(240 << 10, 1)) },
    Step { name: "a block of its own", act: |model| model.allocate(layout(12 * GRANULE, 1)) },
    Step { name: "a block of its own, zeroed", act: |model| model.allocate_zeroed(layout(5 * GRANULE, 1)) },
    Step { name: "growing out of a class", act: |model| model.resize(0, layout(40 << 10, 1), true) },
    Step { name: "growing a range", act: |model| model.resize(1, layout(220 << 10, 1), true) },
    Step { name: "growing out of the shared span", act: |model| model.resize(1, layout(9 * GRANULE, 1), false) },
    Step { name: "growing a block of its own", act: |model| model.resize(2, layout(30 * GRANULE, 1), true) },
    Step { name: "shrinking a block of its own", act: |model| model.resize(2, layout(5 * GRANULE, 1), false) },
];

fn prepare(world: &World, headroom: Headroom, keep: Bytes) -> Blocks {
    let allocator = builder(world)
        .threshold(Bytes::new(4 * GRANULE as u64))
        .headroom(headroom)
        .keep(keep)
        .build_on_device()
        .unwrap();
    let mut model = Model::new(allocator, world.name.clone());
    for size in [2000, 50 << 10, 6 * GRANULE] {
        model.allocate(layout(size, 1)).unwrap();
    }
    // Memory that holds nothing, of both kinds.
    for size in [230 << 10, 200 << 10, 7 * GRANULE] {
        model.allocate(layout(size, 1)).unwrap();
    }
    while model.live.len() > 3 {
        model.free(3);
    }
    model
}

#[test]
fn a_failed_step_changes_nothing() {
    for world in worlds() {
        for (headroom, keep) in
            [(Headroom::default().with_least(Bytes::mib(16)), Bytes::mib(4)), (Headroom::NONE, Bytes::ZERO)]
        {
            for step in &STEPS {
                for k in 1.. {
                    assert!(k < 1000, "no end of calls");
                    let mut model = prepare(&world, headroom, keep);
                    let allocator = model.allocator.clone();
                    let what = format!("{}: {}, {headroom:?}, with call {k} failing", world.name, step.name);
                    let before = (allocator.figures(), world.device.snapshot());
                    // Copies of the model itself do not count.
                    let plan = FaultPlan::nth(k);
                    let plan = Call::MEMORY
                        .into_iter()
                        .chain([Call::Fill, Call::CopyWithin, Call::Synchronize])
                        .fold(plan, FaultPlan::of);
                    world.faults.arm(plan);
                    let result = (step.act)(&mut model);
                    world.faults.disarm();
                    let struck = world.faults.struck();
                    model.check_all();
                    let after = (allocator.figures(), world.device.snapshot());
                    match &result {
                        Ok(()) => {}
                        Err(error) => {
                            assert!(struck, "{what}: {error}");
                            assert_eq!(after.0.blocks, before.0.blocks, "{what}: {error}");
                            // A block of its own may have more under it, where clearing what was added failed.
                            if world.faults.strikes()[0].call != Call::Fill {
                                assert_eq!(after.0.bytes_in_blocks, before.0.bytes_in_blocks, "{what}: {error}");
                                // What was taken for it may be kept, holding nothing.
                                let used = |figures: &growspan::Figures| {
                                    figures.bytes_committed.get() - figures.bytes_idle.get()
                                };
                                assert_eq!(used(&after.0), used(&before.0), "{what}: {error}: {}", after.0);
                            }
                            assert_eq!(after.1.bytes_stranded, Bytes::ZERO, "{what}: {error}");
                            (step.act)(&mut model).unwrap_or_else(|error| panic!("{what}, then not: {error}"));
                        }
                    }
                    world.assert_balanced(&what);
                    model.free_all();
                    drop((model, allocator));
                    world.assert_empty(&what);
                    if !struck {
                        break;
                    }
                }
            }
        }
    }
}

/// From some call on all fail: nothing panics, blocks keep their contents, and it all comes back once the driver does.
#[test]
fn lasting_failures_cost_nothing_either() {
    for world in worlds() {
        for kind in [DriverErrorKind::OutOfMemory, DriverErrorKind::Other] {
            for step in &STEPS {
                for k in [0, 1, 2, 5] {
                    let mut model = prepare(&world, Headroom::default().with_least(Bytes::mib(16)), Bytes::mib(4));
                    let what = format!("{}: {}, failing with {kind:?} after call {k}", world.name, step.name);
                    let plan = FaultPlan::after(k).kind(kind);
                    // What gives memory back fails for good elsewhere; here the driver keeps its word.
                    let plan = [Call::Create, Call::Allocate, Call::Reserve, Call::Map, Call::Fill]
                        .into_iter()
                        .fold(plan, FaultPlan::of);
                    world.faults.arm(plan);
                    let _ = (step.act)(&mut model);
                    let _ = model.allocate(layout(12 * GRANULE, 1));
                    let _ = model.allocate(layout(100, 1));
                    world.faults.disarm();
                    model.check_all();
                    model.free_all();
                    model.allocator.trim();
                    drop(model);
                    world.assert_empty(&what);
                }
            }
        }
    }
}

/// What cannot be unmapped is stranded and said so, never handed out twice or unmapped under somebody.
#[test]
fn memory_that_cannot_be_unmapped_is_only_lost() {
    for world in worlds().into_iter().filter(World::is_virtual) {
        let mut model = prepare(&world, Headroom::default().with_least(Bytes::mib(16)), Bytes::mib(4));
        world.faults.arm(FaultPlan::every().of(Call::Unmap));
        model.allocator.trim();
        model.allocate(layout(100 << 10, 1)).unwrap();
        model.check_all();
        model.free_all();
        drop(model);
        world.faults.disarm();
        world.assert_only_stranded("after unmapping failed");
    }
}

/// A card that is really full: what fits is had, what does not is an error with figures, and frees make room.
#[test]
fn a_full_card() {
    for world in worlds() {
        let total = world.device.memory().unwrap().total;
        let mut model = prepare(&world, Headroom::NONE, Bytes::mib(4));
        let step = (total / 20) as usize;
        let error = loop {
            if let Err(error) = model.allocate(layout(step, 1)) {
                break error;
            }
        };
        assert!(!error.to_string().is_empty());
        model.check_all();
        let last = model.live.len() - 1;
        model.free(last);
        model.allocate(layout(step, 1)).unwrap();
        model.free_all();
        drop(model);
        world.assert_empty("after a full card");
    }
}

/// Memory is mapped in the gaps between slots that have some already: if the second gap fails, the first is undone.
#[test]
fn gaps_are_mapped_all_or_none() {
    for world in worlds().into_iter().filter(World::is_virtual) {
        let allocator = builder(&world).threshold(Bytes::mib(1)).keep(Bytes::mib(8)).build_on_device().unwrap();
        let mut model = Model::new(allocator.clone(), world.name.clone());
        for _ in 0..5 {
            model.allocate(layout(GRANULE, GRANULE)).unwrap();
        }
        model.live.sort_by_key(|live| live.block.device_ptr());
        let first = model.live[0].block.device_ptr();
        // The first, third and fifth lose their memory, the others keep it.
        let kept = [model.live[1], model.live[3]];
        for number in [4, 2, 0] {
            model.free(number);
        }
        allocator.trim();
        model.free_all();
        let before = allocator.figures();
        assert_eq!(before.bytes_committed.get(), kept.len() as u64 * GRANULE as u64, "{}", world.name);
        for nth in 1..=3 {
            world.faults.arm(FaultPlan::nth(nth).of(Call::SetAccess));
            model.allocate(layout(5 * GRANULE, GRANULE)).unwrap_err();
            world.faults.disarm();
            assert_eq!(allocator.figures(), before, "{}: gap {nth}", world.name);
            world.assert_balanced("after a gap");
        }
        model.allocate(layout(5 * GRANULE, GRANULE)).unwrap();
        assert_eq!(model.live[0].block.device_ptr(), first, "{}: the gaps were there", world.name);
        model.free_all();
        drop((model, allocator));
        world.assert_empty("after gaps");
    }
}

/// What an undo could not take away is in nobody's way for good: it is tried again when its place is needed.
#[test]
fn a_place_that_got_stuck_is_had_again() {
    for world in worlds().into_iter().filter(World::is_virtual) {
        let mut model = Model::new(builder(&world).build_on_device().unwrap(), world.name.clone());
        world.faults.arm(FaultPlan::every().of(Call::SetAccess).of(Call::Unmap));
        let error = model.allocate(layout(100, 1)).unwrap_err();
        assert!(matches!(error, growspan::Error::Rollback { .. }), "{}: {error}", world.name);
        // Not yet, and that is the driver's error and nothing else.
        let error = model.allocate(layout(100, 1)).unwrap_err();
        assert!(matches!(error, growspan::Error::Driver(_)), "{}: {error}", world.name);
        world.faults.disarm();
        world.assert_balanced("with a place stuck");
        assert!(!world.device.snapshot().bytes_stranded.is_zero());
        model.allocate(layout(100, 1)).unwrap();
        assert!(world.device.snapshot().bytes_stranded.is_zero(), "{}", world.name);
        model.free_all();
        drop(model);
        world.assert_empty("after a place was stuck");
    }
}
