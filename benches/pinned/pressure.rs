//! The same with the machine under pressure: a page cache that is full, another program that takes memory, compaction.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use growspan::pinned::ThpPolicy;
use growspan::{Bytes, Device};

use crate::sections::{Report, Setting, driver_allocation, median, ms, ours};
use crate::{Outcome, Row, raw};

/// Takes memory and touches it at random until it is ended, or whoever started it is.
pub(crate) fn be_a_hog(bytes: u64) -> ExitCode {
    let mut memory = vec![0_u8; usize::try_from(bytes).unwrap_or(0).max(4096)];
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
    group: Option<String>,
}

impl Hog {
    fn start(bytes: u64) -> Outcome<Self> {
        let size = format!("{}KiB", bytes >> 10);
        let mut command = Command::new(std::env::current_exe()?);
        let child = command.args(["--be-a-hog", &size]).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let group = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].iter().find_map(|root| {
            let group = format!("{root}/growspan-hog-{}", child.id());
            fs::create_dir(&group).ok()?;
            let joined = fs::write(format!("{group}/cgroup.procs"), child.id().to_string());
            if joined.is_err() {
                let _ = fs::remove_dir(&group);
            }
            joined.ok().map(|()| group)
        });
        eprintln!("# a hog of {} in {}", Bytes::new(bytes), group.as_deref().unwrap_or("our own control group"));
        // Until it has all it wants.
        std::thread::sleep(Duration::from_secs(2 + (bytes >> 30)));
        Ok(Self { child, group })
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

/// Reads a whole file, so that the page cache holds it.
fn read_through(path: &Path) -> Outcome<u64> {
    let (mut file, mut block, mut all) = (File::open(path)?, vec![0; 16 << 20], 0);
    loop {
        match file.read(&mut block)? {
            0 => return Ok(all),
            read => all += read as u64,
        }
    }
}

fn compact(setting: &Setting) {
    if setting.compact
        && let Err(error) = fs::write("/proc/sys/vm/compact_memory", "1")
    {
        eprintln!("# memory is not compacted: {error}");
    }
}

pub(crate) fn section(setting: &Setting, report: Report<'_>) -> Outcome<()> {
    let (device, driver) = (Device::named(&setting.device)?, raw::driver(&setting.device)?);
    let _hog = setting.hog.map(Hog::start).transpose()?;
    for &bytes in &setting.sizes {
        let size = Bytes::new(bytes);
        let policies = [("huge pages on", ThpPolicy::Advise), ("huge pages off", ThpPolicy::Avoid)];
        let (mut own, mut theirs) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
        for _ in 0..setting.repeats {
            for (number, (name, policy)) in policies.iter().enumerate() {
                if let Some(path) = &setting.cache_file {
                    eprintln!("# {} of the file read", Bytes::new(read_through(path)?));
                }
                compact(setting);
                let (timing, _) = ours(&device, bytes, Some(*policy))?;
                eprintln!("# {name}: {timing}");
                own[number].push(ms(timing.total));
                compact(setting);
                theirs[number].push(ms(driver_allocation(&*driver, bytes, number == 1)?));
            }
        }
        for (number, (name, _)) in policies.iter().enumerate() {
            for (who, times) in [("own pieces", &own[number]), ("one driver allocation", &theirs[number])] {
                let (what, value) = (format!("{size}, {who}, {name}"), median(times.clone()));
                report(Row { section: "pressure", what, value, unit: "ms", bar: None });
            }
        }
    }
    Ok(())
}
