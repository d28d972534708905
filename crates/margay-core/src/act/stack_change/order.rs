//! Orders: what the operators of either host want a flow to be, and what lists show of it.

use alloc::vec::Vec;

use margay_wire::FlowId;

use super::{ChangeCause, ChangeOutcome, ChangeRefused, StackChange};
use crate::leg::stack::Stack;
use crate::machine::sal::Sal;
use crate::session::flow::Flow;
use crate::types::role::Role;
use crate::types::time::Instant;

/// An order of this host's operator that holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackOrder {
    /// What is ordered.
    pub stack: Stack,
    /// When the flow came to be so.
    pub at: Instant,
}

/// How a flow is carried, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackInfo {
    /// The stack by which this end sends.
    pub stack: Stack,
    /// Since when.
    pub since: Instant,
    /// The stack that a change under way shall bring.
    pub changing_to: Option<Stack>,
    /// The order that holds here.
    pub order: Option<StackOrder>,
    /// The configuration of this host demands that the flow is sealed.
    pub is_demanded: bool,
    /// A rule of this host does.
    pub is_demanded_by_rule: bool,
    /// The peer demands it.
    pub is_demanded_by_peer: bool,
    /// The last changes that are over, the oldest first; eight at most.
    pub changes: Vec<StackChange>,
}

impl Sal {
    /// Has a flow carried by a stack, by order of the operator: [`Stack::Fec`] of a flow that is sealed, or that an end
    /// demands sealed, is [`Stack::SecureFec`], and [`Stack::Sctp`] likewise. True if a change is under way now: what
    /// becomes of it comes as an event. False if the flow is so already.
    ///
    /// # Errors
    ///
    /// Why not; the flow is as it was.
    pub fn set_flow_stack(&mut self, now: Instant, id: FlowId, to: Stack) -> Result<bool, ChangeRefused> {
        self.now = now;
        // Neither repairs nor repetitions take a seal away; who wants that says `plain` first.
        let is_sealed = self.flows.get(id).is_some_and(|flow| flow.is_sealed() || flow.is_demanded());
        let to = to.sealed_if(to.makes_good() && is_sealed);
        let is_under_way = self.begin_change(now, id, to, ChangeCause::Order)?;
        if !is_under_way {
            self.stack_changes.histories.entry(id).or_default().order = Some(StackOrder { stack: to, at: now });
            self.stack_rules.stir(id);
        }
        Ok(is_under_way)
    }

    /// Takes an order back: the flow is carried as the configurations of the two hosts want it. As
    /// [`set_flow_stack`](Self::set_flow_stack).
    ///
    /// # Errors
    ///
    /// There is no order, or the flow cannot be changed now; it is as it was, and the order holds.
    pub fn release_flow_stack(&mut self, now: Instant, id: FlowId) -> Result<bool, ChangeRefused> {
        self.now = now;
        let flow = self.flows.get(id).ok_or(ChangeRefused::UnknownFlow(id))?;
        let is_demanded = flow.is_demanded();
        if self.order_of(id).is_none() {
            return Err(ChangeRefused::NoOrder);
        }
        let to = self.stack_rules.stack_by_rules(id).unwrap_or_default().sealed_if(is_demanded);
        let is_under_way = self.begin_change(now, id, to, ChangeCause::Release)?;
        if !is_under_way && let Some(history) = self.stack_changes.histories.get_mut(&id) {
            history.order = None;
            self.stack_rules.stir(id);
        }
        Ok(is_under_way)
    }

    /// The order of this host's operator that holds for a flow.
    pub(crate) fn order_of(&self, id: FlowId) -> Option<StackOrder> {
        self.stack_changes.histories.get(&id).and_then(|history| history.order)
    }

    /// Begins a change; false where the flow is so already.
    pub(crate) fn begin_change(
        &mut self,
        now: Instant,
        id: FlowId,
        to: Stack,
        cause: ChangeCause,
    ) -> Result<bool, ChangeRefused> {
        let flow = self.flows.get(id).ok_or(ChangeRefused::UnknownFlow(id))?;
        let role = flow.role;
        let from = flow.stacks.sends;
        let settled = flow.stacks.settled();
        if self.stack_changes.under_way(id).is_some() {
            return Err(ChangeRefused::UnderWay);
        }
        if settled == Some(to) {
            return Ok(false);
        }
        let begun = match role {
            Role::Initiator => self.lead(now, id, to, cause),
            Role::Responder => self.propose(now, id, to, cause),
        };
        if let Err(refused) = begun {
            let outcome = ChangeOutcome::Refused(refused);
            self.remember(now, id, StackChange { at: now, from, to, cause, outcome });
            return Err(refused);
        }
        Ok(true)
    }

    /// How a flow is carried, and why.
    pub(crate) fn stack_info(&self, flow: &Flow) -> StackInfo {
        let changing_to = self.stack_changes.under_way(flow.id);
        let plain = StackInfo { changing_to, ..flow.stack_info() };
        let Some(history) = self.stack_changes.histories.get(&flow.id) else { return plain };
        StackInfo {
            since: history.since.unwrap_or(plain.since),
            order: history.order,
            changes: history.changes.iter().copied().collect(),
            ..plain
        }
    }
}
