//! Room for what tasks do for peers, by the peer: who asks for much has a share of it, and others the rest (DESIGN
//! §3.11).

use std::sync::Arc;

use margay_core::fair_table::{FairShares, Full, Peer};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Connections at a port of the agent's that have not shown yet whose they are: at most 32 of one address, and half of
/// these of all addresses together.
pub(crate) const UNWELCOMED_MAX: usize = 512;

/// A bounded number of places, or bytes.
#[derive(Clone)]
pub struct Permits(Arc<Shared>);

struct Shared {
    shares: Mutex<FairShares>,
    freed: Notify,
}

/// Places that are given back when this is dropped.
pub struct Permit {
    shared: Arc<Shared>,
    peer: Peer,
    amount: usize,
}

impl Permits {
    /// `limit` for all peers together, and `own` beside it for this host.
    pub fn new(limit: usize, own: usize) -> Self {
        Self(Arc::new(Shared { shares: Mutex::new(FairShares::new(limit, own)), freed: Notify::new() }))
    }

    /// Room for `amount` more of this peer.
    ///
    /// # Errors
    ///
    /// What is full.
    pub fn take(&self, peer: Peer, amount: usize) -> Result<Permit, Full> {
        self.0.shares.lock().take(peer, amount)?;
        Ok(Permit { shared: Arc::clone(&self.0), peer, amount })
    }

    /// One place, once this peer may have another. Cancel-safe.
    pub async fn wait(&self, peer: Peer) -> Permit {
        loop {
            // Whoever gives back after the look is heard.
            let freed = self.0.freed.notified();
            if let Ok(permit) = self.take(peer, 1) {
                return permit;
            }
            freed.await;
        }
    }

    /// How often somebody was refused.
    pub fn refused(&self) -> u64 {
        self.0.shares.lock().refused()
    }
}

impl Permit {
    /// Room for `amount` more beside what this is for.
    ///
    /// # Errors
    ///
    /// What is full; this is as it was.
    pub fn add(&mut self, amount: usize) -> Result<(), Full> {
        self.shared.shares.lock().take(self.peer, amount)?;
        self.amount += amount;
        Ok(())
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shared.shares.lock().give_back(self.peer, self.amount);
        self.shared.freed.notify_waiters();
    }
}

#[cfg(test)]
mod test {
    use margay_core::key::HostId;

    use super::*;

    fn member(n: u8) -> Peer {
        Peer::Member(HostId([n; 16]))
    }

    #[test]
    fn what_is_dropped_is_given_back() {
        let permits = Permits::new(160, 1);
        let mut first = permits.take(member(1), 4).expect("room");
        first.add(6).expect("its share");
        assert!(first.add(1).is_err() && permits.take(member(1), 1).is_err());
        let of_other = permits.take(member(2), 10).expect("its share");
        let own = permits.take(Peer::Own, 1).expect("room of its own");
        assert!(permits.take(Peer::Own, 1).is_err());
        drop((first, of_other, own));
        assert!(permits.take(member(1), 10).is_ok());
        assert_eq!(permits.refused(), 3);
    }

    #[tokio::test]
    async fn who_has_its_share_waits_for_its_own() {
        let permits = Permits::new(16, 0);
        let first = permits.wait(member(1)).await;
        let waiting = permits.clone();
        let mut second = tokio::spawn(async move { waiting.wait(member(1)).await });
        let _other = permits.wait(member(2)).await;
        tokio::select! {
            biased;
            _ = &mut second => panic!("it has its share"),
            () = tokio::task::yield_now() => {}
        }
        drop(first);
        second.await.expect("it was given back");
    }
}
