//! What forging takes: packets with any sender's address, and a capture of real ones to learn from. IPv4 only, by a raw
//! socket that takes the whole IP packet.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::Path;

use anyhow::{Context, Result, bail};
use margay_wire::PORT;
use socket2::{Domain, Protocol, Socket, Type};

use crate::pump::Dice;

/// Largest UDP payload of a link with an MTU of 1500.
pub const DATAGRAM_MAX: usize = 1472;
/// Headers before it.
pub const IP_UDP_LEN: usize = 28;
/// `IPPROTO_RAW`: the kernel takes our IP header.
const RAW: i32 = 255;

/// A real datagram, and who sent it.
pub struct Captured {
    /// Its sender's address.
    pub from: Ipv4Addr,
    /// The UDP payload.
    pub bytes: Vec<u8>,
}

/// A socket that sends whole IP packets.
///
/// # Errors
///
/// Not on a host of a lab.
pub fn raw_socket() -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(RAW)));
    let socket = socket.context("cannot open a raw socket; is this a host of a lab?")?;
    socket.set_send_buffer_size(4 << 20)?;
    Ok(socket)
}

/// IP and UDP headers before a datagram of this length. The kernel fills in the IP checksum; UDP goes without.
pub fn envelope(packet: &mut [u8], from: SocketAddrV4, to: Ipv4Addr, length: usize) {
    packet[..IP_UDP_LEN].fill(0);
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&((IP_UDP_LEN + length) as u16).to_be_bytes());
    packet[8] = 64;
    packet[9] = 17;
    packet[12..16].copy_from_slice(&from.ip().octets());
    packet[16..20].copy_from_slice(&to.octets());
    packet[20..22].copy_from_slice(&from.port().to_be_bytes());
    packet[22..24].copy_from_slice(&PORT.to_be_bytes());
    packet[24..26].copy_from_slice(&((8 + length) as u16).to_be_bytes());
}

/// Random bytes.
pub fn fill(dice: &mut Dice, bytes: &mut [u8]) {
    for chunk in bytes.chunks_mut(8) {
        let roll = dice.roll().to_le_bytes();
        chunk.copy_from_slice(&roll[..chunk.len()]);
    }
}

/// IP and TCP headers without options.
pub const SEGMENT_LEN: usize = 40;
const ETHERNET: usize = 14;

/// A TCP segment of IPv4, without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Source.
    pub from: SocketAddrV4,
    /// Destination.
    pub to: SocketAddrV4,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement number.
    pub acknowledged: u32,
    /// FIN is bit 0, SYN bit 1, RST bit 2, ACK bit 4.
    pub flags: u8,
    /// Bytes of data.
    pub length: u32,
}

/// The segment in a frame of Ethernet, if that is one.
pub fn frame_segment(frame: &[u8]) -> Option<Segment> {
    let packet = frame.get(ETHERNET..).filter(|_| frame.get(12..14) == Some(&[8, 0]))?;
    let (ip, tcp) = packet.split_at_checked(20)?;
    if ip[0] != 0x45 || ip[9] != 6 || tcp.len() < 20 {
        return None;
    }
    let word = |at: usize| u32::from_be_bytes([tcp[at], tcp[at + 1], tcp[at + 2], tcp[at + 3]]);
    let (source, destination) = ((word(0) >> 16) as u16, word(0) as u16);
    let address = |at: usize| Ipv4Addr::new(ip[at], ip[at + 1], ip[at + 2], ip[at + 3]);
    let headers = 20 + usize::from(tcp[12] >> 4) * 4;
    let whole = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
    Some(Segment {
        from: SocketAddrV4::new(address(12), source),
        to: SocketAddrV4::new(address(16), destination),
        sequence: word(4),
        acknowledged: word(8),
        flags: tcp[13],
        length: whole.saturating_sub(headers) as u32,
    })
}

