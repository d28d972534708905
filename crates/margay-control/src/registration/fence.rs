//! Fenced names of one router: who holds each, with which number, by which notice; and for whom each is kept that
//! cannot be heard just now (DESIGN §3.9, docs/decisions/0072).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use margay_core::key::HostId;
use margay_core::name::Prefix;
use tokio::time::Instant;

use super::leave::Leave;
use crate::cluster::claimed_as;

/// A name is kept for its holder until so long after that was heard last. A holder that hears nothing of routers stops
/// a little sooner, so that at no time two hosts serve it. In milliseconds: long enough for a router or an agent that
/// starts again.
pub const FENCE_HOLD_MS: u32 = 1500;
const FENCE_HOLD: Duration = Duration::from_millis(FENCE_HOLD_MS as u64);

/// Who holds a name.
#[derive(Debug)]
struct Fence {
    host: HostId,
    number: u64,
    notice: Option<Arc<[u8]>>,
    /// It is not registered, and may hold the name still until then.
    kept_until: Option<Instant>,
}

/// All of them, each as [`claimed_as`] has it.
#[derive(Debug, Default)]
pub struct Fences {
    all: BTreeMap<Prefix, Fence>,
    /// Silence after which a host is gone.
    lease: Duration,
}

impl Fences {
    /// None yet. A host that is silent for a lease is gone.
    pub fn new(lease: Duration) -> Self {
        Self { all: BTreeMap::new(), lease }
    }

    /// The other host for which a name is kept.
    pub fn kept_for_other(&self, prefix: &Prefix, host: HostId, now: Instant) -> Option<HostId> {
        let fence = self.all.get(&claimed_as(prefix)).filter(|fence| fence.host != host)?;
        fence.kept_until.filter(|until| now < *until).map(|_| fence.host)
    }

    /// With which number a host holds a name.
    pub fn number(&self, prefix: &Prefix, host: HostId) -> Option<u64> {
        self.of(prefix, host).filter(|fence| fence.kept_until.is_none()).map(|fence| fence.number)
    }

    /// By which notice.
    pub fn notice(&self, prefix: &Prefix, host: HostId) -> Option<&Arc<[u8]>> {
        self.of(prefix, host).filter(|fence| fence.kept_until.is_none())?.notice.as_ref()
    }

    fn of(&self, prefix: &Prefix, host: HostId) -> Option<&Fence> {
        self.all.get(&claimed_as(prefix)).filter(|fence| fence.host == host)
    }

    /// A host holds a name from now on.
    pub fn hold(&mut self, prefix: &Prefix, host: HostId, number: u64) {
        let fence = Fence { host, number, notice: None, kept_until: None };
        self.all.insert(claimed_as(prefix), fence);
    }

    /// A holder has given its notice; false: it does not hold the name with that number.
    pub fn set_notice(&mut self, prefix: &Prefix, host: HostId, number: u64, notice: Arc<[u8]>) -> bool {
        let fence = self.all.get_mut(&claimed_as(prefix));
        let fence = fence.filter(|fence| fence.host == host && fence.number == number && fence.kept_until.is_none());
        let Some(fence) = fence else { return false };
        fence.notice = Some(notice);
        true
    }

    /// A holder is to give its notice anew.
    pub fn drop_notice(&mut self, prefix: &Prefix, host: HostId) {
        if let Some(fence) = self.all.get_mut(&claimed_as(prefix)).filter(|fence| fence.host == host) {
            fence.notice = None;
        }
    }

    /// A host has held a name before this router has started, and may hold it still.
    pub fn keep(&mut self, prefix: &Prefix, host: HostId) {
        let kept_until = Some(Instant::now() + FENCE_HOLD);
        self.all.insert(claimed_as(prefix), Fence { host, number: 0, notice: None, kept_until });
    }

    /// A host does not have a name registered any more. Unless it has said so, or another one has the name, it may not
    /// know.
    pub fn left(&mut self, prefix: &Prefix, host: HostId, why: Leave) {
        let prefix = claimed_as(prefix);
        let Some(fence) = self.all.get_mut(&prefix).filter(|fence| fence.host == host) else { return };
        let kept_for = match why {
            Leave::Withdrawn | Leave::GivenAway => None,
            // It was silent for a lease already.
            Leave::Lapsed => Some(FENCE_HOLD.saturating_sub(self.lease)),
            Leave::Ended | Leave::NotRenewed | Leave::Expelled => Some(FENCE_HOLD),
        };
        match kept_for {
            Some(kept_for) => fence.kept_until = Some(Instant::now() + kept_for),
            None => drop(self.all.remove(&prefix)),
        }
    }

