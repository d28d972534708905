//! What people call hosts and prefixes, as far as this host knows: from its members, its registry, and what routers
//! have said.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use margay_control::registration::Instance;
use margay_core::key::HostId;
use margay_core::name::{AUTHORITY_BITS, Name, Prefix, ServiceId};
use margay_core::{FlowInfo, Role};
use parking_lot::Mutex;

use super::{Agent, home};

/// Hosts, and prefixes, whose names are remembered; of more, the names of some are forgotten.
const REMEMBERED_MAX: usize = 4096;
/// Services whose instances are asked for at once.
const ASKED_MAX: usize = 16;
/// How often a router is asked of one service.
const REST: Duration = Duration::from_secs(60);
/// Longer, and a list is shown without the names.
const LIMIT: Duration = Duration::from_millis(500);

/// Names that somebody has said.
#[derive(Default)]
pub struct Naming {
    hosts: Mutex<BTreeMap<HostId, String>>,
    prefixes: Mutex<BTreeMap<Prefix, String>>,
    asked: Mutex<BTreeMap<ServiceId, Instant>>,
}

fn remember<K: Ord + Copy>(all: &mut BTreeMap<K, String>, key: K, name: &str) {
    if name.is_empty() {
        return;
    }
    if all.len() >= REMEMBERED_MAX && !all.contains_key(&key) {
        all.pop_first();
    }
    all.insert(key, name.to_owned());
}

impl Naming {
    /// A router has said it.
    pub fn learn(&self, instances: &[Instance]) {
        let mut hosts = self.hosts.lock();
        for found in instances {
            remember(&mut hosts, found.host, &found.host_name);
        }
    }

    /// A host has said it of itself.
    pub fn learn_host(&self, host: HostId, name: &str) {
        remember(&mut self.hosts.lock(), host, name);
    }

    /// What a router or the host itself has called it.
    pub fn name_of(&self, host: HostId) -> Option<String> {
        self.hosts.lock().get(&host).cloned()
    }

    /// An operator has said it.
    pub fn learn_prefix(&self, prefix: Prefix, name: &str) {
        remember(&mut self.prefixes.lock(), prefix, name);
    }

    /// Those services of which no router was asked for a while; they count as asked now.
    fn due(&self, services: BTreeSet<ServiceId>, now: Instant) -> Vec<ServiceId> {
        let mut asked = self.asked.lock();
        asked.retain(|_, at| now.saturating_duration_since(*at) < REST);
        let due: Vec<ServiceId> =
            services.into_iter().filter(|service| !asked.contains_key(service)).take(ASKED_MAX).collect();
        asked.extend(due.iter().map(|service| (*service, now)));
        due
    }
}

/// The names of hosts; of those that nobody has named there is none.
pub fn hosts(agent: &Agent) -> HashMap<HostId, String> {
    let learned = agent.names.naming.hosts.lock().clone().into_iter();
    let members = agent.host.store.members().unwrap_or_default().into_iter();
    let members = members.map(|member| (member.host.id(), member.host_name));
    let registered = agent.routing.router.as_ref().map(|router| router.instances()).unwrap_or_default().into_iter();
    let registered = registered.map(|found| (found.host, found.host_name));
    let routers = agent.routing.cluster.as_ref().map(|cluster| cluster.routers()).unwrap_or_default().into_iter();
    let routers = routers.map(|router| (router.id(), router.name));
    let own = std::iter::once((agent.host.identity.host_id(), agent.host.local.host_name.clone()));
    let all = learned.chain(members).chain(registered).chain(routers).chain(own);
    all.filter(|(_, name)| !name.is_empty()).collect()
}

/// A prefix as people write it, or else its digits.
pub fn prefix(agent: &Agent, prefix: &Prefix) -> String {
    if prefix.bits == AUTHORITY_BITS {
        let authority = agent.authorities().into_iter().find(|authority| Prefix::of_authority(authority) == *prefix);
        if let Some(authority) = authority {
            return format!("*.{authority}");
        }
    }
    let known = agent.host.store.name_of(prefix).ok().flatten();
    let known = known.or_else(|| agent.names.naming.prefixes.lock().get(prefix).cloned());
    known.unwrap_or_else(|| prefix.to_string())
}

