//! What allocators have in common, and the `Allocator` traits of other crates.

use core::alloc::Layout;
use core::ptr::NonNull;

use super::block::Block;
use crate::device::Device;
use crate::error::Result;

/// An allocator of this crate, or one stacked on another: the vocabulary of Rust's `Allocator` trait, with errors that say
/// what happened and blocks that the host may not be able to touch.
///
/// The wrappers of this crate are generic over it, and so can yours be.
///
/// # Safety
/// An implementor promises of each block that it hands out:
/// * it is `layout.size()` bytes of device memory at an address aligned as the layout says, and overlaps no other block
///   that is live;
/// * it stays valid, where it is, until it is given back through this allocator or any equivalent one (all clones of an
///   allocator are equivalent), or until the last of them is dropped, whatever is done with the others before;
/// * moving or cloning an allocator does nothing to its blocks.
///
/// A method that fails has changed nothing: the block that was to grow or shrink is as it was.
pub unsafe trait RawAllocator {
    /// The device it takes memory of.
    fn device(&self) -> &Device;

    /// A block of at least `layout.size()` bytes. For a size of zero it is an aligned address without memory.
    ///
    /// # Errors
    /// When there is no memory, or no block of this layout is possible.
    fn allocate(&self, layout: Layout) -> Result<Block>;

    /// A block of zeros.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate).
    fn allocate_zeroed(&self, layout: Layout) -> Result<Block>;

