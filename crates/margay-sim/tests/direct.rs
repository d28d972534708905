//! The direct path in virtual time: how flows are lifted, what firewalls and losses do to them, and how they come back.

use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use margay_core::output::{AppVerdict, Output};
use margay_core::{Carriage, DirectEvent, DropReason, FlowInfo, Input, Lifecycle, Why};
use margay_sim::check::{ends_agree, no_request_met, nothing_left_over};
use margay_sim::network::Passing;
use margay_sim::stream::{Plan, State};
use margay_sim::{HostId, Weather, World};
use margay_wire::{Kind, kind_of};

const SECOND: Duration = Duration::from_secs(1);
const NEVER_ENDS: u32 = u32::MAX;
/// A little, often, for ever.
const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(20), writes: NEVER_ENDS, closes: false };
/// As much as goes.
const BULK: Plan = Plan { write: 40_000, every: Duration::from_millis(10), writes: NEVER_ENDS, closes: false };
/// Who writes: the client and the server.
const TALKS: [(Plan, Plan); 5] =
    [(CHAT, CHAT), (CHAT, Plan::LISTEN), (Plan::LISTEN, CHAT), (BULK, Plan::LISTEN), (Plan::LISTEN, BULK)];

/// A router, a server and a client host, both with a kernel cache.
struct Pair {
    world: World,
    server: HostId,
    client: HostId,
}

/// One connection, seen from both ends.
struct Ends {
    client: FlowInfo,
    server: FlowInfo,
}

fn pair(seed: u64, weather: Weather, server_plan: Plan) -> Pair {
    let mut world = World::new(seed, weather);
    let router = world.add_host(true);
    let (server, client) = (world.add_host(false), world.add_host(false));
    for host in [server, client] {
        world.register(router, host);
        world.set_direct(host, true);
    }
    world.publish_streams(router, server, "talk.shop", server_plan);
    Pair { world, server, client }
}

fn slow(millis: u64) -> Weather {
    let delay = Duration::from_millis(millis);
    Weather { delay_min: delay, delay_max: delay, ..Weather::FAIR }
}

impl Pair {
    fn connect(&mut self, plan: Plan) -> usize {
        self.world.connect_stream(self.client, "talk.shop", plan)
    }

    fn run(&mut self, time: Duration) {
        self.world.run_for(time);
    }

    fn addresses(&mut self) -> (IpAddr, IpAddr) {
        (self.world.host(self.client).address, self.world.host(self.server).address)
    }

    fn ends(&mut self, stream: usize) -> Ends {
        let client = self.world.host(self.client).flow_of(stream).expect("the client's flow");
        let of_session = |flow: &FlowInfo| flow.session == client.session;
        let server = self.world.host(self.server).sal.flows().find(of_session).expect("the server's flow");
        Ends { client, server }
    }

    fn carriages(&mut self, stream: usize) -> (Carriage, Carriage) {
        let ends = self.ends(stream);
        (ends.client.carriage, ends.server.carriage)
    }

    fn is_direct(&mut self, stream: usize) -> bool {
        self.carriages(stream) == (Carriage::Direct, Carriage::Direct)
    }

    /// Runs until the flow is direct at both ends; gives how long that took.
    fn until_direct(&mut self, stream: usize, patience: Duration) -> Duration {
        let start = self.world.now;
        while self.world.now.since(start) < patience {
            self.run(Duration::from_millis(1));
            if self.world.host(self.client).flow_of(stream).is_some_and(|flow| flow.peer_flow.0 != 0)
                && self.is_direct(stream)
            {
                return self.world.now.since(start);
            }
        }
        panic!("not direct after {patience:?}: {:?}", self.carriages(stream));
    }

    fn streams(&self) -> impl Iterator<Item = &margay_sim::stream::Stream> {
        [self.client, self.server].into_iter().flat_map(|host| &self.world.hosts[host.0].streams)
    }

    fn forget_waits(&mut self) {
        let now = self.world.now;
        for host in &mut self.world.hosts {
            host.streams.iter_mut().for_each(|stream| stream.forget_waits(now));
        }
    }

