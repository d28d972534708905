//! A member as the switch knows it: whether it answers, and since when it is asked.

use std::collections::BTreeSet;
use std::time::Duration;

use margay_core::Instant;

use super::MemberAt;
use super::served::{Key, Retry};
use crate::router::Tally;

/// A member's host.
pub(super) type Host = [u8; 16];

/// A member that owes an answer is asked after so long without a word, and again.
const PING_AFTER: Duration = Duration::from_millis(100);
/// A member that owes an answer is dead when it has said nothing to so many of these questions. They are counted, and
/// not the time alone: a switch that was stopped for a while has not listened.
const PINGS_MAX: u32 = 4;
/// A member that was dead is asked so often whether it is there again.
const PROBE_AGAIN: Duration = Duration::from_millis(200);
/// The same of one whose program speaks another protocol: a person has to do something first.
const MISFIT_AGAIN: Duration = Duration::from_secs(2);
/// A member that has left or fallen is taken again at once, if that is no more often in a row; then after a pause. All
/// connections are opened with it then.
const RETURNS_AT_ONCE: u32 = 2;
/// New connections wait so long for a member that is new to answer.
const NEW_MAX: Duration = Duration::from_millis(300);

/// Whether a member answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// It is new, and has not answered yet.
    New,
    /// Something has come from it since its flow began.
    Up,
    /// It is dead, for a reason.
    Down(String),
}

