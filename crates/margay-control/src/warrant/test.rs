use margay_core::certificate::TrustAnchor;
use margay_core::rng::Rng;

use super::*;
use crate::issue;
use crate::keyring::{AcceptError, Keyring};
use crate::state_dir::{StateDir, StateError};

const NOW_S: u64 = 1_700_000_000;
const DAY_S: u64 = 24 * 60 * 60;
const HOST: HostPublic = HostPublic([7; 32]);

struct Site {
    ring: Keyring,
    _base: tempfile::TempDir,
}

fn site() -> Site {
    let base = tempfile::tempdir().expect("a directory");
    let dir = StateDir::open(base.path().join("s")).expect("made");
    Site { ring: Keyring::open(&dir).expect("opened"), _base: base }
}

impl Site {
    fn authority(&self) -> Authority {
        self.ring.authority("shop").expect("readable").expect("is there")
    }

    fn signs_for(&self, request: &Request, lifetime_s: u64) -> Delegation {
        match request.grant(&self.authority(), NOW_S, lifetime_s).expect("granted") {
            Warrant::Authority(warrant) => warrant,
            Warrant::Service(_) => panic!("asked for an authority"),
        }
    }

    fn trusts(&self) -> TrustStore {
        let mut trust = TrustStore::default();
        trust.add(TrustAnchor { authority: authority_block("shop"), key: self.authority().root() });
        trust
    }
}

/// The first has the authority's key, the second a key of its own and a warrant for it.
fn two() -> (Site, Site) {
    let (root, second) = (site(), site());
    root.ring.create_authority("shop").expect("made");
    let request = second.ring.request("shop", false).expect("asked");
    let warrant = root.signs_for(&request, 90 * DAY_S);
    second.ring.accept(warrant, &[], NOW_S).expect("taken");
    (root, second)
}

#[test]
fn what_a_further_router_signs_is_believed_by_those_who_trust_the_first() {
    let (root, second) = two();
    let (own, by) = (root.authority(), second.authority());
    assert_eq!(by.root(), own.key.public());
    assert_ne!(by.key.public(), own.key.public(), "no private key went from host to host");
    let (member, end_s) = issue::membership(&by, &HOST, &["front".to_owned()], NOW_S);
    let found = root.trusts().verify_member(&member, &HOST.0, NOW_S).expect("a member");
    assert_eq!((found.not_after_s, end_s), (NOW_S + DAY_S, NOW_S + DAY_S));
    let web: Prefix = "web.shop".parse::<margay_core::name::Name>().expect("literal").prefix();
    let (chain, _) = issue::service(&by, web, &HOST, NOW_S);
    assert!(root.trusts().verify_service(&chain, &web.id, &HOST.0, NOW_S).expect("fine").is_proved());
    // Near its end, what it signs ends with it.
    let late_s = NOW_S + 90 * DAY_S - 60;
    assert_eq!(issue::service(&by, web, &HOST, late_s).1, late_s + 60);
    assert!(by.is_valid(late_s + 60) && !by.is_valid(late_s + 61));
    // It does not pass on what it was given.
    let third = site();
    let request = third.ring.request("shop", false).expect("asked");
    assert_eq!(request.grant(&by, NOW_S, 60), Err(WarrantError::NotRoot("shop".to_owned())));
}

