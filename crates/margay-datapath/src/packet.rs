//! A first look at an application's packet: which flow, how long are its headers, is it one for the fast path.

use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use margay_core::Tuple;

/// TCP's protocol number.
pub const TCP: u8 = 6;
/// UDP's protocol number.
pub const UDP: u8 = 17;
/// IPv6 fragment extension header.
pub const FRAGMENT: u8 = 44;
/// Bytes of an IPv6 header.
pub const IPV6_LEN: usize = 40;
/// Bytes of an IPv4 header without options.
pub const IPV4_LEN: usize = 20;
/// Bytes of a TCP header without options.
pub const TCP_LEN: usize = 20;
/// Bytes of a UDP header.
pub const UDP_LEN: usize = 8;
/// Bytes of the longest IP and transport headers that the fast path takes: 60 of IPv4 or 40 of IPv6, and 60 of TCP.
pub const HEADERS_MAX: usize = 120;

/// TCP flag FIN.
pub const FIN: u8 = 0x01;
/// TCP flag SYN.
pub const SYN: u8 = 0x02;
/// TCP flag RST.
pub const RST: u8 = 0x04;
/// TCP flag PSH.
pub const PSH: u8 = 0x08;
/// TCP flag ACK.
pub const ACK: u8 = 0x10;
/// TCP flag URG.
pub const URG: u8 = 0x20;
/// TCP flag CWR.
pub const CWR: u8 = 0x80;

/// A five-tuple in the compact form of the cache: IPv4 addresses are v4-mapped, so 38 bytes hold every one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlowKey {
    /// Source address.
    pub source: [u8; 16],
    /// Destination address.
    pub destination: [u8; 16],
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// IP protocol number.
    pub protocol: u8,
}

/// An address in sixteen bytes, IPv4 as v4-mapped.
pub const fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

const fn mapped_v4(octets: &[u8]) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, octets[0], octets[1], octets[2], octets[3]]
}

impl FlowKey {
    /// The same five-tuple as packets of the other direction carry it.
    pub const fn reversed(self) -> Self {
        Self {
            source: self.destination,
            destination: self.source,
            source_port: self.destination_port,
            destination_port: self.source_port,
            protocol: self.protocol,
        }
    }

    /// Where its packets go.
    pub fn destination(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.destination).to_canonical(), self.destination_port)
    }

    /// Whether packets of this flow are IPv4.
    pub fn is_v4(&self) -> bool {
        const PREFIX: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
        self.source[..12] == PREFIX && self.destination[..12] == PREFIX
    }

    /// The same in the core's form.
    pub fn tuple(&self) -> Tuple {
        let address = |octets: [u8; 16], port| SocketAddr::new(Ipv6Addr::from(octets).to_canonical(), port);
        Tuple {
            protocol: self.protocol,
            source: address(self.source, self.source_port),
            destination: address(self.destination, self.destination_port),
        }
    }
}

impl From<Tuple> for FlowKey {
    fn from(tuple: Tuple) -> Self {
        Self {
            source: mapped(tuple.source.ip()),
            destination: mapped(tuple.destination.ip()),
            source_port: tuple.source.port(),
            destination_port: tuple.destination.port(),
            protocol: tuple.protocol,
        }
    }
}

/// A TCP or UDP packet whose headers are whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Its five-tuple.
    pub key: FlowKey,
    /// Bytes of the IP header.
    pub ip_len: usize,
    /// Bytes of the transport header.
    pub transport_len: usize,
    /// Bytes of the whole packet, by its own account.
    pub total_len: usize,
    /// TCP flags; zero for UDP.
    pub flags: u8,
    /// Hop limit.
    pub hop_limit: u8,
}

impl Transport {
    /// Bytes after the transport header.
    pub const fn payload_len(&self) -> usize {
        self.total_len - self.ip_len - self.transport_len
    }
}

/// What a packet is to the fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packet {
    /// TCP or UDP: look it up.
    Transport(Transport),
    /// A fragment: reassemble first.
    Fragment,
    /// Any other well-formed packet of so many bytes: the core decides.
    Other(usize),
}

/// The packet's own lengths do not fit together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Looks at a packet of `len` bytes whose first bytes are `head`: all of it, or at least [`HEADERS_MAX`].
pub fn parse(head: &[u8], len: usize) -> Result<Packet, Malformed> {
    match head.first().map(|byte| byte >> 4) {
        Some(4) => parse_v4(head, len),
        Some(6) => parse_v6(head, len),
        _ => Err(Malformed),
    }
}

