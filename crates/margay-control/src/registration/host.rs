//! The host's end: joins, registers what the host serves, renews, and comes back whenever the stream breaks.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use margay_core::certificate::decode_chain;
use margay_core::key::{HostPublic, VerifyingKey};
use margay_core::name::{Prefix, ServiceId, authority_block};
use margay_core::table::{Action, NextHop, Rule, RuleId};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::meeting::{meet, refused};
use super::proto::{self, from_host, from_router};
use super::retry::Retries;
use super::silence::Silence;
use super::stream::{StreamError, Writer, read_all};
use super::trace::{self, Desk, Question, TraceError, Tracer};
use super::{Instance, Local};
use crate::api::v1::TraceHop;
use crate::store::Store;
use crate::token::TokenSecret;
use crate::{Clock, SalControl, entropy};

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// A router that says no will say no again until somebody does something.
const RETRY_REFUSED: Duration = Duration::from_secs(30);
/// Instances under a watched prefix that are remembered.
const WATCHED_MAX: usize = 10_000;
/// Bounds of what a router may ask for.
const LEASE_RANGE_MS: std::ops::RangeInclusive<u32> = 100..=60_000;

/// The router, and what is known of it.
#[derive(Clone, Debug)]
pub struct HomeConfig {
    /// `host:port`; looked up each time.
    pub router_address: String,
    /// Nobody else can pose as it.
    pub router_key: HostPublic,
    /// The authority that the host belongs to there.
    pub authority: String,
    /// Its key.
    pub authority_key: VerifyingKey,
    /// The secret of a join token; none when the host is a member.
    pub secret: Option<TokenSecret>,
}

/// How it stands with a router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not heard yet.
    Connecting,
    /// Welcomed, and heard within the lease.
    Connected,
    /// The router says no.
    Refused,
    /// The stream broke or cannot be opened.
    Unreachable,
}

/// How it stands with a router, why, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HomeState {
    /// How.
    pub phase: Phase,
    /// Why, where it is not connected.
    pub why: String,
    /// Since when, in seconds since 1970.
    pub since_unix_s: u64,
}

/// A prefix that this host serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// As written.
    pub name: String,
    /// Its bits.
    pub prefix: Prefix,
    /// Share among instances of one priority.
    pub weight: u32,
    /// Higher first.
    pub priority: u32,
    /// For names that certify themselves: the chain that their key signed.
    pub proof: Vec<u8>,
    /// The service has 2^bits partitions, each of which one host holds; zero: none.
    pub partition_bits: u8,
    /// One host alone may serve it.
    pub exclusive: bool,
    /// Datagrams of one unconnected socket are for one instance.
    pub sticky: bool,
}

/// How it stands with a registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistrationState {
    /// `registered`, `pending` or `refused`.
    pub state: &'static str,
    /// Why it was refused.
    pub why: String,
    /// Since when, in seconds since 1970.
    pub since_unix_s: u64,
    /// End of its certificate; zero without one.
    pub certificate_expires_unix_s: u64,
}

/// A router did not answer a question.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HomeError {
    /// There is no stream.
    #[error("not connected; `margay status` says why")]
    Down,
    /// It did not answer.
    #[error("no answer in {ANSWER_LIMIT:?}")]
    Timeout,
}

/// Ends when a router has acknowledged something, or cannot.
pub type Acknowledgement = Pin<Box<dyn Future<Output = ()> + Send>>;

enum Order {
    Register(Prefix),
    Withdraw(Prefix, oneshot::Sender<()>),
    Resolve(ServiceId, oneshot::Sender<Vec<Instance>>),
    Watch(Prefix),
    EndWatch(Prefix),
    Trace(Question, oneshot::Sender<Result<oneshot::Receiver<proto::Traced>, TraceError>>),
    Stop,
}

enum Pending {
    Registered(Prefix),
    Withdrawn(oneshot::Sender<()>),
    Resolved(oneshot::Sender<Vec<Instance>>),
    Traced(oneshot::Sender<proto::Traced>),
    Membership,
}

