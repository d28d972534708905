//! The services that this host publishes: rules in its own table, certificates, and registrations with its routers.
//!
//! What is published while the agent runs is kept on disk, so that a restart of the agent changes nothing.

pub mod checks;
mod configured;
pub mod datagrams;
pub mod drained;
pub mod fitness;
mod kept;
mod published;
mod share;
pub mod tenancy;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use margay_control::keyring::Keyring;
use margay_control::registration::{Acknowledgement, Home, Instance, Local, OwnService, Registration, Router, Terms};
use margay_control::store::{NameError, Store};
use margay_control::warrant::Permit;
use margay_control::{Clock, SalControl, StateDir, StateError, issue};
use margay_core::Ranges;
use margay_core::fair_table::Peer;
use margay_core::give_up::GiveUpAfter;
use margay_core::name::{Name, Prefix, authority_block};
use margay_core::table::{Action, Rule, RuleId, TableError};
use parking_lot::Mutex;
use tokio::sync::watch;

use self::checks::Checks;
use self::datagrams::EndDatagrams;
use self::drained::Drained;
use self::fitness::Fitness;
pub use self::published::{Published, served_prefix};
use super::listening::{self, Listener, Listening, Origin};
use super::lookup::{self, LookUp};
use crate::config::ServiceSection;
use crate::listener::{self, Protocol, WEIGHT_MAX};
use crate::{allow, host};

/// Why a box is not served.
pub const NO_FORWARDING: &str = "this host forwards no sessions: write `boxes = true` into [host] of its \
                                 configuration, and run `margay up --restart`";
/// More listeners of one host are a mistake.
const LISTENERS_MAX: usize = 10_000;

/// What somebody publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publication {
    /// The name.
    pub name: Name,
    /// Where it is served.
    pub listener: Listener,
    /// How.
    pub terms: Terms,
    /// By order: how this agent finds out whether it is well. The configuration is asked for its own.
    pub checks: Checks,
}

impl Publication {
    /// What the configuration says, where it names a listener.
    pub fn of_section(section: &ServiceSection) -> Option<Self> {
        let address = section.listen?;
        Some(Self {
            name: section.name.0.clone(),
            listener: Listener {
                address,
                service_port: section.service_port(),
                protocol: section.protocol,
                allow: section.allow.clone(),
                middlebox: None,
                origin: Origin::Configuration,
                takes_both: false,
            },
            terms: section.terms(),
            checks: Checks::default(),
        })
    }
}

/// Why a service is not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The request makes no sense.
    #[error("{0}")]
    Misuse(String),
    /// Another written name has the same bits.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The service table.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The disk.
    #[error(transparent)]
    State(#[from] StateError),
    /// A program serves it by listening.
    #[error(
        "{0} is served because a program listens: `margay service withdraw` without --listen, or `margay service set \
         --weight 0`, keeps new connections away"
    )]
    Followed(String),
    /// Nothing of it is here.
    #[error("{0} is not published by this host; `margay service list` shows what is")]
    Unknown(String),
}

/// All of them.
pub struct Services {
    core: Arc<dyn SalControl>,
    local: Local,
    keyring: Keyring,
    store: Arc<Store>,
    clock: Clock,
    dir: StateDir,
    router: Option<Arc<Router>>,
    homes: watch::Sender<Vec<Arc<Home>>>,
    published: Mutex<Vec<Published>>,
    /// `None` where the kernel does not say what listens: then whatever is published counts.
    listening: Mutex<Option<Listening>>,
    /// Addresses whose listeners are looked up.
    looked_up: Mutex<HashSet<SocketAddr>>,
    look_up: LookUp,
    ranges: Ranges,
    /// This host's kernel forwards what comes by `sal0`.
    forwards: bool,
    /// All that listened at the start is known.
    has_all: AtomicBool,
    changes: watch::Sender<u64>,
    drained: Mutex<Drained>,
    fitness: Mutex<BTreeMap<Prefix, Fitness>>,
    /// Of what is published by order.
    checks: Mutex<BTreeMap<Prefix, (Name, Checks)>>,
    with_datagram_sockets: Mutex<BTreeSet<Prefix>>,
    end_datagrams: EndDatagrams,
}

