//! The partitions of services, who holds them, and the rules that lead there (DESIGN §8).
//!
//! Each partition has the rules of one host, beside the rules of all servers at the service's own prefix: where a
//! partition has none, the next shorter prefix answers.

use std::collections::{BTreeMap, BTreeSet};

use margay_core::name::{Prefix, SERVICE_BITS, ServiceId};
use margay_core::table::{Action, Rule, RuleId, TableError};

use super::Instance;
use super::partition::assign;
use crate::SalControl;

/// A server, and how it is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Who.
    pub instance: Instance,
    /// To the host; on the host itself, to its listeners.
    pub actions: Vec<Action>,
}

/// A partition that somebody holds.
struct Part {
    /// Its prefix is the partition.
    holder: Server,
    /// Empty while the table has no room.
    rules: Vec<RuleId>,
}

/// The partitions of one service: 2^bits of them.
#[derive(Default)]
struct Allotment {
    parts: Vec<Option<Part>>,
}

/// Those of all services.
#[derive(Default)]
pub struct Allotments {
    by_service: BTreeMap<Prefix, Allotment>,
    moved: u64,
}

impl Allotments {
    /// Makes who holds what, and the rules, follow from who serves a service now. `bits` zero: it has no partitions.
    ///
    /// As with connections, the servers of the highest priority count, and those with a weight; weights that are not
    /// zero are all the same. New rules are there before old ones go.
    pub fn settle(&mut self, service: Prefix, bits: u8, servers: &[Server], sal: &dyn SalControl) {
        let count = if bits == 0 { 0 } else { 1_usize << bits };
        let usable = || servers.iter().filter(|server| server.instance.weight > 0);
        let priority = usable().map(|server| server.instance.priority).max();
        let by_host: BTreeMap<_, _> = usable()
            .filter(|server| Some(server.instance.priority) == priority)
            .map(|server| (server.instance.host, server))
            .collect();
        let before = self.by_service.remove(&service).unwrap_or_default();
        // Another number of partitions is another division: nothing of the former means anything in it.
        let (mut old, outdated) =
            if before.parts.len() == count { (before.parts, Vec::new()) } else { (Vec::new(), before.parts) };
        old.resize_with(count, || None);
        let held: Vec<_> = old.iter().map(|part| part.as_ref().map(|part| part.holder.instance.host)).collect();
        let members: BTreeSet<_> = by_host.keys().copied().collect();
        let mut parts = Vec::with_capacity(count);
        for ((index, part), holder) in (0_u16..).zip(old).zip(assign(&held, &members)) {
            let holder = holder.and_then(|host| by_host.get(&host)).map(|server| {
                let instance = Instance { prefix: service.partition(bits, index), ..server.instance.clone() };
                Server { instance, actions: server.actions.clone() }
            });
            let host_of = |server: &Server| server.instance.host;
            let (was, is) = (part.as_ref().map(|part| host_of(&part.holder)), holder.as_ref().map(host_of));
            self.moved += u64::from(was.is_some() && is.is_some() && was != is);
            parts.push(replace(part, holder, sal));
        }
        for part in outdated {
            replace(part, None, sal);
        }
        if parts.iter().any(Option::is_some) {
            self.by_service.insert(service, Allotment { parts });
        }
    }

    /// Who holds which partition under a prefix: instances whose prefix is the partition.
    pub fn instances_under(&self, prefix: &Prefix) -> impl Iterator<Item = &Instance> {
        let services = self.by_service.iter().filter(move |(service, _)| prefix.overlaps(service));
        let parts = services.flat_map(|(_, allotment)| allotment.parts.iter().flatten());
        parts.map(|part| &part.holder.instance).filter(|instance| prefix.covers(&instance.prefix))
    }

    /// Who holds the partition that a name lies in.
    pub fn holder(&self, name: &ServiceId) -> Option<&Instance> {
        let allotment = self.by_service.get(&Prefix::new(*name, SERVICE_BITS))?;
        let bits = u8::try_from(allotment.parts.len().trailing_zeros()).ok()?;
        allotment.parts.get(usize::from(name.partition(bits)))?.as_ref().map(|part| &part.holder.instance)
    }

    /// Whether a service has partitions that somebody holds.
    pub fn has(&self, service: &Prefix) -> bool {
        self.by_service.contains_key(service)
    }

    /// How many partitions went from one host to another.
    pub fn moved(&self) -> u64 {
        self.moved
    }
}

/// Puts the rules of the new holder in, then those of the old one out.
fn replace(old: Option<Part>, holder: Option<Server>, sal: &dyn SalControl) -> Option<Part> {
    let Some(holder) = holder else {
        remove(old.into_iter().flat_map(|part| part.rules), sal);
        return None;
    };
    if let Some(part) = &old
        && part.holder == holder
        && part.rules.len() == holder.actions.len()
    {
        return old;
    }
    let rules = add(&holder, sal);
    remove(old.into_iter().flat_map(|part| part.rules), sal);
    // A full table has room for one more now; else the service's own rules answer.
    let rules = rules.or_else(|_| add(&holder, sal)).unwrap_or_else(|error| {
        tracing::warn!(partition = %holder.instance.prefix, %error, "a partition has no rule of its own");
        Vec::new()
    });
    Some(Part { holder, rules })
}

/// All of a server's rules for a partition, or none.
fn add(server: &Server, sal: &dyn SalControl) -> Result<Vec<RuleId>, TableError> {
    let Instance { prefix, weight, priority, .. } = server.instance;
    let mut added = Vec::new();
    for action in &server.actions {
        match sal.add_rule(prefix, Rule { priority, weight, action: action.clone() }) {
            Ok(rule) => added.push(rule),
            Err(error) => {
                remove(added, sal);
                return Err(error);
            }
        }
    }
    Ok(added)
}

fn remove(rules: impl IntoIterator<Item = RuleId>, sal: &dyn SalControl) {
    for rule in rules {
        sal.remove_rule(rule);
    }
}
