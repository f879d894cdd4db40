//! What the kernel says: locked memory and its limit, huge pages, control groups, forks.

use std::fs;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use growspan::driver::DriverErrorKind;
use growspan::pinned::{PinStrategy, PinTiming, PinnedBuffer, Prefault, ThpPolicy};
use growspan::sys::thp::Thp;
use growspan::{Bytes, Device, Error, Quiesce};

use crate::child::role_well;
use crate::seccomp::refuse;
use crate::{MIB, World, small_pieces};

pub(crate) fn as_child(role: &str) {
    match role {
        "limit" => locked_memory_limit(),
        "group" => group_limit(),
        "cached" => group_full_of_cache(),
        "shrinking" => group_with_less_and_less_room(),
        "figures" => figures(),
        "fork" => fork_while_pinned(),
        "disable" => disabled_for_a_while(),
        "refused" => not_disabled_where_it_may_not_be(),
        "old kernel" => populated_by_touch(libc::EINVAL),
        "busy kernel" => populated_by_touch(libc::EAGAIN),
        "nodes" => nodes(),
        other => crate::allocator::as_child(other),
    }
}

/// A figure of `/proc/self/status`, in bytes.
pub(crate) fn status(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() << 10
}

/// A figure of the mapping that an address lies in, in bytes, summed over `[addr, addr + bytes)`.
pub(crate) fn mapping(addr: usize, bytes: usize, name: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut sum) = (false, 0);
    for line in text.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let range = range
            .and_then(|(from, to)| Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?)));
        if let Some((from, to)) = range {
            inside = from < addr + bytes && addr < to;
        } else if let Some(value) = line.strip_prefix(name).and_then(|rest| rest.strip_prefix(':'))
            && inside
        {
            sum += value.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10;
        }
    }
    sum
}

#[test]
fn locked_memory_is_counted_by_the_kernel() {
    role_well("figures", &[]);
}

fn figures() {
    let device = Device::host().unwrap();
    let (before, pinned) = (status("VmLck"), status("VmPin"));
    let mut buffer = small_pieces::<u8>(&device, 8 * MIB);
    buffer.grow_to(6 * MIB).unwrap();
    assert_eq!(status("VmLck") - before, 6 << 20);
    assert_eq!(status("VmPin"), pinned, "the host locks pages and pins none");
    buffer.grow_to(8 * MIB).unwrap();
    buffer.shrink_exact(3 * MIB, Quiesce::Device).unwrap();
    assert_eq!(status("VmLck") - before, 3 << 20);
    let mut block = PinnedBuffer::<u8>::builder(&device).max_len(MIB).strategy(PinStrategy::Driver).build().unwrap();
    block.grow_to(1).unwrap();
    assert_eq!(status("VmLck") - before, 4 << 20);
    drop((buffer, block));
    assert_eq!((status("VmLck"), status("VmPin")), (before, pinned));
    // A device that only pretends locks nothing.
    let mut buffer = small_pieces::<u8>(&World::sim().device, 8 * MIB);
    buffer.grow_to(6 * MIB).unwrap();
    assert_eq!((status("VmLck"), status("VmPin")), (before, pinned));
}

/// Starts a child as one who may lock so much and no more; none where that cannot be.
pub(crate) fn under_limit(role: &str, kib: u64) -> Option<String> {
    if std::process::Command::new("setpriv").arg("--version").output().is_err() {
        println!("skipped: there is no setpriv to give up the right to lock anything with");
        return None;
    }
    // Root may lock anything, so the child gives that right up first.
    let drop_right = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"];
    let shell = format!("ulimit -l {kib}; exec \"$0\" \"$@\"");
    let limited = ["sh", "-c", &shell];
    Some(role_well(role, &[&drop_right[..], &limited[..]].concat()))
}

#[test]
fn the_limit_of_locked_memory_is_named_with_its_figures() {
    let Some(text) = under_limit("limit", 4096) else { return };
    assert!(text.contains("LIMIT"), "{text}");
    for words in ["8 MiB asked", "RLIMIT_MEMLOCK is 4 MiB (hard 4 MiB)", "ulimit -l", "CAP_IPC_LOCK"] {
        assert!(text.contains(words), "{words:?} is not in {text}");
    }
}

