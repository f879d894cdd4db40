//! The host memory that a driver has page-locked: so that no wrong call gets to it, and to cut copies at the borders.
//!
//! A copy whose host side reaches from one page-locked piece into the next fails on CUDA (`INVALID_VALUE`, seen on an
//! H200), although every byte of it is locked. So whatever is copied here goes up to a border at a time, whichever device
//! of the process had the pieces locked: a runtime knows those of all of them.

use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::RwLock;

use super::layout::Checked;
use crate::driver::{Call, DriverError, DriverResult};
use crate::sys::fork::PerProcess;

/// All page-locking is by pages of at least this size.
const PAGE: u64 = 4096;

/// How a piece came to be locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// It was there, and was registered.
    Registered,
    /// The driver allocated it.
    Allocated,
}

/// The bits of the flags that are wanted.
#[cfg(any(feature = "cuda", feature = "hip"))]
pub(crate) fn bits(flags: impl IntoIterator<Item = (bool, u32)>) -> u32 {
    flags.into_iter().fold(0, |bits, (wanted, bit)| if wanted { bits | bit } else { bits })
}

/// Pieces by address: their sizes, and how they came to be locked.
type Pieces = BTreeMap<u64, (u64, Origin)>;

/// The pieces of all drivers of a process.
#[derive(Debug, Default)]
struct All {
    drivers: RwLock<Vec<Weak<RwLock<Pieces>>>>,
    /// How many pieces they are, so that copies look no further where there is none.
    count: AtomicUsize,
}

fn all() -> &'static All {
    static ALL: PerProcess<All> = PerProcess::new();
    ALL.get_or(All::default)
}

/// The page-locked pieces of one driver, by address.
#[derive(Debug)]
pub(crate) struct Pins {
    pieces: Arc<RwLock<Pieces>>,
    all: &'static All,
}

impl Drop for Pins {
    fn drop(&mut self) {
        // Of the parent's, a forked child neither can ask nor needs to.
        if core::ptr::eq(self.all, all()) {
            self.all.count.fetch_sub(self.len(), Relaxed);
        }
    }
}

impl Pins {
    pub(crate) fn new() -> Self {
        let (pieces, all) = (Arc::default(), all());
        let mut drivers = all.drivers.write();
        drivers.retain(|known| known.strong_count() > 0);
        drivers.push(Arc::downgrade(&pieces));
        drop(drivers);
        Self { pieces, all }
    }

    /// Notes a piece, unless it is no whole pages or part of it is locked already. Where the driver then refuses,
    /// [`remove`](Self::remove) takes it back.
    fn add(&self, addr: u64, bytes: u64, origin: Origin) -> Checked<()> {
        if bytes == 0 || !addr.is_multiple_of(PAGE) || (origin == Origin::Registered && !bytes.is_multiple_of(PAGE)) {
            return Err(format!("{bytes} bytes at {addr:#x} are no whole pages"));
        }
        let Some(end) = addr.checked_add(bytes) else { return Err(format!("{bytes} bytes at {addr:#x} wrap round")) };
        let mut pieces = self.pieces.write();
        if let Some((at, (size, _))) = pieces.range(..end).next_back().filter(|(at, (size, _))| **at + size > addr) {
            return Err(format!("{bytes} bytes at {addr:#x} meet the {size} at {at:#x} that are locked already"));
        }
        pieces.insert(addr, (bytes, origin));
        self.all.count.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Takes a piece out. Before it is unlocked, since another thread may lock the same addresses right after.
    fn remove(&self, addr: u64, bytes: u64, origin: Origin) -> Checked<()> {
        let mut pieces = self.pieces.write();
        match pieces.get(&addr) {
            Some(&(size, as_what)) if size == bytes && as_what == origin => {
                pieces.remove(&addr);
                self.all.count.fetch_sub(1, Relaxed);
                Ok(())
            }
            Some((size, as_what)) => Err(format!("what is locked at {addr:#x} are {size} bytes, {as_what:?}")),
            None => Err(format!("nothing that is locked starts at {addr:#x}")),
        }
    }

    /// Locks a piece that is there: noted while `lock` does it, and only then if it fails.
    pub(crate) fn lock(&self, addr: u64, bytes: u64, lock: impl FnOnce() -> DriverResult<()>) -> DriverResult<()> {
        self.add(addr, bytes, Origin::Registered).map_err(DriverError::misuse(Call::Pin))?;
        lock().inspect_err(|_| {
            let _ = self.remove(addr, bytes, Origin::Registered);
        })
    }

    /// Unlocks a piece by `unlock`, unless it is no such piece; where that fails it stays noted.
    pub(crate) fn unlock(
        &self,
        call: Call,
        addr: u64,
        bytes: u64,
        origin: Origin,
        unlock: impl FnOnce() -> DriverResult<()>,
    ) -> DriverResult<()> {
        self.remove(addr, bytes, origin).map_err(DriverError::misuse(call))?;
        unlock().inspect_err(|_| self.restore(addr, bytes, origin))
    }

    /// Puts back what was taken out for a call that failed.
    pub(crate) fn restore(&self, addr: u64, bytes: u64, origin: Origin) {
        if self.pieces.write().insert(addr, (bytes, origin)).is_none() {
            self.all.count.fetch_add(1, Relaxed);
        }
    }

    /// How many pieces there are.
    pub(crate) fn len(&self) -> usize {
        self.pieces.read().len()
    }

    /// The piece that an address lies in.
    pub(crate) fn holding(&self, addr: u64) -> Option<(u64, u64)> {
        let pieces = self.pieces.read();
        let (&at, &(bytes, _)) = pieces.range(..=addr).next_back()?;
        (addr - at < bytes).then_some((at, bytes))
    }
}

/// The offsets at which a copy of `bytes` from or to the host at `addr` has to be cut, the last of them `bytes`.
#[cfg(any(feature = "cuda", feature = "hip"))]
pub(crate) fn cuts(addr: u64, bytes: u64) -> Cuts {
    if all().count.load(Relaxed) == 0 || bytes == 0 {
        return Cuts::whole(bytes);
    }
    let end = addr.saturating_add(bytes);
    let mut inner = Vec::new();
    for pieces in all().drivers.read().iter().filter_map(Weak::upgrade) {
        let pieces = pieces.read();
        let first = pieces.range(..=addr).next_back().filter(|(at, (size, _))| **at + size > addr);
        let borders = first.into_iter().chain(pieces.range(addr.saturating_add(1)..end));
        let borders = borders.flat_map(|(&at, &(size, _))| [at, at + size]);
        inner.extend(borders.filter(|border| *border > addr && *border < end).map(|border| border - addr));
    }
    // Neighbours share a border.
    inner.sort_unstable();
    inner.dedup();
    Cuts { inner, bytes }
}

/// Where to cut. Most copies are cut nowhere, and then nothing was allocated for it.
#[cfg(any(feature = "cuda", feature = "hip"))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cuts {
    inner: Vec<u64>,
    bytes: u64,
}

