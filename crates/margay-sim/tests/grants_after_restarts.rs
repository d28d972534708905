//! Connections that kernels set up by themselves while agents start again, in virtual time.

#[path = "granted/mod.rs"]
mod granted;

use std::time::Duration;

use margay_core::handover::HandoverRecord;
use margay_core::stack_rule::StackRule;
use margay_core::{Cipher, Input, Ranges, Why};
use margay_sim::host::Start;
use margay_sim::world::service;
use margay_sim::{HostId, World};

use granted::{ANSWER, ASK, CHAT, NAME, SECOND, STEP, floor, shop, slow};

fn start_again(world: &mut World, host: HostId, kept: &[u8], records: &[HandoverRecord], rules: Vec<StackRule>) {
    let now = world.now;
    let old = world.host(host);
    let (streams, listeners) = (std::mem::take(&mut old.streams), std::mem::take(&mut old.listeners));
    let (kernel, grants) = (old.cache.kernel.take(), std::mem::take(&mut old.cache.grants));
    let (address, key_seed) = (old.address, old.key_seed());
    world.start_host(host, address, Start { key_seed, epoch: 2, boot: 1, router: false, ranges: Ranges::USUAL });
    let new = world.host(host);
    new.set_secure(&[Cipher::Aes256Gcm], false);
    new.sal.set_stack_rules(now, rules);
    (new.streams, new.listeners, new.cache.kernel) = (streams, listeners, kernel);
    new.sal.take_up_associations(now, kept).expect("kept whole");
    records.iter().for_each(|record| new.sal.adopt_flow(now, record).expect("adopted"));
    new.set_direct(now, true);
    assert!(grants.values().all(|grant| new.sal.adopt_grant(now, grant)));
    let kernel = new.cache.kernel.as_mut().expect("a kernel");
    kernel.forget_grants();
    for (flow, app, wire) in kernel.entries() {
        new.sal.handle(now, Input::Opened { flow, app: &app });
        assert!(new.sal.adopt_direct(now, flow, 1, &wire), "{flow:?}");
    }
    new.cache.grants = grants;
    new.sal.forget_superseded();
    world.touch(host);
}

#[test]
fn an_instance_whose_agent_starts_again_takes_the_clients_word_for_the_path() {
    let mut shop = shop(22, slow(2), ANSWER);
    shop.connect_often(220, ASK);
    shop.world.run_for(20 * SECOND);
    for server in shop.servers {
        let kept = shop.world.hosts[server.0].sal.keep_associations();
        start_again(&mut shop.world, server, &kept, &[], Vec::new());
        let listeners = std::mem::take(&mut shop.world.host(server).listeners);
        listeners.into_iter().for_each(|(port, plan)| {
            shop.world.host(server).serve_streams(service(NAME), port, plan).expect("room");
        });
    }
    let (taken, opened) = shop.set_up();
    shop.connect_often(400, ASK);
    let (taken_now, opened_now) = shop.set_up();
    assert!(taken_now - taken > 150, "{}", taken_now - taken);
    assert!((0..2).all(|at| opened_now[at] > opened[at] + 10), "{opened_now:?}");
}

#[test]
fn what_an_agent_was_not_told_of_before_it_died_lives_on() {
    for which in [0, 1] {
        let mut shop = shop(9, slow(2), CHAT);
        let mut streams = shop.connect_often(220, CHAT);
        let dies = if which == 0 { vec![shop.client] } else { shop.servers.to_vec() };
        let (then, before) = (shop.world.now, shop.set_up().0);
        streams.extend(shop.connect_often(10, CHAT));
        if which == 0 {
            // One is on its way.
            streams.push(shop.world.connect_stream(shop.client, NAME, CHAT));
        }
        shop.world.run_for(Duration::from_millis(1));
        assert!(shop.set_up().0 > before + 5);
        for host in dies {
            // What kernels have set up since then has not been written down.
            let (now, sal) = (shop.world.now, &shop.world.hosts[host.0].sal);
            let written = sal.flows().filter(|flow| flow.why != Why::Granted || flow.since < then);
            let records: Vec<_> = written.filter_map(|flow| sal.export_flow(now, flow.flow)).collect();
            let kept = sal.keep_associations();
            start_again(&mut shop.world, host, &kept, &records, Vec::new());
        }
        shop.world.run_for(2 * SECOND);
        let flows = streams.iter().filter(|stream| shop.world.host(shop.client).flow_of(**stream).is_some()).count();
        assert_eq!(flows, streams.len(), "of {which}");
        let silent = shop.world.host(shop.client).sal.counters().grants_silent;
        assert_eq!(silent, 0, "flows that nobody had taken yet were answered by nobody");
        shop.world.network.wall_off_all();
        shop.world.run_for(5 * SECOND);
        for stream in &streams {
            let stream = &shop.world.hosts[shop.client.0].streams[*stream];
            assert!(stream.longest_wait(shop.world.now) < 2 * SECOND, "of {which}");
        }
        shop.check(&streams);
    }
}

/// The next start has a rule that demands encryption. What it finds answered it knows at once.
#[test]
fn a_floor_holds_what_was_on_its_way_when_an_agent_died() {
    let mut shop = shop(35, slow(2), CHAT);
    for host in [shop.servers[0], shop.servers[1], shop.client] {
        shop.world.host(host).set_secure(&[Cipher::Aes256Gcm], false);
    }
    let mut streams = shop.connect_often(220, CHAT);
    shop.world.run_for(SECOND / 10);
    let before = shop.set_up().0;
    streams.push(shop.world.connect_stream(shop.client, NAME, CHAT));
    shop.world.run_for(STEP);
    assert_eq!(shop.set_up().0, before + 1);
    let (now, sal) = (shop.world.now, &shop.world.hosts[shop.client.0].sal);
    let records: Vec<_> = sal.flows().filter_map(|flow| sal.export_flow(now, flow.flow)).collect();
    let kept = sal.keep_associations();
    start_again(&mut shop.world, shop.client, &kept, &records, vec![floor()]);
    shop.world.run_for(200 * STEP);
    shop.are_encrypted(&streams[220..]);
    shop.world.run_for(2 * SECOND);
    shop.check(&streams);
}
