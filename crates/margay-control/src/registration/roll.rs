//! Who is registered with this router now: hosts, what they serve, and the rules that lead there.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use margay_core::key::HostId;
use margay_core::name::{Prefix, ServiceId};
use margay_core::table::{Action, NextHop, Rule, RuleId, TableError};
use tokio::sync::{Notify, watch};
use tokio::time::{Duration, Instant};

use super::Instance;
use crate::SalControl;

/// Prefixes of one host.
const PREFIXES_MAX: usize = 1000;
/// Hosts of one router.
const HOSTS_MAX: usize = 10_000;
/// A host that is replaced more often than this by one with the same key, within the time below, has a clone.
const TAKEOVERS_MAX: usize = 3;
const TAKEOVER_TIME: Duration = Duration::from_secs(10);

/// A host, in one authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The host.
    pub host: HostId,
    /// Block of the authority.
    pub authority: [u8; 8],
}

/// Why something is not taken down.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RollError {
    /// Too many hosts.
    #[error("this router has {HOSTS_MAX} hosts already")]
    Hosts,
    /// Too many prefixes.
    #[error("this host serves {PREFIXES_MAX} names here already; withdraw some")]
    Prefixes,
    /// The table of the core.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Another host has the same key.
    #[error(
        "two hosts use the same key and take turns: remove /var/lib/margay/host.key on the copy, and let it join as a host of its own"
    )]
    Clone,
    /// The stream was replaced meanwhile.
    #[error("a newer stream of this host took over")]
    Superseded,
}

/// Why an instance is no longer listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// Its host said so.
    Withdrawn,
    /// Its host was silent for a lease.
    Lapsed,
    /// Its host's stream ended.
    Ended,
    /// Its host came back and did not register it again.
    NotRenewed,
    /// Its host was put out.
    Expelled,
}

impl Leave {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Withdrawn, Self::Lapsed, Self::Ended, Self::NotRenewed, Self::Expelled];

    /// For metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Withdrawn => "withdrawn",
            Self::Lapsed => "lapsed",
            Self::Ended => "ended",
            Self::NotRenewed => "not_renewed",
            Self::Expelled => "expelled",
        }
    }
}

struct Entry {
    rule: RuleId,
    instance: Instance,
    /// The number of the stream that registered it last.
    stream: u64,
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
}

/// The roll.
#[derive(Default)]
pub struct Roll {
    hosts: HashMap<Place, Host>,
    own: Vec<Instance>,
    next_stream: u64,
    takeovers: HashMap<Place, Vec<Instant>>,
    left: [u64; Leave::ALL.len()],
    /// Rises whenever somebody else may serve something.
    changes: watch::Sender<u64>,
}

