//! Boxes that change addresses, in virtual time: what comes out of one is known again, and what nobody can know again
//! is refused, with the box's name.

mod line;

use std::net::SocketAddr;
use std::time::Duration;

use line::{Line, line};
use margay_core::table::{Action, Allow, Rule};
use margay_core::{BoxKind, Instant, Middlebox};
use margay_sim::check::nothing_left_over;
use margay_sim::middlebox::Habit;
use margay_sim::stream::{Plan, State};
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Outcome, Weather};

const SECOND: Duration = Duration::from_secs(1);
const TALK: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 300, closes: true };

/// Box `at` changes addresses, and says so where `is_said`.
fn translate(line: &mut Line, at: usize, is_said: bool) -> HostId {
    let host = line.boxes[at];
    line.world.host(host).middlebox.as_mut().expect("it has one").habit = Habit::Translates;
    if is_said {
        let name = service(&format!("box-{at}.shop"));
        let sal = &mut line.world.host(host).sal;
        let rules: Vec<_> = sal.rules().filter(|(prefix, ..)| prefix.id == name).map(|(_, id, _)| id).collect();
        rules.into_iter().for_each(|id| assert!(sal.remove_rule(id)));
        let action = Action::Box(Middlebox { kind: BoxKind::Rewrite, allow: Allow::Any });
        let rule = Rule { priority: 100, weight: 1, action };
        sal.add_rule(Instant::ZERO, name.into(), rule).expect("there is room");
    }
    host
}

fn tagged(line: &mut Line, host: HostId) -> u64 {
    line.world.host(host).middlebox.as_ref().expect("it has one").tagged
}

#[test]
fn streams_pass_boxes_that_change_addresses_in_both_directions() {
    for is_direct in [false, true] {
        let mut line = line(5, Weather::FAIR, 3);
        line.set_direct(is_direct);
        let hosts = [translate(&mut line, 0, true), translate(&mut line, 2, true)];
        line.world.recording = Some(Vec::new());
        let stream = line.talk(TALK);
        line.world.run_for(SECOND);
        let tag = [253, 8, b'M', b'G'];
        let sent: Vec<_> = line.world.recording.take().into_iter().flatten().map(|(_, _, bytes)| bytes).collect();
        assert!(!sent.is_empty() && !sent.iter().any(|bytes| bytes.windows(4).any(|four| four == tag)));
        line.world.network.weather = Weather { loss_per_mille: 30, duplicate_per_mille: 30, ..Weather::FAIR };
        line.world.run_for(60 * SECOND);
        line.world.network.weather = Weather::FAIR;
        line.world.run_for(300 * SECOND);
        let bytes = u64::from(TALK.writes) * TALK.write as u64;
        for end in [line.world.host(line.client).streams[stream].clone(), line.served()] {
            assert!(!end.was_reset && !end.was_wrong, "{is_direct}");
            assert_eq!(end.received, bytes);
            assert!(matches!(end.state, State::TimeWait | State::Gone));
        }
        for host in hosts {
            assert_eq!(tagged(&mut line, host), 1, "the box is given one SYN, which is tagged");
        }
        for host in line.all() {
            assert_eq!(line.world.host(host).sal.flows().count(), 0, "{host:?} forgets it, {is_direct}");
        }
        nothing_left_over(&line.world).expect("nothing is");
    }
}

#[test]
fn a_box_that_may_change_addresses_and_does_not_is_passed_as_well() {
    let mut line = line(6, Weather::FAIR, 1);
    let host = translate(&mut line, 0, true);
    line.world.host(host).middlebox.as_mut().expect("it has one").habit = Habit::Passes;
    assert_eq!(line.connect(), Outcome::Answered(9));
    assert_eq!(tagged(&mut line, host), 1);
}

#[test]
fn a_box_that_changes_addresses_and_does_not_say_so_is_named() {
    for at in [0, 1] {
        let mut line = line(7, Weather::FAIR, 2);
        assert_eq!(line.connect(), Outcome::Answered(9), "addresses are known from now on");
        let host = translate(&mut line, at, false);
        let client = line.begin();
        line.world.run_for(SECOND / 2);
        assert_eq!(line.world.host(line.client).clients[client].outcome, Outcome::Refused, "at once");
        let said = line.last_failure();
        assert!(said.contains(&format!("box-{at}.shop")) && said.contains("has changed"), "{said}");
        assert_eq!((line.accepted(), tagged(&mut line, host)), (1, 0));
        line.world.run_for(10 * SECOND);
        nothing_left_over(&line.world).expect("nothing is");
    }
}

