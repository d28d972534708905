//! This host: what `up` changes on it, and how that is undone (DESIGN §3.10).
//!
//! [`plan`] looks at the host and decides; [`change`] has the changes as data; [`journal`] remembers them on disk
//! before they are made.

#[cfg(test)]
pub mod by_hand;
pub mod card;
pub mod change;
pub mod guard;
mod journal;
pub mod judge;
pub mod neighbour;
pub mod netlink;
mod plan;
mod prepared;
mod program;
pub mod resolv_conf;
mod resolved;
pub mod responder_way;
pub mod route;
pub mod rule_place;
pub mod sysctl;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use margay_control::{StateDir, StateError};
use margay_core::Ranges;
use margay_datapath::segments::Segment;
use nix::ifaddrs::{InterfaceAddress, getifaddrs};

use self::change::{Change, Refused, State};
use self::guard::Opening;
use self::journal::{Journal, JournalError};
use self::netlink::Netlink;
use crate::config::Config;

pub use self::plan::{Plan, RESOLV_CONF, TABLE, plan};
pub use self::prepared::Prepared;
pub use self::program::{Programs, programs};

/// The host cannot be prepared or restored.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// This user may not.
    #[error("this needs root: {what}; run it with sudo, or in a container with CAP_NET_ADMIN")]
    NotRoot {
        /// What.
        what: String,
    },
    /// The kernel has no TUN.
    #[error(
        "there is no /dev/net/tun: load the module (`modprobe tun`), or give the container the device (`--device \
         /dev/net/tun`)"
    )]
    NoTun,
    /// Another program's interface has the name.
    #[error(
        "the interface {0} is there and is not Margay's: remove it, or find out whose it is (`ip -d link show {0}`)"
    )]
    InterfaceTaken(String),
    /// The kernel's tables cannot be read.
    #[error("cannot read this host's {what}: {error}")]
    Look {
        /// Which.
        what: &'static str,
        /// What the system said.
        error: io::Error,
    },
    /// A change was refused; all that this run has done is undone.
    #[error("{error}{advice}; nothing was left behind")]
    Refused {
        /// Which, and why.
        error: Refused,
        /// What to do.
        advice: String,
    },
    /// Some of it cannot be undone.
    #[error("not all could be undone: {}; run `margay down` again when the cause is mended", .0.join("; "))]
    NotUndone(Vec<String>),
    /// An earlier `up` had other directories.
    #[error(
        "this host is prepared already, for an agent whose state is in {}; `margay down` first, then `margay up`",
        .0.display()
    )]
    PreparedOtherwise(std::path::PathBuf),
    /// An earlier `up` had other virtual addresses.
    #[error(
        "this host is prepared already, with the virtual addresses {before}, and [ranges] in the configuration now has \
         others ({now}); `margay down` first, then `margay up`: connections of this host end"
    )]
    PreparedWithOtherRanges {
        /// Those of the earlier `up`.
        before: Ranges,
        /// Those of the configuration.
        now: Ranges,
    },
    /// Addresses that Margay needs are in use.
    #[error(
        "this host has addresses of its own among Margay's virtual ones, {ranges}: {clash}; names would be looked for \
         there. Take it away, or give Margay other ranges: [ranges] in margay.toml"
    )]
    Clash {
        /// What is in the way.
        clash: String,
        /// The virtual addresses.
        ranges: Ranges,
    },
    /// The note of where the journal lies.
    #[error("cannot write down in /run/margay where this host's state is: {0}")]
    Prepared(io::Error),
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The state directory.
    #[error(transparent)]
    State(#[from] StateError),
}

/// The kernel's table of this host's own addresses.
const LOCAL_TABLE: u32 = 255;
/// How often, and how many times, the interface is looked at while it comes up.
const RUNNING_LOOK: std::time::Duration = std::time::Duration::from_millis(5);
const RUNNING_LOOKS: usize = 400;

fn look(what: &'static str) -> impl Fn(io::Error) -> HostError {
    move |error| HostError::Look { what, error }
}

fn need_root(what: &str) -> Result<(), HostError> {
    if nix::unistd::geteuid().is_root() { Ok(()) } else { Err(HostError::NotRoot { what: what.to_owned() }) }
}

