//! Whether this process was forked from another, without asking the kernel each time.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::error::{Error, Result};

static GENERATION: AtomicU64 = AtomicU64::new(0);

extern "C" fn in_the_child() {
    GENERATION.fetch_add(1, Relaxed);
}

/// How many forks lie between the first call of this in an ancestor and now: whoever notes it can tell by a load that
/// it has become a child. A child made by the bare system call, past the C library, is not noticed.
pub(crate) fn generation() -> u64 {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler is a function of this program, takes nothing and only adds to an atomic, which may be done
        // in a child of a process with several threads.
        let error = unsafe { libc::pthread_atfork(None, None, Some(in_the_child)) };
        if error != 0 {
            tracing::warn!(error, "forks will not be noticed");
        }
    });
    GENERATION.load(Relaxed)
}

/// The same, where it was asked for before: a load.
#[inline]
pub(crate) fn generation_now() -> u64 {
    GENERATION.load(Relaxed)
}

/// Which process something belongs to, for what has locks of its own: in a child another thread may have held them, and
/// does not exist.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process(u64);

impl Process {
    /// This one.
    pub(crate) fn this() -> Self {
        Self(generation())
    }

    /// Whether it is the one that runs this.
    #[inline]
    pub(crate) fn is_this(self) -> bool {
        generation_now() == self.0
    }

    /// The same as a result.
    ///
    /// # Errors
    /// [`Error::Forked`] in a child.
    #[inline]
    pub(crate) fn check(self) -> Result<()> {
        if self.is_this() { Ok(()) } else { Err(Error::Forked) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_knows_that_it_is_one() {
        let before = generation();
        // SAFETY: the child only compares and exits, at once and without running destructors.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(generation_now() != before + 1);
            // SAFETY: ends the child.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0);
        let mut status = -1;
        // SAFETY: `status` is ours to write.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));
        assert_eq!(generation_now(), before, "the parent is no child");
    }
}
