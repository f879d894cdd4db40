//! The driver's vocabulary in HIP's words.

use core::ffi::c_void;
use core::ptr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::HipDriver;
use super::book::{HandlePtr, Seen, pointer};
use super::error::{Code, check};
use super::ffi::{self, hipDeviceptr_t, hipError_t, hipMemAllocationProp, hipMemLocation};
use super::library::Core;
use super::quirks::Quirk;
use super::treated::renamed;
use crate::bytes::Bytes;
use crate::driver::exported::adopt_exported;
use crate::driver::layout::Checked;
use crate::driver::pins::{Cuts, cuts};
use crate::driver::{
    Call, ChunkProps, Driver, DriverError, DriverErrorKind, DriverInfo, DriverResult, Granularities, MemoryInfo,
    PinFlags, RawEvent, RawHandle, RawStream, Shareable,
};
use crate::sys;

impl HipDriver {
    pub(super) const fn location(device: i32) -> hipMemLocation {
        hipMemLocation { type_: ffi::hipMemLocationTypeDevice, id: device }
    }

    fn properties(&self, props: ChunkProps) -> hipMemAllocationProp {
        hipMemAllocationProp {
            type_: ffi::hipMemAllocationTypePinned,
            requested_handle_type: match props.shareable {
                Shareable::PosixFd => ffi::hipMemHandleTypePosixFileDescriptor,
                Shareable::No | Shareable::Fabric => ffi::hipMemHandleTypeNone,
            },
            location: Self::location(self.device),
            win32_handle_meta_data: ptr::null_mut(),
            alloc_flags: ffi::hipMemAllocationFlags::default(),
        }
    }

    /// Asks the book, and makes what it refuses an error of ours.
    pub(super) fn checked<T>(call: Call, checked: Checked<T>) -> DriverResult<T> {
        checked.map_err(DriverError::misuse(call))
    }

    /// Queues a copy or a fill on `stream`, or on the stream for those without one, and then waits for it.
    fn queue(
        &self,
        call: Call,
        (dst, src): (u64, u64),
        host: Option<u64>,
        bytes: u64,
        stream: Option<RawStream>,
        work: impl Fn(&Core, u64, usize, *mut c_void) -> hipError_t,
    ) -> DriverResult<()> {
        let cuts = self.cuts(dst, src, host, bytes);
        // Nothing to do is not worth a call, and not all of the runtime's functions take zero.
        if cuts.is_nothing() {
            return Ok(());
        }
        self.within(call, |core| {
            let target = stream.map_or(self.copies.0, RawStream::as_raw);
            let mut from = 0;
            let queued = cuts.ends().try_for_each(|to| {
                check(work(core, from, size(to - from)?, target))?;
                from = to;
                Ok(())
            });
            // Where a piece failed, those before it are on their way to or from the caller's memory, on any stream.
            if stream.is_none() || (queued.is_err() && from > 0) {
                wait_for(core, target)?;
            }
            queued
        })
    }

    /// Where a copy has to be cut: at the borders of page-locked pieces on the host's side, of which the runtime looks up
    /// the first only, and on runtimes that do the same with chunks at the borders of those.
    fn cuts(&self, dst: u64, src: u64, host: Option<u64>, bytes: u64) -> Cuts {
        let cuts = host.map_or_else(|| Cuts::whole(bytes), |host| cuts(host, bytes));
        if !self.rows.has(Quirk::CopyInOneChunk) {
            return cuts;
        }
        let book = self.book.lock();
        // What is no mapping has no border.
        let left = |start: u64| book.layout.border(start).map_or(u64::MAX, |end| end - start);
        let next = |at: u64| at.checked_add(left(dst + at).min(left(src + at))).filter(|&to| to < bytes);
        cuts.and_at(core::iter::successors(next(0), |&at| next(at)))
    }
}

/// Waits for what was queued on a stream. An error may have kept the runtime from waiting, and the caller's memory may go
/// when we return: so it is asked again then, and after that for all of the device.
fn wait_for(core: &Core, stream: *mut c_void) -> Result<(), Code> {
    // SAFETY: the stream is the driver's own, or the caller of the copy vouches for it.
    let wait = || check(unsafe { (core.hipStreamSynchronize)(stream) });
    wait().inspect_err(|_| {
        if wait().is_err() {
            // SAFETY: the function takes nothing; the stream's device is current.
            let _ = unsafe { (core.hipDeviceSynchronize)() };
        }
    })
}

