//! The HIP runtime's library: which functions are called, and opening it once.

use core::ffi::{c_char, c_void};
use core::time::Duration;
use std::ffi::OsString;
use std::sync::OnceLock;

use super::current::forget_error;
use super::error::{Code, HipOpenError, check};
use super::ffi::{
    hipDeviceAttributeComputeCapabilityMajor, hipDeviceAttributeComputeCapabilityMinor, hipDeviceProp_tR0600,
    hipDeviceptr_t, hipError_t, hipEvent_t, hipMemAccessDesc, hipMemAllocationProp, hipMemGenericAllocationHandle_t,
    hipMemLocation, hipStream_t,
};
use super::search;
use super::version::HipVersion;
use crate::driver::opening::Openings;
use crate::driver::table::{LoadError, SharedLibrary, symbol_table};

/// The runtime and devices that hang.
pub(super) static OPENINGS: Openings = Openings::new();

symbol_table! {
    /// What every runtime since ROCm 5.2 has; without it no device is opened.
    #[derive(Debug)]
    pub(super) struct Core {
        fn hipInit(flags: u32) -> hipError_t;
        fn hipRuntimeGetVersion(version: *mut i32) -> hipError_t;
        fn hipGetDeviceCount(count: *mut i32) -> hipError_t;
        fn hipGetDevice(device: *mut i32) -> hipError_t;
        fn hipSetDevice(device: i32) -> hipError_t;
        fn hipDeviceGetName(name: *mut c_char, len: i32, device: i32) -> hipError_t;
        fn hipDeviceGetPCIBusId(place: *mut c_char, len: i32, device: i32) -> hipError_t;
        fn hipDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32) -> hipError_t;
        fn hipDeviceSynchronize() -> hipError_t;
        fn hipGetLastError() -> hipError_t;
        fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> hipError_t;
        fn hipMalloc(addr: *mut hipDeviceptr_t, bytes: usize) -> hipError_t;
        fn hipFree(addr: hipDeviceptr_t) -> hipError_t;
        fn hipMemcpyHtoDAsync(
            dst: hipDeviceptr_t, src: *const c_void, bytes: usize, stream: hipStream_t
        ) -> hipError_t;
        fn hipMemcpyDtoHAsync(dst: *mut c_void, src: hipDeviceptr_t, bytes: usize, stream: hipStream_t) -> hipError_t;
        fn hipMemcpyDtoDAsync(
            dst: hipDeviceptr_t, src: hipDeviceptr_t, bytes: usize, stream: hipStream_t
        ) -> hipError_t;
        fn hipMemsetD8Async(dst: hipDeviceptr_t, value: u8, count: usize, stream: hipStream_t) -> hipError_t;
        fn hipStreamCreateWithFlags(stream: *mut hipStream_t, flags: u32) -> hipError_t;
        fn hipStreamDestroy(stream: hipStream_t) -> hipError_t;
        fn hipStreamSynchronize(stream: hipStream_t) -> hipError_t;
        fn hipStreamIsCapturing(stream: hipStream_t, status: *mut u32) -> hipError_t;
        fn hipEventCreateWithFlags(event: *mut hipEvent_t, flags: u32) -> hipError_t;
        fn hipEventRecord(event: hipEvent_t, stream: hipStream_t) -> hipError_t;
        fn hipEventQuery(event: hipEvent_t) -> hipError_t;
        fn hipEventSynchronize(event: hipEvent_t) -> hipError_t;
        fn hipEventDestroy(event: hipEvent_t) -> hipError_t;
    }
    optional {
        fn hipThreadExchangeStreamCaptureMode(mode: *mut u32) -> hipError_t;
        fn hipDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32) -> hipError_t;
        // Since ROCm 6.0. The name without a version fills an older structure.
        fn hipGetDevicePropertiesR0600(properties: *mut hipDeviceProp_tR0600, device: i32) -> hipError_t;
    }
}

