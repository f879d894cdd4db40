//! Failures on purpose: the k-th call of any driver, by plan.
//!
//! [`Faulty`] wraps a driver, real or simulated, and strikes as its [`FaultPlan`] says. A call that is struck never
//! reaches the driver, so a failed call has changed nothing, which is what [`Driver`] promises. With it
//! one proves that an operation is all or nothing: count its calls, then fail each of them in turn.
//!
//! ```
//! use growspan::driver::fault::{FaultPlan, Faulty};
//! use growspan::driver::sim::SimDriver;
//! use growspan::driver::{ChunkProps, Driver, DriverResult};
//!
//! // Makes two handles, or none.
//! fn pair(driver: &dyn Driver) -> DriverResult<()> {
//!     let first = driver.create(2 << 20, ChunkProps::PLAIN)?;
//!     let second = driver.create(2 << 20, ChunkProps::PLAIN);
//!     // SAFETY: valid and not used again.
//!     unsafe { driver.release(first)? };
//!     // SAFETY: as above.
//!     second.and_then(|second| unsafe { driver.release(second) })
//! }
//!
//! let sim = SimDriver::new();
//! let faulty = Faulty::new(sim.driver(), FaultPlan::count());
//! let control = faulty.control();
//! pair(&faulty)?;
//! let calls = control.counted();
//! assert_eq!(calls, 4);
//! for k in 1..=2 {
//!     control.arm(FaultPlan::nth(k));
//!     assert!(pair(&faulty).is_err());
//!     assert!(control.struck());
//!     control.disarm();
//!     sim.assert_clean();
//! }
//! # Ok::<(), growspan::driver::DriverError>(())
//! ```

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{
    Call, ChunkProps, Driver, DriverError, DriverErrorKind, DriverInfo, DriverResult, Granularities, MemoryInfo,
    PinFlags, ProcessLimits, RawEvent, RawHandle, RawStream,
};

/// Which of the calls that count are struck. Calls are numbered from 1 since the plan was armed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Strikes {
    None,
    /// Those with a number in this range, both ends included.
    Between(u64, u64),
    Listed(Vec<u64>),
}

/// When to fail, and how. See the [module](self) for its use.
///
/// ```
/// use growspan::driver::fault::FaultPlan;
/// use growspan::driver::{Call, DriverErrorKind};
///
/// let _ = FaultPlan::nth(3); // the third call, whichever it is
/// let _ = FaultPlan::nth(1).of(Call::SetAccess); // the first set access
/// let _ = FaultPlan::after(5).of(Call::Create); // every create after the fifth: memory has run out
/// let _ = FaultPlan::list([2, 3]).of_memory(); // the second and third call that changes memory
/// let _ = FaultPlan::every().of(Call::Release).pretend(); // no release does anything, and all say they did
/// let _ = FaultPlan::nth(1).kind(DriverErrorKind::DeviceLost);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a plan does nothing until it is armed"]
pub struct FaultPlan {
    strikes: Strikes,
    /// The calls that count; all of them if there is no list.
    among: Option<Vec<Call>>,
    kind: Option<DriverErrorKind>,
    pretend: bool,
}

impl FaultPlan {
    const fn new(strikes: Strikes) -> Self {
        Self { strikes, among: None, kind: None, pretend: false }
    }

    /// Strikes nothing, and only counts.
    pub const fn count() -> Self {
        Self::new(Strikes::None)
    }

    /// Strikes the `k`-th call, counted from 1.
    pub const fn nth(k: u64) -> Self {
        Self::new(Strikes::Between(k, k))
    }

    /// Strikes every call after the `n`-th.
    pub const fn after(n: u64) -> Self {
        Self::new(Strikes::Between(n.saturating_add(1), u64::MAX))
    }

    /// Strikes every call.
    pub const fn every() -> Self {
        Self::after(0)
    }

    /// Strikes the calls with these numbers, counted from 1.
    pub fn list(numbers: impl IntoIterator<Item = u64>) -> Self {
        Self::new(Strikes::Listed(numbers.into_iter().collect()))
    }