/// What the task and the handle share.
pub(super) struct Shared {
    pub config: HomeConfig,
    pub local: Local,
    pub store: Arc<Store>,
    pub sal: Arc<dyn SalControl>,
    pub clock: Clock,
    wanted: Mutex<BTreeMap<Prefix, Registration>>,
    states: Mutex<BTreeMap<Prefix, RegistrationState>>,
    state: watch::Sender<HomeState>,
    /// Rules that lead to the router, and where they lead.
    rules: Mutex<(Option<SocketAddr>, Vec<RuleId>)>,
    pub is_member: Mutex<bool>,
    /// Prefixes of which every change is heard, and what was heard last.
    watched: Mutex<BTreeMap<Prefix, Option<Vec<Instance>>>>,
    /// Rises with everything that is heard of them.
    heard: watch::Sender<u64>,
    /// What explains first packets on this host, once it is there.
    tracer: OnceLock<Tracer>,
    traces_refused: AtomicU64,
}

/// One router of this host, for one authority.
pub struct Home {
    shared: Arc<Shared>,
    orders: mpsc::UnboundedSender<Order>,
    task: Mutex<Option<JoinHandle<()>>>,
}

/// Why a stream ended.
pub(super) enum End {
    Stopped,
    Refused(String),
    Broke(String),
}

impl From<StreamError> for End {
    fn from(error: StreamError) -> Self {
        match error {
            // Trying again soon changes nothing.
            StreamError::WrongKey(_) => Self::Refused(error.to_string()),
            _ => Self::Broke(error.to_string()),
        }
    }
}

impl Home {
    /// Joins or comes back, and goes on until [`stop`](Self::stop).
    pub fn start(config: HomeConfig, local: Local, store: Arc<Store>, sal: Arc<dyn SalControl>, clock: Clock) -> Self {
        let (orders, receiver) = mpsc::unbounded_channel();
        let first = HomeState { phase: Phase::Connecting, why: String::new(), since_unix_s: clock.unix_s() };
        let is_member = Mutex::new(config.secret.is_none());
        let shared = Arc::new(Shared {
            config,
            local,
            store,
            sal,
            clock,
            wanted: Mutex::default(),
            states: Mutex::default(),
            state: watch::channel(first).0,
            rules: Mutex::default(),
            is_member,
            watched: Mutex::default(),
            heard: watch::Sender::default(),
            tracer: OnceLock::new(),
            traces_refused: AtomicU64::default(),
        });
        let task = Mutex::new(Some(tokio::spawn(live(Arc::clone(&shared), receiver))));
        Self { shared, orders, task }
    }

    /// The router.
    pub fn config(&self) -> &HomeConfig {
        &self.shared.config
    }

    /// How it stands now.
    pub fn state(&self) -> HomeState {
        self.shared.state.borrow().clone()
    }

    /// Told of every change.
    pub fn changed(&self) -> watch::Receiver<HomeState> {
        self.shared.state.subscribe()
    }

    /// Registers a prefix, now and whenever the stream comes back; again, to change weight or priority.
    pub fn register(&self, registration: Registration) {
        let prefix = registration.prefix;
        self.shared.wanted.lock().insert(prefix, registration);
        self.shared.note(prefix, "pending", String::new(), 0);
        self.order(Order::Register(prefix));
    }

    /// Withdraws a prefix at once. What is given back ends when the router has acknowledged it, or cannot; `None` when it was
    /// not registered.
    pub fn withdraw(&self, prefix: Prefix) -> Option<Acknowledgement> {
        self.shared.states.lock().remove(&prefix);
        self.shared.wanted.lock().remove(&prefix)?;
        let (done, acknowledged) = oneshot::channel();
        self.order(Order::Withdraw(prefix, done));
        Some(Box::pin(async move {
            // Without an answer the lease ends it.
            let _ = timeout(ANSWER_LIMIT, acknowledged).await;
        }))
    }