/// Carries out a plan: the journal first, then each change. What is there already costs nothing.
///
/// # Errors
///
/// The host refuses a change; what this run did is undone then.
pub async fn apply(config: &Config, plan: &Plan, mut progress: impl FnMut(&str)) -> Result<(), HostError> {
    need_root("`margay up` changes interfaces and routes")?;
    if !std::path::Path::new("/dev/net/tun").exists() {
        return Err(HostError::NoTun);
    }
    // Two journals would each take the other's changes for what was there before.
    Prepared::load().map_or(Ok(()), |prepared| prepared.check(config))?;
    let net = Netlink::connect().map_err(look("interfaces"))?;
    let mut journal = Journal::open(StateDir::open(&config.host.state_dir)?)?;
    let before = journal.changes().to_vec();
    let changes: Vec<Change> = plan.changes().iter().filter(|change| !change.is_agents()).cloned().collect();
    journal.write(merge(&before, &changes))?;
    Prepared::of(config).save().map_err(HostError::Prepared)?;
    // What an interrupted `up` has left half-written, the plan takes for what was there before. The journal knows
    // better.
    let better = |change: &&Change| before.iter().find(|known| known.is_same_thing(change) && known.is_half_made());
    let mut done: Vec<&Change> = Vec::new();
    for change in changes.iter().map(|change| better(&change).unwrap_or(change)) {
        let made = match change.state(&net).await {
            Ok(State::Present) => continue,
            Ok(_) => change.apply(&net).await,
            Err(error) => Err(error),
        };
        match made {
            Ok(()) => {
                progress(&change.to_string());
                done.push(change);
            }
            Err(refused) if change.is_optional() => progress(&format!("warning: {refused}")),
            Err(refused) => {
                done.push(change);
                let left = undo_all(&net, &done).await.1;
                if left.is_empty() {
                    if before.is_empty() {
                        journal.clear()?
                    } else {
                        journal.write(before)?
                    }
                    let advice =
                        if refused.advice.is_empty() { String::new() } else { format!("; {}", refused.advice) };
                    return Err(HostError::Refused { error: refused, advice });
                }
                return Err(HostError::NotUndone([vec![refused.to_string()], left].concat()));
            }
        }
    }
    Ok(())
}

/// What an earlier `up` found is what `down` must bring back.
fn merge(before: &[Change], changes: &[Change]) -> Vec<Change> {
    let mut noted = before.to_vec();
    for change in changes {
        match noted.iter().position(|known| known.is_same_thing(change)) {
            Some(at) if !change.remembers() => noted[at] = change.clone(),
            Some(_) => {}
            None => noted.push(change.clone()),
        }
    }
    noted
}

/// Has nftables drop what bears a virtual address at a card, but for these; or, for `None`, no more.
///
/// # Errors
///
/// The host refuses it, or the journal cannot be written.
pub async fn set_guard(config: &Config, inside: Option<Vec<Opening>>) -> Result<(), HostError> {
    let mut journal = Journal::open(StateDir::open(&config.host.state_dir)?)?;
    let before = journal.changes().to_vec();
    let known = before.iter().find(|change| matches!(change, Change::Guard { .. }));
    let networks = plan::networks(config.ranges());
    let wanted = inside.map(|inside| Change::Guard { inside, networks, drops_tags: config.host.boxes });
    let refused = |error: Refused| HostError::Refused { advice: format!("; {}", error.advice), error };
    let net = Netlink::connect().map_err(look("interfaces"))?;
    match (wanted, known) {
        (None, None) => Ok(()),
        (None, Some(known)) => {
            known.undo(&net).await.map_err(refused)?;
            Ok(journal.write(before.iter().filter(|change| *change != known).cloned().collect())?)
        }
        (Some(wanted), _) => {
            if known == Some(&wanted) && wanted.state(&net).await.map_err(refused)? == State::Present {
                return Ok(());
            }
            journal.write(merge(&before, std::slice::from_ref(&wanted)))?;
            wanted.apply(&net).await.map_err(refused)
        }
    }
}

/// Whether an earlier `up` has prepared this host, and no `down` came since.
///
/// # Errors
///
/// The journal cannot be read.
pub fn is_prepared(config: &Config) -> Result<bool, HostError> {
    if !config.host.state_dir.exists() {
        return Ok(false);
    }
    need_root("`margay up` changes interfaces and routes")?;
    Ok(!Journal::open(StateDir::open(&config.host.state_dir)?)?.changes().is_empty())
}

