//! Fenced names in virtual time: who was bound to a former holder learns it at once, by nobody's word but the present
//! holder's.

mod shop;

use std::time::Duration;

use margay_core::certificate::{CertificateKind, TrustAnchor};
use margay_core::fence::{FenceError, FenceNotice, Fenced};
use margay_core::key::{HostSecret, SigningKey};
use margay_core::name::Prefix;
use margay_core::rng::Rng;
use margay_core::{Event, RemoveReason};
use margay_sim::certificate::chain;
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{HostId, Weather};
use shop::{Shop, shop};

const SECOND: Duration = Duration::from_secs(1);
const NAME: &str = "db.shop";
const NOTHING: Fenced = Fenced { initiated: 0, served: 0 };

fn name() -> Prefix {
    service(NAME).into()
}

fn authority() -> SigningKey {
    SigningKey::generate(&mut Rng::new([77; 32]))
}

fn key_of(shop: &mut Shop, host: HostId) -> HostSecret {
    HostSecret::generate(&mut Rng::new(shop.world.host(host).key_seed()))
}

/// That a host holds the name with a number.
fn notice(shop: &mut Shop, holder: HostId, number: u64) -> FenceNotice {
    let key = key_of(shop, holder);
    let chain = chain(CertificateKind::Service, name(), key.public().0, &authority());
    FenceNotice::new(name(), number, &key, chain)
}

/// A shop whose authority the client trusts; the first instance serves the name, with a number.
fn fenced(seed: u64, number: Option<u64>) -> Shop {
    let mut shop = shop(seed, Weather::FAIR);
    for host in [shop.client, shop.instances[0], shop.instances[1]] {
        let anchor = TrustAnchor { authority: name().id.authority(), key: authority().public() };
        shop.world.host(host).sal.add_trust_anchor(anchor);
    }
    let first = shop.instances[0];
    serve(&mut shop, first, number);
    shop
}

fn serve(shop: &mut Shop, host: HostId, number: Option<u64>) {
    let router = shop.router;
    shop.world.publish_streams(router, host, NAME, Plan::LISTEN);
    let key = key_of(shop, host).public().0;
    let sal = &mut shop.world.host(host).sal;
    sal.set_service_certificate(name(), chain(CertificateKind::Service, name(), key, &authority()));
    sal.set_own_fence(name(), number);
}

fn connect(shop: &mut Shop) -> usize {
    let client = shop.client;
    let stream = shop.world.connect_stream(client, NAME, Plan::LISTEN);
    shop.world.run_for(SECOND);
    stream
}

fn hear(shop: &mut Shop, host: HostId, notice: &FenceNotice) -> Result<Fenced, FenceError> {
    let now = shop.world.now;
    let heard = shop.world.host(host).sal.handle_fence(now, notice);
    shop.world.touch(host);
    shop.world.run_for(SECOND);
    heard
}

fn ends(shop: &mut Shop, host: HostId) -> Vec<RemoveReason> {
    let reason = |event: &Event| match event {
        Event::FlowClosed { reason, .. } => Some(*reason),
        _ => None,
    };
    shop.world.host(host).events.iter().filter_map(reason).collect()
}

#[test]
fn both_ends_of_a_connection_to_the_former_holder_are_told() {
    for number in [Some(5), None] {
        let mut shop = fenced(1, number);
        let [first, second] = shop.instances;
        let stream = connect(&mut shop);
        let client = shop.client;
        let later = notice(&mut shop, second, 6);
        assert_eq!(hear(&mut shop, client, &later), Ok(Fenced { initiated: 1, served: 0 }));
        assert!(shop.world.host(client).streams[stream].was_reset);
        assert_eq!([client, first].map(|host| ends(&mut shop, host)), [[RemoveReason::Elsewhere]; 2]);
    }
}

#[test]
fn a_former_holder_that_cannot_reach_its_clients_ends_its_own_side() {
    let mut shop = fenced(2, Some(5));
    let [first, second] = shop.instances;
    connect(&mut shop);
    let later = notice(&mut shop, second, 6);
    assert_eq!(hear(&mut shop, first, &later), Ok(Fenced { initiated: 0, served: 1 }));
    assert_eq!(ends(&mut shop, first), [RemoveReason::Elsewhere]);
}

#[test]
fn a_notice_of_an_earlier_holder_ends_nothing() {
    let mut shop = fenced(3, Some(6));
    let [_, second] = shop.instances;
    let stream = connect(&mut shop);
    let client = shop.client;
    let earlier = notice(&mut shop, second, 5);
    assert_eq!(hear(&mut shop, client, &earlier), Ok(NOTHING), "the server has said a later number");
    assert!(!shop.world.host(client).streams[stream].was_reset);
    // Nor does one that is signed by nobody who may.
    let mut forged = notice(&mut shop, second, 7);
    forged.chain.clear();
    assert!(hear(&mut shop, client, &forged).is_err());
    assert!(!shop.world.host(client).streams[stream].was_reset);
}

#[test]
fn a_former_holder_that_answers_still_is_not_connected_to() {
    let mut shop = fenced(4, Some(6));
    let client = shop.client;
    let [first, second] = shop.instances;
    connect(&mut shop);
    let present = notice(&mut shop, first, 6);
    assert_eq!(hear(&mut shop, client, &present), Ok(NOTHING));
    // It comes back, and whoever sends first packets has not heard.
    serve(&mut shop, second, Some(5));
    let before = shop.world.host(client).streams.len();
    for _ in 0..8 {
        connect(&mut shop);
    }
    let refused = |event: &Event| matches!(event, Event::ConnectFailed { why, .. } if why.contains("is held by"));
    let host = shop.world.host(client);
    let failed = host.events.iter().filter(|event| refused(event)).count();
    assert!((1..8).contains(&failed), "{failed} of 8: half of them, more or less, went to each");
    let reset = host.streams[before..].iter().filter(|stream| stream.was_reset).count();
    assert_eq!(reset, failed, "a program learns of it at once, and those with the holder go on");
}
