//! A span of addresses and the chunks mapped under it.

use core::fmt;
use std::sync::Arc;

use crate::bytes::Bytes;
use crate::card::{Card, check_address, is_gone, not_idle, twice};
use crate::driver::{Call, DriverError, DriverErrorKind, RawHandle};
use crate::error::{Error, Result};
use crate::pool::Chunk;
use crate::waiting::may_wait;

/// A reserved range of device addresses, with chunks mapped under its beginning and nothing under the rest.
///
/// ```text
/// base                            mapped                                    base + bytes
///  | chunk | chunk |   chunk        |              nothing                        |
/// ```
///
/// It is the mechanism below [`GrowableBuffer`](crate::GrowableBuffer), for containers that want to place chunks
/// themselves. The base never changes. Chunks are appended and taken away at the end only, all or nothing.
///
/// ```
/// use growspan::{Bytes, Device};
///
/// # fn main() -> growspan::Result<()> {
/// let device = Device::host()?;
/// let mut range = device.reserve(Bytes::gib(64))?;
/// let chunk = device.chunk(Bytes::mib(2))?;
/// range.append(vec![chunk])?;
/// assert_eq!(range.mapped(), Bytes::mib(2));
/// // SAFETY: nothing uses the memory.
/// let chunks = unsafe { range.take_from(Bytes::ZERO) }?;
/// assert_eq!(chunks.len(), 1);
/// range.close()
/// # }
/// ```
pub struct ReservedRange {
    card: Arc<Card>,
    base: u64,
    bytes: u64,
    mapped: u64,
    chunks: Vec<Chunk>,
    /// Mappings that an undo could not take away, by offset. Beyond the first of them the span cannot be used.
    stuck: Vec<(u64, Chunk)>,
}

/// One mapped chunk, for those who register memory chunk by chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MappedChunk {
    /// Its device address.
    pub address: u64,
    /// Its size.
    pub bytes: Bytes,
    /// The driver's name for it.
    pub handle: RawHandle,
}

/// Chunks that come back with an error, so that they are not lost. As an [`Error`] (by `?`) they are released.
#[derive(Debug)]
#[non_exhaustive]
pub struct Rejected {
    /// The chunks, mapped nowhere.
    pub chunks: Vec<Chunk>,
    /// What went wrong.
    pub error: Error,
}

/// Mapped chunks that are out of their range's books for a moment.
pub(crate) struct Parted {
    /// Where they begin, in bytes from the base.
    start: u64,
    chunks: Vec<Chunk>,
}

impl Parted {
    /// Where each of them is, under a span at `base`.
    pub(crate) fn chunks(&self, base: u64) -> impl Iterator<Item = MappedChunk> + '_ {
        placed(base + self.start, &self.chunks)
    }
}

/// Where chunks are that are mapped one behind the other from `address` on.
fn placed(mut address: u64, chunks: &[Chunk]) -> impl ExactSizeIterator<Item = MappedChunk> + '_ {
    chunks.iter().map(move |chunk| {
        let this = MappedChunk { address, bytes: chunk.bytes(), handle: chunk.handle() };
        address += chunk.size();
        this
    })
}

fn sum(chunks: &[Chunk]) -> u64 {
    chunks.iter().map(Chunk::size).sum()
}

impl Rejected {
    pub(crate) fn new(chunks: Vec<Chunk>, error: Error) -> Box<Self> {
        Box::new(Self { chunks, error })
    }
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl core::error::Error for Rejected {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<Box<Rejected>> for Error {
    fn from(rejected: Box<Rejected>) -> Self {
        rejected.error
    }
}

impl ReservedRange {
    /// Reserves `bytes` (a multiple of the granularity, not zero), aligned to `align`.
    pub(crate) fn reserve(card: &Arc<Card>, bytes: u64, align: u64) -> Result<Self> {
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
        Ok(Self { card: Arc::clone(card), base, bytes, mapped: 0, chunks: Vec::new(), stuck: Vec::new() })
    }

    /// A range of nothing, which takes the place of one that is moved away.
    pub(crate) fn nothing(card: &Arc<Card>) -> Self {
        Self { card: Arc::clone(card), base: 0, bytes: 0, mapped: 0, chunks: Vec::new(), stuck: Vec::new() }
    }

    /// The first address.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The size of the span.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes::new(self.bytes)
    }

    /// How much of it, from the base on, has chunks under it.
    #[must_use]
    pub fn mapped(&self) -> Bytes {
        Bytes::new(self.mapped)
    }

    /// The mapped chunks, in order of address.
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = MappedChunk> + '_ {
        placed(self.base, &self.chunks)
    }

