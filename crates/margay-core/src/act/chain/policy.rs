//! Which sessions go through which boxes, and which services demand it.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::RangeInclusive;

use margay_wire::BOXES_MAX;

use super::filter::Filter;
use crate::session::flow::Flow;
use crate::types::key::HostId;
use crate::types::name::{Prefix, SERVICE_BITS, ServiceId};

/// Rules of one authority, its requirements, and its names whose rules count no longer: so many of each.
pub const CHAIN_RULES_MAX: usize = 1024;
const TCP: u8 = 6;

/// Whose sessions a rule is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    /// This host's.
    Host(HostId),
    /// Those of members of an authority in this group, as [`crate::types::name::group_number`] counts them.
    Group {
        /// The authority's block.
        authority: [u8; 8],
        /// The group.
        group: u32,
    },
}

/// A box that a rule names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoxWanted {
    /// As the operator writes it.
    pub name: String,
    /// Its name, which has no tail.
    pub service: ServiceId,
    /// Where nobody serves it, sessions go on without it; otherwise they are refused.
    pub may_be_left_out: bool,
    /// It ends TCP connections; the boxes after it are passed by the sessions that it begins.
    pub is_proxy: bool,
}

/// Sessions that go through boxes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainRule {
    /// What the operator calls it.
    pub name: String,
    /// Sessions to these names.
    pub services: Prefix,
    /// IP protocol 6 or 17; `None`: both.
    pub protocol: Option<u8>,
    /// Ports of the service; `None`: all.
    pub ports: Option<RangeInclusive<u16>>,
    /// Whose sessions; empty: everybody's.
    pub clients: Vec<Client>,
    /// What their first packets look like; `None`: anyhow.
    pub filter: Option<Filter>,
    /// The boxes in order, at most [`BOXES_MAX`]; none: such sessions go through no boxes, whatever later rules say.
    pub boxes: Vec<BoxWanted>,
    /// Order is kept while their boxes are changed, or a proxy leaves them.
    pub is_ordered: bool,
    /// What hosts of boxes may add behind their own; with `boxes` at most [`BOXES_MAX`], and none of them.
    pub may_add: Vec<BoxWanted>,
}

/// A service that takes only sessions that have passed some boxes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The names.
    pub services: Prefix,
    /// The boxes, in any order.
    pub boxes: Vec<ServiceId>,
}

/// What decides over chains. The first rule that matches counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChainPolicy {
    /// In order.
    pub rules: Vec<ChainRule>,
    /// In no order.
    pub required: Vec<Requirement>,
    /// Names whose rules were signed once, and count no longer: sessions to them are refused until others do. Whoever
    /// has somebody's signature run out shall not get past the middleboxes that it demanded.
    pub lapsed: Vec<Prefix>,
}

/// Why a policy is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// Too many rules.
    #[error("the policy has {0} rules of chains; at most {CHAIN_RULES_MAX} are allowed")]
    Rules(usize),
    /// Too many boxes.
    #[error("chain `{rule}` has {count} boxes, with those that may be added; at most {BOXES_MAX} are allowed")]
    Boxes {
        /// The rule.
        rule: String,
        /// How many boxes it names.
        count: usize,
    },
    /// A box twice.
    #[error("chain `{rule}` names box {number} twice; a session passes a box once")]
    Twice {
        /// The rule.
        rule: String,
        /// Which box of it, from 1.
        number: usize,
    },
    /// Not the name of a service.
    #[error("box {number} of chain `{rule}` has a name that is no service's; write service.authority")]
    NoService {
        /// The rule.
        rule: String,
        /// Which box of it, from 1.
        number: usize,
    },
    /// A session to a box would go through that box.
    #[error("box {number} of chain `{rule}` is one of the services whose sessions the chain is for; that is a loop")]
    Loop {
        /// The rule.
        rule: String,
        /// Which box of it, from 1.
        number: usize,
    },
    /// A proxy in a chain that is not for TCP alone.
    #[error("chain `{rule}` has the proxy {name}, which ends TCP connections; say protocol = \"tcp\"")]
    ProxyProtocol {
        /// The rule.
        rule: String,
        /// The proxy, as the operator writes it.
        name: String,
    },
    /// A proxy that may be left out, and with it all boxes after it.
    #[error(
        "chain `{rule}` has the proxy {name}, which is never left out, since boxes after it would be, too; leave out \
         missing = \"bypass\""
    )]
    ProxyLeftOut {
        /// The rule.
        rule: String,
        /// The proxy, as the operator writes it.
        name: String,
    },
    /// Boxes that nobody could add.
    #[error(
        "chain `{0}` says which boxes may be added, and has no box whose host could add one; name that one in `through`"
    )]
    NobodyAdds(String),
    /// An earlier rule has all sessions of a later one.
    #[error("chain `{rule}` decides over nothing: chain `{earlier}` before it is for all of its sessions")]
    Shadowed {
        /// The later rule.
        rule: String,
        /// The earlier one.
        earlier: String,
    },
    /// No ports.
    #[error("chain `{0}` is for no port: the first port is greater than the last one")]
    Ports(String),
    /// A requirement that no session can meet.
    #[error("a service requires {0} boxes; write 1 to {BOXES_MAX}, each the name of a service")]
    Requirement(usize),
}

