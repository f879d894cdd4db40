//! Memory that was given up and waits for an event before it is unmapped.
//!
//! ```text
//! base          committed      later shrinks         earlier shrinks     mapped
//!  |    in use     | waits for event 3 | waits for event 2 | waits for event 1 |
//!                  front                                                   back
//! ```
//! A buffer that grows again takes memory back from the front; what has passed is unmapped from the back.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::Result;
use crate::quiesce::Point;

/// The most entries of one buffer. One more waits for the oldest.
const MOST: usize = 64;

#[derive(Clone, Debug)]
struct Retiring {
    /// Where it begins, in bytes from the base. It ends where the next begins.
    start: u64,
    event: Arc<Point>,
}

/// What of one span waits, by offset.
#[derive(Clone, Debug, Default)]
pub(super) struct RetireList(VecDeque<Retiring>);

impl RetireList {
    /// Where the waiting memory begins; none if none waits.
    pub(super) fn start(&self) -> Option<u64> {
        self.0.front().map(|first| first.start)
    }

    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= MOST
    }

    /// Lets memory from `start` up to what waits already wait for `event`.
    pub(super) fn push(&mut self, start: u64, event: Arc<Point>) {
        self.0.push_front(Retiring { start, event });
    }

    /// Takes memory below `end` out of the list.
    pub(super) fn reclaim(&mut self, end: u64) {
        while let Some(first) = self.0.front() {
            match self.0.get(1) {
                Some(second) if second.start <= end => {
                    self.0.pop_front();
                }
                _ if first.start < end => {
                    if let Some(first) = self.0.front_mut() {
                        first.start = end;
                    }
                    return;
                }
                _ => return,
            }
        }
    }

    /// Forgets what lies at or above `mapped`.
    pub(super) fn cut(&mut self, mapped: u64) {
        while self.0.back().is_some_and(|last| last.start >= mapped) {
            self.0.pop_back();
        }
    }

    /// Where the memory begins of which all events up to the back have passed; none if the last has not.
    pub(super) fn passed(&self) -> Result<Option<u64>> {
        let mut from = None;
        for retiring in self.0.iter().rev() {
            if !retiring.event.is_reached()? {
                break;
            }
            from = Some(retiring.start);
        }
        Ok(from)
    }

    /// Waits for the oldest event.
    pub(super) fn wait_for_oldest(&self) -> Result<()> {
        self.0.back().map_or(Ok(()), |last| last.event.wait())
    }

    /// Waits for all events.
    pub(super) fn wait_for_all(&self) -> Result<()> {
        self.0.iter().try_for_each(|retiring| retiring.event.wait())
    }
}
