//! Chains with proxies, in virtual time: sessions end there, and those that proxies begin go through the rest.

mod line;

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use line::{Line, NAME, line};
use margay_core::chain::{BoxWanted, ChainPlace, ChainPolicy, ChainRule, Requirement};
use margay_core::name::{Prefix, ServiceId};
use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{BoxKind, Event, Instant, Middlebox};
use margay_sim::check::nothing_left_over;
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather};

const SECOND: Duration = Duration::from_secs(1);
/// What the program of the proxy answers with, and the port that it listens on.
const PROXY: u32 = 31;
const PORT: u16 = 81;

fn name_of(at: usize) -> ServiceId {
    service(&format!("box-{at}.shop"))
}

/// Box `at` is a proxy, whose program answers by itself.
fn make_proxy(line: &mut Line, at: usize) {
    let host = line.boxes[at];
    line.withdraw_box(host);
    let machine = line.world.host(host);
    machine.middlebox = None;
    machine.serve(service("program.shop"), PORT, PROXY, Allow::Any).expect("there is room");
    let listener = Demux {
        listener: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), PORT),
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: Some(6),
        allow: Allow::Any,
    };
    let action = Action::Box(Middlebox { kind: BoxKind::Proxy(Box::new(listener)), allow: Allow::Any });
    let rule = Rule { priority: 100, weight: 1, action };
    machine.sal.add_rule(Instant::ZERO, name_of(at).into(), rule).expect("there is room");
    let address = machine.address;
    let key = machine.public_key();
    line.world.host(line.router).forward(name_of(at).into(), address, Some(key));
}

/// Sessions to the service go through all boxes, of which these are said to be proxies.
fn policy(line: &Line, proxies: &[usize], required: &[(ServiceId, &[usize])]) -> ChainPolicy {
    let one = |at: usize| BoxWanted {
        name: format!("box-{at}.shop"),
        service: name_of(at),
        may_be_left_out: false,
        is_proxy: proxies.contains(&at),
    };
    let rule = ChainRule {
        name: "inspect".to_owned(),
        services: Prefix::from(service(NAME)),
        protocol: Some(6),
        ports: None,
        clients: Vec::new(),
        filter: None,
        boxes: (0..line.boxes.len()).map(one).collect(),
        is_ordered: false,
        may_add: Vec::new(),
    };
    let required = required.iter().map(|(services, boxes)| Requirement {
        services: Prefix::from(*services),
        boxes: boxes.iter().map(|at| name_of(*at)).collect(),
    });
    ChainPolicy { rules: vec![rule], required: required.collect(), ..ChainPolicy::default() }
}

fn go_by(line: &mut Line, policy: &ChainPolicy) {
    for host in line.all() {
        line.world.host(host).sal.set_chain_policy(policy.clone()).expect("it can be gone by");
    }
}

/// Three boxes, of which the second one is a proxy; all hosts are certified.
fn proxied(seed: u64) -> Line {
    let mut line = line(seed, Weather::FAIR, 3);
    line.trust_nobody_else();
    make_proxy(&mut line, 1);
    let policy = policy(&line, &[1], &[]);
    go_by(&mut line, &policy);
    line
}

fn seen(line: &mut Line, at: usize) -> usize {
    let host = line.boxes[at];
    line.world.host(host).middlebox.as_ref().expect("it has one").seen.len()
}

/// Where in their chains the flows of a host are, and where those sessions have passed which box.
fn chains(line: &mut Line, host: HostId) -> Vec<(ChainPlace, Vec<usize>)> {
    let hosts: Vec<_> = line.boxes.clone().into_iter().map(|host| line.world.host(host).sal.host()).collect();
    let number = |host| hosts.iter().position(|known| *known == host).expect("a box's");
    let flows = line.world.host(host).sal.flows();
    let chains = flows.filter_map(|flow| flow.chain);
    chains.map(|chain| (chain.place, chain.boxes.iter().filter_map(|one| one.host).map(number).collect())).collect()
}

/// The chains of a host's flows, once one has passed two boxes.
fn set_up(line: &mut Line, host: HostId) -> Vec<(ChainPlace, Vec<usize>)> {
    for _ in 0..300 {
        line.world.run_for(SECOND / 100);
        let found = chains(line, host);
        if found.iter().any(|(_, passed)| passed.len() == 2) {
            return found;
        }
    }
    panic!("nothing has come there: {:?}", chains(line, host));
}

