//! Pretended memory: runs of one value, and real pages only where the bytes differ.

use std::collections::BTreeMap;

/// Bytes in one host page of the pretence. Unrelated to the simulated granularity.
const PAGE: u64 = 4096;

/// A stretch of content on its way from one memory to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Extent {
    /// `bytes` times the same value: how gigabytes are copied without being there.
    Run { bytes: u64, value: u8 },
    /// These bytes.
    Bytes(Vec<u8>),
}

impl Extent {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Run { bytes, .. } => *bytes,
            Self::Bytes(data) => data.len() as u64,
        }
    }

    /// The same content as two extents, the first of `at` bytes.
    pub(super) fn split(self, at: u64) -> (Self, Self) {
        match self {
            Self::Run { bytes, value } => (Self::Run { bytes: at, value }, Self::Run { bytes: bytes - at, value }),
            Self::Bytes(mut head) => {
                let tail = head.split_off(at as usize);
                (Self::Bytes(head), Self::Bytes(tail))
            }
        }
    }
}

/// The content of one chunk or block.
#[derive(Debug)]
pub(super) struct Sparse {
    /// Where a run of one value starts; it reaches to the next key. Page aligned, and there is always one at 0.
    runs: BTreeMap<u64, u8>,
    /// Pages, by number, whose bytes differ. They hide the run beneath them.
    pages: BTreeMap<u64, Box<[u8; PAGE as usize]>>,
}

impl Sparse {
    /// Memory full of `value`.
    pub(super) fn new(value: u8) -> Self {
        Self { runs: BTreeMap::from([(0, value)]), pages: BTreeMap::new() }
    }

    /// Appends the content of `[offset, offset + bytes)` to `out`.
    pub(super) fn read(&self, offset: u64, bytes: u64, out: &mut Vec<Extent>) {
        let (mut at, end) = (offset, offset + bytes);
        while at < end {
            let number = at / PAGE;
            if let Some(page) = self.pages.get(&number) {
                let stop = end.min((number + 1) * PAGE);
                out.push(Extent::Bytes(page[within(at, number)..within(stop, number)].to_vec()));
                at = stop;
                continue;
            }
            let page = self.pages.range(number + 1..).next().map_or(end, |(&next, _)| next * PAGE);
            let run = self.runs.range(at + 1..).next().map_or(end, |(&next, _)| next);
            let stop = end.min(page).min(run);
            out.push(Extent::Run { bytes: stop - at, value: self.run_at(at) });
            at = stop;
        }
    }

    /// Sets `bytes` at `offset` to `value`.
    pub(super) fn fill(&mut self, offset: u64, bytes: u64, value: u8) {
        let end = offset + bytes;
        let (first, last) = (offset.next_multiple_of(PAGE), end / PAGE * PAGE);
        if first >= last {
            // No whole page: at most a tail of one page and a head of the next.
            self.fill_part(offset, end.min(first), value);
            self.fill_part(first.max(offset), end, value);
            return;
        }
        self.fill_part(offset, first, value);
        while let Some((&number, _)) = self.pages.range(first / PAGE..last / PAGE).next() {
            self.pages.remove(&number);
        }
        let next = self.run_at(last);
        while let Some((&start, _)) = self.runs.range(first..last).next() {
            self.runs.remove(&start);
        }
        // Runs of one value stay one run, or filling piece by piece would cost as much as real memory.
        if first == 0 || self.run_at(first - 1) != value {
            self.runs.insert(first, value);
        }
        if next == value {
            self.runs.remove(&last);
        } else {
            self.runs.insert(last, next);
        }
        self.fill_part(last, end, value);
    }

