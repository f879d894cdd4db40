//! One thread of the process at a time is in a runtime's virtual memory: exports, imports and maps of several threads raced
//! in it up to 2026.

use core::time::Duration;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use crate::driver::{Call, DriverError, DriverErrorKind, DriverResult};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// What the thread that is there does, and since when.
static HOLDER: Mutex<Option<(Call, Instant)>> = Mutex::new(None);

/// How long a thread may be there: who waits for it longer is behind a call that hangs, and would wait for ever. Shorter than
/// the patience of the start-up check, which then names the right culprit.
const USUAL: Duration = Duration::from_secs(8);
/// The same of unmapping, which waits for all work of the devices that have access (since 7.14; before, for that of the null
/// stream).
const UNMAPPING: Duration = Duration::from_secs(60);

const fn longest(call: Call) -> Duration {
    match call {
        Call::Unmap => UNMAPPING,
        _ => USUAL,
    }
}

/// A thread's turn in virtual memory.
#[derive(Debug)]
#[must_use = "the turn is over when this is dropped"]
pub(super) struct Turn {
    _held: MutexGuard<'static, ()>,
}

impl Turn {
    /// Waits for one.
    pub(super) fn wait(call: Call) -> DriverResult<Self> {
        loop {
            let left = |(by, since): (Call, Instant)| longest(by).saturating_sub(since.elapsed());
            let holder = *HOLDER.lock();
            if let Some(held) = ONE_AT_A_TIME.try_lock_for(holder.map_or(USUAL, left)) {
                *HOLDER.lock() = Some((call, Instant::now()));
                return Ok(Self { _held: held });
            }
            // Others may have come and gone meanwhile.
            if let Some((by, _)) = HOLDER.lock().filter(|holder| left(*holder).is_zero()) {
                let why = if by == Call::Unmap { "waits for work that does not end, or hangs" } else { "hangs" };
                return Err(DriverError::new(call, DriverErrorKind::Other).with_detail(format!(
                    "another thread has been in the runtime for more than {} s, and only one may be in its virtual memory: \
                     {by} {why}",
                    longest(by).as_secs()
                )));
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // While it still is this thread's.
        *HOLDER.lock() = None;
    }
}
