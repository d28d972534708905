//! Who is registered with this router now: hosts, what they serve, and the rules that lead there.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use margay_core::key::HostId;
use margay_core::name::{Prefix, SERVICE_BITS, ServiceId};
use margay_core::table::{Action, NextHop, Rule};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::allotment::{Allotments, Server};
use super::elsewhere::{self, Elsewhere};
use super::entry::{Entry, Listed};
use super::fence::Fences;
use super::leave::{Departure, Leave};
use super::recent::Recent;
use super::{Instance, ZeroWeight};
use crate::SalControl;
use crate::cluster::{ByRouter, Served, claimed_as};
use crate::wide_area::Census;

mod error;
mod fenced;

pub use error::RollError;
pub use fenced::OwnFence;

/// Prefixes of one host.
pub const PREFIXES_MAX: usize = 1000;
/// Hosts of one router.
const HOSTS_MAX: usize = 10_000;
/// Names of a host that is gone which are taken out at once.
const DEPARTING_MAX: usize = 32;

/// A host, in one authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The host.
    pub host: HostId,
    /// Block of the authority.
    pub authority: [u8; 8],
}

/// A service that has no partitions is registered by its name's own bits, one that has by its prefix: to agree about.
fn twin(prefix: &Prefix) -> Option<Prefix> {
    let whole = Prefix::new(prefix.id, SERVICE_BITS);
    match prefix.bits {
        SERVICE_BITS => Some(Prefix::from(prefix.id)),
        256 if whole.id == prefix.id => Some(whole),
        _ => None,
    }
}

/// As lists have them.
fn in_order(one: &Instance, other: &Instance) -> Ordering {
    (&one.name, &one.host_name, one.host).cmp(&(&other.name, &other.host_name, other.host))
}

/// How a host serves a prefix. The default takes no new flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Share among instances of one priority.
    pub weight: u32,
    /// Higher first.
    pub priority: u32,
    /// The service has 2^bits partitions; zero: none.
    pub partition_bits: u8,
    /// No other host may serve it.
    pub exclusive: bool,
    /// With `exclusive`: clients of a former holder are told.
    pub fenced: bool,
    /// Datagrams of one unconnected socket are for one instance.
    pub sticky: bool,
    /// For how long clients are to wait for the host when it is silent, in milliseconds; all ones: for ever; `None`: as
    /// long as they do by themselves. Clients hear of this from the host, not from routers.
    pub give_up_after_ms: Option<u32>,
    /// A drain ends connections that have carried nothing for so long, in milliseconds; `None`: they may finish. For
    /// this host alone; routers are not told.
    pub quiet_ms: Option<u32>,
}

/// A service of the router's own host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnService {
    /// The host as an instance of it.
    pub instance: Instance,
    /// What leads to its listeners.
    pub actions: Vec<Action>,
    /// The service has 2^bits partitions; zero: none.
    pub partition_bits: u8,
    /// No other host may serve it.
    pub exclusive: bool,
    /// With `exclusive`: clients of a former holder are told.
    pub fenced: bool,
}

impl OwnService {
    fn place(&self) -> Place {
        Place { host: self.instance.host, authority: self.instance.prefix.id.authority() }
    }
}

struct Host {
    /// The stream that speaks for the host now.
    stream: u64,
    address: SocketAddr,
    name: String,
    boot_id: [u8; 16],
    entries: BTreeMap<Prefix, Entry>,
    /// Tells the stream that it was replaced.
    end: Arc<Notify>,
    /// Names that it had for itself and has no longer, and what tells the stream of them.
    given_away: Vec<(Prefix, String)>,
    news: Arc<Notify>,
    /// Counts what is heard of it.
    signs: watch::Receiver<u64>,
    twin: Arc<Mutex<Option<SocketAddr>>>,
}

impl Host {
    fn listed<'a>(&'a self, place: &Place, prefix: &Prefix, entry: &'a Entry) -> Listed<'a> {
        Listed { host: place.host, host_name: &self.name, prefix: *prefix, entry }
    }

