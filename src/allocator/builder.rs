//! How an allocator is built.

use core::marker::PhantomData;
use std::sync::Arc;

use super::ground::{Ground, LEAST_SLOT, Plan};
use super::inner::Core;
use super::large::{Headroom, LargePlan};
use super::{DeviceMemory, HostMemory, SpanAllocator, classes::PAGE};
use crate::backing::Mode;
use crate::bytes::Bytes;
use crate::device::Device;
use crate::driver::host::HostOptions;
use crate::error::{Error, Result};
use crate::pinned::LockedHost;
use crate::pool::{ChunkPool, Sizing};

/// The alignment of all blocks on a device, in bytes: what drivers align theirs to.
const DEVICE_ALIGN: usize = 256;
/// The same on the host: what `malloc` aligns to.
const HOST_ALIGN: usize = 16;
/// The largest threshold: regions are larger, and counted in 32 bits.
const MOST_THRESHOLD: Bytes = Bytes::gib(64);

/// Into how many slots a device's memory is cut for packed blocks, and how large those are at most. On a card of 140 GiB
/// they have 8 MiB: a recorded training run commits 1.008 times what is live, and calls the driver a fifth as often as with
/// slots of 2 MiB.
const PACKED_SLOTS: u64 = 16 << 10;
const MOST_PACKED_SLOT: u64 = 32 << 20;

/// Without virtual memory the blocks below the threshold share allocations of four times that size, which are made in
/// full: no more than this, and no more than a sixty-fourth of the memory.
const MOST_CONTIGUOUS: u64 = 16 << 20;

/// Builds a [`SpanAllocator`].
///
/// ```
/// use growspan::{Bytes, Device, Headroom, SpanAllocator};
///
/// # fn main() -> growspan::Result<()> {
/// // Every block of 64 KiB and more can grow to a gibibyte without moving.
/// let allocator = SpanAllocator::builder(&Device::host()?)
///     .threshold(Bytes::kib(64))
///     .headroom(Headroom::default().with_least(Bytes::gib(1)))
///     .build()?;
/// # drop(allocator);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct SpanAllocatorBuilder {
    device: Device,
    threshold: Option<Bytes>,
    headroom: Headroom,
    sizing: Option<Sizing>,
    pool: Option<ChunkPool>,
    min_align: Option<usize>,
    slot: Option<Bytes>,
    small_span: Option<Bytes>,
    keep: Option<Bytes>,
    recycle: Option<usize>,
    heaps: Option<u8>,
    packed: bool,
}

