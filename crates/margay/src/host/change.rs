//! What `up` changes on a host, as data: each change says what it is, does it, looks whether it is there, and undoes it
//! (DESIGN §3.10).

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use margay_core::Ranges;
use serde::{Deserialize, Serialize};

use super::guard::{self, Opening};
use super::netlink::{Block, Link, ListedRule, Netlink, Route, Rule};
use super::resolv_conf::{self, Before, Undone};
use super::{plan, resolved, responder_way, rule_place, sysctl};
use crate::agent::{INTERFACE, RESPONDER_INTERFACE};

/// One change. It carries what is needed to undo it, since the undoing process is another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Change {
    /// A persistent TUN: it outlives the agent, and flows with it.
    Tun {
        /// Its name.
        interface: String,
    },
    /// A pair of interfaces, whose other end is in the network namespace that the responder answers in. It goes with
    /// that.
    Veth {
        /// The name of the end here.
        interface: String,
        /// The address of the other end.
        responder: Ipv4Addr,
    },
    /// Sizes of the TUN.
    Sizes {
        /// Which.
        interface: String,
        /// Largest packet in bytes.
        mtu: u32,
        /// Largest super-packet in bytes: what one UDP send carries.
        gso_max_size: u32,
        /// Packets that wait for the agent at most. Changes that earlier versions have noted say nothing of the queue.
        #[serde(default)]
        queue_packets: u32,
    },
    /// A parameter of one of Margay's interfaces; it goes with it.
    Parameter {
        /// Path under `/proc/sys`.
        key: String,
        /// What it is set to.
        value: String,
    },
    /// An address of such an interface.
    Address {
        /// Which.
        interface: String,
        /// The address.
        block: Block,
    },
    /// Such an interface set up.
    Up {
        /// Which.
        interface: String,
    },
    /// A route to such an interface.
    Route {
        /// Which.
        interface: String,
        /// Table.
        table: u32,
        /// Where to.
        destination: Block,
        /// Source address of what has none yet.
        source: Option<IpAddr>,
    },
    /// A policy rule.
    Rule {
        /// Packets from this address, where there is one,
        #[serde(default)]
        from: Option<IpAddr>,
        /// or from all that begin with so many bits of it,
        #[serde(default)]
        from_bits: Option<u8>,
        /// to these, where there are some,
        #[serde(default)]
        to: Option<Block>,
        /// and from this port, where there is one,
        #[serde(default)]
        source_port: Option<u16>,
        /// ask this table,
        table: u32,
        /// in this place, or before whoever is there (see [`rule_place`]).
        priority: u32,
    },
    /// Forwarding for the whole host, where the kernel cannot be told of one interface alone.
    Forwarding {
        /// Path under `/proc/sys`.
        key: String,
        /// What it was before.
        before: String,
    },
    /// A table of nftables that drops what bears a virtual address at a card.
    Guard {
        /// From where virtual addresses are reached all the same.
        inside: Vec<Opening>,
        /// The virtual addresses of either family.
        #[serde(default = "usual_networks")]
        networks: [Block; 2],
        /// What bears the tag of a box is dropped as well.
        #[serde(default)]
        drops_tags: bool,
    },
    /// A port that the kernel no longer gives out by itself.
    ReservedPort {
        /// The port.
        port: u16,
        /// The list of such ports before.
        before: String,
    },
    /// The responder as the one server.
    ResolvConf {
        /// Which file.
        path: PathBuf,
        /// The responder.
        server: IpAddr,
        /// What was there.
        before: Before,
    },
    /// The zone sent to the agent's responder by systemd-resolved.
    Resolved {
        /// The TUN.
        interface: String,
        /// The responder.
        server: IpAddr,
        /// The zone.
        zone: String,
    },
}

/// Whether a change is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// As it shall be.
    Present,
    /// Not at all.
    Absent,
    /// Otherwise; how.
    Differs(String),
}

impl State {
    fn when(present: bool) -> Self {
        if present { Self::Present } else { Self::Absent }
    }
}

