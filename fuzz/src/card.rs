//! The card a case runs on.

use arbitrary::Arbitrary;
use growspan::driver::CheckForm;
use growspan::driver::sim::{Personality, SimDriver};
use growspan::{Bytes, DeviceOptions, Fallback, Sizing};

use crate::case::{Fault, Reserve};

/// Small, so that whole buffers can be compared at each step.
pub(crate) const GRANULE: u64 = 4096;
/// Open files and map entries that the pretended process holds besides.
pub(crate) const HELD: u64 = 16;

#[derive(Arbitrary, Clone, Debug)]
pub(crate) struct Card {
    runtime: Runtime,
    fallback: Fall,
    sizing: Rule,
    /// All memory, in granules beyond the least; plenty where it is high.
    granules: u8,
    /// What the pool keeps, in granules; everything where it is high.
    keep: u8,
    contiguous: [bool; 3],
    /// Driver calls that fail during the check.
    pub(crate) check_fault: Option<Fault>,
    /// What buffers keep mapped ahead from the beginning.
    pub(crate) ahead: Reserve,
    /// Mapping does not go well beside kernels: the background only makes chunks.
    prepares_only: bool,
    /// The background is not waited for after each step, and works beside the next.
    pub(crate) races: bool,
}

/// What the runtime does otherwise.
#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
enum Runtime {
    Sound,
    UniformChunksOnly,
    OpenFiles { soft: u8, hard: u8, as_out_of_memory: bool },
    UniformWithOpenFiles { soft: u8, hard: u8 },
    MapCount { limit: u8 },
    ReleaseKeepsMemory,
    FreeOverReported,
    ReserveLimit { granules: u8 },
    // These must end in one contiguous block.
    StaleAfterMap,
    MapsNothing { access_fails: bool },
    ReserveReturnsNull,
    Vgpu,
    NoSupport,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Fall {
    Upfront,
    Capacity { granules: u8 },
    MayMove,
    Refuse,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Rule {
    Ladder,
    Uniform { granules: u8 },
    Exact,
}

impl Card {
    /// One that does what it says, with plenty of memory.
    #[cfg(test)]
    pub(crate) fn sound() -> Self {
        let (runtime, fallback, sizing) = (Runtime::Sound, Fall::Upfront, Rule::Ladder);
        Self {
            runtime,
            fallback,
            sizing,
            granules: 255,
            keep: 255,
            contiguous: [false; 3],
            check_fault: None,
            ahead: Reserve::Off,
            prepares_only: false,
            races: false,
        }
    }

    pub(crate) fn sim(&self) -> SimDriver {
        let total = Bytes::new(GRANULE * if self.has_plenty() { 1 << 18 } else { 24 + u64::from(self.granules) });
        let limit = |n: u8| HELD + 64 + u64::from(n);
        let files = |soft: u8, hard: u8, as_out_of_memory| Personality::OpenFilePerChunk {
            held: HELD,
            soft: limit(soft),
            hard: limit(soft).max(limit(hard)),
            as_out_of_memory,
        };
        let (sim, granule) = (SimDriver::builder(), Bytes::new(GRANULE));
        let sim = sim.granularity(granule).total(total).check(CheckForm::Cheap).ledger(0);
        let prepares_only = self.prepares_only;
        let sim = sim.info(move |info| {
            info.wants_2_mib = false;
            info.quirks.map_beside_kernels = !prepares_only;
        });
        let uniform = |sim: growspan::driver::sim::SimOptions| {
            sim.personality(Personality::UniformChunksOnly).info(|info| info.quirks.uniform_chunks_only = true)
        };
        match self.runtime {
            Runtime::Sound => sim,
            Runtime::UniformChunksOnly => uniform(sim),
            Runtime::OpenFiles { soft, hard, as_out_of_memory } => sim.personality(files(soft, hard, as_out_of_memory)),
            Runtime::UniformWithOpenFiles { soft, hard } => uniform(sim.personality(files(soft, hard, true))),
            Runtime::MapCount { limit: n } => {
                sim.personality(Personality::MapCountLimit { held: HELD, limit: limit(n) })
            }
            Runtime::ReleaseKeepsMemory => sim.personality(Personality::ReleaseKeepsMemory),
            Runtime::FreeOverReported => sim.personality(Personality::FreeOverReported(GRANULE * 8)),
            Runtime::ReserveLimit { granules } => {
                sim.personality(Personality::ReserveLimit(GRANULE * u64::from(granules)))
            }
            Runtime::StaleAfterMap => sim.personality(Personality::StaleAfterMap),
            Runtime::MapsNothing { access_fails } => sim.personality(Personality::MapsNothing { access_fails }),
            Runtime::ReserveReturnsNull => sim.personality(Personality::ReserveReturnsNull),
            Runtime::Vgpu => sim.personality(Personality::VgpuNotSupported),
            Runtime::NoSupport => sim.personality(Personality::NoSupport),
        }
        .build()
    }

    pub(crate) fn options(&self) -> DeviceOptions {
        let keep = if self.keep > 128 { Bytes::gib(1) } else { Bytes::new(GRANULE * u64::from(self.keep)) };
        // The arena is what the process may hold, so that a small limit of files is not a reason to be off.
        let options = DeviceOptions::new().pool_keep(keep).arena(Bytes::new(GRANULE * 16)).sizing(self.sizing());
        options.span(Bytes::mib(1)).contiguous(self.contiguous == [true; 3]).ahead(self.ahead.policy())
    }

    fn sizing(&self) -> Sizing {
        match self.sizing {
            Rule::Ladder => Sizing::Ladder,
            Rule::Uniform { granules } => Sizing::Uniform(Bytes::new(GRANULE * (1 + u64::from(granules % 5)))),
            Rule::Exact => Sizing::Exact,
        }
    }

    pub(crate) fn fallback(&self) -> Fallback {
        match self.fallback {
            Fall::Upfront => Fallback::Upfront,
            Fall::Capacity { granules } => Fallback::Capacity(Bytes::new(GRANULE * u64::from(granules % 24))),
            Fall::MayMove => Fallback::MayMove,
            Fall::Refuse => Fallback::Refuse,
        }
    }

    /// Whether a block may be too small for what was asked to fit at most.
    pub(crate) fn has_capacity(&self) -> bool {
        matches!(self.fallback, Fall::Capacity { .. })
    }

    /// Whether buffers are asked for with room for nothing.
    pub(crate) fn has_no_capacity(&self) -> bool {
        self.fallback() == Fallback::Capacity(Bytes::ZERO)
    }

    /// Whether the check, if nothing strikes it, must find that virtual memory is off.
    pub(crate) fn is_broken(&self) -> bool {
        use Runtime::{MapsNothing, NoSupport, ReserveReturnsNull, StaleAfterMap, Vgpu};
        matches!(self.runtime, StaleAfterMap | MapsNothing { .. } | ReserveReturnsNull | Vgpu | NoSupport)
    }

    /// Whether memory or open files may run out by themselves.
    pub(crate) fn runs_short(&self) -> bool {
        !self.has_plenty() || self.limits_files()
    }

    /// Whether chunks may be larger than the ladder has them where they lie, so that what is committed ends within one.
    pub(crate) fn is_exact(&self) -> bool {
        matches!(self.sizing, Rule::Exact)
    }

    /// Whether a span may take chunks of one size only.
    pub(crate) fn is_uniform(&self) -> bool {
        let one_size = matches!(self.runtime, Runtime::UniformChunksOnly | Runtime::UniformWithOpenFiles { .. });
        one_size || matches!(self.sizing, Rule::Uniform { .. })
    }

    pub(crate) fn has_plenty(&self) -> bool {
        self.granules > 200
    }

    pub(crate) fn limits_files(&self) -> bool {
        matches!(self.runtime, Runtime::OpenFiles { .. } | Runtime::UniformWithOpenFiles { .. })
    }

    pub(crate) fn limits_maps(&self) -> bool {
        matches!(self.runtime, Runtime::MapCount { .. })
    }

    pub(crate) fn limits_spans(&self) -> bool {
        matches!(self.runtime, Runtime::ReserveLimit { .. })
    }
}
