//! The HIP runtime's types and constants, as its header `hip_runtime_api.h` has them.
//!
//! They are our own rather than a binding crate's, for the reasons of the CUDA driver's: result codes are plain integers,
//! so that a code newer than this crate is a number and not undefined behaviour, and one set of shapes serves all
//! versions, since what is used here has not changed from ROCm 5.4 to 10. A test compares sizes, offsets and values with
//! `hip-sys` and `cubecl-hip-sys`, and with the header itself where it is installed.

use core::ffi::c_void;
use core::mem::{align_of, offset_of, size_of};

/// `hipError_t`, a result code. Zero is success.
pub type hipError_t = u32;
/// `hipDeviceptr_t`, a device address.
pub type hipDeviceptr_t = *mut c_void;
/// `hipStream_t`.
pub type hipStream_t = *mut c_void;
/// `hipEvent_t`.
pub type hipEvent_t = *mut c_void;
/// `hipMemGenericAllocationHandle_t`, a handle to physical memory.
pub type hipMemGenericAllocationHandle_t = *mut c_void;

/// `hipSuccess`.
pub const hipSuccess: hipError_t = 0;
/// `hipErrorInvalidValue`.
pub const hipErrorInvalidValue: hipError_t = 1;
/// `hipErrorOutOfMemory`, which `hipMemCreate` returns for any failure at all.
pub const hipErrorOutOfMemory: hipError_t = 2;
/// `hipErrorNotInitialized`.
pub const hipErrorNotInitialized: hipError_t = 3;
/// `hipErrorDeinitialized`.
pub const hipErrorDeinitialized: hipError_t = 4;
/// `hipErrorInsufficientDriver`.
pub const hipErrorInsufficientDriver: hipError_t = 35;
/// `hipErrorNoDevice`.
pub const hipErrorNoDevice: hipError_t = 100;
/// `hipErrorInvalidDevice`.
pub const hipErrorInvalidDevice: hipError_t = 101;
/// `hipErrorNotReady`.
pub const hipErrorNotReady: hipError_t = 600;
/// `hipErrorNotSupported`.
pub const hipErrorNotSupported: hipError_t = 801;
/// `hipErrorStreamCaptureImplicit`.
pub const hipErrorStreamCaptureImplicit: hipError_t = 906;

/// `hipDeviceAttributeIntegrated`: the device shares the host's memory.
pub const hipDeviceAttributeIntegrated: u32 = 16;
/// `hipDeviceAttributeComputeCapabilityMajor`: 12 on a gfx1201.
pub const hipDeviceAttributeComputeCapabilityMajor: u32 = 23;
/// `hipDeviceAttributeComputeCapabilityMinor`: 0 on a gfx1201.
pub const hipDeviceAttributeComputeCapabilityMinor: u32 = 61;
/// `hipDeviceAttributeVirtualMemoryManagementSupported`. Before ROCm 5.3 the number means something else.
pub const hipDeviceAttributeVirtualMemoryManagementSupported: u32 = 89;

/// `hipMemAllocationTypePinned`.
pub const hipMemAllocationTypePinned: u32 = 1;
/// `hipMemLocationTypeDevice`.
pub const hipMemLocationTypeDevice: u32 = 1;
/// `hipMemHandleTypeNone`.
pub const hipMemHandleTypeNone: u32 = 0;
/// `hipMemHandleTypePosixFileDescriptor`.
pub const hipMemHandleTypePosixFileDescriptor: u32 = 1;
/// `hipMemAccessFlagsProtReadWrite`.
pub const hipMemAccessFlagsProtReadWrite: u32 = 3;
/// `hipMemAllocationGranularityMinimum`.
pub const hipMemAllocationGranularityMinimum: u32 = 0;
/// `hipMemAllocationGranularityRecommended`.
pub const hipMemAllocationGranularityRecommended: u32 = 1;

/// `hipStreamCaptureModeRelaxed`: calls of the thread do not break captures that are under way.
pub const hipStreamCaptureModeRelaxed: u32 = 2;
/// `hipStreamCaptureStatusNone`.
pub const hipStreamCaptureStatusNone: u32 = 0;
/// `hipStreamNonBlocking`: a stream that does not wait for the null stream, nor it for the stream.
pub const hipStreamNonBlocking: u32 = 1;
/// `hipEventDisableTiming`.
pub const hipEventDisableTiming: u32 = 2;