/// A change that the host refused.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {error}")]
pub struct Refused {
    /// What was tried.
    pub what: String,
    /// What the system said.
    pub error: io::Error,
    /// What to do; empty when there is nothing but the error itself.
    pub advice: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tun { interface } => write!(f, "make the virtual interface {interface} (a persistent TUN)"),
            Self::Veth { interface, .. } => write!(
                f,
                "make the interface {interface}, whose other end is in a network namespace that the DNS responder \
                 answers in"
            ),
            Self::Sizes { interface, mtu, gso_max_size, queue_packets } => {
                write!(f, "set {interface} to MTU {mtu}, gso_max_size {gso_max_size}, txqueuelen {queue_packets}")
            }
            Self::Parameter { key, value } => write!(f, "set {} to {value}", key.replace('/', ".")),
            Self::Address { interface, block } => write!(f, "give {interface} the address {block}"),
            Self::Up { interface } => write!(f, "set {interface} up"),
            Self::Route { interface, table, destination, source } => {
                write!(f, "route {destination} to {interface}")?;
                if *table != MAIN_TABLE {
                    write!(f, " in table {table}")?;
                }
                source.map_or(Ok(()), |source| write!(f, ", source {source}"))
            }
            Self::Rule { from, from_bits, to, source_port, table, priority } => {
                f.write_str("let packets")?;
                source_port.map_or(Ok(()), |port| write!(f, " from port {port}"))?;
                from.map_or(Ok(()), |from| {
                    write!(f, "{} {from}", if source_port.is_some() { " of" } else { " from" })
                })?;
                from_bits.map_or(Ok(()), |bits| write!(f, "/{bits}"))?;
                to.map_or(Ok(()), |to| write!(f, " to {to}"))?;
                write!(f, " ask table {table} (rule {priority}, before those of others): ")?;
                f.write_str(match (to, source_port, from_bits) {
                    (Some(_), _, _) => "a VPN does not get them",
                    (None, Some(_), _) => "the responder's answers to containers go back to them",
                    (None, None, None) => "answers to clients go to sal0",
                    (None, None, Some(_)) => "what passes boxes comes back to sal0",
                })
            }
            Self::Forwarding { key, .. } => write!(
                f,
                "set {} to 1, for the whole host: this kernel has no `force_forwarding` for {INTERFACE} alone; router \
                 advertisements are taken only where accept_ra is 2 then",
                key.replace('/', ".")
            ),
            Self::Guard { inside, .. } => {
                write!(f, "add the nftables table {}: it drops what bears a virtual address at a card", guard::TABLE)?;
                inside.iter().try_for_each(|opening| write!(f, "; not at {opening}"))
            }
            Self::ReservedPort { port, .. } => {
                write!(f, "add {port} to net.ipv4.ip_local_reserved_ports: the kernel must not give it out by itself")
            }
            Self::ResolvConf { path, server, before } => match before {
                Before::Link(target) => write!(
                    f,
                    "put a file in the place of the link {} -> {}, with nameserver {server} alone; the responder \
                     there asks the servers that are there now for all other names",
                    path.display(),
                    target.display()
                ),
                _ => write!(
                    f,
                    "make {server} the one nameserver of {}; the responder there asks the servers that are there now \
                     for all other names",
                    path.display()
                ),
            },
            Self::Resolved { interface, server, zone } => {
                write!(f, "tell systemd-resolved to ask {server} on {interface} for names under {zone}")
            }
        }
    }
}

/// The kernel's main routing table.
pub const MAIN_TABLE: u32 = 254;
/// Of a journal that says nothing else.
fn usual_networks() -> [Block; 2] {
    plan::networks(Ranges::USUAL)
}

/// Link-local, so that it means nothing elsewhere.
const NEXT_HOP_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// Bits of an address that a rule is about.
const fn bits_of(address: IpAddr, bits: Option<u8>) -> u8 {
    match (bits, address) {
        (Some(bits), _) => bits,
        (None, IpAddr::V4(_)) => 32,
        (None, IpAddr::V6(_)) => 128,
    }
}

impl Change {
    /// The policy rule that it makes.
    const fn rule(&self) -> Option<Rule> {
        match self {
            Self::Rule { from, from_bits, to, source_port, table, priority } => {
                let from = match from {
                    Some(address) => Some(Block { address: *address, bits: bits_of(*address, *from_bits) }),
                    None => None,
                };
                Some(Rule { priority: *priority, from, to: *to, source_port: *source_port, table: *table })
            }
            _ => None,
        }
    }

    /// Whether the agent makes it, while it runs: it lives as long as the responder, and no longer.
    pub fn is_agents(&self) -> bool {
        match self {
            Self::Veth { .. } => true,
            Self::Parameter { key, .. } => key.split('/').any(|part| part == RESPONDER_INTERFACE),
            Self::Address { interface, .. }
            | Self::Up { interface }
            | Self::Route { interface, .. }
            | Self::Resolved { interface, .. } => interface == RESPONDER_INTERFACE,
            _ => false,
        }
    }

