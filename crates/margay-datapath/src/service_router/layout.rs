//! What the program and this process share. The types come from `bpf/router_layout.h` through the object's type
//! information.
#![allow(unsafe_code)]

use std::net::{IpAddr, SocketAddr};

use margay_core::DropReason;
use margay_core::name::{Prefix, ServiceId};

use super::Way;
pub(super) use super::skeleton::types::{
    bucket_list, cell, cell_order, cell_table, chunk, hop, hop_key, hop_version, neighbour_key, own_address,
    route_length, route_lengths, seat, usage,
};
use crate::kernel::plain::Plain;
use crate::packet::mapped;

pub(super) const CHUNK_CELLS: u32 = 448;
const LINE: usize = 64;
const ROUTE_GONE: u64 = 1;
const ROUTE_AGENT: u64 = 2;
const ROUTE_HOP: u64 = 3;
const ROUTE_BUCKETS: u64 = 4;
pub(super) const CELL_WRITE: u16 = 1;
pub(super) const CELL_READ: u16 = 2;
pub(super) const CELL_ADD: u16 = 3;
pub(super) const CELL_CROWDED: u16 = 1;
pub(super) const CELL_NEW: u16 = 3;
const NO_FILTER: u32 = u32::MAX;
/// A seat whose packets are discarded.
pub(super) const HOP_NONE: u32 = u32::MAX;
const HOP_READY: u16 = 1;
const HOP_KEYED: u16 = 2;
const HOP_V4: u16 = 4;
const HOP_OUTER: u16 = 8;

/// Names of the counters, by number (`enum router_counter`).
pub(crate) const COUNTERS: [&str; 12] = [
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
    "left_crowded",
];

/// Counters that stand for a reason of the core's, so that they are counted with it.
pub(super) const DROPS: [(u32, DropReason); 4] = [
    (1, DropReason::HopLimit),
    (2, DropReason::ServiceDrop),
    (3, DropReason::Environment),
    (10, DropReason::BadHopTag),
];

// SAFETY: made from C structures whose members lie without gaps (`router_layout.h` has its padding as members); the
// assertions below add them up.
unsafe impl Plain for seat {}
// SAFETY: as above.
unsafe impl Plain for hop {}
// SAFETY: as above.
unsafe impl Plain for neighbour_key {}
// SAFETY: as above.
unsafe impl Plain for hop_key {}
// SAFETY: as above.
unsafe impl Plain for own_address {}

const _: () = assert!(size_of::<usage>() == 2 * 8);
const _: () = assert!(size_of::<cell>() == LINE);
const _: () = assert!(size_of::<chunk>() == (CHUNK_CELLS as usize + 2) * LINE);
const _: () = assert!(size_of::<seat>() == size_of::<usage>() + 4 + 4);
const _: () = assert!(size_of::<hop_version>() == 16 + 16 + 16 + 4 + 4 + 2 + 2 + 6 + 6);
const _: () = assert!(size_of::<hop>() == 4 + 4 + 8 + 2 * size_of::<hop_version>());
const _: () = assert!(size_of::<neighbour_key>() == 16 + 2 + 6);
const _: () = assert!(size_of::<hop_key>() == 16);
const _: () = assert!(size_of::<own_address>() == 16);
const _: () = assert!(size_of::<bucket_list>() == 4 * margay_core::table::BUCKETS);

/// The bytes of a name as the program reads them: eight at a time.
pub(super) fn words(id: &ServiceId) -> [u64; 4] {
    let (words, _) = id.0.as_chunks::<8>();
    std::array::from_fn(|at| u64::from_ne_bytes(words[at]))
}

/// What is said of a prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Route {
    /// There is none any more.
    Gone,
    /// The agent decides.
    #[default]
    Agent,
    /// To the next hop of this number.
    Hop(u32),
    /// By the list of buckets of this number.
    Buckets(u32),
}

/// The word of a cell that says a prefix's length and its route.
pub(super) fn route_word(prefix: &Prefix, route: Route) -> u64 {
    let (kind, number) = match route {
        Route::Gone => (ROUTE_GONE, 0),
        Route::Agent => (ROUTE_AGENT, 0),
        Route::Hop(number) => (ROUTE_HOP, number),
        Route::Buckets(number) => (ROUTE_BUCKETS, number),
    };
    u64::from(prefix.bits) << 48 | kind << 32 | u64::from(number)
}

pub(super) fn filter_number(filter: Option<u32>) -> u32 {
    filter.unwrap_or(NO_FILTER)
}

fn length_of(bits: u16, filter: Option<u32>) -> route_length {
    let mask = Prefix::new(ServiceId([0xff; 32]), bits);
    route_length { mask: words(&mask.id), bits: u32::from(bits), filter: filter_number(filter) }
}

/// What the program reads of the lengths in use and their filters; they are at most `LENGTHS_MAX`.
pub(super) fn lengths_of(lengths: &[(u16, Option<u32>)], table: cell_table) -> route_lengths {
    let mut all = route_lengths { count: lengths.len() as u32, table, ..Default::default() };
    all.of.iter_mut().zip(lengths).for_each(|(place, (bits, filter))| *place = length_of(*bits, *filter));
    all
}

pub(super) fn is_same(one: &route_lengths, other: &route_lengths) -> bool {
    let named = |lengths: &route_lengths| lengths.of.map(|length| (length.bits, length.filter));
    let first = |lengths: &route_lengths| lengths.table.first_chunk;
    one.count == other.count && first(one) == first(other) && named(one) == named(other)
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
