//! What a pool keeps and for how long; what cannot be lent, and what lending waits for: on devices of our own making.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use growspan::driver::fault::FaultPlan;
use growspan::driver::sim::Personality;
use growspan::driver::{Call, ChunkProps, DriverErrorKind, RawStream, Shareable};
use growspan::{
    Bytes, DeviceOptions, Error, GrowableBuffer, MapHooks, MappedChunk, PoolPolicy, Prewarm, Quiesce, Sizing,
};

use crate::deferred::pending;
use crate::drivers::card;
use crate::world::{UNIT, World, look, shrink, stamp, units};

const HOUR: Duration = Duration::from_secs(3600);

/// A simulated card whose pool has this policy.
fn pooled(policy: PoolPolicy) -> World {
    World::sim(card(), DeviceOptions::new().pool(policy))
}

fn buffer(world: &World, max: usize, sizing: Sizing) -> GrowableBuffer<u8> {
    GrowableBuffer::builder(&world.device).max_len(max * UNIT).sizing(sizing).build().unwrap()
}

/// A chunk of each of these sizes, one after the other in the pool.
fn put(world: &World, sizes: &[usize]) {
    let chunks: Vec<_> = sizes.iter().map(|size| world.device.chunk(units(*size)).unwrap()).collect();
    for chunk in chunks {
        world.device.pool().put(chunk);
    }
}

fn classes(world: &World) -> Vec<(usize, usize)> {
    let classes = world.device.pool().classes();
    classes.into_iter().map(|(size, count)| (size.get() as usize / UNIT, count)).collect()
}

#[test]
fn above_the_high_mark_the_oldest_go_down_to_the_low_one() {
    let world = pooled(PoolPolicy::new().keep(units(100)).watermarks(units(18), units(20)));
    put(&world, &[6, 4, 2, 8]);
    assert_eq!(classes(&world), [(2, 1), (4, 1), (6, 1), (8, 1)], "at the mark all stays");
    world.faults.arm(FaultPlan::count().of(Call::Release));
    put(&world, &[10]);
    // Of thirty the oldest go, six and four and two, until there are eighteen.
    assert_eq!(classes(&world), [(8, 1), (10, 1)]);
    assert_eq!(world.faults.counted(), 3, "really to the driver");
    assert_eq!(world.device.pool().stats().released_by_watermark, units(12));
    assert_eq!(world.device.snapshot().pools, world.device.pool().stats());
    world.assert_balanced("above the mark");
    // What no mark leaves room for goes too, and what the limit does not let in never comes in.
    put(&world, &[24]);
    assert_eq!(classes(&world), []);
    put(&world, &[102]);
    assert_eq!(
        (world.device.pool().kept(), world.device.pool().stats().released_by_watermark),
        (Bytes::ZERO, units(54))
    );
    world.assert_empty("marks");
}

#[test]
fn a_new_policy_holds_at_once() {
    let world = pooled(PoolPolicy::new().keep(units(100)));
    put(&world, &[6, 4, 2, 8]);
    let pool = world.device.pool();
    let trimmed = pool.set_policy(PoolPolicy::new().watermarks(units(9), units(12)));
    assert_eq!((trimmed.released, trimmed.kept), (units(12), units(8)), "six, four and two are the oldest");
    assert_eq!(pool.keep_limit(), units(100), "not spoken of");
    let trimmed = pool.set_policy(PoolPolicy::from(units(4)));
    assert_eq!((trimmed.released, trimmed.kept, pool.keep_limit()), (units(8), Bytes::ZERO, units(4)));
    assert_eq!(pool.policy(), PoolPolicy::new().keep(units(4)));
    world.assert_empty("a new policy");
}

#[test]
fn what_nobody_needs_for_so_long_goes() {
    let world = pooled(PoolPolicy::new().keep(units(100)).max_age(HOUR));
    put(&world, &[6, 4]);
    let pool = world.device.pool();
    let before = Instant::now();
    assert_eq!(pool.age_out().released, Bytes::ZERO);
    assert_eq!(pool.age_out_at(before + HOUR / 2).released, Bytes::ZERO);
    // Used meanwhile, and so as if it had just come in.
    let again = world.device.chunk(units(4)).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    let between = Instant::now();
    std::thread::sleep(Duration::from_millis(2));
    pool.put(again);
    let trimmed = pool.age_out_at(between + HOUR);
    assert_eq!((trimmed.released, trimmed.kept), (units(6), units(4)));
    assert_eq!(classes(&world), [(4, 1)]);
    assert_eq!(pool.age_out_at(Instant::now() + HOUR).released, units(4));
    assert_eq!((pool.stats().released_by_age, pool.stats().hits, pool.stats().misses), (units(10), 1, 2));
    world.assert_empty("aged");
}

