//! One buffer and what is done with it.

use bytemuck::Pod;
use growspan::{AheadPolicy, Bytes, Error, Fallback, GrowableBuffer, Mode, Quiesce, Shrunk};

use crate::card::GRANULE;
use crate::case::{BufferOp, How};
use crate::model::{Model, Seen};
use crate::world::{Done, Effect, Env, seen};

/// A place for a buffer.
pub(crate) struct Slot<T> {
    max_len: usize,
    pub(crate) buffer: Option<GrowableBuffer<T>>,
    model: Model,
    pub(crate) owes: Owes,
    policy: AheadPolicy,
}

/// What the background has met of errors, and a growth has yet to say.
#[derive(Default)]
pub(crate) struct Owes {
    /// Whether memory is or was mapped ahead.
    pub(crate) background: bool,
    /// One may be said.
    pub(crate) may: bool,
    /// One must be said, by the next growth that leaves committed memory.
    pub(crate) must: bool,
}

impl<T: Pod + Send> Slot<T> {
    pub(crate) fn new(max_len: usize) -> Self {
        let (model, owes, policy) = (Model::default(), Owes::default(), AheadPolicy::Off);
        Self { max_len, buffer: None, model, owes, policy }
    }

    pub(crate) fn build(&mut self, env: &Env) -> Done {
        self.model = Model::default();
        self.policy = env.card.ahead.policy();
        self.owes = Owes { background: self.policy != AheadPolicy::Off, ..Owes::default() };
        let built = GrowableBuffer::builder(&env.device).max_len(self.max_len).fallback(env.card.fallback());
        let built = built.hooks(env.hooks()).build();
        let refuses = env.card.fallback() == Fallback::Refuse && env.device.verdict().mode() == Mode::Contiguous;
        Done::of(built.map(|buffer| self.buffer = Some(buffer)), !refuses && !env.card.has_no_capacity())
    }

    pub(crate) fn seen(&self) -> Option<Seen> {
        seen(self.buffer.as_ref())
    }

    pub(crate) fn check(&self, within: bool) {
        if let Some(buffer) = &self.buffer {
            self.model.check(buffer, within);
        }
    }

    /// What is there for growth to come.
    pub(crate) fn ahead(&self) -> Bytes {
        self.buffer.as_ref().map_or(Bytes::ZERO, |buffer| buffer.stats().bytes_ahead)
    }

    /// Whether memory is to be mapped ahead.
    pub(crate) fn maps_ahead(&self) -> bool {
        self.policy != AheadPolicy::Off && self.buffer.as_ref().is_some_and(|buffer| buffer.mode() == Mode::Virtual)
    }

    /// That as much is there as was asked for just now, where nothing stood in the way.
    pub(crate) fn check_reach(&self) {
        let Some(buffer) = self.buffer.as_ref().filter(|_| self.maps_ahead()) else { return };
        let (stats, len) = (buffer.stats(), buffer.len() as u64 * size_of::<T>() as u64);
        let target = match self.policy {
            AheadPolicy::Bytes(bytes) => bytes.get(),
            AheadPolicy::Percent(percent) => len.saturating_mul(percent.into()) / 100,
            _ => 0,
        };
        if stats.retiring == 0 {
            let wanted = len.saturating_add(target.max(GRANULE)).min(stats.bytes_reserved.get());
            let there = stats.bytes_committed.get() + stats.bytes_ahead.get();
            assert!(there >= wanted, "{wanted} bytes should be there: {stats:?}, {:?}", self.policy);
        }
    }

    pub(crate) fn end(&mut self, close: bool) {
        match self.buffer.take() {
            // What could not be given back is for the accounts to say.
            Some(buffer) if close => drop(buffer.close()),
            buffer => drop(buffer),
        }
    }

