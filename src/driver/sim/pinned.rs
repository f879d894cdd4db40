//! Page-locked host memory: which pieces there are, and what is done to them against the rules.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;

use crate::driver::{Call, DriverErrorKind, PinFlags};

use super::ledger::ViolationKind;
use super::state::{State, Step, broken, fails};

/// How far from the host's address the device sees a piece: like the other addresses of the device none of a program.
const DEVICE: u64 = 0x0200_0000_0000_0000;

const PAGE: u64 = 4096;

#[derive(Debug)]
struct Piece {
    bytes: u64,
    mapped: bool,
    /// Memory of the program's allocator, if the driver made it.
    block: Option<Block>,
}

/// Zeroed memory, freed on drop.
#[derive(Debug)]
struct Block {
    addr: u64,
    layout: Layout,
}

impl Block {
    fn new(bytes: u64) -> Option<Self> {
        let layout =
            Layout::from_size_align(usize::try_from(bytes).ok().filter(|size| *size > 0)?, PAGE as usize).ok()?;
        // SAFETY: the layout has a size.
        let start = unsafe { alloc_zeroed(layout) };
        (!start.is_null()).then(|| Self { addr: start.expose_provenance() as u64, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let start: *mut u8 = core::ptr::with_exposed_provenance_mut(self.addr as usize);
        // SAFETY: it was allocated with this layout, and who frees it has promised that nobody uses it any more.
        unsafe { dealloc(start, self.layout) };
    }
}

/// The pieces by address.
#[derive(Debug, Default)]
pub(super) struct Pinned(BTreeMap<u64, Piece>);

impl Pinned {
    pub(super) fn len(&self) -> u64 {
        self.0.len() as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.values().map(|piece| piece.bytes).sum()
    }

    fn holding(&self, addr: u64) -> Option<(u64, &Piece)> {
        let (&at, piece) = self.0.range(..=addr).next_back()?;
        (addr - at < piece.bytes).then_some((at, piece))
    }

    /// Whether the device reaches all of `[addr, addr + bytes)` in page-locked memory.
    pub(super) fn reaches(&self, addr: u64, bytes: u64) -> bool {
        let Some(mut at) = addr.checked_sub(DEVICE) else { return false };
        let Some(end) = at.checked_add(bytes) else { return false };
        while at < end {
            let Some((start, piece)) = self.holding(at).filter(|(_, piece)| piece.mapped) else { return false };
            at = start + piece.bytes;
        }
        true
    }
}

impl State {
    pub(super) fn pin(&mut self, addr: u64, bytes: u64, flags: PinFlags) -> Step<()> {
        if bytes == 0 {
            return broken(ViolationKind::ZeroSize, "the size is zero".into());
        }
        if !addr.is_multiple_of(PAGE) || !bytes.is_multiple_of(PAGE) {
            return broken(ViolationKind::Misaligned, format!("{bytes:#x} bytes at {addr:#x} are no whole pages"));
        }
        if flags.write_combined {
            let detail = "memory that is there already cannot be write-combined".into();
            return Err(super::state::Stop::Fails(DriverErrorKind::NotSupported, None, detail));
        }
        let near = self.pinned.0.range(..addr.saturating_add(bytes)).next_back();
        if let Some((at, _)) = near.filter(|(at, piece)| **at + piece.bytes > addr) {
            return broken(ViolationKind::AlreadyPinned, format!("a piece at {at:#x} is locked already"));
        }
        self.pinned.0.insert(addr, Piece { bytes, mapped: flags.mapped, block: None });
        Ok(())
    }

    pub(super) fn unpin(&mut self, addr: u64, bytes: u64) -> Step<()> {
        self.take_piece(Call::Unpin, addr, bytes, false).map(drop)
    }

    pub(super) fn allocate_pinned(&mut self, bytes: u64, flags: PinFlags) -> Step<u64> {
        if bytes == 0 {
            return broken(ViolationKind::ZeroSize, "the size is zero".into());
        }
        if flags.read_only {
            let detail = "allocated memory cannot be read-only".into();
            return Err(super::state::Stop::Fails(DriverErrorKind::NotSupported, None, detail));
        }
        let Some(block) = Block::new(bytes) else {
            return fails(DriverErrorKind::OutOfMemory, (2, "OUT_OF_MEMORY"), format!("{bytes:#x} bytes of the host"));
        };
        let addr = block.addr;
        self.pinned.0.insert(addr, Piece { bytes, mapped: flags.mapped, block: Some(block) });
        Ok(addr)
    }

    pub(super) fn free_pinned(&mut self, addr: u64, bytes: u64) -> Step<()> {
        self.take_piece(Call::FreePinned, addr, bytes, true).map(drop)
    }

    fn take_piece(&mut self, call: Call, addr: u64, bytes: u64, block: bool) -> Step<Piece> {
        match self.pinned.0.get(&addr) {
            Some(piece) if piece.bytes != bytes => {
                let size = piece.bytes;
                return broken(ViolationKind::WrongSize, format!("the piece has {size:#x} bytes, not {bytes:#x}"));
            }
            Some(piece) if piece.block.is_some() != block => {
                return broken(ViolationKind::NotPinned, format!("the piece at {addr:#x} did not come that way"));
            }
            Some(_) => {}
            None => return broken(ViolationKind::NotPinned, format!("no piece starts at {addr:#x}")),
        }
        self.check_host_idle(call, addr, bytes);
        self.check_idle(call, addr + DEVICE, bytes);
        match self.pinned.0.remove(&addr) {
            Some(piece) => Ok(piece),
            None => broken(ViolationKind::NotPinned, format!("no piece starts at {addr:#x}")),
        }
    }

    /// Loses the device when a copy is pending from or to memory that is let go of.
    fn check_host_idle(&mut self, call: Call, addr: u64, bytes: u64) {
        if self.streams.touch_host(addr, bytes) {
            let detail = format!("a copy is pending that touches {bytes:#x} bytes of the host at {addr:#x}");
            self.ledger.violation(call, ViolationKind::UnderRunningWork, detail);
            self.lose();
        }
    }

    pub(super) fn pinned_device_ptr(&mut self, addr: u64) -> Step<u64> {
        match self.pinned.holding(addr) {
            Some((_, piece)) if piece.mapped => Ok(addr + DEVICE),
            Some(_) => broken(ViolationKind::NotPinned, format!("the piece at {addr:#x} is not mapped")),
            None => broken(ViolationKind::NotPinned, format!("nothing is locked at {addr:#x}")),
        }
    }
}
