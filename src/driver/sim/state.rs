//! The device behind the simulated driver: what exists, and what each call does to it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::driver::{
    Call, ChunkProps, DriverError, DriverErrorKind, DriverResult, Granularities, MemoryInfo, RawHandle,
};

use super::access::Stale;
use super::ledger::{Args, Entry, Gives, Ledger, Outcome, ViolationKind};
use super::memory::Sparse;
use super::options::SimOptions;
use super::personality::Habits;
use super::pinned::Pinned;
use super::space::Space;
use super::streams::Streams;

/// Why a call does not succeed.
pub(super) enum Stop {
    /// The driver fails, by its own doing.
    Fails(DriverErrorKind, Option<(i64, &'static str)>, String),
    /// The caller broke a rule.
    Broken(ViolationKind, String),
    /// The device ran into memory that is not there, and is lost.
    Illegal(String),
}

pub(super) type Step<T> = Result<T, Stop>;

pub(super) fn broken<T>(kind: ViolationKind, detail: String) -> Step<T> {
    Err(Stop::Broken(kind, detail))
}

pub(super) fn fails<T>(kind: DriverErrorKind, code: (i64, &'static str), detail: String) -> Step<T> {
    Err(Stop::Fails(kind, Some(code), detail))
}

const OUT_OF_MEMORY: (i64, &str) = (2, "OUT_OF_MEMORY");
const INVALID_VALUE: (i64, &str) = (1, "INVALID_VALUE");
const NOT_SUPPORTED: (i64, &str) = (801, "NOT_SUPPORTED");
const ILLEGAL_ADDRESS: (i64, &str) = (700, "ILLEGAL_ADDRESS");

/// How many freed addresses are remembered, to tell a second free from a wild one.
const REMEMBERED: usize = 1024;

#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) bytes: u64,
    pub(super) released: bool,
    pub(super) mapped: u64,
    /// Spans in which it was ever mapped and that still exist.
    spans: BTreeSet<u64>,
}

#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) bytes: u64,
    pub(super) handle: u64,
    pub(super) access: bool,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) bytes: u64,
    pub(super) memory: Sparse,
}

/// Memory that was released and did not return.
#[derive(Debug)]
pub(super) struct Withheld {
    pub(super) bytes: u64,
    spans: BTreeSet<u64>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) habits: Habits,
    pub(super) options: SimOptions,
    pub(super) ledger: Ledger,
    pub(super) streams: Streams,
    space: Space,
    pub(super) spans: BTreeMap<u64, u64>,
    pub(super) blocks: BTreeMap<u64, Block>,
    pub(super) chunks: BTreeMap<u64, Chunk>,
    pub(super) mappings: BTreeMap<u64, Mapping>,
    /// What is in the chunks. Outlives them where stale mappings still lead there.
    pub(super) contents: BTreeMap<u64, Sparse>,
    pub(super) stale: Stale,
    pub(super) withheld: Vec<Withheld>,
    pub(super) pinned: Pinned,
    next_handle: u64,
    freed: VecDeque<u64>,
    /// Memory taken by chunks, blocks and what is withheld.
    used: u64,
    pub(super) others: u64,
    /// The soft limit of open files, which can be raised.
    pub(super) soft_files: u64,
    pub(super) lost: bool,
    pub(super) hung: u64,
    pub(super) let_go: bool,
}

impl State {
    pub(super) fn new(options: SimOptions) -> Self {
        let habits = Habits::of(&options.personalities);
        Self {
            soft_files: habits.files.soft,
            habits,
            ledger: Ledger::new(options.ledger),
            options,
            streams: Streams::new(),
            space: Space::new(),
            spans: BTreeMap::new(),
            blocks: BTreeMap::new(),
            chunks: BTreeMap::new(),
            mappings: BTreeMap::new(),
            contents: BTreeMap::new(),
            stale: Stale::default(),
            withheld: Vec::new(),
            pinned: Pinned::default(),
            next_handle: 1,
            freed: VecDeque::new(),
            used: 0,
            others: 0,
            lost: false,
            hung: 0,
            let_go: false,
        }
    }

