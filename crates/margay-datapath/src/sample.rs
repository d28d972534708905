//! Packets for tests, built byte by byte, and an independent look at what comes out (smoltcp).

use std::fs;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};

use libbpf_rs::ProgramMut;
use margay_core::{Cipher, SealKeys, Tuple};
use margay_wire::epochs;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{IpAddress, IpProtocol, Ipv4Packet, Ipv6Packet, TcpPacket, TcpRepr, UdpPacket, UdpRepr};

use crate::checksum::{fold, pseudo, sum};
use crate::packet::{FlowKey, TCP, UDP};

fn tuple(protocol: u8, source: &str, destination: &str) -> Tuple {
    let address = |text: &str| -> SocketAddr { text.parse().expect("literal address") };
    Tuple { protocol, source: address(source), destination: address(destination) }
}

/// A five-tuple of IPv4.
pub fn tuple4(protocol: u8) -> Tuple {
    tuple(protocol, "198.18.0.1:40000", "198.18.0.9:80")
}

/// A five-tuple of IPv6.
pub fn tuple6(protocol: u8) -> Tuple {
    tuple(protocol, "[fd5a:4c00::1]:40001", "[fd5a:4c00:1:2:3::7]:81")
}

/// How the transport checksum of a built packet is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// As it is on a wire.
    Complete,
    /// The pseudo-header's sum alone.
    Partial,
    /// Zero: UDP over IPv4 only.
    Absent,
}

/// A packet with that tuple: TTL 63, traffic class 0x0a, TCP with sequence number 0xfffff000 and timestamps.
pub fn packet(tuple: Tuple, flags: u8, payload: &[u8], checksum: Checksum) -> Vec<u8> {
    let mut rest = Vec::new();
    if tuple.protocol == TCP {
        rest.extend([0xff, 0xff, 0xf0, 0x00, 1, 2, 3, 4, 0x80, flags, 0x20, 0, 0, 0, 0, 0]);
        rest.extend([1, 1, 8, 10, 0, 0, 0, 9, 0, 0, 0, 8]);
    } else {
        rest.extend(((8 + payload.len()) as u16).to_be_bytes());
        rest.extend([0, 0]);
    }
    packet_of(tuple, &rest, payload, checksum)
}

/// The same, with what comes behind the ports in its transport header, but for the checksum.
pub fn packet_of(tuple: Tuple, rest: &[u8], payload: &[u8], checksum: Checksum) -> Vec<u8> {
    let key = FlowKey::from(tuple);
    let checksum_at = if tuple.protocol == TCP { 16 } else { 6 };
    let mut transport = Vec::new();
    transport.extend(key.source_port.to_be_bytes());
    transport.extend(key.destination_port.to_be_bytes());
    transport.extend(rest);
    transport.extend(payload);
    let mut packet = ip_header(&key, transport.len());
    let addresses = if key.is_v4() { sum(&packet[12..20]) } else { sum(&packet[8..40]) };
    let pseudo = addresses + pseudo(tuple.protocol, transport.len() as u32);
    let value = match checksum {
        Checksum::Complete => match !fold(pseudo + sum(&transport)) {
            0 if tuple.protocol == UDP => 0xffff,
            value => value,
        },
        Checksum::Partial => fold(pseudo),
        Checksum::Absent => 0,
    };
    transport[checksum_at..checksum_at + 2].copy_from_slice(&value.to_be_bytes());
    packet.extend(transport);
    packet
}

fn ip_header(key: &FlowKey, transport_len: usize) -> Vec<u8> {
    let mut header = Vec::new();
    if key.is_v4() {
        header.extend([0x45, 0x0a]);
        header.extend(((20 + transport_len) as u16).to_be_bytes());
        header.extend([0x12, 0x34, 0x40, 0, 63, key.protocol, 0, 0]);
        header.extend(&key.source[12..]);
        header.extend(&key.destination[12..]);
        let checksum = !fold(sum(&header));
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
    } else {
        header.extend([0x60, 0xa0, 0, 0]);
        header.extend((transport_len as u16).to_be_bytes());
        header.extend([key.protocol, 63]);
        header.extend(key.source);
        header.extend(key.destination);
    }
    header
}

/// TCP over IPv4, complete.
pub fn tcp4(payload: &[u8], flags: u8) -> Vec<u8> {
    packet(tuple4(TCP), flags, payload, Checksum::Complete)
}

