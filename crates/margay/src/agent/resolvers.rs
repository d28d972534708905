//! Resolvers behind DELAY rules: which there are, what they are asked, and what becomes of their answers.
//!
//! The core holds first packets and puts questions; here they are asked, each within its time, and the answers given
//! back to it.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, OnceLock, Weak};

use margay_control::keyring::Keyring;
use margay_control::registration::{Home, Instance, Router};
use margay_control::resolver::dht::{Dht, DhtWriter};
use margay_control::resolver::dns::Dns;
use margay_control::resolver::dns_update::{DnsUpdate, parse_key};
use margay_control::resolver::file::StaticFile;
use margay_control::resolver::registry::{Homes, Registry};
use margay_control::resolver::writer::{Entry as Registered, Report, Write, Writer};
use margay_control::resolver::{Found, INSTANCES_MAX, Place, Resolve, ResolveError, Resolver, Wanted};
use margay_control::{Clock, StateDir};
use margay_core::Ranges;
use margay_core::delay::{Answer, Question};
use margay_core::name::{Name, Prefix, ServiceId};
use margay_core::table::resolver::ResolverId;
use margay_core::table::{Action, NextHop, Rule, RuleId, TableError};
use miette::{IntoDiagnostic, Result, miette};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use toml::Spanned;

use super::Agent;
use super::core::{CoreHandle, Running};
use super::service::Services;
use crate::config::Config;
use crate::listener::ServiceName;
use crate::resolver::{Kind, ResolverSection};

/// Share of a rule that delays, where several of one priority do.
const WEIGHT: u32 = 100;

/// A name that rules know a resolver by.
struct Entry {
    name: String,
    /// `None`: the configuration has none of that name, or has it no more.
    resolver: Option<Arc<Resolver>>,
    /// What is registered here is written there, too.
    publishing: Option<Publishing>,
    /// Does so, until it is aborted.
    writing: Option<JoinHandle<()>>,
}

/// A rule of the configuration.
#[derive(Clone, PartialEq, Eq)]
struct Configured {
    name: Name,
    resolver: ResolverId,
    priority: u32,
}

/// Names that are written to a resolver.
#[derive(Clone)]
struct Publishing {
    writer: Arc<Writer>,
    names: Arc<[Prefix]>,
}

/// A resolver, and where it is written to.
type Made = (Box<dyn Resolve>, Option<Box<dyn Write>>);

/// All resolvers. A resolver's number is its place.
#[derive(Default)]
pub struct Resolvers {
    entries: Mutex<Vec<Entry>>,
    /// The configuration's rules, and their numbers.
    configured: Mutex<Vec<(Configured, RuleId)>>,
    services: Arc<OnceLock<Arc<Services>>>,
}

impl Resolvers {
    /// As configured.
    ///
    /// # Errors
    ///
    /// What keeps one of them from being asked at all.
    pub fn open(config: &Config, clock: &Clock) -> Result<Self> {
        let this = Self::default();
        let dir = StateDir::open(&config.host.state_dir).into_diagnostic()?;
        for section in &config.resolver {
            let section = section.get_ref();
            let made = this.make(section, &dir, (clock, config.ranges())).map_err(|why| {
                let help = "correct the [[resolver]] section, or what it names";
                miette!(help = help, "{}", unusable(section, &why))
            })?;
            this.put(section, made, &dir);
        }
        Ok(this)
    }

    /// Puts one in the place of its name.
    fn put(&self, section: &ResolverSection, (inner, to): Made, dir: &StateDir) {
        let names = section.publish.iter().map(|name| name.0.prefix()).collect();
        let publishing = to
            .filter(|_| !section.publish.is_empty())
            .map(|to| Publishing { writer: Arc::new(Writer::new(&section.name, to, dir.clone())), names });
        self.set(Resolver::new(section.name.clone(), section.timeout(), inner), publishing);
    }

    fn set(&self, resolver: Resolver, publishing: Option<Publishing>) {
        let at = self.id_of(resolver.name()).0 as usize;
        if let Some(entry) = self.entries.lock().get_mut(at) {
            (entry.resolver, entry.publishing) = (Some(Arc::new(resolver)), publishing);
        }
    }

