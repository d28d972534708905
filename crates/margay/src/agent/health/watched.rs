//! One service that is checked: its checks, again and again, and what follows from them.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use margay_core::name::Name;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Interval, MissedTickBehavior, interval, sleep};

use super::probe::{self, Failure};
use super::state::{Machine, Phase};
use super::{Agent, command, pressure};
use crate::agent::service::checks::Checks;
use crate::agent::service::fitness::{Fitness, Sick};

/// From one change of a weight by reports of programs to the next: each is told to routers, and by them to clients.
const REPORTS_PAUSE: Duration = Duration::from_secs(1);

/// How it stands with a service, for lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What is done to find out whether it is well; empty where only its load is asked for.
    pub check: String,
    /// Whether it is well.
    pub phase: Phase,
    /// Why the last check has failed; empty when it has succeeded.
    pub last_failure: String,
    /// What its load leaves of its weight in percent; `None` where nobody asks for it, and no program reports it.
    pub load_percent: Option<u32>,
    /// What its programs say of it themselves; `None`: nothing.
    pub reported_percent: Option<u32>,
    /// Why its load is not known; empty when it is.
    pub load_failure: String,
}

/// A service with its checks.
pub struct Watched {
    /// Its name.
    pub name: Name,
    /// What is done.
    pub checks: Checks,
    standing: Mutex<Standing>,
    /// What the service table was told last. Locked while it is told, so that an older word never comes later.
    told: tokio::sync::Mutex<Option<Fitness>>,
    /// Programs report another load.
    reported: Notify,
}

/// What is known of it.
struct Standing {
    /// `None`: its health is not checked.
    machine: Option<Machine>,
    sick: Option<Sick>,
    last_failure: String,
    load_percent: u32,
    load_failure: String,
    /// What programs report; `None`: nothing.
    reported_percent: Option<u32>,
}

impl Standing {
    fn phase(&self) -> Phase {
        self.machine.as_ref().map_or(Phase::Well, Machine::phase)
    }

    /// What is left by the load: what is asked for it and what programs report both hold.
    fn left_percent(&self) -> u32 {
        self.load_percent.min(self.reported_percent.unwrap_or(100))
    }

    /// `now` is the time since the agent started.
    fn fitness(&self, now: Duration) -> Fitness {
        let grown = self.machine.as_ref().map_or(100, |machine| machine.percent(now));
        Fitness { sick: self.sick.clone(), percent: (grown * self.left_percent()).div_ceil(100) }
    }

    /// Takes the result of a check. Gives whether the service has become sick or is so no longer.
    fn observe(&mut self, result: &Result<(), Failure>, now: Duration, unix_s: u64) -> bool {
        let Some(machine) = &mut self.machine else { return false };
        machine.observe(result.is_ok(), now);
        let is_sick = machine.phase() == Phase::Sick;
        self.last_failure = result.as_ref().err().map(Failure::line).unwrap_or_default();
        let was_sick = self.sick.is_some();
        let reason = self.last_failure.clone();
        if !is_sick {
            self.sick = None;
        } else if let Some(sick) = &mut self.sick {
            // Until enough checks succeed, the last that has failed says why.
            if !reason.is_empty() {
                sick.reason = reason;
            }
        } else {
            self.sick = Some(Sick { since_unix_s: unix_s, reason });
        }
        was_sick != is_sick
    }
}

impl Watched {
    /// Nothing is known of it but that it was sick before.
    pub fn new(name: &Name, checks: &Checks, was_sick: Option<Sick>) -> Self {
        let sick = was_sick.filter(|_| checks.health.is_some());
        let machine = checks.health.as_ref().map(|health| Machine::new(health.bounds(), sick.is_some()));
        let standing = Standing {
            machine,
            sick,
            last_failure: String::new(),
            load_percent: 100,
            load_failure: String::new(),
            reported_percent: None,
        };
        Self {
            name: name.clone(),
            checks: checks.clone(),
            standing: Mutex::new(standing),
            told: tokio::sync::Mutex::default(),
            reported: Notify::new(),
        }
    }

    /// Takes what programs report of its load, in percent of its weight; `None`: nothing any more.
    pub fn hear(&self, percent: Option<u32>) {
        self.standing.lock().reported_percent = percent;
        self.reported.notify_one();
    }

