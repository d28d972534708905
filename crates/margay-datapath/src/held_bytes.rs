//! How many bytes wait of what peers have sent, or are kept to repair it: of each peer, and of all (DESIGN §3.11).

use std::sync::Arc;

use margay_core::fair_table::{FairShares, Peer};
use parking_lot::Mutex;

/// All flows together; those of one peer have a sixteenth, which is four times what one turn may hold.
pub(crate) const HELD_BYTES_ALL: usize = 256 << 20;

/// What all flows share.
#[derive(Clone, Debug)]
pub struct HeldBytes(Arc<Mutex<FairShares>>);

impl Default for HeldBytes {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(FairShares::new(HELD_BYTES_ALL, HELD_BYTES_ALL))))
    }
}

impl HeldBytes {
    /// What is held of one flow with this peer: nothing yet.
    pub fn account(&self, peer: Peer) -> HeldAccount {
        HeldAccount { shares: Arc::clone(&self.0), peer, bytes: 0 }
    }
}

/// What is held of one flow, counted for its peer until this is dropped.
#[derive(Debug)]
pub struct HeldAccount {
    shares: Arc<Mutex<FairShares>>,
    peer: Peer,
    bytes: usize,
}

impl HeldAccount {
    /// How many bytes are held.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// So many bytes are held from now on. False, and as before, where there is no room for more.
    #[must_use]
    pub fn resize(&mut self, bytes: usize) -> bool {
        if let Some(less) = self.bytes.checked_sub(bytes) {
            self.release(less);
            return true;
        }
        let has_room = self.shares.lock().take(self.peer, bytes - self.bytes).is_ok();
        if has_room {
            self.bytes = bytes;
        }
        has_room
    }

    /// Nothing is held any more.
    pub fn clear(&mut self) {
        self.release(self.bytes);
    }

    fn release(&mut self, bytes: usize) {
        if bytes > 0 {
            self.shares.lock().give_back(self.peer, bytes);
            self.bytes -= bytes;
        }
    }
}

impl Drop for HeldAccount {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use margay_core::key::HostId;

    use super::*;

    #[test]
    fn the_flows_of_one_peer_share_a_sixteenth_until_they_end() {
        let all = HeldBytes::default();
        let member = |id| Peer::Member(HostId([id; 16]));
        let [mut first, mut second] = [(); 2].map(|()| all.account(member(1)));
        assert!(first.resize(HELD_BYTES_ALL / 16) && !second.resize(1));
        assert_eq!((first.bytes(), second.bytes()), (HELD_BYTES_ALL / 16, 0));
        assert!(all.account(member(2)).resize(HELD_BYTES_ALL / 16), "another peer's");
        assert!(first.resize(HELD_BYTES_ALL / 16 - 1) && second.resize(1) && !second.resize(2));
        drop(first);
        assert!(second.resize(HELD_BYTES_ALL / 16));
        second.clear();
        assert!(all.account(member(1)).resize(HELD_BYTES_ALL / 16));
    }
}
