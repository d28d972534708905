//! All that a packet needs of its entry, copied, so that no lock is held while it is sent or given on.

use core::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use margay_core::Stack;
use margay_core::delta::{Translation, Translations};
use margay_core::entry::{Entry, PathId, Wire};
use margay_wire::FlowId;

use crate::fec::Fec;
use crate::packet::FlowKey;
use crate::sctp::Sctp;
use crate::seal::Seal;
use crate::striped::Stripe;
use crate::turning::Turn;

/// All that a packet on its way out needs, copied, so that no lock is held while it is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressRoute {
    /// The local flow.
    pub flow: FlowId,
    /// What the DATA header names as destination.
    pub peer_flow: FlowId,
    /// This train's packet number, already counted up; not that of a sealed one.
    pub packet_number: u32,
    /// Where it goes.
    pub to: Destination,
    /// The flow is sent direct: only what the kernel's cache left comes this way.
    pub is_beside: bool,
    /// A pinhole with this packet's numbers is wanted.
    pub wants_pinhole: bool,
    /// It acknowledges a FIN of the peer's.
    pub takes_end: bool,
    /// What its chunks are to be sealed with.
    pub seal: Option<Arc<Seal>>,
    /// Something should have come by now: for how long this connection's data has gone unanswered; zero if that is not
    /// told.
    pub silence: Option<Duration>,
    /// What numbers and repairs its chunks.
    pub fec: Option<Arc<Fec>>,
    /// What sends its chunks again while they are lost.
    pub sctp: Option<Arc<Sctp>>,
    /// It goes by several pairs of addresses; `to` is where it goes while none of them works.
    pub stripe: Option<Arc<Stripe>>,
    /// What its numbers become on the wire.
    pub delta: Option<Translation>,
}

/// Whom packets of the peer are given to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recipient {
    /// The five-tuple that they get.
    pub key: FlowKey,
    /// What their numbers become.
    pub delta: Option<Translation>,
}

impl From<FlowKey> for Recipient {
    fn from(key: FlowKey) -> Self {
        Self { key, delta: None }
    }
}

/// What the kernel's cache is to hold for a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wired {
    /// The application's five-tuple.
    pub app: FlowKey,
    /// Of the entry.
    pub generation: u32,
    /// The direct path.
    pub wire: Wire,
    /// A middlebox has the flow.
    pub at_middlebox: bool,
    /// A socket with a source name has it.
    pub is_of_named_socket: bool,
    /// What becomes of its numbers.
    pub delta: Option<Translations>,
}

impl Wired {
    /// What an entry asks for, where it has a direct path.
    pub(crate) fn of(entry: &Entry) -> Option<Self> {
        let delta = entry.delta.and_then(|delta| delta.translations());
        let Entry { generation, at_middlebox, is_of_named_socket, .. } = *entry;
        let app = entry.app.into();
        entry.wire.map(|wire| Self { app, generation, wire, at_middlebox, is_of_named_socket, delta })
    }
}

/// What a DATA packet is for its flow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IngressRoute {
    /// Whom the packet is given to.
    pub to: Recipient,
    /// It goes to the core instead.
    pub gives_up: bool,
    /// The peer, which sent this flow direct, encapsulates again.
    pub is_back: bool,
    /// This end sends the flow direct.
    pub is_sending: bool,
    /// What its chunks are to be opened with, if they are sealed.
    pub seal: Option<Arc<Seal>>,
    /// What puts its chunks in order, and repairs them.
    pub fec: Option<Arc<Fec>>,
    /// What acknowledges its chunks, and gives each on once.
    pub sctp: Option<Arc<Sctp>>,
    /// The peer turns to another stack: this one, or the one that it is of.
    pub turn: Option<(Arc<Turn>, Stack)>,
    /// It comes by several pairs of addresses: this one, where it is one of those.
    pub stripe: Option<(Arc<Stripe>, Option<usize>)>,
    /// It is not sealed, though its flow is: the place by which it came is plain.
    pub by_plain_place: bool,
    /// It repairs what has gone by the place by which it came.
    pub is_repair: bool,
    /// It answers data that the core was told of, since it went unanswered for long.
    pub ends_silence: bool,
    /// The core still gives on what it has held of this flow.
    pub is_opening: bool,
}

/// Where datagrams of a path go now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The path record.
    pub path: PathId,
    /// The peer's UDP address.
    pub remote: SocketAddr,
    /// The address to send from, where the choice matters.
    pub local: Option<IpAddr>,
    /// Largest UDP payload in bytes.
    pub datagram_max: u16,
    /// Nothing is sent: no place is known where the peer could be reached.
    pub is_void: bool,
}