    /// Has those that another configuration says. What both say the same of goes on.
    ///
    /// # Errors
    ///
    /// Why one of them cannot be used, or that there is no room for its rules; nothing has changed then.
    pub async fn configure(&self, agent: &Arc<Agent>, before: &Config, now: &Config) -> Result<(), String> {
        if before.resolver == now.resolver {
            return Ok(());
        }
        let dir = StateDir::open(&now.host.state_dir).map_err(|error| error.to_string())?;
        let sections = |config: &Config| config.resolver.iter().map(|one| one.get_ref().clone()).collect::<Vec<_>>();
        let (former, wanted) = (sections(before), sections(now));
        let mut made = Vec::new();
        for section in wanted.iter().filter(|section| !former.contains(section)) {
            let it =
                self.make(section, &dir, (&agent.host.clock, now.ranges())).map_err(|why| unusable(section, &why))?;
            made.push((section, it));
        }
        self.follow_rules(now, &agent.core).map_err(|error| error.to_string())?;
        for section in former.iter().filter(|section| !wanted.contains(section)) {
            self.end(&section.name).await;
        }
        for (section, it) in made {
            self.put(section, it, &dir);
            self.write(agent, &section.name);
        }
        Ok(())
    }

    /// Asks one no more, and writes nothing to it. What is written there stays, as it does without an agent.
    async fn end(&self, name: &str) {
        let at = self.id_of(name).0 as usize;
        let writing = self.entries.lock().get_mut(at).and_then(|entry| {
            (entry.resolver, entry.publishing) = (None, None);
            entry.writing.take()
        });
        if let Some(writing) = writing {
            writing.abort();
            // It was told to end, and says so.
            let _ = writing.await;
        }
    }

    /// Begins to write what is registered here to one, if anything is to be written there.
    fn write(&self, agent: &Arc<Agent>, name: &str) {
        let mut entries = self.entries.lock();
        let Some(entry) = entries.iter_mut().find(|entry| entry.name == name) else { return };
        let Some(Publishing { writer, names }) = entry.publishing.clone() else { return };
        let agent = Arc::downgrade(agent);
        let wanted = Arc::new(move || agent.upgrade().map_or_else(Vec::new, |agent| registered(&agent, &names)));
        entry.writing = Some(tokio::spawn(async move { writer.run(wanted).await }));
    }

    fn make(
        &self,
        section: &ResolverSection,
        dir: &StateDir,
        (clock, ranges): (&Clock, Ranges),
    ) -> Result<Made, String> {
        let zone = section.zone.as_deref().unwrap_or_default();
        Ok(match section.kind {
            Kind::Static => (Box::new(StaticFile::new(section.file.clone().unwrap_or_default(), ranges)), None),
            Kind::Registry => (Box::new(Registry::new(section.router.clone().unwrap_or_default(), self.homes())), None),
            Kind::Dns => (Box::new(Dns::new(&section.servers, zone)?), dns_update(section, zone, clock)?),
            Kind::Dht => {
                let dht = Dht::join(&section.bootstrap, section.port, section.keys.clone(), clock.clone())?;
                let (dht, keyring) = (Arc::new(dht), Keyring::open(dir).map_err(|error| error.to_string())?);
                (Box::new(Arc::clone(&dht)), Some(Box::new(DhtWriter::new(dht, keyring))))
            }
        })
    }

    /// This host's routers, once there are services that know them.
    fn homes(&self) -> Homes {
        let services = Arc::clone(&self.services);
        Arc::new(move || services.get().map_or_else(Vec::<Arc<Home>>::new, |services| services.homes()))
    }

    /// The number of a resolver, whether there is one of that name or not.
    pub fn id_of(&self, name: &str) -> ResolverId {
        let mut entries = self.entries.lock();
        let at = entries.iter().position(|entry| entry.name == name).unwrap_or_else(|| {
            entries.push(Entry { name: name.to_owned(), resolver: None, publishing: None, writing: None });
            entries.len() - 1
        });
        ResolverId(u32::try_from(at).unwrap_or(u32::MAX))
    }

    /// What people call a resolver.
    pub fn name_of(&self, id: ResolverId) -> String {
        self.entries.lock().get(id.0 as usize).map(|entry| entry.name.clone()).unwrap_or_default()
    }

    /// The resolver with this number, if there is one still.
    pub fn get(&self, id: ResolverId) -> Option<Arc<Resolver>> {
        self.entries.lock().get(id.0 as usize).and_then(|entry| entry.resolver.clone())
    }

    /// Those that are configured.
    pub fn all(&self) -> Vec<Arc<Resolver>> {
        self.entries.lock().iter().filter_map(|entry| entry.resolver.clone()).collect()
    }

    /// Others may serve what is written to resolvers, or it may be reached elsewhere.
    pub fn look(&self) {
        for publishing in self.entries.lock().iter().filter_map(|entry| entry.publishing.as_ref()) {
            publishing.writer.look();
        }
    }

    /// How a resolver's writing goes, if anything is written there.
    pub fn report(&self, name: &str) -> Option<Report> {
        let entries = self.entries.lock();
        let publishing = entries.iter().find(|entry| entry.name == name)?.publishing.as_ref()?;
        Some(publishing.writer.report())
    }

