//! What this host's routing says: which of its addresses leads to a peer. Whatever changes there moves flows.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use hashbrown::HashMap;

use crate::association::location::{Cause, Location, Moving, Pair, Routes, Scope};
use crate::machine::sal::Sal;
use crate::types::key::HostId;
use crate::types::time::Instant;

impl Sal {
    /// Every address by which this host may want to reach a peer: whoever knows the routing tells
    /// [`set_routes`](Self::set_routes) about these.
    pub fn remotes(&self) -> Vec<IpAddr> {
        let mut remotes = Vec::new();
        for association in
            self.associations.in_use().filter(|association| self.associations.is_followed(association.host))
        {
            remotes.push(association.remote.ip());
            if let Some(location) = self.locations.get(Scope::of(association.host)) {
                remotes.extend(location.addresses.iter().chain(&location.rendezvous).map(SocketAddr::ip));
            }
        }
        remotes.sort_unstable();
        remotes.dedup();
        remotes
    }

    /// This host's addresses that work, those of the interface with the default route first; and for each of
    /// [`remotes`](Self::remotes) the one from which the host's routing would send there, if it has a route. Every peer
    /// that this host shares flows with is told what has changed for it.
    pub fn set_routes(
        &mut self,
        now: Instant,
        local: Vec<IpAddr>,
        routes: impl IntoIterator<Item = (IpAddr, Option<IpAddr>)>,
    ) {
        self.now = now;
        let fresh = HashMap::with_hasher(*self.routes.hasher());
        let before = core::mem::replace(&mut self.routes, fresh);
        self.routes.extend(routes);
        // A first look is no change, unless addresses were given before.
        let has_looked = core::mem::replace(&mut self.has_looked, true) || !self.config.local_addresses.is_empty();
        let has_changed = has_looked && self.config.local_addresses != local;
        self.config.local_addresses = local;
        let mut hosts: Vec<HostId> = self.associations.in_use().map(|association| association.host).collect();
        hosts.sort_unstable();
        hosts.dedup();
        for host in hosts.into_iter().filter(|host| self.associations.is_followed(*host)).collect::<Vec<_>>() {
            if !self.follow_route(now, host, &before, has_changed) && has_changed {
                self.tell_addresses(host);
            }
        }
        self.leave_lost_side_paths(now);
        self.stripe_what_waits(now);
        self.notices.tell_again(now, has_changed);
        if has_changed {
            self.reconfigurations.ask_about_halves(now, &self.flows);
        }
    }

    /// Looks whether the pair in use is still what it should be. True when a move began.
    fn follow_route(&mut self, now: Instant, host: HostId, before: &Routes, has_changed: bool) -> bool {
        let Some(present) = self.associations.pair_of(host) else { return false };
        let wished = self.routes.get(&present.remote.ip()).copied().flatten();
        let is_moving = self.locations.get(Scope::of(host)).is_some_and(|location| location.state != Moving::Settled);
        if present.local.is_none() && !is_moving {
            return self.learn_local(now, host, wished, has_changed);
        }
        let is_here = present.local.is_some_and(|local| self.config.local_addresses.contains(&local));
        let is_chosen = self.associations.by_host(host).is_some_and(|association| association.chosen);
        // An address that the host's routing never chose, such as one that the peer has asked at, is as good as
        // another.
        let was_wished = before.get(&present.remote.ip()).copied().flatten() == present.local;
        if is_here && wished.is_some() && (wished == present.local || is_chosen || !was_wished) {
            let lost = |location: &Location| {
                location.state == Moving::Asking && location.ask.as_ref().is_some_and(|ask| ask.cause == Cause::Address)
            };
            if !self.locations.get(Scope::of(host)).is_some_and(lost) {
                return false;
            }
            // It was gone, and is back before another was found.
        }
        let pairs = self.pairs_for(host);
        let is_broken = !is_here || wished.is_none();
        let goes_on = self.locations.with(Scope::of(host), |location| {
            let state = location.state;
            let ask = location.ask.as_mut().filter(|_| state == Moving::Asking)?;
            // The best is asked over already; what else there is to try has changed. One change is often seen in two
            // halves, the new address before the old one has gone: RSYN-DONE says in time that what was in use is dead.
            let is_same = ask.pairs.first() == pairs.first();
            is_same.then(|| {
                ask.pairs.clone_from(&pairs);
                ask.broken |= is_broken;
            })
        });
        if goes_on.is_some() {
            return true;
        }
        self.leave(now, Scope::of(host), Cause::Address, is_broken, pairs);
        true
    }

    /// The agent has started again, or the association came by another way than packets: only now is it known what this
    /// host sends from. After a new start the peer is told, since it may have another address in mind; so it is when
    /// that may just have been another one.
    fn learn_local(&mut self, now: Instant, host: HostId, wished: Option<IpAddr>, has_changed: bool) -> bool {
        if let Some(pair) = self.associations.pair_of(host).filter(|_| has_changed) {
            // Nobody has chosen where packets leave from, so that they leave from another address already.
            let pair = Pair { local: wished, ..pair };
            self.guard_moved(now, Scope::of(host), pair);
            self.seal_moved(now, Scope::of(host));
        }
        let ids: Vec<u32> = self.associations.all_with(host).map(|association| association.local_id).collect();
        let mut is_kept = false;
        for id in ids {
            if let Some(association) = self.associations.get_mut(id) {
                // Packets went from wherever it was, until the move has ended.
                association.local = wished.filter(|_| !has_changed);
                is_kept |= core::mem::take(&mut association.is_kept) && association.flows > 0;
            }
        }
        if is_kept || has_changed {
            let (pairs, cause) = (self.pairs_for(host), if is_kept { Cause::Restart } else { Cause::Address });
            self.leave(now, Scope::of(host), cause, has_changed || wished.is_none(), pairs);
        }
        is_kept || has_changed
    }
}
