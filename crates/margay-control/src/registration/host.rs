//! The host's end: joins, registers what the host serves, renews, and comes back whenever the stream breaks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use margay_core::certificate::{TrustAnchor, TrustStore};
use margay_core::key::{HostPublic, VerifyingKey};
use margay_core::name::{Prefix, ServiceId, authority_block};
use margay_core::{ABSENT_AWAITED, AssociationSetup};
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use super::conversation::Conversation;
use super::order_book::OrderBook;
use super::proto::{self, Code, from_host, from_router};
use super::stream::{Reader, StreamError, Writer, open, read_all};
use super::tenure::{Tenure, Tenures};
use super::trace::{self, Question, TraceError, Tracer};
use super::ways::Ways;
use super::{Instance, Local, VERSION, ZeroWeight};
use crate::api::v1::TraceHop;
use crate::lineage::Lineage;
use crate::store::{Joined, Store};
use crate::token::{TokenHash, TokenSecret};
use crate::wide_area::WideArea;
use crate::{Clock, SalControl, entropy};

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Who was found is near.
const FOUND_LIMIT: Duration = Duration::from_secs(2);
/// Addresses that a search has brought and that were not tried yet; of more, the later are left out.
const FOUND_MAX: usize = 4;
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);
// A router that has started is told in time what is served here.
const _: () = assert!(RETRY_MAX.as_millis() < ABSENT_AWAITED.as_millis());
/// A router that says no will say no again until somebody does something.
const RETRY_REFUSED: Duration = Duration::from_secs(30);

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
    /// With `exclusive`: clients of a former holder are told.
    pub fenced: bool,
    /// Datagrams of one unconnected socket are for one instance.
    pub sticky: bool,
    /// With the weight 0: why.
    pub zero_weight: Option<ZeroWeight>,
}

/// A router of the cluster that a host has joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterRouter {
    /// Its host key.
    pub key: HostPublic,
    /// Where it takes registrations: `host:port`.
    pub address: String,
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

pub(super) enum Order {
    Register(Prefix),
    Withdraw(Prefix, oneshot::Sender<()>),
    Resolve(ServiceId, oneshot::Sender<Vec<Instance>>),
    Watch(Prefix),
    EndWatch(Prefix),
    Trace(Question, oneshot::Sender<Result<oneshot::Receiver<proto::Traced>, TraceError>>),
    /// This host's addresses are others now; these are gone.
    Moved(Vec<IpAddr>),
    /// A search has brought an address of the router.
    Found,
    Stop,
}

/// Who wants to hear of a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Watcher {
    /// Who spreads the datagrams of unconnected sockets.
    Spreads,
    /// Who looks whether peers of flows are listed.
    Absences,
    /// Who looks whether instances have their share of connections.
    Rebalances,
    /// A program that follows who serves a name, by its number.
    Program(u64),
}

/// A prefix of which every change is heard.
#[derive(Debug, Default)]
pub(super) struct Watched {
    by: BTreeSet<Watcher>,
    /// What was heard last; nothing yet.
    pub found: Option<Vec<Instance>>,
}

/// What the task and the handle share.
pub(super) struct Shared {
    pub config: HomeConfig,
    pub local: Local,
    pub store: Arc<Store>,
    pub sal: Arc<dyn SalControl>,
    pub clock: Clock,
    pub wanted: Mutex<BTreeMap<Prefix, Registration>>,
    pub states: Mutex<BTreeMap<Prefix, RegistrationState>>,
    /// Told of every change of one of them.
    noted: watch::Sender<()>,
    /// Fenced names that this host holds.
    pub tenures: Mutex<Tenures>,
    state: watch::Sender<HomeState>,
    /// Where the router hears SAL, once it has welcomed this host.
    pub router_at: Mutex<Option<SocketAddr>>,
    /// Where a search has seen it, to be tried before the address that is configured.
    found: Mutex<VecDeque<SocketAddr>>,
    /// Which of those the stream goes to, if to any.
    found_at: Mutex<Option<SocketAddr>>,
    /// What makes first packets go there; none: they do not.
    pub ways: Option<Arc<Ways>>,
    /// Where else this host registers, as the router says.
    pub routers: watch::Sender<Vec<ClusterRouter>>,
    is_member: Mutex<bool>,
    /// Prefixes of which every change is heard.
    pub watched: Mutex<BTreeMap<Prefix, Watched>>,
    /// Rises with everything that is heard of them.
    pub heard: watch::Sender<u64>,
    /// What explains first packets on this host, once it is there.
    pub tracer: OnceLock<Tracer>,
    pub traces_refused: AtomicU64,
    /// What carries orders out on this host, if they are.
    pub order_book: OnceLock<Arc<OrderBook>>,
    pub area: Option<Arc<WideArea>>,
    /// The authority's own keys; `None`: they could not be read yet.
    pub line: Mutex<Option<Lineage>>,
    /// Those keys, and the ones that may sign no longer: what the router has to be vouched for by.
    pub trust: Mutex<TrustStore>,
}

