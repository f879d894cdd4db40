//! What a buffer is through its life: its address, its contents, its books, its limits.

use core::mem::size_of;
use std::sync::atomic::{AtomicBool, Ordering};

use growspan::driver::RawStream;
use growspan::driver::sim::{SimDriver, ViolationKind};
use growspan::{
    BufferSet, Bytes, Device, DeviceOptions, Error, Fallback, GrowableBuffer, Mode, Quiesce, Result, Sizing,
};

use crate::world::{MIB, UNIT, World, card, look, shrink, stamp, units};

/// A small generator of its own, so that a failure can be repeated.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % below.max(1)
    }
}

/// Promises 1 and 4 over a thousand random steps on two buffers, with what is written compared all the way.
#[test]
fn random_lives_keep_address_contents_and_books() {
    for world in World::all() {
        for seed in 0..3 {
            let mut dice = Dice(seed);
            let mut buffers = [world.buffer(), world.buffer()];
            let addresses = buffers.each_ref().map(GrowableBuffer::device_ptr);
            let mut models: [Vec<u8>; 2] = [Vec::new(), Vec::new()];
            for step in 0..120 {
                let n = dice.roll(2);
                let (buffer, model) = (&mut buffers[n], &mut models[n]);
                let what = format!("{}: seed {seed}, step {step}", world.name);
                match dice.roll(8) {
                    0 | 1 => {
                        let piece: Vec<u8> = (0..dice.roll(3 * UNIT)).map(|n| (n * 7 + step) as u8).collect();
                        if buffer.len() + piece.len() <= 64 * UNIT {
                            buffer.append(&piece).unwrap();
                            model.extend(&piece);
                        }
                    }
                    2 => {
                        let len = buffer.len() + dice.roll(64 * UNIT - buffer.len() + 1);
                        buffer.grow_zeroed(len, None).unwrap();
                        model.resize(len, 0);
                    }
                    3 | 4 => {
                        let len = dice.roll(buffer.len() + 1);
                        shrink(buffer, len);
                        model.truncate(len);
                    }
                    5 => {
                        let len = dice.roll(buffer.len() + 1);
                        let shrunk = buffer.shrink_exact(len, Quiesce::Device).unwrap();
                        model.truncate(len);
                        if shrunk.why.is_none() {
                            let granularity = world.device.verdict().granularity();
                            assert_eq!(
                                Some(buffer.committed()),
                                Bytes::new(len as u64).round_up(granularity),
                                "{what}"
                            );
                        }
                    }
                    6 if !model.is_empty() => {
                        let (from, to) = (dice.roll(model.len()), dice.roll(model.len()));
                        let count = dice.roll(model.len() - from.max(to)).min(UNIT);
                        buffer.copy_within(from..from + count, to).unwrap();
                        model.copy_within(from..from + count, to);
                    }
                    _ if !model.is_empty() => {
                        let from = dice.roll(model.len());
                        let end = from + dice.roll(model.len() - from);
                        buffer.fill(from..end, step as u8).unwrap();
                        model[from..end].fill(step as u8);
                    }
                    _ => buffer.truncate(usize::MAX),
                }
                assert_eq!(buffer.len(), model.len(), "{what}");
                assert!(buffer.len() <= buffer.capacity() && buffer.capacity() <= buffer.max_len(), "{what}");
                assert_eq!(buffers.each_ref().map(GrowableBuffer::device_ptr), addresses, "{what}");
                assert_eq!(buffers.each_ref().map(GrowableBuffer::moves), [0, 0], "{what}");
                world.assert_balanced(&what);
                if step % 10 == 9 {
                    for (buffer, model) in buffers.iter().zip(&models) {
                        let mut contents = vec![0; model.len()];
                        buffer.copy_out(0, &mut contents).unwrap();
                        assert!(contents == *model, "{what}: contents differ");
                    }
                }
            }
            drop(buffers);
            world.assert_empty("after random lives");
        }
    }
}

