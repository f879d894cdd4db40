//! Shrinks that do not wait: what was given up goes once its event has passed.
//!
//! With a background thread the caller only notes what is to go, and the thread looks after it. Without one, later
//! operations on the device do.

use core::time::Duration;
use std::time::Instant;

use super::segmented::Segmented;
use super::{Backing, Shrunk};
use crate::bytes::Bytes;
use crate::card::Drain;
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

    /// [`Backing::shrink_later`].
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
        let (mut waiting, committed) = self.let_wait(bytes, event);
        if alone && more > 0 {
            // An event that has passed already is not waited for.
            released += self.drain_now();
            waiting = self.retiring().bytes;
        }
        // The background is told last: it wants the lock.
        if waiting > 0 {
            self.register();
        }
        if let Some(desk) = &self.desk {
            // What is in hand goes back there.
            desk.want(false);
        }
        let (released, retiring, committed) = (Bytes::new(released), Bytes::new(waiting), Bytes::new(committed));
        Ok(Shrunk { released, retiring, committed, waited, why: None })
    }

    /// Gives up what waited and has passed, on this thread.
    fn drain_now(&self) -> u64 {
        self.span.drain().0
    }

    /// Makes room on the list for `bytes` more. Returns how long that was waited for, if it was.
    fn keep_the_bound(&self, bytes: u64) -> Result<Option<Duration>> {
        let mut began = None;
        loop {
            let oldest = {
                let core = self.core();
                let waiting = core.mapped() - core.ready();
                let events = core.retiring.events();
                if waiting == 0 || events < self.limit.entries.max(1) && self.fits(waiting, bytes) {
                    break;
                }
                core.retiring.waiting().next().cloned()
            };
            let Some(oldest) = oldest else {
                // Nothing is waited for, and it stays all the same.
                break;
            };
            if began.is_none() {
                tracing::warn!(device = %self.card().id(), "too much memory waits for events; waiting for the oldest");
                began = Some(Instant::now());
            }
            oldest.wait()?;
            self.drain_now();
        }
        Ok(began.map(|began| began.elapsed()))
    }

    /// Lets whole chunks above `bytes` wait for `event`, and what is mapped ahead for nothing. Returns how much waits for
    /// events, and what stays.
    fn let_wait(&mut self, bytes: u64, event: &Event) -> (u64, u64) {
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
        (core.mapped() - core.ready() - ready.saturating_sub(from), core.committed())
    }

    /// Whether so much more may wait.
    fn fits(&self, waiting: u64, more: u64) -> bool {
        let most = self.limit.bytes.map_or_else(|| self.card().total() / 4, Bytes::get);
        waiting.saturating_add(more) <= most
    }
}
