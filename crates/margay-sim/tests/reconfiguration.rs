//! Sessions that run come to go through other boxes, in virtual time: put in, taken out and replaced under streams both
//! ways, with loss, with agents that die, and at every end of a session.

mod line;

use std::sync::Arc;
use std::time::Duration;

use line::{Line, name, open_line};
use margay_core::chain::ChainPolicy;
use margay_core::name::ServiceId;
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome, ReconfigurationRefused, Reconfigured, SessionBoxes};
use margay_core::table::{Action, Allow, Rule};
use margay_core::{BoxKind, Event, Middlebox, RemoveReason, Role};
use margay_sim::check::{ends_agree, nothing_left_over};
use margay_sim::middlebox::Habit;
use margay_sim::stream::{Plan, State, Stream};
use margay_sim::world::service;
use margay_sim::{HostId, Weather};
use margay_wire::FlowId;

const SECOND: Duration = Duration::from_secs(1);
const TALK: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 1500, closes: true };
const BYTES: u64 = 1500 * 700;

const fn insert(service: margay_core::name::ServiceId) -> Edit {
    Edit::Insert { service, before: None }
}

/// The session of the stream, at the client.
fn flow(line: &mut Line) -> FlowId {
    let client = line.client;
    let flows = line.world.host(client).sal.flows();
    let chat = line.service;
    let mut own = flows.filter(|flow| flow.service == chat && flow.role == Role::Initiator).map(|flow| flow.flow);
    own.next().expect("the session")
}

/// Gives the number of the order.
fn order(line: &mut Line, edit: Edit) -> Result<u64, ReconfigurationRefused> {
    let id = flow(line);
    let now = line.world.now;
    let client = line.client;
    let begun = line.world.host(client).sal.reconfigure(now, id, edit);
    line.world.touch(client);
    begun
}

/// The reconfigurations that are over.
fn changes(line: &mut Line) -> Vec<Reconfigured> {
    let client = line.client;
    let events = line.world.host(client).events.iter();
    let change = |event: &Event| match event {
        Event::Reconfigured { change, .. } => Some(change.clone()),
        _ => None,
    };
    events.filter_map(change).collect()
}

/// What has become of the reconfigurations until now.
fn outcomes(line: &mut Line) -> Vec<ReconfigurationOutcome> {
    changes(line).into_iter().map(|change| change.outcome).collect()
}

fn flows_at(line: &mut Line, host: HostId) -> usize {
    line.world.host(host).sal.flow_count()
}

fn bytes_of(line: &mut Line, at: usize) -> u64 {
    let host = line.boxes[at];
    line.world.host(host).middlebox.as_ref().expect("it has one").bytes
}

/// The boxes of the session as the client's host has them.
fn boxes(line: &mut Line) -> Vec<margay_core::name::ServiceId> {
    let id = flow(line);
    let client = line.client;
    let shown = line.world.host(client).sal.flow(id).expect("it is there");
    shown.chain.map(|chain| chain.boxes.iter().map(|one| one.service).collect()).unwrap_or_default()
}

/// Why flows have ended at each host.
fn reasons(line: &mut Line) -> String {
    let mut text = String::new();
    for host in line.all() {
        let counters = line.world.host(host).sal.counters();
        let removed = RemoveReason::ALL.iter().map(|reason| (reason.label(), counters.removals(*reason)));
        let removed: Vec<_> = removed.filter(|(_, count)| *count > 0).collect();
        text.push_str(&format!("{host:?}: {removed:?}; "));
    }
    text.push_str(&format!("{:?}", outcomes(line)));
    text
}

fn ends_well(line: &mut Line, stream: usize) {
    ends(line, stream, false);
}

/// `may_be_reset`: once all has come and both have closed, a segment that is doubled may meet a socket that is gone.
fn ends(line: &mut Line, stream: usize, may_be_reset: bool) {
    line.world.run_for(360 * SECOND);
    let client = line.client;
    let ends: [Stream; 2] = [line.world.host(client).streams[stream].clone(), line.served()];
    for end in ends {
        let said = (end.was_reset, end.was_wrong, end.received, end.state, end.refused);
        assert!((may_be_reset || !end.was_reset) && !end.was_wrong, "{said:?} {}", reasons(line));
        assert_eq!(end.received, BYTES);
        assert!(matches!(end.state, State::TimeWait | State::Gone));
    }
    for host in line.all() {
        assert_eq!(flows_at(line, host), 0, "{host:?} forgets it");
        let now = line.world.now;
        assert_eq!(line.world.host(host).sal.locked_sessions(now), 0);
    }
    nothing_left_over(&line.world).expect("nothing is");
}