#[test]
fn sizes_at_every_edge() {
    for world in World::all() {
        let granule = world.device.verdict().granularity().get() as usize;
        let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(9 * granule - 1).build().unwrap();
        for chunks in 1..=8 {
            for len in [chunks * granule - 1, chunks * granule, chunks * granule + 1] {
                buffer.grow_to(len).unwrap();
                assert_eq!(buffer.len(), len);
                assert!(buffer.committed().get() as usize >= len);
                buffer.copy_in(len - 1, &[9]).unwrap();
                let mut byte = [0];
                buffer.copy_out(len - 1, &mut byte).unwrap();
                assert_eq!(byte, [9]);
            }
        }
        buffer.grow_to(9 * granule - 1).unwrap();
        assert_eq!(buffer.capacity(), 9 * granule - 1, "never more than was asked for");
        for beyond in [9 * granule, usize::MAX / 2, usize::MAX] {
            match buffer.grow_to(beyond) {
                Err(Error::BeyondMax { asked, len, max_len }) => {
                    assert_eq!((asked, len, max_len), (beyond, 9 * granule - 1, 9 * granule - 1));
                }
                other => panic!("{}: {other:?}", world.name),
            }
        }
        assert!(matches!(buffer.grow_by(usize::MAX), Err(Error::BeyondMax { .. })));
        for len in [9 * granule - 1, 8 * granule + 1, 8 * granule, 8 * granule - 1, 1, 0] {
            shrink(&mut buffer, len);
            assert_eq!(buffer.len(), len);
        }
        if world.is_virtual() {
            assert_eq!(buffer.committed(), Bytes::ZERO);
        }
        drop(buffer);
        world.assert_empty("edges");
    }
}

#[test]
fn bad_input_gets_a_typed_error_with_figures() {
    #[repr(align(4194304))]
    struct Wide {
        _byte: u8,
    }
    let world = World::sim(SimDriver::builder(), DeviceOptions::new());
    let device = &world.device;
    fn build<T>(device: &Device, max_len: usize) -> Result<GrowableBuffer<T>> {
        GrowableBuffer::builder(device).max_len(max_len).build()
    }
    let text = |error: Error| error.to_string();
    assert!(text(build::<u8>(device, 0).unwrap_err()).contains("at least one"));
    assert!(matches!(build::<()>(device, 5), Err(Error::ZeroSizedType { .. })));
    assert!(matches!(build::<u64>(device, usize::MAX), Err(Error::Overflow { size: 8, .. })));
    assert!(matches!(build::<u64>(device, usize::MAX / 8), Err(Error::Overflow { .. })), "more than isize::MAX");
    assert!(matches!(build::<u8>(device, isize::MAX as usize), Err(Error::Reserve { .. })));
    let large = text(build::<[u8; 3 * MIB]>(device, 5).unwrap_err());
    assert!(large.contains("3 MiB") && large.contains("2 MiB"), "{large}");
    match build::<Wide>(device, 5) {
        Err(Error::Alignment { align, .. }) => assert_eq!(align, Bytes::mib(4)),
        other => panic!("{other:?}"),
    }
    for size in [Bytes::ZERO, Bytes::mib(3), Bytes::gib(2), Bytes::new(1)] {
        let built = GrowableBuffer::<u8>::builder(device).max_len(MIB).sizing(Sizing::Uniform(size)).build();
        assert!(matches!(built, Err(Error::ChunkSize { .. })), "{size}");
    }
    let other = World::sim(SimDriver::builder(), DeviceOptions::new());
    let built = GrowableBuffer::<u8>::builder(device).max_len(MIB).pool(other.device.pool()).build();
    assert!(matches!(built, Err(Error::OtherDevice { .. })));

    let mut buffer = build::<u32>(device, 1000).unwrap();
    buffer.grow_to(10).unwrap();
    assert!(matches!(buffer.shrink_to(11, Quiesce::Device), Err(Error::ShrinkAboveLen { asked: 11, len: 10 })));
    assert!(matches!(buffer.shrink_exact(11, Quiesce::Device), Err(Error::ShrinkAboveLen { .. })));
    assert!(matches!(buffer.copy_in(8, &[1, 2, 3]), Err(Error::OutOfBounds { start: 8, count: 3, len: 10, .. })));
    assert!(matches!(buffer.copy_in(usize::MAX, &[1]), Err(Error::OutOfBounds { .. })));
    assert!(matches!(buffer.copy_out(11, &mut []), Err(Error::OutOfBounds { .. })));
    assert!(matches!(buffer.copy_within(5..11, 0), Err(Error::OutOfBounds { .. })));
    assert!(matches!(buffer.copy_within(0..5, 6), Err(Error::OutOfBounds { .. })));
    assert!(matches!(buffer.fill(3..12, 0), Err(Error::OutOfBounds { .. })));
    assert!(matches!(buffer.as_slice(), Err(Error::NotHostVisible { .. })));
    assert!(matches!(buffer.as_mut_slice(), Err(Error::NotHostVisible { .. })));
    buffer.copy_out(10, &mut []).unwrap();
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is tested")]
    buffer.fill(7..3, 0).unwrap();
    let event = other.device.event().unwrap();
    buffer.grow_to(1000).unwrap();
    assert!(matches!(buffer.shrink_to(0, Quiesce::Event(&event)), Err(Error::OtherDevice { .. })));
    assert_eq!(buffer.len(), 1000);
    drop(buffer);

    // A stream of a simulated device leads nowhere on a real one.
    let stream = SimDriver::new().stream();
    let host = World::host(DeviceOptions::new());
    let mut buffer = host.buffer();
    assert!(matches!(buffer.grow_zeroed(10, Some(stream)), Err(Error::OtherDevice { .. })));
    buffer.grow_to(10).unwrap();
    assert!(matches!(buffer.shrink_to(0, Quiesce::Stream(stream)), Err(Error::OtherDevice { .. })));
    assert!(matches!(host.device.event().unwrap().record(stream), Err(Error::OtherDevice { .. })));

    for name in ["", "gpu", "cuda", "cuda:", "cuda:x", "cuda:-1", "host:0", "hip:99999999999", "auto:1"] {
        assert!(matches!(Device::named(name), Err(Error::UnknownDevice { .. })), "{name}");
    }
    match Device::named("hip:0") {
        Err(Error::NoDevice { asked, why }) => assert!(asked == "hip:0" && !why.is_empty()),
        other => panic!("{other:?}"),
    }
    assert!(matches!(device.reserve(Bytes::ZERO), Err(Error::ZeroLength { .. })));
    assert!(matches!(device.reserve(Bytes::new(u64::MAX)), Err(Error::Overflow { .. })));
    for size in [Bytes::ZERO, Bytes::new(5), Bytes::mib(3), Bytes::gib(2)] {
        assert!(matches!(device.chunk(size), Err(Error::ChunkSize { .. })), "{size}");
    }
    world.assert_empty("bad input");
}

