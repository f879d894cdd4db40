//! The background thread: what it does and leaves alone, what gives way, hooks, forks, ends.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use growspan::driver::fault::FaultPlan;
use growspan::driver::sim::{Personality, SimDriver};
use growspan::driver::{Call, DriverErrorKind, RawStream};
use growspan::{
    AheadPolicy, Bytes, Device, DeviceOptions, Error, GrowableBuffer, MapHooks, MappedChunk, Quiesce, Sizing,
};

use crate::drivers::{AHEAD, card};
use crate::orphans::Wrap;
use crate::world::{UNIT, World, look, stamp, units};

fn ahead(options: growspan::driver::sim::SimOptions) -> World {
    World::sim_ahead(options, DeviceOptions::new(), AHEAD)
}

/// A world without a pool, a stream, and a buffer with work pending over its first units.
fn busy(policy: AheadPolicy, len: usize) -> (World, RawStream, GrowableBuffer<u8>) {
    let world = World::sim_ahead(card(), DeviceOptions::new().pool_keep(Bytes::ZERO), policy);
    let sim = world.sim.clone().unwrap();
    let stream = sim.stream();
    let mut buffer = world.buffer();
    buffer.grow_to(len * UNIT).unwrap();
    world.settle();
    sim.queue_work(stream, buffer.device_ptr(), (len * UNIT) as u64);
    (world, stream, buffer)
}

/// Waits for something that the background does by itself.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn where_kernels_mind_a_growth_waits_for_them() {
    let sim = card().info(|info| info.quirks.map_beside_kernels = false).build();
    let device = DeviceOptions::new().open(sim.driver()).unwrap();
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * UNIT).build().unwrap();
    let stream = sim.stream();
    for n in 1..=64 {
        buffer.grow_to(n * UNIT).unwrap();
        sim.queue_work(stream, buffer.device_ptr(), (n * UNIT) as u64);
    }
    // What is given up when an event has passed goes while other work runs lower down.
    let event = device.event().unwrap();
    event.record(stream).unwrap();
    buffer.shrink_to(8 * UNIT, Quiesce::Deferred(&event)).unwrap();
    sim.finish(stream);
    sim.queue_work(sim.stream(), buffer.device_ptr(), UNIT as u64);
    assert!(device.drain() > Bytes::ZERO);
    buffer.close().unwrap();
    drop((event, device));
    sim.assert_clean();
}

#[test]
fn where_kernels_mind_the_background_only_prepares() {
    let world = ahead(card().info(|info| info.quirks.map_beside_kernels = false));
    let sim = world.sim.clone().unwrap();
    let mut buffer = world.buffer();
    buffer.grow_to(1).unwrap();
    let mapped = sim.count(Call::Map);
    world.warm(&mut buffer);
    assert_eq!(sim.count(Call::Map), mapped, "nothing is mapped in the background");
    let stats = buffer.stats();
    assert!(stats.bytes_ahead >= units(4), "{stats:?}");
    assert_eq!(world.device.snapshot().bytes_ahead, stats.bytes_ahead);
    world.assert_balanced("prepared");
    // The growth maps what is in hand, and makes nothing.
    let created = sim.count(Call::Create);
    world.faults.arm(FaultPlan::every().of(Call::Create));
    buffer.grow_to(4 * UNIT).unwrap();
    world.settle();
    world.faults.disarm();
    assert!(sim.count(Call::Map) > mapped);
    assert_eq!(sim.count(Call::Create), created);
    // One that fails puts it back in hand.
    world.warm(&mut buffer);
    for call in [Call::Map, Call::SetAccess, Call::StreamIsCapturing] {
        let before = (look(&buffer), buffer.stats().bytes_ahead, world.device.snapshot());
        world.faults.arm(FaultPlan::nth(1).of(call));
        assert!(buffer.grow_to(8 * UNIT).is_err(), "{call}");
        world.faults.disarm();
        let after = (look(&buffer), buffer.stats().bytes_ahead, world.device.snapshot());
        assert_eq!((before.0, before.1), (after.0, after.1), "{call}");
        assert_eq!(before.2.bytes_pooled, after.2.bytes_pooled, "{call}");
    }
    assert_eq!(buffer.flush_ahead().unwrap().get() % units(2).get(), 0);
    assert_eq!(buffer.stats().bytes_ahead, Bytes::ZERO);
    world.warm(&mut buffer);
    drop(buffer);
    world.assert_empty("prepared and dropped");
}

