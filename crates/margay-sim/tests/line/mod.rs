//! A small world: a router, a client, boxes in a line, a server.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::certificate::TrustAnchor;
use margay_core::chain::{AddRefused, BoxWanted, ChainPolicy, ChainRule, Requirement};
use margay_core::key::SigningKey;
use margay_core::name::{Prefix, ServiceId};
use margay_core::rng::Rng;
use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{Cipher, Event, Instant};
use margay_sim::certificate;
use margay_sim::middlebox::Habit;
use margay_sim::stream::{Plan, Stream};
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Outcome, Weather, World};
use margay_wire::{ErrorCode, ErrorRepr, Extension, FlowId, Kind, MessageWriter, PORT};

/// What the boxes are before.
pub const NAME: &str = "web.shop";
#[allow(dead_code, reason = "not every story has one")]
pub const MAIL: &str = "mail.shop";
/// Streams are served under this name.
pub const CHAT: &str = "chat.shop";
/// Datagrams are served under this name.
const TALK: &str = "talk.shop";

/// Boxes `box-0.shop` and so on, each on a host of its own.
#[allow(dead_code, reason = "not every story needs all of it")]
pub struct Line {
    pub world: World,
    pub router: HostId,
    pub client: HostId,
    pub server: HostId,
    pub boxes: Vec<HostId>,
    pub service: ServiceId,
    required: Vec<Requirement>,
    may_be_left_out: bool,
    /// So many of the last boxes are passed by none but sessions to which hosts of the others have added them.
    added: usize,
}

pub fn line(seed: u64, weather: Weather, count: usize) -> Line {
    let mut world = World::new(seed, weather);
    let router = world.add_host(true);
    let [client, server] = [(); 2].map(|()| world.add_host(false));
    let boxes: Vec<HostId> = (0..count).map(|_| world.add_host(false)).collect();
    for host in [client, server].into_iter().chain(boxes.iter().copied()) {
        world.register(router, host);
    }
    world.publish(router, server, NAME, 9);
    for (at, host) in boxes.iter().enumerate() {
        world.publish_box(router, *host, &format!("box-{at}.shop"), Habit::Passes);
    }
    let service = service(CHAT);
    let required = Vec::new();
    let mut line = Line { world, router, client, server, boxes, service, required, may_be_left_out: false, added: 0 };
    line.go_by(false);
    line
}

/// A line whose sessions go through no boxes, although its policy knows them.
#[allow(dead_code, reason = "not every story changes boxes")]
pub fn open_line(seed: u64, weather: Weather, count: usize) -> Line {
    let mut line = line(seed, weather, count);
    let one = |at: usize| {
        let name = format!("box-{at}.shop");
        BoxWanted { service: service(&name), name, may_be_left_out: false, is_proxy: false }
    };
    let rule = ChainRule {
        name: "mail".to_owned(),
        services: Prefix::from(service(MAIL)),
        protocol: None,
        ports: None,
        clients: Vec::new(),
        filter: None,
        boxes: (0..count).map(one).collect(),
        is_ordered: false,
        may_add: Vec::new(),
    };
    let policy = ChainPolicy { rules: vec![rule], ..ChainPolicy::default() };
    for host in line.all() {
        line.world.host(host).sal.set_chain_policy(policy.clone()).expect("it can be gone by");
    }
    line
}

/// The name of a box.
#[allow(dead_code, reason = "not every story changes boxes")]
pub fn name(at: usize) -> ServiceId {
    service(&format!("box-{at}.shop"))
}

#[allow(dead_code, reason = "not every story needs all of it")]
impl Line {
    /// Whether packets go direct, whether boxes may be left out, and the weather, by a seed. Fewer than `loss_max` per
    /// mille are lost.
    pub fn vary(&mut self, seed: u64, loss_max: u64) {
        self.set_direct(seed.is_multiple_of(2));
        self.go_by(seed.is_multiple_of(3));
        self.world.network.weather = Weather {
            delay_max: Duration::from_millis(1 + seed % 30),
            loss_per_mille: (seed % loss_max) as u32,
            duplicate_per_mille: (seed % 100) as u32,
            ..Weather::FAIR
        };
    }