/// An address or a name that the runtime gave with success, which is never null.
pub(super) fn given(call: Call, what: *mut c_void) -> DriverResult<*mut c_void> {
    let nothing =
        || DriverError::new(call, DriverErrorKind::Other).with_detail("the runtime returned success and nothing");
    if what.is_null() { Err(nothing()) } else { Ok(what) }
}

/// A size as the runtime takes it.
pub(super) fn size(bytes: u64) -> Result<usize, Code> {
    usize::try_from(bytes).map_err(|_| Code(ffi::hipErrorInvalidValue))
}

fn event_ptr(event: RawEvent) -> ffi::hipEvent_t {
    // `ffi` asserts that a pointer has 64 bits.
    ptr::with_exposed_provenance_mut(event.0 as usize)
}

// SAFETY: spans, blocks and mappings are the runtime's own, which gives out addresses that overlap nothing else in the
// process and keeps them until they are freed. What is known of runtimes that report success without having done so is
// treated by the rows, and what is not known is what the start-up check looks for. The memory is not host visible and is
// not said to be; page-locked memory is the host's own, which the runtime gets from the kernel, zeroed or as this process
// left it. The functions are C and do not unwind.
unsafe impl Driver for HipDriver {
    fn info(&self) -> &DriverInfo {
        &self.info
    }

    fn support(&self) -> DriverResult<()> {
        self.check_process(Call::Support)?;
        self.vmm(Call::Support)?;
        match self.hip.attribute(self.device, ffi::hipDeviceAttributeVirtualMemoryManagementSupported) {
            Ok(0) => Err(DriverError::new(Call::Support, DriverErrorKind::NotSupported).with_detail(
                "hipDeviceAttributeVirtualMemoryManagementSupported is 0 (an old kernel driver, or \
                 HIP_VMEM_MANAGE_SUPPORT=0)",
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
                check(unsafe { (vmm.hipMemGetAllocationGranularity)(&raw mut bytes, &raw const prop, which) })?;
                Ok(bytes as u64)
            };
            Ok(Granularities {
                minimum: ask(ffi::hipMemAllocationGranularityMinimum)?,
                recommended: ask(ffi::hipMemAllocationGranularityRecommended)?,
            })
        })
    }

    fn memory(&self) -> DriverResult<MemoryInfo> {
        let (mut free, mut total) = (0_usize, 0_usize);
        self.within(Call::Memory, |core| {
            // SAFETY: both pointers are valid for the write.
            check(unsafe { (core.hipMemGetInfo)(&raw mut free, &raw mut total) })
        })?;
        let mut info = MemoryInfo { free: free as u64, total: total as u64 };
        // A part of a divided card has the whole card's figures there, which are not its own; and of a chip that shares the
        // host's memory they are what was set aside for it, which may be all that the runtime gives out or next to nothing.
        let seen = self.card.as_ref().and_then(sys::pci::Card::memory);
        let seen = seen.filter(|seen| seen.total.abs_diff(info.total) <= info.total / 8);
        match seen {
            Some(seen) if self.rows.has(Quirk::FreeIgnoresGraphics) => {
                info.free = info.free.min(seen.total.saturating_sub(seen.used));
            }
            None if self.integrated => info.free = sys::memory::at_most_available(info.free),
            _ => {}
        }
        info.free = info.free.min(info.total);
        Ok(info)
    }

    fn reserve(&self, bytes: u64, align: u64) -> DriverResult<u64> {
        let asked = || format!("{} aligned to {}", Bytes::new(bytes), Bytes::new(align));
        if bytes == 0 || !align.is_power_of_two() {
            let detail = format!("{bytes} bytes aligned to {align}, which has to be a power of two");
            return Err(DriverError::misuse(Call::Reserve)(detail));
        }
        let reserved = self.within_vmm(Call::Reserve, |vmm| self.reserve_aligned(vmm, bytes, align));
        let (addr, raw) = reserved.map_err(|error| match error.kind() {
            // It is addresses that run out here; up to 6.x an odd size is called out of memory as well.
            DriverErrorKind::OutOfMemory => renamed(&error, DriverErrorKind::OutOfAddresses).with_detail(asked()),
            _ if error.code().is_some() => error.with_detail(asked()),
            _ => error,
        })?;
        if raw.addr == 0 {
            let detail = format!("{}: the runtime returned success and a null address", asked());
            return Err(DriverError::new(Call::Reserve, DriverErrorKind::Other).with_detail(detail));
        }
        self.book.lock().layout.add_span(addr, bytes, raw);
        Ok(addr)
    }

