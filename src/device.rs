//! A device: a driver, its verdict, its pool.

mod pools;

use core::fmt;
use core::time::Duration;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::backing::AheadPolicy;
use crate::bytes::Bytes;
use crate::card::Card;
use crate::driver::host::{HostDriver, HostOptions};
use crate::driver::{CheckForm, ChunkProps, Driver, DriverInfo, MemoryInfo, RawEvent};
use crate::error::{Error, Result};
use crate::pool::{Chunk, ChunkPool, PoolPolicy, Sizing};
use crate::quiesce::Event;
use crate::range::ReservedRange;
use crate::stats::Snapshot;
use crate::sys::fork::PerProcess;
use crate::verdict::{self, CheckOptions, Granularity, Verdict};

/// A device. Cheap to clone; all clones are the same device, with one verdict and one pool.
///
/// ```
/// use growspan::{Device, GrowableBuffer};
///
/// # fn main() -> growspan::Result<()> {
/// let device = Device::named("auto")?;
/// println!("{}", device.verdict().report());
/// let buffer = GrowableBuffer::<f32>::builder(&device).max_len(1 << 30).build()?;
/// # drop(buffer);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    card: Arc<Card>,
    pool: ChunkPool,
    verdict: OnceLock<Box<dyn Verdict>>,
    /// That of a child which was forked before there was one: whoever was about to decide does not exist there.
    verdict_of_child: OnceLock<Box<dyn Verdict>>,
    options: DeviceOptions,
}

impl Device {
    /// Real host memory, with default options. One device per process.
    ///
    /// # Errors
    /// [`Error::Host`] if the machine's memory cannot be read.
    pub fn host() -> Result<Self> {
        Self::shared("host", || DeviceOptions::new().host(HostOptions::default()))
    }

    /// The CUDA device with this ordinal, with default options. One device per card and process.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason: no driver library, no card, no such card.
    pub fn cuda(ordinal: u32) -> Result<Self> {
        Self::shared(&format!("cuda:{ordinal}"), || DeviceOptions::new().cuda(ordinal))
    }

    /// The HIP device with this ordinal, opened with default options. Later calls give the same device.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason: no runtime, two of them, no card, no such card.
    pub fn hip(ordinal: u32) -> Result<Self> {
        Self::shared(&format!("hip:{ordinal}"), || DeviceOptions::new().hip(ordinal))
    }

    /// The one device of that name in this process, opened if need be.
    fn shared(id: &str, open: impl FnOnce() -> Result<Self>) -> Result<Self> {
        // A forked child opens devices of its own. The parent's are left alone there, not dropped.
        static DEVICES: PerProcess<Mutex<Vec<Device>>> = PerProcess::new();
        let all = DEVICES.get_or(Mutex::default);
        let find = |devices: &[Self]| devices.iter().find(|device| device.info().id() == id).cloned();
        if let Some(device) = find(&all.lock()) {
            return Ok(device);
        }
        // Opened without the lock, so that a driver that is slow to start keeps nobody else waiting. Of two threads that
        // open the same one, the first to be done wins.
        let device = open()?;
        let mut devices = all.lock();
        if let Some(first) = find(&devices) {
            // Ours is dropped when this returns, after the lock.
            drop(devices);
            return Ok(first);
        }
        devices.push(device.clone());
        Ok(device)
    }

    /// The first CUDA device there is, else the first HIP device, else host memory.
    ///
    /// # Errors
    /// That of [`host`](Self::host).
    pub fn best() -> Result<Self> {
        Self::cuda(0).or_else(|_| Self::hip(0)).or_else(|_| Self::host())
    }

