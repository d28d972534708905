//! Certificates: who may answer for a name, and who belongs to an authority (DESIGN §7).
//!
//! ```text
//!  0 version = 1 | 1 kind | 2..4 prefix bits | 4..36 prefix | 36..68 host key
//!  68..76 not before | 76..84 not after (seconds since 1970)
//!  84 delegated key present | 85 groups (count) | 86..88 zero | 88..120 issuer | 120..152 delegated key
//!  152.. groups, four bytes each | signature, 64 bytes, over all before it
//! ```
//! Numbers are big-endian. A chain goes from the trusted key down: each certificate but the last delegates signing to
//! the issuer of the next, within its own prefix and time.

use alloc::vec::Vec;

use crate::trust::key_revocation::{KEY_REVOCATIONS_MAX, KeyRevocation};
use crate::trust::succession::Succession;
use crate::types::key::{HostPublic, SigningKey, VerifyingKey};
use crate::types::name::{Prefix, SERVICE_BITS, ServiceId};

const VERSION: u8 = 1;
const FIXED_LEN: usize = 152;
const SIGNATURE_LEN: usize = 64;
const GROUPS_MAX: usize = 16;
/// Certificates in a chain.
pub const CHAIN_MAX: usize = 3;

/// What a certificate lets its host do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificateKind {
    /// It belongs to the authority, and may connect as such.
    Member,
    /// It may answer for the prefix.
    Service,
}

/// One signed statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// What for.
    pub kind: CertificateKind,
    /// Of which names.
    pub prefix: Prefix,
    /// The host's X25519 key; zero in a certificate that only delegates.
    pub host_key: [u8; 32],
    /// From when, in seconds since 1970.
    pub not_before_s: u64,
    /// Until when.
    pub not_after_s: u64,
    /// Groups of the host, as [`crate::types::name::group_number`] counts them.
    pub groups: Vec<u32>,
    /// The key that signed.
    pub issuer: VerifyingKey,
    /// A key that may sign within this prefix and time.
    pub delegate: Option<VerifyingKey>,
    /// Over all of it.
    pub signature: [u8; 64],
}

/// Why a certificate does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// Not of this format.
    #[error("the certificate is malformed")]
    Malformed,
    /// None was shown.
    #[error("it showed no certificate; register the service with a router that holds a grant for it")]
    Missing,
    /// Too late.
    #[error("its certificate has expired; check both clocks, and that the host still reaches its router")]
    Expired,
    /// Too early.
    #[error("its certificate is not valid yet; check both clocks")]
    NotYet,
    /// Of another host.
    #[error("its certificate is for another host")]
    WrongHost,
    /// It lets a key sign, and no host answer: everybody has seen it who has seen a chain that it is in.
    #[error(
        "it showed a delegation, which names a key that may sign and no host; only a certificate for the host itself \
         counts"
    )]
    Delegation,
    /// A key of low order, which everybody can show.
    #[error("its host key is no key: everybody can prove it (RFC 7748, section 6.1); the host needs one of its own")]
    LowOrder,
    /// A name with a tail, of an authority that nobody here trusts, and not certified by the key that the tail names.
    #[error(
        "the name has the hash of a key in it, and the host shows no certificate by that key; where the hash is of \
         another kind, this host \
         must join the authority of the name"
    )]
    NotByItsKey,
    /// Of other names, or for another purpose.
    #[error("its certificate is not for this name")]
    WrongPrefix,
    /// Not signed by who is named.
    #[error("the signature on its certificate is wrong")]
    BadSignature,
    /// Its host was put out of the authority after it was made.
    #[error("its host was put out of the authority; it needs a new join token from a router of it")]
    Revoked,
    /// The key that signed it was let sign, and is no longer.
    #[error(
        "it was signed by a router that may sign for the authority no longer; its host needs a certificate from another router"
    )]
    KeyRevoked,
    /// Signed by someone who may not.
    #[error("its certificate was not signed by the authority of the name, nor by the key that the name certifies")]
    NotTrusted,
}

