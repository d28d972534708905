//! What a router does with etcd: connects, takes up what is there, writes down who is registered with it, and hears of
//! every change; and all of that again, with another member, when it cannot go on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use etcd_client::WatchStream;
use margay_core::key::HostId;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::Shared;
use super::etcd::{BATCH_BYTES_MAX, BATCH_MAX, Etcd, Heard, Trouble};
use super::key::{Key, Keys};
use super::news::{News, RowNews};
use super::offers::Offer;
use super::pause::Pauses;
use super::record::{RouterEntry, write_router};
use crate::entropy;
use crate::registration::Place;
use crate::store::{Marks, Row, SharedTable, ViewChanges, written_of};

/// Silence after which etcd takes a router for gone, with all that is registered with it.
const LEASE_S: i64 = 9;
/// How often the lease is renewed, which also shows whether etcd still answers.
const RENEWAL: Duration = Duration::from_secs(1);
/// Registrations of so long are written at once.
const GATHER: Duration = Duration::from_millis(10);
/// Renewals after which it is written down that what is known is still so.
const RENEWALS_KEPT: u32 = 30;
const GOODBYE_LIMIT: Duration = Duration::from_millis(500);

/// What outlives one connection.
#[derive(Default)]
struct Past {
    /// Which cluster, and all changes of it that were heard.
    followed: Option<Marks>,
    /// The lease under which the registrations are.
    lease: Option<i64>,
    /// What was heard and is not on the disk yet.
    unkept: ViewChanges,
}

/// Goes on until the cluster is left.
pub async fn run(shared: Arc<Shared>) {
    let (mut past, mut stopping) = (Past::default(), shared.stopping.subscribe());
    let members = &shared.config.endpoints;
    let (mut turn, mut pauses) = (0, Pauses::new(members.len()));
    loop {
        let endpoint = &members[turn % members.len()];
        let held = hold(&shared, endpoint, &mut past);
        let (trouble, lasted) = tokio::select! {
            ended = held => ended,
            // The sender lives as long as the cluster.
            _ = stopping.wait_for(|stopping| *stopping) => break,
        };
        keep_rest(&shared, &mut past).await;
        let next = pauses.after(&trouble, lasted);
        if next.is_anew {
            tracing::info!(%trouble, "etcd");
            past.followed = None;
            shared.counts.rereads.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(count) = next.unsettled {
            shared.lost(&Trouble::Unsettled(endpoint.clone(), count, trouble.to_string()));
        }
        if next.is_other_member {
            shared.lost(&trouble);
            turn += 1;
        }
        tokio::select! {
            () = sleep(entropy::jittered(next.pause)) => {}
            _ = stopping.wait_for(|stopping| *stopping) => break,
        }
    }
    keep_rest(&shared, &mut past).await;
    // Whoever was registered here is gone with us; without a word, the lease would say it later.
    let connected = shared.client.lock().take();
    if let (Some((mut etcd, _)), Some(lease)) = (connected, past.lease) {
        let goodbye = tokio::time::timeout(GOODBYE_LIMIT, etcd.end_lease(lease));
        if !matches!(goodbye.await, Ok(Ok(()))) {
            tracing::debug!("etcd was not told that this router goes");
        }
    }
}

/// One connection; gives why it ended, and how long there was one.
async fn hold(shared: &Arc<Shared>, endpoint: &str, past: &mut Past) -> (Trouble, Option<Duration>) {
    let (mut session, mut watch) = match Session::open(shared, endpoint, past).await {
        Ok(opened) => opened,
        Err(trouble) => return (trouble, None),
    };
    let begun = Instant::now();
    shared.connected(session.etcd.clone(), session.lease);
    let trouble = match session.go_on(&mut watch).await {
        Ok(never) => match never {},
        Err(trouble) => trouble,
    };
    shared.client.lock().take();
    (trouble, Some(begun.elapsed()))
}

/// What never is: a connection ends by trouble alone.
enum Never {}

struct Session<'a> {
    shared: &'a Arc<Shared>,
    past: &'a mut Past,
    etcd: Etcd,
    keys: Keys,
    lease: i64,
    marks: Marks,
    renewals: u32,
}

