//! Sessions that go through boxes, in virtual time: set up by hops, and what happens where a box or its host does not
//! do what it should.

mod line;

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use line::{MAIL, NAME, line};
use margay_core::chain::{ChainPlace, ChainPolicy, Filter, Program};
use margay_core::stack_change::ChangeRefused;
use margay_core::{Event, Lifecycle, Stack};
use margay_sim::check::{ends_agree, nothing_left_over};
use margay_sim::middlebox::Habit;
use margay_sim::stream::{Plan, State};
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Outcome, Weather};

const SECOND: Duration = Duration::from_secs(1);
const TALK: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 300, closes: true };

#[test]
fn a_session_goes_through_every_box_and_each_sees_the_client_and_the_service() {
    for is_direct in [false, true] {
        for count in [1, 2, 4, 8] {
            let mut line = line(7, Weather::FAIR, count);
            line.set_direct(is_direct);
            assert_eq!(line.connect(), Outcome::Answered(9), "{count} boxes");
            let client = line.world.host(line.client).address;
            for at in 0..count {
                let host = line.boxes[at];
                let machine = line.world.host(host);
                let middlebox = machine.middlebox.as_ref().expect("it has one");
                assert_eq!(middlebox.seen.len(), 1, "box {at} of {count}");
                let tuple = middlebox.seen.first().expect("one");
                assert_eq!((tuple.source.ip(), tuple.destination.port()), (client, 80));
                assert!(machine.ranges().is_virtual(tuple.destination.ip()), "{tuple}");
                assert!(middlebox.bytes >= 8, "question and answer have passed box {at}");
            }
            assert_eq!(line.accepted(), 1);
        }
    }
}

/// A filter sees what a box would: the client's own address, the service's virtual one, and the program's TCP.
#[test]
fn a_filter_decides_by_the_first_packet_with_its_session_header() {
    let mut line = line(7, Weather::FAIR, 1);
    let IpAddr::V4(client) = line.world.host(line.client).address else { panic!("it is of IPv4") };
    let server = line.server;
    let mut passed = 0;
    for (source, flag, is_described) in
        [(client, 2, true), (Ipv4Addr::new(192, 0, 2, 1), 2, false), (client, 16, false)]
    {
        // ld [12]; jeq #source; ldb [33]; jset #flag; ldh [22]; jeq #80; ret #1; ret #0
        let jump = |code: u8, over: u8, number: u32| {
            let [a, b, c, d] = number.to_be_bytes();
            [0, code, 0, over, a, b, c, d]
        };
        let program = [
            jump(0x20, 0, 12),
            jump(0x15, 5, source.into()),
            jump(0x30, 0, 33),
            jump(0x45, 3, flag),
            jump(0x28, 0, 22),
            jump(0x15, 1, 80),
            jump(6, 0, 1),
            jump(6, 0, 0),
        ];
        let program = Program::parse(&program.concat()).expect("literal");
        let host = line.client;
        let sal = &mut line.world.host(host).sal;
        let mut policy = sal.chain_policy().clone();
        for rule in &mut policy.rules {
            rule.filter = Some(Filter { text: "a literal".to_owned(), program: program.clone() });
        }
        sal.set_chain_policy(policy).expect("sound");
        assert_eq!(sal.chain_rule_for(&service(NAME), 6, 80).is_some(), is_described, "{source} {flag}");
        assert!(sal.chain_rule_for(&service(NAME), 6, 81).is_none());
        assert_eq!(line.connect(), Outcome::Answered(9));
        passed += usize::from(is_described);
        let machine = line.world.host(line.boxes[0]);
        let seen = machine.middlebox.as_ref().map_or(0, |middlebox| middlebox.seen.len());
        assert_eq!(seen, passed, "{source} {flag}");
    }
    assert_eq!(line.world.host(server).servers[0].accepted.len(), 3);
}

