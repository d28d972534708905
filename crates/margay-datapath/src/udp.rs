//! The SAL's UDP port: two sockets on one port, one for DATA and one for signalling, with segmentation offload both
//! ways.
//!
//! Both are bound to the same address; a classic BPF program of four instructions looks at the type byte and delivers
//! DATA to the first and all else to the second. So a flood of signalling fills its own receive buffer and is worked
//! off by its own thread, while data passes (DESIGN §3.8, §3.11). The first bind is exclusive, so a second agent is
//! refused as ever.
#![allow(unsafe_code)]

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;
use crate::socket_table;

/// Most datagrams that one send may carry (`UDP_MAX_SEGMENTS` of kernels before 6.9).
pub const SEGMENTS_MAX: usize = 64;
/// Most bytes that one send may carry: what an IPv4 UDP datagram takes, rounded down.
pub const SEND_MAX: usize = 65_000;
/// Most bytes that one receive may give.
pub const RECEIVE_MAX: usize = 65_536;

/// Receive buffer asked for. Trains come in bursts of many 64 KiB each, and a TUN gives no back-pressure.
const RECEIVE_BUFFER: libc::c_int = 32 << 20;
/// Send buffer asked for: some trains on the way; when it is full the sender waits and the TUN's queue fills.
const SEND_BUFFER: libc::c_int = 4 << 20;

/// Room for the control messages of one call: segment size and packet info.
const CONTROL_LEN: usize = 96;

#[repr(C, align(8))]
struct Control([u8; CONTROL_LEN]);

/// One of the two sockets.
#[derive(Debug)]
pub struct Udp {
    fd: OwnedFd,
    /// Whether the socket is an IPv6 one, which takes IPv4 as v4-mapped addresses.
    ipv6: bool,
    /// Whether the kernel cuts sends for us; cleared when a device turns out not to support it.
    segmentation: AtomicBool,
}

/// Both sockets.
#[derive(Debug)]
pub struct Sockets {
    /// Receives DATA; sends it with "don't fragment".
    pub data: Udp,
    /// Receives everything else.
    pub signalling: Udp,
}

/// What one receive gave: datagrams of `segment` bytes in a row (the last may be shorter), all from one sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The sender; IPv4 as such, never v4-mapped.
    pub from: SocketAddr,
    /// The address of this host that they came to.
    pub local: Option<IpAddr>,
    /// Bytes of all datagrams.
    pub len: usize,
    /// Bytes of each.
    pub segment: usize,
}

/// Where a datagram leaves from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The address.
    pub local: IpAddr,
    /// The interface; zero where it does not matter.
    pub interface: u32,
}

/// Why a send was refused.
#[derive(Debug)]
pub enum SendError {
    /// A datagram is larger than the path takes; see [`Udp::path_mtu`].
    TooLarge,
    /// The send buffer is full; wait with `poll`.
    Full,
    /// Anything else: no route, a firewall, a device that is down.
    System(io::Error),
}

impl Sockets {
    /// Binds `port` on all addresses, IPv4 and IPv6, or IPv4 alone where the host has no IPv6.
    pub fn open(port: u16) -> Result<Self, Error> {
        let bound = |socket: Udp, reuse| -> io::Result<Udp> {
            socket.set_up()?;
            if reuse {
                socket.set(libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
            }
            socket.bind(port)?;
            Ok(socket)
        };
        let refuse = |error: io::Error| match error.kind() {
            io::ErrorKind::AddrInUse => Error::PortInUse { port, holder: socket_table::holder_of_udp(port) },
            _ => Error::system(format!("open UDP port {port}"), error),
        };
        let data = Udp::new(true)
            .and_then(|socket| bound(socket, false))
            .or_else(|error| match error.raw_os_error() {
                Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL) => Udp::new(false).and_then(|s| bound(s, false)),
                _ => Err(error),
            })
            .map_err(refuse)?;
        // The first socket was bound alone; only now may our second one join it.
        data.set(libc::SOL_SOCKET, libc::SO_REUSEPORT, 1).map_err(refuse)?;
        let signalling = Udp::new(data.ipv6).and_then(|socket| bound(socket, true)).map_err(refuse)?;
        data.split_by_type().map_err(refuse)?;
        data.discover_mtu(libc::IP_PMTUDISC_DO).map_err(refuse)?;
        signalling.discover_mtu(libc::IP_PMTUDISC_WANT).map_err(refuse)?;
        Ok(Self { data, signalling })
    }
}

