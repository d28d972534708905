//! What the core reports, and the views that it gives of its tables.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::string::String;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{FlowId, SessionId, Sharing};

use crate::act::chain::ChainRecord;
use crate::act::reconfiguration::{Edit, Reconfigured, SpliceOutcome};
use crate::act::stack_change::{StackChange, StackInfo};
use crate::association::location::{Cause, Moved, Moving, Pair, Trouble};
use crate::association::twin::Twin;
use crate::cache::entry::{FlowCounters, Passage, RemoveReason};
use crate::leg::carriage::{Carriage, Why};
use crate::leg::loss::FlowLoss;
use crate::leg::seal::Cipher;
use crate::leg::stack::PlaceStack;
use crate::leg::timing::{FlowTiming, Timing};
use crate::session::give_up::GiveUpCause;
use crate::session::hand_over::HandOver;
use crate::table::RuleId;
use crate::table::lifetime::Expiry;
use crate::types::direction::Direction;
use crate::types::fair_table::Peer;
use crate::types::key::{HostId, HostPublic};
use crate::types::name::{Prefix, ServiceId};
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::Tuple;

/// Events that wait to be polled; when nobody listens the oldest go.
const EVENTS_MAX: usize = 4096;

/// Something that happened. Nothing needs to be done about it; logs, metrics and watchers live on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A flow is established and proved.
    FlowOpened(FlowId),
    /// A flow's record has changed: one side has closed, or its stack is another, or about to be.
    FlowChanged(FlowId),
    /// A change of a flow's stack is over.
    StackChanged {
        /// By this host's number.
        flow: FlowId,
        /// What was wanted, and what has become of it.
        change: StackChange,
    },
    /// A reconfiguration that was ordered here is over.
    Reconfigured {
        /// By which the session's program sends now.
        flow: FlowId,
        /// The session, the same on all its hosts.
        session: SessionId,
        /// What was wanted, and what has become of it.
        change: Reconfigured,
    },
    /// Another host has ordered a reconfiguration of a session of a program here: it waits for its turn, or is refused.
    Ordered {
        /// By which the session's program sends.
        flow: FlowId,
        /// The session.
        session: SessionId,
        /// The host of the session's server, or of one of its boxes.
        by: HostId,
        /// What it has ordered.
        edit: Edit,
        /// Why not; empty: it is to be carried out, which [`Event::Reconfigured`] tells of.
        refused: String,
    },
    /// A flow is over, and lingers for late packets.
    FlowEnded {
        /// By this host's number.
        flow: FlowId,
        /// `Closed`: by both ends; `Reset`: by either.
        reason: RemoveReason,
    },
    /// A flow is gone.
    FlowClosed {
        /// What it was, at its end.
        flow: Box<FlowInfo>,
        /// Why it ended.
        reason: RemoveReason,
        /// What it has carried. The core does not count: whoever keeps the flow cache fills it in.
        carried: FlowCounters,
    },
    /// An application's connect failed before it was established.
    ConnectFailed {
        /// The name.
        service: ServiceId,
        /// The application's five-tuple.
        app: Tuple,
        /// Who is at fault, and what to do.
        why: String,
    },
    /// An association came into being, or was renewed by a full handshake.
    AssociationUp(HostId),
    /// A peer's host has a newer boot; its older flows were reset.
    PeerRebooted(HostId),
    /// A peer and this host find each other at other addresses now.
    Moved {
        /// The peer.
        host: HostId,
        /// Our number of the one flow that moved; zero: all with the peer.
        flow: FlowId,
        /// The addresses.
        pair: Pair,
        /// Why.
        cause: Cause,
    },
    /// A peer has named another service router, where it may be asked for.
    Whereabouts(HostId),
    /// A peer moves so often that it is left where it is for a while.
    Flapping(HostId),
    /// Nothing comes from a peer any more, by whatever way.
    Silent(HostId),
    /// A peer is given up: flows of programs here with it have failed.
    GivenUp {
        /// The peer.
        peer: HostId,
        /// How many flows.
        flows: usize,
        /// Upon what.
        cause: GiveUpCause,
    },
    /// Data goes unanswered between the addresses in use with a peer although probes are answered, and no other pair is
    /// better.
    Unanswered(HostId),
    /// A host with another key has proved itself at the address of one that this host has flows with.
    OtherHost {
        /// The one that was there.
        former: HostId,
        /// The one that is there.
        host: HostId,
    },
    /// Two hosts use one key, and the later one is kept out while the elder is alive (DESIGN §18).
    Twin(Twin),
    /// A router of an authority has answered a search, and proved that it is one. It may do so again.
    RouterFound {
        /// The authority's block.
        authority: [u8; 8],
        /// The router's key.
        key: HostPublic,
        /// Where it hears SAL.
        at: SocketAddr,
    },
    /// A connection is on its way to another host.
    HandOver(HandOver),
    /// What has become of a program's wish to leave between two connections.
    SpliceOver {
        /// The flow of the connection that it has accepted.
        left: FlowId,
        /// Of the one that it has opened.
        right: FlowId,
        /// Whether the program has left, or why it stays.
        outcome: SpliceOutcome,
    },
    /// The records of two flows are to be written down for the next start of the agent, now: the two ways of a session
    /// whose program leaves, or at a box the two halves of a session that comes to go through that box.
    /// [`Sal::kept`](crate::Sal::kept) says that they are; until then, for a moment, the session or its change waits.
    Keep {
        /// The way through the program; or the half towards the client.
        old: FlowId,
        /// The one past it; or the half towards the server.
        new: FlowId,
    },
    /// A rule of the service table has ended by itself.
    RuleExpired {
        /// Its number.
        id: RuleId,
        /// What it was for.
        prefix: Prefix,
        /// Why.
        why: Expiry,
        /// First packets that it decided upon.
        packets: u64,
    },
}

