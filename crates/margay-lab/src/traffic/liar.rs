//! A client that tells giver and taker of a hand-over different things. It has the core, the datapath and the TCP of an
//! honest host, and a key of its own that the service admits: its messages about hand-overs alone are others than its
//! core has meant.

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant as Moment};

use anyhow::{Result, ensure};
use margay_core::association::Association;
use margay_core::instance::{Instance, Pin};
use margay_core::key::{HostId, HostSecret};
use margay_core::name::ServiceId;
use margay_core::rng::Rng;
use margay_core::table::NextHop;
use margay_core::time::Instant;
use margay_core::{AppVerdict, Event, Input, Output, Sal, auth};
use margay_datapath::{Core, Datapath, DatapathConfig, clock};
use margay_wire::{AuthRepr, Error, Extension, Flags, FlowId, HandoverRepr, Kind, Message, MessageWriter, PORT};
use serde_json::json;

use super::forger::DATAGRAM_MAX;
use super::snatch::associations;
use super::stranger::core_of;
use crate::host::write_line;

/// As the core's own.
const EPOCH: u32 = 1;
const NETWORK: &str = "ip link set sal0 addrgenmode none; ip link set sal0 mtu 1446 up; \
    ip address add 198.18.0.1/32 dev sal0; ip route add 198.18.0.0/15 dev sal0 src 198.18.0.1";
/// Of each server: what stands for it here.
const FIRST_LEASE: u32 = u32::from_be_bytes([198, 18, 1, 1]);
const EVERY: Duration = Duration::from_millis(50);
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// No session is left for want of an answer while giver and taker compare what they know of it.
const ANSWER_LIMIT: Duration = Duration::from_secs(8);
/// How often a taker is told of a session that comes late, from its first chance on: for longer than it takes to set
/// the connection up.
const PRESSING: u32 = 2_000;
const PRESSING_EVERY: Duration = Duration::from_micros(30);
/// For what is under way when all sessions end.
const END: Duration = Duration::from_secs(1);

/// What the giver is told of a session, and the taker otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    /// That it is not fetched; it is.
    Refuses,
    /// That it stays, before the taker is told that it goes there.
    Stays,
    /// The same, after that.
    StaysLater,
    /// The same, while the connection is on its way.
    Cancels,
    /// That it has gone to the taker, which is told nothing.
    Gone,
    /// That it stays; the taker, which is asked only when the giver has waited for it in vain, that it goes there.
    ComesLate,
    /// The truth: this host has forgotten it. Where the core has forgotten all that it shared with the giver, too, it
    /// would say nothing, and the giver would wait.
    None,
}

const LIES: [Lie; 6] = [Lie::Refuses, Lie::Stays, Lie::StaysLater, Lie::Cancels, Lie::Gone, Lie::ComesLate];

/// What a liar does some milliseconds later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Tells the giver.
    Say(Kind, Flags),
    /// Has the core do what the giver has asked for.
    Fetch,
    /// Tells the taker that this host goes there.
    Press,
}

const GRANTED: Step = Step::Say(Kind::AckLock, Flags::empty());
const REFUSED: Step = Step::Say(Kind::NackLock, Flags::empty());
const CANCELLED: Step = Step::Say(Kind::CancelLock, Flags::empty());
const STAYS: Step = Step::Say(Kind::AckCancel, Flags::empty());
const GONE: Step = Step::Say(Kind::AckCancel, Flags::CONFIRM);
const DONE: Step = Step::Say(Kind::RsynDone, Flags::CONFIRM);

