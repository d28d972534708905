//! The kernel's links, addresses, routes and rules, as far as `up` and `check` need them. No other program is run for
//! it: a small container may not have `ip`.

use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use futures_util::{Stream, StreamExt, TryStreamExt};
use margay_core::Ranges;
use netlink_packet_core::NetlinkPayload;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage, AddressScope};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, State,
};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage, RulePortRange};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::{Handle, IpVersion, LinkUnspec};
use serde::{Deserialize, Serialize};

use super::responder_way::Namespace;

/// Of both ends of the responder's pair; locally administered.
const VETH_ADDRESS: [u8; 6] = [0x02, b's', b'a', b'l', b'-', b'd'];

/// A connection to the kernel.
pub struct Netlink {
    handle: Handle,
    /// Of the responder, where this process holds it.
    namespace: Option<Arc<Namespace>>,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Kernel's number.
    pub index: u32,
    /// Name.
    pub name: String,
    /// Largest packet, in bytes.
    pub mtu: u32,
    /// Largest super-packet that the kernel hands to it, in bytes.
    pub gso_max_size: u32,
    /// Packets that wait for it at most, where nothing else queues them.
    pub queue_packets: u32,
    /// Administratively up.
    pub up: bool,
    /// Packets that are sent to it get somewhere, or nobody knows whether they do.
    pub running: bool,
    /// They do (RFC 2863: operationally up): a TUN is held by a process, and the kernel has noticed.
    pub operational: bool,
    /// `lo`.
    pub loopback: bool,
    /// A TUN or TAP.
    pub tun: bool,
    /// One of a pair of interfaces.
    pub veth: bool,
    /// A bridge.
    pub bridge: bool,
    /// At its other end are programs of this host alone, in another network namespace or a virtual machine.
    pub leads_nowhere: bool,
    /// The bridge or bond that it is a port of.
    pub controller: Option<u32>,
    /// Its packets are Ethernet frames.
    pub ethernet: bool,
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Interface.
    pub index: u32,
    /// The address.
    pub address: IpAddr,
    /// Its prefix length.
    pub bits: u8,
    /// Valid on the link only.
    pub link_local: bool,
    /// Not to be used yet, or at all: another host may have it.
    pub tentative: bool,
}

/// An address block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// First address.
    pub address: IpAddr,
    /// Leading bits that count.
    pub bits: u8,
}

impl std::fmt::Display for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.bits == 0 { f.write_str("default") } else { write!(f, "{}/{}", self.address, self.bits) }
    }
}

/// A route through an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Table.
    pub table: u32,
    /// Where to.
    pub destination: Block,
    /// Interface.
    pub index: u32,
    /// Next hop, where it is not the destination itself.
    pub gateway: Option<IpAddr>,
    /// Source address of packets that have none yet.
    pub source: Option<IpAddr>,
}

/// A policy rule: packets from a block, from one port of it, or to a block, look into one table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Lower is asked first.
    pub priority: u32,
    /// Source.
    pub from: Option<Block>,
    /// Destination.
    pub to: Option<Block>,
    /// Source port, where it is about one alone.
    pub source_port: Option<u16>,
    /// Table.
    pub table: u32,
}

impl Rule {
    /// Whether it is of IPv4.
    pub fn is_v4(&self) -> bool {
        self.about().is_some_and(|address| address.is_ipv4())
    }

    /// The address, or the first one of the network, that it is about.
    pub fn about(&self) -> Option<IpAddr> {
        self.from.or(self.to).map(|block| block.address)
    }
}

/// A policy rule as the kernel lists it, whoever has made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedRule {
    /// Lower is asked first.
    pub priority: u32,
    /// Of IPv4.
    pub is_v4: bool,
    /// Table that it looks into; none where it does something else.
    pub table: Option<u32>,
    /// Where nothing but addresses and a source port decides.
    pub rule: Option<Rule>,
}

impl std::fmt::Display for ListedRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rule {} of IPv{}", self.priority, if self.is_v4 { 4 } else { 6 })?;
        self.table.map_or(Ok(()), |table| write!(f, " (lookup {table})"))
    }
}

/// A message for every change of interfaces, addresses and routes. Needs a tokio runtime.
pub fn changes() -> io::Result<impl Stream<Item = ()> + Unpin> {
    use rtnetlink::MulticastGroup::{Ipv4Ifaddr, Ipv4Route, Ipv6Ifaddr, Ipv6Route, Link};
    let groups = [Link, Ipv4Ifaddr, Ipv6Ifaddr, Ipv4Route, Ipv6Route];
    let (connection, _, messages) = rtnetlink::new_multicast_connection(&groups)?;
    tokio::spawn(connection);
    Ok(messages.map(drop))
}

