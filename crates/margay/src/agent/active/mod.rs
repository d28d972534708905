//! Active sockets (DESIGN §3.7, §9; Serval §4.1): a name is served because a program listens, and no longer when none
//! does.
//!
//! Reading order: [`rule`] (which sockets serve which name), [`bound`] (those that a program named itself), [`cgroup`]
//! (what marks a program), this file (what happens, and what follows from it), [`namespace`], [`keep`].

pub mod bound;
pub mod cgroup;
pub mod configured;
mod executable;
pub mod keep;
pub mod namespace;
pub mod rule;
mod serving;
mod word;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use margay_core::name::{Name, Prefix};
use margay_datapath::active_sockets::{ActiveSockets, CgroupId, Change, Cookie, OwnerId, Socket, Watch};
use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;

use super::listening::{Origin, Place};
use super::service::Services;
use super::{Agent, INTERFACE};
use crate::config::Config;
use crate::host;
use crate::listener::Protocol;
use bound::{BOUND_MAX, BindError, Bound};
use cgroup::Hierarchy;
use executable::executable_of;
use keep::{Kept, Program};
use namespace::Namespace;
use rule::{Offer, Rule, Seen, Source};
pub use serving::Waiting;

/// More programs are a mistake.
const PROGRAMS_MAX: usize = 4000;
/// Bound sockets of which each is kept when it is bound; of more, within two seconds.
const KEPT_AT_ONCE: usize = 256;
/// From an event to what follows from it. A thousand short-lived listeners are not a thousand messages to a router, and
/// a server that closes a socket to open the next one is not gone meanwhile.
const PAUSE: Duration = Duration::from_millis(10);

/// What listens here, and what follows from it.
pub struct Active(Result<Mutex<Followed>, String>);

/// A program that was started for a name.
struct Owner {
    program: Program,
    /// It was seen without a process and without a socket.
    is_idle: bool,
}

struct Followed {
    kernel: Arc<ActiveSockets>,
    hierarchy: Hierarchy,
    services: Arc<Services>,
    runtime_dir: PathBuf,
    owners: BTreeMap<OwnerId, Owner>,
    bound: BTreeMap<Cookie, Bound>,
    /// Sockets whose end the kernel reports: those that are bound, and those that have a name of their own.
    held: HashSet<Cookie>,
    /// What is kept is not what is.
    is_kept: bool,
    /// Of the configuration.
    rules: Vec<Rule>,
    sockets: HashMap<Cookie, Seen>,
    next_owner: u32,
    next_socket: u64,
    /// Why a name is not served although a program listens.
    problems: HashMap<Prefix, String>,
    /// What was said on the terminals of programs.
    said: HashMap<(OwnerId, Prefix), String>,
    /// Ports of this network namespace whose datagram sockets the kernel reports.
    watched: BTreeSet<u16>,
}

/// What somebody wants to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// Names, ports, and who may connect.
    pub offers: Vec<Offer>,
    /// Keep the program's sockets off the network.
    pub private: bool,
    /// What is started, for people.
    pub command: String,
    /// Sockets that it was given, by cookie.
    pub passed: Vec<u64>,
    /// All that is in the process's cgroup already, instead of the process alone: a unit of systemd.
    pub whole_cgroup: bool,
}

/// The programs that report what listens here, attached, and whom they report of.
pub struct Reporters(Result<(Hierarchy, ActiveSockets), String>);

impl Reporters {
    /// Attaches them, which takes a while.
    pub fn attach(config: &Config) -> Self {
        let hierarchy = Hierarchy::find(&config.host.runtime_dir);
        let hierarchy = hierarchy.map_err(|error| format!("no cgroups of version 2: {error}"));
        Self(hierarchy.and_then(|hierarchy| {
            let kernel = ActiveSockets::open(hierarchy.root(), config.ranges()).map_err(|error| error.to_string())?;
            Ok((hierarchy, kernel))
        }))
    }
}

impl Active {
    /// Takes up what the agent before has left. Names are served from now on.
    pub fn open(config: &Config, services: &Arc<Services>, reporters: Reporters) -> Self {
        let opened =
            reporters.0.and_then(|reporters| Followed::open(config, services, reporters)).map(|mut followed| {
                followed.look();
                followed.drop_bound_that_ended();
                Mutex::new(followed)
            });
        if let Err(why) = &opened {
            tracing::warn!(why, "no active sockets: services are published by order only");
        }
        services.end_old_lookups();
        Self(opened)
    }

