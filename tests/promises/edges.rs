//! Growth ahead, loans, cuts and pools at their edges: nothing to give, memory that is ahead in part, a capture under way, a
//! thread that is just ending, a forked child.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Barrier, mpsc};
use std::time::Duration;

use growspan::driver::fault::FaultPlan;
use growspan::driver::sim::Personality;
use growspan::driver::{Call, ChunkProps, RawStream, Shareable};
use growspan::{
    AheadPolicy, Bytes, DeviceOptions, Error, GrowableBuffer, MapHooks, MappedChunk, PoolStats, Quiesce, Sizing,
};

use crate::drivers::{AHEAD, card};
use crate::world::{UNIT, World, look, stamp, units};

/// A buffer of four units in a larger chunk that was mapped ahead, on a device where chunks have any size.
fn within_a_chunk() -> (World, GrowableBuffer<u8>) {
    let options = DeviceOptions::new().sizing(Sizing::Exact).pool_keep(Bytes::ZERO);
    let world = World::sim_ahead(card(), options, AheadPolicy::Bytes(units(20)));
    let mut buffer = world.buffer();
    world.settle();
    buffer.grow_to(4 * UNIT).unwrap();
    world.settle();
    assert_eq!((buffer.committed(), buffer.chunks()[0].bytes), (units(4), units(20)));
    stamp(&mut buffer, 3);
    (world, buffer)
}

#[test]
fn an_exact_shrink_waits_before_it_cuts_what_was_mapped_ahead() {
    let (world, mut buffer) = within_a_chunk();
    let sim = world.sim.clone().unwrap();
    let before = look(&buffer);
    sim.queue_work(sim.stream(), buffer.device_ptr(), (4 * UNIT) as u64);
    let shrunk = buffer.shrink_exact(4 * UNIT, Quiesce::Device).unwrap();
    assert_eq!(sim.violations(), [], "the chunk below the end was taken from under running work");
    assert_eq!((shrunk.released, shrunk.committed), (Bytes::ZERO, units(4)));
    assert_eq!(look(&buffer), before);
    assert_eq!(buffer.stats().bytes_ahead, Bytes::ZERO);
    drop(buffer);
    world.assert_empty("cut");
}

#[test]
fn a_shrink_says_what_was_the_buffers_and_not_what_was_ahead_in_the_same_chunk() {
    for how in ["shrink", "shrink exactly", "cut", "defer"] {
        let (world, mut buffer) = within_a_chunk();
        let sim = world.sim.clone().unwrap();
        let stream = sim.stream();
        sim.queue_work(stream, buffer.device_ptr(), 1);
        let event = world.device.event().unwrap();
        event.record(stream).unwrap();
        let (shrunk, left) = match how {
            "shrink" => (buffer.shrink_to(0, Quiesce::Device), 0),
            "shrink exactly" => (buffer.shrink_exact(0, Quiesce::Device), 0),
            "cut" => (buffer.shrink_exact(UNIT, Quiesce::Device), 2),
            _ => (buffer.shrink_to(0, Quiesce::Deferred(&event)), 0),
        };
        let shrunk = shrunk.unwrap();
        let gone = Bytes::new(shrunk.released.get() + shrunk.retiring.get());
        assert_eq!((gone, shrunk.committed), (units(4 - left), units(left)), "{how}: {shrunk:?}");
        drop((buffer, event));
        world.assert_empty(how);
    }
}

#[test]
fn coalescing_counts_the_chunks_of_the_buffer() {
    let world = World::sim_ahead(card().personality(Personality::UniformChunksOnly), DeviceOptions::new(), AHEAD);
    let mut buffer = world.buffer();
    buffer.grow_to(4 * UNIT).unwrap();
    world.warm(&mut buffer);
    assert!(!buffer.stats().bytes_ahead.is_zero());
    let coalesced = buffer.coalesce(Quiesce::Device).unwrap();
    assert_eq!((coalesced.before, coalesced.after), (2, 2), "{coalesced}");
    drop(buffer);
    world.assert_empty("coalesced");
}

