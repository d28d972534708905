//! In which order datagrams arrive, of the flows of which somebody asks.

use margay_core::timing::Order;
use margay_wire::{DataRepr, FlowId, STACK_FEC, STACK_SCTP};

use super::Table;
use crate::clock;
use crate::packet::UDP;

impl Table {
    /// Takes note of a train that was given to the application.
    pub fn note_order(&self, data: &DataRepr) {
        // There seldom is any. By `fec` all come in order; by `sctp` what is sent again comes later, whatever the path.
        if !self.watched.is_empty()
            && !matches!(data.stack, STACK_FEC | STACK_SCTP)
            && let Some(watched) = self.watched.get(&data.dst_flow)
        {
            watched.note(data.stack, data.packet_number);
        }
    }

    /// In which order the datagrams of a flow have come, as far as they had numbers; `None` if that is not watched.
    pub fn order(&self, flow: FlowId) -> Option<Order> {
        self.watched.get(&flow).map(|watched| watched.ask(clock::now()))
    }

    /// From here on it is watched in which order the datagrams of a flow come, as long as somebody asks.
    pub fn watch_order(&mut self, flow: FlowId) {
        let now = clock::now();
        self.watched.retain(|_, watched| !watched.is_forgotten(now));
        if self.find(flow).is_some_and(|slot| slot.key.protocol == UDP) {
            self.watched.entry(flow).or_default().ask(now);
        }
    }
}
