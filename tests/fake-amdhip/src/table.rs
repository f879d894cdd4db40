//! What is where: handles, reserved spans, mappings in them, and the blocks of `hipMalloc`.

use std::collections::BTreeMap;
use std::fs::File;
use std::time::Instant;

use crate::memory::{Memory, NOTHING_AT, Store};
use crate::pinned::Pin;

/// A handle to physical memory.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) store: Store,
    /// References that the caller has: it released the handle when there are none.
    pub(crate) held: u32,
    /// References of failed maps that said nothing. A further release of the caller's ends one.
    pub(crate) leaked: u32,
    /// References of mappings.
    pub(crate) maps: u32,
}

/// Reserved addresses.
#[derive(Debug)]
pub(crate) struct Span {
    pub(crate) size: usize,
    /// The device that was current; for the figures only.
    pub(crate) device: usize,
    /// The runtime has forgotten it, without knowing.
    pub(crate) erased: bool,
    /// It cannot be freed: a handle was released while it was mapped there.
    pub(crate) stuck: bool,
}

/// A handle's memory at addresses.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) size: usize,
    pub(crate) handle: u64,
    /// By device: 0 none, 1 read, 3 read and write.
    pub(crate) access: Vec<u32>,
    /// It reads zeros and loses writes for good.
    pub(crate) corrupt: bool,
    /// Until then it reads zeros and loses writes.
    pub(crate) blind_until: Option<Instant>,
}

impl Mapping {
    fn is_lost(&self) -> bool {
        self.corrupt || self.blind_until.is_some_and(|until| Instant::now() < until)
    }
}

/// Memory of `hipMalloc`.
#[derive(Debug)]
pub(crate) struct Block {
    /// As asked for.
    pub(crate) size: usize,
    pub(crate) store: Store,
}

/// A part of device memory in a file.
#[derive(Debug)]
pub(crate) struct Piece<'a> {
    pub(crate) file: &'a File,
    pub(crate) offset: u64,
    pub(crate) len: usize,
    /// Writes do not arrive. What is read here is right: zeros.
    pub(crate) lost: bool,
}

/// Why addresses cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Nothing is mapped at this address.
    Hole(usize),
    /// The device may not, at this address.
    NoAccess(usize),
    /// More than one mapping.
    Crosses,
}

/// Who wants to reach device memory, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reach {
    pub(crate) device: usize,
    pub(crate) write: bool,
    /// Blocks of other devices are within reach, as they are for copies.
    pub(crate) foreign_blocks: bool,
    /// More than one mapping is too many.
    pub(crate) one_mapping: bool,
}

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) handles: BTreeMap<u64, Handle>,
    pub(crate) spans: BTreeMap<usize, Span>,
    pub(crate) mappings: BTreeMap<usize, Mapping>,
    pub(crate) blocks: BTreeMap<usize, Block>,
    /// Page-locked memory of the host.
    pub(crate) pins: BTreeMap<usize, Pin>,
    /// How often page-locking was begun again.
    pub(crate) pin_retries: u64,
}

impl Table {
    /// The span that the address lies in, with its start.
    pub(crate) fn span_of(&self, addr: usize) -> Option<(usize, &Span)> {
        let (start, span) = self.spans.range(..=addr).next_back()?;
        (addr - start < span.size).then_some((*start, span))
    }

    /// The mapping that the address lies in, with its start.
    pub(crate) fn mapping_of(&self, addr: usize) -> Option<(usize, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=addr).next_back()?;
        (addr - start < mapping.size).then_some((*start, mapping))
    }

    /// The block that the address lies in, with its start.
    pub(crate) fn block_of(&self, addr: usize) -> Option<(usize, &Block)> {
        let (start, block) = self.blocks.range(..=addr).next_back()?;
        (addr - start < block.size).then_some((*start, block))
    }

    /// Whether any mapping reaches into the range.
    pub(crate) fn is_mapped_anywhere(&self, addr: usize, size: usize) -> bool {
        self.mapping_of(addr).is_some() || self.mappings.range(addr..addr + size).next().is_some()
    }

    /// Whether the range reaches into device addresses.
    pub(crate) fn is_device_address(&self, addr: usize, len: usize) -> bool {
        let end = addr.saturating_add(len);
        self.span_of(addr).is_some()
            || self.block_of(addr).is_some()
            || self.spans.range(addr..end).next().is_some()
            || self.blocks.range(addr..end).next().is_some()
    }

    /// The starts of the mappings that the range consists of, if it consists of whole mappings of one span without a gap.
    pub(crate) fn run(&self, addr: usize, size: usize) -> Option<Vec<usize>> {
        let end = addr.checked_add(size)?;
        let (span_start, span) = self.span_of(addr)?;
        if end > span_start + span.size {
            return None;
        }
        let mut starts = Vec::new();
        let mut at = addr;
        while at < end {
            starts.push(at);
            at += self.mappings.get(&at)?.size;
        }
        (at == end && !starts.is_empty()).then_some(starts)
    }

    /// Whether the sizes of the span's mappings, added up from its first one on without a gap, are `size` at some point.
    pub(crate) fn has_prefix(&self, addr: usize, size: usize) -> bool {
        let Some((start, span)) = self.span_of(addr) else { return false };
        let mut sum = 0;
        let mut next = None;
        for (at, mapping) in self.mappings.range(start..start + span.size) {
            if next.is_some_and(|next| next != *at) {
                return false;
            }
            next = Some(at + mapping.size);
            sum += mapping.size;
            if sum >= size {
                return sum == size;
            }
        }
        false
    }

    /// The parts of files that the range is, if the device may use all of it.
    ///
    /// # Errors
    /// The first trouble on the way.
    pub(crate) fn pieces<'a>(
        &'a self,
        memory: &'a Memory,
        addr: usize,
        len: usize,
        reach: Reach,
    ) -> Result<Vec<Piece<'a>>, Trouble> {
        if let Some((start, block)) = self.block_of(addr) {
            if block.store.device != reach.device && !reach.foreign_blocks {
                return Err(Trouble::NoAccess(addr));
            }
            if len > start + block.size - addr {
                return Err(Trouble::Hole(start + block.size));
            }
            let offset = block.store.offset + (addr - start) as u64;
            return Ok(vec![Piece { file: memory.file(&block.store), offset, len, lost: false }]);
        }
        let wanted = if reach.write { 3 } else { 1 };
        let mut pieces = Vec::new();
        let (mut at, mut left) = (addr, len);
        while left > 0 {
            let (start, mapping) = self.mapping_of(at).ok_or(Trouble::Hole(at))?;
            let handle = self.handles.get(&mapping.handle).ok_or(Trouble::Hole(at))?;
            if mapping.access[reach.device] & wanted != wanted {
                return Err(Trouble::NoAccess(at));
            }
            let len = left.min(start + mapping.size - at);
            let lost = mapping.is_lost();
            let (file, offset) = if lost {
                (memory.zeros(reach.device), NOTHING_AT)
            } else {
                (memory.file(&handle.store), handle.store.offset + (at - start) as u64)
            };
            pieces.push(Piece { file, offset, len, lost });
            at += len;
            left -= len;
        }
        if reach.one_mapping && pieces.len() > 1 {
            return Err(Trouble::Crosses);
        }
        Ok(pieces)
    }

    /// Which device the memory at an address lies on.
    pub(crate) fn device_of(&self, addr: usize) -> Option<usize> {
        if let Some((_, block)) = self.block_of(addr) {
            return Some(block.store.device);
        }
        let (_, mapping) = self.mapping_of(addr)?;
        self.handles.get(&mapping.handle).map(|handle| handle.store.device)
    }
}
