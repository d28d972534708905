//! What happens to packets between hosts: delay, loss, duplication, reordering, partitions, a NAT, and walls that only
//! packets of the direct path notice.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::Instant;
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

/// How long translators and stateful firewalls remember what nobody uses.
#[derive(Clone, Copy, Debug)]
pub struct TimeOuts {
    /// Of datagrams.
    pub datagrams: Duration,
    /// Of packets of the direct path, which look like those of an open connection.
    pub direct: Duration,
}

impl TimeOuts {
    /// They forget nothing.
    pub const NEVER: Self = Self { datagrams: Duration::MAX, direct: Duration::MAX };

    const fn of(self, is_direct: bool) -> Duration {
        if is_direct { self.direct } else { self.datagrams }
    }
}

/// What is remembered of who has sent to whom, and when that was last used.
#[derive(Clone, Debug, Default)]
struct Seen(HashMap<(bool, SocketAddr, SocketAddr), Instant>);

impl Seen {
    fn note(&mut self, now: Instant, is_direct: bool, from: SocketAddr, to: SocketAddr) {
        self.0.insert((is_direct, from, to), now);
    }

    /// Whether a packet answers what was sent; one that does keeps it in mind.
    fn is_answer(
        &mut self,
        now: Instant,
        time_outs: TimeOuts,
        is_direct: bool,
        from: SocketAddr,
        to: SocketAddr,
    ) -> bool {
        let Some(at) = self.0.get_mut(&(is_direct, to, from)) else { return false };
        let is_known = now.since(*at) < time_outs.of(is_direct);
        if is_known {
            *at = now;
        }
        is_known
    }
}

/// An address translator in front of a site: endpoint-dependent filtering, as the strictest of RFC 4787.
#[derive(Clone, Debug)]
struct Nat {
    public: IpAddr,
    /// Addresses behind it.
    private: HashSet<IpAddr>,
    /// Private source and its public port, of datagrams and of the direct path, and when it was last used.
    mappings: HashMap<(bool, SocketAddr), (u16, Instant)>,
    /// What went out, by the public port.
    seen: Seen,
    next_port: u16,
    /// Packets of the direct path pass as well, with their own port where that is free.
    takes_direct: bool,
}

impl Nat {
    /// The public source of a packet that goes out.
    fn map(&mut self, now: Instant, time_outs: TimeOuts, is_direct: bool, from: SocketAddr) -> u16 {
        let time_out = time_outs.of(is_direct);
        self.mappings.retain(|(of_direct, _), (_, at)| *of_direct != is_direct || now.since(*at) < time_out);
        if let Some((port, at)) = self.mappings.get_mut(&(is_direct, from)) {
            *at = now;
            return *port;
        }
        let is_taken =
            |nat: &Self, port: u16| nat.mappings.iter().any(|((of, _), at)| *of == is_direct && at.0 == port);
        let mut port = from.port();
        // Datagrams always get another port: nobody may count on the port of the Service Access Layer.
        while !is_direct && port == from.port() || is_taken(self, port) {
            self.next_port = self.next_port.checked_add(1).unwrap_or(40_001);
            port = self.next_port;
        }
        self.mappings.insert((is_direct, from), (port, now));
        port
    }

