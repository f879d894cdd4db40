//! A device under test: its driver wrapped in faults, and what can be asked of it from outside.

use std::sync::Arc;

use growspan::driver::Driver;
use growspan::driver::fault::{FaultControl, FaultPlan, Faulty};
use growspan::driver::host::{HostDriver, HostOptions};
use growspan::driver::sim::{Personality, SimDriver, SimOptions};
use growspan::{Bytes, Device, DeviceOptions, GrowableBuffer, Mode, Quiesce, Sizing};

pub(crate) const MIB: usize = 1 << 20;

/// The chunks of most tests. Small, so that real memory is quickly had; the ladder is the same at every scale.
pub(crate) const GRANULE: usize = 64 << 10;

/// Half a granule: what the sizes of most tests are counted in, as MiB would be with chunks of 2 MiB.
pub(crate) const UNIT: usize = GRANULE / 2;

/// So many units.
pub(crate) fn units(n: usize) -> Bytes {
    Bytes::new((n * UNIT) as u64)
}

/// A simulated card with small chunks.
pub(crate) fn card() -> SimOptions {
    SimDriver::builder()
        .total(Bytes::gib(1))
        .granularity(Bytes::new(GRANULE as u64))
        .info(|info| info.wants_2_mib = false)
}

/// One device, with the means to make its driver fail and to look behind it.
pub(crate) struct World {
    pub(crate) name: String,
    pub(crate) device: Device,
    pub(crate) faults: FaultControl,
    pub(crate) sim: Option<SimDriver>,
    /// Free memory before anything was done.
    free: u64,
}

/// What must be the same before and after an operation that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Picture {
    bytes: [Bytes; 7],
    chunks: u64,
    free: Option<Bytes>,
    files: Option<u64>,
    maps: Option<u64>,
}

impl World {
    pub(crate) fn over(name: &str, driver: Arc<dyn Driver>, sim: Option<SimDriver>, options: DeviceOptions) -> Self {
        let faulty = Faulty::new(driver, FaultPlan::count());
        let faults = faulty.control();
        faults.disarm();
        let device = options.open(Arc::new(faulty)).unwrap();
        // Decided here, so that no operation under test makes the check's calls.
        let _ = device.verdict().mode();
        let free = device.memory().unwrap().free;
        Self { name: name.to_owned(), device, faults, sim, free }
    }

    pub(crate) fn host(options: DeviceOptions) -> Self {
        let memory = HostOptions::default().with_capacity(Bytes::mib(512)).with_granularity(Bytes::new(GRANULE as u64));
        let host = HostDriver::open(memory).unwrap();
        Self::over("host", Arc::new(host), None, options)
    }

    pub(crate) fn sim(options: SimOptions, device: DeviceOptions) -> Self {
        let sim = options.build();
        Self::over("sim", sim.driver(), Some(sim), device)
    }

    pub(crate) fn personality(personality: Personality, device: DeviceOptions) -> Self {
        let sim = SimDriver::builder().total(Bytes::gib(8)).personality(personality).build();
        if let Personality::FreeOverReported(bytes) = personality {
            // What is left out of the figure is what other programs hold.
            sim.set_used_by_others(Bytes::new(bytes));
        }
        Self::over(&format!("{personality:?}"), sim.driver(), Some(sim), device)
    }

    /// The devices the promises are tested on: host and sim, each way of sizing, with and without virtual memory, and
    /// those personalities of which the crate makes the best.
    pub(crate) fn all() -> Vec<Self> {
        let options = DeviceOptions::new;
        let bound = |personality| Self::sim(card().personality(personality), options());
        vec![
            Self::host(options()),
            Self::host(options().contiguous(true)),
            Self::host(options().pool_keep(Bytes::ZERO)),
            Self::sim(card(), options()),
            Self::sim(card(), options().sizing(Sizing::Uniform(units(4)))),
            Self::sim(card(), options().sizing(Sizing::Exact)),
            Self::sim(card(), options().pool_keep(Bytes::ZERO)),
            Self::sim(card(), options().contiguous(true)),
            bound(Personality::OpenFilePerChunk { held: 16, soft: 256, hard: 4096, as_out_of_memory: true }),
            bound(Personality::MapCountLimit { held: 100, limit: 2000 }),
            bound(Personality::UniformChunksOnly),
        ]
    }

    pub(crate) fn is_virtual(&self) -> bool {
        self.device.verdict().mode() == Mode::Virtual
    }

    pub(crate) fn picture(&self) -> Picture {
        let snapshot = self.device.snapshot();
        Picture {
            bytes: [
                snapshot.bytes_reserved,
                snapshot.bytes_mapped,
                snapshot.bytes_pooled,
                snapshot.bytes_retiring,
                snapshot.bytes_in_hand,
                snapshot.bytes_contiguous,
                snapshot.bytes_stranded,
            ],
            chunks: snapshot.chunks,
            free: snapshot.free,
            // Those of the real process belong to all tests that run beside this one.
            files: snapshot.open_files.filter(|_| self.sim.is_some()).map(|files| files.ours),
            maps: snapshot.map_entries.filter(|_| self.sim.is_some()).map(|maps| maps.ours),
        }
    }

    /// A buffer of bytes with room for 64 units.
    pub(crate) fn buffer(&self) -> GrowableBuffer<u8> {
        GrowableBuffer::builder(&self.device).max_len(64 * UNIT).build().unwrap()
    }

