//! The kernel's flow cache as this host has it: loaded at the start where that is possible, taken off and put on again
//! by order, and why it is not in use where it is not (DESIGN §3.2).

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use margay_core::entry::Wire;
use margay_core::{Input, Instant, Sal};
use margay_datapath::kernel::{Adopted, CacheConfig, KernelCache};
use margay_datapath::unconnected::Unconnected;
use parking_lot::Mutex;

use super::INTERFACE;
use super::core::CoreHandle;
use super::lookup::LookUp;
use super::way::Way;
use crate::config::Config;
use crate::host;
use crate::host::card::Card;

/// Ports of direct flows: above what kernels give out by themselves.
pub const FLOW_PORTS: RangeInclusive<u16> = 61_000..=65_535;
/// Directory of pinned maps and programs under the runtime directory.
const PINS: &str = "bpf";
/// Flows that the cache holds at most; more are carried encapsulated.
const FLOWS_MAX: u32 = 1 << 17;

/// Whether the direct path is in use here.
enum State {
    On(Arc<KernelCache>),
    /// Loaded, and taken off by order.
    TakenOff(Arc<KernelCache>),
    Off(String),
}

/// The direct path of a running agent.
pub struct DirectPath {
    state: Mutex<State>,
    /// Why what bears a virtual address is not dropped at the cards, where it is not.
    unguarded: Mutex<Option<String>>,
}

impl DirectPath {
    /// Loads the programs, or takes over those that the agent before has left. Before the datapath runs.
    pub async fn open(config: &Config) -> Self {
        let state = match Self::load_cache(config).await {
            Ok(cache) => {
                match cache.adopted() {
                    Adopted::Fresh => tracing::info!("direct path: programs loaded"),
                    Adopted::Kept => tracing::info!("direct path: programs and entries of the last agent adopted"),
                    Adopted::Replaced { found } => {
                        tracing::warn!(
                            found,
                            "direct path: entries of another version were dropped; flows are lifted again"
                        );
                    }
                }
                State::On(Arc::new(cache))
            }
            Err(why) => {
                tracing::warn!(why, "no direct path; flows are encapsulated");
                KernelCache::stop_sending(&pins(&config.host.runtime_dir));
                State::Off(why)
            }
        };
        let direct = Self { state: Mutex::new(state), unguarded: Mutex::default() };
        match host::card::cards(config.inside.as_deref(), config.ranges()).await {
            Ok(cards) => direct.set_guard(config, &cards).await,
            Err(error) => *direct.unguarded.lock() = Some(format!("interfaces cannot be read: {error}")),
        }
        direct
    }

    /// Tells the core by which grants the kernel may have opened flows that the agent before was not told of.
    pub fn hand_over_grants(&self, sal: &mut Sal, now: Instant) {
        let State::On(cache) = &*self.state.lock() else { return };
        for grant in cache.kept_grants() {
            if !sal.adopt_grant(now, &grant) {
                cache.remove_grant(grant.id, |flow| sal.flow(flow).is_some());
            }
        }
    }

    /// Tells the core which of the flows that it took up the kernel has carried meanwhile, and which ones it has
    /// opened. Entries of flows that are over go.
    pub fn hand_over(&self, sal: &mut Sal, now: Instant) {
        let State::On(cache) = &*self.state.lock() else { return };
        sal.set_flow_ports(now, Some(FLOW_PORTS));
        let mut carried = 0_u64;
        // What nobody has answered is told of when somebody does, or goes with its grant.
        for state in cache.entries().filter(|state| !state.fresh).collect::<Vec<_>>() {
            let wire = Wire {
                path: state.path,
                local_port: state.local_port,
                remote_port: state.remote_port,
                sending: state.egress && !state.stalled,
                accepting: state.accept,
                begun: true,
            };
            if sal.flow(state.flow).is_none() && !state.seen.over() {
                // Opened by a grant, and too young still for the last agent to have written it down.
                sal.handle(now, Input::Opened { flow: state.flow, app: &state.app.tuple() });
            }
            if !sal.adopt_direct(now, state.flow, state.generation, &wire) {
                cache.remove_listed(&state);
                continue;
            }
            carried += 1;
            state.seen.ends().for_each(|(direction, flags)| {
                sal.handle(now, Input::Transport { flow: state.flow, direction, flags })
            });
        }
        tracing::info!(carried, "flows that the kernel went on carrying");
    }

    /// The programs and maps, while they are in use: for the datapath, from its start.
    pub fn cache(&self) -> Option<Arc<KernelCache>> {
        match &*self.state.lock() {
            State::On(cache) => Some(Arc::clone(cache)),
            _ => None,
        }
    }

    async fn load_cache(config: &Config) -> Result<KernelCache, String> {
        if !config.direct {
            return Err("the configuration says `direct = false`".to_owned());
        }
        let cards = host::card::cards(config.inside.as_deref(), config.ranges()).await;
        let cards = cards.map_err(|error| format!("interfaces cannot be read: {error}"))?;
        let local_addresses = host::local_addresses(config.ranges())
            .await
            .map_err(|error| format!("addresses cannot be read: {error}"))?;
        let cache_config = CacheConfig {
            sal0: INTERFACE.to_owned(),
            interfaces: cards.into_iter().map(|card| card.interface).collect(),
            local_addresses,
            in_place: Way::look().is_none(),
            pin_dir: pins(&config.host.runtime_dir),
            flow_ports: FLOW_PORTS,
            ranges: config.ranges(),
            boxes: config.host.boxes,
            flows_max: FLOWS_MAX,
        };
        KernelCache::open(&cache_config).map_err(|error| error.to_string())
    }