#[test]
fn what_is_ahead_of_one_gives_way_to_the_growth_of_another() {
    let two_phases = || card().info(|info| info.quirks.map_beside_kernels = false);
    let files = Personality::OpenFilePerChunk { held: 16, soft: 112, hard: 112, as_out_of_memory: false };
    let maps = Personality::MapCountLimit { held: 16, limit: 16 + 64 + 32 };
    let granules = || DeviceOptions::new().sizing(Sizing::Uniform(units(2))).buffers(3).arena(units(60));
    // Room for 32 granules in each, of one kind or the other.
    for (name, options) in [
        ("memory", card().total(units(64))),
        ("memory, prepared", two_phases().total(units(64))),
        ("files", card().personality(files)),
        ("map entries", card().personality(maps)),
    ] {
        let policy = AheadPolicy::Bytes(units(20));
        let world = World::sim_ahead(options, granules().pool_keep(Bytes::gib(1)), policy);
        assert!(world.is_virtual(), "{name}: {:?}", world.device.verdict().reason());
        let (mut first, mut second) = (world.buffer(), world.buffer());
        second.grow_ahead(AheadPolicy::Off).unwrap();
        first.grow_to(2 * UNIT).unwrap();
        stamp(&mut first, 1);
        let before = look(&first);
        world.warm(&mut first);
        assert!(first.stats().bytes_ahead >= units(20), "{name}: {:?}", first.stats());
        second.grow_to(58 * UNIT).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(first.stats().bytes_ahead, Bytes::ZERO, "{name}");
        assert_eq!(look(&first), before, "{name}");
        world.assert_balanced(name);
        // What is really short is said, with the figures.
        let error = first.grow_to(20 * UNIT).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory(_) | Error::OutOfFiles(_) | Error::OutOfMaps(_)), "{name}: {error}");
        assert_eq!(look(&first), before, "{name}");
        drop((first, second));
        world.assert_empty(name);
    }
}

/// The background takes and others need, without an end: nobody is told of a shortage that is none.
#[test]
fn no_shortage_is_seen_that_is_only_memory_ahead() {
    // Two buffers of 24 granules each, and 56 granules: with what is ahead there is never enough.
    let world = World::sim_ahead(card().total(units(2 * 56)), DeviceOptions::new(), AheadPolicy::Bytes(units(40)));
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let world = &world;
            scope.spawn(move || {
                for round in 0..300 {
                    let mut buffer = world.buffer();
                    for len in (0..48 * UNIT).step_by(3 * UNIT) {
                        buffer.grow_to(len).unwrap_or_else(|error| panic!("thread {seed}, round {round}: {error}"));
                    }
                }
            });
        }
    });
    world.assert_empty("two against the background");
}

/// A world whose background can be stopped after it made a chunk: `entered` is met then, and `go` lets it go on.
fn stoppable(options: growspan::driver::sim::SimOptions) -> (World, Wrap, Arc<Barrier>, Arc<Barrier>) {
    let sim = options.build();
    let (entered, go) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let wait = (Arc::clone(&entered), Arc::clone(&go));
    let gate = Wrap::after_create(sim.driver(), move || {
        wait.0.wait();
        wait.1.wait();
    });
    let options = DeviceOptions::new().sizing(Sizing::Uniform(units(2)));
    let world = World::over("sim", Arc::new(gate.clone()), Some(sim), options);
    (world, gate, entered, go)
}

