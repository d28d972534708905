//! Datagrams of unconnected sockets (DESIGN §9): each is resolved for itself, by programs in the kernel's socket
//! calls. This module tells them which instances there are: it watches every name that programs send to, and gives
//! each instance a virtual address.

pub(super) mod choice;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use margay_control::registration::{self, Home, Watcher};
use margay_core::instance::{Instance, Pin};
use margay_core::key::HostId;
use margay_core::name::{Name, Prefix, SERVICE_BITS, ServiceId};
use margay_core::table::NextHop;
use margay_core::{Ranges, Sal};
use margay_datapath::unconnected::Unconnected;
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use super::active::cgroup::Hierarchy;
use super::direct::DirectPath;
use super::instance_addresses::InstanceAddresses;
use super::{Agent, INTERFACE, home};
use crate::config::Config;

/// Names that are watched at most.
const NAMES_MAX: usize = 4000;
/// Looks at the kernel's questions that wait to be answered; the kernel asks again after a second.
const QUESTIONS_MAX: usize = 16;
/// A name that nobody has sent to for so long is not watched any more, and an instance that is gone for so long has no
/// address.
const IDLE: Duration = Duration::from_secs(300);

/// An instance of a name on this host: the name's own virtual address, and the instance's host.
pub(super) type Whom = (IpAddr, HostId);

/// Where an instance is placed.
struct Place {
    address: IpAddr,
    /// What the core knows of it.
    instance: Instance,
    /// Since when it is not among the name's instances.
    gone: Option<Instant>,
}

/// A name that programs send to.
struct Sought {
    service: ServiceId,
    /// When the kernel asked for it last, which it does again and again while the name is not spread.
    asked: Instant,
    /// What the kernel has of it; `None` until something was heard.
    shown: Option<Shares>,
}

/// Instances' addresses with their weights, and whether a socket keeps to one.
type Shares = (Vec<(IpAddr, u32)>, bool);

/// What is spread.
struct Spread {
    kernel: Arc<Unconnected>,
    /// With the ports that programs send to.
    names: BTreeMap<SocketAddr, Sought>,
    places: BTreeMap<Whom, Place>,
    /// Where the addresses of all places are from.
    addresses: InstanceAddresses,
    /// Routers have said something.
    heard: Arc<Notify>,
    ranges: Ranges,
}

/// Datagrams of unconnected sockets on this host.
pub struct Spreads {
    /// Or why there is none.
    spread: Result<Mutex<Spread>, String>,
    addresses: InstanceAddresses,
}

impl Spreads {
    /// Loads the programs, or takes over those that the agent before has left. Without them datagrams of an unconnected
    /// socket go as those of a connected one: all to one instance.
    pub fn open(config: &Config, direct: &DirectPath) -> Self {
        let addresses = InstanceAddresses::default();
        if let Some(why) = direct.why_not() {
            return Self { spread: Err(why), addresses };
        }
        let runtime_dir = &config.host.runtime_dir;
        let kernel = Hierarchy::find(runtime_dir)
            .map_err(|error| format!("no cgroups of version 2: {error}"))
            .and_then(|cgroups| {
                let sal0 = if_nametoindex(INTERFACE).map_err(|error| format!("there is no {INTERFACE}: {error}"))?;
                let pins = super::direct::pins(runtime_dir);
                Unconnected::open(cgroups.root(), &pins, sal0, config.ranges()).map_err(|error| error.to_string())
            });
        let spread = match kernel {
            Ok(kernel) => Ok(Mutex::new(Spread {
                kernel: Arc::new(kernel),
                names: BTreeMap::new(),
                places: BTreeMap::new(),
                addresses: addresses.clone(),
                heard: Arc::default(),
                ranges: config.ranges(),
            })),
            Err(why) => {
                tracing::warn!(why, "unconnected datagrams of a socket all go to one instance");
                Err(why)
            }
        };
        Self { spread, addresses }
    }

    /// The virtual addresses that stand for instances on this host, for those who need others.
    pub const fn addresses(&self) -> &InstanceAddresses {
        &self.addresses
    }

    /// Why each datagram is not resolved for itself; `None` when it is.
    pub fn why_not(&self) -> Option<&str> {
        self.spread.as_ref().err().map(String::as_str)
    }

    /// The addresses of the names that programs send to.
    pub fn names(&self) -> BTreeSet<IpAddr> {
        let Ok(spread) = &self.spread else { return BTreeSet::new() };
        spread.lock().names.keys().map(SocketAddr::ip).collect()
    }

