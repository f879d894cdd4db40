//! Chunks under a span: the backing that grows and shrinks in place.

use core::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::ahead::AheadPolicy;
use super::defer::RetireLimit;
use super::grants::{Figures, MOST_GRANULES};
use super::hooks::MapHooks;
use super::span::{Core, Locked, Span, Waiting, keep};
use super::{Backing, Growth, Mode, Reach, Retiring, Shrunk};
use crate::background::Desk;
use crate::bytes::Bytes;
use crate::card::{Card, not_idle};
use crate::driver::{Call, DriverError, DriverErrorKind, Quirks};
use crate::error::{Error, Result};
use crate::pool::{Chunk, ChunkPool, Ladder, Sizing, Taken};
use crate::quiesce::Event;
use crate::range::{MappedChunk, Rejected, ReservedRange};

/// A [`ReservedRange`] with a sizing rule and a pool.
pub struct Segmented {
    pub(super) span: Arc<Span>,
    pub(super) ladder: Ladder,
    pub(super) pool: ChunkPool,
    pub(super) granularity: u64,
    pub(super) base: u64,
    policy: AheadPolicy,
    pub(super) limit: RetireLimit,
    /// Where the background thread is asked for what, once it is.
    pub(super) desk: Option<Desk>,
}

impl Segmented {
    pub(crate) fn open(
        pool: &ChunkPool,
        ladder: Ladder,
        granularity: u64,
        quirks: &Quirks,
        hooks: Option<Arc<dyn MapHooks>>,
        limit: RetireLimit,
    ) -> Result<Self> {
        if ladder.span() / granularity >= MOST_GRANULES {
            let source = DriverError::new(Call::Reserve, DriverErrorKind::OutOfAddresses)
                .with_detail(format!("{MOST_GRANULES} chunks of {} or more", Bytes::new(granularity)));
            return Err(Error::Reserve { asked: Bytes::new(ladder.span()), source });
        }
        let range = ReservedRange::reserve(pool.card(), ladder.span(), granularity)?;
        let base = range.base();
        let span = Span::new(Core::new(range, pool, hooks), ladder, granularity, quirks.map_beside_kernels);
        let (pool, policy) = (pool.clone(), AheadPolicy::Off);
        Ok(Self { span, ladder, pool, granularity, base, policy, limit, desk: None })
    }

    pub(super) fn card(&self) -> &Arc<Card> {
        self.pool.card()
    }

