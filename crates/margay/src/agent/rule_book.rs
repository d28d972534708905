//! The operator's own rules of the service table: given by `margay route add`, kept on disk, and ended by their
//! time-outs.
//!
//! Number, origin and age of such a rule outlive the agent. So does its hard time, which goes on while no agent runs;
//! its idle time begins anew with the agent, since nobody knows what the rule would have decided meanwhile.

mod declare;

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant as Moment};

use margay_control::Clock;
use margay_control::quantity::count_of;
use margay_control::store::{Store, StoreError, StoredRule};
use margay_core::forward_all::COPIES_MAX;
use margay_core::lifetime::{Expiry, Lifetime};
use margay_core::name::{AUTHORITY_BITS, Name, Prefix, ServiceId};
use margay_core::table::{Action, NextHop, Rule, RuleId, TableError};
use margay_core::{Instant, Ranges, Sal};
use parking_lot::Mutex;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;

use super::Agent;
use super::core::CoreHandle;
use super::resolvers::Resolvers;
use crate::listener::WEIGHT_MAX;

pub use declare::RuleChange;

/// Addresses of one order.
const ADDRESSES_MAX: usize = 64;
/// Rules that have ended by themselves and are still spoken of.
const ENDED_MAX: usize = 64;

/// The core, as the book needs it.
pub trait Core: Send + Sync + 'static {
    /// Runs `act` on it.
    fn with_sal<R>(&self, act: impl FnOnce(&mut Sal, Instant) -> R) -> R;
}

impl Core for CoreHandle {
    fn with_sal<R>(&self, act: impl FnOnce(&mut Sal, Instant) -> R) -> R {
        self.0.with_sal(act)
    }
}

/// What the operator orders.
#[derive(Clone, Debug)]
pub struct Order {
    /// What for.
    pub name: Name,
    /// Where to, one of them for each packet; nothing: it is discarded, or delayed.
    pub forward: Vec<SocketAddr>,
    /// A copy to each of them, instead.
    pub all: bool,
    /// The resolver that it waits for, instead.
    pub resolver: Option<String>,
    /// Share among rules of the same priority.
    pub weight: u32,
    /// Higher first.
    pub priority: u32,
    /// It ends when it has decided upon nothing for so long.
    pub idle: Option<Duration>,
    /// It ends after so long.
    pub hard: Option<Duration>,
}

/// What the operator changes; `None` stays as it is.
#[derive(Clone, Debug, Default)]
pub struct Amendment {
    /// Where it leads.
    pub forward: Option<SocketAddr>,
    /// Share among rules of the same priority.
    pub weight: Option<u32>,
    /// Higher first.
    pub priority: Option<u32>,
    /// Its idle time, which begins anew; `Some(None)`: it has none any more.
    pub idle: Option<Option<Duration>>,
    /// The same for its hard time.
    pub hard: Option<Option<Duration>>,
}

