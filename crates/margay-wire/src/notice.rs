//! NOTICE: a host says that it serves a name, or does so no longer, to whoever is on its network segment
//! (docs/decisions/0031).
//!
//! ```text
//!  0..4 sender's epoch | 4..8 sequence number | 8..16 until, seconds since 1970
//!  16..18 bits of the prefix | 18 flags | 19 zero | 20..52 prefix | 52..84 host key | 84..148 signature
//! ```

use crate::header::Error;

/// Bytes of NOTICE's value.
pub(crate) const NOTICE_LEN: usize = 148;
/// So many of them are signed; the signature follows.
const SIGNED_LEN: usize = 84;
/// In front of what is signed: no signature for another purpose can be taken for this.
const CONTEXT: &[u8] = b"margay notice 1";
/// Bit of the flags byte.
const WITHDRAWN: u8 = 1;

mod field {
    use core::ops::Range;

    pub const EPOCH: Range<usize> = 0..4;
    pub const SEQUENCE: Range<usize> = 4..8;
    pub const UNTIL: Range<usize> = 8..16;
    pub const BITS: Range<usize> = 16..18;
    pub const FLAGS: usize = 18;
    pub const PREFIX: Range<usize> = 20..52;
    pub const HOST_KEY: Range<usize> = 52..84;
    pub const SIGNATURE: Range<usize> = 84..148;
}

/// Which name, by whom, until when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoticeRepr {
    /// The sender's epoch.
    pub epoch: u32,
    /// With the epoch, which of two notices is the later one.
    pub sequence: u32,
    /// Until when it holds, in seconds since 1970.
    pub until_s: u64,
    /// Length of the prefix, 256 at most.
    pub bits: u16,
    /// The host serves the prefix no longer.
    pub withdrawn: bool,
    /// The name; bits beyond its length are zero.
    pub prefix: [u8; 32],
    /// The sender's public key.
    pub host_key: [u8; 32],
    /// By that key, over all before it and the value of ADDRESSES.
    pub signature: [u8; 64],
}

impl NoticeRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; NOTICE_LEN] = value.try_into().map_err(|_| Error)?;
        let word =
            |range: core::ops::Range<usize>| value[range].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        // Sixteen bits and less of a number are themselves.
        let bits = word(field::BITS) as u16;
        if bits > 256 {
            return Err(Error);
        }
        let (mut prefix, mut host_key, mut signature) = ([0; 32], [0; 32], [0; 64]);
        prefix.copy_from_slice(&value[field::PREFIX]);
        host_key.copy_from_slice(&value[field::HOST_KEY]);
        signature.copy_from_slice(&value[field::SIGNATURE]);
        Ok(Self {
            epoch: word(field::EPOCH) as u32,
            sequence: word(field::SEQUENCE) as u32,
            until_s: word(field::UNTIL),
            bits,
            withdrawn: value[field::FLAGS] & WITHDRAWN != 0,
            prefix,
            host_key,
            signature,
        })
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::EPOCH].copy_from_slice(&self.epoch.to_be_bytes());
        value[field::SEQUENCE].copy_from_slice(&self.sequence.to_be_bytes());
        value[field::UNTIL].copy_from_slice(&self.until_s.to_be_bytes());
        value[field::BITS].copy_from_slice(&self.bits.to_be_bytes());
        value[field::FLAGS] = if self.withdrawn { WITHDRAWN } else { 0 };
        value[field::PREFIX].copy_from_slice(&self.prefix);
        value[field::HOST_KEY].copy_from_slice(&self.host_key);
        value[field::SIGNATURE].copy_from_slice(&self.signature);
    }

    /// What is signed, in front of the value of ADDRESSES.
    pub fn signed_head(&self) -> [u8; CONTEXT.len() + SIGNED_LEN] {
        let (mut value, mut head) = ([0; NOTICE_LEN], [0; CONTEXT.len() + SIGNED_LEN]);
        self.emit(&mut value);
        head[..CONTEXT.len()].copy_from_slice(CONTEXT);
        head[CONTEXT.len()..].copy_from_slice(&value[..SIGNED_LEN]);
        head
    }
}
