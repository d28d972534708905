//! Peers that no router lists any more (DESIGN §7). The core gives up one that is silent besides; this asks the routers.

use std::collections::{BTreeSet, HashMap};
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use margay_control::registration::Instance;
use margay_core::key::HostId;
use margay_core::name::{Name, ServiceId};
use tokio::time::sleep;

use super::{Agent, home};

/// So many rounds in the time for which a silent peer is waited for,
const ROUNDS: u32 = 4;
/// which are not further apart.
const ROUND_MAX: Duration = Duration::from_secs(5);
/// Names that routers are asked about in one round: of more, the others are in the next.
const ASKED_MAX: usize = 64;

/// Goes on until it is aborted.
pub async fn follow(agent: Arc<Agent>) {
    let mut absences = Absences::default();
    loop {
        let limit = agent.config().host.give_up_after.limit;
        sleep(limit.map_or(ROUND_MAX, |limit| (limit / ROUNDS).min(ROUND_MAX))).await;
        absences.look(&agent).await;
    }
}

#[derive(Default)]
struct Absences {
    /// What flows with absent peers have brought, in segments.
    carried: HashMap<HostId, u64>,
    /// Where the last round has ended.
    asked: Option<ServiceId>,
    /// Instances that no router listed in the last round. A router that has just started lists some of them only.
    left: BTreeSet<(HostId, ServiceId)>,
}

impl Absences {
    async fn look(&mut self, agent: &Agent) {
        let initiated = agent.core.0.with_sal(|sal, _| sal.initiated());
        let all: BTreeSet<ServiceId> = initiated.values().flatten().copied().collect();
        let mut listed: HashMap<ServiceId, Vec<Instance>> = HashMap::new();
        for service in self.turn(&all) {
            if let Some(found) = instances(agent, &service).await {
                listed.insert(service, found);
            }
        }
        let before = mem::take(&mut self.left);
        for (host, services) in &initiated {
            let is_it = |instance: &Instance| instance.host == *host;
            let is_listed = |service| listed.get(service).map(|found: &Vec<Instance>| found.iter().any(is_it));
            let known: Vec<Option<bool>> = services.iter().map(is_listed).collect();
            // A name that was not asked about, or that no router could tell of, says nothing.
            if known.contains(&Some(true)) || known.iter().all(Option::is_some) {
                let is_absent = !known.contains(&Some(true));
                agent.core.0.with_sal(|sal, now| sal.handle_absence(now, *host, is_absent));
            }
            let left = services.iter().filter(|service| is_listed(*service) == Some(false));
            self.left.extend(left.map(|service| (*host, *service)));
        }
        for (host, service) in self.left.intersection(&before) {
            rebind(agent, *host, service, &listed[service]);
        }
        self.note_life(agent);
    }

    /// The names of this round.
    fn turn(&mut self, all: &BTreeSet<ServiceId>) -> Vec<ServiceId> {
        let after = self.asked.filter(|_| all.len() > ASKED_MAX);
        let is_later = |service: &&ServiceId| after.is_none_or(|after| **service > after);
        let (later, earlier): (Vec<&ServiceId>, Vec<&ServiceId>) = all.iter().partition(is_later);
        let turn: Vec<ServiceId> = later.into_iter().chain(earlier).take(ASKED_MAX).copied().collect();
        self.asked = turn.last().copied();
        turn
    }

    /// Tells the core where packets have come from an absent peer: its agent may be dead, and its kernel well.
    fn note_life(&mut self, agent: &Agent) {
        let core = &agent.core.0;
        let absent: Vec<HostId> = core.with_sal(|sal, _| sal.absent_peers().collect());
        self.carried.retain(|host, _| absent.contains(host));
        for host in absent {
            let flows = core.with_sal(|sal, _| sal.flows_initiated_with(host));
            let carried = flows.into_iter().filter_map(|flow| core.flow_counters(flow));
            let segments = carried.map(|carried| carried.ingress_segments).sum();
            if self.carried.insert(host, segments).is_some_and(|before| before != segments) {
                core.with_sal(|sal, now| sal.handle_life(now, host));
            }
        }
    }
}

/// Who serves a name, as the routers of its authority say; `None` where there is none that could.
async fn instances(agent: &Agent, service: &ServiceId) -> Option<Vec<Instance>> {
    // A serviceID in full is always a name.
    let name: Name = service.to_string().parse().ok()?;
    if agent.router.is_none() && agent.services.homes_of(&name).is_empty() {
        return None;
    }
    home::instances(&agent.services, agent.router.as_deref(), &name).await.ok().map(|(found, _)| found)
}

/// Flows of datagrams with an instance that has left go to another one, where there is one and sockets are not bound to
/// theirs.
fn rebind(agent: &Agent, host: HostId, service: &ServiceId, found: &[Instance]) {
    if !found.iter().any(|instance| instance.weight > 0 && !instance.sticky) {
        return;
    }
    let flows = agent.core.0.with_sal(|sal, now| sal.rebind_datagrams(now, host, service));
    if flows > 0 {
        tracing::info!(%host, %service, flows, "datagrams go to another instance: this one has left");
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn many_names_take_turns() {
        let name = |n: u8| ServiceId([n; 32]);
        let few: BTreeSet<ServiceId> = (0..10).map(name).collect();
        let mut absences = Absences::default();
        assert_eq!([absences.turn(&few).len(), absences.turn(&few).len()], [10, 10], "all of them each time");
        let many: BTreeSet<ServiceId> = (0..200).map(name).collect();
        let rounds: Vec<Vec<ServiceId>> = (0..4).map(|_| absences.turn(&many)).collect();
        assert!(rounds.iter().all(|round| round.len() == ASKED_MAX));
        assert_eq!(rounds.iter().flatten().collect::<BTreeSet<_>>().len(), 200, "each within four rounds");
    }
}
