//! What the core tells a flow cache: paths, entries, and why they go (DESIGN §3.2, §7).
//!
//! Misses go up to [`Sal::handle_app_packet`](crate::Sal::handle_app_packet) and
//! [`Sal::handle_datagram`](crate::Sal::handle_datagram); entries come down as [`EntryUpdate`]s. A cache may forget any
//! entry at any time: the next packet misses and brings it back.

use alloc::boxed::Box;
use core::fmt;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{ArrivalsRepr, FlowId, GRANT_FLOWS_MAX, PLACES_MAX, Sharing};

use crate::leg::delta::Delta;
use crate::leg::loss::Loss;
use crate::leg::seal::SealKeys;
use crate::leg::stack::{PlaceStack, Stacks};
use crate::types::fair_table::Peer;
use crate::types::role::Role;
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// Index of a path record. Flows name the path, never the address, so that one swap moves them all (DESIGN §7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PathId(pub u32);

/// Where the packets of an association go now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Which record this is.
    pub id: PathId,
    /// The peer's UDP address.
    pub remote: SocketAddr,
    /// The local address to send from, where the choice matters.
    pub local: Option<IpAddr>,
    /// Largest UDP payload, in bytes, that fits both ends' links.
    pub datagram_max: u16,
    /// What may pass.
    pub passage: Passage,
    /// Whether direct flows name this record. Of several between the same addresses, with one peer, one does.
    pub wired: bool,
    /// Where the peer says that it is now: its data is taken from there already, though nothing is sent there yet.
    pub expected: Option<SocketAddr>,
    /// Whether direct packets that come by it are to be told of: the peer waits to hear of them.
    pub watched: bool,
    /// Whom what waits of the flows counts for.
    pub peer: Peer,
}

/// What may pass between the addresses of a path (docs/decisions/0018).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Passage {
    /// Whatever the flows' entries say.
    #[default]
    Open,
    /// Everything goes encapsulated: no direct packet has come by these addresses yet.
    Held,
    /// Nothing: no place is known where the peer could be reached. Packets are taken and not sent.
    Void,
}

/// How a flow's packets look between the hosts when they go direct: real addresses (the path's) and flow ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wire {
    /// The record of the address pair; flows of several associations with one peer share it.
    pub path: PathId,
    /// This end's flow port.
    pub local_port: u16,
    /// The peer's.
    pub remote_port: u16,
    /// Whether this end sends direct. If not, and for what the cache cannot send direct, packets are encapsulated.
    pub sending: bool,
    /// Whether the peer sends direct, or may from its first packet on, and everything encapsulated before has passed.
    pub accepting: bool,
    /// Whether the program's TCP has had a packet of the peer's, so that those that are direct may go straight to it.
    /// If not, they come up as misses: see [`Sal::handle_app_packet`](crate::machine::sal::Sal::handle_app_packet).
    pub begun: bool,
}

impl Wire {
    /// Whether direct packets go straight to the application. If not, they come up as misses.
    pub const fn takes(&self) -> bool {
        self.accepting && self.begun
    }
}

