//! What is left.

use crate::bytes::Bytes;

use super::state::State;

/// What exists on a simulated device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Figures {
    /// Handles that were not released.
    pub handles: u64,
    /// Mappings.
    pub mappings: u64,
    /// Bytes in mappings.
    pub mapped: Bytes,
    /// Spans.
    pub spans: u64,
    /// Bytes in spans.
    pub reserved: Bytes,
    /// Contiguous blocks.
    pub blocks: u64,
    /// Bytes in blocks.
    pub allocated: Bytes,
    /// Pieces of page-locked host memory, registered or allocated.
    pub pins: u64,
    /// Bytes in them.
    pub pinned: Bytes,
    /// Bytes in chunks: those with a handle, and those that are still mapped after their release.
    pub chunks: Bytes,
    /// Bytes that were released but, by its personality, not returned.
    pub withheld: Bytes,
    /// Events.
    pub events: u64,
    /// Pieces of work pending on all streams.
    pub pending: u64,
    /// Open files that the pretended process holds.
    pub open_files: u64,
    /// Entries of its memory map.
    pub map_entries: u64,
    /// Free memory, really, whatever the driver reports.
    pub free: Bytes,
}

impl Figures {
    pub(super) fn of(state: &State) -> Self {
        let sum = |sizes: &mut dyn Iterator<Item = u64>| Bytes::new(sizes.sum());
        Self {
            handles: state.handles(),
            mappings: state.mappings.len() as u64,
            mapped: sum(&mut state.mappings.values().map(|mapping| mapping.bytes)),
            spans: state.spans.len() as u64,
            reserved: sum(&mut state.spans.values().copied()),
            blocks: state.blocks.len() as u64,
            allocated: sum(&mut state.blocks.values().map(|block| block.bytes)),
            pins: state.pinned.len(),
            pinned: Bytes::new(state.pinned.bytes()),
            chunks: sum(&mut state.chunks.values().map(|chunk| chunk.bytes)),
            withheld: sum(&mut state.withheld.iter().map(|memory| memory.bytes)),
            events: state.streams.events() as u64,
            pending: state.streams.pending() as u64,
            open_files: state.open_files(),
            map_entries: state.map_entries(),
            free: Bytes::new(state.free_memory()),
        }
    }
}

/// The most violations that a report spells out: a loop gone wrong makes thousands.
const SHOWN: usize = 10;

pub(super) fn check_clean(state: &State) -> Result<(), String> {
    let mut lines = Vec::new();
    let violations = &state.ledger.violations;
    if !violations.is_empty() {
        lines.push(format!("{} against the rules:", count(violations.len() as u64, "call")));
        lines.extend(violations.iter().take(SHOWN).map(|violation| format!("  {violation}")));
        if violations.len() > SHOWN {
            lines.push(format!("  and {} more", violations.len() - SHOWN));
        }
    }
    if !state.lost {
        let left = Figures::of(state);
        let things = [
            (left.handles, "handle", left.chunks),
            (left.mappings, "mapping", left.mapped),
            (left.spans, "span", left.reserved),
            (left.blocks, "block", left.allocated),
            (left.pins, "pin", left.pinned),
            (left.events, "event", Bytes::ZERO),
            (left.pending, "piece of pending work", Bytes::ZERO),
        ];
        for (number, name, bytes) in things {
            match number {
                0 => {}
                _ if bytes.is_zero() => lines.push(format!("left over: {}", count(number, name))),
                _ => lines.push(format!("left over: {} ({bytes})", count(number, name))),
            }
        }
        if !left.withheld.is_zero() {
            lines.push(format!("withheld: {}", left.withheld));
        }
    }
    if lines.is_empty() { Ok(()) } else { Err(format!("the simulated device is not clean\n{}", lines.join("\n"))) }
}

/// `1 handle`, `2 handles`, `2 pieces of pending work`.
fn count(number: u64, name: &str) -> String {
    match (number, name.split_once(' ')) {
        (1, _) => format!("1 {name}"),
        (_, Some((noun, rest))) => format!("{number} {noun}s {rest}"),
        (_, None) => format!("{number} {name}s"),
    }
}
