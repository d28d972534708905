//! Flows that go by several pairs of addresses at once: which pairs, and whether they work (docs/decisions/0021).
//!
//! One end *leads*: it says which pairs are the flow's places, each by a PROBE with STRIPE that goes by that pair. The
//! other follows. Both send by a place when the other has answered a question of their own there; so nothing goes to an
//! address that has not answered.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{ArrivalsRepr, Extension, Flags, FlowId, Kind, Message, PLACES_MAX, Sharing, StripeRepr};

use crate::act::path::side_path::MoveRefused;
use crate::association::draft::Draft;
use crate::association::location::{Pair, Scope};
use crate::cache::entry::{EntryUpdate, PathId, Place, Places, StripeNews};
use crate::cache::queue::OutputQueue;
use crate::leg::carriage::{DirectEvent, Why};
use crate::leg::stack::PlaceStack;
use crate::machine::sal::Sal;
use crate::session::event::StripePlace;
use crate::session::flow::Flow;
use crate::session::flow::FlowTable;
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::Peer;
use crate::types::key::HostId;
use crate::types::role::Role;
use crate::types::time::Instant;

/// Flows that this host has striped, at most.
pub(crate) const STRIPED_MAX: usize = 256;
/// Flows that peers have striped; one of them has 64.
pub(crate) const PEERS_STRIPED_MAX: usize = 1024;
/// A place that works is asked again after so long, while the flow is active.
const ASK: Duration = Duration::from_millis(250);
/// One that does not, at first, and at most; doubled each time.
const ASK_FIRST: Duration = Duration::from_millis(50);
const ASK_MAX: Duration = Duration::from_secs(4);
/// After so many questions without an answer the host's own pair is looked at, if the place is that.
const MISSES: u32 = 3;
/// After so many by every place without any answer the flow is not striped: some six seconds.
const UNANSWERED: u32 = 7;
/// A flow that has carried nothing for so long is not probed for.
const ACTIVE: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_secs(1);

const UDP: u8 = 17;

/// The flow goes by several pairs no more.
const END: StripeRepr = StripeRepr {
    number: 0,
    place: 0,
    ends: true,
    leads: false,
    sharing: Sharing::Earliest,
    weight: 0,
    plain: false,
    fec: false,
};

/// One place of a flow.
#[derive(Debug)]
struct Leg {
    pair: Pair,
    path: PathId,
    /// Of the last question.
    number: u32,
    /// How that said that this end shares out.
    asked_with: Sharing,
    asked: Instant,
    next: Instant,
    misses: u32,
    rtt: Option<Duration>,
    is_proved: bool,
    /// How often it has its turn, where turns go by weights.
    weight: u8,
    /// What the leader says of that; 0: nothing.
    said_weight: u8,
    /// What this end wants to send by this place otherwise than by others.
    wants: Option<PlaceStack>,
    /// What the peer does, as its last question says.
    said: Option<PlaceStack>,
    /// What the peer's last answer says that it takes.
    agreed: Option<PlaceStack>,
}

/// What is kept of a striped flow.
#[derive(Debug)]
pub(crate) struct Striping {
    leads: bool,
    legs: [Option<Leg>; PLACES_MAX],
    reports: u32,
    next: Instant,
    /// How this end shares out.
    sharing: Sharing,
    /// How the peer does, as its last question says.
    peers: Sharing,
    /// The peer knows of other ways to share out than by arrival.
    is_able: bool,
}

impl Striping {
    /// As the cache's entry has it; `may_be_plain`: whether any place may be.
    pub fn places(&self, may_be_plain: bool) -> Places {
        let place = |leg: &Leg| Place {
            path: leg.path,
            may_send: leg.is_proved,
            weight: leg.weight,
            sends: leg.sends(may_be_plain),
            takes: leg.takes(may_be_plain),
        };
        Places {
            // A peer that does not know of copies would give them all to its program.
            sharing: if self.is_refused() { Sharing::Earliest } else { self.sharing },
            takes_copies: self.peers == Sharing::Redundant,
            places: core::array::from_fn(|at| self.legs[at].as_ref().map(place)),
        }
    }

    /// Whether nothing has shown yet that the peer drops what comes twice, and it would.
    fn is_refused(&self) -> bool {
        self.sharing == Sharing::Redundant && !self.is_able
    }

