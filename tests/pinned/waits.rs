//! Nothing is unlocked under work: the simulated device keeps copies and kernels pending until it is waited for.

use std::sync::Arc;

use growspan::driver::sim::{SimDriver, SimOptions, ViolationKind};
use growspan::pinned::{PinStrategy, PinnedBuffer};
use growspan::{Device, Error, GrowableBuffer, Quiesce};

use crate::{MIB, small_pieces};

/// A card on which copies on streams wait to be waited for.
fn card() -> (SimDriver, Device) {
    let sim = SimOptions::new().queue_copies(true).build();
    let device = Device::from_driver(Arc::new(sim.clone())).unwrap();
    (sim, device)
}

#[test]
fn dropping_and_shrinking_wait_for_copies_and_kernels() {
    for strategy in [PinStrategy::Pieces, PinStrategy::Driver] {
        for form in ["drop", "close", "shrink", "event", "deferred", "stream"] {
            let (sim, device) = card();
            let mut there = GrowableBuffer::<u8>::builder(&device).max_len(4 * MIB).build().unwrap();
            there.grow_to(4 * MIB).unwrap();
            let builder = PinnedBuffer::<u8>::builder(&device).max_len(4 * MIB).strategy(strategy);
            let mut buffer = builder.build().unwrap();
            buffer.grow_to(4 * MIB).unwrap();
            buffer.fill(6);
            let stream = sim.stream();
            // SAFETY: the buffer stays alive and unchanged until the stream was waited for, which is what is tested.
            unsafe { there.copy_in_on(0, &buffer, stream) }.unwrap();
            sim.queue_work(stream, buffer.device_ptr().unwrap(), 4096);
            let event = device.event().unwrap();
            event.record(stream).unwrap();
            match form {
                "drop" => drop(buffer),
                "close" => buffer.close().unwrap(),
                "shrink" => buffer.shrink_to(0, Quiesce::Device).unwrap(),
                "event" => buffer.shrink_to(0, Quiesce::Event(&event)).unwrap(),
                "deferred" => buffer.shrink_to(0, Quiesce::Deferred(&event)).unwrap(),
                _ => buffer.shrink_exact(5, Quiesce::Stream(stream)).unwrap(),
            }
            assert!(!sim.is_lost() && sim.violations().is_empty(), "{form}: {:?}", sim.violations());
            device.synchronize().unwrap();
            let mut back = vec![0; 4 * MIB];
            there.copy_out(0, &mut back).unwrap();
            assert!(back.iter().all(|byte| *byte == 6), "{form}");
        }
    }
}

/// So that the test above can fail.
#[test]
fn the_simulated_device_notices_who_does_not_wait() {
    for kernel in [false, true] {
        let (sim, device) = card();
        let mut there = GrowableBuffer::<u8>::builder(&device).max_len(MIB).build().unwrap();
        there.grow_to(MIB).unwrap();
        let mut buffer = small_pieces::<u8>(&device, MIB);
        buffer.grow_to(MIB).unwrap();
        let stream = sim.stream();
        if kernel {
            sim.queue_work(stream, buffer.device_ptr().unwrap() + 4096, 1);
        } else {
            // SAFETY: the copy is never done: the device is lost first, as is to be seen.
            unsafe { there.copy_in_on(0, &buffer, stream) }.unwrap();
        }
        // SAFETY: it is not idle, which the device is to notice.
        buffer.shrink_to(0, unsafe { Quiesce::already_idle() }).unwrap();
        assert_eq!(sim.violations()[0].kind, ViolationKind::UnderRunningWork);
        assert!(sim.is_lost());
    }
}

#[test]
fn nothing_is_locked_or_unlocked_while_a_graph_is_captured() {
    let (sim, device) = card();
    let mut buffer = small_pieces::<u8>(&device, 4 * MIB);
    buffer.grow_to(2 * MIB).unwrap();
    sim.capture(growspan::driver::RawStream::DEFAULT, true);
    assert!(matches!(buffer.grow_to(4 * MIB), Err(Error::Capturing { .. })));
    assert!(matches!(buffer.shrink_to(0, Quiesce::Device), Err(Error::Capturing { .. })));
    assert_eq!((buffer.len(), buffer.capacity()), (2 * MIB, 2 * MIB));
    sim.capture(growspan::driver::RawStream::DEFAULT, false);
    buffer.close().unwrap();
    sim.assert_clean();
}

/// What cannot be waited for now is kept, and goes when the device is next waited for.
#[test]
fn memory_whose_device_cannot_be_waited_for_goes_later() {
    use growspan::driver::fault::{FaultPlan, Faulty};

    let sim = SimDriver::new();
    let faulty = Faulty::new(sim.driver(), FaultPlan::count());
    let control = faulty.control();
    let device = Device::from_driver(Arc::new(faulty)).unwrap();
    let mut buffer = small_pieces::<u8>(&device, 4 * MIB);
    buffer.grow_to(4 * MIB).unwrap();
    control.arm(FaultPlan::every().of(growspan::driver::Call::Synchronize));
    assert!(matches!(buffer.close(), Err(Error::NotReturned { .. })));
    assert_eq!(sim.figures().pins, 2);
    control.disarm();
    device.synchronize().unwrap();
    sim.assert_clean();
}
