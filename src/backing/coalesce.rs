//! Few large chunks in the place of many small ones.
//!
//! ```text
//! before   | 2 | 2 | 2 | 2 | 2 | 2 | 2 | 2 | 2 | 2 | 2 | 2 | 2 | 2 |
//! after    | 2 | 2 | 2 | 2 | 2 | 2 | 2 | 2 |   4   |   4   |   4   |    as the ladder would have them there
//! ```
//! One run of small chunks after the other is copied on the device into a chunk of its size, which then takes its place at
//! the same address. The small ones go back to the driver: their open files are what one wants to be rid of.

use core::fmt;
use core::ops::Range;

use super::hooks::Told;
use super::{Backing, Segmented};
use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::pool::{Chunk, Ladder, Taken};
use crate::range::{Rejected, ReservedRange};

/// What a [`coalesce`](crate::GrowableBuffer::coalesce) did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Coalesced {
    /// How many chunks there were.
    pub before: usize,
    /// How many there are.
    pub after: usize,
    /// How much was copied.
    pub copied: Bytes,
    /// Why there are more than need be, where there are.
    pub why: Option<String>,
}

impl Coalesced {
    /// How many chunks fewer there are, and so open files where each keeps one.
    #[must_use]
    pub const fn saved(&self) -> usize {
        self.before.saturating_sub(self.after)
    }
}

impl fmt::Display for Coalesced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} chunks became {}, {} copied", self.before, self.after, self.copied)?;
        match &self.why {
            Some(why) => write!(f, ": {why}"),
            None => Ok(()),
        }
    }
}

/// Chunks that can be one.
struct Run {
    /// Their numbers.
    chunks: Range<usize>,
    /// Where they begin, in bytes from the base.
    start: u64,
    bytes: u64,
}

impl Segmented {
    /// Puts larger chunks in the place of runs of small ones, as the ladder would have them there.
    ///
    /// # Safety
    /// No work on the device and no reference of the host touches the memory at all.
    ///
    /// # Errors
    /// The run that failed is as it was, unless the error is [`Error::Rollback`]; those before it are done.
    pub(crate) unsafe fn coalesce(&mut self) -> Result<Coalesced> {
        // Not those that are mapped ahead, or wait for events.
        let count = |this: &Self| this.chunks().len();
        let Some(ladder) = self.ladder.steps() else {
            let (chunks, why) = (count(self), "this device takes one chunk size per span".to_owned());
            return Ok(Coalesced { before: chunks, after: chunks, copied: Bytes::ZERO, why: Some(why) });
        };
        // What waits for events cannot be copied, and is to go anyway.
        self.core().flush()?;
        let before = count(self);
        let (mut first, mut most, mut copied, mut why) = (0, u64::MAX, 0, None);
        while let Some(run) = self.next_run(&ladder, first, most) {
            // SAFETY: the contract is the same.
            match unsafe { self.join(&run) } {
                Ok(()) => {
                    copied += run.bytes;
                    first = run.chunks.start + 1;
                }
                Err(error) if error.is_shortage() => {
                    // What is smaller may still fit.
                    most = run.bytes / 2;
                    why.get_or_insert(error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Coalesced { before, after: count(self), copied: Bytes::new(copied), why })
    }

    /// The next run from chunk `first` on that can be one chunk of at most `most` bytes.
    fn next_run(&self, ladder: &Ladder, first: usize, most: u64) -> Option<Run> {
        let core = self.core();
        let chunks = core.range.held();
        let mut start = chunks.iter().take(first).map(Chunk::size).sum();
        for (number, chunk) in chunks.iter().enumerate().skip(first) {
            let room = ladder.size_at(start, ladder.span()).min(most);
            let mut bytes = 0;
            let mut best = 0..0;
            // What another process has stays what it is.
            for (next, chunk) in chunks.iter().enumerate().skip(number).take_while(|(_, chunk)| !chunk.is_shared()) {
                if bytes + chunk.size() > room {
                    break;
                }
                bytes += chunk.size();
                if next > number && ladder.piece(bytes) == Some(bytes) {
                    best = number..next + 1;
                }
            }
            if !best.is_empty() {
                let bytes = chunks[best.clone()].iter().map(Chunk::size).sum();
                return Some(Run { chunks: best, start, bytes });
            }
            start += chunk.size();
        }
        None
    }

    /// Makes one chunk of a run.
    ///
    /// # Safety
    /// As for [`coalesce`](Self::coalesce).
    unsafe fn join(&mut self, run: &Run) -> Result<()> {
        let Taken { chunk, fresh } = self.pool.take_one(run.bytes)?;
        let undo = |chunks: Vec<Chunk>| self.pool.undo_take(chunks.into_iter().map(|chunk| Taken { chunk, fresh }));
        let chunk = match self.filled(chunk, run) {
            Ok(chunk) => chunk,
            Err(rejected) => {
                undo(rejected.chunks);
                return Err(rejected.error);
            }
        };
        let mut core = self.core();
        // Those above stay mapped, and are nobody's concern.
        let above = core.range.part(run.chunks.end);
        core.tell_unmapping(run.start);
        // SAFETY: the caller promises that nothing touches the memory.
        let replaced = unsafe { core.range.replace_from(run.start, vec![chunk]) };
        core.tell_mapped(run.start);
        let lost = match core.range.join(above) {
            Ok(()) => Vec::new(),
            Err(above) => {
                core.tell_of(above.chunks(self.base), Told::Unmapping);
                // SAFETY: the caller promises that nothing touches the memory.
                unsafe { core.range.unmap_parted(above) }
            }
        };
        core.keep(lost);
        drop(core);
        match replaced {
            Ok(old) => {
                old.into_iter().for_each(|chunk| self.pool.discard(chunk));
                Ok(())
            }
            Err(rejected) => {
                // Where putting the old ones back failed, they are among these, and the pool keeps what it can.
                if matches!(rejected.error, Error::Rollback { .. }) {
                    rejected.chunks.into_iter().for_each(|chunk| self.pool.put(chunk));
                } else {
                    undo(rejected.chunks);
                }
                Err(rejected.error)
            }
        }
    }

    /// Copies what a run holds into `chunk`, through a span that exists only for that.
    fn filled(&self, chunk: Chunk, run: &Run) -> Result<Chunk, Box<Rejected>> {
        let card = self.card();
        let mut side = match ReservedRange::reserve(card, run.bytes, self.granularity) {
            Ok(side) => side,
            Err(error) => return Err(Rejected::new(vec![chunk], error)),
        };
        side.append(vec![chunk])?;
        // SAFETY: both sides are mapped with access for so many bytes and do not overlap; without a stream the copy is
        // over when this returns.
        let copied = unsafe { card.gate().copy_within(side.base(), self.base + run.start, run.bytes, None) };
        // SAFETY: the copy is over, and nobody else knows of the side span.
        let mut chunks = unsafe { side.take_from(Bytes::ZERO) }?;
        match (copied, chunks.pop()) {
            (Ok(()), Some(chunk)) => Ok(chunk),
            (copied, chunk) => {
                let error = copied.err().map_or(Error::ZeroLength { what: "a chunk" }, Error::from);
                Err(Rejected::new(chunk.into_iter().collect(), error))
            }
        }
    }
}
