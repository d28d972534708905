//! Who is believed along a chain: boxes can neither make up clients nor speak for services, and nobody between two
//! hosts can change what a SYN says.

mod line;

use std::net::SocketAddr;
use std::time::Duration;

use line::{Line, NAME, line};
use margay_core::DropReason;
use margay_core::key::{HostPublic, SigningKey};
use margay_core::rng::Rng;
use margay_core::table::{Allow, AllowItem};
use margay_sim::world::service;
use margay_sim::{Datagram, Outcome, Weather};
use margay_wire::{Kind, Message, PORT};

const SECOND: Duration = Duration::from_secs(1);

/// A line whose hosts trust one authority, and whose service is for its members.
fn certified(seed: u64, count: usize) -> (Line, SigningKey) {
    let mut line = line(seed, Weather::FAIR, count);
    let authority = line.trust_nobody_else();
    line.allow(Allow::Authority);
    (line, authority)
}

fn is_refused(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::Refused | Outcome::Reset)
}

/// SYNs with a chain that the router has sent to the server.
fn sent_to_server(line: &mut Line) -> Vec<Vec<u8>> {
    let [from, to] = [line.router, line.server].map(|host| SocketAddr::new(line.world.host(host).address, PORT));
    let sent = line.world.recording.iter().flatten().filter(|(of, at, _)| (*of, *at) == (from, to));
    let is_it = |bytes: &[u8]| {
        Message::parse(bytes).is_ok_and(|message| message.kind == Kind::Syn && message.chain().is_some())
    };
    sent.map(|(_, _, bytes)| bytes.clone()).filter(|bytes| is_it(bytes)).collect()
}

#[test]
fn members_are_let_in_through_boxes_and_others_are_not() {
    let (mut line, _) = certified(3, 2);
    assert_eq!(line.connect(), Outcome::Answered(9));
    assert!(line.world.host(line.client).sal.flows().all(|flow| flow.authenticated));
    let stranger = line.world.add_host(false);
    line.world.register(line.router, stranger);
    let policy = line.world.host(line.client).sal.chain_policy().clone();
    line.world.host(stranger).sal.set_chain_policy(policy).expect("it can be gone by");
    assert!(is_refused(line.connect_from(stranger)), "the boxes' own membership is not the client's");
    assert_eq!(line.accepted(), 1);
}

#[test]
fn the_allow_list_is_asked_about_the_first_agent_and_not_about_boxes() {
    let (mut line, _) = certified(5, 2);
    let host_of = |line: &mut Line, host| HostPublic(line.world.host(host).public_key()).id();
    let client = line.client;
    let last = line.boxes[1];
    let client = host_of(&mut line, client);
    let last = host_of(&mut line, last);
    line.allow(Allow::List(vec![AllowItem::Host(last)]));
    assert!(is_refused(line.connect()));
    assert_eq!(line.accepted(), 0);
    line.allow(Allow::List(vec![AllowItem::Host(client)]));
    assert_eq!(line.connect(), Outcome::Answered(9));
}

#[test]
fn a_host_that_may_not_speak_for_the_box_gets_no_session() {
    let (mut line, _) = certified(7, 2);
    let impostor = line.world.add_host(false);
    line.world.register(line.router, impostor);
    line.move_box(1, impostor);
    assert!(is_refused(line.connect()));
    assert_eq!(line.accepted(), 0);
}

/// The client and the first box's host trust nobody, and so believe whoever answers; the server does not.
#[test]
fn a_server_believes_no_box_that_shows_nothing() {
    let mut line = line(11, Weather::FAIR, 1);
    let authority = SigningKey::generate(&mut Rng::new([77; 32]));
    line.trust(line.server, &authority);
    assert!(is_refused(line.connect()));
    assert_eq!(line.accepted(), 0);
    let host = line.boxes[0];
    line.certify(host, "box-0.shop", &authority);
    assert_eq!(line.connect(), Outcome::Answered(9));
    let foreign = SigningKey::generate(&mut Rng::new([78; 32]));
    line.certify(host, "box-0.shop", &foreign);
    assert!(is_refused(line.connect()));
    assert_eq!(line.accepted(), 1);
}

#[test]
fn a_box_does_not_answer_for_the_service() {
    let (mut line, _) = certified(13, 2);
    let host = line.boxes[1];
    line.world.host(host).serve(service(NAME), 80, 666, Allow::Any);
    assert!(is_refused(line.connect()));
    assert!(line.last_failure().contains("at the end of the chain may not speak for this name"));
    assert_eq!(line.world.host(host).servers[0].accepted.len(), 0);
}

#[test]
fn what_is_changed_on_the_way_is_refused() {
    // Behind the resolvable part: the client's address, a box's flags, the signature.
    for find in [client_byte, flags_byte, signature_byte] {
        let (mut line, _) = certified(17, 2);
        assert_eq!(line.connect(), Outcome::Answered(9), "all have met");
        let [router, server] = [line.router, line.server].map(|host| line.world.host(host).address);
        line.world.network.cut(router, server);
        line.world.recording = Some(Vec::new());
        let client = line.begin();
        line.world.run_for(SECOND / 20);
        let mut syn = sent_to_server(&mut line).pop().expect("it was sent on");
        line.world.network.heal();
        let at = find(&syn);
        syn[at] ^= 1;
        line.world.inject(SocketAddr::new(router, PORT), SocketAddr::new(server, PORT), syn);
        line.world.run_for(3 * SECOND);
        let outcome = line.world.host(line.client).clients[client].outcome;
        assert!(is_refused(outcome), "{outcome:?} with byte {at}");
        assert_eq!(line.accepted(), 1);
    }
}

