//! The service table: prefix → rules, longest prefix first (DESIGN §8; Serval §4.2).
//!
//! Within a prefix the highest priority with a usable rule wins; among its rules an instance is picked by weighted
//! rendezvous hashing, so that a retransmission finds the same instance and a change of the set moves only what it
//! must. What is hashed is one of 4096 buckets that the packet's sticky number falls into: whoever has the list of a
//! set's buckets need not hash (docs/decisions/0022). Where nothing is usable the next priority answers, then the next
//! shorter prefix.

pub mod changes;
pub mod lifetime;
pub mod middlebox;
pub mod resolver;
pub(crate) mod surrogate;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::hash::Hasher;
use core::net::{IpAddr, SocketAddr};

use siphasher::sip::SipHasher13;

use crate::table::changes::{Changes, Part};
use crate::table::middlebox::Middlebox;
use crate::table::resolver::ResolverId;
use crate::table::surrogate::Place;
use crate::types::key::HostId;
use crate::types::name::{Prefix, ServiceId};
use crate::types::time::Instant;
use crate::types::tuple::GREETING;

mod bucket;

use bucket::Bid;
pub use bucket::{BUCKETS, bucket};

/// The destination port of whoever means the service, on whatever port its instances listen: programs that know names
/// and no ports. No program listens there, since it is the SAL's own.
pub const SERVICE_PORT: u16 = margay_wire::PORT;
/// Port of every name at which the agent of an instance, and none of its programs, takes connections that another
/// instance hands over.
pub const HAND_OVER_PORT: u16 = margay_wire::PORT + 1;

/// Names a rule. Never used again once the rule is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(pub u64);

/// The table is at its bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the service table is full: {limit} rules; withdraw services, or raise the limit")]
pub struct TableError {
    /// The bound.
    pub limit: usize,
}

/// Where a FORWARD rule sends a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextHop {
    /// SAL address of the host or router.
    pub address: SocketAddr,
    /// The host, where it is known: its hop key tags the packet.
    pub host: Option<HostId>,
    /// It is a router above or beside this one, which resolves further: what comes from such a router does not go there
    /// ([`crate::resolve::way`]).
    pub router: bool,
}

/// Who may connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowItem {
    /// This host.
    Host(HostId),
    /// Members of the service's authority in this group.
    Group(u32),
    /// Members of this authority.
    Authority([u8; 8]),
}

/// The allow list of a listener (DESIGN §7).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Allow {
    /// Members of the service's own authority.
    #[default]
    Authority,
    /// Everybody who can prove a host key.
    Any,
    /// Only these.
    List(Vec<AllowItem>),
}

/// A listening socket on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demux {
    /// Where it listens; an unspecified address is a wildcard.
    pub listener: SocketAddr,
    /// Where clients of the other family than `listener` is of are taken, on the same port: by the same socket, which
    /// takes both, or by one beside it. `None`: at `listener`, which sees surrogates of them.
    pub other_family: Option<IpAddr>,
    /// Bound to an address of its own, each socket is looked up for connections that come for the host's virtual
    /// address, as those of a wildcard do.
    pub is_looked_up: bool,
    /// The port of the service that it answers; `None`: every port.
    pub service_port: Option<u16>,
    /// IP protocol 6 or 17; `None`: both.
    pub protocol: Option<u8>,
    /// Who may connect.
    pub allow: Allow,
}

impl Demux {
    /// Whether clients that ask for a port of the service are taken there. Where agents hand over connections, no
    /// program answers, and nobody is taken who means whatever port there is.
    pub(crate) const fn answers(&self, port: u16) -> bool {
        match self.service_port {
            Some(HAND_OVER_PORT) => port == HAND_OVER_PORT,
            _ if port == HAND_OVER_PORT => false,
            Some(own) => port == own || port == SERVICE_PORT,
            None => true,
        }
    }

    /// Where a client is taken: by its own family, where that can be.
    pub(crate) fn place_for(&self, client: IpAddr) -> Place {
        let is_fit = |address: &IpAddr| address.is_ipv4() == client.is_ipv4();
        let other = self.other_family.filter(|other| is_fit(other) && !is_fit(&self.listener.ip()));
        let listener = other.map_or(self.listener, |other| SocketAddr::new(other, self.listener.port()));
        Place { listener, is_looked_up: self.is_looked_up }
    }
}

