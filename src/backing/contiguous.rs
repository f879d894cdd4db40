//! One contiguous block: the fallback where virtual memory does not work.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{AheadPolicy, Backing, Growth, Mode, Reach, Retiring, Shrunk};
use crate::bytes::Bytes;
use crate::card::{Card, Orphan, check_address, is_gone, not_idle, twice};
use crate::driver::{Call, DriverError, DriverErrorKind};
use crate::error::{Error, Result};
use crate::pool::Sizing;
use crate::quiesce::Event;
use crate::range::MappedChunk;

/// Blocks are multiples of a page, as drivers count them.
const PAGE: u64 = 4096;
/// What every driver aligns blocks to.
const DRIVER_ALIGN: u64 = 256;

/// What a buffer does where virtual memory is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallback {
    /// Allocate the whole maximum once. Growing is bookkeeping, the address never moves. A maximum larger than the
    /// device's memory cannot be had that way: give such a buffer another policy.
    #[default]
    Upfront,
    /// Allocate this many bytes once (no more than the maximum). Growing within it is bookkeeping, beyond it a clear
    /// error. The address never moves.
    Capacity(Bytes),
    /// Allocate as needed: growing beyond the block makes a larger one and copies; both are there meanwhile, in a
    /// [`BufferSet`](crate::BufferSet) those of all members. The address changes, and
    /// [`moves`](crate::GrowableBuffer::moves) says how often it did.
    MayMove,
    /// Do not build the buffer.
    Refuse,
}

/// A driver's block, and the aligned part of it that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    address: u64,
    bytes: u64,
    /// What the driver handed out, which is larger for elements with large alignments.
    raw: (u64, u64),
}

/// One block, allocated once or moved when it is too small. Nothing goes back to the driver before it is closed.
#[derive(Debug)]
pub struct FallbackContiguous {
    card: Arc<Card>,
    /// None while a block that may move is empty.
    block: Option<Block>,
    reserved: u64,
    align: u64,
    may_move: bool,
    moves: u64,
}

impl FallbackContiguous {
    /// A backing of at most `bytes`, its block aligned to `align`.
    pub(crate) fn open(card: &Arc<Card>, bytes: u64, align: u64, fallback: Fallback) -> Result<Self> {
        let pages = |bytes: u64| {
            let overflow = Error::Overflow { what: "a block", count: bytes, size: 1 };
            bytes.checked_next_multiple_of(PAGE).ok_or(overflow)
        };
        let most = pages(bytes)?;
        let upfront = match fallback {
            Fallback::Capacity(capacity) => Some(pages(capacity.get())?.min(most)),
            Fallback::MayMove => None,
            _ => Some(most),
        };
        let mut this = Self {
            card: Arc::clone(card),
            block: None,
            reserved: upfront.unwrap_or(most),
            align,
            may_move: upfront.is_none(),
            moves: 0,
        };
        if let Some(bytes) = upfront.filter(|bytes| *bytes > 0) {
            this.block = Some(this.allocate(bytes)?);
        }
        Ok(this)
    }

    fn stays(&self) -> Shrunk {
        Shrunk {
            released: Bytes::ZERO,
            retiring: Bytes::ZERO,
            committed: Bytes::new(self.committed()),
            waited: None,
            why: Some("contiguous mode: nothing goes back to the driver before the buffer is closed".to_owned()),
        }
    }

    fn allocate(&self, bytes: u64) -> Result<Block> {
        let slack = if self.align > DRIVER_ALIGN { self.align.next_multiple_of(PAGE) } else { 0 };
        let overflow = Error::Overflow { what: "a block", count: bytes, size: 1 };
        let all = bytes.checked_add(slack).ok_or(overflow)?;
        let gate = self.card.gate();
        let raw = self.card.with_room(|| gate.allocate(all).map_err(|error| self.card.explain(all, error)))?;
        let accounts = self.card.accounts();
        accounts.contiguous.add(all);
        accounts.mark_peak();
        let least = if slack > 0 { 1 } else { self.align };
        match check_address(raw, all, least) {
            Ok(raw) => Ok(Block { address: raw.next_multiple_of(self.align.max(1)), bytes, raw: (raw, all) }),
            Err(why) => {
                if raw == 0 {
                    accounts.contiguous.sub(all);
                } else {
                    let _ = self.free(Block { address: raw, bytes, raw: (raw, all) });
                }
                Err(DriverError::new(Call::Allocate, DriverErrorKind::Other).with_detail(why.to_string()).into())
            }
        }
    }

    /// A larger block: half as much again, so that growing step by step copies each byte a constant number of times;
    /// just what is needed where there is no room for that.
    fn allocate_more(&self, bytes: u64) -> Result<Block> {
        let from = self.committed();
        let needed = bytes.next_multiple_of(PAGE).min(self.reserved);
        let wanted = needed.max(from.saturating_add(from / 2).next_multiple_of(PAGE)).min(self.reserved);
        match self.allocate(wanted) {
            Err(Error::OutOfMemory(_)) if needed < wanted => self.allocate(needed),
            result => result,
        }
    }

    fn free(&self, block: Block) -> Result<()> {
        free(&self.card, block)
    }
}

