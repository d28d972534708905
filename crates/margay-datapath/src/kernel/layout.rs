//! What lies in the maps. The types come from `bpf/layout.h` through the object's type information; here are only the
//! ways between them and Rust's.
#![allow(unsafe_code)]

use std::net::{Ipv6Addr, SocketAddr};

use margay_core::delta::{Translation, Translations};
use margay_core::entry::{FlowCounters, GRANT_RECORD_LEN, Grant, GrantKey, PathId, Survey};
use margay_core::flow_cache::GRANT_NEWS;
use margay_core::{Instant, Role, Tuple};
use margay_wire::{FlowId, GRANT_FLOWS_MAX};

use super::plain::Plain;
pub(super) use super::skeleton::types::{
    app_key, delta, flow_change, flow_entry, flow_event, flow_lift, grant, grant_flows, inside_key, listener_key,
    offer, offer_key, pair_key, pair_value, path_entry, spare, translation, wire_key,
};
use super::{Seen, TcpSeen, Unjudged, WireFlow, WirePath, WireState};
use crate::packet::{FlowKey, TCP, mapped};

/// The numbers that `layout.h` defines (`build.rs`).
mod constants {
    #![allow(dead_code, reason = "the programs alone use some of them")]
    include!(concat!(env!("OUT_DIR"), "/layout_constants.rs"));
}

pub(crate) use constants::COUNTERS;
pub(super) use constants::{
    CHANGE_ABSENT, CHANGE_DONE, CHANGE_LATE, CHANGE_TAKEN, COUNT_UNDELIVERED, FLOW_ACCEPT, FLOW_BY_SAL0, FLOW_EGRESS,
    FLOW_FRESH, FLOW_LIFTING, FLOW_OF_SOCKET, FLOW_SENT_UP, FLOW_STALLED, LAYOUT_VERSION, LIFT_DONE, PATH_HELD,
    PATH_SHARED, PATH_WATCHED,
};
use constants::{
    DELTA_NO_SACK, DELTA_NO_TIMESTAMPS, NUMBERS_ACKNOWLEDGED, NUMBERS_END, NUMBERS_KNOWN, NUMBERS_NEXT, NUMBERS_RESET,
};
#[cfg(test)]
pub(super) use constants::{
    FLOW_UNTOLD, LIFT_AGAIN, SEEN_FIN_EGRESS, SEEN_FIN_INGRESS, SEEN_OPENED, SEEN_OVER, SEEN_RST_INGRESS, SEEN_TAKEN,
    UP_MARK,
};

// SAFETY: made from C structures whose members lie without gaps (`layout.h` has its padding as members); the assertions
// below add them up.
unsafe impl Plain for app_key {}
// SAFETY: as above.
unsafe impl Plain for wire_key {}
// SAFETY: as above.
unsafe impl Plain for flow_entry {}
// SAFETY: as above.
unsafe impl Plain for path_entry {}
// SAFETY: as above.
unsafe impl Plain for pair_key {}
// SAFETY: as above.
unsafe impl Plain for pair_value {}
// SAFETY: as above.
unsafe impl Plain for flow_event {}
// SAFETY: as above.
unsafe impl Plain for listener_key {}
// SAFETY: as above.
unsafe impl Plain for inside_key {}
// SAFETY: as above.
unsafe impl Plain for offer_key {}
// SAFETY: as above.
unsafe impl Plain for offer {}
// SAFETY: as above.
unsafe impl Plain for spare {}
// SAFETY: as above.
unsafe impl Plain for grant {}
// SAFETY: as above.
unsafe impl Plain for grant_flows {}
// SAFETY: as above.
unsafe impl Plain for flow_change {}
// SAFETY: as above.
unsafe impl Plain for flow_lift {}
// SAFETY: as above.
unsafe impl Plain for delta {}