#[test]
fn memory_on_its_way_to_be_mapped_ahead_is_not_called_short() {
    let (world, gate, entered, go) = stoppable(card().total(units(20)));
    let (mut first, mut second) = (world.buffer(), world.buffer());
    gate.arm();
    first.grow_ahead(AHEAD).unwrap();
    // The background has a chunk in hand, and all others are needed and one more.
    entered.wait();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            go.wait();
        });
        second.grow_to(20 * UNIT).unwrap_or_else(|error| panic!("{error}"));
    });
    drop((first, second));
    world.assert_empty("on its way");
}

/// A chunk for a place that the owner maps by itself meanwhile counts as nothing.
#[test]
fn a_chunk_that_comes_too_late_does_not_pass_for_memory_ahead() {
    for beside in [true, false] {
        let sim = card().info(|info| info.quirks.map_beside_kernels = beside).build();
        let (entered, go) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let (wait, times) = ((Arc::clone(&entered), Arc::clone(&go)), AtomicU64::new(0));
        let gate = Wrap::after_create(sim.driver(), move || {
            if times.fetch_add(1, SeqCst) == 0 {
                // The background, with a chunk for the beginning of the span.
                wait.0.wait();
                wait.1.wait();
            } else {
                // The owner, at work on the same place: the other comes along now.
                wait.1.wait();
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let world = World::over("sim", Arc::new(gate.clone()), Some(sim), DeviceOptions::new());
        let mut buffer = world.buffer();
        gate.arm();
        buffer.grow_ahead(AHEAD).unwrap();
        entered.wait();
        gate.arm();
        buffer.grow_to(40 * UNIT).unwrap();
        world.settle();
        let stats = buffer.stats();
        assert!(stats.bytes_ahead >= units(4), "{beside}: {stats:?}");
        world.assert_balanced("too late");
        drop(buffer);
        world.assert_empty("too late");
    }
}

#[test]
fn closing_waits_for_what_is_on_its_way() {
    let (world, gate, entered, go) = stoppable(card());
    let mut buffer = world.buffer();
    gate.arm();
    buffer.grow_ahead(AHEAD).unwrap();
    entered.wait();
    let closed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            buffer.close().unwrap();
            closed.store(true, SeqCst);
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(!closed.load(SeqCst), "a chunk of its own is on its way");
        go.wait();
    });
    let snapshot = world.device.snapshot();
    assert_eq!(snapshot.bytes_held(), snapshot.bytes_pooled, "{snapshot}");
    world.assert_empty("closed");
}

/// While one chunk after the other is taken back, the owner grows: it gets memory that stays.
#[test]
fn an_owner_does_not_get_what_is_being_taken_back() {
    /// Lets the owner grow while the last chunk is about to go.
    struct Going(AtomicBool, Barrier);
    impl MapHooks for Going {
        fn unmapping(&self, _: MappedChunk) {
            if self.0.swap(false, SeqCst) {
                self.1.wait();
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
    let world = World::sim_ahead(card().total(units(40)), DeviceOptions::new(), AheadPolicy::Off);
    let hooks = Arc::new(Going(AtomicBool::new(true), Barrier::new(2)));
    let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).sizing(Sizing::Uniform(units(2)));
    let builder = builder.hooks(Arc::clone(&hooks) as Arc<dyn MapHooks>);
    let mut owner = builder.ahead(AheadPolicy::Bytes(units(8))).build().unwrap();
    world.settle();
    assert_eq!(owner.stats().bytes_ahead, units(8));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut other = world.buffer();
            other.grow_to(34 * UNIT).unwrap();
            other.close().unwrap();
        });
        hooks.1.wait();
        owner.grow_to(2 * UNIT).unwrap();
        stamp(&mut owner, 5);
        let before = look(&owner);
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(look(&owner), before, "memory that was granted has gone");
    });
    drop(owner);
    world.assert_empty("taken back");
}

