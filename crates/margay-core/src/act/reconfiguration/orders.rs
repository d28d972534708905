//! Orders of operators. Those of one session are carried out one after the other, as they came; an order is not lost by
//! another one's, and is told apart from it by its number.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::{FlowId, SessionId};

use super::distant::Asker;
use super::leading::Wish;
use super::{Edit, RECONFIGURATIONS_MAX, ReconfigurationOutcome, ReconfigurationRefused, SessionBoxes};
use crate::machine::sal::Sal;
use crate::session::LockError;
use crate::session::flow::Flow;
use crate::types::fair_table::{FairTable, Peer};
use crate::types::role::Role;
use crate::types::time::Instant;

/// Orders of this host that wait for one session. Of other hosts' none waits beside so many.
pub(super) const OF_SESSION_MAX: usize = 8;
/// The one whose turn it is waits so long for a session that is busy.
const PATIENCE: Duration = Duration::from_secs(6);
/// A round trip that is not known.
const ROUND_TRIP: Duration = Duration::from_millis(20);

/// An order that waits.
#[derive(Clone, Debug)]
struct Order {
    number: u64,
    edit: Edit,
    /// The host that has given it; `None`: this one.
    asker: Option<Asker>,
    /// What it counts for.
    by: Peer,
    /// The flow that it was given for: the session's program may send by another one when it is carried out.
    flow: FlowId,
}

/// The orders of one session, the first of them next.
#[derive(Debug)]
pub(super) struct SessionOrders {
    orders: VecDeque<Order>,
    /// When the session is asked for again.
    next: Instant,
    /// Until then at most for the first one.
    until: Instant,
}

/// Orders that wait until their sessions are free.
#[derive(Debug)]
pub(super) struct Orders {
    pub(super) waiting: FairTable<SessionId, SessionOrders>,
    last_number: u64,
}

impl Default for Orders {
    fn default() -> Self {
        Self { waiting: FairTable::new(RECONFIGURATIONS_MAX, usize::MAX), last_number: 0 }
    }
}

impl Orders {
    /// When something is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiting.values().map(|one| one.next).min()
    }

    pub const fn fresh_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }
}

impl Sal {
    /// Has a session go through other boxes, once the orders before are carried out. Gives the number of the order,
    /// which no other one of this core has. What becomes of it comes as one
    /// [`Event::Reconfigured`](crate::Event::Reconfigured) with that number. Of a session that is being changed, the
    /// boxes are looked at when it is the order's turn.
    ///
    /// Of a session that is served here, or passes a box of this host, the client's host is asked to carry it out.
    ///
    /// # Errors
    ///
    /// Why not; the session is as it was.
    pub fn reconfigure(&mut self, now: Instant, id: FlowId, edit: Edit) -> Result<u64, ReconfigurationRefused> {
        self.now = now;
        // Another order may just have changed it.
        let id = self.reconfigurations.way_of_program(&self.flows, id);
        match self.flows.get(id) {
            Some(flow) if flow.is_at_box() || flow.role == Role::Responder => self.give_order(now, id, edit),
            _ => self.reconfigure_for(now, id, edit, None),
        }
    }

    /// The same of a session of a program here; `asker`: the host that has ordered it, where that is not this one.
    pub(super) fn reconfigure_for(
        &mut self,
        now: Instant,
        id: FlowId,
        edit: Edit,
        asker: Option<Asker>,
    ) -> Result<u64, ReconfigurationRefused> {
        let id = self.reconfigurations.way_of_program(&self.flows, id);
        self.may_go_another_way(id, Role::Initiator)?;
        let session = self.flows.get(id).map(|flow| flow.session).ok_or(ReconfigurationRefused::UnknownFlow(id))?;
        let number = self.reconfigurations.orders.fresh_number();
        let host = asker.as_ref().map(|asker| asker.host);
        let peer = |host| self.flows.get(id).map(|flow| flow.peer_of(&self.associations, Some(host)));
        let by = host.and_then(peer).unwrap_or(Peer::Own);
        let order = Order { number, edit, asker, by, flow: id };
        let is_free = self.locks.is_free(session, now).is_ok();
        if is_free && !self.reconfigurations.orders.waiting.contains_key(&session) {
            self.begin_order(now, id, &order)?;
        } else {
            self.wait_for_session(now, session, order)?;
        }
        Ok(number)
    }

