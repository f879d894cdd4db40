//! What the owner of a span and the threads that work for it can do to each other, in every order they can take turns.
//!
//! Memory is a row of cells that say whether they are mapped. Changing one is a write and using it a read, so that the
//! model checker sees an unmapping that is not ordered behind every use as the race that it is.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, Ordering::Acquire, Ordering::Release};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::grants::{Figures, Grants};
use super::retire::{Passing, RetireList};
use crate::error::Result;

const CELLS: usize = 3;

/// A span, as far as this goes.
struct Span {
    grants: Grants,
    core: Mutex<Core>,
    cells: [UnsafeCell<bool>; CELLS],
}

struct Core {
    mapped: usize,
    retiring: RetireList<Event>,
}

#[derive(Clone)]
struct Event(Arc<AtomicBool>);

impl Passing for Event {
    fn is_reached(&self) -> Result<bool> {
        Ok(self.0.load(Acquire))
    }
}

// SAFETY: that the cells are used in turns is what the models check.
unsafe impl Sync for Span {}

impl Span {
    /// With so many cells mapped, which are all the owner's.
    fn new(mapped: usize) -> Arc<Self> {
        let cells = core::array::from_fn(|n| UnsafeCell::new(n < mapped));
        let core = Mutex::new(Core { mapped, retiring: RetireList::default() });
        let this = Self { grants: Grants::new(), core, cells };
        this.grants.publish_granted(mapped as u64);
        Arc::new(this)
    }

    fn locked<T>(&self, act: impl FnOnce(&mut Core) -> T) -> T {
        let Ok(mut core) = self.core.lock() else { unreachable!("a model panicked") };
        let result = act(&mut core);
        self.grants.publish(core.retiring.start().unwrap_or(core.mapped as u64));
        result
    }

    fn set(&self, cell: usize, mapped: bool) {
        // SAFETY: the pointer is the cell's own; a use at the same time is what the checker looks for.
        self.cells[cell].with_mut(|cell| unsafe { *cell = mapped });
    }

    /// Uses the cells from `from` to `to`, as the owner or the device would.
    fn touch(&self, from: usize, to: usize) {
        for cell in &self.cells[from..to] {
            // SAFETY: as in `set`.
            assert!(cell.with(|cell| unsafe { *cell }), "used and not mapped");
        }
    }

    /// The background maps a cell.
    fn map_ahead(&self) {
        self.locked(|core| {
            if core.mapped < CELLS && core.retiring.start().is_none() {
                self.set(core.mapped, true);
                core.mapped += 1;
            }
        });
    }

    /// Somebody short of memory takes back what is ahead.
    fn take_back(&self) {
        self.locked(|core| {
            if core.retiring.start().is_none() {
                let from = self.grants.withdraw(|granted| granted) as usize;
                (from..core.mapped).for_each(|cell| self.set(cell, false));
                core.mapped = core.mapped.min(from);
            }
        });
    }

    /// Somebody gives up what has passed.
    fn drain(&self) {
        self.locked(|core| {
            if let Ok(Some(from)) = core.retiring.passed() {
                (from as usize..core.mapped).for_each(|cell| self.set(cell, false));
                core.mapped = from as usize;
                core.retiring.cut(from);
            }
        });
    }
}

fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn models_what_is_granted_stays() {
    explore(|| {
        let span = Span::new(0);
        let [background, short] = [Arc::clone(&span), Arc::clone(&span)];
        let background = thread::spawn(move || {
            background.map_ahead();
            background.map_ahead();
        });
        let short = thread::spawn(move || short.take_back());
        let mut have = 0;
        for to in 1..=2 {
            if span.grants.grant(to as u64) {
                have = to;
            }
            span.touch(0, have);
        }
        let ended = background.join().is_ok() && short.join().is_ok();
        assert!(ended);
        span.touch(0, have);
        span.locked(|core| {
            assert_eq!(span.grants.get(), Figures { granted: have as u64, ready: core.mapped as u64 });
            span.touch(0, core.mapped);
        });
    });
}

#[test]
fn models_a_growth_that_is_taken_back_leaves_it_ahead() {
    explore(|| {
        let span = Span::new(1);
        let short = Arc::clone(&span);
        span.map_ahead();
        let short = thread::spawn(move || {
            short.take_back();
            short.map_ahead();
        });
        // A set whose second member cannot grow undoes the first.
        if span.grants.grant(2) {
            span.touch(0, 2);
            span.grants.leave(1);
        }
        let again = span.grants.grant(2);
        span.touch(0, if again { 2 } else { 1 });
        assert!(short.join().is_ok());
        assert_eq!(span.grants.get().granted, if again { 2 } else { 1 });
    });
}

/// The upper of two pieces was given up first and waits for work; the lower has nothing to wait for any more, or never had.
#[test]
fn models_what_waits_goes_when_its_event_has_passed_and_no_sooner() {
    for passed in [true, false] {
        explore(move || {
            let span = Span::new(3);
            let done = Arc::new(AtomicBool::new(false));
            let [device, drainer] = [Arc::clone(&span), Arc::clone(&span)];
            let event = Event(Arc::clone(&done));
            let lower = passed.then(|| Event(Arc::new(AtomicBool::new(true))));
            // Work that was queued before the shrinks, then the event is reached.
            let device = thread::spawn(move || {
                device.touch(2, 3);
                done.store(true, Release);
            });
            let drainer = thread::spawn(move || drainer.drain());
            span.locked(|core| core.retiring.push(2, Some(event)));
            span.locked(|core| core.retiring.push(1, lower));
            span.touch(0, 1);
            // The owner grows again, and takes back what has not gone.
            let had = span.locked(|core| {
                core.retiring.reclaim(2);
                core.retiring.cut(core.mapped as u64);
                core.mapped.min(2)
            });
            assert!(span.grants.grant(had as u64));
            span.touch(0, had);
            let ended = device.join().is_ok() && drainer.join().is_ok();
            assert!(ended);
            span.touch(0, had);
            span.drain();
            span.locked(|core| {
                assert_eq!((core.mapped, core.retiring.start()), (had, None), "what has passed is gone");
                assert_eq!(span.grants.get().granted, had as u64);
            });
        });
    }
}