/// While room is made for a growth, the background does not take what was just given up.
#[test]
fn the_background_takes_nothing_while_somebody_is_short() {
    /// Asks for more ahead of another buffer in the midst of it.
    struct Greedy(Mutex<Option<GrowableBuffer<u8>>>);
    impl MapHooks for Greedy {
        fn unmapping(&self, _: MappedChunk) {
            if let Some(buffer) = &mut *self.0.lock().unwrap() {
                buffer.grow_ahead(AheadPolicy::Bytes(units(20))).unwrap();
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
    let sizing = DeviceOptions::new().sizing(Sizing::Uniform(units(2)));
    let world = World::sim_ahead(card().total(units(40)), sizing, AheadPolicy::Off);
    let greedy = Arc::new(Greedy(Mutex::new(Some(world.buffer()))));
    // In this order they are asked to give way: when the second is, the chunks of the first are there to be had.
    let mut first = world.buffer();
    first.grow_ahead(AheadPolicy::Bytes(units(12))).unwrap();
    let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT);
    let builder = builder.hooks(Arc::clone(&greedy) as Arc<dyn MapHooks>);
    let second = builder.ahead(AheadPolicy::Bytes(units(12))).build().unwrap();
    world.settle();
    assert_eq!(world.device.snapshot().bytes_ahead, units(24));
    // All of it at once, so that there is no second time to ask.
    let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).sizing(Sizing::Exact);
    let mut needs = builder.build().unwrap();
    needs.grow_to(40 * UNIT).unwrap_or_else(|error| panic!("{error}"));
    drop(greedy.0.lock().unwrap().take());
    drop((first, second, needs));
    world.assert_empty("greedy");
}

#[test]
fn nothing_is_mapped_ahead_under_capture() {
    let world = ahead(card());
    let sim = world.sim.clone().unwrap();
    let mut buffer = world.buffer();
    buffer.grow_to(1).unwrap();
    world.settle();
    let there = buffer.committed().get() + buffer.stats().bytes_ahead.get();
    sim.capture(RawStream::DEFAULT, true);
    let calls = world.device.snapshot().driver_calls;
    // Inside what is there, a growth goes on under capture; what it asks for waits.
    buffer.grow_to(there as usize).unwrap();
    world.settle();
    assert!(matches!(buffer.grow_by(1), Err(Error::Capturing { .. })));
    assert!(buffer.flush_ahead().unwrap().is_zero(), "there is nothing to flush");
    assert_eq!(world.device.snapshot().driver_calls, calls);
    sim.capture(RawStream::DEFAULT, false);
    assert_eq!(sim.violations(), []);
    // And it is no error.
    buffer.grow_by(2).unwrap();
    world.settle();
    assert!(!buffer.stats().bytes_ahead.is_zero());
    sim.capture(RawStream::DEFAULT, true);
    assert!(matches!(buffer.flush_ahead(), Err(Error::Capturing { .. })));
    // A shrink that gives up no chunk of the buffer's lets what is ahead be.
    buffer.shrink_to(buffer.len() - 1, Quiesce::Device).unwrap();
    assert!(!buffer.stats().bytes_ahead.is_zero());
    sim.capture(RawStream::DEFAULT, false);
    assert_eq!(sim.violations(), []);
    drop(buffer);
    world.assert_empty("captured");
}

#[test]
fn a_deferred_shrink_is_drained_by_the_background() {
    let (world, stream, mut buffer) = busy(AHEAD, 40);
    let sim = world.sim.clone().unwrap();
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    let ahead = buffer.stats().bytes_ahead;
    assert!(!ahead.is_zero());
    let unmapped = sim.count(Call::Unmap);
    let shrunk = buffer.shrink_to(10 * UNIT, Quiesce::Deferred(&event)).unwrap();
    assert_eq!((shrunk.released, shrunk.waited, shrunk.committed), (Bytes::ZERO, None, units(10)));
    assert_eq!(shrunk.retiring, units(30), "what was ahead was not the buffer's: {shrunk}");
    let stats = buffer.stats();
    assert_eq!((stats.retiring, stats.bytes_ahead), (1, Bytes::ZERO), "{stats:?}");
    // What was ahead waits for nothing and goes; the rest stays as long as the work is under way.
    eventually("what was ahead goes", || buffer.stats().bytes_retiring == units(30));
    world.settle();
    assert_eq!(buffer.stats().bytes_retiring, units(30));
    assert!(sim.count(Call::Unmap) > unmapped);
    world.assert_balanced("retiring");

    sim.finish_all();
    eventually("the event has passed", || world.device.snapshot().bytes_retiring.is_zero());
    assert_eq!(buffer.stats().retiring, 0);
    assert_eq!(sim.violations(), []);
    drop((buffer, event));
    world.assert_empty("drained in the background");
}

#[test]
fn what_waits_comes_back_to_a_growth_and_stays_ahead_of_it() {
    let (world, stream, mut buffer) = busy(AHEAD, 40);
    let sim = world.sim.clone().unwrap();
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    buffer.shrink_to(10 * UNIT, Quiesce::Deferred(&event)).unwrap();
    eventually("what was ahead goes", || buffer.stats().bytes_retiring == units(30));
    let calls = world.device.snapshot().driver_calls;
    let before = buffer.stats();
    buffer.grow_to(20 * UNIT).unwrap();
    let after = buffer.stats();
    assert_eq!(world.device.snapshot().driver_calls, calls);
    assert_eq!(after.grows_without_calls, before.grows_without_calls + 1);
    assert_eq!((after.bytes_committed, after.bytes_retiring), (units(20), units(20)));
    // What growth to come would map again stays mapped when the event has passed; the rest goes.
    sim.finish_all();
    world.settle();
    let stats = buffer.stats();
    assert_eq!(stats.bytes_retiring, Bytes::ZERO, "{stats:?}");
    assert!(stats.bytes_ahead >= units(4) && stats.bytes_ahead <= units(8), "{stats:?}");
    assert_eq!(sim.count(Call::Map), sim.figures().mappings + sim.count(Call::Unmap));
    world.assert_balanced("ahead again");
    assert_eq!(sim.violations(), []);
    drop((buffer, event));
    world.assert_empty("ahead again");
}

#[test]
fn deferred_shrinks_are_bounded_by_number_and_by_bytes() {
    for (policy, by_bytes) in [(AheadPolicy::Off, true), (AheadPolicy::Off, false), (AHEAD, true), (AHEAD, false)] {
        let world = World::sim_ahead(card(), DeviceOptions::new(), policy);
        let sim = world.sim.clone().unwrap();
        let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).sizing(Sizing::Uniform(units(2)));
        let builder = if by_bytes { builder.max_retiring(units(12)) } else { builder.max_retiring_shrinks(3) };
        let mut buffer = builder.build().unwrap();
        buffer.grow_to(60 * UNIT).unwrap();
        world.settle();
        let event = world.device.event().unwrap();
        let mut waited = Vec::new();
        for n in 1..=8 {
            // Each on a stream of its own, so that a wait for one lets the others be.
            let stream = sim.stream();
            sim.queue_work(stream, buffer.device_ptr(), buffer.len() as u64);
            event.record(stream).unwrap();
            let shrunk = buffer.shrink_to((60 - 4 * n) * UNIT, Quiesce::Deferred(&event)).unwrap();
            assert_eq!(shrunk.waited.is_some(), shrunk.to_string().contains("after waiting"), "{shrunk}");
            waited.push(shrunk.waited.is_some());
            world.settle();
            let stats = buffer.stats();
            assert_eq!(stats.retiring, n.min(3), "{stats:?}");
            assert_eq!(stats.bytes_retiring, units(4 * n.min(3)), "{stats:?}");
            // Work that touches memory that has gone would lose the device.
            assert_eq!(sim.violations(), []);
        }
        assert_eq!(waited, [false, false, false, true, true, true, true, true], "{policy:?}, {by_bytes}");
        drop((buffer, event));
        world.assert_empty("bounded");
    }
}