    /// Every device of every backend. A backend without one is there as the error that says why.
    #[must_use]
    pub fn all() -> Vec<Result<Self>> {
        #[cfg(feature = "cuda")]
        let cuda = crate::driver::cuda::CudaDriver::count().unwrap_or(0);
        #[cfg(not(feature = "cuda"))]
        let cuda = 0;
        #[cfg(feature = "hip")]
        let hip = crate::driver::hip::HipDriver::count().unwrap_or(0);
        #[cfg(not(feature = "hip"))]
        let hip = 0;
        // The first is asked for also where there is none: its error says why.
        let cuda = (0..cuda.max(1)).map(Self::cuda);
        let hip = (0..hip.max(1)).map(Self::hip);
        [Self::host()].into_iter().chain(cuda).chain(hip).collect()
    }

    /// The device of that name: `auto`, `host`, `cuda:N`, `cuda:GPU-…` (a UUID as `nvidia-smi -L` prints it), `hip:N`.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`] for any other name; [`Error::NoDevice`] if there is none.
    pub fn named(name: &str) -> Result<Self> {
        match DeviceName::parse(name)? {
            DeviceName::Auto => Self::best(),
            DeviceName::Host => Self::host(),
            DeviceName::Cuda(ordinal) => Self::cuda(ordinal),
            DeviceName::CudaUuid(uuid) => Self::cuda(cuda_ordinal(uuid)?),
            DeviceName::Hip(ordinal) => Self::hip(ordinal),
        }
    }

    /// A device over a driver, with default options.
    ///
    /// # Errors
    /// When the driver does not tell its memory.
    pub fn from_driver(driver: Arc<dyn Driver>) -> Result<Self> {
        DeviceOptions::new().open(driver)
    }

    /// What is known of the device.
    #[must_use]
    pub fn info(&self) -> &DriverInfo {
        self.inner.card.gate().info()
    }

    /// The verdict, decided at the first call and kept. Building a buffer asks for it too; an engine calls this early.
    #[allow(clippy::must_use_candidate, reason = "deciding is what it is called for")]
    pub fn verdict(&self) -> &dyn Verdict {
        let inner = &*self.inner;
        let verdict = match inner.verdict.get() {
            None if inner.card.gate().is_forked() => &inner.verdict_of_child,
            _ => &inner.verdict,
        };
        &**verdict.get_or_init(|| {
            let check = inner.options.check_options(inner.card.gate().info());
            if inner.options.contiguous {
                verdict::asked(&inner.card, check)
            } else {
                verdict::decide(&inner.card, check)
            }
        })
    }

    /// A chunk that another process exported, by [`GrowableBuffer::export_chunk`](crate::GrowableBuffer::export_chunk)
    /// or [`Chunk::export`]. The file descriptor may be closed afterwards. To use it, map it under a span of
    /// [`reserve`](Self::reserve).
    ///
    /// # Safety
    /// `fd` was exported on the same kind of device, the same card where it is one, for a chunk of `bytes`.
    ///
    /// # Errors
    /// [`Error::ChunkSize`]; [`Error::Refused`] where virtual memory is off; what the driver says.
    pub unsafe fn import(&self, fd: BorrowedFd<'_>, bytes: Bytes) -> Result<Chunk> {
        let granularity = self.require_virtual()?;
        if bytes.is_zero() || !bytes.get().is_multiple_of(granularity.get()) {
            let max = Bytes::new(u64::MAX);
            return Err(Error::ChunkSize { asked: bytes, granularity, max });
        }
        // SAFETY: the contract is the same.
        unsafe { Chunk::import(&self.inner.card, fd, bytes.get()) }
    }

    /// Reserves a span of at least `bytes`, for containers that place chunks themselves.
    ///
    /// # Errors
    /// [`Error::ZeroLength`], [`Error::Overflow`], [`Error::Reserve`]; [`Error::Refused`] where virtual memory is off.
    pub fn reserve(&self, bytes: Bytes) -> Result<ReservedRange> {
        if bytes.is_zero() {
            return Err(Error::ZeroLength { what: "a span" });
        }
        let granularity = self.require_virtual()?;
        let span =
            bytes.round_up(granularity).ok_or(Error::Overflow { what: "a span", count: bytes.get(), size: 1 })?;
        ReservedRange::reserve(&self.inner.card, span.get(), granularity.get())
    }

