//! One host's part: in rounds, programs are asked for single connections, each of which goes to the host that the plan
//! says. A round begins with counts that are new, and ends when it is known what has become of each connection.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use margay_control::store::AuditEntry;
use margay_core::Tuple;
use margay_core::key::HostId;
use margay_core::name::{Name, Prefix};
use margay_wire::FlowId;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::task::block_in_place;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::own::{Movable, Own, Stays};
use super::plan::{Gift, Share, gifts, is_even};
use super::{Order, Outcome, Question, RATE_DEFAULT, census};
use crate::agent::Agent;
use crate::agent::programs::give::Wish;
use crate::agent::programs::request::No;

/// An order holds for so long from when it was last given.
const LEASE: Duration = Duration::from_secs(5);
/// From one look at what has become of connections to the next; the rate is kept from look to look.
const TICK: Duration = Duration::from_millis(50);
/// Flows are looked at once in so many ticks.
const TICKS_OF_LOOK: u32 = 10;
/// A program that has not given a connection by then keeps it. Longer than most hand-overs take.
const GIVE_LIMIT: Duration = Duration::from_secs(15);
/// Rounds without a connection that has gone, after which nothing more is tried.
const VAIN_MAX: u32 = 3;
/// From one vain round to the next.
const VAIN_PAUSE: Duration = Duration::from_secs(1);
/// A connection is asked for so often at most.
const TRIES_MAX: u32 = 2;
const NOT_GIVEN: &str = "its program has not given it in time";

/// How far a run is.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// Connections that other hosts have now.
    pub given: u64,
    /// Connections that could go, at the last look.
    pub movable: u64,
    /// Those that stay, at the last look.
    pub stays: Stays,
    is_over: bool,
}

/// A host's part, from its beginning to its end.
pub(super) struct Run {
    name: Name,
    max_per_s: u32,
    /// The operator's order; `None`: it has begun by itself.
    pub order: Option<[u8; 16]>,
    /// Until then the order holds.
    lease: Mutex<Option<Instant>>,
    progress: Mutex<Progress>,
}

impl Run {
    /// By an operator's order.
    pub fn ordered(name: &Name, order: Order) -> Self {
        let lease = Mutex::new(Some(Instant::now() + LEASE));
        let (name, max_per_s, order) = (name.clone(), order.max_per_s, Some(order.id));
        Self { name, max_per_s, order, lease, progress: Mutex::default() }
    }

    /// Since the service says so.
    pub fn by_itself(name: &Name) -> Self {
        let lease = Mutex::default();
        Self { name: name.clone(), max_per_s: RATE_DEFAULT, order: None, lease, progress: Mutex::default() }
    }

    /// The order is given again.
    pub fn renew(&self) {
        if let Some(lease) = self.lease.lock().as_mut() {
            *lease = Instant::now() + LEASE;
        }
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.progress.lock().clone()
    }

    /// Whether nothing more comes of it.
    pub fn is_over(&self) -> bool {
        self.progress.lock().is_over
    }

    fn holds(&self) -> bool {
        self.lease.lock().is_none_or(|lease| Instant::now() < lease)
    }
}

/// Ends the run whatever ends its task.
struct Ending<'a>(&'a Run);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.progress.lock().is_over = true;
    }
}

/// Carries a run out; `by`: who wants it, for people.
pub(super) async fn carry_out(agent: Arc<Agent>, run: Arc<Run>, by: String) {
    let _ending = Ending(&run);
    tracing::info!(name = %run.name, by, "connections go to instances that have fewer than their share");
    let mut work =
        Work { agent: &agent, run: &run, refusing: HashSet::new(), known: HashSet::new(), tried: HashMap::new() };
    let why = work.go_on().await;
    let given = run.progress().given;
    tracing::info!(name = %run.name, given, why, "no more connections go to other instances");
    if given > 0 {
        let detail = format!("connections given to other hosts: {given}, by order of {by}");
        let entry = AuditEntry::once(agent.host.clock.unix_s(), "rebalance", run.name.written().to_owned(), detail);
        if let Err(error) = block_in_place(|| agent.host.store.note_all(&[entry])) {
            tracing::warn!(%error, "that connections were given away is not in the audit log");
        }
    }
}

/// What has become of a connection that was asked for.
struct Tried {
    times: u32,
    why: String,
}

/// A connection that a program was asked for.
struct Waiting {
    to: HostId,
    since: Instant,
    app: Tuple,
    answer: oneshot::Receiver<Result<(), No>>,
}

/// What one round has brought, by the host that was to get the connections: how many it was to get, and has got.
type Tally = BTreeMap<HostId, [u64; 2]>;

/// A run under way.
struct Work<'a> {
    agent: &'a Arc<Agent>,
    run: &'a Run,
    /// Hosts that have taken nothing of what was for them.
    refusing: HashSet<HostId>,
    /// Hosts whose counts were heard once.
    known: HashSet<HostId>,
    /// Connections that have not gone.
    tried: HashMap<FlowId, Tried>,
}