    /// Why there are none.
    pub fn why_not(&self) -> Option<&str> {
        self.0.as_ref().err().map(String::as_str)
    }

    /// Serves names by what a process, and all that it starts, listens on.
    ///
    /// # Errors
    ///
    /// What is wrong with the order, or why this host cannot.
    pub fn attach(&self, pid: u32, order: Order) -> Result<OwnerId, String> {
        let followed = self.0.as_ref().map_err(|why| format!("there are no active sockets here: {why}"))?;
        followed.lock().attach(pid, order)
    }

    /// Lets a socket serve a name from the moment at which it listens, until it is closed.
    ///
    /// # Errors
    ///
    /// Why not.
    pub fn bind(&self, bound: Bound, socket: Socket) -> Result<(), BindError> {
        let followed = self.0.as_ref().map_err(|why| BindError::Unavailable(why.clone()))?;
        followed.lock().bind(bound, socket)
    }

    /// Reports the end of a socket.
    ///
    /// # Errors
    ///
    /// Why not.
    pub fn hold(&self, cookie: Cookie) -> Result<(), BindError> {
        let followed = self.0.as_ref().map_err(|why| BindError::Unavailable(why.clone()))?;
        followed.lock().hold(cookie)
    }

    /// What is published has changed: datagram sockets on its ports count from now on, and on no others.
    ///
    /// # Errors
    ///
    /// There are too many such ports.
    pub fn follow_orders(&self) -> Result<(), String> {
        let Ok(followed) = &self.0 else { return Ok(()) };
        let mut followed = followed.lock();
        if followed.watch_ports()? {
            // A socket may be there already.
            followed.look();
        }
        Ok(())
    }

    /// Whether the programs of this host leave room for an order of a name.
    ///
    /// # Errors
    ///
    /// One of them has it for itself, or the order would.
    pub fn check_order(&self, name: &Name, exclusive: bool) -> Result<(), String> {
        self.0.as_ref().map_or(Ok(()), |followed| followed.lock().check_programs(name, exclusive, None))
    }

    /// Sets the share of a name among instances in all that programs of this host offer of it, until they end; gives
    /// whether there is anything of it. What is served already follows by [`Services::set_weight`].
    pub fn set_weight(&self, name: &Name, weight: u32) -> bool {
        self.0.as_ref().is_ok_and(|followed| followed.lock().set_weight(name, weight))
    }

    /// Where cgroups are, and those of programs that were started for a name, or for the service or prefix with the
    /// most bits that it is under.
    ///
    /// # Errors
    ///
    /// There are no cgroups.
    pub fn cgroups(&self, name: &Name) -> Result<(Hierarchy, Vec<PathBuf>), String> {
        let followed = self.0.as_ref().map_err(Clone::clone)?.lock();
        let prefix = name.prefix();
        let bits = |owner: &Owner| {
            let served = owner.program.offers.iter().map(Offer::served);
            served.filter(|served| served.covers(&prefix)).map(|served| served.bits).max()
        };
        let most = followed.owners.values().filter_map(bits).max();
        let serves = |owner: &&Owner| most.is_some() && bits(owner) == most;
        let cgroups = followed.owners.values().filter(serves).map(|owner| owner.program.cgroup.clone()).collect();
        Ok((followed.hierarchy.clone(), cgroups))
    }

    /// Names that have a program and no socket.
    pub fn waiting(&self) -> Vec<Waiting> {
        self.0.as_ref().map(|followed| followed.lock().waiting()).unwrap_or_default()
    }

    /// How many programs were started for names, how many sockets listen, and how many are bound to names.
    pub fn counts(&self) -> (usize, usize, usize) {
        let count = |followed: &Mutex<Followed>| {
            let followed = followed.lock();
            (followed.owners.len(), followed.sockets.len(), followed.bound.len())
        };
        self.0.as_ref().map(count).unwrap_or_default()
    }

    /// Gives the held sockets that have ended.
    fn hear(&self) -> Vec<Cookie> {
        self.0.as_ref().map(|followed| followed.lock().hear()).unwrap_or_default()
    }

    /// Forgets programs that have ended.
    pub fn sweep(&self) {
        if let Ok(followed) = &self.0 {
            followed.lock().sweep();
        }
    }
}