    /// Why it takes no new flows.
    pub fn sick(&self) -> Option<Sick> {
        self.standing.lock().sick.clone()
    }

    /// How it stands.
    pub fn report(&self) -> Report {
        let standing = self.standing.lock();
        Report {
            check: self.checks.health.as_ref().map(ToString::to_string).unwrap_or_default(),
            phase: standing.phase(),
            last_failure: standing.last_failure.clone(),
            load_percent: self
                .checks
                .load
                .as_ref()
                .map_or(standing.reported_percent, |_| Some(standing.left_percent())),
            reported_percent: standing.reported_percent,
            load_failure: standing.load_failure.clone(),
        }
    }

    /// Has its weight follow from what is known of it.
    async fn tell(&self, agent: &Agent) {
        let mut told = self.told.lock().await;
        let fitness = self.standing.lock().fitness(agent.process.started.elapsed());
        if told.as_ref() == Some(&fitness) {
            return;
        }
        agent.publishing.services.set_fitness(&self.name, fitness.clone()).await;
        *told = Some(fitness);
    }

    fn observe(&self, agent: &Agent, result: &Result<(), Failure>) {
        let changed = self.standing.lock().observe(result, agent.process.started.elapsed(), agent.host.clock.unix_s());
        if !changed {
            return;
        }
        let name = &self.name;
        match result {
            Ok(()) => tracing::info!(%name, "is well again, and takes new flows"),
            Err(failure) => tracing::warn!(%name, reason = failure.line(), "is sick, and takes no new flows"),
        }
        tokio::task::block_in_place(|| agent.publishing.health.keep());
    }

    /// Returns when its weight is to grow.
    async fn next_step(&self, agent: &Agent) {
        let now = agent.process.started.elapsed();
        let at = self.standing.lock().machine.as_ref().and_then(|machine| machine.next_step(now));
        match at {
            Some(at) => sleep(at.saturating_sub(now)).await,
            None => pending().await,
        }
    }

    fn grow(&self, agent: &Agent) {
        if let Some(machine) = &mut self.standing.lock().machine {
            machine.grow(agent.process.started.elapsed());
        }
    }

    fn note_load(&self, answer: Result<u32, Failure>) {
        let mut standing = self.standing.lock();
        let before = std::mem::take(&mut standing.load_failure);
        match answer {
            Ok(percent) => standing.load_percent = percent,
            Err(failure) => {
                standing.load_failure = failure.line();
                if before.is_empty() {
                    let name = &self.name;
                    tracing::warn!(%name, reason = standing.load_failure, "its load is not known; the last one holds");
                }
            }
        }
    }
}

/// Checks a service until it is aborted.
pub(super) async fn run(agent: Arc<Agent>, watched: Arc<Watched>) {
    watched.tell(&agent).await;
    tokio::join!(check_again(&agent, &watched), ask_again(&agent, &watched), hear_again(&agent, &watched));
}

/// Follows what programs report, the last of it: reports that come faster are taken together.
async fn hear_again(agent: &Agent, watched: &Watched) {
    loop {
        watched.reported.notified().await;
        watched.tell(agent).await;
        sleep(REPORTS_PAUSE).await;
    }
}

async fn check_again(agent: &Agent, watched: &Watched) {
    let Some(health) = &watched.checks.health else { return };
    let mut rounds = rounds(health.interval);
    loop {
        tokio::select! {
            _ = rounds.tick() => {
                let listeners = agent.publishing.services.connectable(&watched.name);
                let result = probe::check(health.probe(), &listeners, health.timeout).await;
                agent.publishing.health.counts.note(&result);
                watched.observe(agent, &result);
            }
            () = watched.next_step(agent) => watched.grow(agent),
        }
        watched.tell(agent).await;
    }
}

async fn ask_again(agent: &Agent, watched: &Watched) {
    let Some(load) = &watched.checks.load else { return };
    let mut rounds = rounds(load.interval);
    loop {
        rounds.tick().await;
        let answer = if load.cpu {
            tokio::task::block_in_place(|| pressure::percent_left(agent, &watched.name))
        } else {
            command::run(&load.command, load.limit()).await.and_then(|text| percent(&text))
        };
        watched.note_load(answer);
        watched.tell(agent).await;
    }
}

