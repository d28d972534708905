//! Why the service table would decide as it would: every rule that covers a name, and what becomes of it in the choice.
//! Nothing is sent and nothing is counted.

use alloc::vec::Vec;

use crate::machine::sal::Sal;
use crate::resolve::segment::SEGMENT;
use crate::resolve::way::{Sender, WayOn};
use crate::table::{Action, Allow, AllowItem, NextHop, Rule, RuleId};
use crate::types::config::Config;
use crate::types::key::HostId;
use crate::types::name::{Prefix, ServiceId};

/// A first packet that nobody sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The name.
    pub service: ServiceId,
    /// IP protocol 6 or 17.
    pub protocol: u8,
    /// The port of the service; [`crate::table::SERVICE_PORT`] means whatever port its instances listen on.
    pub port: u16,
    /// By what instances are picked: the same on every hop.
    pub sticky: u64,
    /// Who it comes from.
    pub sender: Sender,
}

/// Why a rule cannot take a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// Its weight is zero.
    NoWeight,
    /// Its listener is for the other protocol.
    Protocol,
    /// Its listener is for another port.
    Port,
    /// It leads elsewhere, the packet comes from elsewhere, and this host is no router; or it asks the segment.
    NotForOthers,
    /// It leads to a router above or beside this one, and the packet comes from one.
    Inward,
    /// It leads to where the packet comes from.
    Back,
    /// It makes copies, and the packet comes from a router: whoever is first on the way makes them.
    Copies,
    /// Its resolver had no answer just now.
    Unanswered,
}

/// What becomes of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It decides. Of those that forward to all there may be several.
    Chosen,
    /// It might have: the weights gave this packet to another rule of its priority.
    NotPicked,
    /// A higher priority of its prefix decides.
    Outranked,
    /// A longer prefix decides.
    Shorter,
    /// It cannot take the packet.
    Unusable(Unusable),
}

/// A rule that covers a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Considered<'a> {
    /// Of which it is.
    pub prefix: Prefix,
    /// Its number.
    pub id: RuleId,
    /// What it says.
    pub rule: &'a Rule,
    /// What becomes of it.
    pub verdict: Verdict,
}

impl Sal {
    /// Every rule that covers the name, in the order in which they are asked, and what becomes of it.
    pub fn explain(&self, probe: &Probe) -> Vec<Considered<'_>> {
        let Probe { service, protocol, port, sticky, sender } = *probe;
        let chosen = self.pick(&service, sticky, protocol, port, sender).rule();
        let beside = chosen.map_or_else(Vec::new, |chosen| self.beside(chosen, sender));
        let gets_copy = |id: RuleId| beside.iter().any(|(beside, _)| *beside == id);
        let way = self.way_on(sender);
        let mut considered = Vec::new();
        // Where the choice was made, once the walk has come there.
        let mut decided: Option<(Prefix, u32)> = None;
        for (prefix, set) in self.table.covering_sets(service) {
            let priority = set.iter().find(|(id, _)| Some(*id) == chosen).map(|(_, rule)| rule.priority);
            decided = decided.or(priority.map(|priority| (prefix, priority)));
            for (id, rule) in set.iter() {
                let no_weight = (rule.weight == 0).then_some(Unusable::NoWeight);
                let unusable = no_weight.or_else(|| self.config.unusable(rule, protocol, port, way));
                let has_failed = self.has_failed(&service, rule) && Some(id) != chosen;
                let unusable = unusable.or(has_failed.then_some(Unusable::Unanswered));
                let verdict = match (unusable, decided) {
                    (Some(why), _) => Verdict::Unusable(why),
                    (None, _) if Some(id) == chosen || gets_copy(id) => Verdict::Chosen,
                    (None, Some((at, _))) if at != prefix => Verdict::Shorter,
                    (None, Some((_, priority))) if priority != rule.priority => Verdict::Outranked,
                    (None, _) => Verdict::NotPicked,
                };
                considered.push(Considered { prefix, id, rule, verdict });
            }
        }
        considered
    }

    /// Whether what is sent on to a next hop is tagged there, so that answers find back through this router.
    pub fn is_hop_known(&self, hop: &NextHop) -> bool {
        self.associations.hop_key_to(hop.host, hop.address).is_some()
    }

    /// Whether a host may connect to a listener; `None` where that depends on what it will show when they meet.
    pub fn may_connect(&self, host: HostId, service: &ServiceId, allow: &Allow) -> Option<bool> {
        let unix_s = self.unix_s();
        if let Some(association) = self.associations.by_host(host)
            && (association.is_self() || self.has_shown_enough(association, (service, allow), unix_s))
        {
            return Some(self.is_allowed(association.local_id, service, allow));
        }
        match allow {
            Allow::Any => Some(true),
            Allow::Authority => None,
            Allow::List(items) if items.contains(&AllowItem::Host(host)) => Some(true),
            Allow::List(items) if items.iter().all(|item| matches!(item, AllowItem::Host(_))) => Some(false),
            Allow::List(_) => None,
        }
    }
}

