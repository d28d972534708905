//! Routers bring together hosts that do not find each other (DESIGN §10; docs/decisions/0018, 0041): each knows where
//! the hosts that are registered with it are now, also behind translators and firewalls, which let in what comes from
//! their router.

use alloc::vec::Vec;
use core::net::SocketAddr;

use margay_wire::{Extension, ResolvableRepr};

use crate::association::AssociationTable;
use crate::association::location::LocationTable;
use crate::association::location::{Cause, Pair, Scope};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::types::config::Config;
use crate::types::hop::HOP_LIMIT;
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::time::Instant;

/// Routers that one round goes by.
pub(crate) const ROUTERS_MAX: usize = 4;
/// Rounds in which a peer is sought of which nothing has been heard; after them its traffic has to ask again.
pub(crate) const SEEKS_MAX: u32 = 30;
/// The first round goes by all pairs, and by the routers: the best ones were tried already.
const SEEK_FIRST: u32 = 2;

impl Sal {
    /// One of this host's routers wants to be asked no more, or again. Where peers shall ask another one than before
    /// for this host, all that it shares flows with are told.
    pub fn set_leaving(&mut self, now: Instant, router: HostId, is_leaving: bool) {
        self.now = now;
        let named = |sal: &Self| sal.associations.router().map(|router| router.remote);
        let before = named(self);
        self.associations.set_leaving(router, is_leaving);
        if self.config.router || named(self) == before {
            return;
        }
        let mut peers: Vec<HostId> = self.associations.in_use().map(|association| association.host).collect();
        peers.sort_unstable();
        peers.dedup();
        peers.retain(|peer| self.associations.is_followed(*peer));
        peers.into_iter().for_each(|peer| self.tell_addresses(peer));
    }

    /// By the routers that may know where the peer is: its own, if it has named one, and this host's, which may be the
    /// same, or which the peer knows by another address. They read the peer's host-ID where SYNs have a service.
    pub(crate) fn send_by_rendezvous(&mut self, now: Instant, scope: Scope) {
        let named = self.locations.get(Scope::of(scope.host)).and_then(|location| location.rendezvous);
        let usable = |remote: SocketAddr| {
            let local = self.routes.get(&remote.ip()).copied().flatten()?;
            Some(Pair { local: Some(local), remote })
        };
        let mut ways: Vec<Pair> = named.and_then(usable).into_iter().collect();
        for router in self.associations.routers().filter(|association| association.is_with_router()) {
            if ways.len() < ROUTERS_MAX && ways.iter().all(|way| way.remote != router.remote) {
                ways.push(Pair { local: router.local, remote: router.remote });
            }
        }
        let resolvable = ResolvableRepr {
            hop_limit: HOP_LIMIT,
            reply_to: None,
            via: None,
            service: ServiceId::at_host(scope.host, 0).0,
            nonce: 0,
            hop_tag: [0; 8],
        };
        for way in ways {
            if self.locations.may_ask(&self.associations, now, scope.host, way) {
                self.write_rsyn(scope, way, Some(resolvable));
            }
        }
    }

    /// Nothing comes from a peer by any pair. It may be where a translator or a firewall lets in nobody whom it has not
    /// asked, or both may have moved without a word: this host says everywhere where it is, also by the routers. Data
    /// goes on by the pair in use meanwhile; the peer's kernel may have it though the agent there does not answer.
    pub(crate) fn seek(&mut self, now: Instant, host: HostId) {
        let pairs = self.pairs_for(host);
        self.events.push(Event::Silent(host));
        self.locations.begin_move(now, Scope::of(host), Cause::Silence, true, pairs);
        self.locations.with(Scope::of(host), |location| {
            if let Some(ask) = &mut location.ask {
                (ask.unheard, ask.tries) = (true, SEEK_FIRST);
            }
        });
        self.locations.announce_paths(&self.associations, &mut self.queue, host);
        self.ask(now, Scope::of(host));
    }
}

impl AssociationTable {
    /// This host's service router, where peers may ask for it when it has moved.
    pub(crate) fn own_rendezvous(&self, config: &Config) -> Option<Extension<'static>> {
        if config.router {
            return None;
        }
        let router = self.router()?;
        Some(Extension::Rendezvous(router.remote))
    }
}

impl LocationTable {
    /// Whether a peer is sought of which nothing has been heard.
    pub(crate) fn is_unheard(&self, scope: Scope) -> bool {
        let ask = self.get(scope).and_then(|location| location.ask.as_ref());
        ask.is_some_and(|ask| ask.unheard && ask.answered.is_none())
    }
}