#[test]
fn datagrams_are_known_by_what_is_in_them() {
    let mut line = line(8, Weather::FAIR, 2);
    translate(&mut line, 1, true);
    assert_eq!(line.ask_by_datagrams(4), 4, "each is answered, through the box");
}

/// Two programs say their first words at once, through a box that changes addresses. Gives how many were heard.
fn say_at_once(line: &mut Line, first_port: u16, words: [&[u8]; 2]) -> usize {
    let host = line.client;
    let ranges = line.world.host(host).ranges();
    let there = SocketAddr::new(ranges.virtual_v6(&service("talk.shop")).into(), 53);
    let before = line.world.host(line.server).datagrams.len();
    for (port, words) in (first_port..).zip(words) {
        let here = SocketAddr::new(ranges.host_v6().into(), port);
        line.world.say(host, &Datagram::new(here, there, words));
    }
    line.world.run_for(2 * SECOND);
    line.world.host(line.server).datagrams.len() - before
}

#[test]
fn two_sessions_that_begin_alike_at_once_are_refused_and_others_are_not() {
    let mut line = line(9, Weather::FAIR, 1);
    let host = translate(&mut line, 0, true);
    assert_eq!(line.ask_by_datagrams(1), 1, "addresses are known from now on");
    assert_eq!(say_at_once(&mut line, 4100, [b"one", b"other"]), 2);
    line.world.host(host).middlebox.as_mut().expect("it has one").habit = Habit::TranslatesInPairs;
    assert_eq!(say_at_once(&mut line, 4200, [b"one", b"other"]), 2, "each is known by its words");
    assert_eq!(say_at_once(&mut line, 4300, [b"same", b"same"]), 0, "nobody can say which is which");
    let said = line.last_failure();
    assert!(said.contains("box-0.shop") && said.contains("cannot tell"), "{said}");
}

/// Another user of the box's host guesses what a client will say, and says it while the box has it.
#[test]
fn what_a_program_of_the_boxs_host_says_is_not_taken_for_what_comes_out_of_the_box() {
    for is_rewriting in [true, false] {
        let mut line = line(12, Weather::FAIR, 1);
        let host = line.boxes[0];
        if is_rewriting {
            translate(&mut line, 0, true);
        }
        assert_eq!(line.ask_by_datagrams(1), 1, "addresses are known from now on");
        line.slow_down(0, Duration::from_millis(50));
        let (client, heard) = (line.client, line.world.host(line.server).datagrams.len());
        let datagram = |line: &mut Line, at, name: &str, port| {
            let ranges = line.world.host(at).ranges();
            let there = SocketAddr::new(ranges.virtual_v6(&service(name)).into(), 53);
            Datagram::new(SocketAddr::new(ranges.host_v6().into(), port), there, b"hello")
        };
        let first = datagram(&mut line, client, "talk.shop", 4400);
        line.world.say(client, &first);
        line.world.run_for(Duration::from_millis(30));
        let guessed = datagram(&mut line, host, "nobody.shop", 4500);
        line.world.say(host, &guessed);
        line.world.run_for(2 * SECOND);
        assert_eq!(line.world.host(line.server).datagrams.len() - heard, 1, "the client's is heard");
        let of_user = line.world.host(host).sal.flows().find(|flow| flow.app.source.port() == 4500);
        assert!(of_user.is_none(), "no session of another goes by the user's socket, {is_rewriting}");
        line.world.say(client, &first);
        line.world.run_for(2 * SECOND);
        assert_eq!(line.world.host(line.server).datagrams.len() - heard, 2, "and so is its next one");
    }
}

#[test]
fn agents_that_start_again_go_on_with_sessions_whose_addresses_a_box_has_changed() {
    let mut line = line(10, Weather::FAIR, 1);
    let host = translate(&mut line, 0, true);
    let stream = line.talk(TALK);
    line.world.run_for(SECOND);
    let now = line.world.now;
    let sal = &line.world.host(host).sal;
    let flows: Vec<_> = sal.flows().map(|flow| flow.flow).collect();
    let records: Vec<_> = flows.into_iter().filter_map(|id| sal.export_flow(now, id)).collect();
    assert_eq!(records.len(), 2);
    let other_of = |at: usize| records[at].chain.as_ref().expect("it is chained").other_half;
    assert_eq!((other_of(0), other_of(1)), (Some(records[1].flow), Some(records[0].flow)));
    line.world.run_for(300 * SECOND);
    let end = &line.world.host(line.client).streams[stream];
    assert!(!end.was_reset && !end.was_wrong && end.received > 0);
}