#[test]
fn one_deferred_shrink_may_be_larger_than_the_bound() {
    let (world, stream, mut buffer) = busy(AheadPolicy::Off, 40);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    let small = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).max_retiring(Bytes::new(1)).build();
    let mut small = small.unwrap();
    small.grow_to(10 * UNIT).unwrap();
    assert_eq!(small.shrink_to(0, Quiesce::Deferred(&event)).unwrap().waited, None);
    assert!(!event.is_reached().unwrap());
    buffer.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    drop((small, buffer, event));
    world.assert_empty("larger than the bound");
}

/// Uses its device from within.
struct Caller {
    device: Device,
    other: Mutex<Option<GrowableBuffer<u8>>>,
    event: growspan::Event,
    told: AtomicU64,
}

impl Caller {
    fn call(&self) {
        self.told.fetch_add(1, SeqCst);
        self.device.drain();
        self.device.wait_ahead();
        let _ = (self.device.snapshot(), self.device.memory().unwrap());
        self.event.record(RawStream::DEFAULT).unwrap();
        self.event.wait().unwrap();
        // One call at a time: the other thread has the other buffer.
        let Ok(mut other) = self.other.try_lock() else { return };
        if let Some(other) = &mut *other {
            let len = (other.len() + UNIT / 3) % (60 * UNIT);
            if len < other.len() {
                other.shrink_to(len, Quiesce::Deferred(&self.event)).unwrap();
            } else {
                other.grow_to(len).unwrap();
            }
            other.flush_ahead().unwrap();
        }
        *other = Some(GrowableBuffer::builder(&self.device).max_len(64 * UNIT).build().unwrap());
    }
}

