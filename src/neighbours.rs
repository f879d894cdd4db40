//! The cards of one process that spend the same memory, open files or map entries.
//!
//! A program may open a device more than once, for parts with options of their own. What one of them keeps for growth to
//! come, or in a pool, gives way before another is told that there is no more.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::card::Card;
use crate::driver::{Backend, DriverInfo};
use crate::error::Error;
use crate::sys::fork::PerProcess;

fn all() -> &'static Mutex<Vec<Weak<Card>>> {
    static CARDS: PerProcess<Mutex<Vec<Weak<Card>>>> = PerProcess::new();
    CARDS.get_or(Mutex::default)
}

/// Makes a card known to the others.
pub(crate) fn add(card: &Arc<Card>) {
    let mut cards = all().lock();
    cards.retain(|known| known.strong_count() > 0);
    cards.push(Arc::downgrade(card));
}

/// What may be short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Short {
    Memory,
    Files,
    Maps,
}

impl Short {
    /// What an error says is short; none if it says something else.
    pub(crate) const fn of(error: &Error) -> Option<Self> {
        match error {
            Error::OutOfMemory(_) => Some(Self::Memory),
            Error::OutOfFiles(_) => Some(Self::Files),
            Error::OutOfMaps(_) => Some(Self::Maps),
            _ => None,
        }
    }
}

/// The others that spend what `card` is short of. A driver that calls open files short when they are not gets nothing of
/// anybody else's.
pub(crate) fn of(card: &Card, short: Short) -> Vec<Arc<Card>> {
    // Map entries are short by our own count, for many mappings at once.
    if short == Short::Files && !card.files().usage().is_used_up() && card.files().ensure(1).is_ok() {
        return Vec::new();
    }
    let shares = |other: &Card| match short {
        Short::Memory => is_same_card(card.gate().info(), other.gate().info()),
        Short::Files => Arc::ptr_eq(card.files(), other.files()) && other.gate().info().open_files_per_chunk > 0,
        Short::Maps => Arc::ptr_eq(card.maps(), other.maps()) && other.gate().info().maps_per_chunk > 0,
    };
    let is_other = |other: &Card| !core::ptr::eq(card, other) && shares(other);
    let others: Vec<_> = all().lock().iter().filter_map(Weak::upgrade).collect();
    others.into_iter().filter(|other| is_other(other)).collect()
}

/// Whether two devices spend the memory of one piece of hardware.
fn is_same_card(one: &DriverInfo, other: &DriverInfo) -> bool {
    one.memory_is_the_devices
        && other.memory_is_the_devices
        && one.backend == other.backend
        && match (one.uuid, other.uuid) {
            (Some(one), Some(other)) => one == other,
            _ => matches!(one.backend, Backend::Cuda | Backend::Hip) && one.ordinal == other.ordinal,
        }
}
