//! Somebody who tries to take others' sessions as if they were handed over, and has no part in that: a host that others
//! know, by messages with the right tags of its own; one that brings connections to the agents that take them; one on
//! the path that uses tickets which it reads; and a user of a server's host without rights. Or a client of the name
//! that has a part in them, and lies.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Subcommand;
use margay_control::clock::Clock;
use margay_control::entropy;
use margay_control::issue::service_by_key;
use margay_control::keyring::ServiceKey;
use margay_control::relocation::proto::{Count, End, FromGiver, FromTaker, Head, Order, from_giver, from_taker};
use margay_control::relocation::{HAND_OVER, Reader, VERSION, begin};
use margay_core::Sal;
use margay_core::association::Association;
use margay_core::auth;
use margay_core::handshake::Keys;
use margay_core::keepsake::KEEPSAKE_LEN;
use margay_core::key::{HostPublic, HostSecret, SigningKey};
use margay_core::name::{Name, ServiceId, self_certifying_tail};
use margay_core::table::HAND_OVER_PORT;
use margay_wire::{AuthRepr, Error, Extension, Flags, Kind, Message, MessageWriter, PORT, QuietRepr};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::error::Elapsed;
use tokio::time::timeout;

use super::fabricator::{self, FiveTuple, five_tuple};
use super::forger::{DATAGRAM_MAX, fill, read_capture};
use super::hijack::Known;
use super::liar;
use super::stranger::introduce;
use super::ticket_thief;
use crate::host::write_line;
use crate::pump::Dice;

/// Every message of a hand-over, and the end of a quiet session.
const MESSAGES: [(Kind, Flags); 9] = [
    (Kind::RequestLock, Flags::empty()),
    (Kind::AckLock, Flags::empty()),
    (Kind::NackLock, Flags::empty()),
    (Kind::CancelLock, Flags::empty()),
    (Kind::AckCancel, Flags::empty()),
    (Kind::AckCancel, Flags::CONFIRM),
    (Kind::RsynDone, Flags::empty()),
    (Kind::RsynDone, Flags::CONFIRM),
    (Kind::Fin, Flags::empty()),
];
/// Later than that of the handshake, so that the receiver takes all numbers for new.
const EPOCH: u32 = 2;
/// Between two rounds of messages: a queue that is full loses them.
const PAUSE: Duration = Duration::from_millis(1);
/// Bytes of what is no chain of certificates, and no record of a connection.
const JUNK_LEN: usize = 300;
/// For a taker's answers.
const PATIENCE: Duration = Duration::from_secs(8);

/// What is tried.
#[derive(Subcommand, Debug)]
pub enum Plan {
    /// Speak of others' sessions, with the tags of a host that the target knows
    Tagged {
        /// Real traffic of hand-overs (pcap)
        #[arg(long)]
        capture: PathBuf,
        /// Host that has a part in them; may be given more than once
        #[arg(long, required = true)]
        target: Vec<Ipv4Addr>,
        /// Name that each of them serves to everybody
        #[arg(long)]
        service: Name,
        /// Rounds of all messages to each of them
        #[arg(long)]
        count: usize,
    },
    /// Read the tickets of hand-overs on the path, and use them with keys of one's own
    Tickets {
        /// The name
        #[arg(long)]
        service: Name,
        /// Its port
        #[arg(long)]
        port: u16,
        /// For how long
        #[arg(long)]
        time_ms: u64,
    },
    /// Give connections away whose five-tuples were made up in a network namespace of one's own
    Local {
        /// Their name
        #[arg(long)]
        service: Name,
        /// Where they shall go
        #[arg(long)]
        host: String,
        /// `LOCAL,PEER` of a connection; may be given more than once
        #[arg(long, required = true, value_parser = five_tuple)]
        connection: Vec<FiveTuple>,
    },
    /// Be a client of the name, with a key that it admits, and tell giver and taker of each hand-over different things
    Lie {
        /// The name
        #[arg(long)]
        service: Name,
        /// Its port
        #[arg(long)]
        port: u16,
        /// Host that serves it; may be given more than once
        #[arg(long, required = true)]
        server: Vec<Ipv4Addr>,
        /// Sessions to each of them
        #[arg(long)]
        count: usize,
        /// For how long
        #[arg(long)]
        time_ms: u64,
    },
    /// Bring connections to the agents of a name's hosts, without a right to it
    Bring {
        /// Real traffic of hand-overs (pcap)
        #[arg(long)]
        capture: PathBuf,
        /// The name
        #[arg(long)]
        service: Name,
        /// Its virtual address on this host
        #[arg(long)]
        to: IpAddr,
        /// How many
        #[arg(long)]
        count: usize,
    },
}