/// Why an order is not carried out. Nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum RuleError {
    /// The order makes no sense.
    #[error("{0}")]
    Misuse(String),
    /// There is no such rule.
    #[error("there is no rule {0} here; it may have ended by itself: `margay route list` shows which there are")]
    Unknown(u64),
    /// The rule is somebody else's.
    #[error("rule {0} is not the operator's own, so it cannot be changed here: {1}")]
    NotOurs(u64, &'static str),
    /// The service table is full.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The disk refuses, or its table is full.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A rule that has ended by itself.
#[derive(Clone, Debug)]
pub struct Ended {
    /// What it was.
    pub rule: StoredRule,
    /// Why.
    pub why: Expiry,
    /// When.
    pub at: Moment,
}

/// All of the operator's rules.
pub struct RuleBook<C = CoreHandle> {
    core: C,
    store: Arc<Store>,
    clock: Clock,
    /// Who is asked by rules that delay.
    pub resolvers: Arc<Resolvers>,
    rules: Mutex<BTreeMap<RuleId, StoredRule>>,
    ended: Mutex<VecDeque<Ended>>,
    /// Rises with every change.
    changes: watch::Sender<u64>,
}

fn action(rule: &StoredRule, resolvers: &Resolvers) -> Action {
    match (rule.forward, &rule.resolver) {
        // Who is there may change: the hop key of whoever is known to be at the address tags the packet.
        (Some(address), _) => {
            let hop = NextHop { address, host: None, router: false };
            if rule.all { Action::ForwardAll(hop) } else { Action::Forward(hop) }
        }
        (None, Some(resolver)) => Action::Delay(resolvers.id_of(resolver)),
        (None, None) => Action::Drop,
    }
}

fn rule_of(rule: &StoredRule, resolvers: &Resolvers) -> Rule {
    Rule { priority: rule.priority, weight: rule.weight, action: action(rule, resolvers) }
}

fn misuse<T>(text: impl Into<String>) -> Result<T, RuleError> {
    Err(RuleError::Misuse(text.into()))
}

impl<C: Core> RuleBook<C> {
    /// Takes up the rules that were kept. To be called before anybody else adds rules: theirs get higher numbers.
    ///
    /// # Errors
    ///
    /// The store cannot be read, or the table has no room.
    pub fn open(core: C, store: Arc<Store>, clock: Clock, resolvers: Arc<Resolvers>) -> Result<Self, RuleError> {
        let kept = store.rules()?;
        let (rules, ended, changes) = (Mutex::default(), Mutex::default(), watch::Sender::default());
        let this = Self { core, store, clock, resolvers, rules, ended, changes };
        let mut over = Vec::new();
        for rule in kept {
            let Some(lifetime) = this.lifetime_left(&rule) else {
                over.push(rule.id);
                this.remember(rule, Expiry::Hard);
                continue;
            };
            this.core.with_sal(|sal, now| {
                sal.add_rule_as(now, rule.id, rule.prefix, rule_of(&rule, &this.resolvers))?;
                sal.set_rule_lifetime(now, rule.id, lifetime(now));
                Ok::<(), TableError>(())
            })?;
            this.rules.lock().insert(rule.id, rule);
        }
        this.store.remove_rules(&over)?;
        Ok(this)
    }

    /// What is left of a rule's time; `None`: nothing.
    fn lifetime_left(&self, rule: &StoredRule) -> Option<impl Fn(Instant) -> Lifetime + use<C>> {
        let gone = Duration::from_secs(self.clock.unix_s().saturating_sub(rule.hard_since_s));
        let (idle, left) = (rule.idle, rule.hard.map(|hard| hard.saturating_sub(gone)));
        (left != Some(Duration::ZERO)).then_some(move |now| Lifetime { idle, until: left.map(|left| now + left) })
    }

    /// Adds a rule for each address, or for none the one that discards. Gives their numbers.
    ///
    /// # Errors
    ///
    /// What is wrong with the order; then there is none of them.
    pub fn add(&self, order: &Order, authorities: &[String]) -> Result<Vec<RuleId>, RuleError> {
        let mut rules = self.rules.lock();
        let mut fresh = self.rules_of(order, authorities)?;
        fresh.iter().try_for_each(|rule| check_new(rule, rules.values()))?;
        check_copies(rules.values().chain(&fresh))?;
        self.core.with_sal(|sal, now| install(sal, now, &mut fresh, &self.resolvers))?;
        if let Err(error) = self.store.write_rules(&fresh) {
            self.core.with_sal(|sal, _| remove(sal, &fresh));
            return Err(error.into());
        }
        let ids = fresh.iter().map(|rule| rule.id).collect();
        rules.extend(fresh.into_iter().map(|rule| (rule.id, rule)));
        self.changed();
        Ok(ids)
    }

    /// The rules of an order, without numbers.
    fn rules_of(&self, order: &Order, authorities: &[String]) -> Result<Vec<StoredRule>, RuleError> {
        check_name(&order.name, authorities)?;
        check_terms(order.weight, &[("idle", order.idle), ("hard", order.hard)])?;
        check_addresses(&order.forward)?;
        self.check_resolver(order)?;
        let forwards: Vec<Option<SocketAddr>> =
            if order.forward.is_empty() { vec![None] } else { order.forward.iter().copied().map(Some).collect() };
        let unix_s = self.clock.unix_s();
        let mut fresh: Vec<StoredRule> = Vec::new();
        for forward in forwards {
            let rule = StoredRule {
                id: RuleId(0),
                prefix: order.name.prefix(),
                name: order.name.written().to_owned(),
                forward,
                all: order.all,
                resolver: order.resolver.clone(),
                priority: order.priority,
                weight: order.weight,
                created_s: unix_s,
                idle: order.idle,
                hard: order.hard,
                hard_since_s: unix_s,
            };
            self.check_place(&rule)?;
            check_new(&rule, fresh.iter())?;
            fresh.push(rule);
        }
        Ok(fresh)
    }

    /// Changes a rule at once; between the old and the new no packet finds none.
    ///
    /// # Errors
    ///
    /// What is wrong with the order; then the rule is as it was.
    pub fn change(&self, id: RuleId, amendment: &Amendment) -> Result<(), RuleError> {
        let mut rules = self.rules.lock();
        let known = self.own(&rules, id)?.clone();
        let Amendment { forward, weight, priority, idle, hard } = amendment.clone();
        if forward.is_some() && known.forward.is_none() {
            let does = if known.resolver.is_some() { "delays" } else { "discards" };
            return misuse(format!("rule {} {does}, and leads nowhere; delete it, and add one that forwards", id.0));
        }
        let rule = StoredRule {
            forward: forward.or(known.forward),
            weight: weight.unwrap_or(known.weight),
            priority: priority.unwrap_or(known.priority),
            idle: idle.unwrap_or(known.idle),
            hard: hard.unwrap_or(known.hard),
            hard_since_s: if hard.is_some() { self.clock.unix_s() } else { known.hard_since_s },
            ..known.clone()
        };
        if known.forward.is_none() && known.resolver.is_none() && weight.is_some() {
            return misuse(format!("rule {} discards, and has no share in anything", id.0));
        }
        check_terms(rule.weight, &[("idle", rule.idle), ("hard", rule.hard)])?;
        check_room_above(rule.resolver.as_deref(), rule.priority)?;
        self.check_place(&rule)?;
        check_new(&rule, rules.values())?;
        check_copies(rules.values().filter(|other| other.id != id).chain([&rule]))?;
        // The disk first: it may refuse, the core does not.
        self.store.write_rules(std::slice::from_ref(&rule))?;
        let lifetime = self.lifetime_left(&rule);
        let is_changed = self.core.with_sal(|sal, now| {
            if idle.is_some() || hard.is_some() {
                let lifetime = lifetime.map_or_else(|| over_at(now), |left| left(now));
                sal.set_rule_lifetime(now, id, lifetime);
            }
            sal.change_rule(id, rule_of(&rule, &self.resolvers))
        });
        if !is_changed {
            // Its time was over just now.
            self.store.remove_rules(&[id])?;
            rules.remove(&id);
            return Err(RuleError::Unknown(id.0));
        }
        rules.insert(id, rule);
        Ok(())
    }

    /// Takes a rule out. Flows that it made live on.
    ///
    /// # Errors
    ///
    /// There is no such rule of the operator's, or the disk refuses.
    pub fn delete(&self, id: RuleId) -> Result<(), RuleError> {
        let mut rules = self.rules.lock();
        self.own(&rules, id)?;
        self.store.remove_rules(&[id])?;
        self.core.with_sal(|sal, _| sal.remove_rule(id));
        rules.remove(&id);
        self.changed();
        Ok(())
    }

    fn own<'a>(&self, rules: &'a BTreeMap<RuleId, StoredRule>, id: RuleId) -> Result<&'a StoredRule, RuleError> {
        if let Some(rule) = rules.get(&id) {
            return Ok(rule);
        }
        let found = self.core.with_sal(|sal, _| sal.rule(id).map(|(_, rule)| rule.action.clone()));
        Err(match found {
            None => RuleError::Unknown(id.0),
            Some(Action::Demux(_) | Action::Box(_)) => {
                RuleError::NotOurs(id.0, "this host publishes it; see `margay service list`")
            }
            Some(Action::Delay(_)) => RuleError::NotOurs(id.0, "a [[resolver]] section of the configuration gives it"),
            Some(Action::Forward(_)) if self.core.with_sal(|sal, _| sal.resolved_by(id).is_some()) => {
                RuleError::NotOurs(id.0, "a resolver's answer made it; it goes with the rule that delays, or by itself")
            }
            Some(Action::Forward(hop)) if hop.router => RuleError::NotOurs(
                id.0,
                "it is the way to another router; a rule of your own for a name comes before it",
            ),
            Some(_) => RuleError::NotOurs(
                id.0,
                "a host has registered it, or the router of another site announced it; it goes when that does",
            ),
        })
    }

    fn check_place(&self, rule: &StoredRule) -> Result<(), RuleError> {
        let Some(address) = rule.forward else { return Ok(()) };
        if address.ip().is_loopback() || self.core.with_sal(|sal, _| sal.has_address(address.ip())) {
            return misuse(format!(
                "{address} is this host itself, so the packet would come back to this rule for ever; \
                 for a listener here use `margay service publish {} --listen ADDRESS:PORT`",
                rule.name
            ));
        }
        Ok(())
    }

    fn check_resolver(&self, order: &Order) -> Result<(), RuleError> {
        let Some(resolver) = &order.resolver else { return Ok(()) };
        let known = self.resolvers.known();
        if !known.contains(resolver) {
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            return misuse(format!(
                "there is no resolver `{resolver}` here (there is: {known}); add a [[resolver]] section to the \
                 configuration, and `margay reload`"
            ));
        }
        check_room_above(Some(resolver), order.priority)
    }

    /// What the operator ordered, of a rule that is the operator's.
    pub fn get(&self, id: RuleId) -> Option<StoredRule> {
        self.rules.lock().get(&id).cloned()
    }

    /// Whether a rule of the operator's covers a name, or one of the configuration's.
    pub fn covers(&self, service: &ServiceId) -> bool {
        self.resolvers.covers(service) || self.rules.lock().values().any(|rule| rule.prefix.contains(service))
    }

    /// Told whenever there is a rule more or less.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn changed(&self) {
        self.changes.send_modify(|version| *version = version.wrapping_add(1));
    }

    /// Names of prefixes, as the operator wrote them.
    pub fn names(&self) -> Vec<(Prefix, String)> {
        self.rules.lock().values().map(|rule| (rule.prefix, rule.name.clone())).collect()
    }

    /// Rules that ended by themselves since the agent's start, the newest first; the oldest are forgotten.
    pub fn ended(&self) -> Vec<Ended> {
        self.ended.lock().iter().cloned().collect()
    }

    fn remember(&self, rule: StoredRule, why: Expiry) {
        let mut ended = self.ended.lock();
        ended.truncate(ENDED_MAX - 1);
        ended.push_front(Ended { rule, why, at: Moment::now() });
    }

    /// The core has ended a rule.
    pub fn note_ended(&self, id: RuleId, why: Expiry) {
        let mut rules = self.rules.lock();
        let Some(rule) = rules.remove(&id) else { return };
        self.changed();
        self.remember(rule, why);
        if let Err(error) = self.store.remove_rules(&[id]) {
            tracing::warn!(rule = id.0, %error, "a rule that has ended will come back with the agent's next start");
        }
    }

    /// Compares with the core: what it ended while nobody listened is gone.
    pub fn reconcile(&self) {
        let known: Vec<StoredRule> = self.rules.lock().values().cloned().collect();
        let gone = self.core.with_sal(|sal, _| {
            let is_gone = |rule: &StoredRule| sal.rule(rule.id).is_none();
            known.into_iter().filter(is_gone).collect::<Vec<StoredRule>>()
        });
        for rule in gone {
            self.note_ended(rule.id, if rule.idle.is_some() { Expiry::Idle } else { Expiry::Hard });
        }
    }
}

