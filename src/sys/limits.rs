//! The limits of this process: open files, entries of its memory map, memory it may lock.

use std::fs::{self, File};
use std::io::{self, Read};

use crate::driver::{MapCount, OpenFiles, ProcessLimits};

/// The limits of the process this code runs in.
///
/// ```
/// use growspan::driver::ProcessLimits;
/// use growspan::sys::limits::ThisProcess;
///
/// let files = ThisProcess.open_files()?;
/// assert!(files.held > 0 && files.soft <= files.hard);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct ThisProcess;

impl ProcessLimits for ThisProcess {
    fn open_files(&self) -> io::Result<OpenFiles> {
        let limit = get(libc::RLIMIT_NOFILE)?;
        Ok(OpenFiles { held: held_files()?, soft: limit.soft, hard: limit.hard })
    }

    fn raise_open_files(&self, soft: u64) -> io::Result<()> {
        let hard = get(libc::RLIMIT_NOFILE)?.hard;
        set(libc::RLIMIT_NOFILE, Limit { soft, hard })
    }

    fn maps(&self) -> io::Result<MapCount> {
        let held = count_lines(File::open("/proc/self/maps")?)?;
        let limit = number(&fs::read_to_string("/proc/sys/vm/max_map_count")?)?;
        Ok(MapCount { held, limit })
    }
}

/// A limit of this process. What is unlimited reads as `u64::MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The limit in force.
    pub soft: u64,
    /// How far the process may raise it by itself.
    pub hard: u64,
}

/// How many bytes the process may lock into memory (`RLIMIT_MEMLOCK`).
///
/// # Errors
/// When the system refuses to say.
pub fn locked_memory() -> io::Result<Limit> {
    get(libc::RLIMIT_MEMLOCK)
}

/// How many bytes the process has locked into memory now (`VmLck`); zero where the system does not say.
pub(crate) fn locked_now() -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

fn get(resource: Resource) -> io::Result<Limit> {
    let mut raw = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live `rlimit` of this frame, which is all that the call writes to.
    if unsafe { libc::getrlimit(resource, &raw mut raw) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Limit { soft: from_raw(raw.rlim_cur), hard: from_raw(raw.rlim_max) })
}

