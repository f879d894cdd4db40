//! Chunks under a span: the backing that grows and shrinks in place.

use core::fmt;
use core::panic::AssertUnwindSafe;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::retire::RetireList;
use super::{Backing, Growth, Mode, Shrunk};
use crate::bytes::Bytes;
use crate::card::{Card, Drain, Orphan, not_idle};
use crate::error::{Error, Result};
use crate::pool::{Chunk, ChunkPool, Ladder, Sizing, Taken};
use crate::quiesce::Event;
use crate::range::{MappedChunk, ReservedRange};

/// What is told of chunks as they come and go, for libraries that register device memory (NCCL, UCX, GPUDirect).
///
/// Called on the thread that grows, shrinks or drops the buffer, or on one that gives up memory whose event has passed,
/// with the buffer's memory locked: do not call its device from here. A panic is logged and goes no further.
pub trait MapHooks: Send + Sync {
    /// The chunk was mapped and is accessible.
    fn mapped(&self, chunk: MappedChunk) {
        let _ = chunk;
    }

    /// The chunk is about to be unmapped. Should a shrink fail, it stays mapped and `mapped` is called for it again;
    /// nothing is said of one that a close or a drop had to leave mapped.
    fn unmapping(&self, chunk: MappedChunk) {
        let _ = chunk;
    }
}

/// A [`ReservedRange`] with a sizing rule and a pool.
pub struct Segmented {
    pub(super) core: Arc<Mutex<Core>>,
    pub(super) ladder: Ladder,
    pub(super) pool: ChunkPool,
    pub(super) granularity: u64,
    pub(super) base: u64,
}

/// What a thread that gives up memory for others may reach too.
pub(super) struct Core {
    pub(super) range: ReservedRange,
    retiring: RetireList,
    pub(super) pool: ChunkPool,
    hooks: Option<Arc<dyn MapHooks>>,
}

impl Core {
    /// What the buffer has: all that is mapped and does not wait to be unmapped.
    pub(super) fn committed(&self) -> u64 {
        self.retiring.start().unwrap_or(self.mapped())
    }

    pub(super) fn mapped(&self) -> u64 {
        self.range.mapped().get()
    }

    /// `[start, end)` of the chunk that `bytes` cuts in two, if it does.
    pub(super) fn astride(&self, bytes: u64) -> Option<(u64, u64)> {
        let mut start = 0;
        self.range.chunks().find_map(|chunk| {
            let this = (start, start + chunk.bytes.get());
            start = this.1;
            (this.0 < bytes && bytes < this.1).then_some(this)
        })
    }

    /// The end of the chunk that `bytes` lies in.
    pub(super) fn chunk_end(&self, bytes: u64) -> u64 {
        self.astride(bytes).map_or(bytes, |(_, end)| end)
    }

    pub(super) fn tell_unmapping(&self, from: u64) {
        self.tell(from, |hooks, chunk| hooks.unmapping(chunk));
    }

    pub(super) fn tell_mapped(&self, from: u64) {
        self.tell(from, |hooks, chunk| hooks.mapped(chunk));
    }

    /// Tells of the chunks that begin at or above `from`.
    fn tell(&self, from: u64, what: impl Fn(&dyn MapHooks, MappedChunk)) {
        let from = self.range.base() + from;
        self.tell_of(self.range.chunks().filter(|chunk| chunk.address >= from), what);
    }

    /// Tells of chunks. A hook that panics is logged and goes no further: memory is half way from here to there.
    pub(super) fn tell_of(&self, chunks: impl Iterator<Item = MappedChunk>, what: impl Fn(&dyn MapHooks, MappedChunk)) {
        let Some(hooks) = &self.hooks else { return };
        for chunk in chunks {
            let told = std::panic::catch_unwind(AssertUnwindSafe(|| what(&**hooks, chunk)));
            if told.is_err() {
                tracing::error!(device = %self.pool.card().id(), ?chunk, "a hook panicked");
            }
        }
    }