/// What `up` has changed and is to be so now, in this order. What this host cannot have at the moment (IPv6 is switched
/// off) is left out.
///
/// # Errors
///
/// The host or the journal cannot be read.
pub async fn made(config: &Config) -> Result<Vec<Change>, HostError> {
    let journal = Journal::open(StateDir::open(&config.host.state_dir)?)?;
    let plan = plan(config).await?;
    let is_wanted = |change: &&Change| matches!(change, Change::Guard { .. }) || plan.has(change);
    Ok(journal.changes().iter().filter(is_wanted).cloned().collect())
}

/// What the agent itself makes, and takes with it when its responder ends: the way to that.
///
/// # Errors
///
/// The host cannot be read.
pub async fn agents_own(config: &Config) -> Result<Vec<Change>, HostError> {
    Ok(plan(config).await?.changes().iter().filter(|change| change.is_agents()).cloned().collect())
}

/// Removes the way to a responder that is gone, where somebody else holds its other end.
///
/// # Errors
///
/// The host refuses it.
pub async fn remove_responder_way() -> io::Result<()> {
    let net = Netlink::connect()?;
    match net.link(crate::agent::RESPONDER_INTERFACE).await? {
        // It may go by itself meanwhile.
        Some(link) if link.veth => change::gone_is_well(net.remove_link(link.index).await).map(drop),
        _ => Ok(()),
    }
}

/// Puts a change of `up` back that somebody has undone. What is there now in its place is what `down` brings back from
/// then on.
///
/// # Errors
///
/// The host refuses it, or the journal cannot be written.
pub async fn put_back(config: &Config, net: &Netlink, change: &Change) -> Result<(), HostError> {
    let renewed = if change.remembers() && !change.is_half_made() && !change.is_behind_its_link() {
        plan(config).await?.renewed(change).cloned()
    } else {
        None
    };
    let change = renewed.as_ref().unwrap_or(change);
    if renewed.is_some() {
        let mut journal = Journal::open(StateDir::open(&config.host.state_dir)?)?;
        let replace = |known: &Change| if known.is_same_thing(change) { change.clone() } else { known.clone() };
        let changes = journal.changes().iter().map(replace).collect();
        journal.write(changes)?;
    }
    change.apply(net).await.map_err(|error| HostError::Refused { advice: String::new(), error })
}

/// Routes of others into these virtual addresses, and networks of this host that have some of them, each with its
/// interface.
///
/// # Errors
///
/// The kernel's tables cannot be read.
pub async fn clashes(ranges: Ranges) -> io::Result<Vec<String>> {
    let net = Netlink::connect()?;
    let links = net.links().await?;
    let name = |index: u32| links.iter().find(|link| link.index == index).map_or("?", |link| link.name.as_str());
    let routes = net.all_routes().await?;
    let is_foreign = |route: &&netlink::Route| {
        route.destination.bits > 0
            && ranges.is_virtual(route.destination.address)
            && route.table != LOCAL_TABLE
            && !crate::agent::OWN_INTERFACES.contains(&name(route.index))
    };
    let text = |route: &netlink::Route| {
        let via = route.gateway.map(|gateway| format!(" via {gateway}")).unwrap_or_default();
        let table =
            if route.table == change::MAIN_TABLE { String::new() } else { format!(" in table {}", route.table) };
        format!("{}{via} dev {}{table}", route.destination, name(route.index))
    };
    let mut clashes: Vec<String> = routes.iter().filter(is_foreign).map(text).collect();
    // What has a route of its own is named already.
    let is_clash = |found: &&netlink::Address| {
        let (first, bits) = (card::network(found.address, found.bits), found.bits);
        let is_wider = plan::networks(ranges).iter().any(|range| {
            range.address.is_ipv4() == first.is_ipv4()
                && bits < range.bits
                && card::network(range.address, bits) == first
        });
        let is_whole = bits == if first.is_ipv4() { 32 } else { 128 };
        (is_wider || is_whole && ranges.is_virtual(first)) && !crate::agent::OWN_INTERFACES.contains(&name(found.index))
    };
    let addresses = net.addresses().await?;
    let text =
        |found: &netlink::Address| format!("the address {}/{} of {}", found.address, found.bits, name(found.index));
    clashes.extend(addresses.iter().filter(is_clash).map(text));
    Ok(clashes)
}

