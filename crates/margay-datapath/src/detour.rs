//! Flows of datagrams of which something waits for the core: what comes next goes the same way, and does not overtake
//! it. Connections put their segments in order themselves.

use std::collections::HashMap;
use std::hash::Hash;

/// More flows are forgotten that nothing waits of any more.
const FLOWS_MAX: usize = 1024;

/// What has waited for the core, or does, counted from the start of the datapath.
pub(crate) type Place = u64;

/// Flows of one direction, by what its packet thread finds them by.
#[derive(Debug)]
pub(crate) struct Detours<K>(HashMap<K, Place>);

impl<K> Default for Detours<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> Detours<K> {
    /// Something of a flow waits at a place. `worked_off` says up to which place nothing waits any more.
    pub fn add(&mut self, key: K, place: Place, worked_off: impl FnOnce() -> Place) {
        if self.0.len() >= FLOWS_MAX {
            let worked_off = worked_off();
            self.0.retain(|_, place| *place > worked_off);
        }
        self.0.insert(key, place);
    }

    /// What waited at one place does so at another.
    pub fn place(&mut self, from: Place, to: Place) {
        self.0.values_mut().filter(|place| **place == from).for_each(|place| *place = to);
    }

    /// Whether something of a flow waits.
    pub fn has(&mut self, key: &K, worked_off: impl FnOnce() -> Place) -> bool {
        // There seldom is any.
        if self.0.is_empty() {
            return false;
        }
        let Some(place) = self.0.get(key) else { return false };
        if *place > worked_off() {
            return true;
        }
        self.0.remove(key);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_follows_what_waits_of_it_and_no_longer() {
        let mut detours = Detours::default();
        assert!(!detours.has(&7, || unreachable!("nothing waits")));
        detours.add(7, 3, || 0);
        detours.add(8, 4, || 0);
        detours.add(7, 5, || 0);
        assert!(detours.has(&7, || 4) && !detours.has(&8, || 4) && !detours.has(&9, || 4));
        assert!(!detours.has(&7, || 5) && !detours.has(&7, || 0), "it is forgotten");
        detours.add(7, Place::MAX, || 0);
        detours.place(Place::MAX, 6);
        assert!(detours.has(&7, || 5) && !detours.has(&7, || 6));
    }

    #[test]
    fn flows_of_which_nothing_waits_take_no_room_for_good() {
        let mut detours = Detours::default();
        (0..FLOWS_MAX as u64).for_each(|flow| detours.add(flow, flow, || 0));
        detours.add(5000, 5000, || FLOWS_MAX as u64 - 2);
        assert_eq!(detours.0.len(), 2);
    }
}
