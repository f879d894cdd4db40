//! The memory of one span, and what other threads do with it.
//!
//! ```text
//! base            granted             ready                     mapped                        end
//!  |  the buffer's   |  mapped ahead   |  waits for events         |   nothing, prepared chunks   |
//! ```
//! Chunks come and go at the end only, under one lock per span. The owner takes what is ready without it (see
//! [`grants`](super::grants)); what is ready follows from what is mapped and what waits each time the lock is let go.

use core::fmt;
use core::mem::ManuallyDrop;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::ahead::{Ahead, fit};
use super::grants::{Figures, Grants};
use super::hooks::{MapHooks, Told, tell};
use super::retire::{Passing, RetireList};
use crate::background::Work;
use crate::bytes::Bytes;
use crate::card::{Card, Drain, MapsAhead, Orphan};
use crate::error::Result;
use crate::pool::{Chunk, ChunkPool, Ladder, Taken};
use crate::quiesce::Point;
use crate::range::{MappedChunk, ReservedRange};
use crate::waiting::{NoWaiting, may_wait};

/// Memory waits for where an event was recorded.
pub(super) type Waiting = RetireList<Arc<Point>>;

impl Passing for Arc<Point> {
    fn is_reached(&self) -> Result<bool> {
        Point::is_reached(self)
    }
}

/// A span, shared by its buffer and the threads that work for it.
pub(super) struct Span {
    core: Mutex<Core>,
    grants: Grants,
    pub(super) ahead: Ahead,
    pub(super) ladder: Ladder,
    pub(super) pool: ChunkPool,
    granularity: u64,
    /// Bytes of the chunks in hand.
    prepared: AtomicU64,
}

/// What is under the lock.
pub(super) struct Core {
    pub(super) range: ReservedRange,
    pub(super) retiring: Waiting,
    pub(super) pool: ChunkPool,
    pub(super) hooks: Option<Arc<dyn MapHooks>>,
    /// Chunks for growth to come that are not mapped yet.
    pub(super) hand: Hand,
    /// Counts whatever makes chunks that are on their way here unwelcome.
    pub(super) epoch: u64,
    /// The owner is at work over several locks: nobody else maps anything.
    pub(super) held: bool,
    /// Whether what is ready is for the owner to take. Otherwise it has it.
    pub(super) maps_ahead: bool,
}

/// The lock on a span. When it goes, what is ready is made known. Who holds one waits for no other thread, which may be
/// waiting for it.
pub(super) struct Locked<'a> {
    core: ManuallyDrop<MutexGuard<'a, Core>>,
    span: &'a Span,
    _no_waiting: NoWaiting,
}

impl Deref for Locked<'_> {
    type Target = Core;
    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.publish();
        // SAFETY: it is not used again, now that this is dropped.
        let core = unsafe { ManuallyDrop::take(&mut self.core) };
        // To whoever waits: the background takes the lock again and again, and the owner would come to it late.
        MutexGuard::unlock_fair(core);
    }
}

impl Span {
    pub(super) fn new(core: Core, ladder: Ladder, granularity: u64, beside_kernels: bool) -> Arc<Self> {
        let pool = core.pool.clone();
        Arc::new(Self {
            core: Mutex::new(core),
            grants: Grants::new(),
            ahead: Ahead::new(beside_kernels),
            ladder,
            pool,
            granularity,
            prepared: AtomicU64::new(0),
        })
    }

    pub(super) fn card(&self) -> &Arc<Card> {
        self.pool.card()
    }