/// What the services need of the rest of the agent.
pub struct Surroundings {
    /// The core.
    pub core: Arc<dyn SalControl>,
    /// Who this agent is.
    pub local: Local,
    /// Keys that this host has.
    pub keyring: Keyring,
    /// The store.
    pub store: Arc<Store>,
    /// The wall clock.
    pub clock: Clock,
    /// Where publications are kept.
    pub dir: StateDir,
    /// The router on this host.
    pub router: Option<Arc<Router>>,
    /// Brings connections to listeners at one address.
    pub look_up: LookUp,
    /// The virtual addresses of this host.
    pub ranges: Ranges,
    /// Ends flows of datagrams whose socket is gone.
    pub end_datagrams: EndDatagrams,
}

impl Services {
    /// Nothing is published yet. `forwards`: this host's kernel forwards what comes by `sal0`.
    pub fn new(around: Surroundings, forwards: bool) -> Self {
        let Surroundings { core, local, keyring, store, clock, dir, router, look_up, ranges, end_datagrams } = around;
        let (homes, published, listening) = (watch::Sender::default(), Mutex::default(), Mutex::default());
        let (looked_up, changes) = (Mutex::default(), watch::Sender::default());
        Self {
            core,
            local,
            keyring,
            store,
            clock,
            dir,
            router,
            homes,
            published,
            listening,
            looked_up,
            look_up,
            ranges,
            forwards,
            has_all: AtomicBool::new(false),
            changes,
            drained: Mutex::default(),
            fitness: Mutex::default(),
            checks: Mutex::default(),
            with_datagram_sockets: Mutex::default(),
            end_datagrams,
        }
    }

    /// Publishes what was published before the restart, then what the configuration says, which wins.
    ///
    /// # Errors
    ///
    /// The file is damaged, or something in it is refused.
    pub fn restore(&self, configured: &[Publication]) -> Result<(), PublishError> {
        for publication in self.kept()?.into_iter().chain(configured.iter().cloned()) {
            self.put(publication)?;
        }
        self.keep()
    }

    /// Adds a router that services are registered with.
    pub fn add_home(&self, home: Arc<Home>) {
        self.homes.send_modify(|homes| homes.push(Arc::clone(&home)));
        for service in self.list().into_iter().filter(|service| service.is_served) {
            if self.homes_of(&service.name).iter().any(|known| Arc::ptr_eq(known, &home)) {
                home.register(self.registration_of(&service));
            }
        }
    }

    /// Services are not registered there any more.
    pub fn remove_home(&self, home: &Arc<Home>) {
        self.homes.send_modify(|homes| homes.retain(|known| !Arc::ptr_eq(known, home)));
    }

    /// The routers.
    pub fn homes(&self) -> Vec<Arc<Home>> {
        self.homes.borrow().clone()
    }

    /// Names of the authorities that this host has joined by them.
    pub fn joined(&self) -> Vec<String> {
        self.homes.borrow().iter().map(|home| home.config().authority.clone()).collect()
    }

    /// The routers, and told whenever there is one more or less.
    pub fn home_changes(&self) -> watch::Receiver<Vec<Arc<Home>>> {
        self.homes.subscribe()
    }

    /// The routers of a name's authority; all of them for a name of an authority that nobody here knows: they will say
    /// why not.
    pub fn homes_of(&self, name: &Name) -> Vec<Arc<Home>> {
        let block = name.service_id().authority();
        let all = self.homes();
        let of_authority: Vec<Arc<Home>> =
            all.iter().filter(|home| authority_block(&home.config().authority) == block).cloned().collect();
        if of_authority.is_empty() && !self.signs(block) { all } else { of_authority }
    }

    fn signs(&self, block: [u8; 8]) -> bool {
        matches!(self.keyring.authority_of(block), Ok(Some(_)))
    }