    /// How it stands with a prefix; `None` when it was not registered.
    pub fn registration(&self, prefix: &Prefix) -> Option<RegistrationState> {
        self.shared.states.lock().get(prefix).cloned()
    }

    /// Instances of a service, as the router knows them.
    ///
    /// # Errors
    ///
    /// There is no stream, or no answer.
    pub async fn resolve(&self, service: ServiceId) -> Result<Vec<Instance>, HomeError> {
        let (done, answer) = oneshot::channel();
        self.order(Order::Resolve(service, done));
        match timeout(ANSWER_LIMIT, answer).await {
            Err(_) => Err(HomeError::Timeout),
            Ok(Err(_)) => Err(HomeError::Down),
            Ok(Ok(instances)) => Ok(instances),
        }
    }

    /// What the router would do with a first packet, and those that it would send it to.
    ///
    /// # Errors
    ///
    /// There is no stream, or no answer, or it is no.
    pub async fn trace(&self, question: Question) -> Result<Vec<TraceHop>, TraceError> {
        let limit = question.limit;
        let (done, asked) = oneshot::channel();
        self.order(Order::Trace(question, done));
        match timeout(limit, asked).await {
            Err(_) => Err(TraceError::Timeout),
            Ok(Err(_)) => Err(TraceError::Down),
            Ok(Ok(answer)) => trace::wait(answer?, limit).await,
        }
    }

    /// Questions of the router about first packets that were refused.
    pub fn traces_refused(&self) -> u64 {
        self.shared.traces_refused.load(Ordering::Relaxed)
    }

    /// Lets the router ask what this host would do with first packets.
    pub fn set_tracer(&self, tracer: Tracer) {
        // Set once, at the start.
        let _ = self.shared.tracer.set(tracer);
    }

    /// Hears of everybody who serves something under a prefix, from now until [`end_watch`](Self::end_watch).
    pub fn watch(&self, prefix: Prefix) {
        let is_new = self.shared.watched.lock().insert(prefix, None).is_none();
        if is_new {
            self.order(Order::Watch(prefix));
        }
    }

    /// That is of no more interest.
    pub fn end_watch(&self, prefix: Prefix) {
        if self.shared.watched.lock().remove(&prefix).is_some() {
            self.order(Order::EndWatch(prefix));
        }
    }

    /// What was heard last of a watched prefix; it holds as long as nothing else is heard. `None`: nothing yet.
    pub fn watched(&self, prefix: &Prefix) -> Option<Vec<Instance>> {
        self.shared.watched.lock().get(prefix).cloned().flatten()
    }

    /// Told of everything that is heard of watched prefixes.
    pub fn heard(&self) -> watch::Receiver<u64> {
        self.shared.heard.subscribe()
    }

    /// Ends the stream and takes the rules that lead to the router out.
    pub async fn stop(&self) {
        self.order(Order::Stop);
        let task = self.task.lock().take();
        if let Some(task) = task
            && task.await.is_err()
        {
            tracing::error!(router = self.shared.config.router_address, "the registration ended badly");
        }
    }

    fn order(&self, order: Order) {
        // The task has ended: whoever waits for an answer learns it by the dropped sender.
        let _ = self.orders.send(order);
    }
}

impl Shared {
    fn note(&self, prefix: Prefix, state: &'static str, why: String, certificate_expires_unix_s: u64) {
        let since_unix_s = self.clock.unix_s();
        let state = RegistrationState { state, why, since_unix_s, certificate_expires_unix_s };
        self.states.lock().insert(prefix, state);
    }

    fn enter(&self, phase: Phase, why: String) {
        let since_unix_s = self.clock.unix_s();
        self.state.send_if_modified(|state| {
            let is_new = state.phase != phase || state.why != why;
            if is_new {
                *state = HomeState { phase, why, since_unix_s };
            }
            is_new
        });
        if phase != Phase::Connected {
            let mut states = self.states.lock();
            for state in states.values_mut().filter(|state| state.state == "registered") {
                (state.state, state.since_unix_s) = ("pending", since_unix_s);
            }
        }
    }

