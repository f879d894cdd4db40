//! Freed addresses that are kept from being handed out again, where the runtime forgets a span only some time after it was
//! freed: what is reserved at the same place meanwhile would be forgotten with it.

use core::time::Duration;
use std::collections::VecDeque;
use std::time::Instant;

use parking_lot::Mutex;

use crate::sys::map;

/// How long. The runtime was seen to take some milliseconds.
const HOLD: Duration = Duration::from_millis(250);
/// The most ranges. Each takes an entry of the memory map, unless it lies next to another one.
const MOST: usize = 4096;

/// Those of this process, whose addresses all devices share; the oldest first.
static HELD: Mutex<VecDeque<Held>> = Mutex::new(VecDeque::new());

#[derive(Debug)]
struct Held {
    addr: u64,
    bytes: u64,
    since: Instant,
}

/// Keeps a range that the runtime has just freed. Another thread may have got it already; then it is not the runtime's to
/// hand out either.
pub(super) fn hold(addr: u64, bytes: u64) {
    let mut held = HELD.lock();
    if map::reserve_if_free(addr, bytes).is_ok() {
        held.push_back(Held { addr, bytes, since: Instant::now() });
    }
    if held.len() > MOST {
        let oldest = held.pop_front();
        oldest.iter().for_each(let_go);
    }
}

/// Lets go what was held for long enough.
pub(super) fn let_go_of_old() {
    let mut held = HELD.lock();
    while held.front().is_some_and(|oldest| oldest.since.elapsed() >= HOLD) {
        let oldest = held.pop_front();
        oldest.iter().for_each(let_go);
    }
}

fn let_go(held: &Held) {
    // SAFETY: the range was mapped by `hold`, without access, and nobody else knows of it: no reference points there.
    if let Err(error) = unsafe { map::unmap(held.addr, held.bytes) } {
        tracing::debug!(%error, "addresses stay held");
    }
}
