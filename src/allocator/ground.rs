//! What all heaps of one allocator share: the span they lie in, and who owns which part of it.

use core::fmt;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use super::classes::{Classes, PAGE};
use super::region::Region;
use crate::backing::{Fallback, Mode};
use crate::bytes::Bytes;
use crate::card::Card;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pinned::LockedHost;
use crate::pool::ChunkPool;
use crate::slots::{SlotRange, SlotSpan};
use crate::verdict::BackingRequest;

/// The most regions there can be without a span: each is an allocation of its own.
const MOST_BLOCKS: usize = 1 << 16;
/// What a region of its own allocation is aligned to.
const BLOCK_ALIGN: u64 = 64 << 10;
/// The smallest slot, so that a slab fits in one.
pub(super) const LEAST_SLOT: u64 = 64 << 10;
/// The smallest shared span that is tried.
const LEAST_SPAN: u64 = 64 << 20;

/// The shared part of an allocator's heaps.
pub(super) struct Ground {
    pub(super) device: Device,
    pub(super) pool: ChunkPool,
    pub(super) classes: Classes,
    /// In what ranges are counted, in bytes.
    pub(super) unit: u64,
    /// The chunk under small blocks, in bytes.
    pub(super) slot: u64,
    /// How much a heap takes of the span at a time, in bytes, a power of two.
    pub(super) region: u64,
    /// The largest alignment of blocks in it.
    pub(super) max_align: u64,
    /// How much memory that holds nothing stays mapped, in bytes.
    pub(super) keep: u64,
    /// How much there is of it.
    pub(super) empty: AtomicU64,
    /// What makes the memory page-locked, if it is.
    pub(super) locked: Option<Arc<LockedHost>>,
    place: Place,
    owners: Box<[AtomicU8]>,
}

/// Where regions lie.
enum Place {
    /// Side by side in one span.
    Span {
        span: Arc<SlotSpan>,
        base: u64,
        bytes: u64,
        shift: u32,
        /// Those that a heap has given up.
        spare: Mutex<Vec<SlotRange>>,
    },
    /// Anywhere, each an allocation: by address, its end and number.
    Blocks { by_address: RwLock<BTreeMap<u64, (u64, u32)>>, spare: Mutex<(u32, Vec<u32>)> },
}

/// What a ground is made of.
pub(super) struct Plan {
    pub(super) pool: ChunkPool,
    /// The smallest block, and the alignment that all have, in bytes, a power of two of at most a page.
    pub(super) min_align: usize,
    /// Blocks of this size and more do not come here, in bytes.
    pub(super) threshold: u64,
    /// The chunk size, in bytes; the granularity if none.
    pub(super) slot: Option<Bytes>,
    /// The size of the span, in bytes.
    pub(super) span: u64,
    pub(super) keep: u64,
    /// The driver under `device`, if it is that of page-locked memory.
    pub(super) locked: Option<Arc<LockedHost>>,
}

impl Ground {
    pub(super) fn new(device: &Device, plan: Plan) -> Result<Self> {
        let verdict = device.verdict();
        let granularity = verdict.granularity().get();
        let quirk = verdict.quirks().max_chunk.get();
        let slot = match plan.slot.map(Bytes::get) {
            None => LEAST_SLOT.max(granularity).next_multiple_of(granularity),
            Some(slot) if slot >= LEAST_SLOT && slot % granularity == 0 && slot <= quirk && slot.is_power_of_two() => {
                slot
            }
            Some(slot) => {
                let (asked, max) = (Bytes::new(slot), Bytes::new(quirk));
                return Err(Error::ChunkSize { asked, granularity: Bytes::new(granularity.max(LEAST_SLOT)), max });
            }
        };
        let slot = slot.next_power_of_two();
        let overflow = || Error::Overflow { what: "a shared span", count: plan.threshold, size: 4 };
        // Room for several of the largest blocks, so that little is lost at the end.
        let region = plan.threshold.checked_mul(4).and_then(u64::checked_next_power_of_two).ok_or_else(overflow)?;
        let classes = Classes::new(plan.min_align);
        let unit = (plan.min_align as u64).max(256);
        let this = |region: u64, max_align: u64, place: Place, owners: usize| Self {
            device: device.clone(),
            pool: plan.pool.clone(),
            classes: classes.clone(),
            unit,
            slot,
            region,
            max_align,
            keep: plan.keep,
            empty: AtomicU64::new(0),
            locked: plan.locked.clone(),
            place,
            owners: (0..owners).map(|_| AtomicU8::new(u8::MAX)).collect(),
        };
        if verdict.mode() == Mode::Contiguous {
            let region = region.max(LEAST_SPAN / 8);
            let place = Place::Blocks { by_address: RwLock::default(), spare: Mutex::default() };
            return Ok(this(region, BLOCK_ALIGN, place, MOST_BLOCKS));
        }
        let region = region.max(32 * slot).max(LEAST_SPAN);
        let align = granularity.max(PAGE as u64).next_power_of_two();
        // In 32 bits of units, and whole regions.
        let most = (u64::from(u32::MAX) * unit).min(plan.span);
        let mut bytes = most.max(region).checked_next_multiple_of(region).ok_or_else(overflow)?;
        let span = loop {
            match SlotSpan::reserve(device.card(), bytes, slot, align) {
                Ok(span) => break span,
                Err(Error::Reserve { .. }) if bytes > region => bytes = (bytes / 2).next_multiple_of(region),
                Err(error) => return Err(error),
            }
        };
        let (base, shift) = (span.base(), region.trailing_zeros());
        let owners = usize::try_from(bytes / region).unwrap_or(0);
        Ok(this(region, align, Place::Span { span, base, bytes, shift, spare: Mutex::default() }, owners))
    }

