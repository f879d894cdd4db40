//! What a pool keeps and for how long, what it did, and chunks made before they are needed.

use core::fmt;
use core::time::Duration;

use super::Sizing;
use crate::bytes::Bytes;

/// What a pool keeps, and for how long.
///
/// Nothing is given back by a thread of the pool's own: what a rule says goes when the pool is next used, or by
/// [`ChunkPool::age_out`](crate::ChunkPool::age_out). A size (as `Bytes`) is a policy too: to keep at most that.
///
/// ```
/// use core::time::Duration;
/// use growspan::driver::ChunkProps;
/// use growspan::{Bytes, Device, GrowableBuffer, PoolPolicy, Quiesce};
///
/// # fn main() -> growspan::Result<()> {
/// let device = Device::host()?;
/// let policy = PoolPolicy::new()
///     .keep(Bytes::mib(64))
///     .watermarks(Bytes::mib(8), Bytes::mib(16)) // above 16 MiB, back down to 8
///     .max_age(Duration::from_secs(30));
/// let pool = device.new_pool(ChunkProps::PLAIN, policy);
/// let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(1 << 30).pool(&pool).build()?;
/// buffer.grow_to(20 << 20)?;
/// buffer.shrink_to(0, Quiesce::Device)?;
/// assert!(pool.kept() <= Bytes::mib(16));
/// assert!(pool.stats().released_by_watermark >= Bytes::mib(4));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct PoolPolicy {
    keep: Option<Bytes>,
    marks: Option<(Bytes, Bytes)>,
    max_age: Option<Duration>,
}

impl PoolPolicy {
    /// The default: at most a quarter of the device's memory, for as long as nobody needs it.
    pub const fn new() -> Self {
        Self { keep: None, marks: None, max_age: None }
    }

    /// The most that is kept; a chunk that would be more is released. A quarter of the device's memory unless set.
    pub const fn keep(mut self, bytes: Bytes) -> Self {
        self.keep = Some(bytes);
        self
    }

    /// When more than `high` is kept, the chunks that have been there longest are released until at most `low` is. One that
    /// has just come in is the last to go: it makes room for itself, where a pool without watermarks turns it away. A `low`
    /// above `high` counts as `high`, and a `high` above what is kept at most as that.
    pub const fn watermarks(mut self, low: Bytes, high: Bytes) -> Self {
        self.marks = Some((low, high));
        self
    }

    /// How long a chunk is kept that nobody needs. For ever unless set.
    pub const fn max_age(mut self, age: Duration) -> Self {
        self.max_age = Some(age);
        self
    }

    pub(crate) const fn has_limit(&self) -> bool {
        self.keep.is_some()
    }

    /// The same, with a limit if it has none.
    pub(crate) fn or_keep(mut self, bytes: u64) -> Self {
        self.keep.get_or_insert(Bytes::new(bytes));
        self
    }

    /// The most that is kept; nothing where nobody has set it.
    pub(crate) const fn limit(&self) -> u64 {
        match self.keep {
            Some(keep) => keep.get(),
            None => 0,
        }
    }

    /// What is kept without some of it going at once.
    pub(super) fn ceiling(&self) -> u64 {
        self.marks.map_or(self.limit(), |(_, high)| high.get().min(self.limit()))
    }

    /// To what the pool is trimmed when it keeps so much; none if that may stay.
    pub(super) fn trims_to(&self, kept: u64) -> Option<u64> {
        let (low, _) = self.marks?;
        (kept > self.ceiling()).then(|| low.get().min(self.ceiling()))
    }

    /// Whether a chunk of `size` comes in where `kept` is kept: it makes room for itself where there are watermarks.
    pub(super) fn takes(&self, size: u64, kept: u64) -> bool {
        let beside = if self.marks.is_some() { 0 } else { kept };
        beside.saturating_add(size) <= self.limit()
    }

    pub(super) const fn age(&self) -> Option<Duration> {
        self.max_age
    }
}

impl From<Bytes> for PoolPolicy {
    fn from(keep: Bytes) -> Self {
        Self::new().keep(keep)
    }
}

/// What a pool did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Chunks that were wanted and there.
    pub hits: u64,
    /// Chunks that were wanted and had to be made.
    pub misses: u64,
    /// Released because nobody had needed it for so long.
    pub released_by_age: Bytes,
    /// Released because more was kept than the high watermark.
    pub released_by_watermark: Bytes,
}

impl PoolStats {
    pub(crate) fn and(self, other: Self) -> Self {
        let sum = |a: Bytes, b: Bytes| Bytes::new(a.get() + b.get());
        Self {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            released_by_age: sum(self.released_by_age, other.released_by_age),
            released_by_watermark: sum(self.released_by_watermark, other.released_by_watermark),
        }
    }
}

/// What chunks to make before they are needed; see [`Device::prewarm`](crate::Device::prewarm).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Prewarm {
    /// What a buffer takes that grows from nothing to so many bytes.
    Span {
        /// How far it grows. On a device that takes one chunk size per span, that size is the one of a buffer built for so
        /// many bytes.
        bytes: Bytes,
        /// How its chunks are sized; as the device sizes them unless told otherwise if none.
        sizing: Option<Sizing>,
    },
    /// So many chunks of one size.
    Chunks {
        /// The size, a multiple of the granularity.
        size: Bytes,
        /// How many.
        count: u64,
    },
}

impl Prewarm {
    /// What a buffer takes that grows from nothing to `bytes`, with the device's own way of sizing chunks.
    #[must_use]
    pub const fn span(bytes: Bytes) -> Self {
        Self::Span { bytes, sizing: None }
    }
}

/// What a [`Device::prewarm`](crate::Device::prewarm) did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Prewarmed {
    /// What was made.
    pub made: Bytes,
    /// In how many chunks.
    pub chunks: u64,
    /// What was kept already.
    pub found: Bytes,
    /// What is not there.
    pub missing: Bytes,
    /// Why not, where something is missing: the pool may not keep as much, or memory or open files ran out.
    pub why: Option<String>,
}

impl fmt::Display for Prewarmed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} made in {} chunks, {} were there", self.made, self.chunks, self.found)?;
        match &self.why {
            Some(why) => write!(f, ", {} are missing: {why}", self.missing),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watermarks_stay_in_their_order_and_below_the_limit() {
        let mib = Bytes::mib;
        let policy = PoolPolicy::from(mib(10));
        assert_eq!((policy.ceiling(), policy.trims_to(u64::MAX)), (10 << 20, None));
        assert!(policy.takes(4 << 20, 6 << 20) && !policy.takes(4 << 20, 7 << 20));
        let marked = policy.watermarks(mib(3), mib(6));
        assert_eq!((marked.trims_to(6 << 20), marked.trims_to(7 << 20)), (None, Some(3 << 20)));
        assert!(marked.takes(10 << 20, 6 << 20) && !marked.takes(11 << 20, 0));
        let crossed = policy.watermarks(mib(8), mib(6));
        assert_eq!(crossed.trims_to(7 << 20), Some(6 << 20));
        let beyond = policy.watermarks(mib(40), mib(60));
        assert_eq!((beyond.trims_to(10 << 20), beyond.trims_to(11 << 20)), (None, Some(10 << 20)));
        assert_eq!(PoolPolicy::new().or_keep(5).or_keep(7).limit(), 5);
    }
}
