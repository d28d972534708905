//! Listening sockets of this host, as the kernel lists them.

use std::fs;
use std::net::SocketAddr;

use crate::listener::Protocol;

/// `0A`: listening; UDP sockets that are bound and not connected are in state `07`.
const TCP_LISTEN: &str = "0A";
const UDP_BOUND: &str = "07";

/// Whether a socket can take what comes to `address`: of its own port, and any address or the same.
pub fn is_listening(address: SocketAddr, protocol: Option<Protocol>) -> bool {
    let tables: &[(&str, &str)] = match protocol {
        Some(Protocol::Tcp) => &[("tcp", TCP_LISTEN), ("tcp6", TCP_LISTEN)],
        Some(Protocol::Udp) => &[("udp", UDP_BOUND), ("udp6", UDP_BOUND)],
        None => &[("tcp", TCP_LISTEN), ("tcp6", TCP_LISTEN), ("udp", UDP_BOUND), ("udp6", UDP_BOUND)],
    };
    tables.iter().any(|(table, state)| {
        let text = fs::read_to_string(format!("/proc/self/net/{table}")).unwrap_or_default();
        text.lines().skip(1).any(|line| has_port(line, state, address.port()))
    })
}

/// A line is `  0: 00000000:0050 00000000:0000 0A …`: number, local address, remote address, state.
fn has_port(line: &str, state: &str, port: u16) -> bool {
    let mut words = line.split_ascii_whitespace().skip(1);
    let (Some(local), Some(_), Some(found)) = (words.next(), words.next(), words.next()) else { return false };
    let found_port = local.rsplit_once(':').and_then(|(_, digits)| u16::from_str_radix(digits, 16).ok());
    found == state && found_port == Some(port)
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
