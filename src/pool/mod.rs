//! Chunks that are kept for the next who needs them.
//!
//! A driver scrubs released memory before it hands it out again (2 ms per GiB on an H200 once clean memory is used up),
//! and making a handle costs more than mapping one. So what one buffer gives up stays here, and the next takes it
//! without a driver call. On the ladder all buffers cut their spans at the same places, so pooled chunks fit.

mod chunk;
mod kept;
mod ladder;
#[cfg(all(test, loom, feature = "sim"))]
mod models;
mod policy;

use core::fmt;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

pub use chunk::Chunk;
pub(crate) use ladder::{Ladder, uniform_size};
pub use ladder::{Sizing, UnknownSizing};
pub use policy::{PoolPolicy, PoolStats, Prewarm, Prewarmed};

use kept::Kept;

use crate::background::{self, Background};
use crate::bytes::Bytes;
use crate::card::{Card, GiveWay};
use crate::driver::{ChunkProps, DriverError};
use crate::error::Result;
use crate::sync::Mutex;

/// Kept chunks of one device, by size. Cheap to clone; all clones are the same pool.
///
/// Every device has one that its buffers share ([`Device::pool`](crate::Device::pool)). A pool of its own is for
/// buffers whose chunks have special properties or must not mix with others. How much is kept, and for how long, is its
/// [`PoolPolicy`].
///
/// ```
/// use growspan::{Bytes, Device, GrowableBuffer, Quiesce};
///
/// # fn main() -> growspan::Result<()> {
/// let device = Device::host()?;
/// let mut a = GrowableBuffer::<u8>::builder(&device).max_len(1 << 30).build()?;
/// a.grow_to(5 << 20)?;
/// a.shrink_to(0, Quiesce::Device)?;
/// assert!(device.pool().kept() >= Bytes::mib(6));
/// device.pool().trim(Bytes::ZERO);
/// assert_eq!(device.pool().kept(), Bytes::ZERO);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ChunkPool {
    inner: Arc<Inner>,
}

struct Inner {
    card: Arc<Card>,
    props: ChunkProps,
    left_out: Vec<(&'static str, String)>,
    state: Mutex<State>,
    background: Background,
}

struct State {
    kept: Kept,
    policy: PoolPolicy,
}

/// A chunk taken for a growth, and whether it was made for it.
pub(crate) struct Taken {
    pub(crate) chunk: Chunk,
    pub(crate) fresh: bool,
}

/// What a [`trim`](ChunkPool::trim) did.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Trimmed {
    /// Given back to the driver.
    pub released: Bytes,
    /// Still in the pool.
    pub kept: Bytes,
    /// What stopped it before it reached its goal. The chunk concerned stays in the pool.
    pub error: Option<DriverError>,
}

impl Trimmed {
    /// This and what came after it.
    fn then(self, later: Self) -> Self {
        Self {
            released: Bytes::new(self.released.get() + later.released.get()),
            kept: later.kept,
            error: self.error.or(later.error),
        }
    }
}

