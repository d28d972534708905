//! Names of clients' sockets, kept in step with the sockets.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use margay_core::name::ServiceId;
use margay_core::source::SourcesFull;
use margay_datapath::active_sockets::Cookie;
use nix::unistd::Uid;
use parking_lot::Mutex;

use crate::agent::core::CoreHandle;

/// What a socket is bound to: its protocol and address.
type Local = (u8, SocketAddr);

/// The addresses that flows of a socket may start from. One at every address of both families has two.
pub fn bound_to(protocol: u8, local: SocketAddr, takes_both: bool) -> Vec<Local> {
    let v4 = takes_both.then(|| SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), local.port()));
    [Some(local), v4].into_iter().flatten().map(|local| (protocol, local)).collect()
}

/// Which socket has which address, as far as they have names.
#[derive(Debug, Default)]
pub struct Sources(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    by_socket: HashMap<Cookie, Vec<Local>>,
    by_local: HashMap<Local, Named>,
}

#[derive(Debug)]
struct Named {
    cookie: Cookie,
    uid: Uid,
}

impl Sources {
    /// Gives a socket a name.
    ///
    /// # Errors
    ///
    /// There are too many.
    pub fn set(
        &self,
        core: &CoreHandle,
        (cookie, uid): (Cookie, Uid),
        bound: Vec<Local>,
        name: ServiceId,
    ) -> Result<(), SourcesFull> {
        let mut known = self.0.lock();
        core.0.with_sal(|sal, _| bound.iter().try_for_each(|local| sal.set_source(local.0, local.1, name)))?;
        for local in &bound {
            // The address's earlier socket is gone, even if nobody has said so yet.
            let earlier = known.by_local.insert(*local, Named { cookie, uid });
            if let Some(earlier) = earlier.filter(|earlier| earlier.cookie != cookie) {
                known.forget_one(earlier.cookie, local);
            }
        }
        known.by_socket.insert(cookie, bound);
        Ok(())
    }

    /// Whose socket flows from `source` start at, where it has a name.
    pub fn user_of(&self, protocol: u8, source: SocketAddr) -> Option<Uid> {
        let any: IpAddr = if source.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let known = self.0.lock();
        let mut bound = [source, SocketAddr::new(any, source.port())].into_iter();
        bound.find_map(|local| known.by_local.get(&(protocol, local))).map(|named| named.uid)
    }

    /// These sockets are gone.
    pub fn forget(&self, core: &CoreHandle, gone: &[Cookie]) {
        let mut known = self.0.lock();
        let bound: Vec<Local> = gone.iter().filter_map(|cookie| known.by_socket.remove(cookie)).flatten().collect();
        if bound.is_empty() {
            return;
        }
        for local in &bound {
            known.by_local.remove(local);
        }
        core.0.with_sal(|sal, _| bound.iter().for_each(|local| sal.forget_source(local.0, local.1)));
    }
}

impl Known {
    fn forget_one(&mut self, cookie: Cookie, local: &Local) {
        let Some(bound) = self.by_socket.get_mut(&cookie) else { return };
        bound.retain(|one| one != local);
        if bound.is_empty() {
            self.by_socket.remove(&cookie);
        }
    }
}
