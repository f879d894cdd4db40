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
//! | [`host`] | real pages: one memfd per chunk, spans of `PROT_NONE` | one per chunk | any Linux |
//! | `sim` (feature `sim`) | pretended | as its personality says | anywhere |

use core::fmt;
use core::time::Duration;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::bytes::Bytes;

#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "sim")]
pub mod fault;
pub(crate) mod gate;
pub mod host;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg(feature = "cuda")]
mod table;

pub use gate::Gate;
#[cfg(feature = "cuda")]
pub use table::LoadError;

/// What a driver call returns.
pub type DriverResult<T> = Result<T, DriverError>;

/// A driver's name for one physical allocation (what CUDA calls a generic allocation handle). It means something only
/// to the driver that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RawHandle(pub u64);

/// A driver's stream: the value of a `CUstream` or `hipStream_t`, or the device's default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawStream(usize);

impl RawStream {
    /// The device's default stream.
    pub const DEFAULT: Self = Self(0);

    /// The stream behind a raw `CUstream` or `hipStream_t`.
    ///
    /// # Safety
    /// `raw` is null or a stream of the device it will be used with, and stays alive while this value is used: drivers
    /// follow the pointer.
    #[must_use]
    pub unsafe fn from_raw(raw: *mut core::ffi::c_void) -> Self {
        Self(raw.expose_provenance())
    }

    /// The raw value, as the driver gave it.
    #[must_use]
    pub fn as_raw(self) -> *mut core::ffi::c_void {
        core::ptr::with_exposed_provenance_mut(self.0)
    }
}

/// A driver's event: the value of a `CUevent` or `hipEvent_t`, or a number of the driver's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RawEvent(pub u64);

/// Which kind of driver it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Backend {
    /// Real host memory.
    Host,
    /// An NVIDIA card through the CUDA driver.
    Cuda,
    /// An AMD card through the HIP runtime.
    Hip,
    /// The simulated driver.
    Sim,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
            Self::Hip => "hip",
            Self::Sim => "sim",
        })
    }
}

/// How thorough the start-up check has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CheckForm {
    /// Symbols, the support attribute, the granularity and one small life cycle.
    Cheap,
    /// All of it: 32 MiB, memory figures, chunks swapped under the same addresses, mixed sizes, open files.
    Full,
}

/// What a runtime on a device must be treated with. The default is a driver without oddities.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Quirks {
    /// All chunks under one span must have one size (HIP 7.0 to 7.2 refuse access to mixed ones).
    pub uniform_chunks_only: bool,
    /// The largest chunk that is sound, in bytes, a power of two (256 MiB on HIP 6; 1 GiB elsewhere, where larger
    /// chunks gain nothing).
    pub max_chunk: Bytes,
    /// How long to wait after mapping before the memory may be used (a few RDNA4 parts read zeros for about 2 ms).
    pub settle: Duration,
}

impl Default for Quirks {
    fn default() -> Self {
        Self { uniform_chunks_only: false, max_chunk: Bytes::gib(1), settle: Duration::ZERO }
    }
}

/// What is known of a device and its driver before anything is tried.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DriverInfo {
    /// The kind of driver.
    pub backend: Backend,
    /// The device's number among those of its backend.
    pub ordinal: u32,
    /// The device's name, for people.
    pub name: String,
    /// The runtime and its version as reasons quote it: `HIP runtime 7.2.53210`.
    pub runtime: String,
    /// The device's UUID, where it has one.
    pub uuid: Option<[u8; 16]>,
    /// Whether the host may read and write mapped memory through the same addresses. Only a driver that hands out
    /// host addresses may say so: safe code gets slices on the strength of it.
    pub host_visible: bool,
    /// Whether granularities below 2 MiB are a sign of trouble (true for GPUs, whose pages are that large).
    pub wants_2_mib: bool,
    /// Open files that each handle keeps.
    pub open_files_per_chunk: u32,
    /// Entries of the process's memory map that each mapping takes.
    pub maps_per_chunk: u32,
    /// Who keeps the open files, as a reason says it: `ROCm keeps an open file per 2 MiB chunk`.
    pub open_files_by: &'static str,
    /// What the memory is called in a reason: `VRAM`, or `memory` on the host.
    pub memory_word: &'static str,
    /// How thorough the start-up check is unless the caller says otherwise.
    pub check: CheckForm,
    /// What is known of the runtime's oddities; the check may add to it.
    pub quirks: Quirks,
}

