//! Transparent huge pages: what the system and the process are set to, and a guard that turns them off for a while.

use core::ffi::{c_int, c_ulong};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::fs;
use std::io;
use std::sync::Once;

/// The settings that decide whether memory may become huge pages behind a program's back. `None` where the kernel does
/// not say.
///
/// ```
/// let thp = growspan::sys::thp::Thp::read();
/// if let Some(mode) = &thp.anonymous {
///     assert!(["always", "madvise", "never"].contains(&mode.as_str()));
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Thp {
    /// For anonymous memory: `always`, `madvise` or `never`.
    pub anonymous: Option<String>,
    /// For shared memory, the host driver's chunks among it: `always`, `within_size`, `advise`, `never`, `deny` or
    /// `force`.
    pub shared: Option<String>,
    /// Whether the process may have them at all (`THP_enabled`, cleared by `PR_SET_THP_DISABLE`).
    pub process: Option<bool>,
}

impl Thp {
    /// Reads them.
    #[must_use]
    pub fn read() -> Self {
        let setting = |name: &str| {
            let text = fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).ok()?;
            chosen(&text).map(str::to_owned)
        };
        Self {
            anonymous: setting("enabled"),
            shared: setting("shmem_enabled"),
            process: fs::read_to_string("/proc/self/status").ok().and_then(|text| enabled(&text)),
        }
    }
}

/// Transparent huge pages are off for the whole process, all of its threads, while one of these lives
/// (`PR_SET_THP_DISABLE`), also where memory asks for them (`MADV_HUGEPAGE`), as AMD's runtime does for what it allocates.
///
/// Guards nest, on one thread or on many: the first saves what was set, the last one to go puts it back, on every path
/// out. What others have changed meanwhile stays as they left it. Both are in the log, at level INFO: memory of other
/// threads that is first touched meanwhile gets small pages too.
///
/// A child forked meanwhile has what was set before. A program *started* meanwhile by a way that does not fork
/// (`posix_spawn`, which [`std::process::Command`] uses where it can) keeps huge pages off: start none meanwhile.
///
/// ```
/// use growspan::sys::thp::{Thp, ThpOff};
///
/// let before = Thp::read().process;
/// let off = ThpOff::enter()?;
/// assert_ne!(Thp::read().process, Some(true));
/// drop(off);
/// assert_eq!(Thp::read().process, before);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "huge pages are on again when this is dropped"]
pub struct ThpOff {
    process: u32,
}

impl ThpOff {
    /// Turns them off, or counts one more who wants them off.
    ///
    /// # Errors
    /// What the kernel says, or a sandbox in its place. Nothing has changed then.
    pub fn enter() -> io::Result<Self> {
        let first = USERS.enter()?;
        if let Some(previous) = first {
            tracing::info!(previous, "transparent huge pages are off for the process, for a while");
        }
        Ok(Self { process: std::process::id() })
    }
}

impl Drop for ThpOff {
    fn drop(&mut self) {
        // What a forked child has is as it was before already, and none of its users came along.
        if self.process != std::process::id() {
            return;
        }
        match USERS.leave() {
            Ok(Left::Others) => {}
            Ok(Left::Restored(value)) => tracing::info!(value, "transparent huge pages are as they were"),
            Ok(Left::Changed(value)) => {
                tracing::warn!(value, "somebody else has set transparent huge pages meanwhile, and so they stay");
            }
            Err(error) => tracing::warn!(%error, "transparent huge pages could not be turned on again"),
        }
    }
}

/// What the last guard found.
enum Left {
    /// It was not the last.
    Others,
    /// It put this back.
    Restored(c_int),
    /// What was set was not what the guards had set.
    Changed(c_int),
}

/// Who wants huge pages off. The lock is a flag and no mutex, so that a forked child can take it back from a thread that
/// did not come along; it is held for two calls of the kernel.
struct Users {
    locked: AtomicBool,
    count: AtomicU32,
    previous: AtomicI32,
}

static USERS: Users = Users { locked: AtomicBool::new(false), count: AtomicU32::new(0), previous: AtomicI32::new(0) };

/// Off for all memory, as [`state`] tells it.
const OFF: c_int = 1;

