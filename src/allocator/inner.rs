//! What all handles of one allocator share.

mod reach;

use core::alloc::Layout;
use core::cell::Cell;
use core::fmt;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::ground::Ground;
use super::heap::{Heap, May};
use super::large::{Fate, Large, LargePlan, Span};
use super::lock::{HeapGuard, HeapLock};
use super::streams::Streams;
use crate::backing::Mode;
use crate::bytes::Bytes;
use crate::card::GiveWay;
use crate::driver::RawStream;
use crate::error::{Error, Result};
use crate::sys::fork::Process;

/// The shared part of an allocator. Addresses are device addresses; layouts are never of size zero.
pub(super) struct Core {
    pub(super) ground: Ground,
    heaps: Box<[Own<HeapLock<Heap>>]>,
    large: Mutex<Large>,
    plan: LargePlan,
    /// Blocks of this size and more own a span, in bytes.
    threshold: u64,
    host_visible: bool,
    /// Whether work of the device may still use a block that is given back.
    queues: bool,
    process: Process,
    streams: Streams,
}

/// Something that shares no cache line with its neighbours.
#[repr(align(128))]
struct Own<T>(T);

/// The number of this thread, by which it finds its heap.
#[inline]
fn thread_number() -> usize {
    thread_local! { static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) } }
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NUMBER.with(|number| {
        if number.get() == usize::MAX {
            number.set(NEXT.fetch_add(1, Relaxed));
        }
        number.get()
    })
}

/// What a block takes, whoever asks for it: two layouts of one footprint can have the same block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Footprint {
    Small(usize),
    Range(u64),
    Large(u64),
}

impl Core {
    pub(super) fn new(ground: Ground, heaps: u8, plan: LargePlan, threshold: u64) -> Arc<Self> {
        let heaps = (0..heaps.max(1).next_power_of_two()).map(|owner| Own(HeapLock::new(Heap::new(owner, &ground))));
        let this = Arc::new(Self {
            heaps: heaps.collect(),
            large: Mutex::default(),
            plan,
            threshold,
            host_visible: ground.device.info().host_visible,
            queues: ground.device.info().queues,
            process: Process::this(),
            streams: Streams::default(),
            ground,
        });
        let weak: Weak<Self> = Arc::downgrade(&this);
        this.ground.card().add_pool(weak);
        this
    }

    /// That this is the process that made the allocator: its memory is not there in a forked child.
    #[inline]
    fn check_process(&self) -> Result<()> {
        self.process.check()
    }

