//! Noise XX between two hosts, inside SYN, SYN-ACK and ACK (DESIGN §7).
//!
//! The second and third messages carry an [`Introduction`]: what each says of itself, encrypted and bound to the
//! handshake.

use alloc::boxed::Box;
use alloc::vec::Vec;

use curve25519_dalek::MontgomeryPoint;
use snow::params::{CipherChoice, DHChoice, HashChoice, NoiseParams};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::{Cipher, Dh, Hash, Random};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::types::key::{HostPublic, HostSecret};
use crate::types::rng::Rng;

const PATTERN: &str = "Noise_XX_25519_ChaChaPoly_BLAKE2s";
const INTRODUCTION_FIXED_LEN: usize = 4 + 16 + 4 + 32;
const MESSAGE_MAX: usize = 2048;

/// The handshake came to nothing: garbage, or made for another session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer's handshake message is garbage or belongs to another session")]
pub struct HandshakeError;

impl From<snow::Error> for HandshakeError {
    fn from(_: snow::Error) -> Self {
        Self
    }
}

/// What a host says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Introduction {
    /// The start of its agent.
    pub epoch: u32,
    /// The boot of its host.
    pub boot_id: [u8; 16],
    /// The index by which the peer shall name the new association to it.
    pub assoc_id: u32,
    /// In message 2: the key of that datagram's tag. Zero in message 3.
    pub tag_key: [u8; 32],
    /// Encoded chain that shows its authority; may be empty.
    pub certificate: Vec<u8>,
}

impl Introduction {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(INTRODUCTION_FIXED_LEN + self.certificate.len());
        bytes.extend_from_slice(&self.epoch.to_be_bytes());
        bytes.extend_from_slice(&self.boot_id);
        bytes.extend_from_slice(&self.assoc_id.to_be_bytes());
        bytes.extend_from_slice(&self.tag_key);
        bytes.extend_from_slice(&self.certificate);
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        let (fixed, certificate) = bytes.split_at_checked(INTRODUCTION_FIXED_LEN).ok_or(HandshakeError)?;
        let word = |at: usize| fixed[at..at + 4].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let (mut boot_id, mut tag_key) = ([0; 16], [0; 32]);
        boot_id.copy_from_slice(&fixed[4..20]);
        tag_key.copy_from_slice(&fixed[24..]);
        Ok(Self { epoch: word(0), boot_id, assoc_id: word(20), tag_key, certificate: certificate.to_vec() })
    }
}

/// What both hold after the handshake.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct Keys {
    /// The association's key, from which sending keys derive.
    pub root: [u8; 32],
}

impl Keys {
    fn of(state: &mut snow::HandshakeState) -> Self {
        let (first, second) = state.dangerously_get_raw_split();
        let mut hasher = blake3::Hasher::new_derive_key("margay 2026 association root");
        hasher.update(&first).update(&second);
        Self { root: *hasher.finalize().as_bytes() }
    }
}

/// snow's algorithms, with our stream of random bytes: the core may not ask the operating system. And with the host's
/// own key, whose public half is known: snow would derive it anew for every SYN, at the cost of another ephemeral key.
struct Seeded {
    seed: [u8; 32],
    secret: HostSecret,
}

/// Curve25519 as snow has it, but for [`set`](Dh::set).
struct KnownDh {
    known: HostSecret,
    private: Zeroizing<[u8; 32]>,
    public: [u8; 32],
}

impl KnownDh {
    fn own(&mut self, private: [u8; 32]) {
        self.public = MontgomeryPoint::mul_base_clamped(private).to_bytes();
        self.private = Zeroizing::new(private);
    }
}

impl Dh for KnownDh {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        32
    }

    fn priv_len(&self) -> usize {
        32
    }

    fn set(&mut self, private: &[u8]) {
        let known = self.known.to_bytes();
        if private == &known[..] {
            (self.private, self.public) = (known, self.known.public().0);
        } else if let Ok(private) = private.try_into() {
            self.own(private);
        }
    }

    fn generate(&mut self, rng: &mut dyn Random) -> Result<(), snow::Error> {
        let mut private = [0; 32];
        rng.try_fill_bytes(&mut private)?;
        self.own(private);
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    fn privkey(&self) -> &[u8] {
        &self.private[..]
    }

    fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
        let public = public.get(..32).and_then(|public| public.try_into().ok()).ok_or(snow::Error::Input)?;
        let shared = MontgomeryPoint(public).mul_clamped(*self.private).to_bytes();
        // The peer's key is of low order: everybody knows this result, so it proves nothing (RFC 7748 §6.1).
        if shared.iter().fold(0, |all, byte| all | byte) == 0 {
            return Err(snow::Error::Dh);
        }
        out.get_mut(..32).ok_or(snow::Error::Input)?.copy_from_slice(&shared);
        Ok(())
    }
}

impl CryptoResolver for Seeded {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(Rng::new(self.seed)))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        (*choice == DHChoice::Curve25519).then(|| {
            let known = self.secret.clone();
            Box::new(KnownDh { known, private: Zeroizing::default(), public: [0; 32] }) as Box<dyn Dh>
        })
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        DefaultResolver.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        DefaultResolver.resolve_cipher(choice)
    }
}