/// What to do with a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send it on.
    Forward(NextHop),
    /// Send it on, and copies to those of its prefix and priority that are for all, too.
    ForwardAll(NextHop),
    /// Give it to a listener here.
    Demux(Demux),
    /// Give sessions to a box here, and go on with what it lets pass.
    Box(Middlebox),
    /// Hold it until this resolver has said where it goes.
    Delay(ResolverId),
    /// Discard it.
    Drop,
}

/// One rule of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Higher first.
    pub priority: u32,
    /// Share among rules of the same priority; zero takes no new flows.
    pub weight: u32,
    /// What to do.
    pub action: Action,
}

/// What became of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// When it was added.
    pub since: Instant,
    /// First packets that it decided upon: of this host's programs, and of other hosts where this one is a router.
    pub packets: u64,
    /// When it decided upon the last of them.
    pub last: Option<Instant>,
}

impl Action {
    /// Where it leads, if it leads to another host.
    pub const fn next_hop(&self) -> Option<&NextHop> {
        match self {
            Self::Forward(hop) | Self::ForwardAll(hop) => Some(hop),
            Self::Demux(_) | Self::Box(_) | Self::Delay(_) | Self::Drop => None,
        }
    }

    /// A number that stands for where the action leads: the same on every router and after every restart, so that all
    /// of them pick the same instance for a copy of one SYN. `ordinal` tells apart rules that lead to one place.
    fn point(&self, ordinal: u32) -> u64 {
        // Written byte by byte: `Hash` may differ between machines and compilers.
        let mut hasher = SipHasher13::new();
        let place = |address: &SocketAddr| {
            let mut bytes = [0; 18];
            let ip = match address.ip() {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            bytes[..16].copy_from_slice(&ip.octets());
            bytes[16..].copy_from_slice(&address.port().to_be_bytes());
            bytes
        };
        hasher.write(&ordinal.to_be_bytes());
        match self {
            // A host keeps its place in the order when it comes back from another address.
            Self::Forward(NextHop { host: Some(host), .. }) | Self::ForwardAll(NextHop { host: Some(host), .. }) => {
                hasher.write(&host.0);
            }
            Self::Forward(NextHop { address, .. }) | Self::ForwardAll(NextHop { address, .. }) => {
                hasher.write(&place(address));
            }
            Self::Demux(demux) => hasher.write(&place(&demux.listener)),
            Self::Delay(resolver) => hasher.write(&resolver.0.to_be_bytes()),
            Self::Box(_) | Self::Drop => {}
        }
        hasher.finish()
    }
}

/// Whether a rule is there for searches: hosts that look for a router ask by a protocol number that no program has.
pub fn is_answering(rule: &Rule) -> bool {
    matches!(&rule.action, Action::Demux(demux) if demux.protocol == Some(GREETING))
}

#[derive(Clone, Debug)]
struct Seat {
    id: RuleId,
    rule: Rule,
    /// See [`Action::point`]; no two seats of a set have the same.
    point: u64,
}

/// The rules of one prefix, highest priority first.
#[derive(Clone, Debug, Default)]
pub struct RuleSet(Vec<Seat>);

impl RuleSet {
    /// In order of priority.
    pub fn iter(&self) -> impl Iterator<Item = (RuleId, &Rule)> {
        self.0.iter().map(|seat| (seat.id, &seat.rule))
    }

    fn insert(&mut self, id: RuleId, rule: Rule) {
        let is_free = |point: &u64| self.0.iter().all(|seat| seat.point != *point);
        let point = (0..).map(|ordinal| rule.action.point(ordinal)).find(is_free).unwrap_or(id.0);
        let at = self.0.partition_point(|seat| seat.rule.priority >= rule.priority);
        if self.0.is_empty() {
            // Most names have one rule, and there may be a million of them.
            self.0.reserve_exact(1);
        }
        self.0.insert(at, Seat { id, rule, point });
    }

    fn remove(&mut self, id: RuleId) -> Option<Rule> {
        let at = self.0.iter().position(|seat| seat.id == id)?;
        Some(self.0.remove(at).rule)
    }

    /// The rule for `sticky` among the usable ones of the highest priority that has any.
    fn pick(&self, sticky: u64, usable: &impl Fn(&Rule) -> bool) -> Option<&Seat> {
        let fit = |seat: &&Seat| seat.rule.weight > 0 && usable(&seat.rule);
        let first = self.0.iter().position(|seat| fit(&seat))?;
        let priority = self.0[first].rule.priority;
        let level = self.0[first..].iter().take_while(|seat| seat.rule.priority == priority).filter(fit);
        let bucket = bucket(sticky);
        level.max_by_key(|seat| Bid::new(bucket, seat.point, seat.rule.weight))
    }

