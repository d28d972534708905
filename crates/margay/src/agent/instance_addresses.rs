//! Virtual addresses of instances: which of them stand for one now.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use margay_core::Ranges;
use parking_lot::Mutex;

/// Addresses in use at most, of both families together.
const ADDRESSES_MAX: usize = 16_000;

/// All that are in use on this host.
#[derive(Clone, Debug, Default)]
pub struct InstanceAddresses(Arc<Mutex<HashSet<IpAddr>>>);

impl InstanceAddresses {
    /// A free address of a family, the first from number `start` on; the caller's until [`free`](Self::free). `None`:
    /// all are in use.
    pub fn take(&self, ranges: Ranges, is_v4: bool, start: u32) -> Option<IpAddr> {
        let mut taken = self.0.lock();
        if taken.len() >= ADDRESSES_MAX {
            return None;
        }
        let mut tries = (0..ADDRESSES_MAX as u32).map(|n| ranges.instance(is_v4, start.wrapping_add(n)));
        let address = tries.find(|address| !taken.contains(address))?;
        taken.insert(address);
        Some(address)
    }

    /// Nobody uses the address any more.
    pub fn free(&self, address: IpAddr) {
        self.0.lock().remove(&address);
    }

    /// Whether somebody uses it.
    pub fn is_taken(&self, address: IpAddr) -> bool {
        self.0.lock().contains(&address)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_address_is_given_once_until_it_is_free() {
        let addresses = InstanceAddresses::default();
        let first = addresses.take(Ranges::USUAL, true, 7).expect("there are many");
        let second = addresses.take(Ranges::USUAL, true, 7).expect("there are many");
        assert!(first != second && addresses.is_taken(first) && Ranges::USUAL.is_instance(second));
        addresses.free(first);
        assert_eq!(addresses.take(Ranges::USUAL, true, 7), Some(first));
    }

    #[test]
    fn there_are_only_so_many() {
        let addresses = InstanceAddresses::default();
        let given = (0..=ADDRESSES_MAX as u32).filter_map(|n| addresses.take(Ranges::USUAL, true, n)).count();
        assert_eq!(given, ADDRESSES_MAX);
    }
}
