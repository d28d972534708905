//! The right anchor: the host of the session's server.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};
use core::time::Duration;

use margay_wire::{
    CutRepr, ErrorCode, FlowId, PORT, ReconfigurationRepr, ReconfigurationStep, SessionId, SessionRepr, SpliceRepr,
};

use super::cut::{Cut, Scales, Way};
use super::parting::STUCK;
use super::splice::facts_of;
use super::vouching::{Said, Vouched};
use super::{PATIENCE, ReconfigurationRefused, Reconfigurations, Ways, bare};
use crate::act::chain::{Read, service_of};
use crate::act::stack_change::Sends;
use crate::association::AssociationTable;
use crate::association::auth::Verified;
use crate::association::draft::Arrival;
use crate::cache::entry::Directions;
use crate::leg::delta::Delta;
use crate::machine::sal::Sal;
use crate::session::flow::{Flow, Setup};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::{Full, Peer};
use crate::types::key::HostId;
use crate::types::name::ServiceId;
use crate::types::role::Role;
use crate::types::time::Instant;

/// Longer than the left anchor waits in any state before it gives a new way up.
const AWAITED: Duration = Duration::from_secs(4);
/// The left anchor is asked so often whether it sends by the new way, too.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// The old way's next host is told so often that it is over, once the left anchor should have said so.
const LEAVE_AGAIN: Duration = Duration::from_millis(300);
/// After so long without its word the session goes by the old way again.
const LEASE: Duration = crate::session::LEASE_MAX;

/// How far the right anchor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FollowingState {
    /// It has agreed.
    Asked,
    /// The new way stands at this end.
    Ready,
    /// It sends by the new way.
    Turned,
    /// A program leaves: both ways are in use, each end's data by their numbers.
    Parting,
    /// So does the left anchor. The old way is there until it is taken down.
    Finished,
}

/// A reconfiguration that this host follows.
#[derive(Debug)]
pub(super) struct Following {
    pub ways: Ways,
    state: FollowingState,
    sends: Sends,
    until: Instant,
    /// Of a session whose program between two connections leaves.
    spliced: Option<Spliced>,
}

/// What the host of a program that leaves has said.
#[derive(Debug)]
struct Spliced {
    /// The host of the session's client from now on.
    client: HostId,
    /// The boxes that both ends will be between, in order.
    boxes: Vec<ServiceId>,
    /// The session that the flow was of before.
    session: SessionId,
    /// What the numbers of the two connections differ by.
    delta: Delta,
    /// By how many bits windows are shifted that the program's TCP is told.
    scales: Scales,
    /// The left anchor's end of the new way stands.
    is_confirmed: bool,
    /// The left anchor awaits nothing more by the old way.
    is_finishing: bool,
}

impl Spliced {
    /// `session`: that of the flow.
    fn of(now: Instant, session: SessionId, splice: &SpliceRepr, vouched: Vouched) -> Self {
        let facts = facts_of(splice);
        Self {
            client: HostId(splice.host),
            boxes: vouched.boxes,
            session,
            delta: facts.delta(now),
            scales: Scales { told: facts.right.own_scale, own: Some(facts.right.peer_scale) },
            is_confirmed: false,
            is_finishing: false,
        }
    }
}

impl Following {
    pub fn due(&self) -> Instant {
        let parting = self.ways.parting.as_ref().and_then(|parting| parting.due());
        let held = self.ways.held_until.into_iter().chain(self.ways.gate_due());
        let next = self.sends.next.into_iter().chain(held).chain(parting).min();
        next.map_or(self.until, |next| next.min(self.until))
    }

    /// The left anchor asks for a later change by a flow: the one before is over there, whose last word has not come.
    /// Gives the way that its program sends by.
    fn concluded_by(&self, id: FlowId, number: u32) -> Option<Way> {
        use FollowingState::{Finished, Ready, Turned};
        // Of a session whose program leaves, both ways are in use.
        let is_later = number.wrapping_sub(self.ways.number).cast_signed() > 0;
        if !is_later || self.spliced.is_some() {
            return None;
        }
        match self.state {
            Turned | Finished if self.ways.new == Some(id) => Some(Way::New),
            Ready | Turned | Finished if self.ways.old == id => Some(Way::Old),
            _ => None,
        }
    }

    pub fn may_turn_back(&self) -> bool {
        // Behind the old way of a session whose program has left there is nobody.
        self.spliced.is_none() && matches!(self.state, FollowingState::Turned | FollowingState::Finished)
    }
}

