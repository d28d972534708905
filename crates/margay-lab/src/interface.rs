//! What happens to interfaces of running hosts: they go down and up, addresses come and go. Routes that the kernel
//! drops with them come back when there is a way for them again, as a host's own network manager would have it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;

use anyhow::{Context, Result};
use ipnet::IpNet;
use serde_json::Value;

use crate::filter;
use crate::host::Host;
use crate::lab::Lab;
use crate::moment::{Change, Moment};
use crate::route::{Route, routes};
use crate::topology::Role;
use crate::wire;

/// Routing tables of links, by their number; and the priorities of the rules that lead there.
const SOURCE_TABLES: usize = 1000;

/// Something that happens to an interface, by its number among the host's links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// It goes down.
    Down(usize),
    /// It goes up, with the IPv6 address of the topology: the kernel drops it when an interface goes down.
    Up(usize),
    /// It gets an address, unless it has it.
    Add(usize, IpNet),
    /// It loses an address.
    Remove(usize, IpNet),
    /// MPTCP is told to give up the subflows that its connections began from the interface's first address, as a
    /// network manager does which hears that the interface goes down.
    GiveUp(usize),
}

/// The address with this number in the network of a host's link.
///
/// # Errors
///
/// The host has no such link, or the link none of that family.
pub fn address(lab: &Lab, host: &Host, link: usize, v6: bool, number: usize) -> Result<IpNet> {
    let plan = host.plan.links.get(link).with_context(|| format!("{} has no link {link}", host.name()))?;
    let subnet = &lab.topology.subnets[plan.subnet];
    let network = if v6 { subnet.v6.map(IpNet::V6) } else { subnet.v4.map(IpNet::V4) };
    let network = network.with_context(|| format!("{} has no such family", subnet.name))?;
    // IPv6 networks have an address of number 0, IPv4 networks begin with 1.
    let place = if v6 { number } else { number.saturating_sub(1) };
    let address = network.hosts().nth(place).with_context(|| format!("{network} is too small"))?;
    Ok(IpNet::new(address, network.prefix_len())?)
}

/// The address that the topology gave to a host's link.
///
/// # Errors
///
/// As for [`address`].
pub fn first_address(lab: &Lab, host: &Host, link: usize, v6: bool) -> Result<IpNet> {
    let plan = host.plan.links.get(link).with_context(|| format!("{} has no link {link}", host.name()))?;
    let own = plan.address(v6).with_context(|| format!("link {link} of {} has no such address", host.name()))?;
    Ok(IpNet::new(own, address(lab, host, link, v6, 1)?.prefix_len())?)
}

/// Lets things happen to a host's interfaces, in order and at once. What goes to an address that it loses, or comes
/// from it, the gateways beside it do not forward any more.
///
/// # Errors
///
/// `ip` refuses.
pub fn change(lab: &Lab, host: &Host, acts: &[Act]) -> Result<Moment> {
    let plan = plan(lab, host, acts)?;
    let beside = tell_gateways(lab, host, acts)?;
    let moment = start(host, &plan)?.finish()?;
    beside.into_iter().try_for_each(|change| change.finish().map(drop))?;
    Ok(moment)
}

/// As [`change`], to two hosts in the same moment.
///
/// # Errors
///
/// As for [`change`].
pub fn change_both(lab: &Lab, changes: [(&Host, &[Act]); 2]) -> Result<[Moment; 2]> {
    let (mut plans, mut beside) = (Vec::new(), Vec::new());
    for (host, acts) in changes {
        plans.push(plan(lab, host, acts)?);
        beside.extend(tell_gateways(lab, host, acts)?);
    }
    // Both are begun before either is waited for.
    let [one, other] = [0, 1].map(|index| start(changes[index].0, &plans[index]));
    let moments = [one?.finish()?, other?.finish()?];
    beside.into_iter().try_for_each(|change| change.finish().map(drop))?;
    Ok(moments)
}

/// What `ip` is to do: the acts, and the routes that there can be then.
fn plan(lab: &Lab, host: &Host, acts: &[Act]) -> Result<String> {
    let index = lab.hosts.iter().position(|other| other.name() == host.name()).context("the host is of another lab")?;
    let before = addresses(&host.run(["ip", "-j", "addr"])?)?;
    let mut script = lines(lab, host, acts)?;
    let after = after(lab, host, before, acts)?;
    let is_up = |link: usize| after.contains_key(&format!("eth{link}"));
    for route in possible(&routes(&lab.topology, index, is_up), &after) {
        writeln!(script, "route replace {} via {}", route.to, route.via)?;
    }
    Ok(script)
}

