//! Programs' own sockets of connections, as far as this agent sees them: those in its network namespace.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use margay_core::Tuple;
use margay_datapath::socket_table::{self, Holder, Socket, Table};
use margay_datapath::stillness::Stillness;
use rustix::fs::fstat;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::agent::orphans::tuple;

/// The sockets of some open connections, and a process that has each.
pub struct Sockets(HashMap<Tuple, Held>);

struct Held {
    inode: u64,
    queued_bytes: u64,
    holder: Holder,
}

/// A process that has the socket of a connection, and what waits there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Process.
    pub pid: u32,
    /// Bytes that the peer has not acknowledged, and bytes that the program has not read, together.
    pub queued_bytes: u64,
}

impl Sockets {
    /// Finds those of connections that neither end has closed: by one walk over the kernel's tables, and one over all
    /// processes.
    pub fn of(wanted: &HashSet<Tuple>) -> Self {
        if wanted.is_empty() {
            return Self(HashMap::new());
        }
        let all = [Table::Tcp, Table::Tcp6].into_iter().flat_map(Table::sockets);
        let open = all.filter(|socket| socket.state == Socket::ESTABLISHED && socket.inode != 0);
        let open = open.map(|socket| (tuple(&socket), socket));
        let found: HashMap<Tuple, Socket> = open.filter(|(app, _)| wanted.contains(app)).collect();
        let holders = socket_table::holders(&found.values().map(|socket| socket.inode).collect());
        let held = |(app, socket): (Tuple, Socket)| {
            let Socket { inode, queued_bytes, .. } = socket;
            holders.get(&inode).map(|holder| (app, Held { inode, queued_bytes, holder: *holder }))
        };
        Self(found.into_iter().filter_map(held).collect())
    }

    /// Who has the socket of a connection; `None` where none is found.
    pub fn owner(&self, app: &Tuple) -> Option<Owner> {
        self.0.get(app).map(|held| Owner { pid: held.holder.pid, queued_bytes: held.queued_bytes })
    }

    /// A descriptor of the program's socket; `None` where there is no such socket.
    ///
    /// # Errors
    ///
    /// The process has ended, or the system does not let its descriptors be copied.
    pub fn copy(&self, app: &Tuple) -> io::Result<Option<OwnedFd>> {
        let Some(Held { inode, holder, .. }) = self.0.get(app) else { return Ok(None) };
        let Some(pid) = i32::try_from(holder.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let socket = pidfd_getfd(process, holder.descriptor, PidfdGetfdFlags::empty())?;
        // The program may have closed it meanwhile, and another file may have its number.
        let is_it = fstat(&socket)?.st_ino == *inode;
        Ok(is_it.then_some(socket))
    }

    /// Whether a connection has carried nothing for a time, as its socket here has it; `None` where that cannot be
    /// seen.
    pub fn is_quiet(&self, app: &Tuple, time: Duration) -> Option<bool> {
        let socket = self.copy(app).ok()??;
        Stillness::of(socket.as_fd()).ok().map(|still| still.is_quiet(time))
    }
}
