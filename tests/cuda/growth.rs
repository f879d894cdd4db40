//! Growing and shrinking on the card: what comes back, and kernels meanwhile.

use std::time::Instant;

use growspan::driver::{ChunkProps, Shareable};
use growspan::{AheadPolicy, BufferSet, Bytes, Device, DeviceOptions, GrowableBuffer, Mode, Quiesce};

use crate::GRANULE;
use crate::gpu::{Cell, Stream, gpu, value};
use crate::world::{Dice, MIB};

const GIB: usize = 1 << 30;

fn free(device: &Device) -> i64 {
    device.memory().unwrap().free.cast_signed()
}

/// Free memory once it is within `slack` of what it was, or after three seconds.
fn free_again(device: &Device, before: i64, slack: i64) -> i64 {
    let started = Instant::now();
    let mut after = free(device);
    while (after - before).abs() > slack && started.elapsed().as_secs() < 3 {
        std::thread::sleep(core::time::Duration::from_millis(1));
        after = free(device);
    }
    println!("free memory was asked for {:?} after everything was given back", started.elapsed());
    after
}

pub(crate) fn the_card_gets_virtual_memory() {
    let _ = gpu();
    let device = DeviceOptions::new().cuda(0).unwrap();
    println!("{:?}\n{}", device.info(), device.verdict().report());
    assert_eq!(device.verdict().mode(), Mode::Virtual, "{:?}", device.verdict().reason());
    assert_eq!(device.verdict().granularity(), Bytes::mib(2));
    println!("{}", device.snapshot());
}

/// Each property is tried with a chunk of its own; what works is kept, what does not is left out with its reason.
pub(crate) fn properties_are_tried_one_by_one() {
    let _ = gpu();
    let device = DeviceOptions::new().cuda(0).unwrap();
    for wanted in [
        ChunkProps::PLAIN.with_rdma(true),
        ChunkProps::PLAIN.with_shareable(Shareable::PosixFd),
        ChunkProps::PLAIN.with_shareable(Shareable::Fabric),
        ChunkProps::PLAIN.with_rdma(true).with_shareable(Shareable::PosixFd),
        ChunkProps::PLAIN.with_rdma(true).with_shareable(Shareable::Fabric),
    ] {
        let pool = device.new_pool(wanted, Bytes::ZERO);
        println!("{wanted:?}: {:?}, left out {:?}", pool.props(), pool.left_out());
        assert!(pool.left_out().iter().all(|(_, why)| !why.is_empty()));
        let lost =
            usize::from(wanted.rdma && !pool.props().rdma) + usize::from(wanted.shareable != pool.props().shareable);
        assert_eq!(pool.left_out().len(), lost);
        // Whatever is left is good memory.
        let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).pool(&pool).build().unwrap();
        buffer.append(&[7; 3 * MIB]).unwrap();
        let mut last = [0];
        buffer.copy_out(3 * MIB - 1, &mut last).unwrap();
        assert_eq!(last, [7]);
        buffer.close().unwrap();
    }
    assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
}

pub(crate) fn a_thousand_cycles_give_everything_back() {
    let _ = gpu();
    for (name, options, cycles) in [
        ("with a pool", DeviceOptions::new(), 1000),
        ("without a pool", DeviceOptions::new().pool_keep(Bytes::ZERO), 200),
    ] {
        let device = options.cuda(0).unwrap();
        let max_len = 4 * GIB;
        let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(max_len).build().unwrap();
        let address = buffer.device_ptr();
        // Page tables, and whatever else the driver keeps once it has it.
        buffer.grow_to(max_len).unwrap();
        buffer.shrink_to(0, Quiesce::Device).unwrap();
        device.pool().trim(Bytes::ZERO);
        device.synchronize().unwrap();

        let before = free(&device);
        let started = Instant::now();
        let (mut dice, mut grown, mut largest) = (Dice(7), 0_usize, 0);
        for cycle in 0..cycles {
            // Sizes of every order of magnitude, up to 4 GiB.
            let len = (dice.roll(1 << 30) << 2 >> dice.roll(20)).max(1);
            largest = largest.max(len);
            buffer.grow_to(len).unwrap();
            let end = buffer.len();
            grown += len;
            assert_eq!(buffer.device_ptr(), address);
            if cycle % 10 == 0 {
                buffer.copy_in(end - 1, &[cycle as u8]).unwrap();
                let mut byte = [0];
                buffer.copy_out(end - 1, &mut byte).unwrap();
                assert_eq!(byte, [cycle as u8], "{name}, cycle {cycle}, {end} bytes");
            }
            let to = if cycle % 3 == 0 { 0 } else { dice.roll(end + 1) };
            buffer.shrink_to(to, Quiesce::Device).unwrap();
        }
        let took = started.elapsed();
        buffer.shrink_to(0, Quiesce::Device).unwrap();
        let kept = device.pool().kept();
        let trimmed = device.pool().trim(Bytes::ZERO);
        assert!(trimmed.error.is_none(), "{trimmed:?}");
        let after = free_again(&device, before, GRANULE as i64);
        println!(
            "{name}: {cycles} cycles in {took:?}, {} asked for, {} at most, {kept} in the pool at the end; {} bytes of \
             free memory more than before",
            Bytes::new(grown as u64),
            Bytes::new(largest as u64),
            after - before
        );
        assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
        assert!((after - before).abs() <= GRANULE as i64, "{name}: {before} bytes were free, and {after} are now");
        buffer.close().unwrap();
    }
}

