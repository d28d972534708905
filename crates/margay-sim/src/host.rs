//! One simulated machine: a core, a flow cache, programs.

use std::net::{IpAddr, SocketAddr};

use margay_core::key::HostSecret;
use margay_core::name::{HOST_V4, HOST_V6, ServiceId};
use margay_core::rng::Rng;
use margay_core::table::{Action, Allow, Demux, NextHop, Rule, RuleId};
use margay_core::{AppVerdict, Config, Direction, Event, Instant, Limits, Output, Sal, Tuple};
use margay_wire::PORT;

use crate::cache::Cache;
use crate::program::{Client, FIN, RST, SYN, Segment, Server};

/// Which host of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostId(pub usize);

/// How a host starts.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// From which its key is made.
    pub key_seed: [u8; 32],
    /// The agent's epoch.
    pub epoch: u32,
    /// Identity of the boot.
    pub boot: u8,
    /// Whether it forwards for others.
    pub router: bool,
}

/// One machine.
pub struct Host {
    /// Its one address.
    pub address: IpAddr,
    /// The core that ships.
    pub sal: Sal,
    /// The flow cache.
    pub cache: Cache,
    /// Programs that listen.
    pub servers: Vec<Server>,
    /// Programs that connect.
    pub clients: Vec<Client>,
    /// Everything that the core reported.
    pub events: Vec<Event>,
    /// Datagrams to send: destination and bytes.
    pub(crate) outbox: Vec<(SocketAddr, Vec<u8>)>,
    secret_seed: [u8; 32],
    next_port: u16,
}

pub(crate) const UNIX_START_S: u64 = 1_800_000_000;

impl Host {
    pub(crate) fn new(address: IpAddr, start: Start, now: Instant, seed: [u8; 32], limits: Limits) -> Self {
        let config = Config {
            host_key: HostSecret::generate(&mut Rng::new(start.key_seed)),
            epoch: start.epoch,
            boot_id: [start.boot; 16],
            router: start.router,
            datagram_max: 1472,
            local_addresses: vec![address],
            limits,
        };
        Self {
            address,
            sal: Sal::new(config, now, UNIX_START_S + now.micros() / 1_000_000, seed),
            cache: Cache::default(),
            servers: Vec::new(),
            clients: Vec::new(),
            events: Vec::new(),
            outbox: Vec::new(),
            secret_seed: start.key_seed,
            next_port: 30_000,
        }
    }

    /// The host's public key.
    pub fn public_key(&self) -> [u8; 32] {
        HostSecret::generate(&mut Rng::new(self.secret_seed)).public().0
    }

    /// From which its key was made: the same machine can start again with it.
    pub fn key_seed(&self) -> [u8; 32] {
        self.secret_seed
    }

    /// Starts a server, reachable as `service`.
    pub fn serve(&mut self, service: ServiceId, port: u16, number: u32, allow: Allow) -> Option<RuleId> {
        self.servers.push(Server::new(port, number));
        let demux = Demux {
            listener: SocketAddr::new([0, 0, 0, 0].into(), port),
            service_port: None,
            protocol: Some(6),
            allow,
        };
        let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
        self.sal.add_rule(service.into(), rule).ok()
    }

    /// Adds a next hop for `prefix`.
    pub fn forward(&mut self, prefix: margay_core::name::Prefix, to: IpAddr, host: Option<[u8; 32]>) -> Option<RuleId> {
        let host = host.map(|key| margay_core::key::HostPublic(key).id());
        let hop = NextHop { address: SocketAddr::new(to, PORT), host, router: host.is_none() };
        self.sal.add_rule(prefix, Rule { priority: 100, weight: 1, action: Action::Forward(hop) }).ok()
    }

    /// Starts a client of a virtual address.
    pub fn connect(&mut self, now: Instant, to: SocketAddr) -> usize {
        self.next_port += 1;
        let own: IpAddr = if to.is_ipv4() { HOST_V4.into() } else { HOST_V6.into() };
        let tuple = Tuple { protocol: 6, source: SocketAddr::new(own, self.next_port), destination: to };
        self.clients.push(Client::new(tuple, now));
        self.clients.len() - 1
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let clients = self.clients.iter().filter_map(Client::next_deadline).min();
        self.sal.poll_timeout().into_iter().chain(clients).min()
    }

