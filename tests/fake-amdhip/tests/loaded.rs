//! The library as growspan meets it: through the loader, by its C functions, in processes of their own.
//!
//! Every test starts itself once more with the personality that it is about, since the library reads that once.
#![allow(clippy::undocumented_unsafe_blocks, clippy::multiple_unsafe_ops_per_block, reason = "a test of a C ABI")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failure of the set-up is a failure of the test")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output, Stdio};
use std::ptr::null_mut;

use fake_amdhip::{Figures, hipMemAccessDesc, hipMemAllocationProp, hipMemLocation, hipUUID};

const CHUNK: usize = 2 << 20;
const IN_CHILD: &str = "FAKE_AMDHIP_TEST_CHILD";

const FUNCTIONS: [&str; 50] = [
    "hipInit",
    "hipRuntimeGetVersion",
    "hipDriverGetVersion",
    "hipGetDeviceCount",
    "hipGetDevice",
    "hipSetDevice",
    "hipDeviceGetName",
    "hipDeviceGetPCIBusId",
    "hipDeviceGetUuid",
    "hipDeviceGetAttribute",
    "hipGetDevicePropertiesR0600",
    "hipMemGetInfo",
    "hipMalloc",
    "hipFree",
    "hipMemcpyHtoDAsync",
    "hipMemcpyDtoHAsync",
    "hipMemcpyDtoDAsync",
    "hipMemsetD8Async",
    "hipStreamCreateWithFlags",
    "hipStreamDestroy",
    "hipStreamSynchronize",
    "hipStreamIsCapturing",
    "hipStreamBeginCapture",
    "hipStreamEndCapture",
    "hipThreadExchangeStreamCaptureMode",
    "hipDeviceSynchronize",
    "hipEventCreateWithFlags",
    "hipEventRecord",
    "hipEventQuery",
    "hipEventSynchronize",
    "hipEventDestroy",
    "hipGetLastError",
    "hipGetErrorName",
    "hipMemGetAllocationGranularity",
    "hipMemAddressReserve",
    "hipMemAddressFree",
    "hipMemCreate",
    "hipMemRelease",
    "hipMemMap",
    "hipMemUnmap",
    "hipMemSetAccess",
    "hipMemGetAccess",
    "hipMemRetainAllocationHandle",
    "hipMemExportToShareableHandle",
    "hipMemImportFromShareableHandle",
    "fake_amdhip_figures",
    "fake_amdhip_calls",
    "fake_amdhip_device_of",
    "fake_amdhip_fail_map",
    "fake_amdhip_fail_call",
];

fn library_path() -> CString {
    let exe = std::env::current_exe().unwrap();
    let folders = exe.ancestors().skip(1).take(2);
    let mut candidates = folders.map(|folder| folder.join("libfake_amdhip.so"));
    let path = candidates.find(|path| path.exists()).expect("Cargo builds the library next to its tests");
    CString::new(path.to_str().unwrap()).unwrap()
}

/// The library, opened.
struct Hip(*mut c_void);

type Download = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, *mut c_void) -> u32;
type Upload = unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void) -> u32;
type Map = unsafe extern "C" fn(*mut c_void, usize, usize, *mut c_void, u64) -> u32;
type SetAccess = unsafe extern "C" fn(*mut c_void, usize, *const hipMemAccessDesc, usize) -> u32;
type Import = unsafe extern "C" fn(*mut *mut c_void, *const c_int, u32) -> u32;