    pub(super) fn lock(&self) -> Locked<'_> {
        self.locked(self.core.lock())
    }

    pub(super) fn try_lock(&self) -> Option<Locked<'_>> {
        Some(self.locked(self.core.try_lock()?))
    }

    fn locked<'a>(&'a self, core: MutexGuard<'a, Core>) -> Locked<'a> {
        Locked { core: ManuallyDrop::new(core), span: self, _no_waiting: NoWaiting::begin() }
    }

    /// The lock for one who is not the owner: not waited for where that could be waiting for this very thread.
    fn lock_if_allowed(&self) -> Option<Locked<'_>> {
        if may_wait() { Some(self.lock()) } else { self.try_lock() }
    }

    /// How much is granted and how much is ready, in bytes.
    pub(super) fn figures(&self) -> Figures {
        let Figures { granted, ready } = self.grants.get();
        Figures { granted: granted * self.granularity, ready: ready * self.granularity }
    }

    /// The owner takes everything up to `to`; false if not all of it is ready.
    pub(super) fn grant(&self, to: u64) -> bool {
        self.grants.grant(to.div_ceil(self.granularity))
    }

    /// The owner leaves what lies from `to` on, ready to be taken again.
    pub(super) fn leave(&self, to: u64) {
        self.grants.leave(to / self.granularity);
    }

    /// Bytes of chunks in hand.
    pub(super) fn prepared(&self) -> u64 {
        self.prepared.load(Relaxed)
    }

    pub(super) fn as_work(self: &Arc<Self>) -> Weak<dyn Work> {
        let this: Arc<dyn Work> = Arc::clone(self) as Arc<dyn Work>;
        Arc::downgrade(&this)
    }

    pub(super) fn as_ahead(self: &Arc<Self>) -> Weak<dyn MapsAhead> {
        let this: Arc<dyn MapsAhead> = Arc::clone(self) as Arc<dyn MapsAhead>;
        Arc::downgrade(&this)
    }

    pub(super) fn as_drain(self: &Arc<Self>) -> Weak<dyn Drain> {
        let this: Arc<dyn Drain> = Arc::clone(self) as Arc<dyn Drain>;
        Arc::downgrade(&this)
    }
}

impl Locked<'_> {
    /// What the buffer has.
    pub(super) fn committed(&self) -> u64 {
        self.span.figures().granted.min(self.ready())
    }

    /// Makes known what is ready.
    pub(super) fn publish(&mut self) {
        let ready = self.ready() / self.span.granularity;
        match self.maps_ahead {
            true => self.span.grants.publish(ready),
            false => self.span.grants.publish_granted(ready),
        }
        self.span.prepared.store(self.hand.bytes(), Relaxed);
    }

    /// Waits for all that waits, and gives it up; what is there for growth to come goes too. Returns how much had waited.
    pub(super) fn flush(&mut self) -> Result<u64> {
        let flushed = self.flush_retiring()?;
        self.span.ahead.forget();
        self.flush_ahead()?;
        self.empty_hand();
        Ok(flushed)
    }

    /// Waits for all that waits, and gives it up.
    pub(super) fn flush_retiring(&mut self) -> Result<u64> {
        let points: Vec<_> = self.retiring.waiting().cloned().collect();
        // Not under the lock: it may take long, and others only give up more meanwhile. Only the owner lets more wait.
        MutexGuard::unlocked(&mut self.core, || points.iter().try_for_each(|point| point.wait()))?;
        match self.retiring.start() {
            // SAFETY: whoever shrank the buffer recorded the events behind all work that touches the memory from there
            // on, and they have passed; the host let go of it when the length fell.
            Some(from) => self.with_all_mapped(|core| unsafe { core.give_up(from) }),
            None => Ok(0),
        }
    }

    /// Takes what is mapped ahead out of the owner's reach; gives where it begins.
    pub(super) fn withdraw(&mut self) -> u64 {
        let granularity = self.span.granularity;
        let boundary = |granted: u64| self.core.chunk_end(granted * granularity).div_ceil(granularity);
        self.span.grants.withdraw(boundary) * granularity
    }

    /// Gives up all that is mapped ahead, or nothing. Returns how much.
    pub(super) fn flush_ahead(&mut self) -> Result<u64> {
        self.epoch += 1;
        if self.retiring.start().is_some() || !self.maps_ahead {
            return Ok(0);
        }
        let from = self.withdraw();
        if from >= self.mapped() {
            return Ok(0);
        }
        // SAFETY: what is ready and was not granted was never told to anybody, so nothing can touch it; withdrawn, the
        // owner cannot take it any more.
        unsafe { self.give_up(from) }
    }

    /// Unmaps the last chunk of what waited for events that have all passed, if it begins at or above `keep`. One at a
    /// time, so that whoever waits for the lock gets it in between.
    pub(super) fn drain_step(&mut self, keep: u64) -> Result<Option<Chunk>> {
        let Some(from) = self.retiring.passed()? else { return Ok(None) };
        // SAFETY: whoever shrank the buffer recorded the events behind all work that touches the memory from there on, and
        // they have passed; the host let go of it when the length fell.
        unsafe { self.pop_retired(from.max(keep)) }
    }

    /// Gives chunks in hand to the pool; returns how much.
    pub(super) fn empty_hand(&mut self) -> u64 {
        self.epoch += 1;
        let chunks = self.hand.take_all();
        self.keep(chunks.into_iter().map(|taken| taken.chunk))
    }

    /// Gives up, as far as it goes, what is mapped ahead and what is in hand. The chunks are for the pool, which may call
    /// the driver, so not under this lock.
    fn strip(&mut self, chunks: &mut Vec<Chunk>) {
        self.epoch += 1;
        self.span.ahead.forget();
        chunks.extend(self.hand.take_all().into_iter().map(|taken| taken.chunk));
        if self.retiring.start().is_some() || !self.maps_ahead {
            return;
        }
        let from = self.withdraw();
        while self.mapped() > from {
            // SAFETY: as in `flush_ahead`.
            match unsafe { self.pop(from) } {
                Ok(Some(chunk)) => chunks.push(chunk),
                Ok(None) => return,
                Err(error) => {
                    tracing::debug!(device = %self.pool.card().id(), %error, "memory mapped ahead stays");
                    return;
                }
            }
        }
    }
}

