//! Health of what this host serves, as the operator wants it checked: a service whose checks fail is sick, and takes no
//! new flows until they succeed again (decision 0067).
//!
//! Reading order: [`spec`] (what is checked), [`state`] (when a service is sick), [`probe`] and [`command`] (one
//! check), [`pressure`] (load by the kernel's word), [`reports`] (load by the program's own word), [`processes`] (who
//! serves a name), [`watched`] (one service), this file (which services are checked), [`kept`].

pub mod command;
mod kept;
pub mod pressure;
pub mod probe;
pub mod processes;
pub mod reports;
pub mod spec;
pub mod state;
pub mod watched;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use margay_control::StateDir;
use margay_core::name::{Name, Prefix};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use self::probe::Failure;
use self::reports::{Reporter, Reports};
use self::watched::{Report, Watched};
use super::Agent;
use super::service::checks::Checks;
use super::service::fitness::{Fitness, Sick};
use crate::config::Config;

/// Names whose checks are not known, or others than before, with what the ones before have found.
type WasSick = BTreeMap<Prefix, (Name, Option<Sick>)>;

/// Checks since the agent started, by what they have brought.
#[derive(Default)]
struct Counts {
    succeeded: AtomicU64,
    failed: AtomicU64,
    timed_out: AtomicU64,
}