#[test]
fn a_warrant_is_taken_where_its_request_was_made_and_nowhere_else() {
    let (root, second) = two();
    let warrant = second.authority().warrant.expect("it has one");
    let refusal = |site: &Site, warrant: &Delegation, unix_s| match site.ring.accept(warrant.clone(), &[], unix_s) {
        Err(AcceptError::Warrant(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(refusal(&site(), &warrant, NOW_S), WarrantError::NotHere);
    assert_eq!(refusal(&root, &warrant, NOW_S), WarrantError::NotHere, "it has the authority's own key");
    let expired = WarrantError::Untrue(CertificateError::Expired);
    assert_eq!(refusal(&second, &warrant, NOW_S + 91 * DAY_S), expired);
    let other = site();
    other.ring.create_authority("shop").expect("made");
    let request = second.ring.request("shop", false).expect("asked");
    let theirs = other.signs_for(&request, DAY_S);
    assert_eq!(refusal(&second, &theirs, NOW_S), WarrantError::OtherRoot("shop".to_owned()));
    // Whoever says that the other authority's key is the root says it of certificates that are not by it.
    let forged = Delegation { root: warrant.root, ..theirs };
    assert_eq!(refusal(&second, &forged, NOW_S), WarrantError::Untrue(CertificateError::NotTrusted));
    assert_eq!(second.authority().warrant, Some(warrant), "and nothing was changed");
}

#[test]
fn a_router_asks_again_with_the_same_key_or_with_a_new_one() {
    let (root, second) = two();
    let before = second.authority().key.public();
    let same = second.ring.request("shop", false).expect("asked");
    assert_eq!(same.key, before);
    second.ring.accept(root.signs_for(&same, 99 * DAY_S), &[], NOW_S).expect("taken");
    assert_eq!(second.authority().warrant.expect("it has one").not_after_s(), NOW_S + 99 * DAY_S);
    let new = second.ring.request("shop", true).expect("asked");
    assert_ne!(new.key, before);
    assert_eq!(second.authority().key.public(), before, "until the warrant is there, the old one signs");
    second.ring.accept(root.signs_for(&new, DAY_S), &[], NOW_S).expect("taken");
    assert_eq!(second.authority().key.public(), new.key);
    // Asking twice before the answer is there gives one key, so that the answer to either is right.
    let fresh = site();
    let first = fresh.ring.request("shop", false).expect("asked");
    assert_eq!(fresh.ring.request("shop", false).expect("asked").key, first.key);
    assert!(fresh.ring.authority("shop").expect("readable").is_none(), "it signs for nobody yet");
    assert!(matches!(root.ring.request("shop", false), Err(StateError::Exists(_))));
}

#[test]
fn a_request_shows_that_its_maker_has_the_key() {
    let site = site();
    let ring = &site.ring;
    let request = ring.request("shop", false).expect("asked");
    assert_eq!(request.to_string().parse(), Ok(request.clone()));
    let stolen = Request { key: VerifyingKey([9; 32]), ..request.clone() };
    assert_eq!(stolen.to_string().parse::<Request>(), Err(WarrantError::Unsigned("request")));
    let other = Request { authority: "mall".to_owned(), ..request.clone() };
    assert_eq!(other.to_string().parse::<Request>(), Err(WarrantError::Unsigned("request")));
    let (root, _) = two();
    let mall = ring.request("mall", false).expect("asked");
    assert_eq!(mall.grant(&root.authority(), NOW_S, DAY_S), Err(WarrantError::NoKey("mall".to_owned())));
    for lifetime_s in [0, 59, LIFETIME_MAX_S + 1, u64::MAX] {
        assert_eq!(request.grant(&root.authority(), NOW_S, lifetime_s), Err(WarrantError::Lifetime));
    }
}

#[test]
fn a_service_key_lets_a_host_answer_that_does_not_have_it() {
    let (holder, host) = (site(), site());
    let key = holder.ring.create_service_key("web.shop").expect("made");
    let permit = Permit::new(&key, &HOST, NOW_S, 90 * DAY_S).expect("made");
    assert_eq!(permit.service().expect("a name"), key.service);
    host.ring.accept_permit(&permit, &HOST, NOW_S).expect("taken");
    assert_eq!(host.ring.permits().expect("readable"), std::slice::from_ref(&permit));
    let proved = TrustStore::default().verify_service(&permit.chain, &key.service, &HOST.0, NOW_S);
    assert!(proved.expect("fine").is_proved());
    let refused = |permit: &Permit, host_key, unix_s| host.ring.accept_permit(permit, &host_key, unix_s).err();
    let not_here = refused(&permit, HostPublic([8; 32]), NOW_S);
    assert!(matches!(not_here, Some(AcceptError::Warrant(WarrantError::NotHere))));
    assert!(refused(&permit, HOST, NOW_S + 91 * DAY_S).is_some(), "expired");
    let renamed = Permit { name: "mail.shop".to_owned(), ..permit.clone() };
    assert!(refused(&renamed, HOST, NOW_S).is_some(), "the key certifies another name");
    assert_eq!(host.ring.permits().expect("readable").len(), 1);
}

#[test]
fn a_warrant_is_read_as_it_was_written_and_nonsense_is_named() {
    let (_, second) = two();
    let holder = site();
    let key = holder.ring.create_service_key("web.shop").expect("made");
    let permit = Warrant::Service(Permit::new(&key, &HOST, NOW_S, DAY_S).expect("made"));
    for warrant in [Warrant::Authority(second.authority().warrant.expect("it has one")), permit] {
        let text = warrant.to_string();
        assert_eq!(text.parse(), Ok(warrant));
        let body = WARRANT.read(&text).expect("as written");
        for len in 1..body.len() {
            assert!(WARRANT.write(&body[..len]).parse::<Warrant>().is_err(), "cut at {len}");
        }
        assert!(WARRANT.write(&[&body[..], &[0]].concat()).parse::<Warrant>().is_err());
        let mut other = body.clone();
        other[0] = 2;
        let newer = WarrantError::Version { what: "warrant", version: 2 };
        assert_eq!(WARRANT.write(&other).parse::<Warrant>(), Err(newer));
        other[..2].copy_from_slice(&[1, 3]);
        assert_eq!(WARRANT.write(&other).parse::<Warrant>(), Err(WarrantError::Malformed("warrant")));
    }
    assert!(matches!("margay-join-aaaa".parse::<Warrant>(), Err(WarrantError::Text(_))));
}

#[test]
fn the_formats_are_as_written_above() {
    let key = SigningKey::generate(&mut Rng::new([1; 32]));
    let body = REQUEST.read(&Request::new("shop", &key).to_string()).expect("as written");
    assert_eq!((body[0], &body[1..33], &body[97..]), (1, &key.public().0[..], &b"\x04shop"[..]));
    let (root, second) = two();
    let warrant = Warrant::Authority(second.authority().warrant.expect("it has one"));
    let body = WARRANT.read(&warrant.to_string()).expect("as written");
    assert_eq!((&body[..2], &body[2..34]), (&[1, 1][..], &root.authority().key.public().0[..]));
    // A chain of one: 4 and 2 before 216 bytes of certificate.
    assert_eq!((&body[34..39], &body[39..45]), (&b"\x04shop"[..], &[0, 222, 1, 0, 0, 0][..]));
    assert_eq!(body.len(), 39 + 2 * (2 + 222));
}