/// Hears what happens, on a thread of its own, until the process ends.
///
/// # Errors
///
/// The system gives no thread.
pub fn start(agent: &Arc<Agent>) -> std::io::Result<()> {
    let Ok(followed) = &agent.publishing.active.0 else { return Ok(()) };
    let kernel = Arc::clone(&followed.lock().kernel);
    let agent = Arc::downgrade(agent);
    let hear = move || {
        loop {
            match poll(&mut [PollFd::new(kernel.events(), PollFlags::POLLIN)], PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => {
                    tracing::error!(%error, "what programs do with their sockets is not heard any more");
                    return;
                }
            }
            thread::sleep(PAUSE);
            let Some(agent) = agent.upgrade() else { return };
            agent.connections.programs.forget(&agent.core, &agent.publishing.active.hear());
        }
    };
    thread::Builder::new().name("margay-active".to_owned()).spawn(hear).map(drop)
}

/// Leaves programs without an agent: `margay down`. They run on, and the agent of the next `up` serves them again; of
/// those that have ended nothing stays (decision 0062).
pub fn leave(runtime_dir: &Path) {
    let Kept { mut programs, bound, .. } = keep::read(runtime_dir);
    programs.retain(|program| {
        let runs = !cgroup::is_empty(&program.cgroup);
        if !runs {
            cgroup::remove(&program.cgroup);
        }
        runs
    });
    keep::leave(runtime_dir, &Kept::new(programs, bound));
    Hierarchy::release(runtime_dir);
}

impl Followed {
    fn open(
        config: &Config,
        services: &Arc<Services>,
        (hierarchy, kernel): (Hierarchy, ActiveSockets),
    ) -> Result<Self, String> {
        let runtime_dir = config.host.runtime_dir.clone();
        let mut followed = Self {
            kernel: Arc::new(kernel),
            hierarchy,
            services: Arc::clone(services),
            owners: BTreeMap::new(),
            bound: BTreeMap::new(),
            held: HashSet::new(),
            is_kept: true,
            rules: configured::rules(config),
            sockets: HashMap::new(),
            next_owner: 1,
            next_socket: 0,
            problems: HashMap::new(),
            said: HashMap::new(),
            watched: BTreeSet::new(),
            runtime_dir,
        };
        let Kept { programs, bound, .. } = keep::read(&followed.runtime_dir);
        for bound in bound {
            // Those that are gone are found out by the first look.
            if followed.hold(bound.cookie()).is_ok() {
                followed.bound.insert(bound.cookie(), bound);
            }
        }
        followed.watch_ports()?;
        for program in programs {
            let is_there = cgroup::id(&program.cgroup).is_ok_and(|id| id.0 == program.cgroup_id);
            if is_there && let Err(why) = followed.adopt(program) {
                tracing::warn!(why, "a program that serves names is not followed any more");
            }
        }
        Ok(followed)
    }

    /// Lets the kernel report datagram sockets on the ports of all orders and of the configuration; gives whether there
    /// are new ones.
    fn watch_ports(&mut self) -> Result<bool, String> {
        let published = self.services.list();
        let of_orders = published.iter().flat_map(|service| &service.listeners);
        let of_orders = of_orders.filter(|known| !known.is_passed()).map(|known| known.address.port());
        let of_rules = self.rules.iter().flat_map(|rule| [rule.offer.port, rule.offer.listen_port]).flatten();
        let datagrams = self.bound.values().filter(|bound| bound.protocol == Protocol::Udp);
        let of_bound = datagrams.map(|bound| bound.port);
        let wanted: BTreeSet<u16> = of_orders.chain(of_rules).chain(of_bound).collect();
        for port in self.watched.difference(&wanted) {
            self.kernel.forget_datagrams(None, *port);
        }
        let is_more = !wanted.is_subset(&self.watched);
        for port in &wanted {
            self.kernel.want_datagrams(None, *port).map_err(|error| error.to_string())?;
        }
        self.watched = wanted;
        Ok(is_more)
    }

