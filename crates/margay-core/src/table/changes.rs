//! Which of many things have changed, for a copy of them that is kept elsewhere: asked for in small parts, so that a
//! change of one costs one.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

/// Changes that a copy takes up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part<T> {
    /// The copy forgets all that it has first.
    pub begins_anew: bool,
    /// What has changed, as it is now. Fewer than were asked for: that was all.
    pub changed: Vec<T>,
}

/// What has changed since it was asked for; nothing while nobody follows.
#[derive(Debug)]
pub(crate) struct Changes<K> {
    changed: BTreeSet<K>,
    /// More changes than this are forgotten: everything counts as changed then.
    max: usize,
    is_followed: bool,
    is_lost: bool,
    /// Whoever follows knows that there is something.
    is_told: bool,
}

impl<K: Ord> Changes<K> {
    /// Of at most `max` things at a time.
    pub const fn new(max: usize) -> Self {
        Self { changed: BTreeSet::new(), max, is_followed: false, is_lost: false, is_told: false }
    }

    /// From now on changes are kept. Whatever there is counts as new.
    pub const fn follow(&mut self) {
        (self.is_followed, self.is_lost) = (true, true);
    }

    /// Something has changed.
    pub fn note(&mut self, thing: K) {
        // What is lost is asked for as a whole.
        if !self.is_followed || self.is_lost {
            return;
        }
        if self.changed.len() >= self.max && !self.changed.contains(&thing) {
            self.changed.clear();
            self.is_lost = true;
            return;
        }
        self.changed.insert(thing);
    }

    /// Whether there is something that nobody was told of yet. True once.
    pub fn take_news(&mut self) -> bool {
        let is_news = self.has_news();
        self.is_told |= is_news;
        is_news
    }

    /// The same, and it stays so.
    pub fn has_news(&self) -> bool {
        !self.is_told && (self.is_lost || !self.changed.is_empty())
    }

    /// Whether whoever follows must begin anew; then with `all`.
    pub fn begin_anew(&mut self, all: impl Iterator<Item = K>) -> bool {
        if !core::mem::take(&mut self.is_lost) {
            return false;
        }
        self.changed = all.collect();
        true
    }

    /// Up to `max` of them; none when that was all.
    pub fn take(&mut self, max: usize) -> Vec<K> {
        let taken: Vec<K> = core::iter::from_fn(|| self.changed.pop_first()).take(max).collect();
        self.is_told = !self.changed.is_empty();
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_told_once_and_given_in_parts() {
        let mut changes = Changes::new(3);
        changes.note(7);
        assert!(!changes.take_news(), "nobody follows");
        changes.follow();
        assert!(changes.take_news() && !changes.take_news());
        assert!(changes.begin_anew([1, 2].into_iter()) && !changes.begin_anew([1].into_iter()));
        assert_eq!(changes.take(1), [1]);
        assert!(!changes.take_news(), "whoever has taken a part knows of the rest");
        assert_eq!(changes.take(9), [2]);
        changes.note(3);
        changes.note(3);
        assert!(changes.take_news());
        assert_eq!(changes.take(9), [3]);
        assert!(changes.take(9).is_empty() && !changes.take_news());
    }

    #[test]
    fn too_many_changes_are_a_new_beginning() {
        let mut changes = Changes::new(2);
        changes.follow();
        assert!(changes.begin_anew(core::iter::empty()));
        (1..=3).for_each(|thing| changes.note(thing));
        assert!(changes.take_news());
        assert!(changes.begin_anew([8, 9, 10].into_iter()));
        assert_eq!(changes.take(9), [8, 9, 10]);
    }
}
