//! One leg of a flow in its hand-over record; the layout is that of [`handover`](super).

use core::net::{IpAddr, SocketAddr};

use margay_wire::FlowId;

use super::{HandoverError, Reader};
use crate::types::key::HostId;
use crate::types::tuple::Tuple;

pub(super) const LEG_LEN: usize = 68;

/// Where a leg ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum LegKind {
    /// The virtual interface.
    Sal0 = 1,
    /// A network card.
    Nic = 2,
    /// A stack: `encap`, `secure` and the like.
    Stack = 3,
    /// A socket of the agent's own.
    Socket = 4,
}

/// A peer whose association keys a leg needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyReference {
    /// The peer.
    pub host: HostId,
    /// The index of the association at the exporting host; another host uses its own newest one with that peer.
    pub association: u32,
}

/// One end of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leg {
    /// What it is attached to.
    pub kind: LegKind,
    /// Number of the stack, for that kind; else zero.
    pub stack: u8,
    /// The five-tuple, where it has one.
    pub tuple: Option<Tuple>,
    /// The flowID that its packets carry, where they carry one: the peer's.
    pub flow: Option<FlowId>,
    /// Whose keys.
    pub keys: Option<KeyReference>,
}

/// `port`: that of the service, of the leg at `sal0`.
pub(super) fn encode_leg(leg: &Leg, port: u16) -> [u8; LEG_LEN] {
    let mut out = [0; LEG_LEN];
    if leg.kind == LegKind::Sal0 {
        out[64..66].copy_from_slice(&port.to_be_bytes());
    }
    out[0] = leg.kind as u8;
    out[1] = leg.stack;
    out[2] = u8::from(leg.tuple.is_some()) | u8::from(leg.flow.is_some()) << 1 | u8::from(leg.keys.is_some()) << 2;
    let mut socket = |at: usize, address: SocketAddr| {
        let ip = match address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        out[at..at + 16].copy_from_slice(&ip.octets());
        out[at + 16..at + 18].copy_from_slice(&address.port().to_be_bytes());
    };
    if let Some(tuple) = leg.tuple {
        socket(4, tuple.source);
        socket(22, tuple.destination);
        out[3] = tuple.protocol;
    }
    if let Some(flow) = leg.flow {
        out[40..44].copy_from_slice(&flow.0.to_be_bytes());
    }
    if let Some(keys) = leg.keys {
        out[44..60].copy_from_slice(&keys.host.0);
        out[60..64].copy_from_slice(&keys.association.to_be_bytes());
    }
    out
}

pub(super) fn decode_leg(reader: &Reader<'_>, at: usize) -> Result<Leg, HandoverError> {
    let kind = match reader.byte(at)? {
        1 => LegKind::Sal0,
        2 => LegKind::Nic,
        3 => LegKind::Stack,
        4 => LegKind::Socket,
        _ => return Err(HandoverError::Malformed { at }),
    };
    let flags = reader.byte(at + 2)?;
    if flags > 7 {
        return Err(HandoverError::Malformed { at: at + 2 });
    }
    let tuple = if flags & 1 != 0 {
        let (source, destination) = (reader.socket(at + 4)?, reader.socket(at + 22)?);
        Some(Tuple { protocol: reader.byte(at + 3)?, source, destination })
    } else {
        reader.zeros(at + 3, 37)?;
        None
    };
    let flow = if flags & 2 != 0 {
        Some(FlowId(reader.u32(at + 40)?))
    } else {
        reader.zeros(at + 40, 4)?;
        None
    };
    let keys = if flags & 4 != 0 {
        Some(KeyReference { host: HostId(reader.array(at + 44)?), association: reader.u32(at + 60)? })
    } else {
        reader.zeros(at + 44, 20)?;
        None
    };
    let zeros_at = if kind == LegKind::Sal0 { 66 } else { 64 };
    reader.zeros(at + zeros_at, LEG_LEN - zeros_at)?;
    Ok(Leg { kind, stack: reader.byte(at + 1)?, tuple, flow, keys })
}
