//! What all parts of one device share: the gate to its driver, the budgets it spends, and the accounts.

use core::fmt;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::background;
use crate::budget::{MapBudget, OpenFileBudget};
use crate::bytes::Bytes;
use crate::driver::{Call, Driver, DriverError, DriverErrorKind, DriverResult, Gate, RawStream};
use crate::error::{Error, OutOfMemory, Result, Shortage};
use crate::neighbours::{self, Short};
use crate::pool::PoolStats;
use crate::sync::AtomicU64;
use crate::waiting::{is_sparing, may_wait};

/// One device's shared state.
#[derive(Debug)]
pub(crate) struct Card {
    gate: Gate,
    files: Arc<OpenFileBudget>,
    maps: Arc<MapBudget>,
    accounts: Accounts,
    /// The spans of which memory waits for an event.
    retiring: Mutex<Vec<Weak<dyn Drain>>>,
    /// What was dropped while the device could not be waited for.
    orphans: Mutex<Vec<Box<dyn Orphan>>>,
    /// The pools of this card, which give way when memory runs out.
    pools: Mutex<Vec<Weak<dyn GiveWay>>>,
    /// The spans that may have memory for growth to come.
    ahead: Mutex<Vec<Weak<dyn MapsAhead>>>,
    /// The background threads of its pools.
    backgrounds: Mutex<Vec<Weak<background::Shared>>>,
    /// How many threads look for memory that has run out. Meanwhile the background takes none.
    pressed: AtomicUsize,
    /// Held while memory that waits is given up, so that nobody takes a list in use for an empty one.
    draining: Mutex<()>,
    /// The same while what is there for growth to come is taken back, until whoever needed it has tried again.
    taking_back: Mutex<()>,
    /// All memory there is, once somebody asked.
    total: OnceLock<u64>,
}

/// A span of which memory waits for an event.
pub(crate) trait Drain: Send + Sync + fmt::Debug {
    /// Gives up what has passed, unless the span is in use just now. Returns how much, and whether more waits.
    fn drain(&self) -> (u64, bool);
}

/// Memory whose buffer is gone, which could not be unmapped for want of an idle device.
pub(crate) trait Orphan: Send + fmt::Debug {
    /// Gives everything back; the device is idle. Returns how much left.
    fn bury(&mut self) -> u64;
}

/// Keeps memory that nobody uses.
pub(crate) trait GiveWay: Send + Sync + fmt::Debug {
    /// Gives it all back to the driver. Returns how much.
    fn give_way(&self) -> u64;

    /// What it did so far as a pool, if it is one.
    fn stats(&self) -> PoolStats {
        PoolStats::default()
    }
}

/// A span with memory for growth to come.
pub(crate) trait MapsAhead: Send + Sync + fmt::Debug {
    /// How much of it is mapped.
    fn ahead(&self) -> u64;
    /// Gives it all up. Returns how much.
    fn take_back(&self) -> u64;
}

/// Bytes by where they are. Every byte a driver gave out is in exactly one of `mapped`, `pooled`, `prepared`,
/// `retiring`, `in_hand`, `stranded` and `contiguous`.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    /// Addresses under spans.
    pub(crate) reserved: Account,
    /// Under spans, what is mapped ahead with it: a buffer takes that without a word.
    pub(crate) mapped: Account,
    /// Kept in pools.
    pub(crate) pooled: Account,
    /// In chunks that wait for the growth of one buffer, and are not mapped yet.
    pub(crate) prepared: Account,
    /// Waiting to be unmapped.
    pub(crate) retiring: Account,
    /// In chunks that are on their way between the others.
    pub(crate) in_hand: Account,
    /// In chunks that the driver would neither unmap nor release.
    pub(crate) stranded: Account,
    /// In contiguous blocks.
    pub(crate) contiguous: Account,
    /// Chunks there are.
    pub(crate) chunks: Account,
    /// The most `mapped` and `contiguous` were at any time.
    peak: AtomicU64,
}

/// One running total.
#[derive(Debug, Default)]
pub(crate) struct Account(AtomicU64);