impl MapHooks for Caller {
    fn mapped(&self, _: MappedChunk) {
        self.call();
    }
    fn unmapping(&self, _: MappedChunk) {
        self.call();
    }
}

#[test]
fn hooks_may_call_the_device_on_every_thread() {
    // Little memory, so that hooks are in the midst of making room too.
    let world = World::sim_ahead(card().total(units(90)), DeviceOptions::new(), AHEAD);
    let caller = Arc::new(Caller {
        device: world.device.clone(),
        other: Mutex::new(None),
        event: world.device.event().unwrap(),
        told: AtomicU64::new(0),
    });
    let build = || {
        let hooks = Arc::clone(&caller) as Arc<dyn MapHooks>;
        GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).hooks(hooks).build().unwrap()
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for round in 0..60 {
                    let mut buffer = build();
                    for len in (0..20 * UNIT).step_by(UNIT) {
                        buffer.grow_to(len).unwrap();
                    }
                    let event = world.device.event().unwrap();
                    event.record(RawStream::DEFAULT).unwrap();
                    buffer.shrink_to(3 * UNIT, Quiesce::Deferred(&event)).unwrap();
                    if round % 2 == 0 {
                        buffer.shrink_to(0, Quiesce::Device).unwrap();
                    }
                }
            });
        }
    });
    assert!(caller.told.load(SeqCst) > 1000);
    drop(caller.other.lock().unwrap().take());
    world.settle();
    let Ok(caller) = Arc::try_unwrap(caller) else { panic!("a buffer that is gone keeps its hooks") };
    drop(caller);
    world.assert_empty("hooks that call");
}

/// Meets somebody while the memory of its buffer is locked, once.
struct Meet(AtomicBool, Arc<Barrier>);

impl MapHooks for Meet {
    fn mapped(&self, _: MappedChunk) {
        if self.0.swap(false, SeqCst) {
            self.1.wait();
            self.1.wait();
        }
    }
}