const _: () = assert!(size_of::<app_key>() == 16 + 16 + 2 + 2 + 1 + 3);
const _: () = assert!(size_of::<wire_key>() == 4 + 2 + 2 + 1 + 3);
const _: () = assert!(size_of::<flow_entry>() == 8 + 40 + 8 + 2 * (3 * 8 + 24 + 16) + 2 * 8 + 8);
const _: () = assert!(size_of::<path_entry>() == 16 + 16 + 16 + 4 + 4 + 8 + 8 + 8 + 4 + 4);
const _: () = assert!(size_of::<pair_value>() == 4 + 4 + 8);
const _: () = assert!(size_of::<pair_key>() == 32);
const _: () = assert!(size_of::<flow_event>() == 8 + size_of::<app_key>());
const _: () = assert!(size_of::<listener_key>() == 2 + 1 + 1);
const _: () = assert!(size_of::<inside_key>() == 4 + 4 + 16);
const _: () = assert!(size_of::<offer_key>() == 16 + 2 + 1 + 1);
const _: () = assert!(size_of::<offer>() == 8 * 4);
const _: () = assert!(size_of::<spare>() == 4 * 4 + 4 * 2 + 8 + 2 * 8 + GRANT_RECORD_LEN);
const _: () = assert!(
    size_of::<grant>()
        == 4 + 4
            + size_of::<app_key>()
            + 2 * GRANT_FLOWS_MAX as usize
            + 2
            + 2
            + 4
            + 8
            + 2 * 8
            + 2 * 8
            + GRANT_RECORD_LEN
);
const _: () = assert!(size_of::<grant_flows>() == size_of::<wire_key>() + 4 + 2 * 8 + 2 + 1 + 5 + 2 * 2 * 8);
const _: () = assert!(size_of::<flow_change>() == size_of::<wire_key>() + 4 * 4);
const _: () = assert!(size_of::<flow_lift>() == size_of::<wire_key>() + 2 * 4);
const _: () = assert!(size_of::<translation>() == 4 * 4 + 4);
const _: () = assert!(size_of::<delta>() == 2 * size_of::<translation>());
const _: () = assert!(constants::GRANT_FLOWS_MAX == GRANT_FLOWS_MAX as u32 && GRANT_FLOWS_MAX as usize <= 2 * 64);
const _: () = assert!(constants::GRANT_RECORD_LEN as usize == GRANT_RECORD_LEN);
const _: () = assert!(constants::GRANT_NEWS == GRANT_NEWS as u32);

pub(super) fn app_key_of(key: &FlowKey) -> app_key {
    app_key {
        source: key.source,
        destination: key.destination,
        source_port: key.source_port.to_be(),
        destination_port: key.destination_port.to_be(),
        protocol: key.protocol,
        zero: [0; 3],
    }
}

pub(super) fn flow_key_of(key: &app_key) -> FlowKey {
    FlowKey {
        source: key.source,
        destination: key.destination,
        source_port: u16::from_be(key.source_port),
        destination_port: u16::from_be(key.destination_port),
        protocol: key.protocol,
    }
}

pub(super) fn wire_key_of(flow: &WireFlow) -> wire_key {
    wire_key_at(flow.path, [flow.local_port, flow.remote_port], flow.app.protocol)
}

pub(super) fn wire_key_of_state(state: &WireState) -> wire_key {
    wire_key_at(state.path, [state.local_port, state.remote_port], state.app.protocol)
}

/// `ports`: this end's and the peer's.
fn wire_key_at(path: PathId, ports: [u16; 2], protocol: u8) -> wire_key {
    let [local_port, remote_port] = ports.map(u16::to_be);
    wire_key { path: path.0, local_port, remote_port, protocol, zero: [0; 3] }
}

pub(super) fn offer_key_of(destination: SocketAddr) -> offer_key {
    offer_key { address: mapped(destination.ip()), port: destination.port().to_be(), protocol: TCP, zero: 0 }
}

/// Where flows of a grant lie: local number and wire key of each.
pub(super) fn flows_of(grant: &Grant) -> impl Iterator<Item = (FlowId, wire_key)> {
    let key = wire_key { path: grant.path.0, protocol: grant.app.protocol, ..Default::default() };
    let (local_port, remote_port, role) = (grant.local_port, grant.remote_port, grant.role);
    let first_flow = grant.first_flow.0;
    (0..grant.count).map(move |flow| {
        let (local_port, remote_port) = match role {
            Role::Initiator => (local_port.wrapping_add(flow), remote_port),
            Role::Responder => (local_port, remote_port.wrapping_add(flow)),
        };
        let key = wire_key { local_port: local_port.to_be(), remote_port: remote_port.to_be(), ..key };
        (FlowId(first_flow.wrapping_add(flow.into())), key)
    })
}

