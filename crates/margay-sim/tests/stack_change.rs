//! The stack of a live flow in virtual time: plain and sealed in turns, by order of either end, while the network, the
//! hosts' places and the agents do as they like.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::stack_rule::{Expression, Fact, Network, StackRule};
use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{Carriage, ChangeRefused, Cipher, FlowInfo, Instant, Ranges, Stack};
use margay_sim::check::ends_agree;
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Weather, World};
use margay_wire::{DATA_HEADER_LEN, DataRepr, FENCE, Kind, Message, STACK_ENCAP, is_sealed, kind_of};

const SECOND: Duration = Duration::from_secs(1);
const EVERY: Duration = Duration::from_millis(5);
const BOTH: &[Cipher] = &[Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(20), writes: u32::MAX, closes: false };
const BULK: Plan = Plan { write: 12_000, every: Duration::from_millis(10), writes: u32::MAX, closes: false };
/// Who writes: the client and the server.
const TALKS: [(Plan, Plan); 4] = [(CHAT, CHAT), (CHAT, Plan::LISTEN), (Plan::LISTEN, BULK), (BULK, Plan::LISTEN)];
const PORT: u16 = 53;
/// What connections are carried by: `fec` is for datagrams.
const OF_CONNECTIONS: [Stack; 2] = [Stack::Plain, Stack::Secure];

struct Pair {
    world: World,
    server: HostId,
    client: HostId,
    /// Numbered datagrams that each end has said, the client first.
    said: [u32; 2],
    heard: [Vec<u32>; 2],
}

fn slow(millis: u64) -> Weather {
    let delay = Duration::from_millis(millis);
    Weather { delay_min: delay, delay_max: delay, ..Weather::FAIR }
}

/// `demands`: whether the client and the server do.
fn pair(seed: u64, weather: Weather, is_direct: bool, demands: (bool, bool), server_plan: Plan) -> Pair {
    let mut world = World::new(seed, weather);
    let router = world.add_host(true);
    let server = world.add_host(false);
    let client = world.add_host(false);
    for (host, demands) in [(server, demands.1), (client, demands.0)] {
        world.register(router, host);
        world.set_direct(host, is_direct);
        world.host(host).set_secure(BOTH, demands);
    }
    world.publish_streams(router, server, "talk.shop", server_plan);
    let demux = Demux {
        listener: SocketAddr::new([0_u16; 8].into(), PORT),
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: Some(17),
        allow: Allow::Any,
    };
    let name = service("ask.shop");
    let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
    world.host(server).sal.add_rule(Instant::ZERO, name.into(), rule).expect("room");
    let address = world.host(server).address;
    let key = world.host(server).public_key();
    world.host(router).forward(name.into(), address, Some(key));
    Pair { world, server, client, said: [0; 2], heard: [Vec::new(), Vec::new()] }
}

impl Pair {
    fn hosts(&self) -> [HostId; 2] {
        [self.client, self.server]
    }

    fn flow(&mut self, host: HostId) -> FlowInfo {
        self.world.host(host).sal.flows().find(|flow| flow.peer_flow.0 != 0).expect("a flow")
    }

    fn stacks(&mut self) -> [Stack; 2] {
        self.hosts().map(|host| self.flow(host).stack.stack)
    }

    fn is_settled(&mut self, stack: Stack) -> bool {
        self.stacks() == [stack; 2] && self.hosts().iter().all(|host| self.flow(*host).stack.changing_to.is_none())
    }

    fn order(&mut self, host: HostId, to: Stack) -> Result<bool, ChangeRefused> {
        let now = self.world.now;
        let id = self.flow(host).flow;
        let begun = self.world.host(host).sal.set_flow_stack(now, id, to);
        self.world.touch(host);
        begun
    }

    fn ask(&mut self) {
        self.said[0] += 1;
        let own = SocketAddr::new(Ranges::USUAL.host_v6().into(), 4000);
        let to = SocketAddr::new(Ranges::USUAL.virtual_v6(&service("ask.shop")).into(), PORT);
        self.world.say(self.client, &Datagram::new(own, to, &self.said[0].to_be_bytes()));
    }

    /// The first datagram sets the flow up.
    fn open(&mut self) {
        self.ask();
        self.world.run_for(SECOND);
    }

    /// Both ends say numbered datagrams to each other for so long.
    fn chat(&mut self, time: Duration) {
        let until = self.world.now + time;
        while self.world.now < until {
            self.ask();
            if let Some(last) = self.answer_tuple() {
                self.said[1] += 1;
                let answer = Datagram { tuple: last, data: self.said[1].to_be_bytes().to_vec() };
                self.world.say(self.server, &answer);
            }
            self.world.run_for(EVERY);
            self.hear();
            self.judge();
        }
    }

