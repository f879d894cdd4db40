//! Page-locked host memory.

use core::ffi::c_void;
use core::ptr;

use super::error::{Code, check};
use super::{CudaDriver, ffi, library, size};
use crate::bytes::Bytes;
use crate::driver::pins::{Origin, bits};
use crate::driver::{Call, DriverError, DriverErrorKind, DriverResult, PinFlags};

/// A host address as the driver takes it.
fn host(addr: u64) -> *mut c_void {
    // `ffi` asserts that a pointer has 64 bits.
    ptr::with_exposed_provenance_mut(addr as usize)
}

impl CudaDriver {
    fn host_memory(&self, call: Call) -> DriverResult<&'static library::Pinned> {
        self.cuda.pinned.as_ref().map_err(DriverError::missing(call))
    }

    pub(super) fn register(&self, addr: u64, bytes: u64, flags: PinFlags) -> DriverResult<()> {
        let refuse = |why| Err(DriverError::new(Call::Pin, DriverErrorKind::NotSupported).with_detail(why));
        if flags.write_combined {
            return refuse("memory that is there already cannot be made write-combined; let the driver allocate it");
        }
        let read_only = ffi::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
        if flags.read_only && self.cuda.attribute(self.device, read_only).unwrap_or(0) == 0 {
            return refuse("the device cannot have host memory for reading only");
        }
        let table = self.host_memory(Call::Pin)?;
        let bits = bits([
            (flags.portable, ffi::CU_MEMHOSTREGISTER_PORTABLE),
            (flags.mapped, ffi::CU_MEMHOSTREGISTER_DEVICEMAP),
            (flags.read_only, ffi::CU_MEMHOSTREGISTER_READ_ONLY),
        ]);
        let register = || {
            self.within(Call::Pin, |_| {
                let bytes = size(bytes)?;
                // SAFETY: the caller vouches that these are pages of private memory that stay until they are let go of.
                check(unsafe { (table.cuMemHostRegister_v2)(host(addr), bytes, bits) })
            })
            .map_err(|error| error.with_detail(format!("{} at {addr:#x}", Bytes::new(bytes))))
        };
        self.pins.lock(addr, bytes, register)
    }

    pub(super) fn unregister(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let table = self.host_memory(Call::Unpin)?;
        let let_go = || {
            self.within(Call::Unpin, |_| {
                // SAFETY: the book bears out that this was registered here; the caller vouches that the device is done.
                check(unsafe { (table.cuMemHostUnregister)(host(addr)) })
            })
        };
        self.pins.unlock(Call::Unpin, addr, bytes, Origin::Registered, let_go)
    }

    pub(super) fn host_alloc(&self, bytes: u64, flags: PinFlags) -> DriverResult<u64> {
        if flags.read_only {
            let why =
                "memory that the driver allocates is for the device to write too; register memory for reading only";
            return Err(DriverError::new(Call::AllocatePinned, DriverErrorKind::NotSupported).with_detail(why));
        }
        let table = self.host_memory(Call::AllocatePinned)?;
        let bits = bits([
            (flags.portable, ffi::CU_MEMHOSTALLOC_PORTABLE),
            (flags.mapped, ffi::CU_MEMHOSTALLOC_DEVICEMAP),
            (flags.write_combined, ffi::CU_MEMHOSTALLOC_WRITECOMBINED),
        ]);
        let mut block = ptr::null_mut();
        self.within(Call::AllocatePinned, |_| {
            let bytes = size(bytes)?;
            // SAFETY: the pointer is valid for the write.
            check(unsafe { (table.cuMemHostAlloc)(&raw mut block, bytes, bits) })
        })
        .map_err(|error| error.with_detail(Bytes::new(bytes).to_string()))?;
        let addr = block.expose_provenance() as u64;
        self.pins.restore(addr, bytes, Origin::Allocated);
        Ok(addr)
    }

    pub(super) fn host_free(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let table = self.host_memory(Call::FreePinned)?;
        let let_go = || {
            self.within(Call::FreePinned, |_| {
                // SAFETY: the book bears out that this is a block of the driver's; the caller vouches that nothing uses it.
                check(unsafe { (table.cuMemFreeHost)(host(addr)) })
            })
        };
        self.pins.unlock(Call::FreePinned, addr, bytes, Origin::Allocated, let_go)
    }

    pub(super) fn device_pointer(&self, addr: u64) -> DriverResult<u64> {
        let table = self.host_memory(Call::PinnedDevicePtr)?;
        let mut device = 0;
        self.within(Call::PinnedDevicePtr, |_| {
            // SAFETY: the pointer is valid for the write; of memory that is not page-locked the driver says so.
            check(unsafe { (table.cuMemHostGetDevicePointer_v2)(&raw mut device, host(addr), 0) })
        })?;
        if device == 0 {
            return Err(Code(ffi::CUDA_ERROR_INVALID_VALUE).during(Call::PinnedDevicePtr));
        }
        Ok(device)
    }
}
