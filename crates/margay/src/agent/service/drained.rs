//! Names that are drained: they take no new flows, whatever their weight, until the drain is ended.

use std::collections::BTreeSet;
use std::time::Duration;

use margay_core::name::Prefix;
use tokio::time::{Instant, timeout_at};

use super::{Published, Services};

/// A router that has not acknowledged by then is named to the operator. It is told all the same when it is there again.
const ACKNOWLEDGED_LIMIT: Duration = Duration::from_secs(1);

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
        let begun: Vec<Published> = self.list().into_iter().filter(begins).collect();
        for service in &begun {
            self.announce(&Published { is_drained: true, ..service.clone() });
        }
        let until = Instant::now() + ACKNOWLEDGED_LIMIT;
        let mut silent = BTreeSet::new();
        for service in &begun {
            for home in self.homes_of(&service.name) {
                if timeout_at(until, home.answered(&service.prefix())).await.is_err() {
                    silent.insert(home.config().router_address.clone());
                }
            }
        }
        self.follow_drained();
        silent.into_iter().collect()
    }

    /// Makes the service table and the routers follow from what is drained.
    fn follow_drained(&self) {
        let drained = self.drained.lock().clone();
        let mut published = self.published.lock();
        let differs = |service: &&mut Published| service.is_drained != drained.has(&service.name.prefix());
        for service in published.iter_mut().filter(differs) {
            let before = service.clone();
            service.is_drained = !before.is_drained;
            if let Err(error) = self.put_in_table(Some(&before), service) {
                tracing::warn!(name = %before.name, %error, "what is drained does not show in the service table");
                *service = before;
                continue;
            }
            self.tell_routers(Some(&before), service);
        }
        drop(published);
        self.tell_router();
    }
}