/// A place of a striped flow, for lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripePlace {
    /// Its number.
    pub place: usize,
    /// The addresses.
    pub pair: Pair,
    /// The peer has answered by it.
    pub is_proved: bool,
    /// The last round trip.
    pub rtt: Option<Duration>,
    /// How often it has its turn, where turns go by weights.
    pub weight: u8,
    /// The stack of its own by which this end sends there.
    pub sends: Option<PlaceStack>,
    /// That by which the peer does.
    pub takes: Option<PlaceStack>,
}

/// A flow as lists show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowInfo {
    /// Local identifier.
    pub flow: FlowId,
    /// The peer's identifier; zero while connecting.
    pub peer_flow: FlowId,
    /// The session, the same on all hosts.
    pub session: SessionId,
    /// The name that the flow was made to.
    pub service: ServiceId,
    /// At the responder, the port of the service that the initiator has asked for.
    pub port: u16,
    /// What the client's socket is called, where it has a name of its own.
    pub source: Option<ServiceId>,
    /// Initiator or responder.
    pub role: Role,
    /// Where in its life it is.
    pub lifecycle: Lifecycle,
    /// Of one that is half-closed: which way the one FIN went.
    pub closed: Option<Direction>,
    /// The application's five-tuple.
    pub app: Tuple,
    /// The peer's host, once proved.
    pub peer: Option<HostId>,
    /// Whose share of shared tables and places the peer's count for, once it is proved.
    pub shares_as: Option<Peer>,
    /// The peer's UDP address.
    pub remote: Option<SocketAddr>,
    /// Whether the peer's right to answer for the name was checked against a trust anchor.
    pub authenticated: bool,
    /// When it began.
    pub since: Instant,
    /// Which path it is on.
    pub carriage: Carriage,
    /// Since when.
    pub carriage_since: Instant,
    /// Why.
    pub why: Why,
    /// How its DATA is sealed, if it is.
    pub secure: Option<Cipher>,
    /// What is lost of its datagrams, where that is measured.
    pub loss: FlowLoss,
    /// How evenly they arrive, where that is measured.
    pub timing: FlowTiming,
    /// Its stack, and why that is so.
    pub stack: StackInfo,
    /// This host's address that its packets leave with, where that is known.
    pub local: Option<IpAddr>,
    /// It goes by other addresses than the rest of its association.
    pub is_aside: bool,
    /// It stays there when the others move.
    pub is_pinned: bool,
    /// It is to go by several pairs at once, where there are several.
    pub stripes: bool,
    /// It does.
    pub is_striped: bool,
    /// How what this end sends is shared out among them, then.
    pub sharing: Sharing,
    /// Those.
    pub places: Vec<StripePlace>,
    /// The last change of its addresses.
    pub moved: Option<Moved>,
    /// How often they have changed.
    pub moves: u32,
    /// What is wrong with how the peer and this host find each other.
    pub trouble: Option<Trouble>,
    /// The boxes that its session goes through, if it does.
    pub chain: Option<ChainRecord>,
    /// The last reconfigurations of its session that were ordered here, the oldest first; eight at most.
    pub reconfigurations: Vec<Reconfigured>,
    /// Its program sends by it. If not, its session goes another way, or is about to.
    pub goes_on: bool,
}

impl FlowInfo {
    /// Whether its session is for a name under `prefix`, or passes a box of such a name on this host.
    pub fn is_of(&self, prefix: &Prefix) -> bool {
        let here = self.chain.as_ref().and_then(ChainRecord::box_here);
        prefix.contains(&self.service) || here.is_some_and(|name| prefix.contains(&name))
    }
}

/// An association as lists show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssociationInfo {
    /// The peer.
    pub host: HostId,
    /// Its UDP address.
    pub remote: SocketAddr,
    /// This host's address that it is reached from, where that is known.
    pub local: Option<IpAddr>,
    /// Where else it says that it can be reached.
    pub addresses: Vec<SocketAddr>,
    /// Its service router.
    pub rendezvous: Option<SocketAddr>,
    /// What this host is doing about its own place.
    pub moving: Moving,
    /// What may pass.
    pub passage: Passage,
    /// Whether nothing has come from it lately although something should have.
    pub is_suspected: bool,
    /// What is wrong with how it and this host find each other.
    pub trouble: Option<Trouble>,
    /// It moves so often that it is left where it is until then.
    pub flapping: Option<Instant>,
    /// The last change of addresses.
    pub moved: Option<Moved>,
    /// How often they have changed.
    pub moves: u32,
    /// The last round trip of signalling.
    pub rtt: Option<Duration>,
    /// What is lost of the datagrams of that flow whose loss is measured and greatest, of a million.
    pub loss_ppm: Option<u32>,
    /// How evenly its datagrams arrive, of each the worst of the flows that are measured.
    pub timing: Timing,
    /// Largest UDP payload in bytes.
    pub datagram_max: u16,
    /// The peer's epoch.
    pub epoch: u32,
    /// Flows that use it.
    pub flows: u32,
    /// Whether the peer is this host's service router, or registered with this router.
    pub router: bool,
    /// When it was last heard, with a right tag.
    pub heard: Instant,
}

/// Events in order, bounded: the oldest go first, since nothing depends on them.
#[derive(Default)]
pub(crate) struct EventQueue(VecDeque<Event>);

impl EventQueue {
    pub fn push(&mut self, event: Event) {
        if self.0.len() >= EVENTS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(event);
    }

    pub fn extend(&mut self, events: impl IntoIterator<Item = Event>) {
        for event in events {
            self.push(event);
        }
    }

    /// The oldest event.
    pub fn pop(&mut self) -> Option<Event> {
        self.0.pop_front()
    }
}
