//! The card from the side of a program that uses it: kernels, streams, graphs and contexts, with calls that the crate
//! itself does not make.
//!
//! Every raw call here is made with the primary context current (see [`gpu`]), on objects that are alive, with pointers
//! to places of the type that the driver's header names.

use core::ffi::{c_char, c_void};
use core::mem::ManuallyDrop;
use core::ptr::{self, null_mut};
use std::ffi::CString;
use std::sync::OnceLock;

use growspan::driver::RawStream;
use growspan::driver::cuda::CudaDriver;

/// An opaque handle of the driver.
pub(crate) type Handle = *mut c_void;

macro_rules! functions {
    ($( fn $name:ident($($arg:ident: $ty:ty),*); )*) => {
        /// The driver's functions, by their exported names. All return a `CUresult`, 0 for success.
        #[allow(non_snake_case, reason = "the driver's names")]
        pub(crate) struct Functions { $( pub(crate) $name: unsafe extern "C" fn($($ty),*) -> u32, )* }

        impl Functions {
            fn resolve(driver: &CudaDriver) -> Self {
                Self { $( $name: {
                    let address = driver.symbol(stringify!($name));
                    let address = address.unwrap_or_else(|| panic!("no {} in the driver", stringify!($name)));
                    // SAFETY: the function of that name has this signature in the driver's header.
                    unsafe {
                        core::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> u32>(address.as_ptr())
                    }
                }, )* }
            }
        }
    };
}

functions! {
    fn cuGetErrorName(code: u32, text: *mut *const c_char);
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: i32);
    fn cuDevicePrimaryCtxReset_v2(device: i32);
    fn cuCtxCreate_v2(context: *mut Handle, flags: u32, device: i32);
    fn cuCtxDestroy_v2(context: Handle);
    fn cuCtxSetCurrent(context: Handle);
    fn cuCtxGetCurrent(context: *mut Handle);
    fn cuCtxSynchronize();
    fn cuModuleLoadDataEx(module: *mut Handle, image: *const c_void, count: u32, options: *const u32, values: *mut Handle);
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char);
    fn cuLaunchKernel(
        function: Handle, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: Handle, params: *mut *mut c_void, extra: *mut *mut c_void
    );
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize);
    fn cuMemFree_v2(address: u64);
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: Handle);
    fn cuStreamCreate(stream: *mut Handle, flags: u32);
    fn cuStreamDestroy_v2(stream: Handle);
    fn cuStreamQuery(stream: Handle);
    fn cuStreamSynchronize(stream: Handle);
    fn cuStreamBeginCapture_v2(stream: Handle, mode: u32);
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle);
    fn cuStreamIsCapturing(stream: Handle, status: *mut u32);
    fn cuGraphInstantiateWithFlags(exec: *mut Handle, graph: Handle, flags: u64);
    fn cuGraphLaunch(exec: Handle, stream: Handle);
    fn cuGraphExecDestroy(exec: Handle);
    fn cuGraphDestroy(graph: Handle);
}

/// The first card, its primary context retained, with the kernels loaded.
pub(crate) struct Gpu {
    pub(crate) driver: CudaDriver,
    pub(crate) cu: Functions,
    pub(crate) context: Handle,
    stamp: Handle,
    check: Handle,
    spin: Handle,
}

// SAFETY: the handles are names that the driver takes from any thread.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

static GPU: OnceLock<Gpu> = OnceLock::new();

/// The card. Its primary context is current on this thread afterwards.
pub(crate) fn gpu() -> &'static Gpu {
    let gpu = GPU.get_or_init(Gpu::open);
    gpu.make_current(gpu.context);
    gpu
}

