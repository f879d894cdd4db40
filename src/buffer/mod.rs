//! Arrays that grow and shrink in place.

mod builder;
mod content;
mod loan;
mod set;

use core::fmt;
use core::marker::PhantomData;
use std::os::fd::OwnedFd;

pub use builder::BufferBuilder;
pub use loan::{Loan, Returned};
pub use set::{BufferSet, Member};

use crate::backing::{AheadPolicy, Backing, Growth, Mode, Shrunk};
use crate::bytes::Bytes;
use crate::device::Device;
use crate::driver::{DriverResult, Gate, RawStream};
use crate::error::{Error, Result};
use crate::quiesce::Quiesce;
use crate::range::MappedChunk;
use crate::stats::Stats;

/// An array on a device that grows and shrinks in place.
///
/// It reserves addresses for `max_len` elements once. Growing maps chunks under them, shrinking unmaps them; the device
/// pointer never changes, nothing is copied, and what is given up another buffer takes without a driver call. Where
/// virtual memory is off ([`Device::verdict`] says why) it lives in one contiguous block instead, as its
/// [`Fallback`](crate::Fallback) says.
///
/// The elements of a grown buffer hold whatever the memory held before; [`grow_zeroed`](Self::grow_zeroed) clears them.
/// Elements are plain data: nothing is dropped when they go.
///
/// Every operation that fails leaves the buffer as it was.
///
/// ```
/// use growspan::{Device, GrowableBuffer, Quiesce};
///
/// # fn main() -> growspan::Result<()> {
/// let device = Device::host()?;
/// let mut keys = GrowableBuffer::<f32>::builder(&device).max_len(1 << 30).build()?;
/// let address = keys.device_ptr();
///
/// keys.append(&[1.0, 2.0, 3.0])?;
/// keys.grow_to(1_000_000)?;
/// assert_eq!(keys.device_ptr(), address);
///
/// let mut back = [0.0; 3];
/// keys.copy_out(0, &mut back)?;
/// assert_eq!(back, [1.0, 2.0, 3.0]);
///
/// keys.shrink_to(3, Quiesce::Device)?;
/// keys.close()
/// # }
/// ```
pub struct GrowableBuffer<T> {
    backing: Box<dyn Backing>,
    /// The backing's address and size in elements, kept here so that growing inside committed memory is a compare and
    /// a store.
    base: u64,
    capacity: usize,
    /// Growing up to here, no more than the capacity, is nobody's business; beyond, memory may have to be mapped ahead.
    limit: usize,
    len: usize,
    max_len: usize,
    grows: u64,
    grows_without_calls: u64,
    shrinks: u64,
    /// Whether memory is mapped ahead.
    ahead: bool,
    /// Closed or leaked: nothing is left to give back.
    done: bool,
    /// Whether the host may touch the memory, which only we have.
    host_visible: bool,
    /// Whether a chunk was exported.
    shared: bool,
    device: Device,
    _elements: PhantomData<T>,
}

/// What is left of a buffer that was [leaked](GrowableBuffer::leak).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leaked {
    /// The device address, valid for the rest of the process.
    pub device_ptr: u64,
    /// The length, in elements.
    pub len: usize,
    /// The elements there is memory for.
    pub capacity: usize,
}

impl<T> GrowableBuffer<T> {
    /// Starts to build a buffer on a device.
    pub fn builder(device: &Device) -> BufferBuilder<T> {
        BufferBuilder::new(device)
    }

    fn over(device: &Device, backing: Box<dyn Backing>, max_len: usize) -> Self {
        let mut this = Self {
            backing,
            base: 0,
            capacity: 0,
            limit: 0,
            len: 0,
            max_len,
            grows: 0,
            grows_without_calls: 0,
            shrinks: 0,
            ahead: false,
            done: false,
            host_visible: device.info().host_visible,
            shared: false,
            device: device.clone(),
            _elements: PhantomData,
        };
        this.refresh();
        this
    }

    /// Follows the backing after it changed.
    fn refresh(&mut self) {
        self.base = self.backing.base();
        self.capacity = self.elements_in(self.backing.committed());
        self.len = self.len.min(self.capacity);
        // Where memory is mapped ahead, the next growth is looked at.
        self.limit = if self.ahead { self.len } else { self.capacity };
    }

