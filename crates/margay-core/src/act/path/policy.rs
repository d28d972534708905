//! What becomes of a flow where its hosts have several addresses: a policy for each (DESIGN §10; docs/decisions/0021).

use alloc::vec::Vec;
use core::fmt;
use core::net::IpAddr;

use margay_wire::{FlowId, PLACES_MAX, Sharing};

use crate::act::path::place_stack::PlaceStacks;
use crate::act::path::side_path::{ListOf, MoveRefused, Towards};
use crate::association::location::{Cause, Pair, Scope};
use crate::leg::stack::PlaceStack;
use crate::machine::sal::Sal;
use crate::session::Act;
use crate::session::flow::{Flow, Marks};
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
    /// It goes by several pairs at once: each packet where it is predicted to arrive first.
    Stripe,
    /// The same; but places of these addresses have a stack of their own. Where one of them is plain, the flow is
    /// sealed.
    StripePartly(PlaceStacks),
    /// It goes by several pairs in turns, each as often as its weight says.
    Weighted(Weights),
    /// It goes by several pairs at once: each packet by two, of which the first one that arrives counts.
    Redundant,
}

impl Policy {
    /// As orders and lists write it, without what it names.
    pub const fn word(self) -> &'static str {
        match self {
            Self::FailOver => "fail-over",
            Self::Pin(_) => "pin",
            Self::Stripe | Self::StripePartly(_) => "stripe",
            Self::Weighted(_) => "weighted",
            Self::Redundant => "redundant",
        }
    }
}

/// Weights of places, by an address that each is of: this host's, or the peer's. Places of other addresses have 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Weights([Option<(IpAddr, u8)>; PLACES_MAX]);

/// Why weights are none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WeightsError {
    /// No weight.
    #[error("`weighted` needs weights: which address has how many turns, as in 192.0.2.1=2")]
    None,
    /// More weights than a flow has places.
    #[error("a flow has {PLACES_MAX} places at most, and so many weights")]
    Many,
    /// Zero, or too large.
    #[error("the weight of {0} is {1}: it is 1 to 255; for no packet to go by {0}, order `pin` with another address")]
    OutOfRange(IpAddr, u32),
    /// One address twice.
    #[error("{0} has two weights")]
    Twice(IpAddr),
}

impl Weights {
    /// So many turns for each address.
    ///
    /// # Errors
    ///
    /// None or too many, one that is not 1 to 255, or an address twice.
    pub fn new(weights: impl IntoIterator<Item = (IpAddr, u32)>) -> Result<Self, WeightsError> {
        let mut all = [None; PLACES_MAX];
        let mut count = 0;
        for (address, weight) in weights {
            if all.iter().flatten().any(|(known, _)| *known == address) {
                return Err(WeightsError::Twice(address));
            }
            let turns = u8::try_from(weight).ok().filter(|turns| *turns > 0);
            let turns = turns.ok_or(WeightsError::OutOfRange(address, weight))?;
            *all.get_mut(count).ok_or(WeightsError::Many)? = Some((address, turns));
            count += 1;
        }
        if count == 0 { Err(WeightsError::None) } else { Ok(Self(all)) }
    }

    /// Which addresses they are of.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.0.iter().flatten().map(|(address, _)| *address)
    }

    /// Of a pair of addresses.
    pub(crate) fn of(&self, pair: &Pair) -> u8 {
        let mut known = self.0.iter().flatten();
        let found = known.find(|(address, _)| pair.local == Some(*address) || pair.remote.ip() == *address);
        found.map_or(1, |(_, weight)| *weight)
    }
}

/// How this host has a flow shared out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    pub sharing: Sharing,
    pub weights: Weights,
    pub stacks: PlaceStacks,
}

impl Policy {
    /// Of a flow that is striped by it.
    const fn share(self) -> Option<Share> {
        let even =
            Share { sharing: Sharing::Earliest, weights: Weights([None; PLACES_MAX]), stacks: PlaceStacks::NONE };
        Some(match self {
            Self::FailOver | Self::Pin(_) => return None,
            Self::Stripe => even,
            Self::StripePartly(stacks) => Share { stacks, ..even },
            Self::Weighted(weights) => Share { sharing: Sharing::Weighted, weights, ..even },
            Self::Redundant => Share { sharing: Sharing::Redundant, ..even },
        })
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pin(address) => write!(f, "pin {address}"),
            Self::Weighted(weights) => {
                f.write_str(self.word())?;
                weights.0.iter().flatten().try_for_each(|(address, weight)| write!(f, " {address}={weight}"))
            }
            Self::StripePartly(stacks) => {
                f.write_str(self.word())?;
                stacks.all().try_for_each(|(address, stack)| write!(f, " {address}={}", stack.word()))
            }
            _ => f.write_str(self.word()),
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
        self.may_share(id, policy)?;
        self.set_policy(now, id, policy)
    }

