//! Sealing as simulated hosts do it: the core's own keys, the header's own rules, and BLAKE3 in the place of ciphers.

use std::collections::HashSet;

use margay_core::{Cipher, SealKeys};
use margay_wire::{DATA_HEADER_LEN, DataRepr, FENCE, SEAL_TAG_LEN, STACK_FEC, STACK_SCTP};

use crate::nonces::Nonces;

/// What a host keeps of a sealed flow, whatever its cache forgets.
pub(crate) struct Seal {
    keys: SealKeys,
    next: u32,
    opened: HashSet<u32>,
    nonces: Nonces,
}

/// Why a chunk is not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another stack, or it was opened before.
    Dropped,
    /// Other epochs, or other keys: the core is to know.
    Strange,
}

impl Seal {
    /// Of a world that notes here what is encrypted in it.
    pub fn new(keys: SealKeys, nonces: Nonces) -> Self {
        Self { keys, next: 0, opened: HashSet::new(), nonces }
    }

    pub fn has(&self, keys: &SealKeys) -> bool {
        self.keys == *keys
    }

    /// The number of a datagram that goes as it is, between those that are sealed.
    pub fn number(&mut self) -> u32 {
        self.next += 1;
        self.next - 1
    }

    /// The datagram, sealed: its header gets stack, epochs and number.
    pub fn seal(&mut self, header: DataRepr, payload: &[u8]) -> Vec<u8> {
        let mut datagram = vec![0; DATA_HEADER_LEN];
        let cipher = self.keys.cipher;
        let stack = match header.stack {
            STACK_FEC => cipher.fec_stack(),
            STACK_SCTP => cipher.sctp_stack(),
            _ => cipher.stack(),
        };
        let flags = self.keys.send_epochs | header.flags & FENCE;
        DataRepr { stack, flags, packet_number: self.next, ..header }.emit(&mut datagram);
        self.nonces.note(&self.keys.send, self.next);
        self.next += 1;
        let sealed = crypt(&self.keys.send, &datagram, payload);
        let tag = tag(&self.keys.send, &datagram, &sealed);
        datagram.extend_from_slice(&sealed);
        datagram.extend_from_slice(&tag);
        datagram
    }

    /// What is in a sealed datagram.
    pub fn open(&mut self, header: &DataRepr, datagram: &[u8]) -> Result<Vec<u8>, Refused> {
        if Cipher::sealing(header.stack) != Some(self.keys.cipher) || self.opened.contains(&header.packet_number) {
            return Err(Refused::Dropped);
        }
        let (head, rest) = datagram.split_at(DATA_HEADER_LEN);
        let (sealed, their_tag) =
            rest.len().checked_sub(SEAL_TAG_LEN).map(|len| rest.split_at(len)).ok_or(Refused::Dropped)?;
        if header.flags & !FENCE != self.keys.open_epochs || tag(&self.keys.open, head, sealed) != *their_tag {
            return Err(Refused::Strange);
        }
        self.opened.insert(header.packet_number);
        Ok(crypt(&self.keys.open, head, sealed))
    }
}

fn tag(key: &[u8; 32], head: &[u8], sealed: &[u8]) -> [u8; SEAL_TAG_LEN] {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(b"tag").update(head).update(sealed);
    let mut tag = [0; SEAL_TAG_LEN];
    hasher.finalize_xof().fill(&mut tag);
    tag
}

fn crypt(key: &[u8; 32], head: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut stream = vec![0; bytes.len()];
    blake3::Hasher::new_keyed(key).update(b"stream").update(head).finalize_xof().fill(&mut stream);
    stream.iter().zip(bytes).map(|(one, other)| one ^ other).collect()
}
