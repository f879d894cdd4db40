//! How much of a span its buffer has, and how much more it may take without asking anybody.
//!
//! ```text
//! base            granted                ready
//!  |  the buffer's   |  there for the taking  |  being mapped or unmapped, or nothing
//! ```
//! The owner takes memory by raising `granted`, which needs no lock. Whoever holds the lock on the span raises `ready` when
//! memory has become accessible, and lowers it before memory goes, never below `granted`. So what is granted stays until
//! the owner gives it up, and what is ready and not granted was never told to anybody: it may go without waiting for the
//! device.
//!
//! Both are counted in granules and packed in one word, so that neither moves without the other's consent.

use crate::sync::atomic::AtomicU64;
use crate::sync::atomic::Ordering::{AcqRel, Acquire};

/// Bits of the number of granules that are ready and not granted. What is more stays out of sight until some are granted.
const AHEAD_BITS: u32 = 24;
const AHEAD_MASK: u64 = (1 << AHEAD_BITS) - 1;

/// The most granules that a span may have.
pub(super) const MOST_GRANULES: u64 = 1 << (64 - AHEAD_BITS);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Figures {
    /// The buffer's.
    pub(super) granted: u64,
    /// The end of what it may take.
    pub(super) ready: u64,
}

impl Figures {
    const fn pack(self) -> u64 {
        let ahead = self.ready.saturating_sub(self.granted);
        (self.granted << AHEAD_BITS) | if ahead < AHEAD_MASK { ahead } else { AHEAD_MASK }
    }

    const fn unpack(word: u64) -> Self {
        let granted = word >> AHEAD_BITS;
        Self { granted, ready: granted + (word & AHEAD_MASK) }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Grants(AtomicU64);

impl Grants {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(super) fn get(&self) -> Figures {
        Figures::unpack(self.0.load(Acquire))
    }

    /// Changes the figures as `change` says, unless it says none. Returns what they were.
    fn update(&self, mut change: impl FnMut(Figures) -> Option<Figures>) -> Result<Figures, Figures> {
        let mut word = self.0.load(Acquire);
        loop {
            let now = Figures::unpack(word);
            let Some(next) = change(now) else { return Err(now) };
            match self.0.compare_exchange_weak(word, next.pack(), AcqRel, Acquire) {
                Ok(_) => return Ok(now),
                Err(other) => word = other,
            }
        }
    }

    /// The owner takes everything up to `to`; false if not all of it is ready.
    pub(super) fn grant(&self, to: u64) -> bool {
        self.update(|now| (to <= now.ready).then_some(Figures { granted: now.granted.max(to), ..now })).is_ok()
    }

    /// The owner leaves what lies from `to` on. It stays ready.
    pub(super) fn leave(&self, to: u64) {
        let _ = self.update(|now| Some(Figures { granted: now.granted.min(to), ..now }));
    }

    /// Memory up to `ready` is there and no more, as whoever holds the lock on the span says. What is granted beyond has
    /// gone with the owner's consent.
    pub(super) fn publish(&self, ready: u64) {
        let _ = self.update(|now| {
            let next = Figures { granted: now.granted.min(ready), ready };
            (next != now).then_some(next)
        });
    }

    /// The same, and all of it is the owner's.
    pub(super) fn publish_granted(&self, ready: u64) {
        let next = Figures { granted: ready, ready };
        let _ = self.update(|now| (next != now).then_some(next));
    }

    /// Takes what is ready from `boundary` on out of the owner's reach, where `boundary` is told how much is granted and
    /// gives no less. Returns where what is left ends.
    pub(super) fn withdraw(&self, boundary: impl Fn(u64) -> u64) -> u64 {
        let end = |now: Figures| boundary(now.granted).max(now.granted);
        match self.update(|now| (end(now) < now.ready).then(|| Figures { ready: end(now), ..now })) {
            Ok(was) => end(was),
            Err(now) => end(now),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn figures_survive_packing_up_to_the_largest_span() {
        let most = MOST_GRANULES - 1;
        for (granted, ready) in [(0, 0), (0, 1), (5, 5), (7, 1000), (most, most), (most - 9, most)] {
            let figures = Figures { granted, ready };
            assert_eq!(Figures::unpack(figures.pack()), figures);
        }
        let hidden = Figures::unpack(Figures { granted: 3, ready: 1 << 30 }.pack());
        assert_eq!(hidden, Figures { granted: 3, ready: 3 + AHEAD_MASK }, "less is seen than there is, never more");
    }

    #[test]
    fn only_what_is_ready_is_granted_and_only_what_is_not_granted_goes() {
        let grants = Grants::new();
        assert!(!grants.grant(1));
        grants.publish(10);
        assert!(grants.grant(4) && !grants.grant(11));
        assert!(grants.grant(2), "what is had already");
        assert_eq!(grants.get(), Figures { granted: 4, ready: 10 });
        assert_eq!(grants.withdraw(|granted| granted + 2), 6);
        assert!(!grants.grant(7));
        assert_eq!(grants.withdraw(|_| 0), 4);
        assert_eq!(grants.get(), Figures { granted: 4, ready: 4 });
        grants.publish_granted(9);
        grants.leave(5);
        assert_eq!(grants.get(), Figures { granted: 5, ready: 9 });
        grants.publish(3);
        assert_eq!(grants.get(), Figures { granted: 3, ready: 3 });
    }
}
