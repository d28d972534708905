//! What `up` will change, decided by what the host is like.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use margay_core::{BITS_V4, BITS_V6, Ranges};
use margay_datapath::kernel::KernelCache;
use margay_datapath::tun::QUEUE_PACKETS;

use super::card::{self, Card};
use super::change::{Change, MAIN_TABLE};
use super::guard::Opening;
use super::netlink::{Block, Link, Netlink};
use super::responder_way::ResponderWay;
use super::{HostError, is_own, look, resolv_conf, resolved, rule_place, sysctl};
use crate::agent::{INTERFACE, RESPONDER_INTERFACE};
use crate::config::Config;

/// Table of the rules that send answers back to `sal0`: the port's number, easy to recognise.
pub const TABLE: u32 = 54_324;
/// Largest super-packet that is asked for: the kernel's own limit, and where all packets are encapsulated what one UDP
/// send carries, less its headers.
const GSO_MAX_DIRECT: u32 = 65_536;
const GSO_MAX_ENCAPSULATED: u32 = 62_500;
/// IP (the larger of the two) and UDP headers below ours.
const IPV6_UDP_BYTES: u32 = 48;
const IPV4_UDP_BYTES: u32 = 28;
/// The DATA header, and that of a train, before an inner packet.
const ENCAP_BYTES: u32 = 24;
/// IPv6 needs this much.
const MTU_MIN: u32 = 1_280;
const USUAL_MTU: u32 = 1_500;
/// Since Linux 6.17 an interface forwards IPv6 by itself.
const FORCE_FORWARDING: &str = "net/ipv6/conf/all/force_forwarding";
const ALL_FORWARDING: &str = "net/ipv6/conf/all/forwarding";
/// Whom resolvers ask.
pub const RESOLV_CONF: &str = "/etc/resolv.conf";

/// What will be changed, in this order.
#[derive(Clone, Debug)]
pub struct Plan {
    changes: Vec<Change>,
    remarks: Vec<String>,
    datagram_max: u16,
}

impl Plan {
    /// The changes.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// Whether one of the changes is about the same thing.
    pub fn has(&self, change: &Change) -> bool {
        self.changes.iter().any(|wanted| wanted.is_same_thing(change))
    }

    /// The same change with what is there now for `down` to bring back; none where nothing is remembered.
    pub fn renewed(&self, change: &Change) -> Option<&Change> {
        self.changes.iter().find(|wanted| wanted.is_same_thing(change) && wanted.remembers())
    }

    /// What the operator should know.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// One more of these.
    pub fn remark(&mut self, text: String) {
        self.remarks.push(text);
    }

    /// The largest UDP payload, in bytes, that this host's links take.
    pub fn datagram_max(&self) -> u16 {
        self.datagram_max
    }
}

/// All virtual addresses of either family.
pub fn networks(ranges: Ranges) -> [Block; 2] {
    [
        Block { address: ranges.first_v4().into(), bits: BITS_V4 },
        Block { address: ranges.first_v6().into(), bits: BITS_V6 },
    ]
}

/// What a plan is made from.
struct Facts {
    /// Smallest MTU of the links that lead out.
    underlay_mtu: u32,
    has_ipv6_underlay: bool,
    ipv6_enabled: bool,
    reserved_ports: Option<String>,
    resolver: Resolver,
    responder: ResponderWay,
    inside: Vec<Opening>,
    /// Whether there will be no programs on the cards.
    needs_guard: bool,
    forwarding_v6: ForwardingV6,
}

/// How IPv6 packets are forwarded from one interface.
enum ForwardingV6 {
    /// The interface can be told.
    OfInterface,
    /// The whole host can, which has this value now.
    OfHost(String),
}

enum Resolver {
    Off,
    Resolved,
    File(resolv_conf::Present),
}

