//! One lock per session: every act that changes a flow takes it, with a lease; two never run together (DESIGN §7).
//!
//! A lease, since a holder may die: when it runs out the lock is free, and the old guard is worth nothing. A guard is
//! never given out twice, so a holder that comes back late cannot release or renew what another holds by then.

pub mod event;
pub(crate) mod flow;
pub mod give_up;
pub mod hand_over;

use core::fmt;
use core::time::Duration;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use margay_wire::SessionId;

use crate::types::fair_table::{FairTable, Full, Peer};
use crate::types::key::HostId;
use crate::types::state::Machine;
use crate::types::time::Instant;

/// Longest lease: no dead holder keeps a session from moving for longer.
pub const LEASE_MAX: Duration = Duration::from_secs(30);

/// What changes a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Act {
    /// To another address, interface or path.
    Move,
    /// Another chain of middleboxes.
    Chain,
    /// Another stack.
    Stack,
    /// To another host.
    HandOver,
    /// Its instance is being emptied.
    Drain,
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Move => "move",
            Self::Chain => "chain",
            Self::Stack => "stack",
            Self::HandOver => "hand-over",
            Self::Drain => "drain",
        })
    }
}

/// Who holds a lock, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The host that asked.
    pub host: HostId,
    /// What it is doing.
    pub act: Act,
}

/// Shows that its bearer took the lock. Never given out twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LockGuardId(pub u64);

/// The state of one session's lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockState {
    /// Nobody holds it.
    Free,
    /// Somebody does, until the lease ends.
    Held,
}

/// What happens to a lock. `Renew` and `Release` are those of the present guard; any other guard's count for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockEvent {
    /// Somebody wants it.
    Acquire,
    /// The holder needs longer.
    Renew,
    /// The holder is done.
    Release,
    /// The lease ran out.
    Expire,
}

/// The declared life of a lock.
pub const LOCK: Machine<LockState, LockEvent> = Machine {
    name: "session lock",
    states: &[LockState::Free, LockState::Held],
    events: &[LockEvent::Acquire, LockEvent::Renew, LockEvent::Release, LockEvent::Expire],
    transitions: &[
        (LockState::Free, LockEvent::Acquire, LockState::Held),
        (LockState::Held, LockEvent::Renew, LockState::Held),
        (LockState::Held, LockEvent::Release, LockState::Free),
        (LockState::Held, LockEvent::Expire, LockState::Free),
    ],
};

/// Why a lock was not given, or is not the bearer's any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LockError {
    /// Another act is at work.
    #[error("the session is busy with a {} of host {} for at most {} ms more; try again then", .holder.act, .holder.host, .left.as_millis())]
    Busy {
        /// Who is at work.
        holder: Holder,
        /// How long its lease lasts, as of now.
        left: Duration,
        /// When its lease ends.
        until: Instant,
    },
    /// The guard's lease ran out, or it was released.
    #[error("the lease of this lock has ended; take the lock anew and look at the session again")]
    Lost,
    /// Too many sessions are being changed.
    #[error("too many sessions are being changed: {0}")]
    Full(Full),
}

#[derive(Clone, Copy)]
struct Lease {
    guard: LockGuardId,
    holder: Holder,
    until: Instant,
}

/// The locks of all sessions that are being changed. A session without an entry is free, so idle sessions cost nothing.
pub struct SessionLocks {
    held: FairTable<SessionId, Lease>,
    by_guard: BTreeMap<LockGuardId, SessionId>,
    by_end: BTreeSet<(Instant, LockGuardId)>,
    next_guard: u64,
}

impl SessionLocks {
    /// No session locked; at most `limit` at a time by what peers ask for. This host's own acts are as many as its
    /// sessions.
    pub fn new(limit: usize) -> Self {
        let held = FairTable::new(limit, usize::MAX);
        Self { held, by_guard: BTreeMap::new(), by_end: BTreeSet::new(), next_guard: 1 }
    }

    /// Takes the lock of `session` for `lease`, at most [`LEASE_MAX`]. It counts for `peer`.
    ///
    /// # Errors
    ///
    /// Another act holds it, whoever's it is; or too many sessions are locked.
    pub fn acquire(
        &mut self,
        peer: Peer,
        session: SessionId,
        holder: Holder,
        now: Instant,
        lease: Duration,
    ) -> Result<LockGuardId, LockError> {
        self.expire(now);
        if LOCK.after(self.state(session), LockEvent::Acquire).is_err() {
            self.is_free(session, now)?;
        }
        let guard = LockGuardId(self.next_guard);
        let until = now + lease.min(LEASE_MAX);
        self.held.insert(peer, session, Lease { guard, holder, until }).map_err(LockError::Full)?;
        self.next_guard += 1;
        self.by_guard.insert(guard, session);
        self.by_end.insert((until, guard));
        Ok(guard)
    }