    /// Whether it is a file of ours that says other things than the one that it stands for by now.
    pub fn is_behind_its_link(&self) -> bool {
        match self {
            Self::ResolvConf { path, before: Before::Link(_), .. } => {
                resolv_conf::look(path).is_ok_and(|now| resolv_conf::is_ours(&now.effective))
            }
            _ => false,
        }
    }

    /// Whether nobody tells of somebody else's change of it: it has to be looked at.
    pub const fn is_silent(&self) -> bool {
        matches!(
            self,
            Self::Parameter { .. } | Self::Forwarding { .. } | Self::ReservedPort { .. } | Self::ResolvConf { .. }
        )
    }

    /// Whether it lives in the kernel and is gone after a reboot.
    pub const fn dies_with_boot(&self) -> bool {
        !matches!(self, Self::ResolvConf { .. })
    }

    /// Whether it holds what was there before: an older memory of it is the better one.
    pub const fn remembers(&self) -> bool {
        matches!(self, Self::Forwarding { .. } | Self::ReservedPort { .. } | Self::ResolvConf { .. })
    }

    /// Whether the agent is of use without it: names can be resolved otherwise, the port is rarely given out by
    /// chance, and not every network has strangers on it.
    pub const fn is_optional(&self) -> bool {
        matches!(self, Self::ResolvConf { .. } | Self::Resolved { .. } | Self::ReservedPort { .. } | Self::Guard { .. })
    }