/// One router of this host, for one authority.
pub struct Home {
    pub(super) shared: Arc<Shared>,
    orders: mpsc::UnboundedSender<Order>,
    task: Mutex<Option<JoinHandle<()>>>,
}

/// Why a stream ended.
pub(super) enum End {
    Stopped,
    /// This host has left the address that the stream was from. It is kept open until there is another: its end would
    /// be heard as the host's.
    Left(Option<Writer>),
    /// There is another address to try.
    Found,
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
    ///
    /// `ways` says to which of this host's routers first packets go; without, they do not go to this one. With an
    /// `area` this host is the router of a site, and tells routers of other sites what that serves.
    pub fn start(
        config: HomeConfig,
        local: Local,
        store: Arc<Store>,
        sal: Arc<dyn SalControl>,
        clock: Clock,
        ways: Option<Arc<Ways>>,
        area: Option<Arc<WideArea>>,
    ) -> Self {
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
            noted: watch::Sender::default(),
            tenures: Mutex::default(),
            state: watch::channel(first).0,
            router_at: Mutex::default(),
            found: Mutex::default(),
            found_at: Mutex::default(),
            ways,
            routers: watch::Sender::default(),
            is_member,
            watched: Mutex::default(),
            heard: watch::Sender::default(),
            tracer: OnceLock::new(),
            traces_refused: AtomicU64::default(),
            order_book: OnceLock::new(),
            area,
            line: Mutex::default(),
            trust: Mutex::default(),
        });
        // Whoever speaks for its names, or says that it is a router of it, has to prove that from now on, also before a
        // router is heard. As long as the keys cannot be read, nobody proves anything; each welcome tries again.
        if let Err(error) = shared.read_keys() {
            tracing::error!(%error, "the authority's keys cannot be read; no router is believed until they can");
        }
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

    /// Where the router hears SAL, once it has welcomed this host.
    pub fn router_at(&self) -> Option<SocketAddr> {
        *self.shared.router_at.lock()
    }

    /// The router may be at this address: it is tried before the one that is configured, now and as long as it is
    /// reached there. Nothing else comes of it: whoever is there has to prove that it is the router.
    pub fn found(&self, at: SocketAddr) {
        let mut found = self.shared.found.lock();
        if found.len() < FOUND_MAX && !found.contains(&at) {
            found.push_back(at);
            drop(found);
            self.order(Order::Found);
        }
    }

    /// Where the router was found and is reached, if not at the address that is configured.
    pub fn found_at(&self) -> Option<SocketAddr> {
        *self.shared.found_at.lock()
    }

    /// The routers of the router's cluster, as it says; told of every change. None: it says nothing.
    pub fn routers(&self) -> watch::Receiver<Vec<ClusterRouter>> {
        self.shared.routers.subscribe()
    }

    /// Told of every change.
    pub fn changed(&self) -> watch::Receiver<HomeState> {
        self.shared.state.subscribe()
    }

    /// Ends when the router has answered to all that is registered there, or cannot.
    pub async fn settled(&self) {
        let (mut state, mut noted) = (self.shared.state.subscribe(), self.shared.noted.subscribe());
        loop {
            let phase = state.borrow_and_update().phase;
            let is_pending = self.shared.states.lock().values().any(|state| state.state == "pending");
            if phase != Phase::Connecting && (phase != Phase::Connected || !is_pending) {
                return;
            }
            // Both are told by what this home holds on to.
            tokio::select! {
                _ = state.changed() => {}
                _ = noted.changed() => {}
            }
        }
    }

    /// Registers a prefix, now and whenever the stream comes back; again, to change weight or priority.
    pub fn register(&self, registration: Registration) {
        let prefix = registration.prefix;
        self.shared.wanted.lock().insert(prefix, registration);
        self.shared.note(prefix, "pending", String::new(), 0);
        self.order(Order::Register(prefix));
    }

    /// Ends when the router has answered the registration of a prefix, or does not.
    pub async fn answered(&self, prefix: &Prefix) {
        let mut noted = self.shared.noted.subscribe();
        let is_pending = || self.registration(prefix).is_some_and(|state| state.state == "pending");
        let answered = async { while is_pending() && noted.changed().await.is_ok() {} };
        // Without an answer the registration stays wanted, and is made when the router is there again.
        let _ = timeout(ANSWER_LIMIT, answered).await;
    }

    /// Withdraws a prefix at once. What is given back ends when the router has acknowledged it, or cannot; `None` when
    /// it was not registered.
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

    /// This host's addresses have changed, and these are gone: a stream from one of them is opened anew from another at
    /// once, and one that could not be opened is tried again. The router lists this host all the while.
    pub fn moved(&self, gone: Vec<IpAddr>) {
        self.order(Order::Moved(gone));
    }

    /// How this host holds a fenced name by the router; `None`: it does not, or the router fences nothing.
    pub fn tenure(&self, prefix: &Prefix) -> Option<Tenure> {
        self.shared.tenures.lock().of(prefix)
    }

    /// Told whenever it stands otherwise with a prefix.
    pub fn noted(&self) -> watch::Receiver<()> {
        self.shared.noted.subscribe()
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

    /// Lets the authority order changes of this host's sessions.
    pub fn set_order_book(&self, book: Arc<OrderBook>) {
        // Set once, at the start.
        let _ = self.shared.order_book.set(book);
    }

    /// Hears of everybody who serves something under a prefix, from now until [`end_watch`](Self::end_watch) by the
    /// same watcher.
    pub fn watch(&self, prefix: Prefix, by: Watcher) {
        let mut watched = self.shared.watched.lock();
        let is_new = !watched.contains_key(&prefix);
        watched.entry(prefix).or_default().by.insert(by);
        drop(watched);
        if is_new {
            self.order(Order::Watch(prefix));
        }
    }

    /// A prefix is of no more interest to a watcher.
    pub fn end_watch(&self, prefix: Prefix, by: Watcher) {
        let mut watched = self.shared.watched.lock();
        let Some(known) = watched.get_mut(&prefix) else { return };
        known.by.remove(&by);
        if known.by.is_empty() {
            watched.remove(&prefix);
            drop(watched);
            self.order(Order::EndWatch(prefix));
        }
    }

    /// What was heard last of a watched prefix; it holds as long as nothing else is heard. `None`: nothing yet.
    pub fn watched(&self, prefix: &Prefix) -> Option<Vec<Instance>> {
        self.shared.watched.lock().get(prefix).and_then(|watched| watched.found.clone())
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
    pub fn note(&self, prefix: Prefix, state: &'static str, why: String, certificate_expires_unix_s: u64) {
        let since_unix_s = self.clock.unix_s();
        let state = RegistrationState { state, why, since_unix_s, certificate_expires_unix_s };
        self.states.lock().insert(prefix, state);
        self.noted.send_replace(());
    }

    /// Whether the router of a site is beside this one, and not above it.
    pub fn is_beside(&self, site: &str) -> bool {
        !site.is_empty() && self.area.as_ref().is_some_and(|area| area.policy().preference(site).beside)
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
            *self.found_at.lock() = None;
            self.ways.iter().for_each(|ways| ways.lost(&self.config.authority, self.config.router_key.id()));
            let mut states = self.states.lock();
            for state in states.values_mut().filter(|state| state.state == "registered") {
                (state.state, state.since_unix_s) = ("pending", since_unix_s);
            }
            drop(states);
            self.noted.send_replace(());
        }
    }
}

