//! The world: hosts, the network between them, and time that jumps from event to event.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use margay_core::handover::HandoverRecord;
use margay_core::name::{Name, ServiceId};
use margay_core::segment::SEGMENT;
use margay_core::table::Allow;
use margay_core::{AppVerdict, AssociationSetup, Instant, Limits, Ranges, Tuple};
use margay_wire::PORT;
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

use crate::host::{Host, HostId, Outgoing, Start};
use crate::middlebox::Habit;
use crate::network::{Network, Passing, Weather};
use crate::nonces::Nonces;
use crate::program::{Datagram, Segment};
use crate::stream::Plan;

/// A packet in flight.
struct InFlight {
    from: SocketAddr,
    to: SocketAddr,
    is_direct: bool,
    /// Sent to all hosts of the segment.
    is_for_all: bool,
    bytes: Vec<u8>,
}

/// Hosts and a network, from one seed.
pub struct World {
    /// Virtual time.
    pub now: Instant,
    /// Between the hosts.
    pub network: Network,
    /// The machines.
    pub hosts: Vec<Host>,
    rng: ChaCha8Rng,
    by_address: HashMap<IpAddr, HostId>,
    in_flight: BTreeMap<(Instant, u64), InFlight>,
    sent: u64,
    /// Every datagram that was sent, for replays, when asked for.
    pub recording: Option<Vec<(SocketAddr, SocketAddr, Vec<u8>)>>,
    /// Every packet of the direct path that was sent, when asked for.
    pub direct_recording: Option<Vec<(SocketAddr, SocketAddr, Vec<u8>)>>,
    /// What its hosts have encrypted. A key and nonce that are used twice end the world.
    pub nonces: Nonces,
    /// An attacker on every path drops the datagrams of the agents for which this is true. They are recorded as sent.
    pub attacker_drops: Option<fn(&[u8]) -> bool>,
    /// How many it has dropped.
    pub dropped_by_attacker: u64,
    /// Bounds of hosts made from now on.
    pub limits: Limits,
    /// Virtual addresses of hosts made from now on.
    pub ranges: Ranges,
}

impl World {
    /// An empty world.
    pub fn new(seed: u64, weather: Weather) -> Self {
        Self {
            now: Instant::from_millis(1),
            network: Network::new(weather),
            hosts: Vec::new(),
            rng: ChaCha8Rng::seed_from_u64(seed),
            by_address: HashMap::new(),
            in_flight: BTreeMap::new(),
            sent: 0,
            recording: None,
            direct_recording: None,
            nonces: Nonces::default(),
            attacker_drops: None,
            dropped_by_attacker: 0,
            limits: Limits::default(),
            ranges: Ranges::USUAL,
        }
    }

    /// A number from the world's seed.
    pub fn random(&mut self) -> u32 {
        self.rng.next_u32()
    }

    fn seed(&mut self) -> [u8; 32] {
        let mut seed = [0; 32];
        self.rng.fill_bytes(&mut seed);
        seed
    }

    /// Adds a host; the first gets 10.0.0.1, and so on.
    pub fn add_host(&mut self, router: bool) -> HostId {
        let id = HostId(self.hosts.len());
        let address = IpAddr::V4(Ipv4Addr::new(10, 0, (id.0 >> 8) as u8, id.0 as u8 + 1));
        let start = Start { key_seed: self.seed(), epoch: 1, boot: 1, router, ranges: self.ranges };
        self.start_host(id, address, start);
        id
    }

    /// Puts a host at `address`, in the place of the one that had this number: a restart, or a new machine.
    pub fn start_host(&mut self, id: HostId, address: IpAddr, start: Start) {
        let seed = self.seed();
        let host = Host::new(address, start, self.now, seed, self.limits, self.nonces.clone());
        if id.0 < self.hosts.len() {
            self.hosts[id.0] = host;
        } else {
            self.hosts.push(host);
        }
        self.by_address.insert(address, id);
    }

    /// The host.
    pub fn host(&mut self, id: HostId) -> &mut Host {
        &mut self.hosts[id.0]
    }

    /// From now on the host has these addresses and no others. What is on its way to the others finds nobody.
    pub fn set_addresses(&mut self, id: HostId, addresses: Vec<IpAddr>) {
        self.by_address.retain(|_, host| *host != id);
        self.by_address.extend(addresses.iter().map(|address| (*address, id)));
        self.hosts[id.0].set_addresses(self.now, addresses);
        self.collect(id.0);
    }

