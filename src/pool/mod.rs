//! Chunks that are kept for the next who needs them.
//!
//! A driver scrubs released memory before it hands it out again (2 ms per GiB on an H200 once clean memory is used up),
//! and making a handle costs more than mapping one. So what one buffer gives up stays here, and the next takes it
//! without a driver call. On the ladder all buffers cut their spans at the same places, so pooled chunks fit.

mod chunk;
mod ladder;

use core::fmt;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

pub use chunk::Chunk;
pub(crate) use ladder::Ladder;
pub use ladder::{Sizing, UnknownSizing};

use crate::bytes::Bytes;
use crate::card::{Card, GiveWay};
use crate::driver::{ChunkProps, DriverError};
use crate::error::Result;

/// Kept chunks of one device, by size. Cheap to clone; all clones are the same pool.
///
/// Every device has one that its buffers share ([`Device::pool`](crate::Device::pool)). A pool of its own is for
/// buffers whose chunks have special properties or must not mix with others.
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
    kept: Mutex<Kept>,
}

struct Kept {
    classes: BTreeMap<u64, Vec<Chunk>>,
    bytes: u64,
    keep: u64,
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

impl ChunkPool {
    pub(crate) fn new(card: &Arc<Card>, props: ChunkProps, keep: u64, left_out: Vec<(&'static str, String)>) -> Self {
        let kept = Mutex::new(Kept { classes: BTreeMap::new(), bytes: 0, keep });
        let this = Self { inner: Arc::new(Inner { card: Arc::clone(card), props, left_out, kept }) };
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
        if !Arc::ptr_eq(chunk.card(), &self.inner.card) {
            return;
        }
        let mut kept = self.inner.kept.lock();
        let fits = !chunk.is_shared() && chunk.props() == self.inner.props;
        if fits && kept.bytes.saturating_add(chunk.size()) <= kept.keep {
            self.inner.insert(&mut kept, chunk);
            return;
        }
        drop(kept);
        self.discard(chunk);
    }

    /// How much is kept.
    #[must_use]
    pub fn kept(&self) -> Bytes {
        Bytes::new(self.inner.kept.lock().bytes)
    }

    /// The most that is kept.
    #[must_use]
    pub fn keep_limit(&self) -> Bytes {
        Bytes::new(self.inner.kept.lock().keep)
    }

    /// Sets the most that is kept, and releases what is above.
    pub fn set_keep_limit(&self, keep: Bytes) -> Trimmed {
        self.inner.kept.lock().keep = keep.get();
        self.trim(keep)
    }

    /// Kept chunks by size: `(size, how many)`.
    #[must_use]
    pub fn classes(&self) -> Vec<(Bytes, usize)> {
        let kept = self.inner.kept.lock();
        kept.classes.iter().map(|(&size, chunks)| (Bytes::new(size), chunks.len())).collect()
    }

    /// Releases kept chunks, largest first, until at most `to` is kept.
    pub fn trim(&self, to: Bytes) -> Trimmed {
        self.inner.trim(to)
    }

    pub(crate) fn card(&self) -> &Arc<Card> {
        &self.inner.card
    }

    /// Chunks of all the sizes, or none.
    pub(crate) fn take_run(&self, sizes: impl Iterator<Item = u64>) -> Result<Vec<Taken>> {
        let mut run = Vec::new();
        for size in sizes {
            match self.take_one(size) {
                Ok(taken) => run.push(taken),
                Err(error) => {
                    self.undo_take(run);
                    return Err(error);
                }
            }
        }
        Ok(run)
    }

    /// Undoes a take: what was made for it is released, what was kept is kept again.
    pub(crate) fn undo_take(&self, run: impl IntoIterator<Item = Taken>) {
        for Taken { chunk, fresh } in run {
            if fresh {
                self.discard(chunk);
            } else {
                self.inner.insert(&mut self.inner.kept.lock(), chunk);
            }
        }
    }

    /// Releases a chunk; one that the driver will not take back is kept, so that it is not lost.
    fn discard(&self, chunk: Chunk) {
        if chunk.is_shared() {
            // Never to be handed to anybody else: dropped, it is released or given up.
            return;
        }
        if let Err((chunk, error)) = chunk.release() {
            tracing::warn!(device = %self.inner.card.id(), bytes = %chunk.bytes(), %error, "a chunk stays in the pool");
            self.inner.insert(&mut self.inner.kept.lock(), chunk);
        }
    }

    /// A kept chunk of that size, if there is one.
    pub(crate) fn take_kept(&self, bytes: u64) -> Option<Chunk> {
        self.inner.remove(bytes)
    }

    /// A chunk of a size the device maps: a kept one if there is one, else a new one. When memory or open files run out,
    /// everything kept is released and it is tried once more.
    pub(crate) fn take_one(&self, bytes: u64) -> Result<Taken> {
        if let Some(chunk) = self.inner.remove(bytes) {
            return Ok(Taken { chunk, fresh: false });
        }
        let chunk = Chunk::create(&self.inner.card, bytes, self.inner.props)?;
        Ok(Taken { chunk, fresh: true })
    }
}

impl Inner {
    fn trim(&self, to: Bytes) -> Trimmed {
        let mut trimmed = Trimmed::default();
        loop {
            let mut kept = self.kept.lock();
            trimmed.kept = Bytes::new(kept.bytes);
            if kept.bytes <= to.get() {
                return trimmed;
            }
            let Some(chunk) = self.remove_largest(&mut kept) else { return trimmed };
            // The driver is not called under the lock: others may take and put meanwhile.
            drop(kept);
            let size = chunk.size();
            match chunk.release() {
                Ok(()) => trimmed.released = Bytes::new(trimmed.released.get() + size),
                Err((chunk, error)) => {
                    let mut kept = self.kept.lock();
                    self.insert(&mut kept, chunk);
                    trimmed.kept = Bytes::new(kept.bytes);
                    trimmed.error = Some(error);
                    return trimmed;
                }
            }
        }
    }