    pub fn all(&self) -> Vec<HostId> {
        [self.router, self.client, self.server].into_iter().chain(self.boxes.iter().copied()).collect()
    }

    /// Sessions to the names of this world go through all boxes; `may_be_left_out`: or through those that there are.
    pub fn go_by(&mut self, may_be_left_out: bool) {
        self.may_be_left_out = may_be_left_out;
        let policy = self.policy();
        for host in self.all() {
            self.world.host(host).sal.set_chain_policy(policy.clone()).expect("it can be gone by");
        }
    }

    /// The last `count` boxes are only passed by sessions to which hosts of the others have added them.
    pub fn let_add(&mut self, count: usize) {
        self.added = count;
        self.go_by(self.may_be_left_out);
    }

    /// What all hosts go by, unless a story has it otherwise.
    pub fn policy(&self) -> ChainPolicy {
        let may_be_left_out = self.may_be_left_out;
        let of_all = self.boxes.len() - self.added;
        let one = |at: usize| {
            let name = format!("box-{at}.shop");
            BoxWanted { service: service(&name), name, may_be_left_out, is_proxy: false }
        };
        let rule = |name: &str| ChainRule {
            name: name.to_owned(),
            services: Prefix::from(service(name)),
            protocol: None,
            ports: None,
            clients: Vec::new(),
            filter: None,
            boxes: (0..of_all).map(one).collect(),
            may_add: (of_all..self.boxes.len()).map(one).collect(),
            is_ordered: false,
        };
        ChainPolicy {
            rules: [NAME, CHAT, TALK].map(rule).to_vec(),
            required: self.required.clone(),
            ..ChainPolicy::default()
        }
    }

    /// The program of a box asks that each session goes through these boxes next.
    pub fn ask_next(&mut self, at: usize, boxes: &[usize]) {
        let host = self.boxes[at];
        let boxes = boxes.iter().map(|at| name(*at)).collect();
        self.world.host(host).middlebox.as_mut().expect("it has one").next = boxes;
    }

    /// How many sessions each box has seen begin.
    pub fn seen(&mut self) -> Vec<usize> {
        let hosts = self.boxes.clone();
        hosts.into_iter().map(|host| self.world.host(host).middlebox.as_ref().expect("one").seen.len()).collect()
    }

    /// What the program of a box was told when it asked.
    pub fn told(&mut self, at: usize) -> Vec<Result<(), AddRefused>> {
        let host = self.boxes[at];
        core::mem::take(&mut self.world.host(host).middlebox.as_mut().expect("it has one").told)
    }

    /// The service takes sessions through these boxes alone; none: it takes all.
    pub fn demand(&mut self, name: &str, boxes: &[&str]) {
        let services = Prefix::from(service(name));
        self.required.retain(|required| required.services != services);
        if !boxes.is_empty() {
            let boxes = boxes.iter().map(|name| service(name)).collect();
            self.required.push(Requirement { services, boxes });
        }
        self.go_by(self.may_be_left_out);
    }

    /// Order is kept while boxes of sessions are changed, which go through none at first.
    pub fn keep_order(&mut self) {
        let one = self.world.host(self.client).sal.chain_policy().rules[0].clone();
        let rule = |name: &str| ChainRule {
            name: name.to_owned(),
            services: Prefix::from(service(name)),
            boxes: Vec::new(),
            is_ordered: true,
            ..one.clone()
        };
        let rules = [rule(CHAT), rule(TALK), one.clone()].to_vec();
        let policy = ChainPolicy { rules, ..ChainPolicy::default() };
        for host in self.all() {
            self.world.host(host).sal.set_chain_policy(policy.clone()).expect("it can be gone by");
        }
    }

