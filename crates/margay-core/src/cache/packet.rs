//! The applications' own IP packets, as far as the core must read, readdress and answer them.
//!
//! Only first packets and resets come through here; established data is rewritten by the flow cache. Checksums of what
//! comes in may be partial (segmentation offload); what goes out always carries complete ones.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    Icmpv4DstUnreachable, Icmpv4Packet, Icmpv4Repr, Icmpv6DstUnreachable, Icmpv6Packet, Icmpv6Repr, IpAddress,
    IpProtocol, Ipv4Packet, Ipv4Repr, Ipv6Packet, Ipv6Repr, TcpPacket, UdpPacket,
};

use crate::types::drop_reason::DropReason;
use crate::types::tuple::Tuple;

/// TCP flag bits, as byte 13 of the header has them.
pub mod tcp_flags {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset.
    pub const RST: u8 = 0x04;
    /// The acknowledgement number counts.
    pub const ACK: u8 = 0x10;
}

/// The window of a pinhole that answers none. Others have another one, so that who hears it knows that nothing of its
/// own has come through. Of the order of theirs, as a program may be given it.
pub const KNOCK_WINDOW: u16 = 0x03ff;
/// Hop limit of a packet that has come in by `sal0`, and leaves by it. First packets that middleboxes are given have
/// it, too: one that sends such a packet on by a packet socket, past nftables, leaves it as it is.
pub const FORWARDED_HOP_LIMIT: u8 = 254;
/// Hop limit of a packet that leaves by `sal0` and was not sent by a socket of this host under the socket's own
/// address. It comes from another network namespace or machine, where NAT may have given it the address of any socket
/// of this host.
pub const OUTSIDE_HOP_LIMIT: u8 = 253;
/// Window of every other pinhole of a TCP flow. A guess: the TCP of a connection that is open is given the segment, as
/// an acknowledgement; any other is not.
pub const PINHOLE_WINDOW: u16 = 0x0400;

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const TCP_OPTION_END: u8 = 0;
const TCP_OPTION_NOP: u8 = 1;
const TCP_OPTION_MSS: u8 = 2;
const TCP_OPTION_MD5: u8 = 19;
const TCP_OPTION_AO: u8 = 29;
const UDP_HEADER_LEN: usize = 8;
/// Without options.
pub(crate) const TCP_HEADER_LEN: usize = 20;
const TTL: u8 = 64;

/// A parsed packet: borrowed transport bytes and where they were going.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppPacket<'a> {
    pub tuple: Tuple,
    pub transport: &'a [u8],
    /// Traffic class or TOS, carried over unchanged.
    pub class: u8,
    pub hop_limit: u8,
    pub whole: &'a [u8],
}

/// What a packet is to the core.
#[derive(Debug)]
pub(crate) enum Parsed<'a> {
    Transport(AppPacket<'a>),
    /// An ICMP error of the local stack about a packet that it was given: the quoted tuple as the application's *peer*
    /// sent it.
    IcmpError {
        quoted: Tuple,
        port_unreachable: bool,
        from_outside: bool,
    },
    /// Anything else: source, destination and the whole packet, so that it can be answered.
    Other {
        source: IpAddr,
        destination: IpAddr,
        echo: bool,
    },
}

impl<'a> AppPacket<'a> {
    /// TCP flags, 0 for other protocols.
    pub fn tcp_flags(&self) -> u8 {
        if self.tuple.protocol == TCP { self.transport.get(13).copied().unwrap_or(0) } else { 0 }
    }

