//! What a site serves, as far as others hear of it: how many instances there are is counted, and only the first and the
//! last are news.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use margay_core::name::Prefix;

use super::Policy;
use super::announcement::service_name;

/// Instances by what they are announced as. One that takes no new connections is none.
#[derive(Default)]
pub struct Census {
    /// Without one nothing is announced, and nothing counted.
    policy: Option<Arc<Policy>>,
    /// How many, and what the service is called, where that is known.
    instances: BTreeMap<Prefix, (usize, String)>,
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
    pub fn add(&mut self, served: &Prefix, name: &str, weight: u32) {
        let Some(prefix) = self.announced(served, weight) else { return };
        let (count, known) = self.instances.entry(prefix).or_default();
        *count += 1;
        if *count == 1 {
            *known = service_name(name, &prefix).unwrap_or_default();
            self.changed.insert(prefix);
        }
    }

    /// One less of those that were added with the same words.
    pub fn remove(&mut self, served: &Prefix, weight: u32) {
        let Some(prefix) = self.announced(served, weight) else { return };
        let Some((count, _)) = self.instances.get_mut(&prefix) else { return };
        *count -= 1;
        if *count == 0 {
            self.instances.remove(&prefix);
            self.changed.insert(prefix);
        }
    }

    /// What has changed since this was asked last, and what it is called if it is served now; empty: that is not known.
    pub fn take_changes(&mut self) -> Vec<(Prefix, Option<String>)> {
        let changed = std::mem::take(&mut self.changed).into_iter();
        changed.map(|prefix| (prefix, self.instances.get(&prefix).map(|(_, name)| name.clone()))).collect()
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
        census.add(&web, "web.shop", 1);
        census.add(&web, "web.shop", 0);
        assert_eq!(census.take_changes(), [(announced, Some("web.shop".to_owned()))]);
        census.add(&web, "web.shop", 1);
        census.remove(&web, 1);
        census.remove(&web, 0);
        assert_eq!(census.take_changes(), []);
        census.remove(&web, 1);
        assert_eq!(census.take_changes(), [(announced, None)]);
        let mut silent = Census::default();
        silent.add(&web, "web.shop", 1);
        assert_eq!(silent.take_changes(), [], "without a policy nobody hears of anything");
    }
}