/// The Noise XX state for one end: also what the registration stream runs on. `rng` gives the ephemeral key.
///
/// # Errors
///
/// Never with the algorithms that are compiled in.
pub fn noise_xx(
    secret: &HostSecret,
    rng: &mut Rng,
    prologue: &[u8],
    initiator: bool,
) -> Result<snow::HandshakeState, HandshakeError> {
    let params: NoiseParams = PATTERN.parse()?;
    let key = secret.to_bytes();
    let builder = snow::Builder::with_resolver(params, Box::new(Seeded { seed: rng.bytes(), secret: secret.clone() }));
    let builder = builder.local_private_key(&key[..])?.prologue(prologue)?;
    Ok(if initiator { builder.build_initiator()? } else { builder.build_responder()? })
}

fn peer_of(state: &snow::HandshakeState) -> Result<HostPublic, HandshakeError> {
    let key = state.get_remote_static().ok_or(HandshakeError)?;
    Ok(HostPublic(key.try_into().map_err(|_| HandshakeError)?))
}

/// The connecting side, between messages 1 and 3.
pub struct Initiator(Result<snow::HandshakeState, HandshakeError>);

/// Who has answered, what it says of itself, message 3, and the keys of the two.
pub type Finished = (HostPublic, Introduction, Vec<u8>, Keys);

impl Initiator {
    /// Starts a handshake: the state, and message 1. The same `rng` state gives the same message.
    pub fn start(secret: &HostSecret, rng: &mut Rng, prologue: &[u8]) -> (Self, Vec<u8>) {
        let mut message = alloc::vec![0; 64];
        let started = noise_xx(secret, rng, prologue, true).and_then(|mut state| {
            let len = state.write_message(&[], &mut message)?;
            message.truncate(len);
            Ok(state)
        });
        (Self(started), message)
    }

    /// Reads message 2 and writes message 3: the peer's key, what it says, message 3, and the keys.
    ///
    /// # Errors
    ///
    /// Message 2 is garbage or belongs to another session.
    pub fn finish(self, message_2: &[u8], mine: &Introduction) -> Result<Finished, HandshakeError> {
        let mut state = self.0?;
        let mut payload = alloc::vec![0; MESSAGE_MAX];
        let len = state.read_message(message_2, &mut payload)?;
        let theirs = Introduction::decode(payload.get(..len).ok_or(HandshakeError)?)?;
        let mut message_3 = alloc::vec![0; MESSAGE_MAX];
        let len = state.write_message(&mine.encode(), &mut message_3)?;
        message_3.truncate(len);
        let keys = Keys::of(&mut state);
        Ok((peer_of(&state)?, theirs, message_3, keys))
    }
}

/// The answering side, between messages 2 and 3.
pub struct Responder(snow::HandshakeState);

impl Responder {
    /// Reads message 1 and writes message 2.
    ///
    /// # Errors
    ///
    /// Message 1 is garbage.
    pub fn answer(
        secret: &HostSecret,
        rng: &mut Rng,
        prologue: &[u8],
        message_1: &[u8],
        mine: &Introduction,
    ) -> Result<(Self, Vec<u8>), HandshakeError> {
        let mut state = noise_xx(secret, rng, prologue, false)?;
        state.read_message(message_1, &mut [])?;
        let mut message_2 = alloc::vec![0; MESSAGE_MAX];
        let len = state.write_message(&mine.encode(), &mut message_2)?;
        message_2.truncate(len);
        Ok((Self(state), message_2))
    }

