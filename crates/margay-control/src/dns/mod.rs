//! The DNS responder: names of one zone, over UDP and TCP, for programs of this host and its containers (DESIGN §5,
//! §18).
//!
//! It is a process of its own ([`Responder`]) that outlives the agent: what it does not know of the zone it asks the
//! agent ([`Answers`], over [`channel`]), what is not of the zone it asks the servers that this host had before. So it
//! can be the host's only server (docs/decisions/0044).

mod answer;
pub mod channel;
mod memory;
mod responder;
mod transport;
mod upstream;
mod zone;

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;

use margay_core::name::Name;
use tokio::net::{TcpListener, UdpSocket};

use crate::lease::Asker;

pub use answer::Answers;
pub use responder::{Received, Responder, receive};
pub use transport::UserOf;
pub use upstream::Servers;

/// Length of the header: less is no DNS.
const HEADER: usize = 12;

/// How a question came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    Datagram = 0,
    Stream = 1,
}

/// Whose questions count together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Questioner {
    /// A user of this host.
    User(u32),
    /// Whoever asks from this address.
    Address(IpAddr),
}

impl From<Questioner> for Asker {
    fn from(questioner: Questioner) -> Self {
        match questioner {
            Questioner::User(uid) => Self::User(uid),
            Questioner::Address(address) => Self::Address(address),
        }
    }
}

/// What the responder asks about a name before it answers.
pub trait Directory: Send + Sync + 'static {
    /// Plain addresses to answer with, because nobody serves the name and the operator configured a fallback (DESIGN
    /// §18); empty: virtual addresses.
    fn fallback<'a>(&'a self, name: &'a Name) -> Pin<Box<dyn Future<Output = Vec<IpAddr>> + Send + 'a>>;

    /// Whether there is such a name. With the zone in a search list, any other name comes with the zone behind it, too,
    /// and one that nobody serves must not be found then.
    fn exists<'a>(&'a self, name: &'a Name) -> Pin<Box<dyn Future<Output = bool> + Send + 'a>>;
}

/// Why the responder does not run.
#[derive(Debug, thiserror::Error)]
pub enum DnsError {
    /// Another server.
    #[error(
        "{0}: another program answers DNS there (`ss -lunpt` shows which); stop it, or give Margay another address \
         with [dns] listen"
    )]
    PortInUse(SocketAddr),
    /// An address of another host, or of none.
    #[error(
        "{0}: this host does not have the address; `margay up` sets the interface up, or give Margay another address \
         with [dns] listen"
    )]
    NoAddress(SocketAddr),
    /// A low port without the right to it.
    #[error(
        "{0}: the port may be opened by root alone; run as root, or give Margay a port above 1023 with [dns] listen"
    )]
    NotPermitted(SocketAddr),
    /// Not a zone.
    #[error("`{zone}` is no DNS zone ({why}); write for example sal.internal")]
    Zone {
        /// As configured.
        zone: String,
        /// What is wrong with it.
        why: String,
    },
    /// Anything else.
    #[error("{listen}: the DNS responder cannot listen there: {error}")]
    Io {
        /// Where.
        listen: SocketAddr,
        /// What the system said.
        error: io::Error,
    },
}

/// What a responder did since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponderCounters {
    /// Readable questions.
    pub queries: u64,
    /// Answered by the agent, also where the answer is that there is none.
    pub answered: u64,
    /// Answered by what an agent had said before, since there was none.
    pub remembered: u64,
    /// Answered by another server.
    pub forwarded: u64,
    /// Of a kind that nobody does, or that no server would answer.
    pub refused: u64,
    /// No address could be leased, or nobody has answered.
    pub failed: u64,
    /// Not DNS questions.
    pub malformed: u64,
    /// Questions and connections beyond what one asker may have at once.
    pub crowded: u64,
}

impl ResponderCounters {
    fn to_bytes(self) -> Vec<u8> {
        let all = [
            self.queries,
            self.answered,
            self.remembered,
            self.forwarded,
            self.refused,
            self.failed,
            self.malformed,
            self.crowded,
        ];
        all.iter().flat_map(|count| count.to_be_bytes()).collect()
    }

    /// What is missing was not counted yet.
    fn from_bytes(bytes: &[u8]) -> Self {
        let mut all = bytes.as_chunks::<8>().0.iter().map(|count| u64::from_be_bytes(*count));
        let mut next = || all.next().unwrap_or(0);
        Self {
            queries: next(),
            answered: next(),
            remembered: next(),
            forwarded: next(),
            refused: next(),
            failed: next(),
            malformed: next(),
            crowded: next(),
        }
    }
}

/// Opens the sockets of a responder at an address. Port 0 takes one that is free for both.
///
/// # Errors
///
/// The address cannot be had.
pub async fn bind(listen: SocketAddr) -> Result<(UdpSocket, TcpListener), DnsError> {
    transport::bind(listen).await.map_err(|error| explain(listen, error))
}

fn explain(listen: SocketAddr, error: io::Error) -> DnsError {
    match error.kind() {
        io::ErrorKind::AddrInUse => DnsError::PortInUse(listen),
        io::ErrorKind::AddrNotAvailable => DnsError::NoAddress(listen),
        io::ErrorKind::PermissionDenied => DnsError::NotPermitted(listen),
        _ => DnsError::Io { listen, error },
    }
}
