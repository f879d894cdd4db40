//! Host memory as a device: real pages, no GPU needed.
//!
//! ```text
//! span    |<---------------- PROT_NONE, MAP_NORESERVE: addresses only ---------------->|
//! chunks  | memfd 1 | memfd 2 | memfd 3 |            nothing: touching it faults       |
//! ```
//!
//! A chunk is a file in memory (`memfd_create`) whose pages are allocated when it is created, so that running out is
//! an error there and not a `SIGBUS` later. Mapping puts the file under the span, unmapping puts `PROT_NONE` back in
//! the same call: at no time are the span's addresses free for others. So a chunk keeps one open file until it is
//! released and takes one entry of the process's memory map while it is mapped, like the chunks of a GPU runtime that
//! keeps its memory in file descriptors.
//!
//! Mapped memory is kept out of forked children: there its addresses are free, and touching them faults. The open file
//! itself does go to a child, until it calls `exec`; the pages of a released chunk come back when it has done so.
//!
//! ```
//! use growspan::Bytes;
//! use growspan::driver::host::{HostDriver, HostOptions};
//! use growspan::driver::{ChunkProps, Driver};
//!
//! let host = HostDriver::open(HostOptions::default().with_capacity(Bytes::mib(64)))?;
//! let size = Bytes::mib(2).get();
//! let span = host.reserve(Bytes::gib(64).get(), size)?;
//! let chunk = host.create(size, ChunkProps::PLAIN)?;
//! // SAFETY: the chunk has `size` bytes, the span is empty, and nothing else uses either.
//! unsafe {
//!     host.map(span, size, chunk)?;
//!     host.set_access(span, size)?;
//!     host.fill(span, 7, size, None)?;
//!     assert_eq!(host.memory()?.free, Bytes::mib(62).get());
//!     host.unmap(span, size)?;
//!     host.release(chunk)?;
//!     host.free_span(span, Bytes::gib(64).get())?;
//! }
//! assert_eq!(host.memory()?.free, Bytes::mib(64).get());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use core::fmt;
use core::ptr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use super::{
    Backend, Call, CheckForm, ChunkProps, Driver, DriverError, DriverErrorKind as Kind, DriverInfo, DriverResult,
    Granularities, MemoryInfo, PinFlags, RawEvent, RawHandle, RawStream, Shareable,
};
use crate::bytes::Bytes;
use crate::driver::pins::Pins;
use crate::sys::map::{self, SpareEntry};
use crate::sys::memory::Gauge;

mod error;
mod headroom;
mod pinned;
mod table;

pub use error::HostError;
use error::{failed, no_addresses};
use headroom::{Headroom, Refusal};
use table::{Account, Chunk, Memory, Table};

/// How to open the host driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostOptions {
    /// The memory that the driver hands out at most, rounded down to the granularity. `None`: half of what is
    /// available to the process when the driver is opened, its control groups included.
    pub capacity: Option<Bytes>,
    /// The size it maps in, a power of two of at least a page. `None`: 2 MiB, like a GPU.
    pub granularity: Option<Bytes>,
}

impl HostOptions {
    /// The same, with that capacity.
    #[must_use]
    pub const fn with_capacity(mut self, capacity: Bytes) -> Self {
        self.capacity = Some(capacity);
        self
    }

    /// The same, with that granularity.
    #[must_use]
    pub const fn with_granularity(mut self, granularity: Bytes) -> Self {
        self.granularity = Some(granularity);
        self
    }
}

/// The host's memory as a device. See the [module](self).
///
/// Memory is taken from the capacity when a chunk is created and comes back when its handle is released and its last
/// mapping is gone. Whatever breaks the preconditions of [`Driver`] and can be noticed is refused as
/// [`DriverErrorKind::Misuse`](Kind::Misuse), with the figures. Streams and events are always idle: every operation is
/// over when its call returns.
///
/// Dropping it leaves alone what is still mapped or allocated.
pub struct HostDriver {
    info: DriverInfo,
    granularity: u64,
    account: Arc<Account>,
    headroom: Headroom,
    table: Mutex<Table>,
    /// Unmapping takes an entry of the memory map for a moment, and fails where the process has none left. This one is
    /// given up then, so that memory can be given back even at the limit. No chunk is mapped unless it is there.
    spare: Mutex<Option<SpareEntry>>,
    last_event: AtomicU64,
    pins: Pins,
}

