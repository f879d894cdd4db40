//! Page-locked host memory: what is registered and allocated, and how the kernel disturbs it.

use core::ffi::c_void;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use crate::abi::code;
use crate::misuse::{broken, misuse};
use crate::runtime::Call;
use crate::streams::Work;
use crate::table::Reach;

const PAGE: usize = 4096;
/// The kernel walks over memory in steps of this size, and begins a step that is disturbed again.
const STEP: usize = 2 << 30;
/// `hipHostRegisterMapped` and `hipHostMallocMapped`.
const MAPPED: u32 = 2;
/// Portable, mapped, of the host's file mappings, read-only.
const REGISTER_FLAGS: u32 = 15;
/// Portable, mapped, write-combined; and those of the last four bits.
const MALLOC_FLAGS: u32 = 0xf000_0007;

/// Page-locked memory.
#[derive(Debug)]
pub(crate) struct Pin {
    pub(crate) size: usize,
    /// Whether `hipHostMalloc` made it.
    owned: bool,
    flags: u32,
}

fn host(addr: usize) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(addr)
}

/// Whether all of the pages are there; none if part of the range is not mapped.
fn resident(addr: usize, size: usize) -> Option<bool> {
    let start = addr / PAGE * PAGE;
    let end = (addr + size).next_multiple_of(PAGE);
    let mut pages = vec![0_u8; (end - start).div_ceil(PAGE)];
    // SAFETY: the call looks at the page table and writes one byte for each page to the vector.
    if unsafe { libc::mincore(host(start), end - start, pages.as_mut_ptr()) } != 0 {
        return None;
    }
    Some(pages.iter().all(|page| page & 1 == 1))
}

fn rounded(size: usize) -> Result<usize, u32> {
    size.checked_next_multiple_of(PAGE).ok_or(code::OUT_OF_MEMORY)
}

