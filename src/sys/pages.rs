//! The pages under mapped memory: there or not, large or small, locked or not, and on which node.
//!
//! Addresses and sizes are multiples of the page size.

use core::ffi::{c_int, c_ulong, c_void};
use std::fs;
use std::io;
use std::sync::OnceLock;

use super::map::{checked, length, map_memory_anywhere, page_size, pointer, unmap};

/// `MADV_POPULATE_WRITE`, which the C library's headers may be too old for.
const POPULATE_WRITE: c_int = 23;
/// `MPOL_PREFERRED`.
const PREFERRED: c_int = 1;
/// How often a call is made again that the kernel wants made again: more than a passing shortage takes.
const TRIES: u64 = 100;
/// What a huge page is on x86-64, and a multiple of its size on most others.
const HUGE: u64 = 2 << 20;

/// How pages were put under memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Prefault {
    /// By a touch per huge page and, for what that leaves, one call of the kernel per part (`MADV_POPULATE_WRITE`, Linux
    /// 5.14).
    Populate,
    /// By touching every page, on kernels that do not know that call or only ever ask for another try.
    Touch,
}

/// Puts pages under memory that is mapped and was not touched yet; gives how, and how often the kernel asked for another
/// try.
///
/// # Safety
/// `[addr, addr + bytes)` is private memory of the caller's, mapped readable and writable, and nobody has a reference
/// into it: what is not populated by the kernel is written here, with zeros.
pub(crate) unsafe fn populate(addr: u64, bytes: u64) -> io::Result<(Prefault, u64)> {
    if !can_populate() {
        // SAFETY: the contract is the same.
        unsafe { touch(addr, bytes) };
        return Ok((Prefault::Touch, 0));
    }
    // A touch takes the lock on this mapping alone, and of memory in huge pages it puts all there; what it leaves, the call
    // below sees to. Several threads are twice as fast that way.
    // SAFETY: the contract is the same.
    unsafe { touch_each(addr, bytes, HUGE) };
    let len = length(bytes)?;
    let mut again = 0;
    loop {
        if again > TRIES {
            // SAFETY: the contract is the same.
            unsafe { touch(addr, bytes) };
            return Ok((Prefault::Touch, again));
        }
        // SAFETY: this advice puts pages under the caller's own memory and leaves what is in them.
        match checked(unsafe { libc::madvise(pointer(addr), len, POPULATE_WRITE) }) {
            Ok(()) => return Ok((Prefault::Populate, again)),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR | libc::EAGAIN) => again += 1,
                // The call reports what a touch would have been a signal for: memory that has run out.
                Some(libc::EFAULT) => return Err(io::Error::from_raw_os_error(libc::ENOMEM)),
                _ => return Err(error),
            },
        }
    }
}

/// Whether the kernel knows the call: asked once, of a page of its own, since it says the same of memory that may not be
/// written to.
fn can_populate() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let size = page_size();
        let Ok(page) = map_memory_anywhere(size) else { return false };
        // SAFETY: the page was mapped just now, for this.
        let known = checked(unsafe { libc::madvise(pointer(page), size as usize, POPULATE_WRITE) }).is_ok();
        // SAFETY: nobody else knows of it.
        let _ = unsafe { unmap(page, size) };
        known
    })
}

/// Writes a zero to every page.
///
/// # Safety
/// As for [`populate`].
pub(crate) unsafe fn touch(addr: u64, bytes: u64) {
    // SAFETY: the contract is the same.
    unsafe { touch_each(addr, bytes, page_size()) };
}

/// Writes a zero at the beginning and at every multiple of `step` from there.
///
/// # Safety
/// As for [`populate`].
unsafe fn touch_each(addr: u64, bytes: u64, step: u64) {
    for at in (addr..addr + bytes).step_by(step as usize) {
        let page = pointer(at).cast::<u8>();
        // SAFETY: the page is mapped writable and nobody else looks at it. Volatile, so that it happens.
        unsafe { page.write_volatile(0) };
    }
}