    /// What the server's packets to the client carry, once there is a flow.
    fn answer_tuple(&mut self) -> Option<margay_core::Tuple> {
        self.world.host(self.server).sal.flows().find(|flow| flow.peer_flow.0 != 0).map(|flow| flow.app)
    }

    /// Both ends look at their rules.
    fn judge(&mut self) {
        let now = self.world.now;
        for host in self.hosts() {
            self.world.host(host).sal.judge_stacks(now);
            self.world.touch(host);
        }
    }

    fn hear(&mut self) {
        for (heard, host) in self.heard.iter_mut().zip([self.client, self.server]) {
            for datagram in std::mem::take(&mut self.world.hosts[host.0].datagrams) {
                heard.push(u32::from_be_bytes(datagram.data.try_into().expect("a number")));
            }
        }
    }

    /// Everything that was said has been heard, once and in order.
    fn nothing_is_missing(&mut self, what: &str) {
        self.world.run_for(SECOND);
        self.hear();
        for (said, heard) in [(self.said[0], &self.heard[1]), (self.said[1], &self.heard[0])] {
            assert!(heard.iter().copied().eq(1..=said), "{what}: of {said} came {heard:?}");
        }
    }

    fn connect(&mut self, plan: Plan) -> usize {
        let stream = self.world.connect_stream(self.client, "talk.shop", plan);
        self.world.run_for(SECOND);
        stream
    }

    /// No byte wrong, no reset, no wait longer than `wait`; both ends know the same flow.
    fn check(&self, wait: Duration, what: &str) {
        for stream in self.world.hosts.iter().flat_map(|host| &host.streams) {
            assert!(!stream.was_wrong && !stream.was_reset, "{what}: wrong or reset");
            let longest = stream.longest_wait(self.world.now);
            assert!(longest <= wait, "{what}: a stream waited {longest:?}");
        }
        ends_agree(&self.world).expect("both ends agree");
    }

    fn out_of_order(&self) -> u64 {
        self.world.hosts.iter().flat_map(|host| &host.streams).map(|stream| stream.out_of_order).sum()
    }

    fn forget_waits(&mut self) {
        let now = self.world.now;
        for host in &mut self.world.hosts {
            host.streams.iter_mut().for_each(|stream| stream.forget_waits(now));
        }
    }

    fn locked(&mut self) -> usize {
        let now = self.world.now;
        self.hosts().map(|host| self.world.host(host).sal.locked_sessions(now)).iter().sum()
    }

    /// Plain DATA of programs that was sent since recording began, and all that went direct. The last packet of a
    /// stack says nothing.
    fn plain(&mut self) -> usize {
        let recorded = self.world.recording.iter().flatten();
        let is_plain = |bytes: &[u8]| {
            let is_empty = bytes.len() <= DATA_HEADER_LEN + 8;
            DataRepr::parse(bytes).is_ok_and(|data| data.stack == STACK_ENCAP && !is_empty)
        };
        let encapsulated = recorded.filter(|(_, _, bytes)| is_plain(bytes)).count();
        encapsulated + self.world.direct_recording.as_ref().map_or(0, Vec::len)
    }

    fn record(&mut self) {
        (self.world.recording, self.world.direct_recording) = (Some(Vec::new()), Some(Vec::new()));
    }

    fn sealed(&self) -> usize {
        let recorded = self.world.recording.iter().flatten();
        recorded.filter(|(_, _, bytes)| DataRepr::parse(bytes).is_ok_and(|data| is_sealed(data.stack))).count()
    }
}

