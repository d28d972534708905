//! Hosts that connect.

use margay_sim::Outcome;
use margay_sim::small::meeting::Acquaintance;
use margay_sim::small::{Budget, SmallWorld};
use stateright::Property;

use crate::search::{Search, State, View};

/// How an attempt stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    outcome: Outcome,
    accepted_unproved: bool,
    is_doubled: bool,
    is_stuck: bool,
}

impl View for Attempt {
    type SetUp = Acquaintance;

    fn begin(acquaintance: Acquaintance, budget: Budget) -> SmallWorld {
        SmallWorld::meeting(acquaintance, budget)
    }

    fn of(world: &SmallWorld) -> Self {
        Self {
            outcome: world.outcome(),
            accepted_unproved: world.accepted_unproved(),
            is_doubled: world.is_doubled(),
            is_stuck: world.is_stuck(),
        }
    }

    fn is_over(&self) -> bool {
        self.outcome != Outcome::Pending
    }

    fn properties() -> Vec<Property<Search<Self>>> {
        vec![
            Property::always("accept returns only proved peers", |_, state: &State<Self>| {
                !state.view.accepted_unproved
            }),
            Property::always("one session, one flow", |_, state: &State<Self>| !state.view.is_doubled),
            Property::always("never stuck", |_, state: &State<Self>| !state.view.is_stuck),
            Property::always("a lone honest server is never refused or reset", |_, state: &State<Self>| {
                matches!(state.view.outcome, Outcome::Pending | Outcome::Answered(7))
            }),
            Property::sometimes("it is answered", |_, state: &State<Self>| state.view.outcome == Outcome::Answered(7)),
        ]
    }
}
