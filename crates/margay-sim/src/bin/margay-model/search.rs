//! Every run of a small world, on the state machines that ship, explored by stateright.

use std::fmt::Debug;
use std::hash::{Hash, Hasher};

use margay_sim::small::{Budget, SmallWorld, Step};
use stateright::{Checker, Expectation, Model, Property};

/// A world, by the steps that led to it.
#[derive(Clone, Debug)]
pub struct State<V> {
    steps: Vec<Step>,
    fingerprint: u64,
    next: Vec<Step>,
    /// What is judged of it.
    pub view: V,
}

impl<V> PartialEq for State<V> {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }
}

impl<V> Hash for State<V> {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.fingerprint.hash(hasher);
    }
}

/// What is judged of a world.
pub trait View: Clone + Debug + PartialEq + Send + Sync + 'static {
    /// From which it begins.
    type SetUp: Sync + Send + Copy + Debug + 'static;

    /// The beginning.
    fn begin(set_up: Self::SetUp, budget: Budget) -> SmallWorld;
    /// A look at a world.
    fn of(world: &SmallWorld) -> Self;
    /// Nothing that could come later is of interest.
    fn is_over(&self) -> bool;
    /// What must hold.
    fn properties() -> Vec<Property<Search<Self>>>;
}

/// All runs from one beginning.
pub struct Search<V: View> {
    set_up: V::SetUp,
    budget: Budget,
}

impl<V: View> Search<V> {
    /// From which it begins.
    pub const fn set_up(&self) -> V::SetUp {
        self.set_up
    }

    fn state(&self, steps: Vec<Step>) -> State<V> {
        let mut world = V::begin(self.set_up, self.budget);
        steps.iter().for_each(|step| world.play(*step));
        let view = V::of(&world);
        let next = if view.is_over() { Vec::new() } else { world.steps() };
        State { fingerprint: world.fingerprint(), steps, next, view }
    }
}

impl<V: View> Model for Search<V> {
    type State = State<V>;
    type Action = Step;

    fn init_states(&self) -> Vec<State<V>> {
        vec![self.state(Vec::new())]
    }

    fn actions(&self, state: &State<V>, actions: &mut Vec<Step>) {
        actions.extend(&state.next);
    }

    fn next_state(&self, last: &State<V>, action: Step) -> Option<State<V>> {
        let mut steps = last.steps.clone();
        steps.push(action);
        Some(self.state(steps))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        V::properties()
    }
}

/// What a search came to.
pub struct Found {
    /// States that differ.
    pub states: usize,
    /// Steps of the longest run.
    pub depth: usize,
    /// What does not hold, and the run that shows it; or what should be possible and is not.
    pub wrong: Vec<String>,
}

/// Searches all of it.
pub fn explore<V: View>(set_up: V::SetUp, budget: Budget, threads: usize) -> Found {
    let checker = Search::<V> { set_up, budget }.checker().threads(threads).spawn_bfs().join();
    let mut wrong = Vec::new();
    for property in V::properties() {
        match (&property.expectation, checker.discovery(property.name)) {
            (Expectation::Sometimes, None) => wrong.push(format!("never: {}", property.name)),
            (Expectation::Always | Expectation::Eventually, Some(path)) => {
                let last = path.last_state();
                wrong.push(format!("not always: {}: {:?} after {:?}", property.name, last.view, last.steps));
            }
            _ => {}
        }
    }
    Found { states: checker.unique_state_count(), depth: checker.max_depth(), wrong }
}