    pub(super) fn core(&self) -> Locked<'_> {
        self.span.lock()
    }

    /// The lock, but in a forked child only if nobody held it when it was forked.
    fn core_to_look(&self) -> Option<Locked<'_>> {
        if self.card().gate().is_forked() { self.span.try_lock() } else { Some(self.core()) }
    }

    pub(super) fn shrunk(&self, released: u64, retiring: u64, why: Option<String>) -> Shrunk {
        let committed = Bytes::new(self.core().committed());
        Shrunk { released: Bytes::new(released), retiring: Bytes::new(retiring), committed, waited: None, why }
    }

    /// Undoes a take of chunks that were made for it or not.
    pub(super) fn put_back(&self, chunks: Vec<Chunk>, fresh: Vec<bool>) {
        self.pool.undo_take(chunks.into_iter().zip(fresh).map(|(chunk, fresh)| Taken { chunk, fresh }));
    }

    /// Where the chunks end that `bytes` takes, of those that follow what is granted.
    fn grant_end(&self, granted: u64, bytes: u64) -> u64 {
        granted + self.ladder.sizes(granted, bytes).sum::<u64>()
    }

    /// Up to where growth of a buffer of `len` bytes need not be looked at. Asks for more ahead where little is left.
    fn limit_of(&self, figures: Figures, len: u64) -> u64 {
        let (Some(target), Some(desk)) = (self.policy.target(len, self.granularity), &self.desk) else {
            return figures.granted;
        };
        let there = figures.ready + self.span.prepared();
        if there >= self.ladder.span() {
            return figures.granted;
        }
        let (left, low) = (there.saturating_sub(len), target / 2);
        let next = if left >= low {
            there - low
        } else {
            self.span.ahead.aim(len.saturating_add(target));
            desk.want(left < low / 2);
            // Looked at again well before what is left is used up, in case it comes to nothing.
            len + (left / 4).max(1)
        };
        next.clamp(len.min(figures.granted), figures.granted)
    }

    /// Maps chunks behind what is mapped. When map entries run out, what need not be mapped is unmapped and it is tried
    /// once more.
    fn append(&self, chunks: Vec<Chunk>) -> Result<(), Box<Rejected>> {
        let append = |chunks| -> Result<(), Box<Rejected>> {
            let mut core = self.core();
            let from = core.mapped();
            core.range.append(chunks)?;
            core.tell_mapped(from);
            // Before others may take it back.
            core.publish();
            self.span.grant(core.mapped());
            Ok(())
        };
        match append(chunks) {
            Err(rejected) if matches!(rejected.error, Error::OutOfMaps(_)) => {
                self.card().make_map_entries();
                append(rejected.chunks)
            }
            result => result,
        }
    }

    /// Grows beyond what is ready.
    fn grow_beyond(&mut self, bytes: u64, granted: u64) -> Result<Growth> {
        if self.card().gate().is_forked() {
            return Err(Error::Forked);
        }
        let mut core = self.core();
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
        core.publish();
        let (from, ready) = (core.mapped(), core.ready());
        let mut growth = Growth { granted, takes: true, retiring: before, ..Growth::nothing(from) };
        if bytes <= ready {
            // It came back, or the background was faster.
            self.span.grant(self.grant_end(granted, bytes).min(ready));
            return Ok(growth);
        }
        self.span.grant(ready);
        // From here on to the end of the growth nobody else maps anything.
        core.held = true;
        growth.held = true;
        let prepared = core.hand.take_fitting(&self.ladder, from, bytes);
        // The pool may empty itself and drain other spans: not with this one locked.
        drop(core);
        match self.map_from(&mut growth, bytes, prepared) {
            Ok(()) => Ok(growth),
            Err(error) => {
                growth.fresh.clear();
                self.undo(growth)?;
                Err(error)
            }
        }
    }

    /// Maps chunks up to `bytes`, those that were prepared first; or nothing.
    fn map_from(&mut self, growth: &mut Growth, bytes: u64, prepared: Vec<Taken>) -> Result<()> {
        let at = growth.from + prepared.iter().map(|taken| taken.chunk.size()).sum::<u64>();
        let taken = self.card().check_capture(None).and_then(|()| self.pool.take_run(self.ladder.sizes(at, bytes)));
        let run = match taken {
            Ok(run) => run,
            Err(error) => {
                self.core().hand.put_first(prepared);
                return Err(error);
            }
        };
        growth.prepared = prepared.len();
        let run = prepared.into_iter().chain(run);
        let (chunks, fresh) = run.map(|taken| (taken.chunk, taken.fresh)).unzip();
        growth.fresh = fresh;
        self.append(chunks).map_err(|rejected| {
            // Chunks that got stuck are not among those that came back; those before them are, in order, so the pairing can
            // only be off for a span that is blocked from now on.
            self.unhand(rejected.chunks, growth);
            rejected.error
        })
    }

    /// Gives chunks of a growth back to where they came from.
    fn unhand(&self, mut chunks: Vec<Chunk>, growth: &mut Growth) {
        let mut fresh = core::mem::take(&mut growth.fresh);
        let prepared = growth.prepared.min(chunks.len());
        let rest = (chunks.split_off(prepared), fresh.split_off(prepared.min(fresh.len())));
        let taken = chunks.into_iter().zip(fresh).map(|(chunk, fresh)| Taken { chunk, fresh });
        self.core().hand.put_first(taken);
        self.put_back(rest.0, rest.1);
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
        self.span.figures().granted
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

    fn ahead(&self) -> u64 {
        let figures = self.span.figures();
        figures.ready - figures.granted + self.span.prepared()
    }

    fn retiring(&self) -> Retiring {
        let Some(core) = self.core_to_look() else { return Retiring::default() };
        Retiring { shrinks: core.retiring.events(), bytes: core.mapped() - core.ready() }
    }

    fn chunks(&self) -> Vec<MappedChunk> {
        let Some(core) = self.core_to_look() else { return Vec::new() };
        let end = self.base + core.committed();
        core.range.chunks().take_while(|chunk| chunk.address < end).collect()
    }

    fn grow(&mut self, bytes: u64) -> Result<Growth> {
        let figures = self.span.figures();
        if bytes <= figures.granted {
            return Ok(Growth::nothing(figures.granted));
        }
        self.span.ahead.check()?;
        if bytes <= figures.ready && self.span.grant(self.grant_end(figures.granted, bytes).min(figures.ready)) {
            return Ok(Growth { granted: figures.granted, takes: true, ..Growth::nothing(figures.ready) });
        }
        self.grow_beyond(bytes, figures.granted)
    }

    fn settle(&mut self, growth: Growth) {
        if !growth.held {
            return;
        }
        let mut core = self.core();
        core.held = false;
        // A chunk that was on its way may be of no use here any more. What is counted as prepared has to be.
        let fits = core.hand.fits(&self.ladder, core.mapped());
        let useless = if fits { Vec::new() } else { core.hand.take_all() };
        drop(core);
        keep(&self.pool, useless.into_iter().map(|taken| taken.chunk));
    }

    fn undo(&mut self, mut growth: Growth) -> Result<()> {
        if growth.takes && !growth.held && growth.retiring.is_none() {
            self.span.leave(growth.granted);
            return Ok(());
        }
        if !growth.takes {
            return Ok(());
        }
        let mut result = Ok(());
        let mut core = self.core();
        if !growth.fresh.is_empty() {
            core.tell_unmapping(growth.from);
            // SAFETY: the memory was mapped by this growth, which nobody was told of; nobody else has mapped any since.
            let chunks = match unsafe { core.range.take_from(Bytes::new(growth.from)) } {
                Ok(chunks) => chunks,
                Err(rejected) => {
                    core.tell_mapped(growth.from);
                    result = Err(rejected.error);
                    rejected.chunks
                }
            };
            drop(core);
            self.unhand(chunks, &mut growth);
            core = self.core();
        }
        self.span.leave(growth.granted);
        if let Some(retiring) = growth.retiring.filter(|_| result.is_ok()) {
            core.with_all_mapped(|core| {
                core.retiring = retiring;
                core.epoch += 1;
                // Some of it may have passed and gone meanwhile.
                let mapped = core.mapped();
                core.retiring.cut(mapped);
            });
        }
        core.held = false;
        let waits = core.retiring.start().is_some();
        drop(core);
        if waits {
            self.register();
        }
        result
    }

    fn would_release(&self, bytes: u64) -> u64 {
        let core = self.core();
        core.mapped() - core.ready() + core.committed().saturating_sub(core.chunk_end(bytes))
    }

    unsafe fn shrink(&mut self, bytes: u64) -> Result<Shrunk> {
        let mut core = self.core();
        // What an earlier shrink left waiting lies above, and goes first: the caller does not speak for it.
        let mut released = core.flush_retiring()?;
        let committed = core.committed();
        if core.chunk_end(bytes) < committed {
            // What is mapped ahead lies above too, and goes along. It was not the buffer's.
            let ahead = core.mapped() - committed;
            core.withdraw();
            // SAFETY: the caller promises that nothing touches memory from `bytes` on.
            released += unsafe { core.give_up(bytes) }? - ahead;
        } else if core.mapped() > committed && self.card().check_capture(None).is_ok() {
            // The shrink is done without that.
            let _ = core.flush_ahead();
        }
        self.span.ahead.forget();
        core.empty_hand();
        drop(core);
        Ok(self.shrunk(released, 0, None))
    }

    fn shrink_later(&mut self, bytes: u64, event: &Event) -> Result<Shrunk> {
        self.defer(bytes, event)
    }

    unsafe fn shrink_exact(&mut self, bytes: u64) -> Result<Shrunk> {
        // SAFETY: the contract is the same.
        unsafe { self.cut_to(bytes) }
    }

    fn as_segmented(&mut self) -> Option<&mut Segmented> {
        Some(self)
    }

    fn grow_ahead(&mut self, policy: AheadPolicy, len: u64) -> Result<()> {
        if policy == AheadPolicy::Off {
            self.flush_ahead()?;
            self.policy = policy;
            self.core().maps_ahead = false;
            return Ok(());
        }
        if self.card().gate().is_forked() {
            return Err(Error::Forked);
        }
        if self.desk.is_none() {
            let background = self.pool.start_background()?;
            self.desk = Some(background.enter(&self.span.ahead.asks, self.span.as_work()));
        }
        if self.policy == AheadPolicy::Off {
            self.card().add_ahead(self.span.as_ahead());
        }
        self.core().maps_ahead = true;
        self.policy = policy;
        if let (Some(target), Some(desk)) = (policy.target(len, self.granularity), &self.desk) {
            self.span.ahead.aim(len.saturating_add(target));
            desk.want(true);
        }
        Ok(())
    }

    fn take_ahead(&mut self, bytes: u64) -> Option<Reach> {
        let mut figures = self.span.figures();
        let took = bytes > figures.granted;
        if took {
            let end = self.grant_end(figures.granted, bytes).min(figures.ready);
            if bytes > figures.ready || self.span.ahead.has_failed() || !self.span.grant(end) {
                return None;
            }
            figures.granted = end;
        }
        Some(Reach { committed: figures.granted, limit: self.limit_of(figures, bytes), took })
    }

    fn look_ahead(&mut self, len: u64) -> u64 {
        self.limit_of(self.span.figures(), len)
    }

    fn flush_ahead(&mut self) -> Result<Bytes> {
        if self.policy == AheadPolicy::Off {
            return Ok(Bytes::ZERO);
        }
        if self.card().gate().is_forked() {
            return Err(Error::Forked);
        }
        self.span.ahead.forget();
        let mut core = self.core();
        core.epoch += 1;
        if core.hand.bytes() + core.mapped() - core.committed() > 0 {
            self.card().check_capture(None)?;
        }
        let mapped = core.flush_ahead()?;
        Ok(Bytes::new(mapped + core.empty_hand()))
    }

    fn export(&mut self, chunk: usize) -> Result<OwnedFd> {
        if self.card().gate().is_forked() {
            return Err(Error::Forked);
        }
        let len = self.chunks().len();
        match self.core().range.chunk_mut(chunk).filter(|_| chunk < len) {
            Some(chunk) => chunk.export(),
            None => Err(Error::OutOfBounds { what: "exporting", start: chunk, count: 1, len }),
        }
    }

    fn leave_to_itself(&mut self) {
        let flushed = self.grow_ahead(AheadPolicy::Off, 0);
        if let Some(desk) = self.desk.take() {
            desk.leave();
        }
        if let Err(error) = flushed {
            tracing::warn!(device = %self.card().id(), %error, "memory mapped ahead is given away with a buffer");
            self.core().maps_ahead = false;
        }
    }

    fn close(&mut self) -> Result<()> {
        if let Some(desk) = self.desk.take() {
            desk.leave();
        }
        let card = Arc::clone(self.card());
        let mapped = {
            let mut core = self.core();
            core.empty_hand();
            core.mapped() > 0
        };
        // Not under the lock, which others who are short of memory may want. Nothing is mapped here any more.
        let quiet = !mapped || card.quiet();
        let mut core = self.core();
        if core.mapped() > 0 && !quiet {
            let range = core::mem::replace(&mut core.range, ReservedRange::nothing(&card));
            let hooks = core.hooks.take();
            let mut orphan = Core::new(range, &core.pool, hooks);
            let bytes = Bytes::new(orphan.mapped());
            // All of it waits now.
            let waiting = core::mem::take(&mut core.retiring);
            let ready = waiting.start().unwrap_or(orphan.mapped());
            card.accounts().mapped.move_to(&card.accounts().retiring, ready);
            orphan.retiring = Waiting::default();
            drop(core);
            card.adopt(Box::new(orphan));
            return Err(Error::NotReturned { bytes, source: not_idle() });
        }
        core.with_all_mapped(Core::tear_down)
    }
}

impl fmt::Debug for Segmented {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segmented").field("span", &self.span).field("policy", &self.policy).finish_non_exhaustive()
    }
}
