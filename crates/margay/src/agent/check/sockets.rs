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
    let (ip, port) = (address.ip().to_canonical(), address.port());
    let takes = |local: SocketAddr| {
        let own = local.ip().to_canonical();
        local.port() == port && (own == ip || own.is_unspecified() || ip.is_unspecified())
    };
    tcp.chain(udp)
        .any(|(table, state)| table.sockets().iter().any(|socket| socket.state == state && takes(socket.local)))
}

#[cfg(test)]
mod test {
    use super::*;
    use std::net::{TcpListener, UdpSocket};
    use std::time::{Duration, Instant};

    #[test]
    fn a_listener_is_seen_until_it_ends_and_one_of_another_address_is_not_it() {
        // Both have the port at another address, so that nobody else gets it at all addresses meanwhile.
        let elsewhere = UdpSocket::bind("127.83.12.10:0").expect("a port");
        let port = elsewhere.local_addr().expect("bound").port();
        let _elsewhere = TcpListener::bind(("127.83.12.10", port)).expect("the same port");
        let address = SocketAddr::from(([127, 83, 12, 9], port));
        let listener = TcpListener::bind(address).expect("the same port");
        assert!(is_listening(address, Some(Protocol::Tcp)));
        assert!(!is_listening(address, Some(Protocol::Udp)));
        assert!(is_listening(SocketAddr::from(([0, 0, 0, 0], port)), Some(Protocol::Udp)), "any address");
        drop(listener);
        // A program that another test starts has the listener, too, until it has become that program.
        let limit = Instant::now() + Duration::from_secs(60);
        while is_listening(address, None) {
            assert!(Instant::now() < limit, "it has ended");
            std::thread::yield_now();
        }
    }
}