/// A second device over the card gets what the first keeps: its pool, and what it has mapped ahead.
pub(crate) fn two_devices_of_one_card_give_way_to_each_other() {
    let _ = gpu();
    let all = DeviceOptions::new().pool_keep(Bytes::gib(1024));
    let (one, other) = (all.clone().cuda(0).unwrap(), all.cuda(0).unwrap());
    let most = (free(&one) as usize - 2 * GIB) / GIB * GIB;
    let buffer = |device: &Device| GrowableBuffer::<u8>::builder(device).max_len(2 * most).build().unwrap();
    let (mut first, mut second) = (buffer(&one), buffer(&other));
    for _ in 0..2 {
        first.grow_to(most / 2).unwrap();
        first.shrink_to(MIB, Quiesce::Device).unwrap();
        first.grow_ahead(AheadPolicy::Bytes(Bytes::new(most as u64 / 4))).unwrap();
        first.grow_to(2 * MIB).unwrap();
        one.wait_ahead();
        let held = one.snapshot().bytes_held();
        assert!(held >= Bytes::new(most as u64 / 4), "{held}");
        second.grow_to(most - 2 * GIB).unwrap();
        println!("{held} were kept, {} are, of {}", one.snapshot().bytes_held(), Bytes::new(most as u64));
        assert!(one.snapshot().bytes_held() < Bytes::gib(1));
        second.shrink_to(0, Quiesce::Device).unwrap();
        assert_eq!(first.len(), 2 * MIB);
    }
    first.close().unwrap();
    second.close().unwrap();
}

/// Each step queues kernels over all that is mapped and grows on while they run.
pub(crate) fn kernels_write_and_read_across_chunks_while_a_buffer_grows() {
    let gpu = gpu();
    let device = DeviceOptions::new().cuda(0).unwrap();
    let mut buffer = GrowableBuffer::<u32>::builder(&device).max_len(GIB).build().unwrap();
    let (stream, bad) = (Stream::new(), Cell::new());
    let started = Instant::now();
    let (mut step, mut busy) = (0_u32, 0);
    // Steps of an odd number of words, so that ends fall anywhere in a chunk.
    while buffer.len() + 10_000_019 <= buffer.max_len() {
        busy += u32::from(step > 0 && stream.is_busy());
        buffer.grow_by(10_000_019).unwrap();
        step += 1;
        gpu.stamp(&stream, buffer.device_ptr(), buffer.len(), step);
        gpu.check(&stream, buffer.device_ptr(), buffer.len(), step, &bad);
    }
    stream.wait();
    println!(
        "{step} growths to {} in {} chunks, {busy} of them with kernels running, {:?}",
        buffer.committed(),
        buffer.chunks().len(),
        started.elapsed()
    );
    bad.assert_none_bad("kernels over a growing buffer");
    // The host sees the same on both sides of every border.
    let chunks = buffer.chunks();
    let borders = chunks.iter().skip(1).map(|chunk| (chunk.address - buffer.device_ptr()) as usize / 4);
    for border in borders.filter(|border| border + 2 <= buffer.len()) {
        let mut words = [0; 4];
        buffer.copy_out(border - 2, &mut words).unwrap();
        assert_eq!(words, [border - 2, border - 1, border, border + 1].map(|n| value(n, step)), "at word {border}");
    }
    let mut last = [0];
    buffer.copy_out(buffer.len() - 1, &mut last).unwrap();
    assert_eq!(last, [value(buffer.len() - 1, step)]);
    assert!(busy > 0, "the kernels were over before the next growth, each time: nothing was tested");
    drop(bad);
    buffer.close().unwrap();
}

