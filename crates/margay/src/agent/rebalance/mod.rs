//! Connections that go to instances with fewer than their share: by `margay rebalance`, and by themselves where a
//! service says so (docs/decisions/0071). Each host gives away what it has beyond its own share, and nothing else; what
//! the others have, it asks their agents.
//!
//! Reading order: [`plan`] (pure: who gives how many to whom), [`census`] (what each instance has), [`own`] (what could
//! go from here), [`giving`] (one host's part), [`order`] (the operator's), [`auto`] (when it begins by itself).

pub mod auto;
mod census;
mod giving;
pub mod order;
mod own;
mod plan;

use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::sync::Arc;

use margay_control::relocation::proto::{Counted, Stay};
use margay_core::Tuple;
use margay_core::name::{Name, Prefix};
use nix::errno::Errno;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::{AbortHandle, block_in_place};

use self::giving::Run;
use self::own::Own;
use super::Agent;
use super::health::state::Phase;
use super::programs::request::No;
use super::service::Published;

/// Connections that a host gives in a second, at most.
pub const RATES: RangeInclusive<u32> = 1..=1000;
/// The same unless somebody says otherwise.
pub const RATE_DEFAULT: u32 = 50;

/// What an operator wants of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// By which it is known.
    pub id: [u8; 16],
    /// Connections that the host gives in a second, at most; one of [`RATES`].
    pub max_per_s: u32,
}

/// What a host is asked about the connections of a name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// It is to give what it has beyond its share.
    pub order: Option<Order>,
    /// It is to count what it could give.
    pub is_rehearsed: bool,
}

/// What has become of a connection that its program was asked to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// Another host has it.
    Moved,
    /// It could not go, and goes on here.
    Stays,
    /// Nobody has it.
    Lost,
    /// Its program has not given it.
    NotGiven,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Moved, Self::Stays, Self::Lost, Self::NotGiven];

    const fn label(self) -> &'static str {
        match self {
            Self::Moved => "moved",
            Self::Stays => "stays",
            Self::Lost => "lost",
            Self::NotGiven => "not_given",
        }
    }

    fn of(given: &Result<(), No>) -> Self {
        match given {
            Ok(()) => Self::Moved,
            Err((Errno::ECONNABORTED, _)) => Self::Lost,
            Err(_) => Self::Stays,
        }
    }
}

/// How often each outcome was.
type Counts = [u64; Outcome::ALL.len()];

/// A run, and the task that carries it out.
struct Begun {
    run: Arc<Run>,
    task: AbortHandle,
}

/// What the agent knows of its own part.
#[derive(Default)]
pub struct Rebalances {
    /// The last run of each name, over or not.
    runs: Mutex<BTreeMap<Prefix, Begun>>,
    /// Connections that programs are asked to give now, and who waits for what comes of that.
    asked: Mutex<HashMap<Tuple, oneshot::Sender<Result<(), No>>>>,
    /// By the name.
    moves: Mutex<BTreeMap<String, Counts>>,
}

impl Rebalances {
    /// A connection of a program has gone to another host, or has not.
    pub fn hear(&self, app: &Tuple, given: &Result<(), No>) {
        if let Some(waits) = self.asked.lock().remove(app) {
            // Whoever waited has given up.
            let _ = waits.send(given.clone());
        }
    }

    /// How many connections that programs were asked for came to what: name, outcome, and the count.
    pub fn counts(&self) -> Vec<([String; 2], u64)> {
        let moves = self.moves.lock();
        let of_name = |(name, counts): (&String, &Counts)| {
            let rows = Outcome::ALL.map(|of| ([name.clone(), of.label().to_owned()], counts[of as usize]));
            rows.to_vec()
        };
        moves.iter().flat_map(of_name).collect()
    }

    /// Ends what runs: the agent goes down. What is on its way comes to its end.
    pub fn close(&self) {
        self.runs.lock().values().for_each(|begun| begun.task.abort());
    }

    fn note(&self, name: &Name, outcome: Outcome) {
        self.moves.lock().entry(name.written().to_owned()).or_default()[outcome as usize] += 1;
    }

    /// The last run of a name, over or not.
    fn run(&self, prefix: &Prefix) -> Option<Arc<Run>> {
        self.runs.lock().get(prefix).map(|begun| Arc::clone(&begun.run))
    }

    /// Carries an order out. One that runs goes on for longer, whoever has given it, and one that is over stays over.
    fn carry_out(&self, agent: &Arc<Agent>, name: &Name, order: Order, by: &str) {
        let mut runs = self.runs.lock();
        if let Some(Begun { run, .. }) = runs.get(&name.prefix()) {
            if !run.is_over() {
                return run.renew();
            }
            if run.order == Some(order.id) {
                return;
            }
        }
        runs.insert(name.prefix(), begin(agent, Run::ordered(name, order), by));
    }

