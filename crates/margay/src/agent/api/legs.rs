//! The legs of a flow with an ensemble: what the switch of this host that serves the flow says of its members.

use std::collections::BTreeMap;

use margay_control::api::v1::{FlowInfo, LegInfo};
use serde_json::Value;

use super::Agent;
use crate::agent::metrics::ensembles;

/// Adds the legs to what is known of a flow, where a switch of this host serves it.
pub async fn add(agent: &Agent, flow: &mut FlowInfo) {
    // The switch is a process of its own, which has bound a socket for datagrams by the ensemble's name.
    if flow.protocol == "udp" && flow.role == "responder" {
        let shown = ensembles::shown(&agent.config().host.runtime_dir).await;
        flow.legs = legs_of(&shown, &flow.name, &flow.app_source);
    }
}

/// Those of the client at an address, as the switch's socket has it, by the name of the member's host.
fn legs_of(shown: &[Value], name: &str, client: &str) -> Vec<LegInfo> {
    let mut legs: BTreeMap<&str, LegInfo> = BTreeMap::new();
    let switches = shown.iter().filter(|switch| name.is_empty() || switch["name"] == name);
    let connections = switches.flat_map(|switch| all(&switch["connections"]));
    for part in connections.filter(|connection| connection["client"] == client).flat_map(|one| all(&one["members"])) {
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
            connection("10.0.0.1:7", &[part("m1", 8000, 1, Some(9))]),
            connection("10.0.0.2:7", &[part("m3", 1, 1, None)]),
        ]});
        let other = json!({"name": "other.shop", "connections": [connection("10.0.0.1:7", &[part("m4", 1, 0, None)])]});
        let legs = legs_of(&[switch, other], "cache.shop", "10.0.0.1:7");
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
        assert_eq!(legs_of(&[json!({"name": "cache.shop"})], "cache.shop", "10.0.0.1:7"), []);
    }
}
