//! How a key's owner lets others speak for a name without giving the key away (DESIGN §5, §8): a further router gets
//! a key of its own that signs for an authority, a host the word of a service's key.
//!
//! ```text
//! margay-request- and the digits (`armor.rs`) of
//!  0 version = 1 | 1..33 key | 33..97 its signature over `margay 2026 request`, then all but the signature
//! 97 length, authority's name
//! margay-warrant- and the digits of
//!  0 version = 1 | 1 kind: 1 authority, 2 service | 2..34 the key that all of it rests on | length, name
//!  then for an authority two chains of delegations, for members and for services; for a service one chain that ends
//!  at a host: each as length in two bytes, big-endian, and `certificate.rs` encodes it
//! ```
//! Neither holds a secret. A request shows that whoever made it has the key; a warrant is of no use without it.

use std::fmt;
use std::str::FromStr;

use margay_core::certificate::{
    Certificate, CertificateError, CertificateKind, TrustStore, decode_chain, encode_chain, verify_delegation,
};
use margay_core::key::{HostPublic, SigningKey, VerifyingKey};
use margay_core::name::{AUTHORITY_BITS, Prefix, ServiceId, authority_block};

use crate::armor::{Armor, ArmorError};
use crate::keyring::{Authority, ServiceKey, check_authority, service_of};

mod revocation;

pub use revocation::{REVOCATION_PREFIX, believed, lineages, read_revocation, revoke, revoker, write_revocation};

const REQUEST: Armor = Armor {
    prefix: "margay-request-",
    noun: "request",
    made_by: "`margay id authority request` on the router that is to sign",
    text_max: 1024,
};
const WARRANT: Armor = Armor {
    prefix: "margay-warrant-",
    noun: "warrant",
    made_by: "`margay id authority sign` or `margay id key sign`, where the key is,",
    text_max: 8192,
};
const VERSION: u8 = 1;
const SIGNED: &[u8] = b"margay 2026 request";
const AUTHORITY: u8 = 1;
const SERVICE: u8 = 2;
/// Clocks that differ by less do no harm.
const SKEW_S: u64 = 5 * 60;
/// A year: what is lost is believed no longer than that.
pub const LIFETIME_MAX_S: u64 = 366 * 24 * 60 * 60;

/// Why something is not signed, or not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WarrantError {
    /// No such text.
    #[error(transparent)]
    Text(#[from] ArmorError),
    /// Made by another program.
    #[error("the {what} has version {version}, this program reads version {VERSION}; update the older of both hosts")]
    Version {
        /// Of what.
        what: &'static str,
        /// Which one.
        version: u8,
    },
    /// It holds nonsense, which its checksum says was written that way.
    #[error("the {0} makes no sense, although it is complete; make a new one")]
    Malformed(&'static str),
    /// Whoever made it does not have the key.
    #[error("the {0} is not signed by the key that it names; make a new one where that key is")]
    Unsigned(&'static str),
    /// For another name.
    #[error(
        "the request is for `{0}`, whose key is not here; sign it on a host that has it (`margay id` lists what is \
         here)"
    )]
    NoKey(String),
    /// Only the authority's own key passes it on.
    #[error("this host signs for `{0}` by a warrant itself; have the request signed where the authority's own key is")]
    NotRoot(String),
    /// What is signed lives for some time.
    #[error("a warrant lives from a minute to a year")]
    Lifetime,
    /// It does not hold.
    #[error("the warrant does not hold: {0}")]
    Untrue(#[from] CertificateError),
    /// For another key.
    #[error(
        "the warrant is not for this host; it belongs to the host whose request it answers, or whose key it was given"
    )]
    NotHere,
    /// Of another authority with the same name.
    #[error(
        "the warrant comes from another key than `{0}` has here; find out which is right before you take it: `margay \
         id` shows the one here"
    )]
    OtherRoot(String),
    /// Of an authority that nobody here knows.
    #[error(
        "the revocation is of an authority that this host neither signs for nor has joined; take it to a router of \
         that authority"
    )]
    Stranger,
    /// The authority's own.
    #[error(
        "this is `{0}`'s own key, which everybody trusts who has joined; only keys that it lets sign can be taken back"
    )]
    OwnKey(String),
    /// Nobody can tell whose it is.
    #[error("the authorities that this host knows cannot be read: {0}")]
    Unreadable(String),
    /// A key that was taken back.
    #[error(
        "the request is for a key that `{0}` has taken back; ask for a new one: `margay id authority request {0} \
         --new-key`"
    )]
    RevokedKey(String),
}

/// A router asks to sign for an authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The authority.
    pub authority: String,
    /// By what it would sign.
    pub key: VerifyingKey,
    signature: [u8; 64],
}

impl Request {
    /// Asks for `key`.
    pub fn new(authority: &str, key: &SigningKey) -> Self {
        let signature = key.sign(&signed(authority, &key.public()));
        Self { authority: authority.to_owned(), key: key.public(), signature }
    }