/// Advises the kernel to back memory with huge pages, or never to.
///
/// # Safety
/// `[addr, addr + bytes)` is mapped by the caller.
pub(crate) unsafe fn advise_huge(addr: u64, bytes: u64, huge: bool) -> io::Result<()> {
    let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
    let len = length(bytes)?;
    // SAFETY: this advice changes the size of pages and nothing that is in them.
    checked(unsafe { libc::madvise(pointer(addr), len, advice) })
}

/// Gives the pages under private memory back; what is read there then is zero.
///
/// # Safety
/// `[addr, addr + bytes)` is private memory of the caller's that nobody uses any more, and not locked.
pub(crate) unsafe fn discard(addr: u64, bytes: u64) -> io::Result<()> {
    let len = length(bytes)?;
    // SAFETY: the caller gives up what is in the memory.
    checked(unsafe { libc::madvise(pointer(addr), len, libc::MADV_DONTNEED) })
}

/// Locks memory, so that its pages stay. Gives how often the kernel asked for another try.
///
/// # Safety
/// `[addr, addr + bytes)` is mapped by the caller.
pub(crate) unsafe fn lock(addr: u64, bytes: u64) -> io::Result<u64> {
    let len = length(bytes)?;
    let mut again = 0;
    loop {
        // SAFETY: locking leaves the contents alone.
        match checked(unsafe { libc::mlock(pointer(addr), len) }) {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) && again < TRIES => again += 1,
            Err(error) => {
                // Pages before the one that failed stay locked otherwise.
                // SAFETY: the range is the caller's and was not locked before.
                let _ = unsafe { unlock(addr, bytes) };
                return Err(error);
            }
            Ok(()) => return Ok(again),
        }
    }
}

/// Unlocks memory.
///
/// # Safety
/// `[addr, addr + bytes)` is mapped by the caller.
pub(crate) unsafe fn unlock(addr: u64, bytes: u64) -> io::Result<()> {
    let len = length(bytes)?;
    // SAFETY: unlocking leaves the contents alone.
    checked(unsafe { libc::munlock(pointer(addr), len) })
}

/// Lets pages of memory that come later come from one NUMA node, as long as it has any. An error if there is no such
/// node.
///
/// # Safety
/// `[addr, addr + bytes)` is mapped by the caller.
pub(crate) unsafe fn prefer_node(addr: u64, bytes: u64, node: u32) -> io::Result<()> {
    const BITS: u32 = c_ulong::BITS;
    // 1024 nodes are the most a kernel can be built for.
    let mut mask: [c_ulong; 1024 / BITS as usize] = [0; 1024 / BITS as usize];
    let word = mask.get_mut((node / BITS) as usize).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    *word = 1 << (node % BITS);
    let (at, len): (*mut c_void, c_ulong) = (pointer(addr), length(bytes)? as c_ulong);
    // The kernel takes one bit less than it is told.
    let most: c_ulong = 1024 + 1;
    // SAFETY: the mask has as many bits as is said, less the one; the call only notes where later pages come from.
    let rc = unsafe { libc::syscall(libc::SYS_mbind, at, len, PREFERRED, mask.as_ptr(), most, 0 as c_int) };
    checked(c_int::try_from(rc).unwrap_or(-1))
}

/// The NUMA nodes with memory, as the kernel lists them: `0-1`. None where it does not say.
pub(crate) fn nodes() -> Option<String> {
    fs::read_to_string("/sys/devices/system/node/has_memory").ok().map(|text| text.trim().to_owned())
}

