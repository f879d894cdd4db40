//! What lies under a buffer: chunks in a span, or one contiguous block.

mod ahead;
mod coalesce;
mod contiguous;
mod defer;
mod exact;
mod grants;
mod hooks;
mod loan;
#[cfg(all(test, loom))]
mod models;
mod retire;
mod segmented;
mod span;

use core::fmt;
use core::time::Duration;
use std::os::fd::OwnedFd;

pub use ahead::AheadPolicy;
pub use coalesce::Coalesced;
pub use contiguous::{Fallback, FallbackContiguous};
pub use defer::RetireLimit;
pub use hooks::MapHooks;
pub(crate) use loan::{Handed, Party};
pub use segmented::Segmented;

use crate::bytes::Bytes;
use crate::error::Result;
use crate::pool::Sizing;
use crate::quiesce::Event;
use crate::range::MappedChunk;

/// Whether a buffer lives in a span or in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// Chunks under a reserved span: grows and shrinks in place, the address never moves.
    Virtual,
    /// One contiguous block: the fallback.
    Contiguous,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Virtual => "virtual",
            Self::Contiguous => "contiguous",
        })
    }
}

/// Memory that backs one buffer. All sizes are in bytes from the beginning.
///
/// A [`Verdict`](crate::Verdict) opens the right one; the crate's two are the only ones, since buffers hand out slices
/// on the strength of them.
pub trait Backing: Send + Sync + fmt::Debug + sealed::Sealed {
    /// Which kind it is.
    fn mode(&self) -> Mode;

    /// The device address of the beginning; zero while a block that may move was not allocated yet.
    fn base(&self) -> u64;

    /// How much is there now.
    fn committed(&self) -> u64;

    /// How much there can be.
    fn reserved(&self) -> u64;

    /// How often the address has changed.
    fn moves(&self) -> u64;

    /// The sizing rule in force; none for a block.
    fn sizing(&self) -> Option<Sizing>;

    /// How much is there for growth to come, beyond what is committed: mapped ahead, or waiting to be mapped.
    fn ahead(&self) -> u64;

    /// What was given up and waits for events.
    fn retiring(&self) -> Retiring;

    /// The mapped chunks in order of address, but for those mapped ahead; none for a block.
    fn chunks(&self) -> Vec<MappedChunk>;

    /// Makes sure that at least `bytes` are there. What it did can be undone until it is [settled](Self::settle).
    ///
    /// # Errors
    /// Then nothing has changed. [`Error::Capturing`](crate::Error::Capturing) where memory would have to be mapped while
    /// a graph is captured; [`Error::Ahead`](crate::Error::Ahead) for what went wrong in the background before.
    fn grow(&mut self, bytes: u64) -> Result<Growth>;

    /// Makes a growth final.
    fn settle(&mut self, growth: Growth);

    /// Takes a growth back, the latest first. Nobody may have been told of the memory.
    ///
    /// # Errors
    /// When the driver keeps some of it; it is then given up at close.
    fn undo(&mut self, growth: Growth) -> Result<()>;

    /// How much [`shrink`](Self::shrink) to `bytes` would take away; nothing has to be waited for if it is zero.
    fn would_release(&self, bytes: u64) -> u64;

    /// Gives up whole chunks above `bytes`.
    ///
    /// # Safety
    /// No work on the device and no reference of the host touches memory from `bytes` on.
    ///
    /// # Errors
    /// Then nothing has changed, or, with [`Error::Rollback`](crate::Error::Rollback),
    /// [`committed`](Self::committed) has fallen.
    unsafe fn shrink(&mut self, bytes: u64) -> Result<Shrunk>;

    /// Gives up whole chunks above `bytes` once `event` has passed, without waiting for it.
    ///
    /// # Errors
    /// As for [`shrink`](Self::shrink), if the event has passed already.
    fn shrink_later(&mut self, bytes: u64, event: &Event) -> Result<Shrunk>;

    /// Keeps memory mapped ahead of a length of `len` from now on; a block is there already.
    ///
    /// # Errors
    /// [`Error::NoThread`](crate::Error::NoThread); to turn it off, those of [`flush_ahead`](Self::flush_ahead).
    fn grow_ahead(&mut self, policy: AheadPolicy, len: u64) -> Result<()>;

    /// Takes what is needed for `bytes` of what is there for growth to come, and [looks ahead](Self::look_ahead) of that.
    /// None if it is not there, or if something has to be said first: then [`grow`](Self::grow) does it.
    fn take_ahead(&mut self, bytes: u64) -> Option<Reach>;

    /// Says how long the buffer is. Returns up to which length, no more than is committed, it need not be said again.
    fn look_ahead(&mut self, len: u64) -> u64;

    /// Gives up what is there for growth to come, until the next [`look_ahead`](Self::look_ahead). Returns how much.
    ///
    /// # Errors
    /// What the driver says; [`Error::Capturing`](crate::Error::Capturing).
    fn flush_ahead(&mut self) -> Result<Bytes>;

