//! The operator's order: this host hands it on to all instances of the name, renews it each second, and reports what
//! their agents say. It ends with whoever follows the reports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use margay_control::api::v1::{RebalanceHost, RebalanceReport, RebalanceStay};
use margay_control::entropy;
use margay_core::key::HostId;
use margay_core::name::Name;
use tokio::sync::watch;
use tokio::time::sleep;

use super::census::{self, Seen};
use super::plan::{gifts, targets};
use super::{Order, Question, obstacle};
use crate::agent::Agent;

/// From one question to the next.
const PAUSE: Duration = Duration::from_secs(1);
/// So often in a row nobody gives any more before it is over: an answer may have been late.
const RESTS_MAX: u32 = 2;

/// Why nothing is begun.
#[derive(Debug, thiserror::Error)]
pub enum RebalanceError {
    /// Nothing of it is here.
    #[error("{0} is not served by this host; run this on a host that serves it (`margay service show {0}`)")]
    Unknown(Name),
    /// Its connections stay where they are.
    #[error("connections of {0} do not move: {1}")]
    Obstacle(Name, &'static str),
    /// Nobody can say who serves it.
    #[error("which hosts serve {0} is not known: {1}")]
    Unasked(Name, String),
    /// There is nobody to share with.
    #[error("no other host that serves {0} can be asked: {1}")]
    Alone(Name, String),
    /// The system gave no randomness.
    #[error(transparent)]
    Entropy(#[from] entropy::NoEntropy),
}

/// What is reported, and remembered for that.
struct Reporting {
    name: Name,
    /// What each host had at first.
    before: BTreeMap<HostId, u64>,
}

impl Reporting {
    fn report(&mut self, phase: &str, seen: &[Seen]) -> RebalanceReport {
        let shares = census::shares(seen);
        let targets: BTreeMap<HostId, u64> = shares.iter().map(|share| share.host).zip(targets(&shares)).collect();
        let hosts = seen.iter().map(|one| self.host(one, &targets)).collect();
        RebalanceReport { name: self.name.written().to_owned(), phase: phase.to_owned(), hosts }
    }

    fn host(&mut self, one: &Seen, targets: &BTreeMap<HostId, u64>) -> RebalanceHost {
        let host = one.instance.host;
        let counted = one.counted.clone().unwrap_or_default();
        let before = if one.counted.is_ok() { *self.before.entry(host).or_insert(counted.flows) } else { 0 };
        let stays = counted.stays.into_iter().map(|stay| RebalanceStay { flows: stay.flows, why: line(&stay.why) });
        RebalanceHost {
            host_id: host.to_string(),
            host_name: one.instance.host_name.clone(),
            weight: one.instance.weight,
            before,
            flows: counted.flows,
            share: targets.get(&host).copied().unwrap_or_default(),
            given: counted.given,
            stays: stays.collect(),
            giving: counted.giving,
            why_not: line(&one.why_not()),
        }
    }
}

/// Words of another host, for a terminal.
fn line(text: &str) -> String {
    text.chars().filter(|char| !char.is_control()).take(LINE_MAX).collect()
}

const LINE_MAX: usize = 200;

/// Lets all instances give what they have beyond their share, as long as somebody holds the reports.
///
/// # Errors
///
/// What is wrong; nothing has begun then.
pub async fn begin(
    agent: &Arc<Agent>,
    name: Name,
    max_per_s: u32,
) -> Result<watch::Receiver<RebalanceReport>, RebalanceError> {
    // First without an order: what is wrong is found out before anything moves.
    let seen = checked(agent, &name, Question::default()).await?;
    let seed = entropy::seed()?;
    let order = Order { id: std::array::from_fn(|at| seed[at]), max_per_s };
    let mut reporting = Reporting { name, before: BTreeMap::new() };
    let report = watch::Sender::new(reporting.report("moving", &seen));
    let mut receiver = report.subscribe();
    receiver.mark_changed();
    tokio::spawn(follow(Arc::clone(agent), order, reporting, report));
    Ok(receiver)
}

/// What would be given, as all instances say.
///
/// # Errors
///
/// Why it would be refused.
pub async fn rehearse(agent: &Arc<Agent>, name: Name) -> Result<RebalanceReport, RebalanceError> {
    let seen = checked(agent, &name, Question { is_rehearsed: true, ..Question::default() }).await?;
    let plan = gifts(&census::shares(&seen));
    let mut report = Reporting { name, before: BTreeMap::new() }.report("dry-run", &seen);
    for (host, one) in report.hosts.iter_mut().zip(&seen) {
        let wanted = plan.iter().filter(|gift| gift.from == one.instance.host).map(|gift| gift.flows).sum();
        let movable = one.counted.as_ref().map_or(0, |counted| counted.movable);
        host.given = movable.min(wanted);
    }
    Ok(report)
}

async fn checked(agent: &Arc<Agent>, name: &Name, question: Question) -> Result<Vec<Seen>, RebalanceError> {
    let service = agent.publishing.services.find(name).filter(|service| service.is_served);
    let service = service.ok_or_else(|| RebalanceError::Unknown(name.clone()))?;
    if let Some(why) = obstacle(&service) {
        return Err(RebalanceError::Obstacle(name.clone(), why));
    }
    let seen = census::take(agent, name, |_, _| question).await;
    let seen = seen.map_err(|why| RebalanceError::Unasked(name.clone(), why))?;
    let own = agent.host.identity.host_id();
    let is_other = |one: &&Seen| one.instance.host != own;
    if !seen.iter().filter(is_other).any(|one| one.share().is_some()) {
        let reasons: BTreeSet<String> =
            seen.iter().filter(is_other).map(|one| format!("{}: {}", one.instance.host_name, one.why_not())).collect();
        let none = || "there is none".to_owned();
        let why = reasons.into_iter().reduce(|all, one| format!("{all}; {one}")).unwrap_or_else(none);
        return Err(RebalanceError::Alone(name.clone(), line(&why)));
    }
    Ok(seen)
}

async fn follow(agent: Arc<Agent>, order: Order, mut reporting: Reporting, report: watch::Sender<RebalanceReport>) {
    // Those whose part is over are asked, and ordered no more.
    let mut over: BTreeSet<HostId> = BTreeSet::new();
    let mut rests = 0;
    let name = reporting.name.clone();
    while rests < RESTS_MAX && !report.is_closed() {
        let question = |host: HostId, takes_part: bool| {
            let is_ordered = takes_part && !over.contains(&host);
            Question { order: is_ordered.then_some(order), is_rehearsed: false }
        };
        match census::take(&agent, &name, question).await {
            Ok(seen) => {
                let gives = |one: &Seen| one.counted.as_ref().is_ok_and(|counted| counted.giving);
                rests = if seen.iter().any(gives) { 0 } else { rests + 1 };
                let has_rest = |one: &&Seen| one.counted.is_ok() && !gives(one);
                over.extend(seen.iter().filter(has_rest).map(|one| one.instance.host));
                report.send_replace(reporting.report("moving", &seen));
            }
            Err(why) => {
                tracing::debug!(%name, why, "what instances have is not known just now");
                rests += 1;
            }
        }
        sleep(PAUSE).await;
    }
    report.send_modify(|report| report.phase = "over".to_owned());
}

#[cfg(test)]
mod test {
    use std::net::SocketAddr;

    use margay_control::registration::Instance;
    use margay_control::relocation::proto::{Counted, Stay};

    use super::*;

    fn seen(n: u8, flows: u64) -> Seen {
        let instance = Instance {
            host: HostId([n; 16]),
            host_name: format!("host{n}"),
            address: SocketAddr::from(([10, 0, 0, n], 54324)),
            name: "web.shop".to_owned(),
            prefix: "sid:ab/8".parse().expect("literal"),
            weight: 100,
            priority: 1,
            sticky: false,
            fence: None,
            zero_weight: None,
        };
        let stays = vec![Stay { flows: 3, why: "\u{1b}[2Jno giver".to_owned() }];
        Seen { instance, takes_part: true, counted: Ok(Counted { flows, stays, ..Counted::default() }) }
    }

    #[test]
    fn a_report_remembers_what_there_was_and_says_what_there_should_be() {
        let name: Name = "web.shop".parse().expect("a name");
        let mut reporting = Reporting { name, before: BTreeMap::new() };
        reporting.report("moving", &[seen(1, 20), seen(2, 0)]);
        let away = Seen { counted: Err("it is away".to_owned()), ..seen(3, 0) };
        let report = reporting.report("moving", &[seen(1, 12), seen(2, 8), away]);
        let counts: Vec<[u64; 3]> = report.hosts.iter().map(|host| [host.before, host.flows, host.share]).collect();
        assert_eq!(counts, [[20, 12, 10], [0, 8, 10], [0, 0, 0]]);
        assert_eq!(
            (report.hosts[0].stays[0].why.as_str(), report.hosts[2].why_not.as_str()),
            ("[2Jno giver", "it is away")
        );
    }
}