impl HostDriver {
    /// Opens it.
    ///
    /// # Errors
    /// [`HostError::CapacityTooLarge`] for more than there is in all, [`HostError::CapacityTooSmall`] for less than a
    /// chunk, [`HostError::Granularity`] for a granularity
    /// that cannot be mapped in, [`HostError::Unreadable`] where `/proc` does not say what memory there is.
    pub fn open(options: HostOptions) -> Result<Self, HostError> {
        let unreadable = |error: io::Error| HostError::Unreadable(error.to_string());
        let granularity = options.granularity.unwrap_or(Bytes::mib(2));
        let page = Bytes::new(map::page_size());
        if !granularity.get().is_power_of_two() || granularity < page {
            return Err(HostError::Granularity { asked: granularity, page });
        }
        let gauge = Gauge::find().map_err(unreadable)?;
        let memory = gauge.read().map_err(unreadable)?;
        let capacity = match options.capacity {
            Some(asked) if asked > memory.total => {
                return Err(HostError::CapacityTooLarge { asked, total: memory.total });
            }
            Some(asked) if asked < granularity => return Err(HostError::CapacityTooSmall { asked, granularity }),
            Some(asked) => asked,
            None => Bytes::new(memory.available.get() / 2),
        };
        let capacity = capacity.round_down(granularity).unwrap_or(Bytes::ZERO);

        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").map_err(unreadable)?;
        let name = format!("host memory ({capacity} of {})", memory.total);
        let mut info = DriverInfo::new(Backend::Host, 0, name, format!("Linux {}", kernel.trim()));
        info.host_visible = true;
        info.queues = false;
        info.wants_2_mib = false;
        info.open_files_per_chunk = 1;
        info.maps_per_chunk = 1;
        info.open_files_by = "the host driver";
        info.memory_word = "memory";
        info.check = CheckForm::Cheap;
        Ok(Self {
            info,
            granularity: granularity.get(),
            account: Account::new(capacity.get()),
            headroom: Headroom::new(gauge),
            table: Mutex::new(Table::new(granularity.get())),
            spare: Mutex::new(None),
            last_event: AtomicU64::new(0),
            pins: Pins::new(),
        })
    }

    /// A file with `bytes` of pages, taken from the capacity and really there.
    fn filled_file(&self, call: Call, bytes: u64) -> DriverResult<(OwnedFd, Memory)> {
        let memory = self.account.take(bytes).map_err(|free| {
            let (asked, free, all) = (Bytes::new(bytes), Bytes::new(free), Bytes::new(self.account.capacity()));
            DriverError::new(call, Kind::OutOfMemory).with_detail(format!("{asked} asked, {free} free of {all}"))
        })?;
        let mut leave = self.headroom.ask(bytes).map_err(|refusal| match &refusal {
            Refusal::Short { .. } => DriverError::new(call, Kind::OutOfMemory).with_detail(refusal.to_string()),
            Refusal::Unreadable(error) => failed(call, error, Bytes::new(bytes)),
        })?;
        let system = |error: io::Error| failed(call, &error, Bytes::new(bytes));
        let file = map::memfd().map_err(system)?;
        map::fill_file(&file, bytes, |step| leave.taken(step)).map_err(system)?;
        Ok((file, memory))
    }

    /// Refuses sizes that are zero or no multiple of the granularity.
    fn check_size(&self, call: Call, bytes: u64) -> DriverResult<()> {
        if bytes != 0 && bytes.is_multiple_of(self.granularity) {
            return Ok(());
        }
        let granularity = Bytes::new(self.granularity);
        Err(DriverError::misuse(call)(format!(
            "{bytes} bytes are no positive multiple of the granularity, {granularity}"
        )))
    }

    fn keep_a_spare_entry(&self) -> io::Result<()> {
        let mut spare = self.spare.lock();
        if spare.is_none() {
            *spare = Some(SpareEntry::new()?);
        }
        Ok(())
    }

    /// Makes a system call that frees addresses; once more, with the spare entry given up, if it lacks an entry.
    fn with_spare_entry(&self, call: impl Fn() -> io::Result<()>) -> io::Result<()> {
        match call() {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && self.spare.lock().take().is_some() => call(),
            result => result,
        }
    }

