//! One heap: blocks of shared spans, all that is known of them kept apart from the memory.

mod resize;

use core::ops::RangeInclusive;
use core::sync::atomic::Ordering::Relaxed;
use std::collections::VecDeque;

use super::classes::PAGE;
use super::ground::Ground;
use super::ranges::{Area, Place, Ranges};
use super::region::{Region, Tag};
use super::slab::{NONE, Slab, slab_bytes};
use crate::error::{Error, Result};
use crate::pool::{Chunk, Taken};

/// A part of an allocator that one thread at a time uses.
///
/// Blocks up to 16 KiB lie in slabs of one size; slabs, and larger blocks, lie in ranges of regions. Memory is mapped
/// under a range when it is taken. A slot of memory that no range touches any more stays mapped for the next, until
/// there is more of that than is to be kept, or another slot needs a chunk.
#[derive(Debug)]
pub(super) struct Heap {
    /// Which of the allocator's heaps it is.
    owner: u8,
    ranges: Ranges,
    slabs: Vec<Option<Slab>>,
    spare_slabs: Vec<u32>,
    /// For each class the first slab with a free block.
    partial: Box<[u32]>,
    /// By number.
    regions: Vec<Option<Box<Region>>>,
    /// Slots that held nothing when they were put here, the oldest first, each once. Some may hold something by now.
    empties: VecDeque<(u32, u32)>,
    /// Blocks there are.
    pub(super) blocks: u64,
    /// Their sizes as they lie there, in bytes.
    pub(super) bytes: u64,
}

/// Ranges below this part of a slot lie apart from larger ones.
const FINE: u64 = 8;

/// What a heap may do for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum May {
    TakeMore,
    /// Only use what it has: no chunk and no region is taken.
    UseMapped,
}

impl Heap {
    pub(super) fn new(owner: u8, ground: &Ground) -> Self {
        Self {
            owner,
            ranges: Ranges::new(),
            slabs: Vec::new(),
            spare_slabs: Vec::new(),
            partial: vec![NONE; ground.classes.len()].into_boxed_slice(),
            regions: Vec::new(),
            empties: VecDeque::new(),
            blocks: 0,
            bytes: 0,
        }
    }

    fn region(&self, number: u32) -> Option<&Region> {
        self.regions.get(number as usize)?.as_deref()
    }

    fn region_mut(&mut self, number: u32) -> Option<&mut Region> {
        self.regions.get_mut(number as usize)?.as_deref_mut()
    }

    fn slab_mut(&mut self, number: u32) -> Option<&mut Slab> {
        self.slabs.get_mut(number as usize)?.as_mut()
    }

    /// A block of a class.
    #[inline]
    pub(super) fn take_small(&mut self, ground: &Ground, class: usize, may: May) -> Result<u64> {
        let number = self.partial[class];
        if let Some(Some(slab)) = self.slabs.get_mut(number as usize)
            && let Some(address) = slab.take()
        {
            self.blocks += 1;
            self.bytes += u64::from(slab.block());
            if slab.is_full() {
                self.unlink(number);
            }
            return Ok(address);
        }
        self.take_small_anew(ground, class, may)
    }

    #[cold]
    fn take_small_anew(&mut self, ground: &Ground, class: usize, may: May) -> Result<u64> {
        let block = ground.classes.size(class);
        let bytes = slab_bytes(block);
        let (range, address) = self.take_range(ground, Area::Fine, bytes, PAGE as u64, may)?;
        let slab = Slab::new(address, bytes, u16::try_from(class).unwrap_or(u16::MAX), block, range);
        let number = match self.spare_slabs.pop() {
            Some(number) => {
                self.slabs[number as usize] = Some(slab);
                number
            }
            None => {
                self.slabs.push(Some(slab));
                u32::try_from(self.slabs.len() - 1).unwrap_or(NONE)
            }
        };
        let region = self.ranges.get(range).region;
        if let Some(region) = self.region_mut(region) {
            region.set_tags(address, bytes, Tag::Slab(number));
        }
        self.link(number);
        self.take_small(ground, class, may)
    }

