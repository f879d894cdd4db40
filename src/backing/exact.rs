//! Shrinking to the last granule: the chunk astride the new end is cut.
//!
//! ```text
//! start               end            stop
//!   |      lives       |  given up     |     one chunk of 1 GiB
//!   |   512   |64|16|8|2|                    five in its place, with what lived there
//! ```
//! A driver maps a chunk whole or not at all. So new ones take its place at the same address, and what lives there is
//! copied into them on the device. Meanwhile the old one is mapped aside: that takes one mapping more, where the new ones
//! would each take one.
//!
//! The new ones have sizes that the ladder makes, rather than being one of just the size needed. That would save a few
//! calls (some 50 us for each piece on an H200), but a chunk of 602 MiB fits nobody once it is given up: a pool would fill
//! up with such, and turn away what others can use. These fit, and may come from the pool themselves, where nothing has to
//! be made or scrubbed (2 ms per GiB there). There are at most nine, with granules of 2 MiB and chunks of up to 1 GiB.

use super::segmented::Segmented;
use super::span::Core;
use super::{Backing, Shrunk};
use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::pool::{Chunk, Taken};
use crate::range::ReservedRange;

/// A cut that was not made.
struct Uncut {
    /// The new chunks, which are not needed.
    pieces: Vec<Chunk>,
    /// Chunks that lost their place when undoing failed.
    lost: Vec<Chunk>,
    error: Error,
}

impl Segmented {
    /// [`Backing::shrink_exact`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn cut_to(&mut self, bytes: u64) -> Result<Shrunk> {
        let Some(end) = bytes.checked_next_multiple_of(self.granularity) else {
            return Ok(self.shrunk(0, 0, None));
        };
        let Some((start, stop)) = self.core().astride(end) else {
            // SAFETY: the caller promises that nothing touches the memory.
            return unsafe { self.shrink(end) };
        };
        // What waits lies above and goes first, so that what follows is all or nothing.
        let (flushed, ahead) = {
            let mut core = self.core();
            // The last chunk may have been mapped ahead in part, and that was not the buffer's.
            (core.flush()?, core.mapped() - core.committed())
        };
        let why = match self.uncuttable(start) {
            Some(why) => why.to_owned(),
            None => {
                let pieces = self.pool.take_run(self.ladder.pieces(end - start));
                // SAFETY: the caller promises that nothing touches the memory.
                match pieces.and_then(|pieces| unsafe { self.cut(pieces, start, end, stop) }) {
                    Ok((released, why)) => {
                        return Ok(self.shrunk(flushed + released.saturating_sub(ahead), 0, why));
                    }
                    Err(error) if error.is_shortage() => error.to_string(),
                    Err(error) => return Err(error),
                }
            }
        };
        // SAFETY: the caller promises that nothing touches the memory.
        let mut shrunk = unsafe { self.shrink(end) }?;
        let stay = Bytes::new(shrunk.committed.get() - end);
        shrunk.released = Bytes::new(shrunk.released.get() + flushed);
        shrunk.why = Some(format!("{stay} of the last chunk stay: {why}"));
        Ok(shrunk)
    }

    /// Why the chunk at `start` may not be cut.
    fn uncuttable(&self, start: u64) -> Option<&'static str> {
        if !self.ladder.mixes() {
            return Some("all chunks of this span have one size");
        }
        let core = self.core();
        let exported = core.range.held().get(core.range.number_at(start)).is_some_and(Chunk::is_shared);
        exported.then_some("it was exported, and another process may have it")
    }

    /// Puts `pieces` in the place of the chunk between `start` and `stop`, with what lives there up to `end`, and gives up
    /// that one and all above. Returns how much left, and what did not.
    ///
    /// # Safety
    /// As for [`Backing::shrink_exact`].
    unsafe fn cut(&self, pieces: Vec<Taken>, start: u64, end: u64, stop: u64) -> Result<(u64, Option<String>)> {
        let (pieces, fresh): (Vec<_>, Vec<_>) = pieces.into_iter().map(|taken| (taken.chunk, taken.fresh)).unzip();
        let mut side = match ReservedRange::reserve(self.card(), stop - start, self.granularity) {
            Ok(side) => side,
            Err(error) => {
                self.put_back(pieces, fresh);
                return Err(error);
            }
        };
        let mut core = self.core();
        core.tell_unmapping(start);
        // SAFETY: the contract is the same.
        let swapped = unsafe { core.swap(&mut side, pieces, start, end, stop) };
        core.tell_mapped(start);
        let above = match swapped {
            Ok(above) => above,
            Err(uncut) => {
                core.keep(uncut.lost);
                self.put_back(uncut.pieces, fresh);
                return Err(uncut.error);
            }
        };
        let mut old = 0;
        // The copy is over, and nobody else knows of the side span.
        let torn = side.tear_down(true, |chunk| {
            old += chunk.size();
            self.pool.put(chunk);
        });
        let released = (core.keep(above) + old).saturating_sub(end - start);
        let Err(error) = torn else { return Ok((released, None)) };
        tracing::warn!(device = %self.card().id(), %error, "a chunk was cut, and not all of the old one came back");
        Ok((released, (old == 0).then(|| format!("the chunk that was cut stays with the driver: {error}"))))
    }
}