#[test]
fn a_box_is_put_in_and_taken_out_again_and_again() {
    for is_direct in [false, true] {
        let mut line = open_line(7, Weather::FAIR, 1);
        line.set_direct(is_direct);
        let stream = line.talk(TALK);
        line.world.run_for(SECOND);
        let scrubber = line.boxes[0];
        for round in 0..4 {
            let before = bytes_of(&mut line, 0);
            order(&mut line, insert(name(0))).expect("it may");
            line.world.run_for(SECOND);
            assert_eq!(outcomes(&mut line).len(), round * 2 + 1);
            assert_eq!(outcomes(&mut line).last(), Some(&ReconfigurationOutcome::Done));
            assert_eq!(boxes(&mut line), [name(0)]);
            assert!(bytes_of(&mut line, 0) > before + 10_000, "the session goes through it");
            assert_eq!(flows_at(&mut line, scrubber), 2);
            order(&mut line, Edit::Remove { service: name(0) }).expect("it may");
            line.world.run_for(SECOND / 2);
            assert_eq!(outcomes(&mut line).last(), Some(&ReconfigurationOutcome::Done));
            assert!(boxes(&mut line).is_empty());
            assert_eq!(flows_at(&mut line, scrubber), 0, "the box's agent has forgotten it");
            ends_agree(&line.world).expect("they do");
        }
        ends_well(&mut line, stream);
    }
}

#[test]
fn boxes_are_replaced_and_put_before_others() {
    for is_direct in [false, true] {
        let mut line = open_line(9, Weather::FAIR, 3);
        line.set_direct(is_direct);
        let stream = line.talk(TALK);
        line.world.run_for(SECOND);
        for (edit, wanted) in [
            (insert(name(0)), vec![0]),
            (Edit::Replace { service: name(0), by: name(1) }, vec![1]),
            (Edit::Insert { service: name(2), before: Some(name(1)) }, vec![2, 1]),
            (Edit::Remove { service: name(2) }, vec![1]),
            (Edit::Remove { service: name(1) }, vec![]),
        ] {
            order(&mut line, edit).expect("it may");
            line.world.run_for(SECOND);
            assert_eq!(outcomes(&mut line).last(), Some(&ReconfigurationOutcome::Done), "{edit:?}");
            assert_eq!(boxes(&mut line), wanted.iter().map(|at| name(*at)).collect::<Vec<_>>());
            let halves: usize = line.boxes.clone().into_iter().map(|host| flows_at(&mut line, host)).sum();
            assert_eq!(halves, 2 * wanted.len(), "{edit:?}");
            ends_agree(&line.world).expect("they do");
        }
        ends_well(&mut line, stream);
    }
}

#[test]
fn datagrams_go_through_a_box_that_is_put_in() {
    let mut line = open_line(16, Weather::FAIR, 1);
    assert_eq!(line.ask_by_datagrams(4), 4);
    for (edit, bytes) in [(insert(name(0)), 8), (Edit::Remove { service: name(0) }, 0)] {
        let client = line.client;
        let now = line.world.now;
        let id = line.world.host(client).sal.flows().find(|flow| flow.app.protocol == 17).expect("the session").flow;
        line.world.host(client).sal.reconfigure(now, id, edit).expect("it may");
        line.world.touch(client);
        line.world.run_for(3 * SECOND);
        assert_eq!(outcomes(&mut line).last(), Some(&ReconfigurationOutcome::Done), "{edit:?}");
        let before = bytes_of(&mut line, 0);
        let answered = line.world.host(client).datagrams.len();
        assert_eq!(line.ask_by_datagrams(4), answered + 4);
        assert_eq!(bytes_of(&mut line, 0) - before, bytes, "questions and answers pass it, or none do");
    }
    let scrubber = line.boxes[0];
    assert_eq!(flows_at(&mut line, scrubber), 0);
}