    /// Lets it sign for `lifetime_s`, by the key that this host has of the authority.
    ///
    /// # Errors
    ///
    /// The key is another authority's, or not the authority's own: a chain with one more link would let the answer to a
    /// SYN grow larger than what passes every network.
    pub fn grant(&self, by: &Authority, unix_s: u64, lifetime_s: u64) -> Result<Warrant, WarrantError> {
        if by.name != self.authority {
            return Err(WarrantError::NoKey(self.authority.clone()));
        }
        if by.warrant.is_some() {
            return Err(WarrantError::NotRoot(self.authority.clone()));
        }
        if !(60..=LIFETIME_MAX_S).contains(&lifetime_s) {
            return Err(WarrantError::Lifetime);
        }
        let (block, end_s) = (block_of(&self.authority), unix_s.saturating_add(lifetime_s));
        let chain = |kind| {
            let link = Certificate { delegate: Some(self.key), ..blank(kind, block, unix_s, end_s) };
            vec![link.sign(&by.key)]
        };
        let (members, services) = (chain(CertificateKind::Member), chain(CertificateKind::Service));
        Ok(Warrant::Authority(Delegation { authority: self.authority.clone(), root: by.root(), members, services }))
    }
}

fn signed(authority: &str, key: &VerifyingKey) -> Vec<u8> {
    [SIGNED, &[VERSION], &key.0[..], authority.as_bytes()].concat()
}

fn block_of(authority: &str) -> Prefix {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&authority_block(authority));
    Prefix::new(ServiceId(id), AUTHORITY_BITS)
}

fn blank(kind: CertificateKind, prefix: Prefix, unix_s: u64, not_after_s: u64) -> Certificate {
    Certificate {
        kind,
        prefix,
        host_key: [0; 32],
        not_before_s: unix_s.saturating_sub(SKEW_S),
        not_after_s,
        groups: Vec::new(),
        // Both are filled in by the signature.
        issuer: VerifyingKey([0; 32]),
        delegate: None,
        signature: [0; 64],
    }
}

/// A router may sign for an authority, by a key of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delegation {
    /// The authority.
    pub authority: String,
    /// The authority's own key, which hosts trust.
    pub root: VerifyingKey,
    /// From the root to the router's key: what it signs about members goes below it.
    pub members: Vec<Certificate>,
    /// The same about services.
    pub services: Vec<Certificate>,
}

impl Delegation {
    /// Checks that it lets `key` sign.
    ///
    /// # Errors
    ///
    /// Why it does not.
    pub fn verify(&self, key: &VerifyingKey, unix_s: u64) -> Result<(), WarrantError> {
        let block = block_of(&self.authority);
        let both = [(CertificateKind::Member, &self.members), (CertificateKind::Service, &self.services)];
        for (kind, chain) in both {
            if chain.last().is_some_and(|last| last.delegate != Some(*key)) {
                return Err(WarrantError::NotHere);
            }
            verify_delegation(chain, (kind, &block), &self.root, key, unix_s)?;
        }
        Ok(())
    }

    /// When it ends, in seconds since 1970.
    pub fn not_after_s(&self) -> u64 {
        self.members.iter().chain(&self.services).map(|link| link.not_after_s).min().unwrap_or(0)
    }
}

/// A service's key says that a host may answer for its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit {
    /// As written: `web.shop`.
    pub name: String,
    /// The key.
    pub key: VerifyingKey,
    /// What the host shows: a chain as the CERTIFICATE extension has it.
    pub chain: Vec<u8>,
}

impl Permit {
    /// Lets `host` answer for the name of a key for `lifetime_s`.
    ///
    /// # Errors
    ///
    /// The time is none, or the host's key.
    pub fn new(by: &ServiceKey, host: &HostPublic, unix_s: u64, lifetime_s: u64) -> Result<Self, WarrantError> {
        if !(60..=LIFETIME_MAX_S).contains(&lifetime_s) {
            return Err(WarrantError::Lifetime);
        }
        if host.is_of_low_order() {
            return Err(CertificateError::LowOrder.into());
        }
        let whole = Prefix::new(by.service, 256);
        let made = blank(CertificateKind::Service, whole, unix_s, unix_s.saturating_add(lifetime_s));
        let chain = encode_chain(&[Certificate { host_key: host.0, ..made }.sign(&by.key)]);
        Ok(Self { name: by.name.clone(), key: by.key.public(), chain })
    }

    /// The name that the key certifies.
    ///
    /// # Errors
    ///
    /// The written name is none.
    pub fn service(&self) -> Result<ServiceId, WarrantError> {
        service_of(&self.name, &self.key).map_err(|_| WarrantError::Malformed(WARRANT.noun))
    }