    pub(crate) fn handle_time(&mut self, now: Instant) {
        if self.sal.poll_timeout().is_some_and(|deadline| deadline <= now) {
            self.sal.handle_timeout(now);
        }
        for at in 0..self.clients.len() {
            for segment in self.clients[at].poll(now) {
                self.egress(now, &segment.emit());
            }
        }
        self.drain(now);
    }

    pub(crate) fn handle_datagram(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) {
        if !self.ingress(now, from, datagram) {
            // Already counted by the core.
            let _ = self.sal.handle_datagram(now, from, datagram);
        }
        self.drain(now);
    }

    fn ingress(&mut self, now: Instant, from: SocketAddr, datagram: &[u8]) -> bool {
        let Some((flow, tuple, inner)) = self.cache.decapsulate(from, datagram) else { return false };
        let Some(segment) = Segment::parse(inner) else { return true };
        let flags = segment.flags;
        self.deliver(now, segment.readdressed(tuple));
        if flags & (FIN | RST) != 0 {
            self.sal.handle_transport(now, flow, Direction::Ingress, flags);
        }
        true
    }

    /// A packet of a program here.
    fn egress(&mut self, now: Instant, packet: &[u8]) {
        let Some(segment) = Segment::parse(packet) else { return };
        let opens = segment.flags & (SYN | 16) == SYN;
        if !opens && self.carry(now, &segment, packet) {
            return;
        }
        if let AppVerdict::Forward(_) = self.sal.handle_app_packet(now, packet) {
            self.drain(now);
            self.carry(now, &segment, packet);
        }
    }

    fn carry(&mut self, now: Instant, segment: &Segment, packet: &[u8]) -> bool {
        let Some((flow, to, datagram)) = self.cache.encapsulate(&segment.tuple, packet) else { return false };
        self.outbox.push((to, datagram));
        if segment.flags & (FIN | RST) != 0 {
            self.sal.handle_transport(now, flow, Direction::Egress, segment.flags);
        }
        true
    }

    pub(crate) fn drain(&mut self, now: Instant) {
        let mut buf = vec![0; 65_536];
        while let Some(output) = self.sal.poll(&mut buf) {
            match output {
                Output::Transmit { to, len } => self.outbox.push((to, buf[..len].to_vec())),
                Output::Inject { len } => self.inject(now, &buf[..len]),
                Output::Egress { len } => {
                    let packet = buf[..len].to_vec();
                    self.egress(now, &packet);
                }
                Output::Ingress { from, len } => {
                    let datagram = buf[..len].to_vec();
                    self.ingress(now, from, &datagram);
                }
                Output::Update(update) => self.cache.apply(update),
                // Hosts of the simulator have no kernel cache: nothing goes direct.
                Output::Pinhole(_) | Output::Fence(_) | Output::Back(_) => {}
            }
        }
        while let Some(event) = self.sal.poll_event() {
            self.events.push(event);
        }
    }

    fn inject(&mut self, now: Instant, packet: &[u8]) {
        match Segment::parse(packet) {
            Some(segment) => self.deliver(now, segment),
            None => self.deliver_error(now, packet),
        }
    }

    /// ICMP: to the client whose packet it quotes.
    fn deliver_error(&mut self, now: Instant, packet: &[u8]) {
        let header = if packet.first().is_some_and(|byte| byte >> 4 == 4) { 20 } else { 40 };
        let Some(quoted) = packet.get(header + 8..).and_then(Segment::parse) else { return };
        for client in self.clients.iter_mut().filter(|client| *client.tuple() == quoted.tuple) {
            client.unreachable(now);
        }
    }

    fn deliver(&mut self, now: Instant, segment: Segment) {
        let to = segment.tuple.destination;
        let answers =
            if let Some(client) = self.clients.iter_mut().find(|client| client.tuple().reversed() == segment.tuple) {
                client.handle(now, &segment)
            } else if let Some(server) = self.servers.iter_mut().find(|server| server.port == to.port()) {
                server.handle(&segment)
            } else {
                Server::refuse(&segment)
            };
        for answer in answers {
            self.egress(now, &answer.emit());
        }
    }
}