    /// Whether `other` is about the same thing, perhaps with another value.
    pub fn is_same_thing(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Parameter { key: a, .. }, Self::Parameter { key: b, .. }) => a == b,
            (Self::Address { block: a, .. }, Self::Address { block: b, .. }) => a == b,
            (Self::Up { interface: a }, Self::Up { interface: b })
            | (Self::Resolved { interface: a, .. }, Self::Resolved { interface: b, .. }) => a == b,
            (Self::Route { table: a, destination: of_a, .. }, Self::Route { table: b, destination: of_b, .. }) => {
                (a, of_a) == (b, of_b)
            }
            (
                Self::Rule { from: a, from_bits: bits_a, to: to_a, source_port: of_a, .. },
                Self::Rule { from: b, from_bits: bits_b, to: to_b, source_port: of_b, .. },
            ) => (a, bits_a, to_a, of_a) == (b, bits_b, to_b, of_b),
            (Self::ReservedPort { port: a, .. }, Self::ReservedPort { port: b, .. }) => a == b,
            // Another responder comes on top of the first, and remembers it: they are undone one after the other.
            (Self::ResolvConf { server: a, .. }, Self::ResolvConf { server: b, .. }) => a == b,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }

    /// Whether an interrupted `up` has made only a part of it, so that what is there now is not what was there before.
    pub fn is_half_made(&self) -> bool {
        match self {
            // What cannot be read cannot be mended either; doing the change says why.
            Self::ResolvConf { path, server, before } => resolv_conf::is_torn(path, before, *server).unwrap_or(false),
            _ => false,
        }
    }

    fn refused(&self, error: io::Error) -> Refused {
        let advice = match (self, error.kind()) {
            (Self::ResolvConf { .. }, _) => resolv_conf::advice(&error).into(),
            (Self::Guard { networks: [v4, v6], .. }, _) => format!(
                "until it is there, whoever is on a network of this host can send to virtual addresses: let this \
                 host's firewall drop what comes for {v4} and {v6}, or from there"
            ),
            (_, io::ErrorKind::PermissionDenied) => "run as root; in a container give it CAP_NET_ADMIN".into(),
            (Self::Rule { .. } | Self::Route { .. }, _) => {
                "the kernel needs policy routing (CONFIG_IP_MULTIPLE_TABLES, CONFIG_IPV6_MULTIPLE_TABLES)".into()
            }
            _ => String::new(),
        };
        Refused { what: self.to_string(), error, advice }
    }

    /// Looks at the host.
    pub async fn state(&self, net: &Netlink) -> Result<State, Refused> {
        self.look(net).await.map_err(|error| Refused { what: format!("see whether to {self}"), ..self.refused(error) })
    }

    async fn look(&self, net: &Netlink) -> io::Result<State> {
        match self {
            Self::Tun { interface } => Ok(State::when(net.link(interface).await?.is_some())),
            Self::Veth { interface, .. } => Ok(State::when(net.link(interface).await?.is_some_and(|link| link.veth))),
            Self::Sizes { interface, mtu, gso_max_size, queue_packets } => Ok(match net.link(interface).await? {
                None => State::Absent,
                Some(Link { mtu: has_mtu, gso_max_size: has_gso, queue_packets: has_queue, .. })
                    if [has_mtu, has_gso, has_queue] == [*mtu, *gso_max_size, *queue_packets] =>
                {
                    State::Present
                }
                Some(Link { mtu, gso_max_size, queue_packets, .. }) => {
                    State::Differs(format!("MTU {mtu}, gso_max_size {gso_max_size}, txqueuelen {queue_packets}"))
                }
            }),
            Self::Parameter { key, value } => Ok(match sysctl::read(key)? {
                None => State::Absent,
                Some(now) if now == *value => State::Present,
                Some(now) => State::Differs(now),
            }),
            Self::Address { interface, block } => {
                let Some(link) = net.link(interface).await? else { return Ok(State::Absent) };
                let wanted = |found: &super::netlink::Address| {
                    (found.index, found.address, found.bits) == (link.index, block.address, block.bits)
                };
                Ok(State::when(net.addresses().await?.iter().any(wanted)))
            }
            Self::Up { interface } => Ok(State::when(net.link(interface).await?.is_some_and(|link| link.up))),
            Self::Route { interface, table, destination, source } => {
                let Some(link) = net.link(interface).await? else { return Ok(State::Absent) };
                let wanted = route(*table, *destination, link.index, *source);
                Ok(State::when(net.routes(*table).await?.contains(&wanted)))
            }
            Self::Rule { .. } => {
                let Some(wanted) = self.rule() else { return Ok(State::Absent) };
                let rules = net.rules().await?;
                let place = rule_place::place(&wanted, &rules);
                let found: Vec<u32> = copies(&wanted, &rules).map(|copy| copy.priority).collect();
                Ok(match found[..] {
                    [] => State::Absent,
                    [only] if only == place => State::Present,
                    _ => State::Differs(format!("{found:?} are its places, and others are before it, or were")),
                })
            }
            Self::Forwarding { key, .. } => Ok(match sysctl::read(key)? {
                None => State::Absent,
                Some(now) if now == "1" => State::Present,
                Some(now) => State::Differs(now),
            }),
            Self::Guard { inside, networks, drops_tags } => guard::state(inside, *networks, *drops_tags),
            Self::ReservedPort { port, .. } => {
                let list = sysctl::read(sysctl::RESERVED_PORTS)?.unwrap_or_default();
                Ok(State::when(sysctl::has_port(&list, *port)))
            }
            Self::ResolvConf { .. } if self.is_half_made() => {
                Ok(State::Differs("half-written by an interrupted `margay up`".into()))
            }
            Self::ResolvConf { path, server, before } => resolv_conf::state(path, before, *server),
            Self::Resolved { interface, server, zone } => resolved::state(interface, *server, zone),
        }
    }

    /// Does it. Done already is well, too.
    pub async fn apply(&self, net: &Netlink) -> Result<(), Refused> {
        if let Self::Tun { interface } = self {
            return margay_datapath::tun::create_persistent(interface).map_err(|error| Refused {
                what: self.to_string(),
                error: io::Error::other(error.to_string()),
                advice: String::new(),
            });
        }
        match self.act(net).await {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            result => result.map_err(|error| self.refused(error)),
        }
    }

    async fn act(&self, net: &Netlink) -> io::Result<()> {
        match self {
            // Made by the datapath, which knows what flags it opens it with.
            Self::Tun { .. } => Ok(()),
            Self::Veth { interface, responder } => responder_way::make(net, interface, *responder).await,
            Self::Sizes { interface, mtu, gso_max_size, queue_packets } => {
                net.set_link(need(net, interface).await?.index, *mtu, *gso_max_size, *queue_packets).await
            }
            Self::Parameter { key, value } => sysctl::write(key, value),
            Self::Address { interface, block } => net.add_address(need(net, interface).await?.index, *block).await,
            Self::Up { interface } => net.set_up(need(net, interface).await?.index).await,
            Self::Route { interface, table, destination, source } => {
                let index = need(net, interface).await?.index;
                net.put_route(&route(*table, *destination, index, *source)).await
            }
            Self::Rule { .. } => {
                let Some(wanted) = self.rule() else { return Ok(()) };
                let rules = net.rules().await?;
                let wanted = Rule { priority: rule_place::place(&wanted, &rules), ..wanted };
                // The new one first: packets are never without.
                match net.add_rule(&wanted).await {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                    _ => {}
                }
                for copy in copies(&wanted, &rules).filter(|copy| copy.priority != wanted.priority) {
                    gone_is_well(net.remove_rule(&copy).await)?;
                }
                Ok(())
            }
            Self::Forwarding { key, .. } => sysctl::write(key, "1"),
            Self::Guard { inside, networks, drops_tags } => guard::apply(inside, *networks, *drops_tags),
            Self::ReservedPort { port, .. } => {
                let list = sysctl::read(sysctl::RESERVED_PORTS)?.unwrap_or_default();
                if sysctl::has_port(&list, *port) {
                    return Ok(());
                }
                sysctl::write(sysctl::RESERVED_PORTS, &sysctl::with_port(&list, *port))
            }
            Self::ResolvConf { path, server, before } => resolv_conf::apply(path, before, *server),
            Self::Resolved { interface, server, zone } => resolved::apply(interface, *server, zone),
        }
    }

    /// Undoes it; gives a remark where the host is not quite as before, since somebody else has changed it meanwhile.
    pub async fn undo(&self, net: &Netlink) -> Result<Option<String>, Refused> {
        let undone = self.act_back(net).await;
        undone.map_err(|error| Refused { what: format!("undo: {self}"), ..self.refused(error) })
    }

    async fn act_back(&self, net: &Netlink) -> io::Result<Option<String>> {
        match self {
            Self::Tun { interface } => match net.link(interface).await? {
                Some(link) => gone_is_well(net.remove_link(link.index).await),
                None => Ok(None),
            },
            Self::Rule { .. } => {
                let Some(rule) = self.rule() else { return Ok(None) };
                for copy in copies(&rule, &net.rules().await?) {
                    gone_is_well(net.remove_rule(&copy).await)?;
                }
                Ok(None)
            }
            Self::Forwarding { key, before } => {
                if before != "1" && sysctl::read(key)?.is_some_and(|now| now == "1") {
                    sysctl::write(key, before)?;
                }
                Ok(None)
            }
            Self::Guard { .. } => guard::undo().map(|()| None),
            Self::ReservedPort { port, before } => {
                let now = sysctl::read(sysctl::RESERVED_PORTS)?.unwrap_or_default();
                if sysctl::has_port(before, *port) || !sysctl::has_port(&now, *port) {
                    return Ok(None);
                }
                sysctl::write(sysctl::RESERVED_PORTS, &sysctl::without_port(&now, *port))?;
                Ok(None)
            }
            Self::ResolvConf { path, server, before } => Ok(match resolv_conf::undo(path, before, *server)? {
                Undone::NothingToDo | Undone::Restored => None,
                Undone::OnlyOurs => {
                    Some(format!("{} was changed since `up`: only the agent's line was taken out", path.display()))
                }
                Undone::Foreign => Some(format!("{} was replaced since `up` and left as it is", path.display())),
            }),
            Self::Resolved { interface, .. } => resolved::undo(interface).map(|()| None),
            // They go with the TUN, which is removed last, or with the responder.
            Self::Veth { .. }
            | Self::Sizes { .. }
            | Self::Parameter { .. }
            | Self::Address { .. }
            | Self::Up { .. }
            | Self::Route { .. } => Ok(None),
        }
    }
}

