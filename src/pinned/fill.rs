//! Filling page-locked memory from files, by many threads.

use core::time::Duration;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

use bytemuck::Pod;

use super::PinnedBuffer;
use super::parallel::{in_parts, usual_threads};
use super::timing::rate;
use crate::bytes::Bytes;
use crate::error::{Error, Result};

/// What reads past the system's file cache have to be multiples of: the largest block that disks have.
const BLOCK: u64 = 4096;

/// The most that is asked for in one read, in bytes.
const READ: usize = 16 << 20;

/// What can be read at any place, by many threads at once.
pub trait ReadAt: Sync {
    /// Reads into `target` from `offset` on, as many bytes as it likes; zero at the end.
    ///
    /// # Errors
    /// What the source says; [`ErrorKind::Interrupted`] is tried again.
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, target, offset)
    }
}

impl ReadAt for [u8] {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let rest = usize::try_from(offset).ok().and_then(|offset| self.get(offset..)).unwrap_or_default();
        let len = rest.len().min(target.len());
        target[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }
}

impl<R: ReadAt + ?Sized> ReadAt for &R {
    fn read_at(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        (**self).read_at(target, offset)
    }
}

/// How a file is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct FileOptions {
    /// Where in the file to begin, in bytes.
    pub offset: u64,
    /// How many threads read; zero for as many as the process may run, 16 at most.
    pub threads: usize,
    /// Past the system's file cache (`O_DIRECT`), where file system, offset and place in memory allow: a file larger than
    /// the cache would push everything else out of it.
    pub direct: bool,
}

impl FileOptions {
    /// From the start, by the usual threads, through the cache.
    pub const fn new() -> Self {
        Self { offset: 0, threads: 0, direct: false }
    }

    /// The same, from another place on, in bytes.
    pub const fn offset(mut self, offset: u64) -> Self {
        self.offset = offset;
        self
    }

    /// The same, by as many threads.
    pub const fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// The same, past the cache or through it.
    pub const fn direct(mut self, direct: bool) -> Self {
        self.direct = direct;
        self
    }
}

/// What filling took. Getting the memory is not in here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fill {
    /// How much was read.
    pub bytes: Bytes,
    /// From call to return.
    pub elapsed: Duration,
    /// Threads that read.
    pub threads: u32,
    /// How much of it was read past the system's file cache.
    pub direct: Bytes,
}

impl Fill {
    /// Bytes per second.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        rate(self.bytes, self.elapsed)
    }
}

/// The start of memory that threads write disjoint parts of.
#[derive(Clone, Copy)]
struct Target(*mut u8);

// SAFETY: the pointer is used by `fill` alone, each part of whose memory is one thread's.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

impl Target {
    /// # Safety
    /// `[at, at + len)` lies in the memory, all of it initialised, and is nobody else's for the lifetime, which ends
    /// before that of the memory's borrow.
    unsafe fn part<'a>(self, at: u64, len: u64) -> &'a mut [u8] {
        let start = self.0.wrapping_add(at as usize);
        // SAFETY: as the caller promises.
        unsafe { core::slice::from_raw_parts_mut(start, len as usize) }
    }
}

impl<T: Pod> PinnedBuffer<T> {
    /// Fills elements from a source that can be read anywhere, from byte `offset` on, by up to `threads` threads (zero:
    /// the usual number).
    ///
    /// ```
    /// use growspan::{Device, PinnedBuffer};
    ///
    /// # fn main() -> growspan::Result<()> {
    /// let mut buffer = PinnedBuffer::<u8>::builder(&Device::host()?).max_len(8).build()?;
    /// buffer.grow_to(8)?;
    /// let fill = buffer.fill_from(2..8, &b"0123456789"[..], 4, 2)?;
    /// assert_eq!((&buffer[..], fill.bytes.get()), (&b"\0\0456789"[..], 6));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::OutOfBounds`]; [`Error::Fill`] with what the source said where it first failed, or with
    /// [`UnexpectedEof`](ErrorKind::UnexpectedEof) if it ends too early, or with
    /// [`InvalidInput`](ErrorKind::InvalidInput) if there are no such offsets. The elements then hold any mix of old and
    /// new.
    pub fn fill_from(&mut self, range: Range<usize>, source: impl ReadAt, offset: u64, threads: usize) -> Result<Fill> {
        let target = self.target(range)?;
        fill(target, offset, threads, |part, at, end| read_all(&source, part, at, end).map(|()| 0))
    }

