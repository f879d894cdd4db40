//! At rest and with the machine under pressure: a page cache that leaves next to nothing free, another program that uses
//! memory, compaction. Huge pages on and off take turns in both.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use growspan::driver::Driver;
use growspan::pinned::ThpPolicy;
use growspan::sys::thp::Thp;
use growspan::sys::vmstat::Vmstat;
use growspan::{Bytes, Device};

use crate::sections::{Report, Setting, driver_allocation, median, ms, ours};
use crate::{Outcome, Row, raw};

const PAGE: usize = 4096;

/// Waits for a line, takes memory, says so in a line, and writes to it at random until it is ended, or whoever started it
/// is.
pub(crate) fn be_a_hog(bytes: u64) -> ExitCode {
    let _ = io::stdin().read(&mut [0]);
    let mut memory = vec![0_u8; usize::try_from(bytes).unwrap_or(0).max(PAGE)];
    memory.iter_mut().step_by(PAGE).for_each(|byte| *byte = 1);
    println!("ready");
    let parent = std::os::unix::process::parent_id();
    let mut at = 1_u64;
    while std::os::unix::process::parent_id() == parent {
        for _ in 0..100_000 {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let index = (at >> 16) as usize % memory.len();
            memory[index] = memory[index].wrapping_add(1);
        }
    }
    ExitCode::SUCCESS
}

/// The other program, in a memory group of its own where the system lets one be made.
struct Hog {
    child: Child,
    group: Option<PathBuf>,
}

impl Hog {
    fn start(bytes: u64) -> Outcome<Self> {
        let size = format!("{}KiB", bytes >> 10);
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--be-a-hog", &size]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut hog = Self { child: command.spawn()?, group: None };
        // Before it takes anything, so that all of it counts there.
        hog.group = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].iter().find_map(|root| {
            let group = Path::new(root).join(format!("growspan-hog-{}", hog.child.id()));
            fs::create_dir(&group).ok()?;
            let joined = fs::write(group.join("cgroup.procs"), hog.child.id().to_string());
            // Only a group that counts memory is one.
            let counts = ["memory.usage_in_bytes", "memory.current"].iter().any(|file| group.join(file).exists());
            if joined.is_ok() && counts {
                return Some(group);
            }
            let _ = fs::remove_dir(&group);
            None
        });
        if let Some(mut stdin) = hog.child.stdin.take() {
            stdin.write_all(b"\n")?;
        }
        let mut line = String::new();
        if let Some(stdout) = hog.child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        if line.is_empty() {
            return Err(format!("the hog of {} did not live to have it: take a smaller one", Bytes::new(bytes)).into());
        }
        let group = hog.group.as_deref().map_or("our own control group".into(), Path::to_string_lossy);
        eprintln!("# a hog has {} in {group}", Bytes::new(bytes));
        Ok(hog)
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(group) = &self.group {
            let _ = fs::remove_dir(group);
        }
    }
}

/// A file that the page cache is filled with.
struct Cache {
    file: File,
    bytes: u64,
    /// Where to go on reading: what was read longest ago is what the kernel has dropped.
    next: u64,
    threads: usize,
    /// How long reading may take at a time.
    patience: Duration,
    /// A file of our own, without blocks on the disk: reading it fills the cache all the same.
    own: Option<PathBuf>,
}

impl Cache {
    fn open(setting: &Setting) -> Outcome<Option<Self>> {
        let (file, own) = match (&setting.cache_file, setting.cache) {
            (Some(path), _) => (File::open(path)?, None),
            (None, Some(bytes)) => {
                let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cache-{}", std::process::id()));
                fs::create_dir_all(env!("CARGO_TARGET_TMPDIR"))?;
                let file = File::options().read(true).write(true).create_new(true).open(&path)?;
                file.set_len(bytes)?;
                (file, Some(path))
            }
            (None, None) => return Ok(None),
        };
        let bytes = file.metadata()?.len();
        // A third of the time, if there is an end to it.
        let patience = Duration::from_secs(setting.seconds.map_or(3600, |seconds| seconds.div_ceil(3)));
        let mut cache = Self { file, bytes, next: 0, threads: setting.threads, patience, own };
        let (before, began) = (meminfo("Cached"), Instant::now());
        cache.fill(bytes)?;
        let more = meminfo("Cached").saturating_sub(before);
        let took = began.elapsed().as_secs_f64();
        eprintln!("# the page cache has {} more after {took:.1} s", Bytes::new(more));
        Ok(Some(cache))
    }

    /// Reads on until next to nothing is free, but no more than so much.
    fn fill(&mut self, most: u64) -> Outcome<()> {
        const BLOCK: u64 = 16 << 20;
        let turn = BLOCK * self.threads as u64;
        let (mut done, began) = (0, Instant::now());
        let free = || meminfo("MemFree") > meminfo("MemTotal") / 32;
        while done < most && free() && began.elapsed() < self.patience {
            std::thread::scope(|scope| {
                let reads = (0..self.threads as u64).map(|thread| {
                    let at = (self.next + thread * BLOCK) % self.bytes.max(1);
                    let file = &self.file;
                    scope.spawn(move || {
                        let mut block = vec![0; 1 << 20];
                        (0..BLOCK >> 20).try_for_each(|mib| file.read_at(&mut block, at + (mib << 20)).map(drop))
                    })
                });
                let reads: Vec<_> = reads.collect();
                reads.into_iter().try_for_each(|read| read.join().unwrap_or_else(|_| Err(io::Error::other("a panic"))))
            })?;
            self.next = (self.next + turn) % self.bytes.max(1);
            done += turn;
        }
        Ok(())
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        if let Some(path) = &self.own {
            let _ = fs::remove_file(path);
        }
    }
}

