//! The device made current for the length of a call.
//!
//! HIP keeps a current device for each thread, and most of its functions are about that one whatever else they are told.
//! So the device is made current for every call, and the one before is current again afterwards, on every path.

use core::marker::PhantomData;

use super::error::{Code, check};
use super::ffi::hipStreamCaptureModeRelaxed;
use super::library::Core;

/// The device is current on this thread; dropped, it restores the one that was.
#[derive(Debug)]
#[must_use = "the device stops being current when this is dropped"]
pub(super) struct Current<'a> {
    core: &'a Core,
    /// The device that was current before, if it was another.
    before: Option<i32>,
    /// The thread's capture mode before.
    capture_mode: Option<u32>,
    /// What is current is a matter of each thread: the guard must be dropped where it was made.
    same_thread: PhantomData<*const ()>,
}

impl<'a> Current<'a> {
    /// Makes `device` current on this thread.
    pub(super) fn make(core: &'a Core, device: i32) -> Result<Self, Code> {
        let mut current = 0;
        // SAFETY: the pointer is valid for the write.
        check(unsafe { (core.hipGetDevice)(&raw mut current) })?;
        let before = (current != device).then_some(current);
        if before.is_some() {
            // SAFETY: the function takes a number, and says so if it is no device's.
            check(unsafe { (core.hipSetDevice)(device) })?;
        }
        // An event query would otherwise break the captures that other threads, or this one, have under way.
        let capture_mode = exchange_capture_mode(core, hipStreamCaptureModeRelaxed);
        Ok(Self { core, before, capture_mode, same_thread: PhantomData })
    }

    /// Leaves whatever is current as it is.
    pub(super) fn leave(core: &'a Core) -> Self {
        Self { core, before: None, capture_mode: None, same_thread: PhantomData }
    }
}

/// Takes our error out of what the thread's next `hipGetLastError` shows: it was handled, and an application that asks
/// after its own calls must not find it.
pub(super) fn forget_error(core: &Core) {
    // SAFETY: the function takes nothing and is about the calling thread alone.
    let _ = unsafe { (core.hipGetLastError)() };
}

/// Sets how this thread's calls and graph captures get on; gives what it was, where the runtime knows.
fn exchange_capture_mode(core: &Core, mut mode: u32) -> Option<u32> {
    let exchange = core.hipThreadExchangeStreamCaptureMode?;
    // SAFETY: the pointer is valid for the read and the write.
    let exchanged = check(unsafe { exchange(&raw mut mode) });
    if exchanged.is_err() {
        forget_error(core);
    }
    exchanged.ok().map(|()| mode)
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.capture_mode {
            exchange_capture_mode(self.core, mode);
        }
        let Some(before) = self.before else { return };
        let restore = || {
            // SAFETY: the number is one that the runtime itself gave.
            check(unsafe { (self.core.hipSetDevice)(before) }).inspect_err(|_| forget_error(self.core))
        };
        // What the caller does next would be about another device, without a word: that is worth a second try.
        if let Err(code) = restore().or_else(|_| restore()) {
            tracing::warn!(%code, device = before, "the caller's HIP device could not be made current again");
        }
    }
}