    fn attach(&mut self, pid: u32, order: Order) -> Result<OwnerId, String> {
        let Order { offers, private, command, passed, whole_cgroup } = order;
        // With sockets that it was given, or as a unit that runs.
        let listens_already = whole_cgroup || !passed.is_empty();
        if self.owners.len() >= PROGRAMS_MAX {
            return Err(format!("{PROGRAMS_MAX} programs are followed already; more are a mistake"));
        }
        let unit = if whole_cgroup { Some(self.unit_of(pid)?) } else { None };
        for offer in &offers {
            self.check_all(&offer.name, offer.exclusive, unit.as_deref())?;
            self.services.claim(&offer.name).map_err(|error| error.to_string())?;
        }
        let refused = |error: std::io::Error| format!("no cgroup for process {pid}: {error}");
        let cgroup = match unit {
            Some(unit) => unit,
            None => self.hierarchy.isolate(pid).map_err(refused)?,
        };
        let cgroup_id = cgroup::id(&cgroup).map_err(refused)?.0;
        // A unit that is started again has a new order, or the same once more.
        let before: Vec<OwnerId> =
            self.owners.iter().filter(|(_, owner)| owner.program.cgroup_id == cgroup_id).map(|(id, _)| *id).collect();
        before.into_iter().for_each(|id| self.forget(id));
        let boxes = offers.iter().filter(|offer| offer.middlebox.is_some()).map(|offer| offer.name.clone()).collect();
        let owner = self.adopt(Program { offers, private, command, cgroup, cgroup_id, passed })?;
        self.keep();
        self.tell(boxes);
        if listens_already {
            self.look();
        }
        Ok(owner)
    }

    /// Whether the programs of this host leave a name to a newcomer, which may want it for itself alone. `unit` is what
    /// the newcomer replaces.
    fn check_programs(&mut self, name: &Name, exclusive: bool, unit: Option<&Path>) -> Result<(), String> {
        let conflicts = |owner: &Owner| {
            let program = &owner.program;
            let is_same = |offer: &Offer| offer.name.prefix() == name.prefix() && (exclusive || offer.exclusive);
            unit != Some(program.cgroup.as_path()) && program.offers.iter().any(is_same)
        };
        if self.owners.values().any(conflicts) {
            // Who has just ended is not in the way.
            self.hear();
            self.forget_ended(|_| true);
        }
        self.owners.values().find(|owner| conflicts(owner)).map_or(Ok(()), |owner| {
            let command = &owner.program.command;
            Err(format!("`{command}` serves {name} on this host, and one program alone may; stop it first"))
        })?;
        let bound = self.bound.values().find(|bound| exclusive && bound.name.prefix() == name.prefix());
        bound.map_or(Ok(()), |bound| {
            let program = &bound.program;
            Err(format!("{program} has bound a socket to {name}, and one program alone may serve it; stop it first"))
        })
    }

    /// The same of everything that serves names here.
    fn check_all(&mut self, name: &Name, exclusive: bool, unit: Option<&Path>) -> Result<(), String> {
        self.check_programs(name, exclusive, unit)?;
        let of_rules = self.rules.iter().find(|rule| rule.offer.name.prefix() == name.prefix());
        let mut in_way = of_rules.filter(|rule| exclusive || rule.offer.exclusive).map(|_| "the configuration");
        if let Some(known) = self.services.find(name) {
            let ordered = known.listeners.iter().find(|listener| listener.origin != Origin::Socket);
            in_way = in_way.or(ordered.filter(|_| exclusive || known.terms.exclusive).map(|listener| {
                match listener.origin {
                    Origin::Configuration => "the configuration",
                    _ => "an order (`margay service withdraw` ends it)",
                }
            }));
        }
        in_way
            .map_or(Ok(()), |what| Err(format!("{name} is served here by {what}, and one program alone may serve it")))
    }

    fn unit_of(&self, pid: u32) -> Result<PathBuf, String> {
        let path = self.hierarchy.of(pid).map_err(|error| format!("no cgroup of process {pid}: {error}"))?;
        // Where systemd runs what prepares a unit that has a subtree of its own.
        let path = if path.ends_with(".control") { path.parent().unwrap_or(&path).to_owned() } else { path };
        if path == self.hierarchy.root() {
            return Err(
                "this process is in no cgroup of its own, and all programs of the host would be meant".to_owned()
            );
        }
        Ok(path)
    }

