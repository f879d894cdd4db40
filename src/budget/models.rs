//! The budget under every interleaving of those who spend it.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use loom::thread;

use super::*;
use crate::driver::{MapCount, OpenFiles};
use crate::sync::model;

/// What the application holds beside us.
const OTHERS: u64 = 10;

/// The limits of a process that opens a file for each that the budget grants.
#[derive(Debug)]
struct Limits {
    opened: AtomicU64,
    soft: AtomicU64,
    hard: u64,
    raises: AtomicU64,
}

impl ProcessLimits for Limits {
    fn open_files(&self) -> io::Result<OpenFiles> {
        Ok(OpenFiles { held: OTHERS + self.opened.load(Relaxed), soft: self.soft.load(Relaxed), hard: self.hard })
    }
    fn raise_open_files(&self, soft: u64) -> io::Result<()> {
        assert!(soft <= self.hard);
        self.raises.fetch_add(1, Relaxed);
        self.soft.store(soft, Relaxed);
        Ok(())
    }
    fn maps(&self) -> io::Result<MapCount> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

fn budget(soft: u64, hard: u64) -> (Arc<OpenFileBudget>, Arc<Limits>) {
    let limits = Arc::new(Limits { opened: 0.into(), soft: soft.into(), hard, raises: 0.into() });
    (Arc::new(OpenFileBudget::new(Arc::clone(&limits) as Arc<dyn ProcessLimits>)), limits)
}

/// Two threads that open `each` files one by one, as far as the budget lets them, and close them again if told to.
/// Returns how many each got.
fn two_spend(budget: &Arc<OpenFileBudget>, limits: &Arc<Limits>, each: u64, close: bool) -> [u64; 2] {
    let spend = move |budget: &OpenFileBudget, limits: &Limits| {
        let granted = (0..each).filter(|_| {
            let granted = budget.acquire(1).is_ok();
            limits.opened.fetch_add(u64::from(granted), Relaxed);
            let (opened, soft) = (limits.opened.load(Relaxed), limits.soft.load(Relaxed));
            assert!(OTHERS + opened <= soft, "{opened} opened beside {OTHERS}, of {soft}");
            granted
        });
        let granted = granted.count() as u64;
        if close {
            limits.opened.fetch_sub(granted, Relaxed);
            budget.release(granted);
        }
        granted
    };
    let other = {
        let (budget, limits) = (Arc::clone(budget), Arc::clone(limits));
        thread::spawn(move || spend(&budget, &limits))
    };
    let mine = spend(budget, limits);
    match other.join() {
        Ok(theirs) => [mine, theirs],
        Err(_) => panic!("the other thread failed"),
    }
}

#[test]
fn what_is_granted_is_counted_and_within_the_limit() {
    const ROOM: u64 = 3;
    model(|| {
        let soft = OTHERS + LEAST_HEADROOM + ROOM;
        let (budget, limits) = budget(soft, soft);
        let got: u64 = two_spend(&budget, &limits, 2, false).iter().sum();
        // One that was granted and is not open yet when the other counts looks like room.
        assert!((ROOM..=ROOM + 1).contains(&got), "{got} of {ROOM}");
        assert_eq!((budget.usage().ours, budget.usage().others, limits.raises.load(Relaxed)), (got, OTHERS, 0));
        budget.release(got);
        assert_eq!((budget.usage().ours, budget.usage().peak), (0, got));
    });
}

#[test]
fn what_comes_back_can_be_had_again() {
    model(|| {
        let soft = OTHERS + LEAST_HEADROOM + 2;
        let (budget, limits) = budget(soft, soft);
        let got = two_spend(&budget, &limits, 2, true);
        assert!(got.iter().sum::<u64>() >= 2, "two fit at any time: {got:?}");
        assert_eq!(budget.usage().ours, 0);
        limits.opened.store(2, Relaxed);
        assert!(budget.acquire(2).is_ok());
        assert!(budget.acquire(1).is_err());
    });
}

#[test]
fn the_limit_is_raised_once_for_both() {
    model(|| {
        let (budget, limits) = budget(OTHERS + 1, 1 << 20);
        budget.expect_at_most(4);
        assert_eq!(two_spend(&budget, &limits, 2, false), [2, 2]);
        assert_eq!((limits.raises.load(Relaxed), limits.soft.load(Relaxed)), (1, 4 + HEADROOM));
        assert_eq!(budget.usage().ours, 4);
    });
}