impl Hip {
    fn open() -> Self {
        let library = unsafe { libc::dlopen(library_path().as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null());
        Self(library)
    }

    fn has(&self, name: &str) -> bool {
        let name = CString::new(name).unwrap();
        !unsafe { libc::dlsym(self.0, name.as_ptr()) }.is_null()
    }

    /// A function; `F` is its type.
    fn get<F: Copy>(&self, name: &str) -> F {
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        assert!(self.has(name), "{name}");
        let name = CString::new(name).unwrap();
        let place = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        unsafe { core::mem::transmute_copy(&place) }
    }

    fn init(&self) -> u32 {
        let init: unsafe extern "C" fn(u32) -> u32 = self.get("hipInit");
        unsafe { init(0) }
    }

    fn create(&self, handle_type: u32) -> Result<*mut c_void, u32> {
        type Create = unsafe extern "C" fn(*mut *mut c_void, usize, *const hipMemAllocationProp, u64) -> u32;
        let create: Create = self.get("hipMemCreate");
        let location = hipMemLocation { kind: 1, id: 0 };
        let prop = hipMemAllocationProp { kind: 1, handle_type, location, win32: null_mut(), flags: [0; 4] };
        let mut handle = null_mut();
        match unsafe { create(&raw mut handle, CHUNK, &raw const prop, 0) } {
            0 => Ok(handle),
            code => Err(code),
        }
    }

    fn one(&self, name: &str, pointer: *mut c_void) -> u32 {
        let function: unsafe extern "C" fn(*mut c_void) -> u32 = self.get(name);
        unsafe { function(pointer) }
    }

    fn sized(&self, name: &str, pointer: *mut c_void, size: usize) -> u32 {
        let function: unsafe extern "C" fn(*mut c_void, usize) -> u32 = self.get(name);
        unsafe { function(pointer, size) }
    }

    fn reserve(&self) -> *mut c_void {
        type Reserve = unsafe extern "C" fn(*mut *mut c_void, usize, usize, *mut c_void, u64) -> u32;
        let reserve: Reserve = self.get("hipMemAddressReserve");
        let mut at = null_mut();
        assert_eq!(unsafe { reserve(&raw mut at, CHUNK, 0, null_mut(), 0) }, 0);
        at
    }

    /// Maps a handle at new addresses and gives device 0 access.
    fn map(&self, handle: *mut c_void) -> *mut c_void {
        let at = self.reserve();
        let map: Map = self.get("hipMemMap");
        assert_eq!(unsafe { map(at, CHUNK, 0, handle, 0) }, 0);
        let set_access: SetAccess = self.get("hipMemSetAccess");
        let desc = hipMemAccessDesc { location: hipMemLocation { kind: 1, id: 0 }, flags: 3 };
        assert_eq!(unsafe { set_access(at, CHUNK, &raw const desc, 1) }, 0);
        at
    }

    fn write(&self, to: *mut c_void, data: &[u8]) {
        let upload: Upload = self.get("hipMemcpyHtoDAsync");
        assert_eq!(unsafe { upload(to, data.as_ptr().cast(), data.len(), null_mut()) }, 0);
        assert_eq!(self.one("hipStreamSynchronize", null_mut()), 0);
    }

    fn read(&self, from: *mut c_void, len: usize) -> Vec<u8> {
        let download: Download = self.get("hipMemcpyDtoHAsync");
        let mut data = vec![0xee; len];
        assert_eq!(unsafe { download(data.as_mut_ptr().cast(), from, len, null_mut()) }, 0);
        assert_eq!(self.one("hipStreamSynchronize", null_mut()), 0);
        data
    }

    fn figures(&self) -> Figures {
        let figures: unsafe extern "C" fn(c_int, *mut Figures) = self.get("fake_amdhip_figures");
        let mut out = Figures::default();
        unsafe { figures(-1, &raw mut out) };
        out
    }
}

fn in_child() -> bool {
    std::env::var_os(IN_CHILD).is_some()
}

fn personality() -> String {
    std::env::var("FAKE_AMDHIP").unwrap()
}

/// The test of this name once more, in a process of its own.
fn child(test: &str, vars: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(IN_CHILD, "1");
    command.stdin(Stdio::null()).envs(vars.iter().copied()).output().unwrap()
}

fn passes(test: &str, vars: &[(&str, &str)]) {
    let Output { status, stdout, stderr } = child(test, vars);
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success() && stdout.contains("1 passed"), "{status}\n{stdout}\n{stderr}");
}

fn aborts(test: &str, vars: &[(&str, &str)], message: &str) {
    let Output { status, stderr, .. } = child(test, vars);
    let stderr = String::from_utf8_lossy(&stderr);
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{status}\n{stderr}");
    assert!(stderr.contains(message), "{stderr}");
}

