//! `margay drain`: a name, or all of this host, is taken out of service (DESIGN §10). A drain is kept on disk: it
//! outlives a restart of the agent, and `margay undrain` ends it.

mod destination;
mod kept;
mod quiet;
mod tally;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use margay_control::api::v1::DrainReport;
use margay_control::{Clock, StateDir, StateError};
use margay_core::name::{Name, Prefix};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::{AbortHandle, block_in_place};
use tokio::time::{Instant, MissedTickBehavior, interval};

use self::tally::Tally;
use super::programs::give::Asking;
use super::service::Published;
use super::service::drained::Drained;
use super::{Agent, Routing, home};

/// From one look at the flows to the next.
const LOOK: Duration = Duration::from_millis(200);
/// The same where connections end when they are quiet: clients that ask at even times are not met busy each time.
const LOOK_QUIET: Duration = Duration::from_millis(70);
/// A drain is over after so long at the soonest: flows that kernels open by grants are told of a little later.
const SETTLED: Duration = Duration::from_millis(400);
/// Connections that are quiet are ended so long after programs were asked to give them away, at the soonest.
const GIVING_FIRST: Duration = Duration::from_secs(2);
/// A longer drain is a mistake.
pub const DEADLINE_MAX: Duration = Duration::from_secs(86_400);

/// What becomes of flows that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum When {
    /// They may end by themselves until the deadline.
    Finish,
    /// Besides, TCP connections that have carried nothing for so many milliseconds are ended in order.
    Quiet {
        /// From 10 to 600,000.
        quiet_ms: u32,
    },
}

/// What an operator wants.
#[derive(Clone, Debug)]
pub struct Order {
    /// The name; all of the host where there is none.
    pub name: Option<Name>,
    /// How long flows may go on.
    pub deadline: Duration,
    /// What becomes of them until then; as each service says where it is `None`.
    pub when: Option<When>,
    /// The hosts that programs give their connections to, by name or host-ID; none: programs choose.
    pub to: Vec<String>,
    /// Whether names that no other host serves are drained, too.
    pub is_last_drained: bool,
    /// Whether the drain outlives a restart of the agent.
    pub is_kept: bool,
}

/// Why nothing is drained, or ended.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    /// Nothing of it is here.
    #[error("{0} is not published by this host; `margay service list` shows what is")]
    Unknown(Name),
    /// A drain of it has begun.
    #[error("{0} is drained already; `margay undrain {1}` ends that")]
    Already(String, String),
    /// New flows would be refused.
    #[error("no other host serves {0}, so that connects would be refused; --last drains it all the same")]
    Last(String),
    /// Nobody could say whether another host serves it.
    #[error("whether another host serves {0} is not known ({1}); --last drains it all the same")]
    Unasked(String, String),
    /// New hosts, and first packets, would find no router.
    #[error(
        "no other router is there to be asked for names, or all others are drained; --last drains this one all the same"
    )]
    LastRouter,
    /// There is no drain of it.
    #[error("{0} is not drained; `margay service list` shows what is")]
    NotDrained(String),
    /// A name of a host that is drained as a whole.
    #[error("all of this host is drained; `margay undrain --host` ends that")]
    OfHost,
    /// A host that programs were to give connections to.
    #[error("connections of {name} cannot go to {host}: {why}")]
    Destination {
        /// As the operator has written it.
        host: String,
        /// A name that is drained.
        name: String,
        /// The reason, and how to see which hosts there are.
        why: String,
    },
    /// Too long.
    #[error("a deadline is 24 hours at most")]
    TooLong,
    /// The disk.
    #[error(transparent)]
    State(#[from] StateError),
}

/// A drain, from its order to the `undrain`.
struct Drain {
    /// All of the host where there is none.
    name: Option<Name>,
    /// When flows that are left are reset.
    deadline: Instant,
    deadline_unix_s: u64,
    when: Option<When>,
    /// Host-IDs of the hosts that programs give their connections to.
    to: Vec<String>,
    is_kept: bool,
    report: watch::Sender<DrainReport>,
    task: Mutex<Option<AbortHandle>>,
}

