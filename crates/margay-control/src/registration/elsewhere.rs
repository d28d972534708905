//! Instances that are registered with other routers of the cluster, and the rules that lead to those routers.
//!
//! Hosts register with every router that they can reach, so that these rules are for those that cannot reach this one.
//! A router sends to another only what nobody serves who is registered with itself, at that priority or a higher one:
//! who is sent something from here has somebody for it, and it ends there.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use margay_core::key::HostId;
use margay_core::name::Prefix;
use margay_core::table::{Action, NextHop, Rule, RuleId};

use super::roll::Place;
use crate::SalControl;
use crate::cluster::{ByRouter, Served};

/// A rule that leads to another router.
struct Lead {
    rule: RuleId,
    hop: NextHop,
    weight: u32,
    priority: u32,
}

/// All of them.
#[derive(Default)]
pub struct Elsewhere {
    by_prefix: BTreeMap<Prefix, BTreeMap<Place, BTreeMap<HostId, Arc<Served>>>>,
    /// What each host has among these.
    by_place: BTreeMap<Place, BTreeSet<Prefix>>,
    /// How many of them have each length.
    lengths: BTreeMap<u16, usize>,
    /// Routers that answer, and where.
    links: BTreeMap<HostId, SocketAddr>,
    leads: BTreeMap<Prefix, BTreeMap<Place, Lead>>,
    /// Nobody tells this router of changes now. What it has seen end by itself meanwhile, it does not believe others to
    /// have.
    is_away: bool,
    doubted: BTreeSet<(Prefix, Place)>,
}

impl Elsewhere {
    /// What others say of a host now; gives the prefixes of which something has changed.
    pub fn hear(&mut self, place: Place, by_router: ByRouter) -> BTreeSet<Prefix> {
        let mut now: BTreeMap<Prefix, BTreeMap<HostId, Arc<Served>>> = BTreeMap::new();
        for (router, all) in by_router {
            for served in all {
                now.entry(served.instance.prefix).or_default().insert(router, served);
            }
        }
        let prefixes: BTreeSet<Prefix> = now.keys().copied().collect();
        let before = match prefixes.is_empty() {
            true => self.by_place.remove(&place),
            false => self.by_place.insert(place, prefixes),
        };
        let mut changed = BTreeSet::new();
        for prefix in before.into_iter().flatten().filter(|prefix| !now.contains_key(prefix)) {
            self.remove(&prefix, &place);
            changed.insert(prefix);
        }
        for (prefix, by_router) in now {
            let places = self.by_prefix.entry(prefix).or_insert_with(|| {
                *self.lengths.entry(prefix.bits).or_default() += 1;
                BTreeMap::new()
            });
            if places.get(&place) != Some(&by_router) {
                places.insert(place, by_router);
                changed.insert(prefix);
            }
        }
        changed
    }

    fn remove(&mut self, prefix: &Prefix, place: &Place) {
        let Some(places) = self.by_prefix.get_mut(prefix) else { return };
        places.remove(place);
        if places.is_empty() {
            self.by_prefix.remove(prefix);
            let left = self.lengths.get(&prefix.bits).map_or(0, |count| count - 1);
            match left {
                0 => drop(self.lengths.remove(&prefix.bits)),
                left => drop(self.lengths.insert(prefix.bits, left)),
            }
        }
    }

    /// Which routers answer now, and where; gives the prefixes that this concerns.
    pub fn set_links(&mut self, links: BTreeMap<HostId, SocketAddr>) -> BTreeSet<Prefix> {
        if self.links == links {
            return BTreeSet::new();
        }
        self.links = links;
        self.by_prefix.keys().copied().collect()
    }

    /// Routers that answer.
    pub fn links(&self) -> impl Iterator<Item = HostId> {
        self.links.keys().copied()
    }

    /// Whether others' words come through; gives the prefixes that this concerns.
    pub fn set_away(&mut self, is_away: bool) -> BTreeSet<Prefix> {
        self.is_away = is_away;
        if is_away {
            return BTreeSet::new();
        }
        std::mem::take(&mut self.doubted).into_iter().map(|(prefix, _)| prefix).collect()
    }

