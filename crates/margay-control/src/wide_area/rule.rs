//! The rules that lead to routers which have announced names.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use margay_core::name::Prefix;
use margay_core::table::{Action, NextHop, Rule, RuleId};
use margay_core::way::Relation;

use super::board::{Candidate, Link};
use crate::SalControl;

/// Of rules that lead to the best of them. Where instances of the same prefix are registered here, theirs are higher.
const PRIORITY_BEST: u32 = 50;
/// Of the worst; still before the way to a router above, which has 1.
const PRIORITY_LEAST: u32 = 2;
const WEIGHT_MAX: u32 = 65_535;

/// All of them.
pub struct Rules {
    sal: Arc<dyn SalControl>,
    by_prefix: BTreeMap<Prefix, BTreeMap<Link, (RuleId, Rule)>>,
    by_id: BTreeMap<RuleId, (Prefix, Link)>,
}

/// What leads to a neighbour.
pub fn rule_of(candidate: &Candidate<'_>, address: SocketAddr) -> Rule {
    let Candidate { link, neighbour, heard, rank } = candidate;
    let rank = u32::try_from(*rank).unwrap_or(u32::MAX);
    let asked = heard.announcement.weight;
    let weight = u64::from(asked) * u64::from(neighbour.weight) / 100;
    // Who asks for a share and is not put off gets one.
    let least = u32::from(asked > 0 && neighbour.weight > 0);
    let is_outer = neighbour.relation != Relation::Below;
    Rule {
        priority: PRIORITY_BEST.saturating_sub(rank).max(PRIORITY_LEAST),
        weight: u32::try_from(weight).unwrap_or(WEIGHT_MAX).clamp(least, WEIGHT_MAX),
        action: Action::Forward(NextHop { address, host: Some(link.host), router: is_outer }),
    }
}

impl Rules {
    /// None yet.
    pub fn new(sal: Arc<dyn SalControl>) -> Self {
        Self { sal, by_prefix: BTreeMap::new(), by_id: BTreeMap::new() }
    }

    /// Makes these the rules of a prefix; new ones are there before old ones go.
    pub fn set(&mut self, prefix: Prefix, wanted: BTreeMap<Link, Rule>) {
        let mut before = self.by_prefix.remove(&prefix).unwrap_or_default();
        let mut now = BTreeMap::new();
        for (link, rule) in wanted {
            if let Some(same) = before.remove(&link) {
                if same.1 == rule {
                    now.insert(link, same);
                    continue;
                }
                before.insert(link, same);
            }
            match self.sal.add_rule(prefix, rule.clone()) {
                Ok(id) => {
                    self.by_id.insert(id, (prefix, link));
                    now.insert(link, (id, rule));
                }
                Err(error) => tracing::error!(%prefix, %error, "no rule leads to a router that has announced it"),
            }
        }
        for (id, _) in before.into_values() {
            self.by_id.remove(&id);
            self.sal.remove_rule(id);
        }
        if !now.is_empty() {
            self.by_prefix.insert(prefix, now);
        }
    }

    /// What a rule was made of.
    pub fn find(&self, id: RuleId) -> Option<(Prefix, Link)> {
        self.by_id.get(&id).copied()
    }
}
