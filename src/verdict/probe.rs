//! The check: a life cycle done for real, under a watchdog.
//!
//! ```text
//! base                chunk                2 x chunk
//!  |     first chunk    |    second chunk    | small |        the rest of the span stays empty
//!  w4K               w4K w4K                                   what is written, 4 KiB each
//! ```

use core::time::Duration;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::{CheckOptions, Decided, Granularity, Outcome, Reason, Report, Step, StepReport, Verdict};
use crate::backing::Mode;
use crate::bytes::Bytes;
use crate::card::{Card, check_address, twice};
use crate::driver::{CheckForm, ChunkProps, DriverError, DriverErrorKind, MemoryInfo, Quirks, RawHandle};
use crate::error::Shortage;
use crate::pool::{Sizing, uniform_size};

/// The smallest chunk on a GPU, whose pages are that large.
const LEAST_GPU_CHUNK: u64 = 2 << 20;
/// Nothing maps in larger pages. Sizes are counted in few of them, which must not overflow.
const MOST_GRANULARITY: u64 = 1 << 30;
/// What the full check maps in two chunks: enough to tell from what other programs do meanwhile.
const FULL_CHUNK: u64 = 16 << 20;
/// The smallest span that is worth having.
const LEAST_SPAN: u64 = 64 << 20;
/// What is written and read back at each place.
const SAMPLE: usize = 4096;
/// How long free memory may take to follow a release.
const SETTLE: Duration = Duration::from_millis(20);

/// Decides for one device. Never fails and never hangs: what goes wrong is the reason of the verdict.
pub(crate) fn decide(card: &Arc<Card>, options: CheckOptions) -> Box<dyn Verdict> {
    let started = Instant::now();
    let log = Arc::new(Log::default());
    let (send, receive) = channel();
    let probe = Probe {
        card: Arc::clone(card),
        options,
        log: Arc::clone(&log),
        quirks: card.gate().info().quirks.clone(),
        granularity: LEAST_GPU_CHUNK,
    };
    let not_run = |why| Reason::NotRun { why, runtime: card.gate().info().runtime.clone() };
    let thread = std::thread::Builder::new().name("growspan-check".to_owned());
    // A driver that hangs takes this thread with it and nothing else.
    let found = match thread.spawn(move || send.send(probe.run())) {
        Err(error) => Err(not_run(format!("no thread for the check: {error}"))),
        Ok(_) => receive.recv_timeout(options.patience).unwrap_or_else(|error| match error {
            RecvTimeoutError::Timeout => Err(Reason::Hang {
                step: log.current(),
                waited: options.patience,
                runtime: card.gate().info().runtime.clone(),
            }),
            RecvTimeoutError::Disconnected => Err(not_run("the check ended early".to_owned())),
        }),
    };
    verdict(card, options, &log, started, found)
}

/// Virtual memory is off without a check, because the caller wants it so.
pub(crate) fn asked(card: &Arc<Card>, options: CheckOptions) -> Box<dyn Verdict> {
    verdict(card, options, &Log::default(), Instant::now(), Err(Reason::Asked))
}

fn verdict(
    card: &Arc<Card>,
    options: CheckOptions,
    log: &Log,
    started: Instant,
    found: Result<Found, Reason>,
) -> Box<dyn Verdict> {
    let info = card.gate().info();
    let (Found { quirks, granularity }, reason) = match found {
        Ok(found) => (found, None),
        Err(reason) => (Found { quirks: info.quirks.clone(), granularity: LEAST_GPU_CHUNK }, Some(reason)),
    };
    match &reason {
        None => tracing::info!(
            device = %info.id(), name = %info.name, granularity = %Bytes::new(granularity),
            "virtual memory is on"
        ),
        Some(reason) => tracing::info!(device = %info.id(), name = %info.name, %reason, "virtual memory is off"),
    }
    let report = Report {
        device: info.id(),
        runtime: info.runtime.clone(),
        form: options.form,
        steps: log.take(),
        took: started.elapsed(),
        mode: if reason.is_none() { Mode::Virtual } else { Mode::Contiguous },
        reason,
    };
    Box::new(Decided { report, quirks, granularity })
}

