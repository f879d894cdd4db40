//! What lies under a page-locked allocator: the host's memory, as a driver whose chunks a device reaches.
//!
//! ```text
//! span    |<------------------------- the host driver's: PROT_NONE ------------------------->|
//! chunks  | memfd 1 | memfd 2 |     memfd 3     |               nothing                      |
//! device  | piece   | piece   |      piece      |               each registered while it is mapped
//! ```
//!
//! Spans, chunks and mappings are the [host driver's](HostDriver). This one adds that a mapping is registered with the
//! device when it becomes accessible, and let go of before it is taken away. So whatever grows and shrinks in place over
//! any driver does so over page-locked memory. Streams, events and waiting are the device's; copies are the host's, and
//! over when they return.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::policy::ThpPolicy;
use super::region::{PinnedPiece, device_ptr_of};
use crate::bytes::Bytes;
use crate::card::{is_gone, twice};
use crate::device::{Device, DeviceOptions};
use crate::driver::host::{HostDriver, HostOptions};
use crate::driver::{
    Call, ChunkProps, Driver, DriverError, DriverErrorKind, DriverInfo, DriverResult, Gate, Granularities, MemoryInfo,
    PinFlags, RawEvent, RawHandle, RawStream,
};
use crate::error::Result;
use crate::sys::pages;

const FLAGS: PinFlags = PinFlags::USUAL;

/// The host's memory, page-locked for a device.
#[derive(Debug)]
pub(crate) struct LockedHost {
    info: DriverInfo,
    host: HostDriver,
    device: Device,
    /// All mappings and blocks, by address.
    pieces: Mutex<BTreeMap<u64, Piece>>,
    /// Bytes of blocks, which the host driver does not count.
    blocks: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    bytes: u64,
    /// Whether the device has it registered.
    locked: bool,
    /// Where the device sees it: what its driver said when it was registered.
    device_ptr: Option<u64>,
}

impl LockedHost {
    /// Host memory for a device, as a device of its own.
    pub(crate) fn open(device: &Device, options: HostOptions) -> Result<(Arc<Self>, Device)> {
        let host = HostDriver::open(options)?;
        let theirs = device.info();
        let mut info = host.info().clone();
        // A stream that the device takes is one that this driver hands on.
        (info.backend, info.ordinal, info.uuid) = (theirs.backend, theirs.ordinal, theirs.uuid);
        info.name = format!("host memory, page-locked for {}", theirs.name);
        info.queues = theirs.queues;
        info.memory_word = "page-locked memory";
        info.memory_is_the_devices = false;
        if let Some(most) = theirs.quirks.max_pin {
            info.quirks.max_chunk = info.quirks.max_chunk.min(most);
        }
        let this =
            Arc::new(Self { info, host, device: device.clone(), pieces: Mutex::default(), blocks: AtomicU64::new(0) });
        // What is not mapped is nobody's to reach: it goes back to the system at once.
        let driver = Arc::clone(&this);
        let own = DeviceOptions::new().pool_keep(Bytes::ZERO).open(driver)?;
        Ok((this, own))
    }

    /// The device that reaches the memory.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The registered pieces that `[addr, addr + bytes)` lies in, cut to it, in order; offsets count from `addr`. None
    /// unless they cover all of it.
    pub(crate) fn pieces(&self, addr: u64, bytes: u64) -> Option<Vec<PinnedPiece>> {
        let pieces = self.pieces.lock();
        let end = addr.checked_add(bytes)?;
        let (mut at, mut found) = (addr, Vec::new());
        while at < end {
            let (&start, piece) = pieces.range(..=at).next_back()?;
            let next = end.min(start + piece.bytes);
            if at >= next || !piece.locked {
                return None;
            }
            found.push(PinnedPiece {
                offset: Bytes::new(at - addr),
                bytes: Bytes::new(next - at),
                host_ptr: at,
                device_ptr: piece.device_ptr.map(|device_ptr| device_ptr + (at - start)),
            });
            at = next;
        }
        Some(found)
    }

    fn gate(&self) -> &Gate {
        self.device.card().gate()
    }

