//! Peers that have a host send to an address that has proved nothing: by what a router is said to have relayed, by
//! moves that are never finished. In virtual time.

mod site;

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use margay_core::DropReason;
use margay_core::name::Prefix;
use margay_core::segment::SEGMENT;
use margay_sim::network::Passing;
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{HostId, Weather, World};
use margay_wire::{Flags, Kind, Message, PORT, RESOLVABLE_LEN, RESOLVABLE_OFFSET, ResolvableRepr, kind_of};

use site::{CHAT, SECOND, address, site, steady};

const VICTIM: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 66)), PORT);
const NAME: &str = "talk.shop";
/// The server writes as much as it can.
const BULK: Plan = Plan { write: 12_000, every: Duration::from_millis(10), writes: u32::MAX, closes: false };

struct Liars {
    world: World,
    server: HostId,
    client: HostId,
    router: SocketAddr,
}

fn liars(seed: u64) -> Liars {
    let mut world = World::new(seed, Weather::FAIR);
    let router = world.add_host(true);
    let (server, client) = (world.add_host(false), world.add_host(false));
    for host in [server, client] {
        world.register(router, host);
    }
    world.publish_streams(router, server, NAME, BULK);
    let router = SocketAddr::new(world.host(router).address, PORT);
    Liars { world, server, client, router }
}

impl Liars {
    fn at(&self, host: HostId) -> SocketAddr {
        SocketAddr::new(self.world.hosts[host.0].address, PORT)
    }

    /// Holds back the messages of one kind that a host sends to the other or to the router, and gives those to the
    /// router.
    fn hold_back(&mut self, kind: Kind, sender: HostId) -> Receiver<Vec<u8>> {
        let (from, router) = (self.at(sender).ip(), self.router);
        let (held, sink) = channel();
        self.world.network.losing = Some(Box::new(move |packet: &Passing<'_>| {
            let is_it = !packet.is_direct && packet.from.ip() == from && kind_of(packet.bytes) == Ok(kind);
            if is_it && packet.to == router {
                held.send(packet.bytes.to_vec()).expect("the test listens");
            }
            is_it
        }));
        sink
    }

    /// Sends on, straight and as if a router had relayed it from the victim, what the sender wanted a router to relay.
    fn lie(&mut self, relayed: &[u8], sender: HostId, to: HostId) {
        let (from, to) = (self.at(sender), self.at(to));
        self.world.inject(from, to, relayed_from_victim(relayed));
    }

    /// Bytes that a host sends to the victim.
    fn sent_to_victim(&mut self, time: Duration) -> usize {
        self.world.recording = Some(Vec::new());
        self.world.direct_recording = Some(Vec::new());
        self.world.run_for(time);
        let sent = self.world.recording.take().into_iter().chain(self.world.direct_recording.take()).flatten();
        sent.filter(|(_, to, _)| to.ip() == VICTIM.ip()).map(|(_, _, bytes)| bytes.len()).sum()
    }
}

/// The tag of a message does not cover what a router writes into it.
fn relayed_from_victim(relayed: &[u8]) -> Vec<u8> {
    let message = Message::parse(relayed).expect("a message");
    assert!(message.flags.contains(Flags::RELAY));
    let lie = ResolvableRepr { via: Some(VICTIM), ..message.resolvable.expect("it is to be relayed") };
    let mut bytes = relayed.to_vec();
    lie.emit(&mut bytes[RESOLVABLE_OFFSET..RESOLVABLE_OFFSET + RESOLVABLE_LEN]);
    bytes
}

#[test]
fn a_client_cannot_have_its_answers_sent_to_an_address_that_it_names() {
    let mut liars = liars(1);
    let acks = liars.hold_back(Kind::Ack, liars.client);
    let stream = liars.world.connect_stream(liars.client, NAME, CHAT);
    liars.world.run_for(2 * SECOND);
    liars.world.network.losing = None;
    let ack = acks.try_iter().last().expect("one for the router");
    liars.lie(&ack, liars.client, liars.server);
    assert_eq!(liars.sent_to_victim(10 * SECOND), 0);
    // It is served where it has shown to be.
    let flow = liars.world.host(liars.server).sal.flows().next().expect("it was let in");
    assert_eq!(flow.remote, Some(liars.at(liars.client)));
    assert!(liars.world.host(liars.client).streams[stream].received > 0);
}