    /// Only calls of this word count, and those of others given before.
    pub fn of(mut self, call: Call) -> Self {
        self.among.get_or_insert_default().push(call);
        self
    }

    /// Only calls that change memory count: spans, handles, mappings, access, blocks and page-locked memory.
    pub fn of_memory(mut self) -> Self {
        self.among.get_or_insert_default().extend(Call::MEMORY);
        self
    }

    /// The error of the struck calls. Unless set, `create`, `allocate` and `allocate_pinned` fail with
    /// [`OutOfMemory`](DriverErrorKind::OutOfMemory) and all others with [`Other`](DriverErrorKind::Other).
    pub const fn kind(mut self, kind: DriverErrorKind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Struck calls say they succeeded and do nothing, as some runtimes' do. A pretended `copy_out` gives zeros.
    ///
    /// Calls that have to return something, and calls that wait, cannot pretend and fail as without this: whoever
    /// believed in a wait that was none would free memory that a copy still writes to. Nor can `map` and `set_access`
    /// of a driver whose memory the host may touch.
    pub const fn pretend(mut self) -> Self {
        self.pretend = true;
        self
    }

    fn counts(&self, call: Call) -> bool {
        self.among.as_ref().is_none_or(|among| among.contains(&call))
    }

    fn strikes(&self, number: u64) -> bool {
        match &self.strikes {
            Strikes::None => false,
            Strikes::Between(first, last) => (*first..=*last).contains(&number),
            Strikes::Listed(numbers) => numbers.contains(&number),
        }
    }
}

/// What a [`Faulty`] and its controls share.
#[derive(Debug)]
struct Door {
    plan: Option<FaultPlan>,
    counted: u64,
    struck: Vec<Strike>,
}

/// A call that was struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Strike {
    /// Its number among the calls that counted.
    pub number: u64,
    /// Which call it was.
    pub call: Call,
    /// Whether it said it succeeded.
    pub pretended: bool,
}

/// Arms and disarms a [`Faulty`] while it is in use, from any thread.
#[derive(Clone, Debug)]
pub struct FaultControl(Arc<Mutex<Door>>);

impl FaultControl {
    /// Follows this plan from now on, counting from the next call.
    pub fn arm(&self, plan: FaultPlan) {
        *self.0.lock() = Door { plan: Some(plan), counted: 0, struck: Vec::new() };
    }

    /// Lets everything through and stops counting. What was counted and struck can still be asked.
    pub fn disarm(&self) {
        self.0.lock().plan = None;
    }

    /// How many calls counted since the plan was armed, struck ones among them.
    #[must_use]
    pub fn counted(&self) -> u64 {
        self.0.lock().counted
    }

    /// Whether a call was struck since the plan was armed.
    #[must_use]
    pub fn struck(&self) -> bool {
        !self.0.lock().struck.is_empty()
    }

    /// The calls that were struck since the plan was armed.
    #[must_use]
    pub fn strikes(&self) -> Vec<Strike> {
        self.0.lock().struck.clone()
    }
}

/// Whether a caller that believes a call was made can do no harm to the host's memory.
const fn can_pretend(call: Call, host_visible: bool) -> bool {
    match call {
        // Believing leads to less than there is, to a leak, or to bytes that are not the expected ones.
        Call::Support
        | Call::FreeSpan
        | Call::Release
        | Call::Unmap
        | Call::Free
        | Call::Pin
        | Call::FreePinned
        | Call::CopyIn
        | Call::CopyOut
        | Call::CopyWithin
        | Call::Fill
        | Call::EventDestroy => true,
        // Believing leads the host to addresses with nothing behind them.
        Call::Map | Call::SetAccess => !host_visible,
        // The rest return something, or wait.
        _ => false,
    }
}

/// What happens to a call at the door.
enum Pass {
    /// It goes to the driver.
    Through,
    /// It ends here, as a success.
    Pretend,
}