    /// No byte wrong or lost for good, no reset, no wait longer than `wait`.
    fn check(&self, wait: Duration) {
        for stream in self.streams() {
            assert!(!stream.was_wrong && !stream.was_reset, "wrong or reset");
            let longest = stream.longest_wait(self.world.now);
            assert!(longest <= wait, "a stream waited {longest:?}");
        }
        ends_agree(&self.world).expect("both ends agree");
        nothing_left_over(&self.world).expect("nothing is left");
        no_request_met(&self.world).expect("first packets come from the agent");
    }

    fn out_of_order(&self) -> u64 {
        self.streams().map(|stream| stream.out_of_order).sum()
    }

    /// Direct packets of the server that the client's kernel gave its agent.
    fn left_to_the_client(&self) -> u64 {
        self.world.hosts[self.client.0].cache.kernel.as_ref().expect("the client's kernel").left
    }

    fn stalls(&self) -> u64 {
        self.world.hosts.iter().filter_map(|host| host.cache.kernel.as_ref()).map(|kernel| kernel.stalls).sum()
    }

    /// Loses the next `count` packets of which `is_one` holds.
    fn lose(&mut self, count: usize, is_one: impl Fn(&Passing<'_>) -> bool + 'static) {
        let mut left = count;
        self.world.network.losing = Some(Box::new(move |packet| {
            let is_lost = left > 0 && is_one(packet);
            left -= usize::from(is_lost);
            is_lost
        }));
    }
}

#[test]
fn a_flow_is_direct_both_ways_within_a_few_round_trips() {
    for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
        let mut pair = pair(1, slow(10), server_plan);
        let stream = pair.connect(client_plan);
        let took = pair.until_direct(stream, SECOND);
        // Two for the connection by way of the router, one for the pinhole and its answer, one for the FENCEs; and the
        // programs' own pauses, since a pinhole needs a packet of the program to take its numbers from.
        assert!(took <= Duration::from_millis(20 * 4 + 25), "talk {number} took {took:?}");
        assert_eq!(pair.ends(stream).client.why, Why::Proved);
        pair.world.recording = Some(Vec::new());
        pair.run(2 * SECOND);
        let sent = pair.world.recording.take().expect("recording");
        assert_eq!(sent.iter().filter(|(_, _, bytes)| kind_of(bytes) == Ok(Kind::Data)).count(), 0, "talk {number}");
        assert_eq!(pair.stalls(), 0, "talk {number}");
        pair.check(Duration::from_millis(100));
    }
}

#[test]
fn nothing_is_reordered_at_the_change_over() {
    for detour in [0, 1, 5, 20, 45] {
        for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
            let mut pair = pair(2, slow(5), server_plan);
            pair.world.network.detour = Duration::from_millis(detour);
            let stream = pair.connect(client_plan);
            pair.until_direct(stream, SECOND);
            pair.run(SECOND);
            assert_eq!(pair.out_of_order(), 0, "talk {number}, detour {detour} ms");
            assert_eq!(pair.stalls(), 0, "talk {number}, detour {detour} ms");
            pair.check(Duration::from_millis(250));
        }
    }
}

#[test]
fn what_was_sent_before_a_late_fence_takes_nothing_back() {
    for detour in [60, 100, 200, 400] {
        for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
            let mut pair = pair(2, slow(5), server_plan);
            pair.world.network.detour = Duration::from_millis(detour);
            let stream = pair.connect(client_plan);
            pair.until_direct(stream, 4 * SECOND);
            for step in 0..2000 {
                pair.run(Duration::from_millis(1));
                assert!(pair.is_direct(stream), "talk {number}, detour {detour} ms: back after {step} ms");
            }
            assert_eq!(pair.stalls(), 0, "talk {number}, detour {detour} ms");
            // Longer than a round trip by the detour, and one more for what the change-over put out of order.
            pair.check(Duration::from_millis(300 + 3 * detour));
        }
    }
}

