//! What the core reports, and the views that it gives of its tables.

use alloc::string::String;
use core::net::SocketAddr;

use margay_wire::{FlowId, SessionId};

use crate::direct::{Carriage, Why};
use crate::entry::{RemoveReason, Tuple};
use crate::key::HostId;
use crate::name::ServiceId;
use crate::time::Instant;

/// Something that happened. Nothing needs to be done about it; logs, metrics and watchers live on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A flow is established and proved.
    FlowOpened(FlowId),
    /// A flow's record has changed: one side has closed.
    FlowChanged(FlowId),
    /// A flow is gone.
    FlowClosed {
        /// What it was, at its end.
        flow: FlowInfo,
        /// Why it ended.
        reason: RemoveReason,
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
    /// A second host uses this key; it is kept out until its epoch is newer (DESIGN §18).
    Quarantined(HostId),
}

/// Which end of a flow this host is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The application here connected.
    Initiator,
    /// The application here listens.
    Responder,
}

/// Life of a flow, as its transport has it (DESIGN §7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lifecycle {
    /// The first packet is on its way, or the peer is not proved yet.
    Connecting,
    /// Both ends are proved; data flows.
    Established,
    /// One side has sent its FIN.
    HalfClosed,
    /// Both FINs or a RST passed; kept for late packets.
    Closed,
    /// Nothing came in time.
    TimedOut,
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
    /// What the client's socket is called, where it has a name of its own.
    pub source: Option<ServiceId>,
    /// Initiator or responder.
    pub role: Role,
    /// Where in its life it is.
    pub lifecycle: Lifecycle,
    /// The application's five-tuple.
    pub app: Tuple,
    /// The peer's host, once proved.
    pub peer: Option<HostId>,
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
}

/// An association as lists show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssociationInfo {
    /// The peer.
    pub host: HostId,
    /// Its UDP address.
    pub remote: SocketAddr,
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
