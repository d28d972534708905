//! A client's host and a server's, whose one flow is carried in one way and another, for tests of stacks.

#![allow(dead_code, reason = "not every test uses all of it")]

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::stack_rule::{Expression, Fact, Network, StackRule};
use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{ChangeRefused, Cipher, FlowInfo, Instant, Ranges, Stack};
use margay_sim::check::ends_agree;
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Weather, World};
use margay_wire::{DATA_HEADER_LEN, DataRepr, is_sealed};

pub const SECOND: Duration = Duration::from_secs(1);
pub const EVERY: Duration = Duration::from_millis(5);
pub const BOTH: &[Cipher] = &[Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
pub const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(20), writes: u32::MAX, closes: false };
pub const BULK: Plan = Plan { write: 12_000, every: Duration::from_millis(10), writes: u32::MAX, closes: false };
/// Who writes: the client and the server.
pub const TALKS: [(Plan, Plan); 4] = [(CHAT, CHAT), (CHAT, Plan::LISTEN), (Plan::LISTEN, BULK), (BULK, Plan::LISTEN)];
pub const PORT: u16 = 53;
/// What connections are carried by: `fec` is for datagrams.
pub const OF_CONNECTIONS: [Stack; 2] = [Stack::Plain, Stack::Secure];

pub struct Pair {
    pub world: World,
    pub server: HostId,
    pub client: HostId,
    /// Numbered datagrams that each end has said, the client first.
    pub said: [u32; 2],
    pub heard: [Vec<u32>; 2],
}

pub fn slow(millis: u64) -> Weather {
    let delay = Duration::from_millis(millis);
    Weather { delay_min: delay, delay_max: delay, ..Weather::FAIR }
}