#[test]
fn a_session_ends_at_a_proxy_whose_own_goes_through_the_rest() {
    for is_direct in [false, true] {
        let mut line = proxied(7);
        line.set_direct(is_direct);
        assert_eq!(line.connect(), Outcome::Answered(PROXY), "the proxy's program has the session");
        assert_eq!((seen(&mut line, 0), seen(&mut line, 2), line.accepted()), (1, 0, 0));
        let proxy = line.boxes[1];
        assert_eq!(line.connect_from(proxy), Outcome::Answered(9), "what the proxy connects to is the service");
        assert_eq!((seen(&mut line, 0), seen(&mut line, 2), line.accepted()), (1, 1, 1));
        line.world.run_for(60 * SECOND);
        nothing_left_over(&line.world).expect("nothing is");
    }
}

#[test]
fn each_end_knows_where_the_session_ends_and_who_has_begun_it() {
    let mut line = proxied(3);
    let proxy = line.boxes[1];
    let client = line.client;
    let server = line.server;
    line.world.connect(client, NAME);
    assert_eq!(set_up(&mut line, proxy), [(ChainPlace::Proxy, vec![0, 1])]);
    assert_eq!(chains(&mut line, client), [(ChainPlace::First, vec![0, 1])]);
    line.world.run_for(300 * SECOND);
    line.world.connect(proxy, NAME);
    assert_eq!(set_up(&mut line, server), [(ChainPlace::Last, vec![1, 2])]);
    assert_eq!(chains(&mut line, proxy), [(ChainPlace::First, vec![1, 2])]);
}

#[test]
fn a_service_can_demand_the_proxy_and_a_proxy_the_boxes_before_it() {
    let mut line = proxied(5);
    let demanded = policy(&line, &[1], &[(service(NAME), &[1, 2]), (name_of(1), &[0])]);
    go_by(&mut line, &demanded);
    let proxy = line.boxes[1];
    assert_eq!(line.connect(), Outcome::Answered(PROXY));
    assert_eq!(line.connect_from(proxy), Outcome::Answered(9));
    // A client that leaves out what comes before the proxy, and one that leaves out the proxy.
    for boxes in [&[1][..], &[0, 2]] {
        let mut short = policy(&line, &[1], &[]);
        let wanted: Vec<_> = boxes.iter().map(|at| name_of(*at)).collect();
        short.rules[0].boxes.retain(|one| wanted.contains(&one.service));
        let client = line.client;
        line.world.host(client).sal.set_chain_policy(short).expect("it can be gone by");
        let outcome = line.connect();
        assert!(matches!(outcome, Outcome::Refused | Outcome::Reset), "{boxes:?}: {outcome:?}");
    }
    assert_eq!(line.accepted(), 1);
}

#[test]
fn a_box_of_another_kind_than_the_chain_says_is_named() {
    for (proxies, at) in [(&[][..], 1), (&[0, 1][..], 0)] {
        let mut line = proxied(11);
        assert_eq!(line.connect(), Outcome::Answered(PROXY), "hosts know each other from now on");
        let wrong = policy(&line, proxies, &[]);
        let client = line.client;
        line.world.host(client).sal.set_chain_policy(wrong).expect("it can be gone by");
        for _ in 0..2 {
            assert_eq!(line.connect(), Outcome::Refused);
            let said = line.last_failure();
            assert!(said.contains(&format!("box-{at}.shop")) && said.contains("another kind"), "{said}");
        }
        assert_eq!(line.accepted(), 0);
    }
}

#[test]
fn a_proxy_is_believed_by_the_certificate_for_its_own_name_alone() {
    let mut line = proxied(13);
    let stranger = margay_core::key::SigningKey::generate(&mut margay_core::rng::Rng::new([5; 32]));
    let proxy = line.boxes[1];
    line.certify(proxy, "box-1.shop", &stranger);
    assert_ne!(line.connect(), Outcome::Answered(PROXY));
    let events = &line.world.host(line.client).events;
    assert!(events.iter().any(|event| matches!(event, Event::ConnectFailed { .. })), "the program is told");
}
