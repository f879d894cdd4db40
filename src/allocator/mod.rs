//! Rust's allocator traits over spans.
//!
//! A [`SpanAllocator`] gives containers that are generic over an allocator memory that grows in place: a `Vec` that is
//! pushed to gigabytes keeps its address and copies nothing.
//!
//! ```
//! # #[cfg(feature = "allocator-api2-04")]
//! # fn main() -> growspan::Result<()> {
//! use allocator_api2_04::vec::Vec;
//! use growspan::{Bytes, Device, SpanAllocator};
//!
//! let allocator = SpanAllocator::new(&Device::host()?)?;
//! let mut numbers = Vec::with_capacity_in(1 << 20, allocator.clone());
//! let address = numbers.as_ptr();
//! numbers.extend(0_u32..4 << 20);
//! assert_eq!(numbers.as_ptr(), address);
//! assert!(allocator.figures().bytes_committed >= Bytes::mib(16));
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "allocator-api2-04"))]
//! # fn main() {}
//! ```
//!
//! # Where blocks lie
//!
//! From a threshold on (the granularity unless set) a block **owns a span** with [`Headroom`]: to grow is to map more
//! under the same address, to shrink is to unmap, and the spans of freed blocks are kept for the next. Smaller blocks lie
//! side by side in **one shared span**, of which each 2 MiB slot has its chunk only while something lies there: slots
//! that hold nothing, in the middle too, lend their chunks to others and give them back above what is to be kept. Blocks
//! below an eighth of a slot lie apart from larger ones, whose chunks they would keep. What is known of blocks is kept
//! apart from them; nothing is written into the memory.
//!
//! ```text
//! shared   | slot | slot | hole | slot | hole | slot |            addresses, no memory            |
//! block A  | chunk | chunk |  chunk  |                     headroom                               |
//! block B  | chunk |                                  headroom                                    |
//! ```
//!
//! Where virtual memory is off, small blocks lie in a few allocations, and large ones in one each: growing copies.
//!
//! # Who may touch the memory
//!
//! The `Allocator` traits promise memory that safe code reads and writes through plain pointers. So which memory an
//! allocator has is part of its type: [`SpanAllocator`] (of [`HostMemory`]) is built over host-visible devices only, or
//! over [page-locked memory](SpanAllocatorBuilder::build_page_locked) for any device, and implements the traits safely. `SpanAllocator<DeviceMemory>` does not implement them; [`DeviceAllocator`] does, and is
//! had only by an unsafe promise. That safe code cannot get past this is known when it is compiled:
//!
//! ```compile_fail,E0277
//! use allocator_api2_04::vec::Vec;
//! use growspan::{Device, SpanAllocator};
//!
//! let allocator = SpanAllocator::builder(&Device::host().unwrap()).build_on_device().unwrap();
//! let numbers: Vec<u8, _> = Vec::new_in(allocator); // no `Allocator`
//! ```
//!
//! ```compile_fail,E0133
//! use allocator_api2_04::vec::Vec;
//! use growspan::{Device, SpanAllocator};
//!
//! let allocator = SpanAllocator::builder(&Device::host().unwrap()).build_on_device().unwrap();
//! let numbers: Vec<u8, _> = Vec::new_in(allocator.assume_never_dereferenced()); // not without `unsafe`
//! ```
//!
//! ```
//! # #[cfg(feature = "allocator-api2-04")] {
//! use allocator_api2_04::vec::Vec;
//! use growspan::{Device, SpanAllocator};
//!
//! let allocator = SpanAllocator::builder(&Device::host().unwrap()).build_on_device().unwrap();
//! // SAFETY: the vector is only asked for its capacity and its address.
//! let numbers: Vec<u8, _> = Vec::with_capacity_in(100, unsafe { allocator.assume_never_dereferenced() });
//! # drop(numbers);
//! # }
//! ```
//!
//! # Why the implementations are sound
//!
//! What std asks of an allocator, and how it is kept:
//! * **Blocks stay valid until they are given back, or the last equivalent allocator is gone.** All clones, those with
//!   a stream too, share one core by reference count, and any of them takes back what another gave out. Nothing that is
//!   done with one handle moves or unmaps a block of another: only `deallocate`, `grow` and `shrink` do, for the block
//!   they are given. When the last handle is dropped while blocks are live, their memory is *not* taken back: it stays for
//!   the rest of the process, and a line in the log says how many blocks there were.
//! * **Blocks do not overlap.** Each address of the shared span belongs to one region of one heap, which is changed
//!   under its lock alone; a range is in use or in the list of free ones, a bit says so of each small block.
//! * **Cloning and moving do nothing to blocks**: a handle is a counted reference.
//! * **A failure leaves the block valid**: it is only given back when its contents are in the new one.
//! * In a forked child the memory is not there. Allocating fails there ([`Error::Forked`]), and giving back does nothing.

