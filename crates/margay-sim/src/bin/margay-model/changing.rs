//! A flow whose stack is changed.

use margay_core::Stack;
use margay_sim::small::changing::{Fault, Orders};
use margay_sim::small::{Budget, SmallWorld};
use stateright::Property;

use crate::search::{Search, State, View};

/// The property that a world violates which does not tell its core of a demand.
pub const ABOVE: &str = "never less than an end demands";
/// The property that a world violates whose ends do not tell each other what they have.
pub const TOGETHER: &str = "after quiet both ends have the same stack";

/// How the flow is carried.
#[derive(Clone, Debug, PartialEq)]
pub struct Carried {
    fell: bool,
    fault: Option<Fault>,
    /// The stack that both ends have after quiet; `None` before.
    became: Option<Stack>,
}

impl View for Carried {
    type SetUp = Orders;

    fn begin(orders: Orders, budget: Budget) -> SmallWorld {
        SmallWorld::changing(orders, budget)
    }

    fn of(world: &SmallWorld) -> Self {
        let became = Stack::ALL.into_iter().find(|stack| world.has_become(*stack));
        Self { fell: world.fell_below_a_demand(), fault: world.fault_of_changes(), became }
    }

    fn is_over(&self) -> bool {
        false
    }

    fn properties() -> Vec<Property<Search<Self>>> {
        vec![
            Property::always(ABOVE, |_, state: &State<Self>| !state.view.fell),
            Property::always(TOGETHER, |_, state: &State<Self>| state.view.fault != Some(Fault::Apart)),
            Property::always("no change and no lock outlives quiet", |_, state: &State<Self>| {
                state.view.fault != Some(Fault::Unfinished)
            }),
            Property::always("after quiet datagrams pass", |_, state: &State<Self>| {
                state.view.fault != Some(Fault::Deaf)
            }),
            Property::sometimes("what is ordered becomes so", |search: &Search<Self>, state: &State<Self>| {
                let wanted = search.set_up().to.into_iter().flatten();
                wanted.into_iter().any(|stack| state.view.became == Some(stack))
            }),
        ]
    }
}