    pub(crate) fn apply(&mut self, env: &Env, op: &BufferOp) -> Done {
        let Some(buffer) = &mut self.buffer else {
            return if matches!(op, BufferOp::Cycle) { self.build(env) } else { Done::ok() };
        };
        let (len, max_len, size) = (buffer.len(), buffer.max_len(), size_of::<T>());
        let committed = buffer.committed().get();
        let model = &mut self.model;
        let done = match *op {
            BufferOp::Cycle => {
                let closed = self.buffer.take().map_or(Ok(()), GrowableBuffer::close);
                self.model = Model::default();
                self.owes = Owes::default();
                // Closing ends a buffer, whatever it says.
                return match closed {
                    Err(Error::NotReturned { .. }) | Ok(()) => Done::ok(),
                    other => Done::of(other, true),
                };
            }
            BufferOp::GrowTo(to) => {
                let to = to.within(max_len);
                Done::of(buffer.grow_to(to), to <= max_len).which(Effect::Grows)
            }
            BufferOp::GrowBy(more) => {
                let more = more.within(max_len);
                let valid = len.checked_add(more).is_some_and(|to| to <= max_len);
                Done::of(buffer.grow_by(more), valid).which(Effect::Grows)
            }
            BufferOp::GrowZeroed(to) => {
                let to = to.within(max_len);
                let result = buffer.grow_zeroed(to, None);
                if result.is_ok() {
                    model.resize(buffer.len() * size);
                    model.write(len * size, &vec![0; (buffer.len() - len) * size]);
                }
                Done::of(result, to <= max_len).which(Effect::Grows)
            }
            BufferOp::Append { elements, seed } => {
                let elements: Vec<T> = pattern(many(elements), seed);
                let result = buffer.append(&elements);
                if result.is_ok() {
                    model.resize(buffer.len() * size);
                    model.write(len * size, bytemuck::cast_slice(&elements));
                }
                Done::of(result, len + elements.len() <= max_len).which(Effect::Grows)
            }
            BufferOp::Push(seed) => {
                let element = pattern::<T>(1, seed)[0];
                let result = buffer.push(element);
                if result.is_ok() {
                    model.resize(buffer.len() * size);
                    model.write(len * size, bytemuck::bytes_of(&element));
                }
                Done::of(result, len < max_len).which(Effect::Grows)
            }
            BufferOp::Truncate(to) => {
                buffer.truncate(to.within(max_len));
                assert_eq!(buffer.len(), len.min(to.within(max_len)));
                Done::ok()
            }
            BufferOp::ShrinkTo(to, how) => {
                let to = to.within(len);
                let (was, waited) = (Seen::of(buffer), env.device.snapshot().bytes_retiring.get());
                let result = quiesce(env, how).and_then(|quiesce| buffer.shrink_to(to, quiesce));
                if let Ok(shrunk) = &result {
                    check_shrunk(env, buffer, &was, waited, to, shrunk);
                }
                Done::of(result, to <= len).which(Effect::Shrinks)
            }
            BufferOp::ShrinkExact(to, how) => {
                let to = to.within(len);
                let (was, waited) = (Seen::of(buffer), env.device.snapshot().bytes_retiring.get());
                let result = quiesce(env, how).and_then(|quiesce| buffer.shrink_exact(to, quiesce));
                if let Ok(shrunk) = &result {
                    check_shrunk(env, buffer, &was, waited, to, shrunk);
                    if shrunk.why.is_none() {
                        let exact = ((to * size) as u64).next_multiple_of(GRANULE);
                        assert!(shrunk.committed.get() <= exact, "{shrunk:?} of {exact}");
                    }
                }
                Done::of(result, to <= len).which(Effect::Shrinks)
            }
            BufferOp::CopyIn { start, elements, seed } => {
                let (start, elements) = (start.within(len), pattern::<T>(many(elements), seed));
                let result = buffer.copy_in(start, &elements);
                if result.is_ok() {
                    model.write(start * size, bytemuck::cast_slice(&elements));
                }
                Done::of(result, start.checked_add(elements.len()).is_some_and(|end| end <= len))
            }
            BufferOp::CopyWithin { from, elements, to } => {
                let (from, elements, to) = (from.within(len), elements.within(len), to.within(len));
                let inside = |start: usize| start.checked_add(elements).is_some_and(|end| end <= len);
                let valid = inside(from) && inside(to);
                let result = buffer.copy_within(from..from.saturating_add(elements), to);
                match &result {
                    Ok(()) => model.copy_within(from * size, elements * size, to * size),
                    // Part of it may have been done.
                    Err(_) if valid => model.forget(to * size, elements * size),
                    Err(_) => {}
                }
                Done::of(result, valid)
            }
            BufferOp::Fill { from, to, seed, plain } => {
                let (from, to) = (from.within(len), to.within(len));
                let value =
                    if plain { bytemuck::pod_read_unaligned(&vec![seed; size]) } else { pattern::<T>(1, seed)[0] };
                let valid = from <= len && (to <= len || to <= from);
                let result = buffer.fill(from..to, value);
                let elements = to.saturating_sub(from);
                match &result {
                    Ok(()) => model.write(from * size, &bytemuck::bytes_of(&value).repeat(elements)),
                    Err(_) if valid => model.forget(from * size, elements * size),
                    Err(_) => {}
                }
                Done::of(result, valid)
            }
            BufferOp::Work { from, to } => {
                let (from, to) = (from.within(len), to.within(len));
                if from < to && to <= len {
                    let (address, bytes) = (buffer.device_ptr() + (from * size) as u64, ((to - from) * size) as u64);
                    env.sim.queue_work(env.stream, address, bytes);
                }
                Done::ok()
            }
            BufferOp::GrowAhead(reserve) => {
                let result = buffer.grow_ahead(reserve.policy());
                if result.is_ok() {
                    self.policy = reserve.policy();
                    self.owes.background |= self.policy != AheadPolicy::Off;
                }
                Done::of(result, true).which(Effect::Flushes)
            }
            BufferOp::FlushAhead => {
                let there = buffer.stats().bytes_ahead;
                let result = buffer.flush_ahead();
                if let Ok(flushed) = &result
                    && !env.card.is_exact()
                {
                    assert_eq!(buffer.stats().bytes_ahead, Bytes::ZERO);
                    assert!(env.card.races || *flushed == there, "{flushed} flushed of {there}");
                }
                Done::of(result, true).which(Effect::Flushes)
            }
            BufferOp::Coalesce(how) => {
                let before = buffer.chunks().len();
                let result = quiesce(env, how).and_then(|quiesce| buffer.coalesce(quiesce));
                if let Ok(coalesced) = &result {
                    assert_eq!((coalesced.before, coalesced.after), (before, buffer.chunks().len()), "{coalesced:?}");
                    assert!(coalesced.after <= before && coalesced.copied.get() <= committed, "{coalesced:?}");
                }
                Done::of(result, true).which(Effect::Shrinks)
            }
        };
        let grown = done.effect == Effect::Grows && done.valid && (self.asked(len, op) * size) as u64 > committed;
        // The background may have met one while this operation was on its way.
        self.owes.may |= self.owes.background && !env.control.strikes().is_empty();
        self.owes.hear(&done, grown);
        // Where it grew, the new elements hold anything; where a shrink could not be undone, the length has fallen.
        self.settle(len, op, done)
    }

