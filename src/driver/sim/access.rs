//! What the device finds at an address.

use std::collections::BTreeMap;

use crate::driver::RawStream;

use super::ledger::ViolationKind;
use super::memory::Extent;
use super::state::{State, Step, Stop, broken};
use super::streams::{HostPtr, Known, Work};

/// Translations that outlived their mapping.
#[derive(Debug, Default)]
pub(super) struct Stale(BTreeMap<u64, Translation>);

/// `[start, end)` leads to `chunk`, whose first byte was mapped at `base`.
#[derive(Clone, Copy, Debug)]
struct Translation {
    end: u64,
    chunk: u64,
    base: u64,
}

impl Stale {
    /// A mapping of `chunk` is gone, and the device goes on believing in it where it did not believe in an older one.
    pub(super) fn remember(&mut self, addr: u64, bytes: u64, chunk: u64) {
        let (mut at, end) = (addr, addr + bytes);
        while at < end {
            let (stop, known) = self.next(at, end);
            if known.is_none() {
                self.0.insert(at, Translation { end: stop, chunk, base: addr });
            }
            at = stop;
        }
    }

    /// How far from `at` up to `end` one answer holds, and the translation there.
    fn next(&self, at: u64, end: u64) -> (u64, Option<Translation>) {
        match self.0.range(..=at).next_back() {
            Some((_, it)) if at < it.end => (it.end.min(end), Some(*it)),
            _ => (self.0.range(at..end).next().map_or(end, |(&next, _)| next), None),
        }
    }

    /// A span is gone, and its translations with it.
    pub(super) fn forget(&mut self, addr: u64, bytes: u64) {
        self.0.retain(|&at, _| !(addr..addr + bytes).contains(&at));
    }

    pub(super) fn leads_to(&self, chunk: u64) -> bool {
        self.0.values().any(|it| it.chunk == chunk)
    }
}

/// Whose memory a piece of a range is.
#[derive(Clone, Copy, Debug)]
enum Owner {
    Block(u64),
    Chunk(u64),
    /// Reads give zeros and stores are lost.
    Nobody,
}

/// A piece of a range of addresses.
#[derive(Clone, Copy, Debug)]
struct Piece {
    owner: Owner,
    offset: u64,
    bytes: u64,
}

impl State {
    /// Walks the tables, as the device would.
    fn resolve(&self, addr: u64, bytes: u64) -> Step<Vec<Piece>> {
        let illegal =
            |at: u64, what: &str| Err(Stop::Illegal(format!("{what} at {at:#x}, of {bytes:#x} bytes at {addr:#x}")));
        let Some(end) = addr.checked_add(bytes) else { return illegal(addr, "no memory") };
        let (mut at, mut pieces) = (addr, Vec::new());
        while at < end {
            if let Some((&start, block)) = self.blocks.range(..=at).next_back().filter(|(s, it)| at - *s < it.bytes) {
                let stop = end.min(start + block.bytes);
                pieces.push(Piece { owner: Owner::Block(start), offset: at - start, bytes: stop - at });
                at = stop;
                continue;
            }
            let Some((&start, map)) = self.mappings.range(..=at).next_back().filter(|(s, it)| at - *s < it.bytes)
            else {
                return illegal(at, "no memory");
            };
            if !map.access {
                return illegal(at, "no access to memory");
            }
            let (stop, stale) = self.stale.next(at, end.min(start + map.bytes));
            let (owner, base) = match stale {
                _ if self.habits.maps_nothing => (Owner::Nobody, start),
                Some(old) => (Owner::Chunk(old.chunk), old.base),
                None => (Owner::Chunk(map.handle), start),
            };
            pieces.push(Piece { owner, offset: at - base, bytes: stop - at });
            at = stop;
        }
        Ok(pieces)
    }

    fn read(&self, addr: u64, bytes: u64) -> Step<Vec<Extent>> {
        let mut extents = Vec::new();
        for Piece { owner, offset, bytes } in self.resolve(addr, bytes)? {
            let memory = match owner {
                Owner::Block(start) => self.blocks.get(&start).map(|block| &block.memory),
                Owner::Chunk(id) => self.contents.get(&id),
                Owner::Nobody => None,
            };
            match memory {
                Some(memory) => memory.read(offset, bytes, &mut extents),
                None => extents.push(Extent::Run { bytes, value: 0 }),
            }
        }
        Ok(extents)
    }

    fn write(&mut self, addr: u64, bytes: u64, extents: Vec<Extent>) -> Step<()> {
        let mut extents = extents.into_iter();
        let mut rest = None;
        for Piece { owner, mut offset, bytes } in self.resolve(addr, bytes)? {
            let mut memory = match owner {
                Owner::Block(start) => self.blocks.get_mut(&start).map(|block| &mut block.memory),
                Owner::Chunk(id) => self.contents.get_mut(&id),
                Owner::Nobody => None,
            };
            let end = offset + bytes;
            while offset < end {
                let Some(next) = rest.take().or_else(|| extents.next()) else { return Ok(()) };
                let piece = if next.len() > end - offset {
                    let (head, tail) = next.split(end - offset);
                    rest = Some(tail);
                    head
                } else {
                    next
                };
                let len = piece.len();
                match (&mut memory, piece) {
                    (Some(memory), Extent::Run { bytes, value }) => memory.fill(offset, bytes, value),
                    (Some(memory), Extent::Bytes(data)) => memory.write(offset, &data),
                    (None, _) => {}
                }
                offset += len;
            }
        }
        Ok(())
    }

