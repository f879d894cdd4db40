//! Promise 8 and 5 on the card: the caller's context stays current, whatever others do to ours.

use core::mem::ManuallyDrop;
use core::ptr::null_mut;
use std::cell::RefCell;
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use growspan::driver::RawStream;
use growspan::{AheadPolicy, Bytes, Device, DeviceOptions, Error, Fallback, GrowableBuffer, Quiesce};

use crate::child;
use crate::gpu::{Gpu, Handle, Stream, gpu};
use crate::world::{Dice, MIB, look, stamp};

/// A context that is not the device's primary one. Destroyed on drop, on the thread that made it.
struct Foreign<'a> {
    gpu: &'a Gpu,
    raw: Handle,
}

impl<'a> Foreign<'a> {
    /// Creates one, which makes it current.
    fn new(gpu: &'a Gpu) -> Self {
        let mut raw = null_mut();
        gpu.ok("create a context", unsafe { (gpu.cu.cuCtxCreate_v2)(&raw mut raw, 0, gpu.driver.raw_device()) });
        Self { gpu, raw }
    }
}

impl Drop for Foreign<'_> {
    fn drop(&mut self) {
        unsafe { (self.gpu.cu.cuCtxDestroy_v2)(self.raw) };
    }
}

/// Everything a buffer can do, with `current` current all the way.
fn use_all(device: &Device, gpu: &Gpu, current: Handle, what: &str) {
    let same = |when: &str| assert_eq!(gpu.current(), current, "{what}: after {when}");
    same("nothing");
    for fallback in [Fallback::Upfront, Fallback::MayMove] {
        let mut buffer = GrowableBuffer::<u8>::builder(device).max_len(256 * MIB).fallback(fallback).build().unwrap();
        same("building");
        buffer.grow_to(50 * MIB).unwrap();
        same("growing");
        buffer.grow_zeroed(80 * MIB, None).unwrap();
        same("growing zeroed");
        buffer.append(&[1, 2, 3]).unwrap();
        same("appending");
        stamp(&mut buffer, 3);
        same("copying in");
        let before = look(&buffer);
        same("copying out");
        buffer.copy_within(0..MIB, 40 * MIB).unwrap();
        same("copying within");
        buffer.fill(5 * MIB.., 9).unwrap();
        same("filling");
        stamp(&mut buffer, 3);
        assert_eq!(look(&buffer), before, "{what}");
        let event = device.event().unwrap();
        event.record(RawStream::DEFAULT).unwrap();
        event.wait().unwrap();
        assert!(event.is_reached().unwrap());
        same("an event");
        buffer.shrink_to(60 * MIB, Quiesce::Event(&event)).unwrap();
        drop(event);
        same("shrinking");
        buffer.shrink_exact(11 * MIB, Quiesce::Device).unwrap();
        same("shrinking exactly");
        assert!(matches!(buffer.grow_to(usize::MAX), Err(Error::BeyondMax { .. })));
        same("an error");
        buffer.close().unwrap();
        same("closing");
    }
    device.pool().trim(Bytes::ZERO);
    same("trimming");
    let _ = device.snapshot();
    same("a snapshot");
}

fn devices() -> Vec<Device> {
    let device = |contiguous| DeviceOptions::new().contiguous(contiguous).cuda(0).unwrap();
    vec![device(false), device(true)]
}

pub(crate) fn the_callers_context_stays_current() {
    let gpu = gpu();
    for device in devices() {
        std::thread::scope(|scope| {
            let device = &device;
            let worker = scope.spawn(move || {
                use_all(device, gpu, null_mut(), "no context");
                let foreign = Foreign::new(gpu);
                use_all(device, gpu, foreign.raw, "a foreign context");
                // A device opened and dropped under it leaves it alone too.
                let own = DeviceOptions::new().cuda(0).unwrap();
                let _ = own.verdict();
                drop(own);
                assert_eq!(gpu.current(), foreign.raw);
                drop(foreign);
                gpu.make_current(gpu.context);
                use_all(device, gpu, gpu.context, "the primary context");
            });
            worker.join().unwrap();
        });
        assert_eq!(gpu.current(), gpu.context);
    }
}

pub(crate) fn two_threads_with_contexts_of_their_own() {
    let gpu = gpu();
    for device in devices() {
        let started = Instant::now();
        std::thread::scope(|scope| {
            for (seed, own) in [(1_usize, false), (2, true)] {
                let device = &device;
                scope.spawn(move || {
                    let foreign = own.then(|| Foreign::new(gpu));
                    let current = foreign.as_ref().map_or(null_mut(), |foreign| foreign.raw);
                    let mut dice = Dice(seed as u64);
                    let mut buffer = GrowableBuffer::<u8>::builder(device).max_len(200 * MIB).build().unwrap();
                    for step in 0..60 {
                        buffer.grow_to(dice.roll(200 * MIB)).unwrap();
                        stamp(&mut buffer, seed * 1000 + step);
                        let before = look(&buffer);
                        let len = buffer.len();
                        buffer.grow_to((len + 7 * MIB).min(200 * MIB)).unwrap();
                        buffer.shrink_to(len, Quiesce::Device).unwrap();
                        let after = look(&buffer);
                        assert_eq!((after.len, after.contents), (before.len, before.contents), "{seed}, step {step}");
                        buffer.shrink_to(dice.roll(len + 1), Quiesce::Device).unwrap();
                        assert_eq!(gpu.current(), current, "{seed}, step {step}");
                    }
                    buffer.close().unwrap();
                });
            }
        });
        device.pool().trim(Bytes::ZERO);
        println!("{}: {:?}, {}", device.verdict().mode(), started.elapsed(), device.snapshot());
        assert_eq!(device.snapshot().bytes_held(), Bytes::ZERO);
    }
}