#[test]
fn each_end_knows_the_boxes_and_their_hosts() {
    let mut line = line(3, Weather::FAIR, 2);
    let stream = line.talk(TALK);
    line.world.run_for(SECOND);
    let hosts: Vec<_> = line.boxes.clone().into_iter().map(|host| line.world.host(host).sal.host()).collect();
    for (host, places) in [
        (line.client, &[ChainPlace::First][..]),
        (line.boxes[0], &[ChainPlace::Left, ChainPlace::Right]),
        (line.boxes[1], &[ChainPlace::Left, ChainPlace::Right]),
        (line.server, &[ChainPlace::Last]),
    ] {
        let flows = line.world.host(host).sal.flows();
        let mut chains: Vec<_> = flows.filter_map(|flow| Some((flow.chain?, flow.service))).collect();
        chains.sort_by_key(|(chain, _)| chain.place as u8);
        let found: Vec<_> = chains.iter().map(|(chain, _)| chain.place).collect();
        assert_eq!(found, places, "{host:?}");
        for (chain, service) in &chains {
            let passed: Vec<_> = chain.boxes.iter().filter_map(|one| one.host).collect();
            assert_eq!((&passed, service), (&hosts, &line.service), "{host:?}");
        }
    }
    ends_agree(&line.world).expect("they do");
    line.world.run_for(30 * SECOND);
    let stream = &line.world.host(line.client).streams[stream];
    assert!(!stream.was_reset && !stream.was_wrong && stream.received > 0);
}

#[test]
fn both_directions_carry_everything_and_both_ends_end_it() {
    for is_direct in [false, true] {
        let weather = Weather { loss_per_mille: 30, duplicate_per_mille: 30, ..Weather::FAIR };
        let mut line = line(5, Weather::FAIR, 2);
        line.set_direct(is_direct);
        let stream = line.talk(TALK);
        line.world.network.weather = weather;
        line.world.run_for(60 * SECOND);
        line.world.network.weather = Weather::FAIR;
        line.world.run_for(300 * SECOND);
        let bytes = u64::from(TALK.writes) * TALK.write as u64;
        let ends = [line.world.host(line.client).streams[stream].clone(), line.served()];
        for end in ends {
            assert!(!end.was_reset && !end.was_wrong, "{is_direct}");
            assert_eq!(end.received, bytes);
            assert!(matches!(end.state, State::TimeWait | State::Gone));
        }
        for host in line.all() {
            let left = line.world.host(host).sal.flows().count();
            assert_eq!(left, 0, "{host:?} forgets it, {is_direct}");
        }
        nothing_left_over(&line.world).expect("nothing is");
    }
}

#[test]
fn what_a_box_does_to_the_first_packet_is_what_the_connect_fails_with() {
    for (habit, bound, why) in [
        (Habit::Eats, 2 * SECOND, "has not let the session's first packet out"),
        (Habit::Refuses, SECOND / 2, "refuses the session"),
        (Habit::Answers, SECOND / 2, "has answered in the place of the service"),
    ] {
        for at in [0, 1] {
            let mut line = line(11, Weather::FAIR, 2);
            assert_eq!(line.connect(), Outcome::Answered(9), "addresses are known from now on");
            let host = line.boxes[at];
            line.world.host(host).middlebox.as_mut().expect("it has one").habit = habit;
            let client = line.begin();
            line.world.run_for(3 * SECOND);
            let program = &line.world.host(line.client).clients[client];
            assert_eq!(program.outcome, Outcome::Refused, "{habit:?}");
            let took = program.took().expect("it has ended");
            assert!(took <= bound, "{habit:?} at {at} took {took:?}");
            let said = line.last_failure();
            assert!(said.contains(why) && said.contains(&format!("box-{at}.shop")), "{said}");
            assert_eq!(line.accepted(), 1, "the first one alone");
            line.world.run_for(10 * SECOND);
            nothing_left_over(&line.world).expect("nothing is");
        }
    }
}

#[test]
fn a_box_that_doubles_the_first_packet_does_no_harm() {
    let mut line = line(13, Weather::FAIR, 2);
    for host in line.boxes.clone() {
        line.world.host(host).middlebox.as_mut().expect("it has one").habit = Habit::Doubles;
    }
    assert_eq!(line.connect(), Outcome::Answered(9));
    assert_eq!(line.accepted(), 1);
}

#[test]
fn a_refusal_by_the_server_comes_back_as_one() {
    let mut line = line(17, Weather::FAIR, 2);
    line.world.host(line.server).servers.clear();
    let client = line.begin();
    line.world.run_for(2 * SECOND);
    let program = &line.world.host(line.client).clients[client];
    assert_eq!(program.outcome, Outcome::Refused);
    assert!(program.took().expect("it has ended") < SECOND);
    let said = line.last_failure();
    assert!(said.contains("nothing listens on that port") && !said.contains("box"), "{said}");
}

