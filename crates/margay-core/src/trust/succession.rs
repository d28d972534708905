//! An authority's key is followed by another one (DESIGN §7): each of both says so.
//!
//! ```text
//!  0 version = 1 | 1..9 authority's block | 9..41 the key until then | 41..73 the key that follows it
//!  73..81 when the new one begins to sign, 81..89 until when the old one is trusted (seconds since 1970)
//!  89..153 signature by the old key, 153..217 by the new one, each over `margay 2026 succession` and bytes 0 to 89
//! ```
//! Numbers are big-endian.

use alloc::vec::Vec;

use crate::types::key::{SigningKey, VerifyingKey};

const VERSION: u8 = 1;
const SIGNED_LEN: usize = 89;
/// Bytes of a succession.
pub const SUCCESSION_LEN: usize = SIGNED_LEN + 2 * 64;
const CONTEXT: &[u8] = b"margay 2026 succession";

/// From one key of an authority to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Succession {
    /// The authority's block.
    pub authority: [u8; 8],
    /// Whom hosts trust until they have heard of it.
    pub old: VerifyingKey,
    /// Whom they trust besides from then on.
    pub new: VerifyingKey,
    /// The new key signs from then on, in seconds since 1970: by then everybody who is shown by a certificate that
    /// holds has heard of it.
    pub signs_from_s: u64,
    /// What the old key has signed holds no longer after it.
    pub trusted_until_s: u64,
    /// By the old key, and by the new one.
    pub signatures: [[u8; 64]; 2],
}

/// The bytes are no succession.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the succession of an authority's key is malformed")]
pub struct BadSuccession;

impl Succession {
    /// From `old` to `new`.
    pub fn new(
        authority: [u8; 8],
        old: &SigningKey,
        new: &SigningKey,
        signs_from_s: u64,
        trusted_until_s: u64,
    ) -> Self {
        let (keys, signatures) = ([old.public(), new.public()], [[0; 64]; 2]);
        let mut made = Self { authority, old: keys[0], new: keys[1], signs_from_s, trusted_until_s, signatures };
        made.signatures = [old.sign(&made.signed()), new.sign(&made.signed())];
        made
    }

    /// Whether both keys have signed it. Whose the old one is, the caller knows.
    pub fn is_signed(&self) -> bool {
        let signed = self.signed();
        self.old.verify(&signed, &self.signatures[0]) && self.new.verify(&signed, &self.signatures[1])
    }

    fn signed(&self) -> Vec<u8> {
        [CONTEXT, &self.fixed()].concat()
    }

    fn fixed(&self) -> [u8; SIGNED_LEN] {
        let mut bytes = [0; SIGNED_LEN];
        bytes[0] = VERSION;
        bytes[1..9].copy_from_slice(&self.authority);
        bytes[9..41].copy_from_slice(&self.old.0);
        bytes[41..73].copy_from_slice(&self.new.0);
        bytes[73..81].copy_from_slice(&self.signs_from_s.to_be_bytes());
        bytes[81..].copy_from_slice(&self.trusted_until_s.to_be_bytes());
        bytes
    }

    /// The bytes.
    pub fn encode(&self) -> [u8; SUCCESSION_LEN] {
        let mut bytes = [0; SUCCESSION_LEN];
        bytes[..SIGNED_LEN].copy_from_slice(&self.fixed());
        bytes[SIGNED_LEN..SIGNED_LEN + 64].copy_from_slice(&self.signatures[0]);
        bytes[SIGNED_LEN + 64..].copy_from_slice(&self.signatures[1]);
        bytes
    }

