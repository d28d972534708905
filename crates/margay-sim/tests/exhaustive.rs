//! Every run of a small world, on the state machines that ship, explored by stateright.

use std::hash::{Hash, Hasher};

use margay_sim::Outcome;
use margay_sim::small::{Acquaintance, Budget, SmallWorld, Step};
use stateright::{Checker, Model, Property};

#[derive(Clone, Debug)]
struct State {
    steps: Vec<Step>,
    fingerprint: u64,
    spent: (usize, usize, usize, usize),
    outcome: Outcome,
    accepted_unproved: bool,
    doubled: bool,
    stuck: bool,
}

impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        (self.fingerprint, self.spent) == (other.fingerprint, other.spent)
    }
}

impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (self.fingerprint, self.spent).hash(hasher);
    }
}

struct SetUp {
    acquaintance: Acquaintance,
    budget: Budget,
}

impl SetUp {
    fn world(&self, steps: &[Step]) -> SmallWorld {
        let mut world = SmallWorld::new(self.acquaintance);
        steps.iter().for_each(|step| world.play(*step));
        world
    }

    fn state(&self, steps: Vec<Step>) -> State {
        let world = self.world(&steps);
        let count = |wanted: fn(&Step) -> bool| steps.iter().filter(|step| wanted(step)).count();
        let spent = (
            count(|step| matches!(step, Step::Lose(_))),
            count(|step| matches!(step, Step::Duplicate(_))),
            count(|step| matches!(step, Step::Replay(_))),
            count(|step| matches!(step, Step::Wait)),
        );
        State {
            fingerprint: world.fingerprint(),
            spent,
            outcome: world.outcome(),
            accepted_unproved: world.accepted_unproved(),
            doubled: world.is_doubled(),
            stuck: world.is_stuck(),
            steps,
        }
    }
}

impl Model for SetUp {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![self.state(Vec::new())]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Step>) {
        if state.outcome != Outcome::Pending {
            return;
        }
        let (lose, duplicate, replay, wait) = state.spent;
        let left = Budget {
            lose: self.budget.lose - lose,
            duplicate: self.budget.duplicate - duplicate,
            replay: self.budget.replay - replay,
            wait: self.budget.wait - wait,
        };
        actions.extend(self.world(&state.steps).steps(&left));
    }

    fn next_state(&self, last: &State, action: Step) -> Option<State> {
        let mut steps = last.steps.clone();
        steps.push(action);
        Some(self.state(steps))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::<Self>::always("accept returns only proved peers", |_, state| !state.accepted_unproved),
            Property::<Self>::always("one session, one flow", |_, state| !state.doubled),
            Property::<Self>::always("never stuck", |_, state| !state.stuck),
            Property::<Self>::always("a lone honest server is never refused or reset", |_, state| {
                matches!(state.outcome, Outcome::Pending | Outcome::Answered(7))
            }),
            Property::<Self>::sometimes("it can be answered", |_, state| state.outcome == Outcome::Answered(7)),
        ]
    }
}

fn explore(acquaintance: Acquaintance, budget: Budget) {
    let checker = SetUp { acquaintance, budget }.checker().threads(2).spawn_bfs().join();
    eprintln!("{acquaintance:?}: {} states", checker.unique_state_count());
    assert!(checker.unique_state_count() > 50);
    checker.assert_properties();
}

const ALL_THREE: [Acquaintance; 3] = [Acquaintance::Strangers, Acquaintance::Known, Acquaintance::Forgotten];

#[test]
fn loss_and_reordering() {
    for acquaintance in ALL_THREE {
        explore(acquaintance, Budget { lose: 2, duplicate: 0, replay: 0, wait: 4 });
    }
}

#[test]
fn duplication() {
    for acquaintance in ALL_THREE {
        explore(acquaintance, Budget { lose: 0, duplicate: 2, replay: 0, wait: 2 });
    }
}

#[test]
fn replays_from_elsewhere() {
    for acquaintance in ALL_THREE {
        explore(acquaintance, Budget { lose: 1, duplicate: 0, replay: 1, wait: 3 });
    }
}
