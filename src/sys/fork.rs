//! Whether this process was forked from another, without asking the kernel each time.

use core::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed};

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

/// What every process has one of. A forked child begins a new one: in its parent's another thread may have held a lock.
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<Owned<T>>);

struct Owned<T> {
    by: Process,
    value: T,
}

impl<T: Send + Sync> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// This process's, made by `make` if there is none yet.
    pub(crate) fn get_or(&self, make: impl FnOnce() -> T) -> &'static T {
        let known = self.0.load(Acquire);
        // SAFETY: the pointer is null or from a box that is never freed, and was stored after what it points to was made;
        // nobody has a mutable reference to it.
        if let Some(owned) = unsafe { known.as_ref() }
            && owned.by.is_this()
        {
            return &owned.value;
        }
        let mine: &'static Owned<T> = Box::leak(Box::new(Owned { by: Process::this(), value: make() }));
        match self.0.compare_exchange(known, ptr::from_ref(mine).cast_mut(), AcqRel, Acquire) {
            Ok(_) => &mine.value,
            // SAFETY: another thread of this process was first, with a pointer as above, which is not null.
            Err(first) => unsafe { &(*first).value },
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// Does `work` in a forked child, at once and without destructors; gives what it said.
    fn in_a_child(work: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child only does what this module is there for, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(!work());
            // SAFETY: ends the child.
            unsafe { libc::_exit(code) };
        }
        assert!(child > 0);
        let mut status = -1;
        // SAFETY: `status` is ours to write.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status == 0
    }

    #[test]
    fn a_child_has_its_own_and_its_parent_keeps_one() {
        static LIST: PerProcess<Mutex<Vec<u32>>> = PerProcess::new();
        let list = LIST.get_or(Mutex::default);
        // As another thread may have when the child is made.
        let mut held = list.lock();
        held.push(1);
        let in_child = in_a_child(|| {
            let Some(mut own) = LIST.get_or(Mutex::default).try_lock() else { return false };
            own.push(2);
            drop(own);
            LIST.get_or(Mutex::default).try_lock().is_some_and(|own| *own == [2])
        });
        assert!(in_child, "the child has no list, or its parent's");
        drop(held);
        let threads = [(); 4].map(|()| std::thread::spawn(|| ptr::from_ref(LIST.get_or(Mutex::default)).addr()));
        let seen = threads.map(|thread| thread.join().unwrap());
        assert_eq!(seen, [ptr::from_ref(list).addr(); 4]);
        assert_eq!(*list.lock(), [1]);
    }

    #[test]
    fn threads_that_come_first_together_get_the_same() {
        for _ in 0..100 {
            let one: &'static PerProcess<u32> = Box::leak(Box::new(PerProcess::new()));
            let threads = [1, 2, 3].map(|n| std::thread::spawn(move || ptr::from_ref(one.get_or(|| n)).addr()));
            let [a, b, c] = threads.map(|thread| thread.join().unwrap());
            assert!(a == b && b == c);
        }
    }

    #[test]
    fn a_child_knows_that_it_is_one() {
        let before = generation();
        assert!(in_a_child(|| generation_now() == before + 1));
        assert_eq!(generation_now(), before, "the parent is no child");
    }
}
