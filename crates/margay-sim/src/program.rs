//! Programs on simulated hosts: a TCP of three states, just enough to connect, ask once, be answered and close.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::delta::Delta;
use margay_core::{Instant, Tuple};

pub(crate) const FIN: u8 = 1;
pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const ACK: u8 = 16;

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
const RETRY: Duration = Duration::from_millis(300);
const GIVE_UP: Duration = Duration::from_secs(20);

/// How a client's attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// Still trying.
    Pending,
    /// Answered by the server with this number.
    Answered(u32),
    /// Refused: RST or ICMP, before it was connected.
    Refused,
    /// Connected, then reset.
    Reset,
    /// The program's own patience ran out.
    TimedOut,
}

/// One TCP segment, as the programs see it, or a datagram, which has neither numbers nor flags.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub tuple: Tuple,
    pub sequence: u32,
    pub acknowledgement: u32,
    pub flags: u8,
    pub data: Vec<u8>,
    /// Of a SYN that takes a flow of a grant.
    pub proof: Option<u64>,
    /// Of a SYN inside the host of a box that changes addresses.
    pub tag: Option<u32>,
}

/// The head of the option that a proof is in, and all of its bytes.
const PROOF: [u8; 4] = [253, 12, b'M', b'G'];
const PROOF_LEN: usize = 12;
/// The same of a tag.
const TAG: [u8; 4] = [253, 8, b'M', b'G'];
const TAG_LEN: usize = 8;

impl Segment {
    pub fn emit(&self) -> Vec<u8> {
        let mut packet = Vec::new();
        let is_datagram = self.tuple.protocol == UDP;
        let of_proof = self.proof.map_or(0, |_| PROOF_LEN);
        let header_len = 20 + self.tag.map_or(0, |_| TAG_LEN) + of_proof;
        let len = if is_datagram { 8 } else { header_len } + self.data.len();
        match (self.tuple.source, self.tuple.destination) {
            (SocketAddr::V4(source), SocketAddr::V4(destination)) => {
                packet.extend_from_slice(&[0x45, 0]);
                packet.extend_from_slice(&(20 + len as u16).to_be_bytes());
                packet.extend_from_slice(&[0, 0, 0x40, 0, 64, self.tuple.protocol, 0, 0]);
                packet.extend_from_slice(&source.ip().octets());
                packet.extend_from_slice(&destination.ip().octets());
            }
            (SocketAddr::V6(source), SocketAddr::V6(destination)) => {
                packet.extend_from_slice(&[0x60, 0, 0, 0]);
                packet.extend_from_slice(&(len as u16).to_be_bytes());
                packet.extend_from_slice(&[self.tuple.protocol, 64]);
                packet.extend_from_slice(&source.ip().octets());
                packet.extend_from_slice(&destination.ip().octets());
            }
            _ => return packet,
        }
        packet.extend_from_slice(&self.tuple.source.port().to_be_bytes());
        packet.extend_from_slice(&self.tuple.destination.port().to_be_bytes());
        if is_datagram {
            packet.extend_from_slice(&(len as u16).to_be_bytes());
            packet.extend_from_slice(&[0, 0]);
        } else {
            packet.extend_from_slice(&self.sequence.to_be_bytes());
            packet.extend_from_slice(&self.acknowledgement.to_be_bytes());
            packet.extend_from_slice(&[(header_len as u8 / 4) << 4, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
            if let Some(tag) = self.tag {
                packet.extend_from_slice(&TAG);
                packet.extend_from_slice(&tag.to_be_bytes());
            }
            if let Some(proof) = self.proof {
                packet.extend_from_slice(&PROOF);
                packet.extend_from_slice(&proof.to_le_bytes());
            }
        }
        packet.extend_from_slice(&self.data);
        packet
    }

    pub fn parse(packet: &[u8]) -> Option<Self> {
        let (at, source, destination, protocol) = match packet.first()? >> 4 {
            4 => {
                let octets = |at: usize| -> Option<[u8; 4]> { packet.get(at..at + 4)?.try_into().ok() };
                (20, octets(12)?.into(), octets(16)?.into(), *packet.get(9)?)
            }
            6 => {
                let octets = |at: usize| -> Option<[u8; 16]> { packet.get(at..at + 16)?.try_into().ok() };
                (40, octets(8)?.into(), octets(24)?.into(), *packet.get(6)?)
            }
            _ => return None,
        };
        let word = |at: usize| Some(u32::from_be_bytes(packet.get(at..at + 4)?.try_into().ok()?));
        let port = |at: usize| Some(u16::from_be_bytes(packet.get(at..at + 2)?.try_into().ok()?));
        let tuple = Tuple {
            protocol,
            source: SocketAddr::new(source, port(at)?),
            destination: SocketAddr::new(destination, port(at + 2)?),
        };
        match protocol {
            TCP => {}
            UDP => {
                let data = packet.get(at + 8..)?.to_vec();
                return Some(Self { tuple, sequence: 0, acknowledgement: 0, flags: 0, data, proof: None, tag: None });
            }
            _ => return None,
        }
        let header_len = usize::from(packet.get(at + 12)? >> 4) * 4;
        let options = packet.get(at + 20..at + header_len)?;
        let tagged = options.strip_prefix(&TAG).and_then(|rest| rest.split_first_chunk::<4>());
        let tag = tagged.map(|(tag, _)| u32::from_be_bytes(*tag));
        let options = tagged.map_or(options, |(_, rest)| rest);
        Some(Self {
            tuple,
            sequence: word(at + 4)?,
            acknowledgement: word(at + 8)?,
            flags: *packet.get(at + 13)?,
            data: packet.get(at + header_len..)?.to_vec(),
            proof: options.strip_prefix(&PROOF).and_then(|proof| {
                let proof: [u8; 8] = proof.try_into().ok()?;
                Some(u64::from_le_bytes(proof))
            }),
            tag,
        })
    }

    /// The same packet with the numbers of the wire.
    pub fn on_wire(mut self, delta: &Delta) -> Self {
        self.sequence = self.sequence.wrapping_sub(delta.own);
        self.acknowledgement = self.acknowledgement.wrapping_sub(delta.peer);
        self
    }

    /// The same packet with the numbers of the TCP here.
    pub fn local(mut self, delta: &Delta) -> Self {
        self.sequence = self.sequence.wrapping_add(delta.peer);
        self.acknowledgement = self.acknowledgement.wrapping_add(delta.own);
        self
    }

    /// The same packet with other addresses.
    pub fn readdressed(mut self, tuple: Tuple) -> Self {
        self.tuple = tuple;
        self
    }
}

/// One datagram of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Who sends it to whom.
    pub tuple: Tuple,
    /// What it says.
    pub data: Vec<u8>,
}

impl Datagram {
    /// From one virtual address to another.
    pub fn new(source: SocketAddr, destination: SocketAddr, data: &[u8]) -> Self {
        Self { tuple: Tuple { protocol: UDP, source, destination }, data: data.to_vec() }
    }