    /// Carries out what a host's core asks for after a call of its control side.
    pub fn touch(&mut self, id: HostId) {
        let now = self.now;
        self.hosts[id.0].drain(now);
        self.collect(id.0);
    }

    /// The host's agent dies, and what its programs and its kernel do goes on.
    pub fn kill_agent(&mut self, id: HostId) {
        self.hosts[id.0].kill_agent();
    }

    /// The host's agent starts again with what it had written down.
    pub fn start_agent(&mut self, id: HostId) {
        self.start_agent_with(id, &|_| {});
    }

    /// The same, with records that whoever administers the host has altered.
    pub fn start_agent_with(&mut self, id: HostId, alter: &dyn Fn(&mut HandoverRecord)) {
        let (seed, now) = (self.seed(), self.now);
        self.hosts[id.0].start_agent_with(now, seed, alter);
        let addresses = self.hosts[id.0].addresses.clone();
        self.hosts[id.0].set_addresses(now, addresses);
        self.collect(id.0);
    }

    /// What the registration stream does: an association between a router and a host, and a default rule at the host.
    pub fn register(&mut self, router: HostId, host: HostId) {
        self.join(router, host);
        let address = self.hosts[router.0].address;
        self.hosts[host.0].forward(margay_core::name::Prefix::default(), address, None);
        // An agent asks for its routes again and again.
        for id in [router, host] {
            let (now, addresses) = (self.now, self.hosts[id.0].addresses.clone());
            self.hosts[id.0].set_addresses(now, addresses);
        }
    }

    /// A stream between a router and a host that have one another already: they agree on new keys. False if none comes
    /// about.
    pub fn register_again(&mut self, router: HostId, host: HostId) -> bool {
        let [a, b] = [router, host].map(|id| &self.hosts[id.0]);
        let is_up = |host: &Host| host.has_agent() && !host.addresses.is_empty();
        if !is_up(a) || !is_up(b) || self.network.is_cut(a.address, b.address) {
            return false;
        }
        self.join(router, host);
        for id in [router, host] {
            // It has asked for the router's routes before it sends there.
            let (now, addresses) = (self.now, self.hosts[id.0].addresses.clone());
            self.hosts[id.0].set_addresses(now, addresses);
            self.collect(id.0);
        }
        true
    }

    fn join(&mut self, router: HostId, host: HostId) {
        let (key, hop_key) = (self.seed(), self.seed());
        let hop_key: [u8; 16] = hop_key[..16].try_into().expect("sixteen of thirty-two");
        let ids = [self.random() | 1, self.random() | 1];
        for (own, peer, own_id, peer_id) in [(router, host, ids[0], ids[1]), (host, router, ids[1], ids[0])] {
            let setup = AssociationSetup {
                host_key: self.hosts[peer.0].public_key(),
                key,
                local_id: own_id,
                remote_id: peer_id,
                boot_id: None,
                peer_epoch: self.hosts[peer.0].epoch(),
                // What the stream comes from.
                remote: SocketAddr::new(self.network.public_of(self.hosts[peer.0].address), PORT),
                hop_key: Some(hop_key),
                router: true,
                initiator: own == host,
            };
            let now = self.now;
            self.hosts[own.0].sal.install_association(now, setup);
        }
    }

    /// Serves `name` on `host` and tells the router.
    pub fn publish(&mut self, router: HostId, host: HostId, name: &str, number: u32) -> ServiceId {
        let service = service(name);
        self.hosts[host.0].serve(service, 80, number, Allow::Any);
        let (address, key) = (self.hosts[host.0].address, self.hosts[host.0].public_key());
        self.hosts[router.0].forward(service.into(), address, Some(key));
        service
    }

    /// Gives `host` a box that is reachable as `name`, and tells the router.
    pub fn publish_box(&mut self, router: HostId, host: HostId, name: &str, habit: Habit) -> ServiceId {
        let service = service(name);
        self.hosts[host.0].serve_box(service, habit, Allow::Any);
        let address = self.hosts[host.0].address;
        let key = self.hosts[host.0].public_key();
        self.hosts[router.0].forward(service.into(), address, Some(key));
        service
    }

