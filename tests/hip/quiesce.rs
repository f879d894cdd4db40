//! Promise 3: nothing is unmapped under queued work. The stand-in performs work only when it is waited for, and ends the
//! process if memory goes that queued work is about.

use growspan::{Bytes, DeviceOptions, Granularity, GrowableBuffer, Quiesce};

use crate::child::Child;
use crate::stand_in::Stream;
use crate::world::MIB;
use crate::{personalities, worlds};

pub(crate) fn as_child(form: &str) {
    let device = DeviceOptions::new().granularity(Granularity::AtLeast2MiB).hip(0).unwrap();
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    let stream = Stream::new(0);
    buffer.grow_zeroed(32 * MIB, Some(stream.raw())).unwrap();
    // SAFETY: it is not idle, which is what the stand-in is to notice.
    let idle = unsafe { Quiesce::already_idle() };
    let shrunk = match form {
        "idle" => buffer.shrink_to(0, idle),
        _ => buffer.shrink_to(0, Quiesce::Stream(stream.raw())),
    };
    println!("{}", shrunk.unwrap());
}

/// So that the next test can fail.
#[test]
fn the_stand_in_notices() {
    Child::of("6.4.3").role_well("quiesce stream");
    let ended = Child::of("6.4.3").role("quiesce idle");
    assert!(!ended.status.unwrap().success() && ended.text.contains("misuse: hipMemUnmap"), "{}", ended.text);
}

pub(crate) fn nothing_is_unmapped_under_queued_work() {
    let _ = personalities::hip_options();
    for world in worlds() {
        let stream = Stream::new(world.device.info().ordinal.cast_signed());
        let event = world.device.event().unwrap();
        for form in ["device", "stream", "event", "deferred", "exact", "drop"] {
            let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * MIB).build().unwrap();
            buffer.grow_zeroed(33 * MIB, Some(stream.raw())).unwrap();
            event.record(stream.raw()).unwrap();
            let shrunk = match form {
                "device" => buffer.shrink_to(3, Quiesce::Device),
                "stream" => buffer.shrink_to(3, Quiesce::Stream(stream.raw())),
                "event" => buffer.shrink_to(3, Quiesce::Event(&event)),
                "deferred" => buffer.shrink_to(3, Quiesce::Deferred(&event)),
                "exact" => buffer.shrink_exact(17 * MIB, Quiesce::Device),
                // Waits by itself.
                _ => continue,
            };
            let shrunk = shrunk.unwrap();
            if world.is_virtual() {
                let (left, deferred) = (shrunk.retiring, form == "deferred");
                assert_eq!(!left.is_zero(), deferred, "{} {form}: {shrunk}", world.name);
            }
            event.wait().unwrap();
            world.device.drain();
            assert_eq!(world.device.snapshot().bytes_retiring, Bytes::ZERO, "{} {form}", world.name);
            buffer.close().unwrap();
        }
        drop(event);
        world.device.synchronize().unwrap();
        drop(stream);
        world.assert_gone("the end");
    }
}
