//! Finding a router: a host that reaches none of an authority's asks its network segments for one; a router answers.
//!
//! What is found is an address and a key that the authority calls a router's, and no more than that: registration goes
//! there as it goes to an address that is configured, over a stream that proves the key.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use margay_control::keyring::Keyring;
use margay_control::registration::{Home, HomeConfig, HomeState, Phase};
use margay_control::{Clock, SalControl, StateError, issue};
use margay_core::Event;
use margay_core::key::{HostId, HostPublic};
use margay_core::name::{Prefix, ServiceId, authority_block};
use margay_core::search::answering;
use margay_core::segment::SEGMENT_TIMEOUT;
use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast, watch};
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{Agent, home};
use crate::config::Config;

/// So long a router may take to answer where it is configured.
const PATIENCE: Duration = Duration::from_secs(1);
/// From one search to the next; doubles up to [`REST_MAX`].
const REST_FIRST: Duration = Duration::from_secs(2);
const REST_MAX: Duration = Duration::from_secs(60);
/// A router that was found and did not take this host is not tried again for so long.
const DECLINED: Duration = Duration::from_secs(300);
/// Routers that are remembered so; beyond it nobody new is tried.
const DECLINED_MAX: usize = 32;

/// On a router: what makes it answer searches, of each authority that it signs for.
#[derive(Default)]
pub struct Answering {
    /// Where it takes registrations; none: it does not answer.
    listener: Option<SocketAddr>,
    ruled: Mutex<BTreeSet<[u8; 8]>>,
}

impl Answering {
    /// As configured, for every authority whose key is here.
    ///
    /// # Errors
    ///
    /// As for [`renew`](Self::renew).
    pub fn begin(
        config: &Config,
        core: &dyn SalControl,
        keyring: &Keyring,
        host: &HostPublic,
        clock: &Clock,
    ) -> Result<Self, StateError> {
        let answers = config.router.enabled && config.ad_hoc.enabled;
        let answering = Self { listener: answers.then_some(config.router.listen), ruled: Mutex::default() };
        answering.renew(core, keyring, host, clock)?;
        Ok(answering)
    }

    /// Answers for every authority whose key is here now, by certificates that hold for a while.
    ///
    /// # Errors
    ///
    /// A key cannot be read.
    pub fn renew(
        &self,
        core: &dyn SalControl,
        keyring: &Keyring,
        host: &HostPublic,
        clock: &Clock,
    ) -> Result<(), StateError> {
        let Some(listener) = self.listener else { return Ok(()) };
        let mut ruled = self.ruled.lock();
        for authority in keyring.authorities()?.iter().filter(|authority| authority.is_valid(clock.unix_s())) {
            let prefix = Prefix::from(ServiceId::of_routers(authority.block()));
            core.set_service_certificate(prefix, issue::router(authority, host, clock.unix_s()).0);
            if ruled.insert(authority.block())
                && let Err(error) = core.add_rule(prefix, answering(listener))
            {
                ruled.remove(&authority.block());
                tracing::warn!(%error, authority = authority.name, "searches for a router are not answered");
            }
        }
        Ok(())
    }
}

/// On a host: where routers were found that it was told of by nobody.
#[derive(Default)]
pub struct Searches {
    found: Mutex<HashMap<HostId, SocketAddr>>,
    elsewhere: Notify,
}

impl Searches {
    /// This host's addresses are others now: who did not answer may do so.
    pub fn look_again(&self) {
        self.elsewhere.notify_one();
    }

    /// Where a router was found and is reached, if it is so.
    pub fn found_at(&self, home: &Home) -> Option<SocketAddr> {
        home.found_at().or_else(|| self.found.lock().get(&home.config().router_key.id()).copied())
    }
}

/// An authority none of whose routers is reached.
struct Lost {
    next: Instant,
    rest: Duration,
}

impl Lost {
    fn new(now: Instant) -> Self {
        Self { next: now + PATIENCE, rest: REST_FIRST }
    }

    /// Whether it is time to search.
    fn is_due(&mut self, now: Instant) -> bool {
        if now < self.next {
            return false;
        }
        self.next = now + SEGMENT_TIMEOUT + self.rest;
        self.rest = (self.rest * 2).min(REST_MAX);
        true
    }
}

/// Routers that were found, and that this host was told of by nobody.
#[derive(Default)]
struct Visits {
    open: Vec<Arc<Home>>,
    declined: HashMap<HostPublic, Instant>,
}

impl Visits {
    fn may_try(&mut self, key: &HostPublic) -> bool {
        self.declined.retain(|_, at| at.elapsed() < DECLINED);
        self.declined.len() + self.open.len() < DECLINED_MAX && !self.declined.contains_key(key)
    }

    /// Those that have taken this host stay; those that have not are left.
    async fn settle(&mut self, agent: &Agent) {
        for home in std::mem::take(&mut self.open) {
            match home.state().phase {
                Phase::Connected => {}
                Phase::Connecting => self.open.push(home),
                Phase::Refused | Phase::Unreachable => {
                    let (key, state) = (home.config().router_key, home.state());
                    tracing::info!(
                        router = home.config().router_address,
                        why = state.why,
                        "the router that was found is none for this host"
                    );
                    agent.publishing.services.remove_home(&home);
                    home.stop().await;
                    agent.routing.searches.found.lock().remove(&key.id());
                    self.declined.insert(key, Instant::now());
                }
            }
        }
    }
}

