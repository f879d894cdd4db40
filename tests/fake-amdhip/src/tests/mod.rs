//! Rules, tried on instances.

mod life;
mod misuse;
mod pinned;
mod refusals;
mod returns;
mod sharing;
mod streams;
mod versions;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::{hipMemAccessDesc, hipMemAllocationProp, hipMemLocation};
use crate::control::Figures;
use crate::personality::Config;
use crate::runtime::{Call, Kind, Runtime};

const MIB: usize = 1 << 20;
const CHUNK: usize = 2 * MIB;

/// A runtime, its functions as results.
struct Hip(Runtime);

fn location(device: i32) -> hipMemLocation {
    hipMemLocation { kind: 1, id: device }
}

fn properties(device: i32) -> hipMemAllocationProp {
    let win32 = core::ptr::null_mut();
    hipMemAllocationProp { kind: 1, handle_type: 0, location: location(device), win32, flags: [0; 4] }
}

impl Hip {
    /// With two devices of 64 MiB.
    fn new(personality: &str) -> Self {
        Self::with(personality, &[])
    }

    fn with(personality: &str, vars: &[(&str, &str)]) -> Self {
        let usual = [("FAKE_AMDHIP", personality), ("FAKE_AMDHIP_DEVICES", "2"), ("FAKE_AMDHIP_MEMORY_MIB", "64")];
        let all = vars.iter().chain(&usual);
        let var = |name: &str| all.clone().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Self(Runtime::new(Config::read(var).unwrap()))
    }

