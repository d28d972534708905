//! How many new leases there may be: of all askers together by the second, and of each by the day.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use super::{POOL, QUARANTINE_S};

/// New leases per second.
pub(super) const NEW_PER_S: u64 = 10;
/// New leases at once, where none were made for a while.
pub(super) const NEW_BURST: u64 = 256;
/// Of these, one asker but an operator has at most half, so that others get theirs.
const ASKER_SHARE: u64 = 2;
/// Beside these, for users and addresses that have had none within the last second: one user asks at the program socket
/// and through the host's DNS, and has both halves. As much at once as in a second.
const RESERVE_PER_S: u64 = 10;
/// New leases that one asker may have at once.
pub(super) const ASKER_BURST: u64 = POOL as u64 / 16;
/// How long it takes until an asker that has had those gets another.
pub(super) const ASKER_EVERY_S: u64 = QUARANTINE_S.div_ceil(ASKER_BURST);
/// The same of one address that sends sessions through the boxes of this host; all of them have [`ASKER_BURST`].
const BOXES_BURST: u64 = ASKER_BURST / 16;
/// Askers that are told apart. Those beyond are taken for one.
const ASKERS_MAX: usize = 1024;

// Whatever one asker does, most of the pool is left to others for as long as an address rests.
const _: () = assert!(ASKER_BURST + QUARANTINE_S / ASKER_EVERY_S <= POOL as u64 / 8);

/// Who asks for the address of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Asker {
    /// Questions of DNS from this address, of which no user of this host is known: of a container, say. Those of one
    /// /64 are one.
    Address(IpAddr),
    /// The programs of a user of this host.
    User(u32),
    /// Sessions from this address, or this /64, that pass boxes of this host.
    Boxes(IpAddr),
    /// An operator, or the agent itself.
    Operator,
}

impl fmt::Display for Asker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => write!(f, "who asks the DNS responder from {address}"),
            Self::User(uid) => write!(f, "user {uid}"),
            Self::Boxes(address) => write!(f, "who sends sessions through the boxes of this host from {address}"),
            Self::Operator => f.write_str("whoever uses the agent's own socket"),
        }
    }
}

impl Asker {
    /// What it is counted as.
    fn account(self) -> Self {
        const LINK: u128 = !0 << 64;
        let counted = |address: IpAddr| match address.to_canonical() {
            IpAddr::V6(v6) => Ipv6Addr::from(u128::from(v6) & LINK).into(),
            v4 => v4,
        };
        match self {
            Self::Address(address) => Self::Address(counted(address)),
            Self::Boxes(address) => Self::Boxes(counted(address)),
            Self::User(_) | Self::Operator => self,
        }
    }
}

/// What there is too much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Excess {
    /// New names of all askers, or more than its share of one, within some seconds.
    All,
    /// New names of this asker within a day.
    OfAsker,
}

/// A bucket of leases that may be made: `amount` more every `every_s`, and no more than `burst`.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    burst: u64,
    amount: u64,
    every_s: u64,
    left: u64,
    filled_s: u64,
}

impl Bucket {
    const fn full(burst: u64, amount: u64, every_s: u64, now_s: u64) -> Self {
        Self { burst, amount, every_s, left: burst, filled_s: now_s }
    }

    fn fill(&mut self, now_s: u64) {
        // A clock that was set back: else nothing would be made until it has caught up.
        self.filled_s = self.filled_s.min(now_s);
        let periods = (now_s - self.filled_s) / self.every_s;
        self.left = self.left.saturating_add(periods.saturating_mul(self.amount)).min(self.burst);
        self.filled_s += periods * self.every_s;
    }
}

/// What one asker may have: within seconds, and within days.
#[derive(Clone, Copy, Debug)]
struct OfAsker {
    pace: Bucket,
    long: Bucket,
}

impl OfAsker {
    const fn full(long: Bucket, now_s: u64) -> Self {
        Self { pace: Bucket::full(NEW_BURST / ASKER_SHARE, NEW_PER_S / ASKER_SHARE, 1, now_s), long }
    }

    fn fill(&mut self, now_s: u64) {
        self.pace.fill(now_s);
        self.long.fill(now_s);
    }

    /// Whether it has had nothing within the last second, or has got back what it had.
    const fn is_idle(&self) -> bool {
        self.pace.left == self.pace.burst
    }

