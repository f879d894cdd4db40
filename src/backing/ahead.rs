//! Mapping ahead: memory is there before it is asked for.
//!
//! The owner says how far memory should reach (`goal`) when its length comes near the end of what is there, and goes on;
//! the background thread brings it there, a chunk at a time, in two phases:
//!
//! * *prepare*: a chunk is taken from the pool or made, with no lock on the span;
//! * *commit*: it is mapped and made accessible, under the lock of this span alone, after which the owner may take it.
//!
//! Where mapping does not go well beside running kernels, the chunks wait in hand and the owner's growth commits them.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use parking_lot::Mutex;

use super::span::{Core, Locked, Span, keep};
use crate::background::{Asks, Step, Work};
use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::pool::{Ladder, Sizing, Taken};
use crate::waiting::sparingly;

/// How much a buffer keeps mapped past its length, for growth to come.
///
/// ```
/// use growspan::{AheadPolicy, Bytes, Device, GrowableBuffer};
///
/// # fn main() -> growspan::Result<()> {
/// let device = Device::host()?;
/// let ahead = AheadPolicy::Bytes(Bytes::mib(4));
/// let mut cache = GrowableBuffer::<u8>::builder(&device).max_len(1 << 30).ahead(ahead).build()?;
/// cache.grow_to(1)?;
/// device.wait_ahead();
/// assert!(cache.stats().bytes_ahead >= Bytes::mib(4));
/// cache.grow_to(3 << 20)?; // no call of the driver
/// # cache.close()
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AheadPolicy {
    /// Nothing: memory is mapped when it is needed, and no thread is started.
    #[default]
    Off,
    /// So many bytes, and at least one chunk.
    Bytes(Bytes),
    /// So many hundredths of the length, and at least one chunk.
    Percent(u32),
}

impl AheadPolicy {
    /// How many bytes past a length of `len` bytes; none if nothing is mapped ahead.
    pub(super) fn target(self, len: u64, granularity: u64) -> Option<u64> {
        let wanted = match self {
            Self::Off => return None,
            Self::Bytes(bytes) => bytes.get(),
            Self::Percent(percent) => {
                let hundredths = u128::from(len) * u128::from(percent) / 100;
                u64::try_from(hundredths).unwrap_or(u64::MAX)
            }
        };
        Some(wanted.max(granularity))
    }
}

/// What a span and the background thread say to each other.
#[derive(Debug)]
pub(super) struct Ahead {
    /// How far memory should reach, in bytes from the base; zero if nothing is wanted.
    goal: AtomicU64,
    pub(super) asks: Arc<Asks>,
    /// Whether the background may commit too.
    beside_kernels: bool,
    failed: AtomicBool,
    /// What went wrong and was not said yet.
    failure: Mutex<Option<Error>>,
}

impl Ahead {
    pub(super) fn new(beside_kernels: bool) -> Self {
        Self {
            goal: AtomicU64::new(0),
            asks: Arc::new(Asks::new()),
            beside_kernels,
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    pub(super) fn aim(&self, goal: u64) {
        self.goal.store(goal, Relaxed);
    }

    /// Nothing is wanted any more, until the next growth.
    pub(super) fn forget(&self) {
        self.goal.store(0, Relaxed);
    }

    /// Whether something went wrong in the background that was not said yet.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Relaxed)
    }

    /// That nothing went wrong, or what did, once.
    pub(super) fn check(&self) -> Result<()> {
        if !self.has_failed() {
            return Ok(());
        }
        self.failed.store(false, Relaxed);
        self.failure.lock().take().map_or(Ok(()), Err)
    }

    /// Notes why no chunk of `asked` bytes is there. The background then rests until the next growth.
    fn fail(&self, device: &str, asked: u64, error: Error) {
        let asked = Bytes::new(asked);
        tracing::debug!(device, %asked, %error, "not mapped ahead");
        match error {
            // Nothing was promised, so nothing is broken: who needs the memory asks for it, and is told then.
            _ if error.is_shortage() => {}
            Error::Capturing { .. } | Error::Forked => {}
            source => {
                let error = Error::Ahead { asked, source: Box::new(source) };
                self.failure.lock().get_or_insert(error);
                self.failed.store(true, Relaxed);
            }
        }
    }
}

/// What is to be done next.
enum Next {
    /// The first chunk in hand can be mapped.
    Commit,
    /// A chunk of this size is to be had, for this epoch.
    Prepare {
        size: u64,
        epoch: u64,
    },
    /// What is in hand is of no use.
    Return,
    Nothing,
}

impl Core {
    fn next(&self, ladder: &Ladder, goal: u64, beside_kernels: bool) -> Next {
        if self.held {
            return Next::Nothing;
        }
        let mapped = self.mapped();
        if self.hand.bytes() > 0 && (goal <= mapped || !self.hand.fits(ladder, mapped)) {
            return Next::Return;
        }
        let end = mapped + self.hand.bytes();
        if !self.maps_ahead || goal <= mapped || self.retiring.start().is_some() {
            Next::Nothing
        } else if self.hand.bytes() > 0 && beside_kernels {
            Next::Commit
        } else if goal <= end {
            Next::Nothing
        } else {
            let size = ladder.size_at(end, goal);
            match end + size <= self.range.usable() {
                true => Next::Prepare { size, epoch: self.epoch },
                false => Next::Nothing,
            }
        }
    }
}

impl Work for Span {
    fn step(&self) -> Step {
        let drained = if self.ahead.asks.is_watched() { self.drain_ahead_of_others() } else { Step::Done };
        if !self.ahead.asks.turn_to() {
            return drained;
        }
        let mapped = self.map_ahead();
        if mapped != Step::Done {
            self.ahead.asks.want();
        }
        match (drained, mapped) {
            (Step::More, _) | (_, Step::More) => Step::More,
            (Step::Later, _) | (_, Step::Later) => Step::Later,
            _ => Step::Done,
        }
    }
}

impl Span {
    fn goal(&self) -> u64 {
        self.ahead.goal.load(Relaxed).min(self.ladder.span())
    }