#[test]
fn datagrams_go_sealed_and_plain_in_turns_and_none_is_lost_doubled_or_late() {
    for is_direct in [false, true] {
        for by_server in [false, true] {
            for delay in [1, 7, 30] {
                let what = format!("direct {is_direct}, by server {by_server}, {delay} ms");
                let mut pair = pair(1, slow(delay), is_direct, (false, false), Plan::LISTEN);
                pair.open();
                pair.chat(SECOND);
                let direct = if is_direct { Carriage::Direct } else { Carriage::Never };
                let orderer = if by_server { pair.server } else { pair.client };
                for _ in 0..4 {
                    for host in pair.hosts() {
                        assert_eq!(pair.flow(host).carriage, direct, "{what}");
                    }
                    assert_eq!(pair.order(orderer, Stack::Secure), Ok(true), "{what}");
                    pair.chat(SECOND);
                    assert!(pair.is_settled(Stack::Secure), "{what}: {:?}", pair.stacks());
                    pair.record();
                    pair.chat(SECOND);
                    assert!(pair.plain() == 0 && pair.sealed() > 100, "{what}");
                    assert_eq!(pair.order(orderer, Stack::Plain), Ok(true), "{what}");
                    pair.chat(SECOND * 2);
                    assert!(pair.is_settled(Stack::Plain), "{what}: {:?}", pair.stacks());
                }
                pair.record();
                pair.chat(SECOND);
                assert!(pair.sealed() == 0 && pair.plain() > 100, "{what}");
                pair.nothing_is_missing(&what);
                assert_eq!(pair.locked(), 0, "{what}");
                for host in pair.hosts() {
                    let changes = pair.flow(host).stack.changes;
                    assert_eq!(changes.len(), 8, "{what}");
                    assert!(changes.iter().all(|change| change.outcome.label() == "done"), "{what}: {changes:?}");
                }
            }
        }
    }
}

#[test]
fn streams_go_on_and_nothing_overtakes() {
    for is_direct in [false, true] {
        for (number, (client_plan, server_plan)) in TALKS.into_iter().enumerate() {
            let what = format!("direct {is_direct}, talk {number}");
            let mut pair = pair(2, slow(5), is_direct, (false, false), server_plan);
            pair.connect(client_plan);
            for turn in 0..20_u64 {
                let to = if turn % 2 == 0 { Stack::Secure } else { Stack::Plain };
                let host = pair.hosts()[turn as usize / 2 % 2];
                assert_eq!(pair.order(host, to), Ok(true), "{what}, turn {turn}");
                pair.world.run_for(Duration::from_millis(200 + 37 * turn));
                assert!(pair.is_settled(to), "{what}, turn {turn}: {:?}", pair.stacks());
            }
            pair.world.run_for(SECOND);
            pair.check(Duration::from_millis(150), &what);
            assert_eq!(pair.out_of_order(), 0, "{what}");
        }
    }
}

#[test]
fn whatever_the_network_does_both_ends_end_with_the_same_stack() {
    for seed in 0..24 {
        let (client_plan, server_plan) = TALKS[seed as usize % TALKS.len()];
        let what = format!("seed {seed}");
        let mut pair = pair(100 + seed, slow(5), seed % 2 == 0, (false, false), server_plan);
        pair.connect(client_plan);
        pair.world.network.weather = Weather::FOUL;
        for _ in 0..30 {
            let random = pair.world.random();
            let host = pair.hosts()[random as usize & 1];
            let to = OF_CONNECTIONS[random as usize >> 1 & 1];
            // One may be under way: then this one is refused.
            let _ = pair.order(host, to);
            pair.world.run_for(Duration::from_millis((random >> 8 & 0x3ff).into()));
        }
        pair.world.network.weather = slow(5);
        pair.world.run_for(SECOND * 12);
        let [client, server] = pair.stacks();
        assert_eq!(client, server, "{what}");
        assert!(pair.is_settled(client), "{what}");
        assert_eq!(pair.locked(), 0, "{what}");
        pair.forget_waits();
        pair.world.run_for(SECOND);
        pair.check(Duration::from_millis(500), &what);
    }
}

#[test]
fn datagrams_are_heard_once_whatever_the_network_loses() {
    let loses = Weather { loss_per_mille: 50, ..slow(5) };
    for seed in 0..10 {
        let mut pair = pair(200 + seed, slow(5), seed % 2 == 0, (false, false), Plan::LISTEN);
        pair.open();
        pair.chat(SECOND);
        pair.world.network.weather = loses;
        for turn in 0..10 {
            let _ = pair.order(pair.hosts()[turn % 2], Stack::ALL[(turn + 1) % 3]);
            pair.chat(SECOND);
        }
        pair.world.network.weather = slow(5);
        pair.chat(SECOND * 5);
        let [client, server] = pair.stacks();
        assert_eq!(client, server, "seed {seed}");
        for (said, heard) in [(pair.said[0], &pair.heard[1]), (pair.said[1], &pair.heard[0])] {
            assert!(heard.is_sorted_by(|one, next| one < next), "seed {seed}: once, and in order");
            // One in twenty is lost; what follows a lost FENCE is not.
            assert!(heard.len() * 100 > said as usize * 90, "seed {seed}: {} of {said}", heard.len());
        }
    }
}

