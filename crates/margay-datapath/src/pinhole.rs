//! Pinholes: a bare TCP segment, or a datagram without payload, on a flow's own ports, so that stateful firewalls on
//! the way let the flow's direct packets pass, and the other end sees that they do (DESIGN §18).
#![allow(unsafe_code)]

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use margay_core::{KNOCK_WINDOW, PINHOLE_WINDOW};
use parking_lot::Mutex;

use crate::checksum::{fold, pseudo, sum};
use crate::packet::{ACK, FlowKey, IPV4_LEN, TCP, TCP_LEN, UDP, UDP_LEN};
use crate::table::TcpNumbers;

/// Its checksum covers no pseudo-header.
const ICMP: u8 = 1;
/// Hop limit of what this host sends itself.
const HOP_LIMIT: u8 = 64;

/// What goes on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// This host, and its flow port.
    pub source: SocketAddr,
    /// The peer, and its flow port.
    pub destination: SocketAddr,
    /// The connection's numbers; none for a flow of datagrams.
    pub numbers: Option<TcpNumbers>,
    /// It answers none of the peer's.
    pub is_knock: bool,
}

impl Segment {
    /// The whole IP packet, checksums complete; `None` when the addresses are of two families.
    pub fn packet(&self) -> Option<Vec<u8>> {
        let mut transport = Vec::with_capacity(TCP_LEN);
        transport.extend(self.source.port().to_be_bytes());
        transport.extend(self.destination.port().to_be_bytes());
        let (protocol, checksum_at) = if let Some(numbers) = self.numbers {
            transport.extend(numbers.sequence.to_be_bytes());
            transport.extend(numbers.acknowledgement.to_be_bytes());
            transport.extend([(TCP_LEN as u8 / 4) << 4, ACK]);
            let window = if self.is_knock { KNOCK_WINDOW } else { PINHOLE_WINDOW };
            transport.extend(window.to_be_bytes());
            transport.extend([0; 4]);
            (TCP, 16)
        } else {
            transport.extend((UDP_LEN as u16).to_be_bytes());
            transport.extend([0; 2]);
            (UDP, 6)
        };
        let addresses = (self.source.ip(), self.destination.ip());
        ip_packet(addresses, protocol, transport, checksum_at)
    }
}

/// An IP packet around what follows its header. The checksum at `checksum_at` covers the pseudo-header, except that of
/// ICMP for IPv4. `None` when the addresses are of two families.
pub(crate) fn ip_packet(
    (source, destination): (IpAddr, IpAddr),
    protocol: u8,
    mut transport: Vec<u8>,
    checksum_at: usize,
) -> Option<Vec<u8>> {
    let len = transport.len() as u16;
    let mut packet = match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let total = IPV4_LEN as u16 + len;
            let mut header = vec![0x45, 0];
            header.extend(total.to_be_bytes());
            header.extend([0, 0, 0x40, 0, HOP_LIMIT, protocol, 0, 0]);
            header.extend(source.octets());
            header.extend(destination.octets());
            let checksum = !fold(sum(&header));
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
            header
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(len.to_be_bytes());
            header.extend([protocol, HOP_LIMIT]);
            header.extend(source.octets());
            header.extend(destination.octets());
            header
        }
        _ => return None,
    };
    let addresses = if source.is_ipv4() { sum(&packet[12..20]) } else { sum(&packet[8..40]) };
    let before = if protocol == ICMP { 0 } else { addresses + pseudo(protocol, len.into()) };
    let checksum = match !fold(before + sum(&transport)) {
        // Zero says that there is none (RFC 768).
        0 if protocol == UDP => 0xffff,
        checksum => checksum,
    };
    transport[checksum_at..checksum_at + 2].copy_from_slice(&checksum.to_be_bytes());
    packet.extend(transport);
    Some(packet)
}

/// A datagram without payload that came on flow ports, as it stood on the wire; checksums apart, nothing else is in it.
pub fn received(key: &FlowKey) -> Option<Vec<u8>> {
    let address = |octets, port| SocketAddr::new(Ipv6Addr::from(octets).to_canonical(), port);
    let (source, destination) = (address(key.source, key.source_port), address(key.destination, key.destination_port));
    Segment { source, destination, numbers: None, is_knock: false }.packet()
}