    /// Runs the body of a call: counts it, refuses it where the whole driver refuses, and writes down how it ended.
    pub(super) fn call<T: Gives>(
        &mut self,
        call: Call,
        args: Args,
        body: impl FnOnce(&mut Self) -> Step<T>,
    ) -> DriverResult<T> {
        let sequence = self.ledger.begin(call);
        let result = self.may_begin(call).and_then(|()| body(self)).map_err(|stop| self.conclude(call, stop));
        let outcome = match &result {
            Ok(value) => value.outcome(),
            Err(error) => Outcome::Failed(error.kind()),
        };
        self.ledger.end(Entry { sequence, call, args, outcome });
        result
    }

    fn may_begin(&self, call: Call) -> Step<()> {
        use Call::{Create, FreeSpan, Granularity, Map, Release, Reserve, SetAccess, Unmap};
        if self.lost {
            return fails(
                DriverErrorKind::DeviceLost,
                ILLEGAL_ADDRESS,
                "the device was lost by an earlier call".into(),
            );
        }
        let virtual_memory = [Granularity, Reserve, FreeSpan, Create, Release, Map, SetAccess, Unmap];
        if self.habits.no_support && virtual_memory.contains(&call) {
            return Err(Stop::Fails(DriverErrorKind::Missing, None, "the library has no such symbol".into()));
        }
        if Call::MEMORY.contains(&call) && self.streams.any_capturing() {
            return broken(ViolationKind::DuringCapture, "a stream is capturing".into());
        }
        if self.let_go && self.habits.hangs_in.contains(&call) {
            return Err(Stop::Fails(DriverErrorKind::Other, None, "it had hung until it was let go".into()));
        }
        Ok(())
    }

    /// Turns the end of a call into what the caller sees of it.
    pub(super) fn conclude(&mut self, call: Call, stop: Stop) -> DriverError {
        match stop {
            Stop::Fails(kind, code, detail) => {
                let error = DriverError::new(call, kind).with_detail(detail);
                match code {
                    Some((code, name)) => error.with_code(code, name),
                    None => error,
                }
            }
            Stop::Broken(kind, detail) => {
                let error = DriverError::new(call, DriverErrorKind::Misuse).with_detail(detail.as_str());
                self.ledger.violation(call, kind, detail);
                error
            }
            Stop::Illegal(detail) => {
                let (code, name) = ILLEGAL_ADDRESS;
                let error = DriverError::new(call, DriverErrorKind::DeviceLost).with_code(code, name);
                let error = error.with_detail(detail.as_str());
                self.ledger.violation(call, ViolationKind::IllegalAddress, detail);
                self.lose();
                error
            }
        }
    }

    pub(super) fn lose(&mut self) {
        self.lost = true;
        self.streams.abandon();
    }

    pub(super) fn support(&self) -> Step<()> {
        if self.habits.no_support {
            return Err(Stop::Fails(DriverErrorKind::Missing, None, "symbol MemAddressReserve".into()));
        }
        Ok(())
    }

    pub(super) fn granularity(&self) -> Granularities {
        Granularities { minimum: self.options.minimum, recommended: self.options.recommended }
    }

    pub(super) fn memory(&self) -> MemoryInfo {
        let total = self.options.total;
        MemoryInfo { free: self.free_memory().saturating_add(self.habits.free_over_reported).min(total), total }
    }

    /// What is really free.
    pub(super) fn free_memory(&self) -> u64 {
        self.options.total.saturating_sub(self.used).saturating_sub(self.others)
    }

    pub(super) fn handles(&self) -> u64 {
        self.chunks.values().filter(|chunk| !chunk.released).count() as u64
    }

    pub(super) fn open_files(&self) -> u64 {
        let ours = if self.habits.file_per_chunk { self.handles() } else { 0 };
        self.habits.files.held.saturating_add(ours)
    }

    pub(super) fn map_entries(&self) -> u64 {
        let ours = if self.habits.map_limited { self.mappings.len() as u64 } else { 0 };
        self.habits.maps.held.saturating_add(ours)
    }

