//! How the system runs a thread.

use std::io;

/// Has the system run the calling thread as one of a batch: it gets its share of the processors, but does not take one
/// away from the thread that wakes it.
pub(crate) fn run_in_batch() -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: zero is the calling thread, and the pointer is that of a local.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const param) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_of_a_batch_is_one_and_the_others_are_not() {
        // SAFETY: zero is the calling thread.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let before = policy();
        let theirs = std::thread::spawn(move || run_in_batch().map(|()| policy())).join().unwrap().unwrap();
        assert_eq!((theirs, policy()), (libc::SCHED_BATCH, before));
    }
}
