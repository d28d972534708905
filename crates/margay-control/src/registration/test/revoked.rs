//! Routers that may sign for the authority no longer.

use margay_core::certificate::{CertificateError, decode_chain};
use margay_core::key::VerifyingKey;

use super::*;
use crate::warrant::{self, Warrant};

/// The router that has the authority's key; one that signs by a warrant, which is stolen; and a host that has joined
/// both.
struct World {
    first: Party,
    first_at: Arc<Router>,
    stolen: Party,
    stolen_at: Arc<Router>,
    host: Party,
    homes: [Home; 2],
}

impl World {
    fn stolen_key(&self) -> VerifyingKey {
        self.stolen.keyring.authority("shop").expect("readable").expect("is there").key.public()
    }

    fn revoke(&self, at: &Party) {
        let by = self.first.keyring.authority("shop").expect("readable").expect("is there");
        let revocation = warrant::revoke(&by, self.stolen_key(), NOW_S).expect("made");
        assert!(at.store.revoke_key(&revocation, "shop", NOW_S).expect("written"));
    }

    fn is_shown_by(&self, key: &VerifyingKey) -> bool {
        is_by(&self.host.core.membership.lock(), key)
    }
}

fn is_by(chain: &[u8], key: &VerifyingKey) -> bool {
    decode_chain(chain).expect("a chain").iter().any(|certificate| certificate.issuer == *key)
}

async fn joined(host: &Party, router: &Party, at: &Router, secret: Option<TokenSecret>) -> Home {
    let authority = router.keyring.authority("shop").expect("readable").expect("made");
    let config = HomeConfig {
        router_address: at.local_address().to_string(),
        router_key: router.local.host_key.public(),
        authority: "shop".to_owned(),
        authority_key: authority.root(),
        secret,
    };
    let (store, core) = (Arc::clone(&host.store), Arc::clone(&host.core) as Arc<dyn SalControl>);
    Home::start(config, host.local.clone(), store, core, clock(), Some(Arc::default()), None)
}

async fn world() -> World {
    let (first, stolen, host) = (party(1, "router"), party(2, "stolen"), party(3, "web1"));
    let authority = first.keyring.create_authority("shop").expect("made");
    let request = stolen.keyring.request("shop", false).expect("asked");
    match request.grant(&authority, NOW_S, 3600).expect("signed") {
        Warrant::Authority(given) => drop(stolen.keyring.accept(given, &[], NOW_S).expect("taken")),
        Warrant::Service(_) => panic!("asked for an authority"),
    }
    let (first_at, stolen_at) = (first.route(2000).await, stolen.route(2000).await);
    let mut homes = Vec::new();
    for (router, at, seed) in [(&first, &first_at, 8), (&stolen, &stolen_at, 9)] {
        let secret = router.token(1, seed, vec![authority_prefix(&authority)]);
        let home = joined(&host, router, at, Some(secret)).await;
        await_phase(&home, Phase::Connected).await;
        homes.push(home);
    }
    let homes = homes.try_into().unwrap_or_else(|_| panic!("two"));
    World { first, first_at, stolen, stolen_at, host, homes }
}

#[tokio::test]
async fn a_host_that_hears_of_a_revoked_key_leaves_its_router_and_is_shown_by_the_other_ones_word() {
    let world = world().await;
    let key = world.stolen_key();
    assert!(world.is_shown_by(&key), "the router that it has joined last");
    for home in &world.homes {
        home.register(registration("web.shop", 100));
        until("registration", || state_of(home, "web.shop") == "registered").await;
    }
    let prefix = "web.shop".parse::<Name>().expect("literal").prefix();
    assert!(is_by(&world.host.core.certificates.lock()[&prefix], &key), "it has registered there last");
    world.revoke(&world.first);
    await_phase(&world.homes[1], Phase::Refused).await;
    assert!(world.homes[1].state().why.contains("taken back this router's right"), "{}", world.homes[1].state().why);
    until("a membership by the other", || !world.is_shown_by(&key)).await;
    until("a certificate by the other", || !is_by(&world.host.core.certificates.lock()[&prefix], &key)).await;
    assert_eq!(world.host.core.revoked_keys.lock()[0].key, key);
    // The next start knows it, whoever is heard then.
    world.homes[0].stop().await;
    world.homes[1].stop().await;
    world.host.core.revoked_keys.lock().clear();
    let again = joined(&world.host, &world.stolen, &world.stolen_at, None).await;
    await_phase(&again, Phase::Refused).await;
    assert_eq!(world.host.core.revoked_keys.lock().first().map(|one| one.key), Some(key));
    world.first_at.stop().await;
    world.stolen_at.stop().await;
}