    /// Writes `data` at `offset`.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        let (mut at, mut rest) = (offset, data);
        while let Some(&value) = rest.first() {
            let room = PAGE - at % PAGE;
            let (piece, tail) = rest.split_at(rest.len().min(room as usize));
            if piece.iter().all(|&byte| byte == value) {
                self.fill(at, piece.len() as u64, value);
            } else {
                let start = (at % PAGE) as usize;
                self.page(at / PAGE)[start..start + piece.len()].copy_from_slice(piece);
            }
            at += piece.len() as u64;
            rest = tail;
        }
    }

    /// Fills a part of one page.
    fn fill_part(&mut self, from: u64, to: u64, value: u8) {
        let number = from / PAGE;
        if from >= to || (!self.pages.contains_key(&number) && self.run_at(from) == value) {
            return;
        }
        self.page(number)[within(from, number)..within(to, number)].fill(value);
    }

    fn run_at(&self, at: u64) -> u8 {
        self.runs.range(..=at).next_back().map_or(0, |(_, &value)| value)
    }

    /// A page that can be written byte by byte.
    fn page(&mut self, number: u64) -> &mut [u8; PAGE as usize] {
        let value = self.run_at(number * PAGE);
        self.pages.entry(number).or_insert_with(|| Box::new([value; PAGE as usize]))
    }

    /// How many pages are really there.
    #[cfg(test)]
    fn pages(&self) -> usize {
        self.pages.len()
    }
}

/// Where `at` lies in page `number`; one past its end for the start of the next page.
fn within(at: u64, number: u64) -> usize {
    (at - number * PAGE) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(memory: &Sparse, offset: u64, bytes: u64) -> Vec<u8> {
        let mut extents = Vec::new();
        memory.read(offset, bytes, &mut extents);
        assert_eq!(extents.iter().map(Extent::len).sum::<u64>(), bytes);
        extents
            .into_iter()
            .flat_map(|extent| match extent {
                Extent::Run { bytes, value } => vec![value; bytes as usize],
                Extent::Bytes(data) => data,
            })
            .collect()
    }

    #[test]
    fn behaves_like_an_array_under_random_writes_and_fills() {
        let size = 10 * PAGE;
        let (mut memory, mut model) = (Sparse::new(0xA5), vec![0xA5_u8; size as usize]);
        let mut seed = 1_u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for step in 0..4000_u64 {
            let mut from = random(size);
            let mut len = 1 + random(size - from);
            if step % 3 == 0 {
                // Page borders are where it could go wrong.
                from = from / PAGE * PAGE;
                len = (len / PAGE * PAGE).max(1);
            }
            let range = from as usize..(from + len) as usize;
            if random(2) == 0 {
                let value = random(3) as u8;
                memory.fill(from, len, value);
                model[range].fill(value);
            } else {
                let data: Vec<u8> = (0..len).map(|_| random(2) as u8).collect();
                memory.write(from, &data);
                model[range].copy_from_slice(&data);
            }
            if step % 40 == 0 {
                assert_eq!(bytes(&memory, 0, size), model, "step {step}");
                assert_eq!(bytes(&memory, from, len), model[from as usize..(from + len) as usize], "step {step}");
            }
        }
    }

    #[test]
    fn a_terabyte_costs_nothing() {
        let mut memory = Sparse::new(1);
        memory.fill(5, (1 << 40) - 5, 7);
        memory.write(1 << 39, &[7; 10_000]);
        assert_eq!(memory.pages(), 1);
        let mut extents = Vec::new();
        memory.read(0, 1 << 40, &mut extents);
        assert_eq!(extents.len(), 2);
        assert_eq!(bytes(&memory, 0, 7), [1, 1, 1, 1, 1, 7, 7]);
    }

    #[test]
    fn extents_split_where_asked() {
        let run = Extent::Run { bytes: 10, value: 3 };
        assert_eq!(run.split(4), (Extent::Run { bytes: 4, value: 3 }, Extent::Run { bytes: 6, value: 3 }));
        let data = Extent::Bytes(vec![1, 2, 3]);
        assert_eq!(data.split(1), (Extent::Bytes(vec![1]), Extent::Bytes(vec![2, 3])));
    }
}
