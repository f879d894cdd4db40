//! What must hold for every driver call, in one place.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use super::{
    Call, ChunkProps, Driver, DriverError, DriverErrorKind, DriverInfo, DriverResult, Granularities, MemoryInfo,
    PinFlags, ProcessLimits, RawEvent, RawHandle, RawStream,
};

/// The door to a driver: it has the driver's methods and adds what must hold for every call.
///
/// * Calls are counted, by word.
/// * In a forked child every call is refused: the driver's state belongs to the parent.
/// * Nothing is mapped or unmapped beside running kernels where that may fault them.
/// * After a device was lost, or its driver has shut down, every call says so at once, naming the call that saw it first.
pub struct Gate {
    driver: Arc<dyn Driver>,
    calls: [AtomicU64; Call::ALL.len()],
    lost: OnceLock<DriverError>,
    process: u32,
}

impl Gate {
    /// A door to `driver`, owned by this process.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self {
            driver,
            calls: [const { AtomicU64::new(0) }; Call::ALL.len()],
            lost: OnceLock::new(),
            process: std::process::id(),
        }
    }

    /// What is known of the device.
    #[must_use]
    pub fn info(&self) -> &DriverInfo {
        self.driver.info()
    }

    /// The limits that bind this driver if they are not those of this process.
    #[must_use]
    pub fn limits(&self) -> Option<Arc<dyn ProcessLimits>> {
        self.driver.limits()
    }

    /// How many calls of one word were made.
    #[must_use]
    pub fn count(&self, call: Call) -> u64 {
        self.calls[call as usize].load(Relaxed)
    }

    /// How many calls were made that change memory: spans, handles, mappings, access, blocks, page-locked memory.
    #[must_use]
    pub fn memory_calls(&self) -> u64 {
        Call::MEMORY.into_iter().map(|call| self.count(call)).sum()
    }

    /// Whether this is a child forked from the process that opened the driver.
    #[must_use]
    pub fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// The error that lost the device, if it was lost or its driver has shut down.
    #[must_use]
    pub fn lost(&self) -> Option<&DriverError> {
        self.lost.get()
    }

    /// [`Driver::map`] through the door. Where kernels mind that page tables change, the device is waited for first; work
    /// that is queued in between is not.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there, and those of [`synchronize`](Self::synchronize).
    pub unsafe fn map(&self, addr: u64, bytes: u64, handle: RawHandle) -> DriverResult<()> {
        self.quiet_for_page_tables()?;
        self.enter(Call::Map)?;
        // SAFETY: the contract of this method is that of the driver's method, and the arguments go through unchanged.
        self.leave(unsafe { self.driver.map(addr, bytes, handle) })
    }

    /// [`Driver::unmap`] through the door, as [`map`](Self::map).
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there, and those of [`synchronize`](Self::synchronize).
    pub unsafe fn unmap(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.quiet_for_page_tables()?;
        self.enter(Call::Unmap)?;
        // SAFETY: the contract of this method is that of the driver's method, and the arguments go through unchanged.
        self.leave(unsafe { self.driver.unmap(addr, bytes) })
    }

    fn quiet_for_page_tables(&self) -> DriverResult<()> {
        if self.info().quirks.map_beside_kernels { Ok(()) } else { self.synchronize() }
    }

    fn enter(&self, call: Call) -> DriverResult<()> {
        if self.is_forked() {
            return Err(DriverError::new(call, DriverErrorKind::Forked));
        }
        if let Some(error) = self.lost.get() {
            return Err(DriverError::new(call, error.kind()).with_detail(format!("since {error}")));
        }
        self.calls[call as usize].fetch_add(1, Relaxed);
        Ok(())
    }

    fn leave<T>(&self, result: DriverResult<T>) -> DriverResult<T> {
        if let Err(error) = &result {
            tracing::debug!(device = %self.info().id(), %error, "driver call failed");
            match error.kind() {
                DriverErrorKind::DeviceLost if self.lost.set(error.clone()).is_ok() => {
                    tracing::error!(device = %self.info().id(), %error, "the device was lost; every later call fails at once");
                }
                // As at process exit, where this is the order of things.
                DriverErrorKind::ShutDown if self.lost.set(error.clone()).is_ok() => {
                    tracing::debug!(device = %self.info().id(), %error, "the driver has shut down");
                }
                _ => {}
            }
        }
        result
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate")
            .field("device", &self.info().id())
            .field("memory_calls", &self.memory_calls())
            .field("lost", &self.lost.get())
            .finish_non_exhaustive()
    }
}

