//! Programs in a network namespace of their own (DESIGN §18): no agent is in there, the host forwards to them.

use std::fs::File;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use margay_datapath::active_sockets::{NamespaceCookie, own_namespace};
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sched::{CloneFlags, setns};

use super::cgroup;

/// A network namespace other than this host's.
pub struct Namespace {
    /// The kernel's number.
    pub cookie: NamespaceCookie,
    /// Keeps it, and leads there.
    pub file: File,
    addresses: Vec<IpAddr>,
}

impl Namespace {
    /// Those of the processes of a cgroup, each once.
    pub fn of_cgroup(path: &Path, own: NamespaceCookie) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        for pid in cgroup::processes(path) {
            match Self::of_process(pid) {
                Ok(namespace) if namespace.cookie == own => {}
                Ok(namespace) => {
                    if !found.iter().any(|known| known.cookie == namespace.cookie) {
                        found.push(namespace);
                    }
                }
                Err(error) => tracing::debug!(pid, %error, "a process whose network namespace is not known"),
            }
        }
        found
    }

    fn of_process(pid: u32) -> io::Result<Self> {
        let file = File::open(format!("/proc/{pid}/ns/net"))?;
        // A thread of its own: one that came back from elsewhere would be a trap.
        let there = std::thread::scope(|scope| {
            let visit = scope.spawn(|| -> io::Result<_> {
                setns(&file, CloneFlags::CLONE_NEWNET)?;
                Ok((own_namespace()?, addresses()?))
            });
            visit.join().unwrap_or_else(|_| Err(io::Error::other("the visit ended badly")))
        });
        let (cookie, addresses) = there?;
        Ok(Self { cookie, file, addresses })
    }

    /// Where this host reaches a socket in there. A wildcard is reached at the first address of its family; one of both
    /// families at either.
    ///
    /// # Errors
    ///
    /// Nowhere; the message says why.
    pub fn reachable(&self, address: SocketAddr, is_local: impl Fn(IpAddr) -> bool) -> Result<SocketAddr, String> {
        let ip = address.ip().to_canonical();
        if ip.is_loopback() {
            return Err(format!(
                "`{address}` is a loopback address of another network namespace, which nothing leads to"
            ));
        }
        if !ip.is_unspecified() {
            return Ok(SocketAddr::new(ip, address.port()));
        }
        let of_family = self.addresses.iter().filter(|found| found.is_ipv4() == ip.is_ipv4());
        let of_other = self.addresses.iter().filter(|_| ip.is_ipv6());
        let mut candidates = of_family.chain(of_other).filter(|found| !is_local(**found));
        let found = candidates.next().ok_or("its network namespace has no address that this host could reach")?;
        Ok(SocketAddr::new(*found, address.port()))
    }
}

/// Addresses of the calling thread's network namespace that others could use.
fn addresses() -> io::Result<Vec<IpAddr>> {
    let is_useful = |address: &IpAddr| match address {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
    };
    let of_up = getifaddrs()?.filter(|found| found.flags.contains(InterfaceFlags::IFF_UP));
    let addresses = of_up.filter_map(|found| {
        let address = found.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    });
    Ok(addresses.filter(is_useful).collect())
}