#[test]
fn lost_pinholes_and_fences_cost_a_moment() {
    type Lost = fn(&Passing<'_>) -> bool;
    let kinds: [(&str, Lost); 4] = [
        ("pinhole", |packet| packet.is_bare() && packet.from.ip() == IpAddr::from([10, 0, 0, 3])),
        ("answer", |packet| packet.is_bare() && packet.from.ip() == IpAddr::from([10, 0, 0, 2])),
        ("initiator's FENCE", |packet| packet.is_fence() && packet.from.ip() == IpAddr::from([10, 0, 0, 3])),
        ("responder's FENCE", |packet| packet.is_fence() && packet.from.ip() == IpAddr::from([10, 0, 0, 2])),
    ];
    for (name, is_one) in kinds {
        for count in 1..=3 {
            for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
                let mut pair = pair(3, slow(5), server_plan);
                pair.lose(count, is_one);
                let stream = pair.connect(client_plan);
                let took = pair.until_direct(stream, 10 * SECOND);
                pair.run(2 * SECOND);
                assert!(pair.is_direct(stream), "{name} lost {count} times, talk {number}: not direct any more");
                assert_eq!(pair.stalls(), 0, "{name} lost {count} times, talk {number}: after {took:?}");
                pair.check(Duration::from_millis(300));
            }
        }
    }
}

#[test]
fn a_second_flow_starts_direct_and_its_data_is_never_encapsulated() {
    for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
        let mut pair = pair(4, slow(5), server_plan);
        let first = pair.connect(client_plan);
        pair.until_direct(first, SECOND);
        pair.world.recording = Some(Vec::new());
        let second = pair.connect(client_plan);
        pair.run(2 * SECOND);
        assert!(pair.is_direct(second), "talk {number}: {:?}", pair.carriages(second));
        assert_eq!(pair.ends(second).client.why, Why::Hinted);
        let sent = pair.world.recording.take().expect("recording");
        let data = sent.iter().filter(|(_, _, bytes)| kind_of(bytes) == Ok(Kind::Data) && bytes.len() > 16);
        assert_eq!(data.count(), 0, "talk {number}");
        assert_eq!(pair.out_of_order(), 0, "talk {number}");
        pair.check(Duration::from_millis(100));
    }
}

/// What came up to the agent meanwhile would be overtaken by what comes after the word.
#[test]
fn a_started_flow_waits_for_no_word_of_the_peer() {
    for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
        let mut pair = pair(6, slow(5), server_plan);
        let first = pair.connect(client_plan);
        pair.until_direct(first, SECOND);
        let (_, server) = pair.addresses();
        // Its ACKs of signalling are confirmations.
        pair.lose(usize::MAX, move |packet| {
            !packet.is_direct && packet.from.ip() == server && kind_of(packet.bytes) == Ok(Kind::Ack)
        });
        let left = pair.left_to_the_client();
        let second = pair.connect(client_plan);
        pair.run(Duration::from_millis(100));
        assert_eq!(pair.carriages(second), (Carriage::Starting, Carriage::Direct), "talk {number}");
        pair.world.network.losing = None;
        pair.run(2 * SECOND);
        assert!(pair.is_direct(second), "talk {number}: {:?}", pair.carriages(second));
        assert_eq!(pair.left_to_the_client(), left, "talk {number}");
        assert_eq!(pair.world.hosts[pair.client.0].early_acks, 0, "talk {number}");
        pair.check(Duration::from_millis(100));
    }
}

#[test]
fn what_is_left_of_a_closed_flow_says_nothing_of_its_path() {
    let asks = Plan { write: 300, every: Duration::from_millis(20), writes: 20, closes: true };
    let mut pair = pair(4, slow(5), Plan { writes: 10, ..CHAT });
    let first = pair.connect(asks);
    pair.until_direct(first, SECOND);
    pair.run(SECOND);
    for host in [pair.client, pair.server] {
        let now = pair.world.now;
        let sal = &mut pair.world.host(host).sal;
        let closed = sal.flows().find(|flow| flow.lifecycle == Lifecycle::Closed).expect("it lingers").flow;
        // A last packet, for which nobody is there any more.
        sal.handle(now, Input::Direct { flow: closed, event: DirectEvent::Stalled });
        pair.world.touch(host);
    }
    pair.run(Duration::from_millis(100));
    let second = pair.connect(CHAT);
    pair.run(SECOND);
    assert!(pair.is_direct(second), "{:?}", pair.carriages(second));
    assert_eq!((pair.ends(second).client.why, pair.ends(second).server.why), (Why::Hinted, Why::Hinted));
    for host in [pair.client, pair.server] {
        assert!(pair.world.host(host).sal.associations().all(|peer| !peer.is_suspected && peer.trouble.is_none()));
    }
}

