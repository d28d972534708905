//! What hand-overs of connections come to.

use core::fmt;

use margay_wire::ErrorCode;

use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::tuple::Tuple;

/// Names one hand-over. Random; it is no secret.
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
        ticket: Ticket,
        /// The host that has the connection, as the initiator says.
        giver: HostId,
        /// The name that the session was made to.
        service: ServiceId,
        /// The five-tuple that the connection has here: its source is this host's end.
        app: Tuple,
    },
    /// Taker: the connection is here, and is to go on.
    Taken(Ticket),
    /// Taker: it is not, and what was restored of it is to be closed without a word.
    Dropped(Ticket),
}
