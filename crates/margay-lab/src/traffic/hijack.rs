//! Somebody who wants another's flows: forgeries of every type of message, and all that was seen of the hosts' own
//! before, sent again as it was or with a bit changed, from where it came from and from elsewhere.
//!
//! Plain DATA is left as it was, and comes from elsewhere alone: who reads it on the wire and can forge its sender's
//! address can inject into it as into plain TCP (DESIGN §18). Sealed DATA has no such excuse.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use margay_core::key::HostId;
use margay_core::name::ServiceId;
use margay_wire::{
    Addresses, AuthRepr, CapabilitiesRepr, ChangeRepr, ChangeStep, DATA_HEADER_LEN, DataRepr, Error, ErrorCode,
    ErrorRepr, Extension, Flags, FlowId, FlowPortRepr, HandoverRepr, Kind, Message, MessageWriter, MoveFlags, MoveRepr,
    PORT, QuietRepr, ResolvableRepr, STACK_ENCAP, STACK_SECURE_AES, STACK_SECURE_CHACHA, StackRepr, is_sealed,
};
use serde_json::json;

use super::forger::{Captured, DATAGRAM_MAX, IP_UDP_LEN, envelope, fill, raw_socket, read_capture};
use crate::host::write_line;
use crate::pump::Dice;

/// One address of ADDRESSES.
const ENTRY_LEN: usize = 20;
const STACKS: [u8; 3] = [STACK_ENCAP, STACK_SECURE_AES, STACK_SECURE_CHACHA];
/// Packets between two looks at the clock.
const BATCH: usize = 32;

/// Whom to trouble, and how much.
#[derive(Args, Debug)]
pub struct Plan {
    /// Host whose SAL port gets it; may be given more than once
    #[arg(long = "target", required = true)]
    targets: Vec<Ipv4Addr>,
    /// Host whose address is forged; may be given more than once
    #[arg(long, required = true)]
    honest: Vec<Ipv4Addr>,
    /// Other senders' addresses: the 65,536 from here on
    #[arg(long)]
    strangers: Ipv4Addr,
    /// Forgeries of each type, for each target
    #[arg(long)]
    forgeries: usize,
    /// Changed copies of each real datagram, for each target
    #[arg(long)]
    flips: usize,
    /// Datagrams per second
    #[arg(long)]
    rate: u64,
    /// Real traffic (pcap)
    #[arg(long)]
    capture: PathBuf,
}

/// What one who saw real traffic knows.
pub(super) struct Known {
    /// Flow numbers, as the receiver and the sender know them.
    pub flows: Vec<(FlowId, FlowId)>,
    auths: Vec<AuthRepr>,
    moves: Vec<MoveRepr>,
    handovers: Vec<HandoverRepr>,
    services: Vec<[u8; 32]>,
    hosts: Vec<[u8; 16]>,
}

/// A datagram to be sent.
struct Shot {
    how: &'static str,
    from: SocketAddrV4,
    to: Ipv4Addr,
    bytes: Vec<u8>,
}

/// Sends all of it, in no order. Prints how many there were of each, and of each type of message.
///
/// # Errors
///
/// Not on a host of a lab, or the capture (pcap) has nothing to learn from.
pub fn attack(plan: &Plan) -> Result<()> {
    let captured = read_capture(&plan.capture)?;
    let known = Known::learn(&captured);
    let moves_nothing = known.moves.is_empty() && known.handovers.is_empty();
    if known.auths.is_empty() || moves_nothing || plan.targets.is_empty() || plan.honest.is_empty() {
        bail!("{} has no signalling to learn from, or there is nobody to trouble", plan.capture.display());
    }
    let mut dice = Dice::new(7);
    let mut shots = Vec::new();
    for to in &plan.targets {
        forge_all(plan, &known, *to, &mut dice, &mut shots);
        captured.iter().for_each(|real| send_again(plan, real, *to, &mut dice, &mut shots));
    }
    for last in (1..shots.len()).rev() {
        shots.swap(last, dice.below(last + 1));
    }
    fire(plan, &shots)
}