    fn wait_for_session(
        &mut self,
        now: Instant,
        session: SessionId,
        order: Order,
    ) -> Result<(), ReconfigurationRefused> {
        let next = self.try_again_at(now, session);
        let waiting = &mut self.reconfigurations.orders.waiting;
        if !waiting.contains_key(&session) {
            let fresh = SessionOrders { orders: VecDeque::new(), next, until: now + PATIENCE };
            waiting.insert(order.by, session, fresh).map_err(ReconfigurationRefused::Full)?;
        }
        let waiting = waiting.get_mut(&session).ok_or(ReconfigurationRefused::UnderWay)?;
        // What other hosts have ordered does not keep this host's operator from it.
        let counts = |one: &&Order| order.asker.is_some() || one.asker.is_none();
        if waiting.orders.iter().filter(counts).count() >= OF_SESSION_MAX {
            return Err(ReconfigurationRefused::UnderWay);
        }
        waiting.orders.push_back(order);
        Ok(())
    }

    /// A session is busy: it is asked for again after a random time of its round trip.
    fn try_again_at(&mut self, now: Instant, session: SessionId) -> Instant {
        self.counters.reconfigurations_locked += 1;
        let association = self.flows.of_session(session).find_map(|flow| self.associations.get(flow.association));
        let rtt = association.and_then(|association| association.rtt).unwrap_or(ROUND_TRIP).max(ROUND_TRIP);
        let micros = u32::try_from(rtt.as_micros()).unwrap_or(u32::MAX).max(1);
        now + Duration::from_micros(u64::from(micros / 2 + self.rng.u32() % micros))
    }

    /// Orders that wait for their sessions.
    pub(super) fn orders_due(&mut self, now: Instant) {
        let due = self.reconfigurations.orders.waiting.iter().filter(|(_, one)| one.next <= now);
        let due: Vec<SessionId> = due.map(|(session, _)| *session).collect();
        due.into_iter().for_each(|session| self.begin_first(now, session));
    }

    /// Begins with the first order of a session, unless the session is busy still.
    fn begin_first(&mut self, now: Instant, session: SessionId) {
        let Some(waiting) = self.reconfigurations.orders.waiting.get(&session) else { return };
        let until = waiting.until;
        let Some(order) = waiting.orders.front().cloned() else { return };
        let is_its = |flow: &&Flow| flow.role == Role::Initiator && !flow.is_at_box() && flow.directions.has_egress();
        let id = self.flows.of_session(session).find(is_its).map(|flow| flow.id);
        let outcome = match id.map(|id| self.begin_order(now, id, &order)) {
            Some(Ok(())) => None,
            Some(Err(ReconfigurationRefused::Busy(LockError::Busy { .. }))) if now < until => {
                let next = self.try_again_at(now, session);
                if let Some(waiting) = self.reconfigurations.orders.waiting.get_mut(&session) {
                    waiting.next = next;
                }
                return;
            }
            None | Some(Err(ReconfigurationRefused::NotOpen)) => Some(ReconfigurationOutcome::Ended),
            Some(Err(refused)) => Some(ReconfigurationOutcome::Refused(refused.text(self.chain_policy()))),
        };
        if let Some(outcome) = outcome {
            let wish = Wish { order: Some(order.number), edit: order.edit, boxes: Vec::new(), by: order.by };
            self.remember_reconfiguration(now, session, id.unwrap_or(order.flow), (wish, None), outcome);
        }
        let waiting = &mut self.reconfigurations.orders.waiting;
        let Some(left) = waiting.get_mut(&session) else { return };
        left.orders.pop_front();
        left.next = now;
        left.until = now + PATIENCE;
        if left.orders.is_empty() {
            waiting.remove(&session);
        }
    }

    fn begin_order(&mut self, now: Instant, id: FlowId, order: &Order) -> Result<(), ReconfigurationRefused> {
        let session = self.flows.get(id).map(|flow| flow.session).ok_or(ReconfigurationRefused::UnknownFlow(id))?;
        // As long as another act has it, its boxes are about to be others.
        self.locks.is_free(session, now).map_err(ReconfigurationRefused::Busy)?;
        let known = self.flows.get(id).map(SessionBoxes::of).unwrap_or_default();
        order.asker.as_ref().map_or(Ok(()), |asker| asker.check(&order.edit, &known))?;
        let boxes = order.edit.of(&known).map_err(ReconfigurationRefused::Edit)?;
        let wish = Wish { order: Some(order.number), edit: order.edit, boxes, by: order.by };
        self.begin_leading(now, id, wish, None)
    }
}
