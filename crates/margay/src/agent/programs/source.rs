//! Names of clients' sockets, kept in step with the sockets.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use margay_core::Tuple;
use margay_core::fair_table::{FairShares, Full, Peer};
use margay_core::name::ServiceId;
use margay_core::source::{IsOfSocket, SOURCES_MAX, SourcesFull};
use margay_datapath::active_sockets::Cookie;
use margay_datapath::sock_diag;
use nix::unistd::Uid;
use parking_lot::Mutex;

use super::rights::Caller;
use crate::agent::core::CoreHandle;

/// What a socket is bound to: its protocol and address.
type Local = (u8, SocketAddr);

/// The addresses that flows of a socket may start from. One at every address of both families has two.
pub fn bound_to(protocol: u8, local: SocketAddr, takes_both: bool) -> Vec<Local> {
    let v4 = takes_both.then(|| SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), local.port()));
    [Some(local), v4].into_iter().flatten().map(|local| (protocol, local)).collect()
}

/// Addresses with a name of root's programs; what the core has room for beyond these is for all other users, and a
/// quarter of it for one. A socket for both families has two addresses.
const OF_ROOT_MAX: usize = 4096;

/// Which socket has which address, as far as they have names.
#[derive(Debug, Default)]
pub struct Sources(Mutex<Known>);

#[derive(Debug)]
struct Known {
    by_socket: HashMap<Cookie, Vec<Local>>,
    by_local: HashMap<Local, Named>,
    shares: FairShares,
}

impl Default for Known {
    fn default() -> Self {
        let shares = FairShares::new(SOURCES_MAX - OF_ROOT_MAX, OF_ROOT_MAX);
        Self { by_socket: HashMap::new(), by_local: HashMap::new(), shares }
    }
}

#[derive(Debug)]
struct Named {
    cookie: Cookie,
    uid: Uid,
    peer: Peer,
}

/// Why a socket gets no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// Those that may have one have all there is.
    #[error("{} addresses of sockets of this user, or of all but root, have a name already; close some", .0.limit())]
    Full(Full),
    /// The core has no room.
    #[error(transparent)]
    Core(#[from] SourcesFull),
}

impl Sources {
    /// Gives a socket a name.
    ///
    /// # Errors
    ///
    /// The user has too many, or all have.
    pub fn set(
        &self,
        core: &CoreHandle,
        (cookie, caller): (Cookie, &Caller),
        bound: Vec<Local>,
        name: ServiceId,
    ) -> Result<(), SourceError> {
        // Reads a file.
        let (uid, peer) = (caller.uid, caller.peer());
        let mut known = self.0.lock();
        known.check(peer, &bound).map_err(SourceError::Full)?;
        let is_its: IsOfSocket = Arc::new(move |app| is_of_socket(app, cookie));
        core.0.with_sal(|sal, _| {
            bound.iter().try_for_each(|local| sal.set_source(local.0, local.1, name, Arc::clone(&is_its)))
        })?;
        let left = known.insert(cookie, (uid, peer), bound);
        if !left.is_empty() {
            core.0.with_sal(|sal, _| left.iter().for_each(|local| sal.forget_source(local.0, local.1)));
        }
        Ok(())
    }

    /// Whose socket a client's flow starts at, where that has a name. A socket may have lost its port to another one
    /// without being closed.
    pub fn user_of(&self, app: &Tuple) -> Option<Uid> {
        let (cookie, uid) = self.0.lock().named(app.protocol, app.source)?;
        let found = sock_diag::socket_of(app.protocol, app.source, app.destination);
        // One that is closed is in no table of the kernel's any more.
        found.is_ok_and(|found| found.is_none_or(|socket| socket.cookie == cookie)).then_some(uid)
    }

    /// These sockets are gone.
    pub fn forget(&self, core: &CoreHandle, gone: &[Cookie]) {
        // Held until the core knows: the next socket at an address may get its name meanwhile.
        let mut known = self.0.lock();
        let bound = known.remove(gone);
        if !bound.is_empty() {
            core.0.with_sal(|sal, _| bound.iter().for_each(|local| sal.forget_source(local.0, local.1)));
        }
    }
}

/// Where the kernel does not say it, a socket has no name.
fn is_of_socket(app: &Tuple, cookie: Cookie) -> bool {
    let found = sock_diag::socket_of(app.protocol, app.source, app.destination);
    found.is_ok_and(|found| found.is_some_and(|socket| socket.cookie == cookie))
}

impl Known {
    /// Whether those that share with `peer` may have names at these addresses.
    fn check(&self, peer: Peer, bound: &[Local]) -> Result<(), Full> {
        let is_counted = |local: &&Local| self.by_local.get(*local).is_some_and(|named| named.peer == peer);
        let more = bound.len() - bound.iter().filter(is_counted).count();
        self.shares.check(peer, more)
    }

    fn named(&self, protocol: u8, source: SocketAddr) -> Option<(Cookie, Uid)> {
        let any: IpAddr = if source.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let mut bound = [source, SocketAddr::new(any, source.port())].into_iter();
        let named = bound.find_map(|local| self.by_local.get(&(protocol, local)))?;
        Some((named.cookie, named.uid))
    }