    /// Publishes, or changes what was published.
    ///
    /// # Errors
    ///
    /// What is wrong; nothing has changed then.
    pub fn publish(&self, publication: Publication) -> Result<(), PublishError> {
        let name = publication.name.clone();
        let before = self.find(&name);
        let checks = self.checks_of(&name);
        self.put(publication)?;
        self.keep().inspect_err(|_| {
            // What cannot be kept is not published: a restart would lose it silently.
            self.take(&name.prefix());
            if let Some(before) = before {
                for listener in before.listeners {
                    let again =
                        Publication { name: name.clone(), listener, terms: before.terms, checks: checks.clone() };
                    if let Err(error) = self.put(again) {
                        tracing::error!(%name, %error, "what was published before cannot be put back");
                    }
                }
            }
            self.forget_checks(&name);
        })
    }

    fn put(&self, publication: Publication) -> Result<(), PublishError> {
        let Publication { name, listener, terms, checks } = publication;
        self.check(&name, &listener, terms)?;
        let is_ordered = listener.origin == Origin::Order;
        self.change_by_order(|| {
            self.change(&name, terms, |listeners| {
                listeners.retain(|known| !is_same_place(known, &listener));
                listeners.push(listener);
            })
        })?;
        if is_ordered {
            self.set_checks(&name, checks);
        }
        // Also what is registered already: whoever says it again may have a reason, a new key say.
        if let Some(service) = self.find(&name).filter(|service| service.is_served) {
            self.announce(&service);
        }
        Ok(())
    }

    /// Makes a name one of this host's.
    ///
    /// # Errors
    ///
    /// Another written name has the same bits, or the disk refuses.
    pub fn claim(&self, name: &Name) -> Result<(), PublishError> {
        Ok(self.store.claim_name(name, Peer::Own)?)
    }

    fn check(&self, name: &Name, listener: &Listener, terms: Terms) -> Result<(), PublishError> {
        listener.fits(name, self.ranges).map_err(PublishError::Misuse)?;
        check_weight(terms.weight)?;
        listener::usable_port(listener.service_port).map_err(PublishError::Misuse)?;
        listener::divisible(name, terms.partition_bits).map_err(PublishError::Misuse)?;
        allow::parse(&listener.allow).map_err(PublishError::Misuse)?;
        self.claim(name)
    }

    /// Changes the listeners of a name. Without any that has a socket it is not served here.
    fn change(&self, name: &Name, terms: Terms, act: impl FnOnce(&mut Vec<Listener>)) -> Result<(), PublishError> {
        let mut published = self.published.lock();
        let at = published.iter().position(|service| service.name.prefix() == name.prefix());
        let before = at.map(|at| published[at].clone());
        let mut service = before.clone().unwrap_or_else(|| Published::new(name.clone()));
        act(&mut service.listeners);
        service.terms = terms;
        service.is_drained = self.drained.lock().has(&service.name.prefix());
        service.fitness = self.fitness.lock().get(&service.name.prefix()).cloned().unwrap_or_default();
        self.note_families(&mut service);
        if service.is_of_several_kinds() {
            let text = format!(
                "{name} is the name of a box here, and of a program or of a box of another kind; withdraw the one, or \
                 rename the other"
            );
            return Err(PublishError::Misuse(text));
        }
        let had = before.as_ref().map_or(0, |before| before.listeners.len());
        let total: usize = published.iter().map(|service| service.listeners.len()).sum();
        if service.listeners.len() > had && total + service.listeners.len() - had > LISTENERS_MAX {
            let text = format!("this host publishes {LISTENERS_MAX} listeners already; withdraw some");
            return Err(PublishError::Misuse(text));
        }
        (service.is_served, service.refused) = self.standing(&service);
        if before.is_none() {
            service.tenancy = self.first_tenancy(&service);
        }
        if let Err(error) = self.put_in_table(before.as_ref(), &mut service) {
            drop(published);
            // Which may have admitted it already.
            self.tell_router();
            return Err(error);
        }
        let changed = service.clone();
        match (at, service.listeners.is_empty()) {
            (Some(at), true) => drop(published.remove(at)),
            (Some(at), false) => published[at] = service,
            (None, true) => {}
            (None, false) => published.push(service),
        }
        self.follow_lookups(&mut published);
        self.tell_routers(before.as_ref(), &changed);
        drop(published);
        self.tell_router();
        Ok(())
    }

