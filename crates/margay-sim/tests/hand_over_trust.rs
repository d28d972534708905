//! Hand-overs among hosts that lie: tickets that were read on the path, addresses that a giver makes up.

mod shop;

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::key::{self, HostPublic};
use margay_core::table::{Action, Allow, AllowItem, Demux, HAND_OVER_PORT, Rule};
use margay_core::{DropReason, Event, HandOver, Instant, PeerTicket, Role, Ticket, Tuple};
use margay_sim::stream::{Plan, State, Stream};
use margay_sim::world::service;
use margay_sim::{HostId, Weather};
use margay_wire::{
    Extension, Flags, FlowId, HandoverRepr, Kind, Message, MessageWriter, NextProtocol, PORT, SessionRepr,
};
use shop::{Shop, shop};

const NAME: &str = "chat.shop";
const CHAT: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: u32::MAX, closes: false };
const STEP: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const SERVICE_PORT: u16 = 80;
const TICKET: Ticket = Ticket([0x5a; 16]);

/// A session, a host that has it, and one that could take it over.
struct Scene {
    shop: Shop,
    stream: usize,
    flow: FlowId,
    /// Of the giver's program.
    old: Tuple,
    giver: HostId,
    taker: HostId,
    frozen: Option<(Instant, Stream)>,
    /// Events that were read.
    read: [usize; 2],
    /// What the taker's core has said of each client that has come with the ticket.
    awaited: Vec<key::HostId>,
    new: Option<Tuple>,
    is_taken: bool,
    /// The taker's agent lets go of the connection as soon as it has said that it is here.
    lets_go: bool,
    outcome: Option<&'static str>,
}

fn scene(allow: impl Fn(key::HostId) -> Allow) -> Scene {
    let mut shop = shop(3, Weather::FAIR);
    let client = id_of(&shop, shop.client);
    for instance in shop.instances {
        shop.world.publish_streams(shop.router, instance, NAME, CHAT);
        let sal = &mut shop.world.host(instance).sal;
        let found = sal.rules().find(|(prefix, ..)| prefix.id == service(NAME));
        let (id, mut rule) = found.map(|(_, id, rule)| (id, rule.clone())).expect("it is served");
        let Action::Demux(demux) = &mut rule.action else { panic!("it is served") };
        demux.allow = allow(client);
        assert!(sal.change_rule(id, rule));
        // As the agent adds it where a program takes over the name.
        let demux = Demux {
            listener: SocketAddr::new([10, 0, 0, 99].into(), 40_999),
            other_family: None,
            is_looked_up: false,
            service_port: Some(HAND_OVER_PORT),
            protocol: Some(6),
            allow: Allow::Any,
        };
        let rule = Rule { priority: u32::MAX, weight: 1, action: Action::Demux(demux) };
        sal.add_rule(Instant::ZERO, service(NAME).into(), rule).expect("room");
    }
    let stream = shop.world.connect_stream(shop.client, NAME, CHAT);
    shop.world.run_for(2 * SECOND);
    let [one, other] = shop.instances;
    let (giver, taker) = if served(&mut shop, one).is_some() { (one, other) } else { (other, one) };
    let (flow, old) = served(&mut shop, giver).expect("one of both has it");
    let read = [giver, taker].map(|host| shop.world.host(host).events.len());
    let (frozen, awaited, new) = (None, Vec::new(), None);
    let (is_taken, lets_go, outcome) = (false, false, None);
    Scene { shop, stream, flow, old, giver, taker, frozen, read, awaited, new, is_taken, lets_go, outcome }
}

fn id_of(shop: &Shop, host: HostId) -> key::HostId {
    HostPublic(shop.world.hosts[host.0].public_key()).id()
}

fn served(shop: &mut Shop, host: HostId) -> Option<(FlowId, Tuple)> {
    let mut flows = shop.world.host(host).sal.flows();
    flows.find(|flow| flow.role == Role::Responder && flow.app.protocol == 6).map(|flow| (flow.flow, flow.app))
}

impl Scene {
    fn id(&self, host: HostId) -> key::HostId {
        id_of(&self.shop, host)
    }

    fn at(&self, host: HostId) -> SocketAddr {
        SocketAddr::new(self.shop.world.hosts[host.0].address, PORT)
    }

    /// What the taker has refused for this reason.
    fn refused(&mut self, reason: DropReason) -> u64 {
        self.shop.world.host(self.taker).sal.counters().drops(reason)
    }

