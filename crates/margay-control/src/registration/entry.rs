//! What a host has registered, as a router keeps it: there may be a million of these, so that nothing is in it that is
//! known beside it.

use std::net::SocketAddr;

use margay_core::key::HostId;
use margay_core::name::Prefix;
use margay_core::table::RuleId;

use super::roll::Terms;
use super::{Instance, ZeroWeight};
use crate::cluster::Served;

/// A prefix of a host.
pub struct Entry {
    /// What leads there.
    pub rule: RuleId,
    /// The number of the stream that registered it last.
    pub stream: u64,
    /// The name as written.
    pub name: Box<str>,
    /// Where the host hears SAL.
    pub address: SocketAddr,
    /// How it serves it.
    pub terms: Terms,
    /// With the weight 0: why, where the host has said so.
    pub zero_weight: Option<Box<ZeroWeight>>,
}

/// An entry, and what is known beside it.
#[derive(Clone, Copy)]
pub struct Listed<'a> {
    /// The host.
    pub host: HostId,
    /// What it calls itself.
    pub host_name: &'a str,
    /// What it serves.
    pub prefix: Prefix,
    /// On which terms.
    pub entry: &'a Entry,
}

impl Listed<'_> {
    /// As others hear of it.
    pub fn instance(&self) -> Instance {
        let Entry { name, address, terms, zero_weight, .. } = self.entry;
        Instance {
            host: self.host,
            host_name: self.host_name.to_owned(),
            address: *address,
            name: name.to_string(),
            prefix: self.prefix,
            weight: terms.weight,
            priority: terms.priority,
            sticky: terms.sticky,
            fence: None,
            zero_weight: zero_weight.clone(),
        }
    }

    /// As routers of a cluster tell each other.
    pub fn served(&self) -> Served {
        let Terms { partition_bits, exclusive, .. } = self.entry.terms;
        Served { instance: self.instance(), partition_bits, exclusive }
    }
}
