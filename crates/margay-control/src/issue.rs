//! What an authority signs: who belongs to it, and who may answer for a name (DESIGN §7).

use margay_core::certificate::{Certificate, CertificateKind, encode_chain};
use margay_core::key::{HostPublic, VerifyingKey};
use margay_core::name::{AUTHORITY_BITS, Prefix, ServiceId, group_number};

use crate::keyring::{Authority, ServiceKey};
use crate::warrant::Delegation;

/// How long a certificate lives. Hosts renew it before half of that has passed.
pub const LIFETIME_S: u64 = 24 * 60 * 60;
/// Clocks that differ by less do no harm.
const SKEW_S: u64 = 5 * 60;

/// When the last of what is signed until `unix_s` ends, by any clock that differs little.
pub const fn end_s(unix_s: u64) -> u64 {
    unix_s.saturating_add(LIFETIME_S + SKEW_S)
}

fn certificate(kind: CertificateKind, prefix: Prefix, host: &HostPublic, unix_s: u64) -> Certificate {
    Certificate {
        kind,
        prefix,
        host_key: host.0,
        not_before_s: unix_s.saturating_sub(SKEW_S),
        not_after_s: unix_s + LIFETIME_S,
        groups: Vec::new(),
        // Both are filled in by the signature.
        issuer: VerifyingKey([0; 32]),
        delegate: None,
        signature: [0; 64],
    }
}

/// Below the authority's own key, or below that of this router.
fn sign(authority: &Authority, certificate: Certificate) -> (Vec<u8>, u64) {
    let mut chain = authority.delegations(certificate.kind).to_vec();
    let end = authority.warrant.as_ref().map_or(u64::MAX, Delegation::not_after_s);
    let not_after_s = certificate.not_after_s.min(end);
    chain.push(Certificate { not_after_s, ..certificate }.sign(&authority.key));
    (encode_chain(&chain), not_after_s)
}

/// The block of an authority, as a prefix.
pub fn authority_prefix(authority: &Authority) -> Prefix {
    let mut id = [0; 32];
    id[..8].copy_from_slice(&authority.block());
    Prefix::new(ServiceId(id), AUTHORITY_BITS)
}

/// A host belongs to an authority and some of its groups. Gives the encoded chain, and its end in seconds since 1970.
pub fn membership(authority: &Authority, host: &HostPublic, groups: &[String], unix_s: u64) -> (Vec<u8>, u64) {
    let groups = groups.iter().map(|group| group_number(group)).collect();
    let made = certificate(CertificateKind::Member, authority_prefix(authority), host, unix_s);
    sign(authority, Certificate { groups, ..made })
}

/// A host may answer for a prefix of an authority's names. Gives the encoded chain, and its end.
pub fn service(authority: &Authority, prefix: Prefix, host: &HostPublic, unix_s: u64) -> (Vec<u8>, u64) {
    sign(authority, certificate(CertificateKind::Service, prefix, host, unix_s))
}

/// A host is a router of an authority. Gives the encoded chain, and its end.
pub fn router(authority: &Authority, host: &HostPublic, unix_s: u64) -> (Vec<u8>, u64) {
    service(authority, Prefix::from(ServiceId::of_routers(authority.block())), host, unix_s)
}

/// A host may answer for the name that a service's key certifies. Gives the encoded chain, and its end.
pub fn service_by_key(key: &ServiceKey, host: &HostPublic, unix_s: u64) -> (Vec<u8>, u64) {
    let made = certificate(CertificateKind::Service, Prefix::new(key.service, 256), host, unix_s);
    (encode_chain(&[made.clone().sign(&key.key)]), made.not_after_s)
}

#[cfg(test)]
mod tests {
    use margay_core::certificate::{CertificateError, TrustAnchor, TrustStore};
    use margay_core::key::SigningKey;
    use margay_core::name::self_certifying_tail;
    use margay_core::rng::Rng;

    use super::*;

    const NOW_S: u64 = 1_700_000_000;
    const HOST: HostPublic = HostPublic([7; 32]);

    fn authority(seed: u8) -> Authority {
        Authority {
            name: "shop".to_owned(),
            key: SigningKey::generate(&mut Rng::new([seed; 32])),
            warrant: None,
            revoked: None,
            next: None,
        }
    }

    #[test]
    fn what_is_signed_holds_for_that_host_and_time() {
        let authority = authority(1);
        let mut trust = TrustStore::default();
        trust.add(TrustAnchor { authority: authority.block(), key: authority.key.public() });
        let web: Prefix = "web.shop".parse::<margay_core::name::Name>().expect("literal").prefix();

        let (chain, end_s) = membership(&authority, &HOST, &["front".to_owned()], NOW_S);
        let member = trust.verify_member(&chain, &HOST.0, NOW_S).expect("a member");
        assert_eq!((member.groups, member.not_after_s), (vec![group_number("front")], end_s));
        assert!(trust.verify_member(&chain, &HOST.0, end_s + 1).is_err());
        assert!(trust.verify_member(&chain, &[8; 32], NOW_S).is_err());

        let (chain, _) = service(&authority, web, &HOST, NOW_S);
        assert!(trust.verify_service(&chain, &web.id, &HOST.0, NOW_S).expect("fine").is_proved());
        let (forged, _) = service(&self::authority(2), web, &HOST, NOW_S);
        assert_eq!(trust.verify_service(&forged, &web.id, &HOST.0, NOW_S), Err(CertificateError::NotTrusted));
    }

    #[test]
    fn a_service_key_signs_for_its_own_name_alone() {
        let key = SigningKey::generate(&mut Rng::new([3; 32]));
        let mut id = [5; 32];
        let head: [u8; 12] = id[..12].try_into().expect("twelve");
        id[12..].copy_from_slice(&self_certifying_tail(&key.public(), &head));
        let service = ServiceId(id);
        let (chain, _) = service_by_key(&ServiceKey { name: "web.shop".to_owned(), key, service }, &HOST, NOW_S);
        let mut trust = TrustStore::default();
        assert!(trust.verify_service(&chain, &service, &HOST.0, NOW_S).expect("fine").is_proved());
    }
}