symbol_table! {
    /// Virtual memory management. A runtime without it can still allocate in one piece.
    #[derive(Debug)]
    pub(super) struct Vmm {
        fn hipMemGetAllocationGranularity(
            bytes: *mut usize, prop: *const hipMemAllocationProp, which: u32
        ) -> hipError_t;
        fn hipMemAddressReserve(
            addr: *mut hipDeviceptr_t, bytes: usize, align: usize, hint: hipDeviceptr_t, flags: u64
        ) -> hipError_t;
        fn hipMemAddressFree(addr: hipDeviceptr_t, bytes: usize) -> hipError_t;
        fn hipMemCreate(
            handle: *mut hipMemGenericAllocationHandle_t, bytes: usize, prop: *const hipMemAllocationProp, flags: u64
        ) -> hipError_t;
        fn hipMemRelease(handle: hipMemGenericAllocationHandle_t) -> hipError_t;
        fn hipMemMap(
            addr: hipDeviceptr_t, bytes: usize, offset: usize, handle: hipMemGenericAllocationHandle_t, flags: u64
        ) -> hipError_t;
        fn hipMemUnmap(addr: hipDeviceptr_t, bytes: usize) -> hipError_t;
        fn hipMemSetAccess(
            addr: hipDeviceptr_t, bytes: usize, access: *const hipMemAccessDesc, count: usize
        ) -> hipError_t;
        fn hipMemGetAccess(flags: *mut u64, location: *const hipMemLocation, addr: hipDeviceptr_t) -> hipError_t;
        fn hipMemExportToShareableHandle(
            out: *mut c_void, handle: hipMemGenericAllocationHandle_t, kind: u32, flags: u64
        ) -> hipError_t;
        fn hipMemImportFromShareableHandle(
            handle: *mut hipMemGenericAllocationHandle_t, os_handle: *mut c_void, kind: u32
        ) -> hipError_t;
    }
}

symbol_table! {
    /// Page-locked host memory.
    #[derive(Debug)]
    pub(super) struct Pinned {
        fn hipHostRegister(addr: *mut c_void, bytes: usize, flags: u32) -> hipError_t;
        fn hipHostUnregister(addr: *mut c_void) -> hipError_t;
        fn hipHostMalloc(addr: *mut *mut c_void, bytes: usize, flags: u32) -> hipError_t;
        fn hipHostFree(addr: *mut c_void) -> hipError_t;
        fn hipHostGetDevicePointer(device: *mut hipDeviceptr_t, addr: *mut c_void, flags: u32) -> hipError_t;
    }
}

/// The runtime, started.
#[derive(Debug)]
pub(super) struct Hip {
    pub(super) library: SharedLibrary,
    pub(super) core: Core,
    pub(super) vmm: Result<Vmm, LoadError>,
    pub(super) pinned: Result<Pinned, LoadError>,
    pub(super) version: HipVersion,
    /// The process that started it, the only one it works in.
    pub(super) process: u32,
}