impl Reconfigurations {
    /// The session that a flow was of before it had two ways.
    pub fn session_before(&self, flow: &Flow) -> SessionId {
        let following = self.following.get(&flow.session).filter(|one| one.ways.old == flow.id);
        let spliced = following.filter(|_| flow.role == Role::Responder).and_then(|one| one.spliced.as_ref());
        spliced.map_or(flow.session, |spliced| spliced.session)
    }

    /// Follows a change from here on, or the later one that replaces one that has not begun.
    fn follow(&mut self, peer: Peer, session: SessionId, asked: Following) -> Result<(), Full> {
        match self.following.get_mut(&session) {
            Some(known) if known.state == FollowingState::Asked => {
                known.ways.number = asked.ways.number;
                known.until = asked.until;
                Ok(())
            }
            Some(_) => Ok(()),
            None => self.following.insert(peer, session, asked),
        }
    }

    /// Whether the left anchor sends by the new way of a session whose program leaves: there is no way back.
    fn has_parted(&self, session: SessionId) -> bool {
        let following = self.following.get(&session).filter(|one| one.spliced.is_some());
        following.is_some_and(|one| {
            one.ways.has_turned || one.ways.parting.as_ref().is_some_and(|parting| parting.cut.has_peer())
        })
    }
}

impl Flow {
    /// Where its peer may reach this host, which has these addresses.
    fn own_address(&self, associations: &AssociationTable, addresses: &[IpAddr]) -> SocketAddr {
        let association = associations.get(self.association);
        let is_v4 = association.is_none_or(|peer| peer.remote.is_ipv4());
        let of_family = addresses.iter().find(|ip| ip.is_ipv4() == is_v4).copied();
        let own = of_family.or_else(|| association.and_then(|peer| peer.local));
        own.map_or(super::nowhere(), |own| SocketAddr::new(own, PORT))
    }
}

impl Sal {
    /// What the left anchor says.
    pub(super) fn follower_hears(
        &mut self,
        now: Instant,
        id: FlowId,
        message: &Verified<'_>,
        said: ReconfigurationRepr,
    ) -> Result<(), DropReason> {
        use ReconfigurationStep as Step;
        if said.step == Step::Request {
            return self.asked_for_way(now, id, said, message);
        }
        if said.step == Step::Told {
            return self.hear_told(now, id, message, said);
        }
        let session = self.flows.get(id).map(|flow| flow.session).ok_or(DropReason::UnknownFlow)?;
        let known = self.reconfigurations.following.get(&session).filter(|one| one.ways.has(id));
        let Some(following) = known.filter(|one| one.ways.number == said.number) else {
            return self.answer_of_forgotten(id, said);
        };
        let is_old = following.ways.old == id;
        let state = following.state;
        match (said.step, is_old) {
            (Step::Confirm, false) if following.spliced.is_some() => {
                self.confirmed_cut(now, session, message.cut());
            }
            (Step::Finish, false) if following.spliced.is_some() => {
                self.finished_cut(now, session, message.cut());
            }
            (Step::Confirm, false) => self.confirmed_way(now, session, id),
            (Step::Finish, false) => self.finished_way(now, session, id),
            (Step::Fence, true) => self.hear_fence(now, session, Role::Responder),
            (Step::Leave, true) if matches!(state, FollowingState::Turned | FollowingState::Finished) => {
                self.say_step(id, ReconfigurationStep::Left, said.number);
                self.leave_old(now, session);
            }
            (Step::Leave, false) if state != FollowingState::Finished => {
                self.say_step(id, ReconfigurationStep::Left, said.number);
                self.leave_new(now, session);
            }
            (Step::Left, true) if state == FollowingState::Finished => self.leave_old(now, session),
            (Step::Left, false) if state != FollowingState::Finished => self.leave_new(now, session),
            // Bytes may have come by the new way that are acknowledged.
            (Step::Cancel, true) if self.reconfigurations.has_parted(session) => return Err(DropReason::Unexpected),
            (Step::Cancel, true) => {
                self.leave_new(now, session);
                self.say_step(id, Step::Canceled, said.number);
            }
            _ => return Err(DropReason::Unexpected),
        }
        Ok(())
    }