#[test]
fn fallbacks_do_as_they_say() {
    for world in
        [World::host(DeviceOptions::new().contiguous(true)), World::sim(card(), DeviceOptions::new().contiguous(true))]
    {
        let builder = || GrowableBuffer::<u32>::builder(&world.device).max_len(1 << 20);
        let upfront = builder().build().unwrap();
        assert_eq!((upfront.committed(), upfront.capacity()), (Bytes::mib(4), 1 << 20));
        assert_eq!(upfront.mode(), Mode::Contiguous);

        let mut capped = builder().fallback(Fallback::Capacity(Bytes::new(4001 - 5))).build().unwrap();
        assert_eq!(capped.capacity(), 1024);
        assert!(matches!(capped.grow_to(1025), Err(Error::FallbackFull { .. })));

        let mut moving = builder().fallback(Fallback::MayMove).build().unwrap();
        assert_eq!((moving.device_ptr(), moving.committed(), moving.moves()), (0, Bytes::ZERO, 0));
        moving.copy_out(0, &mut []).unwrap();
        moving.append(&[1, 2, 3]).unwrap();
        let first = moving.device_ptr();
        assert_eq!(moving.moves(), 0, "a first block is no move");
        moving.grow_to(100_000).unwrap();
        assert_ne!(moving.device_ptr(), first);
        assert_eq!(moving.moves(), 1);
        let mut back = [0; 3];
        moving.copy_out(0, &mut back).unwrap();
        assert_eq!(back, [1, 2, 3]);
        let shrunk = moving.shrink_to(1, Quiesce::Device).unwrap();
        assert!(shrunk.released.is_zero() && shrunk.why.unwrap().contains("nothing goes back"));
        assert!(matches!(builder().fallback(Fallback::Refuse).build(), Err(Error::Refused { .. })));
        world.assert_balanced("three blocks");
        drop((upfront, capped, moving));
        world.assert_empty("blocks");
    }
}

