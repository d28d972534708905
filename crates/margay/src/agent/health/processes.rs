//! Which processes of this host serve a name.

use std::collections::{BTreeSet, HashSet};
use std::net::SocketAddr;
use std::path::Path;

use margay_core::name::Name;
use margay_datapath::socket_table::{self, Socket, Table};

use crate::agent::Agent;

/// Addresses at which this host serves a name; none where it does not.
pub fn listeners(agent: &Agent, name: &Name) -> Vec<SocketAddr> {
    let found = agent.publishing.services.find(name);
    found.into_iter().flat_map(|found| found.listeners).map(|listener| listener.address).collect()
}

/// Processes whose sockets take what comes to these listeners.
pub fn listening(listeners: &[SocketAddr]) -> BTreeSet<u32> {
    socket_table::holders(&sockets(listeners)).into_values().map(|holder| holder.pid).collect()
}

/// Whether a process serves a name: it has a socket that takes what comes to the name, or it belongs to a program that
/// was started for the name.
pub fn serves(agent: &Agent, name: &Name, pid: u32) -> bool {
    let Ok((hierarchy, started)) = agent.publishing.active.cgroups(name) else {
        return has_listener(pid, &listeners(agent, name));
    };
    let own = hierarchy.of(pid);
    own.is_ok_and(|own| is_below(&own, &started)) || has_listener(pid, &listeners(agent, name))
}

fn is_below(own: &Path, cgroups: &[std::path::PathBuf]) -> bool {
    cgroups.iter().any(|cgroup| own.starts_with(cgroup))
}

fn has_listener(pid: u32, listeners: &[SocketAddr]) -> bool {
    socket_table::has_one(pid, &sockets(listeners))
}

/// Sockets of this network namespace that take what comes to these listeners, by their inodes.
fn sockets(listeners: &[SocketAddr]) -> HashSet<u64> {
    let takes = |socket: &Socket| {
        let local = SocketAddr::new(socket.local.ip().to_canonical(), socket.local.port());
        let is_it = |listener: &SocketAddr| {
            let is_any = local.ip().is_unspecified() || listener.ip().is_unspecified();
            listener.port() == local.port() && (listener.ip() == local.ip() || is_any)
        };
        socket.remote.port() == 0 && listeners.iter().any(is_it)
    };
    let tables = [Table::Tcp, Table::Tcp6, Table::Udp, Table::Udp6];
    tables.into_iter().flat_map(Table::sockets).filter(takes).map(|socket| socket.inode).collect()
}

#[cfg(test)]
mod test {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn whoever_listens_is_found_by_its_socket() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let at = listener.local_addr().expect("bound");
        let any = SocketAddr::new([0, 0, 0, 0].into(), at.port());
        let own = std::process::id();
        assert_eq!(listening(&[at]), [own].into());
        assert_eq!(listening(&[any]), [own].into());
        assert!(listening(&[]).is_empty());
        assert!(has_listener(own, &[at]) && has_listener(own, &[any]) && !has_listener(own, &[]));
    }

    #[test]
    fn a_process_below_the_cgroup_of_the_program_belongs_to_it() {
        let program = ["/sys/fs/cgroup/shop/margay-7".into()];
        assert!(is_below(Path::new("/sys/fs/cgroup/shop/margay-7"), &program));
        assert!(is_below(Path::new("/sys/fs/cgroup/shop/margay-7/worker"), &program));
        assert!(!is_below(Path::new("/sys/fs/cgroup/shop/margay-71"), &program));
        assert!(!is_below(Path::new("/sys/fs/cgroup/shop"), &program));
    }
}
