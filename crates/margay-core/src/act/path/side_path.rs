//! Flows that go by a pair of addresses of their own, while the others with the same peer stay (docs/decisions/0018;
//! Serval §6.3).

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use margay_wire::FlowId;

use crate::act::path::striping::STRIPED_MAX;
use crate::act::stack_change::ChangeRefused;
use crate::association::Association;
use crate::association::location::{Cause, Pair, Scope};
use crate::cache::entry::{EntryUpdate, Passage, Path, PathId};
use crate::leg::carriage::{Carriage, Why};
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::session::{Act, LockError};
use crate::types::fair_table::{FairTable, Full, Peer};
use crate::types::key::HostId;
use crate::types::time::Instant;

/// Pairs of addresses beside those of the associations: so many that peers have chosen, and as many that this host has.
pub(crate) const SIDE_PATHS_MAX: usize = 4096;

/// A pair that some flows use beside their association's.
#[derive(Debug)]
pub(crate) struct SidePath {
    pub id: PathId,
    pub host: HostId,
    pub pair: Pair,
    pub flows: usize,
    /// Direct flows may name it.
    wired: bool,
}

/// The pairs that flows use beside their associations', each counted for whoever has chosen it.
pub(crate) struct SidePaths(FairTable<PathId, SidePath>);

impl SidePaths {
    pub const fn new() -> Self {
        Self(FairTable::new(SIDE_PATHS_MAX, SIDE_PATHS_MAX))
    }

    pub fn get(&self, id: PathId) -> Option<&SidePath> {
        self.0.get(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = &SidePath> {
        self.0.values()
    }

    /// Whether `by` may have one more flow go by a pair.
    ///
    /// # Errors
    ///
    /// What is full.
    pub fn check(&mut self, by: Peer, host: HostId, pair: Pair) -> Result<(), Full> {
        if self.find(host, pair).is_some() { Ok(()) } else { self.0.check(by) }
    }

    fn find(&mut self, host: HostId, pair: Pair) -> Option<&mut SidePath> {
        self.0.values_mut().find(|side| side.host == host && side.pair == pair)
    }
}

/// What an order to move names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Towards {
    /// One of this host's addresses.
    Local(IpAddr),
    /// One of the peer's.
    Remote(IpAddr),
}

/// Why an order to move is not carried out; nothing has changed then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MoveRefused {
    /// No such flow.
    #[error("there is no flow {0}; `margay flow list` shows those that there are")]
    UnknownFlow(FlowId),
    /// It is being set up, or over.
    #[error("flow {0} carries no data now")]
    NotAlive(FlowId),
    /// No association.
    #[error("this host shares nothing with host {0}; `margay path` shows its peers")]
    UnknownPeer(HostId),
    /// Client and server are one host.
    #[error("both ends are on this host")]
    SameHost,
    /// No pair fits.
    #[error("no pair of addresses with the peer has {0}: this host has {1}, the peer says it has {2}")]
    NoPair(IpAddr, ListOf, ListOf),
    /// It is there already.
    #[error("that is where it is")]
    There,
    /// Nothing to share out among.
    #[error(
        "there is one pair of addresses with the peer only, and `{0}` needs two: this host has {1}; `margay path list` \
         shows what the peer has"
    )]
    OnePlace(&'static str, ListOf),
    /// Too many.
    #[error("this host has striped {STRIPED_MAX} flows already; end some, or give them another policy")]
    ManyStriped,
    /// Its stack is being changed.
    #[error("the flow's stack is being changed; try again in a moment")]
    Changing,
    /// Another act is at work.
    #[error(transparent)]
    Busy(#[from] LockError),
    /// It would go by addresses where a rule demands that it is sealed.
    #[error("a stack rule with `floor` is about this name: its flows go by one pair of addresses each")]
    Floor,
    /// Its datagrams are numbered by one pair.
    #[error(
        "the flow goes by `fec`, which uses one pair of addresses; have it carried plainly first \
         (`margay stack set FLOW plain`)"
    )]
    Fec,
    /// Some places are to repair what they lose, and it is a connection.
    #[error("a place with `fec` is for flows of datagrams: TCP repeats by itself what is lost")]
    DatagramsOnly,
    /// What is under way of it is reckoned by one pair.
    #[error(
        "the flow goes by `sctp`, which uses one pair of addresses; have it carried plainly first \
         (`margay stack set FLOW plain`)"
    )]
    Sctp,
    /// Some places are to be plain, and an end demands that it is sealed.
    #[error(
        "this host or the peer demands `secure` for this flow: by no place does it go as it is; `margay flow show` \
         says who demands"
    )]
    Demanded,
    /// Some places are to be plain; the others are to be sealed, and that cannot be.
    #[error("a flow with a plain place is sealed by the others, and this one cannot be sealed: {0}")]
    CannotSeal(ChangeRefused),
    /// The same; it is not sealed yet.
    #[error("a flow with a plain place is sealed by the others, and this one is not sealed yet")]
    NotSealed,
    /// Too many.
    #[error("this host has flows on {SIDE_PATHS_MAX} pairs of addresses of their own already")]
    Full,
}

