//! Addresses of hosts that this one has an association with: what comes from others to a flow port is none of Margay's.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use libbpf_rs::MapCore;
use margay_core::entry::PathId;
use margay_core::time::Instant;

use super::put;
use crate::clock;
use crate::packet::mapped;

/// What a peer has sent from an address before it left that may come for so long: as long as flow ports rest.
const LINGER: Duration = Duration::from_secs(60);

/// Which path records stand at which addresses, and the map that says so to the programs.
#[derive(Default)]
pub(super) struct PeerAddresses {
    standing: HashMap<PathId, IpAddr>,
    /// By address, how many stand there. Each is in the map, for ever.
    count: HashMap<IpAddr, u32>,
    /// Addresses that were left, each in the map until then.
    left: HashMap<[u8; 16], Instant>,
}

impl PeerAddresses {
    /// What the process before has left in the map: nothing stands there until it is said again.
    pub(super) fn of_before(map: &impl MapCore) -> Self {
        let until = clock::now() + LINGER;
        let mut peers = Self::default();
        // A walk over a map that is changed meanwhile need not end.
        for key in map.keys().collect::<Vec<_>>() {
            if let Ok(address) = <[u8; 16]>::try_from(key) {
                set(map, &address, Some(until));
                peers.left.insert(address, until);
            }
        }
        peers
    }

    /// A path record stands at this address now, or nowhere.
    pub(super) fn stand(&mut self, map: &impl MapCore, id: PathId, address: Option<IpAddr>) {
        let before = match address {
            Some(address) => self.standing.insert(id, address),
            None => self.standing.remove(&id),
        };
        if before == address {
            return;
        }
        if let Some(address) = address {
            let count = self.count.entry(address).or_default();
            *count += 1;
            if *count == 1 {
                self.left.remove(&mapped(address));
                set(map, &mapped(address), None);
            }
        }
        let Some(before) = before else { return };
        let Some(count) = self.count.get_mut(&before) else { return };
        *count -= 1;
        if *count == 0 {
            self.count.remove(&before);
            let until = clock::now() + LINGER;
            set(map, &mapped(before), Some(until));
            self.left.insert(mapped(before), until);
        }
    }

    /// Takes addresses out of the map that were left long enough ago.
    pub(super) fn forget_left(&mut self, map: &impl MapCore) {
        let now = clock::now();
        for (address, _) in self.left.extract_if(|_, until| *until <= now) {
            // Refused only when it is gone already.
            let _ = map.delete(&address);
        }
    }
}

fn set(map: &impl MapCore, address: &[u8; 16], until: Option<Instant>) {
    let until_ns = until.map_or(u64::MAX, |until| until.micros() * 1000);
    if let Err(error) = put(map, address, &until_ns.to_ne_bytes(), "addresses of peers") {
        tracing::warn!(%error, "what is late from a peer may be reset by this host");
    }
}

#[cfg(test)]
mod test {
    use libbpf_rs::MapFlags;

    use super::*;

    /// A map of the programs' kind; `None` without root.
    fn map() -> Option<libbpf_rs::MapHandle> {
        if !nix::unistd::Uid::effective().is_root() {
            eprintln!("skipped: eBPF needs root");
            return None;
        }
        let options = libbpf_sys::bpf_map_create_opts {
            sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        let kind = libbpf_rs::MapType::Hash;
        Some(libbpf_rs::MapHandle::create(kind, Some("peers"), 16, 8, 4, &options).expect("a map"))
    }

    fn until(map: &impl MapCore, address: IpAddr) -> Option<u64> {
        let value = map.lookup(&mapped(address), MapFlags::ANY).expect("a map")?;
        Some(u64::from_ne_bytes(value.try_into().expect("eight bytes")))
    }

    #[test]
    fn an_address_is_a_peers_while_a_path_stands_there_and_a_while_longer() {
        let Some(map) = map() else { return };
        let [one, two] = ["10.1.0.1", "fd00::2"].map(|text| text.parse::<IpAddr>().expect("literal"));
        let mut peers = PeerAddresses::default();
        peers.stand(&map, PathId(1), Some(one));
        peers.stand(&map, PathId(2), Some(one));
        peers.stand(&map, PathId(1), Some(two));
        assert_eq!((until(&map, one), until(&map, two)), (Some(u64::MAX), Some(u64::MAX)));
        peers.stand(&map, PathId(2), None);
        let left = until(&map, one).expect("late packets may come");
        assert!(left < u64::MAX && left > clock::now().micros() * 1000);
        peers.stand(&map, PathId(3), Some(one));
        assert_eq!(until(&map, one), Some(u64::MAX), "somebody is there again");

        let mut next = PeerAddresses::of_before(&map);
        next.stand(&map, PathId(1), Some(two));
        next.left.values_mut().for_each(|until| *until = clock::now());
        next.forget_left(&map);
        assert_eq!((until(&map, one), until(&map, two)), (None, Some(u64::MAX)), "nobody has said so again");
    }
}