impl Users {
    /// Gives what was set before, to the first.
    fn enter(&self) -> io::Result<Option<c_int>> {
        static AT_FORK: Once = Once::new();
        AT_FORK.call_once(|| {
            // SAFETY: the handler may run in any forked child: it makes one call of the kernel and stores to atomics. If
            // it cannot be registered, children keep huge pages off, which harms nobody.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        let _locked = self.lock();
        let count = self.count.load(Ordering::Relaxed);
        if count > 0 {
            self.count.store(count + 1, Ordering::Relaxed);
            return Ok(None);
        }
        let previous = state()?;
        // Noted first, so that a child forked right after the change knows of it.
        self.previous.store(previous, Ordering::Relaxed);
        self.count.store(1, Ordering::Release);
        if previous != OFF
            && let Err(error) = set(OFF)
        {
            self.count.store(0, Ordering::Relaxed);
            return Err(error);
        }
        Ok(Some(previous))
    }

    fn leave(&self) -> io::Result<Left> {
        let _locked = self.lock();
        let count = self.count.load(Ordering::Relaxed);
        if count > 1 {
            self.count.store(count - 1, Ordering::Relaxed);
            return Ok(Left::Others);
        }
        let previous = self.previous.load(Ordering::Relaxed);
        let result = match state() {
            Ok(now) if now != OFF => Ok(Left::Changed(now)),
            _ if previous == OFF => Ok(Left::Restored(previous)),
            _ => set(previous).map(|()| Left::Restored(previous)),
        };
        self.count.store(0, Ordering::Release);
        result
    }

    fn lock(&self) -> Locked<'_> {
        while self.locked.swap(true, Ordering::Acquire) {
            std::thread::yield_now();
        }
        Locked(self)
    }
}

struct Locked<'a>(&'a Users);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.0.locked.store(false, Ordering::Release);
    }
}

/// Gives a forked child what its parent had before, and no users.
extern "C" fn in_child() {
    if USERS.count.load(Ordering::Acquire) > 0 {
        let _ = set(USERS.previous.load(Ordering::Relaxed));
    }
    USERS.count.store(0, Ordering::Relaxed);
    USERS.locked.store(false, Ordering::Release);
}

/// What the process is set to: 0 on, 1 off, 3 off but for memory that asks (since Linux 6.18).
fn state() -> io::Result<c_int> {
    const NOTHING: c_ulong = 0;
    // SAFETY: this call reads a flag of the process; all further arguments have to be zero.
    let state = unsafe { libc::prctl(libc::PR_GET_THP_DISABLE, NOTHING, NOTHING, NOTHING, NOTHING) };
    if state < 0 { Err(io::Error::last_os_error()) } else { Ok(state) }
}

/// Sets the process to what [`state`] gave.
fn set(state: c_int) -> io::Result<()> {
    const NOTHING: c_ulong = 0;
    let (off, flags) = (c_ulong::from(state & 1 != 0), c_ulong::from(state & 2 != 0) * 2);
    // SAFETY: this call changes a flag of the process, which decides the size of pages and nothing that is in them.
    match unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, off, flags, NOTHING, NOTHING) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The word in brackets: `madvise` of `always [madvise] never`.