/// Puts a wall up with `wall`.
fn put_up(pair: &mut Pair, wall: usize) {
    let (client, server) = pair.addresses();
    match wall {
        0 => pair.world.network.wall_off_all(),
        1 => pair.world.network.wall_off(client, server),
        2 => pair.world.network.wall_off(server, client),
        _ => {
            pair.world.network.guard(client);
            pair.world.network.guard(server);
        }
    }
}

#[test]
fn behind_a_wall_flows_stay_encapsulated_and_nothing_waits() {
    for wall in 0..3 {
        for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
            let mut pair = pair(5, slow(5), server_plan);
            put_up(&mut pair, wall);
            let stream = pair.connect(client_plan);
            pair.run(10 * SECOND);
            let (client, server) = pair.carriages(stream);
            assert!(!client.sends() && !server.sends(), "wall {wall}, talk {number}: {client:?} {server:?}");
            assert_eq!((pair.out_of_order(), pair.stalls()), (0, 0), "wall {wall}, talk {number}");
            pair.check(Duration::from_millis(100));
        }
    }
}

#[test]
fn firewalls_in_front_of_both_let_through_what_both_sent() {
    for (client_plan, server_plan) in TALKS {
        let mut pair = pair(6, slow(5), server_plan);
        put_up(&mut pair, 3);
        let stream = pair.connect(client_plan);
        pair.until_direct(stream, 5 * SECOND);
        pair.check(Duration::from_millis(100));
    }
}

#[test]
fn a_firewall_in_front_of_the_client_lets_out_what_it_knows() {
    let mut pair = pair(6, slow(5), CHAT);
    let (client, _) = pair.addresses();
    pair.world.network.guard(client);
    let stream = pair.connect(CHAT);
    pair.until_direct(stream, SECOND);
    pair.check(Duration::from_millis(100));
}

#[test]
fn a_wall_in_the_middle_costs_less_than_a_second_and_direct_comes_back() {
    for wall in 0..3 {
        for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
            let mut pair = pair(7, slow(5), server_plan);
            let stream = pair.connect(client_plan);
            pair.until_direct(stream, SECOND);
            pair.run(SECOND);
            put_up(&mut pair, wall);
            pair.run(15 * SECOND);
            let (client, server) = pair.carriages(stream);
            assert!(!client.sends() && !server.sends(), "wall {wall}, talk {number}: {client:?} {server:?}");
            pair.check(SECOND);
            pair.forget_waits();
            pair.world.network.take_walls_down();
            pair.until_direct(stream, 20 * SECOND);
            pair.run(2 * SECOND);
            assert!(pair.is_direct(stream), "wall {wall}, talk {number}");
            pair.check(SECOND);
        }
    }
}

#[test]
fn a_wrong_hint_costs_a_stall_and_no_more() {
    for wall in 0..3 {
        for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
            let mut pair = pair(8, slow(5), server_plan);
            let first = pair.connect(client_plan);
            pair.until_direct(first, SECOND);
            pair.run(SECOND);
            put_up(&mut pair, wall);
            let second = pair.connect(client_plan);
            pair.run(15 * SECOND);
            for stream in [first, second] {
                let (client, server) = pair.carriages(stream);
                assert!(!client.sends() && !server.sends(), "wall {wall}, talk {number}: {client:?} {server:?}");
            }
            pair.check(2 * SECOND);
            pair.world.network.take_walls_down();
            pair.until_direct(second, 20 * SECOND);
        }
    }
}

#[test]
fn both_ends_stall_at_once() {
    for delay in [1, 10, 40] {
        let mut pair = pair(9, slow(delay), CHAT);
        let stream = pair.connect(CHAT);
        pair.until_direct(stream, SECOND);
        for _ in 0..5 {
            pair.run(3 * SECOND);
            pair.world.network.wall_off_all();
            pair.run(2 * SECOND);
            let (client, server) = pair.carriages(stream);
            assert!(!client.sends() && !server.sends(), "{client:?} {server:?}");
            pair.world.network.take_walls_down();
            pair.until_direct(stream, 20 * SECOND);
        }
        pair.check(SECOND);
    }
}

