//! Interfaces of this host as the programs know them: which are cards, and what is inside (DESIGN §18).

use std::collections::HashSet;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use libbpf_rs::MapCore;
use margay_core::chain::OUTSIDE_HOP_LIMIT;
use margay_core::flow_cache::{DATAGRAM_ANSWER, DATAGRAM_IDLE, DATAGRAM_STALL, STALL_UNKNOWN};
use margay_core::{BITS_V4, KNOCK_WINDOW, PINHOLE_WINDOW, Ranges};

use super::layout::inside_key;
use super::plain::Plain;
use super::skeleton::types::rodata;
use super::{CacheError, put};
use crate::packet::mapped;

/// Bits of an interface's number at the head of a key.
const NUMBER_BITS: u32 = 32;
/// Of an IPv4 address before the address itself, where it is v4-mapped.
const MAPPED_BITS: u32 = 96;

/// An interface of this host other than the loopback and `sal0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// The kernel's number.
    pub index: u32,
    /// Its packets are Ethernet frames, so that flows may go direct over it.
    pub is_ethernet: bool,
    /// Who may send to virtual addresses from there.
    pub inside: Inside,
}

/// Who at an interface may send to virtual addresses of this host, and be answered from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inside {
    /// Nobody: it is a card.
    Nobody,
    /// Whoever has an address of these prefixes: first address and length.
    Prefixes(Vec<(IpAddr, u8)>),
    /// It is a port of a bridge that is inside, and the bridge decides.
    Port,
}

impl Interface {
    /// A network card.
    pub const fn card(index: u32) -> Self {
        Self { index, is_ethernet: true, inside: Inside::Nobody }
    }

    /// Keys of all who may.
    fn keys(&self) -> Vec<inside_key> {
        let prefixes: &[(IpAddr, u8)] = match &self.inside {
            Inside::Nobody => &[],
            Inside::Prefixes(prefixes) => prefixes,
            Inside::Port => return vec![inside_key { prefix_len: NUMBER_BITS, ifindex: self.index, address: [0; 16] }],
        };
        let key = |(address, bits): &(IpAddr, u8)| {
            let before = if address.is_ipv4() { NUMBER_BITS + MAPPED_BITS } else { NUMBER_BITS };
            inside_key { prefix_len: before + u32::from(*bits), ifindex: self.index, address: mapped(*address) }
        };
        prefixes.iter().map(key).collect()
    }
}

/// Has the map hold what is inside of these interfaces, and nothing else.
pub(super) fn set_insides(map: &impl MapCore, interfaces: &[Interface]) -> Result<(), CacheError> {
    let wanted: Vec<inside_key> = interfaces.iter().flat_map(Interface::keys).collect();
    let known: HashSet<Vec<u8>> = wanted.iter().map(|key| key.bytes().to_vec()).collect();
    let gone: Vec<_> = map.keys().filter(|key| !known.contains(key)).collect();
    for key in gone {
        // Refused only when it is gone already.
        let _ = map.delete(&key);
    }
    wanted.iter().try_for_each(|key| put(map, key.bytes(), &1_u32.to_ne_bytes(), "prefixes that are inside"))
}

/// Tells the programs which addresses are virtual, and which of them are the host's own.
pub(super) fn set_virtual(constants: &mut rodata, ranges: Ranges) {
    (constants.virtual_v4, constants.virtual_v4_mask) = prefix_v4(ranges);
    constants.virtual_v6 = prefix_v6(ranges);
    (constants.host_v4, constants.host_v6) = host_words(ranges);
}

/// Tells the programs the numbers that all flow caches have in common.
pub(super) fn set_common(constants: &mut rodata) {
    let nanoseconds = |time: Duration| time.as_nanos() as u64;
    constants.pinhole_window = PINHOLE_WINDOW;
    constants.knock_window = KNOCK_WINDOW;
    constants.outside_hop_limit = OUTSIDE_HOP_LIMIT.into();
    constants.stall_unknown_ns = nanoseconds(STALL_UNKNOWN);
    constants.datagram_answer_ns = nanoseconds(DATAGRAM_ANSWER);
    constants.datagram_stall_ns = nanoseconds(DATAGRAM_STALL);
    constants.datagram_idle_ns = nanoseconds(DATAGRAM_IDLE);
}

/// What all virtual IPv4 addresses begin with, and the bits of that, in the order of the network.
pub(crate) fn prefix_v4(ranges: Ranges) -> (u32, u32) {
    (ranges.first_v4().to_bits().to_be(), (u32::MAX << (32 - BITS_V4)).to_be())
}

/// The first word of all virtual IPv6 addresses, in the order of the network.
pub(crate) fn prefix_v6(ranges: Ranges) -> u32 {
    words(ranges.first_v6())[0]
}

/// The host's own virtual addresses, in the order of the network.
pub(crate) fn host_words(ranges: Ranges) -> (u32, [u32; 4]) {
    (ranges.host_v4().to_bits().to_be(), words(ranges.host_v6()))
}

fn words(address: Ipv6Addr) -> [u32; 4] {
    let bits = address.to_bits();
    [96, 64, 32, 0].map(|shift| ((bits >> shift) as u32).to_be())
}
