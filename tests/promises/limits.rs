//! Limits of the process, forks and exits: each in a child of its own, since they cannot be taken back.

use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock};

use growspan::driver::host::HostOptions;
use growspan::driver::sim::{Personality, SimDriver};
use growspan::{
    AheadPolicy, Bytes, Device, DeviceOptions, Error, GrowableBuffer, Mode, OpenFileBudget, Quiesce, Sizing,
};

use crate::world::MIB;

/// Runs one role of [`as_child`] in a shell that has set `limits` first.
fn child(role: &str, limits: &str) -> Output {
    let exe = std::env::current_exe().unwrap();
    let mut command = Command::new("sh");
    command
        .args(["-c", &format!("{limits} exec \"$0\" limits::as_child --exact --ignored --nocapture --test-threads=1")]);
    command.arg(exe).env("GROWSPAN_TEST_ROLE", role);
    command.output().unwrap()
}

/// Runs a role and expects it to end well; gives what it printed.
fn child_ok(role: &str, limits: &str) -> String {
    let output = child(role, limits);
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{role} under {limits:?}: {:?}\n{text}", output.status);
    assert!(text.contains("role done"), "{role} under {limits:?}:\n{text}");
    text
}

#[test]
#[ignore = "not a test of its own: others start it in a process of its own"]
fn as_child() {
    let Ok(role) = std::env::var("GROWSPAN_TEST_ROLE") else { return };
    tracing_subscriber::fmt().with_ansi(false).init();
    match role.as_str() {
        "ladder" => use_host(DeviceOptions::new(), Bytes::mib(512)),
        "uniform" => use_host(DeviceOptions::new().sizing(Sizing::Uniform(Bytes::mib(2))), Bytes::gib(4)),
        "many slots" => many_slots(),
        "run out" => run_out_of_files(),
        "maps" => run_out_of_maps(),
        "fork" => fork(),
        "checked fork" => fork_while_the_check_is_under_way(),
        "busy fork" => fork_while_others_are_busy(),
        "background" => crate::background::one_thread_per_pool_from_first_use_to_the_end(),
        "no thread" => no_thread(),
        "exit" => leave_live_buffers(),
        other => panic!("no role {other}"),
    }
    println!("role done");
}

/// Opens the host with so much memory, says what the verdict is, and uses it.
fn use_host(options: DeviceOptions, capacity: Bytes) {
    let device = options.host(HostOptions::default().with_capacity(capacity)).unwrap();
    let mode = device.verdict().mode();
    println!("mode {mode}");
    if let Some(reason) = device.verdict().reason() {
        println!("reason {reason}");
    }
    let max_len = if mode == Mode::Virtual { 100 * MIB } else { 8 * MIB };
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(max_len).build().unwrap();
    buffer.grow_to(max_len).unwrap();
    buffer.as_mut_slice().unwrap()[max_len - 1] = 7;
    println!("limit {}", device.snapshot().open_files.unwrap().limit);
    buffer.close().unwrap();
}

#[test]
fn one_thread_per_pool_from_first_use_to_the_end() {
    child_ok("background", "");
}

/// Addresses for a thread's stack cannot be had.
fn no_thread() {
    let device = DeviceOptions::new().host(HostOptions::default().with_capacity(Bytes::mib(64))).unwrap();
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(32 * MIB).build().unwrap();
    buffer.grow_to(MIB).unwrap();
    // Stacks of threads that have ended are kept for the next: these take them all.
    let (tell, told) = std::sync::mpsc::channel::<()>();
    let told = std::sync::Arc::new(Mutex::new(told));
    for _ in 0..40 {
        let told = std::sync::Arc::clone(&told);
        std::thread::spawn(move || told.lock().unwrap().recv());
    }
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split_whitespace().next().unwrap().parse().unwrap();
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is that of a local.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut before) }, 0);
    let tight = libc::rlimit { rlim_cur: pages * 4096 + (1 << 20), rlim_max: before.rlim_max };
    // SAFETY: as above; nothing needs many addresses meanwhile.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const tight) }, 0);
    let ahead = AheadPolicy::Bytes(Bytes::mib(4));
    let refused = buffer.grow_ahead(ahead);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const before) }, 0);
    let error = refused.unwrap_err();
    drop(tell);
    assert!(matches!(error, Error::NoThread { .. }) && error.to_string().contains("without it"), "{error}");
    buffer.grow_to(8 * MIB).unwrap();
    device.wait_ahead();
    assert_eq!(buffer.stats().bytes_ahead, Bytes::ZERO);
    buffer.grow_ahead(ahead).unwrap();
    device.wait_ahead();
    assert!(buffer.stats().bytes_ahead >= Bytes::mib(4));
    buffer.close().unwrap();
}