    pub(crate) fn emit(&self) -> Vec<u8> {
        let Self { tuple, data } = self.clone();
        Segment { tuple, sequence: 0, acknowledgement: 0, flags: 0, data, proof: None, tag: None }.emit()
    }
}

/// What a client asks.
const QUESTION: &[u8] = b"who?";
const QUESTION_LEN: u32 = QUESTION.len() as u32;
const ANSWER_LEN: u32 = 4;
/// Numbers of the SYNs.
const CLIENT_FIRST: u32 = 100;
const SERVER_FIRST: u32 = 500;

/// What a client has had of the server's.
#[derive(Clone, Copy)]
enum Had {
    Nothing,
    Answer,
    End,
}

/// A client: connects, asks, takes the answer, closes.
pub struct Client {
    tuple: Tuple,
    started: Instant,
    next_try: Instant,
    connected: bool,
    /// How it went.
    pub outcome: Outcome,
    /// When it knew.
    pub ended: Option<Instant>,
}

impl Client {
    pub(crate) fn new(tuple: Tuple, now: Instant) -> Self {
        Self { tuple, started: now, next_try: now, connected: false, outcome: Outcome::Pending, ended: None }
    }

    pub(crate) fn tuple(&self) -> &Tuple {
        &self.tuple
    }

    /// From start to end.
    pub fn took(&self) -> Option<Duration> {
        self.ended.map(|ended| ended.since(self.started))
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        (self.outcome == Outcome::Pending).then_some(self.next_try)
    }

    fn end(&mut self, now: Instant, outcome: Outcome) {
        self.outcome = outcome;
        self.ended = Some(now);
    }

    /// Its numbers are those of a client that has had as much of the server's as `had` says.
    fn segment(&self, flags: u8, data: &[u8], had: Had) -> Segment {
        let sequence = match had {
            Had::Nothing if flags & SYN != 0 => CLIENT_FIRST,
            Had::Nothing => CLIENT_FIRST + 1,
            Had::Answer => CLIENT_FIRST + 1 + QUESTION_LEN,
            Had::End => CLIENT_FIRST + 2 + QUESTION_LEN,
        };
        let acknowledgement = SERVER_FIRST
            + match had {
                Had::Nothing => 1,
                Had::Answer => 1 + ANSWER_LEN,
                Had::End => 2 + ANSWER_LEN,
            };
        Segment { tuple: self.tuple, sequence, acknowledgement, flags, data: data.to_vec(), proof: None, tag: None }
    }