impl Certificate {
    /// Fills in issuer and signature.
    pub fn sign(mut self, key: &SigningKey) -> Self {
        self.issuer = key.public();
        self.signature = key.sign(&self.signed_bytes());
        self
    }

    fn signed_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FIXED_LEN + 4 * self.groups.len() + SIGNATURE_LEN);
        let kind = match self.kind {
            CertificateKind::Member => 1,
            CertificateKind::Service => 2,
        };
        bytes.extend_from_slice(&[VERSION, kind]);
        bytes.extend_from_slice(&self.prefix.bits.to_be_bytes());
        bytes.extend_from_slice(&self.prefix.id.0);
        bytes.extend_from_slice(&self.host_key);
        bytes.extend_from_slice(&self.not_before_s.to_be_bytes());
        bytes.extend_from_slice(&self.not_after_s.to_be_bytes());
        let groups = &self.groups[..self.groups.len().min(GROUPS_MAX)];
        bytes.extend_from_slice(&[u8::from(self.delegate.is_some()), groups.len() as u8, 0, 0]);
        bytes.extend_from_slice(&self.issuer.0);
        bytes.extend_from_slice(&self.delegate.map_or([0; 32], |key| key.0));
        for group in groups {
            bytes.extend_from_slice(&group.to_be_bytes());
        }
        bytes
    }

    /// The bytes of the certificate.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.signed_bytes();
        bytes.extend_from_slice(&self.signature);
        bytes
    }

    /// Reads a certificate; says nothing of its truth.
    ///
    /// # Errors
    ///
    /// Not of this format.
    pub fn decode(bytes: &[u8]) -> Result<Self, CertificateError> {
        let bad = CertificateError::Malformed;
        let fixed: &[u8; FIXED_LEN] = bytes.get(..FIXED_LEN).and_then(|fixed| fixed.try_into().ok()).ok_or(bad)?;
        let groups_len = usize::from(fixed[85]);
        let whole = FIXED_LEN + 4 * groups_len + SIGNATURE_LEN;
        let reserved = fixed[86] == 0 && fixed[87] == 0 && fixed[84] < 2;
        if fixed[0] != VERSION || groups_len > GROUPS_MAX || bytes.len() != whole || !reserved {
            return Err(bad);
        }
        let kind = match fixed[1] {
            1 => CertificateKind::Member,
            2 => CertificateKind::Service,
            _ => return Err(bad),
        };
        let key = |at: usize| -> [u8; 32] { core::array::from_fn(|byte| fixed[at + byte]) };
        let number = |at: usize| u64::from_be_bytes(core::array::from_fn(|byte| fixed[at + byte]));
        let bits = u16::from_be_bytes([fixed[2], fixed[3]]);
        let id = ServiceId(key(4));
        let prefix = Prefix::new(id, bits);
        // A prefix has one form: stray bits would be signed but mean nothing.
        if bits > 256 || prefix.id != id || (fixed[84] == 0 && key(120) != [0; 32]) {
            return Err(bad);
        }
        let group = |at: &[u8]| at.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let groups = bytes[FIXED_LEN..whole - SIGNATURE_LEN].chunks_exact(4).map(group).collect();
        let mut signature = [0; 64];
        signature.copy_from_slice(&bytes[whole - SIGNATURE_LEN..]);
        Ok(Self {
            kind,
            prefix,
            host_key: key(36),
            not_before_s: number(68),
            not_after_s: number(76),
            groups,
            issuer: VerifyingKey(key(88)),
            delegate: (fixed[84] == 1).then(|| VerifyingKey(key(120))),
            signature,
        })
    }

    fn check_signature_and_time(&self, checked: &mut CheckedSignatures, unix_s: u64) -> Result<(), CertificateError> {
        if unix_s < self.not_before_s {
            return Err(CertificateError::NotYet);
        }
        if unix_s > self.not_after_s {
            return Err(CertificateError::Expired);
        }
        if checked.check(self) { Ok(()) } else { Err(CertificateError::BadSignature) }
    }
}

