//! What becomes of a flow where its hosts have several addresses: a policy for each (DESIGN §10; docs/decisions/0021).

use alloc::vec::Vec;
use core::fmt;
use core::net::IpAddr;

use margay_wire::FlowId;

use crate::act::path::side_path::{MoveRefused, Towards};
use crate::association::location::{Cause, Pair, Scope};
use crate::machine::sal::Sal;
use crate::session::Act;
use crate::session::flow::{Flow, seen};
use crate::types::key::HostId;
use crate::types::name::{Prefix, ServiceId};
use crate::types::time::Instant;

/// How a flow uses several addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// It goes by the pair that all flows with the peer go by, and moves with them.
    #[default]
    FailOver,
    /// It goes by this address, of either end, as long as that can be.
    Pin(IpAddr),
    /// It goes by several pairs at once.
    Stripe,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FailOver => f.write_str("fail-over"),
            Self::Pin(address) => write!(f, "pin {address}"),
            Self::Stripe => f.write_str("stripe"),
        }
    }
}

impl Sal {
    /// Which policy flows to (or of) names have from their beginning; of several that fit the one with the longest
    /// prefix, and of two with the same prefix the first. Flows that there are keep theirs.
    pub fn set_policies(&mut self, mut policies: Vec<(Prefix, Policy)>) {
        policies.sort_by_key(|(prefix, _)| core::cmp::Reverse(prefix.bits));
        self.policies = policies;
        self.end_all_grants();
    }

    pub(crate) fn policy_of(&self, service: &ServiceId) -> Policy {
        self.policies
            .iter()
            .find(|(prefix, _)| prefix.contains(service))
            .map_or(Policy::FailOver, |(_, policy)| *policy)
    }

    /// A flow has begun: it gets its name's policy. One that cannot be had is none: the flow goes as others do.
    pub(crate) fn begin_policy(&mut self, now: Instant, id: FlowId) {
        let Some(service) = self.flows.get(id).map(|flow| flow.service) else { return };
        let policy = self.policy_of(&service);
        if policy != Policy::FailOver && self.set_policy(now, id, policy).is_err() {
            self.counters.policies_refused += 1;
        }
    }

    /// Changes the policy of one flow, by order.
    ///
    /// # Errors
    ///
    /// Why not; nothing has changed then.
    pub fn set_flow_policy(&mut self, now: Instant, id: FlowId, policy: Policy) -> Result<(), MoveRefused> {
        self.now = now;
        if self.flows.get(id).is_none() {
            return Err(MoveRefused::UnknownFlow(id));
        }
        self.may_lock_flow(now, id, Act::Move)?;
        self.set_policy(now, id, policy)
    }

    fn set_policy(&mut self, now: Instant, id: FlowId, policy: Policy) -> Result<(), MoveRefused> {
        match policy {
            Policy::FailOver => {
                if let Some(flow) = self.flows.get_mut(id) {
                    flow.seen &= !seen::STRIPES;
                }
                self.end_stripe(now, id, true);
                self.unpin(now, id);
                Ok(())
            }
            Policy::Pin(address) => {
                let towards =
                    if self.has_address(address) { Towards::Local(address) } else { Towards::Remote(address) };
                match self.move_flow(now, id, towards) {
                    Ok(()) | Err(MoveRefused::There) => {}
                    Err(refused) => return Err(refused),
                }
                self.end_stripe(now, id, true);
                if let Some(flow) = self.flows.get_mut(id) {
                    flow.seen = flow.seen & !seen::STRIPES | seen::PINNED;
                }
                Ok(())
            }
            Policy::Stripe => {
                if self.flows.get(id).and_then(|flow| flow.stripe.as_ref()).is_some() {
                    return Ok(());
                }
                if self.has_several_pairs(id) {
                    self.begin_stripe(now, id, true)?;
                }
                self.unpin(now, id);
                if let Some(flow) = self.flows.get_mut(id) {
                    flow.seen |= seen::STRIPES;
                }
                Ok(())
            }
        }
    }

    /// It goes by the pair of all flows with its peer again.
    fn unpin(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.seen &= !seen::PINNED;
        let Some(host) = flow.side.and_then(|side| self.side_path(side)).map(|side| side.host) else { return };
        if let Some(pair) = self.pair_of(host) {
            self.leave(now, Scope { host, flow: id }, Cause::Operator, false, alloc::vec![pair]);
        }
    }

    /// Addresses have come: flows that are to be striped, and were not for want of a second pair, are now.
    pub(crate) fn stripe_what_waits(&mut self, now: Instant) {
        let waits = |flow: &&Flow| flow.has(seen::STRIPES) && flow.stripe.is_none() && flow.carries_data();
        let waiting: Vec<FlowId> = self.flows.iter().filter(waits).map(|flow| flow.id).collect();
        for id in waiting.into_iter().filter(|id| self.has_several_pairs(*id)).collect::<Vec<_>>() {
            if self.begin_stripe(now, id, true).is_err() {
                self.counters.policies_refused += 1;
            }
        }
    }

    /// The flows with a peer have moved away from a pair that still works: those that are pinned go back there.
    pub(crate) fn return_pinned(&mut self, now: Instant, host: HostId, pair: Pair) {
        if pair.local.is_none_or(|local| !self.has_address(local)) {
            return;
        }
        let is_pinned = |flow: &&Flow| {
            let is_its = self.associations.get(flow.association).is_some_and(|association| association.host == host);
            is_its && flow.has(seen::PINNED) && flow.side.is_none() && flow.carries_data()
        };
        let pinned: Vec<FlowId> = self.flows.iter().filter(is_pinned).map(|flow| flow.id).collect();
        for flow in pinned {
            self.leave(now, Scope { host, flow }, Cause::Operator, false, alloc::vec![pair]);
        }
    }
}