    /// Lets memory be mapped ahead of the present length.
    fn look_ahead(&mut self) {
        if self.ahead {
            let limit = self.backing.look_ahead(self.bytes_of(self.len));
            self.limit = self.elements_in(limit).clamp(self.len, self.capacity);
        }
    }

    /// How many whole elements there are in so many bytes, and no more than `max_len`.
    fn elements_in(&self, bytes: u64) -> usize {
        usize::try_from(bytes / size_of::<T>() as u64).unwrap_or(usize::MAX).min(self.max_len)
    }

    /// The device address of the first element, the same for the buffer's whole life unless the fallback lets it
    /// move. On the host it is an ordinary address. Zero while a block that may move was not allocated yet.
    #[must_use]
    pub fn device_ptr(&self) -> u64 {
        self.base
    }

    /// How many elements there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many elements there is memory for. Growing up to here costs nothing.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The most elements there can be. In contiguous mode with [`Fallback::Capacity`](crate::Fallback::Capacity) there is
    /// memory for [`capacity`](Self::capacity) only.
    #[must_use]
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// What has memory under it, not counting what is mapped [ahead](Self::grow_ahead).
    #[must_use]
    pub fn committed(&self) -> Bytes {
        Bytes::new(self.backing.committed())
    }

    /// Whether it lives in a span or in a block.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.backing.mode()
    }

    /// How often the address has changed: always zero in virtual mode. Whoever keeps the address compares.
    #[must_use]
    pub fn moves(&self) -> u64 {
        self.backing.moves()
    }

    /// The device it lives on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A file descriptor for the mapped chunk with this number, by which another process can have it too: it calls
    /// [`Device::import`]. The chunk is never kept in a pool from then on, and the buffer gives no slices any more
    /// ([`Error::Shared`]): the other may change the memory at any time. The buffer's pool must have been made for it, by
    /// [`Device::new_pool`] with [`Shareable::PosixFd`](crate::driver::Shareable::PosixFd).
    ///
    /// # Errors
    /// [`Error::OutOfBounds`] for a number that is not among [`chunks`](Self::chunks); what the driver says.
    pub fn export_chunk(&mut self, number: usize) -> Result<OwnedFd> {
        let fd = self.backing.export(number)?;
        self.shared = true;
        self.host_visible = false;
        Ok(fd)
    }

    /// The mapped chunks in order of address, for those who register memory chunk by chunk, but for those mapped
    /// [ahead](Self::grow_ahead); none in contiguous mode.
    #[must_use]
    pub fn chunks(&self) -> Vec<MappedChunk> {
        self.backing.chunks()
    }

    /// What the buffer has and did.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let retiring = self.backing.retiring();
        Stats {
            mode: self.mode(),
            sizing: self.backing.sizing(),
            bytes_in_use: Bytes::new(self.bytes_of(self.len)),
            bytes_committed: self.committed(),
            bytes_ahead: Bytes::new(self.backing.ahead()),
            bytes_retiring: Bytes::new(retiring.bytes),
            retiring: retiring.shrinks,
            bytes_reserved: Bytes::new(self.backing.reserved()),
            chunks: self.backing.chunks().len(),
            grows: self.grows,
            grows_without_calls: self.grows_without_calls,
            shrinks: self.shrinks,
            moves: self.moves(),
        }
    }

    /// The size of so many elements, which are at most `max_len`, whose size was checked at build time.
    fn bytes_of(&self, elements: usize) -> u64 {
        elements as u64 * size_of::<T>() as u64
    }

    fn beyond(&self, asked: usize) -> Error {
        Error::BeyondMax { asked, len: self.len, max_len: self.max_len }
    }

    /// Keeps memory mapped past the length, so that a growth inside it takes no call of the driver: a few loads and stores.
    /// From now on, and after a shrink from the next growth on; what was asked before holds no more.
    ///
    /// A thread of the buffer's pool, `growspan-ahead`, does the mapping. It is started at first use and ends with the
    /// pool. Where it falls behind, the growth maps for itself. Chunks are as they would be without it, and there is at
    /// least one ahead. They are not [committed](Self::committed): before memory is called short on the device, what is
    /// ahead of all its buffers is taken back. What goes wrong in the background is said once, as [`Error::Ahead`], by the
    /// next growth that leaves committed memory. That memory, open files or map entries are short is not said: who needs
    /// them asks, and is told then. In contiguous mode this does nothing.
    ///
    /// A shrink gives up what is ahead as well, also one that fails later on. Nothing is mapped while a graph is captured,
    /// as far as the driver tells.
    ///
    /// # Errors
    /// [`Error::NoThread`]; to turn it off, those of [`flush_ahead`](Self::flush_ahead). It is then as it was.
    pub fn grow_ahead(&mut self, policy: AheadPolicy) -> Result<()> {
        self.backing.grow_ahead(policy, self.bytes_of(self.len))?;
        self.ahead = policy != AheadPolicy::Off && self.mode() == Mode::Virtual;
        self.refresh();
        self.look_ahead();
        Ok(())
    }

    /// Gives up what is there for growth to come, mapped or not: to the pool, or to the driver where the pool is full.
    /// Returns how much. Nothing is mapped ahead until the next growth.
    ///
    /// # Errors
    /// [`Error::Capturing`]; what the driver says. What is ahead then stays, unless the error is [`Error::Rollback`].
    pub fn flush_ahead(&mut self) -> Result<Bytes> {
        let flushed = self.backing.flush_ahead();
        self.refresh();
        flushed
    }

    /// Grows to `len` elements; does nothing if there are as many. Inside committed memory it is a compare and a
    /// store, inside what is mapped [ahead](Self::grow_ahead) a few more.
    ///
    /// Memory that comes back from a [deferred](Quiesce::Deferred) shrink may still be written by the work that the
    /// shrink was to wait for: queue what uses it behind that work.
    ///
    /// # Errors
    /// [`Error::BeyondMax`]; [`Error::OutOfMemory`], [`Error::OutOfFiles`], [`Error::OutOfMaps`] with the figures, after
    /// the pool was emptied and it was tried once more; [`Error::Ahead`]; what the driver says. The buffer is then as it
    /// was. Inside committed memory it never fails.
    #[inline]
    pub fn grow_to(&mut self, len: usize) -> Result<()> {
        if len <= self.limit {
            self.len = self.len.max(len);
            return Ok(());
        }
        self.grow_slow(len)
    }

    /// Growth that has to be looked at. Not said to be cold: where memory is mapped ahead it is an ordinary one.
    #[inline(never)]
    fn grow_slow(&mut self, len: usize) -> Result<()> {
        if self.ahead
            && len <= self.max_len
            && let Some(reach) = self.backing.take_ahead(self.bytes_of(len))
        {
            self.grows += u64::from(reach.took);
            self.grows_without_calls += u64::from(reach.took);
            self.len = self.len.max(len);
            self.capacity = self.elements_in(reach.committed);
            self.limit = self.elements_in(reach.limit).clamp(self.len, self.capacity);
            return Ok(());
        }
        self.grow_with_calls(len)
    }

    #[cold]
    fn grow_with_calls(&mut self, len: usize) -> Result<()> {
        let growth = self.begin_growth(len)?;
        self.settle_growth(growth, len);
        Ok(())
    }

    /// Grows by `more` elements.
    ///
    /// # Errors
    /// As for [`grow_to`](Self::grow_to).
    #[inline]
    pub fn grow_by(&mut self, more: usize) -> Result<()> {
        match self.len.checked_add(more) {
            Some(len) => self.grow_to(len),
            None => Err(self.beyond(usize::MAX)),
        }
    }

    /// Grows to `len` elements and clears the new ones, all bytes zero: queued on the stream given, or without one done
    /// when this returns. Work that a deferred shrink was to wait for is waited for if this growth takes its memory back;
    /// elements that were given up and stayed committed are the caller's to order.
    ///
    /// # Errors
    /// As for [`grow_to`](Self::grow_to); [`Error::Capturing`] if the stream captures a graph, which would take the
    /// clearing instead of doing it.
    pub fn grow_zeroed(&mut self, len: usize, stream: Option<RawStream>) -> Result<()>
    where
        T: bytemuck::Zeroable,
    {
        if let Some(stream) = stream {
            self.device.card().check_stream(stream)?;
            self.device.card().check_capture(Some(stream))?;
        }
        self.grow_with(len, |gate, address, bytes| {
            // SAFETY: the new elements are committed and nobody's yet. On a stream the clearing is ordered before
            // whatever else is queued there, and a shrink waits for it as for any work.
            unsafe { gate.fill(address, 0, bytes, stream) }
        })
    }

    /// Grows to `len` elements and sets the new ones by `set`, which gets their address and bytes; or changes nothing.
    fn grow_with(&mut self, len: usize, set: impl FnOnce(&Gate, u64, u64) -> DriverResult<()>) -> Result<()> {
        if len <= self.len {
            return Ok(());
        }
        let growth = self.begin_growth(len)?;
        let (from, to) = (self.bytes_of(self.len), self.bytes_of(len));
        // Work that was queued before a deferred shrink may still write to memory that comes back from it.
        let set =
            growth.wait().and_then(|()| Ok(set(self.device.card().gate(), self.backing.base() + from, to - from)?));
        match set {
            Ok(()) => {
                self.settle_growth(growth, len);
                Ok(())
            }
            Err(error) => Err(match self.undo_growth(growth) {
                Ok(()) => error,
                Err(then) => then.after(error),
            }),
        }
    }

    /// Commits memory for `len` elements without changing the length or telling anybody.
    fn begin_growth(&mut self, len: usize) -> Result<Growth> {
        if len > self.max_len {
            return Err(self.beyond(len));
        }
        let result = self.backing.grow(self.bytes_of(len));
        if result.is_err() {
            // A growth that could not be undone may have cost some of the span.
            self.refresh();
        }
        result
    }

    fn settle_growth(&mut self, growth: Growth, len: usize) {
        self.grows += u64::from(!growth.is_nothing());
        self.grows_without_calls += u64::from(growth.was_there());
        self.backing.settle(growth);
        self.refresh();
        self.len = self.len.max(len);
        self.look_ahead();
    }

    fn undo_growth(&mut self, growth: Growth) -> Result<()> {
        let result = self.backing.undo(growth);
        self.refresh();
        result
    }

    /// Shortens to `len` elements and keeps the memory; does nothing if there are not as many.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Shrinks to `len` elements and gives up the chunks that lie wholly above, to the pool or to the driver. The
    /// chunk astride the new end stays. If chunks are given up, `quiesce` is waited for first.
    ///
    /// In contiguous mode only the length changes, and the result says so.
    ///
    /// ```
    /// # use growspan::{Device, GrowableBuffer, Quiesce};
    /// # fn main() -> growspan::Result<()> {
    /// # let mut buffer = GrowableBuffer::<u8>::builder(&Device::host()?).max_len(1 << 30).build()?;
    /// buffer.grow_to(100 << 20)?;
    /// let shrunk = buffer.shrink_to(0, Quiesce::Device)?;
    /// assert_eq!(buffer.committed(), shrunk.committed);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::ShrinkAboveLen`]; [`Error::OtherDevice`], [`Error::EventNotRecorded`] for what cannot be waited for;
    /// [`Error::Capturing`]; what the driver says. The buffer is then as it was, unless the error is
    /// [`Error::Rollback`].
    pub fn shrink_to(&mut self, len: usize, quiesce: Quiesce<'_>) -> Result<Shrunk> {
        self.shrink_now(len, &quiesce)
    }

    fn shrink_now(&mut self, len: usize, quiesce: &Quiesce<'_>) -> Result<Shrunk> {
        let bytes = self.check_shrink(len, quiesce)?;
        let result = if let Quiesce::Deferred(event) = quiesce {
            self.backing.shrink_later(bytes, event)
        } else if self.backing.would_release(bytes) == 0 {
            // SAFETY: no chunk that was the buffer's lies wholly above, so at most goes what nobody was told of.
            unsafe { self.backing.shrink(bytes) }
        } else {
            self.device.card().check_capture(None)?;
            quiesce.wait(self.device.card())?;
            // SAFETY: `quiesce` made sure of the device, and `&mut self` that the host holds no reference.
            unsafe { self.backing.shrink(bytes) }
        };
        self.after_shrink(len, result)
    }

    /// Shrinks to `len` elements and gives up everything above, rounded up to the granularity: what lives in the chunk
    /// astride the new end is copied on the device into smaller ones, which take its place at the same address.
    ///
    /// Where that cannot be done (no memory for the copy, a device that takes one chunk size per span, a chunk that was
    /// exported), the result says how much stays and why. [`Quiesce::Deferred`] waits here: there is something to copy.
    ///
    /// # Errors
    /// As for [`shrink_to`](Self::shrink_to).
    pub fn shrink_exact(&mut self, len: usize, quiesce: Quiesce<'_>) -> Result<Shrunk> {
        let bytes = self.check_shrink(len, &quiesce)?;
        // What is committed may end within a chunk that was mapped ahead, and is cut then as well.
        let above = |it: &dyn Backing| it.committed() > bytes || it.would_release(bytes) > 0 || it.ahead() > 0;
        if self.backing.mode() == Mode::Virtual && above(&*self.backing) {
            self.device.card().check_capture(None)?;
            quiesce.wait(self.device.card())?;
        }
        // SAFETY: `quiesce` made sure of the device, and `&mut self` that the host holds no reference.
        let result = unsafe { self.backing.shrink_exact(bytes) };
        self.after_shrink(len, result)
    }

    /// That a shrink makes sense, also where it has nothing to give up or to wait for.
    fn check_shrink(&self, len: usize, quiesce: &Quiesce<'_>) -> Result<u64> {
        if self.device.card().gate().is_forked() {
            return Err(Error::Forked);
        }
        if len > self.len {
            return Err(Error::ShrinkAboveLen { asked: len, len: self.len });
        }
        quiesce.check(self.device.card())?;
        Ok(self.bytes_of(len))
    }

    fn after_shrink(&mut self, len: usize, result: Result<Shrunk>) -> Result<Shrunk> {
        if let Ok(shrunk) = &result {
            self.shrinks += u64::from(!shrunk.released.is_zero() || !shrunk.retiring.is_zero());
            self.len = len;
        }
        self.refresh();
        result
    }

    /// Gives everything back: chunks to the pool, the span to the driver. Waits for the whole device first.
    ///
    /// Waiting for the device breaks a graph capture that is under way (CUDA's rule). What cannot be waited for then goes
    /// back when the device is next waited for, or by [`Device::drain`].
    ///
    /// # Errors
    /// [`Error::NotReturned`] with what the driver kept, or what cannot be waited for yet. Dropping does the same and logs
    /// it.
    pub fn close(mut self) -> Result<()> {
        self.shut()
    }

    fn shut(&mut self) -> Result<()> {
        // In a forked child nothing is done: the memory is the parent's, and another thread may have held our locks.
        if core::mem::replace(&mut self.done, true) || self.device.card().gate().is_forked() {
            return Ok(());
        }
        self.backing.close()
    }

    /// Gives the memory away for the rest of the process: nothing of it is unmapped, at exit neither. What is mapped ahead
    /// is not among it, and goes.
    pub fn leak(mut self) -> Leaked {
        self.done = true;
        self.backing.leave_to_itself();
        self.refresh();
        let leaked = Leaked { device_ptr: self.base, len: self.len, capacity: self.capacity };
        core::mem::forget(self);
        leaked
    }
}

impl<T> Drop for GrowableBuffer<T> {
    fn drop(&mut self) {
        if let Err(error) = self.shut() {
            tracing::warn!(device = %self.device.info().id(), %error, "a buffer was dropped and not all of it came back");
        }
    }
}

impl<T> fmt::Debug for GrowableBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrowableBuffer")
            .field("elements", &core::any::type_name::<T>())
            .field("device", &self.device.info().id())
            .field("mode", &self.mode())
            .field("device_ptr", &format_args!("{:#x}", self.base))
            .field("len", &self.len)
            .field("capacity", &self.capacity)
            .field("max_len", &self.max_len)
            .finish_non_exhaustive()
    }
}
