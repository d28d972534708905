//! Whether the addresses in use still work (docs/decisions/0018): traffic is the probe. Where it goes unanswered, the
//! pair in use is asked, and the others beside it; one that answers while the present one does not is moved to. Where
//! probes are answered and a connection's data is not, another pair that answers is tried.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{Addresses, Extension, Flags, FlowId, Kind, Message, MoveFlags, MoveRepr};

use crate::association::Association;
use crate::association::AssociationTable;
use crate::association::auth::Verified;
use crate::association::draft::Draft;
use crate::association::location::LocationTable;
use crate::association::location::{Cause, Location, Moving, PAIRS_MAX, Pair, Question, Scope, Suspicion, Trouble};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::FlowTable;
use crate::types::drop_reason::DropReason;
use crate::types::key::HostId;
use crate::types::time::Instant;

/// A pair that was just seen to be alive is not asked again for so long.
const LOOK_REST: Duration = Duration::from_millis(500);
/// Waits for answers: without a known round trip; in addition to two of them; and at most.
const WAIT_UNKNOWN: Duration = Duration::from_millis(300);
const WAIT_MORE: Duration = Duration::from_millis(50);
const WAIT_MAX: Duration = Duration::from_secs(2);
/// Data of a connection that goes unanswered for so long, and four round trips more, is lost, whatever becomes of
/// probes.
const DATA_LOST: Duration = Duration::from_secs(1);
/// Rounds of probes in which none but the pair in use is heard, after which no other is there.
const DATA_ROUNDS: u32 = 5;
/// Where no pair is better, all are tried again after so long.
const DEAF_REST: Duration = Duration::from_secs(10);
/// After so many rounds without any answer the peer is silent, and nothing is lost by chance alone.
const SILENT_ROUNDS: u32 = 2;
/// What a connection's own timer waits for is at most as long as it has waited already; and some more, which is the
/// longest first wait.
const LOST_MORE: Duration = Duration::from_secs(3);

/// A PROBE that has one of these is about flows that wait to be encrypted.
const OF_SEALING: MoveFlags =
    MoveFlags::SEALED.union(MoveFlags::FREED).union(MoveFlags::DEMANDED).union(MoveFlags::WAITS);

impl Sal {
    /// The flow cache has seen nothing come by the path of a flow that goes encapsulated for longer than its traffic
    /// allows, or no answer to the flow itself. `unanswered`: how long the flow's own data has been waiting for one;
    /// zero for datagrams, which nobody need answer.
    pub(crate) fn handle_silence(&mut self, now: Instant, id: FlowId, unanswered: Duration) {
        let Some(flow) = self.flows.get(id) else { return };
        let Some(association) = self.associations.get(flow.association) else { return };
        let (host, is_aside) = (association.host, flow.side.is_some());
        let rtt = self.associations.by_host(host).and_then(|association| association.rtt);
        let is_lost = unanswered >= DATA_LOST + rtt.unwrap_or_default() * 4;
        if is_lost && !is_aside {
            let until = now + unanswered.saturating_mul(2) + LOST_MORE;
            self.locations.with(Scope::of(host), |location| location.lost_until = location.lost_until.max(Some(until)));
        }
        let looked = self.locations.get(Scope::of(host)).and_then(|location| location.looked);
        let is_alive = looked.is_some_and(|at| now.since(at) < unanswered);
        match is_lost {
            true if is_aside => {
                self.rejoin(now, id, Cause::Unanswered);
            }
            false if is_aside => {}
            true if is_alive => self.doubt(now, host),
            _ => self.suspect(now, host, None),
        }
    }

    /// The network has said that an address, or its network, cannot be reached. Anybody can say so: peers there that
    /// this host has flows with are asked at once, as often as [`LOOK_REST`] lets, and nothing else comes of it.
    pub(crate) fn handle_unreachable(&mut self, now: Instant, remote: IpAddr) {
        let hosts: BTreeSet<HostId> = self.associations.at_ip(remote).map(|association| association.host).collect();
        for host in hosts {
            if self.associations.pair_of(host).is_some_and(|pair| pair.remote.ip() == remote) {
                self.suspect(now, host, None);
            }
        }
    }

    /// What is wrong with how a peer and this host find each other, for people.
    pub(crate) fn trouble_with(&self, host: HostId) -> Option<Trouble> {
        let location = self.locations.get(Scope::of(host))?;
        if location.flapping.is_some_and(|until| self.now < until) {
            return Some(Trouble::Flapping);
        }
        if self.locations.is_unheard(Scope::of(host)) {
            let own = self.associations.by_host(host)?;
            let is_other = |other: &Association| other.host != host && other.heard > own.heard;
            let has_other = self.associations.at_address(own.remote).any(is_other);
            return Some(if has_other { Trouble::OtherHost } else { Trouble::Silent });
        }
        let is_lost = location.deaf && location.lost_until.is_some_and(|until| self.now < until);
        is_lost.then_some(Trouble::Unanswered)
    }