    /// The left anchor speaks of a reconfiguration that this start of the agent knows nothing of, or that is over.
    fn answer_of_forgotten(&mut self, id: FlowId, said: ReconfigurationRepr) -> Result<(), DropReason> {
        use ReconfigurationStep as Step;
        let goes_by_it = self.flows.get(id).is_some_and(|flow| flow.directions == Directions::Both);
        let answer = match said.step {
            Step::Confirm if goes_by_it => Step::Done,
            Step::Finish if goes_by_it => Step::Finished,
            Step::Cancel if goes_by_it => Step::Canceled,
            _ => return Err(DropReason::Stale),
        };
        self.say_step(id, answer, said.number);
        Ok(())
    }

    /// The left anchor asks whether the session may go another way.
    fn asked_for_way(
        &mut self,
        now: Instant,
        id: FlowId,
        said: ReconfigurationRepr,
        message: &Verified<'_>,
    ) -> Result<(), DropReason> {
        let flow = self.flows.get(id).ok_or(DropReason::UnknownFlow)?;
        let own = flow.session;
        let peer = flow.peer_of(&self.associations, flow.far_end(&self.associations));
        let splice = message.splice();
        let vouched = match &splice {
            None => None,
            Some(splice) => {
                let asked = Said { number: said.number, to: self.reconfigurations.session_before(flow), splice };
                Some(asked.read(message, flow.far_end_by_boxes(&self.associations))?)
            }
        };
        // Of the two sessions the left one's number stays.
        let session = splice.map_or(own, |splice| splice.session);
        let last = self.reconfigurations.numbers.get(&id).copied().filter(|_| splice.is_none());
        if last.is_some_and(|last| said.number.wrapping_sub(last).cast_signed() <= 0) {
            return Err(DropReason::Stale);
        }
        let earlier = self.reconfigurations.following.get(&session).filter(|_| splice.is_none());
        match earlier.and_then(|one| one.concluded_by(id, said.number)) {
            Some(Way::New) => self.leave_old(now, session),
            Some(Way::Old) => self.leave_new(now, session),
            None => {}
        }
        let refused = match self.reconfigurations.following.get(&session) {
            Some(known) if known.ways.number == said.number => None,
            // Another host's session has this number, or one is under way.
            Some(known) if known.ways.old != id || known.state != FollowingState::Asked => {
                Some(ReconfigurationRefused::UnderWay)
            }
            _ => match splice {
                None => self.may_go_another_way(id, Role::Responder).err(),
                Some(splice) => self.why_not_spliced(id, own, &splice),
            },
        };
        if let Some(refused) = refused {
            let no = bare(ReconfigurationStep::Refuse, said.number);
            self.say_step_repr(id, no, Some(refused.code()));
            return Ok(());
        }
        let spliced = splice.zip(vouched).map(|(splice, vouched)| Spliced::of(now, own, &splice, vouched));
        let asked = Following {
            ways: Ways::of(id, said.number),
            spliced,
            state: FollowingState::Asked,
            sends: Sends { next: None, ..Sends::starting(now) },
            until: now + AWAITED,
        };
        if let Err(full) = self.reconfigurations.follow(peer, session, asked) {
            let no = bare(ReconfigurationStep::Refuse, said.number);
            self.say_step_repr(id, no, Some(ReconfigurationRefused::Full(full).code()));
            return Ok(());
        }
        self.flows.set_session(id, session);
        let own = self.flows.get(id);
        let address =
            own.map_or(super::nowhere(), |own| own.own_address(&self.associations, &self.config.local_addresses));
        let yes = ReconfigurationRepr { address, ..bare(ReconfigurationStep::Answer, said.number) };
        self.say_step_repr(id, yes, None);
        Ok(())
    }

    /// Why a session does not go on with another client's host.
    fn why_not_spliced(&self, id: FlowId, own: SessionId, splice: &SpliceRepr) -> Option<ReconfigurationRefused> {
        let is_known = splice.session != own && self.flows.of_session(splice.session).next().is_some();
        let is_self = HostId(splice.host) == self.config.host_id();
        match self.may_leave_way(id, Role::Responder) {
            Err(refused) => Some(refused),
            // Program and client, or program and server, on this host.
            Ok(_) if is_known || is_self => Some(ReconfigurationRefused::SameHost),
            Ok(_) => None,
        }
    }