/// A lifetime that is over.
fn over_at(now: Instant) -> Lifetime {
    Lifetime { idle: None, until: Some(now) }
}

fn remove(sal: &mut Sal, rules: &[StoredRule]) {
    for rule in rules {
        sal.remove_rule(rule.id);
    }
}

/// Adds all of them, or none.
fn install(sal: &mut Sal, now: Instant, fresh: &mut [StoredRule], resolvers: &Resolvers) -> Result<(), TableError> {
    for at in 0..fresh.len() {
        let rule = &fresh[at];
        match sal.add_rule(now, rule.prefix, rule_of(rule, resolvers)) {
            Ok(id) => {
                let lifetime = Lifetime { idle: rule.idle, until: rule.hard.map(|hard| now + hard) };
                sal.set_rule_lifetime(now, id, lifetime);
                fresh[at].id = id;
            }
            Err(error) => {
                remove(sal, &fresh[..at]);
                return Err(error);
            }
        }
    }
    Ok(())
}

fn check_name(name: &Name, authorities: &[String]) -> Result<(), RuleError> {
    let prefix = name.prefix();
    let block = |authority: &String| margay_core::name::authority_block(authority) == prefix.id.authority();
    if prefix.bits < AUTHORITY_BITS {
        return misuse(format!(
            "{name} covers names of many authorities; a rule is for names of one (sid: with /{AUTHORITY_BITS} at least)"
        ));
    }
    if !authorities.iter().any(block) {
        let known = if authorities.is_empty() { "none".to_owned() } else { authorities.join(", ") };
        return misuse(format!(
            "{name} is of an authority that this host does not belong to (it belongs to: {known}); check how it is \
             written, or join that authority first"
        ));
    }
    Ok(())
}