    /// Marks a program's cgroup in the kernel.
    fn adopt(&mut self, program: Program) -> Result<OwnerId, String> {
        let id = OwnerId(self.next_owner);
        self.next_owner += 1;
        let low_ports = program.offers.iter().any(|offer| offer.port.or(offer.listen_port).is_none());
        let watch = Watch { private: program.private, low_ports };
        let cgroup = CgroupId(program.cgroup_id);
        let marked = ports(&program.offers)
            .try_for_each(|port| self.kernel.want_datagrams(Some(id), port))
            .and_then(|()| self.kernel.set_owner(cgroup, id, watch));
        self.owners.insert(id, Owner { program, is_idle: false });
        marked.map_err(|error| {
            self.forget(id);
            error.to_string()
        })?;
        Ok(id)
    }

    fn forget(&mut self, id: OwnerId) {
        let Some(Owner { program, .. }) = self.owners.remove(&id) else { return };
        self.kernel.forget_owner(CgroupId(program.cgroup_id));
        ports(&program.offers).for_each(|port| self.kernel.forget_datagrams(Some(id), port));
        cgroup::remove(&program.cgroup);
        self.tell(program.offers.iter().map(|offer| offer.name.clone()).collect());
    }

    fn hold(&mut self, cookie: Cookie) -> Result<(), BindError> {
        self.kernel.hold(cookie).map_err(|error| BindError::Full(error.to_string()))?;
        self.held.insert(cookie);
        Ok(())
    }

    fn bind(&mut self, bound: Bound, socket: Socket) -> Result<(), BindError> {
        let (cookie, name) = (bound.cookie(), bound.name.clone());
        let before = self.bound.get(&cookie).cloned();
        if before.as_ref() == Some(&bound) {
            return Ok(());
        }
        if self.bound.len() >= BOUND_MAX && before.is_none() {
            return Err(BindError::Full(format!("{BOUND_MAX} sockets of this host are bound to names; close some")));
        }
        self.check_all(&name, false, None).map_err(BindError::Taken)?;
        self.services.claim(&name)?;
        self.hold(cookie)?;
        let is_datagram = bound.protocol == Protocol::Udp;
        self.bound.insert(cookie, bound);
        if is_datagram {
            // A datagram socket listens already, and nobody was told, since nobody wanted its port.
            if let Err(why) = self.watch_ports() {
                self.unbind(cookie);
                return Err(BindError::Full(why));
            }
            if !self.sockets.contains_key(&cookie) {
                self.begin(socket);
            }
        }
        self.tell(before.map(|before| before.name).into_iter().chain([name.clone()]).collect());
        self.show();
        if let Some(why) = self.problems.get(&name.prefix()).cloned() {
            self.unbind(cookie);
            return Err(BindError::Refused(why));
        }
        // Of very many, each would be written with every one that follows.
        self.is_kept = false;
        if self.bound.len() <= KEPT_AT_ONCE {
            self.keep();
        }
        Ok(())
    }

    /// Forgets what was promised to a socket.
    fn unbind(&mut self, cookie: Cookie) {
        let Some(bound) = self.bound.remove(&cookie) else { return };
        self.is_kept = false;
        if bound.protocol == Protocol::Udp {
            self.sockets.remove(&cookie);
            if let Err(why) = self.watch_ports() {
                tracing::warn!(why, "datagram sockets that serve names may go unheard");
            }
        }
        self.tell(BTreeSet::from([bound.name]));
    }

    /// Of what the agent before has left: sockets that listen no longer are gone, most likely. A program that has not
    /// come to `listen` yet binds again when it does.
    fn drop_bound_that_ended(&mut self) {
        let ended: Vec<Cookie> =
            self.bound.keys().filter(|cookie| !self.sockets.contains_key(cookie)).copied().collect();
        for cookie in ended {
            self.held.remove(&cookie);
            self.kernel.let_go(cookie);
            self.unbind(cookie);
        }
    }

    fn keep(&mut self) {
        let programs = self.owners.values().map(|owner| owner.program.clone()).collect();
        let kept = Kept::new(programs, self.bound.values().cloned().collect());
        self.is_kept = true;
        if let Err(error) = keep::write(&self.runtime_dir, &kept) {
            tracing::warn!(%error, "a restart of the agent will not know the programs that serve names");
        }
    }

    fn sweep(&mut self) {
        // Twice, since a unit's socket is made by nobody who is in its cgroup for long.
        self.forget_ended(|owner| owner.is_idle);
        self.say_what_is_refused();
    }

