//! What a buffer is through its life: its address, its contents, its books, its limits.

use core::mem::size_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use growspan::driver::fault::FaultPlan;
use growspan::driver::{Call, RawStream};
use growspan::{BufferSet, Bytes, Error, Fallback, GrowableBuffer, MapHooks, MappedChunk, Mode, Quiesce, Sizing};

use crate::world::{Dice, Look, MIB, UNIT, World, look, shrink, stamp, units};
use crate::{SEEDS, large_worlds, worlds};

/// Promises 1 and 4 over a thousand random steps on two buffers, with what is written compared all the way.
pub(crate) fn random_lives_keep_address_contents_and_books() {
    for world in worlds() {
        for seed in 0..SEEDS {
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

pub(crate) fn sizes_at_every_edge() {
    for world in worlds() {
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

pub(crate) fn two_threads_on_buffers_of_one_device() {
    for world in worlds() {
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

pub(crate) fn odd_elements_straddle_chunks() {
    for world in worlds() {
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

pub(crate) fn fallbacks_do_as_they_say() {
    for world in worlds().into_iter().filter(|world| !world.is_virtual()) {
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

pub(crate) fn what_one_buffer_gives_up_the_next_takes_without_a_new_chunk() {
    let mut seen = 0;
    for world in worlds().into_iter().filter(|world| world.keeps_chunks() && !world.maps_ahead()) {
        let mut first = world.buffer();
        let mut second = world.buffer();
        first.grow_to(60 * UNIT).unwrap();
        assert_eq!(first.committed(), units(60), "{}: sixty units are whole chunks", world.name);
        let created = world.device.snapshot().chunks;
        shrink(&mut first, 0);
        assert_eq!(world.device.pool().kept(), units(60), "{}", world.name);
        second.grow_to(60 * UNIT).unwrap();
        assert_eq!(world.device.snapshot().chunks, created, "{}", world.name);
        assert_eq!(world.device.pool().kept(), Bytes::ZERO, "{}", world.name);
        drop((first, second));
        assert!(!world.device.pool().kept().is_zero(), "{}", world.name);
        world.assert_empty("taken over");
        seen += 1;
    }
    assert_eq!(seen > 0, crate::expects_virtual_memory(), "whether any device keeps what it gets");
}

pub(crate) fn overlapping_copies_on_a_device() {
    for world in worlds() {
        let far = 5 * UNIT + 3;
        for (len, distance) in [(1000, 1), (1000, 999), (9 * UNIT, 1), (9 * UNIT, UNIT), (20 * UNIT, far), (17, 4)] {
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
                assert!(got == model, "{}: {len} bytes, {distance} apart, forward: {forward}", world.name);
            }
        }
        world.assert_empty("copies");
    }
}

pub(crate) fn exact_shrinks_give_every_granule_back_and_keep_the_contents() {
    let mut seen = 0;
    for world in worlds().into_iter().filter(World::has_a_ladder) {
        let name = &world.name;
        let mut buffer = world.buffer();
        buffer.grow_to(60 * UNIT).unwrap();
        stamp(&mut buffer, 1);
        shrink(&mut buffer, 41 * UNIT);
        let before = look(&buffer);
        assert_eq!(before.committed, units(44), "{name}");
        let shrunk = buffer.shrink_exact(41 * UNIT, Quiesce::Device).unwrap();
        assert_eq!((shrunk.released, shrunk.committed), (units(2), units(42)), "{name}: a chunk of four units is cut");
        assert_eq!(buffer.len(), 41 * UNIT, "{name}");
        let exact = Look { committed: units(42), ..before };
        assert_eq!(look(&buffer), exact, "{name}");
        buffer.grow_to(60 * UNIT).unwrap();
        shrink(&mut buffer, 41 * UNIT);
        assert_eq!(look(&buffer), exact, "{name}");
        // Without room for the copy the result says what stays.
        world.faults.arm(FaultPlan::every().of(Call::Create));
        buffer.shrink_to(36 * UNIT - 1, Quiesce::Device).unwrap();
        world.device.pool().trim(Bytes::ZERO);
        let shrunk = buffer.shrink_exact(33 * UNIT, Quiesce::Device).unwrap();
        world.faults.disarm();
        assert_eq!(shrunk.committed, units(36), "{name}");
        let why = shrunk.why.unwrap();
        assert!(why.starts_with(&format!("{} of the last chunk stay", units(2))), "{name}: {why}");
        drop(buffer);
        world.assert_empty("exact");
        seen += 1;
    }
    assert_eq!(seen > 0, crate::expects_a_ladder(), "whether any device has a ladder");
}

pub(crate) fn a_range_of_1100_chunks_maps_whole() {
    for world in large_worlds() {
        let len = 1100 * 2 * MIB;
        let sizing = Sizing::Uniform(Bytes::mib(2));
        let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(len).sizing(sizing).build().unwrap();
        buffer.grow_to(len).unwrap();
        assert_eq!(buffer.stats().chunks, 1100);
        for chunk in [0, 1, 549, 1099] {
            buffer.copy_in(chunk * 2 * MIB, &[chunk as u8 + 1]).unwrap();
        }
        for chunk in [0, 1, 549, 1099] {
            let mut byte = [0];
            buffer.copy_out(chunk * 2 * MIB, &mut byte).unwrap();
            assert_eq!(byte, [chunk as u8 + 1], "{}", world.name);
        }
        world.assert_balanced("1100 chunks");
        drop(buffer);
        world.assert_empty("1100 chunks");
    }
}

pub(crate) fn members_of_a_set_out_of_step() {
    for world in worlds() {
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
        if world.is_virtual() {
            assert_eq!(set.committed(), Bytes::ZERO, "{}", world.name);
        }
        drop(set);
        world.assert_empty("a set");
    }
}

pub(crate) fn leaked_memory_stays_and_is_not_counted_as_given_back() {
    for world in worlds() {
        let mut buffer = world.buffer();
        buffer.grow_to(5 * UNIT).unwrap();
        let (address, committed) = (buffer.device_ptr(), buffer.committed());
        if world.has_a_ladder() {
            assert_eq!(committed, units(6), "{}", world.name);
        }
        let leaked = buffer.leak();
        assert_eq!((leaked.device_ptr, leaked.len), (address, 5 * UNIT), "{}", world.name);
        assert_eq!(leaked.capacity as u64, committed.get(), "{}", world.name);
        let snapshot = world.device.snapshot();
        let held = if world.is_virtual() { snapshot.bytes_mapped } else { snapshot.bytes_contiguous };
        assert_eq!(held, committed, "{}", world.name);
        world.assert_balanced("leaked");
    }
}

pub(crate) fn copies_and_fills_on_a_stream() {
    for world in worlds() {
        let mut buffer = world.buffer();
        buffer.grow_zeroed(5 * UNIT, Some(RawStream::DEFAULT)).unwrap();
        let piece: Vec<u8> = (0..UNIT).map(|n| n as u8).collect();
        // SAFETY: the stream is waited for below, before the vectors go.
        unsafe { buffer.copy_in_on(UNIT, &piece, RawStream::DEFAULT) }.unwrap();
        buffer.copy_within_on(UNIT..2 * UNIT, 3 * UNIT, RawStream::DEFAULT).unwrap();
        buffer.fill_bytes_on(0..UNIT, 7, RawStream::DEFAULT).unwrap();
        let mut all = vec![1; 5 * UNIT];
        // SAFETY: as above.
        unsafe { buffer.copy_out_on(0, &mut all, RawStream::DEFAULT) }.unwrap();
        world.device.synchronize().unwrap();
        let zeros = vec![0; UNIT];
        let expected = [&vec![7; UNIT], &piece, &zeros, &piece, &zeros].map(Vec::as_slice).concat();
        assert!(all == expected, "{}", world.name);
        let overlap = buffer.copy_within_on(0..100, 50, RawStream::DEFAULT);
        assert!(matches!(overlap, Err(Error::Overlap { start: 0, to: 50, count: 100 })));
        let beyond = buffer.fill_bytes_on(0..5 * UNIT + 1, 0, RawStream::DEFAULT);
        assert!(matches!(beyond, Err(Error::OutOfBounds { .. })));
        drop(buffer);
        world.assert_empty("on a stream");
    }
}

#[derive(Default)]
struct Count {
    mapped: AtomicUsize,
    unmapped: AtomicUsize,
}

impl MapHooks for Count {
    fn mapped(&self, chunk: MappedChunk) {
        assert_ne!(chunk.address, 0);
        self.mapped.fetch_add(chunk.bytes.get() as usize, Ordering::Relaxed);
    }

    fn unmapping(&self, chunk: MappedChunk) {
        self.unmapped.fetch_add(chunk.bytes.get() as usize, Ordering::Relaxed);
    }
}

pub(crate) fn hooks_are_told_of_every_chunk() {
    for world in worlds().into_iter().filter(World::is_virtual) {
        let count = Arc::new(Count::default());
        let mut buffer = GrowableBuffer::<u8>::builder(&world.device)
            .max_len(64 * UNIT)
            .hooks(Arc::clone(&count) as Arc<dyn MapHooks>)
            .build()
            .unwrap();
        let told = || (count.mapped.load(Ordering::Relaxed), count.unmapped.load(Ordering::Relaxed));
        let check = |buffer: &GrowableBuffer<u8>| {
            world.settle();
            let ((mapped, unmapped), stats) = (told(), buffer.stats());
            // Where mapping has two phases, what is ahead is not mapped yet.
            let beside = world.device.verdict().quirks().map_beside_kernels;
            let ahead = if beside { stats.bytes_ahead.get() as usize } else { 0 };
            assert_eq!(mapped - unmapped, stats.bytes_committed.get() as usize + ahead, "{}", world.name);
            (mapped, unmapped)
        };
        buffer.grow_to(50 * UNIT).unwrap();
        let (first, none) = check(&buffer);
        assert_eq!(none, 0, "{}", world.name);
        buffer.shrink_to(30 * UNIT, Quiesce::Device).unwrap();
        let (still, gone) = check(&buffer);
        assert!(still == first && gone <= first, "{}", world.name);
        buffer.shrink_exact(27 * UNIT, Quiesce::Device).unwrap();
        check(&buffer);
        buffer.close().unwrap();
        let (mapped, unmapped) = told();
        assert_eq!(mapped, unmapped, "{}", world.name);
    }
}