#[test]
fn every_use_of_the_pool_lets_the_too_old_go() {
    let world = pooled(PoolPolicy::new().keep(units(100)).max_age(Duration::ZERO));
    world.faults.arm(FaultPlan::count().of(Call::Release));
    put(&world, &[6]);
    assert_eq!(classes(&world), [(6, 1)], "it has only just come in");
    put(&world, &[4]);
    assert_eq!((classes(&world), world.faults.counted()), (vec![(4, 1)], 1), "putting");
    drop(world.device.chunk(units(2)).unwrap());
    assert_eq!((classes(&world), world.faults.counted()), (vec![], 3), "taking");
    put(&world, &[4]);
    assert_eq!(world.device.chunk(units(4)).unwrap().bytes(), units(4));
    assert_eq!(world.device.pool().stats().hits, 1, "what is wanted does not go first");
    // A growth and a shrink.
    put(&world, &[64]);
    let mut buffer = world.buffer();
    buffer.grow_to(UNIT).unwrap();
    assert_eq!(classes(&world), []);
    put(&world, &[64]);
    shrink(&mut buffer, 0);
    assert_eq!(classes(&world), [(2, 1)]);
    world.faults.disarm();
    drop(buffer);
    world.assert_empty("aged by use");
}

#[test]
fn a_driver_that_takes_nothing_back_does_not_stop_the_pool() {
    for policy in [
        PoolPolicy::new().keep(units(100)).max_age(Duration::ZERO),
        PoolPolicy::new().keep(units(100)).watermarks(Bytes::ZERO, units(4)),
    ] {
        let world = pooled(policy);
        put(&world, &[4]);
        world.faults.arm(FaultPlan::every().of(Call::Release));
        let mut buffer = world.buffer();
        buffer.grow_to(10 * UNIT).unwrap();
        shrink(&mut buffer, 0);
        assert_eq!(world.device.pool().kept(), units(14), "{policy:?}: nothing is lost");
        assert!(world.device.pool().trim(Bytes::ZERO).error.is_some());
        world.faults.disarm();
        world.assert_balanced("nothing goes");
        assert_eq!(world.device.pool().stats().released_by_age, Bytes::ZERO);
        put(&world, &[2]);
        assert!(world.device.pool().kept() <= units(4), "{policy:?}: once it can go it goes");
        drop(buffer);
        world.assert_empty("it went");
    }
}

#[test]
fn by_default_a_pool_keeps_a_quarter_for_ever() {
    let world = World::sim(card().total(units(400)), DeviceOptions::new());
    let pool = world.device.pool();
    assert_eq!((pool.keep_limit(), pool.policy()), (units(100), PoolPolicy::new().keep(units(100))));
    put(&world, &[60, 40, 2]);
    assert_eq!(classes(&world), [(40, 1), (60, 1)], "the third is turned away, whatever is older");
    assert_eq!(pool.age_out_at(Instant::now() + 10_000 * HOUR).released, Bytes::ZERO);
    let own = world.device.new_pool(ChunkProps::PLAIN, PoolPolicy::new().max_age(HOUR));
    assert_eq!(own.keep_limit(), units(100));
    drop(own);
    world.assert_empty("by default");
}