    /// TCP's sequence and acknowledgement numbers. `None` for other protocols.
    pub fn tcp_numbers(&self) -> Option<(u32, u32)> {
        let number = |at: usize| {
            let bytes = self.transport.get(at..at + 4)?;
            Some(bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)))
        };
        if self.is_tcp() { number(4).zip(number(8)) } else { None }
    }

    /// Whether it is a pinhole that answers none.
    pub fn is_knock(&self) -> bool {
        self.has_window(KNOCK_WINDOW)
    }

    /// Whether an agent has made it, and not the TCP of a program: a bare segment with a window of pinholes and without
    /// options. A TCP that uses no options may happen to send such an acknowledgement; it sends it again when it is
    /// asked.
    pub fn is_pinhole(&self) -> bool {
        let has_options = self.transport.len() != TCP_HEADER_LEN;
        self.is_bare() && !has_options && (self.has_window(PINHOLE_WINDOW) || self.has_window(KNOCK_WINDOW))
    }

    fn has_window(&self, window: u16) -> bool {
        self.is_tcp() && self.transport.get(14..16) == Some(&window.to_be_bytes())
    }

    pub fn is_tcp(&self) -> bool {
        self.tuple.protocol == TCP
    }

    /// Whether it has passed a middlebox, and was not made by a socket of this host.
    pub const fn is_forwarded(&self) -> bool {
        self.hop_limit == FORWARDED_HOP_LIMIT
    }

    /// Whether it is no packet of a socket of this host, whatever its five-tuple says.
    pub const fn is_from_outside(&self) -> bool {
        self.hop_limit == OUTSIDE_HOP_LIMIT
    }

    /// A TCP segment that only acknowledges: no data, and neither SYN, FIN nor RST. Or a datagram without payload.
    pub fn is_bare(&self) -> bool {
        if !self.is_tcp() {
            return self.transport.len() == UDP_HEADER_LEN;
        }
        let header_len = self.transport.get(12).map_or(0, |byte| usize::from(byte >> 4) * 4);
        let marks = tcp_flags::SYN | tcp_flags::FIN | tcp_flags::RST;
        self.transport.len() == header_len && self.tcp_flags() & marks == 0
    }

    /// Whether this opens a TCP connection: SYN without ACK.
    pub fn is_tcp_syn(&self) -> bool {
        self.is_tcp() && self.tcp_flags() & (tcp_flags::SYN | tcp_flags::ACK | tcp_flags::RST) == tcp_flags::SYN
    }

    pub fn is_tcp_syn_ack(&self) -> bool {
        let both = tcp_flags::SYN | tcp_flags::ACK;
        self.is_tcp() && self.tcp_flags() & (both | tcp_flags::RST) == both
    }

    /// Whether the segment is signed over its addresses (RFC 2385, RFC 5925), which rewriting breaks.
    pub fn is_signed_tcp(&self) -> bool {
        self.is_tcp() && tcp_options(self.transport).any(|(kind, _, _)| kind == TCP_OPTION_MD5 || kind == TCP_OPTION_AO)
    }
}

/// Reads an IP packet. Fragments are refused: the datapath puts them together first.
pub(crate) fn parse(packet: &[u8]) -> Result<Parsed<'_>, DropReason> {
    match packet.first().map(|byte| byte >> 4) {
        Some(4) => parse_v4(packet),
        Some(6) => parse_v6(packet),
        _ => Err(DropReason::Malformed),
    }
}

fn parse_v4(packet: &[u8]) -> Result<Parsed<'_>, DropReason> {
    let ip = Ipv4Packet::new_checked(packet).map_err(|_| DropReason::Malformed)?;
    if ip.more_frags() || ip.frag_offset() != 0 {
        return Err(DropReason::Incomplete);
    }
    let (start, end) = (usize::from(ip.header_len()), usize::from(ip.total_len()));
    let body = packet.get(start..end).ok_or(DropReason::Malformed)?;
    let (source, destination) = (IpAddr::V4(ip.src_addr()), IpAddr::V4(ip.dst_addr()));
    let class = packet.get(1).copied().unwrap_or(0);
    classify(packet, body, u8::from(ip.next_header()), source, destination, (class, ip.hop_limit()))
}

fn parse_v6(packet: &[u8]) -> Result<Parsed<'_>, DropReason> {
    let ip = Ipv6Packet::new_checked(packet).map_err(|_| DropReason::Malformed)?;
    let end = 40 + usize::from(ip.payload_len());
    let body = packet.get(40..end).ok_or(DropReason::Malformed)?;
    let (source, destination) = (IpAddr::V6(ip.src_addr()), IpAddr::V6(ip.dst_addr()));
    classify(packet, body, u8::from(ip.next_header()), source, destination, (ip.traffic_class(), ip.hop_limit()))
}

