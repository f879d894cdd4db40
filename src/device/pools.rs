//! A device's pools, and chunks out of them.

use std::sync::Arc;

use super::Device;
use crate::bytes::Bytes;
use crate::card::Card;
use crate::driver::ChunkProps;
use crate::error::{Error, Result};
use crate::pool::{Chunk, ChunkPool, Ladder, PoolPolicy, Prewarm, Prewarmed};
use crate::range::ReservedRange;

/// The share of a device's memory that a pool keeps unless told otherwise.
const KEEP_SHARE: u64 = 4;

/// The policy, with the usual limit if it has none.
pub(super) fn with_limit(card: &Card, policy: PoolPolicy) -> Result<PoolPolicy> {
    if policy.has_limit() {
        return Ok(policy);
    }
    Ok(policy.or_keep(card.gate().memory()?.total / KEEP_SHARE))
}

impl Device {
    /// The pool that buffers of this device share.
    #[must_use]
    pub fn pool(&self) -> &ChunkPool {
        &self.inner.pool
    }

    /// A pool of its own: for chunks with other properties, or that must not mix with others. It keeps what `policy` says;
    /// a size is one: at most that.
    ///
    /// Properties are tried one by one, with a chunk of their own: that a device names one as supported does not mean
    /// that it works (WSL refuses access to memory made for RDMA). Only those that fail are left out;
    /// [`ChunkPool::left_out`] says which and why.
    #[must_use]
    pub fn new_pool(&self, wanted: ChunkProps, policy: impl Into<PoolPolicy>) -> ChunkPool {
        let mut props = ChunkProps::PLAIN;
        let mut left_out = Vec::new();
        for (name, with) in wanted.one_by_one() {
            let candidate = with(props);
            match self.require_virtual().and_then(|granularity| self.try_props(candidate, granularity)) {
                Ok(()) => props = candidate,
                Err(why) => {
                    tracing::info!(device = %self.info().id(), property = name, %why, "left out of a pool");
                    left_out.push((name, why.to_string()));
                }
            }
        }
        let policy = policy.into();
        // A device that does not tell its memory was opened with a limit, and this pool needs one too.
        let policy = with_limit(&self.inner.card, policy).unwrap_or(policy);
        ChunkPool::new(&self.inner.card, props, policy, left_out)
    }

    /// One chunk with these properties through its whole life. A card that is full says nothing against them.
    fn try_props(&self, props: ChunkProps, granularity: Bytes) -> Result<()> {
        let card = &self.inner.card;
        let chunk = match Chunk::create(card, granularity.get(), props) {
            Err(Error::OutOfMemory(figures)) if figures.free < granularity => return Ok(()),
            chunk => chunk?,
        };
        let mut range = ReservedRange::reserve(card, granularity.get(), granularity.get())?;
        let appended = range.append(vec![chunk]);
        // Nobody was told of the memory, so there is nothing to wait for.
        let torn = range.tear_down(true, drop);
        appended.map_err(Error::from).and(torn)
    }

    /// A chunk of `bytes`, a multiple of the granularity: from the pool if it keeps one of that size, else a new one.
    /// When memory or open files run out, the pool is emptied and it is tried once more.
    ///
    /// # Errors
    /// [`Error::ChunkSize`]; [`Error::OutOfMemory`] or [`Error::OutOfFiles`] with the figures; [`Error::Refused`] where
    /// virtual memory is off; what the driver says.
    pub fn chunk(&self, bytes: Bytes) -> Result<Chunk> {
        self.chunk_from(self.pool(), bytes)
    }

    /// The same from another pool of this device, with its properties.
    ///
    /// # Errors
    /// As for [`chunk`](Self::chunk); [`Error::OtherDevice`].
    pub fn chunk_from(&self, pool: &ChunkPool, bytes: Bytes) -> Result<Chunk> {
        let granularity = self.require_own(pool)?;
        self.check_chunk(bytes, granularity)?;
        pool.take_one(bytes.get()).map(|taken| taken.chunk)
    }