/// A driver that fails as planned. See the [module](self).
#[derive(Debug)]
pub struct Faulty {
    driver: Arc<dyn Driver>,
    door: Arc<Mutex<Door>>,
}

impl Faulty {
    /// Wraps a driver, with a plan armed.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, plan: FaultPlan) -> Self {
        Self { driver, door: Arc::new(Mutex::new(Door { plan: Some(plan), counted: 0, struck: Vec::new() })) }
    }

    /// A way to steer it while others use it.
    #[must_use]
    pub fn control(&self) -> FaultControl {
        FaultControl(Arc::clone(&self.door))
    }

    fn pass(&self, call: Call) -> DriverResult<Pass> {
        let mut door = self.door.lock();
        let Some(plan) = door.plan.as_ref().filter(|plan| plan.counts(call)) else { return Ok(Pass::Through) };
        let number = door.counted + 1;
        let struck = plan.strikes(number);
        let pretended = plan.pretend && can_pretend(call, self.driver.info().host_visible);
        let kind = plan.kind.unwrap_or(match call {
            Call::Create | Call::Allocate | Call::AllocatePinned => DriverErrorKind::OutOfMemory,
            _ => DriverErrorKind::Other,
        });
        door.counted = number;
        if !struck {
            return Ok(Pass::Through);
        }
        door.struck.push(Strike { number, call, pretended });
        if pretended {
            return Ok(Pass::Pretend);
        }
        Err(DriverError::new(call, kind).with_detail(format!("struck by plan, as number {number}")))
    }

    /// A call whose value only the driver has.
    fn value<T>(&self, call: Call, inner: impl FnOnce() -> DriverResult<T>) -> DriverResult<T> {
        match self.pass(call)? {
            Pass::Through => inner(),
            // `can_pretend` rules it out.
            Pass::Pretend => Err(DriverError::new(call, DriverErrorKind::Other)),
        }
    }

    /// A call that only says whether it succeeded.
    fn deed(&self, call: Call, inner: impl FnOnce() -> DriverResult<()>) -> DriverResult<()> {
        match self.pass(call)? {
            Pass::Through => inner(),
            Pass::Pretend => Ok(()),
        }
    }
}

// SAFETY: every call that reaches the wrapped driver does so unchanged and under the same contract, so its promises
// hold for what it does. A struck call does nothing and says that it failed, which any call may do. A pretended one
// does nothing and says that it succeeded: `can_pretend` allows it only where no one comes to harm on the host by
// believing it. A release, unmap or free that was none leaves more in place than the caller thinks, `copy_out` writes
// zeros so that the caller's memory is initialised, and a map that was none is a matter of device addresses only.
unsafe impl Driver for Faulty {
    fn info(&self) -> &DriverInfo {
        self.driver.info()
    }

    fn limits(&self) -> Option<Arc<dyn ProcessLimits>> {
        self.driver.limits()
    }

    fn support(&self) -> DriverResult<()> {
        self.deed(Call::Support, || self.driver.support())
    }

    fn granularity(&self) -> DriverResult<Granularities> {
        self.value(Call::Granularity, || self.driver.granularity())
    }

    fn memory(&self) -> DriverResult<MemoryInfo> {
        self.value(Call::Memory, || self.driver.memory())
    }

    fn reserve(&self, bytes: u64, align: u64) -> DriverResult<u64> {
        self.value(Call::Reserve, || self.driver.reserve(bytes, align))
    }

    fn create(&self, bytes: u64, props: ChunkProps) -> DriverResult<RawHandle> {
        self.value(Call::Create, || self.driver.create(bytes, props))
    }

    fn allocate(&self, bytes: u64) -> DriverResult<u64> {
        self.value(Call::Allocate, || self.driver.allocate(bytes))
    }

    fn allocate_pinned(&self, bytes: u64, flags: PinFlags) -> DriverResult<u64> {
        self.value(Call::AllocatePinned, || self.driver.allocate_pinned(bytes, flags))
    }