async fn live(shared: Arc<Shared>, mut orders: mpsc::UnboundedReceiver<Order>) {
    let (mut wait, mut former) = (RETRY_FIRST, None);
    loop {
        let end = one_stream(&shared, &mut orders, &mut wait, &mut former).await;
        let rest = match end {
            End::Stopped => break,
            End::Left(writer) => {
                former = writer.or(former);
                tracing::info!(router = shared.config.router_address, "registering again, from another address");
                continue;
            }
            End::Found => continue,
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
                entropy::jittered(wait)
            }
        };
        if is_stopped_during(&mut orders, Instant::now() + rest).await {
            break;
        }
    }
    shared.ways.iter().for_each(|ways| ways.left(&shared.config.authority, shared.config.router_key.id()));
}

/// What is ordered without a stream: registrations are remembered already, questions have no answer.
async fn is_stopped_during(orders: &mut mpsc::UnboundedReceiver<Order>, until: Instant) -> bool {
    loop {
        tokio::select! {
            () = sleep_until(until) => return false,
            order = orders.recv() => match order {
                None | Some(Order::Stop) => return true,
                // There may be a way now.
                Some(Order::Moved(_) | Order::Found) => return false,
                Some(_) => {}
            }
        }
    }
}

async fn one_stream(
    shared: &Arc<Shared>,
    orders: &mut mpsc::UnboundedReceiver<Order>,
    wait: &mut Duration,
    former: &mut Option<Writer>,
) -> End {
    let found = shared.found.lock().pop_front();
    let limit = if found.is_some() { FOUND_LIMIT } else { CONNECT_LIMIT };
    let meeting = timeout(limit, meet(shared, found));
    tokio::pin!(meeting);
    let met = loop {
        tokio::select! {
            met = &mut meeting => break met,
            order = orders.recv() => match order {
                None | Some(Order::Stop) => return End::Stopped,
                // It may be from an address that is gone.
                Some(Order::Moved(_)) => return End::Left(None),
                Some(Order::Found) if found.is_none() => return End::Found,
                Some(_) => {}
            },
        }
    };
    let Met { local, reader, writer, welcome, proved_until_s } = match met {
        // The next one, if there is one: it is one less each time.
        Err(_) | Ok(Err(End::Broke(_))) if found.is_some() => return End::Found,
        Err(_) => return End::Broke(format!("no answer in {limit:?}")),
        Ok(Err(end)) => return end,
        Ok(Ok(met)) => met,
    };
    *wait = RETRY_FIRST;
    *former = None;
    shared.enter(Phase::Connected, String::new());
    *shared.found_at.lock() = found;
    // When the stream breaks, the router is most likely where it was.
    *shared.found.lock() = found.into_iter().collect();
    tracing::info!(router = shared.config.router_address, authority = shared.config.authority, "joined");
    let (sender, answers) = mpsc::channel(64);
    let reading = tokio::spawn(read_all(reader, sender));
    let end = Conversation::new(shared, local, writer, &welcome, proved_until_s).hold(orders, answers).await;
    reading.abort();
    end
}