    fn list<'a>(&'a self, place: &'a Place) -> impl Iterator<Item = Listed<'a>> {
        self.entries.iter().map(|(prefix, entry)| self.listed(place, prefix, entry))
    }
}

/// Who has registered a prefix, in order. Most names have one host, and a tree of its own for each of a million would
/// be mostly room.
#[derive(Default)]
struct Servers(Vec<Place>);

impl Servers {
    fn insert(&mut self, place: Place) {
        if let Err(at) = self.0.binary_search(&place) {
            if self.0.is_empty() {
                self.0.reserve_exact(1);
            }
            self.0.insert(at, place);
        }
    }

    /// False: nobody is left.
    fn remove(&mut self, place: &Place) -> bool {
        if let Ok(at) = self.0.binary_search(place) {
            self.0.remove(at);
        }
        !self.0.is_empty()
    }
}

/// The roll.
#[derive(Default)]
pub struct Roll {
    hosts: BTreeMap<Place, Host>,
    own: Vec<OwnService>,
    /// Who has registered a prefix; all under one lie together.
    serving: BTreeMap<Prefix, Servers>,
    /// How many of these have each length.
    lengths: BTreeMap<u16, usize>,
    allotments: Allotments,
    next_stream: u64,
    left: [u64; Leave::ALL.len()],
    /// Rises whenever somebody else may serve something.
    changes: watch::Sender<u64>,
    /// Where.
    recent: Recent,
    /// Who is registered with other routers of the cluster.
    elsewhere: Elsewhere,
    /// In a cluster: hosts of which the other routers are to be told.
    untold: Option<BTreeSet<Place>>,
    /// Who holds fenced names.
    fences: Fences,
    /// What other sites hear of it.
    pub census: Census,
}

/// A stream that speaks for a host.
pub struct Seat {
    /// Its number; later ones replace it.
    pub stream: u64,
    /// Somebody took over, or the host was put out.
    pub end: Arc<Notify>,
    /// See [`Roll::take_given_away`].
    pub news: Arc<Notify>,
    /// To be counted up with all that is heard of the host.
    pub signs: watch::Sender<u64>,
    /// Where a host with the same key was refused, until this one has been told.
    pub twin: Arc<Mutex<Option<SocketAddr>>>,
}

/// A host that is registered with the key of one that asks to be, and that is on another boot.
pub struct Elder {
    /// Counts what is heard of it; ends with its stream.
    pub signs: watch::Receiver<u64>,
    /// Where it is told of the other.
    pub twin: Arc<Mutex<Option<SocketAddr>>>,
}

impl Roll {
    /// A host was let in. An earlier stream of it is told to end; what that registered stays until
    /// [`sweep`](Self::sweep), so that a restart of an agent leaves no gap.
    pub fn arrive(
        &mut self,
        place: Place,
        name: &str,
        address: SocketAddr,
        boot_id: [u8; 16],
    ) -> Result<Seat, RollError> {
        if !self.hosts.contains_key(&place) && self.hosts.len() >= HOSTS_MAX {
            return Err(RollError::Hosts);
        }
        self.next_stream += 1;
        let (stream, end, news) = (self.next_stream, Arc::new(Notify::new()), Arc::new(Notify::new()));
        let ((signs, heard), twin) = (watch::channel(0), Arc::default());
        let earlier = self.hosts.remove(&place);
        let entries = earlier.map(|earlier| {
            earlier.end.notify_one();
            if earlier.name != name {
                earlier.entries.keys().for_each(|prefix| self.recent.note(*prefix));
            }
            earlier.entries
        });
        let entries = entries.unwrap_or_default();
        let (name, given_away) = (name.to_owned(), Vec::new());
        let host = Host {
            stream,
            address,
            name,
            boot_id,
            entries,
            end: Arc::clone(&end),
            given_away,
            news: Arc::clone(&news),
            signs: heard,
            twin: Arc::clone(&twin),
        };
        self.hosts.insert(place, host);
        // It may be one of the cluster's routers, which register nothing.
        if self.untold.is_some() {
            self.changed();
        }
        Ok(Seat { stream, end, news, signs, twin })
    }

