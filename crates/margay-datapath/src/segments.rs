//! Datagrams to every host on the segments that this host is on: IPv4 by the limited broadcast address, which no router
//! passes on; IPv6 by a group of link-local scope.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use margay_core::segment::SEGMENT;
use parking_lot::RwLock;

use crate::udp::{Origin, SendError, Udp};

/// The group of all agents on a link: transient, link-local (RFC 4291 §2.7); its number is the SAL's port.
pub const GROUP: Ipv6Addr = Ipv6Addr::new(0xff12, 0, 0, 0, 0, 0, 0, margay_wire::PORT);

/// One interface of this host, and what it has there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its number.
    pub interface: u32,
    /// An address by which others there may answer.
    pub v4: Option<Ipv4Addr>,
    /// The same, of IPv6: link-local only where there is no other.
    pub v6: Option<Ipv6Addr>,
}

/// The interfaces that are asked over.
#[derive(Debug, Default)]
pub(crate) struct Segments(RwLock<Vec<Segment>>);

impl Segments {
    /// Replaces them, and listens to the group on each.
    pub fn set(&self, socket: &Udp, segments: Vec<Segment>) -> io::Result<()> {
        let known = std::mem::replace(&mut *self.0.write(), segments.clone());
        for segment in segments.iter().filter(|segment| segment.v6.is_some()) {
            let was_there = known.iter().any(|known| known.interface == segment.interface && known.v6.is_some());
            if !was_there {
                socket.join(GROUP, segment.interface)?;
            }
        }
        Ok(())
    }

    /// Sends a datagram over each. Gives how many of those refused it.
    pub fn send(&self, socket: &Udp, datagram: &[u8]) -> u64 {
        let mut refused = 0;
        for Segment { interface, v4, v6 } in self.0.read().iter().copied() {
            let group = SocketAddr::V6(SocketAddrV6::new(GROUP, SEGMENT.port(), 0, interface));
            let ways = [v4.map(|own| (IpAddr::V4(own), SEGMENT)), v6.map(|own| (IpAddr::V6(own), group))];
            for (local, to) in ways.into_iter().flatten() {
                let sent = socket.send(datagram, datagram.len(), to, Some(Origin { local, interface }));
                if let Err(error) = sent {
                    let what = match &error {
                        SendError::System(error) => error.to_string(),
                        other => format!("{other:?}"),
                    };
                    tracing::debug!(interface, %to, what, "a segment was not asked");
                    refused += 1;
                }
            }
        }
        refused
    }
}