impl<'a> Session<'a> {
    async fn open(shared: &'a Arc<Shared>, endpoint: &str, past: &'a mut Past) -> Result<(Self, WatchStream), Trouble> {
        let (mut etcd, revision, number) = Etcd::connect(&shared.config, endpoint).await?;
        let cluster = match number {
            Some(number) => number,
            None => found(&mut etcd).await?,
        };
        let keys = Keys::new(&shared.config.prefix);
        // An older copy of etcd's may have been put back, or another cluster's be there.
        let is_same = |marks: &Marks| marks.cluster == cluster && marks.revision <= revision;
        let marks = match past.followed.filter(is_same) {
            Some(marks) => marks,
            None => {
                let marks = take_over(shared, &mut etcd, &keys, cluster, revision).await?;
                past.unkept.clear();
                past.followed = Some(marks);
                marks
            }
        };
        let watch = etcd.watch(marks.revision).await?;
        let lease = etcd.lease(LEASE_S).await?;
        let former = past.lease.replace(lease);
        let mut this = Self { shared, past, etcd, keys, lease, marks, renewals: 0 };
        this.introduce().await?;
        if let Some(former) = former
            && let Err(trouble) = this.etcd.end_lease(former).await
        {
            // It has ended by itself, mostly.
            tracing::debug!(%trouble, "the former lease");
        }
        Ok((this, watch))
    }

    /// Writes down who is registered with this router; what an earlier start left behind goes.
    async fn introduce(&mut self) -> Result<(), Trouble> {
        let left_behind: Vec<Place> = self.shared.view.lock().places_of(self.shared.router.id()).copied().collect();
        self.shared.offers.lock().begin(left_behind);
        self.shared.claims.lock().begin();
        self.publish().await
    }

    async fn put(&mut self, mut entries: Vec<(Key, Option<Vec<u8>>)>) -> Result<(), Trouble> {
        while !entries.is_empty() {
            let mut bytes = 0;
            let fits = |(_, value): &&(Key, Option<Vec<u8>>)| {
                bytes += value.as_ref().map_or(0, Vec::len);
                bytes <= BATCH_BYTES_MAX
            };
            let count = entries.iter().take(BATCH_MAX).take_while(fits).count().max(1);
            let rest = entries.split_off(count);
            self.etcd.put_all(&entries, Some(self.lease)).await?;
            entries = rest;
        }
        Ok(())
    }

    /// Writes down what is other than it was written last.
    async fn publish(&mut self) -> Result<(), Trouble> {
        let me = self.shared.router.id();
        let is_leaving = self.shared.is_leaving.load(Ordering::Relaxed);
        let router = RouterEntry { is_leaving, ..self.shared.router.clone() };
        let is_known = self.shared.view.lock().router(me) == Some(&router);
        if !is_known && self.shared.is_announced.load(Ordering::Relaxed) {
            self.etcd.put_all(&[(Key::Router(me), Some(write_router(&router)))], None).await?;
        }
        let due = self.shared.offers.lock().due();
        self.shared.counts.published.fetch_add(due.len() as u64, Ordering::Relaxed);
        let entry = |(place, offer): &(Place, Offer)| (Key::Host(me, *place), offer.as_deref().map(<[u8]>::to_vec));
        self.put(due.iter().map(entry).collect()).await?;
        self.shared.offers.lock().wrote(due);
        self.publish_claims().await
    }

    /// Writes down which names for one host alone this router has given, and which no more.
    async fn publish_claims(&mut self) -> Result<(), Trouble> {
        let (due, me, mut lost) = (self.shared.claims.lock().due(), self.shared.router.id(), BTreeSet::new());
        let claims = !due.claim.is_empty();
        for (prefix, revision) in due.release {
            self.etcd.release(&prefix, me, revision).await?;
        }
        let mut renewed = Instant::now();
        for (prefix, host) in due.claim {
            match self.etcd.claim((&prefix, host), me, self.lease).await? {
                Ok(revision) => drop(self.shared.claims.lock().heard(prefix, Some(host), revision)),
                // While this router could not be heard, another one gave it away.
                Err(_) => {
                    self.shared.claims.lock().release(&prefix, host);
                    lost.insert((prefix, host));
                }
            }
            if renewed.elapsed() > RENEWAL {
                self.etcd.renew(self.lease).await?;
                renewed = Instant::now();
            }
        }
        self.shared.tell(News { lost, claims, ..News::default() });
        Ok(())
    }

