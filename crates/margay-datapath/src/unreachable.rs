//! What the network says of hosts and networks that cannot be reached (ICMP): flows whose packets it is about have
//! their peer probed at once, instead of after a time without an answer.
//!
//! Two raw sockets hear of nothing else: a filter in the kernel lets only this one type pass. Anybody can forge such a
//! message, so that it says an address only, a few of them each second are looked at, and nothing fails by them.
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use margay_core::Input;
use margay_core::rate::RateLimit;
use margay_core::time::Instant;

use crate::clock;
use crate::driver::{Core, Shared};
use crate::wait::readable;

/// Type "destination unreachable", and its codes: no way to the network, or to the host.
const V4_TYPE: u8 = 3;
const V4_CODES: [u8; 2] = [0, 1];
/// The same of ICMPv6: no route, or the address is not answered for.
const V6_TYPE: u8 = 1;
const V6_CODES: [u8; 2] = [0, 3];
/// Level and number of the option that says which types of ICMP a raw socket hears (`linux/icmp.h`).
const SOL_RAW: libc::c_int = 255;
const ICMP_FILTER: libc::c_int = 1;
/// The same of ICMPv6 (RFC 3542, section 3.2); its level is the protocol's number.
const ICMPV6_FILTER: libc::c_int = 1;
/// Messages that are looked at each second; of more, the rest is left out.
const LOOKED_AT_PER_S: u32 = 100;
/// More of a message than is looked at.
const MESSAGE_LEN: usize = 256;

/// A raw socket that hears this one type.
struct Listener {
    fd: OwnedFd,
    is_v6: bool,
}

impl Listener {
    fn open(is_v6: bool) -> io::Result<Self> {
        let (family, protocol) =
            if is_v6 { (libc::AF_INET6, libc::IPPROTO_ICMPV6) } else { (libc::AF_INET, libc::IPPROTO_ICMP) };
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::socket(family, kind, protocol) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just gave us this descriptor, and nobody else knows it.
        let this = Self { fd: unsafe { OwnedFd::from_raw_fd(fd) }, is_v6 };
        // In both, a bit that is set keeps a type away.
        if is_v6 {
            let mut filter = [u32::MAX; 8];
            filter[0] &= !(1 << V6_TYPE);
            this.set(libc::IPPROTO_ICMPV6, ICMPV6_FILTER, &filter)?;
        } else {
            let filter = !(1_u32 << V4_TYPE);
            this.set(SOL_RAW, ICMP_FILTER, &filter)?;
        }
        Ok(this)
    }

