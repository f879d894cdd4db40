//! UUIDs as `nvidia-smi -L` prints them.

/// `GPU-01234567-89ab-cdef-0123-456789abcdef`.
#[must_use]
pub fn uuid_text(uuid: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (i, byte) in uuid.iter().enumerate() {
        if matches!(i, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push(hex(byte >> 4));
        text.push(hex(byte & 0xf));
    }
    text
}

fn hex(digit: u8) -> char {
    char::from_digit(u32::from(digit), 16).unwrap_or('0')
}

/// Reads a UUID as `nvidia-smi -L` prints it, with or without its `GPU-` or `MIG-` and its dashes. `None` if it is not
/// one in full.
///
/// ```
/// use growspan::driver::cuda::{parse_uuid, uuid_text};
///
/// let text = "GPU-01234567-89ab-cdef-0123-456789abcdef";
/// assert_eq!(parse_uuid(text).map(uuid_text).as_deref(), Some(text));
/// assert_eq!(parse_uuid("GPU-01234567"), None);
/// ```
#[must_use]
pub fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let text = text.trim();
    let digits = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-")).unwrap_or(text);
    let mut uuid = [0; 16];
    let mut count = 0;
    for c in digits.chars().filter(|&c| c != '-') {
        let digit = u8::try_from(c.to_digit(16)?).ok()?;
        let byte = uuid.get_mut(count / 2)?;
        *byte = *byte << 4 | digit;
        count += 1;
    }
    (count == 32).then_some(uuid)
}
