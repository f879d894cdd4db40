//! The verdict: always one, always with a reason when it is off, whatever the driver does.

use core::time::Duration;
use std::sync::Arc;
use std::time::Instant;

use growspan::driver::fault::{FaultPlan, Faulty};
use growspan::driver::sim::{Personality, SimDriver};
use growspan::driver::{Call, CheckForm, DriverErrorKind};
use growspan::verdict::{Outcome, Step};
use growspan::{Bytes, DeviceOptions, Error, Fallback, Granularity, GrowableBuffer, Mode, Quiesce, Reason, Sizing};

use crate::drivers::personalities;
use crate::world::{MIB, World};

#[test]
fn each_personality_gets_its_verdict_and_its_reason() {
    for (personality, mode, text) in personalities() {
        let world = World::personality(personality, DeviceOptions::new().patience(Duration::from_millis(100)));
        let verdict = world.device.verdict();
        assert_eq!(verdict.mode(), mode, "{personality:?}: {}", verdict.report());
        assert_eq!(verdict.reason().is_some(), mode == Mode::Contiguous, "{personality:?}");
        if let Some(reason) = verdict.reason() {
            assert!(reason.to_string().contains(text), "{personality:?}: {reason}");
            assert!(reason.to_string().contains("sim driver"), "{personality:?} names its runtime: {reason}");
            assert!(verdict.report().to_string().contains(&reason.to_string()));
        }
        // Whatever the verdict, the crate runs on.
        let mut buffer = world.buffer();
        buffer.append(&[1, 2, 3]).unwrap();
        assert_eq!(buffer.mode(), mode);
        let shrunk = buffer.shrink_to(0, Quiesce::Device).unwrap();
        match mode {
            Mode::Virtual => assert_eq!(shrunk.committed, Bytes::ZERO),
            _ => assert!(shrunk.to_string().contains("nothing goes back to the driver"), "{shrunk}"),
        }
        buffer.close().unwrap();
        if let Some(sim) = &world.sim {
            sim.let_go();
        }
    }
}