#[test]
fn both_ends_ask_at_once() {
    for delay in [1, 10, 100] {
        for (at_client, at_server) in [(Stack::Secure, Stack::Secure), (Stack::Plain, Stack::Plain)] {
            let what = format!("{delay} ms, {at_client} and {at_server}");
            let mut pair = pair(3, slow(delay), true, (false, false), CHAT);
            pair.connect(CHAT);
            if at_client == Stack::Plain {
                assert_eq!(pair.order(pair.client, Stack::Secure), Ok(true));
                pair.world.run_for(SECOND * 3);
            }
            assert_eq!(pair.order(pair.client, at_client), Ok(true), "{what}");
            assert_eq!(pair.order(pair.server, at_server), Ok(true), "{what}");
            pair.world.run_for(SECOND * 4);
            assert!(pair.is_settled(at_client), "{what}: {:?}", pair.stacks());
            assert_eq!(pair.locked(), 0, "{what}");
            for host in pair.hosts() {
                let order = pair.flow(host).stack.order.map(|order| order.stack);
                assert!(order.is_none_or(|order| order == at_client), "{what}");
            }
            pair.check(SECOND, &what);
        }
    }
}

#[test]
fn changes_and_moves_do_not_disturb_each_other() {
    for seed in 0..20 {
        let what = format!("seed {seed}");
        let mut pair = pair(300 + seed, slow(5), true, (false, false), CHAT);
        let stream = pair.connect(CHAT);
        pair.world.run_for(SECOND * 2);
        for turn in 1..9_u8 {
            let host = pair.hosts()[usize::from(turn) % 2];
            let to = if turn % 2 == 1 { Stack::Secure } else { Stack::Plain };
            let wait = pair.world.random() % 20;
            assert_eq!(pair.order(pair.client, to), Ok(true), "{what}, turn {turn}");
            pair.world.run_for(Duration::from_millis(wait.into()));
            pair.world.set_addresses(host, vec![[10, 7, turn, seed as u8].into()]);
            pair.world.run_for(SECOND * 6);
            let [client, server] = pair.stacks();
            assert!(client == server && pair.is_settled(client), "{what}, turn {turn}: {client}, {server}");
            if !pair.is_settled(to) {
                // Messages went to where nobody was any more.
                assert_eq!(pair.order(pair.client, to), Ok(true), "{what}, turn {turn}");
                pair.world.run_for(SECOND);
                assert!(pair.is_settled(to), "{what}, turn {turn}");
            }
        }
        assert!(pair.world.host(pair.client).flow_of(stream).is_some_and(|flow| flow.moves > 0), "{what}");
        pair.forget_waits();
        pair.world.run_for(SECOND);
        pair.check(Duration::from_millis(300), &what);
    }
}

#[test]
fn either_agent_starts_again_at_any_step_and_both_ends_agree() {
    for is_direct in [false, true] {
        for to in OF_CONNECTIONS {
            for which in [0, 1] {
                for step in 0..16 {
                    let what = format!("direct {is_direct}, to {to}, host {which}, step {step}");
                    let mut pair = pair(4, slow(5), is_direct, (false, false), CHAT);
                    pair.connect(CHAT);
                    pair.world.run_for(SECOND);
                    if to == Stack::Plain {
                        assert_eq!(pair.order(pair.client, Stack::Secure), Ok(true), "{what}");
                        pair.world.run_for(SECOND);
                    }
                    assert_eq!(pair.order(pair.client, to), Ok(true), "{what}");
                    pair.world.run_for(Duration::from_millis(2 * step));
                    let host = pair.hosts()[which];
                    pair.world.kill_agent(host);
                    pair.world.run_for(Duration::from_millis(300));
                    pair.world.start_agent(host);
                    pair.world.run_for(SECOND * 6);
                    let [client, server] = pair.stacks();
                    assert_eq!(client, server, "{what}");
                    assert!(pair.is_settled(client), "{what}");
                    assert_eq!(pair.locked(), 0, "{what}");
                    pair.forget_waits();
                    pair.world.run_for(SECOND * 2);
                    pair.check(Duration::from_millis(500), &what);
                    // It may be changed as before.
                    let next = if client == Stack::Plain { Stack::Secure } else { Stack::Plain };
                    assert_eq!(pair.order(pair.server, next), Ok(true), "{what}");
                    pair.world.run_for(SECOND);
                    assert!(pair.is_settled(next), "{what}");
                }
            }
        }
    }
}

