//! Peers that routers list no more (DESIGN §7). The core gives up one that is silent besides; this follows what
//! routers say of the names that programs here have flows to.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use margay_control::registration::{Home, Instance, Watcher};
use margay_core::key::HostId;
use margay_core::name::ServiceId;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::fencing::Notices;
use super::spread::{homes_of, instances_under, pass_on, whole};
use super::{Agent, core::CoreHandle, home};

/// From one look at whether flows have opened to the next.
const TICK: Duration = Duration::from_millis(250);
/// The flows are walked over at the latest after so long, and otherwise for so small a part of the time.
const ROUND_MAX: Duration = Duration::from_secs(2);
const WALKING_SHARE: u32 = 50;
/// What routers say is looked at so much later: more of it may come.
const MORE_COMES: Duration = Duration::from_millis(20);
/// A router that has just started lists some instances only. One that is missing for so long has left.
const LEFT_AFTER: Duration = Duration::from_secs(1);
/// Names that are followed; of more, peers are not given up. A router takes some hundred watches of one host, most of
/// which are for datagrams.
const NAMES_MAX: usize = 64;

/// Goes on until it is aborted.
pub async fn follow(agent: Arc<Agent>) {
    let mut absences = Absences::default();
    if let Some(router) = &agent.routing.router {
        tokio::spawn(pass_on(router.changes(), Arc::clone(&absences.heard)));
    }
    loop {
        let has_news = tokio::select! {
            () = sleep(TICK) => absences.ask(&agent),
            () = absences.heard.notified() => {
                sleep(MORE_COMES).await;
                true
            }
        };
        if has_news || !absences.missing.is_empty() {
            absences.look(&agent);
        }
        absences.note_life(&agent);
    }
}

#[derive(Default)]
struct Absences {
    /// Routers have said something.
    heard: Arc<Notify>,
    /// Routers that are listened to.
    routers: Vec<Weak<Home>>,
    /// How many flows had opened at the last walk over them, when that was, and how long it took.
    opened: u64,
    walked: Option<Instant>,
    walk: Duration,
    /// Peers of flows of programs here, and their names, as of then.
    initiated: BTreeMap<HostId, BTreeSet<ServiceId>>,
    /// Names that are followed.
    watched: BTreeSet<ServiceId>,
    /// Peers that no router lists.
    absent: BTreeSet<HostId>,
    /// What flows with peers have brought that may be given up, in segments.
    carried: HashMap<HostId, u64>,
    /// Hosts that routers have listed by a name; those of other sites they never do.
    known: HashMap<ServiceId, BTreeSet<HostId>>,
    /// Peers that were listed by a name, and are not any more.
    missing: HashMap<(HostId, ServiceId), Missing>,
    /// Fenced names that this host publishes, or has published while flows to it were open.
    fenced: BTreeSet<ServiceId>,
    notices: Notices,
}

/// An instance that routers list no more.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Since(Instant),
    /// For long, and datagrams go elsewhere.
    Left,
}

/// What routers say of a peer, by a name of its.
struct Verdict {
    host: HostId,
    service: ServiceId,
    /// None: the name is not followed, or no router has told of it.
    is_listed: Option<bool>,
}

impl Absences {
    /// Whether it is time to walk over all flows again.
    fn is_due(&self, opened: u64) -> bool {
        let Some(walked) = self.walked else { return true };
        let is_news = opened != self.opened && walked.elapsed() >= self.walk * WALKING_SHARE;
        is_news || walked.elapsed() >= ROUND_MAX.max(self.walk * WALKING_SHARE)
    }