/// Looks at the host, changes nothing, and needs no rights.
///
/// # Errors
///
/// The kernel's tables cannot be read, or another program's interface has our name.
pub async fn plan(config: &Config) -> Result<Plan, HostError> {
    let net = Netlink::connect().map_err(look("interfaces"))?;
    let links = net.links().await.map_err(look("interfaces"))?;
    if links.iter().any(|link| link.name == INTERFACE && !link.tun) {
        return Err(HostError::InterfaceTaken(INTERFACE.to_owned()));
    }
    if links.iter().any(|link| link.name == RESPONDER_INTERFACE && !link.veth) {
        return Err(HostError::InterfaceTaken(RESPONDER_INTERFACE.to_owned()));
    }
    let addresses = net.addresses().await.map_err(look("addresses"))?;
    let cards = card::judge(&links, &addresses, config.inside.as_deref(), config.ranges());
    let carries = |link: &&Link| {
        link.up && !link.loopback && !is_own(link) && addresses.iter().any(|found| found.index == link.index)
    };
    let underlay_mtu = links.iter().filter(carries).map(|link| link.mtu).min().unwrap_or(USUAL_MTU);
    let has_ipv6_underlay = links.iter().filter(carries).any(|link| {
        addresses.iter().any(|found| found.index == link.index && found.address.is_ipv6() && !found.link_local)
    });
    let disabled = sysctl::read("net/ipv6/conf/all/disable_ipv6").map_err(look("parameters"))?;
    let resolver = if !config.dns.enabled {
        Resolver::Off
    } else if resolved::is_used(Path::new(RESOLV_CONF)) {
        Resolver::Resolved
    } else {
        Resolver::File(resolv_conf::look(Path::new(RESOLV_CONF)).map_err(look("/etc/resolv.conf"))?)
    };
    let facts = Facts {
        underlay_mtu,
        has_ipv6_underlay,
        ipv6_enabled: disabled.as_deref() == Some("0"),
        reserved_ports: sysctl::read(sysctl::RESERVED_PORTS).map_err(look("parameters"))?,
        resolver,
        responder: ResponderWay::of(config),
        inside: cards.iter().filter_map(Card::opening).collect(),
        needs_guard: !config.direct || !KernelCache::is_possible(),
        forwarding_v6: match sysctl::read(FORCE_FORWARDING).map_err(look("parameters"))? {
            Some(_) => ForwardingV6::OfInterface,
            None => {
                let now = sysctl::read(ALL_FORWARDING).map_err(look("parameters"))?;
                ForwardingV6::OfHost(now.unwrap_or_default())
            }
        },
    };
    Ok(decide(config, facts))
}

fn decide(config: &Config, facts: Facts) -> Plan {
    let below = if facts.has_ipv6_underlay { IPV6_UDP_BYTES } else { IPV4_UDP_BYTES };
    let underlay_mtu = facts.underlay_mtu;
    let datagram = underlay_mtu.saturating_sub(below);
    // Where flows go direct, their packets may be as large as those of plain TCP, and the few that are encapsulated are
    // cut in two on the way; where none does, each is to fit a datagram (decision 0011).
    let (mtu, gso_max_size) = if config.direct && !config.secure {
        (facts.underlay_mtu, GSO_MAX_DIRECT)
    } else {
        let tag = if config.secure { margay_wire::SEAL_TAG_LEN as u32 } else { 0 };
        (datagram.saturating_sub(ENCAP_BYTES + tag), GSO_MAX_ENCAPSULATED)
    };
    let mtu = mtu.clamp(MTU_MIN, 65_000);
    let interface = || INTERFACE.to_owned();
    let (ranges, networks) = (config.ranges(), networks(config.ranges()));
    // Before there is a virtual address to reach.
    let guard = || Change::Guard { inside: facts.inside.clone(), networks, drops_tags: config.host.boxes };
    let mut changes = Vec::from_iter(facts.needs_guard.then(guard));
    changes.push(Change::Tun { interface: interface() });
    changes.push(Change::Sizes { interface: interface(), mtu, gso_max_size, queue_packets: QUEUE_PACKETS });
    let parameters = [("rp_filter", "0"), ("send_redirects", "0"), ("accept_redirects", "0"), ("route_localnet", "1")];
    for (key, value) in parameters {
        let key = format!("net/ipv4/conf/{INTERFACE}/{key}");
        changes.push(Change::Parameter { key, value: value.to_owned() });
    }
    if facts.ipv6_enabled {
        // No link-local address: nobody is on that link, and solicitations would wake the agent.
        let key = format!("net/ipv6/conf/{INTERFACE}/addr_gen_mode");
        changes.push(Change::Parameter { key, value: "1".to_owned() });
        let key = format!("net/ipv6/conf/{INTERFACE}/disable_ipv6");
        changes.push(Change::Parameter { key, value: "0".to_owned() });
    }
    let families: [(IpAddr, u8, Block, IpAddr, bool); 2] = [
        (ranges.host_v4().into(), 32, networks[0], Ipv4Addr::UNSPECIFIED.into(), true),
        (ranges.host_v6().into(), 128, networks[1], Ipv6Addr::UNSPECIFIED.into(), facts.ipv6_enabled),
    ];
    let families = || families.into_iter().filter(|family| family.4);
    for (address, bits, ..) in families() {
        changes.push(Change::Address { interface: interface(), block: Block { address, bits } });
    }
    changes.push(Change::Up { interface: interface() });
    for (host, _, network, nowhere, _) in families() {
        let route = |table, destination, source| Change::Route { interface: interface(), table, destination, source };
        changes.push(route(MAIN_TABLE, network, Some(host)));
        changes.push(route(TABLE, Block { address: nowhere, bits: 0 }, None));
        let priority = rule_place::PRIORITY;
        let rule = |from, to, table| Change::Rule { from, from_bits: None, to, source_port: None, table, priority };
        changes.push(rule(None, Some(network), MAIN_TABLE));
        changes.push(rule(Some(host), None, TABLE));
    }
    if config.host.boxes {
        changes.extend(forwarding(&facts, networks));
    }
    if config.dns.enabled {
        changes.extend(way_to_responder(&facts, ranges));
    }
    if let Some(before) = facts.reserved_ports {
        changes.push(Change::ReservedPort { port: config.host.port, before });
    }
    let mut remarks = Vec::from_iter(remark_on_inside(config.inside.as_deref(), &facts.inside));
    resolver(config, facts.resolver, &facts.responder, &mut changes, &mut remarks);
    if datagram < MTU_MIN + ENCAP_BYTES {
        remarks
            .push(format!("a link of this host has an MTU of {underlay_mtu} only; packets are cut in two on the way"));
    }
    let datagram_max = u16::try_from(datagram.min(65_000)).unwrap_or(u16::MAX).max(576);
    Plan { changes, remarks, datagram_max }
}

