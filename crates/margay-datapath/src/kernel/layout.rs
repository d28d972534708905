//! What lies in the maps. The types come from `bpf/layout.h` through the object's type information; here are only the ways
//! between them and Rust's.
#![allow(unsafe_code)]

use std::net::SocketAddr;

use margay_core::entry::PathId;
use margay_wire::FlowId;

use super::plain::Plain;
pub(super) use super::skeleton::types::{
    app_key, flow_entry, flow_event, listener_key, pair_key, pair_value, path_entry, wire_key,
};
use super::{Seen, TcpSeen, WireFlow, WirePath, WireState};
use crate::packet::{FlowKey, TCP, mapped};
use crate::table::FlowCounters;

/// As in `layout.h`; the loaded object says its own, which a test compares.
pub(super) const LAYOUT_VERSION: u32 = 5;
pub(super) const FLOW_EGRESS: u32 = 1;
pub(super) const FLOW_ACCEPT: u32 = 2;
pub(super) const FLOW_STALLED: u32 = 4;
pub(super) const PATH_HELD: u32 = 1;
pub(super) const PATH_WATCHED: u32 = 2;
/// An address pair that several peers share.
pub(super) const PATH_SHARED: u32 = u32::MAX;

/// Names of the counters, by number (`enum counter`).
pub(super) const COUNTERS: [&str; 14] = [
    "egress_packets",
    "ingress_packets",
    "up_no_flow",
    "up_not_accepted",
    "left_too_large",
    "left_stalled",
    "left_no_path",
    "drop_agent_dead",
    "drop_rewrite",
    "event_lost",
    "pinholes",
    "too_big",
    "left_held",
    "drop_reset",
];

// SAFETY: made from C structures whose members lie without gaps (`layout.h` has its padding as members); the assertions below
// add them up.
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

const _: () = assert!(size_of::<app_key>() == 16 + 16 + 2 + 2 + 1 + 3);
const _: () = assert!(size_of::<wire_key>() == 4 + 2 + 2 + 1 + 3);
const _: () = assert!(size_of::<flow_entry>() == 8 + 40 + 8 + 2 * (3 * 8 + 24 + 16) + 2 * 8 + 8);
const _: () = assert!(size_of::<path_entry>() == 16 + 16 + 16 + 4 + 4 + 8 + 8 + 8 + 4 + 4);
const _: () = assert!(size_of::<pair_value>() == 4 + 4 + 8);
const _: () = assert!(size_of::<pair_key>() == 32);
const _: () = assert!(size_of::<flow_event>() == 8 + size_of::<app_key>());
const _: () = assert!(size_of::<listener_key>() == 2 + 1 + 1);

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
    wire_key {
        path: flow.path.0,
        local_port: flow.local_port.to_be(),
        remote_port: flow.remote_port.to_be(),
        protocol: flow.app.protocol,
        zero: [0; 3],
    }
}

pub(super) fn listener_key_of(listener: SocketAddr) -> listener_key {
    let family = if listener.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    listener_key { port: listener.port(), protocol: TCP, family: family as u8 }
}

pub(super) fn flags_of(flow: &WireFlow) -> u32 {
    (if flow.egress { FLOW_EGRESS } else { 0 }) | (if flow.accept { FLOW_ACCEPT } else { 0 })
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

pub(super) fn state_of(key: &wire_key, entry: &flow_entry) -> WireState {
    let direction = |direction: &super::skeleton::types::direction| {
        let numbers = &direction.numbers;
        (numbers.flags & 1 != 0).then_some(TcpSeen {
            segment: direction.segment,
            sequence: numbers.sequence,
            length: numbers.length,
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
        seen: Seen(entry.seen),
        counters: FlowCounters {
            egress_bytes: entry.egress.bytes,
            egress_segments: entry.egress.segments,
            ingress_bytes: entry.ingress.bytes,
            ingress_segments: entry.ingress.segments,
        },
        sent: direction(&entry.egress),
        received: direction(&entry.ingress),
        last_ns: entry.egress.last_ns.max(entry.ingress.last_ns),
    }
}
