//! The driver's codes, their names and what they mean to this crate; and why a device could not be opened.

use core::fmt;

use super::ffi::{CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_STUB_LIBRARY, CUDA_SUCCESS, CUresult};
use crate::driver::opening::Unopened;
use crate::driver::table::LoadError;
use crate::driver::{Call, DriverError, DriverErrorKind};

/// A result code that is not success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(pub(super) CUresult);

/// Success, or the code.
pub(super) const fn check(result: CUresult) -> Result<(), Code> {
    if result == CUDA_SUCCESS { Ok(()) } else { Err(Code(result)) }
}

impl Code {
    /// What it means to this crate.
    pub(super) const fn kind(self) -> DriverErrorKind {
        match self.0 {
            1 => DriverErrorKind::InvalidValue,
            2 => DriverErrorKind::OutOfMemory,
            4 => DriverErrorKind::ShutDown,
            34 | 100 | 101 | 500 => DriverErrorKind::Missing,
            102 | 800 | 801 | 804 => DriverErrorKind::NotSupported,
            208 | 400 | 401 => DriverErrorKind::Misuse,
            600 => DriverErrorKind::NotReady,
            // The codes after which the header says that the context, or the process, cannot be used any more. A
            // context that is not valid or destroyed was reset or released by other code of the process. 720 stands
            // among them in number only: it is a launch that was too large.
            201 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 806 | 810 | 911 => {
                DriverErrorKind::DeviceLost
            }
            _ => DriverErrorKind::Other,
        }
    }

    /// The error of a call of the driver's vocabulary.
    pub(super) const fn during(self, call: Call) -> DriverError {
        DriverError::new(call, self.kind()).with_code(self.0 as i64, self.name())
    }

    /// The header's name, empty for a code it did not know when this was written.
    pub(super) const fn name(self) -> &'static str {
        match self.0 {
            1 => "CUDA_ERROR_INVALID_VALUE",
            2 => "CUDA_ERROR_OUT_OF_MEMORY",
            3 => "CUDA_ERROR_NOT_INITIALIZED",
            4 => "CUDA_ERROR_DEINITIALIZED",
            34 => "CUDA_ERROR_STUB_LIBRARY",
            36 => "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER",
            46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
            100 => "CUDA_ERROR_NO_DEVICE",
            101 => "CUDA_ERROR_INVALID_DEVICE",
            102 => "CUDA_ERROR_DEVICE_NOT_LICENSED",
            201 => "CUDA_ERROR_INVALID_CONTEXT",
            202 => "CUDA_ERROR_CONTEXT_ALREADY_CURRENT",
            205 => "CUDA_ERROR_MAP_FAILED",
            206 => "CUDA_ERROR_UNMAP_FAILED",
            208 => "CUDA_ERROR_ALREADY_MAPPED",
            211 => "CUDA_ERROR_NOT_MAPPED",
            214 => "CUDA_ERROR_ECC_UNCORRECTABLE",
            216 => "CUDA_ERROR_CONTEXT_ALREADY_IN_USE",
            217 => "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
            220 => "CUDA_ERROR_NVLINK_UNCORRECTABLE",
            226 => "CUDA_ERROR_CONTAINED",
            227 => "CUDA_ERROR_INSUFFICIENT_LOADER_VERSION",
            304 => "CUDA_ERROR_OPERATING_SYSTEM",
            400 => "CUDA_ERROR_INVALID_HANDLE",
            401 => "CUDA_ERROR_ILLEGAL_STATE",
            500 => "CUDA_ERROR_NOT_FOUND",
            600 => "CUDA_ERROR_NOT_READY",
            700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
            701 => "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
            702 => "CUDA_ERROR_LAUNCH_TIMEOUT",
            704 => "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
            705 => "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED",
            708 => "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE",
            709 => "CUDA_ERROR_CONTEXT_IS_DESTROYED",
            710 => "CUDA_ERROR_ASSERT",
            712 => "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            713 => "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            714 => "CUDA_ERROR_HARDWARE_STACK_ERROR",
            715 => "CUDA_ERROR_ILLEGAL_INSTRUCTION",
            716 => "CUDA_ERROR_MISALIGNED_ADDRESS",
            717 => "CUDA_ERROR_INVALID_ADDRESS_SPACE",
            718 => "CUDA_ERROR_INVALID_PC",
            719 => "CUDA_ERROR_LAUNCH_FAILED",
            720 => "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
            721 => "CUDA_ERROR_TENSOR_MEMORY_LEAK",
            800 => "CUDA_ERROR_NOT_PERMITTED",
            801 => "CUDA_ERROR_NOT_SUPPORTED",
            802 => "CUDA_ERROR_SYSTEM_NOT_READY",
            803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
            804 => "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
            805 => "CUDA_ERROR_MPS_CONNECTION_FAILED",
            806 => "CUDA_ERROR_MPS_RPC_FAILURE",
            807 => "CUDA_ERROR_MPS_SERVER_NOT_READY",
            808 => "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
            809 => "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED",
            810 => "CUDA_ERROR_MPS_CLIENT_TERMINATED",
            900 => "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
            901 => "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
            902 => "CUDA_ERROR_STREAM_CAPTURE_MERGE",
            903 => "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
            904 => "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
            905 => "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            906 => "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
            907 => "CUDA_ERROR_CAPTURED_EVENT",
            908 => "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
            909 => "CUDA_ERROR_TIMEOUT",
            911 => "CUDA_ERROR_EXTERNAL_DEVICE",
            999 => "CUDA_ERROR_UNKNOWN",
            _ => "",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            "" => write!(f, "code {}", self.0),
            name => write!(f, "{name}, {}", self.0),
        }
    }
}

