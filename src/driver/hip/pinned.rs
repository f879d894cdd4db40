//! Page-locked host memory.
//!
//! The runtime does not hold the pages that it registers (the kernel follows them with an MMU notifier instead), and
//! starts its walk over a range again whenever one of them moves: see [`Quirks::max_pin`](crate::driver::Quirks::max_pin)
//! and [`ThpPolicy`](crate::pinned::ThpPolicy).

use core::ptr;

use super::book::pointer;
use super::calls::{given, size};
use super::error::{Code, check};
use super::{HipDriver, ffi, library};
use crate::bytes::Bytes;
use crate::driver::pins::{Origin, bits};
use crate::driver::{Call, DriverError, DriverErrorKind, DriverResult, PinFlags};

fn refuse<T>(call: Call, why: &'static str) -> DriverResult<T> {
    Err(DriverError::new(call, DriverErrorKind::NotSupported).with_detail(why))
}

impl HipDriver {
    fn host_memory(&self, call: Call) -> DriverResult<&'static library::Pinned> {
        self.hip.pinned.as_ref().map_err(DriverError::missing(call))
    }

    pub(super) fn register(&self, addr: u64, bytes: u64, flags: PinFlags) -> DriverResult<()> {
        if flags.write_combined {
            let why = "memory that is there already cannot be made write-combined; let the runtime allocate it";
            return refuse(Call::Pin, why);
        }
        if flags.read_only {
            let why = "on AMD cards the bit for reading only (8) makes memory coarse-grained instead";
            return refuse(Call::Pin, why);
        }
        let table = self.host_memory(Call::Pin)?;
        self.not_behind_a_hang(Call::Pin)?;
        let bits = bits([(flags.portable, ffi::hipHostRegisterPortable), (flags.mapped, ffi::hipHostRegisterMapped)]);
        let register = || {
            self.within(Call::Pin, |_| {
                let bytes = size(bytes)?;
                // SAFETY: the caller vouches that these are pages of private memory that stay until they are let go of.
                check(unsafe { (table.hipHostRegister)(pointer(addr), bytes, bits) })
            })
            .map_err(|error| error.with_detail(format!("{} at {addr:#x}", Bytes::new(bytes))))
        };
        self.pins.lock(addr, bytes, register)
    }

    pub(super) fn unregister(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let table = self.host_memory(Call::Unpin)?;
        self.not_behind_a_hang(Call::Unpin)?;
        let let_go = || {
            self.within(Call::Unpin, |_| {
                // SAFETY: the book bears out that this was registered here; the caller vouches that the device is done.
                check(unsafe { (table.hipHostUnregister)(pointer(addr)) })
            })
        };
        self.pins.unlock(Call::Unpin, addr, bytes, Origin::Registered, let_go)
    }

    pub(super) fn host_alloc(&self, bytes: u64, flags: PinFlags) -> DriverResult<u64> {
        if flags.read_only {
            return refuse(Call::AllocatePinned, "memory that the runtime allocates is for the device to write too");
        }
        let table = self.host_memory(Call::AllocatePinned)?;
        self.not_behind_a_hang(Call::AllocatePinned)?;
        let bits = bits([
            (flags.portable, ffi::hipHostMallocPortable),
            (flags.mapped, ffi::hipHostMallocMapped),
            (flags.write_combined, ffi::hipHostMallocWriteCombined),
        ]);
        let mut block = ptr::null_mut();
        self.within(Call::AllocatePinned, |_| {
            let bytes = size(bytes)?;
            // SAFETY: the pointer is valid for the write.
            check(unsafe { (table.hipHostMalloc)(&raw mut block, bytes, bits) })
        })
        .map_err(|error| error.with_detail(Bytes::new(bytes).to_string()))?;
        let addr = given(Call::AllocatePinned, block)?.expose_provenance() as u64;
        self.pins.restore(addr, bytes, Origin::Allocated);
        Ok(addr)
    }

    pub(super) fn host_free(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let table = self.host_memory(Call::FreePinned)?;
        self.not_behind_a_hang(Call::FreePinned)?;
        let let_go = || {
            self.within(Call::FreePinned, |_| {
                // SAFETY: the book bears out that this is a block of the runtime's; the caller vouches that nothing uses it.
                check(unsafe { (table.hipHostFree)(pointer(addr)) })
            })
        };
        self.pins.unlock(Call::FreePinned, addr, bytes, Origin::Allocated, let_go)
    }

    pub(super) fn device_pointer(&self, addr: u64) -> DriverResult<u64> {
        let table = self.host_memory(Call::PinnedDevicePtr)?;
        let mut device = ptr::null_mut();
        self.within(Call::PinnedDevicePtr, |_| {
            // SAFETY: the pointer is valid for the write; the caller vouches that the memory is page-locked.
            check(unsafe { (table.hipHostGetDevicePointer)(&raw mut device, pointer(addr), 0) })
        })?;
        if device.is_null() {
            return Err(Code(ffi::hipErrorInvalidValue).during(Call::PinnedDevicePtr));
        }
        Ok(device.expose_provenance() as u64)
    }
}