    unsafe fn free_span(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // Taken out first, since another thread may be given the same addresses right after.
        let raw = Self::checked(Call::FreeSpan, self.book.lock().layout.remove_span(addr, bytes))?;
        let mut now = raw;
        let freed = match raw.refused {
            true => Err(DriverError::new(Call::FreeSpan, DriverErrorKind::Other)
                .with_detail("the runtime failed to free it before, and may crash if it is asked again")),
            // The book bears out that the runtime reserved just this and was not asked to free it, and that nothing is mapped
            // there; the caller vouches that nothing uses it.
            false => self.within_vmm(Call::FreeSpan, |vmm| {
                now.refused = true;
                self.free_raw(vmm, raw)
            }),
        };
        freed.inspect_err(|_| self.book.lock().layout.add_span(addr, bytes, now))
    }

    fn create(&self, bytes: u64, props: ChunkProps) -> DriverResult<RawHandle> {
        let refusal = match props {
            ChunkProps { shareable: Shareable::Fabric, .. } => Some("HIP cannot share memory as a fabric handle"),
            ChunkProps { rdma: true, .. } => Some("HIP has no property for RDMA; export the chunk instead"),
            _ => None,
        };
        if let Some(refusal) = refusal {
            return Err(DriverError::new(Call::Create, DriverErrorKind::NotSupported).with_detail(refusal));
        }
        let prop = self.properties(props);
        let mut handle = ptr::null_mut();
        self.within_vmm(Call::Create, |vmm| {
            let bytes = size(bytes)?;
            // SAFETY: both pointers are valid, one for the write of a handle, the other for the read of a property.
            check(unsafe { (vmm.hipMemCreate)(&raw mut handle, bytes, &raw const prop, 0) })
        })
        .map_err(|error| self.look_into(error, bytes))?;
        let handle = given(Call::Create, handle)?;
        Ok(self.book.lock().add_handle(HandlePtr(handle), bytes, None))
    }

    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()> {
        let (_turn, vmm) = self.alone(Call::Release)?;
        loop {
            let (raw, kept) = {
                let mut book = self.book.lock();
                let found = Self::checked(Call::Release, book.idle_handle(handle))?;
                (found.raw, found.kept)
            };
            self.within(Call::Release, |_| {
                // SAFETY: the book bears out that the runtime gave this handle, that it is mapped nowhere, and that it
                // still holds this reference: its own, or one that a map which failed has left on it.
                check(unsafe { (vmm.hipMemRelease)(raw.0) })
            })?;
            let mut book = self.book.lock();
            match book.handle(handle) {
                Ok(found) if kept > 0 => found.kept -= 1,
                _ => {
                    book.remove_handle(handle);
                    return Ok(());
                }
            }
        }
    }

    unsafe fn map(&self, addr: u64, bytes: u64, handle: RawHandle) -> DriverResult<()> {
        let (_turn, vmm) = self.alone(Call::Map)?;
        let raw = Self::checked(Call::Map, self.book.lock().map(addr, bytes, handle))?;
        let mapped = self.within(Call::Map, |_| {
            let bytes = size(bytes)?;
            // SAFETY: the book bears out that the addresses are reserved and free, and that the handle is the runtime's
            // and has this size; zero is the only offset the runtime takes.
            check(unsafe { (vmm.hipMemMap)(pointer(addr), bytes, 0, raw.0, 0) })
        });
        mapped.map_err(|error| {
            self.book.lock().unmapped(addr);
            Self::or_shortage(&error, None)
        })
    }

    unsafe fn set_access(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let (_turn, vmm) = self.alone(Call::SetAccess)?;
        let places: Vec<(u64, u64)> = {
            let book = self.book.lock();
            Self::checked(Call::SetAccess, book.layout.whole(addr, bytes))?;
            book.layout.within(addr, bytes).map(|(at, mapping)| (at, mapping.bytes)).collect()
        };
        let owner = [self.device];
        let devices: Vec<i32> = match self.rows.has(Quirk::PeersFirst) {
            true => self.peers.iter().chain(&owner).copied().collect(),
            false => owner.iter().chain(&self.peers).copied().collect(),
        };
        // Chunk by chunk: over several, 7.0 to 7.2 add up sizes from the start of the span.
        for &(at, bytes) in &places {
            for &device in &devices {
                let granted = self.within(Call::SetAccess, |_| Self::grant(vmm, device, at, bytes));
                granted.map_err(|error| self.not_granted(vmm, &error, device, at, bytes))?;
            }
            self.book.lock().saw(at, bytes, Seen::There, false);
        }
        Ok(())
    }