    /// The granularity, where virtual memory is on.
    fn require_virtual(&self) -> Result<Bytes> {
        let verdict = self.verdict();
        match verdict.reason() {
            Some(reason) => Err(Error::Refused { device: self.info().id(), reason: reason.clone() }),
            None => Ok(verdict.granularity()),
        }
    }

    /// Free and total memory, as the driver says.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory(&self) -> Result<MemoryInfo> {
        Ok(self.inner.card.gate().memory()?)
    }

    /// What the device holds now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::take(&self.inner.card)
    }

    /// A new event.
    ///
    /// # Errors
    /// What the driver says.
    pub fn event(&self) -> Result<Event> {
        Event::create(&self.inner.card)
    }

    /// An event that was made elsewhere: the value of a `CUevent` or `hipEvent_t`. It is not destroyed on drop.
    ///
    /// # Safety
    /// `raw` is an event of this device that was recorded, stays alive as long as the result and as long as memory waits
    /// for it, and is not recorded again by other means while memory waits.
    #[must_use]
    pub unsafe fn event_from_raw(&self, raw: *mut core::ffi::c_void) -> Event {
        Event::borrowed(&self.inner.card, RawEvent(raw.expose_provenance() as u64))
    }

    /// Gives up all memory whose event has passed, and what a drop could not give back because the device could not be
    /// waited for. Growths and shrinks do so by themselves when they need to.
    ///
    /// Returns how much was given up.
    pub fn drain(&self) -> Bytes {
        Bytes::new(self.inner.card.drain())
    }

    /// Waits until nothing is left to do in the background: what buffers want mapped ahead is there or cannot be had, and
    /// what waited for events that have passed is given up. Before a graph is captured, for one. Returns at once where
    /// nothing is mapped ahead, and in a hook.
    pub fn wait_ahead(&self) {
        if !self.inner.card.gate().is_forked() {
            self.inner.card.settle();
        }
    }

    /// Waits until all work of the device is over.
    ///
    /// # Errors
    /// What the driver says; an error of earlier work may surface here.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.card.synchronize()
    }

    pub(crate) fn card(&self) -> &Arc<Card> {
        &self.inner.card
    }

    pub(crate) fn default_sizing(&self) -> Sizing {
        self.inner.options.sizing
    }

    pub(crate) fn default_ahead(&self) -> AheadPolicy {
        self.inner.options.ahead
    }

    /// Whether two are the same device.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.card.close();
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("info", self.info())
            .field("verdict", &self.inner.verdict.get().map(|verdict| verdict.mode()))
            .finish_non_exhaustive()
    }
}

/// A device's name, taken apart.
enum DeviceName<'a> {
    Auto,
    Host,
    Cuda(u32),
    CudaUuid(&'a str),
    Hip(u32),
}

/// The number of the CUDA device with this UUID.
fn cuda_ordinal(uuid: &str) -> Result<u32> {
    let missing = |why| Error::NoDevice { asked: format!("cuda:{uuid}"), why };
    #[cfg(feature = "cuda")]
    return match crate::driver::cuda::CudaDriver::open_uuid_text(uuid) {
        Ok(driver) => Ok(driver.info().ordinal),
        Err(error) => Err(missing(error.to_string())),
    };
    #[cfg(not(feature = "cuda"))]
    Err(missing("this build leaves the `cuda` feature out".to_owned()))
}

