//! Sockets that programs bind to names themselves (DESIGN §9, the second door): one serves its name while it listens,
//! and is forgotten with the socket, however that ends.

use margay_core::name::Name;
use margay_datapath::active_sockets::Cookie;
use serde::{Deserialize, Serialize};

use super::rule::{Offer, Rule, Source};
use crate::agent::service::PublishError;
use crate::listener::Protocol;

/// More bound sockets of one host are a mistake.
pub const BOUND_MAX: usize = 10_000;
/// Share of a bound socket until an operator sets another.
const WEIGHT: u32 = 100;
const PRIORITY: u32 = 100;

/// A bound socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bound {
    /// The kernel's number of it.
    pub cookie: u64,
    /// Protocol.
    pub protocol: Protocol,
    /// Its port; 0 where it has none yet.
    pub port: u16,
    /// What it serves: a name, or a prefix of any length.
    #[serde(with = "super::rule::written")]
    pub name: Name,
    /// Whose it is, for people.
    pub program: String,
    /// Share among instances, where an operator has set it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

/// Why a socket is not bound.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// There are no active sockets.
    #[error("names cannot be bound on this host: {0}")]
    Unavailable(String),
    /// At a bound.
    #[error("{0}")]
    Full(String),
    /// Another program has the name for itself.
    #[error("{0}")]
    Taken(String),
    /// The name cannot be served.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// It was refused when it was served at once.
    #[error("{0}")]
    Refused(String),
}

impl Bound {
    /// Which.
    pub const fn cookie(&self) -> Cookie {
        Cookie(self.cookie)
    }

    /// What follows from it.
    pub fn rule(&self) -> Rule {
        let offer = Offer {
            name: self.name.clone(),
            port: None,
            listen_port: None,
            protocol: Some(self.protocol),
            allow: Vec::new(),
            weight: self.weight.unwrap_or(WEIGHT),
            priority: PRIORITY,
            partition_bits: 0,
            exclusive: false,
            fenced: false,
            sticky: false,
            give_up_after_ms: None,
            quiet_ms: None,
            middlebox: None,
        };
        Rule { source: Source::Socket(self.cookie()), offer }
    }
}
