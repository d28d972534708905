//! Order kept where the policy asks for it, in virtual time: boxes of sessions that run are changed, and programs leave
//! them, and what comes by the new way waits for the last of the old one (docs/decisions/0109).

mod line;
mod relayed;

use std::net::SocketAddr;
use std::time::Duration;

use line::{Line, name, open_line};
use margay_core::Event;
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome, SpliceOutcome};
use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{Instant, Role};
use margay_sim::check::{ends_agree, nothing_left_over};
use margay_sim::stream::{Plan, State, Stream};
use margay_sim::world::service;
use margay_sim::{Datagram, Weather};
use relayed::{SECOND, TALK, relayed};

/// Something of it is under way at any moment.
const CHATTY: Plan = Plan { write: 700, every: Duration::from_millis(3), writes: 1200, closes: true };
const BYTES: u64 = 1200 * 700;
/// A box keeps packets for so long: longer than what is said past it takes.
const LAG: Duration = Duration::from_millis(30);

fn change(line: &mut Line, edit: Edit) {
    assert!(may_change(line, edit), "it may");
}

/// False: the session has ended at one of its ends, and is left alone.
fn may_change(line: &mut Line, edit: Edit) -> bool {
    let client = line.client;
    let now = line.world.now;
    let mut flows = line.world.host(client).sal.flows().filter(|flow| flow.role == Role::Initiator);
    let id = flows.next().expect("the session").flow;
    drop(flows);
    let begun = line.world.host(client).sal.reconfigure(now, id, edit);
    line.world.touch(client);
    begun.is_ok()
}

fn outcomes(line: &mut Line) -> Vec<ReconfigurationOutcome> {
    let client = line.client;
    let events = line.world.host(client).events.iter();
    let outcome = |event: &Event| match event {
        Event::Reconfigured { change, .. } => Some(change.outcome.clone()),
        _ => None,
    };
    events.filter_map(outcome).collect()
}

/// A session through a box that keeps packets for a while, which is about to be taken out.
fn slow(seed: u64, is_ordered: bool, lag: Duration) -> (Line, usize) {
    let mut line = open_line(seed, Weather::FAIR, 2);
    if is_ordered {
        line.keep_order();
    }
    let stream = line.talk(CHATTY);
    line.world.run_for(SECOND);
    change(&mut line, Edit::Insert { service: name(0), before: None });
    line.world.run_for(SECOND / 2);
    assert_eq!(outcomes(&mut line), [ReconfigurationOutcome::Done]);
    line.slow_down(0, lag);
    line.world.run_for(SECOND / 2);
    (line, stream)
}

fn ends(line: &mut Line, stream: usize) -> [Stream; 2] {
    let client = line.client;
    [line.world.host(client).streams[stream].clone(), line.served()]
}

fn early(line: &mut Line, stream: usize) -> [u64; 2] {
    ends(line, stream).map(|end| end.out_of_order)
}

fn ends_well(line: &mut Line, stream: usize, what: &str) {
    line.world.run_for(360 * SECOND);
    for end in ends(line, stream) {
        let said = (end.was_reset, end.was_wrong, end.received, end.state, end.retransmissions);
        assert!(!end.was_reset && !end.was_wrong && end.received == BYTES, "{what}: {said:?}");
        assert!(matches!(end.state, State::TimeWait | State::Gone), "{what}: {said:?}");
    }
    nothing_stays(line, what);
}

fn nothing_stays(line: &mut Line, what: &str) {
    for host in line.all() {
        assert_eq!(line.world.host(host).sal.flow_count(), 0, "{what}: {host:?} forgets it");
        let now = line.world.now;
        assert_eq!(line.world.host(host).sal.locked_sessions(now), 0, "{what}");
    }
    nothing_left_over(&line.world).unwrap_or_else(|left| panic!("{what}: {left}"));
}

