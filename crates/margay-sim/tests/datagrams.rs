//! Flows of datagrams in virtual time: how they are lifted, what firewalls and pauses do to them, and where each goes
//! that is for one instance.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::instance::{Instance, Pin};
use margay_core::table::{Action, Allow, Demux, NextHop, Rule};
use margay_core::{Carriage, Event, FlowInfo, Instant, Ranges};
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Weather, World};
use margay_wire::PORT;

const NAME: &str = "talk.shop";
const PORT_OF_SERVICE: u16 = 53;
const EVERY: Duration = Duration::from_millis(50);
const SECOND: Duration = Duration::from_secs(1);

struct Talk {
    world: World,
    router: HostId,
    server: HostId,
    other: HostId,
    client: HostId,
    /// Datagrams that the client has said.
    said: u32,
}

fn here(port: u16) -> SocketAddr {
    SocketAddr::new(Ranges::USUAL.host_v6().into(), port)
}

fn there() -> SocketAddr {
    SocketAddr::new(Ranges::USUAL.virtual_v6(&service(NAME)).into(), PORT_OF_SERVICE)
}

fn talk(seed: u64) -> Talk {
    let delay = Duration::from_millis(5);
    let mut world = World::new(seed, Weather { delay_min: delay, delay_max: delay, ..Weather::FAIR });
    let [router, server, other, client] = [true, false, false, false].map(|router| world.add_host(router));
    for host in [server, other, client] {
        world.register(router, host);
        world.set_direct(host, true);
    }
    let mut talk = Talk { world, router, server, other, client, said: 0 };
    talk.serve(server);
    talk
}

impl Talk {
    fn serve(&mut self, host: HostId) {
        let listener = SocketAddr::new([0_u16; 8].into(), PORT_OF_SERVICE);
        let demux = Demux {
            listener,
            other_family: None,
            is_looked_up: false,
            service_port: None,
            protocol: Some(17),
            allow: Allow::Any,
        };
        let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
        self.world.host(host).sal.add_rule(Instant::ZERO, service(NAME).into(), rule).expect("room");
        let (address, key) = (self.world.host(host).address, self.world.host(host).public_key());
        self.world.host(self.router).forward(service(NAME).into(), address, Some(key));
    }

    fn ask(&mut self, to: SocketAddr) {
        self.said += 1;
        let number = self.said.to_be_bytes();
        self.world.say(self.client, &Datagram::new(here(4000), to, &number));
    }

    /// The client says something again and again; with `answers`, the server says it back.
    fn chat(&mut self, time: Duration, answers: bool) -> Vec<u32> {
        let (until, mut heard) = (self.world.now + time, Vec::new());
        while self.world.now < until {
            self.ask(there());
            self.world.run_for(EVERY);
            for datagram in std::mem::take(&mut self.world.host(self.server).datagrams) {
                heard.push(u32::from_be_bytes(datagram.data.clone().try_into().expect("a number")));
                if answers {
                    let answer = Datagram { tuple: datagram.tuple.reversed(), data: datagram.data };
                    self.world.say(self.server, &answer);
                }
            }
        }
        heard
    }

    fn flow(&mut self, host: HostId) -> FlowInfo {
        self.world.host(host).sal.flows().find(|flow| flow.peer_flow.0 != 0).expect("a flow")
    }

    fn carriages(&mut self) -> (Carriage, Carriage) {
        (self.flow(self.client).carriage, self.flow(self.server).carriage)
    }

    fn stalls(&self) -> u64 {
        self.world.hosts.iter().filter_map(|host| host.cache.kernel.as_ref()).map(|kernel| kernel.stalls).sum()
    }

    fn addresses(&mut self) -> (std::net::IpAddr, std::net::IpAddr) {
        (self.world.host(self.client).address, self.world.host(self.server).address)
    }
}

const DIRECT: (Carriage, Carriage) = (Carriage::Direct, Carriage::Direct);

fn in_order(from: u32, to: u32) -> Vec<u32> {
    (from..=to).collect()
}

