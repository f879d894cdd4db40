//! The functions of HIP's header.
#![allow(non_snake_case, reason = "named as the header names them")]

use core::ffi::{c_char, c_void};
use std::os::fd::IntoRawFd;

use crate::abi::{
    PROPERTIES_SIZE, error_name, hipDeviceptr_t, hipError_t, hipEvent_t, hipGraph_t, hipMemAccessDesc,
    hipMemAllocationProp, hipMemGenericAllocationHandle_t, hipMemLocation, hipStream_t, hipUUID,
};
use crate::pointers::{In, Out, host_bytes, opaque};
use crate::runtime::{Kind, Runtime};

/// Declares exported functions: how the header has them, what they need, and what they do with the call `$call`.
macro_rules! exports {
    ($(
        $(#[$doc:meta])*
        $name:ident($($arg:ident: $type:ty),* $(,)?): $kind:ident = |$call:ident| $body:expr;
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the header has it: pointers are null or point to what their names say until the call returns, and host memory
        /// of a copy until the copy is done.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> hipError_t {
            Runtime::get().call(stringify!($name), Kind::$kind, |$call| $body)
        }
    )*};
}

exports! {
    /// Starts the runtime.
    hipInit(flags: u32): Usual = |_call| if flags == 0 { Ok(()) } else { Err(1) };

    /// The version of the HIP runtime.
    hipRuntimeGetVersion(version: Out<i32>): Free = |call| {
        version.wanted()?;
        version.set(call.config.says(call.name, 0, call.config.rules.version.into()) as i32);
        Ok(())
    };

    /// The same number: there is no other.
    hipDriverGetVersion(version: Out<i32>): Free = |call| {
        version.wanted()?;
        version.set(call.config.rules.version);
        Ok(())
    };

    /// The thread's last error, which this forgets.
    hipGetLastError(): Free = |call| match core::mem::take(&mut call.thread.last_error) {
        0 => Ok(()),
        code => Err(code),
    };

    /// How many devices there are.
    hipGetDeviceCount(count: Out<i32>): Usual = |call| {
        count.wanted()?;
        count.set(call.config.says(call.name, 0, call.config.devices as i64) as i32);
        Ok(())
    };

    /// The thread's current device.
    hipGetDevice(device: Out<i32>): Usual = |call| {
        device.wanted()?;
        device.set(call.thread.device as i32);
        Ok(())
    };

    /// Makes a device the thread's current one.
    hipSetDevice(device: i32): Usual = |call| {
        call.thread.device = call.known_device(device)?;
        Ok(())
    };

    /// A device's name.
    hipDeviceGetName(name: Out<c_char>, len: i32, device: i32): Usual = |call| {
        name.set_text(&call.device_name(call.known_device(device)?), len)
    };

    /// A device's place on the PCI bus.
    hipDeviceGetPCIBusId(id: Out<c_char>, len: i32, device: i32): Usual = |call| {
        id.set_text(&call.pci_bus_id(call.known_device(device)?), len)
    };

    /// A device's UUID.
    hipDeviceGetUuid(uuid: Out<hipUUID>, device: i32): Usual = |call| {
        uuid.wanted()?;
        uuid.set(hipUUID { bytes: call.uuid(call.known_device(device)?) });
        Ok(())
    };

    /// One of a device's properties.
    hipDeviceGetAttribute(value: Out<i32>, attribute: u32, device: i32): Usual = |call| {
        value.wanted()?;
        value.set(call.attribute(attribute, call.known_device(device)?)?);
        Ok(())
    };

    /// All of a device's properties.
    hipGetDevicePropertiesR0600(all: Out<[u8; PROPERTIES_SIZE]>, device: i32): Usual = |call| {
        all.wanted()?;
        all.set(call.properties(call.known_device(device)?)?);
        Ok(())
    };

    /// Free and total bytes of the current device.
    hipMemGetInfo(free: Out<usize>, total: Out<usize>): Usual = |call| {
        let (now, all) = call.memory_info();
        free.set(call.config.says(call.name, 0, now as i64) as usize);
        total.set(call.config.says(call.name, 1, all as i64) as usize);
        Ok(())
    };

    /// Allocates a block.
    hipMalloc(block: Out<hipDeviceptr_t>, size: usize): Usual = |call| {
        block.wanted()?;
        block.set(opaque(call.malloc(size)? as u64));
        Ok(())
    };

    /// Frees a block.
    hipFree(block: hipDeviceptr_t): Usual = |call| call.free(block.addr());

    /// Page-locks host memory.
    hipHostRegister(at: *mut c_void, size: usize, flags: u32): Usual = |call| {
        call.host_register(at.expose_provenance(), size, flags)
    };

    /// Lets go of it.
    hipHostUnregister(at: *mut c_void): Usual = |call| call.host_unregister(at.addr());

    /// Allocates page-locked host memory.
    hipHostMalloc(at: Out<*mut c_void>, size: usize, flags: u32): Usual = |call| {
        at.wanted()?;
        at.set(core::ptr::with_exposed_provenance_mut(call.host_malloc(size, flags)?));
        Ok(())
    };

    /// Frees it.
    hipHostFree(at: *mut c_void): Usual = |call| call.host_free(at.addr());

    /// Where devices see it.
    hipHostGetDevicePointer(device: Out<hipDeviceptr_t>, at: *mut c_void, flags: u32): Usual = |call| {
        device.wanted()?;
        device.set(opaque(call.host_device_pointer(at.addr(), flags)? as u64));
        Ok(())
    };

    /// Copies from the host: from pageable memory, which the caller has back when this returns, or from page-locked
    /// memory, which it has back when the copy is done.
    hipMemcpyHtoDAsync(to: hipDeviceptr_t, from: *const c_void, size: usize, stream: hipStream_t): Usual = |call| {
        if size == 0 {
            return Ok(());
        }
        call.refuse_device_address(from.addr(), size);
        if call.is_pinned(from.addr(), size)? {
            return call.fetch(to.addr(), from.expose_provenance(), size, stream.addr() as u64);
        }
        // SAFETY: the contract of this function: `from` is null or `size` bytes can be read there.
        let data = unsafe { host_bytes(from, size) }?;
        call.upload(to.addr(), data, stream.addr() as u64)
    };

    /// Copies to host memory.
    hipMemcpyDtoHAsync(to: *mut c_void, from: hipDeviceptr_t, size: usize, stream: hipStream_t): Usual = |call| {
        call.download(to.expose_provenance(), from.addr(), size, stream.addr() as u64)
    };

    /// Copies within and between devices.
    hipMemcpyDtoDAsync(to: hipDeviceptr_t, from: hipDeviceptr_t, size: usize, stream: hipStream_t): Usual = |call| {
        call.copy(to.addr(), from.addr(), size, stream.addr() as u64)
    };

    /// Fills with a byte.
    hipMemsetD8Async(to: hipDeviceptr_t, value: u8, count: usize, stream: hipStream_t): Usual = |call| {
        call.fill(to.addr(), value, count, stream.addr() as u64)
    };

    /// Makes a stream.
    hipStreamCreateWithFlags(stream: Out<hipStream_t>, flags: u32): Usual = |call| {
        stream.wanted()?;
        stream.set(opaque(call.stream_create(flags)?));
        Ok(())
    };

    /// Destroys a stream; what is queued on it is still done some time.
    hipStreamDestroy(stream: hipStream_t): Usual = |call| call.stream_destroy(stream.addr() as u64);

    /// Waits for a stream.
    hipStreamSynchronize(stream: hipStream_t): Usual = |call| call.stream_synchronize(stream.addr() as u64);

    /// Whether a stream is being captured.
    hipStreamIsCapturing(stream: hipStream_t, status: Out<u32>): Usual = |call| {
        status.wanted()?;
        status.set(call.capture_status(stream.addr() as u64)?);
        Ok(())
    };

    /// Begins to capture a stream.
    hipStreamBeginCapture(stream: hipStream_t, mode: u32): Usual = |call| {
        call.capture_begin(stream.addr() as u64, mode)
    };

    /// Ends a capture.
    hipStreamEndCapture(stream: hipStream_t, graph: Out<hipGraph_t>): Usual = |call| {
        graph.wanted()?;
        graph.set(opaque(call.capture_end(stream.addr() as u64)?));
        Ok(())
    };

    /// Exchanges how the thread's calls are taken while streams are captured.
    hipThreadExchangeStreamCaptureMode(mode: Out<u32>): Usual = |call| {
        let old = call.capture_exchange(mode.get()?)?;
        mode.set(old);
        Ok(())
    };

    /// Waits for the current device.
    hipDeviceSynchronize(): Usual = |call| call.device_synchronize();

    /// Makes an event.
    hipEventCreateWithFlags(event: Out<hipEvent_t>, flags: u32): Usual = |call| {
        event.wanted()?;
        event.set(opaque(call.event_create(flags)?));
        Ok(())
    };

    /// Puts an event into a stream.
    hipEventRecord(event: hipEvent_t, stream: hipStream_t): Usual = |call| {
        call.event_record(event.addr() as u64, stream.addr() as u64)
    };

    /// Whether an event has passed.
    hipEventQuery(event: hipEvent_t): Usual = |call| call.event_query(event.addr() as u64);

    /// Waits for an event.
    hipEventSynchronize(event: hipEvent_t): Usual = |call| call.event_synchronize(event.addr() as u64);

    /// Destroys an event.
    hipEventDestroy(event: hipEvent_t): Usual = |call| {
        call.event_destroy(event.addr() as u64);
        Ok(())
    };

    /// What sizes of physical memory are multiples of.
    hipMemGetAllocationGranularity(granularity: Out<usize>, prop: In<hipMemAllocationProp>, option: u32): Vmm = |call| {
        granularity.wanted()?;
        let truth = call.granularity(prop.get()?, option)? as i64;
        granularity.set(call.config.says(call.name, option as usize, truth) as usize);
        Ok(())
    };

    /// Reserves addresses.
    hipMemAddressReserve(
        ptr: Out<hipDeviceptr_t>, size: usize, alignment: usize, hint: *mut c_void, flags: u64,
    ): Vmm = |call| {
        ptr.wanted()?;
        ptr.set(opaque(call.reserve(size, alignment, hint.addr(), flags)? as u64));
        Ok(())
    };

    /// Gives reserved addresses back.
    hipMemAddressFree(ptr: hipDeviceptr_t, size: usize): Vmm = |call| call.free_address(ptr.addr(), size);

    /// Makes physical memory.
    hipMemCreate(
        handle: Out<hipMemGenericAllocationHandle_t>, size: usize, prop: In<hipMemAllocationProp>, flags: u64,
    ): Vmm = |call| {
        handle.wanted()?;
        handle.set(opaque(call.create(size, prop.get()?, flags)?));
        Ok(())
    };

    /// Gives a reference to physical memory back.
    hipMemRelease(handle: hipMemGenericAllocationHandle_t): Vmm = |call| call.release(handle.addr() as u64);

    /// Maps physical memory at reserved addresses.
    hipMemMap(
        ptr: hipDeviceptr_t, size: usize, offset: usize, handle: hipMemGenericAllocationHandle_t, flags: u64,
    ): Vmm = |call| call.map(ptr.addr(), size, offset, handle.addr() as u64, flags);

    /// Ends a mapping.
    hipMemUnmap(ptr: hipDeviceptr_t, size: usize): Vmm = |call| call.unmap(ptr.addr(), size);

    /// Lets devices use mapped memory.
    hipMemSetAccess(ptr: hipDeviceptr_t, size: usize, descs: In<hipMemAccessDesc>, count: usize): Vmm = |call| {
        let descs = (0..count).map(|index| descs.at(index)).collect::<Result<Vec<_>, _>>()?;
        call.set_access(ptr.addr(), size, &descs)
    };

    /// How a device may use mapped memory.
    hipMemGetAccess(flags: Out<u64>, location: In<hipMemLocation>, ptr: hipDeviceptr_t): Vmm = |call| {
        flags.wanted()?;
        flags.set(call.get_access(ptr.addr(), location.get()?)?);
        Ok(())
    };

    /// The handle of what is mapped at an address.
    hipMemRetainAllocationHandle(handle: Out<hipMemGenericAllocationHandle_t>, ptr: hipDeviceptr_t): Vmm = |call| {
        handle.wanted()?;
        handle.set(opaque(call.retain(ptr.addr())?));
        Ok(())
    };

    /// A file descriptor of physical memory, for another process.
    hipMemExportToShareableHandle(
        fd: Out<i32>, handle: hipMemGenericAllocationHandle_t, kind: u32, flags: u64,
    ): Vmm = |call| {
        fd.wanted()?;
        fd.set(call.export(handle.addr() as u64, kind, flags)?.into_raw_fd());
        Ok(())
    };

    /// A handle for another process's memory. `fd` points to the descriptor.
    hipMemImportFromShareableHandle(handle: Out<hipMemGenericAllocationHandle_t>, fd: In<i32>, kind: u32): Vmm = |call| {
        handle.wanted()?;
        // No address is so low: it is the descriptor itself, as another vendor's function wants it.
        if (1..4096).contains(&fd.addr()) {
            call.misuse(format_args!("{} is passed where a pointer to a descriptor belongs", fd.addr()));
        }
        handle.set(opaque(call.import(fd.get()?, kind)?));
        Ok(())
    };
}

/// The header's name of a result code.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(code: hipError_t) -> *const c_char {
    Runtime::get().call("hipGetErrorName", Kind::Free, |_call| Ok(()));
    error_name(code).as_ptr()
}
