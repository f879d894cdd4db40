//! Why virtual memory is off.

use core::fmt;
use core::time::Duration;

use crate::bytes::Bytes;
use crate::driver::DriverError;
use crate::verdict::Step;

/// Why virtual memory is off on a device: what the check saw.
///
/// ```
/// use growspan::{Bytes, verdict::Reason};
///
/// let reason = Reason::Granularity { recommended: Bytes::kib(4), runtime: "HIP runtime 7.2.53210".into() };
/// assert_eq!(
///     reason.to_string(),
///     "the recommended allocation granularity is 4 KiB, not 2 MiB or more (HIP runtime 7.2.53210)"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The driver has no virtual memory management: a symbol is missing or the device's attribute is not set.
    NoSupport {
        /// What the driver said.
        error: DriverError,
        /// The runtime and its version.
        runtime: String,
    },
    /// The runtime is known for a fault that no treatment helps.
    KnownFault {
        /// Which, and what can be done.
        what: String,
        /// The runtime and its version.
        runtime: String,
    },
    /// The driver maps in pages that a GPU should not map in.
    Granularity {
        /// What it recommends.
        recommended: Bytes,
        /// The runtime and its version.
        runtime: String,
    },
    /// The driver names sizes that make no sense.
    OddGranularity {
        /// The smallest size it names, in bytes.
        minimum: u64,
        /// The size it recommends, in bytes.
        recommended: u64,
        /// The runtime and its version.
        runtime: String,
    },
    /// The process may not hold enough open files.
    OpenFiles {
        /// Who keeps them.
        by: &'static str,
        /// The chunk that one is kept for.
        chunk: Bytes,
        /// How many the process would need in all.
        needed: u64,
        /// How many of those are for chunks.
        for_chunks: u64,
        /// The limit in force.
        limit: u64,
        /// How far the process may raise it.
        hard: u64,
        /// The runtime and its version.
        runtime: String,
    },
    /// The process may not have enough memory map entries.
    MapEntries {
        /// How many it would need in all.
        needed: u64,
        /// The system's limit.
        limit: u64,
        /// The runtime and its version.
        runtime: String,
    },
    /// A call of the life cycle failed.
    Call {
        /// The step it belonged to.
        step: Step,
        /// What the driver said.
        error: DriverError,
        /// The runtime and its version.
        runtime: String,
    },
    /// A span came back with success and an address that cannot be.
    Address {
        /// What is wrong with it.
        what: String,
        /// The runtime and its version.
        runtime: String,
    },
    /// Free memory did not fall by what was mapped, or did not rise by what was released.
    Memory {
        /// What the memory is called.
        word: &'static str,
        /// How much was mapped.
        mapped: Bytes,
        /// By how much free memory fell.
        fell: Bytes,
        /// By how much it rose after the release; none if it never got that far.
        rose: Option<Bytes>,
        /// The runtime and its version.
        runtime: String,
    },
    /// What was written could not be read back.
    ReadBack {
        /// The step it belonged to.
        step: Step,
        /// Where, in bytes from the span's base.
        offset: u64,
        /// The byte that was written.
        wrote: u8,
        /// The byte that was read.
        read: u8,
        /// The runtime and its version.
        runtime: String,
    },
    /// A call did not return.
    Hang {
        /// The step it belonged to.
        step: Step,
        /// How long it was waited for.
        waited: Duration,
        /// The runtime and its version.
        runtime: String,
    },
    /// The check could not be run at all.
    NotRun {
        /// Why.
        why: String,
        /// The runtime and its version.
        runtime: String,
    },
    /// The caller asked for contiguous memory.
    Asked,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSupport { error, runtime } => write!(f, "the driver has no virtual memory: {error} ({runtime})"),
            Self::KnownFault { what, runtime } => write!(f, "{what} ({runtime})"),
            Self::Granularity { recommended, runtime } => {
                write!(f, "the recommended allocation granularity is {recommended}, not 2 MiB or more ({runtime})")
            }
            Self::OddGranularity { minimum, recommended, runtime } => write!(
                f,
                "the driver names allocation granularities of {minimum} and {recommended} bytes, which make no sense \
                 ({runtime})"
            ),
            Self::OpenFiles { by, chunk, needed, for_chunks, limit, hard, runtime } => write!(
                f,
                "{by} keeps an open file per {chunk} chunk: {needed} needed, and the open-file limit is {limit} (hard \
                 {hard}; {for_chunks} of them for chunks, {} kept for the application; {runtime})",
                needed.saturating_sub(*for_chunks)
            ),
            Self::MapEntries { needed, limit, runtime } => {
                write!(f, "a memory map entry per chunk: {needed} needed, and vm.max_map_count is {limit} ({runtime})")
            }
            Self::Call { step, error, runtime } => write!(f, "{step}: {error} ({runtime})"),
            Self::Address { what, runtime } => write!(f, "{}: {what} ({runtime})", Step::Reserve),
            Self::Memory { word, mapped, fell, rose: None, runtime } => {
                write!(f, "the free {word} fell by {} for {} mapped ({runtime})", Mib(*fell), Mib(*mapped))
            }
            Self::Memory { word, mapped, fell, rose: Some(rose), runtime } => write!(
                f,
                "the free {word} fell by {} for {} mapped and rose by {} after its release ({runtime})",
                Mib(*fell),
                Mib(*mapped),
                Mib(*rose)
            ),
            Self::ReadBack { step, offset, wrote, read, runtime } => write!(
                f,
                "{step}: {wrote:#04x} was written at offset {offset} and {read:#04x} was read back ({runtime})"
            ),
            Self::Hang { step, waited, runtime } => {
                write!(f, "{step}: the driver did not return within {:.1} s ({runtime})", waited.as_secs_f64())
            }
            Self::NotRun { why, runtime } => write!(f, "the start-up check could not be run: {why} ({runtime})"),
            Self::Asked => f.write_str("contiguous memory was asked for"),
        }
    }
}

/// Bytes in whole MiB, as the figures of a memory check are compared.
struct Mib(Bytes);

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0.get() >> 20)
    }
}
