//! What happens to packets between hosts: delay, loss, duplication, reordering, partitions, a NAT, and walls that only packets
//! of the direct path notice.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_wire::{DataRepr, FENCE};
use rand_chacha::ChaCha8Rng;
use rand_core::RngCore;

use crate::program::{ACK, Segment};

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

/// A packet that the network is asked to carry.
#[derive(Clone, Copy, Debug)]
pub struct Passing<'a> {
    /// Its source.
    pub from: SocketAddr,
    /// Its destination.
    pub to: SocketAddr,
    /// A packet of the direct path; else a UDP datagram.
    pub is_direct: bool,
    /// The datagram, or the whole IP packet.
    pub bytes: &'a [u8],
}

impl Passing<'_> {
    /// Flags of a DATA datagram.
    pub fn data_flags(&self) -> Option<u8> {
        let data = DataRepr::parse(self.bytes).ok().filter(|_| !self.is_direct)?;
        Some(data.flags)
    }

    /// Whether it is a FENCE.
    pub fn is_fence(&self) -> bool {
        self.data_flags().is_some_and(|flags| flags & FENCE != 0)
    }

    /// Whether it is a direct packet that only acknowledges, as pinholes do.
    pub fn is_bare(&self) -> bool {
        let segment = Segment::parse(self.bytes).filter(|_| self.is_direct);
        segment.is_some_and(|segment| segment.data.is_empty() && matches!(segment.flags, 0 | ACK))
    }
}

/// Says which packets are lost, whatever else happens.
pub type Losing = Box<dyn FnMut(&Passing<'_>) -> bool>;

/// The network between the hosts.
pub struct Network {
    /// How bad it is now.
    pub weather: Weather,
    /// Datagrams take so much longer than packets of the direct path.
    pub detour: Duration,
    /// Packets that are lost for certain.
    pub losing: Option<Losing>,
    /// Direct packets do not pass from the first to the second address; `None` is every address.
    walls: HashSet<(Option<IpAddr>, Option<IpAddr>)>,
    /// Addresses behind a stateful firewall, and the direct connections that were seen to go out of it.
    guarded: HashMap<IpAddr, HashSet<(SocketAddr, SocketAddr)>>,
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
        Self {
            weather,
            detour: Duration::ZERO,
            losing: None,
            walls: HashSet::new(),
            guarded: HashMap::new(),
            cut: HashSet::new(),
            nats: HashMap::new(),
            firewalls: HashMap::new(),
        }
    }

    /// A firewall that drops every packet of the direct path.
    pub fn wall_off_all(&mut self) {
        self.walls.insert((None, None));
    }

    /// A firewall that drops packets of the direct path from one address to another.
    pub fn wall_off(&mut self, from: IpAddr, to: IpAddr) {
        self.walls.insert((Some(from), Some(to)));
    }

    /// A stateful firewall in front of `address`: direct packets come in only where one went out on the same ports.
    pub fn guard(&mut self, address: IpAddr) {
        self.guarded.insert(address, HashSet::new());
    }

    /// Takes down all that only the direct path notices.
    pub fn take_walls_down(&mut self) {
        self.walls.clear();
        self.guarded.clear();
    }

    /// Whether direct packets between the two could pass in both directions once a connection is known.
    pub fn is_open(&self, a: IpAddr, b: IpAddr) -> bool {
        let is_walled = self.is_walled(a, b) || self.is_walled(b, a);
        !is_walled && !self.nats.contains_key(&a) && !self.nats.contains_key(&b)
    }

    fn is_walled(&self, from: IpAddr, to: IpAddr) -> bool {
        self.walls.contains(&(None, None)) || self.walls.contains(&(Some(from), Some(to)))
    }

    /// Whether a direct packet passes what only the direct path notices. An address translator knows nothing of it.
    fn passes(&mut self, from: SocketAddr, to: SocketAddr) -> bool {
        if let Some(seen) = self.guarded.get_mut(&from.ip()) {
            seen.insert((from, to));
        }
        let is_known = self.guarded.get(&to.ip()).is_none_or(|seen| seen.contains(&(to, from)));
        let is_translated = self.nats.contains_key(&from.ip()) || self.nats.contains_key(&to.ip());
        is_known && !is_translated && !self.is_walled(from.ip(), to.ip())
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

    /// The fate of one packet: none, one or two arrivals.
    pub(crate) fn send(&mut self, rng: &mut ChaCha8Rng, packet: &Passing<'_>) -> Vec<Arrival> {
        let Passing { from, to, is_direct, .. } = *packet;
        if from.ip() == to.ip() || to.ip().is_loopback() {
            return vec![Arrival { after: Duration::from_micros(10), from, to }];
        }
        let ends = if is_direct { self.passes(from, to).then_some((from, to)) } else { self.translate(from, to) };
        let Some((from, to)) = ends else { return Vec::new() };
        if self.cut.contains(&(from.ip(), to.ip())) || self.losing.as_mut().is_some_and(|losing| losing(packet)) {
            return Vec::new();
        }
        let mut per_mille = |share: u32| rng.next_u32() % 1000 < share;
        let copies = if per_mille(self.weather.loss_per_mille) {
            0
        } else {
            1 + u32::from(per_mille(self.weather.duplicate_per_mille))
        };
        let spread = self.weather.delay_max.saturating_sub(self.weather.delay_min).as_micros() as u64;
        let least = self.weather.delay_min + if is_direct { Duration::ZERO } else { self.detour };
        let mut delay = || least + Duration::from_micros(rng.next_u64() % (spread + 1));
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