#[tokio::test]
async fn a_router_that_hears_of_its_own_revocation_signs_no_more_until_it_has_a_new_key() {
    let world = world().await;
    let before = world.stolen_key();
    world.revoke(&world.stolen);
    await_phase(&world.homes[1], Phase::Refused).await;
    let own = |at: &Party| at.keyring.authority("shop").expect("readable").expect("is there");
    until("the end of its right", || own(&world.stolen).revoked.is_some()).await;
    assert!(!own(&world.stolen).is_valid(NOW_S));
    let stranger = party(4, "late");
    let secret = world.stolen.token(1, 7, vec![authority_prefix(&own(&world.stolen))]);
    let late = joined(&stranger, &world.stolen, &world.stolen_at, Some(secret)).await;
    await_phase(&late, Phase::Unreachable).await;
    assert!(late.state().why.contains("has taken back"), "{}", late.state().why);
    // The same key is not asked for again.
    let request = world.stolen.keyring.request("shop", false).expect("asked");
    assert_ne!(request.key, before);
    match request.grant(&own(&world.first), NOW_S, 3600).expect("signed") {
        Warrant::Authority(given) => drop(world.stolen.keyring.accept(given, &[], NOW_S).expect("taken")),
        Warrant::Service(_) => panic!("asked for an authority"),
    }
    assert!(own(&world.stolen).is_valid(NOW_S));
    await_phase(&late, Phase::Connected).await;
    world.first_at.stop().await;
    world.stolen_at.stop().await;
}

#[tokio::test]
async fn a_revocation_that_the_authority_has_not_signed_is_nobodys_concern() {
    let world = world().await;
    // As whoever writes into a cluster's store could put it there.
    let key = SigningKey::generate(&mut Rng::new([66; 32]));
    let other = crate::keyring::Authority { name: "shop".to_owned(), key, warrant: None, revoked: None, next: None };
    let revocation = warrant::revoke(&other, world.stolen_key(), NOW_S).expect("made");
    for at in [&world.first, &world.stolen, &world.host] {
        at.store.revoke_key(&revocation, "shop", NOW_S).expect("written");
    }
    // What is told after it has been heard.
    world.first.store.remove_member(party(9, "other").local.host_key.public().id(), NOW_S).expect("written");
    world.homes[1].register(registration("web.shop", 100));
    until("registration", || state_of(&world.homes[1], "web.shop") == "registered").await;
    let name = "web.shop".parse::<Name>().expect("literal").service_id();
    for home in &world.homes {
        home.resolve(name).await.expect("connected still");
    }
    assert!(world.host.core.revoked_keys.lock().is_empty());
    assert!(world.stolen.keyring.authority("shop").expect("readable").expect("is there").revoked.is_none());
    assert!(matches!(
        warrant::revoker(&revocation, &world.first.keyring, &world.first.store, NOW_S),
        Err(warrant::WarrantError::OtherRoot(_))
    ));
    world.first_at.stop().await;
    world.stolen_at.stop().await;
}

#[tokio::test]
async fn a_router_that_does_not_prove_that_it_is_one_is_not_heard() {
    let (posing, host) = (party(1, "posing"), party(2, "web1"));
    let invented = posing.keyring.create_authority("shop").expect("made");
    let at = posing.route(2000).await;
    let config = HomeConfig {
        router_address: at.local_address().to_string(),
        router_key: posing.local.host_key.public(),
        authority: "shop".to_owned(),
        authority_key: party(3, "true").keyring.create_authority("shop").expect("made").key.public(),
        secret: Some(posing.token(1, 9, vec![authority_prefix(&invented)])),
    };
    let (store, core) = (Arc::clone(&host.store), Arc::clone(&host.core) as Arc<dyn SalControl>);
    let home = Home::start(config, host.local.clone(), store, core, clock(), Some(Arc::default()), None);
    await_phase(&home, Phase::Refused).await;
    assert!(home.state().why.contains("does not prove that it is a router of shop"), "{}", home.state().why);
    assert!(host.core.associations.lock().is_empty() && host.core.membership.lock().is_empty());
    assert!(host.core.rules.lock().is_empty() && host.store.joined().expect("readable").is_empty());
    home.stop().await;
    at.stop().await;
}

