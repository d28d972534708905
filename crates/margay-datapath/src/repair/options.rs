//! What a program has set on its socket: read from one, and set on another.

use std::io;

use libc::{IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, SOL_SOCKET};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use super::QUEUE_MAX;
use super::descriptor::Descriptor;
use super::error::RepairError;
use super::record::{
    Buffer, CONGESTION_MAX, Family, INT_MAX, KEEPALIVE_MAX_S, KEEPALIVE_PROBES_MAX, SocketOptions, TIMEOUT_MAX_US,
};

const CONGESTION_ALLOWED: &str = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
/// Largest priority that a program without privileges may set (`sock_setsockopt` in the kernel).
const PRIORITY_MAX: u32 = 6;
/// Which buffers the program has set (`include/uapi/asm-generic/socket.h`, since Linux 5.14).
const SO_BUF_LOCK: libc::c_int = 72;
const SEND_LOCK: u32 = 1;
const RECEIVE_LOCK: u32 = 2;

/// Reads the options; `reuses_address` is what `SO_REUSEADDR` was before the repair mode changed it.
pub(super) fn read(socket: Descriptor<'_>, family: Family, reuses_address: bool) -> Result<SocketOptions, RepairError> {
    let general = |name| socket.get(SOL_SOCKET, name).map_err(RepairError::reading("getsockopt(SOL_SOCKET)"));
    let tcp = |name| socket.get(IPPROTO_TCP, name).map_err(RepairError::reading("getsockopt(IPPROTO_TCP)"));
    let is_on = |value: Result<u32, RepairError>| value.map(|value| value != 0);
    let locks = general(SO_BUF_LOCK)?;
    // The system's defaults may be more than a program may ask for.
    let seconds = |value: u32| u16::try_from(value).unwrap_or(u16::MAX).clamp(1, KEEPALIVE_MAX_S);
    let probes = u8::try_from(tcp(libc::TCP_KEEPCNT)?).unwrap_or(u8::MAX).clamp(1, KEEPALIVE_PROBES_MAX);
    let receive_buffer = Buffer { len: general(libc::SO_RCVBUF)?.min(INT_MAX), is_set: locks & RECEIVE_LOCK != 0 };
    let send_buffer = Buffer { len: general(libc::SO_SNDBUF)?.min(INT_MAX), is_set: locks & SEND_LOCK != 0 };
    Ok(SocketOptions {
        non_blocking: flags(socket).map_err(RepairError::reading("fcntl(F_GETFL)"))?.contains(OFlag::O_NONBLOCK),
        reuses_address,
        shares_port: is_on(general(libc::SO_REUSEPORT))?,
        keepalive: is_on(general(libc::SO_KEEPALIVE))?,
        keepalive_idle_s: seconds(tcp(libc::TCP_KEEPIDLE)?),
        keepalive_interval_s: seconds(tcp(libc::TCP_KEEPINTVL)?),
        keepalive_probes: probes,
        no_delay: is_on(tcp(libc::TCP_NODELAY))?,
        corked: is_on(tcp(libc::TCP_CORK))?,
        user_timeout_ms: tcp(libc::TCP_USER_TIMEOUT)?.min(INT_MAX),
        congestion: congestion(socket).map_err(RepairError::reading("getsockopt(TCP_CONGESTION)"))?,
        linger_s: linger_s(socket).map_err(RepairError::reading("getsockopt(SO_LINGER)"))?,
        receive_buffer,
        send_buffer,
        tos: class(socket, IPPROTO_IP, libc::IP_TOS).map_err(RepairError::reading("getsockopt(IP_TOS)"))?,
        traffic_class: match family {
            Family::V4 => 0,
            Family::V6 => class(socket, IPPROTO_IPV6, libc::IPV6_TCLASS)
                .map_err(RepairError::reading("getsockopt(IPV6_TCLASS)"))?,
        },
        priority: general(libc::SO_PRIORITY)?.min(INT_MAX),
        urgent_inline: is_on(general(libc::SO_OOBINLINE))?,
        receive_low_water: general(libc::SO_RCVLOWAT)?.clamp(1, INT_MAX),
        receive_timeout_us: timeout_us(getsockopt(&socket.0, sockopt::ReceiveTimeout))
            .map_err(RepairError::reading("getsockopt(SO_RCVTIMEO)"))?,
        send_timeout_us: timeout_us(getsockopt(&socket.0, sockopt::SendTimeout))
            .map_err(RepairError::reading("getsockopt(SO_SNDTIMEO)"))?,
    })
}

fn flags(socket: Descriptor<'_>) -> io::Result<OFlag> {
    Ok(OFlag::from_bits_retain(fcntl(socket.0, FcntlArg::F_GETFL)?))
}