/// A message for every change of what `up` may have made: interfaces, virtual addresses of these ranges, routes to them
/// or in `table`, and policy rules. Needs a tokio runtime.
///
/// # Errors
///
/// The kernel does not tell.
pub fn changes_of_own(table: u32, ranges: Ranges) -> io::Result<impl Stream<Item = ()> + Unpin> {
    use rtnetlink::MulticastGroup::{Ipv4Ifaddr, Ipv4Route, Ipv4Rule, Ipv6Ifaddr, Ipv6Route, Ipv6Rule, Link};
    let groups = [Link, Ipv4Ifaddr, Ipv6Ifaddr, Ipv4Route, Ipv6Route, Ipv4Rule, Ipv6Rule];
    let (connection, _, messages) = rtnetlink::new_multicast_connection(&groups)?;
    tokio::spawn(connection);
    let concerns = move |payload: &NetlinkPayload<RouteNetlinkMessage>| match payload {
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewAddress(message) | RouteNetlinkMessage::DelAddress(message),
        ) => address_of(message).is_none_or(|found| ranges.is_virtual(found.address)),
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewRoute(message) | RouteNetlinkMessage::DelRoute(message),
        ) => {
            route_of(message).is_some_and(|route| route.table == table || ranges.is_virtual(route.destination.address))
        }
        // Links and rules, and word that messages were lost.
        _ => true,
    };
    Ok(messages.filter(move |(message, _)| std::future::ready(concerns(&message.payload))).map(drop))
}

impl Netlink {
    /// Opens a connection to the kernel of the network namespace of the calling thread. Needs a tokio runtime.
    pub fn connect() -> io::Result<Self> {
        let (connection, handle, _) = rtnetlink::new_connection()?;
        tokio::spawn(connection);
        Ok(Self { handle, namespace: None })
    }

    /// The same, with the network namespace that the responder answers in.
    pub fn with_namespace(self, namespace: Option<Arc<Namespace>>) -> Self {
        Self { namespace, ..self }
    }

    /// See [`with_namespace`](Self::with_namespace).
    pub fn namespace(&self) -> Option<&Arc<Namespace>> {
        self.namespace.as_ref()
    }