impl<'a> DeviceName<'a> {
    fn parse(name: &'a str) -> Result<Self> {
        let unknown = || Error::UnknownDevice {
            asked: name.to_owned(),
            known: "auto, host, cuda:N, cuda:GPU-UUID and hip:N, with N from 0".to_owned(),
        };
        if let Some(uuid) = name.strip_prefix("cuda:").filter(|uuid| uuid.starts_with("GPU-")) {
            return Ok(Self::CudaUuid(uuid));
        }
        let (backend, ordinal) = match name.split_once(':') {
            Some((backend, ordinal)) => (backend, Some(ordinal.parse().map_err(|_| unknown())?)),
            None => (name, None),
        };
        match (backend, ordinal) {
            ("auto", None) => Ok(Self::Auto),
            ("host", None) => Ok(Self::Host),
            ("cuda", Some(ordinal)) => Ok(Self::Cuda(ordinal)),
            ("hip", Some(ordinal)) => Ok(Self::Hip(ordinal)),
            _ => Err(unknown()),
        }
    }
}

/// How a device is opened.
///
/// ```
/// use growspan::driver::host::HostOptions;
/// use growspan::{Bytes, DeviceOptions, Mode};
///
/// # fn main() -> growspan::Result<()> {
/// // A gibibyte of host memory plays the card.
/// let device = DeviceOptions::new().host(HostOptions::default().with_capacity(Bytes::gib(1)))?;
/// assert_eq!(device.memory()?.total, 1 << 30);
/// assert_eq!(device.verdict().mode(), Mode::Virtual);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct DeviceOptions {
    check: Option<CheckForm>,
    granularity: Granularity,
    sizing: Sizing,
    arena: Option<Bytes>,
    buffers: u64,
    span: Bytes,
    patience: Duration,
    contiguous: bool,
    pool: PoolPolicy,
    ahead: AheadPolicy,
}

impl Default for DeviceOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl DeviceOptions {
    /// The defaults: the check as the driver wants it, the ladder, a quarter of the device's memory kept in the pool.
    pub const fn new() -> Self {
        Self {
            check: None,
            granularity: Granularity::Trusted,
            sizing: Sizing::Ladder,
            arena: None,
            buffers: 1,
            span: Bytes::gib(64),
            patience: Duration::from_secs(10),
            contiguous: false,
            pool: PoolPolicy::new(),
            ahead: AheadPolicy::Off,
        }
    }

    /// How thorough the check is, instead of what the driver wants.
    pub const fn check(mut self, form: CheckForm) -> Self {
        self.check = Some(form);
        self
    }

    /// Whether the driver's word on granularity decides.
    pub const fn granularity(mut self, granularity: Granularity) -> Self {
        self.granularity = granularity;
        self
    }

    /// How buffers size their chunks unless they say otherwise. The check makes sure that the open files suffice.
    pub const fn sizing(mut self, sizing: Sizing) -> Self {
        self.sizing = sizing;
        self
    }

    /// How much memory buffers will hold together: what the check plans open files for, not a limit. All of the device's
    /// unless set.
    pub const fn arena(mut self, bytes: Bytes) -> Self {
        self.arena = Some(bytes);
        self
    }

    /// How many buffers will share that memory (one unless set): each begins its ladder with small chunks, so many take
    /// more open files than one.
    pub const fn buffers(mut self, buffers: u64) -> Self {
        self.buffers = if buffers == 0 { 1 } else { buffers };
        self
    }

    /// The largest span the check tries to reserve (64 GiB unless set; smaller ones are tried down from there).
    pub const fn span(mut self, bytes: Bytes) -> Self {
        self.span = bytes;
        self
    }

    /// How long the check may take before the driver counts as hanging (10 s unless set).
    pub const fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Virtual memory off, without a check: for comparison.
    pub const fn contiguous(mut self, contiguous: bool) -> Self {
        self.contiguous = contiguous;
        self
    }

    /// The most the device's pool keeps. A quarter of the device's memory unless set.
    pub const fn pool_keep(mut self, bytes: Bytes) -> Self {
        self.pool = self.pool.keep(bytes);
        self
    }

    /// What the device's pool keeps, and for how long.
    pub const fn pool(mut self, policy: PoolPolicy) -> Self {
        self.pool = policy;
        self
    }

    /// How much buffers keep mapped ahead unless they say otherwise. Nothing unless set.
    pub const fn ahead(mut self, policy: AheadPolicy) -> Self {
        self.ahead = policy;
        self
    }

