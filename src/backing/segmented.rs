//! Chunks under a span: the backing that grows and shrinks in place.

use super::{Backing, Growth, Mode, Shrunk};
use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::pool::{Chunk, ChunkPool, Ladder, Sizing, Taken};
use crate::range::{MappedChunk, Rejected, ReservedRange};

/// A [`ReservedRange`] with a sizing rule and a pool.
#[derive(Debug)]
pub struct Segmented {
    range: ReservedRange,
    ladder: Ladder,
    pool: ChunkPool,
    granularity: u64,
}

impl Segmented {
    pub(crate) fn open(pool: &ChunkPool, ladder: Ladder, granularity: u64) -> Result<Self> {
        let range = ReservedRange::reserve(pool.card(), ladder.span(), granularity)?;
        Ok(Self { range, ladder, pool: pool.clone(), granularity })
    }

    fn shrunk(&self, released: u64, why: Option<String>) -> Shrunk {
        Shrunk { released: Bytes::new(released), committed: self.range.mapped(), why }
    }

    fn keep(&self, chunks: impl IntoIterator<Item = Chunk>) -> u64 {
        chunks.into_iter().fold(0, |sum, chunk| {
            let size = chunk.size();
            self.pool.put(chunk);
            sum + size
        })
    }

    /// Undoes a take of chunks that were made for it or not.
    fn put_back(&self, chunks: Vec<Chunk>, fresh: Vec<bool>) {
        self.pool.undo_take(chunks.into_iter().zip(fresh).map(|(chunk, fresh)| Taken { chunk, fresh }));
    }

    /// `[start, end)` of the chunk that `bytes` cuts in two, if it does.
    fn astride(&self, bytes: u64) -> Option<(u64, u64)> {
        let mut start = 0;
        self.range.chunks().find_map(|chunk| {
            let this = (start, start + chunk.bytes.get());
            start = this.1;
            (this.0 < bytes && bytes < this.1).then_some(this)
        })
    }

    /// A chunk of `live` bytes that holds what the buffer holds from `start` on.
    fn copy_of(&self, start: u64, live: u64) -> Result<Taken> {
        let mut taken = self.pool.take_run(core::iter::once(live))?;
        let Some(Taken { chunk, fresh }) = taken.pop() else {
            return Err(Error::ZeroLength { what: "a chunk" });
        };
        match self.fill_copy(chunk, start, live) {
            Ok(chunk) => Ok(Taken { chunk, fresh }),
            Err(rejected) => {
                self.pool.undo_take(rejected.chunks.into_iter().map(|chunk| Taken { chunk, fresh }));
                Err(rejected.error)
            }
        }
    }

