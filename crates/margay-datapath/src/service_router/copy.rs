//! What of the core's service table lies in the kernel's maps, and where. Nothing is overwritten that a packet on its way through
//! the program may still need: what replaces it is made first.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType};
use margay_core::association::Neighbour;
use margay_core::key::HostId;
use margay_core::name::Prefix;
use margay_core::table::{Outcome, RuleId, Share};

use super::Way;
use super::layout::{self, HOP_NONE, ROUTE_AGENT, ROUTE_BUCKETS, ROUTE_SEAT};
use crate::kernel::plain::Plain;

/// Lengths of prefixes in use at once (`ROUTER_LENGTHS`).
pub(super) const LENGTHS_MAX: usize = 32;

/// The maps that this process writes.
pub(super) struct Maps {
    pub routes: MapHandle,
    pub seats: MapHandle,
    pub lists: MapHandle,
    pub hops: MapHandle,
    pub neighbours: MapHandle,
    pub own_addresses: MapHandle,
    pub devices: MapHandle,
    pub counters: MapHandle,
}

/// Numbers of elements of an array. Those given back are given out again as late as possible.
struct Numbers {
    fresh: Range<u32>,
    back: VecDeque<u32>,
}

impl Numbers {
    const fn new(count: u32) -> Self {
        Self { fresh: 0..count, back: VecDeque::new() }
    }

    fn take(&mut self) -> Option<u32> {
        self.fresh.next().or_else(|| self.back.pop_front())
    }
}

/// Where packets go, and whether that is a router above or beside this one: the same for all rules that name it.
type HopName = (Option<HostId>, SocketAddr, bool);

struct HopState {
    number: u32,
    /// How many seats lead to it.
    seats: usize,
    way: Option<Way>,
}

struct SeatState {
    number: u32,
    hop: Option<HopName>,
    /// The prefix of which it is the only rule: there its packets are counted.
    alone: Option<Prefix>,
}

/// Prefixes of one length.
#[derive(Clone, Copy)]
struct Length {
    count: usize,
    filter: Option<u32>,
}

/// What is held of one prefix.
#[derive(Default)]
struct Held {
    shares: Vec<Share>,
    list: Option<u32>,
    /// Which share has each bucket, where there is a list.
    holders: Vec<u32>,
    /// All rules of the prefix found room.
    is_whole: bool,
}

/// The copy. An error leaves it of no use: the program must not decide by it.
pub(super) struct Copy {
    held: HashMap<Prefix, Held>,
    seats: HashMap<RuleId, SeatState>,
    seat_numbers: Numbers,
    list_numbers: Numbers,
    hops: BTreeMap<HopName, HopState>,
    hop_numbers: Numbers,
    /// Names of next hops, by address.
    at: BTreeSet<(SocketAddr, Option<HostId>, bool)>,
    keys: HashMap<HostId, [u8; 16]>,
    keys_at: HashMap<SocketAddr, [u8; 16]>,
    lengths: BTreeMap<u16, Length>,
    filters: Numbers,
    /// What rules have done that are no more in force here.
    credits: Vec<(RuleId, layout::usage)>,
    /// What the filters do not know yet.
    news: Vec<FilterNews>,
}

/// What is to be written into filters, in this order.
#[derive(Clone, Copy)]
pub(super) enum FilterNews {
    /// It is for another length now.
    Empty(u32),
    /// There is such a prefix.
    Add(u32, Prefix),
}

impl Copy {
    pub fn new(rules_max: u32, lists_max: u32, hops_max: u32) -> Self {
        Self {
            held: HashMap::new(),
            seats: HashMap::new(),
            seat_numbers: Numbers::new(rules_max),
            list_numbers: Numbers::new(lists_max),
            hops: BTreeMap::new(),
            hop_numbers: Numbers::new(hops_max),
            at: BTreeSet::new(),
            keys: HashMap::new(),
            keys_at: HashMap::new(),
            lengths: BTreeMap::new(),
            filters: Numbers::new(LENGTHS_MAX as u32),
            news: Vec::new(),
            credits: Vec::new(),
        }
    }

    /// The lengths in use and their filters, longest first; `None` when they are too many.
    pub fn lengths(&self) -> Option<Vec<(u16, Option<u32>)>> {
        let named = |(bits, length): (&u16, &Length)| (*bits, length.filter);
        (self.lengths.len() <= LENGTHS_MAX).then(|| self.lengths.iter().rev().map(named).collect())
    }

    pub fn take_credits(&mut self) -> Vec<(RuleId, layout::usage)> {
        std::mem::take(&mut self.credits)
    }