    /// Registers a mapping; a failure leaves it as it was.
    fn lock(&self, addr: u64, bytes: u64) -> DriverResult<Option<u64>> {
        // SAFETY: these are pages of a mapping of ours, accessible, kept out of children, and of a file that nobody else
        // has. They stay mapped as long as the piece is noted as locked: `unmap` lets go of it first.
        unsafe { self.gate().pin(addr, bytes, FLAGS) }?;
        // SAFETY: it was locked just now, mapped.
        unsafe { device_ptr_of(self.gate(), addr, FLAGS) }.inspect_err(|_| {
            // SAFETY: it was locked just now, and nobody was told.
            if let Err(then) = twice(|| unsafe { self.gate().unpin(addr, bytes) }) {
                tracing::warn!(device = %self.info.id(), error = %then, "memory that was not wanted stays locked");
                self.note(addr, true, None);
            }
        })
    }

    fn note(&self, addr: u64, locked: bool, device_ptr: Option<u64>) {
        if let Some(piece) = self.pieces.lock().get_mut(&addr) {
            (piece.locked, piece.device_ptr) = (locked, device_ptr);
        }
    }

    /// Counts a block among what there may be.
    fn count_block(&self, bytes: u64) -> DriverResult<()> {
        let memory = self.host.memory()?;
        let more = |blocks: u64| blocks.checked_add(bytes).filter(|sum| *sum <= memory.total && bytes <= memory.free);
        match self.blocks.fetch_update(Relaxed, Relaxed, more) {
            Ok(_) => Ok(()),
            Err(blocks) => {
                let [asked, blocks, free, total] = [bytes, blocks, memory.free, memory.total].map(Bytes::new);
                let detail = format!("{asked} beside {blocks} of {total}, of which {free} can be had");
                Err(DriverError::new(Call::Allocate, DriverErrorKind::OutOfMemory).with_detail(detail))
            }
        }
    }

    fn uncount_block(&self, bytes: u64) {
        self.blocks.fetch_sub(bytes, Relaxed);
    }

    fn allocate_counted(&self, bytes: u64) -> DriverResult<u64> {
        let addr = self.gate().allocate_pinned(bytes, FLAGS).map_err(passed_on)?;
        // SAFETY: it was allocated just now, mapped.
        let device_ptr = unsafe { device_ptr_of(self.gate(), addr, FLAGS) }.map_err(|error| {
            // SAFETY: it was allocated just now with this size, and nobody knows of it.
            if let Err(then) = twice(|| unsafe { self.gate().free_pinned(addr, bytes) }) {
                tracing::warn!(device = %self.info.id(), error = %then, "page-locked memory that was not wanted stays");
            }
            passed_on(error)
        })?;
        self.pieces.lock().insert(addr, Piece { bytes, locked: true, device_ptr });
        Ok(addr)
    }

    /// Lets the device go of a mapping, which it is done with.
    fn let_go(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let locked = self.pieces.lock().get(&addr).is_some_and(|piece| piece.locked);
        if locked {
            // SAFETY: the book bears out that it is locked with this size; the caller vouches that the device is done.
            match unsafe { self.gate().unpin(addr, bytes) } {
                Err(error) if !is_gone(&error) => return Err(error),
                _ => self.note(addr, false, None),
            }
        }
        Ok(())
    }
}

/// What the device's driver says, as this driver passes it on. Host memory outlives a device that was lost, and is given
/// back like any other: so that is no reason to close the door on it.
fn passed_on(error: DriverError) -> DriverError {
    if !is_gone(&error) {
        return error;
    }
    DriverError::new(error.call(), DriverErrorKind::Other).with_detail(error.to_string())
}

/// Of a device that is gone nothing has to be waited for.
fn waited(result: DriverResult<()>) -> DriverResult<()> {
    match result {
        Err(error) if is_gone(&error) => Ok(()),
        result => result,
    }
}

// SAFETY: spans, handles and mappings are the host driver's, which makes the same promises, and so are copies: they are
// over when they return. What is added, registering, leaves the contents and the access of the host alone. Blocks are
// page-locked ones of the device's driver, which promises of them what is asked here: valid for the host, initialised,
// where they are until they are freed, apart from other memory in use. No foreign code is called but through the
// device's gate.
unsafe impl Driver for LockedHost {
    fn info(&self) -> &DriverInfo {
        &self.info
    }

    fn support(&self) -> DriverResult<()> {
        self.host.support()
    }

    fn granularity(&self) -> DriverResult<Granularities> {
        self.host.granularity()
    }

    fn memory(&self) -> DriverResult<MemoryInfo> {
        self.host.memory()
    }

    fn reserve(&self, bytes: u64, align: u64) -> DriverResult<u64> {
        self.host.reserve(bytes, align)
    }