impl Account {
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    pub(crate) fn sub(&self, n: u64) {
        let before = self.0.fetch_sub(n, Relaxed);
        debug_assert!(before >= n, "an account fell below zero");
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Moves `n` to another account.
    pub(crate) fn move_to(&self, other: &Self, n: u64) {
        self.sub(n);
        other.add(n);
    }
}

impl Accounts {
    /// Notes that memory in use rose.
    pub(crate) fn mark_peak(&self) {
        self.peak.fetch_max(self.mapped.get() + self.contiguous.get(), Relaxed);
    }

    pub(crate) fn peak(&self) -> u64 {
        self.peak.load(Relaxed)
    }
}

impl Card {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Arc<Self> {
        let gate = Gate::new(driver);
        let (files, maps) = match gate.limits() {
            Some(limits) => (Arc::new(OpenFileBudget::new(Arc::clone(&limits))), Arc::new(MapBudget::new(limits))),
            None => (OpenFileBudget::process(), MapBudget::process()),
        };
        let card = Arc::new(Self {
            gate,
            files,
            maps,
            accounts: Accounts::default(),
            retiring: Mutex::default(),
            orphans: Mutex::default(),
            pools: Mutex::default(),
            ahead: Mutex::default(),
            backgrounds: Mutex::default(),
            pressed: AtomicUsize::new(0),
            draining: Mutex::default(),
            taking_back: Mutex::default(),
            total: OnceLock::new(),
        });
        neighbours::add(&card);
        card
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(crate) fn files(&self) -> &Arc<OpenFileBudget> {
        &self.files
    }

    pub(crate) fn maps(&self) -> &Arc<MapBudget> {
        &self.maps
    }

    /// Waits until the device is idle, so that memory can be taken away. False if that cannot be known, as while a graph
    /// is captured.
    pub(crate) fn quiet(&self) -> bool {
        match twice(|| self.gate.synchronize()) {
            Ok(()) => true,
            Err(error) if is_gone(&error) => true,
            Err(error) => {
                tracing::warn!(device = %self.id(), %error, "the device could not be waited for");
                false
            }
        }
    }

    /// Waits until the device is idle, and gives back what could not be given back before for want of that.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.bury_after(|| Ok(self.gate.synchronize()?)).map(drop)
    }

    /// Takes memory over whose buffer is gone while the device could not be waited for.
    pub(crate) fn adopt(&self, orphan: Box<dyn Orphan>) {
        self.orphans.lock().push(orphan);
    }

    /// Waits, and gives back what had lost its buffer before. Returns how much left.
    fn bury_after(&self, wait: impl FnOnce() -> Result<()>) -> Result<u64> {
        // Taken before the waiting, which says nothing of work that was queued for what comes after.
        let mut orphans = core::mem::take(&mut *self.orphans.lock());
        let waited = wait();
        // For a lost device there is nothing to wait for.
        if waited.is_err() && self.gate.lost().is_none() {
            self.orphans.lock().append(&mut orphans);
            return waited.map(|()| 0);
        }
        // Not under the lock: the driver is called.
        let buried = orphans.iter_mut().map(|orphan| orphan.bury()).sum();
        waited.map(|()| buried)
    }

    /// Waits if anything has lost its buffer, and gives it back. Returns how much left.
    fn bury_orphans(&self) -> Result<u64> {
        if self.orphans.lock().is_empty() {
            return Ok(0);
        }
        self.bury_after(|| if self.quiet() { Ok(()) } else { Err(not_idle().into()) })
    }

    /// The device is closed: what could not be given back goes now or not at all.
    pub(crate) fn close(&self) {
        if self.gate.is_forked() {
            return;
        }
        if let Err(error) = self.bury_orphans() {
            tracing::warn!(device = %self.id(), %error, "a device was closed and not all of its memory came back");
        }
    }

    pub(crate) fn add_pool(&self, pool: Weak<dyn GiveWay>) {
        let mut pools = self.pools.lock();
        pools.retain(|known| known.strong_count() > 0);
        pools.push(pool);
    }