    /// Whether there are several pairs for an order that is about them, and those that it names.
    fn may_share(&self, id: FlowId, policy: Policy) -> Result<(), MoveRefused> {
        let addresses: Vec<IpAddr> = match policy {
            Policy::FailOver | Policy::Pin(_) | Policy::Stripe => return Ok(()),
            Policy::StripePartly(stacks) => stacks.all().map(|(address, _)| address).collect(),
            Policy::Weighted(weights) => weights.addresses().collect(),
            Policy::Redundant => Vec::new(),
        };
        let flow = self.flows.get(id).filter(|flow| flow.carries_data()).ok_or(MoveRefused::NotAlive(id))?;
        let association = self.associations.get(flow.association).ok_or(MoveRefused::NotAlive(id))?;
        if association.is_self() {
            return Err(MoveRefused::SameHost);
        }
        let host = association.host;
        let pairs: Vec<Pair> = match &flow.stripe {
            Some(striping) => striping.list(false).iter().map(|place| place.pair).collect(),
            None => self.apart(host, &[]),
        };
        if pairs.len() < 2 {
            return Err(MoveRefused::OnePlace(policy.word(), ListOf(self.config.local_addresses.clone())));
        }
        let has = |address: IpAddr| pairs.iter().any(|one| one.local == Some(address) || one.remote.ip() == address);
        match addresses.into_iter().find(|address| !has(*address)) {
            Some(unknown) => {
                let local = pairs.iter().filter_map(|pair| pair.local).collect();
                let remote = pairs.iter().map(|pair| pair.remote.ip()).collect();
                Err(MoveRefused::NoPair(unknown, ListOf(local), ListOf(remote)))
            }
            None => Ok(()),
        }
    }

    fn set_policy(&mut self, now: Instant, id: FlowId, policy: Policy) -> Result<(), MoveRefused> {
        match policy {
            Policy::FailOver => {
                self.forget_share(id);
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
                self.forget_share(id);
                if let Some(flow) = self.flows.get_mut(id) {
                    flow.marks |= Marks::PINNED;
                }
                Ok(())
            }
            Policy::StripePartly(stacks) if stacks.have(PlaceStack::Fec) && !self.flows.is_of_datagrams(id) => {
                Err(MoveRefused::DatagramsOnly)
            }
            Policy::StripePartly(stacks) if stacks.have(PlaceStack::Plain) && self.seal_first(now, id)? => {
                // It is striped once it is sealed.
                let share = Policy::StripePartly(stacks).share().unwrap_or_default();
                self.shares.insert(id, share);
                if let Some(flow) = self.flows.get_mut(id) {
                    flow.marks |= Marks::STRIPES;
                }
                Ok(())
            }
            Policy::Stripe | Policy::StripePartly(_) | Policy::Weighted(_) | Policy::Redundant => {
                let is_striped = self.flows.get(id).is_some_and(|flow| flow.stripe.is_some());
                if !is_striped && self.has_several_pairs(id) {
                    self.begin_stripe(now, id, true)?;
                }
                if !is_striped {
                    self.unpin(now, id);
                }
                if let Some(flow) = self.flows.get_mut(id) {
                    flow.marks |= Marks::STRIPES;
                }
                match policy.share().filter(|share| *share != Share::default()) {
                    Some(share) => drop(self.shares.insert(id, share)),
                    None => drop(self.shares.remove(&id)),
                }
                self.share_out(now, id);
                Ok(())
            }
        }
    }

    /// This host does not want it to be striped any more.
    pub(crate) fn forget_share(&mut self, id: FlowId) {
        self.shares.remove(&id);
        if let Some(flow) = self.flows.get_mut(id) {
            flow.marks &= !Marks::STRIPES;
        }
    }

    /// A flow goes on as another one, and is shared out as before.
    pub(crate) fn carry_share(&mut self, from: FlowId, to: FlowId) {
        if let Some(share) = self.shares.get(&from).copied() {
            self.shares.insert(to, share);
        }
    }

    /// How this host wants a flow to be shared out, if it wants it to be striped.
    pub(crate) fn own_share(&self, flow: &Flow) -> Option<Share> {
        flow.has(Marks::STRIPES).then(|| self.shares.get(&flow.id).copied().unwrap_or_default())
    }

    /// It goes by the pair of all flows with its peer again.
    fn unpin(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.marks &= !Marks::PINNED;
        let Some(host) = flow.side.and_then(|side| self.side_path(side)).map(|side| side.host) else { return };
        if let Some(pair) = self.associations.pair_of(host) {
            self.leave(now, Scope { host, flow: id }, Cause::Operator, false, alloc::vec![pair]);
        }
    }

    /// Addresses have come: flows that are to be striped, and were not for want of a second pair, are now.
    pub(crate) fn stripe_what_waits(&mut self, now: Instant) {
        let waits = |flow: &&Flow| flow.has(Marks::STRIPES) && flow.stripe.is_none() && flow.carries_data();
        let waiting: Vec<FlowId> = self.flows.iter().filter(waits).map(|flow| flow.id).collect();
        for id in waiting.into_iter().filter(|id| self.has_several_pairs(*id)).collect::<Vec<_>>() {
            match self.begin_stripe(now, id, true) {
                Ok(()) | Err(MoveRefused::NotSealed) => {}
                Err(_) => self.counters.policies_refused += 1,
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
            is_its && flow.has(Marks::PINNED) && flow.side.is_none() && flow.carries_data()
        };
        let pinned: Vec<FlowId> = self.flows.iter().filter(is_pinned).map(|flow| flow.id).collect();
        for flow in pinned {
            self.leave(now, Scope { host, flow }, Cause::Operator, false, alloc::vec![pair]);
        }
    }
}
