//! Who holds what.

use core::alloc::Layout;
use core::fmt;
use core::ptr::NonNull;
use std::backtrace::Backtrace;
use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::super::{Block, PointerAllocator, RawAllocator, address_of};
use super::reach_through;
use crate::bytes::Bytes;
use crate::device::Device;
use crate::error::Result;
use crate::sys::fork::Process;

/// Keeps a list of all live blocks, each with a name, its size, and on request where it was asked for. What is left when
/// the last handle is dropped goes to the log.
///
/// ```
/// use core::alloc::Layout;
/// use growspan::{Device, RawAllocator, SpanAllocator, TrackingAllocator};
///
/// # fn main() -> growspan::Result<()> {
/// let allocator = TrackingAllocator::new(SpanAllocator::new(&Device::host()?)?);
/// let weights = allocator.named("weights");
/// let layout = Layout::new::<[u8; 4096]>();
/// let block = weights.allocate(layout)?;
/// assert_eq!(allocator.live()[0].to_string(), "4 KiB for weights");
/// // SAFETY: live, of this layout, and used by nobody.
/// unsafe { allocator.deallocate(block.ptr(), layout) };
/// assert!(allocator.live().is_empty());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TrackingAllocator<A> {
    inner: A,
    name: Arc<str>,
    book: Arc<Book>,
}

#[derive(Debug)]
struct Book {
    process: Process,
    backtraces: bool,
    live: Mutex<BTreeMap<u64, LiveBlock>>,
}

/// A block that was not given back yet.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LiveBlock {
    /// Its device address.
    pub device_ptr: u64,
    /// The size asked for last.
    pub bytes: Bytes,
    /// The name of the handle that asked for it.
    pub name: Arc<str>,
    /// Where it was asked for, if that is kept.
    pub backtrace: Option<Arc<Backtrace>>,
}

impl fmt::Display for LiveBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.bytes, self.name)?;
        match &self.backtrace {
            Some(trace) => write!(f, ", asked for at\n{trace}"),
            None => Ok(()),
        }
    }
}

impl<A> TrackingAllocator<A> {
    /// Keeps a list of the blocks of `inner`, without back traces.
    pub fn new(inner: A) -> Self {
        Self::over(inner, false)
    }

    /// The same with back traces, whatever the environment says of them. Each takes some microseconds and a few KiB.
    pub fn with_backtraces(inner: A) -> Self {
        Self::over(inner, true)
    }

    fn over(inner: A, backtraces: bool) -> Self {
        let book = Book { process: Process::this(), backtraces, live: Mutex::default() };
        Self { inner, name: Arc::from("unnamed"), book: Arc::new(book) }
    }

    /// A handle whose blocks have this name. It shares the list.
    #[must_use]
    pub fn named(&self, name: &str) -> Self
    where
        A: Clone,
    {
        Self { inner: self.inner.clone(), name: Arc::from(name), book: Arc::clone(&self.book) }
    }

    /// The allocator below.
    pub const fn inner(&self) -> &A {
        &self.inner
    }

    /// All live blocks, by address.
    #[must_use]
    pub fn live(&self) -> Vec<LiveBlock> {
        self.book.entries().map_or(Vec::new(), |live| live.values().cloned().collect())
    }

    /// What each name holds: how many blocks, and how much, the most first.
    #[must_use]
    pub fn by_name(&self) -> Vec<(Arc<str>, usize, Bytes)> {
        let mut sums: BTreeMap<Arc<str>, (usize, u64)> = BTreeMap::new();
        for block in self.book.entries().iter().flat_map(|live| live.values()) {
            let sum = sums.entry(Arc::clone(&block.name)).or_default();
            *sum = (sum.0 + 1, sum.1 + block.bytes.get());
        }
        let mut sums: Vec<_> =
            sums.into_iter().map(|(name, (blocks, bytes))| (name, blocks, Bytes::new(bytes))).collect();
        sums.sort_by_key(|(_, _, bytes)| core::cmp::Reverse(*bytes));
        sums
    }

    /// Notes a new block. Those of size zero are nowhere, and not noted.
    fn note(&self, block: Block, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        let backtrace = self.book.backtraces.then(|| Arc::new(Backtrace::force_capture()));
        let (device_ptr, bytes) = (block.device_ptr(), Bytes::new(layout.size() as u64));
        let live = LiveBlock { device_ptr, bytes, name: Arc::clone(&self.name), backtrace };
        self.book.live.lock().insert(device_ptr, live);
    }

    fn forget(&self, at: NonNull<u8>, layout: Layout) -> Option<LiveBlock> {
        if layout.size() == 0 {
            return None;
        }
        self.book.entries()?.remove(&address_of(at))
    }

    /// Changes a block, which keeps its name. Its entry is taken out meanwhile: once the allocator below has the old
    /// address back, another thread may get it.
    fn change(&self, at: NonNull<u8>, old: Layout, new: Layout, act: impl FnOnce() -> Result<Block>) -> Result<Block> {
        let mut entry = Entry { book: &self.book, block: self.forget(at, old) };
        let block = act()?;
        match &mut entry.block {
            Some(known) => (known.device_ptr, known.bytes) = (block.device_ptr(), Bytes::new(new.size() as u64)),
            None => self.note(block, new),
        }
        Ok(block)
    }
}

/// An entry that is put into the list when this is dropped: as it was where the allocator below failed, or panicked.
struct Entry<'a> {
    book: &'a Book,
    block: Option<LiveBlock>,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        // A block of size zero is nowhere.
        if let Some(block) = self.block.take().filter(|block| !block.bytes.is_zero()) {
            self.book.live.lock().insert(block.device_ptr, block);
        }
    }
}

impl Book {
    /// The list; none in a forked child, where another thread may have held its lock.
    fn entries(&self) -> Option<MutexGuard<'_, BTreeMap<u64, LiveBlock>>> {
        self.process.is_this().then(|| self.live.lock())
    }
}

impl Drop for Book {
    fn drop(&mut self) {
        // A child has the parent's blocks, whose memory it does not have.
        let live = self.live.get_mut().values().filter(|_| self.process.is_this());
        for block in live {
            tracing::warn!(bytes = %block.bytes, name = %block.name, backtrace = ?block.backtrace, "a block was never given back");
        }
    }
}

// SAFETY: every block is the inner allocator's; clones have equivalent ones.
unsafe impl<A: RawAllocator> RawAllocator for TrackingAllocator<A> {
    fn allocate(&self, layout: Layout) -> Result<Block> {
        self.inner.allocate(layout).inspect(|block| self.note(*block, layout))
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<Block> {
        self.inner.allocate_zeroed(layout).inspect(|block| self.note(*block, layout))
    }

    unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
        self.forget(at, layout);
        // SAFETY: the contract is the same.
        unsafe { self.inner.deallocate(at, layout) }
    }

    unsafe fn grow(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        self.change(at, old, new, || unsafe { self.inner.grow(at, old, new) })
    }

    unsafe fn grow_zeroed(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        self.change(at, old, new, || unsafe { self.inner.grow_zeroed(at, old, new) })
    }

    unsafe fn shrink(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        self.change(at, old, new, || unsafe { self.inner.shrink(at, old, new) })
    }

    reach_through! { inner }
}

// SAFETY: its blocks are those of the inner allocator.
unsafe impl<A: PointerAllocator> PointerAllocator for TrackingAllocator<A> {}