/// How a flow that may be held goes on.
pub(super) fn flow_change_of(flow: &WireFlow) -> flow_change {
    flow_change {
        wire: wire_key_of(flow),
        flow: flow.flow.0,
        generation: flow.generation,
        flags: flags_of(flow),
        // Zero is no number of a flow.
        delta: flow.delta.map_or(0, |_| flow.flow.0),
    }
}

/// What becomes of a flow's numbers.
pub(super) fn delta_of(both: &Translations) -> delta {
    delta { egress: translation_of(&both.egress), ingress: translation_of(&both.ingress) }
}

fn translation_of(said: &Translation) -> translation {
    let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
    let bits = said.window_shift.unsigned_abs();
    translation {
        sequence: said.sequence,
        acknowledgement: said.acknowledgement,
        timestamp: said.timestamp.unwrap_or(0),
        echo: said.echo.unwrap_or(0),
        raised: if said.window_shift > 0 { bits } else { 0 },
        lowered: if said.window_shift < 0 { bits } else { 0 },
        flags: flag(said.drops_timestamps, DELTA_NO_TIMESTAMPS) | flag(said.drops_sack, DELTA_NO_SACK),
        zero: 0,
    }
}

/// These flows of a grant.
pub(super) fn grant_flows_of(granted: &Grant, these: u128) -> grant_flows {
    grant_flows {
        first: grant_key_of(granted),
        first_flow: granted.first_flow.0,
        these: [these as u64, (these >> 64) as u64],
        count: granted.count,
        rises_here: (granted.role == Role::Initiator).into(),
        ..Default::default()
    }
}

/// What has become of those that were looked at.
pub(super) fn survey_of(said: &grant_flows) -> Survey {
    let all = |[low, high]: [u64; 2]| u128::from(high) << 64 | u128::from(low);
    Survey { answered: all(said.answered), over: all(said.over) }
}

/// A key as SipHash takes it.
fn words_of(GrantKey(key): &GrantKey) -> [u64; 2] {
    let key = u128::from_le_bytes(*key);
    [key as u64, (key >> 64) as u64]
}

pub(super) fn spare_of(grant: &Grant) -> spare {
    spare {
        grant: grant.id.0,
        path: grant.path.0,
        first_flow: grant.first_flow.0,
        next: 0,
        count: grant.count,
        local_port: grant.local_port,
        remote_port: grant.remote_port,
        zero: 0,
        until_ns: grant.until.micros() * 1000,
        key: words_of(&grant.key),
        record: grant.record,
    }
}

/// Where flow 0 of a grant lies; by it a responder's kernel finds the grant.
pub(super) fn grant_key_of(given: &Grant) -> wire_key {
    wire_key {
        path: given.path.0,
        local_port: given.local_port.to_be(),
        remote_port: given.remote_port.to_be(),
        protocol: given.app.protocol,
        ..Default::default()
    }
}

pub(super) fn grant_of(given: &Grant) -> grant {
    grant {
        grant: given.id.0,
        first_flow: given.first_flow.0,
        app: app_key_of(&given.app.into()),
        app_ports: given.ports.map(u16::to_be),
        remote_port: given.remote_port,
        count: given.count,
        opened: 0,
        until_ns: given.until.micros() * 1000,
        key: words_of(&given.key),
        used: [0; 2],
        record: given.record,
    }
}

/// A grant as the agent before has left it: nothing is to be opened by it any more. Where programs connect to by it is
/// known no longer.
pub(super) fn kept_spare(kept: &spare) -> Grant {
    let nowhere = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
    Grant {
        id: FlowId(kept.grant),
        role: Role::Initiator,
        app: Tuple { protocol: TCP, source: nowhere, destination: nowhere },
        path: PathId(kept.path),
        local_port: kept.local_port,
        remote_port: kept.remote_port,
        first_flow: FlowId(kept.first_flow),
        count: kept.count,
        until: Instant::ZERO,
        ports: [0; GRANT_FLOWS_MAX as usize],
        key: GrantKey::NONE,
        record: kept.record,
    }
}