    /// Why a SYN does not set up another way of a session that ends here. At a box, none is known of.
    pub(crate) fn why_no_way(
        &self,
        arrival: &Arrival<'_>,
        read: &Read,
        begin: ReconfigurationRepr,
        claimed: HostId,
    ) -> Option<ErrorCode> {
        if read.is_at_box() {
            return None;
        }
        let SessionRepr { session, protocol, .. } = arrival.message.session()?;
        let known = self.reconfigurations.following.get(&session);
        let known = known.filter(|one| one.ways.number == begin.number && one.ways.new.is_none());
        let is_here = begin.step == ReconfigurationStep::Begin && HostId(begin.host) == self.config.host_id();
        let spliced = known.and_then(|one| one.spliced.as_ref());
        // Who demands boxes, and whose they are, goes by both names: the session's, and at a proxy the proxy's.
        let destination = arrival.message.chain().map_or(arrival.service, |chain| ServiceId(chain.destination()));
        let is_its = |flow: &&Flow| {
            (flow.service, flow.app.protocol) == (destination, protocol)
                && (spliced.is_some() || flow.asked() == arrival.service)
        };
        let Some(flow) = known.filter(|_| is_here).and_then(|one| self.flows.get(one.ways.old)).filter(is_its) else {
            return Some(ErrorCode::UnknownFlow);
        };
        let client = read.chained.as_ref().and_then(|chained| chained.setup.as_ref());
        let client = client.map_or(claimed, |setup| setup.origin.host_key.id());
        let far_end = spliced.map(|spliced| spliced.client).or_else(|| flow.far_end(&self.associations));
        if far_end != Some(client) {
            return Some(ErrorCode::NotAllowed);
        }
        let boxes = read.chained.as_ref().map(|chained| &chained.boxes[..]).unwrap_or_default();
        let is_other = |spliced: &Spliced| !boxes.iter().map(service_of).eq(spliced.boxes.iter().copied());
        if spliced.is_some_and(is_other) {
            // Whoever administers the client's host leaves out none of those behind the program.
            return Some(ErrorCode::ChainRequired);
        }
        let is_named = |one| self.chain_policy().name_of_box(&service_of(one)).is_some();
        (!boxes.iter().all(is_named)).then_some(ErrorCode::BoxUnknown)
    }

    /// A flow's initiator is proved. True if it is another way of a session that ends here, and no program's own.
    pub(crate) fn way_set_up(&mut self, now: Instant, id: FlowId, setup: &mut Setup) -> bool {
        let Setup::Responder(setup) = setup else { return false };
        if setup.begin.is_none() || self.flows.get(id).is_none_or(Flow::is_at_box) {
            return false;
        }
        let held = core::mem::take(&mut setup.held);
        self.way_proved(now, id, held);
        true
    }

    /// The new way stands at this end: its sender is proved. `held`: what has overtaken the word of that.
    fn way_proved(&mut self, now: Instant, id: FlowId, held: Vec<(SocketAddr, Vec<u8>)>) {
        let Some(flow) = self.flows.get(id) else { return };
        let session = flow.session;
        if !flow.is_sealed() {
            self.keep_encapsulated(now, id);
        }
        let is_sealed = |id: FlowId| self.flows.get(id).is_some_and(Flow::is_sealed);
        let following = self.reconfigurations.following.get(&session);
        let is_less = following.is_some_and(|one| is_sealed(one.ways.old) && !is_sealed(id));
        let following = self
            .reconfigurations
            .following
            .get_mut(&session)
            .filter(|one| !is_less && one.state == FollowingState::Asked && one.ways.new.is_none());
        let Some(following) = following else {
            self.say_fail(id, ErrorCode::Closed);
            return self.forget_way(id);
        };
        following.ways.new = Some(id);
        following.state = FollowingState::Ready;
        following.until = now + AWAITED;
        if let Some(spliced) = &following.spliced {
            let scales = spliced.scales;
            let between = spliced.delta;
            let before = self.flows.get(following.ways.old).and_then(|flow| flow.delta.as_deref().copied());
            let delta = before.map_or(between, |before| between.then(before));
            self.begin_parting(now, session, Role::Responder, (scales, Some(delta)));
            return held.into_iter().for_each(|(from, datagram)| self.queue.ingress(from, datagram));
        }
        let old = following.ways.old;
        // What a program that has left stood between stands between the session's numbers and this end's by any way.
        let delta = self.flows.get(old).and_then(|flow| flow.delta.clone());
        if let Some(flow) = self.flows.get_mut(id) {
            flow.delta = delta;
        }
        self.set_gate(now, session, Role::Responder);
        for (from, datagram) in held {
            // It is the new way's, and waits as what comes next.
            let _ = self.hold_overtaking(now, id, from, &datagram);
        }
    }