/// Addresses, for a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListOf(pub Vec<IpAddr>);

impl core::fmt::Display for ListOf {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        self.0.iter().enumerate().try_for_each(|(at, address)| write!(f, "{}{address}", if at > 0 { ", " } else { "" }))
    }
}

impl Sal {
    /// Moves all flows with a peer, by order.
    ///
    /// # Errors
    ///
    /// Why not.
    pub fn migrate_host(&mut self, now: Instant, host: HostId, towards: Towards) -> Result<(), MoveRefused> {
        self.now = now;
        let present = self.associations.pair_of(host).ok_or(MoveRefused::UnknownPeer(host))?;
        let pairs = self.pairs_towards(host, present, towards)?;
        self.leave(now, Scope::of(host), Cause::Operator, false, pairs);
        Ok(())
    }

    /// Moves one flow, by order.
    ///
    /// # Errors
    ///
    /// Why not.
    pub fn migrate_flow(&mut self, now: Instant, id: FlowId, towards: Towards) -> Result<(), MoveRefused> {
        self.now = now;
        self.move_flow(now, id, towards)?;
        self.end_stripe(now, id, true);
        Ok(())
    }

    pub(crate) fn move_flow(&mut self, now: Instant, id: FlowId, towards: Towards) -> Result<(), MoveRefused> {
        let flow = self.flows.get(id).ok_or(MoveRefused::UnknownFlow(id))?;
        if !flow.carries_data() {
            return Err(MoveRefused::NotAlive(id));
        }
        let association = self.associations.get(flow.association).ok_or(MoveRefused::NotAlive(id))?;
        let (host, is_self) = (association.host, association.is_self());
        if is_self {
            return Err(MoveRefused::SameHost);
        }
        let scope = Scope { host, flow: id };
        let present = self.pair_in_use(scope).ok_or(MoveRefused::NotAlive(id))?;
        let pairs = self.pairs_towards(host, present, towards)?;
        let first = pairs.first().copied().unwrap_or(present);
        self.side_paths.check(Peer::Own, host, first).map_err(|_| MoveRefused::Full)?;
        self.may_lock_flow(now, id, Act::Move)?;
        self.leave(now, scope, Cause::Operator, false, pairs);
        Ok(())
    }

    fn pairs_towards(&self, host: HostId, present: Pair, towards: Towards) -> Result<Vec<Pair>, MoveRefused> {
        let fits = |pair: &Pair| match towards {
            Towards::Local(local) => pair.local == Some(local),
            Towards::Remote(remote) => pair.remote.ip() == remote,
        };
        let all = self.pairs_for(host);
        let pairs: Vec<Pair> = all.iter().copied().filter(fits).collect();
        if pairs.is_empty() {
            let (Towards::Local(wanted) | Towards::Remote(wanted)) = towards;
            let own = self.config.local_addresses.clone();
            let mut theirs = alloc::vec![present.remote.ip()];
            if let Some(location) = self.locations.get(Scope::of(host)) {
                theirs.extend(location.addresses.iter().map(SocketAddr::ip));
            }
            theirs.sort_unstable();
            theirs.dedup();
            return Err(MoveRefused::NoPair(wanted, ListOf(own), ListOf(theirs)));
        }
        if fits(&present) {
            return Err(MoveRefused::There);
        }
        Ok(pairs)
    }

    /// The record of a flow's own path.
    pub(crate) fn side_path(&self, id: PathId) -> Option<&SidePath> {
        self.side_paths.get(id)
    }

    /// From now on one flow goes by this pair. It is encapsulated until it has proved itself there, like a new one.
    pub(crate) fn place_flow(&mut self, now: Instant, scope: Scope, pair: Pair, broken: bool, cause: Cause) {
        let by = if cause == Cause::Peer { self.associations.peer_of(scope.host) } else { Peer::Own };
        let side = if self.associations.pair_of(scope.host) == Some(pair) {
            None
        } else {
            self.hold_side_path(by, scope.host, pair, true)
        };
        let Some(flow) = self.flows.get_mut(scope.flow) else { return };
        let former = core::mem::replace(&mut flow.side, side);
        let association = flow.association;
        if flow.direct.carriage != Carriage::Never {
            flow.direct.carriage = Carriage::Encapsulated;
            flow.direct.why = Why::Unproved;
            flow.direct.since = now;
            flow.direct.path = side.map_or(association, |id| id.0);
        }
        self.flows.install_again(&mut self.queue, scope.flow);
        // The cache takes what comes late by the former pair, and must know that pair until the flow has the new one.
        self.let_side_path_go(former);
        if broken {
            self.queue.restart(scope.flow);
        }
        self.flows.open_pinhole(&mut self.ports, &mut self.queue, now, scope.flow);
    }

