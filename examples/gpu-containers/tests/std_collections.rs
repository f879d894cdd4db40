//! std's own collections on the allocators. Their trait is not stable: `ci/containers.sh` says how this is run.

#![cfg(growspan_std_allocator)]
#![feature(allocator_api, btreemap_alloc)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how a test fails, in its helpers too")]

use std::alloc::Allocator;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use growspan::driver::host::HostOptions;
use growspan::{
    ArenaAllocator, Bytes, Device, DeviceOptions, LimitedAllocator, RetryAllocator, SpanAllocator, StatsAllocator,
    TrackingAllocator,
};

fn device() -> Device {
    let memory = HostOptions::default().with_capacity(Bytes::mib(256)).with_granularity(Bytes::kib(64));
    DeviceOptions::new().host(memory).unwrap()
}

fn lives<A: Allocator + Clone>(allocator: &A) {
    let witness = Arc::new(());
    let mut vec = Vec::new_in(allocator.clone());
    let mut queue = VecDeque::new_in(allocator.clone());
    let mut map = BTreeMap::new_in(allocator.clone());
    for n in 0..100_000_u32 {
        vec.push((n, Arc::clone(&witness)));
        queue.push_back(n);
        if n % 3 == 0 {
            queue.pop_front();
        }
        map.insert(n.wrapping_mul(2_654_435_769), n);
    }
    assert!(vec.iter().map(|(n, _)| *n).eq(0..100_000));
    assert!(queue.iter().copied().eq(33_334..100_000));
    assert!((0..100_000_u32).all(|n| map.get(&n.wrapping_mul(2_654_435_769)) == Some(&n)));
    vec.truncate(10);
    vec.shrink_to_fit();
    assert_eq!((vec.capacity(), Arc::strong_count(&witness)), (10, 11));
    let boxed = vec.clone().into_boxed_slice();
    assert!(boxed.iter().map(|(n, _)| *n).eq(0..10));
    drop(boxed);
    let zeros = Arc::<[u8], A>::new_zeroed_slice_in(200_000, allocator.clone());
    // SAFETY: zeros are bytes.
    assert!(unsafe { zeros.assume_init() }.iter().all(|byte| *byte == 0));
    drop(vec);
    assert_eq!(Arc::strong_count(&witness), 1);
}

#[test]
fn stds_collections_on_all_of_them() {
    let device = device();
    let spans = SpanAllocator::builder(&device).build().unwrap();
    lives(&spans);
    let retry = RetryAllocator::new(spans.clone(), |_| false);
    let stack = StatsAllocator::new(TrackingAllocator::new(LimitedAllocator::new(retry, Bytes::mib(200))));
    lives(&stack);
    assert!(stack.inner().live().is_empty());
    // SAFETY: the host may touch this device's memory.
    lives(&unsafe { spans.clone().into_device_memory().assume_never_dereferenced() });
    let arena = ArenaAllocator::new(spans.clone(), Bytes::mib(1));
    lives(&&arena);
    drop(arena);
    assert_eq!(spans.figures().blocks, 0);
}

#[test]
fn a_large_vector_stays_where_it_is() {
    let device = device();
    let mut vec = Vec::with_capacity_in(16 << 10, SpanAllocator::new(&device).unwrap());
    let address = vec.as_ptr();
    vec.resize(1 << 20, 5_u64);
    assert_eq!(vec.as_ptr(), address);
    assert!(vec.try_reserve(1 << 30).is_err());
    assert!(vec.iter().all(|n| *n == 5));
}