    /// Names that are kept for a host.
    pub fn kept_for(&self, host: HostId) -> impl Iterator<Item = &Prefix> {
        let is_its = move |fence: &Fence| fence.host == host && fence.kept_until.is_some();
        self.all.iter().filter(move |(_, fence)| is_its(fence)).map(|(prefix, _)| prefix)
    }

    /// Forgets names that need be kept no longer; gives them, and the hosts that they were kept for.
    pub fn end_kept(&mut self, now: Instant) -> Vec<(Prefix, HostId)> {
        let is_over = |fence: &Fence| fence.kept_until.is_some_and(|until| until <= now);
        self.all.extract_if(.., |_, fence| is_over(fence)).map(|(prefix, fence)| (prefix, fence.host)).collect()
    }

    /// When the next one need be kept no longer.
    pub fn next_end(&self) -> Option<Instant> {
        self.all.values().filter_map(|fence| fence.kept_until).min()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const LEASE: Duration = Duration::from_millis(850);

    fn name() -> Prefix {
        "db.shop".parse().expect("literal")
    }

    fn host(n: u8) -> HostId {
        HostId([n; 16])
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_is_kept_for_whoever_may_hold_it_still_and_no_longer() {
        for (why, kept_ms) in [
            (Leave::Withdrawn, 0),
            (Leave::GivenAway, 0),
            (Leave::Lapsed, 650),
            (Leave::Ended, 1500),
            (Leave::NotRenewed, 1500),
            (Leave::Expelled, 1500),
        ] {
            let mut fences = Fences::new(LEASE);
            fences.hold(&name(), host(1), 7);
            fences.left(&name(), host(2), Leave::Withdrawn);
            assert_eq!(fences.number(&name(), host(1)), Some(7), "what another host does is no concern");
            fences.left(&name(), host(1), why);
            assert_eq!((fences.number(&name(), host(1)), fences.notice(&name(), host(1))), (None, None), "{why:?}");
            let left = Instant::now();
            let kept = |now: Instant| fences.kept_for_other(&name(), host(2), now) == Some(host(1));
            let of_ms = |ms| left + Duration::from_millis(ms);
            assert_eq!(kept(left), kept_ms > 0, "{why:?}");
            assert!(!kept(of_ms(kept_ms)) && (kept_ms == 0 || kept(of_ms(kept_ms - 1))), "{why:?}");
            assert_eq!(fences.kept_for_other(&name(), host(1), left), None, "it may come back");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_notice_is_taken_of_the_holder_with_its_number_alone() {
        let mut fences = Fences::new(LEASE);
        let notice: Arc<[u8]> = Arc::from(*b"notice");
        assert!(!fences.set_notice(&name(), host(1), 7, Arc::clone(&notice)));
        fences.hold(&name(), host(1), 7);
        assert!(!fences.set_notice(&name(), host(2), 7, Arc::clone(&notice)));
        assert!(!fences.set_notice(&name(), host(1), 6, Arc::clone(&notice)));
        assert!(fences.set_notice(&name(), host(1), 7, Arc::clone(&notice)));
        assert_eq!((fences.notice(&name(), host(1)), fences.notice(&name(), host(2))), (Some(&notice), None));
        let divided = claimed_as(&name());
        assert_eq!(fences.notice(&divided, host(1)), Some(&notice), "it is one name");
        fences.hold(&name(), host(2), 8);
        assert_eq!(fences.notice(&name(), host(1)), None);
    }

    #[tokio::test(start_paused = true)]
    async fn whom_a_start_before_has_given_a_name_is_waited_for_and_then_forgotten() {
        let mut fences = Fences::new(LEASE);
        fences.keep(&name(), host(1));
        assert_eq!(fences.kept_for_other(&name(), host(2), Instant::now()), Some(host(1)));
        fences.hold(&"other.shop".parse().expect("literal"), host(2), 1);
        let kept = |fences: &Fences| fences.kept_for(host(1)).copied().collect::<Vec<_>>();
        assert_eq!((kept(&fences), fences.kept_for(host(2)).count()), (vec![claimed_as(&name())], 0));
        assert_eq!(fences.end_kept(Instant::now()), []);
        let end = fences.next_end().expect("one is kept");
        tokio::time::advance(FENCE_HOLD).await;
        assert!(end <= Instant::now() && fences.kept_for_other(&name(), host(2), Instant::now()).is_none());
        assert_eq!(fences.end_kept(Instant::now()), [(claimed_as(&name()), host(1))]);
        assert_eq!((fences.all.len(), fences.next_end()), (1, None));
    }
}
