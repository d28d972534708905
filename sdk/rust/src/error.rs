//! What can go wrong, by who is at fault.

use std::io;
use std::path::PathBuf;

use margay_core::name::NameError;

/// Why a call failed. Each variant has one party at fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This host: no agent runs here, or it went away, or it does not answer. Connections that exist go on without it.
    #[error(
        "the Margay agent of this host does not answer at {}: {source}. Start it (`margay up`), or say in \
         MARGAY_PROGRAMS where its programs.sock is", path.display()
    )]
    AgentDown {
        /// Where it was looked for.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The caller, mostly: the agent understood the request and says no.
    #[error("the Margay agent refused {what}: {text}")]
    Refused {
        /// What was asked.
        what: &'static str,
        /// The number of the error, as in errno(3): `EACCES` (no right to the name), `EADDRINUSE` (others have it), …
        errno: i32,
        /// The agent's reason, and what to do.
        text: String,
    },
    /// The caller: what was given as a name is none.
    #[error("not a name: {0}")]
    Name(#[from] NameError),
    /// The network, the service, or this host's kernel: what the socket call said.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The agent's version: what it sent is not what this library understands.
    #[error("the agent at {} and this program do not understand each other: {why}. Use margay-sdk and agent of one version", path.display())]
    Incompatible {
        /// Where the agent is.
        path: PathBuf,
        /// What came instead.
        why: String,
    },
}

impl Error {
    /// The number of the error as in errno(3), where it has one.
    #[must_use]
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Refused { errno, .. } => Some(*errno),
            Self::AgentDown { source, .. } | Self::Io(source) => source.raw_os_error(),
            Self::Name(_) | Self::Incompatible { .. } => None,
        }
    }

    /// The kind of I/O error that it is nearest to.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Refused { errno, .. } => io::Error::from_raw_os_error(*errno).kind(),
            Self::AgentDown { source, .. } | Self::Io(source) => source.kind(),
            Self::Name(_) => io::ErrorKind::InvalidInput,
            Self::Incompatible { .. } => io::ErrorKind::InvalidData,
        }
    }
}

/// For programs whose functions return `io::Result`. The text stays.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Io(error) => error,
            other => Self::new(other.kind(), other),
        }
    }
}