    pub(crate) fn poll(&mut self, now: Instant) -> Vec<Segment> {
        if self.outcome != Outcome::Pending || now < self.next_try {
            return Vec::new();
        }
        if now.since(self.started) > GIVE_UP {
            self.end(now, Outcome::TimedOut);
            return Vec::new();
        }
        self.next_try = now + RETRY;
        let (flags, data): (u8, &[u8]) = if self.connected { (ACK, QUESTION) } else { (SYN, b"") };
        vec![self.segment(flags, data, Had::Nothing)]
    }

    pub(crate) fn handle(&mut self, now: Instant, segment: &Segment) -> Vec<Segment> {
        if self.outcome != Outcome::Pending {
            // As a kernel does for a connection that it has closed: a FIN is acknowledged.
            let is_end = segment.flags & FIN != 0 && matches!(self.outcome, Outcome::Answered(_));
            return if is_end { vec![self.segment(ACK, b"", Had::End)] } else { Vec::new() };
        }
        if segment.flags & RST != 0 {
            self.end(now, if self.connected { Outcome::Reset } else { Outcome::Refused });
            return Vec::new();
        }
        if segment.flags & (SYN | ACK) == SYN | ACK {
            self.connected = true;
            self.next_try = now + RETRY;
            return vec![self.segment(ACK, b"", Had::Nothing), self.segment(ACK, QUESTION, Had::Nothing)];
        }
        if let Ok(number) = <[u8; 4]>::try_from(&segment.data[..]) {
            self.end(now, Outcome::Answered(u32::from_be_bytes(number)));
            return vec![self.segment(ACK | FIN, b"", Had::Answer)];
        }
        Vec::new()
    }

    /// An ICMP error came for it.
    pub(crate) fn unreachable(&mut self, now: Instant) {
        if self.outcome == Outcome::Pending && !self.connected {
            self.end(now, Outcome::Refused);
        }
    }
}

/// A server: takes every connection, says its number, closes when the client closes.
pub struct Server {
    /// Where it listens.
    pub port: u16,
    /// What it answers.
    pub number: u32,
    /// Its queue is full: the kernel says nothing to a SYN.
    pub is_full: bool,
    /// Connections whose handshake it saw finish, by the peer that it saw.
    pub accepted: std::collections::HashSet<SocketAddr>,
    half_open: std::collections::HashSet<SocketAddr>,
}

impl Server {
    pub(crate) fn new(port: u16, number: u32) -> Self {
        Self { port, number, is_full: false, accepted: Default::default(), half_open: Default::default() }
    }

    /// What the kernel says of a connection that it has had for long (RFC 9293 §3.10.7.4).
    pub(crate) fn acknowledge(segment: &Segment) -> Segment {
        let (tuple, sequence, acknowledgement) = (segment.tuple.reversed(), 7000, 9000);
        Segment { tuple, sequence, acknowledgement, flags: ACK, data: Vec::new(), proof: None, tag: None }
    }

    /// What the kernel says where no program listens (RFC 9293 §3.10.7.1).
    pub(crate) fn refuse(segment: &Segment) -> Vec<Segment> {
        if segment.flags & (SYN | ACK | RST) != SYN {
            return Vec::new();
        }
        let acknowledgement = segment.sequence.wrapping_add(1);
        vec![Segment {
            tuple: segment.tuple.reversed(),
            sequence: 0,
            acknowledgement,
            flags: RST | ACK,
            data: Vec::new(),
            proof: None,
            tag: None,
        }]
    }

    pub(crate) fn handle(&mut self, segment: &Segment) -> Vec<Segment> {
        let peer = segment.tuple.source;
        let answer = |flags: u8, data: &[u8]| Segment {
            tuple: segment.tuple.reversed(),
            sequence: match segment.flags {
                _ if flags & SYN != 0 => SERVER_FIRST,
                of if of & FIN != 0 => SERVER_FIRST + 1 + ANSWER_LEN,
                _ => SERVER_FIRST + 1,
            },
            acknowledgement: segment.sequence + segment.data.len() as u32 + u32::from(segment.flags & (SYN | FIN) != 0),
            flags,
            data: data.to_vec(),
            proof: None,
            tag: None,
        };
        if segment.flags & RST != 0 {
            self.half_open.remove(&peer);
            self.accepted.remove(&peer);
            return Vec::new();
        }
        if segment.flags & SYN != 0 && self.is_full {
            return Vec::new();
        }
        if segment.flags & SYN != 0 {
            self.half_open.insert(peer);
            return vec![answer(SYN | ACK, b"")];
        }
        if self.half_open.remove(&peer) {
            self.accepted.insert(peer);
        } else if !self.accepted.contains(&peer) {
            // The exact reset that RFC 9293 gives a segment without a connection.
            let mut reset = answer(RST, b"");
            reset.sequence = segment.acknowledgement;
            return vec![reset];
        }
        if segment.flags & FIN != 0 {
            return vec![answer(ACK | FIN, b"")];
        }
        if segment.data == QUESTION { vec![answer(ACK, &self.number.to_be_bytes())] } else { Vec::new() }
    }
}