/// A session, as rules see it.
#[derive(Clone, Copy, Debug)]
pub struct SessionHeader<'a> {
    /// The name that it is for.
    pub service: &'a ServiceId,
    /// IP protocol 6 or 17.
    pub protocol: u8,
    /// The port of the service.
    pub port: u16,
    /// The first agent's host.
    pub host: HostId,
    /// The authorities that it belongs to, and its groups there.
    pub groups: &'a [([u8; 8], Vec<u32>)],
    /// Its first packet, from the IP header on, with the addresses that boxes are to see.
    pub packet: &'a [u8],
}

/// Whether a name is a service's, without key or partition.
fn is_service(service: &ServiceId) -> bool {
    service.tail().iter().all(|byte| *byte == 0) && service.authority() != [0; 8]
}

impl ChainRule {
    /// Whether a session is one of the rule's.
    pub fn matches(&self, session: &SessionHeader<'_>) -> bool {
        self.may_match(session) && self.filter.as_ref().is_none_or(|filter| filter.program.matches(session.packet))
    }

    /// Whether a session may be one of the rule's, as far as hosts behind the first one can tell: these have not seen
    /// its first packet as it was when the rule was chosen.
    fn may_match(&self, session: &SessionHeader<'_>) -> bool {
        let is_client = |client: &Client| match client {
            Client::Host(host) => session.host == *host,
            Client::Group { authority, group } => {
                session.groups.iter().any(|(of, groups)| of == authority && groups.contains(group))
            }
        };
        self.services.contains(session.service)
            && self.protocol.is_none_or(|protocol| protocol == session.protocol)
            && self.ports.as_ref().is_none_or(|ports| ports.contains(&session.port))
            && (self.clients.is_empty() || self.clients.iter().any(is_client))
    }

    /// Whether a session of the rule can have begun with these boxes: all, or those up to a proxy, or those from one
    /// on.
    fn can_begin_with(&self, boxes: &[ServiceId]) -> bool {
        self.boxes.windows(boxes.len().max(1)).any(|some| some.iter().map(|one| &one.service).eq(boxes))
    }

    /// The boxes, and those that may be added.
    fn all_boxes(&self) -> impl Iterator<Item = &BoxWanted> {
        self.boxes.iter().chain(&self.may_add)
    }

    /// Whether each session of another rule is one of this rule, too.
    fn has_all_of(&self, other: &Self) -> bool {
        let has_ports = self.ports.as_ref().is_none_or(|own| {
            other.ports.as_ref().is_some_and(|ports| own.contains(ports.start()) && own.contains(ports.end()))
        });
        let has_clients = self.clients.is_empty()
            || !other.clients.is_empty() && other.clients.iter().all(|client| self.clients.contains(client));
        self.services.covers(&other.services)
            && (self.protocol.is_none() || self.protocol == other.protocol)
            && has_ports
            && has_clients
            && self.has_filtered_of(other)
    }

    /// Whether the filter lets through all that the other rule's does, as far as that can be told.
    fn has_filtered_of(&self, other: &Self) -> bool {
        let Some(own) = &self.filter else { return true };
        other.filter.as_ref().is_some_and(|other| other.program == own.program)
    }