    /// Begins by itself, unless something runs.
    fn begin(&self, agent: &Arc<Agent>, name: &Name) {
        let mut runs = self.runs.lock();
        if runs.get(&name.prefix()).is_none_or(|begun| begun.run.is_over()) {
            runs.insert(name.prefix(), begin(agent, Run::by_itself(name), "itself"));
        }
    }
}

fn begin(agent: &Arc<Agent>, run: Run, by: &str) -> Begun {
    let run = Arc::new(run);
    let task = tokio::spawn(giving::carry_out(Arc::clone(agent), Arc::clone(&run), by.to_owned()));
    Begun { run, task: task.abort_handle() }
}

/// The counts of no agent.
pub fn no_counts() -> Vec<([String; 2], u64)> {
    Outcome::ALL.into_iter().map(|outcome| ([String::new(), outcome.label().to_owned()], 0)).collect()
}

/// Why connections of a name do not move, whatever the counts.
fn obstacle(service: &Published) -> Option<&'static str> {
    if service.terms.partition_bits > 0 {
        return Some("connections to partitions stay with the host that holds the partition");
    }
    service.terms.exclusive.then_some("one host alone serves the name")
}

/// Answers a question of another host, or of this one, and does what it orders; `by`: who asks, for people.
///
/// # Errors
///
/// The name is not served here, or has no shares; as a sentence.
pub async fn answer(agent: &Arc<Agent>, prefix: &Prefix, question: &Question, by: &str) -> Result<Counted, String> {
    let found = agent.publishing.services.list().into_iter().find(|service| service.name.prefix() == *prefix);
    let service = found.filter(|service| service.is_served).ok_or("it does not serve the name")?;
    if let Some(why) = obstacle(&service) {
        return Err(why.to_owned());
    }
    let rebalances = &agent.connections.rebalances;
    if let Some(order) = question.order.filter(|_| !service.is_drained) {
        rebalances.carry_out(agent, &service.name, order, by);
    }
    let run = rebalances.run(prefix);
    let progress = run.as_ref().map(|run| run.progress()).unwrap_or_default();
    let health = agent.publishing.health.report(prefix);
    let mut counted = Counted {
        weight: service.terms.weight,
        growing: health.is_some_and(|health| health.phase == Phase::Growing),
        given: progress.given,
        movable: progress.movable,
        giving: run.is_some_and(|run| !run.is_over()),
        drained: service.is_drained,
        ..Counted::default()
    };
    block_in_place(|| {
        let own = Own::look(agent, prefix);
        counted.flows = own.count();
        let mut stays = progress.stays;
        if question.is_rehearsed {
            let sorted = own.sort(agent, &HashMap::new());
            counted.movable = sorted.movable.len() as u64;
            stays = sorted.stays;
        }
        counted.stays = stays.into_iter().map(|(why, flows)| Stay { flows, why }).collect();
    });
    Ok(counted)
}

#[cfg(test)]
mod test {
    use super::*;

    fn app(port: u16) -> Tuple {
        Tuple { protocol: 6, source: ([10, 1, 0, 1], 80).into(), destination: ([10, 1, 0, 2], port).into() }
    }

    #[test]
    fn whoever_waits_hears_of_its_own_connection_and_each_outcome_is_counted() {
        let rebalances = Rebalances::default();
        let (waits, mut heard) = oneshot::channel();
        rebalances.asked.lock().insert(app(1), waits);
        rebalances.hear(&app(2), &Ok(()));
        assert!(heard.try_recv().is_err(), "of another one");
        let refused = Err((Errno::EOPNOTSUPP, "MPTCP".to_owned()));
        rebalances.hear(&app(1), &refused);
        assert_eq!(heard.try_recv(), Ok(refused.clone()));
        let lost = Err((Errno::ECONNABORTED, String::new()));
        assert_eq!([Outcome::of(&Ok(())), Outcome::of(&refused), Outcome::of(&lost)], Outcome::ALL[..3]);
        let name: Name = "web.shop".parse().expect("a name");
        rebalances.note(&name, Outcome::Moved);
        rebalances.note(&name, Outcome::Moved);
        rebalances.note(&name, Outcome::NotGiven);
        let counts: Vec<u64> = rebalances.counts().into_iter().map(|(_, count)| count).collect();
        assert_eq!((counts, no_counts().len()), (vec![2, 0, 0, 1], Outcome::ALL.len()));
    }
}
