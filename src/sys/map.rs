//! Addresses and the memory under them: `mmap` and its family, and memory that lives in a file descriptor.
//!
//! What makes something new is safe. What changes memory in place is `unsafe`, since only the caller can know that
//! nobody relies on what is there. Addresses are `u64`; they come from here with their provenance exposed.

use core::ffi::c_int;
use core::ptr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

const RESERVED: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// The size of a page.
pub(crate) fn page_size() -> u64 {
    // SAFETY: this call reads a constant of the system and touches no memory of ours.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// Reserves `bytes` of addresses at a multiple of `align`, a power of two. Both are multiples of the page size.
/// Nothing is behind them, and touching them faults.
pub(crate) fn reserve(bytes: u64, align: u64) -> io::Result<u64> {
    // The kernel aligns to pages: take enough that an aligned span lies inside, and give the rest back.
    let slack = align.saturating_sub(page_size());
    let all = bytes.checked_add(slack).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    let base = map_new(all, libc::PROT_NONE, RESERVED, None)?;
    let addr = base.next_multiple_of(align);
    let (before, after) = (addr - base, slack - (addr - base));
    // Cutting can fail at the limit of the memory map: where the mapping has merged with its neighbours, the cut needs
    // one entry more. If then even the rest cannot be given back, addresses stay taken, with nothing behind them.
    // SAFETY: this is the head of the mapping made above, which nobody else knows of.
    if let Err(error) = unsafe { unmap_if_any(base, before) } {
        // SAFETY: this is the mapping made above, still whole.
        let _ = unsafe { unmap(base, all) };
        return Err(error);
    }
    // SAFETY: this is the tail of the mapping made above.
    if let Err(error) = unsafe { unmap_if_any(addr + bytes, after) } {
        // SAFETY: this is the mapping made above without its head.
        let _ = unsafe { unmap(addr, bytes + after) };
        return Err(error);
    }
    Ok(addr)
}

/// Maps all of `file` somewhere, readable and writable.
pub(crate) fn map_file_anywhere(bytes: u64, file: &impl AsFd) -> io::Result<u64> {
    map_new(bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, Some(file))
}

/// Maps `bytes` of private memory somewhere, readable and writable, zero, and not there before it is touched.
pub(crate) fn map_memory_anywhere(bytes: u64) -> io::Result<u64> {
    map_new(bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, None)
}

/// Puts `file` at `addr`, without access yet, in place of what is there.
///
/// # Safety
/// `[addr, addr + bytes)` is reserved by the caller and not in use, and `file` has that many bytes.
pub(crate) unsafe fn map_file_at(addr: u64, bytes: u64, file: &impl AsFd) -> io::Result<()> {
    // SAFETY: the caller answers for what is replaced.
    unsafe { map(addr, bytes, libc::PROT_NONE, libc::MAP_SHARED | libc::MAP_FIXED, Some(file)) }.map(drop)
}

/// Puts a bare reservation at `addr` in place of what is there, in one call: at no time are the addresses free for
/// others to take.
///
/// # Safety
/// `[addr, addr + bytes)` is the caller's and nobody uses it any more.
pub(crate) unsafe fn reserve_at(addr: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: the caller answers for what is replaced.
    unsafe { map(addr, bytes, libc::PROT_NONE, RESERVED | libc::MAP_FIXED, None) }.map(drop)
}

/// Reserves `[addr, addr + bytes)` if nothing is there.
pub(crate) fn reserve_if_free(addr: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: with this flag nothing is replaced.
    let got = unsafe { map(addr, bytes, libc::PROT_NONE, RESERVED | libc::MAP_FIXED_NOREPLACE, None) }?;
    if got != addr {
        // A kernel from before 4.17 takes the flag for a hint.
        // SAFETY: this is the mapping made above, which nobody else knows of.
        unsafe { unmap(got, bytes) }?;
        return Err(io::Error::from_raw_os_error(libc::EEXIST));
    }
    Ok(())
}

/// Makes mapped memory readable and writable.
///
/// # Safety
/// `[addr, addr + bytes)` is mapped by the caller.
pub(crate) unsafe fn allow_access(addr: u64, bytes: u64) -> io::Result<()> {
    let (at, len) = (pointer(addr), length(bytes)?);
    // SAFETY: the caller's own memory gets more access, so that no access that was sound stops being so.
    checked(unsafe { libc::mprotect(at, len, libc::PROT_READ | libc::PROT_WRITE) })
}

/// Enters the pages of a mapped file into the page table, so that touching them does not fault. Only a matter of speed:
/// where it cannot be done (kernels before 5.14), nothing is lost.
///
/// # Safety
/// `[addr, addr + bytes)` is mapped by the caller, readable.
pub(crate) unsafe fn enter_pages(addr: u64, bytes: u64) {
    let Ok(len) = length(bytes) else { return };
    // Reading is enough: the pages of a shared file in memory are entered as its mapping allows, writable, and in
    // batches, which for writing they are not.
    // SAFETY: this advice reads the caller's own memory and changes none.
    let _ = unsafe { libc::madvise(pointer(addr), len, libc::MADV_POPULATE_READ) };
}

/// Keeps a mapping out of children forked later on; there, its addresses are free.
///
/// # Safety
/// `[addr, addr + bytes)` is mapped by the caller, and no child is meant to use it.
pub(crate) unsafe fn keep_from_children(addr: u64, bytes: u64) -> io::Result<()> {
    let (at, len) = (pointer(addr), length(bytes)?);
    // SAFETY: this advice changes what a later fork copies and nothing in this process.
    checked(unsafe { libc::madvise(at, len, libc::MADV_DONTFORK) })
}

/// Gives addresses and what is under them back.
///
/// # Safety
/// `[addr, addr + bytes)` is the caller's and nobody uses it any more.
pub(crate) unsafe fn unmap(addr: u64, bytes: u64) -> io::Result<()> {
    let (at, len) = (pointer(addr), length(bytes)?);
    // SAFETY: the caller gives these addresses up.
    checked(unsafe { libc::munmap(at, len) })
}

/// # Safety
/// As for [`unmap`].
unsafe fn unmap_if_any(addr: u64, bytes: u64) -> io::Result<()> {
    match bytes {
        0 => Ok(()),
        // SAFETY: the contract is the same.
        _ => unsafe { unmap(addr, bytes) },
    }
}

/// A file that exists in memory only, empty, closed on `exec`. It can be sealed.
pub(crate) fn memfd() -> io::Result<OwnedFd> {
    // SAFETY: the name is a NUL-terminated constant, and the call makes a new file.
    let fd = unsafe { libc::memfd_create(c"growspan".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    checked(fd.min(0))?;
    // SAFETY: the call has just returned this descriptor, so that it is open and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Puts pages under the first `bytes` of `file`, which grows to that size if it is smaller, and calls `done` with each
/// number of bytes that got theirs.
pub(crate) fn fill_file(file: &impl AsFd, bytes: u64, done: impl FnMut(u64)) -> io::Result<()> {
    let fd = file.as_fd();
    let allocate = |at, len| {
        let (at, len) = (offset(at)?, offset(len)?);
        // Once for the pages, and once more because that clears them here and not page by page at the first touch: the
        // kernel leaves them as they are the first time, in case it has to take them back.
        for _ in 0..2 {
            // SAFETY: the descriptor is borrowed, hence open, and no memory of ours is passed.
            checked(unsafe { libc::fallocate(fd.as_raw_fd(), 0, at, len) })?;
        }
        Ok(())
    };
    in_steps(bytes, allocate, done)
}

/// Older kernels let a signal interrupt the call, which then gives back all it had: a program that is sampled a thousand
/// times a second would never get a large file in one call. So the steps are bounded, and halved at an interruption.
fn in_steps(
    bytes: u64,
    mut allocate: impl FnMut(u64, u64) -> io::Result<()>,
    mut done: impl FnMut(u64),
) -> io::Result<()> {
    let mut step = 64_u64 << 20;
    let mut at = 0;
    while at < bytes {
        let len = step.min(bytes - at);
        match allocate(at, len) {
            Ok(()) => {
                at += len;
                done(len);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => step = (len / 2).max(page_size()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sees to it that `file` can never change its size again.
pub(crate) fn seal_size(file: &impl AsFd) -> io::Result<()> {
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    // SAFETY: the descriptor is borrowed, hence open, and no memory of ours is passed.
    checked(unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_ADD_SEALS, seals) })
}

/// Whether `file` can never become smaller. An error if it is not a file in memory.
pub(crate) fn is_sealed(file: &impl AsFd) -> io::Result<bool> {
    // SAFETY: the descriptor is borrowed, hence open, and no memory of ours is passed.
    let seals = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_GET_SEALS) };
    checked(seals.min(0))?;
    Ok(seals & libc::F_SEAL_SHRINK != 0)
}

/// A mapping for the sake of its entry in the memory map: dropping it frees one.
#[derive(Debug)]
pub(crate) struct SpareEntry(u64);

impl SpareEntry {
    pub(crate) fn new() -> io::Result<Self> {
        // A shared mapping never merges with its neighbours, so it surely has an entry of its own.
        map_new(page_size(), libc::PROT_NONE, libc::MAP_SHARED | libc::MAP_ANONYMOUS, None).map(Self)
    }
}

impl Drop for SpareEntry {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and nothing was ever put there.
        let _ = unsafe { unmap(self.0, page_size()) };
    }
}

/// A mapping where none was.
fn map_new(bytes: u64, access: c_int, flags: c_int, file: Option<&dyn AsFd>) -> io::Result<u64> {
    // SAFETY: the callers pass no `MAP_FIXED`, so that nothing is replaced.
    unsafe { map(0, bytes, access, flags, file) }
}

/// # Safety
/// If `flags` has `MAP_FIXED`, `[addr, addr + bytes)` is the caller's and nobody uses it any more.
unsafe fn map(addr: u64, bytes: u64, access: c_int, flags: c_int, file: Option<&dyn AsFd>) -> io::Result<u64> {
    let len = length(bytes)?;
    let fd = file.map_or(-1, |file| file.as_fd().as_raw_fd());
    // SAFETY: without `MAP_FIXED` the call only makes a mapping where none was; with it, the caller gave up what is
    // replaced. The descriptor is borrowed, hence open.
    let at = unsafe { libc::mmap(pointer(addr), len, access, flags, fd, 0) };
    if ptr::eq(at, libc::MAP_FAILED) {
        return Err(io::Error::last_os_error());
    }
    Ok(at.expose_provenance() as u64)
}

pub(super) fn pointer(addr: u64) -> *mut core::ffi::c_void {
    // An address comes from a pointer of this process, so it fits.
    ptr::with_exposed_provenance_mut(addr as usize)
}

pub(super) fn length(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))
}

fn offset(bytes: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
}

pub(super) fn checked(rc: c_int) -> io::Result<()> {
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::sys::tests::alone;

    const MIB: u64 = 1 << 20;

    /// The ranges and permissions of the memory map that meet `[addr, addr + bytes)`.
    fn entries(addr: u64, bytes: u64) -> Vec<(u64, u64, String)> {
        let text = fs::read_to_string("/proc/self/maps").unwrap();
        let entry = |line: &str| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?, rest[..4].to_owned()))
        };
        text.lines().filter_map(entry).filter(|(start, end, _)| *start < addr + bytes && *end > addr).collect()
    }

    #[test]
    fn reservations_are_aligned_and_trimmed() {
        alone("sys::map::tests::reservations_are_aligned_and_trimmed", || {
            for align in [page_size(), 2 * MIB, 64 * MIB, 1 << 30] {
                // An odd number of pages in between, so that the next one is not aligned by luck.
                let pad = reserve(page_size() * 3, page_size()).unwrap();
                let before = fs::read_to_string("/proc/self/statm").unwrap();
                let addr = reserve(6 * MIB, align).unwrap();
                let after = fs::read_to_string("/proc/self/statm").unwrap();
                assert!(addr != 0 && addr.is_multiple_of(align));
                let pages = |text: &str| text.split(' ').next().unwrap().parse::<u64>().unwrap();
                // The allocator may have grown a little for the texts; the slack is larger in all but the first case.
                assert!(pages(&after) - pages(&before) < 6 * MIB / page_size() + 256, "{align}: {before} {after}");
                for at in [(pad, page_size() * 3), (addr, 6 * MIB)] {
                    // SAFETY: these reservations are this test's own and nothing is in them.
                    unsafe { unmap(at.0, at.1) }.unwrap();
                }
            }
            assert_eq!(reserve(1 << 60, 2 * MIB).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
            assert_eq!(reserve(u64::MAX - 4095, 2 * MIB).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
        });
    }

    #[test]
    fn a_mapping_comes_and_goes_in_place() {
        let addr = reserve(6 * MIB, 2 * MIB).unwrap();
        let middle = addr + 2 * MIB;
        let file = memfd().unwrap();
        fill_file(&file, 2 * MIB, |_| {}).unwrap();
        let at = |addr| {
            let all = entries(addr, 2 * MIB);
            assert_eq!(all.len(), 1, "{all:?}");
            all[0].2.clone()
        };
        // SAFETY: the range is this test's own reservation and the file is as large.
        unsafe { map_file_at(middle, 2 * MIB, &file) }.unwrap();
        assert_eq!(at(middle), "---s");
        // SAFETY: the range was mapped above.
        unsafe { allow_access(middle, 2 * MIB) }.unwrap();
        assert_eq!(at(middle), "rw-s");
        assert_eq!(reserve_if_free(middle, 2 * MIB).unwrap_err().raw_os_error(), Some(libc::EEXIST));
        // SAFETY: the range was mapped above and is not used.
        unsafe { reserve_at(middle, 2 * MIB) }.unwrap();
        assert_eq!(at(middle), "---p");
        // SAFETY: the reservation is this test's own and nothing is in it.
        unsafe { unmap(addr, 6 * MIB) }.unwrap();
    }

    #[test]
    fn a_hole_is_taken_again() {
        alone("sys::map::tests::a_hole_is_taken_again", || {
            let addr = reserve(MIB, page_size()).unwrap();
            // SAFETY: the reservation is this test's own and nothing is in it.
            unsafe { unmap(addr, MIB) }.unwrap();
            reserve_if_free(addr, MIB).unwrap();
            assert_eq!(entries(addr, MIB)[0].2, "---p");
        });
    }

    #[test]
    fn filled_files_have_all_their_pages() {
        let file = memfd().unwrap();
        let mut steps = Vec::new();
        fill_file(&file, 130 * MIB, |n| steps.push(n)).unwrap();
        assert_eq!(steps, [64 * MIB, 64 * MIB, 2 * MIB]);
        let about = File::from(file.try_clone().unwrap()).metadata().unwrap();
        assert_eq!((about.len(), about.blocks() * 512), (130 * MIB, 130 * MIB));
    }

    #[test]
    fn the_seal_holds() {
        let file = memfd().unwrap();
        fill_file(&file, MIB, |_| {}).unwrap();
        assert!(!is_sealed(&file).unwrap());
        seal_size(&file).unwrap();
        assert!(is_sealed(&file).unwrap());
        let file = File::from(file);
        assert!(file.set_len(0).is_err() && file.set_len(2 * MIB).is_err());
        assert!(is_sealed(&File::open("/proc/self/status").unwrap()).is_err());
    }

    #[test]
    fn a_file_is_filled_under_a_storm_of_signals() {
        // A kernel that gets 4 MiB done between two signals, and takes back what it has of a step it cannot end.
        let (mut covered, mut interruptions) = (0, 0);
        let allocate = |at, len| {
            assert_eq!(at, covered, "a step was left out or taken twice");
            if len > 4 * MIB {
                interruptions += 1;
                return Err(io::Error::from_raw_os_error(libc::EINTR));
            }
            covered += len;
            Ok(())
        };
        let mut told = 0;
        in_steps(130 * MIB, allocate, |len| told += len).unwrap();
        assert_eq!((covered, told, interruptions), (130 * MIB, 130 * MIB, 4));
        let full = || Err(io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!(in_steps(MIB, |_, _| full(), |_| ()).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    }
}
