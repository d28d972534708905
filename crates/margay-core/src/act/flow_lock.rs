//! The lock of a session, for the acts of one flow that need no agreement about it beforehand: the move of a single
//! flow, and a quiet end (DESIGN §7; docs/decisions/0079). The initiator's host keeps the lock; at other hosts of the
//! session these functions find nothing to keep.

use alloc::collections::BTreeMap;
use core::time::Duration;

use margay_wire::{FlowId, MoveFlags, SessionId};

use crate::association::Association;
use crate::association::location::Scope;
use crate::machine::sal::Sal;
use crate::session::flow::FlowTable;
use crate::session::{Act, Holder, LockError, LockGuardId};
use crate::types::drop_reason::DropReason;
use crate::types::fair_table::Peer;
use crate::types::key::HostId;
use crate::types::role::Role;
use crate::types::time::Instant;

/// Longer than either act takes once it changes something, whatever is lost of it.
const LEASE: Duration = Duration::from_secs(5);

/// The lock that an act of one flow has taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlowLock {
    act: Act,
    guard: LockGuardId,
}

/// By flow. The lease of some may have ended.
pub(crate) type FlowLocks = BTreeMap<FlowId, FlowLock>;

impl Sal {
    /// Takes the lock of a flow's session for an act of `host`, or keeps the one that this act has.
    ///
    /// # Errors
    ///
    /// Another act has the lock, or too many sessions are locked.
    pub(crate) fn lock_flow(&mut self, now: Instant, id: FlowId, act: Act, host: HostId) -> Result<(), LockError> {
        let Some(session) = self.flows.session_kept_here(id) else { return Ok(()) };
        if let Some(held) = self.flow_locks.get(&id).filter(|held| held.act == act)
            && self.locks.renew(held.guard, now, LEASE).is_ok()
        {
            return Ok(());
        }
        let association = self.flows.get(id).and_then(|flow| self.associations.get(flow.association));
        let peer = association.filter(|peer| peer.host == host).map_or(Peer::Own, Association::peer);
        let guard = self.locks.acquire(peer, session, Holder { host, act }, now, LEASE)?;
        self.flow_locks.insert(id, FlowLock { act, guard });
        Ok(())
    }

    /// Whether `act` may have the lock of a flow's session now; nothing is taken.
    ///
    /// # Errors
    ///
    /// Another act has it.
    pub(crate) fn may_lock_flow(&self, now: Instant, id: FlowId, act: Act) -> Result<(), LockError> {
        let Some(session) = self.flows.session_kept_here(id) else { return Ok(()) };
        let is_own =
            self.flow_locks.get(&id).is_some_and(|held| held.act == act && self.locks.is_held_by(held.guard, now));
        if is_own { Ok(()) } else { self.locks.is_free(session, now) }
    }

    /// The act is over.
    pub(crate) fn unlock_flow(&mut self, now: Instant, id: FlowId, act: Act) {
        if self.flow_locks.get(&id).is_some_and(|held| held.act == act) {
            self.unlock_gone_flow(now, id);
        }
    }

    /// Whether a peer's move may go on. That of a single flow waits while another act has the lock of its session, but
    /// not where nothing passes by the pair in use: the other act would wait for it.
    pub(crate) fn may_move(&self, now: Instant, scope: Scope, flags: MoveFlags) -> Result<(), DropReason> {
        if scope.is_host() || flags.contains(MoveFlags::BROKEN) {
            return Ok(());
        }
        self.may_lock_flow(now, scope.flow, Act::Move).map_err(|_| DropReason::Locked)
    }

    /// The peer is ready for this host's move number `number` of a single flow. From here on until the peer confirms,
    /// no other act changes the flow; where one is at work the answer is dropped, and RSYN sent again in its time.
    pub(crate) fn lock_move(&mut self, now: Instant, scope: Scope, number: u32) -> Result<(), DropReason> {
        let location = self.locations.get(scope).filter(|location| location.number == number);
        let ask = location.and_then(|location| location.ask.as_ref());
        if scope.is_host() || ask.is_none_or(|ask| ask.broken || ask.answered.is_some()) {
            return Ok(());
        }
        let own = self.config.host_id();
        self.lock_flow(now, scope.flow, Act::Move, own).map_err(|_| DropReason::Locked)
    }

    /// The flow is gone, and whatever act was at work on it with it.
    pub(crate) fn unlock_gone_flow(&mut self, now: Instant, id: FlowId) {
        if let Some(held) = self.flow_locks.remove(&id) {
            // The lease may have ended by itself: then the lock is free already.
            let _ = self.locks.release(held.guard, now);
        }
    }
}

impl FlowTable {
    fn session_kept_here(&self, id: FlowId) -> Option<SessionId> {
        self.get(id).filter(|flow| flow.role == Role::Initiator).map(|flow| flow.session)
    }
}
