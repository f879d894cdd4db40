//! Where the time goes.

use core::fmt;
use core::time::Duration;

use crate::bytes::Bytes;
use crate::sys::vmstat::Vmstat;

pub use crate::sys::pages::Prefault;

/// What page-locked memory cost. What is put into it afterwards is not in here.
///
/// ```
/// use growspan::{Device, PinnedBuffer};
///
/// # fn main() -> growspan::Result<()> {
/// let mut weights = PinnedBuffer::<u8>::builder(&Device::host()?).max_len(1 << 20).build()?;
/// let timing = weights.grow_to(1 << 20)?;
/// println!("{timing}"); // 1 MiB in 0.4 ms: map 0.0 ms, prefault 0.3 ms (1 thread), register 0.0 ms in 1 piece; ...
/// assert!(timing.map + timing.prefault + timing.register <= timing.total);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinTiming {
    /// How much memory was had.
    pub bytes: Bytes,
    /// Getting addresses and advising the kernel.
    pub map: Duration,
    /// Putting pages under them.
    pub prefault: Duration,
    /// The driver's calls: registering, or allocating.
    pub register: Duration,
    /// From call to return.
    pub total: Duration,
    /// Pieces that were registered or allocated.
    pub pieces: u32,
    /// Threads that put pages there; zero if the driver did.
    pub threads: u32,
    /// How they did.
    pub how: Option<Prefault>,
    /// How often the kernel asked for another try of the prefault's calls (`MADV_POPULATE_WRITE`), over all threads.
    /// Nobody sees those that a runtime makes in its own calls, as AMD's does of a walk that was disturbed:
    /// [`register`](Self::register), [`register_faults`](Self::register_faults) and [`slow`](Self::slow) show what came of
    /// them.
    pub retries_seen: u64,
    /// Page faults of this thread during the driver's calls. Memory that is all there gives next to none.
    pub register_faults: u64,
    /// What the kernel counted meanwhile, over the whole machine.
    pub vmstat: Vmstat,
    /// What took longer than it should.
    pub slow: Vec<Slow>,
}

impl PinTiming {
    /// Bytes per second, from call to return.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        rate(self.bytes, self.total)
    }

    /// Both together.
    pub(super) fn add(&mut self, other: &Self) {
        self.bytes = Bytes::new(self.bytes.get() + other.bytes.get());
        self.map += other.map;
        self.prefault += other.prefault;
        self.register += other.register;
        self.total += other.total;
        self.pieces += other.pieces;
        self.threads = self.threads.max(other.threads);
        self.how = other.how.or(self.how);
        self.retries_seen += other.retries_seen;
        self.register_faults += other.register_faults;
        self.vmstat = self.vmstat.plus(&other.vmstat);
        self.slow.extend_from_slice(&other.slow);
    }
}

pub(super) fn rate(bytes: Bytes, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { bytes.get() as f64 / seconds } else { 0.0 }
}

struct Ms(Duration);

impl fmt::Display for Ms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} ms", self.0.as_secs_f64() * 1e3)
    }
}

impl fmt::Display for PinTiming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |n: u32| if n == 1 { "" } else { "s" };
        let (map, prefault, register) = (Ms(self.map), Ms(self.prefault), Ms(self.register));
        write!(f, "{} in {}: map {map}, prefault {prefault}", self.bytes, Ms(self.total))?;
        write!(f, " ({} thread{})", self.threads, plural(self.threads))?;
        write!(f, ", register {register} in {} piece{}", self.pieces, plural(self.pieces))?;
        if self.retries_seen > 0 {
            write!(f, ", {} retries", self.retries_seen)?;
        }
        write!(f, "; {} faults while registering; machine: {}", self.register_faults, self.vmstat)?;
        self.slow.iter().try_for_each(|slow| write!(f, "; {slow}"))
    }
}

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PinPhase {
    /// Pages are put under addresses.
    Prefault,
    /// The driver registers pieces.
    Register,
    /// The driver allocates.
    Allocate,
}

impl fmt::Display for PinPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Prefault => "prefault",
            Self::Register => "register",
            Self::Allocate => "allocate",
        })
    }
}

/// How far it has come: told after each part of a prefault, and after each piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinProgress {
    /// What is being done.
    pub phase: PinPhase,
    /// How much of that is done.
    pub done: Bytes,
    /// How much there is to do.
    pub total: Bytes,
}