    const fn is_full(&self) -> bool {
        self.is_idle() && self.long.left == self.long.burst
    }
}

/// The buckets of all askers.
#[derive(Debug)]
pub(super) struct Budgets {
    all: Bucket,
    reserve: Bucket,
    by_asker: HashMap<Asker, OfAsker>,
    /// Of all whose sessions pass boxes.
    boxes: Bucket,
    others: OfAsker,
}

impl Budgets {
    pub(super) fn new(now_s: u64) -> Self {
        let all = Bucket::full(NEW_BURST, NEW_PER_S, 1, now_s);
        let reserve = Bucket::full(RESERVE_PER_S, RESERVE_PER_S, 1, now_s);
        let others = OfAsker::full(Self::of_asker(now_s), now_s);
        Self { all, reserve, by_asker: HashMap::new(), boxes: Self::of_asker(now_s), others }
    }

    const fn of_asker(now_s: u64) -> Bucket {
        Bucket::full(ASKER_BURST, 1, ASKER_EVERY_S, now_s)
    }

    /// One new lease for this asker.
    pub(super) fn take(&mut self, asker: Asker, now_s: u64) -> Result<(), Excess> {
        self.all.fill(now_s);
        self.reserve.fill(now_s);
        self.boxes.fill(now_s);
        let left_of_boxes = match asker {
            Asker::Boxes(_) => self.boxes.left.checked_sub(1).ok_or(Excess::OfAsker)?,
            _ => self.boxes.left,
        };
        let (all, reserve) = (self.all.left, self.reserve.left);
        let own = self.of(asker, now_s);
        own.fill(now_s);
        let has_reserve = matches!(asker, Asker::User(_) | Asker::Address(_)) && own.is_idle();
        // What others ask for does not keep an operator from it.
        let (left_of_all, left_of_reserve) = match (asker, all.checked_sub(1)) {
            (Asker::Operator, _) => (all, reserve),
            (_, Some(left)) => (left, reserve),
            (_, None) if has_reserve => (all, reserve.checked_sub(1).ok_or(Excess::All)?),
            (_, None) => return Err(Excess::All),
        };
        let left_of_pace = match asker {
            Asker::Operator => own.pace.left,
            _ => own.pace.left.checked_sub(1).ok_or(Excess::All)?,
        };
        own.long.left = own.long.left.checked_sub(1).ok_or(Excess::OfAsker)?;
        own.pace.left = left_of_pace;
        self.all.left = left_of_all;
        self.reserve.left = left_of_reserve;
        self.boxes.left = left_of_boxes;
        Ok(())
    }

    /// As if this asker had had all that it may have.
    #[cfg(test)]
    pub(super) fn spend(&mut self, asker: Asker) {
        let now_s = self.all.filled_s;
        self.of(asker, now_s).long.left = 0;
    }