    /// Makes a pair of interfaces, one here and one in another network namespace. Neither end asks for the other's
    /// hardware address: both have the same.
    pub async fn add_veth(&self, here: &str, there: &str, namespace: &Namespace) -> io::Result<()> {
        let end = |name: &str| {
            let mut message = LinkMessage::default();
            message.header.flags = LinkFlags::Noarp;
            message.header.change_mask = LinkFlags::Noarp;
            message.attributes =
                vec![LinkAttribute::IfName(name.to_owned()), LinkAttribute::Address(VETH_ADDRESS.into())];
            message
        };
        let (mut near, mut far) = (end(here), end(there));
        far.attributes.push(LinkAttribute::NetNsFd(namespace.as_raw_fd()));
        let pair = vec![LinkInfo::Kind(InfoKind::Veth), LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(far)))];
        near.attributes.push(LinkAttribute::LinkInfo(pair));
        self.handle.link().add(near).execute().await.map_err(to_io)
    }

    /// All interfaces.
    pub async fn links(&self) -> io::Result<Vec<Link>> {
        Ok(all(self.handle.link().get().execute()).await?.iter().map(link_of).collect())
    }

    /// The interface of that name.
    pub async fn link(&self, name: &str) -> io::Result<Option<Link>> {
        Ok(self.links().await?.into_iter().find(|link| link.name == name))
    }

    /// Sets size limits of an interface: bytes of a packet and of a super-packet, and packets of its queue.
    pub async fn set_link(&self, index: u32, mtu: u32, gso_max_size: u32, queue_packets: u32) -> io::Result<()> {
        let message = LinkUnspec::new_with_index(index)
            .mtu(mtu)
            .append_extra_attribute(LinkAttribute::GsoMaxSize(gso_max_size))
            .append_extra_attribute(LinkAttribute::TxQueueLen(queue_packets))
            .build();
        self.handle.link().set(message).execute().await.map_err(to_io)
    }

    /// Sets an interface up.
    pub async fn set_up(&self, index: u32) -> io::Result<()> {
        self.handle.link().set(LinkUnspec::new_with_index(index).up().build()).execute().await.map_err(to_io)
    }

    /// Removes an interface.
    pub async fn remove_link(&self, index: u32) -> io::Result<()> {
        self.handle.link().del(index).execute().await.map_err(to_io)
    }

    /// All addresses.
    pub async fn addresses(&self) -> io::Result<Vec<Address>> {
        Ok(all(self.handle.address().get().execute()).await?.iter().filter_map(address_of).collect())
    }

    /// Adds an address, ready at once: nobody else can have it on a link without neighbours.
    pub async fn add_address(&self, index: u32, block: Block) -> io::Result<()> {
        let mut request = self.handle.address().add(index, block.address, block.bits);
        request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        request.execute().await.map_err(to_io)
    }

    /// Routes of one table, of both families.
    pub async fn routes(&self, table: u32) -> io::Result<Vec<Route>> {
        Ok(self.all_routes().await?.into_iter().filter(|route| route.table == table).collect())
    }

    /// Routes of all tables, of both families.
    pub async fn all_routes(&self) -> io::Result<Vec<Route>> {
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut query = RouteMessage::default();
            query.header.address_family = family;
            let found = all(self.handle.route().get(query).execute()).await?;
            routes.extend(found.iter().filter_map(route_of));
        }
        Ok(routes)
    }

    /// Adds a route, in the place of another one to the same destination through the same interface.
    pub async fn put_route(&self, route: &Route) -> io::Result<()> {
        let is_other = |found: &Route| (found.destination, found.index) == (route.destination, route.index);
        let replaces = self.routes(route.table).await?.iter().any(is_other);
        let request = self.handle.route().add(route_message(route));
        let request = if replaces { request.replace() } else { request };
        request.execute().await.map_err(to_io)
    }

    /// Policy rules of both families, in the order in which they are asked.
    pub async fn rules(&self) -> io::Result<Vec<ListedRule>> {
        let mut rules = Vec::new();
        for version in [IpVersion::V4, IpVersion::V6] {
            match all(self.handle.rule().get(version).execute()).await {
                Ok(found) => rules.extend(found.iter().map(listed_rule)),
                // A kernel without IPv6 has no rules for it.
                Err(error) if matches!(error.raw_os_error(), Some(AFNOSUPPORT | OPNOTSUPP)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(rules)
    }

    /// Adds a rule.
    pub async fn add_rule(&self, rule: &Rule) -> io::Result<()> {
        let mut request = self.handle.rule().add();
        *request.message_mut() = rule_message(rule);
        request.execute().await.map_err(to_io)
    }

    /// Removes a rule.
    pub async fn remove_rule(&self, rule: &Rule) -> io::Result<()> {
        self.handle.rule().del(rule_message(rule)).execute().await.map_err(to_io)
    }
}

const AFNOSUPPORT: i32 = nix::errno::Errno::EAFNOSUPPORT as i32;
const OPNOTSUPP: i32 = nix::errno::Errno::EOPNOTSUPP as i32;

async fn all<T>(stream: impl Stream<Item = Result<T, rtnetlink::Error>>) -> io::Result<Vec<T>> {
    stream.try_collect().await.map_err(to_io)
}

fn to_io(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other.to_string()),
    }
}

fn link_of(message: &LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        mtu: 0,
        gso_max_size: 0,
        queue_packets: 0,
        up: message.header.flags.contains(LinkFlags::Up),
        running: message.header.flags.contains(LinkFlags::Running),
        operational: message.attributes.contains(&LinkAttribute::OperState(State::Up)),
        loopback: message.header.flags.contains(LinkFlags::Loopback),
        tun: false,
        veth: false,
        bridge: false,
        leads_nowhere: false,
        controller: None,
        ethernet: message.header.link_layer_type == LinkLayerType::Ether,
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::GsoMaxSize(size) => link.gso_max_size = *size,
            LinkAttribute::TxQueueLen(packets) => link.queue_packets = *packets,
            LinkAttribute::Controller(index) => link.controller = Some(*index),
            LinkAttribute::LinkInfo(info) => {
                let is = |kind: InfoKind| info.contains(&LinkInfo::Kind(kind));
                link.tun = is(InfoKind::Tun);
                link.veth = is(InfoKind::Veth);
                link.bridge = is(InfoKind::Bridge);
                link.leads_nowhere = is(InfoKind::Tun) || link.veth || is(InfoKind::Dummy);
            }
            _ => {}
        }
    }
    link
}