impl Lie {
    /// What is done where the giver asks for a session and the core is not told; `None`: it is.
    const fn for_request(self) -> Option<&'static [(u64, Step)]> {
        match self {
            Self::Gone => Some(&[(0, GRANTED), (0, DONE), (20, GONE)]),
            // A giver waits for five seconds, and a taker for ten.
            Self::ComesLate => Some(&[(0, GRANTED), (200, STAYS), (6_000, Step::Fetch)]),
            Self::None => Some(&[(0, REFUSED)]),
            Self::Refuses | Self::Stays | Self::StaysLater | Self::Cancels => None,
        }
    }

    /// What the giver is told in the place of what the core has meant; `None`: the truth.
    const fn in_place_of(self, kind: Kind, flags: Flags) -> Option<&'static [(u64, Step)]> {
        match (self, kind) {
            (Self::Refuses, Kind::AckLock) => Some(&[(0, REFUSED)]),
            (Self::Cancels, Kind::AckLock) => Some(&[(0, GRANTED), (0, CANCELLED), (0, STAYS)]),
            (Self::ComesLate, Kind::AckLock) => Some(&[]),
            (Self::StaysLater, Kind::AckCancel) if flags.contains(Flags::CONFIRM) => {
                Some(&[(20, REFUSED), (20, STAYS)])
            }
            (_, Kind::AckCancel) if flags.contains(Flags::CONFIRM) => Some(&[(0, REFUSED), (0, STAYS)]),
            _ => None,
        }
    }
}

/// Whom a message is for.
#[derive(Clone, Copy)]
struct Recipient {
    at: SocketAddr,
    /// By this host's index.
    association: u32,
    /// The recipient's flow, and this host's.
    flows: (FlowId, FlowId),
}

/// A hand-over that a giver has asked for.
struct Asked {
    lie: Lie,
    handover: HandoverRepr,
    giver: Recipient,
    taker: Option<Recipient>,
    /// This host's flow to the taker.
    fetching: Option<FlowId>,
    request: Vec<u8>,
    is_lied_about: bool,
}

struct Liar {
    sal: Sal,
    /// What the core shares with others, with other numbers: all that it sends is tagged again, so that there is room
    /// between its messages.
    associations: Vec<Association>,
    asked: BTreeMap<[u8; 16], Asked>,
    due: Vec<(Instant, [u8; 16], Step)>,
    words: VecDeque<(SocketAddr, Vec<u8>)>,
    /// Of [`LIES`], each in its turn.
    next: usize,
    said: u64,
    lies: u64,
}

impl Liar {
    fn new() -> Result<Self> {
        let sal = core_of(key())?;
        let (associations, asked, due, words) = (Vec::new(), BTreeMap::new(), Vec::new(), VecDeque::new());
        Ok(Self { sal, associations, asked, due, words, next: 0, said: 0, lies: 0 })
    }

    fn association(&mut self, is_it: impl Fn(&Association) -> bool) -> Option<&mut Association> {
        if !self.associations.iter().any(&is_it) {
            let known = associations(&self.sal);
            let is_new = |one: &Association| self.associations.iter().all(|old| old.local_id != one.local_id);
            let new: Vec<Association> = known.into_iter().filter(is_new).collect();
            self.associations.extend(new);
        }
        self.associations.iter_mut().find(|one| is_it(one))
    }

    /// Whether the core is not to hear of a message.
    fn hear(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) -> bool {
        let Ok(message) = Message::parse(datagram) else { return false };
        let asks = matches!(message.kind, Kind::RequestLock | Kind::CancelLock);
        let Some(handover) = message.handover().filter(|_| asks) else { return false };
        if let Some(asked) = self.asked.get(&handover.ticket) {
            return asked.lie.for_request().is_some();
        }
        if handover.address.port() == 0 {
            return false;
        }
        let is_known = self.sal.flow(message.dst_flow).is_some();
        let lie = if is_known { LIES[self.next % LIES.len()] } else { Lie::None };
        self.next += usize::from(is_known);
        self.take_up(now, lie, from, datagram)
    }

    /// A giver asks for a session. Whether the core is not to hear of that.
    fn take_up(&mut self, now: Instant, lie: Lie, from: SocketAddr, request: &[u8]) -> bool {
        let Ok(message) = Message::parse(request) else { return false };
        let Some((handover, auth)) = message.handover().zip(message.auth()) else { return false };
        let flows = (message.src_flow, message.dst_flow);
        let asked = Asked {
            lie,
            handover: HandoverRepr { address: ([0; 16], 0).into(), ..handover },
            giver: Recipient { at: from, association: auth.assoc_id, flows },
            taker: None,
            fetching: None,
            request: request.to_vec(),
            is_lied_about: false,
        };
        self.asked.insert(handover.ticket, asked);
        let Some(steps) = lie.for_request() else { return false };
        self.begin(now, handover.ticket, steps);
        true
    }

