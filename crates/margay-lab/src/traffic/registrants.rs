//! Many hosts that register with one router, all in this program: what their agents would say, without agents. Some of
//! them watch names, and note when they hear that somebody came or went.

use std::collections::{BTreeSet, HashMap};
use std::io::BufRead;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use futures_util::stream::{self as streams, StreamExt, TryStreamExt};
use margay_control::entropy;
use margay_control::registration::proto::{self, from_host, from_router};
use margay_control::registration::stream::{self, Reader, Writer};
use margay_control::token::JoinToken;
use margay_core::key::{HostId, HostSecret};
use margay_core::name::{Name, Prefix};
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::request::{hello, registration};
use crate::host::write_line;

/// A name that nobody has heard of after this long is not heard of.
const PATIENCE: Duration = Duration::from_secs(60);
/// Hosts that register at once, and names that one of them has asked for and not been answered.
const HOSTS_AT_ONCE: usize = 128;
const ASKED_AT_ONCE: usize = 32;
/// A router hears no more strangers of one address at once than twice as many.
static DOOR: Semaphore = Semaphore::const_new(16);
/// In so many steps the hosts come, with a pause after each.
const STEPS: usize = 4;
/// Who comes and goes stays away for so many others' turns.
const AWAY: usize = 500;
const TICK: Duration = Duration::from_millis(10);

/// How many, and what they do.
#[derive(Args, Debug)]
pub struct Plan {
    /// A token that is good for all of them
    #[arg(long)]
    pub token: JoinToken,
    /// How many register
    #[arg(long)]
    pub hosts: usize,
    /// Names that each of them alone serves
    #[arg(long)]
    pub own: usize,
    /// Services that each of them serves with others; there are as many services as hosts
    #[arg(long)]
    pub shared: usize,
    /// Registrations and withdrawals per second
    #[arg(long)]
    pub churn_per_s: usize,
    /// For how long
    #[arg(long)]
    pub churn_s: usize,
    /// Hosts that only watch, and how many of the services each does
    #[arg(long)]
    pub watchers: usize,
    /// See there
    #[arg(long)]
    pub watched: usize,
}

/// Printed after each step; a line of input is expected then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Names registered so far, of all hosts.
    pub registered: u64,
    /// Hosts so far.
    pub hosts: u64,
    /// What this step took.
    pub ms: f64,
}

/// Printed in the end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Churned {
    /// Registrations and withdrawals that were answered.
    pub done: u64,
    /// Those that were refused.
    pub failed: u64,
    /// What the last of these heard.
    pub said: String,
    /// How many a second.
    pub per_s: f64,
    /// From the word to the news of it, at every watcher, in milliseconds.
    pub converge_ms: Vec<f64>,
    /// What no watcher has heard of.
    pub unheard: u64,
}

/// What somebody waits for to hear of: who comes to a prefix, or goes, since when.
#[derive(Default)]
struct Board {
    waiting: Mutex<HashMap<(usize, Prefix, HostId, bool), Instant>>,
    heard_ms: Mutex<Vec<f64>>,
}

fn locked<T>(what: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Board {
    fn expect(&self, watchers: usize, prefix: Prefix, host: HostId, is_there: bool) {
        let (now, mut waiting) = (Instant::now(), locked(&self.waiting));
        for watcher in 0..watchers {
            // It came back before its going was heard of: then only the last counts.
            waiting.remove(&(watcher, prefix, host, !is_there));
            waiting.insert((watcher, prefix, host, is_there), now);
        }
    }

    fn hear(&self, watcher: usize, prefix: Prefix, host: HostId, is_there: bool) {
        if let Some(since) = locked(&self.waiting).remove(&(watcher, prefix, host, is_there)) {
            locked(&self.heard_ms).push(since.elapsed().as_secs_f64() * 1e3);
        }
    }
}

/// Who serves a watched prefix, as one watcher was told; a message may be a part of it.
#[derive(Default)]
struct Watched {
    known: HashMap<Prefix, BTreeSet<HostId>>,
    part: BTreeSet<HostId>,
}

impl Watched {
    fn take(&mut self, watcher: usize, told: proto::Watched, board: &Board) -> Result<()> {
        let id = told.service_id.try_into().map_err(|_| anyhow!("a watched name of another length"))?;
        let prefix = Prefix::new(margay_core::name::ServiceId(id), u16::try_from(told.bits)?);
        let hosts = told.instances.into_iter().filter_map(|one| one.host.try_into().ok()).map(HostId);
        self.part.extend(hosts);
        if told.goes_on {
            return Ok(());
        }
        let now = std::mem::take(&mut self.part);
        let before = self.known.insert(prefix, now.clone()).unwrap_or_default();
        now.difference(&before).for_each(|host| board.hear(watcher, prefix, *host, true));
        before.difference(&now).for_each(|host| board.hear(watcher, prefix, *host, false));
        Ok(())
    }
}

/// What goes on beside what a host asks.
struct Tasks {
    all: Mutex<JoinSet<Result<()>>>,
    /// Signs of life have a thread of their own: thousands of registrations at once shall not make a host look dead.
    beats: Handle,
}

impl Tasks {
    fn start() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_time().build()?;
        let beats = runtime.handle().clone();
        // It ends with the program.
        std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        Ok(Self { all: Mutex::default(), beats })
    }
}

