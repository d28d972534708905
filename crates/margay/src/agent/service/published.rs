//! A published service, as it stands.

use margay_control::registration::{Terms, ZeroWeight};
use margay_core::name::{Name, Prefix};
use margay_core::table::RuleId;

use super::fitness::Fitness;
use super::tenancy::Tenancy;
use super::{Listener, Services};

/// What a name and its terms serve.
pub fn served_prefix(name: &Name, terms: &Terms) -> Prefix {
    if terms.partition_bits > 0 { name.service_prefix() } else { name.prefix() }
}

/// A published service.
#[derive(Clone, Debug)]
pub struct Published {
    /// The name.
    pub name: Name,
    /// How it is served.
    pub terms: Terms,
    /// Its listeners.
    pub listeners: Vec<Listener>,
    /// Whether a socket listens for it, and the router on this host has nothing against it.
    pub is_served: bool,
    /// What that router has against it, where another host serves the name; else empty.
    pub refused: String,
    /// Whether it takes no new flows, whatever its weight.
    pub is_drained: bool,
    /// What its checks have left of its weight.
    pub fitness: Fitness,
    /// Where it is fenced: whether this host holds it.
    pub tenancy: Tenancy,
    pub(super) rules: Vec<RuleId>,
}

impl Published {
    pub(super) fn new(name: Name) -> Self {
        Self {
            name,
            terms: Terms::default(),
            listeners: Vec::new(),
            is_served: false,
            refused: String::new(),
            is_drained: false,
            fitness: Fitness::default(),
            tenancy: Tenancy::Free,
            rules: Vec::new(),
        }
    }

    /// Whether its name is a box's, which chains name.
    pub fn is_box(&self) -> bool {
        self.listeners.iter().any(|listener| listener.middlebox.is_some())
    }

    /// Whether sessions pass it instead of ending here.
    pub fn is_passed(&self) -> bool {
        self.listeners.iter().any(Listener::is_passed)
    }

    /// Whether its listeners are not all a box's of one kind, or all a program's.
    pub(super) fn is_of_several_kinds(&self) -> bool {
        self.listeners.windows(2).any(|pair| pair[0].middlebox != pair[1].middlebox)
    }

    /// Its share now: nothing while it is drained or sick, and else what it is fit for.
    pub fn weight(&self) -> u32 {
        if self.is_drained { 0 } else { self.fitness.of(self.terms.weight) }
    }

    /// Why its share is nothing; `None`: it has one.
    pub fn zero_weight(&self) -> Option<ZeroWeight> {
        let Fitness { sick, percent } = &self.fitness;
        (self.weight() == 0).then(|| ZeroWeight {
            is_drained: self.is_drained,
            is_ordered: self.terms.weight == 0,
            is_loaded: sick.is_none() && *percent == 0,
            sick: sick.as_ref().map(|sick| sick.reason.clone()),
        })
    }

    /// Whether it is fenced, and this host holds it.
    pub fn is_held(&self) -> bool {
        self.terms.fenced && self.is_served && self.tenancy.may_serve()
    }

    /// Whether routers that know of it know of the other one as well.
    pub(super) fn is_told_as(&self, other: &Self) -> bool {
        self.is_served && other.is_served && self.terms == other.terms && self.has_share_of(other)
    }

    /// Whether its share is as large as that of the other one, and where it is nothing, for the same reasons. How the
    /// reason of a sickness is worded changes with each check: routers have the first one.
    pub(super) fn has_share_of(&self, other: &Self) -> bool {
        match (self.zero_weight(), other.zero_weight()) {
            (Some(own), Some(others)) => own.is_like(&others),
            _ => self.weight() == other.weight(),
        }
    }

    /// What is served: a service that has partitions with all that is under it.
    pub fn prefix(&self) -> Prefix {
        served_prefix(&self.name, &self.terms)
    }
}

impl Services {
    /// Everything that is published, by name.
    pub fn list(&self) -> Vec<Published> {
        let mut all = self.published.lock().clone();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    /// One of them.
    pub fn find(&self, name: &Name) -> Option<Published> {
        self.published.lock().iter().find(|service| service.name.prefix() == name.prefix()).cloned()
    }

    /// That by which a name is served: itself, or the service or prefix with the most bits that it is under.
    pub fn serving(&self, name: &Name) -> Option<Published> {
        let published = self.published.lock();
        let covering = published.iter().filter(|service| service.prefix().covers(&name.prefix()));
        covering.max_by_key(|service| service.prefix().bits).cloned()
    }
}
