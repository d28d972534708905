//! Static routes: every host reaches every subnet by the fewest gateways.

use std::collections::VecDeque;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::topology::{Role, Topology};

/// One route of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Where to.
    pub to: IpNet,
    /// The neighbour.
    pub via: IpAddr,
}

/// The routes of host number `host`, both families, over those of its links that `is_up` names by their number. What
/// lies behind a masquerading gateway cannot be reached by IPv4 from its outer side, as on the Internet.
pub fn routes(topology: &Topology, host: usize, is_up: impl Fn(usize) -> bool) -> Vec<Route> {
    let mut found = Vec::new();
    for v6 in [false, true] {
        let links = topology.hosts[host].links.iter().enumerate().filter(|(number, _)| is_up(*number));
        let own: Vec<usize> = links.map(|(_, link)| link.subnet).collect();
        let mut via: Vec<Option<IpAddr>> = vec![None; topology.subnets.len()];
        let mut seen: Vec<bool> = (0..topology.subnets.len()).map(|subnet| own.contains(&subnet)).collect();
        let mut queue: VecDeque<usize> = own.iter().copied().collect();
        while let Some(subnet) = queue.pop_front() {
            for (neighbour, next) in steps(topology, host, subnet, v6) {
                if std::mem::replace(&mut seen[next], true) {
                    continue;
                }
                via[next] = via[subnet].or(Some(neighbour));
                queue.push_back(next);
            }
        }
        found.extend(via.iter().zip(&topology.subnets).filter_map(|(via, subnet)| {
            let to = if v6 { subnet.v6.map(IpNet::V6) } else { subnet.v4.map(IpNet::V4) };
            Some(Route { to: to?, via: (*via)? })
        }));
    }
    found
}

/// From `subnet`, over one gateway: (the gateway's address in `subnet`, the subnet behind it).
fn steps(topology: &Topology, host: usize, subnet: usize, v6: bool) -> Vec<(IpAddr, usize)> {
    let mut steps = Vec::new();
    for (index, gateway) in topology.hosts.iter().enumerate() {
        if gateway.role != Role::Gateway || index == host || (!v6 && gateway.nat == Some(subnet)) {
            continue;
        }
        let Some(entry) = gateway.links.iter().find(|link| link.subnet == subnet) else { continue };
        let Some(address) = entry.address(v6) else { continue };
        let behind = gateway.links.iter().filter(|link| link.subnet != subnet && link.address(v6).is_some());
        steps.extend(behind.map(|link| (address, link.subnet)));
    }
    steps
}
