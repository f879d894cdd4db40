//! The crate's promises, on every driver that needs no GPU and in every personality of the simulated one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "that is how a test fails, in its helpers too")]

mod deferred;
mod faults;
mod life;
mod limits;
mod regressions;
mod verdicts;
mod world;
