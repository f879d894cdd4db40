//! The bytes that stand for keys and values: all different, and cheap to make again.
//!
//! Each depends on the request, the token and the place in the token, so that a byte of another request, of another
//! token or of memory that was never written shows.

/// The golden ratio in 64 bits: its multiples are spread evenly.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number that looks random, another one for every input (the finish of SplitMix64).
pub(crate) fn mix(n: u64) -> u64 {
    let n = n.wrapping_mul(STEP);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

/// The words of one token, without end.
struct Words(u64);

impl Words {
    fn of(request: u64, token: u32) -> Self {
        Self(mix(mix(request) ^ u64::from(token)))
    }

    #[inline]
    fn next(&mut self) -> [u8; 8] {
        self.0 = self.0.wrapping_add(STEP);
        (self.0 ^ (self.0 >> 32)).to_le_bytes()
    }
}

/// Writes a token.
pub(crate) fn write(bytes: &mut [u8], request: u64, token: u32) {
    let mut expected = Words::of(request, token);
    let (words, rest) = bytes.as_chunks_mut();
    for word in words {
        *word = expected.next();
    }
    rest.iter_mut().zip(expected.next()).for_each(|(byte, right)| *byte = right);
}

/// How many bytes of a token are not what was written.
pub(crate) fn mismatches(bytes: &[u8], request: u64, token: u32) -> u64 {
    let mut expected = Words::of(request, token);
    let (words, rest) = bytes.as_chunks();
    // All words are compared without a branch, and counted only if one of them differs.
    let mut difference = 0;
    for word in words {
        difference |= u64::from_le_bytes(*word) ^ u64::from_le_bytes(expected.next());
    }
    let differ = |bytes: &[u8], right: [u8; 8]| bytes.iter().zip(right).filter(|(byte, right)| *byte != right).count();
    let mut wrong = differ(rest, expected.next());
    if difference != 0 {
        let mut expected = Words::of(request, token);
        wrong += words.iter().map(|word| differ(word, expected.next())).sum::<usize>();
    }
    wrong as u64
}
