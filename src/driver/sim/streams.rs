//! Streams with work that stays pending until someone waits for it, and events.

use std::collections::{BTreeMap, VecDeque};

/// A host pointer of a queued copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostPtr(pub(super) *mut u8);

// SAFETY: a queued copy may run on any thread that waits for it. Whoever queued it promised that the pointer is valid
// until the copy is over, on whichever thread that is, as with a real driver, whose copies run beside all threads.
unsafe impl Send for HostPtr {}

/// A piece of work on a stream.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    /// Touches a range, as a kernel would.
    Touch {
        addr: u64,
        bytes: u64,
    },
    CopyIn {
        dst: u64,
        src: HostPtr,
        bytes: u64,
    },
    CopyOut {
        dst: HostPtr,
        src: u64,
        bytes: u64,
    },
    CopyWithin {
        dst: u64,
        src: u64,
        bytes: u64,
    },
    Fill {
        dst: u64,
        value: u8,
        bytes: u64,
    },
}

impl Work {
    pub(super) const fn bytes(&self) -> u64 {
        match *self {
            Self::Touch { bytes, .. }
            | Self::CopyIn { bytes, .. }
            | Self::CopyOut { bytes, .. }
            | Self::CopyWithin { bytes, .. }
            | Self::Fill { bytes, .. } => bytes,
        }
    }

    /// Whether it touches `[addr, addr + bytes)` of the host's memory.
    fn touches_host(&self, addr: u64, bytes: u64) -> bool {
        let (Self::CopyIn { src: HostPtr(at), bytes: len, .. } | Self::CopyOut { dst: HostPtr(at), bytes: len, .. }) =
            *self
        else {
            return false;
        };
        let at = at.addr() as u64;
        at < addr.saturating_add(bytes) && addr < at.saturating_add(len)
    }

    /// Whether it touches `[addr, addr + bytes)` on the device.
    fn touches(&self, addr: u64, bytes: u64) -> bool {
        let hits = |start: u64| start < addr.saturating_add(bytes) && addr < start.saturating_add(self.bytes());
        match *self {
            Self::Touch { addr: start, .. }
            | Self::CopyIn { dst: start, .. }
            | Self::CopyOut { src: start, .. }
            | Self::Fill { dst: start, .. } => hits(start),
            Self::CopyWithin { dst, src, .. } => hits(dst) || hits(src),
        }
    }
}

#[derive(Debug, Default)]
struct Stream {
    pending: VecDeque<Work>,
    /// How much work was ever queued here.
    queued: u64,
    capturing: bool,
}

impl Stream {
    fn done(&self) -> u64 {
        self.queued - self.pending.len() as u64
    }
}

/// How far an event's stream must have come.
#[derive(Clone, Copy, Debug)]
struct Mark {
    stream: usize,
    queued: u64,
}

/// What is known of an event's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Known {
    Alive,
    Destroyed,
    Never,
}

/// All streams and events of the device.
#[derive(Debug)]
pub(super) struct Streams {
    streams: BTreeMap<usize, Stream>,
    events: BTreeMap<u64, Option<Mark>>,
    next_event: u64,
}

/// The value of the first stream made; not an address of any program, like the addresses of memory.
const FIRST: usize = 0x0180_8000_0000_0000;
const STEP: usize = 64;

impl Streams {
    pub(super) fn new() -> Self {
        Self { streams: BTreeMap::from([(0, Stream::default())]), events: BTreeMap::new(), next_event: 1 }
    }

    /// Makes a stream.
    pub(super) fn stream(&mut self) -> usize {
        // The default stream is always there.
        let stream = FIRST + (self.streams.len() - 1) * STEP;
        self.streams.insert(stream, Stream::default());
        stream
    }

    pub(super) fn all(&self) -> Vec<usize> {
        self.streams.keys().copied().collect()
    }

    pub(super) fn knows(&self, stream: usize) -> bool {
        self.streams.contains_key(&stream)
    }

    pub(super) fn is_idle(&self, stream: usize) -> bool {
        self.streams.get(&stream).is_none_or(|stream| stream.pending.is_empty())
    }

    pub(super) fn push(&mut self, stream: usize, work: Work) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.pending.push_back(work);
            stream.queued += 1;
        }
    }

    /// The next work of a stream, if it was queued before the count stood at `until`.
    pub(super) fn pop(&mut self, stream: usize, until: u64) -> Option<Work> {
        let stream = self.streams.get_mut(&stream)?;
        if stream.done() < until { stream.pending.pop_front() } else { None }
    }

    /// Forgets all work.
    pub(super) fn abandon(&mut self) {
        for stream in self.streams.values_mut() {
            stream.pending.clear();
        }
    }

    pub(super) fn pending(&self) -> usize {
        self.streams.values().map(|stream| stream.pending.len()).sum()
    }

    /// Whether pending work touches `[addr, addr + bytes)`.
    pub(super) fn touch(&self, addr: u64, bytes: u64) -> bool {
        self.streams.values().flat_map(|stream| &stream.pending).any(|work| work.touches(addr, bytes))
    }

    /// Whether a pending copy touches `[addr, addr + bytes)` of the host's memory.
    pub(super) fn touch_host(&self, addr: u64, bytes: u64) -> bool {
        self.streams.values().flat_map(|stream| &stream.pending).any(|work| work.touches_host(addr, bytes))
    }

    pub(super) fn capture(&mut self, stream: usize, on: bool) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.capturing = on;
        }
    }

    pub(super) fn is_capturing(&self, stream: usize) -> bool {
        self.streams.get(&stream).is_some_and(|stream| stream.capturing)
    }

    pub(super) fn any_capturing(&self) -> bool {
        self.streams.values().any(|stream| stream.capturing)
    }

    pub(super) fn event(&mut self) -> u64 {
        let event = self.next_event;
        self.next_event += 1;
        self.events.insert(event, None);
        event
    }

    pub(super) fn known(&self, event: u64) -> Known {
        match event {
            _ if self.events.contains_key(&event) => Known::Alive,
            1.. if event < self.next_event => Known::Destroyed,
            _ => Known::Never,
        }
    }

    pub(super) fn record(&mut self, event: u64, stream: usize) {
        let queued = self.streams.get(&stream).map_or(0, |stream| stream.queued);
        self.events.insert(event, Some(Mark { stream, queued }));
    }

    /// What has to be done for an event to be reached: a stream, and the count up to which.
    pub(super) fn mark(&self, event: u64) -> Option<(usize, u64)> {
        self.events.get(&event).copied().flatten().map(|mark| (mark.stream, mark.queued))
    }

    pub(super) fn is_reached(&self, event: u64) -> bool {
        self.mark(event)
            .is_none_or(|(stream, until)| self.streams.get(&stream).is_none_or(|stream| stream.done() >= until))
    }

    pub(super) fn destroy(&mut self, event: u64) {
        self.events.remove(&event);
    }

    pub(super) fn events(&self) -> usize {
        self.events.len()
    }
}