/// Steps as they go, so that a hang can be placed.
#[derive(Debug, Default)]
struct Log(Mutex<(Option<Step>, Vec<StepReport>)>);

impl Log {
    fn begin(&self, step: Step) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0 = Some(step);
    }

    fn end(&self, step: Step, outcome: Outcome, took: Duration) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.push(StepReport { step, outcome, took });
    }

    fn current(&self) -> Step {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.unwrap_or(Step::Support)
    }

    /// All steps, those not reached as skipped.
    fn take(&self) -> Vec<StepReport> {
        let mut done = core::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).1);
        Step::ALL
            .into_iter()
            .map(|step| match done.iter().rposition(|report| report.step == step) {
                Some(n) => done.swap_remove(n),
                None => StepReport { step, outcome: Outcome::Skipped, took: Duration::ZERO },
            })
            .collect()
    }
}

/// What a passed check found.
struct Found {
    quirks: Quirks,
    granularity: u64,
}

struct Probe {
    card: Arc<Card>,
    options: CheckOptions,
    log: Arc<Log>,
    quirks: Quirks,
    granularity: u64,
}

/// What a life cycle holds, so that it can be given back wherever it ends.
#[derive(Default)]
struct Held {
    span: Option<(u64, u64)>,
    /// Handle, size, and where it is mapped.
    chunks: Vec<(RawHandle, u64, Option<u64>)>,
}

impl Probe {
    fn run(mut self) -> Result<Found, Reason> {
        let gate = self.card.gate();
        self.step(Step::Support, |_| {
            if let Some(what) = &self.quirks.off {
                return Err(Reason::KnownFault { what: what.clone(), runtime: self.runtime() });
            }
            gate.support().map_err(|error| Reason::NoSupport { error, runtime: self.runtime() })?;
            Ok(Outcome::Passed(String::new()))
        })?;
        self.granularity = self.find_granularity()?;
        self.step(Step::Limits, Self::check_limits)?;
        let mut result = self.life_cycle();
        if let Err(reason @ Reason::Memory { .. }) = &result {
            // Another program may have moved the counter at the same moment.
            tracing::debug!(%reason, "trying the check once more");
            result = self.life_cycle();
        }
        match result {
            // A card that is full just now says nothing of its virtual memory, and the verdict is kept for long.
            Err(Reason::Call { step, error, .. }) if self.is_full(&error) => {
                self.log.end(step, Outcome::Worked(format!("no memory to try it with: {error}")), Duration::ZERO);
            }
            result => result?,
        }
        Ok(Found { quirks: self.quirks, granularity: self.granularity })
    }

    fn runtime(&self) -> String {
        self.card.gate().info().runtime.clone()
    }

    fn full(&self) -> bool {
        self.options.form == CheckForm::Full
    }

    /// Does a step and puts it on record.
    fn step(&self, step: Step, work: impl FnOnce(&Self) -> Result<Outcome, Reason>) -> Result<(), Reason> {
        self.log.begin(step);
        let started = Instant::now();
        let (outcome, result) = match work(self) {
            Ok(outcome) => (outcome, Ok(())),
            Err(reason) => (Outcome::Failed(reason.to_string()), Err(reason)),
        };
        self.log.end(step, outcome, started.elapsed());
        result
    }

    fn failed(&self, step: Step, error: DriverError) -> Reason {
        Reason::Call { step, error, runtime: self.runtime() }
    }

    fn find_granularity(&self) -> Result<u64, Reason> {
        let mut found = 0;
        self.step(Step::Granularity, |this| {
            let info = this.card.gate().info();
            let named = this.card.gate().granularity().map_err(|error| this.failed(Step::Granularity, error))?;
            let (minimum, recommended) = (named.minimum, named.recommended);
            let orderly = minimum.is_power_of_two() && recommended.is_power_of_two() && minimum <= recommended;
            if !orderly || recommended > MOST_GRANULARITY {
                return Err(Reason::OddGranularity { minimum, recommended, runtime: this.runtime() });
            }
            let small = info.wants_2_mib && recommended < LEAST_GPU_CHUNK;
            if small && this.options.granularity == Granularity::Trusted {
                return Err(Reason::Granularity { recommended: Bytes::new(recommended), runtime: this.runtime() });
            }
            found = if small { LEAST_GPU_CHUNK } else { recommended };
            let text = format!("minimum {}, recommended {}", Bytes::new(minimum), Bytes::new(recommended));
            Ok(if small { Outcome::Worked(format!("{text}: 2 MiB taken")) } else { Outcome::Passed(text) })
        })?;
        Ok(found)
    }

