//! The locks and counters of what is checked with models (`ci/models.sh`): the real ones, or those of loom, which tries every
//! order of their operations.

// Only in our own tests: who depends on the crate may build with `--cfg loom` for models of theirs.
#[cfg(not(all(test, loom)))]
pub(crate) use core::sync::atomic;
#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic;

pub(crate) use atomic::AtomicU64;
#[cfg(not(all(test, loom)))]
pub(crate) use parking_lot::Mutex;

#[cfg(all(test, loom))]
pub(crate) use modelled::Mutex;

#[cfg(all(test, loom))]
mod modelled {
    use core::fmt;
    use core::ops::DerefMut;
    use std::sync::PoisonError;

    /// A model's mutex, with the methods of the real one that are used.
    #[derive(Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> impl DerefMut<Target = T> + '_ {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        pub(crate) fn get_mut(&mut self) -> &mut T {
            self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl<T> fmt::Debug for Mutex<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Mutex").finish_non_exhaustive()
        }
    }
}

/// Steps through every interleaving in which a thread that could go on is left at most five times, or as
/// `LOOM_MAX_PREEMPTIONS` says.
#[cfg(all(test, loom))]
pub(crate) fn model(body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(5));
    builder.check(body);
}
