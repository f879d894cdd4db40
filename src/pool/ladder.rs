//! How large the chunk at a position of a span is.
//!
//! A driver call costs about the same for 2 MiB as for 64 MiB, so few large chunks are fast; but memory comes and goes
//! in whole chunks, so small ones waste less. The ladder takes both: small chunks at the start of a span, larger ones
//! the further in, each at most an eighth of what lies before it.
//!
//! ```text
//! position   0        16 MiB    32 MiB         64 MiB        128 MiB               8 GiB
//! chunk      | 2 2 2 2 2 2 2 2 | 2 2 2 2 .. 2 | 4 4 4 .. 4  | 8 8 8 8 .. 8 | ..  | 1 GiB | 1 GiB | ..
//! ```

use core::fmt;
use core::str::FromStr;

use crate::bytes::Bytes;
use crate::driver::Quirks;
use crate::error::{Error, Result};

/// The rule that gives a chunk's size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sizing {
    /// Chunks grow with the position in the span: the largest power of two that is at most an eighth of the position,
    /// no less than the granularity and no more than the device's largest sound chunk. Boundaries depend on the
    /// position alone, so pooled chunks fit again whatever came before, and at most an eighth of what is committed, or one
    /// smallest chunk, lies idle. Exact shrinks, which cut a chunk, and loans, which bring chunks of other sizes, move the
    /// boundaries of what is mapped behind them; sizes stay those of the ladder.
    #[default]
    Ladder,
    /// All chunks have this size, a multiple of the granularity.
    Uniform(Bytes),
    /// One chunk of just the size each growth needs, rounded to the granularity. No slack, but pooled chunks seldom fit:
    /// buffers that come and go may hold as much again in the pool. Give such a device a small pool.
    Exact,
}

/// As [`Sizing::from_str`] reads it.
impl fmt::Display for Sizing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ladder => f.pad("ladder"),
            Self::Uniform(size) => f.pad(&format!("uniform:{size}")),
            Self::Exact => f.pad("exact"),
        }
    }
}

/// Reads `ladder`, `exact` and `uniform:SIZE`, the size as [`Bytes::parse`] takes it.
///
/// ```
/// use growspan::{Bytes, Sizing};
///
/// assert_eq!("uniform:8MiB".parse(), Ok(Sizing::Uniform(Bytes::mib(8))));
/// assert_eq!("steep".parse::<Sizing>().unwrap_err().to_string(), "\"steep\" is none of ladder, uniform:SIZE, exact");
/// ```
impl FromStr for Sizing {
    type Err = UnknownSizing;

    fn from_str(text: &str) -> Result<Self, UnknownSizing> {
        let unknown = || UnknownSizing { text: text.to_owned() };
        match text.split_once(':') {
            None if text == "ladder" => Ok(Self::Ladder),
            None if text == "exact" => Ok(Self::Exact),
            Some(("uniform", size)) => Bytes::parse(size).map(Self::Uniform).ok_or_else(unknown),
            _ => Err(unknown()),
        }
    }
}

/// A text that names no sizing policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownSizing {
    text: String,
}

impl fmt::Display for UnknownSizing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is none of ladder, uniform:SIZE, exact", self.text)
    }
}

impl core::error::Error for UnknownSizing {}

impl Sizing {
    /// How many chunks `bytes` from the start of a span take. `Exact` counts as one growth.
    #[must_use]
    pub fn chunks_for(self, bytes: Bytes, granularity: Bytes) -> u64 {
        let granularity = granularity.get().max(1);
        let max_chunk = Quirks::default().max_chunk.get().max(granularity);
        let rule = match self {
            Self::Uniform(size) => Self::Uniform(Bytes::new(size.get().max(granularity))),
            other => other,
        };
        Ladder { rule, granularity, max_chunk, span: u64::MAX, one_size: false }.chunks_for(bytes.get())
    }
}

/// A sizing policy made definite for one span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ladder {
    rule: Sizing,
    granularity: u64,
    max_chunk: u64,
    span: u64,
    /// Whether the device takes only one chunk size per span.
    one_size: bool,
}

impl Ladder {
    /// The policy for a span of at least `bytes` on a device with these quirks, where no more than `files` chunks may
    /// exist (`None` where chunks keep no open file). The span may come out larger, so that all chunks are whole.
    pub(crate) fn new(
        sizing: Sizing,
        bytes: u64,
        granularity: u64,
        quirks: &Quirks,
        files: Option<u64>,
    ) -> Result<Self> {
        let max_chunk = quirks.max_chunk.get().max(granularity);
        let rule = match sizing {
            Sizing::Uniform(size) => {
                let size = size.get();
                if size == 0 || size % granularity != 0 || size > max_chunk {
                    return Err(Error::ChunkSize {
                        asked: Bytes::new(size),
                        granularity: Bytes::new(granularity),
                        max: Bytes::new(max_chunk),
                    });
                }
                sizing
            }
            Sizing::Ladder | Sizing::Exact if quirks.uniform_chunks_only => {
                Sizing::Uniform(Bytes::new(uniform_size(bytes, granularity, max_chunk, files)))
            }
            Sizing::Ladder | Sizing::Exact => sizing,
        };
        let unit = match rule {
            Sizing::Uniform(size) => size.get(),
            _ => granularity,
        };
        let span =
            bytes.checked_next_multiple_of(unit).ok_or(Error::Overflow { what: "a span", count: bytes, size: 1 })?;
        Ok(Self { rule, granularity, max_chunk, span, one_size: quirks.uniform_chunks_only })
    }

