//! What a copy of this router's tables outside the core needs: a program in the kernel that forwards as the core does,
//! say (docs/decisions/0022). It is told of changes, and asks for them in parts.

use crate::association::AssociationTable;
use crate::association::Neighbour;
use crate::machine::sal::Sal;
use crate::table::ServiceTable;
use crate::table::changes::Part;
use crate::table::{Outcome, RuleId};
use crate::types::name::Prefix;
use crate::types::time::Instant;

impl Sal {
    /// Keeps note for a copy from now on. Whatever there is counts as changed.
    pub fn follow_routes(&mut self) {
        self.table.follow();
        self.associations.follow_hop_keys();
    }

    /// Up to `max` prefixes that have changed, and what their rules say.
    pub fn take_route_changes(&mut self, max: usize) -> Part<(Prefix, Outcome)> {
        let mut part = self.table.take_changes(max);
        for (_, outcome) in &mut part.changed {
            // A copy does not say at once what it has decided by a rule.
            if matches!(outcome, Outcome::Shares(shares) if shares.iter().any(|share| self.lifetimes.counts_use(share.rule)))
            {
                *outcome = Outcome::Depends;
            }
        }
        part
    }

    /// Up to `max` neighbours whose hop key may have changed, and the keys.
    pub fn take_hop_key_changes(&mut self, max: usize) -> Part<(Neighbour, Option<[u8; 16]>)> {
        self.associations.take_hop_keys(max)
    }

    /// A rule has decided upon packets in the copy, the last of them at `last`, and does so there no more.
    pub fn note_copy_use(&mut self, rule: RuleId, packets: u64, last: Option<Instant>) {
        self.table.add_use(rule, packets, last);
    }
}

impl AssociationTable {
    pub(crate) fn has_route_news(&self, table: &ServiceTable) -> bool {
        table.has_news() || self.has_news()
    }

    pub(crate) fn take_route_news(&mut self, table: &mut ServiceTable) -> bool {
        // Both, so that one word stands for both.
        table.changes().take_news() | self.changes().take_news()
    }
}
