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

/// UDP payloads to or from the SAL port in a pcap file with Ethernet frames, IPv4.
pub fn read_capture(path: &Path) -> Result<Vec<Captured>> {
    const FILE_HEADER: usize = 24;
    const RECORD_HEADER: usize = 16;
    const ETHERNET: usize = 14;
    let file = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if file.get(..4) != Some(&0xa1b2_c3d4_u32.to_le_bytes()) {
        bail!("{} is no pcap file of this machine", path.display());
    }
    let mut rest = &file[FILE_HEADER.min(file.len())..];
    let mut captured = Vec::new();
    while rest.len() > RECORD_HEADER {
        let mut length = [0; 4];
        length.copy_from_slice(&rest[8..12]);
        let Some(frame) = rest.get(RECORD_HEADER..RECORD_HEADER + u32::from_le_bytes(length) as usize) else { break };
        rest = &rest[RECORD_HEADER + frame.len()..];
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
