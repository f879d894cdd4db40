//! That nothing asked is overlooked, in every order in which those who ask and the thread can take turns. A wake-up that is
//! lost leaves the thread parked for good, which the model checker reports.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering::Relaxed};
use loom::thread;

use super::{Asks, Rest, Signal};

struct Desks {
    signal: Signal,
    asks: [Asks; 2],
    /// What is written before it is asked for.
    goals: [AtomicBool; 2],
}

impl Desks {
    fn new() -> Arc<Self> {
        let asks = [Asks::new(), Asks::new()];
        let goals = [AtomicBool::new(false), AtomicBool::new(false)];
        Arc::new(Self { signal: Signal::new(), asks, goals })
    }

    /// What an owner does; the thread to wake, if it has to be woken, is `thread`.
    fn want(&self, n: usize, urgent: bool, thread: &thread::Thread) {
        self.goals[n].store(true, Relaxed);
        if (self.asks[n].want() || urgent) && self.signal.ask(urgent) {
            thread.unpark();
        }
    }

    /// What the thread does, until both have been served.
    fn serve(&self, mut rest: impl FnMut(&Signal)) {
        let mut served = [false; 2];
        loop {
            self.signal.look();
            for (n, served) in served.iter_mut().enumerate() {
                if self.asks[n].turn_to() {
                    assert!(self.goals[n].load(Relaxed), "asked, and not for what");
                    *served = true;
                }
            }
            if served == [true, true] {
                return;
            }
            rest(&self.signal);
        }
    }
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// The thread sleeps, and only a wake-up ends that.
#[test]
fn models_no_wake_up_is_lost() {
    explore(|| {
        let desks = Desks::new();
        let server = {
            let desks = Arc::clone(&desks);
            thread::spawn(move || {
                desks.serve(|signal| {
                    if signal.rest(Rest::Sleep) {
                        thread::park();
                    }
                });
            })
        };
        let other = {
            let (desks, thread) = (Arc::clone(&desks), server.thread().clone());
            thread::spawn(move || desks.want(0, false, &thread))
        };
        desks.want(1, false, server.thread());
        let ended = other.join().is_ok() && server.join().is_ok();
        assert!(ended);
    });
}

/// What is urgent ends a nap too; what is not waits for its end, which never comes here.
#[test]
fn models_what_is_urgent_ends_a_nap() {
    explore(|| {
        let desks = Desks::new();
        let server = {
            let desks = Arc::clone(&desks);
            thread::spawn(move || {
                desks.serve(|signal| {
                    if signal.rest(Rest::Nap) {
                        thread::park();
                    }
                });
            })
        };
        let thread = server.thread().clone();
        desks.want(0, false, &thread);
        // Asked already by somebody who could wait.
        desks.want(1, false, &thread);
        desks.want(1, true, &thread);
        assert!(server.join().is_ok());
    });
}
