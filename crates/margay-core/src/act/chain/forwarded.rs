//! By what a packet shows that it has passed a box, and was not made by a socket of this host: anybody here may send
//! the payload that a box was given, and would be taken for the box's output.
//!
//! What sits at `sal0` below the agent knows: the eBPF program there, or nftables. It says so by the hop limit.
//! Programs may choose that, so it takes [`FORWARDED_HOP_LIMIT`] from the packets of all others. Where nothing says
//! so, nothing has been forwarded.
//!
//! What comes from outside of the host, such as a container, is marked in the same way: NAT may have given it the
//! address of a socket that has a source name.

use super::tag::tag_of;
use crate::cache::packet::{AppPacket, set_hop_limit};
pub use crate::cache::packet::{FORWARDED_HOP_LIMIT, OUTSIDE_HOP_LIMIT};
use crate::session::flow::FlowTable;

/// Gives a whole IP packet the hop limit of one that was forwarded.
pub fn mark_forwarded(packet: &mut [u8]) {
    set_hop_limit(packet, FORWARDED_HOP_LIMIT);
}

/// Gives a whole IP packet the hop limit of one that no socket of this host has sent.
pub fn mark_outside(packet: &mut [u8]) {
    set_hop_limit(packet, OUTSIDE_HOP_LIMIT);
}

/// Whether a packet that was not forwarded would have been taken for what has come out of a box.
pub(super) fn is_feigned(flows: &FlowTable, packet: &AppPacket<'_>) -> bool {
    let left = flows.by_tuple(&packet.tuple.reversed()).and_then(|id| flows.get(id));
    let is_of_left = left.and_then(|left| left.chain.as_ref()).is_some_and(|chained| chained.is_left());
    is_of_left || (packet.is_tcp_syn() && tag_of(packet).is_some())
}

#[cfg(test)]
mod tests {
    use core::net::SocketAddr;

    use super::*;
    use crate::cache::packet::{Parsed, build, parse};
    use crate::types::tuple::Tuple;

    #[test]
    fn only_the_hop_limit_says_that_a_packet_was_forwarded() {
        for (source, destination) in [("10.0.0.1:4000", "198.18.0.9:53"), ("[fd00::1]:4000", "[fd5a:4c00::9]:53")] {
            let address = |text: &str| text.parse::<SocketAddr>().expect("literal");
            let tuple = Tuple { protocol: 17, source: address(source), destination: address(destination) };
            let datagram = |hop_limit| build(&tuple, alloc::vec![0x0f, 0xa0, 0, 53, 0, 8, 0, 0], 7, hop_limit);
            let mut packet = datagram(64).expect("one family");
            let read = |bytes: &[u8]| match parse(bytes) {
                Ok(Parsed::Transport(packet)) => packet.is_forwarded(),
                other => panic!("{other:?}"),
            };
            assert!(!read(&packet));
            mark_forwarded(&mut packet);
            assert!(read(&packet));
            assert_eq!(Some(packet), datagram(FORWARDED_HOP_LIMIT), "with its checksum");
        }
        mark_forwarded(&mut [0x45; 3]);
        mark_forwarded(&mut []);
    }
}