#[test]
fn a_loan_of_nothing_leaves_what_the_borrower_has_ahead_where_it_is() {
    let world = World::sim_ahead(card(), DeviceOptions::new(), AHEAD);
    let (mut lender, mut borrower) = (world.buffer(), world.buffer());
    lender.grow_to(4 * UNIT).unwrap();
    world.warm(&mut borrower);
    let before = borrower.stats();
    assert!(!before.bytes_ahead.is_zero());
    let loan = lender.lend(4 * UNIT, Quiesce::Device, &mut borrower).unwrap();
    let after = borrower.stats();
    assert_eq!((loan.bytes(), after.bytes_committed), (Bytes::ZERO, Bytes::ZERO), "{after:?}");
    assert_eq!(after.bytes_ahead, before.bytes_ahead);
    drop((lender, borrower));
    world.assert_empty("nothing lent");
}

#[test]
fn no_loan_unmaps_what_is_ahead_under_capture() {
    let world = World::sim_ahead(card(), DeviceOptions::new(), AHEAD);
    let sim = world.sim.clone().unwrap();
    let (mut lender, mut borrower) = (world.buffer(), world.buffer());
    lender.grow_to(4 * UNIT).unwrap();
    world.settle();
    let before = lender.stats();
    sim.capture(RawStream::DEFAULT, true);
    let refused = lender.lend(4 * UNIT, Quiesce::Device, &mut borrower);
    sim.capture(RawStream::DEFAULT, false);
    assert!(matches!(refused, Err(Error::Capturing { .. })), "{refused:?}");
    assert_eq!((lender.stats(), sim.violations()), (before, vec![]));
    drop((lender, borrower));
    world.assert_empty("captured");
}

/// A pool goes, and its thread with it, while somebody asks that thread to say when it is done.
#[test]
fn nobody_waits_for_a_thread_that_has_ended() {
    let world = World::sim(card(), DeviceOptions::new());
    let (told, done) = mpsc::channel();
    let rounds = std::thread::spawn(move || {
        for _ in 0..2000 {
            let pool = world.device.new_pool(ChunkProps::PLAIN, Bytes::ZERO);
            let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).pool(&pool);
            builder.ahead(AHEAD).build().unwrap().close().unwrap();
            let both = Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    both.wait();
                    world.device.wait_ahead();
                });
                both.wait();
                drop(pool);
            });
        }
        told.send(()).unwrap();
    });
    assert!(done.recv_timeout(Duration::from_secs(60)).is_ok(), "somebody waits for ever");
    rounds.join().unwrap();
}

/// Meets somebody twice, once it is armed.
#[derive(Clone)]
struct Meet(Arc<AtomicBool>, Arc<Barrier>);

impl Meet {
    fn new() -> Self {
        Self(Arc::default(), Arc::new(Barrier::new(2)))
    }

    fn meet(&self) {
        if self.0.swap(false, SeqCst) {
            self.1.wait();
            self.1.wait();
        }
    }
}

impl MapHooks for Meet {
    fn mapped(&self, _: MappedChunk) {
        self.meet();
    }

    fn unmapping(&self, _: MappedChunk) {
        self.meet();
    }
}

/// A buffer whose hooks meet somebody.
fn meeting(world: &World) -> (Meet, GrowableBuffer<u8>) {
    let meet = Meet::new();
    let hooks: Arc<dyn MapHooks> = Arc::new(meet.clone());
    (meet, GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).hooks(hooks).build().unwrap())
}