impl Drain {
    fn new(order: Order, clock: &Clock) -> Self {
        let Order { name, deadline: left, when, to, is_kept, .. } = order;
        let written = name.as_ref().map(|name| name.written().to_owned()).unwrap_or_default();
        let report = DrainReport { name: written, phase: "announcing".to_owned(), ..DrainReport::default() };
        Self {
            name,
            deadline: Instant::now() + left,
            deadline_unix_s: clock.unix_s() + left.as_secs() + u64::from(left.subsec_nanos() > 0),
            when,
            to,
            is_kept,
            report: watch::Sender::new(report),
            task: Mutex::default(),
        }
    }

    fn is_of(&self, name: Option<&Name>) -> bool {
        self.name.as_ref().map(Name::prefix) == name.map(Name::prefix)
    }

    fn is_over(&self) -> bool {
        self.report.borrow().phase == "over"
    }

    fn set_phase(&self, phase: &str) {
        self.report.send_modify(|report| report.phase = phase.to_owned());
    }

    fn stop(&self, phase: &str) {
        if let Some(task) = self.task.lock().take() {
            task.abort();
        }
        self.set_phase(phase);
    }

    /// The names that are drained: of a service that has partitions, all that is under it.
    fn scope(&self, published: &[Published]) -> Prefix {
        let of_name = |name: &Name| published.first().map_or_else(|| name.prefix(), Published::prefix);
        self.name.as_ref().map(of_name).unwrap_or_default()
    }

    /// What programs are asked for while it lasts.
    fn asking(&self, published: &[Published]) -> Asking {
        Asking::new(self.name.as_ref().map(Name::prefix), self.scope(published), self.to.clone())
    }

    /// Names of this host that are drained by it.
    fn published(&self, agent: &Agent) -> Vec<Published> {
        let is_its = |service: &Published| self.name.as_ref().is_none_or(|name| name.prefix() == service.name.prefix());
        agent.publishing.services.list().into_iter().filter(is_its).collect()
    }
}

fn written(name: Option<&Name>) -> String {
    name.map_or_else(|| "this host".to_owned(), |name| name.written().to_owned())
}

fn word(name: Option<&Name>) -> String {
    name.map_or_else(|| "--host".to_owned(), |name| name.written().to_owned())
}

/// All drains of this host.
pub struct Drains {
    dir: StateDir,
    all: Mutex<Vec<Arc<Drain>>>,
}

impl Drains {
    /// What is drained.
    pub fn drained(&self) -> Drained {
        let all = self.all.lock();
        let names = all.iter().filter_map(|drain| drain.name.as_ref()).map(Name::prefix).collect();
        Drained { host: all.iter().any(|drain| drain.name.is_none()), names }
    }

    /// Sentences for operators who look at the host.
    pub fn warnings(&self) -> Vec<String> {
        let all = self.all.lock();
        let sentence = |drain: &Arc<Drain>| {
            let what = written(drain.name.as_ref());
            let word = word(drain.name.as_ref());
            let how = if drain.is_over() { "is drained" } else { "is being drained" };
            format!("{what} {how} and takes no new flows; `margay undrain {word}` ends that")
        };
        all.iter().map(sentence).collect()
    }

    /// Ends what reports are told of: the agent goes down. The drains go on with its next start.
    pub fn close(&self) {
        self.all.lock().iter().filter(|drain| !drain.is_over()).for_each(|drain| drain.stop("stopping"));
    }

    fn add(&self, drain: &Arc<Drain>) -> Result<(), DrainError> {
        let mut all = self.all.lock();
        if all.iter().any(|known| known.is_of(drain.name.as_ref())) {
            return Err(DrainError::Already(written(drain.name.as_ref()), word(drain.name.as_ref())));
        }
        if all.iter().any(|known| known.name.is_none()) {
            return Err(DrainError::OfHost);
        }
        all.push(Arc::clone(drain));
        self.keep(&all).inspect_err(|_| drop(all.pop()))?;
        Ok(())
    }

