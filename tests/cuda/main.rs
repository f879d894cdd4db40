//! The crate's promises on an NVIDIA card, and what only a card can show: kernels, streams, graphs, contexts.
//!
//! `cargo test --release --features sim --test cuda -- --ignored --test-threads=1`

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "that is how a test fails")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "calls of the CUDA driver, whose preconditions `gpu` writes down"
)]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "as above")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use growspan::driver::DriverErrorKind;
use growspan::driver::cuda::CudaDriver;
use growspan::{AheadPolicy, Bytes, Device, DeviceOptions};

#[path = "../promises/ahead.rs"]
mod ahead;
mod capture;
mod child;
mod contexts;
#[path = "../promises/faults.rs"]
mod faults;
mod gpu;
mod growth;
#[path = "../promises/life.rs"]
mod life;
#[path = "../promises/list.rs"]
mod list;
mod pinned;
#[path = "../promises/pool.rs"]
mod pool;
#[path = "../shared/process.rs"]
mod process;
mod quiesce;
#[path = "../promises/share.rs"]
mod share;
#[path = "../promises/world.rs"]
mod world;

use world::World;

/// The card's own granularity.
pub(crate) const GRANULE: usize = 2 << 20;

/// How many bytes of free memory may come and go without our doing: the driver takes page tables and more for
/// itself, and what one test strands on purpose in each way of using the card is gone from all.
pub(crate) const SLACK: i64 = 128 << 20;

/// How much at each end of a granule is written and compared. All of it would be gigabytes.
pub(crate) const WINDOW: usize = 4096;

/// How many random lives a device sees.
pub(crate) const SEEDS: u64 = 1;

/// How many random steps threads take together.
pub(crate) const STEPS: usize = 2_000;

/// Each how many pairs of failures one is tried.
pub(crate) const SPARSE: u64 = 7;

/// What drivers that keep failing say.
pub(crate) const KINDS: &[DriverErrorKind] = &[DriverErrorKind::Other];

/// Whether any of the devices must have virtual memory, so that no test passes for want of one.
pub(crate) const fn expects_virtual_memory() -> bool {
    true
}

/// Whether any of them must take chunks of mixed sizes.
pub(crate) const fn expects_a_ladder() -> bool {
    true
}
/// What buffers keep ahead where they do.
const AHEAD: AheadPolicy = AheadPolicy::Bytes(Bytes::new(2 * GRANULE as u64));

/// The first card in each way of using it, its driver wrapped in faults.
pub(crate) fn worlds() -> Vec<World> {
    // Holds the context while worlds come and go.
    let _ = gpu::gpu();
    let over = |name, options| World::over(name, Arc::new(CudaDriver::open(0).unwrap()), None, options);
    let options = DeviceOptions::new;
    vec![
        over("cuda", options()),
        over("cuda without a pool", options().pool_keep(Bytes::ZERO)),
        World::ahead_over("cuda", Arc::new(CudaDriver::open(0).unwrap()), None, options(), AHEAD),
        over("cuda, contiguous", options().contiguous(true)),
    ]
}

/// Devices with room for a thousand chunks of 2 MiB.
pub(crate) fn large_worlds() -> Vec<World> {
    worlds().into_iter().filter(World::is_virtual).collect()
}

/// The card, whose chunks other processes can have.
pub(crate) fn sharing_device() -> Device {
    let _ = gpu::gpu();
    DeviceOptions::new().cuda(0).unwrap()
}

/// Reads what is mapped at an address of the card.
pub(crate) fn peek(address: u64, bytes: &mut [u8]) {
    gpu::gpu().read(address, bytes);
}

/// Tests look at the free memory of the one card, so they run one after the other, however many threads there are.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The promises that are kept on any driver, and those that need a card, as tests on the card.
macro_rules! on_the_card {
    ($($module:ident { $($name:ident,)* })*) => { $( mod $module { $(
        #[test]
        #[ignore = "needs an NVIDIA card"]
        fn $name() {
            let _alone = super::super::alone();
            let started = std::time::Instant::now();
            crate::$module::$name();
            println!("{} took {:?}", stringify!($name), started.elapsed());
        }
    )* } )* };
}

mod card {
    crate::list::every_promise! { on_the_card {
        growth {
            the_card_gets_virtual_memory,
            properties_are_tried_one_by_one,
            a_thousand_cycles_give_everything_back,
            two_devices_of_one_card_give_way_to_each_other,
            kernels_write_and_read_across_chunks_while_a_buffer_grows,
            eight_caches_grow_by_small_steps_under_a_stream,
            all_but_one_gibibyte_and_back,
        }
        contexts {
            the_callers_context_stays_current,
            two_threads_with_contexts_of_their_own,
            two_cards_keep_their_memory_apart,
            a_reset_by_other_code_is_an_error_everywhere,
            a_process_may_end_with_live_buffers,
        }
        capture {
            a_graph_replays_after_growing_and_after_shrinking,
            growing_while_a_stream_captures,
            shrinking_behind_a_capturing_stream_is_an_error_and_no_harm,
            what_is_dropped_during_a_capture_goes_after_it,
        }
        quiesce {
            the_device_is_waited_for,
            a_stream_is_waited_for,
            an_event_is_waited_for,
            a_deferred_shrink_leaves_queued_work_alone,
            without_waiting_the_context_is_lost,
        }
        pinned {
            kernels_and_copies_cross_the_borders_of_pieces,
            page_locked_memory_outlives_the_work_on_it,
            a_failed_growth_gives_its_pieces_back,
            an_allocator_s_page_locked_blocks_are_the_card_s_too,
        }
        share {
            a_chunk_goes_to_another_process_and_back,
        }
    } }
}