    fn begin(&mut self, now: Instant, ticket: [u8; 16], steps: &[(u64, Step)]) {
        if let Some(asked) = self.asked.get_mut(&ticket) {
            let is_new = asked.lie != Lie::None && !std::mem::replace(&mut asked.is_lied_about, true);
            self.lies += u64::from(is_new);
        }
        self.due.extend(steps.iter().map(|(ms, step)| (now + Duration::from_millis(*ms), ticket, *step)));
        self.go_on(now);
    }

    /// Does what is due.
    fn go_on(&mut self, now: Instant) {
        let (due, later) = self.due.drain(..).partition::<Vec<_>, _>(|(at, ..)| *at <= now);
        self.due = later;
        for (_, ticket, step) in due {
            let Some(asked) = self.asked.get(&ticket) else { continue };
            match (step, asked.taker) {
                (Step::Say(kind, flags), _) => self.say(asked.giver, kind, flags, asked.handover),
                (Step::Press, Some(taker)) => self.say(taker, Kind::RsynDone, Flags::CONFIRM, asked.handover),
                (Step::Press, None) => {}
                (Step::Fetch, _) => {
                    let (giver, request) = (asked.giver.at, asked.request.clone());
                    // What the core makes of it is its own affair.
                    let _ = self.sal.handle_datagram(now, None, giver, &request);
                }
            }
        }
    }

    fn say(&mut self, to: Recipient, kind: Kind, flags: Flags, handover: HandoverRepr) {
        let Some(association) = self.association(|one| one.local_id == to.association) else { return };
        if let Ok(word) = tagged(association, kind, flags, to.flows, &handover) {
            self.words.push_back((to.at, word));
            self.said += 1;
        }
    }

    /// Whether something else is said in the place of a message of the core's.
    fn lies(&mut self, to: SocketAddr, datagram: &[u8]) -> bool {
        let Ok(message) = Message::parse(datagram) else { return false };
        let Some(handover) = message.handover() else { return false };
        let asked = self.asked.get(&handover.ticket).filter(|asked| asked.giver.at == to);
        let Some(steps) = asked.and_then(|asked| asked.lie.in_place_of(message.kind, message.flags)) else {
            return false;
        };
        self.begin(clock::now(), handover.ticket, steps);
        true
    }

    /// The core fetches a session late. The taker hears that this host goes there as soon as it can hear that: so often
    /// that it does nothing without having heard it.
    fn press(&mut self, to: SocketAddr, datagram: &[u8]) {
        let Ok(message) = Message::parse(datagram) else { return };
        if let Some(handover) = message.handover().filter(|_| message.kind == Kind::Syn) {
            let asked = self.asked.get_mut(&handover.ticket).filter(|asked| asked.lie == Lie::ComesLate);
            asked.into_iter().for_each(|asked| asked.fetching = Some(message.src_flow));
        }
        let Some(auth) = message.auth().filter(|_| message.kind == Kind::Ack) else { return };
        let is_it = |one: &Association| one.remote_id == auth.assoc_id && one.remote == to;
        let Some(association) = self.association(is_it).map(|one| one.local_id) else { return };
        let fetched = self.asked.iter_mut().find(|(_, asked)| asked.fetching == Some(message.src_flow));
        let Some((ticket, asked)) = fetched else { return };
        asked.taker = Some(Recipient { at: to, association, flows: (message.dst_flow, message.src_flow) });
        let (ticket, now) = (*ticket, clock::now());
        self.due.extend((0..PRESSING).map(|number| (now + number * PRESSING_EVERY, ticket, Step::Press)));
    }

    /// The core's messages have their places among the others.
    fn tag_again(&mut self, to: SocketAddr, datagram: &mut [u8]) {
        let Some(auth) = Message::parse(datagram).ok().and_then(|message| message.auth()) else { return };
        let is_it = |one: &Association| one.remote_id == auth.assoc_id && one.remote == to;
        if let Some(association) = self.association(is_it) {
            // It has a tag.
            let _ = auth::sign_again(association, datagram);
        }
    }

    /// Ends what its core has forgotten, and the giver has not.
    fn end(&mut self) {
        let asked: Vec<_> = self.asked.values().map(|asked| (asked.giver, asked.handover)).collect();
        asked.into_iter().for_each(|(giver, handover)| self.say(giver, Kind::Fail, Flags::empty(), handover));
    }
}