/// What comes in by `sal0` and is for nobody here goes out by it again: boxes see it pass. The rules also let what
/// comes in pass reverse-path filters.
fn forwarding(facts: &Facts, networks: [Block; 2]) -> Vec<Change> {
    let parameter = |key: String| Change::Parameter { key, value: "1".to_owned() };
    let mut changes = vec![parameter(format!("net/ipv4/conf/{INTERFACE}/forwarding"))];
    if facts.ipv6_enabled {
        changes.push(match &facts.forwarding_v6 {
            ForwardingV6::OfInterface => parameter(format!("net/ipv6/conf/{INTERFACE}/force_forwarding")),
            ForwardingV6::OfHost(before) => {
                Change::Forwarding { key: ALL_FORWARDING.to_owned(), before: before.clone() }
            }
        });
    }
    let families = networks.into_iter().filter(|network| network.address.is_ipv4() || facts.ipv6_enabled);
    let rule = |network: Block| Change::Rule {
        from: Some(network.address),
        from_bits: Some(network.bits),
        to: None,
        source_port: None,
        table: TABLE,
        priority: rule_place::PRIORITY,
    };
    changes.extend(families.map(rule));
    changes
}

/// From where else than this host its virtual addresses are reached.
fn remark_on_inside(configured: Option<&[String]>, inside: &[Opening]) -> Option<String> {
    let found: Vec<_> = inside.iter().map(Opening::to_string).collect();
    let found = found.join(", ");
    match configured {
        None if inside.is_empty() => None,
        None => Some(format!(
            "names are reached from {found}, too: bridges without a way out of this host; `inside = [...]` in the \
             configuration \
             decides otherwise"
        )),
        Some(names) => {
            let is_missing = |name: &&String| !inside.iter().any(|opening| opening.interface == **name);
            let missing: Vec<_> = names.iter().filter(is_missing).cloned().collect();
            (!missing.is_empty())
                .then(|| format!("`inside` in the configuration: there is no interface {} yet", missing.join(", ")))
        }
    }
}

