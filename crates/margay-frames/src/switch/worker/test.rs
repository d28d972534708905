//! A switch between ends of its own, in virtual time.

use std::collections::BTreeMap;

use margay_ensemble::{Connection, ConnectionConfig as EndConfig, Order, Over, Standing, Tsn};
use margay_wire::sctp::PacketWriter;

use super::*;
use crate::head::Head;
use crate::protocol::Protocol;
use crate::router::{MEMBER_DIED, Policy};

const CLIENT: u64 = 77;

fn client_at() -> SocketAddr {
    "192.0.2.1:9".parse().expect("literal")
}

/// A member: its connections by their numbers, and what it does.
#[derive(Default)]
pub(super) struct End {
    pub(super) connections: BTreeMap<u64, Connection>,
    /// Requests that it was asked.
    pub(super) asked: Vec<String>,
    /// It takes requests, and does not answer them.
    pub(super) is_mute: bool,
    /// Nothing comes from it, or goes there.
    pub(super) is_cut: bool,
    /// Its flow leads to another host.
    pub(super) is_elsewhere: bool,
    /// It is not among the members that there are.
    pub(super) is_unlisted: bool,
    /// It is listed with the weight 0.
    pub(super) is_weightless: bool,
    /// Its program is a Redis.
    pub(super) is_of_redis: bool,
    /// It takes no connections.
    pub(super) is_leaving: bool,
}

pub(super) struct Rig {
    pub(super) worker: Worker,
    pub(super) now: Instant,
    pub(super) client: Connection,
    pub(super) next_request: u32,
    pub(super) members: BTreeMap<Host, End>,
    /// What the client has got: of requests and ABORTs.
    pub(super) answers: Vec<(u32, String)>,
    /// So many of a thousand datagrams are lost.
    pub(super) lost_per_mille: u64,
    rng: Rng,
}

pub(super) fn host(number: u8) -> Host {
    [number; 16]
}

impl Rig {
    pub(super) fn new(hosts: &[u8]) -> Self {
        Self::seeded(hosts, 7)
    }

    pub(super) fn seeded(hosts: &[u8], seed: u8) -> Self {
        let config = Config {
            name: "cache.test".to_owned(),
            members: "members.test".to_owned(),
            content: Protocol::Memcached.into(),
            policy: Policy::RoundRobin,
            window: 64,
            module: None,
        };
        let client = Connection::open(Instant::ZERO, CLIENT, [0; 16], EndConfig::default());
        let mut rig = Self {
            worker: Worker::new(config, [seed; 32]),
            now: Instant::ZERO,
            client,
            next_request: 0,
            members: BTreeMap::new(),
            answers: Vec::new(),
            lost_per_mille: 0,
            rng: Rng::new([seed; 32]),
        };
        hosts.iter().for_each(|number| drop(rig.members.insert(host(*number), End::default())));
        rig.list();
        rig
    }

    pub(super) fn list(&mut self) {
        let address = "192.0.2.2:9".parse().expect("literal");
        let at = |host: &Host, weight| MemberAt { host: *host, name: format!("m{}", host[0]), address, weight };
        let its = self.members.iter().filter(|(_, end)| !end.is_unlisted);
        let weight = |end: &End| if end.is_weightless { 0 } else { 100 };
        let listed: Vec<MemberAt> = its.map(|(host, end)| at(host, weight(end))).collect();
        self.worker.set_members(self.now, &listed);
    }

    pub(super) fn ask(&mut self, request: &str) -> u32 {
        let number = self.next_request;
        self.next_request += 1;
        let frame = Head { number, oldest: 0 }.frame(request.as_bytes());
        self.client.send(self.now, Order::Member, &frame).expect("room");
        self.client.await_frames(self.now, true);
        number
    }

    /// Runs for so long.
    pub(super) fn pass(&mut self, millis: u64) {
        let end = self.now + Duration::from_millis(millis);
        while self.now < end {
            self.step();
            self.now += Duration::from_millis(1);
        }
    }

