//! Memory of a scope, given back all at once.

use core::alloc::Layout;
use core::fmt;
use core::ptr::NonNull;

use parking_lot::Mutex;

use super::super::{Block, PointerAllocator, RawAllocator, address_of};
use super::reach_through;
use crate::bytes::Bytes;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::sys::fork::Process;

/// Takes memory in large blocks and hands it out piece by piece, without taking any of it back before the end: allocating
/// is to add, giving back does nothing (but for the last piece). All of it goes when the arena is reset or dropped.
///
/// Use it by reference: what borrows it cannot outlive it, and it cannot be reset while anything borrows it. On a device
/// the work that uses its memory is over by then.
///
/// ```
/// # #[cfg(feature = "allocator-api2-04")]
/// # fn main() -> growspan::Result<()> {
/// use allocator_api2_04::vec::Vec;
/// use growspan::{ArenaAllocator, Bytes, Device, SpanAllocator};
///
/// let mut arena = ArenaAllocator::new(SpanAllocator::new(&Device::host()?)?, Bytes::mib(1));
/// let mut names = Vec::new_in(&arena);
/// names.push("one");
/// let mut numbers = Vec::new_in(&arena);
/// numbers.push(1);
/// drop((names, numbers));
/// arena.reset();
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "allocator-api2-04"))]
/// # fn main() {}
/// ```
///
/// A container that still borrows the arena keeps it from being reset:
///
/// ```compile_fail,E0502
/// use allocator_api2_04::vec::Vec;
/// use growspan::{ArenaAllocator, Bytes, Device, SpanAllocator};
///
/// let mut arena = ArenaAllocator::new(SpanAllocator::new(&Device::host().unwrap()).unwrap(), Bytes::mib(1));
/// let mut names = Vec::new_in(&arena);
/// arena.reset();
/// names.push("one");
/// ```
pub struct ArenaAllocator<A: RawAllocator> {
    inner: A,
    /// The size of the blocks it takes, in bytes.
    step: usize,
    process: Process,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    blocks: Vec<(Block, Layout)>,
    /// The block that pieces are cut from, and what is left of it: from here to there.
    start: u64,
    next: u64,
    end: u64,
}

impl State {
    /// A piece of what is left, if it is enough.
    fn carve(&mut self, layout: Layout) -> Option<u64> {
        let start = self.next.checked_next_multiple_of(layout.align() as u64).filter(|start| *start > 0)?;
        self.next = start.checked_add(layout.size() as u64).filter(|end| *end <= self.end)?;
        Some(start)
    }
}

/// The alignment of the blocks it takes, in bytes.
const ALIGN: usize = 256;

impl<A: RawAllocator> ArenaAllocator<A> {
    /// An arena that takes memory of `inner`, in blocks of `step` or more.
    pub fn new(inner: A, step: Bytes) -> Self {
        let step = usize::try_from(step.get()).unwrap_or(usize::MAX).max(ALIGN);
        Self { inner, step, process: Process::this(), state: Mutex::default() }
    }

    /// The allocator below.
    pub const fn inner(&self) -> &A {
        &self.inner
    }

    /// How much it has taken.
    #[must_use]
    pub fn taken(&self) -> Bytes {
        if !self.process.is_this() {
            return Bytes::ZERO;
        }
        Bytes::new(self.state.lock().blocks.iter().map(|(block, _)| block.len() as u64).sum())
    }

    /// Gives all of it back.
    pub fn reset(&mut self) {
        let state = core::mem::take(self.state.get_mut());
        for (block, layout) in state.blocks {
            // SAFETY: the block came from the inner allocator with this layout and is given back once. Whoever had a
            // piece of it borrowed the arena, which is ours alone now; work of a device that uses it is over, which whoever
            // queued it saw to.
            unsafe { self.inner.deallocate(block.ptr(), layout) };
        }
    }

