//! What can go wrong in a driver call, and the words to say it in.

use core::fmt;
use std::sync::Arc;

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
    Pin,
    Unpin,
    AllocatePinned,
    FreePinned,
    PinnedDevicePtr,
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
    pub const ALL: [Self; 31] = [
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
        Self::Pin,
        Self::Unpin,
        Self::AllocatePinned,
        Self::FreePinned,
        Self::PinnedDevicePtr,
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

    /// The calls that change memory: spans, handles, mappings, access, blocks and page-locked memory.
    pub const MEMORY: [Self; 13] = [
        Self::Reserve,
        Self::FreeSpan,
        Self::Create,
        Self::Release,
        Self::Map,
        Self::SetAccess,
        Self::Unmap,
        Self::Allocate,
        Self::Free,
        Self::Pin,
        Self::Unpin,
        Self::AllocatePinned,
        Self::FreePinned,
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
            Self::Pin => "pin",
            Self::Unpin => "unpin",
            Self::AllocatePinned => "allocate pinned",
            Self::FreePinned => "free pinned",
            Self::PinnedDevicePtr => "pinned device ptr",
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
    /// The process may not lock as much memory.
    LockLimit,
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

    /// What a driver's own book refused, with its figures: [`DriverErrorKind::Misuse`].
    pub(crate) fn misuse(call: Call) -> impl FnOnce(String) -> Self {
        move |detail| Self::new(call, DriverErrorKind::Misuse).with_detail(detail)
    }

    /// What a library lacks: [`DriverErrorKind::Missing`].
    #[cfg(any(feature = "cuda", feature = "hip"))]
    pub(crate) fn missing<E: fmt::Display>(call: Call) -> impl FnOnce(E) -> Self {
        move |error| Self::new(call, DriverErrorKind::Missing).with_detail(error.to_string())
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
            Self::LockLimit => "the process may not lock as much memory",
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
