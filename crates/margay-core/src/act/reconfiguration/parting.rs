//! A session goes two ways at once, of which one leads through a program that leaves: both ends part what they send at
//! their cuts (`cut`), until nothing is left behind the old way (docs/decisions/0088).
//!
//! During this phase the flow caches carry neither flow by themselves: packets of both directions come to the core.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{CutRepr, ErrorCode, FlowId, ReconfigurationStep, SessionId};

use super::cut::{Arrival, Cut, PeerCut, Scales, Way};
use super::{Beside, KeptWay, PartingRecord, Reconfigurations, TCP, Ways, bare};
use crate::act::stack_rule::engine::{act_as_rules_do, guard_as_rules_do};
use crate::cache::entry::{Directions, EntryUpdate, RemoveReason};
use crate::cache::output::AppVerdict;
use crate::cache::packet::{self, AppPacket, Parsed, tcp_flags};
use crate::cache::queue::OutputQueue;
use crate::leg::carriage::Why;
use crate::leg::delta::{Checksum, Delta};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::{Flow, FlowTable, Marks};
use crate::types::direction::Direction;
use crate::types::drop_reason::DropReason;
use crate::types::role::Role;
use crate::types::time::Instant;

/// For so long nothing may move by the old way while something is awaited there.
pub(super) const STUCK: Duration = Duration::from_secs(30);
/// A TCP that has not shown its numbers is asked so often: more often it does not answer
/// (`net.ipv4.tcp_invalid_ratelimit`).
const ASK_AGAIN: Duration = Duration::from_millis(520);

/// A cut that is not written down by then is used all the same: an agent that dies in this phase costs the session
/// then.
const KEEP_WAIT: Duration = Duration::from_millis(200);
/// Clocks of timestamps that are awaited when an agent starts again are said to be so much further: nobody knows for
/// how long it was away, and TCP throws away what has an earlier one.
const CLOCK_AHEAD_MS: u32 = 60_000;

/// What an end of a session keeps of its two ways while it has both.
#[derive(Debug)]
pub(super) struct Parting {
    pub cut: Cut,
    /// What the new way's numbers differ by from those of the program's TCP.
    pub delta: Option<Delta>,
    /// The other end knows this end's cut.
    pub is_heard: bool,
    /// When the program's TCP is asked for its numbers again.
    ask_at: Instant,
    /// How far the old way was when that was noted last.
    progress: u32,
    /// This end's cut is fixed, and is being written down; until then at most that is waited for.
    keep_until: Option<Instant>,
}

impl Parting {
    /// When something is due.
    pub fn due(&self) -> Option<Instant> {
        (!self.cut.may_turn()).then_some(self.ask_at).into_iter().chain(self.keep_until).min()
    }

    fn new(now: Instant, cut: Cut, delta: Option<Delta>) -> Self {
        Self { cut, delta, is_heard: false, ask_at: now + ASK_AGAIN, progress: 0, keep_until: None }
    }

    /// This end's cut, as the new way has numbers.
    fn own_on_wire(&self) -> Option<u32> {
        let own = self.cut.own()?;
        Some(self.delta.map_or(own, |delta| delta.own_wire(own)))
    }

    fn peer_of_wire(&self, number: u32) -> u32 {
        self.delta.map_or(number, |delta| delta.peer_local(number))
    }

    /// Whether nothing more is awaited by the old way, and the new one can be carried without the core.
    pub fn is_over(&self) -> bool {
        self.cut.has_all_of_old() && self.delta.is_none_or(|delta| delta.is_settled())
    }
}

impl FlowTable {
    /// A program's TCP is given a segment that fits no window, and answers with its numbers (RFC 9293 §3.10.7.4).
    pub(super) fn ask_for_numbers(&self, queue: &mut OutputQueue, id: FlowId) {
        let flow = self.get(id).filter(|flow| flow.app.protocol == TCP);
        let stale = flow.and_then(|flow| packet::stale_ack(&flow.app.reversed()));
        stale.into_iter().for_each(|stale| queue.inject(stale));
    }
}

impl Reconfigurations {
    fn parting(&mut self, session: SessionId, role: Role) -> Option<&mut Parting> {
        self.ways_mut(session, role)?.parting.as_deref_mut()
    }
}

