//! The driver's own functions, without this crate between: what it is compared with.

use core::ffi::{c_char, c_void};
use core::ptr;

use growspan::driver::Driver;
use growspan::driver::cuda::CudaDriver;
use growspan::driver::cuda::ffi::{self, CUmemAccessDesc, CUmemAllocationFlags, CUmemAllocationProp, CUmemLocation};

use crate::table::Outcome;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

macro_rules! functions {
    ($( fn $name:ident($($arg:ty),*); )*) => {
        /// The functions that are called, by their exported names.
        #[allow(non_snake_case, reason = "the driver's own names")]
        struct Functions { $( $name: unsafe extern "C" fn($($arg),*) -> u32, )* }

        impl Functions {
            fn resolve(driver: &CudaDriver) -> Outcome<Self> {
                Ok(Self { $( $name: {
                    let address = driver.symbol(stringify!($name)).ok_or(concat!("no ", stringify!($name)))?.as_ptr();
                    // SAFETY: this is the function's type, as the driver's header has it.
                    unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> u32>(address) }
                }, )* })
            }
        }
    };
}

functions! {
    fn cuCtxSetCurrent(*mut c_void);
    fn cuMemAddressReserve(*mut u64, usize, usize, u64, u64);
    fn cuMemAddressFree(u64, usize);
    fn cuMemCreate(*mut u64, usize, *const CUmemAllocationProp, u64);
    fn cuMemRelease(u64);
    fn cuMemMap(u64, usize, usize, u64, u64);
    fn cuMemSetAccess(u64, usize, *const CUmemAccessDesc, usize);
    fn cuMemUnmap(u64, usize);
    fn cuModuleLoadData(*mut *mut c_void, *const c_void);
    fn cuModuleGetFunction(*mut *mut c_void, *mut c_void, *const c_char);
    fn cuLaunchKernel(
        *mut c_void, u32, u32, u32, u32, u32, u32, u32, *mut c_void, *mut *mut c_void, *mut *mut c_void
    );
    fn cuEventCreate(*mut *mut c_void, u32);
    fn cuEventRecord(*mut c_void, *mut c_void);
    fn cuEventSynchronize(*mut c_void);
    fn cuEventElapsedTime(*mut f32, *mut c_void, *mut c_void);
}

/// `Ok` if the driver says so.
fn ok(name: &str, code: u32) -> Outcome<()> {
    if code == 0 { Ok(()) } else { Err(format!("{name}: code {code}").into()) }
}

/// Calls a function of the table.
macro_rules! call {
    ($raw:expr, $name:ident($($arg:expr),* $(,)?)) => {{
        let function = $raw.functions.$name;
        // SAFETY: the pointers are valid for what the driver reads and writes, and the handles and addresses are alive
        // and this program's own.
        ok(stringify!($name), unsafe { function($($arg),*) })
    }};
}

/// The card, its primary context current on the thread that opened it.
pub(crate) struct Raw {
    pub(crate) driver: CudaDriver,
    functions: Functions,
    prop: CUmemAllocationProp,
    access: CUmemAccessDesc,
}

// SAFETY: the driver and its functions are made for many threads, and the one pointer, in `prop`, is null.
unsafe impl Sync for Raw {}