#[test]
fn refusing_buffers_are_told_why() {
    let world = World::personality(Personality::VgpuNotSupported, DeviceOptions::new());
    let built = GrowableBuffer::<u8>::builder(&world.device).max_len(10).fallback(Fallback::Refuse).build();
    match built {
        Err(Error::Refused { device, reason: Reason::Call { step: Step::Create, error, .. } }) => {
            assert_eq!(device, "sim:0");
            assert_eq!(error.code(), Some(801));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(world.device.reserve(Bytes::mib(2)), Err(Error::Refused { .. })));
}

/// Every call of the check failing, in turn: a verdict with a reason each time, and nothing left behind.
#[test]
fn the_check_survives_any_failed_call_and_leaves_nothing() {
    for form in [CheckForm::Cheap, CheckForm::Full] {
        for kind in [DriverErrorKind::Other, DriverErrorKind::OutOfMemory, DriverErrorKind::NotSupported] {
            let mut k = 1;
            loop {
                let sim = SimDriver::builder().check(form).build();
                let faulty = Faulty::new(sim.driver(), FaultPlan::count());
                let faults = faulty.control();
                let device = DeviceOptions::new().pool_keep(Bytes::ZERO).open(Arc::new(faulty)).unwrap();
                faults.arm(FaultPlan::nth(k).kind(kind));
                let verdict = device.verdict();
                faults.disarm();
                if !faults.struck() {
                    assert_eq!(verdict.mode(), Mode::Virtual, "{form:?} takes {} calls", k - 1);
                    assert!(k > 15, "{form:?} makes {k} calls");
                    break;
                }
                // A smaller span or one chunk size per span are ways round a failure; all else decides.
                let strike = faults.strikes()[0].call;
                match verdict.mode() {
                    Mode::Virtual => {
                        let worked = |step| matches!(verdict.report().outcome(step), Some(Outcome::Worked(_)));
                        // With no memory for a third chunk, nothing is said of mixed sizes.
                        let untried = kind == DriverErrorKind::OutOfMemory
                            && strike == Call::Create
                            && verdict.report().outcome(Step::MixedSizes) == Some(&Outcome::Skipped);
                        let around = worked(Step::Reserve) || worked(Step::MixedSizes) || untried;
                        assert!(around, "{form:?}, call {k} ({strike})");
                    }
                    _ => assert!(verdict.reason().is_some()),
                }
                assert_eq!(sim.violations(), [], "{form:?}, call {k} ({strike})");
                // Also a failed call of giving back costs nothing: it is made again.
                sim.check_clean().unwrap_or_else(|left| panic!("{form:?}, call {k} ({strike}): {left}"));
                k += 1;
            }
        }
    }
}

/// The mutation that the check is there to catch: chunks that are kept.
#[test]
fn a_check_that_gets_nothing_back_turns_virtual_memory_off() {
    for host in [false, true] {
        let driver: Arc<dyn growspan::driver::Driver> = if host {
            let options = growspan::driver::host::HostOptions::default().with_capacity(Bytes::mib(512));
            Arc::new(growspan::driver::host::HostDriver::open(options).unwrap())
        } else {
            SimDriver::new().driver()
        };
        let plan = FaultPlan::every().of(Call::Release).pretend();
        let faulty = Faulty::new(driver, plan);
        let options = DeviceOptions::new().check(CheckForm::Full);
        let device = options.open(Arc::new(faulty)).unwrap();
        let word = if host { "memory" } else { "VRAM" };
        let text = format!("the free {word} fell by 32 MiB for 32 MiB mapped and rose by 0 MiB after its release");
        let reason = device.verdict().reason().unwrap().to_string();
        assert!(reason.starts_with(&text), "{reason}");
    }
}

#[test]
fn another_program_that_takes_memory_meanwhile_is_forgiven_once() {
    let sim = SimDriver::new();
    let faulty = Faulty::new(sim.driver(), FaultPlan::count());
    let faults = faulty.control();
    let device = DeviceOptions::new().pool_keep(Bytes::ZERO).open(Arc::new(faulty)).unwrap();
    // The first four releases do nothing: three of the first round, then one of the second, of which two remain.
    faults.arm(FaultPlan::list([1, 2, 3]).of(Call::Release).pretend());
    assert_eq!(device.verdict().mode(), Mode::Virtual, "{}", device.verdict().report());
    assert!(faults.struck());
}

#[test]
fn small_granularity_can_be_overruled_and_the_rest_decides() {
    let forced = DeviceOptions::new().granularity(Granularity::AtLeast2MiB);
    let world = World::personality(Personality::Granularity4K, forced);
    assert_eq!(world.device.verdict().mode(), Mode::Virtual);
    assert_eq!(world.device.verdict().granularity(), Bytes::mib(2));
    let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(64 * MIB).build().unwrap();
    buffer.grow_to(5 * MIB).unwrap();
    assert_eq!(buffer.committed(), Bytes::mib(6));
    drop(buffer);
    world.assert_empty("2 MiB forced");
}

/// The figures of the reference: a 31.86 GiB card whose runtime keeps an open file per chunk.
#[test]
fn open_files_decide_only_where_they_have_to() {
    let card = |soft, hard| {
        let files = Personality::OpenFilePerChunk { held: 12, soft, hard, as_out_of_memory: true };
        let options = SimDriver::builder().total(Bytes::mib(16_312 * 2)).runtime("HIP runtime 7.14.60850");
        options.open_files_by("ROCm").personality(files)
    };
    let uniform = DeviceOptions::new().sizing(Sizing::Uniform(Bytes::mib(2)));

    // Enough room up to the hard limit: the soft one is raised, to what the card may need.
    let world = World::sim(card(1024, 1 << 20), uniform.clone());
    assert!(world.is_virtual(), "{}", world.device.verdict().report());
    assert_eq!(world.device.snapshot().open_files.unwrap().limit, 17_336);

    // Not enough: off, with the figures.
    let world = World::sim(card(1024, 4096), uniform.clone());
    let reason = world.device.verdict().reason().unwrap().to_string();
    let text = "ROCm keeps an open file per 2 MiB chunk: 17336 needed, and the open-file limit is 4096 (hard 4096;";
    assert!(reason.starts_with(text), "{reason}");

    // The ladder needs so few that a hard limit of 1024 is no reason, and nothing is raised.
    let ladder = DeviceOptions::new().arena(Bytes::gib(24));
    let world = World::sim(card(1024, 1024), ladder);
    assert!(world.is_virtual(), "{}", world.device.verdict().report());
    assert_eq!(world.device.snapshot().open_files.unwrap().limit, 1024);

    // The same arena in 2 MiB chunks needs 12,288 and says so.
    let world = World::sim(card(1024, 1024), uniform.arena(Bytes::gib(24)));
    let reason = world.device.verdict().reason().unwrap().to_string();
    assert!(reason.contains("12288 of them for chunks"), "{reason}");
}

#[test]
fn a_device_that_wants_one_chunk_size_gets_one() {
    let world = World::personality(Personality::UniformChunksOnly, DeviceOptions::new());
    assert!(world.device.verdict().quirks().uniform_chunks_only);
    let mut buffer = GrowableBuffer::<u8>::builder(&world.device).max_len(2048 * MIB).build().unwrap();
    buffer.grow_to(100 * MIB).unwrap();
    let sizes: Vec<_> = buffer.chunks().iter().map(|chunk| chunk.bytes).collect();
    assert!(sizes.iter().all(|size| *size == Bytes::mib(8)), "{sizes:?}");
    let exact = buffer.shrink_exact(3 * MIB, Quiesce::Device).unwrap();
    assert!(exact.why.unwrap().contains("all chunks of this span have one size"));
    assert_eq!(exact.committed, Bytes::mib(8));
    drop(buffer);
    world.assert_empty("one chunk size");
}

#[test]
fn a_hanging_driver_does_not_hang_the_start() {
    let started = Instant::now();
    let world = World::personality(Personality::HangsInMap, DeviceOptions::new().patience(Duration::from_millis(50)));
    assert!(matches!(world.device.verdict().reason(), Some(Reason::Hang { step: Step::Map, .. })));
    assert!(started.elapsed() < Duration::from_secs(5));
    world.sim.unwrap().let_go();
}

#[test]
fn the_verdict_is_made_once() {
    let sim = SimDriver::new();
    let device = DeviceOptions::new().open(sim.driver()).unwrap();
    assert_eq!(sim.count(Call::Create), 0, "nothing is tried before it is asked for");
    let _ = device.verdict();
    let calls = sim.calls();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(device.clone().verdict().mode(), Mode::Virtual));
        }
    });
    assert_eq!(sim.calls(), calls);
}

#[test]
fn running_out_of_memory_is_not_a_verdict() {
    let world = World::sim(SimDriver::builder().total(Bytes::mib(256)), DeviceOptions::new());
    let mut big = GrowableBuffer::<u8>::builder(&world.device).max_len(4096 * MIB).build().unwrap();
    match big.grow_to(300 * MIB) {
        Err(Error::OutOfMemory(figures)) => {
            assert_eq!(figures.total, Bytes::mib(256));
            assert!(figures.asked > Bytes::ZERO);
            assert!(figures.to_string().contains("MiB asked; mapped here 0 B"), "{figures}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(big.mode(), Mode::Virtual);
    big.grow_to(100 * MIB).unwrap();
    drop(big);
    world.assert_empty("out of memory");
}