    /// Whether a listener has a socket, where the kernel says so; what others forward to is not for it to say. One is
    /// enough for all of the name: an FTP server opens the port of a transfer when its client is about to connect
    /// there.
    fn has_socket(&self, service: &Published) -> bool {
        service.listeners.iter().any(|listener| self.is_taken(listener, |_| true))
    }

    /// The same of one listener, and of sockets of the protocols that count.
    fn is_taken(&self, listener: &Listener, counts: impl Fn(Protocol) -> bool) -> bool {
        self.listening.lock().as_ref().is_none_or(|sockets| {
            listener.origin == Origin::Socket
                || listener.is_passed()
                || !is_local(listener.address.ip(), self.ranges)
                || sockets.iter().any(|place| counts(place.protocol) && listener.is_taken_by(place))
        })
    }

    /// Takes note of which families its sockets take; gives whether that is new.
    fn note_families(&self, service: &mut Published) -> bool {
        let listening = self.listening.lock();
        let Some(listening) = listening.as_ref() else { return false };
        let before = service.listeners.clone();
        service.listeners.iter_mut().for_each(|listener| listener.note_families(listening));
        before != service.listeners
    }

    /// Whether a service is to be served now, and what the router on this host has against that.
    fn standing(&self, service: &Published) -> (bool, String) {
        if !self.has_socket(service) {
            return (false, String::new());
        }
        if service.is_passed() && !self.forwards {
            return (false, NO_FORWARDING.to_owned());
        }
        let admitted = self.router.as_ref().map_or(Ok(()), |router| router.admit_own(self.own_service(service)));
        admitted.map_or_else(|error| (false, error.to_string()), |()| (true, String::new()))
    }

    /// Makes the service table follow from what a service was and is.
    fn put_in_table(&self, before: Option<&Published>, service: &mut Published) -> Result<(), PublishError> {
        // New rules first: the table is never without one for the name.
        let old = std::mem::take(&mut service.rules);
        service.rules = self.add_rules(service)?;
        for rule in old {
            self.core.remove_rule(rule);
        }
        if service.is_served && !before.is_some_and(|before| before.is_told_as(service)) {
            self.core.set_own_terms(service.prefix(), service.terms.give_up_after_ms.map(GiveUpAfter::of_ms));
            self.certify(service);
        }
        Ok(())
    }

    /// Makes the routers follow from what a service was and is. After look-ups have begun, which may take seconds on a
    /// busy host: connections that come before are shown a surrogate.
    fn tell_routers(&self, before: Option<&Published>, service: &Published) {
        match (before.filter(|before| before.is_served), service.is_served) {
            (Some(before), false) => self.end(before.prefix()),
            (Some(before), true) if before.is_told_as(service) => {}
            (before, true) => {
                self.announce(service);
                if let Some(other) = before.map(Published::prefix).filter(|before| *before != service.prefix()) {
                    self.end(other);
                }
            }
            (None, false) => {}
        }
    }

    /// What listens here now: names whose socket is gone are withdrawn, those that have one again are served again.
    pub fn set_listening(&self, now: Listening) {
        *self.listening.lock() = Some(now);
        self.follow_standings();
        self.follow_datagrams();
    }

    /// The router on this host may have nothing against a name any more: another host has left. And of a name for one
    /// host alone the cluster may have decided otherwise.
    pub fn ask_own_router_again(&self) {
        let is_open = |service: &Published| !service.refused.is_empty() || service.terms.exclusive;
        if self.published.lock().iter().any(is_open) {
            self.follow_standings();
        }
    }

    fn follow_standings(&self) {
        let mut published = self.published.lock();
        let mut is_changed = false;
        let mut changed = Vec::new();
        for service in published.iter_mut() {
            let (is_served, refused) = self.standing(service);
            service.refused = refused;
            let before = service.clone();
            let are_families_new = self.note_families(service);
            if is_served == service.is_served && !are_families_new {
                continue;
            }
            service.is_served = is_served;
            // Also where it fails: the router may have admitted it.
            is_changed = true;
            if let Err(error) = self.put_in_table(Some(&before), service) {
                tracing::warn!(name = %before.name, %error, "a service does not follow its sockets");
                *service = before;
                continue;
            }
            tracing::info!(name = %service.name, served = service.is_served, "what listens has changed");
            changed.push((before, service.clone()));
        }
        self.follow_lookups(&mut published);
        changed.iter().for_each(|(before, service)| self.tell_routers(Some(before), service));
        drop(published);
        if is_changed {
            self.tell_router();
        }
    }

