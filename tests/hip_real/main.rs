//! The crate's promises on AMD's own HIP runtime: on a machine with AMD cards, or on cards that `ci/real-hip.sh` pretends
//! beneath the real runtime (`REAL_HIP_STUB=1`).
//!
//! `cargo test --release --features sim --test hip_real -- --ignored --test-threads=1`

#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how a test fails, in its helpers too")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use growspan::driver::DriverErrorKind;
use growspan::driver::hip::HipDriver;
use growspan::{AheadPolicy, Bytes, DeviceOptions, Granularity};

#[path = "../promises/ahead.rs"]
mod ahead;
#[path = "../promises/faults.rs"]
mod faults;
#[path = "../promises/life.rs"]
mod life;
#[path = "../promises/pool.rs"]
mod pool;
#[path = "../promises/world.rs"]
mod world;

use world::World;

/// What a card's pages are, and so the smallest chunk.
pub(crate) const GRANULE: usize = 2 << 20;

/// How many bytes of free memory may come and go without our doing: the runtime takes memory for copies, and gives back
/// what it frees a little later.
pub(crate) const SLACK: i64 = 64 << 20;

/// How much at each end of a granule is written and compared. All of it would be gigabytes.
pub(crate) const WINDOW: usize = 4096;

/// How many random lives a device sees.
pub(crate) const SEEDS: u64 = 1;

/// Each how many pairs of failures one is tried.
pub(crate) const SPARSE: u64 = 7;

/// How many random steps threads take.
pub(crate) const STEPS: usize = 10_000;

/// What buffers keep ahead where they do.
const AHEAD: AheadPolicy = AheadPolicy::Bytes(Bytes::new(2 * GRANULE as u64));

/// What drivers that keep failing say.
pub(crate) const KINDS: &[DriverErrorKind] = &[DriverErrorKind::Other];

/// Each way of using a card, on cards of their own where there are enough. Runtimes that map in 4 KiB are used too.
pub(crate) fn worlds() -> Vec<World> {
    let cards = HipDriver::count().unwrap();
    let over = |name, n, options: DeviceOptions| {
        let driver = HipDriver::open(n % cards).unwrap();
        World::over(name, Arc::new(driver), None, options.granularity(Granularity::AtLeast2MiB))
    };
    let ahead = {
        let driver = HipDriver::open(3 % cards).unwrap();
        World::ahead_over(
            "hip",
            Arc::new(driver),
            None,
            DeviceOptions::new().granularity(Granularity::AtLeast2MiB),
            AHEAD,
        )
    };
    vec![
        ahead,
        over("hip", 0, DeviceOptions::new()),
        over("hip without a pool", 1, DeviceOptions::new().pool_keep(Bytes::ZERO)),
        over("hip in one piece", 2, DeviceOptions::new().contiguous(true)),
    ]
}

/// Devices with room for a thousand chunks of 2 MiB.
pub(crate) fn large_worlds() -> Vec<World> {
    worlds().into_iter().filter(World::is_virtual).collect()
}

/// Whether any of the devices must have virtual memory, so that no test passes for want of one.
pub(crate) const fn expects_virtual_memory() -> bool {
    true
}

/// Whether any of them must take chunks of mixed sizes: not one that the table says cannot.
pub(crate) fn expects_a_ladder() -> bool {
    let device = DeviceOptions::new().granularity(Granularity::AtLeast2MiB).hip(0).unwrap();
    !device.verdict().quirks().uniform_chunks_only
}

/// Tests look at the free memory of the same cards, so they run one after the other, however many threads there are.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Every step of the check passes on every card, however it is asked.
fn every_card_gets_virtual_memory() {
    let options = || DeviceOptions::new().granularity(Granularity::AtLeast2MiB);
    for ordinal in 0..HipDriver::count().unwrap() {
        let device = options().hip(ordinal).unwrap();
        println!("{}: {}\n{}", device.info().id(), device.info().runtime, device.verdict().report());
        assert_eq!(device.verdict().reason().map(ToString::to_string), None);
    }
}

/// The promises that are kept on any driver, as tests on the runtime.
macro_rules! on_the_runtime {
    ($($module:ident { $($name:ident,)* })*) => { $( mod $module { $(
        #[test]
        #[ignore = "needs an AMD card, or ci/real-hip.sh with REAL_HIP_STUB=1"]
        fn $name() {
            let _alone = crate::alone();
            crate::$module::$name();
        }
    )* } )* };
}

/// What only this program has.
mod verdict {
    pub(crate) use crate::every_card_gets_virtual_memory;
}

mod promises {
    on_the_runtime! {
        verdict {
            every_card_gets_virtual_memory,
        }
        life {
            random_lives_keep_address_contents_and_books,
            sizes_at_every_edge,
            fallbacks_do_as_they_say,
            what_one_buffer_gives_up_the_next_takes_without_a_new_chunk,
            two_threads_on_buffers_of_one_device,
            overlapping_copies_on_a_device,
            odd_elements_straddle_chunks,
            exact_shrinks_give_every_granule_back_and_keep_the_contents,
            a_range_of_1100_chunks_maps_whole,
            members_of_a_set_out_of_step,
            leaked_memory_stays_and_is_not_counted_as_given_back,
            copies_and_fills_on_a_stream,
            hooks_are_told_of_every_chunk,
        }
        ahead {
            what_is_ahead_takes_no_call,
            as_much_is_ahead_as_was_asked_for_and_no_more,
            flushing_and_shrinking_give_back_what_is_ahead,
            a_failure_in_the_background_is_said_once_and_costs_nothing,
            a_shortage_in_the_background_is_not_said,
            a_buffer_may_shrink_and_go_while_memory_is_mapped_ahead_of_it,
            threads_with_the_background_among_them,
            a_set_grows_inside_what_is_ahead_of_its_members,
        }
        pool {
            a_failed_move_changes_nothing,
            two_failures_of_a_move_cost_no_byte_of_what_is_left,
            lasting_failures_of_a_move_are_accounted_for,
            a_loan_moves_chunks_and_nothing_else,
            lender_and_borrower_go_in_any_order,
            cuts_leave_chunks_that_fit_elsewhere,
            coalescing_makes_the_ladders_chunks_of_small_ones,
            coalescing_does_what_memory_allows,
            a_prewarmed_pool_has_what_a_buffer_takes,
        }
        faults {
            a_failed_operation_changes_nothing,
            building_and_dropping_survive_any_failed_call,
            a_set_grows_as_one_or_not_at_all,
            two_failures_cost_no_byte_of_what_is_left,
            lasting_failures_are_accounted_for,
            a_drop_that_cannot_give_back_says_so_and_nothing_else_breaks,
        }
    }
}
