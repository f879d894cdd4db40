//! Sizes in bytes that cannot overflow unnoticed and that people can read.

use core::fmt;

/// A number of bytes.
///
/// Arithmetic is checked: there is no `+`, only [`checked_add`](Self::checked_add) and its siblings, so a size
/// that does not fit is an error where it arises. Printed in units of 1024, the way `nvidia-smi` counts.
///
/// ```
/// use growspan::Bytes;
///
/// assert_eq!(Bytes::mib(2).to_string(), "2 MiB");
/// assert_eq!(Bytes::new(1_610_612_736).to_string(), "1.5 GiB");
/// assert_eq!(Bytes::new(777).to_string(), "777 B");
/// assert_eq!(Bytes::new(u64::MAX).checked_add(Bytes::new(1)), None);
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Bytes(u64);

impl Bytes {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// `n` bytes.
    #[must_use]
    pub const fn new(n: u64) -> Self {
        Self(n)
    }

    /// `n` KiB (1024 bytes each); the largest representable size if that does not fit.
    #[must_use]
    pub const fn kib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 10))
    }

    /// `n` MiB (1024 KiB each); the largest representable size if that does not fit.
    #[must_use]
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// `n` GiB (1024 MiB each); the largest representable size if that does not fit.
    #[must_use]
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    /// The number of bytes as an integer.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Whether this is zero bytes.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// The sum, or `None` if it does not fit.
    #[must_use]
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// The difference, or `None` if it would be below zero.
    #[must_use]
    pub const fn checked_sub(self, other: Self) -> Option<Self> {
        match self.0.checked_sub(other.0) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// `self` times `n`, or `None` if it does not fit.
    #[must_use]
    pub const fn checked_mul(self, n: u64) -> Option<Self> {
        match self.0.checked_mul(n) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// The difference, or zero if it would be below.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The next multiple of `unit` at or above this size; `None` if it does not fit or `unit` is zero.
    ///
    /// ```
    /// use growspan::Bytes;
    ///
    /// assert_eq!(Bytes::mib(3).round_up(Bytes::mib(2)), Some(Bytes::mib(4)));
    /// assert_eq!(Bytes::new(u64::MAX).round_up(Bytes::mib(2)), None);
    /// assert_eq!(Bytes::mib(3).round_up(Bytes::ZERO), None);
    /// ```
    #[must_use]
    pub const fn round_up(self, unit: Self) -> Option<Self> {
        if unit.0 == 0 {
            return None;
        }
        match self.0.checked_next_multiple_of(unit.0) {
            Some(n) => Some(Self(n)),
            None => None,
        }
    }

    /// The multiple of `unit` at or below this size; `None` if `unit` is zero.
    #[must_use]
    pub const fn round_down(self, unit: Self) -> Option<Self> {
        match self.0.checked_rem(unit.0) {
            Some(rest) => Some(Self(self.0 - rest)),
            None => None,
        }
    }

    /// Reads `"512"`, `"64KiB"`, `"2 MiB"`, `"1.5GiB"`, `"3T"`: a number and a unit of 1024 (the `iB` and the
    /// space may be left out, case does not matter). `None` if it is not that or does not fit.
    ///
    /// ```
    /// use growspan::Bytes;
    ///
    /// assert_eq!(Bytes::parse("1.5 GiB"), Some(Bytes::mib(1536)));
    /// assert_eq!(Bytes::parse("2m"), Some(Bytes::mib(2)));
    /// assert_eq!(Bytes::parse("two MiB"), None);
    /// assert_eq!(Bytes::parse("99999999T"), None);
    /// ```
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let shift = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kib" | "kb" => 10,
            "m" | "mib" | "mb" => 20,
            "g" | "gib" | "gb" => 30,
            "t" | "tib" | "tb" => 40,
            _ => return None,
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let whole: u64 = whole.parse().ok()?;
        let mut bytes = whole.checked_mul(1 << shift)?;
        if !fraction.is_empty() {
            // At most nine digits count: finer than a byte in a GiB.
            let digits = fraction.get(..fraction.len().min(9))?;
            let scale = 10_u128.pow(u32::try_from(digits.len()).ok()?);
            let part = (u128::from(digits.parse::<u64>().ok()?) << shift) / scale;
            bytes = bytes.checked_add(u64::try_from(part).ok()?)?;
        }
        Some(Self(bytes))
    }
}

impl From<u64> for Bytes {
    fn from(n: u64) -> Self {
        Self(n)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u32, &str); 4] = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        for (shift, unit) in UNITS {
            let one = 1_u64 << shift;
            if self.0 < one {
                continue;
            }
            if self.0.is_multiple_of(one) {
                return f.pad(&format!("{} {unit}", self.0 >> shift));
            }
            // Two decimals, rounded down so that a size is never printed larger than it is.
            let hundredths = u128::from(self.0) * 100 / u128::from(one);
            let (whole, part) = (hundredths / 100, hundredths % 100);
            return f.pad(&match part {
                0 => format!("{whole} {unit}"),
                _ if part % 10 == 0 => format!("{whole}.{} {unit}", part / 10),
                _ => format!("{whole}.{part:02} {unit}"),
            });
        }
        f.pad(&format!("{} B", self.0))
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::Bytes;

    #[test]
    fn prints_in_units_of_1024_and_never_larger_than_it_is() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (4096, "4 KiB"),
            (1536, "1.5 KiB"),
            ((2 << 20) - 1, "1.99 MiB"),
            ((1 << 20) + 1, "1 MiB"),
            (u64::MAX, "16777215.99 TiB"),
        ] {
            assert_eq!(Bytes::new(bytes).to_string(), text);
        }
        assert_eq!(format!("[{:>8}]", Bytes::mib(2)), "[   2 MiB]");
    }

    #[test]
    fn rounding_at_the_edges() {
        let unit = Bytes::mib(2);
        assert_eq!(Bytes::ZERO.round_up(unit), Some(Bytes::ZERO));
        assert_eq!(Bytes::new(1).round_up(unit), Some(unit));
        assert_eq!(unit.round_up(unit), Some(unit));
        let top = Bytes::new(u64::MAX).round_down(unit).unwrap();
        assert_eq!(top.round_up(unit), Some(top));
        assert_eq!(Bytes::new(top.get() + 1).round_up(unit), None);
        assert_eq!(Bytes::new(5).round_down(Bytes::ZERO), None);
    }

    #[test]
    fn parses_what_people_type() {
        assert_eq!(Bytes::parse(" 64 KiB "), Some(Bytes::kib(64)));
        assert_eq!(Bytes::parse("0.5g"), Some(Bytes::mib(512)));
        assert_eq!(Bytes::parse("1.999999999999G"), Bytes::parse("1.999999999G"));
        for bad in ["", "MiB", "-1", "1 2", "1.x", "1..2", ".5", "18446744073709551616"] {
            assert_eq!(Bytes::parse(bad), None, "{bad}");
        }
    }
}
