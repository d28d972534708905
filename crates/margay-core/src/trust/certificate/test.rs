use super::*;
use crate::types::name::{Name, self_certifying_tail};
use crate::types::rng::Rng;

const HOST: [u8; 32] = [8; 32];

fn key(n: u8) -> SigningKey {
    SigningKey::generate(&mut Rng::new([n; 32]))
}

fn service() -> ServiceId {
    "web.shop".parse::<Name>().expect("literal").service_id()
}

fn certificate(kind: CertificateKind, bits: u16) -> Certificate {
    Certificate {
        kind,
        prefix: Prefix::new(service(), bits),
        host_key: HOST,
        not_before_s: 100,
        not_after_s: 200,
        groups: alloc::vec![5, 6],
        issuer: VerifyingKey([0; 32]),
        delegate: None,
        signature: [0; 64],
    }
}

fn store() -> TrustStore {
    let mut store = TrustStore::default();
    store.add(TrustAnchor { authority: service().authority(), key: key(1).public() });
    store
}

fn one(certificate: Certificate) -> Vec<u8> {
    encode_chain(&[certificate.sign(&key(1))])
}

#[test]
fn the_authority_says_who_may_answer_and_for_how_long() {
    let chain = one(certificate(CertificateKind::Service, 96));
    assert_eq!(store().verify_service(&chain, &service(), &HOST, 150), Ok(Authenticated::Yes));
    assert_eq!(store().verify_service(&chain, &service(), &HOST, 99), Err(CertificateError::NotYet));
    assert_eq!(store().verify_service(&chain, &service(), &HOST, 201), Err(CertificateError::Expired));
    assert_eq!(store().verify_service(&chain, &service(), &[9; 32], 150), Err(CertificateError::WrongHost));
    let other = "mail.shop".parse::<Name>().expect("literal").service_id();
    assert_eq!(store().verify_service(&chain, &other, &HOST, 150), Err(CertificateError::WrongPrefix));
    let foreign = encode_chain(&[certificate(CertificateKind::Service, 96).sign(&key(2))]);
    assert_eq!(store().verify_service(&foreign, &service(), &HOST, 150), Err(CertificateError::NotTrusted));
    assert_eq!(store().verify_service(&[], &service(), &HOST, 150), Err(CertificateError::Missing));
    assert_eq!(TrustStore::default().verify_service(&chain, &service(), &HOST, 150), Ok(Authenticated::No));
    let member = one(certificate(CertificateKind::Member, 64));
    assert_eq!(store().verify_service(&member, &service(), &HOST, 150), Err(CertificateError::WrongPrefix));
}

#[test]
fn a_prefix_needs_a_certificate_for_all_of_it() {
    let chain = one(certificate(CertificateKind::Service, 96));
    let of = |bits| Prefix::new(service(), bits);
    let verify = |chain: &[u8], bits, host: &[u8; 32]| store().verify_prefix(chain, &of(bits), host, 150);
    assert_eq!(verify(&chain, 96, &HOST), Ok(200));
    assert_eq!(verify(&chain, 100, &HOST), Ok(200));
    assert_eq!(verify(&chain, 95, &HOST), Err(CertificateError::WrongPrefix));
    assert_eq!(verify(&chain, 96, &[9; 32]), Err(CertificateError::WrongHost));
    assert_eq!(verify(&[], 96, &HOST), Err(CertificateError::Missing));
    let nobody = TrustStore::default().verify_prefix(&chain, &of(96), &HOST, 150);
    assert_eq!(nobody, Err(CertificateError::NotTrusted), "nobody is trusted for it");
}

#[test]
fn membership_names_authority_and_groups() {
    let chain = one(certificate(CertificateKind::Member, 64));
    let membership = store().verify_member(&chain, &HOST, 150).expect("signed by the authority");
    assert_eq!((membership.authority, &membership.groups[..]), (service().authority(), &[5, 6][..]));
    assert_eq!(store().verify_member(&chain, &[1; 32], 150), Err(CertificateError::WrongHost));
    let service = one(certificate(CertificateKind::Service, 96));
    assert_eq!(store().verify_member(&service, &HOST, 150), Err(CertificateError::WrongPrefix));
}

#[test]
fn a_delegate_signs_within_its_prefix() {
    let mut root = certificate(CertificateKind::Service, 64);
    root.delegate = Some(key(3).public());
    let root = root.sign(&key(1));
    let leaf = certificate(CertificateKind::Service, 96).sign(&key(3));
    let good = encode_chain(&[root.clone(), leaf.clone()]);
    assert_eq!(store().verify_service(&good, &service(), &HOST, 150), Ok(Authenticated::Yes));
    let mut narrow = root.clone();
    narrow.prefix = Prefix::new("mail.shop".parse::<Name>().expect("literal").service_id(), 96);
    let bad = encode_chain(&[narrow.sign(&key(1)), leaf]);
    assert_eq!(store().verify_service(&bad, &service(), &HOST, 150), Err(CertificateError::NotTrusted));
}

