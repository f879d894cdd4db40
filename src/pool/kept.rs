//! What a pool keeps: chunks by size, and when each came in.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use super::Chunk;
use super::policy::PoolStats;

/// Kept chunks. Counts bytes and nothing else: accounts and drivers are the pool's matter.
#[derive(Default)]
pub(super) struct Kept {
    /// The oldest of each size in front.
    classes: BTreeMap<u64, VecDeque<Aged>>,
    bytes: u64,
    /// How many came in so far.
    turns: u64,
    pub(super) stats: PoolStats,
}

struct Aged {
    chunk: Chunk,
    since: Instant,
    /// In which turn it came in: clocks may stand still from one to the next.
    turn: u64,
}

impl Kept {
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// `(size, how many)`, the smallest first.
    pub(super) fn counts(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        self.classes.iter().map(|(&size, chunks)| (size, chunks.len()))
    }

    pub(super) fn insert(&mut self, chunk: Chunk, since: Instant) {
        self.bytes += chunk.size();
        self.turns += 1;
        self.classes.entry(chunk.size()).or_default().push_back(Aged { chunk, since, turn: self.turns });
    }

    /// The chunk of that size that came in last, so that those which are not needed grow old.
    pub(super) fn take(&mut self, size: u64) -> Option<Chunk> {
        self.remove(size, VecDeque::pop_back)
    }

    pub(super) fn take_largest(&mut self) -> Option<Chunk> {
        let (&size, _) = self.classes.last_key_value()?;
        self.take(size)
    }

    /// The chunk that has been here longest.
    pub(super) fn take_oldest(&mut self) -> Option<Chunk> {
        let fronts = self.classes.iter().filter_map(|(&size, chunks)| Some((chunks.front()?.turn, size)));
        let (_, size) = fronts.min()?;
        self.remove(size, VecDeque::pop_front)
    }

    /// A chunk that came in at `limit` or before.
    pub(super) fn take_since(&mut self, limit: Instant) -> Option<Chunk> {
        let is_old = |chunks: &VecDeque<Aged>| chunks.front().is_some_and(|aged| aged.since <= limit);
        let (&size, _) = self.classes.iter().find(|(_, chunks)| is_old(chunks))?;
        self.remove(size, VecDeque::pop_front)
    }

    fn remove(&mut self, size: u64, pop: impl Fn(&mut VecDeque<Aged>) -> Option<Aged>) -> Option<Chunk> {
        let class = self.classes.get_mut(&size)?;
        let aged = pop(class);
        if class.is_empty() {
            self.classes.remove(&size);
        }
        let chunk = aged?.chunk;
        self.bytes -= chunk.size();
        Some(chunk)
    }
}
