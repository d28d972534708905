//! What hand-overs of connections come to.

use core::fmt;

use margay_wire::{ErrorCode, SessionId};

use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::tuple::Tuple;

/// Names one hand-over. Its giver has drawn it at random. It is no secret and entitles to nothing: it goes over the
/// network in the clear.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub [u8; 16]);

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({self})")
    }
}

/// A hand-over as a host knows it that has not drawn the ticket: with the peer that has proved its key. At the
/// initiator that is the giver, at the taker the initiator. The same ticket from another host is another hand-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerTicket {
    /// The host.
    pub peer: HostId,
    /// The ticket that it has sent.
    pub ticket: Ticket,
}

/// Which connection a hand-over is of. The giver tells the taker's agent, and the initiator's host has proved it to the
/// taker: only where both are equal is a connection taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandedSession {
    /// The host that has the connection.
    pub giver: HostId,
    /// The client's host.
    pub client: HostId,
    /// The session.
    pub session: SessionId,
    /// The name that it was made to.
    pub service: ServiceId,
    /// The port of the service that its client has asked for, by whose allow list it is admitted.
    pub port: u16,
}

/// What has become of a hand-over, for whoever keeps the sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandOver {
    /// Giver: the initiator waits, and nothing of the flow leaves this host any more. The connection is to be frozen
    /// and sent to the taker.
    Fetched(Ticket),
    /// Giver: nothing was frozen, and the connection stays.
    Refused {
        /// Which hand-over.
        ticket: Ticket,
        /// What the initiator says.
        code: ErrorCode,
    },
    /// Giver: the connection stays, and is to go on.
    Stays(Ticket),
    /// Giver: the connection is the taker's. The frozen one is to be closed without a word.
    Gone(Ticket),
    /// Giver: nobody can say where the connection is. It is to be closed without a word.
    Lost(Ticket),
    /// Taker: the initiator's flow is there, and waits for its connection.
    Awaits {
        /// Which hand-over.
        ticket: PeerTicket,
        /// Of which connection, as the initiator says.
        of: HandedSession,
        /// The five-tuple that the connection has here: its source is this host's end.
        app: Tuple,
    },
    /// Taker: the connection is here, and is to go on.
    Taken(PeerTicket),
    /// Taker: it is not, and what was restored of it is to be closed without a word.
    Dropped(PeerTicket),
}