    /// How this end shares out.
    pub const fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// For lists; as [`places`](Self::places).
    pub fn list(&self, may_be_plain: bool) -> Vec<StripePlace> {
        let place = |(place, leg): (usize, &Option<Leg>)| {
            let leg = leg.as_ref()?;
            let Leg { pair, is_proved, rtt, weight, .. } = *leg;
            let sends = leg.sends(may_be_plain);
            let takes = leg.takes(may_be_plain);
            Some(StripePlace { place, pair, is_proved, rtt, weight, sends, takes })
        };
        self.legs.iter().enumerate().filter_map(place).collect()
    }

    /// Whether an address of the peer is one of a place.
    pub fn leads_to(&self, remote: SocketAddr) -> bool {
        self.pairs().any(|pair| pair.remote == remote)
    }

    /// What the peer is asked for: how this end shares out, and which places have a stack of their own.
    fn wanted(&self) -> (Sharing, [Option<PlaceStack>; PLACES_MAX]) {
        (self.sharing, core::array::from_fn(|at| self.legs[at].as_ref().and_then(|leg| leg.wants)))
    }

    fn pairs(&self) -> impl Iterator<Item = Pair> {
        self.legs.iter().flatten().map(|leg| leg.pair)
    }
}

impl Leg {
    /// The stack of its own by which this end sends, where any place may be plain or none.
    fn sends(&self, may_be_plain: bool) -> Option<PlaceStack> {
        let agreed = self.wants.filter(|stack| self.agreed == Some(*stack));
        agreed.filter(|stack| may_be_plain || *stack != PlaceStack::Plain)
    }

    /// The same of the peer.
    fn takes(&self, may_be_plain: bool) -> Option<PlaceStack> {
        self.said.filter(|stack| may_be_plain || *stack != PlaceStack::Plain)
    }
}

/// What a question or an answer says of its place.
const fn stack_of(said: StripeRepr) -> Option<PlaceStack> {
    match (said.plain, said.fec) {
        (true, _) => Some(PlaceStack::Plain),
        (false, true) => Some(PlaceStack::Fec),
        (false, false) => None,
    }
}

impl FlowTable {
    /// Whether what is lost of a flow may be repaired: TCP repeats by itself.
    pub(super) fn is_of_datagrams(&self, id: FlowId) -> bool {
        self.get(id).is_some_and(|flow| flow.app.protocol == UDP)
    }
}

impl Sal {
    /// From now on the flow goes by several pairs, as soon as they have shown that they work.
    ///
    /// # Errors
    ///
    /// Too many are striped, or the flow carries no data.
    pub(crate) fn begin_stripe(&mut self, now: Instant, id: FlowId, leads: bool) -> Result<(), MoveRefused> {
        let flow = self.flows.get(id).filter(|flow| flow.carries_data()).ok_or(MoveRefused::NotAlive(id))?;
        let association = self.associations.get(flow.association).filter(|association| !association.is_self());
        let by = association.map(|association| if leads { Peer::Own } else { association.peer() });
        let by = by.ok_or(MoveRefused::SameHost)?;
        self.striped.check(by).map_err(|_| MoveRefused::ManyStriped)?;
        if self.stack_rules.has_floor_for(&flow.service) {
            return Err(MoveRefused::Floor);
        }
        if flow.stacks.has_repaired() {
            return Err(MoveRefused::Fec);
        }
        if flow.stacks.has_repeated() {
            return Err(MoveRefused::Sctp);
        }
        if self.stack_changes.under_way(id).is_some() {
            return Err(MoveRefused::Changing);
        }
        if leads && self.is_to_be_sealed_first(flow) {
            return Err(MoveRefused::NotSealed);
        }
        self.release_stripe(id);
        self.striped.insert(by, id, ()).map_err(|_| MoveRefused::ManyStriped)?;
        // Only user space can stripe.
        self.direct_event(now, id, DirectEvent::Stalled, Why::Striped);
        self.direct_event(now, id, DirectEvent::PeerBack, Why::Striped);
        let Some(flow) = self.flows.get_mut(id) else { return Err(MoveRefused::NotAlive(id)) };
        flow.stripe = Some(Box::new(Striping {
            leads,
            legs: Default::default(),
            reports: 0,
            next: now,
            sharing: Sharing::default(),
            peers: Sharing::default(),
            is_able: false,
        }));
        self.counters.stripes += 1;
        self.share_out(now, id);
        self.flows.install_again(&mut self.queue, id);
        Ok(())
    }

    /// The flow goes by one pair again.
    pub(crate) fn end_stripe(&mut self, now: Instant, id: FlowId, tells: bool) {
        if self.leave_places(id, tells) {
            self.flows.open_pinhole(&mut self.ports, &mut self.queue, now, id);
        }
    }