impl DriverInfo {
    /// A description with the given backend, ordinal, name and runtime and the most careful assumptions otherwise:
    /// not host visible, no open files or map entries per chunk, the full check.
    #[must_use]
    pub fn new(backend: Backend, ordinal: u32, name: impl Into<String>, runtime: impl Into<String>) -> Self {
        Self {
            backend,
            ordinal,
            name: name.into(),
            runtime: runtime.into(),
            uuid: None,
            host_visible: false,
            wants_2_mib: true,
            open_files_per_chunk: 0,
            maps_per_chunk: 0,
            open_files_by: "the driver",
            memory_word: "VRAM",
            check: CheckForm::Full,
            quirks: Quirks::default(),
        }
    }

    /// The device's identifier as `Device::named` takes it: `host`, `cuda:0`, `hip:1`.
    #[must_use]
    pub fn id(&self) -> String {
        match self.backend {
            Backend::Host => "host".to_owned(),
            other => format!("{other}:{}", self.ordinal),
        }
    }
}

/// The sizes a driver maps in, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granularity {
    /// The smallest size it accepts.
    pub minimum: u64,
    /// The size it recommends.
    pub recommended: u64,
}

/// A device's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// What a new chunk could take now.
    pub free: u64,
    /// All there is.
    pub total: u64,
}

/// How a chunk can be shared with other processes. Must be chosen when it is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Shareable {
    /// Not at all.
    #[default]
    No,
    /// As a POSIX file descriptor.
    PosixFd,
    /// As a fabric handle, between hosts that share an NVLink fabric.
    Fabric,
}

/// Properties of a chunk that cannot be changed after it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ChunkProps {
    /// How the chunk can be shared.
    pub shareable: Shareable,
    /// Whether network cards may reach the memory directly (GPUDirect RDMA).
    pub rdma: bool,
}

impl ChunkProps {
    /// Ordinary memory of one process.
    pub const PLAIN: Self = Self { shareable: Shareable::No, rdma: false };

    /// The same, shared in another way.
    #[must_use]
    pub const fn with_shareable(mut self, shareable: Shareable) -> Self {
        self.shareable = shareable;
        self
    }

    /// The same, with or without direct access by network cards.
    #[must_use]
    pub const fn with_rdma(mut self, rdma: bool) -> Self {
        self.rdma = rdma;
        self
    }
}

/// The open files of this process, as they bind a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFiles {
    /// How many the process holds now.
    pub held: u64,
    /// The soft limit.
    pub soft: u64,
    /// The hard limit, up to which a process may raise its own soft limit.
    pub hard: u64,
}

/// The entries of this process's memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapCount {
    /// How many the process has now.
    pub held: u64,
    /// The system's limit (`vm.max_map_count`).
    pub limit: u64,
}

/// The limits of a process that bind drivers. The real ones are [`ThisProcess`](crate::sys::limits::ThisProcess); a
/// simulated driver has its own.
pub trait ProcessLimits: Send + Sync + fmt::Debug {
    /// Reads the open-file limits and counts the files held.
    ///
    /// # Errors
    /// When they cannot be read.
    fn open_files(&self) -> std::io::Result<OpenFiles>;

    /// Sets the soft limit of open files to `soft`, which is at most the hard limit.
    ///
    /// # Errors
    /// When the system refuses.
    fn raise_open_files(&self, soft: u64) -> std::io::Result<()>;

    /// Reads the map-count limit and counts the entries held.
    ///
    /// # Errors
    /// When they cannot be read.
    fn maps(&self) -> std::io::Result<MapCount>;
}

/// One word of the driver's vocabulary: what an error, a fault plan or a ledger speaks of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each is the method of `Driver` with the same name")]
pub enum Call {
    Support,
    Granularity,
    Memory,
    Reserve,
    FreeSpan,
    Create,
    Release,
    Map,
    SetAccess,
    Unmap,
    Export,
    Import,
    Allocate,
    Free,
    CopyIn,
    CopyOut,
    CopyWithin,
    Fill,
    EventCreate,
    EventRecord,
    EventQuery,
    EventWait,
    EventDestroy,
    Synchronize,
    SynchronizeStream,
    StreamIsCapturing,
}

impl Call {
    /// Every word, in the order of the trait.
    pub const ALL: [Self; 26] = [
        Self::Support,
        Self::Granularity,
        Self::Memory,
        Self::Reserve,
        Self::FreeSpan,
        Self::Create,
        Self::Release,
        Self::Map,
        Self::SetAccess,
        Self::Unmap,
        Self::Export,
        Self::Import,
        Self::Allocate,
        Self::Free,
        Self::CopyIn,
        Self::CopyOut,
        Self::CopyWithin,
        Self::Fill,
        Self::EventCreate,
        Self::EventRecord,
        Self::EventQuery,
        Self::EventWait,
        Self::EventDestroy,
        Self::Synchronize,
        Self::SynchronizeStream,
        Self::StreamIsCapturing,
    ];