#[test]
fn what_comes_by_the_new_way_waits_for_what_a_box_of_the_old_one_keeps() {
    for is_direct in [false, true] {
        for edit in [Edit::Remove { service: name(0) }, Edit::Replace { service: name(0), by: name(1) }] {
            let mut early_plain = 0;
            for is_ordered in [false, true] {
                let what = format!("direct {is_direct}, ordered {is_ordered}, {edit:?}");
                let (mut line, stream) = slow(7, is_ordered, LAG);
                line.set_direct(is_direct);
                line.world.run_for(SECOND / 2);
                assert_eq!(early(&mut line, stream), [0, 0], "{what}: nothing has come early before");
                change(&mut line, edit);
                line.world.run_for(SECOND);
                assert_eq!(outcomes(&mut line)[1..], [ReconfigurationOutcome::Done], "{what}");
                let early = early(&mut line, stream);
                if is_ordered {
                    assert_eq!(early, [0, 0], "{what}");
                    ends_agree(&line.world).expect("they do");
                } else {
                    early_plain = early.iter().sum();
                }
                ends_well(&mut line, stream, &what);
            }
            assert!(early_plain > 0, "direct {is_direct}, {edit:?}: without, some come early");
        }
    }
}

/// The old way is taken to be empty after 100 ms, whatever a box keeps for longer.
#[test]
fn nothing_waits_for_ever_for_what_a_box_keeps() {
    let (mut line, stream) = slow(8, true, Duration::from_millis(700));
    line.world.run_for(SECOND);
    change(&mut line, Edit::Remove { service: name(0) });
    line.world.run_for(SECOND);
    assert_eq!(outcomes(&mut line)[1..], [ReconfigurationOutcome::Done]);
    let early = early(&mut line, stream);
    assert!(early.iter().all(|early| *early > 0), "order was given up: {early:?}");
    ends_well(&mut line, stream, "a box that keeps packets for long");
}

/// Numbers of datagrams that the server's program got after later ones.
fn reordered_datagrams(is_ordered: bool) -> usize {
    let mut line = open_line(9, Weather::FAIR, 1);
    if is_ordered {
        line.keep_order();
    }
    let talk = service("talk.shop");
    let demux = Demux {
        listener: SocketAddr::new([0_u16; 8].into(), 53),
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: Some(17),
        allow: Allow::Any,
    };
    let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
    let server = line.world.host(line.server);
    server.sal.add_rule(Instant::ZERO, talk.into(), rule).expect("there is room");
    let address = server.address;
    let key = server.public_key();
    line.world.host(line.router).forward(talk.into(), address, Some(key));
    let client = line.client;
    let ranges = line.world.host(client).ranges();
    let here = SocketAddr::new(ranges.host_v6().into(), 4000);
    let there = SocketAddr::new(ranges.virtual_v6(&talk).into(), 53);
    let mut said = 0_u16;
    let mut speak = |line: &mut Line, count: u16| {
        for _ in 0..count {
            line.world.say(client, &Datagram::new(here, there, &said.to_be_bytes()));
            said += 1;
            line.world.run_for(Duration::from_millis(3));
        }
    };
    speak(&mut line, 200);
    change(&mut line, Edit::Insert { service: name(0), before: None });
    speak(&mut line, 300);
    line.slow_down(0, LAG);
    speak(&mut line, 100);
    change(&mut line, Edit::Remove { service: name(0) });
    speak(&mut line, 600);
    line.world.run_for(SECOND);
    assert_eq!(outcomes(&mut line), [ReconfigurationOutcome::Done, ReconfigurationOutcome::Done]);
    let server = line.server;
    let came = line.world.host(server).datagrams.iter().filter(|one| one.tuple.destination.port() == 53);
    let came: Vec<u16> = came.map(|one| u16::from_be_bytes([one.data[0], one.data[1]])).collect();
    let mut all = came.clone();
    all.sort_unstable();
    assert!(all == (0..1200).collect::<Vec<_>>(), "ordered {is_ordered}: each comes once");
    came.windows(2).filter(|pair| pair[0] > pair[1]).count()
}

