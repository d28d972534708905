//! Programs that follow who serves a name: each instance has a virtual address of its own on this host, and what is
//! sent there goes to that very instance, as long as it answers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use margay_control::registration::{self, Home, Watcher};
use margay_core::instance::Instance;
use margay_core::key::HostId;
use margay_core::name::ServiceId;
use margay_core::table::SERVICE_PORT;
use nix::errno::Errno;
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::message::{Kind, Reply, Request};
use super::request::{No, prefix};
use super::rights::Caller;
use crate::agent::Agent;
use crate::agent::spread::{first_number, homes_of, instance_of, instances_under, pass_on, whole};

/// Programs of one user but root that follow a name at one time.
const FOLLOWERS_OF_USER_MAX: usize = 16;
/// Instances of a name that one program is told of.
const INSTANCES_MAX: usize = 64;
/// Routers that this host has joined meanwhile are found after so long.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How many programs of each user follow names.
#[derive(Clone, Debug, Default)]
pub struct Followers {
    by_user: Arc<Mutex<BTreeMap<u32, usize>>>,
    /// The number of the next one.
    next: Arc<AtomicU64>,
}

/// A user's place among those that follow.
struct Seat {
    followers: Followers,
    uid: u32,
}

impl Followers {
    fn take(&self, caller: &Caller) -> Option<Seat> {
        let uid = caller.account();
        let mut by_user = self.by_user.lock();
        let count = by_user.entry(uid).or_default();
        if *count >= FOLLOWERS_OF_USER_MAX && !caller.uid.is_root() {
            return None;
        }
        *count += 1;
        drop(by_user);
        Some(Seat { followers: self.clone(), uid })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut by_user = self.followers.by_user.lock();
        if let Some(count) = by_user.get_mut(&self.uid) {
            *count -= 1;
        }
        by_user.retain(|_, count| *count > 0);
    }
}

/// An instance as the program was told of it.
struct Place {
    address: IpAddr,
    instance: Instance,
    weight: u32,
    name: String,
}

/// An instance that a program is to be told of.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Told<'a> {
    found: &'a registration::Instance,
    /// Its share of what comes by the name; zero also where those of a higher priority take all.
    share: u32,
}

/// The instances of a name of which a program is told, and how many there are beyond. Where they are too many, those
/// that take something and of which the program knows come first.
fn told<'a>(
    found: &'a [registration::Instance],
    service: &ServiceId,
    is_known: impl Fn(&HostId) -> bool,
) -> (Vec<Told<'a>>, usize) {
    let covers = |one: &&registration::Instance| one.prefix.contains(service);
    let longest = found.iter().filter(covers).map(|one| one.prefix.bits).max();
    let by_host: BTreeMap<HostId, &registration::Instance> =
        found.iter().filter(covers).filter(|one| Some(one.prefix.bits) == longest).map(|one| (one.host, one)).collect();
    let best = by_host.values().filter(|one| one.weight > 0).map(|one| one.priority).max();
    let share_of = |one: &registration::Instance| if Some(one.priority) == best { one.weight } else { 0 };
    let mut all: Vec<Told<'_>> = by_host.into_values().map(|found| Told { found, share: share_of(found) }).collect();
    all.sort_by_key(|told| (told.share == 0, !is_known(&told.found.host)));
    let beyond = all.len().saturating_sub(INSTANCES_MAX);
    all.truncate(INSTANCES_MAX);
    (all, beyond)
}

/// A program that follows who serves a name.
pub struct Follower {
    agent: Weak<Agent>,
    service: ServiceId,
    watcher: Watcher,
    /// Routers that are heard.
    routers: Vec<Weak<Home>>,
    heard: Arc<Notify>,
    hearing: JoinSet<()>,
    places: BTreeMap<HostId, Place>,
    /// How many instances the program is not told of; none: it was told nothing yet.
    beyond: Option<usize>,
    _seat: Seat,
}

impl Follower {
    /// Follows the name of a request.
    pub(super) fn new(agent: &Arc<Agent>, caller: &Caller, request: &Request) -> Result<Self, No> {
        let service = prefix(request)?.id;
        let seat = agent.connections.programs.followers.take(caller).ok_or_else(|| {
            let text = format!(
                "this user has {FOLLOWERS_OF_USER_MAX} programs that follow who serves a name, and may have no more; \
                 close some"
            );
            (Errno::EUSERS, text)
        })?;
        let number = agent.connections.programs.followers.next.fetch_add(1, Ordering::Relaxed);
        let heard = Arc::<Notify>::default();
        let mut hearing = JoinSet::new();
        if let Some(router) = &agent.routing.router {
            hearing.spawn(pass_on(router.changes(), Arc::clone(&heard)));
        }
        // Before any router has said something there may be something of this host itself.
        heard.notify_one();
        Ok(Self {
            agent: Arc::downgrade(agent),
            service,
            watcher: Watcher::Program(number),
            routers: Vec::new(),
            heard,
            hearing,
            places: BTreeMap::new(),
            beyond: None,
            _seat: seat,
        })
    }

