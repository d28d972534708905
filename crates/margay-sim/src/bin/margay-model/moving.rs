//! Hosts that move.

use margay_sim::small::moving::{Fault, Travels};
use margay_sim::small::{Budget, SmallWorld};
use stateright::Property;

use crate::search::{Search, State, View};

/// The property that both ends have one pair, and it works.
pub const AGREE: &str = "after quiet both ends agree";

/// Where two hosts take each other to be.
#[derive(Clone, Debug, PartialEq)]
pub struct Whereabouts {
    is_unproved: bool,
    went_back: bool,
    fault: Option<Fault>,
    all_moved: bool,
}

impl View for Whereabouts {
    type SetUp = Travels;

    fn begin(travels: Travels, budget: Budget) -> SmallWorld {
        SmallWorld::moving(&travels, budget)
    }

    fn of(world: &SmallWorld) -> Self {
        Self {
            is_unproved: world.is_unproved(),
            went_back: world.went_back(),
            fault: world.fault(),
            all_moved: world.have_all_moved(),
        }
    }

    fn is_over(&self) -> bool {
        false
    }

    fn properties() -> Vec<Property<Search<Self>>> {
        vec![
            Property::always("nothing is committed to a place that has not answered", |_, state: &State<Self>| {
                !state.view.is_unproved
            }),
            Property::always("nobody goes back", |_, state: &State<Self>| !state.view.went_back),
            Property::always("no flow is lost", |_, state: &State<Self>| state.view.fault != Some(Fault::Lost)),
            Property::always(AGREE, |_, state: &State<Self>| state.view.fault != Some(Fault::Apart)),
            Property::always("after quiet data passes", |_, state: &State<Self>| state.view.fault != Some(Fault::Deaf)),
            Property::sometimes("all is quiet after every move", |_, state: &State<Self>| state.view.all_moved),
        ]
    }
}