    /// Keeps chunks in the pool; returns how many bytes.
    pub(super) fn keep(&self, chunks: impl IntoIterator<Item = Chunk>) -> u64 {
        chunks.into_iter().fold(0, |sum, chunk| {
            let size = chunk.size();
            self.pool.put(chunk);
            sum + size
        })
    }

    /// Counts all memory that waits for events among the mapped again while `act` works, and what is left after it as
    /// waiting.
    fn with_all_mapped<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        let card = Arc::clone(self.pool.card());
        let accounts = card.accounts();
        accounts.retiring.move_to(&accounts.mapped, self.mapped() - self.committed());
        let result = act(self);
        accounts.mapped.move_to(&accounts.retiring, self.mapped() - self.committed());
        result
    }

    /// Unmaps whole chunks from `bytes` on and keeps them.
    ///
    /// # Safety
    /// As for [`ReservedRange::take_from`].
    unsafe fn give_up(&mut self, bytes: u64) -> Result<u64> {
        self.tell_unmapping(bytes);
        // SAFETY: the contract is the same.
        let taken = unsafe { self.range.take_from(Bytes::new(bytes)) };
        let mapped = self.mapped();
        self.retiring.cut(mapped);
        match taken {
            Ok(chunks) => Ok(self.keep(chunks)),
            Err(rejected) => {
                // Those that are still mapped were told to be going.
                self.tell_mapped(bytes);
                self.keep(rejected.chunks);
                Err(rejected.error)
            }
        }
    }

    /// Waits for all that waits, and gives it up.
    pub(super) fn flush(&mut self) -> Result<u64> {
        self.retiring.wait_for_all()?;
        match self.retiring.start() {
            // SAFETY: as in `drain`, after the waiting.
            Some(from) => self.with_all_mapped(|core| unsafe { core.give_up(from) }),
            None => Ok(0),
        }
    }

    /// [`drain`](Self::drain), where an error only means that memory stays.
    fn try_drain(&mut self) -> u64 {
        self.drain().unwrap_or_else(|error| {
            tracing::debug!(device = %self.pool.card().id(), %error, "memory that waited for an event stays");
            0
        })
    }

    /// Gives up what waits for events that have all passed.
    fn drain(&mut self) -> Result<u64> {
        let Some(from) = self.retiring.passed()? else { return Ok(0) };
        // SAFETY: whoever shrank the buffer recorded the events behind all work that touches the memory from there on,
        // and they have passed; the host let go of it when the length fell.
        self.with_all_mapped(|core| unsafe { core.give_up(from) })
    }
}

impl Drain for Mutex<Core> {
    fn drain(&self) -> (u64, bool) {
        // A span in use drains by itself, and it may be this thread that uses it.
        let Some(mut core) = self.try_lock() else { return (0, true) };
        let drained = core.try_drain();
        (drained, core.retiring.start().is_some())
    }
}

impl Segmented {
    pub(crate) fn open(
        pool: &ChunkPool,
        ladder: Ladder,
        granularity: u64,
        hooks: Option<Arc<dyn MapHooks>>,
    ) -> Result<Self> {
        let range = ReservedRange::reserve(pool.card(), ladder.span(), granularity)?;
        let base = range.base();
        let core = Core { range, retiring: RetireList::default(), pool: pool.clone(), hooks };
        Ok(Self { core: Arc::new(Mutex::new(core)), ladder, pool: pool.clone(), granularity, base })
    }

    pub(super) fn card(&self) -> &Arc<Card> {
        self.pool.card()
    }