/// Certificates whose signature was found good lately, by digest: a peer shows the same one with every connection.
#[derive(Clone, Debug)]
struct CheckedSignatures(Vec<[u8; 32]>);

/// Places for digests; a new one takes the place that its first byte says.
const CHECKED_PLACES: usize = 256;

impl Default for CheckedSignatures {
    fn default() -> Self {
        Self(alloc::vec![[0; 32]; CHECKED_PLACES])
    }
}

impl CheckedSignatures {
    fn check(&mut self, certificate: &Certificate) -> bool {
        let signed = certificate.signed_bytes();
        let mut hasher = blake3::Hasher::new();
        // Who signed is part of what is signed.
        hasher.update(&signed).update(&certificate.signature);
        let digest = *hasher.finalize().as_bytes();
        let place = usize::from(digest[0]) % CHECKED_PLACES;
        if self.0[place] == digest {
            return true;
        }
        let is_good = certificate.issuer.verify(&signed, &certificate.signature);
        if is_good {
            self.0[place] = digest;
        }
        is_good
    }
}

/// A chain as the CERTIFICATE extension carries it: count, three zeros, then length and bytes of each.
pub fn encode_chain(chain: &[Certificate]) -> Vec<u8> {
    let chain = &chain[..chain.len().min(CHAIN_MAX)];
    let mut bytes = alloc::vec![chain.len() as u8, 0, 0, 0];
    for certificate in chain {
        let encoded = certificate.encode();
        // At most 152 + 16 groups + signature: 280 bytes.
        bytes.extend_from_slice(&(encoded.len() as u16).to_be_bytes());
        bytes.extend_from_slice(&encoded);
    }
    bytes
}

/// Reads a chain.
///
/// # Errors
///
/// Not of this format, empty, or longer than [`CHAIN_MAX`].
pub fn decode_chain(bytes: &[u8]) -> Result<Vec<Certificate>, CertificateError> {
    let bad = CertificateError::Malformed;
    let (head, mut rest) = bytes.split_at_checked(4).ok_or(bad)?;
    let count = usize::from(head[0]);
    if count == 0 || count > CHAIN_MAX || head[1..] != [0; 3] {
        return Err(bad);
    }
    let mut chain = Vec::with_capacity(count);
    for _ in 0..count {
        let (len, after) = rest.split_at_checked(2).ok_or(bad)?;
        let len = usize::from(u16::from_be_bytes([len[0], len[1]]));
        let (encoded, after) = after.split_at_checked(len).ok_or(bad)?;
        chain.push(Certificate::decode(encoded)?);
        rest = after;
    }
    if rest.is_empty() { Ok(chain) } else { Err(bad) }
}

/// The links of an encoded chain as they stand there, length and bytes. Nothing of a chain that cannot be read.
fn raw_links(chain: &[u8]) -> Vec<&[u8]> {
    let mut links = Vec::new();
    let Some(mut rest) = chain.get(4..) else { return links };
    while let Some(len) = rest.first_chunk::<2>().map(|len| usize::from(u16::from_be_bytes(*len))) {
        let Some((link, after)) = rest.split_at_checked(2 + len) else { return Vec::new() };
        links.push(link);
        rest = after;
    }
    if rest.is_empty() { links } else { Vec::new() }
}

fn from_raw_links(links: &[&[u8]]) -> Vec<u8> {
    if links.is_empty() {
        return Vec::new();
    }
    let mut chain = alloc::vec![links.len().min(CHAIN_MAX) as u8, 0, 0, 0];
    links.iter().take(CHAIN_MAX).for_each(|link| chain.extend_from_slice(link));
    chain
}