fn start(host: &Host, plan: &str) -> Result<Change> {
    // Else an address that was added beside another one of its network goes with that one.
    let first = "echo 1 > /proc/sys/net/ipv4/conf/all/promote_secondaries";
    Change::start(host, first, &format!("ip -batch - <<'END'\n{plan}END"))
}

/// What the gateways beside a host are to forward no longer, and again.
fn tell_gateways(lab: &Lab, host: &Host, acts: &[Act]) -> Result<Vec<Change>> {
    let mut changes = Vec::new();
    for (number, link) in host.plan.links.iter().enumerate() {
        let gone = of_link(acts, number, |act| matches!(act, Act::Remove(..)));
        let here = of_link(acts, number, |act| matches!(act, Act::Add(..)));
        let is_beside = |other: &&Host| {
            other.plan.role == Role::Gateway && other.plan.links.iter().any(|its| its.subnet == link.subnet)
        };
        for gateway in lab.hosts.iter().filter(is_beside).filter(|_| !gone.is_empty() || !here.is_empty()) {
            changes.push(filter::bury(gateway, &gone, &here)?);
        }
    }
    Ok(changes)
}

/// Addresses of those acts on a link that are wanted.
fn of_link(acts: &[Act], number: usize, wanted: impl Fn(&Act) -> bool) -> Vec<IpAddr> {
    let address = |act: &Act| match act {
        Act::Add(link, address) | Act::Remove(link, address) if *link == number => Some(address.addr()),
        _ => None,
    };
    acts.iter().filter(|act| wanted(act)).filter_map(address).collect()
}

/// What a host sends from an address leaves through the interface that has it, as on every host with two providers:
/// else all of it leaves through the first one. For links whose subnet has one gateway.
///
/// # Errors
///
/// `ip` refuses.
pub fn route_by_source(lab: &Lab, host: &Host) -> Result<()> {
    let mut script = String::new();
    for (number, link) in host.plan.links.iter().enumerate().filter(|(_, link)| link.v4.is_some()) {
        let own = link.v4.context("a link without an address")?;
        let table = SOURCE_TABLES + number;
        writeln!(script, "{}", source_route(lab, host, number)?)?;
        writeln!(script, "rule add from {own} lookup {table} priority {table}")?;
    }
    wire::ip(Some(host), &script)
}

/// What an interface that was down has lost of that.
///
/// # Errors
///
/// `ip` refuses, or the interface is down.
pub fn route_by_source_again(lab: &Lab, host: &Host, link: usize) -> Result<()> {
    wire::ip(Some(host), &format!("{}\n", source_route(lab, host, link)?))
}

fn source_route(lab: &Lab, host: &Host, number: usize) -> Result<String> {
    let link = host.plan.links.get(number).context("the host has no such link")?;
    let is_gateway = |other: &&Host| other.plan.role == Role::Gateway;
    let on_link = |other: &Host| other.plan.links.iter().find(|its| its.subnet == link.subnet).cloned();
    let gateway = lab.hosts.iter().filter(is_gateway).find_map(on_link).context("a link without a gateway")?;
    let via = gateway.v4.context("a gateway without an IPv4 address")?;
    Ok(format!("route replace default via {via} dev eth{number} table {}", SOURCE_TABLES + number))
}

/// The acts as lines for `ip`.
fn lines(lab: &Lab, host: &Host, acts: &[Act]) -> Result<String> {
    let mut script = String::new();
    for act in acts {
        match act {
            Act::Down(link) => writeln!(script, "link set eth{link} down")?,
            Act::Up(link) => {
                writeln!(script, "link set eth{link} up")?;
                if let Ok(v6) = first_address(lab, host, *link, true) {
                    writeln!(script, "addr replace {v6} nodad dev eth{link}")?;
                }
            }
            Act::Add(link, address @ IpNet::V4(_)) => writeln!(script, "addr replace {address} brd + dev eth{link}")?,
            Act::Add(link, address) => writeln!(script, "addr replace {address} nodad dev eth{link}")?,
            Act::Remove(link, address) => writeln!(script, "addr del {address} dev eth{link}")?,
            Act::GiveUp(link) => {
                let own = first_address(lab, host, *link, false)?.addr();
                writeln!(script, "mptcp endpoint delete id 0 {own}")?;
            }
        }
    }
    Ok(script)
}

/// Addresses of a host's interfaces, of those that are up.
type Addresses = BTreeMap<String, Vec<IpNet>>;

