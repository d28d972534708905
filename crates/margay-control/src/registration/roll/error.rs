//! Why a router does not take something down.

use margay_core::table::TableError;

use super::{HOSTS_MAX, PREFIXES_MAX};

/// Why something is not taken down.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RollError {
    /// Too many hosts.
    #[error("this router has {HOSTS_MAX} hosts already")]
    Hosts,
    /// Too many prefixes.
    #[error("this host serves {PREFIXES_MAX} names here already; withdraw some")]
    Prefixes,
    /// The table of the core.
    #[error(transparent)]
    Table(#[from] TableError),
    /// Another host has the same key.
    #[error(
        "another host with this host's key is registered, was there before and is alive, so this one is kept out: \
         stop the agent on the copy, \
         remove /var/lib/margay/host.key there, and start it again: it is a host of its own then"
    )]
    Clone,
    /// The stream was replaced meanwhile.
    #[error("a newer stream of this host took over")]
    Superseded,
    /// One host alone may serve the name, and it is another one.
    #[error("{holder} serves {name}, which one host alone may serve; this host does as soon as that one leaves")]
    Held {
        /// The name.
        name: String,
        /// What the other host calls itself.
        holder: String,
    },
    /// One host alone may serve the name, and it cannot be agreed about who.
    #[error("one host alone may serve {name}: {why}")]
    Away {
        /// The name.
        name: String,
        /// Why not.
        why: String,
    },
    /// A fenced name is kept for a while for a host that cannot be heard.
    #[error(
        "{holder} holds {name}, which one host alone may serve, and has not been heard for a moment; this host gets \
         it as soon as that one cannot hold it any more"
    )]
    Kept {
        /// The name.
        name: String,
        /// What the other host calls itself.
        holder: String,
    },
    /// The hosts of a name do not agree about how it is divided.
    #[error(
        "{holder} serves {name} with --partitions {}, this host says {}: say the same here, or stop it there first",
        divided(*.theirs),
        divided(*.ours)
    )]
    Partitions {
        /// The name.
        name: String,
        /// What the other host calls itself.
        holder: String,
        /// Bits that number its partitions.
        theirs: u8,
        /// Those that this host wants.
        ours: u8,
    },
}

fn divided(bits: u8) -> String {
    if bits == 0 { "none".to_owned() } else { (1_u32 << bits).to_string() }
}