impl Config {
    /// Why a rule cannot take a packet; `None`: it can, if it has a weight.
    pub(crate) fn unusable(&self, rule: &Rule, protocol: u8, port: u16, way: WayOn) -> Option<Unusable> {
        match &rule.action {
            Action::Demux(demux) if demux.protocol.is_some_and(|wanted| wanted != protocol) => Some(Unusable::Protocol),
            Action::Demux(demux) if !demux.answers(port) => Some(Unusable::Port),
            Action::Forward(_) | Action::ForwardAll(_) => self.cannot_forward(rule, way),
            Action::Delay(_) if way.sender != Sender::Own && !self.router => Some(Unusable::NotForOthers),
            Action::Demux(_) | Action::Box(_) | Action::Delay(_) | Action::Drop => None,
        }
    }

    /// The same for one that leads to another host.
    pub(crate) fn cannot_forward(&self, rule: &Rule, way: WayOn) -> Option<Unusable> {
        let hop = rule.action.next_hop()?;
        // What others ask for on a segment is passed on by relays, whatever the table says.
        if way.sender != Sender::Own && (!self.router || hop.address == SEGMENT) {
            return Some(Unusable::NotForOthers);
        }
        if way.is_back(hop.address) {
            return Some(Unusable::Back);
        }
        let makes_copies = matches!(rule.action, Action::ForwardAll(_)) && matches!(way.sender, Sender::Router(_));
        let why = makes_copies.then_some(Unusable::Copies);
        why.or((hop.router && way.is_inward()).then_some(Unusable::Inward))
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use core::net::SocketAddr;

    use proptest::prelude::*;

    use super::*;
    use crate::resolve::delay::Question;
    use crate::resolve::forward_all::COPIES_MAX;
    use crate::table::resolver::ResolverId;
    use crate::table::{Demux, HAND_OVER_PORT, SERVICE_PORT};
    use crate::types::config::{Config, Limits};
    use crate::types::fair_table::Peer;
    use crate::types::key::HostSecret;
    use crate::types::rng::Rng;
    use crate::types::time::Instant;

    fn sal(router: bool) -> Sal {
        let config = Config {
            host_key: HostSecret::generate(&mut Rng::new([1; 32])),
            epoch: 1,
            boot_id: [1; 16],
            router,
            datagram_max: 1400,
            local_addresses: Vec::new(),
            ranges: crate::Ranges::USUAL,
            limits: Limits::default(),
        };
        Sal::new(config, Instant::ZERO, 0, [2; 32])
    }

    fn action() -> impl Strategy<Value = Action> {
        let port = prop_oneof![Just(None), Just(Some(80)), Just(Some(443)), Just(Some(HAND_OVER_PORT))];
        let protocol = prop_oneof![Just(None), Just(Some(6)), Just(Some(17))];
        let demux = (port, protocol).prop_map(|(service_port, protocol)| {
            let listener = SocketAddr::new([0, 0, 0, 0].into(), 80);
            Action::Demux(Demux {
                listener,
                other_family: None,
                is_looked_up: false,
                service_port,
                protocol,
                allow: Allow::Any,
            })
        });
        let forward = (any::<u8>(), any::<bool>()).prop_map(|(n, all)| {
            let address = SocketAddr::new([10, 0, 0, n].into(), 1);
            let hop = NextHop { address, host: None, router: n % 2 == 0 };
            if all { Action::ForwardAll(hop) } else { Action::Forward(hop) }
        });
        let delay = (0_u32..2).prop_map(|resolver| Action::Delay(ResolverId(resolver)));
        prop_oneof![2 => forward, 2 => demux, 1 => Just(Action::Drop), 1 => delay]
    }

    fn sender() -> impl Strategy<Value = Sender> {
        let router = any::<u8>().prop_map(|n| Sender::Router(SocketAddr::new([10, 0, 0, n].into(), 1)));
        prop_oneof![Just(Sender::Own), Just(Sender::Host), router]
    }

    fn rules() -> impl Strategy<Value = Vec<(u16, Rule)>> {
        let bits = prop_oneof![Just(0), Just(64), Just(96), Just(256)];
        let rule =
            (0_u32..3, 0_u32..3, action()).prop_map(|(priority, weight, action)| Rule { priority, weight, action });
        proptest::collection::vec((bits, rule), 0..24)
    }

    proptest! {
        /// What is explained is what happens; and of the others each has the reason that a reader would find.
        #[test]
        fn the_explanation_is_the_decision(
            all in rules(),
            router: bool,
            sender in sender(),
            beside: bool,
            udp: bool,
            port in prop_oneof![Just(80), Just(9), Just(SERVICE_PORT), Just(HAND_OVER_PORT)],
            sticky: u64,
            has_failed: bool,
        ) {
            let mut sal = sal(router);
            let peer = HostSecret::generate(&mut Rng::new([3; 32])).public();
            if let Sender::Router(remote) = sender {
                sal.install_association(Instant::ZERO, crate::AssociationSetup {
                    host_key: peer.0, key: [1; 32], local_id: 1, remote_id: 1, peer_epoch: 1, boot_id: None, remote,
                    hop_key: None, router: true, initiator: false,
                });
                sal.set_relation(peer.id(), beside.then_some(crate::resolve::way::Relation::Beside));
            }
            let service = ServiceId([0x5a; 32]);
            for (bits, rule) in all {
                sal.add_rule(Instant::ZERO, Prefix::new(service, bits), rule).expect("room");
            }
            // Of another name.
            sal.add_rule(Instant::ZERO, ServiceId([1; 32]).into(), Rule { priority: 9, weight: 1, action: Action::Drop }).expect("room");
            if has_failed {
                let question = Question { service, resolver: ResolverId(0) };
                sal.delays.note_failure(Instant::ZERO, Peer::Own, question);
            }
            let protocol = if udp { 17 } else { 6 };
            let probe = Probe { service, protocol, port, sticky, sender };
            let explained = sal.explain(&probe);
            prop_assert_eq!(explained.len(), sal.rules().count() - 1);
            let order: Vec<_> = explained.iter().map(|one| (one.prefix.bits, one.rule.priority)).collect();
            prop_assert!(order.is_sorted_by(|one, next| one >= next), "{order:?}");
            let chosen: Vec<_> = explained.iter().filter(|one| one.verdict == Verdict::Chosen).collect();
            let picked = sal.pick(&service, sticky, protocol, port, sender).rule();
            prop_assert!(picked.is_none_or(|picked| chosen.iter().any(|one| one.id == picked)));
            let is_for_all = |one: &&Considered<'_>| matches!(one.rule.action, Action::ForwardAll(_));
            let most = match picked.and_then(|picked| chosen.iter().find(|one| one.id == picked)) {
                None => 0,
                Some(one) => if is_for_all(one) { COPIES_MAX } else { 1 },
            };
            prop_assert!(chosen.len() <= most && (chosen.len() < 2 || chosen.iter().all(is_for_all)));
            for pair in chosen.windows(2) {
                prop_assert_eq!((pair[0].prefix, pair[0].rule.priority), (pair[1].prefix, pair[1].rule.priority));
            }
            for one in &explained {
                let is_unusable = matches!(one.verdict, Verdict::Unusable(_));
                let Some(winner) = chosen.first() else { prop_assert!(is_unusable, "{one:?} was not taken"); continue };
                match one.verdict {
                    Verdict::Chosen | Verdict::Unusable(_) => {}
                    Verdict::NotPicked => prop_assert_eq!((one.prefix, one.rule.priority), (winner.prefix, winner.rule.priority)),
                    Verdict::Outranked => prop_assert!(one.prefix == winner.prefix && one.rule.priority < winner.rule.priority),
                    Verdict::Shorter => prop_assert!(one.prefix.bits < winner.prefix.bits),
                }
            }
            prop_assert!(sal.rules().all(|(_, id, _)| sal.rule_usage(id).is_some_and(|usage| usage.packets == 0)));
        }
    }

    #[test]
    fn who_may_connect_is_said_where_it_can_be_known() {
        let sal = sal(false);
        let (service, own, other) = (ServiceId::default(), sal.host(), HostId([9; 16]));
        let list = |item: AllowItem| Allow::List(vec![item]);
        assert_eq!(
            sal.may_connect(own, &service, &list(AllowItem::Host(other))),
            Some(true),
            "a host may reach itself"
        );
        assert_eq!(sal.may_connect(other, &service, &Allow::Any), Some(true));
        assert_eq!(sal.may_connect(other, &service, &Allow::Authority), None);
        assert_eq!(sal.may_connect(other, &service, &list(AllowItem::Host(other))), Some(true));
        assert_eq!(sal.may_connect(other, &service, &list(AllowItem::Host(HostId([8; 16])))), Some(false));
        assert_eq!(sal.may_connect(other, &service, &list(AllowItem::Group(1))), None);
    }
}