#[test]
fn without_a_thread_buffers_grow_as_ever() {
    child_ok("no thread", "");
}

#[test]
fn few_open_files_turn_virtual_memory_off_and_the_crate_runs_on() {
    let text = child_ok("ladder", "ulimit -n 64;");
    assert!(text.contains("mode contiguous"), "{text}");
    assert!(text.contains("reason the host driver keeps an open file per 2 MiB chunk:"), "{text}");
    assert!(text.contains("and the open-file limit is 64 (hard 64;"), "{text}");
    assert_eq!(text.matches("virtual memory is off").count(), 1, "said once: {text}");
}

#[test]
fn the_ladder_fits_where_small_chunks_do_not() {
    for limit in [256, 1024] {
        let text = child_ok("ladder", &format!("ulimit -n {limit};"));
        assert!(text.contains("mode virtual"), "{text}");
        assert!(text.contains(&format!("limit {limit}")), "nothing to raise: {text}");

        let text = child_ok("uniform", &format!("ulimit -n {limit};"));
        assert!(text.contains("mode contiguous"), "{text}");
        assert!(text.contains("2048 of them for chunks"), "{text}");
    }
}

#[test]
fn a_soft_limit_is_raised_as_far_as_needed() {
    let text = child_ok("uniform", "ulimit -Hn 20000; ulimit -Sn 256;");
    assert!(text.contains("mode virtual"), "{text}");
    assert!(text.contains("limit 3072"), "2048 chunks and 1024 kept: {text}");
    assert_eq!(text.matches("open-file limit 256 -> 3072").count(), 1, "said once: {text}");
    assert_eq!(text.matches("virtual memory is on").count(), 1, "said once: {text}");
    // Many ladders add up to more than the verdict looked at: the limit is raised when they do.
    let text = child_ok("many slots", "ulimit -Hn 20000; ulimit -Sn 256;");
    assert!(text.contains("limit 1536"), "512 chunks at most and 1024 kept: {text}");
}

fn many_slots() {
    let device = DeviceOptions::new().host(HostOptions::default().with_capacity(Bytes::gib(1))).unwrap();
    let before = OpenFileBudget::process().usage();
    assert_eq!(before.limit, 256);
    let mut slots = Vec::new();
    for _ in 0..30 {
        let mut slot = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
        slot.grow_to(20 * MIB).unwrap();
        slots.push(slot);
    }
    println!("limit {}", device.snapshot().open_files.unwrap().limit);
}

#[test]
fn running_out_of_files_is_never_called_running_out_of_memory() {
    child_ok("run out", "ulimit -n 256;");
}

fn run_out_of_files() {
    let device = DeviceOptions::new().host(HostOptions::default().with_capacity(Bytes::gib(2))).unwrap();
    assert_eq!(device.verdict().mode(), Mode::Virtual);
    let small = Sizing::Uniform(Bytes::mib(2));
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(1024 * MIB).sizing(small).build().unwrap();
    buffer.grow_to(100 * MIB).unwrap();
    let before = device.snapshot();
    match buffer.grow_to(1000 * MIB) {
        Err(error @ Error::OutOfFiles(_)) => println!("{error}"),
        other => panic!("{other:?}"),
    }
    let after = device.snapshot();
    assert_eq!((before.bytes_held(), before.chunks), (after.bytes_held(), after.chunks));
    assert_eq!(buffer.len(), 100 * MIB);
    // Files that others open behind our back are found out, too.
    let mut others = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        others.push(file);
    }
    assert!(matches!(buffer.grow_to(102 * MIB), Err(Error::OutOfFiles(_))));
    others.clear();
    buffer.grow_to(102 * MIB).unwrap();
    // The files of what another device keeps in its pool are to be had.
    let other = DeviceOptions::new().host(HostOptions::default().with_capacity(Bytes::gib(2))).unwrap();
    assert_eq!(other.verdict().mode(), Mode::Virtual);
    while buffer.grow_to(buffer.len() + 2 * MIB).is_ok() {}
    let most = buffer.len();
    device.pool().set_keep_limit(Bytes::gib(2));
    buffer.shrink_to(0, Quiesce::Device).unwrap();
    assert_eq!(device.snapshot().bytes_pooled, Bytes::new(most as u64));
    let mut needy = GrowableBuffer::<u8>::builder(&other).max_len(1024 * MIB).sizing(small).build().unwrap();
    needy.grow_to(most - 8 * MIB).unwrap();
}

