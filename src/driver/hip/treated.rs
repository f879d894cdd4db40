//! Calls that need more than the runtime's own: what it does wrong, or says wrong, is treated here.

use core::ptr;

use super::book::{Reserved, Seen, pointer};
use super::calls::size;
use super::error::{Code, check};
use super::ffi::{self, hipError_t, hipMemAccessDesc};
use super::library::Vmm;
use super::quirks::Quirk;
use super::{HipDriver, held};
use crate::bytes::Bytes;
use crate::driver::{Call, Driver, DriverError, DriverErrorKind, DriverResult, ProcessLimits};
use crate::sys::limits::ThisProcess;

/// Entries of the memory map that other threads may be about to take.
const NEARLY: u64 = 16;
/// Files that a call opens for itself alone, and so needs beyond the one that stays.
const NEARLY_FILES: u64 = 2;

impl HipDriver {
    /// Reserves `bytes`, with an alignment that the runtime may take or not.
    fn reserve_raw(&self, vmm: &Vmm, bytes: u64, align: u64) -> Result<Reserved, Code> {
        let (len, align) = (size(bytes)?, size(align)?);
        let ask = || {
            let mut addr = ptr::null_mut();
            // SAFETY: the pointer is valid for the write; no address is asked for and there are no flags.
            let result = check(unsafe { (vmm.hipMemAddressReserve)(&raw mut addr, len, align, ptr::null_mut(), 0) });
            result.map(|()| Reserved { addr: addr.expose_provenance() as u64, bytes, refused: false })
        };
        // It may be us who have the addresses.
        ask().or_else(|code| if held::let_go_of_all() { ask() } else { Err(code) })
    }

    /// Frees what was reserved: the callers have seen to it that nothing is mapped there.
    pub(super) fn free_raw(&self, vmm: &Vmm, Reserved { addr, bytes, .. }: Reserved) -> Result<(), Code> {
        let len = size(bytes)?;
        // SAFETY: the callers pass what the runtime reserved, once, with nothing mapped under it and nobody using it.
        check(unsafe { (vmm.hipMemAddressFree)(pointer(addr), len) })?;
        if self.rows.has(Quirk::LateRelease) {
            held::hold(addr, bytes);
        }
        Ok(())
    }

    /// Reserves `bytes` at a multiple of `align`, a power of two, with more around them if it must be.
    pub(super) fn reserve_aligned(&self, vmm: &Vmm, bytes: u64, align: u64) -> Result<(u64, Reserved), Code> {
        held::let_go_of_old();
        let by_hand = self.rows.has(Quirk::AlignByHand);
        let raw = self.reserve_raw(vmm, bytes, if by_hand { 0 } else { align })?;
        if !by_hand || raw.addr.is_multiple_of(align) {
            return Ok((raw.addr, raw));
        }
        if let Err(code) = self.free_raw(vmm, raw) {
            tracing::warn!(device = %self.info.id(), %code, bytes, "the runtime keeps addresses that were not aligned");
        }
        let raw = self.reserve_raw(vmm, bytes.checked_add(align).ok_or(Code(ffi::hipErrorOutOfMemory))?, 0)?;
        // No address is so high; what is one all the same is refused by whoever asked.
        Ok((raw.addr.checked_next_multiple_of(align).unwrap_or(raw.addr), raw))
    }

    /// What the process has run out of, if it is not memory: a kind, and the figures.
    fn other_shortage() -> Option<(DriverErrorKind, String)> {
        if let Ok(files) = ThisProcess.open_files()
            && files.held.saturating_add(NEARLY_FILES) >= files.soft
        {
            return Some((DriverErrorKind::OutOfFiles, format!("{} files open, limit {}", files.held, files.soft)));
        }
        let maps = ThisProcess.maps().ok().filter(|maps| maps.held.saturating_add(NEARLY) >= maps.limit)?;
        Some((DriverErrorKind::OutOfMaps, format!("{} map entries held, limit {}", maps.held, maps.limit)))
    }