impl Gpu {
    fn open() -> Self {
        let driver = CudaDriver::open(0).unwrap_or_else(|error| panic!("{error}"));
        let cu = Functions::resolve(&driver);
        let mut context = null_mut();
        let code = unsafe { (cu.cuDevicePrimaryCtxRetain)(&raw mut context, driver.raw_device()) };
        let mut gpu = Self { driver, cu, context, stamp: null_mut(), check: null_mut(), spin: null_mut() };
        gpu.ok("retain the primary context", code);
        gpu.make_current(gpu.context);
        let module = gpu.load(include_str!("kernels.ptx"));
        let function = |name: &str| {
            let text = CString::new(name).unwrap();
            let mut function = null_mut();
            gpu.ok(name, unsafe { (gpu.cu.cuModuleGetFunction)(&raw mut function, module, text.as_ptr()) });
            function
        };
        let functions = (function("stamp"), function("check"), function("spin"));
        (gpu.stamp, gpu.check, gpu.spin) = functions;
        // A kernel is loaded when it is first launched, which would not do in a capture.
        let (stream, cell) = (ManuallyDrop::new(Stream { raw: null_mut() }), ManuallyDrop::new(gpu.cell()));
        gpu.stamp(&stream, 0, 0, 0);
        gpu.check(&stream, 0, 0, 0, &cell);
        gpu.spin(&stream, 0, 0, 0, &cell);
        gpu.ok("the first kernels", gpu.sync());
        assert_eq!(cell.read_with(&gpu), [u64::from(SPINNERS), u64::MAX], "what the kernels wrote");
        gpu
    }

    /// Loads PTX text; what the driver's compiler says about it goes into the panic.
    fn load(&self, ptx: &str) -> Handle {
        const ERROR_LOG_BUFFER: u32 = 5;
        const ERROR_LOG_BUFFER_SIZE: u32 = 6;
        let image = CString::new(ptx).unwrap();
        let mut log = vec![0_u8; 8192];
        let options = [ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE];
        // The size is passed in the place of a pointer.
        let mut values: [Handle; 2] = [log.as_mut_ptr().cast(), ptr::without_provenance_mut(log.len())];
        let mut module = null_mut();
        let code = unsafe {
            let image = image.as_ptr().cast();
            (self.cu.cuModuleLoadDataEx)(&raw mut module, image, 2, options.as_ptr(), values.as_mut_ptr())
        };
        let log = String::from_utf8_lossy(&log);
        assert_eq!(code, 0, "loading the kernels: {}: {}", self.name(code), log.trim_end_matches('\0'));
        module
    }