#[test]
fn few_map_entries_are_a_reason_and_an_error_of_their_own() {
    child_ok("maps", "");
}

fn run_out_of_maps() {
    let limit: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    let options = || HostOptions::default().with_capacity(Bytes::gib(2)).with_granularity(Bytes::kib(4));
    let device = DeviceOptions::new().host(options()).unwrap();
    let sizing = Sizing::Uniform(Bytes::kib(4));
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).sizing(sizing).build().unwrap();
    assert_eq!(buffer.mode(), Mode::Virtual);
    // All but 3,000 entries go to others: every second page of a mapping gets another protection.
    let entries = limit - 3000;
    // SAFETY: a fresh anonymous mapping, of which nothing else knows; what it returns is checked.
    let pages =
        unsafe { libc::mmap(core::ptr::null_mut(), entries * 4096, 0, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    assert_ne!(pages, libc::MAP_FAILED);
    for n in (0..entries).step_by(2) {
        // SAFETY: a page of the mapping made above.
        let page = unsafe { pages.add(n * 4096) };
        // SAFETY: the same; nobody uses the page.
        assert_eq!(unsafe { libc::mprotect(page, 4096, libc::PROT_READ) }, 0);
    }
    match buffer.grow_to(16 * MIB) {
        Err(error @ Error::OutOfMaps(_)) => println!("{error}"),
        other => panic!("{other:?}"),
    }
    assert_eq!((buffer.len(), buffer.committed()), (0, Bytes::ZERO));
    buffer.grow_to(MIB).unwrap();
    buffer.shrink_to(0, Quiesce::Device).unwrap();
    // What another device has mapped ahead gives way.
    let growing = |device: &Device| {
        let builder = GrowableBuffer::<u8>::builder(device).max_len(64 * MIB).sizing(sizing);
        builder.build().unwrap()
    };
    let other = DeviceOptions::new().host(options()).unwrap();
    let (mut eager, mut needy) = (growing(&device), growing(&other));
    assert_eq!(needy.mode(), Mode::Virtual);
    eager.grow_ahead(AheadPolicy::Bytes(Bytes::mib(7))).unwrap();
    eager.grow_to(1).unwrap();
    device.wait_ahead();
    let ahead = eager.stats().bytes_ahead;
    assert!(ahead >= Bytes::mib(7), "{ahead}");
    needy.grow_to(7 * MIB).unwrap();
    drop((eager, needy, other));
    // A device opened now sees it coming.
    let late = DeviceOptions::new().sizing(sizing).host(options()).unwrap();
    let reason = late.verdict().reason().unwrap().to_string();
    // 524,288 chunks of 4 KiB spend as many files as entries; whichever is short first is the reason.
    assert!(reason.contains("map entry per chunk") || reason.contains("open file per"), "{reason}");
}

#[test]
fn a_forked_child_touches_nothing_of_its_parent() {
    child_ok("fork", "");
}

fn fork() {
    let device = Device::host().unwrap();
    let mut buffer = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.grow_to(10 * MIB).unwrap();
    buffer.as_mut_slice().unwrap().fill(5);
    let event = device.event().unwrap();
    // SAFETY: this process runs one test, whose other threads wait; the child leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = matches!(buffer.grow_to(20 * MIB), Err(Error::Forked))
            && matches!(buffer.shrink_to(0, Quiesce::Device), Err(Error::Forked))
            && matches!(device.synchronize(), Err(Error::Forked));
        drop(buffer);
        drop(event);
        device.pool().trim(Bytes::ZERO);
        drop(device);
        // A device of the child's own works.
        let own = Device::host().and_then(|device| {
            let mut own = GrowableBuffer::<u8>::builder(&device).max_len(64 * MIB).build()?;
            own.grow_to(3 * MIB)?;
            own.as_mut_slice()?.fill(9);
            own.close()
        });
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if forked && own.is_ok() { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `child` is our child, `status` a valid place.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child's drops did nothing, and its calls were refused");
    assert!(buffer.as_slice().unwrap().iter().all(|byte| *byte == 5));
    buffer.grow_to(20 * MIB).unwrap();
    buffer.close().unwrap();
}

#[test]
fn a_child_forked_while_others_are_busy_does_not_hang() {
    child_ok("busy fork", "");
}

#[test]
fn a_child_forked_during_the_check_does_not_wait_for_it() {
    child_ok("checked fork", "");
}

fn fork_while_the_check_is_under_way() {
    let card = SimDriver::builder().personality(Personality::HangsInSetAccess).build();
    let device = DeviceOptions::new().open(card.driver()).unwrap();
    std::thread::scope(|scope| {
        let checked = scope.spawn(|| device.verdict().reason().map(ToString::to_string));
        while card.hung() == 0 {
            std::thread::yield_now();
        }
        // SAFETY: the child uses this crate and the allocator, which the C library makes fit for it.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: what hangs is killed.
            unsafe { libc::alarm(8) };
            let reason = device.verdict().reason().map(ToString::to_string).unwrap_or_default();
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if reason.contains("forked child") { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: `child` is our child, `status` a valid place.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        card.let_go();
        drop(checked.join().unwrap());
    });
}

/// Whatever another thread holds while the child is made stays held there for ever.
fn fork_while_others_are_busy() {
    let device = Device::host().unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = |work: fn()| {
            let done = &done;
            scope.spawn(move || {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    work();
                }
            })
        };
        busy(|| _ = growspan::OpenFileBudget::process().usage());
        busy(|| _ = growspan::MapBudget::process().usage());
        busy(|| drop(Device::host()));
        busy(|| drop(DeviceOptions::new().host(HostOptions::default())));
        for _ in 0..40 {
            // SAFETY: the child uses this crate, its own memory and the allocator, which the C library makes fit for it.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: what hangs is killed.
                unsafe { libc::alarm(20) };
                let _ = device.snapshot();
                let counted = growspan::OpenFileBudget::process().usage().ours == 0;
                let own = Device::host().and_then(|own| {
                    let mut buffer = GrowableBuffer::<u8>::builder(&own).max_len(64 * MIB).build()?;
                    buffer.grow_to(3 * MIB)?;
                    buffer.close()
                });
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(if own.is_ok() && counted { 0 } else { 1 }) };
            }
            let mut status = 0;
            // SAFETY: `child` is our child, `status` a valid place.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            if status != 0 {
                done.store(true, std::sync::atomic::Ordering::Relaxed);
                panic!("{status:#x}");
            }
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_process_may_end_with_live_buffers() {
    let text = child_ok("exit", "");
    assert!(!text.contains("panicked") && !text.contains("could not"), "{text}");
}

fn leave_live_buffers() {
    static LIVE: OnceLock<Mutex<Vec<GrowableBuffer<u8>>>> = OnceLock::new();
    thread_local! {
        static MINE: std::cell::RefCell<Option<GrowableBuffer<u8>>> = const { std::cell::RefCell::new(None) };
    }
    let build = || {
        let mut buffer = GrowableBuffer::<u8>::builder(&Device::host().unwrap()).max_len(64 * MIB).build().unwrap();
        buffer.grow_to(5 * MIB).unwrap();
        buffer
    };
    LIVE.get_or_init(Mutex::default).lock().unwrap().push(build());
    MINE.set(Some(build()));
    std::thread::spawn(move || MINE.set(Some(build()))).join().unwrap();
}