    /// Gives up a chunk of what waited for events that have passed. What growth to come would want again stays mapped.
    fn drain_ahead_of_others(&self) -> Step {
        // Those who are short of memory do it themselves, and want the lock.
        if self.card().is_pressed() {
            return Step::Later;
        }
        if self.card().check_capture(None).is_err() {
            return Step::Done;
        }
        let Some(mut core) = self.try_lock() else { return Step::Later };
        let goal = if core.maps_ahead { self.goal() } else { 0 };
        let stays = core.chunk_end(goal.min(core.mapped()));
        match core.drain_step(stays) {
            Ok(Some(chunk)) => {
                drop(core);
                keep(&self.pool, [chunk]);
                Step::More
            }
            Ok(None) if core.retiring.events() > 0 => Step::Done,
            Ok(None) => {
                // All has passed, and what is left is wanted: it is as good as mapped ahead.
                core.with_all_mapped(|core| core.retiring.cut(0));
                self.ahead.asks.watch(false);
                if goal > 0 {
                    self.ahead.asks.want();
                }
                Step::More
            }
            Err(error) => {
                tracing::debug!(device = %self.card().id(), %error, "memory that waited for an event stays");
                // Later operations try again.
                self.ahead.asks.watch(false);
                Step::Done
            }
        }
    }

    /// Brings a chunk nearer to being mapped ahead.
    fn map_ahead(&self) -> Step {
        if self.card().is_pressed() {
            return Step::Later;
        }
        let Some(mut core) = self.try_lock() else { return Step::Later };
        let (asked, done) = match core.next(&self.ladder, self.goal(), self.ahead.beside_kernels) {
            Next::Nothing => return Step::Done,
            Next::Return => {
                let chunks = core.hand.take_all();
                drop(core);
                keep(&self.pool, chunks.into_iter().map(|taken| taken.chunk));
                return Step::More;
            }
            Next::Commit => {
                let size = core.hand.first().unwrap_or(0);
                (size, self.commit(core))
            }
            Next::Prepare { size, epoch } => {
                drop(core);
                (size, self.prepare(size, epoch))
            }
        };
        match done {
            Ok(()) => Step::More,
            Err(error) => {
                self.ahead.fail(&self.card().id(), asked, error);
                Step::Done
            }
        }
    }

    /// Takes a chunk in hand, and commits it where that is for the background.
    fn prepare(&self, size: u64, epoch: u64) -> Result<()> {
        self.card().check_capture(None)?;
        let taken = sparingly(|| self.pool.take_one(size))?;
        let mut core = self.lock();
        if core.epoch != epoch || core.retiring.start().is_some() {
            drop(core);
            self.pool.undo_take([taken]);
            return Ok(());
        }
        let end = core.mapped() + core.hand.bytes();
        if !core.held && fit(&self.ladder, end, [size]) == 0 {
            // The owner has mapped something there meanwhile.
            drop(core);
            keep(&self.pool, [taken.chunk]);
            return Ok(());
        }
        core.hand.put(taken);
        // An owner at work takes it from there if it needs it.
        if core.held || !self.ahead.beside_kernels { Ok(()) } else { self.commit(core) }
    }

    /// Maps the first chunk in hand.
    fn commit(&self, mut core: Locked<'_>) -> Result<()> {
        // A capture may have begun while the chunk was made. It stays in hand then.
        self.card().check_capture(None)?;
        let from = core.mapped();
        let Some(Taken { chunk, fresh }) = core.hand.take_first() else { return Ok(()) };
        match core.range.append(vec![chunk]) {
            Ok(()) => {
                core.tell_mapped(from);
                Ok(())
            }
            Err(rejected) => {
                drop(core);
                self.pool.undo_take(rejected.chunks.into_iter().map(|chunk| Taken { chunk, fresh }));
                Err(rejected.error)
            }
        }
    }
}

/// Whether chunks of these sizes, one after the other from `position` on, are what the ladder would put there.
pub(super) fn fit(ladder: &Ladder, mut position: u64, sizes: impl IntoIterator<Item = u64>) -> usize {
    let sizes = sizes.into_iter();
    let fits = |size: &u64| {
        let fits = position + size <= ladder.span()
            && (ladder.rule() == Sizing::Exact || ladder.size_at(position, position + 1) == *size);
        position += size;
        fits
    };
    sizes.take_while(fits).count()
}