impl Udp {
    fn new(ipv6: bool) -> io::Result<Self> {
        let family = if ipv6 { libc::AF_INET6 } else { libc::AF_INET };
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::socket(family, kind, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just gave us this descriptor, and nobody else knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, ipv6, segmentation: AtomicBool::new(true) })
    }

    fn set(&self, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
        // SAFETY: the option's value is one c_int, which lives across the call.
        let result = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                name,
                (&raw const value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn get(&self, level: libc::c_int, name: libc::c_int) -> io::Result<libc::c_int> {
        let mut value: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: value and length live across the call, and the length says how much room there is.
        let result =
            unsafe { libc::getsockopt(self.fd.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut len) };
        if result == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
    }

    fn set_up(&self) -> io::Result<()> {
        if self.ipv6 {
            self.set(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0)?;
            self.set(libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
        } else {
            self.set(libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
        }
        // Going over the system's limit takes privilege; without it the limit must do.
        if self.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER).is_err() {
            self.set(libc::SOL_SOCKET, libc::SO_RCVBUF, RECEIVE_BUFFER)?;
        }
        if self.set(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, SEND_BUFFER).is_err() {
            self.set(libc::SOL_SOCKET, libc::SO_SNDBUF, SEND_BUFFER)?;
        }
        self.set(libc::SOL_SOCKET, libc::SO_BROADCAST, 1)?;
        self.set(libc::SOL_UDP, libc::UDP_GRO, 1)
    }

    /// Also receives what is sent to `group` on an interface. Where it does already, nothing changes.
    pub fn join(&self, group: Ipv6Addr, interface: u32) -> io::Result<()> {
        if !self.ipv6 {
            return Ok(());
        }
        let group = libc::ipv6_mreq {
            ipv6mr_multiaddr: libc::in6_addr { s6_addr: group.octets() },
            ipv6mr_interface: interface,
        };
        // SAFETY: the option's value lives across the call, and the length is its own.
        let result = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::IPPROTO_IPV6,
                libc::IPV6_ADD_MEMBERSHIP,
                (&raw const group).cast(),
                size_of::<libc::ipv6_mreq>() as libc::socklen_t,
            )
        };
        match result {
            0 => Ok(()),
            _ => match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::EADDRINUSE) => Ok(()),
                error => Err(error),
            },
        }
    }

    /// What the kernel does about datagrams larger than the path (`IP_PMTUDISC_*`; the IPv6 numbers are the same).
    fn discover_mtu(&self, how: libc::c_int) -> io::Result<()> {
        self.set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, how)?;
        if self.ipv6 { self.set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, how) } else { Ok(()) }
    }

    fn bind(&self, port: u16) -> io::Result<()> {
        let any = if self.ipv6 { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
        let (address, len) = self.raw_address(SocketAddr::new(any, port));
        // SAFETY: the address lives across the call and is `len` bytes long.
        let result = unsafe { libc::bind(self.fd.as_raw_fd(), (&raw const address).cast(), len) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Delivers by the second byte of each datagram: type DATA to the group's first socket, the rest to its second.
    fn split_by_type(&self) -> io::Result<()> {
        const LOAD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
        const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
        let mut program = [
            libc::sock_filter { code: LOAD_BYTE, jt: 0, jf: 0, k: 1 },
            libc::sock_filter { code: JUMP_EQUAL, jt: 0, jf: 1, k: u32::from(u8::from(margay_wire::Kind::Data)) },
            libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: 0 },
            libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: 1 },
        ];
        let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
        // SAFETY: the program and its instructions live across the call; the kernel copies them.
        let result = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ATTACH_REUSEPORT_CBPF,
                (&raw const program).cast(),
                size_of::<libc::sock_fprog>() as libc::socklen_t,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Sends `datagrams`, which are `segment` bytes each (the last may be shorter), from `origin` if the choice
    /// matters. At most [`SEGMENTS_MAX`] datagrams and [`SEND_MAX`] bytes.
    pub fn send(
        &self,
        datagrams: &[u8],
        segment: usize,
        to: SocketAddr,
        origin: Option<Origin>,
    ) -> Result<(), SendError> {
        if datagrams.len() <= segment {
            return self.send_once(datagrams, None, to, origin).map_err(SendError::from);
        }
        if self.segmentation.load(Ordering::Relaxed) {
            let size = u16::try_from(segment).map_err(|_| SendError::TooLarge)?;
            match self.send_once(datagrams, Some(size), to, origin) {
                // EIO: the device cannot checksum; EINVAL: the kernel does not segment, or the path has shrunk.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::EINVAL)) => {
                    if self.path_mtu(to).is_some_and(|largest| usize::from(largest) < segment) {
                        return Err(SendError::TooLarge);
                    }
                    tracing::warn!(%error, "the kernel does not segment UDP here; sending one datagram at a time");
                    self.segmentation.store(false, Ordering::Relaxed);
                }
                result => return result.map_err(SendError::from),
            }
        }
        datagrams.chunks(segment).try_for_each(|one| self.send_once(one, None, to, origin)).map_err(SendError::from)
    }

    fn send_once(&self, bytes: &[u8], segment: Option<u16>, to: SocketAddr, origin: Option<Origin>) -> io::Result<()> {
        let (mut address, address_len) = self.raw_address(to);
        let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let mut control = Control([0; CONTROL_LEN]);
        // SAFETY: all-zero bytes are a valid msghdr.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_name = (&raw mut address).cast();
        message.msg_namelen = address_len;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        let mut writer = ControlWriter { control: &mut control, len: 0 };
        if let Some(segment) = segment {
            writer.push(libc::SOL_UDP, libc::UDP_SEGMENT, segment);
        }
        match origin {
            Some(Origin { local, interface }) if self.ipv6 => {
                let ipi6_addr = libc::in6_addr { s6_addr: crate::packet::mapped(local) };
                let info = libc::in6_pktinfo { ipi6_addr, ipi6_ifindex: interface as _ };
                writer.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
            }
            Some(Origin { local: IpAddr::V4(local), interface }) => {
                let source = libc::in_addr { s_addr: u32::from_ne_bytes(local.octets()) };
                let any = libc::in_addr { s_addr: 0 };
                let info = libc::in_pktinfo { ipi_ifindex: interface as _, ipi_spec_dst: source, ipi_addr: any };
                writer.push(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
            }
            _ => {}
        }
        let control_len = writer.len;
        if control_len > 0 {
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = control_len as _;
        }
        loop {
            // SAFETY: the message points to an address, one part and control bytes that live across the call; the
            // kernel only reads them.
            let sent = unsafe { libc::sendmsg(self.fd.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
            if sent >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Receives what one sender sent in a row; `None` when nothing waits. `buffer` should have [`RECEIVE_MAX`] bytes.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<Received>> {
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        let mut control = Control([0; CONTROL_LEN]);
        // SAFETY: all-zero bytes are a valid sockaddr_storage and a valid msghdr.
        let (mut address, mut message): (libc::sockaddr_storage, libc::msghdr) = unsafe { (zeroed(), zeroed()) };
        message.msg_name = (&raw mut address).cast();
        message.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_LEN as _;
        // SAFETY: the message points to room for an address, one part and control bytes, with their right lengths, all
        // of which live across the call.
        let len = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        let Ok(len) = usize::try_from(len) else {
            let error = io::Error::last_os_error();
            return match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            };
        };
        // An empty datagram is one datagram, too.
        let (segment, local) = control_of(&message);
        let segment = segment.filter(|&size| size > 0).unwrap_or(len).max(1);
        Ok(Some(Received { from: parse_address(&address), local, len, segment }))
    }

    /// Largest UDP payload in bytes that the kernel now believes the path to `to` takes.
    pub fn path_mtu(&self, to: SocketAddr) -> Option<u16> {
        let probe = Self::new(to.is_ipv6()).ok()?;
        let (address, len) = probe.raw_address(to);
        // SAFETY: the address lives across the call and is `len` bytes long.
        if unsafe { libc::connect(probe.fd.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
            return None;
        }
        let (level, name, overhead) = match to {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU, 28),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU, 48),
        };
        let mtu = probe.get(level, name).ok()?;
        Some(u16::try_from(mtu.saturating_sub(overhead).max(0)).unwrap_or(u16::MAX))
    }

    /// The address in the form that this socket's family wants.
    fn raw_address(&self, address: SocketAddr) -> (libc::sockaddr_in6, libc::socklen_t) {
        // SAFETY: all-zero bytes are a valid sockaddr_in6.
        let mut raw: libc::sockaddr_in6 = unsafe { zeroed() };
        match address {
            SocketAddr::V4(v4) if !self.ipv6 => {
                let short = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: sockaddr_in6 is the longer of the two and at least as strictly aligned.
                unsafe { (&raw mut raw).cast::<libc::sockaddr_in>().write(short) };
                return (raw, size_of::<libc::sockaddr_in>() as libc::socklen_t);
            }
            _ => {}
        }
        let v6 = match address {
            SocketAddr::V4(v4) => SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0),
            SocketAddr::V6(v6) => v6,
        };
        raw.sin6_family = libc::AF_INET6 as libc::sa_family_t;
        raw.sin6_port = v6.port().to_be();
        raw.sin6_addr.s6_addr = v6.ip().octets();
        raw.sin6_scope_id = v6.scope_id();
        (raw, size_of::<libc::sockaddr_in6>() as libc::socklen_t)
    }
}

impl AsFd for Udp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<io::Error> for SendError {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EMSGSIZE) => Self::TooLarge,
            Some(libc::EAGAIN) => Self::Full,
            _ => Self::System(error),
        }
    }
}