/// How the flow cache carries one established flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// This host's identifier of the flow: what DATA from the peer names as destination.
    pub flow: FlowId,
    /// Rises with every change of the flow; an older update never replaces a newer one.
    pub generation: u32,
    /// The application's five-tuple. Ingress packets are given [`Tuple::reversed`] of it.
    pub app: Tuple,
    /// The peer's identifier of the flow: what our DATA names as destination.
    pub peer_flow: FlowId,
    /// The association's path record.
    pub path: PathId,
    /// The direct path, where both ends have agreed on flow ports.
    pub wire: Option<Wire>,
    /// What its DATA is sealed with, where any of it is sent or taken sealed.
    pub seal: Option<SealKeys>,
    /// By which stack it is sent, and what is taken. Nothing else of it is.
    pub stacks: Stacks,
    /// The pairs of addresses that it goes by at once, where it is striped.
    pub stripe: Option<Places>,
    /// What its application sends comes to the core, as if there were no entry: its session is on its way to another
    /// host, or it is not sealed yet where it must be. What comes of the peer's is taken. Where its stack becomes
    /// another meanwhile, there is no last packet of the one before: nothing of it has been sent by this path. Where
    /// its stack becomes another as the hold ends, there is one, and what is sent from then on is of the new stack,
    /// also what overtakes that packet.
    pub is_held: bool,
    /// No program has the flow but a middlebox: what is sent was forwarded by it, and everything else comes to the
    /// core. The middlebox sees the peer's packets come by `sal0`: none is rewritten in place on the card.
    pub at_middlebox: bool,
    /// Its packets come from a socket of this host that has a source name: what comes from outside of the host with its
    /// five-tuple comes to the core.
    pub is_of_named_socket: bool,
    /// Which of its packets the cache carries.
    pub directions: Directions,
    /// What its numbers on the wire, direct or encapsulated, differ by from those of the application's TCP. The cache
    /// carries it once [`Delta::is_settled`] holds; until then the core has [`Directions::Neither`] here.
    pub delta: Option<Delta>,
}

/// Which packets of a flow pass. A session that comes to go through other boxes has two flows of one five-tuple at each
/// end, and each direction goes over from one to the other by itself (docs/decisions/0080).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Directions {
    /// All.
    #[default]
    Both,
    /// What the application sends. What comes of the peer's is the core's, as if there were no entry.
    Egress,
    /// What comes of the peer's. What the application sends goes by another flow of the same five-tuple.
    Ingress,
    /// None: the cache has no entry.
    Neither,
    /// All come to the core, those of the peer's opened, and with the addresses of the application's connection: see
    /// [`Input::Parted`](crate::Input::Parted). The core says what is carried:
    /// [`Output::Carry`](crate::output::Output::Carry).
    Parted,
    /// The same of the other flow of the same five-tuple.
    PartedAside,
}

impl Directions {
    /// Whether what the application sends is of this flow.
    pub const fn has_egress(self) -> bool {
        matches!(self, Self::Both | Self::Egress | Self::Parted)
    }

    /// Whether the cache carries what the application sends by this flow, without being told.
    pub const fn carries_egress(self) -> bool {
        matches!(self, Self::Both | Self::Egress)
    }

    /// Whether what comes of the peer's is given to the core.
    pub const fn gives_up(self) -> bool {
        matches!(self, Self::Parted | Self::PartedAside)
    }

    /// Whether the cache takes what comes of the peer's.
    pub const fn has_ingress(self) -> bool {
        matches!(self, Self::Both | Self::Ingress)
    }
}

/// The pairs of addresses of a striped flow, and what goes by which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// How what is sent is shared out.
    pub sharing: Sharing,
    /// The peer sends by two places at once: what has come already is dropped.
    pub takes_copies: bool,
    /// At each index the place that both ends give this number.
    pub places: [Option<Place>; PLACES_MAX],
}

impl Places {
    /// By number; 0 where there is none.
    pub fn weights(&self) -> [u8; PLACES_MAX] {
        self.places.map(|place| place.map_or(0, |place| place.weight))
    }
}

/// A pair of addresses of a striped flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its path record.
    pub path: PathId,
    /// The peer has answered by it: data may go there. What comes by it is taken in any case.
    pub may_send: bool,
    /// How often it has its turn, where turns go by weights.
    pub weight: u8,
    /// What is sent by it otherwise than by other places. Plain: it goes as it is, though the flow is sealed, with the
    /// seal's numbers, one for each chunk (docs/decisions/0097); where none of the places works, what goes by the pair
    /// of all flows is sealed. `fec`: it is followed by repairs, made of datagrams as they went (docs/decisions/0095).
    pub sends: Option<PlaceStack>,
    /// What is taken so. Plain: what comes as it is, though the flow is sealed. `fec`: repairs, and what they bring
    /// back, as if it had come by this place; nothing is given twice.
    pub takes: Option<PlaceStack>,
}