    pub fn take_news(&mut self) -> Vec<FilterNews> {
        std::mem::take(&mut self.news)
    }

    pub fn prefixes(&self) -> Vec<Prefix> {
        self.held.keys().copied().collect()
    }

    /// Whoever a hop key is known of.
    pub fn neighbours(&self) -> Vec<Neighbour> {
        let by_host = self.keys.keys().map(|host| Neighbour::Host(*host));
        by_host.chain(self.keys_at.keys().map(|address| Neighbour::At(*address))).collect()
    }

    /// Number of prefixes, lists of buckets and next hops.
    pub fn sizes(&self) -> [usize; 3] {
        let lists = self.held.values().filter(|held| held.list.is_some()).count();
        [self.held.len(), lists, self.hops.len()]
    }

    /// What a rule has done.
    pub fn usage(&self, maps: &Maps, rule: RuleId) -> Option<layout::usage> {
        let state = self.seats.get(&rule)?;
        let seat: layout::seat = get(&maps.seats, &state.number.to_ne_bytes())?;
        let alone = state.alone.and_then(|prefix| get(&maps.routes, layout::route_key_of(&prefix).bytes()));
        Some(sum(seat.usage, alone.map(|route: layout::route| route.usage).unwrap_or_default()))
    }

    /// Brings what a prefix's only rule has done to its seat: the route is about to be replaced.
    fn keep_usage(&mut self, maps: &Maps, prefix: Prefix) -> io::Result<()> {
        let Some(Held { shares, .. }) = self.held.get(&prefix) else { return Ok(()) };
        let Some(rule) = shares.first().map(|share| share.rule) else { return Ok(()) };
        let usage = self.usage(maps, rule);
        let (Some(usage), Some(state)) = (usage, self.seats.get_mut(&rule)) else { return Ok(()) };
        if state.alone.take().is_none() {
            return Ok(());
        }
        let key = state.number.to_ne_bytes();
        let seat: layout::seat = get(&maps.seats, &key).unwrap_or_default();
        put(&maps.seats, &key, layout::seat { usage, ..seat }.bytes())
    }

    /// Brings one prefix up to date.
    pub fn apply(&mut self, maps: &Maps, prefix: Prefix, outcome: &Outcome) -> io::Result<()> {
        let shares = match outcome {
            Outcome::Shorter => {
                // Absent where it had no rule that takes packets before, either.
                self.keep_usage(maps, prefix)?;
                let _ = maps.routes.delete(layout::route_key_of(&prefix).bytes());
                let Some(before) = self.held.remove(&prefix) else { return Ok(()) };
                self.forget_length(prefix.bits);
                return self.retire(maps, before, &[]);
            }
            Outcome::Depends => &[][..],
            Outcome::Shares(shares) => shares,
        };
        if self.held.get(&prefix).is_some_and(|held| held.is_whole && held.shares == shares) {
            return Ok(());
        }
        self.keep_usage(maps, prefix)?;
        let (route, held) = self.take_seats(maps, prefix, shares)?;
        put(&maps.routes, layout::route_key_of(&prefix).bytes(), route.bytes())?;
        if route.kind == ROUTE_SEAT {
            let alone = held.shares.first().and_then(|share| self.seats.get_mut(&share.rule));
            alone.into_iter().for_each(|seat| seat.alone = Some(prefix));
        }
        let kept: Vec<RuleId> = held.shares.iter().map(|share| share.rule).collect();
        match self.held.insert(prefix, held) {
            Some(before) => self.retire(maps, before, &kept),
            None => {
                self.note_length(prefix);
                Ok(())
            }
        }
    }

    fn note_length(&mut self, prefix: Prefix) {
        let (filters, news) = (&mut self.filters, &mut self.news);
        let length = self.lengths.entry(prefix.bits).or_insert_with(|| {
            let filter = filters.take();
            news.extend(filter.map(FilterNews::Empty));
            Length { count: 0, filter }
        });
        length.count += 1;
        news.extend(length.filter.map(|filter| FilterNews::Add(filter, prefix)));
    }

    fn forget_length(&mut self, bits: u16) {
        let Some(length) = self.lengths.get_mut(&bits) else { return };
        length.count -= 1;
        if length.count == 0 {
            self.filters.back.extend(length.filter);
            self.lengths.remove(&bits);
        }
    }

