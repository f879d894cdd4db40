//! What can go wrong, in the words of the crate.

use core::fmt;
use std::io;

use crate::bytes::Bytes;
use crate::driver::{Call, DriverError, DriverErrorKind as Kind, ProcessLimits};
use crate::sys::limits::ThisProcess;

/// Why the host driver could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostError {
    /// The capacity asked for is more than all the memory of the machine or of a control group of this process.
    CapacityTooLarge {
        /// What was asked.
        asked: Bytes,
        /// What there is.
        total: Bytes,
    },
    /// The capacity is less than one chunk.
    CapacityTooSmall {
        /// What was asked.
        asked: Bytes,
        /// The smallest chunk.
        granularity: Bytes,
    },
    /// The granularity is not a power of two of at least a page.
    Granularity {
        /// What was asked.
        asked: Bytes,
        /// The size of a page.
        page: Bytes,
    },
    /// What is known of memory could not be read: the system's words.
    Unreadable(String),
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CapacityTooLarge { asked, total } => write!(
                f,
                "a capacity of {asked} was asked, and this process has {total} of memory in all; ask for less, or \
                 leave the capacity out to get half of what is available"
            ),
            Self::CapacityTooSmall { asked, granularity } => write!(
                f,
                "a capacity of {asked} was asked, which is less than one chunk of {granularity}; ask for more, or for a \
                 smaller granularity"
            ),
            Self::Granularity { asked, page } => write!(
                f,
                "a granularity of {asked} was asked; it has to be a power of two of at least one page ({page}), 2 MiB \
                 if it is left out"
            ),
            Self::Unreadable(error) => {
                write!(f, "the memory figures cannot be read ({error}); the host driver needs /proc to be mounted")
            }
        }
    }
}

impl core::error::Error for HostError {}

/// `call` failed in the system for want of something other than addresses.
pub(super) fn failed(call: Call, error: &io::Error, asked: Bytes) -> DriverError {
    described(call, error, asked, Kind::OutOfMemory)
}

/// `call` failed in the system; if for want of room, that was room for addresses.
pub(super) fn no_addresses(call: Call, error: &io::Error, asked: Bytes) -> DriverError {
    described(call, error, asked, Kind::OutOfAddresses)
}

fn described(call: Call, error: &io::Error, asked: Bytes, no_room: Kind) -> DriverError {
    let code = error.raw_os_error().unwrap_or(0);
    let (kind, name, detail) = match code {
        libc::EMFILE | libc::ENFILE => {
            let name = if code == libc::EMFILE { "EMFILE" } else { "ENFILE" };
            let detail = match ThisProcess.open_files() {
                Ok(files) => format!("{asked} asked, {} files open, limit {}", files.held, files.soft),
                Err(_) => format!("{asked} asked"),
            };
            (Kind::OutOfFiles, name, detail)
        }
        // The kernel says the same for want of memory, of addresses and of entries in the memory map.
        libc::ENOMEM => match entries_used_up(call) {
            Some(detail) => (Kind::OutOfMaps, "ENOMEM", detail),
            None => (no_room, "ENOMEM", format!("{asked} asked")),
        },
        libc::ENOSPC => (Kind::OutOfMemory, "ENOSPC", format!("{asked} asked")),
        libc::ENOSYS | libc::EPERM | libc::EACCES => (Kind::NotSupported, "", format!("{asked} asked: {error}")),
        libc::EINVAL => (Kind::InvalidValue, "EINVAL", format!("{asked} asked")),
        _ => (Kind::Other, "", format!("{asked} asked: {error}")),
    };
    DriverError::new(call, kind).with_code(i64::from(code), name).with_detail(detail)
}

/// The figures, if the call makes mappings and the memory map is full but for what other threads may just have freed.
fn entries_used_up(call: Call) -> Option<String> {
    let maps = ThisProcess.maps().ok().filter(|_| call != Call::Create)?;
    let full = maps.held.saturating_add(16) >= maps.limit;
    full.then(|| format!("{} entries held, limit {} (vm.max_map_count)", maps.held, maps.limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_errors_become_kinds() {
        for (code, kind) in [
            (libc::EMFILE, Kind::OutOfFiles),
            (libc::ENFILE, Kind::OutOfFiles),
            (libc::ENOMEM, Kind::OutOfMemory),
            (libc::ENOSPC, Kind::OutOfMemory),
            (libc::EPERM, Kind::NotSupported),
            (libc::EINVAL, Kind::InvalidValue),
            (libc::EIO, Kind::Other),
        ] {
            let error = failed(Call::Create, &io::Error::from_raw_os_error(code), Bytes::mib(2));
            assert_eq!((error.kind(), error.code()), (kind, Some(i64::from(code))));
            assert!(error.to_string().contains("2 MiB asked"), "{error}");
        }
        let error = no_addresses(Call::Reserve, &io::Error::from_raw_os_error(libc::ENOMEM), Bytes::gib(1));
        assert_eq!(error.kind(), Kind::OutOfAddresses);
    }

    #[test]
    fn opening_errors_say_what_to_do() {
        let error = HostError::CapacityTooLarge { asked: Bytes::gib(64), total: Bytes::gib(16) }.to_string();
        assert!(error.contains("64 GiB") && error.contains("16 GiB") && error.contains("ask for less"), "{error}");
        let error = HostError::Granularity { asked: Bytes::kib(6), page: Bytes::kib(4) }.to_string();
        assert!(error.contains("6 KiB") && error.contains("(4 KiB)") && error.contains("power of two"), "{error}");
    }
}
