//! A small world: a router, a client, a program that relays, a server; and boxes on either side of the program.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use margay_core::chain::{BoxWanted, ChainPolicy, ChainRule};
use margay_core::name::Prefix;
use margay_core::reconfiguration::{ReconfigurationOutcome, SpliceOutcome, SpliceRefused};
use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{BoxKind, Event, Instant, Middlebox};
use margay_sim::check::nothing_left_over;
use margay_sim::middlebox::Habit;
use margay_sim::stream::{Plan, State, Stream};
use margay_sim::world::service;
use margay_sim::{HostId, Relay, Weather, World};

pub const SECOND: Duration = Duration::from_secs(1);
pub const TALK: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 600, closes: true };
pub const BYTES: u64 = 600 * 700;
pub const FRONT: &str = "front.shop";
pub const CHAT: &str = "chat.shop";

/// A client, boxes, a program that relays, boxes, a server.
pub struct Relayed {
    pub world: World,
    pub router: HostId,
    pub client: HostId,
    pub proxy: HostId,
    pub server: HostId,
    /// Those between the client and the program, and those between the program and the server: `box-0.shop` and so on.
    pub boxes: [Vec<HostId>; 2],
    pub stream: usize,
    proxies: Vec<String>,
    is_ordered: bool,
}

/// No boxes.
#[allow(dead_code, reason = "not every story has none")]
pub fn relayed(seed: u64, plan: Plan, lag: Duration) -> Relayed {
    relayed_through(seed, plan, lag, [0, 0])
}

/// So many boxes before the program and behind it.
pub fn relayed_through(seed: u64, plan: Plan, lag: Duration, counts: [usize; 2]) -> Relayed {
    let mut world = World::new(seed, Weather::FAIR);
    let router = world.add_host(true);
    let [client, proxy, server] = [(); 3].map(|()| world.add_host(false));
    for host in [client, proxy, server] {
        world.register(router, host);
        world.host(host).speaks_plainly = true;
    }
    world.publish_streams(router, proxy, FRONT, Plan::LISTEN);
    world.publish_streams(router, server, CHAT, plan);
    let to = SocketAddr::new(world.host(proxy).ranges().virtual_v6(&service(CHAT)).into(), 80);
    world.host(proxy).relays.push(Relay::new(81, to, lag));
    let mut at = 0;
    let boxes = counts.map(|count| {
        let boxes = (0..count).map(|_| {
            let host = world.add_host(false);
            world.register(router, host);
            world.publish_box(router, host, &format!("box-{at}.shop"), Habit::Passes);
            at += 1;
            host
        });
        boxes.collect::<Vec<_>>()
    });
    let stream = usize::MAX;
    let proxies = Vec::new();
    let mut relayed = Relayed { world, router, client, proxy, server, boxes, stream, proxies, is_ordered: false };
    relayed.go_by_chains();
    relayed
}

/// The program dies, so many microseconds after its wish to leave, with so many boxes before and behind it. Gives how
/// many sessions went on.
#[allow(dead_code, reason = "not every story kills it")]
pub fn kept_by_deaths(counts: [usize; 2], after_us: impl Iterator<Item = u64> + Clone) -> usize {
    let mut kept = 0;
    for lag in [1, 40] {
        for micros in after_us.clone() {
            let what = format!("lag {lag} ms, at {micros} us");
            let mut relayed = relayed_through(13, TALK, Duration::from_millis(lag), counts);
            relayed.begin(TALK);
            relayed.world.run_for(SECOND);
            relayed.leave().expect("it may");
            relayed.world.run_for(Duration::from_micros(micros));
            let now = relayed.world.now;
            let proxy = relayed.proxy;
            relayed.world.host(proxy).kill_relay(now, 0);
            relayed.world.touch(proxy);
            kept += usize::from(!relayed.ends_somehow(&what));
            relayed.nothing_stays(&what);
        }
    }
    kept
}

#[allow(dead_code, reason = "not every story needs all of it")]
impl Relayed {
    pub fn begin(&mut self, plan: Plan) {
        self.begin_to(FRONT, plan);
    }

    pub fn begin_to(&mut self, name: &str, plan: Plan) {
        self.stream = self.world.connect_stream(self.client, name, plan);
    }

    /// Order is kept while the program leaves.
    pub fn keep_order(&mut self) {
        self.is_ordered = true;
        self.go_by_chains();
    }

