//! A span in slots of one size, each with a chunk of its own or without.

use core::fmt;
use core::ops::RangeInclusive;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use crate::bytes::Bytes;
use crate::card::{Card, Orphan, check_address, is_gone, not_idle, twice};
use crate::driver::{Call, DriverError, DriverErrorKind};
use crate::error::{Error, Result};
use crate::pool::Chunk;
use crate::range::Rejected;

/// A reserved span that is handed out in parts. It is freed when the last part and the last owner are gone.
pub(crate) struct SlotSpan {
    card: Arc<Card>,
    base: u64,
    bytes: u64,
    slot: u64,
    /// How much of it, from the base on, was handed out. No part is handed out twice.
    carved: AtomicU64,
    /// Whether the driver kept a mapping in it, so that it cannot be freed.
    left: AtomicBool,
}

/// A part of a span, in slots, which nobody else maps in. Unlike in a
/// [`ReservedRange`](crate::range::ReservedRange) any slot may be empty, those in the middle too.
///
/// ```text
/// slot   0         1         2         3         4
///     | chunk   | nothing | chunk   | chunk   | nothing |
/// ```
pub(crate) struct SlotRange {
    span: Arc<SlotSpan>,
    /// The address of the first slot.
    base: u64,
    slots: Box<[Slot]>,
    mapped: usize,
}

enum Slot {
    Empty,
    Mapped(Chunk),
    /// Mapped, perhaps without access: an undo could not take it away. It is tried again when the slot is next needed.
    Stuck(Chunk),
}

impl SlotSpan {
    /// Reserves `bytes` in slots of `slot` bytes, which are a multiple of the granularity and divide `bytes`.
    pub(crate) fn reserve(card: &Arc<Card>, bytes: u64, slot: u64, align: u64) -> Result<Arc<Self>> {
        let failed = |source| match Error::from(source) {
            Error::Driver(source) => Error::Reserve { asked: Bytes::new(bytes), source },
            other => other,
        };
        let base = card.gate().reserve(bytes, align).map_err(failed)?;
        if let Err(why) = check_address(base, bytes, align) {
            if base != 0 {
                // SAFETY: just reserved with this size, and told to nobody.
                let _ = unsafe { card.gate().free_span(base, bytes) };
            }
            let error = DriverError::new(Call::Reserve, DriverErrorKind::OutOfAddresses).with_detail(why.to_string());
            return Err(failed(error));
        }
        card.accounts().reserved.add(bytes);
        let (carved, left) = (AtomicU64::new(0), AtomicBool::new(false));
        Ok(Arc::new(Self { card: Arc::clone(card), base, bytes, slot, carved, left }))
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next part of so many slots; none when the span is used up.
    pub(crate) fn carve(self: &Arc<Self>, slots: usize) -> Option<SlotRange> {
        let bytes = (slots as u64).checked_mul(self.slot)?;
        let room = |carved: u64| carved.checked_add(bytes).filter(|end| *end <= self.bytes);
        let offset = self.carved.fetch_update(Relaxed, Relaxed, room).ok()?;
        let slots = (0..slots).map(|_| Slot::Empty).collect();
        Some(SlotRange { span: Arc::clone(self), base: self.base + offset, slots, mapped: 0 })
    }
}

impl Drop for SlotSpan {
    fn drop(&mut self) {
        let gate = self.card.gate();
        if gate.is_forked() {
            return;
        }
        if gate.lost().is_none() && !self.left.load(Relaxed) {
            // SAFETY: the span was reserved with this size; all parts are gone, each with all of its mappings but those
            // that `left` tells of; and it is being dropped, so it is freed once.
            match twice(|| unsafe { gate.free_span(self.base, self.bytes) }) {
                Err(error) if !is_gone(&error) => {
                    let bytes = Bytes::new(self.bytes);
                    tracing::warn!(device = %self.card.id(), %bytes, %error, "a span was not freed");
                }
                _ => {}
            }
        }
        self.card.accounts().reserved.sub(self.bytes);
    }
}

impl SlotRange {
    /// The address of the first slot.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// How many slots have chunks.
    pub(crate) fn mapped(&self) -> usize {
        self.mapped
    }

    pub(crate) fn is_mapped(&self, slot: usize) -> bool {
        matches!(self.slots.get(slot), Some(Slot::Mapped(_)))
    }

    /// How many of these slots have no chunk.
    pub(crate) fn missing(&self, slots: RangeInclusive<usize>) -> u32 {
        let missing = self.slots.get(slots).unwrap_or(&[]).iter().filter(|slot| !matches!(slot, Slot::Mapped(_)));
        u32::try_from(missing.count()).unwrap_or(u32::MAX)
    }

    fn address(&self, slot: usize) -> u64 {
        self.base + slot as u64 * self.span.slot
    }

    fn entries(&self, chunks: usize) -> u64 {
        chunks as u64 * u64::from(self.span.card.gate().info().maps_per_chunk)
    }

