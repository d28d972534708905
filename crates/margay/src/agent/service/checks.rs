//! How services that are published by order are checked, as the order says.

use std::collections::BTreeMap;

use margay_core::name::{Name, Prefix};

use super::{Listener, Origin, Services};
use crate::agent::health::spec::{HealthSection, LoadSection};

/// How an agent finds out whether a service of its own is well, and how loaded it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checks {
    /// Whether it is well.
    pub health: Option<HealthSection>,
    /// How much of its weight it asks for.
    pub load: Option<LoadSection>,
}

impl Checks {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.health.is_none() && self.load.is_none()
    }
}

impl Services {
    /// What orders say of a name.
    pub(super) fn checks_of(&self, name: &Name) -> Checks {
        self.checks.lock().get(&name.prefix()).map(|(_, checks)| checks.clone()).unwrap_or_default()
    }

    /// What orders say of all names that they have something to say of.
    pub fn ordered_checks(&self) -> BTreeMap<Prefix, (Name, Checks)> {
        self.checks.lock().clone()
    }

    /// Sets what the last order of a name says.
    pub(super) fn set_checks(&self, name: &Name, checks: Checks) {
        if checks.is_empty() {
            self.checks.lock().remove(&name.prefix());
        } else {
            self.checks.lock().insert(name.prefix(), (name.clone(), checks));
        }
        self.tell_router();
    }

    /// Checks end with the last listener that an order has brought.
    pub(super) fn forget_checks(&self, name: &Name) {
        let is_ordered = |listener: &Listener| listener.origin == Origin::Order;
        if !self.find(name).is_some_and(|found| found.listeners.iter().any(is_ordered)) {
            self.checks.lock().remove(&name.prefix());
            self.tell_router();
        }
    }
}