/// A stream that speaks for a host.
pub struct Seat {
    /// Its number; later ones replace it.
    pub stream: u64,
    /// Somebody took over, or the host was put out.
    pub end: Arc<Notify>,
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
        now: Instant,
    ) -> Result<Seat, RollError> {
        if !self.hosts.contains_key(&place) && self.hosts.len() >= HOSTS_MAX {
            return Err(RollError::Hosts);
        }
        self.takeovers.retain(|_, times| times.last().is_some_and(|last| now - *last < TAKEOVER_TIME));
        if let Some(known) = self.hosts.get(&place)
            && known.boot_id != boot_id
        {
            let times = self.takeovers.entry(place).or_default();
            times.retain(|time| now - *time < TAKEOVER_TIME);
            if times.len() >= TAKEOVERS_MAX {
                return Err(RollError::Clone);
            }
            times.push(now);
        }
        self.next_stream += 1;
        let (stream, end) = (self.next_stream, Arc::new(Notify::new()));
        let earlier = self.hosts.remove(&place);
        let entries = earlier.map(|earlier| {
            earlier.end.notify_one();
            earlier.entries
        });
        let entries = entries.unwrap_or_default();
        let host = Host { stream, address, name: name.to_owned(), boot_id, entries, end: Arc::clone(&end) };
        self.hosts.insert(place, host);
        Ok(Seat { stream, end })
    }

    /// A host serves a prefix from now on, or with another weight. The new rule is there before the old one goes.
    pub fn register(
        &mut self,
        place: Place,
        stream: u64,
        prefix: Prefix,
        name: &str,
        (weight, priority): (u32, u32),
        sal: &dyn SalControl,
    ) -> Result<(), RollError> {
        let host = self.hosts.get_mut(&place).filter(|host| host.stream == stream).ok_or(RollError::Superseded)?;
        if !host.entries.contains_key(&prefix) && host.entries.len() >= PREFIXES_MAX {
            return Err(RollError::Prefixes);
        }
        let instance = Instance {
            host: place.host,
            host_name: host.name.clone(),
            address: host.address,
            name: name.to_owned(),
            prefix,
            weight,
            priority,
        };
        if let Some(known) = host.entries.get_mut(&prefix)
            && known.instance == instance
        {
            known.stream = stream;
            return Ok(());
        }
        let hop = NextHop { address: host.address, host: Some(place.host), router: false };
        let rule = sal.add_rule(prefix, Rule { priority, weight, action: Action::Forward(hop) })?;
        if let Some(old) = host.entries.insert(prefix, Entry { rule, instance, stream }) {
            sal.remove_rule(old.rule);
        }
        self.changed();
        Ok(())
    }

    /// A host no longer serves a prefix.
    pub fn withdraw(&mut self, place: Place, stream: u64, prefix: &Prefix, sal: &dyn SalControl) {
        let host = self.hosts.get_mut(&place).filter(|host| host.stream == stream);
        if let Some(entry) = host.and_then(|host| host.entries.remove(prefix)) {
            sal.remove_rule(entry.rule);
            self.left[Leave::Withdrawn as usize] += 1;
            self.changed();
        }
    }

    /// Takes away what an earlier stream had registered and this one did not within the lease.
    pub fn sweep(&mut self, place: Place, stream: u64, sal: &dyn SalControl) {
        let Some(host) = self.hosts.get_mut(&place).filter(|host| host.stream == stream) else { return };
        let left = &mut self.left[Leave::NotRenewed as usize];
        host.entries.retain(|_, entry| {
            let is_current = entry.stream == stream;
            if !is_current {
                sal.remove_rule(entry.rule);
                *left += 1;
            }
            is_current
        });
        self.changed();
    }

    /// A stream is over; unless another took over, so is all that the host served.
    pub fn depart(&mut self, place: Place, stream: u64, why: Leave, sal: &dyn SalControl) -> bool {
        let is_current = self.hosts.get(&place).is_some_and(|host| host.stream == stream);
        if is_current && let Some(host) = self.hosts.remove(&place) {
            for entry in host.entries.values() {
                sal.remove_rule(entry.rule);
            }
            self.left[why as usize] += host.entries.len() as u64;
            self.changed();
        }
        is_current
    }

    /// Puts a host out of every authority.
    pub fn expel(&mut self, host: HostId, sal: &dyn SalControl) {
        let places: Vec<(Place, u64)> = self
            .hosts
            .iter()
            .filter(|(place, _)| place.host == host)
            .map(|(place, host)| (*place, host.stream))
            .collect();
        for (place, stream) in places {
            if let Some(known) = self.hosts.get(&place) {
                known.end.notify_one();
            }
            self.depart(place, stream, Leave::Expelled, sal);
        }
    }

    /// What the router's own host serves.
    pub fn set_own(&mut self, own: Vec<Instance>) {
        self.own = own;
        self.changed();
    }

    fn changed(&self) {
        self.changes.send_modify(|version| *version = version.wrapping_add(1));
    }

    /// Told whenever somebody else may serve something.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Everything that hosts have registered, by name.
    pub fn instances(&self) -> Vec<Instance> {
        let mut all: Vec<Instance> =
            self.hosts.values().flat_map(|host| host.entries.values()).map(|entry| entry.instance.clone()).collect();
        all.sort_by(|one, other| {
            (&one.name, &one.host_name, one.host).cmp(&(&other.name, &other.host_name, other.host))
        });
        all
    }

    /// Who serves a name: the instances of the longest prefix that covers it, the router's own host among them.
    pub fn instances_of(&self, service: &ServiceId) -> Vec<Instance> {
        let mut found = self.instances();
        found.extend(self.own.iter().cloned());
        found.retain(|instance| instance.prefix.contains(service));
        let longest = found.iter().map(|instance| instance.prefix.bits).max().unwrap_or(0);
        found.retain(|instance| instance.prefix.bits == longest);
        found
    }

    /// Who serves something under a prefix, or all of it: the router's own host among them.
    pub fn instances_under(&self, prefix: &Prefix) -> Vec<Instance> {
        let registered = self.hosts.values().flat_map(|host| host.entries.values()).map(|entry| &entry.instance);
        let is_meant = |instance: &&Instance| prefix.covers(&instance.prefix) || instance.prefix.covers(prefix);
        let mut found: Vec<Instance> = registered.chain(&self.own).filter(is_meant).cloned().collect();
        found.sort_by_key(|instance| (instance.prefix, instance.host));
        found
    }

    /// Where a host is, if its stream is up.
    pub fn address_of(&self, host: HostId) -> Option<SocketAddr> {
        self.hosts.iter().find(|(place, _)| place.host == host).map(|(_, host)| host.address)
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
