//! RSYN: this host tells a peer where it is now, and hears where the peer is (docs/decisions/0018; DESIGN §10; Serval
//! §4.4, SCAFFOLD §4.2.2).
//!
//! ```text
//!   mover                          peer
//!   Asking   ── RSYN(n) ─────────▶          keeps nothing
//!            ◀─ RSYN-ACK(n, token)
//!   Closing  ── RSYN-DONE(n, token) ▶       commits: data goes to the new pair
//!            ◀─ RSYN-DONE(n) CONFIRM
//!   Settled
//! ```
//!
//! The token shows the peer that the mover receives what goes to its new address. RSYN and RSYN-DONE bear a challenge,
//! which differs by the address that they go to, and the answer repeats it: so the mover knows at which of its
//! addresses the peer receives, whatever source its answers have.

pub mod keepsake;
pub(crate) mod liveness;
pub(crate) mod placing;
pub(crate) mod redirect;
pub(crate) mod rendezvous;
mod routes;
pub(crate) mod translator;
pub mod twin;

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{
    Addresses, ErrorCode, Extension, Flags, FlowId, Kind, Message, MoveFlags, MoveRepr, PORT, ResolvableRepr,
};

use crate::act::moving::redirect::WISHES_MAX;
use crate::act::moving::rendezvous::SEEKS_MAX;
use crate::association::Association;
use crate::association::AssociationTable;
use crate::association::auth::Verified;
use crate::association::draft::{Draft, Reply, relay_part, relayed_from};
use crate::association::location::LocationTable;
use crate::association::location::{ADDRESSES_MAX, Ask, Cause, Location, MoveEvent, Numbered, PAIRS_MAX, Pair, Scope};
use crate::cache::queue::OutputQueue;
use crate::machine::sal::Sal;
use crate::session::Act;
use crate::session::event::Event;
use crate::session::flow::Flow;
use crate::session::flow::FlowTable;
use crate::types::config::Config;
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::time::Instant;

/// RSYN is padded to this many bytes, so that no answer to it is longer.
const RSYN_LEN: usize = 256;
/// Waits for an answer: without a known round trip, at least, and at most.
const WAIT_UNKNOWN: Duration = Duration::from_millis(100);
const WAIT_MIN: Duration = Duration::from_millis(150);
const WAIT_MAX: Duration = Duration::from_millis(1000);
/// RSYN-DONEs without a confirmation, after which the move begins again.
const DONES_MAX: u32 = 5;
/// Pairs that are asked over in the second round; the first asks over the best alone, the third over all.
const SECOND_ROUND: usize = 4;
const ENTRY_LEN: usize = 20;
/// How long data is taken from the address that an RSYN came from. RSYN-DONE comes a round trip later.
const EXPECTED_TIME: Duration = Duration::from_secs(2);

/// The wait before try number `tries` + 1.
pub(crate) fn wait_for(rtt: Option<Duration>, tries: u32) -> Duration {
    let first = rtt.map_or(WAIT_UNKNOWN, |rtt| (rtt + rtt / 2 + Duration::from_millis(10)).max(WAIT_MIN));
    first.saturating_mul(1 << tries.min(8)).min(WAIT_MAX)
}

impl Sal {
    /// Pairs by which a peer may be reached, the best first: the address in use, its others, and then from every
    /// address of this host.
    pub(crate) fn pairs_for(&self, host: HostId) -> Vec<Pair> {
        let Some(present) = self.associations.pair_of(host) else { return Vec::new() };
        let listed = self.locations.get(Scope::of(host)).map(|location| location.addresses.clone()).unwrap_or_default();
        let mut remotes = alloc::vec![present.remote];
        remotes.extend(listed.into_iter().filter(|remote| *remote != present.remote));
        let mut pairs: Vec<Pair> = Vec::new();
        let mut add = |pair: Pair| {
            if pairs.len() < PAIRS_MAX && !pairs.contains(&pair) {
                pairs.push(pair);
            }
        };
        for remote in &remotes {
            if let Some(local) = self.routes.get(&remote.ip()).copied().flatten() {
                add(Pair { local: Some(local), remote: *remote });
            }
        }
        // Where there is no route at all, there is none by another interface either.
        remotes.retain(|remote| self.routes.get(&remote.ip()).is_none_or(Option::is_some));
        for remote in &remotes {
            let same_family = |local: &&IpAddr| local.is_ipv4() == remote.is_ipv4();
            for local in self.config.local_addresses.iter().filter(same_family) {
                add(Pair { local: Some(*local), remote: *remote });
            }
        }
        pairs
    }

