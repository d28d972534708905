//! Order kept where asked, of sessions whose boxes are changed (Dysco §3.4, last paragraph; docs/decisions/0109): what
//! comes by the new way waits at the receiving end until the old one is empty.
//!
//! Bytes of TCP wait for those before them: what is in order does not wait at all. Datagrams have no numbers: they wait
//! until the other end has said that it sends nothing more by the old way, and nothing has come by it for [`QUIET`].
//! `Gate` is pure: packets go in, packets come out; all numbers are those of the local TCP.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{FlowId, SessionId};

use super::cut::segment::{Segment, after, before, largest};
use super::leading::LeadingEvent;
use super::{HELD_BYTES_MAX, Reconfigurations, Ways};
use crate::cache::entry::Directions;
use crate::cache::packet::{self, AppPacket, Parsed, tcp_flags};
use crate::cache::queue::OutputQueue;
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::session::flow::Flow;
use crate::types::role::Role;
use crate::types::time::Instant;

/// After so long without a packet the old way is empty, once the other end has said that it sends nothing more by it.
pub(super) const QUIET: Duration = Duration::from_millis(100);
/// Nothing waits for longer while nothing comes that it waits for.
pub(super) const ORDER_WAIT: Duration = Duration::from_secs(1);

/// A packet of the new way that waits.
#[derive(Debug)]
struct Early {
    /// Of TCP: its first number, and the one after its last.
    numbers: Option<(u32, u32)>,
    packet: Vec<u8>,
}

/// What one end of a session keeps while it gives its program what comes by two ways in order.
#[derive(Debug)]
pub(super) struct Gate {
    /// The number after the last byte that the program was given without a gap before it, as far as it was seen.
    reached: Option<u32>,
    /// In the order in which it is to be given.
    early: Vec<Early>,
    bytes: usize,
    /// Since then nothing was given that they wait for.
    waits_since: Option<Instant>,
    /// The last packet of the old way.
    old_at: Instant,
    /// The other end sends nothing more by the old way.
    is_fenced: bool,
    /// The left anchor awaits nothing more by the old way, and an answer.
    pub is_finish_awaited: bool,
}

impl Gate {
    pub const fn new(now: Instant) -> Self {
        Self {
            reached: None,
            early: Vec::new(),
            bytes: 0,
            waits_since: None,
            old_at: now,
            is_fenced: false,
            is_finish_awaited: false,
        }
    }

    /// When it opens, if nothing more happens.
    pub fn due(&self) -> Option<Instant> {
        let is_empty_at = self.is_fenced.then(|| self.old_at + QUIET);
        is_empty_at.into_iter().chain(self.waits_since.map(|since| since + ORDER_WAIT)).min()
    }

    /// The other end sends nothing more by the old way.
    pub fn fence(&mut self, now: Instant) {
        if !core::mem::replace(&mut self.is_fenced, true) {
            self.old_at = self.old_at.max(now);
        }
    }

    /// The program has said so.
    pub fn note_own(&mut self, packet: &AppPacket<'_>) {
        let said = Segment::of(packet).filter(|segment| segment.has(tcp_flags::ACK));
        if let Some(segment) = said {
            self.reached = largest(self.reached, segment.acknowledgement);
        }
    }

    /// A packet of the old way, which the program is given.
    pub fn by_old(&mut self, now: Instant, packet: &AppPacket<'_>) {
        self.old_at = now;
        if let Some(segment) = Segment::of(packet) {
            self.note_given(segment.sequence, segment.end());
        }
    }

    fn note_given(&mut self, from: u32, to: u32) {
        if self.reached.is_none_or(|reached| !after(from, reached)) {
            self.reached = largest(self.reached, to);
        }
    }