    /// A result code's name.
    pub(crate) fn name(&self, code: u32) -> String {
        let mut text = ptr::null();
        match unsafe { (self.cu.cuGetErrorName)(code, &raw mut text) } {
            0 if !text.is_null() => unsafe { core::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            _ => format!("code {code}"),
        }
    }

    /// Success, or a panic with the code's name.
    #[track_caller]
    pub(crate) fn ok(&self, what: &str, code: u32) {
        assert_eq!(code, 0, "{what}: {}", self.name(code));
    }

    /// Makes a context, or none, current on this thread.
    pub(crate) fn make_current(&self, context: Handle) {
        self.ok("set current", unsafe { (self.cu.cuCtxSetCurrent)(context) });
    }

    /// The context that is current on this thread.
    pub(crate) fn current(&self) -> Handle {
        let mut context = null_mut();
        self.ok("get current", unsafe { (self.cu.cuCtxGetCurrent)(&raw mut context) });
        context
    }

    /// Waits for all of the device; the code it gets.
    pub(crate) fn sync(&self) -> u32 {
        unsafe { (self.cu.cuCtxSynchronize)() }
    }

    fn launch(&self, function: Handle, stream: &Stream, blocks: u32, params: &mut [*mut c_void]) {
        // A grid of no blocks is an error.
        let blocks = blocks.max(1);
        self.ok("launch", unsafe {
            let (params, extra) = (params.as_mut_ptr(), null_mut());
            (self.cu.cuLaunchKernel)(function, blocks, 1, 1, THREADS, 1, 1, 0, stream.raw, params, extra)
        });
    }

    /// Queues a kernel that gives each of `words` words from `address` on its value ([`value`]).
    pub(crate) fn stamp(&self, stream: &Stream, address: u64, words: usize, seed: u32) {
        let (mut address, mut words, mut seed) = (address, words as u64, seed);
        let params = &mut [(&raw mut address).cast(), (&raw mut words).cast(), (&raw mut seed).cast()];
        self.launch(self.stamp, stream, blocks(words), params);
    }

    /// Queues a kernel that counts the words that do not have their value.
    pub(crate) fn check(&self, stream: &Stream, address: u64, words: usize, seed: u32, bad: &Cell) {
        let (mut address, mut words, mut seed, mut bad) = (address, words as u64, seed, bad.address);
        let params =
            &mut [(&raw mut address).cast(), (&raw mut words).cast(), (&raw mut seed).cast(), (&raw mut bad).cast()];
        self.launch(self.check, stream, blocks(words), params);
    }

    /// Queues a kernel of [`SPINNERS`] threads that wait so long, then add 1 to each word, then 1 to `done`.
    pub(crate) fn spin(&self, stream: &Stream, address: u64, words: usize, nanoseconds: u64, done: &Cell) {
        let (mut address, mut words, mut wait, mut done) = (address, words as u64, nanoseconds, done.address);
        let params =
            &mut [(&raw mut address).cast(), (&raw mut words).cast(), (&raw mut wait).cast(), (&raw mut done).cast()];
        self.launch(self.spin, stream, SPINNERS / THREADS, params);
    }

    fn cell(&self) -> Cell {
        let mut address = 0;
        self.ok("allocate", unsafe { (self.cu.cuMemAlloc_v2)(&raw mut address, 16) });
        let start = [0, u64::MAX];
        self.ok("copy to the device", unsafe { (self.cu.cuMemcpyHtoD_v2)(address, start.as_ptr().cast(), 16) });
        Cell { address }
    }

    /// Reads device memory. Waits for nothing but the default stream.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) {
        self.ok("copy to the host", unsafe {
            (self.cu.cuMemcpyDtoH_v2)(bytes.as_mut_ptr().cast(), address, bytes.len())
        });
    }
}

/// Threads per block.
const THREADS: u32 = 256;

/// The threads of the kernel that spins: few enough to run all at once.
pub(crate) const SPINNERS: u32 = 64 * THREADS;

/// Blocks for so many words; beyond those of a card or two the kernels go round.
const fn blocks(words: u64) -> u32 {
    let blocks = words.div_ceil(THREADS as u64);
    if blocks > 2048 { 2048 } else { blocks as u32 }
}

/// The value of the word with this index.
pub(crate) fn value(index: usize, seed: u32) -> u32 {
    let (low, high) = (index as u32, (index as u64 >> 32) as u32);
    low.wrapping_mul(0x9E37_79B1).wrapping_add(high.wrapping_mul(0x85EB_CA6B)) ^ seed
}

/// Makes a call that gives something back, whatever comes of it.
fn drop_with(call: impl FnOnce(&Functions) -> u32) {
    if let Some(gpu) = GPU.get() {
        call(&gpu.cu);
    }
}

/// A stream that the default stream does not wait for. Destroyed on drop.
pub(crate) struct Stream {
    raw: Handle,
}

impl Stream {
    pub(crate) fn new() -> Self {
        const NON_BLOCKING: u32 = 1;
        Self::with(NON_BLOCKING)
    }

    /// One that the default stream does wait for.
    pub(crate) fn blocking() -> Self {
        Self::with(0)
    }

    fn with(flags: u32) -> Self {
        let gpu = gpu();
        let mut raw = null_mut();
        gpu.ok("create a stream", unsafe { (gpu.cu.cuStreamCreate)(&raw mut raw, flags) });
        Self { raw }
    }

    /// As the crate takes it.
    pub(crate) fn for_growspan(&self) -> RawStream {
        // SAFETY: a stream of the first card, which the tests keep until they are done with it.
        unsafe { RawStream::from_raw(self.raw) }
    }

