//! Page-locked host memory that starts in seconds.
//!
//! A device reads and writes page-locked memory directly, and copies from it at full speed. Drivers allocate it by
//! walking over the whole range, one thread putting page after page there; on AMD cards any page that the kernel moves
//! meanwhile makes the walk start again, for minutes on end. [`PinnedBuffer`] turns that round: the memory is mapped
//! here, advised on page sizes ([`ThpPolicy`]), put there by many threads, and only then shown to the driver, which finds
//! everything in place.
//!
//! It grows in place like a [`GrowableBuffer`](crate::GrowableBuffer), and says where the time went ([`PinTiming`]).
//!
//! For containers of others there is an [allocator](crate::allocator::SpanAllocatorBuilder::build_page_locked) over such
//! memory.
//!
//! # Pieces and borders
//!
//! What is registered in one call is a [piece](PinnedPiece): all of a growth on CUDA, at most 2 GiB on HIP. **A copy of
//! CUDA's that reaches from one piece into the next fails.** All copies of this crate are cut at the borders, whichever
//! slice they are given. Who copies by other means asks for the [borders](PinnedBuffer::borders), or cuts with
//! [`split`](PinnedBuffer::split). Kernels may cross them.

use core::fmt;
use core::marker::PhantomData;
use core::ops::{ControlFlow, Deref, DerefMut, Range};

use bytemuck::{AnyBitPattern, NoUninit, Pod};

mod blocks;
mod builder;
mod fill;
mod locked;
mod parallel;
mod policy;
mod region;
mod timing;
mod watch;

pub use blocks::PinnedBlocks;
pub use builder::PinnedBuilder;
pub use fill::{FileOptions, Fill, ReadAt};
pub use policy::{PinStrategy, ThpPolicy};
pub use region::PinnedPiece;
pub use timing::{PinPhase, PinProgress, PinTiming, Prefault, Slow, SlowCause};

use crate::bytes::Bytes;
use crate::device::Device;
use crate::driver::PinFlags;
use crate::error::{Error, Result};
use crate::quiesce::Quiesce;
pub(crate) use locked::LockedHost;
use region::Region;

/// A page-locked array of the host's that a device reaches, which grows and shrinks in place.
///
/// It is an ordinary slice for the host. Elements of memory that was never used are zero with the default strategy, and
/// whatever the driver left there with [`PinStrategy::Driver`]; elements that were given up and come back hold what they
/// held if their memory stayed. Elements are plain data: nothing is dropped when they go.
///
/// What the device does with the memory is not seen by the borrow checker: whoever launches a kernel that writes here, or
/// queues a copy on a stream, keeps the host away until it is over. Dropping, shrinking and closing wait for the device
/// before memory goes.
///
/// In a forked child there is nothing at these addresses: touching them faults.
///
/// ```
/// use growspan::{Device, GrowableBuffer, PinnedBuffer, Quiesce};
///
/// # fn main() -> growspan::Result<()> {
/// let device = Device::host()?;
/// let mut weights = PinnedBuffer::<f32>::builder(&device).max_len(1 << 30).build()?;
/// let timing = weights.grow_to(1 << 20)?;
/// println!("{timing}");
///
/// let address = weights.as_ptr();
/// weights[1000] = 2.5;
/// weights.grow_to(3 << 20)?;
/// assert_eq!((weights.as_ptr(), weights[1000], weights[2 << 20]), (address, 2.5, 0.0));
///
/// // A copy to the device, cut at the borders where need be.
/// let mut layer = GrowableBuffer::<f32>::builder(&device).max_len(4 << 20).build()?;
/// layer.append(&weights)?;
///
/// weights.shrink_to(1 << 20, Quiesce::Device)?;
/// weights.close()
/// # }
/// ```
pub struct PinnedBuffer<T> {
    region: Region,
    len: usize,
    max_len: usize,
    timing: PinTiming,
    device: Device,
    _elements: PhantomData<T>,
}

impl<T> PinnedBuffer<T> {
    /// Starts to build a buffer that a device can reach.
    pub fn builder(device: &Device) -> PinnedBuilder<T> {
        PinnedBuilder::new(device)
    }

    fn over(device: &Device, region: Region, max_len: usize) -> Self {
        Self { region, len: 0, max_len, timing: PinTiming::default(), device: device.clone(), _elements: PhantomData }
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
        usize::try_from(self.region.committed() / size_of::<T>() as u64).unwrap_or(usize::MAX).min(self.max_len)
    }

    /// The most elements there can be.
    #[must_use]
    pub fn max_len(&self) -> usize {
        self.max_len
    }

    /// How much memory is locked.
    #[must_use]
    pub fn committed(&self) -> Bytes {
        Bytes::new(self.region.committed())
    }

    /// How many addresses it has.
    #[must_use]
    pub fn reserved(&self) -> Bytes {
        Bytes::new(self.region.reserved())
    }

