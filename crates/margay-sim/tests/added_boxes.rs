//! Boxes that hosts on the way add to a chain, since the program of a box asks for them (docs/decisions/0108).

mod line;

use std::time::Duration;

use line::{Line, NAME, line, name};
use margay_core::chain::{AddRefused, ChainPlace};
use margay_core::name::ServiceId;
use margay_core::{FlowInfo, Lifecycle, Tuple};
use margay_sim::check::{ends_agree, nothing_left_over};
use margay_sim::middlebox::Habit;
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather};
use margay_wire::{BoxFlags, Kind, Message};

const SECOND: Duration = Duration::from_secs(1);
const TALK: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 300, closes: true };

/// A line of boxes of which the last ones may be added.
fn adding(seed: u64, count: usize, added: usize) -> Line {
    let mut line = line(seed, Weather::FAIR, count);
    line.let_add(added);
    line
}

/// Whether each session ends refused, with all of these words in the reason.
fn is_refused(line: &mut Line, words: &[&str]) {
    let outcome = line.connect();
    assert!(matches!(outcome, Outcome::Refused | Outcome::Reset), "{outcome:?}");
    let said = line.last_failure();
    assert!(words.iter().all(|word| said.contains(word)), "{words:?}: {said}");
}

/// The five-tuple of the last session that the box of a host was given.
fn last_seen(line: &mut Line, at: usize) -> Tuple {
    let host = line.boxes[at];
    *line.world.host(host).middlebox.as_ref().expect("one").seen.last().expect("one")
}

/// The boxes of a host's flows at one place in the chain, with whether each was added, and whether it was passed.
fn boxes_at(line: &mut Line, host: HostId, place: ChainPlace) -> Vec<(ServiceId, bool, bool)> {
    let flows = line.world.host(host).sal.flows();
    let chain = flows.filter_map(|flow| flow.chain).find(|chain| chain.place == place).expect("there is one");
    chain.boxes.iter().map(|one| (one.service, one.is_added, one.host.is_some())).collect()
}

#[test]
fn a_session_goes_through_the_box_that_the_program_of_a_box_names() {
    for is_direct in [false, true] {
        let mut line = adding(3, 3, 1);
        line.set_direct(is_direct);
        line.ask_next(0, &[2]);
        let stream = line.talk(TALK);
        line.world.run_for(SECOND);
        assert_eq!((line.told(0), line.seen()), (vec![Ok(())], vec![1, 1, 1]));
        let passed = [(name(0), false, true), (name(2), true, true), (name(1), false, true)];
        for (host, place) in [
            (line.client, ChainPlace::First),
            (line.boxes[0], ChainPlace::Left),
            (line.boxes[0], ChainPlace::Right),
            (line.boxes[2], ChainPlace::Left),
            (line.boxes[2], ChainPlace::Right),
            (line.boxes[1], ChainPlace::Left),
            (line.boxes[1], ChainPlace::Right),
            (line.server, ChainPlace::Last),
        ] {
            assert_eq!(boxes_at(&mut line, host, place), passed, "{host:?} {place:?}");
        }
        ends_agree(&line.world).expect("they do");
        line.world.run_for(60 * SECOND);
        let end = &line.world.host(line.client).streams[stream];
        assert!(!end.was_reset && !end.was_wrong);
        assert_eq!(end.received, 300 * 700);
        line.world.run_for(300 * SECOND);
        nothing_left_over(&line.world).expect("nothing is");
    }
}

#[test]
fn several_are_passed_in_the_order_in_which_they_are_named_and_they_name_others_in_turn() {
    let mut line = adding(5, 5, 3);
    line.ask_next(0, &[4, 2]);
    line.ask_next(4, &[3]);
    line.talk(TALK);
    line.world.run_for(SECOND);
    let names: Vec<ServiceId> = [0, 4, 3, 2, 1].map(name).to_vec();
    let server = line.server;
    let passed: Vec<ServiceId> = boxes_at(&mut line, server, ChainPlace::Last).iter().map(|one| one.0).collect();
    assert_eq!((passed, line.seen()), (names, vec![1; 5]));
}