/// Appends control messages, each aligned as the kernel wants it.
struct ControlWriter<'a> {
    control: &'a mut Control,
    len: usize,
}

impl ControlWriter<'_> {
    fn push<T: Copy>(&mut self, level: libc::c_int, kind: libc::c_int, value: T) {
        let size = size_of::<T>() as libc::c_uint;
        // SAFETY: these compute lengths only.
        let (space, len) = unsafe { (libc::CMSG_SPACE(size) as usize, libc::CMSG_LEN(size) as usize) };
        // At most a segment size and a packet info are written: 24 + 40 bytes of 96.
        assert!(self.len + space <= CONTROL_LEN, "control messages have bounded lengths");
        // SAFETY: all-zero bytes are a valid cmsghdr.
        let mut header: libc::cmsghdr = unsafe { zeroed() };
        header.cmsg_level = level;
        header.cmsg_type = kind;
        header.cmsg_len = len as _;
        // SAFETY: `space` bytes from here lie inside of the buffer (asserted), which is aligned for cmsghdr, as is
        // every length that CMSG_SPACE gives; the value is written unaligned behind the header.
        unsafe {
            let at = self.control.0.as_mut_ptr().add(self.len);
            at.cast::<libc::cmsghdr>().write(header);
            at.add(libc::CMSG_LEN(0) as usize).cast::<T>().write_unaligned(value);
        }
        self.len += space;
    }
}

