//! Which addresses are reserved and what is mapped under them: the rules that every driver's book of its own keeps.

use std::collections::BTreeMap;

/// A rule that was broken, with figures.
pub(crate) type Checked<T> = Result<T, String>;

/// Spans and the mappings in them, each with what a driver wants to know of it.
#[derive(Debug)]
pub(crate) struct Layout<S, M> {
    granularity: u64,
    spans: BTreeMap<u64, (u64, S)>,
    mappings: BTreeMap<u64, Mapping<M>>,
}

/// What is mapped at an address.
#[derive(Debug)]
pub(crate) struct Mapping<M> {
    pub(crate) bytes: u64,
    pub(crate) of: M,
}

impl<S, M> Layout<S, M> {
    pub(crate) const fn new(granularity: u64) -> Self {
        Self { granularity, spans: BTreeMap::new(), mappings: BTreeMap::new() }
    }

    /// The numbers of spans and mappings.
    pub(crate) fn counts(&self) -> [usize; 2] {
        [self.spans.len(), self.mappings.len()]
    }

    pub(crate) fn add_span(&mut self, addr: u64, bytes: u64, of: S) {
        self.spans.insert(addr, (bytes, of));
    }

    /// Takes a span out, in which nothing is mapped.
    pub(crate) fn remove_span(&mut self, addr: u64, bytes: u64) -> Checked<S> {
        match self.spans.get(&addr) {
            Some((actual, _)) if *actual == bytes => {}
            Some((actual, _)) => return Err(format!("the span at {addr:#x} has {actual} bytes, not {bytes}")),
            None => return Err(format!("no span starts at {addr:#x}")),
        }
        if let Some((at, mapping)) = self.mappings.range(addr..addr + bytes).next() {
            return Err(format!("{} bytes are mapped at {at:#x} in the span at {addr:#x}", mapping.bytes));
        }
        self.spans.remove(&addr).map(|(_, of)| of).ok_or_else(|| format!("no span starts at {addr:#x}"))
    }

    /// Puts a mapping where it lies in one span and meets no other.
    pub(crate) fn map(&mut self, addr: u64, bytes: u64, of: M) -> Checked<()> {
        if !addr.is_multiple_of(self.granularity) {
            return Err(format!("{addr:#x} is no multiple of the granularity, {} bytes", self.granularity));
        }
        let end = end_of(addr, bytes)?;
        let span = self.spans.range(..=addr).next_back();
        if span.is_none_or(|(start, (size, _))| end > start + size) {
            return Err(format!("[{addr:#x}, {end:#x}) does not lie in one span"));
        }
        // Mappings do not overlap, so the last one that starts before the end is the only one to look at.
        if let Some((at, other)) = self.mappings.range(..end).next_back().filter(|(at, other)| *at + other.bytes > addr)
        {
            return Err(format!("[{addr:#x}, {end:#x}) meets the {} bytes mapped at {at:#x}", other.bytes));
        }
        self.mappings.insert(addr, Mapping { bytes, of });
        Ok(())
    }

    /// The one mapping that is exactly `[addr, addr + bytes)`.
    pub(crate) fn exactly(&self, addr: u64, bytes: u64) -> Checked<&M> {
        match self.mappings.get(&addr) {
            Some(mapping) if mapping.bytes == bytes => Ok(&mapping.of),
            Some(mapping) => Err(format!("{} bytes are mapped at {addr:#x}, not {bytes}", mapping.bytes)),
            None => Err(format!("nothing is mapped at {addr:#x}")),
        }
    }

    /// That `[addr, addr + bytes)` is made of whole mappings.
    pub(crate) fn whole(&self, addr: u64, bytes: u64) -> Checked<()> {
        let end = end_of(addr, bytes)?;
        let mut next = addr;
        for (&at, mapping) in self.mappings.range(addr..end) {
            if at != next {
                break;
            }
            next = at + mapping.bytes;
        }
        if next != end || bytes == 0 {
            let mapped = next - addr;
            return Err(format!("[{addr:#x}, {end:#x}) is not made of whole mappings, which go on for {mapped} bytes"));
        }
        Ok(())
    }

    /// The mappings that start in `[addr, addr + bytes)`.
    pub(crate) fn within(&self, addr: u64, bytes: u64) -> impl Iterator<Item = (u64, &Mapping<M>)> {
        self.mappings.range(addr..addr.saturating_add(bytes)).map(|(&at, mapping)| (at, mapping))
    }

    /// The same, to change what is known of them.
    pub(crate) fn within_mut(&mut self, addr: u64, bytes: u64) -> impl Iterator<Item = (u64, &mut Mapping<M>)> {
        self.mappings.range_mut(addr..addr.saturating_add(bytes)).map(|(&at, mapping)| (at, mapping))
    }

    /// Where the mapping ends that `addr` lies in, if it lies in one.
    #[cfg(feature = "hip")]
    pub(crate) fn border(&self, addr: u64) -> Option<u64> {
        let (at, mapping) = self.mappings.range(..=addr).next_back()?;
        Some(at + mapping.bytes).filter(|end| *end > addr)
    }

    /// Takes the mapping at `addr` out.
    pub(crate) fn unmap(&mut self, addr: u64) -> Option<M> {
        self.mappings.remove(&addr).map(|mapping| mapping.of)
    }
}

fn end_of(addr: u64, bytes: u64) -> Checked<u64> {
    addr.checked_add(bytes).ok_or_else(|| format!("{bytes} bytes at {addr:#x} go round the end"))
}
