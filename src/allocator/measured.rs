//! Why the ranges are our own: beside `offset-allocator`, which keeps free ranges by the same rule, in lists of eight to a
//! doubling, and takes the first of a list.
//!
//! `cargo test --release --lib -- --ignored --nocapture beside_offset_allocator`

use std::collections::BTreeMap;
use std::time::Instant;

use super::ranges::{Area, Ranges};

/// Units of 256 bytes: 4 GiB of addresses, slots of 2 MiB.
const UNITS: u32 = 1 << 24;
const SLOT: u32 = 8192;
const STEPS: usize = 400_000;

/// What a kind of allocator has to do here.
trait Ours {
    fn take(&mut self, size: u32) -> Option<(u32, u32)>;
    fn put(&mut self, number: u32);
}

impl Ours for Ranges {
    fn take(&mut self, size: u32) -> Option<(u32, u32)> {
        let number = Self::take(self, Area::Fine, size, 1, |_| (0, 0))?;
        Some((number, self.get(number).at))
    }

    fn put(&mut self, number: u32) {
        Self::put(self, number);
    }
}

struct Theirs {
    inner: offset_allocator::Allocator<u32>,
    live: Vec<Option<offset_allocator::Allocation<u32>>>,
    spare: Vec<u32>,
}

impl Ours for Theirs {
    fn take(&mut self, size: u32) -> Option<(u32, u32)> {
        let allocation = self.inner.allocate(size)?;
        let at = allocation.offset;
        let number = self.spare.pop().unwrap_or_else(|| {
            self.live.push(None);
            self.live.len() as u32 - 1
        });
        self.live[number as usize] = Some(allocation);
        Some((number, at))
    }

    fn put(&mut self, number: u32) {
        self.inner.free(self.live[number as usize].take().unwrap());
        self.spare.push(number);
    }
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as u32) % below.max(1)
    }

    /// Blocks of 16 KiB to 4 MiB, many small ones and few large.
    fn size(&mut self) -> u32 {
        let bound = 64 << self.roll(9);
        64 + self.roll(bound)
    }
}

/// Nanoseconds per operation with `live` blocks coming and going, and the slots touched for each that the blocks fill.
fn churn(allocator: &mut dyn Ours, live: usize) -> (f64, f64) {
    let mut dice = Dice(9);
    let sizes: Vec<(u32, u32)> = (0..STEPS).map(|_| (dice.size(), dice.roll(live as u32))).collect();
    let mut blocks: Vec<Option<(u32, u32, u32)>> = vec![None; live];
    let start = Instant::now();
    for (size, place) in &sizes {
        let place = &mut blocks[*place as usize];
        if let Some((number, ..)) = place.take() {
            allocator.put(number);
        }
        *place = allocator.take(*size).map(|(number, at)| (number, at, *size));
    }
    let ns = start.elapsed().as_secs_f64() * 1e9 / (2 * STEPS) as f64;
    let (mut slots, mut units) = (BTreeMap::new(), 0);
    for (_, at, size) in blocks.iter().flatten() {
        units += size;
        (at / SLOT..=(at + size - 1) / SLOT).for_each(|slot| *slots.entry(slot).or_insert(0) += 1);
    }
    for (number, ..) in blocks.into_iter().flatten() {
        allocator.put(number);
    }
    (ns, slots.len() as f64 * f64::from(SLOT) / f64::from(units))
}

/// How much fits before the first refusal, after a third of the blocks went again and again.
fn fill(allocator: &mut dyn Ours) -> f64 {
    let mut dice = Dice(4);
    let mut live: Vec<(u32, u32)> = Vec::new();
    let mut filled = 0.0;
    for _ in 0..20 {
        loop {
            let size = dice.size();
            let Some((number, _)) = allocator.take(size) else { break };
            live.push((number, size));
        }
        filled = live.iter().map(|(_, size)| f64::from(*size)).sum::<f64>() / f64::from(UNITS);
        for _ in 0..live.len() / 3 {
            let number = dice.roll(live.len() as u32) as usize;
            allocator.put(live.swap_remove(number).0);
        }
    }
    filled
}

#[test]
#[ignore = "a measurement"]
fn beside_offset_allocator() {
    let ours = || {
        let mut ranges = Ranges::new();
        ranges.add_region(Area::Fine, 0, UNITS);
        ranges
    };
    let theirs = || Theirs {
        inner: offset_allocator::Allocator::with_max_allocs(UNITS, 1 << 20),
        live: Vec::new(),
        spare: Vec::new(),
    };
    println!("| | ns per operation | slots touched per slot filled | filled at the first refusal |\n|---|---|---|---|");
    for live in [100, 1000, 4000] {
        let (our, their) = (churn(&mut ours(), live), churn(&mut theirs(), live));
        println!("| {live} live blocks: ours | {:.1} | {:.3} | {:.3} |", our.0, our.1, fill(&mut ours()));
        println!(
            "| {live} live blocks: offset-allocator | {:.1} | {:.3} | {:.3} |",
            their.0,
            their.1,
            fill(&mut theirs())
        );
    }
}
