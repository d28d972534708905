//! Which sessions go through boxes, as hosts hear it.

use margay_core::key::SigningKey;
use margay_core::rng::Rng;

use super::*;
use crate::api::v1::PolicyChain;
use crate::chains::{ChainRules, SignedChains};
use crate::keyring::Authority;
use crate::store::{Row, SharedTable};
use crate::warrant::{Request, Warrant, revoke};

const NOW_MS: u64 = NOW_S * 1000;

fn rules(names: &[&str]) -> ChainRules {
    let chain = |name: &&str| PolicyChain {
        name: (*name).to_owned(),
        services: format!("{name}.shop"),
        boxes: vec!["fw.shop".to_owned()],
        ..PolicyChain::default()
    };
    ChainRules { chains: names.iter().map(chain).collect(), required: Vec::new() }
}

fn authority(router: &Party) -> Authority {
    router.keyring.authority("shop").expect("readable").expect("made")
}

/// As `margay policy apply` does.
fn apply(router: &Party, by: &Authority, names: &[&str], ms: u64) {
    let signed = SignedChains::sign(by, &rules(names), None, ms).expect("signed");
    assert!(router.store.keep_chains(&signed, "shop", NOW_S, |_| true).expect("written"));
}

/// A router that lies tells whatever it likes.
fn tell(router: &Party, signed: &SignedChains) {
    let row: Row = (SharedTable::Chains, signed.authority.to_vec(), Some(signed.encode()));
    router.store.pin(&[row]).expect("written");
}

/// Names of the chains that a host goes by.
fn kept(host: &Party) -> Vec<String> {
    let all = host.store.chains().expect("readable");
    all.iter().flat_map(|signed| signed.rules().expect("known").chains).map(|chain| chain.name).collect()
}

#[tokio::test]
async fn a_host_hears_of_chains_when_it_joins_and_whenever_they_change_and_keeps_them() {
    let (router, at, host, home) = shop().await;
    apply(&router, &authority(&router), &["web"], NOW_MS);
    until("the first chains", || kept(&host) == ["web"]).await;
    apply(&router, &authority(&router), &["web", "mail"], NOW_MS + 1);
    until("other chains", || kept(&host) == ["web", "mail"]).await;
    home.stop().await;
    assert_eq!(kept(&host), ["web", "mail"], "without a router, too");
    let late = party(3, "late");
    let secret = router.token(1, 8, Vec::new());
    let home = late.join(&router, &at, Some(secret));
    until("the chains of one that comes later", || kept(&late) == ["web", "mail"]).await;
    apply(&router, &authority(&router), &[], NOW_MS + 2);
    until("no chains any more", || kept(&late).is_empty()).await;
    home.stop().await;
    at.stop().await;
}

#[tokio::test]
async fn a_host_takes_chains_from_nobody_but_the_authority() {
    let (router, at, host, home) = shop().await;
    let own = authority(&router);
    let posing = party(7, "posing").keyring.create_authority("shop").expect("made");
    let sign = |by: &Authority, name: &str, ms| SignedChains::sign(by, &rules(&[name]), None, ms).expect("signed");
    for bad in [sign(&posing, "posing", NOW_MS + 10), sign(&own, "ahead", NOW_MS + 3 * 86_400_000)] {
        tell(&router, &bad);
        until("the router's looking", || at.shared.news.borrow().chains == [bad.clone()]).await;
        for name in ["web.shop", "mail.shop"] {
            home.register(registration(name, 100));
            until("what is told with it", || state_of(&home, name) == "registered").await;
        }
    }
    // Of what it had taken, this would not be the later one.
    tell(&router, &sign(&own, "web", NOW_MS));
    until("the authority's word", || kept(&host) == ["web"]).await;
    assert_eq!(home.state().phase, Phase::Connected, "the rest of what the router says counts");
    home.stop().await;
    at.stop().await;
}

#[tokio::test]
async fn a_routers_key_replaces_no_chains_of_the_authoritys_own_key() {
    let (router, at, host, home) = shop().await;
    let own = authority(&router);
    apply(&router, &own, &["web"], NOW_MS);
    until("the authority's word", || kept(&host) == ["web"]).await;
    let key = SigningKey::generate(&mut Rng::new([77; 32]));
    let granted = Request::new("shop", &key).grant(&own, NOW_S, 3600).expect("granted");
    let Warrant::Authority(warrant) = granted else { panic!("it is an authority's") };
    let stolen = Authority { key, warrant: Some(warrant), ..own.clone() };
    let empty = SignedChains::sign(&stolen, &rules(&[]), None, NOW_MS + 1000).expect("signed");
    tell(&router, &empty);
    until("the router's looking", || at.shared.news.borrow().chains == [empty.clone()]).await;
    home.register(registration("web.shop", 100));
    until("what is told with it", || state_of(&home, "web.shop") == "registered").await;
    assert_eq!(kept(&host), ["web"]);
    tell(&router, &SignedChains::sign(&own, &rules(&["mail"]), None, NOW_MS + 2000).expect("signed"));
    until("the authority's next word", || kept(&host) == ["mail"]).await;
    home.stop().await;
    at.stop().await;
}

/// A router whose right to sign has ended dates chains back to when it had it, and ahead of all that others sign.
#[tokio::test]
async fn a_router_that_may_sign_no_longer_signs_nothing_by_another_date() {
    let (router, at, host, home) = shop().await;
    let own = authority(&router);
    let key = SigningKey::generate(&mut Rng::new([77; 32]));
    let granted = Request::new("shop", &key).grant(&own, NOW_S - 7200, 3600).expect("granted");
    let Warrant::Authority(warrant) = granted else { panic!("it is an authority's") };
    let former = Authority { key: key.clone(), warrant: Some(warrant), ..own.clone() };
    let sign = |by: &Authority, name: &str, ms| SignedChains::sign(by, &rules(&[name]), None, ms).expect("signed");
    let dated_back = sign(&former, "back", NOW_MS - 5_400_000);
    tell(&router, &dated_back);
    // It closes names, as where it was known before its end, and gives way to whatever counts.
    until("what has ended", || kept(&host) == ["back"]).await;

    let granted = Request::new("shop", &key).grant(&own, NOW_S, 3600).expect("granted");
    let Warrant::Authority(warrant) = granted else { panic!("it is an authority's") };
    let stolen = Authority { key: key.clone(), warrant: Some(warrant), ..own.clone() };
    tell(&router, &sign(&stolen, "mail", NOW_MS + 3_000_000));
    until("what it may sign", || kept(&host) == ["mail"]).await;
    let revocation = revoke(&own, key.public(), NOW_S).expect("made");
    assert!(router.store.revoke_key(&revocation, "shop", NOW_S).expect("written"));
    tell(&router, &sign(&own, "web", NOW_MS));
    until("the authority's word, which has an earlier date", || kept(&host) == ["web"]).await;
    home.stop().await;
    at.stop().await;
}
