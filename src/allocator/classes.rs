//! Sizes of small blocks.

/// The largest small block, and the unit in which blocks are found by address, in bytes.
pub(super) const PAGE: usize = 16 << 10;

/// The classes of small blocks: multiples of a unit, eight sizes to a doubling, up to a [`PAGE`]. A block is at most an
/// eighth larger than asked for, or one unit.
///
/// ```text
/// unit 16:   16 32 48 64 80 96 112 128  144 160 .. 256  288 320 .. 512  576 .. 16384
/// ```
#[derive(Clone, Debug)]
pub(super) struct Classes {
    unit_log: u32,
    sizes: Box<[u32]>,
}

impl Classes {
    /// Classes of multiples of `unit`, a power of two of at most a page.
    pub(super) fn new(unit: usize) -> Self {
        let mut sizes = Vec::new();
        let mut size = unit;
        let mut step = unit;
        while size <= PAGE {
            sizes.push(u32::try_from(size).unwrap_or(u32::MAX));
            // Sixteen steps of one unit first, then eight to each doubling.
            if size >= 16 * step {
                step *= 2;
            }
            size += step;
        }
        Self { unit_log: unit.trailing_zeros(), sizes: sizes.into_boxed_slice() }
    }

    pub(super) fn len(&self) -> usize {
        self.sizes.len()
    }

    /// The size of a class, in bytes.
    pub(super) fn size(&self, class: usize) -> u32 {
        self.sizes[class]
    }

    /// The smallest class for `size` bytes (not zero) at this alignment; none if the block is not small.
    #[inline]
    pub(super) fn of(&self, size: usize, align: usize) -> Option<usize> {
        if size > PAGE || align > PAGE {
            return None;
        }
        if align >> self.unit_log <= 1 {
            return Some(self.index(size));
        }
        self.aligned(size, align)
    }

    /// The index of the smallest class of at least `size` bytes, which is at most a page.
    #[inline]
    fn index(&self, size: usize) -> usize {
        let units = (size - 1) >> self.unit_log;
        if units < 16 {
            return units;
        }
        let shift = units.ilog2() - 3;
        8 * (shift as usize) + (units >> shift)
    }

    /// Blocks lie at multiples of their size from the start of a slab, which is aligned to a page. So those of a size
    /// that is a multiple of `align` are aligned to it. The class of such a size is one too: sizes are a power of two apart,
    /// and where that is less than `align` the size is itself a class.
    #[cold]
    fn aligned(&self, size: usize, align: usize) -> Option<usize> {
        let size = size.checked_next_multiple_of(align).filter(|size| *size <= PAGE)?;
        Some(self.index(size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_gets_the_smallest_class_that_holds_it() {
        for unit in [16, 64, 256, 4096, PAGE] {
            let classes = Classes::new(unit);
            assert_eq!(classes.size(classes.len() - 1) as usize, PAGE);
            for size in 1..=PAGE {
                let class = classes.of(size, 1).unwrap();
                assert!(classes.size(class) as usize >= size, "{size} with units of {unit}");
                assert!(class == 0 || (classes.size(class - 1) as usize) < size, "{size} with units of {unit}");
                let waste = classes.size(class) as usize - size;
                assert!(waste < unit || waste * 8 <= classes.size(class) as usize, "{size} with units of {unit}");
            }
            assert_eq!(classes.of(PAGE + 1, 1), None);
            assert_eq!(classes.of(1, 2 * PAGE), None);
        }
    }

    #[test]
    fn alignments_are_kept() {
        for unit in [16, 64, 256, 4096, PAGE] {
            let classes = Classes::new(unit);
            for log in 0..=14 {
                let align = 1_usize << log;
                for size in (1..PAGE).step_by(7) {
                    let Some(class) = classes.of(size, align) else {
                        assert!(size.next_multiple_of(align) > PAGE);
                        continue;
                    };
                    assert!(classes.size(class) as usize >= size);
                    assert!((classes.size(class) as usize).is_multiple_of(align.max(unit)));
                }
            }
        }
    }
}