#[test]
fn prewarming_takes_from_nobody_and_stops_where_memory_ends() {
    let world = World::sim(card().total(units(100)), DeviceOptions::new().pool_keep(units(100)));
    let own = world.device.new_pool(ChunkProps::PLAIN, units(100));
    let mut other = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).pool(&own).build().unwrap();
    other.grow_to(60 * UNIT).unwrap();
    drop(other);
    let warm = world.device.prewarm(Prewarm::Chunks { size: units(6), count: 10 }).unwrap();
    assert_eq!((warm.made, warm.chunks, warm.missing), (units(36), 6, units(24)), "{warm}");
    assert!(warm.why.as_deref().is_some_and(|why| why.contains("out of memory")), "{warm}");
    assert_eq!(own.kept(), units(60), "another pool keeps what it keeps");
    let again = world.device.prewarm(Prewarm::Chunks { size: units(6), count: 5 }).unwrap();
    assert_eq!(again.to_string(), "0 B made in 0 chunks, 960 KiB were there");
    // No more than the marks let stay.
    own.trim(Bytes::ZERO);
    own.set_policy(PoolPolicy::new().watermarks(units(4), units(8)));
    let warm = world.device.prewarm_in(&own, Prewarm::span(units(20))).unwrap();
    assert_eq!((warm.made, own.kept(), own.stats().released_by_watermark), (units(8), units(8), Bytes::ZERO));
    assert_eq!((warm.missing, warm.why.is_some()), (units(12), true));

    // Any other error than that something ran out leaves everything as it was.
    own.trim(Bytes::ZERO);
    own.set_policy(PoolPolicy::from(units(100)));
    world.faults.arm(FaultPlan::nth(3).of(Call::Create).kind(DriverErrorKind::Other));
    let made = world.device.prewarm_in(&own, Prewarm::span(units(20)));
    world.faults.disarm();
    assert!(matches!(made, Err(Error::Driver(_))), "{made:?}");
    assert_eq!(own.kept(), Bytes::ZERO);

    for bad in [Bytes::ZERO, Bytes::new(1), Bytes::gib(2)] {
        let made = world.device.prewarm(Prewarm::Chunks { size: bad, count: 1 });
        assert!(matches!(made, Err(Error::ChunkSize { .. })), "{bad}");
    }
    let made = world.device.prewarm(Prewarm::Chunks { size: units(2), count: u64::MAX });
    assert!(matches!(made, Err(Error::Overflow { .. })));
    let made = world.device.prewarm(Prewarm::span(Bytes::new(u64::MAX)));
    assert!(matches!(made, Err(Error::Overflow { .. })));
    assert!(world.device.prewarm(Prewarm::span(Bytes::new(1 << 62))).unwrap().why.is_some(), "in no time");
    assert_eq!(world.device.prewarm(Prewarm::span(Bytes::ZERO)).unwrap().made, Bytes::ZERO);
    let elsewhere = World::sim(card(), DeviceOptions::new());
    let made = world.device.prewarm_in(elsewhere.device.pool(), Prewarm::span(units(2)));
    assert!(matches!(made, Err(Error::OtherDevice { .. })));
    world.sim.as_ref().unwrap().capture(RawStream::DEFAULT, true);
    let made = world.device.prewarm(Prewarm::span(units(2)));
    assert!(matches!(made, Err(Error::Capturing { .. })));
    world.sim.as_ref().unwrap().capture(RawStream::DEFAULT, false);
    own.trim(Bytes::ZERO);
    world.assert_empty("prewarmed");
}

#[test]
fn prewarming_spends_files_and_says_when_there_are_none_left() {
    let files = Personality::OpenFilePerChunk { held: 16, soft: 100, hard: 100, as_out_of_memory: true };
    let world = World::sim(card().personality(files), DeviceOptions::new().arena(units(2)));
    assert!(world.is_virtual());
    let warm = world.device.prewarm(Prewarm::Chunks { size: units(2), count: 40 }).unwrap();
    assert_eq!((warm.chunks, warm.missing), (20, units(40)), "64 are kept for the application: {warm}");
    assert!(warm.why.is_some_and(|why| why.contains("open file")));
    world.assert_empty("files");
}

