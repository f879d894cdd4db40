//! Several devices over one card: what one of them keeps and does not use gives way when another is short.

use growspan::driver::sim::{SimDriver, SimOptions};
use growspan::{AheadPolicy, Bytes, Device, DeviceOptions, Error, GrowableBuffer, Quiesce};

use crate::world::MIB;

const ALL: usize = 256 * MIB;

fn card() -> SimOptions {
    SimDriver::builder().total(Bytes::new(ALL as u64))
}

fn device(sim: &SimDriver) -> Device {
    let device = DeviceOptions::new().pool_keep(Bytes::new(ALL as u64)).open(sim.driver()).unwrap();
    device.verdict();
    device.pool().trim(Bytes::ZERO);
    device
}

fn buffer(device: &Device) -> GrowableBuffer<u8> {
    GrowableBuffer::builder(device).max_len(ALL).build().unwrap()
}

/// Lets a device keep all of a card in its pool.
fn hoard(device: &Device) {
    let mut hoarder = buffer(device);
    hoarder.grow_to(ALL).unwrap();
    hoarder.shrink_to(0, Quiesce::Device).unwrap();
    hoarder.close().unwrap();
    assert_eq!(device.snapshot().bytes_pooled, Bytes::new(ALL as u64));
}

#[test]
fn a_pool_gives_way_to_another_device_of_the_card() {
    let sim = card().build();
    let (one, other) = (device(&sim), device(&sim));
    hoard(&one);
    let mut needy = buffer(&other);
    needy.grow_to(ALL).unwrap();
    assert_eq!(one.snapshot().bytes_held(), Bytes::ZERO);
    // A contiguous block too.
    needy.close().unwrap();
    other.pool().trim(Bytes::ZERO);
    hoard(&one);
    let contiguous = DeviceOptions::new().contiguous(true).open(sim.driver()).unwrap();
    let mut needy = buffer(&contiguous);
    needy.grow_to(ALL / 2).unwrap();
    drop((needy, one, other, contiguous));
    sim.assert_clean();
}

#[test]
fn what_is_mapped_ahead_gives_way_to_another_device_of_the_card() {
    let sim = card().build();
    let (one, other) = (device(&sim), device(&sim));
    let mut eager = buffer(&one);
    eager.grow_ahead(AheadPolicy::Bytes(Bytes::new(ALL as u64))).unwrap();
    eager.grow_to(MIB).unwrap();
    one.wait_ahead();
    let ahead = eager.stats().bytes_ahead;
    assert!(ahead >= Bytes::new((ALL - 4 * MIB) as u64), "{ahead}");
    let mut needy = buffer(&other);
    needy.grow_to(ALL - 16 * MIB).unwrap();
    assert_eq!(eager.len(), MIB);
    let error = needy.grow_to(ALL).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
    drop((eager, needy, one, other));
    sim.assert_clean();
}

#[test]
fn another_card_gives_nothing() {
    let (sim, another) = (card().build(), card().build());
    let (one, other) = (device(&sim), device(&another));
    hoard(&one);
    let mut greedy = GrowableBuffer::<u8>::builder(&other).max_len(2 * ALL).build().unwrap();
    assert!(matches!(greedy.grow_to(2 * ALL), Err(Error::OutOfMemory(_))));
    assert_eq!(one.snapshot().bytes_pooled, Bytes::new(ALL as u64));
    drop((greedy, one, other));
    sim.assert_clean();
    another.assert_clean();
}