fn address_of(message: &AddressMessage) -> Option<Address> {
    let find = |local: bool| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(address) if local => Some(*address),
            AddressAttribute::Address(address) if !local => Some(*address),
            _ => None,
        })
    };
    Some(Address {
        index: message.header.index,
        // On a link with a peer, `Address` is the peer's.
        address: find(true).or_else(|| find(false))?,
        bits: message.header.prefix_len,
        link_local: message.header.scope != AddressScope::Universe,
        tentative: message.header.flags.intersects(AddressHeaderFlags::Tentative | AddressHeaderFlags::Dadfailed),
    })
}

fn to_ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(*v6)),
        _ => None,
    }
}

fn from_ip(address: IpAddr) -> RouteAddress {
    match address {
        IpAddr::V4(v4) => RouteAddress::Inet(v4),
        IpAddr::V6(v6) => RouteAddress::Inet6(v6),
    }
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn route_of(message: &RouteMessage) -> Option<Route> {
    let header = &message.header;
    if header.kind != RouteType::Unicast {
        return None;
    }
    let any: IpAddr = match header.address_family {
        AddressFamily::Inet => std::net::Ipv4Addr::UNSPECIFIED.into(),
        AddressFamily::Inet6 => std::net::Ipv6Addr::UNSPECIFIED.into(),
        _ => return None,
    };
    let mut destination = Block { address: any, bits: header.destination_prefix_length };
    let mut route = Route { table: u32::from(header.table), destination, index: 0, gateway: None, source: None };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Table(table) => route.table = *table,
            RouteAttribute::Oif(index) => route.index = *index,
            RouteAttribute::Destination(address) => destination.address = to_ip(address)?,
            RouteAttribute::Gateway(address) => route.gateway = to_ip(address),
            RouteAttribute::PrefSource(address) => route.source = to_ip(address),
            _ => {}
        }
    }
    route.destination = destination;
    (route.index != 0).then_some(route)
}

fn route_message(route: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(route.destination.address);
    message.header.destination_prefix_length = route.destination.bits;
    // Tables above 255 are named by the attribute alone.
    message.header.table = u8::try_from(route.table).unwrap_or(0);
    message.header.protocol = RouteProtocol::Static;
    message.header.scope = if route.destination.address.is_ipv4() { RouteScope::Link } else { RouteScope::Universe };
    message.header.kind = RouteType::Unicast;
    message.attributes = vec![RouteAttribute::Table(route.table), RouteAttribute::Oif(route.index)];
    if route.destination.bits > 0 {
        message.attributes.push(RouteAttribute::Destination(from_ip(route.destination.address)));
    }
    if let Some(gateway) = route.gateway {
        message.attributes.push(RouteAttribute::Gateway(from_ip(gateway)));
    }
    if let Some(source) = route.source {
        message.attributes.push(RouteAttribute::PrefSource(from_ip(source)));
    }
    message
}

fn listed_rule(message: &RuleMessage) -> ListedRule {
    let header = &message.header;
    let mut listed = ListedRule { priority: 0, is_v4: header.family == AddressFamily::Inet, table: None, rule: None };
    let mut rule = Rule { priority: 0, from: None, to: None, source_port: None, table: u32::from(header.table) };
    let mut is_plain = !header.flags.contains(RuleFlags::Invert);
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Priority(priority) => rule.priority = *priority,
            RuleAttribute::Table(table) => rule.table = *table,
            RuleAttribute::Source(address) => rule.from = Some(Block { address: *address, bits: header.src_len }),
            RuleAttribute::Destination(address) => rule.to = Some(Block { address: *address, bits: header.dst_len }),
            RuleAttribute::SourcePortRange(ports) if ports.start == ports.end => rule.source_port = Some(ports.start),
            // The kernel says these of every rule.
            RuleAttribute::Protocol(_) | RuleAttribute::SuppressPrefixLen(u32::MAX) | RuleAttribute::Other(_) => {}
            _ => is_plain = false,
        }
    }
    listed.priority = rule.priority;
    let is_lookup = header.action == RuleAction::ToTable;
    listed.table = is_lookup.then_some(rule.table);
    listed.rule = (is_lookup && is_plain).then_some(rule);
    listed
}

fn rule_message(rule: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = if rule.is_v4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![RuleAttribute::Table(rule.table), RuleAttribute::Priority(rule.priority)];
    if let Some(from) = rule.from {
        message.header.src_len = from.bits;
        message.attributes.push(RuleAttribute::Source(from.address));
    }
    if let Some(to) = rule.to {
        message.header.dst_len = to.bits;
        message.attributes.push(RuleAttribute::Destination(to.address));
    }
    let port = |port| RuleAttribute::SourcePortRange(RulePortRange { start: port, end: port });
    message.attributes.extend(rule.source_port.map(port));
    message
}
