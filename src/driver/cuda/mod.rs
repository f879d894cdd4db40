//! NVIDIA cards, through the CUDA driver.
//!
//! The driver library is opened at the first [`CudaDriver::open`], [`open_uuid`](CudaDriver::open_uuid) or
//! [`count`](CudaDriver::count), and never closed: `libcuda.so.1`, then `libcuda.so`, or just the one that the
//! environment variable `GROWSPAN_CUDA_LIBRARY` names. Nothing is linked, so what was built with this feature runs
//! where there is no driver and says so in a [`CudaOpenError`].
//!
//! * **Context.** All calls are made in the device's primary context, the one that the CUDA runtime uses. Any thread
//!   may call; the thread's own context is current again afterwards.
//! * **Copies without a stream** run on a stream of this driver's own and are over when the call returns. They do not
//!   wait for other streams, not even the default one, nor make those wait: wait first for work that writes what
//!   is copied. In return they stay clear of graph captures, which work on the default stream would break.
//! * **A driver that hangs** while it starts or opens a device is left behind with a thread of its own, after two minutes.
//! * **A reset of the device by other code** (`cuDevicePrimaryCtxReset`, `cudaDeviceReset`) destroys everything; every
//!   later call returns [`DriverErrorKind::DeviceLost`]. Drivers before CUDA 12.0 notice it less reliably.

use core::ffi::c_void;
use core::fmt;
use core::ptr::{self, NonNull};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use crate::bytes::Bytes;
use crate::driver::exported::adopt_exported;
use crate::driver::opening::PATIENCE;
use crate::driver::pins::{Cuts, Pins, cuts};
use crate::driver::{
    Backend, Call, CheckForm, ChunkProps, Driver, DriverError, DriverErrorKind, DriverInfo, DriverResult,
    Granularities, KnownFault, MemoryInfo, PinFlags, RawEvent, RawHandle, RawStream, Shareable,
};

mod context;
mod error;
#[doc(hidden)]
pub mod ffi;
mod library;
mod pinned;
#[cfg(test)]
mod tests;
mod uuid;

use context::Context;
pub use error::CudaOpenError;
use error::{Code, check};
use ffi::{CUmemAccessDesc, CUmemAllocationFlags, CUmemAllocationProp, CUmemLocation, CUresult, CUstream};
use library::{Core, Cuda, LIBRARY_VARIABLE, OPENINGS, Vmm};
pub use uuid::{parse_uuid, uuid_text};

/// A CUDA device.
///
/// ```no_run
/// use growspan::driver::Driver;
/// use growspan::driver::cuda::CudaDriver;
///
/// match CudaDriver::open(0) {
///     Ok(driver) => println!("{} ({})", driver.info().name, driver.info().runtime),
///     Err(reason) => println!("no CUDA here: {reason}"),
/// }
/// ```
pub struct CudaDriver {
    cuda: &'static Cuda,
    device: ffi::CUdevice,
    integrated: bool,
    context: Context,
    info: DriverInfo,
    pins: Pins,
}

/// Seen on a V100 when a thread edited the mappings of a span that kernels were using (kvcached, pull request 465).
const VOLTA: KnownFault = KnownFault::new(
    "a page table that changes under a running kernel can fault it on Volta (CUDA_ERROR_ILLEGAL_ADDRESS)",
    "the device is waited for before anything is mapped or unmapped, and nothing is mapped in the background",
);

impl CudaDriver {
    /// How many CUDA devices this process is shown.
    ///
    /// # Errors
    /// What keeps the driver from being used at all; [`CudaOpenError::NoDevice`] if it does not start for want of one.
    pub fn count() -> Result<u32, CudaOpenError> {
        let cuda = Cuda::get(PATIENCE)?;
        OPENINGS.watch(None, PATIENCE, || cuda.count())
    }

    /// Opens the device with this number, counted from 0 among those that this process is shown.
    ///
    /// # Errors
    /// Says what was missing and what to do about it.
    pub fn open(ordinal: u32) -> Result<Self, CudaOpenError> {
        let cuda = Cuda::get(PATIENCE)?;
        OPENINGS.watch(Some(ordinal), PATIENCE, move || Self::open_in(cuda, ordinal))
    }