/// Policy rules of others that are asked before Margay's.
///
/// # Errors
///
/// The kernel's tables cannot be read.
pub async fn rules_before(ranges: Ranges) -> io::Result<Vec<String>> {
    let rules = Netlink::connect()?.rules().await?;
    Ok(rule_place::before(&rules, ranges).into_iter().map(ToString::to_string).collect())
}

/// Undoes in reverse order; gives remarks, and what could not be undone.
async fn undo_all(net: &Netlink, changes: &[&Change]) -> (Vec<String>, Vec<String>) {
    let (mut remarks, mut left) = (Vec::new(), Vec::new());
    for change in changes.iter().rev() {
        match change.undo(net).await {
            Ok(remark) => remarks.extend(remark),
            Err(refused) => left.push(refused.to_string()),
        }
    }
    (remarks, left)
}

/// Brings the host back to what it was before `up`; also after a crash, a reboot, or a second time. Gives remarks about
/// what somebody else has changed meanwhile.
///
/// # Errors
///
/// Something cannot be undone; the journal keeps it for the next attempt.
pub async fn restore(config: &Config) -> Result<Vec<String>, HostError> {
    if !config.host.state_dir.exists() {
        return Ok(Vec::new());
    }
    need_root("`margay down` changes interfaces and routes")?;
    let mut journal = Journal::open(StateDir::open(&config.host.state_dir)?)?;
    let remarks = undo(&mut journal).await?;
    Prepared::forget().map_err(HostError::Prepared)?;
    Ok(remarks)
}

async fn undo(journal: &mut Journal) -> Result<Vec<String>, HostError> {
    if journal.changes().is_empty() {
        // There may be one of another boot, with nothing left to undo.
        journal.clear()?;
        return Ok(Vec::new());
    }
    let net = Netlink::connect().map_err(look("interfaces"))?;
    let changes: Vec<&Change> = journal.changes().iter().collect();
    let (remarks, left) = undo_all(&net, &changes).await;
    if !left.is_empty() {
        return Err(HostError::NotUndone(left));
    }
    journal.clear()?;
    Ok(remarks)
}

/// What the plan wants, and whether it is so: for `margay check`.
///
/// # Errors
///
/// The host cannot be looked at.
pub async fn inspect(config: &Config) -> Result<Vec<(String, State)>, HostError> {
    let plan = plan(config).await?;
    let net = Netlink::connect().map_err(look("interfaces"))?;
    let mut found = Vec::new();
    for change in plan.changes() {
        match change.state(&net).await {
            Ok(state) => found.push((change.to_string(), state)),
            Err(refused) => found.push((change.to_string(), State::Differs(refused.to_string()))),
        }
    }
    Ok(found)
}

/// Waits until the kernel has noticed that the datapath holds the interface: until then it discards what programs send
/// there, and the first connection would wait for a retransmission.
///
/// # Errors
///
/// The kernel's tables cannot be read. That it takes too long is none: packets will pass a little later.
pub async fn await_running() -> io::Result<()> {
    let net = Netlink::connect()?;
    for _ in 0..RUNNING_LOOKS {
        if net.link(crate::agent::INTERFACE).await?.is_some_and(|link| link.operational) {
            break;
        }
        tokio::time::sleep(RUNNING_LOOK).await;
    }
    Ok(())
}

/// Whether an interface is Margay's.
fn is_own(link: &netlink::Link) -> bool {
    crate::agent::OWN_INTERFACES.contains(&link.name.as_str())
}

/// Interfaces that may carry direct flows: what sends Ethernet frames. Those that are down count: a program that is
/// taken off, and put on again when somebody has seen that they are up, misses the first packets.
///
/// # Errors
///
/// The kernel's tables cannot be read.
pub async fn interfaces() -> io::Result<Vec<u32>> {
    let links = Netlink::connect()?.links().await?;
    let is_card = |link: &&netlink::Link| link.ethernet && !is_own(link);
    Ok(links.iter().filter(is_card).map(|link| link.index).collect())
}

/// Addresses of this host that others could use now, those of the interface with the default route first: of interfaces
/// that are up and have a carrier. Virtual ones are none.
///
/// # Errors
///
/// The kernel's tables cannot be read.
pub async fn local_addresses(ranges: Ranges) -> io::Result<Vec<IpAddr>> {
    Ok(placed(ranges).await?.into_iter().map(|found| found.address).collect())
}