    fn hand_over(&mut self, taker: key::HostId, at: SocketAddr) {
        let now = self.shop.world.now;
        self.shop.world.host(self.giver).sal.hand_over(now, self.flow, TICKET, taker, at).expect("it is open");
        self.shop.world.touch(self.giver);
    }

    /// Lets time pass, and does what the agents of giver and taker do.
    fn run_for(&mut self, time: Duration) {
        let until = self.shop.world.now + time;
        while self.shop.world.now < until {
            self.shop.world.run_for(STEP);
            for (number, host) in [self.giver, self.taker].into_iter().enumerate() {
                let words = self.shop.world.host(host).events[self.read[number]..].to_vec();
                self.read[number] += words.len();
                words.iter().for_each(|event| self.hear(event));
            }
            self.carry();
            self.shop.world.touch(self.giver);
            self.shop.world.touch(self.taker);
        }
    }

    fn hear(&mut self, event: &Event) {
        let Event::HandOver(word) = event else { return };
        let now = self.shop.world.now;
        match word {
            HandOver::Fetched(_) => {
                let frozen = self.shop.world.host(self.giver).freeze(&self.old);
                self.frozen = frozen.map(|frozen| (now + STEP, frozen));
            }
            HandOver::Stays(_) => {
                self.shop.world.host(self.giver).go_on(now, &self.old);
                self.outcome = Some("stays");
            }
            HandOver::Refused { .. } => self.outcome = Some("refused"),
            HandOver::Gone(_) => {
                self.shop.world.host(self.giver).close_silently(&self.old);
                self.outcome = Some("gone");
            }
            HandOver::Lost(_) => self.outcome = Some("lost"),
            HandOver::Awaits { ticket, of, app } => {
                assert_eq!((ticket.ticket, ticket.peer), (TICKET, of.client));
                self.awaited.push(of.client);
                if of.client == id_of(&self.shop, self.shop.client) {
                    self.new = Some(*app);
                }
            }
            HandOver::Taken(ticket) => {
                assert_eq!(ticket.peer, id_of(&self.shop, self.shop.client), "somebody else has it");
                self.is_taken = true;
                let new = self.new.expect("restored");
                self.shop.world.host(self.taker).go_on(now, &new);
            }
            HandOver::Dropped(_) => {}
        }
    }

    /// The connection comes to the taker once the client is there.
    fn carry(&mut self) {
        let now = self.shop.world.now;
        let Some(app) = self.new else { return };
        let Some((_, stream)) = self.frozen.take_if(|(at, _)| *at <= now) else { return };
        let ticket = PeerTicket { peer: id_of(&self.shop, self.shop.client), ticket: TICKET };
        self.shop.world.host(self.taker).restore(stream, app);
        self.shop.world.host(self.taker).sal.take_over(now, ticket);
        if self.lets_go {
            assert!(self.shop.world.host(self.taker).sal.refuse_hand_over(now, ticket), "it is awaited");
            self.shop.world.host(self.taker).close_silently(&app);
        }
        self.shop.world.host(self.giver).sal.await_word(now, TICKET);
    }

    /// The client's connection goes on at the taker, which nobody else has.
    fn assert_is_taken(&mut self) {
        assert_eq!((self.outcome, self.is_taken), (Some("gone"), true));
        let received = self.shop.world.host(self.shop.client).streams[self.stream].received;
        self.run_for(SECOND);
        let end = &self.shop.world.host(self.shop.client).streams[self.stream];
        assert!(end.received > received && !end.was_reset && !end.was_wrong && end.state == State::Open);
    }

    /// Somebody on the path makes of a host's ordinary SYN one that fetches the session by a port of the service. The
    /// host itself finishes what this begins.
    fn fetch_by(&mut self, host: HostId, port: u16) {
        let nowhere = SocketAddr::from(([10, 99, 0, 1], PORT));
        self.shop.world.host(host).forward(service(NAME).into(), nowhere.ip(), None);
        self.shop.world.recording = Some(Vec::new());
        self.shop.world.connect_stream(host, NAME, CHAT);
        self.shop.world.run_for(Duration::from_micros(50));
        let sent = self.shop.world.recording.take().expect("set above");
        let (from, _, bytes) = sent.into_iter().find(|(_, to, _)| *to == nowhere).expect("a SYN");
        let (giver, taker) = (self.id(self.giver).0, self.id(self.taker).0);
        let handover = HandoverRepr { ticket: TICKET.0, giver, taker, address: SocketAddr::from(([0; 16], 0)) };
        let to = self.at(self.taker);
        self.shop.world.inject(from, to, fetching(&bytes, handover, port));
    }

