//! Whether a connection's packets are signed. TCP-AO tells by a socket option; TCP MD5 only by `sock_diag`, in the
//! network namespace of whoever asks.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;

use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};

use super::descriptor::Descriptor;

/// From `include/uapi/linux/tcp.h`, since Linux 6.7.
const TCP_AO_INFO: libc::c_int = 40;
const AO_INFO_LEN: usize = 56;
/// From `include/uapi/linux/sock_diag.h` and `inet_diag.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const INET_DIAG_MD5SIG: u16 = 18;
/// Keys are told together with `INET_DIAG_INFO` (2).
const ASK_FOR_INFO: u8 = 1 << (2 - 1);
/// Lengths of `nlmsghdr`, `inet_diag_req_v2`, `inet_diag_msg` and `nlattr`.
const HEADER_LEN: usize = 16;
const REQUEST_LEN: usize = 56;
const ANSWER_LEN: usize = 72;
const ATTRIBUTE_LEN: usize = 4;
/// More than one socket's answer has.
const ROOM: usize = 16 << 10;

/// False, too, where the kernel does not tell: it has no `sock_diag`, or the socket is of another network namespace.
pub(super) fn is_signed(socket: Descriptor<'_>, local: SocketAddr, remote: SocketAddr) -> bool {
    let has_ao = socket.get_bytes(libc::IPPROTO_TCP, TCP_AO_INFO, &mut [0; AO_INFO_LEN]).is_ok();
    has_ao || ask(socket, local, remote).is_ok_and(|answer| has_md5(&answer))
}

fn ask(socket_asked: Descriptor<'_>, local: SocketAddr, remote: SocketAddr) -> io::Result<Vec<u8>> {
    let mut cookie = [0; 8];
    socket_asked.get_bytes(libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie)?;
    let kind = SockFlag::SOCK_CLOEXEC;
    let netlink = socket(AddressFamily::Netlink, SockType::Raw, kind, SockProtocol::NetlinkSockDiag)?;
    send(netlink.as_raw_fd(), &request(local, remote, cookie), MsgFlags::empty())?;
    let mut answer = vec![0; ROOM];
    // The kernel has answered within the call above.
    let len = recv(netlink.as_raw_fd(), &mut answer, MsgFlags::MSG_DONTWAIT)?;
    answer.truncate(len);
    Ok(answer)
}

/// `cookie` is in the kernel's order of bytes.
fn request(local: SocketAddr, remote: SocketAddr, cookie: [u8; 8]) -> Vec<u8> {
    let (local_ip, remote_ip) = (local.ip().to_canonical(), remote.ip().to_canonical());
    let family = if local_ip.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut message = Vec::with_capacity(HEADER_LEN + REQUEST_LEN);
    message.extend(((HEADER_LEN + REQUEST_LEN) as u32).to_ne_bytes());
    message.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    message.extend([0; 8]);
    message.extend([family as u8, libc::IPPROTO_TCP as u8, ASK_FOR_INFO, 0]);
    // All states.
    message.extend(u32::MAX.to_ne_bytes());
    message.extend(local.port().to_be_bytes());
    message.extend(remote.port().to_be_bytes());
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
    let cookie = u64::from_ne_bytes(cookie);
    message.extend((cookie as u32).to_ne_bytes());
    message.extend(((cookie >> 32) as u32).to_ne_bytes());
    message
}

fn has_md5(answer: &[u8]) -> bool {
    let half = |bytes: &[u8], at: usize| Some(u16::from_ne_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
    if half(answer, 4) != Some(SOCK_DIAG_BY_FAMILY) {
        return false;
    }
    let mut rest = answer.get(HEADER_LEN + ANSWER_LEN..).unwrap_or_default();
    while let (Some(len), Some(kind)) = (half(rest, 0), half(rest, 2)) {
        if kind == INET_DIAG_MD5SIG {
            return true;
        }
        // Attributes begin at multiples of four bytes.
        let len = usize::from(len).max(ATTRIBUTE_LEN).next_multiple_of(4);
        rest = rest.get(len..).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn answers_are_read_to_their_end() {
        let mut answer = vec![0; HEADER_LEN + ANSWER_LEN];
        answer[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        assert!(!has_md5(&answer) && !has_md5(&answer[..20]));
        let attribute = |kind: u16, content: &[u8]| {
            let len = (ATTRIBUTE_LEN + content.len()) as u16;
            let mut bytes = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
            bytes.extend(content);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        answer.extend(attribute(8, &[1]));
        assert!(!has_md5(&answer));
        answer.extend(attribute(INET_DIAG_MD5SIG, &[0; 40]));
        assert!(has_md5(&answer));
        answer[4..6].copy_from_slice(&(libc::NLMSG_ERROR as u16).to_ne_bytes());
        assert!(!has_md5(&answer));
    }
}
