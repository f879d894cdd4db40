//! The stand-in library from its own side: what it counts, and what it can be told to do wrong.

use core::ffi::{CStr, c_char, c_void};
use core::mem::MaybeUninit;
use std::path::PathBuf;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use growspan::driver::RawStream;
use libloading::Library;

/// What the library holds for one device; in bytes where it says so.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) spans: u64,
    pub(crate) handles: u64,
    pub(crate) mappings: u64,
    pub(crate) blocks: u64,
    pub(crate) streams: u64,
    pub(crate) events: u64,
    pub(crate) bytes_used: u64,
    pub(crate) bytes_leaked: u64,
    pub(crate) open_handle_files: u64,
}

/// Where Cargo has put the library: next to the test programs.
pub(crate) fn path() -> PathBuf {
    let path = std::env::current_exe().unwrap().with_file_name("libfake_amdhip.so");
    assert!(path.exists(), "{} is not built", path.display());
    path
}

/// The library, open.
pub(crate) struct StandIn(Library);

macro_rules! functions {
    ($( fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; )*) => { impl StandIn { $(
        #[allow(non_snake_case, reason = "the library's name")]
        fn $name(&self $(, $arg: $ty)*) -> $ret {
            // SAFETY: the library's function of this name has this signature.
            let function = unsafe { self.0.get::<unsafe extern "C" fn($($ty),*) -> $ret>(stringify!($name)) }.unwrap();
            // SAFETY: the callers pass pointers to what is alive, and streams and events that are.
            unsafe { function($($arg),*) }
        }
    )* } };
}

functions! {
    fn fake_amdhip_figures(device: i32, out: *mut Figures) -> ();
    fn fake_amdhip_device_of(address: *const c_void) -> i32;
    fn fake_amdhip_pins() -> u64;
    fn fake_amdhip_pin_retries() -> u64;
    fn fake_amdhip_fail_map(nth: u64) -> ();
    fn fake_amdhip_fail_call(name: *const c_char, nth: u64, code: u32) -> ();
    fn fake_amdhip_calls(name: *const c_char) -> u64;
    fn hipGetDevice(device: *mut i32) -> u32;
    fn hipSetDevice(device: i32) -> u32;
    fn hipGetLastError() -> u32;
    fn hipStreamCreateWithFlags(stream: *mut *mut c_void, flags: u32) -> u32;
    fn hipStreamDestroy(stream: *mut c_void) -> u32;
    fn hipStreamSynchronize(stream: *mut c_void) -> u32;
    fn hipMemcpyDtoHAsync(to: *mut c_void, from: *mut c_void, bytes: usize, stream: *mut c_void) -> u32;
}

impl StandIn {
    /// The copy that the driver uses.
    pub(crate) fn get() -> &'static Self {
        static LIBRARY: OnceLock<StandIn> = OnceLock::new();
        // SAFETY: the library is our own, and its initialisers do nothing.
        LIBRARY.get_or_init(|| Self(unsafe { Library::new(path()) }.unwrap()))
    }

    pub(crate) fn figures(&self, device: i32) -> Figures {
        let mut figures = Figures::default();
        self.fake_amdhip_figures(device, &raw mut figures);
        figures
    }

    /// The device that the memory at an address lies on, -1 if there is none.
    pub(crate) fn device_of(&self, address: u64) -> i32 {
        self.fake_amdhip_device_of(null::<c_void>().with_addr(address as usize))
    }

    /// How many pieces of page-locked memory there are.
    pub(crate) fn pins(&self) -> u64 {
        self.fake_amdhip_pins()
    }

    /// How often page-locking was begun again.
    pub(crate) fn pin_retries(&self) -> u64 {
        self.fake_amdhip_pin_retries()
    }

    /// Lets the nth map from now fail where some versions do not notice.
    pub(crate) fn fail_map(&self, nth: u64) {
        self.fake_amdhip_fail_map(nth);
    }

    /// Lets the nth call from now of a function fail.
    pub(crate) fn fail_call(&self, name: &CStr, nth: u64, code: u32) {
        self.fake_amdhip_fail_call(name.as_ptr(), nth, code);
    }

    /// How often a function was called.
    pub(crate) fn calls(&self, name: &CStr) -> u64 {
        self.fake_amdhip_calls(name.as_ptr())
    }

    /// Reads device memory from outside the crate.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) {
        let from = null_mut::<c_void>().with_addr(address as usize);
        assert_eq!(self.hipMemcpyDtoHAsync(bytes.as_mut_ptr().cast(), from, bytes.len(), null_mut()), 0);
        assert_eq!(self.hipStreamSynchronize(null_mut()), 0);
    }

    /// Queues a read of device memory on a stream, whose device is current.
    pub(crate) fn queue_read(&self, address: u64, bytes: &mut [u8], stream: &Stream) {
        let from = null_mut::<c_void>().with_addr(address as usize);
        assert_eq!(self.hipMemcpyDtoHAsync(bytes.as_mut_ptr().cast(), from, bytes.len(), stream.0), 0);
    }

    /// The device that is current on this thread.
    pub(crate) fn current(&self) -> i32 {
        let mut device = -1;
        assert_eq!(self.hipGetDevice(&raw mut device), 0);
        device
    }

    pub(crate) fn make_current(&self, device: i32) {
        assert_eq!(self.hipSetDevice(device), 0);
    }

    /// What the thread's next check for errors finds.
    pub(crate) fn last_error(&self) -> u32 {
        self.hipGetLastError()
    }
}

/// A stream made outside the crate, and its device.
pub(crate) struct Stream(*mut c_void, i32);

impl Stream {
    pub(crate) fn new(device: i32) -> Self {
        let mut stream = MaybeUninit::uninit();
        StandIn::get().make_current(device);
        assert_eq!(StandIn::get().hipStreamCreateWithFlags(stream.as_mut_ptr(), 1), 0);
        StandIn::get().make_current(0);
        // SAFETY: the call succeeded and so has written it.
        Self(unsafe { stream.assume_init() }, device)
    }

    pub(crate) fn raw(&self) -> RawStream {
        // SAFETY: the stream is alive as long as this value, and the tests wait before they drop it.
        unsafe { RawStream::from_raw(self.0) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        StandIn::get().make_current(self.1);
        assert_eq!(StandIn::get().hipStreamDestroy(self.0), 0);
        StandIn::get().make_current(0);
    }
}