impl ChunkPool {
    /// A pool with this policy, which says how much is kept.
    pub(crate) fn new(
        card: &Arc<Card>,
        props: ChunkProps,
        policy: PoolPolicy,
        left_out: Vec<(&'static str, String)>,
    ) -> Self {
        let state = Mutex::new(State { kept: Kept::default(), policy });
        let background = Background::default();
        let this = Self { inner: Arc::new(Inner { card: Arc::clone(card), props, left_out, state, background }) };
        let pool: Arc<dyn GiveWay> = Arc::clone(&this.inner) as Arc<dyn GiveWay>;
        let pool: Weak<dyn GiveWay> = Arc::downgrade(&pool);
        card.add_pool(pool);
        this
    }

    /// The properties of its chunks.
    #[must_use]
    pub fn props(&self) -> ChunkProps {
        self.inner.props
    }

    /// Properties that were asked for and do not work on the device: which, and why.
    #[must_use]
    pub fn left_out(&self) -> &[(&'static str, String)] {
        &self.inner.left_out
    }

    /// Keeps a chunk for the next who needs its size, or releases it if the pool is full. A chunk of another device or
    /// with other properties, or one that another process shares, is released.
    pub fn put(&self, chunk: Chunk) {
        self.admit(chunk);
    }

    /// [`put`](Self::put); whether the chunk is kept.
    fn admit(&self, chunk: Chunk) -> bool {
        if !Arc::ptr_eq(chunk.card(), &self.inner.card) {
            return false;
        }
        let now = Instant::now();
        self.inner.sweep(now);
        let mut state = self.inner.state.lock();
        let fits = !chunk.is_shared() && chunk.props() == self.inner.props;
        if !fits || !state.policy.takes(chunk.size(), state.kept.bytes()) {
            drop(state);
            self.discard(chunk);
            return false;
        }
        self.inner.insert(&mut state, chunk, now);
        let over = state.policy.trims_to(state.kept.bytes());
        drop(state);
        if let Some(low) = over {
            self.inner.trim_oldest(low).log(&self.inner.card);
        }
        true
    }

    /// How much is kept.
    #[must_use]
    pub fn kept(&self) -> Bytes {
        Bytes::new(self.inner.state.lock().kept.bytes())
    }

    /// The most that is kept.
    #[must_use]
    pub fn keep_limit(&self) -> Bytes {
        Bytes::new(self.inner.state.lock().policy.limit())
    }

    /// Sets the most that is kept, and releases what is above.
    pub fn set_keep_limit(&self, keep: Bytes) -> Trimmed {
        let mut state = self.inner.state.lock();
        state.policy = state.policy.keep(keep);
        drop(state);
        self.trim(keep)
    }

    /// What is kept, and for how long.
    pub fn policy(&self) -> PoolPolicy {
        self.inner.state.lock().policy
    }

    /// Sets what is kept and for how long, and releases what is too much or too old by it. A policy that does not say how
    /// much is kept leaves that as it is.
    pub fn set_policy(&self, policy: PoolPolicy) -> Trimmed {
        let mut state = self.inner.state.lock();
        state.policy = policy.or_keep(state.policy.limit());
        let limit = Bytes::new(state.policy.limit());
        drop(state);
        let trimmed = self.age_out().then(self.trim(limit));
        let low = self.inner.over();
        match low {
            Some(low) => trimmed.then(self.inner.trim_oldest(low)),
            None => trimmed,
        }
    }

    /// Releases the chunks that nobody needed for as long as [`PoolPolicy::max_age`] says. Taking from the pool and
    /// putting in do so too: this is for times when neither happens.
    pub fn age_out(&self) -> Trimmed {
        self.age_out_at(Instant::now())
    }

    /// The same, as it will be at `now`: for those who keep a clock of their own.
    pub fn age_out_at(&self, now: Instant) -> Trimmed {
        self.inner.age_out(now)
    }

    /// What it did since it was made.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.inner.stats()
    }

    /// Kept chunks by size: `(size, how many)`.
    #[must_use]
    pub fn classes(&self) -> Vec<(Bytes, usize)> {
        self.inner.state.lock().kept.counts().map(|(size, chunks)| (Bytes::new(size), chunks)).collect()
    }

    /// Releases kept chunks, largest first, until at most `to` is kept.
    pub fn trim(&self, to: Bytes) -> Trimmed {
        self.inner.trim(to.get())
    }

    pub(crate) fn card(&self) -> &Arc<Card> {
        &self.inner.card
    }

    /// The thread that works for the pool's buffers, if it was started.
    pub(crate) fn background(&self) -> &Background {
        &self.inner.background
    }

    /// The same, started if need be.
    pub(crate) fn start_background(&self) -> Result<Arc<background::Shared>> {
        let (shared, started) = self.inner.background.start()?;
        if started {
            self.inner.card.add_background(Arc::downgrade(&shared));
        }
        Ok(shared)
    }

    /// Chunks of all the sizes, or none.
    pub(crate) fn take_run(&self, sizes: impl Iterator<Item = u64>) -> Result<Vec<Taken>> {
        let mut run = Vec::new();
        for size in sizes {
            match self.take(size) {
                Ok(taken) => run.push(taken),
                Err(error) => {
                    self.undo_take(run);
                    return Err(error);
                }
            }
        }
        self.inner.sweep(Instant::now());
        Ok(run)
    }

    /// Undoes a take: what was made for it is released, what was kept is kept again.
    pub(crate) fn undo_take(&self, run: impl IntoIterator<Item = Taken>) {
        for Taken { chunk, fresh } in run {
            if fresh {
                self.discard(chunk);
            } else {
                self.inner.insert(&mut self.inner.state.lock(), chunk, Instant::now());
            }
        }
    }

    /// Releases a chunk; one that the driver will not take back is kept, so that it is not lost.
    pub(crate) fn discard(&self, chunk: Chunk) {
        if chunk.is_shared() || chunk.props() != self.inner.props {
            // Never to be handed to those who come here: dropped, it is released or given up.
            return;
        }
        if let Err((chunk, error)) = chunk.release() {
            tracing::warn!(device = %self.inner.card.id(), bytes = %chunk.bytes(), %error, "a chunk stays in the pool");
            self.inner.insert(&mut self.inner.state.lock(), chunk, Instant::now());
        }
    }

    /// A kept chunk of that size, if there is one.
    pub(crate) fn take_kept(&self, bytes: u64) -> Option<Chunk> {
        self.inner.remove(bytes)
    }

    /// A chunk of a size the device maps: a kept one if there is one, else a new one. When memory or open files run out,
    /// everything kept is released and it is tried once more.
    pub(crate) fn take_one(&self, bytes: u64) -> Result<Taken> {
        let taken = self.take(bytes);
        self.inner.sweep(Instant::now());
        taken
    }

    /// [`take_one`](Self::take_one), which leaves what is too old alone.
    fn take(&self, bytes: u64) -> Result<Taken> {
        if let Some(chunk) = self.inner.remove(bytes) {
            return Ok(Taken { chunk, fresh: false });
        }
        let chunk = Chunk::create(&self.inner.card, bytes, self.inner.props)?;
        Ok(Taken { chunk, fresh: true })
    }

    /// Makes chunks of all the sizes, `wanted` bytes together, of which there are too few, as far as the policy lets them
    /// stay and memory goes. Nobody gives way for them.
    pub(crate) fn prewarm(&self, sizes: impl Iterator<Item = u64>, wanted: u64) -> Result<Prewarmed> {
        let state = self.inner.state.lock();
        let ceiling = state.policy.ceiling();
        let mut there: BTreeMap<u64, usize> = state.kept.counts().collect();
        let full = state.kept.bytes();
        drop(state);
        let (mut found, mut fresh, mut making) = (0, Vec::new(), 0);
        let mut why = None;
        for size in sizes {
            if let Some(left) = there.get_mut(&size).filter(|left| **left > 0) {
                *left -= 1;
                found += size;
                continue;
            }
            if full + making + size > ceiling {
                let (kept, most) = (Bytes::new(full + making), Bytes::new(ceiling));
                why = Some(format!("the pool keeps {kept} of {most} at most; raise its limit, or trim it first"));
                break;
            }
            match Chunk::create_once(&self.inner.card, size, self.inner.props) {
                Ok(chunk) => fresh.push(chunk),
                Err(error) if error.is_shortage() => {
                    why = Some(error.to_string());
                    break;
                }
                Err(error) => {
                    fresh.into_iter().for_each(|chunk| self.discard(chunk));
                    return Err(error);
                }
            }
            making += size;
        }
        let (mut made, mut chunks) = (0, 0);
        for chunk in fresh {
            let size = chunk.size();
            if self.admit(chunk) {
                made += size;
                chunks += 1;
            } else {
                why.get_or_insert_with(|| "others have filled the pool meanwhile".to_owned());
            }
        }
        let missing = if why.is_some() { wanted.saturating_sub(found + made) } else { 0 };
        Ok(Prewarmed { made: Bytes::new(made), chunks, found: Bytes::new(found), missing: Bytes::new(missing), why })
    }
}

impl Trimmed {
    /// Says what nobody asked for and so nobody is told.
    fn log(self, card: &Card) {
        if let Some(error) = self.error {
            tracing::warn!(device = %card.id(), %error, "a chunk stays in the pool");
        }
    }
}

impl Inner {
    /// Releases what `next` takes out, one by one, until that is nothing or the driver refuses. `count` is told of each.
    fn release_while(
        &self,
        mut next: impl FnMut(&mut Kept) -> Option<Chunk>,
        count: impl Fn(&mut PoolStats, u64),
    ) -> Trimmed {
        let mut trimmed = Trimmed::default();
        loop {
            let mut state = self.state.lock();
            trimmed.kept = Bytes::new(state.kept.bytes());
            let Some(chunk) = next(&mut state.kept) else { return trimmed };
            self.removed(&chunk);
            // The driver is not called under the lock: others may take and put meanwhile.
            drop(state);
            let size = chunk.size();
            match chunk.release() {
                Ok(()) => {
                    trimmed.released = Bytes::new(trimmed.released.get() + size);
                    count(&mut self.state.lock().kept.stats, size);
                }
                Err((chunk, error)) => {
                    let mut state = self.state.lock();
                    // As if it had just come in, so that it is not tried again and again.
                    self.insert(&mut state, chunk, Instant::now());
                    trimmed.kept = Bytes::new(state.kept.bytes());
                    trimmed.error = Some(error);
                    return trimmed;
                }
            }
        }
    }

