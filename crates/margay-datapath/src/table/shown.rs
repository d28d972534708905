//! What connections have shown of themselves as far as they were encapsulated: their numbers, and how they end.

use std::sync::atomic::Ordering;

use margay_wire::FlowId;

use super::{Connection, Slot, Table, TcpNumbers};
use crate::ending::Arrived;
use crate::kernel::{Unjudged, WireState};
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

impl Table {
    /// Takes note of the peer's numbers, as its segment showed them.
    pub fn note_peer_numbers(&self, flow: FlowId, numbers: TcpNumbers) {
        if let Some(slot) = self.find(flow) {
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
        let Some(slot) = self.find(flow) else { return };
        if let Some(numbers) = train.numbers(&Unjudged::default(), Some(&slot.connection())) {
            slot.peer_numbers.note(numbers);
        }
    }

    /// Takes note of the number after the peer's FIN.
    pub fn note_peer_end(&self, flow: FlowId, end: Option<u32>) {
        if let Some(slot) = self.find(flow) {
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
        self.find(flow).filter(|slot| slot.key.protocol == TCP).map(Slot::connection)
    }
}