impl Core for Liar {
    fn handle_app_packet(&mut self, now: Instant, packet: &[u8]) -> AppVerdict {
        self.sal.handle_app_packet(now, packet)
    }

    fn handle_datagram(&mut self, now: Instant, local: Option<IpAddr>, from: SocketAddr, datagram: &[u8]) {
        if !self.hear(now, from, datagram) {
            // What the core makes of it is its own affair.
            let _ = self.sal.handle_datagram(now, local, from, datagram);
        }
    }

    fn handle(&mut self, now: Instant, input: Input<'_>) {
        self.go_on(now);
        self.sal.handle(now, input);
    }

    fn untold(&self, datagram: &[u8]) -> Option<(FlowId, u128)> {
        self.sal.untold(datagram)
    }

    fn poll(&mut self, buf: &mut [u8]) -> Option<Output> {
        loop {
            if let Some((to, word)) = self.words.pop_front() {
                buf.get_mut(..word.len())?.copy_from_slice(&word);
                return Some(Output::Transmit { local: None, to, len: word.len() });
            }
            let output = self.sal.poll(buf)?;
            let Output::Transmit { to, len, .. } = output else { return Some(output) };
            if !self.lies(to, &buf[..len]) {
                self.tag_again(to, &mut buf[..len]);
                self.press(to, &buf[..len]);
                return Some(output);
            }
        }
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.sal.poll_event()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.due.iter().map(|(at, ..)| *at).chain(self.sal.poll_timeout()).min()
    }
}

/// A message of a hand-over.
fn tagged(
    association: &mut Association,
    kind: Kind,
    flags: Flags,
    (to, from): (FlowId, FlowId),
    handover: &HandoverRepr,
) -> Result<Vec<u8>, Error> {
    let mut buf = vec![0; DATAGRAM_MAX];
    let (assoc_id, receiver_epoch) = (association.remote_id, association.peer_epoch);
    let own = AuthRepr { assoc_id, epoch: EPOCH, receiver_epoch, tag: [0; 16] };
    let mut writer = MessageWriter::new(&mut buf, kind, to, from, association.next_seq());
    writer.flags(flags).extension(&Extension::Handover(*handover))?.extension(&Extension::Auth(own))?;
    let length = writer.finish()?;
    buf.truncate(length);
    auth::sign(association, &mut buf).map_err(|_| Error)?;
    Ok(buf)
}

fn key() -> HostSecret {
    HostSecret::generate(&mut Rng::new([39; 32]))
}

/// Whom the service has to admit.
pub fn liars_id() -> HostId {
    key().public().id()
}

/// Talks over so many sessions to each server for some time, and lies whenever one is handed over. Prints how often,
/// and how many messages that took.
///
/// # Errors
///
/// This host has a datapath already.
pub fn lie(service: ServiceId, port: u16, servers: &[Ipv4Addr], count: usize, time: Duration) -> Result<()> {
    let datapath = Datapath::start(DatapathConfig::default(), Liar::new()?, Box::new(|_| ()))?;
    ensure!(Command::new("sh").args(["-ec", NETWORK]).status()?.success(), "sal0 is not to be had");
    let mut leases = Vec::new();
    for (server, lease) in servers.iter().zip(FIRST_LEASE..) {
        let lease = Ipv4Addr::from(lease);
        let next_hop = NextHop { address: (*server, PORT).into(), host: None, router: false };
        let instance = Instance { service, next_hop, pin: Pin::Only };
        datapath.with_sal(|liar, _| liar.sal.bind_instance(lease.into(), instance));
        leases.push(SocketAddr::from((lease, port)));
    }
    datapath.begin();
    let until = Moment::now() + time;
    let answered: u64 = std::thread::scope(|scope| {
        let sessions = leases.iter().flat_map(|to| std::iter::repeat_n(*to, count));
        let talking: Vec<_> = sessions.map(|to| scope.spawn(move || talk(to, until))).collect();
        talking.into_iter().map(|one| one.join().unwrap_or_default()).sum()
    });
    sleep(END);
    datapath.with_sal(|liar, _| liar.end());
    sleep(END);
    let (said, lies) = datapath.with_sal(|liar, _| (liar.said, liar.lies));
    write_line(&json!({"sent": said, "lies": lies, "echoes": answered}).to_string())
}