#[cfg(any(feature = "cuda", feature = "hip"))]
impl Cuts {
    pub(crate) const fn whole(bytes: u64) -> Self {
        Self { inner: Vec::new(), bytes }
    }

    /// Cut at these offsets too, which lie within.
    #[cfg(feature = "hip")]
    pub(crate) fn and_at(mut self, offsets: impl IntoIterator<Item = u64>) -> Self {
        let bytes = self.bytes;
        self.inner.extend(offsets.into_iter().filter(|&at| at < bytes));
        self.inner.sort_unstable();
        self.inner.dedup();
        self
    }

    /// Whether there is nothing to copy.
    pub(crate) const fn is_nothing(&self) -> bool {
        self.bytes == 0
    }

    /// The ends of the parts, in order.
    pub(crate) fn ends(&self) -> impl Iterator<Item = u64> + '_ {
        self.inner.iter().copied().chain([self.bytes])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: u64 = PAGE;

    fn pins(pieces: &[(u64, u64)]) -> Pins {
        let pins = Pins::new();
        for &(addr, bytes) in pieces {
            pins.add(addr, bytes, Origin::Registered).unwrap();
        }
        pins
    }

    /// Whoever had the pieces locked: here two drivers. The addresses are none of another test's.
    #[cfg(any(feature = "cuda", feature = "hip"))]
    #[test]
    fn copies_are_cut_at_every_border_and_nowhere_else() {
        const B: u64 = 1 << 50;
        let ends = |addr, bytes| cuts(B + addr, bytes).ends().collect::<Vec<_>>();
        assert_eq!(ends(P, 100), [100]);
        // Two neighbours, a gap of a page, one more.
        let (others, mine) = (pins(&[(B + 3 * P, 2 * P)]), pins(&[(B + 2 * P, P), (B + 6 * P, P)]));
        assert_eq!(ends(2 * P, P), [P], "a whole piece");
        assert_eq!(ends(2 * P + 5, P - 5), [P - 5]);
        assert_eq!(ends(2 * P + 5, P), [P - 5, P], "one byte over the border has to be cut");
        assert_eq!(ends(2 * P, 3 * P), [P, 3 * P]);
        assert_eq!(ends(P, 7 * P), [P, 2 * P, 4 * P, 5 * P, 6 * P, 7 * P], "into, over and out of them");
        assert_eq!(ends(5 * P, P), [P], "a gap");
        assert_eq!(ends(8 * P, P), [P]);
        assert_eq!(ends(2 * P, 0), [0]);
        // Gone with their driver.
        drop(others);
        assert_eq!(ends(P, 7 * P), [P, 2 * P, 5 * P, 6 * P, 7 * P]);
        drop(mine);
        assert_eq!(ends(P, 7 * P), [7 * P]);
    }

    #[test]
    fn what_is_locked_is_not_locked_again_and_goes_as_it_came() {
        let pins = pins(&[(4 * P, 2 * P)]);
        for (addr, bytes) in [(4 * P, P), (5 * P, P), (5 * P, 9 * P), (3 * P, 2 * P), (P, 100 * P), (4 * P, 2 * P)] {
            let refused = pins.add(addr, bytes, Origin::Registered).unwrap_err();
            assert!(refused.contains("locked already"), "{refused}");
        }
        for (addr, bytes) in [(P + 1, P), (P, P + 1), (P, 0), (u64::MAX - P + 1, 2 * P)] {
            pins.add(addr, bytes, Origin::Registered).unwrap_err();
        }
        pins.add(3 * P, P, Origin::Registered).unwrap();
        pins.add(6 * P, 7, Origin::Allocated).unwrap();
        assert_eq!(pins.len(), 3);
        assert_eq!((pins.holding(5 * P + 9), pins.holding(6 * P + 7)), (Some((4 * P, 2 * P)), None));

        assert!(pins.remove(4 * P, P, Origin::Registered).unwrap_err().contains("8192 bytes"));
        assert!(pins.remove(6 * P, 7, Origin::Registered).unwrap_err().contains("Allocated"));
        assert!(pins.remove(5 * P, P, Origin::Registered).unwrap_err().contains("nothing"));
        pins.remove(4 * P, 2 * P, Origin::Registered).unwrap();
        assert_eq!(pins.len(), 2);
        pins.restore(4 * P, 2 * P, Origin::Registered);
        assert_eq!(pins.holding(4 * P), Some((4 * P, 2 * P)));
    }
}