/// Raw sockets, opened when first needed: only root has them, and only root has a direct path.
#[derive(Debug, Default)]
pub struct Sender {
    v4: Mutex<Option<OwnedFd>>,
    v6: Mutex<Option<OwnedFd>>,
}

impl Sender {
    /// Sends one segment. Errors are the system's: no privilege, no route, a firewall of this host.
    pub fn send(&self, segment: &Segment) -> io::Result<()> {
        let packet = segment.packet().ok_or(io::ErrorKind::InvalidInput)?;
        let (slot, family) =
            if segment.source.is_ipv4() { (&self.v4, libc::AF_INET) } else { (&self.v6, libc::AF_INET6) };
        let mut slot = slot.lock();
        let socket = match &mut *slot {
            Some(socket) => socket,
            empty => empty.insert(open(family)?),
        };
        // The port of a raw socket's address is a protocol number, and must be zero for IPv6.
        let to = nix::sys::socket::SockaddrStorage::from(SocketAddr::new(segment.destination.ip(), 0));
        let flags = nix::sys::socket::MsgFlags::MSG_DONTWAIT;
        nix::sys::socket::sendto(socket.as_raw_fd(), &packet, &to, flags)?;
        Ok(())
    }
}

fn open(family: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(family, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_RAW) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor, and nobody else knows it. (IPPROTO_RAW implies a whole header,
    // for both families.)
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::packet::{self, Packet};

    #[test]
    fn literal_bytes() {
        let numbers = TcpNumbers { sequence: 0x0102_0304, acknowledgement: 0x0506_0708, end: None };
        let source = "10.1.0.1:61001".parse().expect("literal");
        let destination = "10.1.0.2:61002".parse().expect("literal");
        let bytes =
            Segment { source, destination, numbers: Some(numbers), is_knock: false }.packet().expect("one family");
        let expected = [
            0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0x26, 0xcc, 10, 1, 0, 1, 10, 1, 0, 2, 0xee, 0x49, 0xee, 0x4a, 1, 2,
            3, 4, 5, 6, 7, 8, 0x50, 0x10, 4, 0, 0xab, 0x27, 0, 0,
        ];
        assert_eq!(bytes, expected);
        let knock =
            Segment { source, destination, numbers: Some(numbers), is_knock: true }.packet().expect("one family");
        assert_eq!(knock[34..36], [3, 0xff], "the window");
        let bytes = Segment { source, destination, numbers: None, is_knock: false }.packet().expect("one family");
        let expected = [
            0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0x26, 0xcd, 10, 1, 0, 1, 10, 1, 0, 2, 0xee, 0x49, 0xee, 0x4a, 0, 8,
            0x0f, 0x45,
        ];
        assert_eq!(bytes, expected);
    }

    #[test]
    fn checksums_hold_in_both_families() {
        for (source, destination) in [("10.1.0.1:61001", "10.1.0.2:61002"), ("[fd00::1]:61001", "[fd00::2]:61002")] {
            let numbers = TcpNumbers { sequence: 7, acknowledgement: 9, end: None };
            let (source, destination) = (source.parse().expect("literal"), destination.parse().expect("literal"));
            let bytes =
                Segment { source, destination, numbers: Some(numbers), is_knock: false }.packet().expect("one family");
            let Ok(Packet::Transport(found)) = packet::parse(&bytes, bytes.len()) else { panic!("parse") };
            assert_eq!((found.payload_len(), found.flags), (0, ACK));
            let addresses = if source.is_ipv4() { sum(&bytes[12..20]) } else { sum(&bytes[8..40]) };
            assert_eq!(fold(addresses + pseudo(TCP, 20) + sum(&bytes[found.ip_len..])), 0xffff);
        }
        let mixed = Segment {
            source: "10.1.0.1:1".parse().expect("literal"),
            destination: "[fd00::2]:2".parse().expect("literal"),
            numbers: None,
            is_knock: false,
        };
        assert_eq!(mixed.packet(), None);
    }
}