    /// Gives the addresses that the socket had before, and has no more.
    fn insert(&mut self, cookie: Cookie, (uid, peer): (Uid, Peer), bound: Vec<Local>) -> Vec<Local> {
        for local in &bound {
            self.shares.add(peer, 1);
            // The address's earlier socket is gone, even if nobody has said so yet.
            let Some(earlier) = self.by_local.insert(*local, Named { cookie, uid, peer }) else { continue };
            self.shares.give_back(earlier.peer, 1);
            if earlier.cookie != cookie {
                self.forget_one(earlier.cookie, local);
            }
        }
        let mut left = self.by_socket.get(&cookie).cloned().unwrap_or_default();
        left.retain(|local| !bound.contains(local));
        self.by_socket.insert(cookie, bound);
        self.let_go(&left);
        left
    }

    /// Gives the addresses that have no name any more.
    fn remove(&mut self, gone: &[Cookie]) -> Vec<Local> {
        let bound: Vec<Local> = gone.iter().filter_map(|cookie| self.by_socket.remove(cookie)).flatten().collect();
        self.let_go(&bound);
        bound
    }

    fn let_go(&mut self, bound: &[Local]) {
        for named in bound.iter().filter_map(|local| self.by_local.remove(local)).collect::<Vec<_>>() {
            self.shares.give_back(named.peer, 1);
        }
    }

    fn forget_one(&mut self, cookie: Cookie, local: &Local) {
        let Some(bound) = self.by_socket.get_mut(&cookie) else { return };
        bound.retain(|one| one != local);
        if bound.is_empty() {
            self.by_socket.remove(&cookie);
        }
    }
}

#[cfg(test)]
mod test {
    use std::net::{TcpListener, TcpStream};

    use nix::unistd::Gid;
    use rustix::net::sockopt::socket_cookie;

    use super::*;

    #[test]
    fn one_user_leaves_names_to_others_and_to_root() {
        let caller = |uid| Caller { uid: Uid::from_raw(uid), gid: Gid::from_raw(uid), pid: 1, process: None };
        let [root, one, other] = [0, 54_321, 54_322].map(caller);
        let local = |number: usize| {
            let [.., high, low] = number.to_be_bytes();
            vec![(17, SocketAddr::new([10, 0, high, low].into(), 4000))]
        };
        let cookie = |number: usize| Cookie(number as u64);
        let mut known = Known::default();
        let most = (SOURCES_MAX - OF_ROOT_MAX) / 4;
        for number in 0..most {
            assert_eq!(known.check(one.peer(), &local(number)), Ok(()));
            known.insert(cookie(number), (one.uid, one.peer()), local(number));
        }
        assert_eq!(known.check(one.peer(), &local(most)), Err(Full::Peer { share: most }));
        assert_eq!(known.check(one.peer(), &local(0)), Ok(()), "it has that address");
        known.insert(cookie(most), (one.uid, one.peer()), local(0));
        for caller in [root, other] {
            assert_eq!(known.check(caller.peer(), &local(most)), Ok(()));
        }
        known.insert(cookie(most + 1), (other.uid, other.peer()), local(1));
        assert_eq!(known.check(one.peer(), &local(most)), Ok(()), "another user's socket has the address now");
        // A socket that has lost its port is bound to another one.
        assert_eq!(known.insert(cookie(2), (one.uid, one.peer()), local(most)), local(2));
        assert_eq!(known.named(17, local(2)[0].1), None);
        let all: Vec<Cookie> = (0..most + 2).map(cookie).collect();
        assert_eq!(known.remove(&all).len(), most);
        assert!(known.by_local.is_empty() && known.by_socket.is_empty() && known.shares.used() == 0);
    }

    #[test]
    fn who_has_lost_the_port_of_a_named_socket_is_told_nothing_of_the_next_one() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("accepted");
        let cookie = Cookie(socket_cookie(&client).expect("a socket"));
        let (source, destination) = (client.local_addr().expect("bound"), client.peer_addr().expect("connected"));
        let app = Tuple { protocol: 6, source, destination };
        let caller = Caller { uid: Uid::from_raw(54_321), gid: Gid::from_raw(54_321), pid: 1, process: None };
        for (of, is_told) in [(Cookie(cookie.0 + 1), false), (cookie, true)] {
            let sources = Sources::default();
            sources.0.lock().insert(of, (caller.uid, caller.peer()), vec![(6, source)]);
            assert_eq!(sources.user_of(&app).is_some(), is_told);
        }
    }

    #[test]
    fn the_kernel_says_whose_packets_they_are() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = TcpStream::connect(listener.local_addr().expect("bound")).expect("accepted");
        let cookie = Cookie(socket_cookie(&client).expect("a socket"));
        let (source, destination) = (client.local_addr().expect("bound"), client.peer_addr().expect("connected"));
        let app = Tuple { protocol: 6, source, destination };
        assert!(is_of_socket(&app, cookie));
        assert!(!is_of_socket(&app, Cookie(cookie.0 + 1)), "another socket has the port");
        let elsewhere = SocketAddr::new(destination.ip(), 9);
        assert!(!is_of_socket(&Tuple { destination: elsewhere, ..app }, cookie), "a container's, by the same port");
    }
}
