//! Messages before they are written, and where answers to them go.

use alloc::vec::Vec;
use core::net::SocketAddr;

use margay_wire::{AuthRepr, Extension, Flags, FlowId, Kind, Message, MessageWriter, NextProtocol, ResolvableRepr};

use crate::association::{Association, auth};
use crate::types::hop::HOP_LIMIT;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::tuple::Tuple;

const SCRATCH_LEN: usize = 65_536;

/// Where answers to a SYN go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub direct: SocketAddr,
    /// The router that relays to the initiator.
    pub via: Option<SocketAddr>,
    /// Only that way: nobody has vouched for the other.
    pub is_detour: bool,
    /// Others were asked, too: a refusal here is nothing that the initiator should hear.
    pub is_copy: bool,
}

impl Reply {
    /// To whoever sent the packet.
    pub fn straight(from: SocketAddr) -> Self {
        Self { direct: from, via: None, is_detour: false, is_copy: false }
    }

    /// The address at which the initiator has shown to be, by an ACK that came straight from `sender` or through a
    /// router. An ACK proves that an answer was received, and answers went to [`Self::direct`]. A NAT may use another
    /// port towards this host than towards the router; another IP address has proved nothing.
    pub fn proved(&self, sender: Option<SocketAddr>) -> Option<SocketAddr> {
        let is_proved = |sender: &SocketAddr| self.is_detour || sender.ip() == self.direct.ip();
        sender.filter(is_proved).or_else(|| (!self.is_detour).then_some(self.direct))
    }
}

/// The address from which a router that has relayed a message got it, as the message says. The tag of the message does
/// not cover that: any sender can name any address, so what it names is proved only if the router itself is known.
pub(crate) fn relayed_from(message: &Message<'_>) -> Option<SocketAddr> {
    message.resolvable.and_then(|resolvable| resolvable.via).filter(|_| message.flags.contains(Flags::RELAY))
}

/// A message before it is written: who, what, and the tag that goes on it.
pub(crate) struct Draft<'a> {
    pub kind: Kind,
    pub flags: Flags,
    pub dst_flow: FlowId,
    pub src_flow: FlowId,
    pub control_seq: u32,
    pub resolvable: Option<ResolvableRepr>,
    pub extensions: &'a [Extension<'a>],
    pub payload: (NextProtocol, &'a [u8]),
    pub pad_to: usize,
}

impl<'a> Draft<'a> {
    pub fn new(kind: Kind, dst_flow: FlowId, src_flow: FlowId) -> Self {
        Self {
            kind,
            flags: Flags::empty(),
            dst_flow,
            src_flow,
            control_seq: 0,
            resolvable: None,
            extensions: &[],
            payload: (NextProtocol::None, &[]),
            pad_to: 0,
        }
    }

    /// The finished datagram; with `auth`, it ends its extensions with that, whose tag is still zero.
    /// `None` when it would not fit: our own messages are bounded, so that is an oversized certificate or packet.
    pub fn write(&self, auth: Option<AuthRepr>) -> Option<Vec<u8>> {
        let mut buf = alloc::vec![0; SCRATCH_LEN.min(2048 + self.payload.1.len())];
        let mut writer = MessageWriter::new(&mut buf, self.kind, self.dst_flow, self.src_flow, self.control_seq);
        writer.flags(self.flags);
        if let Some(resolvable) = &self.resolvable {
            writer.resolvable(resolvable).ok()?;
        }
        for extension in self.extensions {
            writer.extension(extension).ok()?;
        }
        if let Some(auth) = auth {
            writer.extension(&Extension::Auth(auth)).ok()?;
        }
        writer.payload(self.payload.0, self.payload.1).ok()?;
        if self.pad_to > 0 {
            writer.pad_to(self.pad_to);
        }
        let len = writer.finish().ok()?;
        buf.truncate(len);
        Some(buf)
    }

    /// Written and tagged under `association`.
    pub fn seal(mut self, association: &mut Association, epoch: u32) -> Option<Vec<u8>> {
        self.control_seq = association.next_seq();
        let (assoc_id, receiver_epoch) = (association.remote_id, association.peer_epoch);
        let mut datagram = self.write(Some(AuthRepr { assoc_id, epoch, receiver_epoch, tag: [0; 16] }))?;
        auth::sign(association, &mut datagram).ok()?;
        Some(datagram)
    }
}

/// A SYN that reached a listener here, read and checked for form.
pub(crate) struct Arrival<'a> {
    pub message: &'a Message<'a>,
    pub service: ServiceId,
    /// The port of the service that the session is for.
    pub port: u16,
    pub reply: Reply,
    pub syn_len: usize,
    pub nonce: u64,
    /// The tuple that the flow must have, where that is not free.
    pub app: Option<Tuple>,
}

/// The resolvable part of an answer that a router shall relay to `initiator`.
pub(crate) fn relay_part(initiator: SocketAddr) -> ResolvableRepr {
    ResolvableRepr {
        hop_limit: HOP_LIMIT,
        reply_to: Some(initiator),
        via: None,
        service: [0; 32],
        nonce: 0,
        hop_tag: [0; 8],
    }
}

/// The same to a peer that may have left `last`, where it was last: a router that knows the host sends to where it is
/// now. For what is tagged under an association alone; a claim of a host-ID leads nobody's answers to that host.
pub(crate) fn relay_to_host(host: HostId, last: SocketAddr) -> ResolvableRepr {
    ResolvableRepr { service: ServiceId::at_host(host, 0).0, ..relay_part(last) }
}
