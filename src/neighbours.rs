//! The cards of one process that spend the same memory, open files or map entries.
//!
//! A program may open a device more than once, for parts with options of their own. What one of them keeps for growth to
//! come, or in a pool, gives way before another is told that there is no more.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::card::Card;
use crate::driver::{Backend, DriverInfo};
use crate::error::Error;

static CARDS: Mutex<Vec<Weak<Card>>> = Mutex::new(Vec::new());

/// Makes a card known to the others.
pub(crate) fn add(card: &Arc<Card>) {
    let mut cards = CARDS.lock();
    cards.retain(|known| known.strong_count() > 0);
    cards.push(Arc::downgrade(card));
}

/// The others that spend what `card` is short of. A driver that calls files or entries short when they are not gets
/// nothing of anybody else's.
pub(crate) fn of(card: &Card, shortage: &Error) -> Vec<Arc<Card>> {
    let short_in_truth = match shortage {
        Error::OutOfMemory(_) => true,
        Error::OutOfFiles(short) => short.needed > short.hard || card.files().usage().is_used_up(),
        Error::OutOfMaps(short) => short.needed > short.hard || card.maps().usage().is_used_up(),
        _ => false,
    };
    if !short_in_truth {
        return Vec::new();
    }
    let shares = |other: &Card| match shortage {
        Error::OutOfFiles(_) => {
            Arc::ptr_eq(card.files(), other.files()) && other.gate().info().open_files_per_chunk > 0
        }
        Error::OutOfMaps(_) => Arc::ptr_eq(card.maps(), other.maps()) && other.gate().info().maps_per_chunk > 0,
        _ => is_same_card(card.gate().info(), other.gate().info()),
    };
    // Those of a parent that was forked are not this process's to touch.
    let is_other = |other: &Card| !core::ptr::eq(card, other) && !other.gate().is_forked() && shares(other);
    let others: Vec<_> = CARDS.lock().iter().filter_map(Weak::upgrade).collect();
    others.into_iter().filter(|other| is_other(other)).collect()
}

/// Whether two devices are one piece of hardware. Of host devices each has a limit of its own, into which the memory of
/// others does not count.
fn is_same_card(one: &DriverInfo, other: &DriverInfo) -> bool {
    one.backend == other.backend
        && match (one.uuid, other.uuid) {
            (Some(one), Some(other)) => one == other,
            _ => matches!(one.backend, Backend::Cuda | Backend::Hip) && one.ordinal == other.ordinal,
        }
}
