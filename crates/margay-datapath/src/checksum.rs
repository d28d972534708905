//! The Internet checksum (RFC 1071) as sums that can be added up, moved and folded.
//!
//! A sum is the plain, unfolded total of big-endian 16-bit words. It is only good for even-length parts; an odd part
//! must be the last one.

/// Unfolded sum of `bytes` as big-endian words; a last odd byte counts as the high half of a word.
pub fn sum(bytes: &[u8]) -> u64 {
    let words = bytes.chunks_exact(2);
    let odd = words.remainder().first().map_or(0, |&byte| u64::from(byte) << 8);
    words.map(|word| u64::from(u16::from_be_bytes([word[0], word[1]]))).sum::<u64>() + odd
}

/// Folds a sum to 16 bits, without complementing it.
pub const fn fold(sum: u64) -> u16 {
    let mut sum = sum;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The pseudo-header's sum without its addresses: protocol and transport length (RFC 9293 §3.1, RFC 8200 §8.1).
pub const fn pseudo(protocol: u8, transport_len: u32) -> u64 {
    protocol as u64 + (transport_len >> 16) as u64 + (transport_len & 0xffff) as u64
}

/// A complete checksum `old` after the words that add up to `removed` were replaced by words that add up to `added`
/// (RFC 1624, equation 3).
pub const fn adjust(old: u16, removed: u64, added: u64) -> u16 {
    !fold((!old) as u64 + (!fold(removed)) as u64 + added)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn known_header() {
        // The example of RFC 1071 §3.
        assert_eq!(fold(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7])), 0xddf2);
        assert_eq!(sum(&[0xff]), 0xff00);
    }

    #[test]
    fn adjusting_is_recomputing() {
        let before = [0x45, 0, 1, 2, 3, 4, 0xff, 0xff];
        let after = [0x45, 0, 9, 9, 3, 4, 0, 1];
        let adjusted = adjust(!fold(sum(&before)), sum(&before), sum(&after));
        assert_eq!(adjusted, !fold(sum(&after)));
    }
}