    /// Puts `file` under reserved addresses, or leaves them as they were.
    ///
    /// # Safety
    /// As for [`map::map_file_at`].
    unsafe fn map_file(&self, addr: u64, bytes: u64, file: &File) -> io::Result<()> {
        self.keep_a_spare_entry()?;
        // SAFETY: the contract is the same.
        if let Err(error) = unsafe { map::map_file_at(addr, bytes, file) } {
            // Kernels before 6.12 take away what was there before they notice that they cannot go on. Where nothing
            // was taken away, this changes nothing.
            let _ = map::reserve_if_free(addr, bytes);
            return Err(error);
        }
        // A shared mapping would be one memory with a forked child: the child would write into its parent's buffers, and
        // the pages would stay taken while it lives. No GPU's memory survives a fork either.
        // SAFETY: it was mapped just now, for this driver, whose door refuses calls from children.
        unsafe { map::keep_from_children(addr, bytes) }.inspect_err(|_| {
            // SAFETY: nobody was told of the mapping yet.
            let _ = self.with_spare_entry(|| unsafe { map::reserve_at(addr, bytes) });
        })
    }
}

impl fmt::Debug for HostDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [spans, handles, mappings, blocks] = self.table.lock().counts();
        f.debug_struct("HostDriver")
            .field("name", &self.info.name)
            .field("free", &Bytes::new(self.account.free()))
            .field("spans", &spans)
            .field("handles", &handles)
            .field("mappings", &mappings)
            .field("blocks", &blocks)
            .field("pinned", &self.pins.len())
            .finish_non_exhaustive()
    }
}

impl Drop for HostDriver {
    fn drop(&mut self) {
        let table = self.table.get_mut();
        let pinned = self.pins.len();
        if !table.is_empty() || pinned > 0 {
            let [spans, handles, mappings, blocks] = table.counts();
            tracing::warn!(spans, handles, mappings, blocks, pinned, "the host driver goes with things not given back");
        }
    }
}

// SAFETY: the kernel chooses the addresses of spans and blocks where nothing is mapped, and they stay reserved until they
// are given back: a mapping replaces its part of a span, and the reservation replaces it, each in one call. `map` puts
// the handle's own file there, and only if the table finds the range free and inside one span. The pages of a file are
// allocated before it is mapped, zeroed by the kernel, and its size is sealed before another process gets hold of it, so
// that mapped memory is initialised and stays there. The null page cannot be mapped. No foreign code is called that
// could unwind.
unsafe impl Driver for HostDriver {
    fn info(&self) -> &DriverInfo {
        &self.info
    }

    fn support(&self) -> DriverResult<()> {
        // All the calls are older than any Linux that Rust runs on, but a sandbox may forbid this one.
        map::memfd().map(drop).map_err(|error| failed(Call::Support, &error, Bytes::ZERO))
    }

    fn granularity(&self) -> DriverResult<Granularities> {
        Ok(Granularities { minimum: self.granularity, recommended: self.granularity })
    }

    fn memory(&self) -> DriverResult<MemoryInfo> {
        Ok(MemoryInfo { free: self.account.free(), total: self.account.capacity() })
    }

    fn reserve(&self, bytes: u64, align: u64) -> DriverResult<u64> {
        self.check_size(Call::Reserve, bytes)?;
        if !align.is_power_of_two() || align < self.granularity {
            let least = self.granularity;
            return Err(DriverError::misuse(Call::Reserve)(format!(
                "an alignment of {align} is no power of two of at least {least}"
            )));
        }
        let addr =
            map::reserve(bytes, align).map_err(|error| no_addresses(Call::Reserve, &error, Bytes::new(bytes)))?;
        self.table.lock().add_span(addr, bytes);
        Ok(addr)
    }

    unsafe fn free_span(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.table.lock().remove_span(addr, bytes).map_err(DriverError::misuse(Call::FreeSpan))?;
        // SAFETY: the span was the table's, with nothing mapped under it, and the caller uses it no more.
        self.with_spare_entry(|| unsafe { map::unmap(addr, bytes) }).map_err(|error| {
            self.table.lock().add_span(addr, bytes);
            no_addresses(Call::FreeSpan, &error, Bytes::new(bytes))
        })
    }

