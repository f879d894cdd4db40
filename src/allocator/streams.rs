//! Blocks that were freed behind work of a stream.
//!
//! ```text
//! stream 5   oldest | block, event 1 | block, event 2 | block, event 3 | newest
//! ```
//! On the same stream a block can be had again at once: what uses it next is queued behind what used it last. For
//! anybody else it waits until its event has passed.

use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::inner::Footprint;
use crate::card::Card;
use crate::device::Device;
use crate::driver::RawStream;
use crate::error::Result;
use crate::quiesce::Event;

/// How many of a stream's blocks are looked at for one that fits, the newest first.
const LOOK: usize = 64;

/// What waits on all streams of one allocator.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// How many blocks wait.
    waiting: AtomicUsize,
    lists: Mutex<Lists>,
}

#[derive(Debug, Default)]
struct Lists {
    streams: Vec<(RawStream, VecDeque<Freed>)>,
    /// Events that are not needed just now.
    events: Vec<Event>,
    /// Blocks that have passed and could not be freed just then.
    passed: Vec<u64>,
}

#[derive(Debug)]
struct Freed {
    address: u64,
    footprint: Footprint,
    /// None where it could not be recorded: then the whole device is waited for.
    event: Option<Event>,
}

impl Lists {
    fn of(&mut self, stream: RawStream) -> &mut VecDeque<Freed> {
        let number = match self.streams.iter().position(|(known, _)| *known == stream) {
            Some(number) => number,
            None => {
                self.streams.push((stream, VecDeque::new()));
                self.streams.len() - 1
            }
        };
        &mut self.streams[number].1
    }
}

impl Streams {
    #[inline]
    pub(super) fn are_waiting(&self) -> bool {
        self.waiting.load(Relaxed) > 0
    }

    /// Lets a block wait for what is queued on its stream so far.
    pub(super) fn free_later(&self, device: &Device, stream: RawStream, address: u64, footprint: Footprint) {
        let mut lists = self.lists.lock();
        let event = lists.events.pop().map_or_else(|| device.event(), Ok).and_then(|event| {
            event.record(stream)?;
            Ok(event)
        });
        let event = event.inspect_err(|error| tracing::debug!(%error, "a block waits for the whole device")).ok();
        lists.of(stream).push_back(Freed { address, footprint, event });
        self.waiting.fetch_add(1, Relaxed);
    }

    /// A block that was freed on this stream and is what is asked for.
    pub(super) fn take(&self, stream: RawStream, footprint: Footprint, align: u64) -> Option<u64> {
        let mut lists = self.lists.lock();
        let list = lists.of(stream);
        let fits = |freed: &Freed| freed.footprint == footprint && freed.address.is_multiple_of(align);
        let place = list.iter().rev().take(LOOK).position(fits)?;
        let freed = list.remove(list.len() - 1 - place)?;
        lists.events.extend(freed.event);
        self.waiting.fetch_sub(1, Relaxed);
        Some(freed.address)
    }

    /// Hands all blocks whose events have passed to `free`, which says whether it could take one. Does nothing while a
    /// graph is captured, when events may not be asked, or while another thread does the same.
    pub(super) fn passed(&self, card: &Arc<Card>, mut free: impl FnMut(u64) -> bool) {
        if !self.are_waiting() || card.check_capture(None).is_err() {
            return;
        }
        let Some(mut lists) = self.lists.try_lock() else { return };
        let Lists { streams, events, passed } = &mut *lists;
        let mut passed = core::mem::take(passed);
        for (_, list) in streams.iter_mut() {
            // A stream's events pass in order.
            while let Some(event) = list.front().and_then(|freed| freed.event.as_ref())
                && event.is_reached().unwrap_or(false)
                && let Some(freed) = list.pop_front()
            {
                passed.push(freed.address);
                events.extend(freed.event);
            }
        }
        streams.retain(|(_, list)| !list.is_empty());
        // Freeing may take other locks.
        drop(lists);
        let all = passed.len();
        passed.retain(|address| !free(*address));
        self.waiting.fetch_sub(all - passed.len(), Relaxed);
        if !passed.is_empty() {
            self.lists.lock().passed.append(&mut passed);
        }
    }

    /// Waits for the device and frees all blocks.
    ///
    /// # Errors
    /// [`Error::Capturing`](crate::Error::Capturing); what the driver says. Then all of them go on waiting.
    pub(super) fn wait(&self, card: &Arc<Card>, mut free: impl FnMut(u64)) -> Result<()> {
        let mut lists = self.lists.lock();
        card.check_capture(None)?;
        // With the lists locked, so that only those are freed that were there before the waiting.
        card.synchronize()?;
        let all = Self::empty(&mut lists);
        self.waiting.fetch_sub(all.len(), Relaxed);
        drop(lists);
        all.into_iter().for_each(&mut free);
        Ok(())
    }

    /// All blocks that wait, which wait no more. Nothing may be unmapped of them before the device was waited for.
    pub(super) fn all(&self) -> Vec<u64> {
        let all = Self::empty(&mut self.lists.lock());
        self.waiting.fetch_sub(all.len(), Relaxed);
        all
    }

    fn empty(lists: &mut Lists) -> Vec<u64> {
        let streams = core::mem::take(&mut lists.streams);
        let freed = streams.into_iter().flat_map(|(_, list)| list);
        let mut all = core::mem::take(&mut lists.passed);
        for freed in freed {
            all.push(freed.address);
            lists.events.extend(freed.event);
        }
        all
    }
}
