//! What an authority says to its hosts, signed by its key or by a router's that it lets sign (`Statement` in
//! `proto/registration.proto`). What is said, and what it is good for, is its reader's affair.

use margay_core::certificate::{CertificateKind, decode_chain, encode_chain, verify_delegation};
use margay_core::key::VerifyingKey;
use margay_core::key_revocation::KeyRevocation;
use margay_core::name::{AUTHORITY_BITS, Prefix, ServiceId};
use prost::Message;

use crate::keyring::Authority;
use crate::lineage::Lineage;
use crate::registration::proto;

const MS_PER_S: u64 = 1000;

/// Why a statement does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatementDoubt {
    /// The authority has not signed it, nor a key that might sign then.
    Unsigned,
    /// The key was taken back since.
    Revoked,
    /// The key's right to sign has ended since.
    Ended,
}

/// Signed bytes of an authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// The authority's block.
    pub authority: [u8; 8],
    /// When it was signed, in milliseconds since 1970.
    pub signed_ms: u64,
    /// The key that has signed.
    pub signer: VerifyingKey,
    /// As it was signed, by whatever version: it is passed on so.
    pub(crate) body: Vec<u8>,
    delegations: Vec<u8>,
    signature: [u8; 64],
}

impl Statement {
    /// Signs `body`. Statements of different contexts are of different kinds: none can be taken for another one.
    pub(crate) fn sign(context: &[u8], by: &Authority, body: Vec<u8>, signed_ms: u64) -> Self {
        let signature = by.key.sign(&signed_bytes(context, by.block(), signed_ms, &body));
        let delegations = by.delegations(CertificateKind::Service);
        let delegations = if delegations.is_empty() { Vec::new() } else { encode_chain(delegations) };
        Self { authority: by.block(), signed_ms, signer: by.key.public(), body, delegations, signature }
    }

    /// As it is kept, and told to hosts.
    pub fn encode(&self) -> Vec<u8> {
        let encoded = proto::Statement {
            authority: self.authority.to_vec(),
            signed_unix_ms: self.signed_ms,
            body: self.body.clone(),
            signer: self.signer.0.to_vec(),
            delegations: self.delegations.clone(),
            signature: self.signature.to_vec(),
        };
        encoded.encode_to_vec()
    }

    /// From [`encode`](Self::encode); `None`: it is nothing of that kind.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let read = proto::Statement::decode(bytes).ok()?;
        Some(Self {
            authority: read.authority.try_into().ok()?,
            signed_ms: read.signed_unix_ms,
            body: read.body,
            signer: VerifyingKey(read.signer.try_into().ok()?),
            delegations: read.delegations,
            signature: read.signature.try_into().ok()?,
        })
    }

    /// When it was signed, in seconds since 1970.
    pub const fn signed_s(&self) -> u64 {
        self.signed_ms / MS_PER_S
    }

    /// Whether a router's key has signed it, which the authority lets sign; else one of the authority's own.
    pub const fn is_by_warrant(&self) -> bool {
        !self.delegations.is_empty()
    }

    /// Whether the authority whose keys are `line` has signed it: by a key that might when it was signed, and that may
    /// now. Whoever signs chooses the first of these times; a right that has ended could sign for ever by dating back.
    /// Gives until when the key may sign.
    ///
    /// # Errors
    ///
    /// Why not.
    pub(crate) fn check(
        &self,
        context: &[u8],
        line: &Lineage,
        revoked: &[KeyRevocation],
        unix_s: u64,
    ) -> Result<u64, StatementDoubt> {
        let signed = signed_bytes(context, self.authority, self.signed_ms, &self.body);
        if line.authority != self.authority || !self.signer.verify(&signed, &self.signature) {
            return Err(StatementDoubt::Unsigned);
        }
        let (root, until_s) = self.root(self.signed_s()).ok_or(StatementDoubt::Unsigned)?;
        let until_s = until_s.min(line.until_s(&root).ok_or(StatementDoubt::Unsigned)?);
        if until_s < self.signed_s() {
            return Err(StatementDoubt::Unsigned);
        }
        if self.is_by_any_of(revoked) {
            return Err(StatementDoubt::Revoked);
        }
        if until_s < unix_s { Err(StatementDoubt::Ended) } else { Ok(until_s) }
    }

    /// The authority's key that the signature rests on, and until when it lets the signer sign.
    fn root(&self, unix_s: u64) -> Option<(VerifyingKey, u64)> {
        if self.delegations.is_empty() {
            return Some((self.signer, u64::MAX));
        }
        let chain = decode_chain(&self.delegations).ok()?;
        let root = chain.first()?.issuer;
        let whole = Prefix::new(id_of(self.authority), AUTHORITY_BITS);
        verify_delegation(&chain, (CertificateKind::Service, &whole), &root, &self.signer, unix_s).ok()?;
        Some((root, chain.iter().map(|link| link.not_after_s).min().unwrap_or(0)))
    }

    /// Whether a key that it rests on was taken back: what such a key has signed counts no longer, whenever it was
    /// signed.
    fn is_by_any_of(&self, revoked: &[KeyRevocation]) -> bool {
        let links = decode_chain(&self.delegations).unwrap_or_default();
        let keys = links.iter().filter_map(|link| link.delegate).chain([self.signer]);
        let is_revoked =
            |key: VerifyingKey| revoked.iter().any(|known| known.authority == self.authority && known.key == key);
        keys.into_iter().any(is_revoked)
    }
}

fn id_of(authority: [u8; 8]) -> ServiceId {
    let mut id = ServiceId::default();
    id.0[..8].copy_from_slice(&authority);
    id
}

fn signed_bytes(context: &[u8], authority: [u8; 8], signed_ms: u64, body: &[u8]) -> Vec<u8> {
    [context, &authority, &signed_ms.to_be_bytes(), body].concat()
}
