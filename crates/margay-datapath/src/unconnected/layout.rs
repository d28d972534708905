//! What the programs and this process share. The types come from `bpf/unconnected_layout.h` through the object's type
//! information.
#![allow(unsafe_code)]

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

pub(super) use super::skeleton::types::{address_value, client_key, name_key, question};
use crate::kernel::plain::Plain;
use crate::packet::mapped;

pub(super) const VERSION: u32 = 3;
/// Bytes of `struct spread` before its slots, and of its first member.
const HEAD_LEN: usize = 16;
const USED_LEN: usize = 8;
const SLOTS: usize = 64;

// SAFETY: made from C structures whose members lie without gaps (`unconnected_layout.h` has its padding as members);
// the assertions below add them up.
unsafe impl Plain for name_key {}
// SAFETY: as above.
unsafe impl Plain for address_value {}
// SAFETY: as above.
unsafe impl Plain for client_key {}
// SAFETY: as above.
unsafe impl Plain for question {}

const _: () = assert!(size_of::<name_key>() == 16 + 2 + 2);
const _: () = assert!(size_of::<address_value>() == 16);
const _: () = assert!(size_of::<client_key>() == 16 + 2 + 2);
const _: () = assert!(size_of::<question>() == size_of::<name_key>());

fn words(address: IpAddr) -> [u32; 4] {
    let octets = mapped(address);
    std::array::from_fn(|at| {
        u32::from_ne_bytes([octets[4 * at], octets[4 * at + 1], octets[4 * at + 2], octets[4 * at + 3]])
    })
}

pub(super) fn address_of(value: &address_value) -> IpAddr {
    let mut octets = [0; 16];
    for (place, word) in octets.chunks_exact_mut(4).zip(value.address) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    Ipv6Addr::from(octets).to_canonical()
}

pub(super) fn value_of(address: IpAddr) -> address_value {
    address_value { address: words(address) }
}

pub(super) fn key_of(name: SocketAddr) -> name_key {
    name_key { address: words(name.ip()), port: name.port().to_be(), ..Default::default() }
}

/// A client as servers at a port of this host know it; 0: at any.
pub(super) fn client_key_of(client: SocketAddr, own_port: u16) -> client_key {
    client_key { address: words(client.ip()), port: client.port().to_be(), own_port: own_port.to_be() }
}

pub(super) fn name_of(key: &name_key) -> SocketAddr {
    SocketAddr::new(address_of(&address_value { address: key.address }), u16::from_be(key.port))
}

/// `struct spread`: slots by weight, largest remainders first, at least one for each instance. A slot stays with the
/// instance that it had `before` where that is still entitled to it, so that sticky sockets move only when they must.
pub(super) fn spread_of(instances: &[(IpAddr, u32)], sticky: bool, used_ns: u64, before: Option<&[u8]>) -> Vec<u8> {
    let instances = &instances[..instances.len().min(SLOTS)];
    let mut due = entitled(instances);
    let mut slots: Vec<Option<usize>> = before
        .into_iter()
        .flat_map(slots_of)
        .map(|address| {
            let at = instances.iter().position(|(instance, _)| *instance == address)?;
            due[at] = due[at].checked_sub(1)?;
            Some(at)
        })
        .collect();
    slots.resize(SLOTS, None);
    let mut bytes = Vec::with_capacity(HEAD_LEN + SLOTS * size_of::<address_value>());
    bytes.extend(used_ns.to_ne_bytes());
    bytes.extend(u64::from(sticky).to_ne_bytes());
    for slot in slots {
        let at = slot.or_else(|| {
            let at = (0..due.len()).max_by_key(|at| due[*at])?;
            due[at] = due[at].saturating_sub(1);
            Some(at)
        });
        let address = at.map_or(IpAddr::from([0; 4]), |at| instances[at].0);
        bytes.extend_from_slice(value_of(address).bytes());
    }
    bytes
}

