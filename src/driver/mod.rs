//! The only place that talks to a driver.
//!
//! [`Driver`] is the vocabulary: one method per thing a driver can do, object safe, no policy. What is unsafe about
//! drivers is written once, as the preconditions of its methods. Everything above goes through a [`Gate`], which adds
//! what must hold for every call: it counts, it refuses calls from a forked child, and it stops asking a device that
//! was lost.
//!
//! | driver | memory | open files | where |
//! |---|---|---|---|
//! | `cuda` (feature `cuda`) | an NVIDIA card's | none | Linux with NVIDIA's driver |
//! | `hip` (feature `hip`) | an AMD card's | one per chunk with ROCm 7.14 | Linux with ROCm |
//! | [`host`] | real pages: one memfd per chunk, spans of `PROT_NONE` | one per chunk | any Linux |
//! | `sim` (feature `sim`) | pretended | as its personality says | anywhere |

use core::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
#[cfg(any(feature = "cuda", feature = "hip"))]
mod exported;
#[cfg(feature = "sim")]
pub mod fault;
pub(crate) mod gate;
#[cfg(feature = "hip")]
pub mod hip;
pub mod host;
mod info;
mod layout;
#[cfg(any(feature = "cuda", feature = "hip"))]
mod opening;
mod pins;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg(any(feature = "cuda", feature = "hip"))]
mod table;

pub use error::{Call, DriverError, DriverErrorKind};
pub use gate::Gate;
pub use info::{
    Backend, CheckForm, ChunkProps, DriverInfo, Granularities, KnownFault, MapCount, MemoryInfo, OpenFiles, PinFlags,
    ProcessLimits, Quirks, Shareable,
};
#[cfg(any(feature = "cuda", feature = "hip"))]
pub use opening::Unopened;
#[cfg(any(feature = "cuda", feature = "hip"))]
pub use table::LoadError;

/// What a driver call returns.
pub type DriverResult<T> = Result<T, DriverError>;

/// A driver's name for one physical allocation (what CUDA calls a generic allocation handle). It means something only
/// to the driver that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RawHandle(pub u64);

/// A driver's stream: the value of a `CUstream` or `hipStream_t`, or the device's default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream {
    raw: usize,
    /// Of a simulated device: a number that no real driver may follow.
    simulated: bool,
}

impl RawStream {
    /// The device's default stream.
    pub const DEFAULT: Self = Self { raw: 0, simulated: false };

    /// The stream behind a raw `CUstream` or `hipStream_t`.
    ///
    /// # Safety
    /// `raw` is null or a stream of the device it will be used with, and stays alive while this value is used: drivers
    /// follow the pointer.
    #[must_use]
    pub unsafe fn from_raw(raw: *mut core::ffi::c_void) -> Self {
        Self { raw: raw.expose_provenance(), simulated: false }
    }

    /// A simulated device's stream.
    #[cfg(feature = "sim")]
    pub(crate) const fn simulated(raw: usize) -> Self {
        Self { raw, simulated: true }
    }

    /// The raw value, as the driver gave it; null for a stream of a simulated device.
    #[must_use]
    pub fn as_raw(self) -> *mut core::ffi::c_void {
        core::ptr::with_exposed_provenance_mut(if self.simulated { 0 } else { self.raw })
    }

    /// Whether a driver of this kind may be handed it.
    pub(crate) fn fits(self, backend: Backend) -> bool {
        self.simulated == (backend == Backend::Sim) || self == Self::DEFAULT
    }
}

impl fmt::Display for RawStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.raw)
    }
}

/// A driver's event: the value of a `CUevent` or `hipEvent_t`, or a number of the driver's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawEvent(pub u64);