    /// Promise 4: what we say we hold is what the driver says is gone, and the simulated driver found no fault of ours.
    pub(crate) fn assert_balanced(&self, when: &str) {
        let snapshot = self.device.snapshot();
        let gone = self.free - snapshot.free.unwrap().get();
        assert_eq!(snapshot.bytes_held().get(), gone, "{} {when}: {snapshot}", self.name);
        assert_eq!(snapshot.bytes_in_hand, Bytes::ZERO, "{} {when}", self.name);
        if let Some(sim) = &self.sim {
            assert_eq!(sim.violations(), [], "{} {when}", self.name);
            if let Some(files) = snapshot.open_files {
                assert_eq!(files.ours, sim.figures().handles, "{} {when}: open files", self.name);
            }
        }
    }

    /// After the last drop the ledger reads zero.
    pub(crate) fn assert_empty(&self, when: &str) {
        self.assert_gone(when);
        // A driver that hangs keeps what the abandoned check held.
        if let Some(sim) = self.sim.as_ref().filter(|sim| sim.hung() == 0) {
            sim.check_clean().unwrap_or_else(|left| panic!("{} {when}: {left}", self.name));
        }
    }

    /// The same, but for chunks that the driver would not unmap.
    pub(crate) fn assert_only_stranded(&self, when: &str) {
        self.assert_balanced(when);
        self.device.pool().trim(Bytes::ZERO);
        let snapshot = self.device.snapshot();
        assert_eq!(snapshot.bytes_held(), snapshot.bytes_stranded, "{} {when}: {snapshot}", self.name);
        assert_eq!(snapshot.bytes_reserved, Bytes::ZERO, "{} {when}: {snapshot}", self.name);
    }

    /// The same, but for spans that the driver kept.
    pub(crate) fn assert_gone(&self, when: &str) {
        self.assert_balanced(when);
        self.device.pool().trim(Bytes::ZERO);
        let snapshot = self.device.snapshot();
        assert_eq!(snapshot.bytes_held(), Bytes::ZERO, "{} {when}: {snapshot}", self.name);
        assert_eq!(snapshot.bytes_reserved, Bytes::ZERO, "{} {when}: {snapshot}", self.name);
        assert_eq!(snapshot.chunks, 0, "{} {when}", self.name);
        assert_eq!(snapshot.free.unwrap().get(), self.free, "{} {when}", self.name);
    }
}

/// Every personality with a device's worth of memory, the mode it leads to, and what its reason says.
pub(crate) fn personalities() -> Vec<(Personality, Mode, &'static str)> {
    use Mode::{Contiguous, Virtual};
    let files = |soft, hard| Personality::OpenFilePerChunk { held: 16, soft, hard, as_out_of_memory: true };
    vec![
        (Personality::Granularity4K, Contiguous, "the recommended allocation granularity is 4 KiB, not 2 MiB or more"),
        (
            Personality::ReleaseKeepsMemory,
            Contiguous,
            "the free VRAM fell by 32 MiB for 32 MiB mapped and rose by 0 MiB after its release",
        ),
        (files(256, 4096), Virtual, ""),
        (
            files(100, 130),
            Contiguous,
            "keeps an open file per 2 MiB chunk: 1104 needed, and the open-file limit is 130 (hard 130)",
        ),
        (Personality::MapCountLimit { held: 100, limit: 2000 }, Virtual, ""),
        (Personality::UniformChunksOnly, Virtual, ""),
        (Personality::HangsInMap, Contiguous, "mapping: the driver did not return within 0.1 s"),
        (Personality::HangsInSetAccess, Contiguous, "setting access: the driver did not return within 0.1 s"),
        (Personality::StaleAfterMap, Contiguous, "mapping again: 0xb1 was written at offset 0 and 0xa1 was read back"),
        (
            Personality::MapsNothing { access_fails: false },
            Contiguous,
            "reading back: 0xa1 was written at offset 0 and 0x00 was read back",
        ),
        (
            Personality::MapsNothing { access_fails: true },
            Contiguous,
            "setting access: set access failed: invalid value",
        ),
        (
            Personality::ReserveReturnsNull,
            Contiguous,
            "reserving addresses: the driver returned success and a null address",
        ),
        (Personality::VgpuNotSupported, Contiguous, "creating chunks: create failed: not supported"),
        (Personality::NoSupport, Contiguous, "the driver has no virtual memory: support failed: not found"),
        (Personality::ReserveLimit(1 << 30), Virtual, ""),
        (Personality::FreeOverReported(1 << 30), Virtual, ""),
    ]
}

/// What a buffer is and holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Look {
    len: usize,
    committed: Bytes,
    address: u64,
    contents: u64,
}

/// Looks at a buffer; its contents as a sum that notices a byte out of place.
pub(crate) fn look(buffer: &GrowableBuffer<u8>) -> Look {
    let mut contents = vec![0; buffer.len()];
    buffer.copy_out(0, &mut contents).unwrap();
    let sum = contents.iter().fold(0_u64, |sum, byte| sum.rotate_left(5) ^ u64::from(*byte).wrapping_mul(0x9e37_79b9));
    Look { len: buffer.len(), committed: buffer.committed(), address: buffer.device_ptr(), contents: sum }
}

/// Writes something recognisable all over a buffer.
pub(crate) fn stamp(buffer: &mut GrowableBuffer<u8>, seed: usize) {
    let bytes: Vec<u8> = (0..buffer.len()).map(|n| ((n / 4096) * 31 + n + seed) as u8).collect();
    buffer.copy_in(0, &bytes).unwrap();
}

pub(crate) fn shrink(buffer: &mut GrowableBuffer<u8>, len: usize) {
    buffer.shrink_to(len, Quiesce::Device).unwrap();
}
