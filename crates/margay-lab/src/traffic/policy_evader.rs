//! Unauthenticated hosts with changed agents that try to bypass the middlebox that a name requires. Each has a key of
//! its own and the core of an honest host: its SYNs are rewritten, or its core is given a policy that nobody signed.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use clap::Args;
use margay_core::chain::{BoxWanted, ChainPolicy, ChainRule};
use margay_core::name::{Name, Prefix, ServiceId};
use margay_core::table::{Action, Allow, Demux, NextHop};
use margay_core::{BoxKind, Middlebox};
use margay_datapath::clock;
use margay_wire::{
    Error, ErrorCode, Extension, FLAGS_OFFSET, Flags, KeyExchangeRepr, Kind, Message, MessageWriter, PORT,
};
use serde::{Deserialize, Serialize};

use super::forger::{DATAGRAM_MAX, SEGMENT_LEN, Segment, read_capture, write_segment};
use super::stranger::Stranger;
use crate::host::write_line;

/// The name's virtual address at the stranger.
const LEASE: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 1);
const HOST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// How long a verdict is waited for.
const ANSWER_LIMIT: Duration = Duration::from_millis(300);
const TCP: u8 = 6;
const TCP_SYN: u8 = 2;

/// Whom to ask, and for what.
#[derive(Args, Debug)]
pub struct Plan {
    /// The name
    #[arg(long)]
    service: Name,
    /// Its port
    #[arg(long)]
    port: u16,
    /// The middlebox that it requires
    #[arg(long)]
    middlebox: Name,
    /// Host that serves it
    #[arg(long)]
    server: Ipv4Addr,
    /// SYNs of honest sessions through the middlebox, recorded at that host (pcap)
    #[arg(long)]
    capture: PathBuf,
    /// Attempts with each trick
    #[arg(long)]
    count: usize,
}

/// How a client tries to bypass the middlebox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trick {
    /// No chain, like a client that never received the policy.
    Unaware,
    /// The same with FULL, which requests a new handshake.
    Full,
    /// A chain with its own signature, in which the middlebox is left out because nobody serves it.
    LeftOut,
    /// A chain with its own signature, in which this host is the middlebox, a proxy that begins the session.
    OwnProxy,
    /// The chain of an honest session, and the host-ID of the middlebox's host.
    Copied,
    /// The same with FULL.
    CopiedFull,
    /// The chain and the session-ID of an honest session: the signature is valid.
    Replayed,
}

const TRICKS: [Trick; 7] =
    [Trick::Unaware, Trick::Full, Trick::LeftOut, Trick::OwnProxy, Trick::Copied, Trick::CopiedFull, Trick::Replayed];

/// Attempts, and their verdicts. Those without a verdict were not answered.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Evaded {
    /// SYNs, each of another host.
    pub tried: u64,
    /// Sessions that the server's host has confirmed.
    pub accepted: u64,
    /// Those that it has refused.
    pub refused: u64,
}

/// Tries each trick, each time with a new host key. Prints the verdicts (JSON, by trick).
///
/// # Errors
///
/// The capture has no session through the middlebox.
pub fn evade(plan: &Plan) -> Result<()> {
    let middlebox = plan.middlebox.service_id();
    let captured = read_capture(&plan.capture)?;
    let honest = captured.into_iter().map(|one| one.bytes).find(|bytes| passed(bytes, &middlebox).is_some());
    let honest = honest.with_context(|| format!("{}: no session through it", plan.capture.display()))?;
    let mut all: BTreeMap<String, Evaded> = BTreeMap::new();
    for trick in TRICKS {
        let evaded = all.entry(format!("{trick:?}")).or_default();
        for _ in 0..plan.count {
            evaded.tried += 1;
            match attempt(plan, trick, &honest)? {
                Some(true) => evaded.accepted += 1,
                Some(false) => evaded.refused += 1,
                None => {}
            }
        }
    }
    write_line(&serde_json::to_string(&all)?)
}

/// The host of a middlebox that a SYN has passed.
fn passed(datagram: &[u8], middlebox: &ServiceId) -> Option<[u8; 16]> {
    let message = Message::parse(datagram).ok().filter(|message| message.kind == Kind::Syn)?;
    let chain = message.chain()?;
    let is_it = chain.boxes().last()?.service == middlebox.0[..12];
    chain.hosts().last().filter(|_| is_it)
}

/// Whether an unauthenticated host gets a session; `None`: it was not answered.
fn attempt(plan: &Plan, trick: Trick, honest: &[u8]) -> Result<Option<bool>> {
    let middlebox = plan.middlebox.service_id();
    let mut stranger = stranger(plan.service.service_id(), (plan.server, PORT).into())?;
    trick.prepare(&mut stranger, plan.service.service_id(), middlebox)?;
    let honest = honest.to_vec();
    stranger.change = Some(Box::new(move |sent| trick.changed(sent, &honest, &middlebox)));
    stranger.sal.handle_app_packet(clock::now(), &first_packet(plan.port));
    let until = Instant::now() + ANSWER_LIMIT;
    let mut answer = None;
    while answer.is_none() && Instant::now() < until {
        stranger.say();
        stranger.listen(|message| answer = answer.or_else(|| read_answer(message)))?;
    }
    Ok(answer)
}

