//! How a shrink makes sure that no work on the device can touch memory about to be unmapped.

use core::fmt;
use std::sync::Arc;

use crate::card::{Card, is_gone};
use crate::driver::{RawEvent, RawStream};
use crate::error::{Error, Result};

/// How a shrink is quiesced.
///
/// Unmapping memory that queued work will touch is not refused by drivers: the call succeeds, the kernel faults, and
/// the context is lost for good. So every shrink names why that cannot happen.
///
/// On the host driver nothing runs behind the caller's back, and all forms return at once.
#[derive(Debug, Default)]
#[non_exhaustive]
pub enum Quiesce<'a> {
    /// Wait for all work of the device. Always right.
    #[default]
    Device,
    /// Wait for the work queued on one stream. Right if all work that touches the memory was queued there.
    Stream(RawStream),
    /// Wait for an event. Right if it was recorded behind all work that touches the memory.
    Event(&'a Event),
    /// The length falls now, and the memory is given up once the event has passed. Right if the event was recorded
    /// behind all work that touches the memory. Where the event has not passed yet, this version waits for it.
    Deferred(&'a Event),
    /// Do not wait at all. Only [`Quiesce::already_idle`] makes one.
    AlreadyIdle(Idle),
}

/// A promise, made in unsafe code, that nothing on the device touches the memory.
#[derive(Debug)]
pub struct Idle(());

impl Quiesce<'_> {
    /// No waiting: the caller has waited already.
    ///
    /// # Safety
    /// No work on the device, queued or running, touches the memory that the shrink gives up.
    #[must_use]
    pub const unsafe fn already_idle() -> Self {
        Self::AlreadyIdle(Idle(()))
    }

    /// Waits as the form says.
    pub(crate) fn wait(&self, card: &Arc<Card>) -> Result<()> {
        match self {
            Self::Device => Ok(card.gate().synchronize()?),
            Self::Stream(stream) => {
                card.check_stream(*stream)?;
                // SAFETY: whoever made the raw stream promised that it is alive and of the device it is used with.
                Ok(unsafe { card.gate().synchronize_stream(*stream) }?)
            }
            Self::Event(event) | Self::Deferred(event) => {
                event.check(card)?;
                event.wait()
            }
            Self::AlreadyIdle(_) => Ok(()),
        }
    }
}

/// A point in the work of a device that can be waited for. Destroyed on drop.
///
/// ```
/// use growspan::{Device, driver::RawStream};
///
/// # fn main() -> growspan::Result<()> {
/// let event = Device::host()?.event()?;
/// event.record(RawStream::DEFAULT)?;
/// event.wait()?;
/// assert!(event.is_reached()?);
/// # Ok(())
/// # }
/// ```
pub struct Event {
    card: Arc<Card>,
    raw: RawEvent,
}

impl Event {
    pub(crate) fn create(card: &Arc<Card>) -> Result<Self> {
        Ok(Self { card: Arc::clone(card), raw: card.gate().event_create()? })
    }

    /// Records the event behind the work queued on `stream` so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, stream: RawStream) -> Result<()> {
        self.card.check_stream(stream)?;
        // SAFETY: the event is alive until it is dropped; whoever made the raw stream promised the same of it.
        Ok(unsafe { self.card.gate().event_record(self.raw, stream) }?)
    }

    /// Whether the work it was recorded behind is over. True as long as it was never recorded.
    ///
    /// # Errors
    /// What the driver says; an error of that work may surface here.
    pub fn is_reached(&self) -> Result<bool> {
        // SAFETY: the event is alive until it is dropped.
        Ok(unsafe { self.card.gate().event_query(self.raw) }?)
    }

    /// Waits on the host until the work it was recorded behind is over.
    ///
    /// # Errors
    /// What the driver says; an error of that work may surface here.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive until it is dropped.
        Ok(unsafe { self.card.gate().event_wait(self.raw) }?)
    }

    /// The driver's event, for those who record or wait with calls of their own.
    #[must_use]
    pub const fn raw(&self) -> RawEvent {
        self.raw
    }

    fn check(&self, card: &Arc<Card>) -> Result<()> {
        if Arc::ptr_eq(&self.card, card) {
            return Ok(());
        }
        Err(Error::OtherDevice { what: "an event", theirs: self.card.id(), ours: card.id() })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event was made by this driver and is not used again.
        match unsafe { self.card.gate().event_destroy(self.raw) } {
            Err(error) if !is_gone(&error) => {
                tracing::warn!(device = %self.card.id(), %error, "an event could not be destroyed");
            }
            _ => {}
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("device", &self.card.id()).field("raw", &self.raw).finish()
    }
}
