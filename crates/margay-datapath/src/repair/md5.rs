//! Whether a connection's packets are signed. TCP-AO tells by a socket option; TCP MD5 only by `sock_diag`, in the
//! network namespace of whoever asks.

use std::io;
use std::net::SocketAddr;

use super::descriptor::Descriptor;
use crate::sock_diag::{Sought, ask_one, attributes};

/// From `include/uapi/linux/tcp.h`, since Linux 6.7.
const TCP_AO_INFO: libc::c_int = 40;
const AO_INFO_LEN: usize = 56;
/// From `include/uapi/linux/inet_diag.h`.
const INET_DIAG_MD5SIG: u16 = 18;
/// Keys are told together with `INET_DIAG_INFO` (2).
const ASK_FOR_INFO: u8 = 1 << (2 - 1);

/// False, too, where the kernel does not tell: it has no `sock_diag`, or the socket is of another network namespace.
pub(super) fn is_signed(socket: Descriptor<'_>, local: SocketAddr, remote: SocketAddr) -> bool {
    let has_ao = socket.get_bytes(libc::IPPROTO_TCP, TCP_AO_INFO, &mut [0; AO_INFO_LEN]).is_ok();
    has_ao || ask(socket, local, remote).is_ok_and(|answer| has_md5(&answer))
}

fn ask(socket: Descriptor<'_>, local: SocketAddr, remote: SocketAddr) -> io::Result<Vec<u8>> {
    let mut cookie = [0; 8];
    socket.get_bytes(libc::SOL_SOCKET, libc::SO_COOKIE, &mut cookie)?;
    let protocol = libc::IPPROTO_TCP as u8;
    let cookie = u64::from_ne_bytes(cookie);
    ask_one(&Sought { protocol, states: u32::MAX, extensions: ASK_FOR_INFO, local, remote, cookie })
}

fn has_md5(answer: &[u8]) -> bool {
    attributes(answer).any(|(kind, _)| kind == INET_DIAG_MD5SIG)
}
