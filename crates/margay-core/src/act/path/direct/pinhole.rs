//! Pinholes: empty packets by which a flow that goes encapsulated is proved to pass direct, and when they go.

use core::time::Duration;

use margay_wire::FlowId;

use super::{TCP, UDP};
use crate::cache::queue::OutputQueue;
use crate::leg::carriage::Carriage;
use crate::leg::flow_ports::FlowPorts;
use crate::session::flow::{Flow, FlowTable};
use crate::types::role::{Lifecycle, Role};
use crate::types::time::Instant;

/// First wait for the answer to a pinhole, and the longest.
pub(super) const PINHOLE_FIRST: Duration = Duration::from_millis(500);
/// A responder that has heard of no pinhole by then makes one of its own: it may itself be behind what lets in nobody
/// who was not asked. Later than the answers to an initiator's first.
const KNOCK_FIRST: Duration = Duration::from_millis(750);
const PINHOLE_MAX: Duration = Duration::from_secs(8);

impl FlowTable {
    /// A flow that a pinhole could lift: a responder's only if it is a stream, since datagrams open their holes at
    /// once.
    pub(super) fn is_waiting_for_proof(&self, ports: &FlowPorts, id: FlowId) -> bool {
        let is_waiting = |flow: &&Flow| {
            let is_open = matches!(flow.lifecycle, Lifecycle::Established | Lifecycle::HalfClosed);
            (flow.role == Role::Initiator || flow.app.protocol == TCP)
                && flow.direct.carriage == Carriage::Encapsulated
                && flow.stripe.is_none()
                && is_open
                && flow.carries_data()
        };
        ports.is_on && self.get(id).filter(is_waiting).is_some()
    }

    /// After the entry is installed: an initiator without a hint opens its hole, and a responder of datagrams its own.
    pub(crate) fn open_pinhole(&mut self, ports: &mut FlowPorts, queue: &mut OutputQueue, now: Instant, id: FlowId) {
        let opens_first = |flow: &&Flow| {
            flow.role == Role::Responder
                && flow.app.protocol == UDP
                && flow.stripe.is_none()
                && flow.direct.carriage == Carriage::Encapsulated
                && flow.carries_data()
        };
        if ports.is_on && self.get(id).filter(opens_first).is_some() {
            queue.pinhole(id);
            return;
        }
        if !self.is_waiting_for_proof(ports, id) {
            return;
        }
        let Some(flow) = self.get_mut(id) else { return };
        let tries = flow.direct.tries;
        flow.direct.tries = tries.saturating_add(1);
        let first = match flow.role {
            Role::Initiator => {
                queue.pinhole(id);
                PINHOLE_FIRST
            }
            Role::Responder => {
                // At first it only sets out to.
                if tries > 0 {
                    queue.knock(id);
                }
                KNOCK_FIRST
            }
        };
        let wait = first.saturating_mul(1 << tries.min(8)).min(PINHOLE_MAX);
        self.set_direct_due(ports, id, Some(now + wait));
    }

    /// The first pinhole of an initiator. At first contact the peer's kernel knows this host's addresses only once the
    /// peer's agent has read the ACK. A pinhole that overtakes the ACK is a stranger's there, and reset by the host. So
    /// the first pinhole waits for the CONFIRM, or, where the CONFIRM is lost, until the second one would be due.
    pub(crate) fn prepare_pinhole(
        &mut self,
        ports: &mut FlowPorts,
        queue: &mut OutputQueue,
        now: Instant,
        id: FlowId,
        is_first_contact: bool,
    ) {
        if !is_first_contact {
            self.open_pinhole(ports, queue, now, id);
        } else if self.is_waiting_for_proof(ports, id) {
            self.set_direct_due(ports, id, Some(now + PINHOLE_FIRST));
        }
    }

    /// The peer knows the flow: the first pinhole goes, if it has waited for that.
    pub(crate) fn begin_pinholes(&mut self, ports: &mut FlowPorts, queue: &mut OutputQueue, now: Instant, id: FlowId) {
        if self.get(id).is_some_and(|flow| flow.direct.tries == 0) {
            self.open_pinhole(ports, queue, now, id);
        }
    }

    pub(super) fn set_direct_due(&mut self, ports: &mut FlowPorts, id: FlowId, due: Option<Instant>) {
        let Some(flow) = self.get_mut(id) else { return };
        if let Some(old) = core::mem::replace(&mut flow.direct.due, due) {
            ports.due.remove(&(old, id));
        }
        if let Some(due) = due {
            ports.due.insert((due, id));
        }
    }
}
