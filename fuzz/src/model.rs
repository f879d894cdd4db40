//! One buffer as it must be.

use bytemuck::Pod;
use growspan::{GrowableBuffer, Mode};

use crate::card::GRANULE;

/// What a buffer shows of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) capacity: usize,
    pub(crate) max_len: usize,
    pub(crate) committed: u64,
    pub(crate) moves: u64,
    pub(crate) mode: Mode,
    pub(crate) reserved: u64,
}

impl Seen {
    pub(crate) fn of<T>(buffer: &GrowableBuffer<T>) -> Self {
        Self {
            address: buffer.device_ptr(),
            len: buffer.len(),
            capacity: buffer.capacity(),
            max_len: buffer.max_len(),
            committed: buffer.committed().get(),
            moves: buffer.moves(),
            mode: buffer.mode(),
            reserved: buffer.stats().bytes_reserved.get(),
        }
    }
}

/// The length and the bytes, with a mask of those that are known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    bytes: Vec<u8>,
    known: Vec<u8>,
}

impl Model {
    /// Follows the length; new bytes are not known.
    pub(crate) fn resize(&mut self, bytes: usize) {
        self.bytes.resize(bytes, 0);
        self.known.resize(bytes, 0);
    }

    pub(crate) fn write(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.known[at..at + bytes.len()].fill(0xff);
    }

    pub(crate) fn forget(&mut self, at: usize, bytes: usize) {
        self.known[at..at + bytes].fill(0);
    }

    pub(crate) fn copy_within(&mut self, from: usize, bytes: usize, to: usize) {
        self.bytes.copy_within(from..from + bytes, to);
        self.known.copy_within(from..from + bytes, to);
    }

    /// Holds the buffer against the model: its figures among each other, its length, its bytes.
    ///
    /// Where chunks have any size, what is committed may end `within` one that was mapped ahead.
    pub(crate) fn check<T: Pod>(&self, buffer: &GrowableBuffer<T>, within: bool) {
        let seen = Seen::of(buffer);
        let size = size_of::<T>();
        assert_eq!(seen.len * size, self.bytes.len(), "the length");
        assert!(seen.len <= seen.capacity && seen.capacity <= seen.max_len, "len, capacity, max_len: {seen:?}");
        let room = usize::try_from(seen.committed).unwrap() / size;
        assert_eq!(seen.capacity, room.min(seen.max_len), "the capacity: {seen:?}");
        assert!(seen.committed <= seen.reserved, "{seen:?}");
        // A block may have been asked to be smaller.
        let all = (seen.max_len * size) as u64;
        assert!(seen.mode == Mode::Contiguous || all <= seen.reserved, "{seen:?}");
        let chunks = buffer.chunks();
        assert_eq!(buffer.stats().chunks, chunks.len());
        if seen.mode == Mode::Virtual {
            let end = chunks.iter().fold(seen.address, |address, chunk| {
                assert_eq!(chunk.address, address, "chunks side by side: {chunks:?}");
                assert!(chunk.bytes.get() > 0 && chunk.bytes.get().is_multiple_of(GRANULE), "{chunk:?}");
                address + chunk.bytes.get()
            });
            let (mapped, last) = (end - seen.address, chunks.last().map_or(0, |last| last.bytes.get()));
            let fits = mapped == seen.committed || within && (mapped - last..mapped).contains(&seen.committed);
            assert!(fits, "chunks and committed bytes: {seen:?}, {chunks:?}");
            assert_eq!(seen.moves, 0);
        } else {
            assert!(chunks.is_empty());
        }
        if seen.len > 0 {
            let mut elements = vec![T::zeroed(); seen.len];
            buffer.copy_out(0, &mut elements).unwrap();
            let there: &[u8] = bytemuck::cast_slice(&elements);
            let differ = |((is, was), known): ((&u8, &u8), &u8)| (is ^ was) & known;
            let all = || there.iter().zip(&self.bytes).zip(&self.known);
            if all().map(differ).fold(0, |all, one| all | one) != 0 {
                let at = all().position(|each| differ(each) != 0).unwrap();
                panic!("byte {at} is {:#x}, and was {:#x}: {seen:?}, {chunks:?}", there[at], self.bytes[at]);
            }
        }
    }
}
