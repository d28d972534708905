//! A router of a cluster, in step with the others: what is registered here is told, what is registered there is taken
//! up; hosts learn of all routers; members and grants that others have changed hold here, too.
//!
//! Routers register with each other, the one with the lower host-ID with the other one: so that they share a hop key,
//! and each knows within a second when another is gone.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use margay_core::key::HostId;
use tokio::sync::{Notify, watch};

use super::host::{Home, HomeConfig, Phase};
use super::proto::{self, from_router};
use super::roll::Place;
use super::router::{News, Router, Shared};
use crate::cluster::{Cluster, RouterEntry};
use crate::keyring::Authority;
use crate::lineage::LineageError;
use crate::pins::pin_statements;
use crate::store::{MemberKey, StoreError};
use crate::warrant::{believed, lineages};

/// Goes on until it is dropped. Does nothing on a router by itself.
pub(super) async fn follow(shared: Arc<Shared>) {
    let Some(cluster) = shared.config.cluster.clone() else { return };
    let (mut changes, mut rows, mut state) = (cluster.changes(), cluster.row_changes(), cluster.state_changes());
    let mut rolls = shared.roll.lock().changes();
    rolls.mark_changed();
    changes.mark_changed();
    rows.mark_changed();
    state.mark_changed();
    let mut links = Links::default();
    loop {
        tokio::select! {
            // What is sent lives in what this holds.
            _ = rolls.changed() => {
                let untold: Vec<_> = {
                    let mut roll = shared.roll.lock();
                    let untold = roll.untold();
                    untold.into_iter().map(|(place, served)| (place, served, roll.kept_fences(&place))).collect()
                };
                untold.iter().for_each(|(place, served, kept)| cluster.offer(*place, served, kept));
                links.show(&shared);
            }
            _ = changes.changed() => {
                let (news, hosts) = cluster.take_news();
                if news.routers {
                    links.follow(&shared, &cluster);
                    tell_hosts(&shared, &cluster);
                }
                shared.roll.lock().hear_elsewhere(hosts, &*shared.sal);
                shared.give_away(news.lost);
                shared.fence_own();
                links.show(&shared);
            }
            _ = rows.changed() => {
                let (members, revoked) = cluster.take_row_news();
                take_up(&shared, members, revoked).await;
            }
            _ = state.changed() => {
                let is_connected = state.borrow_and_update().is_connected;
                shared.roll.lock().set_away(!is_connected, &*shared.sal);
                if is_connected || !links.may_open {
                    links.open(&shared, &cluster).await;
                }
            }
            () = links.changed.notified() => links.show(&shared),
            () = shared.signs.notified() => {
                links.open(&shared, &cluster).await;
            }
        }
    }
}

/// Where hosts register. Who knows nobody yet says nothing: hosts would take the others for gone.
fn tell_hosts(shared: &Shared, cluster: &Cluster) {
    if !cluster.is_informed() {
        return;
    }
    let of = |router: RouterEntry| proto::ClusterRouter { key: router.key.0.to_vec(), address: router.address };
    let routers: Vec<_> = cluster.routers().into_iter().map(of).collect();
    shared.routers.send_if_modified(|known| {
        let is_new = *known != routers;
        *known = routers;
        is_new
    });
}

/// As a host hears it; a router by itself says nothing.
pub(super) fn told(routers: &[proto::ClusterRouter]) -> Vec<proto::FromRouter> {
    if routers.is_empty() {
        return Vec::new();
    }
    let routers = proto::Routers { routers: routers.to_vec() };
    vec![proto::FromRouter { body: Some(from_router::Body::Routers(routers)) }]
}

/// Members, grants or revocations were changed by others. Hosts that are not registered here are no concern.
async fn take_up(shared: &Arc<Shared>, members: BTreeMap<Place, MemberKey>, revoked: bool) {
    let concerned: Vec<_> = {
        let roll = shared.roll.lock();
        members.into_iter().filter(|(place, _)| roll.has(place)).collect()
    };
    if concerned.is_empty() && !revoked {
        return;
    }
    let this = Arc::clone(shared);
    let looked = tokio::task::spawn_blocking(move || {
        if revoked {
            this.read_revocations()?;
        }
        for (place, key) in &concerned {
            if this.store.member(key)?.is_none() {
                tracing::info!(host = %place.host, "put out by another router");
                this.roll.lock().expel(place.host, &*this.sal);
            }
        }
        if !concerned.is_empty() {
            this.grants.send_modify(|version| *version = version.wrapping_add(1));
        }
        Ok::<_, LineageError>(())
    });
    match looked.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "what other routers have changed is not looked at"),
        Err(_) => tracing::error!("looking at what other routers have changed ended badly"),
    }
}

/// Takes up the keys that may sign no longer, whoever has said so: an operator here, another router of the cluster, or
/// one that this host has joined. Goes on until it is dropped.
pub(super) async fn follow_keys(shared: Arc<Shared>) {
    let mut changes = shared.store.key_changes();
    while changes.changed().await.is_ok() {
        let this = Arc::clone(&shared);
        match tokio::task::spawn_blocking(move || this.read_revocations()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "revocations cannot be read"),
            Err(_) => tracing::error!("reading revocations ended badly"),
        }
    }
}