    /// Has those listeners looked up that are published now. Rules that count on a look-up come after it, and end
    /// before.
    fn follow_lookups(&self, published: &mut [Published]) {
        let before = self.looked_up.lock().clone();
        let listeners = published.iter().flat_map(|service| &service.listeners);
        let mut wanted = lookup::chosen(listeners, &before, self.ranges);
        if wanted == before {
            return;
        }
        let stays: HashSet<SocketAddr> = before.intersection(&wanted).copied().collect();
        self.look_up_in_rules(published, stays.clone());
        if !(self.look_up)(&wanted, self.has_all.load(Ordering::Relaxed)) {
            wanted = stays;
        }
        self.look_up_in_rules(published, wanted);
    }

    /// All that listens is known: what the agent before had looked up, and nobody serves any more, ends.
    pub fn end_old_lookups(&self) {
        self.has_all.store(true, Ordering::Relaxed);
        let _published = self.published.lock();
        // Where nothing can be looked up, nothing was.
        (self.look_up)(&self.looked_up.lock(), true);
    }

    fn look_up_in_rules(&self, published: &mut [Published], now: HashSet<SocketAddr>) {
        let before = std::mem::replace(&mut *self.looked_up.lock(), now.clone());
        let is_changed = |listener: &Listener| before.contains(&listener.address) != now.contains(&listener.address);
        for service in published.iter_mut().filter(|service| service.listeners.iter().any(is_changed)) {
            let as_before = service.clone();
            if let Err(error) = self.put_in_table(Some(&as_before), service) {
                tracing::warn!(name = %service.name, %error, "a service is not reached as it could be");
                *service = as_before;
            }
        }
    }

    /// Whether connections that come for the host's virtual address are brought to this listener at one address.
    pub fn is_looked_up(&self, listener: &Listener) -> bool {
        self.looked_up.lock().contains(&listener.address)
    }

    /// What the kernel says of a name: these listeners, and no others, have a socket now. What was ordered stays beside
    /// them. Gives whether that is something new.
    ///
    /// # Errors
    ///
    /// One of them cannot be served; all are served as before then.
    pub fn follow(&self, name: &Name, found: &[Listener], terms: Terms) -> Result<bool, PublishError> {
        let known = self.find(name);
        let of_known = known.as_ref().map(|service| service.terms);
        let followed = known.iter().flat_map(|service| &service.listeners).filter(|one| one.origin == Origin::Socket);
        // Without sockets there is nothing to say about the share of what was ordered.
        let terms = of_known.filter(|_| found.is_empty()).unwrap_or(terms);
        let are_terms_same = found.is_empty() || of_known == Some(terms);
        if followed.eq(found) && are_terms_same {
            return Ok(false);
        }
        for listener in found {
            self.check(name, listener, terms)?;
        }
        self.change(name, terms, |listeners| {
            listeners.retain(|known| known.origin != Origin::Socket);
            listeners.extend_from_slice(found);
        })?;
        self.follow_datagrams();
        Ok(true)
    }

    /// Tells the routers that a prefix is no longer served here.
    fn retract(&self, prefix: Prefix) -> Vec<Acknowledgement> {
        self.homes().into_iter().filter_map(|home| home.withdraw(prefix)).collect()
    }

    /// A prefix whose rules are gone is not answered for any more. As long as there were rules, answers had to be
    /// believed.
    fn end(&self, prefix: Prefix) {
        self.core.set_service_certificate(prefix, Vec::new());
        self.core.set_own_terms(prefix, None);
        self.core.set_own_fence(prefix, None);
        drop(self.retract(prefix));
    }

    fn actions(&self, service: &Published) -> Vec<Action> {
        listening::actions(&service.listeners, &self.looked_up.lock())
    }