#[test]
fn either_agent_starts_again_while_a_flow_goes_by_fec_or_shall_and_both_ends_agree() {
    for case in 0..3 * 2 * 8 {
        let to = Stack::ALL[case / 16];
        let which = case / 8 % 2;
        let step = case as u64 % 8 * 2;
        let what = format!("to {to}, host {which}, step {step}");
        let mut pair = pair(6, slow(5), true, (false, false), Plan::LISTEN);
        pair.open();
        pair.chat(SECOND / 10);
        if to != Stack::Fec {
            assert_eq!(pair.order(pair.client, Stack::Fec), Ok(true), "{what}");
            pair.world.run_for(SECOND);
        }
        assert_eq!(pair.order(pair.client, to), Ok(true), "{what}");
        pair.world.run_for(Duration::from_millis(2 * step));
        let host = pair.hosts()[which];
        pair.world.kill_agent(host);
        pair.world.run_for(Duration::from_millis(300));
        pair.world.start_agent(host);
        pair.chat(SECOND * 5);
        let [client, server] = pair.stacks();
        assert!(client == server && pair.is_settled(client) && pair.locked() == 0, "{what}: {client} and {server}");
        let next = if client == Stack::Fec { Stack::Plain } else { Stack::Fec };
        assert_eq!(pair.order(pair.server, next), Ok(true), "{what}");
        pair.world.run_for(SECOND);
        assert!(pair.is_settled(next), "{what}");
    }
}

#[test]
fn who_demands_a_sealed_flow_is_never_given_less() {
    for demands in [(true, false), (false, true), (true, true)] {
        let what = format!("{demands:?}");
        let mut pair = pair(5, slow(5), true, demands, CHAT);
        pair.record();
        pair.connect(CHAT);
        for host in pair.hosts() {
            let is_its = if host == pair.client { demands.0 } else { demands.1 };
            let info = pair.flow(host).stack;
            let is_peers = if host == pair.client { demands.1 } else { demands.0 };
            assert_eq!((info.is_demanded, info.is_demanded_by_peer), (is_its, is_peers), "{what}");
            let begun = pair.order(host, Stack::Plain);
            assert_eq!(begun.is_err(), is_its, "{what}: who demands it is refused at once");
            pair.world.run_for(SECOND);
            let last = pair.flow(host).stack.changes.last().copied().expect("an order");
            assert_eq!(last.outcome.label(), "refused", "{what}");
            assert!(last.outcome.text().contains(if is_its { "this host" } else { "peer" }), "{what}");
            assert!(pair.is_settled(Stack::Secure), "{what}");
        }
        for host in pair.hosts() {
            pair.world.kill_agent(host);
            pair.world.run_for(Duration::from_millis(100));
            pair.world.start_agent(host);
            pair.forget_waits();
            pair.world.run_for(SECOND * 2);
            let _ = pair.order(host, Stack::Plain);
            pair.world.run_for(SECOND);
        }
        assert!(pair.is_settled(Stack::Secure), "{what}");
        assert_eq!(pair.plain(), 0, "{what}: not one packet");
        pair.check(SECOND, &what);
        // Nobody demands it any more.
        for host in pair.hosts() {
            pair.world.host(host).set_secure(BOTH, false);
        }
        assert_eq!(pair.order(pair.client, Stack::Plain), Ok(true), "{what}");
        pair.world.run_for(SECOND * 3);
        assert!(pair.is_settled(Stack::Plain), "{what}");
        for host in pair.hosts() {
            assert_eq!(pair.flow(host).carriage, Carriage::Direct, "{what}: it has kept its ports");
        }
        pair.check(SECOND, &what);
    }
}

/// A change to plain is ordered, and the configuration of an end is read anew `wait` later.
fn demand_while_unsealing(is_clients: bool, by_server: bool, wait: Duration) {
    let what = format!("of the client {is_clients}, by the server {by_server}, after {wait:?}");
    let mut pair = pair(9, slow(10), true, (false, false), CHAT);
    pair.connect(CHAT);
    let orderer = if by_server { pair.server } else { pair.client };
    assert_eq!(pair.order(orderer, Stack::Secure), Ok(true), "{what}");
    pair.world.run_for(SECOND);
    assert_eq!(pair.order(orderer, Stack::Plain), Ok(true), "{what}");
    pair.world.run_for(wait);
    let demander = if is_clients { pair.client } else { pair.server };
    let was_made = pair.flow(demander).stack.stack == Stack::Plain;
    pair.world.host(demander).set_secure(BOTH, true);
    pair.world.touch(demander);
    pair.world.run_for(SECOND * 6);
    let stack = if was_made { Stack::Plain } else { Stack::Secure };
    assert!(pair.is_settled(stack), "{what}: {:?}", pair.stacks());
    assert_eq!(pair.locked(), 0, "{what}");
    pair.check(SECOND * 2, &what);
}

