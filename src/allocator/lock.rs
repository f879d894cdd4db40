//! The lock on a heap, which is nearly always free.

use core::hint;
use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::time::Duration;
use std::thread;

use parking_lot::lock_api;

/// A lock that costs one atomic operation where it is free: letting go of it is a plain store, for which other locks need
/// a second, to find out whether anybody has to be woken.
///
/// So nobody is woken. Who finds it taken looks again for a moment and then sleeps between looks, longer each time: the
/// holder has it for some nanoseconds, or for a call of the driver.
pub(super) struct RawHeapLock(AtomicBool);

/// What is under such a lock.
pub(super) type HeapLock<T> = lock_api::Mutex<RawHeapLock, T>;
/// Whoever has it.
pub(super) type HeapGuard<'a, T> = lock_api::MutexGuard<'a, RawHeapLock, T>;

/// How often a taken lock is looked at before the thread lets others run, and how often then before it sleeps.
const LOOKS: u32 = 64;
const TURNS: u32 = 8;
/// The first and the longest sleep between two looks.
const NAP: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

// SAFETY: the flag is set from when one thread has swapped it from false to true until that thread stores false again, so
// no two have the lock at once; acquiring and releasing order what happens under it.
unsafe impl lock_api::RawMutex for RawHeapLock {
    #[allow(clippy::declare_interior_mutable_const, reason = "that is how a lock of this kind begins")]
    const INIT: Self = Self(AtomicBool::new(false));
    type GuardMarker = lock_api::GuardNoSend;

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        !self.0.swap(true, Acquire)
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.store(false, Release);
    }
}

impl RawHeapLock {
    /// A look that does not take the line from the holder's cache, and then a try.
    fn is_taken_now(&self) -> bool {
        !self.0.load(Relaxed) && lock_api::RawMutex::try_lock(self)
    }

    #[cold]
    fn wait(&self) {
        for look in 0..LOOKS + TURNS {
            if self.is_taken_now() {
                return;
            }
            if look < LOOKS { hint::spin_loop() } else { thread::yield_now() }
        }
        let mut nap = NAP;
        while !self.is_taken_now() {
            thread::sleep(nap);
            nap = (nap * 2).min(LONGEST);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Each thread counts, some of them while they let the others wait.
    #[test]
    fn one_at_a_time_has_it() {
        let lock = Arc::new(HeapLock::new((0_u64, 0_u64)));
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let lock = Arc::clone(&lock);
                thread::spawn(move || {
                    for turn in 0..20_000 {
                        let mut guard = lock.lock();
                        guard.0 += 1;
                        if number == 0 && turn % 2000 == 0 {
                            thread::sleep(Duration::from_millis(2));
                        }
                        guard.1 += 1;
                        assert_eq!(guard.0, guard.1);
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(*lock.lock(), (80_000, 80_000));
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        drop(held);
        assert!(lock.try_lock().is_some());
    }
}
