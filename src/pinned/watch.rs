//! Watches what takes long, and says so while it is still going on.
//!
//! A call into a driver cannot be asked how far it is. So for growths of some size a thread of its own sleeps beside it,
//! and wakes when a piece has taken longer than it should: it reads what the kernel has counted since the piece began,
//! and logs the likely cause, again each time the time has doubled.

use core::time::Duration;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::timing::{PinPhase, Slow, SlowCause};
use crate::bytes::Bytes;
use crate::sys::map::page_size;
use crate::sys::memory::Gauge;
use crate::sys::vmstat::Vmstat;

/// What a gibibyte may take beyond the patience: a slow machine puts pages there, and a driver registers them, at this
/// rate without anything being wrong.
const PER_GIB: Duration = Duration::from_secs(1);

/// The patience unless told otherwise.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// Growths below this are not watched unless the patience was chosen: a thread would cost more than they do.
const WATCHED: u64 = 256 << 20;

/// How long one is watched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) asked: Option<Duration>,
}

impl Patience {
    fn watches(self, bytes: u64) -> bool {
        self.asked.is_some() || bytes >= WATCHED
    }

    fn of(self, bytes: u64) -> Duration {
        self.asked.unwrap_or(PATIENCE) + PER_GIB.mul_f64(bytes as f64 / (1_u64 << 30) as f64)
    }
}

/// What is being done now.
#[derive(Debug)]
struct Now {
    phase: PinPhase,
    piece: usize,
    bytes: u64,
    began: Instant,
    before: Vmstat,
    /// When to speak next, from `began`.
    due: Duration,
    /// Where in the list this piece is, once it was slow.
    noted: Option<usize>,
}

#[derive(Debug, Default)]
struct State {
    now: Option<Now>,
    slow: Vec<Slow>,
    over: bool,
}

/// Told of every piece.
#[derive(Debug)]
pub(super) struct Watch {
    patience: Patience,
    on: bool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Watch {
    /// Does `body` under watch; gives what was slow too.
    pub(super) fn over<R>(
        patience: Patience,
        bytes: u64,
        device: &str,
        gauge: Option<&Gauge>,
        body: impl FnOnce(&Self) -> R,
    ) -> (R, Vec<Slow>) {
        let on = patience.watches(bytes);
        let watch = Self { patience, on, state: Mutex::default(), changed: Condvar::new() };
        let result = thread::scope(|scope| {
            if on {
                let spawned = thread::Builder::new()
                    .name("growspan-watch".into())
                    .spawn_scoped(scope, || watch.look_on(device, gauge));
                if let Err(error) = spawned {
                    tracing::debug!(%error, "nobody can watch");
                }
            }
            let _over = OverOnDrop(&watch);
            body(&watch)
        });
        (result, watch.state.into_inner().slow)
    }

    /// A piece begins.
    pub(super) fn begin(&self, phase: PinPhase, piece: usize, bytes: u64) {
        if !self.on {
            return;
        }
        let before = Vmstat::read().unwrap_or_default();
        let due = self.patience.of(bytes);
        let now = Now { phase, piece, bytes, began: Instant::now(), before, due, noted: None };
        self.state.lock().now = Some(now);
        self.changed.notify_all();
    }

    /// It ended.
    pub(super) fn end(&self) {
        if self.on {
            self.state.lock().now = None;
        }
    }

    fn look_on(&self, device: &str, gauge: Option<&Gauge>) {
        let mut state = self.state.lock();
        while !state.over {
            let Some(now) = &state.now else {
                self.changed.wait(&mut state);
                continue;
            };
            let left = now.due.saturating_sub(now.began.elapsed());
            if !left.is_zero() {
                self.changed.wait_for(&mut state, left);
                continue;
            }
            self.speak(&mut state, device, gauge);
        }
    }

    /// Says that the present piece takes long. With the lock: a piece that ends now waits for a few files to be read.
    fn speak(&self, state: &mut State, device: &str, gauge: Option<&Gauge>) {
        let State { now: Some(now), slow, .. } = state else { return };
        let after = now.began.elapsed();
        let since = Vmstat::read().unwrap_or_default().since(&now.before);
        let left = gauge.and_then(|gauge| gauge.read().ok());
        let left = left.map(|memory| memory.available.get() as f64 / memory.total.get().max(1) as f64);
        let (phase, piece, bytes) = (now.phase, now.piece, Bytes::new(now.bytes));
        let cause = SlowCause::of(phase, &since, left, now.bytes / page_size());
        tracing::warn!(
            device, %phase, piece, %bytes, seconds = after.as_secs_f64(), %cause, counted = %since,
            "page-locking takes long"
        );
        let entry = Slow { phase, piece, bytes, after, cause };
        match now.noted.and_then(|index| slow.get_mut(index)) {
            Some(known) => *known = entry,
            None => {
                now.noted = Some(slow.len());
                slow.push(entry);
            }
        }
        now.due = after * 2;
    }
}

struct OverOnDrop<'a>(&'a Watch);

impl Drop for OverOnDrop<'_> {
    fn drop(&mut self) {
        self.0.state.lock().over = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Patience = Patience { asked: Some(Duration::from_millis(20)) };

    #[test]
    fn what_takes_long_is_told_while_it_goes_on() {
        let ((), slow) = Watch::over(ASKED, 4096, "test", None, |watch| {
            watch.begin(PinPhase::Register, 0, 4096);
            watch.end();
            watch.begin(PinPhase::Register, 1, 4096);
            let began = Instant::now();
            while watch.state.lock().slow.is_empty() {
                assert!(began.elapsed() < Duration::from_secs(60), "nobody says that it takes long");
                thread::sleep(Duration::from_millis(1));
            }
            watch.end();
            watch.begin(PinPhase::Register, 2, 4096);
        });
        assert_eq!(slow.len(), 1);
        assert_eq!((slow[0].piece, slow[0].phase), (1, PinPhase::Register));
        assert!(slow[0].after >= Duration::from_millis(20));
    }

    #[test]
    fn one_piece_is_one_entry_however_long_it_takes() {
        let ((), slow) = Watch::over(ASKED, 4096, "test", None, |watch| {
            watch.begin(PinPhase::Prefault, 0, 4096);
            let long = |watch: &Watch| watch.state.lock().slow.first().is_some_and(|slow| slow.after.as_millis() >= 80);
            let began = Instant::now();
            while !long(watch) {
                assert!(began.elapsed() < Duration::from_secs(60), "it is not told again");
                thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(slow.len(), 1);
    }

    #[test]
    fn small_growths_have_no_watcher_and_large_ones_more_time() {
        let usual = Patience { asked: None };
        assert!(!usual.watches(WATCHED - 1) && usual.watches(WATCHED));
        assert_eq!(usual.of(28 << 30), Duration::from_secs(30));
        let panicked = std::panic::catch_unwind(|| {
            Watch::over(ASKED, 4096, "test", None, |watch| {
                watch.begin(PinPhase::Register, 0, 4096);
                panic!("inside");
            })
        });
        assert!(panicked.is_err(), "and the watcher went too, or this would not return");
    }
}