/// As an engine decodes: every step appends to each cache on a stream and reads all of it.
pub(crate) fn eight_caches_grow_by_small_steps_under_a_stream() {
    const ROW: usize = 128 << 10 >> 2;
    let gpu = gpu();
    let device = DeviceOptions::new().cuda(0).unwrap();
    let (stream, bad) = (Stream::new(), Cell::new());
    let mut set = BufferSet::new();
    let members: Vec<_> = (0..8)
        .map(|_| {
            let buffer = GrowableBuffer::<u32>::builder(&device).max_len(8192 * ROW).build().unwrap();
            set.add(buffer, ROW).unwrap()
        })
        .collect();
    let started = Instant::now();
    let mut slowest = core::time::Duration::ZERO;
    let mut decode = |set: &mut BufferSet, steps: usize| {
        for _ in 0..steps {
            let old = set.rows();
            let grow = Instant::now();
            set.grow_by(1).unwrap();
            slowest = slowest.max(grow.elapsed());
            for (n, member) in members.iter().enumerate() {
                let cache = set.get(*member).unwrap();
                // A row's values are those of a buffer that begins with it, with a seed of its own.
                let row = cache.device_ptr() + (old * ROW * 4) as u64;
                gpu.stamp(&stream, row, ROW, (n * 100_000 + old) as u32);
                // An earlier row, borders between chunks included, is still what it was.
                let earlier = (old * 7919 + n) % (old + 1);
                let row = cache.device_ptr() + (earlier * ROW * 4) as u64;
                gpu.check(&stream, row, ROW, (n * 100_000 + earlier) as u32, &bad);
            }
        }
    };
    decode(&mut set, 1000);
    set.shrink_to(300, &Quiesce::Stream(stream.for_growspan())).unwrap();
    println!("after the shrink: {}", device.snapshot());
    decode(&mut set, 300);
    let took = started.elapsed();
    for (n, member) in members.iter().enumerate() {
        for row in 0..set.rows() {
            let address = set.get(*member).unwrap().device_ptr() + (row * ROW * 4) as u64;
            gpu.check(&stream, address, ROW, (n * 100_000 + row) as u32, &bad);
        }
    }
    stream.wait();
    println!("1,300 steps of 8 x 128 KiB in {took:?}, the slowest growth {slowest:?}: {}", device.snapshot());
    bad.assert_none_bad("caches");
    assert_eq!(set.rows(), 600);
    drop(set);
    device.pool().trim(Bytes::ZERO);
    assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
}

pub(crate) fn all_but_one_gibibyte_and_back() {
    let _ = gpu();
    let device = DeviceOptions::new().cuda(0).unwrap();
    assert_eq!(device.verdict().mode(), Mode::Virtual);
    let before = free(&device);
    let len = (before as usize - GIB) / GRANULE * GRANULE;
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(len).build().unwrap();
    for round in 0..2_u8 {
        let started = Instant::now();
        for eighth in 1..=8 {
            buffer.grow_to(len / 8 * eighth).unwrap();
        }
        buffer.grow_to(len).unwrap();
        let grown = started.elapsed();
        assert_eq!(buffer.committed().get(), len as u64, "the ladder ends where the span does");
        let left = free(&device);
        let places: Vec<_> = (0..len).step_by(GIB).chain([len - 1]).collect();
        for (n, place) in places.iter().enumerate() {
            buffer.copy_in(*place, &[n as u8 ^ round]).unwrap();
        }
        for (n, place) in places.iter().enumerate() {
            let mut byte = [0];
            buffer.copy_out(*place, &mut byte).unwrap();
            assert_eq!(byte, [n as u8 ^ round], "at byte {place}");
        }
        let started = Instant::now();
        buffer.shrink_to(0, Quiesce::Device).unwrap();
        device.pool().trim(Bytes::ZERO);
        let shrunk = started.elapsed();
        let after = free_again(&device, before, crate::SLACK);
        println!(
            "{} of {} MiB in {grown:?}, {} MiB left free; given back in {shrunk:?}, {} bytes more free than before",
            buffer.stats().bytes_reserved,
            before as usize / MIB,
            left as usize / MIB,
            after - before
        );
        assert!((after - before).abs() <= crate::SLACK, "{before} bytes were free, and {after} are now");
    }
    buffer.close().unwrap();
    assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
}
