//! A growth by pieces, under way.

use core::ops::ControlFlow;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::Mutex;

use super::{Region, Told};
use crate::bytes::Bytes;
use crate::driver::DriverResult;
use crate::error::{Error, Result};
use crate::pinned::parallel::in_parts;
use crate::pinned::policy::ThpPolicy;
use crate::pinned::timing::{PinPhase, PinProgress, PinTiming};
use crate::pinned::watch::Watch;
use crate::sys::memory::Gauge;
use crate::sys::{map, pages};

/// How often a prefault looks whether memory is still there, in bytes.
const LOOK: u64 = 256 << 20;

/// What the steps of a growth share.
pub(super) struct Steps<'a> {
    pub(super) gauge: Option<&'a Gauge>,
    pub(super) watch: &'a Watch,
    pub(super) timing: &'a mut PinTiming,
}

/// A growth under way. Dropped, as by a panic of who is told of it, it undoes itself.
pub(super) struct Growth<'a> {
    region: &'a mut Region,
    from: u64,
    end: u64,
    kept: bool,
}

impl<'a> Growth<'a> {
    /// From what is committed up to `end`.
    pub(super) fn begin(region: &'a mut Region, end: u64) -> Self {
        let from = region.committed();
        Self { region, from, end, kept: false }
    }

    /// Does it; what it has done so far is there when it fails.
    pub(super) fn go(&mut self, steps: Steps<'_>, told: Told<'_>) -> Result<()> {
        let Steps { gauge, watch, timing } = steps;
        let began = Instant::now();
        self.map()?;
        timing.map = began.elapsed();
        let began = Instant::now();
        self.prefault(gauge, watch, timing, told)?;
        timing.prefault = began.elapsed();
        let (began, faults) = (Instant::now(), pages::faults());
        self.register(watch, timing, told)?;
        timing.register = began.elapsed();
        timing.register_faults = pages::faults().saturating_sub(faults);
        Ok(())
    }

    fn addr(&self) -> u64 {
        self.region.base + self.from
    }

    fn bytes(&self) -> u64 {
        self.end - self.from
    }

    /// Makes the addresses accessible, with no pages yet.
    fn map(&self) -> Result<()> {
        let (addr, bytes) = (self.addr(), self.bytes());
        let failed = |what| move |source| Error::HostMap { what, asked: Bytes::new(bytes), source };
        // SAFETY: the addresses are reserved by the region, and nothing is there.
        unsafe { map::allow_access(addr, bytes) }.map_err(failed("making addresses accessible"))?;
        // A fork would make the pages read-only to copy them at the next write, which moves them under the device.
        // SAFETY: they are the region's, whose owner does nothing in a child.
        unsafe { map::keep_from_children(addr, bytes) }.map_err(failed("keeping it out of children"))?;
        let huge = match self.region.settings.thp {
            ThpPolicy::Advise => Some(true),
            ThpPolicy::Avoid => Some(false),
            ThpPolicy::Inherit | ThpPolicy::DisableForProcess => None,
        };
        if let Some(huge) = huge {
            // SAFETY: they are the region's.
            match unsafe { pages::advise_huge(addr, bytes, huge) } {
                // A kernel without huge pages knows neither advice.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                result => result.map_err(failed("advising on huge pages"))?,
            }
        }
        if let Some(node) = self.region.settings.node {
            // SAFETY: they are the region's.
            unsafe { pages::prefer_node(addr, bytes, node) }.map_err(|source| Error::NumaNode {
                node,
                known: pages::nodes(),
                source,
            })?;
        }
        Ok(())
    }

    fn prefault(&self, gauge: Option<&Gauge>, watch: &Watch, timing: &mut PinTiming, told: Told<'_>) -> Result<()> {
        let (addr, bytes) = (self.addr(), self.bytes());
        let total = Bytes::new(bytes);
        let (how, retries) = (Mutex::new(None), AtomicU64::new(0));
        let work = |at, len| {
            // SAFETY: each part is the region's, made accessible just now; nobody else knows of it, and each part is one
            // thread's.
            let (done, again) = unsafe { pages::populate(addr + at, len) }.map_err(|source| {
                match gauge.and_then(|gauge| gauge.read().ok()) {
                    Some(memory) if source.raw_os_error() == Some(libc::ENOMEM) => {
                        Error::HostMemory { asked: total, available: memory.available, total: memory.total }
                    }
                    _ => Error::HostMap { what: "putting pages there", asked: total, source },
                }
            })?;
            retries.fetch_add(again, Relaxed);
            let mut how = how.lock();
            *how = how.max(Some(done));
            Ok(())
        };
        let mut looked = 0;
        watch.begin(PinPhase::Prefault, 0, bytes);
        let result = in_parts(self.region.settings.threads, bytes, work, |done| {
            if done - looked >= LOOK {
                looked = done;
                check_room(gauge, bytes, done)?;
            }
            match told(PinProgress { phase: PinPhase::Prefault, done: Bytes::new(done), total }) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(Error::Cancelled { done: Bytes::new(done), asked: total }),
            }
        });
        watch.end();
        timing.threads = result?;
        timing.how = how.into_inner();
        timing.retries_seen = retries.into_inner();
        Ok(())
    }

    /// Registers all of it; only now, since what is put there later moves what is there already.
    fn register(&mut self, watch: &Watch, timing: &mut PinTiming, told: Told<'_>) -> Result<()> {
        let (mut at, total) = (self.from, Bytes::new(self.bytes()));
        let most = self.region.settings.piece;
        while at < self.end {
            // At the same places whatever the history.
            let next = (at / most + 1).saturating_mul(most).min(self.end);
            watch.begin(PinPhase::Register, timing.pieces as usize, next - at);
            let pinned = self.region.pin(next - at);
            watch.end();
            pinned?;
            timing.pieces += 1;
            at = next;
            let done = Bytes::new(at - self.from);
            if told(PinProgress { phase: PinPhase::Register, done, total }).is_break() {
                return Err(Error::Cancelled { done, asked: total });
            }
        }
        Ok(())
    }

    pub(super) fn keep(mut self) {
        self.kept = true;
    }

    /// Lets go of what was registered, from the end, and unmaps it. What the driver does not let go of stays, and counts.
    pub(super) fn undo(mut self) -> DriverResult<()> {
        self.kept = true;
        self.take_back()
    }

    fn take_back(&mut self) -> DriverResult<()> {
        let mut result = Ok(());
        while result.is_ok() && self.region.committed() > self.from {
            result = self.region.unpin_last();
        }
        if let Err(error) = self.region.give_up(self.region.committed(), self.end) {
            let device = self.region.card.id();
            tracing::warn!(%device, %error, "memory of a growth that failed stays mapped until the next one");
        }
        result
    }
}

impl Drop for Growth<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if let Err(error) = self.take_back() {
            tracing::warn!(device = %self.region.card.id(), %error, "a growth that ended in a panic was not undone");
        }
    }
}

/// That the machine and the control groups have room for what is still to come. Without this, a process over its group's
/// limit is killed, not told.
pub(super) fn check_room(gauge: Option<&Gauge>, bytes: u64, done: u64) -> Result<()> {
    let Some(memory) = gauge.and_then(|gauge| gauge.read().ok()) else { return Ok(()) };
    if memory.available.get() >= bytes - done.min(bytes) {
        return Ok(());
    }
    Err(Error::HostMemory { asked: Bytes::new(bytes), available: memory.available, total: memory.total })
}
