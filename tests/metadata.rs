//! What a chunk costs in bookkeeping: bytes of this process's heap, counted by the allocator.
#![allow(clippy::unwrap_used, reason = "that is how a test fails, in its helpers too")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use growspan::driver::host::{HostDriver, HostOptions};
use growspan::driver::{
    ChunkProps, Driver, DriverInfo, DriverResult, Granularities, MemoryInfo, RawEvent, RawHandle, RawStream,
};
use growspan::{Bytes, Device, DeviceOptions, GrowableBuffer, Quiesce, Sizing};

const CHUNKS: usize = 4096;
const SIZE: usize = 4096;

/// What a chunk may cost, in bytes, besides what its driver keeps.
const BAR: usize = 64;

/// The system's allocator, counting the bytes that are allocated.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all calls go through unchanged to an allocator that keeps the rules.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        // SAFETY: the contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the contract is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A driver that keeps nothing of its own, as a GPU's does: what the heap grows by is the crate's. For the device's
/// check it is the host driver, and from then on it only gives out numbers.
#[derive(Debug)]
struct Hollow {
    host: HostDriver,
    info: DriverInfo,
    hollow: AtomicBool,
    next: AtomicU64,
}

impl Hollow {
    fn open() -> Self {
        let host = HostDriver::open(options()).unwrap();
        let mut info = host.info().clone();
        // Nothing of it may be touched.
        info.host_visible = false;
        info.open_files_per_chunk = 0;
        info.maps_per_chunk = 0;
        Self { host, info, hollow: AtomicBool::new(false), next: AtomicU64::new(1 << 40) }
    }

    fn number(&self, step: u64) -> Option<u64> {
        self.hollow.load(Relaxed).then(|| self.next.fetch_add(step, Relaxed))
    }

    fn nothing(&self) -> bool {
        self.hollow.load(Relaxed)
    }
}

// SAFETY: numbers are given out once, and the memory is not said to be the host's. This test does not use it.
unsafe impl Driver for Hollow {
    fn info(&self) -> &DriverInfo {
        &self.info
    }

    fn support(&self) -> DriverResult<()> {
        self.host.support()
    }

    fn granularity(&self) -> DriverResult<Granularities> {
        self.host.granularity()
    }

    fn memory(&self) -> DriverResult<MemoryInfo> {
        self.host.memory()
    }

    fn reserve(&self, bytes: u64, align: u64) -> DriverResult<u64> {
        self.number(bytes).map_or_else(|| self.host.reserve(bytes, align), Ok)
    }

    unsafe fn free_span(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        if self.nothing() { Ok(()) } else { unsafe { self.host.free_span(addr, bytes) } }
    }

    fn create(&self, bytes: u64, props: ChunkProps) -> DriverResult<RawHandle> {
        self.number(1).map_or_else(|| self.host.create(bytes, props), |number| Ok(RawHandle(number)))
    }

    unsafe fn release(&self, handle: RawHandle) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        if self.nothing() { Ok(()) } else { unsafe { self.host.release(handle) } }
    }

    unsafe fn map(&self, addr: u64, bytes: u64, handle: RawHandle) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        if self.nothing() { Ok(()) } else { unsafe { self.host.map(addr, bytes, handle) } }
    }

    unsafe fn set_access(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        if self.nothing() { Ok(()) } else { unsafe { self.host.set_access(addr, bytes) } }
    }

    unsafe fn unmap(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        if self.nothing() { Ok(()) } else { unsafe { self.host.unmap(addr, bytes) } }
    }

    fn allocate(&self, bytes: u64) -> DriverResult<u64> {
        self.host.allocate(bytes)
    }

    unsafe fn free(&self, addr: u64, bytes: u64) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.free(addr, bytes) }
    }

    unsafe fn copy_in(&self, dst: u64, src: *const u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.copy_in(dst, src, bytes, stream) }
    }

    unsafe fn copy_out(&self, dst: *mut u8, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.copy_out(dst, src, bytes, stream) }
    }

    unsafe fn copy_within(&self, dst: u64, src: u64, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.copy_within(dst, src, bytes, stream) }
    }

    unsafe fn fill(&self, dst: u64, value: u8, bytes: u64, stream: Option<RawStream>) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.fill(dst, value, bytes, stream) }
    }

    fn event_create(&self) -> DriverResult<RawEvent> {
        self.host.event_create()
    }

    unsafe fn event_record(&self, event: RawEvent, stream: RawStream) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.event_record(event, stream) }
    }

    unsafe fn event_query(&self, event: RawEvent) -> DriverResult<bool> {
        // SAFETY: the contract is the same.
        unsafe { self.host.event_query(event) }
    }

    unsafe fn event_wait(&self, event: RawEvent) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.event_wait(event) }
    }

    unsafe fn event_destroy(&self, event: RawEvent) -> DriverResult<()> {
        // SAFETY: the contract is the same.
        unsafe { self.host.event_destroy(event) }
    }

    fn synchronize(&self) -> DriverResult<()> {
        Ok(())
    }

    unsafe fn synchronize_stream(&self, _: RawStream) -> DriverResult<()> {
        Ok(())
    }
}

fn options() -> HostOptions {
    HostOptions::default().with_granularity(Bytes::new(SIZE as u64)).with_capacity(Bytes::mib(64))
}

fn device(driver: Arc<dyn Driver>) -> Device {
    let device = DeviceOptions::new().pool_keep(Bytes::mib(64)).open(driver).unwrap();
    assert!(device.verdict().reason().is_none(), "{}", device.verdict().report());
    device
}

/// Heap bytes per chunk: the most while a buffer grows chunk by chunk, and when all chunks are in the pool.
fn cost(device: &Device, chunks: usize) -> (usize, usize) {
    let mut buffer = GrowableBuffer::<u8>::builder(device)
        .max_len(chunks * SIZE)
        .sizing(Sizing::Uniform(Bytes::new(SIZE as u64)))
        .build()
        .unwrap();
    let before = LIVE.load(Relaxed);
    let mut most = 0;
    for n in 1..=chunks {
        buffer.grow_to(n * SIZE).unwrap();
        // Of the first few, what does not depend on their number would be the larger part.
        if n >= 256 {
            most = most.max((LIVE.load(Relaxed) - before) / n);
        }
    }
    assert_eq!(buffer.chunks().len(), chunks);
    buffer.shrink_to(0, Quiesce::Device).unwrap();
    let pooled = (LIVE.load(Relaxed) - before) / chunks;
    buffer.close().unwrap();
    device.pool().trim(Bytes::ZERO);
    (most, pooled)
}

/// One test, since all threads of a process share the count.
#[test]
fn a_chunk_costs_less_than_64_bytes() {
    let hollow = Arc::new(Hollow::open());
    let device = device(Arc::clone(&hollow) as Arc<dyn Driver>);
    hollow.hollow.store(true, Relaxed);
    let (mapped, pooled) = cost(&device, CHUNKS);
    println!("{mapped} bytes per mapped chunk at most, {pooled} per chunk in the pool");
    assert!(mapped < BAR, "{mapped} bytes per mapped chunk");
    assert!(pooled < BAR, "{pooled} bytes per chunk in the pool");

    // The host driver's tables come on top.
    let host = self::device(Arc::new(HostDriver::open(options()).unwrap()));
    let (mapped, pooled) = cost(&host, CHUNKS);
    println!("with the host driver's tables: {mapped} per mapped chunk at most, {pooled} in the pool");
    assert!(mapped < 4 * BAR, "{mapped} bytes per mapped chunk with the host driver's tables");
}
