//! The CUDA driver library: which functions are called, and opening it once.

use core::ffi::{c_char, c_void};
use core::time::Duration;
use std::ffi::OsString;
use std::sync::OnceLock;

use super::error::{Code, CudaOpenError, check};
use super::ffi::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle,
    CUresult, CUstream, CUuuid,
};
use super::uuid::uuid_text;
use crate::driver::opening::Openings;
use crate::driver::table::{LoadError, SharedLibrary, symbol_table};

/// Names the library to open instead of `libcuda.so.1`.
pub(super) const LIBRARY_VARIABLE: &str = "GROWSPAN_CUDA_LIBRARY";

/// The driver and devices that hang.
pub(super) static OPENINGS: Openings = Openings::new();

symbol_table! {
    /// What every driver since CUDA 11.0 has; without it no device is opened.
    #[derive(Debug)]
    pub(super) struct Core {
        fn cuInit(flags: u32) -> CUresult;
        fn cuDriverGetVersion(version: *mut i32) -> CUresult;
        fn cuDeviceGetCount(count: *mut i32) -> CUresult;
        fn cuDeviceGet(device: *mut CUdevice, ordinal: i32) -> CUresult;
        fn cuDeviceGetName(name: *mut c_char, len: i32, device: CUdevice) -> CUresult;
        fn cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: CUdevice) -> CUresult;
        fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> CUresult;
        fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult;
        fn cuCtxGetCurrent(context: *mut CUcontext) -> CUresult;
        fn cuCtxPushCurrent_v2(context: CUcontext) -> CUresult;
        fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> CUresult;
        fn cuCtxSynchronize() -> CUresult;
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult;
        fn cuMemAlloc_v2(addr: *mut CUdeviceptr, bytes: usize) -> CUresult;
        fn cuMemFree_v2(addr: CUdeviceptr) -> CUresult;
        fn cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream) -> CUresult;
        fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult;
        fn cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult;
        fn cuMemsetD8Async(dst: CUdeviceptr, value: u8, bytes: usize, stream: CUstream) -> CUresult;
        fn cuStreamCreate(stream: *mut CUstream, flags: u32) -> CUresult;
        fn cuStreamDestroy_v2(stream: CUstream) -> CUresult;
        fn cuStreamSynchronize(stream: CUstream) -> CUresult;
        fn cuStreamIsCapturing(stream: CUstream, status: *mut u32) -> CUresult;
        fn cuEventCreate(event: *mut CUevent, flags: u32) -> CUresult;
        fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult;
        fn cuEventQuery(event: CUevent) -> CUresult;
        fn cuEventSynchronize(event: CUevent) -> CUresult;
        fn cuEventDestroy_v2(event: CUevent) -> CUresult;
    }
    optional {
        // Since CUDA 10.1.
        fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) -> CUresult;
        // Since CUDA 9.2, 11.4 (which knows the parts of a divided card) and 12.0.
        fn cuDeviceGetUuid(uuid: *mut CUuuid, device: CUdevice) -> CUresult;
        fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) -> CUresult;
        fn cuCtxGetId(context: CUcontext, id: *mut u64) -> CUresult;
    }
}

symbol_table! {
    /// Virtual memory management. A driver without it can still allocate in one piece.
    #[derive(Debug)]
    pub(super) struct Vmm {
        fn cuMemGetAllocationGranularity(bytes: *mut usize, prop: *const CUmemAllocationProp, which: u32) -> CUresult;
        fn cuMemAddressReserve(
            addr: *mut CUdeviceptr, bytes: usize, align: usize, hint: CUdeviceptr, flags: u64
        ) -> CUresult;
        fn cuMemAddressFree(addr: CUdeviceptr, bytes: usize) -> CUresult;
        fn cuMemCreate(
            handle: *mut CUmemGenericAllocationHandle, bytes: usize, prop: *const CUmemAllocationProp, flags: u64
        ) -> CUresult;
        fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> CUresult;
        fn cuMemMap(
            addr: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64
        ) -> CUresult;
        fn cuMemUnmap(addr: CUdeviceptr, bytes: usize) -> CUresult;
        fn cuMemSetAccess(
            addr: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize
        ) -> CUresult;
        fn cuMemExportToShareableHandle(
            out: *mut c_void, handle: CUmemGenericAllocationHandle, kind: u32, flags: u64
        ) -> CUresult;
        fn cuMemImportFromShareableHandle(
            handle: *mut CUmemGenericAllocationHandle, os_handle: *mut c_void, kind: u32
        ) -> CUresult;
    }
}