/// A delegation is in the clear in every answer of the hosts below it: who shows it alone has shown nothing.
#[test]
fn a_delegation_is_no_certificate_and_a_key_of_low_order_is_nobodys() {
    let link = |kind| {
        let delegate = Some(key(3).public());
        Certificate { host_key: [0; 32], delegate, ..certificate(kind, 64) }
    };
    let (service_kind, member_kind) = (CertificateKind::Service, CertificateKind::Member);
    let of_host = Certificate { host_key: HOST, ..link(service_kind) };
    let shown = [one(link(service_kind)), one(of_host)];
    let answers = |chain: &[u8], host: &[u8; 32]| store().verify_service(chain, &service(), host, 150);
    assert_eq!(answers(&shown[0], &[0; 32]), Err(CertificateError::LowOrder));
    assert_eq!(answers(&shown[0], &HOST), Err(CertificateError::Delegation));
    assert_eq!(answers(&shown[1], &HOST), Err(CertificateError::Delegation));
    let member = one(link(member_kind));
    assert_eq!(store().verify_member(&member, &[0; 32], 150), Err(CertificateError::LowOrder));
    assert_eq!(store().verify_member(&member, &HOST, 150), Err(CertificateError::Delegation));
    let prefix = Prefix::new(service(), 96);
    assert_eq!(store().verify_prefix(&shown[0], &prefix, &[0; 32], 150), Err(CertificateError::LowOrder));
    // A leaf below it that names a key of low order helps no more, and neither does a delegation to no further key.
    let low = Certificate { host_key: [0; 32], ..certificate(service_kind, 96) };
    let below = encode_chain(&[link(service_kind).sign(&key(1)), low.sign(&key(3))]);
    assert_eq!(answers(&below, &[0; 32]), Err(CertificateError::LowOrder));
    let twice = encode_chain(&[link(service_kind).sign(&key(1)), link(service_kind).sign(&key(3))]);
    assert_eq!(answers(&twice, &HOST), Err(CertificateError::Delegation));
}

#[test]
fn a_delegation_is_for_one_key_and_kind_and_leaves_room_for_what_it_signs() {
    let (all, block, kind) = (Prefix::new(service(), 0), Prefix::new(service(), 64), CertificateKind::Service);
    let to = |number: u8, by: u8, end: u64| {
        let delegate = Some(key(number).public());
        Certificate { host_key: [0; 32], delegate, not_after_s: end, ..certificate(kind, 64) }.sign(&key(by))
    };
    let chain = [to(3, 1, 200), to(4, 3, 180)];
    let check = |chain: &[Certificate], what, number, unix_s| {
        verify_delegation(chain, what, &key(1).public(), &key(number).public(), unix_s)
    };
    assert_eq!(check(&chain, (kind, &block), 4, 150), Ok(180), "the earliest end");
    assert_eq!(check(&chain[..1], (kind, &block), 3, 150), Ok(200));
    assert_eq!(check(&chain, (kind, &block), 3, 150), Err(CertificateError::NotTrusted), "another's");
    assert_eq!(check(&chain[1..], (kind, &block), 4, 150), Err(CertificateError::NotTrusted), "no root");
    assert_eq!(check(&chain, (CertificateKind::Member, &block), 4, 150), Err(CertificateError::WrongPrefix));
    assert_eq!(check(&chain, (kind, &all), 4, 150), Err(CertificateError::WrongPrefix));
    assert_eq!(check(&chain, (kind, &block), 4, 190), Err(CertificateError::Expired));
    assert_eq!(check(&[], (kind, &block), 4, 150), Err(CertificateError::Malformed));
    let full = [to(3, 1, 200), to(4, 3, 180), to(5, 4, 180)];
    assert_eq!(check(&full, (kind, &block), 5, 150), Err(CertificateError::Malformed), "nothing fits below it");
}

