//! What an agent does from time to time, besides what it is asked for.

use std::sync::Arc;
use std::time::Duration;

use margay_control::{SalControl, lineage};
use margay_datapath::arena;
use tokio::time::{MissedTickBehavior, interval};

use super::network::{self, Look};
use super::orphans::Orphans;
use super::{Agent, absence, authority, cluster, fencing, host_changes, search, service_router, stack_rules, way};
use crate::log_file;

/// How often it looks around.
const ROUND: Duration = Duration::from_secs(2);
/// So many flows more or fewer have moved memory worth giving back.
const MANY_FLOWS: usize = 1000;
/// Rounds between looks at the clock.
const CLOCK_ROUNDS: u64 = 15;
/// Rounds between looks at which leases are in use; one without use for a day may be taken back.
const LEASE_ROUNDS: u64 = 300;
/// Rounds between renewals of certificates that this host signs itself; they live a day.
const RENEWAL_ROUNDS: u64 = 3600;

/// How often the router on this host is asked again about names that other hosts had.
const STANDBY_ROUND: Duration = Duration::from_secs(1);

/// Goes on until it is aborted.
pub async fn run(agent: Arc<Agent>) {
    let neighbours = service_router::follow_neighbours(Arc::clone(&agent));
    let routers = cluster::follow(Arc::clone(&agent));
    let network = network::follow(Arc::clone(&agent));
    let searches = search::follow(Arc::clone(&agent));
    let way = way::follow(Arc::clone(&agent));
    let host = host_changes::follow(Arc::clone(&agent));
    let absences = absence::follow(Arc::clone(&agent));
    let fencing = fencing::follow(Arc::clone(&agent));
    let stacks = stack_rules::follow(Arc::clone(&agent));
    let rounds = look_around(Arc::clone(&agent));
    tokio::join!(rounds, network, host, way, neighbours, routers, searches, absences, fencing, stacks, stand_by(agent));
}

async fn stand_by(agent: Arc<Agent>) {
    let mut rounds = interval(STANDBY_ROUND);
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        rounds.tick().await;
        tokio::task::block_in_place(|| agent.publishing.services.ask_own_router_again());
    }
}

async fn look_around(agent: Arc<Agent>) {
    let mut rounds = interval(ROUND);
    rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut tide = Tide::default();
    let mut orphans = Orphans::new(&agent);
    for round in 1_u64.. {
        rounds.tick().await;
        network::refresh(&agent, Look::Routine).await;
        tokio::task::block_in_place(|| {
            agent.publishing.active.sweep();
            agent.kernel.spreads.sweep(&agent);
            orphans.look(&agent, round);
        });
        tide.watch(&agent);
        bound_log(&agent);
        if round.is_multiple_of(LEASE_ROUNDS) {
            keep_leases(&agent).await;
        }
        if round.is_multiple_of(CLOCK_ROUNDS) {
            let unix_s = agent.host.clock.unix_s();
            agent.core.0.with_sal(|sal, now| sal.set_wall_clock(now, unix_s));
        }
        if round.is_multiple_of(RENEWAL_ROUNDS) {
            renew(&agent);
        }
        tokio::task::block_in_place(|| promote(&agent));
    }
}

/// Set-up takes memory for a moment, many set-ups at once take much: when it is calm again, that is given back.
#[derive(Default)]
struct Tide {
    /// Flows in the round before, and when memory was given back last.
    before: usize,
    given_back: usize,
}

impl Tide {
    fn watch(&mut self, agent: &Agent) {
        let (flows, pending) =
            agent.core.0.with_sal(|sal, _| (sal.flow_count(), sal.half_open_count() + sal.grant_count()));
        let is_calm = flows == self.before && pending == 0;
        if is_calm && flows.abs_diff(self.given_back) >= MANY_FLOWS {
            arena::give_back();
            self.given_back = flows;
        }
        self.before = flows;
    }
}

/// Under systemd there is none.
fn bound_log(agent: &Agent) {
    let path = agent.config().host.runtime_dir.join(log_file::NAME);
    if let Err(error) = log_file::bound(&path, log_file::MAX_BYTES) {
        tracing::warn!(path = %path.display(), %error, "the log cannot be begun anew");
    }
}

/// A lease that is in use is not given to another name.
async fn keep_leases(agent: &Arc<Agent>) {
    // The kernel answers datagrams to these without the core, and their flows may be over.
    agent.names.leases.touch(&agent.kernel.spreads.names());
    let leases = Arc::clone(&agent.names.leases);
    let kept = tokio::task::spawn_blocking(move || {
        leases.follow_uses();
        leases.keep_uses()
    });
    match kept.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "uses of leases cannot be kept"),
        Err(error) => tracing::error!(%error, "uses of leases cannot be kept"),
    }
}

fn renew(agent: &Agent) {
    let core: &dyn SalControl = &agent.core;
    let joined = agent.publishing.services.joined();
    let host = agent.host.local.host_key.public();
    let adopted = authority::adopt(core, (&agent.host.keyring, &agent.host.store), &host, &agent.host.clock, &joined);
    let renewed = adopted
        .and_then(|()| Ok(agent.routing.answering.renew(core, &agent.host.keyring, &host, &agent.host.clock)?));
    if let Err(error) = renewed {
        tracing::warn!(%error, "memberships cannot be renewed");
    }
    agent.publishing.services.renew();
}

/// Keys whose time has come sign from now on, if others could be told of them.
fn promote(agent: &Agent) {
    match lineage::take_up(&agent.host.keyring, &agent.host.store, agent.host.clock.unix_s()) {
        Ok(false) => {}
        Ok(true) => renew(agent),
        Err(error) => return tracing::warn!(%error, "nobody is told of a key that is to follow"),
    }
    match agent.host.keyring.promote(agent.host.clock.unix_s(), None) {
        Ok(names) if names.is_empty() => {}
        Ok(names) => {
            tracing::info!(?names, "the keys that were to follow sign from now on");
            renew(agent);
        }
        Err(error) => tracing::warn!(%error, "a key that was to follow does not sign"),
    }
}