fn classify<'a>(
    whole: &'a [u8],
    body: &'a [u8],
    protocol: u8,
    source: IpAddr,
    destination: IpAddr,
    (class, hop_limit): (u8, u8),
) -> Result<Parsed<'a>, DropReason> {
    match protocol {
        TCP | UDP => {
            let minimum = if protocol == TCP { 20 } else { 8 };
            if body.len() < minimum || (protocol == TCP && usize::from(body[12] >> 4) * 4 > body.len()) {
                return Err(DropReason::Malformed);
            }
            let port = |at: usize| u16::from_be_bytes([body[at], body[at + 1]]);
            let tuple = Tuple {
                protocol,
                source: SocketAddr::new(source, port(0)),
                destination: SocketAddr::new(destination, port(2)),
            };
            Ok(Parsed::Transport(AppPacket { tuple, transport: body, class, hop_limit, whole }))
        }
        ICMP | ICMPV6 => Ok(parse_icmp(body, protocol, (source, destination), hop_limit)),
        _ => Ok(Parsed::Other { source, destination, echo: false }),
    }
}

fn parse_icmp(body: &[u8], protocol: u8, (source, destination): (IpAddr, IpAddr), hop_limit: u8) -> Parsed<'_> {
    let (kind, code) = (body.first().copied().unwrap_or(0), body.get(1).copied().unwrap_or(0));
    let is_error = if protocol == ICMP { matches!(kind, 3 | 11 | 12) } else { (1..=4).contains(&kind) };
    let port_unreachable = if protocol == ICMP { (kind, code) == (3, 3) } else { (kind, code) == (1, 4) };
    if is_error && let Some(quoted) = body.get(8..).and_then(quoted_tuple) {
        return Parsed::IcmpError { quoted, port_unreachable, from_outside: hop_limit == OUTSIDE_HOP_LIMIT };
    }
    let echo = if protocol == ICMP { kind == 8 } else { kind == 128 };
    Parsed::Other { source, destination, echo }
}

/// The tuple of a quoted packet, of which RFC 792 promises only eight transport bytes.
fn quoted_tuple(quoted: &[u8]) -> Option<Tuple> {
    let (source, destination, protocol, at) = match quoted.first()? >> 4 {
        4 => {
            let octets = |at: usize| -> Option<[u8; 4]> { quoted.get(at..at + 4)?.try_into().ok() };
            (IpAddr::from(octets(12)?), IpAddr::from(octets(16)?), *quoted.get(9)?, usize::from(quoted[0] & 15) * 4)
        }
        6 => {
            let octets = |at: usize| -> Option<[u8; 16]> { quoted.get(at..at + 16)?.try_into().ok() };
            (IpAddr::from(octets(8)?), IpAddr::from(octets(24)?), *quoted.get(6)?, 40)
        }
        _ => return None,
    };
    let port = |at: usize| Some(u16::from_be_bytes([*quoted.get(at)?, *quoted.get(at + 1)?]));
    Some(Tuple {
        protocol,
        source: SocketAddr::new(source, port(at)?),
        destination: SocketAddr::new(destination, port(at + 2)?),
    })
}

/// (kind, offset of the option, length) of each TCP option; stops at the first malformed one.
pub(crate) fn tcp_options(transport: &[u8]) -> impl Iterator<Item = (u8, usize, usize)> + '_ {
    let end = (usize::from(transport.get(12).copied().unwrap_or(0) >> 4) * 4).min(transport.len());
    let mut at = 20;
    core::iter::from_fn(move || {
        while at < end && transport[at] == TCP_OPTION_NOP {
            at += 1;
        }
        if at >= end || transport[at] == TCP_OPTION_END {
            return None;
        }
        let len = usize::from(*transport.get(at + 1)?);
        if len < 2 || at + len > end {
            return None;
        }
        let option = (transport[at], at, len);
        at += len;
        Some(option)
    })
}

/// Lowers the MSS option of a SYN to `mss_max` bytes where it is larger (DESIGN §7, MTU).
fn clamp_mss(transport: &mut [u8], mss_max: u16) {
    let found = tcp_options(transport).find(|(kind, _, len)| *kind == TCP_OPTION_MSS && *len == 4);
    if let Some((_, at, _)) = found {
        let mss = u16::from_be_bytes([transport[at + 2], transport[at + 3]]);
        transport[at + 2..at + 4].copy_from_slice(&mss.min(mss_max).to_be_bytes());
    }
}