impl Counts {
    fn note(&self, result: &Result<(), Failure>) {
        let count = match result {
            Ok(()) => &self.succeeded,
            Err(Failure::Failed(_)) => &self.failed,
            Err(Failure::TimedOut(_)) => &self.timed_out,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// A service with checks, or of which programs report the load. Its task runs while the service is served.
struct Running {
    watched: Arc<Watched>,
    task: Option<JoinHandle<()>>,
}

impl Running {
    fn follow(&mut self, agent: &Arc<Agent>, is_served: bool) {
        match &self.task {
            None if is_served => {
                self.task = Some(tokio::spawn(watched::run(Arc::clone(agent), Arc::clone(&self.watched))));
            }
            Some(task) if !is_served => {
                task.abort();
                self.task = None;
            }
            _ => {}
        }
    }
}

/// Health of all services of this host that have checks.
pub struct Health {
    dir: StateDir,
    all: Mutex<BTreeMap<Prefix, Running>>,
    /// Locked after `all`.
    reports: Mutex<Reports>,
    /// Names that the start before has found sick, until their checks are known.
    restored: Mutex<WasSick>,
    again: Notify,
    counts: Counts,
}

impl Health {
    /// What the start before has found.
    pub fn restored(&self) -> BTreeMap<Prefix, Fitness> {
        let restored = self.restored.lock();
        let fitness = |sick: &Option<Sick>| Fitness { sick: sick.clone(), ..Fitness::default() };
        restored.iter().map(|(prefix, (_, sick))| (*prefix, fitness(sick))).collect()
    }

    /// The configuration has changed.
    pub fn reconsider(&self) {
        self.again.notify_one();
    }

    /// A program that is going to report its load; [`forget`](Self::forget) ends it.
    pub fn reporter(&self) -> Reporter {
        self.reports.lock().add()
    }

    /// A program says how much of the weight of a name is to stay, in percent. False: it reports of too many names.
    pub fn report_load(&self, reporter: Reporter, name: &Name, percent: u32) -> bool {
        let is_noted = self.reports.lock().note(reporter, name, percent);
        if is_noted {
            self.hear(&name.prefix());
        }
        is_noted
    }

    /// A program is gone: what it has said holds no longer.
    pub fn forget(&self, reporter: Reporter) {
        let names = self.reports.lock().forget(reporter);
        names.iter().for_each(|prefix| self.hear(prefix));
    }

    /// What programs say of a name has changed.
    fn hear(&self, prefix: &Prefix) {
        let all = self.all.lock();
        let reported = self.reports.lock().percent(prefix);
        if let Some(running) = all.get(prefix) {
            running.watched.hear(reported);
        }
        // With its first report a name comes to be followed, with the last one it may cease to be.
        if reported.is_none() || !all.contains_key(prefix) {
            self.reconsider();
        }
    }

    /// How it stands with a service; `None` where it has no checks, and no program reports its load.
    pub fn report(&self, prefix: &Prefix) -> Option<Report> {
        self.all.lock().get(prefix).map(|running| running.watched.report())
    }

    /// Services that have a health check, and whether they are well.
    pub fn all(&self) -> Vec<(String, bool)> {
        let all = self.all.lock();
        let watched = all.values().map(|running| &running.watched).filter(|watched| watched.checks.health.is_some());
        watched.map(|watched| (watched.name.written().to_owned(), watched.sick().is_none())).collect()
    }

    /// How many checks there were, by what they have brought.
    pub fn counts(&self) -> [(&'static str, u64); 3] {
        let Counts { succeeded, failed, timed_out } = &self.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        [("succeeded", of(succeeded)), ("failed", of(failed)), ("timed_out", of(timed_out))]
    }

    /// Sentences for operators who look at the host.
    pub fn warnings(&self) -> Vec<String> {
        let all = self.all.lock();
        let sentence = |running: &Running| {
            let sick = running.watched.sick()?;
            Some(format!("{} is sick and takes no new flows: {}", running.watched.name, sick.reason))
        };
        all.values().filter_map(sentence).collect()
    }

    /// Ends all checks. Returns when nothing of them runs.
    pub async fn end(&self) {
        let tasks: Vec<JoinHandle<()>> =
            self.all.lock().values_mut().filter_map(|running| running.task.take()).collect();
        tasks.iter().for_each(JoinHandle::abort);
        for task in tasks {
            // It was told to end.
            let _ = task.await;
        }
    }
}

/// Follows what is published and what the configuration says, until it is aborted.
pub async fn run(agent: Arc<Agent>) {
    let mut changes = agent.publishing.services.changes();
    loop {
        follow(&agent).await;
        tokio::select! {
            changed = changes.changed() => if changed.is_err() { return },
            () = agent.publishing.health.again.notified() => {}
        }
    }
}

/// Starts and ends checks. A service that has none any more is well.
async fn follow(agent: &Arc<Agent>) {
    let ended = replace(agent, &wanted(agent));
    if ended.is_empty() {
        return;
    }
    for name in &ended {
        agent.publishing.services.set_fitness(name, Fitness::default()).await;
    }
    tokio::task::block_in_place(|| agent.publishing.health.keep());
}

/// All names that have checks, by the configuration or else by order, and those of which programs report the load.
fn wanted(agent: &Agent) -> BTreeMap<Prefix, (Name, Checks)> {
    let reports = agent.publishing.health.reports.lock();
    let mut wanted: BTreeMap<Prefix, (Name, Checks)> =
        reports.names().map(|(prefix, name)| (prefix, (name.clone(), Checks::default()))).collect();
    drop(reports);
    wanted.extend(agent.publishing.services.ordered_checks());
    wanted.extend(configured(&agent.config()));
    wanted
}

/// What the sections of a name say together: those that say something agree.
fn configured(config: &Config) -> BTreeMap<Prefix, (Name, Checks)> {
    let mut all: BTreeMap<Prefix, (Name, Checks)> = BTreeMap::new();
    for section in config.service.iter().map(toml::Spanned::get_ref) {
        if section.health.is_none() && section.load.is_none() {
            continue;
        }
        let name = &section.name.0;
        let (_, checks) = all.entry(name.prefix()).or_insert_with(|| (name.clone(), Checks::default()));
        checks.health = checks.health.take().or_else(|| section.health.clone());
        checks.load = checks.load.take().or_else(|| section.load.clone());
    }
    all
}

/// Makes the tasks follow from what is wanted; gives the names that have no checks any more.
fn replace(agent: &Arc<Agent>, wanted: &BTreeMap<Prefix, (Name, Checks)>) -> Vec<Name> {
    let published = agent.publishing.services.list().into_iter().filter(|service| service.is_served);
    let served: BTreeSet<Prefix> = published.map(|service| service.name.prefix()).collect();
    let mut all = agent.publishing.health.all.lock();
    let mut were_sick = std::mem::take(&mut *agent.publishing.health.restored.lock());
    let is_other = |(prefix, running): &(&Prefix, &Running)| {
        wanted.get(*prefix).is_none_or(|(_, checks)| *checks != running.watched.checks)
    };
    let others: Vec<Prefix> = all.iter().filter(is_other).map(|(prefix, _)| *prefix).collect();
    for prefix in others {
        let Some(mut running) = all.remove(&prefix) else { continue };
        running.follow(agent, false);
        were_sick.insert(prefix, (running.watched.name.clone(), running.watched.sick()));
    }
    for (prefix, (name, checks)) in wanted {
        let was_sick = were_sick.remove(prefix).and_then(|(_, sick)| sick);
        let start = || {
            let watched = Watched::new(name, checks, was_sick);
            watched.hear(agent.publishing.health.reports.lock().percent(prefix));
            Running { watched: Arc::new(watched), task: None }
        };
        all.entry(*prefix).or_insert_with(start).follow(agent, served.contains(prefix));
    }
    were_sick.into_values().map(|(name, _)| name).collect()
}

#[cfg(test)]
mod test {
    use std::path::Path;

    use super::*;

    #[test]
    fn sections_of_a_name_have_their_checks_together() {
        let text = "[[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:80\"\nhealth = { http = \"/\" }\n\
            [[service]]\nname = \"web.shop\"\nlisten = \"0.0.0.0:443\"\nload = { command = [\"/load\"] }\n\
            [[service]]\nname = \"db.shop\"\nlisten = \"0.0.0.0:5432\"\n";
        let found = configured(&Config::parse(text, Path::new("margay.toml")).expect("read"));
        let all: Vec<_> = found.values().map(|(name, checks)| (name.to_string(), checks)).collect();
        let [(name, checks)] = &all[..] else { panic!("one name has checks: {all:?}") };
        assert_eq!((name.as_str(), checks.health.is_some(), checks.load.is_some()), ("web.shop", true, true));
    }
}
