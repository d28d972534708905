//! Who may have a session that goes on without its proxy: the allow list of the session's own port decides, whatever
//! port a message names.

mod relayed;

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::Instant;
use margay_core::key::HostId;
use margay_core::reconfiguration::SpliceOutcome;
use margay_core::table::{Action, Allow, AllowItem, Demux, Rule};
use margay_sim::Relay;
use margay_sim::world::service;
use relayed::{CHAT, Relayed, SECOND, TALK, relayed};

const LAG: Duration = Duration::from_millis(5);

/// The program relays to port 443 of the server, which lets in `allowed`. Port 80 of the same name, which the client
/// names, is somebody else's and for everybody.
fn restricted(allowed: impl Fn(&mut Relayed) -> Vec<HostId>, has_public_port: bool) -> Relayed {
    let mut relayed = relayed(22, TALK, LAG);
    let (proxy, server) = (relayed.proxy, relayed.server);
    let to = SocketAddr::new(relayed.world.host(proxy).ranges().virtual_v6(&service(CHAT)).into(), 443);
    relayed.world.host(proxy).relays.clear();
    relayed.world.host(proxy).relays.push(Relay::new(81, to, LAG));
    let allowed = allowed(&mut relayed).into_iter().map(AllowItem::Host).collect();
    let sal = &mut relayed.world.host(server).sal;
    let found = sal.rules().find(|(prefix, ..)| prefix.id == service(CHAT));
    let (id, mut rule) = found.map(|(_, id, rule)| (id, rule.clone())).expect("its rule");
    let Action::Demux(demux) = &mut rule.action else { panic!("it is served") };
    demux.service_port = Some(443);
    demux.allow = Allow::List(allowed);
    assert!(sal.change_rule(id, rule));
    if has_public_port {
        let demux = Demux {
            listener: SocketAddr::new([0, 0, 0, 0].into(), 8080),
            other_family: None,
            is_looked_up: false,
            service_port: Some(80),
            protocol: Some(6),
            allow: Allow::Any,
        };
        let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
        sal.add_rule(Instant::ZERO, service(CHAT).into(), rule).expect("room");
    }
    relayed.begin(TALK);
    relayed.world.run_for(SECOND);
    relayed
}

fn id_of(relayed: &mut Relayed, host: margay_sim::HostId) -> HostId {
    relayed.world.host(host).sal.host()
}

#[test]
fn the_allow_list_of_another_port_lets_nobody_in() {
    for has_public_port in [false, true] {
        let proxy_alone = |relayed: &mut Relayed| vec![id_of(relayed, relayed.proxy)];
        let mut relayed = restricted(proxy_alone, has_public_port);
        relayed.leave().expect("it may be asked");
        relayed.world.run_for(4 * SECOND);
        let outcomes = relayed.outcomes();
        assert!(matches!(&outcomes[..], [SpliceOutcome::Failed(_)]), "{has_public_port}: {outcomes:?}");
        relayed.ends_well("as before, by the proxy");
    }
}

#[test]
fn the_allow_list_of_its_own_port_lets_the_client_in() {
    for has_public_port in [false, true] {
        let both = |relayed: &mut Relayed| vec![id_of(relayed, relayed.proxy), id_of(relayed, relayed.client)];
        let mut relayed = restricted(both, has_public_port);
        relayed.leave().expect("it may");
        relayed.world.run_for(4 * SECOND);
        let proxy = relayed.proxy;
        assert_eq!((relayed.outcomes(), relayed.flows_at(proxy)), (vec![SpliceOutcome::Done], 0));
        relayed.ends_well("without the proxy");
    }
}

/// The agent of the server's host starts again before the proxy leaves, and knows the session's port still.
#[test]
fn a_restart_forgets_no_port() {
    for lets_client_in in [false, true] {
        let allowed = |relayed: &mut Relayed| {
            let hosts = [relayed.proxy, relayed.client];
            hosts[..1 + usize::from(lets_client_in)].iter().map(|host| id_of(relayed, *host)).collect()
        };
        let mut relayed = restricted(allowed, true);
        let server = relayed.server;
        let rules: Vec<_> =
            relayed.world.host(server).sal.rules().map(|(prefix, _, rule)| (prefix, rule.clone())).collect();
        relayed.world.kill_agent(server);
        relayed.world.start_agent(server);
        let sal = &mut relayed.world.host(server).sal;
        let now: Vec<_> = sal.rules().map(|(_, id, _)| id).collect();
        now.into_iter().for_each(|id| assert!(sal.remove_rule(id)));
        for (prefix, rule) in rules {
            sal.add_rule(Instant::ZERO, prefix, rule).expect("room");
        }
        relayed.leave().expect("it may be asked");
        relayed.world.run_for(4 * SECOND);
        let is_done = relayed.outcomes() == [SpliceOutcome::Done];
        assert_eq!(is_done, lets_client_in);
        relayed.ends_well("after a restart");
    }
}