fn rounds(time: Duration) -> Interval {
    let mut rounds = interval(time);
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    rounds
}

/// What a program of load has printed.
fn percent(text: &str) -> Result<u32, Failure> {
    let word = text.trim();
    let percent = word.parse().ok().filter(|percent| *percent <= 100);
    percent.ok_or_else(|| Failure::failed(format!("it printed `{word}`, which is no number from 0 to 100")))
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::agent::health::spec::{HealthSection, LoadSection};

    fn watched(was_sick: bool) -> Watched {
        let health: HealthSection = toml::from_str("connect = true\nslow_start = \"10s\"").expect("read");
        let load: LoadSection = toml::from_str("command = [\"/load\"]").expect("read");
        let checks = Checks { health: Some(health), load: Some(load) };
        let sick = was_sick.then(|| Sick { since_unix_s: 7, reason: "it was refused".to_owned() });
        Watched::new(&"web.shop".parse().expect("a name"), &checks, sick)
    }

    #[test]
    fn a_service_is_sick_with_its_last_failure_and_since_its_first() {
        let watched = watched(false);
        let mut standing = watched.standing.lock();
        let s = Duration::from_secs;
        let failure = |text: &str| Err(Failure::failed(text));
        assert!(!standing.observe(&failure("one"), s(1), 101));
        assert!(!standing.observe(&failure("two"), s(2), 102));
        assert_eq!(standing.fitness(s(2)), Fitness::default());
        assert!(standing.observe(&failure("three"), s(3), 103));
        assert!(!standing.observe(&failure("four"), s(4), 104));
        let sick = Sick { since_unix_s: 103, reason: "four".to_owned() };
        assert_eq!(standing.fitness(s(4)), Fitness { sick: Some(sick.clone()), percent: 0 });
        assert!(!standing.observe(&Ok(()), s(5), 105));
        assert_eq!((standing.sick.clone(), standing.last_failure.as_str()), (Some(sick), ""));
        assert!(standing.observe(&Ok(()), s(6), 106));
        assert_eq!(standing.fitness(s(6)), Fitness { sick: None, percent: 10 });
    }

    #[test]
    fn what_was_sick_before_the_agent_started_is_so_still() {
        let watched = watched(true);
        assert_eq!(watched.sick().map(|sick| sick.since_unix_s), Some(7));
        let mut standing = watched.standing.lock();
        assert!(!standing.observe(&Ok(()), Duration::from_secs(1), 101));
        assert!(standing.observe(&Ok(()), Duration::from_secs(2), 102));
        assert_eq!(standing.sick, None);
    }

    #[test]
    fn load_takes_its_part_of_what_has_grown() {
        let watched = watched(false);
        watched.note_load(percent("40\n"));
        assert_eq!(watched.standing.lock().fitness(Duration::ZERO).percent, 40);
        for text in ["", "101", "-1", "40%", "4 5"] {
            watched.note_load(percent(text));
            let report = watched.report();
            assert_eq!(report.load_percent, Some(40), "the last one holds");
            assert!(report.load_failure.contains(&format!("`{text}`")), "{}", report.load_failure);
        }
        watched.note_load(percent("0"));
        assert_eq!(watched.standing.lock().fitness(Duration::ZERO).percent, 0);
        assert_eq!(watched.report().load_failure, "");
    }

    #[test]
    fn what_a_program_reports_holds_beside_what_is_asked() {
        let percents = |watched: &Watched| {
            let report = watched.report();
            (report.load_percent, report.reported_percent, watched.standing.lock().fitness(Duration::ZERO).percent)
        };
        let asked = watched(false);
        asked.note_load(percent("40"));
        asked.hear(Some(70));
        assert_eq!(percents(&asked), (Some(40), Some(70), 40), "the smaller of the two");
        asked.hear(Some(0));
        assert_eq!(percents(&asked), (Some(0), Some(0), 0));
        asked.hear(None);
        assert_eq!(percents(&asked), (Some(40), None, 40));
        let alone = Watched::new(&asked.name, &Checks::default(), None);
        assert_eq!(percents(&alone), (None, None, 100));
        alone.hear(Some(30));
        assert_eq!(percents(&alone), (Some(30), Some(30), 30));
        assert_eq!(alone.report().check, "");
    }
}