    fn insert(&self, kept: &mut Kept, chunk: Chunk) {
        let accounts = self.card.accounts();
        accounts.in_hand.move_to(&accounts.pooled, chunk.size());
        kept.bytes += chunk.size();
        kept.classes.entry(chunk.size()).or_default().push(chunk);
    }

    fn remove(&self, bytes: u64) -> Option<Chunk> {
        let mut kept = self.kept.lock();
        let class = kept.classes.get_mut(&bytes)?;
        let chunk = class.pop();
        if class.is_empty() {
            kept.classes.remove(&bytes);
        }
        let chunk = chunk?;
        self.removed(&mut kept, &chunk);
        Some(chunk)
    }

    fn remove_largest(&self, kept: &mut Kept) -> Option<Chunk> {
        let mut class = kept.classes.last_entry()?;
        let chunk = class.get_mut().pop();
        if class.get().is_empty() {
            class.remove();
        }
        let chunk = chunk?;
        self.removed(kept, &chunk);
        Some(chunk)
    }

    fn removed(&self, kept: &mut Kept, chunk: &Chunk) {
        kept.bytes -= chunk.size();
        let accounts = self.card.accounts();
        accounts.pooled.move_to(&accounts.in_hand, chunk.size());
    }
}

impl GiveWay for Inner {
    fn give_way(&self) -> u64 {
        self.trim(Bytes::ZERO).released.get()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // What is kept is not in hand: move it there, where a chunk expects its bytes when it is dropped.
        let accounts = self.card.accounts();
        accounts.pooled.move_to(&accounts.in_hand, self.kept.get_mut().bytes);
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("kept", &Bytes::new(self.kept.lock().bytes)).finish_non_exhaustive()
    }
}

impl fmt::Debug for ChunkPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkPool").field("device", &self.inner.card.id()).field("classes", &self.classes()).finish()
    }
}
