//! Streams that are as lazy as streams may be: work waits until something makes it go.

use std::collections::{BTreeMap, VecDeque};

use crate::abi::{STREAM_NON_BLOCKING, code};
use crate::capture::Capture;
use crate::misuse::misuse;
use crate::runtime::Call;

/// Numbers that programs pass for the null stream and its kind; a thread's own default stream is taken for it too.
const NULL_STREAMS: u64 = 2;

/// What there is to do.
#[derive(Debug)]
pub(crate) enum Work {
    /// Host to device; the bytes were taken when it was queued.
    Upload { to: usize, data: Vec<u8> },
    /// Host to device, from page-locked memory.
    Fetch { to: usize, host: usize, len: usize },
    /// Device to host.
    Download { from: usize, len: usize, host: usize },
    /// Device to device.
    Copy { to: usize, from: usize, len: usize },
    /// The same byte all over.
    Fill { to: usize, value: u8, len: usize },
    /// The event passes.
    Record { event: u64 },
}

impl Work {
    fn touches(&self, addr: usize, size: usize) -> bool {
        let meets = |at: usize, len: usize| at < addr + size && addr < at + len;
        match self {
            Self::Upload { to, data } => meets(*to, data.len()),
            Self::Fetch { to, len, .. } => meets(*to, *len),
            Self::Download { from, len, .. } => meets(*from, *len),
            Self::Copy { to, from, len } => meets(*to, *len) || meets(*from, *len),
            Self::Fill { to, len, .. } => meets(*to, *len),
            Self::Record { .. } => false,
        }
    }

    fn touches_host(&self, addr: usize, size: usize) -> bool {
        match self {
            Self::Fetch { host, len, .. } | Self::Download { host, len, .. } => {
                *host < addr + size && addr < *host + *len
            }
            _ => false,
        }
    }
}

/// Work in a queue.
#[derive(Debug)]
pub(crate) struct Op {
    /// Grows with every piece of work.
    pub(crate) seq: u64,
    /// The function that queued it.
    pub(crate) by: &'static str,
    pub(crate) work: Work,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamKind {
    Null,
    /// Ordered with the null stream.
    Blocking,
    NonBlocking,
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) kind: StreamKind,
    pub(crate) capture: Option<Capture>,
    queue: VecDeque<Op>,
    /// It is there for what is left in its queue.
    destroyed: bool,
}

#[derive(Debug)]
struct Event {
    device: usize,
    /// The stream and the number of the latest record that has not been passed.
    waits_for: Option<(u64, u64)>,
    /// The latest record went into a graph.
    captured: bool,
}

/// All streams and events. Device `d` has its null stream under the number `d + 1`.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    seq: u64,
}

fn null_of(device: usize) -> u64 {
    device as u64 + 1
}

impl Streams {
    pub(crate) fn new(devices: usize) -> Self {
        let null = |device| (null_of(device), Stream::new(device, StreamKind::Null));
        Self { streams: (0..devices).map(null).collect(), events: BTreeMap::new(), seq: 0 }
    }

