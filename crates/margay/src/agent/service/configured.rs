//! What the configuration publishes, as it changes while the agent runs.

use margay_core::name::{Name, Prefix};

use super::{Origin, Publication, PublishError, Services, is_same_place};

fn of<'a>(all: &'a [Publication], prefix: &Prefix) -> Vec<&'a Publication> {
    all.iter().filter(|publication| publication.name.prefix() == *prefix).collect()
}

/// Names of which the two say something else.
fn changed(before: &[Publication], now: &[Publication]) -> Vec<Name> {
    let mut names: Vec<Name> = Vec::new();
    for publication in before.iter().chain(now) {
        let prefix = publication.name.prefix();
        let is_known = names.iter().any(|name| name.prefix() == prefix);
        if !is_known && of(before, &prefix) != of(now, &prefix) {
            names.push(publication.name.clone());
        }
    }
    names
}

impl Services {
    /// Publishes what the configuration says now, where it said `before`. Names of which it says the same stay as they
    /// are, with a weight that an order has set since.
    ///
    /// # Errors
    ///
    /// Something of it is refused; everything is published as before then.
    pub async fn configure(&self, before: &[Publication], now: &[Publication]) -> Result<(), PublishError> {
        let names = changed(before, now);
        for Publication { name, listener, terms, .. } in names.iter().flat_map(|name| of(now, &name.prefix())) {
            self.check(name, listener, *terms)?;
        }
        for (at, name) in names.iter().enumerate() {
            if let Err(error) = self.set_configured(name, now).await {
                for name in &names[..at] {
                    if let Err(error) = self.set_configured(name, before).await {
                        tracing::error!(%name, %error, "what was published before cannot be put back");
                    }
                }
                return Err(error);
            }
        }
        self.keep()
    }

    async fn set_configured(&self, name: &Name, all: &[Publication]) -> Result<(), PublishError> {
        let own = of(all, &name.prefix());
        let found = self.find(name);
        let Some(terms) = own.last().map(|last| last.terms).or(found.as_ref().map(|found| found.terms)) else {
            return Ok(());
        };
        let is_last = |found: &super::Published| {
            own.is_empty() && found.listeners.iter().all(|listener| listener.origin == Origin::Configuration)
        };
        if let Some(found) = found.filter(is_last) {
            // The routers first: they stop sending before the listener is gone from the table.
            for acknowledged in self.retract(found.prefix()) {
                acknowledged.await;
            }
        }
        self.change_by_order(|| {
            self.change(name, terms, |listeners| {
                let is_replaced = |known: &super::Listener| own.iter().any(|new| is_same_place(known, &new.listener));
                listeners.retain(|known| known.origin != Origin::Configuration && !is_replaced(known));
                listeners.extend(own.iter().map(|new| new.listener.clone()));
            })
        })
    }
}
