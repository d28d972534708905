//! Ciphers of sealed flows, and their keys.

use core::fmt;

use margay_wire::{
    STACK_SECURE_AES, STACK_SECURE_CHACHA, STACK_SECURE_FEC_AES, STACK_SECURE_FEC_CHACHA, STACK_SECURE_SCTP_AES,
    STACK_SECURE_SCTP_CHACHA,
};

/// How chunks are sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cipher {
    /// Where the processors of both ends have instructions for it.
    Aes256Gcm,
    /// Everywhere.
    ChaCha20Poly1305,
}

impl Cipher {
    /// The number that DATA and STACK carry.
    pub const fn stack(self) -> u8 {
        match self {
            Self::Aes256Gcm => STACK_SECURE_AES,
            Self::ChaCha20Poly1305 => STACK_SECURE_CHACHA,
        }
    }

    /// The number that DATA and CHANGE carry where what goes by `fec` is sealed with it.
    pub const fn fec_stack(self) -> u8 {
        match self {
            Self::Aes256Gcm => STACK_SECURE_FEC_AES,
            Self::ChaCha20Poly1305 => STACK_SECURE_FEC_CHACHA,
        }
    }

    /// The number that DATA and CHANGE carry where what goes by `sctp` is sealed with it.
    pub const fn sctp_stack(self) -> u8 {
        match self {
            Self::Aes256Gcm => STACK_SECURE_SCTP_AES,
            Self::ChaCha20Poly1305 => STACK_SECURE_SCTP_CHACHA,
        }
    }

    /// Its bit among CAPABILITIES.
    pub const fn bit(self) -> u32 {
        1 << self.stack()
    }

    /// The bit among CAPABILITIES of `fec` that is sealed with it.
    pub const fn fec_bit(self) -> u32 {
        1 << self.fec_stack()
    }

    /// The bit among CAPABILITIES of `sctp` that is sealed with it.
    pub const fn sctp_bit(self) -> u32 {
        1 << self.sctp_stack()
    }

    /// The cipher of this number, if it is one.
    pub const fn of_stack(stack: u8) -> Option<Self> {
        match stack {
            STACK_SECURE_AES => Some(Self::Aes256Gcm),
            STACK_SECURE_CHACHA => Some(Self::ChaCha20Poly1305),
            _ => None,
        }
    }

    /// The cipher with which what is of this stack is sealed, whether it goes by `fec` or `sctp` inside or not.
    pub const fn sealing(stack: u8) -> Option<Self> {
        match stack {
            STACK_SECURE_FEC_AES | STACK_SECURE_SCTP_AES => Some(Self::Aes256Gcm),
            STACK_SECURE_FEC_CHACHA | STACK_SECURE_SCTP_CHACHA => Some(Self::ChaCha20Poly1305),
            _ => Self::of_stack(stack),
        }
    }

    /// The better one of those that `stacks` has.
    pub(crate) const fn best(stacks: u32) -> Option<Self> {
        match stacks {
            _ if stacks & Self::Aes256Gcm.bit() != 0 => Some(Self::Aes256Gcm),
            _ if stacks & Self::ChaCha20Poly1305.bit() != 0 => Some(Self::ChaCha20Poly1305),
            _ => None,
        }
    }
}

/// What a flow cache needs to seal and to open one flow. Never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SealKeys {
    /// Both directions have the same.
    pub cipher: Cipher,
    /// From which the keys derive under which this end seals.
    pub send: [u8; 32],
    /// From which the keys derive under which the peer seals.
    pub open: [u8; 32],
    /// The flags byte of what this end seals.
    pub send_epochs: u8,
    /// The flags byte of what the peer seals.
    pub open_epochs: u8,
}

impl fmt::Debug for SealKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealKeys").field("cipher", &self.cipher).finish_non_exhaustive()
    }
}