impl Call<'_> {
    /// The piece that reaches into the range.
    fn pin_meeting(&self, addr: usize, size: usize) -> Option<(usize, &Pin)> {
        let (start, pin) = self.state.table.pins.range(..addr.checked_add(size)?).next_back()?;
        (addr < start + pin.size).then_some((*start, pin))
    }

    /// Walks over memory as the kernel does: what is not there is put there meanwhile, which disturbs the walk.
    fn walk(&mut self, addr: usize, size: usize) -> Result<(), u32> {
        for at in (addr..addr + size).step_by(STEP) {
            let there = resident(at, STEP.min(addr + size - at)).ok_or(code::INVALID_VALUE)?;
            if there {
                continue;
            }
            for _ in 0..self.config.disturbed {
                self.state.table.pin_retries += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }

    pub(crate) fn host_register(&mut self, addr: usize, size: usize, flags: u32) -> Result<(), u32> {
        if addr == 0 || size == 0 || flags & !REGISTER_FLAGS != 0 {
            return Err(code::INVALID_VALUE);
        }
        self.refuse_device_address(addr, size);
        if self.pin_meeting(addr, size).is_some() {
            return Err(code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        self.walk(addr, size)?;
        self.state.table.pins.insert(addr, Pin { size, owned: false, flags });
        Ok(())
    }

    pub(crate) fn host_unregister(&mut self, addr: usize) -> Result<(), u32> {
        let pin = self.let_go(addr, false);
        if resident(addr, pin.size).is_none() {
            self.misuse(format_args!("{} bytes at {addr:#x} were unmapped while they were registered", pin.size));
        }
        Ok(())
    }

    pub(crate) fn host_malloc(&mut self, size: usize, flags: u32) -> Result<usize, u32> {
        if flags & !MALLOC_FLAGS != 0 {
            return Err(code::INVALID_VALUE);
        }
        if size == 0 {
            return Ok(0);
        }
        let room = rounded(size)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: asks for new memory, where nothing is.
        let at = unsafe { libc::mmap(core::ptr::null_mut(), room, access, kind, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(code::OUT_OF_MEMORY);
        }
        let addr = at.expose_provenance();
        self.walk(addr, room)?;
        self.state.table.pins.insert(addr, Pin { size, owned: true, flags });
        Ok(addr)
    }

    pub(crate) fn host_free(&mut self, addr: usize) -> Result<(), u32> {
        if addr == 0 {
            return Ok(());
        }
        let pin = self.let_go(addr, true);
        // SAFETY: `host_malloc` mapped it, and the caller uses it no more.
        if unsafe { libc::munmap(host(addr), rounded(pin.size)?) } != 0 {
            broken(format_args!("cannot give page-locked memory back: {}", io::Error::last_os_error()));
        }
        Ok(())
    }

    /// Takes a piece out that came that way and that nothing will use.
    fn let_go(&mut self, addr: usize, owned: bool) -> Pin {
        let Some(pin) = self.state.table.pins.get(&addr) else {
            self.misuse(format_args!("no page-locked memory starts at {addr:#x}"));
        };
        match (owned, pin.owned) {
            (true, false) => self.misuse(format_args!("{addr:#x} was registered, and not allocated")),
            (false, true) => self.misuse(format_args!("{addr:#x} was allocated, and not registered")),
            _ => {}
        }
        if let Some(by) = self.state.streams.touching_host(addr, pin.size) {
            self.misuse(format_args!("{by} is queued and not done yet, and it uses the host's memory at {addr:#x}"));
        }
        match self.state.table.pins.remove(&addr) {
            Some(pin) => pin,
            None => broken("page-locked memory is gone"),
        }
    }

    pub(crate) fn host_device_pointer(&self, addr: usize, flags: u32) -> Result<usize, u32> {
        match self.pin_meeting(addr, 1) {
            Some((_, pin)) if flags == 0 && pin.flags & MAPPED != 0 => Ok(addr + self.config.pin_offset as usize),
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// Whether all of the host's memory of a copy is page-locked.
    ///
    /// # Errors
    /// `hipErrorInvalidValue` if a part of it is, or if it is in two pieces: the runtime looks the first byte up.
    pub(crate) fn is_pinned(&self, addr: usize, len: usize) -> Result<bool, u32> {
        match self.pin_meeting(addr, len) {
            None => Ok(false),
            Some((start, pin)) if start <= addr && addr + len <= start + pin.size => Ok(true),
            Some(_) => Err(code::INVALID_VALUE),
        }
    }

    /// Queues a copy from page-locked memory, which is read when its turn comes.
    pub(crate) fn fetch(&mut self, to: usize, from: usize, len: usize, stream: u64) -> Result<(), u32> {
        let id = self.stream_id(stream);
        if to == 0 {
            return Err(code::INVALID_VALUE);
        }
        self.pieces(self.name, to, len, self.reach(self.thread.device, true, true))?;
        self.queue(id, Work::Fetch { to, host: from, len })
    }

    /// Lets the kernel read the host's memory: it looks whether the memory is still there.
    pub(crate) fn write_from_host(&self, by: &str, to: usize, len: usize, mut from: usize, reach: Reach) {
        for piece in self.pieces_now(by, to, len, reach) {
            let (mut offset, mut left) = (piece.offset, if piece.lost { 0 } else { piece.len });
            let next = from + piece.len;
            while left > 0 {
                // SAFETY: the kernel reads `left` bytes that the caller of the copy promised until it is done, and says so
                // where they are not there.
                let put = unsafe { libc::pwrite(piece.file.as_raw_fd(), host(from), left, offset.cast_signed()) };
                let Ok(put @ 1..) = usize::try_from(put) else {
                    let error = io::Error::last_os_error();
                    misuse(by, format_args!("cannot read the host's memory at {from:#x}: {error}"));
                };
                from += put;
                offset += put as u64;
                left -= put;
            }
            from = next;
        }
    }
}