/// Writes a segment without data, with its checksum; that of IP is filled in by the kernel.
pub fn write_segment(packet: &mut [u8; SEGMENT_LEN], segment: &Segment) {
    packet.fill(0);
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&(SEGMENT_LEN as u16).to_be_bytes());
    (packet[8], packet[9]) = (64, 6);
    packet[12..16].copy_from_slice(&segment.from.ip().octets());
    packet[16..20].copy_from_slice(&segment.to.ip().octets());
    packet[20..22].copy_from_slice(&segment.from.port().to_be_bytes());
    packet[22..24].copy_from_slice(&segment.to.port().to_be_bytes());
    packet[24..28].copy_from_slice(&segment.sequence.to_be_bytes());
    packet[28..32].copy_from_slice(&segment.acknowledged.to_be_bytes());
    (packet[32], packet[33]) = (5 << 4, segment.flags);
    packet[34..36].copy_from_slice(&u16::MAX.to_be_bytes());
    let words = packet[12..].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    // The pseudo-header's protocol and length; the addresses are among the words.
    let mut sum = words.sum::<u32>() + 6 + 20;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    packet[36..38].copy_from_slice(&(!(sum as u16)).to_be_bytes());
}

/// TCP segments in a pcap file with Ethernet frames, IPv4.
pub fn read_segments(path: &Path) -> Result<Vec<Segment>> {
    Ok(read_frames(path)?.iter().filter_map(|frame| frame_segment(frame)).collect())
}

/// UDP payloads to or from the SAL port in a pcap file with Ethernet frames, IPv4.
pub fn read_capture(path: &Path) -> Result<Vec<Captured>> {
    let mut captured = Vec::new();
    for frame in read_frames(path)? {
        let Some(packet) = frame.get(ETHERNET..).filter(|packet| packet.len() > IP_UDP_LEN && packet[0] == 0x45) else {
            continue;
        };
        let end = usize::from(u16::from_be_bytes([packet[2], packet[3]])).min(packet.len());
        // Super-packets of an offload are longer than any datagram on the wire.
        if let Some(bytes) = packet.get(IP_UDP_LEN..end).filter(|bytes| bytes.len() <= DATAGRAM_MAX) {
            let from = Ipv4Addr::new(packet[12], packet[13], packet[14], packet[15]);
            captured.push(Captured { from, bytes: bytes.to_vec() });
        }
    }
    Ok(captured)
}

/// The frames in a pcap file.
///
/// # Errors
///
/// It cannot be read, or is none of this machine.
pub fn read_frames(path: &Path) -> Result<Vec<Vec<u8>>> {
    const FILE_HEADER: usize = 24;
    const RECORD_HEADER: usize = 16;
    let file = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if file.get(..4) != Some(&0xa1b2_c3d4_u32.to_le_bytes()) {
        bail!("{} is no pcap file of this machine", path.display());
    }
    let mut rest = &file[FILE_HEADER.min(file.len())..];
    let mut frames = Vec::new();
    while rest.len() > RECORD_HEADER {
        let mut length = [0; 4];
        length.copy_from_slice(&rest[8..12]);
        let Some(frame) = rest.get(RECORD_HEADER..RECORD_HEADER + u32::from_le_bytes(length) as usize) else { break };
        rest = &rest[RECORD_HEADER + frame.len()..];
        frames.push(frame.to_vec());
    }
    Ok(frames)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_that_is_written_is_read_again_and_its_checksum_is_right() {
        let segment = Segment {
            from: SocketAddrV4::new(Ipv4Addr::new(10, 1, 0, 2), 61_001),
            to: SocketAddrV4::new(Ipv4Addr::new(10, 3, 0, 4), 65_000),
            sequence: 0xdead_beef,
            acknowledged: 7,
            flags: 0x14,
            length: 0,
        };
        let mut packet = [0; SEGMENT_LEN];
        write_segment(&mut packet, &segment);
        let frame = [&[0; 12][..], &[8, 0], &packet].concat();
        assert_eq!(frame_segment(&frame), Some(segment));
        let words = packet[12..].chunks(2).map(|pair| u64::from(pair[0]) << 8 | u64::from(pair[1]));
        assert_eq!((words.sum::<u64>() + 6 + 20) % 0xffff, 0, "RFC 9293 section 3.1");
    }
}