    /// Probes are answered, and data is not: which other pair may do better?
    fn doubt(&mut self, now: Instant, host: HostId) {
        let is_at_rest = self.locations.with(Scope::of(host), |location| {
            let is_at_rest = location.deaf && location.looked.is_some_and(|at| now.since(at) < DEAF_REST);
            if location.deaf && !is_at_rest {
                location.tried.clear();
            }
            is_at_rest
        });
        if is_at_rest {
            return;
        }
        let is_free = |location: &Location| location.state == Moving::Settled && location.suspicion.is_none();
        if self.locations.get(Scope::of(host)).is_none_or(is_free) {
            self.begin_suspicion(now, host, None, true);
        }
    }

    /// Asks whether the pair in use is alive, and the others; also one by which the peer may be found.
    pub(crate) fn suspect(&mut self, now: Instant, host: HostId, found: Option<Pair>) {
        let is_at_rest = self.locations.get(Scope::of(host)).is_none_or(|location| {
            let was_seen = location.looked.is_some_and(|at| now.since(at) < LOOK_REST);
            location.state == Moving::Settled && location.suspicion.is_none() && !was_seen
        });
        if is_at_rest {
            self.begin_suspicion(now, host, found, false);
        }
    }

    fn begin_suspicion(&mut self, now: Instant, host: HostId, found: Option<Pair>, of_data: bool) {
        let Some(present) = self.associations.pair_of(host).filter(|_| self.associations.is_followed(host)) else {
            return;
        };
        let mut pairs = alloc::vec![present];
        let others = found.into_iter().chain(self.pairs_for(host));
        pairs.extend(others.filter(|pair| *pair != present));
        let suspicion = Suspicion::new(now, pairs, &mut self.rng, of_data);
        self.locations.with(Scope::of(host), |location| location.suspicion = Some(suspicion));
        self.ask_pairs(now, host);
    }

    /// Asks whether the pair in use is alive, and how the peer sees this host; the others only if there is no answer.
    pub(crate) fn ask_present(&mut self, now: Instant, host: HostId) {
        let Some(present) = self.associations.pair_of(host) else { return };
        let rng = &mut self.rng;
        let is_begun = self.locations.with(Scope::of(host), |location| {
            if location.suspicion.is_some() {
                return false;
            }
            location.suspicion = Some(Suspicion::new(now, [present], rng, false));
            true
        });
        if is_begun {
            self.ask_pairs(now, host);
        }
    }

    fn ask_pairs(&mut self, now: Instant, host: HostId) {
        let rtt = self.associations.by_host(host).and_then(|association| association.rtt);
        let asked = self.locations.with(Scope::of(host), |location| {
            let suspicion = location.suspicion.as_mut()?;
            let wait = rtt.map_or(WAIT_UNKNOWN, |rtt| rtt * 2 + WAIT_MORE);
            suspicion.asked = now;
            suspicion.until = now + wait.saturating_mul(1 << suspicion.tries.min(4)).min(WAIT_MAX);
            suspicion.tries += 1;
            Some(suspicion.questions.clone())
        });
        for (place, Question { pair, number }) in asked.into_iter().flatten().enumerate() {
            if self.locations.may_ask(&self.associations, now, host, pair) {
                let probe = MoveRepr {
                    number,
                    token: place as u64,
                    challenge: 0,
                    address: pair.remote,
                    flags: MoveFlags::empty(),
                };
                self.send_probe(host, pair, probe, Flags::empty());
            }
        }
    }

    pub(crate) fn send_probe(&mut self, host: HostId, pair: Pair, probe: MoveRepr, flags: Flags) {
        // Where else it can be reached, should this pair die.
        let addresses = self.config.own_addresses();
        let own = Addresses::parse(&addresses).map(Extension::Addresses);
        let extensions: Vec<_> = core::iter::once(Extension::Move(probe)).chain(own).collect();
        let mut draft = Draft::new(Kind::Probe, FlowId(0), FlowId(0));
        draft.flags = flags;
        draft.extensions = &extensions;
        self.send_over(host, pair, draft);
    }

