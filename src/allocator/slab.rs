//! Blocks of one size, side by side. What is free is told by bits kept apart from them.

/// Most blocks a slab may have: what one word of summary bits covers.
const MOST: usize = 64 * 64;

/// No slab.
pub(super) const NONE: u32 = u32::MAX;

/// A run of blocks of one class.
///
/// ```text
/// base                                           blocks   0 1 2 3 4 5 6 ..
///  | block | block | block | block | ..          words    1 1 0 0 1 0 1 ..   set: free
///                                                summary  bit n set: word n has a free block
/// ```
/// Taking a block is two searches for a lowest set bit, so low addresses are used first.
#[derive(Debug)]
pub(super) struct Slab {
    pub(super) base: u64,
    pub(super) class: u16,
    /// Which of the heap's ranges it lies in.
    pub(super) range: u32,
    /// Its neighbours in the list of slabs of its class that have free blocks.
    pub(super) prev: u32,
    pub(super) next: u32,
    block: u32,
    /// 2³² divided by the block's size, rounded up.
    reciprocal: u64,
    free: u32,
    blocks: u32,
    summary: u64,
    words: Box<[u64]>,
}

/// How large a slab of blocks of this size is, in bytes: sixteen blocks, but no less than 64 KiB.
pub(super) fn slab_bytes(block: u32) -> u64 {
    (16 * u64::from(block)).max(64 << 10).next_multiple_of(super::classes::PAGE as u64)
}

impl Slab {
    /// A slab of `bytes` at `base`, all free.
    pub(super) fn new(base: u64, bytes: u64, class: u16, block: u32, range: u32) -> Self {
        let blocks = usize::try_from(bytes / u64::from(block)).unwrap_or(MOST).min(MOST);
        let mut words = vec![u64::MAX; blocks.div_ceil(64)].into_boxed_slice();
        if let Some(last) = words.last_mut().filter(|_| !blocks.is_multiple_of(64)) {
            *last = (1 << (blocks % 64)) - 1;
        }
        let summary = if words.len() == 64 { u64::MAX } else { (1_u64 << words.len()) - 1 };
        let blocks = u32::try_from(blocks).unwrap_or(0);
        let reciprocal = (1_u64 << 32).div_ceil(u64::from(block));
        Self { base, class, range, prev: NONE, next: NONE, block, reciprocal, free: blocks, blocks, summary, words }
    }

    /// The lowest free block's address; none if all are taken.
    #[inline]
    pub(super) fn take(&mut self) -> Option<u64> {
        if self.summary == 0 {
            return None;
        }
        let word = self.summary.trailing_zeros();
        let bits = &mut self.words[word as usize];
        let bit = bits.trailing_zeros();
        *bits &= *bits - 1;
        if *bits == 0 {
            self.summary &= !(1 << word);
        }
        self.free -= 1;
        Some(self.base + u64::from((word * 64 + bit) * self.block))
    }

    /// Gives a block back. False if there is no block at that address, or it is free already.
    #[inline]
    pub(super) fn put(&mut self, address: u64) -> bool {
        let offset = address - self.base;
        // Right for every multiple of the size below 2¹⁸: the rounding of the reciprocal adds less than one in all.
        let number = (offset * self.reciprocal) >> 32;
        let (word, bit) = ((number / 64) as usize, number % 64);
        let known = number < u64::from(self.blocks) && number * u64::from(self.block) == offset;
        match self.words.get_mut(word) {
            Some(bits) if known && *bits & (1 << bit) == 0 => {
                *bits |= 1 << bit;
                self.summary |= 1 << word;
                self.free += 1;
                true
            }
            _ => false,
        }
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.free == 0
    }

    #[inline]
    pub(super) fn has_one_free(&self) -> bool {
        self.free == 1
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.free == self.blocks
    }

    /// Whether it is the only one of its class with free blocks, being one with some.
    #[inline]
    pub(super) fn is_alone(&self) -> bool {
        self.prev == NONE && self.next == NONE
    }

    #[inline]
    pub(super) fn block(&self) -> u32 {
        self.block
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::classes::Classes;

    #[test]
    fn every_block_is_handed_out_once_and_taken_back_once() {
        let classes = Classes::new(16);
        for class in 0..classes.len() {
            let block = classes.size(class);
            let base = 1 << 40;
            let bytes = slab_bytes(block);
            let mut slab = Slab::new(base, bytes, 0, block, 0);
            let all: Vec<u64> = core::iter::from_fn(|| slab.take()).collect();
            assert_eq!(all.len() as u64, bytes / u64::from(block));
            assert!(slab.is_full());
            for (n, address) in all.iter().enumerate() {
                assert_eq!(*address, base + n as u64 * u64::from(block));
            }
            assert!(!slab.put(base + 1), "no block begins there");
            for address in all.iter().rev() {
                assert!(slab.put(*address));
                assert!(!slab.put(*address), "it is free already");
            }
            assert!(slab.is_empty());
            assert!(!slab.put(base + bytes), "beyond the end");
            slab.take();
            assert_eq!(slab.take(), Some(base + u64::from(block)), "low addresses first");
        }
    }
}
