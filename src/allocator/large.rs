//! Blocks that own a span.

use core::fmt;
use std::collections::{BTreeMap, HashMap};

use super::ground::Ground;
use crate::backing::{Backing, Fallback, Mode};
use crate::bytes::Bytes;
use crate::error::{Error, Result};
use crate::pool::Sizing;
use crate::verdict::BackingRequest;

/// How many addresses a block reserves beyond its size, so that it can grow where it is.
///
/// The span has the block's size times [`multiple`](Self::multiple), but no less than [`least`](Self::least), and no
/// more than [`most`](Self::most) unless the block itself is larger. Addresses cost no memory; a process has 128 TiB of
/// them on x86-64, which the defaults share among thousands of blocks.
///
/// ```
/// use growspan::{Bytes, Headroom};
///
/// let headroom = Headroom::default().with_least(Bytes::gib(1));
/// assert_eq!(headroom.multiple, 8);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Headroom {
    /// How many times the block's size is reserved. 8 unless set.
    pub multiple: u64,
    /// The least that is reserved. 8 GiB unless set.
    pub least: Bytes,
    /// The most that is reserved. The device's memory if none: no block can grow beyond it.
    pub most: Option<Bytes>,
}

impl Default for Headroom {
    fn default() -> Self {
        Self { multiple: 8, least: Bytes::gib(8), most: None }
    }
}

impl Headroom {
    /// None at all: a block that grows beyond its last chunk moves.
    pub const NONE: Self = Self { multiple: 1, least: Bytes::ZERO, most: Some(Bytes::ZERO) };

    /// The same, with that multiple.
    #[must_use]
    pub const fn with_multiple(mut self, multiple: u64) -> Self {
        self.multiple = multiple;
        self
    }

    /// The same, with that least size.
    #[must_use]
    pub const fn with_least(mut self, bytes: Bytes) -> Self {
        self.least = bytes;
        self
    }

    /// The same, with that cap.
    #[must_use]
    pub const fn with_most(mut self, bytes: Bytes) -> Self {
        self.most = Some(bytes);
        self
    }

    /// What is reserved for a block of `bytes` on a device of `total`.
    pub(super) fn span(self, bytes: u64, total: u64) -> u64 {
        let most = self.most.map_or(total, Bytes::get).min(i64::MAX.cast_unsigned());
        bytes.saturating_mul(self.multiple.max(1)).max(self.least.get()).min(most).max(bytes)
    }
}

/// The memory of one block.
pub(super) struct Span {
    pub(super) backing: Box<dyn Backing>,
    /// The size of its chunks where they all have one, in bytes; else 1.
    chunk: u64,
}

impl Span {
    fn base(&self) -> u64 {
        self.backing.base()
    }

    fn class(&self) -> u32 {
        self.backing.reserved().max(1).ilog2()
    }
}

/// How blocks that own a span are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct LargePlan {
    pub(super) headroom: Headroom,
    pub(super) sizing: Sizing,
    /// Spans that are kept for later, for each doubling of their size.
    pub(super) recycle: usize,
    /// The most memory that stays under them, in bytes.
    pub(super) keep: u64,
    /// The device's memory, in bytes.
    pub(super) total: u64,
}

/// All blocks that own a span, by address, and the spans that wait for one.
#[derive(Default)]
pub(super) struct Large {
    live: HashMap<u64, Span>,
    waiting: BTreeMap<u32, Vec<Span>>,
    /// Memory under spans that wait.
    pub(super) idle: u64,
}

/// What becomes of a span whose block was freed.
pub(super) enum Fate {
    /// It waits, with its memory.
    Kept,
    /// Its memory is to be unmapped, or more than that.
    Excess(Span),
}

impl LargePlan {
    /// A new span that has `bytes`.
    pub(super) fn open(&self, ground: &Ground, bytes: u64, align: u64) -> Result<Span> {
        let granularity = ground.device.verdict().granularity();
        let contiguous = ground.device.verdict().mode() == Mode::Contiguous;
        ground.card().check_capture(None)?;
        let mut request = BackingRequest::new(&ground.pool, Bytes::new(bytes), Bytes::new(align));
        request.sizing = self.sizing;
        request.fallback = Fallback::Upfront;
        if contiguous {
            return Ok(Span { backing: ground.device.verdict().open(&request)?, chunk: 1 });
        }
        if align > granularity.get() {
            let type_name = "a block";
            return Err(Error::Alignment { type_name, align: Bytes::new(align), granularity });
        }
        request.bytes = self.headroom.span(bytes, self.total);
        let quirks = ground.device.verdict().quirks();
        if quirks.uniform_chunks_only && !matches!(self.sizing, Sizing::Uniform(_)) {
            // By the block, not by the span with all its headroom: at most an eighth of it lies idle.
            let eighth = (bytes / 8).checked_ilog2().map_or(0, |log| 1 << log);
            request.sizing = Sizing::Uniform(Bytes::new(eighth.clamp(granularity.get(), quirks.max_chunk.get())));
        }
        let mut backing = loop {
            match ground.device.verdict().open(&request) {
                Ok(backing) => break backing,
                // Less headroom is better than none of it.
                Err(Error::Reserve { .. }) if request.bytes > bytes => request.bytes = (request.bytes / 4).max(bytes),
                Err(error) => return Err(error),
            }
        };
        let growth = backing.grow(bytes)?;
        backing.settle(growth);
        let chunk = match backing.sizing() {
            Some(Sizing::Uniform(chunk)) => chunk.get(),
            _ => 1,
        };
        Ok(Span { backing, chunk })
    }