#[test]
fn datagrams_of_the_new_way_come_after_the_last_of_the_old_one() {
    assert!(reordered_datagrams(false) > 0, "without, they do not");
    assert_eq!(reordered_datagrams(true), 0);
}

#[test]
fn loss_costs_nobody_a_session_whose_order_is_kept() {
    for seed in 0..8 {
        let (mut line, stream) = slow(200 + seed, true, Duration::from_millis(seed % 4 * 20));
        line.set_direct(seed % 2 == 0);
        line.world.network.weather = Weather {
            loss_per_mille: 40,
            duplicate_per_mille: 40,
            delay_max: Duration::from_millis(1 + seed % 3 * 7),
            ..Weather::FAIR
        };
        change(&mut line, Edit::Replace { service: name(0), by: name(1) });
        line.world.run_for(4 * SECOND);
        line.world.network.weather = Weather::FAIR;
        assert_eq!(outcomes(&mut line).len(), 2, "seed {seed}");
        ends_well(&mut line, stream, &format!("seed {seed}"));
    }
}

#[test]
fn a_way_that_does_not_come_to_stand_leaves_a_session_whose_order_is_kept_as_it_was() {
    for seed in 0..6 {
        let (mut line, stream) = slow(30 + seed, true, LAG);
        let boxed = line.boxes[1];
        let [client, boxed] = [line.client, boxed].map(|host| line.world.host(host).address);
        change(&mut line, Edit::Replace { service: name(0), by: name(1) });
        // Before the new way stands, while both ends turn, and afterwards.
        line.world.run_for(Duration::from_millis(seed * 4));
        line.world.network.cut(client, boxed);
        line.world.run_for(SECOND);
        line.world.network.heal();
        line.world.run_for(4 * SECOND);
        assert_eq!(outcomes(&mut line).len(), 2, "seed {seed}");
        ends_well(&mut line, stream, &format!("seed {seed}"));
    }
}

#[test]
fn agents_may_die_at_every_step_of_a_change_whose_order_is_kept() {
    for which in 0..4 {
        for step in 0..6 {
            let (mut line, stream) = slow(400 + step, true, LAG);
            line.set_direct(step % 2 == 0);
            change(&mut line, Edit::Replace { service: name(0), by: name(1) });
            line.world.run_for(Duration::from_millis(step * 18));
            let dies = [line.client, line.server, line.boxes[0], line.boxes[1]][which];
            line.world.kill_agent(dies);
            line.world.run_for(Duration::from_millis(20 + step * 80));
            line.world.start_agent(dies);
            let router = line.router;
            for host in [line.client, line.server, line.boxes[0], line.boxes[1]] {
                line.world.register_again(router, host);
            }
            ends_well(&mut line, stream, &format!("{which} at step {step}"));
        }
    }
}

#[test]
fn either_end_may_close_or_reset_while_order_is_kept() {
    const BRIEF: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 100, closes: true };
    let mut changed = 0;
    for after in (0..16).map(|step| Duration::from_millis(step * 10)) {
        for aborts in [None, Some(false), Some(true)] {
            let what = format!("{after:?}, aborted by the server {aborts:?}");
            let mut line = open_line(15, Weather::FAIR, 1);
            line.keep_order();
            let stream = line.talk(if aborts.is_some() { CHATTY } else { BRIEF });
            line.world.run_for(3 * SECOND / 10);
            change(&mut line, Edit::Insert { service: name(0), before: None });
            line.world.run_for(3 * SECOND / 10);
            line.slow_down(0, LAG);
            if aborts.is_none() {
                // Both ends close while the box is taken out, or a moment before.
                line.world.run_for(after);
            }
            changed += u32::from(may_change(&mut line, Edit::Remove { service: name(0) }));
            if aborts.is_some() {
                line.world.run_for(after);
            }
            if let Some(at_server) = aborts {
                let host = if at_server { line.server } else { line.client };
                let now = line.world.now;
                line.world.host(host).abort_stream(now, stream);
                line.world.touch(host);
            }
            // After a RST nobody waits for the other end.
            line.world.run_for(if aborts.is_some() { 30 * SECOND } else { 400 * SECOND });
            for end in ends(&mut line, stream) {
                let said = (end.was_reset, end.was_wrong, end.received, end.state);
                let is_whole = aborts.is_some() || !end.was_reset && end.received == 100 * 700;
                assert!(!end.was_wrong && is_whole && end.state != State::Open, "{what}: {said:?}");
            }
            nothing_stays(&mut line, &what);
        }
    }
    assert!(changed > 36, "changes amid the end: {changed}");
}

