//! Virtual addresses that boxes of this host are to see, and that the agent is asked to lease.

use alloc::vec::Vec;
use core::net::IpAddr;
use core::time::Duration;

use crate::types::fair_table::{FairTable, Peer};
use crate::types::name::ServiceId;
use crate::types::site::Site;
use crate::types::time::Instant;

/// Names that wait at once.
const WANTED_MAX: usize = 1024;
/// What was refused is asked for again after so long, when another session wants it, and then each time after twice as
/// long.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(64);

/// An address that is wanted for a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WantedLease {
    /// The name.
    pub service: ServiceId,
    /// Where the session comes from that wants it: of IPv6, the /64.
    pub by: IpAddr,
}

#[derive(Debug)]
struct Wanted {
    by: IpAddr,
    is_told: bool,
    tries: u32,
    /// From then on it is asked for again.
    next: Instant,
}

/// All of them, by name.
#[derive(Debug)]
pub(super) struct WantedLeases(FairTable<ServiceId, Wanted>);

impl Default for WantedLeases {
    fn default() -> Self {
        Self(FairTable::new(WANTED_MAX, 0))
    }
}

impl WantedLeases {
    /// A session from `address` wants one. Whether the agent is to be asked, and whether it is for the first time: then
    /// the session waits; otherwise it goes on without.
    pub fn want(&mut self, now: Instant, service: ServiceId, address: IpAddr) -> (bool, bool) {
        if let Some(wanted) = self.0.get_mut(&service) {
            let is_due = wanted.next <= now;
            if is_due {
                wanted.is_told = false;
                wanted.tries = wanted.tries.saturating_add(1);
                wanted.next = now + retry_after(wanted.tries);
            }
            return (is_due, false);
        }
        let peer = Peer::Unauthenticated(address);
        if !self.0.has_room(peer) {
            // Nobody has asked for these since.
            self.0.retain(|_, wanted| wanted.next + RETRY_MAX > now);
        }
        let (Site::Address(by) | Site::Network(by)) = Site::both(address)[0];
        let wanted = Wanted { by, is_told: false, tries: 0, next: now + RETRY_FIRST };
        let is_new = self.0.insert(peer, service, wanted).is_ok();
        (is_new, is_new)
    }

    /// How often a name was refused a place.
    pub const fn refused(&self) -> u64 {
        self.0.refused()
    }

    /// The name has one.
    pub fn remove(&mut self, service: &ServiceId) {
        self.0.remove(service);
    }

    /// Those of which the agent was not told yet.
    pub fn take_news(&mut self) -> Vec<WantedLease> {
        let news = self.0.iter_mut().filter(|(_, wanted)| !wanted.is_told);
        news.map(|(service, wanted)| {
            wanted.is_told = true;
            WantedLease { service: *service, by: wanted.by }
        })
        .collect()
    }
}

fn retry_after(tries: u32) -> Duration {
    RETRY_FIRST.saturating_mul(1_u32.checked_shl(tries).unwrap_or(u32::MAX)).min(RETRY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(n: u32) -> ServiceId {
        let mut service = ServiceId::default();
        service.0[..4].copy_from_slice(&n.to_be_bytes());
        service
    }

    fn at(host: u8) -> IpAddr {
        [192, 0, 2, host].into()
    }

    #[test]
    fn what_was_refused_is_asked_for_again_later_and_later() {
        let mut wanted = WantedLeases::default();
        assert_eq!(wanted.want(Instant::ZERO, name(1), at(1)), (true, true));
        assert_eq!(wanted.take_news(), [WantedLease { service: name(1), by: at(1) }]);
        let mut asked_s = Vec::new();
        for second in 0..200 {
            let now = Instant::from_millis(second * 1000);
            if wanted.want(now, name(1), at(1)) == (true, false) {
                asked_s.push(second);
                assert_eq!(wanted.take_news().len(), 1);
            }
            assert!(wanted.take_news().is_empty(), "each is told once");
        }
        assert_eq!(asked_s, [1, 3, 7, 15, 31, 63, 127, 191]);
        wanted.remove(&name(1));
        assert_eq!(wanted.want(Instant::ZERO, name(1), at(1)), (true, true));
    }

    #[test]
    fn a_client_with_a_thousand_names_leaves_room_for_others_and_none_is_kept_for_good() {
        let mut wanted = WantedLeases::default();
        let got = |wanted: &mut WantedLeases, now, names: core::ops::Range<u32>, address| {
            names.filter(|n| wanted.want(now, name(*n), address).0).count()
        };
        assert_eq!(got(&mut wanted, Instant::ZERO, 0..1024, at(1)), 64);
        assert_eq!(got(&mut wanted, Instant::ZERO, 2000..2001, at(2)), 1);
        let later = Instant::ZERO + RETRY_FIRST + RETRY_MAX;
        assert_eq!(got(&mut wanted, later, 3000..3064, at(1)), 64, "those of before are forgotten");
    }
}
