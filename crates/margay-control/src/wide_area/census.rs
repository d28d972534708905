//! What a site serves, as far as others hear of it: how many instances there are is counted, and only the first and the last are news.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use margay_core::name::Prefix;

use super::Policy;

/// Instances by what they are announced as. One that takes no new connections is none.
#[derive(Default)]
pub struct Census {
    /// Without one nothing is announced, and nothing counted.
    policy: Option<Arc<Policy>>,
    instances: BTreeMap<Prefix, usize>,
    changed: BTreeSet<Prefix>,
}

impl Census {
    /// Of a site whose operator wants this.
    pub fn new(policy: Arc<Policy>) -> Self {
        Self { policy: Some(policy), ..Self::default() }
    }

    fn announced(&self, served: &Prefix, weight: u32) -> Option<Prefix> {
        self.policy.as_ref().filter(|_| weight > 0)?.announced_as(served)
    }

    /// An instance more.
    pub fn add(&mut self, served: &Prefix, weight: u32) {
        let Some(prefix) = self.announced(served, weight) else { return };
        let count = self.instances.entry(prefix).or_default();
        *count += 1;
        if *count == 1 {
            self.changed.insert(prefix);
        }
    }

    /// One less of those that were added with the same words.
    pub fn remove(&mut self, served: &Prefix, weight: u32) {
        let Some(prefix) = self.announced(served, weight) else { return };
        let Some(count) = self.instances.get_mut(&prefix) else { return };
        *count -= 1;
        if *count == 0 {
            self.instances.remove(&prefix);
            self.changed.insert(prefix);
        }
    }

    /// What has changed since this was asked last, and whether it is served now.
    pub fn take_changes(&mut self) -> Vec<(Prefix, bool)> {
        let changed = std::mem::take(&mut self.changed).into_iter();
        changed.map(|prefix| (prefix, self.instances.contains_key(&prefix))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_and_the_last_are_news() {
        let mut census = Census::new(Arc::default());
        let web: Prefix = "web.shop".parse().expect("a name");
        let announced = Prefix::new(web.id, 96);
        census.add(&web, 1);
        census.add(&web, 0);
        assert_eq!(census.take_changes(), [(announced, true)]);
        census.add(&web, 1);
        census.remove(&web, 1);
        census.remove(&web, 0);
        assert_eq!(census.take_changes(), []);
        census.remove(&web, 1);
        assert_eq!(census.take_changes(), [(announced, false)]);
        let mut silent = Census::default();
        silent.add(&web, 1);
        assert_eq!(silent.take_changes(), [], "without a policy nobody hears of anything");
    }
}