#[test]
fn everything_is_exported_and_the_name_is_amds() {
    let hip = Hip::open();
    let missing: Vec<_> = FUNCTIONS.into_iter().filter(|name| !hip.has(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let again = unsafe { libc::dlopen(c"libamdhip64.so.7".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert_eq!(again, hip.0);
}

#[test]
fn a_life_through_c() {
    if !in_child() {
        return passes("a_life_through_c", &[("FAKE_AMDHIP", "7.2.4")]);
    }
    let hip = Hip::open();
    let version: unsafe extern "C" fn(*mut i32) -> u32 = hip.get("hipRuntimeGetVersion");
    let mut number = 0;
    assert_eq!((unsafe { version(&raw mut number) }, number), (0, 70_253_211), "before hipInit");
    assert_eq!(unsafe { version(null_mut()) }, 1);
    assert_eq!(hip.init(), 0);
    let handle = hip.create(0).unwrap();
    let at = hip.map(handle);
    hip.write(at, b"through C");
    assert_eq!(hip.read(at, 9), b"through C");
    let device_of: unsafe extern "C" fn(*mut c_void) -> i32 = hip.get("fake_amdhip_device_of");
    assert_eq!(unsafe { (device_of(at), device_of(at.wrapping_byte_add(CHUNK))) }, (0, -1));
    let calls: unsafe extern "C" fn(*const c_char) -> u64 = hip.get("fake_amdhip_calls");
    assert_eq!(unsafe { (calls(c"hipMemMap".as_ptr()), calls(c"hipFree".as_ptr())) }, (1, 0));
    let fail: unsafe extern "C" fn(*const c_char, u64, u32) = hip.get("fake_amdhip_fail_call");
    unsafe { fail(c"hipMemCreate".as_ptr(), 1, 2) };
    assert_eq!(hip.create(0), Err(2));
    let last: unsafe extern "C" fn() -> u32 = hip.get("hipGetLastError");
    assert_eq!(unsafe { (last(), last()) }, (2, 0));
    assert_eq!(hip.sized("hipMemUnmap", at, CHUNK), 0);
    assert_eq!(hip.one("hipMemRelease", handle), 0);
    assert_eq!(hip.figures().bytes_used, CHUNK as u64);
    assert_eq!(hip.sized("hipMemAddressFree", at, CHUNK), 0);
    assert_eq!(hip.figures(), Figures::default());
}

#[test]
fn what_a_device_says_of_itself() {
    if !in_child() {
        let card = [("FAKE_AMDHIP_GFX", "gfx1100"), ("FAKE_AMDHIP_PCI", "0x43"), ("FAKE_AMDHIP_DEVICES", "3")];
        return passes("what_a_device_says_of_itself", &card);
    }
    let hip = Hip::open();
    let bus_id: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> u32 = hip.get("hipDeviceGetPCIBusId");
    let mut buffer = [0x7f; 32];
    assert_eq!(unsafe { bus_id(buffer.as_mut_ptr(), 12, 2) }, 1, "one too short");
    assert_eq!(buffer, [0x7f; 32]);
    assert_eq!(unsafe { bus_id(buffer.as_mut_ptr(), 13, 2) }, 0);
    assert_eq!(unsafe { CStr::from_ptr(buffer.as_ptr()) }, c"0000:45:00.0");
    assert_eq!(buffer[13..], [0x7f; 19]);
    assert_eq!(unsafe { bus_id(buffer.as_mut_ptr(), 13, 3) }, 101);

    let properties: unsafe extern "C" fn(*mut u8, c_int) -> u32 = hip.get("hipGetDevicePropertiesR0600");
    let mut all = [0xa5_u8; 1480];
    assert_eq!(unsafe { properties(all.as_mut_ptr(), 1) }, 0);
    assert_eq!((all[1471], &all[1472..]), (0, &[0xa5; 8][..]), "1472 bytes and no more");
    assert_eq!(&all[1160..1168], b"gfx1100\0");
    assert_eq!(all[288..296], (32_624_u64 << 20).to_ne_bytes());
    let uuid: unsafe extern "C" fn(*mut hipUUID, c_int) -> u32 = hip.get("hipDeviceGetUuid");
    let mut id = hipUUID { bytes: [0; 16] };
    assert_eq!(unsafe { uuid(&raw mut id, 1) }, 0);
    assert_eq!(id.bytes[..], all[256..272]);
    assert_eq!(unsafe { uuid(&raw mut id, 2) }, 0);
    assert_ne!(id.bytes[..], all[256..272]);

    let attribute: unsafe extern "C" fn(*mut i32, u32, c_int) -> u32 = hip.get("hipDeviceGetAttribute");
    let ask = |number| {
        let mut value = -7;
        let code = unsafe { attribute(&raw mut value, number, 0) };
        (code, value)
    };
    assert_eq!((ask(89), ask(16), ask(67), ask(4711)), ((0, 1), (0, 0), (0, 0x43), (1, -7)));
    let name: unsafe extern "C" fn(u32) -> *const c_char = hip.get("hipGetErrorName");
    assert_eq!(unsafe { CStr::from_ptr(name(2)) }, c"hipErrorOutOfMemory");
}

#[test]
fn without_a_device_nothing_is_written() {
    if !in_child() {
        passes("without_a_device_nothing_is_written", &[("FAKE_AMDHIP", "none")]);
        return passes("without_a_device_nothing_is_written", &[("FAKE_AMDHIP", "5.2")]);
    }
    let code = if personality() == "none" { 100 } else { 101 };
    let hip = Hip::open();
    assert_eq!(hip.init(), code);
    let count: unsafe extern "C" fn(*mut i32) -> u32 = hip.get("hipGetDeviceCount");
    let mut devices = -7;
    assert_eq!((unsafe { count(&raw mut devices) }, devices), (100, -7), "on every version");
    let info: unsafe extern "C" fn(*mut usize, *mut usize) -> u32 = hip.get("hipMemGetInfo");
    let (mut free, mut total) = (7, 7);
    assert_eq!((unsafe { info(&raw mut free, &raw mut total) }, free, total), (code, 7, 7));
    assert_eq!(hip.create(0), Err(code));
}

#[test]
fn an_unknown_personality_is_the_end() {
    if !in_child() {
        let vars = [("FAKE_AMDHIP", "6.9")];
        return aborts("an_unknown_personality_is_the_end", &vars, "FAKE_AMDHIP is \"6.9\"");
    }
    Hip::open().init();
}

#[test]
fn misuse_is_the_end() {
    if !in_child() {
        let vars = [("FAKE_AMDHIP", "6.4.3")];
        return aborts("misuse_is_the_end", &vars, "fake amdhip: misuse: hipMemUnmap: nothing is mapped at ");
    }
    let hip = Hip::open();
    hip.sized("hipMemUnmap", hip.reserve(), CHUNK);
}

#[test]
fn a_descriptor_in_place_of_a_pointer_to_it_is_the_end() {
    if !in_child() {
        let message = "5 is passed where a pointer to a descriptor belongs";
        return aborts("a_descriptor_in_place_of_a_pointer_to_it_is_the_end", &[], message);
    }
    let import: Import = Hip::open().get("hipMemImportFromShareableHandle");
    let mut handle = null_mut();
    unsafe { import(&raw mut handle, std::ptr::without_provenance(5), 1) };
}

#[test]
fn reading_device_memory_as_the_hosts_is_the_end() {
    if !in_child() {
        let message = "is passed as host memory and is device memory";
        return aborts("reading_device_memory_as_the_hosts_is_the_end", &[], message);
    }
    let hip = Hip::open();
    let at = hip.map(hip.create(0).unwrap());
    let upload: Upload = hip.get("hipMemcpyHtoDAsync");
    unsafe { upload(at, at.wrapping_byte_add(CHUNK / 2), 8, null_mut()) };
}

#[test]
fn a_forked_child_may_begin_but_not_go_on() {
    if !in_child() {
        return passes("a_forked_child_may_begin_but_not_go_on", &[]);
    }
    let hip = Hip::open();
    let version: unsafe extern "C" fn(*mut i32) -> u32 = hip.get("hipRuntimeGetVersion");
    let mut number = 0;
    assert_eq!(unsafe { version(&raw mut number) }, 0);
    // Whether it exits by itself, and whether it aborts.
    let ends = |body: &dyn Fn()| match unsafe { libc::fork() } {
        0 => {
            body();
            unsafe { libc::_exit(7) }
        }
        pid => {
            let mut status = 0;
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            let aborted = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGABRT;
            (libc::WIFEXITED(status), aborted)
        }
    };
    let create = || {
        let _ = hip.create(0);
    };
    let ask = || {
        unsafe { version(null_mut()) };
    };
    assert_eq!(ends(&create), (true, false), "nothing was begun here");
    assert_eq!(hip.init(), 0);
    assert_eq!(ends(&create), (false, true));
    assert_eq!(ends(&ask), (false, true), "whatever it is");
    assert_eq!(hip.figures(), Figures::default());
}

#[test]
fn open_files_run_out() {
    if !in_child() {
        passes("open_files_run_out", &[("FAKE_AMDHIP", "7.14.1")]);
        return passes("open_files_run_out", &[("FAKE_AMDHIP", "10.0")]);
    }
    let limit = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let hip = Hip::open();
    let mut handles = Vec::new();
    while handles.len() < 100 {
        match hip.create(0) {
            Ok(handle) => handles.push(handle),
            Err(code) => {
                assert_eq!(code, 2);
                break;
            }
        }
    }
    let figures = hip.figures();
    assert_eq!((figures.handles, figures.bytes_used), (handles.len() as u64, (handles.len() * CHUNK) as u64));
    if personality() == "10.0" {
        assert_eq!((handles.len(), figures.open_handle_files), (100, 0));
        return;
    }
    assert!((40..64).contains(&handles.len()), "{}", handles.len());
    assert_eq!(figures.open_handle_files, handles.len() as u64);
    assert_eq!(hip.one("hipMemRelease", handles.pop().unwrap()), 0);
    assert!(hip.create(0).is_ok());
}

/// A map and a grant of access open a file for as long as they take.
#[test]
fn maps_and_grants_need_a_file_to_open() {
    const NAME: &str = "maps_and_grants_need_a_file_to_open";
    if !in_child() {
        for personality in ["6.4.3", "7.2.4", "7.14.1", "10.0"] {
            passes(NAME, &[("FAKE_AMDHIP", personality)]);
        }
        return;
    }
    let hip = Hip::open();
    let (there, handle) = (hip.map(hip.create(0).unwrap()), hip.create(0).unwrap());
    let at = hip.reserve();
    let map: Map = hip.get("hipMemMap");
    let set_access: SetAccess = hip.get("hipMemSetAccess");
    let location = hipMemLocation { kind: 1, id: 0 };
    let desc = hipMemAccessDesc { location, flags: 3 };
    let grant = |at| unsafe { set_access(at, CHUNK, &raw const desc, 1) };
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    let none = libc::rlimit { rlim_cur: 3, ..limit };
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const none) }, 0);
    let silent = !matches!(personality().as_str(), "7.14.1" | "10.0");
    assert_eq!(unsafe { map(at, CHUNK, 0, handle, 0) }, if silent { 0 } else { 205 });
    assert_eq!((grant(at), grant(there)), (1, 1));
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    assert_eq!((grant(at), grant(there)), (1, 0), "nothing was mapped there, and here it was");
}

#[test]
fn memory_goes_from_process_to_process() {
    const FD: &str = "FAKE_AMDHIP_TEST_FD";
    if !in_child() {
        return passes("memory_goes_from_process_to_process", &[]);
    }
    let hip = Hip::open();
    if let Ok(number) = std::env::var(FD) {
        let import: Import = hip.get("hipMemImportFromShareableHandle");
        let fd: c_int = number.parse().unwrap();
        let mut handle = null_mut();
        assert_eq!(unsafe { import(&raw mut handle, &raw const fd, 1) }, 0);
        let at = hip.map(handle);
        assert_eq!(hip.read(at, 4), b"from");
        hip.write(at, b"back");
        assert_eq!(hip.figures().bytes_used, 0);
        return;
    }
    type Export = unsafe extern "C" fn(*mut c_int, *mut c_void, u32, u64) -> u32;
    let handle = hip.create(1).unwrap();
    let at = hip.map(handle);
    hip.write(at, b"from");
    let export: Export = hip.get("hipMemExportToShareableHandle");
    let mut fd = -1;
    assert_eq!(unsafe { export(&raw mut fd, handle, 1, 0) }, 0);
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_GETFD) }, libc::FD_CLOEXEC);
    assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }, 0);
    passes("memory_goes_from_process_to_process", &[(FD, &fd.to_string())]);
    assert_eq!(hip.read(at, 4), b"back");
}
