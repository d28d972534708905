//! What happens in the core, for logs and for whoever watches.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use margay_core::give_up::GiveUpCause;
use margay_core::key::HostId;
use margay_core::lifetime::Expiry;
use margay_core::table::RuleId;
use margay_core::twin::Twin;
use margay_core::{Event, FlowCounters, FlowInfo, RemoveReason, StackChange};
use margay_wire::FlowId;
use parking_lot::{Mutex, RwLock};
use tokio::sync::broadcast;

use super::Agent;
use super::ended::{Ended, EndedFlows};
use super::failure::{Failed, Failures};
use super::flows::Change;
use super::programs::splice;
use super::relocation::Words;
use super::stack_rules::Judging;

/// Events that a slow watcher may be behind; older ones are lost to it, and it is told how many.
const BEHIND_MAX: usize = 8192;

/// Gives events out.
#[derive(Clone)]
pub struct Watchers {
    /// None once the agent goes down.
    senders: Arc<RwLock<Option<Senders>>>,
    /// Whoever keeps flows for the next start.
    keeper: Arc<OnceLock<Sender<Change>>>,
    /// What failed of late.
    failures: Arc<Failures>,
    ended: Arc<EndedFlows>,
    /// How many flows have opened.
    opened: Arc<AtomicU64>,
    /// What has become of changes of flows' stacks.
    stack_changes: Arc<StackCounts>,
    /// What looks at the rules of stacks have cost.
    judging: Arc<Judging>,
    /// Whoever carries out hand-overs.
    hand_overs: Words,
    /// Whoever ends the sockets of programs that have left.
    splices: splice::Words,
}