    fn check(&self) -> Result<(), PolicyError> {
        let rule = || self.name.clone();
        let count = self.all_boxes().count();
        if count > BOXES_MAX {
            return Err(PolicyError::Boxes { rule: rule(), count });
        }
        if self.boxes.is_empty() && !self.may_add.is_empty() {
            return Err(PolicyError::NobodyAdds(rule()));
        }
        if self.ports.as_ref().is_some_and(RangeInclusive::is_empty) {
            return Err(PolicyError::Ports(rule()));
        }
        for (at, one) in self.all_boxes().enumerate() {
            let number = at + 1;
            let is_twice = self.all_boxes().take(at).any(|other| other.service == one.service);
            if !is_service(&one.service) {
                return Err(PolicyError::NoService { rule: rule(), number });
            }
            if is_twice {
                return Err(PolicyError::Twice { rule: rule(), number });
            }
            // A rule for a whole authority may name boxes of it: sessions are not made to boxes.
            if self.services.bits >= SERVICE_BITS && self.services.contains(&one.service) {
                return Err(PolicyError::Loop { rule: rule(), number });
            }
            if one.is_proxy && self.protocol != Some(TCP) {
                return Err(PolicyError::ProxyProtocol { rule: rule(), name: one.name.clone() });
            }
            if one.is_proxy && one.may_be_left_out {
                return Err(PolicyError::ProxyLeftOut { rule: rule(), name: one.name.clone() });
            }
        }
        Ok(())
    }
}

/// How many names there are of the authority that has the most of them.
fn most_of_one(names: impl Iterator<Item = Prefix>) -> usize {
    let mut counts: BTreeMap<[u8; 8], usize> = BTreeMap::new();
    names.for_each(|prefix| *counts.entry(prefix.id.authority()).or_default() += 1);
    counts.into_values().max().unwrap_or_default()
}

impl ChainPolicy {
    /// Whether it can be gone by.
    ///
    /// # Errors
    ///
    /// What is wrong, and in which rule.
    pub fn check(&self) -> Result<(), PolicyError> {
        // An authority that has many leaves the others what they have.
        let of_rules = most_of_one(self.rules.iter().map(|rule| rule.services));
        let of_required = most_of_one(self.required.iter().map(|one| one.services));
        let longest = of_rules.max(of_required).max(most_of_one(self.lapsed.iter().copied()));
        if longest > CHAIN_RULES_MAX {
            return Err(PolicyError::Rules(longest));
        }
        self.rules.iter().try_for_each(ChainRule::check)?;
        for (at, rule) in self.rules.iter().enumerate() {
            if let Some(earlier) = self.rules[..at].iter().find(|earlier| earlier.has_all_of(rule)) {
                return Err(PolicyError::Shadowed { rule: rule.name.clone(), earlier: earlier.name.clone() });
            }
        }
        let is_sound = |boxes: &[ServiceId]| (1..=BOXES_MAX).contains(&boxes.len()) && boxes.iter().all(is_service);
        match self.required.iter().find(|required| !is_sound(&required.boxes)) {
            Some(required) => Err(PolicyError::Requirement(required.boxes.len())),
            None => Ok(()),
        }
    }

    /// The rule that decides over a session.
    pub fn rule_for(&self, session: &SessionHeader<'_>) -> Option<&ChainRule> {
        self.rules.iter().find(|rule| rule.matches(session))
    }

    /// Whether some rule for this name looks at first packets.
    pub(crate) fn reads_packets(&self, service: &ServiceId) -> bool {
        self.rules.iter().any(|rule| rule.filter.is_some() && rule.services.contains(service))
    }

    /// Whether sessions to this name may go through boxes, or must have: then no kernel sets them up by itself.
    pub(crate) fn concerns(&self, service: &ServiceId) -> bool {
        self.rules.iter().any(|rule| !rule.boxes.is_empty() && rule.services.contains(service))
            || self.required_for(service).next().is_some()
            || self.has_lapsed(service)
    }

    /// Whether the rules for this name count no longer, and no others do.
    pub(crate) fn has_lapsed(&self, service: &ServiceId) -> bool {
        self.lapsed.iter().any(|prefix| prefix.contains(service))
    }

    /// Whether order is kept while a session comes to go by this way: some rule for its name says so. Whose it is, and
    /// what its first packet looked like, is not asked, since each end decides for itself.
    pub(crate) fn keeps_order(&self, way: Option<&Flow>) -> bool {
        let Some(Flow { service, app, .. }) = way else { return false };
        self.rules.iter().any(|rule| {
            let is_of_protocol = rule.protocol.is_none_or(|one| one == app.protocol);
            rule.is_ordered && is_of_protocol && rule.services.contains(service)
        })
    }