    pub(super) fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }

    /// Lets others on the card give up for us what waits for events.
    fn register(&self) {
        let core: Arc<dyn Drain> = Arc::clone(&self.core) as Arc<dyn Drain>;
        self.card().add_retiring(Arc::downgrade(&core));
    }

    pub(super) fn shrunk(&self, released: u64, retiring: u64, why: Option<String>) -> Shrunk {
        let committed = Bytes::new(self.core().committed());
        Shrunk { released: Bytes::new(released), retiring: Bytes::new(retiring), committed, why }
    }

    /// Undoes a take of chunks that were made for it or not.
    pub(super) fn put_back(&self, chunks: Vec<Chunk>, fresh: Vec<bool>) {
        self.pool.undo_take(chunks.into_iter().zip(fresh).map(|(chunk, fresh)| Taken { chunk, fresh }));
    }
}

impl Backing for Segmented {
    fn mode(&self) -> Mode {
        Mode::Virtual
    }

    fn base(&self) -> u64 {
        self.base
    }

    fn committed(&self) -> u64 {
        self.core().committed()
    }

    fn reserved(&self) -> u64 {
        self.ladder.span()
    }

    fn moves(&self) -> u64 {
        0
    }

    fn sizing(&self) -> Option<Sizing> {
        Some(self.ladder.rule())
    }

    fn chunks(&self) -> Vec<MappedChunk> {
        let core = self.core();
        let end = self.base + core.committed();
        core.range.chunks().take_while(|chunk| chunk.address < end).collect()
    }

    fn grow(&mut self, bytes: u64) -> Result<Growth> {
        let mut core = self.core();
        let committed = core.committed();
        if bytes <= committed {
            return Ok(Growth::nothing(committed));
        }
        let usable = core.range.usable();
        if bytes > usable {
            return Err(Error::Blocked { asked: Bytes::new(bytes), usable: Bytes::new(usable) });
        }
        // What waits for an event is taken back first, which takes no driver call.
        let before = core.retiring.start().map(|_| core.retiring.clone());
        if before.is_some() {
            let end = core.chunk_end(bytes);
            core.with_all_mapped(|core| {
                core.retiring.reclaim(end);
                let mapped = core.mapped();
                core.retiring.cut(mapped);
            });
            self.card().accounts().mark_peak();
        }
        let from = core.mapped();
        // The pool may empty itself and drain other spans: not with this one locked.
        drop(core);
        let mut growth = Growth { from, fresh: Vec::new(), old_block: None, retiring: before };
        if bytes <= from {
            return Ok(growth);
        }
        let mapped = self.pool.take_run(self.ladder.sizes(from, bytes)).and_then(|run| {
            growth.fresh = run.iter().map(|taken| taken.fresh).collect();
            let mut core = self.core();
            let result = core.range.append(run.into_iter().map(|taken| taken.chunk).collect());
            if result.is_ok() {
                core.tell_mapped(from);
            }
            result.map_err(|rejected| {
                // Chunks that got stuck are not among those that came back; those before them are, in order, so the
                // pairing can only be off for a span that is blocked from now on.
                self.put_back(rejected.chunks, core::mem::take(&mut growth.fresh));
                rejected.error
            })
        });
        match mapped {
            Ok(()) => Ok(growth),
            Err(error) => {
                growth.fresh.clear();
                self.undo(growth)?;
                Err(error)
            }
        }
    }

    fn settle(&mut self, _: Growth) {}

    fn undo(&mut self, growth: Growth) -> Result<()> {
        let mut core = self.core();
        let mut result = Ok(());
        if !growth.fresh.is_empty() {
            core.tell_unmapping(growth.from);
            // SAFETY: the memory was mapped by this growth, which nobody was told of.
            let chunks = match unsafe { core.range.take_from(Bytes::new(growth.from)) } {
                Ok(chunks) => chunks,
                Err(rejected) => {
                    core.tell_mapped(growth.from);
                    result = Err(rejected.error);
                    rejected.chunks
                }
            };
            self.put_back(chunks, growth.fresh);
        }
        if let Some(retiring) = growth.retiring.filter(|_| result.is_ok()) {
            core.with_all_mapped(|core| {
                core.retiring = retiring;
                // Some of it may have passed and gone meanwhile.
                let mapped = core.mapped();
                core.retiring.cut(mapped);
            });
        }
        let waits = core.retiring.start().is_some();
        drop(core);
        if waits {
            self.register();
        }
        result
    }