/// Flows that the kernel's flow cache may open by itself (docs/decisions/0035).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// This host's number of the grant; never zero.
    pub id: FlowId,
    /// An initiator's programs connect, a responder's are connected to.
    pub role: Role,
    /// Of an initiator: the destination is where programs here connect to; the source says nothing. Of a responder: as
    /// the listener's packets carry it, but for the client's port.
    pub app: Tuple,
    /// The record of the address pair.
    pub path: PathId,
    /// This end's flow port: of an initiator that of flow 0, rising by one with each flow; of a responder that of all.
    pub local_port: u16,
    /// The peer's, the other way round.
    pub remote_port: u16,
    /// This host's number of flow 0.
    pub first_flow: FlowId,
    /// How many there are, at most [`GRANT_FLOWS_MAX`].
    pub count: u16,
    /// None is opened after that.
    pub until: Instant,
    /// Of a responder: the client's port that its listener sees, by flow.
    pub ports: [u16; GRANT_FLOWS_MAX as usize],
    /// Under which the SYNs of its flows are tagged.
    pub key: GrantKey,
    /// By which the next start of the agent takes up what this one has not been told of; the cache keeps it beside the
    /// grant.
    pub record: [u8; GRANT_RECORD_LEN],
}

/// A key of SipHash-2-4, of one grant: both ends derive it, and nobody sends it. Never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct GrantKey(pub [u8; 16]);

impl GrantKey {
    /// Of a grant that is over.
    pub const NONE: Self = Self([0; 16]);
}

impl fmt::Debug for GrantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GrantKey(..)")
    }
}

/// What has become of flows of a grant, by flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Opened, and answered by the other end.
    pub answered: u128,
    /// Of these, those that are over, without anybody having been told of them: both ends have closed, and each has
    /// acknowledged all of the other's.
    pub over: u128,
}

/// Bytes of [`Grant::record`].
pub const GRANT_RECORD_LEN: usize = 80;

/// What is heard of the places of a striped flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StripeNews {
    /// The peer has answered by this place.
    Alive {
        /// Which.
        place: usize,
        /// The round trip.
        rtt: Duration,
    },
    /// A place is another pair now, or none.
    Gone(usize),
    /// What the peer has received.
    Arrivals(ArrivalsRepr),
}

/// What a flow has carried. Bytes are those after the transport header; a super-packet counts as its segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCounters {
    /// From the application to the peer.
    pub egress_bytes: u64,
    /// From the application to the peer.
    pub egress_segments: u64,
    /// From the peer to the application.
    pub ingress_bytes: u64,
    /// From the peer to the application.
    pub ingress_segments: u64,
}

impl core::ops::Add for FlowCounters {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            egress_bytes: self.egress_bytes + other.egress_bytes,
            egress_segments: self.egress_segments + other.egress_segments,
            ingress_bytes: self.ingress_bytes + other.ingress_bytes,
            ingress_segments: self.ingress_segments + other.ingress_segments,
        }
    }
}

/// Why an entry left the cache. Numbers are stable: metrics and eBPF maps carry them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RemoveReason {
    /// Both sides closed in order and the linger time is over.
    Closed = 1,
    /// A RST passed.
    Reset = 2,
    /// Nothing passed for the flow's idle time.
    Idle = 3,
    /// The peer said that it does not know the flow, or failed it.
    PeerFailed = 4,
    /// The peer's host restarted: an authenticated newer boot.
    PeerRebooted = 5,
    /// The flow was not proved in time, or its proof was refused.
    Unproved = 6,
    /// The operator closed it.
    Operator = 7,
    /// The instance is drained, and the flow had not ended by the deadline, or goes on at another one.
    Drained = 8,
    /// The peer was silent for too long, and no router lists it; or a flow of datagrams, whose instance has left,
    /// begins anew with another one.
    GivenUp = 9,
    /// It has gone on at another host, or from there.
    HandedOver = 10,
    /// Another host holds the name now, which is fenced.
    Elsewhere = 11,
    /// Its session goes through other boxes now.
    Rechained = 12,
}