    /// Makes a span that waited hold `bytes` and little more.
    pub(super) fn adapt(&self, ground: &Ground, span: &mut Span, bytes: u64) -> Result<()> {
        if span.backing.committed() < bytes {
            ground.card().check_capture(None)?;
            let growth = span.backing.grow(bytes)?;
            span.backing.settle(growth);
        } else if span.backing.would_release(bytes) > 0 {
            ground.quiet()?;
            // SAFETY: the span holds no block, so the host has no reference; `quiet` made sure of the device.
            unsafe { span.backing.shrink(bytes) }?;
        }
        Ok(())
    }

    /// Unmaps all memory of a span that holds no block.
    pub(super) fn empty(ground: &Ground, span: &mut Span) -> Result<()> {
        if span.backing.would_release(0) > 0 {
            ground.quiet()?;
            // SAFETY: the span holds no block, so the host has no reference; `quiet` made sure of the device.
            unsafe { span.backing.shrink(0) }?;
        }
        Ok(())
    }
}

impl Large {
    /// A waiting span for a block of `bytes`, among those of the size that a new one would have: the one whose memory comes
    /// nearest. `loose` says that memory beyond it can be given back.
    pub(super) fn recycle(&mut self, bytes: u64, align: u64, span: u64, granularity: u64, loose: bool) -> Option<Span> {
        let spans = self.waiting.get_mut(&span.max(1).ilog2())?;
        let fits = |span: &Span| {
            let close = loose || span.backing.committed() <= bytes.saturating_add(bytes / 8);
            // Of chunks that are all large a small block would take too much.
            let close = close && (span.chunk <= bytes / 8 || span.chunk <= granularity);
            close && span.backing.reserved() >= bytes && span.base().is_multiple_of(align)
        };
        let found = spans.iter().enumerate().filter(|(_, span)| fits(span));
        let (number, _) = found.min_by_key(|(_, span)| span.backing.committed().abs_diff(bytes))?;
        let span = spans.swap_remove(number);
        self.idle -= span.backing.committed();
        Some(span)
    }

    pub(super) fn insert(&mut self, span: Span) -> u64 {
        let base = span.base();
        self.live.insert(base, span);
        base
    }

    /// Takes the block's span out, to be changed or freed.
    pub(super) fn remove(&mut self, address: u64) -> Option<Span> {
        self.live.remove(&address)
    }

    /// How much a block's span has; none if there is no such block.
    pub(super) fn committed_of(&self, address: u64) -> Option<u64> {
        self.live.get(&address).map(|span| span.backing.committed())
    }

    /// Lets a span wait, if there are not enough of its size and not too much memory waits already.
    pub(super) fn keep(&mut self, plan: &LargePlan, span: Span) -> Fate {
        let committed = span.backing.committed();
        let waiting = self.waiting.entry(span.class()).or_default();
        if waiting.len() < plan.recycle && self.idle + committed <= plan.keep {
            waiting.push(span);
            self.idle += committed;
            return Fate::Kept;
        }
        Fate::Excess(span)
    }

    /// Lets a span wait whatever the limits, because it cannot be taken apart just now.
    pub(super) fn keep_anyway(&mut self, span: Span) {
        self.idle += span.backing.committed();
        self.waiting.entry(span.class()).or_default().push(span);
    }

    /// All spans that wait.
    pub(super) fn take_waiting(&mut self) -> Vec<Span> {
        self.idle = 0;
        core::mem::take(&mut self.waiting).into_values().flatten().collect()
    }

    /// How many blocks there are.
    pub(super) fn blocks(&self) -> usize {
        self.live.len()
    }

    /// What blocks and waiting spans have, in bytes.
    pub(super) fn committed(&self) -> u64 {
        self.live.values().map(|span| span.backing.committed()).sum::<u64>() + self.idle
    }

    /// Addresses reserved, in bytes.
    pub(super) fn reserved(&self) -> u64 {
        let all = self.live.values().chain(self.waiting.values().flatten());
        all.map(|span| span.backing.reserved()).sum()
    }
}

impl fmt::Debug for Large {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Large")
            .field("blocks", &self.blocks())
            .field("idle", &Bytes::new(self.idle))
            .finish_non_exhaustive()
    }
}
