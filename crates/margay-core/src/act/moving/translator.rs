//! Address translators on the way (DESIGN §10): where a peer sees this host at an address that is not its own,
//! somebody remembers the two, and forgets them when nothing goes out for a while. So something does, but only there.

use alloc::vec::Vec;
use core::net::SocketAddr;
use core::time::Duration;

use margay_wire::PORT;

use crate::association::Association;
use crate::association::AssociationTable;
use crate::association::location::LocationTable;
use crate::association::location::{ADDRESSES_MAX, Moving, Scope};
use crate::machine::sal::Sal;
use crate::types::config::Config;
use crate::types::key::HostId;
use crate::types::time::Instant;

/// Translators and stateful firewalls forget UDP after 30 s at the earliest, as far as is known (RFC 4787 asks for two
/// minutes).
const KEEP_ALIVE: Duration = Duration::from_secs(25);

impl Sal {
    /// The time to send something has come; the answer tells whether the translator still has this host where it was.
    pub(crate) fn keep_alive(&mut self, now: Instant, host: HostId) {
        let is_needed = self.associations.is_followed(host);
        let is_settled = self.locations.with(Scope::of(host), |location| {
            location.keep_alive = is_needed.then_some(now + KEEP_ALIVE);
            location.state == Moving::Settled
        });
        if is_needed && is_settled {
            self.ask_present(now, host);
        }
    }
}

impl Config {
    /// Whether an address that a peer sees this host at is not this host's.
    fn is_translated(&self, seen: SocketAddr) -> bool {
        seen.port() != PORT || !self.local_addresses.contains(&seen.ip())
    }
}

impl LocationTable {
    /// A proved peer has said at which address it sees this host. A translator's memory of the two is kept fresh, since
    /// it gives this host another port when it has forgotten the first. A firewall's is not: what it lets in no more
    /// comes by the router (see `rendezvous`).
    pub(crate) fn note_seen(
        &mut self,
        associations: &AssociationTable,
        config: &Config,
        now: Instant,
        host: HostId,
        seen: SocketAddr,
    ) {
        let is_kept = config.is_translated(seen) || associations.is_own_router(host);
        self.with(Scope::of(host), |location| {
            location.seen = Some(seen);
            location.keep_alive = is_kept.then_some(now + KEEP_ALIVE);
        });
    }

    /// The way to a router that this host has registered with just now stays open, whatever is on it.
    pub(crate) fn keep_router(&mut self, now: Instant, host: HostId) {
        self.with(Scope::of(host), |location| {
            location.keep_alive.get_or_insert(now + KEEP_ALIVE);
        });
    }

    /// Whether it is known that this host is behind a translator, towards whomever.
    fn is_behind_translator(&self, config: &Config) -> bool {
        let mut seen = self.scopes().filter_map(|scope| self.get(scope)?.seen);
        seen.any(|seen| config.is_translated(seen))
    }

    /// Whether one is between this host and a peer: one of the two is seen where it is not.
    pub(crate) fn is_translated_between(&self, associations: &AssociationTable, config: &Config, host: HostId) -> bool {
        let Some(location) = self.get(Scope::of(host)) else { return false };
        let remote = associations.by_host(host).map(|association| association.remote);
        // A full list may have left it out.
        let is_told = (1..ADDRESSES_MAX).contains(&location.addresses.len());
        let is_elsewhere = |remote| is_told && !location.addresses.contains(&remote);
        location.seen.is_some_and(|seen| config.is_translated(seen)) || remote.is_some_and(is_elsewhere)
    }

    /// Peers that this host shares flows with since, and has not asked how they see it, are kept as well where it is
    /// translated.
    pub(crate) fn keep_peers(&mut self, associations: &AssociationTable, config: &Config, now: Instant) {
        if !self.is_behind_translator(config) {
            return;
        }
        let hosts: Vec<HostId> = associations.in_use().map(|association| association.host).collect();
        for host in hosts.into_iter().filter(|host| associations.is_followed(*host)).collect::<Vec<_>>() {
            self.with(Scope::of(host), |location| {
                if location.seen.is_none() && location.keep_alive.is_none() {
                    location.keep_alive = Some(now + KEEP_ALIVE);
                }
            });
        }
    }
}

impl AssociationTable {
    /// Whether this host is registered with a peer: there it has to be found by whoever finds it nowhere else.
    fn is_own_router(&self, host: HostId) -> bool {
        self.by_host(host).is_some_and(Association::is_with_router)
    }
}
