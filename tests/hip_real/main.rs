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
#[path = "../promises/list.rs"]
mod list;
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
    crate::list::every_promise! { on_the_runtime {
        verdict {
            every_card_gets_virtual_memory,
        }
    } }
}