macro_rules! gated {
    ($( $call:ident: fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; )*) => {
        impl Gate { $(
            #[doc = concat!("[`Driver::", stringify!($name), "`] through the door.\n\n# Errors\nAs there.")]
            pub fn $name(&self $(, $arg: $ty)*) -> DriverResult<$ret> {
                self.enter(Call::$call)?;
                self.leave(self.driver.$name($($arg),*))
            }
        )* }
    };
    ($( $call:ident: unsafe fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; )*) => {
        impl Gate { $(
            #[doc = concat!(
                "[`Driver::", stringify!($name), "`] through the door.\n\n# Safety\nAs there.\n\n# Errors\nAs there."
            )]
            pub unsafe fn $name(&self $(, $arg: $ty)*) -> DriverResult<$ret> {
                self.enter(Call::$call)?;
                // SAFETY: the contract of this method is that of the driver's method, and the arguments go through
                // unchanged.
                self.leave(unsafe { self.driver.$name($($arg),*) })
            }
        )* }
    };
}

gated! {
    Support: fn support() -> ();
    Granularity: fn granularity() -> Granularities;
    Memory: fn memory() -> MemoryInfo;
    Reserve: fn reserve(bytes: u64, align: u64) -> u64;
    Create: fn create(bytes: u64, props: ChunkProps) -> RawHandle;
    Allocate: fn allocate(bytes: u64) -> u64;
    AllocatePinned: fn allocate_pinned(bytes: u64, flags: PinFlags) -> u64;
    EventCreate: fn event_create() -> RawEvent;
    Synchronize: fn synchronize() -> ();
}

gated! {
    FreeSpan: unsafe fn free_span(addr: u64, bytes: u64) -> ();
    Release: unsafe fn release(handle: RawHandle) -> ();
    SetAccess: unsafe fn set_access(addr: u64, bytes: u64) -> ();
    Export: unsafe fn export(handle: RawHandle) -> OwnedFd;
    Import: unsafe fn import(fd: BorrowedFd<'_>, bytes: u64) -> RawHandle;
    Free: unsafe fn free(addr: u64, bytes: u64) -> ();
    Pin: unsafe fn pin(addr: u64, bytes: u64, flags: PinFlags) -> ();
    Unpin: unsafe fn unpin(addr: u64, bytes: u64) -> ();
    FreePinned: unsafe fn free_pinned(addr: u64, bytes: u64) -> ();
    PinnedDevicePtr: unsafe fn pinned_device_ptr(addr: u64) -> u64;
    CopyIn: unsafe fn copy_in(dst: u64, src: *const u8, bytes: u64, stream: Option<RawStream>) -> ();
    CopyOut: unsafe fn copy_out(dst: *mut u8, src: u64, bytes: u64, stream: Option<RawStream>) -> ();
    CopyWithin: unsafe fn copy_within(dst: u64, src: u64, bytes: u64, stream: Option<RawStream>) -> ();
    Fill: unsafe fn fill(dst: u64, value: u8, bytes: u64, stream: Option<RawStream>) -> ();
    EventRecord: unsafe fn event_record(event: RawEvent, stream: RawStream) -> ();
    EventQuery: unsafe fn event_query(event: RawEvent) -> bool;
    EventWait: unsafe fn event_wait(event: RawEvent) -> ();
    EventDestroy: unsafe fn event_destroy(event: RawEvent) -> ();
    SynchronizeStream: unsafe fn synchronize_stream(stream: RawStream) -> ();
    StreamIsCapturing: unsafe fn stream_is_capturing(stream: RawStream) -> bool;
}
