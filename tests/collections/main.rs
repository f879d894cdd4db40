//! hashbrown's and allocator-api2's own collections on the allocators, beside std's on the global one: random operations,
//! after each of which both must agree.

#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how a test fails, in its helpers too")]

mod maps;
mod vecs;

use growspan::driver::host::HostOptions;
use growspan::{Bytes, Device, DeviceOptions, Headroom, SpanAllocator};

/// A small generator of its own, so that a failure can be repeated.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below.max(1)
    }
}

/// Host memory with chunks of 64 KiB, so that small collections cross from shared slots to spans of their own, with
/// virtual memory and without.
pub(crate) fn allocators() -> Vec<(Device, SpanAllocator)> {
    [false, true]
        .map(|contiguous| {
            let memory = HostOptions::default().with_capacity(Bytes::mib(256)).with_granularity(Bytes::kib(64));
            let device = DeviceOptions::new().contiguous(contiguous).host(memory).unwrap();
            let builder = SpanAllocator::builder(&device).headroom(Headroom::default().with_least(Bytes::mib(64)));
            let allocator = builder.keep(Bytes::mib(2)).build().unwrap();
            (device, allocator)
        })
        .into()
}

/// Nothing is left when the collections are gone.
pub(crate) fn assert_empty(device: &Device, allocator: SpanAllocator) {
    assert_eq!(allocator.figures().blocks, 0, "{}", allocator.figures());
    drop(allocator);
    device.pool().trim(Bytes::ZERO);
    assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
}