/// `demands`: whether the client and the server do.
pub fn pair(seed: u64, weather: Weather, is_direct: bool, demands: (bool, bool), server_plan: Plan) -> Pair {
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
    pub fn hosts(&self) -> [HostId; 2] {
        [self.client, self.server]
    }

    pub fn flow(&mut self, host: HostId) -> FlowInfo {
        self.world.host(host).sal.flows().find(|flow| flow.peer_flow.0 != 0).expect("a flow")
    }

    pub fn stacks(&mut self) -> [Stack; 2] {
        self.hosts().map(|host| self.flow(host).stack.stack)
    }

    pub fn is_settled(&mut self, stack: Stack) -> bool {
        self.stacks() == [stack; 2] && self.hosts().iter().all(|host| self.flow(*host).stack.changing_to.is_none())
    }

    pub fn order(&mut self, host: HostId, to: Stack) -> Result<bool, ChangeRefused> {
        let now = self.world.now;
        let id = self.flow(host).flow;
        let begun = self.world.host(host).sal.set_flow_stack(now, id, to);
        self.world.touch(host);
        begun
    }

    pub fn ask(&mut self) {
        self.said[0] += 1;
        let own = SocketAddr::new(Ranges::USUAL.host_v6().into(), 4000);
        let to = SocketAddr::new(Ranges::USUAL.virtual_v6(&service("ask.shop")).into(), PORT);
        self.world.say(self.client, &Datagram::new(own, to, &self.said[0].to_be_bytes()));
    }

    /// The first datagram sets the flow up.
    pub fn open(&mut self) {
        self.ask();
        self.world.run_for(SECOND);
    }

    /// Both ends say numbered datagrams to each other for so long.
    pub fn chat(&mut self, time: Duration) {
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
    pub fn answer_tuple(&mut self) -> Option<margay_core::Tuple> {
        self.world.host(self.server).sal.flows().find(|flow| flow.peer_flow.0 != 0).map(|flow| flow.app)
    }

    /// Both ends look at their rules.
    pub fn judge(&mut self) {
        let now = self.world.now;
        for host in self.hosts() {
            self.world.host(host).sal.judge_stacks(now);
            self.world.touch(host);
        }
    }

    pub fn hear(&mut self) {
        for (heard, host) in self.heard.iter_mut().zip([self.client, self.server]) {
            for datagram in std::mem::take(&mut self.world.hosts[host.0].datagrams) {
                heard.push(u32::from_be_bytes(datagram.data.try_into().expect("a number")));
            }
        }
    }

    /// Everything that was said has been heard, once and in order.
    pub fn nothing_is_missing(&mut self, what: &str) {
        self.world.run_for(SECOND);
        self.hear();
        for (said, heard) in [(self.said[0], &self.heard[1]), (self.said[1], &self.heard[0])] {
            assert!(heard.iter().copied().eq(1..=said), "{what}: of {said} came {heard:?}");
        }
    }

    pub fn connect(&mut self, plan: Plan) -> usize {
        let stream = self.world.connect_stream(self.client, "talk.shop", plan);
        self.world.run_for(SECOND);
        stream
    }

    /// No byte wrong, no reset, no wait longer than `wait`; both ends know the same flow.
    pub fn check(&self, wait: Duration, what: &str) {
        for stream in self.world.hosts.iter().flat_map(|host| &host.streams) {
            assert!(!stream.was_wrong && !stream.was_reset, "{what}: wrong or reset");
            let longest = stream.longest_wait(self.world.now);
            assert!(longest <= wait, "{what}: a stream waited {longest:?}");
        }
        ends_agree(&self.world).expect("both ends agree");
    }

    pub fn out_of_order(&self) -> u64 {
        self.world.hosts.iter().flat_map(|host| &host.streams).map(|stream| stream.out_of_order).sum()
    }

    pub fn forget_waits(&mut self) {
        let now = self.world.now;
        for host in &mut self.world.hosts {
            host.streams.iter_mut().for_each(|stream| stream.forget_waits(now));
        }
    }

    pub fn locked(&mut self) -> usize {
        let now = self.world.now;
        self.hosts().map(|host| self.world.host(host).sal.locked_sessions(now)).iter().sum()
    }

    /// DATA of programs that was sent since recording began and is not sealed, by which stack whatever, and all that
    /// went direct. The last packet of a stack says nothing.
    pub fn plain(&mut self) -> usize {
        let recorded = self.world.recording.iter().flatten();
        let is_plain = |bytes: &[u8]| {
            let is_empty = bytes.len() <= DATA_HEADER_LEN + 8;
            DataRepr::parse(bytes).is_ok_and(|data| !is_sealed(data.stack) && !is_empty)
        };
        let encapsulated = recorded.filter(|(_, _, bytes)| is_plain(bytes)).count();
        encapsulated + self.world.direct_recording.as_ref().map_or(0, Vec::len)
    }

    pub fn record(&mut self) {
        (self.world.recording, self.world.direct_recording) = (Some(Vec::new()), Some(Vec::new()));
    }

    pub fn sealed(&self) -> usize {
        let recorded = self.world.recording.iter().flatten();
        recorded.filter(|(_, _, bytes)| DataRepr::parse(bytes).is_ok_and(|data| is_sealed(data.stack))).count()
    }
}

/// The hosts' addresses outside, where a rule demands that flows are sealed.
pub const OUTSIDE: [u8; 4] = [10, 7, 1, 1];

/// A rule with a floor for whatever has this host's, or its peer's, address outside.
pub fn floor(fact: Fact) -> StackRule {
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
    pub fn rule(&mut self, by_server: bool) {
        let now = self.world.now;
        let (host, fact) = if by_server { (self.server, Fact::Remote) } else { (self.client, Fact::Local) };
        self.world.host(host).sal.set_stack_rules(now, vec![floor(fact)]);
        self.world.touch(host);
    }

    /// Packets that are not sealed, by which stack whatever, that were sent to or from outside.
    pub fn plain_outside(&self) -> usize {
        let is_outside = |from: &SocketAddr, to: &SocketAddr| {
            [from, to].iter().any(|end| end.ip() == std::net::IpAddr::from(OUTSIDE))
        };
        let is_plain = |bytes: &[u8]| DataRepr::parse(bytes).is_ok_and(|data| !is_sealed(data.stack));
        let recorded = self.world.recording.iter().flatten();
        let encapsulated = recorded.filter(|(from, to, bytes)| is_outside(from, to) && is_plain(bytes)).count();
        let direct = self.world.direct_recording.iter().flatten();
        encapsulated + direct.filter(|(from, to, _)| is_outside(from, to)).count()
    }
}