/// The same, of one to a peer.
pub(super) fn kept_grant(key: &wire_key, kept: &grant) -> Grant {
    Grant {
        id: FlowId(kept.grant),
        role: Role::Responder,
        app: flow_key_of(&kept.app).tuple(),
        path: PathId(key.path),
        local_port: u16::from_be(key.local_port),
        remote_port: kept.remote_port,
        first_flow: FlowId(kept.first_flow),
        count: kept.count,
        until: Instant::ZERO,
        ports: kept.app_ports.map(u16::from_be),
        key: GrantKey::NONE,
        record: kept.record,
    }
}

pub(super) fn listener_key_of(listener: SocketAddr) -> listener_key {
    let family = if listener.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    listener_key { port: listener.port().to_be(), family: family as u8, ..Default::default() }
}

pub(super) fn flags_of(flow: &WireFlow) -> u32 {
    let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
    flag(flow.egress, FLOW_EGRESS)
        | flag(flow.accept, FLOW_ACCEPT)
        | flag(flow.by_sal0, FLOW_BY_SAL0)
        | flag(flow.of_socket, FLOW_OF_SOCKET)
}

pub(super) fn path_entry_of(path: &WirePath) -> path_entry {
    path_entry {
        local: mapped(path.local),
        remote: mapped(path.remote),
        next_hop: mapped(path.next_hop),
        ifindex: path.ifindex,
        mtu: path.mtu,
        stall_ns: u64::from(path.stall_us) * 1000,
        rtt_ns: 0,
        since_ns: 0,
        flags: (if path.held { PATH_HELD } else { 0 }) | (if path.watched { PATH_WATCHED } else { 0 }),
        zero: 0,
    }
}

pub(super) fn pair_of(entry: &path_entry) -> pair_key {
    pair_key { remote: entry.remote, local: entry.local }
}

fn unjudged_of(entry: &flow_entry) -> Unjudged {
    let (own, peer) = (&entry.egress.numbers, &entry.ingress.numbers);
    Unjudged {
        reset: (peer.flags & NUMBERS_RESET != 0).then_some(peer.reset),
        end: (peer.flags & NUMBERS_END != 0).then_some(peer.end),
        next: (peer.flags & NUMBERS_NEXT != 0).then_some(entry.ingress.next),
        acknowledged: (own.flags & NUMBERS_ACKNOWLEDGED != 0).then_some(own.acknowledgement),
        farthest: (peer.flags & NUMBERS_KNOWN != 0).then(|| (peer.sequence, peer.sequence.wrapping_add(peer.length))),
    }
}

pub(super) fn state_of(key: &wire_key, entry: &flow_entry) -> WireState {
    let direction = |direction: &super::skeleton::types::direction| {
        let numbers = &direction.numbers;
        (numbers.flags & NUMBERS_KNOWN != 0).then_some(TcpSeen {
            segment: direction.segment,
            sequence: numbers.sequence,
            length: numbers.length,
            fin: numbers.flags & 2 != 0,
            acknowledgement: numbers.acknowledgement,
            window: numbers.window,
        })
    };
    WireState {
        flow: FlowId(entry.flow),
        generation: entry.generation,
        app: flow_key_of(&entry.app),
        path: PathId(key.path),
        local_port: u16::from_be(key.local_port),
        remote_port: u16::from_be(key.remote_port),
        egress: entry.flags & FLOW_EGRESS != 0,
        accept: entry.flags & FLOW_ACCEPT != 0,
        stalled: entry.flags & FLOW_STALLED != 0,
        fresh: entry.flags & FLOW_FRESH != 0,
        seen: Seen(entry.seen),
        counters: FlowCounters {
            egress_bytes: entry.egress.bytes,
            egress_segments: entry.egress.segments,
            ingress_bytes: entry.ingress.bytes,
            ingress_segments: entry.ingress.segments,
        },
        sent: direction(&entry.egress),
        received: direction(&entry.ingress),
        unjudged: unjudged_of(entry),
        last_ns: entry.egress.last_ns.max(entry.ingress.last_ns),
    }
}