/// The page faults that the calling thread has had so far, those that read from a disk among them.
pub(crate) fn faults() -> u64 {
    let mut usage = core::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to room for one `rusage`, which is all that the call writes to.
    if unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) } != 0 {
        return 0;
    }
    // SAFETY: it was zeroed, which is a value of a struct of integers, and the call filled it.
    let usage = unsafe { usage.assume_init() };
    u64::try_from(usage.ru_minflt).unwrap_or(0) + u64::try_from(usage.ru_majflt).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// How many of the pages are there.
    fn resident(addr: u64, bytes: u64) -> usize {
        let mut pages = vec![0_u8; (bytes / page_size()) as usize];
        // SAFETY: the vector has a byte for each page.
        let rc = unsafe { libc::mincore(pointer(addr), bytes as usize, pages.as_mut_ptr()) };
        assert_eq!(rc, 0);
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    fn locked() -> u64 {
        let text = fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().trim().parse::<u64>().unwrap() << 10
    }

    #[test]
    fn pages_come_by_either_way_and_go() {
        let bytes = 4 * MIB;
        let all = (bytes / page_size()) as usize;
        let addr = map_memory_anywhere(bytes).unwrap();
        // SAFETY: the memory is this test's own, and nobody has a reference into it.
        unsafe { advise_huge(addr, bytes, false) }.unwrap();
        assert_eq!(resident(addr, bytes), 0);
        // SAFETY: as above.
        let (_, again) = unsafe { populate(addr, bytes - MIB) }.unwrap();
        assert_eq!((resident(addr, bytes), again), (all * 3 / 4, 0));
        // SAFETY: as above.
        unsafe { touch(addr + bytes - MIB, MIB) };
        assert_eq!(resident(addr, bytes), all);
        // SAFETY: as above.
        unsafe { discard(addr, bytes) }.unwrap();
        assert_eq!(resident(addr, bytes), 0);
        // SAFETY: as above.
        unsafe { unmap(addr, bytes) }.unwrap();
    }

    #[test]
    fn faults_are_the_threads_own() {
        let addr = map_memory_anywhere(MIB).unwrap();
        // SAFETY: the memory is this test's own.
        unsafe { advise_huge(addr, MIB, false) }.unwrap();
        let before = faults();
        std::thread::scope(|scope| {
            // SAFETY: as above.
            scope.spawn(|| unsafe { touch(addr, MIB / 2) });
        });
        let between = faults();
        // SAFETY: as above.
        unsafe { touch(addr + MIB / 2, MIB / 2) };
        let pages = MIB / 2 / page_size();
        assert!(between - before < pages && faults() - between >= pages, "{before} {between} {}", faults());
        // SAFETY: as above.
        unsafe { unmap(addr, MIB) }.unwrap();
    }

    #[test]
    fn locking_counts_and_is_undone_where_it_fails() {
        crate::sys::tests::alone("sys::pages::tests::locking_counts_and_is_undone_where_it_fails", || {
            let addr = map_memory_anywhere(MIB).unwrap();
            // SAFETY: the memory is this test's own.
            assert_eq!(unsafe { lock(addr, MIB) }.unwrap(), 0);
            assert_eq!(locked(), MIB);
            // SAFETY: as above.
            unsafe { unlock(addr, MIB) }.unwrap();
            assert_eq!(locked(), 0);
            // The second half of a range that is half mapped.
            // SAFETY: as above.
            unsafe { unmap(addr + MIB / 2, MIB / 2) }.unwrap();
            // SAFETY: only this test's own memory is there, and what is not is what the call is to find.
            assert_eq!(unsafe { lock(addr, MIB) }.unwrap_err().raw_os_error(), Some(libc::ENOMEM));
            assert_eq!(locked(), 0, "the half that was locked");
        });
    }

    #[test]
    fn a_node_that_is_there_and_one_that_is_not() {
        let addr = map_memory_anywhere(MIB).unwrap();
        // SAFETY: the memory is this test's own.
        match unsafe { prefer_node(addr, MIB, 0) } {
            Ok(()) => {}
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOSYS), "a kernel without NUMA"),
        }
        for node in [1023, 1024, u32::MAX] {
            // SAFETY: as above.
            unsafe { prefer_node(addr, MIB, node) }.unwrap_err();
        }
        // SAFETY: as above.
        unsafe { unmap(addr, MIB) }.unwrap();
    }
}