/// Promise 3, with work pending on a simulated stream: each form waits for what it names.
#[test]
fn nothing_is_unmapped_under_running_work() {
    let sim = card().build();
    let world = World::over("sim", sim.driver(), Some(sim.clone()), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let ready = |stream: RawStream| {
        let mut buffer = world.buffer();
        buffer.grow_to(40 * UNIT).unwrap();
        sim.queue_work(stream, buffer.device_ptr(), 40 * UNIT as u64);
        buffer
    };
    let stream = sim.stream();
    for exact in [false, true] {
        let go = |buffer: &mut GrowableBuffer<u8>, quiesce: Quiesce<'_>| {
            if exact { buffer.shrink_exact(3, quiesce) } else { buffer.shrink_to(3, quiesce) }.unwrap();
        };
        go(&mut ready(stream), Quiesce::Device);
        go(&mut ready(stream), Quiesce::Stream(stream));
        let mut buffer = ready(stream);
        let event = world.device.event().unwrap();
        event.record(stream).unwrap();
        assert!(!event.is_reached().unwrap());
        go(&mut buffer, Quiesce::Event(&event));
        let mut buffer = ready(stream);
        event.record(stream).unwrap();
        go(&mut buffer, Quiesce::Deferred(&event));
        let mut buffer = ready(stream);
        sim.finish_all();
        // SAFETY: all work was finished just now.
        go(&mut buffer, unsafe { Quiesce::already_idle() });
    }
    // Close, drop and the drop of a moving block wait for the device.
    ready(stream).close().unwrap();
    drop(ready(stream));
    assert_eq!(sim.violations(), []);

    // And so that this test can fail: without waiting, the device is lost.
    let mut buffer = ready(stream);
    // SAFETY: not so, which is the point; a simulated device is all that is harmed.
    let _ = buffer.shrink_to(3, unsafe { Quiesce::already_idle() });
    let violations = sim.take_violations();
    assert_eq!(violations[0].kind, ViolationKind::UnderRunningWork);
    // From here on everything is refused at once, and nothing panics.
    assert!(matches!(buffer.grow_to(50 * UNIT), Err(Error::DeviceLost(_))));
    assert!(matches!(world.device.synchronize(), Err(Error::DeviceLost(_))));
    buffer.close().unwrap();
    assert!(sim.violations().is_empty());
}

#[test]
fn a_moving_block_waits_before_it_moves() {
    let sim = card().build();
    let options = DeviceOptions::new().contiguous(true);
    let world = World::over("sim", sim.driver(), Some(sim.clone()), options);
    let builder = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * UNIT).fallback(Fallback::MayMove);
    let mut buffer = builder.build().unwrap();
    buffer.grow_to(UNIT).unwrap();
    sim.queue_work(sim.stream(), buffer.device_ptr(), UNIT as u64);
    buffer.grow_to(40 * UNIT).unwrap();
    drop(buffer);
    world.assert_empty("moved");
}

#[test]
fn what_one_buffer_gives_up_the_next_takes_without_a_new_chunk() {
    for world in [World::host(DeviceOptions::new()), World::sim(card(), DeviceOptions::new())] {
        let mut first = world.buffer();
        let mut second = world.buffer();
        first.grow_to(60 * UNIT).unwrap();
        let created = world.device.snapshot().chunks;
        shrink(&mut first, 0);
        assert_eq!(world.device.pool().kept(), units(60));
        second.grow_to(60 * UNIT).unwrap();
        assert_eq!(world.device.snapshot().chunks, created);
        assert_eq!(world.device.pool().kept(), Bytes::ZERO);
        drop((first, second));
        assert!(!world.device.pool().kept().is_zero());
        world.assert_empty("taken over");
    }
}

#[test]
fn the_pool_gives_way_before_memory_is_called_short() {
    let world = World::sim(card().total(units(128)), DeviceOptions::new().pool_keep(Bytes::gib(1)));
    let mut first = world.buffer();
    first.grow_to(60 * UNIT).unwrap();
    drop(first);
    assert_eq!(world.device.pool().kept(), units(60));
    // Chunks of 32 MiB fit only if the pool is emptied.
    let sizing = Sizing::Uniform(units(32));
    let mut big = GrowableBuffer::<u8>::builder(&world.device).max_len(256 * UNIT).sizing(sizing).build().unwrap();
    big.grow_to(100 * UNIT).unwrap();
    assert_eq!(world.device.pool().kept(), Bytes::ZERO);
    assert!(matches!(big.grow_to(130 * UNIT), Err(Error::OutOfMemory(_))));
    drop(big);
    world.assert_empty("gave way");
}