#[test]
fn what_goes_without_a_program_waits_for_what_it_still_has() {
    for is_direct in [false, true] {
        let mut early_plain = [0, 0];
        for is_ordered in [false, true] {
            let what = format!("direct {is_direct}, ordered {is_ordered}");
            let mut relayed = relayed(7, TALK, Duration::from_millis(60));
            if is_ordered {
                relayed.keep_order();
            }
            relayed.set_direct(is_direct);
            relayed.begin(TALK);
            relayed.world.run_for(SECOND);
            relayed.leave().expect("it may");
            relayed.world.run_for(SECOND);
            assert_eq!(relayed.outcomes(), [SpliceOutcome::Done], "{what}");
            let early = relayed.ends().map(|end| end.out_of_order);
            if is_ordered {
                assert_eq!(early, [0, 0], "{what}");
            } else {
                early_plain = early;
            }
            relayed.ends_well(&what);
        }
        assert!(early_plain.iter().all(|early| *early > 0), "direct {is_direct}: {early_plain:?}");
    }
}

#[test]
fn a_program_leaves_a_session_whose_order_is_kept_under_loss_at_its_end_and_with_agents_that_die() {
    for seed in 0..8 {
        let mut relayed = relayed(100 + seed, TALK, Duration::from_millis(seed % 5 * 11 + 1));
        relayed.keep_order();
        relayed.set_direct(seed % 2 == 0);
        relayed.begin(TALK);
        relayed.world.run_for(SECOND);
        let bad = Weather { loss_per_mille: 40, duplicate_per_mille: 40, ..Weather::FAIR };
        relayed.world.network.weather = bad;
        relayed.leave().expect("it may");
        relayed.world.run_for(4 * SECOND);
        relayed.world.network.weather = Weather::FAIR;
        relayed.world.run_for(2 * SECOND);
        relayed.ends_well(&format!("seed {seed}"));
    }
    const BRIEF: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 100, closes: true };
    for micros in (0..12).map(|step| 620_000 + step * 15_000) {
        let mut relayed = relayed(15, BRIEF, Duration::from_millis(40));
        relayed.keep_order();
        relayed.begin(BRIEF);
        relayed.world.run_for(Duration::from_micros(micros));
        if relayed.leave().is_err() {
            continue;
        }
        relayed.world.run_for(400 * SECOND);
        for end in relayed.ends() {
            let said = (end.was_reset, end.was_wrong, end.received, end.state);
            assert!(!end.was_reset && !end.was_wrong && end.received == 70_000, "at {micros} us: {said:?}");
        }
        relayed.nothing_stays(&format!("at {micros} us"));
    }
    for which in 0..2 {
        for step in 0..12 {
            let mut relayed = relayed(14 + step, TALK, Duration::from_millis(30));
            relayed.keep_order();
            relayed.begin(TALK);
            relayed.world.run_for(SECOND);
            relayed.leave().expect("it may");
            relayed.world.run_for(Duration::from_millis(step * 5));
            let dies = [relayed.client, relayed.server][which];
            relayed.world.kill_agent(dies);
            relayed.world.run_for(Duration::from_millis(20 + step * 70));
            relayed.world.start_agent(dies);
            let router = relayed.router;
            for host in [relayed.client, relayed.proxy, relayed.server] {
                relayed.world.register_again(router, host);
            }
            relayed.ends_well(&format!("{which} at step {step}"));
        }
    }
}
