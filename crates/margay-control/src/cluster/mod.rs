//! Several routers that are one: what they must agree about lies in etcd, and each has a copy of it (DESIGN §8;
//! SCAFFOLD §4.2.1).
//!
//! [`session`] is what a router does with etcd, by [`etcd`]; [`key`] and [`record`] say what lies there; [`view`]
//! (pure) is what is known of the other routers, [`offers`] and [`claims`] (pure) what this one has told them, [`news`]
//! what the rest of this router has not heard yet. Members, tokens and names are in the router's own store
//! (`store/replica.rs`), changed by common consent (`store/agreement.rs`). While etcd is away, routers go on with what
//! they know.

mod claims;
mod clerk;
mod etcd;
mod key;
mod news;
mod offers;
mod pause;
mod record;
mod session;
#[cfg(test)]
mod test;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use margay_core::key::HostId;
use margay_core::name::Prefix;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use zeroize::Zeroizing;

pub use self::claims::ClaimError;
use self::claims::Claims;
pub(crate) use self::claims::claimed_as;
use self::etcd::{Etcd, Trouble};
use self::key::{Key, Keys};
pub use self::news::News;
use self::news::RowNews;
use self::offers::Offers;
pub use self::record::{RouterEntry, Served};
pub use self::view::ByRouter;
use self::view::View;
use crate::Clock;
use crate::registration::Place;
use crate::store::{MemberKey, Store};

/// Routers of one cluster: each host registers with every one of them.
pub const ROUTERS_MAX: usize = 7;

/// Numbers of fenced names that a cluster gives are above those of a router by itself: it may become one of several.
const FENCES_OF_CLUSTER: u64 = 1 << 48;

/// Registrations with other routers that were heard of longer ago count no more at a start without etcd.
const VIEW_AGE_MAX_S: u64 = 3600;

/// Where etcd is, and what is this cluster's in it.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// `http://HOST:PORT` or `https://HOST:PORT`, one for each member of etcd; at least one.
    pub endpoints: Vec<String>,
    /// What all keys begin with.
    pub prefix: String,
    /// User and password.
    pub user: Option<(String, Zeroizing<String>)>,
    /// Who signs for etcd's members, PEM.
    pub ca: Option<PathBuf>,
    /// This router's certificate and key for etcd, PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// How it stands with etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterState {
    /// A member of etcd answers, and this router follows every change.
    pub is_connected: bool,
    /// Which member.
    pub endpoint: String,
    /// Why not.
    pub why: String,
    /// Since when, in seconds since 1970.
    pub since_unix_s: u64,
}

/// For metrics.
#[derive(Debug, Default)]
struct Counts {
    losses: AtomicU64,
    rereads: AtomicU64,
    published: AtomicU64,
    agreed: AtomicU64,
    outdated: AtomicU64,
    refused: AtomicU64,
}

struct Shared {
    config: ClusterConfig,
    router: RouterEntry,
    store: Arc<Store>,
    clock: Clock,
    view: Mutex<View>,
    /// The view is etcd's, or what it was when this router heard of it last.
    is_informed: AtomicBool,
    offers: Mutex<Offers>,
    dirty: Notify,
    /// The others, and hosts, may be told of this router.
    is_announced: AtomicBool,
    /// It is drained.
    is_leaving: AtomicBool,
    /// Which names for one host alone this router has given.
    claims: Mutex<Claims>,
    /// While it answers; with the lease under which this router writes.
    client: Mutex<Option<(Etcd, i64)>>,
    state: watch::Sender<ClusterState>,
    /// Rises when routers or their hosts are others.
    changes: watch::Sender<u64>,
    /// Rises when rows of shared tables are others.
    rows: watch::Sender<u64>,
    /// What the router has not been told of these yet.
    news: Mutex<News>,
    row_news: Mutex<RowNews>,
    stopping: watch::Sender<bool>,
    counts: Counts,
}

impl Shared {
    fn connected(&self, etcd: Etcd, lease: i64) {
        let endpoint = etcd.endpoint().to_owned();
        tracing::info!(endpoint, "etcd answers; this router follows it");
        *self.client.lock() = Some((etcd, lease));
        let since_unix_s = self.clock.unix_s();
        self.state.send_replace(ClusterState { is_connected: true, endpoint, why: String::new(), since_unix_s });
    }

    fn lost(&self, trouble: &Trouble) {
        let why = trouble.to_string();
        let since_unix_s = self.clock.unix_s();
        self.state.send_if_modified(|state| {
            if state.is_connected || state.why.is_empty() {
                tracing::warn!(why, "etcd is away; this router goes on with what it knows");
                self.counts.losses.fetch_add(1, Ordering::Relaxed);
                *state = ClusterState { is_connected: false, endpoint: String::new(), why, since_unix_s };
                return true;
            }
            // It is still the same absence.
            let is_new = state.why != why;
            state.why = why;
            is_new
        });
    }

    /// Why nobody can be asked.
    fn away(&self) -> String {
        match self.state.borrow().why.clone() {
            why if why.is_empty() => "this router has not reached etcd yet".to_owned(),
            why => why,
        }
    }