    unsafe fn unmap(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let (_turn, vmm) = self.alone(Call::Unmap)?;
        if self.is_there(vmm, addr, bytes)? {
            self.within(Call::Unmap, |_| {
                let bytes = size(bytes)?;
                // SAFETY: the book bears out that this is a whole mapping, and the runtime that it was really made, where
                // it may not have been; the caller vouches that nothing uses it any more.
                check(unsafe { (vmm.hipMemUnmap)(pointer(addr), bytes) })
            })?;
        }
        if self.rows.has(Quirk::KeptUnderSpan) {
            // SAFETY: the addresses lie in a span that the runtime reserved for us, nothing is mapped there any more,
            // and empty pages without access keep them reserved just as well.
            if let Err(error) = unsafe { sys::map::reserve_at(addr, bytes) } {
                tracing::warn!(device = %self.info.id(), %error, "memory may not return before its span is freed");
            }
        }
        self.book.lock().unmapped(addr);
        Ok(())
    }

    unsafe fn export(&self, handle: RawHandle) -> DriverResult<OwnedFd> {
        let (_turn, vmm) = self.alone(Call::Export)?;
        let raw = Self::checked(Call::Export, self.book.lock().handle(handle).map(|found| found.raw))?;
        let mut fd: i32 = -1;
        self.within(Call::Export, |_| {
            let kind = ffi::hipMemHandleTypePosixFileDescriptor;
            // SAFETY: the book bears out the handle; for this kind the runtime writes an `int`, for which the pointer is
            // valid.
            check(unsafe { (vmm.hipMemExportToShareableHandle)((&raw mut fd).cast(), raw.0, kind, 0) })
        })?;
        // SAFETY: the runtime has just opened the descriptor for us, and no one else knows of it.
        unsafe { adopt_exported(fd) }
    }

    unsafe fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> DriverResult<RawHandle> {
        // The runtime gets a descriptor that stays open as long as it may want it.
        let own = match self.rows.has(Quirk::FileForAccess) {
            true => Some(fd.try_clone_to_owned().map_err(|error| {
                let kind = match error.raw_os_error() {
                    Some(libc::EMFILE | libc::ENFILE) => DriverErrorKind::OutOfFiles,
                    _ => DriverErrorKind::Other,
                };
                DriverError::new(Call::Import, kind).with_detail(error.to_string())
            })?),
            false => None,
        };
        let mut number = own.as_ref().map_or(fd, AsFd::as_fd).as_raw_fd();
        let mut handle = ptr::null_mut();
        self.within_vmm(Call::Import, |vmm| {
            let kind = ffi::hipMemHandleTypePosixFileDescriptor;
            // SAFETY: both pointers are valid, one for the write of a handle; for this kind the runtime reads an `int`
            // through the other. The descriptor stays ours.
            check(unsafe { (vmm.hipMemImportFromShareableHandle)(&raw mut handle, (&raw mut number).cast(), kind) })
        })?;
        let handle = given(Call::Import, handle)?;
        Ok(self.book.lock().add_handle(HandlePtr(handle), bytes, own))
    }

    fn allocate(&self, bytes: u64) -> DriverResult<u64> {
        self.not_behind_a_hang(Call::Allocate)?;
        let mut block: hipDeviceptr_t = ptr::null_mut();
        self.within(Call::Allocate, |core| {
            let bytes = size(bytes)?;
            // SAFETY: the pointer is valid for the write.
            check(unsafe { (core.hipMalloc)(&raw mut block, bytes) })
        })
        .map_err(|error| error.with_detail(format!("{} asked", Bytes::new(bytes))))?;
        let addr = given(Call::Allocate, block)?.expose_provenance() as u64;
        self.book.lock().add_block(addr, bytes);
        Ok(addr)
    }

    unsafe fn free(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.not_behind_a_hang(Call::Free)?;
        Self::checked(Call::Free, self.book.lock().remove_block(addr, bytes))?;
        let freed = self.within(Call::Free, |core| {
            // SAFETY: the book bears out that this is a block of the runtime's; the caller vouches that nothing uses it
            // any more.
            check(unsafe { (core.hipFree)(pointer(addr)) })
        });
        freed.inspect_err(|_| self.book.lock().add_block(addr, bytes))
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
        self.queue(Call::CopyIn, (dst, dst), Some(src.addr() as u64), bytes, stream, |core, at, bytes, stream| {
            // The offset is within the size, which fits a `usize`.
            let from = src.wrapping_add(at as usize).cast();
            // SAFETY: the caller vouches for both sides until the copy is over, and for the stream.
            unsafe { (core.hipMemcpyHtoDAsync)(pointer(dst + at), from, bytes, stream) }
        })
    }