    /// Opens the device with this UUID, which is the same in every process and after every restart.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`CudaOpenError::NoSuchUuid`] names the devices that are there.
    pub fn open_uuid(uuid: [u8; 16]) -> Result<Self, CudaOpenError> {
        let cuda = Cuda::get(PATIENCE)?;
        let ordinal = OPENINGS.watch(None, PATIENCE, move || cuda.with_uuid(uuid))?;
        Self::open(ordinal)
    }

    /// Opens the device with this UUID as `nvidia-smi -L` prints it: `GPU-01234567-89ab-cdef-0123-456789abcdef`.
    ///
    /// # Errors
    /// As [`open_uuid`](Self::open_uuid), and [`CudaOpenError::NotAUuid`].
    pub fn open_uuid_text(text: &str) -> Result<Self, CudaOpenError> {
        let uuid = parse_uuid(text).ok_or_else(|| CudaOpenError::NotAUuid { text: text.to_owned() })?;
        Self::open_uuid(uuid)
    }

    fn open_in(cuda: &'static Cuda, ordinal: u32) -> Result<Self, CudaOpenError> {
        let device = cuda.device(ordinal)?;
        let mut info = DriverInfo::new(Backend::Cuda, ordinal, cuda.name(device)?, cuda.version());
        info.uuid = cuda.uuid(device);
        info.open_files_by = "the CUDA driver";
        info.check = CheckForm::Cheap;
        if cuda.is_volta(device) {
            info.quirks.map_beside_kernels = false;
            info.known_faults.push(VOLTA);
        }
        let integrated = cuda.attribute(device, ffi::CU_DEVICE_ATTRIBUTE_INTEGRATED).is_ok_and(|value| value != 0);
        let context = Context::retain(cuda, device)?;
        let this = Self { cuda, device, integrated, context, info, pins: Pins::new() };
        // Whoever opens a device asks for its memory right after, without a watchdog. A driver that hangs in it hangs here; one
        // that fails will say so again.
        let _ = this.memory();
        Ok(this)
    }

    /// The primary context (a `CUcontext`), for those who launch kernels. It stays valid while this driver lives.
    #[must_use]
    pub fn raw_context(&self) -> *mut c_void {
        self.context.raw()
    }

    /// The device (a `CUdevice`).
    #[must_use]
    pub fn raw_device(&self) -> i32 {
        self.device
    }

    /// The address of a function of the driver library, by its exported name (`cuLaunchKernel`), for calls that this
    /// crate does not make. The library is never unloaded.
    #[must_use]
    pub fn symbol(&self, name: &str) -> Option<NonNull<c_void>> {
        self.cuda.library.address(name)
    }

