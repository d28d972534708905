//! A connection that goes to another host.

use margay_sim::small::handing::Fault;
use margay_sim::small::{Budget, SmallWorld};
use stateright::Property;

use crate::search::{Search, State, View};

/// Who has a connection.
#[derive(Clone, Debug, PartialEq)]
pub struct OneEnd {
    was_doubled: bool,
    fault: Option<Fault>,
    /// After quiet: the taker's program has it.
    has_gone: bool,
}

impl View for OneEnd {
    type SetUp = ();

    fn begin((): (), budget: Budget) -> SmallWorld {
        SmallWorld::handing(budget)
    }

    fn of(world: &SmallWorld) -> Self {
        Self { was_doubled: world.was_doubled(), fault: world.fault_of_hand_over(), has_gone: world.has_gone() }
    }

    fn is_over(&self) -> bool {
        false
    }

    fn properties() -> Vec<Property<Search<Self>>> {
        vec![
            Property::always("never two live ends", |_, state: &State<Self>| !state.view.was_doubled),
            Property::always("no program waits for a connection that nobody has", |_, state: &State<Self>| {
                state.view.fault != Some(Fault::Hung)
            }),
            Property::always("no live end that the client does not know", |_, state: &State<Self>| {
                state.view.fault != Some(Fault::Unknown)
            }),
            Property::always("after quiet bytes pass", |_, state: &State<Self>| state.view.fault != Some(Fault::Deaf)),
            Property::always("lost only where an agent was killed", |_, state: &State<Self>| {
                state.view.fault != Some(Fault::Lost)
            }),
            Property::sometimes("it goes", |_, state: &State<Self>| state.view.has_gone),
        ]
    }
}