/// The worst moment: the background is at work with the span locked, and does not exist in the child.
#[test]
fn a_forked_child_does_not_wait_for_the_background() {
    let world = World::host_ahead(DeviceOptions::new(), AheadPolicy::Off);
    let barrier = Arc::new(Barrier::new(2));
    let hooks: Arc<dyn MapHooks> = Arc::new(Meet(AtomicBool::new(true), Arc::clone(&barrier)));
    let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).hooks(hooks);
    let mut buffer = builder.ahead(AHEAD).build().unwrap();
    // In the hook, on the background thread.
    barrier.wait();
    // SAFETY: the child calls nothing but what is tested, and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: what hangs is killed.
        unsafe { libc::alarm(20) };
        let refused = matches!(buffer.grow_to(30 * UNIT), Err(Error::Forked))
            && matches!(buffer.shrink_to(0, Quiesce::Device), Err(Error::Forked))
            && matches!(buffer.shrink_exact(0, Quiesce::Device), Err(Error::Forked))
            && matches!(buffer.flush_ahead(), Err(Error::Forked))
            && matches!(buffer.grow_ahead(AHEAD), Err(Error::Forked))
            && buffer.export_chunk(0).is_err();
        let _ = (buffer.stats(), buffer.chunks(), buffer.committed());
        world.device.wait_ahead();
        world.device.drain();
        drop(buffer);
        drop(world);
        // SAFETY: ends the child.
        unsafe { libc::_exit(if refused { 0 } else { 3 }) };
    }
    let mut status = 0;
    // SAFETY: our child.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    barrier.wait();
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    // The parent goes on as if nothing had been.
    buffer.grow_to(30 * UNIT).unwrap();
    stamp(&mut buffer, 1);
    drop(buffer);
    world.assert_empty("forked");
}

/// How many threads of this process have that name.
fn threads_named(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(Result::unwrap);
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|comm| comm.trim() == name).count()
}

/// Run by [`limits`](crate::limits) in a process of its own, where no other test has threads.
pub(crate) fn one_thread_per_pool_from_first_use_to_the_end() {
    let threads = || threads_named("growspan-ahead");
    let world = World::host_ahead(DeviceOptions::new(), AheadPolicy::Off);
    let mut plain = world.buffer();
    let event = world.device.event().unwrap();
    event.record(RawStream::DEFAULT).unwrap();
    plain.grow_to(30 * UNIT).unwrap();
    plain.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    world.settle();
    assert_eq!(threads(), 0, "nobody asked for one");
    plain.grow_ahead(AHEAD).unwrap();
    let mut second = world.buffer();
    second.grow_ahead(AheadPolicy::Percent(10)).unwrap();
    // A thread names itself, when it comes to run.
    world.settle();
    assert_eq!(threads(), 1, "one for all buffers of a pool");
    let pool = world.device.new_pool(growspan::driver::ChunkProps::PLAIN, Bytes::mib(1));
    let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).pool(&pool).ahead(AHEAD);
    let third = builder.build().unwrap();
    world.settle();
    assert_eq!(threads(), 2, "one for each pool");
    drop(pool);
    assert_eq!(threads(), 2, "the buffer owns its pool too");
    drop(third);
    assert_eq!(threads(), 1);
    drop((plain, second, event, world));
    assert_eq!(threads(), 0, "joined");
}

/// A driver call of the background is under way while the last owner of its pool goes, in a hook, which waits for nobody.
#[test]
fn the_last_owner_may_go_on_the_background_thread() {
    /// Drops what it holds, once.
    struct Dropper(Mutex<Option<(GrowableBuffer<u8>, World)>>);
    impl MapHooks for Dropper {
        fn mapped(&self, _: MappedChunk) {
            drop(self.0.lock().unwrap().take());
        }
    }
    let sim = card().build();
    let (entered, go) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let wait = (Arc::clone(&entered), Arc::clone(&go));
    let gate = Wrap::after_create(sim.driver(), move || {
        wait.0.wait();
        wait.1.wait();
    });
    let inner = World::over("sim", Arc::new(gate.clone()), Some(sim.clone()), DeviceOptions::new());
    let mut buffer = inner.buffer();
    gate.arm();
    buffer.grow_ahead(AHEAD).unwrap();
    // The background is in a call for the buffer, and owns its span.
    entered.wait();
    let outer = World::sim(card(), DeviceOptions::new());
    let hooks: Arc<dyn MapHooks> = Arc::new(Dropper(Mutex::new(Some((buffer, inner)))));
    let mut other = GrowableBuffer::<u8>::builder(&outer.device).max_len(64 * UNIT).hooks(hooks).build().unwrap();
    other.grow_to(1).unwrap();
    go.wait();
    eventually("the thread ends by itself and gives everything back", || sim.check_clean().is_ok());
    drop(other);
    outer.assert_empty("dropped in a hook");
}