/// Talks over one session, and over the next one where that has ended. Gives how often it was answered.
fn talk(to: SocketAddr, until: Moment) -> u64 {
    let mut answered = 0;
    while Moment::now() < until {
        let stream = TcpStream::connect_timeout(&to, CONNECT_LIMIT);
        let Ok(mut stream) = stream.and_then(|stream| stream.set_read_timeout(Some(ANSWER_LIMIT)).map(|()| stream))
        else {
            sleep(EVERY);
            continue;
        };
        let Ok(mut reader) = stream.try_clone().map(BufReader::new) else { continue };
        let mut line = String::new();
        while Moment::now() < until && stream.write_all(b"so it is\n").is_ok() {
            if !reader.read_line(&mut line).is_ok_and(|length| length > 0) {
                break;
            }
            answered += 1;
            sleep(EVERY);
        }
    }
    answered
}

#[cfg(test)]
mod tests {
    use margay_core::handshake::Keys;

    use super::*;

    const FLOWS: (FlowId, FlowId) = (FlowId(1), FlowId(2));

    fn end(is_initiator: bool) -> Association {
        let at = ([10, 0, 0, 2], PORT).into();
        Association::new(7, 7, key().public(), Keys { root: [2; 32] }, is_initiator, at)
    }

    fn handover(port: u16) -> HandoverRepr {
        HandoverRepr { ticket: [1; 16], giver: [2; 16], taker: [3; 16], address: ([10, 0, 0, 3], port).into() }
    }

    /// What a giver is told that has asked for a session, and whether the core is to fetch that.
    fn told(lie: Lie, core_says: (Kind, Flags)) -> (Vec<(Kind, Flags)>, bool) {
        let mut liar = Liar::new().expect("a core");
        liar.associations.push(end(true));
        let mut giver = end(false);
        let request = tagged(&mut giver, Kind::RequestLock, Flags::empty(), FLOWS, &handover(PORT)).expect("room");
        let at = giver.remote;
        let now = clock::now();
        let is_withheld = liar.take_up(now, lie, at, &request);
        let meant = tagged(&mut end(true), core_says.0, core_says.1, FLOWS, &handover(0)).expect("room");
        if !is_withheld {
            assert!(liar.lies(at, &meant), "{lie:?}");
        }
        liar.go_on(now + Duration::from_secs(1));
        let words = std::mem::take(&mut liar.words).into_iter().map(|(to, word)| {
            let message = Message::parse(&word).expect("well-formed");
            let key = giver.receiving_key(EPOCH);
            assert!(to == at && auth::verify_with_key(&key, &message).is_ok(), "{lie:?}");
            assert_eq!((message.dst_flow, message.src_flow), (FLOWS.1, FLOWS.0));
            (message.kind, message.flags)
        });
        let words = words.collect();
        assert_eq!(liar.lies, u64::from(LIES.contains(&lie)), "{lie:?}");
        (words, !is_withheld)
    }

    #[test]
    fn a_giver_is_told_otherwise_than_the_core_has_meant() {
        let fetched = (Kind::AckLock, Flags::empty());
        let gone = (Kind::AckCancel, Flags::CONFIRM);
        let stays = (Kind::AckCancel, Flags::empty());
        let refused = (Kind::NackLock, Flags::empty());
        assert_eq!(told(Lie::Refuses, fetched), (vec![refused], true));
        assert_eq!(told(Lie::Stays, gone), (vec![refused, stays], true));
        assert_eq!(told(Lie::StaysLater, gone), (vec![refused, stays], true));
        assert_eq!(told(Lie::Cancels, fetched), (vec![fetched, (Kind::CancelLock, Flags::empty()), stays], true));
        assert_eq!(told(Lie::Gone, fetched), (vec![fetched, (Kind::RsynDone, Flags::CONFIRM), gone], false));
        assert_eq!(told(Lie::ComesLate, fetched), (vec![fetched, stays], false));
        assert_eq!(told(Lie::None, fetched), (vec![refused], false));
    }
}
