//! HANDOVER: a session goes on at another host (DESIGN §10).

use core::net::SocketAddr;

use crate::address::{emit_ip, parse_socket};
use crate::header::Error;

/// Bytes of HANDOVER's value.
pub(crate) const HANDOVER_LEN: usize = 68;

mod field {
    use core::ops::Range;

    pub const TICKET: Range<usize> = 0..16;
    pub const GIVER: Range<usize> = 16..32;
    pub const TAKER: Range<usize> = 32..48;
    pub const ADDRESS: Range<usize> = 48..64;
    pub const PORT: Range<usize> = 64..66;
}

/// HANDOVER: which hand-over a message is of, and with whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandoverRepr {
    /// Names the hand-over. Its giver has drawn it at random. It entitles to nothing: whoever is on the path reads it.
    pub ticket: [u8; 16],
    /// Host-ID of the host that has the connection.
    pub giver: [u8; 16],
    /// Host-ID of the host that takes it over.
    pub taker: [u8; 16],
    /// In a request to the initiator, where the taker hears SAL; otherwise unspecified, port 0.
    pub address: SocketAddr,
}

impl HandoverRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; HANDOVER_LEN] = value.try_into().map_err(|_| Error)?;
        let sixteen = |range: core::ops::Range<usize>| value[range].try_into().map_err(|_| Error);
        Ok(Self {
            ticket: sixteen(field::TICKET)?,
            giver: sixteen(field::GIVER)?,
            taker: sixteen(field::TAKER)?,
            address: parse_socket(&value[field::ADDRESS], &value[field::PORT]),
        })
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::TICKET].copy_from_slice(&self.ticket);
        value[field::GIVER].copy_from_slice(&self.giver);
        value[field::TAKER].copy_from_slice(&self.taker);
        emit_ip(self.address.ip(), &mut value[field::ADDRESS]);
        value[field::PORT].copy_from_slice(&self.address.port().to_be_bytes());
    }
}