    /// The length that a growth asks for.
    fn asked(&self, was: usize, op: &BufferOp) -> usize {
        let Some(buffer) = &self.buffer else { return 0 };
        let max_len = buffer.max_len();
        match op {
            BufferOp::GrowTo(to) | BufferOp::GrowZeroed(to) => was.max(to.within(max_len)),
            BufferOp::GrowBy(more) => was.saturating_add(more.within(max_len)),
            BufferOp::Append { elements, .. } => was + many(*elements),
            BufferOp::Push(_) => was + 1,
            _ => was,
        }
    }

    /// Checks the length against what was asked, and lets the model follow.
    fn settle(&mut self, was: usize, op: &BufferOp, done: Done) -> Done {
        let wanted = match op {
            BufferOp::Truncate(to) => was.min(to.within(self.max_len)),
            BufferOp::ShrinkTo(to, _) | BufferOp::ShrinkExact(to, _) => to.within(was),
            _ => self.asked(was, op),
        };
        self.follow(was, wanted, &done, op);
        done
    }

    /// Checks the length against what it was and what it is to be if it went well, and lets the model follow.
    pub(crate) fn follow(&mut self, was: usize, wanted: usize, done: &Done, op: &dyn core::fmt::Debug) {
        let Some(buffer) = &self.buffer else { return };
        let len = buffer.len();
        let wanted = match &done.error {
            // To what is still mapped, where not even undoing a shrink succeeded; a growth never costs any.
            Some(Error::Rollback { .. }) if done.effect == Effect::Shrinks => was.min(buffer.capacity()),
            Some(Error::DeviceLost(_)) => len.min(was),
            Some(_) => was,
            None => wanted,
        };
        assert_eq!(len, wanted, "the length after {op:?}, which ended with {:?}", done.error);
        self.model.resize(len * size_of::<T>());
    }
}

