//! Plans, struck and pretended, on the simulated driver.

use super::*;
use crate::driver::sim::SimDriver;

const CHUNK: u64 = 2 << 20;

fn wrap(plan: FaultPlan) -> (SimDriver, Faulty, FaultControl) {
    let sim = SimDriver::new();
    let faulty = Faulty::new(sim.driver(), plan);
    let control = faulty.control();
    (sim, faulty, control)
}

fn create(driver: &dyn Driver) -> Result<RawHandle, DriverErrorKind> {
    driver.create(CHUNK, ChunkProps::PLAIN).map_err(|error| error.kind())
}

fn release(driver: &dyn Driver, handle: RawHandle) -> Result<(), DriverErrorKind> {
    // SAFETY: simulated handles are checked and lead nowhere.
    unsafe { driver.release(handle) }.map_err(|error| error.kind())
}

#[test]
fn every_kind_of_plan_strikes_where_it_says() {
    for (plan, struck) in [
        (FaultPlan::count(), vec![]),
        (FaultPlan::nth(1), vec![1]),
        (FaultPlan::nth(4), vec![4]),
        (FaultPlan::nth(0), vec![]),
        (FaultPlan::after(3), vec![4, 5, 6]),
        (FaultPlan::after(u64::MAX), vec![]),
        (FaultPlan::every(), vec![1, 2, 3, 4, 5, 6]),
        (FaultPlan::list([2, 6, 9]), vec![2, 6]),
    ] {
        let (sim, faulty, control) = wrap(plan.clone());
        for number in 1..=6_u64 {
            assert_eq!(create(&faulty).is_err(), struck.contains(&number), "{plan:?}, call {number}");
        }
        assert_eq!(control.counted(), 6);
        assert_eq!(control.struck(), !struck.is_empty());
        assert_eq!(control.strikes().iter().map(|strike| strike.number).collect::<Vec<_>>(), struck);
        // A struck call never reaches the driver.
        assert_eq!(sim.calls(), 6 - struck.len() as u64);
    }
}

#[test]
fn only_the_calls_meant_count() {
    let (_, faulty, control) = wrap(FaultPlan::nth(2).of(Call::Memory).of(Call::Granularity));
    create(&faulty).unwrap();
    faulty.memory().unwrap();
    create(&faulty).unwrap();
    assert_eq!(faulty.granularity().unwrap_err().kind(), DriverErrorKind::Other);
    assert_eq!(control.counted(), 2);

    control.arm(FaultPlan::nth(2).of_memory());
    faulty.memory().unwrap();
    let handle = create(&faulty).unwrap();
    assert_eq!(release(&faulty, handle), Err(DriverErrorKind::Other));
    assert_eq!(control.strikes(), [Strike { number: 2, call: Call::Release, pretended: false }]);
    release(&faulty, handle).unwrap();
    assert_eq!(control.counted(), 3);
}

#[test]
fn errors_are_the_usual_ones_unless_chosen() {
    let (_, faulty, control) = wrap(FaultPlan::every());
    assert_eq!(create(&faulty), Err(DriverErrorKind::OutOfMemory));
    assert_eq!(faulty.allocate(1).unwrap_err().kind(), DriverErrorKind::OutOfMemory);
    assert_eq!(faulty.reserve(CHUNK, CHUNK).unwrap_err().kind(), DriverErrorKind::Other);
    control.arm(FaultPlan::every().kind(DriverErrorKind::DeviceLost));
    assert_eq!(create(&faulty), Err(DriverErrorKind::DeviceLost));
    let error = faulty.synchronize().unwrap_err();
    assert_eq!(error.call(), Call::Synchronize);
    assert!(error.to_string().ends_with("struck by plan, as number 2"), "{error}");
}

#[test]
fn arming_counts_anew_and_disarming_keeps_the_tally() {
    let (_, faulty, control) = wrap(FaultPlan::count());
    faulty.memory().unwrap();
    control.arm(FaultPlan::nth(1));
    assert_eq!((control.counted(), control.struck()), (0, false));
    faulty.memory().unwrap_err();
    control.disarm();
    faulty.memory().unwrap();
    assert_eq!((control.counted(), control.struck()), (1, true));
}

#[test]
fn pretending_does_nothing_and_says_it_did() {
    let (sim, faulty, control) = wrap(FaultPlan::count());
    let handle = create(&faulty).unwrap();
    let block = faulty.allocate(8).unwrap();
    control.arm(FaultPlan::every().pretend());
    release(&faulty, handle).unwrap();
    let mut data = [1_u8; 8];
    // SAFETY: `data` has eight bytes.
    unsafe { faulty.copy_out(data.as_mut_ptr(), block, 8, None).unwrap() };
    assert_eq!(data, [0; 8]);
    // SAFETY: nothing is mapped there, and the simulated driver would say so.
    unsafe { faulty.map(block, CHUNK, handle).unwrap() };
    faulty.support().unwrap();
    assert_eq!((sim.count(Call::Release), sim.count(Call::CopyOut), sim.count(Call::Map)), (0, 0, 0));
    assert!(control.strikes().iter().all(|strike| strike.pretended));

    // What returns something, or waits, fails instead.
    assert_eq!(create(&faulty), Err(DriverErrorKind::OutOfMemory));
    faulty.reserve(CHUNK, CHUNK).unwrap_err();
    faulty.synchronize().unwrap_err();
    assert!(!control.strikes().iter().any(|it| it.pretended && it.call == Call::Synchronize));
    control.disarm();
    assert_eq!(sim.figures().handles, 1);
    release(&faulty, handle).unwrap();
}

#[test]
fn mapping_is_not_pretended_where_the_host_looks() {
    for call in [Call::Map, Call::SetAccess] {
        assert!(can_pretend(call, false));
        assert!(!can_pretend(call, true));
    }
    assert!(can_pretend(Call::Release, true));
    for call in [Call::Create, Call::Synchronize, Call::SynchronizeStream, Call::EventWait, Call::EventRecord] {
        assert!(!can_pretend(call, false));
    }
}

#[test]
fn everything_else_goes_through() {
    let (sim, faulty, _) = wrap(FaultPlan::count());
    assert_eq!(faulty.info().id(), sim.info().id());
    assert!(faulty.limits().is_some());
    let stream = sim.stream();
    sim.capture(stream, true);
    // SAFETY: the stream is the simulated driver's.
    assert!(unsafe { faulty.stream_is_capturing(stream) }.unwrap());
    // SAFETY: no handle is needed to be told that exports are not supported.
    let exported = unsafe { faulty.export(RawHandle(1)) };
    assert_eq!(exported.unwrap_err().kind(), DriverErrorKind::NotSupported);
}
