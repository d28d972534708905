//! An authority takes back what it has let another key sign (DESIGN §7): everybody who trusts the authority believes
//! that key no more.
//!
//! ```text
//!  0 version = 1 | 1..9 authority's block | 9..41 the key | 41..49 until (seconds since 1970)
//!  49..81 the authority's key | 81..145 signature by that over `margay 2026 key revocation` and all before it
//! ```
//! Numbers are big-endian.

use alloc::vec::Vec;

use crate::types::key::{SigningKey, VerifyingKey};

const VERSION: u8 = 1;
const SIGNED_LEN: usize = 81;
/// Bytes of a revocation.
pub const KEY_REVOCATION_LEN: usize = SIGNED_LEN + 64;
const CONTEXT: &[u8] = b"margay 2026 key revocation";

/// Revocations of one authority's keys that a host remembers. Of more, those that end first are forgotten.
pub const KEY_REVOCATIONS_MAX: usize = 256;

/// A key that an authority lets sign no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRevocation {
    /// The authority's block.
    pub authority: [u8; 8],
    /// The key.
    pub key: VerifyingKey,
    /// What was delegated to the key until this time, in seconds since 1970, holds no longer. Later nothing is left to
    /// revoke.
    pub until_s: u64,
    /// The authority's own key.
    pub signer: VerifyingKey,
    /// By that key.
    pub signature: [u8; 64],
}

/// The bytes are no revocation of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the revocation of a key is malformed")]
pub struct BadKeyRevocation;

impl KeyRevocation {
    /// By the authority's own key.
    pub fn new(authority: [u8; 8], key: VerifyingKey, until_s: u64, by: &SigningKey) -> Self {
        let mut made = Self { authority, key, until_s, signer: by.public(), signature: [0; 64] };
        made.signature = by.sign(&made.signed());
        made
    }

    /// Whether it was signed by the key that it names. Who that is, the caller knows.
    pub fn is_signed(&self) -> bool {
        self.signer.verify(&self.signed(), &self.signature)
    }

    fn signed(&self) -> Vec<u8> {
        [CONTEXT, &self.fixed()].concat()
    }

    fn fixed(&self) -> [u8; SIGNED_LEN] {
        let mut bytes = [0; SIGNED_LEN];
        bytes[0] = VERSION;
        bytes[1..9].copy_from_slice(&self.authority);
        bytes[9..41].copy_from_slice(&self.key.0);
        bytes[41..49].copy_from_slice(&self.until_s.to_be_bytes());
        bytes[49..].copy_from_slice(&self.signer.0);
        bytes
    }

    /// The bytes.
    pub fn encode(&self) -> [u8; KEY_REVOCATION_LEN] {
        let mut bytes = [0; KEY_REVOCATION_LEN];
        bytes[..SIGNED_LEN].copy_from_slice(&self.fixed());
        bytes[SIGNED_LEN..].copy_from_slice(&self.signature);
        bytes
    }

    /// Reads one; says nothing of its truth.
    ///
    /// # Errors
    ///
    /// Not of this format.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadKeyRevocation> {
        let bytes: &[u8; KEY_REVOCATION_LEN] = bytes.try_into().map_err(|_| BadKeyRevocation)?;
        if bytes[0] != VERSION {
            return Err(BadKeyRevocation);
        }
        let key = |at: usize| VerifyingKey(core::array::from_fn(|byte| bytes[at + byte]));
        Ok(Self {
            authority: core::array::from_fn(|byte| bytes[1 + byte]),
            key: key(9),
            until_s: u64::from_be_bytes(core::array::from_fn(|byte| bytes[41 + byte])),
            signer: key(49),
            signature: core::array::from_fn(|byte| bytes[SIGNED_LEN + byte]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::rng::Rng;

    fn made() -> KeyRevocation {
        let by = SigningKey::generate(&mut Rng::new([1; 32]));
        KeyRevocation::new([7; 8], VerifyingKey([9; 32]), 0x0102_0304, &by)
    }

    #[test]
    fn the_format_is_as_written_above() {
        let (made, bytes) = (made(), made().encode());
        assert_eq!(bytes.len(), 145);
        assert_eq!(bytes[..9], [1, 7, 7, 7, 7, 7, 7, 7, 7]);
        assert_eq!((bytes[9..41] == [9; 32], &bytes[41..49]), (true, &[0, 0, 0, 0, 1, 2, 3, 4][..]));
        assert_eq!((&bytes[49..81], &bytes[81..]), (&made.signer.0[..], &made.signature[..]));
        let by = SigningKey::generate(&mut Rng::new([1; 32]));
        assert_eq!(made.signature, by.sign(&[b"margay 2026 key revocation", &bytes[..81]].concat()));
        assert_eq!(KeyRevocation::decode(&bytes), Ok(made));
    }

    #[test]
    fn no_flipped_bit_and_no_cut_is_believed() {
        let good = made().encode();
        assert!(made().is_signed());
        for bit in 0..good.len() * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(!KeyRevocation::decode(&bad).is_ok_and(|read| read.is_signed()), "bit {bit}");
        }
        assert_eq!(KeyRevocation::decode(&good[1..]), Err(BadKeyRevocation));
        assert_eq!(KeyRevocation::decode(&[&good[..], &[0]].concat()), Err(BadKeyRevocation));
    }
}