/// How many first links an encoded chain has in common with another one that is shown beside it, and an encoded chain
/// of the others; empty where there are none.
pub(crate) fn links_in_common(shown: &[u8], chain: &[u8]) -> (u8, Vec<u8>) {
    let links = raw_links(chain);
    let common = raw_links(shown).iter().zip(&links).take_while(|(one, other)| one == other).count();
    (common.min(CHAIN_MAX) as u8, from_raw_links(&links[common..]))
}

/// The encoded chain whose first links are the first ones of `shown`, and whose others are those of `rest`; empty where
/// it has none. `None`: `shown` has not so many, or it would be too long.
pub(crate) fn joined_chain(shown: &[u8], shared: u8, rest: &[u8]) -> Option<Vec<u8>> {
    let mut links = raw_links(shown).get(..usize::from(shared))?.to_vec();
    links.extend(raw_links(rest));
    (links.len() <= CHAIN_MAX).then(|| from_raw_links(&links))
}

/// An authority whose key this host trusts for its block of names. It came with the join token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrustAnchor {
    /// The authority's block.
    pub authority: [u8; 8],
    /// Its key.
    pub key: VerifyingKey,
}

/// A host was put out of its authority: what the authority has signed for it until then holds no longer, although its
/// time is not over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Revocation {
    /// The authority's block.
    pub authority: [u8; 8],
    /// The host's key.
    pub host_key: [u8; 32],
    /// What ends later was made after it, for a host that was let in again. After this time there is nothing left to
    /// revoke.
    pub until_s: u64,
    /// The key by which the router signs that has said so, where another key lets it: once that is revoked, its word
    /// counts no longer.
    pub by: Option<VerifyingKey>,
}

/// Revocations of one authority's hosts that a host remembers. Of more, those that end first are forgotten, of the
/// router that has said the most.
pub const REVOCATIONS_MAX: usize = 1024;

/// What is known of a host's right to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authenticated {
    /// It was proved.
    Yes,
    /// Nobody here trusts anyone for this name, and it names no key of its own.
    No,
}

impl Authenticated {
    /// Whether it was proved.
    pub fn is_proved(self) -> bool {
        self == Self::Yes
    }
}

/// What a host has proved of its authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// The authority.
    pub authority: [u8; 8],
    /// Its groups there.
    pub groups: Vec<u32>,
    /// Until when.
    pub not_after_s: u64,
    /// The keys that signed it, from the authority's own down.
    pub issuers: Vec<VerifyingKey>,
}

/// What an authority says of a key, until a time.
trait Revoking {
    /// The authority, whom it is about, and by whose word.
    fn about(&self) -> ([u8; 8], [u8; 32], Option<VerifyingKey>);
    fn until_s(&self) -> u64;
}

impl Revoking for Revocation {
    fn about(&self) -> ([u8; 8], [u8; 32], Option<VerifyingKey>) {
        (self.authority, self.host_key, self.by)
    }

    fn until_s(&self) -> u64 {
        self.until_s
    }
}

impl Revoking for KeyRevocation {
    fn about(&self) -> ([u8; 8], [u8; 32], Option<VerifyingKey>) {
        (self.authority, self.key.0, None)
    }

    fn until_s(&self) -> u64 {
        self.until_s
    }
}

