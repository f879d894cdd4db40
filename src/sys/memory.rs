//! How much memory this process could still take: the machine's, and what its control groups leave of it.

use core::mem::MaybeUninit;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::bytes::Bytes;

/// What there is and what is left of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// What this process could take now without swapping: free memory and what the kernel can drop at once.
    pub available: Bytes,
    /// The machine's memory, or the least limit of a control group of this process.
    pub total: Bytes,
}

/// Reads the memory available to this process: of the machine (`MemAvailable`) and of each control group from its own
/// up to the root, version 1 or 2. The least wins.
///
/// ```
/// let gauge = growspan::sys::memory::Gauge::find()?;
/// let memory = gauge.read()?;
/// assert!(memory.available <= memory.total);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Gauge {
    levels: Vec<Level>,
}

impl Gauge {
    /// Finds the control groups of this process. They are remembered, so that each reading opens a few files only.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn find() -> io::Result<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup")?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let levels = levels(&groups, &mounts);
        Ok(Self { levels: levels.into_iter().filter(|level| level.limit().is_some()).collect() })
    }

    /// Reads it now.
    ///
    /// # Errors
    /// When `/proc/meminfo` cannot be read. A control group that has gone does not count.
    pub fn read(&self) -> io::Result<Memory> {
        let machine = meminfo(&fs::read_to_string("/proc/meminfo")?)?;
        Ok(self.levels.iter().filter_map(|level| level.read(machine.total)).fold(machine, |least, level| Memory {
            available: least.available.min(level.available),
            total: least.total.min(level.total),
        }))
    }
}

/// The machine's unused memory, by one cheap system call. It counts neither what the kernel could drop nor control
/// groups: what [`Gauge`] reads is better in both directions.
///
/// # Errors
/// When the system refuses to say.
pub fn unused() -> io::Result<Bytes> {
    let mut raw = MaybeUninit::<libc::sysinfo>::zeroed();
    // SAFETY: the pointer is to room for one `sysinfo`, which is all that the call writes to.
    if unsafe { libc::sysinfo(raw.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was zeroed, which is a value of a struct of integers, and the call filled it.
    let raw = unsafe { raw.assume_init() };
    Ok(Bytes::new(raw.freeram.saturating_mul(u64::from(raw.mem_unit))))
}

/// Free memory of a device that shares the host's: it competes for that, which its driver's figure may exceed.
#[cfg(any(feature = "cuda", feature = "hip"))]
pub(crate) fn at_most_available(free: u64) -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    meminfo(&text).map_or(free, |memory| free.min(memory.available.get()))
}

/// The two figures of `/proc/meminfo`.
fn meminfo(text: &str) -> io::Result<Memory> {
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Some(Bytes::kib(value.trim().strip_suffix("kB")?.trim().parse().ok()?))
    };
    let missing = |name: &str| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/meminfo has no {name}"));
    let total = field("MemTotal").ok_or_else(|| missing("MemTotal"))?;
    let available = field("MemAvailable").ok_or_else(|| missing("MemAvailable"))?;
    Ok(Memory { available: available.min(total), total })
}

/// The two versions of control groups, which differ in the names of their files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    const fn limit(self) -> &'static str {
        match self {
            Self::One => "memory.limit_in_bytes",
            Self::Two => "memory.max",
        }
    }

    const fn usage(self) -> &'static str {
        match self {
            Self::One => "memory.usage_in_bytes",
            Self::Two => "memory.current",
        }
    }

    /// The lines of `memory.stat` with the file pages in the group and all below it, those not used of late and those that
    /// were: a file that was read twice is among the latter. They count as used, and the kernel drops them before it kills
    /// anybody.
    const fn reclaimable(self) -> [&'static str; 2] {
        match self {
            Self::One => ["total_inactive_file", "total_active_file"],
            Self::Two => ["inactive_file", "active_file"],
        }
    }
}

/// One control group.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Level {
    version: Version,
    directory: PathBuf,
}