    /// Follows the names that programs here have flows to. Gives whether it was time to.
    fn ask(&mut self, agent: &Agent) -> bool {
        let opened = agent.process.watchers.opened();
        if !self.is_due(opened) {
            return false;
        }
        let start = Instant::now();
        self.initiated = agent.core.0.with_sal(|sal, _| sal.initiated());
        self.opened = opened;
        self.walk = start.elapsed();
        self.walked = Some(start);
        let initiated = &self.initiated;
        self.missing
            .retain(|(host, service), _| initiated.get(host).is_some_and(|services| services.contains(service)));
        for home in agent.publishing.services.homes() {
            self.listen(&home);
        }
        self.note_fenced(agent);
        let all: BTreeSet<ServiceId> = self.initiated.values().flatten().copied().collect();
        let wanted: BTreeSet<ServiceId> = self.fenced.iter().copied().chain(all).take(NAMES_MAX).collect();
        for service in &wanted {
            // Also of those that are watched: a router may have come since.
            homes_of(agent, service).iter().for_each(|home| home.watch(whole(service), Watcher::Absences));
        }
        let prefixes: HashSet<_> = wanted.iter().map(whole).collect();
        for service in self.watched.difference(&wanted).filter(|gone| !prefixes.contains(&whole(gone))) {
            homes_of(agent, service).iter().for_each(|home| home.end_watch(whole(service), Watcher::Absences));
        }
        self.known.retain(|service, _| wanted.contains(service));
        // Those that are listed still are noted again at once.
        self.known.values_mut().for_each(|hosts| hosts.retain(|host| self.initiated.contains_key(host)));
        self.watched = wanted;
        true
    }

    /// Who held a fenced name hears of the next holder, as long as programs here have connections by it.
    fn note_fenced(&mut self, agent: &Agent) {
        let published: BTreeSet<ServiceId> =
            agent.publishing.services.fenced().into_iter().map(|prefix| prefix.id).collect();
        let left = self.fenced.iter().filter(|service| !published.contains(*service));
        let is_open =
            |service: &&ServiceId| agent.core.0.with_sal(|sal, _| sal.flows().any(|flow| flow.service == **service));
        let open: Vec<ServiceId> = left.filter(is_open).copied().collect();
        self.fenced = published.into_iter().chain(open).take(NAMES_MAX / 2).collect();
    }

    fn listen(&mut self, home: &Arc<Home>) {
        self.routers.retain(|known| known.strong_count() > 0);
        if self.routers.iter().all(|known| !known.ptr_eq(&Arc::downgrade(home))) {
            self.routers.push(Arc::downgrade(home));
            tokio::spawn(pass_on(home.heard(), Arc::clone(&self.heard)));
        }
    }

    /// Draws the conclusions from what routers list.
    fn look(&mut self, agent: &Agent) {
        let mut listed: HashMap<ServiceId, Vec<Instance>> = HashMap::new();
        for service in &self.watched {
            if let Some(found) = instances(agent, service) {
                self.known.entry(*service).or_default().extend(found.iter().map(|instance| instance.host));
                listed.insert(*service, found);
            }
        }
        self.notices.take(agent, &listed);
        let verdicts = self.verdicts(&listed);
        self.tell(agent, &verdicts);
        let unlisted = with(&verdicts, Some(false));
        let core = &agent.core.0;
        let silent: BTreeSet<HostId> =
            core.with_sal(|sal, _| unlisted.into_iter().filter(|host| sal.is_silent(*host)).collect());
        for Verdict { host, service, is_listed } in verdicts {
            let was_listed = self.known.get(&service).is_some_and(|known| known.contains(&host));
            // One that was never listed is of another site, or has left before its name was followed.
            let counts = was_listed || silent.contains(&host);
            let Some(is_listed) = is_listed.filter(|_| counts) else { continue };
            if note(&mut self.missing, (host, service), is_listed) {
                rebind(&agent.core, host, &service, &listed[&service]);
            }
        }
    }

    /// Whether routers list each peer by each name.
    fn verdicts(&self, listed: &HashMap<ServiceId, Vec<Instance>>) -> Vec<Verdict> {
        let pairs = self.initiated.iter().flat_map(|(host, services)| services.iter().map(|service| (*host, *service)));
        let verdict = |(host, service): (HostId, ServiceId)| {
            let found = listed.get(&service);
            let is_listed = found.map(|found| found.iter().any(|instance| instance.host == host));
            Verdict { host, service, is_listed }
        };
        pairs.map(verdict).collect()
    }

