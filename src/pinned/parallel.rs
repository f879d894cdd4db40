//! One range, many threads.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;

use parking_lot::Mutex;

/// The largest part that one thread takes at a time, in bytes: what is told of progress, and how soon all can stop.
const MOST: u64 = 64 << 20;
/// The smallest: a huge page.
const LEAST: u64 = 2 << 20;
/// Below this, other threads take longer to start than they save.
const ALONE: u64 = 8 << 20;

/// What gets a thread when nobody says how many: as many as the process may run, and no more than saturate memory.
pub(super) fn usual_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(16)
}

/// Does `work(offset, len)` for all parts of `[0, bytes)`, on up to `threads` threads, of which the calling one is one:
/// there, `told` hears after each part how much is done. Gives the number of threads that took part.
///
/// An error ends all: no further part is begun, those that were are finished, and of all errors that of the lowest offset
/// is returned, however the threads took turns. For parts are taken in order, so that all below one that failed are done
/// or have failed themselves. What `told` says counts where no part has failed.
pub(super) fn in_parts<E: Send>(
    threads: usize,
    bytes: u64,
    work: impl Fn(u64, u64) -> Result<(), E> + Sync,
    mut told: impl FnMut(u64) -> Result<(), E>,
) -> Result<u32, E> {
    let threads = if bytes < ALONE { 1 } else { threads.clamp(1, 1024) };
    let part = (bytes / (4 * threads as u64)).next_multiple_of(LEAST).clamp(LEAST, MOST);
    let shared = Shared { next: AtomicU64::new(0), done: AtomicU64::new(0), stop: AtomicBool::new(false) };
    let failed: Mutex<Option<(u64, E)>> = Mutex::new(None);
    let fail = |at, error| {
        let mut failed = failed.lock();
        if failed.as_ref().is_none_or(|(lowest, _)| at < *lowest) {
            *failed = Some((at, error));
        }
        shared.stop.store(true, Relaxed);
    };
    // Until there is nothing left, or somebody says stop.
    let take = || {
        // Looked at before a part is taken: what was taken is done, or all of it is an error.
        if shared.stop.load(Relaxed) {
            return false;
        }
        let at = shared.next.fetch_add(part, Relaxed);
        if at >= bytes {
            return false;
        }
        let len = part.min(bytes - at);
        match work(at, len) {
            Ok(()) => shared.done.fetch_add(len, Relaxed),
            Err(error) => {
                fail(at, error);
                return false;
            }
        };
        true
    };
    let took_part = thread::scope(|scope| {
        // Also if `told` or `work` panics the others end soon.
        let _stop = StopOnPanic(&shared.stop);
        let mut started = 1;
        for _ in 1..threads.min(usize::try_from(bytes.div_ceil(part)).unwrap_or(1)) {
            // Where the process may have no more threads, those there are do all of it.
            let all = || {
                let _stop = StopOnPanic(&shared.stop);
                while take() {}
            };
            match thread::Builder::new().name("growspan-pin".into()).spawn_scoped(scope, all) {
                Ok(_) => started += 1,
                Err(_) => break,
            }
        }
        while take() {
            if let Err(error) = told(shared.done.load(Relaxed)) {
                fail(u64::MAX, error);
                return started;
            }
        }
        started
    });
    match failed.into_inner() {
        Some((_, error)) => Err(error),
        None => told(bytes).map(|()| took_part),
    }
}

struct Shared {
    next: AtomicU64,
    done: AtomicU64,
    stop: AtomicBool,
}