    fn piece(&self, layout: Layout) -> Result<Block> {
        if layout.size() == 0 {
            return Ok(Block::nothing(layout));
        }
        self.process.check()?;
        if let Some(start) = self.state.lock().carve(layout) {
            return place(start, layout);
        }
        let bytes = layout.size().max(self.step);
        let whole = Layout::from_size_align(bytes, layout.align().max(ALIGN));
        let size = layout.size() as u64;
        let whole = whole.map_err(|_| Error::Overflow { what: "a block", count: size, size: 1 })?;
        // Not under the lock: the allocator below may ask somebody who asks this arena something.
        let block = self.inner.allocate(whole)?;
        let start = block.device_ptr();
        let mut state = self.state.lock();
        state.blocks.push((block, whole));
        // What was left of the block before is not used any more, unless this one is full at once.
        if bytes as u64 - size >= state.end - state.next {
            *state = State {
                blocks: core::mem::take(&mut state.blocks),
                start,
                next: start + size,
                end: start + bytes as u64,
            };
        }
        place(start, layout)
    }

    /// Makes a piece larger or smaller if it is the last. False if it is not, or there is no room.
    fn resize_last(&self, at: NonNull<u8>, old: usize, new: usize) -> bool {
        if !self.process.is_this() {
            return false;
        }
        let start = address_of(at);
        let mut state = self.state.lock();
        // A piece with a block of its own may lie just before this one.
        let is_last = old > 0 && start >= state.start && start + old as u64 == state.next;
        match start.checked_add(new as u64).filter(|end| is_last && *end <= state.end) {
            Some(end) => {
                state.next = end;
                true
            }
            None => false,
        }
    }

    /// The same piece with more room, or another with its contents.
    ///
    /// # Safety
    /// As for [`RawAllocator::grow`].
    unsafe fn larger(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        if address_of(at).is_multiple_of(new.align() as u64) && self.resize_last(at, old.size(), new.size()) {
            return Ok(Block::new(at, new.size()));
        }
        let block = self.piece(new)?;
        if old.size() > 0 {
            // SAFETY: both are live pieces of blocks of the inner allocator and do not overlap; the new one is no smaller.
            unsafe { self.inner.copy(block.ptr(), at, old.size()) }?;
        }
        Ok(block)
    }
}

fn place(start: u64, layout: Layout) -> Result<Block> {
    Block::at(start, layout.size()).ok_or(Error::Overflow { what: "an address", count: start, size: 1 })
}

// SAFETY: pieces are handed out once, from blocks of the inner allocator that stay until the arena is reset or dropped,
// which takes the only reference there is. It is not `Clone`.
unsafe impl<A: RawAllocator> RawAllocator for ArenaAllocator<A> {
    fn allocate(&self, layout: Layout) -> Result<Block> {
        self.piece(layout)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<Block> {
        let block = self.piece(layout)?;
        if !block.is_empty() {
            // SAFETY: the piece is live, and nobody else knows of it.
            unsafe { self.inner.clear(block.ptr(), block.len()) }?;
        }
        Ok(block)
    }

    unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
        self.resize_last(at, layout.size(), 0);
    }

    unsafe fn grow(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        unsafe { self.larger(at, old, new) }
    }

    unsafe fn grow_zeroed(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        let block = unsafe { self.larger(at, old, new) }?;
        let added = new.size() - old.size();
        if let Some(rest) = block.place(old.size()).filter(|_| added > 0) {
            // SAFETY: these are the last of the `new.size()` bytes of a live piece that is the caller's.
            unsafe { self.inner.clear(rest, added) }?;
        }
        Ok(block)
    }

    unsafe fn shrink(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        if !address_of(at).is_multiple_of(new.align() as u64) {
            let block = self.piece(new)?;
            if new.size() > 0 {
                // SAFETY: both are live pieces and do not overlap; both have `new.size()` bytes.
                unsafe { self.inner.copy(block.ptr(), at, new.size()) }?;
            }
            return Ok(block);
        }
        self.resize_last(at, old.size(), new.size());
        Ok(Block::new(at, new.size()))
    }

    reach_through! { inner }
}

// SAFETY: its pieces lie in blocks of the inner allocator.
unsafe impl<A: PointerAllocator> PointerAllocator for ArenaAllocator<A> {}

impl<A: RawAllocator> Drop for ArenaAllocator<A> {
    fn drop(&mut self) {
        self.reset();
    }
}

impl<A: RawAllocator> fmt::Debug for ArenaAllocator<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaAllocator").field("taken", &self.taken()).finish_non_exhaustive()
    }
}
