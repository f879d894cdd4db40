//! Clones on threads.

use std::sync::mpsc;
use std::thread;

use growspan::{Block, DeviceOptions, RawAllocator};

use crate::drivers::{card, worlds};
use crate::model::{Model, below, layout};
use crate::world::{Dice, World};
use crate::{GRANULE, builder, on_device};

#[test]
fn threads_on_one_allocator() {
    for world in worlds() {
        let allocator = on_device(&world);
        thread::scope(|scope| {
            for seed in 0..4 {
                let mut model = Model::new(allocator.clone(), format!("{} thread {seed}", world.name));
                scope.spawn(move || {
                    let mut dice = Dice(seed);
                    for step in 0..400 {
                        let size = 1 + below(&mut dice, &[500, 40_000, 3 * GRANULE]);
                        match dice.roll(4) {
                            0..=1 if model.live.len() < 20 => model.allocate_zeroed(layout(size, 8)).unwrap(),
                            2 if !model.live.is_empty() => model.free(dice.roll(model.live.len())),
                            3 if !model.live.is_empty() => {
                                let number = dice.roll(model.live.len());
                                model.resize(number, layout(size, 8), step % 2 == 0).unwrap();
                            }
                            _ => {}
                        }
                    }
                    model.check_all();
                    model.free_all();
                });
            }
            let trimmed = allocator.clone();
            scope.spawn(move || {
                for _ in 0..20 {
                    trimmed.trim();
                    thread::yield_now();
                }
            });
        });
        assert_eq!(allocator.figures().blocks, 0, "{}", world.name);
        drop(allocator);
        world.assert_empty("after threads");
    }
}

/// What one thread allocates another frees.
#[test]
fn blocks_that_wander() {
    for world in [World::host(DeviceOptions::new()), World::sim(card(), DeviceOptions::new())] {
        let allocator = on_device(&world);
        let (send, receive) = mpsc::channel::<(Block, usize)>();
        thread::scope(|scope| {
            for seed in 0..2 {
                let (allocator, send) = (allocator.clone(), send.clone());
                scope.spawn(move || {
                    let mut dice = Dice(seed);
                    for _ in 0..3000 {
                        let size = 1 + below(&mut dice, &[300, 300, 300, 30_000, 30_000, 2 * GRANULE]);
                        send.send((allocator.allocate(layout(size, 1)).unwrap(), size)).unwrap();
                    }
                });
            }
            drop(send);
            for (block, size) in receive {
                // SAFETY: live, of that layout, and handed over to us.
                unsafe { allocator.deallocate(block.ptr(), layout(size, 1)) };
            }
        });
        assert_eq!(allocator.figures().blocks, 0);
        drop(allocator);
        world.assert_empty("after wandering");
    }
}

/// All of it may go to any thread, as traits and as types.
#[test]
fn handles_are_send_and_sync() {
    fn is<T: Send + Sync + Clone + RawAllocator>(_: &T) {}
    let world = World::host(DeviceOptions::new());
    let host = builder(&world).build().unwrap();
    is(&host);
    let device = host.into_device_memory();
    is(&device);
    // SAFETY: nothing is allocated with it.
    is(&unsafe { device.assume_never_dereferenced() });
}
