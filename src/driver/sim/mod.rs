//! A driver that makes no system calls, for tests without a GPU.
//!
//! [`SimDriver`] pretends a card: memory that costs nothing until it is written, addresses that nobody can dereference,
//! streams whose work stays pending until someone waits. What it adds to a real driver is that it watches:
//!
//! * every call is written down ([`SimDriver::ledger`]) and counted;
//! * every rule of [`Driver`] is checked, and a call against one is a [`Violation`];
//! * [`SimDriver::assert_clean`] says at the end that nothing was broken and nothing is left.
//!
//! And it can have the faults of real runtimes: see [`Personality`]. New memory holds a poison pattern, not zeros, so
//! that a forgotten clear shows. Failures of single calls come from [`Faulty`](super::fault::Faulty), which wraps any
//! driver.
//!
//! ```
//! use growspan::driver::sim::{SimDriver, ViolationKind};
//! use growspan::driver::{Call, ChunkProps, Driver, DriverErrorKind};
//!
//! let sim = SimDriver::new();
//! let handle = sim.create(2 << 20, ChunkProps::PLAIN)?;
//! assert!(sim.check_clean().is_err_and(|left| left.contains("1 handle")));
//!
//! // SAFETY: the handle is valid and not used again, but for the misuse that is to be caught: nothing of it is real.
//! unsafe { sim.release(handle)? };
//! // SAFETY: as above.
//! let again = unsafe { sim.release(handle) };
//! assert_eq!(again.unwrap_err().kind(), DriverErrorKind::Misuse);
//! assert_eq!(sim.take_violations()[0].kind, ViolationKind::ReleasedHandle);
//! assert_eq!(sim.count(Call::Release), 2);
//! sim.assert_clean();
//! # Ok::<(), growspan::driver::DriverError>(())
//! ```
//!
//! The driver is a handle that can be cloned: give one to the code under test, as `Arc::new(sim.clone())` or
//! [`sim.driver()`](SimDriver::driver), and keep one to look and to steer.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::bytes::Bytes;

use super::{
    Call, ChunkProps, Driver, DriverInfo, DriverResult, Granularities, MapCount, MemoryInfo, OpenFiles, PinFlags,
    ProcessLimits, RawEvent, RawHandle, RawStream,
};

mod access;
mod ledger;
mod memory;
mod options;
mod personality;
mod pinned;
mod report;
mod space;
mod state;
mod streams;

pub use ledger::{Args, Entry, Outcome, Violation, ViolationKind};
pub use options::SimOptions;
pub use personality::Personality;
pub use report::Figures;

use ledger::Gives;
use state::{State, Step};
use streams::{HostPtr, Work};

/// The simulated driver. Clones are the same device. See the [module](self) for what it is for.
#[derive(Clone)]
pub struct SimDriver {
    shared: Arc<Shared>,
}

struct Shared {
    info: DriverInfo,
    state: Mutex<State>,
    /// Told when hung calls may go on.
    go: Condvar,
}

impl SimDriver {
    /// A card of 24 GiB that does what it says.
    #[must_use]
    pub fn new() -> Self {
        SimOptions::new().build()
    }

    /// A card to be described.
    pub fn builder() -> SimOptions {
        SimOptions::new()
    }

    fn from_options(options: SimOptions) -> Self {
        static CARDS: AtomicU64 = AtomicU64::new(0);
        let mut info = options.info.clone();
        // As any card it has a number of its own.
        info.uuid = Some(u128::from(CARDS.fetch_add(1, Relaxed)).to_be_bytes());
        Self { shared: Arc::new(Shared { info, state: Mutex::new(State::new(options)), go: Condvar::new() }) }
    }

    /// The same device as what code under test takes.
    #[must_use]
    pub fn driver(&self) -> Arc<dyn Driver> {
        Arc::new(self.clone())
    }

    /// The calls made so far, oldest first; only the last ones if there were more than
    /// [`SimOptions::ledger`] keeps.
    #[must_use]
    pub fn ledger(&self) -> Vec<Entry> {
        self.shared.state.lock().ledger.entries()
    }

    /// How many calls of one word were made.
    #[must_use]
    pub fn count(&self, call: Call) -> u64 {
        self.shared.state.lock().ledger.count(call)
    }

    /// How many calls were made.
    #[must_use]
    pub fn calls(&self) -> u64 {
        let state = self.shared.state.lock();
        Call::ALL.into_iter().map(|call| state.ledger.count(call)).sum()
    }