    /// How many names are watched, and how many instances have an address.
    pub fn counts(&self) -> (usize, usize) {
        self.spread.as_ref().map_or((0, 0), |spread| {
            let spread = spread.lock();
            (spread.names.len(), spread.places.len())
        })
    }

    /// The programs, where they are in use.
    pub fn kernel(&self) -> Option<Arc<Unconnected>> {
        self.spread.as_ref().ok().map(|spread| Arc::clone(&spread.lock().kernel))
    }

    /// Clients whose flows have ended while the agent was away are shown no more.
    pub fn hand_over(&self, sal: &Sal) {
        let Some(kernel) = self.kernel() else { return };
        let alive: HashSet<SocketAddr> = sal.flows().map(|flow| flow.app.destination).collect();
        kernel.keep_clients(|surrogate| alive.contains(&surrogate));
    }

    /// What a program sees as an address may stand for these: a name for its instances, a client for its surrogate.
    pub fn behind(&self, shown: SocketAddr) -> Vec<IpAddr> {
        let Ok(spread) = &self.spread else { return Vec::new() };
        let spread = spread.lock();
        if let Some(surrogate) = spread.kernel.surrogate_of(shown) {
            return vec![surrogate];
        }
        let of_name = (shown.ip(), HostId([0; 16]))..=(shown.ip(), HostId([0xff; 16]));
        spread.places.range(of_name).map(|(_, place)| place.address).collect()
    }

    fn with(&self, act: impl FnOnce(&mut Spread)) {
        if let Ok(spread) = &self.spread {
            act(&mut spread.lock());
        }
    }

    /// Lets go of what nobody uses.
    pub fn sweep(&self, agent: &Agent) {
        self.with(|spread| spread.sweep(agent));
    }
}

/// Answers the kernel's questions and follows what routers say, until the agent ends.
///
/// # Errors
///
/// The system gives no thread.
pub fn start(agent: &Arc<Agent>) -> std::io::Result<()> {
    let Ok(spread) = &agent.kernel.spreads.spread else { return Ok(()) };
    let kernel = Arc::clone(&spread.lock().kernel);
    let heard = Arc::clone(&spread.lock().heard);
    agent.publishing.services.homes().iter().for_each(|home| hear(agent, home));
    if let Some(router) = &agent.routing.router {
        tokio::spawn(pass_on(router.changes(), Arc::clone(&heard)));
    }
    tokio::spawn(pass_on(agent.routing.rules.changes(), Arc::clone(&heard)));
    // What was spread before the restart is asked for again.
    let kept = kernel.spreads().into_iter().map(|(name, _)| name).collect();
    let (sender, questions) = mpsc::channel(QUESTIONS_MAX);
    tokio::spawn(follow(Arc::downgrade(agent), questions, heard, kept));
    thread::Builder::new().name("margay-spread".to_owned()).spawn(move || listen(&kernel, &sender)).map(drop)
}

/// Follows what a router says, too.
pub fn hear(agent: &Agent, home: &Home) {
    agent.kernel.spreads.with(|spread| {
        tokio::spawn(pass_on(home.heard(), Arc::clone(&spread.heard)));
        let services: HashSet<ServiceId> = spread.names.values().map(|sought| sought.service).collect();
        services.iter().for_each(|service| home.watch(whole(service), Watcher::Spreads));
    });
}

/// Waits for the kernel's questions, until the process ends.
fn listen(kernel: &Unconnected, sender: &mpsc::Sender<Vec<SocketAddr>>) {
    loop {
        match poll(&mut [PollFd::new(kernel.questions(), PollFlags::POLLIN)], PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => {
                tracing::error!(%error, "what programs send datagrams to is not heard any more");
                return;
            }
        }
        if sender.blocking_send(kernel.take()).is_err() {
            return;
        }
    }
}

pub(super) async fn pass_on<T>(mut news: tokio::sync::watch::Receiver<T>, heard: Arc<Notify>) {
    while news.changed().await.is_ok() {
        heard.notify_one();
    }
}

async fn follow(
    agent: Weak<Agent>,
    mut questions: mpsc::Receiver<Vec<SocketAddr>>,
    heard: Arc<Notify>,
    kept: Vec<SocketAddr>,
) {
    let mut asked = kept;
    loop {
        {
            let Some(agent) = agent.upgrade() else { return };
            let names: Vec<SocketAddr> = std::mem::take(&mut asked);
            tokio::task::block_in_place(|| {
                agent.kernel.spreads.with(|spread| {
                    names.into_iter().for_each(|name| spread.ask(&agent, name));
                    spread.show(&agent);
                });
            });
        }
        tokio::select! {
            names = questions.recv() => match names {
                Some(names) => asked = names,
                None => return,
            },
            () = heard.notified() => {}
        }
    }
}

