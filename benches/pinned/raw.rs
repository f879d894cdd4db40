//! The same by hand: memory mapped and touched by plain threads, registered with one call of the driver's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use growspan::driver::{Driver, PinFlags};

use crate::Outcome;

const PAGE: usize = 4096;

/// A driver of its own for the device of that name.
pub(crate) fn driver(name: &str) -> Outcome<Arc<dyn Driver>> {
    let (kind, ordinal) = name.split_once(':').unwrap_or((name, "0"));
    let ordinal: u32 = ordinal.parse()?;
    Ok(match kind {
        "host" => Arc::new(growspan::driver::host::HostDriver::open(Default::default())?),
        #[cfg(feature = "cuda")]
        "cuda" => Arc::new(growspan::driver::cuda::CudaDriver::open(ordinal)?),
        #[cfg(feature = "hip")]
        "hip" => Arc::new(growspan::driver::hip::HipDriver::open(ordinal)?),
        _ => return Err(format!("no driver for {kind} {ordinal}; use host, cuda:N or hip:N").into()),
    })
}

/// What one life took.
pub(crate) struct Life {
    pub(crate) make: Duration,
    pub(crate) free: Duration,
}

/// One allocation of the driver's.
pub(crate) fn allocation(driver: &dyn Driver, bytes: u64) -> Outcome<Life> {
    let began = Instant::now();
    let addr = driver.allocate_pinned(bytes, PinFlags::USUAL)?;
    let make = began.elapsed();
    let began = Instant::now();
    // SAFETY: it was allocated just now, and nobody uses it.
    unsafe { driver.free_pinned(addr, bytes) }?;
    Ok(Life { make, free: began.elapsed() })
}

/// Pages that are mapped, unmapped on drop.
struct Pages {
    addr: usize,
    len: usize,
}

impl Pages {
    fn map(len: usize) -> Outcome<Self> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: asks for new memory, where nothing is.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, access, kind | libc::MAP_NORESERVE, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        // SAFETY: advice on this memory's pages.
        unsafe { libc::madvise(at, len, libc::MADV_HUGEPAGE) };
        Ok(Self { addr: at.expose_provenance(), len })
    }

    fn touch(&self, threads: usize) {
        let share = self.len.div_ceil(threads).next_multiple_of(PAGE);
        std::thread::scope(|scope| {
            for start in (0..self.len).step_by(share) {
                let end = (start + share).min(self.len);
                scope.spawn(move || {
                    for at in (start..end).step_by(PAGE) {
                        let page = std::ptr::with_exposed_provenance_mut::<u8>(self.addr + at);
                        // SAFETY: the page is this value's, and this thread's share of it.
                        unsafe { page.write_volatile(1) };
                    }
                });
            }
        });
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: it was mapped by this value, and whoever registered it has let go of it.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(self.addr), self.len) };
    }
}

/// Touched by many threads and registered in one piece.
pub(crate) fn touch_and_register(driver: &dyn Driver, bytes: u64, threads: usize) -> Outcome<Life> {
    let began = Instant::now();
    let pages = Pages::map(bytes as usize)?;
    pages.touch(threads);
    // SAFETY: the pages are mapped until they are let go of below.
    unsafe { driver.pin(pages.addr as u64, bytes, PinFlags::USUAL) }?;
    let make = began.elapsed();
    let began = Instant::now();
    // SAFETY: it was pinned just now, and the device does nothing.
    unsafe { driver.unpin(pages.addr as u64, bytes) }?;
    drop(pages);
    Ok(Life { make, free: began.elapsed() })
}