    /// A box lets packets out so much later.
    pub fn slow_down(&mut self, at: usize, lag: Duration) {
        let host = self.boxes[at];
        self.world.host(host).middlebox.as_mut().expect("it has one").lag = lag;
    }

    pub fn set_direct(&mut self, is_on: bool) {
        for host in self.all() {
            self.world.set_direct(host, is_on);
        }
    }

    pub fn demand_secure(&mut self) {
        for host in self.all() {
            let demands = host == self.client;
            self.world.host(host).sal.set_secure(&[Cipher::ChaCha20Poly1305], demands, Vec::new());
        }
    }

    pub fn begin(&mut self) -> usize {
        self.world.connect(self.client, NAME)
    }

    pub fn connect(&mut self) -> Outcome {
        self.connect_from(self.client)
    }

    pub fn connect_from(&mut self, host: HostId) -> Outcome {
        let client = self.world.connect(host, NAME);
        self.world.run_for(Duration::from_secs(3));
        self.world.host(host).clients[client].outcome
    }

    /// Connections that the server's programs have accepted.
    pub fn accepted(&mut self) -> usize {
        self.world.host(self.server).servers.iter().map(|server| server.accepted.len()).sum()
    }

    /// Starts a connection that talks both ways.
    pub fn talk(&mut self, plan: Plan) -> usize {
        self.talk_as(plan, plan)
    }

    /// The same, by what the client's program says and what the server's does.
    pub fn talk_as(&mut self, client: Plan, server: Plan) -> usize {
        self.world.publish_streams(self.router, self.server, CHAT, server);
        self.world.connect_stream(self.client, CHAT, client)
    }

    /// The server's end of it.
    pub fn served(&mut self) -> Stream {
        self.world.host(self.server).streams.last().expect("it was accepted").clone()
    }

    /// What the client's host said last of a connect that failed.
    pub fn last_failure(&mut self) -> String {
        let events = &self.world.host(self.client).events;
        let mut failures = events.iter().filter_map(|event| match event {
            Event::ConnectFailed { why, .. } => Some(why.clone()),
            _ => None,
        });
        failures.next_back().expect("a connect has failed")
    }

    /// Nobody serves the box of this host any more.
    pub fn withdraw_box(&mut self, host: HostId) {
        let at = self.boxes.iter().position(|one| *one == host).expect("one of the boxes");
        let name = service(&format!("box-{at}.shop"));
        for host in [self.router, host] {
            let sal = &mut self.world.host(host).sal;
            let rules: Vec<_> = sal.rules().filter(|(prefix, ..)| prefix.id == name).map(|(_, id, _)| id).collect();
            rules.into_iter().for_each(|id| assert!(sal.remove_rule(id)));
        }
    }

    /// A box is on another host from now on.
    pub fn move_box(&mut self, at: usize, to: HostId) {
        self.withdraw_box(self.boxes[at]);
        self.world.publish_box(self.router, to, &format!("box-{at}.shop"), Habit::Passes);
    }

    /// Nobody serves the service any more.
    pub fn withdraw_service(&mut self) {
        let name = service(NAME);
        for host in [self.router, self.server] {
            let sal = &mut self.world.host(host).sal;
            let rules: Vec<_> = sal.rules().filter(|(prefix, ..)| prefix.id == name).map(|(_, id, _)| id).collect();
            rules.into_iter().for_each(|id| assert!(sal.remove_rule(id)));
        }
    }

    /// The service is on another host from now on.
    pub fn serve_at(&mut self, to: HostId) {
        self.withdraw_service();
        self.world.publish(self.router, to, NAME, 9);
    }