    /// Lets the lease run for `lease` from now on, at most [`LEASE_MAX`].
    ///
    /// # Errors
    ///
    /// The guard holds nothing any more: whatever it protected may have changed.
    pub fn renew(&mut self, guard: LockGuardId, now: Instant, lease: Duration) -> Result<Instant, LockError> {
        self.expire(now);
        let session = self.by_guard.get(&guard).ok_or(LockError::Lost)?;
        let held = self.held.get_mut(session).ok_or(LockError::Lost)?;
        self.by_end.remove(&(held.until, guard));
        held.until = now + lease.min(LEASE_MAX);
        self.by_end.insert((held.until, guard));
        Ok(held.until)
    }

    /// Gives the lock back.
    ///
    /// # Errors
    ///
    /// The guard holds nothing any more.
    pub fn release(&mut self, guard: LockGuardId, now: Instant) -> Result<(), LockError> {
        self.expire(now);
        self.forget(guard).map(|_| ()).ok_or(LockError::Lost)
    }

    /// Frees every lock whose lease has ended; gives their sessions and late holders.
    pub fn expire(&mut self, now: Instant) -> Vec<(SessionId, Holder)> {
        let mut ended = Vec::new();
        while let Some(&(until, guard)) = self.by_end.first()
            && until <= now
        {
            match self.forget(guard) {
                Some(lease) => ended.push(lease),
                // The three maps name the same guards, so this does not happen; the walk must end even so.
                None => self.by_end.retain(|(_, listed)| *listed != guard),
            }
        }
        ended
    }

    fn forget(&mut self, guard: LockGuardId) -> Option<(SessionId, Holder)> {
        let session = self.by_guard.remove(&guard)?;
        let lease = self.held.remove(&session)?;
        self.by_end.remove(&(lease.until, guard));
        Some((session, lease.holder))
    }

    /// Whether the lock of `session` is free or held. Leases that ended count as held until [`expire`](Self::expire) or
    /// another input saw the time.
    pub fn state(&self, session: SessionId) -> LockState {
        if self.held.contains_key(&session) { LockState::Held } else { LockState::Free }
    }

    /// Whether the lock of `session` can be taken at `now`.
    ///
    /// # Errors
    ///
    /// Another act holds it, whoever's it is.
    pub fn is_free(&self, session: SessionId, now: Instant) -> Result<(), LockError> {
        match self.held.get(&session).filter(|lease| lease.until > now) {
            Some(Lease { holder, until, .. }) => {
                Err(LockError::Busy { holder: *holder, left: until.since(now), until: *until })
            }
            None => Ok(()),
        }
    }

    /// Who holds the lock of `session` at `now`.
    pub fn holder(&self, session: SessionId, now: Instant) -> Option<Holder> {
        self.held.get(&session).filter(|lease| lease.until > now).map(|lease| lease.holder)
    }

    /// Whether `guard` still holds its lock at `now`: to be asked right before each change that it protects.
    pub fn is_held_by(&self, guard: LockGuardId, now: Instant) -> bool {
        let lease = self.by_guard.get(&guard).and_then(|session| self.held.get(session));
        lease.is_some_and(|lease| lease.guard == guard && lease.until > now)
    }