    /// The left anchor's end of the new way stands; `cut`: and it has turned.
    fn confirmed_cut(&mut self, now: Instant, session: SessionId, cut: Option<CutRepr>) {
        let following = self.reconfigurations.following.get_mut(&session);
        if let Some(spliced) = following.and_then(|one| one.spliced.as_mut()) {
            spliced.is_confirmed = true;
        }
        if let Some(cut) = cut {
            self.hear_cut(now, session, Role::Responder, cut);
        }
        self.follower_turns(now, session);
    }

    /// Turns this end, as soon as the new way stands at both, and its program has shown what it has sent.
    pub(super) fn follower_turns(&mut self, now: Instant, session: SessionId) {
        let following = self.reconfigurations.following.get(&session);
        let is_confirmed = following.and_then(|one| one.spliced.as_ref()).is_some_and(|spliced| spliced.is_confirmed);
        if !is_confirmed || !self.turn_at_cut(now, session, Role::Responder) {
            return;
        }
        let Some(following) = self.reconfigurations.following.get_mut(&session) else { return };
        if following.state == FollowingState::Ready {
            following.state = FollowingState::Parting;
            following.sends.next = Some(now + ASK_EVERY);
            following.until = now + STUCK;
            self.take_what_waited(now, session, Role::Responder, Cut::take_held);
        }
        self.say_cut(session, Role::Responder, ReconfigurationStep::Done);
        self.follower_parted(now, session, false);
    }

    /// An agent that has started again goes on with a session that has two ways. `before`: the session that its flow
    /// was of.
    pub(super) fn resume_following(&mut self, now: Instant, ways: Ways, client: HostId, before: SessionId) {
        let Some(session) = self.flows.get(ways.old).map(|flow| flow.session) else { return };
        let parting = ways.parting.as_deref();
        let delta = parting.and_then(|parting| parting.delta).unwrap_or(Delta::ZERO);
        let scales = parting.map(|parting| parting.cut.scales()).unwrap_or_default();
        let boxes = Vec::new();
        let spliced =
            Spliced { boxes, client, session: before, delta, scales, is_confirmed: true, is_finishing: false };
        let following = Following {
            ways,
            spliced: Some(spliced),
            state: FollowingState::Parting,
            sends: Sends::starting(now),
            until: now + STUCK,
        };
        // What this host has begun is never refused.
        let _ = self.reconfigurations.following.insert(Peer::Own, session, following);
    }

    /// The left anchor awaits nothing more by the old way. Without a cut: for it all is over, since this end had said
    /// the same before its agent started again.
    fn finished_cut(&mut self, now: Instant, session: SessionId, cut: Option<CutRepr>) {
        match cut {
            Some(cut) => self.hear_cut(now, session, Role::Responder, cut),
            None => self.hear_of_no_cut(now, session, Role::Responder),
        }
        let Some(following) = self.reconfigurations.following.get_mut(&session) else { return };
        let number = following.ways.number;
        match (following.state, &mut following.spliced, following.ways.new) {
            (FollowingState::Finished, _, Some(new)) => self.say_step(new, ReconfigurationStep::Finished, number),
            (FollowingState::Parting, Some(spliced), _) => {
                spliced.is_finishing = true;
                self.follower_parted(now, session, false);
                if self.reconfigurations.following.get(&session).is_some_and(|one| one.state == FollowingState::Parting)
                {
                    // It lives, and waits.
                    self.say_cut(session, Role::Responder, ReconfigurationStep::Done);
                }
            }
            _ => {}
        }
    }

    /// Something has passed by one of the two ways of a session whose program leaves.
    pub(super) fn follower_parted(&mut self, now: Instant, session: SessionId, has_moved: bool) {
        let Some(following) = self.reconfigurations.following.get_mut(&session) else { return };
        if following.state == FollowingState::Ready {
            return self.follower_turns(now, session);
        }
        if following.state != FollowingState::Parting {
            return;
        }
        let Some((parting, spliced)) = following.ways.parting.as_deref().zip(following.spliced.as_ref()) else {
            return;
        };
        let is_over = parting.is_over();
        // Who awaits nothing more is waited for as long as it is heard.
        if has_moved || is_over {
            following.until = now + STUCK;
        }
        let Some(new) = following.ways.new.filter(|_| is_over && spliced.is_finishing) else { return };
        let number = following.ways.number;
        following.state = FollowingState::Finished;
        following.until = now + AWAITED + PATIENCE;
        // The program's host says once that it has forgotten the old way: boxes behind it may not have heard.
        following.sends.next = Some(now + AWAITED);
        self.end_parting(now, session, Role::Responder);
        self.say_step(new, ReconfigurationStep::Finished, number);
    }

