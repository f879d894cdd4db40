//! A set of two buffers, which grow and shrink as one.

use growspan::{AheadPolicy, BufferSet, Error, GrowableBuffer, Member, Mode};

use crate::buffer::{check_left, quiesce};
use crate::case::SetOp;
use crate::model::{Model, Seen};
use crate::world::{Done, Effect, Env, seen};

const ROWS: usize = 6000;
/// Elements per row of both members.
const WIDE: usize = 5;
const NARROW: usize = 3;

/// A place for a set.
pub(crate) struct SetSlot {
    set: BufferSet,
    members: Option<(Member<u16>, Member<u8>)>,
    /// Rows there can be: a contiguous member may be smaller than asked for.
    rows: usize,
    /// A member lost its end.
    torn: bool,
    models: [Model; 2],
    policy: AheadPolicy,
    /// Whether memory is or was mapped ahead.
    background: bool,
    /// How many errors of the background may be said.
    owes: u8,
}

impl SetSlot {
    pub(crate) fn new() -> Self {
        let (models, policy) = (Default::default(), AheadPolicy::Off);
        Self { set: BufferSet::new(), members: None, rows: 0, torn: false, models, policy, background: false, owes: 0 }
    }

    pub(crate) fn build(&mut self, env: &Env) -> Done {
        let fallback = env.card.fallback();
        self.policy = env.card.ahead.policy();
        self.background = self.policy != AheadPolicy::Off;
        let wide = GrowableBuffer::<u16>::builder(&env.device).max_len(ROWS * WIDE).fallback(fallback);
        let wide = wide.hooks(env.hooks());
        let narrow = GrowableBuffer::<u8>::builder(&env.device).max_len(ROWS * NARROW).fallback(fallback);
        let narrow = narrow.hooks(env.hooks());
        let both = wide.build().and_then(|wide| Ok((wide, narrow.build()?)));
        Done::of(
            both.and_then(|(wide, narrow)| {
                self.rows = (wide.max_len() / WIDE).min(narrow.max_len() / NARROW);
                self.members = Some((self.set.add(wide, WIDE)?, self.set.add(narrow, NARROW)?));
                Ok(())
            }),
            !env.card.has_no_capacity(),
        )
    }

    fn both(&self) -> Option<(&GrowableBuffer<u16>, &GrowableBuffer<u8>)> {
        let (wide, narrow) = self.members?;
        Some((self.set.get(wide).unwrap(), self.set.get(narrow).unwrap()))
    }

    pub(crate) fn seen(&self) -> [Option<Seen>; 2] {
        [seen(self.both().map(|both| both.0)), seen(self.both().map(|both| both.1))]
    }

    pub(crate) fn check(&self, within: bool) {
        if let Some((wide, narrow)) = self.both() {
            self.models[0].check(wide, within);
            self.models[1].check(narrow, within);
            let rows = self.set.rows();
            let (wides, narrows) = (wide.len(), narrow.len());
            if self.torn {
                // What could not be undone may have cost a member its end; the next growth gives it back.
                assert!(wides <= rows * WIDE && narrows <= rows * NARROW, "the members of {:?}", self.set);
            } else {
                assert_eq!((wides, narrows), (rows * WIDE, rows * NARROW), "the members of {:?}", self.set);
            }
            assert_eq!(self.set.committed().get(), wide.committed().get() + narrow.committed().get());
        }
    }

    /// What is there for growth to come.
    pub(crate) fn ahead(&self) -> u64 {
        let both = self.both().map(|(wide, narrow)| [wide.stats().bytes_ahead, narrow.stats().bytes_ahead]);
        both.into_iter().flatten().map(growspan::Bytes::get).sum()
    }

    /// Whether memory is to be mapped ahead.
    pub(crate) fn maps_ahead(&self) -> bool {
        self.policy != AheadPolicy::Off && self.both().is_some_and(|(wide, _)| wide.mode() == Mode::Virtual)
    }

    /// The background may have met errors, of each member one.
    pub(crate) fn owe(&mut self) {
        self.owes = if self.background { 2 } else { 0 };
    }

