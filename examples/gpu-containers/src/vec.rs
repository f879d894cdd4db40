//! A vector.

use core::alloc::Layout;
use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;

use bytemuck::Pod;
use growspan::{Block, Error, RawAllocator, Result};

/// A growable array in device memory. Where its allocator's device has virtual memory, a large one grows without moving.
pub struct DeviceVec<T, A: RawAllocator> {
    allocator: A,
    /// None while the capacity is zero.
    block: Option<Block>,
    capacity: usize,
    len: usize,
    _elements: PhantomData<T>,
}

/// What a vector begins with, in bytes.
const FIRST: usize = 4096;

impl<T: Pod, A: RawAllocator> DeviceVec<T, A> {
    /// An empty vector, without memory.
    pub fn new_in(allocator: A) -> Self {
        const { assert!(size_of::<T>() > 0, "elements without a size need no device memory") };
        Self { allocator, block: None, capacity: 0, len: 0, _elements: PhantomData }
    }

    /// An empty vector with memory for `capacity` elements.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn with_capacity_in(capacity: usize, allocator: A) -> Result<Self> {
        let mut this = Self::new_in(allocator);
        this.set_capacity(capacity)?;
        Ok(this)
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many elements there is memory for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The device address of the first element; none while there is no memory.
    pub fn device_ptr(&self) -> Option<u64> {
        self.block.map(Block::device_ptr)
    }

    /// The allocator.
    pub fn allocator(&self) -> &A {
        &self.allocator
    }

    fn layout(capacity: usize) -> Result<Layout> {
        let overflow = Error::Overflow { what: "a vector", count: capacity as u64, size: size_of::<T>() as u64 };
        Layout::array::<T>(capacity).map_err(|_| overflow)
    }

    /// Gives the vector memory for just so many elements, which are no fewer than there are.
    fn set_capacity(&mut self, capacity: usize) -> Result<()> {
        let (old, new) = (Self::layout(self.capacity)?, Self::layout(capacity)?);
        let block = match self.block {
            _ if capacity == self.capacity => return Ok(()),
            Some(block) if capacity == 0 => {
                // SAFETY: the block is ours, of that layout, and forgotten below.
                unsafe { self.allocator.deallocate(block.ptr(), old) };
                None
            }
            None => Some(self.allocator.allocate(new)?),
            // SAFETY: the block is ours and of that layout; the new one is larger.
            Some(block) if capacity > self.capacity => Some(unsafe { self.allocator.grow(block.ptr(), old, new) }?),
            // SAFETY: the same; the new one is smaller.
            Some(block) => Some(unsafe { self.allocator.shrink(block.ptr(), old, new) }?),
        };
        self.block = block;
        self.capacity = capacity;
        Ok(())
    }

