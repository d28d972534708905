//! What the core asks of its caller, and what it says about a packet.

use core::net::{IpAddr, SocketAddr};

use margay_wire::FlowId;

use crate::cache::entry::EntryUpdate;
use crate::types::drop_reason::DropReason;

/// One thing for the caller to do. They come in one ordered queue: an entry is installed before the packet that needs
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send `buf[..len]` as a UDP datagram from the SAL port.
    Transmit {
        /// This host's address to send from; `None` where its routing decides.
        local: Option<IpAddr>,
        /// Destination.
        to: SocketAddr,
        /// Bytes of the datagram.
        len: usize,
    },
    /// Write the IP packet `buf[..len]` to `sal0`; its checksums are complete.
    Inject {
        /// Bytes of the packet.
        len: usize,
    },
    /// Write the IP packet `buf[..len]` to `sal0`, as above: one of this flow's peer, which came by the core. It may
    /// end the connection: that is to be told of if the application's TCP takes it for an ending (RFC 5961), as of
    /// what the cache carries.
    Deliver {
        /// This host's number of the flow, of which the cache keeps the numbers of TCP.
        flow: FlowId,
        /// Bytes of the packet.
        len: usize,
    },
    /// An application's packet that was held: carry `buf[..len]` as if it had just been read from `sal0`.
    Egress {
        /// Bytes of the IP packet.
        len: usize,
    },
    /// Carry the IP packet `buf[..len]` by this flow, whatever its five-tuple leads to: the core has parted it from
    /// what goes by another flow.
    Carry {
        /// This host's number of the flow.
        flow: FlowId,
        /// Bytes of the packet, whose checksums are complete.
        len: usize,
    },
    /// A DATA datagram that was held: process `buf[..len]` as if it had just been received.
    Ingress {
        /// Who sent it.
        from: SocketAddr,
        /// Bytes of the datagram.
        len: usize,
    },
    /// Change the flow cache.
    Update(EntryUpdate),
    /// Send a bare TCP segment of this flow on its flow ports, with the numbers that its application has shown.
    Pinhole(FlowId),
    /// The same, if the numbers are known, with [`KNOCK_WINDOW`](crate::KNOCK_WINDOW) for its window: nothing of the
    /// peer's has come.
    Knock(FlowId),
    /// Once everything of this flow that was read from `sal0` before is sent, send an empty DATA with FENCE.
    Fence(FlowId),
    /// Send an empty DATA without FENCE now: the peer learns that this end encapsulates again, even if it has no data.
    Back(FlowId),
    /// What was in flight of this connection is lost: have the host's TCP send it again now, instead of when its timer
    /// says so (DESIGN §18).
    Restart(FlowId),
    /// Both ends of a connection have closed: ask the flow cache whether each has acknowledged all of the other's, FIN
    /// included, and give its answer to [`Sal::handle_ending`](crate::Sal::handle_ending).
    Ending(FlowId),
    /// Ask the kernel's cache what has become of these flows of a grant, a bit for each, and give its answer to
    /// [`Sal::handle_survey`](crate::Sal::handle_survey).
    Survey {
        /// The first flow number of the grant, in numbers of this host.
        grant: FlowId,
        /// Bit 0 stands for the first flow of the grant.
        flows: u128,
    },
    /// Have it tell [`Sal::handle_opened`](crate::Sal::handle_opened) of these, as far as they have been answered.
    Tell {
        /// The first flow number of the grant, in numbers of this host.
        grant: FlowId,
        /// Bit 0 stands for the first flow of the grant.
        flows: u128,
    },
    /// There are questions for resolvers: [`Sal::poll_question`](crate::Sal::poll_question) gives them. Said once,
    /// until there are further ones.
    Questions,
    /// Names need virtual addresses on this host: [`Sal::take_wanted_leases`](crate::Sal::take_wanted_leases) gives
    /// them. Said once, until there are further ones.
    Leases,
    /// Peers want connections of programs here to end in order: [`Sal::take_quiet_requests`]
    /// (crate::Sal::take_quiet_requests) gives them. Said once, until there are further ones.
    QuietEnds,
    /// Something that a router's copy of the service table must know has changed: [`Sal::take_route_changes`]
    /// (crate::Sal::take_route_changes) and [`Sal::take_hop_key_changes`](crate::Sal::take_hop_key_changes) say what.
    /// Said once, until it is asked for.
    Routes,
}

/// What became of an application's packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppVerdict {
    /// The core took it: it is held, carried in signalling or answered.
    Consumed,
    /// The same of a flow whose entry leaves its packets to the core
    /// ([`Directions::Parted`](crate::entry::Directions::Parted)): what the packet shows of its connection counts as if
    /// the cache had carried it.
    Parted(FlowId),
    /// The flow is known; its entry is in the output queue. Drain the queue and look the packet up once more.
    Forward(FlowId),
    /// Not carried, and why.
    Drop(DropReason),
}