    /// The same before anything of it goes by that pair. False where the flow was not striped.
    pub(crate) fn leave_places(&mut self, id: FlowId, tells: bool) -> bool {
        let Some(flow) = self.flows.get(id).filter(|flow| flow.stripe.is_some()) else { return false };
        let association = flow.association;
        if tells && let Some(host) = self.associations.get(association).map(|association| association.host) {
            let end = END;
            let pairs: Vec<Pair> = flow.stripe.iter().flat_map(|striping| striping.pairs()).collect();
            pairs.into_iter().for_each(|pair| self.send_stripe(Scope { host, flow: id }, pair, end, Flags::empty()));
        }
        self.release_stripe(id);
        self.flows.install_again(&mut self.queue, id);
        true
    }

    /// Its places are nobody's any more.
    fn release_stripe(&mut self, id: FlowId) {
        let striping = self.flows.get_mut(id).and_then(|flow| flow.stripe.take());
        self.let_stripe_go(id, striping);
    }

    pub(crate) fn let_stripe_go(&mut self, id: FlowId, striping: Option<Box<Striping>>) {
        self.striped.remove(&id);
        for leg in striping.into_iter().flat_map(|striping| striping.legs).flatten() {
            self.let_side_path_go(Some(leg.path));
        }
    }

    /// When the next question is due.
    pub(crate) fn stripes_deadline(&self) -> Option<Instant> {
        let of = |id: &FlowId| self.flows.get(*id).and_then(|flow| flow.stripe.as_ref()).map(|striping| striping.next);
        self.striped.iter().map(|(id, ())| id).filter_map(of).min()
    }

    pub(crate) fn stripes_due(&mut self, now: Instant) {
        let is_due = |id: &&FlowId| {
            let striping = self.flows.get(**id).and_then(|flow| flow.stripe.as_ref());
            striping.is_some_and(|striping| striping.next <= now)
        };
        let due: Vec<FlowId> = self.striped.iter().map(|(id, ())| id).filter(is_due).copied().collect();
        due.into_iter().for_each(|id| self.ask_places(now, id));
    }

    /// Asks by every place of a flow whose time has come.
    fn ask_places(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        let Some(host) = self.associations.get(flow.association).map(|association| association.host) else { return };
        let is_idle = now.since(flow.active) > ACTIVE;
        if flow.stripe.as_ref().is_some_and(|striping| striping.leads) {
            self.choose_places(now, host, id);
        }
        if self.flows.is_without_answer(id) {
            // It knows nothing of places, or none of these pairs works: the flow goes as others do.
            self.counters.policies_refused += 1;
            self.forget_share(id);
            self.end_stripe(now, id, true);
            return;
        }
        let scope = Scope { host, flow: id };
        let mut questions: Vec<(Pair, StripeRepr)> = Vec::new();
        let mut silent: Vec<Pair> = Vec::new();
        let may_be_plain = self.flows.get(id).is_some_and(Flow::may_be_plain_in_places);
        let Some(striping) = self.flows.get_mut(id).and_then(|flow| flow.stripe.as_mut()) else { return };
        let Striping { leads, sharing, .. } = **striping;
        for (place, leg) in (0..).zip(&mut striping.legs).filter_map(|(place, leg)| Some((place, leg.as_mut()?))) {
            if leg.next > now || is_idle && leg.is_proved {
                continue;
            }
            leg.number = self.rng.u32();
            leg.asked_with = sharing;
            leg.asked = now;
            let wait = if leg.is_proved && leg.misses == 0 { ASK } else { ASK_FIRST * (1 << leg.misses.min(8)) };
            leg.next = now + wait.min(ASK_MAX);
            leg.misses += 1;
            let weight = if sharing == Sharing::Weighted { leg.weight } else { 0 };
            let plain = may_be_plain && leg.wants == Some(PlaceStack::Plain);
            let fec = leg.wants == Some(PlaceStack::Fec);
            let number = leg.number;
            let ends = false;
            questions.push((leg.pair, StripeRepr { number, place, leads, sharing, weight, plain, fec, ends }));
            if leg.misses > MISSES && leg.is_proved {
                silent.push(leg.pair);
            }
        }
        let next = striping.legs.iter().flatten().map(|leg| leg.next).min().unwrap_or(now + ASK);
        striping.next = if is_idle { next.max(now + IDLE) } else { next.max(now + ASK_FIRST / 2) };
        questions.into_iter().for_each(|(pair, question)| self.send_stripe(scope, pair, question, Flags::empty()));
        if self.associations.pair_of(host).is_some_and(|pair| silent.contains(&pair)) {
            self.suspect(now, host, None);
        }
    }