    /// A host that was registered here serves a prefix no more.
    pub fn ended(&mut self, prefix: Prefix, place: Place) {
        if self.is_away && self.by_prefix.get(&prefix).is_some_and(|places| places.contains_key(&place)) {
            self.doubted.insert((prefix, place));
        }
    }

    /// Who serves a prefix elsewhere, and the router that leads there: of several the one with the lowest host-ID.
    pub fn of(&self, prefix: &Prefix) -> impl Iterator<Item = (Place, HostId, SocketAddr, &Served)> {
        let places = self.by_prefix.get(prefix).into_iter().flatten();
        places.filter(|(place, _)| !self.doubted.contains(&(*prefix, **place))).filter_map(|(place, by_router)| {
            let linked =
                by_router.iter().find_map(|(router, served)| Some((router, self.links.get(router)?, &**served)));
            let (router, address, served) = linked?;
            Some((*place, *router, *address, served))
        })
    }

    /// Lengths of prefixes that are served elsewhere.
    pub fn lengths(&self) -> impl DoubleEndedIterator<Item = u16> {
        self.lengths.keys().copied()
    }

    /// Prefixes that are served elsewhere and lie under one, are it, or cover it.
    pub fn about(&self, prefix: &Prefix) -> impl Iterator<Item = Prefix> {
        let above = self.lengths.range(..prefix.bits).map(|(bits, _)| Prefix::new(prefix.id, *bits));
        let below = self.by_prefix.range(*prefix..).map(|(below, _)| *below);
        above.chain(below.take_while(|below| prefix.covers(below)))
    }

    /// Prefixes that are served elsewhere.
    pub fn prefixes(&self) -> impl Iterator<Item = &Prefix> {
        self.by_prefix.keys()
    }

    /// Whether somebody serves a prefix elsewhere, or a rule of it leads there still.
    pub fn concerns(&self, prefix: &Prefix) -> bool {
        self.by_prefix.contains_key(prefix) || self.leads.contains_key(prefix)
    }

    /// Makes the rules of a prefix follow. `own` is the highest priority at which somebody serves it who is registered
    /// here, `is_here` says who is.
    pub fn settle(&mut self, prefix: Prefix, own: Option<u32>, is_here: impl Fn(&Place) -> bool, sal: &dyn SalControl) {
        let wanted: BTreeMap<Place, (NextHop, u32, u32)> = self
            .of(&prefix)
            .filter(|(place, _, _, served)| !is_here(place) && own.is_none_or(|own| served.instance.priority > own))
            .map(|(place, router, address, served)| {
                let hop = NextHop { address, host: Some(router), router: true };
                (place, (hop, served.instance.weight, served.instance.priority))
            })
            .collect();
        let mut former = self.leads.remove(&prefix).unwrap_or_default();
        let mut leads = BTreeMap::new();
        for (place, (hop, weight, priority)) in wanted {
            let is_same = |lead: &Lead| lead.hop == hop && (lead.weight, lead.priority) == (weight, priority);
            if former.get(&place).is_some_and(is_same) {
                leads.extend(former.remove_entry(&place));
                continue;
            }
            match sal.add_rule(prefix, Rule { priority, weight, action: Action::Forward(hop) }) {
                Ok(rule) => drop(leads.insert(place, Lead { rule, hop, weight, priority })),
                Err(error) => tracing::warn!(%prefix, %error, "no rule leads to the router that serves it"),
            }
        }
        if !leads.is_empty() {
            self.leads.insert(prefix, leads);
        }
        for lead in former.into_values() {
            sal.remove_rule(lead.rule);
        }
    }
}

/// As this router tells of it: of a router's own host that router says only that it is its own.
pub fn told(served: &Served, router: SocketAddr) -> super::Instance {
    let mut instance = served.instance.clone();
    if instance.is_of_teller() {
        instance.address = router;
    }
    instance
}