fn fire(plan: &Plan, shots: &[Shot]) -> Result<()> {
    let socket = raw_socket()?;
    let (mut ways, mut types) = (BTreeMap::<&str, u64>::new(), BTreeMap::<String, u64>::new());
    let mut packet = [0; IP_UDP_LEN + DATAGRAM_MAX];
    let (start, mut sent) = (Instant::now(), 0_u64);
    for (at, shot) in shots.iter().enumerate() {
        let length = shot.bytes.len();
        packet[IP_UDP_LEN..IP_UDP_LEN + length].copy_from_slice(&shot.bytes);
        envelope(&mut packet, shot.from, shot.to, length);
        let target = SocketAddr::from((shot.to, 0));
        // A full queue loses it; the counts say so.
        if socket.send_to(&packet[..IP_UDP_LEN + length], &target.into()).is_ok() {
            sent += 1;
            *ways.entry(shot.how).or_default() += 1;
            if let Some(kind) = shot.bytes.get(1).and_then(|byte| Kind::try_from(*byte).ok()) {
                *types.entry(format!("{kind:?}")).or_default() += 1;
            }
        }
        let due = Duration::from_secs_f64(at as f64 / plan.rate as f64);
        if at.is_multiple_of(BATCH)
            && let Some(wait) = due.checked_sub(start.elapsed())
        {
            std::thread::sleep(wait);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    write_line(&json!({"sent": sent, "seconds": seconds, "ways": ways, "types": types}).to_string())
}

fn stranger(plan: &Plan, dice: &mut Dice) -> SocketAddrV4 {
    let address = Ipv4Addr::from(u32::from(plan.strangers) + 1 + dice.below(65_000) as u32);
    SocketAddrV4::new(address, any_port(dice))
}

/// Half come from the port that agents use, and so pass where only that is asked.
fn any_port(dice: &mut Dice) -> u16 {
    if dice.hits(0.5) { PORT } else { 1024 + dice.below(60_000) as u16 }
}

fn pick<T: Copy>(dice: &mut Dice, of: &[T]) -> Option<T> {
    (!of.is_empty()).then(|| of[dice.below(of.len())])
}

/// Every type of message that there is.
fn forge_all(plan: &Plan, known: &Known, to: Ipv4Addr, dice: &mut Dice, shots: &mut Vec<Shot>) {
    for kind in Kind::ALL {
        for _ in 0..plan.forgeries {
            let own = stranger(plan, dice);
            let mut buf = [0; DATAGRAM_MAX];
            let (length, from) = if *kind == Kind::Data {
                let stack = STACKS[dice.below(STACKS.len())];
                let from = if is_sealed(stack) && dice.hits(0.5) { honest(plan, to, dice) } else { own };
                (forged_data(known, stack, dice, &mut buf), from)
            } else {
                let from = if dice.hits(0.5) { honest(plan, to, dice) } else { own };
                // All of it fits; what would not is not sent.
                (forged(known, *kind, own.into(), dice, &mut buf).unwrap_or_default(), from)
            };
            let bytes = buf[..length].to_vec();
            shots.extend((length > 0).then_some(Shot { how: "forged", from, to, bytes }));
        }
    }
}

/// No host takes a packet from itself.
fn honest(plan: &Plan, to: Ipv4Addr, dice: &mut Dice) -> SocketAddrV4 {
    let others: Vec<Ipv4Addr> = plan.honest.iter().copied().filter(|host| *host != to).collect();
    match pick(dice, &others) {
        Some(other) => SocketAddrV4::new(other, PORT),
        None => stranger(plan, dice),
    }
}

/// What was seen, from where it came from, from where hosts are now, and from elsewhere; and the same with bits
/// changed.
fn send_again(plan: &Plan, real: &Captured, to: Ipv4Addr, dice: &mut Dice, shots: &mut Vec<Shot>) {
    let is_plain = DataRepr::parse(&real.bytes).is_ok_and(|data| !is_sealed(data.stack));
    let elsewhere = stranger(plan, dice);
    let mut places = vec![("replayed from elsewhere", elsewhere)];
    if !is_plain {
        places.push(("replayed from where it came from", SocketAddrV4::new(real.from, PORT)));
        let others = plan.honest.iter().filter(|host| **host != to);
        places.extend(others.map(|host| ("replayed from another host", SocketAddrV4::new(*host, PORT))));
    }
    for (how, from) in &places {
        shots.push(Shot { how, from: *from, to, bytes: real.bytes.clone() });
    }
    for _ in 0..plan.flips {
        let (_, from) = places[dice.below(places.len())];
        let mut bytes = real.bytes.clone();
        // Padding says nothing.
        let reach = Message::parse(&bytes).map_or(bytes.len(), |message| message.signed_bytes().len());
        let bit = dice.below(reach * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        shots.push(Shot { how: "one bit changed", from, to, bytes });
    }
}

impl Known {
    pub fn learn(captured: &[Captured]) -> Self {
        let mut known =
            Self { flows: vec![], auths: vec![], moves: vec![], handovers: vec![], services: vec![], hosts: vec![] };
        for real in captured {
            if let Ok(data) = DataRepr::parse(&real.bytes) {
                known.flows.push((data.dst_flow, FlowId(0)));
            }
            let Ok(message) = Message::parse(&real.bytes) else { continue };
            known.flows.push((message.dst_flow, message.src_flow));
            known.auths.extend(message.auth());
            known.moves.extend(message.location());
            known.handovers.extend(message.handover());
            known.services.extend(message.resolvable.map(|part| part.service));
            known.hosts.extend(message.key_exchange().map(|exchange| exchange.host_id));
        }
        known
    }

    fn flow(&self, dice: &mut Dice) -> (FlowId, FlowId) {
        match dice.below(4) {
            0 => (FlowId(0), FlowId(0)),
            1 => (FlowId(dice.roll() as u32), FlowId(dice.roll() as u32)),
            _ => pick(dice, &self.flows).unwrap_or_default(),
        }
    }

    /// A tag: of a known association or another, of this epoch or others; right for another message, or for none.
    fn auth(&self, dice: &mut Dice) -> Option<AuthRepr> {
        let mut auth = pick(dice, &self.auths)?;
        if dice.hits(0.2) {
            auth.assoc_id = dice.roll() as u32;
        }
        auth.epoch = match dice.below(4) {
            0 => auth.epoch.wrapping_add(1),
            1 => u32::MAX,
            2 => auth.epoch.saturating_sub(1),
            _ => auth.epoch,
        };
        if dice.hits(0.7) {
            fill(dice, &mut auth.tag);
        }
        Some(auth)
    }

    /// "I am there", with a number that is later than any, and a token that was seen or is guessed.
    fn location(&self, there: SocketAddr, dice: &mut Dice) -> Option<MoveRepr> {
        let seen = pick(dice, &self.moves)?;
        let number = match dice.below(4) {
            0 => u32::MAX,
            1 => seen.number.wrapping_add(1 + dice.below(10) as u32),
            2 => 0,
            _ => seen.number,
        };
        let token = if dice.hits(0.5) { seen.token } else { dice.roll() };
        let address = if dice.hits(0.7) { there } else { seen.address };
        let challenge = if dice.hits(0.5) { seen.challenge } else { dice.roll() };
        let flags = MoveFlags::from_bits_retain(dice.below(32) as u16);
        Some(MoveRepr { number, token, challenge, address, flags })
    }

    /// "This session goes to that host", of a hand-over that was seen or never was.
    pub fn handover(&self, there: SocketAddr, dice: &mut Dice) -> HandoverRepr {
        let mut made_up = [0; 16];
        fill(dice, &mut made_up);
        let seen = pick(dice, &self.handovers).filter(|_| dice.hits(0.7));
        let ticket = seen.map_or(made_up, |seen| seen.ticket);
        let mut host = |seen: Option<[u8; 16]>| seen.or_else(|| pick(dice, &self.hosts)).unwrap_or(made_up);
        let (giver, taker) = (host(seen.map(|seen| seen.giver)), host(seen.map(|seen| seen.taker)));
        // Without a port it is a question, and not a request.
        let address = if dice.hits(0.5) { there } else { SocketAddr::new(there.ip(), 0) };
        HandoverRepr { ticket, giver, taker, address }
    }

    fn part(&self, there: SocketAddr, dice: &mut Dice) -> ResolvableRepr {
        let service = match pick(dice, &self.hosts) {
            Some(host) if dice.hits(0.5) => ServiceId::at_host(HostId(host), 0).0,
            _ => pick(dice, &self.services).unwrap_or_default(),
        };
        let mut hop_tag = [0; 8];
        fill(dice, &mut hop_tag);
        let reply_to = dice.hits(0.5).then_some(there);
        let via = dice.hits(0.3).then_some(there);
        ResolvableRepr { hop_limit: 1 + dice.below(16) as u8, reply_to, via, service, nonce: dice.roll(), hop_tag }
    }
}

/// A message of this type with whatever can be said in it.
fn forged(known: &Known, kind: Kind, there: SocketAddr, dice: &mut Dice, buf: &mut [u8]) -> Result<usize, Error> {
    let (dst, src) = known.flow(dice);
    let mut addresses = [0; ENTRY_LEN];
    Addresses::emit_one(there, 0, &mut addresses);
    let code = ErrorCode::from(1 + dice.below(21) as u16);
    let capabilities = CapabilitiesRepr { stacks: dice.roll() as u32, mtu: dice.roll() as u16 };
    let flow_port = FlowPortRepr { port: dice.roll() as u16, starts: dice.hits(0.5) };
    let stack = StackRepr { stack: STACKS[dice.below(STACKS.len())], demands: dice.hits(0.5) };
    let change = ChangeRepr {
        step: ChangeStep::ALL[dice.below(ChangeStep::ALL.len())],
        stack: STACKS[dice.below(STACKS.len())],
        demands: dice.hits(0.5),
        by_rule: dice.hits(0.5),
        number: dice.roll() as u32,
    };
    let quiet = QuietRepr { quiet_ms: dice.roll() as u32 };
    let possible = [
        (0.4, Addresses::parse(&addresses).ok().map(Extension::Addresses)),
        (0.1, Some(Extension::Capabilities(capabilities))),
        (0.4, Some(Extension::Rendezvous(there))),
        (0.3, Some(Extension::Error(ErrorRepr { code, text: "" }))),
        (0.1, Some(Extension::Stack(stack))),
        (0.2, Some(Extension::Quiet(quiet))),
        (if kind == Kind::Change { 0.9 } else { 0.1 }, Some(Extension::Change(change))),
        (0.2, Some(Extension::FlowPort(flow_port))),
        (share_of_handover(kind), Some(Extension::Handover(known.handover(there, dice)))),
        (0.7, known.location(there, dice).map(Extension::Move)),
        (0.9, known.auth(dice).map(Extension::Auth)),
    ];
    let mut writer = MessageWriter::new(buf, kind, dst, src, dice.roll() as u32);
    if dice.hits(0.3) {
        writer.resolvable(&known.part(there, dice))?;
        writer.flags(if dice.hits(0.3) { Flags::RELAY } else { Flags::empty() });
    }
    writer.flags(if dice.hits(0.3) { Flags::CONFIRM } else { Flags::empty() });
    writer.flags(if dice.hits(0.1) { Flags::FULL } else { Flags::empty() });
    for (share, extension) in possible {
        if let Some(extension) = extension.filter(|_| dice.hits(share)) {
            writer.extension(&extension)?;
        }
    }
    writer.pad_to(if dice.hits(0.5) { 256 } else { 0 });
    writer.finish()
}

/// Messages of a hand-over are nothing without it; others must not mind it.
fn share_of_handover(kind: Kind) -> f64 {
    match kind {
        Kind::RequestLock | Kind::AckLock | Kind::NackLock | Kind::CancelLock | Kind::AckCancel => 0.9,
        Kind::RsynDone => 0.5,
        _ => 0.1,
    }
}

fn forged_data(known: &Known, stack: u8, dice: &mut Dice, buf: &mut [u8]) -> usize {
    let (dst_flow, _) = known.flow(dice);
    let (flags, packet_number) = (dice.roll() as u8, dice.roll() as u32);
    DataRepr { stack, flags, dst_flow, packet_number, index: 0, count: 1 }.emit(buf);
    let length = DATA_HEADER_LEN + 40 + dice.below(200);
    fill(dice, &mut buf[DATA_HEADER_LEN..length]);
    length
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use std::path::PathBuf;

    use margay_wire::{AuthRepr, DataRepr, Extension, FlowId, Kind, Message, MessageWriter, MoveFlags, MoveRepr, PORT};

    use super::{Captured, Known, Plan, Shot, forge_all, send_again};
    use crate::pump::Dice;

    fn seen() -> Captured {
        let mut buf = [0; 300];
        let mut writer = MessageWriter::new(&mut buf, Kind::RsynDone, FlowId(1), FlowId(2), 3);
        let address = ([10, 0, 0, 1], PORT).into();
        let location = MoveRepr { number: 4, token: 5, challenge: 6, address, flags: MoveFlags::empty() };
        let auth = AuthRepr { assoc_id: 6, epoch: 7, receiver_epoch: 9, tag: [8; 16] };
        let written = writer.extension(&Extension::Move(location)).and_then(|w| w.extension(&Extension::Auth(auth)));
        assert!(written.is_ok());
        let length = writer.finish().expect("it fits");
        Captured { from: [10, 0, 0, 1].into(), bytes: buf[..length].to_vec() }
    }

    fn shots(act: impl FnOnce(&Plan, &mut Dice, &mut Vec<Shot>)) -> Vec<Shot> {
        let (targets, honest) = (vec![[10, 0, 0, 2].into()], vec![[10, 0, 0, 1].into()]);
        let strangers = [10, 99, 0, 0].into();
        let plan = Plan { targets, honest, strangers, forgeries: 50, flips: 20, rate: 1, capture: PathBuf::new() };
        let mut shots = Vec::new();
        act(&plan, &mut Dice::new(1), &mut shots);
        shots
    }

    #[test]
    fn every_type_is_forged_and_well_formed() {
        let known = Known::learn(&[seen()]);
        let to = [10, 0, 0, 2].into();
        let shots = shots(|plan, dice, shots| forge_all(plan, &known, to, dice, shots));
        let types: BTreeSet<u8> = shots.iter().map(|shot| shot.bytes[1]).collect();
        assert_eq!(types, Kind::ALL.iter().map(|kind| u8::from(*kind)).collect());
        for shot in shots {
            assert!(Message::parse(&shot.bytes).is_ok() || DataRepr::parse(&shot.bytes).is_ok(), "{:?}", shot.bytes);
        }
    }

    #[test]
    fn changed_copies_differ_by_one_bit() {
        let real = seen();
        let shots = shots(|plan, dice, shots| send_again(plan, &real, [10, 0, 0, 2].into(), dice, shots));
        for shot in shots {
            let bits: u32 = shot.bytes.iter().zip(&real.bytes).map(|(now, then)| (now ^ then).count_ones()).sum();
            assert_eq!(bits, u32::from(shot.how == "one bit changed"), "{}", shot.how);
        }
    }
}
