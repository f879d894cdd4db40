//! The crate's promises, on every driver that needs no GPU and in every personality of the simulated one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how a test fails, in its helpers too")]

use growspan::driver::DriverErrorKind;

mod ahead;
mod background;
mod deferred;
mod drivers;
mod edges;
mod faults;
mod life;
mod limits;
mod list;
mod neighbours;
mod only_here;
mod orphans;
mod policy;
mod pool;
mod regressions;
mod share;
mod verdicts;
mod world;

pub(crate) use drivers::{large_worlds, peek, sharing_device, worlds};

/// The chunks of most tests. Small, so that real memory is quickly had; the ladder is the same at every scale.
pub(crate) const GRANULE: usize = 64 << 10;

/// How many bytes of free memory may come and go without our doing. These drivers keep none for themselves.
pub(crate) const SLACK: i64 = 0;

/// How much at each end of a granule is written and compared: all of it.
pub(crate) const WINDOW: usize = GRANULE;

/// How many random lives a device sees.
pub(crate) const SEEDS: u64 = 3;

/// How many random steps threads take together.
pub(crate) const STEPS: usize = 10_000;

/// Each how many pairs of failures one is tried.
pub(crate) const SPARSE: u64 = 1;

/// What drivers that keep failing say.
pub(crate) const KINDS: &[DriverErrorKind] =
    &[DriverErrorKind::Other, DriverErrorKind::OutOfMemory, DriverErrorKind::OutOfFiles];

/// Whether any of the devices must have virtual memory, so that no test passes for want of one.
pub(crate) const fn expects_virtual_memory() -> bool {
    true
}

/// Whether any of them must take chunks of mixed sizes.
pub(crate) const fn expects_a_ladder() -> bool {
    true
}

/// The promises that are kept on any driver, as tests on these.
macro_rules! on_every_driver {
    ($($module:ident { $($name:ident,)* })*) => { mod on_every_driver { $($(
        #[test]
        fn $name() {
            crate::$module::$name();
        }
    )*)* } };
}

crate::list::every_promise! { on_every_driver {
    share {
        a_chunk_goes_to_another_process_and_back,
    }
} }
