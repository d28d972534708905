//! An instance of a service, and how the two ends write it to each other.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use margay_core::fence::FENCE_NOTICE_LEN_MAX;
use margay_core::key::HostId;
use margay_core::name::{Prefix, ServiceId};

use super::{ZeroWeight, proto};

/// A host that serves a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The host.
    pub host: HostId,
    /// What it calls itself.
    pub host_name: String,
    /// Where it hears SAL.
    pub address: SocketAddr,
    /// The name as written.
    pub name: String,
    /// Its bits.
    pub prefix: Prefix,
    /// Share among instances of one priority.
    pub weight: u32,
    /// Higher first.
    pub priority: u32,
    /// Datagrams of one unconnected socket are for one instance.
    pub sticky: bool,
    /// Of a fenced name: the host's notice that it holds it, as bytes; of what is watched, once the router has it.
    pub fence: Option<Arc<[u8]>>,
    /// With the weight 0: why, where its host has said so.
    pub zero_weight: Option<Box<ZeroWeight>>,
}

impl From<Instance> for proto::Instance {
    fn from(known: Instance) -> Self {
        Self {
            host: known.host.0.to_vec(),
            host_name: known.host_name,
            address: known.address.to_string(),
            name: known.name,
            service_id: known.prefix.id.0.to_vec(),
            bits: known.prefix.bits.into(),
            weight: known.weight,
            priority: known.priority,
            sticky: known.sticky,
            fence: known.fence.map(|fence| fence.to_vec()).unwrap_or_default(),
            zero_weight: known.zero_weight.map(|known| (*known).into()),
        }
    }
}

/// In the place of the address of an agent's own host: who hears of it knows where that agent is. A word of the
/// protocol, whatever virtual addresses either host has.
const OF_TELLER: IpAddr = IpAddr::V4(Ipv4Addr::new(198, 18, 0, 1));

impl Instance {
    /// The address of what an agent serves itself, with the port where it hears SAL.
    pub const fn address_of_teller(port: u16) -> SocketAddr {
        SocketAddr::new(OF_TELLER, port)
    }

    /// Whether it is on the host of the agent that tells of it.
    pub fn is_of_teller(&self) -> bool {
        self.address.ip() == OF_TELLER
    }

    /// What the other end wrote; `None` when it makes no sense.
    pub(crate) fn read(found: proto::Instance) -> Option<Self> {
        Some(Self {
            host: HostId(found.host.try_into().ok()?),
            host_name: found.host_name,
            address: found.address.parse().ok()?,
            name: found.name,
            prefix: Prefix::new(ServiceId(found.service_id.try_into().ok()?), u16::try_from(found.bits).ok()?.min(256)),
            weight: found.weight,
            priority: found.priority,
            sticky: found.sticky,
            fence: Some(found.fence.into()).filter(|fence: &Arc<[u8]>| is_length_of_notice(fence.len())),
            zero_weight: ZeroWeight::read(found.zero_weight, found.weight),
        })
    }
}

fn is_length_of_notice(len: usize) -> bool {
    (1..=FENCE_NOTICE_LEN_MAX).contains(&len)
}
