//! The faults of real runtimes, to be imitated.

use crate::driver::{Call, MapCount, OpenFiles};

/// One way in which a real runtime differs from a driver that does what it says. Several can be combined; of two of the
/// same kind the later one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Personality {
    /// Minimum and recommended granularity are 4 KiB, as HIP reports on Linux up to 7.2.
    Granularity4K,
    /// Releasing succeeds, but free memory does not rise while a span exists in which the chunk was ever mapped: ROCm
    /// 7.2, which keeps a map of the device file over those addresses.
    ReleaseKeepsMemory,
    /// Each handle holds an open file until it is released: ROCm 7.14, one dma-buf a chunk. The limits are those that
    /// [`Driver::limits`](crate::driver::Driver::limits) tells, and the soft one can be raised.
    OpenFilePerChunk {
        /// Open files that the process holds besides.
        held: u64,
        /// The soft limit.
        soft: u64,
        /// The hard limit.
        hard: u64,
        /// Whether running out is reported as out of memory, as ROCm 7.14 does, and not as what it is.
        as_out_of_memory: bool,
    },
    /// Each mapping takes an entry of the process's memory map: HIP 7, which maps the device file under each chunk.
    MapCountLimit {
        /// Entries that the process has besides.
        held: u64,
        /// The limit.
        limit: u64,
    },
    /// Setting access fails with "invalid value" in a span with chunks of different sizes: HIP 7.0 to 7.2.
    UniformChunksOnly,
    /// Mapping never returns: HIP up to 7.13 waits there for the null stream, which may wait for the caller. The thread
    /// is parked until [`SimDriver::let_go`](super::SimDriver::let_go).
    HangsInMap,
    /// Setting access never returns: ROCm 7.14 on kernels with an amdgpu driver older than 3.64. The thread is parked
    /// until [`SimDriver::let_go`](super::SimDriver::let_go).
    HangsInSetAccess,
    /// Where memory was mapped before, accesses still reach the old memory, as long as the span exists: HIP 7.2 to 7.13
    /// on Windows, where a second chunk aliases the first one's pages.
    StaleAfterMap,
    /// Mapping says it succeeded, but reads give zeros and stores are lost: HIP 6.1 to 7.2 when the kernel refuses the
    /// mapping, where setting access then fails; HIP on RDNA4 parts (gfx1201), where it does not.
    MapsNothing {
        /// Whether setting access fails with "invalid value".
        access_fails: bool,
    },
    /// Reserving succeeds with address zero and reserves nothing: HIP before 6.1.
    ReserveReturnsNull,
    /// The attribute says yes, creating says "not supported" (801): CUDA in virtual machines whose vGPU profile has no
    /// unified memory.
    VgpuNotSupported,
    /// The library lacks the symbols: CUDA drivers older than 10.2, HIP runtimes older than 5.1.
    NoSupport,
    /// A span larger than this many bytes is refused: processes under `ulimit -v`, containers with small address spaces.
    ReserveLimit(u64),
    /// Free memory is reported too high by this many bytes: HIP, whose figure leaves out what graphics programs hold.
    FreeOverReported(u64),
}

/// A list of personalities, sorted into what the driver asks at each call.
#[derive(Clone, Debug)]
pub(super) struct Habits {
    pub(super) release_keeps_memory: bool,
    pub(super) file_per_chunk: bool,
    pub(super) files_as_out_of_memory: bool,
    pub(super) files: OpenFiles,
    pub(super) map_limited: bool,
    pub(super) maps: MapCount,
    pub(super) uniform_chunks_only: bool,
    pub(super) hangs_in: Vec<Call>,
    pub(super) stale_after_map: bool,
    pub(super) maps_nothing: bool,
    pub(super) access_fails: bool,
    pub(super) reserve_returns_null: bool,
    pub(super) vgpu: bool,
    pub(super) no_support: bool,
    pub(super) reserve_limit: u64,
    pub(super) free_over_reported: u64,
}

impl Habits {
    pub(super) fn of(personalities: &[Personality]) -> Self {
        let mut habits = Self {
            release_keeps_memory: false,
            file_per_chunk: false,
            files_as_out_of_memory: false,
            // What a fresh process on an ordinary Linux has.
            files: OpenFiles { held: 16, soft: 1024, hard: 1 << 20 },
            map_limited: false,
            maps: MapCount { held: 128, limit: 65_530 },
            uniform_chunks_only: false,
            hangs_in: Vec::new(),
            stale_after_map: false,
            maps_nothing: false,
            access_fails: false,
            reserve_returns_null: false,
            vgpu: false,
            no_support: false,
            reserve_limit: u64::MAX,
            free_over_reported: 0,
        };
        for &personality in personalities {
            match personality {
                // The builder sets the sizes.
                Personality::Granularity4K => {}
                Personality::ReleaseKeepsMemory => habits.release_keeps_memory = true,
                Personality::OpenFilePerChunk { held, soft, hard, as_out_of_memory } => {
                    habits.file_per_chunk = true;
                    habits.files_as_out_of_memory = as_out_of_memory;
                    habits.files = OpenFiles { held, soft, hard };
                }
                Personality::MapCountLimit { held, limit } => {
                    habits.map_limited = true;
                    habits.maps = MapCount { held, limit };
                }
                Personality::UniformChunksOnly => habits.uniform_chunks_only = true,
                Personality::HangsInMap => habits.hangs_in.push(Call::Map),
                Personality::HangsInSetAccess => habits.hangs_in.push(Call::SetAccess),
                Personality::StaleAfterMap => habits.stale_after_map = true,
                Personality::MapsNothing { access_fails } => {
                    habits.maps_nothing = true;
                    habits.access_fails = access_fails;
                }
                Personality::ReserveReturnsNull => habits.reserve_returns_null = true,
                Personality::VgpuNotSupported => habits.vgpu = true,
                Personality::NoSupport => habits.no_support = true,
                Personality::ReserveLimit(bytes) => habits.reserve_limit = bytes,
                Personality::FreeOverReported(bytes) => habits.free_over_reported = bytes,
            }
        }
        habits
    }
}