    /// Tells on the terminals of programs why their names are not served; each thing once.
    fn say_what_is_refused(&mut self) {
        let mut refused = HashMap::new();
        for (id, owner) in &self.owners {
            for name in owner.program.offers.iter().map(|offer| &offer.name) {
                let prefix = name.prefix();
                let here = self.problems.get(&prefix).cloned();
                if let Some(why) = here.or_else(|| self.services.refused(name)) {
                    refused.insert((*id, prefix), format!("{name} is not served: {why}"));
                }
            }
        }
        for (whom, text) in refused.iter().filter(|(whom, text)| self.said.get(*whom) != Some(*text)) {
            let cgroup = self.owners.get(&whom.0).map(|owner| owner.program.cgroup.as_path());
            let first = cgroup.and_then(|cgroup| cgroup::processes(cgroup).into_iter().min());
            first.into_iter().for_each(|pid| word::say(pid, text));
        }
        self.said = refused;
    }

    /// Forgets programs that have neither a process nor a socket.
    fn forget_ended(&mut self, is_old: impl Fn(&Owner) -> bool) {
        let mut ended = Vec::new();
        for (id, owner) in &mut self.owners {
            let is_idle = cgroup::is_empty(&owner.program.cgroup)
                && !self.sockets.values().any(|socket| socket.owner == Some(*id));
            if is_idle && is_old(owner) {
                ended.push(*id);
            }
            owner.is_idle = is_idle;
        }
        if ended.is_empty() && self.is_kept {
            return;
        }
        for id in ended {
            self.forget(id);
        }
        self.keep();
    }

    /// What the kernel has to say.
    fn hear(&mut self) -> Vec<Cookie> {
        let (mut touched, mut released) = (BTreeSet::new(), Vec::new());
        let mut needs_look = self.kernel.has_lost();
        if needs_look {
            released.extend(self.held.iter().filter(|cookie| !self.kernel.is_held(**cookie)).copied());
        }
        for change in self.kernel.take() {
            match change {
                Change::Rebound => needs_look = true,
                Change::Listens(socket) if socket.address.port() == 0 => needs_look = true,
                Change::Listens(socket) => touched.extend(self.begin(socket)),
                Change::Ended(cookie) => touched.extend(self.end(cookie)),
                Change::Released(cookie) => released.push(cookie),
            }
        }
        for cookie in &released {
            self.held.remove(cookie);
            self.unbind(*cookie);
        }
        self.tell(touched);
        self.show();
        if needs_look {
            self.look();
        }
        released
    }

    /// What is published by order or by the configuration follows its sockets, too.
    fn show(&self) {
        let here = self.sockets.values().filter(|socket| socket.elsewhere.is_none() && socket.interface.is_none());
        let place = |seen: &Seen| {
            let Seen { address, protocol, takes_both, .. } = *seen;
            Place { address, protocol, takes_both }
        };
        self.services.set_listening(here.map(place).collect());
    }

    /// Looks at all sockets, where what happened is not known: at the start, and when too much happened at once.
    fn look(&mut self) {
        let own = self.kernel.own_namespace();
        let mut places: Vec<Namespace> = Vec::new();
        for owner in self.owners.values() {
            for found in Namespace::of_cgroup(&owner.program.cgroup, own) {
                if !places.iter().any(|known| known.cookie == found.cookie) {
                    places.push(found);
                }
            }
        }
        let looks = std::iter::once(None).chain(places.iter().map(|place| Some(place.file.as_fd())));
        let mut found: HashMap<Cookie, Socket> = HashMap::new();
        for place in looks {
            match self.kernel.listening(place) {
                Ok(sockets) => found.extend(sockets.into_iter().map(|socket| (socket.cookie, socket))),
                Err(error) => {
                    tracing::warn!(%error, "what listens in a network namespace is not known");
                    return;
                }
            }
        }
        let mut touched = BTreeSet::new();
        // Of a namespace that no process leads to any more, the end of a socket is heard all the same.
        let is_looked_at = |seen: &Seen| seen.elsewhere.is_none_or(|at| places.iter().any(|place| place.cookie == at));
        let is_gone = |(cookie, seen): &(&Cookie, &Seen)| is_looked_at(seen) && !found.contains_key(cookie);
        let gone: Vec<Cookie> = self.sockets.iter().filter(is_gone).map(|(cookie, _)| *cookie).collect();
        for cookie in gone {
            touched.extend(self.end(cookie));
        }
        for socket in found.into_values() {
            let known = self.sockets.get(&socket.cookie);
            let owner = self.owner_of(&socket);
            let is_new = |known: &Seen| {
                known.owner.is_none() && owner.is_some() || known.interface != self.interface_of(&socket)
            };
            if known.is_none_or(is_new) {
                touched.extend(self.begin(socket));
            }
        }
        self.tell(touched);
        self.show();
    }