#[test]
fn a_name_that_nobody_serves_is_no_boxs_fault_and_leaves_none_out() {
    for may_be_left_out in [false, true] {
        let mut line = line(18, Weather::FAIR, 2);
        line.go_by(may_be_left_out);
        line.withdraw_service();
        assert_eq!(line.connect(), Outcome::Refused);
        let said = line.last_failure();
        assert!(said.contains("nobody serves this name") && !said.contains("box"), "{said}");
        for host in line.boxes.clone() {
            let seen = line.world.host(host).middlebox.as_ref().expect("it has one").seen.len();
            assert_eq!(seen, 1, "{host:?}, {may_be_left_out}");
        }
    }
}

#[test]
fn where_nobody_serves_a_box_sessions_are_refused_or_go_without_it() {
    for may_be_left_out in [false, true] {
        let mut line = line(19, Weather::FAIR, 3);
        line.go_by(may_be_left_out);
        let gone = line.boxes[1];
        line.withdraw_box(gone);
        let outcome = line.connect();
        if may_be_left_out {
            assert_eq!(outcome, Outcome::Answered(9));
            let passed = [0, 1, 2].map(|at| {
                let host = line.boxes[at];
                line.world.host(host).middlebox.as_ref().expect("it has one").seen.len()
            });
            assert_eq!(passed, [1, 0, 1]);
        } else {
            assert_eq!(outcome, Outcome::Refused);
            assert!(line.last_failure().contains("nobody serves box box-1.shop"), "{}", line.last_failure());
        }
    }
}

#[test]
fn all_boxes_may_be_missing_where_the_policy_says_so() {
    let mut line = line(23, Weather::FAIR, 2);
    line.go_by(true);
    for host in line.boxes.clone() {
        line.withdraw_box(host);
    }
    assert_eq!(line.connect(), Outcome::Answered(9));
}

#[test]
fn a_box_whose_host_is_dead_lets_nobody_hang() {
    for at in 0..4 {
        let mut line = line(29, Weather::FAIR, 4);
        line.world.kill_agent(line.boxes[at]);
        let client = line.begin();
        line.world.run_for(6 * SECOND);
        assert_eq!(line.world.host(line.client).clients[client].outcome, Outcome::Refused);
        let said = line.last_failure();
        assert!(said.contains(&format!("the host of box box-{at}.shop of the chain did not answer")), "{said}");
    }
}

#[test]
fn an_agent_that_knows_no_chains_makes_the_connect_fail_and_says_so() {
    let mut line = line(31, Weather::FAIR, 1);
    let router = line.world.host(line.router).address;
    let client = line.world.host(line.client).address;
    line.world.network.cut(router, client);
    let at = line.begin();
    line.world.recording = Some(Vec::new());
    line.world.run_for(SECOND / 100);
    let flow = line.world.host(line.client).sal.flows().next().expect("it connects").flow;
    line.answer_as_an_older_agent(router, flow);
    line.world.run_for(SECOND);
    assert_eq!(line.world.host(line.client).clients[at].outcome, Outcome::Refused);
    assert!(line.last_failure().contains("knows no chains"), "{}", line.last_failure());
}

#[test]
fn other_names_go_straight_and_a_name_that_demands_boxes_is_not_had_without() {
    let mut line = line(37, Weather::FAIR, 1);
    line.world.publish(line.router, line.server, MAIL, 5);
    line.demand(MAIL, &["box-0.shop"]);
    let client = line.client;
    let server = line.server;
    let connecting = line.world.connect(client, MAIL);
    line.world.run_for(2 * SECOND);
    let outcome = line.world.host(client).clients[connecting].outcome;
    assert!(matches!(outcome, Outcome::Refused | Outcome::Reset), "{outcome:?}");
    assert_eq!(line.world.host(server).servers.iter().map(|server| server.accepted.len()).sum::<usize>(), 0);
    line.demand(MAIL, &[]);
    let connecting = line.world.connect(client, MAIL);
    line.world.run_for(2 * SECOND);
    assert!(matches!(line.world.host(client).clients[connecting].outcome, Outcome::Answered(_)));
    assert_eq!(line.world.host(line.boxes[0]).middlebox.as_ref().expect("one").seen.len(), 0);
}

#[test]
fn a_name_that_demands_its_boxes_is_had_through_them() {
    let mut line = line(41, Weather::FAIR, 2);
    line.trust_nobody_else();
    line.demand(NAME, &["box-1.shop", "box-0.shop"]);
    assert_eq!(line.connect(), Outcome::Answered(9));
    line.demand(NAME, &["box-7.shop"]);
    assert_eq!(line.connect(), Outcome::Refused);
}

