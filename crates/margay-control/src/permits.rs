//! Room for what tasks do for peers, by the peer: who asks for much has a share of it, and others the rest (DESIGN
//! §3.11).

use std::sync::Arc;

use std::net::IpAddr;

use margay_core::fair_table::{FairShares, FairTable, Full, Peer};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

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

/// Connections that anybody may open, and hold: of hosts that have not shown yet who they are, and of local users.
/// Whoever has less of them than others always gets a place: where all are taken, the oldest connection of the network
/// and address, or of the user, that have the most is ended. Without that, whoever has eight addresses or four users
/// could keep everybody else out.
#[derive(Clone)]
pub struct Backlog(Arc<Mutex<Unproved>>);

struct Unproved {
    /// By age. What is told to a connection that is displaced is the end of its channel.
    places: FairTable<u64, oneshot::Sender<()>>,
    next: u64,
    displaced: u64,
}

/// A connection's place, until this is dropped.
pub struct BacklogPlace {
    backlog: Backlog,
    number: u64,
    displaced: oneshot::Receiver<()>,
}

impl Backlog {
    /// Of `limit` places unauthenticated hosts have half, an address a sixteenth, a network a quarter.
    pub fn new(limit: usize) -> Self {
        Self::with_own(limit, 0)
    }

    /// The same, with `own` places beside them for this host.
    pub fn with_own(limit: usize, own: usize) -> Self {
        let places = FairTable::new(limit, own);
        Self(Arc::new(Mutex::new(Unproved { places, next: 0, displaced: 0 })))
    }

    /// A place for a connection from this address.
    ///
    /// # Errors
    ///
    /// What is full.
    pub fn enter(&self, from: IpAddr) -> Result<BacklogPlace, Full> {
        self.admit(Peer::Unauthenticated(from))
    }

    /// A place for a connection of this peer.
    ///
    /// # Errors
    ///
    /// What is full.
    pub fn admit(&self, peer: Peer) -> Result<BacklogPlace, Full> {
        let (told, displaced) = oneshot::channel();
        let mut unproved = self.0.lock();
        let number = unproved.next;
        let gone = unproved.places.insert_fairly(peer, number, told)?;
        unproved.next += 1;
        unproved.displaced += u64::from(gone.is_some());
        drop(unproved);
        Ok(BacklogPlace { backlog: self.clone(), number, displaced })
    }

    /// How many connections were refused, or ended for others.
    pub fn refused(&self) -> u64 {
        let unproved = self.0.lock();
        unproved.places.refused() + unproved.displaced
    }
}

impl BacklogPlace {
    /// Waits until the connection is to end for another one. Cancel-safe.
    pub async fn displaced(&mut self) {
        // Nothing is ever sent: the sender is dropped.
        let _ = (&mut self.displaced).await;
    }
}

impl Drop for BacklogPlace {
    fn drop(&mut self) {
        self.backlog.0.lock().places.remove(&self.number);
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
    async fn eight_addresses_keep_nobody_out() {
        let backlog = Backlog::new(512);
        let address = |network: u8, host: u8| IpAddr::from([10, 0, network, host]);
        let mut attackers = Vec::new();
        for host in 1..=4 {
            for network in 1..=2 {
                attackers.extend((0..64).filter_map(|_| backlog.enter(address(network, host)).ok()));
            }
        }
        assert_eq!((attackers.len(), backlog.refused()), (256, 256));
        let mut honest = backlog.enter(address(3, 1)).expect("there is always a place");
        attackers[0].displaced().await;
        // They come again and again, and end nobody but each other.
        attackers.extend((0..64).filter_map(|_| backlog.enter(address(1, 1)).ok()));
        tokio::select! {
            biased;
            () = honest.displaced() => panic!("it has less than others"),
            () = tokio::task::yield_now() => {}
        }
        drop((attackers, honest));
        assert!(backlog.0.lock().places.is_empty());
    }

    #[tokio::test]
    async fn four_users_keep_no_other_out() {
        let backlog = Backlog::with_own(64, 1);
        let mut attackers: Vec<_> =
            (1..=4).flat_map(|uid| [uid; 16]).map(|uid| backlog.admit(Peer::User(uid))).collect();
        assert!(attackers.iter().all(Result::is_ok) && backlog.admit(Peer::User(1)).is_err());
        let _honest = backlog.admit(Peer::User(5)).expect("there is always a place");
        attackers[0].as_mut().expect("it was there").displaced().await;
        let _of_host = backlog.admit(Peer::Own).expect("room of its own");
        assert!(backlog.admit(Peer::Own).is_err());
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
