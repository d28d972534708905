//! Sealed chunks: the payload of DATA encrypted and authenticated, its header as associated data (docs/decisions/0019).
//!
//! A chunk has a number that no other of its flow and direction ever has: the train's, and its place in the train. The
//! nonce is that number, and the keys last as long as the numbers: both agents' epochs are in them, and whoever forgets
//! the cache keeps this. After so many chunks the key changes by itself, since a key of AES-GCM is not good for any
//! number of bytes.

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use margay_core::time::Instant;
use margay_core::{Cipher, DropReason, SealKeys, Stack};
use margay_wire::{DATA_HEADER_LEN, DataRepr, FENCE, FlowId, SEAL_TAG_LEN, TRAIN_HEADER_LEN, fence_of_change};
use parking_lot::{Mutex, RwLock};
use ring::aead::{AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

/// Chunks under one key, as a power of two: 24 GB in chunks of 1440 bytes, far from where AES-GCM ends (RFC 9001 §6.6).
const PHASE_BITS: u32 = 24;
/// Words of a replay window; one of them is being filled.
const WORDS: usize = 64;
/// Chunks up to the newest that are told apart: nearly a hundred of the longest usual trains.
const SPAN: u64 = (WORDS as u64 - 1) * 64;
/// A flow's strange chunks are spoken of no more often, in microseconds.
const COMPLAIN_US: u64 = 100_000;

/// The ciphers that this host has, for the core to offer.
pub fn ciphers() -> &'static [Cipher] {
    #[cfg(target_arch = "x86_64")]
    let has_aes = std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    let has_aes = std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let has_aes = false;
    if has_aes { &[Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] } else { &[Cipher::ChaCha20Poly1305] }
}

/// The key of one phase of one direction.
struct PhaseKey {
    phase: u64,
    key: LessSafeKey,
}

impl PhaseKey {
    fn new(cipher: Cipher, secret: &[u8; 32], phase: u64) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("margay 2026 seal phase");
        hasher.update(secret).update(&phase.to_be_bytes());
        let algorithm = match cipher {
            Cipher::Aes256Gcm => &AES_256_GCM,
            Cipher::ChaCha20Poly1305 => &CHACHA20_POLY1305,
        };
        let key = UnboundKey::new(algorithm, hasher.finalize().as_bytes());
        // Only a key of another length is refused, and both ciphers take 32 bytes.
        Self { phase, key: LessSafeKey::new(key.expect("32 bytes are a key")) }
    }
}

/// Seals and opens the chunks of one flow.
pub struct Seal {
    keys: SealKeys,
    next: AtomicU64,
    sending: RwLock<PhaseKey>,
    opening: Mutex<Opening>,
    complained_us: AtomicU64,
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seal").field("keys", &self.keys).field("next", &self.next).finish_non_exhaustive()
    }
}

impl PartialEq for Seal {
    fn eq(&self, other: &Self) -> bool {
        core::ptr::eq(self, other)
    }
}

impl Eq for Seal {}

impl Seal {
    /// Numbers begin at zero: there must never be another one with these keys.
    pub fn new(keys: &SealKeys) -> Self {
        let first = |secret| PhaseKey::new(keys.cipher, secret, 0);
        let opening = Opening {
            cipher: keys.cipher,
            secret: keys.open,
            window: Window::default(),
            current: first(&keys.open),
            older: None,
        };
        Self {
            keys: *keys,
            next: AtomicU64::new(0),
            sending: RwLock::new(first(&keys.send)),
            opening: Mutex::new(opening),
            complained_us: AtomicU64::new(0),
        }
    }

    /// Whether it is with these keys.
    pub fn has(&self, keys: &SealKeys) -> bool {
        self.keys == *keys
    }

    /// The stack byte of its chunks: of those of `fec` and of `sctp` others, so that none is taken for one of another
    /// kind. Numbers and keys are the same.
    pub const fn number_of(&self, stack: Stack) -> u8 {
        match stack {
            Stack::Plain | Stack::Secure => self.keys.cipher.stack(),
            Stack::Fec | Stack::SecureFec => self.keys.cipher.fec_stack(),
            Stack::Sctp | Stack::SecureSctp => self.keys.cipher.sctp_stack(),
        }
    }