/// The packet readdressed to `tuple`, possibly of the other family, with complete checksums. A SYN's MSS is held to
/// `mss_max`. `None` when the addresses of `tuple` are of two families or the packet would not fit its length field.
pub(crate) fn readdress(packet: &AppPacket<'_>, tuple: &Tuple, mss_max: u16) -> Option<Vec<u8>> {
    let mut transport = packet.transport.to_vec();
    transport[0..2].copy_from_slice(&tuple.source.port().to_be_bytes());
    transport[2..4].copy_from_slice(&tuple.destination.port().to_be_bytes());
    if packet.tcp_flags() & tcp_flags::SYN != 0 {
        clamp_mss(&mut transport, mss_max);
    }
    build(tuple, transport, packet.class, packet.hop_limit.max(2))
}

/// A TCP segment without its data, which its sender will say again: what is inside a SYN is for everybody to read.
pub(crate) fn without_data(packet: &AppPacket<'_>) -> Option<Vec<u8>> {
    let header_len = usize::from(packet.transport.get(12)? >> 4) * 4;
    build(&packet.tuple, packet.transport.get(..header_len)?.to_vec(), packet.class, packet.hop_limit)
}

/// An IP packet of `tuple` around `transport`, whose checksum is computed here.
pub(crate) fn build(tuple: &Tuple, mut transport: Vec<u8>, class: u8, hop_limit: u8) -> Option<Vec<u8>> {
    let (source, destination) = (tuple.source.ip(), tuple.destination.ip());
    fill_transport_checksum(tuple.protocol, &mut transport, source, destination);
    let mut packet = ip_header(source, destination, tuple.protocol, transport.len(), hop_limit)?;
    match packet[0] >> 4 {
        4 => {
            packet[1] = class;
            Ipv4Packet::new_unchecked(&mut packet[..]).fill_checksum();
        }
        _ => Ipv6Packet::new_unchecked(&mut packet[..]).set_traffic_class(class),
    }
    packet.extend_from_slice(&transport);
    Some(packet)
}

/// Whether a whole IP packet is none of a socket of this host, whatever its five-tuple says.
pub(crate) fn is_from_outside(packet: &[u8]) -> bool {
    matches!(parse(packet), Ok(Parsed::Transport(packet)) if packet.is_from_outside())
}

/// Gives a whole IP packet another hop limit. What is none stays as it is.
pub(crate) fn set_hop_limit(packet: &mut [u8], hop_limit: u8) {
    match packet.first().map(|byte| byte >> 4) {
        Some(4) => {
            if let Ok(mut v4) = Ipv4Packet::new_checked(packet) {
                v4.set_hop_limit(hop_limit);
                v4.fill_checksum();
            }
        }
        Some(6) => {
            if let Ok(mut v6) = Ipv6Packet::new_checked(packet) {
                v6.set_hop_limit(hop_limit);
            }
        }
        _ => {}
    }
}

fn ip_header(source: IpAddr, destination: IpAddr, protocol: u8, len: usize, hop_limit: u8) -> Option<Vec<u8>> {
    match (source, destination) {
        (IpAddr::V4(src_addr), IpAddr::V4(dst_addr)) if len + 20 <= 65_535 => {
            let mut header = alloc::vec![0; 20];
            let repr =
                Ipv4Repr { src_addr, dst_addr, next_header: IpProtocol::from(protocol), payload_len: len, hop_limit };
            repr.emit(&mut Ipv4Packet::new_unchecked(&mut header[..]), &ChecksumCapabilities::default());
            Some(header)
        }
        (IpAddr::V6(src_addr), IpAddr::V6(dst_addr)) if len <= 65_535 => {
            let mut header = alloc::vec![0; 40];
            let repr =
                Ipv6Repr { src_addr, dst_addr, next_header: IpProtocol::from(protocol), payload_len: len, hop_limit };
            repr.emit(&mut Ipv6Packet::new_unchecked(&mut header[..]));
            Some(header)
        }
        _ => None,
    }
}

fn fill_transport_checksum(protocol: u8, transport: &mut [u8], source: IpAddr, destination: IpAddr) {
    let (source, destination) = (IpAddress::from(source), IpAddress::from(destination));
    match protocol {
        TCP => TcpPacket::new_unchecked(transport).fill_checksum(&source, &destination),
        _ => UdpPacket::new_unchecked(transport).fill_checksum(&source, &destination),
    }
}