    /// Boxes that sessions to a name must have passed.
    pub(crate) fn required_for(&self, service: &ServiceId) -> impl Iterator<Item = &ServiceId> {
        let of_service = self.required.iter().filter(|required| required.services.contains(service));
        of_service.flat_map(|required| &required.boxes)
    }

    /// Rules that a session may have been begun by, whose first host has signed these boxes: the last one of them is
    /// the first that has no filter, since that one decides.
    fn rules_of_begun(&self, session: &SessionHeader<'_>, signed: &[ServiceId]) -> Vec<&ChainRule> {
        let mut is_decided = false;
        let mut is_open = |rule: &&ChainRule| !core::mem::replace(&mut is_decided, rule.filter.is_none());
        let may = self.rules.iter().filter(|rule| rule.may_match(session)).take_while(|rule| is_open(rule));
        may.filter(|rule| rule.can_begin_with(signed)).collect()
    }

    /// Which rule lets hosts on the way add these boxes to a session whose first host has signed `signed`; otherwise,
    /// which of them no rule does, from 0.
    pub(crate) fn may_add(
        &self,
        session: &SessionHeader<'_>,
        signed: &[ServiceId],
        added: &[ServiceId],
    ) -> Result<&ChainRule, usize> {
        let unnamed =
            |rule: &ChainRule| added.iter().position(|service| !rule.may_add.iter().any(|one| one.service == *service));
        let mut first_unnamed = 0;
        for rule in self.rules_of_begun(session, signed) {
            match unnamed(rule) {
                None => return Ok(rule),
                Some(at) => first_unnamed = first_unnamed.max(at),
            }
        }
        Err(first_unnamed)
    }

    /// Whether a session that has passed these boxes, and comes to `demanding`, lacks some that are demanded. The last
    /// one must be among those, or one that the policy lets hosts add: its certificate alone is seen, and its host is
    /// believed of the others.
    pub(crate) fn lacks_box(&self, demanding: &ServiceId, passed: &[(ServiceId, bool)]) -> bool {
        let required: Vec<&ServiceId> = self.required_for(demanding).collect();
        if required.is_empty() {
            return false;
        }
        let may_be_last = |(last, is_added): &(ServiceId, bool)| *is_added || required.contains(&last);
        let has = |wanted: &&ServiceId| passed.iter().any(|(one, _)| one == *wanted);
        !(passed.last().is_some_and(may_be_last) && required.iter().all(has))
    }