    /// What is behind `hipErrorOutOfMemory` from creating, which the runtime says of any failure.
    pub(super) fn look_into(&self, error: DriverError, bytes: u64) -> DriverError {
        let asked = Bytes::new(bytes);
        if error.kind() != DriverErrorKind::OutOfMemory || !self.rows.has(Quirk::AnyFailureIsOutOfMemory) {
            return error.with_detail(format!("{asked} asked"));
        }
        if let Some((kind, figures)) = Self::other_shortage() {
            return renamed(&error, kind).with_detail(format!("{asked} asked, {figures}"));
        }
        let free = self.memory().ok().map(|memory| Bytes::new(memory.free).to_string());
        error.with_detail(format!("{asked} asked, {} free", free.as_deref().unwrap_or("an unknown amount")))
    }

    /// Grants `device` access to one mapping.
    pub(super) fn grant(vmm: &Vmm, device: i32, addr: u64, bytes: u64) -> Result<(), Code> {
        let access = hipMemAccessDesc { location: Self::location(device), flags: ffi::hipMemAccessFlagsProtReadWrite };
        let bytes = size(bytes)?;
        // SAFETY: the callers have had it borne out by the book that this is one whole mapping; the pointer is valid for
        // the read of the one description that is announced.
        check(unsafe { (vmm.hipMemSetAccess)(pointer(addr), bytes, &raw const access, 1) })
    }

    /// What a refused access is about: the device, and what the map before it may have run out of.
    pub(super) fn not_granted(
        &self,
        vmm: &Vmm,
        error: &DriverError,
        device: i32,
        addr: u64,
        bytes: u64,
    ) -> DriverError {
        let about = match self.is_there(vmm, addr, bytes) {
            Ok(false) => Some("nothing was mapped".to_owned()),
            _ => (device != self.device).then(|| format!("for its peer, device {device}")),
        };
        Self::or_shortage(error, about)
    }

    /// A refused map or access, named by what the process has run out of if it has: the runtime opens a file for either,
    /// and from 7.0 on takes an entry of the memory map, and has no code for the want of them.
    pub(super) fn or_shortage(error: &DriverError, about: Option<String>) -> DriverError {
        let says_nothing = matches!(
            error.kind(),
            DriverErrorKind::InvalidValue | DriverErrorKind::OutOfMemory | DriverErrorKind::Other
        );
        let shortage = if says_nothing { Self::other_shortage() } else { None };
        let named = shortage.as_ref().map_or_else(|| error.clone(), |(kind, _)| renamed(error, *kind));
        let details: Vec<_> = about.into_iter().chain(shortage.map(|(_, figures)| figures)).collect();
        if details.is_empty() { named } else { named.with_detail(details.join(": ")) }
    }

    /// Asks the runtime whether a mapping that it said it had made is there, where it may not be. Returns whether it is.
    pub(super) fn is_there(&self, vmm: &Vmm, addr: u64, bytes: u64) -> DriverResult<bool> {
        let known = Self::checked(Call::Unmap, self.book.lock().layout.exactly(addr, bytes).map(|mapped| mapped.seen))?;
        if known != Seen::Unproven || !self.rows.has(Quirk::SilentMap) {
            return Ok(known != Seen::Phantom);
        }
        let location = Self::location(self.device);
        let there = self.within(Call::Unmap, |_| {
            let mut flags = 0;
            // SAFETY: both pointers are valid, one for the write of the flags, the other for the read of a location. Of
            // an address where nothing is mapped the runtime says so.
            match check(unsafe { (vmm.hipMemGetAccess)(&raw mut flags, &raw const location, pointer(addr)) }) {
                Err(Code(ffi::hipErrorInvalidValue)) => {
                    self.hip.forget_error();
                    Ok(false)
                }
                other => other.map(|()| true),
            }
        })?;
        if !there {
            let kept = self.rows.has(Quirk::KeptReference);
            tracing::debug!(device = %self.info.id(), addr, bytes, kept, "the runtime mapped nothing and said it had");
            if !kept {
                tracing::warn!(device = %self.info.id(), bytes, "the runtime may keep the memory of a map that failed");
            }
            self.book.lock().saw(addr, bytes, Seen::Phantom, kept);
        }
        Ok(there)
    }
}

/// The same error, of another kind.
pub(super) fn renamed(error: &DriverError, kind: DriverErrorKind) -> DriverError {
    let code = Code(error.code().and_then(|code| hipError_t::try_from(code).ok()).unwrap_or_default());
    DriverError::new(error.call(), kind).with_code(i64::from(code.0), code.name())
}
