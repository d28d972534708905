//! What a change does to how a flow is carried.

use margay_wire::FlowId;

use super::{Stack, Stacks, Taking};
use crate::carriage::Why;
use crate::event::Event;
use crate::flow::seen;
use crate::sal::Sal;
use crate::time::Instant;

impl Sal {
    /// From here on this end sends by a stack: the flow cache says so by a FENCE of the one before.
    pub(super) fn turn(&mut self, id: FlowId, to: Stack, takes: Taking) {
        if let Some(flow) = self.flows.get_mut(id) {
            flow.stacks.sends = to;
            flow.stacks.takes = takes;
            self.install_again(id);
            self.events.push(Event::FlowChanged(id));
        }
    }

    /// Both directions are by a stack: of a sealed flow nothing goes direct, and a plain one may be lifted, as at its
    /// set-up.
    pub(super) fn settle(&mut self, now: Instant, id: FlowId, stack: Stack) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.stacks = Stacks { sends: stack, takes: Taking::Only(stack), change: flow.stacks.change };
        match stack {
            Stack::Secure => self.park_direct(now, id, Why::Secure),
            Stack::Plain => self.unpark_direct(now, id),
        }
        self.install_again(id);
        if stack == Stack::Plain {
            self.open_pinhole(now, id);
        }
        self.end_guard_of_sealed(now, id, stack);
    }

    /// Whether nothing of a flow is sent until it is sealed.
    pub(super) fn is_guarded(&self, id: FlowId) -> bool {
        self.flows.get(id).is_some_and(|flow| flow.has(seen::GUARDED))
    }
}
