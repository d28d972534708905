//! Drain: an instance is taken out of service (DESIGN §10). It takes no new flows, and whoever asks it is told to ask
//! elsewhere; flows that have not ended in time end at once, with a clear error.

use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{ErrorCode, FlowId, Message};

use crate::act::setup::retry_after;
use crate::cache::entry::RemoveReason;
use crate::machine::sal::Sal;
use crate::resolve::segment::SEGMENT;
use crate::resolve::way::Sender;
use crate::session::flow::{Flow, Setup};
use crate::table::Action;
use crate::types::name::{Prefix, ServiceId};
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;
use crate::types::tuple::{GREETING, Tuple};

/// How soon a SYN is sent again that a drained instance has refused: its routers are hearing of the drain just now.
const ASK_AGAIN: Duration = Duration::from_millis(50);
const UDP: u8 = 17;
/// So many times; after that as often as a SYN without an answer.
const QUICK_TRIES: u32 = 5;

/// A flow that a program of this host serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedFlow {
    /// This host's number of the flow.
    pub flow: FlowId,
    /// Its service.
    pub service: ServiceId,
    /// The five-tuple of the program's socket.
    pub app: Tuple,
}

impl Sal {
    /// The flows that programs of this host serve under `prefix` and that are not over, in no order. Takes a walk over
    /// all flows. The kernel may have opened others by grants, of which the core has not heard yet.
    pub fn served_flows(&self, prefix: &Prefix) -> Vec<ServedFlow> {
        let is_served = |flow: &&Flow| {
            flow.role == Role::Responder
                && flow.lifecycle < Lifecycle::Closed
                && flow.app.protocol != GREETING
                && !self.fetches.is_between(flow.id)
                && flow.directions.has_egress()
                && prefix.contains(&flow.asked())
        };
        let served = self.flows.iter().filter(is_served);
        served.map(|flow| ServedFlow { flow: flow.id, service: flow.asked(), app: flow.app }).collect()
    }

    /// Ends flows at both ends because this instance is drained: TCP by a reset; datagrams by silence here, and the
    /// next datagram of the client goes to another instance. Gives how many there were.
    pub fn end_drained(&mut self, now: Instant, flows: &[FlowId]) -> usize {
        self.now = now;
        let mut ended = 0;
        for id in flows {
            let is_open = self.flows.get(*id).is_some_and(|flow| flow.lifecycle < Lifecycle::Closed);
            // Of one that is on its way to another host, the client's word decides.
            if is_open && !self.fetches.is_between(*id) {
                self.say_fail(*id, ErrorCode::Drained);
                self.fail_flow(now, *id, RemoveReason::Drained);
                ended += 1;
            }
        }
        ended
    }

    /// No socket takes datagrams for names under `prefix` any more: peers of flows are told, and the client's next
    /// datagram goes to another instance, if there is one. Gives how many flows there were.
    pub fn end_served_datagrams(&mut self, now: Instant, prefix: &Prefix) -> usize {
        self.now = now;
        let mut flows = self.served_flows(prefix);
        flows.retain(|flow| flow.app.protocol == UDP);
        for ServedFlow { flow, .. } in &flows {
            self.say_fail(*flow, ErrorCode::Closed);
            self.fail_flow(now, *flow, RemoveReason::Closed);
        }
        flows.len()
    }

    /// Whether a listener here would take the SYN, but for a weight of zero.
    pub(crate) fn would_take_undrained(&self, message: &Message<'_>, service: &ServiceId) -> bool {
        let Some(session) = message.session() else { return false };
        let way = self.way_on(Sender::Host);
        self.table.lookup(service).is_some_and(|set| {
            set.iter().any(|(_, rule)| {
                rule.weight == 0
                    && matches!(rule.action, Action::Demux(_))
                    && self.config.unusable(rule, session.protocol, session.service_port, way).is_none()
            })
        })
    }

    /// The instance that a SYN went to is drained: the service table is asked again, here or at the routers, without
    /// the program noticing. False where there is nobody else to ask.
    pub(crate) fn ask_elsewhere(&mut self, now: Instant, id: FlowId) -> bool {
        if self.leave_notice(now, id) {
            return true;
        }
        let Some(Setup::Initiator(setup)) = self.flows.get_mut(id).map(|flow| &mut flow.setup) else { return false };
        if setup.related.is_some() || setup.next_hop == SEGMENT || !setup.beside.is_empty() {
            return false;
        }
        setup.refused = Some(ErrorCode::Drained);
        let wait = if setup.retries <= QUICK_TRIES { ASK_AGAIN } else { retry_after(setup.retries) };
        let next = (now + wait).min(setup.give_up);
        self.flows.set_deadline(id, Some(next));
        true
    }
}