#[test]
fn two_threads_on_buffers_of_one_device() {
    for world in World::all() {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let trimmer = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    world.device.pool().trim(Bytes::ZERO);
                    std::thread::yield_now();
                }
            });
            let workers: Vec<_> = (0..4_usize)
                .map(|seed| {
                    let world = &world;
                    scope.spawn(move || {
                        let mut dice = Dice(seed as u64);
                        let mut buffer = world.buffer();
                        for _ in 0..40 {
                            let len = dice.roll(20 * UNIT);
                            buffer.grow_to(len).unwrap();
                            let last = buffer.len();
                            if last > 0 {
                                buffer.copy_in(last - 1, &[seed as u8]).unwrap();
                                let mut byte = [0];
                                buffer.copy_out(last - 1, &mut byte).unwrap();
                                assert_eq!(byte[0], seed as u8, "nobody else writes here");
                            }
                            shrink(&mut buffer, dice.roll(last + 1));
                        }
                    })
                })
                .collect();
            for worker in workers {
                worker.join().unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            trimmer.join().unwrap();
        });
        world.assert_empty("four threads and a trimmer");
    }
}

#[test]
fn slices_of_host_memory() {
    let device = Device::host().unwrap();
    let mut buffer = GrowableBuffer::<u64>::builder(&device).max_len(1 << 30).build().unwrap();
    assert_eq!(buffer.as_slice().unwrap(), &[] as &[u64]);
    for n in 0..1_000_000 {
        buffer.push(n).unwrap();
    }
    assert!(buffer.as_slice().unwrap().iter().copied().eq(0..1_000_000));
    buffer.as_mut_slice().unwrap().reverse();
    buffer.grow_zeroed(1_000_002, None).unwrap();
    assert_eq!(&buffer.as_slice().unwrap()[999_999..], [0, 0, 0]);
    buffer.fill(5..9, 0x0102_0304_0506_0708).unwrap();
    assert_eq!(
        buffer.as_slice().unwrap()[4..10],
        [999_995, 0x0102_0304_0506_0708, 0x0102_0304_0506_0708, 0x0102_0304_0506_0708, 0x0102_0304_0506_0708, 999_990]
    );

    let moving = DeviceOptions::new().contiguous(true).host(Default::default()).unwrap();
    let empty = GrowableBuffer::<u64>::builder(&moving).max_len(10).fallback(Fallback::MayMove).build().unwrap();
    assert_eq!(empty.as_slice().unwrap(), &[] as &[u64], "without a block too");
}

#[test]
fn overlapping_copies_on_a_device() {
    let world = World::sim(card(), DeviceOptions::new());
    for (len, distance) in [(1000, 1), (1000, 999), (9 * UNIT, 1), (9 * UNIT, UNIT), (20 * UNIT, 5 * UNIT + 3), (17, 4)]
    {
        for forward in [false, true] {
            let mut buffer = world.buffer();
            buffer.grow_to(len + distance).unwrap();
            stamp(&mut buffer, 3);
            let mut model = vec![0; len + distance];
            buffer.copy_out(0, &mut model).unwrap();
            let (from, to) = if forward { (0, distance) } else { (distance, 0) };
            buffer.copy_within(from..from + len, to).unwrap();
            model.copy_within(from..from + len, to);
            let mut got = vec![0; len + distance];
            buffer.copy_out(0, &mut got).unwrap();
            assert!(got == model, "{len} bytes, {distance} apart, forward: {forward}");
        }
    }
    world.assert_empty("copies");
}

#[test]
fn odd_elements_straddle_chunks() {
    for world in World::all() {
        let mut buffer = GrowableBuffer::<[u8; 3]>::builder(&world.device).max_len(3 * UNIT).build().unwrap();
        buffer.grow_to(UNIT).unwrap();
        assert_eq!(size_of::<[u8; 3]>() * buffer.len(), 3 * UNIT);
        let edge = 2 * UNIT / 3;
        buffer.copy_in(edge - 1, &[[1, 2, 3], [4, 5, 6], [7, 8, 9]]).unwrap();
        let mut got = [[0; 3]; 3];
        buffer.copy_out(edge - 1, &mut got).unwrap();
        assert_eq!(got, [[1, 2, 3], [4, 5, 6], [7, 8, 9]]);
        if world.is_virtual() {
            let elements = buffer.committed().get() / 3;
            assert_eq!(buffer.capacity() as u64, elements.min(3 * UNIT as u64));
        }
        drop(buffer);
        world.assert_empty("odd elements");
    }
}