    /// Why flows are encapsulated; `None` while the direct path is in use.
    pub fn why_not(&self) -> Option<String> {
        match &*self.state.lock() {
            State::On(_) => None,
            State::TakenOff(_) => Some("taken off by `margay cache unload`; `margay cache load` puts it on".to_owned()),
            State::Off(why) => Some(why.clone()),
        }
    }

    /// Takes the fast path off. Flows go back to encapsulation first; what peers send direct meanwhile comes to user
    /// space: the programs on the cards stay, since the host's TCP would reset it.
    pub fn unload(&self, core: &CoreHandle) -> Result<(), String> {
        let cache = match &*self.state.lock() {
            State::On(cache) => Arc::clone(cache),
            State::TakenOff(_) => return Ok(()),
            State::Off(why) => return Err(why.clone()),
        };
        core.0.with_sal(|sal, now| sal.set_flow_ports(now, None));
        core.0.hear_of_flows();
        cache.detach();
        *self.state.lock() = State::TakenOff(cache);
        Ok(())
    }

    /// Puts the programs on again.
    pub fn load(&self, core: &CoreHandle) -> Result<(), String> {
        let mut state = self.state.lock();
        let cache = match &*state {
            State::TakenOff(cache) => Arc::clone(cache),
            State::On(_) => return Ok(()),
            State::Off(why) => return Err(why.clone()),
        };
        cache.attach().map_err(|error| error.to_string())?;
        cache.heartbeat();
        core.0.use_cache(Some(Arc::clone(&cache)));
        core.0.with_sal(|sal, now| sal.set_flow_ports(now, Some(FLOW_PORTS)));
        *state = State::On(cache);
        Ok(())
    }

    /// The host's interfaces or addresses have changed.
    pub async fn refresh(&self, config: &Config, cards: &[Card], addresses: &[IpAddr]) {
        if let State::On(cache) | State::TakenOff(cache) = &*self.state.lock() {
            let interfaces: Vec<_> = cards.iter().map(|card| card.interface.clone()).collect();
            cache.set_interfaces(&interfaces);
            cache.set_local_addresses(addresses);
        }
        self.set_guard(config, cards).await;
    }

    /// Where the cards have no programs, nftables drops what they would.
    async fn set_guard(&self, config: &Config, cards: &[Card]) {
        let is_off = matches!(&*self.state.lock(), State::Off(_));
        let inside = is_off.then(|| cards.iter().filter_map(Card::opening).collect());
        let result = host::set_guard(config, inside).await;
        if let Err(error) = &result {
            tracing::warn!(%error, "virtual addresses of this host may be reached from its networks");
        }
        *self.unguarded.lock() = result.err().map(|error| error.to_string());
    }

    /// Why virtual addresses may be reached from this host's networks; `None` where they are not.
    pub fn why_unguarded(&self) -> Option<String> {
        self.unguarded.lock().clone()
    }

    /// Does something with the programs and maps, while they are in use.
    pub fn with_cache<R>(&self, act: impl FnOnce(&KernelCache) -> R) -> Option<R> {
        self.cache().map(|cache| act(&cache))
    }

    /// Why sockets cannot be looked up for what comes by `sal0`; `None` where they can, whether flows go direct or not.
    pub fn why_no_lookup(&self) -> Option<String> {
        match &*self.state.lock() {
            State::On(_) | State::TakenOff(_) => None,
            State::Off(why) => Some(why.clone()),
        }
    }

    /// What has listeners looked up.
    pub fn look_up(&self) -> LookUp {
        let cache = match &*self.state.lock() {
            State::On(cache) | State::TakenOff(cache) => Arc::clone(cache),
            State::Off(_) => return Box::new(|_, _| false),
        };
        Box::new(move |listeners, alone| {
            let done = cache.set_listeners(listeners, alone);
            if let Err(error) = &done {
                tracing::warn!(%error, "services at one address of this host, or on its loopback, are not all reached");
            }
            done.is_ok()
        })
    }

    /// Interfaces that should have a program and have none.
    pub fn bare_interfaces(&self) -> Vec<u32> {
        self.with_cache(KernelCache::bare_interfaces).unwrap_or_default()
    }

    /// What the kernel's programs have counted, or nftables in their place.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        match &*self.state.lock() {
            State::On(cache) | State::TakenOff(cache) => cache.counters(),
            State::Off(_) => host::guard::dropped(),
        }
    }
}

/// Mounts the file system of the pins: `margay up`. Where that is refused there is no direct path, and the agent says
/// why.
pub fn prepare(config: &Config) {
    if config.direct {
        // Said by `margay status`, too, where it stays visible.
        let _ = KernelCache::prepare(&pins(&config.host.runtime_dir));
    }
}

/// Where programs and maps are pinned.
pub fn pins(runtime_dir: &Path) -> PathBuf {
    runtime_dir.join(PINS)
}

/// Removes what the programs have left pinned: `margay down`.
pub fn remove_pins(runtime_dir: &Path) {
    let pins = pins(runtime_dir);
    Unconnected::remove_pins(&pins);
    KernelCache::remove_pins(&pins);
}
