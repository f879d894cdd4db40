//! What is known of a device before anything is tried, and what it is asked for.

use core::fmt;
use core::time::Duration;

use crate::bytes::Bytes;

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
    /// The most host memory that is page-locked at once, in bytes, a power of two; larger memory takes several calls.
    /// `None`: as much as there is (HIP: 2 GiB, the step in which the kernel walks memory, so that a walk that is
    /// disturbed starts again for that much only).
    pub max_pin: Option<Bytes>,
    /// Why virtual memory stays off without a check, where the runtime is known not to bear one.
    pub off: Option<String>,
    /// Whether memory may be mapped and unmapped in a span while kernels use it. Where not, the device is waited for each
    /// time, and what grows ahead of need only makes its chunks ready in the background, for the growth to map.
    pub map_beside_kernels: bool,
}

impl Default for Quirks {
    fn default() -> Self {
        Self {
            uniform_chunks_only: false,
            max_chunk: Bytes::gib(1),
            settle: Duration::ZERO,
            max_pin: None,
            off: None,
            map_beside_kernels: true,
        }
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
    /// Whether work can be queued that touches memory after the call that queued it has returned, so that somebody has to
    /// wait before memory is taken away. Not so on the host.
    pub queues: bool,
    /// Whether the memory is the device's, which everything that is opened over it in this process spends. Not so of host
    /// memory, where each has a limit of its own.
    pub memory_is_the_devices: bool,
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
    /// The faults that the runtime is known for on this device, for people.
    pub known_faults: Vec<KnownFault>,
}

/// A fault that a runtime is known for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KnownFault {
    /// What it does.
    pub what: &'static str,
    /// What the driver does about it.
    pub treatment: &'static str,
}

impl KnownFault {
    /// A fault and its treatment.
    #[must_use]
    pub const fn new(what: &'static str, treatment: &'static str) -> Self {
        Self { what, treatment }
    }
}

impl DriverInfo {
    /// A description with the given backend, ordinal, name and runtime and the most careful assumptions otherwise:
    /// not host visible, work that is queued, no open files or map entries per chunk, the full check.
    #[must_use]
    pub fn new(backend: Backend, ordinal: u32, name: impl Into<String>, runtime: impl Into<String>) -> Self {
        Self {
            backend,
            ordinal,
            name: name.into(),
            runtime: runtime.into(),
            uuid: None,
            host_visible: false,
            queues: true,
            memory_is_the_devices: backend != Backend::Host,
            wants_2_mib: true,
            open_files_per_chunk: 0,
            maps_per_chunk: 0,
            open_files_by: "the driver",
            memory_word: "VRAM",
            check: CheckForm::Full,
            quirks: Quirks::default(),
            known_faults: Vec::new(),
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
pub struct Granularities {
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

    /// The properties beyond plain memory, each with its name and as what adds it to others.
    pub(crate) fn one_by_one(self) -> impl Iterator<Item = (&'static str, impl Fn(Self) -> Self)> {
        let share = match self.shareable {
            Shareable::No => None,
            Shareable::PosixFd => Some("POSIX file descriptor"),
            Shareable::Fabric => Some("fabric handle"),
        };
        let rdma = self.rdma.then_some("RDMA");
        [(share, true), (rdma, false)].into_iter().filter_map(move |(name, sharing)| {
            let add = move |to: Self| match sharing {
                true => to.with_shareable(self.shareable),
                false => to.with_rdma(true),
            };
            name.map(|name| (name, add))
        })
    }

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

/// How host memory is page-locked.
///
/// ```
/// use growspan::driver::PinFlags;
///
/// let flags = PinFlags::USUAL.with_write_combined(true);
/// assert_eq!(flags.to_string(), "portable, mapped, write-combined");
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct PinFlags {
    /// For all devices of the process and not the one alone.
    pub portable: bool,
    /// At an address of the device too.
    pub mapped: bool,
    /// Not through the host's caches: fast for the device to read, very slow for the host. Of allocations only.
    pub write_combined: bool,
    /// The device only reads it. Of memory that was there before only.
    pub read_only: bool,
}

impl PinFlags {
    /// None of them.
    pub const NONE: Self = Self { portable: false, mapped: false, write_combined: false, read_only: false };

    /// Portable and mapped: what drivers do by themselves wherever host and device share one space of addresses.
    pub const USUAL: Self = Self { portable: true, mapped: true, write_combined: false, read_only: false };

    /// The same, for all devices or one.
    #[must_use]
    pub const fn with_portable(mut self, portable: bool) -> Self {
        self.portable = portable;
        self
    }

    /// The same, with or without an address of the device.
    #[must_use]
    pub const fn with_mapped(mut self, mapped: bool) -> Self {
        self.mapped = mapped;
        self
    }

    /// The same, past the host's caches or through them.
    #[must_use]
    pub const fn with_write_combined(mut self, write_combined: bool) -> Self {
        self.write_combined = write_combined;
        self
    }

    /// The same, for the device to read only or to write too.
    #[must_use]
    pub const fn with_read_only(mut self, read_only: bool) -> Self {
        self.read_only = read_only;
        self
    }
}

impl fmt::Display for PinFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (self.portable, "portable"),
            (self.mapped, "mapped"),
            (self.write_combined, "write-combined"),
            (self.read_only, "read-only"),
        ];
        let set: Vec<_> = names.iter().filter(|(set, _)| *set).map(|(_, name)| *name).collect();
        f.pad(&if set.is_empty() { "none".to_owned() } else { set.join(", ") })
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