    async fn go_on(&mut self, watch: &mut WatchStream) -> Result<Never, Trouble> {
        let mut renewals = interval(RENEWAL);
        renewals.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // Changes that come without a pause do not wait for ever.
        let mut gathered_until: Option<Instant> = None;
        loop {
            let gathering = async {
                match gathered_until {
                    Some(until) => tokio::time::sleep_until(until).await,
                    None => self.shared.dirty.notified().await,
                }
            };
            tokio::select! {
                heard = self.etcd.heard(watch) => {
                    let heard = heard?;
                    self.take(heard).await?;
                }
                () = gathering => match gathered_until.take() {
                    Some(_) => self.publish().await?,
                    None => gathered_until = Some(Instant::now() + GATHER),
                },
                _ = renewals.tick() => {
                    self.etcd.renew(self.lease).await?;
                    self.keep().await?;
                }
            }
        }
    }

    /// For a start without etcd.
    async fn keep(&mut self) -> Result<(), Trouble> {
        self.renewals = (self.renewals + 1) % RENEWALS_KEPT;
        if self.past.unkept.is_empty() && self.renewals != 0 {
            return Ok(());
        }
        keep(self.shared, std::mem::take(&mut self.past.unkept), false).await
    }

    async fn take(&mut self, heard: Heard) -> Result<(), Trouble> {
        let (mut rows, mut news, me) = (Vec::new(), News::default(), self.shared.router.id());
        let mut is_lost = false;
        for (key, value, revision) in heard.events {
            if matches!(key, Key::Router(_) | Key::Host(..) | Key::Claim(..)) {
                self.past.unkept.insert(self.keys.written(&key), value.clone());
            }
            match key {
                Key::Cluster => {
                    let same = self.marks.cluster.to_be_bytes();
                    if value.as_deref() != Some(&same[..]) {
                        return Err(Trouble::Replaced(self.etcd.endpoint().to_owned()));
                    }
                }
                Key::Row(table, key) => rows.push((table, key, value)),
                Key::Host(router, place) if router == me => {
                    // Somebody else's hand, or the end of a former lease.
                    is_lost |= self.shared.offers.lock().heard(place, value.as_deref());
                    news.add(self.shared.view.lock().apply(&key, value.as_deref()));
                }
                Key::Claim(prefix, router) if router == me => {
                    let host = value.as_deref().and_then(|value| value.try_into().ok()).map(HostId);
                    is_lost |= self.shared.claims.lock().heard(prefix, host, revision);
                    news.add(self.shared.view.lock().apply(&key, value.as_deref()));
                }
                Key::Router(_) | Key::Host(..) | Key::Claim(..) => {
                    news.add(self.shared.view.lock().apply(&key, value.as_deref()));
                }
            }
        }
        self.marks.revision = self.marks.revision.max(heard.revision);
        if !rows.is_empty() {
            follow(self.shared, rows, self.marks).await?;
        }
        self.past.followed = Some(self.marks);
        if is_lost {
            self.shared.dirty.notify_one();
        }
        self.shared.tell(news);
        Ok(())
    }
}

/// Gives a cluster its number; another router may be faster.
async fn found(etcd: &mut Etcd) -> Result<u64, Trouble> {
    let mut rng = entropy::rng().map_err(|error| Trouble::Configuration(error.to_string()))?;
    let number = u64::from_be_bytes(rng.bytes()).max(1);
    if etcd.create(&Key::Cluster, number.to_be_bytes().to_vec()).await? {
        tracing::info!("this router is the first of its cluster: what it knows of members becomes all routers'");
        return Ok(number);
    }
    Err(Trouble::Replaced(etcd.endpoint().to_owned()))
}

