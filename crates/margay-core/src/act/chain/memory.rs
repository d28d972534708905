//! What is remembered for a while, within bounds.

use alloc::collections::{BTreeMap, BTreeSet};

/// Keys with the time until which each is remembered. Of more than there is room for, those that end first are
/// forgotten.
pub(super) struct Memory<K, T> {
    until: BTreeMap<K, T>,
    ends: BTreeSet<(T, K)>,
    max: usize,
}

impl<K: Ord + Copy, T: Ord + Copy> Memory<K, T> {
    pub const fn new(max: usize) -> Self {
        Self { until: BTreeMap::new(), ends: BTreeSet::new(), max }
    }

    pub fn is_empty(&self) -> bool {
        self.until.is_empty()
    }

    pub fn has(&self, key: &K, now: T) -> bool {
        self.until.get(key).is_some_and(|until| *until >= now)
    }

    pub fn note(&mut self, key: K, now: T, until: T) {
        if let Some(before) = self.until.remove(&key) {
            self.ends.remove(&(before, key));
        }
        while let Some(first) = self.ends.first().copied()
            && (first.0 < now || self.ends.len() >= self.max)
        {
            self.ends.remove(&first);
            self.until.remove(&first.1);
        }
        self.until.insert(key, until);
        self.ends.insert((until, key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_remembered_until_its_time_is_over() {
        let mut memory = Memory::new(2);
        memory.note('a', 0, 10);
        assert!(!memory.is_empty());
        assert!(memory.has(&'a', 10) && !memory.has(&'a', 11) && !memory.has(&'b', 0));
        memory.note('a', 5, 20);
        memory.note('b', 12, 30);
        assert!(memory.has(&'a', 20), "the later word counts");
        memory.note('c', 13, 25);
        assert!(!memory.has(&'a', 13), "the first one to end makes room");
        assert!(memory.has(&'b', 13) && memory.has(&'c', 13));
        memory.note('d', 40, 50);
        assert_eq!((memory.until.len(), memory.ends.len()), (1, 1), "what is over is forgotten");
    }
}