    /// When the next lease ends.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.by_end.first().map(|(until, _)| *until)
    }

    /// How often a peer's act found no room.
    pub const fn refused(&self) -> u64 {
        self.held.refused()
    }

    /// How many sessions are locked.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const A: SessionId = SessionId([1; 16]);
    const B: SessionId = SessionId([2; 16]);
    const LEASE: Duration = Duration::from_millis(100);

    fn holder(n: u8) -> Holder {
        Holder { host: HostId([n; 16]), act: Act::Move }
    }

    fn at(millis: u64) -> Instant {
        Instant::from_millis(millis)
    }

    #[test]
    fn the_whole_matrix_of_a_lock() {
        let expected = "Free Acquire Held\nFree Renew -\nFree Release -\nFree Expire -\n\
                        Held Acquire -\nHeld Renew Held\nHeld Release Free\nHeld Expire Free\n";
        assert_eq!(LOCK.matrix(), expected);
        assert!(LOCK.faults().is_empty());
    }

    #[test]
    fn two_acts_never_hold_one_session_and_others_are_free() {
        let mut locks = SessionLocks::new(8);
        let first = locks.acquire(Peer::Own, A, holder(1), at(0), LEASE).expect("free");
        let busy = LockError::Busy { holder: holder(1), left: Duration::from_millis(60), until: at(100) };
        assert_eq!(locks.acquire(Peer::Own, A, holder(2), at(40), LEASE), Err(busy));
        assert_eq!(locks.acquire(Peer::Own, A, holder(1), at(40), LEASE), Err(busy), "not even the same host twice");
        let other = locks.acquire(Peer::Own, B, holder(2), at(40), LEASE).expect("another session");
        assert_eq!(locks.release(first, at(41)), Ok(()));
        assert_eq!(locks.release(first, at(42)), Err(LockError::Lost));
        assert!(locks.acquire(Peer::Own, A, holder(2), at(43), LEASE).is_ok());
        assert!(locks.is_held_by(other, at(43)));
    }

    #[test]
    fn a_dead_holder_loses_the_lock_and_cannot_touch_the_next_ones() {
        let mut locks = SessionLocks::new(8);
        let dead = locks.acquire(Peer::Own, A, holder(1), at(0), LEASE).expect("free");
        assert_eq!(locks.next_deadline(), Some(at(100)));
        assert!(!locks.is_held_by(dead, at(100)));
        let next = locks.acquire(Peer::Own, A, holder(2), at(100), LEASE).expect("the lease has ended");
        assert_eq!(locks.renew(dead, at(101), LEASE), Err(LockError::Lost));
        assert_eq!(locks.release(dead, at(101)), Err(LockError::Lost));
        assert_eq!(locks.renew(next, at(150), LEASE), Ok(at(250)));
        assert!(locks.expire(at(249)).is_empty());
        assert_eq!(locks.expire(at(250)), [(A, holder(2))]);
        assert!(locks.is_empty() && locks.next_deadline().is_none());
    }

    #[test]
    fn leases_and_what_peers_may_lock_are_bounded() {
        let mut locks = SessionLocks::new(1);
        let [one, other] = [1, 2].map(|n| Peer::Member(HostId([n; 16])));
        let guard = locks.acquire(one, A, holder(1), at(0), Duration::MAX).expect("free");
        assert_eq!(locks.next_deadline(), Some(Instant::ZERO + LEASE_MAX));
        assert_eq!(locks.renew(guard, at(1), Duration::MAX), Ok(at(1) + LEASE_MAX));
        let full = LockError::Full(Full::Table { limit: 1 });
        assert_eq!(locks.acquire(other, B, holder(2), at(1), LEASE), Err(full));
        assert!(locks.acquire(Peer::Own, B, holder(2), at(1), LEASE).is_ok(), "this host's acts are never refused");
    }

    proptest! {
        /// Whatever is done in whatever order: one holder at a time, and only its own guard moves the lock.
        #[test]
        fn the_locks_agree_with_a_naive_model(steps in proptest::collection::vec((0_u8..4, 0_u8..3, 0_u64..60), 1..80)) {
            let peer = Peer::Member(HostId([1; 16]));
            // Two for one peer.
            let mut locks = SessionLocks::new(32);
            let mut model: Vec<(SessionId, LockGuardId, Instant)> = Vec::new();
            let mut guards: Vec<LockGuardId> = Vec::new();
            let mut now = Instant::ZERO;
            for (what, which, wait) in steps {
                now += Duration::from_millis(wait);
                model.retain(|(_, _, until)| *until > now);
                let session = SessionId([which; 16]);
                let guard = guards.get(usize::from(which)).copied().unwrap_or(LockGuardId(0));
                let owned = model.iter().position(|(_, held, _)| *held == guard);
                match what {
                    0 | 1 => {
                        let free = model.iter().all(|(held, _, _)| *held != session) && model.len() < 2;
                        let got = locks.acquire(peer, session, holder(which), now, LEASE);
                        prop_assert_eq!(got.is_ok(), free);
                        if let Ok(guard) = got {
                            prop_assert!(!guards.contains(&guard));
                            guards.insert(0, guard);
                            model.push((session, guard, now + LEASE));
                        }
                    }
                    2 => {
                        prop_assert_eq!(locks.renew(guard, now, LEASE).is_ok(), owned.is_some());
                        if let Some(at) = owned {
                            model[at].2 = now + LEASE;
                        }
                    }
                    _ => {
                        prop_assert_eq!(locks.release(guard, now).is_ok(), owned.is_some());
                        if let Some(at) = owned {
                            model.remove(at);
                        }
                    }
                }
                for (held, guard, _) in &model {
                    prop_assert!(locks.holder(*held, now).is_some() && locks.is_held_by(*guard, now));
                }
                prop_assert_eq!(locks.len(), model.len());
            }
        }
    }
}