    fn vmm(&self, call: Call) -> DriverResult<&'static Vmm> {
        self.cuda.vmm.as_ref().map_err(DriverError::missing(call))
    }

    /// Does `work` in this device's context.
    fn within<T>(&self, call: Call, work: impl FnOnce(&'static Core) -> Result<T, Code>) -> DriverResult<T> {
        let _entered = self.context.enter().map_err(|code| code.during(call))?;
        work(&self.cuda.core).map_err(|code| code.during(call))
    }

    /// Does `work` in this device's context, with the functions of virtual memory management.
    fn within_vmm<T>(&self, call: Call, work: impl FnOnce(&'static Vmm) -> Result<T, Code>) -> DriverResult<T> {
        let vmm = self.vmm(call)?;
        self.within(call, |_| work(vmm))
    }

    /// Queues a copy or a fill on `stream`, or on the stream for those without one, and then waits for it. It is cut where
    /// the host's side goes from one page-locked piece into the next, which the driver refuses.
    fn queue(
        &self,
        call: Call,
        cuts: &Cuts,
        stream: Option<RawStream>,
        work: impl Fn(&Core, u64, usize, CUstream) -> CUresult,
    ) -> DriverResult<()> {
        // Nothing to do is not worth a call, and not all of the driver's functions take zero.
        if cuts.is_nothing() {
            return Ok(());
        }
        self.within(call, |core| {
            let target = stream.map_or(self.context.copies(), RawStream::as_raw);
            let mut from = 0;
            let queued = cuts.ends().try_for_each(|to| {
                check(work(core, from, size(to - from)?, target))?;
                from = to;
                Ok(())
            });
            // The functions that are called synchronous are not: a copy from pageable memory may still be on its way
            // from the staging buffer when they return, and copies and fills on the device are not waited for at all. And
            // where a piece failed, those before it are on their way to or from the caller's memory, on any stream.
            if stream.is_none() || (queued.is_err() && from > 0) {
                wait_for(core, target)?;
            }
            queued
        })
    }

    /// That the device has what `props` ask for. The driver would refuse too, but not say what.
    fn check_props(&self, props: ChunkProps) -> DriverResult<()> {
        let sharing = match props.shareable {
            Shareable::No => None,
            Shareable::PosixFd => Some((
                ffi::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                "the device cannot share memory as a file descriptor",
            )),
            Shareable::Fabric => Some((
                ffi::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
                "the device cannot share memory as a fabric handle",
            )),
        };
        let rdma = props.rdma.then_some((
            ffi::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            "the device has no GPUDirect RDMA for mapped memory",
        ));
        for (attribute, refusal) in sharing.into_iter().chain(rdma) {
            // A driver that does not know the attribute does not have what it stands for.
            if self.cuda.attribute(self.device, attribute).unwrap_or(0) == 0 {
                return Err(DriverError::new(Call::Create, DriverErrorKind::NotSupported).with_detail(refusal));
            }
        }
        Ok(())
    }

    const fn location(&self) -> CUmemLocation {
        CUmemLocation { type_: ffi::CU_MEM_LOCATION_TYPE_DEVICE, id: self.device }
    }

    fn properties(&self, props: ChunkProps) -> CUmemAllocationProp {
        CUmemAllocationProp {
            type_: ffi::CU_MEM_ALLOCATION_TYPE_PINNED,
            requested_handle_types: match props.shareable {
                Shareable::No => ffi::CU_MEM_HANDLE_TYPE_NONE,
                Shareable::PosixFd => ffi::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                Shareable::Fabric => ffi::CU_MEM_HANDLE_TYPE_FABRIC,
            },
            location: self.location(),
            win32_handle_meta_data: ptr::null_mut(),
            alloc_flags: CUmemAllocationFlags {
                gpu_direct_rdma_capable: u8::from(props.rdma),
                ..CUmemAllocationFlags::default()
            },
        }
    }
}

impl fmt::Debug for CudaDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDriver")
            .field("device", &self.info.id())
            .field("name", &self.info.name)
            .field("library", &self.cuda.library.name())
            .finish_non_exhaustive()
    }
}

/// Waits for what was queued on a stream. An error may have kept the driver from waiting, and the caller's memory may go when
/// we return: so it is asked again then, and after that for all of the device.
fn wait_for(core: &Core, stream: CUstream) -> Result<(), Code> {
    // SAFETY: the stream is the context's own and alive, or the caller of the copy vouches for it.
    let wait = || check(unsafe { (core.cuStreamSynchronize)(stream) });
    wait().inspect_err(|_| {
        if wait().is_err() {
            // SAFETY: the function takes nothing; the device's context is current.
            let _ = unsafe { (core.cuCtxSynchronize)() };
        }
    })
}

/// A size as the driver takes it.
fn size(bytes: u64) -> Result<usize, Code> {
    usize::try_from(bytes).map_err(|_| Code(ffi::CUDA_ERROR_INVALID_VALUE))
}

fn event_ptr(event: RawEvent) -> ffi::CUevent {
    // `ffi` asserts that a pointer has 64 bits.
    ptr::with_exposed_provenance_mut(event.0 as usize)
}

// SAFETY: spans, blocks and mappings are the CUDA driver's own, which gives out addresses that overlap nothing else in
// the process, keeps them until they are freed, and maps, unmaps and grants access exactly as asked or fails. The
// memory is not host visible and is not said to be; page-locked memory is the host's own, which the driver gets from the
// kernel, zeroed or as this process left it. The functions are C and do not unwind.
unsafe impl Driver for CudaDriver {
    fn info(&self) -> &DriverInfo {
        &self.info
    }