    /// The program is a proxy of this name, in the middle of the chain that leads to the server.
    pub fn make_proxy(&mut self, name: &str) {
        let listener = Demux {
            listener: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 81),
            other_family: None,
            is_looked_up: false,
            service_port: None,
            protocol: Some(6),
            allow: Allow::Any,
        };
        let action = Action::Box(Middlebox { kind: BoxKind::Proxy(Box::new(listener)), allow: Allow::Any });
        let machine = self.world.host(self.proxy);
        let rule = Rule { priority: 100, weight: 1, action };
        machine.sal.add_rule(Instant::ZERO, service(name).into(), rule).expect("there is room");
        let address = machine.address;
        let key = machine.public_key();
        self.world.host(self.router).forward(service(name).into(), address, Some(key));
        let sides = self.names_of_boxes();
        let boxes: Vec<&str> = sides[0].iter().map(String::as_str).chain([name]).collect();
        let boxes: Vec<&str> = boxes.into_iter().chain(sides[1].iter().map(String::as_str)).collect();
        self.proxies = vec![name.to_owned()];
        self.go_by(&[(CHAT, &boxes)]);
    }

    /// Those on either side of the program.
    fn names_of_boxes(&self) -> [Vec<String>; 2] {
        let counts = [0, 1].map(|side| self.boxes[side].len());
        [0..counts[0], counts[0]..counts[0] + counts[1]]
            .map(|places| places.map(|at| format!("box-{at}.shop")).collect())
    }

    pub fn all(&self) -> Vec<HostId> {
        let hosts = [self.router, self.client, self.proxy, self.server];
        hosts.into_iter().chain(self.boxes.iter().flatten().copied()).collect()
    }

    /// Sessions to the program go through the boxes before it, and its own through those behind it.
    fn go_by_chains(&mut self) {
        let sides = self.names_of_boxes();
        let [before, behind] = sides.each_ref().map(|names| names.iter().map(String::as_str).collect::<Vec<_>>());
        self.go_by(&[(FRONT, &before), (CHAT, &behind)]);
    }

    /// Sessions to these names go through these boxes.
    pub fn go_by(&mut self, rules: &[(&str, &[&str])]) {
        self.all().into_iter().for_each(|host| self.go_by_at(host, rules));
    }

    /// One host is of that opinion.
    pub fn go_by_at(&mut self, host: HostId, rules: &[(&str, &[&str])]) {
        let one = |name: &&str| BoxWanted {
            service: service(name),
            name: (*name).to_owned(),
            may_be_left_out: false,
            is_proxy: self.proxies.iter().any(|one| one == name),
        };
        let rule = |(name, boxes): &(&str, &[&str])| ChainRule {
            name: (*name).to_owned(),
            services: Prefix::from(service(name)),
            protocol: Some(6),
            ports: None,
            clients: Vec::new(),
            filter: None,
            boxes: boxes.iter().map(one).collect(),
            is_ordered: self.is_ordered,
            may_add: Vec::new(),
        };
        let policy = ChainPolicy { rules: rules.iter().map(rule).collect(), ..ChainPolicy::default() };
        self.world.host(host).sal.set_chain_policy(policy).expect("it can be gone by");
    }

    /// Nobody serves a box any more.
    pub fn withdraw(&mut self, name: &str) {
        for host in self.all() {
            let sal = &mut self.world.host(host).sal;
            let rules = sal.rules().filter(|(prefix, ..)| prefix.id == service(name));
            let rules: Vec<_> = rules.map(|(_, id, _)| id).collect();
            rules.into_iter().for_each(|id| assert!(sal.remove_rule(id)));
        }
    }

    /// A program resets its connection.
    pub fn abort(&mut self, at_server: bool) {
        let host = if at_server { self.server } else { self.client };
        let now = self.world.now;
        let stream = if at_server { self.world.host(host).streams.len() - 1 } else { self.stream };
        self.world.host(host).abort_stream(now, stream);
        self.world.touch(host);
    }

    pub fn set_direct(&mut self, is_on: bool) {
        self.all().into_iter().for_each(|host| self.world.set_direct(host, is_on));
    }

    /// The program wishes to leave.
    pub fn leave(&mut self) -> Result<(), SpliceRefused> {
        let now = self.world.now;
        let said = self.world.host(self.proxy).splice(now, 0);
        self.world.touch(self.proxy);
        said
    }

    /// Bytes that each box has let pass.
    pub fn passed(&mut self) -> Vec<u64> {
        let boxes: Vec<HostId> = self.boxes.iter().flatten().copied().collect();
        boxes.into_iter().map(|host| self.world.host(host).middlebox.as_ref().expect("it has one").bytes).collect()
    }

    pub fn outcomes(&mut self) -> Vec<SpliceOutcome> {
        self.world.host(self.proxy).relays[0].outcomes.clone()
    }

    pub fn ends(&mut self) -> [Stream; 2] {
        let client = self.world.host(self.client).streams[self.stream].clone();
        [client, self.world.host(self.server).streams.last().expect("it was accepted").clone()]
    }

    pub fn flows_at(&mut self, host: HostId) -> usize {
        self.world.host(host).sal.flow_count()
    }

    pub fn nothing_stays(&mut self, what: &str) {
        for host in self.all() {
            assert_eq!(self.flows_at(host), 0, "{host:?} forgets it: {what}");
            let now = self.world.now;
            assert_eq!(self.world.host(host).sal.locked_sessions(now), 0, "{what}");
        }
        nothing_left_over(&self.world).unwrap_or_else(|left| panic!("{what}: {left}"));
    }

    pub fn ends_well(&mut self, what: &str) {
        self.world.run_for(360 * SECOND);
        for end in self.ends() {
            let said = (end.was_reset, end.was_wrong, end.received, end.state, end.retransmissions);
            assert!(!end.was_reset && !end.was_wrong && end.received == BYTES, "{what}: {said:?}");
            assert!(matches!(end.state, State::TimeWait | State::Gone), "{what}: {said:?}");
        }
        self.nothing_stays(what);
    }

    /// Whatever has become of it: no byte is wrong, and who was told that all is well has all.
    pub fn ends_somehow(&mut self, what: &str) -> bool {
        self.world.run_for(240 * SECOND);
        let ends = self.ends();
        for end in &ends {
            let said = (end.was_reset, end.was_wrong, end.received, end.state);
            assert!(!end.was_wrong, "{what}: {said:?}");
            assert!(end.was_reset || end.received == BYTES, "{what}: {said:?}");
        }
        ends.iter().any(|end| end.was_reset)
    }

    /// What the client's host remembers.
    pub fn reconfigurations(&mut self) -> Vec<(&'static str, ReconfigurationOutcome)> {
        let events = self.world.host(self.client).events.iter();
        let outcome = |event: &Event| match event {
            Event::Reconfigured { change, .. } => Some((change.edit.label(), change.outcome.clone())),
            _ => None,
        };
        events.filter_map(outcome).collect()
    }
}