fn check_terms(weight: u32, times: &[(&str, Option<Duration>)]) -> Result<(), RuleError> {
    if weight > WEIGHT_MAX {
        return misuse(format!("--weight {weight}: a weight is 0 to {WEIGHT_MAX}; 0 takes no new connections"));
    }
    if let Some((which, _)) = times.iter().find(|(_, time)| *time == Some(Duration::ZERO)) {
        return misuse(format!(
            "--{which}-timeout 0: the rule would end before it decides upon anything; leave it out for none"
        ));
    }
    Ok(())
}

/// What a resolver answers comes before the rule that asked it.
fn check_room_above(resolver: Option<&str>, priority: u32) -> Result<(), RuleError> {
    if resolver.is_some() && priority == u32::MAX {
        return misuse(format!("--priority {priority}: what the resolver answers needs a higher one"));
    }
    Ok(())
}

fn check_addresses(forward: &[SocketAddr]) -> Result<(), RuleError> {
    if forward.len() > ADDRESSES_MAX {
        return misuse(format!("{}: one order has {ADDRESSES_MAX} at most", count_of(forward.len(), "address")));
    }
    Ok(())
}

/// Whether an address may be a next hop, wherever this host with these virtual addresses is.
///
/// # Errors
///
/// It may not; the message says why.
pub fn check_hop(address: SocketAddr, ranges: Ranges) -> Result<SocketAddr, String> {
    let is_broadcast = address.ip() == IpAddr::V4(std::net::Ipv4Addr::BROADCAST);
    if address.port() == 0 {
        return Err(format!("{address} has no port; leave it out for {}", margay_wire::PORT));
    }
    if address.ip().is_unspecified() || address.ip().is_multicast() || is_broadcast || ranges.is_virtual(address.ip()) {
        return Err(format!("{address} is no host's own address; write that of the next hop on the network"));
    }
    Ok(address)
}

