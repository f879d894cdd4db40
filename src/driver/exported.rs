//! File descriptors that drivers hand out for handles.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::{Call, DriverError, DriverErrorKind, DriverResult};

/// The descriptor of an exported handle, closed on exec: a program started from here has no use for the memory and would
/// keep it from being freed.
///
/// # Safety
/// `fd` is negative, or open and nobody else's.
pub(super) unsafe fn adopt_exported(fd: i32) -> DriverResult<OwnedFd> {
    let failed = |why: String| DriverError::new(Call::Export, DriverErrorKind::Other).with_detail(why);
    if fd < 0 {
        return Err(failed("the driver reported success and gave no file descriptor".to_owned()));
    }
    // SAFETY: the caller vouches that it is open and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the call sets a flag on an open descriptor.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) } == -1 {
        return Err(failed(format!("the descriptor cannot be closed on exec: {}", io::Error::last_os_error())));
    }
    Ok(fd)
}