#[test]
fn what_a_host_was_given_before_it_was_put_out_holds_no_longer() {
    let mut trust = store();
    let answers = |trust: &mut TrustStore, end: u64| {
        let made = |kind| Certificate { not_after_s: end, ..certificate(kind, 96) };
        let (service_chain, member) = (one(made(CertificateKind::Service)), one(made(CertificateKind::Member)));
        (
            trust.verify_service(&service_chain, &service(), &HOST, 150).err(),
            trust.verify_member(&member, &HOST, 150).err(),
        )
    };
    let revocation = Revocation { authority: service().authority(), host_key: HOST, until_s: 200, by: None };
    trust.revoke(Revocation { authority: [1; 8], ..revocation }, 150);
    trust.revoke(Revocation { host_key: [1; 32], ..revocation }, 150);
    assert_eq!(answers(&mut trust, 200), (None, None), "others are put out");
    trust.revoke(revocation, 150);
    trust.revoke(Revocation { until_s: 180, ..revocation }, 150);
    let revoked = Some(CertificateError::Revoked);
    assert_eq!(answers(&mut trust, 200), (revoked, revoked));
    assert_eq!(answers(&mut trust, 201), (None, None), "it was let in again");
    assert_eq!(trust.revocations(), 3);
    for number in 0..=REVOCATIONS_MAX as u64 {
        let mut host_key = [9; 32];
        host_key[..8].copy_from_slice(&number.to_be_bytes());
        trust.revoke(Revocation { host_key, until_s: 300, ..revocation }, 150);
    }
    assert_eq!(trust.revocations(), REVOCATIONS_MAX + 1, "each authority has its own");
    trust.revoke(revocation, 400);
    assert_eq!(trust.revocations(), 1, "their time is over");
}

#[test]
fn a_router_that_lies_has_nothing_forgotten_and_its_word_ends_with_its_key() {
    let (mut trust, authority) = (store(), service().authority());
    let shown = one(Certificate { not_after_s: 200, ..certificate(CertificateKind::Member, 64) });
    let revocation = Revocation { authority, host_key: HOST, until_s: 200, by: None };
    trust.revoke(revocation, 150);
    let lie = |trust: &mut TrustStore, from: u64| {
        for number in from..from + 2 * REVOCATIONS_MAX as u64 {
            let mut host_key = [9; 32];
            host_key[..8].copy_from_slice(&number.to_be_bytes());
            trust.revoke(Revocation { host_key, until_s: u64::MAX, by: Some(key(3).public()), ..revocation }, 150);
        }
    };
    lie(&mut trust, 0);
    assert_eq!(trust.verify_member(&shown, &HOST, 150).err(), Some(CertificateError::Revoked));
    assert_eq!(trust.revocations(), REVOCATIONS_MAX);
    trust.revoke_key(KeyRevocation::new(authority, key(3).public(), 900, &key(1)), 150);
    assert_eq!(trust.revocations(), 2, "the host's and the key's");
    lie(&mut trust, 10_000);
    assert_eq!(trust.revocations(), 2);
    assert_eq!(trust.verify_member(&shown, &HOST, 150).err(), Some(CertificateError::Revoked));
}

#[test]
fn what_a_key_has_signed_holds_no_longer_once_it_is_revoked_and_a_later_word_for_it_does() {
    let (mut trust, authority) = (store(), service().authority());
    let answers = |trust: &mut TrustStore, number: u8, end: u64| {
        let shown = |kind, bits| {
            let link = Certificate { host_key: [0; 32], delegate: Some(key(number).public()), ..certificate(kind, 64) };
            let link = Certificate { not_after_s: end, ..link }.sign(&key(1));
            encode_chain(&[link, certificate(kind, bits).sign(&key(number))])
        };
        (
            trust.verify_service(&shown(CertificateKind::Service, 96), &service(), &HOST, 150).err(),
            trust.verify_member(&shown(CertificateKind::Member, 64), &HOST, 150).err(),
        )
    };
    let revocation = KeyRevocation::new(authority, key(3).public(), 900, &key(1));
    trust.revoke_key(KeyRevocation { authority: [1; 8], ..revocation }, 150);
    trust.revoke_key(KeyRevocation { key: key(5).public(), ..revocation }, 150);
    assert_eq!(answers(&mut trust, 3, 900), (None, None), "others were revoked");
    trust.revoke_key(revocation, 150);
    trust.revoke_key(KeyRevocation { until_s: 800, ..revocation }, 150);
    let revoked = Some(CertificateError::KeyRevoked);
    assert_eq!(answers(&mut trust, 3, 900), (revoked, revoked));
    assert_eq!(answers(&mut trust, 3, 901), (None, None), "it was let sign again");
    assert_eq!(answers(&mut trust, 4, 900), (None, None), "another router");
    let own = one(certificate(CertificateKind::Service, 96));
    assert_eq!(trust.verify_service(&own, &service(), &HOST, 150), Ok(Authenticated::Yes));
    assert_eq!(trust.revocations(), 3);
    for number in 0..=KEY_REVOCATIONS_MAX as u64 {
        let mut bytes = [9; 32];
        bytes[..8].copy_from_slice(&number.to_be_bytes());
        trust.revoke_key(KeyRevocation { key: VerifyingKey(bytes), until_s: 1000, ..revocation }, 150);
    }
    assert_eq!(trust.revocations(), KEY_REVOCATIONS_MAX + 1, "each authority has its own");
    trust.revoke_key(revocation, 1001);
    assert_eq!(trust.revocations(), 1, "their time is over");
}

