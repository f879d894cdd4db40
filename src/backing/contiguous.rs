//! One contiguous block: the fallback where virtual memory does not work.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{Backing, Growth, Mode, Shrunk};
use crate::bytes::Bytes;
use crate::card::{Card, check_address, is_gone, twice};
use crate::driver::{Call, DriverError, DriverErrorKind};
use crate::error::{Error, Result};
use crate::pool::Sizing;
use crate::quiesce::Event;
use crate::range::MappedChunk;

/// Blocks are multiples of a page, as drivers count them.
const PAGE: u64 = 4096;

/// What a buffer does where virtual memory is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallback {
    /// Allocate the whole maximum once. Growing is bookkeeping, the address never moves.
    #[default]
    Upfront,
    /// Allocate this much once. Growing within it is bookkeeping, beyond it a clear error. The address never moves.
    Capacity(Bytes),
    /// Allocate as needed: growing beyond the block makes a larger one and copies. The address changes, and
    /// [`moves`](crate::GrowableBuffer::moves) says how often it did.
    MayMove,
    /// Do not build the buffer.
    Refuse,
}

/// One block, allocated once or moved when it is too small. Nothing goes back to the driver before it is closed.
#[derive(Debug)]
pub struct FallbackContiguous {
    card: Arc<Card>,
    /// `(address, bytes)`; none while a block that may move is empty.
    block: Option<(u64, u64)>,
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
            this.block = Some((this.allocate(bytes)?, bytes));
        }
        Ok(this)
    }

    fn stays(&self) -> Shrunk {
        Shrunk {
            released: Bytes::ZERO,
            retiring: Bytes::ZERO,
            committed: Bytes::new(self.committed()),
            why: Some("contiguous mode: nothing goes back to the driver before the buffer is closed".to_owned()),
        }
    }

    fn allocate(&self, bytes: u64) -> Result<u64> {
        let gate = self.card.gate();
        let address = gate.allocate(bytes).map_err(|error| self.card.explain(bytes, error))?;
        let accounts = self.card.accounts();
        accounts.contiguous.add(bytes);
        accounts.mark_peak();
        check_address(address, bytes, self.align).map_err(|why| {
            if address == 0 {
                accounts.contiguous.sub(bytes);
            } else {
                let _ = self.free(address, bytes);
            }
            DriverError::new(Call::Allocate, DriverErrorKind::Other).with_detail(why.to_string()).into()
        })
    }

    /// Frees a block; one that the driver keeps is stranded.
    fn free(&self, address: u64, bytes: u64) -> Result<()> {
        let accounts = self.card.accounts();
        // SAFETY: the callers hand over a block that came from `allocate` with this size, that nothing uses any more,
        // and forget it.
        match twice(|| unsafe { self.card.gate().free(address, bytes) }) {
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
}

impl Backing for FallbackContiguous {
    fn mode(&self) -> Mode {
        Mode::Contiguous
    }

    fn base(&self) -> u64 {
        self.block.map_or(0, |(address, _)| address)
    }

    fn committed(&self) -> u64 {
        self.block.map_or(0, |(_, bytes)| bytes)
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
        // Half as much again, so that growing step by step copies each byte a constant number of times.
        let wanted = bytes.max(from.saturating_add(from / 2)).next_multiple_of(PAGE).min(self.reserved);
        let address = self.allocate(wanted)?;
        if let Some((old, bytes)) = self.block {
            let gate = self.card.gate();
            // SAFETY: both blocks are ours and do not overlap, the new one is larger. Work on the old one is waited for
            // first; without a stream the copy is over when this returns.
            let copied = gate.synchronize().and_then(|()| unsafe { gate.copy_within(address, old, bytes, None) });
            if let Err(error) = copied {
                let _ = self.free(address, wanted);
                return Err(error.into());
            }
            self.moves += 1;
        }
        let old_block = self.block.replace((address, wanted));
        Ok(Growth { from, fresh: vec![true], old_block, retiring: None })
    }

    fn settle(&mut self, growth: Growth) {
        let freed = growth.old_block.map_or(Ok(()), |(address, bytes)| self.free(address, bytes));
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
        new.map_or(Ok(()), |(address, bytes)| self.free(address, bytes))
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

    fn export(&mut self, chunk: usize) -> Result<OwnedFd> {
        Err(Error::OutOfBounds { what: "exporting", start: chunk, count: 1, len: 0 })
    }

    fn close(&mut self, idle: bool) -> Result<()> {
        let Some((address, bytes)) = self.block.take() else { return Ok(()) };
        if !idle {
            let accounts = self.card.accounts();
            accounts.contiguous.move_to(&accounts.stranded, bytes);
            let source = DriverError::new(Call::Synchronize, DriverErrorKind::Other)
                .with_detail("the device could not be waited for, so nothing was freed");
            return Err(Error::NotReturned { bytes: Bytes::new(bytes), source });
        }
        self.free(address, bytes)
    }
}

impl Drop for FallbackContiguous {
    fn drop(&mut self) {
        // A buffer closes its backing itself. This is for one that was opened and not used.
        if self.block.is_some() {
            let idle = self.card.quiet();
            if let Err(error) = self.close(idle) {
                tracing::warn!(device = %self.card.id(), %error, "a block was dropped and did not come back");
            }
        }
    }
}