    /// Open files and map entries, where chunks spend them: enough for the arena under the sizing policy, or off.
    fn check_limits(&self) -> Result<Outcome, Reason> {
        let gate = self.card.gate();
        let info = gate.info();
        if info.open_files_per_chunk == 0 && info.maps_per_chunk == 0 {
            return Ok(Outcome::Passed("chunks spend none".to_owned()));
        }
        let memory = gate.memory().map_err(|error| self.failed(Step::Limits, error))?;
        let granularity = Bytes::new(self.granularity);
        let arena = self.options.arena.unwrap_or(Bytes::new(memory.total));
        let buffers = self.options.buffers;
        let share = Bytes::new(arena.get() / buffers);
        let sizing = match self.options.sizing {
            Sizing::Ladder | Sizing::Exact if self.quirks.uniform_chunks_only => self.one_size(share),
            sizing => sizing,
        };
        let each = sizing.chunks_for(share, granularity);
        let chunks = each.saturating_mul(buffers);
        let mut seen = match buffers {
            1 => format!("{arena} takes {chunks} chunks"),
            _ => format!("{buffers} buffers of {share} take {chunks} chunks"),
        };
        if info.open_files_per_chunk > 0 {
            let per_chunk = u64::from(info.open_files_per_chunk);
            let files = self.card.files();
            files.expect_at_most((memory.total / self.granularity).saturating_mul(per_chunk));
            let usage = files.ensure(chunks.saturating_mul(per_chunk)).map_err(|shortage| Reason::OpenFiles {
                by: info.open_files_by,
                chunk: match self.options.sizing {
                    Sizing::Uniform(size) => size,
                    _ => granularity,
                },
                needed: shortage.needed,
                for_chunks: chunks,
                limit: shortage.limit,
                hard: shortage.hard,
                runtime: self.runtime(),
            })?;
            seen += &format!("; open files {} of {} (hard {})", usage.ours + usage.others, usage.limit, usage.hard);
        }
        if info.maps_per_chunk > 0 {
            let usage = self.card.maps().ensure(chunks.saturating_mul(u64::from(info.maps_per_chunk))).map_err(
                |Shortage { needed, limit, .. }| Reason::MapEntries { needed, limit, runtime: self.runtime() },
            )?;
            seen += &format!("; map entries {} of {}", usage.ours + usage.others, usage.limit);
        }
        Ok(Outcome::Passed(seen))
    }

    /// The one chunk size that a buffer of so many bytes would get, which depends on the open files there are.
    fn one_size(&self, bytes: Bytes) -> Sizing {
        let max_chunk = self.quirks.max_chunk.get().max(self.granularity);
        let size = uniform_size(bytes.get(), self.granularity, max_chunk, self.card.files_in_all());
        Sizing::Uniform(Bytes::new(size))
    }

    fn life_cycle(&mut self) -> Result<(), Reason> {
        let mut held = Held::default();
        // Asked before the first step that looks at it, and a hang is to be named all the same.
        self.log.begin(Step::MemoryTaken);
        let before = self.memory(Step::MemoryTaken);
        let result = before.and_then(|before| self.live(&mut held, before));
        self.clean_up(held);
        result
    }

    /// Whether a call failed because there truly was no memory for it.
    fn is_full(&self, error: &DriverError) -> bool {
        error.kind() == DriverErrorKind::OutOfMemory
            && self.card.gate().memory().is_ok_and(|memory| memory.free < 2 * self.granularity)
    }

    fn memory(&self, step: Step) -> Result<MemoryInfo, Reason> {
        self.card.gate().memory().map_err(|error| self.failed(step, error))
    }

    /// What one chunk of the check takes.
    fn chunk_bytes(&self, free: u64) -> u64 {
        if !self.full() {
            return self.granularity;
        }
        let most = FULL_CHUNK.min(free / 4);
        (most - most % self.granularity).max(self.granularity)
    }