    /// The host that is registered with this key, where that is on another boot: the same one before it has booted
    /// anew, or a copy of it.
    pub fn elder(&self, place: Place, boot_id: [u8; 16]) -> Option<Elder> {
        let known = self.hosts.get(&place).filter(|known| known.boot_id != boot_id)?;
        let mut signs = known.signs.clone();
        signs.mark_unchanged();
        Some(Elder { signs, twin: Arc::clone(&known.twin) })
    }

    /// A host serves a prefix from now on, or on other terms; false if it did so already. The new rule is there before
    /// the old one goes. What is refused because of another host is not registered any more, either, if it was.
    pub fn register(
        &mut self,
        place: Place,
        stream: u64,
        prefix: Prefix,
        name: &str,
        terms: Terms,
        sal: &dyn SalControl,
    ) -> Result<bool, RollError> {
        if self.hosts.get(&place).is_none_or(|host| host.stream != stream) {
            return Err(RollError::Superseded);
        }
        let Terms { weight, priority, partition_bits, exclusive, .. } = terms;
        if let Err(error) = self.check_others(place.host, &prefix, name, partition_bits, exclusive) {
            self.withdraw(place, stream, &prefix, sal);
            return Err(error);
        }
        self.check_room(place, &prefix)?;
        let host = self.hosts.get_mut(&place).ok_or(RollError::Superseded)?;
        if let Some(known) = host.entries.get_mut(&prefix)
            && (known.terms, known.address, &*known.name) == (terms, host.address, name)
        {
            known.stream = stream;
            return Ok(false);
        }
        let hop = NextHop { address: host.address, host: Some(place.host), router: false };
        let rule = sal.add_rule(prefix, Rule { priority, weight, action: Action::Forward(hop) })?;
        self.census.add(&prefix, name, weight);
        let entry = Entry { rule, stream, name: name.into(), address: host.address, terms, zero_weight: None };
        if let Some(old) = host.entries.insert(prefix, entry) {
            self.census.remove(&prefix, old.terms.weight);
            sal.remove_rule(old.rule);
        }
        let places = self.serving.entry(prefix).or_insert_with(|| {
            *self.lengths.entry(prefix.bits).or_default() += 1;
            Servers::default()
        });
        places.insert(place);
        self.untold.iter_mut().for_each(|untold| untold.extend([place]));
        self.settle(&prefix, sal);
        self.changed_at([prefix]);
        Ok(true)
    }

    /// Why a host has given a prefix that it serves the weight 0.
    pub fn note_zero_weight(&mut self, place: Place, stream: u64, prefix: &Prefix, why: Option<Box<ZeroWeight>>) {
        let host = self.hosts.get_mut(&place).filter(|host| host.stream == stream);
        let Some(entry) = host.and_then(|host| host.entries.get_mut(prefix)) else { return };
        if entry.zero_weight != why {
            entry.zero_weight = why;
            self.untold.iter_mut().for_each(|untold| untold.extend([place]));
            self.changed_at([*prefix]);
        }
    }

    /// Whether a host may have a prefix more.
    ///
    /// # Errors
    ///
    /// It has as many as it may.
    pub fn check_room(&self, place: Place, prefix: &Prefix) -> Result<(), RollError> {
        let is_full = |host: &Host| !host.entries.contains_key(prefix) && host.entries.len() >= PREFIXES_MAX;
        if self.hosts.get(&place).is_some_and(is_full) { Err(RollError::Prefixes) } else { Ok(()) }
    }