/// How many slots each instance has.
fn entitled(instances: &[(IpAddr, u32)]) -> Vec<usize> {
    let total: u64 = instances.iter().map(|(_, weight)| u64::from(*weight)).sum::<u64>().max(1);
    let shares: Vec<u64> = instances.iter().map(|(_, weight)| u64::from(*weight) * SLOTS as u64).collect();
    let mut slots: Vec<usize> = shares.iter().map(|share| ((share / total) as usize).max(1)).collect();
    while slots.iter().sum::<usize>() < SLOTS {
        // Whoever is furthest below its share.
        let lacks = |at: &usize| shares[*at].cast_signed() - (slots[*at] as u64 * total).cast_signed();
        let Some(most) = (0..slots.len()).max_by_key(lacks) else { break };
        slots[most] += 1;
    }
    while slots.iter().sum::<usize>() > SLOTS {
        let Some(most) = (0..slots.len()).max_by_key(|at| slots[*at]) else { break };
        slots[most] -= 1;
    }
    slots
}

fn slots_of(bytes: &[u8]) -> impl Iterator<Item = IpAddr> + '_ {
    let slots = bytes.get(HEAD_LEN..).unwrap_or_default().chunks_exact(size_of::<address_value>());
    slots.filter_map(|slot| Some(address_of(&address_value::read(slot)?)))
}

/// When a spread was used last, by its bytes.
pub(super) fn used_ns(bytes: &[u8]) -> u64 {
    bytes.get(..USED_LEN).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

#[cfg(test)]
mod test {
    use std::collections::BTreeMap;

    use super::*;

    fn counted(bytes: &[u8]) -> BTreeMap<IpAddr, usize> {
        assert_eq!((bytes.len(), used_ns(bytes)), (16 + 64 * 16, 5));
        let mut counts = BTreeMap::new();
        slots_of(bytes).for_each(|address| *counts.entry(address).or_default() += 1);
        counts
    }

    fn fresh(instances: &[(IpAddr, u32)]) -> BTreeMap<IpAddr, usize> {
        counted(&spread_of(instances, false, 5, None))
    }

    fn address(n: u8) -> IpAddr {
        IpAddr::from([198, 19, 0, n])
    }

    #[test]
    fn slots_follow_the_weights_and_nobody_is_left_out() {
        let even = fresh(&[(address(1), 100), (address(2), 100), (address(3), 100)]);
        assert_eq!(even.values().sum::<usize>(), 64);
        assert!(even.values().all(|count| (21..=22).contains(count)), "{even:?}");
        let uneven = fresh(&[(address(1), 1), (address(2), 10_000)]);
        assert_eq!((uneven[&address(1)], uneven[&address(2)]), (1, 63));
        assert_eq!(fresh(&[(address(9), 1)])[&address(9)], 64);
        let many: Vec<(IpAddr, u32)> = (0..100).map(|n| (address(n), 1)).collect();
        assert_eq!(fresh(&many).len(), 64);
    }

    #[test]
    fn a_change_moves_only_the_slots_that_must() {
        let all: Vec<(IpAddr, u32)> = (1..5).map(|n| (address(n), 100)).collect();
        let before = spread_of(&all, true, 5, None);
        let moved = |after: &[u8]| slots_of(&before).zip(slots_of(after)).filter(|(old, new)| old != new).count();
        let one_gone = spread_of(&all[1..], true, 5, Some(&before));
        assert_eq!((moved(&one_gone), counted(&one_gone)[&address(2)] / 21), (16, 1));
        assert_eq!(moved(&spread_of(&all, true, 5, Some(&before))), 0);
        let back = spread_of(&all, true, 5, Some(&one_gone));
        assert!(counted(&back).values().all(|count| *count == 16));
        assert_eq!(back[8], 1);
    }

    #[test]
    fn names_of_both_families_survive_the_way_there_and_back() {
        for text in ["198.18.0.9:11211", "[fd5a:4c00:1::7]:53"] {
            let name: SocketAddr = text.parse().expect("literal");
            assert_eq!(name_of(&key_of(name)), name);
        }
    }
}