    fn live(&mut self, held: &mut Held, before: MemoryInfo) -> Result<(), Reason> {
        let chunk = self.chunk_bytes(before.free);
        let mapped = 2 * chunk;
        let base = self.reserve(held, mapped + self.granularity)?;
        self.step(Step::Create, |this| this.create_two(held, chunk))?;
        self.step(Step::Map, |this| this.map_at(held, &[(0, base), (1, base + chunk)], Step::Map))?;
        self.step(Step::SetAccess, |this| this.set_access(base, mapped, Step::SetAccess))?;
        let mut fell = 0;
        if self.full() {
            self.step(Step::MemoryTaken, |this| {
                fell = before.free.saturating_sub(this.memory(Step::MemoryTaken)?.free);
                this.about((fell, mapped), mapped, fell, None)
            })?;
        }
        self.step(Step::ReadBack, |this| this.write_and_read(base, chunk))?;
        self.step(Step::Remap, |this| this.remap(held, base, chunk))?;
        if self.full() && !self.quirks.uniform_chunks_only {
            let mut uniform = false;
            self.step(Step::MixedSizes, |this| {
                let outcome = this.mix_sizes(held, base + mapped)?;
                uniform = matches!(outcome, Outcome::Worked(_));
                Ok(outcome)
            })?;
            self.quirks.uniform_chunks_only = uniform;
        }
        self.log.begin(Step::MemoryReturned);
        let low = if self.full() { self.memory(Step::MemoryReturned)?.free } else { 0 };
        let created: u64 = held.chunks.iter().map(|(_, bytes, _)| bytes).sum();
        self.step(Step::Unmap, |this| this.unmap_all(held))?;
        self.step(Step::Release, |this| this.release_all(held))?;
        if self.full() {
            self.step(Step::MemoryReturned, |this| {
                let rose = |this: &Self| Ok(this.memory(Step::MemoryReturned)?.free.saturating_sub(low).min(created));
                let mut up: u64 = rose(this)?;
                if up < mapped {
                    std::thread::sleep(SETTLE);
                    up = rose(this)?;
                }
                this.about((up, created), mapped, fell, Some(up))
            })?;
        }
        self.step(Step::FreeSpan, |this| this.free_span(held))
    }

    /// Whether free memory moved by about as much as it should: three quarters at least, since others move it too.
    fn about(&self, (moved, should): (u64, u64), mapped: u64, fell: u64, rose: Option<u64>) -> Result<Outcome, Reason> {
        let seen = format!("{} of {}", Bytes::new(moved), Bytes::new(should));
        if moved >= should - should / 4 {
            return Ok(Outcome::Passed(seen));
        }
        Err(Reason::Memory {
            word: self.card.gate().info().memory_word,
            mapped: Bytes::new(mapped),
            fell: Bytes::new(fell),
            rose: rose.map(Bytes::new),
            runtime: self.runtime(),
        })
    }

    fn reserve(&self, held: &mut Held, least: u64) -> Result<u64, Reason> {
        let mut base = 0;
        self.step(Step::Reserve, |this| {
            let wished = this.options.span.round_up(Bytes::new(this.granularity)).map_or(LEAST_SPAN, Bytes::get);
            let floor = least.max(LEAST_SPAN.min(wished));
            let mut bytes = wished.max(floor);
            let address = loop {
                match this.card.gate().reserve(bytes, this.granularity) {
                    Ok(address) => break address,
                    Err(error) if bytes / 2 < floor => return Err(this.failed(Step::Reserve, error)),
                    Err(_) => bytes = (bytes / 2).next_multiple_of(this.granularity),
                }
            };
            if address != 0 {
                held.span = Some((address, bytes));
            }
            base = check_address(address, bytes, this.granularity)
                .map_err(|what| Reason::Address { what: what.to_string(), runtime: this.runtime() })?;
            Ok(if bytes == wished {
                Outcome::Passed(Bytes::new(bytes).to_string())
            } else {
                Outcome::Worked(format!("{} of {} asked", Bytes::new(bytes), Bytes::new(wished)))
            })
        })?;
        Ok(base)
    }