/// UDP over IPv6, complete.
pub fn udp6(payload: &[u8]) -> Vec<u8> {
    packet(tuple6(UDP), 0, payload, Checksum::Complete)
}

/// A packet as smoltcp reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Five-tuple.
    pub tuple: Tuple,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// TCP sequence number.
    pub sequence: u32,
    /// TCP flags byte.
    pub flags: u8,
    /// Payload.
    pub payload: Vec<u8>,
}

/// Reads a packet with smoltcp, which must find every length and checksum right.
pub fn see(packet: &[u8]) -> Seen {
    let (source, destination, protocol, traffic_class, hop_limit, transport) = if packet[0] >> 4 == 4 {
        let ip = Ipv4Packet::new_checked(packet).expect("well-formed IPv4");
        assert!(ip.verify_checksum(), "IPv4 header checksum");
        assert_eq!(usize::from(ip.total_len()), packet.len());
        let class = ip.dscp() << 2 | ip.ecn();
        (
            IpAddress::from(ip.src_addr()),
            IpAddress::from(ip.dst_addr()),
            ip.next_header(),
            class,
            ip.hop_limit(),
            packet[usize::from(ip.header_len())..].to_vec(),
        )
    } else {
        let ip = Ipv6Packet::new_checked(packet).expect("well-formed IPv6");
        assert_eq!(ip.total_len(), packet.len());
        (
            IpAddress::from(ip.src_addr()),
            IpAddress::from(ip.dst_addr()),
            ip.next_header(),
            ip.traffic_class(),
            ip.hop_limit(),
            ip.payload().to_vec(),
        )
    };
    let address = |address: IpAddress, port| SocketAddr::new(address.into(), port);
    match protocol {
        IpProtocol::Tcp => {
            let tcp = TcpPacket::new_checked(&transport[..]).expect("well-formed TCP");
            TcpRepr::parse(&tcp, &source, &destination, &ChecksumCapabilities::default()).expect("right TCP checksum");
            Seen {
                tuple: Tuple {
                    protocol: TCP,
                    source: address(source, tcp.src_port()),
                    destination: address(destination, tcp.dst_port()),
                },
                traffic_class,
                hop_limit,
                sequence: tcp.seq_number().0 as u32,
                flags: transport[13],
                payload: tcp.payload().to_vec(),
            }
        }
        IpProtocol::Udp => {
            let udp = UdpPacket::new_checked(&transport[..]).expect("well-formed UDP");
            assert_eq!(usize::from(udp.len()), transport.len());
            UdpRepr::parse(&udp, &source, &destination, &ChecksumCapabilities::default()).expect("right UDP checksum");
            Seen {
                tuple: Tuple {
                    protocol: UDP,
                    source: address(source, udp.src_port()),
                    destination: address(destination, udp.dst_port()),
                },
                traffic_class,
                hop_limit,
                sequence: 0,
                flags: 0,
                payload: udp.payload().to_vec(),
            }
        }
        other => panic!("protocol {other}"),
    }
}

/// Keys of one end of a sealed flow.
pub fn seal_keys(cipher: Cipher) -> SealKeys {
    SealKeys { cipher, send: [0x11; 32], open: [0x22; 32], send_epochs: epochs(5, 9), open_epochs: epochs(9, 5) }
}

/// Those of the other end.
pub fn peer_seal_keys(cipher: Cipher) -> SealKeys {
    SealKeys { cipher, send: [0x22; 32], open: [0x11; 32], send_epochs: epochs(9, 5), open_epochs: epochs(5, 9) }
}

/// Instructions that the verifier may look at before it takes a program: a tenth of what it does at most. Another
/// kernel's may need more, and an agent that starts waits for it.
const VERIFIED_MAX: u32 = 100_000;

/// What the kernel says of a program, by its descriptor. A walk over all programs ends early when another test's go
/// meanwhile.
pub fn is_soon_verified(program: &ProgramMut<'_>) {
    let said = fs::read_to_string(format!("/proc/self/fdinfo/{}", program.as_fd().as_raw_fd())).expect("it is open");
    let line = said.lines().find_map(|line| line.strip_prefix("verified_insns:")).expect("since Linux 5.16");
    let verified: u32 = line.trim().parse().expect("a number");
    assert!((1..VERIFIED_MAX).contains(&verified), "{:?}: {verified}", program.name());
}
