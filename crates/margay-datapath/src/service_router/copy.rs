//! What of the core's service table lies in the kernel's maps, and where. Nothing is overwritten that a packet on its
//! way through the program may still need: what replaces it is made first.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
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
use super::cells::Cells;
use super::layout::{self, HOP_NONE, Route};
use crate::kernel::plain::Plain;

/// Lengths of prefixes in use at once (`ROUTER_LENGTHS`).
pub(super) const LENGTHS_MAX: usize = 32;

/// The maps that this process writes.
pub(super) struct Maps {
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
    /// What the program is told of it.
    route: Route,
    /// The prefix and all its rules found room.
    is_whole: bool,
}

/// The copy. An error leaves it of no use: the program must not decide by it.
pub(super) struct Copy {
    cells: Cells,
    held: HashMap<Prefix, Held>,
    seats: HashMap<RuleId, SeatState>,
    seat_numbers: Numbers,
    list_numbers: Numbers,
    hops: BTreeMap<HopName, HopState>,
    /// Those that have no way yet.
    lost: BTreeSet<HopName>,
    hop_numbers: Numbers,
    /// Names of next hops, by address.
    at: BTreeSet<(SocketAddr, Option<HostId>, bool)>,
    keys: HashMap<HostId, [u8; 16]>,
    keys_at: HashMap<SocketAddr, [u8; 16]>,
    lengths: BTreeMap<u16, Length>,
    filters: Numbers,
    /// What rules have done that are no more in force here.
    credits: Vec<(RuleId, layout::usage)>,
}

