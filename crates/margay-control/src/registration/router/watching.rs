//! Hosts that watch prefixes hear who serves something there, whenever that changes.

use std::collections::BTreeMap;

use margay_core::name::Prefix;

use super::Guest;
use crate::registration::Instance;
use crate::registration::proto::{self, Code, from_router};
use crate::registration::refusal::{No, prefix_of};

/// Instances under one watched prefix that one message holds; and all that are told: each of a service's partitions,
/// and more.
const WATCHED_PART: usize = 400;
const WATCHED_MAX: usize = 4000;
/// Prefixes that one host watches.
const WATCHES_MAX: usize = 256;

/// What a host watches.
#[derive(Default)]
pub(super) struct Watches {
    /// What it was told last of each prefix.
    told: BTreeMap<Prefix, Option<Vec<Instance>>>,
    /// How many changes there were then.
    seen: u64,
}

impl Watches {
    pub fn is_empty(&self) -> bool {
        self.told.is_empty()
    }
}

impl Guest {
    pub(super) fn watch(&mut self, asked: &proto::Watch) -> Result<(), No> {
        let prefix = prefix_of(&asked.service_id, asked.bits)?;
        if asked.ends {
            self.watches.told.remove(&prefix);
        } else if self.watches.told.len() >= WATCHES_MAX && !self.watches.told.contains_key(&prefix) {
            return Err(No(Code::Limit, format!("a host watches {WATCHES_MAX} prefixes at most")));
        } else {
            // Told again, if it is known: the host may have lost it.
            self.watches.told.insert(prefix, None);
        }
        Ok(())
    }

    /// What has changed under the watched prefixes since the host was told.
    pub(super) fn news(&mut self) -> Vec<proto::FromRouter> {
        let roll = self.shared.roll.lock();
        let seen = std::mem::replace(&mut self.watches.seen, roll.recent().count());
        let mut news = Vec::new();
        for (prefix, told) in &mut self.watches.told {
            if told.is_some() && !roll.recent().concerns(prefix, seen) {
                continue;
            }
            let now = roll.instances_under(prefix);
            if told.as_ref() == Some(&now) {
                continue;
            }
            let all = &now[..now.len().min(WATCHED_MAX)];
            let count = all.len().div_ceil(WATCHED_PART).max(1);
            // Nobody is news, too: then there is one part, and it is empty.
            for (part, from) in (1..=count).zip((0..).step_by(WATCHED_PART)) {
                let instances = all[from..].iter().take(WATCHED_PART).cloned().map(proto::Instance::from).collect();
                let (service_id, bits) = (prefix.id.0.to_vec(), prefix.bits.into());
                let truncated = now.len() > WATCHED_MAX;
                let watched = proto::Watched { service_id, bits, instances, truncated, goes_on: part < count };
                news.push(proto::FromRouter { body: Some(from_router::Body::Watched(watched)) });
            }
            *told = Some(now);
        }
        news
    }
}
