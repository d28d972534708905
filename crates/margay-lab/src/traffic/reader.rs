//! Somebody on the path between a client and its instances: reads what grants say, which is in the clear, and asks
//! for connections by them in the client's name. IPv4 only. It works on the client's own host, where everything
//! passes.

use std::collections::{BTreeSet, HashMap};
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use margay_wire::{FlowId, GrantRepr, Kind, Message, PORT};
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use super::forger::raw_socket;
use crate::host::write_line;

/// `ETH_P_ALL`, in network byte order.
const EVERYTHING: i32 = 0x0003_u16.to_be() as i32;
/// How long after the instance's word its kernel may have the grant: it is asked each time.
const SETTLED_MS: [u64; 4] = [2, 10, 50, 250];
const READ_WAIT: Duration = Duration::from_millis(2);
/// Of each grant, its last flows: those that the client takes last.
const FLOWS: u16 = 8;
/// By which answers to the reader are told from others.
const SEQUENCE: u32 = 0x2bad_0001;
const IP_LEN: usize = 20;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SYN: u8 = 2;
const SYN_ACK: u8 = 0x12;
/// Kind and length of the option that a grant's SYN bears at its end.
const PROOF: [u8; 2] = [253, 12];

/// A flow of a grant that the reader wants: the client's end and the instance's.
type Wanted = (SocketAddrV4, SocketAddrV4);

/// What the reader has read.
#[derive(Default)]
struct Reader {
    /// What clients have asked for, by their number.
    asked: HashMap<FlowId, (Ipv4Addr, GrantRepr)>,
    /// Flows, and when to ask for them.
    wanted: Vec<(Instant, Wanted)>,
    grants: usize,
    /// The option of the client's own SYN that came last.
    proof: Option<Vec<u8>>,
    accepted: BTreeSet<SocketAddrV4>,
}

/// Reads and asks for so long. Prints how many grants it read, how many SYNs it sent, and how many flows it got.
///
/// # Errors
///
/// Not on a host of a lab.
pub fn read(time: Duration) -> Result<()> {
    let (sender, end, mut reader) = (raw_socket()?, Instant::now() + time, Reader::default());
    let tap = Socket::new(Domain::PACKET, Type::DGRAM, Some(Protocol::from(EVERYTHING))).context("no packet socket")?;
    tap.set_read_timeout(Some(READ_WAIT))?;
    tap.set_recv_buffer_size(8 << 20)?;
    let (mut packet, mut sent) = (vec![0; 1 << 16], 0_u64);
    while Instant::now() < end {
        match (&tap).read(&mut packet) {
            Ok(len) => reader.hear(&packet[..len]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error.into()),
        }
        let now = Instant::now();
        let (due, later) = reader.wanted.drain(..).partition(|(at, _)| *at <= now);
        reader.wanted = later;
        let due: Vec<(Instant, Wanted)> = due;
        for (_, (from, to)) in due {
            for options in [Some(Vec::new()), reader.proof.clone()].into_iter().flatten() {
                // The buffer may be full: what is not sent is not counted.
                sent += u64::from(sender.send_to(&syn(from, to, &options), &to.into()).is_ok());
            }
        }
    }
    let said = json!({"grants": reader.grants, "sent": sent, "accepted": reader.accepted.len()});
    write_line(&said.to_string())
}

impl Reader {
    fn hear(&mut self, packet: &[u8]) {
        if packet.len() < IP_LEN + 8 || packet[0] != 0x45 {
            return;
        }
        let address = |at: usize| Ipv4Addr::new(packet[at], packet[at + 1], packet[at + 2], packet[at + 3]);
        let port = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
        let (from, to) = (SocketAddrV4::new(address(12), port(20)), SocketAddrV4::new(address(16), port(22)));
        match packet[9] {
            UDP if to.port() == PORT => self.read_message(*from.ip(), &packet[IP_LEN + 8..]),
            TCP if packet.len() >= IP_LEN + 20 => self.read_segment(to, &packet[IP_LEN..]),
            _ => {}
        }
    }

    fn read_message(&mut self, from: Ipv4Addr, datagram: &[u8]) {
        let Ok(message) = Message::parse(datagram) else { return };
        let Some(grant) = message.grant() else { return };
        if message.kind == Kind::Syn {
            self.asked.insert(message.src_flow, (from, grant));
        } else if message.kind == Kind::SynAck
            && let Some((client, wanted)) = self.asked.remove(&message.dst_flow)
        {
            self.grants += 1;
            let count = grant.count.min(wanted.count);
            for flow in count.saturating_sub(FLOWS)..count {
                let ends = (SocketAddrV4::new(client, wanted.port + flow), SocketAddrV4::new(from, grant.port));
                self.wanted.extend(SETTLED_MS.map(|after_ms| (Instant::now() + Duration::from_millis(after_ms), ends)));
            }
        }
    }

    fn read_segment(&mut self, to: SocketAddrV4, segment: &[u8]) {
        let header_len = usize::from(segment[12] >> 4) * 4;
        if segment[13] == SYN && header_len >= 32 {
            let option = segment.get(header_len - 12..header_len).filter(|option| option.starts_with(&PROOF));
            self.proof = option.map(<[u8]>::to_vec).or(self.proof.take());
        } else if segment[13] & SYN_ACK == SYN_ACK && segment[8..12] == (SEQUENCE + 1).to_be_bytes() {
            self.accepted.insert(to);
        }
    }
}

/// The kernel fills in the IP checksum.
fn syn(from: SocketAddrV4, to: SocketAddrV4, options: &[u8]) -> Vec<u8> {
    let len = 20 + options.len();
    let mut packet = vec![0x45, 0];
    packet.extend(((IP_LEN + len) as u16).to_be_bytes());
    packet.extend([0, 0, 0x40, 0, 64, TCP, 0, 0]);
    packet.extend(from.ip().octets());
    packet.extend(to.ip().octets());
    packet.extend(from.port().to_be_bytes());
    packet.extend(to.port().to_be_bytes());
    packet.extend(SEQUENCE.to_be_bytes());
    packet.extend([0, 0, 0, 0, (len as u8 / 4) << 4, SYN, 0x20, 0, 0, 0, 0, 0]);
    packet.extend(options);
    let words = packet[12..].chunks(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])));
    let mut sum = words.sum::<u32>() + u32::from(TCP) + len as u32;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    packet[IP_LEN + 16..IP_LEN + 18].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    packet
}
