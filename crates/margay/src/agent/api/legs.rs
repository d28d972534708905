//! The legs of a flow with an ensemble: what the switch of this host that serves the flow says of its members.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use margay_control::api::v1::{FlowInfo, LegInfo};
use serde_json::Value;

use super::Agent;
use crate::agent::metrics::ensembles;

/// Adds the legs to what is known of a flow, where a switch of this host serves it.
pub async fn add(agent: &Agent, flow: &mut FlowInfo) {
    // The switch is a process of its own, which has bound a socket for datagrams by the ensemble's name.
    if flow.protocol == "udp" && flow.role == "responder" {
        let shown = ensembles::shown(&agent.config().host.runtime_dir).await;
        flow.legs = legs_of(&shown, &flow.name, &clients_of(flow));
    }
}

/// What the switch's socket may have as the client's address: the flow's own, or with the same port the peer's, where
/// programs are shown that one.
fn clients_of(flow: &FlowInfo) -> Vec<SocketAddr> {
    let Ok(own) = flow.app_destination.parse::<SocketAddr>() else { return Vec::new() };
    let peer = flow.remote.parse::<SocketAddr>().ok();
    [own.ip()].into_iter().chain(peer.map(|peer| peer.ip())).map(|ip| (ip.to_canonical(), own.port()).into()).collect()
}

/// Those of the client at one of these addresses, by the name of the member's host.
fn legs_of(shown: &[Value], name: &str, clients: &[SocketAddr]) -> Vec<LegInfo> {
    let mut legs: BTreeMap<&str, LegInfo> = BTreeMap::new();
    let switches = shown.iter().filter(|switch| name.is_empty() || switch["name"] == name);
    let connections = switches.flat_map(|switch| all(&switch["connections"]));
    let is_of_flow = |connection: &&Value| {
        let client = connection["client"].as_str().and_then(|client| client.parse::<SocketAddr>().ok());
        client.is_some_and(|at| clients.contains(&(at.ip().to_canonical(), at.port()).into()))
    };
    for part in connections.filter(is_of_flow).flat_map(|one| all(&one["members"])) {
        let member = part["name"].as_str().unwrap_or_default();
        let is_first = !legs.contains_key(member);
        let leg = legs.entry(member).or_insert_with(|| LegInfo { member: member.to_owned(), ..LegInfo::default() });
        let window = figure(&part["window_bytes"]);
        leg.connections += 1;
        leg.window_bytes = if is_first { window } else { leg.window_bytes.min(window) };
        leg.in_flight += figure(&part["frames_in_flight"]);
        leg.holes += figure(&part["holes"]);
        leg.patches += figure(&part["patches"]);
        leg.round_trip_us = leg.round_trip_us.max(part["round_trip_us"].as_u64());
    }
    legs.into_values().collect()
}

fn all(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Windows, rings and connections are bounded far below 2^32.
fn figure(value: &Value) -> u32 {
    value.as_u64().and_then(|figure| u32::try_from(figure).ok()).unwrap_or_default()
}

#[cfg(test)]
mod test {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_legs_are_those_of_the_flows_connections_added_up() {
        let part = |name: &str, window: u32, holes: u32, round_trip: Option<u32>| {
            json!({"name": name, "window_bytes": window, "frames_in_flight": 3, "holes": holes, "patches": 1,
                "round_trip_us": round_trip})
        };
        let connection = |client: &str, members: &[Value]| json!({"client": client, "number": "1", "members": members});
        let switch = json!({"name": "cache.shop", "connections": [
            connection("10.0.0.1:7", &[part("m1", 9000, 0, None), part("m2", 100, 2, Some(5))]),
            connection("[::ffff:198.19.0.1]:7", &[part("m1", 8000, 1, Some(9))]),
            connection("10.0.0.2:7", &[part("m3", 1, 1, None)]),
        ]});
        let other = json!({"name": "other.shop", "connections": [connection("10.0.0.1:7", &[part("m4", 1, 0, None)])]});
        let flow = FlowInfo {
            app_destination: "198.19.0.1:7".to_owned(),
            remote: "10.0.0.1:54324".to_owned(),
            ..FlowInfo::default()
        };
        let legs = legs_of(&[switch, other], "cache.shop", &clients_of(&flow));
        let leg = |member: &str, connections, window_bytes, holes, round_trip_us| LegInfo {
            member: member.to_owned(),
            connections,
            window_bytes,
            in_flight: 3 * connections,
            holes,
            patches: connections,
            round_trip_us,
        };
        assert_eq!(legs, [leg("m1", 2, 8000, 1, Some(9)), leg("m2", 1, 100, 2, Some(5))]);
        assert_eq!(legs_of(&[json!({"name": "cache.shop"})], "cache.shop", &clients_of(&flow)), []);
    }
}