/// By which programs reach the responder.
fn way_to_responder(facts: &Facts, ranges: Ranges) -> Vec<Change> {
    let interface = || RESPONDER_INTERFACE.to_owned();
    let only = |address: Ipv4Addr| Block { address: address.into(), bits: 32 };
    let client = ranges.responder_client_v4();
    match &facts.responder {
        ResponderWay::Apart { address } => {
            let mut changes = vec![Change::Veth { interface: interface(), responder: *address }];
            if facts.ipv6_enabled {
                let key = format!("net/ipv6/conf/{RESPONDER_INTERFACE}/disable_ipv6");
                changes.push(Change::Parameter { key, value: "1".to_owned() });
            }
            changes.push(Change::Address { interface: interface(), block: only(client) });
            changes.push(Change::Up { interface: interface() });
            let (destination, source) = (only(*address), Some(client.into()));
            changes.push(Change::Route { interface: interface(), table: MAIN_TABLE, destination, source });
            changes
        }
        ResponderWay::OnHost { listen, .. } if listen.ip() == ranges.host_v4() => {
            // No flow of the host's has that port: the responder has it for itself.
            let (from, source_port) = (Some(listen.ip()), Some(listen.port()));
            let priority = rule_place::RESPONDER_PRIORITY;
            vec![Change::Rule { from, from_bits: None, to: None, source_port, table: MAIN_TABLE, priority }]
        }
        ResponderWay::OnHost { .. } => Vec::new(),
    }
}

fn resolver(
    config: &Config,
    resolver: Resolver,
    responder: &ResponderWay,
    changes: &mut Vec<Change>,
    remarks: &mut Vec<String>,
) {
    if !config.dns.enabled {
        return;
    }
    remarks.extend(responder.remark());
    let listen = responder.address();
    let server = listen.ip();
    if !matches!(resolver, Resolver::Off) && listen.port() != 53 {
        remarks.push(format!(
            "the responder is at port {}: resolvers ask port 53, so the zone must be sent there by your own resolver",
            listen.port()
        ));
        return;
    }
    match resolver {
        Resolver::Off => {}
        Resolver::Resolved => {
            let interface = if responder.is_apart() { RESPONDER_INTERFACE } else { INTERFACE };
            changes.push(Change::Resolved { interface: interface.to_owned(), server, zone: config.dns.zone.clone() })
        }
        Resolver::File(present) => {
            let before = resolv_conf::cleaned(present.before);
            changes.push(Change::ResolvConf { path: PathBuf::from(RESOLV_CONF), server, before });
        }
    }
}

#[cfg(test)]
pub mod test {
    use super::*;

    /// What `up` makes on a host of both families with eBPF.
    pub fn changes_of_a_usual_host() -> Vec<Change> {
        decide(&Config::default(), facts(1500, true, true)).changes
    }

    /// All that `up` makes on hosts of any kind.
    pub fn changes_of_all_hosts() -> Vec<Change> {
        let mut config = Config::default();
        config.host.boxes = true;
        let nothing = || resolv_conf::Present { before: resolv_conf::Before::Absent, effective: Vec::new() };
        let alike = Facts { needs_guard: true, resolver: Resolver::File(nothing()), ..facts(1500, true, true) };
        let listen = (Ranges::USUAL.host_v4(), 53).into();
        let otherwise = Facts {
            responder: ResponderWay::OnHost { listen, why: None },
            resolver: Resolver::Resolved,
            forwarding_v6: ForwardingV6::OfHost("0".to_owned()),
            ..facts(1500, true, true)
        };
        [alike, otherwise].into_iter().flat_map(|facts| decide(&config, facts).changes).collect()
    }

    fn facts(underlay_mtu: u32, has_ipv6_underlay: bool, ipv6_enabled: bool) -> Facts {
        Facts {
            underlay_mtu,
            has_ipv6_underlay,
            ipv6_enabled,
            reserved_ports: Some(String::new()),
            resolver: Resolver::Off,
            responder: ResponderWay::Apart { address: Ranges::USUAL.responder_v4() },
            inside: Vec::new(),
            needs_guard: false,
            forwarding_v6: ForwardingV6::OfInterface,
        }
    }

    fn mtu(plan: &Plan) -> u32 {
        let sizes = plan.changes.iter().find_map(|change| match change {
            Change::Sizes { mtu, .. } => Some(*mtu),
            _ => None,
        });
        sizes.expect("sizes are set")
    }

