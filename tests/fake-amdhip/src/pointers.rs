//! The pointers of the C functions' parameters, each with its promise in its type, so that the promise is argued once.

use core::ffi::{c_char, c_void};

use crate::abi::code;

/// A place that the caller wants a result in.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

/// Something of the caller's to read.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(*const T);

impl<T> Out<T> {
    /// Wraps a pointer as a C caller would pass it.
    ///
    /// # Safety
    /// `place` is null or may be written as a `T` until the call that it is passed to returns.
    #[must_use]
    pub unsafe fn new(place: *mut T) -> Self {
        Self(place)
    }

    /// # Errors
    /// `hipErrorInvalidValue` for null.
    pub(crate) fn wanted(&self) -> Result<(), u32> {
        if self.0.is_null() { Err(code::INVALID_VALUE) } else { Ok(()) }
    }

    /// Writes, if there is a place.
    pub(crate) fn set(&self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, and an `Out` comes either from `new` or as an argument of an exported `unsafe extern "C"`
            // function: both demand that the place may be written as a `T`. Unaligned places are not excluded by C
            // callers that pack structures, hence the kind of write.
            unsafe { self.0.write_unaligned(value) }
        }
    }
}

impl<T: Copy> Out<T> {
    /// What is there now, of a parameter that goes both ways.
    ///
    /// # Errors
    /// `hipErrorInvalidValue` for null.
    pub(crate) fn get(&self) -> Result<T, u32> {
        self.wanted()?;
        // SAFETY: not null; the parameter that this is used for is one that the caller has filled in, by the contract of
        // the exported function.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

impl<T: Copy> In<T> {
    /// Wraps a pointer as a C caller would pass it.
    ///
    /// # Safety
    /// `place` is null or may be read as as many `T`s as the call that it is passed to says.
    #[must_use]
    pub unsafe fn new(place: *const T) -> Self {
        Self(place)
    }

    /// The one that is there.
    ///
    /// # Errors
    /// `hipErrorInvalidValue` for null.
    pub(crate) fn get(&self) -> Result<T, u32> {
        self.at(0)
    }

    /// The `index`th of an array.
    ///
    /// # Errors
    /// `hipErrorInvalidValue` for null.
    pub(crate) fn at(&self, index: usize) -> Result<T, u32> {
        if self.0.is_null() {
            return Err(code::INVALID_VALUE);
        }
        let place = self.0.wrapping_add(index);
        // SAFETY: not null, and the contract of `new` and of the exported functions is that there are as many elements as
        // the call says; callers of this method stay below that count.
        Ok(unsafe { place.read_unaligned() })
    }

    /// The address itself.
    pub(crate) fn addr(&self) -> usize {
        self.0.addr()
    }
}

impl Out<c_char> {
    /// Writes `text` and a zero into a buffer of `len` bytes.
    ///
    /// # Errors
    /// `hipErrorInvalidValue` for null or a buffer that is too short, in which case nothing is written.
    pub(crate) fn set_text(&self, text: &str, len: i32) -> Result<(), u32> {
        let room = usize::try_from(len).map_err(|_| code::INVALID_VALUE)?;
        if self.0.is_null() || text.len() >= room {
            return Err(code::INVALID_VALUE);
        }
        for (i, byte) in text.bytes().chain([0]).enumerate() {
            let place = self.0.wrapping_add(i).cast::<u8>();
            // SAFETY: at most `text.len() + 1 <= len` bytes are written, and the contract of the exported functions is that
            // the buffer has `len`.
            unsafe { place.write(byte) }
        }
        Ok(())
    }
}

/// A copy of `len` bytes of the host's memory at `place`.
///
/// # Errors
/// `hipErrorInvalidValue` for null.
///
/// # Safety
/// `place` is null or `len` bytes can be read there.
pub(crate) unsafe fn host_bytes(place: *const c_void, len: usize) -> Result<Vec<u8>, u32> {
    if place.is_null() || isize::try_from(len).is_err() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: not null, `u8` has no alignment, `len` fits an `isize`, and the caller promises that the bytes can be read.
    Ok(unsafe { core::slice::from_raw_parts(place.cast::<u8>(), len) }.to_vec())
}

/// A number as the pointer that the C ABI wants. It is never used to reach memory.
pub(crate) fn opaque(value: u64) -> *mut c_void {
    core::ptr::without_provenance_mut(value as usize)
}