    /// A block of more than a page, or of an alignment beyond one.
    pub(super) fn take_large(&mut self, ground: &Ground, bytes: u64, align: u64, may: May) -> Result<u64> {
        let bytes = bytes.max(PAGE as u64).next_multiple_of(ground.unit);
        let area = if bytes < ground.slot / FINE { Area::Fine } else { Area::Coarse };
        let (range, address) = self.take_range(ground, area, bytes, align, may)?;
        let region = self.ranges.get(range).region;
        if let Some(region) = self.region_mut(region) {
            region.set_tags(address, 0, Tag::Range(range));
        }
        self.blocks += 1;
        self.bytes += bytes;
        Ok(address)
    }

    /// A range with memory under it: its number and address.
    fn take_range(&mut self, ground: &Ground, area: Area, bytes: u64, align: u64, may: May) -> Result<(u32, u64)> {
        // What is an allocation of its own has all its memory anyway.
        let (area, other) = match area {
            Area::Coarse if ground.is_span() => (area, Area::Fine),
            _ => (Area::Fine, Area::Coarse),
        };
        let full = || Error::Overflow { what: "a block", count: bytes, size: 1 };
        let size = u32::try_from(bytes / ground.unit).map_err(|_| full())?;
        let align = u32::try_from(align / ground.unit).map_err(|_| full())?.max(1);
        let mut fresh = None;
        let range = match self.place(ground, area, size, align) {
            Some(range) => range,
            None if may == May::UseMapped => self.place(ground, other, size, align).ok_or_else(full)?,
            None => match self.add_region(ground, area) {
                Ok(region) => {
                    fresh = Some(region);
                    self.place(ground, area, size, align).ok_or_else(full)?
                }
                Err(error) => self.place(ground, other, size, align).ok_or(error)?,
            },
        };
        let found = self.ranges.get(range).clone();
        let offset = u64::from(found.at) * ground.unit;
        let lacks = |region: &Region| may == May::UseMapped && region.missing(offset, bytes) > 0;
        let committed = match self.region(found.region) {
            Some(region) if lacks(region) => Err(full()),
            _ => self.commit(ground, found.region, offset, bytes),
        };
        if let Err(error) = committed {
            let free = self.ranges.put(range);
            if fresh.is_some() {
                self.give_up_region(ground, free);
            }
            return Err(error);
        }
        let base = self.region(found.region).map_or(0, |region| region.base);
        Ok((range, base + offset))
    }

    /// A range that keeps the fewest chunks in use that nothing uses yet, and needs the fewest new ones.
    fn place(&mut self, ground: &Ground, area: Area, size: u32, align: u32) -> Option<u32> {
        let regions = &self.regions;
        let cost = |place: Place| {
            let Some(Some(region)) = regions.get(place.region as usize) else { return (0, 0) };
            region.cost(u64::from(place.at) * ground.unit, u64::from(place.size) * ground.unit)
        };
        self.ranges.take(area, size, align, cost)
    }

    fn add_region(&mut self, ground: &Ground, area: Area) -> Result<u32> {
        let region = ground.take_region(self.owner)?;
        let number = region.number;
        let units = u32::try_from(ground.region / ground.unit).unwrap_or(u32::MAX);
        if self.regions.len() <= number as usize {
            self.regions.resize_with(number as usize + 1, || None);
        }
        self.regions[number as usize] = Some(Box::new(region));
        self.ranges.add_region(area, number, units);
        Ok(number)
    }

    /// Lets other heaps have the region that this free range is all of, if it is, unless memory is mapped there.
    fn give_up_region(&mut self, ground: &Ground, range: u32) {
        if !self.ranges.is_whole_region(range) {
            return;
        }
        let number = self.ranges.get(range).region;
        let mapped = self.region(number).is_none_or(|region| region.committed() > 0);
        // A region that is an allocation of its own is freed, when nothing runs.
        if if ground.is_span() { mapped } else { ground.quiet().is_err() } {
            return;
        }
        if let Some(region) = self.regions.get_mut(number as usize).and_then(Option::take) {
            self.ranges.remove_region(range);
            ground.put_region(*region);
        }
    }

