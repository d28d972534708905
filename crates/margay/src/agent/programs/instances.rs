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
        let uid = caller.uid.as_raw();
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
    has_told: bool,
    _seat: Seat,
}

impl Follower {
    /// Follows the name of a request.
    pub(super) fn new(agent: &Arc<Agent>, caller: &Caller, request: &Request) -> Result<Self, No> {
        let service = prefix(request)?.id;
        let seat = agent.programs.followers.take(caller).ok_or_else(|| {
            let text = format!(
                "this user has {FOLLOWERS_OF_USER_MAX} programs that follow who serves a name, and may have no more; \
                 close some"
            );
            (Errno::EUSERS, text)
        })?;
        let number = agent.programs.followers.next.fetch_add(1, Ordering::Relaxed);
        let heard = Arc::<Notify>::default();
        let mut hearing = JoinSet::new();
        if let Some(router) = &agent.router {
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
            has_told: false,
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
        let mut found = instances_under(agent, &self.service, &whole(&self.service))?;
        found.retain(|instance| instance.prefix.contains(&self.service));
        let longest = found.iter().map(|instance| instance.prefix.bits).max().unwrap_or_default();
        found.retain(|instance| instance.prefix.bits == longest);
        found.truncate(INSTANCES_MAX);
        let mut messages = Vec::new();
        let gone: Vec<HostId> =
            self.places.keys().filter(|host| found.iter().all(|instance| instance.host != **host)).copied().collect();
        for host in gone {
            if let Some(place) = self.places.remove(&host) {
                messages.push(self.message(host, &place, true));
                release(agent, &place);
            }
        }
        for instance in &found {
            messages.extend(self.note(agent, instance));
        }
        if messages.is_empty() && self.has_told {
            return None;
        }
        self.has_told = true;
        // Without a text: the list is complete.
        messages.push(Reply::done(Kind::Instance));
        Some(messages)
    }

    /// Notes an instance, and says so if it is new, or another than it was.
    fn note(&mut self, agent: &Agent, found: &registration::Instance) -> Option<Reply> {
        let instance = instance_of(agent, &self.service, found);
        let known = self.places.get(&found.host);
        let is_same = known.is_some_and(|place| {
            place.instance == instance && place.weight == found.weight && place.name == found.host_name
        });
        if is_same {
            return None;
        }
        let addresses = agent.spreads.addresses();
        let address = match known {
            Some(place) => place.address,
            None => {
                let ranges = agent.leases.ranges();
                let start = first_number(&(ranges.host_v4().into(), found.host));
                let Some(address) = addresses.take(ranges, true, start) else {
                    tracing::warn!(
                        host = %found.host,
                        "no virtual address is left for an instance that a program follows"
                    );
                    return None;
                };
                address
            }
        };
        agent.core.0.with_sal(|sal, _| sal.bind_instance(address, instance));
        let place = Place { address, instance, weight: found.weight, name: found.host_name.clone() };
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
    agent.spreads.addresses().free(place.address);
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
    use nix::unistd::{Gid, Uid};

    use super::*;

    #[test]
    fn a_user_follows_so_many_names_and_root_any() {
        let followers = Followers::default();
        let caller = |uid| Caller { uid: Uid::from_raw(uid), gid: Gid::from_raw(uid), pid: 1 };
        let mut seats: Vec<Seat> = (0..FOLLOWERS_OF_USER_MAX).filter_map(|_| followers.take(&caller(7))).collect();
        assert_eq!(seats.len(), FOLLOWERS_OF_USER_MAX);
        assert!(followers.take(&caller(7)).is_none() && followers.take(&caller(8)).is_some());
        seats.pop();
        assert!(followers.take(&caller(7)).is_some());
        let roots: Vec<Seat> = (0..=FOLLOWERS_OF_USER_MAX).filter_map(|_| followers.take(&caller(0))).collect();
        assert_eq!(roots.len(), FOLLOWERS_OF_USER_MAX + 1);
    }
}
