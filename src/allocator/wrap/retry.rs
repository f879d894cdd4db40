//! A second chance: somebody frees something, and it is tried once more.

use core::alloc::Layout;
use core::cell::Cell;
use core::fmt;
use core::ptr::NonNull;
use std::sync::Arc;

use super::super::{Block, PointerAllocator, RawAllocator};
use super::reach_through;
use crate::bytes::Bytes;
use crate::device::Device;
use crate::error::{Error, Result};

/// A request that failed.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Failure<'a> {
    /// The size of the block that was asked for.
    pub asked: Bytes,
    /// How often it was tried already: 1 the first time.
    pub tries: u32,
    /// Why it failed.
    pub error: &'a Error,
}

/// Asks a callback when memory runs out: it frees what it can and says whether to try again.
///
/// It is called for shortages ([`Error::OutOfMemory`], [`Error::OutOfFiles`], [`Error::OutOfMaps`],
/// [`Error::OverLimit`]) and for no other error. It may use the allocator itself, to free blocks or to trim it; a request
/// that it makes and that fails is not tried again, so that it is never called from within itself. If it panics, the panic
/// goes to whoever asked, and all books are as before.
///
/// ```
/// use core::alloc::Layout;
/// use growspan::{Bytes, Device, LimitedAllocator, RawAllocator, RetryAllocator, SpanAllocator};
///
/// # fn main() -> growspan::Result<()> {
/// let limited = LimitedAllocator::new(SpanAllocator::new(&Device::host()?)?, Bytes::kib(1));
/// let raise = limited.clone();
/// let allocator = RetryAllocator::new(limited, move |failure| {
///     raise.set_limit(Bytes::kib(64));
///     failure.tries == 1
/// });
/// let layout = Layout::new::<[u8; 5000]>();
/// let block = allocator.allocate(layout)?;
/// // SAFETY: live, of this layout, and used by nobody.
/// unsafe { allocator.deallocate(block.ptr(), layout) };
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RetryAllocator<A> {
    inner: A,
    callback: Arc<Callback>,
}

/// Frees what it can, and says whether to try again.
type Callback = dyn Fn(Failure<'_>) -> bool + Send + Sync;

impl<A> RetryAllocator<A> {
    /// Calls `callback` when `inner` runs short, and tries again as long as it says so.
    pub fn new(inner: A, callback: impl Fn(Failure<'_>) -> bool + Send + Sync + 'static) -> Self {
        Self { inner, callback: Arc::new(callback) }
    }

    /// The allocator below.
    pub const fn inner(&self) -> &A {
        &self.inner
    }

    fn retrying(&self, asked: usize, mut act: impl FnMut() -> Result<Block>) -> Result<Block> {
        let mut tries = 0_u32;
        loop {
            let error = match act() {
                Ok(block) => return Ok(block),
                Err(error) => error,
            };
            let short = error.is_shortage() || matches!(error, Error::OverLimit { .. });
            let Some(_calling) = Calling::begin().filter(|_| short) else { return Err(error) };
            tries = tries.saturating_add(1);
            let failure = Failure { asked: Bytes::new(asked as u64), tries, error: &error };
            if !(self.callback)(failure) {
                return Err(error);
            }
        }
    }
}

/// While it lives, this thread is in a callback.
struct Calling;

thread_local! { static CALLING: Cell<bool> = const { Cell::new(false) } }

impl Calling {
    /// None if this thread is in one already.
    fn begin() -> Option<Self> {
        (!CALLING.replace(true)).then_some(Self)
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        CALLING.set(false);
    }
}

// SAFETY: every block is the inner allocator's. A request that failed has changed nothing, so it can be made again.
unsafe impl<A: RawAllocator> RawAllocator for RetryAllocator<A> {
    fn allocate(&self, layout: Layout) -> Result<Block> {
        self.retrying(layout.size(), || self.inner.allocate(layout))
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<Block> {
        self.retrying(layout.size(), || self.inner.allocate_zeroed(layout))
    }

    unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
        // SAFETY: the contract is the same.
        unsafe { self.inner.deallocate(at, layout) }
    }

    unsafe fn grow(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same; after a failure the block is as it was.
        self.retrying(new.size(), || unsafe { self.inner.grow(at, old, new) })
    }

    unsafe fn grow_zeroed(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same; after a failure the block is as it was.
        self.retrying(new.size(), || unsafe { self.inner.grow_zeroed(at, old, new) })
    }

    unsafe fn shrink(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same; after a failure the block is as it was.
        self.retrying(new.size(), || unsafe { self.inner.shrink(at, old, new) })
    }

    reach_through! { inner }
}

// SAFETY: its blocks are those of the inner allocator.
unsafe impl<A: PointerAllocator> PointerAllocator for RetryAllocator<A> {}

impl<A: fmt::Debug> fmt::Debug for RetryAllocator<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryAllocator").field("inner", &self.inner).finish_non_exhaustive()
    }
}