impl Work<'_> {
    /// Goes on until the shares are even, or nothing more can go; says why it has ended.
    async fn go_on(&mut self) -> &'static str {
        let mut vain = 0;
        while vain < VAIN_MAX {
            if !self.run.holds() {
                return "the order is not given any more";
            }
            let gifts = match self.look().await {
                Look::Give(gifts) => gifts,
                Look::Rest(why) => return why,
                Look::Unknown => {
                    vain += 1;
                    tokio::time::sleep(VAIN_PAUSE).await;
                    continue;
                }
            };
            let movable = self.sort();
            if movable.is_empty() {
                return "none that is left can go";
            }
            vain = if self.round(&gifts, movable).await > 0 { 0 } else { vain + 1 };
        }
        "nothing has gone for some time"
    }

    /// What this host is to give by now.
    async fn look(&mut self) -> Look {
        if self.agent.publishing.services.find(&self.run.name).is_none_or(|service| service.is_drained) {
            return Look::Rest("the name is drained here, or served no more");
        }
        let Ok(seen) = census::take(self.agent, &self.run.name, |_, _| Question::default()).await else {
            return Look::Unknown;
        };
        // To leave out a host that has just not answered would make the others' shares larger than they are.
        let is_missing =
            |one: &census::Seen| one.takes_part && one.counted.is_err() && self.known.contains(&one.instance.host);
        if seen.iter().any(is_missing) {
            return Look::Unknown;
        }
        let mut shares = census::shares(&seen);
        self.known.extend(shares.iter().map(|share| share.host));
        shares.retain(|share| !self.refusing.contains(&share.host));
        own_part(&shares, self.agent.host.identity.host_id())
    }

    /// The connections that could go, the best first.
    fn sort(&self) -> Vec<Movable> {
        let is_over = |tried: &&Tried| tried.times >= TRIES_MAX;
        let failed = self.tried.iter().filter(|(_, tried)| is_over(tried));
        let failed: HashMap<FlowId, String> = failed.map(|(flow, tried)| (*flow, tried.why.clone())).collect();
        let prefix = self.run.name.prefix();
        let sorted = block_in_place(|| Own::look(self.agent, &prefix).sort(self.agent, &failed));
        let mut progress = self.run.progress.lock();
        progress.movable = sorted.movable.len() as u64;
        progress.stays = sorted.stays;
        sorted.movable
    }

    /// Asks for connections at the rate of the run, and waits for what becomes of them. Gives how many have gone.
    async fn round(&mut self, gifts: &[Gift], movable: Vec<Movable>) -> u64 {
        // A second's worth: then counts are asked for anew.
        let room = self.run.max_per_s as usize;
        let mut next: VecDeque<(HostId, Movable)> = destinations(gifts).take(room).zip(movable).collect();
        let mut waiting: HashMap<FlowId, Waiting> = HashMap::new();
        let mut tally = Tally::new();
        let per_tick = f64::from(self.run.max_per_s) * TICK.as_secs_f64();
        let mut budget = 0.0_f64;
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut tick = 0_u32;
        while !(next.is_empty() && waiting.is_empty()) {
            ticks.tick().await;
            tick += 1;
            budget = (budget + per_tick).min(per_tick + 1.0);
            if !self.run.holds() {
                next.clear();
            }
            while budget >= 1.0
                && let Some((to, movable)) = next.pop_front()
            {
                budget -= 1.0;
                if let Some(asked) = self.ask(to, &movable) {
                    waiting.insert(movable.flow.flow, asked);
                }
            }
            let open = tick
                .is_multiple_of(TICKS_OF_LOOK)
                .then(|| block_in_place(|| Own::look(self.agent, &self.run.name.prefix()).flows()));
            self.hear(&mut waiting, open.as_ref(), &mut tally);
        }
        self.refusing.extend(tally.iter().filter(|(_, [asked, gone])| *asked > 0 && *gone == 0).map(|(host, _)| *host));
        tally.values().map(|[_, gone]| gone).sum()
    }

    /// Asks the program that has a connection for it. `None`: it has not read what it was asked before.
    fn ask(&self, to: HostId, movable: &Movable) -> Option<Waiting> {
        let Movable { flow, pid, .. } = movable;
        let (waits, answer) = oneshot::channel();
        self.agent.connections.rebalances.asked.lock().insert(flow.app, waits);
        let name = Prefix::from(flow.service);
        let wish = Wish { name, host: to.to_string(), peer: Some(flow.app.destination) };
        if self.agent.connections.programs.takers.ask_one(*pid, &wish) {
            return Some(Waiting { to, since: Instant::now(), app: flow.app, answer });
        }
        self.agent.connections.rebalances.asked.lock().remove(&flow.app);
        None
    }

    /// Hears what has become of connections that were asked for. `open`: those that there are, where the flows were
    /// looked at.
    fn hear(&mut self, waiting: &mut HashMap<FlowId, Waiting>, open: Option<&HashSet<FlowId>>, tally: &mut Tally) {
        waiting.retain(|flow, asked| {
            let outcome = match asked.answer.try_recv() {
                Ok(given) => {
                    let why = given.as_ref().err().map(|(_, why)| why.clone()).unwrap_or_default();
                    Some((Outcome::of(&given), why))
                }
                Err(TryRecvError::Empty) if asked.since.elapsed() < GIVE_LIMIT => None,
                Err(_) => Some((Outcome::NotGiven, NOT_GIVEN.to_owned())),
            };
            let has_ended = outcome.is_none() && open.is_some_and(|open| !open.contains(flow));
            if outcome.is_none() && !has_ended {
                return true;
            }
            self.agent.connections.rebalances.asked.lock().remove(&asked.app);
            // One that its client has ended meanwhile says nothing of anybody.
            if let Some((outcome, why)) = outcome {
                self.settle(*flow, asked.to, outcome, why, tally);
            }
            false
        });
    }

    fn settle(&mut self, flow: FlowId, to: HostId, outcome: Outcome, why: String, tally: &mut Tally) {
        self.agent.connections.rebalances.note(&self.run.name, outcome);
        let [asked, gone] = tally.entry(to).or_default();
        // What a program does not give says nothing of the host that was to get it.
        *asked += u64::from(outcome != Outcome::NotGiven);
        if outcome == Outcome::Moved {
            *gone += 1;
            self.run.progress.lock().given += 1;
            return;
        }
        tracing::debug!(%flow, %to, why, "a connection stays");
        let tried = self.tried.entry(flow).or_insert_with(|| Tried { times: 0, why: String::new() });
        tried.times += 1;
        tried.why = why;
        // A program that gives nothing is not asked again.
        if outcome == Outcome::NotGiven {
            tried.times = TRIES_MAX;
        }
    }
}