/// Searches for as long as it is needed, until it is aborted.
pub async fn follow(agent: Arc<Agent>) {
    // A router is told where others are, and forwards nothing to whoever is near.
    if agent.routing.router.is_some() || !agent.config().ad_hoc.enabled {
        return;
    }
    let (mut lost, mut visits): (HashMap<String, Lost>, _) = (HashMap::new(), Visits::default());
    let mut homes = agent.publishing.services.home_changes();
    loop {
        // Before it is looked how it stands with them: what changes from now on is news.
        let states: Vec<_> = homes.borrow_and_update().iter().map(|home| home.changed()).collect();
        visits.settle(&agent).await;
        let mut of_authority: BTreeMap<String, Vec<Arc<Home>>> = BTreeMap::new();
        for home in agent.publishing.services.homes() {
            of_authority.entry(home.config().authority.clone()).or_default().push(home);
        }
        of_authority.retain(|_, homes| !homes.iter().any(|home| home::is_connected(home)));
        lost.retain(|authority, _| of_authority.contains_key(authority));
        for (authority, homes) in of_authority {
            let now = Instant::now();
            if lost.entry(authority).or_insert_with(|| Lost::new(now)).is_due(now) {
                search(&agent, &homes, &mut visits).await;
            }
        }
        tokio::select! {
            // The sender lives in the services, which the agent holds.
            _ = homes.changed() => {}
            () = any_changed(states) => {}
            () = next_search(lost.values().map(|lost| lost.next).min()) => {}
            () = agent.routing.searches.elsewhere.notified() => lost.clear(),
        }
    }
}

/// Waits until it stands otherwise with one of some routers.
async fn any_changed(mut states: Vec<watch::Receiver<HomeState>>) {
    if states.is_empty() {
        return pending().await;
    }
    // The senders live in the routers, which are looked at anew when there is one less.
    let _ = select_all(states.iter_mut().map(|state| Box::pin(state.changed()))).await;
}

async fn next_search(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}

/// Asks for the routers of one authority, and lets this host register with those that answer.
async fn search(agent: &Arc<Agent>, homes: &[Arc<Home>], visits: &mut Visits) {
    let (Some(mut events), Some(known)) = (agent.process.watchers.subscribe(), homes.first()) else { return };
    let block = authority_block(&known.config().authority);
    tracing::debug!(
        authority = known.config().authority,
        "no router is reached; the network segments are asked for one"
    );
    let (until, port) = (Instant::now() + SEGMENT_TIMEOUT, registration_port(&known.config().router_address));
    if !agent.core.0.with_sal(|sal, now| sal.search_routers(now, block)) {
        return;
    }
    loop {
        match timeout_at(until, events.recv()).await {
            Ok(Ok(Event::RouterFound { authority, key, at })) if authority == block => {
                let home = homes.iter().chain(&visits.open).find(|home| home.config().router_key == key).cloned();
                match home {
                    Some(home) => {
                        home.found(SocketAddr::new(at.ip(), registration_port(&home.config().router_address)))
                    }
                    None if visits.may_try(&key) => visit(agent, known, visits, key, SocketAddr::new(at.ip(), port)),
                    None => {}
                }
            }
            // What was missed is said again when it is asked again.
            Ok(Ok(_) | Err(broadcast::error::RecvError::Lagged(_))) => {}
            Ok(Err(broadcast::error::RecvError::Closed)) | Err(_) => return,
        }
    }
}

/// Another router of the authority than those that are known.
fn visit(agent: &Arc<Agent>, known: &Home, visits: &mut Visits, key: HostPublic, at: SocketAddr) {
    tracing::info!(router = %at, authority = known.config().authority, "found a router on a network segment");
    agent.routing.searches.found.lock().insert(key.id(), at);
    let config = HomeConfig { router_address: at.to_string(), router_key: key, ..known.config().clone() };
    visits.open.push(home::add(agent, config));
}

/// Where a router takes registrations: on the port that is known of it, or of another one of its authority.
fn registration_port(address: &str) -> u16 {
    address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(margay_wire::PORT)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn searches_wait_for_routers_that_are_configured_and_become_rare() {
        let begin = Instant::now();
        let mut lost = Lost::new(begin);
        let mut next = || {
            let at = lost.next;
            assert!(!lost.is_due(at - Duration::from_millis(1)) && lost.is_due(at));
            (at - begin).as_secs()
        };
        let at: Vec<u64> = (0..6).map(|_| next()).collect();
        assert_eq!(at, [1, 5, 11, 21, 39, 73]);
    }

    #[test]
    fn the_port_of_registration_is_the_one_that_is_known() {
        for (address, port) in [("10.0.0.1:7", 7), ("[fd00::1]:8", 8), ("router.example:9", 9)] {
            assert_eq!(registration_port(address), port);
        }
    }
}