#[test]
fn a_session_has_eight_boxes_with_those_that_were_added() {
    let mut line = adding(7, 8, 7);
    line.ask_next(0, &[1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(line.connect(), Outcome::Answered(9));
    assert_eq!(line.seen(), [1; 8]);
}

/// Each SYN behind the box says who has added what, and CHAIN of the one before says nothing of it.
#[test]
fn the_syn_says_who_has_added_a_box() {
    let mut line = adding(11, 3, 1);
    line.ask_next(1, &[2]);
    line.world.recording = Some(Vec::new());
    assert_eq!(line.connect(), Outcome::Answered(9));
    let mut said = Vec::new();
    for (_, _, bytes) in line.world.recording.take().unwrap_or_default() {
        let Ok(message) = Message::parse(&bytes) else { continue };
        let Some(chain) = message.chain().filter(|_| message.kind == Kind::Syn) else { continue };
        let boxes: Vec<(u8, u8)> =
            chain.boxes().map(|one| ((one.flags & !BoxFlags::MAY_BE_LEFT_OUT).bits(), one.added_by)).collect();
        if !said.contains(&boxes) {
            said.push(boxes);
        }
    }
    let wanted =
        [vec![(0, 0), (0, 0)], vec![(8, 0), (0, 0)], vec![(8, 0), (8, 0), (2, 2)], vec![(8, 0), (8, 0), (10, 2)]];
    assert_eq!(said, wanted);
}

#[test]
fn a_box_that_the_policy_does_not_let_be_added_is_none_and_the_program_hears_so() {
    let mut line = adding(13, 4, 1);
    for (asked, refused) in [
        (&[2][..], AddRefused::Twice(0)),
        (&[0], AddRefused::Twice(0)),
        (&[3, 3], AddRefused::Twice(1)),
        (&[3, 7], AddRefused::Unnamed(1)),
        (&[7, 3], AddRefused::Unnamed(0)),
        (&[3, 4, 5, 6, 7, 8], AddRefused::Many(9)),
    ] {
        line.ask_next(0, asked);
        assert_eq!(line.connect(), Outcome::Answered(9), "{asked:?}: it goes on as it was to go");
        assert_eq!(line.told(0), [Err(refused)], "{asked:?}");
    }
    let host = line.boxes[0];
    line.world.host(host).middlebox.as_mut().expect("one").next = vec![service(NAME)];
    assert_eq!(line.connect(), Outcome::Answered(9));
    assert_eq!(line.told(0), [Err(AddRefused::Twice(0))], "the session is for it");
    assert_eq!(line.seen(), [7, 7, 7, 0], "nothing was added");
}

#[test]
fn a_box_adds_to_its_own_sessions_alone_and_before_their_first_packets_have_left_it() {
    let mut line = adding(17, 4, 2);
    line.ask_next(0, &[2]);
    assert_eq!(line.connect(), Outcome::Answered(9));
    let [first, second] = [0, 1].map(|at| last_seen(&mut line, at));
    let mut ask = |at: usize, tuple: &Tuple, next: usize| {
        let host = line.boxes[at];
        line.world.host(host).sal.add_boxes(tuple, &[name(next)])
    };
    assert_eq!(ask(0, &first, 3), Err(AddRefused::Late));
    assert_eq!(ask(3, &first, 3), Err(AddRefused::Unknown), "another host's box");
    assert_eq!(ask(0, &first.reversed(), 3), Err(AddRefused::Unknown), "what leaves the box");
    let other = Tuple { source: "10.9.9.9:40000".parse().expect("literal"), ..first };
    assert_eq!(ask(0, &other, 3), Err(AddRefused::Unknown));
    assert_eq!(ask(1, &second, 3), Err(AddRefused::Late));
}

/// As long as the box keeps the first packet, the last word counts.
#[test]
fn a_program_may_think_again_until_the_first_packet_has_left() {
    let mut line = adding(19, 4, 3);
    assert_eq!(line.connect(), Outcome::Answered(9), "addresses are known from now on");
    let host = line.boxes[0];
    line.world.host(host).middlebox.as_mut().expect("it has one").habit = Habit::Eats;
    line.begin();
    line.world.run_for(SECOND / 10);
    let before = line.seen();
    let seen = last_seen(&mut line, 0);
    for next in [&[1][..], &[2, 3], &[2]] {
        let next: Vec<ServiceId> = next.iter().map(|at| name(*at)).collect();
        assert_eq!(line.world.host(host).sal.add_boxes(&seen, &next), Ok(()));
    }
    line.world.host(host).middlebox.as_mut().expect("it has one").habit = Habit::Passes;
    line.world.run_for(3 * SECOND);
    let after: Vec<usize> = line.seen().iter().zip(before).map(|(after, before)| after - before).collect();
    assert_eq!(after, [0, 0, 1, 0], "its TCP has asked again, and the box has let that out");
}

#[test]
fn a_box_that_was_added_and_that_nobody_serves_is_named_or_left_out() {
    for may_be_left_out in [false, true] {
        let mut line = adding(23, 3, 1);
        line.go_by(may_be_left_out);
        line.ask_next(0, &[2]);
        let gone = line.boxes[2];
        line.withdraw_box(gone);
        if may_be_left_out {
            assert_eq!(line.connect(), Outcome::Answered(9));
            assert_eq!(line.seen(), [1, 1, 0]);
        } else {
            is_refused(&mut line, &["nobody serves box box-2.shop"]);
            assert_eq!((line.accepted(), line.seen()), (0, vec![1, 0, 0]));
        }
        assert_eq!(line.told(0), [Ok(())]);
    }
}

#[test]
fn a_box_that_was_added_is_certified_as_any() {
    let mut line = adding(29, 3, 1);
    line.trust_nobody_else();
    line.ask_next(0, &[2]);
    assert_eq!(line.connect(), Outcome::Answered(9));
    let impostor = line.world.add_host(false);
    line.world.register(line.router, impostor);
    line.move_box(2, impostor);
    is_refused(&mut line, &["box-2.shop"]);
    assert_eq!(line.accepted(), 1);
}

/// What a box that was added does to the first packet is told with its name, whichever host says so.
#[test]
fn a_box_that_was_added_is_named_where_it_fails() {
    for (habit, why) in [(Habit::Eats, "has not let the session"), (Habit::Refuses, "refuses the session")] {
        let mut line = adding(31, 3, 1);
        line.ask_next(0, &[2]);
        assert_eq!(line.connect(), Outcome::Answered(9), "all have met");
        for at in [2, 1] {
            let host = line.boxes[at];
            line.world.host(host).middlebox.as_mut().expect("it has one").habit = habit;
            is_refused(&mut line, &[why, &format!("box-{at}.shop")]);
            line.world.host(host).middlebox.as_mut().expect("it has one").habit = Habit::Passes;
        }
        assert_eq!(line.accepted(), 1);
        line.world.run_for(10 * SECOND);
        nothing_left_over(&line.world).expect("only flows that are over");
    }
}

/// A box's host adds what the server's host does not know of: by a policy of its own, say.
#[test]
fn the_end_of_the_chain_takes_no_box_that_its_own_policy_does_not_let_be_added() {
    for is_first_contact in [true, false] {
        let mut line = adding(37, 4, 2);
        if !is_first_contact {
            assert_eq!(line.connect(), Outcome::Answered(9), "all have met");
        }
        let before = line.accepted();
        line.ask_next(1, &[3, 2]);
        let server = line.server;
        let mut policy = line.policy();
        policy.rules.iter_mut().for_each(|rule| rule.may_add.retain(|one| one.service != name(2)));
        line.world.host(server).sal.set_chain_policy(policy.clone()).expect("sound");
        is_refused(&mut line, &["box box-2.shop was added to the chain on the way", "may_add"]);
        assert_eq!(line.told(1), [Ok(())]);
        assert_eq!(line.accepted(), before);
        // Nor one that a rule for other sessions names.
        policy.rules.iter_mut().for_each(|rule| rule.may_add.clear());
        let mut of_others = line.policy().rules[0].clone();
        (of_others.name, of_others.ports) = ("others".to_owned(), Some(81..=90));
        policy.rules.insert(0, of_others);
        line.world.host(server).sal.set_chain_policy(policy).expect("sound");
        is_refused(&mut line, &["box box-3.shop was added to the chain on the way"]);
        assert_eq!(line.accepted(), before);
        line.let_add(2);
        assert_eq!(line.connect(), Outcome::Answered(9));
        assert_eq!(line.accepted(), before + 1);
    }
}

#[test]
fn nobody_changes_on_the_way_who_has_added_a_box() {
    let mut line = adding(41, 3, 1);
    line.trust_nobody_else();
    line.ask_next(0, &[2]);
    assert_eq!(line.connect(), Outcome::Answered(9), "all have met");
    let [router, server] = [line.router, line.server].map(|host| line.world.host(host).address);
    line.world.network.cut(router, server);
    line.world.recording = Some(Vec::new());
    let client = line.begin();
    line.world.run_for(SECOND / 20);
    let is_it = |bytes: &[u8]| {
        let message = Message::parse(bytes).ok().filter(|message| message.kind == Kind::Syn);
        message.and_then(|message| message.chain()).is_some_and(|chain| chain.boxes().all(|one| !one.is_ahead()))
    };
    let sent = line.world.recording.take().unwrap_or_default();
    let (from, to, syn) = sent.into_iter().rfind(|(_, _, bytes)| is_it(bytes)).expect("it was sent on");
    line.world.network.heal();
    // The flags of the box that was added: nobody is to take it for one that was signed.
    let flags = syn.windows(4).position(|some| some == [10, 1, 0, 0]).expect("it was added by the first");
    let kind = 20 + margay_wire::RESOLVABLE_LEN;
    let kind = kind + syn[kind..].windows(4).position(|some| some[..2] == [0xec, 0]).expect("it has CHAIN_ADDED");
    let mut forged = syn;
    forged[flags..flags + 2].copy_from_slice(&[8, 0]);
    forged[kind] = 0x87;
    assert!(Message::parse(&forged).is_ok_and(|message| message.chain().is_some()));
    line.world.inject(from, to, forged);
    line.world.run_for(3 * SECOND);
    let outcome = line.world.host(line.client).clients[client].outcome;
    assert!(matches!(outcome, Outcome::Refused | Outcome::Reset), "{outcome:?}");
    assert_eq!(line.accepted(), 1);
}

#[test]
fn a_service_that_demands_boxes_is_had_through_what_their_hosts_may_add() {
    let mut line = adding(43, 2, 1);
    line.trust_nobody_else();
    line.demand(NAME, &["box-0.shop"]);
    line.ask_next(0, &[1]);
    assert_eq!(line.connect(), Outcome::Answered(9), "the last box is none of those that are demanded");
    line.ask_next(0, &[]);
    assert_eq!(line.connect(), Outcome::Answered(9));
    assert_eq!(line.seen(), [2, 1]);
    line.demand(NAME, &["box-1.shop"]);
    is_refused(&mut line, &["only through boxes"]);
    line.ask_next(0, &[1]);
    assert_eq!(line.connect(), Outcome::Answered(9));
}

#[test]
fn a_first_packet_that_is_lost_or_doubled_goes_the_same_way_again() {
    for seed in 0..20 {
        let mut line = adding(100 + seed, 4, 2);
        line.ask_next(0, &[3, 2]);
        line.ask_next(1, &[]);
        let host = line.boxes[0];
        line.world.host(host).middlebox.as_mut().expect("it has one").habit = Habit::Doubles;
        line.world.network.weather = Weather { loss_per_mille: 200, duplicate_per_mille: 200, ..Weather::FAIR };
        let stream = line.talk(TALK);
        line.world.run_for(10 * SECOND);
        assert!(line.told(0).iter().all(Result::is_ok), "seed {seed}");
        line.world.network.weather = Weather::FAIR;
        line.world.run_for(60 * SECOND);
        let end = line.world.host(line.client).streams[stream].clone();
        assert!(!end.was_wrong, "seed {seed}");
        let seen = line.seen();
        assert!(seen[0] == 1 && seen.iter().all(|count| *count <= 1), "seed {seed}: {seen:?}");
        // Where the SYN or its answer was lost too often, the connect has failed.
        if !end.was_reset {
            assert_eq!((end.received, seen), (300 * 700, vec![1; 4]), "seed {seed}");
        }
    }
}

#[test]
fn datagrams_go_through_boxes_that_were_added() {
    let mut line = adding(47, 3, 1);
    line.ask_next(0, &[2]);
    assert_eq!(line.ask_by_datagrams(10), 10);
    assert_eq!((line.told(0), line.seen()), (vec![Ok(())], vec![1, 1, 1]));
}

#[test]
fn an_older_agent_behind_a_box_that_was_added_is_told_of() {
    let mut line = adding(53, 2, 1);
    assert_eq!(line.connect(), Outcome::Answered(9), "addresses are known from now on");
    line.ask_next(0, &[1]);
    let [router, host] = [line.router, line.boxes[0]].map(|host| line.world.host(host).address);
    let last = line.boxes[1];
    let last = line.world.host(last).address;
    line.world.network.cut(router, last);
    line.world.network.cut(host, last);
    let at = line.begin();
    line.world.run_for(SECOND / 10);
    let host = line.boxes[0];
    let is_right = |flow: &FlowInfo| flow.chain.as_ref().is_some_and(|chain| chain.place == ChainPlace::Right);
    let flows = line.world.host(host).sal.flows();
    let right = flows.filter(|flow| flow.lifecycle == Lifecycle::Connecting && is_right(flow)).last();
    let right = right.expect("it asks for the next box").flow;
    line.answer_as_older(router, host, right);
    line.world.run_for(SECOND);
    assert_eq!(line.world.host(line.client).clients[at].outcome, Outcome::Refused);
    let said = line.last_failure();
    assert!(said.contains("box-1.shop") && said.contains("no boxes that were added"), "{said}");
}

/// The session has the boxes that were added when others are put in, and the server's host knows them.
#[test]
fn the_record_of_a_flow_says_which_boxes_were_added() {
    let mut line = adding(59, 2, 1);
    line.ask_next(0, &[1]);
    let stream = line.talk(Plan { writes: 1000, ..TALK });
    line.world.run_for(2 * SECOND);
    for host in [line.boxes[0], line.client] {
        line.world.kill_agent(host);
        line.world.run_for(SECOND / 2);
        line.world.start_agent(host);
    }
    line.world.run_for(SECOND);
    let client = line.client;
    assert_eq!(boxes_at(&mut line, client, ChainPlace::First), [(name(0), false, true), (name(1), true, true)]);
    line.world.run_for(60 * SECOND);
    let end = &line.world.host(line.client).streams[stream];
    assert!(!end.was_reset && !end.was_wrong);
    assert_eq!(end.received, 1000 * 700);
}

/// Boxes that name others at random, in foul weather, with agents that start again: every connect ends, nobody is let
/// in past a box, and nothing is left over.
#[test]
fn random_additions_keep_every_promise() {
    let seeds = std::env::var("MARGAY_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    for seed in 0..seeds {
        let mut line = adding(5000 + seed, 5, 3);
        line.vary(seed, 150);
        for _ in 0..20 {
            let mut random = || line.world.random() as usize;
            let at = random() % 5;
            let first = 1 + random() % 4;
            let second = 2 + random() % 3;
            match random() % 12 {
                0 => line.world.kill_agent(line.boxes[at]),
                1 | 2 if !line.world.host(line.boxes[at]).has_agent() => line.world.start_agent(line.boxes[at]),
                3 | 4 => line.ask_next(at, &[first, second]),
                5 => line.ask_next(at, &[first]),
                6 => line.ask_next(at, &[]),
                _ => {
                    line.begin();
                }
            }
            let pause = u64::from(line.world.random() % 400);
            line.world.run_for(Duration::from_millis(pause));
            ends_agree(&line.world).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        }
        line.world.network.weather = Weather::FAIR;
        for (at, host) in line.boxes.clone().into_iter().enumerate() {
            line.ask_next(at, &[]);
            if !line.world.host(host).has_agent() {
                line.world.start_agent(host);
            }
        }
        line.world.run_for(90 * SECOND);
        margay_sim::check::all_ended_within(&line.world, 25 * SECOND)
            .unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        nothing_left_over(&line.world).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        // Nobody comes to the server past the boxes that were signed.
        let (seen, accepted) = (line.seen(), line.accepted());
        assert!(seen[..2].iter().all(|count| *count >= accepted), "seed {seed}: {accepted} of {seen:?}");
        line.ask_next(1, &[4, 2]);
        let before = line.seen();
        assert_eq!(line.connect(), Outcome::Answered(9), "seed {seed}: after healing");
        let after: Vec<usize> = line.seen().iter().zip(before).map(|(after, before)| after - before).collect();
        assert_eq!(after, [1, 1, 1, 0, 1], "seed {seed}");
    }
}