    /// What a prefix leads to. Where there is no room, to the agent.
    fn take_seats(&mut self, maps: &Maps, prefix: Prefix, shares: &[Share]) -> io::Result<(layout::route, Held)> {
        let mut held = Held::default();
        let to_agent = layout::route { kind: ROUTE_AGENT, ..Default::default() };
        let mut numbers = Vec::with_capacity(shares.len());
        for share in shares {
            let Some(number) = self.take_seat(maps, share)? else { return Ok((to_agent, held)) };
            numbers.push(number);
            held.shares.push(*share);
        }
        let route = match numbers[..] {
            [] => to_agent,
            [number] => {
                layout::route { kind: ROUTE_SEAT, number, hop: self.hop_number(&shares[0]), ..Default::default() }
            }
            _ => {
                let Some(number) = self.list_numbers.take() else { return Ok((to_agent, held)) };
                held.list = Some(number);
                held.holders = match self.held.get(&prefix) {
                    Some(before) if before.list.is_some() => {
                        Share::holders_after(shares, &before.shares, &before.holders)
                    }
                    _ => Share::holders(shares),
                };
                write_list(maps, number, held.holders.iter().map(|at| numbers[*at as usize]))?;
                layout::route { kind: ROUTE_BUCKETS, number, ..Default::default() }
            }
        };
        held.is_whole = true;
        Ok((route, held))
    }

    fn take_seat(&mut self, maps: &Maps, share: &Share) -> io::Result<Option<u32>> {
        let hop = share.to.map(|to| (to.host, to.address, to.router));
        let known = self.seats.get(&share.rule).map(|seat| (seat.number, seat.hop));
        if let Some((number, _)) = known.filter(|(_, before)| *before == hop) {
            return Ok(Some(number));
        }
        let hop_number = match hop {
            None => Some(HOP_NONE),
            Some(name) => self.take_hop(maps, name)?,
        };
        let mut number = || known.map(|(number, _)| number).or_else(|| self.seat_numbers.take());
        let (Some(hop_number), Some(number)) = (hop_number, number()) else {
            return Ok(None);
        };
        // A rule that leads elsewhere now keeps what it has counted.
        let before: Option<layout::seat> = known.and_then(|(number, _)| get(&maps.seats, &number.to_ne_bytes()));
        let value = layout::seat { hop: hop_number, ..before.unwrap_or_default() };
        put(&maps.seats, &number.to_ne_bytes(), value.bytes())?;
        if let Some(state) = hop.and_then(|name| self.hops.get_mut(&name)) {
            state.seats += 1;
        }
        self.seats.insert(share.rule, SeatState { number, hop, alone: None });
        if let Some((_, Some(left))) = known {
            self.leave_hop(left);
        }
        Ok(Some(number))
    }

    /// Of a share that has a seat.
    fn hop_number(&self, share: &Share) -> u32 {
        let state = share.to.and_then(|to| self.hops.get(&(to.host, to.address, to.router)));
        state.map_or(HOP_NONE, |state| state.number)
    }

    fn take_hop(&mut self, maps: &Maps, name: HopName) -> io::Result<Option<u32>> {
        if let Some(state) = self.hops.get(&name) {
            return Ok(Some(state.number));
        }
        let Some(number) = self.hop_numbers.take() else { return Ok(None) };
        write_hop(maps, number, layout::hop_of(name.1, name.2, None, self.key(name)))?;
        self.hops.insert(name, HopState { number, seats: 0, way: None });
        self.at.insert((name.1, name.0, name.2));
        Ok(Some(number))
    }

    /// One rule less leads to a next hop.
    fn leave_hop(&mut self, name: HopName) {
        let Some(state) = self.hops.get_mut(&name) else { return };
        state.seats -= 1;
        if state.seats == 0 {
            self.hop_numbers.back.push_back(state.number);
            self.hops.remove(&name);
            self.at.remove(&(name.1, name.0, name.2));
        }
    }

    /// The host's, or that of whoever is known to be at the address.
    fn key(&self, (host, address, _): HopName) -> Option<&[u8; 16]> {
        host.and_then(|host| self.keys.get(&host)).or_else(|| self.keys_at.get(&address))
    }

    /// Gives back what `before` held and `kept` does not.
    fn retire(&mut self, maps: &Maps, before: Held, kept: &[RuleId]) -> io::Result<()> {
        if let Some(list) = before.list {
            maps.lists.delete(&list.to_ne_bytes()).map_err(io::Error::other)?;
            self.list_numbers.back.push_back(list);
        }
        let rules = before.shares.into_iter().map(|share| share.rule);
        for rule in rules.filter(|rule| !kept.contains(rule)) {
            let usage = self.usage(maps, rule).filter(|usage| usage.packets > 0);
            self.credits.extend(usage.map(|usage| (rule, usage)));
            let Some(seat) = self.seats.remove(&rule) else { continue };
            self.seat_numbers.back.push_back(seat.number);
            if let Some(name) = seat.hop {
                self.leave_hop(name);
            }
        }
        Ok(())
    }

