//! The crate's promises over HIP, and what only HIP can show, without an AMD card: the driver loads a stand-in library as
//! it would load AMD's. The library holds one runtime in one version, so each personality has a process of its own; and
//! it ends the process at any call that would crash a real runtime, or lose memory in silence.

#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how a test fails, in its helpers too")]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use growspan::driver::DriverErrorKind;
use growspan::driver::hip::HipDriver;
use growspan::{AheadPolicy, Bytes, Device, DeviceOptions, Granularity};

#[path = "../promises/ahead.rs"]
mod ahead;
mod child;
mod devices;
mod examples;
#[path = "../promises/faults.rs"]
mod faults;
mod hangs;
#[path = "../promises/life.rs"]
mod life;
mod limits;
#[path = "../promises/list.rs"]
mod list;
mod loading;
mod odd;
mod personalities;
mod pinned;
#[path = "../promises/pool.rs"]
mod pool;
#[path = "../shared/process.rs"]
mod process;
mod quiesce;
mod rows;
#[path = "../promises/share.rs"]
mod share;
mod stand_in;
mod sweep;
#[path = "../promises/world.rs"]
mod world;

use world::World;

/// What a card's pages are, and so the smallest chunk.
pub(crate) const GRANULE: usize = 2 << 20;

/// How many bytes of free memory may come and go without our doing. The stand-in keeps none for itself.
pub(crate) const SLACK: i64 = 0;

/// How much at each end of a granule is written and compared. All of it would be gigabytes.
pub(crate) const WINDOW: usize = 4096;

/// How many random lives a device sees.
pub(crate) const SEEDS: u64 = 1;

/// Each how many pairs of failures one is tried.
pub(crate) const SPARSE: u64 = 11;

/// How many random steps threads take.
pub(crate) const STEPS: usize = 10_000;

/// What buffers keep ahead where they do.
const AHEAD: AheadPolicy = AheadPolicy::Bytes(Bytes::new(2 * GRANULE as u64));

/// What drivers that keep failing say.
pub(crate) const KINDS: &[DriverErrorKind] = &[DriverErrorKind::Other, DriverErrorKind::OutOfMemory];

pub(crate) use personalities::{expects_a_ladder, expects_virtual_memory};

/// A card as it comes, one as those use it who want virtual memory on older runtimes too, and one in one piece. Each is a
/// device of its own, so that what a test leaves on purpose on one is not missed on another.
pub(crate) fn worlds() -> Vec<World> {
    let over = |name: &str, ordinal, options: DeviceOptions| {
        let driver = HipDriver::open_with(ordinal, personalities::hip_options()).unwrap();
        World::over(name, Arc::new(driver), None, options)
    };
    let all = || DeviceOptions::new().granularity(Granularity::AtLeast2MiB);
    let mut worlds = vec![
        over("hip", 0, DeviceOptions::new()),
        over("hip in 2 MiB chunks or more", 1, all()),
        over("hip in one piece", 2, DeviceOptions::new().contiguous(true)),
    ];
    if worlds.iter().any(World::is_virtual) {
        worlds.push(over("hip without a pool", 3, all().pool_keep(Bytes::ZERO)));
        let driver = HipDriver::open_with(4, personalities::hip_options()).unwrap();
        worlds.push(World::ahead_over("hip", Arc::new(driver), None, all(), AHEAD));
    }
    // Two of the same are one too many.
    if worlds[0].is_virtual() == worlds[1].is_virtual() {
        worlds.remove(1);
    }
    worlds
}

/// Devices with room for a thousand chunks of 2 MiB.
pub(crate) fn large_worlds() -> Vec<World> {
    worlds().into_iter().filter(World::is_virtual).collect()
}

/// A card whose chunks other processes can have.
pub(crate) fn sharing_device() -> Device {
    let driver = HipDriver::open_with(0, personalities::hip_options()).unwrap();
    DeviceOptions::new().granularity(Granularity::AtLeast2MiB).open(Arc::new(driver)).unwrap()
}

/// Reads what is mapped at an address of the card.
pub(crate) fn peek(address: u64, bytes: &mut [u8]) {
    stand_in::StandIn::get().read(address, bytes);
}

/// Tests look at the free memory of the one card, so they run one after the other, however many threads there are.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tests that leave something on purpose: what the driver would not take back, or what was leaked.
const LEAVE_SOMETHING: [&str; 6] = [
    "a_drop_that_cannot_give_back_says_so_and_nothing_else_breaks",
    "lasting_failures_are_accounted_for",
    "lasting_failures_of_a_move_are_accounted_for",
    "leaked_memory_stays_and_is_not_counted_as_given_back",
    "two_failures_cost_no_byte_of_what_is_left",
    "two_failures_of_a_move_cost_no_byte_of_what_is_left",
];

/// Runs a promise; the stand-in must hold after it what it held before.
fn keep(name: &str, promise: fn()) {
    let _alone = alone();
    let figures = || (0..5).map(|device| stand_in::StandIn::get().figures(device)).collect::<Vec<_>>();
    let before = figures();
    promise();
    assert!(LEAVE_SOMETHING.contains(&name) || figures() == before, "left by {name}: {:?}", figures());
}

/// The promises that are kept on any driver, as tests on the stand-in.
macro_rules! on_the_stand_in {
    ($($module:ident { $($name:ident,)* })*) => { $( mod $module { $(
        #[test]
        #[ignore = "for processes that are one personality: `personalities` starts them"]
        fn $name() {
            crate::keep(stringify!($name), crate::$module::$name);
        }
    )* } )* };
}

mod promises {
    crate::list::every_promise! { on_the_stand_in {
        personalities {
            the_verdict_is_the_expected_one,
        }
        quiesce {
            nothing_is_unmapped_under_queued_work,
        }
    } }
}

/// What needs virtual memory and runtimes that can share it.
mod sharing {
    on_the_stand_in! {
        share {
            a_chunk_goes_to_another_process_and_back,
        }
    }
}
