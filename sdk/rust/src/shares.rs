//! What the peers of a process share, with a bound that one of them cannot use up (DESIGN §3.11): for framed sockets,
//! and for the switch's ends that are built on this crate.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use margay_core::fair_table::{FairShares, Full, Peer};

/// Bytes that all framed connections of a process may hold beside [`MEMORY_FLOOR`] each; those with one peer have a
/// sixteenth, those with all peers that no authority vouches for half.
pub const MEMORY_MAX: usize = 2 << 30;
/// A framed connection may always hold so many bytes: small frames pass where a peer's large ones use up its share.
pub const MEMORY_FLOOR: usize = 64 << 10;
/// Bytes that are taken and given back at once.
const MEMORY_STEP: usize = 16 << 10;

/// A bounded number of places, or of bytes.
#[derive(Clone, Debug)]
pub struct Room(Arc<Mutex<FairShares>>);

impl Room {
    /// `limit` for all peers together, and `own` beside it for this host.
    #[must_use]
    pub fn new(limit: usize, own: usize) -> Self {
        Self(Arc::new(Mutex::new(FairShares::new(limit, own))))
    }

    /// What a peer has for one purpose: nothing yet.
    #[must_use]
    pub fn share(&self, peer: Peer) -> Share {
        Share { room: self.clone(), peer, amount: 0 }
    }

    fn shares(&self) -> MutexGuard<'_, FairShares> {
        // Each change is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a peer has of a room, until this is dropped.
#[derive(Debug)]
pub struct Share {
    room: Room,
    peer: Peer,
    amount: usize,
}

impl Share {
    /// The peer has so much from now on.
    ///
    /// # Errors
    ///
    /// What is full; it has what it had.
    pub fn resize(&mut self, amount: usize) -> Result<(), Full> {
        if let Some(less) = self.amount.checked_sub(amount) {
            self.room.shares().give_back(self.peer, less);
        } else {
            self.room.shares().take(self.peer, amount - self.amount)?;
        }
        self.amount = amount;
        Ok(())
    }

    /// A framed connection holds so many bytes. False where there is no room for them: it is to take no more then.
    #[must_use]
    pub fn holds(&mut self, bytes: usize) -> bool {
        let amount = bytes.saturating_sub(MEMORY_FLOOR).next_multiple_of(MEMORY_STEP);
        // Mostly nothing has changed.
        amount == self.amount || self.resize(amount).is_ok()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.room.shares().give_back(self.peer, self.amount);
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn one_peer_has_a_sixteenth_and_small_frames_always_pass() {
        let room = Room::new(MEMORY_MAX, 0);
        let peer = |host| Peer::Unauthenticated([192, 0, 2, host].into());
        let [mut first, mut second] = [(); 2].map(|()| room.share(peer(1)));
        assert!(first.holds(MEMORY_MAX / 16 + MEMORY_FLOOR) && !first.holds(MEMORY_MAX / 16 + MEMORY_FLOOR + 1));
        assert!(second.holds(MEMORY_FLOOR) && !second.holds(MEMORY_FLOOR + 1));
        assert!(room.share(peer(2)).holds(MEMORY_MAX / 16), "another host's");
        drop(first);
        assert!(second.holds(MEMORY_MAX / 16) && second.holds(0));
        assert_eq!(room.shares().used(), 0);
    }
}