    unsafe fn free_span(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.free_span(addr, bytes) }
    }

    fn create(&self, bytes: u64, props: ChunkProps) -> DriverResult<RawHandle> {
        self.host.create(bytes, props)
    }

    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.release(handle) }
    }

    unsafe fn map(&self, addr: u64, bytes: u64, handle: RawHandle) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.map(addr, bytes, handle) }?;
        if ThpPolicy::of(self.info.backend) == ThpPolicy::Avoid {
            // A kernel without huge pages does not know the advice.
            // SAFETY: it was mapped just now.
            let _ = unsafe { pages::advise_huge(addr, bytes, false) };
        }
        self.pieces.lock().insert(addr, Piece { bytes, locked: false, device_ptr: None });
        Ok(())
    }

    unsafe fn set_access(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.set_access(addr, bytes) }?;
        let inside: Vec<_> = self.pieces.lock().range(addr..addr + bytes).map(|(at, piece)| (*at, *piece)).collect();
        // What is registered before an error is let go of when it is unmapped.
        for (at, piece) in inside.into_iter().filter(|(_, piece)| !piece.locked) {
            let device_ptr = self.lock(at, piece.bytes).map_err(passed_on)?;
            self.note(at, true, device_ptr);
        }
        Ok(())
    }

    unsafe fn unmap(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.let_go(addr, bytes).map_err(passed_on)?;
        // SAFETY: the contract is the same, and the device has let go of it.
        match unsafe { self.host.unmap(addr, bytes) } {
            Ok(()) => {
                self.pieces.lock().remove(&addr);
                Ok(())
            }
            Err(error) => {
                // It stays as it was, if that can be.
                match self.lock(addr, bytes) {
                    Ok(device_ptr) => self.note(addr, true, device_ptr),
                    Err(then) => tracing::error!(
                        device = %self.info.id(), %error, %then,
                        "host memory could not be unmapped, and the device does not reach it any more"
                    ),
                }
                Err(error)
            }
        }
    }

    fn allocate(&self, bytes: u64) -> DriverResult<u64> {
        self.count_block(bytes)?;
        self.allocate_counted(bytes).inspect_err(|_| self.uncount_block(bytes))
    }

    unsafe fn free(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // Before it is free, since another thread may get the same addresses right after.
        let piece = self.pieces.lock().remove(&addr);
        // SAFETY: the block came from `allocate` with this size; the caller vouches that nobody uses it.
        match unsafe { self.gate().free_pinned(addr, bytes) } {
            Ok(()) => self.uncount_block(bytes),
            Err(error) => {
                self.pieces.lock().extend(piece.map(|piece| (addr, piece)));
                return Err(error);
            }
        }
        Ok(())
    }

    unsafe fn copy_in(&self, dst: u64, src: *const u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.copy_in(dst, src, bytes, stream) }
    }

    unsafe fn copy_out(&self, dst: *mut u8, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.copy_out(dst, src, bytes, stream) }
    }

    unsafe fn copy_within(&self, dst: u64, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.copy_within(dst, src, bytes, stream) }
    }

    unsafe fn fill(&self, dst: u64, value: u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.fill(dst, value, bytes, stream) }
    }

    fn event_create(&self) -> DriverResult<RawEvent> {
        self.gate().event_create().map_err(passed_on)
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        // SAFETY: the contract is the same; events and streams of this driver are the device's.
        unsafe { self.gate().event_record(event, stream) }.map_err(passed_on)
    }

    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<bool> {
        // SAFETY: as above.
        match unsafe { self.gate().event_query(event) } {
            Err(error) if is_gone(&error) => Ok(true),
            result => result,
        }
    }

    unsafe fn event_wait(&self, event: RawEvent) -> DriverResult<()> {
        // SAFETY: as above.
        waited(unsafe { self.gate().event_wait(event) })
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        // SAFETY: as above.
        waited(unsafe { self.gate().event_destroy(event) })
    }

    fn synchronize(&self) -> DriverResult<()> {
        waited(self.gate().synchronize())
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> DriverResult<()> {
        // SAFETY: as above.
        waited(unsafe { self.gate().synchronize_stream(stream) })
    }

    unsafe fn stream_is_capturing(&self, stream: RawStream) -> DriverResult<bool> {
        // SAFETY: as above.
        match unsafe { self.gate().stream_is_capturing(stream) } {
            Err(error) if is_gone(&error) => Ok(false),
            result => result,
        }
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::driver::Call;
    use crate::driver::fault::{FaultPlan, Faulty};
    use crate::driver::sim::SimDriver;

    const CHUNK: u64 = 64 << 10;

    #[test]
    fn the_book_holds_what_is_locked_and_no_more() {
        let sim = SimDriver::new();
        let faulty = Faulty::new(sim.driver(), FaultPlan::count());
        let control = faulty.control();
        let device = Device::from_driver(Arc::new(faulty)).unwrap();
        let options = HostOptions::default().with_capacity(Bytes::mib(1)).with_granularity(Bytes::new(CHUNK));
        let (locked, _own) = LockedHost::open(&device, options).unwrap();
        let span = locked.reserve(4 * CHUNK, CHUNK).unwrap();
        let (small, large) = (
            [(); 2].map(|()| locked.create(CHUNK, ChunkProps::PLAIN).unwrap()),
            locked.create(2 * CHUNK, ChunkProps::PLAIN).unwrap(),
        );
        let sizes = |bytes| Some(locked.pieces(span, bytes)?.iter().map(|piece| piece.bytes.get()).collect::<Vec<_>>());
        let unmap = |offset, bytes| {
            // SAFETY: it is mapped like that, and nobody uses it.
            unsafe { locked.unmap(span + offset, bytes) }.unwrap();
        };
        for (number, handle) in small.into_iter().enumerate() {
            // SAFETY: the span is empty there, and the chunk has that size.
            unsafe { locked.map(span + number as u64 * CHUNK, CHUNK, handle) }.unwrap();
            assert_eq!(sizes(1), None, "not registered yet");
        }
        // The second cannot be registered, and then all can.
        control.arm(FaultPlan::nth(2).of(Call::Pin));
        // SAFETY: two whole mappings cover it.
        unsafe { locked.set_access(span, 2 * CHUNK) }.unwrap_err();
        control.disarm();
        assert_eq!((sizes(CHUNK), sizes(CHUNK + 1)), (Some(vec![CHUNK]), None));
        // SAFETY: as above.
        unsafe { locked.set_access(span, 2 * CHUNK) }.unwrap();
        assert_eq!((sizes(2 * CHUNK), sizes(2 * CHUNK + 1)), (Some(vec![CHUNK; 2]), None));
        // One that is not let go of stays, and one that is has gone.
        control.arm(FaultPlan::nth(1).of(Call::Unpin));
        // SAFETY: it is mapped like that, and nobody uses it.
        unsafe { locked.unmap(span, CHUNK) }.unwrap_err();
        control.disarm();
        assert_eq!(sizes(2 * CHUNK), Some(vec![CHUNK; 2]));
        unmap(0, CHUNK);
        assert_eq!((sizes(1), sim.figures().pins), (None, 1));
        unmap(CHUNK, CHUNK);
        // A larger chunk where two were.
        // SAFETY: the span is empty again, and the chunk has that size.
        unsafe { locked.map(span, 2 * CHUNK, large) }.unwrap();
        // SAFETY: one whole mapping covers it.
        unsafe { locked.set_access(span, 2 * CHUNK) }.unwrap();
        assert_eq!(sizes(2 * CHUNK), Some(vec![2 * CHUNK]));
        let piece = locked.pieces(span + 100, CHUNK).unwrap()[0];
        assert_eq!((piece.offset, piece.bytes.get(), piece.host_ptr), (Bytes::ZERO, CHUNK, span + 100));
        assert_eq!(piece.device_ptr, Some(span + 100 + (1 << 57)));
        // Locked, but the device cannot say where.
        unmap(0, 2 * CHUNK);
        // SAFETY: as above.
        unsafe { locked.map(span, 2 * CHUNK, large) }.unwrap();
        control.arm(FaultPlan::every().of(Call::PinnedDevicePtr).of(Call::Unpin));
        // SAFETY: as above.
        unsafe { locked.set_access(span, 2 * CHUNK) }.unwrap_err();
        control.disarm();
        assert_eq!(sim.figures().pins, 1);
        unmap(0, 2 * CHUNK);
        assert_eq!(sim.figures().pins, 0, "it is let go of later");
        for handle in small.into_iter().chain([large]) {
            // SAFETY: it is mapped nowhere and not used again.
            unsafe { locked.release(handle) }.unwrap();
        }
        // SAFETY: nothing is mapped there.
        unsafe { locked.free_span(span, 4 * CHUNK) }.unwrap();
        sim.assert_clean();
    }
}