    fn add_rules(&self, service: &Published) -> Result<Vec<RuleId>, PublishError> {
        let mut added = Vec::new();
        let may_serve = service.is_served && service.tenancy.may_serve();
        let actions = if may_serve { self.actions(service) } else { Vec::new() };
        for action in actions {
            let rule = Rule { priority: service.terms.priority, weight: service.weight(), action };
            match self.core.add_rule(service.prefix(), rule) {
                Ok(id) => added.push(id),
                Err(error) => {
                    for id in added {
                        self.core.remove_rule(id);
                    }
                    return Err(error.into());
                }
            }
        }
        Ok(added)
    }

    /// Signs for the name where a key for it is here: the authority's, or the service's own.
    fn certify(&self, service: &Published) {
        let (prefix, host, unix_s) = (service.prefix(), self.local.host_key.public(), self.clock.unix_s());
        if let Some(proof) = self.proof(&service.name) {
            self.core.set_service_certificate(prefix, proof);
        } else if let Ok(Some(authority)) = self.keyring.authority_of(prefix.id.authority())
            && authority.is_valid(unix_s)
        {
            self.core.set_service_certificate(prefix, issue::service(&authority, prefix, &host, unix_s).0);
        }
    }

    fn proof(&self, name: &Name) -> Option<Vec<u8>> {
        let (service, unix_s) = (name.service_id(), self.clock.unix_s());
        if let Some(key) = self.keyring.service_key_of(&service).ok().flatten() {
            return Some(issue::service_by_key(&key, &self.local.host_key.public(), unix_s).0);
        }
        // The key is elsewhere, and its owner has said that this host may.
        let is_its = |permit: &Permit| permit.service().is_ok_and(|its| its == service);
        let permits = self.keyring.permits().unwrap_or_default().into_iter();
        permits.filter(is_its).find(|permit| unix_s <= permit.not_after_s()).map(|permit| permit.chain)
    }

    fn registration_of(&self, service: &Published) -> Registration {
        Registration {
            name: service.name.written().to_owned(),
            prefix: service.prefix(),
            weight: service.weight(),
            priority: service.terms.priority,
            proof: self.proof(&service.name).unwrap_or_default(),
            partition_bits: service.terms.partition_bits,
            exclusive: service.terms.exclusive,
            sticky: service.terms.sticky,
            fenced: service.terms.fenced,
            zero_weight: service.zero_weight(),
        }
    }

    /// Why a router does not take a name that is served here.
    pub fn refused(&self, name: &Name) -> Option<String> {
        let prefix = self.find(name)?.prefix();
        let states = self.homes_of(name).into_iter().filter_map(|home| home.registration(&prefix));
        states.filter(|state| state.state == "refused").map(|state| state.why).next()
    }

    fn announce(&self, service: &Published) {
        for home in self.homes_of(&service.name) {
            home.register(self.registration_of(service));
        }
    }

    /// Gives certificates and registrations made by keys of this host another life, before the old one ends.
    pub fn renew(&self) {
        for service in self.published.lock().clone().iter().filter(|service| service.is_served) {
            self.certify(service);
            if self.proof(&service.name).is_some() {
                self.announce(service);
            }
        }
        self.router.iter().for_each(|router| router.renew_own_notices());
    }

    /// Whether this host's kernel forwards what comes by `sal0`, so that boxes can be served.
    pub fn forwards(&self) -> bool {
        self.forwards
    }

