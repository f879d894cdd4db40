//! What was called, and what was called wrongly.

use core::fmt;
use std::collections::VecDeque;

use crate::bytes::Bytes;
use crate::driver::{Call, DriverErrorKind, Granularities, MemoryInfo, RawEvent, RawHandle, RawStream};

/// The arguments of a call that tell something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Args {
    /// The device address; of a copy, the one that is written, if it is the device's.
    pub addr: Option<u64>,
    /// The device address a copy reads.
    pub source: Option<u64>,
    /// The size.
    pub bytes: Option<u64>,
    /// The handle.
    pub handle: Option<RawHandle>,
    /// The event.
    pub event: Option<RawEvent>,
    /// The stream.
    pub stream: Option<RawStream>,
}

impl Args {
    pub(super) const NONE: Self =
        Self { addr: None, source: None, bytes: None, handle: None, event: None, stream: None };

    pub(super) const fn addr(mut self, addr: u64) -> Self {
        self.addr = Some(addr);
        self
    }

    pub(super) const fn source(mut self, source: u64) -> Self {
        self.source = Some(source);
        self
    }

    pub(super) const fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = Some(bytes);
        self
    }

    pub(super) const fn handle(mut self, handle: RawHandle) -> Self {
        self.handle = Some(handle);
        self
    }

    pub(super) const fn event(mut self, event: RawEvent) -> Self {
        self.event = Some(event);
        self
    }

    pub(super) const fn stream(mut self, stream: Option<RawStream>) -> Self {
        self.stream = stream;
        self
    }
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It succeeded.
    Done,
    /// It succeeded and returned an address, a handle, an event, 0 or 1 for a `bool`, the free memory, or the minimum
    /// granularity.
    Gave(u64),
    /// It failed.
    Failed(DriverErrorKind),
}

/// One call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// Its number, counted from 1 over the driver's life.
    pub sequence: u64,
    /// Which call it was.
    pub call: Call,
    /// What it was called with.
    pub args: Args,
    /// How it ended.
    pub outcome: Outcome,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {}", self.sequence, self.call)?;
        let Args { addr, source, bytes, handle, event, stream } = self.args;
        if let Some(addr) = addr {
            write!(f, " at {addr:#x}")?;
        }
        if let Some(source) = source {
            write!(f, " from {source:#x}")?;
        }
        if let Some(bytes) = bytes {
            write!(f, " of {}", Bytes::new(bytes))?;
        }
        if let Some(RawHandle(handle)) = handle {
            write!(f, ", handle {handle}")?;
        }
        if let Some(RawEvent(event)) = event {
            write!(f, ", event {event}")?;
        }
        if let Some(stream) = stream {
            write!(f, ", stream {stream}")?;
        }
        match self.outcome {
            Outcome::Done => Ok(()),
            Outcome::Gave(value) => write!(f, " -> {value:#x}"),
            Outcome::Failed(kind) => write!(f, " failed: {kind}"),
        }
    }
}

/// What a caller did that it must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ViolationKind {
    /// A size was zero.
    ZeroSize,
    /// A size was not a multiple of the granularity.
    OddSize,
    /// An address or alignment was not aligned as it must be.
    Misaligned,
    /// A size was not that of the thing it was for.
    WrongSize,
    /// A handle was not the driver's.
    UnknownHandle,
    /// A handle was used or released after its release.
    ReleasedHandle,
    /// An address was not that of a span.
    UnknownSpan,
    /// An address was not that of a block.
    UnknownBlock,
    /// Host memory was page-locked that was so already, in part at least.
    AlreadyPinned,
    /// Host memory is not page-locked, or not as one piece.
    NotPinned,
    /// A span or block was freed that was freed before.
    DoubleFree,
    /// A span was freed with memory mapped under it.
    SpanInUse,
    /// Memory was mapped outside any span, or over a span's end.
    OutsideSpan,
    /// Memory was mapped where something was mapped already.
    AlreadyMapped,
    /// Nothing was mapped there.
    NotMapped,
    /// Only a part of a mapping was meant.
    PartOfMapping,
    /// A copy, or work on a stream, touched memory that is unmapped or without access. The device is lost.
    IllegalAddress,
    /// A copy's two ranges overlapped, or its host pointer was null.
    BadCopy,
    /// An event was not the driver's.
    UnknownEvent,
    /// An event was used after it was destroyed.
    DestroyedEvent,
    /// A stream was not the driver's.
    UnknownStream,
    /// Memory was unmapped or freed under work that will touch it. The call succeeds and the device is lost.
    UnderRunningWork,
    /// Memory was managed while a stream was capturing.
    DuringCapture,
}

/// A call that broke the driver's rules.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// The number of the call in the ledger; of the last one made, where a `finish` showed it.
    pub sequence: u64,
    /// The call.
    pub call: Call,
    /// What it did.
    pub kind: ViolationKind,
    /// The same in words, with the figures.
    pub detail: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {}: {:?}: {}", self.sequence, self.call, self.kind, self.detail)
    }
}

/// What a call gives, as far as the ledger writes it down.
pub(super) trait Gives {
    fn outcome(&self) -> Outcome;
}

impl Gives for () {
    fn outcome(&self) -> Outcome {
        Outcome::Done
    }
}

macro_rules! gives {
    ($( $ty:ty: |$it:ident| $value:expr; )*) => { $(
        impl Gives for $ty {
            fn outcome(&self) -> Outcome {
                let $it = self;
                Outcome::Gave($value)
            }
        }
    )* };
}

gives! {
    u64: |it| *it;
    bool: |it| u64::from(*it);
    RawHandle: |it| it.0;
    RawEvent: |it| it.0;
    Granularities: |it| it.minimum;
    MemoryInfo: |it| it.free;
}

/// The last calls, the counts of all of them, and the violations.
#[derive(Debug)]
pub(super) struct Ledger {
    entries: VecDeque<Entry>,
    keep: usize,
    sequence: u64,
    counts: [u64; Call::ALL.len()],
    pub(super) violations: Vec<Violation>,
}

impl Ledger {
    pub(super) fn new(keep: usize) -> Self {
        Self { entries: VecDeque::new(), keep, sequence: 0, counts: [0; Call::ALL.len()], violations: Vec::new() }
    }

    /// Numbers and counts a call that begins.
    pub(super) fn begin(&mut self, call: Call) -> u64 {
        self.sequence += 1;
        self.counts[call as usize] += 1;
        self.sequence
    }

    /// Puts down what the call that began last did against the rules.
    pub(super) fn violation(&mut self, call: Call, kind: ViolationKind, detail: String) {
        self.violations.push(Violation { sequence: self.sequence, call, kind, detail });
    }

    pub(super) fn end(&mut self, entry: Entry) {
        if self.keep == 0 {
            return;
        }
        if self.entries.len() == self.keep {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    pub(super) fn entries(&self) -> Vec<Entry> {
        self.entries.iter().cloned().collect()
    }

    pub(super) fn count(&self, call: Call) -> u64 {
        self.counts[call as usize]
    }

    /// Forgets entries and counts. The numbers go on, and violations stay.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.counts = [0; Call::ALL.len()];
    }
}
