//! What the programs and this process share. The types come from `bpf/active_layout.h` through the object's type
//! information.
#![allow(unsafe_code)]

use std::net::{Ipv6Addr, SocketAddr};
use std::num::NonZeroU32;

pub(super) use super::skeleton::types::{datagram_key, owner, socket_event};
use super::{Change, Cookie, Executable, NamespaceCookie, OwnerId, Socket};
use crate::kernel::plain::Plain;

pub(super) const OWNER_PRIVATE: u32 = 1;
pub(super) const OWNER_LOW_PORTS: u32 = 2;
const SOCKET_LISTENS: u16 = 1;
const SOCKET_RELEASED: u16 = 3;
const SOCKET_REBOUND: u16 = 4;

// SAFETY: made from C structures whose members lie without gaps (`active_layout.h` has its padding as members); the
// assertions below add them up.
unsafe impl Plain for owner {}
// SAFETY: as above.
unsafe impl Plain for datagram_key {}
// SAFETY: as above.
unsafe impl Plain for socket_event {}

const _: () = assert!(size_of::<owner>() == 4 + 4);
const _: () = assert!(size_of::<datagram_key>() == 4 + 2 + 2);
const _: () = assert!(size_of::<socket_event>() == 3 * 8 + 2 * 4 + 16 + 2 * 2 + 2 + 2 + 4 + 4);

/// What a program of ours has said.
pub(super) fn change_of(event: &socket_event) -> Change {
    let cookie = Cookie(event.cookie);
    match event.kind {
        SOCKET_LISTENS => {}
        SOCKET_RELEASED => return Change::Released(cookie),
        SOCKET_REBOUND => return Change::Rebound,
        _ => return Change::Ended(cookie),
    }
    // A socket of IPv6 that is bound to a v4-mapped address takes IPv4 alone.
    let ip = Ipv6Addr::from(event.address).to_canonical();
    let takes_both = ip.is_ipv6() && ip.is_unspecified() && event.is_v6_only == 0;
    let executable = Executable { device: event.executable_device, inode: event.executable_inode };
    Change::Listens(Socket {
        cookie,
        namespace: NamespaceCookie(event.netns),
        owner: (event.owner != 0).then_some(OwnerId(event.owner)),
        executable: (event.executable_inode != 0).then_some(executable),
        protocol: event.protocol,
        address: SocketAddr::new(ip, event.port),
        takes_both,
        interface: NonZeroU32::new(event.interface),
    })
}
