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
/// The most addresses: an eighth of what a process on x86-64 has.
const MOST_BYTES: u64 = 16 << 40;

/// Those of this process, whose addresses all devices share; the oldest first.
static HELD: Mutex<VecDeque<Held>> = Mutex::new(VecDeque::new());

#[derive(Debug)]
struct Held {
    addr: u64,
    bytes: u64,
    since: Instant,
}

/// Keeps a range that the runtime has just freed. Another thread may have got it already; then it is not the runtime's to
/// hand out either. Waits, where as much is held as may be.
pub(super) fn hold(addr: u64, bytes: u64) {
    let mut held = HELD.lock();
    if map::reserve_if_free(addr, bytes).is_ok() {
        held.push_back(Held { addr, bytes, since: Instant::now() });
    }
    let too_much =
        |held: &VecDeque<Held>| held.len() > MOST || held.iter().map(|one| one.bytes).sum::<u64>() > MOST_BYTES;
    while too_much(&held) && wait_for_oldest(&mut held) {}
}

/// Lets go what was held for long enough.
pub(super) fn let_go_of_old() {
    let mut held = HELD.lock();
    while held.front().is_some_and(|oldest| oldest.since.elapsed() >= HOLD) && wait_for_oldest(&mut held) {}
}

/// Waits until all that is held may go, and lets it go. False if nothing is held.
pub(super) fn let_go_of_all() -> bool {
    let mut held = HELD.lock();
    let some = !held.is_empty();
    while wait_for_oldest(&mut held) {}
    some
}

/// Lets the oldest go when it was held for long enough. False if nothing is held.
fn wait_for_oldest(held: &mut VecDeque<Held>) -> bool {
    let Some(oldest) = held.pop_front() else { return false };
    std::thread::sleep(HOLD.saturating_sub(oldest.since.elapsed()));
    let_go(&oldest);
    true
}

fn let_go(held: &Held) {
    // SAFETY: the range was mapped by `hold`, without access, and nobody else knows of it: no reference points there.
    if let Err(error) = unsafe { map::unmap(held.addr, held.bytes) } {
        tracing::debug!(%error, "addresses stay held");
    }
}