symbol_table! {
    /// Page-locked host memory.
    #[derive(Debug)]
    pub(super) struct Pinned {
        fn cuMemHostRegister_v2(addr: *mut c_void, bytes: usize, flags: u32) -> CUresult;
        fn cuMemHostUnregister(addr: *mut c_void) -> CUresult;
        fn cuMemHostAlloc(addr: *mut *mut c_void, bytes: usize, flags: u32) -> CUresult;
        fn cuMemFreeHost(addr: *mut c_void) -> CUresult;
        fn cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, addr: *mut c_void, flags: u32) -> CUresult;
    }
}

/// The driver library, started.
#[derive(Debug)]
pub(super) struct Cuda {
    pub(super) library: SharedLibrary,
    pub(super) core: Core,
    pub(super) vmm: Result<Vmm, LoadError>,
    pub(super) pinned: Result<Pinned, LoadError>,
    /// The process that started it, the only one it works in.
    pub(super) process: u32,
}

impl Cuda {
    /// The process's driver, opened and started at the first call, which may take as long as `patience`. What came of that
    /// is kept.
    pub(super) fn get(patience: Duration) -> Result<&'static Self, CudaOpenError> {
        static CUDA: OnceLock<Result<Cuda, CudaOpenError>> = OnceLock::new();
        let load = || Self::load(&library_names());
        let cuda = OPENINGS.start(&CUDA, patience, load, CudaOpenError::Forked)?;
        if cuda.process == std::process::id() { Ok(cuda) } else { Err(CudaOpenError::Forked) }
    }

    /// Opens and starts the first library of `names` that there is.
    pub(super) fn load(names: &[OsString]) -> Result<Self, CudaOpenError> {
        // SAFETY: the names are those of the CUDA driver, or the one that whoever runs this process says is one.
        let library = unsafe { SharedLibrary::open(names) }.map_err(CudaOpenError::Library)?;
        let (vmm, pinned) = (Vmm::resolve(&library), Pinned::resolve(&library));
        let core = Core::resolve(&library).map_err(|error| CudaOpenError::Library(all_missing(error, &vmm)))?;
        // SAFETY: zero is the only value of the flags; the call may be repeated, by us and by others, from any thread.
        check(unsafe { (core.cuInit)(0) }).map_err(|code| CudaOpenError::of_init(library.name(), code))?;
        Ok(Self { library, core, vmm, pinned, process: std::process::id() })
    }

    /// How many devices this process is shown.
    pub(super) fn count(&self) -> Result<u32, CudaOpenError> {
        let mut count = 0;
        // SAFETY: the driver is started, and the pointer is valid for the write.
        during_open("cuDeviceGetCount", unsafe { (self.core.cuDeviceGetCount)(&raw mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// The driver's number for the device with this ordinal.
    pub(super) fn device(&self, ordinal: u32) -> Result<CUdevice, CudaOpenError> {
        let count = self.count()?;
        if count == 0 {
            return Err(CudaOpenError::NoDevice);
        }
        let no_such = CudaOpenError::NoSuchOrdinal { ordinal, count };
        if ordinal >= count {
            return Err(no_such);
        }
        let Ok(ordinal) = i32::try_from(ordinal) else { return Err(no_such) };
        let mut device = 0;
        // SAFETY: the driver is started, and the pointer is valid for the write.
        during_open("cuDeviceGet", unsafe { (self.core.cuDeviceGet)(&raw mut device, ordinal) })?;
        Ok(device)
    }

    /// A device's attribute.
    pub(super) fn attribute(&self, device: CUdevice, attribute: u32) -> Result<i32, Code> {
        let mut value = 0;
        // SAFETY: the pointer is valid for the write; a number that is no attribute is an error and nothing worse.
        check(unsafe { (self.core.cuDeviceGetAttribute)(&raw mut value, attribute, device) })?;
        Ok(value)
    }

    /// Whether a device is of the Volta generation: compute capability 7.0 or 7.2.
    pub(super) fn is_volta(&self, device: CUdevice) -> bool {
        let ask = |attribute| self.attribute(device, attribute).unwrap_or(0);
        ask(super::ffi::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) == 7
            && ask(super::ffi::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) < 5
    }

    /// The ordinal of the device with this UUID.
    pub(super) fn with_uuid(&self, uuid: [u8; 16]) -> Result<u32, CudaOpenError> {
        let mut present = Vec::new();
        for ordinal in 0..self.count()? {
            match self.uuid(self.device(ordinal)?) {
                Some(other) if other == uuid => return Ok(ordinal),
                other => present.push(other.map_or_else(|| "one without a UUID".to_owned(), uuid_text)),
            }
        }
        if present.is_empty() {
            return Err(CudaOpenError::NoDevice);
        }
        Err(CudaOpenError::NoSuchUuid { wanted: uuid_text(uuid), present })
    }

    /// A device's UUID, where the driver tells.
    pub(super) fn uuid(&self, device: CUdevice) -> Option<[u8; 16]> {
        let get = self.core.cuDeviceGetUuid_v2.or(self.core.cuDeviceGetUuid)?;
        let mut uuid = CUuuid::default();
        // SAFETY: the pointer is valid for the write of a UUID, which both versions of the function make.
        check(unsafe { get(&raw mut uuid, device) }).ok()?;
        Some(uuid.bytes)
    }

    /// A device's name.
    pub(super) fn name(&self, device: CUdevice) -> Result<String, CudaOpenError> {
        let mut name = [0_u8; 256];
        let start = name.as_mut_ptr().cast::<c_char>();
        // SAFETY: the pointer is valid for writes of the length passed; the driver ends the text with a zero.
        during_open("cuDeviceGetName", unsafe { (self.core.cuDeviceGetName)(start, 256, device) })?;
        let len = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..len]).into_owned())
    }

    /// `CUDA driver 13.0`: the newest CUDA version that the driver serves.
    pub(super) fn version(&self) -> String {
        let mut version = 0;
        // SAFETY: the pointer is valid for the write.
        match check(unsafe { (self.core.cuDriverGetVersion)(&raw mut version) }) {
            Ok(()) => format!("CUDA driver {}.{}", version / 1000, version % 1000 / 10),
            Err(_) => "CUDA driver of unknown version".to_owned(),
        }
    }
}

/// The result of a function that is called while a device is opened.
pub(super) fn during_open(function: &'static str, result: CUresult) -> Result<(), CudaOpenError> {
    check(result).map_err(|Code(code)| CudaOpenError::Call { function, code })
}

fn library_names() -> Vec<OsString> {
    match std::env::var_os(LIBRARY_VARIABLE) {
        Some(name) if !name.is_empty() => vec![name],
        // The name without a version comes with development packages, and a toolkit's stub library goes by it too.
        _ => vec!["libcuda.so.1".into(), "libcuda.so".into()],
    }
}

/// The error of the first table, with what is missing of the second.
fn all_missing(mut error: LoadError, second: &Result<Vmm, LoadError>) -> LoadError {
    if let LoadError::SymbolsMissing { names, .. } = &mut error
        && let Err(LoadError::SymbolsMissing { names: more, .. }) = second
    {
        names.extend(more);
    }
    error
}