    /// Numbers, seals and thereby finishes a train: chunks of `stride` bytes, the last may be shorter. Each has room
    /// for its header in front and for its tag at the end.
    ///
    /// # Errors
    ///
    /// The cipher refuses; nothing of the train may be sent then.
    pub fn seal_train(&self, peer_flow: FlowId, train: &mut [u8], stride: usize) -> Result<(), DropReason> {
        self.seal_with(peer_flow, (train, stride), (Stack::Secure, 0))
    }

    /// The same, of datagrams and repairs of `fec`, which are no train: chunks of `stride` bytes all the same.
    ///
    /// # Errors
    ///
    /// The cipher refuses; nothing of them may be sent then.
    pub fn seal_fec(&self, peer_flow: FlowId, datagrams: &mut [u8], stride: usize) -> Result<(), DropReason> {
        self.seal_with(peer_flow, (datagrams, stride), (Stack::SecureFec, 0))
    }

    /// The same, of packets of `sctp`.
    ///
    /// # Errors
    ///
    /// The cipher refuses; nothing of them may be sent then.
    pub fn seal_sctp(&self, peer_flow: FlowId, packets: &mut [u8], stride: usize) -> Result<(), DropReason> {
        self.seal_with(peer_flow, (packets, stride), (Stack::SecureSctp, 0))
    }

    /// The first of as many numbers as a train has chunks that goes as it is, between those that are sealed: by a place
    /// of a striped flow that is plain (docs/decisions/0097). So one order holds for all.
    pub fn take_numbers(&self, count: usize) -> u32 {
        self.next.fetch_add(count as u64, Ordering::Relaxed) as u32
    }

    /// The last packet of a sealed stack, of a flow that turns to another one by this change.
    ///
    /// # Errors
    ///
    /// The cipher refuses.
    pub fn seal_fence(
        &self,
        peer_flow: FlowId,
        stack: Stack,
        change: u32,
    ) -> Result<[u8; DATA_HEADER_LEN + TRAIN_HEADER_LEN + SEAL_TAG_LEN], DropReason> {
        let mut datagram = [0; DATA_HEADER_LEN + TRAIN_HEADER_LEN + SEAL_TAG_LEN];
        datagram[DATA_HEADER_LEN..][..TRAIN_HEADER_LEN].copy_from_slice(&fence_of_change(change));
        let len = datagram.len();
        self.seal_with(peer_flow, (&mut datagram, len), (stack, FENCE)).map(|()| datagram)
    }

    fn seal_with(
        &self,
        peer_flow: FlowId,
        (train, stride): (&mut [u8], usize),
        (stack, flags): (Stack, u8),
    ) -> Result<(), DropReason> {
        let count = train.len().div_ceil(stride);
        let first = self.next.fetch_add(count as u64, Ordering::Relaxed);
        let mut header = DataRepr {
            stack: self.number_of(stack),
            flags: self.keys.send_epochs | flags,
            dst_flow: peer_flow,
            packet_number: first as u32,
            index: 0,
            count: u16::try_from(count).map_err(|_| DropReason::Protocol)?,
        };
        self.with_sending_key(first >> PHASE_BITS, |key| {
            for chunk in train.chunks_mut(stride) {
                let (head, rest) = chunk.split_at_mut_checked(DATA_HEADER_LEN).ok_or(DropReason::Protocol)?;
                header.emit(head);
                let len = rest.len().checked_sub(SEAL_TAG_LEN).ok_or(DropReason::Protocol)?;
                let (payload, place) = rest.split_at_mut(len);
                let nonce = nonce(first + u64::from(header.index));
                let tag = key.seal_in_place_separate_tag(nonce, Aad::from(&*head), payload);
                place.copy_from_slice(tag.map_err(|_| DropReason::Protocol)?.as_ref());
                header.index += 1;
            }
            Ok(())
        })
    }

    fn with_sending_key<R>(&self, phase: u64, act: impl FnOnce(&LessSafeKey) -> R) -> R {
        let current = self.sending.read();
        if current.phase == phase {
            return act(&current.key);
        }
        drop(current);
        let mut current = self.sending.write();
        if current.phase < phase {
            *current = PhaseKey::new(self.keys.cipher, &self.keys.send, phase);
        }
        if current.phase == phase {
            act(&current.key)
        } else {
            // Another thread was quicker into the next phase.
            act(&PhaseKey::new(self.keys.cipher, &self.keys.send, phase).key)
        }
    }