#[test]
fn a_flow_of_several_datagrams_goes_direct_and_loses_none() {
    for answers in [true, false] {
        let mut talk = talk(1);
        let heard = talk.chat(SECOND * 2, answers);
        assert_eq!((heard, talk.carriages()), (in_order(1, talk.said), DIRECT), "answers {answers}");
        let answered = talk.world.host(talk.client).datagrams.len();
        assert!(!answers || answered >= talk.said as usize - 1, "{answered}");
    }
}

#[test]
fn a_question_and_its_answer_stay_where_they_are() {
    let mut talk = talk(2);
    talk.ask(there());
    talk.world.run_for(SECOND * 20);
    assert_eq!(talk.world.host(talk.server).datagrams.len(), 1);
    assert_eq!(talk.carriages(), (Carriage::Encapsulated, Carriage::Encapsulated));
    assert_eq!(
        talk.world.hosts.iter().filter_map(|host| host.cache.kernel.as_ref()).map(|one| one.sent).sum::<u64>(),
        0
    );
}

#[test]
fn what_goes_one_way_only_stays_direct_since_the_other_end_says_that_it_comes() {
    let mut talk = talk(3);
    let heard = talk.chat(SECOND * 60, false);
    assert_eq!((heard, talk.carriages(), talk.stalls()), (in_order(1, talk.said), DIRECT, 0));
    assert!(talk.world.host(talk.client).datagrams.is_empty(), "a pinhole is not for the program");
}

#[test]
fn behind_a_wall_in_either_direction_nothing_goes_direct_and_nothing_is_lost() {
    for way in 0..3 {
        let mut talk = talk(4);
        let (client, server) = talk.addresses();
        match way {
            0 => talk.world.network.wall_off_all(),
            1 => talk.world.network.wall_off(client, server),
            _ => talk.world.network.wall_off(server, client),
        }
        let heard = talk.chat(SECOND * 30, true);
        assert_eq!(heard, in_order(1, talk.said), "way {way}");
        assert!(!talk.flow(talk.client).carriage.sends(), "way {way}");
    }
}

#[test]
fn stateful_firewalls_at_both_ends_let_through_what_was_proved() {
    let mut talk = talk(5);
    let (client, server) = talk.addresses();
    talk.world.network.guard(client);
    talk.world.network.guard(server);
    let heard = talk.chat(SECOND * 5, true);
    assert_eq!((heard, talk.carriages()), (in_order(1, talk.said), DIRECT));
}

#[test]
fn a_wall_that_rises_later_costs_the_time_until_it_is_noticed_and_no_more() {
    for (answers, way) in [(true, 0), (false, 0), (true, 1), (false, 1), (true, 2), (false, 2)] {
        let mut talk = talk(6);
        let (client, server) = talk.addresses();
        talk.chat(SECOND * 3, answers);
        assert_eq!(talk.carriages(), DIRECT);
        match way {
            0 => talk.world.network.wall_off_all(),
            1 => talk.world.network.wall_off(client, server),
            _ => talk.world.network.wall_off(server, client),
        }
        talk.chat(SECOND * 5, answers);
        let before = talk.said;
        let heard = talk.chat(SECOND * 10, answers);
        assert_eq!(heard, in_order(before + 1, talk.said), "answers {answers}, way {way}");
        talk.world.network.take_walls_down();
        talk.chat(SECOND * 12, answers);
        assert_eq!(talk.carriages(), DIRECT, "answers {answers}, way {way}");
    }
}

#[test]
fn after_a_pause_the_first_datagram_takes_the_way_that_is_sure() {
    let mut talk = talk(7);
    talk.chat(SECOND * 3, true);
    assert_eq!(talk.carriages(), DIRECT);
    talk.world.run_for(SECOND * 60);
    // The holes have closed meanwhile.
    talk.world.network.wall_off_all();
    let before = talk.said;
    let heard = talk.chat(SECOND * 5, true);
    assert_eq!((heard, talk.stalls()), (in_order(before + 1, talk.said), 0));
    assert!(!talk.flow(talk.client).carriage.sends());
}

/// An address of an instance of the name at the client's host.
fn instance(talk: &mut Talk, n: u32, host: HostId) -> SocketAddr {
    pinned(talk, n, host, Pin::Hint)
}

