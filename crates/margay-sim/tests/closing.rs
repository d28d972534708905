//! How connections end while the network is away: nothing that a program was sent is lost because both ends have
//! closed.

mod site;

use std::time::Duration;

use margay_core::{Event, Lifecycle, RemoveReason};
use margay_sim::stream::{Plan, State};

use site::{RTT, SECOND, Site, address, site, steady};

/// What the server writes, late enough that the path may have died before, and then it closes.
const ANSWER: Plan = Plan { write: 5000, every: Duration::from_secs(9), writes: 1, closes: true };
/// One request, and no more.
const REQUEST: Plan = Plan { write: 100, every: Duration::from_secs(6), writes: 1, closes: true };

/// The client has sent its request and closed its side; the server is to answer.
fn half_closed(seed: u64, direct: bool) -> Site {
    let mut site = site(seed, steady(), direct, (REQUEST, ANSWER));
    site.world.run_for(2 * SECOND);
    assert_eq!(site.world.host(site.server).streams[0].received, 100);
    site
}

fn cut(site: &mut Site) {
    let (client, server) = (site.world.host(site.client).address, site.world.host(site.server).address);
    site.world.network.cut(client, server);
}

#[test]
fn an_answer_that_was_sent_into_an_outage_arrives_after_it() {
    for direct in [false, true] {
        for outage_s in [3, 12, 40, 100] {
            let mut site = half_closed(31, direct);
            cut(&mut site);
            site.world.run_for(3 * SECOND + outage_s * SECOND);
            site.world.network.heal();
            site.world.run_for(outage_s * SECOND + 5 * SECOND);
            let client = &site.world.hosts[site.client.0].streams[0];
            assert_eq!(client.received, 5000, "direct {direct}, {outage_s} s");
            assert!(!client.was_reset && !site.world.hosts[site.server.0].streams[0].was_reset);
            // And then nothing is left of it at either end.
            site.world.run_for(80 * SECOND);
            for host in [site.client, site.server] {
                let host = site.world.host(host);
                assert_eq!(host.sal.flow_count(), 0, "direct {direct}, {outage_s} s");
                let is_end = |event: &Event| matches!(event, Event::FlowClosed { reason: RemoveReason::Closed, .. });
                assert!(host.events.iter().any(is_end));
            }
        }
    }
}

#[test]
fn a_connection_that_ends_in_order_is_gone_soon() {
    for direct in [false, true] {
        let mut site = half_closed(32, direct);
        site.world.run_for(2 * SECOND + RTT * 3);
        assert_eq!(site.world.host(site.client).streams[0].received, 5000);
        site.world.run_for(11 * SECOND);
        assert_eq!([site.client, site.server].map(|host| site.world.host(host).sal.flow_count()), [0, 0]);
    }
}

#[test]
fn what_nobody_acknowledges_any_more_is_forgotten_in_the_end() {
    for direct in [false, true] {
        let mut site = half_closed(33, direct);
        cut(&mut site);
        site.world.run_for(60 * SECOND);
        assert_eq!(site.world.host(site.server).sal.flow_count(), 1, "its TCP still sends");
        site.world.host(site.server).streams[0].state = State::Gone;
        site.world.run_for(1000 * SECOND);
        assert_eq!(site.world.host(site.server).sal.flow_count(), 0);
    }
}

/// Agents speak to each other by pinholes, and make a TCP speak, also while a flow is kept after its end. A host whose
/// socket has gone would answer by a RST.
#[test]
fn a_socket_that_has_gone_hears_nothing_from_agents() {
    let disturb: [fn(&mut Site); 3] = [
        |site| site.world.set_addresses(site.client, vec![address(1)]),
        |site| site.world.set_direct(site.server, false),
        |site| site.world.set_direct(site.client, false),
    ];
    for (seed, disturb) in (34..).zip(disturb) {
        let mut site = half_closed(seed, true);
        site.world.run_for(2 * SECOND + RTT * 3);
        assert_eq!(site.flow().lifecycle, Lifecycle::Closed);
        site.world.host(site.server).streams[0].state = State::Gone;
        disturb(&mut site);
        site.world.run_for(3 * SECOND);
        assert_eq!(site.world.host(site.server).streams[0].refused, 0, "seed {seed}");
    }
}