    fn step(&mut self) {
        let mut out = [0; Connection::DATAGRAM_MAX];
        self.client.on_time(self.now);
        while let Some(len) = self.client.poll_datagram(self.now, &mut out) {
            if !self.is_lost() {
                self.worker.take_from_peer(self.now, client_at(), &out[..len]);
            }
        }
        let members: Vec<Host> = self.members.keys().copied().collect();
        for host in members {
            self.step_member(host);
        }
        self.worker.on_time(self.now);
        let outgoing = self.worker.take_outgoing();
        for (_, message) in outgoing.to_peers.messages() {
            if self.is_lost() {
                continue;
            }
            let (_, says) = Framed::parse(message).expect("sound");
            self.client.on_datagram(self.now, &says);
        }
        for (host, outbound) in &outgoing.to_members {
            for (_, message) in outbound.messages() {
                if !self.is_lost() {
                    self.member_hears(*host, message);
                }
            }
        }
        while let Some(frame) = self.client.poll_frame() {
            let (head, bytes) = Head::split(&frame.bytes).expect("an answer");
            self.answers.push((head.number, String::from_utf8_lossy(bytes).into_owned()));
        }
    }

    /// Whether the next datagram is.
    fn is_lost(&mut self) -> bool {
        self.lost_per_mille > 0 && self.rng.u64() % 1000 < self.lost_per_mille
    }

    fn member_hears(&mut self, host: Host, datagram: &[u8]) {
        let Some(end) = self.members.get_mut(&host).filter(|end| !end.is_cut) else { return };
        let (number, says) = Framed::parse(datagram).expect("sound");
        let is_of_host = number == framed_host_number(&host);
        match (end.connections.get_mut(&number), &says) {
            _ if end.is_elsewhere => {
                let reason = match says {
                    Framed::Hello { .. } => AbortReason::OtherHost,
                    Framed::Data(_) | Framed::Ping => AbortReason::Unknown,
                    _ => return,
                };
                self.worker.take_from_member(self.now, host, &written(number, &Framed::abort(reason, "")));
            }
            (Some(connection), _) => connection.on_datagram(self.now, &says),
            (None, Framed::Hello { .. } | Framed::Ping) if end.is_leaving && (is_of_host || says != Framed::Ping) => {
                let leaving = Framed::abort(AbortReason::Leaving, "");
                self.worker.take_from_member(self.now, host, &written(number, &leaving));
            }
            (None, Framed::Hello { protocol, .. }) if end.is_of_redis => {
                assert_eq!(*protocol, 0);
                let text = Protocol::Resp.refusal_of(*protocol);
                let other = Framed::abort(AbortReason::OtherProtocol, &text);
                self.worker.take_from_member(self.now, host, &written(number, &other));
            }
            (None, Framed::Hello { terms, host: meant, .. }) => {
                assert_eq!(*meant, host);
                let config = EndConfig { first: Tsn(u32::from(host[0])), ..EndConfig::default() };
                end.connections.insert(number, Connection::accept(self.now, number, terms, "", config));
            }
            (None, Framed::Ping) if is_of_host => {
                self.worker.take_from_member(self.now, host, &written(number, &Framed::Pong));
            }
            (None, Framed::Ping | Framed::Data(_)) => {
                let unknown = Framed::abort(AbortReason::Unknown, "");
                self.worker.take_from_member(self.now, host, &written(number, &unknown));
            }
            _ => {}
        }
    }

    fn step_member(&mut self, host: Host) {
        let Some(end) = self.members.get_mut(&host) else { return };
        let mut said = Vec::new();
        for connection in end.connections.values_mut() {
            connection.on_time(self.now);
            while let Some(frame) = connection.poll_frame() {
                let (head, request) = Head::split(&frame.bytes).expect("a request");
                end.asked.push(String::from_utf8_lossy(request).into_owned());
                // What it answers by itself it answers always.
                let answer = match request.split_first() {
                    Some((0, answer)) => Some(answer.to_vec()),
                    _ if end.is_mute => None,
                    _ => Some(format!("m{} {}", host[0], String::from_utf8_lossy(request)).into_bytes()),
                };
                if let Some(answer) = answer {
                    let frame = Head { number: head.number, oldest: 0 }.frame(&answer);
                    connection.send(self.now, Order::Member, &frame).expect("room");
                }
            }
            let mut out = [0; Connection::DATAGRAM_MAX];
            while let Some(len) = connection.poll_datagram(self.now, &mut out) {
                said.push(out[..len].to_vec());
            }
        }
        if !end.is_cut && !end.is_elsewhere {
            for bytes in said {
                if !self.is_lost() {
                    self.worker.take_from_member(self.now, host, &bytes);
                }
            }
        }
    }