fn locked_memory_limit() {
    let device = Device::host().unwrap();
    let mut buffer = PinnedBuffer::<u8>::builder(&device).max_len(64 * MIB).build().unwrap();
    buffer.grow_to(2 * MIB).unwrap();
    buffer.fill(3);
    let refused = |error: &Error| matches!(error, Error::Driver(error) if error.kind() == DriverErrorKind::LockLimit);
    let error = buffer.grow_to(10 * MIB).unwrap_err();
    assert!(refused(&error), "{error}");
    println!("LIMIT {error}");
    assert_eq!((buffer.len(), buffer.capacity(), status("VmLck")), (2 * MIB, 2 * MIB, 2 << 20));
    assert!(buffer.iter().all(|byte| *byte == 3));
    // Nothing of what was put there stays.
    assert_eq!(mapping(buffer.as_ptr().addr(), 64 * MIB, "Rss"), 2 << 20);
    buffer.grow_to(4 * MIB).unwrap();
    let driver = PinnedBuffer::<u8>::builder(&device).max_len(MIB).strategy(PinStrategy::Driver);
    let error = driver.build().unwrap().grow_to(MIB).unwrap_err();
    assert!(refused(&error), "{error}");
    buffer.shrink_to(2 * MIB, Quiesce::Device).unwrap();
    buffer.close().unwrap();
    assert_eq!(status("VmLck"), 0);
}

/// A memory group of its own, as the system lets one be made.
struct Group(String);