    unsafe fn pin(&self, addr: u64, bytes: u64, flags: PinFlags) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::Pin, || unsafe { self.driver.pin(addr, bytes, flags) })
    }

    unsafe fn unpin(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::Unpin, || unsafe { self.driver.unpin(addr, bytes) })
    }

    unsafe fn free_pinned(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::FreePinned, || unsafe { self.driver.free_pinned(addr, bytes) })
    }

    unsafe fn pinned_device_ptr(&self, addr: u64) -> DriverResult<u64> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.value(Call::PinnedDevicePtr, || unsafe { self.driver.pinned_device_ptr(addr) })
    }

    fn event_create(&self) -> DriverResult<RawEvent> {
        self.value(Call::EventCreate, || self.driver.event_create())
    }

    fn synchronize(&self) -> DriverResult<()> {
        self.deed(Call::Synchronize, || self.driver.synchronize())
    }

    unsafe fn copy_out(&self, dst: *mut u8, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        match self.pass(Call::CopyOut)? {
            // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
            Pass::Through => unsafe { self.driver.copy_out(dst, src, bytes, stream) },
            Pass::Pretend => {
                let len = usize::try_from(bytes)
                    .map_err(|_| DriverError::new(Call::CopyOut, DriverErrorKind::InvalidValue))?;
                // SAFETY: the caller promises that `dst` is valid for writes of `bytes` until the copy is over.
                unsafe { dst.write_bytes(0, len) };
                Ok(())
            }
        }
    }

    unsafe fn free_span(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::FreeSpan, || unsafe { self.driver.free_span(addr, bytes) })
    }

    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::Release, || unsafe { self.driver.release(handle) })
    }

    unsafe fn map(&self, addr: u64, bytes: u64, handle: RawHandle) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::Map, || unsafe { self.driver.map(addr, bytes, handle) })
    }

    unsafe fn set_access(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::SetAccess, || unsafe { self.driver.set_access(addr, bytes) })
    }

    unsafe fn unmap(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::Unmap, || unsafe { self.driver.unmap(addr, bytes) })
    }

    unsafe fn export(&self, handle: RawHandle) -> DriverResult<OwnedFd> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.value(Call::Export, || unsafe { self.driver.export(handle) })
    }

    unsafe fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> DriverResult<RawHandle> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.value(Call::Import, || unsafe { self.driver.import(fd, bytes) })
    }

    unsafe fn free(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::Free, || unsafe { self.driver.free(addr, bytes) })
    }

    unsafe fn copy_in(&self, dst: u64, src: *const u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::CopyIn, || unsafe { self.driver.copy_in(dst, src, bytes, stream) })
    }

    unsafe fn copy_within(&self, dst: u64, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::CopyWithin, || unsafe { self.driver.copy_within(dst, src, bytes, stream) })
    }

    unsafe fn fill(&self, dst: u64, value: u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::Fill, || unsafe { self.driver.fill(dst, value, bytes, stream) })
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::EventRecord, || unsafe { self.driver.event_record(event, stream) })
    }

    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<bool> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.value(Call::EventQuery, || unsafe { self.driver.event_query(event) })
    }

    unsafe fn event_wait(&self, event: RawEvent) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::EventWait, || unsafe { self.driver.event_wait(event) })
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::EventDestroy, || unsafe { self.driver.event_destroy(event) })
    }

    unsafe fn synchronize_stream(&self, stream: RawStream) -> DriverResult<()> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.deed(Call::SynchronizeStream, || unsafe { self.driver.synchronize_stream(stream) })
    }

    unsafe fn stream_is_capturing(&self, stream: RawStream) -> DriverResult<bool> {
        // SAFETY: the contract is the wrapped driver's, and the arguments go through unchanged.
        self.value(Call::StreamIsCapturing, || unsafe { self.driver.stream_is_capturing(stream) })
    }
}

#[cfg(test)]
mod tests;
