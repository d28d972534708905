//! Programs in a network namespace of their own (DESIGN §18): no agent is in there, the host forwards to them.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
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
        let mut seen = BTreeSet::new();
        for pid in cgroup::processes(path) {
            // The file system's number of a namespace is cheap to read; a visit is not.
            let Ok(number) = fs::metadata(format!("/proc/{pid}/ns/net")).map(|about| about.ino()) else { continue };
            if !seen.insert(number) {
                continue;
            }
            match Self::of_process(pid) {
                Ok(namespace) if namespace.cookie == own => {}
                Ok(namespace) => found.push(namespace),
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

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_socket_elsewhere_is_reached_at_an_address_that_is_not_this_hosts() {
        let address = |text: &str| text.parse::<IpAddr>().expect("literal");
        let place = Namespace {
            cookie: NamespaceCookie(7),
            file: File::open("/dev/null").expect("it is there"),
            addresses: ["10.0.0.1", "10.9.0.2", "fd00::2"].map(address).to_vec(),
        };
        let is_local = |ip| ip == address("10.0.0.1");
        let reached = |text: &str| {
            let socket = text.parse().expect("literal");
            place.reachable(socket, is_local).map(|found| found.to_string())
        };
        assert_eq!(reached("0.0.0.0:80"), Ok("10.9.0.2:80".to_owned()), "10.0.0.1 would lead to this host");
        assert_eq!(reached("[::]:80"), Ok("[fd00::2]:80".to_owned()));
        assert_eq!(reached("10.9.9.9:80"), Ok("10.9.9.9:80".to_owned()));
        assert_eq!(reached("[::ffff:10.9.9.9]:80"), Ok("10.9.9.9:80".to_owned()));
        assert!(reached("127.0.0.1:80").expect_err("unreachable").contains("loopback"));
        let bare = Namespace { addresses: vec![address("10.0.0.1")], ..place };
        let found = bare.reachable("0.0.0.0:80".parse().expect("literal"), is_local);
        assert!(found.expect_err("unreachable").contains("no address"));
    }
}
