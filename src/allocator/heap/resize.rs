//! Blocks of a heap that become larger or smaller where they are.

use super::super::classes::PAGE;
use super::super::ground::Ground;
use super::super::region::Tag;
use super::Heap;
use crate::error::Result;

impl Heap {
    /// How large the block at an address is, in bytes; none if there is none.
    pub(in crate::allocator) fn size_of(&self, ground: &Ground, region: u32, address: u64) -> Option<u64> {
        match self.region(region)?.tag(address) {
            Tag::Slab(number) => Some(u64::from(self.slabs.get(number as usize)?.as_ref()?.block())),
            Tag::Range(range) => Some(u64::from(self.ranges.get(range).size) * ground.unit),
            Tag::None => None,
        }
    }

    /// Makes the block at an address hold `bytes` without moving it. False if it cannot.
    ///
    /// # Errors
    /// As for taking one; nothing has changed.
    pub(in crate::allocator) fn grow(
        &mut self,
        ground: &Ground,
        region: u32,
        address: u64,
        bytes: u64,
    ) -> Result<bool> {
        let Some(Tag::Range(range)) = self.region(region).map(|region| region.tag(address)) else {
            return Ok(self.size_of(ground, region, address).is_some_and(|size| size >= bytes));
        };
        let old = self.ranges.get(range).clone();
        let Some(bytes) = bytes.checked_next_multiple_of(ground.unit) else { return Ok(false) };
        let Ok(size) = u32::try_from(bytes / ground.unit) else { return Ok(false) };
        if size <= old.size {
            return Ok(true);
        }
        if !self.ranges.grow(range, size) {
            return Ok(false);
        }
        let unit = ground.unit;
        let (from, to) = (u64::from(old.at + old.size) * unit, u64::from(old.at + size) * unit);
        if let Err(error) = self.commit(ground, old.region, from, to - from) {
            self.ranges.shrink(range, old.size);
            return Err(error);
        }
        // The slot astride the old end was touched by it already and counts once.
        let astride = from % ground.slot != 0 && ground.is_span();
        if astride && let Some(region) = self.region_mut(old.region) {
            let slot = *region.slots_of(from, 1).start();
            region.leave(slot);
        }
        self.bytes += to - from;
        Ok(true)
    }

    /// Gives back what is behind the first `bytes` of the block at an address, as far as that can be.
    pub(in crate::allocator) fn shrink(&mut self, ground: &Ground, region: u32, address: u64, bytes: u64) {
        let Some(Tag::Range(range)) = self.region(region).map(|region| region.tag(address)) else { return };
        let old = self.ranges.get(range).clone();
        let bytes = bytes.max(PAGE as u64).next_multiple_of(ground.unit);
        let Ok(size) = u32::try_from(bytes / ground.unit) else { return };
        if size >= old.size {
            return;
        }
        let unit = ground.unit;
        let (from, to) = (u64::from(old.at + size) * unit, u64::from(old.at + old.size) * unit);
        if let Some(found) = self.region(old.region) {
            // The slot astride the new end stays.
            let kept = *found.slots_of(from - 1, 1).start();
            let gone = found.slots_of(from, to - from).filter(move |slot| *slot != kept);
            self.leave(ground, old.region, gone);
        }
        self.ranges.shrink(range, size);
        self.bytes -= to - from;
    }
}