impl Group {
    fn new(name: &str, limit: u64) -> Option<Self> {
        let name = format!("growspan-pinned-{name}-{}", std::process::id());
        let versions = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        versions.into_iter().find_map(|(root, file)| {
            let path = format!("{root}/{name}");
            fs::create_dir(&path).ok()?;
            let this = Self(path);
            fs::write(format!("{}/{file}", this.0), limit.to_string()).ok()?;
            Some(this)
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Runs a role in a group of its own that may have so much; none where no group can be made.
fn in_group(role: &str, limit: u64) -> Option<String> {
    let Some(group) = Group::new(role, limit) else {
        println!("skipped: no memory group can be made here");
        return None;
    };
    let shell = format!("echo $$ > {}/cgroup.procs; exec \"$0\" \"$@\"", group.0);
    Some(role_well(role, &["sh", "-c", &shell]))
}

#[test]
fn a_group_s_limit_is_an_error_and_not_the_end_of_the_process() {
    let Some(text) = in_group("group", 192 << 20) else { return };
    assert!(text.contains("GROUP 256 MiB of host memory were asked for"), "{text}");
}

/// Room that others take while it is being filled is missed in time, and not when the kernel ends the process.
#[test]
fn room_that_goes_while_pages_are_put_there_is_an_error() {
    in_group("shrinking", 512 << 20);
}

fn group_with_less_and_less_room() {
    let mut buffer = PinnedBuffer::<u8>::builder(&World::sim().device).max_len(400 * MIB).threads(1).build().unwrap();
    let mut others = Vec::new();
    let error = buffer.grow_to_with(400 * MIB, |_| {
        others.resize(200 * MIB, 1_u8);
        ControlFlow::Continue(())
    });
    assert!(matches!(error, Err(Error::HostMemory { .. })), "{error:?}");
    assert_eq!((buffer.capacity(), others[MIB]), (0, 1));
}

/// What files take counts as used, also after the second reading, and makes way.
#[test]
fn a_group_full_of_file_cache_has_room() {
    in_group("cached", 192 << 20);
}

fn group_full_of_cache() {
    use std::os::unix::fs::FileExt;

    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cached-{}", std::process::id()));
    let file = fs::File::create_new(&path).unwrap();
    file.set_len(150 << 20).unwrap();
    let file = fs::File::open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let mut block = vec![0; MIB];
    for _ in 0..3 {
        (0..150).for_each(|mib| file.read_exact_at(&mut block, mib << 20).unwrap());
    }
    for device in [Device::host().unwrap(), World::sim().device] {
        let mut buffer = PinnedBuffer::<u8>::builder(&device).max_len(100 * MIB).build().unwrap();
        buffer.grow_to(100 * MIB).unwrap();
        buffer.close().unwrap();
    }
}

fn group_limit() {
    let device = Device::host().unwrap();
    let mut buffer = PinnedBuffer::<u8>::builder(&device).max_len(256 * MIB).build().unwrap();
    buffer.grow_to(16 * MIB).unwrap();
    let mut other = PinnedBuffer::<u8>::builder(&device).max_len(256 * MIB).build().unwrap();
    let error = other.grow_to(256 * MIB).unwrap_err();
    assert!(matches!(error, Error::HostMemory { total, .. } if total == Bytes::mib(192)), "{error}");
    println!("GROUP {error}");
    assert_eq!(other.capacity(), 0);
    buffer.grow_to(32 * MIB).unwrap();
    buffer.close().unwrap();
}

#[test]
fn a_fork_leaves_the_memory_to_the_parent() {
    role_well("fork", &[]);
}

fn fork_while_pinned() {
    let device = Device::host().unwrap();
    let mut buffer = small_pieces::<u8>(&device, 8 * MIB);
    buffer.grow_to(4 * MIB).unwrap();
    buffer.fill(9);
    let (addr, locked) = (buffer.as_ptr().addr(), status("VmLck"));
    // SAFETY: the child looks at its memory map and drops the buffer, and ends without running anything else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let there = mapping(addr, 4 * MIB, "Rss");
        let refused = matches!(buffer.grow_to(8 * MIB), Err(Error::Forked));
        drop(buffer);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(there != 0) + 2 * i32::from(!refused)) };
    }
    let mut ended = 0;
    // SAFETY: the pointer is valid for the write.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut ended, 0) }, child);
    assert!(libc::WIFEXITED(ended) && libc::WEXITSTATUS(ended) == 0, "{ended:#x}");
    assert!(buffer.iter().all(|byte| *byte == 9));
    assert_eq!(status("VmLck"), locked);
    buffer.grow_to(8 * MIB).unwrap();
    buffer.close().unwrap();
}

fn grown(device: &Device, policy: Option<ThpPolicy>) -> (PinnedBuffer<u8>, PinTiming) {
    let mut builder = PinnedBuffer::<u8>::builder(device).max_len(16 * MIB).threads(2);
    if let Some(policy) = policy {
        builder = builder.thp(policy);
    }
    let mut buffer = builder.build().unwrap();
    let timing = buffer.grow_to(16 * MIB).unwrap();
    (buffer, timing)
}

#[test]
fn huge_pages_are_used_or_are_not_as_the_policy_says() {
    let thp = Thp::read();
    let can = thp.process == Some(true) && thp.anonymous.as_deref().is_some_and(|mode| mode != "never");
    let world = World::host();
    let huge = |buffer: &PinnedBuffer<u8>| mapping(buffer.as_ptr().addr(), 16 * MIB, "AnonHugePages");
    let (buffer, timing) = grown(&world.device, Some(ThpPolicy::Avoid));
    assert_eq!((huge(&buffer), timing.threads), (0, 2));
    // All was there before the driver came.
    assert!(timing.register_faults < 16, "{timing}");
    assert!(timing.vmstat.pgfault > 0 && timing.how.is_some() && timing.retries_seen == 0, "{timing}");
    for policy in [Some(ThpPolicy::Advise), None] {
        let (buffer, timing) = grown(&world.device, policy);
        if can {
            // A machine short of huge pages may not give all of them.
            assert!(huge(&buffer) >= 8 << 20, "{policy:?}: {} {timing}", huge(&buffer));
        }
        assert!(timing.register_faults < 16, "{timing}");
        assert_eq!(timing.how, Some(Prefault::Populate), "this kernel is older than 5.14");
    }
    if thp.anonymous.as_deref() == Some("madvise") {
        assert_eq!(huge(&grown(&world.device, Some(ThpPolicy::Inherit)).0), 0);
    }
}

#[test]
fn huge_pages_are_off_for_the_process_while_memory_is_had_and_no_longer() {
    let text = role_well("disable", &[]);
    assert!(text.contains("transparent huge pages are off for the process"), "{text}");
    assert!(text.contains("transparent huge pages are as they were"), "{text}");
}

fn disabled_for_a_while() {
    let on = || Thp::read().process == Some(true);
    if !on() {
        return println!("skipped: huge pages are off here as it is");
    }
    let device = Device::host().unwrap();
    for strategy in [PinStrategy::Pieces, PinStrategy::Driver] {
        let build = || {
            let builder = PinnedBuffer::<u8>::builder(&device).max_len(4 * MIB).strategy(strategy);
            builder.thp(ThpPolicy::DisableForProcess).build().unwrap()
        };
        let mut buffer = build();
        let mut told = 0;
        buffer
            .grow_to_with(4 * MIB, |_| {
                told += 1;
                assert!(!on());
                ControlFlow::Continue(())
            })
            .unwrap();
        assert!(told > 0 && on());
        assert_eq!(mapping(buffer.as_ptr().addr(), 4 * MIB, "AnonHugePages"), 0);
        // Every other way out.
        assert!(matches!(build().grow_to_with(4 * MIB, |_| ControlFlow::Break(())), Err(Error::Cancelled { .. })));
        assert!(on());
        let panicked = catch_unwind(AssertUnwindSafe(|| build().grow_to_with(4 * MIB, |_| panic!("on purpose"))));
        assert!(panicked.is_err() && on());
        let world = World::host();
        world.control.arm(growspan::driver::fault::FaultPlan::every());
        let builder = PinnedBuffer::<u8>::builder(&world.device).max_len(MIB).strategy(strategy);
        builder.thp(ThpPolicy::DisableForProcess).build().unwrap().grow_to(MIB).unwrap_err();
        assert!(on());
    }
}

#[test]
fn who_may_not_turn_huge_pages_off_is_told_so() {
    role_well("refused", &[]);
}

fn not_disabled_where_it_may_not_be() {
    let before = Thp::read();
    refuse(libc::SYS_prctl, 0, libc::PR_SET_THP_DISABLE, libc::EPERM);
    if before.process == Some(false) {
        return println!("skipped: huge pages are off here as it is");
    }
    for world in World::all() {
        for strategy in [PinStrategy::Pieces, PinStrategy::Driver] {
            let builder = PinnedBuffer::<u8>::builder(&world.device).max_len(4 * MIB).strategy(strategy);
            let mut buffer = builder.clone().thp(ThpPolicy::DisableForProcess).build().unwrap();
            let error = buffer.grow_to(MIB).unwrap_err();
            let Error::ThpRefused { source } = &error else { panic!("{error}") };
            assert_eq!(source.raw_os_error(), Some(libc::EPERM));
            assert!(buffer.is_empty() && buffer.committed().is_zero() && buffer.pieces().is_empty());
            buffer.close().unwrap();
            // The way out that the message names.
            let mut buffer = builder.thp(ThpPolicy::Inherit).build().unwrap();
            buffer.grow_to(MIB).unwrap();
            buffer.close().unwrap();
        }
        world.assert_clean();
    }
    assert_eq!(Thp::read().process, before.process);
}

/// On kernels before 5.14, and where the kernel only ever asks for another try.
#[test]
fn pages_are_there_before_the_driver_comes_also_without_the_kernel_s_call() {
    role_well("old kernel", &[]);
    role_well("busy kernel", &[]);
}

fn populated_by_touch(code: i32) {
    /// `MADV_POPULATE_WRITE`.
    const POPULATE_WRITE: i32 = 23;
    if code == libc::EAGAIN {
        // The kernel is asked once whether it knows the call, and says so; from then on it is busy.
        let mut first = small_pieces::<u8>(&World::sim().device, MIB);
        if first.grow_to(MIB).unwrap().how == Some(Prefault::Touch) {
            return println!("skipped: this kernel is older than 5.14");
        }
    }
    refuse(libc::SYS_madvise, 2, POPULATE_WRITE, code);
    for world in World::all() {
        for policy in [ThpPolicy::Avoid, ThpPolicy::Advise] {
            let builder = PinnedBuffer::<u8>::builder(&world.device).max_len(16 * MIB).threads(2).thp(policy);
            let mut buffer = builder.build().unwrap();
            let timing = buffer.grow_to(16 * MIB).unwrap();
            assert_eq!(timing.how, Some(Prefault::Touch));
            // The touches end in the prefault, so that the driver faults nothing in.
            assert!(timing.register_faults < 16, "{timing}");
            assert_eq!(mapping(buffer.as_ptr().addr(), 16 * MIB, "Rss"), 16 << 20);
            assert!(buffer.iter().all(|byte| *byte == 0));
            // Each of the parts was tried often, and then no more.
            let retries = if code == libc::EAGAIN { 808 } else { 0 };
            assert_eq!(timing.retries_seen, retries, "{timing}");
            buffer.close().unwrap();
        }
    }
}

#[test]
fn memory_comes_from_the_node_that_was_chosen() {
    role_well("nodes", &[]);
}

fn nodes() {
    let Ok(known) = fs::read_to_string("/sys/devices/system/node/has_memory") else {
        return println!("skipped: this kernel has no NUMA nodes");
    };
    let device = World::sim().device;
    let known = known.trim().split(',').flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse::<u32>().unwrap()..=last.parse().unwrap()
    });
    let mut seen = 0;
    for node in known {
        let mut buffer = PinnedBuffer::<u8>::builder(&device).max_len(8 * MIB).numa_node(node).build().unwrap();
        match buffer.grow_to(8 * MIB) {
            Ok(_) => {}
            Err(Error::NumaNode { source, .. }) if source.raw_os_error() == Some(libc::ENOSYS) => {
                return println!("skipped: this kernel has no calls for NUMA nodes");
            }
            Err(error) => panic!("node {node}: {error}"),
        }
        let Ok(maps) = fs::read_to_string("/proc/self/numa_maps") else {
            return println!("skipped: this kernel does not say where pages are");
        };
        let at = format!("{:x} ", buffer.as_ptr().addr());
        let line = maps.lines().find_map(|line| line.strip_prefix(&at)).unwrap();
        assert!(line.starts_with(&format!("prefer:{node} ")), "{line}");
        let count = |name: &str| -> u64 {
            let words = line.split(' ').filter_map(|word| word.strip_prefix(name)?.strip_prefix('='));
            words.map(|count| count.parse::<u64>().unwrap()).sum()
        };
        // All of them, where the node has so many.
        let there = count(&format!("N{node}"));
        assert!(there > 0 && there == count("anon"), "{line}");
        buffer.close().unwrap();
        seen += 1;
    }
    println!("{seen} nodes");
}