/// A device's driver: the vocabulary, without policy.
///
/// Addresses and sizes are `u64`; addresses are device addresses, which on a `host_visible` driver are host addresses.
/// Sizes passed to the memory calls are never zero and, where the driver has a granularity, multiples of it. A call
/// that fails has changed nothing.
///
/// # Safety
/// An implementor promises that
/// * spans and contiguous blocks it hands out do not overlap each other or any other memory in use, and stay put until
///   they are freed;
/// * `map` puts the given handle's memory at the given address and nothing else, `unmap` leaves the addresses
///   reserved, and memory that is mapped with access is readable and writable for its full size;
/// * if [`DriverInfo::host_visible`] is set, those addresses are valid for the host's reads and writes too, are always
///   initialised memory, and are never the null page; and calls that take a stream have taken effect when they return,
///   so that nothing changes the memory behind the back of the host's references;
/// * memory from `allocate_pinned` is valid for the host's reads and writes, initialised and aligned to a page, until it
///   is freed;
/// * no call unwinds out of foreign code.
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// What is known of the device.
    fn info(&self) -> &DriverInfo;

    /// Whether the driver says it has virtual memory management: its symbols are there and the device's attribute is
    /// set. An `Ok` is not yet a verdict.
    ///
    /// # Errors
    /// [`DriverErrorKind::Missing`] or [`DriverErrorKind::NotSupported`], saying what is missing.
    fn support(&self) -> DriverResult<()>;

    /// The sizes it maps in.
    ///
    /// # Errors
    /// When the driver does not say.
    fn granularity(&self) -> DriverResult<Granularities>;

    /// Free and total memory.
    ///
    /// # Errors
    /// When the driver does not say.
    fn memory(&self) -> DriverResult<MemoryInfo>;

    /// The limits that bind this driver if they are not those of this process.
    fn limits(&self) -> Option<Arc<dyn ProcessLimits>> {
        None
    }

    /// Reserves `bytes` of addresses, aligned to `align` (a power of two, at least the granularity). Never returns
    /// address zero.
    ///
    /// # Errors
    /// [`DriverErrorKind::OutOfAddresses`], or what the driver says.
    fn reserve(&self, bytes: u64, align: u64) -> DriverResult<u64>;

    /// Gives a span back.
    ///
    /// # Safety
    /// `(addr, bytes)` is exactly a span from [`reserve`](Self::reserve) that was not freed yet, nothing is mapped
    /// under it, and nothing uses its addresses any more.
    ///
    /// # Errors
    /// What the driver says; the span then stays reserved.
    unsafe fn free_span(&self, addr: u64, bytes: u64) -> DriverResult<()>;

    /// Makes a handle to `bytes` of physical memory, which are really there when this returns.
    ///
    /// # Errors
    /// [`DriverErrorKind::OutOfMemory`], [`DriverErrorKind::OutOfFiles`], [`DriverErrorKind::NotSupported`] for props
    /// the device does not have.
    fn create(&self, bytes: u64, props: ChunkProps) -> DriverResult<RawHandle>;

    /// Gives a handle up. Its memory returns at once, or at the last unmap if it is still mapped.
    ///
    /// # Safety
    /// `handle` came from [`create`](Self::create) or [`import`](Self::import) of this driver, was not released yet,
    /// and is not used again.
    ///
    /// # Errors
    /// What the driver says; the handle then stays valid.
    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()>;

    /// Maps all of a handle at `addr`. The memory may not be touched before [`set_access`](Self::set_access).
    ///
    /// # Safety
    /// `[addr, addr + bytes)` lies in one span from [`reserve`](Self::reserve), nothing is mapped there, `handle` is
    /// valid and `bytes` is its whole size.
    ///
    /// # Errors
    /// [`DriverErrorKind::OutOfMaps`], [`DriverErrorKind::OutOfFiles`], or what the driver says.
    unsafe fn map(&self, addr: u64, bytes: u64, handle: RawHandle) -> DriverResult<()>;

    /// Makes mapped memory readable and writable for the device (and for the host on a `host_visible` driver).
    ///
    /// # Safety
    /// `[addr, addr + bytes)` is exactly covered by one or more whole mappings.
    ///
    /// # Errors
    /// What the driver says; treat the memory as mapped without access.
    unsafe fn set_access(&self, addr: u64, bytes: u64) -> DriverResult<()>;

    /// Takes one mapping away; its addresses stay reserved.
    ///
    /// # Safety
    /// `(addr, bytes)` is exactly one mapping made by [`map`](Self::map), no work on the device can touch it any more
    /// (on an H200 an unmap under a queued kernel succeeds and the kernel then loses the context for good), and no
    /// host reference points into it.
    ///
    /// # Errors
    /// What the driver says; the mapping then stays.
    unsafe fn unmap(&self, addr: u64, bytes: u64) -> DriverResult<()>;

    /// A file descriptor for a handle made with [`Shareable::PosixFd`]. It is the caller's to close.
    ///
    /// # Safety
    /// `handle` is valid.
    ///
    /// # Errors
    /// [`DriverErrorKind::NotSupported`] where handles cannot be exported.
    unsafe fn export(&self, handle: RawHandle) -> DriverResult<OwnedFd> {
        let _ = handle;
        Err(DriverError::new(Call::Export, DriverErrorKind::NotSupported))
    }

    /// A handle to memory that another process exported.
    ///
    /// # Safety
    /// `fd` came from [`export`](Self::export) of a driver of the same kind and device, for a handle of `bytes`.
    ///
    /// # Errors
    /// [`DriverErrorKind::NotSupported`] where handles cannot be imported.
    unsafe fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> DriverResult<RawHandle> {
        let _ = (fd, bytes);
        Err(DriverError::new(Call::Import, DriverErrorKind::NotSupported))
    }

    /// Allocates `bytes` in one block, ready for use, without virtual memory management.
    ///
    /// # Errors
    /// [`DriverErrorKind::OutOfMemory`], or what the driver says.
    fn allocate(&self, bytes: u64) -> DriverResult<u64>;

    /// Frees a block.
    ///
    /// # Safety
    /// `(addr, bytes)` is exactly a block from [`allocate`](Self::allocate) that was not freed yet, and neither the
    /// device nor the host uses it any more.
    ///
    /// # Errors
    /// What the driver says; the block then stays allocated.
    unsafe fn free(&self, addr: u64, bytes: u64) -> DriverResult<()>;

    /// Page-locks host memory that is there already, so that the device can reach it. Copies from and to it that cross
    /// the border of two such pieces are the driver's to split.
    ///
    /// # Safety
    /// `[addr, addr + bytes)` are whole pages of host memory of the caller's own, readable and writable, out of which no
    /// forked child gets, and that stay mapped until they are unpinned.
    ///
    /// # Errors
    /// [`DriverErrorKind::NotSupported`] for flags the driver does not have and where memory cannot be page-locked;
    /// [`DriverErrorKind::LockLimit`]; [`DriverErrorKind::OutOfMemory`]; [`DriverErrorKind::Misuse`] where part of it is
    /// pinned already.
    unsafe fn pin(&self, addr: u64, bytes: u64, flags: PinFlags) -> DriverResult<()> {
        let _ = (addr, bytes, flags);
        Err(DriverError::new(Call::Pin, DriverErrorKind::NotSupported))
    }

    /// Lets go of page-locked memory, which stays mapped.
    ///
    /// # Safety
    /// `(addr, bytes)` is exactly what one call of [`pin`](Self::pin) locked and still is locked, and no work on the
    /// device can touch it any more.
    ///
    /// # Errors
    /// What the driver says; the memory then stays locked.
    unsafe fn unpin(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let _ = (addr, bytes);
        Err(DriverError::new(Call::Unpin, DriverErrorKind::NotSupported))
    }

    /// Allocates page-locked host memory; returns the host's address of it.
    ///
    /// # Errors
    /// As for [`pin`](Self::pin).
    fn allocate_pinned(&self, bytes: u64, flags: PinFlags) -> DriverResult<u64> {
        let _ = (bytes, flags);
        Err(DriverError::new(Call::AllocatePinned, DriverErrorKind::NotSupported))
    }

    /// Frees page-locked host memory.
    ///
    /// # Safety
    /// `(addr, bytes)` is exactly a block from [`allocate_pinned`](Self::allocate_pinned) that was not freed yet, and
    /// neither the device nor the host uses it any more.
    ///
    /// # Errors
    /// What the driver says; the block then stays allocated.
    unsafe fn free_pinned(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let _ = (addr, bytes);
        Err(DriverError::new(Call::FreePinned, DriverErrorKind::NotSupported))
    }

    /// Where the device sees page-locked memory that the host sees at `addr`. It holds up to the end of the piece that
    /// was pinned or allocated in one call, not beyond.
    ///
    /// # Safety
    /// `addr` lies in memory that is pinned with [`PinFlags::mapped`].
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn pinned_device_ptr(&self, addr: u64) -> DriverResult<u64> {
        let _ = addr;
        Err(DriverError::new(Call::PinnedDevicePtr, DriverErrorKind::NotSupported))
    }

    /// Copies `bytes` from the host at `src` to the device at `dst`. With no stream the copy is over when this
    /// returns; with one it is queued there.
    ///
    /// # Safety
    /// `dst` is valid for writes of `bytes` by the device, `src` for reads by the host, until the copy is over.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn copy_in(&self, dst: u64, src: *const u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()>;

    /// Copies `bytes` from the device at `src` to the host at `dst`. With no stream the copy is over when this
    /// returns; with one it is queued there.
    ///
    /// # Safety
    /// `src` is valid for reads of `bytes` by the device, `dst` for writes by the host, until the copy is over.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn copy_out(&self, dst: *mut u8, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()>;

    /// Copies `bytes` on the device from `src` to `dst`; the two may overlap only where they are equal. With no stream
    /// the copy is over when this returns.
    ///
    /// # Safety
    /// `src` is valid for reads and `dst` for writes of `bytes` by the device until the copy is over.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn copy_within(&self, dst: u64, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()>;

    /// Sets `bytes` at `dst` to `value`. With no stream it is done when this returns.
    ///
    /// # Safety
    /// `dst` is valid for writes of `bytes` by the device until it is done.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn fill(&self, dst: u64, value: u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()>;

    /// Makes an event, which counts as reached until it is recorded.
    ///
    /// # Errors
    /// What the driver says.
    fn event_create(&self) -> DriverResult<RawEvent>;

    /// Records an event behind the work queued on a stream so far.
    ///
    /// # Safety
    /// `event` and `stream` are alive and of this device.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()>;

    /// Whether an event was reached.
    ///
    /// # Safety
    /// `event` is alive and of this device.
    ///
    /// # Errors
    /// What the driver says; [`DriverErrorKind::NotReady`] is not an error here but `Ok(false)`.
    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<bool>;

    /// Waits on the host until an event was reached.
    ///
    /// # Safety
    /// `event` is alive and of this device.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn event_wait(&self, event: RawEvent) -> DriverResult<()>;

    /// Destroys an event.
    ///
    /// # Safety
    /// `event` came from [`event_create`](Self::event_create) and is not used again.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()>;

    /// Waits on the host until all work of the device is over.
    ///
    /// # Errors
    /// What the driver says; an error of earlier work may surface here.
    fn synchronize(&self) -> DriverResult<()>;

    /// Waits on the host until the work queued on a stream so far is over.
    ///
    /// # Safety
    /// `stream` is alive and of this device.
    ///
    /// # Errors
    /// What the driver says; an error of earlier work may surface here.
    unsafe fn synchronize_stream(&self, stream: RawStream) -> DriverResult<()>;

    /// Whether a stream is capturing a graph just now, when no virtual memory call may be made.
    ///
    /// # Safety
    /// `stream` is alive and of this device.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn stream_is_capturing(&self, stream: RawStream) -> DriverResult<bool> {
        let _ = stream;
        Ok(false)
    }
}