    pub(super) fn answer(&self, number: u32) -> Vec<&str> {
        self.answers.iter().filter(|(of, _)| *of == number).map(|(_, text)| text.as_str()).collect()
    }

    pub(super) fn end(&mut self, number: u8) -> &mut End {
        self.members.get_mut(&host(number)).expect("there is one")
    }

    /// Another process is in a member's place.
    pub(super) fn replace(&mut self, number: u8) {
        let asked = std::mem::take(&mut self.end(number).asked);
        *self.end(number) = End { asked, ..End::default() };
    }

    /// All members take requests, and do not answer; so many requests are under way at each of two.
    pub(super) fn ask_the_mute(&mut self, count: u32) -> Vec<u32> {
        self.members.values_mut().for_each(|end| end.is_mute = true);
        let numbers = (0..2 * count).map(|n| self.ask(&format!("incr mute{n} 1\r\n"))).collect();
        self.pass(60);
        assert_eq!((self.asked(1), self.asked(2)), (count as usize, count as usize));
        numbers
    }

    pub(super) fn lost(&mut self) -> Vec<u32> {
        std::iter::from_fn(|| self.client.poll_lost()).collect()
    }

    pub(super) fn is_up(&self, number: u8) -> bool {
        self.worker.members.get(&host(number)).is_some_and(Member::takes)
    }

    pub(super) fn asked(&self, number: u8) -> usize {
        self.members[&host(number)].asked.len()
    }
}

fn written(number: u64, says: &Framed<'_>) -> Vec<u8> {
    let mut bytes = vec![0; says.len()];
    says.emit(number, &mut bytes).expect("room");
    bytes
}

#[test]
fn requests_are_divided_and_answered() {
    let mut rig = Rig::new(&[1, 2]);
    rig.pass(10);
    assert_eq!(rig.client.standing(), &Standing::Open);
    let numbers: Vec<u32> = (0..10).map(|n| rig.ask(&format!("get {n}\r\n"))).collect();
    rig.pass(20);
    assert!(numbers.iter().all(|number| rig.answer(*number).len() == 1), "{:?}", rig.answers);
    assert_eq!((rig.asked(1), rig.asked(2)), (5, 5));
}

#[test]
fn a_client_waits_for_new_members_and_not_for_dead_ones() {
    let mut rig = Rig::new(&[1, 2]);
    rig.members.get_mut(&host(2)).expect("there is one").is_cut = true;
    rig.pass(250);
    assert_eq!(rig.client.standing(), &Standing::Opening);
    rig.pass(100);
    assert_eq!(rig.client.standing(), &Standing::Open);
}

#[test]
fn without_a_member_the_client_is_told_so() {
    let mut rig = Rig::new(&[]);
    rig.pass(900);
    let Standing::Over(over) = rig.client.standing() else { panic!("{:?}", rig.client.standing()) };
    assert_eq!(over.to_string(), "the other end has ended it: no member of members.test answers");
    assert!(rig.worker.connections.is_empty() && rig.worker.due.is_empty());
}

#[test]
fn what_is_of_no_connection_is_answered_so_and_nothing_else() {
    let mut rig = Rig::new(&[1]);
    rig.pass(10);
    let mut says = |says: &Framed<'_>| {
        rig.worker.take_from_peer(rig.now, client_at(), &written(5, says));
        rig.worker.on_time(rig.now);
        let out = rig.worker.take_outgoing();
        out.to_peers.messages().map(|(_, message)| Framed::parse(message).map(|(number, _)| number)).collect::<Vec<_>>()
    };
    assert_eq!(says(&Framed::Data(&[])), [Ok(5)]);
    assert_eq!(says(&Framed::Ping), [Ok(5)]);
    for quiet in [Framed::abort(AbortReason::Unknown, ""), Framed::Close, Framed::Pong] {
        assert!(says(&quiet).is_empty(), "{quiet:?}");
    }
    assert_eq!(rig.worker.connections.len(), 1);
}

