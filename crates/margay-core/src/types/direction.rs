//! Which way a packet went.

/// Which way a packet went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the application to the peer.
    Egress,
    /// From the peer to the application.
    Ingress,
}