    /// Maps what is not mapped of a range about to be used, all or nothing, and counts it as touching its slots.
    fn commit(&mut self, ground: &Ground, number: u32, offset: u64, bytes: u64) -> Result<()> {
        let Some(region) = self.region(number).filter(|_| ground.is_span()) else { return Ok(()) };
        let slots = region.slots_of(offset, bytes);
        let missing: Vec<usize> = slots.clone().filter(|slot| !region.is_mapped(*slot)).collect();
        if !missing.is_empty() {
            self.map_slots(ground, number, &missing, &slots)?;
        }
        let Some(region) = self.regions[number as usize].as_deref_mut() else { return Ok(()) };
        let mut missing = missing.into_iter().peekable();
        for slot in slots {
            let fresh = missing.next_if_eq(&slot).is_some();
            if region.touch(slot) && !fresh {
                ground.empty.fetch_sub(ground.slot, Relaxed);
            }
        }
        Ok(())
    }

    /// Maps chunks under these slots, or changes nothing.
    fn map_slots(
        &mut self,
        ground: &Ground,
        number: u32,
        missing: &[usize],
        taking: &RangeInclusive<usize>,
    ) -> Result<()> {
        ground.card().check_capture(None)?;
        let mut taken = self.take_chunks(ground, missing.len(), number, taking)?;
        let Some(region) = self.regions.get_mut(number as usize).and_then(Option::as_deref_mut) else { return Ok(()) };
        let fresh: Vec<bool> = taken.iter().map(|taken| taken.fresh).collect();
        let mut mapped = 0;
        for run in missing.chunk_by(|a, b| a + 1 == *b) {
            let Some(first) = run.first() else { continue };
            let chunks = taken.drain(..run.len()).map(|taken| taken.chunk).collect();
            let Some(slots) = region.slots_mut() else { return Ok(()) };
            let Err(rejected) = slots.map(*first, chunks) else {
                mapped += run.len();
                continue;
            };
            // Those of this run, then those that were not reached, then those of the runs before.
            let these = rejected.chunks.into_iter().zip(fresh[mapped..].iter().copied());
            ground.pool.undo_take(these.map(|(chunk, fresh)| Taken { chunk, fresh }));
            ground.pool.undo_take(taken);
            let mut error = rejected.error;
            for (slot, fresh) in missing[..mapped].iter().zip(fresh) {
                // SAFETY: the slot was mapped a moment ago for a range that nobody was told of.
                match region.slots_mut().map_or(Ok(None), |slots| unsafe { slots.take(*slot) }) {
                    Ok(chunk) => ground.pool.undo_take(chunk.map(|chunk| Taken { chunk, fresh })),
                    // It stays mapped, and holds nothing.
                    Err(then) => {
                        ground.empty.fetch_add(ground.slot, Relaxed);
                        if region.list(*slot) {
                            self.empties.push_back((number, u32::try_from(*slot).unwrap_or(0)));
                        }
                        error = then.after(error);
                    }
                }
            }
            return Err(error);
        }
        Ok(())
    }

    /// So many chunks of a slot's size: from the pool, from slots of this heap that hold nothing (but not those that are
    /// being taken), and new ones at last. So memory that holds nothing is used before more is asked for.
    fn take_chunks(
        &mut self,
        ground: &Ground,
        count: usize,
        number: u32,
        taking: &RangeInclusive<usize>,
    ) -> Result<Vec<Taken>> {
        let mut taken = Vec::with_capacity(count);
        let kept = core::iter::from_fn(|| ground.pool.take_kept(ground.slot));
        taken.extend(kept.take(count).map(|chunk| Taken { chunk, fresh: false }));
        if taken.len() < count && !self.empties.is_empty() && ground.quiet().is_ok() {
            let wanted = count - taken.len();
            let mut set_aside = Vec::new();
            while taken.len() < count
                && let Some((region, slot)) = self.empties.pop_front()
            {
                if region == number && taking.contains(&(slot as usize)) {
                    set_aside.push((region, slot));
                    continue;
                }
                // SAFETY: `quiet` made sure of the device.
                match unsafe { self.unmap_empty(ground, region, slot) } {
                    Ok(chunk) => taken.extend(chunk.map(|chunk| Taken { chunk, fresh: false })),
                    Err(error) => {
                        tracing::debug!(%error, wanted, "memory that holds nothing stays where it is");
                        break;
                    }
                }
            }
            self.empties.extend(set_aside);
        }
        while taken.len() < count {
            match ground.pool.take_one(ground.slot) {
                Ok(one) => taken.push(one),
                Err(error) => {
                    ground.pool.undo_take(taken);
                    return Err(error);
                }
            }
        }
        Ok(taken)
    }