#[test]
fn a_silent_member_is_dead_and_what_it_was_asked_is_told() {
    let mut rig = Rig::new(&[1, 2]);
    rig.pass(10);
    rig.members.values_mut().for_each(|end| end.is_mute = true);
    let numbers: Vec<u32> = (0..4).map(|n| rig.ask(&format!("incr k{n} 1\r\n"))).collect();
    rig.pass(60);
    assert_eq!((rig.asked(1), rig.asked(2)), (2, 2), "both have acknowledged them");
    rig.members.get_mut(&host(2)).expect("there is one").is_cut = true;
    let more = rig.ask("incr more 1\r\n");
    let again = rig.ask("incr again 1\r\n");
    rig.pass(1000);
    let lost: Vec<u32> = std::iter::from_fn(|| rig.client.poll_lost()).collect();
    assert_eq!(lost.len(), 2, "{lost:?}");
    assert!(lost.iter().all(|number| numbers.contains(number)));
    assert_eq!(rig.worker.totals.deaths, 1);
    // One of the two went to the dead member: the other one answers for it.
    rig.members.get_mut(&host(1)).expect("there is one").is_mute = false;
    rig.pass(1000);
    let death = format!("SERVER_ERROR {MEMBER_DIED}\r\n");
    let refused = [more, again].iter().filter(|number| rig.answer(**number) == [&*death]).count();
    assert_eq!(refused, 1, "{:?}", rig.answers);
    assert_eq!(rig.client.standing(), &Standing::Open);
    rig.members.get_mut(&host(2)).expect("there is one").is_cut = false;
    rig.members.get_mut(&host(2)).expect("there is one").is_mute = false;
    rig.pass(1000);
    let before = rig.asked(2);
    for n in 0..4 {
        rig.ask(&format!("get {n}\r\n"));
    }
    rig.pass(100);
    assert_eq!(rig.asked(2), before + 2, "it is a member again");
}

#[test]
fn a_member_that_is_dead_before_it_answers_is_found_out_though_nothing_else_is_asked() {
    let mut rig = Rig::new(&[1]);
    rig.pass(10);
    rig.members.get_mut(&host(1)).expect("there is one").is_mute = true;
    let number = rig.ask("incr a 1\r\n");
    rig.pass(5000);
    assert_eq!((rig.worker.totals.deaths, rig.client.poll_lost()), (0, None), "its program takes its time");
    rig.members.get_mut(&host(1)).expect("there is one").is_cut = true;
    rig.pass(700);
    assert_eq!((rig.worker.totals.deaths, rig.client.poll_lost()), (1, Some(number)));
    assert!(rig.worker.legs.is_empty());
}

/// How a member that is there comes to be given nothing new.
#[derive(Clone, Copy, Debug)]
enum Out {
    Drained,
    Weightless,
}

#[test]
fn a_member_that_is_given_nothing_new_answers_what_it_has_been_asked() {
    for out in [Out::Drained, Out::Weightless] {
        let mut rig = Rig::new(&[1, 2]);
        rig.pass(10);
        rig.members.get_mut(&host(2)).expect("there is one").is_mute = true;
        let numbers = [rig.ask("incr a 1\r\n"), rig.ask("incr b 1\r\n")];
        rig.pass(60);
        match out {
            Out::Drained => assert!(rig.worker.drain(rig.now, "m2", true) && !rig.worker.drain(rig.now, "m9", true)),
            Out::Weightless => {
                rig.members.get_mut(&host(2)).expect("there is one").is_weightless = true;
                rig.list();
            }
        }
        rig.pass(300);
        assert_eq!(rig.worker.legs.len(), 2, "{out:?}: it owes an answer");
        let end = rig.members.get_mut(&host(2)).expect("there is one");
        let connection = end.connections.values_mut().next().expect("one");
        let at = rig.now;
        for number in numbers {
            // Of the one that it was not asked, the client hears twice, and does not care.
            let frame = Head { number, oldest: 0 }.frame(b"1\r\n");
            connection.send(at, Order::Member, &frame).expect("room");
        }
        rig.pass(300);
        assert!(numbers.iter().all(|number| !rig.answer(*number).is_empty()), "{out:?}: {:?}", rig.answers);
        assert_eq!((rig.worker.legs.len(), rig.worker.totals.deaths), (1, 0), "{out:?}: it has gone");
    }
}