    /// Begins a move, in the place of one that is under way.
    pub(crate) fn leave(&mut self, now: Instant, scope: Scope, cause: Cause, broken: bool, pairs: Vec<Pair>) {
        self.locations.begin_move(now, scope, cause, broken, pairs);
        if scope.is_host() {
            self.locations.announce_paths(&self.associations, &mut self.queue, scope.host);
        }
        self.ask(now, scope);
    }

    /// A round of RSYN, or of RSYN-DONE.
    pub(crate) fn ask(&mut self, now: Instant, scope: Scope) {
        let is_needed = match self.flows.get(scope.flow) {
            Some(flow) => flow.carries_data(),
            None => scope.is_host() && self.associations.is_followed(scope.host),
        };
        if !is_needed {
            self.drop_move(scope);
            return;
        }
        let rtt = self.associations.by_host(scope.host).and_then(|association| association.rtt);
        let round = self.locations.with(scope, |location| {
            let ask = location.ask.as_mut()?;
            if ask.answered.is_some() && ask.tries >= DONES_MAX {
                return Some((Vec::new(), 0, ask.answered, ask.cause));
            }
            let pairs = match ask.tries {
                0 => ask.pairs.iter().take(1).copied().collect(),
                1 => ask.pairs.iter().take(SECOND_ROUND).copied().collect(),
                _ => ask.pairs.clone(),
            };
            ask.next = now + wait_for(rtt, ask.tries);
            ask.tries += 1;
            Some((pairs, ask.tries, ask.answered, ask.cause))
        });
        match round {
            Some((_, tries, None, Cause::Sought)) if tries > WISHES_MAX => self.drop_move(scope),
            Some((_, tries, None, _)) if tries > SEEKS_MAX && self.locations.is_unheard(scope) => self.drop_move(scope),
            Some((_, 0, Some((answered, _)), _)) => {
                // The peer has answered over this pair, and may have committed to it.
                let others = self.pairs_for(scope.host).into_iter().filter(|pair| *pair != answered);
                let pairs = core::iter::once(answered).chain(others).take(PAIRS_MAX).collect();
                self.replace_unconfirmed(now, scope, answered, pairs);
            }
            Some((_, _, Some((pair, token)), _)) => {
                let is_hearsay = |location: &Location| location.ask.as_ref().is_some_and(|ask| ask.is_hearsay);
                let is_proved = !self.locations.get(scope).is_some_and(is_hearsay);
                if is_proved || self.locations.may_ask(&self.associations, now, scope.host, pair) {
                    self.send_done(scope, pair, token);
                }
            }
            Some((pairs, tries, None, cause)) => {
                for pair in pairs {
                    if self.locations.may_ask(&self.associations, now, scope.host, pair) {
                        self.send_rsyn(scope, pair);
                    }
                }
                // Where data alone is lost, a router would bring both together where they are.
                if tries > 1 && cause != Cause::Unanswered {
                    self.send_by_rendezvous(now, scope);
                }
            }
            None => {}
        }
    }

    pub(crate) fn drop_move(&mut self, scope: Scope) {
        self.locations.with(scope, |location| {
            location.take(MoveEvent::Dropped);
            location.ask = None;
        });
        self.unlock_flow(self.now, scope.flow, Act::Move);
        if scope.is_host() {
            self.locations.announce_paths(&self.associations, &mut self.queue, scope.host);
        }
    }

