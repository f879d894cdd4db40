//! Page-locked memory on the stand-in, which refuses copies over borders and aborts at what must not be.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::*;
use crate::driver::DriverErrorKind as Kind;
use crate::driver::PinFlags;
use crate::driver::fault::{FaultPlan, Faulty};
use crate::pinned::{PinStrategy, PinnedBuffer};
use crate::{Device, Error, GrowableBuffer, Quiesce};

const MIB: usize = 1 << 20;

fn device(fake: &Fake) -> Device {
    Device::from_driver(Arc::new(fake.open(0))).unwrap()
}

fn flags_of(fake: &Fake, addr: u64) -> i32 {
    let ask = fake.control::<unsafe extern "C" fn(u64) -> i32>("fake_pin_flags");
    // SAFETY: it looks an address up.
    unsafe { ask(addr) }
}

#[test]
fn one_growth_is_one_piece_and_copies_are_cut_between_them() {
    let Some(fake) = Fake::new(&[]) else { return };
    let device = device(&fake);
    let alive = fake.alive();
    let mut pinned = PinnedBuffer::<u32>::builder(&device).max_len(8 * MIB).build().unwrap();
    let timing = pinned.grow_to(3 * MIB).unwrap();
    assert_eq!((timing.pieces, pinned.pieces().len()), (1, 1));
    pinned.grow_to(5 * MIB).unwrap();
    pinned.grow_to(6 * MIB).unwrap();
    let borders: Vec<_> = pinned.borders().map(|border| border.get() as usize / MIB).collect();
    assert_eq!(borders, [12, 20]);
    assert_eq!(flags_of(&fake, pinned.pieces()[1].host_ptr), 3);
    let host = pinned.as_ptr().addr() as u64;
    assert_eq!(pinned.device_ptr(), Some(host + (1 << 50)), "as the driver says");

    for (number, word) in pinned.iter_mut().enumerate() {
        *word = number as u32;
    }
    let mut there = GrowableBuffer::<u32>::builder(&device).max_len(8 * MIB).build().unwrap();
    there.append(&pinned).unwrap();
    let mut back = PinnedBuffer::<u32>::builder(&device).max_len(8 * MIB).piece(crate::Bytes::mib(2)).build().unwrap();
    back.grow_to(6 * MIB).unwrap();
    assert_eq!(back.pieces().len(), 12);
    there.copy_out(0, &mut back).unwrap();
    assert!(*back == *pinned);
    // By hand it fails, so that the above was not for nothing.
    let copy = fake.control::<unsafe extern "C" fn(u64, *const u8, usize, usize) -> u32>("cuMemcpyHtoDAsync_v2");
    // SAFETY: both sides have that much; the stand-in is to refuse it.
    let code = unsafe { copy(there.device_ptr(), pinned.as_ptr().cast(), 24 * MIB, 0) };
    assert_eq!(code, 1);

    pinned.shrink_to(5 * MIB - 1, Quiesce::Device).unwrap();
    assert_eq!((pinned.pieces().len(), pinned.capacity()), (2, 5 * MIB));
    pinned.shrink_exact(MIB, Quiesce::Device).unwrap();
    assert_eq!((pinned.pieces().len(), pinned.capacity(), pinned[MIB - 1]), (1, MIB, MIB as u32 - 1));
    drop((pinned, back));
    there.close().unwrap();
    device.pool().trim(crate::Bytes::ZERO);
    assert_eq!(fake.alive(), alive);
}

#[test]
fn flags_are_the_drivers_and_what_it_has_not_is_refused() {
    let Some(fake) = Fake::new(&[]) else { return };
    let device = device(&fake);
    let build = |strategy, flags| {
        let mut buffer =
            PinnedBuffer::<u8>::builder(&device).max_len(MIB).strategy(strategy).flags(flags).build().unwrap();
        buffer.grow_to(MIB).map(|_| buffer)
    };
    let (none, combined) = (PinFlags::NONE, PinFlags::USUAL.with_write_combined(true));
    let buffer = build(PinStrategy::Pieces, none).unwrap();
    assert_eq!((flags_of(&fake, buffer.as_ptr().addr() as u64), buffer.device_ptr()), (0, None));
    let buffer = build(PinStrategy::Driver, combined).unwrap();
    assert_eq!(flags_of(&fake, buffer.as_ptr().addr() as u64), 7);
    // This device does not have the attribute.
    let refused = build(PinStrategy::Pieces, PinFlags::NONE.with_read_only(true)).unwrap_err();
    assert!(matches!(&refused, Error::Driver(error) if error.kind() == Kind::NotSupported), "{refused}");
}

#[test]
fn an_error_in_piece_k_gives_back_the_others() {
    let Some(fake) = Fake::new(&[]) else { return };
    let faulty = Faulty::new(Arc::new(fake.open(0)), FaultPlan::count());
    let control = faulty.control();
    let device = Device::from_driver(Arc::new(faulty)).unwrap();
    let mut buffer =
        PinnedBuffer::<u8>::builder(&device).max_len(32 * MIB).piece(crate::Bytes::mib(2)).build().unwrap();
    buffer.grow_to(2 * MIB).unwrap();
    buffer.fill(7);
    let alive = fake.alive();
    let fail = fake.control::<unsafe extern "C" fn(i32)>("fake_fail_pin");
    for k in 1..=4 {
        // SAFETY: it sets a number.
        unsafe { fail(k) };
        let error = buffer.grow_to(10 * MIB).unwrap_err();
        assert!(error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
        assert_eq!((fake.alive(), buffer.len(), buffer.capacity()), (alive, 2 * MIB, 2 * MIB), "piece {k}");
    }
    for call in [Call::Pin, Call::PinnedDevicePtr] {
        for k in 1..=4 {
            control.arm(FaultPlan::nth(k).of(call));
            buffer.grow_to(10 * MIB).unwrap_err();
            assert!(control.struck());
            assert_eq!((fake.alive(), buffer.capacity(), buffer[2 * MIB - 1]), (alive, 2 * MIB, 7), "{call} {k}");
        }
    }
    control.disarm();
    let cancelled = buffer.grow_to_with(10 * MIB, |progress| match progress.phase {
        crate::pinned::PinPhase::Register if progress.done.get() >= 4 << 20 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    });
    assert!(matches!(cancelled, Err(Error::Cancelled { .. })));
    assert_eq!((fake.alive(), buffer.capacity()), (alive, 2 * MIB));
    buffer.grow_to(10 * MIB).unwrap();
    assert_eq!(buffer[2 * MIB - 1..2 * MIB + 1], [7, 0]);
}

#[test]
fn a_driver_without_these_functions_says_which() {
    let Some(fake) = Fake::new(&["-DNO_PIN"]) else { return };
    let device = device(&fake);
    let mut buffer = PinnedBuffer::<u8>::builder(&device).max_len(MIB).build().unwrap();
    let error = buffer.grow_to(1).unwrap_err().to_string();
    assert!(error.contains("cuMemHostRegister_v2") && error.starts_with("pin failed: not found"), "{error}");
    let mut buffer = PinnedBuffer::<u8>::builder(&device).max_len(MIB).strategy(PinStrategy::Driver).build().unwrap();
    let error = buffer.grow_to(1).unwrap_err().to_string();
    assert!(error.contains("cuMemHostAlloc"), "{error}");
}
