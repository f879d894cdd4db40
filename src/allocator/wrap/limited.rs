//! A bound on how much is allocated.

use core::alloc::Layout;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use super::super::{Block, PointerAllocator, RawAllocator};
use super::reach_through;
use crate::bytes::Bytes;
use crate::device::Device;
use crate::error::{Error, Result};

/// Refuses blocks beyond a limit, counted in the bytes asked for. Clones share it.
///
/// ```
/// use core::alloc::Layout;
/// use growspan::{Bytes, Device, Error, LimitedAllocator, RawAllocator, SpanAllocator};
///
/// # fn main() -> growspan::Result<()> {
/// let allocator = LimitedAllocator::new(SpanAllocator::new(&Device::host()?)?, Bytes::kib(4));
/// let error = allocator.allocate(Layout::new::<[u8; 5000]>()).unwrap_err();
/// assert!(matches!(error, Error::OverLimit { .. }));
/// assert_eq!(error.to_string(), "4.88 KiB asked for, and 0 B of the limit of 4 KiB are used; free something, or raise it");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct LimitedAllocator<A> {
    inner: A,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    used: AtomicU64,
    limit: AtomicU64,
}

impl<A> LimitedAllocator<A> {
    /// At most `limit` in blocks of `inner`.
    pub fn new(inner: A, limit: Bytes) -> Self {
        let shared = Shared { used: AtomicU64::new(0), limit: AtomicU64::new(limit.get()) };
        Self { inner, shared: Arc::new(shared) }
    }

    /// The allocator below.
    pub const fn inner(&self) -> &A {
        &self.inner
    }

    /// What live blocks were asked for, in all.
    #[must_use]
    pub fn used(&self) -> Bytes {
        Bytes::new(self.shared.used.load(Relaxed))
    }

    /// The limit.
    #[must_use]
    pub fn limit(&self) -> Bytes {
        Bytes::new(self.shared.limit.load(Relaxed))
    }

    /// Sets another limit. Blocks beyond it stay.
    pub fn set_limit(&self, limit: Bytes) {
        self.shared.limit.store(limit.get(), Relaxed);
    }

    /// Takes `bytes` from what is left while `act` works, and gives them back if it fails.
    fn charged<T>(&self, bytes: usize, act: impl FnOnce() -> Result<T>) -> Result<T> {
        let bytes = bytes as u64;
        let limit = self.shared.limit.load(Relaxed);
        let fits = |used: u64| used.checked_add(bytes).filter(|used| bytes == 0 || *used <= limit);
        if let Err(used) = self.shared.used.fetch_update(Relaxed, Relaxed, fits) {
            let (asked, used, limit) = (Bytes::new(bytes), Bytes::new(used), Bytes::new(limit));
            return Err(Error::OverLimit { asked, used, limit });
        }
        let charge = Charge { shared: &self.shared, bytes };
        let done = act()?;
        core::mem::forget(charge);
        Ok(done)
    }

    fn refund(&self, bytes: usize) {
        drop(Charge { shared: &self.shared, bytes: bytes as u64 });
    }
}

/// What is given back when it is dropped: also where the allocator below, or a callback in it, panics.
struct Charge<'a> {
    shared: &'a Shared,
    bytes: u64,
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.shared.used.fetch_sub(self.bytes, Relaxed);
    }
}

// SAFETY: every block is the inner allocator's; clones share the limit and have equivalent inner allocators.
unsafe impl<A: RawAllocator> RawAllocator for LimitedAllocator<A> {
    fn allocate(&self, layout: Layout) -> Result<Block> {
        self.charged(layout.size(), || self.inner.allocate(layout))
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<Block> {
        self.charged(layout.size(), || self.inner.allocate_zeroed(layout))
    }

    unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
        // SAFETY: the contract is the same.
        unsafe { self.inner.deallocate(at, layout) };
        self.refund(layout.size());
    }

    unsafe fn grow(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        self.charged(new.size() - old.size(), || unsafe { self.inner.grow(at, old, new) })
    }

    unsafe fn grow_zeroed(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        self.charged(new.size() - old.size(), || unsafe { self.inner.grow_zeroed(at, old, new) })
    }

    unsafe fn shrink(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        let shrunk = unsafe { self.inner.shrink(at, old, new) }?;
        self.refund(old.size() - new.size());
        Ok(shrunk)
    }

    reach_through! { inner }
}

// SAFETY: its blocks are those of the inner allocator.
unsafe impl<A: PointerAllocator> PointerAllocator for LimitedAllocator<A> {}
