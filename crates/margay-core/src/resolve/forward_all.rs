//! FORWARD to all: a first packet goes to every next hop of a priority, and whoever answers first has the connection
//! (DESIGN §8; Serval §3.1).
//!
//! A copy says that it is one: who does not serve the name keeps silent, since its refusal would come before another's
//! answer. Only the first host on the way makes copies, be it the client's or a router, so that routers that copy to
//! each other cannot multiply them.

use alloc::vec::Vec;
use core::net::SocketAddr;

use margay_wire::{FLAGS_OFFSET, Flags, Kind, ResolvableRepr};

use crate::machine::sal::Sal;
use crate::resolve::way::Sender;
use crate::table::{NextHop, RuleId};
use crate::types::drop_reason::DropReason;
use crate::types::time::Instant;

/// A packet is copied to so many at the most.
pub const COPIES_MAX: usize = 8;

impl Sal {
    /// Who gets a copy of what goes by a rule, beside its own next hop.
    pub(crate) fn beside(&self, rule: RuleId, sender: Sender) -> Vec<(RuleId, NextHop)> {
        let way = self.way_on(sender);
        let usable = self.table.beside(rule).filter(|(_, rule)| self.config.cannot_forward(rule, way).is_none());
        usable.filter_map(|(id, rule)| Some((id, *rule.action.next_hop()?))).take(COPIES_MAX - 1).collect()
    }

    /// A program's first packet goes by a rule; gives who gets a copy.
    pub(crate) fn note_own(&mut self, rule: RuleId) -> Vec<SocketAddr> {
        let beside = self.beside(rule, Sender::Own);
        self.table.note_use(self.now, rule);
        beside.iter().for_each(|(rule, _)| self.table.note_use(self.now, *rule));
        beside.into_iter().map(|(_, hop)| hop.address).collect()
    }

    /// Sends a SYN of another host to several.
    pub(crate) fn forward_all(
        &mut self,
        now: Instant,
        from: SocketAddr,
        resolvable: &ResolvableRepr,
        datagram: &[u8],
        hops: &[(RuleId, NextHop)],
    ) -> Result<(), DropReason> {
        let mut copy = datagram.to_vec();
        *copy.get_mut(FLAGS_OFFSET).ok_or(DropReason::Malformed)? |= Flags::COPIED.bits();
        for (rule, hop) in hops {
            self.table.note_use(now, *rule);
            self.forward(from, resolvable, &copy, Kind::Syn, hop.address, hop.host)?;
        }
        Ok(())
    }
}