    /// Reads message 3: the peer's key, what it says, and the keys. Garbage leaves the handshake as it was.
    ///
    /// # Errors
    ///
    /// Message 3 is garbage or belongs to another session.
    pub fn finish(&mut self, message_3: &[u8]) -> Result<(HostPublic, Introduction, Keys), HandshakeError> {
        let mut payload = alloc::vec![0; MESSAGE_MAX];
        let len = self.0.read_message(message_3, &mut payload)?;
        let theirs = Introduction::decode(payload.get(..len).ok_or(HandshakeError)?)?;
        let keys = Keys::of(&mut self.0);
        Ok((peer_of(&self.0)?, theirs, keys))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction(n: u8) -> Introduction {
        let certificate = alloc::vec![n; 40];
        Introduction { epoch: n.into(), boot_id: [n; 16], assoc_id: 7, tag_key: [n; 32], certificate }
    }

    fn secrets() -> (HostSecret, HostSecret) {
        let mut rng = Rng::new([9; 32]);
        (HostSecret::generate(&mut rng), HostSecret::generate(&mut rng))
    }

    #[test]
    fn both_learn_who_the_other_is_and_hold_one_key() {
        let (alice, bob) = secrets();
        let (initiator, message_1) = Initiator::start(&alice, &mut Rng::new([1; 32]), b"p");
        assert_eq!(message_1, Initiator::start(&alice, &mut Rng::new([1; 32]), b"p").1, "made again from its seed");
        let answer = Responder::answer(&bob, &mut Rng::new([2; 32]), b"p", &message_1, &introduction(2));
        let (mut responder, message_2) = answer.expect("message 1 is whole");
        let (peer, theirs, message_3, keys) =
            initiator.finish(&message_2, &introduction(1)).expect("message 2 is whole");
        assert_eq!((peer, theirs), (bob.public(), introduction(2)));
        let mut garbage = message_3.clone();
        garbage[5] ^= 1;
        assert!(responder.finish(&garbage).is_err());
        let (peer, theirs, same) = responder.finish(&message_3).expect("garbage did not use it up");
        assert_eq!((peer, theirs), (alice.public(), introduction(1)));
        assert_eq!(keys.root, same.root);
    }

    /// Curve25519 of somebody who says that zero is its static key, and so knows every result of Diffie-Hellman with
    /// it.
    struct NoKey {
        ephemeral: KnownDh,
        is_static: bool,
    }

    impl Dh for NoKey {
        fn name(&self) -> &'static str {
            "25519"
        }

        fn pub_len(&self) -> usize {
            32
        }

        fn priv_len(&self) -> usize {
            32
        }

        fn set(&mut self, _: &[u8]) {
            self.is_static = true;
        }

        fn generate(&mut self, rng: &mut dyn Random) -> Result<(), snow::Error> {
            self.ephemeral.generate(rng)
        }

        fn pubkey(&self) -> &[u8] {
            if self.is_static { &[0; 32] } else { self.ephemeral.pubkey() }
        }

        fn privkey(&self) -> &[u8] {
            self.ephemeral.privkey()
        }

        fn dh(&self, public: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
            if self.is_static {
                out[..32].fill(0);
                return Ok(());
            }
            self.ephemeral.dh(public, out)
        }
    }

    struct NoKeys(Seeded);

    impl CryptoResolver for NoKeys {
        fn resolve_rng(&self) -> Option<Box<dyn Random>> {
            self.0.resolve_rng()
        }

        fn resolve_dh(&self, _: &DHChoice) -> Option<Box<dyn Dh>> {
            let ephemeral = KnownDh { known: self.0.secret.clone(), private: Zeroizing::default(), public: [0; 32] };
            Some(Box::new(NoKey { ephemeral, is_static: false }))
        }

        fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
            self.0.resolve_hash(choice)
        }

        fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
            self.0.resolve_cipher(choice)
        }
    }

    fn without_key() -> snow::Builder<'static> {
        let seeded = Seeded { seed: [3; 32], secret: secrets().0 };
        let builder = snow::Builder::with_resolver(PATTERN.parse().expect("the pattern"), Box::new(NoKeys(seeded)));
        builder.local_private_key(&[1; 32]).and_then(|builder| builder.prologue(b"p")).expect("both are new")
    }

    #[test]
    fn a_host_whose_key_is_zero_proves_nothing() {
        let (_, honest) = secrets();
        let mut message = [0; MESSAGE_MAX];
        let (initiator, message_1) = Initiator::start(&honest, &mut Rng::new([1; 32]), b"p");
        let mut hostile = without_key().build_responder().expect("built");
        hostile.read_message(&message_1, &mut []).expect("it is whole");
        let len = hostile.write_message(&introduction(2).encode(), &mut message).expect("room");
        assert!(initiator.finish(&message[..len], &introduction(1)).is_err(), "as responder");

        let mut hostile = without_key().build_initiator().expect("built");
        let len = hostile.write_message(&[], &mut message).expect("room");
        let answer =
            |message_1: &[u8]| Responder::answer(&honest, &mut Rng::new([2; 32]), b"p", message_1, &introduction(2));
        let (mut responder, message_2) = answer(&message[..len]).expect("message 1 is whole");
        hostile.read_message(&message_2, &mut [0; MESSAGE_MAX]).expect("it is whole");
        let len = hostile.write_message(&introduction(1).encode(), &mut message).expect("room");
        assert!(responder.finish(&message[..len]).is_err(), "as initiator");

        assert!(answer(&[0; 32]).is_err(), "an ephemeral key of low order");
    }

    #[test]
    fn another_session_or_any_flipped_bit_fails() {
        let (alice, bob) = secrets();
        let (_, message_1) = Initiator::start(&alice, &mut Rng::new([1; 32]), b"p");
        let answer =
            |prologue: &[u8]| Responder::answer(&bob, &mut Rng::new([2; 32]), prologue, &message_1, &introduction(2));
        let (_, other) = answer(b"q").expect("message 1 proves nothing");
        let finish = |message_2: &[u8]| {
            Initiator::start(&alice, &mut Rng::new([1; 32]), b"p").0.finish(message_2, &introduction(1)).is_ok()
        };
        assert!(!finish(&other));
        let (_, good) = answer(b"p").expect("message 1 is whole");
        assert!(finish(&good));
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            assert!(!finish(&bad), "byte {at}");
        }
        assert!(!finish(&[]));
    }
}