    /// The word as messages write it: `set access`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Support => "support",
            Self::Granularity => "granularity",
            Self::Memory => "memory",
            Self::Reserve => "reserve",
            Self::FreeSpan => "free span",
            Self::Create => "create",
            Self::Release => "release",
            Self::Map => "map",
            Self::SetAccess => "set access",
            Self::Unmap => "unmap",
            Self::Export => "export",
            Self::Import => "import",
            Self::Allocate => "allocate",
            Self::Free => "free",
            Self::CopyIn => "copy in",
            Self::CopyOut => "copy out",
            Self::CopyWithin => "copy within",
            Self::Fill => "fill",
            Self::EventCreate => "event create",
            Self::EventRecord => "event record",
            Self::EventQuery => "event query",
            Self::EventWait => "event wait",
            Self::EventDestroy => "event destroy",
            Self::Synchronize => "synchronize",
            Self::SynchronizeStream => "synchronize stream",
            Self::StreamIsCapturing => "stream is capturing",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What went wrong in a driver call, as far as the crate acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DriverErrorKind {
    /// No physical memory left.
    OutOfMemory,
    /// No open file left.
    OutOfFiles,
    /// No entry of the memory map left.
    OutOfMaps,
    /// No addresses left, or not as many in one piece.
    OutOfAddresses,
    /// The driver rejects an argument.
    InvalidValue,
    /// The driver does not do this here (vGPU, old driver, a flag without hardware behind it).
    NotSupported,
    /// Not finished yet: an event that was not reached.
    NotReady,
    /// A library or symbol is missing.
    Missing,
    /// The device or its context is gone for good.
    DeviceLost,
    /// The driver has shut down, as at process exit.
    ShutDown,
    /// The call came from a forked child, where the driver is unusable.
    Forked,
    /// The caller broke a precondition and the driver noticed. A fault of this crate.
    Misuse,
    /// Anything else.
    Other,
}

/// A driver call that failed.
///
/// ```
/// use growspan::driver::{Call, DriverError, DriverErrorKind};
///
/// let error = DriverError::new(Call::Create, DriverErrorKind::OutOfMemory).with_code(2, "CUDA_ERROR_OUT_OF_MEMORY");
/// assert_eq!(error.to_string(), "create failed: out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2)");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverError {
    call: Call,
    kind: DriverErrorKind,
    code: Option<(i64, &'static str)>,
    detail: Option<Arc<str>>,
}

impl DriverError {
    /// `call` failed in the way of `kind`.
    #[must_use]
    pub const fn new(call: Call, kind: DriverErrorKind) -> Self {
        Self { call, kind, code: None, detail: None }
    }

    /// With the driver's own number and its name (empty if it has none).
    #[must_use]
    pub const fn with_code(mut self, code: i64, name: &'static str) -> Self {
        self.code = Some((code, name));
        self
    }

    /// With a sentence of what was asked.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<Arc<str>>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Which call failed.
    #[must_use]
    pub const fn call(&self) -> Call {
        self.call
    }

    /// What went wrong.
    #[must_use]
    pub const fn kind(&self) -> DriverErrorKind {
        self.kind
    }

    /// The driver's own number, where it gave one.
    #[must_use]
    pub fn code(&self) -> Option<i64> {
        self.code.map(|(code, _)| code)
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.call, self.kind)?;
        match self.code {
            Some((code, "")) => write!(f, " (code {code})")?,
            Some((code, name)) => write!(f, " ({name}, {code})")?,
            None => {}
        }
        match &self.detail {
            Some(detail) => write!(f, ": {detail}"),
            None => Ok(()),
        }
    }
}

impl core::error::Error for DriverError {}

impl fmt::Display for DriverErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::OutOfMemory => "out of memory",
            Self::OutOfFiles => "no open file left",
            Self::OutOfMaps => "no memory map entry left",
            Self::OutOfAddresses => "not that many addresses in one piece",
            Self::InvalidValue => "invalid value",
            Self::NotSupported => "not supported",
            Self::NotReady => "not ready",
            Self::Missing => "not found",
            Self::DeviceLost => "the device was lost",
            Self::ShutDown => "the driver has shut down",
            Self::Forked => "called from a forked child process",
            Self::Misuse => "called against its rules",
            Self::Other => "driver error",
        })
    }
}

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
///   initialised memory, and are never the null page;
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
    fn granularity(&self) -> DriverResult<Granularity>;

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
    /// [`DriverErrorKind::OutOfMaps`], or what the driver says.
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