    fn remove(&self, name: Option<&Name>) -> Result<Arc<Drain>, DrainError> {
        let mut all = self.all.lock();
        let Some(at) = all.iter().position(|drain| drain.is_of(name)) else {
            let is_of_host = all.iter().any(|drain| drain.name.is_none());
            return Err(if is_of_host { DrainError::OfHost } else { DrainError::NotDrained(written(name)) });
        };
        let drain = all.remove(at);
        if let Err(error) = self.keep(&all) {
            all.insert(at, drain);
            return Err(error.into());
        }
        Ok(drain)
    }

    /// Asks programs to give their connections to other hosts, unless the drain has ended meanwhile.
    fn ask_programs(&self, agent: &Agent, drain: &Arc<Drain>, published: &[Published]) {
        let all = self.all.lock();
        if all.iter().any(|known| Arc::ptr_eq(known, drain)) {
            agent.connections.programs.takers.ask(drain.asking(published));
        }
    }

    fn note_over(&self, drain: &Drain) {
        drain.set_phase("over");
        if let Err(error) = self.keep(&self.all.lock()) {
            tracing::warn!(%error, "that a drain is over is not kept; the next start of the agent looks again");
        }
    }
}

/// Lets everybody know of what is drained. Gives the routers that do not answer.
async fn announce(agent: &Agent) -> Vec<String> {
    let drained = agent.publishing.drains.drained();
    tell_as_router(&agent.routing, drained.host);
    agent.publishing.services.set_drained(drained).await
}

/// Where this host is a router: whether hosts, and the other routers of its cluster, are to ask it no more.
fn tell_as_router(routing: &Routing, is_leaving: bool) {
    routing.router.iter().for_each(|router| router.set_leaving(is_leaving));
    routing.cluster.iter().for_each(|cluster| cluster.set_leaving(is_leaving));
}

/// Goes on with the drains of the start before.
pub fn resume(agent: &Arc<Agent>) {
    tell_as_router(&agent.routing, agent.publishing.drains.drained().host);
    for drain in agent.publishing.drains.all.lock().iter() {
        if drain.is_over() {
            // Programs that come may bring connections with them.
            agent.connections.programs.takers.ask(drain.asking(&drain.published(agent)));
        } else {
            spawn(agent, drain);
        }
    }
}

/// Begins a drain, which goes on whether or not somebody follows its reports.
///
/// # Errors
///
/// What is wrong; nothing has changed then.
pub async fn begin(agent: &Arc<Agent>, order: Order) -> Result<watch::Receiver<DrainReport>, DrainError> {
    let drain = Arc::new(checked(agent, order).await?);
    block_in_place(|| agent.publishing.drains.add(&drain))?;
    tracing::info!(what = written(drain.name.as_ref()), "is drained, by order of the operator");
    let report = drain.report.subscribe();
    spawn(agent, &drain);
    Ok(report)
}

/// What a drain would meet.
///
/// # Errors
///
/// Why it would be refused.
pub async fn rehearse(agent: &Agent, order: Order) -> Result<DrainReport, DrainError> {
    let drain = checked(agent, order).await?;
    let published = drain.published(agent);
    let mut tally = Tally::new(&drain, &published, &movable(agent, &published).await);
    block_in_place(|| tally.rehearse(agent));
    tally.count_givers(agent);
    drain.set_phase("dry-run");
    drain.report.send_modify(|report| tally.tell(report, drain.deadline));
    Ok(drain.report.borrow().clone())
}

/// Ends a drain; gives the names that take new flows again.
///
/// # Errors
///
/// There is none, or the disk refuses.
pub async fn end(agent: &Agent, name: Option<&Name>) -> Result<Vec<String>, DrainError> {
    let drain = block_in_place(|| agent.publishing.drains.remove(name))?;
    drain.stop("ended");
    agent.connections.programs.takers.end_asking(name.map(Name::prefix));
    let were_drained = drain.published(agent).into_iter().filter(|service| service.is_drained);
    let names: BTreeSet<Prefix> = were_drained.map(|service| service.name.prefix()).collect();
    announce(agent).await;
    tracing::info!(what = written(name), "is drained no more, by order of the operator");
    let is_back = |service: &Published| !service.is_drained && names.contains(&service.name.prefix());
    Ok(agent
        .publishing
        .services
        .list()
        .into_iter()
        .filter(is_back)
        .map(|service| service.name.written().to_owned())
        .collect())
}