#[test]
fn a_forked_child_gives_nothing_back_and_does_not_hang() {
    let world = World::host(DeviceOptions::new());
    let (meet, mut borrower) = meeting(&world);
    let mut lender = world.buffer();
    lender.grow_to(8 * UNIT).unwrap();
    let mut loan = lender.lend(0, Quiesce::Device, &mut borrower).unwrap();
    meet.0.store(true, SeqCst);
    borrower.grow_ahead(AheadPolicy::Bytes(units(20))).unwrap();
    // The background is in the hook now, with the borrower's span locked.
    meet.1.wait();
    // SAFETY: the child calls nothing but what is tested, and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: what hangs is killed.
        unsafe { libc::alarm(20) };
        let refused = matches!(loan.give_back(&mut borrower, &mut lender, Quiesce::Device), Err(Error::Forked))
            && matches!(lender.lend(0, Quiesce::Device, &mut borrower), Err(Error::Forked))
            && borrower.coalesce(Quiesce::Device).is_err()
            // Pools have locks of their own, which the background takes.
            && world.device.snapshot().pools == PoolStats::default();
        // SAFETY: ends the child.
        unsafe { libc::_exit(if refused { 0 } else { 3 }) };
    }
    let mut status = 0;
    // SAFETY: our child.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    meet.1.wait();
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    let returned = loan.give_back(&mut borrower, &mut lender, Quiesce::Device).unwrap();
    assert_eq!(returned.returned, units(8));
    drop((borrower, lender));
    world.assert_empty("forked");
}

/// One that is busy elsewhere comes to a span that another thread drains just now.
#[test]
fn waiting_for_the_background_waits_for_what_others_are_giving_up() {
    let world = World::sim(card(), DeviceOptions::new().pool_keep(Bytes::ZERO).sizing(Sizing::Uniform(units(2))));
    let sim = world.sim.clone().unwrap();
    let ((busy, mut first), (slow, mut second)) = (meeting(&world), meeting(&world));
    let stream = sim.stream();
    second.grow_to(40 * UNIT).unwrap();
    second.grow_ahead(AHEAD).unwrap();
    world.settle();
    sim.queue_work(stream, second.device_ptr(), (40 * UNIT) as u64);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    second.shrink_to(0, Quiesce::Deferred(&event)).unwrap();
    world.settle();
    // The background maps ahead of the first, and is stopped there.
    busy.0.store(true, SeqCst);
    first.grow_ahead(AHEAD).unwrap();
    busy.1.wait();
    sim.finish_all();
    slow.0.store(true, SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| world.device.drain());
        slow.1.wait();
        busy.1.wait();
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            slow.1.wait();
        });
        world.device.wait_ahead();
        assert_eq!(second.stats().bytes_retiring, Bytes::ZERO);
    });
    drop((first, second, event));
    world.assert_empty("drained by two");
}

#[test]
fn memory_that_is_not_needed_yet_is_no_reason_to_wait_for_the_device() {
    let world = World::sim(card().total(units(20)), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let sim = world.sim.clone().unwrap();
    let (mut lost, mut buffer) = (world.buffer(), world.buffer());
    lost.grow_to(20 * UNIT).unwrap();
    world.faults.arm(FaultPlan::every().of(Call::Synchronize));
    assert!(matches!(lost.close(), Err(Error::NotReturned { .. })));
    world.faults.disarm();
    let (waits, creates) = (sim.count(Call::Synchronize), sim.count(Call::Create));
    buffer.grow_ahead(AHEAD).unwrap();
    world.settle();
    assert!(sim.count(Call::Create) > creates, "the background has asked for a chunk");
    assert_eq!(sim.count(Call::Synchronize), waits);
    // Who needs it waits.
    buffer.grow_to(10 * UNIT).unwrap();
    drop(buffer);
    world.assert_empty("waited for");
}

#[test]
fn a_chunk_of_other_properties_that_the_driver_refuses_to_release_is_not_kept() {
    let world = World::host(DeviceOptions::new());
    let pool = world.device.new_pool(ChunkProps::PLAIN.with_shareable(Shareable::PosixFd), Bytes::gib(1));
    assert!(pool.left_out().is_empty());
    let chunk = world.device.chunk(units(2)).unwrap();
    world.faults.arm(FaultPlan::nth(1).of(Call::Release));
    pool.put(chunk);
    world.faults.disarm();
    assert!(world.faults.struck());
    assert_eq!(pool.kept(), Bytes::ZERO);
    world.assert_empty("refused once");
}
