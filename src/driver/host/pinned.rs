//! Locked memory: `mlock`, and its limit.

use std::io;

use super::HostDriver;
use super::error::failed;
use crate::bytes::Bytes;
use crate::driver::pins::Origin;
use crate::driver::{Call, DriverError, DriverErrorKind as Kind, DriverResult, PinFlags};
use crate::sys::{limits, map, pages};

impl HostDriver {
    /// Refuses what host memory has not.
    fn check_flags(call: Call, flags: PinFlags) -> DriverResult<()> {
        let refusal = match flags {
            PinFlags { write_combined: true, .. } => "the host cannot map memory past its caches",
            PinFlags { read_only: true, .. } => "the host is the device here, and is never kept from writing",
            // All there is is in everybody's reach already.
            _ => return Ok(()),
        };
        Err(DriverError::new(call, Kind::NotSupported).with_detail(refusal))
    }

    pub(super) fn lock_pages(&self, addr: u64, bytes: u64, flags: PinFlags) -> DriverResult<()> {
        Self::check_flags(Call::Pin, flags)?;
        self.pins.lock(addr, bytes, || {
            // SAFETY: the caller vouches that these are its pages, mapped.
            let locked = unsafe { pages::lock(addr, bytes) };
            locked.map(drop).map_err(|error| not_locked(Call::Pin, &error, bytes))
        })
    }

    pub(super) fn unlock_pages(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.pins.unlock(Call::Unpin, addr, bytes, Origin::Registered, || {
            // SAFETY: the book bears out that the range was locked here, and the caller that it is still mapped.
            let unlocked = self.with_spare_entry(|| unsafe { pages::unlock(addr, bytes) });
            unlocked.map_err(|error| failed(Call::Unpin, &error, Bytes::new(bytes)))
        })
    }

    pub(super) fn allocate_locked(&self, bytes: u64, flags: PinFlags) -> DriverResult<u64> {
        Self::check_flags(Call::AllocatePinned, flags)?;
        let size = bytes.checked_next_multiple_of(map::page_size()).filter(|size| *size > 0);
        let size =
            size.ok_or_else(|| DriverError::misuse(Call::AllocatePinned)(format!("a block of {bytes} bytes")))?;
        let system = |error: io::Error| not_locked(Call::AllocatePinned, &error, size);
        let addr = map::map_memory_anywhere(size).map_err(system)?;
        // SAFETY: it was mapped just now; a child that wrote to it would get pages of its own, which nobody locked.
        let kept = unsafe { map::keep_from_children(addr, size) };
        // SAFETY: it was mapped just now.
        let locked = kept.and_then(|()| unsafe { pages::lock(addr, size) });
        if let Err(error) = locked {
            let error = system(error);
            // SAFETY: nobody was told of the mapping yet.
            let _ = self.with_spare_entry(|| unsafe { map::unmap(addr, size) });
            return Err(error);
        }
        // The kernel chose addresses where nothing was, so that nothing of ours can be there.
        self.pins.restore(addr, bytes, Origin::Allocated);
        Ok(addr)
    }

    pub(super) fn free_locked(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.pins.unlock(Call::FreePinned, addr, bytes, Origin::Allocated, || {
            let size = bytes.next_multiple_of(map::page_size());
            // SAFETY: the book bears out that the block is this driver's, and the caller uses it no more.
            let unmapped = self.with_spare_entry(|| unsafe { map::unmap(addr, size) });
            unmapped.map_err(|error| failed(Call::FreePinned, &error, Bytes::new(bytes)))
        })
    }

    pub(super) fn locked_address(&self, addr: u64) -> DriverResult<u64> {
        match self.pins.holding(addr) {
            Some(_) => Ok(addr),
            None => Err(DriverError::misuse(Call::PinnedDevicePtr)(format!("nothing is locked at {addr:#x}"))),
        }
    }
}

/// What is behind an error of `mlock`, which says "no memory" of the limit and of memory alike.
fn not_locked(call: Call, error: &io::Error, bytes: u64) -> DriverError {
    let asked = Bytes::new(bytes);
    let code = error.raw_os_error().unwrap_or(0);
    if !matches!(code, libc::ENOMEM | libc::EPERM | libc::EAGAIN) {
        return failed(call, error, asked);
    }
    let (Ok(limit), locked) = (limits::locked_memory(), limits::locked_now()) else {
        return failed(call, error, asked);
    };
    if code != libc::EPERM && locked.saturating_add(bytes) <= limit.soft {
        return failed(call, error, asked);
    }
    let size = |limit: u64| if limit == u64::MAX { "unlimited".to_owned() } else { Bytes::new(limit).to_string() };
    let detail = format!(
        "{asked} asked, {} locked, and RLIMIT_MEMLOCK is {} (hard {}); raise it (ulimit -l, or LimitMEMLOCK= of a \
         systemd unit) or give the process CAP_IPC_LOCK",
        Bytes::new(locked),
        size(limit.soft),
        size(limit.hard)
    );
    let name = if code == libc::EPERM { "EPERM" } else { "ENOMEM" };
    DriverError::new(call, Kind::LockLimit).with_code(i64::from(code), name).with_detail(detail)
}
