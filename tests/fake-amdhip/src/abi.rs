//! The types and numbers of HIP's C ABI, declared here once more and not taken from growspan, so that a mistake there
//! cannot agree with itself.
#![allow(non_camel_case_types, reason = "named as the header names them")]

use core::ffi::c_void;
use core::mem::{offset_of, size_of};

/// A result code; zero is success.
pub type hipError_t = u32;
/// A stream.
pub type hipStream_t = *mut c_void;
/// An event.
pub type hipEvent_t = *mut c_void;
/// A captured graph.
pub type hipGraph_t = *mut c_void;
/// A device address.
pub type hipDeviceptr_t = *mut c_void;
/// A handle to physical memory.
pub type hipMemGenericAllocationHandle_t = *mut c_void;

/// The result codes that are returned here.
pub(crate) mod code {
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NO_DEVICE: u32 = 100;
    pub(crate) const INVALID_DEVICE: u32 = 101;
    pub(crate) const MAP_FAILED: u32 = 205;
    pub(crate) const ILLEGAL_STATE: u32 = 401;
    pub(crate) const NOT_READY: u32 = 600;
    pub(crate) const NOT_SUPPORTED: u32 = 801;
    pub(crate) const CAPTURE_UNSUPPORTED: u32 = 900;
    pub(crate) const CAPTURE_INVALIDATED: u32 = 901;
    pub(crate) const CAPTURE_IMPLICIT: u32 = 906;
    pub(crate) const CAPTURED_EVENT: u32 = 907;
    pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: u32 = 712;
    pub(crate) const UNKNOWN: u32 = 999;
}

/// `hipMemAllocationTypePinned`.
pub(crate) const TYPE_PINNED: u32 = 1;
/// `hipMemLocationTypeDevice`.
pub(crate) const LOCATION_DEVICE: u32 = 1;
/// `hipMemHandleTypePosixFileDescriptor`.
pub(crate) const HANDLE_POSIX_FD: u32 = 1;
/// `hipStreamNonBlocking`.
pub(crate) const STREAM_NON_BLOCKING: u32 = 1;

/// The bytes of `hipDeviceProp_tR0600`.
pub(crate) const PROPERTIES_SIZE: usize = 1472;

/// `hipUUID`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct hipUUID {
    /// On AMD cards printable characters.
    pub bytes: [u8; 16],
}

/// `hipMemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hipMemLocation {
    /// What kind of place.
    pub kind: u32,
    /// Which of them.
    pub id: i32,
}

/// `hipMemAllocationProp` since ROCm 5.4.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hipMemAllocationProp {
    /// The kind of allocation.
    pub kind: u32,
    /// How it may be shared.
    pub handle_type: u32,
    /// Where it is to be.
    pub location: hipMemLocation,
    /// Of Windows.
    pub win32: *mut c_void,
    /// Compression, remote access, usage.
    pub flags: [u8; 4],
}

/// `hipMemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct hipMemAccessDesc {
    /// Who gets access.
    pub location: hipMemLocation,
    /// 0 none, 1 read, 3 read and write.
    pub flags: u32,
}

const _: () = {
    assert!(size_of::<hipMemAllocationProp>() == 32);
    assert!(offset_of!(hipMemAllocationProp, location) == 8);
    assert!(offset_of!(hipMemAllocationProp, win32) == 16);
    assert!(offset_of!(hipMemAllocationProp, flags) == 24);
    assert!(size_of::<hipMemAccessDesc>() == 12);
    assert!(size_of::<hipUUID>() == 16);
};

/// The header's name of a result code, with the zero that ends it.
pub(crate) fn error_name(code: hipError_t) -> &'static core::ffi::CStr {
    match code {
        0 => c"hipSuccess",
        1 => c"hipErrorInvalidValue",
        2 => c"hipErrorOutOfMemory",
        3 => c"hipErrorNotInitialized",
        4 => c"hipErrorDeinitialized",
        35 => c"hipErrorInsufficientDriver",
        100 => c"hipErrorNoDevice",
        101 => c"hipErrorInvalidDevice",
        201 => c"hipErrorInvalidContext",
        205 => c"hipErrorMapFailed",
        400 => c"hipErrorInvalidHandle",
        401 => c"hipErrorIllegalState",
        500 => c"hipErrorNotFound",
        600 => c"hipErrorNotReady",
        700 => c"hipErrorIllegalAddress",
        719 => c"hipErrorLaunchFailure",
        801 => c"hipErrorNotSupported",
        900 => c"hipErrorStreamCaptureUnsupported",
        901 => c"hipErrorStreamCaptureInvalidated",
        906 => c"hipErrorStreamCaptureImplicit",
        907 => c"hipErrorCapturedEvent",
        // What the real one says of a number it does not know, too.
        _ => c"hipErrorUnknown",
    }
}