    /// Starts a client on `host` towards `name`.
    pub fn connect(&mut self, host: HostId, name: &str) -> usize {
        let now = self.now;
        let to = SocketAddr::new(self.hosts[host.0].ranges().virtual_v6(&service(name)).into(), 80);
        self.hosts[host.0].connect(now, to)
    }

    /// A program on `host` sends a datagram that misses the cache.
    pub fn send_datagram(&mut self, host: HostId, datagram: &Datagram) -> AppVerdict {
        let verdict = self.hosts[host.0].send_datagram(self.now, datagram);
        self.collect(host.0);
        verdict
    }

    /// A program on `host` sends a datagram, which the caches may carry.
    pub fn say(&mut self, host: HostId, datagram: &Datagram) {
        self.hosts[host.0].say(self.now, datagram);
        self.collect(host.0);
    }

    /// A container sends a datagram, whose addresses `host` translates, which the caches may carry.
    pub fn say_from_outside(&mut self, host: HostId, datagram: &Datagram) {
        self.hosts[host.0].say_from_outside(self.now, datagram);
        self.collect(host.0);
    }

    /// Sends a datagram as if from `from`, whoever that is: for attackers.
    pub fn inject(&mut self, from: SocketAddr, to: SocketAddr, bytes: Vec<u8>) {
        let at = self.now + Duration::from_micros(100);
        self.sent += 1;
        self.in_flight.insert((at, self.sent), InFlight { from, to, is_direct: false, is_for_all: false, bytes });
    }

    /// Delivers a packet of the direct path in a millisecond, whoever sent it.
    pub fn inject_direct(&mut self, bytes: Vec<u8>) {
        let Some(segment) = Segment::parse(&bytes) else { return };
        let (from, to) = (segment.tuple.source, segment.tuple.destination);
        self.sent += 1;
        let packet = InFlight { from, to, is_direct: true, is_for_all: false, bytes };
        self.in_flight.insert((self.now + Duration::from_millis(1), self.sent), packet);
    }

    /// Serves `name` on `host` by a program whose connections follow `plan`, and tells the router.
    pub fn publish_streams(&mut self, router: HostId, host: HostId, name: &str, plan: Plan) -> ServiceId {
        let service = service(name);
        self.hosts[host.0].serve_streams(service, 81, plan);
        let (address, key) = (self.hosts[host.0].address, self.hosts[host.0].public_key());
        self.hosts[router.0].forward(service.into(), address, Some(key));
        service
    }

    /// Starts a connection on `host` towards `name` that follows `plan`.
    pub fn connect_stream(&mut self, host: HostId, name: &str, plan: Plan) -> usize {
        let to = SocketAddr::new(self.hosts[host.0].ranges().virtual_v6(&service(name)).into(), 80);
        self.hosts[host.0].connect_stream(self.now, to, plan)
    }

    /// Gives the host a kernel cache, or takes the direct path off it.
    pub fn set_direct(&mut self, host: HostId, is_on: bool) {
        self.hosts[host.0].set_direct(self.now, is_on);
        self.collect(host.0);
    }

    fn collect(&mut self, id: usize) {
        let outbox = std::mem::take(&mut self.hosts[id].outbox);
        let own = SocketAddr::new(self.hosts[id].address, PORT);
        for outgoing in outbox {
            let (from, to, is_direct, bytes) = match outgoing {
                Outgoing::Datagram(_, to, bytes) if to.ip().is_loopback() => {
                    (SocketAddr::new(to.ip(), PORT), to, false, bytes)
                }
                Outgoing::Datagram(_, to, bytes) if to == SEGMENT => {
                    self.send_to_all(id, &bytes);
                    continue;
                }
                Outgoing::Datagram(local, to, bytes) => {
                    let Some(from) = self.hosts[id].source_for(local, to.ip()) else { continue };
                    (SocketAddr::new(from, PORT), to, false, bytes)
                }
                Outgoing::Direct(bytes) => {
                    let Some(segment) = Segment::parse(&bytes) else { continue };
                    if !self.hosts[id].addresses.contains(&segment.tuple.source.ip()) {
                        continue;
                    }
                    (segment.tuple.source, segment.tuple.destination, true, bytes)
                }
            };
            let recording = if is_direct { &mut self.direct_recording } else { &mut self.recording };
            if let Some(recording) = recording {
                recording.push((from, to, bytes.clone()));
            }
            if !is_direct && self.attacker_drops.is_some_and(|drops| drops(&bytes)) {
                self.dropped_by_attacker += 1;
                continue;
            }
            let packet = Passing { from, to, is_direct, bytes: &bytes };
            for arrival in self.network.send(self.now, &mut self.rng, &packet) {
                self.sent += 1;
                let to = if arrival.to.ip().is_loopback() { SocketAddr::new(own.ip(), PORT) } else { arrival.to };
                let bytes = if is_direct { translated(&bytes, arrival.from, to) } else { bytes.clone() };
                let packet = InFlight { from: arrival.from, to, is_direct, is_for_all: false, bytes };
                self.in_flight.insert((self.now + arrival.after, self.sent), packet);
            }
        }
    }