impl Spread {
    /// A program sends to a name: from now on it is known who serves it.
    fn ask(&mut self, agent: &Agent, name: SocketAddr) {
        let asked = Instant::now();
        if let Some(known) = self.names.get_mut(&name) {
            known.asked = asked;
            return;
        }
        if self.names.len() >= NAMES_MAX || self.ranges.is_instance(name.ip()) {
            return;
        }
        let Some(service) = agent.core.0.with_sal(|sal, _| sal.service_of(name.ip())) else {
            // An address of nobody, or one that an agent before this had leased.
            self.kernel.gather(name);
            return;
        };
        tracing::debug!(%name, %service, "a program sends datagrams");
        homes_of(agent, &service).iter().for_each(|home| home.watch(whole(&service), Watcher::Spreads));
        self.names.insert(name, Sought { service, asked, shown: None });
    }

    /// Brings the kernel's tables in step with what is known. What has not changed is not written again: a router's own
    /// host hears of every change of its roll.
    fn show(&mut self, agent: &Agent) {
        let mut known: HashMap<Prefix, Option<Vec<registration::Instance>>> = HashMap::new();
        let (mut names, mut present) = (std::mem::take(&mut self.names), HashSet::new());
        for (name, sought) in &mut names {
            let service = sought.service;
            let prefix = whole(&service);
            let instances = known.entry(prefix).or_insert_with(|| instances_under(agent, &service, &prefix));
            // Nothing was heard yet: what was known before a restart holds.
            let Some(instances) = instances else { continue };
            // A rule of the operator's decides, and not who serves the name: its datagrams go by the service table.
            let instances = if agent.routing.rules.covers(&service) { &[][..] } else { instances };
            let (mut shares, mut sticky) = (Vec::new(), false);
            for instance in choice::usable(instances, &service) {
                if let Some(address) = self.place(agent, name.ip(), &service, instance) {
                    present.insert(address);
                    shares.push((address, instance.weight));
                    sticky |= instance.sticky;
                }
            }
            let shares = Some((shares, sticky));
            if sought.shown != shares {
                sought.shown = shares.filter(|shares| self.tell(*name, shares));
            }
        }
        self.names = names;
        let now = Instant::now();
        for place in self.places.values_mut() {
            place.gone = if present.contains(&place.address) { None } else { place.gone.or(Some(now)) };
        }
    }

    /// Whether the kernel has taken it.
    fn tell(&self, name: SocketAddr, (shares, sticky): &Shares) -> bool {
        if shares.is_empty() {
            self.kernel.gather(name);
            return true;
        }
        let told = self.kernel.spread(name, shares, *sticky);
        if let Err(error) = &told {
            tracing::warn!(%name, %error, "datagrams to a name all go to one instance");
        }
        told.is_ok()
    }

    /// The virtual address of an instance: the same as before the last restart, mostly.
    fn place(
        &mut self,
        agent: &Agent,
        name: IpAddr,
        service: &ServiceId,
        found: &registration::Instance,
    ) -> Option<IpAddr> {
        let whom = (name, found.host);
        let instance = instance_of(agent, service, found);
        let known = self.places.get_mut(&whom);
        if let Some(place) = &known
            && place.instance == instance
        {
            return Some(place.address);
        }
        let address = match known {
            Some(place) => {
                place.instance = instance;
                place.address
            }
            None => {
                let address = self.addresses.take(self.ranges, name.is_ipv4(), first_number(&whom))?;
                self.places.insert(whom, Place { address, instance, gone: None });
                address
            }
        };
        agent.core.0.with_sal(|sal, _| sal.bind_instance(address, instance));
        Some(address)
    }

    fn sweep(&mut self, agent: &Agent) {
        let spreads: BTreeMap<SocketAddr, Duration> = self.kernel.spreads().into_iter().collect();
        let now = Instant::now();
        let unused = unused(&self.names, &spreads, now);
        for name in &unused {
            self.kernel.gather(*name);
            let Some(Sought { service, .. }) = self.names.remove(name) else { continue };
            let prefix = whole(&service);
            if self.names.values().all(|other| whole(&other.service) != prefix) {
                homes_of(agent, &service).iter().for_each(|home| home.end_watch(prefix, Watcher::Spreads));
            }
        }
        if !unused.is_empty() {
            self.show(agent);
        }
        self.places.retain(|_, place| {
            let is_over = place.gone.is_some_and(|since| now - since >= IDLE);
            if is_over {
                self.addresses.free(place.address);
                agent.core.0.with_sal(|sal, _| sal.unbind_instance(place.address));
            }
            !is_over
        });
        // Those of an agent before this go with the last name that is sent to there.
        let used = spreads.keys().filter(|name| !unused.contains(name));
        let names: HashSet<IpAddr> = used.map(SocketAddr::ip).collect();
        for (instance, name) in self.kernel.faces() {
            if !self.addresses.is_taken(instance) && !names.contains(&name) {
                self.kernel.forget(instance);
            }
        }
    }
}