    /// Whom a public port belongs to.
    fn private_of(&mut self, now: Instant, is_direct: bool, port: u16) -> Option<SocketAddr> {
        let mut of_kind = self.mappings.iter_mut().filter(|((of_direct, _), _)| *of_direct == is_direct);
        let ((_, private), (_, at)) = of_kind.find(|(_, (mapped, _))| *mapped == port)?;
        *at = now;
        Some(*private)
    }
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
    guarded: HashMap<IpAddr, Seen>,
    cut: HashSet<(IpAddr, IpAddr)>,
    nats: Vec<Nat>,
    /// Addresses behind a firewall that lets in only the datagrams that were asked for.
    firewalls: HashMap<IpAddr, Seen>,
    /// Of all translators and firewalls.
    pub time_outs: TimeOuts,
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
            nats: Vec::new(),
            firewalls: HashMap::new(),
            time_outs: TimeOuts::NEVER,
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
        self.guarded.insert(address, Seen::default());
    }

    /// Takes down all that only the direct path notices.
    pub fn take_walls_down(&mut self) {
        self.walls.clear();
        self.guarded.clear();
    }

    /// Whether direct packets between the two could pass in both directions once a connection is known.
    pub fn is_open(&self, a: IpAddr, b: IpAddr) -> bool {
        let is_walled = self.is_walled(a, b) || self.is_walled(b, a);
        !is_walled && self.nat_of(a).is_none() && self.nat_of(b).is_none()
    }

    fn is_walled(&self, from: IpAddr, to: IpAddr) -> bool {
        self.walls.contains(&(None, None)) || self.walls.contains(&(Some(from), Some(to)))
    }

    fn nat_of(&self, private: IpAddr) -> Option<usize> {
        self.nats.iter().position(|nat| nat.private.contains(&private))
    }

    /// The address at which others see a host that is at `private`.
    pub fn public_of(&self, private: IpAddr) -> IpAddr {
        self.nat_of(private).map_or(private, |at| self.nats[at].public)
    }

    /// Cuts both directions between two addresses.
    pub fn cut(&mut self, a: IpAddr, b: IpAddr) {
        self.cut.extend([(a, b), (b, a)]);
    }

    /// Whether nothing passes from one address to another.
    pub fn is_cut(&self, from: IpAddr, to: IpAddr) -> bool {
        self.cut.contains(&(from, to))
    }

    /// Mends every cut.
    pub fn heal(&mut self) {
        self.cut.clear();
    }

    /// Puts a NAT with the address `public` in front of `private`, beside others that are behind it.
    pub fn put_behind_nat(&mut self, private: IpAddr, public: IpAddr) {
        if let Some(nat) = self.nats.iter_mut().find(|nat| nat.public == public) {
            nat.private.insert(private);
            return;
        }
        let (private, mappings) = (HashSet::from([private]), HashMap::new());
        let (seen, next_port, takes_direct) = (Seen::default(), 40_000, false);
        self.nats.push(Nat { public, private, mappings, seen, next_port, takes_direct });
    }

    /// The NAT with the address `public` lets packets of the direct path pass, too, as one does that takes connections
    /// up in their middle.
    pub fn translate_direct(&mut self, public: IpAddr) {
        self.nats.iter_mut().filter(|nat| nat.public == public).for_each(|nat| nat.takes_direct = true);
    }

    /// Every NAT starts again, and knows nothing of what was.
    pub fn restart_nats(&mut self) {
        for nat in &mut self.nats {
            nat.mappings.clear();
            nat.seen = Seen::default();
        }
    }

    /// Puts a stateful firewall in front of `address`.
    pub fn put_behind_firewall(&mut self, address: IpAddr) {
        self.firewalls.insert(address, Seen::default());
    }

    /// The fate of one packet: none, one or two arrivals.
    pub(crate) fn send(&mut self, now: Instant, rng: &mut ChaCha8Rng, packet: &Passing<'_>) -> Vec<Arrival> {
        let Passing { from, to, is_direct, .. } = *packet;
        if from.ip() == to.ip() || to.ip().is_loopback() {
            return vec![Arrival { after: Duration::from_micros(10), from, to }];
        }
        let Some((from, to)) = self.translate(now, is_direct, from, to) else { return Vec::new() };
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

    /// The source and the destination with which a packet arrives, if no translator and no firewall drops it.
    fn translate(
        &mut self,
        now: Instant,
        is_direct: bool,
        from: SocketAddr,
        to: SocketAddr,
    ) -> Option<(SocketAddr, SocketAddr)> {
        let (mut from, mut to, time_outs) = (from, to, self.time_outs);
        if is_direct && self.is_walled(from.ip(), to.ip()) {
            return None;
        }
        let walls = if is_direct { &mut self.guarded } else { &mut self.firewalls };
        if let Some(seen) = walls.get_mut(&from.ip()) {
            seen.note(now, is_direct, from, to);
        }
        let (inside, target) = (self.nat_of(from.ip()), self.nat_of(to.ip()));
        if target.is_some() && target != inside {
            // Nobody outside has a way to a private address.
            return None;
        }
        if let Some(at) = inside.filter(|_| target.is_none()) {
            let nat = &mut self.nats[at];
            if is_direct && !nat.takes_direct {
                return None;
            }
            from = SocketAddr::new(nat.public, nat.map(now, time_outs, is_direct, from));
            nat.seen.note(now, is_direct, from, to);
        }
        if let Some(nat) = self.nats.iter_mut().find(|nat| nat.public == to.ip()) {
            if !nat.seen.is_answer(now, time_outs, is_direct, from, to) {
                return None;
            }
            to = nat.private_of(now, is_direct, to.port())?;
        }
        let walls = if is_direct { &mut self.guarded } else { &mut self.firewalls };
        if let Some(seen) = walls.get_mut(&to.ip())
            && !seen.is_answer(now, time_outs, is_direct, from, to)
        {
            return None;
        }
        Some((from, to))
    }
}