    /// Does a piece of work.
    ///
    /// # Safety
    /// Its host pointer, if it has one, is valid for the copy.
    unsafe fn work(&mut self, work: Work) -> Step<()> {
        match work {
            Work::Touch { addr, bytes } if self.pinned.reaches(addr, bytes) => Ok(()),
            Work::Touch { addr, bytes } => self.resolve(addr, bytes).map(|_| ()),
            Work::Fill { dst, value, bytes } => self.write(dst, bytes, vec![Extent::Run { bytes, value }]),
            Work::CopyWithin { dst, src, bytes } => {
                let extents = self.read(src, bytes)?;
                self.write(dst, bytes, extents)
            }
            Work::CopyIn { dst, src: HostPtr(src), bytes } => {
                // Nothing is read from the host for a copy that cannot be.
                self.resolve(dst, bytes)?;
                let len = host_len(bytes)?;
                // SAFETY: the caller promises `bytes` readable bytes at `src`, and a length that the driver's memory
                // holds is no more than an allocation can have.
                let data = unsafe { core::slice::from_raw_parts(src.cast_const(), len) };
                self.write(dst, bytes, vec![Extent::Bytes(data.to_vec())])
            }
            Work::CopyOut { dst: HostPtr(dst), src, bytes } => {
                let mut at = 0;
                for extent in self.read(src, bytes)? {
                    let len = host_len(extent.len())?;
                    // SAFETY: the extents add up to `bytes`, and the caller promises as many writable bytes at `dst`.
                    let to = unsafe { dst.add(at) };
                    match extent {
                        // SAFETY: as above, `len` bytes at `to` are within what is writable.
                        Extent::Run { value, .. } => unsafe { to.write_bytes(value, len) },
                        // SAFETY: as above; the data is a vector of ours, so it does not overlap the caller's memory.
                        Extent::Bytes(data) => unsafe { to.copy_from_nonoverlapping(data.as_ptr(), len) },
                    }
                    at += len;
                }
                Ok(())
            }
        }
    }

    /// Does work at once, or queues it where it has to wait.
    ///
    /// # Safety
    /// As [`work`](Self::work), until the work is done.
    pub(super) unsafe fn submit(&mut self, work: Work, stream: Option<RawStream>) -> Step<()> {
        let queue = stream.map_or(0, |stream| stream.raw);
        self.check_stream(queue)?;
        check_work(&work)?;
        if stream.is_none() {
            self.finish(queue, u64::MAX)?;
        } else if self.options.queue_copies || !self.streams.is_idle(queue) {
            self.streams.push(queue, work);
            return Ok(());
        }
        // SAFETY: the caller promises that the host pointer is valid.
        unsafe { self.work(work) }
    }

    /// Does the work of a stream that was queued before its count stood at `until`.
    pub(super) fn finish(&mut self, stream: usize, until: u64) -> Step<()> {
        while let Some(work) = self.streams.pop(stream, until) {
            // SAFETY: work with a host pointer is queued by `submit` alone, whose caller promised that the pointer
            // is valid until the work is done.
            unsafe { self.work(work)? };
        }
        Ok(())
    }

    pub(super) fn finish_all(&mut self) -> Step<()> {
        self.streams.all().into_iter().try_for_each(|stream| self.finish(stream, u64::MAX))
    }

    pub(super) fn check_stream(&self, stream: usize) -> Step<()> {
        if self.streams.knows(stream) {
            return Ok(());
        }
        broken(ViolationKind::UnknownStream, format!("stream {stream:#x}"))
    }

    pub(super) fn check_event(&self, event: u64) -> Step<()> {
        match self.streams.known(event) {
            Known::Alive => Ok(()),
            Known::Destroyed => broken(ViolationKind::DestroyedEvent, format!("event {event} was destroyed already")),
            Known::Never => broken(ViolationKind::UnknownEvent, format!("event {event}")),
        }
    }
}

/// What a copy's arguments must be, whatever is mapped.
fn check_work(work: &Work) -> Step<()> {
    if work.bytes() == 0 {
        return broken(ViolationKind::ZeroSize, "the size is zero".into());
    }
    match *work {
        Work::CopyIn { src: HostPtr(host), .. } | Work::CopyOut { dst: HostPtr(host), .. } if host.is_null() => {
            broken(ViolationKind::BadCopy, "the host pointer is null".into())
        }
        Work::CopyWithin { dst, src, bytes } if dst != src && dst.abs_diff(src) < bytes => {
            broken(ViolationKind::BadCopy, format!("{bytes:#x} bytes at {src:#x} and {dst:#x} overlap"))
        }
        _ => Ok(()),
    }
}

fn host_len(bytes: u64) -> Step<usize> {
    usize::try_from(bytes)
        .ok()
        .filter(|&len| isize::try_from(len).is_ok())
        .ok_or_else(|| Stop::Broken(ViolationKind::BadCopy, format!("{bytes:#x} bytes are more than a host can have")))
}
