//! Which halves of sessions a middlebox's host asks its neighbours about, and when.
//!
//! An end that leaves a path, or gives a new one up, says so a few times and then forgets the path. A middlebox's host
//! that hears none of it, because packets are lost, its link is down or its agent is dead, keeps halves that belong to
//! nobody. So it asks the hosts before and behind: one that has the flow does not reply, one that has not replies
//! `Left`, as it does to any step of a flow that it does not know.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use margay_wire::FlowId;

use super::LEASE_MAX;
use crate::types::time::Instant;

const FIRST_WAIT: Duration = Duration::from_millis(300);
/// Waits double from [`FIRST_WAIT`]. An end keeps a path that it is about to leave for as long as its lock lasts: the
/// last question comes later than that.
const QUESTIONS_MAX: u32 = 8;
const _: () = assert!(FIRST_WAIT.as_millis() * ((1 << (QUESTIONS_MAX - 1)) - 1) > LEASE_MAX.as_millis());
/// The first question about a new path comes when its set-up is over at either end: until its ACK has arrived, the next
/// host does not know the flow as one that carries data, and would reply that it has left.
const QUESTIONS_SKIPPED: u32 = 3;

#[derive(Clone, Copy, Debug)]
struct Check {
    asked: u32,
    next: Instant,
}

/// Bounded by the flow table: a half has at most one entry, which goes with it.
#[derive(Debug, Default)]
pub(super) struct HalfChecks {
    checks: BTreeMap<FlowId, Check>,
}

impl HalfChecks {
    /// Asks from now on, several times.
    pub fn start(&mut self, now: Instant, half: FlowId) {
        self.checks.insert(half, Check { asked: 0, next: now });
    }

    /// Asks about a path that has just been set up, later and fewer times.
    pub fn start_later(&mut self, now: Instant, half: FlowId) {
        self.checks.insert(half, Check { asked: QUESTIONS_SKIPPED, next: now + wait_after(QUESTIONS_SKIPPED) });
    }

    pub fn stop(&mut self, half: FlowId) {
        self.checks.remove(&half);
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.checks.values().map(|check| check.next).min()
    }

    /// The halves to ask about now.
    pub fn take_due(&mut self, now: Instant) -> Vec<FlowId> {
        let due: Vec<FlowId> = self.checks.iter().filter(|(_, check)| check.next <= now).map(|(id, _)| *id).collect();
        for id in &due {
            if let Some(check) = self.checks.get_mut(id) {
                check.next = now + wait_after(check.asked);
                check.asked += 1;
            }
        }
        self.checks.retain(|_, check| check.asked < QUESTIONS_MAX || check.next <= now);
        due
    }
}

/// How long to wait after so many questions.
fn wait_after(asked: u32) -> Duration {
    FIRST_WAIT.saturating_mul(1 << asked.min(QUESTIONS_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn questions(mut checks: HalfChecks) -> Vec<u64> {
        let mut at_ms = Vec::new();
        while let Some(at) = checks.next_deadline() {
            at_ms.extend(checks.take_due(at).iter().map(|_| at.micros() / 1000));
        }
        at_ms
    }

    #[test]
    fn questions_go_on_for_longer_than_an_end_keeps_a_path() {
        let half = FlowId(7);
        let mut checks = HalfChecks::default();
        checks.start(Instant::ZERO, half);
        assert_eq!(questions(checks), [0, 300, 900, 2_100, 4_500, 9_300, 18_900, 38_100]);
        let mut checks = HalfChecks::default();
        checks.start_later(Instant::ZERO, half);
        assert_eq!(questions(checks), [2_400, 4_800, 9_600, 19_200, 38_400]);
    }

    #[test]
    fn a_half_that_is_gone_is_asked_about_no_more() {
        let mut checks = HalfChecks::default();
        checks.start(Instant::ZERO, FlowId(7));
        checks.stop(FlowId(7));
        assert_eq!(checks.next_deadline(), None);
    }
}
