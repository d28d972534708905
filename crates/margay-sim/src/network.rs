//! What happens to datagrams between hosts: delay, loss, duplication, reordering, partitions, and a NAT.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rand_chacha::ChaCha8Rng;
use rand_core::RngCore;

/// How bad the network is. Shares are per mille.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    /// Least one-way delay.
    pub delay_min: Duration,
    /// Greatest one-way delay; the spread reorders.
    pub delay_max: Duration,
    /// Datagrams lost.
    pub loss_per_mille: u32,
    /// Datagrams that arrive twice.
    pub duplicate_per_mille: u32,
}

impl Weather {
    /// One millisecond, nothing lost.
    pub const FAIR: Self = Self {
        delay_min: Duration::from_millis(1),
        delay_max: Duration::from_millis(1),
        loss_per_mille: 0,
        duplicate_per_mille: 0,
    };

    /// Up to 40 ms either way, a tenth lost, a tenth doubled.
    pub const FOUL: Self = Self {
        delay_min: Duration::from_millis(1),
        delay_max: Duration::from_millis(40),
        loss_per_mille: 100,
        duplicate_per_mille: 100,
    };
}

/// An address translator in front of one private address: endpoint-dependent filtering, as the strictest of RFC 4787.
#[derive(Clone, Debug)]
struct Nat {
    public: IpAddr,
    /// private source → public port
    mappings: HashMap<SocketAddr, u16>,
    /// (public port, remote) that may come in
    pinholes: HashSet<(u16, SocketAddr)>,
    next_port: u16,
}

/// The network between the hosts.
pub struct Network {
    /// How bad it is now.
    pub weather: Weather,
    cut: HashSet<(IpAddr, IpAddr)>,
    nats: HashMap<IpAddr, Nat>,
    /// Addresses behind a firewall that lets in only what was asked for.
    firewalls: HashMap<IpAddr, HashSet<(SocketAddr, SocketAddr)>>,
}

/// A datagram on its way: when it arrives, from whom, to whom.
pub(crate) struct Arrival {
    pub after: Duration,
    pub from: SocketAddr,
    pub to: SocketAddr,
}

impl Network {
    pub(crate) fn new(weather: Weather) -> Self {
        Self { weather, cut: HashSet::new(), nats: HashMap::new(), firewalls: HashMap::new() }
    }

    /// Cuts both directions between two addresses.
    pub fn cut(&mut self, a: IpAddr, b: IpAddr) {
        self.cut.extend([(a, b), (b, a)]);
    }

    /// Mends every cut.
    pub fn heal(&mut self) {
        self.cut.clear();
    }

    /// Puts a NAT with the address `public` in front of `private`.
    pub fn put_behind_nat(&mut self, private: IpAddr, public: IpAddr) {
        let nat = Nat { public, mappings: HashMap::new(), pinholes: HashSet::new(), next_port: 40_000 };
        self.nats.insert(private, nat);
    }

    /// Puts a stateful firewall in front of `address`.
    pub fn put_behind_firewall(&mut self, address: IpAddr) {
        self.firewalls.insert(address, HashSet::new());
    }

    /// The fate of one datagram: none, one or two arrivals.
    pub(crate) fn send(&mut self, rng: &mut ChaCha8Rng, from: SocketAddr, to: SocketAddr) -> Vec<Arrival> {
        if from.ip() == to.ip() || to.ip().is_loopback() {
            return vec![Arrival { after: Duration::from_micros(10), from, to }];
        }
        let Some((from, to)) = self.translate(from, to) else { return Vec::new() };
        if self.cut.contains(&(from.ip(), to.ip())) {
            return Vec::new();
        }
        let mut per_mille = |share: u32| rng.next_u32() % 1000 < share;
        let copies = if per_mille(self.weather.loss_per_mille) {
            0
        } else {
            1 + u32::from(per_mille(self.weather.duplicate_per_mille))
        };
        let spread = self.weather.delay_max.saturating_sub(self.weather.delay_min).as_micros() as u64;
        let mut delay = || self.weather.delay_min + Duration::from_micros(rng.next_u64() % (spread + 1));
        (0..copies).map(|_| Arrival { after: delay(), from, to }).collect()
    }

    fn translate(&mut self, from: SocketAddr, to: SocketAddr) -> Option<(SocketAddr, SocketAddr)> {
        let mut from = from;
        if let Some(open) = self.firewalls.get_mut(&from.ip()) {
            open.insert((from, to));
        }
        if let Some(nat) = self.nats.get_mut(&from.ip()) {
            let next = &mut nat.next_port;
            let port = *nat.mappings.entry(from).or_insert_with(|| {
                *next += 1;
                *next
            });
            nat.pinholes.insert((port, to));
            from = SocketAddr::new(nat.public, port);
        }
        let mut to = to;
        if let Some(nat) = self.nats.values().find(|nat| nat.public == to.ip()) {
            if !nat.pinholes.contains(&(to.port(), from)) {
                return None;
            }
            to = *nat.mappings.iter().find(|(_, port)| **port == to.port())?.0;
        }
        if let Some(open) = self.firewalls.get(&to.ip())
            && !open.contains(&(to, from))
        {
            return None;
        }
        Some((from, to))
    }
}
