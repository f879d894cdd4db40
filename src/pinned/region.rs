//! Page-locked memory by bytes: a span of the host's addresses, and the pieces of it that the driver knows.
//!
//! ```text
//! span    |<------------------------ reserved: PROT_NONE, no memory ------------------------>|
//! pieces  |      0      |      1      |   2   |                                              |
//!         ^ base                              ^ committed
//! ```
//!
//! A growth makes the next part of the span accessible, puts pages under it, registers it piece by piece, and only then
//! counts it in; whatever ends it earlier undoes all of it. A shrink lets go of pieces from the end, and puts the bare
//! reservation back in one call.

use core::ops::ControlFlow;
use core::time::Duration;
use std::io;
use std::sync::Arc;
use std::time::Instant;

mod growth;

use super::parallel::in_parts;
use super::policy::{PinStrategy, ThpPolicy};
use super::timing::{PinPhase, PinProgress, PinTiming};
use super::watch::{Patience, Watch};
use crate::bytes::Bytes;
use crate::card::{Card, Orphan, is_gone, not_idle, twice};
use crate::driver::{Call, DriverError, DriverErrorKind, DriverResult, Gate, PinFlags};
use crate::error::{Error, Result};
use crate::quiesce::Quiesce;
use crate::sys::memory::Gauge;
use crate::sys::thp::ThpOff;
use crate::sys::vmstat::Vmstat;
use crate::sys::{map, pages};
use growth::{Growth, Steps, check_room};

/// A huge page: what spans are aligned to, and growths above it are multiples of.
pub(super) const HUGE: u64 = 2 << 20;

/// From here on, pages are given back by many threads.
const MANY: u64 = 4 << 30;

/// Who is told how far it has come, and says whether to go on.
pub(super) type Told<'a> = &'a mut dyn FnMut(PinProgress) -> ControlFlow<()>;

/// How memory is had.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) strategy: PinStrategy,
    pub(super) flags: PinFlags,
    pub(super) thp: ThpPolicy,
    pub(super) threads: usize,
    pub(super) node: Option<u32>,
    /// The most that is registered at once, a multiple of [`HUGE`].
    pub(super) piece: u64,
    pub(super) patience: Option<Duration>,
}

/// A piece: what the driver knows as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedPiece {
    /// Where it begins in the buffer, in bytes.
    pub offset: Bytes,
    /// Its size.
    pub bytes: Bytes,
    /// Where the host sees it.
    pub host_ptr: u64,
    /// Where the device sees it, if it is mapped there.
    pub device_ptr: Option<u64>,
}

impl PinnedPiece {
    const fn end(&self) -> u64 {
        self.offset.get() + self.bytes.get()
    }

    /// Where the device sees the first of these, if it sees all of them one after the other.
    pub(crate) fn in_a_row(pieces: &[Self]) -> Option<u64> {
        let first = pieces.first()?.device_ptr?;
        pieces.iter().all(|piece| piece.device_ptr == first.checked_add(piece.offset.get())).then_some(first)
    }
}

#[derive(Debug)]
pub(super) struct Region {
    card: Arc<Card>,
    settings: Settings,
    /// Zero before a driver has allocated it.
    base: u64,
    reserved: u64,
    /// One after the other from the base on.
    pieces: Vec<PinnedPiece>,
}