/// Frees a block that nothing uses any more; one that the driver keeps is stranded.
fn free(card: &Card, block: Block) -> Result<()> {
    let (address, bytes) = block.raw;
    let accounts = card.accounts();
    // SAFETY: the callers hand over a block that came from `allocate` with this size, that nothing uses any more, and
    // forget it.
    match twice(|| unsafe { card.gate().free(address, bytes) }) {
        Err(source) if !is_gone(&source) => {
            accounts.contiguous.move_to(&accounts.stranded, bytes);
            Err(Error::NotReturned { bytes: Bytes::new(bytes), source })
        }
        _ => {
            accounts.contiguous.sub(bytes);
            Ok(())
        }
    }
}

/// A block whose buffer is gone, which could not be freed for want of an idle device.
#[derive(Debug)]
struct Left {
    card: Arc<Card>,
    block: Block,
}

impl Orphan for Left {
    fn bury(&mut self) -> u64 {
        let bytes = self.block.raw.1;
        let accounts = self.card.accounts();
        accounts.retiring.move_to(&accounts.contiguous, bytes);
        if let Err(error) = free(&self.card, self.block) {
            tracing::warn!(device = %self.card.id(), %error, "the block of a dropped buffer did not come back");
        }
        bytes
    }
}

impl Backing for FallbackContiguous {
    fn mode(&self) -> Mode {
        Mode::Contiguous
    }

    fn base(&self) -> u64 {
        self.block.map_or(0, |block| block.address)
    }

    fn committed(&self) -> u64 {
        self.block.map_or(0, |block| block.bytes)
    }

    fn reserved(&self) -> u64 {
        self.reserved
    }

    fn moves(&self) -> u64 {
        self.moves
    }

    fn sizing(&self) -> Option<Sizing> {
        None
    }

    fn ahead(&self) -> u64 {
        0
    }

    fn retiring(&self) -> Retiring {
        Retiring::default()
    }

    fn chunks(&self) -> Vec<MappedChunk> {
        Vec::new()
    }

    fn grow(&mut self, bytes: u64) -> Result<Growth> {
        let from = self.committed();
        if bytes <= from {
            return Ok(Growth::nothing(from));
        }
        if !self.may_move || bytes > self.reserved {
            return Err(Error::FallbackFull { asked: Bytes::new(bytes), capacity: Bytes::new(self.reserved) });
        }
        self.card.check_capture(None)?;
        let new = self.allocate_more(bytes)?;
        if let Some(old) = self.block {
            let gate = self.card.gate();
            // SAFETY: both blocks are ours and do not overlap, the new one is larger. Work on the old one is waited for
            // first; without a stream the copy is over when this returns.
            let copied = gate
                .synchronize()
                .and_then(|()| unsafe { gate.copy_within(new.address, old.address, old.bytes, None) });
            if let Err(error) = copied {
                let _ = self.free(new);
                return Err(error.into());
            }
            self.moves += 1;
        }
        let old_block = self.block.replace(new);
        Ok(Growth { fresh: vec![true], old_block, ..Growth::nothing(from) })
    }

    fn settle(&mut self, growth: Growth) {
        let freed = growth.old_block.map_or(Ok(()), |block| self.free(block));
        if let Err(error) = freed {
            tracing::warn!(device = %self.card.id(), %error, "a block that was left could not be freed");
        }
    }

    fn undo(&mut self, growth: Growth) -> Result<()> {
        if growth.is_nothing() {
            return Ok(());
        }
        if growth.old_block.is_some() {
            self.moves -= 1;
        }
        let new = core::mem::replace(&mut self.block, growth.old_block);
        new.map_or(Ok(()), |block| self.free(block))
    }

    fn would_release(&self, _: u64) -> u64 {
        0
    }

    unsafe fn shrink(&mut self, _: u64) -> Result<Shrunk> {
        Ok(self.stays())
    }

    fn shrink_later(&mut self, _: u64, _: &Event) -> Result<Shrunk> {
        Ok(self.stays())
    }

    unsafe fn shrink_exact(&mut self, _: u64) -> Result<Shrunk> {
        Ok(self.stays())
    }

    fn grow_ahead(&mut self, _: AheadPolicy, _: u64) -> Result<()> {
        Ok(())
    }

    fn take_ahead(&mut self, _: u64) -> Option<Reach> {
        None
    }

    fn look_ahead(&mut self, _: u64) -> u64 {
        self.committed()
    }

    fn flush_ahead(&mut self) -> Result<Bytes> {
        Ok(Bytes::ZERO)
    }

    fn leave_to_itself(&mut self) {}

    fn export(&mut self, chunk: usize) -> Result<OwnedFd> {
        Err(Error::OutOfBounds { what: "exporting", start: chunk, count: 1, len: 0 })
    }

    fn close(&mut self) -> Result<()> {
        let Some(block) = self.block.take() else { return Ok(()) };
        if self.card.quiet() {
            return self.free(block);
        }
        let bytes = block.raw.1;
        let accounts = self.card.accounts();
        accounts.contiguous.move_to(&accounts.retiring, bytes);
        self.card.adopt(Box::new(Left { card: Arc::clone(&self.card), block }));
        Err(Error::NotReturned { bytes: Bytes::new(bytes), source: not_idle() })
    }
}

impl Drop for FallbackContiguous {
    fn drop(&mut self) {
        // A buffer closes its backing itself. This is for one that was opened and not used.
        if self.block.is_some()
            && !self.card.gate().is_forked()
            && let Err(error) = self.close()
        {
            tracing::warn!(device = %self.card.id(), %error, "a block was dropped and did not come back");
        }
    }
}
