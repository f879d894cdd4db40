//! What the present thread may do to others.
//!
//! The background thread, and whoever runs a user's hook, may hold up the very thread they would wait for. So they take
//! what is free at once and leave the rest.

use core::cell::Cell;
use core::marker::PhantomData;

thread_local! {
    /// How many reasons there are not to wait.
    static REASONS: Cell<u32> = const { Cell::new(0) };
    /// Whether what is taken now is not needed yet.
    static SPARING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread may wait for what other threads do with the device.
pub(crate) fn may_wait() -> bool {
    REASONS.get() == 0
}

/// Whether what this thread takes now is not needed yet, so that nobody else's memory has to give way for it.
pub(crate) fn is_sparing() -> bool {
    SPARING.get()
}

/// While it lives, this thread waits for nobody, and what it takes is needed.
#[derive(Debug)]
pub(crate) struct NoWaiting {
    sparing: bool,
    /// Of this thread alone.
    _thread: PhantomData<*const ()>,
}

impl NoWaiting {
    pub(crate) fn begin() -> Self {
        REASONS.set(REASONS.get() + 1);
        Self { sparing: SPARING.replace(false), _thread: PhantomData }
    }
}

impl Drop for NoWaiting {
    fn drop(&mut self) {
        REASONS.set(REASONS.get() - 1);
        SPARING.set(self.sparing);
    }
}

/// Takes what is not needed yet.
pub(crate) fn sparingly<T>(take: impl FnOnce() -> T) -> T {
    struct Back(bool);
    impl Drop for Back {
        fn drop(&mut self) {
            SPARING.set(self.0);
        }
    }
    let _back = Back(SPARING.replace(true));
    take()
}