/// Keeps what holds until a time, and of two that say the same the longer one. What is over goes; and where there are
/// more than `max` of one authority, what ends first of whoever has said the most. No authority, and no router, can
/// have what others said forgotten.
fn remember<R: Revoking>(known: &mut Vec<R>, new: R, max: usize, unix_s: u64) {
    let is_same = |one: &R| one.about() == new.about();
    known.retain(|one| one.until_s() >= unix_s && !(is_same(one) && one.until_s() <= new.until_s()));
    if known.iter().any(is_same) {
        return;
    }
    let (authority, ..) = new.about();
    known.push(new);
    let mut said: Vec<(Option<VerifyingKey>, usize)> = Vec::new();
    for by in known.iter().map(Revoking::about).filter(|(of, ..)| *of == authority).map(|(.., by)| by) {
        match said.iter_mut().find(|(one, _)| *one == by) {
            Some((_, count)) => *count += 1,
            None => said.push((by, 1)),
        }
    }
    let Some((most, _)) = said.iter().max_by_key(|(_, count)| *count) else { return };
    let is_theirs = |one: &R| {
        let (of, _, by) = one.about();
        of == authority && by == *most
    };
    let theirs = (0..known.len()).filter(|at| is_theirs(&known[*at]));
    if said.iter().map(|(_, count)| count).sum::<usize>() > max
        && let Some(first) = theirs.min_by_key(|at| known[*at].until_s())
    {
        known.swap_remove(first);
    }
}

/// Whom this host trusts.
#[derive(Clone, Debug, Default)]
pub struct TrustStore {
    /// Each with the end of its time, in seconds since 1970.
    anchors: Vec<(TrustAnchor, u64)>,
    revoked: Vec<Revocation>,
    revoked_keys: Vec<KeyRevocation>,
    checked: CheckedSignatures,
}

impl TrustStore {
    /// Trusts one more key.
    pub fn add(&mut self, anchor: TrustAnchor) {
        if self.anchors.iter().all(|(known, _)| *known != anchor) {
            self.anchors.push((anchor, u64::MAX));
        }
    }

    /// Trusts the key that follows one that is trusted, and that one until the time that both have said. The caller has
    /// seen that it is signed.
    pub fn succeed(&mut self, succession: &Succession) {
        let Succession { authority, old, new, trusted_until_s, .. } = *succession;
        let is_old = |known: &&mut (TrustAnchor, u64)| known.0 == TrustAnchor { authority, key: old };
        if let Some(known) = self.anchors.iter_mut().find(is_old) {
            known.1 = known.1.min(trusted_until_s);
            self.add(TrustAnchor { authority, key: new });
        }
    }

    /// Whether nobody is trusted.
    pub fn is_empty(&self) -> bool {
        self.anchors.is_empty()
    }

    /// Believes no more what an authority signed for a host that it has put out.
    pub fn revoke(&mut self, revocation: Revocation, unix_s: u64) {
        let is_by_revoked = |known: &KeyRevocation| {
            known.authority == revocation.authority && revocation.by.is_some_and(|by| by == known.key)
        };
        if !self.revoked_keys.iter().any(is_by_revoked) {
            remember(&mut self.revoked, revocation, REVOCATIONS_MAX, unix_s);
        }
    }

    /// Believes no more what a key has signed that an authority had let sign, nor of which hosts its router has said
    /// that they were put out. The caller knows that the authority says so.
    pub fn revoke_key(&mut self, revocation: KeyRevocation, unix_s: u64) {
        remember(&mut self.revoked_keys, revocation, KEY_REVOCATIONS_MAX, unix_s);
        self.revoked.retain(|known| known.authority != revocation.authority || known.by != Some(revocation.key));
    }

    /// How many revocations are remembered, of hosts and of keys.
    pub fn revocations(&self) -> usize {
        self.revoked.len() + self.revoked_keys.len()
    }

    /// Whether an encoded chain goes by a key that may sign no longer.
    pub fn is_by_revoked_key(&self, chain: &[u8]) -> bool {
        let chain = decode_chain(chain).unwrap_or_default();
        chain.last().is_some_and(|leaf| self.check_keys(leaf.prefix.id.authority(), &chain).is_err())
    }

    /// Whether each key of a chain below the first may sign still.
    fn check_keys(&self, authority: [u8; 8], chain: &[Certificate]) -> Result<(), CertificateError> {
        let is_revoked = |link: &Certificate| {
            let is_it = |known: &KeyRevocation| {
                known.authority == authority && link.delegate == Some(known.key) && link.not_after_s <= known.until_s
            };
            self.revoked_keys.iter().any(is_it)
        };
        if chain.iter().any(is_revoked) { Err(CertificateError::KeyRevoked) } else { Ok(()) }
    }