    /// A deadline of a location has come.
    pub(crate) fn locations_due(&mut self, now: Instant) {
        while let Some(scope) = self.locations.next_due(now) {
            let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
            let Some(location) = self.locations.get(scope) else { return };
            if is_due(location.ask.as_ref().map(|ask| ask.next)) {
                self.ask(now, scope);
            } else if is_due(location.suspicion.as_ref().map(|suspicion| suspicion.until)) {
                self.judge(now, scope.host);
            } else if is_due(location.keep_alive) {
                self.keep_alive(now, scope.host);
            } else if is_due(location.expected.map(|(_, until)| until)) {
                self.locations.with(scope, |location| location.expected = None);
                self.locations.announce_paths(&self.associations, &mut self.queue, scope.host);
            } else {
                self.prove_direct(now, scope.host);
            }
        }
    }

    /// Keeps what a proved peer says of where it can be reached, if it has said nothing later. Before it has answered,
    /// a few messages go there that ask whether it is there (see `Unproved`), and no data.
    pub(crate) fn note_whereabouts(&mut self, association: u32, message: &Message<'_>) {
        let is_last = |known: &&Association| known.is_fresh && known.window.is_newest(message.control_seq);
        let Some(host) = self.associations.get(association).filter(is_last).map(|known| known.host) else { return };
        let is_usable = |address: &SocketAddr| {
            let ip = address.ip();
            address.port() != 0 && !ip.is_unspecified() && !ip.is_loopback() && !ip.is_multicast()
        };
        let listed = message.addresses();
        if listed.is_none() && message.rendezvous().is_none() {
            return;
        }
        let (has_changed, has_router) = self.locations.with(Scope::of(host), |location| {
            let (before, router) = (location.addresses.clone(), location.rendezvous);
            if let Some(listed) = listed {
                location.addresses.clear();
                for address in listed.iter().map(|(address, _)| address).filter(is_usable) {
                    let is_new = location.addresses.iter().all(|known| known.ip() != address.ip());
                    if is_new && location.addresses.len() < ADDRESSES_MAX {
                        location.addresses.push(address);
                    }
                }
            }
            location.rendezvous = message.rendezvous().filter(is_usable).or(location.rendezvous);
            (location.addresses != before, location.rendezvous != router)
        });
        if has_changed {
            self.stripe_what_waits(self.now);
        }
        if has_router {
            self.events.push(Event::Whereabouts(host));
        }
    }

    /// This host has other addresses, though none that it uses with the peer has gone; or another router.
    pub(crate) fn tell_addresses(&mut self, host: HostId) {
        let Some(local_id) = self.associations.by_host(host).map(|association| association.local_id) else { return };
        let addresses = self.config.own_addresses();
        let own = Addresses::parse(&addresses).map(Extension::Addresses).into_iter();
        let extensions: Vec<_> = own.chain(self.associations.own_rendezvous(&self.config)).collect();
        let mut draft = Draft::new(Kind::Probe, FlowId(0), FlowId(0));
        draft.extensions = &extensions;
        self.seal_and_send(local_id, draft);
    }

    fn send_rsyn(&mut self, scope: Scope, pair: Pair) {
        self.write_rsyn(scope, pair, None);
    }

    pub(crate) fn write_rsyn(&mut self, scope: Scope, pair: Pair, resolvable: Option<ResolvableRepr>) {
        let Some(location) = self.locations.get(scope) else { return };
        let flags =
            if location.ask.as_ref().is_some_and(|ask| ask.broken) { MoveFlags::BROKEN } else { MoveFlags::empty() };
        let unspecified = IpAddr::V6(core::net::Ipv6Addr::UNSPECIFIED);
        let address = SocketAddr::new(pair.local.unwrap_or(unspecified), PORT);
        let number = location.number;
        let challenge = challenge(&self.move_secret, scope, number, pair.remote);
        let location = Extension::Move(MoveRepr { number, token: 0, challenge, address, flags });
        let (peer_flow, own_flow) = self.flows.flow_numbers(scope);
        let addresses = self.config.own_addresses();
        let mut extensions = alloc::vec![location];
        extensions.extend(Addresses::parse(&addresses).map(Extension::Addresses));
        extensions.extend(self.associations.own_rendezvous(&self.config));
        let mut draft = Draft::new(Kind::Rsyn, peer_flow, own_flow);
        draft.flags = if resolvable.is_some() { Flags::RESOLVABLE } else { Flags::empty() };
        draft.resolvable = resolvable;
        draft.extensions = &extensions;
        draft.pad_to = RSYN_LEN;
        self.send_over(scope.host, pair, draft);
    }