    pub(super) fn card(&self) -> &Arc<Card> {
        self.device.card()
    }

    /// The number of the region that an address lies in, and the heap that owns it; none if it is in no region.
    #[inline]
    pub(super) fn find(&self, address: u64) -> Option<(u32, usize)> {
        let number = match &self.place {
            Place::Span { base, bytes, shift, .. } => {
                let offset = address.wrapping_sub(*base);
                if offset >= *bytes {
                    return None;
                }
                (offset >> shift) as u32
            }
            Place::Blocks { by_address, .. } => {
                let by_address = by_address.read();
                let (_, (end, number)) = by_address.range(..=address).next_back()?;
                Some(*number).filter(|_| address < *end)?
            }
        };
        let owner = self.owners.get(number as usize)?.load(Relaxed);
        Some((number, usize::from(owner)))
    }

    /// A region for a heap.
    ///
    /// # Errors
    /// When the span is used up; without a span, when there is no memory for a block.
    pub(super) fn take_region(&self, owner: u8) -> Result<Region> {
        let full = || Error::Blocked { asked: Bytes::new(self.region), usable: Bytes::ZERO };
        let region = match &self.place {
            Place::Span { span, base, shift, spare, .. } => {
                let spare = spare.lock().pop();
                let slots = usize::try_from(self.region / self.slot).unwrap_or(0);
                let range = spare.or_else(|| span.carve(slots)).ok_or_else(full)?;
                let number = ((range.base() - base) >> shift) as u32;
                Region::of_slots(number, range, self.region, self.slot)
            }
            Place::Blocks { by_address, spare } => {
                self.card().check_capture(None)?;
                let mut request = BackingRequest::new(&self.pool, Bytes::new(self.region), Bytes::new(BLOCK_ALIGN));
                request.fallback = Fallback::Upfront;
                let backing = self.device.verdict().open(&request)?;
                let number = {
                    let mut spare = spare.lock();
                    let next = spare.0;
                    match spare.1.pop() {
                        Some(number) => number,
                        None if (next as usize) < MOST_BLOCKS => {
                            spare.0 += 1;
                            next
                        }
                        None => return Err(full()),
                    }
                };
                let base = backing.base();
                by_address.write().insert(base, (base + self.region, number));
                Region::of_block(number, backing, self.region)
            }
        };
        if let Some(slot) = self.owners.get(region.number as usize) {
            slot.store(owner, Relaxed);
        }
        Ok(region)
    }

    /// Takes back a region in which nothing is used and nothing is mapped, or that is an allocation of its own, which is
    /// freed.
    pub(super) fn put_region(&self, region: Region) {
        let number = region.number;
        match &self.place {
            Place::Span { spare, .. } => {
                if let Some(range) = region.into_slots() {
                    spare.lock().push(range);
                }
            }
            Place::Blocks { by_address, spare } => {
                by_address.write().remove(&region.base);
                region.close();
                spare.lock().1.push(number);
            }
        }
    }

    /// Whether all regions lie in one span.
    pub(super) fn is_span(&self) -> bool {
        matches!(self.place, Place::Span { .. })
    }

    /// How many addresses are reserved for it, in bytes.
    pub(super) fn reserved(&self) -> u64 {
        match &self.place {
            Place::Span { span, .. } => span.bytes(),
            Place::Blocks { by_address, .. } => by_address.read().len() as u64 * self.region,
        }
    }

    /// Makes sure that memory which holds nothing can be unmapped: waits for the device, where anything can run there.
    ///
    /// # Errors
    /// [`Error::Capturing`]; what the driver says.
    pub(super) fn quiet(&self) -> Result<()> {
        if !self.device.info().queues || self.card().gate().lost().is_some() {
            return Ok(());
        }
        self.card().check_capture(None)?;
        self.card().synchronize()
    }
}

impl fmt::Debug for Ground {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ground")
            .field("device", &self.device.info().id())
            .field("slot", &Bytes::new(self.slot))
            .field("region", &Bytes::new(self.region))
            .field("reserved", &Bytes::new(self.reserved()))
            .finish_non_exhaustive()
    }
}
