//! AMD cards, through the HIP runtime.
//!
//! The library is opened at the first [`HipDriver::open`] or [`count`](HipDriver::count) and never closed. A copy that
//! the process has loaded already is used; else the environment variable `GROWSPAN_HIP_LIBRARY` names it, or
//! `libamdhip64.so.7`, `.so.6` and the plain name are looked for by the dynamic linker, under `ROCM_PATH` and
//! `/opt/rocm`, and among the wheels of the active Python environment. Nothing is linked, so what was built with this
//! feature runs where there is no ROCm and says so in a [`HipOpenError`].
//!
//! * **Versions.** HIP's virtual memory exists since ROCm 6.1, and each version has faults of its own. The
//!   [table](quirks::TABLE) says which, and what is done about them; [`HipDriver::rows`] gives those in force. Before 6.1
//!   memory is allocated in one piece.
//! * **The check.** No row is taken for the whole truth: the start-up check goes through a full life cycle on every
//!   device, under a watchdog. Runtimes that recommend a granularity below 2 MiB, which are the releases before 7.11, are off
//!   unless [`Granularity::AtLeast2MiB`](crate::Granularity::AtLeast2MiB) lets the rest of the check decide.
//! * **Waiting.** Since 7.14 unmapping waits for all streams of every device that has access, before that mapping and
//!   unmapping wait for the null stream; and one thread of the process does so at a time. So nothing that a callback on a
//!   stream or a kernel waits for may grow or shrink a buffer, and while a kernel runs that does not end, nothing is
//!   unmapped: other threads' calls fail after a minute. Opening the first device starts the runtime, and what
//!   comes of it is kept for the process; starting and opening are under a watchdog too.
//! * **A call that hangs** takes its thread with it, and nobody else: the check gives up and virtual memory is off, opening
//!   fails, and calls that would hang behind it (which plain allocations do) fail with an error.
//! * **The device.** Each call makes its device current and leaves the caller's as it was; any thread may call.
//! * **Copies without a stream** run on a stream of this driver's own and are over when the call returns. They do not
//!   wait for other streams, not even the null one: wait first for work that writes what is copied.

use core::fmt;
use core::ptr::NonNull;
use core::time::Duration;
use std::path::PathBuf;

use parking_lot::Mutex;

use crate::card::{is_gone, twice};
use crate::driver::opening;
use crate::driver::pins::Pins;
use crate::driver::{
    Backend, Call, CheckForm, Driver, DriverError, DriverErrorKind, DriverInfo, DriverResult, KnownFault,
};
use crate::sys::pci;

mod book;
mod calls;
mod current;
mod error;
#[doc(hidden)]
#[allow(non_camel_case_types, non_upper_case_globals, reason = "named as the header names them")]
pub mod ffi;
mod held;
mod library;
mod pinned;
pub mod quirks;
mod search;
mod treated;
mod turn;
mod version;

use book::Book;
use current::Current;
pub use error::HipOpenError;
use error::{Code, check};
use library::{Core, Hip, OPENINGS, Vmm};
use quirks::{InForce, Quirk, Row, Runtime};
use search::LIBRARY_VARIABLE;
use turn::Turn;
pub use version::HipVersion;

/// Set to anything but `0` or nothing, it turns virtual memory on where a row of the table keeps it off, and the check
/// decides.
const FORCE_VARIABLE: &str = "GROWSPAN_HIP_FORCE";

/// Says which version of the kernel's amdgpu driver it is (`3.64`), as [`HipOptions::kernel_driver`] does.
const KERNEL_VARIABLE: &str = "GROWSPAN_HIP_KERNEL";

/// What a reason says of the variable that forces.
const HOW_TO_FORCE: &str = "; GROWSPAN_HIP_FORCE=1 lets the check decide";

/// How a HIP device is opened.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use growspan::DeviceOptions;
/// use growspan::driver::hip::{HipDriver, HipOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // Buffers on the first card that the second may read and write too.
/// let driver = HipDriver::open_with(0, HipOptions::new().peers([1]))?;
/// let device = DeviceOptions::new().open(Arc::new(driver))?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct HipOptions {
    force: bool,
    peers: Vec<u32>,
    kernel: Option<(u32, u32)>,
    sysfs: PathBuf,
    without: InForce,
    patience: Duration,
}