    /// Seals under the newest association with the host, and sends by a pair of its own.
    pub(crate) fn send_over(&mut self, host: HostId, pair: Pair, draft: Draft<'_>) {
        let (epoch, kind) = (self.config.epoch, draft.kind);
        let newest = self.associations.by_host(host).map(|association| association.local_id);
        let Some(association) = newest.and_then(|id| self.associations.get_mut(id)) else { return };
        if let Some(datagram) = draft.seal(association, epoch) {
            self.transmit_from(pair.local, pair.remote, datagram, kind);
        }
    }

    /// The mover may be behind an address translator that lets in its router alone.
    fn relay_answer(&mut self, scope: Scope, via: SocketAddr, mover: SocketAddr, answer: MoveRepr) {
        let (peer_flow, own_flow) = self.flows.flow_numbers(scope);
        let extensions = [Extension::Move(answer)];
        let mut draft = Draft::new(Kind::RsynAck, peer_flow, own_flow);
        draft.flags = Flags::RESOLVABLE | Flags::RELAY;
        draft.resolvable = Some(relay_part(mover));
        draft.extensions = &extensions;
        let epoch = self.config.epoch;
        let hop_key = self.associations.hop_key_of(via);
        let newest = self.associations.by_host(scope.host).map(|association| association.local_id);
        let Some(association) = newest.and_then(|id| self.associations.get_mut(id)) else { return };
        if let Some(mut datagram) = draft.seal(association, epoch) {
            Self::tag_hop(&mut datagram, hop_key);
            self.transmit(via, datagram, Kind::RsynAck);
        }
    }

    fn send_done(&mut self, scope: Scope, pair: Pair, token: u64) {
        let Some(location) = self.locations.get(scope) else { return };
        let flags =
            if location.ask.as_ref().is_some_and(|ask| ask.broken) { MoveFlags::BROKEN } else { MoveFlags::empty() };
        let flags = flags | self.seals(scope, pair);
        let number = location.number;
        let challenge = challenge(&self.move_secret, scope, number, pair.remote);
        let location = MoveRepr { number, token, challenge, address: pair.remote, flags };
        self.send_move(Kind::RsynDone, Flags::empty(), scope, pair, location);
    }

    /// What a peer is told of flows that are to be sealed at a pair before anything of them goes there.
    fn seals(&self, scope: Scope, pair: Pair) -> MoveFlags {
        if self.seals_at(scope, pair) { MoveFlags::SEALED } else { MoveFlags::empty() }
    }

    fn send_move(&mut self, kind: Kind, flags: Flags, scope: Scope, pair: Pair, location: MoveRepr) {
        let (peer_flow, own_flow) = self.flows.flow_numbers(scope);
        let extensions = [Extension::Move(location)];
        let mut draft = Draft::new(kind, peer_flow, own_flow);
        draft.flags = flags;
        draft.extensions = &extensions;
        self.send_over(scope.host, pair, draft);
    }

    /// The token that shows that the answer to an RSYN came to where the RSYN came from.
    fn token(&self, host: HostId, flow: FlowId, epoch: u32, number: u32, source: SocketAddr) -> u64 {
        let mut hasher = blake3::Hasher::new_keyed(&self.move_secret);
        hasher.update(&host.0).update(&flow.0.to_be_bytes()).update(&epoch.to_be_bytes()).update(&number.to_be_bytes());
        first_word(&hash_address(&mut hasher, source).finalize())
    }