/// A route to the TUN. For IPv6 the kernel keeps a neighbour for each next hop even there, of some thousand for the
/// whole host: so all goes to one, an address that nobody has and nobody is asked for.
fn route(table: u32, destination: Block, index: u32, source: Option<IpAddr>) -> Route {
    let gateway = destination.address.is_ipv6().then_some(NEXT_HOP_V6.into());
    Route { table, destination, index, gateway, source }
}

/// A rule as it stands now, wherever it does.
fn copies(wanted: &Rule, rules: &[ListedRule]) -> impl Iterator<Item = Rule> {
    let is_copy = |found: &Rule| Rule { priority: wanted.priority, ..*found } == *wanted;
    rules.iter().filter_map(|listed| listed.rule).filter(is_copy)
}

pub(super) fn gone_is_well(result: io::Result<()>) -> io::Result<Option<String>> {
    match result {
        Err(error) if !is_gone(&error) => Err(error),
        _ => Ok(None),
    }
}

fn is_gone(error: &io::Error) -> bool {
    use nix::errno::Errno;
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ENOENT | Errno::ENODEV | Errno::ESRCH))
}

async fn need(net: &Netlink, interface: &str) -> io::Result<Link> {
    net.link(interface).await?.ok_or_else(|| io::Error::other(format!("there is no interface {interface}")))
}

#[cfg(test)]
#[path = "change_test.rs"]
mod test;