impl Core {
    /// Moves the chunk between `start` and `stop` to `side`, puts `pieces` in its place and copies what lives there up to
    /// `end`. Those above come back.
    ///
    /// # Safety
    /// As for [`ReservedRange::take_from`], from `start` on.
    unsafe fn swap(
        &mut self,
        side: &mut ReservedRange,
        pieces: Vec<Chunk>,
        start: u64,
        end: u64,
        stop: u64,
    ) -> Result<Vec<Chunk>, Box<Uncut>> {
        // SAFETY: the contract is the same.
        let above = match unsafe { self.range.take_from(Bytes::new(end)) } {
            Ok(above) => above,
            Err(rejected) => return Err(Box::new(Uncut { pieces, lost: rejected.chunks, error: rejected.error })),
        };
        // SAFETY: as above.
        let moved = unsafe { self.range.take_from(Bytes::new(start)) }.and_then(|old| side.append(old));
        if let Err(rejected) = moved {
            return Err(self.unswap(pieces, rejected.chunks, above, stop, rejected.error));
        }
        let (pieces, error) = match self.range.append(pieces) {
            Ok(()) => {
                let gate = self.pool.card().gate();
                let to = self.range.base() + start;
                // SAFETY: both are mapped with access for at least so many bytes, in different spans; without a stream the
                // copy is over when this returns.
                let Err(error) = (unsafe { gate.copy_within(to, side.base(), end - start, None) }) else {
                    return Ok(above);
                };
                // SAFETY: the copy has failed, and nobody was told of the pieces.
                let (pieces, unmapped) = unsafe { self.range.take_or_leave(start) };
                let error = Error::from(error);
                let error = match unmapped {
                    Ok(()) => error,
                    Err(then) => Error::from(then).after(error),
                };
                (pieces, error)
            }
            Err(rejected) => (rejected.chunks, rejected.error),
        };
        // SAFETY: nobody else knows of the side span, and no copy is under way.
        let (old, error) = match unsafe { side.take_from(Bytes::ZERO) } {
            Ok(old) => (old, error),
            Err(rejected) => (rejected.chunks, rejected.error.after(error)),
        };
        Err(self.unswap(pieces, old, above, stop, error))
    }

    /// Puts the old chunk back in its place, which ends at `stop`, and those above it.
    fn unswap(
        &mut self,
        pieces: Vec<Chunk>,
        old: Vec<Chunk>,
        above: Vec<Chunk>,
        stop: u64,
        error: Error,
    ) -> Box<Uncut> {
        let mut back = self.range.put_back(old, error);
        if self.mapped() == stop {
            back = self.range.put_back(above, back.error);
        } else {
            // They have lost their place.
            back.chunks.extend(above);
        }
        Box::new(Uncut { pieces, lost: back.chunks, error: back.error })
    }
}
