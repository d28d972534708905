//! Every run of a small ensemble, explored by stateright.

use std::hash::{Hash, Hasher};

use margay_sim::ensemble::small::{Beginning, CHUNKS, SmallEnsemble, Step};
use stateright::{Checker, Model, Property};

use crate::Searchable;

/// A world, and what says whether another is the same.
#[derive(Clone, Debug)]
struct State<R> {
    world: SmallEnsemble<R>,
    fingerprint: u64,
}

impl<R> PartialEq for State<R> {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint == other.fingerprint
    }
}

impl<R> Hash for State<R> {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.fingerprint.hash(hasher);
    }
}

struct Search<R> {
    beginning: Beginning,
    rules: std::marker::PhantomData<R>,
}

const PROPERTY: &str = "nothing is wrong";

impl<R: Searchable> Model for Search<R> {
    type State = State<R>;
    type Action = Step;

    fn init_states(&self) -> Vec<State<R>> {
        let targets = |bits: u8| std::array::from_fn::<u8, CHUNKS, _>(|chunk| bits >> chunk & 1);
        let worlds = self.beginning.choices.iter().map(|bits| SmallEnsemble::new(&self.beginning, targets(*bits)));
        worlds.map(|world| State { fingerprint: world.fingerprint(), world }).collect()
    }

    fn actions(&self, state: &State<R>, actions: &mut Vec<Step>) {
        actions.extend(state.world.steps());
    }

    fn next_state(&self, last: &State<R>, step: Step) -> Option<State<R>> {
        let mut world = last.world.clone();
        world.play(step);
        Some(State { fingerprint: world.fingerprint(), world })
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always(PROPERTY, |_, state: &State<R>| state.world.wrong().is_none())]
    }
}

/// What a search came to.
pub struct Found {
    /// States that differ.
    pub states: usize,
    /// Steps of the longest run.
    pub depth: usize,
    /// What is wrong, and the run that shows it.
    pub wrong: Vec<String>,
}

/// Searches all of it, or up to the first thing that is wrong.
pub fn explore<R: Searchable>(beginning: &Beginning, threads: usize) -> Found {
    let search = Search::<R> { beginning: *beginning, rules: std::marker::PhantomData };
    let checker = search.checker().threads(threads).spawn_bfs().join();
    let wrong = checker.discovery(PROPERTY).map(|path| {
        let wrong = path.last_state().world.wrong().unwrap_or_default();
        let steps: Vec<Step> = path.into_actions();
        format!("{wrong} after {steps:?}")
    });
    Found { states: checker.unique_state_count(), depth: checker.max_depth(), wrong: wrong.into_iter().collect() }
}