/// From what `ip -j addr` says. Those of an interface that is down count as none: nothing can be reached through it.
fn addresses(json: &str) -> Result<Addresses> {
    let links: Vec<Value> = serde_json::from_str(json).context("ip did not answer with JSON")?;
    let mut found = Addresses::new();
    for link in &links {
        let flags = link["flags"].as_array().cloned().unwrap_or_default();
        let name = link["ifname"].as_str().unwrap_or_default().to_owned();
        let of_link = link["addr_info"].as_array().cloned().unwrap_or_default();
        let parse = |info: &Value| {
            let length = u8::try_from(info["prefixlen"].as_u64()?).ok()?;
            IpNet::new(info["local"].as_str()?.parse::<IpAddr>().ok()?, length).ok()
        };
        if flags.iter().any(|flag| flag == "UP") {
            found.insert(name, of_link.iter().filter_map(parse).collect());
        }
    }
    Ok(found)
}

/// What the addresses are when the acts are done.
fn after(lab: &Lab, host: &Host, mut now: Addresses, acts: &[Act]) -> Result<Addresses> {
    for act in acts {
        match act {
            Act::Down(link) => drop(now.remove(&format!("eth{link}"))),
            Act::Up(link) => {
                let families = [false, true].map(|v6| first_address(lab, host, *link, v6).ok());
                now.insert(format!("eth{link}"), families.into_iter().flatten().collect());
            }
            Act::Add(link, address) => now.entry(format!("eth{link}")).or_default().push(*address),
            Act::Remove(link, address) => now.entry(format!("eth{link}")).or_default().retain(|own| own != address),
            Act::GiveUp(_) => {}
        }
    }
    Ok(now)
}

/// Routes whose neighbour can be reached.
fn possible(routes: &[Route], addresses: &Addresses) -> Vec<Route> {
    let is_near = |route: &&Route| addresses.values().flatten().any(|own| own.contains(&route.via));
    routes.iter().filter(is_near).copied().collect()
}

/// Bytes that each interface of a host has carried in both directions, in the order of its links.
///
/// # Errors
///
/// `ip` refuses.
pub fn carried(host: &Host) -> Result<Vec<u64>> {
    let text = host.run(["ip", "-j", "-s", "link"])?;
    let links: Vec<Value> = serde_json::from_str(&text).context("ip did not answer with JSON")?;
    let of = |number: usize| {
        let name = format!("eth{number}");
        let stats = &links.iter().find(|link| link["ifname"] == name.as_str())?["stats64"];
        Some(stats["rx"]["bytes"].as_u64()? + stats["tx"]["bytes"].as_u64()?)
    };
    (0..host.plan.links.len()).map(|number| of(number).context("an interface is gone")).collect()
}

/// The link that has carried most since `before`.
///
/// # Errors
///
/// As for [`carried`].
pub fn busiest(host: &Host, before: &[u64]) -> Result<usize> {
    let now = carried(host)?;
    let grown = now.iter().zip(before).map(|(now, before)| now.saturating_sub(*before)).enumerate();
    Ok(grown.max_by_key(|(_, bytes)| *bytes).context("the host has no link")?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDR: &str = r#"[
        {"ifname": "lo", "flags": ["LOOPBACK", "UP"], "addr_info": [{"local": "127.0.0.1", "prefixlen": 8}]},
        {"ifname": "eth0", "flags": ["BROADCAST", "UP"], "addr_info": [
            {"family": "inet", "local": "10.1.0.2", "prefixlen": 24}, {"family": "inet6", "local": "fd01::2", "prefixlen": 64}]},
        {"ifname": "eth1", "flags": ["BROADCAST"], "addr_info": [{"local": "10.2.0.2", "prefixlen": 24}]}
    ]"#;

    fn route(to: &str, via: &str) -> Route {
        // Literals of this test.
        Route { to: to.parse().expect("a network"), via: via.parse().expect("an address") }
    }

    #[test]
    fn only_interfaces_that_are_up_reach_anybody() {
        let found = addresses(ADDR).expect("it is JSON");
        assert_eq!(found.len(), 2);
        assert_eq!(found["eth0"], ["10.1.0.2/24".parse().expect("v4"), "fd01::2/64".parse().expect("v6")]);
        let routes =
            [route("10.9.0.0/24", "10.1.0.1"), route("10.8.0.0/24", "10.2.0.1"), route("fd09::/64", "fd01::1")];
        assert_eq!(possible(&routes, &found), [routes[0], routes[2]]);
    }
}
