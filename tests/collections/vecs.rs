//! allocator-api2's `Vec` and `Box`, of both versions.

use growspan::{DeviceAllocator, PointerAllocator, RawAllocator, SpanAllocator, StatsAllocator};

use crate::{Dice, allocators, assert_empty};

/// The same tests for each version of the crate.
macro_rules! of_version {
    ($name:ident, $api:ident) => {
        mod $name {
            use std::rc::Rc;

            use $api::alloc::Allocator;
            use $api::boxed::Box as BoxIn;
            use $api::vec::Vec as VecIn;

            use super::*;

            fn vec_life<A: Allocator + Clone>(allocator: &A, seed: u64) {
                let mut dice = Dice(seed);
                // With destructors: what is dropped twice or never shows in the count.
                let witness = Rc::new(());
                let mut ours: VecIn<(u32, Rc<()>), A> = VecIn::new_in(allocator.clone());
                let mut theirs: Vec<u32> = Vec::new();
                for step in 0..6000_u32 {
                    let at = dice.roll(theirs.len() + 1);
                    match dice.roll(14) {
                        0..=5 => {
                            ours.push((step, Rc::clone(&witness)));
                            theirs.push(step);
                        }
                        6 => {
                            ours.insert(at, (step, Rc::clone(&witness)));
                            theirs.insert(at, step);
                        }
                        7 if at < theirs.len() => assert_eq!(ours.remove(at).0, theirs.remove(at)),
                        8 => assert_eq!(ours.pop().map(|(n, _)| n), theirs.pop()),
                        9 => {
                            let count = dice.roll(300) as u32;
                            ours.extend((0..count).map(|n| (n, Rc::clone(&witness))));
                            theirs.extend(0..count);
                        }
                        10 => ours.reserve(dice.roll(9000)),
                        11 => ours.shrink_to_fit(),
                        12 if dice.roll(4) == 0 => {
                            ours.truncate(at);
                            theirs.truncate(at);
                        }
                        13 if dice.roll(4) == 0 => {
                            let tail = ours.split_off(at);
                            let expected = theirs.split_off(at);
                            assert!(tail.iter().map(|(n, _)| n).eq(&expected));
                            ours.extend(tail.iter().cloned());
                            theirs.extend(expected);
                        }
                        _ => {}
                    }
                    assert_eq!((ours.len(), Rc::strong_count(&witness)), (theirs.len(), theirs.len() + 1));
                    if step % 200 == 0 {
                        assert!(ours.iter().map(|(n, _)| n).eq(&theirs));
                    }
                }
                assert!(ours.iter().map(|(n, _)| n).eq(&theirs));
                drop(ours);
                assert_eq!(Rc::strong_count(&witness), 1);
            }

            #[test]
            fn vectors_agree_with_std() {
                for (device, allocator) in allocators() {
                    for seed in 0..3 {
                        vec_life(&allocator, seed);
                    }
                    assert_empty(&device, allocator);
                }
            }

            #[test]
            fn a_vector_keeps_its_address_from_the_threshold_on() {
                let (_, allocator) = allocators().swap_remove(0);
                let stats = StatsAllocator::new(allocator);
                let mut vec: VecIn<u64, _> = VecIn::with_capacity_in(8 << 10, stats.clone());
                let address = vec.as_ptr();
                (0..4 << 20).for_each(|n| vec.push(n));
                assert_eq!(vec.as_ptr(), address);
                assert!(vec.iter().copied().eq(0..4 << 20));
                vec.truncate(100);
                vec.shrink_to(10_000);
                assert_eq!(vec.as_ptr(), address);
                let stats = stats.stats();
                assert!(stats.grows_in_place > 5 && stats.grows_moved == 0 && stats.shrinks == 1, "{stats}");
            }

            #[test]
            fn boxes_of_all_kinds() {
                for (device, allocator) in allocators() {
                    let number = BoxIn::new_in(7_u64, allocator.clone());
                    let nothing = BoxIn::new_in((), allocator.clone());
                    let large = BoxIn::new_in([9_u8; 200_000], allocator.clone());
                    let zeroed = BoxIn::<[u64; 3000], _>::new_zeroed_in(allocator.clone());
                    // SAFETY: zeros are numbers.
                    let zeroed = unsafe { zeroed.assume_init() };
                    assert_eq!((*number, *nothing), (7, ()));
                    assert!(large.iter().all(|byte| *byte == 9) && zeroed.iter().all(|number| *number == 0));
                    let mut slice = VecIn::new_in(allocator.clone());
                    slice.extend(0..100_u8);
                    let slice: BoxIn<[u8], _> = slice.into_boxed_slice();
                    assert_eq!(slice.len(), 100);
                    drop((number, nothing, large, zeroed, slice));
                    assert_empty(&device, allocator);
                }
            }

            /// The allocator goes before its box: the box keeps it.
            #[test]
            fn a_box_keeps_its_allocator() {
                let (device, allocator) = allocators().swap_remove(0);
                let mut kept = BoxIn::new_in([1_u8; 100_000], allocator);
                drop(device);
                kept.fill(2);
                let leaked: &mut [u8; 100_000] = BoxIn::leak(kept);
                leaked.fill(3);
                assert!(leaked.iter().all(|byte| *byte == 3));
            }
        }
    };
}

of_version! { version_02, allocator_api2_02 }
of_version! { version_04, allocator_api2_04 }

/// Every allocator of the crate is an `Allocator` of both versions.
#[test]
fn both_traits_are_there() {
    fn both<
        A: allocator_api2_02::alloc::Allocator + allocator_api2_04::alloc::Allocator + RawAllocator + PointerAllocator,
    >() {
    }
    both::<SpanAllocator>();
    both::<DeviceAllocator>();
    both::<growspan::LimitedAllocator<DeviceAllocator>>();
    both::<growspan::TrackingAllocator<StatsAllocator<SpanAllocator>>>();
    both::<growspan::RetryAllocator<SpanAllocator>>();
    both::<growspan::ArenaAllocator<SpanAllocator>>();
    both::<&growspan::ArenaAllocator<SpanAllocator>>();
}

/// A vector of a device's memory: grown where it is, asked for its address, and never touched.
#[cfg(feature = "sim")]
#[test]
fn a_vector_of_a_card() {
    use allocator_api2_04::vec::Vec as VecIn;
    use growspan::driver::sim::SimDriver;

    let sim = SimDriver::builder().total(growspan::Bytes::gib(1)).build();
    let device = growspan::Device::from_driver(sim.driver()).unwrap();
    let allocator = SpanAllocator::builder(&device).build_on_device().unwrap();
    // SAFETY: the vector's memory is only reached by the allocator's own copies.
    let allocator = unsafe { allocator.assume_never_dereferenced() };
    let mut vec: VecIn<f32, _> = VecIn::with_capacity_in(1 << 20, allocator.clone());
    let address = vec.as_ptr();
    for capacity in [2 << 20, 9 << 20, 64 << 20] {
        vec.reserve_exact(capacity - vec.len());
        assert_eq!((vec.as_ptr(), vec.capacity()), (address, capacity));
        // SAFETY: floats have no destructor, and nobody reads them.
        unsafe { vec.set_len(capacity / 2) };
    }
    vec.truncate(1 << 20);
    vec.shrink_to_fit();
    assert_eq!(vec.as_ptr(), address);
    assert_eq!(allocator.spans().figures().bytes_committed, growspan::Bytes::mib(4));
    drop((vec, allocator, device));
    sim.assert_clean();
}
