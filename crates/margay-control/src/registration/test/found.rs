//! A router that is not where it is configured, and was found elsewhere.

use std::net::SocketAddr;

use tokio::net::TcpListener;

use super::*;

/// A host whose configured address leads nowhere.
fn astray(router: &Party, host: &Party, secret: Option<TokenSecret>) -> Home {
    let authority = router.keyring.authority("shop").expect("readable").expect("made");
    let config = HomeConfig {
        router_address: "127.0.0.1:1".to_owned(),
        router_key: router.local.host_key.public(),
        authority: "shop".to_owned(),
        authority_key: authority.key.public(),
        secret,
    };
    let (store, core) = (Arc::clone(&host.store), Arc::clone(&host.core) as Arc<dyn SalControl>);
    Home::start(config, host.local.clone(), store, core, clock(), Some(Arc::default()), None)
}

/// A stranger that poses as the router, and one that says nothing.
async fn strangers() -> (Party, Arc<Router>, TcpListener) {
    let stranger = party(8, "stranger");
    stranger.keyring.create_authority("shop").expect("made");
    let at = stranger.route(60_000).await;
    (stranger, at, TcpListener::bind("127.0.0.1:0").await.expect("a socket"))
}

#[tokio::test]
async fn a_host_joins_where_its_router_was_found_and_no_stranger_keeps_it_from_that() {
    let (router, host) = (party(1, "router"), party(2, "web1"));
    let authority = router.keyring.create_authority("shop").expect("made");
    let at = router.route(60_000).await;
    let (stranger, pretender, mute) = strangers().await;
    let secret = router.token(1, 9, vec![authority_prefix(&authority)]);
    let home = astray(&router, &host, Some(secret));
    await_phase(&home, Phase::Unreachable).await;
    home.found(pretender.local_address());
    home.found(mute.local_addr().expect("bound"));
    home.found(at.local_address());
    await_phase(&home, Phase::Connected).await;
    assert_eq!(home.found_at(), Some(at.local_address()));
    assert_eq!((at.host_count(), pretender.host_count()), (1, 0));
    assert!(stranger.core.associations.lock().is_empty(), "the stranger has learned nothing");
    let joined = host.store.joined().expect("readable");
    assert_eq!(joined[0].router_address, "127.0.0.1:1", "what was configured is what is remembered");
    home.stop().await;
    at.stop().await;
}

#[tokio::test]
async fn what_was_found_is_tried_first_when_the_stream_breaks_and_then_what_is_configured() {
    let (router, at, host, home) = shop().await;
    home.stop().await;
    let home = astray(&router, &host, None);
    home.found(at.local_address());
    await_phase(&home, Phase::Connected).await;
    let listen = at.local_address();
    at.stop().await;
    let mut changed = home.changed();
    let tried = changed.wait_for(|state| state.why.starts_with("127.0.0.1:1:"));
    timeout(LIMIT, tried).await.unwrap_or_else(|_| panic!("it is {:?}", home.state())).expect("it lives");
    assert_eq!(home.found_at(), None);
    let again = SocketAddr::new(listen.ip(), listen.port());
    let config = RouterConfig { listen: again, lease_ms: 60_000, heartbeat_ms: 15_000, cluster: None };
    let (store, core) = (Arc::clone(&router.store), Arc::clone(&router.core) as Arc<dyn SalControl>);
    let back = Router::start(config, router.local.clone(), router.keyring.clone(), store, core, clock(), None).await;
    let back = back.expect("started");
    home.found(again);
    await_phase(&home, Phase::Connected).await;
    assert_eq!(home.found_at(), Some(again));
    home.stop().await;
    back.stop().await;
}