mod block;
mod builder;
mod classes;
mod ground;
mod heap;
mod inner;
mod large;
mod lock;
#[cfg(test)]
mod measured;
mod ranges;
mod region;
mod slab;
mod streams;
mod traits;
mod wrap;

use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use std::sync::Arc;

pub use block::Block;
pub use builder::SpanAllocatorBuilder;
pub use large::Headroom;
pub use traits::{PointerAllocator, RawAllocator};
pub use wrap::{
    AllocatorStats, ArenaAllocator, Failure, LimitedAllocator, LiveBlock, RetryAllocator, StatsAllocator,
    TrackingAllocator,
};

use self::block::address_of;
use self::inner::Core;
use crate::bytes::Bytes;
use crate::device::Device;
use crate::driver::RawStream;
use crate::error::{Error, Result};
use crate::pinned::PinnedPiece;

/// Memory that the host may read and write.
#[derive(Clone, Copy, Debug)]
pub enum HostMemory {}

/// Memory of a device, of which the host only has addresses.
#[derive(Clone, Copy, Debug)]
pub enum DeviceMemory {}

/// An allocator over spans. Cheap to clone; all clones are equivalent: what one gave out any other takes back.
///
/// See the [module](self) for what it does and why it is sound.
///
/// ```
/// use core::alloc::Layout;
/// use growspan::{Device, SpanAllocator};
///
/// # fn main() -> growspan::Result<()> {
/// let allocator = SpanAllocator::new(&Device::host()?)?;
/// let layout = Layout::from_size_align(3 << 20, 64).unwrap();
/// let block = allocator.allocate_zeroed(layout)?;
/// let larger = Layout::from_size_align(900 << 20, 64).unwrap();
/// // SAFETY: the block is live, was allocated with that layout, and nobody else uses it.
/// let grown = unsafe { allocator.grow(block.ptr(), layout, larger) };
/// # // A machine may not have the memory.
/// # let (grown, larger) = grown.map_or((block, layout), |grown| (grown, larger));
/// assert_eq!(grown.ptr(), block.ptr());
/// // SAFETY: as above.
/// unsafe { allocator.deallocate(grown.ptr(), larger) };
/// # Ok(())
/// # }
/// ```
pub struct SpanAllocator<M = HostMemory> {
    core: Arc<Core>,
    stream: Option<RawStream>,
    _memory: PhantomData<fn() -> M>,
}

impl SpanAllocator<HostMemory> {
    /// An allocator with the defaults, whose memory the host may touch.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`] for a device whose memory the host cannot touch; [`Error::Reserve`] if addresses cannot
    /// be had.
    pub fn new(device: &Device) -> Result<Self> {
        Self::builder(device).build()
    }

    /// Starts to build an allocator, of either kind of memory.
    pub fn builder(device: &Device) -> SpanAllocatorBuilder {
        SpanAllocatorBuilder::new(device)
    }

    /// Where the device sees [page-locked](SpanAllocatorBuilder::build_page_locked) memory, a block or part of one: what
    /// the driver said, which need not be the host's address. None for nothing, for memory that is not page-locked and
    /// this allocator's, and where the device does not see all of it in one run of addresses.
    #[must_use]
    pub fn device_ptr<T>(&self, memory: *const [T]) -> Option<u64> {
        PinnedPiece::in_a_row(&self.pinned_pieces(memory))
    }

