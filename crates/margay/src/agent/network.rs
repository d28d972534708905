//! The host's interfaces, addresses and routes: followed as they change, and told to whom they matter. The core tells
//! the peers (docs/decisions/0018).

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use margay_datapath::segments::Segment;
use tokio::sync::Mutex;

use super::host_changes::HostChanges;
use super::{Agent, stack_rules};
use crate::host::card::Card;
use crate::host::{self, netlink};

/// After the kernel's word was lost.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// What was told last, and what `up` has made.
#[derive(Default)]
pub struct Network {
    told: Mutex<Told>,
    /// Whether it stays so.
    pub host_changes: HostChanges,
}

#[derive(Default)]
struct Told {
    /// Whether there was a look before.
    looked: bool,
    addresses: Vec<IpAddr>,
    interfaces: Vec<u32>,
    cards: Vec<Card>,
    segments: Vec<Segment>,
    /// From which address the kernel sends to each peer's.
    routes: HashMap<IpAddr, Option<IpAddr>>,
}

/// What a look is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// The kernel says that something has changed: every route may be another.
    Changed,
    /// Nothing is known to have changed: only addresses of peers that are new are asked for.
    Routine,
}

/// Goes on until it is aborted.
pub async fn follow(agent: Arc<Agent>) {
    loop {
        match netlink::changes() {
            Ok(mut changes) => {
                while changes.next().await.is_some() {
                    // What comes in one go is one change: an address brings routes with it.
                    while let Some(Some(())) = changes.next().now_or_never() {}
                    refresh(&agent, Look::Changed).await;
                }
                tracing::warn!("the kernel's word of changes of this host's network is lost; looking again");
            }
            Err(error) => {
                tracing::warn!(%error, "this host's network is looked at every two seconds, and not heard of")
            }
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }
}

/// The segments that are asked over, where they are others now.
async fn follow_segments(agent: &Agent, told: &mut Vec<Segment>) {
    let set = match host::segments(agent.config().ranges()).await {
        Ok(segments) if *told == segments => Ok(()),
        Ok(segments) => {
            told.clone_from(&segments);
            agent.core.0.set_segments(segments)
        }
        Err(error) => Err(error),
    };
    if let Err(error) = set {
        tracing::warn!(%error, "questions to all hosts of a network segment are not heard everywhere");
    }
}

/// Looks, and tells what has changed.
pub async fn refresh(agent: &Agent, look: Look) {
    // One look at a time: an older one must not have the last word.
    let mut told = agent.kernel.network.told.lock().await;
    let config = agent.config();
    let looks = (
        host::placed(config.ranges()).await,
        host::interfaces().await,
        host::card::cards(config.inside.as_deref(), config.ranges()).await,
    );
    let (placed, interfaces, cards) = match looks {
        (Ok(placed), Ok(interfaces), Ok(cards)) => (placed, interfaces, cards),
        (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
            tracing::warn!(%error, "this host's interfaces and addresses cannot be read");
            return;
        }
    };
    let addresses: Vec<IpAddr> = placed.iter().map(|one| one.address).collect();
    let has_changed = told.addresses != addresses || told.interfaces != interfaces;
    if has_changed || told.cards != cards {
        agent.kernel.direct.refresh(&config, &cards, &addresses).await;
        told.cards = cards;
    }
    if has_changed {
        let gone: Vec<IpAddr> = told.addresses.iter().copied().filter(|known| !addresses.contains(known)).collect();
        // The first look finds what was there when the streams to routers were opened: each would be opened twice.
        if told.looked {
            agent.publishing.services.homes().iter().for_each(|home| home.moved(gone.clone()));
        }
        told.looked = true;
        agent.routing.searches.look_again();
        (told.addresses, told.interfaces) = (addresses.clone(), interfaces);
    }
    if has_changed || look == Look::Changed {
        follow_segments(agent, &mut told.segments).await;
        told.routes.clear();
        agent.core.0.refresh_routes();
        tokio::task::block_in_place(|| agent.kernel.router.refresh(&told.interfaces, &addresses));
    }
    let remotes = agent.core.0.with_sal(|sal, _| sal.remotes());
    let known = std::mem::take(&mut told.routes);
    told.routes = tokio::task::block_in_place(|| {
        let usable = |local: &IpAddr| addresses.contains(local);
        let ask = |remote: IpAddr| host::route::source(remote).filter(usable);
        let route = |remote: IpAddr| known.get(&remote).copied().unwrap_or_else(|| ask(remote));
        remotes.into_iter().map(|remote| (remote, route(remote))).collect()
    });
    let routes: Vec<_> = told.routes.iter().map(|(remote, local)| (*remote, *local)).collect();
    agent.core.0.with_sal(|sal, now| {
        // Before the routes, by which flows move to these addresses.
        sal.set_local_places(stack_rules::places(&placed));
        sal.set_routes(now, addresses, routes);
    });
    if has_changed {
        agent.routing.rules.resolvers.look();
    }
}
