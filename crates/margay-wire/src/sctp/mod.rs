//! SCTP's data format (RFC 8260 on RFC 9260): what a framed connection carries in DATA ([`Framed`](crate::Framed)).
//!
//! A packet is a row of chunks, each padded to a multiple of four bytes. There is no common header: the flow has ports
//! and integrity, and the datagram its connection's number. There is no INIT either: HELLO and WELCOME bring initial
//! TSNs, streams and windows.
//!
//! ```text
//!  0          1          2          3
//!  type       flags      length
//!  value, length - 4 bytes, then zeros
//! ```
//!
//! I-DATA, SACK and I-FORWARD-TSN are as the RFCs have them. WATERMARK is Margay's own (docs/decisions/0056).

mod chunk;
mod i_data;
mod i_forward_tsn;
mod sack;
mod watermark;
mod writer;

pub use chunk::{Chunk, Chunks};
pub use i_data::{I_DATA_HEADER_LEN, I_DATA_PAYLOAD_MAX, IDataFlags, IDataRepr};
pub use i_forward_tsn::{I_FORWARD_TSN_LEN, IForwardTsn, SKIPPED_LEN, SkippedRepr};
pub use sack::{GAP_BLOCK_LEN, GapBlock, SACK_LEN, Sack};
pub use watermark::{WATERMARK_LEN, WatermarkRepr};
pub use writer::{NoRoom, PacketWriter};

/// Bytes of a chunk before its value.
const CHUNK_HEADER_LEN: usize = 4;

mod kind {
    pub const SACK: u8 = 3;
    /// The highest bits are 00 on purpose: whoever does not know it must not take the I-DATA behind it (RFC 9260, 3.2).
    pub const WATERMARK: u8 = 0x27;
    pub const I_DATA: u8 = 64;
    pub const I_FORWARD_TSN: u8 = 194;
}

mod field {
    use core::ops::Range;

    pub const KIND: usize = 0;
    pub const FLAGS: usize = 1;
    pub const LENGTH: Range<usize> = 2..4;
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

fn half(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u16::from(*byte))
}

/// Writes the four bytes that every chunk starts with; `len` counts them and the value.
fn emit_chunk_header(kind: u8, flags: u8, len: usize, out: &mut [u8]) {
    out[field::KIND] = kind;
    out[field::FLAGS] = flags;
    // Writers check their lengths: nothing that is written is longer than a chunk may be.
    out[field::LENGTH].copy_from_slice(&(len as u16).to_be_bytes());
}

#[cfg(test)]
mod test;