/// `hipHostMallocPortable`.
pub const hipHostMallocPortable: u32 = 1;
/// `hipHostMallocMapped`.
pub const hipHostMallocMapped: u32 = 2;
/// `hipHostMallocWriteCombined`.
pub const hipHostMallocWriteCombined: u32 = 4;
/// `hipHostRegisterPortable`.
pub const hipHostRegisterPortable: u32 = 1;
/// `hipHostRegisterMapped`.
pub const hipHostRegisterMapped: u32 = 2;

/// `hipMemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct hipMemLocation {
    /// What kind of place.
    pub type_: u32,
    /// Which of them: a device's ordinal.
    pub id: i32,
}

/// `hipMemAllocationProp::allocFlags`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct hipMemAllocationFlags {
    /// Whether the memory is compressible.
    pub compression_type: u8,
    /// Whether network cards may reach it.
    pub gpu_direct_rdma_capable: u8,
    /// What it is for.
    pub usage: u16,
}

/// `hipMemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct hipMemAllocationProp {
    /// The kind of allocation.
    pub type_: u32,
    /// How it can be shared. Since ROCm 7.0 a union with a field of another name, in the same place.
    pub requested_handle_type: u32,
    /// Where it is.
    pub location: hipMemLocation,
    /// Null but on Windows.
    pub win32_handle_meta_data: *mut c_void,
    /// The rest.
    pub alloc_flags: hipMemAllocationFlags,
}

/// `hipMemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct hipMemAccessDesc {
    /// Who gets access.
    pub location: hipMemLocation,
    /// Which access.
    pub flags: u32,
}

/// `hipDeviceProp_tR0600`, which `hipGetDevicePropertiesR0600` fills since ROCm 6.0: the few fields that are read, and
/// room for the rest with some to spare, should the structure grow at its end.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct hipDeviceProp_tR0600 {
    /// The device's name, ended by a zero.
    pub name: [u8; 256],
    /// Its UUID: on AMD cards printable characters, not random bytes.
    pub uuid: [u8; 16],
    unread: [u8; 1160 - 256 - 16],
    /// The compiler's name for it, ended by a zero: `gfx942:sramecc+:xnack-`.
    pub gcn_arch_name: [u8; 256],
    rest: [u8; 4096 - 1160 - 256],
}

impl hipDeviceProp_tR0600 {
    /// All zeros.
    #[must_use]
    pub const fn zeroed() -> Self {
        Self {
            name: [0; 256],
            uuid: [0; 16],
            unread: [0; 1160 - 256 - 16],
            gcn_arch_name: [0; 256],
            rest: [0; 4096 - 1160 - 256],
        }
    }
}

impl core::fmt::Debug for hipDeviceProp_tR0600 {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("hipDeviceProp_tR0600").finish_non_exhaustive()
    }
}

// The runtime's ABI on 64-bit Linux. A platform on which these differ must not compile.
const _: () = {
    assert!(size_of::<*mut c_void>() == 8 && size_of::<usize>() == 8);
    assert!(size_of::<hipMemLocation>() == 8 && align_of::<hipMemLocation>() == 4);
    assert!(size_of::<hipMemAllocationFlags>() == 4 && align_of::<hipMemAllocationFlags>() == 2);
    assert!(size_of::<hipMemAllocationProp>() == 32 && align_of::<hipMemAllocationProp>() == 8);
    assert!(offset_of!(hipMemAllocationProp, location) == 8);
    assert!(offset_of!(hipMemAllocationProp, win32_handle_meta_data) == 16);
    assert!(offset_of!(hipMemAllocationProp, alloc_flags) == 24);
    assert!(size_of::<hipMemAccessDesc>() == 12 && align_of::<hipMemAccessDesc>() == 4);
    assert!(offset_of!(hipDeviceProp_tR0600, uuid) == 256);
    assert!(offset_of!(hipDeviceProp_tR0600, gcn_arch_name) == 1160);
    // What the largest known header has is 1472 bytes.
    assert!(size_of::<hipDeviceProp_tR0600>() == 4096);
};