fn chosen(text: &str) -> Option<&str> {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

fn enabled(status: &str) -> Option<bool> {
    let value = status.lines().find_map(|line| line.strip_prefix("THP_enabled:"))?;
    match value.trim() {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::seccomp::refuse;

    #[test]
    fn the_word_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("[always] within_size advise never deny force\n"), Some("always"));
        assert_eq!(chosen("always madvise never\n"), None);
        assert_eq!(chosen(""), None);
    }

    #[test]
    fn the_line_of_the_status_file() {
        assert_eq!(enabled("Name:\tx\nTHP_enabled:\t1\nThreads:\t3\n"), Some(true));
        assert_eq!(enabled("Name:\tx\nTHP_enabled:\t0\n"), Some(false));
        assert_eq!(enabled("Name:\tx\nUntag_mask:\t0\n"), None);
    }

    #[test]
    fn the_process_flag_is_the_real_one() {
        const NAME: &str = "sys::thp::tests::the_process_flag_is_the_real_one";
        crate::sys::tests::alone(NAME, || {
            let before = Thp::read().process;
            // SAFETY: this flag only sets a flag of the process, and all further arguments have to be zero.
            let rc = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
            // Kernels from before 5.0, or without huge pages, do not say.
            let expected = before.map(|enabled| enabled && rc != 0);
            assert_eq!(Thp::read().process, expected);
        });
    }

    #[test]
    fn guards_nest_and_put_back_what_was_set() {
        crate::sys::tests::alone("sys::thp::tests::guards_nest_and_put_back_what_was_set", || {
            // 3 is known since Linux 6.18.
            for before in [0, 1, 3] {
                if set(before).is_err() {
                    assert_eq!(before, 3);
                    continue;
                }
                let outer = ThpOff::enter().unwrap();
                assert_eq!(state().unwrap(), OFF);
                let inner = ThpOff::enter().unwrap();
                drop(outer);
                assert_eq!(state().unwrap(), OFF, "the other one still wants it");
                drop(inner);
                assert_eq!(state().unwrap(), before);

                let panicked = std::panic::catch_unwind(|| {
                    let _off = ThpOff::enter().unwrap();
                    assert_eq!(state().unwrap(), OFF);
                    panic!("inside");
                });
                assert!(panicked.is_err());
                assert_eq!(state().unwrap(), before, "after a panic");
            }
        });
    }

    #[test]
    fn threads_count_together() {
        crate::sys::tests::alone("sys::thp::tests::threads_count_together", || {
            for before in [0, 1] {
                set(before).unwrap();
                std::thread::scope(|scope| {
                    for _ in 0..8 {
                        scope.spawn(|| {
                            for turn in 0..2000 {
                                let off = ThpOff::enter().unwrap();
                                assert_eq!(state().unwrap(), OFF);
                                if turn % 3 == 0 {
                                    let _inner = ThpOff::enter().unwrap();
                                }
                                assert_eq!(state().unwrap(), OFF);
                                drop(off);
                            }
                        });
                    }
                });
                assert_eq!((state().unwrap(), USERS.count.load(Ordering::Relaxed)), (before, 0));
            }
        });
    }

    #[test]
    fn what_others_set_meanwhile_stays() {
        crate::sys::tests::alone("sys::thp::tests::what_others_set_meanwhile_stays", || {
            if set(3).is_err() {
                return println!("skipped: this kernel knows on and off alone");
            }
            set(0).unwrap();
            let off = ThpOff::enter().unwrap();
            set(3).unwrap();
            drop(off);
            assert_eq!(state().unwrap(), 3);
        });
    }

    /// Forks; the child ends with what `body` gives.
    fn forked(body: impl FnOnce() -> c_int) -> c_int {
        // SAFETY: the child makes a few calls of the kernel and ends without running anything of its parent's.
        match unsafe { libc::fork() } {
            // SAFETY: ends the child.
            0 => unsafe { libc::_exit(body()) },
            child => {
                let mut status = 0;
                // SAFETY: the pointer is valid for the write.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                assert!(libc::WIFEXITED(status));
                libc::WEXITSTATUS(status)
            }
        }
    }

    #[test]
    fn a_forked_child_has_what_was_set_before() {
        crate::sys::tests::alone("sys::thp::tests::a_forked_child_has_what_was_set_before", || {
            for before in [0, 1] {
                set(before).unwrap();
                let off = ThpOff::enter().unwrap();
                assert_eq!(forked(|| state().unwrap_or(99)), before);
                let mut inherited = Some(off);
                let code = forked(|| {
                    drop(inherited.take());
                    let before = state().unwrap_or(99);
                    // Guards of its own work there.
                    let own = ThpOff::enter().map_or(99, |_own| state().unwrap_or(99));
                    before + 10 * own + 100 * state().unwrap_or(99)
                });
                assert_eq!(code, before + 10 + 100 * before);
                assert_eq!(state().unwrap(), OFF, "the parent's is its own");
                drop(inherited);
                assert_eq!(state().unwrap(), before);
            }
        });
    }

    #[test]
    fn a_kernel_that_refuses_is_an_error_and_changes_nothing() {
        const NAME: &str = "sys::thp::tests::a_kernel_that_refuses_is_an_error_and_changes_nothing";
        crate::sys::tests::alone(NAME, || {
            refuse(libc::SYS_prctl, 0, libc::PR_SET_THP_DISABLE, libc::EINVAL);
            for _ in 0..2 {
                assert_eq!(ThpOff::enter().unwrap_err().raw_os_error(), Some(libc::EINVAL));
                assert_eq!((state().unwrap(), USERS.count.load(Ordering::Relaxed)), (0, 0));
            }
            refuse(libc::SYS_prctl, 0, libc::PR_GET_THP_DISABLE, libc::EPERM);
            assert_eq!(ThpOff::enter().unwrap_err().raw_os_error(), Some(libc::EPERM));
            assert_eq!(USERS.count.load(Ordering::Relaxed), 0);
        });
    }
}