    /// The record of a pair that `by` has chosen, which is made if there is none and room for it. `wired`: direct flows
    /// may name it.
    pub(crate) fn hold_side_path(&mut self, by: Peer, host: HostId, pair: Pair, wired: bool) -> Option<PathId> {
        if let Some(known) = self.side_paths.find(host, pair) {
            known.flows += 1;
            let (id, is_more) = (known.id, wired && !known.wired);
            known.wired |= wired;
            if is_more {
                self.announce_side_path(id);
            }
            return Some(id);
        }
        let id = loop {
            let id = PathId(self.associations.fresh_id(&mut self.rng));
            if self.side_path(id).is_none() {
                break id;
            }
        };
        self.side_paths.0.insert(by, id, SidePath { id, host, pair, flows: 1, wired }).ok()?;
        self.announce_side_path(id);
        Some(id)
    }

    fn announce_side_path(&mut self, id: PathId) {
        let Some(side) = self.side_path(id) else { return };
        let known = self.associations.by_host(side.host);
        let path = Path {
            id,
            remote: side.pair.remote,
            local: side.pair.local,
            datagram_max: known.map_or(self.config.datagram_max, |known| known.datagram_max),
            passage: Passage::Open,
            wired: side.wired,
            expected: None,
            watched: false,
            peer: known.map_or(Peer::Member(side.host), Association::peer),
        };
        self.queue.update(EntryUpdate::Path(path));
    }

    /// A flow is gone, or goes another way.
    pub(crate) fn let_side_path_go(&mut self, side: Option<PathId>) {
        let Some((id, known)) = side.and_then(|id| Some((id, self.side_paths.0.get_mut(&id)?))) else { return };
        known.flows -= 1;
        if known.flows == 0 {
            self.side_paths.0.remove(&id);
            self.queue.update(EntryUpdate::RemovePath(id));
        }
    }

    /// Flows whose own address is gone join the others.
    pub(crate) fn leave_lost_side_paths(&mut self, now: Instant) {
        let own = &self.config.local_addresses;
        let is_lost = |side: &&SidePath| side.pair.local.is_some_and(|local| !own.contains(&local));
        let lost: Vec<PathId> = self.side_paths.iter().filter(is_lost).map(|side| side.id).collect();
        if lost.is_empty() {
            return;
        }
        let of_lost = |flow: &&Flow| flow.side.is_some_and(|side| lost.contains(&side));
        let flows: Vec<FlowId> = self.flows.iter().filter(of_lost).map(|flow| flow.id).collect();
        for flow in flows {
            self.rejoin(now, flow, Cause::Address);
        }
    }

    /// A flow with a pair of its own goes back to the one that the others use. False where it has none.
    pub(crate) fn rejoin(&mut self, now: Instant, id: FlowId, cause: Cause) -> bool {
        let Some(side) = self.flows.get(id).and_then(|flow| flow.side) else { return false };
        let Some(host) = self.side_path(side).map(|side| side.host) else { return false };
        let Some(pair) = self.associations.pair_of(host) else { return false };
        let scope = Scope { host, flow: id };
        if self.locations.get(scope).is_none_or(|location| location.ask.is_none()) {
            self.leave(now, scope, cause, true, alloc::vec![pair]);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pairs_that_one_peer_has_chosen_leave_room_for_others_and_for_this_host() {
        let mut sides = SidePaths::new();
        let [host, other] = [1, 2].map(|number| HostId([number; 16]));
        let pair = |port| Pair { local: None, remote: SocketAddr::from(([192, 0, 2, 1], port)) };
        let place = |sides: &mut SidePaths, port: u16| {
            let side = SidePath { id: PathId(port.into()), host, pair: pair(port), flows: 1, wired: true };
            let may = sides.check(Peer::Member(host), host, side.pair);
            may.and_then(|()| sides.0.insert(Peer::Member(host), side.id, side)).is_ok()
        };
        assert_eq!((0..5000).filter(|port| place(&mut sides, *port)).count(), SIDE_PATHS_MAX / 16);
        assert_eq!(sides.check(Peer::Member(host), host, pair(0)), Ok(()), "more flows go by one that there is");
        assert_eq!(sides.check(Peer::Member(other), other, pair(0)), Ok(()));
        assert_eq!(sides.check(Peer::Own, host, pair(5000)), Ok(()));
    }
}
