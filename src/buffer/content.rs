//! What is in a buffer: copies, fills, and slices where the host can touch the memory.
//!
//! Copies and fills without a stream are over when they return, and do not wait for work that was queued on streams
//! before: what they read or overwrite must be complete already. Those on a stream (`.._on`) are ordered there; on one
//! that captures a graph they become part of it, and whoever launches it answers for the memory being there.

use core::ops::{Bound, RangeBounds};

use bytemuck::{AnyBitPattern, NoUninit, Pod};

use super::GrowableBuffer;
use crate::driver::RawStream;
use crate::error::{Error, Result};

/// The largest host block that an overlapping copy on a device goes through, in bytes.
const BOUNCE: u64 = 4 << 20;

impl<T> GrowableBuffer<T> {
    /// Checks that `[start, start + count)` lies within the length; gives the address and the bytes.
    fn place(&self, what: &'static str, start: usize, count: usize) -> Result<(u64, u64)> {
        match start.checked_add(count) {
            Some(end) if end <= self.len => Ok((self.base + self.bytes_of(start), self.bytes_of(count))),
            _ => Err(Error::OutOfBounds { what, start, count, len: self.len }),
        }
    }

    /// A range as `(start, count)`.
    fn resolve(&self, range: impl RangeBounds<usize>) -> (usize, usize) {
        let start = match range.start_bound() {
            Bound::Included(&start) => start,
            Bound::Excluded(&start) => start.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&end) => end.saturating_add(1),
            Bound::Excluded(&end) => end,
            Bound::Unbounded => self.len,
        };
        (start, end.saturating_sub(start))
    }

    /// Copies elements from the host to the device, from element `start` on. It is over when this returns, and waits for
    /// no work on streams.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; what the driver says.
    pub fn copy_in(&mut self, start: usize, elements: &[T]) -> Result<()>
    where
        T: NoUninit,
    {
        let (address, bytes) = self.place("copying in", start, elements.len())?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the place lies within the buffer's committed memory, which `&mut self` makes ours alone on the host;
        // the elements are initialised bytes throughout (`NoUninit`), and the copy is over when this returns.
        Ok(unsafe { self.device.card().gate().copy_in(address, elements.as_ptr().cast(), bytes, None) }?)
    }

    /// Copies elements from the device to the host, from element `start` on. It is over when this returns, and waits for
    /// no work on streams: what is still being computed is not seen.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; what the driver says.
    pub fn copy_out(&self, start: usize, elements: &mut [T]) -> Result<()>
    where
        T: AnyBitPattern,
    {
        let (address, bytes) = self.place("copying out", start, elements.len())?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the place lies within the buffer's committed memory; any bytes are elements (`AnyBitPattern`), and
        // the copy is over when this returns.
        Ok(unsafe { self.device.card().gate().copy_out(elements.as_mut_ptr().cast(), address, bytes, None) }?)
    }

    /// Copies elements within the buffer to element `to` on; the two places may overlap. It is over when this
    /// returns.
    ///
    /// ```
    /// # use growspan::{Device, GrowableBuffer};
    /// # fn main() -> growspan::Result<()> {
    /// # let mut buffer = GrowableBuffer::<u32>::builder(&Device::host()?).max_len(1 << 20).build()?;
    /// buffer.append(&[1, 2, 3, 4, 5])?;
    /// buffer.copy_within(0..4, 1)?;
    /// let mut all = [0; 5];
    /// buffer.copy_out(0, &mut all)?;
    /// assert_eq!(all, [1, 1, 2, 3, 4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; what the driver says, when part of the copy may have been made.
    pub fn copy_within(&mut self, range: impl RangeBounds<usize>, to: usize) -> Result<()> {
        let (start, count) = self.resolve(range);
        let (source, bytes) = self.place("copying within", start, count)?;
        let (target, _) = self.place("copying within", to, count)?;
        if bytes == 0 || source == target {
            return Ok(());
        }
        let gate = self.device.card().gate();
        let distance = source.abs_diff(target);
        if distance >= bytes {
            // SAFETY: both places lie within the buffer's committed memory and do not overlap; the copy is over when
            // this returns.
            return Ok(unsafe { gate.copy_within(target, source, bytes, None) }?);
        }
        if let (Some(source), Some(target)) = (self.host_ptr(source), self.host_ptr(target)) {
            let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
            // SAFETY: both places lie within the buffer's committed memory, which the host may touch and `&mut self`
            // makes ours alone; `copy` allows them to overlap.
            unsafe { core::ptr::copy(source, target, bytes) };
            return Ok(());
        }
        // In blocks that do not overlap their own targets, or through the host where those would be too small; from
        // the end that is not overwritten first.
        let through_host = distance < BOUNCE.min(bytes / 16);
        let block = if through_host { BOUNCE.min(bytes) } else { distance };
        let mut bounce = vec![0_u8; if through_host { usize::try_from(block).unwrap_or(0) } else { 0 }];
        let mut done = 0;
        while done < bytes {
            let size = block.min(bytes - done);
            let offset = if target < source { done } else { bytes - done - size };
            if through_host {
                // SAFETY: the source block lies within committed memory and the vector holds a block; the copy is over
                // when this returns.
                unsafe { gate.copy_out(bounce.as_mut_ptr(), source + offset, size, None) }?;
                // SAFETY: the same the other way.
                unsafe { gate.copy_in(target + offset, bounce.as_ptr(), size, None) }?;
            } else {
                // SAFETY: both blocks lie within committed memory and are no longer than the distance between them, so
                // they do not overlap; the copy is over when this returns.
                unsafe { gate.copy_within(target + offset, source + offset, size, None) }?;
            }
            done += size;
        }
        Ok(())
    }

    /// Sets elements to a value. It is done when this returns.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; what the driver says, when part of it may have been done.
    pub fn fill(&mut self, range: impl RangeBounds<usize>, value: T) -> Result<()>
    where
        T: NoUninit,
    {
        let (start, count) = self.resolve(range);
        let (address, bytes) = self.place("filling", start, count)?;
        if bytes == 0 {
            return Ok(());
        }
        let gate = self.device.card().gate();
        let pattern = bytemuck::bytes_of(&value);
        if let Some(&first) = pattern.first().filter(|first| pattern.iter().all(|byte| byte == *first)) {
            // SAFETY: the place lies within the buffer's committed memory, ours alone on the host by `&mut self`; it is
            // done when this returns.
            return Ok(unsafe { gate.fill(address, first, bytes, None) }?);
        }
        // One element from the host, then doubled on the device.
        // SAFETY: the first element's place lies within committed memory; the copy is over when this returns.
        unsafe { gate.copy_in(address, pattern.as_ptr(), pattern.len() as u64, None) }?;
        let mut done = pattern.len() as u64;
        while done < bytes {
            let size = done.min(bytes - done);
            // SAFETY: both places lie within the filled range, the source is set already, and they do not overlap.
            unsafe { gate.copy_within(address + done, address, size, None) }?;
            done += size;
        }
        Ok(())
    }

    /// Grows by the elements and copies them in.
    ///
    /// # Errors
    /// As for [`grow_to`](Self::grow_to) and [`copy_in`](Self::copy_in). The buffer is then as it was.
    pub fn append(&mut self, elements: &[T]) -> Result<()>
    where
        T: NoUninit,
    {
        let Some(len) = self.len.checked_add(elements.len()) else { return Err(self.beyond(usize::MAX)) };
        self.grow_with(len, |gate, address, bytes| {
            // SAFETY: the new elements are committed and nobody's yet; what is copied are initialised bytes throughout
            // (`NoUninit`), and the copy is over when this returns.
            unsafe { gate.copy_in(address, elements.as_ptr().cast(), bytes, None) }
        })
    }

    /// Queues a copy from the host on a stream, and returns at once.
    ///
    /// # Safety
    /// `elements` stay alive and unchanged until the stream has passed the copy.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; what the driver says.
    pub unsafe fn copy_in_on(&mut self, start: usize, elements: &[T], stream: RawStream) -> Result<()>
    where
        T: NoUninit,
    {
        let (address, bytes) = self.place_on("copying in", start, elements.len(), stream)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the place lies within the buffer's committed memory, which a shrink takes away only after what it
        // names has passed; the caller keeps the elements.
        Ok(unsafe { self.device.card().gate().copy_in(address, elements.as_ptr().cast(), bytes, Some(stream)) }?)
    }

    /// Queues a copy to the host on a stream, and returns at once.
    ///
    /// # Safety
    /// `elements` stay alive and are not touched until the stream has passed the copy.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; what the driver says.
    pub unsafe fn copy_out_on(&self, start: usize, elements: &mut [T], stream: RawStream) -> Result<()>
    where
        T: AnyBitPattern,
    {
        let (address, bytes) = self.place_on("copying out", start, elements.len(), stream)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as in `copy_in_on`.
        Ok(unsafe { self.device.card().gate().copy_out(elements.as_mut_ptr().cast(), address, bytes, Some(stream)) }?)
    }

    /// Queues a copy within the buffer on a stream, and returns at once. The two places may not overlap.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Overlap`]; what the driver says.
    pub fn copy_within_on(&mut self, range: impl RangeBounds<usize>, to: usize, stream: RawStream) -> Result<()> {
        let (start, count) = self.resolve(range);
        let (source, bytes) = self.place_on("copying within", start, count, stream)?;
        let (target, _) = self.place("copying within", to, count)?;
        if bytes == 0 || source == target {
            return Ok(());
        }
        if source.abs_diff(target) < bytes {
            return Err(Error::Overlap { start, to, count });
        }
        // SAFETY: both places lie within the buffer's committed memory, which a shrink takes away only after what it
        // names has passed, and do not overlap.
        Ok(unsafe { self.device.card().gate().copy_within(target, source, bytes, Some(stream)) }?)
    }

    /// Queues on a stream that all bytes of the elements are set to `byte`, and returns at once.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; what the driver says.
    pub fn fill_bytes_on(&mut self, range: impl RangeBounds<usize>, byte: u8, stream: RawStream) -> Result<()>
    where
        T: AnyBitPattern,
    {
        let (start, count) = self.resolve(range);
        let (address, bytes) = self.place_on("filling", start, count, stream)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as in `copy_within_on`; any bytes are elements (`AnyBitPattern`).
        Ok(unsafe { self.device.card().gate().fill(address, byte, bytes, Some(stream)) }?)
    }

    /// [`place`](Self::place), for work on a stream.
    fn place_on(&self, what: &'static str, start: usize, count: usize, stream: RawStream) -> Result<(u64, u64)> {
        self.device.card().check_stream(stream)?;
        self.place(what, start, count)
    }

    /// Appends one element. On memory that the host can touch it is a store, else a small copy: there, append many at
    /// once.
    ///
    /// # Errors
    /// As for [`append`](Self::append).
    #[inline]
    pub fn push(&mut self, element: T) -> Result<()>
    where
        T: NoUninit,
    {
        let len = self.len;
        if self.host_visible && len < self.limit {
            // SAFETY: the element at `len` is committed, and so within the buffer, which is one allocation.
            let place = unsafe { self.data().add(len) };
            // SAFETY: the host may write there, the base and all sizes are aligned for `T`, and the memory is ours
            // alone by `&mut self`.
            unsafe { place.write(element) };
            self.len = len + 1;
            return Ok(());
        }
        self.push_slow(element)
    }

    /// A push that has to grow, or to copy. Not inlined: the loops that push stay small, with the element in a register.
    #[inline(never)]
    fn push_slow(&mut self, element: T) -> Result<()>
    where
        T: NoUninit,
    {
        self.append(core::slice::from_ref(&element))
    }

    /// The first element as the host sees it; only meaningful on a host visible device.
    #[inline]
    fn data(&self) -> *mut T {
        match usize::try_from(self.base) {
            // A block that may move was not allocated yet: no elements, and no null for their slice.
            Ok(0) | Err(_) => core::ptr::dangling_mut(),
            Ok(address) => core::ptr::with_exposed_provenance_mut(address),
        }
    }

    /// A device address as the host sees it, where it does.
    fn host_ptr(&self, address: u64) -> Option<*mut u8> {
        let address = usize::try_from(address).ok()?;
        self.host_visible.then(|| core::ptr::with_exposed_provenance_mut(address))
    }

    fn not_visible(&self) -> Error {
        match self.shared {
            true => Error::Shared,
            false => Error::NotHostVisible { device: self.device.info().id() },
        }
    }

    /// The elements, where the host can touch them.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`]; [`Error::Shared`] once a chunk was exported.
    pub fn as_slice(&self) -> Result<&[T]>
    where
        T: AnyBitPattern,
    {
        if !self.host_visible {
            return Err(self.not_visible());
        }
        // SAFETY: the driver promises that committed memory is valid and initialised for the host; any bytes are
        // elements (`AnyBitPattern`), the base is aligned for them, and `&self` keeps the memory from being unmapped or
        // written through us while the slice lives. Sizes were checked to fit `isize` at build time.
        Ok(unsafe { core::slice::from_raw_parts(self.data(), self.len) })
    }

    /// The elements, to change, where the host can touch them.
    ///
    /// # Errors
    /// [`Error::NotHostVisible`]; [`Error::Shared`] once a chunk was exported.
    pub fn as_mut_slice(&mut self) -> Result<&mut [T]>
    where
        T: Pod,
    {
        if !self.host_visible {
            return Err(self.not_visible());
        }
        // SAFETY: as in `as_slice`; `&mut self` makes the memory ours alone, and whatever is written are initialised
        // bytes again (`Pod`).
        Ok(unsafe { core::slice::from_raw_parts_mut(self.data(), self.len) })
    }
}