fn set(resource: Resource, limit: Limit) -> io::Result<()> {
    let raw = libc::rlimit { rlim_cur: to_raw(limit.soft), rlim_max: to_raw(limit.hard) };
    // SAFETY: the pointer is to a live `rlimit` of this frame, which the call only reads.
    if unsafe { libc::setrlimit(resource, &raw const raw) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

const fn from_raw(value: libc::rlim_t) -> u64 {
    if value == libc::RLIM_INFINITY { u64::MAX } else { value }
}

const fn to_raw(value: u64) -> libc::rlim_t {
    if value == u64::MAX { libc::RLIM_INFINITY } else { value }
}

fn held_files() -> io::Result<u64> {
    // Since Linux 6.2 the directory's size is the number of open files: one call, whatever their number.
    match fs::metadata("/proc/self/fd")?.len() {
        0 => count_held_files(),
        held => Ok(held),
    }
}

fn count_held_files() -> io::Result<u64> {
    let mut entries = match fs::read_dir("/proc/self/fd") {
        // None is left to count with, so as many are held as may be, or more.
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => return Ok(get(libc::RLIMIT_NOFILE)?.soft),
        entries => entries?,
    };
    let entries = entries.try_fold(0_u64, |n, entry| entry.map(|_| n + 1))?;
    // One of them is the directory being read.
    Ok(entries.saturating_sub(1))
}

fn count_lines(mut file: impl Read) -> io::Result<u64> {
    let mut buffer = vec![0_u8; 64 << 10];
    let mut lines = 0;
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(lines),
            Ok(n) => lines += buffer[..n].iter().map(|&byte| u64::from(byte == b'\n')).sum::<u64>(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn number(text: &str) -> io::Result<u64> {
    text.trim().parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, format!("not a number: {text:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::tests::alone;

    #[test]
    fn infinity_survives_both_ways() {
        assert_eq!(from_raw(libc::RLIM_INFINITY), u64::MAX);
        assert_eq!(to_raw(u64::MAX), libc::RLIM_INFINITY);
        assert_eq!(from_raw(to_raw(4096)), 4096);
    }

    #[test]
    fn lines_are_counted_across_reads() {
        assert_eq!(count_lines(&b""[..]).unwrap(), 0);
        assert_eq!(count_lines(&b"a\nb\n"[..]).unwrap(), 2);
        let long = "x\n".repeat(100_000);
        assert_eq!(count_lines(long.as_bytes()).unwrap(), 100_000);
    }

    #[test]
    fn numbers_are_numbers() {
        assert_eq!(number("65530\n").unwrap(), 65530);
        assert_eq!(number("max\n").unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn held_files_are_counted_exactly() {
        alone("sys::limits::tests::held_files_are_counted_exactly", || {
            let before = held_files().unwrap();
            assert_eq!(before, count_held_files().unwrap());
            let files: Vec<_> = (0..37).map(|_| File::open("/dev/null").unwrap()).collect();
            assert_eq!(held_files().unwrap(), before + 37);
            assert_eq!(count_held_files().unwrap(), before + 37);
            drop(files);
            assert_eq!(ThisProcess.open_files().unwrap().held, before);
        });
    }

    #[test]
    fn files_are_counted_when_none_is_left() {
        alone("sys::limits::tests::files_are_counted_when_none_is_left", || {
            let hard = get(libc::RLIMIT_NOFILE).unwrap().hard;
            set(libc::RLIMIT_NOFILE, Limit { soft: 64, hard }).unwrap();
            let files: Vec<_> = core::iter::from_fn(|| File::open("/dev/null").ok()).collect();
            assert_eq!(count_held_files().unwrap(), 64);
            // One may have a number above the limit, from before.
            assert!(held_files().unwrap() >= 64);
            drop(files);
            assert!(count_held_files().unwrap() < 64);
        });
    }

    #[test]
    fn the_soft_limit_goes_up_to_the_hard_one_and_no_further() {
        alone("sys::limits::tests::the_soft_limit_goes_up_to_the_hard_one_and_no_further", || {
            set(libc::RLIMIT_NOFILE, Limit { soft: 100, hard: 200 }).unwrap();
            let read = || ThisProcess.open_files().map(|files| (files.soft, files.hard)).unwrap();
            assert_eq!(read(), (100, 200));
            ThisProcess.raise_open_files(200).unwrap();
            assert_eq!(read(), (200, 200));
            assert!(ThisProcess.raise_open_files(201).is_err());
            assert_eq!(read(), (200, 200));
        });
    }

    #[test]
    fn maps_are_counted() {
        alone("sys::limits::tests::maps_are_counted", || {
            let before = ThisProcess.maps().unwrap();
            assert!(before.held > 5 && before.limit > before.held, "{before:?}");
            // Shared mappings of different files never merge, so each is one entry.
            let file = crate::sys::map::memfd().unwrap();
            crate::sys::map::fill_file(&file, 4096, |_| {}).unwrap();
            let maps: Vec<_> = (0..40).map(|_| crate::sys::map::map_file_anywhere(4096, &file).unwrap()).collect();
            // A few others may have merged meanwhile.
            assert!(ThisProcess.maps().unwrap().held > before.held + 35, "{maps:?}");
        });
    }

    #[test]
    fn the_limit_of_locked_memory() {
        alone("sys::limits::tests::the_limit_of_locked_memory", || {
            let hard = locked_memory().unwrap().hard;
            set(libc::RLIMIT_MEMLOCK, Limit { soft: 12_288.min(hard), hard }).unwrap();
            assert_eq!(locked_memory().unwrap(), Limit { soft: 12_288.min(hard), hard });
        });
    }
}