    /// What the pools there are did so far.
    pub(crate) fn pool_stats(&self) -> PoolStats {
        // In a forked child the background thread may have held their locks, and does not exist.
        if self.gate.is_forked() {
            return PoolStats::default();
        }
        let pools: Vec<_> = self.pools.lock().iter().filter_map(Weak::upgrade).collect();
        pools.iter().fold(PoolStats::default(), |sum, pool| sum.and(pool.stats()))
    }

    /// A span that may have memory for growth to come.
    pub(crate) fn add_ahead(&self, span: Weak<dyn MapsAhead>) {
        let mut spans = self.ahead.lock();
        spans.retain(|known| known.strong_count() > 0);
        if !spans.iter().any(|known| known.ptr_eq(&span)) {
            spans.push(span);
        }
    }

    pub(crate) fn add_background(&self, background: Weak<background::Shared>) {
        let mut backgrounds = self.backgrounds.lock();
        backgrounds.retain(|known| known.strong_count() > 0);
        backgrounds.push(background);
    }

    /// How much is mapped ahead under spans, part of what the accounts call mapped.
    pub(crate) fn mapped_ahead(&self) -> u64 {
        if self.gate.is_forked() {
            return 0;
        }
        alive(&self.ahead).iter().map(|span| span.ahead()).sum()
    }

    /// Waits until nothing is left to do in the background.
    pub(crate) fn settle(&self) {
        alive(&self.backgrounds).iter().for_each(|background| background.settle());
    }

    /// Whether some thread looks for memory that has run out, so that the background must not take any.
    pub(crate) fn is_pressed(&self) -> bool {
        self.pressed.load(SeqCst) > 0
    }

    /// Tries what takes memory, open files or map entries. When they run out, gives back what nobody uses and tries once
    /// more; then also what is there for growth to come, and what neighbours keep, and tries a last time.
    pub(crate) fn with_room<T>(&self, mut take: impl FnMut() -> Result<T>) -> Result<T> {
        // Also where making room gave nothing: another thread may have made some.
        let note = |error: &Error, made| {
            tracing::debug!(device = %self.id(), %error, made = %Bytes::new(made), "trying once more");
        };
        match take() {
            Err(error) if error.is_shortage() => note(&error, self.make_room()),
            result => return result,
        }
        let mut result = take();
        let is_short = |result: &Result<T>| result.as_ref().err().and_then(Short::of).filter(|_| !is_sparing());
        if is_short(&result).is_some() && !self.backgrounds.lock().is_empty() {
            let _alone = if may_wait() { Some(self.taking_back.lock()) } else { self.taking_back.try_lock() };
            let _pressed = Pressed::on(self);
            let made = self.take_back() + self.make_room();
            result = result.or_else(|error| {
                note(&error, made);
                take()
            });
        }
        let neighbours = is_short(&result).map_or_else(Vec::new, |short| neighbours::of(self, short));
        if neighbours.is_empty() {
            return result;
        }
        let pressed: Vec<_> = neighbours.iter().map(|card| Pressed::on(card)).collect();
        let made = neighbours.iter().map(|card| card.give_to_neighbours() + card.make_room()).sum();
        let result = result.or_else(|error| {
            note(&error, made);
            take()
        });
        drop(pressed);
        result
    }

    /// [`take_back`](Self::take_back) for another card, unless a graph is captured on this one.
    fn give_to_neighbours(&self) -> u64 {
        if self.check_capture(None).is_ok() { self.take_back() } else { 0 }
    }

    /// Gives back all that nobody uses: what waited for events that have passed, what lost its buffer, and what pools
    /// keep. Returns how much.
    fn make_room(&self) -> u64 {
        let drained = self.drain();
        drained + alive(&self.pools).iter().map(|pool| pool.give_way()).sum::<u64>()
    }

    /// Gives up what is there for growth to come. Returns how much. The background takes none meanwhile.
    fn take_back(&self) -> u64 {
        // What is just being taken is there in a moment.
        alive(&self.backgrounds).iter().for_each(|background| background.finish_piece());
        alive(&self.ahead).iter().map(|span| span.take_back()).sum()
    }

