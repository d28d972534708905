//! Keys: X25519 for hosts (who are you), Ed25519 for services and authorities (who says so).

use alloc::string::String;
use core::fmt;
use core::str::FromStr;

use curve25519_dalek::MontgomeryPoint;
use ed25519_dalek::hazmat::{ExpandedSecretKey, raw_sign};
use ed25519_dalek::{Sha512, Signer};
use zeroize::Zeroizing;

use crate::types::rng::Rng;

/// A host's identity on the wire: the first 16 bytes of the BLAKE3 of its public key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostId(pub [u8; 16]);

/// Of an Edwards point as it is written: which of two points with the same other coordinate.
const SIGN_BIT: u8 = 0x80;

/// Text that is not the hexadecimal form of so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected} hexadecimal digits")]
pub struct BadHex {
    /// Digits wanted.
    pub expected: usize,
}

/// Lower-case hexadecimal.
pub fn to_hex(bytes: &[u8]) -> String {
    use core::fmt::Write as _;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Reads exactly `N` bytes of hexadecimal.
///
/// # Errors
///
/// Another length, or a character that is no digit.
pub fn from_hex<const N: usize>(text: &str) -> Result<[u8; N], BadHex> {
    let bad = BadHex { expected: 2 * N };
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return Err(bad);
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        *byte = digit(0).ok_or(bad)? << 4 | digit(1).ok_or(bad)?;
    }
    Ok(bytes)
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&to_hex(&self.0))
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostId({self})")
    }
}

impl FromStr for HostId {
    type Err = BadHex;

    fn from_str(text: &str) -> Result<Self, BadHex> {
        from_hex(text).map(Self)
    }
}

/// A host's public key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostPublic(pub [u8; 32]);

impl HostPublic {
    /// What the wire calls the host.
    pub fn id(&self) -> HostId {
        let mut id = [0; 16];
        id.copy_from_slice(&blake3::hash(&self.0).as_bytes()[..16]);
        HostId(id)
    }
}

/// The encodings of X25519 points of low order, without their top bit, which X25519 does not read: 0, 1, two of order
/// 8, and p - 1, p and p + 1. Whatever the private key, the result of Diffie-Hellman with one of them is zero (RFC
/// 7748 §6.1).
const LOW_ORDER: [[u8; 32]; 7] = [
    [0; 32],
    first_byte(1),
    [
        0xe0, 0xeb, 0x7a, 0x7c, 0x3b, 0x41, 0xb8, 0xae, 0x16, 0x56, 0xe3, 0xfa, 0xf1, 0x9f, 0xc4, 0x6a, 0xda, 0x09,
        0x8d, 0xeb, 0x9c, 0x32, 0xb1, 0xfd, 0x86, 0x62, 0x05, 0x16, 0x5f, 0x49, 0xb8, 0x00,
    ],
    [
        0x5f, 0x9c, 0x95, 0xbc, 0xa3, 0x50, 0x8c, 0x24, 0xb1, 0xd0, 0xb1, 0x55, 0x9c, 0x83, 0xef, 0x5b, 0x04, 0x44,
        0x5c, 0xc4, 0x58, 0x1c, 0x8e, 0x86, 0xd8, 0x22, 0x4e, 0xdd, 0xd0, 0x9f, 0x11, 0x57,
    ],
    near_p(0xec),
    near_p(0xed),
    near_p(0xee),
];

const fn first_byte(value: u8) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[0] = value;
    bytes
}

/// The prime 2^255 - 19 ends in 0xed; another last byte gives a neighbour of it.
const fn near_p(last: u8) -> [u8; 32] {
    let mut bytes = [0xff; 32];
    bytes[0] = last;
    bytes[31] = 0x7f;
    bytes
}

impl HostPublic {
    /// Whether it is nobody's key: a point of low order, zero among them. Everybody knows what Diffie-Hellman makes
    /// of it, so whoever shows one proves nothing (RFC 7748 §6.1).
    pub fn is_of_low_order(&self) -> bool {
        let mut read = self.0;
        read[31] &= !SIGN_BIT;
        LOW_ORDER.contains(&read)
    }
}

impl HostPublic {
    /// Whether `signature` is by this host, over `message`: see [`HostSecret::sign`].
    pub fn verify(&self, message: &[u8], signature: &[u8; 64]) -> bool {
        let edwards = MontgomeryPoint(self.0).to_edwards(0);
        edwards.is_some_and(|point| VerifyingKey(point.compress().to_bytes()).verify(message, signature))
    }
}

impl fmt::Debug for HostPublic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostPublic({})", to_hex(&self.0))
    }
}

/// A host's private key. Wiped when dropped, never printed.
#[derive(Clone)]
pub struct HostSecret {
    secret: Zeroizing<[u8; 32]>,
    public: HostPublic,
}

impl HostSecret {
    /// A new key.
    pub fn generate(rng: &mut Rng) -> Self {
        Self::from_bytes(rng.bytes())
    }

    /// The key of these bytes.
    pub fn from_bytes(secret: [u8; 32]) -> Self {
        let public = MontgomeryPoint::mul_base_clamped(secret).to_bytes();
        Self { secret: Zeroizing::new(secret), public: HostPublic(public) }
    }