    /// The leader's places: as many as there are pairs that have nothing in common, as far as can be seen from here.
    fn choose_places(&mut self, now: Instant, host: HostId, id: FlowId) {
        let Some(striping) = self.flows.get(id).and_then(|flow| flow.stripe.as_ref()) else { return };
        let present: Vec<Pair> = striping.pairs().collect();
        let wanted = self.apart(host, &present);
        let is_same = present.len() == wanted.len() && wanted.iter().all(|pair| present.contains(pair));
        if is_same {
            return;
        }
        if wanted.len() < 2 {
            self.end_stripe(now, id, true);
            return;
        }
        for place in 0..PLACES_MAX {
            let gone = self.flows.leg(id, place).is_some_and(|leg| !wanted.contains(&leg.pair));
            if gone {
                self.set_leg(now, id, place, None);
            }
        }
        for pair in wanted.into_iter().filter(|pair| !present.contains(pair)) {
            let free = (0..PLACES_MAX).find(|place| self.flows.leg(id, *place).is_none());
            if let Some(place) = free {
                self.set_leg(now, id, place, Some((host, pair)));
            }
        }
        self.flows.install_again(&mut self.queue, id);
    }

    /// Whether there is more than one pair for the flow to go by.
    pub(crate) fn has_several_pairs(&self, id: FlowId) -> bool {
        let association = self.flows.get(id).and_then(|flow| self.associations.get(flow.association));
        association.is_some_and(|association| self.apart(association.host, &[]).len() > 1)
    }

    /// Pairs that have nothing in common, those of `present` first. Where one end has fewer addresses, only its own are
    /// used twice.
    pub(crate) fn apart(&self, host: HostId, present: &[Pair]) -> Vec<Pair> {
        let is_v4 = self.associations.pair_of(host).is_some_and(|pair| pair.remote.is_ipv4());
        let mut all = self.pairs_for(host);
        all.retain(|pair| pair.local.is_some() && pair.remote.is_ipv4() == is_v4);
        let locals: BTreeSet<IpAddr> = all.iter().filter_map(|pair| pair.local).collect();
        let remotes: BTreeSet<SocketAddr> = all.iter().map(|pair| pair.remote).collect();
        let candidates = present.iter().filter(|pair| all.contains(pair)).chain(&all);
        let mut chosen: Vec<Pair> = Vec::new();
        for pair in candidates {
            let is_new_local = chosen.iter().all(|other| other.local != pair.local);
            let is_new_remote = chosen.iter().all(|other| other.remote != pair.remote);
            let fits = match locals.len().cmp(&remotes.len()) {
                core::cmp::Ordering::Less => is_new_remote && (is_new_local || chosen.len() >= locals.len()),
                core::cmp::Ordering::Equal => is_new_local && is_new_remote,
                core::cmp::Ordering::Greater => is_new_local && (is_new_remote || chosen.len() >= remotes.len()),
            };
            if fits && chosen.len() < PLACES_MAX {
                chosen.push(*pair);
            }
        }
        chosen
    }

    /// A place is this pair now, or none; nothing is known of it yet.
    fn set_leg(&mut self, now: Instant, id: FlowId, place: usize, pair: Option<(HostId, Pair)>) {
        let leads = self.flows.get(id).and_then(|flow| flow.stripe.as_ref()).is_some_and(|striping| striping.leads);
        let leg = pair.and_then(|(host, pair)| {
            let by = if leads { Peer::Own } else { self.associations.peer_of(host) };
            Some((pair, self.hold_side_path(by, host, pair, false)?))
        });
        let leg = leg.map(|(pair, path)| Leg {
            pair,
            path,
            number: 0,
            asked_with: Sharing::default(),
            asked: now,
            next: now,
            misses: 0,
            rtt: None,
            is_proved: false,
            weight: 1,
            said_weight: 0,
            wants: None,
            said: None,
            agreed: None,
        });
        let Some(striping) = self.flows.get_mut(id).and_then(|flow| flow.stripe.as_mut()) else { return };
        striping.next = now;
        let former = core::mem::replace(&mut striping.legs[place], leg);
        self.queue.update(EntryUpdate::Stripe { flow: id, news: StripeNews::Gone(place) });
        self.let_side_path_go(former.map(|leg| leg.path));
        self.share_out(now, id);
    }