/// A member.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) at: MemberAt,
    /// Of all connections.
    pub(super) tally: Tally,
    /// How many connections have to do with it.
    pub(super) legs: usize,
    pub(super) deaths: u64,
    pub(super) reach: Reach,
    /// Which socket leads to it: another one after each end, and for another member of the same host.
    pub(super) turn: u64,
    /// It is among the members that there are.
    pub(super) is_listed: bool,
    /// It has said that it leaves.
    pub(super) is_leaving: bool,
    /// An operator has drained it.
    pub(super) is_drained: bool,
    /// When it has taken a connection last.
    pub(super) joined_at: Option<Instant>,
    /// Since when it is up, or was.
    up_since: Option<Instant>,
    /// When it is taken again that has left or fallen.
    returns: Retry,
    /// When it has died last: connections that it took before have ended by that death.
    died_at: Option<Instant>,
    /// Since when it is listed no more, and has not said whether it lives.
    parting_since: Option<Instant>,
    /// When it was asked last of all its connections.
    doubted_at: Option<Instant>,
    /// When its host refused a datagram first, since something has come from it.
    refused_at: Option<Instant>,
    /// Since when it owes an answer to what any member answers at once.
    waiting_since: Option<Instant>,
    /// Connections that it owes something: of these it need not say anything before its program does.
    owed_by: BTreeSet<Key>,
    /// Since when there are any.
    owing_since: Option<Instant>,
    since: Instant,
    heard_at: Instant,
    ping_at: Instant,
    /// Questions since it was heard last.
    pings: u32,
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
    /// `life` is another one for each member that there was.
    pub(super) fn new(now: Instant, at: MemberAt, life: u32) -> Self {
        Self {
            at,
            tally: Tally::default(),
            legs: 0,
            deaths: 0,
            reach: Reach::New,
            turn: u64::from(life) << 32,
            is_listed: true,
            is_leaving: false,
            is_drained: false,
            joined_at: None,
            up_since: None,
            returns: Retry::default(),
            died_at: None,
            parting_since: None,
            doubted_at: None,
            refused_at: None,
            waiting_since: None,
            owed_by: BTreeSet::new(),
            owing_since: None,
            since: now,
            heard_at: now,
            ping_at: now,
            pings: 0,
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
    pub(super) fn heard(&mut self, now: Instant) -> bool {
        self.waiting_since = None;
        self.refused_at = None;
        self.heard_at = now;
        self.pings = 0;
        if self.reach == Reach::Up || !self.may_return(now) {
            return false;
        }
        self.reach = Reach::Up;
        self.up_since = Some(now);
        // Another process, perhaps, than the one that left.
        self.is_leaving = false;
        true
    }

    /// It has answered as such: it takes connections. Gives whether it does so from now on.
    pub(super) fn answers(&mut self, now: Instant) -> bool {
        self.parting_since = None;
        if !self.may_return(now) {
            return self.heard(now);
        }
        // Another process than the one that left.
        let was_leaving = std::mem::take(&mut self.is_leaving);
        if was_leaving {
            self.up_since = Some(now);
        }
        self.heard(now) || was_leaving
    }

    fn may_return(&self, now: Instant) -> bool {
        self.returns.failures() <= RETURNS_AT_ONCE || self.returns.is_due(now)
    }

    /// It has said that it leaves. Gives whether that is new.
    pub(super) fn leaves(&mut self, now: Instant) -> bool {
        self.parting_since = None;
        if self.reach == Reach::Up {
            self.heard(now);
        }
        let is_new = !std::mem::replace(&mut self.is_leaving, true);
        if is_new {
            self.returns.failed(now, self.up_since);
        }
        is_new
    }

    /// It is listed no more, and has not said that it leaves: it has died, or its name was withdrawn. It is to be
    /// asked, and is remembered until that is known.
    pub(super) fn parts(&mut self, now: Instant) {
        self.parting_since = Some(now);
    }

    /// Whether nobody knows if it has died.
    pub(super) fn is_parting(&self) -> bool {
        self.parting_since.is_some()
    }

    /// Whether it could have answered since it is listed no more, and has not.
    pub(super) fn has_parted(&self, now: Instant) -> bool {
        self.parting_since.is_some_and(|since| now.since(since) >= PING_AFTER)
    }

    /// It has died, as far as a connection knows that it took at some time. Gives whether that is another death than
    /// the last one.
    pub(super) fn dies(&mut self, now: Instant, joined_at: Instant) -> bool {
        let is_another = self.died_at.is_none_or(|at| joined_at > at);
        if is_another {
            self.died_at = Some(now);
            self.deaths += 1;
        }
        is_another
    }

    /// It does not know a connection that was its. Gives whether it is to be asked of all of them.
    pub(super) fn is_doubted(&mut self, now: Instant) -> bool {
        let is_due = self.doubted_at.is_none_or(|at| now.since(at) >= PING_AFTER);
        if is_due {
            self.doubted_at = Some(now);
        }
        is_due
    }

    /// Something was sent that it answers.
    pub(super) fn asked(&mut self, now: Instant) {
        self.waiting_since = self.waiting_since.or(Some(now));
    }

    /// It owes a connection something, or does so no longer.
    pub(super) fn owes(&mut self, now: Instant, key: Key, is_owing: bool) {
        if is_owing {
            self.owed_by.insert(key);
        } else {
            self.owed_by.remove(&key);
        }
        self.owing_since = if self.owed_by.is_empty() { None } else { self.owing_since.or(Some(now)) };
    }

    /// A datagram was refused. The kernel says so of one that was sent some time ago, and before it gives what has come
    /// since; and a name can be withdrawn for a moment, while it registers again. So a member that was up is asked, and
    /// dead when its host refuses the next question, too.
    pub(super) fn refused(&mut self, now: Instant) -> Due {
        match self.refused_at {
            _ if self.reach != Reach::Up => Due::Dead,
            Some(since) if now.since(since) >= PING_AFTER => Due::Dead,
            Some(_) => Due::Nothing,
            None => {
                self.refused_at = Some(now);
                Due::Ping
            }
        }
    }

    /// Its flow has ended, or it is silent.
    pub(super) fn fell(&mut self, now: Instant, why: &str) {
        if self.reach == Reach::Up && !self.is_leaving {
            self.returns.failed(now, self.up_since);
        }
        self.reach = Reach::Down(why.to_owned());
        self.turn = self.turn.wrapping_add(1);
        self.waiting_since = None;
        self.parting_since = None;
        self.refused_at = None;
        self.ping_at = now + PROBE_AGAIN;
        self.pings = 0;
    }

    /// It has fallen, and not by an accident.
    pub(super) fn misfits(&mut self, now: Instant) {
        self.ping_at = now + MISFIT_AGAIN;
    }

    /// It is asked although it owes nothing: it may be there again, or another process in the place of one that left.
    fn is_probed(&self) -> bool {
        self.is_listed && (self.reach != Reach::Up || self.is_leaving)
    }

    /// Since when a member that is up has owed something, and said nothing.
    fn silent_since(&self) -> Option<Instant> {
        let owing = self.owing_since.map(|since| since.max(self.heard_at));
        self.waiting_since.into_iter().chain(owing).chain(self.parting_since).min().filter(|_| self.reach == Reach::Up)
    }

    /// When it is asked, or has been asked often enough.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let silent = self.silent_since().map(|since| self.ping_at.max(since + PING_AFTER));
        silent.into_iter().chain(self.is_probed().then_some(self.ping_at)).min()
    }

    pub(super) fn on_time(&mut self, now: Instant) -> Due {
        if self.next_deadline().is_none_or(|at| at > now) {
            return Due::Nothing;
        }
        let is_silent = self.silent_since().is_some();
        if is_silent && self.pings >= PINGS_MAX {
            return Due::Dead;
        }
        self.pings += u32::from(is_silent);
        let is_urgent = is_silent || self.reach == Reach::New;
        self.ping_at = now + if is_urgent { PING_AFTER } else { PROBE_AGAIN };
        Due::Ping
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
        Member::new(at(0), MemberAt { host: [1; 16], name: "s1".to_owned(), address, weight: 100 }, 0)
    }

    #[test]
    fn a_member_that_owes_an_answer_is_asked_and_then_dead() {
        let mut member = member();
        assert_eq!(member.on_time(at(0)), Due::Ping, "it is new");
        assert!(member.heard(at(1)) && member.takes());
        assert_eq!((member.next_deadline(), member.on_time(at(9000))), (None, Due::Nothing), "nothing is owed");
        member.asked(at(10_000));
        assert_eq!(member.on_time(at(10_099)), Due::Nothing);
        assert!([10_100, 10_200, 10_300, 10_400].into_iter().all(|millis| member.on_time(at(millis)) == Due::Ping));
        assert_eq!((member.on_time(at(10_499)), member.next_deadline()), (Due::Nothing, Some(at(10_500))));
        assert_eq!(member.on_time(at(10_500)), Due::Dead);
        member.fell(at(10_500), "silent");
        assert_eq!((member.turn, member.takes()), (1, false));
        assert_eq!(member.on_time(at(10_600)), Due::Nothing);
        assert_eq!(member.on_time(at(10_700)), Due::Ping);
    }

    #[test]
    fn a_switch_that_has_not_listened_takes_nobody_for_dead() {
        let mut member = member();
        member.heard(at(1));
        member.asked(at(10));
        assert_eq!(member.on_time(at(9000)), Due::Ping);
        assert_eq!(member.on_time(at(9001)), Due::Nothing, "its answer may wait here");
        member.heard(at(9002));
        assert_eq!(member.next_deadline(), None);
    }

    #[test]
    fn a_member_that_leaves_is_asked_until_another_is_in_its_place() {
        let mut member = member();
        member.heard(at(1));
        member.is_leaving = true;
        assert_eq!((member.on_time(at(10)), member.on_time(at(11))), (Due::Ping, Due::Nothing));
        member.fell(at(300), "its flow has ended");
        assert_eq!(member.on_time(at(500)), Due::Ping);
        assert!(member.heard(at(501)) && member.takes());
    }

    #[test]
    fn a_member_that_was_up_is_asked_before_a_refusal_is_believed() {
        let mut member = member();
        assert_eq!(member.refused(at(0)), Due::Dead, "it has never answered");
        member.heard(at(10));
        assert_eq!([member.refused(at(20)), member.refused(at(21))], [Due::Ping, Due::Nothing]);
        member.asked(at(20));
        assert_eq!(member.on_time(at(120)), Due::Ping);
        assert_eq!(member.refused(at(121)), Due::Dead);
        member.heard(at(130));
        assert_eq!(member.refused(at(500)), Due::Ping, "another refusal");
        member.fell(at(600), "silent");
        assert_eq!(member.refused(at(700)), Due::Dead);
    }

    #[test]
    fn a_member_whose_program_takes_its_time_is_asked_and_lives() {
        let mut member = member();
        member.heard(at(0));
        let key = ("192.0.2.1:9".parse().expect("literal"), 7);
        member.owes(at(1000), key, true);
        assert_eq!((member.next_deadline(), member.on_time(at(1099))), (Some(at(1100)), Due::Nothing));
        assert_eq!(member.on_time(at(1100)), Due::Ping);
        member.heard(at(1101));
        assert_eq!((member.next_deadline(), member.on_time(at(1200))), (Some(at(1201)), Due::Nothing));
        assert!([1201, 1301, 1401, 1501].into_iter().all(|millis| member.on_time(at(millis)) == Due::Ping));
        assert_eq!(member.on_time(at(1601)), Due::Dead);
        member.heard(at(1602));
        member.owes(at(1602), key, false);
        assert_eq!(member.next_deadline(), None);
    }

    #[test]
    fn a_member_that_leaves_and_returns_without_end_is_taken_ever_more_seldom() {
        let mut member = member();
        member.heard(at(0));
        let returns = (1..=60_000).filter(|millis| {
            member.leaves(at(*millis));
            member.answers(at(*millis))
        });
        assert_eq!(returns.count(), 2 + 3 + 8, "twice at once, after 0.8, 1.6 and 3.2 s, and then each 6.4 s");
    }

    #[test]
    fn new_connections_wait_for_a_new_member_and_not_for_a_dead_one() {
        let mut member = member();
        assert!(member.is_awaited(at(299)) && !member.is_awaited(at(300)));
        member.fell(at(10), "its flow has ended");
        assert!(!member.is_awaited(at(20)) && member.is_active());
    }
}