/// The size of the datagrams that the kernel joined, and the local address that they came to, from a received message.
fn control_of(message: &libc::msghdr) -> (Option<usize>, Option<IpAddr>) {
    let (mut segment, mut local) = (None, None);
    // SAFETY: the message was filled in by recvmsg, so its control bytes hold whole control messages and live as long
    // as it does here; level and type say what the data of each is.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(message);
        while let Some(header) = next.as_ref() {
            match (header.cmsg_level, header.cmsg_type) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    let size = libc::CMSG_DATA(next).cast::<libc::c_int>().read_unaligned();
                    segment = usize::try_from(size).ok();
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let info = libc::CMSG_DATA(next).cast::<libc::in6_pktinfo>().read_unaligned();
                    local = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
                }
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info = libc::CMSG_DATA(next).cast::<libc::in_pktinfo>().read_unaligned();
                    local = Some(IpAddr::V4(Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes())));
                }
                _ => {}
            }
            next = libc::CMSG_NXTHDR(message, next);
        }
    }
    (segment, local)
}

fn parse_address(raw: &libc::sockaddr_storage) -> SocketAddr {
    if libc::c_int::from(raw.ss_family) == libc::AF_INET {
        // SAFETY: the family says which address the storage holds.
        let v4 = unsafe { (&raw const *raw).cast::<libc::sockaddr_in>().read() };
        let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
        return SocketAddr::new(IpAddr::V4(ip), u16::from_be(v4.sin_port));
    }
    // SAFETY: our sockets have only two families; the storage is large enough for both and was zeroed.
    let v6 = unsafe { (&raw const *raw).cast::<libc::sockaddr_in6>().read() };
    let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
    match ip.to_ipv4_mapped() {
        Some(v4) => SocketAddr::new(IpAddr::V4(v4), u16::from_be(v6.sin6_port)),
        None => SocketAddr::V6(SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), 0, v6.sin6_scope_id)),
    }
}