    /// The memory is never given back: what is not the buffer's goes, and nobody works for it any more.
    fn leave_to_itself(&mut self);

    /// A file descriptor for the mapped chunk with this number, by which another process can have it too.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`](crate::Error::OutOfBounds); what the driver says.
    fn export(&mut self, chunk: usize) -> Result<OwnedFd>;

    /// Gives up all above `bytes` rounded up to the granularity, by copying what lives in the chunk astride the end.
    ///
    /// # Safety
    /// No work on the device and no reference of the host touches the memory at all.
    ///
    /// # Errors
    /// As for [`shrink`](Self::shrink).
    unsafe fn shrink_exact(&mut self, bytes: u64) -> Result<Shrunk>;

    /// The chunks in a span, if that is what it is.
    fn as_segmented(&mut self) -> Option<&mut Segmented> {
        None
    }

    /// Gives everything back, after waiting for the device. Nothing is there afterwards. Where the device cannot be
    /// waited for, as while a graph is captured, the memory goes when it next can be.
    ///
    /// # Errors
    /// What could not be given back.
    fn close(&mut self) -> Result<()>;
}

pub(crate) mod sealed {
    /// Only the crate's own types.
    pub trait Sealed {}
    impl Sealed for super::Segmented {}
    impl Sealed for super::FallbackContiguous {}
}

/// What a [`Backing::grow`] did.
#[derive(Debug)]
#[must_use = "a growth is settled or undone"]
pub struct Growth {
    /// Committed before.
    from: u64,
    /// For each new chunk, whether it was made for this.
    fresh: Vec<bool>,
    /// The block that was left.
    old_block: Option<contiguous::Block>,
    /// What waited for events before some of it was taken back.
    retiring: Option<span::Waiting>,
    /// What the owner had before, where it takes more of a span.
    granted: u64,
    takes: bool,
    /// How many of the chunks, from the first on, were in hand.
    prepared: usize,
    /// The background is kept off until it is settled.
    held: bool,
}

impl Growth {
    const fn nothing(from: u64) -> Self {
        Self {
            from,
            fresh: Vec::new(),
            old_block: None,
            retiring: None,
            granted: 0,
            takes: false,
            prepared: 0,
            held: false,
        }
    }

    /// Waits for the events of memory that it took back: work queued before them may still write there.
    pub(crate) fn wait(&self) -> Result<()> {
        self.retiring.iter().flat_map(span::Waiting::waiting).try_for_each(|event| event.wait())
    }

    /// Whether anything new was committed.
    pub(crate) fn is_nothing(&self) -> bool {
        self.fresh.is_empty() && self.old_block.is_none() && !self.takes
    }

    /// Whether it took no call of the driver to commit it.
    pub(crate) fn was_there(&self) -> bool {
        self.fresh.is_empty() && self.takes
    }
}

/// How far a buffer reaches after it [took](Backing::take_ahead) what was there.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Reach {
    /// Committed now.
    pub committed: u64,
    /// Up to here nothing has to be looked at again.
    pub limit: u64,
    /// Whether any of it was not committed before.
    pub took: bool,
}

/// What was given up and waits for events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Retiring {
    /// How many shrinks wait for an event that was not seen to have passed.
    pub shrinks: usize,
    /// How many bytes wait.
    pub bytes: u64,
}

/// What a shrink did.
///
/// ```
/// use growspan::{Device, GrowableBuffer, Quiesce};
///
/// # fn main() -> growspan::Result<()> {
/// let mut buffer = GrowableBuffer::<u8>::builder(&Device::host()?).max_len(1 << 30).build()?;
/// buffer.grow_to(5 << 20)?;
/// let shrunk = buffer.shrink_to(3 << 20, Quiesce::Device)?;
/// assert_eq!(shrunk.to_string(), "2 MiB given up, 4 MiB stay");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shrunk {
    /// What left the buffer: to the pool, or to the driver where the pool is full.
    pub released: Bytes,
    /// What left the buffer and waits for its event.
    pub retiring: Bytes,
    /// What stays committed.
    pub committed: Bytes,
    /// How long a [deferred](crate::Quiesce::Deferred) shrink waited all the same, because too much waited already.
    pub waited: Option<Duration>,
    /// Why more than asked for stays, where it does.
    pub why: Option<String>,
}

impl fmt::Display for Shrunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} given up, ", self.released)?;
        if !self.retiring.is_zero() {
            write!(f, "{} wait for their event, ", self.retiring)?;
        }
        write!(f, "{} stay", self.committed)?;
        if let Some(waited) = self.waited {
            write!(f, ", after waiting {waited:?} for earlier ones")?;
        }
        match &self.why {
            Some(why) => write!(f, ": {why}"),
            None => Ok(()),
        }
    }
}
