//! Rules of the configuration, as they change while the agent runs.

use std::collections::BTreeSet;

use margay_core::name::Name;

use super::rule::{Rule, Source};
use super::{Active, Followed, executable_of};
use crate::config::Config;

/// What a configuration says of sockets that no address names.
pub fn rules(config: &Config) -> Vec<Rule> {
    config.service.iter().filter_map(|section| section.get_ref().rule()).collect()
}

fn changed(before: &[Rule], now: &[Rule]) -> BTreeSet<Name> {
    let of = |all: &[Rule], name: &Name| -> Vec<Rule> {
        all.iter().filter(|rule| rule.offer.name == *name).cloned().collect()
    };
    let names = before.iter().chain(now).map(|rule| &rule.offer.name);
    names.filter(|name| of(before, name) != of(now, name)).cloned().collect()
}

impl Active {
    /// Serves names by what the configuration says now, where it said `before`. Where nothing follows sockets, nothing
    /// changes.
    ///
    /// # Errors
    ///
    /// More ports are named than the kernel reports; all is as before then.
    pub fn configure(&self, before: &[Rule], now: &[Rule]) -> Result<(), String> {
        let Ok(followed) = &self.0 else { return Ok(()) };
        followed.lock().configure(before, now)
    }
}

impl Followed {
    fn configure(&mut self, before: &[Rule], now: &[Rule]) -> Result<(), String> {
        let names = changed(before, now);
        if names.is_empty() {
            return Ok(());
        }
        let former = self.rules.clone();
        // Of a name that says the same, an order may have set the weight.
        self.rules.retain(|rule| !names.contains(&rule.offer.name));
        self.rules.extend(now.iter().filter(|rule| names.contains(&rule.offer.name)).cloned());
        if let Err(why) = self.watch_ports() {
            self.rules = former;
            return self.watch_ports().and(Err(why));
        }
        if self.rules.iter().any(|rule| matches!(rule.source, Source::Host(Some(_)))) {
            let unknown = |seen: &&mut super::Seen| seen.elsewhere.is_none() && seen.executable.is_none();
            for seen in self.sockets.values_mut().filter(unknown) {
                seen.executable = executable_of(seen.protocol, seen.address);
            }
        }
        self.tell(names);
        // Datagram sockets on ports that nobody had named are there already.
        self.look();
        Ok(())
    }
}
