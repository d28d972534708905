//! Several routers that are one: on a router, its part in that; on a host, registering with every one of them.

use std::sync::Arc;

use margay_control::Clock;
use margay_control::cluster::{Cluster, RouterEntry};
use margay_control::registration::{ClusterRouter, Home, HomeConfig, Local};
use margay_control::store::{Joined, Store};
use margay_control::token::{TokenHash, check_address};
use margay_core::name::authority_block;
use miette::{IntoDiagnostic, Result, miette};
use tokio::sync::{Notify, watch};

use super::{Agent, Host, api, home};
use crate::config::Config;

/// Of a router that a host was told of: it has used no token there.
const NO_TOKEN: TokenHash = TokenHash([0; 32]);

/// Where hosts find this router: as configured, or the first address of this host.
pub async fn address_of(config: &Config) -> Result<String, String> {
    match &config.router.address {
        Some(address) => Ok(address.clone()),
        None => api::router_address(config).await,
    }
}

/// A router's part in its cluster; `None` where it is by itself.
///
/// # Errors
///
/// The configuration names a file that cannot be read, or this host has no address.
pub async fn open(config: &Config, local: &Local, store: &Arc<Store>, clock: &Clock) -> Result<Option<Arc<Cluster>>> {
    let Some(section) = config.router.etcd.as_ref().filter(|_| config.router.enabled) else { return Ok(None) };
    let address = address_of(config).await.map_err(|why| miette!("{why}"))?;
    check_address(&address).into_diagnostic()?;
    let entry = RouterEntry { key: local.host_key.public(), address, name: local.host_name.clone(), is_leaving: false };
    let cluster = section.cluster().map_err(|why| miette!("{why}"))?;
    Ok(Some(Cluster::start(cluster, entry, Arc::clone(store), clock.clone())))
}

/// Registers with every router of the clusters that this host has joined, until it is aborted.
pub async fn follow(agent: Arc<Agent>) {
    let told = Arc::new(Notify::new());
    let mut heard: Vec<Arc<Home>> = Vec::new();
    let mut homes = agent.publishing.services.home_changes();
    loop {
        let known = homes.borrow_and_update().clone();
        for home in known {
            if !heard.iter().any(|known| Arc::ptr_eq(known, &home)) {
                tokio::spawn(pass_on(home.routers(), Arc::clone(&told)));
                heard.push(home);
            }
        }
        settle(&agent).await;
        tokio::select! {
            () = told.notified() => {}
            // A host joins while its agent runs. The sender lives in the services, which the agent holds.
            _ = homes.changed() => {}
        }
    }
}

async fn pass_on(mut routers: watch::Receiver<Vec<ClusterRouter>>, told: Arc<Notify>) {
    while routers.changed().await.is_ok() {
        told.notify_one();
    }
}

/// Registers with routers that this host was told of, and no more with those that are none any longer.
async fn settle(agent: &Arc<Agent>) {
    for home in agent.publishing.services.homes() {
        let told = home.routers().borrow().clone();
        if told.is_empty() || !home::is_connected(&home) {
            continue;
        }
        let of_authority = |known: &Arc<Home>| known.config().authority == home.config().authority;
        let known: Vec<Arc<Home>> = agent.publishing.services.homes().into_iter().filter(of_authority).collect();
        for router in &told {
            match known.iter().find(|known| known.config().router_key == router.key) {
                // It is there under whatever address, and may be reached by this host under no other.
                Some(known) if known.config().router_address == router.address || home::is_connected(known) => {}
                Some(known) => {
                    leave(agent, known).await;
                    join(agent, &home, router).await;
                }
                None => join(agent, &home, router).await,
            }
        }
        for gone in known.iter().filter(|known| told.iter().all(|router| router.key != known.config().router_key)) {
            if !home::is_connected(gone) && was_told(&agent.host, gone) {
                leave(agent, gone).await;
            }
        }
    }
}

async fn join(agent: &Arc<Agent>, by: &Arc<Home>, router: &ClusterRouter) {
    let HomeConfig { authority, authority_key, .. } = by.config().clone();
    let joined = Joined {
        router_key: router.key,
        router_address: router.address.clone(),
        authority,
        authority_key,
        joined_s: agent.host.clock.unix_s(),
        token: NO_TOKEN,
    };
    // Without the disk it is told again after the next start.
    if let Err(error) = tokio::task::block_in_place(|| agent.host.store.note_joined(&joined)) {
        tracing::warn!(%error, "a router of the cluster is not remembered");
    }
    let Joined { router_key, router_address, authority, authority_key, .. } = joined;
    tracing::info!(router = router_address, authority, "the cluster has this router, too");
    let config = HomeConfig { router_address, router_key, authority, authority_key, secret: None };
    home::add(agent, config);
}

async fn leave(agent: &Agent, home: &Arc<Home>) {
    let config = home.config();
    tracing::info!(router = config.router_address, "the cluster has this router no longer");
    agent.publishing.services.remove_home(home);
    home.stop().await;
    let authority = authority_block(&config.authority);
    let forgotten = tokio::task::block_in_place(|| agent.host.store.forget_joined(&config.router_key, authority));
    if let Err(error) = forgotten {
        tracing::warn!(%error, "a router that is gone is not forgotten");
    }
}

/// Whether a router is one of those that this host was told of, and has not joined by a token.
fn was_told(host: &Host, home: &Home) -> bool {
    let joined = tokio::task::block_in_place(|| host.store.joined()).unwrap_or_default();
    let config = home.config();
    joined.iter().any(|joined| {
        joined.router_key == config.router_key && joined.authority == config.authority && joined.token == NO_TOKEN
    })
}
