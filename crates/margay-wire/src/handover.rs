//! HANDOVER: a session goes on at another host (DESIGN §10).

use core::net::SocketAddr;

use crate::address::{emit_ip, parse_socket};
use crate::header::Error;

/// Bytes of HANDOVER's value.
pub(crate) const HANDOVER_LEN: usize = 52;

mod field {
    use core::ops::Range;

    pub const TICKET: Range<usize> = 0..16;
    pub const HOST: Range<usize> = 16..32;
    pub const ADDRESS: Range<usize> = 32..48;
    pub const PORT: Range<usize> = 48..50;
}

/// HANDOVER: which hand-over a message is of, and with whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandoverRepr {
    /// Names the hand-over. Its giver has drawn it at random.
    pub ticket: [u8; 16],
    /// Host-ID of the taker; in a SYN, of the giver.
    pub host: [u8; 16],
    /// In a request to the initiator, where the taker hears SAL; otherwise unspecified, port 0.
    pub address: SocketAddr,
}

impl HandoverRepr {
    pub(crate) fn parse(value: &[u8]) -> Result<Self, Error> {
        let value: &[u8; HANDOVER_LEN] = value.try_into().map_err(|_| Error)?;
        let sixteen = |range: core::ops::Range<usize>| value[range].try_into().map_err(|_| Error);
        Ok(Self {
            ticket: sixteen(field::TICKET)?,
            host: sixteen(field::HOST)?,
            address: parse_socket(&value[field::ADDRESS], &value[field::PORT]),
        })
    }

    pub(crate) fn emit(&self, value: &mut [u8]) {
        value[field::TICKET].copy_from_slice(&self.ticket);
        value[field::HOST].copy_from_slice(&self.host);
        emit_ip(self.address.ip(), &mut value[field::ADDRESS]);
        value[field::PORT].copy_from_slice(&self.address.port().to_be_bytes());
    }
}
