//! Chunks that go from one buffer to another without passing through the driver or a pool.
//!
//! ```text
//! lender     | 2 | 2 | .. | 64 | 64 | 128 | 128 |            the last two go, in their order
//! borrower   | 2 | 2 | 2 | 2 | 128 | 128 |                   behind what it has
//! ```
//! A borrowed chunk keeps its size, whatever the ladder would have in its place: where chunks of several sizes may lie side
//! by side, everything is counted by the chunks that are there, and what the borrower maps behind them follows the ladder
//! again. It gives up whole chunks only, so more may lie idle at its end than the ladder promises. Where all chunks of a span
//! have one size, only chunks of that size come in.

use std::sync::{Arc, Weak};

use super::segmented::Segmented;
use super::span::{Core, Span};
use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::pool::{Chunk, Sizing};

/// Which buffer took part in a loan. Keeps nothing alive that costs memory of a device.
#[derive(Clone, Debug)]
pub(crate) struct Party(Weak<Span>);

impl Party {
    pub(crate) fn of(backing: &Segmented) -> Self {
        Self(Arc::downgrade(&backing.span))
    }

    pub(crate) fn is(&self, backing: &Segmented) -> bool {
        core::ptr::eq(self.0.as_ptr(), Arc::as_ptr(&backing.span))
    }
}

/// What went over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handed {
    /// Where it begins at the taker, in bytes from its base.
    pub(crate) at: u64,
    /// How much it is.
    pub(crate) bytes: u64,
    /// In how many chunks.
    pub(crate) chunks: usize,
    /// What the giver gave up besides.
    pub(crate) released: u64,
}

impl Segmented {
    /// Gives up whole chunks above `bytes`. The first `most` bytes of them, as far as they are whole chunks, are mapped
    /// behind what `taker` has; the rest goes to the pool.
    ///
    /// # Safety
    /// No work on the device and no reference of the host touches memory of this buffer from `bytes` on.
    ///
    /// # Errors
    /// [`Error::NotLent`] with the reason; what the driver says. Then nothing has changed, or, with
    /// [`Error::Rollback`], this buffer has less.
    pub(crate) unsafe fn hand_over(&mut self, bytes: u64, most: u64, taker: &mut Self) -> Result<Handed> {
        let (mut from, mut to) = (self.core(), taker.core());
        let committed = from.committed();
        let start = from.chunk_end(bytes).min(committed);
        let first = from.range.number_at(start);
        let mut end = start;
        let goes = |chunk: &&Chunk| {
            let goes = end < committed && chunk.size() <= most - (end - start);
            end += if goes { chunk.size() } else { 0 };
            goes
        };
        let chunks = from.range.held().iter().skip(first).take_while(goes).count();
        let handed = end - start;
        if let Some(why) = taker.why_not(&to, to.committed(), &from.range.held()[first..first + chunks], handed) {
            return Err(Error::NotLent { asked: Bytes::new(handed), why });
        }
        // What waits for events lies above and goes first: the caller does not speak for it. At the taker it would lie
        // between.
        let flushed = from.flush()?;
        if chunks > 0 {
            to.flush()?;
        }
        let at = to.mapped();
        from.tell_unmapping(start);
        // SAFETY: the contract is the same.
        let moved = unsafe { from.hand(start, end, &mut to) };
        from.tell_mapped(start);
        let rest = moved?;
        // Where nothing comes, what lies there is what the taker has mapped ahead, and stays that.
        if chunks > 0 {
            to.tell_mapped(at);
            // Before others may take it for memory that is mapped ahead.
            to.publish();
            let mapped = to.mapped();
            taker.span.grant(mapped);
        }
        let released = flushed + from.keep(rest);
        Ok(Handed { at, bytes: handed, chunks, released })
    }

    /// Why these chunks, `bytes` together, cannot come here.
    fn why_not(&self, core: &Core, committed: u64, chunks: &[Chunk], bytes: u64) -> Option<String> {
        if chunks.is_empty() {
            return None;
        }
        let props = self.pool.props();
        if chunks.iter().any(Chunk::is_shared) {
            return Some("a chunk of them was exported, and another process may have it".to_owned());
        }
        if let Some(chunk) = chunks.iter().find(|chunk| chunk.props() != props) {
            return Some(format!("they have the properties {:?}, and the borrower's have {props:?}", chunk.props()));
        }
        if let Sizing::Uniform(size) = self.ladder.rule()
            && let Some(chunk) = chunks.iter().find(|chunk| chunk.bytes() != size)
        {
            return Some(format!(
                "the borrower takes chunks of {size} only, and one has {}; build both with the same uniform size",
                chunk.bytes()
            ));
        }
        // What waits for events at the end goes before the others come.
        let room = core.range.usable().saturating_sub(committed);
        (room < bytes).then(|| {
            format!("the borrower has addresses for {} more; build it with a larger max_len", Bytes::new(room))
        })
    }
}

impl Core {
    /// Moves the chunks between `start` and `end` behind those of `to`. Those above come back.
    ///
    /// # Safety
    /// As for [`ReservedRange::take_from`](crate::ReservedRange::take_from), from `start` on.
    unsafe fn hand(&mut self, start: u64, end: u64, to: &mut Self) -> Result<Vec<Chunk>> {
        // SAFETY: the contract is the same.
        let rest = match unsafe { self.range.take_from(Bytes::new(end)) } {
            Ok(rest) => rest,
            Err(rejected) => {
                self.keep(rejected.chunks);
                return Err(rejected.error);
            }
        };
        // SAFETY: as above.
        let (back, lost, error) = match unsafe { self.range.take_from(Bytes::new(start)) } {
            Ok(chunks) => {
                let order: Vec<_> = chunks.iter().map(Chunk::handle).collect();
                let Err(mut rejected) = to.range.append(chunks) else { return Ok(rest) };
                // One that got stuck over there is missing, and those behind it have lost their place.
                let whole = rejected.chunks.iter().zip(&order).take_while(|(chunk, was)| chunk.handle() == **was);
                let whole = whole.count();
                let lost = rejected.chunks.split_off(whole);
                (rejected.chunks, lost, rejected.error)
            }
            Err(rejected) => (Vec::new(), rejected.chunks, rejected.error),
        };
        let mut back = self.range.put_back(back, error);
        back.chunks.extend(lost);
        if self.mapped() == end {
            back = self.range.put_back(rest, back.error);
        } else {
            back.chunks.extend(rest);
        }
        self.keep(back.chunks);
        Err(back.error)
    }
}