    /// Unmaps all that need not be mapped, when map entries run out. Returns how much.
    pub(crate) fn make_map_entries(&self) -> u64 {
        let _pressed = Pressed::on(self);
        let own = self.drain();
        if is_sparing() {
            return own;
        }
        let give = |card: &Arc<Self>| {
            let _pressed = Pressed::on(card);
            card.drain() + card.give_to_neighbours()
        };
        own + self.take_back() + neighbours::of(self, Short::Maps).iter().map(give).sum::<u64>()
    }

    /// All memory of the device; as much as can be said if the driver does not tell.
    pub(crate) fn total(&self) -> u64 {
        if let Some(total) = self.total.get() {
            return *total;
        }
        self.gate.memory().map_or(u64::MAX, |memory| *self.total.get_or_init(|| memory.total))
    }

    pub(crate) fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    pub(crate) fn id(&self) -> String {
        self.gate.info().id()
    }

    /// That a stream may be handed to this card's driver: one of a simulated device leads nowhere on a real one.
    pub(crate) fn check_stream(&self, stream: RawStream) -> Result<()> {
        if stream.fits(self.gate.info().backend) {
            return Ok(());
        }
        Err(Error::OtherDevice { what: "a stream", theirs: "a simulated device".to_owned(), ours: self.id() })
    }

    /// That no graph is being captured, as far as the driver tells: on the given stream, and on any that the default
    /// stream waits for.
    pub(crate) fn check_capture(&self, stream: Option<RawStream>) -> Result<()> {
        stream.into_iter().chain([RawStream::DEFAULT]).try_for_each(|stream| self.check_not_capturing(stream))
    }

    /// That this stream is not capturing a graph.
    pub(crate) fn check_not_capturing(&self, stream: RawStream) -> Result<()> {
        // SAFETY: the default stream always lives; whoever made another promised the same of it.
        match unsafe { self.gate.stream_is_capturing(stream) }? {
            true => Err(Error::Capturing { device: self.id() }),
            false => Ok(()),
        }
    }

    /// Notes that memory of a span waits for an event.
    pub(crate) fn add_retiring(&self, span: Weak<dyn Drain>) {
        let mut spans = self.retiring.lock();
        if !spans.iter().any(|known| known.ptr_eq(&span)) {
            spans.push(span);
        }
    }

    /// Gives up all memory whose event has passed, and what lost its buffer while the device could not be waited for;
    /// returns how much. Does nothing while a graph is captured.
    pub(crate) fn drain(&self) -> u64 {
        // In a forked child another thread may have held our locks, and does not exist.
        if self.gate.is_forked() {
            return 0;
        }
        let draining = if may_wait() { Some(self.draining.lock()) } else { self.draining.try_lock() };
        // A hook may have been called from there, by whoever holds it.
        let Some(_draining) = draining else { return 0 };
        let lost = self.gate.lost().is_some();
        if self.accounts.retiring.get() == 0 || (!lost && self.check_capture(None).is_err()) {
            return 0;
        }
        // Not for what is not needed yet: it takes a wait for the whole device.
        let mut drained = if is_sparing() { 0 } else { self.bury_orphans().unwrap_or(0) };
        // The list is not held while the driver is called.
        let mut spans = core::mem::take(&mut *self.retiring.lock());
        spans.retain(|span| {
            let Some(span) = span.upgrade() else { return false };
            let (bytes, more) = span.drain();
            drained += bytes;
            more
        });
        for span in spans {
            self.add_retiring(span);
        }
        drained
    }