impl RemoveReason {
    /// Every reason, by number.
    pub const ALL: [Self; 12] = [
        Self::Closed,
        Self::Reset,
        Self::Idle,
        Self::PeerFailed,
        Self::PeerRebooted,
        Self::Unproved,
        Self::Operator,
        Self::Drained,
        Self::GivenUp,
        Self::HandedOver,
        Self::Elsewhere,
        Self::Rechained,
    ];

    /// The name that lists and metrics carry.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::Idle => "idle",
            Self::PeerFailed => "peer_failed",
            Self::PeerRebooted => "peer_rebooted",
            Self::Unproved => "unproved",
            Self::Operator => "operator",
            Self::Drained => "drained",
            Self::GivenUp => "given_up",
            Self::HandedOver => "handed_over",
            Self::Elsewhere => "elsewhere",
            Self::Rechained => "rechained",
        }
    }
}

/// One change for the flow cache. Apply in the order received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryUpdate {
    /// Add or replace a path record.
    Path(Path),
    /// Forget a path record; no entry names it any more.
    RemovePath(PathId),
    /// Show programs this address in the place of a surrogate, with the same port, until the flow is forgotten. For
    /// datagrams: a connection has its client's address.
    Show {
        /// What the flow's packets come from.
        surrogate: SocketAddr,
        /// The client's real address.
        address: IpAddr,
    },
    /// Add an entry, or replace one of a lower generation.
    Install(Entry),
    /// As [`Install`](Self::Install), of a flow that the kernel's cache has opened by a grant and told of: it has the
    /// entry.
    Opened(Entry),
    /// The numbers of a listener's answer, which went inside a SYN-ACK message and so passed no cache. Where the
    /// client's program has gone meanwhile, the next segment is a RST, which could not be judged without these numbers
    /// (RFC 5961 §3.2).
    Begun {
        /// The local identifier of the flow.
        flow: FlowId,
        /// The number after the listener's SYN.
        next: u32,
        /// The number that the listener expects of the client.
        expected: u32,
    },
    /// The program of a session goes by another flow of the session from here on. What its connection has shown of
    /// itself on the way that it leaves, and what still passes there, counts for the way that it takes: numbers, FINs,
    /// and what was acknowledged, all as the program's TCP has them.
    Succession {
        /// The local identifier of the flow that the program leaves.
        from: FlowId,
        /// And of the flow that it goes by. It has an entry.
        to: FlowId,
    },
    /// The kernel's cache may open flows by this.
    Grant(Box<Grant>),
    /// None may be opened by this grant any more. Those that were are as they are.
    StopGrant(FlowId),
    /// This grant is over. Entries of its flows that were never [`Opened`](Self::Opened) go.
    RemoveGrant(FlowId),
    /// News of a striped flow.
    Stripe {
        /// The local identifier of the flow.
        flow: FlowId,
        /// What is new.
        news: StripeNews,
    },
    /// [`Sal::handle_counted`](crate::Sal::handle_counted) is to be told what the cache has counted of a flow by now.
    Count(FlowId),
    /// What is lost of what this end sends of a flow: as much is added to repair it, where the flow goes by `fec`.
    Loss {
        /// The local identifier of the flow.
        flow: FlowId,
        /// What is lost.
        loss: Loss,
    },
    /// Carry nothing of a flow from here on, as if it had no entry, until one is installed again. Whatever belongs to
    /// the flow and its keys stays: numbers, what was opened, what is counted.
    Suspend(FlowId),
    /// Forget an entry, and whatever belongs to its flow, which is over: no entry with the same keys follows.
    Remove {
        /// The local identifier of the flow.
        flow: FlowId,
        /// Why.
        reason: RemoveReason,
    },
}