/// The RST that refuses or ends the connection of `packet`, as its peer would send it (RFC 9293 §3.10.7.1).
/// `None` for a RST, which is never answered, and for other protocols.
pub(crate) fn reset_for(packet: &AppPacket<'_>) -> Option<Vec<u8>> {
    let flags = packet.tcp_flags();
    let (packet_sequence, packet_acknowledgement) = packet.tcp_numbers()?;
    if flags & tcp_flags::RST != 0 {
        return None;
    }
    let header_len = usize::from(packet.transport[12] >> 4) * 4;
    let (sequence, acknowledgement, out_flags) = if flags & tcp_flags::ACK != 0 {
        (packet_acknowledgement, 0, tcp_flags::RST)
    } else {
        let phantom = u32::from(flags & tcp_flags::SYN != 0) + u32::from(flags & tcp_flags::FIN != 0);
        let len = u32::try_from(packet.transport.len() - header_len).unwrap_or(0);
        (0, packet_sequence.wrapping_add(len).wrapping_add(phantom), tcp_flags::RST | tcp_flags::ACK)
    };
    segment(&packet.tuple.reversed(), sequence, acknowledgement, out_flags)
}

/// A bare ACK that fits no window: it makes a live TCP answer with its true numbers (RFC 9293 §3.10.7.4), from which
/// [`reset_for`] then builds the exact RST that RFC 5961 asks for.
pub(crate) fn stale_ack(to_app: &Tuple) -> Option<Vec<u8>> {
    segment(to_app, 0, 0, tcp_flags::ACK)
}

fn segment(tuple: &Tuple, sequence: u32, acknowledgement: u32, flags: u8) -> Option<Vec<u8>> {
    let mut transport = alloc::vec![0; 20];
    transport[0..2].copy_from_slice(&tuple.source.port().to_be_bytes());
    transport[2..4].copy_from_slice(&tuple.destination.port().to_be_bytes());
    transport[4..8].copy_from_slice(&sequence.to_be_bytes());
    transport[8..12].copy_from_slice(&acknowledgement.to_be_bytes());
    transport[12] = 5 << 4;
    transport[13] = flags;
    build(tuple, transport, 0, TTL)
}

/// Why an ICMP "destination unreachable" is sent to the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreachable {
    Port,
    Host,
    Prohibited,
}