/// A router that has welcomed this host.
struct Met {
    /// This host's address.
    local: IpAddr,
    reader: Reader,
    writer: Writer,
    welcome: proto::Welcome,
    proved_until_s: u64,
}

/// Connects, says hello, and is welcomed.
async fn meet(shared: &Arc<Shared>, found: Option<SocketAddr>) -> Result<Met, End> {
    let config = &shared.config;
    let stream = match found {
        Some(at) => TcpStream::connect(at).await,
        None => TcpStream::connect(&config.router_address).await,
    };
    let stream = stream.map_err(|error| End::Broke(format!("{}: {error}", config.router_address)))?;
    let router = stream.peer_addr().map_err(|error| End::Broke(error.to_string()))?;
    let local = stream.local_addr().map_err(|error| End::Broke(error.to_string()))?.ip().to_canonical();
    let opened = open(stream, &shared.local.host_key, &config.router_key).await;
    // Another host where a search has led to says nothing about the router.
    let is_lead = found.is_some();
    let opened = opened.map_err(|error| if is_lead { End::Broke(error.to_string()) } else { End::from(error) });
    let (mut reader, mut writer) = opened?;
    let mut rng = entropy::rng().map_err(|error| End::Broke(error.to_string()))?;
    let association_id = rng.u32().max(1);
    let secret = if *shared.is_member.lock() { None } else { config.secret.as_ref() };
    let hello = proto::Hello {
        version: VERSION,
        secret: secret.map(|secret| secret.as_bytes().to_vec()).unwrap_or_default(),
        authority: authority_block(&config.authority).to_vec(),
        epoch: shared.local.epoch,
        boot_id: shared.local.boot_id.to_vec(),
        association_id,
        sal_port: shared.local.sal_port.into(),
        host_name: shared.local.host_name.clone(),
        software: shared.local.software.clone(),
        traces: true,
        orders: true,
    };
    writer.write(&proto::FromHost { body: Some(from_host::Body::Hello(hello)) }).await?;
    let answer: proto::FromRouter = reader.read().await?;
    let welcome = match answer.body {
        Some(from_router::Body::Welcome(welcome)) => welcome,
        Some(from_router::Body::Refusal(refusal)) => return Err(refused(&refusal)),
        _ => return Err(StreamError::Garbage.into()),
    };
    // First of all: what is shown from now on may be signed by a key that is told here.
    shared.heed(welcome.keys.clone().unwrap_or_default()).await?;
    let proved_until_s = adopt(shared, &welcome, association_id, router)?;
    remember(shared).await?;
    Ok(Met { local, reader, writer, welcome, proved_until_s })
}