    /// Makes room for `more` elements: at least doubled, so that growing step by step takes few steps.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn reserve(&mut self, more: usize) -> Result<()> {
        let needed = self.len.checked_add(more);
        let needed =
            needed.ok_or(Error::Overflow { what: "a vector", count: u64::MAX, size: size_of::<T>() as u64 })?;
        if needed <= self.capacity {
            return Ok(());
        }
        let wanted = needed.max(self.capacity.saturating_mul(2)).max((FIRST / size_of::<T>()).max(1));
        match self.set_capacity(wanted) {
            Err(Error::OutOfMemory(_)) if wanted > needed => self.set_capacity(needed),
            result => result,
        }
    }

    /// The place of an element; only for one that there is memory for.
    fn place(&self, index: usize) -> Option<NonNull<u8>> {
        self.block.filter(|_| index < self.capacity)?.place(index * size_of::<T>())
    }

    /// Appends one element. It is a copy of its own: append many at once where you can.
    ///
    /// # Errors
    /// When there is no memory; what the driver says.
    pub fn push(&mut self, element: T) -> Result<()> {
        self.extend_from_slice(&[element])
    }

    /// Appends elements from the host.
    ///
    /// # Errors
    /// When there is no memory; what the driver says. The vector is then as it was.
    pub fn extend_from_slice(&mut self, elements: &[T]) -> Result<()> {
        self.reserve(elements.len())?;
        if let Some(place) = self.place(self.len).filter(|_| !elements.is_empty()) {
            // SAFETY: there is room for the elements from there on, and nobody was told of it yet.
            unsafe { self.allocator.copy_in(place, bytemuck::cast_slice(elements)) }?;
            self.len += elements.len();
        }
        Ok(())
    }

    /// Appends the elements of another vector, device to device if both lie on the same one. If its allocator is a handle
    /// of another stream, what is queued there, as when it grew, is over by then.
    ///
    /// # Errors
    /// When there is no memory; what the driver says. The vector is then as it was.
    pub fn append<B: RawAllocator>(&mut self, other: &DeviceVec<T, B>) -> Result<()> {
        if !self.allocator.device().is(other.allocator.device()) {
            return self.extend_from_slice(&other.to_vec()?);
        }
        self.reserve(other.len)?;
        if let Some((to, from)) = self.place(self.len).zip(other.place(0)).filter(|_| other.len > 0) {
            // SAFETY: both places have so many bytes, in blocks of one device that are not the same: the vectors are two.
            unsafe { self.allocator.copy(to, from, other.len * size_of::<T>()) }?;
            self.len += other.len;
        }
        Ok(())
    }

    /// Takes the elements from `at` on into a vector of their own; none for a place beyond the end.
    ///
    /// # Errors
    /// When there is no memory; what the driver says. The vector is then as it was.
    pub fn split_off(&mut self, at: usize) -> Result<Option<Self>>
    where
        A: Clone,
    {
        let Some(count) = self.len.checked_sub(at) else { return Ok(None) };
        let mut tail = Self::with_capacity_in(count, self.allocator.clone())?;
        if let Some((to, from)) = tail.place(0).zip(self.place(at)).filter(|_| count > 0) {
            // SAFETY: both places have so many bytes, in two blocks of one device.
            unsafe { self.allocator.copy(to, from, count * size_of::<T>()) }?;
            tail.len = count;
        }
        self.len = at;
        Ok(Some(tail))
    }

    /// An element; none beyond the end.
    ///
    /// # Errors
    /// What the driver says.
    pub fn get(&self, index: usize) -> Result<Option<T>> {
        let Some(place) = self.place(index).filter(|_| index < self.len) else { return Ok(None) };
        let mut element = T::zeroed();
        // SAFETY: the element lies in our block.
        unsafe { self.allocator.copy_out(bytemuck::bytes_of_mut(&mut element), place) }?;
        Ok(Some(element))
    }

    /// Sets an element. False beyond the end.
    ///
    /// # Errors
    /// What the driver says.
    pub fn set(&mut self, index: usize, element: T) -> Result<bool> {
        let Some(place) = self.place(index).filter(|_| index < self.len) else { return Ok(false) };
        // SAFETY: the element lies in our block, which is ours alone by `&mut self`.
        unsafe { self.allocator.copy_in(place, bytemuck::bytes_of(&element)) }?;
        Ok(true)
    }

    /// Takes the last element.
    ///
    /// # Errors
    /// What the driver says.
    pub fn pop(&mut self) -> Result<Option<T>> {
        let last = self.len.checked_sub(1).map(|last| self.get(last));
        let last = last.transpose()?.flatten();
        self.len -= usize::from(last.is_some());
        Ok(last)
    }

    /// Shortens the vector; its memory stays.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Gives back the memory that no element needs.
    ///
    /// # Errors
    /// What the driver says.
    pub fn shrink_to_fit(&mut self) -> Result<()> {
        self.set_capacity(self.len)
    }

    /// All elements, on the host.
    ///
    /// # Errors
    /// What the driver says.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.read(0, self.len)
    }

    /// Elements from `start` on, which there are.
    pub(crate) fn read(&self, start: usize, count: usize) -> Result<Vec<T>> {
        let mut elements = vec![T::zeroed(); count];
        if let Some(place) = self.place(start).filter(|_| count > 0 && start + count <= self.capacity) {
            // SAFETY: so many elements from there on lie in our block.
            unsafe { self.allocator.copy_out(bytemuck::cast_slice_mut(&mut elements), place) }?;
        }
        Ok(elements)
    }

    /// Writes elements from `start` on, where there is memory for them.
    pub(crate) fn write(&mut self, start: usize, elements: &[T]) -> Result<()> {
        if let Some(place) = self.place(start).filter(|_| start + elements.len() <= self.capacity) {
            // SAFETY: there is memory for so many elements from there on, ours alone by `&mut self`.
            unsafe { self.allocator.copy_in(place, bytemuck::cast_slice(elements)) }?;
        }
        Ok(())
    }

    /// Makes sure of memory for so many elements, and keeps what all of the memory holds.
    pub(crate) fn reserve_total(&mut self, capacity: usize) -> Result<()> {
        if capacity > self.capacity { self.set_capacity(capacity) } else { Ok(()) }
    }

    /// Copies elements within the vector's memory to a place that does not overlap.
    pub(crate) fn copy_within(&mut self, from: usize, to: usize, count: usize) -> Result<()> {
        let fits = from.max(to) + count <= self.capacity && from.abs_diff(to) >= count;
        if let Some((to, from)) = self.place(to).zip(self.place(from)).filter(|_| fits && count > 0) {
            // SAFETY: both places lie in our block and do not overlap.
            unsafe { self.allocator.copy(to, from, count * size_of::<T>()) }?;
        }
        Ok(())
    }
}

impl<T, A: RawAllocator> Drop for DeviceVec<T, A> {
    fn drop(&mut self) {
        if let Some((block, layout)) = self.block.take().zip(Layout::array::<T>(self.capacity).ok()) {
            // SAFETY: the block is ours, of that layout, and not used again.
            unsafe { self.allocator.deallocate(block.ptr(), layout) };
        }
    }
}

impl<T, A: RawAllocator> fmt::Debug for DeviceVec<T, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceVec")
            .field("device_ptr", &self.block.map(Block::device_ptr))
            .field("len", &self.len)
            .field("capacity", &self.capacity)
            .finish_non_exhaustive()
    }
}