#[test]
fn exact_shrinks_give_every_granule_back_and_keep_the_contents() {
    let world = World::sim(card(), DeviceOptions::new().pool_keep(Bytes::ZERO));
    let mut buffer = world.buffer();
    buffer.grow_to(60 * UNIT).unwrap();
    stamp(&mut buffer, 1);
    shrink(&mut buffer, 41 * UNIT);
    let before = look(&buffer);
    let shrunk = buffer.shrink_exact(41 * UNIT, Quiesce::Device).unwrap();
    assert_eq!((shrunk.released, shrunk.committed), (units(2), units(42)), "a chunk of four units is cut");
    assert_eq!(buffer.len(), 41 * UNIT);
    buffer.grow_to(60 * UNIT).unwrap();
    shrink(&mut buffer, 41 * UNIT);
    assert_eq!(format!("{:?}", look(&buffer)), format!("{before:?}").replace("1.37 MiB", "1.31 MiB"));
    // Without room for the copy the result says what stays.
    world.faults.arm(growspan::driver::fault::FaultPlan::every().of(growspan::driver::Call::Create));
    buffer.shrink_to(36 * UNIT - 1, Quiesce::Device).unwrap();
    let shrunk = buffer.shrink_exact(33 * UNIT, Quiesce::Device).unwrap();
    world.faults.disarm();
    assert_eq!(shrunk.committed, units(36));
    assert!(shrunk.why.unwrap().starts_with("64 KiB of the last chunk stay"));
    drop(buffer);
    world.assert_empty("exact");
}

#[test]
fn a_range_of_1100_chunks_maps_whole() {
    for world in [
        World::sim(SimDriver::builder().total(Bytes::gib(8)), DeviceOptions::new()),
        World::over(
            "host",
            std::sync::Arc::new(
                growspan::driver::host::HostDriver::open(
                    growspan::driver::host::HostOptions::default().with_capacity(Bytes::gib(3)),
                )
                .unwrap(),
            ),
            None,
            DeviceOptions::new(),
        ),
    ] {
        let len = 1100 * 2 * MIB;
        let sizing = Sizing::Uniform(Bytes::mib(2));
        let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(len).sizing(sizing).build().unwrap();
        buffer.grow_to(len).unwrap();
        assert_eq!(buffer.stats().chunks, 1100);
        for chunk in [0, 1, 549, 1099] {
            buffer.copy_in(chunk * 2 * MIB, &[chunk as u8 + 1]).unwrap();
        }
        let mut byte = [0];
        buffer.copy_out(1099 * 2 * MIB, &mut byte).unwrap();
        assert_eq!(byte, [(1099_usize as u8) + 1]);
        world.assert_balanced("1100 chunks");
        drop(buffer);
        world.assert_empty("1100 chunks");
    }
}

#[test]
fn members_of_a_set_out_of_step() {
    let world = World::sim(card(), DeviceOptions::new());
    let mut set = BufferSet::new();
    let bytes = set.add(world.buffer(), 16).unwrap();
    let words = GrowableBuffer::<u64>::builder(&world.device).max_len(1000).build().unwrap();
    let words = set.add(words, 1).unwrap();
    set.grow_to(10).unwrap();
    set.get_mut(bytes).unwrap().truncate(3);
    set.grow_to(11).unwrap();
    assert_eq!(set.get(bytes).unwrap().len(), 176);
    set.get_mut(words).unwrap().grow_to(500).unwrap();
    assert!(matches!(set.grow_to(20), Err(Error::OutOfStep { member: 1, len: 500, asked: 20 })));
    assert_eq!((set.rows(), set.get(bytes).unwrap().len()), (11, 176));
    assert!(matches!(set.grow_to(usize::MAX), Err(Error::Overflow { .. })));
    assert!(matches!(set.grow_by(usize::MAX), Err(Error::Overflow { .. })));
    assert!(matches!(set.shrink_to(12, &Quiesce::Device), Err(Error::ShrinkAboveLen { .. })));
    set.shrink_to(0, &Quiesce::Device).unwrap();
    assert_eq!(set.committed(), Bytes::ZERO);
    drop(set);
    world.assert_empty("a set");
}

#[test]
fn leaked_memory_stays_and_is_not_counted_as_given_back() {
    let world = World::sim(card(), DeviceOptions::new());
    let mut buffer = world.buffer();
    buffer.grow_to(5 * UNIT).unwrap();
    let leaked = buffer.leak();
    assert_eq!((leaked.len, leaked.capacity), (5 * UNIT, 6 * UNIT));
    assert_eq!(world.device.snapshot().bytes_mapped, units(6));
    world.assert_balanced("leaked");
}

#[test]
fn buffers_go_where_their_elements_may() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}
    send::<GrowableBuffer<u8>>();
    sync::<GrowableBuffer<u8>>();
    send::<GrowableBuffer<std::cell::Cell<u8>>>();
    send::<Device>();
    sync::<Device>();
    send::<BufferSet>();
}
