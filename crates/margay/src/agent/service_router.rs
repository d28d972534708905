//! The service router in the kernel, on hosts that are routers: kept in step with the core's service table, and told
//! how packets to next hops leave this host (docs/decisions/0022). Without it, this process forwards.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};

use futures_util::{FutureExt, StreamExt};
use margay_core::table::{RuleId, Usage};
use margay_core::{DropReason, Limits};
use margay_datapath::direct::Route;
use margay_datapath::service_router::{ServiceRouter, Way};
use parking_lot::Mutex;

use super::Agent;
use super::core::{CoreHandle, Running};
use crate::config::Config;
use crate::host::{neighbour, route};

/// Changes that are taken up under the core's lock at once.
const PART: usize = 256;
/// After the kernel's word of neighbours was lost.
const TRY_AGAIN: std::time::Duration = std::time::Duration::from_secs(1);

/// The service router in the kernel as this host has it.
#[derive(Clone)]
pub struct KernelRouter(Arc<State>);

struct State {
    /// Or why there is none.
    router: Result<ServiceRouter, String>,
    ways: Mutex<Ways>,
}

impl KernelRouter {
    /// Loads the program where this host is a router. Before the datapath runs.
    pub fn open(config: &Config) -> Self {
        let router = match (config.router.enabled, config.direct) {
            (false, _) => Err("this host is no router".to_owned()),
            (true, false) => Err("the configuration says `direct = false`".to_owned()),
            (true, true) => {
                let rules_max = u32::try_from(Limits::default().rules).unwrap_or(u32::MAX);
                ServiceRouter::open(config.host.port, rules_max).map_err(|error| {
                    tracing::warn!(%error, "first packets for others are forwarded by this process, not by the kernel");
                    error.to_string()
                })
            }
        };
        Self(Arc::new(State { router, ways: Mutex::default() }))
    }

    /// Follows the core's service table from now on.
    ///
    /// # Errors
    ///
    /// There can be no more threads.
    pub fn start(&self, core: &CoreHandle) -> std::io::Result<()> {
        if self.0.router.is_err() {
            return Ok(());
        }
        core.0.with_sal(|sal, _| sal.follow_routes());
        let (this, news, running) = (self.clone(), core.0.route_news(), Arc::downgrade(&core.0));
        let follow = move || {
            while news.wait().is_ok_and(|goes_on| goes_on) {
                this.catch_up(&running);
            }
        };
        std::thread::Builder::new().name("margay-router".to_owned()).spawn(follow)?;
        Ok(())
    }

    /// Takes up whatever has changed in the core.
    fn catch_up(&self, running: &Weak<Running>) {
        let Ok(router) = &self.0.router else { return };
        // The lock of the core is let go between parts, and nothing is held that keeps the datapath from ending.
        while let Some(running) = running.upgrade() {
            let part = running.with_sal(|sal, _| sal.take_hop_key_changes(PART));
            router.take_hop_keys(&part);
            if part.changed.len() < PART {
                break;
            }
        }
        while let Some(running) = running.upgrade() {
            let part = running.with_sal(|sal, _| sal.take_route_changes(PART));
            router.take_routes(&part);
            let credits = router.take_credits();
            running.with_sal(|sal, _| {
                credits.iter().for_each(|(rule, usage)| sal.note_copy_use(*rule, usage.packets, usage.last));
            });
            if part.changed.len() < PART {
                break;
            }
        }
        if router.is_lost() {
            self.find_ways(false);
        }
    }

    /// Asks the kernel how packets to next hops leave: to all, or to those only that have no way.
    fn find_ways(&self, all: bool) {
        let Ok(router) = &self.0.router else { return };
        let mut ways = self.0.ways.lock();
        router.find_ways(all, |remote| ways.find(remote));
        ways.forget_unknown();
    }

    /// The host's interfaces, addresses or routes may have changed.
    pub fn refresh(&self, interfaces: &[u32], addresses: &[IpAddr]) {
        let Ok(router) = &self.0.router else { return };
        router.attach(interfaces);
        router.set_own_addresses(addresses);
        *self.0.ways.lock() = Ways { interfaces: interfaces.to_vec(), ..Ways::default() };
        self.find_ways(true);
    }

    /// Why this process forwards, if it does; nothing on hosts that are no routers.
    pub fn why_not(&self) -> Option<String> {
        match &self.0.router {
            Ok(router) => router.failure(),
            Err(why) => Some(why.clone()),
        }
    }

    /// The program, if it is loaded.
    pub fn kernel(&self) -> Option<&ServiceRouter> {
        self.0.router.as_ref().ok()
    }

    /// What became of a rule, in the core and in the kernel together.
    pub fn whole_usage(&self, rule: RuleId, in_core: Usage) -> Usage {
        let Some(router) = self.kernel() else { return in_core };
        let usage = router.usage(rule);
        Usage { packets: in_core.packets + usage.packets, last: in_core.last.max(usage.last), ..in_core }
    }

    /// Packets forwarded by the kernel.
    pub fn forwarded(&self) -> u64 {
        self.kernel().map_or(0, ServiceRouter::forwarded)
    }

    /// Packets dropped by the kernel for a reason.
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.kernel().map_or(0, |router| router.drops(reason))
    }
}

/// What the kernel has said of ways, until it says that something has changed. No more than there are next hops.
#[derive(Default)]
struct Ways {
    interfaces: Vec<u32>,
    routes: HashMap<IpAddr, Option<Route>>,
    neighbours: HashMap<(u32, IpAddr), Option<neighbour::Mac>>,
    own: HashMap<u32, Option<neighbour::Mac>>,
}

impl Ways {
    fn find(&mut self, remote: SocketAddr) -> Option<Way> {
        let found = (*self.routes.entry(remote.ip()).or_insert_with_key(|ip| route::lookup(*ip, None)))?;
        if !self.interfaces.contains(&found.ifindex) {
            return None;
        }
        let key = (found.ifindex, found.next_hop);
        let remote_mac = (*self.neighbours.entry(key).or_insert_with(|| neighbour::lookup(key.0, key.1)))?;
        let local_mac = (*self.own.entry(found.ifindex).or_insert_with_key(|index| neighbour::of_interface(*index)))?;
        Some(Way { local: found.local, ifindex: found.ifindex, mtu: found.mtu, local_mac, remote_mac })
    }

    /// Who is not known is asked for again, and keeps no place.
    fn forget_unknown(&mut self) {
        self.routes.retain(|_, found| found.is_some());
        self.neighbours.retain(|_, found| found.is_some());
    }
}

/// Follows what the kernel says of neighbours, until it is aborted.
pub async fn follow_neighbours(agent: Arc<Agent>) {
    let this = &agent.kernel.router;
    if this.kernel().is_none() {
        return;
    }
    loop {
        match neighbour::changes() {
            Ok(mut changes) => {
                while let Some(changed) = changes.next().await {
                    let mut ways = this.0.ways.lock();
                    ways.neighbours.remove(&changed);
                    // What comes in one go is one change.
                    while let Some(Some(changed)) = changes.next().now_or_never() {
                        ways.neighbours.remove(&changed);
                    }
                    drop(ways);
                    tokio::task::block_in_place(|| this.find_ways(true));
                }
                tracing::warn!("the kernel's word of changes of neighbours is lost; looking again");
            }
            Err(error) => tracing::warn!(%error, "changes of neighbours are looked for every second, and not heard of"),
        }
        this.0.ways.lock().neighbours.clear();
        tokio::task::block_in_place(|| this.find_ways(true));
        tokio::time::sleep(TRY_AGAIN).await;
    }
}