    pub(crate) fn wait(&self) {
        let gpu = gpu();
        gpu.ok("wait for a stream", unsafe { (gpu.cu.cuStreamSynchronize)(self.raw) });
    }

    /// Whether work is queued or running.
    pub(crate) fn is_busy(&self) -> bool {
        const NOT_READY: u32 = 600;
        let gpu = gpu();
        let code = unsafe { (gpu.cu.cuStreamQuery)(self.raw) };
        assert!(code == 0 || code == NOT_READY, "query of a stream: {}", gpu.name(code));
        code == NOT_READY
    }

    pub(crate) fn fill(&self, address: u64, value: u32, words: usize) {
        let gpu = gpu();
        gpu.ok("memset", unsafe { (gpu.cu.cuMemsetD32Async)(address, value, words, self.raw) });
    }

    pub(crate) fn begin_capture(&self, mode: CaptureMode) {
        let gpu = gpu();
        gpu.ok("begin a capture", unsafe { (gpu.cu.cuStreamBeginCapture_v2)(self.raw, mode as u32) });
    }

    /// 0 none, 1 active, 2 invalidated; or what the driver says.
    pub(crate) fn capture_status(&self) -> Result<u32, String> {
        let gpu = gpu();
        let mut status = u32::MAX;
        match unsafe { (gpu.cu.cuStreamIsCapturing)(self.raw, &raw mut status) } {
            0 => Ok(status),
            code => Err(gpu.name(code)),
        }
    }

    /// Ends a capture and makes it ready to run; or the name of the code with which it failed.
    pub(crate) fn end_capture(&self) -> Result<Graph, String> {
        let gpu = gpu();
        let (mut graph, mut exec) = (null_mut(), null_mut());
        match unsafe { (gpu.cu.cuStreamEndCapture)(self.raw, &raw mut graph) } {
            0 if !graph.is_null() => {}
            code => return Err(gpu.name(code)),
        }
        let code = unsafe { (gpu.cu.cuGraphInstantiateWithFlags)(&raw mut exec, graph, 0) };
        unsafe { (gpu.cu.cuGraphDestroy)(graph) };
        if code == 0 { Ok(Graph { exec }) } else { Err(format!("instantiate: {}", gpu.name(code))) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Fails where a test has lost the context, and so does making it current.
        drop_with(|cu| unsafe { (cu.cuStreamDestroy_v2)(self.raw) });
    }
}

/// Which calls a capture forbids.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CaptureMode {
    Global = 0,
    ThreadLocal = 1,
    Relaxed = 2,
}

/// A graph ready to run. Destroyed on drop.
pub(crate) struct Graph {
    exec: Handle,
}

impl Graph {
    pub(crate) fn launch(&self, stream: &Stream) {
        let gpu = gpu();
        gpu.ok("launch a graph", unsafe { (gpu.cu.cuGraphLaunch)(self.exec, stream.raw) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        drop_with(|cu| unsafe { (cu.cuGraphExecDestroy)(self.exec) });
    }
}

/// Two words of 64 bits on the device: a count from zero, and a least from the largest. Freed on drop.
pub(crate) struct Cell {
    address: u64,
}

impl Cell {
    pub(crate) fn new() -> Self {
        gpu().cell()
    }

    /// Reads it, after the work that writes it was waited for.
    pub(crate) fn read(&self) -> [u64; 2] {
        self.read_with(gpu())
    }

    fn read_with(&self, gpu: &Gpu) -> [u64; 2] {
        let mut bytes = [0; 16];
        gpu.read(self.address, &mut bytes);
        [0, 8].map(|at| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()))
    }

    /// That no check found a wrong word. The stream was waited for.
    #[track_caller]
    pub(crate) fn assert_none_bad(&self, what: &str) {
        let [bad, first] = self.read();
        assert_eq!(bad, 0, "{what}: {bad} words are wrong, the first at index {first}");
    }
}

impl Drop for Cell {
    fn drop(&mut self) {
        drop_with(|cu| unsafe { (cu.cuMemFree_v2)(self.address) });
    }
}