    /// Forgets the calls and their counts. Their numbers go on, and violations stay.
    pub fn clear_ledger(&self) {
        self.shared.state.lock().ledger.clear();
    }

    /// What was done against the rules, oldest first.
    #[must_use]
    pub fn violations(&self) -> Vec<Violation> {
        self.shared.state.lock().ledger.violations.clone()
    }

    /// The same, forgetting them: for tests that break a rule on purpose.
    pub fn take_violations(&self) -> Vec<Violation> {
        core::mem::take(&mut self.shared.state.lock().ledger.violations)
    }

    /// What exists now.
    #[must_use]
    pub fn figures(&self) -> Figures {
        Figures::of(&self.shared.state.lock())
    }

    /// Says that no rule was broken and nothing is left: no handle, span, mapping, block or event, no memory withheld,
    /// no work pending. After the device was lost, what is left does not count, since nothing can be given back.
    ///
    /// # Errors
    /// A text of what was broken and what is left.
    pub fn check_clean(&self) -> Result<(), String> {
        report::check_clean(&self.shared.state.lock())
    }

    /// [`check_clean`](Self::check_clean) as an assertion.
    ///
    /// # Panics
    /// When it is not clean, saying why.
    #[track_caller]
    pub fn assert_clean(&self) {
        let result = self.check_clean();
        assert!(result.is_ok(), "{}", result.err().unwrap_or_default());
    }

    /// Lets other programs have `bytes` of the card's memory: all of them together, not in addition.
    pub fn set_used_by_others(&self, bytes: Bytes) {
        self.shared.state.lock().others = bytes.get();
    }

    /// Makes a stream. It lives as long as the device.
    ///
    /// Use it with this device alone: real drivers follow a stream's pointer, and this one leads nowhere. The value is
    /// no address of any program, so that a mistake is a fault at once and not a quiet one.
    #[must_use]
    pub fn stream(&self) -> RawStream {
        RawStream::simulated(self.shared.state.lock().streams.stream())
    }

    /// Queues work on a stream that will touch `[addr, addr + bytes)`, as a kernel would. It stays pending until
    /// [`finish`](Self::finish) or until the driver is made to wait for it. Memory that goes before that takes the
    /// device with it, as seen on an H200.
    ///
    /// ```
    /// use growspan::driver::sim::SimDriver;
    /// use growspan::driver::{Driver, RawStream};
    ///
    /// let sim = SimDriver::new();
    /// let block = sim.allocate(4096)?;
    /// sim.queue_work(RawStream::DEFAULT, block, 4096);
    /// let event = sim.event_create()?;
    /// // SAFETY: event and stream are this device's.
    /// unsafe { sim.event_record(event, RawStream::DEFAULT)? };
    /// // SAFETY: as above.
    /// assert!(!unsafe { sim.event_query(event)? });
    /// sim.finish(RawStream::DEFAULT);
    /// // SAFETY: as above.
    /// assert!(unsafe { sim.event_query(event)? });
    /// # // SAFETY: not used again.
    /// # unsafe { sim.event_destroy(event)? };
    /// # // SAFETY: no work touches it any more.
    /// # unsafe { sim.free(block, 4096)? };
    /// # sim.assert_clean();
    /// # Ok::<(), growspan::driver::DriverError>(())
    /// ```
    pub fn queue_work(&self, stream: RawStream, addr: u64, bytes: u64) {
        self.steer(|state| {
            state.check_stream(stream.raw)?;
            if !state.lost {
                state.streams.push(stream.raw, Work::Touch { addr, bytes });
            }
            Ok(())
        });
    }

    /// Lets a stream get done with its work. Work that touches memory which is not there loses the device.
    pub fn finish(&self, stream: RawStream) {
        self.steer(|state| {
            state.check_stream(stream.raw)?;
            state.finish(stream.raw, u64::MAX)
        });
    }

    /// Lets all streams get done with their work.
    pub fn finish_all(&self) {
        self.steer(State::finish_all);
    }

    /// Does what no call of the driver does; what goes wrong is put down to a wait.
    fn steer(&self, body: impl FnOnce(&mut State) -> Step<()>) {
        let mut state = self.shared.state.lock();
        if let Err(stop) = body(&mut state) {
            state.conclude(Call::Synchronize, stop);
        }
    }

    /// Begins or ends the capture of a graph on a stream, during which managing memory is a violation.
    pub fn capture(&self, stream: RawStream, on: bool) {
        self.shared.state.lock().streams.capture(stream.raw, on);
    }

    /// Loses the device, as an illegal access does: every later call fails with code 700.
    pub fn lose(&self) {
        self.shared.state.lock().lose();
    }