    /// Opens a chunk in place: header, payload, and then what was its tag. `header` is the chunk's own.
    ///
    /// # Errors
    ///
    /// Sealed in other epochs, too short, seen before, or not sealed by the peer for this flow. The payload is of no
    /// use then.
    pub fn open(&self, header: &DataRepr, chunk: &mut [u8]) -> Result<(), DropReason> {
        if header.flags & !FENCE != self.keys.open_epochs {
            return Err(DropReason::OtherEpoch);
        }
        self.opening.lock().open(header, chunk)
    }

    /// Whether it is time to say that chunks come which cannot be opened.
    pub fn may_complain(&self, now: Instant) -> bool {
        let last = self.complained_us.load(Ordering::Relaxed);
        let is_due = last == 0 || now.micros().saturating_sub(last) >= COMPLAIN_US;
        is_due
            && self
                .complained_us
                .compare_exchange(last, now.micros().max(1), Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

/// What opening needs and remembers.
struct Opening {
    cipher: Cipher,
    secret: [u8; 32],
    window: Window,
    current: PhaseKey,
    /// What is late when a phase ends.
    older: Option<PhaseKey>,
}

impl Opening {
    fn open(&mut self, header: &DataRepr, chunk: &mut [u8]) -> Result<(), DropReason> {
        if chunk.len() < DATA_HEADER_LEN + SEAL_TAG_LEN {
            return Err(DropReason::Malformed);
        }
        let train = whole_number(header.packet_number, self.window.next);
        let number = train.checked_add(u64::from(header.index)).ok_or(DropReason::Malformed)?;
        if !self.window.is_new(number) {
            return Err(DropReason::ReplayedSeal);
        }
        let phase = train >> PHASE_BITS;
        let (head, sealed) = chunk.split_at_mut(DATA_HEADER_LEN);
        let mut open = |key: &LessSafeKey| {
            key.open_in_place(nonce(number), Aad::from(&*head), sealed).map(|_| ()).map_err(|_| DropReason::BadSeal)
        };
        if self.current.phase == phase {
            open(&self.current.key)?;
        } else if let Some(older) = self.older.as_ref().filter(|older| older.phase == phase) {
            open(&older.key)?;
        } else {
            let fresh = PhaseKey::new(self.cipher, &self.secret, phase);
            open(&fresh.key)?;
            // Kept only now that the peer has proved to be there.
            if fresh.phase > self.current.phase {
                self.older = Some(core::mem::replace(&mut self.current, fresh));
            }
        }
        self.window.note(number);
        Ok(())
    }
}

fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[4..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// The number whose low 32 bits are `low`, nearest to the one that is expected next (RFC 9000 A.3).
fn whole_number(low: u32, expected: u64) -> u64 {
    const WINDOW: u64 = 1 << 32;
    let candidate = (expected & !(WINDOW - 1)) | u64::from(low);
    if candidate.checked_add(WINDOW / 2).is_some_and(|end| end <= expected) {
        candidate.checked_add(WINDOW).unwrap_or(candidate)
    } else if candidate > expected.saturating_add(WINDOW / 2) && candidate >= WINDOW {
        candidate - WINDOW
    } else {
        candidate
    }
}

/// Which numbers have been opened: the newest ones, in a ring of words (RFC 6479).
struct Window {
    /// One more than the greatest.
    next: u64,
    words: [u64; WORDS],
}

impl Default for Window {
    fn default() -> Self {
        Self { next: 0, words: [0; WORDS] }
    }
}

impl Window {
    const fn place(number: u64) -> (usize, u64) {
        ((number / 64) as usize % WORDS, 1 << (number % 64))
    }

    fn is_new(&self, number: u64) -> bool {
        let (word, bit) = Self::place(number);
        number >= self.next || (self.next - number <= SPAN && self.words[word] & bit == 0)
    }

    fn note(&mut self, number: u64) {
        if number >= self.next {
            let (top, new_top) = (self.next.saturating_sub(1) / 64, number / 64);
            for ahead in 1..=(new_top - top).min(WORDS as u64) {
                self.words[(top + ahead) as usize % WORDS] = 0;
            }
            self.next = number.saturating_add(1);
        }
        let (word, bit) = Self::place(number);
        self.words[word] |= bit;
    }
}

#[cfg(test)]
#[path = "seal_test.rs"]
mod test;