impl Sal {
    /// From here on all packets of a session come to the core.
    pub(super) fn begin_parting(
        &mut self,
        now: Instant,
        session: SessionId,
        role: Role,
        (scales, delta): (Scales, Option<Delta>),
    ) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let Some(new) = ways.new.filter(|_| ways.parting.is_none()) else { return };
        let old = ways.old;
        let cut = Cut::new(scales).in_order(self.chain_policy().keeps_order(self.flows.get(new)));
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        ways.parting = Some(Box::new(Parting::new(now, cut, delta)));
        self.part_flows(now, old, new);
        self.flows.ask_for_numbers(&mut self.queue, old);
    }

    /// The flow caches give the core all of both flows.
    pub(super) fn part_flows(&mut self, now: Instant, old: FlowId, new: FlowId) {
        for (id, directions) in [(old, Directions::Parted), (new, Directions::PartedAside)] {
            self.park_direct(now, id, Why::Unproved);
            self.flows.set_directions(id, directions);
            if let Some(association) = self.flows.get(id).map(|flow| flow.association) {
                self.locations.announce_path(&self.associations, &mut self.queue, association);
            }
            guard_as_rules_do(self, now, id);
            self.flows.install_again(&mut self.queue, id);
        }
    }

    /// Asks again for what has not been shown.
    pub(super) fn ask_for_numbers_due(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let old = ways.old;
        let Some(parting) = ways.parting.as_mut() else { return };
        if parting.keep_until.is_some_and(|until| until <= now) {
            return self.kept(now, old);
        }
        if !parting.cut.may_turn() && parting.ask_at <= now {
            parting.ask_at = now + ASK_AGAIN;
            self.flows.ask_for_numbers(&mut self.queue, old);
        }
    }

    /// The records of two flows are written down as [`Event::Keep`] has asked: the end turns, or the box's host passes
    /// the step on, since its next start would go on from there. `old`: as that event says.
    pub fn kept(&mut self, now: Instant, old: FlowId) {
        self.now = now;
        let waiting = self.reconfigurations.take_waiting(&mut self.flows, old);
        let Some(flow) = self.flows.get(old) else { return };
        if let Some((step, beside)) = waiting.map(|waiting| waiting.step()) {
            let other = self.flows.other_half(flow);
            return other.into_iter().for_each(|other| self.say_beside(other, step, &beside));
        }
        let session = flow.session;
        let role = flow.role;
        let Some(parting) = self.reconfigurations.parting(session, role).filter(|one| one.keep_until.is_some()) else {
            return;
        };
        parting.keep_until = None;
        self.tell_new_way(now, session, role);
        let waiting =
            self.reconfigurations.parting(session, role).map(|parting| parting.cut.take_waiting()).unwrap_or_default();
        waiting.into_iter().for_each(|packet| self.carry_piece(now, session, role, Way::New, packet));
        match role {
            Role::Initiator => self.leader_turns(now, session),
            Role::Responder => self.follower_turns(now, session),
        }
    }

    /// The session goes by the old way alone, as before.
    pub(super) fn undo_parting(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let old = ways.old;
        if ways.parting.take().is_some() && self.flows.get(old).is_some_and(Flow::carries_data) {
            self.settle_way(now, old);
        }
    }

    /// Turns this end at what its program has sent until now. False if that is not known yet, or not written down.
    pub(super) fn turn_at_cut(&mut self, now: Instant, session: SessionId, role: Role) -> bool {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return false };
        let old = ways.old;
        let Some((new, parting)) = ways.new.zip(ways.parting.as_deref_mut()) else { return false };
        if parting.cut.may_turn() && parting.cut.own().is_none() {
            parting.cut.fix();
            parting.keep_until = Some(now + KEEP_WAIT);
            self.events.push(Event::Keep { old, new });
            return false;
        }
        parting.cut.has_turned()
    }

    /// Says by the new way how far this end is, and turns if this end has not.
    pub(super) fn tell_new_way(&mut self, now: Instant, session: SessionId, role: Role) {
        let told = self.reconfigurations.parting(session, role).and_then(|parting| parting.cut.turn());
        if let Some(told) = told {
            self.carry_piece(now, session, role, Way::New, told);
        }
    }

    /// Says a step by the new way, with this end's cut where it has one.
    pub(super) fn say_cut(&mut self, session: SessionId, role: Role, step: ReconfigurationStep) {
        let Some(ways) = self.reconfigurations.ways(session, role) else { return };
        let number = ways.number;
        let old = ways.old;
        let Some((new, parting)) = ways.new.zip(ways.parting.as_deref()) else { return };
        // One that is heard of late was not said by the old way alone.
        let is_closed = self.flows.get(old).is_some_and(|flow| flow.has(Marks::FIN_EGRESS)) && parting.cut.closes_own();
        let has_heard = parting.cut.has_peer();
        let own = parting.own_on_wire();
        let cut = own.map(|number| CutRepr { number, is_closed, has_heard });
        self.say_beside(new, bare(step, number), &Beside { cut, ..Beside::default() });
    }

    /// The other end has turned at its cut.
    pub(super) fn hear_cut(&mut self, now: Instant, session: SessionId, role: Role, cut: CutRepr) {
        let Some(parting) = self.reconfigurations.parting(session, role) else { return };
        parting.is_heard |= cut.has_heard;
        let number = parting.peer_of_wire(cut.number);
        self.hear_peer_cut(now, session, role, PeerCut { number, is_closed: cut.is_closed });
    }

    /// The other end has said before that everything has come by the old way, and has forgotten where its cut was: it
    /// is not beyond what the program's TCP has acknowledged.
    pub(super) fn hear_of_no_cut(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(parting) = self.reconfigurations.parting(session, role) else { return };
        if let Some(number) = parting.cut.acknowledged() {
            self.hear_peer_cut(now, session, role, PeerCut { number, is_closed: false });
        }
    }

    fn hear_peer_cut(&mut self, now: Instant, session: SessionId, role: Role, peer: PeerCut) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let old = ways.old;
        let Some((new, parting)) = ways.new.zip(ways.parting.as_deref_mut()) else { return };
        let is_news = !parting.cut.has_peer();
        let held = parting.cut.hear(peer);
        if is_news && parting.cut.has_turned() {
            self.events.push(Event::Keep { old, new });
        }
        for packet in held {
            self.take_by_way(now, session, role, Way::New, &packet);
        }
    }

    /// What has come by the new way, has waited and is taken now.
    pub(super) fn take_what_waited(
        &mut self,
        now: Instant,
        session: SessionId,
        role: Role,
        take: fn(&mut Cut) -> Vec<Vec<u8>>,
    ) {
        let waited =
            self.reconfigurations.parting(session, role).map(|parting| take(&mut parting.cut)).unwrap_or_default();
        for packet in waited {
            self.take_by_way(now, session, role, Way::New, &packet);
        }
    }

    /// A packet of a program whose session has two ways.
    pub(crate) fn part_egress(&mut self, now: Instant, id: FlowId, packet: &AppPacket<'_>) -> AppVerdict {
        let Some(flow) = self.flows.get_mut(id) else { return AppVerdict::Drop(DropReason::UnknownFlow) };
        flow.active = now;
        let session = flow.session;
        let role = flow.role;
        if self.reconfigurations.is_ordered(session, role) {
            self.reconfigurations.order_egress(&mut self.queue, now, (session, role), packet);
        } else if let Some(parting) = self.reconfigurations.parting(session, role) {
            for (way, piece) in parting.cut.egress(packet) {
                self.carry_piece(now, session, role, way, piece);
            }
        } else {
            return AppVerdict::Drop(DropReason::Unexpected);
        }
        let flags = packet.tcp_flags() & (tcp_flags::FIN | tcp_flags::RST);
        if flags != 0 {
            self.transport_event(now, id, Direction::Egress, flags);
        }
        self.take_what_waited(now, session, role, Cut::take_opened);
        self.parted_further(now, session, role);
        AppVerdict::Parted(id)
    }

    fn carry_piece(&mut self, now: Instant, session: SessionId, role: Role, way: Way, mut piece: Vec<u8>) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let old = ways.old;
        let id = match way {
            Way::Old => old,
            Way::New => {
                if let Some(delta) = ways.parting.as_mut().and_then(|parting| parting.delta.as_mut()) {
                    delta.apply_egress(now, &mut piece, Checksum::Full);
                }
                let Some(new) = ways.new else { return };
                new
            }
        };
        self.queue.carry(id, piece);
    }

    /// A packet of the peer's, of a flow that [`Directions::gives_up`]: with the addresses of the application's
    /// connection, and complete checksums.
    pub(crate) fn handle_parted(&mut self, now: Instant, id: FlowId, packet: &[u8]) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.active = now;
        let session = flow.session;
        let role = flow.role;
        let Some(ways) = self.reconfigurations.ways_mut(session, role).filter(|ways| ways.has(id)) else { return };
        let way = if ways.old == id { Way::Old } else { Way::New };
        if ways.gate.is_some() {
            let packet = (id, packet);
            let has_room = self.reconfigurations.may_hold(&self.flows, &self.associations, packet.0, packet.1.len());
            let is_ordered = self.reconfigurations.order_ingress(&mut self.queue, now, (session, role), packet);
            if !is_ordered || !has_room {
                self.open_gate(now, session, role);
            }
            return;
        }
        let mut packet = packet.to_vec();
        if way == Way::New
            && let Some(delta) = ways.parting.as_mut().and_then(|parting| parting.delta.as_mut())
        {
            delta.apply_ingress(now, &mut packet, Checksum::Full);
        }
        self.take_by_way(now, session, role, way, &packet);
    }

    fn take_by_way(&mut self, now: Instant, session: SessionId, role: Role, way: Way, packet: &[u8]) {
        let Ok(Parsed::Transport(parsed)) = packet::parse(packet) else { return };
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let old = ways.old;
        let Some(parting) = ways.parting.as_mut() else { return };
        match parting.cut.ingress(way, &parsed) {
            Arrival::Deliver(packet) | Arrival::Ends(packet) => self.queue.deliver(old, packet),
            Arrival::Nothing => {}
            Arrival::Lost => return self.lose_session(now, session, role),
        }
        self.parted_further(now, session, role);
    }

    /// Something has passed by one of two ways.
    fn parted_further(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(parting) = self.reconfigurations.parting(session, role) else { return };
        let has_moved = core::mem::replace(&mut parting.progress, parting.cut.progress()) != parting.cut.progress();
        match role {
            Role::Initiator => self.leader_parted(now, session, has_moved),
            Role::Responder => self.follower_parted(now, session, has_moved),
        }
    }

    /// Nothing is left behind the old way: the program goes on by the new one.
    pub(super) fn end_parting(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let Some(new) = ways.new.filter(|_| ways.parting.is_some() && !ways.has_turned) else { return };
        let old = ways.old;
        let number = ways.number;
        let waiting = ways.parting.as_mut().map(|parting| parting.cut.give_up_waiting()).unwrap_or_default();
        let delta = ways.parting.take().and_then(|parting| parting.delta).filter(|delta| !delta.is_zero());
        ways.has_turned = true;
        ways.is_fenced = true;
        waiting.into_iter().for_each(|packet| self.queue.deliver(old, packet));
        self.flows.set_directions(old, Directions::PartedAside);
        self.flows.set_deadline(old, None);
        self.flows.install_again(&mut self.queue, old);
        self.flows.inherit_connection(now, old, new, Marks::FIN_EGRESS | Marks::FIN_INGRESS);
        let Some(flow) = self.flows.get_mut(new) else { return };
        flow.delta = delta.map(Box::new);
        self.flows.set_directions(new, Directions::Both);
        guard_as_rules_do(self, now, new);
        self.settle_way(now, new);
        self.queue.update(EntryUpdate::Succession { from: old, to: new });
        if let Some(history) = self.reconfigurations.histories.remove(&old) {
            self.reconfigurations.histories.insert(new, history);
        }
        if role == Role::Responder {
            self.reconfigurations.numbers.insert(new, number);
        }
        self.begin_policy(now, new);
        act_as_rules_do(self, now, new);
        self.events.push(Event::FlowOpened(new));
        self.events.push(Event::FlowChanged(old));
    }

    /// Sessions that end here and have turned at their cuts, with both ways in use.
    pub fn parted_sessions(&self) -> usize {
        let leading = self.reconfigurations.leading.values().map(|one| &one.ways);
        let following = self.reconfigurations.following.values().map(|one| &one.ways);
        let has_turned = |ways: &&Ways| ways.parting.as_ref().is_some_and(|parting| parting.cut.has_turned());
        leading.chain(following).filter(has_turned).count()
    }

    /// What the next start of the agent needs to know of a flow that is one of its session's two ways; `None` where it
    /// need not know that there are two.
    pub(crate) fn kept_way(&self, now: Instant, flow: &Flow) -> Option<KeptWay> {
        let ways = self.reconfigurations.ways(flow.session, flow.role).filter(|ways| ways.has(flow.id))?;
        let (new, parting) = ways.new.zip(ways.parting.as_deref())?;
        let own = parting.cut.own()?;
        if new == flow.id {
            return Some(KeptWay::New);
        }
        Some(KeptWay::Old(PartingRecord {
            number: ways.number,
            new,
            own,
            peer: parting.cut.peer(),
            scale: parting.cut.scales().told,
            before: self.reconfigurations.session_before(flow),
            delta: parting.delta.map(|delta| delta.shown_at(now, Instant::ZERO)),
        }))
    }

    /// A session has two ways by what the start of the agent before has written down. They are taken up by
    /// [`resume_ways`](Self::resume_ways).
    pub(crate) fn adopt_old_way(&mut self, id: FlowId, record: PartingRecord) {
        self.reconfigurations.kept.insert(id, record);
    }

    /// A flow is adopted that was the new way of a session when the record of the old one was written: it has become
    /// the only one, and the other is of no use.
    pub(crate) fn forget_kept_old(&mut self, old: FlowId, new: FlowId) {
        if self.reconfigurations.kept.get(&old).is_some_and(|record| record.new == new) {
            self.reconfigurations.kept.remove(&old);
            self.forget_way(old);
        }
    }

    /// After all flows of the start of the agent before are adopted: sessions that had two ways while a program left
    /// go on from their cuts. Those whose new way is gone end, at both ends. Of sessions through boxes here, the hosts
    /// before and behind are asked whether they still go here.
    pub fn resume_ways(&mut self, now: Instant) {
        self.now = now;
        let kept = core::mem::take(&mut self.reconfigurations.kept);
        for (old, record) in kept {
            let is_aside = |flow: &&Flow| flow.directions == Directions::PartedAside;
            let Some(new) = self.flows.get(record.new).filter(is_aside) else {
                self.say_fail(old, ErrorCode::BytesLost);
                self.fail_flow(now, old, RemoveReason::PeerFailed);
                continue;
            };
            let far_end = new.far_end(&self.associations);
            let Some((role, far_end)) = self.flows.get(old).map(|flow| flow.role).zip(far_end) else { continue };
            let delta = record.delta.map(|delta| delta.shown_at(Instant::ZERO, now).ahead(CLOCK_AHEAD_MS));
            let scales = Scales { told: record.scale, own: None };
            let cut = Cut::resumed(record.own, record.peer, scales)
                .in_order(self.chain_policy().keeps_order(self.flows.get(record.new)));
            let mut parting = Parting::new(now, cut, delta);
            parting.ask_at = now;
            let mut ways = Ways::of(old, record.number);
            ways.new = Some(record.new);
            ways.parting = Some(Box::new(parting));
            match role {
                Role::Initiator => self.resume_leading(now, ways, far_end),
                Role::Responder => self.resume_following(now, ways, far_end, record.before),
            }
            self.part_flows(now, old, record.new);
            self.flows.ask_for_numbers(&mut self.queue, old);
        }
        let aside: Vec<FlowId> =
            self.flows.iter().filter(|flow| flow.directions == Directions::PartedAside).map(|flow| flow.id).collect();
        for id in aside {
            let Some(flow) = self.flows.get(id) else { continue };
            if self.reconfigurations.ways(flow.session, flow.role).is_none_or(|ways| !ways.has(id)) {
                self.forget_way(id);
            }
        }
        // Nothing passes a half whose other half was not persisted in time, and its peer may never have heard of it.
        for id in self.flows.lone_halves() {
            self.say_fail(id, ErrorCode::Closed);
            self.forget_way(id);
        }
        self.reconfigurations.ask_about_halves(now, &self.flows);
    }

    /// Bytes of a session are lost that its program believes to have arrived: it cannot go on, at neither end.
    pub(super) fn lose_session(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways(session, role) else { return };
        let old = ways.old;
        let new = ways.new;
        let number = ways.number;
        if let Some(new) = new {
            self.say_fail(new, ErrorCode::BytesLost);
        }
        self.say_step(old, ReconfigurationStep::Leave, number);
        self.fail_flow(now, old, RemoveReason::PeerFailed);
    }
}
