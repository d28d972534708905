//! Names that are drained: they take no new flows, whatever their weight, until the drain is ended.

use std::collections::BTreeSet;

use margay_core::name::Prefix;

use super::{Published, Services};

/// What is drained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// All names, those that are published later among them.
    pub host: bool,
    /// These, besides, as [`Name::prefix`](margay_core::name::Name::prefix) gives them.
    pub names: BTreeSet<Prefix>,
}

impl Drained {
    /// Whether a name takes no new flows.
    pub fn has(&self, prefix: &Prefix) -> bool {
        self.host || self.names.contains(prefix)
    }
}

impl Services {
    /// Sets what is drained before anything is published: what an earlier start of the agent has begun.
    pub fn restore_drained(&self, drained: Drained) {
        *self.drained.lock() = drained;
    }

    /// Sets what is drained. Routers are told of names that are drained now before the service table, so that what they
    /// have sent on until then is served. Gives the addresses of the routers that have not acknowledged in time.
    pub async fn set_drained(&self, drained: Drained) -> Vec<String> {
        *self.drained.lock() = drained.clone();
        let begins =
            |service: &Published| service.is_served && !service.is_drained && drained.has(&service.name.prefix());
        let begun = self.list().into_iter().filter(begins).map(|service| Published { is_drained: true, ..service });
        let silent = self.tell_first(&begun.collect::<Vec<_>>()).await;
        self.follow_shares();
        silent
    }
}