impl Default for HipOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl HipOptions {
    /// The defaults: nothing forced unless `GROWSPAN_HIP_FORCE` is set, the kernel's driver asked unless
    /// `GROWSPAN_HIP_KERNEL` says which it is, no peers.
    pub fn new() -> Self {
        let force = std::env::var_os(FORCE_VARIABLE).is_some_and(|value| !value.is_empty() && value != "0");
        let kernel = std::env::var(KERNEL_VARIABLE).ok().filter(|value| !value.is_empty()).and_then(|value| {
            let version = pci::version_in(&value);
            if version.is_none() {
                tracing::warn!("{KERNEL_VARIABLE}={value} is no version, which reads 3.64: it is ignored");
            }
            version
        });
        let (peers, without) = (Vec::new(), InForce::none());
        Self { force, peers, kernel, sysfs: "/sys".into(), without, patience: opening::PATIENCE }
    }

    /// Whether the check decides where a row of the table would keep virtual memory off: on RDNA4, with ROCm 6.4.0, on a
    /// kernel that is too old.
    pub const fn force(mut self, force: bool) -> Self {
        self.force = force;
        self
    }

    /// Other devices, by ordinal, that may read and write what is mapped on this one.
    pub fn peers(mut self, ordinals: impl IntoIterator<Item = u32>) -> Self {
        self.peers = ordinals.into_iter().collect();
        self
    }

    /// The version of the kernel's amdgpu driver, where the process cannot read it or a distribution has mended an old
    /// one. Unless set, here or by `GROWSPAN_HIP_KERNEL`, a render node is asked: the card's, else any that amdgpu serves.
    pub const fn kernel_driver(mut self, major: u32, minor: u32) -> Self {
        self.kernel = Some((major, minor));
        self
    }

    /// How long the runtime may take to start, and then to open the device (two minutes unless set): one that hangs is
    /// left behind, and opening fails with [`HipOpenError::Unopened`]. How long the check may take is
    /// [`DeviceOptions::patience`](crate::DeviceOptions::patience).
    pub const fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Where the kernel's tree is mounted, for containers that have it elsewhere (`/sys` unless set).
    pub fn sysfs(mut self, folder: impl Into<PathBuf>) -> Self {
        self.sysfs = folder.into();
        self
    }

    /// As if the table had no such row: to find out whether a runtime still needs it.
    ///
    /// # Safety
    /// Without its row a runtime may crash, or lose or corrupt memory. Whoever leaves one out answers for what this
    /// runtime does then.
    pub unsafe fn without(mut self, quirk: Quirk) -> Self {
        self.without = self.without.with(quirk);
        self
    }
}

/// A HIP device.
///
/// ```no_run
/// use growspan::driver::Driver;
/// use growspan::driver::hip::HipDriver;
///
/// match HipDriver::open(0) {
///     Ok(driver) => println!("{} ({})", driver.info().name, driver.info().runtime),
///     Err(reason) => println!("no HIP here: {reason}"),
/// }
/// ```
pub struct HipDriver {
    hip: &'static Hip,
    device: i32,
    peers: Vec<i32>,
    integrated: bool,
    copies: Stream,
    rows: InForce,
    card: Option<pci::Card>,
    info: DriverInfo,
    book: Mutex<Book>,
    pins: Pins,
}

/// This driver's own stream, for copies that the caller gave no stream for.
#[derive(Debug)]
struct Stream(ffi::hipStream_t);

