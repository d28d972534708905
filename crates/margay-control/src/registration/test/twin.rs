//! One key in two places: the host that was there before stays, also where it says nothing but that it lives.

use super::*;

/// A copy of a host, on a boot of its own.
fn copy_of(host: &Party) -> Party {
    let mut copy = party(99, "copy");
    copy.local.host_key = host.local.host_key.clone();
    copy
}

#[tokio::test]
async fn the_later_of_two_hosts_with_one_key_is_kept_out_until_the_elder_goes() {
    let (router, host) = (party(1, "router"), party(2, "web1"));
    let authority = router.keyring.create_authority("shop").expect("made");
    let at = router.route(2000).await;
    let secret = router.token(1, 9, vec![authority_prefix(&authority)]);
    let home = host.join(&router, &at, Some(secret));
    await_phase(&home, Phase::Connected).await;
    let (copy, mut phases) = (copy_of(&host), home.changed());
    phases.mark_unchanged();
    let later = copy.join(&router, &at, None);
    await_phase(&later, Phase::Refused).await;
    let said = later.state().why;
    assert!(said.contains("was there before") && said.contains("host.key"), "{said}");
    assert_eq!(phases.has_changed().ok(), Some(false), "the elder has noticed nothing");
    assert_eq!((at.host_count(), home.state().phase), (1, Phase::Connected));
    later.stop().await;
    // It is gone, without a word: the same machine, which has booted anew, or a copy that nobody else uses.
    home.stop().await;
    let alone = copy.join(&router, &at, None);
    await_phase(&alone, Phase::Connected).await;
    alone.stop().await;
    at.stop().await;
}