    /// Those that are configured, by name.
    pub fn known(&self) -> Vec<String> {
        self.all().iter().map(|resolver| resolver.name().to_owned()).collect()
    }

    /// Whether a rule of the configuration covers a name.
    pub fn covers(&self, service: &ServiceId) -> bool {
        self.configured.lock().iter().any(|(rule, _)| rule.name.prefix().contains(service))
    }

    /// Names of prefixes, as the configuration has them.
    pub fn names(&self) -> Vec<(Prefix, String)> {
        let named = |(rule, _): &(Configured, RuleId)| (rule.name.prefix(), rule.name.written().to_owned());
        self.configured.lock().iter().map(named).collect()
    }

    /// Has the rules that the configuration gives, and those alone.
    ///
    /// # Errors
    ///
    /// The service table is full; the rules are those of before.
    pub fn follow_rules(&self, config: &Config, core: &CoreHandle) -> Result<(), TableError> {
        let mut wanted = Vec::new();
        for ResolverSection { name: resolver, names, priority, .. } in config.resolver.iter().map(Spanned::get_ref) {
            let resolver = self.id_of(resolver);
            let rule = |name: &ServiceName| Configured { name: name.0.clone(), resolver, priority: *priority };
            wanted.extend(names.iter().map(rule));
        }
        let mut configured = self.configured.lock();
        let fresh: Vec<Configured> =
            wanted.iter().filter(|rule| !configured.iter().any(|(known, _)| known == *rule)).cloned().collect();
        core.0.with_sal(|sal, now| {
            let mut added: Vec<(Configured, RuleId)> = Vec::new();
            for rule in fresh {
                let action = Action::Delay(rule.resolver);
                let of_table = Rule { priority: rule.priority, weight: WEIGHT, action };
                match sal.add_rule(now, rule.name.prefix(), of_table) {
                    Ok(id) => added.push((rule, id)),
                    Err(error) => {
                        for (_, id) in added {
                            sal.remove_rule(id);
                        }
                        return Err(error);
                    }
                }
            }
            configured.retain(|(rule, id)| wanted.contains(rule) || !sal.remove_rule(*id));
            configured.extend(added);
            Ok(())
        })
    }
}

fn unusable(section: &ResolverSection, why: &str) -> String {
    format!("the resolver {} cannot be used: {why}", section.name)
}

/// Asks what the core wants to know, until the datapath ends.
///
/// # Errors
///
/// The system has no thread to give.
pub fn start(agent: &Arc<Agent>) -> io::Result<()> {
    // Set once, here.
    let _ = agent.routing.rules.resolvers.services.set(Arc::clone(&agent.publishing.services));
    start_writers(agent);
    let (news, running) = (agent.core.0.question_news(), Arc::downgrade(&agent.core.0));
    let (agent, runtime) = (Arc::downgrade(agent), Handle::current());
    let follow = move || {
        while news.wait().is_ok_and(|goes_on| goes_on) {
            // The core has bounds on what it asks at once.
            while let Some(question) = running.upgrade().and_then(|core| core.with_sal(|sal, _| sal.poll_question())) {
                let Some(agent) = agent.upgrade() else { return };
                runtime.spawn(ask(running.clone(), agent, question));
            }
        }
    };
    std::thread::Builder::new().name("margay-delay".to_owned()).spawn(follow)?;
    Ok(())
}

fn start_writers(agent: &Arc<Agent>) {
    let resolvers = &agent.routing.rules.resolvers;
    resolvers.known().iter().for_each(|name| resolvers.write(agent, name));
    let mut news =
        agent.routing.router.as_ref().map_or_else(|| agent.publishing.services.changes(), |router| router.changes());
    let resolvers = Arc::downgrade(&agent.routing.rules.resolvers);
    tokio::spawn(async move {
        while news.changed().await.is_ok() {
            let Some(resolvers) = resolvers.upgrade() else { return };
            resolvers.look();
        }
    });
}

/// What is registered here of some names: on a router by all its hosts, elsewhere by this one.
fn registered(agent: &Agent, names: &[Prefix]) -> Vec<Registered> {
    let of_router = |router: &Arc<Router>| names.iter().flat_map(|name| router.instances_under(name)).collect();
    let instances: Vec<Instance> =
        agent.routing.router.as_ref().map_or_else(|| agent.publishing.services.own_instances(), of_router);
    let mut by_prefix: BTreeMap<Prefix, Vec<Instance>> = BTreeMap::new();
    for mut instance in instances {
        let is_meant = |name: &&Prefix| name.contains(&instance.prefix.id) && instance.prefix.bits >= name.bits;
        if instance.weight == 0 || names.iter().find(is_meant).is_none() || !locate(&agent.core, &mut instance) {
            continue;
        }
        let known = by_prefix.entry(instance.prefix).or_default();
        if !known.contains(&instance) {
            known.push(instance);
        }
    }
    by_prefix.into_iter().filter_map(|(prefix, instances)| entry_of(prefix, instances)).collect()
}