fn pinned(talk: &mut Talk, n: u32, host: HostId, pin: Pin) -> SocketAddr {
    let (address, key) = (talk.world.host(host).address, talk.world.host(host).public_key());
    let id = margay_core::key::HostPublic(key).id();
    let next_hop = NextHop { address: SocketAddr::new(address, PORT), host: Some(id), router: false };
    let virtual_address = Ranges::USUAL.instance(false, n);
    let instance = Instance { service: service(NAME), next_hop, pin };
    let client = talk.client;
    talk.world.host(client).sal.bind_instance(virtual_address, instance);
    SocketAddr::new(virtual_address, PORT_OF_SERVICE)
}

#[test]
fn a_datagram_for_an_instance_goes_there_without_the_router() {
    let mut talk = talk(8);
    let (server, other) = (talk.server, talk.other);
    talk.serve(other);
    let to = [instance(&mut talk, 1, server), instance(&mut talk, 2, other)];
    let router = talk.world.host(talk.router).address;
    talk.world.recording = Some(Vec::new());
    for round in 0..6 {
        talk.ask(to[round % 2]);
        talk.world.run_for(EVERY);
    }
    assert_eq!([server, other].map(|host| talk.world.host(host).datagrams.len()), [3, 3]);
    let sent = talk.world.recording.take().expect("recording");
    assert!(sent.iter().all(|(_, to, _)| to.ip() != router), "a router was asked");
}

#[test]
fn an_instance_that_says_no_or_nothing_is_one_of_several() {
    // The first refuses, since nothing listens there; the second is cut off.
    for is_cut in [false, true] {
        let mut talk = talk(9);
        let (server, other) = (talk.server, talk.other);
        let to = instance(&mut talk, 1, other);
        if is_cut {
            let (client, gone) = (talk.world.host(talk.client).address, talk.world.host(other).address);
            talk.world.network.cut(client, gone);
            talk.world.network.cut(gone, client);
        }
        talk.ask(to);
        talk.world.run_for(SECOND);
        assert_eq!(talk.world.host(server).datagrams.len(), 1, "cut {is_cut}");
    }
}

/// How many datagrams the client's own host, the server and the other host have got.
fn arrived(talk: &mut Talk) -> [usize; 3] {
    [talk.client, talk.server, talk.other].map(|host| talk.world.host(host).datagrams.len())
}

/// The client's host serves the name itself, as the giver of a connection does, and the instance answers too late.
#[test]
fn what_is_meant_for_one_host_alone_waits_for_it() {
    for (pin, expected) in [(Pin::Hint, [1, 0, 0]), (Pin::Only, [0, 0, 1])] {
        let mut talk = talk(10);
        let client = talk.client;
        let instance_host = talk.other;
        talk.serve(client);
        talk.serve(instance_host);
        let own = talk.world.host(client).address;
        let other = talk.world.host(instance_host).address;
        let to = pinned(&mut talk, 1, instance_host, pin);
        talk.world.network.cut(own, other);
        talk.ask(to);
        // The first SYN is lost, and the next one goes out soon.
        talk.world.run_for(Duration::from_millis(100));
        assert_eq!(arrived(&mut talk), [0, 0, 0]);
        talk.world.network.heal();
        talk.world.run_for(SECOND * 2);
        assert_eq!(arrived(&mut talk), expected, "{pin:?}");
    }
}

#[test]
fn what_is_meant_for_one_host_alone_goes_nowhere_else() {
    // The other host refuses, since nothing listens there; then it is cut off.
    for is_cut in [false, true] {
        let mut talk = talk(11);
        let client = talk.client;
        let instance_host = talk.other;
        talk.serve(client);
        let own = talk.world.host(client).address;
        let other = talk.world.host(instance_host).address;
        let to = pinned(&mut talk, 1, instance_host, Pin::Only);
        if is_cut {
            talk.world.network.cut(own, other);
        }
        talk.ask(to);
        talk.world.run_for(SECOND * 30);
        assert_eq!(arrived(&mut talk), [0, 0, 0], "cut {is_cut}");
        let events = &talk.world.host(client).events;
        let is_told = events.iter().any(|event| matches!(event, Event::ConnectFailed { .. }));
        assert!(is_told, "cut {is_cut}: {events:?}");
    }
}
