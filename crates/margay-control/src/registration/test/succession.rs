//! An authority's key is followed by another one.

use std::sync::atomic::{AtomicU64, Ordering};

use margay_core::certificate::decode_chain;
use margay_core::key::VerifyingKey;

use super::*;
use crate::lineage::Lineage;
use crate::store::Kept;
use crate::warrant;

const OVERLAP_S: u64 = 1000;

/// A clock that a test turns.
fn turned() -> (Arc<AtomicU64>, Clock) {
    let now = Arc::new(AtomicU64::new(NOW_S));
    let read = Arc::clone(&now);
    (now, Clock::from_fn(move || read.load(Ordering::Relaxed)))
}

struct World {
    router: Party,
    at: Arc<Router>,
    now: Arc<AtomicU64>,
    clock: Clock,
    first: VerifyingKey,
}

impl World {
    async fn new() -> Self {
        let (router, (now, clock)) = (party(1, "router"), turned());
        let first = router.keyring.create_authority("shop").expect("made").key.public();
        let config = RouterConfig {
            listen: "127.0.0.1:0".parse().expect("literal"),
            lease_ms: 2000,
            heartbeat_ms: 50,
            cluster: None,
        };
        let (store, core) = (Arc::clone(&router.store), Arc::clone(&router.core) as Arc<dyn SalControl>);
        let at = Router::start(config, router.local.clone(), router.keyring.clone(), store, core, clock.clone(), None);
        let at = at.await.expect("started");
        Self { router, at, now, clock, first }
    }

    /// A host that knows the authority by the first key, as an old token says.
    async fn host(&self, host: &Party, is_new: bool) -> Home {
        let authority = self.router.keyring.authority("shop").expect("readable").expect("made");
        let secret = is_new.then(|| self.router.token(1, host.local.boot_id[0], vec![authority_prefix(&authority)]));
        let config = HomeConfig {
            router_address: self.at.local_address().to_string(),
            router_key: self.router.local.host_key.public(),
            authority: "shop".to_owned(),
            authority_key: self.first,
            secret,
        };
        let (store, core) = (Arc::clone(&host.store), Arc::clone(&host.core) as Arc<dyn SalControl>);
        Home::start(config, host.local.clone(), store, core, self.clock.clone(), Some(Arc::default()), None)
    }

    fn succeed(&self) -> VerifyingKey {
        let now = self.clock.unix_s();
        let made = self.router.keyring.succeed("shop", now, OVERLAP_S).expect("made");
        assert_eq!(self.router.store.keep_succession(&made, "shop", now).expect("written"), Kept::New);
        made.new
    }

    fn turn(&self, s: u64) {
        self.now.fetch_add(s, Ordering::Relaxed);
        self.router.keyring.promote(self.clock.unix_s(), None).expect("written");
    }

    /// Whether a host would believe the membership that another one shows now.
    fn believes(&self, host: &Party, other: &Party) -> bool {
        let shown = other.core.membership.lock().clone();
        let key = other.local.host_key.public().0;
        host.core.trust.lock().verify_member(&shown, &key, self.clock.unix_s()).is_ok()
    }

    fn line(&self, host: &Party) -> VerifyingKey {
        Lineage::of(&host.store, authority_block("shop"), self.first).expect("readable").last()
    }
}

#[tokio::test]
async fn a_host_that_cannot_read_the_authoritys_keys_believes_no_router() {
    let world = World::new().await;
    let host = party(2, "one");
    let home = world.host(&host, true).await;
    await_phase(&home, Phase::Connected).await;
    home.stop().await;
    crate::store::tests::damage(&host.store);
    let home = world.host(&host, false).await;
    await_phase(&home, Phase::Unreachable).await;
    assert!(home.state().why.contains("damaged"), "{}", home.state().why);
}

fn root_of(party: &Party) -> VerifyingKey {
    decode_chain(&party.core.membership.lock()).expect("a chain")[0].issuer
}