    /// An error of a call that asked for `asked` bytes of memory, with the figures that explain it. Open files are
    /// looked at before a shortage of memory is believed.
    pub(crate) fn explain(&self, asked: u64, error: DriverError) -> Error {
        match error.kind() {
            DriverErrorKind::OutOfFiles => Error::OutOfFiles(self.file_shortage()),
            DriverErrorKind::OutOfMaps => {
                let usage = self.maps.usage();
                Error::OutOfMaps(Shortage {
                    needed: usage.ours + usage.others + 1,
                    limit: usage.limit,
                    hard: usage.hard,
                })
            }
            DriverErrorKind::OutOfMemory if self.files_are_short() => Error::OutOfFiles(self.file_shortage()),
            DriverErrorKind::OutOfMemory => {
                let memory = self.gate.memory().ok();
                let accounts = &self.accounts;
                Error::OutOfMemory(Box::new(OutOfMemory {
                    asked: Bytes::new(asked),
                    mapped: Bytes::new(accounts.mapped.get() + accounts.contiguous.get()),
                    pooled: Bytes::new(accounts.pooled.get()),
                    retiring: Bytes::new(accounts.retiring.get()),
                    ahead: Bytes::new(self.mapped_ahead() + accounts.prepared.get()),
                    in_hand: Bytes::new(accounts.in_hand.get()),
                    stranded: Bytes::new(accounts.stranded.get()),
                    free: Bytes::new(memory.map_or(0, |memory| memory.free)),
                    total: Bytes::new(memory.map_or(0, |memory| memory.total)),
                    source: error,
                }))
            }
            _ => error.into(),
        }
    }

    /// How many chunks there may be in all by the open files; none where they keep none.
    pub(crate) fn files_in_all(&self) -> Option<u64> {
        (self.gate.info().open_files_per_chunk > 0).then(|| {
            let usage = self.files.usage();
            usage.hard.saturating_sub(usage.headroom)
        })
    }

    fn file_shortage(&self) -> Shortage {
        let usage = self.files.usage();
        Shortage { needed: usage.ours + usage.headroom + 1, limit: usage.limit, hard: usage.hard }
    }

    /// Whether the process has in truth run out of open files, for drivers that spend them and call it something else.
    fn files_are_short(&self) -> bool {
        if self.gate.info().open_files_per_chunk == 0 {
            return false;
        }
        self.files.usage().is_used_up()
    }
}

/// While it lives, the background takes no memory.
struct Pressed<'a>(&'a Card);

impl<'a> Pressed<'a> {
    fn on(card: &'a Card) -> Self {
        card.pressed.fetch_add(1, SeqCst);
        Self(card)
    }
}

impl Drop for Pressed<'_> {
    fn drop(&mut self) {
        self.0.pressed.fetch_sub(1, SeqCst);
    }
}

/// Those that are still there; not under the lock, since what is done with them may want it.
fn alive<T: ?Sized>(list: &Mutex<Vec<Weak<T>>>) -> Vec<Arc<T>> {
    list.lock().iter().filter_map(Weak::upgrade).collect()
}

/// Checks a block or span that a driver handed out: never null, always aligned.
pub(crate) fn check_address(address: u64, bytes: u64, align: u64) -> Result<u64, NoAddress> {
    match () {
        () if address == 0 => Err(NoAddress::Null),
        () if !address.is_multiple_of(align.max(1)) => Err(NoAddress::Misaligned),
        () if address.checked_add(bytes).is_none() => Err(NoAddress::Wraps),
        () => Ok(address),
    }
}

/// What was wrong with an address that a driver returned with success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoAddress {
    Null,
    Misaligned,
    Wraps,
}

impl fmt::Display for NoAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Null => "the driver returned success and a null address",
            Self::Misaligned => "the driver returned success and a misaligned address",
            Self::Wraps => "the driver returned success and an address beyond the end of memory",
        })
    }
}

/// Whether an error of giving something back means that it is gone anyway: with its driver, its device, or because it
/// was the parent's.
pub(crate) fn is_gone(error: &DriverError) -> bool {
    matches!(error.kind(), DriverErrorKind::DeviceLost | DriverErrorKind::ShutDown | DriverErrorKind::Forked)
}

/// Tries what gives something back a second time if it fails: a refusal for a passing reason (work that other threads
/// queue just now) would otherwise cost the memory for good.
pub(crate) fn twice(mut give_back: impl FnMut() -> DriverResult<()>) -> DriverResult<()> {
    match give_back() {
        Err(error) if !is_gone(&error) => give_back(),
        result => result,
    }
}

/// The error of memory that cannot go yet, because the device cannot be waited for.
pub(crate) fn not_idle() -> DriverError {
    DriverError::new(Call::Synchronize, DriverErrorKind::Other)
        .with_detail("the device could not be waited for, so nothing was unmapped")
}