/// What a host makes of the counts.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    /// It gives these.
    Give(Vec<Gift>),
    /// It gives nothing more; why.
    Rest(&'static str),
    /// Somebody has not said what it has.
    Unknown,
}

fn own_part(shares: &[Share], own: HostId) -> Look {
    if is_even(shares) {
        return Look::Rest("the shares are as the weights say");
    }
    let mut gifts = gifts(shares);
    gifts.retain(|gift| gift.from == own);
    if gifts.is_empty() { Look::Rest("this host has no more than its share") } else { Look::Give(gifts) }
}

/// The host of each connection, in the order of the plan.
fn destinations(gifts: &[Gift]) -> impl Iterator<Item = HostId> + '_ {
    gifts.iter().flat_map(|gift| (0..gift.flows).map(|_| gift.to))
}

#[cfg(test)]
mod test {
    use super::*;

    fn shares(flows: &[u64]) -> Vec<Share> {
        (1..).zip(flows).map(|(n, flows)| Share { host: HostId([n; 16]), weight: 100, flows: *flows }).collect()
    }

    #[test]
    fn a_host_gives_its_own_part_and_rests_when_it_has_none() {
        let part = |flows: &[u64], n: u8| own_part(&shares(flows), HostId([n; 16]));
        let gift = |flows| Gift { from: HostId([1; 16]), to: HostId([3; 16]), flows };
        assert_eq!(part(&[150, 150, 0], 1), Look::Give(vec![gift(50)]));
        assert!(matches!(part(&[150, 150, 0], 3), Look::Rest(why) if why.contains("no more")));
        assert!(matches!(part(&[101, 100, 99], 1), Look::Rest(why) if why.contains("weights")));
        assert!(matches!(part(&[150, 150, 0], 9), Look::Rest(_)), "a host that takes no part");
    }

    #[test]
    fn connections_go_in_the_order_of_the_plan() {
        let plan = gifts(&shares(&[6, 0, 0]));
        let to: Vec<u8> = destinations(&plan).map(|host| host.0[0]).collect();
        assert_eq!(to, [2, 2, 3, 3]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_order_holds_while_it_is_given() {
        let name: Name = "web.shop".parse().expect("a name");
        let run = Run::ordered(&name, Order { id: [1; 16], max_per_s: 50 });
        tokio::time::advance(LEASE - Duration::from_secs(1)).await;
        assert!(run.holds());
        run.renew();
        tokio::time::advance(LEASE - Duration::from_secs(1)).await;
        assert!(run.holds());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!run.holds());
        let alone = Run::by_itself(&name);
        alone.renew();
        tokio::time::advance(LEASE * 10).await;
        assert!(alone.holds(), "nobody has to say it again");
        drop(Ending(&alone));
        assert!(alone.is_over());
    }
}