impl Level {
    fn text(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.directory.join(file)).ok()
    }

    /// The text of its limit; `None` if the group has no such file (the root, or a group that does not control memory).
    fn limit(&self) -> Option<String> {
        self.text(self.version.limit())
    }

    /// `None` if it binds nobody.
    fn read(&self, machine: Bytes) -> Option<Memory> {
        let total = limit(&self.limit()?).filter(|total| *total < machine)?;
        let usage = Bytes::new(self.text(self.version.usage())?.trim().parse().ok()?);
        let text = self.text("memory.stat").unwrap_or_default();
        let reclaimable = self.version.reclaimable().into_iter().filter_map(|name| stat(&text, name));
        // Dropping pages cannot make more room than they take.
        let kept = reclaimable.fold(usage, Bytes::saturating_sub);
        Some(Memory { available: total.saturating_sub(kept), total })
    }
}

/// A limit as the groups write it: a number, or `max`.
fn limit(text: &str) -> Option<Bytes> {
    text.trim().parse().ok().map(Bytes::new)
}

/// A line of `memory.stat`.
fn stat(text: &str, name: &str) -> Option<Bytes> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok().map(Bytes::new))
}

/// The memory control groups of the process, its own first: from the texts of `/proc/self/cgroup` and
/// `/proc/self/mountinfo`.
fn levels(groups: &str, mounts: &str) -> Vec<Level> {
    let mut levels = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let version = match controllers {
            "" => Version::Two,
            list if list.split(',').any(|name| name == "memory") => Version::One,
            _ => continue,
        };
        let Some((root, point)) = mounts.lines().find_map(|line| mount(line, version)) else { continue };
        // In a container the mount may show a part of the tree only; a path from outside of it is not to be seen.
        let below = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
        let own = match below.starts_with("..") {
            true => point.clone(),
            // By parts, so that nothing below leaves no slash behind.
            false => point.iter().chain(below.iter()).collect(),
        };
        let up = own.ancestors().take_while(|directory| directory.starts_with(&point));
        levels.extend(up.map(|directory| Level { version, directory: directory.to_path_buf() }));
    }
    levels
}

/// The root and the mount point of a line of `mountinfo`, if it is the tree of memory groups of that version.
fn mount(line: &str, version: Version) -> Option<(String, PathBuf)> {
    // 35 31 0:32 /root /point rw,relatime shared:1 - cgroup source rw,memory
    let (left, right) = line.split_once(" - ")?;
    let (mut left, mut right) = (left.split(' ').skip(3), right.split(' '));
    let (root, point) = (unescape(left.next()?), unescape(left.next()?));
    let (kind, _source, options) = (right.next()?, right.next()?, right.next()?);
    let matches = match version {
        Version::One => kind == "cgroup" && options.split(',').any(|name| name == "memory"),
        Version::Two => kind == "cgroup2",
    };
    matches.then(|| (root, PathBuf::from(point)))
}