    /// Who may connect to the service.
    pub fn allow(&mut self, allow: Allow) {
        let name = service(NAME);
        let host = self.world.host(self.server);
        let rules: Vec<_> = host.sal.rules().filter(|(prefix, ..)| prefix.id == name).map(|(_, id, _)| id).collect();
        rules.into_iter().for_each(|id| assert!(host.sal.remove_rule(id)));
        let server = host.servers.pop().expect("one program");
        host.serve(name, 80, 9, allow).expect("there is room");
        *host.servers.last_mut().expect("one program") = server;
    }

    /// A host trusts this authority, which has let it do what it does here.
    pub fn trust(&mut self, host: HostId, authority: &SigningKey) {
        let anchor = TrustAnchor { authority: service(NAME).authority(), key: authority.public() };
        let sal = &mut self.world.host(host).sal;
        sal.add_trust_anchor(anchor);
        self.certify(host, NAME, authority);
    }

    /// All hosts trust one authority, which has let each do what it does here.
    pub fn trust_nobody_else(&mut self) -> SigningKey {
        let authority = SigningKey::generate(&mut Rng::new([77; 32]));
        let all = self.all();
        certificate::trust(&mut self.world, &all, NAME, &authority);
        let names = (0..self.boxes.len()).map(|at| (self.boxes[at], format!("box-{at}.shop")));
        let served = [NAME, CHAT, TALK, MAIL].map(|name| (self.server, name.to_owned()));
        for (host, name) in names.chain(served).collect::<Vec<_>>() {
            self.certify(host, &name, &authority);
        }
        authority
    }

    pub fn certify(&mut self, host: HostId, name: &str, authority: &SigningKey) {
        certificate::certify(&mut self.world, host, name, authority);
    }

    /// An agent at `from` that does not know CHAIN answers the client's SYN.
    pub fn answer_as_an_older_agent(&mut self, from: IpAddr, flow: FlowId) {
        self.answer_as_older(from, self.client, flow);
    }

    /// The same to the SYN of another host.
    pub fn answer_as_older(&mut self, from: IpAddr, host: HostId, flow: FlowId) {
        let mut bytes = [0; 64];
        let mut writer = MessageWriter::new(&mut bytes, Kind::Error, flow, FlowId(0), 0);
        let error = ErrorRepr { code: ErrorCode::UnknownCritical, text: "" };
        writer.extension(&Extension::Error(error)).expect("it fits");
        let len = writer.finish().expect("it fits");
        let to = SocketAddr::new(self.world.host(host).address, PORT);
        self.world.inject(SocketAddr::new(from, PORT), to, bytes[..len].to_vec());
    }

    /// A program asks by so many datagrams, each of which is answered. Gives how many answers came.
    pub fn ask_by_datagrams(&mut self, count: u8) -> usize {
        let demux = Demux {
            listener: SocketAddr::new([0_u16; 8].into(), 53),
            other_family: None,
            is_looked_up: false,
            service_port: None,
            protocol: Some(17),
            allow: Allow::Any,
        };
        let name = service(TALK);
        let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
        let server = self.world.host(self.server);
        server.sal.add_rule(Instant::ZERO, name.into(), rule).expect("there is room");
        let address = server.address;
        let key = server.public_key();
        self.world.host(self.router).forward(name.into(), address, Some(key));
        let ranges = self.world.host(self.client).ranges();
        let here = SocketAddr::new(ranges.host_v6().into(), 4000);
        let there = SocketAddr::new(ranges.virtual_v6(&name).into(), 53);
        for number in 0..count {
            let before = self.world.host(self.server).datagrams.len();
            self.world.say(self.client, &Datagram::new(here, there, &[number]));
            self.world.run_for(Duration::from_millis(600));
            let asked = self.world.host(self.server).datagrams[before..].to_vec();
            for question in asked {
                let answer = Datagram { tuple: question.tuple.reversed(), data: question.data };
                self.world.say(self.server, &answer);
            }
            self.world.run_for(Duration::from_millis(100));
        }
        self.world.host(self.client).datagrams.len()
    }
}