    fn do_<T>(
        &self,
        name: &'static str,
        kind: Kind,
        body: impl FnOnce(&mut Call<'_>) -> Result<T, u32>,
    ) -> Result<T, u32> {
        let mut result = None;
        match self.0.call(name, kind, |call| body(call).map(|value| result = Some(value))) {
            0 => Ok(result.unwrap()),
            code => Err(code),
        }
    }

    fn set_device(&self, device: i32) {
        let set = |call: &mut Call<'_>| call.known_device(device).map(|device| call.thread.device = device);
        self.do_("hipSetDevice", Kind::Usual, set).unwrap();
    }

    fn reserve(&self, size: usize) -> Result<usize, u32> {
        self.reserve_aligned(size, 0)
    }

    fn reserve_aligned(&self, size: usize, alignment: usize) -> Result<usize, u32> {
        self.do_("hipMemAddressReserve", Kind::Vmm, |call| call.reserve(size, alignment, 0, 0))
    }

    /// There if nothing is.
    fn reserve_near(&self, hint: usize) -> usize {
        self.do_("hipMemAddressReserve", Kind::Vmm, |call| call.reserve(CHUNK, 0, hint, 0)).unwrap()
    }

    fn free_address(&self, at: usize, size: usize) -> Result<(), u32> {
        self.do_("hipMemAddressFree", Kind::Vmm, |call| call.free_address(at, size))
    }

    fn create(&self, size: usize) -> Result<u64, u32> {
        self.create_on(size, 0)
    }

    fn create_on(&self, size: usize, device: i32) -> Result<u64, u32> {
        self.do_("hipMemCreate", Kind::Vmm, |call| call.create(size, properties(device), 0))
    }

    fn create_shareable(&self, size: usize) -> Result<u64, u32> {
        let prop = hipMemAllocationProp { handle_type: 1, ..properties(0) };
        self.do_("hipMemCreate", Kind::Vmm, |call| call.create(size, prop, 0))
    }

    fn release(&self, handle: u64) -> Result<(), u32> {
        self.do_("hipMemRelease", Kind::Vmm, |call| call.release(handle))
    }

    fn map(&self, at: usize, size: usize, handle: u64) -> Result<(), u32> {
        self.do_("hipMemMap", Kind::Vmm, |call| call.map(at, size, 0, handle, 0))
    }

    fn unmap(&self, at: usize, size: usize) -> Result<(), u32> {
        self.do_("hipMemUnmap", Kind::Vmm, |call| call.unmap(at, size))
    }

    fn set_access(&self, at: usize, size: usize) -> Result<(), u32> {
        self.set_access_for(at, size, &[0])
    }

    fn set_access_for(&self, at: usize, size: usize, devices: &[i32]) -> Result<(), u32> {
        let desc = |device: &i32| hipMemAccessDesc { location: location(*device), flags: 3 };
        let descs: Vec<_> = devices.iter().map(desc).collect();
        self.do_("hipMemSetAccess", Kind::Vmm, |call| call.set_access(at, size, &descs))
    }

    fn get_access(&self, at: usize, device: i32) -> Result<u64, u32> {
        self.do_("hipMemGetAccess", Kind::Vmm, |call| call.get_access(at, location(device)))
    }

    fn retain(&self, at: usize) -> Result<u64, u32> {
        self.do_("hipMemRetainAllocationHandle", Kind::Vmm, |call| call.retain(at))
    }

    fn malloc(&self, size: usize) -> Result<usize, u32> {
        self.do_("hipMalloc", Kind::Usual, |call| call.malloc(size))
    }

    fn free(&self, at: usize) -> Result<(), u32> {
        self.do_("hipFree", Kind::Usual, |call| call.free(at))
    }

    fn free_bytes(&self) -> usize {
        self.do_("hipMemGetInfo", Kind::Usual, |call| Ok(call.memory_info().0)).unwrap()
    }

    fn upload(&self, to: usize, data: &[u8], stream: u64) -> Result<(), u32> {
        self.do_("hipMemcpyHtoDAsync", Kind::Usual, |call| call.upload(to, data.to_vec(), stream))
    }

    fn download(&self, data: &mut [u8], from: usize, stream: u64) -> Result<(), u32> {
        let (host, len) = (data.as_mut_ptr().expose_provenance(), data.len());
        self.do_("hipMemcpyDtoHAsync", Kind::Usual, |call| call.download(host, from, len, stream))
    }

    fn copy(&self, to: usize, from: usize, len: usize, stream: u64) -> Result<(), u32> {
        self.do_("hipMemcpyDtoDAsync", Kind::Usual, |call| call.copy(to, from, len, stream))
    }

    fn fill(&self, to: usize, value: u8, len: usize, stream: u64) -> Result<(), u32> {
        self.do_("hipMemsetD8Async", Kind::Usual, |call| call.fill(to, value, len, stream))
    }

    fn synchronize(&self, stream: u64) -> Result<(), u32> {
        self.do_("hipStreamSynchronize", Kind::Usual, |call| call.stream_synchronize(stream))
    }

    fn device_synchronize(&self) -> Result<(), u32> {
        self.do_("hipDeviceSynchronize", Kind::Usual, |call| call.device_synchronize())
    }

    fn stream(&self, flags: u32) -> u64 {
        self.do_("hipStreamCreateWithFlags", Kind::Usual, |call| call.stream_create(flags)).unwrap()
    }

    fn destroy_stream(&self, stream: u64) -> Result<(), u32> {
        self.do_("hipStreamDestroy", Kind::Usual, |call| call.stream_destroy(stream))
    }

    fn event(&self) -> u64 {
        self.do_("hipEventCreateWithFlags", Kind::Usual, |call| call.event_create(2)).unwrap()
    }

    fn record(&self, event: u64, stream: u64) -> Result<(), u32> {
        self.do_("hipEventRecord", Kind::Usual, |call| call.event_record(event, stream))
    }

    fn query(&self, event: u64) -> Result<(), u32> {
        self.do_("hipEventQuery", Kind::Usual, |call| call.event_query(event))
    }

    fn last_error(&self) -> u32 {
        let take = |call: &mut Call<'_>| Ok(core::mem::take(&mut call.thread.last_error));
        self.do_("hipGetLastError", Kind::Free, take).unwrap()
    }

    /// What is at device addresses now, through the null stream.
    fn read(&self, from: usize, len: usize) -> Vec<u8> {
        let mut data = vec![0xee; len];
        self.download(&mut data, from, 0).unwrap();
        self.synchronize(0).unwrap();
        data
    }

    fn write(&self, to: usize, data: &[u8]) {
        self.upload(to, data, 0).unwrap();
        self.synchronize(0).unwrap();
    }

    /// A span of `chunks` chunks with memory under each, which device 0 may use.
    fn span(&self, chunks: usize) -> (usize, Vec<u64>) {
        let at = self.reserve(chunks * CHUNK).unwrap();
        let handles = (0..chunks).map(|i| self.chunk(at + i * CHUNK, CHUNK)).collect();
        (at, handles)
    }

    /// New memory at reserved addresses, which device 0 may use.
    fn chunk(&self, at: usize, size: usize) -> u64 {
        let handle = self.create(size).unwrap();
        self.map(at, size, handle).unwrap();
        self.set_access(at, size).unwrap();
        handle
    }

    fn figures(&self) -> Figures {
        self.0.figures(-1)
    }
}

/// The message that the process would have been aborted with.
fn misuse_of<R>(body: impl FnOnce() -> R) -> String {
    let Err(payload) = catch_unwind(AssertUnwindSafe(body)) else { panic!("this went through") };
    let message = payload.downcast_ref::<String>().expect("a message").clone();
    assert!(message.starts_with("fake amdhip: misuse: hip"), "{message}");
    message
}
