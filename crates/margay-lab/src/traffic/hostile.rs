//! Somebody who wishes us ill: datagrams that are garbage, mutated, replayed or forged, from whatever address they
//! like.
//!
//! IPv4 only, by a raw socket that takes the whole IP packet. What is forged under an honest host's address is
//! signalling, or exactly what that host once sent. Mutated DATA comes from other addresses: who reads data on the wire
//! and can forge its sender's address can inject into it as into plain TCP (DESIGN §18), and no scenario would tell us
//! more.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use margay_core::name::Name;
use margay_wire::{
    AuthRepr, CapabilitiesRepr, ErrorCode, ErrorRepr, Extension, FlowId, HandoverRepr, KeyExchangeRepr, Kind, Message,
    MessageWriter, NextProtocol, PORT, QuietRepr, ResolvableRepr, SessionId, SessionRepr,
};
use serde_json::json;
use socket2::Socket;

use super::forger::{Captured, DATAGRAM_MAX, IP_UDP_LEN, envelope, fill, raw_socket, read_capture};
use crate::host::write_line;
use crate::pump::Dice;

/// As long as real ones are.
const SYN_LEN: usize = 1200;
/// Packets between two looks at the clock.
const BATCH: usize = 64;

/// Whom to trouble, and how much.
pub struct Plan {
    /// Hosts whose SAL port gets it.
    pub targets: Vec<Ipv4Addr>,
    /// Hosts whose address is forged.
    pub honest: Vec<Ipv4Addr>,
    /// Other addresses are taken from the 65,536 from here on.
    pub strangers: Ipv4Addr,
    /// Datagrams in all.
    pub count: u64,
    /// Datagrams per second.
    pub rate: u64,
    /// SYNs say that they fetch a connection from another host.
    pub fetching: bool,
}

/// Noise made from a capture, or SYNs for a service and its port.
pub fn trouble(plan: &Plan, capture: Option<&Path>, service: Option<(&str, u16)>) -> Result<()> {
    match (capture, service) {
        (Some(capture), _) => noise(plan, capture),
        (None, Some((service, port))) => syns(plan, service, port),
        (None, None) => bail!("give --capture or --service"),
    }
}

/// Sends garbage, mutations, replays and forged signalling, made from a capture of real traffic (pcap). Prints how many
/// of each.
fn noise(plan: &Plan, capture: &Path) -> Result<()> {
    let captured = read_capture(capture)?;
    let ids = flow_ids(&captured);
    if ids.is_empty() {
        bail!("{} has no signalling to learn from", capture.display());
    }
    let mut forger = Forger::new(plan)?;
    forger.send_all(plan, |forger, buf| {
        let real = &captured[forger.dice.below(captured.len())];
        let stranger = forger.stranger();
        match forger.dice.below(5) {
            0 => ("random", stranger, garbage(&mut forger.dice, buf)),
            1 => ("random behind a real header", stranger, garbage_behind_a_header(&mut forger.dice, buf)),
            2 => {
                let is_data = real.bytes.get(1) == Some(&u8::from(Kind::Data));
                let from = if is_data || forger.dice.hits(0.5) { stranger } else { real.from };
                ("mutated", from, mutated(&mut forger.dice, &real.bytes, buf))
            }
            3 => {
                let from = if forger.dice.hits(0.5) { stranger } else { real.from };
                ("replayed", from, copied(&real.bytes, buf))
            }
            _ => {
                let from = forger.honest[forger.dice.below(forger.honest.len())];
                ("forged signalling", from, signalling(&mut forger.dice, &ids, buf))
            }
        }
    })
}

/// Sends well-formed SYNs for a service, each of another session.
fn syns(plan: &Plan, service: &str, port: u16) -> Result<()> {
    let name: Name = service.parse().with_context(|| format!("{service} is no name"))?;
    let service = name.service_id().0;
    let mut forger = Forger::new(plan)?;
    forger.send_all(plan, |forger, buf| {
        let from = forger.stranger();
        let fetched = plan.fetching.then(|| handover(&mut forger.dice, from));
        let length = syn(&mut forger.dice, from, service, port, fetched, &mut buf[..SYN_LEN]).unwrap_or_default();
        ("SYN", from, length)
    })
}