    fn would_release(&self, bytes: u64) -> u64 {
        let core = self.core();
        core.mapped().saturating_sub(core.chunk_end(bytes))
    }

    unsafe fn shrink(&mut self, bytes: u64) -> Result<Shrunk> {
        let mut core = self.core();
        // What an earlier shrink left waiting lies above, and goes first: the caller does not speak for it.
        let mut released = core.flush()?;
        // SAFETY: the caller promises that nothing touches memory from `bytes` on.
        released += unsafe { core.give_up(bytes) }?;
        drop(core);
        Ok(self.shrunk(released, 0, None))
    }

    fn shrink_later(&mut self, bytes: u64, event: &Event) -> Result<Shrunk> {
        event.check(self.card())?;
        let mut core = self.core();
        let mut released = core.try_drain();
        let start = core.chunk_end(bytes);
        if start < core.committed() {
            if core.retiring.is_full() {
                tracing::warn!(device = %self.card().id(), "too much memory waits for events; waiting for the oldest");
                core.retiring.wait_for_oldest()?;
                released += core.try_drain();
            }
            core.with_all_mapped(|core| core.retiring.push(start, event.point()));
        }
        // An event that has passed already is not waited for.
        released += core.try_drain();
        let waiting = core.mapped() - core.committed();
        drop(core);
        if waiting > 0 {
            self.register();
        }
        Ok(self.shrunk(released, waiting, None))
    }

    unsafe fn shrink_exact(&mut self, bytes: u64) -> Result<Shrunk> {
        // SAFETY: the contract is the same.
        unsafe { self.cut_to(bytes) }
    }

    fn as_segmented(&mut self) -> Option<&mut Segmented> {
        Some(self)
    }

    fn export(&mut self, chunk: usize) -> Result<OwnedFd> {
        let len = self.chunks().len();
        match self.core().range.chunk_mut(chunk).filter(|_| chunk < len) {
            Some(chunk) => chunk.export(),
            None => Err(Error::OutOfBounds { what: "exporting", start: chunk, count: 1, len }),
        }
    }

    fn close(&mut self) -> Result<()> {
        let mut core = self.core();
        let card = Arc::clone(self.card());
        if core.mapped() > 0 && !card.quiet() {
            let range = core::mem::replace(&mut core.range, ReservedRange::nothing(&card));
            let (pool, hooks) = (core.pool.clone(), core.hooks.take());
            let mut orphan = Core { range, retiring: core::mem::take(&mut core.retiring), pool, hooks };
            let bytes = Bytes::new(orphan.mapped());
            // All of it waits now.
            card.accounts().mapped.move_to(&card.accounts().retiring, orphan.committed());
            orphan.retiring = RetireList::default();
            card.adopt(Box::new(orphan));
            return Err(Error::NotReturned { bytes, source: not_idle() });
        }
        core.with_all_mapped(Core::tear_down)
    }
}

impl Core {
    /// Gives everything back. The device is idle.
    fn tear_down(&mut self) -> Result<()> {
        self.tell_unmapping(0);
        self.retiring.cut(0);
        let pool = self.pool.clone();
        self.range.tear_down(true, |chunk| pool.put(chunk))
    }
}

impl Orphan for Core {
    fn bury(&mut self) -> u64 {
        let bytes = self.mapped();
        let accounts = self.pool.card().accounts();
        accounts.retiring.move_to(&accounts.mapped, bytes);
        if let Err(error) = self.tear_down() {
            tracing::warn!(device = %self.pool.card().id(), %error, "not all of a dropped buffer came back");
        }
        bytes
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("range", &self.range).field("retiring", &self.retiring).finish_non_exhaustive()
    }
}

impl fmt::Debug for Segmented {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segmented")
            .field("core", &*self.core())
            .field("ladder", &self.ladder)
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}