    /// Takes the chunk from under a slot, if it holds nothing.
    ///
    /// # Safety
    /// No work on the device touches memory that holds nothing.
    unsafe fn unmap_empty(&mut self, ground: &Ground, region: u32, slot: u32) -> Result<Option<Chunk>> {
        let Some(found) = self.regions.get_mut(region as usize).and_then(Option::as_deref_mut) else { return Ok(None) };
        found.unlist(slot as usize);
        if !found.is_empty_slot(slot as usize) {
            return Ok(None);
        }
        let Some(slots) = found.slots_mut() else { return Ok(None) };
        // SAFETY: no range touches the slot, so no block lies there and the host holds no reference; the caller speaks
        // for the device.
        match unsafe { slots.take(slot as usize) } {
            Ok(chunk) => {
                ground.empty.fetch_sub(ground.slot, Relaxed);
                Ok(chunk)
            }
            Err(error) => {
                found.list(slot as usize);
                self.empties.push_back((region, slot));
                Err(error)
            }
        }
    }

    /// Counts a range as gone from its slots.
    fn leave(&mut self, ground: &Ground, number: u32, slots: impl Iterator<Item = usize>) {
        if !ground.is_span() {
            return;
        }
        let Some(region) = self.regions.get_mut(number as usize).and_then(Option::as_deref_mut) else { return };
        for slot in slots {
            if region.leave(slot) {
                ground.empty.fetch_add(ground.slot, Relaxed);
                if region.list(slot) {
                    self.empties.push_back((number, u32::try_from(slot).unwrap_or(0)));
                }
            }
        }
    }

    /// Frees the block at an address of a region of this heap. False if there is none.
    #[inline]
    pub(super) fn put(&mut self, ground: &Ground, region: u32, address: u64) -> bool {
        let tag = match self.region(region) {
            Some(region) => region.tag(address),
            None => Tag::None,
        };
        match tag {
            Tag::Slab(number) => self.put_small(ground, number, address),
            Tag::Range(range) => self.put_large(ground, range, address),
            Tag::None => false,
        }
    }

    #[inline]
    fn put_small(&mut self, ground: &Ground, number: u32, address: u64) -> bool {
        let Some(Some(slab)) = self.slabs.get_mut(number as usize) else { return false };
        if !slab.put(address) {
            return false;
        }
        self.blocks -= 1;
        self.bytes -= u64::from(slab.block());
        if slab.has_one_free() {
            self.link(number);
        } else if slab.is_empty() && !slab.is_alone() {
            // The only one of its class with free blocks stays.
            self.free_slab(ground, number);
        }
        true
    }

    fn free_slab(&mut self, ground: &Ground, number: u32) {
        self.unlink(number);
        let Some(slab) = self.slabs.get_mut(number as usize).and_then(Option::take) else { return };
        self.spare_slabs.push(number);
        let region = self.ranges.get(slab.range).region;
        if let Some(region) = self.region_mut(region) {
            region.set_tags(slab.base, slab_bytes(slab.block()), Tag::None);
        }
        self.free_range(ground, slab.range);
    }

    fn put_large(&mut self, ground: &Ground, range: u32, address: u64) -> bool {
        let found = self.ranges.get(range).clone();
        let Some(region) = self.region_mut(found.region) else { return false };
        if region.base + u64::from(found.at) * ground.unit != address {
            return false;
        }
        region.set_tags(address, 0, Tag::None);
        self.blocks -= 1;
        self.bytes -= u64::from(found.size) * ground.unit;
        self.free_range(ground, range);
        true
    }

