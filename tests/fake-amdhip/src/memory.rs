//! The devices' memory: one sparse memory file each, a file of its own for what can be shared, and who has how much.
//!
//! A device's file is far larger than the device, and no part of it is handed out twice: a device pages its memory, so
//! there is no such thing as memory that is free but in too small pieces, and old addresses in the file stay distinct.

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;

use crate::abi::code;
use crate::misuse::broken;
use crate::personality::Config;
use crate::space;

/// The least that is handed out, in bytes.
pub(crate) const GRANULE: u64 = 4096;
/// The length of a device's file.
const FILE_SIZE: u64 = 1 << 50;
/// Where a device's file never holds anything: reading there gives zeros. Half of the file long.
pub(crate) const NOTHING_AT: u64 = FILE_SIZE / 2;

const DEVICE_FILE: &CStr = c"fake-amdhip-device";
const SHARED_FILE: &CStr = c"fake-amdhip-shared";

/// A new, empty memory file, closed on exec.
fn memory_file(name: &CStr, len: u64) -> std::io::Result<File> {
    // SAFETY: `memfd_create` reads the C string and nothing else of ours.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and nobody else has it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    Ok(file)
}

/// Gives the pages of a range back to the system; it then reads zeros.
pub(crate) fn punch(file: &File, offset: u64, len: u64) {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: changes a file that is ours, through a descriptor that the reference keeps open. Nobody has a Rust
    // reference into it, since it is mapped with no access at most.
    let failed = unsafe { libc::fallocate(file.as_raw_fd(), mode, offset.cast_signed(), len.cast_signed()) } != 0;
    if failed {
        broken(format_args!("cannot punch a hole: {}", std::io::Error::last_os_error()));
    }
}

/// The open file that a handle was imported from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    fd: i32,
    device: u64,
    inode: u64,
}

impl Origin {
    fn of(fd: i32) -> Option<(Self, u64)> {
        let mut stat = core::mem::MaybeUninit::<libc::stat>::uninit();
        // SAFETY: `fstat` writes one `stat` to a place of that size; any number may be asked about.
        let failed = unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0;
        if failed {
            return None;
        }
        // SAFETY: the call succeeded, so it has filled the structure in.
        let stat = unsafe { stat.assume_init() };
        Some((Self { fd, device: stat.st_dev, inode: stat.st_ino }, stat.st_size.cast_unsigned()))
    }

    /// Whether the number still is the file that it was.
    pub(crate) fn is_open(&self) -> bool {
        Self::of(self.fd).is_some_and(|(now, _)| (now.device, now.inode) == (self.device, self.inode))
    }
}

/// The physical memory of one handle or block.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) device: usize,
    pub(crate) size: u64,
    /// In the file.
    pub(crate) offset: u64,
    /// Its own file, if it can be shared; otherwise it lies in the device's.
    own: Option<File>,
    /// What a real runtime keeps open for it.
    kept: Option<File>,
    /// Set if the memory is another's, who counts it.
    pub(crate) imported: Option<Origin>,
}

impl Store {
    /// How many files it keeps open.
    pub(crate) fn open_files(&self) -> u64 {
        u64::from(self.own.is_some()) + u64::from(self.kept.is_some())
    }

    /// A new descriptor of it for another process, closed on exec.
    ///
    /// # Errors
    /// `hipErrorInvalidValue` if it cannot be shared or the process may open no more files.
    pub(crate) fn share(&self) -> Result<File, u32> {
        let own = self.own.as_ref().ok_or(code::INVALID_VALUE)?;
        own.try_clone().map_err(|_| code::INVALID_VALUE)
    }
}

/// The memory of one device.
#[derive(Debug)]
struct Vram {
    file: File,
    /// Where in the file nothing has been handed out yet.
    next: u64,
    used: u64,
    leaked: u64,
}

/// The memory of all devices.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    vram: Vec<Vram>,
    /// What nobody has a handle of any more, and addresses still map.
    zombies: Vec<Store>,
}

impl Memory {
    /// Makes the devices' files, in the process that uses them: a forked child must not share its parent's.
    pub(crate) fn open(&mut self, config: &Config) {
        self.vram = (0..config.devices)
            .map(|_| match memory_file(DEVICE_FILE, FILE_SIZE) {
                Ok(file) => Vram { file, next: 0, used: 0, leaked: 0 },
                Err(error) => broken(format_args!("cannot make a memory file for a device: {error}")),
            })
            .collect();
    }