/// Its client is a container, whose packets have the address of a socket that has got a source name since.
#[test]
fn a_session_without_a_source_name_gets_none_by_going_through_a_box() {
    let mut line = open_line(16, Weather::FAIR, 1);
    assert_eq!(line.ask_by_datagrams(4), 4);
    let (client, server, now) = (line.client, line.server, line.world.now);
    let sal = &mut line.world.host(client).sal;
    let begun = sal.flows().find(|flow| flow.app.protocol == 17).expect("the session");
    let own = ServiceId::at_host(sal.host(), 0x8000_0001);
    sal.set_source(17, begun.app.source, own, Arc::new(|_| true)).expect("room");
    sal.reconfigure(now, begun.flow, insert(name(0))).expect("it may");
    line.world.touch(client);
    line.world.run_for(3 * SECOND);
    assert_eq!(outcomes(&mut line).last(), Some(&ReconfigurationOutcome::Done));
    for host in [client, server] {
        let sources: Vec<_> = line.world.host(host).sal.flows().map(|flow| flow.source).collect();
        assert_eq!(sources, [None], "{host:?}");
    }
}

#[test]
fn orders_that_come_together_are_carried_out_one_after_the_other() {
    let mut line = open_line(10, Weather::FAIR, 2);
    let stream = line.talk(TALK);
    line.world.run_for(SECOND);
    let edits = [insert(name(0)), insert(name(1)), Edit::Remove { service: name(0) }, insert(name(1))];
    let numbers = edits.map(|edit| order(&mut line, edit).expect("it may, or waits"));
    for _ in 0..5 {
        order(&mut line, insert(name(0))).expect("it waits");
    }
    assert_eq!(order(&mut line, insert(name(1))), Err(ReconfigurationRefused::UnderWay));
    line.world.run_for(5 * SECOND);
    let said = changes(&mut line);
    let of_order = |number| said.iter().filter(move |change| change.order == Some(number));
    for (number, boxes) in numbers[..3].iter().zip([vec![name(0)], vec![name(0), name(1)], vec![name(1)]]) {
        let all: Vec<_> = of_order(*number).map(|change| (&change.outcome, &change.boxes)).collect();
        assert_eq!(all, [(&ReconfigurationOutcome::Done, &boxes)]);
    }
    let twice: Vec<_> = of_order(numbers[3]).map(|change| change.outcome.label()).collect();
    assert_eq!(twice, ["refused"], "it is there already, by then");
    assert_eq!(said.len(), 9);
    assert_eq!(boxes(&mut line), [name(1), name(0)]);
    let client = line.client;
    assert!(line.world.host(client).sal.counters().reconfigurations_locked > 0);
    ends_well(&mut line, stream);
}

#[test]
fn orders_of_a_session_that_ends_are_told_so() {
    let mut line = open_line(18, Weather::FAIR, 2);
    line.talk(TALK);
    line.world.run_for(SECOND);
    let edits = [insert(name(0)), insert(name(1)), Edit::Remove { service: name(0) }];
    let numbers = edits.map(|edit| order(&mut line, edit).expect("it may, or waits"));
    let client = line.client;
    let id = flow(&mut line);
    let now = line.world.now;
    assert!(line.world.host(client).sal.close_flow(now, id));
    line.world.touch(client);
    line.world.run_for(10 * SECOND);
    let said: Vec<_> = changes(&mut line).into_iter().map(|change| (change.order, change.outcome)).collect();
    assert_eq!(said, numbers.map(|number| (Some(number), ReconfigurationOutcome::Ended)));
}

/// What three contend for, each with a box of its own, and what they have been told.
struct Contender {
    service: margay_core::name::ServiceId,
    /// The order that is not over.
    awaits: Option<u64>,
    completed: usize,
}