    /// Told whenever this host may serve something else.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn tell_router(&self) {
        self.changes.send_modify(|version| *version = version.wrapping_add(1));
        let Some(router) = &self.router else { return };
        let published = self.published.lock();
        let served = published.iter().filter(|service| service.is_served);
        router.set_own(served.map(|service| self.own_service(service)).collect());
    }

    fn own_service(&self, service: &Published) -> OwnService {
        OwnService {
            instance: self.own_instance(service),
            actions: self.actions(service),
            partition_bits: service.terms.partition_bits,
            exclusive: service.terms.exclusive,
            fenced: service.terms.fenced,
        }
    }

    /// This host as an instance of what it publishes.
    pub fn own_instances(&self) -> Vec<Instance> {
        let published = self.published.lock();
        published.iter().filter(|service| service.is_served).map(|service| self.own_instance(service)).collect()
    }

    fn own_instance(&self, service: &Published) -> Instance {
        Instance {
            host: self.local.host_key.public().id(),
            host_name: self.local.host_name.clone(),
            address: Instance::address_of_teller(self.local.sal_port),
            name: service.name.written().to_owned(),
            prefix: service.prefix(),
            weight: service.weight(),
            priority: service.terms.priority,
            sticky: service.terms.sticky,
            fence: None,
            zero_weight: service.zero_weight().map(Box::new),
        }
    }

    /// Withdraws one listener of a name, or all of it; gives how many. New connections go elsewhere, running ones stay.
    ///
    /// # Errors
    ///
    /// There is no such thing here, or the disk refuses.
    pub async fn withdraw(&self, name: &Name, listener: Option<SocketAddr>) -> Result<usize, PublishError> {
        let found = self.find(name).ok_or_else(|| PublishError::Unknown(name.to_string()))?;
        let is_meant = |known: &Listener| listener.is_none_or(|gone| known.address == gone);
        let goes = |known: &Listener| known.origin != Origin::Socket && is_meant(known);
        let gone = found.listeners.iter().filter(|known| goes(known)).count();
        if gone == 0 {
            let listener = listener.map(|listener| format!(" at {listener}")).unwrap_or_default();
            let text = format!("{name}{listener}");
            let is_followed = found.listeners.iter().any(is_meant);
            return Err(if is_followed { PublishError::Followed(text) } else { PublishError::Unknown(text) });
        }
        if gone == found.listeners.len() {
            // The router first: it stops sending before the listener is gone from the table.
            for acknowledged in self.retract(found.prefix()) {
                acknowledged.await;
            }
        }
        self.change_by_order(|| self.change(name, found.terms, |listeners| listeners.retain(|known| !goes(known))))?;
        self.forget_checks(name);
        self.keep()?;
        Ok(gone)
    }

    /// Sets the share of a name among instances; gives whether this host has anything of it. With 0, routers are told
    /// before the service table: what they have sent on until then is served.
    ///
    /// # Errors
    ///
    /// The weight is too large, or the disk refuses.
    pub async fn set_weight(&self, name: &Name, weight: u32) -> Result<bool, PublishError> {
        check_weight(weight)?;
        let Some(found) = self.find(name) else { return Ok(false) };
        let terms = Terms { weight, ..found.terms };
        if found.is_served && weight == 0 && found.terms.weight > 0 {
            let silent = self.tell_first(&[Published { terms, ..found }]).await;
            if !silent.is_empty() {
                tracing::warn!(%name, ?silent, "a router has not acknowledged the weight 0");
            }
        }
        self.change(name, terms, |_| {})?;
        self.keep()?;
        Ok(true)
    }

    fn take(&self, prefix: &Prefix) {
        let mut published = self.published.lock();
        if let Some(at) = published.iter().position(|service| service.name.prefix() == *prefix) {
            for rule in published.remove(at).rules {
                self.core.remove_rule(rule);
            }
        }
        drop(published);
        self.tell_router();
    }
}

/// Whether a share is one.
///
/// # Errors
///
/// It is too large.
pub fn check_weight(weight: u32) -> Result<(), PublishError> {
    if weight > WEIGHT_MAX {
        return Err(PublishError::Misuse(format!("a weight is 0 to {WEIGHT_MAX}; 0 takes no new connections")));
    }
    Ok(())
}

/// Whether a listener's address is this host's own, so that its socket must be here.
fn is_local(address: IpAddr, ranges: Ranges) -> bool {
    address.is_unspecified() || address.is_loopback() || ranges.is_virtual(address) || host::has_address(address)
}

fn is_same_place(one: &Listener, other: &Listener) -> bool {
    // What the kernel says comes and goes beside what was ordered.
    (one.origin == Origin::Socket) == (other.origin == Origin::Socket)
        && one.address == other.address
        && one.service_port == other.service_port
        && one.protocol == other.protocol
}

#[cfg(test)]
#[path = "service_test.rs"]
mod test;