    /// What the rules call a box; `None`: none names it.
    pub fn name_of_box(&self, service: &ServiceId) -> Option<&str> {
        let mut named = self.rules.iter().flat_map(ChainRule::all_boxes);
        named.find(|one| one.service == *service).map(|one| one.name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;
    use crate::act::chain::Program;
    use crate::types::name::{Name, group_number};

    fn prefix(text: &str) -> Prefix {
        text.parse::<Name>().expect("literal").prefix()
    }

    fn of_service(text: &str) -> Prefix {
        text.parse::<Name>().expect("literal").service_prefix()
    }

    fn wanted(text: &str) -> BoxWanted {
        BoxWanted { name: text.to_string(), service: prefix(text).id, may_be_left_out: false, is_proxy: false }
    }

    fn rule(services: Prefix, boxes: &[&str]) -> ChainRule {
        let boxes = boxes.iter().map(|name| wanted(name)).collect();
        ChainRule {
            name: "inspect".to_string(),
            services,
            protocol: None,
            ports: None,
            clients: Vec::new(),
            filter: None,
            boxes,
            is_ordered: false,
            may_add: Vec::new(),
        }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let web = prefix("web.shop").id;
        let group = group_number("staff");
        let shop = web.authority();
        let host = HostId([7; 16]);
        let groups = [(shop, alloc::vec![group])];
        let session = SessionHeader { service: &web, protocol: 6, port: 80, host, groups: &groups, packet: &[] };
        let other = rule(of_service("mail.shop"), &["av.shop"]);
        let of_ports = ChainRule { ports: Some(81..=90), ..rule(of_service("web.shop"), &["av.shop"]) };
        let of_udp = ChainRule { protocol: Some(17), ..rule(of_service("web.shop"), &["av.shop"]) };
        let others = [Client::Host(HostId([8; 16])), Client::Group { authority: shop, group: group + 1 }];
        let of_others = ChainRule { clients: others.to_vec(), ..rule(of_service("web.shop"), &["av.shop"]) };
        let staff = alloc::vec![Client::Group { authority: shop, group }];
        let of_staff = ChainRule { clients: staff, ..rule(of_service("web.shop"), &["fw.shop"]) };
        let of_all = rule(Prefix::new(web, 64), &["ids.shop"]);
        let mut policy =
            ChainPolicy { rules: alloc::vec![other, of_ports, of_udp, of_others], ..ChainPolicy::default() };
        assert_eq!(policy.rule_for(&session), None);
        policy.rules.extend([of_staff.clone(), of_all.clone()]);
        assert_eq!((policy.check(), policy.rule_for(&session)), (Ok(()), Some(&of_staff)));
        let stranger = SessionHeader { groups: &[], ..session };
        assert_eq!(policy.rule_for(&stranger), Some(&of_all));
        assert_eq!(policy.name_of_box(&wanted("fw.shop").service), Some("fw.shop"));
        assert_eq!(policy.name_of_box(&web), None);
        assert!(policy.concerns(&web) && !policy.concerns(&prefix("web.other").id));
    }

    #[test]
    fn what_may_be_added_is_said_by_the_rule_that_the_session_was_begun_by() {
        let web = prefix("web.shop").id;
        let host = HostId([7; 16]);
        let session = SessionHeader { service: &web, protocol: 6, port: 80, host, groups: &[], packet: &[] };
        let id = |name: &str| prefix(name).id;
        let adding = |name: &str, boxes: &[&str], added: &[&str]| ChainRule {
            name: name.to_string(),
            may_add: added.iter().map(|name| wanted(name)).collect(),
            ..rule(of_service("web.shop"), boxes)
        };
        let mine = ChainRule { clients: alloc::vec![Client::Host(host)], ..adding("mine", &["fw.shop"], &["av.shop"]) };
        let of_udp = ChainRule { protocol: Some(17), ..adding("udp", &["fw.shop"], &["dns.shop"]) };
        let all = adding("all", &["fw.shop", "lb.shop", "nat.shop"], &["ids.shop", "log.shop"]);
        let late = adding("late", &["fw.shop"], &["late.shop"]);
        let policy = ChainPolicy { rules: alloc::vec![of_udp, mine, all, late], ..ChainPolicy::default() };
        let says = |session: &SessionHeader<'_>, signed: &[&str], added: &[&str]| {
            let [signed, added] = [signed, added].map(|names| names.iter().map(|name| id(name)).collect::<Vec<_>>());
            policy.may_add(session, &signed, &added).map(|rule| rule.name.clone())
        };
        let of_all = &["fw.shop", "lb.shop", "nat.shop"][..];
        assert_eq!(says(&session, &["fw.shop"], &["av.shop"]), Ok("mine".to_string()));
        assert_eq!(says(&session, &["fw.shop"], &["ids.shop"]), Err(0), "that rule decides");
        assert_eq!(says(&session, &["fw.shop"], &["dns.shop"]), Err(0), "another protocol's");
        let other = SessionHeader { host: HostId([8; 16]), ..session };
        for signed in [of_all, &["fw.shop", "lb.shop"], &["lb.shop", "nat.shop"]] {
            assert_eq!(says(&other, signed, &["log.shop", "ids.shop"]), Ok("all".to_string()), "{signed:?}");
        }
        assert_eq!(says(&other, of_all, &["ids.shop", "av.shop"]), Err(1), "another rule's");
        assert_eq!(says(&other, &["fw.shop", "nat.shop"], &["ids.shop"]), Err(0), "no rule begins so");
        assert_eq!(says(&other, &["fw.shop"], &["late.shop"]), Err(0), "an earlier rule has all of its sessions");
        assert_eq!(policy.name_of_box(&id("log.shop")), Some("log.shop"));
    }

    #[test]
    fn a_box_that_may_be_added_may_be_the_last_one_of_those_that_are_demanded() {
        let web = prefix("web.shop").id;
        let id = |name: &str| prefix(name).id;
        let required = Requirement { services: of_service("web.shop"), boxes: alloc::vec![id("fw.shop")] };
        let policy = ChainPolicy { required: alloc::vec![required], ..ChainPolicy::default() };
        let fw = (id("fw.shop"), false);
        assert!(!policy.lacks_box(&web, &[fw]) && policy.lacks_box(&web, &[]));
        assert!(!policy.lacks_box(&web, &[fw, (id("ids.shop"), true)]));
        assert!(policy.lacks_box(&web, &[fw, (id("ids.shop"), false)]), "its host is believed of nothing");
        assert!(policy.lacks_box(&web, &[(id("ids.shop"), true)]), "one is missing");
        assert!(!policy.lacks_box(&id("mail.shop"), &[]));
    }

    #[test]
    fn a_filter_is_one_predicate_more() {
        let filter = |protocol: u8| Filter {
            text: "a literal".to_string(),
            // ldb [9]; jeq #protocol; ret #1; ret #0
            program: Program::parse(
                &[
                    [0, 0x30, 0, 0, 0, 0, 0, 9],
                    [0, 0x15, 0, 1, 0, 0, 0, protocol],
                    [0, 6, 0, 0, 0, 0, 0, 1],
                    [0, 6, 0, 0, 0, 0, 0, 0],
                ]
                .concat(),
            )
            .expect("literal"),
        };
        let web = prefix("web.shop").id;
        let with = |protocol, ports| ChainRule {
            name: alloc::format!("of {protocol}"),
            filter: Some(filter(protocol)),
            ports,
            ..rule(of_service("web.shop"), &["fw.shop"])
        };
        let rules = alloc::vec![with(17, None), with(6, Some(80..=80)), rule(of_service("web.shop"), &["ids.shop"])];
        let policy = ChainPolicy { rules, ..ChainPolicy::default() };
        assert_eq!(policy.check(), Ok(()));
        let of = |protocol: u8| {
            let mut packet = [0; 20];
            packet[9] = protocol;
            packet
        };
        let packet = of(6);
        let session =
            SessionHeader { service: &web, protocol: 6, port: 80, host: HostId([7; 16]), groups: &[], packet: &packet };
        let decides = |session: &SessionHeader<'_>| policy.rule_for(session).map(|rule| rule.name.clone());
        assert_eq!(decides(&session).as_deref(), Some("of 6"));
        assert_eq!(decides(&SessionHeader { port: 81, ..session }).as_deref(), Some("inspect"), "the port counts, too");
        assert_eq!(decides(&SessionHeader { packet: &of(17), ..session }).as_deref(), Some("of 17"));
        assert_eq!(decides(&SessionHeader { packet: &[], ..session }).as_deref(), Some("inspect"));
        assert!(policy.reads_packets(&web) && !policy.reads_packets(&prefix("mail.shop").id));
        // A rule with a filter leaves later ones something, but for one with the same.
        let twice = ChainPolicy { rules: alloc::vec![with(6, None), with(6, Some(1..=9))], ..ChainPolicy::default() };
        assert!(matches!(twice.check(), Err(PolicyError::Shadowed { .. })));
        let of_all = rule(of_service("web.shop"), &["ids.shop"]);
        let behind = ChainPolicy { rules: alloc::vec![of_all, with(6, None)], ..ChainPolicy::default() };
        assert!(matches!(behind.check(), Err(PolicyError::Shadowed { .. })));
    }

    #[test]
    fn a_rule_without_boxes_keeps_sessions_from_later_rules() {
        let web = prefix("web.shop").id;
        let session =
            SessionHeader { service: &web, protocol: 6, port: 80, host: HostId([7; 16]), groups: &[], packet: &[] };
        let exempt = rule(of_service("web.shop"), &[]);
        let policy = ChainPolicy {
            rules: alloc::vec![exempt.clone(), rule(Prefix::new(web, 64), &["fw.shop"])],
            required: Vec::new(),
            ..ChainPolicy::default()
        };
        assert_eq!(policy.rule_for(&session), Some(&exempt));
    }

    #[test]
    fn a_rule_that_decides_over_nothing_is_refused() {
        let web = of_service("web.shop");
        let of_all = rule(Prefix::new(web.id, 64), &["fw.shop"]);
        let of_ports = |ports| ChainRule { name: "ports".to_string(), ports: Some(ports), ..rule(web, &[]) };
        let of_hosts = |hosts: &[u8]| {
            let clients = hosts.iter().map(|host| Client::Host(HostId([*host; 16]))).collect();
            ChainRule { name: "hosts".to_string(), clients, ..rule(web, &[]) }
        };
        let check = |rules: [&ChainRule; 2]| {
            let rules = rules.into_iter().cloned().collect();
            ChainPolicy { rules, ..ChainPolicy::default() }.check()
        };
        let shadowed = |rule: &str, earlier: &str| {
            Err(PolicyError::Shadowed { rule: rule.to_string(), earlier: earlier.to_string() })
        };
        assert_eq!(check([&of_all, &of_ports(80..=80)]), shadowed("ports", "inspect"));
        assert_eq!(check([&of_ports(80..=80), &of_all]), Ok(()));
        assert_eq!(check([&of_ports(80..=90), &of_ports(85..=86)]), shadowed("ports", "ports"));
        assert_eq!(check([&of_ports(80..=90), &of_ports(85..=91)]), Ok(()));
        assert_eq!(check([&of_hosts(&[1, 2]), &of_hosts(&[2])]), shadowed("hosts", "hosts"));
        assert_eq!(check([&of_hosts(&[1, 2]), &of_hosts(&[2, 3])]), Ok(()));
        assert_eq!(check([&of_hosts(&[1]), &rule(web, &[])]), Ok(()));
        let of_udp = ChainRule { protocol: Some(17), ..rule(web, &[]) };
        assert_eq!(check([&of_udp, &rule(web, &[])]), Ok(()));
        assert_eq!(check([&rule(web, &[]), &of_udp]), shadowed("inspect", "inspect"));
    }

    #[test]
    fn what_cannot_be_gone_by_is_refused_with_the_rule_in_the_error() {
        let says = |rule: ChainRule| {
            let policy = ChainPolicy { rules: alloc::vec![rule], ..ChainPolicy::default() };
            policy.check().expect_err("it cannot be gone by").to_string()
        };
        let web = of_service("web.shop");
        let nine = ["a.x", "b.x", "c.x", "d.x", "e.x", "f.x", "g.x", "h.x", "i.x"];
        let too_many = "chain `inspect` has 9 boxes, with those that may be added; at most 8 are allowed";
        assert_eq!(says(rule(web, &nine)), too_many);
        let adding = |boxes: &[&str], added: &[&str]| {
            let may_add = added.iter().map(|name| wanted(name)).collect();
            ChainRule { may_add, ..rule(web, boxes) }
        };
        assert_eq!(says(adding(&nine[..8], &["ids.shop"])), too_many);
        assert_eq!(says(adding(&["fw.shop"], &nine[..8])), too_many);
        assert!(says(adding(&[], &["ids.shop"])).contains("no box whose host could add one"));
        assert!(says(adding(&["fw.shop"], &["ids.shop", "fw.shop"])).contains("names box 3 twice"));
        assert!(says(adding(&["fw.shop"], &["web.shop"])).contains("a loop"));
        assert!(says(adding(&["fw.shop"], &["ids.shop/key:one"])).contains("no service's"));
        let fits = ChainPolicy { rules: alloc::vec![adding(&["fw.shop"], &nine[..7])], ..ChainPolicy::default() };
        assert_eq!(fits.check(), Ok(()));
        assert!(says(rule(web, &["fw.shop", "fw.shop"])).contains("names box 2 twice"));
        assert!(says(rule(web, &["fw.shop", "web.shop"])).contains("a loop"));
        assert!(says(rule(web, &["fw.shop/key:one"])).contains("no service's"));
        let no_ports = ChainRule { ports: Some(RangeInclusive::new(2, 1)), ..rule(web, &["fw.shop"]) };
        assert!(says(no_ports).contains("for no port"));
        let mut proxied = ChainRule { protocol: Some(17), ..rule(web, &["lb.shop"]) };
        proxied.boxes[0].is_proxy = true;
        assert!(says(proxied.clone()).contains("lb.shop") && says(proxied.clone()).contains("protocol"));
        proxied.protocol = Some(TCP);
        assert_eq!(ChainPolicy { rules: alloc::vec![proxied.clone()], ..ChainPolicy::default() }.check(), Ok(()));
        proxied.boxes[0].may_be_left_out = true;
        assert!(says(proxied).contains("never left out"));
        let required = |boxes: &[&str]| {
            let boxes = boxes.iter().map(|name| prefix(name).id).collect();
            let required = alloc::vec![Requirement { services: web, boxes }];
            ChainPolicy { required, ..ChainPolicy::default() }.check()
        };
        assert_eq!(required(&["fw.shop"]), Ok(()));
        assert_eq!(required(&[]), Err(PolicyError::Requirement(0)));
        assert_eq!(required(&["fw.shop/key:one"]), Err(PolicyError::Requirement(1)));
    }
}