impl Core {
    pub(super) fn new(range: ReservedRange, pool: &ChunkPool, hooks: Option<Arc<dyn MapHooks>>) -> Self {
        Self {
            range,
            retiring: Waiting::default(),
            pool: pool.clone(),
            hooks,
            hand: Hand::new(pool.card()),
            epoch: 0,
            held: false,
            maps_ahead: false,
        }
    }

    /// All that is mapped and does not wait to be unmapped.
    pub(super) fn ready(&self) -> u64 {
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
        self.tell(from, Told::Unmapping);
    }

    pub(super) fn tell_mapped(&self, from: u64) {
        self.tell(from, Told::Mapped);
    }

    /// Tells of the chunks that begin at or above `from`.
    fn tell(&self, from: u64, told: Told) {
        let from = self.range.base() + from;
        self.tell_of(self.range.chunks().filter(|chunk| chunk.address >= from), told);
    }

    /// Tells of chunks.
    pub(super) fn tell_of(&self, chunks: impl Iterator<Item = MappedChunk>, told: Told) {
        if let Some(hooks) = &self.hooks {
            tell(hooks, &self.pool.card().id(), told, chunks);
        }
    }

    /// Keeps chunks in the pool; returns how many bytes.
    pub(super) fn keep(&self, chunks: impl IntoIterator<Item = Chunk>) -> u64 {
        keep(&self.pool, chunks)
    }

    /// Counts all memory that waits for events among the mapped again while `act` works, and what is left after it as
    /// waiting.
    pub(super) fn with_all_mapped<T>(&mut self, act: impl FnOnce(&mut Self) -> T) -> T {
        let card = Arc::clone(self.pool.card());
        let accounts = card.accounts();
        accounts.retiring.move_to(&accounts.mapped, self.mapped() - self.ready());
        let result = act(self);
        accounts.mapped.move_to(&accounts.retiring, self.mapped() - self.ready());
        result
    }

    /// Unmaps whole chunks from `bytes` on and keeps them.
    ///
    /// # Safety
    /// As for [`ReservedRange::take_from`].
    pub(super) unsafe fn give_up(&mut self, bytes: u64) -> Result<u64> {
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

    /// Unmaps the last chunk if it begins at or above `floor`.
    ///
    /// # Safety
    /// As for [`ReservedRange::take_from`], from `floor` on.
    unsafe fn pop(&mut self, floor: u64) -> Result<Option<Chunk>> {
        let Some(start) = self.range.last_start().filter(|start| *start >= floor) else { return Ok(None) };
        self.tell_unmapping(start);
        // SAFETY: the caller promises that nothing touches the memory from `floor` on, and the chunk begins no lower.
        match unsafe { self.range.take_from(Bytes::new(start)) } {
            Ok(mut chunks) => {
                self.retiring.cut(start);
                Ok(chunks.pop())
            }
            Err(rejected) => {
                self.tell_mapped(start);
                self.keep(rejected.chunks);
                Err(rejected.error)
            }
        }
    }

    /// The same for a chunk of what waits.
    ///
    /// # Safety
    /// As for [`pop`](Self::pop).
    unsafe fn pop_retired(&mut self, floor: u64) -> Result<Option<Chunk>> {
        let Some(start) = self.range.last_start().filter(|start| *start >= floor) else { return Ok(None) };
        let (card, size) = (Arc::clone(self.pool.card()), self.mapped() - start);
        let accounts = card.accounts();
        // A chunk is unmapped out of the mapped.
        accounts.retiring.move_to(&accounts.mapped, size);
        // SAFETY: the contract is the same.
        let popped = unsafe { self.pop(floor) };
        if popped.is_err() {
            accounts.mapped.move_to(&accounts.retiring, self.mapped() - start);
        }
        popped
    }

    /// Gives everything back. The device is idle.
    pub(super) fn tear_down(&mut self) -> Result<()> {
        self.tell_unmapping(0);
        self.retiring.cut(0);
        let pool = self.pool.clone();
        self.range.tear_down(true, |chunk| pool.put(chunk))
    }
}

/// Keeps chunks in a pool; returns how many bytes.
pub(super) fn keep(pool: &ChunkPool, chunks: impl IntoIterator<Item = Chunk>) -> u64 {
    chunks.into_iter().fold(0, |sum, chunk| {
        let size = chunk.size();
        pool.put(chunk);
        sum + size
    })
}

impl Drain for Span {
    fn drain(&self) -> (u64, bool) {
        let mut drained = 0;
        loop {
            // A span in use drains by itself, and it may be this thread that uses it.
            let Some(mut core) = self.try_lock() else { return (drained, true) };
            match core.drain_step(0) {
                Ok(Some(chunk)) => {
                    drop(core);
                    drained += keep(&self.pool, [chunk]);
                }
                Ok(None) => return (drained, core.retiring.start().is_some()),
                Err(error) => {
                    tracing::debug!(device = %self.card().id(), %error, "memory that waited for an event stays");
                    return (drained, core.retiring.start().is_some());
                }
            }
        }
    }
}

impl MapsAhead for Span {
    fn ahead(&self) -> u64 {
        let Figures { granted, ready } = self.figures();
        ready - granted
    }