type Waiting = Arc<Mutex<HashMap<u64, oneshot::Sender<Option<String>>>>>;

/// One host: its stream, and what it has asked.
struct Registrant {
    id: HostId,
    writer: tokio::sync::Mutex<Writer>,
    waiting: Waiting,
    next: AtomicU64,
}

impl Registrant {
    /// Joins, and gives signs of life from then on. A watcher's news are told to the board under its number.
    async fn join(
        token: &JoinToken,
        name: String,
        watcher: Option<(usize, Arc<Board>)>,
        tasks: &Tasks,
    ) -> Result<Arc<Self>> {
        let key = HostSecret::generate(&mut entropy::rng()?);
        let connected = TcpStream::connect(&token.router_address).await;
        let connected = connected.with_context(|| format!("{} cannot be reached", token.router_address))?;
        let (mut reader, mut writer) = stream::open(connected, &key, &token.router_key).await?;
        let hello = hello(token.authority_block(), token.secret.as_bytes(), name);
        writer.write(&proto::FromHost { body: Some(from_host::Body::Hello(hello)) }).await?;
        let first: proto::FromRouter = reader.read().await?;
        let Some(from_router::Body::Welcome(welcome)) = first.body else {
            return Err(anyhow!("not welcome: {first:?}"));
        };
        let waiting = Waiting::default();
        let (id, next) = (key.public().id(), AtomicU64::new(1));
        let own = Arc::new(Self { id, writer: tokio::sync::Mutex::new(writer), waiting, next });
        let mut all = locked(&tasks.all);
        all.spawn(hear(reader, Arc::clone(&own.waiting), watcher));
        all.spawn_on(live(Arc::clone(&own), Duration::from_millis(welcome.heartbeat_ms.into())), &tasks.beats);
        Ok(own)
    }

    async fn say(&self, body: from_host::Body) -> Result<()> {
        Ok(self.writer.lock().await.write(&proto::FromHost { body: Some(body) }).await?)
    }

    /// Asks, and waits for the answer: a refusal is an error.
    async fn ask(&self, body: impl FnOnce(u64) -> from_host::Body) -> Result<()> {
        let request = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        locked(&self.waiting).insert(request, sender);
        self.say(body(request)).await?;
        match timeout(PATIENCE, answer).await {
            Ok(Ok(None)) => Ok(()),
            Ok(Ok(Some(why))) => Err(anyhow!("refused: {why}")),
            Ok(Err(_)) => Err(anyhow!("the stream has ended")),
            Err(_) => Err(anyhow!("no answer in {PATIENCE:?}")),
        }
    }

    async fn register(&self, name: &str) -> Result<()> {
        let register = registration(name, prefix_of(name)?);
        self.ask(|request| from_host::Body::Register(proto::Register { request, ..register })).await
    }

    async fn withdraw(&self, name: &str) -> Result<()> {
        let prefix = prefix_of(name)?;
        let (service_id, bits) = (prefix.id.0.to_vec(), prefix.bits.into());
        self.ask(|request| from_host::Body::Withdraw(proto::Withdraw { request, service_id, bits })).await
    }
}

fn prefix_of(name: &str) -> Result<Prefix> {
    Ok(name.parse::<Name>().with_context(|| format!("{name} is no name"))?.prefix())
}

async fn live(host: Arc<Registrant>, every: Duration) -> Result<()> {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        host.say(from_host::Body::Heartbeat(proto::Heartbeat::default())).await?;
    }
}

async fn hear(mut reader: Reader, waiting: Waiting, watcher: Option<(usize, Arc<Board>)>) -> Result<()> {
    use from_router::Body;
    let mut watched = Watched::default();
    loop {
        let message: proto::FromRouter = reader.read().await?;
        let (request, answer) = match message.body.context("an answer without words")? {
            Body::Registered(registered) => (registered.request, None),
            Body::Withdrawn(withdrawn) => (withdrawn.request, None),
            Body::Refusal(refusal) => (refusal.request, Some(refusal.text)),
            Body::Watched(told) => {
                if let Some((number, board)) = &watcher {
                    watched.take(*number, told, board)?;
                }
                continue;
            }
            _ => continue,
        };
        if let Some(sender) = locked(&waiting).remove(&request) {
            // Whoever asked has given up.
            let _ = sender.send(answer);
        }
    }
}

/// Names of the host with this number that it alone serves, and those that it shares.
fn names(plan: &Plan, number: usize) -> impl Iterator<Item = String> {
    let (own, shared, services) = (plan.own, plan.shared, plan.hosts);
    let alone = (0..own).map(move |at| format!("box.shop/key:h{number}-{at}"));
    alone.chain((0..shared).map(move |at| service(number * shared + at, services)))
}