    /// The chunks themselves, in the same order.
    pub(crate) fn held(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Where the last chunk begins.
    pub(crate) fn last_start(&self) -> Option<u64> {
        self.chunks.last().map(|last| self.mapped - last.size())
    }

    pub(crate) fn chunk_mut(&mut self, number: usize) -> Option<&mut Chunk> {
        self.chunks.get_mut(number)
    }

    /// How far the span can be used.
    pub(crate) fn usable(&self) -> u64 {
        self.stuck.iter().map(|(offset, _)| *offset).min().unwrap_or(self.bytes)
    }

    /// Maps chunks one after the other behind those already there and makes them accessible. When map entries run out,
    /// what need not be mapped on the device is unmapped and it is tried once more.
    ///
    /// # Errors
    /// All chunks come back with the error, and nothing is mapped. [`Error::BeyondMax`] never; [`Error::Blocked`] if
    /// they do not fit; [`Error::OtherDevice`]; [`Error::OutOfMaps`]; what the driver says.
    pub fn append(&mut self, chunks: Vec<Chunk>) -> Result<(), Box<Rejected>> {
        match self.map_behind(chunks) {
            // Who holds the lock on a span lets it go first.
            Err(rejected) if matches!(rejected.error, Error::OutOfMaps(_)) && may_wait() => {
                self.card.make_map_entries();
                self.map_behind(rejected.chunks)?;
            }
            result => result?,
        }
        self.card.accounts().mark_peak();
        Ok(())
    }

    /// [`append`](Self::append), also for what was there a moment ago.
    fn map_behind(&mut self, chunks: Vec<Chunk>) -> Result<(), Box<Rejected>> {
        if let Some(other) = chunks.iter().find(|chunk| !Arc::ptr_eq(chunk.card(), &self.card)) {
            let error = Error::OtherDevice { what: "a chunk", theirs: other.card().id(), ours: self.card.id() };
            return Err(Rejected::new(chunks, error));
        }
        let total = chunks.iter().try_fold(0_u64, |sum, chunk| sum.checked_add(chunk.size()));
        let total = match total.filter(|total| *total <= self.usable() - self.mapped) {
            Some(0) => return Ok(()),
            Some(total) => total,
            None => {
                let usable = Bytes::new(self.usable());
                let asked = Bytes::new(total.unwrap_or(u64::MAX));
                return Err(Rejected::new(chunks, Error::Blocked { asked, usable }));
            }
        };
        let entries = self.map_entries(chunks.len());
        if let Err(shortage) = self.card.maps().acquire(entries) {
            return Err(Rejected::new(chunks, Error::OutOfMaps(shortage)));
        }
        let start = self.base + self.mapped;
        let mut address = start;
        let mut done = 0;
        let mut result = Ok(());
        for chunk in &chunks {
            // SAFETY: the place lies within our span, behind everything mapped there and before anything stuck, and
            // the chunk, which we own and is mapped nowhere, is as large as said.
            result = unsafe { self.card.gate().map(address, chunk.size(), chunk.handle()) };
            if result.is_err() {
                break;
            }
            address += chunk.size();
            done += 1;
        }
        if result.is_ok() {
            // SAFETY: the whole chunks just mapped cover exactly this.
            result = unsafe { self.card.gate().set_access(start, total) };
        }
        if let Err(error) = result {
            // SAFETY: so many were mapped there a moment ago, and nobody was told of them yet.
            let (chunks, unmapped) = unsafe { self.unmap_behind(self.mapped, chunks, done) };
            let error = self.card.explain(total, error);
            let error = match unmapped {
                Ok(()) => error,
                Err(then) => Error::Rollback { first: Box::new(error), then },
            };
            return Err(Rejected::new(chunks, error));
        }
        let settle = self.card.gate().info().quirks.settle;
        if !settle.is_zero() {
            std::thread::sleep(settle);
        }
        let accounts = self.card.accounts();
        accounts.in_hand.move_to(&accounts.mapped, total);
        self.mapped += total;
        self.chunks.extend(chunks);
        Ok(())
    }

    /// Takes the first `done` of `chunks`, mapped from `start` bytes on and in no book, away again. What cannot be taken
    /// away gets stuck.
    ///
    /// # Safety
    /// They are mapped exactly so, and nothing uses them.
    unsafe fn unmap_behind(
        &mut self,
        start: u64,
        chunks: Vec<Chunk>,
        done: usize,
    ) -> (Vec<Chunk>, core::result::Result<(), DriverError>) {
        self.card.maps().release(self.map_entries(chunks.len() - done));
        let mut back = Vec::with_capacity(chunks.len());
        let mut failed = Ok(());
        let mut offset = start;
        for (n, chunk) in chunks.into_iter().enumerate() {
            let size = chunk.size();
            if n >= done {
                back.push(chunk);
                continue;
            }
            // SAFETY: the caller promises that this chunk is mapped exactly here and that nothing uses it.
            match unsafe { self.card.gate().unmap(self.base + offset, size) } {
                Err(error) if !is_gone(&error) => {
                    let accounts = self.card.accounts();
                    accounts.in_hand.move_to(&accounts.stranded, size);
                    self.stuck.push((offset, chunk));
                    failed = failed.and(Err(error));
                }
                _ => {
                    self.card.maps().release(self.map_entries(1));
                    back.push(chunk);
                }
            }
            offset += size;
        }
        (back, failed)
    }

    /// Unmaps all chunks that begin at or above `keep` bytes and hands them over, in order.
    ///
    /// # Safety
    /// No work on the device, queued or running, and no reference of the host touches the memory from `keep` rounded
    /// up to the end of its chunk.
    ///
    /// # Errors
    /// If the driver will not unmap one of them, those above it are mapped again and everything is as before. If that
    /// fails too ([`Error::Rollback`]), the chunks that could not be mapped again come back with the error and
    /// [`mapped`](Self::mapped) has fallen accordingly.
    pub unsafe fn take_from(&mut self, keep: Bytes) -> Result<Vec<Chunk>, Box<Rejected>> {
        let mut taken = Vec::new();
        while let Some(chunk) = self.chunks.last() {
            let offset = self.mapped - chunk.size();
            if offset < keep.get() {
                break;
            }
            // SAFETY: the last chunk is mapped exactly there; the caller promises that nothing uses it.
            if let Err(error) = unsafe { self.card.gate().unmap(self.base + offset, chunk.size()) } {
                return Err(self.undo_take(taken, error));
            }
            self.account_unmapped(chunk.size());
            self.mapped = offset;
            taken.extend(self.chunks.pop());
        }
        // What left is kept elsewhere; room for twice what stays is room enough.
        self.chunks.shrink_to(2 * self.chunks.len());
        taken.reverse();
        Ok(taken)
    }

    fn account_unmapped(&self, bytes: u64) {
        let accounts = self.card.accounts();
        accounts.mapped.move_to(&accounts.in_hand, bytes);
        self.card.maps().release(self.map_entries(1));
    }

    /// Maps chunks, taken from the end downwards, back where they were.
    fn undo_take(&mut self, mut taken: Vec<Chunk>, first: DriverError) -> Box<Rejected> {
        taken.reverse();
        if is_gone(&first) {
            return Rejected::new(taken, first.into());
        }
        self.put_back(taken, first.into())
    }

    /// Maps chunks back where they were taken from, one by one, so that as many as can be are there again. The error says
    /// `first` why they had been taken in vain; it is [`Error::Rollback`] if not all are back, and the others come with
    /// it.
    pub(crate) fn put_back(&mut self, chunks: Vec<Chunk>, first: Error) -> Box<Rejected> {
        let mut chunks = chunks.into_iter();
        while let Some(chunk) = chunks.next() {
            if let Err(mut rejected) = self.map_behind(vec![chunk]) {
                rejected.chunks.extend(chunks);
                return Rejected::new(rejected.chunks, rejected.error.after(first));
            }
        }
        Rejected::new(Vec::new(), first)
    }

    /// Takes away what was mapped from `keep` on a moment ago and nobody was told of, as far as the driver lets it: what
    /// it keeps gets stuck.
    ///
    /// # Safety
    /// As for [`take_from`](Self::take_from).
    pub(crate) unsafe fn take_or_leave(&mut self, keep: u64) -> (Vec<Chunk>, core::result::Result<(), DriverError>) {
        let first = self.number_at(keep);
        let chunks = self.chunks.split_off(first);
        let bytes = sum(&chunks);
        self.mapped -= bytes;
        let accounts = self.card.accounts();
        accounts.mapped.move_to(&accounts.in_hand, bytes);
        let all = chunks.len();
        // SAFETY: they are mapped one behind the other from there on, and the caller promises that nothing uses them.
        unsafe { self.unmap_behind(self.mapped, chunks, all) }
    }

    /// Swaps the chunks that begin at or above `from` for `chunks`, which together are as large, at the same addresses.
    /// The old ones come back.
    ///
    /// # Safety
    /// As for [`take_from`](Self::take_from).
    ///
    /// # Errors
    /// The new chunks come back with the error and the old ones stay mapped. If mapping them again fails too
    /// ([`Error::Rollback`]), those that are not mapped come back with the others.
    pub(crate) unsafe fn replace_from(&mut self, from: u64, chunks: Vec<Chunk>) -> Result<Vec<Chunk>, Box<Rejected>> {
        // SAFETY: the contract is the same.
        let old = match unsafe { self.take_from(Bytes::new(from)) } {
            Ok(old) => old,
            Err(mut rejected) => {
                rejected.chunks.extend(chunks);
                return Err(rejected);
            }
        };
        let Err(rejected) = self.map_behind(chunks) else { return Ok(old) };
        let mut back = self.put_back(old, rejected.error);
        back.chunks.extend(rejected.chunks);
        Err(back)
    }

    /// Leaves the chunks from number `first` on out of the books, mapped as they are, until they
    /// [join](Self::join) again. Meanwhile the chunks below are the last.
    pub(crate) fn part(&mut self, first: usize) -> Parted {
        let chunks = self.chunks.split_off(first);
        self.mapped -= sum(&chunks);
        Parted { start: self.mapped, chunks }
    }

    /// Takes parted chunks back into the books.
    ///
    /// # Errors
    /// The same, if what is mapped does not reach up to them any more.
    pub(crate) fn join(&mut self, parted: Parted) -> Result<(), Parted> {
        if self.mapped != parted.start {
            return Err(parted);
        }
        self.mapped += sum(&parted.chunks);
        self.chunks.extend(parted.chunks);
        Ok(())
    }

    /// Unmaps parted chunks that cannot join any more, as far as the driver lets it: what it keeps gets stuck.
    ///
    /// # Safety
    /// As for [`take_from`](Self::take_from).
    pub(crate) unsafe fn unmap_parted(&mut self, parted: Parted) -> Vec<Chunk> {
        let accounts = self.card.accounts();
        accounts.mapped.move_to(&accounts.in_hand, sum(&parted.chunks));
        let all = parted.chunks.len();
        // SAFETY: they stayed mapped where they were parted, and the caller promises that nothing uses them.
        let (chunks, unmapped) = unsafe { self.unmap_behind(parted.start, parted.chunks, all) };
        if let Err(error) = unmapped {
            tracing::warn!(device = %self.card.id(), %error, "chunks that lost their place could not be unmapped");
        }
        chunks
    }

    /// The number of the first chunk that begins at or above `offset`.
    pub(crate) fn number_at(&self, offset: u64) -> usize {
        let mut end = 0;
        let begins_below = |chunk: &&Chunk| {
            let below = end < offset;
            end += chunk.size();
            below
        };
        self.chunks.iter().take_while(begins_below).count()
    }

    /// Unmaps everything, releases the chunks and gives the span back.
    ///
    /// Nothing on the device or the host may use the memory any more: closing waits for the whole device first.
    ///
    /// # Errors
    /// [`Error::NotReturned`] with the first error of the driver and what it kept. Dropping does the same and logs it.
    pub fn close(mut self) -> Result<()> {
        let idle = self.chunks.is_empty() || self.card.quiet();
        self.tear_down(idle, |_| ())
    }

    /// Unmaps everything, gives the chunks to `put` and the span back, as far as the driver lets it. Afterwards the
    /// range is empty and its span gone or given up.
    ///
    /// `idle` says that no work on the device can touch the memory. Without that nothing is unmapped: memory that is
    /// lost to this process is the smaller harm.
    pub(crate) fn tear_down(&mut self, idle: bool, mut put: impl FnMut(Chunk)) -> Result<()> {
        let mut first = None;
        let mut left = 0;
        let mut gone = self.card.gate().is_forked() || self.card.gate().lost().is_some();
        let accounts = self.card.accounts();
        accounts.mapped.move_to(&accounts.in_hand, self.mapped);
        let mut offset = self.mapped;
        self.mapped = 0;
        let mut placed = core::mem::take(&mut self.stuck);
        for (_, chunk) in &placed {
            accounts.stranded.move_to(&accounts.in_hand, chunk.size());
        }
        // From the end of the span downwards, the order in which memory is given up everywhere.
        while let Some(chunk) = self.chunks.pop() {
            offset -= chunk.size();
            placed.push((offset, chunk));
        }
        for (offset, chunk) in placed {
            let unmapped = match () {
                () if gone => Ok(()),
                () if !idle => Err(not_idle()),
                // SAFETY: the chunk is mapped exactly there, and `idle` says that nothing uses it.
                () => twice(|| unsafe { self.card.gate().unmap(self.base + offset, chunk.size()) }),
            };
            match unmapped {
                Err(error) if !is_gone(&error) => {
                    left += chunk.size();
                    first.get_or_insert(error);
                    chunk.strand();
                    continue;
                }
                Err(_) => gone = true,
                Ok(()) => {}
            }
            self.card.maps().release(self.map_entries(1));
            if gone { chunk.abandon() } else { put(chunk) }
        }
        if self.bytes > 0 {
            let span = core::mem::take(&mut self.bytes);
            if !gone && left == 0 {
                // SAFETY: the span was reserved with this size, nothing is mapped under it any more, and the size is
                // zero from here on, so it is freed once.
                match twice(|| unsafe { self.card.gate().free_span(self.base, span) }) {
                    Err(error) if !is_gone(&error) => {
                        left = left.max(span);
                        first.get_or_insert(error);
                    }
                    _ => {}
                }
            }
            // A span that the driver kept costs nothing physical; it is no longer ours to speak of.
            self.card.accounts().reserved.sub(span);
        }
        match first {
            Some(source) => Err(Error::NotReturned { bytes: Bytes::new(left), source }),
            None => Ok(()),
        }
    }

    fn map_entries(&self, chunks: usize) -> u64 {
        chunks as u64 * u64::from(self.card.gate().info().maps_per_chunk)
    }
}

impl Drop for ReservedRange {
    fn drop(&mut self) {
        if self.bytes == 0 || self.card.gate().is_forked() {
            return;
        }
        let idle = self.chunks.is_empty() || self.card.quiet();
        if let Err(error) = self.tear_down(idle, |_| ()) {
            tracing::warn!(device = %self.card.id(), %error, "a span was dropped and not all of it came back");
        }
    }
}

impl fmt::Debug for ReservedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReservedRange")
            .field("base", &format_args!("{:#x}", self.base))
            .field("bytes", &self.bytes())
            .field("mapped", &self.mapped())
            .field("chunks", &self.chunks.len())
            .finish_non_exhaustive()
    }
}
