//! What the program and this process share. The types come from `bpf/router_layout.h` through the object's type information.
#![allow(unsafe_code)]

use std::net::{IpAddr, SocketAddr};

use margay_core::name::{Prefix, ServiceId};
use margay_core::output::DropReason;

use super::Way;
pub(super) use super::skeleton::types::{
    bucket_list, hop, hop_key, hop_version, neighbour_key, own_address, route, route_key, route_length, route_lengths,
    seat, usage,
};
use crate::kernel::plain::Plain;
use crate::packet::mapped;

pub(super) const ROUTE_AGENT: u32 = 0;
pub(super) const ROUTE_SEAT: u32 = 1;
pub(super) const ROUTE_BUCKETS: u32 = 2;
const NO_FILTER: u32 = u32::MAX;
/// A seat whose packets are discarded.
pub(super) const HOP_NONE: u32 = u32::MAX;
const HOP_READY: u16 = 1;
const HOP_KEYED: u16 = 2;
const HOP_V4: u16 = 4;
const HOP_OUTER: u16 = 8;

/// Names of the counters, by number (`enum router_counter`).
pub(super) const COUNTERS: [&str; 11] = [
    "forwarded",
    "drop_hop_limit",
    "drop_service",
    "drop_no_device",
    "left_shape",
    "left_no_route",
    "left_no_way",
    "left_too_large",
    "left_check",
    "left_checksum",
    "bad_hop_tag",
];

/// Counters that stand for a reason of the core's, so that they are counted with it.
pub(super) const DROPS: [(u32, DropReason); 4] = [
    (1, DropReason::HopLimit),
    (2, DropReason::ServiceDrop),
    (3, DropReason::Environment),
    (10, DropReason::BadHopTag),
];

// SAFETY: made from C structures whose members lie without gaps (`router_layout.h` has its padding as members); the assertions
// below add them up.
unsafe impl Plain for route_key {}
// SAFETY: as above.
unsafe impl Plain for route {}
// SAFETY: as above.
unsafe impl Plain for usage {}
// SAFETY: as above.
unsafe impl Plain for seat {}
// SAFETY: as above.
unsafe impl Plain for hop {}
// SAFETY: as above.
unsafe impl Plain for neighbour_key {}
// SAFETY: as above.
unsafe impl Plain for hop_key {}
// SAFETY: as above.
unsafe impl Plain for own_address {}

const _: () = assert!(size_of::<route_key>() == 32 + 4 + 4);
const _: () = assert!(size_of::<usage>() == 2 * 8);
const _: () = assert!(size_of::<route>() == 4 * 4 + size_of::<usage>());
const _: () = assert!(size_of::<seat>() == size_of::<usage>() + 4 + 4);
const _: () = assert!(size_of::<hop_version>() == 16 + 16 + 16 + 4 + 4 + 2 + 2 + 6 + 6);
const _: () = assert!(size_of::<hop>() == 4 + 4 + 8 + 2 * size_of::<hop_version>());
const _: () = assert!(size_of::<neighbour_key>() == 16 + 2 + 6);
const _: () = assert!(size_of::<hop_key>() == 16);
const _: () = assert!(size_of::<own_address>() == 16);
const _: () = assert!(size_of::<bucket_list>() == 4 * margay_core::table::BUCKETS);

/// The bytes of a name as the program reads them: eight at a time.
fn words(id: &ServiceId) -> [u64; 4] {
    let (words, _) = id.0.as_chunks::<8>();
    std::array::from_fn(|at| u64::from_ne_bytes(words[at]))
}

pub(super) fn route_key_of(prefix: &Prefix) -> route_key {
    route_key { id: words(&prefix.id), bits: u32::from(prefix.bits), zero: 0 }
}

fn length_of(bits: u16, filter: Option<u32>) -> route_length {
    let mask = Prefix::new(ServiceId([0xff; 32]), bits);
    route_length { mask: words(&mask.id), bits: u32::from(bits), filter: filter.unwrap_or(NO_FILTER) }
}

/// What the program reads of the lengths in use and their filters; they are at most `LENGTHS_MAX`.
pub(super) fn lengths_of(lengths: &[(u16, Option<u32>)]) -> route_lengths {
    let mut all = route_lengths { count: lengths.len() as u32, ..Default::default() };
    all.of.iter_mut().zip(lengths).for_each(|(place, (bits, filter))| *place = length_of(*bits, *filter));
    all
}

pub(super) fn is_same(one: &route_lengths, other: &route_lengths) -> bool {
    let named = |lengths: &route_lengths| lengths.of.map(|length| (length.bits, length.filter));
    one.count == other.count && named(one) == named(other)
}

/// Word and bit of a filter that stand for a prefix (`may_have_prefix`).
pub(super) fn filter_place(prefix: &Prefix) -> (usize, u64) {
    let id = words(&prefix.id);
    let first = (id[0] ^ id[2]).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (id[1] ^ id[3]);
    let place = first.wrapping_mul(0x94d0_49bb_1331_11eb) >> 45;
    ((place >> 6) as usize, 1 << (place & 63))
}

pub(super) fn key_words(key: &[u8; 16]) -> [u64; 2] {
    let (words, _) = key.as_chunks::<8>();
    std::array::from_fn(|at| u64::from_le_bytes(words[at]))
}

pub(super) fn neighbour_of(address: SocketAddr) -> neighbour_key {
    neighbour_key { address: mapped(address.ip()), port: address.port().to_be(), zero: [0; 6] }
}

pub(super) fn own_of(address: IpAddr) -> own_address {
    own_address { address: mapped(address) }
}

pub(super) fn hop_of(remote: SocketAddr, is_outer: bool, way: Option<&Way>, key: Option<&[u8; 16]>) -> hop_version {
    let mut version = hop_version {
        remote: mapped(remote.ip()),
        remote_port: remote.port().to_be(),
        key: key.map(key_words).unwrap_or_default(),
        flags: (if key.is_some() { HOP_KEYED } else { 0 })
            | (if remote.is_ipv4() { HOP_V4 } else { 0 })
            | (if is_outer { HOP_OUTER } else { 0 }),
        ..Default::default()
    };
    if let Some(way) = way.filter(|way| way.local.is_ipv4() == remote.is_ipv4()) {
        version.flags |= HOP_READY;
        version.local = mapped(way.local);
        (version.ifindex, version.mtu) = (way.ifindex, way.mtu);
        (version.local_mac, version.remote_mac) = (way.local_mac, way.remote_mac);
    }
    version
}