fn service(at: usize, services: usize) -> String {
    format!("s{}.shop", at % services)
}

/// Brings all of them, and lets them come and go.
pub async fn crowd(plan: &Plan) -> Result<()> {
    let (board, tasks) = (Arc::new(Board::default()), Tasks::start()?);
    let mut hosts: Vec<Arc<Registrant>> = Vec::new();
    let mut said = Step::default();
    for step in 1..=STEPS {
        let since = Instant::now();
        let numbers = hosts.len()..plan.hosts * step / STEPS;
        let coming = streams::iter(numbers.map(|number| come(plan, number, &tasks))).buffered(HOSTS_AT_ONCE);
        hosts.extend(coming.try_collect::<Vec<_>>().await?);
        said.hosts = hosts.len() as u64;
        said.registered = (hosts.len() * (plan.own + plan.shared)) as u64;
        said.ms = since.elapsed().as_secs_f64() * 1e3;
        write_line(&serde_json::to_string(&said)?)?;
        let mut line = String::new();
        // The hosts stay alive meanwhile.
        tokio::task::spawn_blocking(move || std::io::stdin().lock().read_line(&mut line)).await??;
    }
    for number in 0..plan.watchers {
        let watcher =
            Registrant::join(&plan.token, format!("w{number}"), Some((number, Arc::clone(&board))), &tasks).await?;
        for at in 0..plan.watched {
            let prefix = prefix_of(&service(at, plan.hosts))?;
            let (service_id, bits) = (prefix.id.0.to_vec(), prefix.bits.into());
            watcher.say(from_host::Body::Watch(proto::Watch { request: 0, service_id, bits, ends: false })).await?;
        }
    }
    let churned = churn(plan, &hosts, &board).await?;
    let ended = locked(&tasks.all).try_join_next();
    ensure!(ended.is_none(), "a host's stream has ended: {ended:?}");
    write_line(&serde_json::to_string(&churned)?)
}

async fn come(plan: &Plan, number: usize, tasks: &Tasks) -> Result<Arc<Registrant>> {
    let turn = DOOR.acquire().await?;
    let host = Registrant::join(&plan.token, format!("h{number}"), None, tasks).await?;
    drop(turn);
    let one = &host;
    let asked = streams::iter(names(plan, number).map(|name| async move { one.register(&name).await }));
    asked.buffer_unordered(ASKED_AT_ONCE).try_collect::<()>().await.with_context(|| format!("host h{number}"))?;
    Ok(host)
}

/// Shared services go, and come back a while later, so many a second, whatever the answers take.
async fn churn(plan: &Plan, hosts: &[Arc<Registrant>], board: &Arc<Board>) -> Result<Churned> {
    let total = plan.churn_per_s * plan.churn_s;
    let watched: BTreeSet<String> = (0..plan.watched).map(|at| service(at, plan.hosts)).collect();
    let mut churned = Churned::default();
    let pair = |pair: usize| {
        let (host, at) = (pair % hosts.len(), pair / hosts.len() % plan.shared);
        (Arc::clone(&hosts[host]), service(host * plan.shared + at, plan.hosts))
    };
    for gone in 0..AWAY {
        let (host, name) = pair(gone);
        host.withdraw(&name).await?;
    }
    let (since, mut ticks, mut acts) = (Instant::now(), interval(TICK), JoinSet::new());
    let mut turns = (0..total).peekable();
    while turns.peek().is_some() {
        ticks.tick().await;
        let due = (since.elapsed().as_secs_f64() * plan.churn_per_s as f64) as usize;
        while let Some(turn) = turns.next_if(|turn| *turn < due) {
            // Every second turn somebody goes, who comes back when so many others have gone.
            let is_there = turn % 2 == 1;
            let (host, name) = pair(if is_there { turn / 2 } else { AWAY + turn / 2 });
            if watched.contains(&name) {
                board.expect(plan.watchers, prefix_of(&name)?, host.id, is_there);
            }
            acts.spawn(async move { if is_there { host.register(&name).await } else { host.withdraw(&name).await } });
        }
        while let Some(act) = acts.try_join_next() {
            churned.count(act?);
        }
    }
    while let Some(act) = acts.join_next().await {
        churned.count(act?);
    }
    churned.per_s = churned.done as f64 / since.elapsed().as_secs_f64();
    let patience = Instant::now();
    while !locked(&board.waiting).is_empty() && patience.elapsed() < PATIENCE {
        ticks.tick().await;
    }
    churned.unheard = locked(&board.waiting).len() as u64;
    churned.converge_ms = std::mem::take(&mut *locked(&board.heard_ms));
    Ok(churned)
}

impl Churned {
    fn count(&mut self, act: Result<()>) {
        match act {
            Ok(()) => self.done += 1,
            Err(error) => {
                self.failed += 1;
                self.said = format!("{error:#}");
            }
        }
    }
}
