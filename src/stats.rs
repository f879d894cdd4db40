//! Figures of devices and buffers.

use core::fmt;

use crate::backing::Mode;
use crate::budget::BudgetUsage;
use crate::bytes::Bytes;
use crate::card::Card;
use crate::pool::{PoolStats, Sizing};

/// What one buffer has and did. Bytes are of this buffer alone.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Whether it lives in a span or in a block.
    pub mode: Mode,
    /// The sizing rule in force; none in contiguous mode.
    pub sizing: Option<Sizing>,
    /// The elements, in bytes.
    pub bytes_in_use: Bytes,
    /// What has memory under it.
    pub bytes_committed: Bytes,
    /// What is there for growth to come beyond that: mapped ahead, or waiting in hand to be mapped.
    pub bytes_ahead: Bytes,
    /// What was given up and waits for events.
    pub bytes_retiring: Bytes,
    /// Shrinks that wait for an event which was not seen to have passed.
    pub retiring: usize,
    /// What it can grow to.
    pub bytes_reserved: Bytes,
    /// Chunks under it; zero in contiguous mode.
    pub chunks: usize,
    /// Growths that had to get memory.
    pub grows: u64,
    /// Those of them for which it was there, mapped ahead or waiting for an event, so that the driver was not called.
    pub grows_without_calls: u64,
    /// Shrinks that gave memory up.
    pub shrinks: u64,
    /// How often the address changed.
    pub moves: u64,
}

/// What one device holds, at one moment. Bytes are of this process.
///
/// ```
/// use growspan::{Device, GrowableBuffer};
///
/// # fn main() -> growspan::Result<()> {
/// let device = Device::host()?;
/// let mut buffer = GrowableBuffer::<u64>::builder(&device).max_len(1 << 20).build()?;
/// buffer.grow_to(1000)?;
/// println!("{}", device.snapshot());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// The device.
    pub device: String,
    /// Addresses reserved by spans.
    pub bytes_reserved: Bytes,
    /// Mapped under spans, for their buffers.
    pub bytes_mapped: Bytes,
    /// There for growth to come: mapped ahead under spans, or waiting in hand to be mapped.
    pub bytes_ahead: Bytes,
    /// Kept in pools.
    pub bytes_pooled: Bytes,
    /// Waiting to be unmapped.
    pub bytes_retiring: Bytes,
    /// On its way between buffers, pools and the driver.
    pub bytes_in_hand: Bytes,
    /// In contiguous blocks.
    pub bytes_contiguous: Bytes,
    /// What the driver would not take back.
    pub bytes_stranded: Bytes,
    /// The most that was mapped, also ahead, and in blocks at any time.
    pub peak_bytes: Bytes,
    /// Chunks there are, mapped or pooled.
    pub chunks: u64,
    /// What the device's pools did, those that are gone left out.
    pub pools: PoolStats,
    /// Calls that change memory: spans, handles, mappings, access, blocks.
    pub driver_calls: u64,
    /// What the driver says is free; none if it does not say.
    pub free: Option<Bytes>,
    /// All the device has.
    pub total: Option<Bytes>,
    /// Open files, where chunks keep them.
    pub open_files: Option<BudgetUsage>,
    /// Memory map entries, where mappings take them.
    pub map_entries: Option<BudgetUsage>,
}

impl Snapshot {
    pub(crate) fn take(card: &Card) -> Self {
        let accounts = card.accounts();
        let memory = card.gate().memory().ok();
        let info = card.gate().info();
        // What is mapped ahead becomes a buffer's without a word, so the two are told apart here.
        let mapped = accounts.mapped.get();
        let ahead = card.mapped_ahead().min(mapped);
        // A forked child neither spends its parent's budgets nor may wait for their locks.
        let here = !card.gate().is_forked();
        Self {
            device: card.id(),
            bytes_reserved: Bytes::new(accounts.reserved.get()),
            bytes_mapped: Bytes::new(mapped - ahead),
            bytes_ahead: Bytes::new(ahead + accounts.prepared.get()),
            bytes_pooled: Bytes::new(accounts.pooled.get()),
            bytes_retiring: Bytes::new(accounts.retiring.get()),
            bytes_in_hand: Bytes::new(accounts.in_hand.get()),
            bytes_contiguous: Bytes::new(accounts.contiguous.get()),
            bytes_stranded: Bytes::new(accounts.stranded.get()),
            peak_bytes: Bytes::new(accounts.peak()),
            chunks: accounts.chunks.get(),
            pools: card.pool_stats(),
            driver_calls: card.gate().memory_calls(),
            free: memory.map(|memory| Bytes::new(memory.free)),
            total: memory.map(|memory| Bytes::new(memory.total)),
            open_files: (info.open_files_per_chunk > 0 && here).then(|| card.files().last_usage()),
            map_entries: (info.maps_per_chunk > 0 && here).then(|| card.maps().last_usage()),
        }
    }

    /// All bytes that the device gave this process, wherever they are.
    #[must_use]
    pub fn bytes_held(&self) -> Bytes {
        let parts = [
            self.bytes_mapped,
            self.bytes_ahead,
            self.bytes_pooled,
            self.bytes_retiring,
            self.bytes_in_hand,
            self.bytes_contiguous,
            self.bytes_stranded,
        ];
        Bytes::new(parts.iter().map(|part| part.get()).sum())
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: mapped {}, pooled {}, contiguous {} (peak {}), {} chunks, {} reserved",
            self.device,
            self.bytes_mapped,
            self.bytes_pooled,
            self.bytes_contiguous,
            self.peak_bytes,
            self.chunks,
            self.bytes_reserved
        )?;
        if !self.bytes_ahead.is_zero() {
            write!(f, ", ahead {}", self.bytes_ahead)?;
        }
        if !self.bytes_retiring.is_zero() {
            write!(f, ", retiring {}", self.bytes_retiring)?;
        }
        if !self.bytes_stranded.is_zero() {
            write!(f, ", stranded {}", self.bytes_stranded)?;
        }
        if let (Some(free), Some(total)) = (self.free, self.total) {
            write!(f, "; free {free} of {total}")?;
        }
        if self.pools.hits > 0 {
            write!(f, "; {} of {} chunks from pools", self.pools.hits, self.pools.hits + self.pools.misses)?;
        }
        if let Some(files) = self.open_files {
            write!(f, "; open files {} of {}", files.ours + files.others, files.limit)?;
        }
        write!(f, "; {} driver calls", self.driver_calls)
    }
}