    /// Somebody says that it is elsewhere now.
    pub(crate) fn handle_rsyn(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Verified<'_>,
        datagram: &[u8],
    ) -> Result<(), DropReason> {
        let association = message.association();
        let theirs = message.location().ok_or(DropReason::Malformed)?;
        let epoch = message.auth().map_or(0, |auth| auth.epoch);
        let scope = match self.flows.scope_of(&self.associations, association, message) {
            Err(DropReason::UnknownFlow) => {
                self.fail_unknown(association, message, from);
                return Err(DropReason::UnknownFlow);
            }
            other => other?,
        };
        let reply = match &message.resolvable {
            Some(resolvable) => self.reply_path(from, resolvable, datagram),
            None => Reply::straight(from),
        };
        self.note_whereabouts(association, message);
        let found = Numbered { number: theirs.number, by: scope.host };
        let pair = Pair { local: self.arrival, remote: reply.direct };
        if message.resolvable.is_none() {
            // It has sent as much from there as it may get.
            self.locations.with(Scope::of(scope.host), |location| location.unproved.answered(pair));
        }
        self.may_move(now, scope, theirs.flags)?;
        if !scope.is_host() && self.associations.pair_of(scope.host) != Some(pair) {
            let by = self.associations.peer_of(scope.host);
            self.side_paths.check(by, scope.host, pair).map_err(|_| DropReason::Full)?;
        }
        if let Some(number) = self.refusal_of(scope, found, pair) {
            let answer = MoveRepr { number, token: 0, address: pair.remote, flags: MoveFlags::STALE, ..theirs };
            // Also what is of no use shows where the peer is.
            self.send_move(Kind::RsynAck, Flags::empty(), scope, pair, answer);
            self.ask_there_too(scope, pair);
            return Err(DropReason::Stale);
        }
        if !self.locations.with(scope, |location| location.may_commit(now)) {
            self.events.push(Event::Flapping(scope.host));
            return Err(DropReason::RateLimited);
        }
        let token = self.token(scope.host, scope.flow, epoch, theirs.number, reply.direct);
        let flags = self.seals(scope, pair);
        let answer = MoveRepr { token, address: reply.direct, flags, ..theirs };
        self.send_move(Kind::RsynAck, Flags::empty(), scope, pair, answer);
        self.locations.expect(&self.associations, &mut self.queue, now, scope, reply.direct);
        if let Some(via) = reply.via {
            self.relay_answer(scope, via, reply.direct, answer);
        }
        self.ask_there_too(scope, pair);
        Ok(())
    }

    /// How far the count is, where the RSYN of a peer is of no later location than is known. Nothing where it is later,
    /// or the one in force said again.
    fn refusal_of(&mut self, scope: Scope, found: Numbered, pair: Pair) -> Option<u32> {
        let own = self.config.host_id();
        let is_here = self.pair_in_use(scope).is_some_and(|known| known.remote == pair.remote);
        let (is_later, is_last, number) = self.locations.with(scope, |location| {
            let number = location.force.number.max(location.spent);
            (location.is_later(found, own), found == location.force, number)
        });
        let is_refused = !(is_later || is_last && is_here);
        is_refused.then_some(number)
    }

    /// This host is moving itself, and the peer is not where its RSYNs go: now one goes there.
    fn ask_there_too(&mut self, scope: Scope, pair: Pair) {
        let wished = self.locations.wish_instead_of(scope, pair);
        let is_new = self.locations.with(scope, |location| match &mut location.ask {
            Some(ask) if ask.answered.is_none() && !ask.pairs.iter().any(|known| known.remote == pair.remote) => {
                ask.pairs.truncate(PAIRS_MAX - 2);
                ask.pairs.insert(0, pair);
                if let Some(wished) = wished {
                    ask.pairs.insert(0, wished);
                    ask.wish = Some(wished);
                }
                true
            }
            _ => false,
        });
        if is_new {
            for pair in wished.into_iter().chain([pair]) {
                self.send_rsyn(scope, pair);
            }
        }
    }

    fn fail_unknown(&mut self, association: u32, message: &Message<'_>, to: SocketAddr) {
        let extensions = [Extension::Error(margay_wire::ErrorRepr { code: ErrorCode::UnknownFlow, text: "" })];
        let mut draft = Draft::new(Kind::Fail, message.src_flow, message.dst_flow);
        draft.extensions = &extensions;
        let Some(host) = self.associations.get(association).map(|association| association.host) else { return };
        self.send_over(host, Pair { local: self.arrival, remote: to }, draft);
    }