/// Gives what is wrong.
fn contend(seed: u64) -> Result<(), String> {
    let mut line = open_line(seed, Weather::FAIR, 3);
    line.set_direct(seed.is_multiple_of(2));
    line.talk(Plan { every: Duration::from_millis(50), writes: 4000, ..TALK });
    line.world.run_for(SECOND);
    let mut three = [0, 1, 2].map(|at| Contender { service: name(at), awaits: None, completed: 0 });
    let mut heard = 0;
    let mut is_now: Vec<margay_core::name::ServiceId> = Vec::new();
    for phase in 0..2 {
        line.world.network.weather = Weather {
            loss_per_mille: line.world.random() % 60,
            duplicate_per_mille: line.world.random() % 60,
            delay_max: Duration::from_millis(1 + u64::from(line.world.random() % 20)),
            ..Weather::FAIR
        };
        for step in 0..200 {
            let at = (line.world.random() % 3) as usize;
            // In the last part nobody orders anything more, and all comes to rest.
            if three[at].awaits.is_none() && step < 120 {
                let service = three[at].service;
                let other = three[(at + 1 + (line.world.random() % 2) as usize) % 3].service;
                let before = line.world.random().is_multiple_of(2).then_some(other);
                let edit = match (is_now.contains(&service), line.world.random() % 4) {
                    (false, 0) => Edit::Replace { service: other, by: service },
                    (false, _) => Edit::Insert { service, before },
                    (true, _) => Edit::Remove { service },
                };
                // What is asked of the boxes that there are just now may be refused at once.
                three[at].awaits = order(&mut line, edit).ok();
            }
            let pause = if step < 120 { line.world.random() % 100 } else { 100 };
            line.world.run_for(Duration::from_millis(pause.into()));
            for change in changes(&mut line).into_iter().skip(heard) {
                heard += 1;
                let its = three.iter_mut().find(|one| one.awaits.is_some() && one.awaits == change.order);
                let Some(its) = its else { return Err(format!("nobody awaits {change:?}")) };
                its.awaits = None;
                if change.outcome == ReconfigurationOutcome::Done {
                    its.completed += 1;
                    let known = SessionBoxes { between: is_now, ..SessionBoxes::default() };
                    is_now = change.edit.of(&known).map_err(|error| format!("{change:?} of {known:?}: {error}"))?;
                    if is_now != change.boxes {
                        return Err(format!("an update was lost: {change:?}, and {is_now:?} was wanted"));
                    }
                }
            }
        }
        if boxes(&mut line) != is_now {
            return Err(format!("phase {phase}: what was done is not there: {is_now:?}, {:?}", boxes(&mut line)));
        }
        if three.iter().any(|one| one.awaits.is_some()) {
            return Err(format!("phase {phase}: an order was never answered"));
        }
        let halves = line.boxes.clone().into_iter().map(|host| flows_at(&mut line, host)).sum::<usize>();
        if halves != 2 * is_now.len() {
            return Err(format!("phase {phase}: boxes have {halves} halves: {is_now:?}"));
        }
        ends_agree(&line.world)?;
    }
    if three.iter().any(|one| one.completed == 0) {
        return Err("one of the three has starved".to_owned());
    }
    let stream = line.world.host(line.client).streams[0].clone();
    if stream.was_reset || stream.was_wrong || line.served().was_wrong || stream.received == 0 {
        return Err("the stream was harmed".to_owned());
    }
    Ok(())
}