#[test]
fn a_key_and_the_one_that_follows_it_are_both_trusted_until_the_first_one_s_time_is_over() {
    let (mut trust, authority) = (store(), service().authority());
    let by = |number: u8, kind, bits| encode_chain(&[certificate(kind, bits).sign(&key(number))]);
    let answers = |trust: &mut TrustStore, number: u8, unix_s: u64| {
        let shown = by(number, CertificateKind::Service, 96);
        trust.verify_service(&shown, &service(), &HOST, unix_s).is_ok_and(Authenticated::is_proved)
    };
    let to_second = Succession::new(authority, &key(1), &key(2), 120, 160);
    trust.succeed(&Succession::new(authority, &key(5), &key(6), 120, 160));
    assert!(!answers(&mut trust, 6, 150), "of a key that nobody trusts");
    assert!(!answers(&mut trust, 2, 150));
    trust.succeed(&to_second);
    trust.add(TrustAnchor { authority, key: key(1).public() });
    assert_eq!([answers(&mut trust, 1, 160), answers(&mut trust, 2, 160)], [true, true]);
    assert_eq!([answers(&mut trust, 1, 161), answers(&mut trust, 2, 161)], [false, true]);
    let member = trust.verify_member(&by(1, CertificateKind::Member, 64), &HOST, 150).expect("a member");
    assert_eq!(member.not_after_s, 160, "no longer than its key is trusted");
    trust.succeed(&Succession::new(authority, &key(2), &key(3), 170, 180));
    assert_eq!([answers(&mut trust, 2, 190), answers(&mut trust, 3, 190)], [false, true]);
    // The key that is followed was lost: at once.
    trust.revoke_key(KeyRevocation::new(authority, key(1).public(), u64::MAX, &key(2)), 150);
    assert_eq!([answers(&mut trust, 1, 150), answers(&mut trust, 2, 150)], [false, true]);
}

#[test]
fn a_name_that_certifies_itself_needs_no_authority() {
    let mut id = service();
    let head = id.0[..12].try_into().expect("twelve");
    id.0[12..].copy_from_slice(&self_certifying_tail(&key(4).public(), &head));
    let mut own = certificate(CertificateKind::Service, 96);
    own.prefix = id.into();
    let chain = encode_chain(&[own.clone().sign(&key(4))]);
    assert_eq!(TrustStore::default().verify_service(&chain, &id, &HOST, 150), Ok(Authenticated::Yes));
    let forged = encode_chain(&[own.clone().sign(&key(5))]);
    assert_eq!(store().verify_service(&forged, &id, &HOST, 150), Err(CertificateError::NotTrusted));
    // Who trusts nobody for it believes nobody but that key.
    let bare = |chain: &[u8]| TrustStore::default().verify_service(chain, &id, &HOST, 150);
    assert_eq!(bare(&forged), Err(CertificateError::NotByItsKey));
    assert_eq!(bare(&[]), Err(CertificateError::NotByItsKey));
    assert_eq!(bare(&one(certificate(CertificateKind::Service, 96))), Err(CertificateError::NotByItsKey));
    let link = Certificate { host_key: [0; 32], delegate: Some(key(5).public()), ..own };
    assert_eq!(bare(&encode_chain(&[link.sign(&key(4))])), Err(CertificateError::Delegation));
    assert_eq!(store().verify_service(&[], &id, &HOST, 150), Err(CertificateError::Missing));
}

#[test]
fn no_flipped_bit_and_no_cut_verifies() {
    let good = one(certificate(CertificateKind::Service, 96));
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert_ne!(store().verify_service(&bad, &service(), &HOST, 150), Ok(Authenticated::Yes), "bit {bit}");
    }
    for len in 1..good.len() {
        assert_eq!(store().verify_service(&good[..len], &service(), &HOST, 150), Err(CertificateError::Malformed));
    }
}

#[test]
fn the_format_is_as_written_above() {
    let encoded = certificate(CertificateKind::Service, 96).sign(&key(1)).encode();
    assert_eq!(encoded[..4], [1, 2, 0, 96]);
    assert_eq!(encoded[68..88], [0, 0, 0, 0, 0, 0, 0, 100, 0, 0, 0, 0, 0, 0, 0, 200, 0, 2, 0, 0]);
    assert_eq!(encoded[152..160], [0, 0, 0, 5, 0, 0, 0, 6]);
    assert_eq!(encoded.len(), 160 + 64);
    assert_eq!(Certificate::decode(&encoded).map(|certificate| certificate.encode()), Ok(encoded));
}