    /// The new way stands at both ends.
    fn confirmed_way(&mut self, now: Instant, session: SessionId, id: FlowId) {
        let Some(following) = self.reconfigurations.following.get_mut(&session) else { return };
        let number = following.ways.number;
        if following.state == FollowingState::Ready {
            following.state = FollowingState::Turned;
            following.until = now + LEASE;
            following.sends.next = Some(now + ASK_EVERY);
            self.turn_ways(now, session, Role::Responder);
        }
        self.say_step(id, ReconfigurationStep::Done, number);
    }

    /// Both ends send by the new way.
    pub(super) fn finished_way(&mut self, now: Instant, session: SessionId, id: FlowId) {
        if self.reconfigurations.awaits_finish(now, session) {
            return;
        }
        let Some(following) = self.reconfigurations.following.get_mut(&session) else { return };
        let number = following.ways.number;
        if following.state == FollowingState::Turned {
            following.state = FollowingState::Finished;
            following.until = now + AWAITED + PATIENCE;
            following.sends.next = None;
            if following.ways.held_until.is_none() {
                self.hear_fence(now, session, Role::Responder);
            }
            self.settle_way(now, id);
        }
        self.say_step(id, ReconfigurationStep::Finished, number);
    }

    /// The old way is over.
    fn leave_old(&mut self, now: Instant, session: SessionId) {
        self.open_gate(now, session, Role::Responder);
        self.hear_fence(now, session, Role::Responder);
        let Some(following) = self.reconfigurations.take_following(session) else { return };
        if following.state == FollowingState::Turned
            && let Some(new) = following.ways.new
        {
            self.settle_way(now, new);
        }
        self.forget_way(following.ways.old);
    }

    /// The session stays as it was.
    pub(super) fn leave_new(&mut self, now: Instant, session: SessionId) {
        if self.reconfigurations.has_parted(session) {
            return self.lose_session(now, session, Role::Responder);
        }
        self.drop_gate(now, session, Role::Responder);
        self.turn_ways_back(now, session, Role::Responder);
        self.undo_parting(now, session, Role::Responder);
        let Some(following) = self.reconfigurations.take_following(session) else { return };
        if let Some(spliced) = following.spliced.as_ref().filter(|_| !following.ways.has_turned) {
            self.flows.set_session(following.ways.old, spliced.session);
        }
        if following.ways.has_turned {
            // There is no other way any more.
            return following.ways.new.into_iter().for_each(|new| self.settle_way(now, new));
        }
        if let Some(new) = following.ways.new {
            self.say_step(new, ReconfigurationStep::Leave, following.ways.number);
            self.forget_way(new);
        }
    }

    /// The old way is no more, while the session goes by the new one.
    pub(super) fn follower_lost_old(&mut self, now: Instant, session: SessionId) {
        let Some(following) = self.reconfigurations.following.get(&session) else { return };
        if following.state == FollowingState::Finished {
            self.leave_old(now, session);
        }
    }

    /// Asks the left anchor again, and ends what has waited for too long.
    pub(super) fn followers_due(&mut self, now: Instant) {
        let due = self.reconfigurations.following.iter().filter(|(_, one)| one.due() <= now);
        let due: Vec<SessionId> = due.map(|(session, _)| *session).collect();
        for session in due {
            self.give_up_holding(now, session, Role::Responder);
            self.ask_for_numbers_due(now, session, Role::Responder);
            let Some(following) = self.reconfigurations.following.get_mut(&session) else { continue };
            let number = following.ways.number;
            let old = following.ways.old;
            if following.until <= now {
                match following.state {
                    FollowingState::Finished => {
                        self.say_step(old, ReconfigurationStep::Leave, number);
                        self.leave_old(now, session);
                    }
                    _ => self.leave_new(now, session),
                }
                continue;
            }
            if following.sends.next.is_some_and(|next| next <= now) {
                following.sends.next = Some(now + ASK_EVERY);
                if following.state == FollowingState::Finished {
                    following.sends.next = Some(now + LEAVE_AGAIN);
                    self.say_step(old, ReconfigurationStep::Leave, number);
                } else if following.spliced.is_some() {
                    self.say_cut(session, Role::Responder, ReconfigurationStep::Done);
                } else if let Some(new) = following.ways.new {
                    self.say_step(new, ReconfigurationStep::Done, number);
                }
            }
        }
    }
}