/// The server sees the certificate of the last box alone.
#[test]
fn the_last_box_is_one_of_those_that_are_demanded() {
    let mut line = line(42, Weather::FAIR, 2);
    line.trust_nobody_else();
    line.demand(NAME, &["box-1.shop"]);
    assert_eq!(line.connect(), Outcome::Answered(9));
    line.demand(NAME, &["box-0.shop"]);
    assert_eq!(line.connect(), Outcome::Refused);
    assert!(line.last_failure().contains("only through boxes"), "{}", line.last_failure());
    assert_eq!(line.accepted(), 1);
}

/// What a box lets out when its session is over is not taken for a program's of its host.
#[test]
fn a_box_that_keeps_a_packet_for_long_begins_no_session_with_it() {
    let mut line = line(68, Weather::FAIR, 1);
    let host = line.boxes[0];
    line.world.host(host).middlebox.as_mut().expect("it has one").habit = Habit::Eats;
    assert_eq!(line.ask_by_datagrams(1), 0);
    line.world.run_for(5 * SECOND);
    assert_eq!(line.world.host(host).sal.flows().count(), 0, "it was refused");
    let kept = *line.world.host(host).middlebox.as_ref().expect("it has one").seen.first().expect("one");
    line.world.say(host, &Datagram { tuple: kept, data: vec![1] });
    line.world.run_for(SECOND);
    assert_eq!(line.world.host(host).sal.flows().count(), 0);
    assert_eq!(line.world.host(line.server).datagrams.len(), 0);
}

#[test]
fn client_box_and_server_may_be_one_host() {
    for (client_at, server_at) in [(0, None), (usize::MAX, Some(0)), (0, Some(0)), (1, Some(0))] {
        let mut line = line(43, Weather::FAIR, 2);
        if let Some(at) = server_at {
            line.serve_at(line.boxes[at]);
        }
        let client = if client_at == usize::MAX { line.client } else { line.boxes[client_at] };
        assert_eq!(line.connect_from(client), Outcome::Answered(9), "client at {client_at}, server at {server_at:?}");
    }
}

#[test]
fn two_boxes_may_be_on_one_host() {
    let mut line = line(47, Weather::FAIR, 3);
    let host = line.boxes[0];
    line.move_box(1, host);
    assert_eq!(line.connect(), Outcome::Answered(9));
    assert_eq!(line.world.host(host).middlebox.as_ref().expect("one").seen.len(), 2, "by other ports");
    assert_eq!(line.world.host(line.boxes[2]).middlebox.as_ref().expect("one").seen.len(), 1);
}

#[test]
fn a_session_outlives_the_agent_of_a_boxs_host() {
    for is_direct in [false, true] {
        let mut line = line(53, Weather::FAIR, 2);
        line.set_direct(is_direct);
        let stream = line.talk(Plan { writes: 1000, ..TALK });
        line.world.run_for(2 * SECOND);
        let host = line.boxes[0];
        line.world.kill_agent(host);
        line.world.run_for(SECOND);
        line.world.start_agent(host);
        line.world.run_for(60 * SECOND);
        let bytes = 1000 * TALK.write as u64;
        let end = &line.world.host(line.client).streams[stream];
        assert!(!end.was_reset && !end.was_wrong, "{is_direct}");
        assert_eq!(end.received, bytes);
        let flows = line.world.host(host).sal.flows();
        assert!(flows.filter(|flow| flow.lifecycle == Lifecycle::Established).all(|flow| flow.chain.is_some()));
    }
}

#[test]
fn a_session_follows_a_boxs_host_that_moves() {
    let mut line = line(59, Weather::FAIR, 2);
    line.set_direct(true);
    let stream = line.talk(Plan { writes: 1000, ..TALK });
    line.world.run_for(2 * SECOND);
    line.world.set_addresses(line.boxes[0], vec!["10.0.7.7".parse().expect("literal")]);
    line.world.run_for(90 * SECOND);
    let end = &line.world.host(line.client).streams[stream];
    assert!(!end.was_reset && !end.was_wrong);
    assert_eq!(end.received, 1000 * TALK.write as u64);
}

#[test]
fn when_a_host_of_the_chain_is_gone_the_others_hear_of_it() {
    for gone in 0..3 {
        let mut line = line(61, Weather::FAIR, 2);
        let stream = line.talk(Plan { writes: 100_000, ..TALK });
        line.world.run_for(2 * SECOND);
        let host = [line.boxes[0], line.boxes[1], line.server][gone];
        let now = line.world.now;
        let machine = line.world.host(host);
        machine.shut_down(now);
        line.world.touch(host);
        line.world.run_for(30 * SECOND);
        assert!(line.world.host(line.client).streams[stream].was_reset, "host {gone} of three");
        for host in line.all() {
            let open = line.world.host(host).sal.flows().filter(|flow| flow.lifecycle <= Lifecycle::HalfClosed);
            assert_eq!(open.count(), 0, "at {host:?} after host {gone}");
        }
    }
}