    fn of(&mut self, asker: Asker, now_s: u64) -> &mut OfAsker {
        let asker = asker.account();
        if self.by_asker.len() >= ASKERS_MAX && !self.by_asker.contains_key(&asker) {
            // One that is full again is as if its asker had never been seen.
            self.by_asker.retain(|_, own| {
                own.fill(now_s);
                !own.is_full()
            });
            if self.by_asker.len() >= ASKERS_MAX {
                return &mut self.others;
            }
        }
        let fresh = || {
            let long = match asker {
                Asker::Boxes(_) => Bucket::full(BOXES_BURST, 1, 16 * ASKER_EVERY_S, now_s),
                _ => Self::of_asker(now_s),
            };
            OfAsker::full(long, now_s)
        };
        self.by_asker.entry(asker).or_insert_with(fresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_asker_gets_a_small_part_of_the_pool_in_a_day_and_others_get_theirs() {
        let mut budgets = Budgets::new(0);
        let mut got = 0;
        for now_s in 0..QUARANTINE_S {
            let tries = (0..NEW_BURST).map(|_| budgets.take(Asker::Operator, now_s)).take_while(Result::is_ok);
            got += tries.count() as u64;
        }
        assert!(got > ASKER_BURST && got <= u64::from(POOL) / 8, "{got} new names of one asker in a day");
        assert_eq!(budgets.take(Asker::Operator, QUARANTINE_S - 1), Err(Excess::OfAsker));
        assert_eq!(budgets.take(Asker::User(0), QUARANTINE_S - 1), Ok(()));
    }

    #[test]
    fn one_address_leaves_most_of_what_boxes_may_have_to_others_and_nobody_keeps_an_operator_from_a_name() {
        let mut budgets = Budgets::new(0);
        let address = |n: u8| Asker::Boxes(IpAddr::from([192, 0, 2, n]));
        let got = |budgets: &mut Budgets, asker| {
            // Slowly enough for all askers together.
            (0..2 * ASKER_BURST).filter(|second| budgets.take(asker, *second).is_ok()).count() as u64
        };
        let of_one = got(&mut budgets, address(1));
        assert!((BOXES_BURST..ASKER_BURST / 8).contains(&of_one), "{of_one}");
        assert!(budgets.take(address(2), 2 * ASKER_BURST).is_ok());
        while budgets.take(address(2), 2 * ASKER_BURST).is_ok() {}
        let of_users = (0..300).filter(|uid| budgets.take(Asker::User(*uid), 2 * ASKER_BURST).is_ok()).count() as u64;
        assert!(of_users <= NEW_BURST + RESERVE_PER_S, "{of_users}");
        assert_eq!(budgets.take(Asker::User(300), 2 * ASKER_BURST), Err(Excess::All));
        assert_eq!(budgets.take(Asker::Operator, 2 * ASKER_BURST), Ok(()));
    }

    #[test]
    fn one_asker_leaves_half_of_each_second_to_others() {
        let mut budgets = Budgets::new(0);
        let at = |text: &str| Asker::Address(text.parse().expect("literal"));
        let mut taken = |asker, now_s| (0..NEW_BURST).filter(|_| budgets.take(asker, now_s).is_ok()).count() as u64;
        assert_eq!(taken(at("fd00::1"), 0), NEW_BURST / 2);
        assert_eq!(taken(at("fd00::2"), 0), 0, "another address of its /64");
        assert_eq!(taken(Asker::User(1), 0), NEW_BURST / 2);
        for now_s in 1..100 {
            assert_eq!(taken(at("fd00::1"), now_s), NEW_PER_S / 2);
            assert_eq!(taken(Asker::User(1), now_s), NEW_PER_S / 2);
        }
    }

    #[test]
    fn who_has_had_none_gets_a_name_though_another_user_asks_at_two_places() {
        let mut budgets = Budgets::new(0);
        let greedy = [Asker::User(1), Asker::Address([198, 18, 0, 1].into())];
        for now_s in 0..100 {
            let of_greedy = |asker| (0..NEW_BURST).filter(|_| budgets.take(asker, now_s).is_ok()).count() as u64;
            let taken: u64 = greedy.map(of_greedy).iter().sum();
            assert_eq!(taken, if now_s == 0 { NEW_BURST } else { NEW_PER_S });
            assert_eq!(budgets.take(Asker::User(2), now_s), Ok(()));
            assert_eq!(budgets.take(Asker::User(2), now_s), Err(Excess::All));
        }
    }

    #[test]
    fn askers_beyond_those_that_are_told_apart_share_a_bucket() {
        let mut budgets = Budgets::new(0);
        let asker = |number: usize| Asker::User(u32::try_from(number).expect("small"));
        for number in 0..ASKERS_MAX {
            assert_eq!(budgets.take(asker(number), number as u64), Ok(()));
        }
        let now_s = ASKERS_MAX as u64;
        // The last ones have not got theirs back yet, the first ones are forgotten.
        assert_eq!(budgets.take(asker(ASKERS_MAX), now_s), Ok(()));
        assert!(budgets.by_asker.len() < ASKERS_MAX);
        let mut budgets = Budgets::new(0);
        for number in 0..ASKERS_MAX {
            budgets.all = Bucket::full(NEW_BURST, NEW_PER_S, 1, 0);
            assert_eq!(budgets.take(asker(number), 0), Ok(()));
        }
        assert_eq!(budgets.take(asker(ASKERS_MAX), 0), Ok(()));
        assert_eq!((budgets.by_asker.len(), budgets.others.long.left), (ASKERS_MAX, ASKER_BURST - 1));
    }
}