    #[test]
    fn sizes_fit_the_link_below() {
        let plan = decide(&Config::default(), facts(1500, true, true));
        assert_eq!((mtu(&plan), plan.datagram_max()), (1500, 1452));
        let config = Config { direct: false, ..Config::default() };
        let plan = decide(&config, facts(1500, false, true));
        assert_eq!((mtu(&plan), plan.datagram_max()), (1448, 1472));
        let plan = decide(&config, facts(1500, true, true));
        assert_eq!((mtu(&plan), plan.datagram_max()), (1428, 1452));
        let plan = decide(&config, facts(9000, false, true));
        assert_eq!((mtu(&plan), plan.datagram_max()), (8948, 8972));
        let plan = decide(&config, facts(1280, true, true));
        assert_eq!((mtu(&plan), plan.datagram_max()), (1280, 1232));
        assert_eq!(plan.remarks().len(), 1);
    }

    #[test]
    fn a_host_without_ipv6_gets_none() {
        let plan = decide(&Config::default(), facts(1500, false, false));
        let texts: Vec<String> = plan.changes.iter().map(Change::to_string).collect();
        assert!(texts.iter().any(|text| text.contains("198.18.0.1")));
        assert!(!texts.iter().any(|text| text.contains("fd5a")), "{texts:?}");
    }

    #[test]
    fn a_host_with_ranges_of_its_own_has_no_address_of_the_usual_ones() {
        let mut config = Config::default();
        config.ranges.ipv4 = "10.66.0.0/15".parse().expect("a range");
        config.ranges.ipv6 = "fdaa:1::/32".parse().expect("a range");
        let responder = ResponderWay::Apart { address: config.ranges().responder_v4() };
        let plan = decide(&config, Facts { needs_guard: true, responder, ..facts(1500, true, true) });
        let texts: Vec<String> = plan.changes.iter().map(Change::to_string).collect();
        for own in ["10.66.0.1/32", "10.66.0.2/32", "10.66.0.3/32", "10.66.0.0/15", "fdaa:1::1/128", "fdaa:1::/32"] {
            assert!(texts.iter().any(|text| text.contains(own)), "{own}: {texts:?}");
        }
        let guard = format!("{:?}", plan.changes[0]);
        assert!(guard.contains("10.66.0.0") && guard.contains("fdaa:1::"), "{guard}");
        assert!(!format!("{:?}", plan.changes).contains("198.18") && !format!("{:?}", plan.changes).contains("fd5a"));
    }

    #[test]
    fn a_host_without_programs_is_guarded_before_it_has_an_address() {
        let guarded = Facts { needs_guard: true, ..facts(1500, false, true) };
        let plan = decide(&Config::default(), guarded);
        assert!(matches!(plan.changes[0], Change::Guard { .. }), "{:?}", plan.changes);
        let plan = decide(&Config::default(), facts(1500, false, true));
        assert!(!plan.changes.iter().any(|change| matches!(change, Change::Guard { .. })));
    }

    #[test]
    fn a_host_with_boxes_forwards_on_sal0_alone_where_the_kernel_can() {
        let plain = decide(&Config::default(), facts(1500, false, true));
        let texts = |plan: &Plan| plan.changes.iter().map(Change::to_string).collect::<Vec<_>>();
        assert!(!texts(&plain).iter().any(|text| text.contains("forwarding")), "{:?}", texts(&plain));
        let mut config = Config::default();
        config.host.boxes = true;
        let boxed = texts(&decide(&config, facts(1500, false, true)));
        for wanted in [
            "net.ipv4.conf.sal0.forwarding to 1",
            "net.ipv6.conf.sal0.force_forwarding to 1",
            "from 198.18.0.0/15 ask table 54324",
            "from fd5a:4c00::/32 ask table 54324",
        ] {
            assert!(boxed.iter().any(|text| text.contains(wanted)), "{wanted}: {boxed:?}");
        }
        let older = Facts { forwarding_v6: ForwardingV6::OfHost("0".to_owned()), ..facts(1500, false, true) };
        let texts = texts(&decide(&config, older));
        assert!(texts.iter().any(|text| text.contains("net.ipv6.conf.all.forwarding to 1, for the whole host")));
        assert!(!texts.iter().any(|text| text.contains("sal0.force_forwarding")));
        let without_v6 =
            decide(&config, Facts { forwarding_v6: ForwardingV6::OfInterface, ..facts(1500, false, false) });
        assert!(!without_v6.changes.iter().any(|change| change.to_string().contains("ipv6")));
    }

    #[test]
    fn the_port_is_the_configured_one() {
        let mut config = Config::default();
        config.host.port = 6000;
        let plan = decide(&config, facts(1500, false, true));
        assert!(plan.changes.iter().any(|change| matches!(change, Change::ReservedPort { port: 6000, .. })));
    }
}