/// This router is a member of its authorities, so that the others let it in; false: of none, or they do not know it
/// yet.
async fn enrol(shared: &Arc<Shared>) -> bool {
    let this = Arc::clone(shared);
    let enrolled = tokio::task::spawn_blocking(move || {
        let (host, unix_s) = (this.local.host_key.public(), this.clock.unix_s());
        let authorities = this.authorities();
        for authority in &authorities {
            let key = MemberKey { host, authority: authority.block() };
            this.store.enrol(&key, &authority.name, &this.local.host_name, unix_s)?;
        }
        Ok::<_, StoreError>(!authorities.is_empty())
    });
    match enrolled.await {
        Ok(Ok(is_member)) => return is_member,
        Ok(Err(error)) => tracing::info!(%error, "the other routers do not know this one as a member yet"),
        Err(_) => tracing::error!("becoming a member ended badly"),
    }
    false
}

impl Shared {
    /// Takes up who was put out and which keys may sign no longer, for this host and for those that are told.
    pub fn read_revocations(&self) -> Result<(), LineageError> {
        let unix_s = self.clock.unix_s();
        pin_statements(&self.keyring, &self.store, unix_s)?;
        let (hosts, keys) = (self.store.revocations(unix_s)?, believed(&self.keyring, &self.store, unix_s)?);
        let lines = lineages(&self.keyring, &self.store)?.into_values();
        // Also the way to the key that this router begins with, for hosts that know one before it.
        let successions = self.store.successions()?;
        for (_, line) in lines {
            line.teach(&*self.sal);
            self.area.iter().for_each(|area| line.teach_area(area));
        }
        for revocation in &hosts {
            self.sal.revoke(*revocation);
            self.area.iter().for_each(|area| area.revoke(*revocation));
        }
        for revocation in &keys {
            self.sal.revoke_key(*revocation);
            self.area.iter().for_each(|area| area.revoke_key(*revocation));
            match self.keyring.give_up(revocation) {
                Ok(true) => {
                    tracing::warn!("the authority has taken back this router's right to sign; `margay id` says more")
                }
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, "a key that may sign no longer is not given up"),
            }
        }
        let chains = self.store.chains()?;
        self.news.send_replace(News { hosts, revoked: keys, successions, chains });
        Ok(())
    }

    fn authorities(&self) -> Vec<Authority> {
        self.keyring.authorities().unwrap_or_else(|error| {
            tracing::warn!(%error, "the keys of authorities cannot be read");
            Vec::new()
        })
    }
}

impl Router {
    /// The key of an authority has come to this host.
    pub fn review_authorities(&self) {
        self.shared.signs.notify_one();
    }

    /// Other routers of the cluster that answer.
    pub fn links(&self) -> Vec<HostId> {
        self.shared.roll.lock().links()
    }
}

/// The streams to routers that this one registers with, and those of routers that register here.
#[derive(Default)]
struct Links {
    out: BTreeMap<HostId, (String, Home)>,
    others: Vec<HostId>,
    /// This router is a member: who asks earlier is told no.
    may_open: bool,
    changed: Arc<Notify>,
}

impl Links {
    /// As soon as this router can let hosts in, and is let in by the others, it is one of the cluster.
    async fn open(&mut self, shared: &Arc<Shared>, cluster: &Cluster) {
        self.may_open |= enrol(shared).await;
        if self.may_open {
            cluster.announce();
        }
        self.follow(shared, cluster);
    }

    /// Opens those that are not open, and ends those to routers that are none any more, or somewhere else.
    fn follow(&mut self, shared: &Arc<Shared>, cluster: &Cluster) {
        let me = cluster.router().id();
        let others: Vec<RouterEntry> = cluster.routers().into_iter().filter(|router| router.id() != me).collect();
        self.others = others.iter().map(RouterEntry::id).collect();
        self.out.retain(|id, (address, _)| others.iter().any(|one| one.id() == *id && one.address == *address));
        let authorities = shared.authorities();
        let Some(authority) = authorities.first().filter(|_| self.may_open) else { return };
        for router in others.into_iter().filter(|router| me < router.id()) {
            if self.out.contains_key(&router.id()) {
                continue;
            }
            let config = HomeConfig {
                router_address: router.address.clone(),
                router_key: router.key,
                authority: authority.name.clone(),
                authority_key: authority.root(),
                secret: None,
            };
            let (store, sal) = (Arc::clone(&shared.store), Arc::clone(&shared.sal));
            let home = Home::start(config, shared.local.clone(), store, sal, shared.clock.clone(), None, None);
            tokio::spawn(pass_on(home.changed(), Arc::clone(&self.changed)));
            self.out.insert(router.id(), (router.address, home));
        }
    }

    /// Tells the roll which of the other routers answer.
    fn show(&self, shared: &Shared) {
        let open = |(id, (_, home)): (&HostId, &(String, Home))| {
            let is_up = home.state().phase == Phase::Connected;
            home.router_at().filter(|_| is_up).map(|address| (*id, address))
        };
        let out = self.out.iter().filter_map(open);
        let mut roll = shared.roll.lock();
        let incoming = self.others.iter().filter_map(|id| Some((*id, roll.address_of(*id)?)));
        let links: BTreeMap<HostId, SocketAddr> = incoming.chain(out).collect();
        roll.set_links(links, &*shared.sal);
    }
}

async fn pass_on(mut changed: watch::Receiver<super::HomeState>, to: Arc<Notify>) {
    while changed.changed().await.is_ok() {
        to.notify_one();
    }
}