    /// First packets of this authority's names, and of all others that are not known here, go to the router.
    pub(super) fn lead_to(&self, router: SocketAddr) {
        let mut rules = self.rules.lock();
        if rules.0 == Some(router) {
            return;
        }
        let hop = NextHop { address: router, host: Some(self.config.router_key.id()), router: true };
        let rule = Rule { priority: 0, weight: 1, action: Action::Forward(hop) };
        let own = Prefix::of_authority(&self.config.authority);
        let everything = Prefix::new(ServiceId([0; 32]), 0);
        let added = [own, everything].into_iter().filter_map(|prefix| match self.sal.add_rule(prefix, rule.clone()) {
            Ok(rule) => Some(rule),
            Err(error) => {
                tracing::error!(%error, "no rule leads to the router");
                None
            }
        });
        let old = std::mem::replace(&mut *rules, (Some(router), added.collect()));
        for rule in old.1 {
            self.sal.remove_rule(rule);
        }
    }
}

async fn live(shared: Arc<Shared>, mut orders: mpsc::UnboundedReceiver<Order>) {
    let mut wait = RETRY_FIRST;
    loop {
        let end = one_stream(&shared, &mut orders, &mut wait).await;
        let rest = match end {
            End::Stopped => break,
            End::Refused(why) => {
                tracing::warn!(router = shared.config.router_address, why, "the router says no");
                shared.enter(Phase::Refused, why);
                RETRY_REFUSED
            }
            End::Broke(why) => {
                if shared.state.borrow().phase != Phase::Unreachable {
                    tracing::warn!(router = shared.config.router_address, why, "the router is not reached");
                }
                shared.enter(Phase::Unreachable, why);
                wait = (wait * 2).min(RETRY_MAX);
                jittered(wait)
            }
        };
        if is_stopped_during(&mut orders, Instant::now() + rest).await {
            break;
        }
    }
    for rule in std::mem::take(&mut shared.rules.lock().1) {
        shared.sal.remove_rule(rule);
    }
}

/// Hosts that lost their router at the same moment do not come back at the same moment.
fn jittered(wait: Duration) -> Duration {
    let part = entropy::rng().map_or(128, |mut rng| rng.u32() % 256);
    wait / 2 + wait * part / 512
}

/// What is ordered without a stream: registrations are remembered already, questions have no answer.
async fn is_stopped_during(orders: &mut mpsc::UnboundedReceiver<Order>, until: Instant) -> bool {
    loop {
        tokio::select! {
            () = sleep_until(until) => return false,
            order = orders.recv() => match order {
                None | Some(Order::Stop) => return true,
                Some(_) => {}
            }
        }
    }
}

async fn one_stream(shared: &Arc<Shared>, orders: &mut mpsc::UnboundedReceiver<Order>, wait: &mut Duration) -> End {
    let meeting = timeout(CONNECT_LIMIT, meet(shared));
    tokio::pin!(meeting);
    let met = loop {
        tokio::select! {
            met = &mut meeting => break met,
            order = orders.recv() => if matches!(order, None | Some(Order::Stop)) { return End::Stopped },
        }
    };
    let (reader, writer, welcome) = match met {
        Err(_) => return End::Broke(format!("no answer in {CONNECT_LIMIT:?}")),
        Ok(Err(end)) => return end,
        Ok(Ok(met)) => met,
    };
    *wait = RETRY_FIRST;
    shared.enter(Phase::Connected, String::new());
    tracing::info!(router = shared.config.router_address, authority = shared.config.authority, "joined");
    let (sender, answers) = mpsc::channel(64);
    let reading = tokio::spawn(read_all(reader, sender));
    let end = Conversation::new(shared, writer, &welcome).hold(orders, answers).await;
    reading.abort();
    end
}

