//! The verdict: whether virtual memory works on a device, why not, and what it must be treated with.
//!
//! An attribute that says "supported" is not a verdict: vGPU profiles, WSL, Jetson and several ROCm versions say so and
//! fail at the first real use. The check goes through a life cycle for real, once per device, at first use. Its verdict
//! is kept for the process and selects the backing of every buffer. A later shortage of memory never changes it.

mod probe;
mod reason;
mod report;

use core::fmt;
use core::time::Duration;
use std::sync::Arc;

pub use reason::Reason;
pub use report::{Outcome, Report, Step, StepReport};

pub(crate) use probe::{asked, decide};

use crate::backing::{Backing, Fallback, FallbackContiguous, MapHooks, Mode, RetireLimit, Segmented};
use crate::bytes::Bytes;
use crate::driver::{CheckForm, Quirks};
use crate::error::{Error, Result};
use crate::pool::{ChunkPool, Ladder, Sizing};

/// What was decided for one device.
pub trait Verdict: Send + Sync + fmt::Debug {
    /// Whether buffers live in spans or in contiguous blocks.
    fn mode(&self) -> Mode;

    /// Why virtual memory is off. There always is a reason when it is.
    fn reason(&self) -> Option<&Reason>;

    /// Every step of the check with its outcome and time.
    fn report(&self) -> &Report;

    /// What the device must be treated with.
    fn quirks(&self) -> &Quirks;

    /// The smallest chunk.
    fn granularity(&self) -> Bytes;

    /// Opens the memory of one buffer.
    ///
    /// # Errors
    /// When spans cannot be reserved or the block cannot be had; [`Error::Refused`] if virtual memory is off and the
    /// request refuses to run without.
    fn open(&self, request: &BackingRequest<'_>) -> Result<Box<dyn Backing>>;
}

/// What a buffer asks of a verdict. Only [`BufferBuilder`](crate::BufferBuilder) makes one, which has checked it.
#[non_exhaustive]
pub struct BackingRequest<'a> {
    /// The most the buffer will hold, in bytes; not zero.
    pub bytes: u64,
    /// The alignment of its elements, in bytes.
    pub align: u64,
    /// How chunks are sized.
    pub sizing: Sizing,
    /// What to do where virtual memory is off.
    pub fallback: Fallback,
    /// Where chunks come from.
    pub pool: &'a ChunkPool,
    /// Who is told of chunks as they come and go.
    pub hooks: Option<Arc<dyn MapHooks>>,
    /// How much may wait for events.
    pub retire: RetireLimit,
}

impl fmt::Debug for BackingRequest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackingRequest")
            .field("bytes", &self.bytes)
            .field("align", &self.align)
            .field("sizing", &self.sizing)
            .field("fallback", &self.fallback)
            .finish_non_exhaustive()
    }
}

impl<'a> BackingRequest<'a> {
    /// A request for at most `bytes`, aligned to `align`, with chunks from `pool`, the ladder, and the default
    /// fallback.
    pub(crate) fn new(pool: &'a ChunkPool, bytes: Bytes, align: Bytes) -> Self {
        Self {
            bytes: bytes.get(),
            align: align.get(),
            sizing: Sizing::default(),
            fallback: Fallback::default(),
            pool,
            hooks: None,
            retire: RetireLimit::default(),
        }
    }
}

/// Whether a driver's word on granularity decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Granularity {
    /// A recommended granularity below 2 MiB turns virtual memory off on a GPU: it is the mark of runtimes on which it
    /// does not work.
    #[default]
    Trusted,
    /// Chunks are multiples of 2 MiB whatever the driver recommends, and the rest of the check decides.
    AtLeast2MiB,
}

/// How the check is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckOptions {
    pub(crate) form: CheckForm,
    pub(crate) granularity: Granularity,
    pub(crate) sizing: Sizing,
    /// How much memory buffers may hold together; all of the device's if none.
    pub(crate) arena: Option<Bytes>,
    /// How many buffers share it; not zero.
    pub(crate) buffers: u64,
    /// The largest span to try.
    pub(crate) span: Bytes,
    pub(crate) patience: Duration,
}

/// What the check came to. Whether virtual memory is on, and why not, stands in its report.
#[derive(Debug)]
pub(crate) struct Decided {
    pub(crate) report: Report,
    pub(crate) quirks: Quirks,
    pub(crate) granularity: u64,
}

impl Verdict for Decided {
    fn mode(&self) -> Mode {
        self.report.mode
    }

    fn reason(&self) -> Option<&Reason> {
        self.report.reason.as_ref()
    }

    fn report(&self) -> &Report {
        &self.report
    }

    fn quirks(&self) -> &Quirks {
        &self.quirks
    }

    fn granularity(&self) -> Bytes {
        Bytes::new(self.granularity)
    }

    fn open(&self, request: &BackingRequest<'_>) -> Result<Box<dyn Backing>> {
        let card = request.pool.card();
        if let Some(reason) = self.reason() {
            if request.fallback == Fallback::Refuse {
                return Err(Error::Refused { device: self.report.device.clone(), reason: reason.clone() });
            }
            return Ok(Box::new(FallbackContiguous::open(card, request.bytes, request.align, request.fallback)?));
        }
        let ladder = Ladder::new(request.sizing, request.bytes, self.granularity, &self.quirks, card.files_in_all())?;
        let (hooks, retire) = (request.hooks.clone(), request.retire);
        Ok(Box::new(Segmented::open(request.pool, ladder, self.granularity, &self.quirks, hooks, retire)?))
    }
}