/// Makes what is here and what is in etcd one. On a router that was by itself until now, or follows another cluster,
/// what it alone knows is given to all; else etcd's word counts. Names are given in any case: none is ever taken back.
async fn take_over(
    shared: &Arc<Shared>,
    etcd: &mut Etcd,
    keys: &Keys,
    cluster: u64,
    revision: i64,
) -> Result<Marks, Trouble> {
    let known = shared.store.replica_marks()?;
    let is_new = known.cluster != cluster || known.revision > revision;
    for table in SharedTable::ALL.into_iter().filter(|table| is_new || *table == SharedTable::Names) {
        let theirs: BTreeMap<Key, Vec<u8>> = etcd.read_all(&keys.table(table), 0).await?.into_iter().collect();
        let ours = shared.store.shared_rows(table)?.into_iter().map(|(row, value)| (Key::Row(table, row), value));
        let missing: Vec<_> = ours.filter(|(key, _)| !theirs.contains_key(key)).collect();
        for batch in missing.chunks(BATCH_MAX / 2) {
            if !etcd.create_all(batch).await? {
                // Another router gives some of the same: looked at anew.
                return Err(Trouble::Replaced(etcd.endpoint().to_owned()));
            }
        }
        if !missing.is_empty() {
            tracing::info!(rows = missing.len(), table = table.label(), "given to the cluster");
        }
    }
    let marks = Marks { cluster, revision: etcd.revision().await? };
    let mut rows: Vec<Row> = Vec::new();
    for table in SharedTable::ALL {
        let mut ours = shared.store.shared_rows(table)?;
        for (key, value) in etcd.read_all(&keys.table(table), marks.revision).await? {
            let Key::Row(_, row) = key else { continue };
            match ours.remove(&row) {
                Some(known) if known == value => continue,
                Some(known) if table == SharedTable::Names => {
                    let (known, value) = (String::from_utf8_lossy(&known), String::from_utf8_lossy(&value));
                    let (ours, theirs) = (written_of(&known), written_of(&value));
                    // Two hosts may have registered the same name.
                    if ours != theirs {
                        tracing::warn!(ours, theirs, "two names have the same bits; all routers keep the first one");
                    }
                }
                _ => {}
            }
            rows.push((table, row, Some(value)));
        }
        rows.extend(ours.into_keys().map(|row| (table, row, None)));
    }
    follow(shared, rows, marks).await?;
    let mut entries = etcd.read_all(&keys.routers(), marks.revision).await?;
    entries.extend(etcd.read_all(&keys.hosts(), marks.revision).await?);
    entries.extend(etcd.read_all(&keys.claims(), marks.revision).await?);
    let all = entries.iter().map(|(key, value)| (keys.written(key), Some(value.clone()))).collect();
    keep(shared, all, true).await?;
    let news = shared.view.lock().replace(entries);
    shared.is_informed.store(true, Ordering::Relaxed);
    // Also where it is what was known before: that is news.
    shared.tell(News { routers: true, ..news });
    Ok(marks)
}

/// A connection has ended: what was heard since the last look at the disk is the last that is known.
async fn keep_rest(shared: &Arc<Shared>, past: &mut Past) {
    let rest = std::mem::take(&mut past.unkept);
    if !rest.is_empty()
        && let Err(trouble) = keep(shared, rest, false).await
    {
        tracing::warn!(%trouble, "what was heard of other routers last is not kept");
    }
}

async fn keep(shared: &Arc<Shared>, changes: ViewChanges, is_all: bool) -> Result<(), Trouble> {
    let this = Arc::clone(shared);
    let kept = tokio::task::spawn_blocking(move || this.store.keep_view(&changes, is_all, this.clock.unix_s()));
    match kept.await {
        Ok(done) => Ok(done?),
        Err(_) => Err(Trouble::Configuration("the store ended badly; the log says why".to_owned())),
    }
}

async fn follow(shared: &Arc<Shared>, rows: Vec<Row>, marks: Marks) -> Result<(), Trouble> {
    let store = Arc::clone(&shared.store);
    let news = (!rows.is_empty()).then(|| RowNews::of(&rows));
    match tokio::task::spawn_blocking(move || store.follow(&rows, marks)).await {
        Ok(done) => done?,
        Err(_) => return Err(Trouble::Configuration("the store ended badly; the log says why".to_owned())),
    }
    news.into_iter().for_each(|news| shared.tell_rows(news));
    Ok(())
}