    /// Takes `size` bytes, a multiple of the granule, of a device.
    ///
    /// # Errors
    /// `hipErrorOutOfMemory` if the device has not so much, and also if the process may open no more files.
    pub(crate) fn take(&mut self, config: &Config, device: usize, size: u64, shareable: bool) -> Result<Store, u32> {
        self.sweep();
        let vram = &mut self.vram[device];
        let limit = config.memory.saturating_sub(config.graphics);
        if size > limit.saturating_sub(vram.used) {
            return Err(code::OUT_OF_MEMORY);
        }
        let (own, offset) = if shareable {
            (Some(memory_file(SHARED_FILE, size).map_err(|_| code::OUT_OF_MEMORY)?), 0)
        } else {
            if vram.next + size > NOTHING_AT {
                broken("a device's memory file is used up");
            }
            (None, vram.next)
        };
        if own.is_none() {
            // A granule between two, so that the kernel does not make one entry of the mappings of both.
            vram.next += size + GRANULE;
        }
        vram.used += size;
        Ok(Store { device, size, offset, own, kept: None, imported: None })
    }

    /// Opens the file that some versions keep for every handle. What can be shared has one already.
    ///
    /// # Errors
    /// `hipErrorOutOfMemory` if the process may open no more.
    pub(crate) fn keep_file(&self, store: &mut Store) -> Result<(), u32> {
        if store.own.is_none() {
            store.kept = Some(self.file(store).try_clone().map_err(|_| code::OUT_OF_MEMORY)?);
        }
        Ok(())
    }

    /// Whether the process may open one more file, as every version does for the time of a map and of granting access.
    pub(crate) fn may_open_a_file(&self) -> bool {
        self.vram.first().is_none_or(|vram| vram.file.try_clone().is_ok())
    }

    /// The memory behind a descriptor that another process, or this one, exported.
    ///
    /// # Errors
    /// `hipErrorInvalidValue` if it is no such descriptor or the process may open no more files.
    pub(crate) fn import(device: usize, fd: i32) -> Result<Store, u32> {
        let name = std::fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|_| code::INVALID_VALUE)?;
        if !name.to_string_lossy().contains(&*SHARED_FILE.to_string_lossy()) {
            return Err(code::INVALID_VALUE);
        }
        let (origin, size) = Origin::of(fd).ok_or(code::INVALID_VALUE)?;
        // SAFETY: duplicates a number that the caller passed as its own open file; makes a new one above 2.
        let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
        if copy < 0 {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: just made, and nobody else has it.
        let own = unsafe { File::from_raw_fd(copy) };
        Ok(Store { device, size, offset: 0, own: Some(own), kept: None, imported: Some(origin) })
    }

    /// The file that a store lies in.
    pub(crate) fn file<'a>(&'a self, store: &'a Store) -> &'a File {
        store.own.as_ref().unwrap_or(&self.vram[store.device].file)
    }

    /// A file that reads zeros from [`NOTHING_AT`] on.
    pub(crate) fn zeros(&self, device: usize) -> &File {
        &self.vram[device].file
    }

    /// Takes back what nobody has a handle of any more.
    pub(crate) fn give_back(&mut self, config: &Config, store: Store, is_handle: bool) {
        if store.imported.is_some() {
            return;
        }
        if is_handle && config.rules.memory_never_returns {
            self.vram[store.device].leaked += store.size;
        } else if is_handle && config.rules.memory_stays_while_address_maps_it {
            self.zombies.push(store);
            self.sweep();
        } else {
            self.free(&store);
        }
    }

    fn free(&mut self, store: &Store) {
        // A file of its own goes with the last process that has it.
        if store.own.is_none() {
            punch(self.file(store), store.offset, store.size);
        }
        self.vram[store.device].used -= store.size;
    }

    /// Frees what was kept by addresses that have been mapped to something else since.
    pub(crate) fn sweep(&mut self) {
        if self.zombies.is_empty() {
            return;
        }
        // If the list cannot be had, nothing is known to be free.
        let Ok(maps) = space::file_mappings() else { return };
        for store in std::mem::take(&mut self.zombies) {
            let inode = match self.file(&store).metadata() {
                Ok(metadata) => metadata.ino(),
                Err(error) => broken(format_args!("cannot look at a memory file: {error}")),
            };
            let end = store.offset + store.size;
            if maps.iter().any(|map| map.inode == inode && map.offset < end && store.offset < map.offset + map.len) {
                self.zombies.push(store);
            } else {
                self.free(&store);
            }
        }
    }

    /// Bytes that are not free, those that nobody can reach included.
    pub(crate) fn used(&self, device: usize) -> u64 {
        self.vram.get(device).map_or(0, |vram| vram.used)
    }

    /// Bytes that never come back.
    pub(crate) fn leaked(&self, device: usize) -> u64 {
        self.vram.get(device).map_or(0, |vram| vram.leaked)
    }
}
