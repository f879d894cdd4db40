//! Memory that was given up and waits for an event before it is unmapped.
//!
//! ```text
//! base          ready          later shrinks         earlier shrinks     mapped
//!  |    in use     | waits for event 3 | waits for event 2 | waits for event 1 |
//!                  front                                                   back
//! ```
//! A buffer that grows again takes memory back from the front; what has passed is unmapped from the back. The list says
//! what waits; whoever holds the lock on the span sees to the memory.

use std::collections::VecDeque;

use crate::error::Result;

/// What memory waits for.
pub(super) trait Passing: Clone {
    /// Whether it is over.
    fn is_reached(&self) -> Result<bool>;
}

#[derive(Clone, Debug)]
struct Retiring<E> {
    /// Where it begins, in bytes from the base. It ends where the next begins.
    start: u64,
    /// None if there is nothing to wait for, or no more.
    event: Option<E>,
}

/// What of one span waits, by offset.
#[derive(Clone, Debug)]
pub(super) struct RetireList<E>(VecDeque<Retiring<E>>);

impl<E> Default for RetireList<E> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<E: Passing> RetireList<E> {
    /// Where the waiting memory begins; none if none waits.
    pub(super) fn start(&self) -> Option<u64> {
        self.0.front().map(|first| first.start)
    }

    /// How many events are waited for.
    pub(super) fn events(&self) -> usize {
        self.waiting().count()
    }

    /// The events that are waited for, the oldest first.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &E> {
        self.0.iter().rev().filter_map(|retiring| retiring.event.as_ref())
    }

    /// Lets memory from `start` up to what waits already wait for `event`, or for nothing.
    pub(super) fn push(&mut self, start: u64, event: Option<E>) {
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

    /// Where the memory begins of which all events up to the back have passed; none if the last has not. An event that has
    /// passed is let go.
    pub(super) fn passed(&mut self) -> Result<Option<u64>> {
        let mut from = None;
        for retiring in self.0.iter_mut().rev() {
            if let Some(event) = &retiring.event
                && !event.is_reached()?
            {
                break;
            }
            retiring.event = None;
            from = Some(retiring.start);
        }
        Ok(from)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use core::cell::Cell;
    use std::rc::Rc;

    use super::*;

    impl Passing for Rc<Cell<bool>> {
        fn is_reached(&self) -> Result<bool> {
            Ok(self.get())
        }
    }

    #[test]
    fn what_has_passed_is_given_up_from_the_back_and_no_further() {
        let [old, new] = [(); 2].map(|()| Rc::new(Cell::new(false)));
        let mut list = RetireList::default();
        list.push(90, None);
        list.push(60, Some(Rc::clone(&old)));
        list.push(20, Some(Rc::clone(&new)));
        assert_eq!((list.start(), list.events()), (Some(20), 2));
        assert_eq!(list.passed().unwrap(), Some(90), "there was nothing to wait for");
        new.set(true);
        assert_eq!(list.passed().unwrap(), Some(90), "the older lies above, and has not passed");
        old.set(true);
        assert_eq!(list.passed().unwrap(), Some(20));
        assert_eq!((list.events(), Rc::strong_count(&old)), (0, 1), "let go");
        list.cut(60);
        assert_eq!(list.start(), Some(20));
        list.reclaim(40);
        assert_eq!(list.start(), Some(40));
        list.cut(40);
        assert_eq!(list.start(), None);
    }
}