    /// Which function queued work that is not done and uses memory of the range.
    pub(crate) fn touching(&self, addr: usize, size: usize) -> Option<&'static str> {
        let mut ops = self.streams.values().flat_map(|stream| &stream.queue);
        ops.find(|op| op.work.touches(addr, size)).map(|op| op.by)
    }

    /// Which function queued work that is not done and uses the host's memory in the range.
    pub(crate) fn touching_host(&self, addr: usize, size: usize) -> Option<&'static str> {
        let mut ops = self.streams.values().flat_map(|stream| &stream.queue);
        ops.find(|op| op.work.touches_host(addr, size)).map(|op| op.by)
    }

    /// Streams that a caller made and has, and events.
    pub(crate) fn figures(&self, device: usize) -> (u64, u64) {
        let is_the_callers = |s: &&Stream| s.device == device && s.kind != StreamKind::Null && !s.destroyed;
        let streams = self.streams.values().filter(is_the_callers).count();
        let events = self.events.values().filter(|event| event.device == device).count();
        (streams as u64, events as u64)
    }

    /// The stream whose front must go before anything else of `id`: `id` itself, if nothing is before it.
    fn first_to_go(&self, mut id: u64) -> Option<u64> {
        loop {
            let stream = self.streams.get(&id)?;
            let seq = stream.queue.front()?.seq;
            let earlier = |other: u64| self.streams.get(&other)?.queue.front().filter(|op| op.seq < seq).map(|_| other);
            let before = match stream.kind {
                StreamKind::NonBlocking => None,
                StreamKind::Blocking => earlier(null_of(stream.device)),
                StreamKind::Null => self.blocking_of(stream.device).find_map(earlier),
            };
            match before {
                // Numbers only fall, so this ends.
                Some(other) => id = other,
                None => return Some(id),
            }
        }
    }

    pub(crate) fn blocking_of(&self, device: usize) -> impl Iterator<Item = u64> {
        let is_one = move |s: &Stream| s.device == device && s.kind == StreamKind::Blocking;
        self.streams.iter().filter(move |(_, s)| is_one(s)).map(|(id, _)| *id)
    }

    fn pop(&mut self, id: u64) -> Option<(usize, Op)> {
        let stream = self.streams.get_mut(&id)?;
        let op = stream.queue.pop_front()?;
        let device = stream.device;
        if stream.destroyed && stream.queue.is_empty() {
            self.streams.remove(&id);
        }
        Some((device, op))
    }

    fn pass(&mut self, event: u64, seq: u64) {
        if let Some(event) = self.events.get_mut(&event)
            && event.waits_for.is_some_and(|(_, awaited)| awaited == seq)
        {
            event.waits_for = None;
        }
    }
}

impl Stream {
    fn new(device: usize, kind: StreamKind) -> Self {
        Self { device, kind, capture: None, queue: VecDeque::new(), destroyed: false }
    }
}

