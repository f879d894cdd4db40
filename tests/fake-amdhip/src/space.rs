//! Addresses: real ones of this process, that nothing can be read at.

use core::ffi::c_void;
use std::fs::File;
use std::os::fd::AsRawFd;

use crate::misuse::broken;

/// What reservations of this size and more are aligned to without being asked.
const USUAL_ALIGNMENT: usize = 2 << 20;
const PAGE: usize = 4096;

/// Maps `len` bytes that cannot be touched; `hint` 0 is anywhere, otherwise there or nowhere.
fn map_nothing(hint: usize, len: usize) -> Option<usize> {
    let exactly = if hint == 0 { 0 } else { libc::MAP_FIXED_NOREPLACE };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | exactly;
    let hint: *mut c_void = core::ptr::without_provenance_mut(hint);
    // SAFETY: asks for new addresses; `MAP_FIXED_NOREPLACE` takes none that are in use.
    let at = unsafe { libc::mmap(hint, len, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED { None } else { Some(at.addr()) }
}

/// Gives addresses back. `len` may be 0.
fn unmap(at: usize, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: callers pass what `map_nothing` returned, or a part of it, once; nothing can be read there, so nobody has a
    // reference into it.
    let failed = unsafe { libc::munmap(core::ptr::without_provenance_mut(at), len) } != 0;
    if failed {
        broken(format_args!("cannot give addresses back: {}", std::io::Error::last_os_error()));
    }
}

/// Reserves `len` bytes of addresses, a multiple of a page: at `hint` if that is free and not 0, else anywhere.
///
/// Where the caller asks for an alignment, the address has it and no more, so that nobody comes to rely on more.
pub(crate) fn reserve(len: usize, alignment: usize, hint: usize) -> Option<usize> {
    if hint != 0
        && hint.is_multiple_of(PAGE)
        && let Some(at) = map_nothing(hint, len)
    {
        if at == hint {
            return Some(at);
        }
        // A kernel that does not know the flag takes the hint for a wish.
        unmap(at, len);
    }
    let usual = if len < USUAL_ALIGNMENT { PAGE } else { USUAL_ALIGNMENT };
    let alignment = alignment.max(usual);
    let room = alignment.checked_mul(2)?;
    let all = len.checked_add(room)?;
    let start = map_nothing(0, all)?;
    // The first address from the start on that is an odd multiple of the alignment.
    let before = alignment.wrapping_sub(start) & (room - 1);
    unmap(start, before);
    unmap(start + before + len, room - before);
    Some(start + before)
}

/// Ends a reservation of [`reserve`].
pub(crate) fn free(at: usize, len: usize) {
    unmap(at, len);
}

/// Maps a part of a file over reserved addresses, still with no access.
pub(crate) fn show(at: usize, len: usize, file: &File, offset: u64) -> bool {
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    let place: *mut c_void = core::ptr::without_provenance_mut(at);
    // SAFETY: the caller passes a part of a live reservation of this module, where nothing can be read and so nothing is
    // referred to; it stays so.
    let at = unsafe { libc::mmap(place, len, libc::PROT_NONE, flags, file.as_raw_fd(), offset.cast_signed()) };
    at != libc::MAP_FAILED
}

/// Ends what [`show`] did: the addresses are reserved as before.
pub(crate) fn hide(at: usize, len: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let place: *mut c_void = core::ptr::without_provenance_mut(at);
    // SAFETY: the caller passes a part of a live reservation of this module, where nothing can be read and so nothing is
    // referred to; it stays so.
    let at = unsafe { libc::mmap(place, len, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        broken(format_args!("cannot end a mapping: {}", std::io::Error::last_os_error()));
    }
}

/// A part of a file of ours that is mapped somewhere.
#[derive(Debug)]
pub(crate) struct FileMapping {
    pub(crate) inode: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// All parts of files of ours that this process maps now.
///
/// # Errors
/// If the kernel's list cannot be read, for instance because the process may open no more files.
pub(crate) fn file_mappings() -> std::io::Result<Vec<FileMapping>> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    Ok(maps.lines().filter(|line| line.contains("/memfd:fake-amdhip")).filter_map(file_mapping).collect())
}

/// Reads `start-end perms offset major:minor inode path`.
fn file_mapping(line: &str) -> Option<FileMapping> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let offset = fields.nth(1)?;
    let inode = fields.nth(1)?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    Some(FileMapping { inode: inode.parse().ok()?, offset: hex(offset)?, len: hex(end)? - hex(start)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_aligned_as_asked_and_no_more() {
        for (len, alignment, exactly) in [
            (PAGE, 0, PAGE),
            (2 << 20, 0, 2 << 20),
            (64 << 20, 0, 2 << 20),
            (PAGE, 1 << 16, 1 << 16),
            (8 << 20, 1 << 30, 1 << 30),
        ] {
            let at = reserve(len, alignment, 0).unwrap();
            assert!(at % (2 * exactly) == exactly, "{at:#x} for {len} at {alignment}");
            free(at, len);
        }
    }

    #[test]
    fn a_hint_is_taken_if_it_is_free_and_never_by_force() {
        // Far from where the kernel puts what has no wish, so that no other test's thread takes it.
        let wish = 0x1234_5678_9000;
        let at = reserve(4 * PAGE, 0, wish).unwrap();
        assert_eq!(at, wish);
        let elsewhere = reserve(4 * PAGE, 0, wish).unwrap();
        assert_ne!(elsewhere, wish);
        free(at, 4 * PAGE);
        free(elsewhere, 4 * PAGE);
        assert_eq!(reserve(4 * PAGE, 0, wish), Some(wish));
        free(wish, 4 * PAGE);
        assert_ne!(reserve(4 * PAGE, 0, wish + 1), Some(wish + 1), "not a page");
    }

    #[test]
    fn the_kernels_lines_are_read() {
        let line = "7f0000200000-7f0000400000 ---s 00a00000 00:01 1034 /memfd:fake-amdhip-device (deleted)";
        let map = file_mapping(line).unwrap();
        assert_eq!((map.inode, map.offset, map.len), (1034, 0xa0_0000, 0x20_0000));
    }
}