#[test]
fn a_client_that_goes_leaves_nothing() {
    let mut rig = Rig::new(&[1, 2]);
    rig.pass(10);
    rig.client.close();
    rig.pass(10);
    assert!(rig.worker.connections.is_empty() && rig.worker.legs.is_empty() && rig.worker.due.is_empty());
    assert!(rig.members.values().flat_map(|end| end.connections.values()).all(Connection::is_over));
}

/// Another client, with a connection of its own.
pub(super) fn begin(rig: &mut Rig, number: u64) {
    rig.client = Connection::open(rig.now, number, [0; 16], EndConfig::default());
    rig.pass(200);
}

pub(super) fn loaded(name: &str) -> Option<Loaded> {
    Some(Loaded { module: std::sync::Arc::new(crate::module::sample(name)), file: format!("{name}.wasm") })
}

pub(super) fn ended_by_module(rig: &Rig) -> String {
    match rig.client.standing() {
        Standing::Over(margay_ensemble::Over::Aborted(AbortReason::Module, why)) => why.clone(),
        other => panic!("the connection is {other:?}"),
    }
}

#[test]
fn connections_keep_the_module_that_they_have_begun_with_and_end_with_its_fault() {
    let mut rig = Rig::new(&[1, 2]);
    rig.worker.place(rig.now, loaded("to-first"));
    rig.pass(200);
    let first = rig.ask("get a\r\n");
    rig.pass(50);
    assert_eq!(rig.answers, [(first, "m1 get a\r\n".to_owned())]);
    rig.worker.place(rig.now, loaded("traps"));
    let second = rig.ask("get b\r\n");
    rig.pass(50);
    assert_eq!(rig.answers[1], (second, "m1 get b\r\n".to_owned()));
    for number in 100..111 {
        begin(&mut rig, number);
        rig.ask("get c\r\n");
        rig.pass(50);
        assert!(ended_by_module(&rig).contains("redirect fails"), "{number}");
    }
    assert_eq!((rig.worker.totals.failed, rig.worker.totals.deaths), (11, 0));
    begin(&mut rig, 200);
    assert!(ended_by_module(&rig).contains("has lost its place"));
    // Those that are there live on, also with the policy that holds again.
    rig.worker.place(rig.now, None);
    begin(&mut rig, 201);
    let last = rig.ask("get d\r\n");
    rig.pass(50);
    assert_eq!(rig.answers.last().map(|(number, _)| *number), Some(last));
}

#[test]
fn a_module_that_changes_a_repeated_request_otherwise_ends_the_connection() {
    let mut rig = Rig::new(&[1, 2]);
    rig.worker.place(rig.now, loaded("differs"));
    rig.pass(200);
    let first = rig.ask("get a\r\n");
    rig.pass(100);
    assert_eq!(rig.answers, [(first, "m1 get b\r\n".to_owned())]);
    // The request is lost behind the switch.
    rig.members.get_mut(&host(1)).expect("there is one").is_cut = true;
    rig.ask("get a\r\n");
    rig.pass(50);
    rig.members.get_mut(&host(1)).expect("there is one").is_cut = false;
    rig.pass(2000);
    assert!(ended_by_module(&rig).contains("a request that is repeated"));
    assert_eq!((rig.worker.totals.failed, rig.worker.totals.deaths), (1, 0));
}

#[test]
fn a_member_of_another_protocol_takes_no_part_and_the_switch_says_why() {
    let mut rig = Rig::new(&[1, 2]);
    rig.members.get_mut(&host(2)).expect("there is one").is_of_redis = true;
    rig.pass(400);
    let asked = rig.ask("incr a 1\r\n");
    rig.pass(100);
    assert_eq!(rig.answer(asked).len(), 1, "{:?}", rig.answers);
    let why = "this end speaks resp, and the other one memcached";
    assert_eq!(rig.worker.members[&host(2)].reach, Reach::Down(why.to_owned()));
    assert_eq!(rig.worker.totals.deaths, 0);
    // Another program is in its place: it is asked now and then.
    rig.members.get_mut(&host(2)).expect("there is one").is_of_redis = false;
    rig.pass(3000);
    rig.ask("incr a 1\r\n");
    rig.ask("incr a 1\r\n");
    rig.pass(100);
    assert_eq!(rig.asked(2), 1);
}

