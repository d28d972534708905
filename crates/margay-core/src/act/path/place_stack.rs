//! Places of a striped flow that have a stack of their own: plain while its others are sealed (sealed by Wi-Fi, plain
//! by the cable: docs/decisions/0097), or with repairs (docs/decisions/0095).
//!
//! A flow with a plain place is sealed, as any other that is: nothing of it goes as it is but by places of which both
//! ends have agreed so, and of none while an end demands that it is sealed. Repairs change nothing of what goes by a
//! place: of a sealed flow they are made of what is sealed.

use core::net::IpAddr;

use margay_wire::{Flags, FlowId, PLACES_MAX};

use crate::act::path::side_path::MoveRefused;
use crate::act::stack_change::{ChangeCause, ChangeOutcome, ChangeRefused, StackChange};
use crate::association::location::Pair;
use crate::leg::stack::{PlaceStack, Stack};
use crate::machine::sal::Sal;
use crate::session::event::StripePlace;
use crate::session::flow::{Flow, Marks};
use crate::types::time::Instant;

/// Addresses, this host's or the peer's, whose places have a stack of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlaceStacks([Option<(IpAddr, PlaceStack)>; PLACES_MAX]);

/// Why addresses are no places with a stack of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceStacksError {
    /// More than a flow has places.
    #[error("a flow has {PLACES_MAX} places at most, and so many can have a stack of their own")]
    Many,
    /// One address twice.
    #[error("{0} is named twice")]
    Twice(IpAddr),
}

impl PlaceStacks {
    /// None.
    pub const NONE: Self = Self([None; PLACES_MAX]);

    /// Those of these addresses.
    ///
    /// # Errors
    ///
    /// Too many, or one twice.
    pub fn new(stacks: impl IntoIterator<Item = (IpAddr, PlaceStack)>) -> Result<Self, PlaceStacksError> {
        let mut all = Self::NONE;
        for (count, (address, stack)) in stacks.into_iter().enumerate() {
            if all.all().any(|(known, _)| known == address) {
                return Err(PlaceStacksError::Twice(address));
            }
            *all.0.get_mut(count).ok_or(PlaceStacksError::Many)? = Some((address, stack));
        }
        Ok(all)
    }

    /// Which addresses they have, and which stacks.
    pub fn all(&self) -> impl Iterator<Item = (IpAddr, PlaceStack)> {
        self.0.iter().flatten().copied()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all().next().is_none()
    }

    /// Whether any of them has this stack.
    pub fn have(&self, stack: PlaceStack) -> bool {
        self.all().any(|(_, known)| known == stack)
    }

    /// Of a pair of addresses.
    pub(crate) fn of(&self, pair: &Pair) -> Option<PlaceStack> {
        let is_its = |(address, _): &(IpAddr, PlaceStack)| pair.local == Some(*address) || pair.remote.ip() == *address;
        self.all().find(is_its).map(|(_, stack)| stack)
    }
}

impl Sal {
    /// A flow that is to have plain places is sealed first. True if that is under way, or waits until the flow is set
    /// up.
    ///
    /// # Errors
    ///
    /// An end demands that it is sealed by all places, or it cannot be sealed.
    pub(super) fn seal_first(&mut self, now: Instant, id: FlowId) -> Result<bool, MoveRefused> {
        let flow = self.flows.get(id).ok_or(MoveRefused::UnknownFlow(id))?;
        if flow.is_demanded() {
            return Err(MoveRefused::Demanded);
        }
        if self.stack_rules.has_floor_for(&flow.service) {
            return Err(MoveRefused::Floor);
        }
        match self.begin_change(now, id, Stack::Secure, ChangeCause::Order) {
            Ok(is_under_way) => Ok(is_under_way),
            Err(ChangeRefused::Unconfirmed) => Ok(true),
            Err(refused) => Err(MoveRefused::CannotSeal(refused)),
        }
    }

    /// Whether this host wants plain places of a flow that is not sealed: nothing of it goes by several pairs before.
    pub(super) fn is_to_be_sealed_first(&self, flow: &Flow) -> bool {
        let is_partly = self.own_share(flow).is_some_and(|share| share.stacks.have(PlaceStack::Plain));
        is_partly && flow.stacks.settled() != Some(Stack::Secure)
    }

    /// An end demands that a flow is sealed: none of its places is plain. The peer hears at once of a demand of this
    /// end.
    pub(crate) fn seal_all_places(&mut self, id: FlowId, demand: Marks) {
        let is_plain = |place: &StripePlace| [place.sends, place.takes].contains(&Some(PlaceStack::Plain));
        let Some(striping) = self.flows.get(id).and_then(|flow| flow.stripe.as_ref()) else { return };
        if striping.list(true).iter().any(is_plain) {
            self.flows.install_again(&mut self.queue, id);
            if demand != Marks::PEER_DEMANDS {
                self.tell(id, Flags::empty());
            }
        }
    }

    /// A flow has been set up at both ends: it may be sealed now, where that has waited.
    pub(crate) fn seal_what_waits(&mut self, now: Instant, id: FlowId) {
        let Some(flow) = self.flows.get(id).filter(|flow| flow.has(Marks::STRIPES)) else { return };
        if flow.stripe.is_none() && self.is_to_be_sealed_first(flow) && self.seal_first(now, id).is_err() {
            self.counters.policies_refused += 1;
            self.forget_share(id);
        }
    }

    /// A change of a flow is over: where it was to be sealed before it is striped, it is striped now, or not at all.
    pub(crate) fn stripe_what_is_sealed(&mut self, now: Instant, id: FlowId, change: &StackChange) {
        let Some(flow) = self.flows.get(id).filter(|flow| flow.has(Marks::STRIPES)) else { return };
        let is_partly = self.own_share(flow).is_some_and(|share| share.stacks.have(PlaceStack::Plain));
        if !is_partly || flow.stripe.is_some() || change.to != Stack::Secure || !flow.carries_data() {
            return;
        }
        let is_begun = match change.outcome {
            // Where there is one pair, a second one may come.
            ChangeOutcome::Done => !self.has_several_pairs(id) || self.begin_stripe(now, id, true).is_ok(),
            ChangeOutcome::Refused(_) | ChangeOutcome::NoAnswer | ChangeOutcome::Ended => false,
        };
        if !is_begun {
            self.counters.policies_refused += 1;
            self.forget_share(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn addresses_are_few_and_each_is_named_once() {
        let address = |last: u8| IpAddr::from([192, 0, 2, last]);
        let plain = |last| (address(last), PlaceStack::Plain);
        let two = [plain(1), (address(2), PlaceStack::Fec)];
        let places = PlaceStacks::new(two).expect("two");
        assert_eq!(places.all().collect::<Vec<_>>(), two);
        let pair = |local: u8, remote: u8| Pair { local: Some(address(local)), remote: (address(remote), 9).into() };
        let of = |local, remote| places.of(&pair(local, remote));
        assert_eq!([of(1, 9), of(9, 2), of(8, 9)], [Some(PlaceStack::Plain), Some(PlaceStack::Fec), None]);
        let twice = [plain(1), (address(1), PlaceStack::Fec)];
        assert_eq!(PlaceStacks::new(twice), Err(PlaceStacksError::Twice(address(1))));
        assert_eq!(PlaceStacks::new((1..6).map(plain)), Err(PlaceStacksError::Many));
        assert!(PlaceStacks::new([]).is_ok_and(|none| none.is_empty() && !none.have(PlaceStack::Fec)));
    }
}