#[tokio::test]
async fn what_others_have_seen_or_may_have_makes_nobody_a_router() {
    let (router, at, host, home) = shop().await;
    let authority = router.keyring.authority("shop").expect("readable").expect("made");
    let other = router.keyring.create_authority("lab").expect("made");
    let (own, key) = (host.local.host_key.public(), router.local.host_key.public());
    let check = |membership: &[u8], proof: &[u8]| home.shared.check_proofs(membership, proof);
    let membership = issue::membership(&authority, &own, &[], NOW_S).0;
    let proof = issue::router(&authority, &key, NOW_S).0;
    assert_eq!(check(&membership, &proof), Ok(NOW_S + issue::LIFETIME_S));
    assert_eq!(check(&membership, &[]), Err(CertificateError::Malformed), "every peer has seen the membership");
    assert_eq!(check(&[], &proof), Err(CertificateError::Malformed));
    let of_another = issue::router(&authority, &own, NOW_S).0;
    assert_eq!(check(&membership, &of_another), Err(CertificateError::WrongHost));
    let of_all = issue::service(&authority, authority_prefix(&authority), &key, NOW_S).0;
    assert_eq!(check(&membership, &of_all), Err(CertificateError::WrongPrefix), "a grant for all names");
    let late = NOW_S - issue::LIFETIME_S - 1;
    assert_eq!(check(&membership, &issue::router(&authority, &key, late).0), Err(CertificateError::Expired));
    assert_eq!(check(&issue::membership(&authority, &key, &[], NOW_S).0, &proof), Err(CertificateError::WrongHost));
    // Its own authority trusts both.
    home.shared.trust.lock().add(TrustAnchor { authority: other.block(), key: other.key.public() });
    let by_other = issue::membership(&other, &own, &[], NOW_S).0;
    assert_eq!(check(&by_other, &proof), Err(CertificateError::WrongPrefix), "a membership of another authority");

    let routers = ServiceId::of_routers(authority.block());
    let text = format!("sid:{}", margay_core::key::to_hex(&routers.0));
    home.register(registration(&text, 100));
    until("the refusal", || state_of(&home, &text) == "refused").await;
    home.stop().await;
    at.stop().await;
}

#[tokio::test]
async fn a_router_whose_proof_has_ended_is_left() {
    let (router, host) = (party(1, "router"), party(2, "web1"));
    let authority = router.keyring.create_authority("shop").expect("made");
    let listen = "127.0.0.1:0".parse().expect("literal");
    let config = RouterConfig { listen, lease_ms: 2000, heartbeat_ms: 50, cluster: None };
    let (store, core) = (Arc::clone(&router.store), Arc::clone(&router.core) as Arc<dyn SalControl>);
    // Its clock stands still: what it signs ends, and ends again.
    let at = Router::start(config, router.local.clone(), router.keyring.clone(), store, core, clock(), None);
    let at = at.await.expect("started");
    let now = Arc::new(std::sync::atomic::AtomicU64::new(NOW_S));
    let read = Arc::clone(&now);
    let config = HomeConfig {
        router_address: at.local_address().to_string(),
        router_key: router.local.host_key.public(),
        authority: "shop".to_owned(),
        authority_key: authority.key.public(),
        secret: Some(router.token(1, 9, vec![authority_prefix(&authority)])),
    };
    let (store, core) = (Arc::clone(&host.store), Arc::clone(&host.core) as Arc<dyn SalControl>);
    let clock = Clock::from_fn(move || read.load(std::sync::atomic::Ordering::Relaxed));
    let home = Home::start(config, host.local.clone(), store, core, clock, Some(Arc::default()), None);
    await_phase(&home, Phase::Connected).await;
    now.fetch_add(issue::LIFETIME_S + 1, std::sync::atomic::Ordering::Relaxed);
    await_phase(&home, Phase::Refused).await;
    assert!(home.state().why.contains("has expired"), "{}", home.state().why);
    home.stop().await;
    at.stop().await;
}
