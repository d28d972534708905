//! Questions to the kernel about sockets of this network namespace (`sock_diag(7)`): whose a socket is, and which one
//! it is, by the number that it keeps for life. Nothing that a program says is in the answer.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

use crate::active_sockets::Cookie;
use crate::socket_table::Socket;

/// From `include/uapi/linux/sock_diag.h` and `inet_diag.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const INET_DIAG_SKV6ONLY: u16 = 11;
/// Any socket.
const NO_COOKIE: u64 = u64::MAX;
/// Lengths of `nlmsghdr`, `inet_diag_req_v2`, `inet_diag_msg` and `nlattr`.
const HEADER_LEN: usize = 16;
const REQUEST_LEN: usize = 56;
const ANSWER_LEN: usize = 72;
const ATTRIBUTE_LEN: usize = 4;
/// More than one answer, or one piece of a list, has.
const ROOM: usize = 32 << 10;

/// A socket as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    /// Which.
    pub cookie: Cookie,
    /// What it is bound to.
    pub local: SocketAddr,
    /// At every address of IPv6, it takes IPv4 packets, too.
    pub takes_both: bool,
    /// The interface that it is bound to; zero: none.
    pub interface: u32,
    /// Its user.
    pub uid: u32,
    /// Its number in `/proc/PID/fd`.
    pub inode: u64,
}

impl Described {
    /// Its user. What is left of a connection that its program has closed is nobody's; the kernel says root's.
    pub fn user(&self) -> Option<u32> {
        (self.inode != 0).then_some(self.uid)
    }
}

/// The sockets on a port that take what comes from anybody: of TCP those that listen, of UDP those that are not
/// connected.
///
/// # Errors
///
/// The kernel has no `sock_diag` for the protocol.
pub fn open_on(protocol: u8, port: u16) -> io::Result<Vec<Described>> {
    let state = if protocol == libc::IPPROTO_TCP as u8 { Socket::LISTEN } else { Socket::BOUND };
    let mut all = Vec::new();
    for any in [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)] {
        let sought = Sought {
            protocol,
            states: 1 << state,
            extensions: 0,
            local: SocketAddr::new(any, port),
            remote: SocketAddr::new(any, 0),
            cookie: NO_COOKIE,
        };
        let netlink = asked(&sought, libc::NLM_F_REQUEST | libc::NLM_F_DUMP)?;
        while read_piece(&netlink, &mut all)? {}
    }
    Ok(all)
}

/// The socket that takes what comes from `remote` to `local`, as the kernel would choose it: also one that only
/// listens there.
///
/// # Errors
///
/// The kernel has no `sock_diag` for the protocol.
pub fn socket_of(protocol: u8, local: SocketAddr, remote: SocketAddr) -> io::Result<Option<Described>> {
    // Of UDP, the kernel takes the two for those of a packet that arrives (`udp_dump_one`).
    let [local, remote] = if protocol == libc::IPPROTO_UDP as u8 { [remote, local] } else { [local, remote] };
    let sought = Sought { protocol, states: u32::MAX, extensions: 0, local, remote, cookie: NO_COOKIE };
    let answer = match ask_one(&sought) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
        answer => answer?,
    };
    Ok(described(&answer))
}

/// What is asked for.
pub(crate) struct Sought {
    pub protocol: u8,
    /// One bit for each state.
    pub states: u32,
    /// What is to be told besides, one bit each.
    pub extensions: u8,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub cookie: u64,
}

impl Sought {
    fn message(&self, flags: libc::c_int) -> Vec<u8> {
        let (local_ip, remote_ip) = (self.local.ip().to_canonical(), self.remote.ip().to_canonical());
        let family = if local_ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let mut message = Vec::with_capacity(HEADER_LEN + REQUEST_LEN);
        message.extend(((HEADER_LEN + REQUEST_LEN) as u32).to_ne_bytes());
        message.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        message.extend((flags as u16).to_ne_bytes());
        message.extend([0; 8]);
        message.extend([family as u8, self.protocol, self.extensions, 0]);
        message.extend(self.states.to_ne_bytes());
        message.extend(self.local.port().to_be_bytes());
        message.extend(self.remote.port().to_be_bytes());
        for ip in [local_ip, remote_ip] {
            let mut octets = [0; 16];
            match ip {
                IpAddr::V4(ip) => octets[..4].copy_from_slice(&ip.octets()),
                IpAddr::V6(ip) => octets = ip.octets(),
            }
            message.extend(octets);
        }
        // Any interface. The cookie is two words, the low one first.
        message.extend([0; 4]);
        message.extend((self.cookie as u32).to_ne_bytes());
        message.extend(((self.cookie >> 32) as u32).to_ne_bytes());
        message
    }
}