    /// Tells the core of the peers that no router lists by any name.
    fn tell(&mut self, agent: &Agent, verdicts: &[Verdict]) {
        let listed = with(verdicts, Some(true));
        let unknown = with(verdicts, None);
        let before = std::mem::take(&mut self.absent);
        let is_absent = |host: &HostId| !listed.contains(host) && (!unknown.contains(host) || before.contains(host));
        self.absent = self.initiated.keys().copied().filter(is_absent).collect();
        agent.core.0.with_sal(|sal, now| sal.set_absent(now, &self.absent));
    }

    /// Tells the core where packets have come from a peer that may be given up: its agent may be dead, and its kernel
    /// well.
    fn note_life(&mut self, agent: &Agent) {
        let core = &agent.core.0;
        let doubted = core.with_sal(|sal, now| sal.doubted_peers(now));
        self.carried.retain(|host, _| doubted.contains(host));
        for host in doubted {
            let flows = core.with_sal(|sal, _| sal.flows_initiated_with(host));
            let carried = flows.into_iter().filter_map(|flow| core.flow_counters(flow));
            let segments = carried.map(|carried| carried.ingress_segments).sum();
            if self.carried.insert(host, segments).is_some_and(|before| before != segments) {
                core.with_sal(|sal, now| sal.handle_life(now, host));
            }
        }
    }
}

/// The peers of which routers say so.
fn with(verdicts: &[Verdict], is_listed: Option<bool>) -> BTreeSet<HostId> {
    verdicts.iter().filter(|verdict| verdict.is_listed == is_listed).map(|verdict| verdict.host).collect()
}

/// Notes whether routers list a peer by a name. Gives whether it has left just now.
fn note(missing: &mut HashMap<(HostId, ServiceId), Missing>, key: (HostId, ServiceId), is_listed: bool) -> bool {
    if is_listed {
        missing.remove(&key);
        return false;
    }
    let known = missing.entry(key).or_insert_with(|| Missing::Since(Instant::now()));
    let has_left = matches!(known, Missing::Since(since) if since.elapsed() >= LEFT_AFTER);
    if has_left {
        *known = Missing::Left;
    }
    has_left
}

/// Who serves a name, as its routers have told; `None` where none has.
fn instances(agent: &Agent, service: &ServiceId) -> Option<Vec<Instance>> {
    let homes = homes_of(agent, service);
    // What routers said before they were lost says nothing of now.
    let is_told = agent.routing.router.is_some() || homes.iter().any(|router| home::is_connected(router));
    let mut found = instances_under(agent, service, &whole(service)).filter(|_| is_told)?;
    found.retain(|instance| instance.prefix.contains(service));
    Some(found)
}

/// Flows of datagrams with an instance that has left go to another one, where there is one and sockets are not bound to
/// theirs.
fn rebind(core: &CoreHandle, host: HostId, service: &ServiceId, found: &[Instance]) {
    if !found.iter().any(|instance| instance.weight > 0 && !instance.sticky) {
        return;
    }
    let flows = core.0.with_sal(|sal, now| sal.rebind_datagrams(now, host, service));
    if flows > 0 {
        tracing::info!(%host, %service, flows, "datagrams go to another instance: this one has left");
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn who_is_missing_for_a_while_has_left_once() {
        let mut missing = HashMap::new();
        let key = (HostId([1; 16]), ServiceId([2; 32]));
        assert!(!note(&mut missing, key, true) && !note(&mut missing, key, false) && !note(&mut missing, key, false));
        let long_ago = Instant::now().checked_sub(LEFT_AFTER).expect("the machine has run for a second");
        missing.insert(key, Missing::Since(long_ago));
        assert_eq!([note(&mut missing, key, false), note(&mut missing, key, false)], [true, false]);
        assert!(!note(&mut missing, key, true) && missing.is_empty(), "it is back");
    }
}