#[test]
fn a_client_of_another_protocol_is_refused() {
    let mut rig = Rig::new(&[1]);
    rig.client = Connection::open(rig.now, CLIENT, [0; 16], EndConfig { protocol: 1, ..EndConfig::default() });
    rig.pass(50);
    let text = "this end speaks memcached, and the other one resp".to_owned();
    assert_eq!(rig.client.standing(), &Standing::Over(Over::Aborted(AbortReason::OtherProtocol, text)));
    assert_eq!(rig.worker.totals.accepted, 0);
}

/// What another end of the switch says, with the number of its connection.
fn say(rig: &mut Rig, from: SocketAddr, number: u64, says: &Framed<'_>) {
    rig.worker.take_from_peer(rig.now, from, &bytes_of(number, says));
}

#[test]
fn a_client_that_speaks_plain_data_is_told_so_and_others_go_on() {
    let mut rig = Rig::new(&[1]);
    rig.pass(50);
    let other = "192.0.2.9:77".parse().expect("literal");
    let terms = FramedTerms { tsn: 0, window_bytes: 1 << 16, window: 16, streams: 1 };
    say(&mut rig, other, 9, &Framed::Hello { terms, host: [0; 16], protocol: Protocol::Memcached.number() });
    rig.pass(50);
    // DATA of RFC 9260 with one byte.
    say(&mut rig, other, 9, &Framed::Data(&[0, 3, 0, 17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, b'x', 0, 0, 0]));
    rig.worker.on_time(rig.now);
    let outgoing = rig.worker.take_outgoing();
    let told: Vec<_> = outgoing.to_peers.messages().filter(|(to, _)| *to == Some(other)).collect();
    let why = "the peer sends DATA (RFC 9260); an ensemble takes I-DATA (RFC 8260)";
    let expected = bytes_of(9, &Framed::abort(AbortReason::Failed, why));
    assert!(told.iter().any(|(_, message)| *message == expected), "{told:?}");
    let totals = &rig.worker.totals;
    assert_eq!((totals.failed, totals.last_failure.as_deref()), (1, Some(format!("192.0.2.9:77: {why}").as_str())));
    let number = rig.ask("get a\r\n");
    rig.pass(50);
    assert!(rig.answers.iter().any(|(of, _)| *of == number), "the other connection has its answer");
}

#[test]
fn a_client_that_acknowledges_what_was_never_sent_harms_nobody() {
    let mut rig = Rig::new(&[1]);
    rig.pass(50);
    let mut bytes = [0; 64];
    let mut packet = PacketWriter::new(&mut bytes);
    let first = rig.worker.connections[&(client_at(), CLIENT)].first;
    packet.sack(first.wrapping_add(1000), 0, std::iter::empty()).expect("room");
    let len = packet.len();
    say(&mut rig, client_at(), CLIENT, &Framed::Data(&bytes[..len]));
    let number = rig.ask("get a\r\n");
    rig.pass(50);
    assert!(rig.answers.iter().any(|(of, _)| *of == number), "its own connection goes on, too");
    let totals = &rig.worker.totals;
    assert_eq!((totals.failed, totals.dropped.lie), (0, 1));
}

#[test]
fn a_switch_that_takes_this_one_for_a_member_is_refused() {
    let mut rig = Rig::new(&[1]);
    // As switches do, it names the host that it means: else two ensembles of each other would ask each other for ever.
    rig.client = Connection::open(rig.now, CLIENT, [7; 16], EndConfig::default());
    rig.pass(50);
    let standing = rig.client.standing();
    let text = "this end is a switch, and no member: an ensemble has servers, not ensembles".to_owned();
    assert_eq!(standing, &Standing::Over(Over::Aborted(AbortReason::OtherProtocol, text)));
    assert_eq!((rig.worker.totals.accepted, rig.worker.connections.len()), (0, 0));
}