    unsafe fn copy_out(&self, dst: *mut u8, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        self.queue(Call::CopyOut, (src, src), Some(dst.addr() as u64), bytes, stream, |core, at, bytes, stream| {
            // The offset is within the size, which fits a `usize`.
            let to = dst.wrapping_add(at as usize).cast();
            // SAFETY: the caller vouches for both sides until the copy is over, and for the stream.
            unsafe { (core.hipMemcpyDtoHAsync)(to, pointer(src + at), bytes, stream) }
        })
    }

    unsafe fn copy_within(&self, dst: u64, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // Onto itself there is nothing to copy, and the runtime does not promise that it may.
        let bytes = if dst == src { 0 } else { bytes };
        self.queue(Call::CopyWithin, (dst, src), None, bytes, stream, |core, at, bytes, stream| {
            // SAFETY: the caller vouches for both sides until the copy is over, and for the stream.
            unsafe { (core.hipMemcpyDtoDAsync)(pointer(dst + at), pointer(src + at), bytes, stream) }
        })
    }

    unsafe fn fill(&self, dst: u64, value: u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        self.queue(Call::Fill, (dst, dst), None, bytes, stream, |core, at, bytes, stream| {
            // SAFETY: the caller vouches for the memory until it is filled, and for the stream.
            unsafe { (core.hipMemsetD8Async)(pointer(dst + at), value, bytes, stream) }
        })
    }

    fn event_create(&self) -> DriverResult<RawEvent> {
        let mut event = ptr::null_mut();
        self.within(Call::EventCreate, |core| {
            // SAFETY: the pointer is valid for the write.
            check(unsafe { (core.hipEventCreateWithFlags)(&raw mut event, ffi::hipEventDisableTiming) })
        })?;
        Ok(RawEvent(given(Call::EventCreate, event)?.expose_provenance() as u64))
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        self.within(Call::EventRecord, |core| {
            // SAFETY: the caller vouches that both are alive and of this device.
            check(unsafe { (core.hipEventRecord)(event_ptr(event), stream.as_raw()) })
        })
    }

    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<bool> {
        self.within(Call::EventQuery, |core| {
            // SAFETY: the caller vouches that the event is alive and of this device.
            match check(unsafe { (core.hipEventQuery)(event_ptr(event)) }) {
                Ok(()) => Ok(true),
                Err(Code(ffi::hipErrorNotReady)) => {
                    self.hip.forget_error();
                    Ok(false)
                }
                Err(code) => Err(code),
            }
        })
    }

    unsafe fn event_wait(&self, event: RawEvent) -> DriverResult<()> {
        self.within(Call::EventWait, |core| {
            // SAFETY: the caller vouches that the event is alive and of this device.
            check(unsafe { (core.hipEventSynchronize)(event_ptr(event)) })
        })
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        self.within(Call::EventDestroy, |core| {
            // SAFETY: the caller vouches that the event is alive, of this device and not used again.
            check(unsafe { (core.hipEventDestroy)(event_ptr(event)) })
        })
    }

    fn synchronize(&self) -> DriverResult<()> {
        // The peers' work may touch the memory as well.
        [self.device].iter().chain(&self.peers).try_for_each(|&device| {
            self.within_device(Call::Synchronize, device, |core| {
                // SAFETY: the device is current; the function takes nothing.
                check(unsafe { (core.hipDeviceSynchronize)() })
            })
        })
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> DriverResult<()> {
        self.within(Call::SynchronizeStream, |core| {
            // SAFETY: the caller vouches that the stream is alive and of this device.
            check(unsafe { (core.hipStreamSynchronize)(stream.as_raw()) })
        })
    }

    unsafe fn stream_is_capturing(&self, stream: RawStream) -> DriverResult<bool> {
        self.within(Call::StreamIsCapturing, |core| {
            let mut status = ffi::hipStreamCaptureStatusNone;
            // SAFETY: the caller vouches for the stream; the pointer is valid for the write.
            match check(unsafe { (core.hipStreamIsCapturing)(stream.as_raw(), &raw mut status) }) {
                Ok(()) => Ok(status != ffi::hipStreamCaptureStatusNone),
                // The null stream's answer while another stream, which waits for it, is capturing.
                Err(Code(ffi::hipErrorStreamCaptureImplicit)) => {
                    self.hip.forget_error();
                    Ok(true)
                }
                Err(code) => Err(code),
            }
        })
    }
}
