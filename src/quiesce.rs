//! How a shrink makes sure that no work on the device can touch memory about to be unmapped.

use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::card::{Card, is_gone, twice};
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
    /// Do not wait: the length falls now, and the memory is given up once the event has passed: by the background thread
    /// of the buffer's pool where there is one ([`grow_ahead`](crate::GrowableBuffer::grow_ahead) of any of its buffers
    /// starts it), else by a later operation on the device. A buffer that grows again before takes it back without a
    /// driver call; work that was queued before may then still write to it. Right if the event was recorded behind all
    /// work that touches the memory.
    ///
    /// A buffer lets 64 shrinks wait, and a quarter of the device's memory, unless it was
    /// [built otherwise](crate::BufferBuilder::max_retiring). One more waits for the oldest of them, and says so in
    /// [`Shrunk::waited`](crate::Shrunk::waited) and in the log.
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

    /// That it can be waited for on this card.
    pub(crate) fn check(&self, card: &Arc<Card>) -> Result<()> {
        match self {
            Self::Stream(stream) => card.check_stream(*stream),
            Self::Event(event) | Self::Deferred(event) => event.check(card),
            Self::Device | Self::AlreadyIdle(_) => Ok(()),
        }
    }

    /// Waits as the form says.
    pub(crate) fn wait(&self, card: &Arc<Card>) -> Result<()> {
        match self {
            Self::Device => card.synchronize(),
            Self::Stream(stream) => {
                card.check_not_capturing(*stream)?;
                // SAFETY: whoever made the raw stream promised that it is alive and of the device it is used with.
                Ok(unsafe { card.gate().synchronize_stream(*stream) }?)
            }
            Self::Event(event) | Self::Deferred(event) => event.wait(),
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
    point: Mutex<Arc<Point>>,
}

/// A driver's event. Memory that waits for it keeps it alive.
pub(crate) struct Point {
    card: Arc<Card>,
    raw: RawEvent,
    /// Whether it is ours to destroy.
    owned: bool,
    /// Whether it was ever recorded, as far as we know.
    recorded: AtomicBool,
}

impl Point {
    fn create(card: &Arc<Card>) -> Result<Arc<Self>> {
        let raw = card.gate().event_create()?;
        Ok(Arc::new(Self { card: Arc::clone(card), raw, owned: true, recorded: AtomicBool::new(false) }))
    }

    pub(crate) fn is_reached(&self) -> Result<bool> {
        // SAFETY: the event is alive until it is dropped.
        Ok(unsafe { self.card.gate().event_query(self.raw) }?)
    }

    pub(crate) fn wait(&self) -> Result<()> {
        // SAFETY: the event is alive until it is dropped.
        Ok(unsafe { self.card.gate().event_wait(self.raw) }?)
    }
}

impl Event {
    pub(crate) fn create(card: &Arc<Card>) -> Result<Self> {
        Ok(Self { point: Mutex::new(Point::create(card)?) })
    }

    /// An event that the caller keeps.
    pub(crate) fn borrowed(card: &Arc<Card>, raw: RawEvent) -> Self {
        let recorded = AtomicBool::new(true);
        Self { point: Mutex::new(Arc::new(Point { card: Arc::clone(card), raw, owned: false, recorded })) }
    }

    /// Records the event behind the work queued on `stream` so far. Memory that waits for where it was recorded before
    /// goes on waiting for that.
    ///
    /// # Errors
    /// [`Error::OtherDevice`] for a stream of a simulated device on a real one; [`Error::EventInUse`] if memory waits for
    /// an event that was made elsewhere; [`Error::Capturing`] if the stream captures a graph, of which the event would
    /// become a part that cannot be waited for; what the driver says.
    pub fn record(&self, stream: RawStream) -> Result<()> {
        let mut point = self.point.lock();
        point.card.check_stream(stream)?;
        point.card.check_not_capturing(stream)?;
        let waited_for = Arc::strong_count(&point) > 1;
        if waited_for && !point.owned {
            return Err(Error::EventInUse);
        }
        let target = if waited_for { Point::create(&point.card)? } else { Arc::clone(&point) };
        // SAFETY: the event is alive until it is dropped; whoever made the raw stream promised the same of it.
        unsafe { point.card.gate().event_record(target.raw, stream) }?;
        target.recorded.store(true, Relaxed);
        *point = target;
        Ok(())
    }

    /// Whether the work it was recorded behind is over. True as long as it was never recorded.
    ///
    /// # Errors
    /// What the driver says; an error of that work may surface here.
    pub fn is_reached(&self) -> Result<bool> {
        self.point().is_reached()
    }

    /// Waits on the host until the work it was recorded behind is over.
    ///
    /// # Errors
    /// What the driver says; an error of that work may surface here.
    pub fn wait(&self) -> Result<()> {
        self.point().wait()
    }

    /// The driver's event, for those who make other streams wait for it with calls of their own (record it with
    /// [`record`](Self::record) alone). It changes when the event is recorded again while memory waits for it.
    #[must_use]
    pub fn raw(&self) -> RawEvent {
        self.point.lock().raw
    }

    /// Where it was recorded last.
    pub(crate) fn point(&self) -> Arc<Point> {
        Arc::clone(&self.point.lock())
    }

    /// That a shrink on this card can wait for the event.
    pub(crate) fn check(&self, card: &Arc<Card>) -> Result<()> {
        let point = self.point();
        if !Arc::ptr_eq(&point.card, card) {
            return Err(Error::OtherDevice { what: "an event", theirs: point.card.id(), ours: card.id() });
        }
        // Drivers count an event that was never recorded as reached.
        if point.recorded.load(Relaxed) { Ok(()) } else { Err(Error::EventNotRecorded) }
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        // SAFETY: the event was made by this driver and is not used again; a second try comes only after the first failed.
        match twice(|| unsafe { self.card.gate().event_destroy(self.raw) }) {
            Err(error) if !is_gone(&error) => {
                tracing::warn!(device = %self.card.id(), %error, "an event could not be destroyed");
            }
            _ => {}
        }
    }
}

impl fmt::Debug for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("device", &self.card.id()).field("raw", &self.raw).finish()
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.point().fmt(f)
    }
}