    #[inline]
    fn own_heap(&self) -> HeapGuard<'_, Heap> {
        self.heaps[thread_number() & (self.heaps.len() - 1)].0.lock()
    }

    pub(super) fn footprint(&self, layout: Layout) -> Footprint {
        let (size, align) = (layout.size() as u64, layout.align() as u64);
        if size >= self.threshold || align > self.ground.max_align {
            return Footprint::Large(size);
        }
        match self.ground.classes.of(layout.size(), layout.align()) {
            Some(class) => Footprint::Small(class),
            None => Footprint::Range(size.next_multiple_of(self.ground.unit)),
        }
    }

    /// A block.
    #[inline]
    pub(super) fn allocate(&self, layout: Layout, stream: Option<RawStream>) -> Result<u64> {
        self.check_process()?;
        if self.streams.are_waiting() {
            return self.allocate_waiting(layout, stream);
        }
        self.allocate_now(layout)
    }

    /// While blocks wait for streams: one that was freed on this stream, or a new one, for which all that have passed
    /// are freed first.
    #[cold]
    fn allocate_waiting(&self, layout: Layout, stream: Option<RawStream>) -> Result<u64> {
        // The host, which may write to it at once, is not behind the stream.
        if let Some(stream) = stream.filter(|_| !self.host_visible)
            && let Some(address) = self.streams.take(stream, self.footprint(layout), layout.align() as u64)
        {
            return Ok(address);
        }
        self.free_passed();
        self.allocate_now(layout)
    }

    #[inline]
    fn allocate_now(&self, layout: Layout) -> Result<u64> {
        let (size, align) = (layout.size() as u64, layout.align() as u64);
        if size >= self.threshold || align > self.ground.max_align {
            let result = self.allocate_large(size, align);
            return result.or_else(|error| self.once_more(error, || self.allocate_large(size, align)));
        }
        if let Some(class) = self.ground.classes.of(layout.size(), layout.align()) {
            let result = self.own_heap().take_small(&self.ground, class, May::TakeMore);
            return result
                .or_else(|error| self.in_any_heap(error, |heap, may| heap.take_small(&self.ground, class, may)));
        }
        let result = self.own_heap().take_large(&self.ground, size, align, May::TakeMore);
        result.or_else(|error| self.in_any_heap(error, |heap, may| heap.take_large(&self.ground, size, align, may)))
    }

    /// After memory, addresses or what the system counts ran out: whatever waits for streams or holds nothing is given
    /// back, and it is tried once more.
    #[cold]
    fn once_more<T>(&self, error: Error, again: impl FnOnce() -> Result<T>) -> Result<T> {
        if !error.is_shortage() && !matches!(error, Error::Blocked { .. }) {
            return Err(error);
        }
        self.free_waiting();
        self.trim_heaps(|heap| {
            heap.tidy(&self.ground);
            heap.give_back(&self.ground, 0)
        });
        if matches!(error, Error::OutOfMaps(_)) {
            self.ground.card().make_map_entries();
        }
        again()
    }

    /// The same for blocks of the shared span: this thread's heap tries again, then all others. They take more memory
    /// only where it was addresses that ran out.
    #[cold]
    fn in_any_heap(&self, error: Error, take: impl Fn(&mut Heap, May) -> Result<u64>) -> Result<u64> {
        let may = if matches!(error, Error::Blocked { .. }) { May::TakeMore } else { May::UseMapped };
        self.once_more(error, || {
            let own = take(&mut self.own_heap(), May::TakeMore);
            own.or_else(|error| self.heaps.iter().find_map(|heap| take(&mut heap.0.lock(), may).ok()).ok_or(error))
        })
    }

    fn allocate_large(&self, bytes: u64, align: u64) -> Result<u64> {
        let virtual_memory = self.is_virtual();
        let span = if virtual_memory { self.plan.headroom.span(bytes, self.plan.total) } else { bytes };
        let granularity = self.ground.device.verdict().granularity().get();
        let recycled = self.large.lock().recycle(bytes, align, span, granularity, virtual_memory);
        let span = match recycled {
            None => self.plan.open(&self.ground, bytes, align)?,
            Some(mut span) => match self.plan.adapt(&self.ground, &mut span, bytes) {
                Ok(()) => span,
                Err(error) => {
                    self.retire(span);
                    return Err(error);
                }
            },
        };
        Ok(self.large.lock().insert(span))
    }

    fn is_virtual(&self) -> bool {
        self.ground.device.verdict().mode() == Mode::Virtual
    }

    /// Frees a block, at once or when `stream` has passed what is queued on it now.
    #[inline]
    pub(super) fn deallocate(&self, address: u64, layout: Layout, stream: Option<RawStream>) {
        if self.check_process().is_err() {
            return;
        }
        match stream.filter(|_| self.queues) {
            Some(stream) => self.streams.free_later(&self.ground.device, stream, address, self.footprint(layout)),
            None => self.free(address),
        }
    }

    /// Frees a block that nothing uses any more.
    #[inline]
    fn free(&self, address: u64) {
        if let Some((region, owner)) = self.ground.find(address) {
            let known = self.heaps.get(owner).is_some_and(|heap| heap.0.lock().put(&self.ground, region, address));
            if !known {
                self.unknown(address);
            }
            return;
        }
        self.free_large(address);
    }

    #[cold]
    fn unknown(&self, address: u64) {
        let address = format_args!("{address:#x}").to_string();
        tracing::error!(device = %self.ground.device.info().id(), address, "no block of this allocator begins there; ignored");
        debug_assert!(false, "no block of this allocator begins at {address}");
    }

    fn free_large(&self, address: u64) {
        let span = self.large.lock().remove(address);
        match span {
            Some(span) => self.retire(span),
            None => self.unknown(address),
        }
    }

    /// Frees the blocks whose streams have passed what was queued when they were freed. A heap in use, perhaps by this
    /// thread, gets its blocks back later.
    fn free_passed(&self) {
        self.streams.passed(self.ground.card(), |address| {
            let Some((region, owner)) = self.ground.find(address) else {
                self.free_large(address);
                return true;
            };
            let Some(heap) = self.heaps.get(owner) else { return true };
            let Some(mut heap) = heap.0.try_lock() else { return false };
            heap.put(&self.ground, region, address);
            true
        });
    }

    /// Waits for the device and frees all blocks that wait for streams; those that have passed, where it cannot be waited
    /// for.
    fn free_waiting(&self) {
        if self.streams.are_waiting() && self.streams.wait(self.ground.card(), |address| self.free(address)).is_err() {
            self.free_passed();
        }
    }

    /// Keeps a span that holds no block, or its addresses alone, or nothing of it.
    fn retire(&self, span: Span) {
        let fate = self.large.lock().keep(&self.plan, span);
        let Fate::Excess(mut span) = fate else { return };
        if let Err(error) = self.ground.quiet() {
            tracing::debug!(%error, "a freed block keeps its memory for now");
            self.large.lock().keep_anyway(span);
            return;
        }
        if self.is_virtual() && LargePlan::empty(&self.ground, &mut span).is_ok() {
            let fate = self.large.lock().keep(&self.plan, span);
            let Fate::Excess(excess) = fate else { return };
            span = excess;
        }
        self.close(span);
    }

    fn close(&self, mut span: Span) {
        if let Err(error) = span.backing.close() {
            tracing::warn!(device = %self.ground.device.info().id(), %error, "a span of an allocator did not come back");
        }
    }

    /// Makes a block larger, where it is if that can be. Returns its address.
    pub(super) fn grow(&self, address: u64, old: Layout, new: Layout, stream: Option<RawStream>) -> Result<u64> {
        self.check_process()?;
        if self.stays(address, new)? {
            return Ok(address);
        }
        self.relocate(address, old, new, old.size(), stream)
    }

    /// The same, and what is added holds zeros. A block that could not be cleared is as it was.
    pub(super) fn grow_zeroed(&self, address: u64, old: Layout, new: Layout, stream: Option<RawStream>) -> Result<u64> {
        self.check_process()?;
        let added = new.size() - old.size();
        if self.stays(address, new)? {
            self.clear(address + old.size() as u64, added, stream)?;
            return Ok(address);
        }
        let target = self.allocate(new, stream)?;
        let done = self
            .clear(target + old.size() as u64, added, stream)
            .and_then(|()| self.copy(target, address, old.size(), stream));
        if let Err(error) = done {
            self.deallocate(target, new, stream);
            return Err(error);
        }
        self.deallocate(address, old, stream);
        Ok(target)
    }

    /// Makes a block fit `new` where it is. False if it has to move.
    fn stays(&self, address: u64, new: Layout) -> Result<bool> {
        if !address.is_multiple_of(new.align() as u64) {
            return Ok(false);
        }
        let bytes = new.size() as u64;
        match self.grow_in_place(address, bytes) {
            // No memory behind a small block: perhaps all of it fits in a hole that has some.
            Err(error) if error.is_shortage() && self.ground.find(address).is_some() => Ok(false),
            Err(error) => self.once_more(error, || self.grow_in_place(address, bytes)),
            result => result,
        }
    }

    fn grow_in_place(&self, address: u64, bytes: u64) -> Result<bool> {
        if let Some((region, owner)) = self.ground.find(address) {
            // A block that is to own a span from now on moves there, where it can grow further.
            let Some(heap) = self.heaps.get(owner).filter(|_| bytes < self.threshold) else { return Ok(false) };
            return heap.0.lock().grow(&self.ground, region, address, bytes);
        }
        let mut large = self.large.lock();
        match large.committed_of(address) {
            None => return Ok(false),
            Some(committed) if committed >= bytes => return Ok(true),
            Some(_) => {}
        }
        let Some(mut span) = large.remove(address) else { return Ok(false) };
        drop(large);
        let grown = match span.backing.mode() {
            Mode::Virtual if span.backing.reserved() >= bytes => {
                self.ground.card().check_capture(None).and_then(|()| {
                    let growth = span.backing.grow(bytes)?;
                    span.backing.settle(growth);
                    Ok(true)
                })
            }
            _ => Ok(false),
        };
        self.large.lock().insert(span);
        grown
    }

    /// Moves a block to another that fits `new`, with its first `live` bytes.
    fn relocate(&self, address: u64, old: Layout, new: Layout, live: usize, stream: Option<RawStream>) -> Result<u64> {
        let target = self.allocate(new, stream)?;
        if let Err(error) = self.copy(target, address, live, stream) {
            self.deallocate(target, new, stream);
            return Err(error);
        }
        self.deallocate(address, old, stream);
        Ok(target)
    }

    /// Makes a block smaller and gives memory back where that can be. Returns its address.
    pub(super) fn shrink(&self, address: u64, old: Layout, new: Layout, stream: Option<RawStream>) -> Result<u64> {
        self.check_process()?;
        if !address.is_multiple_of(new.align() as u64) {
            return self.relocate(address, old, new, new.size(), stream);
        }
        if self.is_worth_moving(address, new) {
            // No memory for a smaller block: then it stays.
            return Ok(self.relocate(address, old, new, new.size(), stream).unwrap_or(address));
        }
        self.shrink_in_place(address, new.size() as u64, stream);
        Ok(address)
    }

    /// Whether a block has more than twice of what another for this layout would, and could not give it back in place.
    fn is_worth_moving(&self, address: u64, new: Layout) -> bool {
        match (self.ground.find(address), self.footprint(new)) {
            (Some((region, owner)), Footprint::Small(class)) => {
                let size = self.heaps.get(owner).and_then(|heap| heap.0.lock().size_of(&self.ground, region, address));
                size.is_some_and(|size| size / 2 > u64::from(self.ground.classes.size(class)))
            }
            (None, Footprint::Small(_) | Footprint::Range(_)) => new.size() as u64 <= self.threshold / 2,
            (None, Footprint::Large(bytes)) => {
                // Without virtual memory a block keeps all it has.
                let committed = self.large.lock().committed_of(address).unwrap_or(0);
                !self.is_virtual() && committed / 2 > bytes
            }
            _ => false,
        }
    }

    fn shrink_in_place(&self, address: u64, bytes: u64, stream: Option<RawStream>) {
        if let Some((region, owner)) = self.ground.find(address) {
            // On a stream, work may still use what is given up; it stays until the block is freed.
            if let Some(heap) = self.heaps.get(owner).filter(|_| stream.is_none() || !self.queues) {
                heap.0.lock().shrink(&self.ground, region, address, bytes);
            }
            return;
        }
        let span = self.large.lock().remove(address);
        let Some(mut span) = span else { return };
        if span.backing.would_release(bytes) > 0 {
            let shrunk = self.ground.quiet().and_then(|()| {
                // SAFETY: `quiet` waited for the device; the block's owner gives up what is behind `bytes`.
                unsafe { span.backing.shrink(bytes) }
            });
            if let Err(error) = shrunk {
                tracing::debug!(%error, "a block that shrank keeps its memory");
            }
        }
        self.large.lock().insert(span);
    }

    /// Gives back all memory that holds nothing. Returns how much.
    pub(super) fn trim(&self) -> u64 {
        if self.check_process().is_err() {
            return 0;
        }
        let before = self.committed();
        self.free_waiting();
        self.trim_heaps(|heap| {
            heap.tidy(&self.ground);
            heap.give_back(&self.ground, 0)
        });
        if self.ground.quiet().is_ok() {
            let waiting = self.large.lock().take_waiting();
            waiting.into_iter().for_each(|span| self.close(span));
        }
        before.saturating_sub(self.committed())
    }

    fn trim_heaps(&self, mut act: impl FnMut(&mut Heap) -> u64) {
        for heap in &self.heaps {
            act(&mut heap.0.lock());
        }
    }

    /// Memory mapped for this allocator, in bytes.
    pub(super) fn committed(&self) -> u64 {
        let heaps: u64 = self.heaps.iter().map(|heap| heap.0.lock().committed()).sum();
        heaps + self.large.lock().committed()
    }

    pub(super) fn figures(&self) -> super::Figures {
        let mut figures = super::Figures::default();
        if self.check_process().is_err() {
            return figures;
        }
        let (mut bytes, mut committed) = (0, 0);
        for heap in &self.heaps {
            let heap = heap.0.lock();
            committed += heap.committed();
            figures.blocks += heap.blocks;
            bytes += heap.bytes;
        }
        let large = self.large.lock();
        figures.large_blocks = large.blocks() as u64;
        figures.blocks += figures.large_blocks;
        figures.bytes_in_blocks = Bytes::new(bytes + large.committed() - large.idle);
        figures.bytes_committed = Bytes::new(committed + large.committed());
        figures.bytes_reserved = Bytes::new(self.ground.reserved() + large.reserved());
        figures.bytes_idle = Bytes::new(large.idle + self.ground.empty.load(Relaxed));
        figures
    }

    /// That a stream may be handed to this device's driver.
    pub(super) fn check_stream(&self, stream: RawStream) -> Result<()> {
        self.ground.card().check_stream(stream)
    }
}