struct Forger {
    socket: Socket,
    dice: Dice,
    targets: Vec<Ipv4Addr>,
    honest: Vec<Ipv4Addr>,
    strangers: u32,
}

impl Forger {
    fn new(plan: &Plan) -> Result<Self> {
        let socket = raw_socket()?;
        if plan.targets.is_empty() || plan.honest.is_empty() {
            bail!("nobody to trouble");
        }
        let (targets, honest) = (plan.targets.clone(), plan.honest.clone());
        Ok(Self { socket, dice: Dice::new(42), targets, honest, strangers: u32::from(plan.strangers) })
    }

    fn stranger(&mut self) -> Ipv4Addr {
        Ipv4Addr::from(self.strangers + 1 + self.dice.below(65_000) as u32)
    }

    /// Sends at the rate that was asked for; `make` writes a datagram and gives its kind, its sender and its length.
    fn send_all(
        &mut self,
        plan: &Plan,
        mut make: impl FnMut(&mut Self, &mut [u8]) -> (&'static str, Ipv4Addr, usize),
    ) -> Result<()> {
        let mut kinds: BTreeMap<&str, u64> = BTreeMap::new();
        let (mut packet, mut sent, mut refused) = ([0; IP_UDP_LEN + DATAGRAM_MAX], 0_u64, 0_u64);
        let start = Instant::now();
        while sent < plan.count {
            for _ in 0..BATCH {
                let (kind, from, length) = make(self, &mut packet[IP_UDP_LEN..]);
                let to = self.targets[self.dice.below(self.targets.len())];
                // Half come from the port that agents use, and so pass where only that is asked.
                let port = if self.dice.hits(0.5) { PORT } else { 1024 + self.dice.below(60_000) as u16 };
                envelope(&mut packet, SocketAddrV4::new(from, port), to, length);
                let target = SocketAddr::from((to, 0));
                match self.socket.send_to(&packet[..IP_UDP_LEN + length], &target.into()) {
                    Ok(_) => *kinds.entry(kind).or_default() += 1,
                    // A full queue loses it; the count says so.
                    Err(_) => refused += 1,
                }
                sent += 1;
            }
            let due = Duration::from_secs_f64(sent as f64 / plan.rate as f64);
            if let Some(wait) = due.checked_sub(start.elapsed()) {
                std::thread::sleep(wait);
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        write_line(&json!({"sent": sent - refused, "refused": refused, "seconds": seconds, "kinds": kinds}).to_string())
    }
}

fn garbage(dice: &mut Dice, buf: &mut [u8]) -> usize {
    let length = dice.below(DATAGRAM_MAX + 1);
    fill(dice, &mut buf[..length]);
    length
}

/// Version, type and lengths are right: the parsers behind them get something to read.
fn garbage_behind_a_header(dice: &mut Dice, buf: &mut [u8]) -> usize {
    let length = 20 + 4 * dice.below(300);
    fill(dice, &mut buf[..length]);
    let kind = Kind::ALL[dice.below(Kind::ALL.len())];
    buf[0] = margay_wire::VERSION;
    buf[1] = kind.into();
    buf[4..6].copy_from_slice(&(length as u16).to_be_bytes());
    buf[6..8].fill(0);
    length
}

fn copied(real: &[u8], buf: &mut [u8]) -> usize {
    buf[..real.len()].copy_from_slice(real);
    real.len()
}

/// A few bytes changed, or the end cut off, or something added.
fn mutated(dice: &mut Dice, real: &[u8], buf: &mut [u8]) -> usize {
    let mut length = copied(real, buf);
    for _ in 0..1 + dice.below(8) {
        // The front matters most.
        let reach = if dice.hits(0.5) { length.min(160) } else { length };
        if reach > 0 {
            let at = dice.below(reach);
            buf[at] ^= 1 << dice.below(8);
        }
    }
    if dice.hits(0.2) {
        length = dice.below(length + 1);
    } else if dice.hits(0.1) {
        length = (length + dice.below(64)).min(DATAGRAM_MAX);
    }
    length
}

/// Says that a flow is over, was refused, has moved; for flows that exist or existed.
fn signalling(dice: &mut Dice, ids: &[(FlowId, FlowId)], buf: &mut [u8]) -> usize {
    const KINDS: [Kind; 14] = [
        Kind::Fin,
        Kind::Rst,
        Kind::Fail,
        Kind::Error,
        Kind::Rsyn,
        Kind::RsynDone,
        Kind::Probe,
        Kind::Ack,
        Kind::SynAck,
        Kind::RequestLock,
        Kind::AckLock,
        Kind::NackLock,
        Kind::CancelLock,
        Kind::AckCancel,
    ];
    let (known_dst, known_src) = ids[dice.below(ids.len())];
    let guessed = dice.hits(0.5);
    let dst = if guessed { FlowId(dice.roll() as u32) } else { known_dst };
    let src = if guessed { FlowId(dice.roll() as u32) } else { known_src };
    let code = ErrorCode::from(1 + dice.below(18) as u16);
    let mut writer = MessageWriter::new(buf, KINDS[dice.below(KINDS.len())], dst, src, dice.roll() as u32);
    let mut tag = [0; 16];
    fill(dice, &mut tag);
    let auth = AuthRepr { assoc_id: dice.roll() as u32, epoch: 1 + dice.below(3) as u32, receiver_epoch: 1, tag };
    let mut written = writer.extension(&Extension::Error(ErrorRepr { code, text: "" })).map(drop);
    if written.is_ok() && dice.hits(0.3) {
        let quiet = QuietRepr { quiet_ms: dice.roll() as u32 };
        written = writer.extension(&Extension::Quiet(quiet)).map(drop);
    }
    if written.is_ok() && dice.hits(0.3) {
        let nowhere = Ipv4Addr::UNSPECIFIED;
        written = writer.extension(&Extension::Handover(handover(dice, nowhere))).map(drop);
    }
    if written.is_ok() && dice.hits(0.7) {
        written = writer.extension(&Extension::Auth(auth)).map(drop);
    }
    // All of it fits; what would not is not sent.
    written.and_then(|()| writer.finish()).unwrap_or_default()
}

/// Of a hand-over that never was.
fn handover(dice: &mut Dice, at: Ipv4Addr) -> HandoverRepr {
    let [mut ticket, mut giver, mut taker] = [[0; 16]; 3];
    [&mut ticket, &mut giver, &mut taker].into_iter().for_each(|bytes| fill(dice, bytes));
    HandoverRepr { ticket, giver, taker, address: SocketAddr::from((at, PORT)) }
}

/// A SYN that nothing is wrong with but its sender. It begins a connection, or fetches one.
fn syn(
    dice: &mut Dice,
    from: Ipv4Addr,
    service: [u8; 32],
    port: u16,
    fetched: Option<HandoverRepr>,
    buf: &mut [u8],
) -> Result<usize, margay_wire::Error> {
    let (mut session, mut ephemeral, mut host_id) = ([0; 16], [0; 32], [0; 16]);
    fill(dice, &mut session);
    fill(dice, &mut ephemeral);
    fill(dice, &mut host_id);
    let client_port = 1024 + dice.below(60_000) as u16;
    let client = SocketAddr::from((from, client_port));
    let session = SessionRepr { session: SessionId(session), client, service_port: port, protocol: 6 };
    let exchange = KeyExchangeRepr { host_id, assoc_id: dice.roll() as u32 | 1, message: &ephemeral };
    let nonce = dice.roll();
    let resolvable = ResolvableRepr { hop_limit: 16, reply_to: None, via: None, service, nonce, hop_tag: [0; 8] };
    let mut writer = MessageWriter::new(buf, Kind::Syn, FlowId(0), FlowId(dice.roll() as u32 | 1), 0);
    writer
        .resolvable(&resolvable)?
        .extension(&Extension::Session(session))?
        .extension(&Extension::Capabilities(CapabilitiesRepr { stacks: 4, mtu: DATAGRAM_MAX as u16 }))?
        .extension(&Extension::KeyExchange(exchange))?;
    match fetched {
        // The connection comes from its giver.
        Some(fetched) => writer.extension(&Extension::Handover(fetched))?,
        None => writer.payload(NextProtocol::Ipv4, &tcp_syn(client_port, port, dice.roll() as u32))?,
    };
    writer.pad_to(SYN_LEN);
    writer.finish()
}

/// A TCP SYN with an MSS option, from the virtual address of a host to a leased one.
fn tcp_syn(client_port: u16, port: u16, sequence: u32) -> [u8; 44] {
    const TCP_AT: usize = 20;
    let mut packet = [0; 44];
    packet[0] = 0x45;
    packet[3] = 44;
    packet[8] = 64;
    packet[9] = 6;
    packet[12..16].copy_from_slice(&[198, 18, 0, 1]);
    packet[16..20].copy_from_slice(&[198, 18, 0, 2]);
    let header_sum = checksum(&packet[..TCP_AT], 0);
    packet[10..12].copy_from_slice(&header_sum.to_be_bytes());
    packet[20..22].copy_from_slice(&client_port.to_be_bytes());
    packet[22..24].copy_from_slice(&port.to_be_bytes());
    packet[24..28].copy_from_slice(&sequence.to_be_bytes());
    packet[32] = 6 << 4;
    packet[33] = 2;
    packet[34..36].copy_from_slice(&64_240_u16.to_be_bytes());
    packet[40..44].copy_from_slice(&[2, 4, 5, 0x78]);
    // Pseudo header: addresses, protocol, length.
    let pseudo = packet[12..20].chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum::<u32>();
    let tcp_sum = checksum(&packet[TCP_AT..], pseudo + 6 + 24);
    packet[36..38].copy_from_slice(&tcp_sum.to_be_bytes());
    packet
}

fn checksum(bytes: &[u8], start: u32) -> u16 {
    let mut sum = start;
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or_default()]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// The flows that a capture shows: identifiers as the receiver and the sender know them.
fn flow_ids(captured: &[Captured]) -> Vec<(FlowId, FlowId)> {
    let messages = captured.iter().filter_map(|one| Message::parse(&one.bytes).ok());
    messages.filter(|message| message.dst_flow.0 != 0).map(|message| (message.dst_flow, message.src_flow)).collect()
}

#[cfg(test)]
mod tests {
    use margay_wire::{Kind, Message};

    use super::super::forger::DATAGRAM_MAX;
    use super::{SYN_LEN, checksum, garbage_behind_a_header, handover, mutated, signalling, syn, tcp_syn};
    use crate::pump::Dice;

    #[test]
    fn forged_syns_are_well_formed() {
        let mut buf = [0; SYN_LEN];
        let mut dice = Dice::new(1);
        let from = [10, 99, 0, 1].into();
        let length = syn(&mut dice, from, [7; 32], 7, None, &mut buf).expect("it fits");
        assert_eq!(length, SYN_LEN);
        let message = Message::parse(&buf).expect("well-formed");
        assert_eq!(message.kind, Kind::Syn);
        assert!(message.session().is_some() && message.key_exchange().is_some() && message.resolvable.is_some());
        assert_eq!(message.payload.len(), 44);
        assert_eq!(checksum(&tcp_syn(1, 2, 3)[..20], 0), 0);
        let fetched = handover(&mut dice, from);
        syn(&mut dice, from, [7; 32], 7, Some(fetched), &mut buf).expect("it fits");
        let message = Message::parse(&buf).expect("well-formed");
        assert_eq!((message.handover(), message.payload.len()), (Some(fetched), 0));
    }

    #[test]
    fn forged_signalling_is_well_formed() {
        let ids = [(margay_wire::FlowId(1), margay_wire::FlowId(2))];
        let mut dice = Dice::new(3);
        for _ in 0..100 {
            let mut buf = [0; DATAGRAM_MAX];
            let length = signalling(&mut dice, &ids, &mut buf);
            let message = Message::parse(&buf[..length]).expect("well-formed");
            assert_ne!(message.kind, Kind::Syn);
        }
    }

    #[test]
    fn what_is_malformed_fits_the_wire() {
        let mut dice = Dice::new(5);
        let mut buf = [0; DATAGRAM_MAX];
        for _ in 0..1_000 {
            assert!(garbage_behind_a_header(&mut dice, &mut buf) <= DATAGRAM_MAX);
            assert!(mutated(&mut dice, &[9; 1_440], &mut buf) <= DATAGRAM_MAX);
            assert!(mutated(&mut dice, &[], &mut buf) <= DATAGRAM_MAX);
        }
    }
}