    /// The parts of [page-locked](SpanAllocatorBuilder::build_page_locked) memory that the device knows as one each, in
    /// order: **a copy of CUDA's that reaches from one into the next fails**. Copies of this crate are cut there. Offsets
    /// count from where `memory` begins. None of memory that is not page-locked and this allocator's.
    #[must_use]
    pub fn pinned_pieces<T>(&self, memory: *const [T]) -> Vec<PinnedPiece> {
        let (start, bytes) =
            (memory.cast::<T>().addr() as u64, (memory.len() as u64).saturating_mul(size_of::<T>() as u64));
        let locked = self.core.ground.locked.as_ref();
        locked.and_then(|locked| locked.pieces(start, bytes)).unwrap_or_default()
    }

    /// The same allocator for code that does not touch its memory on the host.
    #[must_use]
    pub fn into_device_memory(self) -> SpanAllocator<DeviceMemory> {
        SpanAllocator { core: self.core, stream: self.stream, _memory: PhantomData }
    }
}

impl SpanAllocator<DeviceMemory> {
    /// The same as something that containers take for an `Allocator`.
    ///
    /// # Safety
    /// No host code reads or writes through a pointer to this allocator's memory, nor makes a reference to it, unless the
    /// device's memory is host-visible. Containers that are built on it may be asked for capacity, length and address, and
    /// may grow, shrink and be dropped, as long as that runs no code that touches elements: those have no destructor, and
    /// lengths are set, not pushed.
    ///
    /// A container gives its memory back when it is dropped or moves it, from safe code: work on the device that uses a
    /// block is over by then, or was queued on the handle's stream (see [`with_stream`](Self::with_stream)).
    #[must_use]
    pub unsafe fn assume_never_dereferenced(self) -> DeviceAllocator {
        DeviceAllocator(self)
    }
}

impl<M> SpanAllocator<M> {
    /// The device it takes memory of; of page-locked memory, the one that reaches it.
    #[must_use]
    pub fn device(&self) -> &Device {
        let ground = &self.core.ground;
        ground.locked.as_ref().map_or(&ground.device, |locked| locked.device())
    }

    /// A handle for work on one stream. Blocks given back through it wait for what is queued on the stream by then; until
    /// that has passed only this stream can have them again, at once. Clearing, and copying where a block has to move,
    /// are queued on the stream.
    ///
    /// The stream has to live as long as the handle does, and until what was given back through it has passed. Each block
    /// that is given back takes an event, which is used again later.
    ///
    /// It is equivalent to the other handles: they take back each other's blocks. On the host nothing runs behind the
    /// caller's back, and nothing waits. Page-locked blocks wait, and nobody has them again before.
    ///
    /// # Errors
    /// [`Error::OtherDevice`] for a stream of a simulated device on a real one.
    pub fn with_stream(&self, stream: RawStream) -> Result<Self> {
        self.core.check_stream(stream)?;
        Ok(Self { core: Arc::clone(&self.core), stream: Some(stream), _memory: PhantomData })
    }

    /// Whether another handle is of the same allocator.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }

    /// Gives all memory that holds nothing back to the pool, and the spans of freed blocks to the driver. Waits for the
    /// device before it unmaps anything. Returns how much.
    #[allow(clippy::must_use_candidate, reason = "trimming is what it is called for")]
    pub fn trim(&self) -> Bytes {
        Bytes::new(self.core.trim())
    }