    /// A packet of the new way. True: it waits.
    pub fn by_new(&mut self, now: Instant, packet: &AppPacket<'_>) -> bool {
        let segment = Segment::of(packet);
        // An acknowledgement waits for nobody; a RST ends what was sent before it, too.
        let is_bare = |segment: &Segment<'_>| segment.is_bare() && !segment.has(tcp_flags::RST);
        if segment.as_ref().is_some_and(is_bare) {
            return false;
        }
        let numbers = segment.map(|segment| (segment.sequence, segment.end()));
        if let Some((from, to)) = numbers.filter(|(from, _)| self.is_next(*from)) {
            self.note_given(from, to);
            return false;
        }
        let at = match numbers {
            None => self.early.len(),
            Some((from, _)) => {
                self.early.partition_point(|one| one.numbers.is_some_and(|(other, _)| !after(other, from)))
            }
        };
        self.bytes += packet.whole.len();
        self.early.insert(at, Early { numbers, packet: packet.whole.to_vec() });
        self.waits_since.get_or_insert(now);
        true
    }

    fn is_next(&self, from: u32) -> bool {
        self.reached.is_some_and(|reached| !before(reached, from))
    }

    /// Bytes of the packets that wait.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether as much waits as may.
    pub const fn is_full(&self) -> bool {
        self.bytes > HELD_BYTES_MAX
    }

    /// What need not wait any longer, since the program was given all before it.
    pub fn take_next(&mut self, now: Instant) -> Vec<Vec<u8>> {
        let mut next = Vec::new();
        while let Some((from, to)) = self.early.first().and_then(|one| one.numbers) {
            if !self.is_next(from) {
                break;
            }
            self.note_given(from, to);
            let one = self.early.remove(0);
            self.bytes -= one.packet.len();
            next.push(one.packet);
        }
        if !next.is_empty() {
            self.waits_since = (!self.early.is_empty()).then_some(now);
        }
        next
    }

    /// All that waits.
    pub fn take_all(self) -> Vec<Vec<u8>> {
        self.early.into_iter().map(|one| one.packet).collect()
    }
}

impl Reconfigurations {
    fn gate(&mut self, session: SessionId, role: Role) -> Option<&mut Gate> {
        self.ways_mut(session, role)?.gate.as_deref_mut()
    }

    /// Whether the order of a session is kept now.
    pub(super) fn is_ordered(&self, session: SessionId, role: Role) -> bool {
        self.ways(session, role).is_some_and(|ways| ways.gate.is_some())
    }

    /// A packet of the program of a session whose order is kept.
    pub(super) fn order_egress(
        &mut self,
        queue: &mut OutputQueue,
        now: Instant,
        (session, role): (SessionId, Role),
        packet: &AppPacket<'_>,
    ) {
        let Some(ways) = self.ways_mut(session, role) else { return };
        let by = ways.of_program();
        if let Some(gate) = &mut ways.gate {
            gate.note_own(packet);
        }
        queue.carry(by, packet.whole.to_vec());
        self.give_next(queue, now, (session, role));
    }

    /// A packet of the peer's of a session whose order is kept. False if too much waits.
    pub(super) fn order_ingress(
        &mut self,
        queue: &mut OutputQueue,
        now: Instant,
        (session, role): (SessionId, Role),
        (id, packet): (FlowId, &[u8]),
    ) -> bool {
        let Ok(Parsed::Transport(parsed)) = packet::parse(packet) else { return true };
        let Some(ways) = self.ways_mut(session, role) else { return true };
        let old = ways.old;
        let Some(gate) = &mut ways.gate else { return true };
        let is_by_old = old == id;
        if !is_by_old && gate.by_new(now, &parsed) {
            return !gate.is_full();
        }
        if is_by_old {
            gate.by_old(now, &parsed);
        }
        queue.deliver(old, packet.to_vec());
        self.give_next(queue, now, (session, role));
        true
    }

