//! Five-tuples.

use core::fmt;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use margay_wire::FlowId;

/// A five-tuple as the application's own packets carry it when they leave `sal0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tuple {
    /// IP protocol number: 6 (TCP) or 17 (UDP).
    pub protocol: u8,
    /// The application's own virtual address and port.
    pub source: SocketAddr,
    /// The virtual address and port that the application talks to.
    pub destination: SocketAddr,
}

impl Tuple {
    /// The same five-tuple as packets *to* the application carry it.
    pub const fn reversed(self) -> Self {
        Self { protocol: self.protocol, source: self.destination, destination: self.source }
    }
}

impl fmt::Display for Tuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = match self.protocol {
            6 => "tcp",
            17 => "udp",
            _ => "ip",
        };
        write!(f, "{protocol} {} > {}", self.source, self.destination)
    }
}

/// The protocol number that no application has.
pub(crate) const GREETING: u8 = 0;

/// A tuple that no packet carries, so that greetings fit the flow table.
pub(crate) fn tuple_of(id: FlowId) -> Tuple {
    let nowhere = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0);
    let number = SocketAddr::new(IpAddr::V6(Ipv6Addr::from(u128::from(id.0))), 0);
    Tuple { protocol: GREETING, source: nowhere, destination: number }
}