    /// To every address of the segments that a host is on, its own included: hosts whose addresses share the first 24
    /// bits.
    fn send_to_all(&mut self, id: usize, bytes: &[u8]) {
        let segment = |address: &IpAddr| match address {
            IpAddr::V4(v4) => Some(v4.octets()[..3].to_vec()),
            IpAddr::V6(_) => None,
        };
        for own in self.hosts[id].addresses.clone() {
            if let Some(recording) = &mut self.recording {
                recording.push((SocketAddr::new(own, PORT), SEGMENT, bytes.to_vec()));
            }
            let mut near: Vec<IpAddr> = self.by_address.keys().copied().collect();
            near.retain(|address| segment(address).is_some() && segment(address) == segment(&own));
            near.sort_unstable();
            for address in near {
                let (from, to) = (SocketAddr::new(own, PORT), SocketAddr::new(address, PORT));
                for arrival in
                    self.network.send(self.now, &mut self.rng, &Passing { from, to, is_direct: false, bytes })
                {
                    self.sent += 1;
                    let packet = InFlight { from, to, is_direct: false, is_for_all: true, bytes: bytes.to_vec() };
                    self.in_flight.insert((self.now + arrival.after, self.sent), packet);
                }
            }
        }
    }

    /// Lets time pass until nothing happens before `until`. Gives the number of events.
    pub fn run_until(&mut self, until: Instant) -> u64 {
        let mut events = 0;
        loop {
            let datagram = self.in_flight.first_key_value().map(|((at, _), _)| *at);
            let timer = self.hosts.iter().filter_map(Host::next_deadline).min();
            let Some(next) = datagram.into_iter().chain(timer).min().filter(|next| *next <= until) else { break };
            self.now = self.now.max(next);
            events += 1;
            if datagram.is_some_and(|at| at <= self.now)
                && let Some((_, datagram)) = self.in_flight.pop_first()
            {
                if let Some(id) = self.by_address.get(&datagram.to.ip()).copied() {
                    let host = &mut self.hosts[id.0];
                    match datagram.is_direct {
                        true => host.handle_direct(self.now, &datagram.bytes),
                        false => {
                            let local = if datagram.is_for_all { SEGMENT.ip() } else { datagram.to.ip() };
                            host.handle_datagram(self.now, local, datagram.from, &datagram.bytes);
                        }
                    }
                    self.collect(id.0);
                }
                continue;
            }
            for id in 0..self.hosts.len() {
                if self.hosts[id].next_deadline().is_some_and(|deadline| deadline <= self.now) {
                    self.hosts[id].handle_time(self.now);
                    self.collect(id);
                }
            }
        }
        self.now = self.now.max(until);
        events
    }

    /// Lets `time` pass.
    pub fn run_for(&mut self, time: Duration) -> u64 {
        self.run_until(self.now + time)
    }
}

/// A packet of the direct path with the addresses and ports that translators have given it.
fn translated(packet: &[u8], source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let Some(segment) = Segment::parse(packet) else { return packet.to_vec() };
    let tuple = Tuple { source, destination, ..segment.tuple };
    if tuple == segment.tuple { packet.to_vec() } else { segment.readdressed(tuple).emit() }
}

/// The serviceID of a written name.
///
/// # Panics
///
/// On a name that is none: worlds are made of literals.
pub fn service(name: &str) -> ServiceId {
    name.parse::<Name>().expect("a literal name").service_id()
}
