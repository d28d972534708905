//! What a host makes of repairs of places, and of counts that its core asks for.

use margay_core::{Input, Instant};
use margay_wire::FlowId;

use super::{Host, Outgoing};
use crate::cache::Came;
use crate::place_fec::Sent;

impl Host {
    /// Takes DATA, and what it brings back. False where it is of no flow that is cached.
    pub(super) fn ingress(&mut self, now: Instant, came: Came, datagram: &[u8]) -> bool {
        let restored = match self.cache.restore(came, datagram) {
            Some(restored) => restored,
            None if !self.take(now, came, datagram) => return false,
            None => self.cache.keep(came, datagram),
        };
        for datagram in restored {
            self.take(now, came, &datagram);
        }
        true
    }

    pub(super) fn send_repairs(&mut self, repairs: Vec<Sent>) {
        self.outbox.extend(repairs.into_iter().map(|(local, to, repair)| Outgoing::Datagram(local, to, repair)));
    }

    /// Those of blocks that end now.
    pub(super) fn send_due_repairs(&mut self, now: Instant) {
        let repairs = self.cache.place_fecs.take_due(now);
        self.send_repairs(repairs);
    }

    /// The core has asked what was counted of a flow.
    pub(super) fn tell_count(&mut self, now: Instant, flow: FlowId) {
        let count = self.cache.count(flow);
        self.sal.handle(now, Input::Counted { flow, count: &count });
    }
}
