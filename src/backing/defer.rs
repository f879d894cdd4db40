//! Shrinks that do not wait: what was given up goes once its event has passed.
//!
//! With a background thread the caller only notes what is to go, and the thread looks after it. Without one, later
//! operations on the device do.

use core::time::Duration;
use std::time::Instant;

use super::Shrunk;
use super::segmented::Segmented;
use super::span::keep;
use crate::bytes::Bytes;
use crate::error::Result;
use crate::quiesce::Event;

/// How much of one buffer may wait for events.
#[derive(Clone, Copy, Debug)]
pub struct RetireLimit {
    /// Shrinks; at least one.
    pub entries: usize,
    /// Bytes; a quarter of the device's memory if none. One shrink may exceed it if nothing else waits.
    pub bytes: Option<Bytes>,
}

impl Default for RetireLimit {
    fn default() -> Self {
        Self { entries: 64, bytes: None }
    }
}

/// How a span stands after a shrink that does not wait.
struct Left {
    /// All that waits.
    waits: u64,
    /// What of it had been mapped ahead until now.
    ahead: u64,
    /// What the buffer has.
    committed: u64,
}

impl Segmented {
    /// Lets others on the card, and the background if there is one, give up for us what waits for events.
    pub(super) fn register(&mut self) {
        self.card().add_retiring(self.span.as_drain());
        if self.desk.is_none()
            && let Some(background) = self.pool.background().running()
        {
            self.desk = Some(background.enter(&self.span.ahead.asks, self.span.as_work()));
        }
        if let Some(desk) = &self.desk {
            desk.watch();
        }
    }

    /// [`Backing::shrink_later`](super::Backing::shrink_later).
    pub(super) fn defer(&mut self, bytes: u64, event: &Event) -> Result<Shrunk> {
        event.check(self.card())?;
        let more = {
            let core = self.core();
            core.committed().saturating_sub(core.chunk_end(bytes))
        };
        let mut waited = None;
        // With a background nothing is unmapped here, unless too much waits.
        let alone = self.pool.background().running().is_none();
        let mut released = 0;
        if more > 0 {
            self.card().check_capture(None)?;
            released = if alone { self.drain_now() } else { 0 };
            waited = self.keep_the_bound(more)?;
        }
        // As it is now: where there is a background, some of it may be gone in a moment.
        let Left { mut waits, ahead, committed } = self.let_wait(bytes, event);
        if alone {
            // An event that has passed already is not waited for.
            let drained = self.drain_now();
            released += drained;
            waits = waits.saturating_sub(drained);
        }
        // The background is told last: it wants the lock.
        if waits > 0 {
            self.register();
        }
        if let Some(desk) = &self.desk {
            // What is in hand goes back there.
            desk.want(false);
        }
        // What was ahead was not the buffer's.
        let (released, retiring) = (Bytes::new(released), Bytes::new(waits.saturating_sub(ahead)));
        Ok(Shrunk { released, retiring, committed: Bytes::new(committed), waited, why: None })
    }

    /// Gives up what waited and has passed, on this thread. Returns how much.
    fn drain_now(&self) -> u64 {
        let mut drained = 0;
        loop {
            let mut core = self.core();
            match core.drain_step(0) {
                Ok(Some(chunk)) => {
                    drop(core);
                    drained += keep(&self.pool, [chunk]);
                }
                Ok(None) => return drained,
                Err(error) => {
                    tracing::debug!(device = %self.card().id(), %error, "memory that waited for an event stays");
                    return drained;
                }
            }
        }
    }

    /// Makes room on the list for `bytes` more. Returns how long that was waited for, if it was.
    fn keep_the_bound(&self, bytes: u64) -> Result<Option<Duration>> {
        let (mut began, mut before) = (None, None);
        loop {
            let (oldest, list) = {
                let core = self.core();
                let (waiting, events) = (core.mapped() - core.ready(), core.retiring.events());
                if waiting == 0 || events < self.limit.entries.max(1) && self.fits(waiting, bytes) {
                    break;
                }
                (core.retiring.waiting().next().cloned(), Some((waiting, events)))
            };
            let Some(oldest) = oldest.filter(|_| list != before) else {
                // The driver keeps it, whatever is waited for.
                break;
            };
            before = list;
            if began.is_none() {
                tracing::warn!(device = %self.card().id(), "too much memory waits for events; waiting for the oldest");
                began = Some(Instant::now());
            }
            oldest.wait()?;
            self.drain_now();
        }
        Ok(began.map(|began| began.elapsed()))
    }

    /// Lets whole chunks above `bytes` wait for `event`, and what is mapped ahead for nothing.
    fn let_wait(&mut self, bytes: u64, event: &Event) -> Left {
        let mut core = self.core();
        self.span.ahead.forget();
        core.epoch += 1;
        let (start, committed) = (core.chunk_end(bytes), core.committed());
        let (from, ready) = (core.withdraw(), core.ready());
        core.with_all_mapped(|core| {
            if from < ready {
                core.retiring.push(from, None);
            }
            if start < committed {
                core.retiring.push(start, Some(event.point()));
            }
        });
        let waits = core.mapped() - core.ready();
        Left { waits, ahead: ready - committed, committed: core.committed() }
    }

    /// Whether so much more may wait.
    fn fits(&self, waiting: u64, more: u64) -> bool {
        let most = self.limit.bytes.map_or_else(|| self.card().total() / 4, Bytes::get);
        waiting.saturating_add(more) <= most
    }
}