    fn give_next(&mut self, queue: &mut OutputQueue, now: Instant, (session, role): (SessionId, Role)) {
        let Some(ways) = self.ways_mut(session, role) else { return };
        let old = ways.old;
        let next = ways.gate.as_mut().map(|gate| gate.take_next(now)).unwrap_or_default();
        self.settle_held(session, role);
        next.into_iter().for_each(|packet| queue.deliver(old, packet));
    }

    /// The other end sends nothing more by the old way. True if the new one waits for the last of it all the same.
    pub(super) fn fence_gate(&mut self, now: Instant, session: SessionId, role: Role) -> bool {
        let gate = self.gate(session, role);
        gate.is_some_and(|gate| {
            gate.fence(now);
            true
        })
    }

    /// The left anchor asks whether this end awaits nothing more by the old way. True if it does.
    pub(super) fn awaits_finish(&mut self, now: Instant, session: SessionId) -> bool {
        let gate = self.gate(session, Role::Responder);
        gate.is_some_and(|gate| {
            gate.fence(now);
            gate.is_finish_awaited = true;
            true
        })
    }
}

impl Sal {
    /// The new way stands at this end. Where order is kept, all packets of the session come to the core from here on.
    pub(super) fn set_gate(&mut self, now: Instant, session: SessionId, role: Role) {
        let new = self.reconfigurations.ways(session, role).and_then(|ways| ways.new);
        let Some(new) = new.filter(|new| self.chain_policy().keeps_order(self.flows.get(*new))) else { return };
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        if ways.gate.is_some() || ways.has_turned || ways.is_fenced {
            return;
        }
        ways.gate = Some(Box::new(Gate::new(now)));
        ways.held_until = None;
        ways.held_bytes = 0;
        let old = ways.old;
        let held = core::mem::take(&mut ways.held);
        self.reconfigurations.settle_held(session, role);
        self.part_flows(now, old, new);
        self.flows.ask_for_numbers(&mut self.queue, old);
        held.into_iter().for_each(|(from, datagram)| self.queue.ingress(from, datagram));
    }

    /// Gives the program all that waits, and lets the flow caches carry the session by themselves again.
    pub(super) fn open_gate(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let Some((gate, new)) = ways.gate.take().zip(ways.new) else { return };
        let old = ways.old;
        let has_turned = ways.has_turned;
        let is_finish_awaited = gate.is_finish_awaited;
        ways.is_fenced = true;
        self.reconfigurations.settle_held(session, role);
        gate.take_all().into_iter().for_each(|packet| self.queue.deliver(old, packet));
        self.flows.set_directions(new, Directions::Ingress);
        if has_turned {
            self.give_program_over(now, session, role);
        } else {
            self.flows.set_directions(old, Directions::Both);
            for id in [old, new] {
                self.flows.install_again(&mut self.queue, id);
            }
        }
        match role {
            Role::Initiator if has_turned => self.leader_event(now, session, LeadingEvent::Fenced, ""),
            Role::Responder if is_finish_awaited => self.finished_way(now, session, new),
            _ => {}
        }
    }

    /// The session stays as it was: gives the program all that waits. What it sends goes by the old way, if that is
    /// there.
    pub(super) fn drop_gate(&mut self, now: Instant, session: SessionId, role: Role) {
        let Some(ways) = self.reconfigurations.ways_mut(session, role) else { return };
        let old = ways.old;
        if !self.flows.get(old).is_some_and(Flow::carries_data) {
            return self.open_gate(now, session, role);
        }
        let Some(gate) = ways.gate.take() else { return };
        ways.has_turned = false;
        self.reconfigurations.settle_held(session, role);
        gate.take_all().into_iter().for_each(|packet| self.queue.deliver(old, packet));
        self.settle_way(now, old);
        self.events.push(Event::FlowChanged(old));
    }
}

impl Ways {
    /// When the gate opens, where there is one.
    pub(super) fn gate_due(&self) -> Option<Instant> {
        self.gate.as_ref().and_then(|gate| gate.due())
    }
}

#[cfg(test)]
#[path = "gate_test.rs"]
mod test;