    fn create(&self, held: &mut Held, bytes: u64, step: Step) -> Result<(), Reason> {
        let handle = self.card.gate().create(bytes, ChunkProps::PLAIN).map_err(|error| self.failed(step, error))?;
        held.chunks.push((handle, bytes, None));
        Ok(())
    }

    fn create_two(&self, held: &mut Held, chunk: u64) -> Result<Outcome, Reason> {
        // Only the full check looks at the files: counting them costs more than the rest of a cheap one.
        let files = || self.full().then(|| self.card.files().usage()).map(|usage| usage.ours + usage.others);
        let before = files();
        self.create(held, chunk, Step::Create)?;
        let seen = match (before, files()) {
            (Some(before), Some(after)) => format!(", {} open files each", after.saturating_sub(before)),
            _ => String::new(),
        };
        self.create(held, chunk, Step::Create)?;
        Ok(Outcome::Passed(format!("2 of {}{seen}", Bytes::new(chunk))))
    }

    fn map_at(&self, held: &mut Held, places: &[(usize, u64)], step: Step) -> Result<Outcome, Reason> {
        for &(n, address) in places {
            if let Some((handle, bytes, at)) = held.chunks.get_mut(n) {
                // SAFETY: the places are disjoint, lie within the check's own span and are free: each chunk was just
                // created or unmapped, and its whole size is mapped.
                unsafe { self.card.gate().map(address, *bytes, *handle) }.map_err(|error| self.failed(step, error))?;
                *at = Some(address);
            }
        }
        Ok(Outcome::Passed(String::new()))
    }

    fn set_access(&self, address: u64, bytes: u64, step: Step) -> Result<Outcome, Reason> {
        // SAFETY: the callers have mapped whole chunks that cover exactly this.
        unsafe { self.card.gate().set_access(address, bytes) }.map_err(|error| self.failed(step, error))?;
        if !self.quirks.settle.is_zero() {
            std::thread::sleep(self.quirks.settle);
        }
        Ok(Outcome::Passed(String::new()))
    }

    fn write(&self, address: u64, bytes: &[u8], step: Step) -> Result<(), Reason> {
        // SAFETY: the callers write within the two mapped chunks; without a stream the copy is over when this returns.
        unsafe { self.card.gate().copy_in(address, bytes.as_ptr(), bytes.len() as u64, None) }
            .map_err(|error| self.failed(step, error))
    }

    fn expect(&self, base: u64, offset: u64, wrote: &[u8], step: Step) -> Result<(), Reason> {
        let mut read = vec![0x5a; wrote.len()];
        let gate = self.card.gate();
        // SAFETY: the callers read within the two mapped chunks; the host side is a vector of that length, and without
        // a stream the copy is over when this returns.
        unsafe { gate.copy_out(read.as_mut_ptr(), base + offset, read.len() as u64, None) }
            .map_err(|error| self.failed(step, error))?;
        match wrote.iter().zip(&read).enumerate().find(|(_, (wrote, read))| wrote != read) {
            None => Ok(()),
            Some((n, (&wrote, &read))) => {
                Err(Reason::ReadBack { step, offset: offset + n as u64, wrote, read, runtime: self.runtime() })
            }
        }
    }

    /// Writes at the beginning and over the border between the chunks, and reads it all back at once.
    fn write_and_read(&self, base: u64, chunk: u64) -> Result<Outcome, Reason> {
        let sample = SAMPLE.min(usize::try_from(chunk / 2).unwrap_or(SAMPLE));
        let first = vec![0xa1; sample];
        let mut border = vec![0xa2; sample];
        border.extend(vec![0xb1; sample]);
        let border_at = chunk - sample as u64;
        self.write(base, &first, Step::ReadBack)?;
        self.write(base + border_at, &border, Step::ReadBack)?;
        self.expect(base, 0, &first, Step::ReadBack)?;
        self.expect(base, border_at, &border, Step::ReadBack)?;
        Ok(Outcome::Passed("over the border between chunks too".to_owned()))
    }

