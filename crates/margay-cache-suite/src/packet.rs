//! IPv4 packets of programs and of their peers, by what a flow cache looks at.

use std::net::SocketAddr;

use margay_core::Tuple;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{IpAddress, IpProtocol, Ipv4Packet, Ipv4Repr, TcpPacket, TcpSeqNumber, UdpPacket};

/// IANA's number of TCP.
pub const TCP: u8 = 6;
/// IANA's number of UDP.
pub const UDP: u8 = 17;
/// Flags of a TCP segment (RFC 9293 §3.1).
pub const FIN: u8 = 0x01;
/// See [`FIN`].
pub const SYN: u8 = 0x02;
/// See [`FIN`].
pub const RST: u8 = 0x04;
/// See [`FIN`].
pub const PSH: u8 = 0x08;
/// See [`FIN`].
pub const ACK: u8 = 0x10;

const TCP_LEN: usize = 20;
const UDP_LEN: usize = 8;
/// Of every segment; no pinhole has it.
const WINDOW: u16 = 20_000;
/// Every byte of a payload.
const FILL: u8 = 7;

/// What a packet shows beside its five-tuple. Of a datagram the length alone counts; the rest is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement; zero without ACK.
    pub acknowledgement: u32,
    /// FIN, SYN, RST, PSH and ACK.
    pub flags: u8,
    /// Bytes of payload.
    pub len: usize,
}

/// The IPv4 packet of this five-tuple with its checksums.
///
/// # Panics
///
/// The five-tuple is none of IPv4.
pub fn emit(tuple: &Tuple, numbers: Numbers) -> Vec<u8> {
    let (SocketAddr::V4(source), SocketAddr::V4(destination)) = (tuple.source, tuple.destination) else {
        panic!("cases are of IPv4: {tuple}");
    };
    let ends = [IpAddress::from(*source.ip()), IpAddress::from(*destination.ip())];
    let is_tcp = tuple.protocol == TCP;
    let header_len = if is_tcp { TCP_LEN } else { UDP_LEN };
    let ip = Ipv4Repr {
        src_addr: *source.ip(),
        dst_addr: *destination.ip(),
        next_header: if is_tcp { IpProtocol::Tcp } else { IpProtocol::Udp },
        payload_len: header_len + numbers.len,
        hop_limit: 64,
    };
    let mut packet = vec![FILL; ip.buffer_len() + ip.payload_len];
    packet[..ip.buffer_len() + header_len].fill(0);
    ip.emit(&mut Ipv4Packet::new_unchecked(&mut packet), &ChecksumCapabilities::default());
    let transport = &mut packet[ip.buffer_len()..];
    if is_tcp {
        let mut tcp = TcpPacket::new_unchecked(transport);
        tcp.set_src_port(source.port());
        tcp.set_dst_port(destination.port());
        tcp.set_seq_number(TcpSeqNumber(numbers.sequence.cast_signed()));
        tcp.set_ack_number(TcpSeqNumber(numbers.acknowledgement.cast_signed()));
        tcp.set_header_len(TCP_LEN as u8);
        tcp.set_fin(numbers.flags & FIN != 0);
        tcp.set_syn(numbers.flags & SYN != 0);
        tcp.set_rst(numbers.flags & RST != 0);
        tcp.set_psh(numbers.flags & PSH != 0);
        tcp.set_ack(numbers.flags & ACK != 0);
        tcp.set_window_len(WINDOW);
        tcp.fill_checksum(&ends[0], &ends[1]);
    } else {
        let mut udp = UdpPacket::new_unchecked(transport);
        udp.set_src_port(source.port());
        udp.set_dst_port(destination.port());
        udp.set_len((UDP_LEN + numbers.len) as u16);
        udp.fill_checksum(&ends[0], &ends[1]);
    }
    packet
}

/// The five-tuple and numbers of an IPv4 packet. Checksums are not looked at: the simulator has none.
///
/// # Panics
///
/// It is no whole packet of TCP or UDP.
pub fn read(packet: &[u8]) -> (Tuple, Numbers) {
    let ip = Ipv4Packet::new_checked(packet).expect("a whole packet of IPv4");
    let end = |address, port| SocketAddr::new(IpAddress::from(address).into(), port);
    let transport = ip.payload();
    match ip.next_header() {
        IpProtocol::Tcp => {
            let tcp = TcpPacket::new_checked(transport).expect("a whole segment");
            let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
            let flags = flag(tcp.fin(), FIN)
                | flag(tcp.syn(), SYN)
                | flag(tcp.rst(), RST)
                | flag(tcp.psh(), PSH)
                | flag(tcp.ack(), ACK);
            let numbers = Numbers {
                sequence: tcp.seq_number().0.cast_unsigned(),
                acknowledgement: tcp.ack_number().0.cast_unsigned(),
                flags,
                len: tcp.payload().len(),
            };
            let source = end(ip.src_addr(), tcp.src_port());
            let destination = end(ip.dst_addr(), tcp.dst_port());
            (Tuple { protocol: TCP, source, destination }, numbers)
        }
        IpProtocol::Udp => {
            let udp = UdpPacket::new_checked(transport).expect("a whole datagram");
            let source = end(ip.src_addr(), udp.src_port());
            let destination = end(ip.dst_addr(), udp.dst_port());
            let numbers = Numbers { len: udp.payload().len(), ..Numbers::default() };
            (Tuple { protocol: UDP, source, destination }, numbers)
        }
        other => panic!("protocol {other}"),
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::application;

    #[test]
    fn what_is_written_is_read() {
        for protocol in [TCP, UDP] {
            let tuple = application(protocol, 1000);
            let numbers = match protocol {
                TCP => Numbers { sequence: u32::MAX, acknowledgement: 7, flags: FIN | ACK, len: 3 },
                _ => Numbers { len: 3, ..Numbers::default() },
            };
            assert_eq!(read(&emit(&tuple, numbers)), (tuple, numbers));
        }
    }
}