    /// Makes chunks before they are needed and keeps them in the device's pool, so that buffers that grow later find them
    /// there. What is kept already counts; nothing is mapped.
    ///
    /// It goes as far as the pool's [`PoolPolicy`] lets chunks stay and as memory goes, and the result says what is missing
    /// and why. Nobody gives way for it: what other pools keep stays there.
    ///
    /// ```
    /// use growspan::driver::host::HostOptions;
    /// use growspan::{Bytes, DeviceOptions, GrowableBuffer, Prewarm};
    ///
    /// # fn main() -> growspan::Result<()> {
    /// let device = DeviceOptions::new().host(HostOptions::default().with_capacity(Bytes::mib(64)))?;
    /// let warm = device.prewarm(Prewarm::span(Bytes::mib(12)))?;
    /// assert_eq!(warm.to_string(), "12 MiB made in 6 chunks, 0 B were there");
    /// let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(1 << 30).build()?;
    /// buffer.grow_to(12 << 20)?;
    /// assert_eq!(device.pool().stats().misses, 0);
    ///
    /// // The pool of this device keeps a quarter of its 64 MiB.
    /// let more = device.prewarm(Prewarm::Chunks { size: Bytes::mib(4), count: 6 })?;
    /// assert_eq!((more.made, more.missing), (Bytes::mib(16), Bytes::mib(8)));
    /// println!("{more}"); // ... 8 MiB are missing: the pool keeps 16 MiB of 16 MiB at most; ...
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::ChunkSize`], [`Error::Overflow`]; [`Error::Refused`] where virtual memory is off; [`Error::Capturing`]; what
    /// the driver says. Nothing is made then.
    pub fn prewarm(&self, what: Prewarm) -> Result<Prewarmed> {
        self.prewarm_in(self.pool(), what)
    }

    /// The same in another pool of this device, with its properties.
    ///
    /// # Errors
    /// As for [`prewarm`](Self::prewarm); [`Error::OtherDevice`].
    pub fn prewarm_in(&self, pool: &ChunkPool, what: Prewarm) -> Result<Prewarmed> {
        let granularity = self.require_own(pool)?;
        self.inner.card.check_capture(None)?;
        match what {
            Prewarm::Span { bytes, sizing } => {
                let sizing = sizing.unwrap_or(self.default_sizing());
                let (quirks, files) = (self.verdict().quirks(), self.inner.card.files_in_all());
                let ladder = Ladder::new(sizing, bytes.get(), granularity.get(), quirks, files)?;
                // A buffer that is built for more does not end here with a chunk cut short.
                pool.prewarm(ladder.without_end().sizes(0, bytes.get()), ladder.span())
            }
            Prewarm::Chunks { size, count } => {
                self.check_chunk(size, granularity)?;
                let wanted = size.get().checked_mul(count);
                let overflow = Error::Overflow { what: "a prewarming", count, size: size.get() };
                let wanted = wanted.ok_or(overflow)?;
                pool.prewarm((0..count).map(|_| size.get()), wanted)
            }
        }
    }

    /// The granularity, for a pool of this device.
    fn require_own(&self, pool: &ChunkPool) -> Result<Bytes> {
        if !Arc::ptr_eq(pool.card(), &self.inner.card) {
            return Err(Error::OtherDevice { what: "a pool", theirs: pool.card().id(), ours: self.info().id() });
        }
        self.require_virtual()
    }

    /// That the device maps chunks of this size.
    fn check_chunk(&self, bytes: Bytes, granularity: Bytes) -> Result<()> {
        let max = self.verdict().quirks().max_chunk;
        if bytes.is_zero() || !bytes.get().is_multiple_of(granularity.get()) || bytes > max {
            return Err(Error::ChunkSize { asked: bytes, granularity, max });
        }
        Ok(())
    }
}