    fn check_size(&self, bytes: u64) -> Step<()> {
        let unit = self.options.minimum;
        match bytes {
            0 => broken(ViolationKind::ZeroSize, "the size is zero".into()),
            _ if !bytes.is_multiple_of(unit) => {
                broken(ViolationKind::OddSize, format!("{bytes:#x} bytes are not a multiple of {unit:#x}"))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn reserve(&mut self, bytes: u64, align: u64) -> Step<u64> {
        self.check_size(bytes)?;
        if !align.is_power_of_two() || align < self.options.minimum {
            return broken(
                ViolationKind::Misaligned,
                format!("alignment {align:#x} is not a power of two of at least the granularity"),
            );
        }
        if self.habits.reserve_returns_null {
            return Ok(0);
        }
        let addr = if bytes > self.habits.reserve_limit { None } else { self.space.take(bytes, align) };
        let Some(addr) = addr else {
            return fails(DriverErrorKind::OutOfAddresses, OUT_OF_MEMORY, format!("{bytes:#x} bytes of addresses"));
        };
        self.freed.retain(|freed| !(addr..addr + bytes).contains(freed));
        self.spans.insert(addr, bytes);
        Ok(addr)
    }

    pub(super) fn free_span(&mut self, addr: u64, bytes: u64) -> Step<()> {
        match self.spans.get(&addr) {
            None if self.freed.contains(&addr) => {
                return broken(ViolationKind::DoubleFree, format!("the span at {addr:#x} was freed already"));
            }
            None => return broken(ViolationKind::UnknownSpan, format!("no span starts at {addr:#x}")),
            Some(&size) if size != bytes => {
                return broken(ViolationKind::WrongSize, format!("the span has {size:#x} bytes, not {bytes:#x}"));
            }
            Some(_) => {}
        }
        let mapped = self.mappings.range(addr..addr + bytes).count();
        if mapped > 0 {
            return broken(ViolationKind::SpanInUse, format!("{mapped} chunks are mapped under it"));
        }
        self.check_idle(Call::FreeSpan, addr, bytes);
        self.spans.remove(&addr);
        self.forget(addr);
        self.stale.forget(addr, bytes);
        self.contents.retain(|id, _| self.chunks.contains_key(id) || self.stale.leads_to(*id));
        for chunk in self.chunks.values_mut() {
            chunk.spans.remove(&addr);
        }
        let mut returned = 0;
        self.withheld.retain_mut(|memory| {
            memory.spans.remove(&addr);
            if memory.spans.is_empty() {
                returned += memory.bytes;
            }
            !memory.spans.is_empty()
        });
        self.used -= returned;
        Ok(())
    }

    pub(super) fn create(&mut self, bytes: u64, props: ChunkProps) -> Step<RawHandle> {
        self.check_size(bytes)?;
        if self.habits.vgpu || props != ChunkProps::PLAIN {
            return fails(DriverErrorKind::NotSupported, NOT_SUPPORTED, format!("{props:?}"));
        }
        if self.habits.file_per_chunk && self.open_files() >= self.soft_files {
            let detail = format!("{} open files held", self.open_files());
            return if self.habits.files_as_out_of_memory {
                // As true as the real one: it says nothing of files.
                fails(DriverErrorKind::OutOfMemory, OUT_OF_MEMORY, format!("{bytes:#x} bytes"))
            } else {
                fails(DriverErrorKind::OutOfFiles, (304, "OPERATING_SYSTEM"), detail)
            };
        }
        self.take_memory(bytes)?;
        let id = self.next_handle;
        self.next_handle += 1;
        self.chunks.insert(id, Chunk { bytes, released: false, mapped: 0, spans: BTreeSet::new() });
        self.contents.insert(id, Sparse::new(self.options.poison));
        Ok(RawHandle(id))
    }

    fn take_memory(&mut self, bytes: u64) -> Step<()> {
        let free = self.free_memory();
        if bytes > free {
            let detail = format!("{bytes:#x} bytes, {free:#x} free");
            return fails(DriverErrorKind::OutOfMemory, OUT_OF_MEMORY, detail);
        }
        self.used += bytes;
        Ok(())
    }

    /// A handle that was not released.
    fn live(&mut self, handle: RawHandle) -> Step<&mut Chunk> {
        let RawHandle(id) = handle;
        let next = self.next_handle;
        match self.chunks.get_mut(&id) {
            Some(chunk) if !chunk.released => Ok(chunk),
            None if id == 0 || id >= next => broken(ViolationKind::UnknownHandle, format!("handle {id}")),
            _ => broken(ViolationKind::ReleasedHandle, format!("handle {id} was released already")),
        }
    }

    pub(super) fn release(&mut self, handle: RawHandle) -> Step<()> {
        let chunk = self.live(handle)?;
        chunk.released = true;
        if chunk.mapped == 0 {
            self.give_memory_back(handle.0);
        }
        Ok(())
    }

    /// The last thing that held a chunk is gone.
    fn give_memory_back(&mut self, id: u64) {
        let Some(chunk) = self.chunks.remove(&id) else { return };
        if !self.stale.leads_to(id) {
            self.contents.remove(&id);
        }
        if self.habits.release_keeps_memory && !chunk.spans.is_empty() {
            self.withheld.push(Withheld { bytes: chunk.bytes, spans: chunk.spans });
        } else {
            self.used -= chunk.bytes;
        }
    }

    pub(super) fn map(&mut self, addr: u64, bytes: u64, handle: RawHandle) -> Step<()> {
        self.check_size(bytes)?;
        if !addr.is_multiple_of(self.options.minimum) {
            return broken(ViolationKind::Misaligned, format!("{addr:#x} is not a multiple of the granularity"));
        }
        let size = self.live(handle)?.bytes;
        if size != bytes {
            return broken(ViolationKind::WrongSize, format!("the handle has {size:#x} bytes, not {bytes:#x}"));
        }
        let Some((span, end)) = self.span_of(addr).filter(|&(_, end)| bytes <= end - addr) else {
            return broken(ViolationKind::OutsideSpan, format!("{bytes:#x} bytes at {addr:#x} lie in no span"));
        };
        self.check_page_tables(Call::Map, span, end - span);
        if let Some((at, _)) = self.mappings.range(..addr + bytes).next_back().filter(|(at, it)| *at + it.bytes > addr)
        {
            return broken(ViolationKind::AlreadyMapped, format!("a chunk is mapped at {at:#x}"));
        }
        if self.habits.map_limited && self.map_entries() >= self.habits.maps.limit {
            let detail = format!("{} entries held", self.map_entries());
            return fails(DriverErrorKind::OutOfMaps, OUT_OF_MEMORY, detail);
        }
        let chunk = self.live(handle)?;
        chunk.mapped += 1;
        chunk.spans.insert(span);
        self.mappings.insert(addr, Mapping { bytes, handle: handle.0, access: false });
        Ok(())
    }

    /// Start and end of the span in which an address lies.
    fn span_of(&self, addr: u64) -> Option<(u64, u64)> {
        let (&start, &bytes) = self.spans.range(..=addr).next_back()?;
        (addr < start + bytes).then_some((start, start + bytes))
    }

    pub(super) fn set_access(&mut self, addr: u64, bytes: u64) -> Step<()> {
        self.check_size(bytes)?;
        let Some(end) = addr.checked_add(bytes) else {
            return broken(ViolationKind::NotMapped, format!("{bytes:#x} bytes at {addr:#x}"));
        };
        let mut at = addr;
        while at < end {
            match self.mappings.range(..=at).next_back() {
                Some((&start, it)) if start == at && it.bytes <= end - at => at += it.bytes,
                Some((&start, it)) if at < start + it.bytes => {
                    return broken(ViolationKind::PartOfMapping, format!("the chunk at {start:#x} is not all in it"));
                }
                _ => return broken(ViolationKind::NotMapped, format!("nothing is mapped at {at:#x}")),
            }
        }
        if self.habits.maps_nothing && self.habits.access_fails {
            return fails(DriverErrorKind::InvalidValue, INVALID_VALUE, format!("{bytes:#x} bytes at {addr:#x}"));
        }
        if self.habits.uniform_chunks_only {
            let (start, end) = self.span_of(addr).unwrap_or((addr, end));
            let mut sizes = self.mappings.range(start..end).map(|(_, it)| it.bytes);
            let first = sizes.next();
            if sizes.any(|size| Some(size) != first) {
                return fails(DriverErrorKind::InvalidValue, INVALID_VALUE, format!("{bytes:#x} bytes at {addr:#x}"));
            }
        }
        for (_, mapping) in self.mappings.range_mut(addr..end) {
            mapping.access = true;
        }
        Ok(())
    }

    pub(super) fn unmap(&mut self, addr: u64, bytes: u64) -> Step<()> {
        let id = match self.mappings.range(..=addr).next_back() {
            Some((&start, it)) if start == addr && it.bytes == bytes => it.handle,
            Some((&start, it)) if start == addr => {
                let size = it.bytes;
                return broken(ViolationKind::WrongSize, format!("the mapping has {size:#x} bytes, not {bytes:#x}"));
            }
            Some((&start, it)) if addr < start + it.bytes => {
                return broken(ViolationKind::PartOfMapping, format!("the mapping starts at {start:#x}"));
            }
            _ => return broken(ViolationKind::NotMapped, format!("nothing is mapped at {addr:#x}")),
        };
        self.check_idle(Call::Unmap, addr, bytes);
        if let Some((span, end)) = self.span_of(addr) {
            self.check_page_tables(Call::Unmap, span, end - span);
        }
        self.mappings.remove(&addr);
        if self.habits.stale_after_map {
            self.stale.remember(addr, bytes, id);
        }
        if let Some(chunk) = self.chunks.get_mut(&id) {
            chunk.mapped -= 1;
            if chunk.mapped == 0 && chunk.released {
                self.give_memory_back(id);
            }
        }
        Ok(())
    }

    pub(super) fn allocate(&mut self, bytes: u64) -> Step<u64> {
        if bytes == 0 {
            return broken(ViolationKind::ZeroSize, "the size is zero".into());
        }
        self.take_memory(bytes)?;
        // As aligned as real drivers make it, and no more.
        let Some(addr) = self.space.take(bytes, 512) else {
            self.used -= bytes;
            return fails(DriverErrorKind::OutOfMemory, OUT_OF_MEMORY, format!("{bytes:#x} bytes of addresses"));
        };
        self.freed.retain(|freed| !(addr..addr + bytes).contains(freed));
        self.blocks.insert(addr, Block { bytes, memory: Sparse::new(self.options.poison) });
        Ok(addr)
    }

    pub(super) fn free(&mut self, addr: u64, bytes: u64) -> Step<()> {
        match self.blocks.get(&addr) {
            None if self.freed.contains(&addr) => {
                return broken(ViolationKind::DoubleFree, format!("the block at {addr:#x} was freed already"));
            }
            None => return broken(ViolationKind::UnknownBlock, format!("no block starts at {addr:#x}")),
            Some(Block { bytes: size, .. }) if *size != bytes => {
                return broken(ViolationKind::WrongSize, format!("the block has {size:#x} bytes, not {bytes:#x}"));
            }
            Some(_) => {}
        }
        self.check_idle(Call::Free, addr, bytes);
        self.blocks.remove(&addr);
        self.used -= bytes;
        self.forget(addr);
        Ok(())
    }

    /// Gives addresses back, and remembers that they were had.
    fn forget(&mut self, addr: u64) {
        self.space.give(addr);
        if self.freed.len() == REMEMBERED {
            self.freed.pop_front();
        }
        self.freed.push_back(addr);
    }

    /// The same where kernels mind that the page tables of a span change which they use.
    fn check_page_tables(&mut self, call: Call, span: u64, bytes: u64) {
        if !self.options.info.quirks.map_beside_kernels {
            self.check_idle(call, span, bytes);
        }
    }

    /// Loses the device, as a real one is lost, when work is pending on memory that goes. The call itself succeeds.
    pub(super) fn check_idle(&mut self, call: Call, addr: u64, bytes: u64) {
        if self.streams.touch(addr, bytes) {
            let detail = format!("work is pending that touches {bytes:#x} bytes at {addr:#x}");
            self.ledger.violation(call, ViolationKind::UnderRunningWork, detail);
            self.lose();
        }
    }
}
