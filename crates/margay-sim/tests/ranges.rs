//! Hosts with different virtual addresses: those mean nothing to others, so that each may have its own.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{Instant, Ranges};
use margay_sim::check::{all_ended_within, ends_agree, nothing_left_over};
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Outcome, Weather, World};

const SECOND: Duration = Duration::from_secs(1);

fn ranges(v4: &str, v6: &str) -> Ranges {
    Ranges { v4: v4.parse().expect("a range"), v6: v6.parse().expect("a range") }
}

/// A router, a server and a client, each with ranges of its own.
fn trio() -> (World, [HostId; 3]) {
    let mut world = World::new(1, Weather::FAIR);
    let all = [Ranges::USUAL, ranges("10.66.0.0/15", "fdaa:1::/32"), ranges("172.20.0.0/15", "fdbb:2::/32")];
    let hosts = all.map(|ranges| {
        world.ranges = ranges;
        world.add_host(ranges == Ranges::USUAL)
    });
    for host in [hosts[1], hosts[2]] {
        world.register(hosts[0], host);
    }
    (world, hosts)
}

fn the_flow_has_own_addresses_at_either_end(world: &mut World, [_, server, client]: [HostId; 3]) {
    for host in [server, client] {
        let own = world.host(host).ranges();
        let flow = world.host(host).sal.flows().next().expect("a flow");
        assert!(own.is_host(flow.app.source.ip()), "{} at {host:?}", flow.app);
        let others = [Ranges::USUAL, ranges("10.66.0.0/15", "fdaa:1::/32"), ranges("172.20.0.0/15", "fdbb:2::/32")];
        let is_others = |address: SocketAddr| others.iter().any(|one| *one != own && one.is_virtual(address.ip()));
        assert!(!is_others(flow.app.source) && !is_others(flow.app.destination), "{} at {host:?}", flow.app);
    }
}

#[test]
fn a_connection_has_the_addresses_of_either_host() {
    for is_v4 in [true, false] {
        let (mut world, hosts) = trio();
        let [router, server, client] = hosts;
        world.publish(router, server, "web.shop", 7);
        let to = if is_v4 {
            let leased = world.host(client).ranges().name_v4(9).into();
            world.host(client).sal.bind_name(leased, service("web.shop"));
            SocketAddr::new(leased, 80)
        } else {
            SocketAddr::new(world.host(client).ranges().virtual_v6(&service("web.shop")).into(), 80)
        };
        let now = world.now;
        let number = world.host(client).connect(now, to);
        world.run_for(Duration::from_millis(300));
        assert_eq!(world.host(client).clients[number].outcome, Outcome::Answered(7), "IPv4: {is_v4}");
        world.run_for(60 * SECOND);
        all_ended_within(&world, SECOND).expect("answered in time");
        ends_agree(&world).expect("both ends agree");
        nothing_left_over(&world).expect("all is over");
    }
}

#[test]
fn datagrams_go_both_ways() {
    let (mut world, hosts) = trio();
    let [router, server, client] = hosts;
    let listener = SocketAddr::new([0_u16; 8].into(), 53);
    let demux = Demux {
        listener,
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: Some(17),
        allow: Allow::Any,
    };
    let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
    world.host(server).sal.add_rule(Instant::ZERO, service("dns.shop").into(), rule).expect("room");
    let (address, key) = (world.host(server).address, world.host(server).public_key());
    world.host(router).forward(service("dns.shop").into(), address, Some(key));
    let own = world.host(client).ranges();
    let (from, to) = ((own.host_v6(), 4000).into(), (own.virtual_v6(&service("dns.shop")), 53).into());
    world.say(client, &Datagram::new(from, to, b"question"));
    world.run_for(SECOND);
    the_flow_has_own_addresses_at_either_end(&mut world, hosts);
    let heard = std::mem::take(&mut world.host(server).datagrams);
    assert_eq!(heard.len(), 1);
    assert!(world.host(server).ranges().is_virtual(heard[0].tuple.source.ip()), "{}", heard[0].tuple);
    world.say(server, &Datagram { tuple: heard[0].tuple.reversed(), data: b"answer".to_vec() });
    world.run_for(SECOND);
    let heard = std::mem::take(&mut world.host(client).datagrams);
    assert_eq!(heard.iter().map(|one| (one.tuple.source, &*one.data)).collect::<Vec<_>>(), [(to, &b"answer"[..])]);
}