#[test]
fn a_server_cannot_have_a_client_send_to_an_address_that_it_names() {
    let mut liars = liars(2);
    let answers = liars.hold_back(Kind::SynAck, liars.server);
    let stream = liars.world.connect_stream(liars.client, NAME, CHAT);
    liars.world.run_for(SECOND / 10);
    let answer = answers.try_iter().last().expect("one for the router");
    liars.lie(&answer, liars.server, liars.client);
    assert_eq!(liars.sent_to_victim(2 * SECOND), 0);
    let dropped = liars.world.host(liars.client).sal.counters().drops(DropReason::WrongPath);
    assert!(dropped > 0, "it came from nobody who was asked");
    liars.world.network.losing = None;
    liars.world.run_for(4 * SECOND);
    assert!(liars.world.host(liars.client).streams[stream].received > 0);
}

/// By a move that is never finished a client would acknowledge, from where it is, what goes to where it was.
#[test]
fn data_is_taken_from_where_a_peer_says_to_be_for_a_short_time_and_once() {
    let mut site = site(3, steady(), false, (CHAT, CHAT));
    let moved = address(1);
    site.world.network.losing = Some(Box::new(move |packet: &Passing<'_>| {
        let is_proof = matches!(kind_of(packet.bytes), Ok(Kind::RsynDone | Kind::RsynAck | Kind::Probe));
        packet.from.ip() == moved && is_proof
    }));
    site.world.set_addresses(site.client, vec![moved]);
    let taken = |site: &mut site::Site| site.world.host(site.server).streams[site.answer].received;
    site.world.run_for(2 * SECOND);
    let before = taken(&mut site);
    site.world.run_for(10 * SECOND);
    assert_eq!(taken(&mut site), before);
    site.world.network.losing = None;
    site.world.run_for(20 * SECOND);
    site.assert_well(3);
}

/// A client says that it can be reached at addresses of others, has the server send, and falls silent.
#[test]
fn addresses_that_a_peer_claims_get_no_more_than_the_peer_has_sent() {
    let mut world = World::new(4, Weather::FAIR);
    let (server, client) = (world.add_host(false), world.add_host(false));
    let own = world.host(client).address;
    let claimed: Vec<_> = (1..8).map(|last| std::net::IpAddr::from([192, 0, 2, last])).collect();
    world.set_addresses(client, std::iter::once(own).chain(claimed.iter().copied()).collect());
    world.host(server).serve_streams(service(NAME), 81, BULK);
    let (at, key) = (world.host(server).address, world.host(server).public_key());
    world.host(client).forward(service(NAME).into(), at, Some(key));
    world.recording = Some(Vec::new());
    world.connect_stream(client, NAME, CHAT);
    world.run_for(SECOND / 5);
    let sent = world.recording.replace(Vec::new()).expect("set above");
    let is_of_client = |from: &SocketAddr| from.ip() == own || claimed.contains(&from.ip());
    let by_client: usize = sent.iter().filter(|(from, ..)| is_of_client(from)).map(|(.., bytes)| bytes.len()).sum();
    for address in claimed.iter().chain([&own]) {
        world.network.cut(at, *address);
    }
    world.run_for(60 * SECOND);
    let sent = world.recording.take().expect("set above");
    for address in &claimed {
        let got = sent.iter().filter(|(_, to, _)| to.ip() == *address).map(|(.., bytes)| bytes.len());
        let (count, bytes) = (got.clone().count(), got.sum::<usize>());
        assert!((1..=12).contains(&count) && bytes <= by_client, "{address}: {count}, {bytes} of {by_client}");
    }
}