    /// Gives a block back.
    ///
    /// # Safety
    /// `at` is the beginning of a live block of this allocator, `layout` what it was last allocated, grown or shrunk
    /// with, and nothing on the host uses it any more. Nor does the device, but for work that was queued on the
    /// allocator's stream, if it has one.
    unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout);

    /// Makes a block larger: at the same address if that can be, else at another one, with its contents.
    ///
    /// # Safety
    /// As for [`deallocate`](Self::deallocate) with `old`, since the block may move; `new` is no smaller.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate).
    unsafe fn grow(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block>;

    /// The same, and what is added holds zeros.
    ///
    /// # Safety
    /// As for [`grow`](Self::grow).
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate).
    unsafe fn grow_zeroed(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block>;

    /// Makes a block smaller, at the same address if that can be. What lay behind is gone.
    ///
    /// # Safety
    /// As for [`deallocate`](Self::deallocate) with `old`; `new` is no larger.
    ///
    /// # Errors
    /// As for [`allocate`](Self::allocate).
    unsafe fn shrink(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block>;

    /// Copies bytes into a block. It is over when this returns; on a handle with a stream it waits for what is queued there.
    ///
    /// # Safety
    /// `[to, to + from.len())` lies in a live block that the caller may change.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn copy_in(&self, to: NonNull<u8>, from: &[u8]) -> Result<()>;

    /// Copies bytes out of a block. It is over when this returns; on a handle with a stream it waits for what is queued there.
    ///
    /// # Safety
    /// `[from, from + to.len())` lies in a live block whose contents the caller may read.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn copy_out(&self, to: &mut [u8], from: NonNull<u8>) -> Result<()>;

    /// Copies between places of blocks, on the device: queued on the handle's stream, or without one over when this
    /// returns.
    ///
    /// # Safety
    /// `[to, to + bytes)` and `[from, from + bytes)` lie in live blocks of the same device and do not overlap; the caller
    /// may change the one and read the other.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, bytes: usize) -> Result<()>;

    /// Sets bytes of a block to zero: queued on the handle's stream, or without one done when this returns.
    ///
    /// # Safety
    /// `[at, at + bytes)` lies in a live block that the caller may change.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn clear(&self, at: NonNull<u8>, bytes: usize) -> Result<()>;
}

/// An allocator whose blocks may be handed to code that takes Rust's `Allocator`: such code, all of it safe, reads and
/// writes through the pointers.
///
/// # Safety
/// The host may read and write every block through its pointer, or somebody has promised in unsafe code that nobody
/// will ([`SpanAllocator::assume_never_dereferenced`](super::SpanAllocator::assume_never_dereferenced)).
pub unsafe trait PointerAllocator: RawAllocator {}

// SAFETY: everything goes to the allocator referred to.
unsafe impl<A: RawAllocator + ?Sized> RawAllocator for &A {
    fn device(&self) -> &Device {
        (**self).device()
    }

    fn allocate(&self, layout: Layout) -> Result<Block> {
        (**self).allocate(layout)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<Block> {
        (**self).allocate_zeroed(layout)
    }

    unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
        // SAFETY: the contract is the same.
        unsafe { (**self).deallocate(at, layout) }
    }

    unsafe fn grow(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        unsafe { (**self).grow(at, old, new) }
    }

    unsafe fn grow_zeroed(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        unsafe { (**self).grow_zeroed(at, old, new) }
    }

    unsafe fn shrink(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<Block> {
        // SAFETY: the contract is the same.
        unsafe { (**self).shrink(at, old, new) }
    }

    unsafe fn copy_in(&self, to: NonNull<u8>, from: &[u8]) -> Result<()> {
        // SAFETY: the contract is the same.
        unsafe { (**self).copy_in(to, from) }
    }

    unsafe fn copy_out(&self, to: &mut [u8], from: NonNull<u8>) -> Result<()> {
        // SAFETY: the contract is the same.
        unsafe { (**self).copy_out(to, from) }
    }

    unsafe fn copy(&self, to: NonNull<u8>, from: NonNull<u8>, bytes: usize) -> Result<()> {
        // SAFETY: the contract is the same.
        unsafe { (**self).copy(to, from, bytes) }
    }

    unsafe fn clear(&self, at: NonNull<u8>, bytes: usize) -> Result<()> {
        // SAFETY: the contract is the same.
        unsafe { (**self).clear(at, bytes) }
    }
}

// SAFETY: as for the allocator referred to.
unsafe impl<A: PointerAllocator + ?Sized> PointerAllocator for &A {}

/// Stamps the `Allocator` trait of a crate, whose module is in scope as `api`, for allocators of this crate. All methods
/// are there: the trait's own bodies would copy where growing in place will do.
///
/// For std's trait, which is not stable, it is stamped under `--cfg growspan_std_allocator`, and `ci/containers.sh` tries it
/// with std's collections. Where std has its `AllocatorClone`, those that are `Clone` have it too: their clones are
/// equivalent (see [`RawAllocator`]).
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04", growspan_std_allocator))]
macro_rules! stamp {
    ($( [$($generics:tt)*] $ty:ty, )*) => { $(
        // SAFETY: `RawAllocator` asks for all that this trait does, in the same words: blocks that fit their layout, do
        // not overlap, and stay valid until they are given back through any clone or the last clone is gone; and failures
        // that leave the block as it was. `PointerAllocator` adds that the pointers may be used, or that nobody will.
        unsafe impl<$($generics)*> api::Allocator for $ty {
            #[inline]
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, api::AllocError> {
                RawAllocator::allocate(self, layout).map(Block::as_slice).map_err(|_| api::AllocError)
            }

            #[inline]
            fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, api::AllocError> {
                RawAllocator::allocate_zeroed(self, layout).map(Block::as_slice).map_err(|_| api::AllocError)
            }

            #[inline]
            unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
                // SAFETY: the contract is the same; whoever uses the device owes it the rest.
                unsafe { RawAllocator::deallocate(self, at, layout) }
            }

            #[inline]
            unsafe fn grow(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, api::AllocError> {
                // SAFETY: the contract is the same.
                let grown = unsafe { RawAllocator::grow(self, at, old, new) };
                grown.map(Block::as_slice).map_err(|_| api::AllocError)
            }

            #[inline]
            unsafe fn grow_zeroed(
                &self,
                at: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, api::AllocError> {
                // SAFETY: the contract is the same.
                let grown = unsafe { RawAllocator::grow_zeroed(self, at, old, new) };
                grown.map(Block::as_slice).map_err(|_| api::AllocError)
            }

            #[inline]
            unsafe fn shrink(&self, at: NonNull<u8>, old: Layout, new: Layout) -> Result<NonNull<[u8]>, api::AllocError> {
                // SAFETY: the contract is the same.
                let shrunk = unsafe { RawAllocator::shrink(self, at, old, new) };
                shrunk.map(Block::as_slice).map_err(|_| api::AllocError)
            }
        }
    )* };
}

/// Stamps one version of the trait for all allocators of this crate.
#[cfg(any(feature = "allocator-api2-02", feature = "allocator-api2-04", growspan_std_allocator))]
macro_rules! stamp_all {
    ($name:ident, $($api:ident)::+) => {
        mod $name {
            use core::alloc::Layout;
            use core::ptr::NonNull;

            use super::super::{
                ArenaAllocator, Block, DeviceAllocator, LimitedAllocator, PointerAllocator, RawAllocator, RetryAllocator,
                SpanAllocator, StatsAllocator, TrackingAllocator,
            };
            use $($api)::+ as api;

            stamp! {
                [] SpanAllocator,
                [] DeviceAllocator,
                [A: PointerAllocator] LimitedAllocator<A>,
                [A: PointerAllocator] TrackingAllocator<A>,
                [A: PointerAllocator] StatsAllocator<A>,
                [A: PointerAllocator] RetryAllocator<A>,
                [A: PointerAllocator] ArenaAllocator<A>,
            }
        }
    };
}

#[cfg(feature = "allocator-api2-02")]
stamp_all! { version_02, allocator_api2_02::alloc }
#[cfg(feature = "allocator-api2-04")]
stamp_all! { version_04, allocator_api2_04::alloc }
#[cfg(growspan_std_allocator)]
stamp_all! { version_std, core::alloc }