impl Copy {
    pub fn new(cells: Cells, rules_max: u32, lists_max: u32, hops_max: u32) -> Self {
        Self {
            cells,
            held: HashMap::new(),
            seats: HashMap::new(),
            seat_numbers: Numbers::new(rules_max),
            list_numbers: Numbers::new(lists_max),
            hops: BTreeMap::new(),
            lost: BTreeSet::new(),
            hop_numbers: Numbers::new(hops_max),
            at: BTreeSet::new(),
            keys: HashMap::new(),
            keys_at: HashMap::new(),
            lengths: BTreeMap::new(),
            filters: Numbers::new(LENGTHS_MAX as u32),
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

    /// Tells the program which lengths to look for.
    pub fn set_lengths(&mut self, lengths: &[(u16, Option<u32>)]) {
        self.cells.set_lengths(lengths);
    }

    /// Bytes that the table of prefixes takes.
    pub fn table_bytes(&self) -> usize {
        self.cells.bytes()
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
        let in_cell = |prefix| self.cells.usage(&self.cells.active(), &prefix).ok();
        Some(sum(seat.usage, state.alone.and_then(in_cell).unwrap_or_default()))
    }

    /// Writes what is said of a prefix. What its only rule has done is brought to that rule's seat.
    fn write_route(&mut self, maps: &Maps, prefix: Prefix, route: Route) -> io::Result<bool> {
        let filter = self.lengths.get(&prefix.bits).and_then(|length| length.filter);
        let written = self.cells.write_active(&prefix, route, filter)?;
        let rule = self.held.get(&prefix).and_then(|held| held.shares.first()).map(|share| share.rule);
        let Some(state) = rule.and_then(|rule| self.seats.get_mut(&rule)) else { return Ok(written.has_room) };
        state.alone = None;
        let key = state.number.to_ne_bytes();
        if written.usage.packets > 0 {
            let seat: layout::seat = get(&maps.seats, &key).unwrap_or_default();
            let usage = sum(seat.usage, written.usage);
            put(&maps.seats, &key, layout::seat { usage, ..seat }.bytes())?;
        }
        Ok(written.has_room)
    }

    /// Makes the table anew where it has no more room.
    fn make_room(&mut self) -> io::Result<()> {
        if !self.cells.is_full(self.held.len()) {
            return Ok(());
        }
        let mut table = self.cells.prepare(self.held.len())?;
        for (prefix, held) in &mut self.held {
            let filter = self.lengths.get(&prefix.bits).and_then(|length| length.filter);
            let has_room = self.cells.write(&mut table, prefix, held.route, filter)?.has_room;
            // Whoever found none is written again when it is next heard of.
            held.is_whole &= has_room;
        }
        let before = self.cells.put_in_force(table)?;
        for prefix in self.seats.values().filter_map(|seat| seat.alone) {
            let usage = self.cells.usage(&before, &prefix)?;
            if usage.packets > 0 {
                self.cells.add_usage(&table, &prefix, usage)?;
            }
        }
        self.cells.release(before)
    }

    /// Brings one prefix up to date.
    pub fn apply(&mut self, maps: &Maps, prefix: Prefix, outcome: &Outcome) -> io::Result<()> {
        let shares = match outcome {
            Outcome::Shorter => {
                // Absent where it had no rule that takes packets before, either.
                if !self.held.contains_key(&prefix) {
                    return Ok(());
                }
                self.write_route(maps, prefix, Route::Gone)?;
                let Some(before) = self.held.remove(&prefix) else { return Ok(()) };
                self.forget_length(prefix.bits);
                return self.retire(maps, before, &HashSet::new());
            }
            Outcome::Depends => &[][..],
            Outcome::Shares(shares) => shares,
        };
        if self.held.get(&prefix).is_some_and(|held| held.is_whole && held.shares == shares) {
            return Ok(());
        }
        self.make_room()?;
        if !self.held.contains_key(&prefix) {
            self.note_length(prefix.bits);
        }
        let mut held = self.take_seats(maps, prefix, shares)?;
        held.is_whole &= self.write_route(maps, prefix, held.route)?;
        if matches!(held.route, Route::Hop(_)) {
            let alone = held.shares.first().and_then(|share| self.seats.get_mut(&share.rule));
            alone.into_iter().for_each(|seat| seat.alone = Some(prefix));
        }
        let kept: HashSet<RuleId> = held.shares.iter().map(|share| share.rule).collect();
        match self.held.insert(prefix, held) {
            Some(before) => self.retire(maps, before, &kept),
            None => Ok(()),
        }
    }

    fn note_length(&mut self, bits: u16) {
        let (filters, cells) = (&mut self.filters, &mut self.cells);
        let length = self.lengths.entry(bits).or_insert_with(|| {
            let filter = filters.take();
            filter.into_iter().for_each(|filter| cells.empty_filter(filter));
            Length { count: 0, filter }
        });
        length.count += 1;
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
    fn take_seats(&mut self, maps: &Maps, prefix: Prefix, shares: &[Share]) -> io::Result<Held> {
        let mut held = Held::default();
        let mut numbers = Vec::with_capacity(shares.len());
        for share in shares {
            let Some(number) = self.take_seat(maps, share)? else { return Ok(held) };
            numbers.push(number);
            held.shares.push(*share);
        }
        held.route = match numbers[..] {
            [] => Route::Agent,
            [_] => Route::Hop(self.hop_number(&shares[0])),
            _ => {
                let Some(number) = self.list_numbers.take() else { return Ok(held) };
                held.list = Some(number);
                held.holders = match self.held.get(&prefix) {
                    Some(before) if before.list.is_some() => {
                        Share::holders_after(shares, &before.shares, &before.holders)
                    }
                    _ => Share::holders(shares),
                };
                write_list(maps, number, held.holders.iter().map(|at| numbers[*at as usize]))?;
                Route::Buckets(number)
            }
        };
        held.is_whole = true;
        Ok(held)
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
        self.lost.insert(name);
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
            self.lost.remove(&name);
            self.at.remove(&(name.1, name.0, name.2));
        }
    }

    /// The host's, or that of whoever is known to be at the address.
    fn key(&self, (host, address, _): HopName) -> Option<&[u8; 16]> {
        host.and_then(|host| self.keys.get(&host)).or_else(|| self.keys_at.get(&address))
    }

    /// Gives back what `before` held and `kept` does not.
    fn retire(&mut self, maps: &Maps, before: Held, kept: &HashSet<RuleId>) -> io::Result<()> {
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
        let asked: Vec<HopName> =
            if all { self.hops.keys().copied().collect() } else { self.lost.iter().copied().collect() };
        let mut changed = Vec::new();
        for name in asked {
            let Some(state) = self.hops.get_mut(&name) else { continue };
            let way = find(name.1);
            match way {
                Some(_) => self.lost.remove(&name),
                None => self.lost.insert(name),
            };
            if way != state.way {
                state.way = way;
                changed.push(name);
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
        !self.lost.is_empty()
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