    fn support(&self) -> DriverResult<()> {
        self.vmm(Call::Support)?;
        let attribute = ffi::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        match self.cuda.attribute(self.device, attribute) {
            Ok(0) => Err(DriverError::new(Call::Support, DriverErrorKind::NotSupported).with_detail(
                "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0 (a vGPU, or a driver mode without it)",
            )),
            Ok(_) => Ok(()),
            Err(code) => Err(code.during(Call::Support)),
        }
    }

    fn granularity(&self) -> DriverResult<Granularities> {
        let prop = self.properties(ChunkProps::PLAIN);
        self.within_vmm(Call::Granularity, |vmm| {
            let ask = |which| {
                let mut bytes = 0_usize;
                // SAFETY: both pointers are valid, one for the write of a size, the other for the read of a property.
                check(unsafe { (vmm.cuMemGetAllocationGranularity)(&raw mut bytes, &raw const prop, which) })?;
                Ok(bytes as u64)
            };
            Ok(Granularities {
                minimum: ask(ffi::CU_MEM_ALLOC_GRANULARITY_MINIMUM)?,
                recommended: ask(ffi::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)?,
            })
        })
    }

    fn memory(&self) -> DriverResult<MemoryInfo> {
        let (mut free, mut total) = (0_usize, 0_usize);
        self.within(Call::Memory, |core| {
            // SAFETY: both pointers are valid for the write.
            check(unsafe { (core.cuMemGetInfo_v2)(&raw mut free, &raw mut total) })
        })?;
        let mut info = MemoryInfo { free: free as u64, total: total as u64 };
        if self.integrated {
            info.free = crate::sys::memory::at_most_available(info.free);
        }
        Ok(info)
    }

    fn reserve(&self, bytes: u64, align: u64) -> DriverResult<u64> {
        let mut addr = 0;
        let reserved = self.within_vmm(Call::Reserve, |vmm| {
            let (bytes, align) = (size(bytes)?, size(align)?);
            // SAFETY: the pointer is valid for the write; no address is asked for and there are no flags.
            check(unsafe { (vmm.cuMemAddressReserve)(&raw mut addr, bytes, align, 0, 0) })
        });
        reserved.map(|()| addr).map_err(|error| {
            // It is addresses that run out here, and a size beyond the device's address space is an invalid value to
            // the driver.
            let kind = match error.kind() {
                DriverErrorKind::OutOfMemory => DriverErrorKind::OutOfAddresses,
                DriverErrorKind::InvalidValue if bytes >= 1 << 46 => DriverErrorKind::OutOfAddresses,
                _ => return error,
            };
            let code = Code(error.code().and_then(|code| CUresult::try_from(code).ok()).unwrap_or_default());
            DriverError::new(Call::Reserve, kind).with_code(i64::from(code.0), code.name()).with_detail(format!(
                "{} aligned to {}",
                Bytes::new(bytes),
                Bytes::new(align)
            ))
        })
    }

    unsafe fn free_span(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.within_vmm(Call::FreeSpan, |vmm| {
            let bytes = size(bytes)?;
            // SAFETY: the caller vouches that this is a whole span with nothing mapped under it.
            check(unsafe { (vmm.cuMemAddressFree)(addr, bytes) })
        })
    }

    fn create(&self, bytes: u64, props: ChunkProps) -> DriverResult<RawHandle> {
        if props != ChunkProps::PLAIN {
            self.check_props(props)?;
        }
        let prop = self.properties(props);
        let mut handle = 0;
        self.within_vmm(Call::Create, |vmm| {
            let bytes = size(bytes)?;
            // SAFETY: both pointers are valid, one for the write of a handle, the other for the read of a property.
            check(unsafe { (vmm.cuMemCreate)(&raw mut handle, bytes, &raw const prop, 0) })
        })
        .map_err(|error| error.with_detail(Bytes::new(bytes).to_string()))?;
        Ok(RawHandle(handle))
    }

    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()> {
        self.within_vmm(Call::Release, |vmm| {
            // SAFETY: the caller vouches that the handle is valid and not used again.
            check(unsafe { (vmm.cuMemRelease)(handle.0) })
        })
    }