    /// RSYN-ACK: the peer has heard of this host's new place.
    pub(crate) fn handle_rsyn_ack(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Verified<'_>,
    ) -> Result<(), DropReason> {
        let association = message.association();
        let theirs = message.location().ok_or(DropReason::Malformed)?;
        let scope = self.flows.scope_of(&self.associations, association, message)?;
        let relayed = relayed_from(message);
        let source = relayed.unwrap_or(from);
        let is_by_own_router = relayed.is_some() && self.associations.is_own_router_at(from);
        let named = self.locations.get(Scope::of(scope.host)).and_then(|location| location.rendezvous);
        if relayed.is_some() && !is_by_own_router && named != Some(from) {
            return Err(DropReason::WrongPath);
        }
        // Anybody can write a source into a packet, and routers pass on what they see.
        let receives_at = |remote| theirs.challenge == challenge(&self.move_secret, scope, theirs.number, remote);
        let is_proved = receives_at(source);
        let reached: Vec<SocketAddr> = [source, from].into_iter().filter(|remote| receives_at(*remote)).collect();
        let arrival = self.arrival;
        if theirs.flags.contains(MoveFlags::STALE) {
            return self.count_on(now, scope, theirs.number);
        }
        if arrival.is_some_and(|local| !self.config.local_addresses.contains(&local)) {
            return Err(DropReason::WrongPath);
        }
        self.lock_move(now, scope, theirs.number)?;
        let answered = self.locations.with(scope, |location| {
            if location.number != theirs.number {
                return Err(DropReason::Stale);
            }
            let ask = location.ask.as_mut().filter(|ask| ask.answered.is_none()).ok_or(DropReason::Unexpected)?;
            let asked = ask.pairs.iter().find(|pair| pair.remote == source).copied();
            let local = arrival.or_else(|| asked.and_then(|pair| pair.local));
            let pair = Pair { local, remote: source };
            ask.answered = Some((pair, theirs.token));
            ask.is_hearsay = !is_proved && !is_by_own_router;
            location.spent = location.spent.max(location.number);
            let rtt = (ask.tries == 1).then(|| now.since(ask.asked));
            (ask.tries, ask.next) = (0, now);
            // A peer that has not shown to be there has to confirm RSYN-DONE first.
            let result = (pair, ask.broken && is_proved, ask.cause, rtt);
            location.take(MoveEvent::Answered);
            Ok(result)
        });
        let (pair, is_placed, cause, rtt) = answered?;
        // The peer, or the router that has passed on to it what went there.
        self.locations.with(Scope::of(scope.host), |location| {
            reached.into_iter().for_each(|remote| location.unproved.answered(Pair { remote, ..pair }));
        });
        if theirs.flags.contains(MoveFlags::SEALED) {
            self.stack_rules.note_peer_demand(&mut self.rng, now, scope);
        }
        if let Some(rtt) = rtt {
            self.associations.note_rtt(scope.host, rtt);
        }
        if scope.is_host() {
            self.locations.note_seen(&self.associations, &self.config, now, scope.host, theirs.address);
        }
        self.ask(now, scope);
        if is_placed {
            // It is there, and what was in use is dead.
            self.place(now, scope, pair, true, cause);
        }
        Ok(())
    }

    /// The peer's count is further than this host's, which may have started again: on from there.
    fn count_on(&mut self, now: Instant, scope: Scope, number: u32) -> Result<(), DropReason> {
        let is_behind = self.locations.with(scope, |location| {
            let Some(ask) = location.ask.as_mut().filter(|ask| ask.answered.is_none()) else { return false };
            if number < location.number {
                return false;
            }
            location.number = number.saturating_add(1);
            ask.next = now;
            true
        });
        if is_behind {
            self.ask(now, scope);
        }
        Ok(())
    }

