//! One thread per pool that does what nobody should wait for: it maps ahead, and gives up what waited for events.
//!
//! It is started when the first buffer of the pool asks for it and ends with the pool. Spans hand in their work, a piece at
//! a time; the thread goes round, so that none keeps the others waiting. It holds no lock of its own while it works, and
//! waits for nobody but the lock on the one span it works for.

#[cfg(all(test, loom))]
mod models;
mod signal;

use core::fmt;
use core::panic::AssertUnwindSafe;
use core::time::Duration;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, JoinHandle, Thread};

use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};
use crate::waiting::{NoWaiting, may_wait};
pub(crate) use signal::{Asks, Rest, Signal};

/// How long a nap is. What waits for an event is looked at as often.
const NAP: Duration = Duration::from_millis(1);
/// After so many naps with nothing to do it sleeps.
const NAPS: u32 = 250;
/// The thread's name, as debuggers and `top` show it.
const NAME: &str = "growspan-ahead";

/// A span with work for the background.
pub(crate) trait Work: Send + Sync {
    /// Does a piece of what was asked for.
    fn step(&self) -> Step;
}

/// How a piece of work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing is left to do.
    Done,
    /// There is more to do at once.
    More,
    /// There is more to do, and not now.
    Later,
}

/// The background thread of a pool, started at first use. Dropping it ends the thread.
#[derive(Debug, Default)]
pub(crate) struct Background(Mutex<Option<Running>>);

#[derive(Debug)]
struct Running {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    process: u32,
}

impl Background {
    /// The thread, started if need be, and whether it was.
    ///
    /// # Errors
    /// [`Error::NoThread`].
    pub(crate) fn start(&self) -> Result<(Arc<Shared>, bool)> {
        let mut running = self.0.lock();
        if let Some(running) = &*running {
            return Ok((Arc::clone(&running.shared), false));
        }
        let shared = Arc::new(Shared::new());
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name(NAME.to_owned())
            .spawn(move || theirs.run())
            .map_err(|error| Error::NoThread { why: error.to_string() })?;
        // Set before anybody can ask anything.
        let _ = shared.thread.set(thread.thread().clone());
        *running = Some(Running { shared: Arc::clone(&shared), thread: Some(thread), process: std::process::id() });
        Ok((shared, true))
    }

    /// The thread, if it runs.
    pub(crate) fn running(&self) -> Option<Arc<Shared>> {
        self.0.lock().as_ref().map(|running| Arc::clone(&running.shared))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if std::process::id() != self.process {
            // In a forked child the thread does not exist, and neither joining nor letting go of it is defined.
            core::mem::forget(thread);
            return;
        }
        self.shared.registry.lock().stop = true;
        // Whoever waits for the thread waits for nothing any more.
        self.shared.told.notify_all();
        self.shared.wake(true);
        // The last owner may go on the thread itself, in a hook or with the last piece of work of a span.
        if thread.thread().id() == thread::current().id() {
            return;
        }
        if thread.join().is_err() {
            tracing::error!("the background thread panicked");
        }
    }
}

/// What the thread and those who ask it share.
pub(crate) struct Shared {
    signal: Signal,
    thread: OnceLock<Thread>,
    registry: Mutex<Registry>,
    /// The thread has put something down, or has settled.
    told: Condvar,
}

#[derive(Default)]
struct Registry {
    /// In order of number.
    entries: Vec<Entry>,
    last: u64,
    /// What the thread works for just now.
    current: Option<u64>,
    /// How many pieces of work are over.
    pieces: u64,
    /// How often somebody asked to be told when nothing is left to do, and up to which of them it was so.
    asked: u64,
    settled: u64,
    stop: bool,
}

struct Entry {
    number: u64,
    asks: Arc<Asks>,
    /// Not an owner: the span goes with its buffer.
    work: Weak<dyn Work>,
}

/// A span's place among those the thread works for. It has to be left: dropping it alone says nothing.
#[derive(Debug)]
#[must_use]
pub(crate) struct Desk {
    shared: Arc<Shared>,
    asks: Arc<Asks>,
    number: u64,
}

impl Desk {
    /// Asks to map ahead.
    pub(crate) fn want(&self, urgent: bool) {
        if self.asks.want() || urgent {
            self.shared.wake(urgent);
        }
    }

    /// Asks to look after memory that waits for events.
    pub(crate) fn watch(&self) {
        self.asks.watch(true);
        self.shared.wake(false);
    }