/// Where the value of an extension begins.
fn value_of(syn: &[u8], kind: u8) -> usize {
    let mut at = 20 + margay_wire::RESOLVABLE_LEN;
    while syn[at] != kind {
        at += 4 + usize::from(u16::from_be_bytes([syn[at + 2], syn[at + 3]])).next_multiple_of(4);
    }
    at + 4
}

fn client_byte(syn: &[u8]) -> usize {
    value_of(syn, 2) + 31
}

fn flags_byte(syn: &[u8]) -> usize {
    value_of(syn, 0x87) + 140 + 12
}

fn signature_byte(syn: &[u8]) -> usize {
    value_of(syn, 0x87) + 76 + 5
}

#[test]
fn a_session_that_is_shown_again_is_not_had_again() {
    let (mut line, _) = certified(19, 1);
    line.world.recording = Some(Vec::new());
    assert_eq!(line.connect(), Outcome::Answered(9));
    line.world.run_for(30 * SECOND);
    assert_eq!(line.world.host(line.server).sal.flows().count(), 0, "it is over");
    let syns = sent_to_server(&mut line);
    let [router, server] = [line.router, line.server].map(|host| SocketAddr::new(line.world.host(host).address, PORT));
    let before = line.world.host(line.server).sal.counters().drops(DropReason::Replayed);
    for syn in &syns {
        line.world.inject(router, server, syn.clone());
    }
    line.world.run_for(SECOND);
    let sal = &line.world.host(line.server).sal;
    assert_eq!(sal.counters().drops(DropReason::Replayed), before + syns.len() as u64);
    assert_eq!(sal.flows().count(), 0);
    line.world.run_for(200 * SECOND);
    for syn in syns {
        line.world.inject(router, server, syn);
    }
    line.world.run_for(10 * SECOND);
    assert_eq!(line.accepted(), 1, "nor when it is forgotten: the signature is too old by then");
    assert_eq!(line.world.host(line.server).sal.flows().count(), 0);
}

#[test]
fn a_clock_that_is_wrong_by_minutes_is_refused_and_one_by_seconds_is_not() {
    for (wrong_s, is_good) in [(60, true), (600, false)] {
        let (mut line, _) = certified(23, 1);
        let now = line.world.now;
        line.world.host(line.client).sal.set_wall_clock(now, 1_800_000_000 + wrong_s);
        assert_eq!(line.connect() == Outcome::Answered(9), is_good, "{wrong_s} s");
        let seen = line.world.host(line.boxes[0]).middlebox.as_ref().expect("one").seen.len();
        assert_eq!(seen, usize::from(is_good), "no box sees a session that nobody has signed now");
    }
}

#[test]
fn garbage_on_every_hop_changes_nothing() {
    let (mut line, _) = certified(29, 2);
    line.world.recording = Some(Vec::new());
    assert_eq!(line.connect(), Outcome::Answered(9));
    let sent = line.world.recording.take().unwrap_or_default();
    for round in 0..2000 {
        let (from, to, mut bytes) = sent[line.world.random() as usize % sent.len()].clone();
        if to.ip().is_loopback() || bytes.is_empty() {
            continue;
        }
        let at = line.world.random() as usize % bytes.len();
        bytes[at] ^= 1 << (line.world.random() % 8);
        line.world.inject(from, to, bytes);
        if round % 50 == 0 {
            line.world.run_for(SECOND / 10);
        }
    }
    line.world.run_for(20 * SECOND);
    assert_eq!(line.accepted(), 1);
    margay_sim::check::nothing_left_over(&line.world).expect("nothing is");
    assert_eq!(line.connect(), Outcome::Answered(9));
}

#[test]
fn a_local_user_with_the_addresses_of_a_session_is_not_its_middlebox() {
    for (is_direct, is_sealed) in [(false, false), (true, false), (false, true)] {
        let mut line = line(31, Weather::FAIR, 1);
        line.set_direct(is_direct);
        if is_sealed {
            line.demand_secure();
        }
        assert_eq!(line.ask_by_datagrams(20), 20);
        let host = line.boxes[0];
        let tuple = *line.world.host(host).middlebox.as_ref().expect("one").seen.first().expect("one");
        let given = |line: &mut Line| [line.client, line.server].map(|host| line.world.host(host).datagrams.len());
        let refused = |line: &mut Line| line.world.host(host).sal.counters().drops(DropReason::NotForwarded);
        let before = (given(&mut line), refused(&mut line));
        for tuple in [tuple, tuple.reversed()] {
            line.world.say(host, &Datagram { tuple, data: b"forged".to_vec() });
            line.world.run_for(SECOND);
        }
        assert_eq!((given(&mut line), refused(&mut line)), (before.0, before.1 + 2), "{is_direct} {is_sealed}");
    }
}