    /// Whose it is: of a program that was given it, or of the cgroup that it was made or made listening in.
    fn owner_of(&self, socket: &Socket) -> Option<OwnerId> {
        let given = |owner: &Owner| owner.program.passed.contains(&socket.cookie.0);
        let passed = self.owners.iter().find(|(_, owner)| given(owner)).map(|(id, _)| *id);
        passed.or(socket.owner).filter(|id| self.owners.contains_key(id))
    }

    /// Takes note of a socket that listens; gives the names that it may serve.
    fn begin(&mut self, socket: Socket) -> Vec<Name> {
        let Some(protocol) = Protocol::of_number(socket.protocol) else { return Vec::new() };
        let owner = self.owner_of(&socket);
        let elsewhere = Some(socket.namespace).filter(|at| *at != self.kernel.own_namespace());
        let address = if elsewhere.is_none() { Ok(socket.address) } else { self.reachable(&socket, owner) };
        let address = match address {
            Ok(address) => address,
            Err(why) => {
                tracing::warn!(address = %socket.address, why, "a socket cannot be reached");
                return Vec::new();
            }
        };
        let executable = socket.executable.or_else(|| {
            let is_wanted =
                elsewhere.is_none() && self.rules.iter().any(|rule| matches!(rule.source, Source::Host(Some(_))));
            is_wanted.then(|| executable_of(protocol, address)).flatten()
        });
        self.next_socket += 1;
        let cookie = socket.cookie;
        // A socket elsewhere is reached at one address, of one family.
        let takes_both = socket.takes_both && elsewhere.is_none();
        let (number, interface) = (self.next_socket, self.interface_of(&socket));
        let seen = Seen { cookie, number, owner, elsewhere, executable, protocol, address, takes_both, interface };
        let names = self.names_of(&seen);
        self.sockets.insert(socket.cookie, seen);
        names
    }

    /// The interface that keeps Margay's packets from a socket. Those of another network namespace come by its own
    /// interfaces.
    fn interface_of(&self, socket: &Socket) -> Option<NonZeroU32> {
        let is_sal0 = |interface: NonZeroU32| if_nametoindex(INTERFACE).is_ok_and(|index| index == interface.get());
        socket.interface.filter(|_| socket.namespace == self.kernel.own_namespace()).filter(|one| !is_sal0(*one))
    }

    /// Forgets a socket; gives the names that it may have served.
    fn end(&mut self, cookie: Cookie) -> Vec<Name> {
        self.sockets.remove(&cookie).map(|socket| self.names_of(&socket)).unwrap_or_default()
    }

    fn reachable(&self, socket: &Socket, owner: Option<OwnerId>) -> Result<SocketAddr, String> {
        let owner = owner.and_then(|owner| self.owners.get(&owner)).ok_or("its program is not followed any more")?;
        let places = Namespace::of_cgroup(&owner.program.cgroup, self.kernel.own_namespace());
        let place = places.iter().find(|place| place.cookie == socket.namespace);
        let place = place.ok_or("no process of its program is in its network namespace any more")?;
        place.reachable(socket.address, host::has_address)
    }

    fn set_weight(&mut self, name: &Name, weight: u32) -> bool {
        let prefix = name.prefix();
        let of_owners = self.owners.values_mut().flat_map(|owner| &mut owner.program.offers);
        let of_rules = self.rules.iter_mut().map(|rule| &mut rule.offer);
        let mut is_any = false;
        for offer in of_owners.chain(of_rules).filter(|offer| offer.name.prefix() == prefix) {
            offer.weight = weight;
            is_any = true;
        }
        for bound in self.bound.values_mut().filter(|bound| bound.name.prefix() == prefix) {
            bound.weight = Some(weight);
            is_any = true;
        }
        if is_any {
            self.keep();
        }
        is_any
    }
}

/// Ports that are named in offers, for which datagram sockets are watched.
fn ports(offers: &[Offer]) -> impl Iterator<Item = u16> {
    offers.iter().flat_map(|offer| [offer.port, offer.listen_port]).flatten()
}