/// Why a CUDA device could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaOpenError {
    /// The driver library could not be opened or is too old.
    Library(LoadError),
    /// The library is the toolkit's stub, which exists for linking only.
    StubLibrary {
        /// The library's name.
        library: String,
    },
    /// The driver does not start.
    Init {
        /// The driver's code.
        code: u32,
    },
    /// The driver runs and shows this process no device.
    NoDevice,
    /// There are devices, but not that many.
    NoSuchOrdinal {
        /// The one that was asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// There are devices, but none with this UUID.
    NoSuchUuid {
        /// The one that was asked for.
        wanted: String,
        /// Those that are there.
        present: Vec<String>,
    },
    /// The text is not a UUID.
    NotAUuid {
        /// The text.
        text: String,
    },
    /// The driver was started by the process that this one was forked from, and cannot be used here.
    Forked,
    /// The driver hangs, or there was no thread that it could have hung.
    Unopened(Unopened),
    /// A call failed while the device was opened.
    Call {
        /// The driver's function.
        function: &'static str,
        /// The driver's code.
        code: u32,
    },
}

impl From<Unopened> for CudaOpenError {
    fn from(unopened: Unopened) -> Self {
        Self::Unopened(unopened)
    }
}

impl CudaOpenError {
    /// What `cuInit`'s code means.
    pub(super) fn of_init(library: &str, code: Code) -> Self {
        match code.0 {
            CUDA_ERROR_STUB_LIBRARY => Self::StubLibrary { library: library.to_owned() },
            CUDA_ERROR_NO_DEVICE => Self::NoDevice,
            code => Self::Init { code },
        }
    }

    /// The same as a kind of driver error: what was missing, or what the driver said.
    #[must_use]
    pub const fn kind(&self) -> DriverErrorKind {
        match self {
            Self::Library(_)
            | Self::StubLibrary { .. }
            | Self::NoDevice
            | Self::NoSuchOrdinal { .. }
            | Self::NoSuchUuid { .. } => DriverErrorKind::Missing,
            Self::NotAUuid { .. } => DriverErrorKind::InvalidValue,
            Self::Forked => DriverErrorKind::Forked,
            Self::Unopened(_) => DriverErrorKind::Other,
            Self::Init { code } | Self::Call { code, .. } => Code(*code).kind(),
        }
    }
}

impl fmt::Display for CudaOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(error @ LoadError::LibraryMissing { .. }) => write!(
                f,
                "no CUDA driver: {error}; install the NVIDIA driver, give the container access to it, or name the \
                 library in {}",
                super::LIBRARY_VARIABLE
            ),
            Self::Library(error @ LoadError::SymbolsMissing { .. }) => {
                write!(f, "the CUDA driver is too old: {error}; CUDA 11.0 or later is needed")
            }
            Self::StubLibrary { library } => write!(
                f,
                "{library} is the toolkit's stub library, not a driver ({}); take the toolkit's `stubs` directory out \
                 of the library path, or name the driver in {}",
                Code(CUDA_ERROR_STUB_LIBRARY),
                super::LIBRARY_VARIABLE
            ),
            Self::Init { code: CUDA_ERROR_NOT_INITIALIZED } => write!(
                f,
                "the CUDA driver does not start ({}), as in a process forked after the driver was used; start it with \
                 exec instead",
                Code(CUDA_ERROR_NOT_INITIALIZED)
            ),
            Self::Init { code } => {
                write!(f, "the CUDA driver does not start ({}); does nvidia-smi see the device?", Code(*code))
            }
            Self::NoDevice => f.write_str(
                "the CUDA driver shows this process no device; check CUDA_VISIBLE_DEVICES and the container's devices",
            ),
            Self::NoSuchOrdinal { ordinal, count } => {
                write!(f, "there is no CUDA device {ordinal}: the driver shows {count}, counted from 0")
            }
            Self::NoSuchUuid { wanted, present } => {
                write!(f, "there is no CUDA device {wanted}: the driver shows {}", present.join(", "))
            }
            Self::NotAUuid { text } => {
                write!(f, "`{text}` is not a device's UUID, which reads GPU-01234567-89ab-cdef-0123-456789abcdef")
            }
            Self::Forked => f.write_str(
                "the CUDA driver was started before this process was forked and cannot be used in it; start it with \
                 exec instead",
            ),
            Self::Unopened(error) => write!(
                f,
                "opening the CUDA device: {error}; does nvidia-smi answer, and what does the kernel's log say of NVRM?"
            ),
            Self::Call { function, code } => write!(f, "opening the CUDA device: {function} failed ({})", Code(*code)),
        }
    }
}

impl core::error::Error for CudaOpenError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Library(error) => Some(error),
            Self::Unopened(error) => Some(error),
            _ => None,
        }
    }
}