/// Tries it. Prints how much was tried, and what came of that.
///
/// # Errors
///
/// The capture has no flows to learn from, or nobody is there to be troubled.
pub async fn snatch(plan: &Plan) -> Result<()> {
    match plan {
        Plan::Tagged { capture, target, service, count } => {
            say_tagged(&learn(capture)?, target, service.service_id(), *count)
        }
        Plan::Bring { capture, service, to, count } => {
            bring_all(&learn(capture)?, service.service_id(), *to, *count).await
        }
        Plan::Tickets { service, port, time_ms } => {
            ticket_thief::steal(service.service_id(), *port, Duration::from_millis(*time_ms))
        }
        Plan::Lie { service, port, server, count, time_ms } => {
            liar::lie(service.service_id(), *port, server, *count, Duration::from_millis(*time_ms))
        }
        Plan::Local { service, host, connection } => fabricator::give_away(connection, service, host).await,
    }
}

fn learn(capture: &Path) -> Result<Known> {
    let known = Known::learn(&read_capture(capture)?);
    ensure!(!known.flows.is_empty(), "{} has no flows to learn from", capture.display());
    Ok(known)
}

fn say_tagged(known: &Known, targets: &[Ipv4Addr], service: ServiceId, count: usize) -> Result<()> {
    let mut dice = Dice::new(11);
    let mut sent = 0;
    let mut answered = 0;
    for (number, target) in targets.iter().enumerate() {
        let at = SocketAddr::from((*target, PORT));
        let stranger = introduce(service, at)?;
        let mut association =
            associations(&stranger.sal).pop().with_context(|| format!("{at} has not met this host"))?;
        // A host that could take a session.
        let taker = SocketAddr::from((targets[(number + 1) % targets.len()], PORT));
        for _ in 0..count {
            for (kind, flags) in MESSAGES {
                let mut buf = [0; DATAGRAM_MAX];
                let written = tagged(known, kind, flags, &mut association, taker, &mut dice, &mut buf);
                let length = written.map_err(|error| anyhow!("a {kind:?} cannot be written: {error:?}"))?;
                sent += u64::from(stranger.socket.send_to(&buf[..length], at).is_ok());
            }
            std::thread::sleep(PAUSE);
        }
        answered += answers(&stranger.socket);
    }
    write_line(&json!({"sent": sent, "answered": answered}).to_string())
}

/// What a host shares with those that it has met, the latest last: from what the next start would have of it, since
/// nothing else tells of keys (`margay_core::keepsake` has the layout).
pub(super) fn associations(sal: &Sal) -> Vec<Association> {
    let one = |record: &[u8]| {
        let word = |place: usize| Some(u32::from_be_bytes(record.get(place..place + 4)?.try_into().ok()?));
        let key = |place: usize| -> Option<[u8; 32]> { record.get(place..place + 32)?.try_into().ok() };
        let ip: [u8; 16] = record.get(112..128)?.try_into().ok()?;
        let port = u16::from_be_bytes(record.get(128..130)?.try_into().ok()?);
        let at = SocketAddr::new(IpAddr::from(ip).to_canonical(), port);
        let keys = Keys { root: key(48)? };
        let mut known = Association::new(word(4)?, word(8)?, HostPublic(key(16)?), keys, record[1] & 1 != 0, at);
        known.peer_epoch = word(12)?;
        Some(known)
    };
    sal.keep_associations().chunks_exact(KEEPSAKE_LEN).filter_map(one).collect()
}