    /// A tagged PROBE is answered, to where it came from, by what it said and the source that was seen.
    pub(crate) fn handle_probe(
        &mut self,
        now: Instant,
        from: SocketAddr,
        message: &Verified<'_>,
    ) -> Result<(), DropReason> {
        let association = message.association();
        let host = self.associations.get(association).map(|association| association.host);
        let host = host.ok_or(DropReason::UnknownAssociation)?;
        if let Some(said) = message.stripe() {
            let scope = self.flows.scope_of(&self.associations, association, message)?;
            return self.handle_stripe(now, from, scope, message, said);
        }
        if let Some(arrivals) = message.arrivals() {
            let scope = self.flows.scope_of(&self.associations, association, message)?;
            return self.flows.note_arrivals(&mut self.queue, scope.flow, arrivals);
        }
        if let Some(loss) = message.loss() {
            let scope = self.flows.scope_of(&self.associations, association, message)?;
            let is_answer = message.flags.contains(Flags::CONFIRM);
            return self.note_loss(scope.flow, loss, message.timing(), is_answer);
        }
        let probe = message.location();
        if let Some(probe) = probe {
            let is_answer = message.flags.contains(Flags::CONFIRM);
            if is_answer && self.twins.hear_elder(&self.associations, &mut self.events, now, host, probe.number) {
                return Ok(());
            }
            if !is_answer && probe.flags.contains(MoveFlags::TWIN) {
                self.twins.note_twin(&mut self.events, now, host, probe.address);
            }
        }
        let asked = self.locations.get(Scope::of(host)).and_then(|location| location.suspicion.as_ref());
        let is_asked = |probe: &MoveRepr| asked.is_some_and(|asked| asked.pair_of(probe).is_some());
        if message.flags.contains(Flags::CONFIRM) && probe.as_ref().is_some_and(is_asked) {
            self.associations.note_fresh(association);
        }
        self.note_whereabouts(association, message);
        if message.flags.contains(Flags::CONFIRM) {
            return probe.map_or(Ok(()), |probe| self.handle_alive(now, host, &probe));
        }
        let pair = Pair { local: self.arrival, remote: from };
        let Some(probe) = probe else {
            self.confirm_probe(association, message, pair);
            return Ok(());
        };
        if probe.flags.intersects(MoveFlags::DIRECT | MoveFlags::OPENED) {
            self.hear_of_direct(now, host, pair, &probe);
            return Ok(());
        }
        if probe.flags.intersects(OF_SEALING) {
            let scope = self.flows.scope_of(&self.associations, association, message).unwrap_or(Scope::of(host));
            self.hear_of_sealing(now, scope, pair, probe);
            return Ok(());
        }
        let is_known = self.associations.pair_of(host).is_some_and(|known| known.remote == from);
        if probe.flags.contains(MoveFlags::ELSEWHERE) {
            if is_known {
                prove_where(self, now, host, pair);
            }
            return Ok(());
        }
        let flags = if is_known { MoveFlags::empty() } else { MoveFlags::ELSEWHERE };
        self.send_probe(host, pair, MoveRepr { address: from, flags, ..probe }, Flags::CONFIRM);
        // The first pair that a peer asks over is the one that it uses.
        if is_known && probe.token == 0 {
            self.redirect(now, host, pair);
        }
        Ok(())
    }

    fn confirm_probe(&mut self, association: u32, message: &Message<'_>, pair: Pair) {
        let epoch = self.config.epoch;
        let mut draft = Draft::new(Kind::Probe, message.src_flow, message.dst_flow);
        draft.flags = Flags::CONFIRM;
        let Some(association) = self.associations.get_mut(association) else { return };
        if let Some(datagram) = draft.seal(association, epoch) {
            self.transmit_from(pair.local, pair.remote, datagram, Kind::Probe);
        }
    }

    /// The peer has answered a probe of a suspicion.
    fn handle_alive(&mut self, now: Instant, host: HostId, probe: &MoveRepr) -> Result<(), DropReason> {
        let scope = Scope::of(host);
        let judged = self.locations.with(scope, |location| {
            let suspicion = location.suspicion.as_mut()?;
            let pair = suspicion.pair_of(probe)?;
            location.unproved.answered(pair);
            let (rtt, was_silent) = (now.since(suspicion.asked), suspicion.tries > SILENT_ROUNDS);
            if probe.token == 0 {
                suspicion.is_alive = true;
                if !suspicion.of_data {
                    location.suspicion = None;
                }
                location.looked = Some(now);
                return Some((true, was_silent, rtt));
            }
            if !suspicion.answered.contains(&pair) {
                suspicion.answered.push(pair);
                // The present one had as much time as this one took, and half as much again.
                suspicion.until = suspicion.until.min(now + rtt / 2 + Duration::from_millis(5));
            }
            Some((false, false, rtt))
        });
        let Some((is_alive, was_silent, rtt)) = judged else { return Err(DropReason::Stale) };
        self.associations.note_rtt(host, rtt);
        if is_alive {
            self.locations.note_seen(&self.associations, &self.config, now, host, probe.address);
        }
        if was_silent {
            // The network was away, and is back: timers that have backed off would keep connections waiting.
            self.flows.restart_connections(&self.associations, &mut self.queue, now, host);
        }
        if is_alive && probe.flags.contains(MoveFlags::ELSEWHERE) {
            let pairs = self.associations.pair_of(host).into_iter().collect();
            self.leave(now, scope, Cause::Rebound, true, pairs);
        }
        Ok(())
    }

