//! How long a router waits from one connection with etcd to the next.

use std::time::Duration;

use super::etcd::Trouble;

/// Between members of etcd that fail one after the other, and after all of them have.
const NEXT_MEMBER: Duration = Duration::from_millis(50);
const ROUND_FIRST: Duration = Duration::from_millis(200);
const ROUND_MAX: Duration = Duration::from_secs(2);
/// A connection that has lasted so long was good.
const GOOD: Duration = Duration::from_secs(10);
/// Connections in a row that end because something has changed under the router; from then on people are told.
const REREADS_MAX: u32 = 3;

/// What has come of connections of late.
#[derive(Debug)]
pub struct Pauses {
    members: usize,
    failures: usize,
    round: Duration,
    rereads: u32,
}

/// What is next.
#[derive(Debug, PartialEq, Eq)]
pub struct Next {
    /// How long to wait, before chance has its part.
    pub pause: Duration,
    /// With the next member of etcd: this one failed.
    pub is_other_member: bool,
    /// All is read anew.
    pub is_anew: bool,
    /// How often in a row all was read anew, where that is too often.
    pub unsettled: Option<u32>,
}

impl Pauses {
    /// Nothing has failed yet, of so many members of etcd.
    pub fn new(members: usize) -> Self {
        Self { members: members.max(1), failures: 0, round: ROUND_FIRST, rereads: 0 }
    }

    /// A connection has ended with `trouble`. `lasted`: how long there was one.
    pub fn after(&mut self, trouble: &Trouble, lasted: Option<Duration>) -> Next {
        if lasted.is_some() {
            (self.failures, self.round) = (0, ROUND_FIRST);
        }
        if lasted.is_some_and(|lasted| lasted >= GOOD) {
            self.rereads = 0;
        }
        if let Trouble::Compacted(_) | Trouble::Replaced(_) | Trouble::LeaseLost(_) = trouble {
            self.rereads += 1;
            // Once is what happens; what happens again at once may go on for ever.
            let doubled = ROUND_FIRST.saturating_mul(1 << self.rereads.saturating_sub(2).min(8)).min(ROUND_MAX);
            let pause = if self.rereads == 1 { Duration::ZERO } else { doubled };
            let unsettled = (self.rereads > REREADS_MAX).then_some(self.rereads);
            return Next { pause, is_other_member: false, is_anew: true, unsettled };
        }
        self.failures += 1;
        let pause = if self.failures.is_multiple_of(self.members) {
            self.round = (self.round * 2).min(ROUND_MAX);
            self.round
        } else {
            NEXT_MEMBER
        };
        Next { pause, is_other_member: true, is_anew: false, unsettled: None }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn replaced() -> Trouble {
        Trouble::Replaced("etcd:2379".to_owned())
    }

    fn silent() -> Trouble {
        Trouble::Unreachable("etcd:2379".to_owned(), "no route".to_owned())
    }

    #[test]
    fn what_is_read_anew_again_and_again_waits_longer_and_is_told() {
        let mut pauses = Pauses::new(3);
        let nexts: Vec<Next> = (0..9).map(|_| pauses.after(&replaced(), None)).collect();
        let waits: Vec<u128> = nexts.iter().map(|next| next.pause.as_millis()).collect();
        assert_eq!(waits, [0, 200, 400, 800, 1600, 2000, 2000, 2000, 2000]);
        assert!(nexts.iter().all(|next| next.is_anew && !next.is_other_member));
        assert_eq!([nexts[2].unsettled, nexts[3].unsettled], [None, Some(4)]);
        // A lease that is lost as soon as it is there is the same.
        let lost = Trouble::LeaseLost("etcd:2379".to_owned());
        assert_eq!(pauses.after(&lost, Some(Duration::from_millis(1))).pause, ROUND_MAX);
        assert_eq!(pauses.after(&lost, Some(GOOD)).pause, Duration::ZERO);
    }

    #[test]
    fn members_take_turns_and_a_round_without_any_waits_longer() {
        let mut pauses = Pauses::new(2);
        let waits: Vec<u128> = (0..6).map(|_| pauses.after(&silent(), None).pause.as_millis()).collect();
        assert_eq!(waits, [50, 400, 50, 800, 50, 1600]);
        assert_eq!(pauses.after(&silent(), Some(Duration::from_millis(1))).pause, NEXT_MEMBER);
        assert!(pauses.after(&silent(), None).is_other_member);
    }
}
