//! Keys: X25519 for hosts (who are you), Ed25519 for services and authorities (who says so).

use alloc::string::String;
use core::fmt;
use core::str::FromStr;

use curve25519_dalek::MontgomeryPoint;
use ed25519_dalek::hazmat::{ExpandedSecretKey, raw_sign};
use ed25519_dalek::{Sha512, Signer};
use zeroize::Zeroizing;

use crate::rng::Rng;

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

    /// Signs by the key of handshakes, as XEdDSA does (Perrin, 2016): what is made is an Ed25519 signature under the Edwards form of the
    /// public key. The random number in it is of the key and the message, as Ed25519 has it.
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
    fn host_ids_are_read_as_they_are_written() {
        let id = HostSecret::generate(&mut Rng::new([3; 32])).public().id();
        assert_eq!(alloc::format!("{id}").parse(), Ok(id));
        assert_eq!("12".parse::<HostId>(), Err(BadHex { expected: 32 }));
        assert_eq!("zz".repeat(16).parse::<HostId>(), Err(BadHex { expected: 32 }));
    }
}
