//! Which names the sockets that listen serve, and why some do not.

use std::collections::BTreeSet;

use margay_control::registration::Terms;
use margay_core::name::{Name, Prefix};
use margay_datapath::active_sockets::OwnerId;

use super::bound::Bound;
use super::rule::{Rule, Seen, Source};
use super::{Followed, Owner};

/// A name that waits for a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The name.
    pub name: Name,
    /// Whose socket.
    pub program: String,
    /// Why it is not served although there is one; empty while there is none.
    pub why: String,
}

impl Followed {
    /// Every rule.
    fn all_rules(&self) -> impl Iterator<Item = Rule> {
        let of_owner = |(id, owner): (&OwnerId, &Owner)| {
            let id = *id;
            let offers = owner.program.offers.clone();
            offers.into_iter().map(move |offer| Rule { source: Source::Owner(id), offer })
        };
        let of_sockets = self.bound.values().map(Bound::rule);
        self.rules.iter().cloned().chain(self.owners.iter().flat_map(of_owner)).chain(of_sockets)
    }

    /// Those of a prefix. Nothing of the others is copied: a program that dies may leave thousands.
    fn rules_of(&self, prefix: &Prefix) -> Vec<Rule> {
        let of_owners =
            self.owners.iter().flat_map(|(id, owner)| owner.program.offers.iter().map(|offer| (*id, offer)));
        let of_owners = of_owners.filter(|(_, offer)| offer.name.prefix() == *prefix);
        let of_host = self.rules.iter().filter(|rule| rule.offer.name.prefix() == *prefix).cloned();
        let of_sockets = self.bound.values().filter(|bound| bound.name.prefix() == *prefix).map(Bound::rule);
        let of_owners = of_owners.map(|(id, offer)| Rule { source: Source::Owner(id), offer: offer.clone() });
        of_host.chain(of_owners).chain(of_sockets).collect()
    }

    /// Names that a socket may serve.
    pub(super) fn names_of(&self, socket: &Seen) -> Vec<Name> {
        let owner = socket.owner.and_then(|owner| self.owners.get(&owner));
        let of_owner = owner.into_iter().flat_map(|owner| &owner.program.offers);
        let of_host = self.rules.iter().filter(|_| socket.elsewhere.is_none()).map(|rule| &rule.offer);
        let of_itself = self.bound.get(&socket.cookie).map(|bound| bound.name.clone());
        of_owner.chain(of_host).map(|offer| offer.name.clone()).chain(of_itself).collect()
    }

    /// Serves these names by what listens now.
    pub(super) fn tell(&mut self, names: BTreeSet<Name>) {
        for name in names {
            let prefix = name.prefix();
            let mut listeners = Vec::new();
            let mut terms = Terms::default();
            let mut out_of_reach = None;
            for rule in self.rules_of(&prefix) {
                out_of_reach = out_of_reach.or_else(|| rule.out_of_reach(self.sockets.values()));
                // Several programs of one name: the last word counts.
                terms = rule.offer.terms();
                for listener in rule.listeners(self.sockets.values()) {
                    if !listeners.contains(&listener) {
                        listeners.push(listener);
                    }
                }
            }
            match self.services.follow(&name, &listeners, terms) {
                Ok(is_changed) => {
                    if is_changed {
                        tracing::info!(%name, listeners = listeners.len(), "served by what listens");
                    }
                    let why = out_of_reach.filter(|_| listeners.is_empty());
                    if let Some(why) = &why {
                        tracing::warn!(%name, why, "a program listens, and its name cannot be served");
                    }
                    match why {
                        Some(why) => self.problems.insert(prefix, why),
                        None => self.problems.remove(&prefix),
                    };
                }
                Err(error) => {
                    tracing::warn!(%name, %error, "a program listens, and its name cannot be served");
                    self.problems.insert(prefix, error.to_string());
                }
            }
        }
    }

    pub(super) fn waiting(&self) -> Vec<Waiting> {
        let program_of = |source: &Source| match source {
            Source::Owner(id) => self.owners.get(id).map(|owner| owner.program.command.clone()).unwrap_or_default(),
            Source::Host(Some(path)) => path.display().to_string(),
            Source::Host(None) => "any".to_owned(),
            Source::Socket(cookie) => self.bound.get(cookie).map(|bound| bound.program.clone()).unwrap_or_default(),
        };
        let mut waiting = Vec::new();
        for rule in self.all_rules() {
            let why = self.problems.get(&rule.offer.name.prefix()).cloned().unwrap_or_default();
            if !why.is_empty() || rule.listeners(self.sockets.values()).is_empty() {
                waiting.push(Waiting { name: rule.offer.name, program: program_of(&rule.source), why });
            }
        }
        waiting
    }
}