/// `mountinfo` writes spaces, tabs, line ends and backslashes as three octal digits after a backslash.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: Bytes = Bytes::mib(1);
    const V1_MOUNTS: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
        32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
        35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n\
        41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
    const V2_MOUNTS: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

    fn found(groups: &str, mounts: &str) -> Vec<(Version, String)> {
        let plain = |level: Level| (level.version, level.directory.to_str().unwrap().to_owned());
        levels(groups, mounts).into_iter().map(plain).collect()
    }

    #[test]
    fn the_two_figures_of_meminfo() {
        let text = "MemTotal:       24684092 kB\nMemFree:        24015220 kB\nMemAvailable:   24391364 kB\n";
        let expected = Memory { available: Bytes::kib(24_391_364), total: Bytes::kib(24_684_092) };
        assert_eq!(meminfo(text).unwrap(), expected);
        for bad in ["", "MemTotal: 1 kB\n", "MemAvailable: 1 kB\n", "MemTotal: x kB\nMemAvailable: 1 kB\n"] {
            assert_eq!(meminfo(bad).unwrap_err().kind(), io::ErrorKind::InvalidData, "{bad}");
        }
    }

    #[test]
    fn version_2_from_the_own_group_to_the_root() {
        let two = |path: &str| (Version::Two, path.to_owned());
        assert_eq!(
            found("0::/user.slice/app.scope\n", V2_MOUNTS),
            [two("/sys/fs/cgroup/user.slice/app.scope"), two("/sys/fs/cgroup/user.slice"), two("/sys/fs/cgroup")]
        );
        assert_eq!(found("0::/\n", V2_MOUNTS), [two("/sys/fs/cgroup")]);
    }

    #[test]
    fn version_1_beside_an_empty_version_2() {
        let groups = "8:pids:/\n4:cpu,memory:/a:b/c\n1:cpu:/elsewhere\n0::/\n";
        let one = |path: &str| (Version::One, path.to_owned());
        assert_eq!(
            found(groups, V1_MOUNTS),
            [
                one("/sys/fs/cgroup/memory/a:b/c"),
                one("/sys/fs/cgroup/memory/a:b"),
                one("/sys/fs/cgroup/memory"),
                (Version::Two, "/sys/fs/cgroup/unified".to_owned())
            ]
        );
    }

    #[test]
    fn a_container_sees_a_part_of_the_tree() {
        let mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/mem\\040ory ro - cgroup cgroup rw,memory\n";
        let point = [(Version::One, "/sys/fs/cgroup/mem ory".to_owned())];
        assert_eq!(found("4:memory:/docker/abc\n", mounts), point);
        assert_eq!(found("4:memory:/docker/other\n", mounts), point);
        assert_eq!(found("0::/../outside\n", V2_MOUNTS), [(Version::Two, "/sys/fs/cgroup".to_owned())]);
        assert_eq!(found("4:memory:/x\n", ""), []);
        assert_eq!(found("nonsense\n\n4:memory\n", mounts), []);
    }

    #[test]
    fn limits_and_stat_lines() {
        assert_eq!(limit("max\n"), None);
        assert_eq!(limit("1048576\n"), Some(MIB));
        let text = "inactive_file_x 7\ninactive_file 4096\ntotal_inactive_file 8192\n";
        assert_eq!(stat(text, Version::Two.reclaimable()[0]), Some(Bytes::kib(4)));
        assert_eq!(stat(text, Version::One.reclaimable()[0]), Some(Bytes::kib(8)));
        assert_eq!(stat("anon 1\n", "inactive_file"), None);
    }

    #[test]
    fn a_group_leaves_its_limit_less_what_it_cannot_drop() {
        let directory = std::env::temp_dir().join(format!("growspan-group-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let machine = Bytes::gib(16);
        for version in [Version::One, Version::Two] {
            let level = Level { version, directory: directory.clone() };
            let write = |name: &str, text: String| fs::write(directory.join(name), text).unwrap();
            let read = |text: &str| {
                write(version.limit(), text.to_owned());
                level.read(machine).map(|memory| (memory.available, memory.total))
            };
            write(version.usage(), format!("{}\n", Bytes::mib(60).get()));
            let [inactive, active] = version.reclaimable();
            let (few, more) = (Bytes::mib(7).get(), Bytes::mib(13).get());
            write("memory.stat", format!("anon 5\n{inactive} {few}\n{active} {more}\n"));
            let hundred = Bytes::mib(100).get().to_string();
            assert_eq!(read(&hundred), Some((Bytes::mib(60), Bytes::mib(100))));
            // More in use than a lowered limit allows: nothing left, and no wrap-around.
            assert_eq!(read(&MIB.get().to_string()), Some((Bytes::ZERO, MIB)));
            assert_eq!(read("max\n"), None);
            assert_eq!(read("9223372036854771712\n"), None);

            write(version.limit(), hundred);
            let gauge = Gauge { levels: vec![level.clone()] };
            assert_eq!(gauge.read().unwrap(), Memory { available: Bytes::mib(60), total: Bytes::mib(100) });
        }
        fs::remove_dir_all(&directory).unwrap();
        let gone = Level { version: Version::Two, directory };
        assert_eq!(gone.read(machine), None);
    }

    #[test]
    fn the_real_figures_agree() {
        let memory = Gauge::find().unwrap().read().unwrap();
        assert!(memory.available <= memory.total && memory.total >= Bytes::mib(64), "{memory:?}");
        let machine = meminfo(&fs::read_to_string("/proc/meminfo").unwrap()).unwrap().total;
        let unused = unused().unwrap();
        assert!(unused < machine && unused > Bytes::ZERO, "{unused}");
    }
}