impl Owes {
    /// An operation of the buffer is over; whether it left committed memory.
    pub(crate) fn hear(&mut self, done: &Done, grown: bool) {
        let said = matches!(done.error, Some(Error::Ahead { .. }));
        assert!(
            !said || self.may || done.is_of_a_lost_device(),
            "an error of the background that it has not met: {:?}",
            done.error
        );
        assert!(said || !(self.must && grown), "an error of the background was kept quiet");
        if said {
            (self.may, self.must) = (false, false);
        }
    }
}

/// Often few elements, sometimes as many as several chunks hold.
fn many(elements: u8) -> usize {
    let elements = usize::from(elements);
    elements * (1 + elements / 8)
}

/// Elements that tell where they came from.
fn pattern<T: Pod>(elements: usize, seed: u8) -> Vec<T> {
    // No period that a chunk is a multiple of, so that chunks in each other's places show.
    let byte = |n: usize| ((n as u32).wrapping_mul(0x9e37_79b1) >> 24) as u8;
    let bytes = (0..elements * size_of::<T>()).map(|n| byte(n).wrapping_add(seed));
    let bytes: Vec<u8> = bytes.collect();
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

pub(crate) fn quiesce(env: &Env, how: How) -> Result<Quiesce<'_>, Error> {
    Ok(match how {
        How::Device => Quiesce::Device,
        How::Stream => Quiesce::Stream(env.stream),
        How::Event | How::Deferred => {
            env.event.record(env.stream)?;
            if matches!(how, How::Event) { Quiesce::Event(&env.event) } else { Quiesce::Deferred(&env.event) }
        }
    })
}

/// What a shrink says has left. Some of it may have waited for events before; what went while giving that up failed
/// is not counted, since the shrink itself succeeds.
pub(crate) fn check_left(env: &Env, shrunk: &Shrunk, committed: u64, waited: u64) {
    let (left, less) = (shrunk.released.get() + shrunk.retiring.get(), committed - shrunk.committed.get());
    assert!(left <= less + waited, "{less} less, {waited} waited: {shrunk:?}");
    assert!(less <= left || !env.control.strikes().is_empty(), "{less} less: {shrunk:?}");
}

fn check_shrunk<T>(env: &Env, buffer: &GrowableBuffer<T>, was: &Seen, waited: u64, to: usize, shrunk: &Shrunk) {
    assert_eq!(shrunk.committed, buffer.committed(), "{shrunk:?}");
    check_left(env, shrunk, was.committed, waited);
    let last = buffer.chunks().last().map(|chunk| chunk.address - was.address);
    assert!(last.is_none_or(|last| last < (to * size_of::<T>()) as u64), "a chunk above the end: {shrunk:?}");
}