    /// RSYN-DONE: the mover is where it says; or the peer's word that it has committed to where this host is.
    pub(crate) fn handle_rsyn_done(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Verified<'_>,
    ) -> Result<(), DropReason> {
        let association = message.association();
        let theirs = message.location().ok_or(DropReason::Malformed)?;
        let scope = self.flows.scope_of(&self.associations, association, message)?;
        if message.flags.contains(Flags::CONFIRM) {
            return self.end_move(now, scope, from, &theirs);
        }
        let epoch = message.auth().map_or(0, |auth| auth.epoch);
        if theirs.token != self.token(scope.host, scope.flow, epoch, theirs.number, from) {
            return Err(DropReason::BadToken);
        }
        self.may_move(now, scope, theirs.flags)?;
        // The token is of this start.
        self.associations.note_fresh(association);
        let own = self.config.host_id();
        let pair = Pair { local: self.arrival, remote: from };
        let found = Numbered { number: theirs.number, by: scope.host };
        let is_here = self.pair_in_use(scope).is_some_and(|pair| pair.remote == from);
        let wish = self.locations.wish_instead_of(scope, pair).map(|wished| (wished, 0));
        let (is_later, is_last) = self.locations.with(scope, |location| {
            let result = (location.is_later(found, own), location.force == found);
            if result.0 {
                location.force = found;
                location.note_commit(now);
                // Where the peer is now, it has found this host; an older move of this host's own has no more to say.
                location.take(MoveEvent::Dropped);
                (location.ask, location.suspicion, location.expected) = (None, None, None);
            }
            result
        });
        if !(is_later || is_last && is_here) {
            self.ask_there_too(scope, pair);
            return Err(DropReason::Stale);
        }
        let confirmed = MoveRepr { address: from, flags: MoveFlags::empty(), ..theirs };
        self.send_move(Kind::RsynDone, Flags::CONFIRM, scope, pair, confirmed);
        if is_later {
            self.unlock_flow(now, scope.flow, Act::Move);
            if theirs.flags.contains(MoveFlags::SEALED) {
                self.stack_rules.note_peer_demand(&mut self.rng, now, scope);
            }
            self.place(now, scope, pair, theirs.flags.contains(MoveFlags::BROKEN), Cause::Peer);
            self.pursue(now, scope, wish);
        }
        Ok(())
    }

    fn end_move(&mut self, now: Instant, scope: Scope, from: SocketAddr, theirs: &MoveRepr) -> Result<(), DropReason> {
        let own = self.config.host_id();
        let expected = challenge(&self.move_secret, scope, theirs.number, from);
        if theirs.challenge != expected {
            return Err(DropReason::BadToken);
        }
        let ended = self.locations.with(scope, |location| {
            let ask = location.ask.as_ref().filter(|_| location.number == theirs.number).ok_or(DropReason::Stale)?;
            let chosen = |(pair, token): &(Pair, u64)| pair.remote == from && *token == theirs.token;
            let (pair, _) = ask.answered.filter(chosen).ok_or(DropReason::Unexpected)?;
            location.force = Numbered { number: location.number, by: own };
            let result = (pair, ask.broken, ask.cause, ask.wish.map(|wished| (wished, ask.unconfirmed)));
            location.take(MoveEvent::Confirmed);
            location.ask = None;
            Ok(result)
        });
        let (pair, broken, cause, wish) = ended?;
        // What is to be sealed where it is now needs the lock itself.
        self.unlock_flow(now, scope.flow, Act::Move);
        if self.pair_in_use(scope) != Some(pair) || cause == Cause::Restart {
            self.place(now, scope, pair, broken, cause);
        } else if scope.is_host() {
            self.locations.watch_direct(&self.associations, &mut self.queue, scope.host);
        }
        self.pursue(now, scope, wish);
        Ok(())
    }

    /// The pair that a scope's packets go by.
    pub(crate) fn pair_in_use(&self, scope: Scope) -> Option<Pair> {
        let side = self.flows.get(scope.flow).and_then(|flow| flow.side).and_then(|id| self.side_path(id));
        side.map(|side| side.pair).or_else(|| self.associations.pair_of(scope.host))
    }
}

/// What a message of a move bears that goes to `remote`. Only a peer that receives there can repeat it.
fn challenge(secret: &[u8; 32], scope: Scope, number: u32, remote: SocketAddr) -> u64 {
    let mut hasher = blake3::Hasher::new_keyed(secret);
    // No input of a token is as long.
    hasher.update(b"challenge").update(&scope.host.0).update(&scope.flow.0.to_be_bytes()).update(&number.to_be_bytes());
    first_word(&hash_address(&mut hasher, remote).finalize())
}

fn hash_address(hasher: &mut blake3::Hasher, address: SocketAddr) -> &mut blake3::Hasher {
    let ip = match address.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    hasher.update(&ip.octets()).update(&address.port().to_be_bytes())
}