/// An address of this host, and where it has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// An address of this host.
    pub address: IpAddr,
    /// The length of its network's prefix, in bits.
    pub bits: u8,
    /// The name of the interface that has the address.
    pub interface: String,
}

impl Placed {
    /// Its network: `10.1.0.0/16`.
    pub fn block(&self) -> String {
        let network: IpAddr = match self.address {
            IpAddr::V4(v4) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.bits.min(32))).unwrap_or(0);
                Ipv4Addr::from(u32::from(v4) & mask).into()
            }
            IpAddr::V6(v6) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.bits.min(128))).unwrap_or(0);
                Ipv6Addr::from(u128::from(v6) & mask).into()
            }
        };
        format!("{network}/{}", self.bits)
    }
}

/// As [`local_addresses`], with where each is.
///
/// # Errors
///
/// The kernel's tables cannot be read.
pub async fn placed(ranges: Ranges) -> io::Result<Vec<Placed>> {
    let net = Netlink::connect()?;
    let links = net.links().await?;
    let routes = net.routes(change::MAIN_TABLE).await?;
    let leads_out: Vec<u32> =
        routes.iter().filter(|route| route.destination.bits == 0).map(|route| route.index).collect();
    let is_usable =
        |index: u32| links.iter().any(|link| link.index == index && link.up && link.running && !link.loopback);
    let addresses = net.addresses().await?.into_iter();
    let mut found: Vec<_> = addresses
        .filter(|found| !found.link_local && !found.tentative && is_usable(found.index))
        .filter(|found| !ranges.is_virtual(found.address))
        .collect();
    found.sort_by_key(|found| (!leads_out.contains(&found.index), found.address.is_ipv6(), found.index));
    let name = |index: u32| links.iter().find(|link| link.index == index).map(|link| link.name.clone());
    let place = |found: &netlink::Address| Placed {
        address: found.address,
        bits: found.bits,
        interface: name(found.index).unwrap_or_default(),
    };
    Ok(found.iter().map(place).collect())
}

/// The interfaces by which all hosts of a segment can be reached, each with an address of either family that others may
/// answer: none of the virtual ones.
///
/// # Errors
///
/// The kernel's tables cannot be read.
pub async fn segments(ranges: Ranges) -> io::Result<Vec<Segment>> {
    let net = Netlink::connect()?;
    let links =
        net.links().await?.into_iter().filter(|link| link.up && link.running && link.ethernet && !link.loopback);
    let links = links.filter(|link| !is_own(link));
    let mut addresses = net.addresses().await?;
    addresses.retain(|found| !found.link_local && !found.tentative && !ranges.is_virtual(found.address));
    Ok(links
        .map(|link| {
            let mut own = addresses.iter().filter(|found| found.index == link.index).map(|found| found.address);
            let v4 = own.clone().find_map(|address| match address {
                IpAddr::V4(v4) => Some(v4),
                IpAddr::V6(_) => None,
            });
            let v6 = own.find_map(|address| match address {
                IpAddr::V6(v6) => Some(v6),
                IpAddr::V4(_) => None,
            });
            Segment { interface: link.index, v4, v6 }
        })
        .collect())
}

/// Number of the interface that has an address.
pub fn interface_of(address: IpAddr) -> Option<u32> {
    let own = getifaddrs().ok()?;
    let found = own.into_iter().find(|found| address_of(found.address.as_ref()) == Some(address))?;
    nix::net::if_::if_nametoindex(found.interface_name.as_str()).ok()
}

/// Whether an interface that is up has an address.
pub fn is_up(address: IpAddr) -> bool {
    let is_it = |found: &InterfaceAddress| {
        address_of(found.address.as_ref()) == Some(address)
            && found.flags.contains(nix::net::if_::InterfaceFlags::IFF_UP)
    };
    getifaddrs().into_iter().flatten().any(|found| is_it(&found))
}

fn address_of(found: Option<&nix::sys::socket::SockaddrStorage>) -> Option<IpAddr> {
    let v4 = found?.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| found?.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

/// Whether an address is one of this host's own. Asks the kernel alone, at once.
pub fn has_address(address: IpAddr) -> bool {
    getifaddrs().into_iter().flatten().any(|found| address_of(found.address.as_ref()) == Some(address))
}
