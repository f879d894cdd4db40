//! How a page-locked buffer is built.

use core::fmt;
use core::marker::PhantomData;
use core::time::Duration;

use super::parallel::usual_threads;
use super::policy::{PinStrategy, ThpPolicy};
use super::region::{HUGE, Region, Settings};
use super::{PinnedBlocks, PinnedBuffer};
use crate::bytes::Bytes;
use crate::device::Device;
use crate::driver::PinFlags;
use crate::error::{Error, Result};

/// Builds a [`PinnedBuffer`]. Only the maximum length must be given.
#[must_use]
pub struct PinnedBuilder<T> {
    device: Device,
    max_len: usize,
    strategy: PinStrategy,
    flags: PinFlags,
    thp: Option<ThpPolicy>,
    threads: Option<usize>,
    node: Option<u32>,
    piece: Option<Bytes>,
    patience: Option<Duration>,
    _elements: PhantomData<fn() -> T>,
}

impl<T> PinnedBuilder<T> {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            max_len: 0,
            strategy: PinStrategy::default(),
            flags: PinFlags::USUAL,
            thp: None,
            threads: None,
            node: None,
            piece: None,
            patience: None,
            _elements: PhantomData,
        }
    }

    /// The most elements it will hold. This many addresses are reserved, which cost nothing; with
    /// [`PinStrategy::Driver`] this much memory is allocated at the first growth.
    pub const fn max_len(mut self, elements: usize) -> Self {
        self.max_len = elements;
        self
    }

    /// Who makes the memory.
    pub const fn strategy(mut self, strategy: PinStrategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// How it is locked, instead of [`PinFlags::USUAL`]. A flag that the driver does not have is an error of the first
    /// growth.
    pub const fn flags(mut self, flags: PinFlags) -> Self {
        self.flags = flags;
        self
    }

    /// Whether it gets huge pages, instead of what is right for the device ([`ThpPolicy`] says what and why). A driver's
    /// own allocation is left as it is unless this says [`ThpPolicy::DisableForProcess`].
    pub const fn thp(mut self, policy: ThpPolicy) -> Self {
        self.thp = Some(policy);
        self
    }

    /// How many threads put pages there, the calling one among them. Unless set, as many as the process may run, 16 at
    /// most.
    pub const fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(if threads == 0 { 1 } else { threads });
        self
    }

    /// Which NUMA node the memory comes from, as long as that has any.
    pub const fn numa_node(mut self, node: u32) -> Self {
        self.node = Some(node);
        self
    }

    /// The most that is registered at once, rounded down to 2 MiB, instead of what is right for the device (all of a
    /// growth on CUDA and the host, 2 GiB on HIP).
    pub const fn piece(mut self, bytes: Bytes) -> Self {
        self.piece = Some(bytes);
        self
    }

    /// How long a piece may take, beyond a second for each gibibyte, before the log says that it takes long and why (2 s
    /// unless set). Growths below 256 MiB are watched only if this is set, since that takes a thread.
    pub const fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    /// Reserves the addresses. There is no memory yet: the length is zero.
    ///
    /// # Errors
    /// * [`Error::ZeroLength`], [`Error::ZeroSizedType`], [`Error::Alignment`], [`Error::Overflow`],
    ///   [`Error::PinOptions`]: what was asked for cannot be;
    /// * [`Error::Reserve`]: so many addresses cannot be had.
    pub fn build(self) -> Result<PinnedBuffer<T>> {
        let (bytes, settings) = (self.bytes()?, self.settings()?);
        let region = Region::reserve(self.device.card(), bytes, settings)?;
        Ok(PinnedBuffer::over(&self.device, region, self.max_len))
    }

    /// Allocates all `max_len` elements with the driver, as many blocks of at most [`piece`](Self::piece) bytes, that do
    /// not lie one after the other: what engines do to keep a driver from walking over tens of gibibytes at once. Without
    /// a size of the pieces they have 2 GiB.
    ///
    /// # Errors
    /// As for [`build`](Self::build) and for [`PinnedBuffer::grow_to`]; nothing is allocated then.
    pub fn build_blocks(self) -> Result<PinnedBlocks<T>> {
        self.bytes()?;
        let builder = Self { strategy: PinStrategy::Driver, ..self };
        let piece = builder.piece.map_or(2 << 30, Bytes::get);
        let each = usize::try_from(piece / size_of::<T>() as u64).unwrap_or(usize::MAX);
        if each == 0 {
            return Err(Error::PinOptions {
                why: "pieces smaller than an element were asked for; ask for larger ones",
            });
        }
        let mut blocks = Vec::new();
        let mut left = builder.max_len;
        while left > 0 {
            let len = left.min(each);
            let mut block = Self { max_len: len, ..builder.clone() }.build()?;
            block.grow_to(len)?;
            blocks.push(block);
            left -= len;
        }
        Ok(PinnedBlocks::of(blocks))
    }

    fn bytes(&self) -> Result<u64> {
        let type_name = core::any::type_name::<T>;
        let size = size_of::<T>() as u64;
        if self.max_len == 0 {
            return Err(Error::ZeroLength { what: "a maximum length" });
        }
        if size == 0 {
            return Err(Error::ZeroSizedType { type_name: type_name() });
        }
        // What a driver allocates is aligned to a page and no more.
        let granularity = match self.strategy {
            PinStrategy::Pieces => Bytes::new(HUGE),
            PinStrategy::Driver => Bytes::new(crate::sys::map::page_size()),
        };
        let align = Bytes::new(align_of::<T>() as u64);
        if align > granularity {
            return Err(Error::Alignment { type_name: type_name(), align, granularity });
        }
        let bytes = (self.max_len as u64).checked_mul(size).filter(|bytes| isize::try_from(*bytes).is_ok());
        bytes.ok_or(Error::Overflow { what: "page-locked memory", count: self.max_len as u64, size })
    }

    fn settings(&self) -> Result<Settings> {
        let refuse = |why| Err(Error::PinOptions { why });
        let backend = self.device.info().backend;
        let thp = match (self.strategy, self.thp) {
            (PinStrategy::Pieces, thp) => thp.unwrap_or(ThpPolicy::of(backend)),
            (PinStrategy::Driver, Some(ThpPolicy::Advise | ThpPolicy::Avoid)) => {
                return refuse(
                    "memory that the driver allocates cannot be advised on page sizes: choose ThpPolicy::Inherit or \
                     DisableForProcess, or PinStrategy::Pieces",
                );
            }
            (PinStrategy::Driver, thp) => thp.unwrap_or(ThpPolicy::Inherit),
        };
        match (self.strategy, self.flags, self.node) {
            (PinStrategy::Driver, _, Some(_)) => {
                return refuse("a NUMA node can be chosen for PinStrategy::Pieces only: drivers choose their own");
            }
            (PinStrategy::Pieces, PinFlags { write_combined: true, .. }, _) => {
                return refuse("write-combined memory is for the driver to allocate: choose PinStrategy::Driver");
            }
            (PinStrategy::Driver, PinFlags { read_only: true, .. }, _) => {
                return refuse(
                    "memory that the driver allocates is writable: choose PinStrategy::Pieces for read-only",
                );
            }
            _ => {}
        }
        let most = self.device.info().quirks.max_pin.map_or(u64::MAX, Bytes::get);
        let piece = self.piece.map_or(most, |piece| piece.get().min(most));
        if piece < HUGE {
            return refuse("pieces of less than 2 MiB were asked for; ask for larger ones");
        }
        Ok(Settings {
            strategy: self.strategy,
            flags: self.flags,
            thp,
            threads: self.threads.unwrap_or_else(usual_threads),
            node: self.node,
            piece: piece - piece % HUGE,
            patience: self.patience,
        })
    }
}

impl<T> Clone for PinnedBuilder<T> {
    fn clone(&self) -> Self {
        Self { device: self.device.clone(), ..*self }
    }
}

impl<T> fmt::Debug for PinnedBuilder<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuilder")
            .field("device", &self.device.info().id())
            .field("max_len", &self.max_len)
            .field("strategy", &self.strategy)
            .field("flags", &self.flags)
            .field("thp", &self.thp)
            .field("piece", &self.piece)
            .finish_non_exhaustive()
    }
}
