//! What can go wrong when the datapath is set up, and what to do about it.

use std::io;

/// A failure of the environment. Each message says who is at fault and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no TUN driver, or its device node is missing.
    #[error(
        "/dev/net/tun is missing: load the driver with `modprobe tun`, or in a container pass --device /dev/net/tun"
    )]
    NoTun,
    /// The process may not make interfaces here.
    #[error("not permitted to {what}: needs CAP_NET_ADMIN; run as root, or inside a user namespace of its own")]
    NotPermitted {
        /// The act that was refused.
        what: String,
    },
    /// Another process holds the TUN.
    #[error("{name} is in use by another process, probably another agent: see `margay status`")]
    TunBusy {
        /// The interface.
        name: String,
    },
    /// An interface of that name is something else.
    #[error(
        "{name} exists and is not a TUN of this kind: remove it with `ip link delete {name}`, or choose another name"
    )]
    NotATun {
        /// The interface.
        name: String,
    },
    /// The interface's name cannot be one.
    #[error("{name:?} is no interface name: it needs 1 to 15 bytes without '/', '%' and blanks")]
    BadName {
        /// The name.
        name: String,
    },
    /// The UDP port is taken.
    #[error("UDP port {port} is in use by {holder}: stop that process, or see `margay status` for another agent")]
    PortInUse {
        /// The port.
        port: u16,
        /// The process, as far as it can be found.
        holder: String,
    },
    /// A datagram size outside of what the wire format can do.
    #[error("datagram_max is {value} bytes, it must be {low} to {high}")]
    DatagramMax {
        /// The value given.
        value: u16,
        /// Least possible.
        low: u16,
        /// Greatest possible.
        high: u16,
    },
    /// Any other refusal of the operating system.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
}

impl Error {
    /// Wraps a refusal, and tells missing rights from the rest.
    pub(crate) fn system(what: impl Into<String>, source: impl Into<io::Error>) -> Self {
        let (what, source) = (what.into(), source.into());
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::NotPermitted { what },
            _ => Self::System { what, source },
        }
    }
}