impl Raw {
    pub(crate) fn open(ordinal: u32) -> Outcome<Self> {
        let driver = CudaDriver::open(ordinal)?;
        driver.support()?;
        let functions = Functions::resolve(&driver)?;
        let location = CUmemLocation { type_: ffi::CU_MEM_LOCATION_TYPE_DEVICE, id: driver.raw_device() };
        let prop = CUmemAllocationProp {
            type_: ffi::CU_MEM_ALLOCATION_TYPE_PINNED,
            requested_handle_types: ffi::CU_MEM_HANDLE_TYPE_NONE,
            location,
            win32_handle_meta_data: ptr::null_mut(),
            alloc_flags: CUmemAllocationFlags::default(),
        };
        let access = CUmemAccessDesc { location, flags: ffi::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        let this = Self { driver, functions, prop, access };
        this.enter()?;
        Ok(this)
    }

    /// Makes the context current on this thread.
    pub(crate) fn enter(&self) -> Outcome<()> {
        call!(self, cuCtxSetCurrent(self.driver.raw_context()))
    }

    /// What can be had of the card now, in bytes.
    pub(crate) fn free(&self) -> Outcome<u64> {
        Ok(self.driver.memory()?.free)
    }

    /// The kernels.
    pub(crate) fn kernels(&self) -> Outcome<Kernels<'_>> {
        let mut module = ptr::null_mut();
        call!(self, cuModuleLoadData(&raw mut module, PTX.as_ptr().cast()))?;
        let function = |name: &core::ffi::CStr| -> Outcome<_> {
            let mut function = ptr::null_mut();
            call!(self, cuModuleGetFunction(&raw mut function, module, name.as_ptr()))?;
            Ok(function)
        };
        let mut events = [ptr::null_mut(); 2];
        for event in &mut events {
            call!(self, cuEventCreate(event, 0))?;
        }
        let (random_reads, nothing) = (function(c"random_reads")?, function(c"nothing")?);
        Ok(Kernels { raw: self, random_reads, nothing, events, out: self.driver.allocate(8)? })
    }
}

/// The chunk at a position: the crate's ladder, written down once more.
fn ladder(position: u64) -> u64 {
    match (position / 8).checked_ilog2() {
        Some(log) => (1_u64 << log).clamp(2 * MIB, GIB),
        None => 2 * MIB,
    }
}

/// How raw chunks are sized.
#[derive(Clone, Copy)]
pub(crate) enum Sizes {
    Ladder,
    Fixed(u64),
}

/// A span and the chunks under it, by nothing but the driver's calls, in the order in which the crate makes them.
pub(crate) struct Span<'a> {
    raw: &'a Raw,
    sizes: Sizes,
    base: u64,
    bytes: u64,
    mapped: u64,
    /// Handles and sizes of what is mapped.
    chunks: Vec<(u64, u64)>,
    /// The same of what is kept, in order.
    kept: Vec<(u64, u64)>,
}

impl<'a> Span<'a> {
    pub(crate) fn reserve(raw: &'a Raw, bytes: u64, sizes: Sizes) -> Outcome<Self> {
        let mut base = 0;
        call!(raw, cuMemAddressReserve(&raw mut base, bytes as usize, 2 << 20, 0, 0))?;
        Ok(Self { raw, sizes, base, bytes, mapped: 0, chunks: Vec::new(), kept: Vec::new() })
    }

    /// Grows to at least `to` bytes: creates what is not kept, maps it, makes it accessible.
    pub(crate) fn grow_to(&mut self, to: u64) -> Outcome<()> {
        let raw = self.raw;
        let (start, first) = (self.mapped, self.chunks.len());
        let mut end = start;
        while end < to {
            let chunk = match self.kept.pop() {
                Some(kept) => kept,
                None => {
                    let size = match self.sizes {
                        Sizes::Ladder => ladder(end),
                        Sizes::Fixed(size) => size,
                    };
                    let size = size.min(self.bytes - end);
                    let mut handle = 0;
                    call!(raw, cuMemCreate(&raw mut handle, size as usize, &raw const raw.prop, 0))?;
                    (handle, size)
                }
            };
            self.chunks.push(chunk);
            end += chunk.1;
        }
        if end == start {
            return Ok(());
        }
        let mut at = self.base + start;
        for &(handle, size) in &self.chunks[first..] {
            call!(raw, cuMemMap(at, size as usize, 0, handle, 0))?;
            at += size;
        }
        self.mapped = end;
        call!(raw, cuMemSetAccess(self.base + start, (end - start) as usize, &raw const raw.access, 1))
    }

    /// Unmaps everything, from the end, and keeps the handles.
    pub(crate) fn unmap(&mut self) -> Outcome<()> {
        while let Some((handle, size)) = self.chunks.pop() {
            self.mapped -= size;
            call!(self.raw, cuMemUnmap(self.base + self.mapped, size as usize))?;
            self.kept.push((handle, size));
        }
        Ok(())
    }