/// Two rules that say the same would only take a double share.
fn check_new<'a>(rule: &StoredRule, mut others: impl Iterator<Item = &'a StoredRule>) -> Result<(), RuleError> {
    let same = others.find(|other| {
        (other.id.0 == 0 || other.id != rule.id)
            && (other.prefix, other.priority) == (rule.prefix, rule.priority)
            && (other.forward, other.all, &other.resolver) == (rule.forward, rule.all, &rule.resolver)
    });
    match same {
        None => Ok(()),
        Some(same) if same.id.0 == 0 => misuse(format!("{} stands twice in the list", place(rule))),
        Some(same) => {
            misuse(format!("rule {} says so already; `margay route change {}` changes it", same.id.0, same.id.0))
        }
    }
}

/// A packet is not copied to more than the core copies it to.
fn check_copies<'a>(all: impl Iterator<Item = &'a StoredRule>) -> Result<(), RuleError> {
    let mut copies: BTreeMap<(Prefix, u32), usize> = BTreeMap::new();
    for rule in all.filter(|rule| rule.all) {
        let count = copies.entry((rule.prefix, rule.priority)).or_default();
        *count += 1;
        if *count > COPIES_MAX {
            let name = &rule.name;
            return misuse(format!("{name}: a packet is copied to {COPIES_MAX} next hops of one priority at most"));
        }
    }
    Ok(())
}

fn place(rule: &StoredRule) -> String {
    rule.forward.map_or_else(|| "the rule".to_owned(), |address| address.to_string())
}

/// Follows what the core ends, until the agent goes down.
pub async fn follow(agent: Arc<Agent>) {
    let Some(mut ended) = agent.process.watchers.follow_rules() else { return };
    // What ended before somebody listened.
    tokio::task::block_in_place(|| agent.routing.rules.reconcile());
    loop {
        match ended.recv().await {
            Ok((id, why)) => tokio::task::block_in_place(|| agent.routing.rules.note_ended(id, why)),
            Err(RecvError::Lagged(_)) => tokio::task::block_in_place(|| agent.routing.rules.reconcile()),
            Err(RecvError::Closed) => return,
        }
    }
}

#[cfg(test)]
#[path = "rule_book_test.rs"]
mod test;