    /// A host has a session with an accomplice, which hands it to the taker under the ticket of somebody else's.
    fn fetch_from_accomplice(&mut self, host: HostId) {
        let (taker, at) = (self.id(self.taker), self.at(self.taker));
        let router = self.shop.router;
        let world = &mut self.shop.world;
        let accomplice = world.add_host(false);
        [host, accomplice].into_iter().for_each(|one| world.register(router, one));
        world.host(accomplice).serve_streams(service(NAME), 81, CHAT);
        let (address, key) = (world.host(accomplice).address, world.host(accomplice).public_key());
        world.host(host).forward(service(NAME).into(), address, Some(key));
        world.connect_stream(host, NAME, CHAT);
        self.run_for(SECOND / 2);
        let (flow, _) = served(&mut self.shop, accomplice).expect("its session");
        let now = self.shop.world.now;
        self.shop.world.host(accomplice).sal.hand_over(now, flow, TICKET, taker, at).expect("it is open");
        self.shop.world.touch(accomplice);
    }
}

/// A SYN as another one, without a packet inside and for a session that is handed over.
fn fetching(syn: &[u8], handover: HandoverRepr, port: u16) -> Vec<u8> {
    let message = Message::parse(syn).expect("a SYN");
    let mut buf = vec![0; 1500];
    let mut writer = MessageWriter::new(&mut buf, Kind::Syn, message.dst_flow, message.src_flow, message.control_seq);
    writer.flags(message.flags | Flags::NAMED).resolvable(&message.resolvable.expect("of a SYN")).expect("room");
    for extension in message.extensions() {
        let extension = match extension {
            Extension::Session(session) => Extension::Session(SessionRepr { service_port: port, ..session }),
            other => other,
        };
        writer.extension(&extension).expect("room");
    }
    writer.extension(&Extension::Handover(handover)).expect("room");
    writer.payload(NextProtocol::None, &[]).expect("room");
    writer.pad_to(syn.len());
    let length = writer.finish().expect("room");
    buf.truncate(length);
    buf
}

#[test]
fn whoever_may_not_connect_gets_nothing_with_a_ticket_by_the_agents_port_either() {
    let mut scene = scene(|client| Allow::List(vec![AllowItem::Host(client)]));
    let taker = scene.taker;
    for port in [HAND_OVER_PORT, SERVICE_PORT] {
        let attacker = scene.shop.world.add_host(false);
        if port == HAND_OVER_PORT {
            scene.fetch_by(attacker, port);
        } else {
            scene.fetch_from_accomplice(attacker);
        }
        let before = scene.refused(DropReason::NotAllowed);
        scene.run_for(SECOND / 2);
        assert_eq!(scene.refused(DropReason::NotAllowed), before + 1, "port {port}");
        assert_eq!(scene.awaited, [], "port {port}");
        assert_eq!(served(&mut scene.shop, taker), None, "port {port}");
        assert_eq!(scene.shop.world.host(taker).sal.half_open_count(), 0, "port {port}");
    }
    let (id, at) = (scene.id(taker), scene.at(taker));
    scene.hand_over(id, at);
    scene.run_for(SECOND);
    scene.assert_is_taken();
}

#[test]
fn a_ticket_of_another_host_is_another_hand_over() {
    let mut scene = scene(|_| Allow::Any);
    let attacker = scene.shop.world.add_host(false);
    // Before the client itself comes with it.
    scene.fetch_from_accomplice(attacker);
    scene.run_for(SECOND / 10);
    let theirs = scene.id(attacker);
    assert_eq!(scene.awaited, [theirs], "it may connect, and is named as who it is");
    let (id, at) = (scene.id(scene.taker), scene.at(scene.taker));
    scene.hand_over(id, at);
    scene.run_for(SECOND);
    let client = scene.id(scene.shop.client);
    assert_eq!(scene.awaited, [theirs, client]);
    scene.assert_is_taken();
}

/// Otherwise a connection of the accomplice's would come to the taker as that host's.
#[test]
fn nobody_on_the_path_makes_a_hand_over_of_an_ordinary_syn() {
    let mut scene = scene(|_| Allow::Any);
    let honest = scene.shop.world.add_host(false);
    let taker = scene.taker;
    scene.fetch_by(honest, SERVICE_PORT);
    scene.run_for(SECOND / 2);
    assert_eq!((scene.awaited.len(), scene.refused(DropReason::SynChanged)), (0, 1));
    assert_eq!(served(&mut scene.shop, taker), None);
    assert_eq!(scene.shop.world.host(taker).sal.half_open_count(), 0);
}

