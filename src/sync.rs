//! Atomics; in the models (`ci/models.sh`) those of loom, which tries every order of their operations.

// Only in our own tests: who depends on the crate may build with `--cfg loom` for models of theirs.
#[cfg(not(all(test, loom)))]
pub(crate) use core::sync::atomic;
#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic;
