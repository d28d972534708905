//! Why there is no cache, and why it does not take something.

use std::net::IpAddr;
use std::path::PathBuf;

use libbpf_rs::ErrorKind;

use super::words;

/// Why there is no cache. The flow path of user space carries everything.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// Not root, or root of a user namespace only.
    #[error("eBPF needs root of the host (CAP_BPF and CAP_NET_ADMIN), which this agent is not")]
    Privilege,
    /// A kernel before 6.6, or built without.
    #[error("this kernel cannot attach eBPF programs to interfaces (tcx, Linux 6.6 and later): {0}")]
    Kernel(String),
    /// The verifier refused the programs.
    #[error("the kernel refused the eBPF programs; report it with this log: {0}")]
    Verifier(String),
    /// No place for pins.
    #[error("no BPF file system at {path}: {source}")]
    Pins {
        /// The directory that pins were to lie in.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Anything else.
    #[error("{what}: {why}")]
    System {
        /// The step of loading or attaching.
        what: &'static str,
        /// The system's word.
        why: String,
    },
}

impl Unavailable {
    /// The system has refused something that is needed.
    pub(crate) fn system(what: &'static str, why: impl ToString) -> Self {
        Self::System { what, why: why.to_string() }
    }

    /// The kernel has not taken an object.
    pub(crate) fn of_load(error: &libbpf_rs::Error) -> Self {
        match error.kind() {
            // The verifier refuses some programs by the same error.
            ErrorKind::PermissionDenied if !words::has_verifier_log() => Self::Privilege,
            ErrorKind::Unsupported => Self::Kernel(error.to_string()),
            _ => Self::Verifier(format!("{error}; {}", words::last())),
        }
    }
}

/// Why the cache does not take something. The flow stays encapsulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CacheError {
    /// A map is at its bound.
    #[error("the kernel's flow cache is full: {limit} {what}")]
    Full {
        /// Its elements, in the plural.
        what: &'static str,
        /// Most elements.
        limit: u32,
    },
    /// Two families in one path.
    #[error("{local} and {remote} are of two IP versions")]
    Families {
        /// This host.
        local: IpAddr,
        /// The peer.
        remote: IpAddr,
    },
    /// The pair of flow ports belongs to another flow, or the five-tuple does.
    #[error("the pair of flow ports, or the five-tuple, belongs to another flow")]
    Taken,
    /// Anything else.
    #[error("{0}")]
    System(String),
}
