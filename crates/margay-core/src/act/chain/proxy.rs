//! Proxies: boxes that end TCP connections (docs/decisions/0077). A proxy is a listener that is given the session; what
//! it connects to is a session of its own, which goes through the rest of the chain.

use alloc::vec::Vec;

use margay_wire::{BoxFlags, BoxRepr, SessionRepr};

use super::proof::ahead;
use super::{BoxWanted, ChainRule, Chained, Place, service_of};
use crate::machine::sal::Sal;
use crate::table::Action;
use crate::table::middlebox::{BoxKind, Middlebox};
use crate::types::key::HostId;
use crate::types::name::ServiceId;

const TCP: u8 = 6;

impl Sal {
    /// The box of this host that has a name, whether it takes new sessions or not.
    pub(super) fn box_here(&self, service: &ServiceId) -> Option<&Middlebox> {
        self.rules_covering(*service).find_map(|(_, _, rule)| match &rule.action {
            Action::Box(middlebox) => Some(middlebox),
            _ => None,
        })
    }

    fn has_proxy(&self, service: &ServiceId) -> bool {
        self.box_here(service).is_some_and(|known| matches!(known.kind, BoxKind::Proxy(_)))
    }

    /// The boxes that a session from this host goes through: those after the last proxy of the rule that this host is,
    /// since sessions that came to that one have passed the others; and none after the next proxy, whose own sessions
    /// go through the rest. The proxy of this host is the first one, already passed: its certificate shows who begins
    /// the session.
    pub(super) fn boxes_from_here(&self, rule: &ChainRule) -> Vec<BoxRepr> {
        let is_own = |one: &BoxWanted| one.is_proxy && self.has_proxy(&one.service);
        let own = rule.boxes.iter().rposition(is_own);
        let rest = &rule.boxes[own.map_or(0, |at| at + 1)..];
        let until = rest.iter().position(|one| one.is_proxy).map_or(rest.len(), |at| at + 1);
        let passed = own.map(|at| BoxRepr { flags: BoxFlags::PASSED, ..ahead(&rule.boxes[at]) });
        passed.into_iter().chain(rest[..until].iter().map(ahead)).collect()
    }

    /// Where a session is that has come to box `at` here, and whether the box is of another kind than the chain says.
    pub(super) fn place_at_box(&self, at: usize, boxes: &[BoxRepr], session: &SessionRepr) -> (Place, bool) {
        let is_said_to_end = boxes[at].flags.contains(BoxFlags::ENDS);
        let ends = self.has_proxy(&service_of(&boxes[at]));
        let is_other_kind = is_said_to_end != ends || ends && session.protocol != TCP;
        (if ends && !is_other_kind { Place::Proxy { at } } else { Place::Left { at } }, is_other_kind)
    }
}

impl Chained {
    /// All boxes of a session that ends here, and the hosts of those that it has passed: a proxy of this host, `own`,
    /// is the last one.
    pub(super) fn passed_at_end(&self, own: HostId) -> (Vec<BoxRepr>, Vec<HostId>) {
        let mut boxes = self.boxes.clone();
        let mut hosts = self.hosts.clone();
        if let Place::Proxy { at } = self.place
            && let Some(proxy) = boxes.get_mut(at).filter(|proxy| proxy.is_ahead())
        {
            proxy.flags |= BoxFlags::PASSED;
            hosts.push(own);
        }
        (boxes, hosts)
    }
}