    /// What it holds.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.core.figures()
    }

    #[inline]
    fn block(&self, address: u64, layout: Layout) -> Result<Block> {
        let nowhere = || Error::Overflow { what: "an address", count: address, size: 1 };
        Block::at(address, layout.size()).ok_or_else(nowhere)
    }

    /// A block of `layout.size()` bytes, which hold anything. For a size of zero it is an aligned address without memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::OutOfFiles`], [`Error::OutOfMaps`] with the figures, after everything that holds
    /// nothing was given back and it was tried once more; [`Error::Reserve`], [`Error::Blocked`] when the addresses are
    /// used up; [`Error::Alignment`] beyond the granularity; [`Error::Capturing`]; [`Error::Forked`]; what the driver says.
    #[inline]
    pub fn allocate(&self, layout: Layout) -> Result<Block> {
        if layout.size() == 0 {
            return Ok(Block::nothing(layout));
        }
        let address = self.core.allocate(layout, self.stream)?;
        self.block(address, layout)
    }

    /// A block of zeros, also where the memory was used before.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate).
    pub fn allocate_zeroed(&self, layout: Layout) -> Result<Block> {
        let block = self.allocate(layout)?;
        match self.core.clear(block.device_ptr(), block.len(), self.stream) {
            Ok(()) => Ok(block),
            Err(error) => {
                // SAFETY: the block was just allocated with this layout, and nobody else knows of it.
                unsafe { self.deallocate(block.ptr(), layout) };
                Err(error)
            }
        }
    }

    /// Gives a block back.
    ///
    /// # Safety
    /// As for [`RawAllocator::deallocate`].
    #[inline]
    pub unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
        if layout.size() > 0 {
            self.core.deallocate(address_of(at), layout, self.stream);
        }
    }

    /// Makes a block larger: where it is if it owns a span with room, or if what follows it is free; else it is copied.
    ///
    /// # Safety
    /// As for [`RawAllocator::grow`].
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate); the block is then as it was.
    pub unsafe fn grow(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        if old.size() == 0 {
            return self.allocate(new);
        }
        let address = self.core.grow(address_of(at), old, new, self.stream)?;
        self.block(address, new)
    }

    /// The same, and what is added holds zeros.
    ///
    /// # Safety
    /// As for [`RawAllocator::grow`].
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate); the block is then as it was, though it may have more memory under it.
    pub unsafe fn grow_zeroed(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        if old.size() == 0 {
            return self.allocate_zeroed(new);
        }
        let address = self.core.grow_zeroed(address_of(at), old, new, self.stream)?;
        self.block(address, new)
    }

    /// Makes a block smaller and gives back what that frees: whole chunks of a block that owns a span, the rest of one
    /// that lies in the shared span. One that has more than twice what it needs may move. What cannot be given back just
    /// now goes when the block does.
    ///
    /// # Safety
    /// As for [`RawAllocator::shrink`].
    ///
    /// # Errors
    /// Only where the new layout is aligned more strictly: as for [`allocate`](Self::allocate).
    pub unsafe fn shrink(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        if old.size() == 0 {
            return Ok(Block::nothing(new));
        }
        if new.size() == 0 {
            self.core.deallocate(address_of(at), old, self.stream);
            return Ok(Block::nothing(new));
        }
        let address = self.core.shrink(address_of(at), old, new, self.stream)?;
        self.block(address, new)
    }

    /// Copies bytes into a block. It is over when this returns; on a handle with a stream it waits for what is queued there.
    ///
    /// # Safety
    /// As for [`RawAllocator::copy_in`].
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn copy_in(&self, to: NonNull<u8>, from: &[u8]) -> Result<()> {
        self.core.copy_in(address_of(to), from, self.stream)
    }

    /// Copies bytes out of a block. It is over when this returns; on a handle with a stream it waits for what is queued there.
    ///
    /// # Safety
    /// As for [`RawAllocator::copy_out`].
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn copy_out(&self, to: &mut [u8], from: NonNull<u8>) -> Result<()> {
        self.core.copy_out(to, address_of(from), self.stream)
    }

    /// Copies between places of blocks, on the device.
    ///
    /// # Safety
    /// As for [`RawAllocator::copy`].
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, bytes: usize) -> Result<()> {
        self.core.copy(address_of(to), address_of(from), bytes, self.stream)
    }

    /// Sets bytes of a block to zero.
    ///
    /// # Safety
    /// As for [`RawAllocator::clear`].
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn clear(&self, at: NonNull<u8>, bytes: usize) -> Result<()> {
        self.core.clear(address_of(at), bytes, self.stream)
    }
}

impl<M> Clone for SpanAllocator<M> {
    fn clone(&self) -> Self {
        Self { core: Arc::clone(&self.core), stream: self.stream, _memory: PhantomData }
    }
}

impl<M> fmt::Debug for SpanAllocator<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanAllocator")
            .field("device", &self.device().info().id())
            .field("stream", &self.stream)
            .field("figures", &self.figures())
            .finish()
    }
}

/// A [`SpanAllocator`] that containers take for an `Allocator` although the host cannot touch its memory. Only
/// [`SpanAllocator::assume_never_dereferenced`] makes one.
#[derive(Clone, Debug)]
pub struct DeviceAllocator(SpanAllocator<DeviceMemory>);