/// One stream while it lasts.
struct Conversation<'a> {
    shared: &'a Arc<Shared>,
    writer: Writer,
    lease: Duration,
    heartbeat: Duration,
    next_request: u64,
    pending: HashMap<u64, Pending>,
    /// When what must be signed again: prefixes, and the membership.
    renewals: BTreeMap<Prefix, u64>,
    membership_renewal_s: u64,
    /// What was refused and is asked for again.
    retries: Retries,
    /// What was heard of a watched prefix, while more of it is to come.
    parts: BTreeMap<Prefix, Vec<Instance>>,
    /// The router answers questions about first packets, and has its own answered.
    traces: bool,
    desk: Desk,
}

impl<'a> Conversation<'a> {
    fn new(shared: &'a Arc<Shared>, writer: Writer, welcome: &proto::Welcome) -> Self {
        let within = |ms: u32| ms.clamp(*LEASE_RANGE_MS.start(), *LEASE_RANGE_MS.end());
        let mut this = Self {
            shared,
            writer,
            lease: Duration::from_millis(within(welcome.lease_ms).into()),
            heartbeat: Duration::from_millis(within(welcome.heartbeat_ms).into()),
            next_request: 1,
            pending: HashMap::new(),
            renewals: BTreeMap::new(),
            membership_renewal_s: 0,
            retries: Retries::default(),
            parts: BTreeMap::new(),
            traces: welcome.traces,
            desk: Desk::new(authority_block(&shared.config.authority), shared.config.router_key.id()),
        };
        this.plan_membership(&welcome.membership);
        this
    }

    /// Half of a certificate's life from now.
    fn half_way(&self, not_after_s: u64) -> u64 {
        let now = self.shared.clock.unix_s();
        now + not_after_s.saturating_sub(now) / 2
    }

    fn plan_membership(&mut self, chain: &[u8]) {
        let ends = decode_chain(chain).ok().and_then(|chain| chain.iter().map(|one| one.not_after_s).min());
        self.membership_renewal_s = ends.map_or(u64::MAX, |end| self.half_way(end));
    }

    async fn hold(
        mut self,
        orders: &mut mpsc::UnboundedReceiver<Order>,
        mut answers: mpsc::Receiver<Result<proto::FromRouter, StreamError>>,
    ) -> End {
        let wanted: Vec<Prefix> = self.shared.wanted.lock().keys().copied().collect();
        for prefix in wanted {
            if let Err(error) = self.register(prefix).await {
                return error.into();
            }
        }
        let watched: Vec<Prefix> = self.shared.watched.lock().keys().copied().collect();
        for prefix in watched {
            if let Err(error) = self.watch(prefix, false).await {
                return error.into();
            }
        }
        let mut beats = interval(self.heartbeat);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut silence = Silence::new(self.lease);
        loop {
            let done = tokio::select! {
                // Its own sign of life first, and what has come before the lease may end.
                biased;
                _ = beats.tick() => self.beat().await,
                () = self.retries.wait() => self.ask_again().await,
                order = orders.recv() => match order {
                    None | Some(Order::Stop) => return End::Stopped,
                    Some(order) => self.carry_out(order).await,
                },
                answer = self.desk.answered() => self.send(from_host::Body::Traced(answer)).await,
                answer = answers.recv() => {
                    silence.broken();
                    match answer {
                        None => return End::Broke("the stream ended".to_owned()),
                        Some(Err(error)) => return error.into(),
                        Some(Ok(answer)) => match self.take(answer) {
                            Some(end) => return end,
                            None => Ok(()),
                        },
                    }
                },
                () = silence.lasted() => return End::Broke(format!("silent for {:?}", self.lease)),
            };
            if let Err(error) = done {
                return error.into();
            }
        }
    }

    async fn send(&mut self, body: from_host::Body) -> Result<(), StreamError> {
        self.writer.write(&proto::FromHost { body: Some(body) }).await
    }

    fn request(&mut self, pending: Pending) -> u64 {
        let request = self.next_request;
        self.next_request += 1;
        self.pending.insert(request, pending);
        request
    }