impl Call<'_> {
    /// The number of the stream that the caller means, which must be of the current device.
    pub(crate) fn stream_id(&self, stream: u64) -> u64 {
        if stream <= NULL_STREAMS {
            return null_of(self.thread.device);
        }
        match self.state.streams.streams.get(&stream) {
            Some(s) if s.kind != StreamKind::Null && !s.destroyed => {
                if s.device != self.thread.device {
                    let (device, current) = (s.device, self.thread.device);
                    self.misuse(format_args!("a stream of device {device} while device {current} is current"));
                }
                stream
            }
            _ => self.misuse(format_args!("{stream:#x} is no stream, or one that has been destroyed")),
        }
    }

    /// The stream of a number of [`Call::stream_id`].
    pub(crate) fn stream_mut(&mut self, id: u64) -> &mut Stream {
        let name = self.name;
        let missing = || misuse(name, format_args!("the stream {id:#x} is gone"));
        self.state.streams.streams.get_mut(&id).unwrap_or_else(missing)
    }

    fn event(&mut self, id: u64) -> &mut Event {
        let (name, current) = (self.name, self.thread.device);
        match self.state.streams.events.get_mut(&id) {
            None => misuse(name, format_args!("{id:#x} is no event, or one that has been destroyed")),
            Some(event) if event.device != current => {
                let device = event.device;
                misuse(name, format_args!("an event of device {device} while device {current} is current"))
            }
            Some(event) => event,
        }
    }

    pub(crate) fn stream_create(&mut self, flags: u32) -> Result<u64, u32> {
        let kind = match flags {
            0 => StreamKind::Blocking,
            STREAM_NON_BLOCKING => StreamKind::NonBlocking,
            _ => return Err(code::INVALID_VALUE),
        };
        let id = self.state.fresh_id();
        self.state.streams.streams.insert(id, Stream::new(self.thread.device, kind));
        Ok(id)
    }

    pub(crate) fn stream_destroy(&mut self, stream: u64) -> Result<(), u32> {
        if stream <= NULL_STREAMS {
            return Err(code::INVALID_VALUE);
        }
        let id = self.stream_id(stream);
        let stream = self.stream_mut(id);
        stream.destroyed = true;
        stream.capture = None;
        if stream.queue.is_empty() {
            self.state.streams.streams.remove(&id);
        }
        Ok(())
    }

    /// Queues work on a stream of [`Call::stream_id`]; during a capture it goes into the graph, which nobody runs.
    pub(crate) fn queue(&mut self, id: u64, work: Work) -> Result<(), u32> {
        if self.goes_into_a_graph(id)? {
            if let Work::Record { event } = work {
                self.event(event).captured = true;
            }
            return Ok(());
        }
        let by = self.name;
        self.state.streams.seq += 1;
        let seq = self.state.streams.seq;
        if let Work::Record { event } = work {
            let event = self.event(event);
            event.captured = false;
            event.waits_for = Some((id, seq));
        }
        self.stream_mut(id).queue.push_back(Op { seq, by, work });
        Ok(())
    }

    /// Does one thing: the next of the stream, or something that comes before it.
    fn go_on(&mut self, id: u64) -> bool {
        let Some(first) = self.state.streams.first_to_go(id) else { return false };
        let Some((device, op)) = self.state.streams.pop(first) else { return false };
        match op.work {
            Work::Record { event } => self.state.streams.pass(event, op.seq),
            work => self.perform(device, op.by, work),
        }
        true
    }

    fn drain(&mut self, id: u64) {
        while self.go_on(id) {}
    }

    pub(crate) fn stream_synchronize(&mut self, stream: u64) -> Result<(), u32> {
        let id = self.stream_id(stream);
        self.refuse_wait_for_capture(id)?;
        if self.stream_mut(id).kind == StreamKind::Null {
            let blocking: Vec<u64> = self.state.streams.blocking_of(self.thread.device).collect();
            for id in blocking {
                self.drain(id);
            }
        }
        self.drain(id);
        Ok(())
    }

    pub(crate) fn device_synchronize(&mut self) -> Result<(), u32> {
        self.refuse_in_capture()?;
        let device = self.thread.device;
        let all = self.state.streams.streams.iter().filter(|(_, s)| s.device == device);
        let all: Vec<u64> = all.map(|(id, _)| *id).collect();
        for id in all {
            self.drain(id);
        }
        Ok(())
    }

    pub(crate) fn event_create(&mut self, flags: u32) -> Result<u64, u32> {
        // Blocking waits, no timing, between processes, and the two of AMD's own.
        const KNOWN: u32 = 0x1 | 0x2 | 0x4 | 0x4000_0000 | 0x8000_0000;
        if flags & !KNOWN != 0 {
            return Err(code::INVALID_VALUE);
        }
        let id = self.state.fresh_id();
        let event = Event { device: self.thread.device, waits_for: None, captured: false };
        self.state.streams.events.insert(id, event);
        Ok(id)
    }

    pub(crate) fn event_destroy(&mut self, event: u64) {
        self.event(event);
        self.state.streams.events.remove(&event);
    }

    pub(crate) fn event_record(&mut self, event: u64, stream: u64) -> Result<(), u32> {
        self.event(event);
        let id = self.stream_id(stream);
        self.queue(id, Work::Record { event })
    }

    /// One piece of work goes on per question, so that asking gets somewhere.
    pub(crate) fn event_query(&mut self, event: u64) -> Result<(), u32> {
        let Some((stream, _)) = self.awaited(event)? else { return Ok(()) };
        self.go_on(stream);
        if self.event(event).waits_for.is_none() { Ok(()) } else { Err(code::NOT_READY) }
    }

    pub(crate) fn event_synchronize(&mut self, event: u64) -> Result<(), u32> {
        while let Some((stream, _)) = self.awaited(event)? {
            if !self.go_on(stream) {
                break;
            }
        }
        Ok(())
    }

    fn awaited(&mut self, event: u64) -> Result<Option<(u64, u64)>, u32> {
        let event = self.event(event);
        if event.captured { Err(code::CAPTURED_EVENT) } else { Ok(event.waits_for) }
    }
}
