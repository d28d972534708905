//! How the tables' values look on disk: protobuf, so that a field can be added and an older program skips it.

use margay_core::name::{Prefix, ServiceId};

use super::Failure;

/// A prefix: 32 bytes, then the length.
pub(super) type PrefixKey = [u8; 34];

pub(super) fn prefix_key(prefix: &Prefix) -> PrefixKey {
    let mut key = [0; 34];
    key[..32].copy_from_slice(&prefix.id.0);
    key[32..].copy_from_slice(&prefix.bits.to_be_bytes());
    key
}

pub(super) fn prefix_of(key: &[u8]) -> Result<Prefix, Failure> {
    let key: &PrefixKey = key.try_into().map_err(|_| wrong_length("a prefix"))?;
    let mut id = [0; 32];
    id.copy_from_slice(&key[..32]);
    Ok(Prefix::new(ServiceId(id), u16::from_be_bytes([key[32], key[33]])))
}

pub(super) fn bytes<const N: usize>(what: &'static str, bytes: &[u8]) -> Result<[u8; N], Failure> {
    bytes.try_into().map_err(|_| wrong_length(what))
}

fn wrong_length(what: &'static str) -> Failure {
    let error = redb::Error::Corrupted(format!("{what} has the wrong length"));
    Failure::Redb(Box::new(error))
}

/// A join token, as far as the router knows it.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TokenRecord {
    #[prost(string, tag = "1")]
    pub authority: String,
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub grants: Vec<Vec<u8>>,
    #[prost(string, repeated, tag = "3")]
    pub groups: Vec<String>,
    #[prost(uint32, tag = "4")]
    pub uses_left: u32,
    #[prost(uint64, tag = "5")]
    pub created_s: u64,
    #[prost(uint64, tag = "6")]
    pub expires_s: u64,
}

/// A host that joined.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct MemberRecord {
    #[prost(string, tag = "1")]
    pub authority: String,
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub grants: Vec<Vec<u8>>,
    #[prost(string, repeated, tag = "3")]
    pub groups: Vec<String>,
    #[prost(uint64, tag = "4")]
    pub joined_s: u64,
    #[prost(string, tag = "5")]
    pub host_name: String,
    /// Hashes of the tokens that it used, so that a repeated join takes no second use.
    #[prost(bytes = "vec", repeated, tag = "6")]
    pub tokens: Vec<Vec<u8>>,
}

/// A virtual address that stands for a name.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct LeaseRecord {
    #[prost(bytes = "vec", tag = "1")]
    pub service: Vec<u8>,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(uint64, tag = "3")]
    pub used_s: u64,
}

/// A router that welcomed this host.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct JoinedRecord {
    #[prost(string, tag = "1")]
    pub router_address: String,
    #[prost(string, tag = "2")]
    pub authority: String,
    #[prost(bytes = "vec", tag = "3")]
    pub authority_key: Vec<u8>,
    #[prost(uint64, tag = "4")]
    pub joined_s: u64,
    /// Hash of the token that was used.
    #[prost(bytes = "vec", tag = "5")]
    pub token: Vec<u8>,
}

/// A rule that the operator gave.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct RuleRecord {
    #[prost(bytes = "vec", tag = "1")]
    pub service: Vec<u8>,
    #[prost(uint32, tag = "2")]
    pub bits: u32,
    #[prost(string, tag = "3")]
    pub name: String,
    /// Where it leads; empty: nowhere, it discards.
    #[prost(string, tag = "4")]
    pub forward: String,
    #[prost(uint32, tag = "5")]
    pub priority: u32,
    #[prost(uint32, tag = "6")]
    pub weight: u32,
    #[prost(uint64, tag = "7")]
    pub created_s: u64,
    #[prost(uint64, optional, tag = "8")]
    pub idle_ms: Option<u64>,
    #[prost(uint64, optional, tag = "9")]
    pub hard_ms: Option<u64>,
    /// When its hard time began.
    #[prost(uint64, tag = "10")]
    pub hard_since_s: u64,
    /// The resolver that packets wait for; empty: none.
    #[prost(string, tag = "11")]
    pub resolver: String,
    /// It forwards, and to the others of its priority that say so, too.
    #[prost(bool, tag = "12")]
    pub all: bool,
}

/// Who was given what, and when.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct AuditRecord {
    #[prost(uint64, tag = "1")]
    pub unix_s: u64,
    #[prost(string, tag = "2")]
    pub act: String,
    #[prost(string, tag = "3")]
    pub subject: String,
    #[prost(string, tag = "4")]
    pub detail: String,
    #[prost(uint64, tag = "5")]
    pub count: u64,
}
