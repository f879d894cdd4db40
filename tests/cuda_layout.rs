//! Our types and constants of the CUDA driver are those of its header, as `cudarc` has it.
#![cfg(feature = "cuda")]

use core::mem::{align_of, offset_of, size_of};

use cudarc::driver::sys;
use growspan::driver::cuda::ffi;

macro_rules! same_layout {
    ($( $ours:ident = $theirs:ident { $( $our_field:ident = $their_field:ident ),* } )*) => { $(
        assert_eq!(size_of::<ffi::$ours>(), size_of::<sys::$theirs>(), stringify!($ours));
        assert_eq!(align_of::<ffi::$ours>(), align_of::<sys::$theirs>(), stringify!($ours));
        $( assert_eq!(
            offset_of!(ffi::$ours, $our_field),
            offset_of!(sys::$theirs, $their_field),
            concat!(stringify!($ours), ".", stringify!($our_field)),
        ); )*
    )* };
}

macro_rules! same_values {
    ($( $theirs:ident { $( $name:ident ),* $(,)? } )*) => { $( $(
        assert_eq!(ffi::$name, sys::$theirs::$name as u32, stringify!($name));
    )* )* };
}

#[test]
fn structures_have_the_header_s_layout() {
    same_layout! {
        CUresult = CUresult {}
        CUdevice = CUdevice {}
        CUdeviceptr = CUdeviceptr {}
        CUcontext = CUcontext {}
        CUstream = CUstream {}
        CUevent = CUevent {}
        CUmemGenericAllocationHandle = CUmemGenericAllocationHandle {}
        CUuuid = CUuuid { bytes = bytes }
        // The header has had `id` in an anonymous union since 13.2; that it fills the rest is in the size.
        CUmemLocation = CUmemLocation { type_ = type_ }
        CUmemAllocationFlags = CUmemAllocationProp_st__bindgen_ty_1 {
            compression_type = compressionType,
            gpu_direct_rdma_capable = gpuDirectRDMACapable,
            usage = usage,
            reserved = reserved
        }
        CUmemAllocationProp = CUmemAllocationProp {
            type_ = type_,
            requested_handle_types = requestedHandleTypes,
            location = location,
            win32_handle_meta_data = win32HandleMetaData,
            alloc_flags = allocFlags
        }
        CUmemAccessDesc = CUmemAccessDesc { location = location, flags = flags }
    }
    assert_eq!(offset_of!(ffi::CUmemLocation, id), 4);
}

#[test]
fn constants_have_the_header_s_values() {
    same_values! {
        CUresult {
            CUDA_SUCCESS,
            CUDA_ERROR_INVALID_VALUE,
            CUDA_ERROR_OUT_OF_MEMORY,
            CUDA_ERROR_NOT_INITIALIZED,
            CUDA_ERROR_DEINITIALIZED,
            CUDA_ERROR_STUB_LIBRARY,
            CUDA_ERROR_NO_DEVICE,
            CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        }
        CUdevice_attribute {
            CU_DEVICE_ATTRIBUTE_INTEGRATED,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
            CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
        }
        CUmemAllocationType { CU_MEM_ALLOCATION_TYPE_PINNED }
        CUmemLocationType { CU_MEM_LOCATION_TYPE_DEVICE }
        CUmemAccess_flags { CU_MEM_ACCESS_FLAGS_PROT_READWRITE }
        CUmemAllocationGranularity_flags { CU_MEM_ALLOC_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED }
        CUstream_flags { CU_STREAM_NON_BLOCKING }
        CUstreamCaptureStatus { CU_STREAM_CAPTURE_STATUS_NONE }
        CUevent_flags { CU_EVENT_DISABLE_TIMING }
    }
    let flags = [
        (ffi::CU_MEMHOSTALLOC_PORTABLE, sys::CU_MEMHOSTALLOC_PORTABLE),
        (ffi::CU_MEMHOSTALLOC_DEVICEMAP, sys::CU_MEMHOSTALLOC_DEVICEMAP),
        (ffi::CU_MEMHOSTALLOC_WRITECOMBINED, sys::CU_MEMHOSTALLOC_WRITECOMBINED),
        (ffi::CU_MEMHOSTREGISTER_PORTABLE, sys::CU_MEMHOSTREGISTER_PORTABLE),
        (ffi::CU_MEMHOSTREGISTER_DEVICEMAP, sys::CU_MEMHOSTREGISTER_DEVICEMAP),
        (ffi::CU_MEMHOSTREGISTER_READ_ONLY, sys::CU_MEMHOSTREGISTER_READ_ONLY),
    ];
    flags.iter().for_each(|(ours, theirs)| assert_eq!(ours, theirs));
    assert_eq!(ffi::CU_MEM_HANDLE_TYPE_NONE, sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE.0);
    assert_eq!(
        ffi::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0
    );
    assert_eq!(ffi::CU_MEM_HANDLE_TYPE_FABRIC, sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC.0);
}