/// Asks this host's routers who the peers of its programs' connections are, and where boxes are that sessions pass, as
/// far as that is not known.
pub async fn ask(agent: &Agent) {
    let known = hosts(agent);
    let services: BTreeSet<ServiceId> = agent.core.0.with_sal(|sal, _| {
        let is_unknown = |peer: &HostId| !known.contains_key(peer);
        let names = |flow: FlowInfo| {
            let is_asked = flow.role == Role::Initiator && flow.peer.as_ref().is_some_and(is_unknown);
            let boxes = flow.chain.into_iter().flat_map(|chain| chain.boxes);
            let boxes = boxes.filter(|one| one.host.as_ref().is_some_and(is_unknown)).map(|one| one.service);
            boxes.chain(is_asked.then_some(flow.service))
        };
        sal.flows().flat_map(names).collect()
    });
    let due = agent.names.naming.due(services, Instant::now());
    let of = async |service: ServiceId| {
        let name: Name = format!("{service}/256").parse().ok()?;
        home::instances(&agent.publishing.services, agent.routing.router.as_deref(), &name).await.ok()
    };
    let Ok(found) = tokio::time::timeout(LIMIT, join_all(due.into_iter().map(of))).await else { return };
    found.iter().flatten().for_each(|(instances, _)| agent.names.naming.learn(instances));
}

/// The host that is meant: by its host-ID, its name, or the first letters of its host-ID.
///
/// # Errors
///
/// None is, or several are; `list` is the command that shows them.
pub fn pick(text: &str, candidates: &[(HostId, String)], list: &str) -> Result<HostId, String> {
    if let Some((host, _)) = candidates.iter().find(|(host, _)| host.to_string() == text) {
        return Ok(*host);
    }
    let chosen = |is_it: &dyn Fn(&(HostId, String)) -> bool| -> BTreeMap<HostId, &str> {
        candidates.iter().filter(|one| is_it(one)).map(|(host, name)| (*host, name.as_str())).collect()
    };
    let mut found = chosen(&|(_, name)| !name.is_empty() && name == text);
    if found.is_empty() && !text.is_empty() {
        found = chosen(&|(host, _)| host.to_string().starts_with(text));
    }
    let written = |(host, name): (&HostId, &&str)| format!("{name} ({host})").trim_start().to_owned();
    match found.first_key_value() {
        Some((host, _)) if found.len() == 1 => Ok(*host),
        None => Err(format!("there is no host `{text}`; `{list}` shows those that there are")),
        Some(_) => {
            let all: Vec<String> = found.iter().map(written).collect();
            Err(format!("`{text}` stands for several hosts: {}; write the host-ID of one", all.join(", ")))
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn host(n: u8) -> HostId {
        HostId([n; 16])
    }

    #[test]
    fn a_host_is_meant_by_its_name_its_id_or_the_first_letters_of_that_and_never_by_chance() {
        let all = [(host(0xab), "web1".to_owned()), (host(0xac), "web2".to_owned()), (host(0x11), String::new())];
        let pick = |text: &str| pick(text, &all, "margay path list");
        assert_eq!(pick("web1"), Ok(host(0xab)));
        assert_eq!(pick(&host(0x11).to_string()), Ok(host(0x11)));
        assert_eq!(pick("acac"), Ok(host(0xac)));
        let several = pick("a").expect_err("two begin so");
        assert!(several.contains(&format!("web1 ({})", host(0xab))) && several.contains("web2 ("), "{several}");
        assert!(pick("web3").expect_err("no such host").contains("`margay path list`"));
        assert!(pick("").is_err());
    }

    #[test]
    fn two_hosts_of_one_name_are_told_apart_by_their_ids() {
        let all = [(host(1), "web".to_owned()), (host(2), "web".to_owned()), (host(2), "web".to_owned())];
        let several = pick("web", &all, "margay path list").expect_err("two are called so");
        assert!(several.contains(&host(1).to_string()) && several.contains(&host(2).to_string()), "{several}");
        assert_eq!(pick("02", &all, "margay path list"), Ok(host(2)), "one host that is listed twice is one");
    }

    #[test]
    fn a_service_is_asked_of_once_in_a_while() {
        let (naming, start) = (Naming::default(), Instant::now());
        let services = || (0..20).map(|n| ServiceId([n; 32])).collect::<BTreeSet<_>>();
        assert_eq!(naming.due(services(), start).len(), ASKED_MAX);
        assert_eq!(naming.due(services(), start).len(), 20 - ASKED_MAX);
        assert!(naming.due(services(), start).is_empty());
        assert_eq!(naming.due(services(), start + REST).len(), ASKED_MAX);
    }
}