fn first_word(hash: &blake3::Hash) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

impl AssociationTable {
    /// Whether it matters where a peer and this host find each other: there are flows, or it is a router.
    pub(crate) fn is_followed(&self, host: HostId) -> bool {
        self.all_with(host).any(|association| !association.is_self() && (association.flows > 0 || association.router))
    }

    /// The pair in use with a host.
    pub(crate) fn pair_of(&self, host: HostId) -> Option<Pair> {
        self.by_host(host).map(|association| Pair { local: association.local, remote: association.remote })
    }

    /// A message under the association answers one of this start.
    pub(crate) fn note_fresh(&mut self, association: u32) {
        if let Some(association) = self.get_mut(association) {
            association.is_fresh = true;
        }
    }

    pub(crate) fn note_rtt(&mut self, host: HostId, rtt: Duration) {
        let newest = self.by_host(host).map(|association| association.local_id);
        if let Some(association) = newest.and_then(|id| self.get_mut(id)) {
            association.rtt = Some(rtt);
        }
    }
}

impl LocationTable {
    /// The same without a word of it yet.
    pub(crate) fn begin_move(&mut self, now: Instant, scope: Scope, cause: Cause, broken: bool, pairs: Vec<Pair>) {
        self.with(scope, |location| {
            let was_broken = location.ask.as_ref().is_some_and(|ask| ask.broken);
            if !location.take(MoveEvent::Leave) {
                return;
            }
            location.number = location.next_number();
            location.suspicion = None;
            let broken = broken || was_broken;
            location.ask = Some(Ask {
                cause,
                broken,
                unheard: false,
                pairs,
                asked: now,
                tries: 0,
                next: now,
                answered: None,
                is_hearsay: false,
                wish: None,
                unconfirmed: 0,
            });
        });
    }

    /// A mover whose old address is dead sends data right behind its RSYN-DONE, and the data may be looked at first. So
    /// data is taken from the new address for [`EXPECTED_TIME`], and once for each move: a peer that never sends
    /// RSYN-DONE must not acknowledge for long what goes to an address that it has left.
    fn expect(
        &mut self,
        associations: &AssociationTable,
        queue: &mut OutputQueue,
        now: Instant,
        scope: Scope,
        source: SocketAddr,
    ) {
        let is_new = self.with(scope, |location| {
            let is_new = location.expected_in.replace(location.force) != Some(location.force);
            if is_new {
                location.expected = Some((source, now + EXPECTED_TIME));
            }
            is_new
        });
        if is_new && scope.is_host() {
            self.announce_paths(associations, queue, scope.host);
        }
    }
}

impl FlowTable {
    fn flow_numbers(&self, scope: Scope) -> (FlowId, FlowId) {
        (self.get(scope.flow).map_or(FlowId(0), |flow| flow.peer_flow), scope.flow)
    }

    /// What a proved message about a move is of: all flows, or one that this host shares with the sender.
    pub(crate) fn scope_of(
        &self,
        associations: &AssociationTable,
        association: u32,
        message: &Message<'_>,
    ) -> Result<Scope, DropReason> {
        let host = associations.get(association).map(|association| association.host);
        let host = host.ok_or(DropReason::UnknownAssociation)?;
        let flow = message.dst_flow;
        if flow.0 == 0 {
            return Ok(Scope::of(host));
        }
        let of_peer = |known: &&Flow| associations.is_same_peer(known.association, association);
        if self.get(flow).filter(of_peer).is_some_and(Flow::carries_data) {
            return Ok(Scope { host, flow });
        }
        Err(DropReason::UnknownFlow)
    }
}

impl Config {
    /// This host's addresses, as the value of ADDRESSES.
    pub(crate) fn own_addresses(&self) -> Vec<u8> {
        let own = self.local_addresses.iter().take(ADDRESSES_MAX);
        let mut bytes = alloc::vec![0; own.len() * ENTRY_LEN];
        for (address, entry) in own.zip(bytes.chunks_exact_mut(ENTRY_LEN)) {
            Addresses::emit_one(SocketAddr::new(*address, PORT), 0, entry);
        }
        bytes
    }
}