    fn tell(&self, news: News) {
        if !news.is_empty() {
            self.news.lock().add(news);
            self.changes.send_modify(|version| *version = version.wrapping_add(1));
        }
    }

    fn tell_rows(&self, news: RowNews) {
        self.row_news.lock().add(news);
        self.rows.send_modify(|version| *version = version.wrapping_add(1));
    }
}

/// This router's part in a cluster.
pub struct Cluster {
    shared: Arc<Shared>,
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cluster({})", self.shared.config.prefix)
    }
}

impl Cluster {
    /// Takes part until [`stop`](Self::stop), as soon as etcd answers. From now on the store's shared tables change by
    /// common consent alone.
    pub fn start(config: ClusterConfig, router: RouterEntry, store: Arc<Store>, clock: Clock) -> Arc<Self> {
        let since_unix_s = clock.unix_s();
        let (view, news) = kept_view(&config, &store, since_unix_s);
        let first = ClusterState { is_connected: false, endpoint: String::new(), why: String::new(), since_unix_s };
        let shared = Arc::new(Shared {
            config,
            router,
            store: Arc::clone(&store),
            clock,
            is_informed: AtomicBool::new(!view.is_empty()),
            view: Mutex::new(view),
            offers: Mutex::default(),
            dirty: Notify::new(),
            is_announced: AtomicBool::default(),
            is_leaving: AtomicBool::default(),
            claims: Mutex::default(),
            client: Mutex::default(),
            state: watch::channel(first).0,
            changes: watch::Sender::default(),
            rows: watch::Sender::default(),
            news: Mutex::new(news),
            row_news: Mutex::default(),
            stopping: watch::channel(false).0,
            counts: Counts::default(),
        });
        let (desk, clerk) = clerk::open(Arc::clone(&shared));
        store.set_agreement(Arc::new(desk));
        let tasks = Mutex::new(vec![tokio::spawn(session::run(Arc::clone(&shared))), tokio::spawn(clerk)]);
        Arc::new(Self { shared, tasks })
    }

    /// How it stands with etcd now.
    pub fn state(&self) -> ClusterState {
        self.shared.state.borrow().clone()
    }

    /// Told of every change of it.
    pub fn state_changes(&self) -> watch::Receiver<ClusterState> {
        self.shared.state.subscribe()
    }

    /// What its keys begin with.
    pub fn prefix(&self) -> &str {
        &self.shared.config.prefix
    }

    /// This router.
    pub fn router(&self) -> &RouterEntry {
        &self.shared.router
    }

    /// Whether what is known of the others was ever heard from etcd.
    pub fn is_informed(&self) -> bool {
        self.shared.is_informed.load(Ordering::Relaxed)
    }

    /// All routers that are known, this one among them, at most [`ROUTERS_MAX`].
    pub fn routers(&self) -> Vec<RouterEntry> {
        let view = self.shared.view.lock();
        let others = view.routers().filter(|entry| entry.id() != self.shared.router.id());
        std::iter::once(&self.shared.router).chain(others).take(ROUTERS_MAX).cloned().collect()
    }

    /// What has changed since this was asked last; and what those hosts have registered with other routers now.
    pub fn take_news(&self) -> (News, Vec<(Place, ByRouter)>) {
        let news = std::mem::take(&mut *self.shared.news.lock());
        let view = self.shared.view.lock();
        let hosts = news.places.iter().map(|place| (*place, self.elsewhere(&view, place))).collect();
        (news, hosts)
    }

    fn elsewhere(&self, view: &View, place: &Place) -> ByRouter {
        let others = view.served(place).filter(|(router, _)| *router != self.shared.router.id());
        others.map(|(router, served)| (router, served.to_vec())).collect()
    }

    /// Members that have changed since this was asked last, and whether anybody was put out.
    pub fn take_row_news(&self) -> (BTreeMap<Place, MemberKey>, bool) {
        let RowNews { members, revoked } = std::mem::take(&mut *self.shared.row_news.lock());
        (members, revoked)
    }

    /// Told when routers, or hosts that are registered with them, are others.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    /// Told when members, tokens, names or revocations are others.
    pub fn row_changes(&self) -> watch::Receiver<u64> {
        self.shared.rows.subscribe()
    }

    /// Lets the others, and through them all hosts, know of this router: it can let hosts in.
    pub fn announce(&self) {
        self.shared.is_announced.store(true, Ordering::Relaxed);
        self.shared.dirty.notify_one();
    }

    /// Lets the others know whether this router wants to be asked no more.
    pub fn set_leaving(&self, is_leaving: bool) {
        self.shared.is_leaving.store(is_leaving, Ordering::Relaxed);
        self.shared.dirty.notify_one();
    }

    /// Takes another router out: nobody is told of it any more. What it had written down under its lease ends with
    /// that. One that still lives writes itself down again.
    ///
    /// # Errors
    ///
    /// Etcd cannot be asked, and why.
    pub async fn remove(&self, router: HostId) -> Result<(), String> {
        let connected = self.shared.client.lock().clone();
        let Some((mut etcd, _)) = connected else { return Err(self.shared.away()) };
        etcd.put_all(&[(Key::Router(router), None)], None).await.map_err(|trouble| trouble.to_string())
    }