    /// The same rule for a span without an end.
    pub(crate) fn without_end(&self) -> Self {
        Self { span: u64::MAX, ..*self }
    }

    /// The ladder on the same span, whatever its own rule; none where the device takes only one chunk size per span.
    pub(crate) fn steps(&self) -> Option<Self> {
        (!self.one_size).then_some(Self { rule: Sizing::Ladder, ..*self })
    }

    /// The size of the span, in bytes.
    pub(crate) const fn span(&self) -> u64 {
        self.span
    }

    /// The rule in force, which on a device that wants one size is `Uniform` whatever was asked for.
    pub(crate) const fn rule(&self) -> Sizing {
        self.rule
    }

    /// Whether chunks of any size may lie side by side.
    pub(crate) const fn mixes(&self) -> bool {
        !matches!(self.rule, Sizing::Uniform(_))
    }

    /// The size of the chunk at `position`, when the span is to be mapped up to `target` (both in bytes, `position`
    /// below `target`, `target` within the span).
    pub(crate) fn size_at(&self, position: u64, target: u64) -> u64 {
        let size = match self.rule {
            Sizing::Ladder => match (position / 8).checked_ilog2() {
                Some(log) => (1 << log).clamp(self.granularity, self.max_chunk),
                None => self.granularity,
            },
            Sizing::Uniform(size) => size.get(),
            Sizing::Exact => {
                let wanted = target - position;
                wanted.checked_next_multiple_of(self.granularity).unwrap_or(wanted).min(self.max_chunk)
            }
        };
        size.min(self.span - position)
    }

    /// The sizes that map the span from `from` up to at least `target`.
    pub(crate) fn sizes(&self, from: u64, target: u64) -> impl Iterator<Item = u64> + use<> {
        let ladder = *self;
        let mut position = from;
        core::iter::from_fn(move || {
            if position >= target {
                return None;
            }
            let size = ladder.size_at(position, target);
            position += size;
            Some(size)
        })
    }

    /// The sizes of the chunks that a chunk is cut into, `bytes` together: such as other spans take too, the largest
    /// first.
    pub(crate) fn pieces(&self, bytes: u64) -> impl Iterator<Item = u64> + use<> {
        let ladder = *self;
        let mut left = bytes;
        core::iter::from_fn(move || {
            let size = ladder.piece(left)?;
            left -= size;
            Some(size)
        })
    }

    /// The largest chunk of at most `bytes` (a multiple of the granularity) that the ladder makes anywhere; of just that
    /// size where chunks have any.
    pub(crate) fn piece(&self, bytes: u64) -> Option<u64> {
        let log = (bytes / self.granularity).checked_ilog2()?;
        let size = if matches!(self.rule, Sizing::Exact) { bytes } else { self.granularity << log };
        Some(size.min(self.max_chunk))
    }

    /// How many chunks lie under the first `bytes`.
    fn chunks_for(&self, bytes: u64) -> u64 {
        let mut position = 0;
        let mut chunks = 0;
        while position < bytes {
            let size = self.size_at(position, bytes);
            let steady = size >= self.max_chunk || !matches!(self.rule, Sizing::Ladder);
            if steady {
                return chunks + (bytes - position).div_ceil(size);
            }
            position += size;
            chunks += 1;
        }
        chunks
    }
}