impl Hip {
    /// The process's runtime, opened and started at the first call, which may take as long as `patience`. What came of that
    /// is kept.
    pub(super) fn get(patience: Duration) -> Result<&'static Self, HipOpenError> {
        static HIP: OnceLock<Result<Hip, HipOpenError>> = OnceLock::new();
        let load = || Self::load(&search::candidates()?);
        let hip = OPENINGS.start(&HIP, patience, load, HipOpenError::Forked)?;
        if hip.process != std::process::id() {
            return Err(HipOpenError::Forked);
        }
        search::still_one()?;
        Ok(hip)
    }

    /// Opens and starts the first library of `names` that there is.
    fn load(names: &[OsString]) -> Result<Self, HipOpenError> {
        // SAFETY: the names are those of the HIP runtime, or the one that whoever runs this process says is one.
        let library = unsafe { SharedLibrary::open(names) }.map_err(HipOpenError::Library)?;
        let core = Core::resolve(&library).map_err(HipOpenError::Library)?;
        let (vmm, pinned) = (Vmm::resolve(&library), Pinned::resolve(&library));
        let mut raw = 0;
        // SAFETY: the pointer is valid for the write; this function works before the runtime is started.
        let result = unsafe { (core.hipRuntimeGetVersion)(&raw mut raw) };
        during_open("hipRuntimeGetVersion", result)?;
        let version = HipVersion::from_raw(raw.unsigned_abs());
        let this = Self { library, core, vmm, pinned, version, process: std::process::id() };
        // SAFETY: zero is the only value of the flags; the call may be repeated, by us and by others, from any thread.
        let started = check(unsafe { (this.core.hipInit)(0) });
        started.map_err(|code| HipOpenError::of_init(this.describe(), code))?;
        Ok(this)
    }

    /// The runtime and where it is: `HIP runtime 7.14.60850 (libamdhip64.so.7)`.
    fn describe(&self) -> String {
        format!("{} ({})", self.version, self.library.name())
    }

    /// How many devices this process is shown.
    pub(super) fn count(&self) -> Result<u32, HipOpenError> {
        let mut count = 0;
        // SAFETY: the runtime is started, and the pointer is valid for the write.
        match check(unsafe { (self.core.hipGetDeviceCount)(&raw mut count) }) {
            Ok(()) => Ok(u32::try_from(count).unwrap_or(0)),
            Err(code) => match HipOpenError::of_init(self.describe(), code) {
                none @ HipOpenError::NoDevice { .. } => Err(none),
                _ => Err(HipOpenError::Call { function: "hipGetDeviceCount", code: code.0 }),
            },
        }
    }

    /// The runtime's number for the device with this ordinal.
    pub(super) fn device(&self, ordinal: u32) -> Result<i32, HipOpenError> {
        let count = self.count()?;
        match i32::try_from(ordinal) {
            _ if count == 0 => Err(HipOpenError::NoDevice { runtime: self.describe() }),
            Ok(device) if ordinal < count => Ok(device),
            _ => Err(HipOpenError::NoSuchOrdinal { ordinal, count }),
        }
    }

    /// That `device` can reach the memory of `owner`, as far as the runtime tells.
    pub(super) fn check_peer(&self, device: i32, owner: i32) -> Result<(), HipOpenError> {
        let Some(ask) = self.core.hipDeviceCanAccessPeer else { return Ok(()) };
        let mut can = 0;
        // SAFETY: the pointer is valid for the write, and both numbers are devices'.
        during_open("hipDeviceCanAccessPeer", unsafe { ask(&raw mut can, device, owner) })?;
        match can {
            0 => Err(HipOpenError::NoPeerAccess { peer: device.unsigned_abs(), owner: owner.unsigned_abs() }),
            _ => Ok(()),
        }
    }

    /// A device's attribute.
    pub(super) fn attribute(&self, device: i32, attribute: u32) -> Result<i32, Code> {
        let mut value = 0;
        // SAFETY: the pointer is valid for the write; a number that is no attribute is an error and nothing worse.
        let result = check(unsafe { (self.core.hipDeviceGetAttribute)(&raw mut value, attribute, device) });
        result.map(|()| value).inspect_err(|_| self.forget_error())
    }

    /// A device's name.
    pub(super) fn name(&self, device: i32) -> Result<String, HipOpenError> {
        let mut name = [0_u8; 256];
        let start = name.as_mut_ptr().cast::<c_char>();
        // SAFETY: the pointer is valid for writes of the length passed.
        during_open("hipDeviceGetName", unsafe { (self.core.hipDeviceGetName)(start, 256, device) })?;
        Ok(text(&name))
    }

    /// A device's place on the bus: `0000:03:00.0`.
    pub(super) fn place(&self, device: i32) -> Option<String> {
        let mut place = [0_u8; 64];
        let start = place.as_mut_ptr().cast::<c_char>();
        // SAFETY: the pointer is valid for writes of the length passed.
        let result = check(unsafe { (self.core.hipDeviceGetPCIBusId)(start, 64, device) });
        result.map_err(|_| self.forget_error()).ok().map(|()| text(&place))
    }

    /// A device's UUID and its chip (`gfx942:sramecc+:xnack-`), where the runtime tells.
    pub(super) fn identity(&self, device: i32) -> Option<([u8; 16], String)> {
        let get = self.core.hipGetDevicePropertiesR0600?;
        let mut properties = Box::new(hipDeviceProp_tR0600::zeroed());
        // SAFETY: the pointer is valid for the write, with room to spare for a structure of this function's version.
        check(unsafe { get(&raw mut *properties, device) }).map_err(|_| self.forget_error()).ok()?;
        Some((properties.uuid, text(&properties.gcn_arch_name)))
    }

    /// The first letters of a device's chip, where its properties do not tell: `gfx120` of a gfx1201.
    pub(super) fn family(&self, device: i32) -> Option<String> {
        let ask = |attribute| self.attribute(device, attribute).ok();
        let (major, minor) = (hipDeviceAttributeComputeCapabilityMajor, hipDeviceAttributeComputeCapabilityMinor);
        Some(format!("gfx{}{}", ask(major)?, ask(minor)?))
    }

    /// See [`forget_error`].
    pub(super) fn forget_error(&self) {
        forget_error(&self.core);
    }
}

/// The result of a function that is called while a device is opened.
pub(super) fn during_open(function: &'static str, result: hipError_t) -> Result<(), HipOpenError> {
    check(result).map_err(|Code(code)| HipOpenError::Call { function, code })
}

/// What lies before the first zero.
fn text(bytes: &[u8]) -> String {
    let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::text;

    #[test]
    fn names_may_be_anything() {
        assert_eq!(text(b"gfx942\0gfx"), "gfx942");
        assert_eq!(text(b"no end"), "no end");
        assert_eq!(text(b"\0"), "");
        assert_eq!(text(b"gfx\xff\0"), "gfx\u{fffd}");
    }
}