    /// Opens real host memory. Each call makes a device of its own.
    ///
    /// # Errors
    /// [`Error::Host`] if the options do not fit the machine.
    pub fn host(self, options: HostOptions) -> Result<Device> {
        self.open(Arc::new(HostDriver::open(options)?))
    }

    /// Opens the CUDA device with this ordinal. Each call makes a device of its own, over the same card.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason.
    #[cfg(feature = "cuda")]
    pub fn cuda(self, ordinal: u32) -> Result<Device> {
        let driver = crate::driver::cuda::CudaDriver::open(ordinal)
            .map_err(|error| Error::NoDevice { asked: format!("cuda:{ordinal}"), why: error.to_string() })?;
        self.open(Arc::new(driver))
    }

    /// Opens the CUDA device with this ordinal, which this build cannot.
    ///
    /// # Errors
    /// [`Error::NoDevice`].
    #[cfg(not(feature = "cuda"))]
    pub fn cuda(self, ordinal: u32) -> Result<Device> {
        let why = "this build leaves the `cuda` feature out".to_owned();
        Err(Error::NoDevice { asked: format!("cuda:{ordinal}"), why })
    }

    /// Opens the HIP device with this ordinal. Each call makes a device of its own, over the same card.
    ///
    /// # Errors
    /// [`Error::NoDevice`] with the reason.
    #[cfg(feature = "hip")]
    pub fn hip(self, ordinal: u32) -> Result<Device> {
        let driver = crate::driver::hip::HipDriver::open(ordinal)
            .map_err(|error| Error::NoDevice { asked: format!("hip:{ordinal}"), why: error.to_string() })?;
        self.open(Arc::new(driver))
    }

    /// Opens the HIP device with this ordinal, which this build cannot.
    ///
    /// # Errors
    /// [`Error::NoDevice`].
    #[cfg(not(feature = "hip"))]
    pub fn hip(self, ordinal: u32) -> Result<Device> {
        let why = "this build leaves the `hip` feature out".to_owned();
        Err(Error::NoDevice { asked: format!("hip:{ordinal}"), why })
    }

    /// Opens the device of that name, as [`Device::named`] takes it. Each call makes a device of its own.
    ///
    /// # Errors
    /// [`Error::UnknownDevice`]; those of the device's kind.
    pub fn named(self, name: &str) -> Result<Device> {
        match DeviceName::parse(name)? {
            DeviceName::Auto => {
                let cuda = self.clone().cuda(0).or_else(|_| self.clone().hip(0));
                cuda.or_else(|_| self.host(HostOptions::default()))
            }
            DeviceName::Host => self.host(HostOptions::default()),
            DeviceName::Cuda(ordinal) => self.cuda(ordinal),
            DeviceName::CudaUuid(uuid) => self.cuda(cuda_ordinal(uuid)?),
            DeviceName::Hip(ordinal) => self.hip(ordinal),
        }
    }

    /// Opens a device over a driver.
    ///
    /// # Errors
    /// When the driver does not tell its memory and no pool limit is set.
    pub fn open(self, driver: Arc<dyn Driver>) -> Result<Device> {
        let card = Card::new(driver);
        let policy = pools::with_limit(&card, self.pool)?;
        let pool = ChunkPool::new(&card, ChunkProps::PLAIN, policy, Vec::new());
        let (verdict, verdict_of_child) = (OnceLock::new(), OnceLock::new());
        Ok(Device { inner: Arc::new(Inner { card, pool, verdict, verdict_of_child, options: self }) })
    }

    fn check_options(&self, info: &DriverInfo) -> CheckOptions {
        CheckOptions {
            form: self.check.unwrap_or(info.check),
            granularity: self.granularity,
            sizing: self.sizing,
            arena: self.arena,
            buffers: self.buffers,
            span: self.span,
            patience: self.patience,
        }
    }
}
