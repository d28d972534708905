//! What connections have shown of themselves as far as they were encapsulated: their numbers, and how they end.

use std::sync::atomic::Ordering;

use margay_core::Direction;
use margay_wire::FlowId;

use super::{Applied, Connection, Slot, Table, TcpNumbers};
use crate::ending::Arrived;
use crate::kernel::{TcpSeen, Unjudged, WireState};
use crate::packet::TCP;

impl Slot {
    pub(super) fn connection(&self) -> Connection {
        Connection {
            key: self.key,
            own: self.numbers.numbers(),
            peer: self.peer_numbers.numbers(),
            segment: self.segment.load(Ordering::Relaxed).into(),
        }
    }
}

impl Slot {
    /// Takes note of what a segment of the application shows. Gives whether it acknowledges a FIN of the peer's.
    pub(super) fn note_own(&self, numbers: TcpNumbers) -> bool {
        self.numbers.note(numbers);
        self.ending.own.note(numbers.end);
        self.ending.peer.is(numbers.acknowledgement)
    }
}

impl Table {
    /// The flow that the program of a flow's session goes by, where that is another one.
    pub(crate) fn heir(&self, flow: FlowId) -> Option<FlowId> {
        self.heirs.get(&flow).copied()
    }

    /// The entry that has what is known of a flow's connection.
    fn shown_of(&self, flow: FlowId) -> Option<&Slot> {
        let slot = self.find(flow)?;
        // Of most flows their own, and no other is looked for.
        if slot.directions.has_egress() {
            return Some(slot);
        }
        self.heir(flow).and_then(|heir| self.find(heir)).or(Some(slot))
    }

    /// The program goes by `to` from here on. Segments may have passed there already.
    pub(super) fn succeed(&mut self, from: FlowId, to: FlowId) -> Applied {
        self.heirs.remove(&to);
        self.heirs.values_mut().filter(|heir| **heir == from).for_each(|heir| *heir = to);
        self.heirs.insert(from, to);
        let (Some(left), Some(taken)) = (self.find(from), self.find(to)) else { return Applied::Stale };
        taken.numbers.precede(&left.numbers);
        taken.peer_numbers.precede(&left.peer_numbers);
        taken.ending.own.precede(&left.ending.own);
        taken.ending.peer.precede(&left.ending.peer);
        taken.note_segment(left.segment.load(Ordering::Relaxed));
        Applied::Done
    }

    /// Takes note of a packet of the application whose flow the entry leaves to the core. Gives whether it acknowledges
    /// a FIN of the peer's.
    pub(crate) fn note_parted(&self, flow: FlowId, numbers: TcpNumbers) -> bool {
        self.shown_of(flow).is_some_and(|slot| slot.note_own(numbers))
    }

    /// Adds what the kernel's cache had counted, and keeps what it had seen of a connection.
    pub fn take_over(&self, flow: FlowId, removed: &WireState) {
        let Some(slot) = self.find(flow) else { return };
        let counted = &removed.counters;
        slot.egress_bytes.fetch_add(counted.egress_bytes, Ordering::Relaxed);
        slot.egress_segments.fetch_add(counted.egress_segments, Ordering::Relaxed);
        slot.ingress_bytes.fetch_add(counted.ingress_bytes, Ordering::Relaxed);
        slot.ingress_segments.fetch_add(counted.ingress_segments, Ordering::Relaxed);
        let numbers = |seen: &TcpSeen| TcpNumbers {
            sequence: seen.sequence.wrapping_add(seen.length),
            acknowledgement: seen.acknowledgement,
            end: None,
        };
        slot.ending.own.note(removed.end(Direction::Egress));
        slot.ending.peer.note(removed.end(Direction::Ingress));
        if let Some(sent) = &removed.sent {
            slot.numbers.note(numbers(sent));
            slot.note_segment(sent.segment);
        }
        if let Some(received) = &removed.received {
            slot.peer_numbers.note(numbers(received));
        }
    }

    /// Takes note of the peer's numbers, as its segment showed them.
    pub fn note_peer_numbers(&self, flow: FlowId, numbers: TcpNumbers) {
        if let Some(slot) = self.shown_of(flow) {
            slot.peer_numbers.note(numbers);
            slot.ending.peer.note(numbers.end);
        }
    }

    /// Takes note of a listener's answer that has passed no cache ([`EntryUpdate::Begun`](margay_core::EntryUpdate)).
    pub fn note_begun(&self, flow: FlowId, next: u32, expected: u32) {
        // The client has acknowledged nothing beyond the listener's SYN.
        self.note_peer_numbers(flow, TcpNumbers { sequence: expected, acknowledgement: next, end: None });
    }

    /// Takes note of what a train of the peer's shows: how far it reaches, where it brings what is expected as far as
    /// has been seen here, and what it acknowledges.
    pub(crate) fn note_train(&self, flow: FlowId, train: &Arrived) {
        let Some(slot) = self.shown_of(flow) else { return };
        if let Some(numbers) = train.numbers(&Unjudged::default(), Some(&slot.connection())) {
            slot.peer_numbers.note(numbers);
        }
    }

    /// Takes note of the number after the peer's FIN.
    pub fn note_peer_end(&self, flow: FlowId, end: Option<u32>) {
        if let Some(slot) = self.shown_of(flow) {
            slot.ending.peer.note(end);
        }
    }

    /// Whether both ends of a connection have closed, and each has acknowledged all of the other's: FINs and
    /// acknowledgements may have passed here or in the kernel's cache, which has `state`.
    pub fn is_over(&self, flow: FlowId, state: Option<&WireState>) -> bool {
        let here = self.find(flow).map(|slot| (&slot.ending, slot.numbers.numbers(), slot.peer_numbers.numbers()));
        let direct = state.map(WireState::shown).unwrap_or_default();
        state.is_some_and(|state| state.seen.over())
            || here.is_some_and(|(ending, own, peer)| ending.is_over((own, peer), direct))
    }

    /// What user space knows of a connection; `None` when it is not cached, or none.
    pub fn connection(&self, flow: FlowId) -> Option<Connection> {
        self.shown_of(flow).filter(|slot| slot.key.protocol == TCP).map(Slot::connection)
    }
}