    async fn beat(&mut self) -> Result<(), StreamError> {
        let now = self.shared.clock.unix_s();
        let due: Vec<Prefix> = self.renewals.iter().filter(|(_, at)| **at <= now).map(|(prefix, _)| *prefix).collect();
        for prefix in due {
            self.renewals.remove(&prefix);
            self.register(prefix).await?;
        }
        if self.membership_renewal_s <= now {
            self.membership_renewal_s = u64::MAX;
            let request = self.request(Pending::Membership);
            self.send(from_host::Body::RenewMembership(proto::RenewMembership { request })).await?;
        }
        self.send(from_host::Body::Heartbeat(proto::Heartbeat {})).await
    }

    /// For what another host had, and may have no longer.
    async fn ask_again(&mut self) -> Result<(), StreamError> {
        for prefix in self.retries.due(Instant::now()) {
            self.register(prefix).await?;
        }
        Ok(())
    }

    async fn register(&mut self, prefix: Prefix) -> Result<(), StreamError> {
        let Some(wanted) = self.shared.wanted.lock().get(&prefix).cloned() else { return Ok(()) };
        let request = self.request(Pending::Registered(prefix));
        self.send(from_host::Body::Register(proto::Register {
            request,
            name: wanted.name,
            service_id: prefix.id.0.to_vec(),
            bits: prefix.bits.into(),
            weight: wanted.weight,
            priority: wanted.priority,
            proof: wanted.proof,
            partition_bits: wanted.partition_bits.into(),
            exclusive: wanted.exclusive,
            sticky: wanted.sticky,
        }))
        .await
    }

    async fn carry_out(&mut self, order: Order) -> Result<(), StreamError> {
        match order {
            Order::Register(prefix) => self.register(prefix).await,
            Order::Withdraw(prefix, done) => {
                self.renewals.remove(&prefix);
                self.retries.forget(&prefix);
                let request = self.request(Pending::Withdrawn(done));
                let (service_id, bits) = (prefix.id.0.to_vec(), prefix.bits.into());
                self.send(from_host::Body::Withdraw(proto::Withdraw { request, service_id, bits })).await
            }
            Order::Resolve(service, done) => {
                let request = self.request(Pending::Resolved(done));
                let service_id = service.0.to_vec();
                self.send(from_host::Body::Resolve(proto::Resolve { request, service_id })).await
            }
            Order::Watch(prefix) => self.watch(prefix, false).await,
            Order::EndWatch(prefix) => self.watch(prefix, true).await,
            Order::Trace(question, done) => self.ask_trace(&question, done).await,
            Order::Stop => Ok(()),
        }
    }

    async fn ask_trace(
        &mut self,
        question: &Question,
        done: oneshot::Sender<Result<oneshot::Receiver<proto::Traced>, TraceError>>,
    ) -> Result<(), StreamError> {
        if !self.traces {
            // Whoever asked has stopped waiting.
            let _ = done.send(Err(TraceError::Older));
            return Ok(());
        }
        let (sender, answer) = oneshot::channel();
        let request = self.request(Pending::Traced(sender));
        let _ = done.send(Ok(answer));
        self.send(from_host::Body::Trace(question.written(request))).await
    }

    async fn watch(&mut self, prefix: Prefix, ends: bool) -> Result<(), StreamError> {
        // What is heard names the prefix.
        let (request, service_id, bits) = (self.next_request, prefix.id.0.to_vec(), prefix.bits.into());
        self.next_request += 1;
        self.send(from_host::Body::Watch(proto::Watch { request, service_id, bits, ends })).await
    }

    /// Of its own host the router knows no address that it could tell: we know it.
    fn instances(&self, found: Vec<proto::Instance>) -> Vec<Instance> {
        let mut instances: Vec<Instance> = found.into_iter().filter_map(Instance::read).collect();
        let router = (self.shared.config.router_key.id(), self.shared.rules.lock().0);
        for instance in instances.iter_mut().filter(|instance| instance.host == router.0) {
            instance.address = router.1.unwrap_or(instance.address);
        }
        instances
    }