    /// Reads one; says nothing of its truth.
    ///
    /// # Errors
    ///
    /// Not of this format.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadSuccession> {
        let bytes: &[u8; SUCCESSION_LEN] = bytes.try_into().map_err(|_| BadSuccession)?;
        let number = |at: usize| u64::from_be_bytes(core::array::from_fn(|byte| bytes[at + byte]));
        let key = |at: usize| VerifyingKey(core::array::from_fn(|byte| bytes[at + byte]));
        let signature = |at: usize| core::array::from_fn(|byte| bytes[at + byte]);
        let (signs_from_s, trusted_until_s) = (number(73), number(81));
        // Between the two, certificates of both keys are around.
        if bytes[0] != VERSION || signs_from_s > trusted_until_s || key(9) == key(41) {
            return Err(BadSuccession);
        }
        Ok(Self {
            authority: core::array::from_fn(|byte| bytes[1 + byte]),
            old: key(9),
            new: key(41),
            signs_from_s,
            trusted_until_s,
            signatures: [signature(SIGNED_LEN), signature(SIGNED_LEN + 64)],
        })
    }
}

/// The keys of an authority from `first` on, as far as they follow each other: each succession is by the key before it.
/// Ends where nothing follows, and where something would follow for the second time.
pub fn heirs<'a>(
    authority: [u8; 8],
    first: VerifyingKey,
    known: impl IntoIterator<Item = &'a Succession>,
) -> Vec<Succession> {
    let known: Vec<&Succession> = known.into_iter().filter(|one| one.authority == authority).collect();
    let (mut line, mut last): (Vec<Succession>, _) = (Vec::new(), first);
    while let Some(next) = known.iter().find(|one| one.old == last && one.is_signed()) {
        if next.new == first || line.iter().any(|one| one.new == next.new) {
            break;
        }
        last = next.new;
        line.push(**next);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::rng::Rng;

    fn key(n: u8) -> SigningKey {
        SigningKey::generate(&mut Rng::new([n; 32]))
    }

    fn from_to(old: u8, new: u8) -> Succession {
        Succession::new([7; 8], &key(old), &key(new), 0x0102, 0x0304)
    }

    #[test]
    fn the_format_is_as_written_above() {
        let (made, bytes) = (from_to(1, 2), from_to(1, 2).encode());
        assert_eq!(bytes.len(), 217);
        assert_eq!(bytes[..9], [1, 7, 7, 7, 7, 7, 7, 7, 7]);
        assert_eq!((&bytes[9..41], &bytes[41..73]), (&key(1).public().0[..], &key(2).public().0[..]));
        assert_eq!(bytes[73..89], [0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 3, 4]);
        let signed = [b"margay 2026 succession", &bytes[..89]].concat();
        assert_eq!((&bytes[89..153], &bytes[153..]), (&key(1).sign(&signed)[..], &key(2).sign(&signed)[..]));
        assert_eq!(Succession::decode(&bytes), Ok(made));
        let backwards = Succession::new([7; 8], &key(1), &key(2), 9, 8).encode();
        assert_eq!(Succession::decode(&backwards), Err(BadSuccession));
        assert_eq!(Succession::decode(&bytes[1..]), Err(BadSuccession));
    }

    #[test]
    fn no_flipped_bit_is_believed() {
        let good = from_to(1, 2).encode();
        assert!(from_to(1, 2).is_signed());
        for bit in 0..good.len() * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!Succession::decode(&bad).is_ok_and(|read| read.is_signed()), "bit {bit}");
        }
    }

    #[test]
    fn a_line_goes_on_while_each_key_is_followed_by_the_next() {
        let ends = |line: Vec<Succession>| -> Vec<VerifyingKey> { line.into_iter().map(|one| one.new).collect() };
        let of = |first: u8, known: &[Succession]| ends(heirs([7; 8], key(first).public(), known));
        let known = [from_to(2, 3), from_to(1, 2), from_to(4, 5)];
        assert_eq!(of(1, &known), [key(2).public(), key(3).public()]);
        assert_eq!(of(3, &known), []);
        assert_eq!(of(1, &[from_to(1, 2), from_to(2, 1)]), [key(2).public()], "no ring");
        let half = Succession { signatures: [from_to(1, 2).signatures[0]; 2], ..from_to(1, 2) };
        assert_eq!(of(1, &[half]), [], "the new key has not signed");
        let foreign = Succession::new([8; 8], &key(1), &key(2), 1, 2);
        assert_eq!(of(1, &[foreign]), [], "of another authority");
    }
}
