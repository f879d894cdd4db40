//! One buffer and what is done with it.

use bytemuck::Pod;
use growspan::{Error, Fallback, GrowableBuffer, Mode, Quiesce, Shrunk};

use crate::card::GRANULE;
use crate::case::{BufferOp, How};
use crate::model::{Model, Seen};
use crate::world::{Done, Effect, Env, seen};

/// A place for a buffer.
pub(crate) struct Slot<T> {
    max_len: usize,
    buffer: Option<GrowableBuffer<T>>,
    model: Model,
}

impl<T: Pod + Send> Slot<T> {
    pub(crate) fn new(max_len: usize) -> Self {
        Self { max_len, buffer: None, model: Model::default() }
    }

    pub(crate) fn build(&mut self, env: &Env) -> Done {
        self.model = Model::default();
        let built = GrowableBuffer::builder(&env.device).max_len(self.max_len).fallback(env.card.fallback()).build();
        let refuses = env.card.fallback() == Fallback::Refuse && env.device.verdict().mode() == Mode::Contiguous;
        Done::of(built.map(|buffer| self.buffer = Some(buffer)), !refuses && !env.card.has_no_capacity())
    }

    pub(crate) fn seen(&self) -> Option<Seen> {
        seen(self.buffer.as_ref())
    }

    pub(crate) fn check(&self) {
        if let Some(buffer) = &self.buffer {
            self.model.check(buffer);
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
        let model = &mut self.model;
        let done = match *op {
            BufferOp::Cycle => {
                let closed = self.buffer.take().map_or(Ok(()), GrowableBuffer::close);
                self.model = Model::default();
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
        };
        // Where it grew, the new elements hold anything; where a shrink could not be undone, the length has fallen.
        self.settle(len, op, done)
    }

    /// Checks the length against what was asked, and lets the model follow.
    fn settle(&mut self, was: usize, op: &BufferOp, done: Done) -> Done {
        let Some(buffer) = &self.buffer else { return done };
        let (len, max_len) = (buffer.len(), buffer.max_len());
        let wanted = match (op, &done.error) {
            // To what is still mapped, where not even undoing a shrink succeeded; a growth never costs any.
            (_, Some(Error::Rollback { .. })) if done.effect == Effect::Shrinks => was.min(buffer.capacity()),
            (_, Some(Error::DeviceLost(_))) => len.min(was),
            (_, Some(_)) => was,
            (BufferOp::GrowTo(to) | BufferOp::GrowZeroed(to), None) => was.max(to.within(max_len)),
            (BufferOp::GrowBy(more), None) => was + more.within(max_len),
            (BufferOp::Append { elements, .. }, None) => was + many(*elements),
            (BufferOp::Push(_), None) => was + 1,
            (BufferOp::Truncate(to), None) => was.min(to.within(max_len)),
            (BufferOp::ShrinkTo(to, _) | BufferOp::ShrinkExact(to, _), None) => to.within(was),
            _ => was,
        };
        assert_eq!(len, wanted, "the length after {op:?}, which ended with {:?}", done.error);
        self.model.resize(len * size_of::<T>());
        done
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