/// A client lists the victim's address as one of its own, and answers from there when the server has moved. Whoever is
/// on the path can do the same to an honest client's answer.
#[test]
fn an_answer_to_a_move_with_a_forged_source_moves_nothing_there() {
    let mut world = World::new(5, Weather::FAIR);
    let (server, client) = (world.add_host(false), world.add_host(false));
    let own = world.host(client).address;
    world.set_addresses(client, vec![own, VICTIM.ip()]);
    world.host(server).serve_streams(service(NAME), 81, BULK);
    let (at, key) = (world.host(server).address, world.host(server).public_key());
    world.host(client).forward(service(NAME).into(), at, Some(key));
    let stream = world.connect_stream(client, NAME, CHAT);
    world.run_for(SECOND);
    let (held, answers) = channel();
    world.network.losing = Some(Box::new(move |packet: &Passing<'_>| {
        let is_answer = !packet.is_direct && packet.from.ip() == own && kind_of(packet.bytes) == Ok(Kind::RsynAck);
        if is_answer {
            held.send((packet.to, packet.bytes.to_vec())).expect("the test listens");
        }
        is_answer || packet.to.ip() == VICTIM.ip()
    }));
    world.recording = Some(Vec::new());
    world.set_addresses(server, vec![address(9)]);
    let mut forged = 0;
    for _ in 0..400 {
        world.run_for(SECOND / 100);
        for (to, answer) in answers.try_iter() {
            world.inject(VICTIM, to, answer);
            forged += 1;
        }
    }
    let sent = world.recording.take().expect("set above");
    let is_data = |to: &SocketAddr, bytes: &[u8]| to.ip() == VICTIM.ip() && kind_of(bytes) == Ok(Kind::Data);
    let astray = sent.iter().filter(|(_, to, bytes)| is_data(to, bytes)).count();
    assert!(forged > 0 && astray == 0, "{forged} answers, {astray} packets of data");
    world.network.losing = Some(Box::new(|packet: &Passing<'_>| packet.to.ip() == VICTIM.ip()));
    let before = world.host(client).streams[stream].received;
    world.run_for(20 * SECOND);
    assert!(world.host(client).streams[stream].received > before, "an answer from where the client is still counts");
}

/// On a segment any host may be the relay. One that names the victim gets the client no further than one that forges
/// the source of a whole answer: the server has to confirm from there.
#[test]
fn a_relay_of_a_segment_cannot_have_a_client_go_on_sending_to_an_address_that_it_names() {
    let mut world = World::new(6, Weather::FAIR);
    let [client, relay, server] = [(); 3].map(|()| world.add_host(false));
    let [near, between, beyond, far] =
        [[10, 1, 0, 1], [10, 1, 0, 2], [10, 2, 0, 2], [10, 2, 0, 1]].map(std::net::IpAddr::from);
    for (host, addresses) in [(client, vec![near]), (relay, vec![between, beyond]), (server, vec![far])] {
        world.set_addresses(host, addresses);
    }
    world.host(client).forward(Prefix::default(), SEGMENT.ip(), None);
    let now = world.now;
    world.host(relay).sal.set_relay(now, true);
    world.host(server).serve_streams(service(NAME), 81, Plan::LISTEN);
    let (held, seen) = channel();
    world.network.losing = Some(Box::new(move |packet: &Passing<'_>| {
        let kind = kind_of(packet.bytes);
        let is_answer = packet.from.ip() == far && kind == Ok(Kind::SynAck);
        let is_astray = packet.to == VICTIM && kind == Ok(Kind::Ack);
        if is_astray || is_answer && packet.to.ip() == beyond {
            held.send((is_answer, packet.bytes.to_vec())).expect("the test listens");
        }
        is_answer
    }));
    let stream = world.connect_stream(client, NAME, BULK);
    let at = |ip| SocketAddr::new(ip, PORT);
    for _ in 0..80 {
        world.run_for(SECOND / 10);
        for (is_answer, bytes) in seen.try_iter() {
            if is_answer {
                world.inject(at(between), at(near), relayed_from_victim(&bytes));
            } else {
                world.inject(at(near), at(far), bytes);
            }
        }
    }
    let mut liars = Liars { world, server, client, router: at(between) };
    assert_eq!(liars.sent_to_victim(20 * SECOND), 0);
    assert!(liars.world.host(client).sal.counters().drops(DropReason::WrongPath) > 0, "it was confirmed");
    assert!(liars.world.host(client).streams[stream].was_reset);
}