    fn heard(&mut self, watched: proto::Watched) {
        let Ok(id) = <[u8; 32]>::try_from(watched.service_id) else { return };
        let prefix = Prefix::new(ServiceId(id), u16::try_from(watched.bits).unwrap_or(256).min(256));
        if !self.shared.watched.lock().contains_key(&prefix) {
            return;
        }
        let mut instances = self.parts.remove(&prefix).unwrap_or_default();
        instances.extend(self.instances(watched.instances));
        if watched.goes_on && instances.len() < WATCHED_MAX {
            self.parts.insert(prefix, instances);
            return;
        }
        if watched.truncated {
            tracing::warn!(%prefix, known = instances.len(), "more hosts serve it than the router tells of");
        }
        if let Some(known) = self.shared.watched.lock().get_mut(&prefix) {
            *known = Some(instances);
        }
        self.shared.heard.send_modify(|version| *version = version.wrapping_add(1));
    }

    /// Gives the end, when the router ends the stream.
    fn take(&mut self, message: proto::FromRouter) -> Option<End> {
        use from_router::Body;
        match message.body? {
            Body::Heartbeat(_) | Body::Welcome(_) => {}
            Body::Registered(answer) => self.registered(&answer),
            Body::Withdrawn(answer) => {
                if let Some(Pending::Withdrawn(done)) = self.pending.remove(&answer.request) {
                    // Whoever ordered it has stopped waiting.
                    let _ = done.send(());
                }
            }
            Body::Resolved(answer) => {
                if let Some(Pending::Resolved(done)) = self.pending.remove(&answer.request) {
                    // Whoever asked has stopped waiting.
                    let _ = done.send(self.instances(answer.instances));
                }
            }
            Body::Watched(watched) => self.heard(watched),
            Body::Traced(answer) => {
                if let Some(Pending::Traced(done)) = self.pending.remove(&answer.request) {
                    // Whoever asked has stopped waiting.
                    let _ = done.send(answer);
                }
            }
            Body::Trace(asked) => {
                if !self.desk.take(self.shared.tracer.get(), asked) {
                    self.shared.traces_refused.fetch_add(1, Ordering::Relaxed);
                }
            }
            Body::Membership(answer) => {
                self.pending.remove(&answer.request);
                self.plan_membership(&answer.chain);
                self.shared.sal.set_membership(answer.chain);
            }
            Body::Refusal(refusal) if refusal.request == 0 => return Some(refused(&refusal)),
            Body::Refusal(refusal) => match self.pending.remove(&refusal.request) {
                Some(Pending::Registered(prefix)) => self.not_registered(prefix, refusal),
                _ => tracing::warn!(why = refusal.text, "the router refuses what it was asked"),
            },
        }
        None
    }

    fn not_registered(&mut self, prefix: Prefix, refusal: proto::Refusal) {
        if !self.shared.wanted.lock().contains_key(&prefix) {
            return;
        }
        self.renewals.remove(&prefix);
        self.retries.refused(prefix, refusal.code(), Instant::now());
        let known = self.shared.states.lock().get(&prefix).cloned();
        // Asked again and again, it is one refusal.
        if known.is_none_or(|known| (known.state, &known.why) != ("refused", &refusal.text)) {
            tracing::warn!(%prefix, why = refusal.text, "the router does not register it");
            self.shared.note(prefix, "refused", refusal.text, 0);
        }
    }

    fn registered(&mut self, answer: &proto::Registered) {
        let Some(Pending::Registered(prefix)) = self.pending.remove(&answer.request) else { return };
        self.retries.forget(&prefix);
        if !self.shared.wanted.lock().contains_key(&prefix) {
            return;
        }
        if !answer.certificate.is_empty() {
            self.shared.sal.set_service_certificate(prefix, answer.certificate.clone());
            self.renewals.insert(prefix, self.half_way(answer.not_after_unix_s));
        }
        self.shared.note(prefix, "registered", String::new(), answer.not_after_unix_s);
    }
}
