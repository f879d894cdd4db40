//! The device's primary context, made current for the length of a call.
//!
//! The primary context is the one that the CUDA runtime and everything built on it uses, so memory made in it is
//! everybody's. It is retained, never created, and the context that a caller had current is current again after each
//! call, on every path.

use core::marker::PhantomData;
use core::ptr;

use super::error::{Code, CudaOpenError, check};
use super::ffi::{
    CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_NON_BLOCKING, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_DEINITIALIZED,
    CUcontext, CUdevice, CUstream,
};
use super::library::{Core, Cuda, during_open};

/// A retained primary context and this driver's own stream in it.
#[derive(Debug)]
pub(super) struct Context {
    cuda: &'static Cuda,
    device: CUdevice,
    raw: CUcontext,
    /// The context's number among all that the process has had. It changes if other code resets the device.
    id: Option<u64>,
    copies: CUstream,
}

// SAFETY: the handles are names that the driver gave out; it locks internally, lets any thread make a context current
// and any number of threads use a stream, and `Context` never follows the pointers itself.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the device's primary context.
    pub(super) fn retain(cuda: &'static Cuda, device: CUdevice) -> Result<Self, CudaOpenError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is valid for the write; `drop` releases what is retained here.
        let result = unsafe { (cuda.core.cuDevicePrimaryCtxRetain)(&raw mut raw, device) };
        during_open("cuDevicePrimaryCtxRetain", result)?;
        let mut context = Self { cuda, device, raw, id: None, copies: ptr::null_mut() };
        context.id = context.current_id().ok().flatten();
        let mut copies = ptr::null_mut();
        {
            let entered = context.enter();
            let _entered = entered.map_err(|Code(code)| CudaOpenError::Call { function: "cuCtxPushCurrent", code })?;
            // SAFETY: the pointer is valid for the write, and the context it is made in is current.
            let result = unsafe { (cuda.core.cuStreamCreate)(&raw mut copies, CU_STREAM_NON_BLOCKING) };
            during_open("cuStreamCreate", result)?;
        }
        context.copies = copies;
        Ok(context)
    }

    /// The raw handle.
    pub(super) const fn raw(&self) -> CUcontext {
        self.raw
    }

    /// The stream of copies that the caller gave no stream for.
    pub(super) const fn copies(&self) -> CUstream {
        self.copies
    }

    /// Makes the context current on this thread until the guard is dropped.
    pub(super) fn enter(&self) -> Result<Entered<'_>, Code> {
        // Streams and events of a context that was reset are dangling pointers to the driver, so a reset has to be
        // noticed before they are passed to it.
        if self.current_id()? != self.id {
            return Err(Code(CUDA_ERROR_CONTEXT_IS_DESTROYED));
        }
        let core = &self.cuda.core;
        let mut current = ptr::null_mut();
        // SAFETY: the pointer is valid for the write.
        let known = check(unsafe { (core.cuCtxGetCurrent)(&raw mut current) }).is_ok();
        // What the caller has current may be a broken context of its own; that is no reason to fail here.
        let pushed = !(known && current == self.raw);
        if pushed {
            // SAFETY: the handle was retained and is not released before `self` is dropped, which outlives the guard.
            check(unsafe { (core.cuCtxPushCurrent_v2)(self.raw) })?;
        }
        // An event query would otherwise break the captures that other threads, or this one, have under way.
        let capture_mode = exchange_capture_mode(core, CU_STREAM_CAPTURE_MODE_RELAXED);
        Ok(Entered { core, pushed, capture_mode, same_thread: PhantomData })
    }

    /// The context's number now, or `None` from a driver before CUDA 12.0.
    fn current_id(&self) -> Result<Option<u64>, Code> {
        let Some(get) = self.cuda.core.cuCtxGetId else { return Ok(None) };
        let mut id = 0;
        // SAFETY: the pointer is valid for the write, and the handle is retained; of a context that was reset the
        // driver says so.
        check(unsafe { get(self.raw, &raw mut id) })?;
        Ok(Some(id))
    }
}

/// Sets how this thread's calls and graph captures get on; gives what it was, where the driver knows.
fn exchange_capture_mode(core: &Core, mut mode: u32) -> Option<u32> {
    let exchange = core.cuThreadExchangeStreamCaptureMode?;
    // SAFETY: the pointer is valid for the read and the write.
    check(unsafe { exchange(&raw mut mode) }).ok().map(|()| mode)
}

impl Drop for Context {
    fn drop(&mut self) {
        // In a forked child the driver's state is the parent's, to release as well.
        if self.cuda.process != std::process::id() {
            return;
        }
        let core = &self.cuda.core;
        if !self.copies.is_null()
            && let Ok(_entered) = self.enter()
        {
            // SAFETY: the stream is this value's own, its context is current and was not reset, and nothing is queued
            // on it: whoever queues waits. A failure leaves nothing to do, as the context goes with its last user.
            let _ = unsafe { (core.cuStreamDestroy_v2)(self.copies) };
        }
        // SAFETY: this gives back the one retain of `retain`. At process exit the driver may be gone, which it says.
        match check(unsafe { (core.cuDevicePrimaryCtxRelease_v2)(self.device) }) {
            Ok(()) | Err(Code(CUDA_ERROR_DEINITIALIZED | CUDA_ERROR_CONTEXT_IS_DESTROYED)) => {}
            Err(code) => tracing::warn!(device = self.device, %code, "the CUDA context could not be released"),
        }
    }
}

/// The context is current on this thread; dropped, it restores the one that was.
#[derive(Debug)]
#[must_use = "the context stops being current when this is dropped"]
pub(super) struct Entered<'a> {
    core: &'a Core,
    pushed: bool,
    /// The thread's capture mode before.
    capture_mode: Option<u32>,
    /// What is current is a matter of each thread: the guard must be dropped where it was made.
    same_thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let core = self.core;
        if let Some(mode) = self.capture_mode {
            exchange_capture_mode(core, mode);
        }
        if !self.pushed {
            return;
        }
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is valid for the write. This thread's topmost context is the one that `enter` pushed:
        // between the two only calls were made that leave the stack alone.
        if let Err(code) = check(unsafe { (core.cuCtxPopCurrent_v2)(&raw mut popped) }) {
            tracing::debug!(%code, "the caller's CUDA context could not be restored");
        }
    }
}