    unsafe fn map(&self, addr: u64, bytes: u64, handle: RawHandle) -> DriverResult<()> {
        self.within_vmm(Call::Map, |vmm| {
            let bytes = size(bytes)?;
            // SAFETY: the caller vouches that the addresses are reserved and free and that the handle has this size;
            // zero is the only offset the driver takes.
            check(unsafe { (vmm.cuMemMap)(addr, bytes, 0, handle.0, 0) })
        })
    }

    unsafe fn set_access(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let access = CUmemAccessDesc { location: self.location(), flags: ffi::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        self.within_vmm(Call::SetAccess, |vmm| {
            let bytes = size(bytes)?;
            // SAFETY: the caller vouches that whole mappings cover the addresses; the pointer is valid for the read of
            // the one description that is announced.
            check(unsafe { (vmm.cuMemSetAccess)(addr, bytes, &raw const access, 1) })
        })
    }

    unsafe fn unmap(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.within_vmm(Call::Unmap, |vmm| {
            let bytes = size(bytes)?;
            // SAFETY: the caller vouches that this is a whole mapping that nothing uses any more.
            check(unsafe { (vmm.cuMemUnmap)(addr, bytes) })
        })
    }

    unsafe fn export(&self, handle: RawHandle) -> DriverResult<OwnedFd> {
        let mut fd: i32 = -1;
        self.within_vmm(Call::Export, |vmm| {
            let kind = ffi::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            // SAFETY: the caller vouches for the handle; for this kind the driver writes an `int`, for which the
            // pointer is valid.
            check(unsafe { (vmm.cuMemExportToShareableHandle)((&raw mut fd).cast(), handle.0, kind, 0) })
        })?;
        // SAFETY: the driver has just opened the descriptor for us, and no one else knows of it.
        unsafe { adopt_exported(fd) }
    }

    unsafe fn import(&self, fd: BorrowedFd<'_>, _bytes: u64) -> DriverResult<RawHandle> {
        let mut handle = 0;
        let fd: *mut c_void = ptr::without_provenance_mut(fd.as_raw_fd().unsigned_abs() as usize);
        self.within_vmm(Call::Import, |vmm| {
            let kind = ffi::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            // SAFETY: the pointer is valid for the write; for this kind the driver takes the descriptor's number in
            // the place of a pointer. The descriptor stays the caller's.
            check(unsafe { (vmm.cuMemImportFromShareableHandle)(&raw mut handle, fd, kind) })
        })?;
        Ok(RawHandle(handle))
    }

    fn allocate(&self, bytes: u64) -> DriverResult<u64> {
        let mut addr = 0;
        self.within(Call::Allocate, |core| {
            let bytes = size(bytes)?;
            // SAFETY: the pointer is valid for the write.
            check(unsafe { (core.cuMemAlloc_v2)(&raw mut addr, bytes) })
        })
        .map_err(|error| error.with_detail(Bytes::new(bytes).to_string()))?;
        Ok(addr)
    }

    unsafe fn free(&self, addr: u64, _bytes: u64) -> DriverResult<()> {
        self.within(Call::Free, |core| {
            // SAFETY: the caller vouches that this is a block that nothing uses any more.
            check(unsafe { (core.cuMemFree_v2)(addr) })
        })
    }

    unsafe fn pin(&self, addr: u64, bytes: u64, flags: PinFlags) -> DriverResult<()> {
        self.register(addr, bytes, flags)
    }

    unsafe fn unpin(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.unregister(addr, bytes)
    }

    fn allocate_pinned(&self, bytes: u64, flags: PinFlags) -> DriverResult<u64> {
        self.host_alloc(bytes, flags)
    }

    unsafe fn free_pinned(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.host_free(addr, bytes)
    }

    unsafe fn pinned_device_ptr(&self, addr: u64) -> DriverResult<u64> {
        self.device_pointer(addr)
    }

    unsafe fn copy_in(&self, dst: u64, src: *const u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        let cuts = cuts(src.addr() as u64, bytes);
        self.queue(Call::CopyIn, &cuts, stream, |core, at, bytes, stream| {
            let from = src.wrapping_add(at as usize).cast();
            // SAFETY: the caller vouches for both sides until the copy is over, and for the stream.
            unsafe { (core.cuMemcpyHtoDAsync_v2)(dst + at, from, bytes, stream) }
        })
    }

    unsafe fn copy_out(&self, dst: *mut u8, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        let cuts = cuts(dst.addr() as u64, bytes);
        self.queue(Call::CopyOut, &cuts, stream, |core, at, bytes, stream| {
            let to = dst.wrapping_add(at as usize).cast();
            // SAFETY: the caller vouches for both sides until the copy is over, and for the stream.
            unsafe { (core.cuMemcpyDtoHAsync_v2)(to, src + at, bytes, stream) }
        })
    }

    unsafe fn copy_within(&self, dst: u64, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // Onto itself there is nothing to copy, and the driver does not promise that it may.
        let bytes = if dst == src { 0 } else { bytes };
        self.queue(Call::CopyWithin, &Cuts::whole(bytes), stream, |core, _, bytes, stream| {
            // SAFETY: the caller vouches for both sides until the copy is over, and for the stream.
            unsafe { (core.cuMemcpyDtoDAsync_v2)(dst, src, bytes, stream) }
        })
    }

    unsafe fn fill(&self, dst: u64, value: u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        self.queue(Call::Fill, &Cuts::whole(bytes), stream, |core, _, bytes, stream| {
            // SAFETY: the caller vouches for the memory until it is filled, and for the stream.
            unsafe { (core.cuMemsetD8Async)(dst, value, bytes, stream) }
        })
    }

    fn event_create(&self) -> DriverResult<RawEvent> {
        let mut event = ptr::null_mut();
        self.within(Call::EventCreate, |core| {
            // SAFETY: the pointer is valid for the write.
            check(unsafe { (core.cuEventCreate)(&raw mut event, ffi::CU_EVENT_DISABLE_TIMING) })
        })?;
        Ok(RawEvent(event.expose_provenance() as u64))
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        self.within(Call::EventRecord, |core| {
            // SAFETY: the caller vouches that both are alive and of this device.
            check(unsafe { (core.cuEventRecord)(event_ptr(event), stream.as_raw()) })
        })
    }

    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<bool> {
        self.within(Call::EventQuery, |core| {
            // SAFETY: the caller vouches that the event is alive and of this device.
            match check(unsafe { (core.cuEventQuery)(event_ptr(event)) }) {
                Ok(()) => Ok(true),
                Err(code) if code.kind() == DriverErrorKind::NotReady => Ok(false),
                Err(code) => Err(code),
            }
        })
    }

    unsafe fn event_wait(&self, event: RawEvent) -> DriverResult<()> {
        self.within(Call::EventWait, |core| {
            // SAFETY: the caller vouches that the event is alive and of this device.
            check(unsafe { (core.cuEventSynchronize)(event_ptr(event)) })
        })
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        self.within(Call::EventDestroy, |core| {
            // SAFETY: the caller vouches that the event is alive, of this device and not used again.
            check(unsafe { (core.cuEventDestroy_v2)(event_ptr(event)) })
        })
    }

    fn synchronize(&self) -> DriverResult<()> {
        self.within(Call::Synchronize, |core| {
            // SAFETY: this device's context is current; the function takes nothing.
            check(unsafe { (core.cuCtxSynchronize)() })
        })
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> DriverResult<()> {
        self.within(Call::SynchronizeStream, |core| {
            // SAFETY: the caller vouches that the stream is alive and of this device.
            check(unsafe { (core.cuStreamSynchronize)(stream.as_raw()) })
        })
    }

    unsafe fn stream_is_capturing(&self, stream: RawStream) -> DriverResult<bool> {
        self.within(Call::StreamIsCapturing, |core| {
            let mut status = ffi::CU_STREAM_CAPTURE_STATUS_NONE;
            // SAFETY: the caller vouches for the stream; the pointer is valid for the write.
            match check(unsafe { (core.cuStreamIsCapturing)(stream.as_raw(), &raw mut status) }) {
                Ok(()) => Ok(status != ffi::CU_STREAM_CAPTURE_STATUS_NONE),
                // The default stream's answer while another stream, which waits for it, is capturing. The query does
                // not end that capture.
                Err(Code(ffi::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)) => Ok(true),
                Err(code) => Err(code),
            }
        })
    }
}