impl DeviceAllocator {
    /// The allocator below, for its figures and its own methods.
    #[must_use]
    pub fn spans(&self) -> &SpanAllocator<DeviceMemory> {
        &self.0
    }

    /// A handle for work on one stream, as [`SpanAllocator::with_stream`] says. The promise made for this one holds for it.
    ///
    /// # Errors
    /// As there.
    pub fn with_stream(&self, stream: RawStream) -> Result<Self> {
        self.0.with_stream(stream).map(Self)
    }
}

/// Goes to the inherent methods of the same names.
macro_rules! raw_through {
    ([$($generics:tt)*] $ty:ty, $this:ident => $inner:expr) => {
        // SAFETY: see the module's documentation, which argues it point by point.
        unsafe impl<$($generics)*> RawAllocator for $ty {
            fn device(&self) -> &Device {
                let $this = self;
                $inner.device()
            }

            #[inline]
            fn allocate(&self, layout: Layout) -> Result<Block> {
                let $this = self;
                $inner.allocate(layout)
            }

            fn allocate_zeroed(&self, layout: Layout) -> Result<Block> {
                let $this = self;
                $inner.allocate_zeroed(layout)
            }

            #[inline]
            unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
                let $this = self;
                // SAFETY: the contract is the same.
                unsafe { $inner.deallocate(at, layout) }
            }

            unsafe fn grow(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
                let $this = self;
                // SAFETY: the contract is the same.
                unsafe { $inner.grow(at, old, new) }
            }

            unsafe fn grow_zeroed(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
                let $this = self;
                // SAFETY: the contract is the same.
                unsafe { $inner.grow_zeroed(at, old, new) }
            }

            unsafe fn shrink(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
                let $this = self;
                // SAFETY: the contract is the same.
                unsafe { $inner.shrink(at, old, new) }
            }

            unsafe fn copy_in(&self, to: NonNull<u8>, from: &[u8]) -> Result<()> {
                let $this = self;
                // SAFETY: the contract is the same.
                unsafe { $inner.copy_in(to, from) }
            }

            unsafe fn copy_out(&self, to: &mut [u8], from: NonNull<u8>) -> Result<()> {
                let $this = self;
                // SAFETY: the contract is the same.
                unsafe { $inner.copy_out(to, from) }
            }

            unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, bytes: usize) -> Result<()> {
                let $this = self;
                // SAFETY: the contract is the same.
                unsafe { $inner.copy(to, from, bytes) }
            }

            unsafe fn clear(&self, at: NonNull<u8>, bytes: usize) -> Result<()> {
                let $this = self;
                // SAFETY: the contract is the same.
                unsafe { $inner.clear(at, bytes) }
            }
        }
    };
}

raw_through! { [M] SpanAllocator<M>, this => this }
raw_through! { [] DeviceAllocator, this => this.0 }

// SAFETY: it is only built over devices whose driver says that the host may read and write mapped memory, all of which is
// initialised, and nothing there changes behind the host's back. Page-locked memory a device can change, but only by work
// whose caller promised, as of any memory that is handed to a device, that the host stays away until it is over and that the
// block lives so long.
unsafe impl PointerAllocator for SpanAllocator<HostMemory> {}
// SAFETY: whoever made it promised that nobody dereferences its pointers.
unsafe impl PointerAllocator for DeviceAllocator {}

/// What an allocator holds, at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Figures {
    /// Live blocks.
    pub blocks: u64,
    /// Those of them that own a span.
    pub large_blocks: u64,
    /// What blocks have as they lie there: their sizes, rounded up to a class, a unit, or chunks.
    pub bytes_in_blocks: Bytes,
    /// What is mapped, or allocated where virtual memory is off.
    pub bytes_committed: Bytes,
    /// What of it holds nothing and can be given back.
    pub bytes_idle: Bytes,
    /// Addresses reserved.
    pub bytes_reserved: Bytes,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blocks, large_blocks, bytes_in_blocks, bytes_committed, bytes_idle, bytes_reserved } = self;
        write!(
            f,
            "{blocks} blocks of {bytes_in_blocks} ({large_blocks} with a span of their own), {bytes_committed} committed, \
             {bytes_idle} idle, {bytes_reserved} reserved"
        )
    }
}