    /// Finds out how packets to next hops leave this host: to all, or to those only that have no way yet.
    pub fn find_ways(
        &mut self,
        maps: &Maps,
        all: bool,
        mut find: impl FnMut(SocketAddr) -> Option<Way>,
    ) -> io::Result<()> {
        let mut changed = Vec::new();
        for (name, state) in self.hops.iter_mut().filter(|(_, state)| all || state.way.is_none()) {
            let way = find(name.1);
            if way != state.way {
                state.way = way;
                changed.push(*name);
            }
        }
        changed.into_iter().try_for_each(|name| self.write_hop_of(maps, name))
    }

    fn write_hop_of(&self, maps: &Maps, name: HopName) -> io::Result<()> {
        let Some(state) = self.hops.get(&name) else { return Ok(()) };
        write_hop(maps, state.number, layout::hop_of(name.1, name.2, state.way.as_ref(), self.key(name)))
    }

    /// Whether a next hop has no way yet.
    pub fn is_lost(&self) -> bool {
        self.hops.values().any(|state| state.way.is_none())
    }

    /// The hop key that is shared with a neighbour, or none any more.
    pub fn set_hop_key(&mut self, maps: &Maps, neighbour: Neighbour, key: Option<[u8; 16]>) -> io::Result<()> {
        let concerned: Vec<HopName> = match neighbour {
            Neighbour::At(address) => {
                match key {
                    None => {
                        self.keys_at.remove(&address);
                        // Absent where it had none before.
                        let _ = maps.neighbours.delete(layout::neighbour_of(address).bytes());
                    }
                    Some(key) => {
                        self.keys_at.insert(address, key);
                        let value = layout::hop_key { words: layout::key_words(&key) };
                        put(&maps.neighbours, layout::neighbour_of(address).bytes(), value.bytes())?;
                    }
                }
                let at = self.at.range((address, None, false)..).take_while(|(of, ..)| *of == address);
                at.map(|(address, host, router)| (*host, *address, *router)).collect()
            }
            Neighbour::Host(host) => {
                match key {
                    None => self.keys.remove(&host),
                    Some(key) => self.keys.insert(host, key),
                };
                let of_host =
                    self.hops.range((Some(host), LEAST, false)..).take_while(|((of, ..), _)| *of == Some(host));
                of_host.map(|(name, _)| *name).collect()
            }
        };
        concerned.into_iter().try_for_each(|name| self.write_hop_of(maps, name))
    }
}

/// Before every other address.
const LEAST: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Makes a list whole, then puts it in the place of the one before.
fn write_list(maps: &Maps, number: u32, seats: impl Iterator<Item = u32>) -> io::Result<()> {
    let bytes: Vec<u8> = seats.flat_map(u32::to_ne_bytes).collect();
    let len = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    let list = MapHandle::create(MapType::Array, Some("bucket_list"), 4, len, 1, &options).map_err(io::Error::other)?;
    put(&list, &0_u32.to_ne_bytes(), &bytes)?;
    put(&maps.lists, &number.to_ne_bytes(), &list.as_fd().as_raw_fd().to_ne_bytes())
}

/// Writes the version that is not in force, then puts it in force.
fn write_hop(maps: &Maps, number: u32, version: layout::hop_version) -> io::Result<()> {
    let key = number.to_ne_bytes();
    let bytes = maps.hops.lookup(&key, MapFlags::ANY).map_err(io::Error::other)?;
    let mut hop = bytes.and_then(|bytes| layout::hop::read(&bytes)).unwrap_or_default();
    let next = (hop.active + 1) % 2;
    hop.versions[next as usize] = version;
    put(&maps.hops, &key, hop.bytes())?;
    hop.active = next;
    put(&maps.hops, &key, hop.bytes())
}

fn sum(one: layout::usage, other: layout::usage) -> layout::usage {
    layout::usage { packets: one.packets + other.packets, last_ns: one.last_ns.max(other.last_ns) }
}

fn get<T: Plain>(map: &impl MapCore, key: &[u8]) -> Option<T> {
    T::read(&map.lookup(key, MapFlags::ANY).ok().flatten()?)
}

fn put(map: &impl MapCore, key: &[u8], value: &[u8]) -> io::Result<()> {
    map.update(key, value, MapFlags::ANY).map_err(io::Error::other)
}
