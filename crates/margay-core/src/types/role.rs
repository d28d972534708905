//! Which end of a flow a host is, and where in its life a flow is.

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