    /// The next changes, as messages, the last of which says that the list is complete; `None` when the agent goes
    /// down.
    pub(super) async fn next(&mut self) -> Option<Vec<Reply>> {
        loop {
            // At the end of time there is no word of a router that is gone.
            let _ = tokio::time::timeout(LOOK_EVERY, self.heard.notified()).await;
            let agent = self.agent.upgrade()?;
            let news = tokio::task::block_in_place(|| {
                self.hear(&agent);
                self.look(&agent)
            });
            if let Some(messages) = news {
                return Some(messages);
            }
        }
    }

    /// Hears the routers that this host has joined.
    fn hear(&mut self, agent: &Agent) {
        while self.hearing.try_join_next().is_some() {}
        self.routers.retain(|known| known.strong_count() > 0);
        for home in homes_of(agent, &self.service) {
            if self.routers.iter().all(|known| !known.ptr_eq(&Arc::downgrade(&home))) {
                self.routers.push(Arc::downgrade(&home));
                self.hearing.spawn(pass_on(home.heard(), Arc::clone(&self.heard)));
                home.watch(whole(&self.service), self.watcher);
            }
        }
    }

    /// What has changed since the program was told last; nothing also where nobody has said who serves the name.
    fn look(&mut self, agent: &Agent) -> Option<Vec<Reply>> {
        let found = instances_under(agent, &self.service, &whole(&self.service))?;
        let (listed, mut beyond) = told(&found, &self.service, |host| self.places.contains_key(host));
        let mut messages = Vec::new();
        let is_listed = |host: &&HostId| listed.iter().any(|told| told.found.host == **host);
        let gone: Vec<HostId> = self.places.keys().filter(|host| !is_listed(host)).copied().collect();
        for host in gone {
            if let Some(place) = self.places.remove(&host) {
                messages.push(self.message(host, &place, true));
                release(agent, &place);
            }
        }
        for told in &listed {
            messages.extend(self.note(agent, told));
        }
        beyond += listed.iter().filter(|told| !self.places.contains_key(&told.found.host)).count();
        if messages.is_empty() && self.beyond == Some(beyond) {
            return None;
        }
        if self.beyond.unwrap_or_default() != beyond {
            tracing::warn!(service = %self.service, beyond, "a program is not told of all that serve the name");
        }
        self.beyond = Some(beyond);
        // Without a text: the list is complete.
        let mut end = Reply::done(Kind::Instance);
        end.port = u16::try_from(beyond).unwrap_or(u16::MAX);
        messages.push(end);
        Some(messages)
    }

    /// Notes an instance, and says so if it is new, or another than it was. Nothing, and it has no place, where no
    /// virtual address is left.
    fn note(&mut self, agent: &Agent, Told { found, share }: &Told<'_>) -> Option<Reply> {
        let instance = instance_of(agent, &self.service, found);
        let known = self.places.get(&found.host);
        let is_same = known
            .is_some_and(|place| place.instance == instance && place.weight == *share && place.name == found.host_name);
        if is_same {
            return None;
        }
        let address = match known {
            Some(place) => place.address,
            None => {
                let ranges = agent.names.leases.ranges();
                let start = first_number(&(ranges.host_v4().into(), found.host));
                agent.kernel.spreads.addresses().take(ranges, true, start)?
            }
        };
        agent.core.0.with_sal(|sal, _| sal.bind_instance(address, instance));
        let place = Place { address, instance, weight: *share, name: found.host_name.clone() };
        let message = self.message(found.host, &place, false);
        self.places.insert(found.host, place);
        Some(message)
    }

    fn message(&self, host: HostId, place: &Place, is_gone: bool) -> Reply {
        let mut message = Reply::done(Kind::Instance);
        (message.id, message.bits, message.port) = (self.service, 256, SERVICE_PORT);
        if let IpAddr::V4(v4) = place.address {
            message.v4 = v4;
        }
        let Place { name, weight, .. } = place;
        message.text = json!({"host": host.to_string(), "name": name, "weight": weight, "gone": is_gone}).to_string();
        message
    }
}

