//! Whether the machine still has the memory that a chunk would take.
//!
//! Filling a file in memory does not fail when the machine, or a control group, runs out: the kernel starts to kill
//! processes instead, very likely this one. So running out has to be noticed before.

use core::fmt;
use std::io;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::bytes::Bytes;
use crate::sys::memory::{Gauge, Memory};

/// How long a credit is good for: long enough that a loop over small chunks hardly ever reads, short enough that others
/// cannot take much of it unseen (one core fills a few hundred MiB in that time).
const FRESH: Duration = Duration::from_millis(100);

/// Hands out leave to take memory.
///
/// A reading costs several file reads, as much as filling a small chunk. So each one yields a *credit*, a quarter of
/// what is left after its request: requests are met from it without reading again, and even four programs that do the
/// same at the same time do not take more than there is. The less is left, the smaller the credit, and the more often
/// it is read. The credit lapses after [`FRESH`], since others do not ask us.
///
/// Leave that was given and not yet used is *pending*: a reading does not show it as taken, so it is deducted.
#[derive(Debug)]
pub(super) struct Headroom {
    gauge: Gauge,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    credit: u64,
    read_at: Instant,
    pending: u64,
}

/// Leave to take memory, until it is dropped.
#[derive(Debug)]
pub(super) struct Leave<'a> {
    headroom: &'a Headroom,
    left: u64,
}

/// Why leave was not given.
#[derive(Debug)]
pub(super) enum Refusal {
    /// There is not that much.
    Short { asked: Bytes, available: Bytes, kept: Bytes },
    /// What there is could not be read.
    Unreadable(io::Error),
}

impl Headroom {
    pub(super) fn new(gauge: Gauge) -> Self {
        let state = State { credit: 0, read_at: Instant::now(), pending: 0 };
        Self { gauge, state: Mutex::new(state) }
    }

    pub(super) fn ask(&self, bytes: u64) -> Result<Leave<'_>, Refusal> {
        self.ask_with(bytes, || self.gauge.read())
    }

    fn ask_with(&self, bytes: u64, read: impl FnOnce() -> io::Result<Memory>) -> Result<Leave<'_>, Refusal> {
        // Held while reading: whoever waits needs the outcome too.
        let mut state = self.state.lock();
        if state.credit >= bytes && state.read_at.elapsed() < FRESH {
            state.credit -= bytes;
        } else {
            let memory = read().map_err(Refusal::Unreadable)?;
            let kept = kept(memory.total);
            let available = memory.available.saturating_sub(Bytes::new(state.pending));
            let usable = available.saturating_sub(kept).get();
            let Some(left) = usable.checked_sub(bytes) else {
                return Err(Refusal::Short { asked: Bytes::new(bytes), available, kept });
            };
            state.credit = left / 4;
            state.read_at = Instant::now();
        }
        state.pending = state.pending.saturating_add(bytes);
        Ok(Leave { headroom: self, left: bytes })
    }
}

/// What is never taken: the kernel, page tables and everybody else's next step need room too. A 64th of the total, at
/// least 32 MiB and at most 1 GiB.
fn kept(total: Bytes) -> Bytes {
    Bytes::new(total.get() / 64).clamp(Bytes::mib(32), Bytes::gib(1))
}

impl Leave<'_> {
    /// So much of it was taken: readings show it from now on.
    pub(super) fn taken(&mut self, bytes: u64) {
        let bytes = bytes.min(self.left);
        self.left -= bytes;
        let mut state = self.headroom.state.lock();
        state.pending = state.pending.saturating_sub(bytes);
    }
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if self.left > 0 {
            self.taken(self.left);
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { asked, available, kept } => write!(
                f,
                "{asked} asked, {available} available to this process, of which {kept} are kept free so that the \
                 kernel need not kill anybody"
            ),
            Self::Unreadable(error) => write!(f, "the available memory cannot be read: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn headroom() -> Headroom {
        Headroom::new(Gauge::find().unwrap())
    }

    fn memory(available: u64) -> Memory {
        let mut memory = Gauge::find().unwrap().read().unwrap();
        (memory.available, memory.total) = (Bytes::mib(available), Bytes::gib(2));
        memory
    }

    #[test]
    fn a_credit_saves_readings_until_it_is_used_up() {
        let (headroom, mut readings) = (headroom(), 0);
        for _ in 0..101 {
            let read = || {
                readings += 1;
                Ok(memory(1032))
            };
            // 32 MiB are kept of 2 GiB: 1000 MiB are left, 999 after the first, a credit of 249 MiB.
            drop(headroom.ask_with(10 * MIB, read).unwrap());
            headroom.state.lock().read_at = Instant::now();
        }
        // (1000 - 10) / 4 = 247.5 MiB: 24 requests from each credit.
        assert_eq!(readings, 5);
    }

    #[test]
    fn a_credit_lapses() {
        let headroom = headroom();
        drop(headroom.ask_with(MIB, || Ok(memory(1000))).unwrap());
        drop(headroom.ask_with(MIB, || panic!("there is a credit")).unwrap());
        headroom.state.lock().read_at = Instant::now().checked_sub(FRESH).unwrap();
        let error = headroom.ask_with(MIB, || Ok(memory(10))).unwrap_err();
        assert!(matches!(error, Refusal::Short { .. }), "{error}");
    }

    #[test]
    fn the_margin_stays() {
        let headroom = headroom();
        assert!(headroom.ask_with(69 * MIB, || Ok(memory(100))).is_err());
        let error = headroom.ask_with(69 * MIB, || Ok(memory(100))).unwrap_err().to_string();
        assert!(
            error.starts_with("69 MiB asked, 100 MiB available to this process, of which 32 MiB are kept"),
            "{error}"
        );
        assert!(headroom.ask_with(68 * MIB, || Ok(memory(100))).is_ok());
        assert_eq!(kept(Bytes::gib(256)), Bytes::gib(1));
        assert_eq!(kept(Bytes::gib(32)), Bytes::mib(512));
    }

    #[test]
    fn leave_that_is_not_yet_used_counts() {
        let headroom = headroom();
        let mut first = headroom.ask_with(600 * MIB, || Ok(memory(1032))).unwrap();
        assert!(headroom.ask_with(500 * MIB, || Ok(memory(1032))).is_err());
        // Half of it has been taken, as the reading shows too: what was asked now fits.
        first.taken(300 * MIB);
        assert!(headroom.ask_with(500 * MIB, || Ok(memory(732))).is_err());
        assert!(headroom.ask_with(400 * MIB, || Ok(memory(732))).is_ok());
        drop(first);
        assert_eq!(headroom.state.lock().pending, 0);
        assert!(headroom.ask_with(1000 * MIB, || Ok(memory(1032))).is_ok());
    }

    #[test]
    fn an_unreadable_figure_is_no_leave() {
        let error = headroom().ask_with(MIB, || Err(io::Error::from_raw_os_error(libc::EMFILE))).unwrap_err();
        assert!(matches!(&error, Refusal::Unreadable(error) if error.raw_os_error() == Some(libc::EMFILE)));
    }
}
