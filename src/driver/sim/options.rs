//! What a simulated driver is made of.

use crate::bytes::Bytes;
use crate::driver::{Backend, CheckForm, DriverInfo};

use super::{Personality, SimDriver};

/// Builds a [`SimDriver`].
///
/// ```
/// use growspan::Bytes;
/// use growspan::driver::Driver;
/// use growspan::driver::sim::{Personality, SimDriver};
///
/// // ROCm 7.2, as far as its granularity and its mixed sizes go.
/// let sim = SimDriver::builder()
///     .total(Bytes::gib(192))
///     .runtime("HIP runtime 7.2.53210")
///     .personality(Personality::Granularity4K)
///     .personality(Personality::UniformChunksOnly)
///     .build();
/// assert_eq!(sim.granularity()?.recommended, 4096);
/// # Ok::<(), growspan::driver::DriverError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct SimOptions {
    pub(super) info: DriverInfo,
    pub(super) total: u64,
    pub(super) minimum: u64,
    pub(super) recommended: u64,
    pub(super) personalities: Vec<Personality>,
    pub(super) poison: u8,
    pub(super) queue_copies: bool,
    pub(super) ledger: usize,
}

impl SimOptions {
    /// A card of 24 GiB that does what it says.
    pub fn new() -> Self {
        let mut info = DriverInfo::new(Backend::Sim, 0, "simulated card", "sim driver 1.0");
        info.open_files_by = "the simulated driver";
        Self {
            info,
            total: 24 << 30,
            minimum: 2 << 20,
            recommended: 2 << 20,
            personalities: Vec::new(),
            poison: 0xA5,
            queue_copies: false,
            ledger: 1 << 16,
        }
    }

    /// All memory of the card, up to 1 EiB. It is pretended: a card of 128 GiB costs nothing.
    pub fn total(mut self, total: Bytes) -> Self {
        self.total = total.get().min(1 << 60);
        self
    }

    /// Minimum and recommended granularity, rounded up to a power of two between 4 KiB and 1 TiB.
    pub fn granularity(mut self, granularity: Bytes) -> Self {
        self.minimum = granularity.get().clamp(4096, 1 << 40).next_power_of_two();
        self.recommended = self.minimum;
        self
    }

    /// The recommended granularity alone, rounded up likewise.
    pub fn recommended(mut self, granularity: Bytes) -> Self {
        self.recommended = granularity.get().clamp(4096, 1 << 40).next_power_of_two();
        self
    }

    /// The device's number.
    pub fn ordinal(mut self, ordinal: u32) -> Self {
        self.info.ordinal = ordinal;
        self
    }

    /// The device's name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.info.name = name.into();
        self
    }

    /// The runtime and its version as reasons quote it, `HIP runtime 7.2.53210`.
    pub fn runtime(mut self, runtime: impl Into<String>) -> Self {
        self.info.runtime = runtime.into();
        self
    }

    /// Who keeps the open files, as reasons say it, `ROCm`.
    pub fn open_files_by(mut self, who: &'static str) -> Self {
        self.info.open_files_by = who;
        self
    }

    /// How thorough the start-up check is.
    pub fn check(mut self, check: CheckForm) -> Self {
        self.info.check = check;
        self
    }

    /// Changes anything else in the device's description. `host_visible` stays false: the addresses are pretended.
    ///
    /// ```
    /// use growspan::driver::sim::SimDriver;
    ///
    /// // A runtime whose fault is known beforehand.
    /// let sim = SimDriver::builder().info(|info| info.quirks.uniform_chunks_only = true).build();
    /// ```
    pub fn info(mut self, change: impl FnOnce(&mut DriverInfo)) -> Self {
        change(&mut self.info);
        self
    }

    /// Imitates a fault of a real runtime; several can be combined. Granularity, open files and map entries per chunk
    /// are set in the description too, where later calls can change them.
    pub fn personality(mut self, personality: Personality) -> Self {
        match personality {
            Personality::Granularity4K => (self.minimum, self.recommended) = (4096, 4096),
            Personality::OpenFilePerChunk { .. } => self.info.open_files_per_chunk = 1,
            Personality::MapCountLimit { .. } => self.info.maps_per_chunk = 1,
            _ => {}
        }
        self.personalities.push(personality);
        self
    }

    /// The byte that new memory is full of, so that a forgotten clear shows. 0xA5 unless set.
    pub fn poison(mut self, byte: u8) -> Self {
        self.poison = byte;
        self
    }

    /// Whether copies and fills on a stream always stay pending until waited for, and not only behind pending work.
    /// Shows who forgets to wait; off unless set.
    pub fn queue_copies(mut self, queue: bool) -> Self {
        self.queue_copies = queue;
        self
    }

    /// How many of the last calls the ledger keeps: 65,536 unless set. With 0 it keeps none; calls are counted and
    /// checked all the same, so that fuzzing can run for days.
    pub fn ledger(mut self, entries: usize) -> Self {
        self.ledger = entries;
        self
    }

    /// Makes the driver.
    #[must_use]
    pub fn build(mut self) -> SimDriver {
        // Safe code gets slices where this is set, and the addresses lead nowhere.
        self.info.host_visible = false;
        SimDriver::from_options(self)
    }
}

impl Default for SimOptions {
    fn default() -> Self {
        Self::new()
    }
}