/// Something that took longer than it should.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slow {
    /// What was being done.
    pub phase: PinPhase,
    /// The number of the piece in this growth.
    pub piece: usize,
    /// Its size.
    pub bytes: Bytes,
    /// How long it had taken when it was last looked at.
    pub after: Duration,
    /// What is likely behind it.
    pub cause: SlowCause,
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { phase, piece, bytes, after, cause } = self;
        write!(f, "slow: {phase} of piece {piece} ({bytes}) after {:.1} s: {cause}", after.as_secs_f64())
    }
}

/// What is likely behind a piece that takes long, from what the kernel has counted since it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SlowCause {
    /// Pages go to swap or come back from it.
    Swap,
    /// The machine, or a control group, has next to nothing left.
    MemoryLimit,
    /// The kernel compacts memory to make huge pages.
    Compaction,
    /// Memory has to be taken from others, most likely from the file cache.
    Reclaim,
    /// Pages are put there while the driver walks over them.
    Faults,
    /// Nothing that the kernel counts.
    Unknown,
}

impl SlowCause {
    /// Reads it from the counters since the piece began, the share of memory that is left, and the pages that the piece
    /// has. Of several the one that costs most.
    pub(super) fn of(phase: PinPhase, since: &Vmstat, left: Option<f64>, pages: u64) -> Self {
        /// A few pages come and go on any machine.
        const FEW: u64 = 256;
        if since.pswpin + since.pswpout > FEW {
            Self::Swap
        } else if left.is_some_and(|left| left < 1.0 / 32.0) {
            Self::MemoryLimit
        } else if since.compact_stall > 0 {
            Self::Compaction
        } else if since.stalls() > 0 || since.pgsteal_direct > FEW {
            Self::Reclaim
        } else if phase == PinPhase::Register && since.pgfault > pages / 2 {
            Self::Faults
        } else {
            Self::Unknown
        }
    }
}

impl fmt::Display for SlowCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Swap => "memory is being swapped",
            Self::MemoryLimit => "next to no memory is left",
            Self::Compaction => "the kernel compacts memory for huge pages (ThpPolicy::Avoid asks for none)",
            Self::Reclaim => "memory is being taken back from the file cache",
            Self::Faults => "pages are put there while the driver walks over them",
            Self::Unknown => {
                "nothing that the kernel counts: a driver that starts again, or a virtual machine that gets its own memory"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growths_add_up() {
        let ms = Duration::from_millis;
        let timing = |n: u64| PinTiming {
            bytes: Bytes::new(n),
            map: ms(n),
            prefault: ms(2 * n),
            register: ms(3 * n),
            total: ms(7 * n),
            pieces: n as u32,
            threads: n as u32,
            how: Some(Prefault::Populate),
            retries_seen: 5 * n,
            register_faults: 6 * n,
            vmstat: Vmstat { pgfault: n, ..Vmstat::default() },
            slow: Vec::new(),
        };
        let mut sum = PinTiming::default();
        [1, 10, 100].into_iter().for_each(|n| sum.add(&timing(n)));
        assert_eq!(sum, PinTiming { threads: 100, ..timing(111) });
        assert!(sum.to_string().contains(", 555 retries"), "{sum}");
    }

    #[test]
    fn the_costliest_cause_is_named() {
        let none = Vmstat::default();
        let with = |set: fn(&mut Vmstat)| {
            let mut stat = none;
            set(&mut stat);
            stat
        };
        let cause = |stat, left| SlowCause::of(PinPhase::Register, &stat, left, 1000);
        assert_eq!(cause(none, Some(0.5)), SlowCause::Unknown);
        assert_eq!(cause(with(|s| s.pgfault = 501), None), SlowCause::Faults);
        assert_eq!(SlowCause::of(PinPhase::Prefault, &with(|s| s.pgfault = 501), None, 1000), SlowCause::Unknown);
        assert_eq!(cause(with(|s| (s.pgfault, s.pgsteal_direct) = (501, 1000)), None), SlowCause::Reclaim);
        assert_eq!(cause(with(|s| (s.compact_stall, s.pgsteal_direct) = (1, 1000)), None), SlowCause::Compaction);
        assert_eq!(cause(with(|s| s.compact_stall = 1), Some(0.01)), SlowCause::MemoryLimit);
        assert_eq!(cause(with(|s| s.pswpin = 257), Some(0.01)), SlowCause::Swap);
        assert_eq!(cause(with(|s| s.pswpin = 7), Some(0.5)), SlowCause::Unknown);
    }
}