/// One answer: header, description and attributes.
pub(crate) fn ask_one(sought: &Sought) -> io::Result<Vec<u8>> {
    let answer = receive(&asked(sought, libc::NLM_F_REQUEST)?)?;
    match half(&answer, 4) {
        Some(SOCK_DIAG_BY_FAMILY) => Ok(answer),
        _ => Err(refusal(&answer)),
    }
}

/// The attributes of an answer.
pub(crate) fn attributes(answer: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = answer.get(HEADER_LEN + ANSWER_LEN..).unwrap_or_default();
    std::iter::from_fn(move || {
        let (len, kind) = (half(rest, 0)?, half(rest, 2)?);
        let len = usize::from(len).max(ATTRIBUTE_LEN);
        let value = rest.get(ATTRIBUTE_LEN..len).unwrap_or_default();
        // Attributes begin at multiples of four bytes.
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

fn asked(sought: &Sought, flags: libc::c_int) -> io::Result<OwnedFd> {
    let kind = SockFlag::SOCK_CLOEXEC;
    let netlink = socket(AddressFamily::Netlink, SockType::Raw, kind, SockProtocol::NetlinkSockDiag)?;
    send(netlink.as_raw_fd(), &sought.message(flags), MsgFlags::empty())?;
    Ok(netlink)
}

fn receive(netlink: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut answer = vec![0; ROOM];
    // The kernel has answered within the call that asked, or answers within this one.
    let len = recv(netlink.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT)?;
    answer.truncate(len);
    Ok(answer)
}

/// Adds the sockets of one piece of a list; gives whether there is more.
fn read_piece(netlink: &OwnedFd, all: &mut Vec<Described>) -> io::Result<bool> {
    let piece = receive(netlink)?;
    let mut rest = &piece[..];
    while let (Some(len), Some(kind)) = (half(rest, 0), half(rest, 4)) {
        let message = rest.get(..len.into()).ok_or(io::ErrorKind::InvalidData)?;
        match kind {
            SOCK_DIAG_BY_FAMILY => all.extend(described(message)),
            _ if i32::from(kind) == libc::NLMSG_DONE => return Ok(false),
            _ => return Err(refusal(message)),
        }
        rest = rest.get(usize::from(len).next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(!piece.is_empty())
}

/// Why there is no answer: `NLMSG_ERROR` has a negative number behind the header.
fn refusal(message: &[u8]) -> io::Error {
    let number = message.get(HEADER_LEN..HEADER_LEN + 4).and_then(|bytes| bytes.try_into().ok());
    let errno = number.map_or(Errno::EBADMSG, |bytes| Errno::from_raw(i32::from_ne_bytes(bytes).wrapping_neg()));
    errno.into()
}

fn described(answer: &[u8]) -> Option<Described> {
    let message = answer.get(HEADER_LEN..HEADER_LEN + ANSWER_LEN)?;
    let word = |at: usize| Some(u32::from_ne_bytes(message.get(at..at + 4)?.try_into().ok()?));
    let port = u16::from_be_bytes([message[4], message[5]]);
    let ip: IpAddr = match i32::from(message[0]) {
        libc::AF_INET => <[u8; 4]>::try_from(&message[8..12]).ok()?.into(),
        _ => Ipv6Addr::from(<[u8; 16]>::try_from(&message[8..24]).ok()?).into(),
    };
    let is_v6_alone = attributes(answer).any(|(kind, value)| kind == INET_DIAG_SKV6ONLY && value != [0]);
    Some(Described {
        cookie: Cookie(u64::from(word(44)?) | u64::from(word(48)?) << 32),
        local: SocketAddr::new(ip.to_canonical(), port),
        takes_both: ip.is_ipv6() && ip.is_unspecified() && !is_v6_alone,
        interface: word(40)?,
        uid: word(64)?,
        inode: word(68)?.into(),
    })
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

#[cfg(test)]
mod test {
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;

    use rustix::net::sockopt::{set_ipv6_v6only, socket_cookie};
    use rustix::net::{AddressFamily, SocketType};

    use super::*;

    const TCP: u8 = libc::IPPROTO_TCP as u8;
    const UDP: u8 = libc::IPPROTO_UDP as u8;

    fn cookie(socket: impl AsFd) -> Cookie {
        Cookie(socket_cookie(socket).expect("a socket"))
    }

    fn cookies(found: &[Described]) -> Vec<Cookie> {
        found.iter().map(|one| one.cookie).collect()
    }

    #[test]
    fn what_is_open_on_a_port_is_told_apart_by_protocol_and_state() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let at = listener.local_addr().expect("bound");
        let datagrams = UdpSocket::bind(at).expect("the other protocol's port");
        let _client = TcpStream::connect(at).expect("accepted");
        let streams = open_on(TCP, at.port()).expect("the kernel answers");
        assert_eq!(cookies(&streams), [cookie(&listener)], "neither the connection nor the datagram socket");
        assert_eq!((streams[0].local, streams[0].takes_both, streams[0].interface), (at, false, 0));
        assert_eq!(cookies(&open_on(UDP, at.port()).expect("the kernel answers")), [cookie(&datagrams)]);
        datagrams.connect(at).expect("connected");
        assert_eq!(open_on(UDP, at.port()).expect("the kernel answers"), []);
    }

    #[test]
    fn a_socket_for_ipv6_alone_takes_one_family() {
        for is_alone in [true, false] {
            let socket = rustix::net::socket(AddressFamily::INET6, SocketType::STREAM, None).expect("IPv6");
            set_ipv6_v6only(&socket, is_alone).expect("not bound yet");
            rustix::net::bind(&socket, &SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0)).expect("a port");
            rustix::net::listen(&socket, 1).expect("it listens");
            let at = SocketAddr::try_from(rustix::net::getsockname(&socket).expect("bound")).expect("an address");
            let found = open_on(TCP, at.port()).expect("the kernel answers");
            assert_eq!(cookies(&found), [cookie(&socket)]);
            assert_eq!(found[0].takes_both, !is_alone);
        }
    }

    #[test]
    fn the_socket_of_a_connection_is_found_at_either_end() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let at = listener.local_addr().expect("bound");
        let client = TcpStream::connect(at).expect("accepted");
        let from = client.local_addr().expect("bound");
        let found = socket_of(TCP, from, at).expect("the kernel answers").expect("it is there");
        assert_eq!((found.cookie, found.local), (cookie(&client), from));
        let datagrams = UdpSocket::bind("0.0.0.0:0").expect("a port");
        let local = SocketAddr::new([127, 0, 0, 1].into(), datagrams.local_addr().expect("bound").port());
        let found = socket_of(UDP, local, at).expect("the kernel answers").expect("it is there");
        assert_eq!(found.cookie, cookie(&datagrams));
        drop(datagrams);
        assert_eq!(socket_of(UDP, local, at).expect("the kernel answers"), None);
    }

    #[test]
    fn attributes_are_read_to_their_end() {
        let mut answer = vec![0; HEADER_LEN + ANSWER_LEN];
        let found = |answer: &[u8]| attributes(answer).map(|(kind, value)| (kind, value.to_vec())).collect::<Vec<_>>();
        assert!(found(&answer).is_empty() && found(&answer[..20]).is_empty());
        for (kind, content) in [(8, &[1][..]), (18, &[0; 40])] {
            answer.extend(((ATTRIBUTE_LEN + content.len()) as u16).to_ne_bytes());
            answer.extend(u16::to_ne_bytes(kind));
            answer.extend(content);
            answer.resize(answer.len().next_multiple_of(4), 0);
        }
        assert_eq!(found(&answer), [(8, vec![1]), (18, vec![0; 40])]);
    }
}