pub(crate) fn a_reset_by_other_code_is_an_error_everywhere() {
    child::run_well("reset");
    child::run_well("reset contiguous");
}

/// Other code of the process resets the device under live buffers.
pub(crate) fn reset_under_live_buffers(contiguous: bool) {
    let gpu = gpu();
    let device = DeviceOptions::new().contiguous(contiguous).cuda(0).unwrap();
    // The context that it was created in takes it along.
    let stream = ManuallyDrop::new(Stream::new());
    let builder = || GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB);
    let mut buffer = builder().fallback(Fallback::MayMove).build().unwrap();
    buffer.grow_to(20 * MIB).unwrap();
    let mut idle = builder().build().unwrap();
    idle.grow_to(5 * MIB).unwrap();
    idle.shrink_to(0, Quiesce::Device).unwrap();
    let event = device.event().unwrap();
    event.record(stream.for_growspan()).unwrap();
    device.synchronize().unwrap();

    let code = unsafe { (gpu.cu.cuDevicePrimaryCtxReset_v2)(gpu.driver.raw_device()) };
    println!("reset: {}", gpu.name(code));
    assert_eq!(code, 0);

    let results = [
        ("copy out", buffer.copy_out(0, &mut [0])),
        ("copy in", buffer.copy_in(0, &[0])),
        ("fill", buffer.fill(.., 1)),
        ("grow", buffer.grow_to(60 * MIB)),
        ("record", event.record(RawStream::DEFAULT)),
        ("query", event.is_reached().map(drop)),
        ("an event", device.event().map(drop)),
        ("synchronize", device.synchronize()),
        ("memory", device.memory().map(drop)),
        ("build", builder().build().map(drop)),
    ];
    for (call, result) in &results {
        println!("{call}: {result:?}");
    }
    println!("shrink: {:?}", buffer.shrink_to(0, Quiesce::Device));
    for (call, result) in results {
        assert!(matches!(result, Err(Error::DeviceLost(_))), "{call}");
    }
    println!("{}", device.snapshot());
    println!("closing: {:?}", idle.close());
    drop((buffer, event));
    device.pool().trim(Bytes::ZERO);
    drop(device);
    println!("everything dropped");
    // For whoever opens the device next there is a context again.
    let again = DeviceOptions::new().cuda(0).and_then(|device| {
        let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build()?;
        buffer.append(&[1, 2, 3])?;
        buffer.close()
    });
    println!("opened again: {again:?}");
}

pub(crate) fn a_process_may_end_with_live_buffers() {
    child::run_well("exit");
}

/// Live buffers in a static, in a thread that has ended and in the one that ends with the process.
pub(crate) fn leave_live_buffers() {
    static LIVE: OnceLock<Mutex<Vec<GrowableBuffer<u8>>>> = OnceLock::new();
    thread_local! {
        static MINE: RefCell<Option<GrowableBuffer<u8>>> = const { RefCell::new(None) };
    }
    let build = || {
        let mut buffer = GrowableBuffer::<u8>::builder(&Device::cuda(0).unwrap()).max_len(64 * MIB).build().unwrap();
        buffer.grow_to(5 * MIB).unwrap();
        buffer
    };
    LIVE.get_or_init(Mutex::default).lock().unwrap().push(build());
    MINE.set(Some(build()));
    std::thread::spawn(move || MINE.set(Some(build()))).join().unwrap();
}

/// Whichever card's context is current, memory lands on the card asked for, by the caller and in the background.
pub(crate) fn two_cards_keep_their_memory_apart() {
    const SIZE: usize = 512 * MIB;
    let _ = gpu();
    let options = DeviceOptions::new().pool_keep(Bytes::ZERO);
    let devices = match options.clone().cuda(1) {
        Ok(second) => [options.cuda(0).unwrap(), second],
        Err(error) => return println!("skipped: {error}"),
    };
    let free = || devices.each_ref().map(|device| device.memory().unwrap().free);
    let ahead = AheadPolicy::Bytes(Bytes::new(SIZE as u64));
    let mut buffers = devices.each_ref().map(|device| {
        device.verdict();
        let mut buffer = GrowableBuffer::<u8>::builder(device).max_len(4 * SIZE).build().unwrap();
        // What the driver keeps once it has it.
        buffer.grow_to(SIZE).unwrap();
        buffer.shrink_to(0, Quiesce::Device).unwrap();
        buffer
    });
    for this in [0, 1, 0, 1] {
        let before = free();
        buffers[this].grow_ahead(ahead).unwrap();
        buffers[this].grow_to(SIZE).unwrap();
        stamp(&mut buffers[this], this);
        devices[this].wait_ahead();
        let after = free();
        let [taken, others] = [this, 1 - this].map(|card| before[card].saturating_sub(after[card]));
        println!("{} took {}, the other card {}", devices[this].info().id(), Bytes::new(taken), Bytes::new(others));
        assert!(taken >= 2 * SIZE as u64 && others < 4 * MIB as u64);
        let bytes = look(&buffers[this]);
        stamp(&mut buffers[this], this);
        assert!(look(&buffers[this]) == bytes);
        buffers[this].grow_ahead(AheadPolicy::Off).unwrap();
        buffers[this].shrink_to(0, Quiesce::Device).unwrap();
        let back = free()[this];
        assert!(back + 4 * MIB as u64 >= before[this], "{} of {}", Bytes::new(back), Bytes::new(before[this]));
    }
}