/// What a refusal of the whole stream means.
pub(super) fn refused(refusal: &proto::Refusal) -> End {
    match refusal.code() {
        // These pass by themselves.
        Code::GoingDown | Code::Superseded | Code::Limit | Code::Store => End::Broke(refusal.text.clone()),
        _ => End::Refused(refusal.text.clone()),
    }
}

/// Makes what the router said true here. Gives until when it has proved that it is one.
fn adopt(shared: &Shared, welcome: &proto::Welcome, local_id: u32, router: SocketAddr) -> Result<u64, End> {
    let garbage = || End::from(StreamError::Garbage);
    let key: [u8; 32] = welcome.association_key[..].try_into().map_err(|_| garbage())?;
    let hop_key: [u8; 16] = welcome.hop_key[..].try_into().map_err(|_| garbage())?;
    let sal_port = u16::try_from(welcome.sal_port).map_err(|_| garbage())?;
    if welcome.version != VERSION || welcome.association_id == 0 {
        return Err(garbage());
    }
    let config = &shared.config;
    let proved = shared.check_proofs(&welcome.membership, &welcome.router).map_err(|fault| shared.refusal(fault));
    let proved_until_s = proved?;
    let remote = SocketAddr::new(router.ip(), sal_port);
    let authority = authority_block(&config.authority);
    let anchor = TrustAnchor { authority, key: config.authority_key };
    shared.area.iter().for_each(|area| area.trust(anchor));
    shared.sal.set_membership(welcome.membership.clone());
    shared.sal.install_association(AssociationSetup {
        host_key: config.router_key.0,
        key,
        local_id,
        remote_id: welcome.association_id,
        peer_epoch: welcome.epoch,
        boot_id: None,
        remote,
        hop_key: Some(hop_key),
        router: true,
        initiator: true,
    });
    *shared.router_at.lock() = Some(remote);
    let (beside, router) = (shared.is_beside(&welcome.site), config.router_key.id());
    if let Some(ways) = &shared.ways {
        // Of one that is beside this one only what it announces goes there.
        if beside {
            ways.left(&config.authority, router);
        } else {
            ways.heard(&config.authority, router, remote, &shared.sal);
        }
    }
    Ok(proved_until_s)
}

/// The token is used: from now on the router knows this host by its key, also after a restart.
async fn remember(shared: &Arc<Shared>) -> Result<(), End> {
    if *shared.is_member.lock() {
        return Ok(());
    }
    let config = &shared.config;
    let joined = Joined {
        router_key: config.router_key,
        router_address: config.router_address.clone(),
        authority: config.authority.clone(),
        authority_key: config.authority_key,
        joined_s: shared.clock.unix_s(),
        token: config.secret.as_ref().map_or(TokenHash([0; 32]), TokenSecret::hash),
    };
    let store = Arc::clone(&shared.store);
    match tokio::task::spawn_blocking(move || store.note_joined(&joined)).await {
        Ok(Ok(())) => *shared.is_member.lock() = true,
        Ok(Err(error)) => return Err(End::Broke(error.to_string())),
        Err(_) => return Err(End::Broke("the store ended badly".to_owned())),
    }
    Ok(())
}