/// `MARGAY_SEEDS` sets how many are tried.
#[test]
fn of_three_that_contend_none_loses_what_it_has_done_and_none_starves() {
    let seeds = std::env::var("MARGAY_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    for seed in 0..seeds {
        contend(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
}

#[test]
fn what_cannot_be_is_refused_and_the_session_is_as_it_was() {
    let mut line = open_line(11, Weather::FAIR, 2);
    let stream = line.talk(TALK);
    line.world.run_for(SECOND);
    let rewriting = line.boxes[1];
    line.withdraw_box(rewriting);
    line.world.publish_box(line.router, rewriting, "box-1.shop", Habit::Passes);
    let sal = &mut line.world.host(rewriting).sal;
    let rules: Vec<_> = sal.rules().filter(|(prefix, ..)| prefix.id == name(1)).map(|(_, id, _)| id).collect();
    rules.into_iter().for_each(|id| assert!(sal.remove_rule(id)));
    let action = Action::Box(Middlebox { kind: BoxKind::Rewrite, allow: Allow::Any });
    let rule = Rule { priority: 100, weight: 1, action };
    sal.add_rule(margay_core::Instant::ZERO, name(1).into(), rule).expect("there is room");
    for (edit, why) in [
        (insert(service("unknown.shop")), "nobody serves"),
        (insert(name(1)), "must have a session from its beginning on"),
    ] {
        order(&mut line, edit).expect("it may be asked");
        line.world.run_for(4 * SECOND);
        let last = outcomes(&mut line).pop().expect("an outcome");
        assert!(matches!(&last, ReconfigurationOutcome::Failed(said) if said.contains(why)), "{last:?}");
        assert!(boxes(&mut line).is_empty());
    }
    assert!(matches!(order(&mut line, Edit::Remove { service: name(0) }), Err(ReconfigurationRefused::Edit(_))));
    ends_well(&mut line, stream);
}

#[test]
fn a_box_that_no_policy_of_the_server_names_is_not_put_in() {
    let mut line = open_line(12, Weather::FAIR, 1);
    let server = line.server;
    line.world.host(server).sal.set_chain_policy(ChainPolicy::default()).expect("it can be gone by");
    let stream = line.talk(TALK);
    line.world.run_for(SECOND);
    order(&mut line, insert(name(0))).expect("it may be asked");
    line.world.run_for(3 * SECOND);
    let last = outcomes(&mut line).pop().expect("an outcome");
    assert!(matches!(&last, ReconfigurationOutcome::Failed(_)), "{last:?}");
    let scrubber = line.boxes[0];
    assert_eq!(flows_at(&mut line, scrubber), 0);
    ends_well(&mut line, stream);
}

#[test]
fn loss_delays_a_change_and_costs_nobody_the_session() {
    for seed in 0..24 {
        let weather = Weather { loss_per_mille: 40, duplicate_per_mille: 40, ..Weather::FAIR };
        let mut line = open_line(100 + seed, Weather::FAIR, 2);
        line.set_direct(seed % 2 == 0);
        let stream = line.talk(TALK);
        line.world.run_for(SECOND);
        line.world.network.weather = weather;
        for round in 0..6 {
            let edit = match boxes(&mut line)[..] {
                [] => insert(name(0)),
                [one] if round % 2 == 0 => {
                    Edit::Replace { service: one, by: if one == name(0) { name(1) } else { name(0) } }
                }
                [one] => Edit::Remove { service: one },
                _ => unreachable!("there is one at most"),
            };
            // It may still be at work on the one before.
            let _ = order(&mut line, edit);
            line.world.run_for(SECOND);
        }
        line.world.run_for(20 * SECOND);
        line.world.network.weather = Weather::FAIR;
        assert!(!outcomes(&mut line).is_empty(), "seed {seed}");
        ends(&mut line, stream, true);
    }
}

#[test]
fn a_box_whose_host_dies_in_the_middle_leaves_the_session_as_it_was() {
    for micros in (0..8).map(|step| step * 15_000) {
        let mut line = open_line(13, Weather::FAIR, 1);
        let stream = line.talk(TALK);
        line.world.run_for(SECOND);
        let scrubber = line.boxes[0];
        order(&mut line, insert(name(0))).expect("it may");
        line.world.run_for(Duration::from_micros(micros));
        line.world.kill_agent(scrubber);
        line.world.run_for(2 * SECOND);
        line.world.start_agent(scrubber);
        line.world.run_for(8 * SECOND);
        let said = outcomes(&mut line);
        assert_eq!(said.len(), 1, "at {micros} us");
        let now = line.world.now;
        let client = line.client;
        assert_eq!(line.world.host(client).sal.locked_sessions(now), 0, "at {micros} us: {said:?}");
        ends_well(&mut line, stream);
    }
}

#[test]
fn a_change_whose_last_word_is_lost_is_in_no_later_ones_way() {
    // The word that the old way is over, or that the new one is not to be, goes by a box that is dead for good.
    let mut judged = 0;
    for micros in (0..8).map(|step| step * 20_000) {
        for takes_out in [true, false] {
            let mut line = open_line(16, Weather::FAIR, 2);
            let stream = line.talk(TALK);
            line.world.run_for(SECOND);
            order(&mut line, insert(name(0))).expect("it may");
            if takes_out {
                line.world.run_for(SECOND);
                order(&mut line, Edit::Remove { service: name(0) }).expect("it may");
            }
            line.world.run_for(Duration::from_micros(micros));
            let scrubber = line.boxes[0];
            line.world.kill_agent(scrubber);
            let client = line.client;
            let is_locked = |line: &mut Line| {
                let now = line.world.now;
                line.world.host(client).sal.locked_sessions(now) > 0
            };
            while is_locked(&mut line) {
                line.world.run_for(SECOND / 50);
            }
            let is_out = boxes(&mut line).is_empty();
            if !is_out {
                // It goes through the dead box.
                continue;
            }
            order(&mut line, insert(name(1))).expect("it may");
            line.world.run_for(3 * SECOND);
            let said = outcomes(&mut line);
            assert_eq!(said.last(), Some(&ReconfigurationOutcome::Done), "at {micros} us, {takes_out}: {said:?}");
            assert_eq!(boxes(&mut line), [name(1)]);
            let ends = [line.world.host(client).streams[stream].clone(), line.served()];
            assert!(ends.iter().all(|end| !end.was_reset && !end.was_wrong), "at {micros} us, {takes_out}");
            judged += 1;
        }
    }
    assert!(judged > 4, "{judged}");
}

#[test]
fn a_box_that_was_absent_forgets_what_has_gone_another_way_meanwhile() {
    let mut gone = [0; 2];
    for (dies, micros) in [true, false].into_iter().flat_map(|dies| (0..8).map(move |step| (dies, step * 20_000))) {
        let mut line = open_line(17, Weather::FAIR, 1);
        let stream = line.talk(TALK);
        line.world.run_for(SECOND);
        order(&mut line, insert(name(0))).expect("it may");
        line.world.run_for(SECOND);
        order(&mut line, Edit::Remove { service: name(0) }).expect("it may");
        line.world.run_for(Duration::from_micros(micros));
        let scrubber = line.boxes[0];
        let halves = flows_at(&mut line, scrubber);
        let addresses = line.world.host(scrubber).sal.local_addresses().to_vec();
        // Longer than anybody says again that the session has left.
        if dies {
            line.world.kill_agent(scrubber);
            line.world.run_for(8 * SECOND);
            line.world.start_agent(scrubber);
        } else {
            line.world.set_addresses(scrubber, Vec::new());
            line.world.run_for(8 * SECOND);
            line.world.set_addresses(scrubber, addresses);
        }
        line.world.run_for(SECOND);
        let left = flows_at(&mut line, scrubber);
        let is_out = boxes(&mut line).is_empty();
        assert_eq!(left, if is_out { 0 } else { 2 }, "dies {dies}, at {micros} us: it has had {halves}");
        gone[usize::from(dies)] += usize::from(is_out && halves > 0);
        ends_well(&mut line, stream);
    }
    assert!(gone.into_iter().all(|gone| gone > 1), "{gone:?}");
}

#[test]
fn agents_of_the_ends_may_die_at_every_step() {
    for dies_at_client in [true, false] {
        for micros in (0..16).map(|step| step * 8_000) {
            for takes_out in [false, true] {
                let mut line = open_line(14, Weather::FAIR, 1);
                let stream = line.talk(TALK);
                line.world.run_for(SECOND);
                if takes_out {
                    order(&mut line, insert(name(0))).expect("it may");
                    line.world.run_for(SECOND);
                    order(&mut line, Edit::Remove { service: name(0) }).expect("it may");
                } else {
                    order(&mut line, insert(name(0))).expect("it may");
                }
                line.world.run_for(Duration::from_micros(micros));
                let dies = if dies_at_client { line.client } else { line.server };
                line.world.kill_agent(dies);
                line.world.run_for(SECOND / 4);
                line.world.start_agent(dies);
                let router = line.router;
                let client = line.client;
                let server = line.server;
                for host in [client, server] {
                    line.world.register_again(router, host);
                }
                line.world.run_for(30 * SECOND);
                let ends = [line.world.host(line.client).streams[stream].clone(), line.served()];
                for end in ends {
                    assert!(
                        !end.was_reset && !end.was_wrong && end.received == BYTES,
                        "at {micros} us, client {dies_at_client}, out {takes_out}: {} of {BYTES}, reset {}",
                        end.received,
                        end.was_reset
                    );
                }
                line.world.run_for(300 * SECOND);
                for host in line.all() {
                    assert_eq!(
                        flows_at(&mut line, host),
                        0,
                        "{host:?} at {micros} us, client {dies_at_client}, out {takes_out}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_session_may_end_at_every_step() {
    const BRIEF: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 100, closes: true };
    for micros in (0..20).map(|step| 620_000 + step * 8_000) {
        let mut line = open_line(15, Weather::FAIR, 1);
        let stream = line.talk(BRIEF);
        line.world.run_for(Duration::from_micros(micros));
        match order(&mut line, insert(name(0))) {
            Ok(_) => {}
            Err(ReconfigurationRefused::NotOpen) => break,
            Err(refused) => panic!("{refused}"),
        }
        line.world.run_for(30 * SECOND);
        let client = line.client;
        for end in [line.world.host(client).streams[stream].clone(), line.served()] {
            assert!(!end.was_reset && !end.was_wrong && end.received == 70_000, "{micros}: {}", end.received);
        }
        line.world.run_for(300 * SECOND);
        for host in line.all() {
            assert_eq!(flows_at(&mut line, host), 0, "{host:?} at {micros} us");
        }
        let removed = line.world.host(client).sal.counters().removals(RemoveReason::PeerFailed);
        assert_eq!(removed, 0, "at {micros} us");
    }
}