    fn free_range(&mut self, ground: &Ground, range: u32) {
        let found = self.ranges.get(range).clone();
        if let Some(region) = self.region(found.region) {
            let slots = region.slots_of(u64::from(found.at) * ground.unit, u64::from(found.size) * ground.unit);
            self.leave(ground, found.region, slots);
        }
        let free = self.ranges.put(range);
        if ground.is_span() {
            if ground.empty.load(Relaxed) > ground.keep {
                // More than it must be, so that not every block that is freed unmaps one.
                self.give_back(ground, ground.keep / 4 * 3);
            }
        } else if self.ranges.is_whole_region(free) && self.regions.iter().flatten().count() > 1 {
            self.give_up_region(ground, free);
        }
    }

    /// Unmaps slots that hold nothing, until the allocator has no more than `keep` bytes of them or this heap has none.
    /// Returns how much.
    pub(super) fn give_back(&mut self, ground: &Ground, keep: u64) -> u64 {
        self.unmap_empties(ground, keep, |chunk| ground.pool.put(chunk))
    }

    pub(super) fn unmap_empties(&mut self, ground: &Ground, keep: u64, put: impl Fn(Chunk)) -> u64 {
        if self.empties.is_empty() || ground.empty.load(Relaxed) <= keep {
            return 0;
        }
        if let Err(error) = ground.quiet() {
            tracing::debug!(%error, "memory that holds nothing stays mapped");
            return 0;
        }
        let mut unmapped = 0;
        // Each is looked at once: those that the driver keeps are put behind.
        for _ in 0..self.empties.len() {
            if ground.empty.load(Relaxed) <= keep {
                break;
            }
            let Some((region, slot)) = self.empties.pop_front() else { break };
            // SAFETY: `quiet` made sure of the device.
            match unsafe { self.unmap_empty(ground, region, slot) } {
                Ok(Some(chunk)) => {
                    unmapped += ground.slot;
                    put(chunk);
                }
                Ok(None) => {}
                Err(error) => tracing::debug!(%error, "memory that holds nothing stays mapped"),
            }
        }
        if unmapped > 0 {
            self.give_up_regions(ground);
        }
        unmapped
    }

    /// Frees slabs without a block and regions without memory.
    pub(super) fn tidy(&mut self, ground: &Ground) {
        for class in 0..self.partial.len() {
            let mut number = self.partial[class];
            while let Some(slab) = self.slab_mut(number) {
                let (next, empty) = (slab.next, slab.is_empty());
                if empty {
                    self.free_slab(ground, number);
                }
                number = next;
            }
        }
    }

    /// Lets others have regions of which nothing is used or mapped.
    fn give_up_regions(&mut self, ground: &Ground) {
        // All free ranges are looked at, of which there may be many more than regions.
        if self.regions.iter().flatten().all(|region| region.committed() > 0) {
            return;
        }
        for range in self.ranges.whole_regions() {
            self.give_up_region(ground, range);
        }
    }

    /// How much memory it has, in bytes.
    pub(super) fn committed(&self) -> u64 {
        self.regions.iter().flatten().map(|region| region.committed()).sum()
    }

    pub(super) fn into_regions(self) -> impl Iterator<Item = Region> {
        self.regions.into_iter().flatten().map(|region| *region)
    }

    /// Puts a slab at the front of its class's list.
    fn link(&mut self, number: u32) {
        let Some(class) = self.slab_mut(number).map(|slab| usize::from(slab.class)) else { return };
        let head = self.partial[class];
        if let Some(slab) = self.slab_mut(number) {
            (slab.prev, slab.next) = (NONE, head);
        }
        if let Some(slab) = self.slab_mut(head) {
            slab.prev = number;
        }
        self.partial[class] = number;
    }

    fn unlink(&mut self, number: u32) {
        let Some(slab) = self.slab_mut(number) else { return };
        let (class, prev, next) = (usize::from(slab.class), slab.prev, slab.next);
        (slab.prev, slab.next) = (NONE, NONE);
        if let Some(slab) = self.slab_mut(next) {
            slab.prev = prev;
        }
        if let Some(slab) = self.slab_mut(prev) {
            slab.next = next;
        } else if self.partial[class] == number {
            self.partial[class] = next;
        }
    }
}