    /// How this end shares a flow out, as far as is known: as this host wants it, or else as the one that leads says.
    pub(crate) fn sharing_of(&self, flow: &Flow) -> Sharing {
        let own = self.own_share(flow).map(|share| share.sharing);
        flow.stripe.as_ref().map_or(own.unwrap_or_default(), |striping| striping.sharing())
    }

    /// What a flow's places are shared out by may have changed. The peer is told with the next questions, which are
    /// asked now where it has.
    pub(crate) fn share_out(&mut self, now: Instant, id: FlowId) {
        let Some(own) = self.flows.get(id).map(|flow| self.own_share(flow)) else { return };
        let Some(striping) = self.flows.get_mut(id).and_then(|flow| flow.stripe.as_mut()) else { return };
        let before = striping.places(true);
        let was = striping.wanted();
        striping.sharing = own.map_or(striping.peers, |own| own.sharing);
        for leg in striping.legs.iter_mut().flatten() {
            leg.weight = own.map_or(leg.said_weight.max(1), |own| own.weights.of(&leg.pair));
            leg.wants = own.map_or(leg.said, |own| own.stacks.of(&leg.pair));
        }
        let after = striping.places(true);
        if before == after && was == striping.wanted() {
            return;
        }
        striping.next = now;
        striping.legs.iter_mut().flatten().for_each(|leg| leg.next = now);
        self.flows.install_again(&mut self.queue, id);
    }

    fn send_stripe(&mut self, scope: Scope, pair: Pair, stripe: StripeRepr, flags: Flags) {
        let extensions = [Extension::Stripe(stripe)];
        self.send_about(scope, pair, &extensions, flags);
    }