impl Region {
    /// Reserves addresses for `bytes`, which are rounded up to pages.
    pub(super) fn reserve(card: &Arc<Card>, bytes: u64, settings: Settings) -> Result<Self> {
        let overflow = || Error::Overflow { what: "page-locked memory", count: bytes, size: 1 };
        let page = map::page_size();
        let reserved = bytes.checked_next_multiple_of(page).ok_or_else(overflow)?;
        let base = match settings.strategy {
            PinStrategy::Driver => 0,
            PinStrategy::Pieces => map::reserve(reserved, HUGE).map_err(|error| Error::Reserve {
                asked: Bytes::new(reserved),
                source: DriverError::new(Call::Reserve, DriverErrorKind::OutOfAddresses).with_detail(error.to_string()),
            })?,
        };
        let card = Arc::clone(card);
        Ok(Self { card, settings, base, reserved, pieces: Vec::new() })
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    pub(super) fn reserved(&self) -> u64 {
        self.reserved
    }

    pub(super) fn committed(&self) -> u64 {
        self.pieces.last().map_or(0, PinnedPiece::end)
    }

    pub(super) fn pieces(&self) -> &[PinnedPiece] {
        &self.pieces
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Gets memory for the first `bytes`, if there is not as much.
    pub(super) fn grow(&mut self, bytes: u64, told: Told<'_>) -> Result<PinTiming> {
        if bytes <= self.committed() {
            return Ok(PinTiming::default());
        }
        if self.card.gate().is_forked() {
            return Err(Error::Forked);
        }
        self.card.check_capture(None)?;
        let unit = if bytes < HUGE { map::page_size() } else { HUGE };
        let end = match self.settings.strategy {
            PinStrategy::Driver => self.reserved,
            PinStrategy::Pieces => bytes.next_multiple_of(unit).min(self.reserved),
        };
        let more = end - self.committed();
        let began = Instant::now();
        let before = Vmstat::read().ok();
        let gauge = Gauge::find().ok();
        check_room(gauge.as_ref(), more, 0)?;
        let patience = Patience { asked: self.settings.patience };
        let device = self.card.id();
        let mut timing = PinTiming { bytes: Bytes::new(more), ..PinTiming::default() };
        let (result, slow) = Watch::over(patience, more, &device, gauge.as_ref(), |watch| {
            let _off = match self.settings.thp {
                ThpPolicy::DisableForProcess => Some(ThpOff::enter().map_err(|source| Error::ThpRefused { source })?),
                _ => None,
            };
            let steps = Steps { gauge: gauge.as_ref(), watch, timing: &mut timing };
            match self.settings.strategy {
                PinStrategy::Pieces => self.grow_in_pieces(end, steps, told),
                PinStrategy::Driver => self.allocate(steps, told),
            }
        });
        timing.slow = slow;
        result?;
        timing.total = began.elapsed();
        if let (Some(before), Ok(now)) = (before, Vmstat::read()) {
            timing.vmstat = now.since(&before);
        }
        tracing::debug!(%device, committed = %Bytes::new(self.committed()), %timing, "page-locked");
        Ok(timing)
    }

    /// One allocation of the driver's for all that can ever be asked for.
    fn allocate(&mut self, steps: Steps<'_>, told: Told<'_>) -> Result<()> {
        let Steps { watch, timing, .. } = steps;
        let (bytes, gate) = (self.reserved, self.card.gate());
        let (began, faults) = (Instant::now(), pages::faults());
        watch.begin(PinPhase::Allocate, 0, bytes);
        let allocated = gate.allocate_pinned(bytes, self.settings.flags);
        watch.end();
        let addr = allocated.map_err(|error| self.explain(error, bytes))?;
        timing.register = began.elapsed();
        timing.register_faults = pages::faults().saturating_sub(faults);
        timing.pieces = 1;
        let free = |device: &Self| {
            // SAFETY: it was allocated just now with this size, and nobody knows of it.
            if let Err(error) = twice(|| unsafe { gate.free_pinned(addr, bytes) }) {
                tracing::warn!(device = %device.card.id(), %error, "page-locked memory that was not wanted stays");
            }
        };
        if addr == 0 || !addr.is_multiple_of(map::page_size()) {
            free(self);
            let detail = format!("the driver returned success and {addr:#x}, which is no address of a page");
            return Err(DriverError::new(Call::AllocatePinned, DriverErrorKind::Other).with_detail(detail).into());
        }
        // SAFETY: it was allocated just now.
        let device_ptr = match unsafe { device_ptr_of(gate, addr, self.settings.flags) } {
            Ok(device_ptr) => device_ptr,
            Err(error) => {
                free(self);
                return Err(error.into());
            }
        };
        let all = Bytes::new(bytes);
        if told(PinProgress { phase: PinPhase::Allocate, done: all, total: all }).is_break() {
            free(self);
            return Err(Error::Cancelled { done: all, asked: all });
        }
        self.base = addr;
        self.pieces.push(PinnedPiece { offset: Bytes::ZERO, bytes: all, host_ptr: addr, device_ptr });
        Ok(())
    }

    fn grow_in_pieces(&mut self, end: u64, steps: Steps<'_>, told: Told<'_>) -> Result<()> {
        let mut growth = Growth::begin(self, end);
        let result = growth.go(steps, told);
        match result {
            Ok(()) => {
                growth.keep();
                Ok(())
            }
            Err(error) => Err(match growth.undo() {
                Ok(()) => error,
                Err(then) => Error::from(then).after(error),
            }),
        }
    }

    fn explain(&self, error: DriverError, bytes: u64) -> Error {
        let host = Gauge::find().and_then(|gauge| gauge.read());
        match (error.kind(), host) {
            (DriverErrorKind::OutOfMemory, Ok(memory)) => {
                let (asked, available, total) = (Bytes::new(bytes), memory.available, memory.total);
                tracing::debug!(device = %self.card.id(), %error, %asked, %available, "no page-locked memory");
                Error::Driver(error.with_detail(format!("{asked} asked, {available} of {total} available on the host")))
            }
            _ => error.into(),
        }
    }

    /// Locks the next piece and finds where the device sees it. A piece that could be locked, not used, and not let go of
    /// again is in the list nevertheless.
    fn pin(&mut self, bytes: u64) -> Result<()> {
        let offset = self.committed();
        let addr = self.base + offset;
        // SAFETY: the callers have made the next `bytes` accessible, or have just let the driver go of them; a piece is in
        // the list as long as it is locked, and what is in the list is not unmapped.
        unsafe { self.card.gate().pin(addr, bytes, self.settings.flags) }
            .map_err(|error| self.explain(error, bytes))?;
        let (offset, bytes) = (Bytes::new(offset), Bytes::new(bytes));
        let mut piece = PinnedPiece { offset, bytes, host_ptr: addr, device_ptr: None };
        // SAFETY: it was locked just now.
        let result = unsafe { device_ptr_of(self.card.gate(), addr, self.settings.flags) };
        let result = result.map(|device_ptr| piece.device_ptr = device_ptr);
        self.pieces.push(piece);
        result.map_err(|error| match self.unpin_last() {
            Ok(()) => error.into(),
            Err(then) => Error::from(then).after(error.into()),
        })
    }

    /// Lets go of the last piece, which the device is done with.
    fn unpin_last(&mut self) -> DriverResult<()> {
        let Some(piece) = self.pieces.last() else { return Ok(()) };
        // SAFETY: the piece is locked as long as it is in the list, and the callers see to it that the device is done.
        match twice(|| unsafe { self.card.gate().unpin(piece.host_ptr, piece.bytes.get()) }) {
            Err(error) if !is_gone(&error) => return Err(error),
            _ => {}
        }
        self.pieces.pop();
        Ok(())
    }

    /// Puts the bare reservation back over what is not committed, up to `end`.
    fn give_up(&self, from: u64, end: u64) -> io::Result<()> {
        if from >= end {
            return Ok(());
        }
        discard(self.base + from, end - from, self.settings.threads);
        // SAFETY: the addresses are this region's, and the callers have let the driver go of them and know that nobody
        // refers to them.
        unsafe { map::reserve_at(self.base + from, end - from) }
    }

    /// Gives up all pieces that lie wholly beyond the first `bytes`; with `exact`, the part of the last one that does
    /// too. Only for memory of our own.
    pub(super) fn shrink(&mut self, bytes: u64, exact: bool, quiesce: &Quiesce<'_>) -> Result<()> {
        quiesce.check(&self.card)?;
        let before = self.committed();
        let keep = if exact { bytes.next_multiple_of(map::page_size()) } else { bytes };
        let goes = |piece: &PinnedPiece| if exact { piece.end() > keep } else { piece.offset.get() >= keep };
        let Some(first) = self.pieces.iter().position(goes).filter(|_| self.settings.strategy == PinStrategy::Pieces)
        else {
            return Ok(());
        };
        if self.card.gate().is_forked() {
            return Err(Error::Forked);
        }
        self.card.check_capture(None)?;
        quiesce.wait(&self.card)?;
        let gone = self.pieces[first..].to_vec();
        let head = keep.saturating_sub(gone.first().map_or(keep, |piece| piece.offset.get()));
        let result = self.let_go(first).and_then(|()| if head > 0 { self.pin(head) } else { Ok(()) });
        let result = result.map_err(|error| match self.pin_again(&gone) {
            Ok(()) => error,
            // What could not be locked again is given up, as if it had been shrunk away.
            Err(then) => then.after(error),
        });
        if let Err(error) = self.give_up(self.committed(), before) {
            // It is there and nobody's, and the next growth takes it.
            tracing::warn!(device = %self.card.id(), %error, "memory that is not locked any more stays mapped");
        }
        result
    }

    /// Lets go of all pieces from number `first` on.
    fn let_go(&mut self, first: usize) -> Result<()> {
        while self.pieces.len() > first {
            self.unpin_last()?;
        }
        Ok(())
    }

    /// Locks those of these pieces again that are not in the list any more.
    fn pin_again(&mut self, gone: &[PinnedPiece]) -> Result<()> {
        for piece in gone {
            if piece.offset.get() >= self.committed() {
                self.pin(piece.bytes.get())?;
            }
        }
        Ok(())
    }

    /// Gives everything back, once the device is idle.
    pub(super) fn close(&mut self) -> Result<()> {
        if self.reserved == 0 {
            return Ok(());
        }
        let mut remains = Remains {
            card: Arc::clone(&self.card),
            base: self.base,
            reserved: core::mem::take(&mut self.reserved),
            committed: self.committed(),
            pieces: core::mem::take(&mut self.pieces),
            strategy: self.settings.strategy,
            threads: self.settings.threads,
        };
        if remains.pieces.is_empty() || self.card.quiet() {
            return remains.give_back();
        }
        let bytes = Bytes::new(remains.committed);
        self.card.adopt(Box::new(remains));
        Err(Error::NotReturned { bytes, source: not_idle() })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // A forked child has none of it, and another thread may have held our locks.
        if self.reserved == 0 || self.card.gate().is_forked() {
            return;
        }
        if let Err(error) = self.close() {
            tracing::warn!(device = %self.card.id(), %error, "page-locked memory was dropped and did not come back");
        }
    }
}

/// Where the device sees an address, if it was asked for and there is a place.
///
/// # Safety
/// `addr` lies in memory that is page-locked with these flags.
pub(super) unsafe fn device_ptr_of(gate: &Gate, addr: u64, flags: PinFlags) -> DriverResult<Option<u64>> {
    if !flags.mapped {
        return Ok(None);
    }
    // SAFETY: the contract is the same, and it is mapped.
    match unsafe { gate.pinned_device_ptr(addr) } {
        Ok(device_ptr) => Ok(Some(device_ptr)),
        Err(error) if error.kind() == DriverErrorKind::NotSupported => Ok(None),
        Err(error) => Err(error),
    }
}

/// Gives pages back by many threads, where it is worth it; what is left goes with the mapping.
fn discard(addr: u64, bytes: u64, threads: usize) {
    if bytes < MANY {
        return;
    }
    // SAFETY: the callers give these addresses up, and have let the driver go of them.
    let work = |at, len| unsafe { pages::discard(addr + at, len) };
    if let Err(error) = in_parts(threads, bytes, work, |_| Ok(())) {
        tracing::debug!(%error, "pages go with their mapping, by one thread");
    }
}

/// What is left of a region whose buffer is gone.
#[derive(Debug)]
struct Remains {
    card: Arc<Card>,
    base: u64,
    reserved: u64,
    committed: u64,
    pieces: Vec<PinnedPiece>,
    strategy: PinStrategy,
    threads: usize,
}

impl Remains {
    /// Gives everything back; the device is idle. What the driver does not let go of stays for the rest of the process, and
    /// nothing else does but addresses.
    fn give_back(&mut self) -> Result<()> {
        let gate = self.card.gate();
        let (mut bytes, mut first, mut loose) = (0, None, Vec::new());
        for piece in self.pieces.drain(..).rev() {
            let (addr, size) = (piece.host_ptr, piece.bytes.get());
            let gone = match self.strategy {
                // SAFETY: the region had this piece locked, and the device is done with it.
                PinStrategy::Pieces => twice(|| unsafe { gate.unpin(addr, size) }),
                // SAFETY: the region had this block allocated, nobody uses it any more, and it is forgotten.
                PinStrategy::Driver => twice(|| unsafe { gate.free_pinned(addr, size) }),
            };
            match gone {
                Err(error) if !is_gone(&error) => {
                    bytes += size;
                    first.get_or_insert(error);
                }
                _ => loose.push((addr, size)),
            }
        }
        if let Some(source) = first {
            for (addr, size) in loose.into_iter().filter(|_| self.strategy == PinStrategy::Pieces) {
                // SAFETY: the region is gone, and the driver has let go of this piece.
                if let Err(error) = unsafe { map::reserve_at(addr, size) } {
                    tracing::warn!(device = %self.card.id(), %error, "memory that is not locked any more stays mapped");
                }
            }
            return Err(Error::NotReturned { bytes: Bytes::new(bytes), source });
        }
        if self.strategy == PinStrategy::Driver {
            return Ok(());
        }
        discard(self.base, self.committed, self.threads);
        // SAFETY: the span is the region's, which is gone, and the driver has let go of it.
        unsafe { map::unmap(self.base, self.reserved) }.map_err(|source| Error::HostMap {
            what: "giving addresses back",
            asked: Bytes::new(self.reserved),
            source,
        })
    }
}

impl Orphan for Remains {
    fn bury(&mut self) -> u64 {
        let bytes = self.committed;
        if let Err(error) = self.give_back() {
            tracing::warn!(device = %self.card.id(), %error, "the memory of a dropped buffer did not come back");
        }
        bytes
    }
}