fn release(agent: &Agent, place: &Place) {
    agent.core.0.with_sal(|sal, _| sal.unbind_instance(place.address));
    agent.kernel.spreads.addresses().free(place.address);
}

impl Drop for Follower {
    fn drop(&mut self) {
        let Some(agent) = self.agent.upgrade() else { return };
        self.places.values().for_each(|place| release(&agent, place));
        for home in self.routers.iter().filter_map(Weak::upgrade) {
            home.end_watch(whole(&self.service), self.watcher);
        }
    }
}

#[cfg(test)]
mod test {
    use std::collections::BTreeSet;

    use margay_core::name::{Prefix, SERVICE_BITS};
    use nix::unistd::{Gid, Uid};

    use super::*;

    fn instance(n: u8, bits: u16, weight: u32, priority: u32) -> registration::Instance {
        registration::Instance {
            host: HostId([n; 16]),
            host_name: format!("host{n}"),
            address: "10.0.0.1:54324".parse().expect("literal"),
            name: "cache.shop".to_owned(),
            prefix: Prefix::new(name(0), bits),
            weight,
            priority,
            sticky: false,
            fence: None,
            zero_weight: None,
        }
    }

    /// A name of a service, with the first byte of its tail.
    fn name(tail: u8) -> ServiceId {
        let mut id = ServiceId([0; 32]);
        id.0[0] = 0xab;
        id.0[usize::from(SERVICE_BITS / 8)] = tail;
        id
    }

    fn shares(found: &[registration::Instance], service: &ServiceId) -> Vec<(u8, u32)> {
        told(found, service, |_| false).0.iter().map(|told| (told.found.host.0[0], told.share)).collect()
    }

    #[test]
    fn a_lower_priority_has_no_share_while_a_higher_one_takes_something() {
        let all = [instance(1, 96, 100, 5), instance(2, 96, 50, 9), instance(3, 96, 0, 10), instance(4, 8, 100, 99)];
        assert_eq!(shares(&all, &name(0)), [(2, 50), (1, 0), (3, 0)], "a shorter prefix is another matter");
        assert_eq!(shares(&all[..1], &name(0)), [(1, 100)]);
        assert!(shares(&[], &name(0)).is_empty());
    }

    #[test]
    fn those_of_the_longest_prefix_serve_a_name() {
        let all = [instance(1, 96, 100, 5), instance(2, 96, 100, 5), instance(3, 256, 100, 5)];
        assert_eq!(shares(&all[..2], &name(0)), [(1, 100), (2, 100)]);
        assert_eq!(shares(&all, &name(0)), [(3, 100)], "a program that serves the whole name by its socket");
        assert_eq!(shares(&all, &name(1)), [(1, 100), (2, 100)]);
    }

    #[test]
    fn of_too_many_instances_those_are_told_that_the_program_has() {
        let mut all: Vec<_> = (0..100).map(|n| instance(n, 96, 100, 1)).collect();
        all[99].weight = 0;
        let (first, beyond) = told(&all, &name(0), |_| false);
        assert_eq!((first.len(), beyond), (INSTANCES_MAX, 36));
        let known: BTreeSet<HostId> = (30..94).map(|n| HostId([n; 16])).collect();
        let (next, _) = told(&all, &name(0), |host| known.contains(host));
        assert_eq!(next.iter().map(|told| told.found.host).collect::<BTreeSet<_>>(), known);
        let (next, _) = told(&all, &name(0), |host| host.0[0] >= 98);
        assert!(next.iter().any(|told| told.found.host.0[0] == 98));
        assert!(next.iter().all(|told| told.share > 0), "what takes nothing comes last");
    }

    #[test]
    fn a_user_follows_so_many_names_and_root_any() {
        let followers = Followers::default();
        let caller = |uid| Caller { uid: Uid::from_raw(uid), gid: Gid::from_raw(uid), pid: 1, process: None };
        let mut seats: Vec<Seat> = (0..FOLLOWERS_OF_USER_MAX).filter_map(|_| followers.take(&caller(7))).collect();
        assert_eq!(seats.len(), FOLLOWERS_OF_USER_MAX);
        assert!(followers.take(&caller(7)).is_none() && followers.take(&caller(8)).is_some());
        seats.pop();
        assert!(followers.take(&caller(7)).is_some());
        let roots: Vec<Seat> = (0..=FOLLOWERS_OF_USER_MAX).filter_map(|_| followers.take(&caller(0))).collect();
        assert_eq!(roots.len(), FOLLOWERS_OF_USER_MAX + 1);
    }
}