struct StopOnPanic<'a>(&'a AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.store(true, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Which parts were done, in order.
    fn parts(threads: usize, bytes: u64) -> (Vec<(u64, u64)>, u32) {
        let seen = Mutex::new(Vec::new());
        let mut last = 0;
        let work = |at, len| {
            seen.lock().push((at, len));
            Ok::<(), ()>(())
        };
        let told = |done| {
            assert!(done >= last && done <= bytes);
            last = done;
            Ok(())
        };
        let threads = in_parts(threads, bytes, work, told).unwrap();
        assert_eq!(last, bytes, "the last word is that all is done");
        let mut seen = seen.into_inner();
        seen.sort_unstable();
        (seen, threads)
    }

    #[test]
    fn every_byte_is_done_once() {
        for threads in [1, 2, 3, 16] {
            for bytes in [4096, 2 * MIB, 8 * MIB - 4096, 8 * MIB, 8 * MIB + 4096, 1 << 30, (1 << 30) + 4096] {
                let (seen, used) = parts(threads, bytes);
                let mut at = 0;
                for (from, len) in seen {
                    assert!(from == at && len > 0 && len <= MOST && at.is_multiple_of(LEAST));
                    at += len;
                }
                assert_eq!(at, bytes);
                assert!((1..=threads as u32).contains(&used));
                assert!(bytes >= ALONE || used == 1);
            }
        }
        assert_eq!(parts(16, 1 << 34).1, 16);
    }

    #[test]
    fn the_first_error_ends_all_wherever_it_is() {
        for threads in [1, 4] {
            let count = AtomicU64::new(0);
            let work = |at: u64, _| {
                count.fetch_add(1, Relaxed);
                if at == 64 * MIB { Err("work") } else { Ok(()) }
            };
            assert_eq!(in_parts(threads, 1 << 40, work, |_| Ok(())), Err("work"));
            assert!(count.load(Relaxed) < 1000);
            let told = |done| if done > 200 * MIB { Err("told") } else { Ok(()) };
            assert_eq!(in_parts(threads, 1 << 40, |_, _| Ok(()), told), Err("told"));
        }
    }

    /// Whoever comes to fail first: every part from the third on fails, the third last of all, once others have.
    #[test]
    fn the_error_of_the_lowest_offset_is_told_and_what_is_below_is_done() {
        for threads in [2, 3, 8] {
            let (below, others) = (AtomicU64::new(0), AtomicU64::new(0));
            let first_bad = 3 * MOST;
            let work = |at: u64, _| {
                if at < first_bad {
                    thread::sleep(core::time::Duration::from_millis(1));
                    below.fetch_add(1, Relaxed);
                    return Ok(());
                }
                // So that others fail before it does.
                let began = std::time::Instant::now();
                while at == first_bad && others.load(Relaxed) == 0 && began.elapsed().as_secs() < 60 {
                    thread::yield_now();
                }
                others.fetch_add(u64::from(at != first_bad), Relaxed);
                Err(at)
            };
            assert_eq!(in_parts(threads, 1 << 40, work, |_| Ok(())), Err(first_bad), "{threads}");
            assert_eq!(below.into_inner(), 3, "parts below are finished");
            assert!((1..threads as u64).contains(&others.into_inner()), "no thread begins another part");
        }
        // A part that fails is the reason, also where who is told says stop.
        let (stopped, failed) = (AtomicBool::new(false), AtomicBool::new(false));
        let wait_for = |flag: &AtomicBool| {
            let began = std::time::Instant::now();
            while !flag.load(Relaxed) && began.elapsed().as_secs() < 60 {
                thread::yield_now();
            }
        };
        let caller = thread::current().id();
        let work = |_, _| {
            if thread::current().id() == caller {
                return Ok(());
            }
            wait_for(&stopped);
            failed.store(true, Relaxed);
            Err("work")
        };
        let told = |_| {
            stopped.store(true, Relaxed);
            wait_for(&failed);
            Err("told")
        };
        assert_eq!(in_parts(2, 1 << 40, work, told), Err("work"));
    }

    #[test]
    fn a_panic_of_a_part_ends_all_whichever_thread_has_it() {
        for own in [false, true] {
            let (count, caller) = (AtomicU64::new(0), thread::current().id());
            let work = |_, _| {
                assert!((thread::current().id() == caller) != own, "on purpose");
                count.fetch_add(1, Relaxed);
                thread::sleep(core::time::Duration::from_millis(1));
                Ok::<(), ()>(())
            };
            let all = std::panic::AssertUnwindSafe(|| in_parts(4, 1 << 40, work, |_| Ok(())));
            assert!(std::panic::catch_unwind(all).is_err() && count.load(Relaxed) < 1000);
        }
    }

    #[test]
    fn a_panic_of_who_is_told_ends_all() {
        let count = AtomicU64::new(0);
        let work = |_, _| {
            count.fetch_add(1, Relaxed);
            thread::sleep(core::time::Duration::from_millis(1));
            Ok::<(), ()>(())
        };
        let panicked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| in_parts(4, 1 << 40, work, |_| panic!("told"))));
        assert!(panicked.is_err() && count.load(Relaxed) < 1000);
    }
}