    /// Whether other hosts let a host serve a prefix like this.
    ///
    /// # Errors
    ///
    /// One has it for itself, or divides it in another way.
    pub fn check_others(
        &self,
        host: HostId,
        prefix: &Prefix,
        name: &str,
        partition_bits: u8,
        exclusive: bool,
    ) -> Result<(), RollError> {
        self.check_kept(host, prefix, name)?;
        let same = [Some(*prefix), twin(prefix)];
        // Those that are registered agree with each other, so that the first of them speaks for all, and one that is
        // alone has none beside.
        let first = |prefix: &Prefix| self.entries_of(prefix).find(|listed| listed.host != host);
        let registered = same.iter().flatten().filter_map(first).map(|listed| {
            let Terms { partition_bits, exclusive, .. } = listed.entry.terms;
            (listed.host, listed.host_name, partition_bits, exclusive)
        });
        let own = self.own.iter().filter(|own| same.contains(&Some(own.instance.prefix)));
        let own = own.map(|own| (&own.instance, own.partition_bits, own.exclusive));
        let elsewhere = same.iter().flatten().flat_map(|prefix| self.elsewhere.of(prefix));
        let elsewhere = elsewhere.map(|(.., there)| (&there.instance, there.partition_bits, there.exclusive));
        let others = own.chain(elsewhere).map(|(other, bits, alone)| (other.host, &*other.host_name, bits, alone));
        let all = registered.chain(others);
        let name = || name.to_owned();
        for (_, holder, theirs, is_held) in all.filter(|(other, ..)| *other != host) {
            let holder = holder.to_owned();
            if is_held || exclusive {
                return Err(RollError::Held { name: name(), holder });
            }
            if theirs != partition_bits {
                return Err(RollError::Partitions { name: name(), holder, theirs, ours: partition_bits });
            }
        }
        Ok(())
    }

