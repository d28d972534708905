//! What a change does to how a flow is carried.

use margay_wire::FlowId;

use crate::act::stack_rule::guard;
use crate::leg::carriage::Why;
use crate::leg::stack::{Stack, Stacks, Taking};
use crate::machine::sal::Sal;
use crate::session::event::Event;
use crate::types::time::Instant;

impl Sal {
    /// From here on this end sends by a stack: the flow cache says so by a FENCE of the one before.
    pub(super) fn turn(&mut self, id: FlowId, to: Stack, takes: Taking) {
        let held = guard::end_guard_in_place(self, id, to);
        if let Some(flow) = self.flows.get_mut(id) {
            if flow.stacks.sends != to {
                flow.stacks.before = flow.stacks.sends;
            }
            flow.stacks.sends = to;
            flow.stacks.takes = takes;
            self.flows.install_again(&mut self.queue, id);
            self.events.push(Event::FlowChanged(id));
        }
        held.into_iter().for_each(|packet| self.queue.egress(packet));
    }

    /// Both directions are by a stack: a plain flow may be lifted, as at its set-up, and nothing of others goes direct.
    pub(super) fn settle(&mut self, now: Instant, id: FlowId, stack: Stack) {
        let held = guard::end_guard_in_place(self, id, stack);
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.stacks = Stacks { change: flow.stacks.change, ..Stacks::only(stack) };
        match stack {
            Stack::Plain => self.unpark_direct(now, id),
            Stack::Fec | Stack::Sctp | Stack::Secure | Stack::SecureFec | Stack::SecureSctp => {
                self.park_direct(now, id, Why::of_stack(stack));
            }
        }
        self.flows.install_again(&mut self.queue, id);
        held.into_iter().for_each(|packet| self.queue.egress(packet));
        self.watch_loss(now, id);
        if stack == Stack::Plain {
            self.flows.open_pinhole(&mut self.ports, &mut self.queue, now, id);
        }
        self.end_guard_of_sealed(now, id, stack);
    }
}