async fn checked(agent: &Agent, order: Order) -> Result<Drain, DrainError> {
    if order.deadline > DEADLINE_MAX {
        return Err(DrainError::TooLong);
    }
    if let Some(name) = order.name.as_ref().filter(|name| agent.publishing.services.find(name).is_none()) {
        return Err(DrainError::Unknown(name.clone()));
    }
    let is_last_drained = order.is_last_drained;
    if order.name.is_none() && !is_last_drained && is_last_router(&agent.routing) {
        return Err(DrainError::LastRouter);
    }
    let mut drain = Drain::new(order, &agent.host.clock);
    if agent.publishing.drains.all.lock().iter().any(|known| known.is_of(drain.name.as_ref())) {
        return Err(DrainError::Already(written(drain.name.as_ref()), word(drain.name.as_ref())));
    }
    drain.to = destination::find_all(agent, &drain).await?;
    for service in drain.published(agent).iter().filter(|service| service.is_served && !is_last_drained) {
        let name = service.name.written().to_owned();
        match has_others(agent, &service.name).await {
            Ok(true) => {}
            Ok(false) => return Err(DrainError::Last(name)),
            Err(why) => return Err(DrainError::Unasked(name, why)),
        }
    }
    Ok(drain)
}

/// Whether this host is a router, and no other one of its cluster is there to be asked.
fn is_last_router(routing: &Routing) -> bool {
    let Some(router) = &routing.router else { return false };
    let there = router.links();
    let others = routing.cluster.iter().flat_map(|cluster| cluster.routers());
    !others.into_iter().any(|other| there.contains(&other.id()) && !other.is_leaving)
}

/// Whether another host takes new flows for a name, as far as routers know.
async fn has_others(agent: &Agent, name: &Name) -> Result<bool, String> {
    let own = agent.host.identity.host_id();
    let (found, _) = home::instances(&agent.publishing.services, agent.routing.router.as_deref(), name).await?;
    Ok(found.iter().any(|instance| instance.host != own && instance.weight > 0))
}

/// Names whose datagrams may go to another instance.
async fn movable(agent: &Agent, published: &[Published]) -> BTreeSet<Prefix> {
    let mut movable = BTreeSet::new();
    for service in published.iter().filter(|service| !service.terms.sticky) {
        if has_others(agent, &service.name).await == Ok(true) {
            movable.insert(service.name.prefix());
        }
    }
    movable
}

fn spawn(agent: &Arc<Agent>, drain: &Arc<Drain>) {
    let mut task = drain.task.lock();
    *task = Some(tokio::spawn(run(Arc::clone(agent), Arc::clone(drain))).abort_handle());
}

async fn run(agent: Arc<Agent>, drain: Arc<Drain>) {
    let silent = announce(&agent).await;
    drain.report.send_modify(|report| {
        report.silent_routers = silent;
        report.phase = "emptying".to_owned();
    });
    let published = drain.published(&agent);
    let mut tally = Tally::new(&drain, &published, &movable(&agent, &published).await);
    if agent.connections.programs.takers.givers(&drain.scope(&published)) > 0 {
        tally.quiet_from = Instant::now() + GIVING_FIRST;
    }
    // What programs give away is counted, since it is known before they are asked.
    block_in_place(|| tally.look(&agent, drain.deadline));
    agent.publishing.drains.ask_programs(&agent, &drain, &published);
    let begun = Instant::now();
    let mut looks = interval(if tally.ends_quiet_ones() { LOOK_QUIET } else { LOOK });
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        let is_empty = block_in_place(|| tally.look(&agent, drain.deadline));
        drain.report.send_modify(|report| tally.tell(report, drain.deadline));
        if is_empty && begun.elapsed() >= SETTLED {
            break;
        }
    }
    block_in_place(|| agent.publishing.drains.note_over(&drain));
    tracing::info!(what = written(drain.name.as_ref()), "has no flows any more");
}
