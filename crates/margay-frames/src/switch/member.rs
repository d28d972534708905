//! A member as the switch knows it: whether it answers, and since when it is asked.

use std::time::Duration;

use margay_core::Instant;

use super::MemberAt;

/// A member's host.
pub(super) type Host = [u8; 16];

/// A member that owes an answer is asked after so long without a word, and again.
const PING_AFTER: Duration = Duration::from_millis(100);
/// A member that owes an answer is dead after so long without a word.
const SILENCE_MAX: Duration = Duration::from_millis(500);
/// A member that was dead is asked so often whether it is there again.
const PROBE_AGAIN: Duration = Duration::from_millis(200);
/// New connections wait so long for a member that is new to answer.
const NEW_MAX: Duration = Duration::from_millis(300);

/// Whether a member answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// It is new, and has not answered yet.
    New,
    /// It answers.
    Up,
    /// It is dead, for a reason.
    Down(String),
}

/// A member.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) at: MemberAt,
    pub(super) reach: Reach,
    /// Which socket leads to it: another one after each end.
    pub(super) turn: u32,
    /// It is among the members that there are.
    pub(super) is_listed: bool,
    /// It has said that it leaves.
    pub(super) is_leaving: bool,
    /// An operator has drained it.
    pub(super) is_drained: bool,
    /// Since when it owes an answer.
    waiting_since: Option<Instant>,
    since: Instant,
    ping_at: Instant,
}

/// What time has made of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// It is to be asked whether it is there.
    Ping,
    /// It has been silent for too long.
    Dead,
}

impl Member {
    pub(super) fn new(now: Instant, at: MemberAt) -> Self {
        Self {
            at,
            reach: Reach::New,
            turn: 0,
            is_listed: true,
            is_leaving: false,
            is_drained: false,
            waiting_since: None,
            since: now,
            ping_at: now,
        }
    }

    /// It may be given new frames.
    pub(super) fn is_active(&self) -> bool {
        self.is_listed && !self.is_leaving && !self.is_drained && self.at.weight > 0
    }

    /// New connections may begin with it.
    pub(super) fn takes(&self) -> bool {
        self.is_active() && self.reach == Reach::Up
    }

    /// Whether new connections wait until it has answered.
    pub(super) fn is_awaited(&self, now: Instant) -> bool {
        self.is_active() && self.reach == Reach::New && now.since(self.since) < NEW_MAX
    }

    /// Something has come from it. Gives whether it is up from now on.
    pub(super) fn heard(&mut self) -> bool {
        self.waiting_since = None;
        if self.reach == Reach::Up {
            return false;
        }
        self.reach = Reach::Up;
        // Another process, perhaps, than the one that left.
        self.is_leaving = false;
        true
    }

    /// Something was sent that it answers.
    pub(super) fn asked(&mut self, now: Instant) {
        self.waiting_since = self.waiting_since.or(Some(now));
        if self.reach == Reach::Up {
            self.ping_at = self.ping_at.max(now + PING_AFTER);
        }
    }

    /// Its flow has ended, or it is silent.
    pub(super) fn fell(&mut self, now: Instant, why: &str) {
        self.reach = Reach::Down(why.to_owned());
        self.turn = self.turn.wrapping_add(1);
        self.waiting_since = None;
        self.ping_at = now + PROBE_AGAIN;
    }

    /// It is asked although it owes nothing: it may be there again, or another process in the place of one that left.
    fn is_probed(&self) -> bool {
        self.is_listed && (self.reach != Reach::Up || self.is_leaving)
    }

    fn silent_since(&self) -> Option<Instant> {
        self.waiting_since.filter(|_| self.reach == Reach::Up)
    }

    pub(super) fn on_time(&mut self, now: Instant) -> Due {
        let silent_since = self.silent_since();
        if silent_since.is_some_and(|since| now.since(since) >= SILENCE_MAX) {
            return Due::Dead;
        }
        if (silent_since.is_none() && !self.is_probed()) || self.ping_at > now {
            return Due::Nothing;
        }
        let is_urgent = silent_since.is_some() || self.reach == Reach::New;
        self.ping_at = now + if is_urgent { PING_AFTER } else { PROBE_AGAIN };
        Due::Ping
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let silent = self.silent_since().map(|since| self.ping_at.min(since + SILENCE_MAX));
        let probe = self.is_probed().then_some(self.ping_at);
        silent.into_iter().chain(probe).min()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    fn member() -> Member {
        let address = "127.0.0.1:9".parse().expect("literal");
        Member::new(at(0), MemberAt { host: [1; 16], name: "s1".to_owned(), address, weight: 100 })
    }

    #[test]
    fn a_member_that_owes_an_answer_is_asked_and_then_dead() {
        let mut member = member();
        assert_eq!(member.on_time(at(0)), Due::Ping, "it is new");
        assert!(member.heard() && member.takes());
        assert_eq!((member.next_deadline(), member.on_time(at(9000))), (None, Due::Nothing), "nothing is owed");
        member.asked(at(10_000));
        assert_eq!(member.on_time(at(10_099)), Due::Nothing);
        assert_eq!(member.on_time(at(10_100)), Due::Ping);
        assert_eq!(member.on_time(at(10_499)), Due::Ping);
        assert_eq!(member.on_time(at(10_500)), Due::Dead);
        member.fell(at(10_500), "silent");
        assert_eq!((member.turn, member.takes()), (1, false));
        assert_eq!(member.on_time(at(10_600)), Due::Nothing);
        assert_eq!(member.on_time(at(10_700)), Due::Ping);
    }

    #[test]
    fn a_member_that_leaves_is_asked_until_another_is_in_its_place() {
        let mut member = member();
        member.heard();
        member.is_leaving = true;
        assert_eq!((member.on_time(at(10)), member.on_time(at(11))), (Due::Ping, Due::Nothing));
        member.fell(at(300), "its flow has ended");
        assert_eq!(member.on_time(at(500)), Due::Ping);
        assert!(member.heard() && member.takes());
    }

    #[test]
    fn new_connections_wait_for_a_new_member_and_not_for_a_dead_one() {
        let mut member = member();
        assert!(member.is_awaited(at(299)) && !member.is_awaited(at(300)));
        member.fell(at(10), "its flow has ended");
        assert!(!member.is_awaited(at(20)) && member.is_active());
    }
}