    fn check_revocation(&self, authority: [u8; 8], leaf: &Certificate) -> Result<(), CertificateError> {
        let is_revoked = |known: &Revocation| {
            known.authority == authority && known.host_key == leaf.host_key && leaf.not_after_s <= known.until_s
        };
        if self.revoked.iter().any(is_revoked) { Err(CertificateError::Revoked) } else { Ok(()) }
    }

    /// Until when an authority's key is trusted. A key that another one follows may be revoked as well, by that.
    fn trusts(&self, authority: [u8; 8], key: &VerifyingKey, unix_s: u64) -> Option<u64> {
        let is_it = |known: &KeyRevocation| known.authority == authority && known.key == *key;
        if self.revoked_keys.iter().any(is_it) {
            return None;
        }
        let anchor = TrustAnchor { authority, key: *key };
        let until_s = self.anchors.iter().find(|(known, _)| *known == anchor)?.1;
        (unix_s <= until_s).then_some(until_s)
    }

    /// Whether the host of `host_key` may answer for `service`.
    ///
    /// # Errors
    ///
    /// Why it may not.
    pub fn verify_service(
        &mut self,
        chain: &[u8],
        service: &ServiceId,
        host_key: &[u8; 32],
        unix_s: u64,
    ) -> Result<Authenticated, CertificateError> {
        let has_tail = service.tail().iter().any(|byte| *byte != 0);
        let is_known = self.anchors.iter().any(|(anchor, _)| anchor.authority == service.authority());
        // A tail may be the hash of the one key that speaks for the name: where nobody is trusted, that key has to.
        let unproved = |otherwise| match (is_known, has_tail) {
            (true, _) => Err(otherwise),
            (false, true) => Err(CertificateError::NotByItsKey),
            (false, false) => Ok(Authenticated::No),
        };
        if chain.is_empty() {
            return unproved(CertificateError::Missing);
        }
        let chain = decode_chain(chain)?;
        let root = chain.first().ok_or(CertificateError::Malformed)?;
        let is_own_key = has_tail && service.is_certified_by(&root.issuer);
        if !is_own_key && self.trusts(service.authority(), &root.issuer, unix_s).is_none() {
            return unproved(CertificateError::NotTrusted);
        }
        let leaf = check_chain(&chain, &mut self.checked, host_key, unix_s)?;
        if !is_own_key {
            self.check_revocation(service.authority(), leaf)?;
            self.check_keys(service.authority(), &chain)?;
        }
        let is_for_name = leaf.kind == CertificateKind::Service && leaf.prefix.contains(service);
        if is_for_name { Ok(Authenticated::Yes) } else { Err(CertificateError::WrongPrefix) }
    }

    /// Until when the host of `host_key` may answer for all of `prefix`, in seconds since 1970.
    ///
    /// # Errors
    ///
    /// Why it may not; that nobody is trusted for these names is a reason.
    pub fn verify_prefix(
        &mut self,
        chain: &[u8],
        prefix: &Prefix,
        host_key: &[u8; 32],
        unix_s: u64,
    ) -> Result<u64, CertificateError> {
        match self.verify_service(chain, &prefix.id, host_key, unix_s)? {
            Authenticated::No => return Err(CertificateError::NotTrusted),
            Authenticated::Yes => {}
        }
        let chain = decode_chain(chain)?;
        let covers = chain.last().is_some_and(|leaf| leaf.prefix.covers(prefix));
        let trusted_s = chain.first().and_then(|root| self.trusts(prefix.id.authority(), &root.issuer, unix_s));
        let ends = chain.iter().map(|certificate| certificate.not_after_s).chain(trusted_s).min();
        ends.filter(|_| covers).ok_or(CertificateError::WrongPrefix)
    }

