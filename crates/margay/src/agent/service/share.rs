//! Shares that change while services run, as drains and checks say.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::{Published, Services};

/// A router that has not acknowledged by then is named to the operator. It is told all the same when it is there again.
const ACKNOWLEDGED_LIMIT: Duration = Duration::from_secs(1);

impl Services {
    /// Tells routers of names that are to take no new flows, as they will stand. Returns when all routers have
    /// acknowledged, or their time is over; gives the addresses of those that have not.
    pub(super) async fn tell_first(&self, ending: &[Published]) -> Vec<String> {
        for service in ending {
            self.announce(service);
        }
        let until = Instant::now() + ACKNOWLEDGED_LIMIT;
        let mut silent = BTreeSet::new();
        for service in ending {
            for home in self.homes_of(&service.name) {
                if timeout_at(until, home.answered(&service.prefix())).await.is_err() {
                    silent.insert(home.config().router_address.clone());
                }
            }
        }
        silent.into_iter().collect()
    }

    /// Makes the service table and the routers follow from what is drained, and from how fit services are.
    pub(super) fn follow_shares(&self) {
        let mut published = self.published.lock();
        // Under that lock: nobody follows an older state later.
        let drained = self.drained.lock().clone();
        let fitness = self.fitness.lock().clone();
        let mut is_changed = false;
        for service in published.iter_mut() {
            let before = service.clone();
            let prefix = before.name.prefix();
            service.is_drained = drained.has(&prefix);
            service.fitness = fitness.get(&prefix).cloned().unwrap_or_default();
            if service.has_share_of(&before) {
                continue;
            }
            is_changed = true;
            if let Err(error) = self.put_in_table(Some(&before), service) {
                tracing::warn!(name = %before.name, %error, "a new share does not show in the service table");
                *service = before;
                continue;
            }
            self.tell_routers(Some(&before), service);
        }
        drop(published);
        if is_changed {
            self.tell_router();
        }
    }
}