    fn take_back(&self) -> u64 {
        let Some(mut core) = self.lock_if_allowed() else { return 0 };
        let mut chunks = Vec::new();
        core.strip(&mut chunks);
        drop(core);
        keep(&self.pool, chunks)
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

/// Chunks that wait for one buffer's growth, counted as such.
pub(super) struct Hand {
    card: Arc<Card>,
    chunks: Vec<Taken>,
    bytes: u64,
}

impl Hand {
    fn new(card: &Arc<Card>) -> Self {
        Self { card: Arc::clone(card), chunks: Vec::new(), bytes: 0 }
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn put(&mut self, taken: Taken) {
        let accounts = self.card.accounts();
        accounts.in_hand.move_to(&accounts.prepared, taken.chunk.size());
        self.bytes += taken.chunk.size();
        self.chunks.push(taken);
    }

    /// Puts chunks back before all others.
    pub(super) fn put_first(&mut self, taken: impl IntoIterator<Item = Taken>) {
        let after = core::mem::take(&mut self.chunks);
        taken.into_iter().for_each(|taken| self.put(taken));
        self.chunks.extend(after);
    }

    /// The size of the first.
    pub(super) fn first(&self) -> Option<u64> {
        self.chunks.first().map(|taken| taken.chunk.size())
    }

    fn sizes(&self) -> impl Iterator<Item = u64> {
        self.chunks.iter().map(|taken| taken.chunk.size())
    }

    /// Whether all are what the ladder puts at `position`.
    pub(super) fn fits(&self, ladder: &Ladder, position: u64) -> bool {
        fit(ladder, position, self.sizes()) == self.chunks.len()
    }

    /// Those at the front that are what the ladder puts at `from`, as many as reach to `to`.
    pub(super) fn take_fitting(&mut self, ladder: &Ladder, from: u64, to: u64) -> Vec<Taken> {
        let mut at = from;
        let below = |size: &u64| {
            let below = at < to;
            at += size;
            below
        };
        let fitting = fit(ladder, from, self.sizes().take_while(below));
        let taken = self.chunks.drain(..fitting).collect();
        self.took(taken)
    }

    pub(super) fn take_first(&mut self) -> Option<Taken> {
        if self.chunks.is_empty() {
            return None;
        }
        let first = vec![self.chunks.remove(0)];
        self.took(first).pop()
    }

    pub(super) fn take_all(&mut self) -> Vec<Taken> {
        let taken = core::mem::take(&mut self.chunks);
        self.took(taken)
    }

    fn took(&mut self, taken: Vec<Taken>) -> Vec<Taken> {
        let bytes = taken.iter().map(|taken| taken.chunk.size()).sum();
        let accounts = self.card.accounts();
        accounts.prepared.move_to(&accounts.in_hand, bytes);
        self.bytes -= bytes;
        taken
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        // In a forked child nothing is done, not even to the books.
        if !self.chunks.is_empty() && !self.card.gate().is_forked() {
            drop(self.take_all());
        }
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("range", &self.range).field("retiring", &self.retiring).finish_non_exhaustive()
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let core = self.core.try_lock();
        f.debug_struct("Span")
            .field("figures", &self.figures())
            .field("core", &core.as_deref())
            .field("ladder", &self.ladder)
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}
