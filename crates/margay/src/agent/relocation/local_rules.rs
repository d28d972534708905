//! Where other hosts bring connections to: a listening socket of the agent, and for each name that a program takes over
//! a rule of this host alone, that leads there.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;

use margay_control::SalControl;
use margay_core::name::Prefix;
use margay_core::table::{Action, Allow, Demux, HAND_OVER_PORT, Rule, RuleId};
use margay_core::{Ranges, Tuple};
use parking_lot::Mutex;
use tokio::net::TcpListener;

use crate::agent::core::CoreHandle;
use crate::listener::Protocol;

/// Ports that are tried until one is free for both families.
const TRIES: usize = 16;

/// The listening sockets, at this host's own virtual addresses, where nothing comes but by Margay.
pub struct Listeners {
    /// One of each family, on one port; the second only where the host has IPv6.
    pub sockets: Vec<TcpListener>,
    place: Place,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    address: SocketAddr,
    other_family: Option<IpAddr>,
}

impl Listeners {
    /// Binds them.
    ///
    /// # Errors
    ///
    /// The kernel refuses.
    pub async fn bind(ranges: Ranges) -> io::Result<Self> {
        let mut tried = 0;
        loop {
            tried += 1;
            let v4 = TcpListener::bind((ranges.host_v4(), 0)).await?;
            let address = v4.local_addr()?;
            let v6 = TcpListener::bind((ranges.host_v6(), address.port())).await;
            if v6.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse) && tried < TRIES {
                continue;
            }
            let other_family = v6.is_ok().then(|| ranges.host_v6().into());
            let sockets = [Some(v4), v6.ok()].into_iter().flatten().collect();
            return Ok(Self { sockets, place: Place { address, other_family } });
        }
    }
}

/// The names that connections of other hosts are taken for.
#[derive(Default)]
pub struct LocalRules {
    place: OnceLock<Place>,
    rules: Mutex<BTreeMap<Prefix, RuleId>>,
}

impl LocalRules {
    /// From now on names that are taken over lead to these sockets.
    pub fn lead_to(&self, listeners: &Listeners) {
        // Set once, at the start.
        let _ = self.place.set(listeners.place);
    }

    /// Whether a flow that is served here, by its five-tuple, is a stream of another host's agent.
    pub fn is_stream(&self, app: &Tuple) -> bool {
        self.place.get().is_some_and(|place| {
            let address = place.address.ip();
            app.source.port() == place.address.port()
                && (app.source.ip() == address || place.other_family == Some(app.source.ip()))
        })
    }

    /// Makes the service table follow from the names that programs take over now.
    pub fn follow(&self, core: &CoreHandle, taken_over: impl FnOnce() -> BTreeSet<Prefix>) {
        let Some(place) = self.place.get() else { return };
        let mut rules = self.rules.lock();
        // Asked under the lock: of two who follow at once, the later one knows what the earlier one did.
        let wanted = taken_over();
        rules.retain(|prefix, rule| {
            let is_wanted = wanted.contains(prefix);
            if !is_wanted {
                core.remove_rule(*rule);
            }
            is_wanted
        });
        for prefix in &wanted {
            if rules.contains_key(prefix) {
                continue;
            }
            match core.add_rule(*prefix, rule(*place)) {
                Ok(id) => {
                    rules.insert(*prefix, id);
                }
                Err(error) => tracing::warn!(%prefix, %error, "connections of other hosts cannot be taken over"),
            }
        }
    }
}

/// Before those of programs: of a program that answers every port, too. What the certificate of a host allows it is
/// asked when it has said what it brings.
fn rule(place: Place) -> Rule {
    let demux = Demux {
        listener: place.address,
        other_family: place.other_family,
        is_looked_up: false,
        service_port: Some(HAND_OVER_PORT),
        protocol: Some(Protocol::Tcp.number()),
        allow: Allow::Any,
    };
    Rule { priority: u32::MAX, weight: 1, action: Action::Demux(demux) }
}