impl GiveWay for Core {
    fn give_way(&self) -> u64 {
        if self.check_process().is_err() {
            return 0;
        }
        // A part in use gives nothing: it may be this thread that uses it.
        let mut given = 0;
        self.free_passed();
        for heap in &self.heaps {
            let Some(mut heap) = heap.0.try_lock() else { continue };
            heap.tidy(&self.ground);
            given += heap.unmap_empties(&self.ground, 0, drop);
        }
        if self.ground.quiet().is_err() {
            return given;
        }
        let waiting = self.large.try_lock().map(|mut large| (large.idle, large.take_waiting()));
        if let Some((idle, waiting)) = waiting.filter(|(_, waiting)| !waiting.is_empty()) {
            waiting.into_iter().for_each(|span| self.close(span));
            self.ground.pool.trim(Bytes::ZERO);
            given += idle;
        }
        given
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            // The memory belongs to the parent. What is dropped from here on sees that for itself.
            return;
        }
        // Nobody can ask for those any more. Before anything is unmapped, the device is waited for.
        self.streams.all().into_iter().for_each(|address| self.free(address));
        let blocks: u64 = self.heaps.iter_mut().map(|heap| heap.0.get_mut().blocks).sum();
        let blocks = blocks + self.large.get_mut().blocks() as u64;
        let id = self.ground.device.info().id();
        let waiting = self.large.get_mut().take_waiting();
        waiting.into_iter().for_each(|span| self.close(span));
        if blocks > 0 {
            self.trim_heaps(|heap| {
                heap.tidy(&self.ground);
                heap.give_back(&self.ground, 0)
            });
            // Whoever has them may use them for the rest of the process.
            tracing::warn!(device = %id, blocks, "an allocator was dropped before its blocks; its memory stays");
            core::mem::forget(core::mem::take(&mut self.heaps));
            core::mem::forget(core::mem::take(self.large.get_mut()));
            return;
        }
        let regions: Vec<_> =
            core::mem::take(&mut self.heaps).into_iter().flat_map(|heap| heap.0.into_inner().into_regions()).collect();
        if regions.is_empty() {
            return;
        }
        let idle = self.ground.quiet().is_ok();
        for region in regions {
            let pool = self.ground.pool.clone();
            if let Err(error) = region.tear_down(idle, move |chunk| pool.put(chunk)) {
                tracing::warn!(device = %id, %error, "not all of an allocator's memory came back");
            }
        }
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("ground", &self.ground).finish_non_exhaustive()
    }
}
