//! A hash map of millions of entries.

use std::hash::{BuildHasherDefault, Hasher};
use std::hint::black_box;
use std::time::Instant;

use growspan::{Device, Result, SpanAllocator};
use hashbrown::HashMap;

use crate::{Row, bar, median};

/// A hash that costs next to nothing, so that memory is what is measured.
#[derive(Default)]
struct Multiply(u64);

type Hashing = BuildHasherDefault<Multiply>;

impl Hasher for Multiply {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // Both halves: the map takes its place from the low bits and a tag from the high ones.
        let wide = u128::from(self.0 ^ number) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (wide >> 64) as u64 ^ wide as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(crate) fn run(device: &Device, quick: bool) -> Result<Vec<Row>> {
    let entries: u64 = if quick { 100_000 } else { 10_000_000 };
    let turns = if quick { 1 } else { 5 };
    let allocator = SpanAllocator::new(device)?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..turns {
        let start = Instant::now();
        fill(&mut HashMap::with_hasher_in(Hashing::default(), allocator.clone()), entries);
        ours.push(start.elapsed().as_secs_f64());
        let start = Instant::now();
        fill(&mut HashMap::with_hasher(Hashing::default()), entries);
        theirs.push(start.elapsed().as_secs_f64());
    }
    let (ours, theirs) = (median(&mut ours), median(&mut theirs));
    Ok(vec![Row::new(
        format!("hashbrown map: {} M entries inserted, found and dropped", entries as f64 / 1e6),
        format!("{ours:.3} s, {:.2} times", ours / theirs),
        format!("global allocator {theirs:.3} s"),
        bar("within 1.1 times", ours <= 1.1 * theirs),
    )])
}

fn fill<A: allocator_api2_02::alloc::Allocator>(map: &mut HashMap<u64, u64, Hashing, A>, entries: u64) {
    for n in 0..entries {
        map.insert(n.wrapping_mul(0x9e37_79b9_7f4a_7c15), n);
    }
    let found = (0..entries).filter(|n| map.contains_key(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15))).count();
    assert_eq!(black_box(found) as u64, entries);
}