    /// Says what a host has registered with this router now; nothing: it is gone. No other host gets a name that is
    /// `kept` for it.
    pub fn offer(&self, place: Place, served: &[Served], kept: &BTreeSet<Prefix>) {
        let offer = (!served.is_empty()).then(|| record::write_served(served));
        self.shared.offers.lock().offer(place, offer);
        let alone = served.iter().filter(|served| served.exclusive);
        let alone = alone.map(|served| claimed_as(&served.instance.prefix)).chain(kept.iter().copied());
        self.shared.claims.lock().hold(place, alone.collect());
        self.shared.dirty.notify_one();
    }

    /// Gives a name to one host alone, by common consent of all routers. What is not registered after is
    /// [released](Self::release).
    ///
    /// # Errors
    ///
    /// Another host has it; or nobody can be asked, and it is not known to be this host's.
    pub async fn claim(&self, prefix: &Prefix, host: HostId) -> Result<(), ClaimError> {
        let (prefix, router) = (claimed_as(prefix), self.shared.router.id());
        let connected = self.shared.client.lock().clone();
        self.shared.claims.lock().ask(prefix);
        let asked = match connected {
            Some((mut etcd, lease)) => {
                etcd.claim((&prefix, host), router, lease).await.map_err(|trouble| trouble.to_string())
            }
            None => Err(self.shared.away()),
        };
        let given = asked.as_ref().ok().and_then(|given| given.ok()).map(|revision| (host, revision));
        self.shared.claims.lock().asked(prefix, given);
        self.shared.dirty.notify_one();
        match asked {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(holder)) => Err(ClaimError::Held(holder)),
            Err(_) if self.shared.view.lock().holder(&prefix) == Some(host) => {
                self.shared.claims.lock().keep(prefix, host);
                Ok(())
            }
            Err(why) => Err(ClaimError::Away(why)),
        }
    }

    /// Whether this router's own host may have a name for itself. It is claimed as soon as it is
    /// [offered](Self::offer), so that another router's host that asks at the same moment may get it all the same; then
    /// this says so.
    ///
    /// # Errors
    ///
    /// Another host has it; or nobody can be asked, and it is not known to be this host's.
    pub fn check_own_claim(&self, prefix: &Prefix, host: HostId) -> Result<(), ClaimError> {
        let is_connected = self.shared.state.borrow().is_connected;
        match self.shared.view.lock().holder(&claimed_as(prefix)) {
            Some(holder) if holder == host => Ok(()),
            _ if !is_connected => Err(ClaimError::Away(self.shared.away())),
            Some(holder) => Err(ClaimError::Held(holder)),
            None => Ok(()),
        }
    }

    /// A number for a host that has a name for itself by this router: higher than that of any earlier one, whatever
    /// router gave it. `None`: etcd has not been told of it yet.
    pub fn fence_number(&self, prefix: &Prefix, host: HostId) -> Option<u64> {
        let revision = self.shared.claims.lock().revision(&claimed_as(prefix), host)?;
        u64::try_from(revision).ok().map(|revision| FENCES_OF_CLUSTER | revision)
    }

    /// A host to which this router has given a name for itself has not registered it.
    pub fn release(&self, prefix: &Prefix, host: HostId) {
        self.shared.claims.lock().release(&claimed_as(prefix), host);
        self.shared.dirty.notify_one();
    }

    /// For metrics: what has happened, and how often.
    pub fn counts(&self) -> [(&'static str, u64); 6] {
        let counts = &self.shared.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        [
            ("lost", of(&counts.losses)),
            ("reread", of(&counts.rereads)),
            ("published", of(&counts.published)),
            ("agreed", of(&counts.agreed)),
            ("outdated", of(&counts.outdated)),
            ("refused", of(&counts.refused)),
        ]
    }

    /// Takes no part any more; what is registered here is taken out of etcd.
    pub async fn stop(&self) {
        self.shared.stopping.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for task in tasks {
            if task.await.is_err() {
                tracing::error!("the cluster's part ended badly");
            }
        }
    }
}

/// What this router knew of the others when it heard of them last. Routers stay where they are; hosts come and go, and
/// of those that were registered long ago nothing is known.
fn kept_view(config: &ClusterConfig, store: &Store, unix_s: u64) -> (View, News) {
    let (mut view, mut news) = (View::default(), News::default());
    match store.kept_view() {
        Ok((heard_s, kept)) => {
            let keys = Keys::new(&config.prefix);
            let is_fresh = unix_s.saturating_sub(heard_s) <= VIEW_AGE_MAX_S;
            let read = kept.into_iter().filter_map(|(key, value)| Some((keys.read(key.as_bytes())?, value)));
            news = view.replace(read.filter(|(key, _)| is_fresh || matches!(key, Key::Router(_))));
        }
        Err(error) => tracing::warn!(%error, "what was known of other routers cannot be read"),
    }
    (view, news)
}