    /// The time for answers is over.
    pub(crate) fn judge(&mut self, now: Instant, host: HostId) {
        let scope = Scope::of(host);
        if self.judge_data(now, host) {
            return;
        }
        let answered = self.locations.with(scope, |location| {
            let suspicion = location.suspicion.as_mut()?;
            if suspicion.answered.is_empty() {
                return Some(Vec::new());
            }
            location.suspicion.take().map(|suspicion| suspicion.answered)
        });
        match answered {
            Some(answered) if answered.is_empty() => {
                let rounds =
                    self.locations.get(scope).and_then(|location| location.suspicion.as_ref()).map(|s| s.tries);
                if rounds >= Some(SILENT_ROUNDS) && self.associations.is_followed(host) {
                    return self.seek(now, host);
                }
                let others = if self.associations.is_followed(host) { Some(self.pairs_for(host)) } else { None };
                let rng = &mut self.rng;
                self.locations.with(scope, |location| match (&mut location.suspicion, others) {
                    // Those that there are now.
                    (Some(suspicion), Some(others)) => suspicion.extend(others, rng),
                    (suspicion, _) => *suspicion = None,
                });
                self.ask_pairs(now, host);
            }
            Some(answered) => self.leave(now, scope, Cause::Silence, true, answered),
            None => {}
        }
    }

    /// The same where data goes unanswered, and the pair in use has answered: another that answered as well is tried,
    /// each once.
    fn judge_data(&mut self, now: Instant, host: HostId) -> bool {
        let Some(present) = self.associations.pair_of(host) else { return false };
        let scope = Scope::of(host);
        let judged = self.locations.with(scope, |location| {
            let suspicion = location.suspicion.as_ref().filter(|suspicion| suspicion.of_data && suspicion.is_alive)?;
            let is_better = |pair: &Pair| *pair != present && !location.tried.contains(pair);
            let better: Vec<Pair> = suspicion.answered.iter().copied().filter(is_better).collect();
            // One that may be better is not there because a probe was lost.
            let is_over =
                suspicion.tries >= DATA_ROUNDS || !suspicion.questions.iter().any(|asked| is_better(&asked.pair));
            if better.is_empty() && !is_over {
                return Some(Doubt::Open);
            }
            (location.suspicion, location.looked) = (None, Some(now));
            location.tried.retain(|pair| *pair != present);
            location.tried.truncate(PAIRS_MAX);
            location.tried.push(present);
            let was_deaf = core::mem::replace(&mut location.deaf, better.is_empty());
            Some(if was_deaf && better.is_empty() { Doubt::Known } else { Doubt::Over(better) })
        });
        match judged {
            None => return false,
            Some(Doubt::Known) => {}
            Some(Doubt::Open) => self.ask_pairs(now, host),
            Some(Doubt::Over(better)) if better.is_empty() => self.events.push(Event::Unanswered(host)),
            Some(Doubt::Over(better)) => self.leave(now, scope, Cause::Unanswered, true, better),
        }
        true
    }
}

/// A peer sends to another address than this host sends from, and needs a proof to change that.
fn prove_where(sal: &mut Sal, now: Instant, host: HostId, pair: Pair) {
    let is_settled = sal.locations.get(Scope::of(host)).is_none_or(|known| known.state == Moving::Settled);
    if is_settled && sal.associations.is_followed(host) {
        sal.leave(now, Scope::of(host), Cause::Rebound, true, alloc::vec![pair]);
    }
}

impl LocationTable {
    /// Data of a flow that went encapsulated and unanswered for long has been answered.
    pub(crate) fn handle_answer(&mut self, flows: &FlowTable, associations: &AssociationTable, id: FlowId) {
        let association = flows.get(id).filter(|flow| flow.side.is_none()).map(|flow| flow.association);
        if let Some(host) = association.and_then(|id| associations.get(id)).map(|association| association.host) {
            self.note_data_passes(host);
        }
    }

    /// Data passes by the pair in use.
    pub(crate) fn note_data_passes(&mut self, host: HostId) {
        let is_doubted = |location: &Location| location.lost_until.is_some() || !location.tried.is_empty();
        if self.get(Scope::of(host)).is_some_and(is_doubted) {
            self.with(Scope::of(host), |location| {
                (location.tried, location.deaf, location.lost_until) = (Vec::new(), false, None);
            });
        }
    }
}

/// What has come of probes where data goes unanswered.
enum Doubt {
    /// A pair that may be better has not been heard yet.
    Open,
    /// None is, as before.
    Known,
    /// These are.
    Over(Vec<Pair>),
}
