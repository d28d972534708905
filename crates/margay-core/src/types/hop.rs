//! Tags between neighbours on the way of a resolvable packet: SipHash-2-4, cheap enough for an XDP program (DESIGN §6).

use core::hash::Hasher;

use siphasher::sip::SipHasher24;

/// Resolvable packets start with this many hops to go.
pub(crate) const HOP_LIMIT: u8 = 16;

/// The tag of `tagged`, the first bytes of a datagram up to the tag, under the key that two neighbours share.
pub fn hop_tag(key: &[u8; 16], tagged: &[u8]) -> [u8; 8] {
    let mut hasher = SipHasher24::new_with_key(key);
    hasher.write(tagged);
    hasher.finish().to_be_bytes()
}

/// Whether `tag` is right; takes the same time either way.
pub fn is_valid(key: &[u8; 16], tagged: &[u8], tag: &[u8; 8]) -> bool {
    let wanted = hop_tag(key, tagged);
    wanted.iter().zip(tag).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tag_is_siphash_2_4_of_the_reference_vector() {
        // Key 00..0f, message 00..0e: the example of the SipHash paper, appendix A.
        let key = core::array::from_fn(|at| at as u8);
        let message: [u8; 15] = core::array::from_fn(|at| at as u8);
        assert_eq!(hop_tag(&key, &message), 0xa129_ca61_49be_45e5_u64.to_be_bytes());
        assert!(is_valid(&key, &message, &hop_tag(&key, &message)));
        assert!(!is_valid(&key, &message[1..], &hop_tag(&key, &message)));
    }
}
