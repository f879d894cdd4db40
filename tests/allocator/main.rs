//! The allocators, on every driver that needs no GPU: blocks against a model, failures of every call, threads, streams,
//! and what stacks on them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how a test fails, in its helpers too")]

mod behaviour;
#[path = "../promises/drivers.rs"]
#[allow(dead_code, reason = "shared with the promises, which use all of it")]
mod drivers;
mod faults;
mod model;
mod packed;
mod streams;
mod threads;
#[path = "../promises/world.rs"]
#[allow(dead_code, reason = "shared with the promises, which use all of it")]
mod world;
mod wrappers;

use growspan::{Bytes, DeviceMemory, Headroom, SpanAllocator, SpanAllocatorBuilder};
use world::World;

/// The chunks of most tests. Small, so that real memory is quickly had.
pub(crate) const GRANULE: usize = 64 << 10;

/// How many bytes of free memory may come and go without our doing.
pub(crate) const SLACK: i64 = 0;

/// How much at each end of a granule is written and compared.
pub(crate) const WINDOW: usize = GRANULE;

/// An allocator for tests: addresses for small devices.
pub(crate) fn builder(world: &World) -> SpanAllocatorBuilder {
    SpanAllocator::builder(&world.device)
        .headroom(Headroom::default().with_least(Bytes::mib(16)))
        .keep(Bytes::mib(1))
        .heaps(2)
}

/// One that keeps addresses only, on any device.
pub(crate) fn on_device(world: &World) -> SpanAllocator<DeviceMemory> {
    builder(world).build_on_device().unwrap()
}
