//! SPLICE and CUT: a program between two connections leaves, and they become one (docs/decisions/0088; Dysco, section
//! 3).

use crate::header::{Error, SessionId};

/// Bytes of SPLICE's value.
pub const SPLICE_LEN: usize = 96;
/// Bytes of CUT's value.
pub(crate) const CUT_LEN: usize = 8;
/// Largest window scale (RFC 7323 §2.3).
const SCALE_MAX: u8 = 14;
/// Bits of the flags of one connection's numbers.
const HAS_TIMESTAMP: u8 = 1;
const HAS_SACK: u8 = 2;
/// Bits of CUT's flags.
const IS_CLOSED: u8 = 1;
const HAS_HEARD: u8 = 2;

mod field {
    use core::ops::Range;

    pub const HOST: Range<usize> = 0..16;
    pub const SESSION: Range<usize> = 16..32;
    pub const SERVICE: Range<usize> = 32..64;
    pub const LEFT: Range<usize> = 64..80;
    pub const RIGHT: Range<usize> = 80..96;
    pub const UNREAD: Range<usize> = 0..4;
    pub const WRITTEN: Range<usize> = 4..8;
    pub const TIMESTAMP: Range<usize> = 8..12;
    pub const PEER_SCALE: usize = 12;
    pub const OWN_SCALE: usize = 13;
    pub const SOCKET_FLAGS: usize = 14;
    pub const NUMBER: Range<usize> = 0..4;
    pub const CUT_FLAGS: usize = 4;
}

fn number(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

/// One of the two connections of a program that leaves, as its TCP has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpliceSocketRepr {
    /// Number of the first byte of the peer's that the program has not read.
    pub unread: u32,
    /// Number of the first byte that the program has not written.
    pub written: u32,
    /// The clock of its timestamps, in milliseconds; `None` where the connection has none.
    pub timestamp: Option<u32>,
    /// Window scale of what the peer says.
    pub peer_scale: u8,
    /// Window scale of what this end says.
    pub own_scale: u8,
    /// Both ends take selective acknowledgements.
    pub has_sack: bool,
}

impl SpliceSocketRepr {
    fn parse(value: &[u8]) -> Result<Self, Error> {
        let flags = value[field::SOCKET_FLAGS];
        let [peer_scale, own_scale] = [value[field::PEER_SCALE], value[field::OWN_SCALE]];
        if peer_scale > SCALE_MAX || own_scale > SCALE_MAX {
            return Err(Error);
        }
        Ok(Self {
            unread: number(&value[field::UNREAD]),
            written: number(&value[field::WRITTEN]),
            timestamp: (flags & HAS_TIMESTAMP != 0).then(|| number(&value[field::TIMESTAMP])),
            peer_scale,
            own_scale,
            has_sack: flags & HAS_SACK != 0,
        })
    }

    fn emit(&self, value: &mut [u8]) {
        value[field::UNREAD].copy_from_slice(&self.unread.to_be_bytes());
        value[field::WRITTEN].copy_from_slice(&self.written.to_be_bytes());
        value[field::TIMESTAMP].copy_from_slice(&self.timestamp.unwrap_or(0).to_be_bytes());
        value[field::PEER_SCALE] = self.peer_scale;
        value[field::OWN_SCALE] = self.own_scale;
        let has_timestamp = if self.timestamp.is_some() { HAS_TIMESTAMP } else { 0 };
        value[field::SOCKET_FLAGS] = has_timestamp | if self.has_sack { HAS_SACK } else { 0 };
    }
}

/// SPLICE: what the host of a program that leaves says of its two connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpliceRepr {
    /// Host-ID of the end that is not the receiver.
    pub host: [u8; 16],
    /// The left session, whose number the one session keeps.
    pub session: SessionId,
    /// The name that the right session is to.
    pub service: [u8; 32],
    /// The connection that the program has accepted.
    pub left: SpliceSocketRepr,
    /// The one that it has opened.
    pub right: SpliceSocketRepr,
}

impl SpliceRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; SPLICE_LEN] = value.try_into().map_err(|_| Error)?;
        Ok(Self {
            host: value[field::HOST].try_into().map_err(|_| Error)?,
            session: SessionId(value[field::SESSION].try_into().map_err(|_| Error)?),
            service: value[field::SERVICE].try_into().map_err(|_| Error)?,
            left: SpliceSocketRepr::parse(&value[field::LEFT])?,
            right: SpliceSocketRepr::parse(&value[field::RIGHT])?,
        })
    }

    /// The value: what is signed of it where others pass it on.
    pub fn to_bytes(&self) -> [u8; SPLICE_LEN] {
        let mut value = [0; SPLICE_LEN];
        self.emit(&mut value);
        value
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::HOST].copy_from_slice(&self.host);
        value[field::SESSION].copy_from_slice(&self.session.0);
        value[field::SERVICE].copy_from_slice(&self.service);
        self.left.emit(&mut value[field::LEFT]);
        self.right.emit(&mut value[field::RIGHT]);
    }
}

/// CUT: what of the sender's goes by the old way, and what by the new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutRepr {
    /// What the sender's program sends goes by the new way from this number on, in numbers of the left session.
    pub number: u32,
    /// The sender's program has closed before that: its FIN has gone by the old way.
    pub is_closed: bool,
    /// The receiver's cut is known to the sender.
    pub has_heard: bool,
}

impl CutRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; CUT_LEN] = value.try_into().map_err(|_| Error)?;
        let flags = value[field::CUT_FLAGS];
        let is_closed = flags & IS_CLOSED != 0;
        Ok(Self { number: number(&value[field::NUMBER]), is_closed, has_heard: flags & HAS_HEARD != 0 })
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::NUMBER].copy_from_slice(&self.number.to_be_bytes());
        let closed = if self.is_closed { IS_CLOSED } else { 0 };
        value[field::CUT_FLAGS] = closed | if self.has_heard { HAS_HEARD } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_two_connections_is_as_written_in_the_book() {
        let left = SpliceSocketRepr {
            unread: 0x0102_0304,
            written: 5,
            timestamp: Some(6),
            peer_scale: 7,
            own_scale: 14,
            has_sack: true,
        };
        let right = SpliceSocketRepr { timestamp: None, has_sack: false, ..left };
        let repr = SpliceRepr { host: [1; 16], session: SessionId([2; 16]), service: [3; 32], left, right };
        let mut value = repr.to_bytes();
        assert_eq!(value[64..80], [1, 2, 3, 4, 0, 0, 0, 5, 0, 0, 0, 6, 7, 14, 3, 0]);
        assert_eq!(value[88..], [0, 0, 0, 0, 7, 14, 0, 0]);
        assert_eq!(SpliceRepr::parse(&value), Ok(repr));
        value[77] = 15;
        assert_eq!(SpliceRepr::parse(&value), Err(Error), "no window scale");
        assert_eq!(SpliceRepr::parse(&value[..95]), Err(Error));
    }

    #[test]
    fn a_cut_is_as_written_in_the_book() {
        let repr = CutRepr { number: 0xffff_fffe, is_closed: true, has_heard: false };
        let mut value = [0; CUT_LEN];
        repr.emit(&mut value);
        assert_eq!(value, [0xff, 0xff, 0xff, 0xfe, 1, 0, 0, 0]);
        assert_eq!(CutRepr::parse(&value), Ok(repr));
        assert_eq!(CutRepr::parse(&value[..7]), Err(Error));
    }
}