#[test]
fn a_demand_that_comes_before_a_flow_is_unsealed_keeps_it_sealed() {
    for (is_clients, by_server) in [(false, false), (false, true), (true, false), (true, true)] {
        for step in 0..20 {
            demand_while_unsealing(is_clients, by_server, Duration::from_millis(3) * step);
        }
    }
}

#[test]
fn an_order_holds_until_it_is_released() {
    let mut pair = pair(6, slow(5), false, (false, false), CHAT);
    pair.connect(CHAT);
    for host in pair.hosts() {
        let id = pair.flow(host).flow;
        assert_eq!(pair.order(host, Stack::Secure), Ok(true));
        pair.world.run_for(SECOND);
        assert_eq!(pair.flow(host).stack.order.map(|order| order.stack), Some(Stack::Secure));
        let now = pair.world.now;
        assert_eq!(pair.world.host(host).sal.release_flow_stack(now, id), Ok(true));
        pair.world.touch(host);
        pair.world.run_for(SECOND);
        assert!(pair.is_settled(Stack::Plain));
        assert_eq!(pair.flow(host).stack.order, None);
        let now = pair.world.now;
        let again = pair.world.host(host).sal.release_flow_stack(now, id);
        assert_eq!(again, Err(ChangeRefused::NoOrder));
    }
}

#[test]
fn what_is_forged_or_seen_again_changes_nothing() {
    let mut pair = pair(7, slow(5), false, (false, false), CHAT);
    pair.connect(CHAT);
    pair.record();
    for to in [Stack::Secure, Stack::Plain, Stack::Secure] {
        assert_eq!(pair.order(pair.client, to), Ok(true));
        pair.world.run_for(SECOND);
        assert!(pair.is_settled(to));
    }
    let recorded = std::mem::take(pair.world.recording.as_mut().expect("recording"));
    let changes: Vec<_> = recorded.iter().filter(|(_, _, bytes)| kind_of(bytes) == Ok(Kind::Change)).cloned().collect();
    assert!(changes.len() >= 12, "{}", changes.len());
    for (from, to, bytes) in &changes {
        assert!(Message::parse(bytes).expect("ours").auth().is_some(), "tagged");
        pair.world.inject(*from, *to, bytes.clone());
        for byte in 0..bytes.len() {
            let mut forged = bytes.clone();
            forged[byte] ^= 1;
            pair.world.inject(*from, *to, forged);
        }
    }
    pair.world.run_for(SECOND * 3);
    assert!(pair.is_settled(Stack::Secure));
    assert_eq!(pair.locked(), 0);
    // Plain DATA for a sealed flow, as it was and with FENCE.
    let before: Vec<u64> = pair.hosts().map(|host| pair.world.host(host).cache.other_stack).to_vec();
    let mut forged = 0;
    for (from, to, bytes) in recorded.iter().filter(|(_, _, bytes)| kind_of(bytes) == Ok(Kind::Data)) {
        for flags in [0, FENCE] {
            let mut plain = bytes.clone();
            (plain[2], plain[3]) = (STACK_ENCAP, flags);
            pair.world.inject(*from, *to, plain);
            forged += 1;
        }
    }
    pair.world.run_for(SECOND * 2);
    let after: Vec<u64> = pair.hosts().map(|host| pair.world.host(host).cache.other_stack).to_vec();
    let counted: u64 = after.iter().zip(&before).map(|(after, before)| after - before).sum();
    assert_eq!(counted, forged, "each is counted, and dropped");
    assert!(pair.is_settled(Stack::Secure));
    pair.check(Duration::from_millis(300), "forged");
}

/// Sealed DATA that nobody has sealed, from one end of the flow to the other, `count` times.
fn forge_sealed(pair: &mut Pair, from: HostId, count: u8) {
    let source = pair.world.host(from).address;
    let recorded = pair.world.recording.as_ref().expect("recording");
    let is_its = |bytes: &[u8]| DataRepr::parse(bytes).is_ok_and(|data| data.stack == STACK_ENCAP);
    let found = recorded.iter().find(|(source_of, _, bytes)| source_of.ip() == source && is_its(bytes));
    let (from, to, mut forged) = found.expect("the flow has carried something").clone();
    (forged[2], forged[3]) = (Cipher::Aes256Gcm.stack(), 0);
    for number in 0..count {
        forged[8] = number;
        pair.world.inject(from, to, forged.clone());
    }
}