impl SpanAllocatorBuilder {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            threshold: None,
            headroom: Headroom::default(),
            sizing: None,
            pool: None,
            min_align: None,
            slot: None,
            small_span: None,
            keep: None,
            recycle: None,
            heaps: None,
            packed: false,
        }
    }

    /// For many blocks of all sizes that come and go, as in training: all of them lie side by side in one shared span,
    /// but for those of an eighth of the device's memory and more.
    ///
    /// Such blocks grow in place as far as the next one, and freeing and allocating seldom calls the driver: memory stays
    /// mapped until it runs out or [`trim`](SpanAllocator::trim) is called, and moves to where it is needed in
    /// [slots](Self::slot) of a 16,384th of the device's memory, at most 32 MiB. It is one set of values for
    /// [`threshold`](Self::threshold), [`keep`](Self::keep), [`slot`](Self::slot), [`heaps`](Self::heaps) (one),
    /// [`sizing`](Self::sizing) (exact) and [`recycle`](Self::recycle) (none): what is set beside it is as set.
    ///
    /// ```
    /// use growspan::{Device, SpanAllocator};
    ///
    /// # fn main() -> growspan::Result<()> {
    /// let allocator = SpanAllocator::builder(&Device::host()?).packed().build_on_device()?;
    /// let layout = core::alloc::Layout::new::<[u8; 3 << 20]>();
    /// let blocks = [allocator.allocate(layout)?, allocator.allocate(layout)?];
    /// // Each has 3 MiB and no more.
    /// assert_eq!(blocks[1].device_ptr().abs_diff(blocks[0].device_ptr()), 3 << 20);
    /// # blocks.map(|block| unsafe { allocator.deallocate(block.ptr(), layout) });
    /// # Ok(())
    /// # }
    /// ```
    pub const fn packed(mut self) -> Self {
        self.packed = true;
        self
    }

    /// From which size on a block owns a span, between 32 KiB and 64 GiB: the device's granularity unless set.
    ///
    /// A block of its own grows in place and takes whole chunks. Blocks below are packed side by side: where many
    /// blocks of a few MiB come and go, as in training, a threshold above them wastes less memory. Without virtual memory
    /// it is at most 16 MiB, and a sixty-fourth of the memory.
    pub const fn threshold(mut self, bytes: Bytes) -> Self {
        self.threshold = Some(bytes);
        self
    }

    /// How many addresses blocks of their own reserve beyond their size.
    pub const fn headroom(mut self, headroom: Headroom) -> Self {
        self.headroom = headroom;
        self
    }

    /// How the chunks of such blocks are sized, instead of the device's default. With the ladder up to an eighth of
    /// what is committed lies idle.
    pub const fn sizing(mut self, sizing: Sizing) -> Self {
        self.sizing = Some(sizing);
        self
    }

    /// Where chunks come from and go to, instead of the device's pool.
    pub fn pool(mut self, pool: &ChunkPool) -> Self {
        self.pool = Some(pool.clone());
        self
    }

    /// The alignment of all blocks and the size of the smallest, in bytes: a power of two from 16 to 16 KiB. 256 unless
    /// set, 16 on the host.
    pub const fn alignment(mut self, bytes: usize) -> Self {
        self.min_align = Some(bytes);
        self
    }

    /// The chunk under small blocks: a power of two from 64 KiB that the device maps. The granularity unless set. Small
    /// slots give memory back sooner; large ones take fewer driver calls, and fewer open files where chunks keep one.
    pub const fn slot(mut self, bytes: Bytes) -> Self {
        self.slot = Some(bytes);
        self
    }

    /// How many addresses are reserved for small blocks: twice the device's memory unless set, rounded up.
    pub const fn small_span(mut self, bytes: Bytes) -> Self {
        self.small_span = Some(bytes);
        self
    }

    /// How much memory that holds nothing stays mapped, under freed blocks of their own and under small ones, each. A
    /// sixteenth of the device's memory unless set. What is above goes to the pool by itself; where memory runs out on the
    /// device, all of it is given back before that is an error.
    pub const fn keep(mut self, bytes: Bytes) -> Self {
        self.keep = Some(bytes);
        self
    }

    /// How many spans of freed blocks stay reserved for the next, for each doubling of their size. 64 unless set.
    pub const fn recycle(mut self, spans: usize) -> Self {
        self.recycle = Some(spans);
        self
    }

    /// How many heaps threads share for small blocks: twice the processors unless set, rounded up to a power of two, at
    /// most 128. Each takes memory of its own.
    pub const fn heaps(mut self, heaps: u8) -> Self {
        self.heaps = Some(heaps);
        self
    }

    /// An allocator whose memory the host may touch.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`] for a device whose memory the host cannot touch: [`build_on_device`](Self::build_on_device)
    /// is for those. [`Error::ChunkSize`], [`Error::Blocked`], [`Error::OtherDevice`] for what cannot be;
    /// [`Error::Reserve`] if addresses cannot be had.
    pub fn build(self) -> Result<SpanAllocator<HostMemory>> {
        if !self.device.info().host_visible {
            return Err(Error::NotHostVisible { device: self.device.info().id() });
        }
        self.finish(None)
    }

    /// An allocator of page-locked memory of the host's, which the device reaches too: safe memory for the containers of
    /// the host, that kernels read and copies are fast from.
    ///
    /// All of it lies in spans and chunks as on any device, so that large blocks grow in place also where the device
    /// itself has no virtual memory. Each chunk is registered with the device while it is mapped: from
    /// [`SpanAllocator::device_ptr`] one learns where the device sees a block, and from
    /// [`pinned_pieces`](SpanAllocator::pinned_pieces) where copies have to be cut. `options` say how much memory there
    /// can be (half of what is available unless set) and how large the smallest chunk is.
    ///
    /// What the device does with the memory the borrow checker does not see: whoever launches a kernel or queues a copy
    /// keeps the host away from the block, and the block alive, until that is over. A block that is given back through a
    /// handle [with a stream](SpanAllocator::with_stream) is nobody's before the stream has passed what is queued there;
    /// clearing and copying are the host's here, and not queued. Before any memory is let go of, the device is waited for.
    ///
    /// ```
    /// # #[cfg(feature = "allocator-api2-04")]
    /// # fn main() -> growspan::Result<()> {
    /// use allocator_api2_04::vec::Vec;
    /// use growspan::driver::host::HostOptions;
    /// use growspan::{Device, SpanAllocator};
    ///
    /// let device = Device::host()?; // or a card
    /// let allocator = SpanAllocator::builder(&device).build_page_locked(HostOptions::default())?;
    /// # // A process may lock next to nothing.
    /// # if allocator.allocate(core::alloc::Layout::new::<[u8; 8 << 20]>()).is_err() { return Ok(()) }
    /// let mut batch = Vec::new_in(allocator.clone());
    /// batch.extend(0_u32..1 << 20);
    /// assert!(allocator.device_ptr(batch.as_slice()).is_some());
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "allocator-api2-04"))]
    /// # fn main() {}
    /// ```
    ///
    /// # Errors
    /// As for [`build`](Self::build), but for the first; [`Error::Host`] for options that do not fit the machine;
    /// [`Error::PinOptions`] with a pool, since chunks are the allocator's own.
    pub fn build_page_locked(self, options: HostOptions) -> Result<SpanAllocator<HostMemory>> {
        if self.pool.is_some() {
            let why =
                "the chunks of page-locked memory are its own, and no pool of another device has any: leave it out";
            return Err(Error::PinOptions { why });
        }
        let (locked, device) = LockedHost::open(&self.device, options)?;
        Self { device, ..self }.finish(Some(locked))
    }

    /// An allocator on any device, whose memory the host does not touch.
    ///
    /// # Errors
    /// As for [`build`](Self::build), but for the first.
    pub fn build_on_device(self) -> Result<SpanAllocator<DeviceMemory>> {
        self.finish(None)
    }

    fn finish<M>(self, locked: Option<Arc<LockedHost>>) -> Result<SpanAllocator<M>> {
        let device = &self.device;
        let pool = self.pool.unwrap_or_else(|| device.pool().clone());
        if !Arc::ptr_eq(pool.card(), device.card()) {
            let (theirs, ours) = (pool.card().id(), device.info().id());
            return Err(Error::OtherDevice { what: "a pool", theirs, ours });
        }
        let total = device.memory()?.total;
        let least = Bytes::new(2 * PAGE as u64);
        let granularity = device.verdict().granularity();
        let threshold = self.threshold.unwrap_or(match self.packed {
            true => Bytes::new(total / 8).clamp(Bytes::mib(64), MOST_THRESHOLD),
            false => granularity.max(least),
        });
        if threshold < least || threshold > MOST_THRESHOLD {
            return Err(Error::ChunkSize { asked: threshold, granularity: least, max: MOST_THRESHOLD });
        }
        let is_virtual = device.verdict().mode() == Mode::Virtual;
        let threshold = match device.verdict().mode() {
            Mode::Virtual => threshold.get(),
            Mode::Contiguous => threshold.get().min((total / 64).clamp(least.get(), MOST_CONTIGUOUS)),
        };
        let min_align = self.min_align.unwrap_or(if device.info().host_visible { HOST_ALIGN } else { DEVICE_ALIGN });
        if !min_align.is_power_of_two() || !(HOST_ALIGN..=PAGE).contains(&min_align) {
            let (asked, max) = (Bytes::new(min_align as u64), Bytes::new(PAGE as u64));
            return Err(Error::ChunkSize { asked, granularity: Bytes::new(HOST_ALIGN as u64), max });
        }
        let keep = self.keep.map_or(if self.packed { total } else { total / 16 }, Bytes::get);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let heaps = self.heaps.map_or(if self.packed { 1 } else { 2 * processors }, usize::from).min(128);
        let slot = self.slot.or_else(|| if self.packed { packed_slot(device, total) } else { None });
        let plan = Plan {
            pool,
            min_align,
            threshold,
            slot,
            span: self.small_span.map_or(total.saturating_mul(2), Bytes::get),
            keep,
            locked,
        };
        let large = LargePlan {
            headroom: self.headroom,
            sizing: self.sizing.unwrap_or(if self.packed { Sizing::Exact } else { device.default_sizing() }),
            recycle: self.recycle.unwrap_or(if self.packed && is_virtual { 0 } else { 64 }),
            keep,
            total,
        };
        let ground = Ground::new(device, plan)?;
        let core = Core::new(ground, u8::try_from(heaps).unwrap_or(128), large, threshold);
        Ok(SpanAllocator { core, stream: None, _memory: PhantomData })
    }
}

/// The slots of packed blocks on a device of `total` bytes; none where those would be too small, and the usual ones are
/// taken.
fn packed_slot(device: &Device, total: u64) -> Option<Bytes> {
    let granularity = device.verdict().granularity().get();
    let most = MOST_PACKED_SLOT.min(device.verdict().quirks().max_chunk.get());
    let slot = 1 << (total / PACKED_SLOTS).min(most).checked_ilog2()?;
    (slot > granularity && slot >= LEAST_SLOT && slot.is_multiple_of(granularity)).then(|| Bytes::new(slot))
}