    /// The device that reaches it.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// How it is locked.
    #[must_use]
    pub fn flags(&self) -> PinFlags {
        self.region.settings().flags
    }

    /// Who makes its memory.
    #[must_use]
    pub fn strategy(&self) -> PinStrategy {
        self.region.settings().strategy
    }

    /// What is done about huge pages.
    #[must_use]
    pub fn thp(&self) -> ThpPolicy {
        self.region.settings().thp
    }

    /// What all growths together have cost.
    #[must_use]
    pub fn timing(&self) -> &PinTiming {
        &self.timing
    }

    /// The first element, as the host sees it. With the default strategy the same for the buffer's whole life; with
    /// [`PinStrategy::Driver`] from the first growth on.
    #[must_use]
    pub fn as_ptr(&self) -> *const T {
        self.data().cast_const()
    }

    /// The same, to write through.
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.data()
    }

    fn data(&self) -> *mut T {
        match usize::try_from(self.region.base()) {
            // Not allocated yet.
            Ok(0) | Err(_) => core::ptr::dangling_mut(),
            Ok(address) => core::ptr::with_exposed_provenance_mut(address),
        }
    }

    /// The first element, as the device sees it: what the driver says, which need not be the host's address. None while
    /// there is no memory, without [`PinFlags::mapped`], and where the device does not see all pieces one after the other.
    #[must_use]
    pub fn device_ptr(&self) -> Option<u64> {
        PinnedPiece::in_a_row(self.region.pieces())
    }

    /// What the driver knows as one each, in order. They cover the memory without a gap.
    #[must_use]
    pub fn pieces(&self) -> &[PinnedPiece] {
        self.region.pieces()
    }

    /// Where one piece ends and the next begins, in bytes from the first element. They are multiples of the page size,
    /// so an element may lie astride.
    pub fn borders(&self) -> impl Iterator<Item = Bytes> + '_ {
        self.region.pieces().iter().skip(1).map(|piece| piece.offset)
    }

    /// A range of bytes, from the first element on, cut at the borders: for those who copy by other means.
    ///
    /// ```
    /// use growspan::{Bytes, Device, PinnedBuffer};
    ///
    /// # fn main() -> growspan::Result<()> {
    /// let builder = PinnedBuffer::<u8>::builder(&Device::host()?).max_len(16 << 20).piece(Bytes::mib(4));
    /// let mut buffer = builder.build()?;
    /// buffer.grow_to(10 << 20)?;
    /// let parts: Vec<_> = buffer.split(100..(8 << 20) + 1).collect();
    /// assert_eq!(parts, [100..4 << 20, 4 << 20..8 << 20, 8 << 20..(8 << 20) + 1]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn split(&self, bytes: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = bytes.start;
        let inner = self.borders().map(Bytes::get).filter(move |border| *border > bytes.start && *border < bytes.end);
        inner.chain([bytes.end]).filter_map(move |end| {
            let part = core::mem::replace(&mut at, end)..end;
            (part.start < part.end).then_some(part)
        })
    }

    /// Grows to `len` elements; does nothing if there are as many. What it cost is returned, and is nothing inside memory
    /// that is there.
    ///
    /// # Errors
    /// [`Error::BeyondMax`]; [`Error::HostMemory`], [`Error::HostMap`], [`Error::NumaNode`], [`Error::ThpRefused`];
    /// [`Error::Capturing`]; what the driver says
    /// ([`LockLimit`](crate::driver::DriverErrorKind::LockLimit) with the figures). The buffer is then as it was.
    pub fn grow_to(&mut self, len: usize) -> Result<PinTiming> {
        self.grow_to_with(len, |_| ControlFlow::Continue(()))
    }

    /// The same; `told` hears how far it has come, after each part of a prefault and each piece, and says whether to go
    /// on.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use growspan::{Device, Error, PinnedBuffer};
    ///
    /// # fn main() -> growspan::Result<()> {
    /// let mut buffer = PinnedBuffer::<u8>::builder(&Device::host()?).max_len(64 << 20).build()?;
    /// let half = buffer.grow_to_with(64 << 20, |progress| match progress.done.get() * 2 < progress.total.get() {
    ///     true => ControlFlow::Continue(()),
    ///     false => ControlFlow::Break(()),
    /// });
    /// assert!(matches!(half, Err(Error::Cancelled { .. })));
    /// assert!(buffer.committed().is_zero());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`grow_to`](Self::grow_to), and [`Error::Cancelled`]. The buffer is then as it was.
    pub fn grow_to_with(
        &mut self,
        len: usize,
        mut told: impl FnMut(PinProgress) -> ControlFlow<()>,
    ) -> Result<PinTiming> {
        if len > self.max_len {
            return Err(Error::BeyondMax { asked: len, len: self.len, max_len: self.max_len });
        }
        let timing = self.region.grow(self.bytes_of(len), &mut told)?;
        self.len = self.len.max(len);
        self.timing.add(&timing);
        Ok(timing)
    }

    /// Grows by the elements and copies them in, getting an eighth more memory than there is if it has to get any.
    ///
    /// # Errors
    /// As for [`grow_to`](Self::grow_to).
    pub fn append(&mut self, elements: &[T]) -> Result<()>
    where
        T: NoUninit,
    {
        let beyond = |asked| Error::BeyondMax { asked, len: self.len, max_len: self.max_len };
        let end = self.len.checked_add(elements.len()).ok_or_else(|| beyond(usize::MAX))?;
        if end > self.max_len {
            return Err(beyond(end));
        }
        if end > self.capacity() {
            let start = self.len;
            let roomy = end.max(self.capacity().saturating_add(self.capacity() / 8)).min(self.max_len);
            // Memory for a little more, if there is any; else for what is needed.
            let grown = self.grow_to(roomy);
            if grown.is_err() && roomy > end {
                self.grow_to(end)?;
            } else {
                grown?;
            }
            self.len = start;
        }
        // SAFETY: there is memory for `end` elements, which are one allocation.
        let to = unsafe { self.data().add(self.len) };
        // SAFETY: the host may write there and `&mut self` makes it ours alone, so that the elements, which are borrowed,
        // are elsewhere; they are initialised bytes throughout (`NoUninit`).
        unsafe { core::ptr::copy_nonoverlapping(elements.as_ptr(), to, elements.len()) };
        self.len = end;
        Ok(())
    }

    /// Forgets the elements from `len` on; their memory stays locked.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Shrinks to `len` elements and gives up the pieces that lie wholly beyond, once the device is done with them
    /// ([`Quiesce::Deferred`] waits as [`Quiesce::Event`] does). On CUDA one growth is one piece:
    /// [`shrink_exact`](Self::shrink_exact) gives part of it back. With [`PinStrategy::Driver`] only the length falls.
    ///
    /// # Errors
    /// [`Error::ShrinkAboveLen`]; [`Error::Capturing`]; what the driver says. The buffer is then as it was, or, after
    /// [`Error::Rollback`], as long as what is still locked.
    pub fn shrink_to(&mut self, len: usize, quiesce: Quiesce<'_>) -> Result<()> {
        self.shrink(len, false, &quiesce)
    }

    /// Shrinks to `len` elements and gives up every page beyond: the piece astride the new end is let go of and its
    /// beginning locked again, which costs what locking it costs.
    ///
    /// # Errors
    /// As for [`shrink_to`](Self::shrink_to).
    pub fn shrink_exact(&mut self, len: usize, quiesce: Quiesce<'_>) -> Result<()> {
        self.shrink(len, true, &quiesce)
    }

    fn shrink(&mut self, len: usize, exact: bool, quiesce: &Quiesce<'_>) -> Result<()> {
        if len > self.len {
            return Err(Error::ShrinkAboveLen { asked: len, len: self.len });
        }
        let result = self.region.shrink(self.bytes_of(len), exact, quiesce);
        self.len = if result.is_ok() { len } else { self.len.min(self.capacity()) };
        result
    }

    /// The size of so many elements, which are at most `max_len`, whose size was checked at build time.
    fn bytes_of(&self, elements: usize) -> u64 {
        elements as u64 * size_of::<T>() as u64
    }

    /// The elements.
    #[must_use]
    pub fn as_slice(&self) -> &[T]
    where
        T: AnyBitPattern,
    {
        // SAFETY: the first `len` elements have memory under them, which is mapped, initialised (by the kernel with zeros, or
        // as the driver promises), and stays as long as `&self` does; any bytes are elements (`AnyBitPattern`), the base is
        // aligned for them, and their size was checked to fit `isize` at build time.
        unsafe { core::slice::from_raw_parts(self.data(), self.len) }
    }

    /// The elements, to change.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [T]
    where
        T: Pod,
    {
        // SAFETY: as in `as_slice`; `&mut self` makes the memory ours alone, and whatever is written are initialised bytes
        // again (`Pod`).
        unsafe { core::slice::from_raw_parts_mut(self.data(), self.len) }
    }

    /// Waits until the device is idle and gives everything back. What is still locked after an error stays so for the
    /// rest of the process, or is given back when the device is next waited for.
    ///
    /// # Errors
    /// [`Error::NotReturned`] with what the driver kept, or what cannot be waited for yet. Dropping does the same and logs
    /// it.
    pub fn close(mut self) -> Result<()> {
        if self.device.card().gate().is_forked() {
            return Ok(());
        }
        self.region.close()
    }
}

impl<T: Pod> Deref for PinnedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        self.as_slice()
    }
}

impl<T: Pod> DerefMut for PinnedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.as_mut_slice()
    }
}

impl<T> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("elements", &core::any::type_name::<T>())
            .field("device", &self.device.info().id())
            .field("strategy", &self.strategy())
            .field("flags", &self.flags())
            .field("len", &self.len)
            .field("committed", &self.committed())
            .field("pieces", &self.pieces().len())
            .finish_non_exhaustive()
    }
}