    /// Maps chunks of one slot each into the empty slots from `first` on, and makes them accessible.
    ///
    /// # Errors
    /// All chunks come back with the error and nothing is mapped, but for what an undo could not take away.
    pub(crate) fn map(&mut self, first: usize, chunks: Vec<Chunk>) -> Result<(), Box<Rejected>> {
        let count = chunks.len();
        let size = self.span.slot;
        if let Err(error) = (first..first + count).try_for_each(|slot| self.unstick(slot)) {
            return Err(Rejected::new(chunks, error.into()));
        }
        let free = (first..first + count).all(|slot| matches!(self.slots.get(slot), Some(Slot::Empty)));
        let fits = chunks.iter().all(|chunk| chunk.size() == size && Arc::ptr_eq(chunk.card(), &self.span.card));
        if !free || !fits {
            let error = Error::Blocked { asked: Bytes::new(count as u64 * size), usable: Bytes::ZERO };
            return Err(Rejected::new(chunks, error));
        }
        let card = Arc::clone(&self.span.card);
        if let Err(shortage) = card.maps().acquire(self.entries(count)) {
            return Err(Rejected::new(chunks, Error::OutOfMaps(shortage)));
        }
        let start = self.address(first);
        let total = count as u64 * size;
        let mut done = 0;
        let mut result = Ok(());
        for (n, chunk) in chunks.iter().enumerate() {
            // SAFETY: the slot lies within our part of the span and is empty, so nothing is mapped there, and the chunk,
            // which we own and is mapped nowhere, is as large as a slot.
            result = unsafe { card.gate().map(start + n as u64 * size, size, chunk.handle()) };
            if result.is_err() {
                break;
            }
            done += 1;
        }
        if result.is_ok() {
            // SAFETY: the whole chunks just mapped cover exactly this.
            result = unsafe { card.gate().set_access(start, total) };
        }
        if let Err(error) = result {
            let (chunks, unmapped) = self.undo(first, chunks, done);
            let error = card.explain(total, error);
            let error = match unmapped {
                Ok(()) => error,
                Err(then) => Error::Rollback { first: Box::new(error), then },
            };
            return Err(Rejected::new(chunks, error));
        }
        let settle = card.gate().info().quirks.settle;
        if !settle.is_zero() {
            std::thread::sleep(settle);
        }
        card.accounts().in_hand.move_to(&card.accounts().mapped, total);
        card.accounts().mark_peak();
        for (slot, chunk) in self.slots[first..].iter_mut().zip(chunks) {
            *slot = Slot::Mapped(chunk);
        }
        self.mapped += count;
        Ok(())
    }

    /// Takes the first `done` of `chunks` away again. What cannot be taken away gets stuck.
    fn undo(
        &mut self,
        first: usize,
        chunks: Vec<Chunk>,
        done: usize,
    ) -> (Vec<Chunk>, core::result::Result<(), DriverError>) {
        let card = Arc::clone(&self.span.card);
        card.maps().release(self.entries(chunks.len() - done));
        let mut back = Vec::with_capacity(chunks.len());
        let mut failed = Ok(());
        for (n, chunk) in chunks.into_iter().enumerate() {
            if n >= done {
                back.push(chunk);
                continue;
            }
            // SAFETY: this chunk was mapped exactly here a moment ago, and nobody was told of it yet.
            match unsafe { card.gate().unmap(self.address(first + n), self.span.slot) } {
                Err(error) if !is_gone(&error) => {
                    card.accounts().in_hand.move_to(&card.accounts().stranded, chunk.size());
                    self.slots[first + n] = Slot::Stuck(chunk);
                    failed = failed.and(Err(error));
                }
                _ => {
                    card.maps().release(self.entries(1));
                    back.push(chunk);
                }
            }
        }
        (back, failed)
    }

    /// Tries again to take away what got stuck in a slot, if anything did.
    fn unstick(&mut self, slot: usize) -> core::result::Result<(), DriverError> {
        let address = self.address(slot);
        if !matches!(self.slots.get(slot), Some(Slot::Stuck(_))) {
            return Ok(());
        }
        let card = &self.span.card;
        // SAFETY: what is stuck is mapped exactly there, and nobody was ever told of it.
        match unsafe { card.gate().unmap(address, self.span.slot) } {
            Err(error) if !is_gone(&error) => return Err(error),
            _ => {}
        }
        card.maps().release(self.entries(1));
        if let Slot::Stuck(chunk) = core::mem::replace(&mut self.slots[slot], Slot::Empty) {
            let accounts = self.span.card.accounts();
            accounts.stranded.move_to(&accounts.in_hand, chunk.size());
        }
        Ok(())
    }

