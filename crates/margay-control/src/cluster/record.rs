//! What lies under the keys: protobuf, so that a field can be added and an older router skips it.

use margay_core::key::{HostId, HostPublic};
use prost::Message;

use crate::registration::{Instance, proto};

/// A router of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouterEntry {
    /// Its host key.
    pub key: HostPublic,
    /// Where hosts register: `host:port`.
    pub address: String,
    /// What it calls itself.
    pub name: String,
    /// It is drained, and wants to be asked no more.
    pub is_leaving: bool,
}

impl RouterEntry {
    /// Its host-ID.
    pub fn id(&self) -> HostId {
        self.key.id()
    }
}

/// What a host serves, as the router with which it is registered says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// The host as an instance.
    pub instance: Instance,
    /// The service has 2^bits partitions; zero: none.
    pub partition_bits: u8,
    /// No other host may serve it.
    pub exclusive: bool,
}

#[derive(Clone, PartialEq, Message)]
struct RouterRecord {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(string, tag = "2")]
    address: String,
    #[prost(string, tag = "3")]
    name: String,
    #[prost(bool, tag = "4")]
    leaving: bool,
}

#[derive(Clone, PartialEq, Message)]
struct HostRecord {
    #[prost(message, repeated, tag = "1")]
    served: Vec<ServedRecord>,
}

#[derive(Clone, PartialEq, Message)]
struct ServedRecord {
    #[prost(message, optional, tag = "1")]
    instance: Option<proto::Instance>,
    #[prost(uint32, tag = "2")]
    partition_bits: u32,
    #[prost(bool, tag = "3")]
    exclusive: bool,
}

/// A router, as etcd keeps it.
pub fn write_router(router: &RouterEntry) -> Vec<u8> {
    let RouterEntry { key, address, name, is_leaving: leaving } = router.clone();
    RouterRecord { key: key.0.to_vec(), address, name, leaving }.encode_to_vec()
}

/// `None`: it makes no sense.
pub fn read_router(encoded: &[u8]) -> Option<RouterEntry> {
    let RouterRecord { key, address, name, leaving } = RouterRecord::decode(encoded).ok()?;
    let key = HostPublic(key.try_into().ok()?);
    (!key.is_of_low_order()).then_some(RouterEntry { key, address, name, is_leaving: leaving })
}

/// What a host serves, as etcd keeps it.
pub fn write_served(served: &[Served]) -> Vec<u8> {
    let record = |served: &Served| ServedRecord {
        instance: Some(served.instance.clone().into()),
        partition_bits: served.partition_bits.into(),
        exclusive: served.exclusive,
    };
    HostRecord { served: served.iter().map(record).collect() }.encode_to_vec()
}

/// `None`: it makes no sense.
pub fn read_served(encoded: &[u8]) -> Option<Vec<Served>> {
    let of = |record: ServedRecord| {
        Some(Served {
            instance: Instance::read(record.instance?)?,
            partition_bits: u8::try_from(record.partition_bits).ok()?,
            exclusive: record.exclusive,
        })
    };
    HostRecord::decode(encoded).ok()?.served.into_iter().map(of).collect()
}
