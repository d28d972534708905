//! Resolvers behind DELAY rules: which there are, what they are asked, and what becomes of their answers.
//!
//! The core holds first packets and puts questions; here they are asked, each within its time, and the answers given back to it.

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
use margay_core::delay::{Answer, Question, ResolverId};
use margay_core::name::{Name, Prefix, ServiceId, is_virtual};
use margay_core::table::{Action, NextHop, Rule};
use miette::{IntoDiagnostic, Result, miette};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::Agent;
use super::core::{CoreHandle, Running};
use super::service::Services;
use crate::config::Config;
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
    /// Names of the configuration's rules.
    configured: Mutex<Vec<Name>>,
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
            let (inner, to) = this.make(section, &dir, clock).map_err(|why| {
                let help = "correct the [[resolver]] section, or what it names";
                miette!(help = help, "the resolver {} cannot be used: {why}", section.name)
            })?;
            let names = section.publish.iter().map(|name| name.0.prefix()).collect();
            let publishing = to
                .filter(|_| !section.publish.is_empty())
                .map(|to| Publishing { writer: Arc::new(Writer::new(&section.name, to, dir.clone())), names });
            this.add(Resolver::new(section.name.clone(), section.timeout(), inner), publishing);
        }
        Ok(this)
    }

    /// Adds one; its name is new.
    fn add(&self, resolver: Resolver, publishing: Option<Publishing>) {
        let name = resolver.name().to_owned();
        self.entries.lock().push(Entry { name, resolver: Some(Arc::new(resolver)), publishing });
    }

    fn make(&self, section: &ResolverSection, dir: &StateDir, clock: &Clock) -> Result<Made, String> {
        let zone = section.zone.as_deref().unwrap_or_default();
        Ok(match section.kind {
            Kind::Static => (Box::new(StaticFile::new(section.file.clone().unwrap_or_default())), None),
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
            entries.push(Entry { name: name.to_owned(), resolver: None, publishing: None });
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
        self.configured.lock().iter().any(|name| name.prefix().contains(service))
    }

    /// Names of prefixes, as the configuration has them.
    pub fn names(&self) -> Vec<(Prefix, String)> {
        let named = |name: &Name| (name.prefix(), name.written().to_owned());
        self.configured.lock().iter().map(named).collect()
    }

    /// Adds the rules that the configuration gives.
    ///
    /// # Errors
    ///
    /// The service table is full.
    pub fn add_rules(&self, config: &Config, core: &CoreHandle) -> Result<()> {
        for section in &config.resolver {
            let ResolverSection { name: resolver, names, priority, .. } = section.get_ref();
            let rule = Rule { priority: *priority, weight: WEIGHT, action: Action::Delay(self.id_of(resolver)) };
            for name in names {
                core.0.with_sal(|sal, now| sal.add_rule(now, name.0.prefix(), rule.clone())).into_diagnostic()?;
                self.configured.lock().push(name.0.clone());
            }
        }
        Ok(())
    }
}

/// Asks what the core wants to know, until the datapath ends.
///
/// # Errors
///
/// The system has no thread to give.
pub fn start(agent: &Arc<Agent>) -> io::Result<()> {
    // Set once, here.
    let _ = agent.rules.resolvers.services.set(Arc::clone(&agent.services));
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
    let publishing: Vec<Publishing> =
        agent.rules.resolvers.entries.lock().iter().filter_map(|entry| entry.publishing.clone()).collect();
    for Publishing { writer, names } in publishing {
        let agent = Arc::downgrade(agent);
        let wanted = Arc::new(move || agent.upgrade().map_or_else(Vec::new, |agent| registered(&agent, &names)));
        tokio::spawn(async move { writer.run(wanted).await });
    }
    let mut news = agent.router.as_ref().map_or_else(|| agent.services.changes(), |router| router.changes());
    let resolvers = Arc::downgrade(&agent.rules.resolvers);
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
    let instances: Vec<Instance> = agent.router.as_ref().map_or_else(|| agent.services.own_instances(), of_router);
    let mut by_prefix: BTreeMap<Prefix, Vec<Instance>> = BTreeMap::new();
    for mut instance in instances {
        let is_meant = |name: &&Prefix| name.contains(&instance.prefix.id) && instance.prefix.bits >= name.bits;
        if instance.weight == 0 || names.iter().find(is_meant).is_none() || !locate(agent, &mut instance) {
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
fn locate(agent: &Agent, instance: &mut Instance) -> bool {
    if is_virtual(instance.address.ip()) || instance.address.ip().is_loopback() {
        let own = agent.core.0.with_sal(|sal, _| sal.local_addresses().to_vec());
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
    let found = match agent.rules.resolvers.get(resolver) {
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
    let rules = agent.rules.resolvers.names().into_iter().chain(agent.rules.names()).find(is_it);
    rules.map(|(_, name)| name).filter(|name| !name.starts_with("sid:")).or_else(|| agent.leases.written(service))
}

#[cfg(test)]
pub mod tests {
    use std::time::Duration;

    use super::*;

    /// One of that name, which knows nobody.
    pub fn one(name: &str) -> Arc<Resolvers> {
        let resolvers = Resolvers::default();
        let nobody = Box::new(StaticFile::new("/nonexistent".into()));
        resolvers.add(Resolver::new(name.to_owned(), Duration::from_secs(1), nobody), None);
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