#[test]
fn nothing_forged_makes_a_change_that_the_initiator_has_not_made() {
    for count in [1, 70] {
        let what = format!("{count} forged");
        let mut pair = pair(10, slow(30), false, (false, false), Plan::LISTEN);
        pair.record();
        pair.open();
        pair.chat(SECOND);
        assert_eq!(pair.order(pair.client, Stack::Secure), Ok(true), "{what}");
        pair.world.run_for(Duration::from_millis(20));
        // The request is on its way; the initiator hears nothing of the answer.
        pair.world.network.weather = Weather { loss_per_mille: 1000, ..slow(30) };
        pair.world.run_for(Duration::from_millis(15));
        let server = pair.server;
        assert_eq!(pair.flow(server).stack.changing_to, Some(Stack::Secure), "{what}: it is ready");
        let client = pair.client;
        forge_sealed(&mut pair, client, count);
        pair.world.run_for(SECOND);
        assert_eq!(pair.stacks(), [Stack::Plain; 2], "{what}");
        pair.world.run_for(SECOND * 5);
        assert!(pair.is_settled(Stack::Plain), "{what}");
        for host in pair.hosts() {
            let last = pair.flow(host).stack.changes.last().copied().expect("a change");
            assert_eq!(last.outcome.label(), "no-answer", "{what}");
        }
    }
}

#[test]
fn nothing_forged_has_packets_of_a_peer_that_has_not_turned_yet_dropped() {
    for count in [1, 70] {
        let mut pair = pair(11, slow(100), false, (false, false), Plan::LISTEN);
        pair.record();
        pair.open();
        pair.chat(SECOND);
        assert_eq!(pair.order(pair.client, Stack::Secure), Ok(true));
        // The answer has come, and the confirmation is on its way.
        pair.chat(Duration::from_millis(210));
        assert_eq!(pair.stacks(), [Stack::Secure, Stack::Plain]);
        let server = pair.server;
        forge_sealed(&mut pair, server, count);
        pair.chat(SECOND);
        assert!(pair.is_settled(Stack::Secure));
        pair.nothing_is_missing(&format!("{count} forged"));
    }
}

#[test]
fn a_flow_within_one_host_stays_as_it_is() {
    let mut pair = pair(8, slow(5), false, (false, false), CHAT);
    let stream = pair.world.connect_stream(pair.server, "talk.shop", CHAT);
    pair.world.run_for(SECOND);
    assert!(pair.world.host(pair.server).flow_of(stream).is_some());
    assert_eq!(pair.order(pair.server, Stack::Secure), Err(ChangeRefused::SameHost));
}

/// The hosts' addresses outside, where a rule demands that flows are sealed.
const OUTSIDE: [u8; 4] = [10, 7, 1, 1];

/// A rule with a floor for whatever has this host's, or its peer's, address outside.
fn floor(fact: Fact) -> StackRule {
    let network = Network { address: [10, 7, 0, 0].into(), bits: 16 };
    StackRule {
        number: 1,
        names: vec![margay_core::name::Prefix::new(margay_core::name::ServiceId::default(), 0)],
        text: String::new(),
        when: Expression::Within(Box::new(Expression::Fact(fact)), network),
        uses: Stack::Secure,
        hold: SECOND * 3,
        release: SECOND,
        priority: 0,
        is_floor: true,
    }
}

impl Pair {
    /// The client's rule is about its own address, the server's about its peer's.
    fn rule(&mut self, by_server: bool) {
        let now = self.world.now;
        let (host, fact) = if by_server { (self.server, Fact::Remote) } else { (self.client, Fact::Local) };
        self.world.host(host).sal.set_stack_rules(now, vec![floor(fact)]);
        self.world.touch(host);
    }

    /// Packets that are not sealed, by which stack whatever, that were sent to or from outside.
    fn plain_outside(&self) -> usize {
        let is_outside = |from: &SocketAddr, to: &SocketAddr| {
            [from, to].iter().any(|end| end.ip() == std::net::IpAddr::from(OUTSIDE))
        };
        let is_plain = |bytes: &[u8]| DataRepr::parse(bytes).is_ok_and(|data| !is_sealed(data.stack));
        let recorded = self.world.recording.iter().flatten();
        let encapsulated = recorded.filter(|(from, to, bytes)| is_outside(from, to) && is_plain(bytes)).count();
        let direct = self.world.direct_recording.iter().flatten();
        encapsulated + direct.filter(|(from, to, _)| is_outside(from, to)).count()
    }