    /// Down to so much, the largest first.
    fn trim(&self, to: u64) -> Trimmed {
        self.release_while(|kept| if kept.bytes() > to { kept.take_largest() } else { None }, |_, _| ())
    }

    /// Down to so much, the oldest first.
    fn trim_oldest(&self, to: u64) -> Trimmed {
        self.release_while(
            |kept| if kept.bytes() > to { kept.take_oldest() } else { None },
            |stats, size| stats.released_by_watermark = Bytes::new(stats.released_by_watermark.get() + size),
        )
    }

    /// To what it is to be trimmed, if it keeps too much.
    fn over(&self) -> Option<u64> {
        let state = self.state.lock();
        state.policy.trims_to(state.kept.bytes())
    }

    fn age_out(&self, now: Instant) -> Trimmed {
        // Older than the clock: nothing can be.
        let limit = self.state.lock().policy.age().and_then(|age| now.checked_sub(age));
        self.release_while(
            |kept| kept.take_since(limit?),
            |stats, size| stats.released_by_age = Bytes::new(stats.released_by_age.get() + size),
        )
    }

    /// What every use of the pool does besides.
    fn sweep(&self, now: Instant) {
        if self.state.lock().policy.age().is_some() {
            self.age_out(now).log(&self.card);
        }
    }

