//! Promises that only the simulated driver or host memory can show.

use growspan::driver::RawStream;
use growspan::driver::sim::{SimDriver, ViolationKind};
use growspan::{BufferSet, Bytes, Device, DeviceOptions, Error, Fallback, GrowableBuffer, Quiesce, Result, Sizing};

use crate::drivers::card;
use crate::world::{MIB, UNIT, World, units};

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
