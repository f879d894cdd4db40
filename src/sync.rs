//! Atomics; under `--cfg loom` those of the models, which try every order of their operations.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic;
#[cfg(loom)]
pub(crate) use loom::sync::atomic;
