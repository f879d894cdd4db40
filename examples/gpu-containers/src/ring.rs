//! A ring.

use core::fmt;

use bytemuck::Pod;
use growspan::{RawAllocator, Result};

use crate::DeviceVec;

/// A queue in device memory: elements go in behind and come out in front, and only those that wrap round are ever moved,
/// when it grows.
///
/// ```text
/// | 7 8 9 . . . . 4 5 6 |      first: 4, then 5 .. 9
/// ```
pub struct RingBuffer<T, A: RawAllocator> {
    /// Memory for at least as many elements as `capacity`; its length is not used.
    memory: DeviceVec<T, A>,
    /// Where the ring wraps round.
    capacity: usize,
    first: usize,
    len: usize,
}

impl<T: Pod, A: RawAllocator> RingBuffer<T, A> {
    /// An empty ring with room for `capacity` elements.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn with_capacity_in(capacity: usize, allocator: A) -> Result<Self> {
        let memory = DeviceVec::with_capacity_in(capacity.max(1), allocator)?;
        Ok(Self { capacity: memory.capacity(), memory, first: 0, len: 0 })
    }

    /// How many elements there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many there is room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The device address of the memory, which begins anywhere in the queue.
    pub fn device_ptr(&self) -> Option<u64> {
        self.memory.device_ptr()
    }

    /// Puts elements in behind; grows if they do not fit.
    ///
    /// # Errors
    /// When there is no memory; what the driver says. The ring is then as it was.
    pub fn push_back(&mut self, elements: &[T]) -> Result<()> {
        if self.len + elements.len() > self.capacity() {
            self.grow(self.len + elements.len())?;
        }
        let capacity = self.capacity();
        let start = (self.first + self.len) % capacity;
        let (before, after) = elements.split_at(elements.len().min(capacity - start));
        self.memory.write(start, before)?;
        self.memory.write(0, after)?;
        self.len += elements.len();
        Ok(())
    }

    /// Takes at most `count` elements out in front.
    ///
    /// # Errors
    /// What the driver says; the elements then stay.
    pub fn pop_front(&mut self, count: usize) -> Result<Vec<T>> {
        let count = count.min(self.len);
        let capacity = self.capacity();
        let before = count.min(capacity - self.first);
        let mut elements = self.memory.read(self.first, before)?;
        elements.extend(self.memory.read(0, count - before)?);
        self.first = (self.first + count) % capacity;
        self.len -= count;
        Ok(elements)
    }

    /// At least doubles the memory. What wrapped round goes behind the old end, where there is room for it now.
    fn grow(&mut self, needed: usize) -> Result<()> {
        let old = self.capacity;
        self.memory.reserve_total(needed.max(2 * old))?;
        let wrapped = (self.first + self.len).saturating_sub(old);
        self.memory.copy_within(0, old, wrapped)?;
        self.capacity = self.memory.capacity();
        Ok(())
    }
}

impl<T, A: RawAllocator> fmt::Debug for RingBuffer<T, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingBuffer")
            .field("memory", &self.memory)
            .field("first", &self.first)
            .field("len", &self.len)
            .finish()
    }
}
