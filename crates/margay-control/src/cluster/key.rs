//! Where what routers share lies in etcd: the names of the keys.
//!
//! ```text
//! PREFIX/cluster                          the cluster's number
//! PREFIX/tokens|members|revoked|names/KEY rows of shared tables
//! PREFIX/routers/ROUTER                   routers, and where hosts find them
//! PREFIX/hosts/ROUTER/AUTHORITY-HOST      who is registered with a router now, under its lease
//! PREFIX/exclusive/NAME-BITS/ROUTER       to which host a router has given a name for itself, under its lease
//! ```

use margay_core::key::{HostId, from_hex, to_hex};
use margay_core::name::{Prefix, ServiceId};

use crate::registration::Place;
use crate::store::SharedTable;

/// A key, as far as it means something.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// The cluster's number.
    Cluster,
    /// A row of a shared table.
    Row(SharedTable, Vec<u8>),
    /// A router.
    Router(HostId),
    /// What a host has registered with a router.
    Host(HostId, Place),
    /// To whom a router has given a name that one host alone serves.
    Claim(Prefix, HostId),
}

/// The keys of one cluster.
#[derive(Clone, Debug)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    /// Those below a prefix.
    pub fn new(prefix: &str) -> Self {
        Self { prefix: prefix.trim_end_matches('/').to_owned() }
    }

    /// What all keys of the cluster begin with.
    pub fn all(&self) -> String {
        format!("{}/", self.prefix)
    }

    /// What all rows of a table begin with.
    pub fn table(&self, table: SharedTable) -> String {
        format!("{}/{}/", self.prefix, table.label())
    }

    /// What all routers begin with.
    pub fn routers(&self) -> String {
        format!("{}/routers/", self.prefix)
    }

    /// What all registrations begin with.
    pub fn hosts(&self) -> String {
        format!("{}/hosts/", self.prefix)
    }

    /// What all names that one host alone serves begin with.
    pub fn claims(&self) -> String {
        format!("{}/exclusive/", self.prefix)
    }

    /// What all routers' words about one of them begin with.
    pub fn claims_of(&self, prefix: &Prefix) -> String {
        format!("{}{}-{}/", self.claims(), to_hex(&prefix.id.0), prefix.bits)
    }

    /// As etcd has it.
    pub fn written(&self, key: &Key) -> String {
        match key {
            Key::Cluster => format!("{}/cluster", self.prefix),
            Key::Row(table, row) => format!("{}{}", self.table(*table), to_hex(row)),
            Key::Router(router) => format!("{}{router}", self.routers()),
            Key::Host(router, place) => {
                format!("{}{router}/{}-{}", self.hosts(), to_hex(&place.authority), place.host)
            }
            Key::Claim(prefix, router) => format!("{}{router}", self.claims_of(prefix)),
        }
    }

    /// What a key of etcd means; `None`: nothing that this program knows.
    pub fn read(&self, key: &[u8]) -> Option<Key> {
        let rest = std::str::from_utf8(key).ok()?.strip_prefix(&self.all())?;
        let (kind, rest) = rest.split_once('/').unwrap_or((rest, ""));
        if let Some(table) = SharedTable::ALL.into_iter().find(|table| table.label() == kind) {
            return Some(Key::Row(table, bytes_of(rest)?));
        }
        match kind {
            "cluster" if rest.is_empty() => Some(Key::Cluster),
            "routers" => Some(Key::Router(rest.parse().ok()?)),
            "hosts" => {
                let (router, place) = rest.split_once('/')?;
                let (authority, host) = place.split_once('-')?;
                let place = Place { host: host.parse().ok()?, authority: from_hex(authority).ok()? };
                Some(Key::Host(router.parse().ok()?, place))
            }
            "exclusive" => {
                let (prefix, router) = rest.split_once('/')?;
                let (id, bits) = prefix.split_once('-')?;
                let prefix = Prefix::new(ServiceId(from_hex(id).ok()?), bits.parse().ok().filter(|bits| *bits <= 256)?);
                Some(Key::Claim(prefix, router.parse().ok()?))
            }
            _ => None,
        }
    }
}

fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    data_encoding::HEXLOWER.decode(hex.as_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_as_they_were_written_and_others_mean_nothing() {
        let keys = Keys::new("/margay/shop/");
        let place = Place { host: HostId([2; 16]), authority: [3; 8] };
        let row = Key::Row(SharedTable::Members, vec![7; 40]);
        let claim = Key::Claim("web.shop".parse().expect("literal"), HostId([1; 16]));
        let all = [Key::Cluster, row, Key::Router(HostId([1; 16])), Key::Host(HostId([1; 16]), place), claim];
        for key in all {
            let written = keys.written(&key);
            assert!(written.starts_with("/margay/shop/"), "{written}");
            assert_eq!(keys.read(written.as_bytes()), Some(key));
        }
        for other in [
            "/margay/shop2/cluster",
            "/margay/shop/other/x",
            "/margay/shop/routers/x",
            "/margay/shop/cluster/x",
            "/margay/shop/exclusive/00-1/x",
        ] {
            assert_eq!(keys.read(other.as_bytes()), None, "{other}");
        }
    }
}
