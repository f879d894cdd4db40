//! The CUDA driver's types and constants, as its header `cuda.h` has them.
//!
//! They are our own rather than a binding crate's: result codes are plain integers, so that a code newer than this
//! crate is a number and not undefined behaviour, and the structures keep one Rust shape while their C shape stays
//! compatible. A test compares sizes, offsets and values with `cudarc`.

use core::ffi::c_void;
use core::mem::{align_of, offset_of, size_of};

/// A result code. Zero is success.
pub type CUresult = u32;
/// A device's number in the driver.
pub type CUdevice = i32;
/// A device address.
pub type CUdeviceptr = u64;
/// A context handle.
pub type CUcontext = *mut c_void;
/// A stream handle.
pub type CUstream = *mut c_void;
/// An event handle.
pub type CUevent = *mut c_void;
/// A handle to physical memory.
pub type CUmemGenericAllocationHandle = u64;

/// `CUDA_SUCCESS`.
pub const CUDA_SUCCESS: CUresult = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub const CUDA_ERROR_INVALID_VALUE: CUresult = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const CUDA_ERROR_OUT_OF_MEMORY: CUresult = 2;
/// `CUDA_ERROR_NOT_INITIALIZED`.
pub const CUDA_ERROR_NOT_INITIALIZED: CUresult = 3;
/// `CUDA_ERROR_DEINITIALIZED`.
pub const CUDA_ERROR_DEINITIALIZED: CUresult = 4;
/// `CUDA_ERROR_STUB_LIBRARY`.
pub const CUDA_ERROR_STUB_LIBRARY: CUresult = 34;
/// `CUDA_ERROR_NO_DEVICE`.
pub const CUDA_ERROR_NO_DEVICE: CUresult = 100;
/// `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
pub const CUDA_ERROR_CONTEXT_IS_DESTROYED: CUresult = 709;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
pub const CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: CUresult = 906;

/// `CU_DEVICE_ATTRIBUTE_INTEGRATED`: the device shares the host's memory.
pub const CU_DEVICE_ATTRIBUTE_INTEGRATED: u32 = 18;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: u32 = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: u32 = 76;
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
pub const CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: u32 = 102;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`.
pub const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: u32 = 103;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`.
pub const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: u32 = 110;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED`.
pub const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: u32 = 128;

/// `CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED`.
pub const CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED: u32 = 113;

/// `CU_MEMHOSTALLOC_PORTABLE`.
pub const CU_MEMHOSTALLOC_PORTABLE: u32 = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`.
pub const CU_MEMHOSTALLOC_DEVICEMAP: u32 = 2;
/// `CU_MEMHOSTALLOC_WRITECOMBINED`.
pub const CU_MEMHOSTALLOC_WRITECOMBINED: u32 = 4;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
pub const CU_MEMHOSTREGISTER_PORTABLE: u32 = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`.
pub const CU_MEMHOSTREGISTER_DEVICEMAP: u32 = 2;
/// `CU_MEMHOSTREGISTER_READ_ONLY`.
pub const CU_MEMHOSTREGISTER_READ_ONLY: u32 = 8;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub const CU_MEM_ALLOCATION_TYPE_PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const CU_MEM_LOCATION_TYPE_DEVICE: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_NONE`.
pub const CU_MEM_HANDLE_TYPE_NONE: u32 = 0;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub const CU_MEM_HANDLE_TYPE_FABRIC: u32 = 8;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: u32 = 3;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub const CU_MEM_ALLOC_GRANULARITY_MINIMUM: u32 = 0;
/// `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
pub const CU_MEM_ALLOC_GRANULARITY_RECOMMENDED: u32 = 1;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: calls of the thread do not break captures that are under way.
pub const CU_STREAM_CAPTURE_MODE_RELAXED: u32 = 2;
/// `CU_STREAM_NON_BLOCKING`: a stream that does not wait for the default stream, nor it for the stream.
pub const CU_STREAM_NON_BLOCKING: u32 = 1;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
pub const CU_STREAM_CAPTURE_STATUS_NONE: u32 = 0;
/// `CU_EVENT_DISABLE_TIMING`.
pub const CU_EVENT_DISABLE_TIMING: u32 = 2;

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUuuid {
    /// The bytes, in the order they are printed.
    pub bytes: [u8; 16],
}

/// `CUmemLocation`. Newer headers keep `id` in a union with smaller parts; its place is the same.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUmemLocation {
    /// What kind of place.
    pub type_: u32,
    /// Which of them: a device's number.
    pub id: i32,
}

/// `CUmemAllocationProp::allocFlags`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUmemAllocationFlags {
    /// Whether the memory is compressible.
    pub compression_type: u8,
    /// Whether network cards may reach it.
    pub gpu_direct_rdma_capable: u8,
    /// What it is for.
    pub usage: u16,
    /// Zero.
    pub reserved: [u8; 4],
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUmemAllocationProp {
    /// The kind of allocation.
    pub type_: u32,
    /// How it can be shared.
    pub requested_handle_types: u32,
    /// Where it is.
    pub location: CUmemLocation,
    /// Null but on Windows.
    pub win32_handle_meta_data: *mut c_void,
    /// The rest.
    pub alloc_flags: CUmemAllocationFlags,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUmemAccessDesc {
    /// Who gets access.
    pub location: CUmemLocation,
    /// Which access.
    pub flags: u32,
}

// The driver's ABI on 64-bit Linux. A platform on which these differ must not compile.
const _: () = {
    assert!(size_of::<*mut c_void>() == 8 && size_of::<usize>() == 8);
    assert!(size_of::<CUuuid>() == 16 && align_of::<CUuuid>() == 1);
    assert!(size_of::<CUmemLocation>() == 8 && align_of::<CUmemLocation>() == 4);
    assert!(size_of::<CUmemAllocationFlags>() == 8 && align_of::<CUmemAllocationFlags>() == 2);
    assert!(size_of::<CUmemAllocationProp>() == 32 && align_of::<CUmemAllocationProp>() == 8);
    assert!(offset_of!(CUmemAllocationProp, location) == 8);
    assert!(offset_of!(CUmemAllocationProp, win32_handle_meta_data) == 16);
    assert!(offset_of!(CUmemAllocationProp, alloc_flags) == 24);
    assert!(size_of::<CUmemAccessDesc>() == 12 && align_of::<CUmemAccessDesc>() == 4);
};