/// A figure of the machine's memory, in bytes; zero where it is not told.
fn meminfo(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

fn about_the_machine() {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let (kernel, thp) = (read("/proc/sys/kernel/osrelease"), Thp::read());
    let defrag = read("/sys/kernel/mm/transparent_hugepage/defrag");
    let (free, all) = (Bytes::new(meminfo("MemFree")), Bytes::new(meminfo("MemTotal")));
    eprintln!("# Linux {kernel}; {thp:?}, defrag {defrag}; {free} of {all} free");
}

/// What has been measured: own pieces and the driver's, with huge pages and without.
#[derive(Default)]
struct Times {
    own: [Vec<f64>; 2],
    theirs: [Vec<f64>; 2],
}

const POLICIES: [(&str, ThpPolicy); 2] = [("huge pages on", ThpPolicy::Advise), ("huge pages off", ThpPolicy::Avoid)];

/// What a machine goes through before each measurement, and meanwhile.
struct Pressure {
    cache: Option<Cache>,
    compact: bool,
}

impl Pressure {
    fn around<R>(&mut self, bytes: u64, what: &str, body: impl FnOnce() -> Outcome<R>) -> Outcome<R> {
        if let Some(cache) = &mut self.cache {
            cache.fill(2 * bytes)?;
        }
        let (free, before) = (Bytes::new(meminfo("MemFree")), Vmstat::read()?);
        let result = std::thread::scope(|scope| {
            if self.compact {
                scope.spawn(|| {
                    if let Err(error) = fs::write("/proc/sys/vm/compact_memory", "1") {
                        eprintln!("# memory is not compacted: {error}");
                    }
                });
            }
            body()
        });
        eprintln!("# {what}: {free} free before; machine: {}", Vmstat::read()?.since(&before));
        result
    }
}

fn turn(
    (device, driver): (&Device, &dyn Driver),
    bytes: u64,
    times: &mut Times,
    pressure: &mut Pressure,
) -> Outcome<()> {
    for (number, (name, policy)) in POLICIES.into_iter().enumerate() {
        let (timing, _) = pressure.around(bytes, name, || ours(device, bytes, Some(policy)))?;
        eprintln!("# {name}: {timing}");
        times.own[number].push(ms(timing.total));
        let name = format!("{name}, the driver's");
        let time = pressure.around(bytes, &name, || driver_allocation(driver, bytes, number == 1))?;
        times.theirs[number].push(ms(time));
    }
    Ok(())
}

pub(crate) fn section(setting: &Setting, report: Report<'_>) -> Outcome<()> {
    let (device, driver) = (Device::named(&setting.device)?, raw::driver(&setting.device)?);
    about_the_machine();
    // All at rest first, since a cache once filled stays so.
    let mut rest = Pressure { cache: None, compact: false };
    // A virtual machine gets its own memory at first touch: that is not what is compared.
    let largest = setting.sizes.iter().copied().max().unwrap_or(0);
    eprintln!("# cold, and not counted: {}", ours(&device, largest, None)?.0);
    let began = Instant::now();
    let mut measured = Vec::new();
    for state in ["at rest", "under pressure"] {
        let (mut hog, mut pressure) = (None, None);
        if state != "at rest" {
            hog = setting.hog.map(Hog::start).transpose()?;
            pressure = Some(Pressure { cache: Cache::open(setting)?, compact: setting.compact });
        }
        // Half of the time is for each.
        let began = if state == "at rest" { began } else { Instant::now() };
        let until = setting.seconds.map(|seconds| Duration::from_secs(seconds) / 2);
        for &bytes in &setting.sizes {
            let mut times = Times::default();
            for number in 0..setting.repeats {
                if number > 0 && until.is_some_and(|until| began.elapsed() > until) {
                    break;
                }
                // What cannot be had under pressure is told, and the rest goes on.
                let done = turn((&device, &*driver), bytes, &mut times, pressure.as_mut().unwrap_or(&mut rest));
                if let Err(error) = done {
                    eprintln!("# {} {state}: {error}", Bytes::new(bytes));
                }
            }
            measured.push((bytes, state, times));
        }
        drop(hog);
    }
    for (bytes, state, times) in &measured {
        for (number, (name, _)) in POLICIES.iter().enumerate() {
            for (who, times) in [("own pieces", &times.own[number]), ("one driver allocation", &times.theirs[number])] {
                let (count, value) = (times.len(), median(times.clone()));
                let what = format!("{}, {who}, {name}, {state} ({count} turns)", Bytes::new(*bytes));
                report(Row { section: "pressure", what, value, unit: "ms", bar: None });
            }
        }
    }
    Ok(())
}