fn stranger(service: ServiceId, server: SocketAddr) -> Result<Stranger> {
    let mut stranger = Stranger::new(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0))?;
    stranger.sal.bind_name(LEASE.into(), service);
    stranger.add_rule(service, Action::Forward(NextHop { address: server, host: None, router: false }))?;
    Ok(stranger)
}

/// A program's SYN to the name.
fn first_packet(port: u16) -> [u8; SEGMENT_LEN] {
    let (from, to) = (SocketAddrV4::new(HOST, 4_000), SocketAddrV4::new(LEASE, port));
    let mut packet = [0; SEGMENT_LEN];
    let segment = Segment { from, to, sequence: 1, acknowledged: 0, flags: TCP_SYN, length: 0 };
    write_segment(&mut packet, &segment);
    packet
}

/// Whether a message confirms a session, or refuses it.
fn read_answer(message: &Message<'_>) -> Option<bool> {
    let refusals = [ErrorCode::ChainRequired, ErrorCode::NotAllowed, ErrorCode::BadCertificate];
    match message.error() {
        Some(error) => refusals.contains(&error.code).then_some(false),
        // The handshake is complete, and the session is admitted.
        None => (message.kind == Kind::Ack && message.flags.contains(Flags::CONFIRM)).then_some(true),
    }
}

impl Trick {
    /// Gives the stranger's core the policy that the trick needs.
    fn prepare(self, stranger: &mut Stranger, service: ServiceId, middlebox: ServiceId) -> Result<()> {
        let (may_be_left_out, is_proxy) = (self == Self::LeftOut, self == Self::OwnProxy);
        if !may_be_left_out && !is_proxy {
            return Ok(());
        }
        if is_proxy {
            let kind = BoxKind::Proxy(Box::new(Demux {
                listener: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 9),
                other_family: None,
                is_looked_up: false,
                service_port: None,
                protocol: Some(TCP),
                allow: Allow::Any,
            }));
            stranger.add_rule(middlebox, Action::Box(Middlebox { kind, allow: Allow::Any }))?;
        }
        let one = BoxWanted { name: "middlebox".to_owned(), service: middlebox, may_be_left_out, is_proxy };
        let rule = ChainRule {
            name: "made up".to_owned(),
            services: Prefix::from(service),
            protocol: Some(TCP),
            ports: None,
            clients: Vec::new(),
            filter: None,
            boxes: vec![one],
            is_ordered: false,
            may_add: Vec::new(),
        };
        let policy = ChainPolicy { rules: vec![rule], ..ChainPolicy::default() };
        stranger.sal.set_chain_policy(policy).map_err(|error| anyhow!("{error}"))
    }

    /// What is sent instead of a SYN of the core.
    fn changed(self, sent: &[u8], honest: &[u8], middlebox: &ServiceId) -> Option<Vec<u8>> {
        Message::parse(sent).ok().filter(|message| message.kind == Kind::Syn)?;
        let mut changed = match self {
            Self::Unaware | Self::LeftOut | Self::OwnProxy => return None,
            Self::Full => sent.to_vec(),
            Self::Copied | Self::CopiedFull | Self::Replayed => {
                let host = passed(honest, middlebox)?;
                with_chain(sent, honest, host, self == Self::Replayed).ok()?
            }
        };
        if matches!(self, Self::Full | Self::CopiedFull) {
            changed[FLAGS_OFFSET] |= Flags::FULL.bits();
        }
        Some(changed)
    }
}