/// Why lending fails, with both buffers left alone.
fn refusal(lender: &mut GrowableBuffer<u8>, borrower: &mut GrowableBuffer<u8>) -> String {
    let before = (look(lender), look(borrower));
    let error = lender.lend(0, Quiesce::Device, borrower).unwrap_err();
    assert_eq!((look(lender), look(borrower)), before, "{error}");
    assert!(matches!(error, Error::NotLent { .. } | Error::OtherDevice { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn what_cannot_be_lent_stays_and_says_why() {
    let world = World::host(DeviceOptions::new());
    let shareable = world.device.new_pool(ChunkProps::PLAIN.with_shareable(Shareable::PosixFd), units(100));
    let exportable = || {
        let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).pool(&shareable);
        let mut buffer = builder.build().unwrap();
        buffer.append(&[5; 9 * UNIT]).unwrap();
        buffer
    };
    let mut lender = world.buffer();
    lender.grow_to(20 * UNIT).unwrap();
    stamp(&mut lender, 1);
    let mut roomy = buffer(&world, 64, Sizing::Ladder);

    let mut tight = buffer(&world, 10, Sizing::Ladder);
    tight.grow_to(1).unwrap();
    let why = refusal(&mut lender, &mut tight);
    assert_eq!(
        why,
        "640 KiB were to be lent, which cannot be: the borrower has addresses for 256 KiB more; build it with a larger \
         max_len"
    );
    let why = refusal(&mut lender, &mut buffer(&world, 64, Sizing::Uniform(units(4))));
    assert!(why.contains("chunks of 128 KiB only, and one has 64 KiB"), "{why}");
    let why = refusal(&mut lender, &mut exportable());
    assert!(why.contains("properties"), "{why}");
    let (mut mine, mut theirs) = (exportable(), exportable());
    let _fd = mine.export_chunk(2).unwrap();
    let why = refusal(&mut mine, &mut theirs);
    assert!(why.contains("exported"), "{why}");
    // Those below it are nobody's but ours, and those it borrows are its own.
    assert_eq!(theirs.lend(0, Quiesce::Device, &mut mine).unwrap().bytes(), units(10));

    let elsewhere = World::host(DeviceOptions::new());
    let why = refusal(&mut lender, &mut elsewhere.buffer());
    assert!(why.contains("a borrower belongs to host"), "{why}");
    let plain = World::host(DeviceOptions::new().contiguous(true));
    let (mut block, mut other) = (plain.buffer(), plain.buffer());
    block.grow_to(UNIT).unwrap();
    let why = refusal(&mut block, &mut other);
    assert!(why.contains("contiguous mode"), "{why}");
    assert!(matches!(lender.lend(21 * UNIT, Quiesce::Device, &mut roomy), Err(Error::ShrinkAboveLen { .. })));

    // Nothing lies wholly above: nothing goes, and nothing is owed.
    let mut nothing = lender.lend(19 * UNIT, Quiesce::Device, &mut roomy).unwrap();
    assert_eq!((nothing.bytes(), nothing.chunks(), lender.len()), (Bytes::ZERO, 0, 19 * UNIT));
    assert!(nothing.give_back(&mut roomy, &mut lender, Quiesce::Device).unwrap().returned.is_zero());

    // A loan is of two buffers, and of no others.
    let mut loan = lender.lend(0, Quiesce::Device, &mut roomy).unwrap();
    let mut third = world.buffer();
    for result in [
        loan.give_back(&mut third, &mut lender, Quiesce::Device),
        loan.give_back(&mut roomy, &mut third, Quiesce::Device),
        loan.give_back(&mut lender, &mut roomy, Quiesce::Device),
    ] {
        assert!(matches!(result, Err(Error::NotLent { .. })), "{result:?}");
    }
    assert_eq!(loan.bytes(), units(20), "still owed");
    // The lender has grown meanwhile, and has no addresses left for them.
    lender.grow_to(60 * UNIT).unwrap();
    let result = loan.give_back(&mut roomy, &mut lender, Quiesce::Device);
    assert!(matches!(&result, Err(Error::NotLent { why, .. }) if why.contains("addresses")), "{result:?}");
    shrink(&mut lender, 0);
    assert_eq!(loan.give_back(&mut roomy, &mut lender, Quiesce::Device).unwrap().returned, units(20));
    drop((mine, theirs, lender, roomy, third, tight));
    shareable.trim(Bytes::ZERO);
    world.assert_empty("not lent");
}

#[test]
fn devices_of_one_chunk_size_lend_chunks_of_that_size() {
    let world = World::sim(card().personality(Personality::UniformChunksOnly), DeviceOptions::new());
    assert!(world.device.verdict().quirks().uniform_chunks_only);
    let (mut a, mut b) = (buffer(&world, 64, Sizing::Uniform(units(4))), buffer(&world, 64, Sizing::Uniform(units(4))));
    let mut other = buffer(&world, 64, Sizing::Uniform(units(8)));
    a.grow_to(20 * UNIT).unwrap();
    stamp(&mut a, 2);
    assert!(refusal(&mut a, &mut other).contains("same uniform size"));
    b.grow_to(3 * UNIT).unwrap();
    assert_eq!(a.lend(9 * UNIT, Quiesce::Device, &mut b).unwrap().bytes(), units(8));
    assert_eq!((a.committed(), b.committed()), (units(12), units(12)));
    b.grow_to(40 * UNIT).unwrap();
    stamp(&mut b, 3);
    // Nothing is cut or coalesced either.
    let shrunk = b.shrink_exact(37 * UNIT, Quiesce::Device).unwrap();
    assert_eq!(shrunk.why.unwrap(), "64 KiB of the last chunk stay: all chunks of this span have one size");
    let coalesced = b.coalesce(Quiesce::Device).unwrap();
    assert_eq!(coalesced.to_string(), "10 chunks became 10, 0 B copied: this device takes one chunk size per span");
    assert_eq!(world.sim.as_ref().unwrap().violations(), []);
    drop((a, b, other));
    world.assert_empty("one size");
}

/// Promise 3: a loan and a coalescing wait for what they name, as a shrink does.
#[test]
fn nothing_moves_under_running_work() {
    for coalesce in [false, true] {
        let (world, sim, stream, _buffer) = pending(Bytes::ZERO, 2);
        let ready = || {
            let mut buffer = buffer(&world, 64, Sizing::Uniform(units(2)));
            buffer.grow_to(40 * UNIT).unwrap();
            sim.queue_work(stream, buffer.device_ptr(), 40 * UNIT as u64);
            buffer
        };
        let mut borrower = buffer(&world, 512, Sizing::Ladder);
        let mut go = |mut buffer: GrowableBuffer<u8>, quiesce: Quiesce<'_>| {
            if coalesce {
                assert!(buffer.coalesce(quiesce).unwrap().saved() > 0);
            } else {
                assert_eq!(buffer.lend(4 * UNIT, quiesce, &mut borrower).unwrap().bytes(), units(36));
            }
            assert_eq!(sim.violations(), []);
            buffer
        };
        go(ready(), Quiesce::Device);
        go(ready(), Quiesce::Stream(stream));
        let event = world.device.event().unwrap();
        let work = ready();
        assert!(matches!(world.buffer().coalesce(Quiesce::Event(&event)), Err(Error::EventNotRecorded)));
        event.record(stream).unwrap();
        go(work, Quiesce::Event(&event));
        let work = ready();
        event.record(stream).unwrap();
        go(work, Quiesce::Deferred(&event));
        let work = ready();
        sim.finish_all();
        // SAFETY: all work was finished just now.
        go(work, unsafe { Quiesce::already_idle() });
        // Giving back is the borrower's shrink.
        if !coalesce {
            let mut lender = ready();
            let mut loan = lender.lend(4 * UNIT, Quiesce::Device, &mut borrower).unwrap();
            let address = borrower.device_ptr() + borrower.committed().get() - (2 * UNIT) as u64;
            sim.queue_work(stream, address, UNIT as u64);
            loan.give_back(&mut borrower, &mut lender, Quiesce::Device).unwrap();
            assert_eq!(sim.violations(), []);
        }
        let mut buffer = ready();
        sim.capture(RawStream::DEFAULT, true);
        assert!(matches!(buffer.coalesce(Quiesce::Device), Err(Error::Capturing { .. })));
        assert!(matches!(buffer.lend(0, Quiesce::Device, &mut borrower), Err(Error::Capturing { .. })));
        sim.capture(RawStream::DEFAULT, false);
        drop((buffer, event, borrower, _buffer));
        world.assert_empty("nothing moved");
    }
}

/// What waits for an event at either end goes before chunks come or go there.
#[test]
fn what_waits_goes_before_chunks_move() {
    let (world, sim, stream, mut lender) = pending(Bytes::ZERO, 40);
    let mut borrower = world.buffer();
    borrower.grow_to(20 * UNIT).unwrap();
    sim.queue_work(stream, borrower.device_ptr(), 20 * UNIT as u64);
    let event = world.device.event().unwrap();
    event.record(stream).unwrap();
    lender.shrink_to(30 * UNIT, Quiesce::Deferred(&event)).unwrap();
    borrower.shrink_to(6 * UNIT, Quiesce::Deferred(&event)).unwrap();
    assert_eq!(world.device.snapshot().bytes_retiring, units(24));
    let loan = lender.lend(20 * UNIT, Quiesce::Device, &mut borrower).unwrap();
    assert_eq!((loan.bytes(), borrower.committed()), (units(10), units(16)));
    assert_eq!(world.device.snapshot().bytes_retiring, Bytes::ZERO);
    assert_eq!(sim.violations(), []);
    // The same for a coalescing.
    let mut small = buffer(&world, 64, Sizing::Uniform(units(2)));
    small.grow_to(60 * UNIT).unwrap();
    sim.queue_work(stream, small.device_ptr(), 60 * UNIT as u64);
    event.record(stream).unwrap();
    small.shrink_to(40 * UNIT, Quiesce::Deferred(&event)).unwrap();
    let coalesced = small.coalesce(Quiesce::Device).unwrap();
    assert_eq!((coalesced.before, coalesced.after, small.committed()), (20, 18, units(40)));
    assert_eq!(sim.violations(), []);
    drop((lender, borrower, small, event));
    world.assert_empty("what waited");
}

#[derive(Default)]
struct Count(AtomicUsize, AtomicUsize);

impl MapHooks for Count {
    fn mapped(&self, chunk: MappedChunk) {
        self.0.fetch_add(chunk.bytes.get() as usize, Ordering::Relaxed);
    }
    fn unmapping(&self, chunk: MappedChunk) {
        self.1.fetch_add(chunk.bytes.get() as usize, Ordering::Relaxed);
    }
}

/// Whatever fails, hooks know what is mapped.
#[test]
fn hooks_follow_what_moves() {
    for k in 0.. {
        let world = World::sim(card(), DeviceOptions::new());
        let hooked = |sizing| {
            let hooks = Arc::new(Count::default());
            let told = Arc::clone(&hooks) as Arc<dyn MapHooks>;
            let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(128 * UNIT).sizing(sizing).hooks(told);
            (builder.build().unwrap(), hooks)
        };
        let [(mut a, told_a), (mut b, told_b), (mut c, told_c)] =
            [hooked(Sizing::Ladder), hooked(Sizing::Ladder), hooked(Sizing::Uniform(units(2)))];
        a.grow_to(60 * UNIT).unwrap();
        c.grow_to(60 * UNIT).unwrap();
        b.grow_to(UNIT).unwrap();
        // The first without a failure, then with one, then with two in a row.
        let first = k / 2;
        world.faults.arm(FaultPlan::list(if k % 2 == 0 { vec![first] } else { vec![first, first + 1] }));
        if let Ok(mut loan) = a.lend(30 * UNIT, Quiesce::Device, &mut b) {
            let _ = loan.give_back(&mut b, &mut a, Quiesce::Device);
        }
        let _ = c.coalesce(Quiesce::Device);
        let struck = world.faults.struck();
        world.faults.disarm();
        for (buffer, told) in [(&a, &told_a), (&b, &told_b), (&c, &told_c)] {
            let mapped = told.0.load(Ordering::Relaxed) - told.1.load(Ordering::Relaxed);
            assert_eq!(mapped as u64, buffer.committed().get(), "calls {first} and so on failing");
        }
        world.assert_balanced("told");
        if k > 0 && !struck && first > 0 {
            assert!(first > 20, "{first} calls");
            break;
        }
    }
}

/// An exported chunk is the same memory for both sides as long as it lives: no copy takes its place.
#[test]
fn exported_chunks_are_neither_cut_nor_coalesced() {
    let world = World::host(DeviceOptions::new());
    let pool = world.device.new_pool(ChunkProps::PLAIN.with_shareable(Shareable::PosixFd), units(100));
    let build = |sizing| {
        let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(256 * UNIT).sizing(sizing).pool(&pool);
        builder.build().unwrap()
    };
    let mut buffer = build(Sizing::Ladder);
    buffer.grow_to(40 * UNIT).unwrap();
    let last = buffer.chunks().len() - 1;
    let (_fd, before) = (buffer.export_chunk(last).unwrap(), buffer.chunks());
    let shrunk = buffer.shrink_exact(37 * UNIT, Quiesce::Device).unwrap();
    assert_eq!(buffer.chunks(), before);
    assert_eq!(shrunk.why.unwrap(), "64 KiB of the last chunk stay: it was exported, and another process may have it");

    let mut small = build(Sizing::Uniform(units(2)));
    small.grow_to(64 * UNIT).unwrap();
    let (_fd, before) = (small.export_chunk(17).unwrap(), small.chunks());
    let coalesced = small.coalesce(Quiesce::Device).unwrap();
    assert_eq!((coalesced.before, coalesced.after), (32, 25), "seven of eight pairs");
    assert_eq!(small.chunks()[17], before[17]);
    drop((buffer, small));
    pool.trim(Bytes::ZERO);
    world.assert_empty("exported");
}