    /// What it says of packets from other hosts, as far as that is the same for all of them.
    fn outcome(&self) -> Outcome {
        let takes = |seat: &&Seat| seat.rule.weight > 0;
        let Some(first) = self.0.iter().find(takes) else { return Outcome::Shorter };
        let level = self.0.iter().filter(|seat| takes(seat) && seat.rule.priority == first.rule.priority);
        let share = |seat: &Seat| {
            let to = match &seat.rule.action {
                Action::Forward(hop) => Some(*hop),
                Action::Drop => None,
                Action::ForwardAll(_) | Action::Demux(_) | Action::Box(_) | Action::Delay(_) => return None,
            };
            Some(Share { rule: seat.id, to, point: seat.point, weight: seat.rule.weight })
        };
        level.map(share).collect::<Option<Vec<Share>>>().map_or(Outcome::Depends, Outcome::Shares)
    }
}

/// What the rules of one prefix say of packets from other hosts that a router forwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// No rule takes new flows: the next shorter prefix answers.
    Shorter,
    /// The core decides: there is a listener here, whose port and protocol matter, a resolver to be asked, a copy to be
    /// sent to several, or a rule that lives by being used.
    Depends,
    /// By bucket, one of these. Never empty.
    Shares(Vec<Share>),
}

/// A rule that takes a share of a prefix's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Which.
    pub rule: RuleId,
    /// Where they go; `None`: nowhere.
    pub to: Option<NextHop>,
    point: u64,
    weight: u32,
}

impl Share {
    /// Which of `shares` has each bucket, by number.
    pub fn holders(shares: &[Self]) -> Vec<u32> {
        (0..BUCKETS).map(|bucket| Self::holder(shares, bucket, 0..shares.len() as u32)).collect()
    }

    /// The same, where it is known who had each bucket of the shares `before`: nearly all keep theirs, so that one
    /// change of many shares costs two hashes for each bucket, not one for each share.
    pub fn holders_after(shares: &[Self], before: &[Self], holders: &[u32]) -> Vec<u32> {
        let mut fresh: BTreeMap<RuleId, u32> = shares.iter().map(|share| share.rule).zip(0..).collect();
        let mut kept = Vec::with_capacity(before.len());
        for share in before {
            let now = fresh.get(&share.rule).copied().filter(|at| shares[*at as usize].is_as_big_as(share));
            kept.push(now);
            if now.is_some() {
                fresh.remove(&share.rule);
            }
        }
        let fresh: Vec<u32> = fresh.into_values().collect();
        let after = |(bucket, holder): (usize, &u32)| match kept.get(*holder as usize).copied().flatten() {
            Some(at) => Self::holder(shares, bucket, fresh.iter().copied().chain([at])),
            None => Self::holder(shares, bucket, 0..shares.len() as u32),
        };
        holders.iter().enumerate().map(after).collect()
    }

    fn is_as_big_as(&self, other: &Self) -> bool {
        (self.point, self.weight) == (other.point, other.weight)
    }

    /// Which of some of `shares` has a bucket. Not none, by whoever made them; none is as good as the first then.
    fn holder(shares: &[Self], bucket: usize, among: impl Iterator<Item = u32>) -> u32 {
        let bid = |at: &u32| {
            let share = &shares[*at as usize];
            Bid::new(bucket as u64, share.point, share.weight)
        };
        among.max_by_key(bid).unwrap_or(0)
    }
}

