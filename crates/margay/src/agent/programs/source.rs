//! Names of clients' sockets, kept in step with the sockets.

use std::collections::HashMap;

use margay_core::name::ServiceId;
use margay_core::source::SourcesFull;
use margay_datapath::active_sockets::Cookie;
use nix::unistd::Uid;
use parking_lot::Mutex;

use crate::agent::core::CoreHandle;

/// A local port: its protocol and number.
type Port = (u8, u16);

/// Which socket has which port, as far as they have names.
#[derive(Debug, Default)]
pub struct Sources(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    by_socket: HashMap<Cookie, Port>,
    by_port: HashMap<Port, Named>,
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
        port: Port,
        name: ServiceId,
    ) -> Result<(), SourcesFull> {
        let mut known = self.0.lock();
        core.0.with_sal(|sal, _| sal.set_source(port.0, port.1, name))?;
        // The port's earlier socket is gone, even if nobody has said so yet.
        if let Some(earlier) =
            known.by_port.insert(port, Named { cookie, uid }).filter(|earlier| earlier.cookie != cookie)
        {
            known.by_socket.remove(&earlier.cookie);
        }
        known.by_socket.insert(cookie, port);
        Ok(())
    }

    /// Whose socket has a port, where it has a name.
    pub fn user_of(&self, port: Port) -> Option<Uid> {
        self.0.lock().by_port.get(&port).map(|named| named.uid)
    }

    /// These sockets are gone.
    pub fn forget(&self, core: &CoreHandle, gone: &[Cookie]) {
        let mut known = self.0.lock();
        let ports: Vec<Port> = gone.iter().filter_map(|cookie| known.by_socket.remove(cookie)).collect();
        if ports.is_empty() {
            return;
        }
        for port in &ports {
            known.by_port.remove(port);
        }
        core.0.with_sal(|sal, _| ports.iter().for_each(|port| sal.forget_source(port.0, port.1)));
    }
}