fn congestion(socket: Descriptor<'_>) -> io::Result<String> {
    let mut name = [0; CONGESTION_MAX + 1];
    let len = socket.get_bytes(IPPROTO_TCP, libc::TCP_CONGESTION, &mut name)?;
    let name = name[..len].split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Whether any program of this host may choose this congestion control.
pub(super) fn is_allowed_congestion(name: &str) -> bool {
    let allowed = std::fs::read_to_string(CONGESTION_ALLOWED).unwrap_or_default();
    allowed.split_whitespace().any(|one| one == name)
}

fn linger_s(socket: Descriptor<'_>) -> io::Result<Option<u32>> {
    let linger = getsockopt(&socket.0, sockopt::Linger)?;
    Ok((linger.l_onoff != 0).then_some(linger.l_linger.max(0).cast_unsigned()))
}

/// The ECN bits are the kernel's own.
fn class(socket: Descriptor<'_>, level: libc::c_int, name: libc::c_int) -> io::Result<u8> {
    Ok(socket.get(level, name)? as u8 & !3)
}

fn timeout_us(timeout: nix::Result<TimeVal>) -> io::Result<u64> {
    Ok(u64::try_from(timeout?.num_microseconds()).unwrap_or(0).min(TIMEOUT_MAX_US))
}

/// Sets all but those that a socket must have before it is connected, and those that decide when it sends.
pub(super) fn set(socket: Descriptor<'_>, family: Family, options: &SocketOptions) -> Result<(), RepairError> {
    let classes = [
        (IPPROTO_IP, libc::IP_TOS, u32::from(options.tos)),
        (IPPROTO_IPV6, libc::IPV6_TCLASS, u32::from(options.traffic_class)),
    ];
    let family_classes = if family == Family::V6 { &classes[..] } else { &classes[..1] };
    for &(level, name, value) in family_classes {
        socket.set(level, name, value).map_err(RepairError::making("setsockopt(IP_TOS, IPV6_TCLASS)"))?;
    }
    // The TOS has changed the priority.
    let general = [
        // Larger ones take a privilege, which a program of another host does not get by a record.
        (libc::SO_PRIORITY, options.priority.min(PRIORITY_MAX)),
        (libc::SO_REUSEPORT, options.shares_port.into()),
        (libc::SO_OOBINLINE, options.urgent_inline.into()),
        (libc::SO_RCVLOWAT, options.receive_low_water),
    ];
    for (name, value) in general {
        socket.set(SOL_SOCKET, name, value).map_err(RepairError::making("setsockopt(SOL_SOCKET)"))?;
    }
    let tcp = [
        (libc::TCP_KEEPIDLE, options.keepalive_idle_s.into()),
        (libc::TCP_KEEPINTVL, options.keepalive_interval_s.into()),
        (libc::TCP_KEEPCNT, options.keepalive_probes.into()),
        (libc::TCP_USER_TIMEOUT, options.user_timeout_ms),
    ];
    for (name, value) in tcp {
        socket.set(IPPROTO_TCP, name, value).map_err(RepairError::making("setsockopt(IPPROTO_TCP)"))?;
    }
    // Starts the timer, which the intervals above belong to.
    let keepalive = options.keepalive.into();
    socket.set(SOL_SOCKET, libc::SO_KEEPALIVE, keepalive).map_err(RepairError::making("setsockopt(SO_KEEPALIVE)"))?;
    set_times(socket, options).map_err(RepairError::making("setsockopt(SO_LINGER, SO_RCVTIMEO, SO_SNDTIMEO)"))?;
    set_flags(socket, options).map_err(RepairError::making("fcntl(F_SETFL)"))
}

fn set_times(socket: Descriptor<'_>, options: &SocketOptions) -> io::Result<()> {
    let linger = libc::linger {
        l_onoff: options.linger_s.is_some().into(),
        l_linger: options.linger_s.unwrap_or(0).min(INT_MAX).cast_signed(),
    };
    setsockopt(&socket.0, sockopt::Linger, &linger)?;
    let value = |us: u64| TimeVal::microseconds(us.min(TIMEOUT_MAX_US).cast_signed());
    setsockopt(&socket.0, sockopt::ReceiveTimeout, &value(options.receive_timeout_us))?;
    setsockopt(&socket.0, sockopt::SendTimeout, &value(options.send_timeout_us))?;
    Ok(())
}

fn set_flags(socket: Descriptor<'_>, options: &SocketOptions) -> io::Result<()> {
    let mut all = flags(socket)?;
    all.set(OFlag::O_NONBLOCK, options.non_blocking);
    fcntl(socket.0, FcntlArg::F_SETFL(all))?;
    Ok(())
}

/// Sets both buffers to the record's lengths, which are another host's word and no more than a queue of a record may
/// have, or to `room` bytes of data each where that is more. The kernel sizes them by itself unless the program has set
/// them.
pub(super) fn set_buffers(socket: Descriptor<'_>, options: &SocketOptions, room: [usize; 2]) -> io::Result<()> {
    // The kernel doubles what it is told, for its own headers. A chunk's first page may be for one byte.
    let half = |buffer: Buffer, room: usize| {
        let room = u32::try_from(room + room / 2).unwrap_or(INT_MAX);
        (buffer.len / 2).min(QUEUE_MAX as u32).max(room)
    };
    socket.set(SOL_SOCKET, libc::SO_RCVBUFFORCE, half(options.receive_buffer, room[0]))?;
    socket.set(SOL_SOCKET, libc::SO_SNDBUFFORCE, half(options.send_buffer, room[1]))?;
    let lock = |buffer: Buffer, lock: u32| if buffer.is_set { lock } else { 0 };
    socket.set(
        SOL_SOCKET,
        SO_BUF_LOCK,
        lock(options.receive_buffer, RECEIVE_LOCK) | lock(options.send_buffer, SEND_LOCK),
    )
}