    fn entries_of(&self, prefix: &Prefix) -> impl Iterator<Item = Listed<'_>> {
        let places = self.serving.get(prefix).into_iter().flat_map(|servers| &servers.0);
        places.filter_map(|place| {
            let host = self.hosts.get(place)?;
            Some(host.listed(place, prefix, host.entries.get(prefix)?))
        })
    }

    /// Makes the rules that lead to other routers, and who holds which partition of a service, follow from who serves
    /// it. Where there is neither, nobody else who serves it is looked at.
    fn settle(&mut self, prefix: &Prefix, sal: &dyn SalControl) {
        if self.elsewhere.concerns(prefix) {
            self.settle_elsewhere(prefix, sal);
        }
        // All who serve it divide it in one way.
        let first = self.entries_of(prefix).next().map(|listed| listed.entry.terms.partition_bits);
        let own = self.own.iter().filter(|own| own.instance.prefix == *prefix).map(|own| own.partition_bits);
        let bits = own.chain(first).find(|bits| *bits > 0).unwrap_or(0);
        if bits > 0 || self.allotments.has(prefix) {
            self.settle_partitions(prefix, bits, sal);
        }
    }

    fn settle_elsewhere(&mut self, prefix: &Prefix, sal: &dyn SalControl) {
        let here = self.entries_of(prefix).map(|listed| (listed.entry.terms.weight, listed.entry.terms.priority));
        let own = self.own.iter().map(|own| &own.instance).filter(|own| own.prefix == *prefix);
        let here = here.chain(own.map(|own| (own.weight, own.priority)));
        let best = here.filter(|(weight, _)| *weight > 0).map(|(_, priority)| priority).max();
        let (hosts, own) = (&self.hosts, &self.own);
        let is_here = |place: &Place| {
            hosts.get(place).is_some_and(|host| host.entries.contains_key(prefix))
                || own.iter().any(|own| own.instance.host == place.host && own.instance.prefix == *prefix)
        };
        self.elsewhere.settle(*prefix, best, is_here, sal);
    }

    fn settle_partitions(&mut self, prefix: &Prefix, bits: u8, sal: &dyn SalControl) {
        let forward = |instance: &Instance| {
            Action::Forward(NextHop { address: instance.address, host: Some(instance.host), router: false })
        };
        let registered = self.entries_of(prefix).filter(|listed| listed.entry.terms.partition_bits > 0);
        let registered = registered.map(|listed| listed.instance());
        let mut servers: Vec<Server> =
            registered.map(|instance| Server { actions: vec![forward(&instance)], instance }).collect();
        let own = self.own.iter().filter(|own| own.instance.prefix == *prefix && own.partition_bits > 0);
        servers.extend(own.map(|own| Server { instance: own.instance.clone(), actions: own.actions.clone() }));
        self.allotments.settle(*prefix, bits, &servers, sal);
    }

    /// What a host had registered is gone from its list: its partitions go to others, then its rule goes.
    fn unlist(&mut self, place: Place, gone: BTreeMap<Prefix, Entry>, why: Leave, sal: &dyn SalControl) {
        self.left[why as usize] += gone.len() as u64;
        self.untold.iter_mut().for_each(|untold| untold.extend([place]));
        for (prefix, entry) in gone {
            self.elsewhere.ended(prefix, place);
            self.fences.left(&prefix, place.host, why);
            let servers = self.serving.get_mut(&prefix);
            if servers.is_some_and(|servers| !servers.remove(&place)) {
                self.serving.remove(&prefix);
                let left = self.lengths.get(&prefix.bits).map_or(0, |count| count - 1);
                if left == 0 {
                    self.lengths.remove(&prefix.bits)
                } else {
                    self.lengths.insert(prefix.bits, left)
                };
            }
            self.census.remove(&prefix, entry.terms.weight);
            self.settle(&prefix, sal);
            sal.remove_rule(entry.rule);
            self.recent.note(prefix);
        }
        self.changed();
    }

    /// A host no longer serves a prefix.
    pub fn withdraw(&mut self, place: Place, stream: u64, prefix: &Prefix, sal: &dyn SalControl) {
        let host = self.hosts.get_mut(&place).filter(|host| host.stream == stream);
        if let Some(entry) = host.and_then(|host| host.entries.remove(prefix)) {
            self.unlist(place, BTreeMap::from([(*prefix, entry)]), Leave::Withdrawn, sal);
        }
    }

    /// Whether a host has a prefix for itself.
    pub fn is_alone(&self, place: Place, prefix: &Prefix) -> bool {
        self.hosts.get(&place).and_then(|host| host.entries.get(prefix)).is_some_and(|entry| entry.terms.exclusive)
    }

    /// A host had a name for itself, and the cluster has given it to another one. Its stream is told.
    pub fn give_away(&mut self, claimed: &Prefix, host: HostId, sal: &dyn SalControl) {
        let is_meant = |prefix: &Prefix, entry: &Entry| entry.terms.exclusive && claimed_as(prefix) == *claimed;
        let places: Vec<Place> = self.streams_of(host).map(|(place, _)| *place).collect();
        for place in places {
            let Some(host) = self.hosts.get_mut(&place) else { continue };
            let gone: BTreeMap<Prefix, Entry> =
                host.entries.extract_if(.., |prefix, entry| is_meant(prefix, entry)).collect();
            if gone.is_empty() {
                continue;
            }
            host.given_away.extend(gone.iter().map(|(prefix, entry)| (*prefix, entry.name.to_string())));
            host.news.notify_one();
            self.unlist(place, gone, Leave::GivenAway, sal);
        }
    }

    /// Names that a host had for itself and has no longer.
    pub fn take_given_away(&mut self, place: Place, stream: u64) -> Vec<(Prefix, String)> {
        let host = self.hosts.get_mut(&place).filter(|host| host.stream == stream);
        host.map(|host| std::mem::take(&mut host.given_away)).unwrap_or_default()
    }

    /// What a host serves, as written.
    pub fn names(&self, place: &Place) -> Vec<(Prefix, String)> {
        let entries = self.hosts.get(place).into_iter().flat_map(|host| &host.entries);
        entries.map(|(prefix, entry)| (*prefix, entry.name.to_string())).collect()
    }

    /// What a host calls itself, or its host-ID where nothing of it is registered here.
    pub fn name_of(&self, host: HostId) -> String {
        self.streams_of(host).next().map_or_else(|| host.to_string(), |(_, host)| host.name.clone())
    }

    /// Takes away what an earlier stream had registered and this one did not within the lease.
    pub fn sweep(&mut self, place: Place, stream: u64, sal: &dyn SalControl) {
        let Some(host) = self.hosts.get_mut(&place).filter(|host| host.stream == stream) else { return };
        let gone = host.entries.extract_if(.., |_, entry| entry.stream != stream).collect();
        self.unlist(place, gone, Leave::NotRenewed, sal);
    }

    /// A stream is over; unless another took over, so is all that the host served. A part of it goes with each call, so
    /// that others need not wait for all of it.
    pub fn depart(&mut self, place: Place, stream: u64, why: Leave, sal: &dyn SalControl) -> Departure {
        let Some(host) = self.hosts.get_mut(&place).filter(|host| host.stream == stream) else {
            return Departure::Superseded;
        };
        let mut gone = BTreeMap::new();
        while gone.len() < DEPARTING_MAX
            && let Some((prefix, entry)) = host.entries.pop_first()
        {
            gone.insert(prefix, entry);
        }
        let is_over = host.entries.is_empty();
        if is_over {
            self.hosts.remove(&place);
        }
        self.unlist(place, gone, why, sal);
        if is_over { Departure::Gone } else { Departure::Going }
    }

    /// Puts a host out of every authority.
    pub fn expel(&mut self, host: HostId, sal: &dyn SalControl) {
        let places: Vec<(Place, u64)> = self.streams_of(host).map(|(place, host)| (*place, host.stream)).collect();
        for (place, stream) in places {
            if let Some(known) = self.hosts.get(&place) {
                known.end.notify_one();
            }
            while self.depart(place, stream, Leave::Expelled, sal) == Departure::Going {}
        }
    }

    /// Whether the router's own host may serve a name; if so, no other host gets it from now on.
    ///
    /// # Errors
    ///
    /// Another host has it, or divides it in another way.
    pub fn admit_own(&mut self, own: OwnService) -> Result<(), RollError> {
        let OwnService { instance, partition_bits, exclusive, .. } = &own;
        self.check_others(instance.host, &instance.prefix, &instance.name, *partition_bits, *exclusive)?;
        if self.own.iter().all(|known| known.instance.prefix != instance.prefix) {
            self.census.add(&instance.prefix, &instance.name, instance.weight);
            self.untold.iter_mut().for_each(|untold| untold.extend([own.place()]));
            let prefix = own.instance.prefix;
            self.own.push(own);
            self.changed_at([prefix]);
        }
        Ok(())
    }

    /// What the router's own host serves. The rules of its names are the caller's, those of partitions are made here.
    pub fn set_own(&mut self, own: Vec<OwnService>, sal: &dyn SalControl) {
        let before = std::mem::replace(&mut self.own, own);
        self.end_own_fences(&before);
        for Instance { prefix, name, weight, .. } in self.own.iter().map(|own| &own.instance) {
            self.census.add(prefix, name, *weight);
        }
        before.iter().for_each(|own| self.census.remove(&own.instance.prefix, own.instance.weight));
        if before != self.own {
            let places = before.iter().chain(&self.own).map(OwnService::place);
            self.untold.iter_mut().for_each(|untold| untold.extend(places.clone()));
            let all = before.iter().chain(&self.own).map(|own| own.instance.prefix);
            all.for_each(|prefix| self.recent.note(prefix));
        }
        let divided = before.iter().chain(&self.own).filter(|own| own.partition_bits > 0);
        let concerned: BTreeSet<Prefix> = divided.map(|own| own.instance.prefix).collect();
        for prefix in concerned {
            self.settle(&prefix, sal);
        }
        self.changed();
    }

    fn changed_at(&mut self, prefixes: impl IntoIterator<Item = Prefix>) {
        prefixes.into_iter().for_each(|prefix| self.recent.note(prefix));
        self.changed();
    }

    fn changed(&self) {
        self.changes.send_modify(|version| *version = version.wrapping_add(1));
    }

    /// Told whenever somebody else may serve something.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Where something has changed.
    pub const fn recent(&self) -> &Recent {
        &self.recent
    }

    /// Everything that hosts have registered, by name.
    pub fn instances(&self) -> Vec<Instance> {
        let mut all: Vec<Instance> =
            self.hosts.iter().flat_map(|(place, host)| host.list(place)).map(|listed| listed.instance()).collect();
        all.extend(self.elsewhere.prefixes().flat_map(|prefix| self.instances_elsewhere(prefix)));
        all.sort_by(in_order);
        all
    }

    /// Who serves a name: the instances of the longest prefix that covers it, the router's own host among them. Of a
    /// key in a partition that is its holder; a service's bare name stands for all of its servers.
    pub fn instances_of(&self, service: &ServiceId) -> Vec<Instance> {
        let own = self.own.iter().map(|own| &own.instance).filter(|own| own.prefix.contains(service));
        let own_bits = own.clone().map(|own| own.prefix.bits).max();
        let mut longest_first = self.lengths.keys().rev().copied();
        let registered = longest_first.find(|bits| self.serving.contains_key(&Prefix::new(*service, *bits)));
        let is_there = |bits: &u16| self.instances_elsewhere(&Prefix::new(*service, *bits)).next().is_some();
        let there = self.elsewhere.lengths().rev().find(is_there);
        let longest = registered.max(own_bits).max(there).unwrap_or(0);
        let at = Prefix::new(*service, longest);
        let mut found: Vec<Instance> = self.entries_of(&at).map(|listed| listed.instance()).collect();
        found.extend(self.instances_elsewhere(&at));
        found.sort_by(in_order);
        found.extend(own.filter(|own| own.prefix.bits == longest).cloned());
        let is_key = service.tail().iter().any(|byte| *byte != 0);
        if is_key
            && longest == SERVICE_BITS
            && let Some(holder) = self.allotments.holder(service)
        {
            return vec![holder.clone()];
        }
        found
    }

    /// Who serves something under a prefix, or all of it: the router's own host among them. Beside them, for each
    /// partition there, its holder once more with the partition as prefix.
    pub fn instances_under(&self, prefix: &Prefix) -> Vec<Instance> {
        let above = self.lengths.range(..prefix.bits).map(|(bits, _)| Prefix::new(prefix.id, *bits));
        let below = self.serving.range(*prefix..).map(|(below, _)| *below).take_while(|below| prefix.covers(below));
        let registered = above.chain(below).flat_map(|at| self.entries_of(&at).collect::<Vec<_>>());
        let is_meant = |instance: &&Instance| prefix.overlaps(&instance.prefix);
        let own = self.own.iter().map(|own| &own.instance).filter(is_meant);
        let mut found: Vec<Instance> = registered.map(|listed| listed.instance()).collect();
        found.extend(own.chain(self.allotments.instances_under(prefix)).cloned());
        found.extend(
            self.elsewhere.about(prefix).flat_map(|about| self.instances_elsewhere(&about).collect::<Vec<_>>()),
        );
        found.sort_by_key(|instance| (instance.prefix, instance.host));
        found.iter_mut().for_each(|instance| self.add_fence(instance));
        found
    }

    /// Those who serve a prefix and are not registered here.
    fn instances_elsewhere(&self, prefix: &Prefix) -> impl Iterator<Item = Instance> {
        let is_here = |place: &Place| self.hosts.get(place).is_some_and(|host| host.entries.contains_key(prefix));
        let others = self.elsewhere.of(prefix).filter(move |(place, ..)| !is_here(place));
        others.map(|(_, _, address, there)| elsewhere::told(there, address))
    }

    /// Others say what some hosts have registered with them now.
    pub fn hear_elsewhere(&mut self, news: Vec<(Place, ByRouter)>, sal: &dyn SalControl) {
        let mut concerned = BTreeSet::new();
        for (place, by_router) in news {
            concerned.extend(self.elsewhere.hear(place, by_router));
        }
        self.settle_all(&concerned, sal);
    }

    /// Other routers that answer, and where.
    pub fn set_links(&mut self, links: BTreeMap<HostId, SocketAddr>, sal: &dyn SalControl) {
        let concerned = self.elsewhere.set_links(links);
        self.settle_all(&concerned, sal);
    }

    /// Other routers that answer.
    pub fn links(&self) -> Vec<HostId> {
        self.elsewhere.links().collect()
    }

    /// Whether the others' words come through.
    pub fn set_away(&mut self, is_away: bool, sal: &dyn SalControl) {
        let concerned = self.elsewhere.set_away(is_away);
        self.settle_all(&concerned, sal);
    }

    fn settle_all(&mut self, concerned: &BTreeSet<Prefix>, sal: &dyn SalControl) {
        for prefix in concerned {
            self.settle(prefix, sal);
        }
        if !concerned.is_empty() {
            self.changed_at(concerned.iter().copied());
        }
    }

    /// Other routers are to be told from now on: gives what hosts serve, this one among them, of whom they have not
    /// been told yet.
    pub fn untold(&mut self) -> Vec<(Place, Vec<Served>)> {
        let untold = match &mut self.untold {
            Some(untold) => std::mem::take(untold),
            none => {
                *none = Some(BTreeSet::new());
                self.hosts.keys().copied().chain(self.own.iter().map(OwnService::place)).collect()
            }
        };
        let of_own = |own: &OwnService| Served {
            instance: own.instance.clone(),
            partition_bits: own.partition_bits,
            exclusive: own.exclusive,
        };
        let all = |place: &Place| {
            let registered =
                self.hosts.get(place).into_iter().flat_map(|host| host.list(place).map(|listed| listed.served()));
            let mut all: Vec<Served> =
                registered.chain(self.own.iter().filter(|own| own.place() == *place).map(of_own)).collect();
            all.iter_mut().for_each(|served| self.add_fence(&mut served.instance));
            all
        };
        untold.into_iter().map(|place| (place, all(&place))).collect()
    }

    /// Whether a host's stream is up.
    pub fn has(&self, place: &Place) -> bool {
        self.hosts.contains_key(place)
    }

    /// A host in each of its authorities.
    fn streams_of(&self, host: HostId) -> impl Iterator<Item = (&Place, &Host)> {
        let of = |authority| Place { host, authority };
        self.hosts.range(of([0; 8])..=of([u8::MAX; 8]))
    }

    /// How many partitions went from one host to another.
    pub fn partitions_moved(&self) -> u64 {
        self.allotments.moved()
    }

    /// Where a host is, if its stream is up.
    pub fn address_of(&self, host: HostId) -> Option<SocketAddr> {
        self.streams_of(host).next().map(|(_, host)| host.address)
    }

    /// Who is at an address, if its stream is up, and what it calls itself.
    pub fn host_at(&self, address: SocketAddr) -> Option<(HostId, String)> {
        let found = self.hosts.iter().find(|(_, host)| host.address == address);
        found.map(|(place, host)| (place.host, host.name.clone()))
    }

    /// How many instances are no longer listed, by reason.
    pub fn left(&self, why: Leave) -> u64 {
        self.left[why as usize]
    }

    /// Hosts whose stream is up.
    pub fn len(&self) -> usize {
        self.hosts.len()
    }
}

#[cfg(test)]
#[path = "roll_test.rs"]
mod test;
