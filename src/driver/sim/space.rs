//! Addresses that nobody can dereference.

use std::collections::BTreeMap;

/// Where the pretended addresses start: no address of x86-64 (bits 55 and 56 are not a sign extension, even with five
/// page-table levels) nor of a program on arm64 (bit 55 is the kernel's), so that following one is caught at once.
const BASE: u64 = 0x0180_0000_0000_0000;

/// All addresses there are: 128 TiB, what a process on x86-64 has.
const SIZE: u64 = 1 << 47;

/// Kept free between two ranges, so that running over an end does not land in a neighbour.
const GUARD: u64 = 2 << 20;

/// Which addresses are taken.
#[derive(Debug)]
pub(super) struct Space {
    /// Start and end of what is taken.
    taken: BTreeMap<u64, u64>,
    /// Where to look next. Going round, and not back to the first hole, leaves freed addresses alone as long as
    /// possible: uses of freed memory show.
    cursor: u64,
}

impl Space {
    pub(super) const fn new() -> Self {
        // Not at `BASE`, which is aligned to anything.
        Self { taken: BTreeMap::new(), cursor: BASE + GUARD }
    }

    /// Takes `bytes` aligned to `align`, a power of two.
    pub(super) fn take(&mut self, bytes: u64, align: u64) -> Option<u64> {
        let addr = self.find(self.cursor, bytes, align).or_else(|| self.find(BASE + GUARD, bytes, align))?;
        self.taken.insert(addr, addr + bytes);
        self.cursor = addr + bytes + GUARD;
        Some(addr)
    }

    pub(super) fn give(&mut self, addr: u64) {
        self.taken.remove(&addr);
    }

    fn find(&self, from: u64, bytes: u64, align: u64) -> Option<u64> {
        let mut at = from.checked_next_multiple_of(align)?;
        loop {
            let end = at.checked_add(bytes)?;
            if end > BASE + SIZE {
                return None;
            }
            // The last range that starts before our end is the only one that has to be looked at: moving on within the
            // holes before it would only move our end further into it.
            match self.taken.range(..end + GUARD).next_back() {
                Some((_, &taken)) if taken + GUARD > at => at = (taken + GUARD).checked_next_multiple_of(align)?,
                _ => return Some(at),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap_and_addresses_come_round_again() {
        let mut space = Space::new();
        let mut live: Vec<(u64, u64)> = Vec::new();
        for step in 0..2000_u64 {
            let (bytes, align) = ((1 + step % 7) << 40, 1 << (21 + step % 12));
            let addr = space.take(bytes, align).unwrap();
            assert_eq!(addr % align, 0);
            assert!(addr >= BASE && addr + bytes <= BASE + SIZE);
            assert!(live.iter().all(|&(start, end)| addr + bytes < start || end < addr), "step {step}");
            live.push((addr, addr + bytes));
            if live.len() > 9 {
                let (start, _) = live.swap_remove((step % 9) as usize);
                space.give(start);
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut space = Space::new();
        for (bytes, align) in [(u64::MAX, 4096), (SIZE, 4096), (4096, 1 << 63), (SIZE + 1, 1)] {
            assert_eq!(space.take(bytes, align), None, "{bytes:#x} {align:#x}");
        }
        assert!(space.take(SIZE - GUARD, 4096).is_some());
        assert_eq!(space.take(4096, 4096), None);
    }

    #[test]
    fn holes_are_found_with_room_on_both_sides() {
        let mut space = Space::new();
        let addrs: Vec<u64> = (0..3).filter_map(|_| space.take(GUARD, 4096)).collect();
        space.give(addrs[1]);
        for from in (addrs[0]..addrs[1]).step_by(64 << 10) {
            assert_eq!(space.find(from, GUARD, 4096), Some(addrs[1]), "{from:#x}");
        }
        assert_eq!(space.find(addrs[0], GUARD + 1, 4096), Some(addrs[2] + 2 * GUARD));
    }
}