/// What the table says of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution<'a> {
    /// A listener here.
    Demux(RuleId, &'a Demux),
    /// A box here.
    Box(RuleId, &'a Middlebox),
    /// Elsewhere.
    Forward(RuleId, &'a NextHop),
    /// Wait for this resolver.
    Delay(RuleId, ResolverId),
    /// Discard.
    Drop(RuleId),
    /// No rule.
    None,
}

impl Resolution<'_> {
    /// The rule that decides.
    pub fn rule(&self) -> Option<RuleId> {
        match self {
            Self::Demux(id, _) | Self::Box(id, _) | Self::Forward(id, _) | Self::Delay(id, _) | Self::Drop(id) => {
                Some(*id)
            }
            Self::None => None,
        }
    }
}

/// The table.
#[derive(Debug)]
pub struct ServiceTable {
    /// Lengths in use, longest first; a lookup is one search per length. Real tables have few lengths.
    by_bits: BTreeMap<u16, BTreeMap<ServiceId, RuleSet>>,
    by_id: BTreeMap<RuleId, (Prefix, Usage)>,
    next_id: u64,
    limit: usize,
    changes: Changes<Prefix>,
}

impl ServiceTable {
    /// An empty table for at most `limit` rules.
    pub fn new(limit: usize) -> Self {
        Self { by_bits: BTreeMap::new(), by_id: BTreeMap::new(), next_id: 1, limit, changes: Changes::new(limit) }
    }

    /// Adds a rule.
    ///
    /// # Errors
    ///
    /// The table is full.
    pub fn insert(&mut self, now: Instant, prefix: Prefix, rule: Rule) -> Result<RuleId, TableError> {
        let id = RuleId(self.next_id);
        self.insert_as(now, id, prefix, rule).map(|()| id)
    }

    /// Adds a rule under a number that no rule has; numbers given from now on are higher.
    ///
    /// # Errors
    ///
    /// The table is full.
    pub fn insert_as(&mut self, now: Instant, id: RuleId, prefix: Prefix, rule: Rule) -> Result<(), TableError> {
        if self.by_id.len() >= self.limit {
            return Err(TableError { limit: self.limit });
        }
        let prefix = Prefix::new(prefix.id, prefix.bits);
        self.next_id = self.next_id.max(id.0.saturating_add(1));
        self.by_bits.entry(prefix.bits).or_default().entry(prefix.id).or_default().insert(id, rule);
        self.changes.note(prefix);
        self.by_id.insert(id, (prefix, Usage { since: now, packets: 0, last: None }));
        Ok(())
    }

    /// Makes a rule say something else; its number, its prefix and its usage stay. False if there is no such rule.
    pub fn change(&mut self, id: RuleId, rule: Rule) -> bool {
        let Some((prefix, _)) = self.by_id.get(&id) else { return false };
        self.changes.note(*prefix);
        let set = self.by_bits.get_mut(&prefix.bits).and_then(|sets| sets.get_mut(&prefix.id));
        let Some(set) = set.filter(|set| set.iter().any(|(known, _)| known == id)) else { return false };
        set.remove(id);
        set.insert(id, rule);
        true
    }

    /// Takes a rule out.
    pub fn remove(&mut self, id: RuleId) -> Option<(Prefix, Rule)> {
        let (prefix, _) = self.by_id.remove(&id)?;
        let of_length = self.by_bits.get_mut(&prefix.bits)?;
        let set = of_length.get_mut(&prefix.id)?;
        let rule = set.remove(id)?;
        if set.0.is_empty() {
            of_length.remove(&prefix.id);
        }
        if of_length.is_empty() {
            self.by_bits.remove(&prefix.bits);
        }
        self.changes.note(prefix);
        Some((prefix, rule))
    }

    /// Whoever holds a copy is to look at a rule again.
    pub(crate) fn touch(&mut self, id: RuleId) {
        if let Some((prefix, _)) = self.by_id.get(&id) {
            self.changes.note(*prefix);
        }
    }

    /// Keeps note of what changes from now on, for whoever holds a copy.
    pub(crate) const fn follow(&mut self) {
        self.changes.follow();
    }

    pub(crate) const fn changes(&mut self) -> &mut Changes<Prefix> {
        &mut self.changes
    }

    pub(crate) fn has_news(&self) -> bool {
        self.changes.has_news()
    }

    /// What up to `max` prefixes say that have changed; whether the copy must begin anew.
    pub(crate) fn take_changes(&mut self, max: usize) -> Part<(Prefix, Outcome)> {
        let prefixes = |(bits, sets): (&u16, &BTreeMap<ServiceId, RuleSet>)| {
            let bits = *bits;
            sets.keys().map(move |id| Prefix { id: *id, bits }).collect::<Vec<_>>()
        };
        let begins_anew = self.changes.begin_anew(self.by_bits.iter().flat_map(prefixes));
        let outcome = |prefix: Prefix| {
            let set = self.by_bits.get(&prefix.bits).and_then(|sets| sets.get(&prefix.id));
            (prefix, set.map_or(Outcome::Shorter, RuleSet::outcome))
        };
        Part { begins_anew, changed: self.changes.take(max).into_iter().map(outcome).collect() }
    }

    /// A rule has decided upon a first packet.
    pub fn note_use(&mut self, now: Instant, id: RuleId) {
        if let Some((_, usage)) = self.by_id.get_mut(&id) {
            usage.packets += 1;
            usage.last = Some(now);
        }
    }

    /// A rule has decided upon packets elsewhere, the last of them at `last`.
    pub(crate) fn add_use(&mut self, id: RuleId, packets: u64, last: Option<Instant>) {
        if let Some((_, usage)) = self.by_id.get_mut(&id) {
            usage.packets += packets;
            usage.last = usage.last.max(last);
        }
    }

    /// What became of a rule.
    pub fn usage(&self, id: RuleId) -> Option<Usage> {
        self.by_id.get(&id).map(|(_, usage)| *usage)
    }

    /// One rule.
    pub fn get(&self, id: RuleId) -> Option<(Prefix, &Rule)> {
        let (prefix, _) = self.by_id.get(&id)?;
        let set = self.by_bits.get(&prefix.bits)?.get(&prefix.id)?;
        set.iter().find(|(known, _)| *known == id).map(|(_, rule)| (*prefix, rule))
    }

    /// How many rules there are.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// The rules for all of a prefix and priority, but for `id`; none, unless it is one of them.
    pub(crate) fn beside(&self, id: RuleId) -> impl Iterator<Item = (RuleId, &Rule)> {
        let is_for_all = |rule: &&Rule| matches!(rule.action, Action::ForwardAll(_));
        let found = self.get(id).filter(|(_, rule)| is_for_all(rule));
        let priority = found.map(|(_, rule)| rule.priority);
        let set = found.and_then(|(prefix, _)| self.by_bits.get(&prefix.bits)?.get(&prefix.id));
        set.into_iter().flat_map(RuleSet::iter).filter(move |(other, rule)| {
            is_for_all(rule) && *other != id && Some(rule.priority) == priority && rule.weight > 0
        })
    }

    /// Every rule, longest prefixes last.
    pub fn iter(&self) -> impl Iterator<Item = (Prefix, RuleId, &Rule)> {
        self.by_bits.iter().flat_map(|(bits, sets)| {
            sets.iter().flat_map(move |(id, set)| {
                set.iter().map(move |(rule_id, rule)| (Prefix { id: *id, bits: *bits }, rule_id, rule))
            })
        })
    }

    /// The sets of rules that cover `service`, longest prefix first.
    fn covering(&self, service: ServiceId) -> impl Iterator<Item = &RuleSet> {
        self.by_bits.iter().rev().filter_map(move |(bits, sets)| sets.get(&Prefix::new(service, *bits).id))
    }

    /// The same, with their prefixes.
    pub fn covering_sets(&self, service: ServiceId) -> impl Iterator<Item = (Prefix, &RuleSet)> {
        self.by_bits.iter().rev().filter_map(move |(bits, sets)| {
            let prefix = Prefix::new(service, *bits);
            sets.get(&prefix.id).map(|set| (prefix, set))
        })
    }

    /// The rules of the longest prefix that covers `service`.
    pub fn lookup(&self, service: &ServiceId) -> Option<&RuleSet> {
        self.covering(*service).next()
    }

    /// What to do with a packet to `service`, among rules that are `usable` for it.
    pub fn resolve(&self, service: &ServiceId, sticky: u64, usable: impl Fn(&Rule) -> bool) -> Resolution<'_> {
        self.resolve_last(service, sticky, usable, |_| false)
    }

    /// The same; of each prefix, rules that are `last` are taken only where there are no others.
    pub(crate) fn resolve_last(
        &self,
        service: &ServiceId,
        sticky: u64,
        usable: impl Fn(&Rule) -> bool,
        last: impl Fn(&Rule) -> bool,
    ) -> Resolution<'_> {
        let first = |rule: &Rule| usable(rule) && !last(rule);
        match self.covering(*service).find_map(|set| set.pick(sticky, &first).or_else(|| set.pick(sticky, &usable))) {
            None => Resolution::None,
            Some(seat) => match &seat.rule.action {
                Action::Demux(demux) => Resolution::Demux(seat.id, demux),
                Action::Box(middlebox) => Resolution::Box(seat.id, middlebox),
                Action::Forward(hop) | Action::ForwardAll(hop) => Resolution::Forward(seat.id, hop),
                Action::Delay(resolver) => Resolution::Delay(seat.id, *resolver),
                Action::Drop => Resolution::Drop(seat.id),
            },
        }
    }
}

#[cfg(test)]
mod test;
