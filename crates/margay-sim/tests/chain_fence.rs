//! Fenced names behind boxes: a session ends where its server, or the host of one of its boxes, is the former holder of
//! a name, whoever of the chain hears of it.

mod line;

use std::time::Duration;

use line::{Line, line};
use margay_core::certificate::CertificateKind;
use margay_core::fence::{FenceNotice, Fenced};
use margay_core::key::{HostSecret, SigningKey};
use margay_core::name::Prefix;
use margay_core::rng::Rng;
use margay_sim::certificate::chain;
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{HostId, Weather};

const SECOND: Duration = Duration::from_secs(1);
const TALK: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 100_000, closes: true };
const NOTHING: Fenced = Fenced { initiated: 0, served: 0 };

/// A session through two boxes; the server holds its name with the number 5, and so does each box's host its box's.
fn fenced(seed: u64) -> (Line, SigningKey, usize) {
    let mut line = line(seed, Weather::FAIR, 2);
    let authority = line.trust_nobody_else();
    let held =
        [(line.server, line.service), (line.boxes[0], service("box-0.shop")), (line.boxes[1], service("box-1.shop"))];
    for (host, name) in held {
        line.world.host(host).sal.set_own_fence(Prefix::from(name), Some(5));
    }
    let stream = line.talk(TALK);
    line.world.run_for(2 * SECOND);
    (line, authority, stream)
}

/// That a host holds a name with a number.
fn notice(line: &mut Line, name: Prefix, holder: HostId, number: u64, authority: &SigningKey) -> FenceNotice {
    let key = HostSecret::generate(&mut Rng::new(line.world.host(holder).key_seed()));
    let shown = chain(CertificateKind::Service, name, key.public().0, authority);
    FenceNotice::new(name, number, &key, shown)
}

fn hear(line: &mut Line, host: HostId, notice: &FenceNotice) -> Fenced {
    let now = line.world.now;
    let fenced = line.world.host(host).sal.handle_fence(now, notice).expect("it counts");
    line.world.touch(host);
    line.world.run_for(2 * SECOND);
    fenced
}

#[test]
fn a_session_ends_where_its_server_is_a_former_holder() {
    let [initiated, served] = [Fenced { initiated: 1, ..NOTHING }, Fenced { served: 1, ..NOTHING }];
    for (which, ends) in [(0, NOTHING), (1, NOTHING), (2, initiated), (3, served)] {
        let (mut line, authority, stream) = fenced(3);
        let name = Prefix::from(line.service);
        let host = [line.client, line.boxes[0], line.boxes[1], line.server][which];
        let other = line.boxes[0];
        let later = notice(&mut line, name, other, 6, &authority);
        assert_eq!(hear(&mut line, host, &later), ends, "host {which} of four");
        assert_eq!(line.world.host(line.client).streams[stream].was_reset, ends != NOTHING, "host {which} of four");
    }
}

#[test]
fn a_session_ends_where_a_boxs_host_is_a_former_holder() {
    for which in 0..2 {
        let (mut line, authority, stream) = fenced(5);
        let name = Prefix::from(service(&format!("box-{which}.shop")));
        let before = [line.client, line.boxes[0]][which];
        let other = line.server;
        let later = notice(&mut line, name, other, 6, &authority);
        assert_eq!(hear(&mut line, before, &later), Fenced { initiated: 1, ..NOTHING }, "box {which}");
        assert!(line.world.host(line.client).streams[stream].was_reset, "box {which}");
    }
}

#[test]
fn a_session_lives_where_its_server_holds_the_name_anew() {
    let (mut line, authority, stream) = fenced(7);
    let name = Prefix::from(line.service);
    let server = line.server;
    let later = notice(&mut line, name, server, 6, &authority);
    for host in [line.client, line.boxes[0], line.boxes[1]] {
        for _ in 0..2 {
            assert_eq!(hear(&mut line, host, &later), NOTHING, "{host:?}");
        }
    }
    assert!(!line.world.host(line.client).streams[stream].was_reset);
}