/// The one chunk size for a span on a device that takes only one: small enough to waste little (a 256th of the span),
/// large enough that the span does not spend more than a quarter of the open files there are.
pub(crate) fn uniform_size(span: u64, granularity: u64, max_chunk: u64, files: Option<u64>) -> u64 {
    let by_waste = span / 256;
    let by_files = files.map_or(0, |files| span.div_ceil((files / 4).max(1)));
    let wanted = by_waste.max(by_files).max(granularity);
    // A power of two above the granularity, so that spans of similar size share their pooled chunks.
    let mut size = granularity;
    while size < wanted && size.saturating_mul(2) <= max_chunk {
        size *= 2;
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn ladder(sizing: Sizing, bytes: u64) -> Ladder {
        Ladder::new(sizing, bytes, 2 * MIB, &Quirks::default(), None).unwrap()
    }

    #[test]
    fn chunks_grow_with_the_position_and_waste_at_most_an_eighth() {
        let ladder = ladder(Sizing::Ladder, 64 * GIB);
        let mut position = 0;
        for size in ladder.sizes(0, 64 * GIB) {
            assert!(size.is_power_of_two() && (2 * MIB..=GIB).contains(&size), "{size} at {position}");
            assert!(size == 2 * MIB || size <= position / 8, "{size} at {position}");
            position += size;
        }
        assert_eq!(position, 64 * GIB);
        let chunks = ladder.sizes(0, 64 * GIB).count();
        assert_eq!(chunks, 136, "as counted on an H200 with raw calls");
        assert_eq!(Sizing::Ladder.chunks_for(Bytes::gib(64), Bytes::mib(2)), 136);
    }

    #[test]
    fn boundaries_do_not_depend_on_history() {
        let ladder = ladder(Sizing::Ladder, GIB);
        let whole: Vec<u64> = ladder.sizes(0, GIB).collect();
        let mut stepwise = Vec::new();
        let mut position = 0;
        for target in (1..=512).map(|n| n * 2 * MIB) {
            for size in ladder.sizes(position, target) {
                stepwise.push(size);
                position += size;
            }
        }
        assert_eq!(whole, stepwise);
    }

    #[test]
    fn the_last_chunk_ends_with_the_span() {
        let ladder = ladder(Sizing::Ladder, 101 * MIB);
        assert_eq!(ladder.span(), 102 * MIB);
        assert_eq!(ladder.sizes(0, 102 * MIB).sum::<u64>(), 102 * MIB);
        let uniform =
            Ladder::new(Sizing::Uniform(Bytes::mib(8)), 101 * MIB, 2 * MIB, &Quirks::default(), None).unwrap();
        assert_eq!(uniform.span(), 104 * MIB, "whole chunks only");
    }

    #[test]
    fn exact_makes_one_chunk_a_growth() {
        let ladder = ladder(Sizing::Exact, 8 * GIB);
        assert_eq!(ladder.sizes(0, 5 * MIB).collect::<Vec<_>>(), [6 * MIB]);
        assert_eq!(ladder.sizes(6 * MIB, 6 * MIB + 1).collect::<Vec<_>>(), [2 * MIB]);
        assert_eq!(ladder.sizes(0, 3 * GIB).collect::<Vec<_>>(), [GIB, GIB, GIB]);
    }

    #[test]
    fn a_device_that_wants_one_size_gets_one_chosen_from_span_and_files() {
        let quirks = Quirks { uniform_chunks_only: true, max_chunk: Bytes::mib(256), ..Quirks::default() };
        let size = |span, files| {
            let ladder = Ladder::new(Sizing::Ladder, span, 2 * MIB, &quirks, files).unwrap();
            assert!(!ladder.mixes());
            ladder.size_at(0, span)
        };
        assert_eq!(size(100 * MIB, None), 2 * MIB);
        assert_eq!(size(24 * GIB, None), 128 * MIB);
        assert_eq!(size(24 * GIB, Some(900)), 128 * MIB);
        assert_eq!(size(8 * GIB, Some(64)), 256 * MIB, "512 MiB would save files, and is not sound there");
    }

    #[test]
    fn pieces_are_few_and_of_sizes_that_fit_elsewhere() {
        let mixed = ladder(Sizing::Ladder, 64 * GIB);
        assert_eq!(mixed.pieces(602 * MIB).collect::<Vec<_>>(), [512, 64, 16, 8, 2].map(|mib| mib * MIB));
        assert_eq!(mixed.pieces(0).count(), 0);
        for granules in 1..512 {
            let pieces: Vec<u64> = mixed.pieces(granules * 2 * MIB).collect();
            assert_eq!(pieces.iter().sum::<u64>(), granules * 2 * MIB);
            assert!(pieces.len() <= 9 && pieces.iter().all(|piece| piece.is_power_of_two()), "{pieces:?}");
        }
        assert_eq!(ladder(Sizing::Exact, 8 * GIB).pieces(602 * MIB).collect::<Vec<_>>(), [602 * MIB]);
    }

    #[test]
    fn counts_at_the_edges() {
        let granularity = Bytes::mib(2);
        for sizing in [Sizing::Ladder, Sizing::Exact, Sizing::Uniform(granularity)] {
            assert_eq!(sizing.chunks_for(Bytes::ZERO, granularity), 0);
            assert_eq!(sizing.chunks_for(Bytes::new(1), granularity), 1);
        }
        assert_eq!(Sizing::Uniform(granularity).chunks_for(Bytes::gib(24), granularity), 12_288);
        assert!(Sizing::Ladder.chunks_for(Bytes::new(u64::MAX), granularity) > 1 << 33, "counted, not walked");
        for bad in [0, MIB, 3 * MIB, 2 * GIB] {
            let error = Ladder::new(Sizing::Uniform(Bytes::new(bad)), GIB, 2 * MIB, &Quirks::default(), None);
            assert!(matches!(error, Err(Error::ChunkSize { .. })), "{bad}");
        }
        assert!(matches!(
            Ladder::new(Sizing::Ladder, u64::MAX, 2 * MIB, &Quirks::default(), None),
            Err(Error::Overflow { .. })
        ));
    }
}
