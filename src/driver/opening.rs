//! Opening a driver under a watchdog: whatever hangs while it starts, or while a device is opened, takes a thread of its
//! own with it and not the program.

use core::fmt;
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::time::Instant;

use parking_lot::Mutex;

use crate::sys::fork::PerProcess;

/// How long opening may take unless told otherwise. Drivers that have to wake a machine full of cards first take tens of
/// seconds; one that hangs does so for ever.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// The openings of one driver that nobody waits for any more.
pub(crate) struct Openings {
    given_up: PerProcess<Mutex<Vec<GivenUp>>>,
    /// The process that began to start the driver; 0 before.
    begun_by: AtomicU32,
}

/// One that did not return in time and is still under way.
#[derive(Debug)]
struct GivenUp {
    /// The device, none if all of the driver hangs.
    device: Option<u32>,
    since: Instant,
}

/// Why it is not known whether a device could be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unopened {
    /// The driver does not return, from starting or from opening this device, and was left behind with the thread that
    /// called it.
    Hangs {
        /// For how long it has not.
        waited: Duration,
    },
    /// The system had no thread to call the driver on, which may hang.
    NoThread {
        /// What it said.
        why: String,
    },
}

impl core::error::Error for Unopened {}

impl fmt::Display for Unopened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hangs { waited } => {
                write!(f, "the driver has not returned for {:.1} s and was left behind", waited.as_secs_f64())
            }
            Self::NoThread { why } => write!(f, "no thread to call the driver on ({why})"),
        }
    }
}

impl Openings {
    pub(crate) const fn new() -> Self {
        Self { given_up: PerProcess::new(), begun_by: AtomicU32::new(0) }
    }

    /// The driver, which `load` starts at the first call; what came of that is `kept`. A process that was forked from the one
    /// which began to gets `forked` where it is not known yet: it would wait for what only its parent does.
    pub(crate) fn start<T: Send + Sync, E: Clone + From<Unopened> + Send + Sync>(
        &'static self,
        kept: &'static OnceLock<Result<T, E>>,
        patience: Duration,
        load: fn() -> Result<T, E>,
        forked: E,
    ) -> Result<&'static T, E> {
        let start = move || kept.get_or_init(load).as_ref().map_err(Clone::clone);
        if kept.get().is_some() {
            return start();
        }
        let me = std::process::id();
        match self.begun_by.compare_exchange(0, me, Relaxed, Relaxed) {
            Err(other) if other != me => Err(forked),
            _ => self.watch(None, patience, start),
        }
    }

    /// Does `work`, which opens `device` or all of the driver, and waits for it no longer than `patience`. What hangs
    /// already is not asked again.
    pub(crate) fn watch<T: Send + 'static, E: From<Unopened> + Send + 'static>(
        &'static self,
        device: Option<u32>,
        patience: Duration,
        work: impl FnOnce() -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        let since = Instant::now();
        let given_up = self.given_up.get_or(Mutex::default);
        let hangs = |one: &&GivenUp| one.device.is_none() || one.device == device;
        if let Some(one) = given_up.lock().iter().find(hangs) {
            return Err(Unopened::Hangs { waited: one.since.elapsed() }.into());
        }
        let (send, receive) = channel();
        let opening = move || {
            // A panic, as of whoever takes the log, is the caller's, as without the thread. Nobody may be there to take what
            // comes: it is dropped here then.
            let _ = send.send(catch_unwind(AssertUnwindSafe(work)));
            given_up.lock().retain(|one| (one.device, one.since) != (device, since));
        };
        let thread = std::thread::Builder::new().name("growspan-open".to_owned());
        thread.spawn(opening).map_err(|error| Unopened::NoThread { why: error.to_string() })?;
        let done = receive.recv_timeout(patience).or_else(|_| {
            let mut given_up = given_up.lock();
            // It may have come this moment; the thread looks at the list after it has sent.
            receive.try_recv().inspect_err(|_| given_up.push(GivenUp { device, since }))
        });
        match done {
            Ok(done) => done.unwrap_or_else(|panic| resume_unwind(panic)),
            Err(_) => Err(Unopened::Hangs { waited: since.elapsed() }.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    fn waited<T>(result: Result<T, Unopened>) -> Duration {
        match result {
            Err(Unopened::Hangs { waited }) => waited,
            _ => panic!("it returned"),
        }
    }

    #[test]
    fn what_hangs_is_left_behind_and_not_asked_again() {
        static OPENINGS: Openings = Openings::new();
        let ok = |device, value| OPENINGS.watch::<_, Unopened>(device, PATIENCE, move || Ok(value));
        assert_eq!(ok(Some(0), 7), Ok(7));
        let (go_on, wait) = channel::<()>();
        assert!(waited(OPENINGS.watch(Some(0), SHORT, move || Ok(wait.recv()))) >= SHORT);
        // That device is refused at once, with the time since, and the others are not.
        let again = waited(ok(Some(0), 7));
        assert!(again >= SHORT && again < PATIENCE, "{again:?}");
        assert_eq!(ok(Some(1), 8), Ok(8));
        // When it has returned after all, it may be asked again.
        go_on.send(()).unwrap();
        while ok(Some(0), 9).is_err() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_panic_is_the_caller_s_and_no_hang() {
        static OPENINGS: Openings = Openings::new();
        let panics = || OPENINGS.watch::<(), Unopened>(None, PATIENCE, || panic!("as a subscriber may"));
        assert!(catch_unwind(panics).is_err());
        assert_eq!(OPENINGS.watch::<_, Unopened>(Some(0), PATIENCE, || Ok(7)), Ok(7));
    }

    #[test]
    fn a_driver_that_hangs_hangs_for_all_devices() {
        static OPENINGS: Openings = Openings::new();
        let (_go_on, wait) = channel::<()>();
        waited(OPENINGS.watch(None, SHORT, move || Ok(wait.recv())));
        waited(OPENINGS.watch(Some(3), PATIENCE, || Ok(7)));
        waited(OPENINGS.watch(None, PATIENCE, || Ok(7)));
    }
}