    /// Fills elements from a file, by positioned reads of many threads.
    ///
    /// # Errors
    /// As for [`fill_from`](Self::fill_from); [`Error::Fill`] also if the file cannot be opened.
    pub fn fill_from_file(
        &mut self,
        range: Range<usize>,
        path: impl AsRef<Path>,
        options: FileOptions,
    ) -> Result<Fill> {
        let target = self.target(range)?;
        let asked = Bytes::new(target.len() as u64);
        let file = File::open(path.as_ref()).map_err(|source| Error::Fill { asked, source })?;
        let whole_blocks =
            (target.as_ptr().addr() as u64).is_multiple_of(BLOCK) && options.offset.is_multiple_of(BLOCK);
        // Where the file system does not have it, opening fails.
        let direct = match options.direct && whole_blocks {
            true => OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path.as_ref()).ok(),
            false => None,
        };
        fill(target, options.offset, options.threads, |part, at, end| {
            let blocks = part.len() - part.len() % BLOCK as usize;
            let past = direct.as_ref().map_or(0, |direct| read_direct(direct, &mut part[..blocks], at));
            read_all(&file, &mut part[past..], at + past as u64, end).map(|()| past as u64)
        })
    }

    fn target(&mut self, range: Range<usize>) -> Result<&mut [u8]> {
        let (start, count, len) = (range.start, range.end.saturating_sub(range.start), self.len());
        let elements = self.as_mut_slice().get_mut(range);
        elements.map(bytemuck::cast_slice_mut).ok_or(Error::OutOfBounds { what: "filling", start, count, len })
    }
}

/// Lets `read(part, offset, end)` fill all parts; `end` is where in the source the last one ends, and it says how much of
/// a part it read past the cache.
fn fill(
    target: &mut [u8],
    offset: u64,
    threads: usize,
    read: impl Fn(&mut [u8], u64, u64) -> io::Result<u64> + Sync,
) -> Result<Fill> {
    let bytes = target.len() as u64;
    let failed = |source| Error::Fill { asked: Bytes::new(bytes), source };
    let end = offset.checked_add(bytes).ok_or_else(|| failed(ErrorKind::InvalidInput.into()))?;
    let began = Instant::now();
    let direct = core::sync::atomic::AtomicU64::new(0);
    let start = Target(target.as_mut_ptr());
    let work = |at: u64, len: u64| {
        // SAFETY: parts lie within the target, which is borrowed until this function returns, after all threads have ended;
        // each part is handed out once.
        let part = unsafe { start.part(at, len) };
        direct.fetch_add(read(part, offset + at, end)?, core::sync::atomic::Ordering::Relaxed);
        Ok(())
    };
    let threads = if threads == 0 { usual_threads() } else { threads };
    let threads = in_parts(threads, bytes, work, |_| Ok(())).map_err(failed)?;
    let direct = Bytes::new(direct.into_inner());
    Ok(Fill { bytes: Bytes::new(bytes), elapsed: began.elapsed(), threads, direct })
}

/// Reads a part. Of a fill that ends too early, the part that is told of is the lowest one: the one that the source's end
/// lies in, or begins with.
fn read_all(source: &(impl ReadAt + ?Sized), mut part: &mut [u8], mut offset: u64, end: u64) -> io::Result<()> {
    while !part.is_empty() {
        let most = part.len().min(READ);
        match source.read_at(&mut part[..most], offset) {
            Ok(0) => {
                let what = format!("the source ends at byte {offset}, {} bytes too early", end - offset);
                return Err(io::Error::new(ErrorKind::UnexpectedEof, what));
            }
            // Whoever claims more than was asked for is a source gone wrong, not memory.
            Ok(read) if read > most => return Err(ErrorKind::InvalidData.into()),
            Ok(read) => {
                part = &mut part[read..];
                offset += read as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads whole blocks past the cache as far as that goes; gives how far. What is left, the usual way reads, or finds out
/// why not.
fn read_direct(file: &File, part: &mut [u8], offset: u64) -> usize {
    let mut done = 0;
    while done < part.len() {
        let most = (part.len() - done).min(READ);
        match FileExt::read_at(file, &mut part[done..done + most], offset + done as u64) {
            Ok(read) if read > 0 && (read as u64).is_multiple_of(BLOCK) => done += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            _ => break,
        }
    }
    done
}
