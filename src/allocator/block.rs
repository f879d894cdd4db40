//! A block of memory.

use core::alloc::Layout;
use core::ptr::NonNull;

/// A block that an allocator handed out: where it is and how many bytes of it are yours. It owns nothing; give it back
/// with the layout it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a number, with which nothing can be done without unsafe code.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// A block of `len` bytes at `ptr`.
    #[must_use]
    pub const fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Self { ptr, len }
    }

    /// A block at a device address; none for address zero, or one that a pointer cannot hold.
    #[inline]
    pub(super) fn at(address: u64, len: usize) -> Option<Self> {
        let ptr = core::ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?);
        Some(Self { ptr: NonNull::new(ptr)?, len })
    }

    /// The block for a layout of size zero: aligned, and nowhere.
    #[inline]
    pub(super) fn nothing(layout: Layout) -> Self {
        let ptr = core::ptr::without_provenance_mut(layout.align());
        Self { ptr: NonNull::new(ptr).unwrap_or(NonNull::dangling()), len: 0 }
    }

    /// Its first byte. The host may only use it where it sees the memory.
    #[inline]
    #[must_use]
    pub const fn ptr(self) -> NonNull<u8> {
        self.ptr
    }

    /// The byte so many bytes behind its first one; none beyond its end. As [`ptr`](Self::ptr) the host may only use it
    /// where it sees the memory.
    #[inline]
    #[must_use]
    pub fn place(self, offset: usize) -> Option<NonNull<u8>> {
        // Not `add`: to Rust there may be nothing at a device's address.
        let at = NonNull::new(self.ptr.as_ptr().wrapping_add(offset));
        at.filter(|_| offset <= self.len)
    }

    /// Its device address, which on the host is an ordinary one.
    #[inline]
    #[must_use]
    pub fn device_ptr(self) -> u64 {
        address_of(self.ptr)
    }

    /// Its size, in bytes.
    #[inline]
    #[must_use]
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[inline]
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// All of it, as Rust's `Allocator` has blocks.
    #[inline]
    #[must_use]
    pub const fn as_slice(self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(self.ptr, self.len)
    }
}

/// The device address behind a pointer.
#[inline]
pub(super) fn address_of(at: NonNull<u8>) -> u64 {
    at.as_ptr().expose_provenance() as u64
}
