//! Fenced names: who watches one hears from its holder that it is its own.

use margay_core::fence::FenceNotice;
use margay_core::key::HostId;
use tokio::time::Instant;

use super::*;

fn fenced(name: &str) -> Registration {
    Registration { exclusive: true, fenced: true, ..registration(name, 100) }
}

fn name() -> Prefix {
    "db.shop".parse().expect("literal")
}

async fn hold(home: &Home) {
    home.register(fenced("db.shop"));
    until("registration", || state_of(home, "db.shop") == "registered").await;
}

/// The notice that was heard last.
fn heard(home: &Home) -> Option<FenceNotice> {
    let watched = home.watched(&name())?;
    FenceNotice::decode(watched.first()?.fence.as_ref()?).ok()
}

/// Waits until a watcher has heard that this host is the holder.
async fn holder_heard(home: &Home, holder: &Party) -> FenceNotice {
    until("the notice", || heard(home).is_some_and(|notice| notice.host_key == holder.local.host_key.public())).await;
    heard(home).expect("it was heard")
}

#[tokio::test]
async fn who_watches_a_fenced_name_hears_its_holders_own_word() {
    let (router, at, host, home) = shop().await;
    let (_other, other) = second(&router, &at).await;
    other.watch(name(), Watcher::Absences);
    until("nobody", || other.watched(&name()) == Some(Vec::new())).await;
    hold(&home).await;
    let notice = holder_heard(&other, &host).await;
    assert!(notice.is_signed() && notice.prefix == name());
    assert_eq!(notice.number, NOW_S, "no name was given before");
    let mut trust = TrustStore::default();
    trust.add(TrustAnchor { authority: authority_block("shop"), key: home.config().authority_key });
    let proved = trust.verify_prefix(&notice.chain, &name(), &notice.host_key.0, NOW_S);
    assert!(proved.is_ok(), "{proved:?}");
    until("the tenure", || home.tenure(&name()).is_some_and(|tenure| tenure.number == notice.number)).await;
    assert_eq!(other.tenure(&name()), None);
    // The same registration again, on other terms: it is held with the same number.
    home.register(Registration { weight: 7, ..fenced("db.shop") });
    until("the weight", || other.watched(&name()).is_some_and(|heard| heard[0].weight == 7)).await;
    assert_eq!(holder_heard(&other, &host).await.number, notice.number);
    // Who asks once is not told.
    let resolved = other.resolve(name().id).await.expect("answered");
    assert_eq!((resolved.len(), &resolved[0].fence), (1, &None));
    at.stop().await;
}

#[tokio::test]
async fn a_later_holder_has_a_higher_number_and_the_former_one_hears_of_it() {
    let (router, at, former, first) = shop().await;
    let (later, second) = second(&router, &at).await;
    second.watch(name(), Watcher::Absences);
    hold(&first).await;
    let before = holder_heard(&second, &former).await;
    second.register(fenced("db.shop"));
    until("the refusal", || state_of(&second, "db.shop") == "refused").await;
    let left = Instant::now();
    first.stop().await;
    let mut why = String::new();
    until("the takeover", || {
        let state = second.registration(&name()).expect("known");
        why = if state.state == "refused" { state.why.clone() } else { std::mem::take(&mut why) };
        state.state == "registered"
    })
    .await;
    // Its stream has ended without a word that it serves the name no longer.
    assert!(left.elapsed() >= Duration::from_millis(1500) && why.contains("has not been heard"), "{why}");
    let after = holder_heard(&second, &later).await;
    assert!(after.number > before.number);
    let again = former.join(&router, &at, None);
    await_phase(&again, Phase::Connected).await;
    again.watch(name(), Watcher::Absences);
    again.register(fenced("db.shop"));
    until("the refusal", || state_of(&again, "db.shop") == "refused").await;
    assert_eq!(holder_heard(&again, &later).await, after);
    // Who says that it leaves is not waited for.
    let withdrawn = Instant::now();
    second.withdraw(name()).expect("registered").await;
    until("the return", || state_of(&again, "db.shop") == "registered").await;
    assert!(withdrawn.elapsed() < Duration::from_millis(1500));
    assert!(holder_heard(&again, &former).await.number > after.number);
    at.stop().await;
}

#[tokio::test]
async fn a_router_that_starts_again_waits_for_the_holder() {
    let (router, at, former, first) = shop().await;
    let (_other, second) = second(&router, &at).await;
    hold(&first).await;
    let number = first.tenure(&name()).map(|tenure| tenure.number);
    first.stop().await;
    second.stop().await;
    at.stop().await;
    let at = router.route(60_000).await;
    let roll = &at.shared.roll;
    let other = HostId([9; 16]);
    let refused = roll.lock().check_others(other, &name(), "db.shop", 0, true);
    assert!(matches!(refused, Err(RollError::Kept { .. })), "{refused:?}");
    let again = former.join(&router, &at, None);
    await_phase(&again, Phase::Connected).await;
    hold(&again).await;
    until("a higher number", || again.tenure(&name()).map(|tenure| tenure.number) > number).await;
    at.stop().await;
}

#[tokio::test]
async fn the_routers_own_host_says_so_as_well() {
    let (router, at, _host, home) = shop().await;
    home.watch(name(), Watcher::Absences);
    let host = router.local.host_key.public().id();
    let own = own_service(host, "router", Instance::address_of_teller(54_324), &"db.shop".parse().expect("literal"));
    let own = OwnService { exclusive: true, fenced: true, ..own };
    at.admit_own(own.clone()).expect("nobody has it");
    at.set_own(vec![own.clone()]);
    let notice = holder_heard(&home, &router).await;
    assert!(notice.is_signed());
    home.register(fenced("db.shop"));
    until("the refusal", || state_of(&home, "db.shop") == "refused").await;
    at.set_own(vec![own]);
    at.set_own(Vec::new());
    until("the takeover", || state_of(&home, "db.shop") == "registered").await;
    until("a higher number", || home.tenure(&name()).is_some_and(|tenure| tenure.number > notice.number)).await;
    at.stop().await;
}

#[tokio::test]
async fn a_name_that_several_hosts_may_serve_is_not_fenced() {
    let (_router, at, _host, home) = shop().await;
    home.register(Registration { exclusive: false, ..fenced("db.shop") });
    until("the refusal", || state_of(&home, "db.shop") == "refused").await;
    assert!(home.registration(&name()).expect("known").why.contains("cannot be fenced"));
    assert_eq!(at.instances(), []);
    at.stop().await;
}
