//! Plain sockets of the kernel, as Margay wants them: for both families, at any port.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;
use rustix::net::sockopt::set_ipv6_v6only;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::net::{TcpSocket, UdpSocket};

/// Every address of this host, any port.
pub(crate) fn anywhere(is_v6: bool) -> SocketAddr {
    let ip = if is_v6 { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
    SocketAddr::new(ip, 0)
}

/// Whether the kernel said that it has no IPv6, in one of the ways in which it says so: not built in, switched off
/// (`disable_ipv6`), or without the route to the virtual addresses.
pub(crate) fn lacks_family(error: &io::Error) -> bool {
    let known = [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL, Errno::NETUNREACH];
    Errno::from_io_error(error).is_some_and(|errno| known.contains(&errno))
}

/// A socket for streams at the wildcard address, for IPv4, too. Without IPv6 in the kernel, for IPv4 alone.
pub(crate) fn stream_anywhere() -> io::Result<TcpSocket> {
    let (socket, is_v6) = match TcpSocket::new_v6() {
        Ok(socket) => {
            // The sysctl bindv6only may say otherwise.
            set_ipv6_v6only(&socket, false)?;
            (socket, true)
        }
        Err(error) if lacks_family(&error) => (TcpSocket::new_v4()?, false),
        Err(error) => return Err(error),
    };
    socket.bind(anywhere(is_v6))?;
    Ok(socket)
}

/// As [`stream_anywhere`], for datagrams.
pub(crate) fn datagrams_anywhere() -> io::Result<UdpSocket> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let open = |family| rustix::net::socket_with(family, SocketType::DGRAM, flags, None);
    let (socket, is_v6) = match open(AddressFamily::INET6) {
        Ok(socket) => {
            set_ipv6_v6only(&socket, false)?;
            (socket, true)
        }
        Err(Errno::AFNOSUPPORT) => (open(AddressFamily::INET)?, false),
        Err(error) => return Err(error.into()),
    };
    rustix::net::bind(&socket, &anywhere(is_v6))?;
    UdpSocket::from_std(socket.into())
}

/// `address` as a socket of the family of `local` wants it.
pub(crate) fn as_seen_from(local: SocketAddr, address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) if local.is_ipv6() => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        other => other,
    }
}