#[tokio::test]
async fn hosts_believe_each_other_at_every_moment_while_one_key_follows_another() {
    let world = World::new().await;
    let before = world.router.keyring.authority("shop").expect("readable").expect("is there");
    let (one, two) = (party(2, "one"), party(3, "two"));
    let homes = [world.host(&one, true).await, world.host(&two, true).await];
    for home in &homes {
        await_phase(home, Phase::Connected).await;
    }
    homes[0].register(registration("web.shop", 100));
    until("registration", || state_of(&homes[0], "web.shop") == "registered").await;
    let prefix = "web.shop".parse::<Name>().expect("literal").prefix();
    let both = || world.believes(&one, &two) && world.believes(&two, &one);
    let second = world.succeed();
    until("the news", || [&one, &two].iter().all(|host| world.line(host) == second)).await;
    // What they have heard before is looked at before an answer.
    for home in &homes {
        home.resolve(prefix.id).await.expect("answered");
    }
    assert!(both() && root_of(&one) == world.first, "nothing is signed by it yet");
    world.turn(OVERLAP_S / 2);
    assert!(both(), "one has renewed perhaps, the other has not");
    until("memberships by the new key", || [&one, &two].iter().all(|host| root_of(host) == second)).await;
    let by = || decode_chain(&one.core.certificates.lock()[&prefix]).expect("a chain")[0].issuer;
    until("a certificate by the new key", || by() == second).await;
    assert!(both());
    // What the old key still signs, or whoever has a copy of it.
    let by_old = || issue::membership(&before, &one.local.host_key.public(), &[], world.clock.unix_s()).0;
    let shown = std::mem::replace(&mut *one.core.membership.lock(), by_old());
    assert!(both());
    world.turn(OVERLAP_S / 2 + 1);
    assert!(!world.believes(&two, &one), "the old key is trusted no more");
    *one.core.membership.lock() = shown;
    assert!(both());
    world.at.stop().await;
}

#[tokio::test]
async fn who_was_off_for_all_of_it_follows_two_keys_later_and_one_with_an_old_token_does() {
    let world = World::new().await;
    let (away, late) = (party(2, "away"), party(3, "late"));
    let home = world.host(&away, true).await;
    await_phase(&home, Phase::Connected).await;
    home.stop().await;
    let mut last = world.first;
    for _ in 0..2 {
        last = world.succeed();
        world.turn(OVERLAP_S / 2);
        world.turn(OVERLAP_S);
    }
    assert_eq!(world.line(&away), world.first, "it has heard nothing");
    for (host, is_new) in [(&away, false), (&late, true)] {
        let home = world.host(host, is_new).await;
        await_phase(&home, Phase::Connected).await;
        // The router signs by it already, and tells of it when it has looked at its store.
        until("the last key", || (world.line(host), root_of(host)) == (last, last)).await;
        home.stop().await;
    }
    assert!(world.believes(&away, &late) && world.believes(&late, &away));
    // The next start knows it before any router is heard.
    *away.core.trust.lock() = TrustStore::default();
    world.at.stop().await;
    let _again = world.host(&away, false).await;
    assert!(world.believes(&away, &late));
}

#[tokio::test]
async fn a_key_that_was_lost_is_left_at_once_and_who_has_not_heard_of_the_next_one_needs_a_token() {
    let world = World::new().await;
    let (here, away) = (party(2, "here"), party(3, "away"));
    let home = world.host(&away, true).await;
    await_phase(&home, Phase::Connected).await;
    home.stop().await;
    let home = world.host(&here, true).await;
    await_phase(&home, Phase::Connected).await;
    let second = world.succeed();
    until("the news", || world.line(&here) == second).await;
    let by = world.router.keyring.authority("shop").expect("readable").expect("is there");
    let lost = warrant::revoke(&by, world.first, NOW_S).expect("by the one that follows");
    assert_eq!((lost.signer, lost.key), (second, world.first));
    world.router.keyring.promote(NOW_S, Some("shop")).expect("written");
    assert!(world.router.store.revoke_key(&lost, "shop", NOW_S).expect("written"));
    until("a membership by the new key", || root_of(&here) == second).await;
    let thief = crate::keyring::Authority { next: None, ..by };
    let (forged, _) = issue::membership(&thief, &away.local.host_key.public(), &[], NOW_S);
    *away.core.membership.lock() = forged;
    until("the end of the old key", || !world.believes(&here, &away)).await;
    let home = world.host(&away, false).await;
    await_phase(&home, Phase::Refused).await;
    assert!(home.state().why.contains("needs a new join token"), "{}", home.state().why);
    assert_eq!(world.line(&away), world.first);
    world.at.stop().await;
}

#[tokio::test]
async fn a_second_key_after_the_same_one_is_nobodys() {
    let world = World::new().await;
    let host = party(2, "one");
    let home = world.host(&host, true).await;
    await_phase(&home, Phase::Connected).await;
    let second = world.succeed();
    until("the news", || world.line(&host) == second).await;
    let by = world.router.keyring.authority("shop").expect("readable").expect("is there");
    let third = SigningKey::generate(&mut Rng::new([55; 32]));
    let rival = Succession::new(authority_block("shop"), &by.key, &third, NOW_S, NOW_S + 9);
    assert_eq!(host.store.keep_succession(&rival, "shop", NOW_S).expect("readable"), Kept::Rival);
    assert_eq!(world.line(&host), second);
    assert!(world.router.keyring.succeed("shop", NOW_S, OVERLAP_S).is_err(), "one at a time");
    world.at.stop().await;
}