#[test]
fn a_failed_undo_in_the_background_is_said_and_blocks_only_what_lies_beyond() {
    let world = World::sim_ahead(card(), DeviceOptions::new().sizing(Sizing::Uniform(units(2))), AheadPolicy::Off);
    let mut buffer = world.buffer();
    buffer.grow_to(4 * UNIT).unwrap();
    world.faults.arm(FaultPlan::every().of(Call::SetAccess).of(Call::Unmap));
    buffer.grow_ahead(AHEAD).unwrap();
    world.settle();
    world.faults.disarm();
    match buffer.grow_to(6 * UNIT) {
        Err(Error::Ahead { source, .. }) => assert!(matches!(*source, Error::Rollback { .. }), "{source}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(buffer.grow_to(6 * UNIT), Err(Error::Blocked { .. })));
    world.settle();
    assert!(matches!(buffer.grow_to(6 * UNIT), Err(Error::Blocked { .. })), "and the background lets it be");
    buffer.grow_to(4 * UNIT).unwrap();
    drop(buffer);
    world.assert_empty("blocked");
}

#[test]
fn a_leaked_buffer_leaves_nothing_ahead() {
    let world = ahead(card());
    let mut buffer = world.buffer();
    buffer.grow_to(5 * UNIT).unwrap();
    world.settle();
    assert!(!buffer.stats().bytes_ahead.is_zero());
    let leaked = buffer.leak();
    world.settle();
    let snapshot = world.device.snapshot();
    assert_eq!((snapshot.bytes_ahead, snapshot.bytes_mapped.get()), (Bytes::ZERO, leaked.capacity as u64));
    world.assert_balanced("leaked");
}

#[test]
fn a_lost_device_is_said_and_nothing_hangs() {
    let world = ahead(card());
    let mut buffer = world.buffer();
    buffer.grow_to(UNIT).unwrap();
    world.settle();
    world.sim.as_ref().unwrap().lose();
    let there = buffer.committed().get() + buffer.stats().bytes_ahead.get();
    buffer.grow_to(there as usize).unwrap();
    world.settle();
    let mut errors = (0..3).map(|_| buffer.grow_by(1).unwrap_err());
    assert!(matches!(errors.next(), Some(Error::Ahead { .. })));
    assert!(errors.all(|error| matches!(error, Error::DeviceLost(_))));
    drop(buffer);
    world.settle();
    assert_eq!(world.device.snapshot().bytes_ahead, Bytes::ZERO);
}

/// A driver whose simulated calls are slow enough to be met half way.
#[test]
fn growth_beside_a_background_that_is_always_busy() {
    let sim: SimDriver = card().build();
    let world = World::ahead_over("sim", sim.driver(), Some(sim.clone()), DeviceOptions::new(), AHEAD);
    let mut buffers: Vec<_> = (0..16).map(|_| world.buffer()).collect();
    for step in 0..60 * 8 {
        for buffer in &mut buffers {
            buffer.grow_by(UNIT / 8).unwrap();
        }
        if step % 32 == 0 {
            world.faults.arm(FaultPlan::nth(5).of(Call::Create).kind(DriverErrorKind::OutOfMemory));
        }
    }
    world.faults.disarm();
    buffers.iter().for_each(|buffer| assert_eq!(buffer.len(), 60 * UNIT));
    world.assert_balanced("sixteen at once");
    drop(buffers);
    world.assert_empty("sixteen at once");
}
