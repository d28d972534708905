//! A session goes two ways at once, of which one leads through a program that leaves: both ends part what they send at
//! their cuts (`cut`), until nothing is left behind the old way (docs/decisions/0088).
//!
//! During this phase the flow caches carry neither flow by themselves: packets of both directions come to the core.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{CutRepr, ErrorCode, Extension, FlowId, ReconfigurationStep, SessionId};

use super::cut::{Arrival, Cut, PeerCut, Way};
use super::{bare, kind_of};
use crate::association::draft::Draft;
use crate::cache::entry::Directions;
use crate::cache::output::AppVerdict;
use crate::cache::packet::{self, AppPacket, Parsed, tcp_flags};
use crate::leg::carriage::Why;
use crate::leg::delta::{Checksum, Delta};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::{Flow, seen};
use crate::types::direction::Direction;
use crate::types::drop_reason::DropReason;
use crate::types::role::Role;
use crate::types::time::Instant;

/// For so long nothing may move by the old way while something is awaited there.
pub(super) const STUCK: Duration = Duration::from_secs(30);
/// A TCP that has not shown its numbers is asked so often: more often it does not answer
/// (`net.ipv4.tcp_invalid_ratelimit`).
const ASK_AGAIN: Duration = Duration::from_millis(520);

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
}