    /// The client goes outside, at once or while it is at home still, and comes back; both ends talk all the time.
    fn go_out_and_back(&mut self, is_broken: bool, what: &str) {
        let home = self.world.host(self.client).address;
        // From here on it is known that the client's routing chooses this one.
        self.world.set_addresses(self.client, vec![home]);
        self.record();
        let outside = if is_broken { vec![OUTSIDE.into()] } else { vec![OUTSIDE.into(), home] };
        self.world.set_addresses(self.client, outside);
        self.chat(SECOND * 3);
        assert!(self.is_settled(Stack::Secure), "{what}: {:?}", self.stacks());
        assert!(self.plain_outside() == 0 && self.sealed() > 100, "{what}: {}", self.plain_outside());
        assert!(self.hosts().iter().all(|host| self.flow(*host).trouble.is_none()), "{what}");
        self.world.set_addresses(self.client, vec![home]);
        self.chat(SECOND * 5);
        assert!(self.is_settled(Stack::Plain), "{what}: {:?}", self.stacks());
        assert_eq!(self.plain_outside(), 0, "{what}");
    }
}

#[test]
fn nothing_plain_leaves_by_addresses_where_a_rule_demands_a_sealed_flow() {
    for is_direct in [false, true] {
        for by_server in [false, true] {
            for is_broken in [false, true] {
                let what = format!("direct {is_direct}, by server {by_server}, broken {is_broken}");
                let mut pair = pair(1, slow(7), is_direct, (false, false), CHAT);
                pair.rule(by_server);
                pair.open();
                let stream = pair.connect(CHAT);
                pair.chat(SECOND);
                assert!(pair.is_settled(Stack::Plain), "{what}");
                for _ in 0..2 {
                    pair.go_out_and_back(is_broken, &what);
                }
                let moves = pair.world.host(pair.client).flow_of(stream).map_or(0, |flow| flow.moves);
                assert!(moves >= 4, "{what}: {moves}");
                pair.check(SECOND * 3, &what);
            }
        }
    }
}

#[test]
fn whatever_the_network_loses_nothing_plain_leaves_where_a_rule_demands_so() {
    for seed in 0..30 {
        let what = format!("seed {seed}");
        let weather = Weather { loss_per_mille: 100, ..slow(5) };
        let mut pair = pair(900 + seed, weather, seed % 2 == 0, (false, false), CHAT);
        pair.rule(seed % 4 < 2);
        pair.open();
        pair.chat(SECOND);
        pair.record();
        pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
        pair.chat(SECOND * 20);
        assert_eq!(pair.plain_outside(), 0, "{what}");
        assert!(pair.is_settled(Stack::Secure), "{what}: {:?}", pair.stacks());
    }
}

#[test]
fn a_flow_that_begins_where_a_rule_demands_it_is_sealed_from_its_first_packet() {
    for by_server in [false, true] {
        let mut pair = pair(3, slow(5), true, (false, false), CHAT);
        pair.rule(by_server);
        pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
        pair.record();
        pair.open();
        pair.connect(CHAT);
        pair.chat(SECOND);
        assert!(pair.is_settled(Stack::Secure) && pair.plain_outside() == 0 && pair.sealed() > 100, "{by_server}");
    }
}

#[test]
fn what_cannot_be_sealed_where_a_rule_demands_it_is_held_and_goes_on_at_home() {
    let mut pair = pair(4, slow(5), true, (false, false), CHAT);
    let server = pair.server;
    pair.world.host(server).set_secure(&[], false);
    pair.rule(false);
    pair.open();
    let home = pair.world.host(pair.client).address;
    pair.chat(SECOND);
    pair.record();
    pair.world.set_addresses(pair.client, vec![OUTSIDE.into()]);
    pair.chat(SECOND * 4);
    assert!(pair.flow(pair.client).trouble.is_none());
    pair.chat(SECOND * 3);
    assert_eq!(pair.plain_outside(), 0);
    assert_eq!(pair.flow(pair.client).trouble, Some(margay_core::Trouble::Unsealed));
    let rules = pair.flow(pair.client).flow;
    let rules = pair.world.host(pair.client).sal.rules_of_flow(rules).expect("a rule");
    assert!(rules.is_guarded && rules.blocked.is_some_and(|(why, _)| why == ChangeRefused::NoCipher));
    pair.world.set_addresses(pair.client, vec![home]);
    pair.hear();
    pair.heard[1].clear();
    pair.chat(SECOND * 3);
    assert!(pair.flow(pair.client).trouble.is_none() && pair.heard[1].len() > 100);
}
