//! Memory that waits: for an event, for a device that can be waited for, for another thread; and hooks that misbehave.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};

use growspan::driver::fault::FaultPlan;
use growspan::driver::{
    Call, ChunkProps, Driver, DriverInfo, DriverResult, Granularities, MemoryInfo, ProcessLimits, RawEvent, RawHandle,
    RawStream, Shareable,
};
use growspan::{Bytes, Device, DeviceOptions, Error, GrowableBuffer, MapHooks, MappedChunk, Quiesce, Sizing};

use crate::drivers::card;
use crate::world::{UNIT, World, units};

/// A buffer whose hooks are told.
fn hooked(world: &World, hooks: Arc<dyn MapHooks>) -> GrowableBuffer<u8> {
    GrowableBuffer::builder(&world.device).max_len(64 * UNIT).hooks(hooks).build().unwrap()
}

/// What is done right after the next wait for the device.
type After = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;
/// A driver after whose next wait something is done, or after whose next create once it is armed.
#[derive(Clone)]
pub(crate) struct Wrap(Arc<dyn Driver>, After, Arc<InCreate>);

#[derive(Default)]
struct InCreate {
    armed: AtomicBool,
    act: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Wrap {
    fn after_wait(driver: Arc<dyn Driver>, after: &After) -> Self {
        Self(driver, Arc::clone(after), Arc::default())
    }

    pub(crate) fn after_create(driver: Arc<dyn Driver>, act: impl Fn() + Send + Sync + 'static) -> Self {
        let armed = AtomicBool::new(false);
        Self(driver, After::default(), Arc::new(InCreate { armed, act: Some(Box::new(act)) }))
    }

    pub(crate) fn arm(&self) {
        self.2.armed.store(true, SeqCst);
    }
}
impl std::fmt::Debug for Wrap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Wrap")
    }
}
macro_rules! fw { ($($(#[$u:ident])? fn $n:ident($($a:ident: $t:ty),*) -> $r:ty;)*) => { $( fw!(@ $($u)? ; $n ; $($a: $t),* ; $r); )* };
  (@ ; $n:ident ; $($a:ident: $t:ty),* ; $r:ty) => { fn $n(&self $(, $a: $t)*) -> $r { self.0.$n($($a),*) } };
  (@ u ; $n:ident ; $($a:ident: $t:ty),* ; $r:ty) => { unsafe fn $n(&self $(, $a: $t)*) -> $r {
        // SAFETY: the contract is that of the driver behind.
        unsafe { self.0.$n($($a),*) }
    } };
}
// SAFETY: everything is the driver's behind.
unsafe impl Driver for Wrap {
    fn info(&self) -> &DriverInfo {
        self.0.info()
    }
    fn synchronize(&self) -> DriverResult<()> {
        self.0.synchronize()?;
        let after = self.1.lock().unwrap().take();
        if let Some(f) = after {
            f();
        }
        Ok(())
    }
    fn create(&self, bytes: u64, props: ChunkProps) -> DriverResult<RawHandle> {
        let created = self.0.create(bytes, props);
        if self.2.armed.swap(false, SeqCst)
            && let Some(act) = &self.2.act
        {
            act();
        }
        created
    }
    fw! {
        fn support() -> DriverResult<()>;
        fn granularity() -> DriverResult<Granularities>;
        fn memory() -> DriverResult<MemoryInfo>;
        fn limits() -> Option<Arc<dyn ProcessLimits>>;
        fn reserve(b: u64, a: u64) -> DriverResult<u64>;
        fn allocate(b: u64) -> DriverResult<u64>;
        fn event_create() -> DriverResult<RawEvent>;
        #[u] fn free_span(a: u64, b: u64) -> DriverResult<()>;
        #[u] fn release(h: RawHandle) -> DriverResult<()>;
        #[u] fn map(a: u64, b: u64, h: RawHandle) -> DriverResult<()>;
        #[u] fn set_access(a: u64, b: u64) -> DriverResult<()>;
        #[u] fn unmap(a: u64, b: u64) -> DriverResult<()>;
        #[u] fn export(h: RawHandle) -> DriverResult<OwnedFd>;
        #[u] fn import(f: BorrowedFd<'_>, b: u64) -> DriverResult<RawHandle>;
        #[u] fn free(a: u64, b: u64) -> DriverResult<()>;
        #[u] fn copy_in(d: u64, s: *const u8, b: u64, st: Option<RawStream>) -> DriverResult<()>;
        #[u] fn copy_out(d: *mut u8, s: u64, b: u64, st: Option<RawStream>) -> DriverResult<()>;
        #[u] fn copy_within(d: u64, s: u64, b: u64, st: Option<RawStream>) -> DriverResult<()>;
        #[u] fn fill(d: u64, v: u8, b: u64, st: Option<RawStream>) -> DriverResult<()>;
        #[u] fn event_record(e: RawEvent, s: RawStream) -> DriverResult<()>;
        #[u] fn event_query(e: RawEvent) -> DriverResult<bool>;
        #[u] fn event_wait(e: RawEvent) -> DriverResult<()>;
        #[u] fn event_destroy(e: RawEvent) -> DriverResult<()>;
        #[u] fn synchronize_stream(s: RawStream) -> DriverResult<()>;
        #[u] fn stream_is_capturing(s: RawStream) -> DriverResult<bool>;
    }
}

#[derive(Default)]
struct Count(AtomicU64, AtomicU64);
impl MapHooks for Count {
    fn mapped(&self, c: MappedChunk) {
        self.0.fetch_add(c.bytes.get(), SeqCst);
    }
    fn unmapping(&self, c: MappedChunk) {
        self.1.fetch_add(c.bytes.get(), SeqCst);
    }
}

struct Bomb(AtomicBool);
impl MapHooks for Bomb {
    fn unmapping(&self, _: MappedChunk) {
        if self.0.swap(false, SeqCst) {
            panic!("hook")
        }
    }
}

struct Slow(Arc<Barrier>);
impl MapHooks for Slow {
    fn unmapping(&self, c: MappedChunk) {
        if c.bytes > Bytes::ZERO {
            self.0.wait();
            std::thread::sleep(std::time::Duration::from_millis(300));
        }
    }
}

#[test]
fn what_is_dropped_after_the_wait_waits_for_the_next() {
    let sim = card().build();
    let after = After::default();
    let driver = Arc::new(Wrap::after_wait(sim.driver(), &after));
    let world = World::over("sim", driver, Some(sim.clone()), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let mut buffer = world.buffer();
    buffer.grow_to(10 * UNIT).unwrap();
    let (sim2, faults) = (sim.clone(), world.faults.clone());
    // What another thread does right after this thread's wait returned.
    *after.lock().unwrap() = Some(Box::new(move || {
        let stream = sim2.stream();
        sim2.queue_work(stream, buffer.device_ptr(), (10 * UNIT) as u64);
        faults.arm(FaultPlan::every().of(Call::Synchronize));
        drop(buffer);
        faults.disarm();
    }));
    world.device.synchronize().unwrap();
    assert_eq!(world.sim.as_ref().unwrap().violations(), []);
}

#[test]
fn hooks_are_told_what_stays_after_a_failed_undo() {
    let world = World::sim(card(), DeviceOptions::new());
    let h = Arc::new(Count::default());
    let mut b = hooked(&world, Arc::clone(&h) as Arc<dyn MapHooks>);
    world.faults.arm(FaultPlan::every().of(Call::CopyIn).of(Call::Unmap));
    assert!(b.append(&[1; UNIT]).is_err());
    world.faults.disarm();
    assert_eq!(h.0.load(SeqCst) - h.1.load(SeqCst), b.committed().get(), "hooks against committed");
}

#[test]
fn blocks_that_wait_give_way() {
    let world = World::sim(card().total(units(100)), DeviceOptions::new().contiguous(true));
    let b = world.buffer();
    world.faults.arm(FaultPlan::every().of(Call::Synchronize));
    drop(b);
    world.faults.disarm();
    let again = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).build();
    assert!(again.is_ok(), "{}", again.unwrap_err());
}

/// Drains its device, from within a drain and while its buffer is buried.
struct Drainer(Device);
impl MapHooks for Drainer {
    fn unmapping(&self, _: MappedChunk) {
        self.0.drain();
    }
}

#[test]
fn a_hook_may_drain_from_within_a_drain() {
    let world = World::sim(card(), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let mut orphan = hooked(&world, Arc::new(Drainer(world.device.clone())));
    orphan.grow_to(4 * UNIT).unwrap();
    world.faults.arm(FaultPlan::every().of(Call::Synchronize));
    drop(orphan);
    world.faults.disarm();
    let mut buffer = hooked(&world, Arc::new(Drainer(world.device.clone())));
    buffer.grow_to(8 * UNIT).unwrap();
    let (sim, event) = (world.sim.clone().unwrap(), world.device.event().unwrap());
    let stream = sim.stream();
    sim.queue_work(stream, buffer.device_ptr(), 8 * UNIT as u64);
    event.record(stream).unwrap();
    buffer.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    sim.finish_all();
    // One that waits for itself is never done.
    let (device, (tell, told)) = (world.device.clone(), std::sync::mpsc::channel());
    std::thread::spawn(move || tell.send(device.drain()));
    assert_eq!(told.recv_timeout(std::time::Duration::from_secs(20)).unwrap(), units(12));
    drop((buffer, event));
    world.assert_empty("drained from within");
}

#[test]
fn a_panicking_hook_stops_no_drain() {
    let world = World::sim(card(), DeviceOptions::new());
    let mut a = hooked(&world, Arc::new(Bomb(true.into())));
    let mut b = world.buffer();
    a.grow_to(4 * UNIT).unwrap();
    b.grow_to(4 * UNIT).unwrap();
    world.faults.arm(FaultPlan::every().of(Call::Synchronize));
    drop((a, b));
    world.faults.disarm();
    assert_eq!(world.device.drain(), units(8));
    world.assert_empty("a hook panicked");
}

#[test]
fn a_panicking_hook_loses_no_other_span() {
    let world = World::sim(card(), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let stream = world.sim.as_ref().unwrap().stream();
    let mut a = hooked(&world, Arc::new(Bomb(true.into())));
    let mut b = world.buffer();
    let e = world.device.event().unwrap();
    for x in [&mut a, &mut b] {
        x.grow_to(4 * UNIT).unwrap();
        world.sim.as_ref().unwrap().queue_work(stream, x.device_ptr(), 4 * UNIT as u64);
    }
    e.record(stream).unwrap();
    for x in [&mut a, &mut b] {
        x.shrink_to(0, Quiesce::Deferred(&e)).unwrap();
    }
    world.sim.as_ref().unwrap().finish_all();
    assert_eq!(world.device.drain(), units(8));
}

#[test]
fn memory_being_drained_is_not_called_short() {
    let world = World::sim(card().total(units(8)), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let stream = world.sim.as_ref().unwrap().stream();
    let barrier = Arc::new(Barrier::new(2));
    let mut a = GrowableBuffer::<u8>::builder(&world.device)
        .max_len(64 * UNIT)
        .hooks(Arc::new(Slow(Arc::clone(&barrier))))
        .sizing(Sizing::Uniform(units(6)))
        .build()
        .unwrap();
    a.grow_to(6 * UNIT).unwrap();
    world.sim.as_ref().unwrap().queue_work(stream, a.device_ptr(), UNIT as u64);
    let e = world.device.event().unwrap();
    e.record(stream).unwrap();
    a.shrink_to(0, Quiesce::Deferred(&e)).unwrap();
    world.sim.as_ref().unwrap().finish_all();
    std::thread::scope(|s| {
        let d = world.device.clone();
        s.spawn(move || d.drain());
        barrier.wait();
        let mut b = world.buffer();
        let r = b.grow_to(6 * UNIT);
        assert!(r.is_ok(), "{}", r.unwrap_err());
    });
}

#[test]
fn properties_are_tried_with_memory_from_the_pool() {
    let small = growspan::driver::host::HostOptions::default().with_capacity(units(60)).with_granularity(units(2));
    let host = growspan::driver::host::HostDriver::open(small).unwrap();
    let world = World::over("host", Arc::new(host), None, DeviceOptions::new().pool_keep(Bytes::gib(1)));
    let mut b = world.buffer();
    b.grow_to(60 * UNIT).unwrap();
    drop(b);
    let p = world.device.new_pool(ChunkProps::PLAIN.with_shareable(Shareable::PosixFd), Bytes::ZERO);
    assert!(p.left_out().is_empty(), "{:?}", p.left_out());
}

#[test]
fn properties_are_tried_without_waiting_for_the_device() {
    let world = World::host(DeviceOptions::new());
    world.faults.arm(FaultPlan::every().of(Call::Synchronize));
    let p = world.device.new_pool(ChunkProps::PLAIN.with_shareable(Shareable::PosixFd), Bytes::ZERO);
    world.faults.disarm();
    assert_eq!((world.device.snapshot().bytes_stranded, p.left_out().len()), (Bytes::ZERO, 0), "{:?}", p.left_out());
}

#[test]
fn a_pool_keeps_chunks_of_its_properties_only() {
    let world = World::host(DeviceOptions::new());
    let p = world.device.new_pool(ChunkProps::PLAIN.with_shareable(Shareable::PosixFd), Bytes::gib(1));
    assert!(p.left_out().is_empty());
    p.put(world.device.chunk(units(2)).unwrap());
    let mut b = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).pool(&p).build().unwrap();
    b.grow_to(1).unwrap();
    let r = b.export_chunk(0);
    assert!(r.is_ok(), "{}", r.unwrap_err());
}

#[test]
fn nothing_waits_for_a_lost_device() {
    let world = World::sim(card(), DeviceOptions::new());
    let mut b = world.buffer();
    b.grow_to(UNIT).unwrap();
    world.faults.arm(FaultPlan::every().of(Call::Synchronize));
    drop(b);
    world.faults.disarm();
    world.sim.as_ref().unwrap().lose();
    assert!(world.device.synchronize().is_err());
    world.device.drain();
    assert_eq!(
        (world.device.snapshot().bytes_retiring, world.device.snapshot().bytes_reserved),
        (Bytes::ZERO, Bytes::ZERO)
    );
}

#[test]
fn an_event_is_not_recorded_into_a_graph() {
    let world = World::sim(card(), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let mut b = world.buffer();
    b.grow_to(8 * UNIT).unwrap();
    let (work, s) = (world.sim.as_ref().unwrap().stream(), world.sim.as_ref().unwrap().stream());
    world.sim.as_ref().unwrap().queue_work(work, b.device_ptr(), 8 * UNIT as u64);
    let e = world.device.event().unwrap();
    world.sim.as_ref().unwrap().capture(s, true);
    let r = e.record(s);
    world.sim.as_ref().unwrap().capture(s, false);
    let r2 = b.shrink_to(0, Quiesce::Deferred(&e));
    assert!(r.is_err() || r2.is_err(), "{r:?} {r2:?} {:?}", world.sim.as_ref().unwrap().violations());
}

#[test]
fn nothing_outlives_its_device() {
    let World { device, faults, sim, .. } = World::sim(card(), DeviceOptions::new());
    let sim = sim.unwrap();
    let mut b = GrowableBuffer::<u8>::builder(&device).max_len(64 * UNIT).build().unwrap();
    b.grow_to(UNIT).unwrap();
    faults.arm(FaultPlan::every().of(Call::Synchronize));
    drop(b);
    faults.disarm();
    drop(device);
    sim.check_clean().unwrap();
}

#[test]
fn there_is_one_host_device() {
    let barrier = Barrier::new(4);
    let all: Vec<Device> = std::thread::scope(|s| {
        let t: Vec<_> = (0..4)
            .map(|_| {
                s.spawn(|| {
                    barrier.wait();
                    Device::host().unwrap()
                })
            })
            .collect();
        t.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(all.iter().all(|d| d.is(&all[0])), "several host devices");
}

#[test]
fn a_hook_may_panic_at_close() {
    let world = World::sim(card(), DeviceOptions::new());
    let stream = world.sim.as_ref().unwrap().stream();
    let mut b = hooked(&world, Arc::new(Bomb(true.into())));
    b.grow_to(8 * UNIT).unwrap();
    world.sim.as_ref().unwrap().queue_work(stream, b.device_ptr(), 8 * UNIT as u64);
    let e = world.device.event().unwrap();
    e.record(stream).unwrap();
    b.shrink_to(4 * UNIT, Quiesce::Deferred(&e)).unwrap();
    b.close().unwrap();
    drop(e);
    world.assert_empty("a hook panicked at close");
}

#[test]
fn waiting_memory_is_still_drained_after_a_failed_growth() {
    let world = World::sim(card().total(units(60)), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let stream = world.sim.as_ref().unwrap().stream();
    let (mut a, mut c) = (world.buffer(), world.buffer());
    a.grow_to(40 * UNIT).unwrap();
    c.grow_to(4 * UNIT).unwrap();
    let e = world.device.event().unwrap();
    world.sim.as_ref().unwrap().queue_work(stream, a.device_ptr(), 40 * UNIT as u64);
    world.sim.as_ref().unwrap().queue_work(stream, c.device_ptr(), 4 * UNIT as u64);
    e.record(stream).unwrap();
    a.shrink_to(0, Quiesce::Deferred(&e)).unwrap();
    c.shrink_to(0, Quiesce::Deferred(&e)).unwrap();
    assert!(matches!(a.grow_to(64 * UNIT), Err(Error::OutOfMemory(_))));
    assert_eq!(world.device.snapshot().bytes_retiring, units(44));
    world.sim.as_ref().unwrap().finish_all();
    assert_eq!(world.device.drain(), units(44));
}

#[test]
fn a_drain_that_fails_is_no_peak() {
    let world = World::sim(card(), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let stream = world.sim.as_ref().unwrap().stream();
    let mut a = world.buffer();
    a.grow_to(20 * UNIT).unwrap();
    world.sim.as_ref().unwrap().queue_work(stream, a.device_ptr(), 1);
    let e = world.device.event().unwrap();
    e.record(stream).unwrap();
    a.shrink_to(0, Quiesce::Deferred(&e)).unwrap();
    let mut b = world.buffer();
    b.grow_to(20 * UNIT).unwrap();
    let peak = world.device.snapshot().peak_bytes;
    world.sim.as_ref().unwrap().finish_all();
    world.faults.arm(FaultPlan::nth(3).of(Call::Unmap));
    world.device.drain();
    world.faults.disarm();
    assert_eq!(world.device.snapshot().peak_bytes, peak);
}
