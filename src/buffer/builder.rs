//! How a buffer is built.

use core::fmt;
use core::marker::PhantomData;
use std::sync::Arc;

use super::GrowableBuffer;
use crate::backing::{AheadPolicy, Fallback, MapHooks, RetireLimit};
use crate::bytes::Bytes;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pool::{ChunkPool, Sizing};
use crate::verdict::BackingRequest;

/// Builds a [`GrowableBuffer`]. Only the maximum length must be given.
#[derive(Clone)]
#[must_use]
pub struct BufferBuilder<T> {
    device: Device,
    max_len: usize,
    sizing: Option<Sizing>,
    fallback: Fallback,
    pool: Option<ChunkPool>,
    hooks: Option<Arc<dyn MapHooks>>,
    ahead: Option<AheadPolicy>,
    retire: RetireLimit,
    _elements: PhantomData<fn() -> T>,
}

impl<T> BufferBuilder<T> {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            max_len: 0,
            sizing: None,
            fallback: Fallback::default(),
            pool: None,
            hooks: None,
            ahead: None,
            retire: RetireLimit::default(),
            _elements: PhantomData,
        }
    }

    /// The most elements it will hold. In virtual mode this many addresses are reserved, which cost nothing.
    pub const fn max_len(mut self, elements: usize) -> Self {
        self.max_len = elements;
        self
    }

    /// How its chunks are sized, instead of the device's default.
    pub const fn sizing(mut self, sizing: Sizing) -> Self {
        self.sizing = Some(sizing);
        self
    }

    /// What to do where virtual memory is off.
    pub const fn fallback(mut self, fallback: Fallback) -> Self {
        self.fallback = fallback;
        self
    }

    /// Where its chunks come from and go to, instead of the device's pool.
    pub fn pool(mut self, pool: &ChunkPool) -> Self {
        self.pool = Some(pool.clone());
        self
    }

    /// Who is told of chunks as they come and go, for libraries that register device memory. Nobody is in contiguous
    /// mode, which has no chunks.
    pub fn hooks(mut self, hooks: Arc<dyn MapHooks>) -> Self {
        self.hooks = Some(hooks);
        self
    }

    /// How much is kept mapped past the length for growth to come, instead of the device's default; see
    /// [`GrowableBuffer::grow_ahead`].
    pub const fn ahead(mut self, policy: AheadPolicy) -> Self {
        self.ahead = Some(policy);
        self
    }

    /// How many [deferred](crate::Quiesce::Deferred) shrinks may wait for their events, 64 unless set and at least one.
    /// One more waits for the oldest.
    pub const fn max_retiring_shrinks(mut self, shrinks: usize) -> Self {
        self.retire.entries = shrinks;
        self
    }

    /// How much memory of this buffer may wait for events, a quarter of the device's unless set. A
    /// [deferred](crate::Quiesce::Deferred) shrink that would exceed it waits for the oldest, unless nothing else waits.
    pub const fn max_retiring(mut self, bytes: Bytes) -> Self {
        self.retire.bytes = Some(bytes);
        self
    }

    /// Reserves the span (or allocates the block, as the fallback says). The length is zero.
    ///
    /// # Errors
    /// * [`Error::ZeroLength`], [`Error::ZeroSizedType`], [`Error::Alignment`], [`Error::ElementTooLarge`],
    ///   [`Error::Overflow`], [`Error::ChunkSize`]: what was asked for cannot be;
    /// * [`Error::OtherDevice`]: the pool belongs to another device;
    /// * [`Error::Reserve`]: so many addresses cannot be had;
    /// * [`Error::Refused`], [`Error::OutOfMemory`]: virtual memory is off, and the fallback refuses or finds no room;
    /// * [`Error::NoThread`]: memory is to be mapped ahead, and the thread for that cannot be started.
    pub fn build(self) -> Result<GrowableBuffer<T>> {
        let type_name = core::any::type_name::<T>;
        let size = size_of::<T>() as u64;
        if self.max_len == 0 {
            return Err(Error::ZeroLength { what: "a maximum length" });
        }
        if size == 0 {
            return Err(Error::ZeroSizedType { type_name: type_name() });
        }
        let overflow = || Error::Overflow { what: "a buffer", count: self.max_len as u64, size };
        let bytes = (self.max_len as u64).checked_mul(size).filter(|bytes| isize::try_from(*bytes).is_ok());
        let bytes = bytes.ok_or_else(overflow)?;
        let verdict = self.device.verdict();
        let granularity = verdict.granularity();
        let align = align_of::<T>() as u64;
        if align > granularity.get() {
            return Err(Error::Alignment { type_name: type_name(), align: Bytes::new(align), granularity });
        }
        if size > granularity.get() {
            return Err(Error::ElementTooLarge { type_name: type_name(), size: Bytes::new(size), granularity });
        }
        if let Fallback::Capacity(capacity) = self.fallback
            && capacity.get() < size
        {
            return Err(Error::ZeroLength { what: "a fallback capacity" });
        }
        let pool = self.pool.as_ref().unwrap_or(self.device.pool());
        if !Arc::ptr_eq(pool.card(), self.device.card()) {
            let (theirs, ours) = (pool.card().id(), self.device.info().id());
            return Err(Error::OtherDevice { what: "a pool", theirs, ours });
        }
        let mut request = BackingRequest::new(pool, Bytes::new(bytes), Bytes::new(align));
        request.sizing = self.sizing.unwrap_or(self.device.default_sizing());
        request.fallback = self.fallback;
        request.hooks = self.hooks.clone();
        request.retire = self.retire;
        let backing = verdict.open(&request)?;
        let mut buffer = GrowableBuffer::over(&self.device, backing, self.max_len);
        let ahead = self.ahead.unwrap_or(self.device.default_ahead());
        if ahead != AheadPolicy::Off {
            buffer.grow_ahead(ahead)?;
        }
        Ok(buffer)
    }
}

impl<T> fmt::Debug for BufferBuilder<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferBuilder")
            .field("device", &self.device.info().id())
            .field("max_len", &self.max_len)
            .field("sizing", &self.sizing)
            .field("fallback", &self.fallback)
            .finish_non_exhaustive()
    }
}