    /// Whether the device was lost.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.shared.state.lock().lost
    }

    /// How many calls hang now.
    #[must_use]
    pub fn hung(&self) -> u64 {
        self.shared.state.lock().hung
    }

    /// Lets hung calls go, so that their threads end: those, and later ones at once, return an error.
    pub fn let_go(&self) {
        self.shared.state.lock().let_go = true;
        self.shared.go.notify_all();
    }

    fn call<T: Gives>(&self, call: Call, args: Args, body: impl FnOnce(&mut State) -> Step<T>) -> DriverResult<T> {
        let mut state = self.shared.state.lock();
        if state.habits.hangs_in.contains(&call) {
            state.hung += 1;
            while !state.let_go {
                self.shared.go.wait(&mut state);
            }
            state.hung -= 1;
        }
        state.call(call, args, body)
    }
}

impl Default for SimDriver {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SimDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimDriver")
            .field("device", &self.shared.info.id())
            .field("figures", &self.figures())
            .finish_non_exhaustive()
    }
}

/// The limits of the pretended process.
#[derive(Debug)]
struct Limits(SimDriver);

impl ProcessLimits for Limits {
    fn open_files(&self) -> std::io::Result<OpenFiles> {
        let state = self.0.shared.state.lock();
        Ok(OpenFiles { held: state.open_files(), soft: state.soft_files, hard: state.habits.files.hard })
    }

    fn raise_open_files(&self, soft: u64) -> std::io::Result<()> {
        let mut state = self.0.shared.state.lock();
        if soft > state.habits.files.hard {
            return Err(std::io::ErrorKind::PermissionDenied.into());
        }
        state.soft_files = soft;
        Ok(())
    }

    fn maps(&self) -> std::io::Result<MapCount> {
        let state = self.0.shared.state.lock();
        Ok(MapCount { held: state.map_entries(), limit: state.habits.maps.limit })
    }
}

// SAFETY: `Space` hands out spans and blocks that do not overlap, from addresses that no program has, and takes them
// back only when they are freed. `host_visible` is false whatever the options say, so nothing dereferences an address,
// and what a personality gets wrong about mappings or a null span can at most make copies fail or give other
// bytes: `copy_out` writes its whole length or fails. Page-locked blocks are real memory of the program's allocator,
// zeroed, which `pinned` frees once. No foreign code is called.
unsafe impl Driver for SimDriver {
    fn info(&self) -> &DriverInfo {
        &self.shared.info
    }

    fn support(&self) -> DriverResult<()> {
        self.call(Call::Support, Args::NONE, |state| state.support())
    }

    fn granularity(&self) -> DriverResult<Granularities> {
        self.call(Call::Granularity, Args::NONE, |state| Ok(state.granularity()))
    }

    fn memory(&self) -> DriverResult<MemoryInfo> {
        self.call(Call::Memory, Args::NONE, |state| Ok(state.memory()))
    }

    fn limits(&self) -> Option<Arc<dyn ProcessLimits>> {
        Some(Arc::new(Limits(self.clone())))
    }

    fn reserve(&self, bytes: u64, align: u64) -> DriverResult<u64> {
        self.call(Call::Reserve, Args::NONE.bytes(bytes), |state| state.reserve(bytes, align))
    }

    unsafe fn free_span(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.call(Call::FreeSpan, Args::NONE.addr(addr).bytes(bytes), |state| state.free_span(addr, bytes))
    }

    fn create(&self, bytes: u64, props: ChunkProps) -> DriverResult<RawHandle> {
        self.call(Call::Create, Args::NONE.bytes(bytes), |state| state.create(bytes, props))
    }

    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()> {
        self.call(Call::Release, Args::NONE.handle(handle), |state| state.release(handle))
    }

    unsafe fn map(&self, addr: u64, bytes: u64, handle: RawHandle) -> DriverResult<()> {
        let args = Args::NONE.addr(addr).bytes(bytes).handle(handle);
        self.call(Call::Map, args, |state| state.map(addr, bytes, handle))
    }

    unsafe fn set_access(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.call(Call::SetAccess, Args::NONE.addr(addr).bytes(bytes), |state| state.set_access(addr, bytes))
    }

    unsafe fn unmap(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.call(Call::Unmap, Args::NONE.addr(addr).bytes(bytes), |state| state.unmap(addr, bytes))
    }

    fn allocate(&self, bytes: u64) -> DriverResult<u64> {
        self.call(Call::Allocate, Args::NONE.bytes(bytes), |state| state.allocate(bytes))
    }

