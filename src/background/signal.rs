//! How the background thread is told that there is something to do, without waking it more often than need be.
//!
//! Waking a thread is a system call of some microseconds, paid by whoever wakes. So the thread rests in two ways: it
//! *naps* for a moment and looks up by itself, as long as there was something to do lately, and then it *sleeps* until
//! it is woken. What is not urgent never wakes it from a nap.

use crate::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use crate::sync::atomic::{AtomicBool, AtomicU32};

/// Something was asked since the thread last looked.
const ASKED: u32 = 1;
const NAPPING: u32 = 2;
const SLEEPING: u32 = 4;

/// How the thread rests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// For a moment.
    Nap,
    /// Until it is woken.
    Sleep,
}

/// One word between the background thread and those who ask. What is asked is noted before, in [`Asks`].
#[derive(Debug)]
pub(crate) struct Signal(AtomicU32);

impl Signal {
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Says that something was asked. True if the thread has to be woken for it, by `unpark`.
    #[must_use]
    pub(crate) fn ask(&self, urgent: bool) -> bool {
        let before = self.0.fetch_or(ASKED, AcqRel);
        // Whoever asked first wakes a sleeper. A nap is broken off only for what cannot wait for its end.
        before & (SLEEPING | ASKED) == SLEEPING || urgent && before & NAPPING != 0
    }

    /// The thread is up, and is about to look at everything that was asked so far.
    pub(crate) fn look(&self) {
        self.0.swap(0, AcqRel);
    }

    /// The thread is about to rest, by `park`. False if something was asked since it looked: then it looks again.
    #[must_use]
    pub(crate) fn rest(&self, rest: Rest) -> bool {
        let state = match rest {
            Rest::Nap => NAPPING,
            Rest::Sleep => SLEEPING,
        };
        self.0.compare_exchange(0, state, AcqRel, Acquire).is_ok()
    }
}

/// What one span asks of the background thread.
#[derive(Debug)]
pub(crate) struct Asks {
    /// To map ahead.
    wanted: AtomicBool,
    /// To give up what waits for events, once they have passed.
    watched: AtomicBool,
}

impl Asks {
    pub(crate) fn new() -> Self {
        Self { wanted: AtomicBool::new(false), watched: AtomicBool::new(false) }
    }

    /// Asks to map ahead; true if that was not asked already.
    pub(crate) fn want(&self) -> bool {
        !self.wanted.swap(true, Release)
    }

    /// The thread turns to what is wanted; false if nothing is.
    pub(crate) fn turn_to(&self) -> bool {
        self.wanted.swap(false, Acquire)
    }

    pub(crate) fn watch(&self, on: bool) {
        self.watched.store(on, Release);
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watched.load(Acquire)
    }

    pub(super) fn any(&self) -> bool {
        self.wanted.load(Relaxed) || self.watched.load(Relaxed)
    }
}
