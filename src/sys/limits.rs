//! The limits of this process.
use crate::driver::{MapCount, OpenFiles, ProcessLimits};
/// The limits of the process this code runs in.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThisProcess;
