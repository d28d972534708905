//! What the operator of a site wants told to other sites, and what to make of what they tell.

use std::collections::BTreeMap;

use margay_core::name::{Prefix, SERVICE_BITS};

use super::announcement::Scope;

/// How a neighbouring router is taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preference {
    /// Where this router has joined it: whether neither is above the other.
    pub beside: bool,
    /// Higher first, among routers that are above, beside or below alike.
    pub preference: u32,
    /// In percent of the share that the neighbour asks for.
    pub weight: u32,
}

impl Default for Preference {
    fn default() -> Self {
        Self { beside: false, preference: 100, weight: 100 }
    }
}

/// What a router tells of its site.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// What the site is called.
    pub site: String,
    /// Announced in place of all names under them, while at least one of those is served.
    pub aggregates: Vec<Prefix>,
    /// How far names go; the longest prefix decides, and without one they go everywhere.
    pub scopes: Vec<(Prefix, Scope)>,
    /// The share that the site asks for among sites that are as good.
    pub weight: u32,
    /// By the names of their sites.
    pub neighbours: BTreeMap<String, Preference>,
}

impl Policy {
    /// How a site's router is taken.
    pub fn preference(&self, site: &str) -> Preference {
        self.neighbours.get(site).cloned().unwrap_or_default()
    }

    /// How far a served prefix goes.
    pub fn scope(&self, prefix: &Prefix) -> Scope {
        let covering = self.scopes.iter().filter(|(of, _)| of.covers(prefix));
        covering.max_by_key(|(of, _)| of.bits).map_or(Scope::World, |(_, scope)| *scope)
    }

    /// As what a served prefix is announced: the longest aggregate over it, or its service. `None`: not at all.
    pub fn announced_as(&self, served: &Prefix) -> Option<Prefix> {
        if self.scope(served) == Scope::Site {
            return None;
        }
        let covering = self.aggregates.iter().filter(|aggregate| aggregate.covers(served));
        let aggregate = covering.max_by_key(|aggregate| aggregate.bits).copied();
        Some(aggregate.unwrap_or_else(|| Prefix::new(served.id, served.bits.min(SERVICE_BITS))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(text: &str) -> Prefix {
        text.parse().expect("a name")
    }

    #[test]
    fn a_served_name_is_announced_as_its_service_or_the_longest_aggregate() {
        let (web, mail) = (prefix("web.shop"), prefix("mail.shop"));
        let whole = |name: &Prefix| Prefix::new(name.id, SERVICE_BITS);
        let mut policy = Policy::default();
        assert_eq!(policy.announced_as(&web), Some(whole(&web)));
        assert_eq!(policy.announced_as(&prefix("web.shop/key:one")), Some(whole(&web)));
        policy.aggregates = vec![Prefix::of_authority("shop"), whole(&mail)];
        assert_eq!(policy.announced_as(&web), Some(Prefix::of_authority("shop")));
        assert_eq!(policy.announced_as(&mail), Some(whole(&mail)));
        assert_eq!(policy.announced_as(&prefix("web.club")), Some(whole(&prefix("web.club"))));
        policy.scopes = vec![(Prefix::of_authority("shop"), Scope::Region), (whole(&web), Scope::Site)];
        assert_eq!(policy.announced_as(&web), None);
        assert_eq!((policy.scope(&mail), policy.scope(&prefix("web.club"))), (Scope::Region, Scope::World));
    }
}