    /// Unmaps everything and releases it.
    pub(crate) fn release(&mut self) -> Outcome<()> {
        self.unmap()?;
        while let Some((handle, _)) = self.kept.pop() {
            call!(self.raw, cuMemRelease(handle))?;
        }
        Ok(())
    }
}

impl Drop for Span<'_> {
    fn drop(&mut self) {
        // After an error there is no more to do, and the process ends soon.
        let _ = self.release().and_then(|()| call!(self.raw, cuMemAddressFree(self.base, self.bytes as usize)));
    }
}

/// Kernels and what timing them needs.
pub(crate) struct Kernels<'a> {
    raw: &'a Raw,
    random_reads: *mut c_void,
    nothing: *mut c_void,
    events: [*mut c_void; 2],
    out: u64,
}

/// Blocks, threads and reads of each thread: 64 Mi reads.
const GRID: (u32, u32, u32) = (4096, 256, 64);

impl Kernels<'_> {
    /// The milliseconds that 64 Mi reads of 8 bytes each at random places of `[base, base + bytes)` take. `bytes` is a
    /// power of two.
    pub(crate) fn random_reads(&self, mut base: u64, bytes: u64) -> Outcome<f64> {
        let (blocks, threads, mut reads) = GRID;
        let (mut mask, mut out) = (bytes / 8 - 1, self.out);
        let mut args: [*mut c_void; 4] =
            [(&raw mut base).cast(), (&raw mut mask).cast(), (&raw mut reads).cast(), (&raw mut out).cast()];
        let ([begin, end], stream) = (self.events, ptr::null_mut());
        call!(self.raw, cuEventRecord(begin, stream))?;
        self.launch(self.random_reads, blocks, threads, args.as_mut_ptr())?;
        call!(self.raw, cuEventRecord(end, stream))?;
        call!(self.raw, cuEventSynchronize(end))?;
        let mut ms = 0.0_f32;
        call!(self.raw, cuEventElapsedTime(&raw mut ms, begin, end))?;
        Ok(f64::from(ms))
    }

    /// Queues a kernel that does nothing.
    pub(crate) fn nothing(&self) -> Outcome<()> {
        self.launch(self.nothing, 1, 32, ptr::null_mut())
    }

    fn launch(&self, function: *mut c_void, blocks: u32, threads: u32, args: *mut *mut c_void) -> Outcome<()> {
        let (stream, extra) = (ptr::null_mut(), ptr::null_mut());
        call!(self.raw, cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, args, extra))
    }
}

/// Each thread walks a sequence of its own (Knuth's MMIX generator) and reads at the places its high bits name. The sum
/// is written in the one case that does not happen, so that the reads are not left out.
const PTX: &core::ffi::CStr = c"
.version 7.0
.target sm_70
.address_size 64

.visible .entry nothing()
{
    ret;
}

.visible .entry random_reads(
    .param .u64 base, .param .u64 mask, .param .u32 reads, .param .u64 out)
{
    .reg .pred %p<3>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<10>;

    ld.param.u64 %rd1, [base];
    ld.param.u64 %rd2, [mask];
    ld.param.u32 %r1, [reads];
    ld.param.u64 %rd3, [out];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd3, %rd3;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    cvt.u64.u32 %rd4, %r5;
    mul.lo.u64 %rd5, %rd4, 7046029254386353131;
    add.u64 %rd5, %rd5, 88172645463325252;
    mov.u64 %rd6, 0;
next:
    mul.lo.u64 %rd5, %rd5, 6364136223846793005;
    add.u64 %rd5, %rd5, 1442695040888963407;
    shr.u64 %rd7, %rd5, 24;
    and.b64 %rd7, %rd7, %rd2;
    shl.b64 %rd7, %rd7, 3;
    add.u64 %rd8, %rd1, %rd7;
    ld.global.u64 %rd9, [%rd8];
    add.u64 %rd6, %rd6, %rd9;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra next;
    setp.eq.u64 %p2, %rd6, 1311768467463790321;
    @%p2 st.global.u64 [%rd3], %rd6;
    ret;
}
";
