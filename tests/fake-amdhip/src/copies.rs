//! Copies and fills: what is refused when they are queued, and what they do when their turn comes.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::abi::code;
use crate::memory::punch;
use crate::misuse::{broken, misuse};
use crate::runtime::Call;
use crate::streams::Work;
use crate::table::{Piece, Reach, Trouble};

/// What is moved at a time between two places in the devices' memory.
const BLOCK: usize = 1 << 20;

impl Call<'_> {
    pub(crate) fn reach(&self, device: usize, write: bool, foreign_blocks: bool) -> Reach {
        Reach { device, write, foreign_blocks, one_mapping: self.config.rules.copy_within_one_mapping }
    }

    pub(crate) fn pieces(&self, by: &str, addr: usize, len: usize, reach: Reach) -> Result<Vec<Piece<'_>>, u32> {
        let trouble = match self.state.table.pieces(&self.state.memory, addr, len, reach) {
            Ok(pieces) => return Ok(pieces),
            Err(trouble) => trouble,
        };
        let what = if reach.write { "writes" } else { "reads" };
        match trouble {
            Trouble::Crosses => Err(code::INVALID_VALUE),
            Trouble::Hole(at) => {
                misuse(by, format_args!("{what} {len} bytes at {addr:#x}, and nothing is mapped at {at:#x}"))
            }
            Trouble::NoAccess(at) => misuse(
                by,
                format_args!("device {} {what} {len} bytes at {addr:#x} without access at {at:#x}", reach.device),
            ),
        }
    }

    /// The same once more when the turn has come: what was right when it was queued must still be.
    pub(crate) fn pieces_now(&self, by: &str, addr: usize, len: usize, reach: Reach) -> Vec<Piece<'_>> {
        match self.pieces(by, addr, len, reach) {
            Ok(pieces) => pieces,
            Err(_) => misuse(by, format_args!("{len} bytes at {addr:#x} were one mapping and are not any more")),
        }
    }

    /// Before anything is read there: the host cannot.
    pub(crate) fn refuse_device_address(&self, host: usize, len: usize) {
        if self.state.table.is_device_address(host, len) {
            self.misuse(format_args!("{host:#x} is passed as host memory and is device memory"));
        }
    }

    /// Queues a copy of `data` to the device.
    pub(crate) fn upload(&mut self, to: usize, data: Vec<u8>, stream: u64) -> Result<(), u32> {
        let id = self.stream_id(stream);
        if to == 0 {
            return Err(code::INVALID_VALUE);
        }
        self.pieces(self.name, to, data.len(), self.reach(self.thread.device, true, true))?;
        self.queue(id, Work::Upload { to, data })
    }

    pub(crate) fn download(&mut self, host: usize, from: usize, len: usize, stream: u64) -> Result<(), u32> {
        let id = self.stream_id(stream);
        if len == 0 {
            return Ok(());
        }
        if host == 0 || from == 0 {
            return Err(code::INVALID_VALUE);
        }
        self.refuse_device_address(host, len);
        self.is_pinned(host, len)?;
        self.pieces(self.name, from, len, self.reach(self.thread.device, false, true))?;
        self.queue(id, Work::Download { from, len, host })
    }

    pub(crate) fn copy(&mut self, to: usize, from: usize, len: usize, stream: u64) -> Result<(), u32> {
        let id = self.stream_id(stream);
        if len == 0 {
            return Ok(());
        }
        if to == 0 || from == 0 {
            return Err(code::INVALID_VALUE);
        }
        self.pieces(self.name, to, len, self.reach(self.thread.device, true, true))?;
        self.pieces(self.name, from, len, self.reach(self.thread.device, false, true))?;
        if to < from + len && from < to + len {
            self.misuse(format_args!("{len} bytes from {from:#x} to {to:#x} overlap"));
        }
        self.queue(id, Work::Copy { to, from, len })
    }

    pub(crate) fn fill(&mut self, to: usize, value: u8, len: usize, stream: u64) -> Result<(), u32> {
        let id = self.stream_id(stream);
        if len == 0 {
            return Ok(());
        }
        if to == 0 {
            return Err(code::INVALID_VALUE);
        }
        self.pieces(self.name, to, len, self.reach(self.thread.device, true, false))?;
        self.queue(id, Work::Fill { to, value, len })
    }

    /// Does what was queued by the function `by` on a stream of `device`.
    pub(crate) fn perform(&self, device: usize, by: &'static str, work: Work) {
        match work {
            Work::Upload { to, data } => self.write(device, by, to, &data, true),
            Work::Fetch { to, host, len } => self.write_from_host(by, to, len, host, self.reach(device, true, true)),
            Work::Download { from, len, host } => self.read_into_host(device, by, from, len, host),
            Work::Copy { to, from, len } => {
                let mut block = vec![0; len.min(BLOCK)];
                for at in (0..len).step_by(BLOCK) {
                    let block = &mut block[..(len - at).min(BLOCK)];
                    self.read(device, by, from + at, block);
                    self.write(device, by, to + at, block, true);
                }
            }
            Work::Fill { to, value: 0, len } => {
                for piece in self.pieces_now(by, to, len, self.reach(device, true, false)) {
                    if !piece.lost {
                        punch(piece.file, piece.offset, piece.len as u64);
                    }
                }
            }
            Work::Fill { to, value, len } => {
                let block = vec![value; len.min(BLOCK)];
                for at in (0..len).step_by(BLOCK) {
                    self.write(device, by, to + at, &block[..(len - at).min(BLOCK)], false);
                }
            }
            Work::Record { .. } => {}
        }
    }

    fn write(&self, device: usize, by: &str, to: usize, mut data: &[u8], foreign_blocks: bool) {
        for piece in self.pieces_now(by, to, data.len(), self.reach(device, true, foreign_blocks)) {
            let (now, later) = data.split_at(piece.len);
            data = later;
            if !piece.lost
                && let Err(error) = piece.file.write_all_at(now, piece.offset)
            {
                broken(format_args!("cannot write to a memory file: {error}"));
            }
        }
    }

    fn read(&self, device: usize, by: &str, from: usize, mut data: &mut [u8]) {
        for piece in self.pieces_now(by, from, data.len(), self.reach(device, false, true)) {
            let (now, later) = data.split_at_mut(piece.len);
            data = later;
            if let Err(error) = piece.file.read_exact_at(now, piece.offset) {
                broken(format_args!("cannot read a memory file: {error}"));
            }
        }
    }

    /// Lets the kernel write to the host's memory: it looks whether the memory is still there.
    fn read_into_host(&self, device: usize, by: &str, from: usize, len: usize, mut host: usize) {
        for piece in self.pieces_now(by, from, len, self.reach(device, false, true)) {
            let (mut offset, mut left) = (piece.offset, piece.len);
            while left > 0 {
                let place = core::ptr::with_exposed_provenance_mut(host);
                // SAFETY: the caller of the copy promised `len` writable bytes at `host` until the copy is done, and this is
                // before that; where it broke the promise by unmapping them the kernel says so and writes nothing there.
                let got = unsafe { libc::pread(piece.file.as_raw_fd(), place, left, offset.cast_signed()) };
                let Ok(got @ 1..) = usize::try_from(got) else {
                    let error = std::io::Error::last_os_error();
                    misuse(by, format_args!("cannot write to the host's memory at {host:#x}: {error}"));
                };
                host += got;
                offset += got as u64;
                left -= got;
            }
        }
    }
}
