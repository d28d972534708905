//! Which rule decides over a session of a program here, by its first packet with its session header (Dysco, section
//! 2.2).

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use super::policy::{ChainRule, SessionHeader};
use crate::cache::packet::{AppPacket, TCP_HEADER_LEN, build, tcp_flags};
use crate::machine::sal::Sal;
use crate::resolve::way::Sender;
use crate::table::Resolution;
use crate::types::name::ServiceId;
use crate::types::tuple::Tuple;

/// The source port of a packet that nobody has sent: the first one that programs are given (RFC 6335).
const SOME_PORT: u16 = 49_152;
const TTL: u8 = 64;
const TCP: u8 = 6;
const UDP_HEADER_LEN: usize = 8;

impl Sal {
    /// The rule that would decide over a session of a program here whose first packet has neither data nor options.
    pub fn chain_rule_for(&self, service: &ServiceId, protocol: u8, port: u16) -> Option<&ChainRule> {
        // Its addresses are not looked at: it has the session header's.
        let own = self.own_virtual(true);
        let tuple =
            Tuple { protocol, source: SocketAddr::new(own, SOME_PORT), destination: SocketAddr::new(own, port) };
        let transport = bare(&tuple);
        self.chain_rule_of(service, &AppPacket { tuple, transport: &transport, class: 0, hop_limit: TTL, whole: &[] })
    }

    /// The rule that decides over a session of a program here.
    pub(super) fn chain_rule_of(&self, service: &ServiceId, packet: &AppPacket<'_>) -> Option<&ChainRule> {
        let groups = self.own_groups();
        let is_read = self.chains.policy.reads_packets(service);
        let seen = if is_read { self.as_boxes_see(service, packet) } else { Vec::new() };
        let session = SessionHeader {
            service,
            protocol: packet.tuple.protocol,
            port: packet.tuple.destination.port(),
            host: self.config.host_id(),
            groups: &groups,
            packet: &seen,
        };
        self.chains.policy.rule_for(&session)
    }

    /// A first packet with its session header: from this host's address to the virtual address of that family, whatever
    /// family the program itself has used. A name that has none of that family here, but at the box, is stood for by
    /// the host's own virtual address.
    fn as_boxes_see(&self, service: &ServiceId, packet: &AppPacket<'_>) -> Vec<u8> {
        let Tuple { protocol, source, destination } = packet.tuple;
        let is_v4 = self.is_reached_by_v4(service, &packet.tuple);
        let own = self.own_virtual(is_v4);
        let address = self.stands_for(service, is_v4).unwrap_or(own);
        let client = self.config.local_addresses.iter().find(|address| address.is_ipv4() == is_v4);
        let seen = Tuple {
            protocol,
            source: SocketAddr::new(client.copied().unwrap_or(own), source.port()),
            destination: SocketAddr::new(address, destination.port()),
        };
        // Of a packet that is too long for the other family, no filter says anything.
        build(&seen, packet.transport.to_vec(), packet.class, packet.hop_limit).unwrap_or_default()
    }

    fn own_virtual(&self, is_v4: bool) -> IpAddr {
        let ranges = self.config.ranges;
        if is_v4 { ranges.host_v4().into() } else { ranges.host_v6().into() }
    }

    /// Whether this host sends to whoever serves a name, or to the router for it, over IPv4: its address of that family
    /// is what others see of it.
    fn is_reached_by_v4(&self, service: &ServiceId, tuple: &Tuple) -> bool {
        match self.pick(service, 0, tuple.protocol, tuple.destination.port(), Sender::Own) {
            Resolution::Forward(_, hop) => hop.address.is_ipv4(),
            _ => self.client_address(tuple).is_ipv4(),
        }
    }

    /// By which address this host is the client of a session.
    pub(super) fn client_address(&self, tuple: &Tuple) -> IpAddr {
        self.config.local_addresses.first().copied().unwrap_or(tuple.source.ip())
    }
}

/// A SYN without options, or a datagram without payload.
fn bare(tuple: &Tuple) -> Vec<u8> {
    let ports = [tuple.source.port().to_be_bytes(), tuple.destination.port().to_be_bytes()].concat();
    if tuple.protocol == TCP {
        let mut header = alloc::vec![0; TCP_HEADER_LEN];
        header[..4].copy_from_slice(&ports);
        (header[12], header[13]) = (5 << 4, tcp_flags::SYN);
        return header;
    }
    let mut header = alloc::vec![0; UDP_HEADER_LEN];
    header[..4].copy_from_slice(&ports);
    header[5] = UDP_HEADER_LEN as u8;
    header
}