    /// The bytes, to be stored where only root reads.
    pub fn to_bytes(&self) -> Zeroizing<[u8; 32]> {
        self.secret.clone()
    }

    /// The public half.
    pub fn public(&self) -> HostPublic {
        self.public
    }

    /// Signs by the key of handshakes, as XEdDSA does (Perrin, 2016): what is made is an Ed25519 signature under the
    /// Edwards form of the public key. The random number in it is of the key and the message, as Ed25519 has it.
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        let mut expanded = Zeroizing::new([0; 64]);
        expanded[..32].copy_from_slice(&*self.secret);
        expanded[32..].copy_from_slice(&blake3::derive_key("margay 2026 host signature", &*self.secret));
        let mut key = ExpandedSecretKey::from_bytes(&expanded);
        let mut public = ed25519_dalek::VerifyingKey::from(&key);
        if public.to_bytes()[31] & SIGN_BIT != 0 {
            // The one of both that the public key, which has no sign, stands for.
            key.scalar = -key.scalar;
            public = ed25519_dalek::VerifyingKey::from(&key);
        }
        raw_sign::<Sha512>(&key, message, &public).to_bytes()
    }
}

impl fmt::Debug for HostSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostSecret(of {})", self.public.id())
    }
}

/// A key that signs certificates: an authority's or a service's.
#[derive(Clone)]
pub struct SigningKey(ed25519_dalek::SigningKey);

impl SigningKey {
    /// A new key.
    pub fn generate(rng: &mut Rng) -> Self {
        Self::from_bytes(&rng.bytes())
    }

    /// The key of these bytes.
    pub fn from_bytes(bytes: &[u8; 32]) -> Self {
        Self(ed25519_dalek::SigningKey::from_bytes(bytes))
    }

    /// The bytes, to be stored where only root reads.
    pub fn to_bytes(&self) -> Zeroizing<[u8; 32]> {
        Zeroizing::new(self.0.to_bytes())
    }

    /// The public half.
    pub fn public(&self) -> VerifyingKey {
        VerifyingKey(self.0.verifying_key().to_bytes())
    }

    /// Signs.
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        self.0.sign(message).to_bytes()
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey(of {:?})", self.public())
    }
}

/// The public half of a [`SigningKey`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct VerifyingKey(pub [u8; 32]);

impl VerifyingKey {
    /// Whether `signature` is this key's over `message`. Strict: no malleable signatures, no weak keys.
    pub fn verify(&self, message: &[u8], signature: &[u8; 64]) -> bool {
        let signature = ed25519_dalek::Signature::from_bytes(signature);
        ed25519_dalek::VerifyingKey::from_bytes(&self.0).is_ok_and(|key| key.verify_strict(message, &signature).is_ok())
    }
}

impl fmt::Debug for VerifyingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VerifyingKey({})", to_hex(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_hold_for_their_message_only() {
        let key = SigningKey::generate(&mut Rng::new([3; 32]));
        let signature = key.sign(b"margay");
        assert!(key.public().verify(b"margay", &signature));
        assert!(!key.public().verify(b"serval", &signature));
        assert!(!VerifyingKey([0; 32]).verify(b"margay", &signature));
    }

    #[test]
    fn hosts_sign_by_the_key_of_their_handshakes() {
        for seed in 0..32 {
            let key = HostSecret::generate(&mut Rng::new([seed; 32]));
            let signature = key.sign(b"margay");
            assert!(key.public().verify(b"margay", &signature), "seed {seed}");
            assert!(!key.public().verify(b"serval", &signature));
            assert!(!HostSecret::generate(&mut Rng::new([99; 32])).public().verify(b"margay", &signature));
            for bit in [0, 255, 256, 511] {
                let mut other = signature;
                other[bit / 8] ^= 1 << (bit % 8);
                assert!(!key.public().verify(b"margay", &other), "bit {bit}");
            }
        }
        assert!(!HostPublic([0; 32]).verify(b"", &[0; 64]), "a key of low order");
    }

    #[test]
    fn keys_of_low_order_are_those_that_make_zero_of_every_private_key() {
        for low in LOW_ORDER {
            for top in [0, SIGN_BIT] {
                let mut key = low;
                key[31] |= top;
                assert!(HostPublic(key).is_of_low_order());
                for private in [[0; 32], [0x5a; 32]] {
                    assert_eq!(MontgomeryPoint(key).mul_clamped(private).to_bytes(), [0; 32], "{key:02x?}");
                }
            }
        }
        for seed in 0..32 {
            assert!(!HostSecret::generate(&mut Rng::new([seed; 32])).public().is_of_low_order());
        }
        assert!(!HostPublic(first_byte(9)).is_of_low_order(), "the base point");
    }

    #[test]
    fn host_ids_are_read_as_they_are_written() {
        let id = HostSecret::generate(&mut Rng::new([3; 32])).public().id();
        assert_eq!(alloc::format!("{id}").parse(), Ok(id));
        assert_eq!("12".parse::<HostId>(), Err(BadHex { expected: 32 }));
        assert_eq!("zz".repeat(16).parse::<HostId>(), Err(BadHex { expected: 32 }));
    }
}