#[test]
fn a_giver_cannot_make_the_client_send_to_an_address() {
    let mut scene = scene(|_| Allow::Any);
    let victim = SocketAddr::from(([10, 99, 0, 7], PORT));
    scene.shop.world.recording = Some(Vec::new());
    scene.hand_over(key::HostId([7; 16]), victim);
    scene.run_for(SECOND);
    let client = scene.at(scene.shop.client);
    let sent = scene.shop.world.recording.take().expect("set above");
    let to_victim = sent.iter().filter(|(from, to, _)| *from == client && to.ip() == victim.ip()).count();
    assert_eq!(to_victim, 0);
    let is_syn = |bytes: &[u8]| Message::parse(bytes).is_ok_and(|message| message.kind == Kind::Syn);
    let syns = sent.iter().filter(|(from, _, bytes)| *from == client && is_syn(bytes)).count();
    assert!((1..=2).contains(&syns), "{syns} SYNs for a host that no router knows");
    assert_eq!(scene.outcome, Some("refused"));
    // The connection is where it was.
    let received = scene.shop.world.host(scene.shop.client).streams[scene.stream].received;
    scene.run_for(SECOND);
    assert!(scene.shop.world.host(scene.shop.client).streams[scene.stream].received > received);
}

#[test]
fn a_host_that_does_not_answer_is_sent_two_syns() {
    let mut scene = scene(|_| Allow::Any);
    let (client, taker) = (scene.at(scene.shop.client), scene.at(scene.taker));
    scene.shop.world.network.cut(client.ip(), taker.ip());
    let router = scene.at(scene.shop.router);
    scene.shop.world.network.cut(router.ip(), taker.ip());
    scene.shop.world.recording = Some(Vec::new());
    let id = scene.id(scene.taker);
    scene.hand_over(id, taker);
    scene.run_for(8 * SECOND);
    let sent = scene.shop.world.recording.take().expect("set above");
    let is_syn = |bytes: &[u8]| Message::parse(bytes).is_ok_and(|message| message.kind == Kind::Syn);
    let to_taker = sent.iter().filter(|(_, to, bytes)| *to == taker && is_syn(bytes)).count();
    assert_eq!(to_taker, 2);
    assert_eq!(scene.outcome, Some("refused"));
}

#[test]
fn another_server_of_the_client_cannot_spoil_a_ticket_that_it_has_read() {
    let mut scene = scene(|_| Allow::Any);
    // The other instance has a session of the client's, too, and says of it that it stays, under the same ticket.
    let taker = scene.taker;
    let own = loop {
        scene.shop.world.connect_stream(scene.shop.client, NAME, CHAT);
        scene.run_for(SECOND / 2);
        if let Some((flow, _)) = served(&mut scene.shop, taker) {
            break flow;
        }
    };
    let (giver, now) = (scene.id(scene.giver), scene.shop.world.now);
    let at = scene.at(scene.giver);
    let spoiler = &mut scene.shop.world.host(taker).sal;
    spoiler.hand_over(now, own, TICKET, giver, at).expect("it is open");
    spoiler.cancel_hand_over(now, TICKET);
    scene.shop.world.touch(taker);
    scene.run_for(SECOND);
    scene.outcome = None;
    let (id, at) = (scene.id(taker), scene.at(taker));
    scene.hand_over(id, at);
    scene.run_for(SECOND);
    assert_eq!(scene.outcome, Some("gone"));
}

/// What the agents of giver and taker go by when the client's host says different things to them.
#[test]
fn a_connection_that_the_taker_has_let_go_is_never_there_and_one_that_is_there_is_not_let_go() {
    let mut scene = scene(|_| Allow::Any);
    scene.lets_go = true;
    let (id, at) = (scene.id(scene.taker), scene.at(scene.taker));
    scene.hand_over(id, at);
    scene.run_for(4 * SECOND);
    assert!(!scene.is_taken, "the client's word has come too late");
    let (giver, taker) = (scene.giver, scene.taker);
    assert_eq!([giver, taker].map(|host| served(&mut scene.shop, host)), [None, None]);
    assert!(scene.shop.world.host(scene.shop.client).streams[scene.stream].was_reset, "a loss that is reported");

    let mut scene = self::scene(|_| Allow::Any);
    let (id, at) = (scene.id(scene.taker), scene.at(scene.taker));
    scene.hand_over(id, at);
    scene.run_for(SECOND);
    let ticket = PeerTicket { peer: scene.id(scene.shop.client), ticket: TICKET };
    let now = scene.shop.world.now;
    assert!(!scene.shop.world.host(scene.taker).sal.refuse_hand_over(now, ticket), "it is here");
    scene.assert_is_taken();
}