/// A message about a session of others.
fn tagged(
    known: &Known,
    kind: Kind,
    flags: Flags,
    association: &mut Association,
    taker: SocketAddr,
    dice: &mut Dice,
    buf: &mut [u8],
) -> Result<usize, Error> {
    let (dst, src) = known.flows[dice.below(known.flows.len())];
    let (assoc_id, receiver_epoch) = (association.remote_id, association.peer_epoch);
    let own = AuthRepr { assoc_id, epoch: EPOCH, receiver_epoch, tag: [0; 16] };
    let what = match kind {
        Kind::Fin => Extension::Quiet(QuietRepr { quiet_ms: 0 }),
        _ => Extension::Handover(known.handover(taker, dice)),
    };
    let mut writer = MessageWriter::new(buf, kind, dst, src, association.next_seq());
    writer.flags(flags).extension(&what)?.extension(&Extension::Auth(own))?;
    let length = writer.finish()?;
    auth::sign(association, &mut buf[..length]).map_err(|_| Error)?;
    Ok(length)
}

/// How many messages about hand-overs have come: who answers has found the tag right.
fn answers(socket: &UdpSocket) -> u64 {
    let mut count = 0;
    let mut datagram = [0; 2048];
    // Until none comes for a while.
    while let Ok((length, _)) = socket.recv_from(&mut datagram) {
        let is_answer = Message::parse(&datagram[..length]).is_ok_and(|message| message.handover().is_some());
        count += u64::from(is_answer);
    }
    count
}

/// What has come of connections that were brought.
#[derive(Default)]
struct Brought {
    /// A taker has heard of them.
    tried: u64,
    /// It wanted one.
    accepted: u64,
    /// It said why not.
    refused: u64,
    /// The last thing that was said.
    said: String,
}

async fn bring_all(known: &Known, service: ServiceId, to: IpAddr, count: usize) -> Result<()> {
    let mut dice = Dice::new(13);
    let mut brought = Brought::default();
    let mut ordered = Brought::default();
    for number in 0..count {
        let mut junk = vec![0; JUNK_LEN];
        fill(&mut dice, &mut junk);
        let chain = if number % 2 == 0 { Vec::new() } else { junk.clone() };
        let ticket = known.handover(SocketAddr::new(to, PORT), &mut dice).ticket.to_vec();
        let (mut client, mut session) = (vec![0; 16], vec![0; 16]);
        fill(&mut dice, &mut client);
        fill(&mut dice, &mut session);
        let service = service.0.to_vec();
        let head = Head { version: VERSION, ticket, service, chain, data_length: 0, client, session, port: 81 };
        let ended = timeout(PATIENCE, stay(head.clone(), to, &mut ordered)).await;
        ordered.note(ended);
        let ended = timeout(PATIENCE, order(&head, to, &mut ordered)).await;
        ordered.note(ended);
        let ended = timeout(PATIENCE, bring(head, junk, to, &mut brought)).await;
        brought.note(ended);
    }
    let Brought { tried, refused, said, .. } = brought;
    let accepted = brought.accepted + ordered.accepted;
    write_line(&json!({"sent": tried, "accepted": accepted, "refused": refused, "said": said}).to_string())
}

impl Brought {
    fn note(&mut self, ended: Result<Result<()>, Elapsed>) {
        match ended {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self.said = format!("{error:#}"),
            Err(_) => self.said = "no answer in time".to_owned(),
        }
    }

    /// Hears what a taker says. Whether it has said something.
    async fn hear(&mut self, reader: &mut Reader) -> bool {
        let Ok(FromTaker { body: Some(body) }) = reader.read::<FromTaker>().await else { return false };
        match body {
            from_taker::Body::Refused(refused) => {
                self.refused += 1;
                self.said = refused.text;
            }
            from_taker::Body::Willing(_)
            | from_taker::Body::Restored(_)
            | from_taker::Body::Counted(_)
            | from_taker::Body::Settled(_) => {
                self.accepted += 1;
            }
        }
        true
    }
}

