//! Driver allocations side by side.

use bytemuck::{AnyBitPattern, Pod};

use super::{PinTiming, PinnedBuffer};
use crate::error::Result;

/// Page-locked memory in blocks that the driver allocated one by one, built by
/// [`PinnedBuilder::build_blocks`](super::PinnedBuilder::build_blocks). Together they have the length asked for; all but
/// the last are of one size, and no slice spans two.
///
/// ```
/// use growspan::pinned::PinnedBuffer;
/// use growspan::{Bytes, Device};
///
/// # fn main() -> growspan::Result<()> {
/// let builder = PinnedBuffer::<u16>::builder(&Device::host()?).max_len(3 << 20).piece(Bytes::mib(2));
/// let mut experts = builder.build_blocks()?;
/// assert_eq!(experts.blocks().len(), 3);
/// experts.slices_mut().for_each(|slice| slice.fill(7));
/// println!("{}", experts.timing());
/// # experts.close()
/// # }
/// ```
#[derive(Debug)]
pub struct PinnedBlocks<T> {
    blocks: Vec<PinnedBuffer<T>>,
    timing: PinTiming,
}

impl<T> PinnedBlocks<T> {
    pub(super) fn of(blocks: Vec<PinnedBuffer<T>>) -> Self {
        let mut timing = PinTiming::default();
        for block in &blocks {
            timing.add(block.timing());
        }
        Self { blocks, timing }
    }

    /// The blocks in order, each full.
    #[must_use]
    pub fn blocks(&self) -> &[PinnedBuffer<T>] {
        &self.blocks
    }

    /// How many elements there are in all of them.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.iter().map(PinnedBuffer::len).sum()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// What all of them cost.
    #[must_use]
    pub fn timing(&self) -> &PinTiming {
        &self.timing
    }

    /// The elements, block by block.
    pub fn slices(&self) -> impl Iterator<Item = &[T]>
    where
        T: AnyBitPattern,
    {
        self.blocks.iter().map(PinnedBuffer::as_slice)
    }

    /// The elements, to change, block by block.
    pub fn slices_mut(&mut self) -> impl Iterator<Item = &mut [T]>
    where
        T: Pod,
    {
        self.blocks.iter_mut().map(PinnedBuffer::as_mut_slice)
    }

    /// Waits until the device is idle and frees all of them.
    ///
    /// # Errors
    /// The first of [`PinnedBuffer::close`]; the others are closed all the same.
    pub fn close(self) -> Result<()> {
        self.blocks.into_iter().map(PinnedBuffer::close).fold(Ok(()), Result::and)
    }
}
