//! Connections that say nothing for minutes, hours or days, behind translators and stateful firewalls that forget:
//! whoever speaks first then is heard, soon, and next to nothing is sent meanwhile.

mod site;

use std::net::IpAddr;
use std::time::Duration;

use margay_core::{Cipher, Lifecycle};
use margay_sim::network::TimeOuts;
use margay_sim::stream::{Plan, State};
use margay_sim::{HostId, World};
use margay_wire::Kind;

use site::{SECOND, Site, steady};

const CIPHERS: &[Cipher] = &[Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
/// Says a little at first, and then nothing.
const QUIET: Plan = Plan { write: 300, every: Duration::from_millis(100), writes: 10, closes: false };
/// Within this time what is said after the pause arrives: its first packets may be lost, before the routers are asked.
const SOON: Duration = Duration::from_secs(6);

/// What stands between the hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Between {
    /// A translator before the client.
    Translator,
    /// A firewall before the server, which lets in what was asked for.
    Firewall,
    /// One before each.
    Firewalls,
    /// A translator before each.
    Translators,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Encapsulated,
    Direct,
    Sealed,
}

fn public(n: u8) -> IpAddr {
    [192, 0, 2, n].into()
}

fn put_between(world: &mut World, host: HostId, between: Between, is_client: bool) {
    let address = world.host(host).address;
    let network = &mut world.network;
    match between {
        Between::Translator if !is_client => {}
        Between::Firewall if is_client => {}
        Between::Translator | Between::Translators => {
            let at = public(if is_client { 7 } else { 6 });
            network.put_behind_nat(address, at);
            network.translate_direct(at);
        }
        Between::Firewall | Between::Firewalls => {
            network.put_behind_firewall(address);
            network.guard(address);
        }
    }
}

fn quiet_site(seed: u64, between: Between, way: Way, time_outs: TimeOuts) -> Site {
    let mut world = World::new(seed, steady());
    let router = world.add_host(true);
    let (server, client) = (world.add_host(false), world.add_host(false));
    for host in [server, client] {
        put_between(&mut world, host, between, host == client);
        world.register(router, host);
        world.set_direct(host, way == Way::Direct);
        if way == Way::Sealed {
            world.host(host).sal.set_secure(CIPHERS, true, Vec::new());
        }
    }
    world.network.time_outs = time_outs;
    world.run_for(SECOND);
    let (host, service) = (world.host(server).sal.host(), margay_sim::world::service("talk.shop"));
    world.host(server).serve_streams(service, 81, QUIET);
    let sal = &mut world.host(router).sal;
    let seen = sal.paths().iter().find(|path| path.host == host).map(|path| path.remote).expect("it is registered");
    let hop = margay_core::table::NextHop { address: seen, host: Some(host), router: false };
    let action = margay_core::table::Action::Forward(hop);
    let rule = margay_core::table::Rule { priority: 100, weight: 1, action };
    sal.add_rule(margay_core::Instant::ZERO, service.into(), rule).expect("room");
    let stream = world.connect_stream(client, "talk.shop", QUIET);
    world.run_for(5 * SECOND);
    let mut site = Site { world, router, server, client, stream, answer: 0 };
    assert_eq!(site.flow().lifecycle, Lifecycle::Established, "{between:?} {way:?}");
    assert_eq!(site.flow().secure.is_some(), way == Way::Sealed);
    site
}

/// One end says something, and the other hears it.
fn speak(site: &mut Site, is_client: bool) {
    let (speaker, hearer) = if is_client { (site.client, site.server) } else { (site.server, site.client) };
    let now = site.world.now;
    let before = site.world.host(hearer).streams[0].received;
    site.world.host(speaker).streams[0].follow(now, Plan { writes: 1, every: Duration::from_millis(1), ..QUIET });
    site.world.run_for(SOON);
    let flow = site.flow();
    let stream = &site.world.hosts[hearer.0].streams[0];
    assert!(stream.state == State::Open && !stream.was_reset, "{:?}", stream.state);
    assert_eq!(stream.received, before + 300, "{flow:?}");
}

fn time_outs(datagrams_s: u64, direct_s: u64) -> TimeOuts {
    TimeOuts { datagrams: Duration::from_secs(datagrams_s), direct: Duration::from_secs(direct_s) }
}

fn check(between: Between, way: Way, pauses_s: &[u64]) {
    for (datagrams_s, direct_s) in [(30, 300), (120, 3600), (300, 432_000)] {
        for is_client in [true, false] {
            let mut site = quiet_site(91, between, way, time_outs(datagrams_s, direct_s));
            for pause_s in pauses_s {
                site.world.run_for(Duration::from_secs(*pause_s));
                speak(&mut site, is_client);
                // The other way round, when all is fresh.
                speak(&mut site, !is_client);
            }
        }
    }
}

#[test]
fn behind_one_translator_either_end_is_heard_after_any_pause() {
    for way in [Way::Encapsulated, Way::Direct, Way::Sealed] {
        check(Between::Translator, way, &[20, 40, 130, 310, 3700]);
    }
}

#[test]
fn behind_firewalls_either_end_is_heard_after_any_pause() {
    for between in [Between::Firewall, Between::Firewalls] {
        for way in [Way::Encapsulated, Way::Direct, Way::Sealed] {
            check(between, way, &[20, 40, 130, 310, 3700]);
        }
    }
}

#[test]
fn behind_a_translator_at_each_end_either_is_heard_after_any_pause() {
    for way in [Way::Encapsulated, Way::Direct, Way::Sealed] {
        check(Between::Translators, way, &[20, 40, 130, 310, 3700]);
    }
}

#[test]
fn a_connection_is_there_after_a_day() {
    check(Between::Firewalls, Way::Encapsulated, &[86_400]);
}

#[test]
fn an_idle_host_sends_its_router_a_probe_now_and_then_and_no_more() {
    let mut site = quiet_site(92, Between::Firewalls, Way::Encapsulated, time_outs(30, 300));
    let probes = |site: &mut Site| {
        [site.client, site.server].map(|host| site.world.host(host).sal.counters().messages_sent(Kind::Probe))
    };
    site.world.run_for(60 * SECOND);
    let before = probes(&mut site);
    site.world.recording = Some(Vec::new());
    site.world.run_for(Duration::from_secs(1000));
    let sent = site.world.recording.take().expect("it was recording").len();
    let after = probes(&mut site);
    // Each asks its router every 25 s, and is answered.
    assert_eq!([after[0] - before[0], after[1] - before[1]], [40, 40]);
    assert_eq!(sent, 160);
}