    /// Copies `live` bytes from `start` into `chunk`, through a span that exists only for that.
    fn fill_copy(&self, chunk: Chunk, start: u64, live: u64) -> Result<Chunk, Box<Rejected>> {
        let card = self.pool.card();
        let mut side = match ReservedRange::reserve(card, live, self.granularity) {
            Ok(side) => side,
            Err(error) => return Err(Rejected::new(vec![chunk], error)),
        };
        side.append(vec![chunk])?;
        // SAFETY: both sides are mapped with access for `live` bytes and do not overlap; without a stream the copy is
        // over when this returns.
        let copied = unsafe { card.gate().copy_within(side.base(), self.range.base() + start, live, None) };
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

impl Backing for Segmented {
    fn mode(&self) -> Mode {
        Mode::Virtual
    }

    fn base(&self) -> u64 {
        self.range.base()
    }

    fn committed(&self) -> u64 {
        self.range.mapped().get()
    }

    fn reserved(&self) -> u64 {
        self.range.bytes().get()
    }

    fn moves(&self) -> u64 {
        0
    }

    fn sizing(&self) -> Option<Sizing> {
        Some(self.ladder.rule())
    }

    fn chunks(&self) -> Vec<MappedChunk> {
        self.range.chunks().collect()
    }

    fn grow(&mut self, bytes: u64) -> Result<Growth> {
        let from = self.committed();
        if bytes <= from {
            return Ok(Growth::nothing(from));
        }
        if bytes > self.range.usable() {
            return Err(Error::Blocked { asked: Bytes::new(bytes), usable: Bytes::new(self.range.usable()) });
        }
        let run = self.pool.take_run(self.ladder.sizes(from, bytes))?;
        let fresh: Vec<bool> = run.iter().map(|taken| taken.fresh).collect();
        match self.range.append(run.into_iter().map(|taken| taken.chunk).collect()) {
            Ok(()) => Ok(Growth { from, fresh, old_block: None }),
            Err(rejected) => {
                // Chunks that got stuck are not among those that came back; those before them are, in order, so the
                // pairing can only be off for a span that is blocked from now on.
                self.put_back(rejected.chunks, fresh);
                Err(rejected.error)
            }
        }
    }

    fn settle(&mut self, _: Growth) {}

    fn undo(&mut self, growth: Growth) -> Result<()> {
        if growth.is_nothing() {
            return Ok(());
        }
        // SAFETY: the memory was mapped by this growth, which nobody was told of.
        let (chunks, result) = match unsafe { self.range.take_from(Bytes::new(growth.from)) } {
            Ok(chunks) => (chunks, Ok(())),
            Err(rejected) => (rejected.chunks, Err(rejected.error)),
        };
        self.put_back(chunks, growth.fresh);
        result
    }

    fn would_release(&self, bytes: u64) -> u64 {
        let keep = self.astride(bytes).map_or(bytes, |(_, end)| end);
        self.committed().saturating_sub(keep)
    }

    unsafe fn shrink(&mut self, bytes: u64) -> Result<Shrunk> {
        // SAFETY: the caller promises that nothing touches memory from `bytes` on.
        match unsafe { self.range.take_from(Bytes::new(bytes)) } {
            Ok(chunks) => {
                let released = self.keep(chunks);
                Ok(self.shrunk(released, None))
            }
            Err(rejected) => {
                self.keep(rejected.chunks);
                Err(rejected.error)
            }
        }
    }

    unsafe fn shrink_exact(&mut self, bytes: u64) -> Result<Shrunk> {
        let Some(end) = bytes.checked_next_multiple_of(self.granularity) else {
            return Ok(self.shrunk(0, None));
        };
        let Some((start, _)) = self.astride(end) else {
            // SAFETY: the caller promises that nothing touches the memory.
            return unsafe { self.shrink(end) };
        };
        let copy = if self.ladder.mixes() {
            self.copy_of(start, end - start)
        } else {
            // SAFETY: the caller promises that nothing touches the memory.
            let mut shrunk = unsafe { self.shrink(end) }?;
            shrunk.why = Some("this device takes one chunk size per span, so the last chunk stays whole".to_owned());
            return Ok(shrunk);
        };
        let copy = match copy {
            Ok(copy) => copy,
            Err(error @ (Error::OutOfMemory(_) | Error::OutOfFiles(_) | Error::OutOfMaps(_))) => {
                // SAFETY: the caller promises that nothing touches the memory.
                let mut shrunk = unsafe { self.shrink(end) }?;
                let stay = shrunk.committed.get() - end;
                shrunk.why =
                    Some(format!("{} of the last chunk stay, for lack of room to copy: {error}", Bytes::new(stay)));
                return Ok(shrunk);
            }
            Err(error) => return Err(error),
        };
        // SAFETY: the caller promises that nothing touches the memory.
        let above = match unsafe { self.range.take_from(Bytes::new(end)) } {
            Ok(above) => above,
            Err(rejected) => {
                self.keep(rejected.chunks);
                self.pool.undo_take([copy]);
                return Err(rejected.error);
            }
        };
        let full = self.committed();
        let Taken { chunk, fresh } = copy;
        // SAFETY: the caller promises that nothing touches the memory.
        let rejected = match unsafe { self.range.replace_last(vec![chunk]) } {
            Ok(old) => {
                let released = self.keep(above) + self.keep(old) - (end - start);
                return Ok(self.shrunk(released, None));
            }
            Err(rejected) => rejected,
        };
        if self.committed() != full {
            // The old chunk could not be put back: what lay above it has lost its place.
            self.keep(rejected.chunks);
            self.keep(above);
            return Err(rejected.error);
        }
        self.pool.undo_take(rejected.chunks.into_iter().map(|chunk| Taken { chunk, fresh }));
        match self.range.append(above) {
            Ok(()) => Err(rejected.error),
            Err(again) => {
                self.keep(again.chunks);
                Err(again.error.after(rejected.error))
            }
        }
    }

    fn close(&mut self, idle: bool) -> Result<()> {
        let pool = self.pool.clone();
        self.range.tear_down(idle, |chunk| pool.put(chunk))
    }
}
