//! Connections end while their boxes are changed, in virtual time: whichever end closes first, and at whichever step of
//! the change, both ends have forgotten the connection when any other one would be forgotten.

mod line;

use std::time::Duration;

use line::{Line, name, open_line};
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome, ReconfigurationRefused};
use margay_core::{Input, Role};
use margay_sim::Weather;
use margay_sim::check::nothing_left_over;
use margay_sim::stream::Plan;

const SECOND: Duration = Duration::from_secs(1);
/// One that writes, and closes 1.4 s after it has connected.
const WRITES: Plan = Plan { write: 700, every: Duration::from_millis(14), writes: 100, closes: true };
/// One that does not close.
const TALKS: Plan = Plan { closes: false, writes: u32::MAX, ..WRITES };
/// One that closes before anything is changed.
const EARLY: Plan = Plan { write: 700, every: Duration::from_millis(400), writes: 1, closes: true };
/// Agents keep a connection that both ends have closed for 10 s, and then ask whether all of it has arrived; of a way
/// that a session has left nothing is kept as long as that.
const ORDINARY: Duration = Duration::from_secs(13);

/// The last step of a change is so long after its first.
const CHANGE: Duration = Duration::from_millis(400);

/// A box is put in or taken out, so long after a connection was begun that ends at 1.4 s. Gives what has become of the
/// change, and how many flows are left after [`ORDINARY`] at client and server.
fn ends_amid(
    line: &mut Line,
    (plans, takes_out): ((Plan, Plan), bool),
    after: Duration,
) -> (Option<ReconfigurationOutcome>, [usize; 2]) {
    let stream = line.talk_as(plans.0, plans.1);
    line.world.run_for(SECOND / 2);
    if takes_out {
        order(line, Edit::Insert { service: name(0), before: None }).expect("it may");
    }
    line.world.run_for(after.saturating_sub(SECOND / 2));
    let edit = match takes_out {
        true => Edit::Remove { service: name(0) },
        false => Edit::Insert { service: name(0), before: None },
    };
    let begun = order(line, edit);
    assert!(matches!(begun, Ok(()) | Err(ReconfigurationRefused::NotOpen)), "{begun:?}");
    line.world.run_for(ORDINARY + WRITES.every * WRITES.writes - after + SECOND / 2);
    let client = line.client;
    let bytes = |plan: Plan| u64::from(plan.writes) * plan.write as u64;
    for (end, peer) in [(line.world.host(client).streams[stream].clone(), plans.1), (line.served(), plans.0)] {
        assert!(!end.was_reset && !end.was_wrong);
        assert_eq!(end.received, bytes(peer));
    }
    let outcome = line.world.host(client).events.iter().rev().find_map(|event| match event {
        margay_core::Event::Reconfigured { change, .. } if change.edit == edit => Some(change.outcome.clone()),
        _ => None,
    });
    (outcome, [line.client, line.server].map(|host| line.world.host(host).sal.flow_count()))
}

fn order(line: &mut Line, edit: Edit) -> Result<(), ReconfigurationRefused> {
    let client = line.client;
    let chat = line.service;
    let now = line.world.now;
    let sal = &mut line.world.host(client).sal;
    let own = sal.flows().find(|flow| flow.service == chat && flow.role == Role::Initiator).map(|flow| flow.flow);
    let begun = own.map_or(Err(ReconfigurationRefused::NotOpen), |id| sal.reconfigure(now, id, edit).map(|_| ()));
    line.world.touch(client);
    begun
}

#[test]
fn a_connection_that_ends_amid_a_change_is_forgotten_as_any_other() {
    let mut done = 0;
    let mut left = Vec::new();
    for (by, plans) in [
        ("client", (WRITES, Plan::LISTEN)),
        ("server", (Plan::LISTEN, WRITES)),
        ("client, after the server", (WRITES, EARLY)),
        ("server, after the client", (EARLY, WRITES)),
    ] {
        for takes_out in [false, true] {
            for step in 0..u32::try_from(CHANGE.as_millis() / 16).expect("few") {
                let mut line = open_line(41, Weather::FAIR, 1);
                line.set_direct(step % 2 == 0);
                let after = Duration::from_millis(1450) - CHANGE + step * Duration::from_millis(16);
                let (outcome, flows) = ends_amid(&mut line, (plans, takes_out), after);
                done += u32::from(outcome == Some(ReconfigurationOutcome::Done));
                let case = (by, takes_out, after, outcome);
                if flows != [0, 0] {
                    left.push((case, flows));
                    continue;
                }
                let scrubber = line.boxes[0];
                assert_eq!(line.world.host(scrubber).sal.flow_count(), 0, "at the box: {case:?}");
                nothing_left_over(&line.world).expect("nothing is");
            }
        }
    }
    assert!(done > 50, "changes are over amid the end: {done}");
    assert!(left.is_empty(), "{}: {left:#?}", left.len());
}

/// A box's host whose agent has started again knows of neither half whether all has arrived, and then hears of one of
/// them. What the ends say when they forget the session comes to a half that is alone.
#[test]
fn a_half_at_a_box_goes_with_the_other_one() {
    let mut line = open_line(42, Weather::FAIR, 1);
    line.talk_as(WRITES, Plan::LISTEN);
    line.world.run_for(SECOND / 2);
    order(&mut line, Edit::Insert { service: name(0), before: None }).expect("it may");
    // The connection has ended, 1.4 s after it began; both ends forget it ten seconds later.
    line.world.run_for(SECOND * 3);
    let scrubber = line.boxes[0];
    line.world.kill_agent(scrubber);
    line.world.start_agent(scrubber);
    line.world.run_for(SECOND * 6);
    let halves: Vec<_> = line.world.host(scrubber).sal.flows().map(|flow| (flow.flow, flow.role)).collect();
    let (right, _) = halves.iter().find(|(_, role)| *role == Role::Initiator).expect("it is closed, and kept");
    assert_eq!(halves.len(), 2);
    let now = line.world.now;
    line.world.host(scrubber).sal.handle(now, Input::Ending { flow: *right, is_over: true });
    line.world.touch(scrubber);
    line.world.run_for(SECOND / 10);
    assert_eq!(line.world.host(scrubber).sal.flow_count(), 1);
    line.world.run_for(SECOND * 4);
    assert_eq!(line.world.host(scrubber).sal.flow_count(), 0);
}

/// No program at a box would say its numbers, so that its connection could be reset by them.
#[test]
fn a_session_that_fails_at_a_box_is_over_at_once_everywhere() {
    for role in [Role::Responder, Role::Initiator] {
        let mut line = open_line(43, Weather::FAIR, 1);
        let stream = line.talk_as(TALKS, Plan::LISTEN);
        line.world.run_for(SECOND / 2);
        order(&mut line, Edit::Insert { service: name(0), before: None }).expect("it may");
        line.world.run_for(SECOND);
        let scrubber = line.boxes[0];
        let half = line.world.host(scrubber).sal.flows().find(|flow| flow.role == role).expect("it is open").flow;
        let now = line.world.now;
        assert!(line.world.host(scrubber).sal.close_flow(now, half));
        line.world.touch(scrubber);
        line.world.run_for(SECOND);
        assert_eq!(line.world.host(scrubber).sal.flow_count(), 0, "{role:?}");
        let client = line.client;
        assert!(line.world.host(client).streams[stream].was_reset && line.served().was_reset, "{role:?}");
    }
}
