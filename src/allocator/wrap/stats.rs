//! Counting.

use core::alloc::Layout;
use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use super::super::{Block, PointerAllocator, RawAllocator};
use super::reach_through;
use crate::bytes::Bytes;
use crate::device::Device;
use crate::error::Result;

/// Counts what is asked of the allocator below. Clones count together.
///
/// ```
/// use core::alloc::Layout;
/// use growspan::{Bytes, Device, RawAllocator, SpanAllocator, StatsAllocator};
///
/// # fn main() -> growspan::Result<()> {
/// let allocator = StatsAllocator::new(SpanAllocator::new(&Device::host()?)?);
/// let layout = Layout::new::<[u8; 4096]>();
/// let block = allocator.allocate(layout)?;
/// // SAFETY: live, of this layout, and used by nobody.
/// unsafe { allocator.deallocate(block.ptr(), layout) };
/// let stats = allocator.stats();
/// assert_eq!((stats.number_allocs, stats.peak_bytes, stats.bytes_in_use), (1, Bytes::kib(4), Bytes::ZERO));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct StatsAllocator<A> {
    inner: A,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    allocs: AtomicU64,
    frees: AtomicU64,
    in_place: AtomicU64,
    moved: AtomicU64,
    shrinks: AtomicU64,
    failures: AtomicU64,
    bytes: AtomicU64,
    peak: AtomicU64,
}

/// What was counted. Bytes are those asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocatorStats {
    /// Blocks handed out.
    pub number_allocs: u64,
    /// Blocks given back.
    pub number_frees: u64,
    /// Growths that kept the address.
    pub grows_in_place: u64,
    /// Growths that copied.
    pub grows_moved: u64,
    /// Shrinks.
    pub shrinks: u64,
    /// Requests that failed.
    pub failures: u64,
    /// In live blocks.
    pub bytes_in_use: Bytes,
    /// The most there were at any time.
    pub peak_bytes: Bytes,
}

impl AllocatorStats {
    /// Live blocks.
    #[must_use]
    pub const fn live(&self) -> u64 {
        self.number_allocs.saturating_sub(self.number_frees)
    }
}

impl fmt::Display for AllocatorStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (live, in_use, peak) = (self.live(), self.bytes_in_use, self.peak_bytes);
        let Self { number_allocs, number_frees, grows_in_place, grows_moved, shrinks, failures, .. } = self;
        write!(
            f,
            "{in_use} in {live} blocks (peak {peak}); {number_allocs} allocated, {number_frees} freed, {grows_in_place} \
             grown in place, {grows_moved} moved, {shrinks} shrunk, {failures} failed"
        )
    }
}

impl<A> StatsAllocator<A> {
    /// Counts what is asked of `inner`.
    pub fn new(inner: A) -> Self {
        Self { inner, counts: Arc::default() }
    }

    /// The allocator below.
    pub const fn inner(&self) -> &A {
        &self.inner
    }

    /// What was counted so far.
    #[must_use]
    pub fn stats(&self) -> AllocatorStats {
        let counts = &*self.counts;
        AllocatorStats {
            number_allocs: counts.allocs.load(Relaxed),
            number_frees: counts.frees.load(Relaxed),
            grows_in_place: counts.in_place.load(Relaxed),
            grows_moved: counts.moved.load(Relaxed),
            shrinks: counts.shrinks.load(Relaxed),
            failures: counts.failures.load(Relaxed),
            bytes_in_use: Bytes::new(counts.bytes.load(Relaxed)),
            peak_bytes: Bytes::new(counts.peak.load(Relaxed)),
        }
    }

    /// Makes what is in use now the peak.
    pub fn reset_peak(&self) {
        self.counts.peak.store(self.counts.bytes.load(Relaxed), Relaxed);
    }

    fn failed(&self) {
        self.counts.failures.fetch_add(1, Relaxed);
    }

    fn add(&self, bytes: usize) {
        let bytes = bytes as u64;
        let now = self.counts.bytes.fetch_add(bytes, Relaxed) + bytes;
        self.counts.peak.fetch_max(now, Relaxed);
    }

    fn allocated(&self, layout: Layout, result: Result<Block>) -> Result<Block> {
        let block = result.inspect_err(|_| self.failed())?;
        self.counts.allocs.fetch_add(1, Relaxed);
        self.add(layout.size());
        Ok(block)
    }

    fn grown(&self, at: NonNull<u8>, old: Layout, new: Layout, result: Result<Block>) -> Result<Block> {
        let block = result.inspect_err(|_| self.failed())?;
        let moved = block.ptr() != at;
        (if moved { &self.counts.moved } else { &self.counts.in_place }).fetch_add(1, Relaxed);
        self.add(new.size() - old.size());
        Ok(block)
    }
}

// SAFETY: every block is the inner allocator's; clones have equivalent ones.
unsafe impl<A: RawAllocator> RawAllocator for StatsAllocator<A> {
    fn allocate(&self, layout: Layout) -> Result<Block> {
        self.allocated(layout, self.inner.allocate(layout))
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<Block> {
        self.allocated(layout, self.inner.allocate_zeroed(layout))
    }

    unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
        // SAFETY: the contract is the same.
        unsafe { self.inner.deallocate(at, layout) };
        self.counts.frees.fetch_add(1, Relaxed);
        self.counts.bytes.fetch_sub(layout.size() as u64, Relaxed);
    }

    unsafe fn grow(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        let result = unsafe { self.inner.grow(at, old, new) };
        self.grown(at, old, new, result)
    }

    unsafe fn grow_zeroed(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        let result = unsafe { self.inner.grow_zeroed(at, old, new) };
        self.grown(at, old, new, result)
    }

    unsafe fn shrink(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        let block = unsafe { self.inner.shrink(at, old, new) }.inspect_err(|_| self.failed())?;
        self.counts.shrinks.fetch_add(1, Relaxed);
        self.counts.bytes.fetch_sub((old.size() - new.size()) as u64, Relaxed);
        Ok(block)
    }

    reach_through! { inner }
}

// SAFETY: its blocks are those of the inner allocator.
unsafe impl<A: PointerAllocator> PointerAllocator for StatsAllocator<A> {}