/// Offers a connection of a name that its own key speaks for, and that nobody serves there: whoever may stay for that
/// could take up all streams.
async fn stay(head: Head, to: IpAddr, brought: &mut Brought) -> Result<()> {
    let (key, signer) = (HostSecret::generate(&mut entropy::rng()?), SigningKey::generate(&mut entropy::rng()?));
    let mut id: [u8; 32] = head.service.clone().try_into().map_err(|_| anyhow!("no service ID"))?;
    let first: [u8; 12] = std::array::from_fn(|at| id[at]);
    id[12..].copy_from_slice(&self_certifying_tail(&signer.public(), &first));
    let service = ServiceKey { name: "snatched".to_owned(), key: signer, service: ServiceId(id) };
    let (chain, _) = service_by_key(&service, &key.public(), Clock::system().unix_s());
    let head = Head { service: id.to_vec(), chain, ..head };
    let stream = TcpStream::connect((to, HAND_OVER_PORT)).await.context("no agent takes connections there")?;
    let (mut reader, mut writer, _) = begin(stream, &key, HAND_OVER).await?;
    writer.write(&FromGiver { body: Some(from_giver::Body::Head(head.clone())) }).await?;
    brought.hear(&mut reader).await;
    let mut again = Brought::default();
    let is_said = writer.write(&FromGiver { body: Some(from_giver::Body::Head(head)) }).await.is_ok();
    brought.accepted += u64::from(is_said && again.hear(&mut reader).await);
    Ok(())
}

/// Asks how many connections there are, and orders that they are given away.
async fn order(head: &Head, to: IpAddr, brought: &mut Brought) -> Result<()> {
    let key = HostSecret::generate(&mut entropy::rng()?);
    let stream = TcpStream::connect((to, HAND_OVER_PORT)).await.context("no agent takes orders there")?;
    let (mut reader, mut writer, _) = begin(stream, &key, HAND_OVER).await?;
    let Head { service, chain, ticket, .. } = head.clone();
    let order = Some(Order { id: ticket, max_per_s: 1000 });
    let question = Count { version: VERSION, service, bits: 256, chain, order, rehearsed: true };
    writer.write(&FromGiver { body: Some(from_giver::Body::Count(question)) }).await?;
    brought.hear(&mut reader).await;
    Ok(())
}

/// Offers a connection, and sends it whatever the taker says.
async fn bring(head: Head, record: Vec<u8>, to: IpAddr, brought: &mut Brought) -> Result<()> {
    let key = HostSecret::generate(&mut entropy::rng()?);
    let stream = TcpStream::connect((to, HAND_OVER_PORT)).await.context("no agent takes connections there")?;
    let (mut reader, mut writer, _) = begin(stream, &key, HAND_OVER).await?;
    writer.write(&FromGiver { body: Some(from_giver::Body::Head(head)) }).await?;
    brought.tried += 1;
    // Read at once: a reset, which what follows may bring about, would take the answer with it.
    brought.hear(&mut reader).await;
    for body in [from_giver::Body::Record(record), from_giver::Body::End(End {})] {
        // The taker may have ended the stream by now.
        if writer.write(&FromGiver { body: Some(body) }).await.is_err() {
            break;
        }
    }
    while brought.hear(&mut reader).await {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use margay_wire::{FlowId, Message};

    use super::super::forger::Captured;
    use super::{
        Association, DATAGRAM_MAX, Dice, HostPublic, Keys, Kind, Known, MESSAGES, MessageWriter, PORT, auth, tagged,
    };

    #[test]
    fn messages_are_tagged_as_the_receiver_wants_them() {
        let mut buf = [0; DATAGRAM_MAX];
        let length = MessageWriter::new(&mut buf, Kind::Probe, FlowId(1), FlowId(2), 3).finish().expect("it fits");
        let known = Known::learn(&[Captured { from: [10, 0, 0, 1].into(), bytes: buf[..length].to_vec() }]);
        let at = ([10, 0, 0, 2], PORT).into();
        let end = |is_initiator| Association::new(7, 7, HostPublic([1; 32]), Keys { root: [2; 32] }, is_initiator, at);
        let mut own = end(true);
        let mut target = end(false);
        let mut dice = Dice::new(1);
        for (kind, flags) in MESSAGES {
            let length = tagged(&known, kind, flags, &mut own, at, &mut dice, &mut buf).expect("it fits");
            let written = Message::parse(&buf[..length]).expect("well-formed");
            assert_eq!((written.kind, written.flags, written.dst_flow), (kind, flags, FlowId(1)));
            assert_eq!(written.handover().is_some(), kind != Kind::Fin);
            let epoch = written.auth().expect("a tag").epoch;
            assert!(auth::verify_with_key(&target.receiving_key(epoch), &written).is_ok(), "{kind:?}");
        }
    }
}