    fn create(&self, bytes: u64, props: ChunkProps) -> DriverResult<RawHandle> {
        self.check_size(Call::Create, bytes)?;
        if props.rdma || props.shareable == Shareable::Fabric {
            let detail = "host memory has no RDMA and no fabric handles";
            return Err(DriverError::new(Call::Create, Kind::NotSupported).with_detail(detail));
        }
        let (file, memory) = self.filled_file(Call::Create, bytes)?;
        let shareable = props.shareable == Shareable::PosixFd;
        let chunk = Chunk { file: File::from(file), memory: Arc::new(memory), shareable };
        Ok(self.table.lock().add_handle(chunk))
    }

    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()> {
        let chunk = self.table.lock().remove_handle(handle).map_err(DriverError::misuse(Call::Release))?;
        // Here, with the table unlocked: closing the last descriptor frees the pages.
        drop(chunk);
        Ok(())
    }

    unsafe fn map(&self, addr: u64, bytes: u64, handle: RawHandle) -> DriverResult<()> {
        let chunk = self.table.lock().begin_map(addr, bytes, handle).map_err(DriverError::misuse(Call::Map))?;
        // SAFETY: the table found the range in a span of this driver with nothing mapped there, has marked it busy,
        // and knows the file to be as large.
        match unsafe { self.map_file(addr, bytes, &chunk.file) } {
            Ok(()) => {
                self.table.lock().settle(addr, bytes);
                Ok(())
            }
            Err(error) => {
                let _memory = self.table.lock().forget(addr);
                Err(failed(Call::Map, &error, Bytes::new(bytes)))
            }
        }
    }

    unsafe fn set_access(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.table.lock().begin_access(addr, bytes).map_err(DriverError::misuse(Call::SetAccess))?;
        // SAFETY: the table knows the range to be mapped by this driver and has marked it busy.
        let result = unsafe { map::allow_access(addr, bytes) };
        if result.is_ok() {
            // SAFETY: the range is mapped and was made accessible just now.
            unsafe { map::enter_pages(addr, bytes) };
        }
        self.table.lock().settle(addr, bytes);
        result.map_err(|error| failed(Call::SetAccess, &error, Bytes::new(bytes)))
    }

    unsafe fn unmap(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.table.lock().begin_unmap(addr, bytes).map_err(DriverError::misuse(Call::Unmap))?;
        // SAFETY: the table knows the range to be one mapping of this driver, and the caller uses it no more.
        match self.with_spare_entry(|| unsafe { map::reserve_at(addr, bytes) }) {
            Ok(()) => {
                let _memory = self.table.lock().forget(addr);
                Ok(())
            }
            Err(error) => {
                self.table.lock().settle(addr, bytes);
                Err(failed(Call::Unmap, &error, Bytes::new(bytes)))
            }
        }
    }

    unsafe fn export(&self, handle: RawHandle) -> DriverResult<OwnedFd> {
        let chunk = self.table.lock().handle(handle).map_err(DriverError::misuse(Call::Export))?;
        if !chunk.shareable {
            let error = DriverError::new(Call::Export, Kind::NotSupported);
            return Err(error.with_detail("the chunk was not created to be shared as a POSIX file descriptor"));
        }
        let share = || -> io::Result<_> {
            // Whoever has the descriptor could cut the file short, and touching our own memory would then kill us.
            map::seal_size(&chunk.file)?;
            let about = chunk.file.metadata()?;
            Ok(((about.dev(), about.ino()), chunk.file.try_clone()?))
        };
        let (id, file) = share().map_err(|error| failed(Call::Export, &error, Bytes::ZERO))?;
        self.table.lock().note_export(id, &chunk.memory);
        Ok(file.into())
    }

    /// Memory that another driver created counts against that driver's capacity, and is not counted here a second time.
    unsafe fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> DriverResult<RawHandle> {
        self.check_size(Call::Import, bytes)?;
        let system = |error: io::Error| failed(Call::Import, &error, Bytes::new(bytes));
        let file = File::from(fd.try_clone_to_owned().map_err(system)?);
        if !map::is_sealed(&file).map_err(system)? {
            let detail = "the file was not exported by a host driver: its size is not sealed";
            return Err(DriverError::new(Call::Import, Kind::InvalidValue).with_detail(detail));
        }
        let about = file.metadata().map_err(system)?;
        let there = about.blocks().saturating_mul(512);
        if about.len() != bytes || there < bytes {
            let size = about.len();
            return Err(DriverError::misuse(Call::Import)(format!(
                "the file has {size} bytes, {there} of them there, not {bytes}"
            )));
        }
        let mut table = self.table.lock();
        let own = table.exported((about.dev(), about.ino()));
        let memory = own.unwrap_or_else(|| Arc::new(Memory::of_others(bytes)));
        Ok(table.add_handle(Chunk { file, memory, shareable: true }))
    }

