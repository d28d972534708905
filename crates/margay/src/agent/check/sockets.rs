//! Listening sockets of this host, as the kernel lists them.

use std::net::SocketAddr;

use margay_datapath::socket_table::{Socket, Table};

use crate::listener::Protocol;

/// Whether a socket can take what comes to `address`: of its own port, and any address or the same.
pub fn is_listening(address: SocketAddr, protocol: Option<Protocol>) -> bool {
    let tcp = [(Table::Tcp, Socket::LISTEN), (Table::Tcp6, Socket::LISTEN)];
    let udp = [(Table::Udp, Socket::BOUND), (Table::Udp6, Socket::BOUND)];
    let tcp = tcp.into_iter().filter(|_| protocol != Some(Protocol::Udp));
    let udp = udp.into_iter().filter(|_| protocol != Some(Protocol::Tcp));
    tcp.chain(udp).any(|(table, state)| {
        table.sockets().iter().any(|socket| socket.local.port() == address.port() && socket.state == state)
    })
}

#[cfg(test)]
mod test {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_listener_is_seen_until_it_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        assert!(is_listening(address, Some(Protocol::Tcp)));
        assert!(!is_listening(address, Some(Protocol::Udp)));
        drop(listener);
        assert!(!is_listening(address, None));
    }
}