    fn set<T: Copy>(&self, level: libc::c_int, name: libc::c_int, value: &T) -> io::Result<()> {
        let len = size_of::<T>() as libc::socklen_t;
        // SAFETY: the option's value lives across the call, and the length is its own.
        let result = unsafe { libc::setsockopt(self.fd.as_raw_fd(), level, name, (&raw const *value).cast(), len) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// What the next message says cannot be reached; `None` once there is none.
    fn next(&self) -> io::Result<Option<Option<IpAddr>>> {
        let mut buffer = [0; MESSAGE_LEN];
        // SAFETY: the buffer lives across the call, and the length is its own.
        let len = unsafe { libc::recv(self.fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        let Ok(len) = usize::try_from(len) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        };
        let message = buffer.get(..len).unwrap_or_default();
        Ok(Some(if self.is_v6 { unreachable_v6(message) } else { unreachable_v4(message) }))
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Where the quoted packet was to go. A raw socket of IPv4 gives the IP header as well.
fn unreachable_v4(packet: &[u8]) -> Option<IpAddr> {
    let header_len = usize::from(packet.first()? & 0x0f) * 4;
    let (icmp, quoted) = packet.get(header_len..)?.split_at_checked(8)?;
    if icmp[0] != V4_TYPE || !V4_CODES.contains(&icmp[1]) || quoted.first()? >> 4 != 4 {
        return None;
    }
    let destination: [u8; 4] = quoted.get(16..20)?.try_into().ok()?;
    Some(Ipv4Addr::from(destination).into())
}

/// One of IPv6 does not.
fn unreachable_v6(icmp: &[u8]) -> Option<IpAddr> {
    let (icmp, quoted) = icmp.split_at_checked(8)?;
    if icmp[0] != V6_TYPE || !V6_CODES.contains(&icmp[1]) || quoted.first()? >> 4 != 6 {
        return None;
    }
    let destination: [u8; 16] = quoted.get(24..40)?.try_into().ok()?;
    Some(Ipv6Addr::from(destination).into())
}

/// Tells the core of what cannot be reached, until the datapath stops. Without such a socket, peers are probed as soon
/// as they have not answered for a while.
pub(crate) fn run<C: Core>(shared: &Shared<C>) -> io::Result<()> {
    let mut listeners = Vec::new();
    for is_v6 in [false, true] {
        match Listener::open(is_v6) {
            Ok(listener) => listeners.push(listener),
            Err(error) => tracing::debug!(is_v6, %error, "the network's word of what cannot be reached is not heard"),
        }
    }
    let mut rate = RateLimit::new(LOOKED_AT_PER_S, clock::now());
    while wait(&listeners, shared)? {
        for listener in &listeners {
            // What goes wrong with one of them says nothing of the flows.
            while let Some(unreachable) = listener.next().unwrap_or_default() {
                let now = clock::now();
                if let Some(remote) = unreachable.filter(|_| rate.take(now)) {
                    tell(shared, now, remote);
                }
            }
        }
    }
    Ok(())
}

fn tell<C: Core>(shared: &Shared<C>, now: Instant, remote: IpAddr) {
    let mut side = shared.core.lock();
    side.core.handle(now, Input::Unreachable(remote));
    side.drain(shared);
}

/// Waits for a message; false when the datapath stops instead.
fn wait<C>(listeners: &[Listener], shared: &Shared<C>) -> io::Result<bool> {
    match listeners {
        [] => readable([shared.stop.as_fd()]).map(|_| false),
        [one] => readable([one.as_fd(), shared.stop.as_fd()]).map(|[_, has_ended]| !has_ended),
        [one, other, ..] => {
            readable([one.as_fd(), other.as_fd(), shared.stop.as_fd()]).map(|[_, _, has_ended]| !has_ended)
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// An IPv4 header, the first bytes of an ICMP message, and what is quoted.
    fn v4(kind: u8, code: u8, quoted: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; 20];
        packet[0] = 0x45;
        packet.extend([kind, code, 0, 0, 0, 0, 0, 0]);
        packet.extend(quoted);
        packet
    }

    #[test]
    fn the_destination_of_the_quoted_packet_is_what_cannot_be_reached() {
        let mut quoted = [0; 28];
        quoted[0] = 0x45;
        quoted[16..20].copy_from_slice(&[10, 0, 0, 7]);
        let there = Some(IpAddr::from([10, 0, 0, 7]));
        assert_eq!(
            [0, 1, 2, 3, 4, 13].map(|code| unreachable_v4(&v4(3, code, &quoted))),
            [there, there, None, None, None, None]
        );
        assert_eq!(unreachable_v4(&v4(11, 0, &quoted)), None, "another type");
        let mut with_options = v4(3, 1, &quoted);
        with_options[0] = 0x46;
        with_options.splice(20..20, [0; 4]);
        assert_eq!(unreachable_v4(&with_options), there);
        for len in 0..48 {
            assert_eq!(unreachable_v4(&v4(3, 1, &quoted)[..len]), None, "{len} bytes");
        }
    }

    #[test]
    fn of_ipv6_as_well() {
        let mut message = vec![1, 3, 0, 0, 0, 0, 0, 0];
        message.extend([0; 48]);
        message[8] = 0x60;
        message[32..48].copy_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
        let there = "fd00::9".parse().ok();
        let mut of_code = |code| {
            message[1] = code;
            unreachable_v6(&message)
        };
        assert_eq!([0, 1, 3, 4].map(&mut of_code), [there, None, there, None]);
        assert_eq!(unreachable_v6(&message[..47]), None);
    }
}