/// Says where others reach an instance that is on this host. False where they cannot.
fn locate(core: &CoreHandle, instance: &mut Instance) -> bool {
    if instance.is_of_teller() || instance.address.ip().is_loopback() {
        let own = core.0.with_sal(|sal, _| sal.local_addresses().to_vec());
        let Some(own) = own.iter().find(|own| own.is_ipv4()).or(own.first()) else { return false };
        instance.address.set_ip(*own);
    }
    true
}

/// Those of the highest priority: others are for when none of them is left.
fn entry_of(prefix: Prefix, mut instances: Vec<Instance>) -> Option<Registered> {
    let priority = instances.iter().map(|instance| instance.priority).max()?;
    instances.retain(|instance| instance.priority == priority);
    instances.sort_by_key(|instance| instance.address);
    let written = instances.iter().filter_map(|one| one.name.parse::<Name>().ok()).find(|name| name.prefix() == prefix);
    // A partition has the name of its service.
    let name = written.or_else(|| format!("{}/{}", prefix.id, prefix.bits).parse().ok())?;
    let place = |one: &Instance| Place { address: one.address, host: Some(one.host), weight: one.weight };
    Some(Registered { name, places: instances.iter().map(place).take(INSTANCES_MAX).collect() })
}

fn dns_update(section: &ResolverSection, zone: &str, clock: &Clock) -> Result<Option<Box<dyn Write>>, String> {
    let (Some(file), Some(server)) = (&section.key_file, section.servers.first()) else { return Ok(None) };
    let told = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| told(&error))?;
    let key = parse_key(&text).map_err(|error| told(&error))?;
    Ok(Some(Box::new(DnsUpdate::new(*server, zone, key, clock.clone())?)))
}

async fn ask(running: Weak<Running>, agent: Arc<Agent>, question: Question) {
    let Question { service, resolver } = question;
    let found = match agent.routing.rules.resolvers.get(resolver) {
        Some(resolver) => resolver.ask(&Wanted { service, written: written(&agent, &service) }).await,
        None => Err(ResolveError::Failed("no such resolver is configured".to_owned())),
    };
    drop(agent);
    let answer = found.inspect_err(|error| tracing::debug!(%service, %error, "not resolved")).ok().map(answer_of);
    if let Some(core) = running.upgrade() {
        tokio::task::block_in_place(|| core.with_sal(|sal, now| sal.handle_resolution(now, question, answer)));
    }
}

fn answer_of(found: Found) -> Answer {
    let Found { prefix, places, ttl } = found;
    let hops = places.into_iter().map(|place| {
        let hop = NextHop { address: place.address, host: place.host, router: false };
        (hop, place.weight)
    });
    Answer { prefix, hops: hops.collect(), ttl }
}

/// How people write a name, where this host has read it.
fn written(agent: &Agent, service: &ServiceId) -> Option<String> {
    let is_it = |(prefix, _): &(Prefix, String)| *prefix == Prefix::from(*service);
    let rules = agent.routing.rules.resolvers.names().into_iter().chain(agent.routing.rules.names()).find(is_it);
    rules.map(|(_, name)| name).filter(|name| !name.starts_with("sid:")).or_else(|| agent.names.leases.written(service))
}

#[cfg(test)]
pub mod tests {
    use std::time::Duration;

    use super::*;

    /// One of that name, which knows nobody.
    pub fn one(name: &str) -> Arc<Resolvers> {
        let resolvers = Resolvers::default();
        let nobody = Box::new(StaticFile::new("/nonexistent".into(), Ranges::USUAL));
        resolvers.set(Resolver::new(name.to_owned(), Duration::from_secs(1), nobody), None);
        Arc::new(resolvers)
    }

    #[test]
    fn a_name_without_a_resolver_has_a_number_too() {
        let resolvers = one("hosts");
        let (hosts, gone) = (resolvers.id_of("hosts"), resolvers.id_of("gone"));
        assert_ne!(hosts, gone);
        assert_eq!(resolvers.id_of("gone"), gone);
        assert!(resolvers.get(hosts).is_some() && resolvers.get(gone).is_none());
        assert_eq!((resolvers.name_of(gone).as_str(), resolvers.known()), ("gone", vec!["hosts".to_owned()]));
    }
}