/// Changes of stacks by from, to, cause and outcome.
#[derive(Default)]
struct StackCounts(Mutex<BTreeMap<[&'static str; 4], u64>>);

impl StackCounts {
    fn note(&self, change: &StackChange) {
        let labels = [change.from.label(), change.to.label(), change.cause.label(), change.outcome.label()];
        *self.0.lock().entry(labels).or_default() += 1;
    }

    fn counts(&self) -> Vec<([&'static str; 4], u64)> {
        self.0.lock().iter().map(|(labels, count)| (*labels, *count)).collect()
    }
}

struct Senders {
    events: broadcast::Sender<Event>,
    /// What somebody always follows has a channel of its own: connections come and go in numbers, and would wake that
    /// one each time.
    rules: broadcast::Sender<(RuleId, Expiry)>,
    /// The same of what other hosts order.
    distant_orders: broadcast::Sender<Event>,
}

impl Default for Watchers {
    fn default() -> Self {
        let senders = Senders {
            events: broadcast::channel(BEHIND_MAX).0,
            rules: broadcast::channel(BEHIND_MAX).0,
            distant_orders: broadcast::channel(BEHIND_MAX).0,
        };
        let senders = Arc::new(RwLock::new(Some(senders)));
        Self {
            senders,
            keeper: Arc::default(),
            failures: Arc::default(),
            ended: Arc::default(),
            opened: Arc::default(),
            stack_changes: Arc::default(),
            judging: Arc::default(),
            hand_overs: Words::default(),
            splices: splice::Words::default(),
        }
    }
}

impl Watchers {
    /// For [`margay_datapath::Datapath::start`]: quick, and never calls back.
    pub fn on_event(&self) -> Box<dyn FnMut(Event) + Send> {
        let this = self.clone();
        Box::new(move |event| {
            if let Event::HandOver(word) = event {
                // Each is for one task alone, and may be a packet.
                return this.hand_overs.put(word);
            }
            if let Event::SpliceOver { left, outcome, .. } = event {
                return this.splices.put((left, outcome));
            }
            log(&event);
            if let Event::StackChanged { change, .. } = &event {
                this.stack_changes.note(change);
            }
            let now = Instant::now();
            this.failures.note(&event, now);
            this.ended.note(&event, now);
            if matches!(event, Event::FlowOpened(_)) {
                this.opened.fetch_add(1, Ordering::Relaxed);
            }
            if let Some((keeper, change)) = this.keeper.get().zip(Change::of(&event)) {
                // It ends with the process only.
                let _ = keeper.send(change);
            }
            if let Some(senders) = &*this.senders.read() {
                // Nobody listens: nothing is lost.
                if let Event::RuleExpired { id, why, .. } = &event {
                    let _ = senders.rules.send((*id, *why));
                }
                if is_of_distant_order(&event) {
                    let _ = senders.distant_orders.send(event.clone());
                }
                let _ = senders.events.send(event);
            }
        })
    }

    /// Where the core's words of hand-overs come.
    pub const fn hand_overs(&self) -> &Words {
        &self.hand_overs
    }

    /// Where the core's words of programs that leave come.
    pub const fn splices(&self) -> &splice::Words {
        &self.splices
    }

    /// From now on; `None` when the agent goes down.
    pub fn subscribe(&self) -> Option<broadcast::Receiver<Event>> {
        self.senders.read().as_ref().map(|senders| senders.events.subscribe())
    }

    /// Rules that end by themselves from now on; `None` when the agent goes down.
    pub fn follow_rules(&self) -> Option<broadcast::Receiver<(RuleId, Expiry)>> {
        self.senders.read().as_ref().map(|senders| senders.rules.subscribe())
    }

    /// What comes of other hosts' orders on sessions' boxes from now on; `None` when the agent goes down.
    pub fn follow_distant_orders(&self) -> Option<broadcast::Receiver<Event>> {
        self.senders.read().as_ref().map(|senders| senders.distant_orders.subscribe())
    }

    /// Connections of programs of this host that failed of late, the latest first.
    pub fn failures(&self) -> Vec<Failed> {
        self.failures.recent(Instant::now())
    }

    /// What looks at the rules of stacks have cost since the start.
    pub fn judging(&self) -> &Judging {
        &self.judging
    }

    /// What has become of changes of flows' stacks since the start.
    pub fn stack_changes(&self) -> Vec<([&'static str; 4], u64)> {
        self.stack_changes.counts()
    }

    /// Flows that failed of late, the latest first.
    pub fn ended(&self) -> Vec<Ended> {
        self.ended.all()
    }

    /// One of these.
    pub fn find_ended(&self, flow: FlowId) -> Option<Ended> {
        self.ended.find(flow)
    }

    /// How many flows have opened since the start: cheaper to ask for than to hear of each.
    pub fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    /// Ends all watching.
    pub fn close(&self) {
        *self.senders.write() = None;
    }

    /// Tells `keeper` of every change from now on.
    pub fn keep(&self, keeper: Sender<Change>) {
        // Set once, at the start.
        let _ = self.keeper.set(keeper);
    }
}

/// How a flow has ended.
pub struct End {
    /// What it was.
    pub flow: FlowInfo,
    /// Why.
    pub reason: RemoveReason,
    /// What it has carried.
    pub carried: FlowCounters,
}

/// The ends of flows, each told once: as soon as it is over, and not when late packets of it can come no more.
#[derive(Default)]
pub struct Ends {
    /// Those that linger.
    told: HashSet<FlowId>,
}

impl Ends {
    /// What an event says of a flow's end, unless that is known already.
    pub fn end(&mut self, agent: &Agent, event: Event) -> Option<End> {
        match event {
            Event::FlowEnded { flow: id, reason } => {
                let core = &agent.core.0;
                // One that is gone by now is told of by the next event.
                let flow = core.with_sal(|sal, _| sal.flow(id))?;
                let carried = core.flow_counters(id)?;
                self.told.insert(id);
                Some(End { flow, reason, carried })
            }
            Event::FlowClosed { flow, reason, carried } if !self.told.remove(&flow.flow) => {
                Some(End { flow: *flow, reason, carried })
            }
            _ => None,
        }
    }

    /// Events were missed: what has gone meanwhile is told of by none.
    pub fn missed(&mut self, agent: &Agent) {
        agent.core.0.with_sal(|sal, _| self.told.retain(|id| sal.flow(*id).is_some()));
    }
}

fn is_of_distant_order(event: &Event) -> bool {
    match event {
        Event::Ordered { .. } => true,
        Event::Reconfigured { change, .. } => change.by.is_some(),
        _ => false,
    }
}

fn log(event: &Event) {
    match event {
        Event::FlowOpened(flow) => tracing::debug!(%flow, "flow opened"),
        Event::FlowChanged(flow) => tracing::trace!(%flow, "one side has closed, or the stack is another"),
        Event::StackChanged { flow, change } => tracing::info!(
            %flow, from = %change.from, to = %change.to, cause = change.cause.label(), outcome = change.outcome.label(),
            why = change.text(), "a change of a flow's stack is over"
        ),
        Event::Reconfigured { flow, session, change } => tracing::info!(
            %flow, %session, act = change.edit.label(), outcome = change.outcome.label(), why = change.outcome.text(),
            "a change of a session's boxes is over"
        ),
        Event::Ordered { flow, session, by, edit, refused } => tracing::info!(
            %flow, %session, %by, act = edit.label(), refused, "another host has ordered a change of a session's boxes"
        ),
        Event::FlowEnded { flow, reason } => tracing::trace!(%flow, reason = reason.label(), "flow over"),
        Event::FlowClosed { flow, reason, .. } => {
            tracing::debug!(flow = %flow.flow, app = %flow.app, reason = reason.label(), "flow closed");
        }
        Event::ConnectFailed { service, app, why } => tracing::info!(%service, %app, why, "connect failed"),
        Event::AssociationUp(host) => tracing::debug!(%host, "association up"),
        Event::Whereabouts(host) => tracing::debug!(%host, "the peer has named its router"),
        Event::PeerRebooted(host) => tracing::info!(%host, "peer rebooted; its older flows were reset"),
        Event::Moved { host, flow, pair, cause } if flow.0 == 0 => {
            tracing::info!(%host, %pair, why = cause.text(), "flows with this peer go by other addresses");
        }
        Event::Moved { host, flow, pair, cause } => {
            tracing::info!(%host, %flow, %pair, why = cause.text(), "a flow goes by other addresses");
        }
        Event::Flapping(host) => {
            tracing::warn!(%host, "this peer moves more than eight times in ten seconds; until that is over it is \
                left where it is");
        }
        Event::Silent(host) => {
            tracing::info!(%host, "nothing comes from this peer by any way that is known; it is asked again and again");
        }
        Event::GivenUp { peer, flows, cause } => log_given_up(*peer, *flows, *cause),
        Event::Unanswered(host) => {
            tracing::warn!(
                %host,
                "probes are answered between the addresses in use with this peer, but data is not, and no other pair \
                 of addresses does better"
            );
        }
        Event::OtherHost { former, host } => {
            tracing::warn!(
                %former, %host,
                "a host with another key is at the address of this peer: the machine was set up anew, or the address \
                 is another's now"
            );
        }
        Event::Twin(twin) => log_twin(*twin),
        Event::HandOver(_) | Event::SpliceOver { .. } | Event::Keep { .. } => {}
        Event::RouterFound { key, at, .. } => tracing::info!(host = %key.id(), %at, "a router has answered a search"),
        Event::RuleExpired { id, prefix, why, packets } => {
            tracing::info!(rule = id.0, %prefix, packets, why = why.text(), "a rule has ended");
        }
    }
}

fn log_given_up(host: HostId, flows: usize, cause: GiveUpCause) {
    match cause {
        GiveUpCause::Silent(silent) => tracing::warn!(
            %host, flows, ?silent,
            "this peer has been silent for as long as `[host] give_up_after` or its service says, and no router lists \
             it: flows with it have ended"
        ),
        GiveUpCause::Elsewhere(holder) => tracing::info!(
            %host, flows, %holder,
            "flows with this peer have ended: another host holds their name, which is fenced"
        ),
        // Whoever has found out says so, with the name.
        GiveUpCause::Left => {}
    }
}

/// What is to be done about a key in two places; the same on each of the three hosts that know.
const ONE_KEY: &str = "stop the agent on the copy, remove /var/lib/margay/host.key there, and start it again: it is \
 a host of its own then";

fn log_twin(twin: Twin) {
    match twin {
        Twin::KeptOut { host, elder, newcomer } => {
            tracing::warn!(%host, %elder, %newcomer, advice = ONE_KEY, "two hosts use the same key; the elder is \
             alive, and the later one is kept out");
        }
        Twin::Elsewhere { peer, newcomer } => {
            tracing::warn!(%peer, %newcomer, advice = ONE_KEY, "another host shows this host's key; this one was \
             there before, and keeps its place");
        }
        Twin::Refused { peer } => {
            tracing::warn!(%peer, advice = ONE_KEY, "another host with this host's key was there before and is \
             alive; this one is kept out");
        }
    }
}