    unsafe fn free(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.call(Call::Free, Args::NONE.addr(addr).bytes(bytes), |state| state.free(addr, bytes))
    }

    unsafe fn pin(&self, addr: u64, bytes: u64, flags: PinFlags) -> DriverResult<()> {
        self.call(Call::Pin, Args::NONE.addr(addr).bytes(bytes), |state| state.pin(addr, bytes, flags))
    }

    unsafe fn unpin(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.call(Call::Unpin, Args::NONE.addr(addr).bytes(bytes), |state| state.unpin(addr, bytes))
    }

    fn allocate_pinned(&self, bytes: u64, flags: PinFlags) -> DriverResult<u64> {
        self.call(Call::AllocatePinned, Args::NONE.bytes(bytes), |state| state.allocate_pinned(bytes, flags))
    }

    unsafe fn free_pinned(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.call(Call::FreePinned, Args::NONE.addr(addr).bytes(bytes), |state| state.free_pinned(addr, bytes))
    }

    unsafe fn pinned_device_ptr(&self, addr: u64) -> DriverResult<u64> {
        self.call(Call::PinnedDevicePtr, Args::NONE.addr(addr), |state| state.pinned_device_ptr(addr))
    }

    unsafe fn copy_in(&self, dst: u64, src: *const u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        let args = Args::NONE.addr(dst).bytes(bytes).stream(stream);
        let work = Work::CopyIn { dst, src: HostPtr(src.cast_mut()), bytes };
        // SAFETY: the caller promises that `src` is valid for reads until the copy is over.
        self.call(Call::CopyIn, args, |state| unsafe { state.submit(work, stream) })
    }

    unsafe fn copy_out(&self, dst: *mut u8, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        let args = Args::NONE.source(src).bytes(bytes).stream(stream);
        let work = Work::CopyOut { dst: HostPtr(dst), src, bytes };
        // SAFETY: the caller promises that `dst` is valid for writes until the copy is over.
        self.call(Call::CopyOut, args, |state| unsafe { state.submit(work, stream) })
    }

    unsafe fn copy_within(&self, dst: u64, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        let args = Args::NONE.addr(dst).source(src).bytes(bytes).stream(stream);
        // SAFETY: there is no host pointer in it.
        self.call(Call::CopyWithin, args, |state| unsafe { state.submit(Work::CopyWithin { dst, src, bytes }, stream) })
    }

    unsafe fn fill(&self, dst: u64, value: u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        let args = Args::NONE.addr(dst).bytes(bytes).stream(stream);
        // SAFETY: there is no host pointer in it.
        self.call(Call::Fill, args, |state| unsafe { state.submit(Work::Fill { dst, value, bytes }, stream) })
    }

    fn event_create(&self) -> DriverResult<RawEvent> {
        self.call(Call::EventCreate, Args::NONE, |state| Ok(RawEvent(state.streams.event())))
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        self.call(Call::EventRecord, Args::NONE.event(event).stream(Some(stream)), |state| {
            state.check_event(event.0)?;
            state.check_stream(stream.raw)?;
            state.streams.record(event.0, stream.raw);
            Ok(())
        })
    }

    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<bool> {
        self.call(Call::EventQuery, Args::NONE.event(event), |state| {
            state.check_event(event.0)?;
            Ok(state.streams.is_reached(event.0))
        })
    }

    unsafe fn event_wait(&self, event: RawEvent) -> DriverResult<()> {
        self.call(Call::EventWait, Args::NONE.event(event), |state| {
            state.check_event(event.0)?;
            state.streams.mark(event.0).map_or(Ok(()), |(stream, until)| state.finish(stream, until))
        })
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        self.call(Call::EventDestroy, Args::NONE.event(event), |state| {
            state.check_event(event.0)?;
            state.streams.destroy(event.0);
            Ok(())
        })
    }

    fn synchronize(&self) -> DriverResult<()> {
        self.call(Call::Synchronize, Args::NONE, State::finish_all)
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> DriverResult<()> {
        self.call(Call::SynchronizeStream, Args::NONE.stream(Some(stream)), |state| {
            state.check_stream(stream.raw)?;
            state.finish(stream.raw, u64::MAX)
        })
    }

    unsafe fn stream_is_capturing(&self, stream: RawStream) -> DriverResult<bool> {
        self.call(Call::StreamIsCapturing, Args::NONE.stream(Some(stream)), |state| {
            state.check_stream(stream.raw)?;
            Ok(state.streams.is_capturing(stream.raw))
        })
    }
}
