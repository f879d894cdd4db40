//! Which runtime it is.

use core::fmt;

/// The version of a HIP runtime, as `hipRuntimeGetVersion` gives it.
///
/// Versions are compared by `major` and `minor`: builds do not rise with time (7.1.0 has 25424, 7.2.0 has 26015). The
/// numbers are HIP's and not quite ROCm's: the previews 7.9 to 7.11 of ROCm came with HIP 7.2, ROCm 10.0 with 7.15.
///
/// ```
/// use growspan::driver::hip::HipVersion;
///
/// let version = HipVersion::from_raw(71_460_850);
/// assert_eq!((version.major, version.minor, version.build), (7, 14, 60850));
/// assert_eq!(version.to_string(), "HIP runtime 7.14.60850");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HipVersion {
    /// The major version.
    pub major: u32,
    /// The minor version.
    pub minor: u32,
    /// The build: tells apart what was released under one version.
    pub build: u32,
}

impl HipVersion {
    /// From the runtime's own number: the major version times ten million, the minor times a hundred thousand, the
    /// build.
    #[must_use]
    pub const fn from_raw(raw: u32) -> Self {
        Self { major: raw / 10_000_000, minor: raw / 100_000 % 100, build: raw % 100_000 }
    }

    pub(super) const fn pair(self) -> (u32, u32) {
        (self.major, self.minor)
    }
}

/// As reasons quote it.
impl fmt::Display for HipVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HIP runtime {}.{}.{}", self.major, self.minor, self.build)
    }
}