/// What the core is to know of an instance.
pub(super) fn instance_of(agent: &Agent, service: &ServiceId, found: &registration::Instance) -> Instance {
    let own = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), agent.host.local.sal_port);
    let is_own = found.host == agent.host.local.host_key.public().id();
    let next_hop = NextHop { address: if is_own { own } else { found.address }, host: Some(found.host), router: false };
    Instance { service: *service, next_hop, pin: Pin::Hint }
}

/// Names that nobody has sent to for long: of those that are spread the kernel knows it (`spreads`), of the others it
/// would have asked.
fn unused(
    names: &BTreeMap<SocketAddr, Sought>,
    spreads: &BTreeMap<SocketAddr, Duration>,
    now: Instant,
) -> Vec<SocketAddr> {
    let not_spread = names.iter().filter(|(name, _)| !spreads.contains_key(name));
    let idle = not_spread.map(|(name, sought)| (*name, now - sought.asked));
    let all = idle.chain(spreads.iter().map(|(name, idle)| (*name, *idle)));
    all.filter(|(_, idle)| *idle >= IDLE).map(|(name, _)| name).collect()
}

/// Everything of a service: its partitions, too.
pub(super) fn whole(service: &ServiceId) -> Prefix {
    Prefix::new(*service, SERVICE_BITS)
}

pub(super) fn homes_of(agent: &Agent, service: &ServiceId) -> Vec<Arc<Home>> {
    // A serviceID in full is always a name.
    let name = service.to_string().parse::<Name>();
    name.map(|name| agent.publishing.services.homes_of(&name)).unwrap_or_default()
}

/// Who serves anything of a service; `None` while no router has said so.
pub(super) fn instances_under(
    agent: &Agent,
    service: &ServiceId,
    prefix: &Prefix,
) -> Option<Vec<registration::Instance>> {
    if let Some(router) = &agent.routing.router {
        return Some(router.instances_under(prefix));
    }
    let homes = homes_of(agent, service);
    if homes.is_empty() {
        let mut own = agent.publishing.services.own_instances();
        own.retain(|instance| prefix.overlaps(&instance.prefix));
        return Some(own);
    }
    let mut heard: Vec<registration::Instance> = Vec::new();
    let mut has_heard = false;
    // What a router said that is gone may be so no longer, where another one is there to say it.
    let is_there = |home: &&Arc<Home>| home::is_connected(home);
    let mut homes: Vec<&Arc<Home>> = homes.iter().collect();
    if homes.iter().any(is_there) {
        homes.retain(is_there);
    }
    for found in homes.iter().filter_map(|home| home.watched(prefix)) {
        has_heard = true;
        // A host may be registered with several routers.
        let is_new = |one: &registration::Instance| {
            !heard.iter().any(|known| (known.host, known.prefix) == (one.host, one.prefix))
        };
        let new: Vec<_> = found.into_iter().filter(is_new).collect();
        heard.extend(new);
    }
    has_heard.then_some(heard)
}

/// Where the search for a free address begins.
pub(super) fn first_number((name, host): &Whom) -> u32 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(name.to_string().as_bytes()).update(&host.0);
    let hash = hasher.finalize();
    hash.as_bytes()[..4].iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn names_that_nobody_sends_to_are_let_go_of_whether_they_are_served_or_not() {
        let name = |port| SocketAddr::new([198, 18, 0, 9].into(), port);
        let now = Instant::now() + IDLE;
        let sought = |idle: Duration| Sought { service: ServiceId::default(), asked: now - idle, shown: None };
        let soon = IDLE - Duration::from_secs(60);
        // 1 and 2 are served; when they were asked for says nothing. 3 and 4 are not. 5 is of an agent before this.
        let names = [(1, IDLE), (2, IDLE), (3, IDLE), (4, soon)].map(|(port, idle)| (name(port), sought(idle)));
        let spreads = [(1, Duration::ZERO), (2, IDLE), (5, IDLE)].map(|(port, idle)| (name(port), idle));
        let found = unused(&names.into(), &spreads.into(), now);
        assert_eq!(found, [name(3), name(2), name(5)]);
    }
}