    fn insert(&self, state: &mut State, chunk: Chunk, now: Instant) {
        let accounts = self.card.accounts();
        accounts.in_hand.move_to(&accounts.pooled, chunk.size());
        state.kept.insert(chunk, now);
    }

    fn remove(&self, bytes: u64) -> Option<Chunk> {
        let mut state = self.state.lock();
        let chunk = state.kept.take(bytes);
        let stats = &mut state.kept.stats;
        let Some(chunk) = chunk else {
            stats.misses += 1;
            return None;
        };
        stats.hits += 1;
        self.removed(&chunk);
        Some(chunk)
    }

    fn removed(&self, chunk: &Chunk) {
        let accounts = self.card.accounts();
        accounts.pooled.move_to(&accounts.in_hand, chunk.size());
    }
}

impl GiveWay for Inner {
    fn give_way(&self) -> u64 {
        self.trim(0).released.get()
    }

    fn stats(&self) -> PoolStats {
        self.state.lock().kept.stats
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // What is kept is not in hand: move it there, where a chunk expects its bytes when it is dropped.
        let accounts = self.card.accounts();
        accounts.pooled.move_to(&accounts.in_hand, self.state.get_mut().kept.bytes());
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("kept", &Bytes::new(self.state.lock().kept.bytes())).finish_non_exhaustive()
    }
}

impl fmt::Debug for ChunkPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkPool").field("device", &self.inner.card.id()).field("classes", &self.classes()).finish()
    }
}