    /// What the host of `host_key` proves of its authority.
    ///
    /// # Errors
    ///
    /// Why it proves nothing.
    pub fn verify_member(
        &mut self,
        chain: &[u8],
        host_key: &[u8; 32],
        unix_s: u64,
    ) -> Result<Membership, CertificateError> {
        let chain = decode_chain(chain)?;
        let root = chain.first().ok_or(CertificateError::Malformed)?;
        let leaf = check_chain(&chain, &mut self.checked, host_key, unix_s)?;
        let authority = leaf.prefix.id.authority();
        let trusted_s = self.trusts(authority, &root.issuer, unix_s).ok_or(CertificateError::NotTrusted)?;
        self.check_revocation(authority, leaf)?;
        self.check_keys(authority, &chain)?;
        // Membership is of a whole authority or of a part of it, never of more.
        if leaf.kind != CertificateKind::Member || leaf.prefix.bits < 64 || leaf.prefix.bits > SERVICE_BITS {
            return Err(CertificateError::WrongPrefix);
        }
        let not_after_s = chain.iter().map(|certificate| certificate.not_after_s).fold(trusted_s, u64::min);
        let issuers = chain.iter().map(|certificate| certificate.issuer).collect();
        Ok(Membership { authority, groups: leaf.groups.clone(), not_after_s, issuers })
    }
}

/// Signatures, times, delegation and the host of a chain; gives its last certificate, which is the host's own. One
/// that delegates is in the clear in the answers of every host below it, and is nobody's right to answer.
fn check_chain<'a>(
    chain: &'a [Certificate],
    checked: &mut CheckedSignatures,
    host_key: &[u8; 32],
    unix_s: u64,
) -> Result<&'a Certificate, CertificateError> {
    if HostPublic(*host_key).is_of_low_order() {
        return Err(CertificateError::LowOrder);
    }
    let leaf = check_links(chain, checked, unix_s)?;
    if leaf.delegate.is_some() {
        return Err(CertificateError::Delegation);
    }
    if leaf.host_key == *host_key { Ok(leaf) } else { Err(CertificateError::WrongHost) }
}

/// Signatures, times and delegation of a chain; gives its last certificate.
fn check_links<'a>(
    chain: &'a [Certificate],
    checked: &mut CheckedSignatures,
    unix_s: u64,
) -> Result<&'a Certificate, CertificateError> {
    for certificate in chain {
        certificate.check_signature_and_time(checked, unix_s)?;
    }
    for pair in chain.windows(2) {
        if pair[0].delegate != Some(pair[1].issuer)
            || !pair[0].prefix.covers(&pair[1].prefix)
            || pair[0].kind != pair[1].kind
        {
            return Err(CertificateError::NotTrusted);
        }
    }
    chain.last().ok_or(CertificateError::Malformed)
}

/// Whether a chain that begins with `root` lets `key` sign certificates of a kind, within a prefix. Gives the end of
/// its time, in seconds since 1970.
///
/// # Errors
///
/// Why it does not.
pub fn verify_delegation(
    chain: &[Certificate],
    (kind, prefix): (CertificateKind, &Prefix),
    root: &VerifyingKey,
    key: &VerifyingKey,
    unix_s: u64,
) -> Result<u64, CertificateError> {
    let last = check_links(chain, &mut CheckedSignatures::default(), unix_s)?;
    // One place must be left for what the key signs.
    if chain.len() >= CHAIN_MAX {
        return Err(CertificateError::Malformed);
    }
    if chain.first().is_none_or(|first| first.issuer != *root) || last.delegate != Some(*key) {
        return Err(CertificateError::NotTrusted);
    }
    if last.kind != kind || !last.prefix.covers(prefix) {
        return Err(CertificateError::WrongPrefix);
    }
    Ok(chain.iter().map(|certificate| certificate.not_after_s).min().unwrap_or(0))
}

#[cfg(test)]
mod test;