    /// Unmaps a slot and hands its chunk over; none if the slot has none.
    ///
    /// # Safety
    /// No work on the device, queued or running, and no reference of the host touches the slot.
    ///
    /// # Errors
    /// What the driver says; the slot is then as it was.
    pub(crate) unsafe fn take(&mut self, slot: usize) -> Result<Option<Chunk>> {
        if !self.is_mapped(slot) {
            return Ok(None);
        }
        let card = &self.span.card;
        // SAFETY: the slot's chunk is mapped exactly there; the caller promises that nothing uses it.
        match unsafe { card.gate().unmap(self.address(slot), self.span.slot) } {
            Err(error) if !is_gone(&error) => return Err(error.into()),
            _ => {}
        }
        card.maps().release(self.entries(1));
        card.accounts().mapped.move_to(&card.accounts().in_hand, self.span.slot);
        self.mapped -= 1;
        match core::mem::replace(&mut self.slots[slot], Slot::Empty) {
            Slot::Mapped(chunk) => Ok(Some(chunk)),
            _ => Ok(None),
        }
    }

    /// Unmaps everything and gives the chunks to `put`, as far as the driver lets it. Without `idle`, which says that no
    /// work on the device can touch the memory, nothing is unmapped: memory that is lost to this process is the smaller
    /// harm.
    pub(crate) fn tear_down(&mut self, idle: bool, mut put: impl FnMut(Chunk)) -> Result<()> {
        let card = Arc::clone(&self.span.card);
        let mut gone = card.gate().is_forked() || card.gate().lost().is_some();
        let mut failed: Option<(u64, DriverError)> = None;
        for slot in (0..self.slots.len()).rev() {
            let chunk = match core::mem::replace(&mut self.slots[slot], Slot::Empty) {
                Slot::Empty => continue,
                Slot::Mapped(chunk) => {
                    card.accounts().mapped.move_to(&card.accounts().in_hand, chunk.size());
                    self.mapped -= 1;
                    chunk
                }
                Slot::Stuck(chunk) => {
                    card.accounts().stranded.move_to(&card.accounts().in_hand, chunk.size());
                    chunk
                }
            };
            let unmapped = match () {
                () if gone => Ok(()),
                () if !idle => Err(not_idle()),
                // SAFETY: the chunk is mapped exactly there, and `idle` says that nothing uses it.
                () => twice(|| unsafe { card.gate().unmap(self.address(slot), self.span.slot) }),
            };
            match unmapped {
                Err(error) if !is_gone(&error) => {
                    let left = failed.as_ref().map_or(0, |(left, _)| *left) + chunk.size();
                    failed = Some((left, failed.map_or(error, |(_, first)| first)));
                    self.span.left.store(true, Relaxed);
                    chunk.strand();
                    continue;
                }
                Err(_) => gone = true,
                Ok(()) => {}
            }
            card.maps().release(self.entries(1));
            if gone { chunk.abandon() } else { put(chunk) }
        }
        match failed {
            Some((left, source)) => Err(Error::NotReturned { bytes: Bytes::new(left), source }),
            None => Ok(()),
        }
    }

    /// Gives everything up to the card, because the device cannot be waited for just now. It goes when it next can be.
    pub(crate) fn orphan(self, put: impl Fn(Chunk) + Send + 'static) {
        let card = Arc::clone(&self.span.card);
        let bytes = self.mapped as u64 * self.span.slot;
        card.accounts().mapped.move_to(&card.accounts().retiring, bytes);
        card.adopt(Box::new(Orphaned { range: self, put }));
    }
}

/// A part whose owner is gone, which could not be unmapped for want of an idle device.
struct Orphaned<F> {
    range: SlotRange,
    put: F,
}

impl<F: Fn(Chunk) + Send> Orphan for Orphaned<F> {
    fn bury(&mut self) -> u64 {
        let card = Arc::clone(&self.range.span.card);
        let bytes = self.range.mapped as u64 * self.range.span.slot;
        card.accounts().retiring.move_to(&card.accounts().mapped, bytes);
        if let Err(error) = self.range.tear_down(true, &self.put) {
            tracing::warn!(device = %card.id(), %error, "not all of a dropped allocator came back");
        }
        bytes
    }
}

impl<F> fmt::Debug for Orphaned<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Orphaned").field("range", &self.range).finish_non_exhaustive()
    }
}

impl Drop for SlotRange {
    fn drop(&mut self) {
        if self.slots.iter().all(|slot| matches!(slot, Slot::Empty)) || self.span.card.gate().is_forked() {
            return;
        }
        let idle = self.span.card.quiet();
        if let Err(error) = self.tear_down(idle, drop) {
            tracing::warn!(device = %self.span.card.id(), %error, "a span was dropped and not all of it came back");
        }
    }
}

impl fmt::Debug for SlotRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotRange")
            .field("base", &format_args!("{:#x}", self.base))
            .field("slots", &self.slots.len())
            .field("mapped", &self.mapped)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for SlotSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotSpan")
            .field("base", &format_args!("{:#x}", self.base))
            .field("bytes", &Bytes::new(self.bytes))
            .finish_non_exhaustive()
    }
}