#[test]
fn datagrams_go_through_boxes_as_well() {
    for is_direct in [false, true] {
        let mut line = line(67, Weather::FAIR, 2);
        line.set_direct(is_direct);
        let heard = line.ask_by_datagrams(20);
        assert_eq!(heard, 20, "{is_direct}");
        for host in line.boxes.clone() {
            assert!(line.world.host(host).middlebox.as_ref().expect("one").passed >= 20);
        }
    }
}

#[test]
fn a_session_that_is_sealed_is_sealed_on_every_hop() {
    let mut line = line(71, Weather::FAIR, 2);
    line.demand_secure();
    assert_eq!(line.connect(), Outcome::Answered(9));
    let stream = line.talk(TALK);
    line.world.run_for(SECOND);
    for host in line.all() {
        let open = line.world.host(host).sal.flows().filter(|flow| flow.lifecycle == Lifecycle::Established);
        let sealed: Vec<bool> = open.map(|flow| flow.secure.is_some()).collect();
        assert!(sealed.iter().all(|is_sealed| *is_sealed), "{host:?}");
    }
    line.world.run_for(60 * SECOND);
    assert_eq!(line.world.host(line.client).streams[stream].received, 300 * 700);
}

/// Chains of one to four boxes in foul weather, with boxes that eat, hosts that are cut off and agents that start
/// again: every connect ends, and nothing is left over.
#[test]
fn one_hop_of_a_session_is_not_sealed_alone() {
    let mut line = line(13, Weather::FAIR, 1);
    line.talk(TALK);
    line.world.run_for(SECOND);
    let now = line.world.now;
    for host in line.all() {
        let sal = &mut line.world.host(host).sal;
        let hops: Vec<_> = sal.flows().filter(|flow| flow.chain.is_some()).map(|flow| flow.flow).collect();
        for hop in hops {
            assert_eq!(sal.set_flow_stack(now, hop, Stack::Secure), Err(ChangeRefused::Chained), "{host:?}");
        }
    }
}

#[test]
fn random_chains_keep_every_promise() {
    let seeds = std::env::var("MARGAY_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    for seed in 0..seeds {
        let count = 1 + seed as usize % 4;
        let mut line = line(1000 + seed, Weather::FAIR, count);
        line.vary(seed, 200);
        for _ in 0..30 {
            let which = line.world.random() as usize % count;
            let host = line.boxes[which];
            match line.world.random() % 12 {
                0 => line.world.kill_agent(host),
                1 | 2 if !line.world.host(host).has_agent() => line.world.start_agent(host),
                3 => line.world.host(host).middlebox.as_mut().expect("one").habit = Habit::Eats,
                4 | 5 => line.world.host(host).middlebox.as_mut().expect("one").habit = Habit::Passes,
                _ => {
                    line.begin();
                }
            }
            let pause = u64::from(line.world.random() % 400);
            line.world.run_for(Duration::from_millis(pause));
            ends_agree(&line.world).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        }
        line.world.network.weather = Weather::FAIR;
        for host in line.boxes.clone() {
            if !line.world.host(host).has_agent() {
                line.world.start_agent(host);
            }
            line.world.host(host).middlebox.as_mut().expect("one").habit = Habit::Passes;
        }
        line.world.run_for(90 * SECOND);
        margay_sim::check::all_ended_within(&line.world, 25 * SECOND)
            .unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        nothing_left_over(&line.world).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        assert_eq!(line.connect(), Outcome::Answered(9), "seed {seed}: after healing");
    }
}

#[test]
fn a_policy_that_goes_lets_sessions_go_straight() {
    let mut line = line(73, Weather::FAIR, 1);
    assert_eq!(line.connect(), Outcome::Answered(9));
    for host in line.all() {
        line.world.host(host).sal.set_chain_policy(ChainPolicy::default()).expect("an empty one is one");
    }
    assert_eq!(line.connect(), Outcome::Answered(9));
    assert_eq!(line.world.host(line.boxes[0]).middlebox.as_ref().expect("one").seen.len(), 1);
    let failed = |event: &Event| matches!(event, Event::ConnectFailed { .. });
    assert!(!line.world.host(line.client).events.iter().any(failed));
    assert_eq!(line.all().len(), 4, "{:?}", HostId(0));
}