/// The ICMP error about `packet`, as if from its destination. Quotes no more than 512 bytes.
pub(crate) fn unreachable_for(packet: &[u8], source: IpAddr, destination: IpAddr, why: Unreachable) -> Option<Vec<u8>> {
    let checksums = ChecksumCapabilities::default();
    match (source, destination) {
        (IpAddr::V4(app), IpAddr::V4(peer)) => {
            let quoted = Ipv4Packet::new_checked(packet).ok()?;
            let header_len = usize::from(quoted.header_len());
            let header = Ipv4Repr::parse(&quoted, &ChecksumCapabilities::ignored()).ok()?;
            let reason = match why {
                Unreachable::Port => Icmpv4DstUnreachable::PortUnreachable,
                Unreachable::Host => Icmpv4DstUnreachable::HostUnreachable,
                Unreachable::Prohibited => Icmpv4DstUnreachable::CommProhibited,
            };
            let data = packet.get(header_len..)?;
            let repr = Icmpv4Repr::DstUnreachable { reason, header, data: &data[..data.len().min(512)] };
            let mut out = ip_header(peer.into(), app.into(), ICMP, repr.buffer_len(), TTL)?;
            let start = out.len();
            out.resize(start + repr.buffer_len(), 0);
            repr.emit(&mut Icmpv4Packet::new_unchecked(&mut out[start..]), &checksums);
            Some(out)
        }
        (IpAddr::V6(app), IpAddr::V6(peer)) => {
            let quoted = Ipv6Packet::new_checked(packet).ok()?;
            let header = Ipv6Repr::parse(&quoted).ok()?;
            let reason = match why {
                Unreachable::Port => Icmpv6DstUnreachable::PortUnreachable,
                Unreachable::Host => Icmpv6DstUnreachable::AddrUnreachable,
                Unreachable::Prohibited => Icmpv6DstUnreachable::AdminProhibit,
            };
            let data = packet.get(40..)?;
            let repr = Icmpv6Repr::DstUnreachable { reason, header, data: &data[..data.len().min(512)] };
            let mut out = ip_header(peer.into(), app.into(), ICMPV6, repr.buffer_len(), TTL)?;
            let start = out.len();
            out.resize(start + repr.buffer_len(), 0);
            repr.emit(&peer, &app, &mut Icmpv6Packet::new_unchecked(&mut out[start..]), &checksums);
            Some(out)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn syn(mss: u16) -> Vec<u8> {
        let mut transport = alloc::vec![0; 24];
        transport[0..2].copy_from_slice(&40_000_u16.to_be_bytes());
        transport[2..4].copy_from_slice(&80_u16.to_be_bytes());
        transport[4..8].copy_from_slice(&7_u32.to_be_bytes());
        transport[12] = 6 << 4;
        transport[13] = tcp_flags::SYN;
        transport[20..22].copy_from_slice(&[TCP_OPTION_MSS, 4]);
        transport[22..24].copy_from_slice(&mss.to_be_bytes());
        build(&tuple(), transport, 0, TTL).expect("one family")
    }

    fn tuple() -> Tuple {
        Tuple {
            protocol: TCP,
            source: "198.18.0.1:40000".parse().expect("literal"),
            destination: "198.18.1.1:80".parse().expect("literal"),
        }
    }

    fn transport(packet: &[u8]) -> AppPacket<'_> {
        match parse(packet) {
            Ok(Parsed::Transport(packet)) => packet,
            other => panic!("not a transport packet: {other:?}"),
        }
    }

    fn checksums_hold(packet: &[u8]) -> bool {
        let parsed = transport(packet);
        let (source, destination) = (parsed.tuple.source.ip().into(), parsed.tuple.destination.ip().into());
        let header = packet[0] >> 4 == 6 || Ipv4Packet::new_unchecked(packet).verify_checksum();
        header && TcpPacket::new_unchecked(parsed.transport).verify_checksum(&source, &destination)
    }

    #[test]
    fn a_syn_is_read_and_readdressed_across_families_with_its_mss_held() {
        let packet = syn(1460);
        let parsed = transport(&packet);
        assert_eq!(parsed.tuple, tuple());
        assert!(parsed.is_tcp_syn() && !parsed.is_tcp_syn_ack());
        let target = Tuple {
            protocol: TCP,
            source: "[fd00::5]:1234".parse().expect("literal"),
            destination: "[fd5a:4c00::1]:8080".parse().expect("literal"),
        };
        let out = readdress(&parsed, &target, 1388).expect("one family");
        assert!(checksums_hold(&out));
        let seen = transport(&out);
        assert_eq!(seen.tuple, target);
        assert_eq!(seen.transport[22..24], 1388_u16.to_be_bytes());
    }

    #[test]
    fn a_syn_is_refused_with_the_reset_that_rfc_9293_asks_for() {
        let packet = syn(1460);
        let reset = reset_for(&transport(&packet)).expect("a SYN can be refused");
        let seen = transport(&reset);
        assert!(checksums_hold(&reset));
        assert_eq!(seen.tuple, tuple().reversed());
        assert_eq!(seen.tcp_flags(), tcp_flags::RST | tcp_flags::ACK);
        assert_eq!(seen.transport[8..12], 8_u32.to_be_bytes());
        assert!(reset_for(&seen).is_none(), "a RST is never answered");
    }

    #[test]
    fn an_unreachable_error_quotes_the_packet() {
        let packet = syn(1460);
        let parsed = transport(&packet);
        let (app, peer) = (parsed.tuple.source.ip(), parsed.tuple.destination.ip());
        let error = unreachable_for(&packet, app, peer, Unreachable::Port).expect("one family");
        match parse(&error) {
            Ok(Parsed::IcmpError { quoted, port_unreachable, from_outside }) => {
                assert_eq!(quoted, tuple());
                assert!(port_unreachable && !from_outside);
            }
            other => panic!("not an error: {other:?}"),
        }
    }

    #[test]
    fn signed_tcp_is_recognised_and_garbage_options_end_the_walk() {
        let mut packet = syn(1460);
        packet[40] = TCP_OPTION_MD5;
        assert!(transport(&packet).is_signed_tcp());
        packet[41] = 0;
        assert!(!transport(&packet).is_signed_tcp());
    }
}