// SAFETY: the pointer is a name that the runtime gave out, which any thread may use; it is never followed here.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl HipDriver {
    /// How many HIP devices this process is shown.
    ///
    /// # Errors
    /// What keeps the runtime from being used at all; [`HipOpenError::NoDevice`] if it does not start for want of one.
    pub fn count() -> Result<u32, HipOpenError> {
        let hip = Hip::get(opening::PATIENCE)?;
        OPENINGS.watch(None, opening::PATIENCE, || hip.count())
    }

    /// Opens the device with this number, counted from 0 among those that this process is shown.
    ///
    /// # Errors
    /// Says what was missing and what to do about it.
    pub fn open(ordinal: u32) -> Result<Self, HipOpenError> {
        Self::open_with(ordinal, HipOptions::new())
    }

    /// The same with options.
    ///
    /// # Errors
    /// As for [`open`](Self::open); [`HipOpenError::NoSuchOrdinal`] for a peer too.
    pub fn open_with(ordinal: u32, options: HipOptions) -> Result<Self, HipOpenError> {
        let (hip, patience) = (Hip::get(options.patience)?, options.patience);
        OPENINGS.watch(Some(ordinal), patience, move || Self::open_on(hip, ordinal, &options))
    }

    fn open_on(hip: &'static Hip, ordinal: u32, options: &HipOptions) -> Result<Self, HipOpenError> {
        let device = hip.device(ordinal)?;
        let peers = options.peers.iter().filter(|peer| **peer != ordinal).map(|peer| hip.device(*peer));
        let peers = peers.collect::<Result<Vec<_>, _>>()?;
        for &peer in &peers {
            hip.check_peer(peer, device)?;
        }
        let card = hip.place(device).map(|place| pci::Card::at(&options.sysfs, &place));
        let identity = hip.identity(device);
        let runtime = Runtime {
            version: hip.version,
            gfx: identity.as_ref().map(|(_, gfx)| gfx.clone()).or_else(|| hip.family(device)).unwrap_or_default(),
            drm: options.kernel.or_else(|| card.as_ref()?.amdgpu_version()).or_else(pci::amdgpu_version),
            os: std::env::consts::OS,
        };
        let rows = InForce::find(&runtime, options.force, options.without);
        tracing::debug!(device = ordinal, runtime = %hip.version, gfx = runtime.gfx, kernel = ?runtime.drm, ?rows, "HIP");

        let mut info = DriverInfo::new(Backend::Hip, ordinal, hip.name(device)?, hip.version.to_string());
        info.uuid = identity.map(|(uuid, _)| uuid).filter(is_unique);
        info.open_files_by = "ROCm";
        info.check = CheckForm::Full;
        info.open_files_per_chunk = u32::from(rows.has(Quirk::FilePerChunk));
        info.maps_per_chunk = u32::from(rows.has(Quirk::MapEntryPerChunk));
        info.quirks = rows.for_the_crate(&runtime);
        info.known_faults = rows.rows().map(|row| KnownFault::new(row.what, row.treatment)).collect();
        let integrated = hip.attribute(device, ffi::hipDeviceAttributeIntegrated).is_ok_and(|value| value != 0);
        let copies = copy_stream(hip, device)?;
        let (book, pins) = (Mutex::new(Book::new()), Pins::new());
        let this = Self { hip, device, peers, integrated, copies, rows, card, info, book, pins };
        // Whoever opens a device asks for its memory right after, without a watchdog. A runtime that hangs in it hangs here;
        // one that fails will say so again.
        let _ = this.memory();
        Ok(this)
    }

    /// The rows of the [table](quirks::TABLE) in force for this device.
    pub fn rows(&self) -> impl Iterator<Item = &'static Row> {
        self.rows.rows()
    }

    /// The runtime's version.
    #[must_use]
    pub fn version(&self) -> HipVersion {
        self.hip.version
    }

    /// The address of a function of the runtime's library, by its exported name (`hipModuleLaunchKernel`), for calls that
    /// this crate does not make. The library is never unloaded.
    #[must_use]
    pub fn symbol(&self, name: &str) -> Option<NonNull<core::ffi::c_void>> {
        self.hip.library.address(name)
    }

    fn vmm(&self, call: Call) -> DriverResult<&'static Vmm> {
        self.hip.vmm.as_ref().map_err(DriverError::missing(call))
    }

    /// Does `work` with this device current.
    fn within<T>(&self, call: Call, work: impl FnOnce(&'static Core) -> Result<T, Code>) -> DriverResult<T> {
        self.within_device(call, self.device, work)
    }

    /// Does `work` with a device current.
    fn within_device<T>(
        &self,
        call: Call,
        device: i32,
        work: impl FnOnce(&'static Core) -> Result<T, Code>,
    ) -> DriverResult<T> {
        self.check_process(call)?;
        let core = &self.hip.core;
        let current = match self.rows.has(Quirk::CurrentDevice) || self.rows.has(Quirk::NoVirtualMemory) {
            true => Current::make(core, device),
            false => Ok(Current::leave(core)),
        };
        let result = current.and_then(|_current| work(core));
        result.map_err(|code| {
            self.hip.forget_error();
            code.during(call)
        })
    }

    /// In a forked child the runtime is the parent's.
    fn check_process(&self, call: Call) -> DriverResult<()> {
        match self.hip.process == std::process::id() {
            true => Ok(()),
            false => Err(DriverError::new(call, DriverErrorKind::Forked)),
        }
    }

    /// This thread's turn in virtual memory. What the book says is only good while it lasts.
    fn alone(&self, call: Call) -> DriverResult<(Turn, &'static Vmm)> {
        self.check_process(call)?;
        let vmm = self.vmm(call)?;
        let turn = Turn::wait(call)?;
        Ok((turn, vmm))
    }

    /// Waits until no other thread is in virtual memory: one that hangs there has the locks which plain allocations take
    /// too, and they would hang with it.
    fn not_behind_a_hang(&self, call: Call) -> DriverResult<()> {
        self.check_process(call)?;
        Turn::wait(call).map(drop)
    }

    /// Does `work` with this device current and no other thread in virtual memory.
    fn within_vmm<T>(&self, call: Call, work: impl FnOnce(&'static Vmm) -> Result<T, Code>) -> DriverResult<T> {
        let (_turn, vmm) = self.alone(call)?;
        self.within(call, |_| work(vmm))
    }
}

/// Whether it is a card's own: cards without one have nothing there, or two letters.
fn is_unique(uuid: &[u8; 16]) -> bool {
    *uuid != [0; 16] && !uuid.starts_with(b"XX")
}

fn copy_stream(hip: &Hip, device: i32) -> Result<Stream, HipOpenError> {
    let current = Current::make(&hip.core, device);
    let _current = current.map_err(|Code(code)| HipOpenError::Call { function: "hipSetDevice", code })?;
    let mut stream = core::ptr::null_mut();
    // SAFETY: the pointer is valid for the write, and the device it is made on is current.
    let made = unsafe { (hip.core.hipStreamCreateWithFlags)(&raw mut stream, ffi::hipStreamNonBlocking) };
    library::during_open("hipStreamCreateWithFlags", made)?;
    match stream.is_null() {
        // That would be the null stream, which waits for others and must not be destroyed.
        true => Err(HipOpenError::Call { function: "hipStreamCreateWithFlags", code: ffi::hipSuccess }),
        false => Ok(Stream(stream)),
    }
}

impl Drop for HipDriver {
    fn drop(&mut self) {
        // In a forked child the runtime's state is the parent's, to give back as well.
        if self.hip.process != std::process::id() {
            return;
        }
        let [spans, handles, mappings, blocks] = self.book.get_mut().counts();
        let pinned = self.pins.len();
        if [spans, handles, mappings, blocks, pinned] != [0; 5] {
            tracing::warn!(
                device = %self.info.id(), spans, handles, mappings, blocks, pinned,
                "a HIP driver was closed while some of its memory was not given back"
            );
        }
        let destroy = || {
            self.within(Call::SynchronizeStream, |core| {
                // SAFETY: the stream is this value's own and nothing is queued on it: whoever queues waits. A second try
                // comes only after the first failed.
                check(unsafe { (core.hipStreamDestroy)(self.copies.0) })
            })
        };
        if let Err(error) = twice(destroy)
            && !is_gone(&error)
        {
            tracing::debug!(device = %self.info.id(), %error, "the stream for copies could not be destroyed");
        }
    }
}

impl fmt::Debug for HipDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HipDriver")
            .field("device", &self.info.id())
            .field("name", &self.info.name)
            .field("library", &self.hip.library.name())
            .field("rows", &self.rows)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::is_unique;

    #[test]
    fn cards_without_a_number_are_not_one_card() {
        assert!(is_unique(b"2ab4f5e1c3d0a9b8") && is_unique(b"X2b4f5e1c3d0a9b8"));
        assert!(!is_unique(&[0; 16]) && !is_unique(b"XX\0\0\0\0\0\0\0\0\0\0\0\0\0\0"));
    }
}