    fn send_about(&mut self, scope: Scope, pair: Pair, extensions: &[Extension<'_>], flags: Flags) {
        let Some(peer_flow) = self.flows.get(scope.flow).map(|flow| flow.peer_flow) else { return };
        let mut draft = Draft::new(Kind::Probe, peer_flow, scope.flow);
        draft.flags = flags;
        draft.extensions = extensions;
        self.send_over(scope.host, pair, draft);
    }

    /// A proved PROBE about the places of a flow.
    pub(crate) fn handle_stripe(
        &mut self,
        now: Instant,
        from: SocketAddr,
        scope: Scope,
        message: &Message<'_>,
        said: StripeRepr,
    ) -> Result<(), DropReason> {
        let flow = self.flows.get(scope.flow).ok_or(DropReason::UnknownFlow)?;
        let (is_striped, role) = (flow.stripe.is_some(), flow.role);
        let leads = flow.stripe.as_ref().is_some_and(|striping| striping.leads);
        if message.flags.contains(Flags::CONFIRM) {
            return self.place_works(now, scope.flow, said);
        }
        if said.ends {
            self.end_stripe(now, scope.flow, false);
            return Ok(());
        }
        let pair = Pair { local: self.arrival, remote: from };
        // Where both ends want to lead, the initiator does.
        let follows = said.leads && !(leads && role == Role::Initiator);
        let begins = follows && (leads || !is_striped);
        let begun = if begins { self.begin_stripe(now, scope.flow, false) } else { Ok(()) };
        if begun == Err(MoveRefused::Changing) {
            // The one that leads has made its change already, and this end will have in a moment: it asks again.
            return Err(DropReason::Unexpected);
        }
        if begun.is_err() || !said.leads && !leads {
            let end = StripeRepr { number: said.number, place: said.place, ..END };
            self.send_stripe(scope, pair, end, Flags::empty());
            return Err(DropReason::Unexpected);
        }
        if said.leads && !follows {
            return Err(DropReason::Unexpected);
        }
        let place = usize::from(said.place);
        if follows && self.flows.leg(scope.flow, place).is_none_or(|leg| leg.pair != pair) {
            self.set_leg(now, scope.flow, place, Some((scope.host, pair)));
            self.flows.install_again(&mut self.queue, scope.flow);
            self.ask_places(now, scope.flow);
        }
        self.note_sharing(now, scope.flow, said);
        let may_be_plain = self.flows.get(scope.flow).is_some_and(Flow::may_be_plain_in_places);
        let fec = said.fec && self.flows.is_of_datagrams(scope.flow);
        let answer = StripeRepr { leads, plain: said.plain && may_be_plain, fec, ..said };
        self.send_stripe(scope, pair, answer, Flags::CONFIRM);
        Ok(())
    }

    /// How the peer shares out, as its question by a place says.
    fn note_sharing(&mut self, now: Instant, id: FlowId, said: StripeRepr) {
        let may_repair = self.flows.is_of_datagrams(id);
        let Some(striping) = self.flows.get_mut(id).and_then(|flow| flow.stripe.as_mut()) else { return };
        let before = striping.places(true);
        striping.peers = said.sharing;
        striping.is_able |= said.sharing != Sharing::Earliest;
        if let Some(leg) = striping.legs.get_mut(usize::from(said.place)).and_then(Option::as_mut) {
            leg.said_weight = said.weight;
            leg.said = stack_of(said).filter(|stack| *stack != PlaceStack::Fec || may_repair);
        }
        let is_changed = before != striping.places(true);
        self.share_out(now, id);
        if is_changed {
            self.flows.install_again(&mut self.queue, id);
        }
    }

    /// The peer has answered a question by a place.
    fn place_works(&mut self, now: Instant, id: FlowId, said: StripeRepr) -> Result<(), DropReason> {
        let striping = self.flows.get_mut(id).and_then(|flow| flow.stripe.as_mut()).ok_or(DropReason::Unexpected)?;
        let place = usize::from(said.place);
        let leg = striping.legs.get_mut(place).and_then(Option::as_mut).ok_or(DropReason::Unexpected)?;
        if leg.number != said.number || leg.misses == 0 {
            return Err(DropReason::Stale);
        }
        let rtt = now.since(leg.asked);
        leg.rtt = Some(rtt);
        let asked_with = leg.asked_with;
        leg.misses = 0;
        leg.next = now + ASK;
        let is_new = !core::mem::replace(&mut leg.is_proved, true);
        let agreed = stack_of(said).filter(|stack| leg.wants == Some(*stack));
        let is_other = agreed != core::mem::replace(&mut leg.agreed, agreed);
        let was_able = striping.is_able;
        striping.is_able |= said.sharing != Sharing::Earliest;
        if striping.is_refused() && asked_with == Sharing::Redundant {
            // It answers, and does not know what a copy is: the flow goes as others do.
            self.counters.policies_refused += 1;
            self.forget_share(id);
            self.end_stripe(now, id, true);
            return Ok(());
        }
        if is_new || is_other || was_able != striping.is_able {
            self.flows.install_again(&mut self.queue, id);
        }
        self.queue.update(EntryUpdate::Stripe { flow: id, news: StripeNews::Alive { place, rtt } });
        Ok(())
    }

    /// The flow cache has seen trains of a striped flow arrive: its peer is told, by the place where the last one came.
    pub(crate) fn handle_arrivals(&mut self, id: FlowId, place: Option<usize>, arrivals: &ArrivalsRepr) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        let association = flow.association;
        let Some(striping) = flow.stripe.as_mut() else { return };
        striping.reports = striping.reports.wrapping_add(1);
        let arrivals = ArrivalsRepr { number: striping.reports, places: arrivals.places };
        let leg = place.and_then(|place| striping.legs.get(place)?.as_ref()).filter(|leg| leg.is_proved);
        let pair = leg.map(|leg| leg.pair);
        let Some(host) = self.associations.get(association).map(|association| association.host) else { return };
        if let Some(pair) = pair.or_else(|| self.associations.pair_of(host)) {
            self.send_about(Scope { host, flow: id }, pair, &[Extension::Arrivals(arrivals)], Flags::empty());
        }
    }
}

impl FlowTable {
    /// Whether the peer has answered by no place, often enough.
    fn is_without_answer(&self, id: FlowId) -> bool {
        let Some(striping) = self.get(id).and_then(|flow| flow.stripe.as_ref()) else { return false };
        let mut legs = striping.legs.iter().flatten();
        striping.leads && legs.all(|leg| !leg.is_proved && leg.misses > UNANSWERED)
    }

    fn leg(&self, id: FlowId, place: usize) -> Option<&Leg> {
        self.get(id)?.stripe.as_ref()?.legs.get(place)?.as_ref()
    }

    /// What the peer has received of a flow: the flow cache decides by it where to send.
    pub(crate) fn note_arrivals(
        &self,
        queue: &mut OutputQueue,
        id: FlowId,
        arrivals: ArrivalsRepr,
    ) -> Result<(), DropReason> {
        if self.get(id).is_none_or(|flow| flow.stripe.is_none()) {
            return Err(DropReason::Unexpected);
        }
        queue.update(EntryUpdate::Stripe { flow: id, news: StripeNews::Arrivals(arrivals) });
        Ok(())
    }
}