    fn allocate(&self, bytes: u64) -> DriverResult<u64> {
        let pages = bytes.checked_next_multiple_of(map::page_size()).filter(|pages| *pages > 0);
        let pages = pages.ok_or_else(|| DriverError::misuse(Call::Allocate)(format!("a block of {bytes} bytes")))?;
        let (file, memory) = self.filled_file(Call::Allocate, pages)?;
        let system = |error: io::Error| no_addresses(Call::Allocate, &error, Bytes::new(pages));
        let addr = map::map_file_anywhere(pages, &file).map_err(system)?;
        // SAFETY: it was mapped just now; children are kept out for the same reasons as in `map_file`.
        if let Err(error) = unsafe { map::keep_from_children(addr, pages) } {
            // SAFETY: nobody was told of the mapping yet.
            let _ = self.with_spare_entry(|| unsafe { map::unmap(addr, pages) });
            return Err(system(error));
        }
        self.table.lock().add_block(addr, bytes, memory);
        Ok(addr)
    }

    unsafe fn free(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        let memory = self.table.lock().remove_block(addr, bytes).map_err(DriverError::misuse(Call::Free))?;
        let pages = bytes.next_multiple_of(map::page_size());
        // SAFETY: the block was the table's, and the caller uses it no more.
        match self.with_spare_entry(|| unsafe { map::unmap(addr, pages) }) {
            Ok(()) => Ok(()),
            Err(error) => {
                self.table.lock().add_block(addr, bytes, memory);
                Err(failed(Call::Free, &error, Bytes::new(pages)))
            }
        }
    }

    unsafe fn pin(&self, addr: u64, bytes: u64, flags: PinFlags) -> DriverResult<()> {
        self.lock_pages(addr, bytes, flags)
    }

    unsafe fn unpin(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.unlock_pages(addr, bytes)
    }

    fn allocate_pinned(&self, bytes: u64, flags: PinFlags) -> DriverResult<u64> {
        self.allocate_locked(bytes, flags)
    }

    unsafe fn free_pinned(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        self.free_locked(addr, bytes)
    }

    unsafe fn pinned_device_ptr(&self, addr: u64) -> DriverResult<u64> {
        self.locked_address(addr)
    }

    unsafe fn copy_in(&self, dst: u64, src: *const u8, bytes: u64, _: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the caller vouches for both sides; that they may overlap costs nothing.
        unsafe { ptr::copy(src, pointer(dst), bytes as usize) };
        Ok(())
    }

    unsafe fn copy_out(&self, dst: *mut u8, src: u64, bytes: u64, _: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: as in `copy_in`.
        unsafe { ptr::copy(pointer(src).cast_const(), dst, bytes as usize) };
        Ok(())
    }

    unsafe fn copy_within(&self, dst: u64, src: u64, bytes: u64, _: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: as in `copy_in`.
        unsafe { ptr::copy(pointer(src).cast_const(), pointer(dst), bytes as usize) };
        Ok(())
    }

    unsafe fn fill(&self, dst: u64, value: u8, bytes: u64, _: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the caller vouches for the memory.
        unsafe { ptr::write_bytes(pointer(dst), value, bytes as usize) };
        Ok(())
    }

    fn event_create(&self) -> DriverResult<RawEvent> {
        Ok(RawEvent(self.last_event.fetch_add(1, Relaxed) + 1))
    }

    unsafe fn event_record(&self, _: RawEvent, _: RawStream) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn event_query(&self, _: RawEvent) -> DriverResult<bool> {
        Ok(true)
    }

    unsafe fn event_wait(&self, _: RawEvent) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn event_destroy(&self, _: RawEvent) -> DriverResult<()> {
        Ok(())
    }

    fn synchronize(&self) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn synchronize_stream(&self, _: RawStream) -> DriverResult<()> {
        Ok(())
    }
}

/// A host address as the pointer it is: spans and blocks come from `map`, which exposes their provenance.
fn pointer(addr: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(addr as usize)
}