    pub(crate) fn end(&mut self) {
        self.members = None;
        self.set = BufferSet::new();
    }

    pub(crate) fn apply(&mut self, env: &Env, op: &SetOp) -> Done {
        let Some((wide, narrow)) = self.members else { return Done::ok() };
        let (rows, most) = (self.set.rows(), self.rows);
        let mut wanted = rows;
        let done = match *op {
            SetOp::GrowTo(to) => {
                let to = to.within(most);
                wanted = rows.max(to);
                Done::of(self.set.grow_to(to), to <= most).which(Effect::Grows)
            }
            SetOp::GrowBy(more) => {
                let more = more.within(most);
                wanted = rows.saturating_add(more);
                Done::of(self.set.grow_by(more), wanted <= most).which(Effect::Grows)
            }
            SetOp::Truncate(to) => {
                wanted = rows.min(to.within(most));
                self.set.truncate(to.within(most));
                Done::ok()
            }
            SetOp::ShrinkTo(to, how) => {
                let to = to.within(rows);
                let (before, waited) = (self.set.committed().get(), env.device.snapshot().bytes_retiring.get());
                let quiesce = match quiesce(env, how) {
                    Ok(quiesce) => quiesce,
                    Err(error) => return Done::of(Err::<(), Error>(error), true),
                };
                let result = self.set.shrink_to(to, &quiesce);
                if let Ok(shrunk) = &result {
                    assert_eq!(shrunk.committed, self.set.committed(), "{shrunk:?}");
                    check_left(env, shrunk, before, waited);
                }
                // Lengths fall in any case, and what could not be given up stays.
                wanted = if to <= rows { to } else { rows };
                let effect = if to <= rows { Effect::Empties } else { Effect::Nothing };
                let done = Done::of(result, to <= rows).which(effect);
                self.follow(wanted, &done);
                return done;
            }
            SetOp::Write { row, seed } => {
                let row = row.within(rows);
                let inside = row < rows;
                let (values, bytes) = ([u16::from(seed) << 7 | 1; WIDE], [seed; NARROW]);
                let result = self.set.get_mut(wide).unwrap().copy_in(row.saturating_mul(WIDE), &values);
                if result.is_ok() {
                    self.models[0].write(row * WIDE * 2, bytemuck::cast_slice(&values));
                }
                let result = result.and_then(|()| {
                    self.set.get_mut(narrow).unwrap().copy_in(row.saturating_mul(NARROW), &bytes)?;
                    self.models[1].write(row * NARROW, &bytes);
                    Ok(())
                });
                Done::of(result, inside || self.torn)
            }
            SetOp::GrowAhead(reserve) => {
                let result = self.set.grow_ahead(reserve.policy());
                // One member may have it and the other not.
                self.background |= reserve.policy() != AheadPolicy::Off;
                if result.is_ok() {
                    self.policy = reserve.policy();
                }
                Done::of(result, true).which(Effect::FlushesEach)
            }
        };
        if !env.control.strikes().is_empty() {
            // The background may have met one while this operation was on its way.
            self.owe();
        }
        if matches!(done.error, Some(Error::Ahead { .. })) {
            assert!(
                self.owes > 0 || done.is_of_a_lost_device(),
                "an error of the background that it has not met: {:?}",
                done.error
            );
            self.owes = self.owes.saturating_sub(1);
        }
        self.follow(if done.error.is_none() { wanted } else { rows }, &done);
        done
    }

    /// Lets the models follow the rows, or the members where they lost their ends.
    fn follow(&mut self, rows: usize, done: &Done) {
        let Some((wide, narrow)) = self.both() else { return };
        let (mut wides, mut narrows) = (rows * WIDE, rows * NARROW);
        if self.torn || matches!(done.error, Some(Error::Rollback { .. } | Error::DeviceLost(_))) {
            (wides, narrows) = (wides.min(wide.len()), narrows.min(narrow.len()));
            self.torn = (wides, narrows) != (rows * WIDE, rows * NARROW);
        }
        self.models[0].resize(wides * 2);
        self.models[1].resize(narrows);
    }
}
