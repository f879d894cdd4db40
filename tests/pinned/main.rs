//! Page-locked memory on host memory and on the simulated driver: what is in it, what a failure leaves, what it waits for,
//! and what the kernel says of it.

#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how a test fails, in its helpers too")]

use std::sync::Arc;

use growspan::driver::Driver;
use growspan::driver::fault::{FaultControl, FaultPlan, Faulty};
use growspan::driver::host::{HostDriver, HostOptions};
use growspan::driver::sim::SimDriver;
use growspan::pinned::PinnedBuffer;
use growspan::{Bytes, Device};

mod allocator;
mod child;
mod contents;
mod failures;
mod fills;
mod kernel;
#[path = "../shared/process.rs"]
mod process;
#[path = "../shared/seccomp.rs"]
mod seccomp;
mod waits;

pub(crate) const MIB: usize = 1 << 20;

/// A device whose driver fails as planned.
pub(crate) struct World {
    pub(crate) name: &'static str,
    pub(crate) device: Device,
    pub(crate) control: FaultControl,
    /// What looks on, where something does.
    pub(crate) sim: Option<SimDriver>,
}

impl World {
    fn over(name: &'static str, driver: Arc<dyn Driver>, sim: Option<SimDriver>) -> Self {
        let faulty = Faulty::new(driver, FaultPlan::count());
        let control = faulty.control();
        control.disarm();
        Self { name, device: Device::from_driver(Arc::new(faulty)).unwrap(), control, sim }
    }

    pub(crate) fn host() -> Self {
        let driver = HostDriver::open(HostOptions::default().with_capacity(Bytes::mib(64))).unwrap();
        Self::over("host", Arc::new(driver), None)
    }

    pub(crate) fn sim() -> Self {
        let sim = SimDriver::new();
        Self::over("sim", sim.driver(), Some(sim))
    }

    pub(crate) fn all() -> [Self; 2] {
        [Self::host(), Self::sim()]
    }

    /// How many pieces the driver has locked, where it tells.
    pub(crate) fn pins(&self) -> Option<u64> {
        self.sim.as_ref().map(|sim| sim.figures().pins)
    }

    /// That nothing is left and nothing was done against the rules.
    pub(crate) fn assert_clean(&self) {
        if let Some(sim) = &self.sim {
            sim.assert_clean();
        }
    }
}

/// A buffer with room for `max` elements, in pieces of 2 MiB.
pub(crate) fn small_pieces<T>(device: &Device, max: usize) -> PinnedBuffer<T> {
    PinnedBuffer::builder(device).max_len(max).piece(Bytes::mib(2)).build().unwrap()
}