#[test]
fn emptied_caches_cost_misses_and_no_more() {
    for seed in 0..20 {
        let (client_plan, server_plan) = TALKS[seed as usize % TALKS.len()];
        let mut pair = pair(100 + seed, slow(5), server_plan);
        let stream = pair.connect(client_plan);
        for _ in 0..60 {
            let pause = 1 + pair.world.random() % 200;
            pair.run(Duration::from_millis(pause.into()));
            let host = [pair.client, pair.server][pair.world.random() as usize % 2];
            let is_whole = pair.world.random().is_multiple_of(2);
            let cache = &mut pair.world.host(host).cache;
            if is_whole { cache.clear() } else { cache.clear_kernel() }
        }
        pair.until_direct(stream, 20 * SECOND);
        pair.run(5 * SECOND);
        assert!(pair.is_direct(stream), "seed {seed}: {:?}", pair.carriages(stream));
        pair.check(SECOND);
    }
}

/// A bare TCP segment with a sequence number and an acknowledgement.
fn bare_segment(source: SocketAddrV4, destination: SocketAddrV4) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0];
    packet.extend(source.ip().octets());
    packet.extend(destination.ip().octets());
    packet.extend(source.port().to_be_bytes());
    packet.extend(destination.port().to_be_bytes());
    packet.extend([0, 0, 0, 9, 0, 0, 0, 1, 5 << 4, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
    packet
}

#[test]
fn what_is_no_flows_the_host_answers_but_for_what_may_be_late() {
    let mut pair = pair(31, slow(1), Plan::LISTEN);
    let ports = |world: &mut World, host: HostId, port: u16| {
        let now = world.now;
        world.host(host).sal.set_flow_ports(now, Some(port..=port));
    };
    ports(&mut pair.world, pair.client, 61_001);
    ports(&mut pair.world, pair.server, 61_002);
    let stream = pair.connect(Plan { writes: 20, closes: true, ..CHAT });
    pair.until_direct(stream, SECOND);
    let addresses = pair.addresses();
    let (IpAddr::V4(client), IpAddr::V4(server)) = addresses else { panic!("{addresses:?}") };
    let given = |pair: &mut Pair, from: Ipv4Addr, port: u16| {
        let now = pair.world.now;
        let packet = bare_segment(SocketAddrV4::new(from, port), SocketAddrV4::new(server, 61_002));
        let sal = &mut pair.world.host(pair.server).sal;
        let mut buf = [0; 2000];
        let verdict = sal.handle_app_packet(now, &packet);
        let said = std::iter::from_fn(|| {
            sal.poll(&mut buf).map(|output| match output {
                Output::Inject { len } => buf[..len].to_vec(),
                _ => Vec::new(),
            })
        });
        (verdict, said.filter(|said| *said == packet).count())
    };
    assert_eq!(given(&mut pair, client, 40_000), (AppVerdict::Consumed, 1), "the host answers");
    let unknown = AppVerdict::Drop(DropReason::UnknownFlow);
    assert_eq!(given(&mut pair, Ipv4Addr::new(10, 99, 0, 1), 40_000), (unknown, 0), "no peer is there");
    pair.run(15 * SECOND);
    assert!(pair.world.host(pair.server).sal.flows().next().is_none(), "it has closed");
    assert_eq!(given(&mut pair, client, 61_001), (unknown, 0), "it may be late");
    assert_eq!(given(&mut pair, client, 61_003), (AppVerdict::Consumed, 1));
}

#[test]
fn a_pair_of_ports_rests_for_a_minute() {
    let mut pair = pair(10, slow(1), Plan::LISTEN);
    for host in [pair.client, pair.server] {
        let now = pair.world.now;
        pair.world.host(host).sal.set_flow_ports(now, Some(61_000..=61_000));
    }
    let short = Plan { writes: 20, closes: true, ..CHAT };
    let first = pair.connect(short);
    pair.until_direct(first, SECOND);
    pair.run(2 * SECOND);
    assert_ne!(pair.streams().next().map(|stream| stream.state), Some(State::Open), "closed");
    // Both ends keep the flow for ten seconds and its ports for sixty more.
    for wait in [1, 20, 40] {
        pair.run(wait * SECOND);
        let next = pair.connect(short);
        pair.run(Duration::from_millis(100));
        let ends = pair.ends(next);
        assert_eq!((ends.client.carriage, ends.server.why), (Carriage::Never, Why::PortsTaken), "after {wait} s more");
    }
    pair.run(20 * SECOND);
    let last = pair.connect(short);
    pair.until_direct(last, SECOND);
    pair.check(SECOND);
}

#[test]
fn flows_that_close_in_the_middle_of_lifting_close_in_order() {
    for writes in 0..12 {
        for closer in 0..3 {
            let (client_closes, server_closes) = (closer != 1, closer != 0);
            for detour in 0..40 {
                let every = Duration::from_millis(3);
                let plan = |closes| Plan { write: 2500, every, writes, closes };
                let mut pair = pair(11, slow(5), plan(server_closes));
                pair.world.network.detour = Duration::from_millis(detour);
                let stream = pair.connect(plan(client_closes));
                pair.run(SECOND);
                let name = format!("{writes} writes, closer {closer}, detour {detour} ms");
                for stream in pair.streams() {
                    assert!(stream.is_done() && stream.received == u64::from(writes) * 2500, "{name}: incomplete");
                    assert!(matches!(stream.state, State::TimeWait | State::Gone), "{name}: {:?}", stream.state);
                }
                assert_eq!(pair.stalls(), 0, "{name}");
                pair.check(SECOND);
                pair.run(30 * SECOND);
                assert!(pair.world.host(pair.client).flow_of(stream).is_none(), "{name}: the flow stays");
                assert_eq!(pair.world.host(pair.server).sal.flow_count(), 0, "{name}");
                pair.check(SECOND);
            }
        }
    }
}

#[test]
fn hosts_without_a_cache_send_nothing_direct() {
    for (on_client, on_server, why) in
        [(false, true, Why::NoCache), (true, false, Why::PeerHasNone), (false, false, Why::NoCache)]
    {
        let mut pair = pair(12, slow(5), CHAT);
        let (client, server) = (pair.client, pair.server);
        pair.world.set_direct(client, on_client);
        pair.world.set_direct(server, on_server);
        pair.world.direct_recording = Some(Vec::new());
        let stream = pair.connect(CHAT);
        pair.run(10 * SECOND);
        assert_eq!(pair.carriages(stream), (Carriage::Never, Carriage::Never));
        assert_eq!(pair.ends(stream).client.why, why);
        assert_eq!(pair.world.direct_recording.as_ref().map(Vec::len), Some(0));
        pair.check(Duration::from_millis(100));
    }
}

#[test]
fn what_is_too_large_goes_beside_and_takes_nothing_back() {
    for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
        let mut pair = pair(13, slow(5), server_plan);
        for host in [pair.client, pair.server] {
            pair.world.host(host).cache.kernel.as_mut().expect("a kernel").mtu = 600;
        }
        let plan = |plan: Plan| if plan.writes == 0 { plan } else { Plan { write: 1200, ..plan } };
        let stream = pair.connect(plan(client_plan));
        pair.until_direct(stream, SECOND);
        for step in 0..50 {
            pair.run(Duration::from_millis(100));
            assert!(pair.is_direct(stream), "talk {number}, step {step}: {:?}", pair.carriages(stream));
        }
        pair.check(SECOND);
    }
}

#[test]
fn the_direct_path_is_taken_off_a_host_and_put_on_again() {
    for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
        for off in 0..2 {
            let mut pair = pair(14, slow(5), server_plan);
            let stream = pair.connect(client_plan);
            pair.until_direct(stream, SECOND);
            let host = [pair.client, pair.server][off];
            pair.world.set_direct(host, false);
            pair.run(5 * SECOND);
            let (client, server) = pair.carriages(stream);
            assert!(!client.sends() && !server.sends(), "talk {number}, off {off}: {client:?} {server:?}");
            pair.world.set_direct(host, true);
            pair.until_direct(stream, 20 * SECOND);
            pair.run(2 * SECOND);
            assert!(pair.is_direct(stream), "talk {number}, off {off}");
            assert_eq!(pair.stalls(), 0, "talk {number}, off {off}");
            pair.check(SECOND);
        }
    }
}
