//! One part of an allocator's addresses, in which one heap places blocks.

use core::fmt;
use core::ops::RangeInclusive;

use super::classes::PAGE;
use super::ranges::Cost;
use crate::backing::Backing;
use crate::error::Result;
use crate::pool::Chunk;
use crate::slots::SlotRange;

/// Addresses of one heap, with what tells which block is where.
///
/// ```text
/// base   page 0   page 1   page 2   page 3  ..         16 KiB each
///  | slab 0 .......... |   range 7 ........ | free     what the pages say: slab 0, slab 0, range 7 (it begins here), none
/// ```
/// A slab covers whole pages. A range is no smaller than a page, so at most one begins in any.
pub(super) struct Region {
    pub(super) number: u32,
    pub(super) base: u64,
    under: Under,
    /// For each page: 0, or a slab's number with the top bit set, or a range's number and one.
    pages: Vec<u32>,
    /// For each slot: how many ranges in use touch it.
    touched: Vec<u32>,
    /// For each slot: whether its heap has it on the list of those that held nothing.
    listed: Vec<bool>,
    slot_log: u32,
}

enum Under {
    Slots(SlotRange),
    Block(Box<dyn Backing>),
}

/// What begins at a page, or covers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    None,
    Slab(u32),
    Range(u32),
}

const SLAB: u32 = 1 << 31;

impl Tag {
    fn from_bits(bits: u32) -> Self {
        match bits {
            0 => Self::None,
            bits if bits & SLAB != 0 => Self::Slab(bits & !SLAB),
            bits => Self::Range(bits - 1),
        }
    }

    fn to_bits(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Slab(number) => number | SLAB,
            Self::Range(number) => number + 1,
        }
    }
}

impl Region {
    pub(super) fn of_slots(number: u32, slots: SlotRange, bytes: u64, slot: u64) -> Self {
        Self::new(number, slots.base(), Under::Slots(slots), bytes, slot)
    }

    pub(super) fn of_block(number: u32, block: Box<dyn Backing>, bytes: u64) -> Self {
        // One slot that is always there.
        Self::new(number, block.base(), Under::Block(block), bytes, bytes)
    }

    fn new(number: u32, base: u64, under: Under, bytes: u64, slot: u64) -> Self {
        let count = |unit: u64| usize::try_from(bytes / unit).unwrap_or(0);
        let (pages, touched, listed) = (vec![0; count(PAGE as u64)], vec![0; count(slot)], vec![false; count(slot)]);
        Self { number, base, under, pages, touched, listed, slot_log: slot.trailing_zeros() }
    }

    #[inline]
    fn page(&self, address: u64) -> usize {
        ((address - self.base) / PAGE as u64) as usize
    }

    /// What is at an address.
    #[inline]
    pub(super) fn tag(&self, address: u64) -> Tag {
        self.pages.get(self.page(address)).map_or(Tag::None, |bits| Tag::from_bits(*bits))
    }

    /// Says what is at the pages from `address` on.
    pub(super) fn set_tags(&mut self, address: u64, bytes: u64, tag: Tag) {
        let first = self.page(address);
        let last = first + (bytes / PAGE as u64).max(1) as usize;
        if let Some(pages) = self.pages.get_mut(first..last) {
            pages.fill(tag.to_bits());
        }
    }

    /// The slots that `bytes` (not zero) from an offset touch.
    pub(super) fn slots_of(&self, offset: u64, bytes: u64) -> RangeInclusive<usize> {
        (offset >> self.slot_log) as usize..=((offset + bytes - 1) >> self.slot_log) as usize
    }

    pub(super) fn is_mapped(&self, slot: usize) -> bool {
        match &self.under {
            Under::Slots(slots) => slots.is_mapped(slot),
            Under::Block(_) => true,
        }
    }

    /// How many of the slots that `bytes` from an offset touch have no memory.
    pub(super) fn missing(&self, offset: u64, bytes: u64) -> u32 {
        match &self.under {
            Under::Slots(slots) => slots.missing(self.slots_of(offset, bytes)),
            Under::Block(_) => 0,
        }
    }

    /// What `bytes` of a free range at an offset would cost: none but its first slot and its last can be in use already.
    pub(super) fn cost(&self, offset: u64, bytes: u64) -> Cost {
        /// Of so many slots it is looked whether they have memory.
        const LOOK: usize = 32;
        let slots = self.slots_of(offset, bytes);
        let (first, last) = (*slots.start(), *slots.end());
        let touched = |slot: usize| self.touched.get(slot).is_some_and(|touched| *touched > 0);
        let shared = usize::from(touched(first)) + usize::from(first < last && touched(last));
        let missing = match &self.under {
            Under::Slots(slots) => slots.missing(first..=last.min(first + LOOK)),
            Under::Block(_) => return (0, 0),
        };
        (u32::try_from(last - first + 1 - shared).unwrap_or(u32::MAX), missing)
    }

    /// How much has memory, in bytes.
    pub(super) fn committed(&self) -> u64 {
        match &self.under {
            Under::Slots(slots) => (slots.mapped() as u64) << self.slot_log,
            Under::Block(block) => block.committed(),
        }
    }

    pub(super) fn slots_mut(&mut self) -> Option<&mut SlotRange> {
        match &mut self.under {
            Under::Slots(slots) => Some(slots),
            Under::Block(_) => None,
        }
    }

    /// Whether a slot has memory that holds nothing.
    pub(super) fn is_empty_slot(&self, slot: usize) -> bool {
        self.touched.get(slot) == Some(&0) && self.is_mapped(slot)
    }

    /// One more range touches the slot. True if it is the first.
    pub(super) fn touch(&mut self, slot: usize) -> bool {
        self.touched[slot] += 1;
        self.touched[slot] == 1
    }

    /// One less range touches the slot. True if none does any more.
    pub(super) fn leave(&mut self, slot: usize) -> bool {
        self.touched[slot] -= 1;
        self.touched[slot] == 0
    }

    /// Notes that the slot is on its heap's list. False if it was already.
    pub(super) fn list(&mut self, slot: usize) -> bool {
        !core::mem::replace(&mut self.listed[slot], true)
    }

    /// Notes that the slot is not on its heap's list any more.
    pub(super) fn unlist(&mut self, slot: usize) {
        self.listed[slot] = false;
    }

    pub(super) fn into_slots(self) -> Option<SlotRange> {
        match self.under {
            Under::Slots(slots) => Some(slots),
            Under::Block(_) => None,
        }
    }

    /// Gives a block of its own back.
    pub(super) fn close(mut self) {
        if let Under::Block(block) = &mut self.under
            && let Err(error) = block.close()
        {
            tracing::warn!(%error, "a block of an allocator did not come back");
        }
    }

    /// Gives all memory back. `idle` says that no work on the device touches it; without that it goes when the device
    /// can next be waited for.
    pub(super) fn tear_down(self, idle: bool, put: impl Fn(Chunk) + Send + 'static) -> Result<()> {
        match self.under {
            Under::Slots(slots) if slots.mapped() > 0 && !idle => {
                slots.orphan(put);
                Ok(())
            }
            Under::Slots(mut slots) => slots.tear_down(true, put),
            Under::Block(mut block) => block.close(),
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("number", &self.number)
            .field("base", &format_args!("{:#x}", self.base))
            .finish_non_exhaustive()
    }
}