    /// Swaps the chunks. A runtime that keeps the old translation shows the first chunk where the second is now.
    fn remap(&self, held: &mut Held, base: u64, chunk: u64) -> Result<Outcome, Reason> {
        self.unmap_all(held).map_err(|reason| match reason {
            Reason::Call { error, .. } => self.failed(Step::Remap, error),
            other => other,
        })?;
        self.map_at(held, &[(1, base), (0, base + chunk)], Step::Remap)?;
        self.set_access(base, 2 * chunk, Step::Remap)?;
        let sample = SAMPLE.min(usize::try_from(chunk / 2).unwrap_or(SAMPLE));
        self.expect(base, 0, &vec![0xb1; sample], Step::Remap)?;
        self.expect(base, chunk, &vec![0xa1; sample], Step::Remap)?;
        Ok(Outcome::Passed("chunks swapped, reads follow".to_owned()))
    }

    /// Puts a chunk of another size behind the two. A runtime that refuses gets one size per span.
    fn mix_sizes(&self, held: &mut Held, address: u64) -> Result<Outcome, Reason> {
        let n = held.chunks.len();
        let first = held.chunks.first().map_or(0, |(_, bytes, _)| *bytes);
        if first == self.granularity {
            return Ok(Outcome::Skipped);
        }
        if let Err(Reason::Call { error, .. }) = self.create(held, self.granularity, Step::MixedSizes) {
            return match error.kind() {
                DriverErrorKind::OutOfMemory => Ok(Outcome::Skipped),
                _ => Err(self.failed(Step::MixedSizes, error)),
            };
        }
        let mixed = self
            .map_at(held, &[(n, address)], Step::MixedSizes)
            .and_then(|_| self.set_access(address, self.granularity, Step::MixedSizes));
        Ok(match mixed {
            Ok(_) => Outcome::Passed(String::new()),
            Err(reason) => Outcome::Worked(format!("one chunk size per span from now on: {reason}")),
        })
    }

    fn unmap_all(&self, held: &mut Held) -> Result<Outcome, Reason> {
        for (_, bytes, at) in held.chunks.iter_mut().rev() {
            if let Some(address) = *at {
                // SAFETY: the chunk is mapped exactly there, and all copies of the check were over when they returned.
                unsafe { self.card.gate().unmap(address, *bytes) }.map_err(|error| self.failed(Step::Unmap, error))?;
                *at = None;
            }
        }
        Ok(Outcome::Passed(String::new()))
    }

    fn release_all(&self, held: &mut Held) -> Result<Outcome, Reason> {
        while let Some(&(handle, ..)) = held.chunks.last() {
            // SAFETY: the handle is the check's own, not mapped any more, and is forgotten at once.
            unsafe { self.card.gate().release(handle) }.map_err(|error| self.failed(Step::Release, error))?;
            held.chunks.pop();
        }
        Ok(Outcome::Passed(String::new()))
    }

    fn free_span(&self, held: &mut Held) -> Result<Outcome, Reason> {
        if let Some((base, bytes)) = held.span {
            // SAFETY: the span is the check's own, of that size, and nothing is mapped under it any more.
            unsafe { self.card.gate().free_span(base, bytes) }.map_err(|error| self.failed(Step::FreeSpan, error))?;
            held.span = None;
        }
        Ok(Outcome::Passed(String::new()))
    }

    /// Gives back what a failed life cycle still holds, as far as the driver lets it.
    fn clean_up(&self, mut held: Held) {
        let gate = self.card.gate();
        let mut clean = true;
        for (handle, bytes, at) in held.chunks.drain(..).rev() {
            if let Some(address) = at {
                // SAFETY: as in `unmap_all`; a second try comes only after the first failed.
                if twice(|| unsafe { gate.unmap(address, bytes) }).is_err() {
                    clean = false;
                    continue;
                }
            }
            // SAFETY: as in `release_all`; a second try comes only after the first failed.
            clean &= twice(|| unsafe { gate.release(handle) }).is_ok();
        }
        if let Some((base, bytes)) = held.span.take().filter(|_| clean) {
            // SAFETY: as in `free_span`; everything under it was just taken away.
            clean = twice(|| unsafe { gate.free_span(base, bytes) }).is_ok();
        }
        if !clean {
            tracing::warn!(device = %gate.info().id(), "the driver kept some of what the start-up check held");
        }
    }
}
