//! The runtime's codes, their names and what they mean to this crate; and why a device could not be opened.

use core::fmt;

use super::ffi::{self, hipError_t, hipSuccess};
use crate::driver::opening::Unopened;
use crate::driver::table::LoadError;
use crate::driver::{Call, DriverError, DriverErrorKind};

/// A result code that is not success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(pub(super) hipError_t);

/// Success, or the code.
pub(super) const fn check(result: hipError_t) -> Result<(), Code> {
    if result == hipSuccess { Ok(()) } else { Err(Code(result)) }
}

impl Code {
    /// What it means to this crate.
    pub(super) const fn kind(self) -> DriverErrorKind {
        match self.0 {
            1 => DriverErrorKind::InvalidValue,
            2 => DriverErrorKind::OutOfMemory,
            4 => DriverErrorKind::ShutDown,
            100 | 101 | 500 => DriverErrorKind::Missing,
            801 => DriverErrorKind::NotSupported,
            208 | 400 | 401 => DriverErrorKind::Misuse,
            600 => DriverErrorKind::NotReady,
            // After these nothing of the device can be used any more: a kernel went astray, a memory error, a reset by
            // other code.
            214 | 700 | 702 | 709 | 710 | 719 => DriverErrorKind::DeviceLost,
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
            1 => "hipErrorInvalidValue",
            2 => "hipErrorOutOfMemory",
            3 => "hipErrorNotInitialized",
            4 => "hipErrorDeinitialized",
            17 => "hipErrorInvalidDevicePointer",
            35 => "hipErrorInsufficientDriver",
            53 => "hipErrorPriorLaunchFailure",
            100 => "hipErrorNoDevice",
            101 => "hipErrorInvalidDevice",
            201 => "hipErrorInvalidContext",
            205 => "hipErrorMapFailed",
            206 => "hipErrorUnmapFailed",
            208 => "hipErrorAlreadyMapped",
            211 => "hipErrorNotMapped",
            214 => "hipErrorECCNotCorrectable",
            217 => "hipErrorPeerAccessUnsupported",
            303 => "hipErrorSharedObjectInitFailed",
            304 => "hipErrorOperatingSystem",
            400 => "hipErrorInvalidHandle",
            401 => "hipErrorIllegalState",
            500 => "hipErrorNotFound",
            600 => "hipErrorNotReady",
            700 => "hipErrorIllegalAddress",
            701 => "hipErrorLaunchOutOfResources",
            702 => "hipErrorLaunchTimeOut",
            704 => "hipErrorPeerAccessAlreadyEnabled",
            705 => "hipErrorPeerAccessNotEnabled",
            709 => "hipErrorContextIsDestroyed",
            710 => "hipErrorAssert",
            712 => "hipErrorHostMemoryAlreadyRegistered",
            713 => "hipErrorHostMemoryNotRegistered",
            719 => "hipErrorLaunchFailure",
            801 => "hipErrorNotSupported",
            900 => "hipErrorStreamCaptureUnsupported",
            901 => "hipErrorStreamCaptureInvalidated",
            905 => "hipErrorStreamCaptureIsolation",
            906 => "hipErrorStreamCaptureImplicit",
            907 => "hipErrorCapturedEvent",
            908 => "hipErrorStreamCaptureWrongThread",
            999 => "hipErrorUnknown",
            1052 => "hipErrorRuntimeMemory",
            1053 => "hipErrorRuntimeOther",
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

/// Why a HIP device could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HipOpenError {
    /// The runtime's library could not be opened or lacks functions.
    Library(LoadError),
    /// Two copies of the runtime in one process do not see each other's devices, streams and memory.
    TwoRuntimes {
        /// The copies that are loaded, and the one that would have been.
        copies: Vec<String>,
    },
    /// The file of the copy that the process has loaded was replaced, as by an update, and cannot be opened again.
    Replaced {
        /// Where it was.
        path: String,
    },
    /// A device cannot reach the memory of another.
    NoPeerAccess {
        /// The one that was to reach it.
        peer: u32,
        /// The one whose memory it is.
        owner: u32,
    },
    /// The runtime does not start.
    Init {
        /// The runtime and its library.
        runtime: String,
        /// Its code.
        code: u32,
    },
    /// The runtime starts and shows this process no device.
    NoDevice {
        /// The runtime and its library.
        runtime: String,
    },
    /// There are devices, but not that many.
    NoSuchOrdinal {
        /// The one that was asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// The runtime was started by the process that this one was forked from, and cannot be used here.
    Forked,
    /// The runtime hangs, or there was no thread that it could have hung.
    Unopened(Unopened),
    /// A call failed while the device was opened.
    Call {
        /// The runtime's function.
        function: &'static str,
        /// Its code; 0 where it gave nothing and called that success.
        code: u32,
    },
}

impl From<Unopened> for HipOpenError {
    fn from(unopened: Unopened) -> Self {
        Self::Unopened(unopened)
    }
}

impl HipOpenError {
    /// What `hipInit`'s code means.
    pub(super) fn of_init(runtime: String, code: Code) -> Self {
        match code.0 {
            // ROCm 5.2 has no device in other words: the one that was asked for is invalid.
            ffi::hipErrorNoDevice | ffi::hipErrorInvalidDevice => Self::NoDevice { runtime },
            code => Self::Init { runtime, code },
        }
    }

    /// The same as a kind of driver error: what was missing, or what the runtime said.
    #[must_use]
    pub const fn kind(&self) -> DriverErrorKind {
        match self {
            Self::Library(_) | Self::NoDevice { .. } | Self::NoSuchOrdinal { .. } => DriverErrorKind::Missing,
            Self::TwoRuntimes { .. } | Self::Replaced { .. } | Self::NoPeerAccess { .. } => {
                DriverErrorKind::NotSupported
            }
            Self::Forked => DriverErrorKind::Forked,
            Self::Unopened(_) => DriverErrorKind::Other,
            Self::Init { code, .. } | Self::Call { code, .. } => Code(*code).kind(),
        }
    }
}

impl fmt::Display for HipOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(error @ LoadError::LibraryMissing { .. }) => write!(
                f,
                "no HIP runtime: {error}; install ROCm's libamdhip64, or name the library in {}",
                super::LIBRARY_VARIABLE
            ),
            Self::Library(error @ LoadError::SymbolsMissing { .. }) => {
                write!(f, "the HIP runtime is too old: {error}; ROCm 5.2 or later is needed, 6.1 for virtual memory")
            }
            Self::TwoRuntimes { copies } => write!(
                f,
                "this process would have two HIP runtimes, {}, which do not know of each other; let all of it use one, \
                 by the library path or by {}",
                copies.join(" and "),
                super::LIBRARY_VARIABLE
            ),
            Self::Replaced { path } => {
                write!(
                    f,
                    "the HIP runtime that this process has loaded, {path}, was replaced on disk; start the process anew"
                )
            }
            Self::NoPeerAccess { peer, owner } => {
                write!(f, "HIP device {peer} cannot reach the memory of device {owner}, of which it was to be a peer")
            }
            Self::Init { runtime, code } => {
                write!(f, "{runtime} does not start ({}); does rocminfo see the device?", Code(*code))
            }
            Self::NoDevice { runtime } => write!(
                f,
                "{runtime} shows this process no device; check HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, and that \
                 the process may open /dev/kfd and /dev/dri/renderD* (groups render and video)"
            ),
            Self::NoSuchOrdinal { ordinal, count } => {
                write!(f, "there is no HIP device {ordinal}: the runtime shows {count}, counted from 0")
            }
            Self::Forked => f.write_str(
                "the HIP runtime was started before this process was forked and cannot be used in it; start it with \
                 exec instead",
            ),
            Self::Unopened(error) => write!(
                f,
                "opening the HIP device: {error}; does rocminfo answer, and what does the kernel's log say of amdgpu?"
            ),
            Self::Call { function, code: 0 } => {
                write!(f, "opening the HIP device: {function} returned success and nothing")
            }
            Self::Call { function, code } => write!(f, "opening the HIP device: {function} failed ({})", Code(*code)),
        }
    }
}

impl core::error::Error for HipOpenError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Library(error) => Some(error),
            Self::Unopened(error) => Some(error),
            _ => None,
        }
    }
}
