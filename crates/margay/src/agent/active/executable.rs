//! Program files of sockets.

use std::net::SocketAddr;
use std::path::PathBuf;

use margay_datapath::active_sockets::Executable;
use margay_datapath::socket_table::{self, Socket, Table};

use crate::listener::Protocol;

/// The program file of whoever has a socket that listened before anybody asked.
pub fn executable_of(protocol: Protocol, address: SocketAddr) -> Option<Executable> {
    // A socket of IPv6 may be bound to a v4-mapped address.
    let tables = match protocol {
        Protocol::Tcp => [Table::Tcp, Table::Tcp6],
        Protocol::Udp => [Table::Udp, Table::Udp6],
    };
    let is_it = |socket: &Socket| {
        SocketAddr::new(socket.local.ip().to_canonical(), socket.local.port()) == address && socket.remote.port() == 0
    };
    let socket = tables.into_iter().find_map(|table| table.sockets().into_iter().find(is_it))?;
    let holder = socket_table::holder(socket.inode)?;
    Executable::at(&PathBuf::from(format!("/proc/{}/exe", holder.pid))).ok()
}

#[cfg(test)]
mod test {
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    #[test]
    fn a_sockets_program_is_found_at_either_family() {
        let own = Executable::at(&std::env::current_exe().expect("a path")).expect("a file");
        for text in ["127.0.0.1:0", "[::ffff:127.0.0.1]:0", "[::1]:0"] {
            let canonical = |address: SocketAddr| SocketAddr::new(address.ip().to_canonical(), address.port());
            let listener = TcpListener::bind(text).expect("a port");
            let address = canonical(listener.local_addr().expect("bound"));
            assert_eq!(executable_of(Protocol::Tcp, address), Some(own), "{text}");
            let socket = UdpSocket::bind(text).expect("a port");
            let address = canonical(socket.local_addr().expect("bound"));
            assert_eq!(executable_of(Protocol::Udp, address), Some(own), "{text}");
        }
    }
}