impl Parting {
    /// When something is due, before both ends have turned.
    pub fn due(&self) -> Option<Instant> {
        (!self.cut.may_turn()).then_some(self.ask_at)
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

impl Sal {
    /// From here on all packets of a session come to the core. `scale`: of the windows that the program's TCP is told.
    pub(super) fn begin_parting(
        &mut self,
        now: Instant,
        session: SessionId,
        role: Role,
        (scale, delta): (u8, Option<Delta>),
    ) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let Some(new) = ways.new.filter(|_| ways.parting.is_none()) else { return };
        let old = ways.old;
        ways.parting = Some(Box::new(Parting {
            cut: Cut::new(scale),
            delta,
            is_heard: false,
            ask_at: now + ASK_AGAIN,
            progress: 0,
        }));
        for (id, directions) in [(old, Directions::Parted), (new, Directions::PartedAside)] {
            self.park_direct(now, id, Why::Unproved);
            self.flows.set_directions(id, directions);
            if let Some(association) = self.flows.get(id).map(|flow| flow.association) {
                self.announce_path(association);
            }
            self.install_again(id);
        }
        self.ask_for_numbers(old);
    }

    /// The program's TCP is given a segment that fits no window, and answers with its numbers (RFC 9293 §3.10.7.4).
    fn ask_for_numbers(&mut self, id: FlowId) {
        let Some(flow) = self.flows.get(id) else { return };
        if let Some(stale) = packet::stale_ack(&flow.app.reversed()) {
            self.queue.inject(stale);
        }
    }

    /// Asks again for what has not been shown.
    pub(super) fn ask_for_numbers_due(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let old = ways.old;
        let Some(parting) = ways.parting.as_mut().filter(|one| one.due().is_some_and(|due| due <= now)) else { return };
        parting.ask_at = now + ASK_AGAIN;
        self.ask_for_numbers(old);
    }

    /// The session goes by the old way alone, as before.
    pub(super) fn undo_parting(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let old = ways.old;
        if ways.parting.take().is_some() && self.flows.get(old).is_some_and(Flow::carries_data) {
            self.settle_way(now, old);
        }
    }

    fn parting(&mut self, session: SessionId, role: Role) -> Option<&mut Parting> {
        self.reconfigurations.ways_mut(session, role)?.parting.as_deref_mut()
    }

    /// Turns this end at what its program has sent until now. False if that is not known yet.
    pub(super) fn turn_at_cut(&mut self, now: Instant, session: SessionId, role: Role) -> bool {
        let Some(parting) = self.parting(session, role).filter(|one| one.cut.may_turn()) else { return false };
        if parting.cut.own().is_none() {
            self.tell_new_way(now, session, role);
        }
        true
    }

    /// Says by the new way how far this end is, and turns if this end has not.
    pub(super) fn tell_new_way(&mut self, now: Instant, session: SessionId, role: Role) {
        let told = self.parting(session, role).and_then(|parting| parting.cut.turn());
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
        let Some(flow) = self.flows.get(new) else { return };
        // One that is heard of late was not said by the old way alone.
        let is_closed = self.flows.get(old).is_some_and(|flow| flow.has(seen::FIN_EGRESS)) && parting.cut.closes_own();
        let has_heard = parting.cut.has_peer();
        let own = parting.own_on_wire();
        let cut = own.map(|number| Extension::Cut(CutRepr { number, is_closed, has_heard }));
        let extensions: Vec<_> = core::iter::once(Extension::Reconfiguration(bare(step, number))).chain(cut).collect();
        let association = flow.association;
        let mut draft = Draft::new(kind_of(step), flow.peer_flow, new);
        draft.extensions = &extensions;
        self.seal_and_send(association, draft);
    }

    /// The other end has turned at its cut.
    pub(super) fn hear_cut(&mut self, now: Instant, session: SessionId, role: Role, cut: CutRepr) {
        let Some(parting) = self.parting(session, role) else { return };
        parting.is_heard |= cut.has_heard;
        let number = parting.peer_of_wire(cut.number);
        let held = parting.cut.hear(PeerCut { number, is_closed: cut.is_closed });
        for packet in held {
            self.take_by_way(now, session, role, Way::New, &packet);
        }
    }

    /// What has waited for this end to turn.
    pub(super) fn take_held_of_new(&mut self, now: Instant, session: SessionId, role: Role) {
        let held = self.parting(session, role).map(|parting| parting.cut.take_held()).unwrap_or_default();
        for packet in held {
            self.take_by_way(now, session, role, Way::New, &packet);
        }
    }

    /// A packet of a program whose session has two ways.
    pub(crate) fn part_egress(&mut self, now: Instant, id: FlowId, packet: &AppPacket<'_>) -> AppVerdict {
        let Some(flow) = self.flows.get_mut(id) else { return AppVerdict::Drop(DropReason::UnknownFlow) };
        flow.active = now;
        let session = flow.session;
        let role = flow.role;
        let Some(parting) = self.parting(session, role) else { return AppVerdict::Drop(DropReason::Unexpected) };
        for (way, piece) in parting.cut.egress(packet) {
            self.carry_piece(now, session, role, way, piece);
        }
        let flags = packet.tcp_flags() & (tcp_flags::FIN | tcp_flags::RST);
        if flags != 0 {
            self.transport_event(now, id, Direction::Egress, flags);
        }
        self.parted_further(now, session, role);
        AppVerdict::Consumed
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
        let Some(parting) = self.parting(session, role) else { return };
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
        let delta = ways.parting.take().and_then(|parting| parting.delta).filter(|delta| !delta.is_zero());
        ways.has_turned = true;
        ways.is_fenced = true;
        self.flows.set_directions(old, Directions::PartedAside);
        self.flows.set_deadline(old, None);
        self.install_again(old);
        self.inherit_connection(now, old, new, seen::FIN_EGRESS | seen::FIN_INGRESS);
        let Some(flow) = self.flows.get_mut(new) else { return };
        flow.delta = delta.map(Box::new);
        self.flows.set_directions(new, Directions::Both);
        self.settle_way(now, new);
        if let Some(history) = self.reconfigurations.histories.remove(&old) {
            self.reconfigurations.histories.insert(new, history);
        }
        if role == Role::Responder {
            self.reconfigurations.numbers.insert(new, number);
        }
        self.begin_policy(now, new);
        self.begin_rules(now, new);
        self.events.push(Event::FlowOpened(new));
        self.events.push(Event::FlowChanged(old));
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
        self.fail_flow(now, old, crate::cache::entry::RemoveReason::PeerFailed);
    }
}