fn parse_v4(head: &[u8], len: usize) -> Result<Packet, Malformed> {
    if head.len() < IPV4_LEN {
        return Err(Malformed);
    }
    let ip_len = usize::from(head[0] & 0x0f) * 4;
    let total_len = usize::from(word(head, 2));
    if ip_len < IPV4_LEN || total_len < ip_len || total_len > len || head.len() < ip_len {
        return Err(Malformed);
    }
    if word(head, 6) & 0x3fff != 0 {
        return Ok(Packet::Fragment);
    }
    let (source, destination) = (mapped_v4(&head[12..16]), mapped_v4(&head[16..20]));
    parse_transport(head, (head[9], head[8]), ip_len, total_len, source, destination)
}

fn parse_v6(head: &[u8], len: usize) -> Result<Packet, Malformed> {
    if head.len() < IPV6_LEN {
        return Err(Malformed);
    }
    let total_len = IPV6_LEN + usize::from(word(head, 4));
    if total_len > len {
        return Err(Malformed);
    }
    if head[6] == FRAGMENT {
        return Ok(Packet::Fragment);
    }
    let mut source = [0; 16];
    let mut destination = [0; 16];
    source.copy_from_slice(&head[8..24]);
    destination.copy_from_slice(&head[24..40]);
    parse_transport(head, (head[6], head[7]), IPV6_LEN, total_len, source, destination)
}

fn parse_transport(
    head: &[u8],
    (protocol, hop_limit): (u8, u8),
    ip_len: usize,
    total_len: usize,
    source: [u8; 16],
    destination: [u8; 16],
) -> Result<Packet, Malformed> {
    let minimum = match protocol {
        TCP => TCP_LEN,
        UDP => UDP_LEN,
        _ => return Ok(Packet::Other(total_len)),
    };
    let transport = &head[ip_len..head.len().min(total_len)];
    if transport.len() < minimum {
        return Err(Malformed);
    }
    let (transport_len, flags) = if protocol == TCP {
        (usize::from(transport[12] >> 4) * 4, transport[13])
    } else if usize::from(word(transport, 4)) == total_len - ip_len {
        (UDP_LEN, 0)
    } else {
        return Err(Malformed);
    };
    if transport_len < minimum || transport.len() < transport_len {
        return Err(Malformed);
    }
    let key = FlowKey {
        source,
        destination,
        source_port: word(transport, 0),
        destination_port: word(transport, 2),
        protocol,
    };
    Ok(Packet::Transport(Transport { key, ip_len, transport_len, total_len, flags, hop_limit }))
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::sample;

    #[test]
    fn tcp_over_v4() {
        let packet = sample::tcp4(b"hello", FIN | ACK);
        let Ok(Packet::Transport(found)) = parse(&packet, packet.len()) else { panic!("not transport") };
        assert_eq!((found.ip_len, found.transport_len, found.payload_len(), found.flags), (20, 32, 5, FIN | ACK));
        assert_eq!(found.key, FlowKey::from(sample::tuple4(TCP)));
        assert_eq!(found.key.tuple(), sample::tuple4(TCP));
        assert!(found.key.is_v4());
    }

    #[test]
    fn udp_over_v6() {
        let packet = sample::udp6(b"hello");
        let Ok(Packet::Transport(found)) = parse(&packet, packet.len()) else { panic!("not transport") };
        assert_eq!((found.ip_len, found.payload_len()), (40, 5));
        assert_eq!(found.key.tuple(), sample::tuple6(UDP));
        assert!(!found.key.is_v4());
    }

    #[test]
    fn every_cut_is_malformed_or_understood() {
        for packet in [sample::tcp4(b"hello", ACK), sample::udp6(b"hello")] {
            for len in 0..packet.len() {
                assert_eq!(parse(&packet[..len], len), Err(Malformed), "length {len}");
            }
        }
    }

    #[test]
    fn fragments_and_others() {
        let mut packet = sample::tcp4(b"hello", ACK);
        packet[6] = 0x20;
        assert_eq!(parse(&packet, packet.len()), Ok(Packet::Fragment));
        packet[6] = 0;
        packet[9] = 1;
        assert_eq!(parse(&packet, packet.len()), Ok(Packet::Other(packet.len())));
    }
}