/// A SYN with the chain of an honest one, the host-ID `host`, and optionally the honest session-ID.
fn with_chain(syn: &[u8], honest: &[u8], host: [u8; 16], is_its_session: bool) -> Result<Vec<u8>, Error> {
    let (message, honest) = (Message::parse(syn)?, Message::parse(honest)?);
    let (chain, its) = honest.chain().zip(honest.session()).ok_or(Error)?;
    let mut changed = vec![0; DATAGRAM_MAX];
    let mut writer = MessageWriter::new(&mut changed, Kind::Syn, message.dst_flow, message.src_flow, 0);
    writer.flags(message.flags).resolvable(&message.resolvable.ok_or(Error)?)?;
    for extension in message.extensions() {
        writer.extension(&match extension {
            Extension::Session(own) => Extension::Session(if is_its_session { its } else { own }),
            Extension::KeyExchange(own) => Extension::KeyExchange(KeyExchangeRepr { host_id: host, ..own }),
            other => other,
        })?;
    }
    writer.extension(&Extension::Chain(chain))?;
    writer.payload(message.next_protocol, message.payload)?.pad_to(DATAGRAM_MAX);
    let length = writer.finish()?;
    changed.truncate(length);
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use margay_wire::{BoxFlags, BoxRepr, ChainRepr, SessionId, SessionRepr};

    use super::*;

    const SERVICE: ServiceId = ServiceId([7; 32]);

    fn middlebox() -> ServiceId {
        "fw.shop".parse::<Name>().expect("a name").service_id()
    }

    /// The SYN of a stranger, as it leaves its host.
    fn syn(trick: Trick, honest: &[u8]) -> Vec<u8> {
        let at = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let mut stranger = stranger(SERVICE, at.local_addr().expect("bound")).expect("a stranger");
        trick.prepare(&mut stranger, SERVICE, middlebox()).expect("a sound policy");
        let honest = honest.to_vec();
        stranger.change = Some(Box::new(move |sent| trick.changed(sent, &honest, &middlebox())));
        stranger.sal.handle_app_packet(clock::now(), &first_packet(7));
        stranger.say();
        let mut datagram = vec![0; DATAGRAM_MAX];
        let length = at.recv(&mut datagram).expect("it was sent");
        datagram.truncate(length);
        datagram
    }

    /// A SYN that has passed the middlebox of another host.
    fn honest() -> Vec<u8> {
        let service = middlebox().0[..12].try_into().expect("as many bytes");
        let boxes = [BoxRepr { service, flags: BoxFlags::PASSED, added_by: 0 }];
        let repr = ChainRepr {
            is_answer: false,
            shared: 0,
            failed_at: 0,
            destination: SERVICE.0,
            time_s: 1,
            host_key: [2; 32],
            signature: [3; 64],
            boxes: &boxes,
            hosts: &[[9; 16]],
            certificates: &[],
        };
        let mut value = [0; 512];
        let chain = repr.emit(&mut value).expect("sound");
        let client = "10.1.0.9:4000".parse().expect("an address");
        let session = SessionRepr { session: SessionId([5; 16]), client, service_port: 7, protocol: TCP };
        let mut buf = vec![0; DATAGRAM_MAX];
        let mut writer = MessageWriter::new(&mut buf, Kind::Syn, margay_wire::FlowId(0), margay_wire::FlowId(1), 0);
        writer.extension(&Extension::Session(session)).expect("room");
        writer.extension(&Extension::Chain(chain)).expect("room");
        let length = writer.finish().expect("room");
        buf.truncate(length);
        buf
    }

    #[test]
    fn each_trick_is_in_the_syn_that_leaves_the_host() {
        for trick in TRICKS {
            let syn = syn(trick, &honest());
            let message = Message::parse(&syn).expect("well-formed");
            assert_eq!((message.kind, message.payload.len()), (Kind::Syn, SEGMENT_LEN), "{trick:?}");
            let is_full = matches!(trick, Trick::Full | Trick::CopiedFull);
            assert_eq!(message.flags.contains(Flags::FULL), is_full, "{trick:?}");
            let own_host = message.key_exchange().map(|exchange| exchange.host_id);
            let flags = message.chain().and_then(|chain| chain.boxes().next()).map(|one| one.flags);
            let left_out = BoxFlags::MAY_BE_LEFT_OUT | BoxFlags::LEFT_OUT;
            let (wanted, host) = match trick {
                Trick::Unaware | Trick::Full => (None, None),
                Trick::LeftOut => (Some(left_out), None),
                Trick::OwnProxy => (Some(BoxFlags::PASSED), own_host),
                Trick::Copied | Trick::CopiedFull | Trick::Replayed => (Some(BoxFlags::PASSED), Some([9; 16])),
            };
            assert_eq!(flags, wanted, "{trick:?}");
            assert_eq!(passed(&syn, &middlebox()), host, "{trick:?}");
            assert!(host.is_none() || own_host == host, "{trick:?} claims to be the middlebox's host");
            let is_honest_session = message.session().map(|session| session.session) == Some(SessionId([5; 16]));
            assert_eq!(is_honest_session, trick == Trick::Replayed);
        }
    }

    #[test]
    fn an_answer_is_a_confirmation_or_a_refusal() {
        let mut buf = [0; 128];
        let mut said = |kind, flags, code: Option<ErrorCode>| {
            let mut writer = MessageWriter::new(&mut buf, kind, margay_wire::FlowId(1), margay_wire::FlowId(2), 0);
            writer.flags(flags);
            if let Some(code) = code {
                let error = margay_wire::ErrorRepr { code, text: "" };
                writer.extension(&Extension::Error(error)).expect("room");
            }
            let length = writer.finish().expect("room");
            read_answer(&Message::parse(&buf[..length]).expect("well-formed"))
        };
        assert_eq!(said(Kind::Ack, Flags::CONFIRM, None), Some(true));
        assert_eq!(said(Kind::SynAck, Flags::empty(), None), None, "nobody is proved yet");
        assert_eq!(said(Kind::Fail, Flags::empty(), Some(ErrorCode::ChainRequired)), Some(false));
        assert_eq!(said(Kind::Error, Flags::empty(), Some(ErrorCode::CookieWanted)), None, "it is asked again");
    }
}
