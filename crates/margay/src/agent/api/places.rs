//! The pairs of addresses that striped flows use, and what goes by each.

use std::collections::BTreeMap;

use margay_control::api::v1::PlaceInfo;
use margay_core::key::HostId;
use margay_core::stripe::Sharing;
use margay_core::{FlowInfo, Pair, PlaceStack};

use crate::agent::Agent;

/// Those of one flow.
pub(super) fn of_flow(agent: &Agent, flow: &FlowInfo) -> Vec<PlaceInfo> {
    if flow.places.is_empty() {
        return Vec::new();
    }
    let counted = agent.core.0.stripe_counters(flow.flow).unwrap_or_default();
    let is_mixed = flow.places.iter().any(|place| place.sends.is_some());
    let is_sealed = flow.stack.stack.is_sealed();
    let info = |known: &margay_core::StripePlace| {
        let counted = counted.get(known.place).copied().unwrap_or_default();
        let sending = counted.sending.unwrap_or_default();
        let state = match known.is_proved {
            false => "asked",
            true if sending.is_live => "live",
            true => "silent",
        };
        PlaceInfo {
            local: known.pair.local.map(|local| local.to_string()).unwrap_or_default(),
            remote: known.pair.remote.to_string(),
            state: state.to_owned(),
            flows: 1,
            round_trip_us: known.rtt.map_or(0, |rtt| u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX)),
            sent_bytes: sending.sent_bytes,
            received_bytes: u64::from(counted.received_bytes),
            rate: sending.rate,
            later_us: sending.later_us,
            share: 0,
            stack: if is_mixed { stack_of(known, is_sealed).to_owned() } else { String::new() },
            weight: if flow.sharing == Sharing::Weighted { known.weight.into() } else { 0 },
        }
    };
    shared(flow.places.iter().map(info).collect())
}

/// How a flow, which is sealed by the places that have no stack of their own or is not, goes by one.
const fn stack_of(place: &margay_core::StripePlace, is_sealed: bool) -> &'static str {
    match (is_sealed, place.sends) {
        (_, Some(PlaceStack::Plain)) | (false, None) => "plain",
        (false, Some(PlaceStack::Fec)) => "fec",
        (true, None) => "secure",
        (true, Some(PlaceStack::Fec)) => "secure-fec",
    }
}

/// Those of all striped flows with each peer.
pub(super) fn by_peer(agent: &Agent) -> BTreeMap<HostId, Vec<PlaceInfo>> {
    let flows: Vec<FlowInfo> = agent.core.0.with_sal(|sal, _| sal.flows().filter(|flow| flow.is_striped).collect());
    let mut found: BTreeMap<HostId, BTreeMap<Pair, PlaceInfo>> = BTreeMap::new();
    for flow in &flows {
        let Some(peer) = flow.peer else { continue };
        for (known, place) in flow.places.iter().zip(of_flow(agent, flow)) {
            let sum = found.entry(peer).or_default().entry(known.pair).or_insert_with(|| PlaceInfo {
                flows: 0,
                sent_bytes: 0,
                received_bytes: 0,
                rate: 0,
                ..place.clone()
            });
            sum.flows += 1;
            sum.sent_bytes += place.sent_bytes;
            sum.received_bytes += place.received_bytes;
            sum.rate += place.rate;
        }
    }
    found.into_iter().map(|(peer, places)| (peer, shared(places.into_values().collect()))).collect()
}

/// With the share of each.
fn shared(mut places: Vec<PlaceInfo>) -> Vec<PlaceInfo> {
    let carried = |place: &PlaceInfo| place.sent_bytes + place.received_bytes;
    let sum: u64 = places.iter().map(carried).sum();
    for place in &mut places {
        place.share = u32::try_from(carried(place) * 100 / sum.max(1)).unwrap_or(100);
    }
    places
}