    /// Ends the work for this span, and waits for the piece that is being done.
    pub(crate) fn leave(self) {
        let mut registry = self.shared.registry.lock();
        registry.entries.retain(|entry| entry.number != self.number);
        while registry.current == Some(self.number) && may_wait() {
            self.shared.told.wait(&mut registry);
        }
    }
}

impl Shared {
    fn new() -> Self {
        let (signal, thread) = (Signal::new(), OnceLock::new());
        Self { signal, thread, registry: Mutex::default(), told: Condvar::new() }
    }

    /// Takes a span in.
    pub(crate) fn enter(self: &Arc<Self>, asks: &Arc<Asks>, work: Weak<dyn Work>) -> Desk {
        let mut registry = self.registry.lock();
        registry.last += 1;
        let number = registry.last;
        registry.entries.push(Entry { number, asks: Arc::clone(asks), work });
        Desk { shared: Arc::clone(self), asks: Arc::clone(asks), number }
    }

    fn wake(&self, urgent: bool) {
        if self.signal.ask(urgent)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Waits until nothing is left to do: what is wanted ahead is there or cannot be had, and what waited for events that
    /// have passed is given up.
    pub(crate) fn settle(&self) {
        if !may_wait() {
            return;
        }
        let mut registry = self.registry.lock();
        registry.asked += 1;
        let ticket = registry.asked;
        self.wake(true);
        while registry.settled < ticket && !registry.stop {
            self.told.wait(&mut registry);
        }
    }

    /// Waits until the piece of work that is being done just now is over.
    pub(crate) fn finish_piece(&self) {
        let mut registry = self.registry.lock();
        let pieces = registry.pieces;
        while registry.current.is_some() && registry.pieces == pieces && may_wait() {
            self.told.wait(&mut registry);
        }
    }

    /// The next span after `last` that has asked for something, which is worked for from now on.
    fn take(&self, last: u64) -> Option<(u64, Arc<dyn Work>)> {
        let mut registry = self.registry.lock();
        let waiting = registry.entries.iter().filter(|entry| entry.number > last && entry.asks.any());
        let (number, work) = waiting.filter_map(|entry| Some((entry.number, entry.work.upgrade()?))).next()?;
        registry.current = Some(number);
        Some((number, work))
    }

    fn put_down(&self) {
        let mut registry = self.registry.lock();
        registry.current = None;
        registry.pieces += 1;
        self.told.notify_all();
    }

    /// What the thread does all its life.
    fn run(&self) {
        let _no_waiting = NoWaiting::begin();
        // Nobody waits for this thread, so it need not hold up whoever wakes it.
        if let Err(error) = crate::sys::thread::run_in_batch() {
            tracing::debug!(%error, "the background thread runs like any other");
        }
        let mut naps = 0;
        loop {
            self.signal.look();
            let ticket = {
                let registry = self.registry.lock();
                if registry.stop {
                    return;
                }
                registry.asked
            };
            let round = self.round();
            if round.more || round.watched {
                naps = 0;
            }
            if round.more {
                continue;
            }
            if !round.later {
                let mut registry = self.registry.lock();
                registry.settled = ticket;
                self.told.notify_all();
            }
            let nap = round.later || round.watched || naps < NAPS;
            if !self.signal.rest(if nap { Rest::Nap } else { Rest::Sleep }) {
                naps = 0;
            } else if nap {
                naps += 1;
                thread::park_timeout(NAP);
            } else {
                thread::park();
            }
        }
    }

    /// One piece of work for every span that has asked for something.
    fn round(&self) -> Round {
        let mut round = Round::default();
        let mut last = 0;
        while let Some((number, work)) = self.take(last) {
            last = number;
            match std::panic::catch_unwind(AssertUnwindSafe(|| work.step())) {
                Ok(Step::Done) => {}
                Ok(Step::More) => round.more = true,
                Ok(Step::Later) => round.later = true,
                Err(_) => {
                    tracing::error!("background work for a buffer panicked; it gets none any more");
                    self.registry.lock().entries.retain(|entry| entry.number != number);
                }
            }
            // Its buffer may be gone by now, and this the last owner of what it held.
            drop(work);
            self.put_down();
        }
        let mut registry = self.registry.lock();
        registry.entries.retain(|entry| entry.work.strong_count() > 0);
        round.watched = registry.entries.iter().any(|entry| entry.asks.is_watched());
        round
    }
}

#[derive(Default)]
struct Round {
    more: bool,
    later: bool,
    watched: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Background").field("spans", &self.registry.lock().entries.len()).finish_non_exhaustive()
    }
}