    /// Checks that it lets `host` answer.
    ///
    /// # Errors
    ///
    /// Why it does not.
    pub fn verify(&self, host: &HostPublic, unix_s: u64) -> Result<(), WarrantError> {
        let proved = TrustStore::default().verify_service(&self.chain, &self.service()?, &host.0, unix_s);
        match proved {
            Ok(proved) if proved.is_proved() => Ok(()),
            Ok(_) => Err(CertificateError::NotTrusted.into()),
            Err(CertificateError::WrongHost) => Err(WarrantError::NotHere),
            Err(error) => Err(error.into()),
        }
    }

    /// When it ends, in seconds since 1970.
    pub fn not_after_s(&self) -> u64 {
        let chain = decode_chain(&self.chain).unwrap_or_default();
        chain.iter().map(|certificate| certificate.not_after_s).min().unwrap_or(0)
    }
}

/// Either of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Warrant {
    /// To sign for an authority.
    Authority(Delegation),
    /// To answer for a service.
    Service(Permit),
}

fn put_name(bytes: &mut Vec<u8>, name: &str) {
    let name = &name.as_bytes()[..name.len().min(255)];
    bytes.push(name.len() as u8);
    bytes.extend_from_slice(name);
}

/// What is left to be read of a body.
struct Body<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Body<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], WarrantError> {
        let (taken, rest) = self.rest.split_at_checked(len).ok_or(WarrantError::Malformed(self.what))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WarrantError> {
        let taken = self.take(N)?;
        Ok(std::array::from_fn(|at| taken[at]))
    }

    fn version(&mut self) -> Result<(), WarrantError> {
        let [version] = self.array()?;
        if version == VERSION { Ok(()) } else { Err(WarrantError::Version { what: self.what, version }) }
    }

    fn name(&mut self) -> Result<String, WarrantError> {
        let [len] = self.array()?;
        let text = std::str::from_utf8(self.take(usize::from(len))?);
        text.map(str::to_owned).map_err(|_| WarrantError::Malformed(self.what))
    }

    fn chain(&mut self) -> Result<&'a [u8], WarrantError> {
        let len = u16::from_be_bytes(self.array()?);
        self.take(usize::from(len))
    }

    fn end(self) -> Result<(), WarrantError> {
        if self.rest.is_empty() { Ok(()) } else { Err(WarrantError::Malformed(self.what)) }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = [&[VERSION], &self.key.0[..], &self.signature].concat();
        put_name(&mut bytes, &self.authority);
        f.write_str(&REQUEST.write(&bytes))
    }
}

impl FromStr for Request {
    type Err = WarrantError;

    fn from_str(text: &str) -> Result<Self, WarrantError> {
        let bytes = REQUEST.read(text)?;
        let mut body = Body { what: REQUEST.noun, rest: &bytes };
        body.version()?;
        let (key, signature, authority) = (VerifyingKey(body.array()?), body.array()?, body.name()?);
        body.end()?;
        check_authority(&authority).map_err(|_| WarrantError::Malformed(REQUEST.noun))?;
        if !key.verify(&signed(&authority, &key), &signature) {
            return Err(WarrantError::Unsigned(REQUEST.noun));
        }
        Ok(Self { authority, key, signature })
    }
}

impl fmt::Display for Warrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, root, name, chains) = match self {
            Self::Authority(to) => {
                let chains = vec![encode_chain(&to.members), encode_chain(&to.services)];
                (AUTHORITY, &to.root, &to.authority, chains)
            }
            Self::Service(to) => (SERVICE, &to.key, &to.name, vec![to.chain.clone()]),
        };
        let mut bytes = [&[VERSION, kind], &root.0[..]].concat();
        put_name(&mut bytes, name);
        for chain in chains {
            // Three certificates of 280 bytes at most.
            bytes.extend_from_slice(&(chain.len() as u16).to_be_bytes());
            bytes.extend_from_slice(&chain);
        }
        f.write_str(&WARRANT.write(&bytes))
    }
}

impl FromStr for Warrant {
    type Err = WarrantError;

    /// Reads it; says nothing of its truth.
    fn from_str(text: &str) -> Result<Self, WarrantError> {
        let bytes = WARRANT.read(text)?;
        let mut body = Body { what: WARRANT.noun, rest: &bytes };
        body.version()?;
        let ([kind], root, name) = (body.array()?, VerifyingKey(body.array()?), body.name()?);
        let bad = WarrantError::Malformed(WARRANT.noun);
        let warrant = match kind {
            AUTHORITY => {
                check_authority(&name).map_err(|_| bad)?;
                let (members, services) = (decode_chain(body.chain()?)?, decode_chain(body.chain()?)?);
                Self::Authority(Delegation { authority: name, root, members, services })
            }
            SERVICE => {
                let permit = Permit { name, key: root, chain: body.chain()?.to_vec() };
                permit.service()?;
                Self::Service(permit)
            }
            _ => return Err(bad),
        };
        body.end()?;
        Ok(warrant)
    }
}

#[cfg(test)]
mod test;
