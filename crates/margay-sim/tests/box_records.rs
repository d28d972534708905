//! Agents of boxes that are killed while sessions come to go through them, and start again with what they had written
//! down by then, in virtual time.

mod line;

use std::time::Duration;

use line::{Line, name, open_line};
use margay_core::name::ServiceId;
use margay_core::reconfiguration::Edit;
use margay_core::{Event, Role};
use margay_sim::Weather;
use margay_sim::stream::{Plan, State, Stream};

const SECOND: Duration = Duration::from_secs(1);
const TALK: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 450, closes: true };
const BYTES: u64 = 450 * 700;
/// Longer than a set-up, and a change, take here.
const LAG: Duration = Duration::from_millis(60);
/// A change takes less than this, with the time for which its old way is left.
const LONGEST_MS: u64 = 150;

fn order(line: &mut Line, edit: Edit) {
    let now = line.world.now;
    let client = line.client;
    let chat = line.service;
    let sal = &mut line.world.host(client).sal;
    let own = |flow: &margay_core::FlowInfo| flow.service == chat && flow.role == Role::Initiator;
    let id = sal.flows().find(own).expect("the session").flow;
    sal.reconfigure(now, id, edit).expect("it may");
    line.world.touch(client);
}

fn ends_well(line: &mut Line, stream: usize, what: &str) {
    line.world.run_for(360 * SECOND);
    let client = line.client;
    let ends: [Stream; 2] = [line.world.host(client).streams[stream].clone(), line.served()];
    for end in ends {
        let said = (end.was_reset, end.was_wrong, end.received, end.state);
        assert!(!end.was_reset && !end.was_wrong && end.received == BYTES, "{what}: {said:?}");
        assert!(matches!(end.state, State::TimeWait | State::Gone), "{what}: {said:?}");
    }
    for host in line.all() {
        assert_eq!(line.world.host(host).sal.flow_count(), 0, "{what}: {host:?} forgets it");
    }
}

/// The agent of box `dies` is killed so long after the order, and is back 100 ms later.
fn is_killed(line: &mut Line, dies: usize, after: Duration) {
    let host = line.boxes[dies];
    let now = line.world.now;
    line.world.host(host).lag_records(now, LAG);
    line.world.run_for(after);
    line.world.kill_agent(host);
    line.world.run_for(Duration::from_millis(100));
    line.world.start_agent(host);
    let router = line.router;
    line.world.register_again(router, host);
}

fn changes_well(boxes: usize, before: Option<ServiceId>, dies: usize, every_ms: u64) {
    let mut done = 0;
    let steps = LONGEST_MS / every_ms;
    for step in 0..steps {
        let after_ms = step * every_ms;
        let what = format!("box {dies} of {boxes}, {after_ms} ms after the order");
        let mut line = open_line(50 + step, Weather::FAIR, boxes);
        line.set_direct(step % 2 == 0);
        let stream = line.talk(TALK);
        line.world.run_for(SECOND / 2);
        // Each box's host has met its neighbours, and has an address for the name.
        for at in 0..boxes {
            order(&mut line, Edit::Insert { service: name(at), before: None });
            line.world.run_for(2 * SECOND / 5);
            order(&mut line, Edit::Remove { service: name(at) });
            line.world.run_for(SECOND / 5);
        }
        if let Some(before) = before {
            order(&mut line, Edit::Insert { service: before, before: None });
            line.world.run_for(SECOND / 2);
        }
        let edit = match before {
            Some(service) => Edit::Replace { service, by: name(boxes - 1) },
            None => Edit::Insert { service: name(boxes - 1), before: None },
        };
        order(&mut line, edit);
        is_killed(&mut line, dies, Duration::from_millis(after_ms));
        ends_well(&mut line, stream, &what);
        let client = line.client;
        let events = line.world.host(client).events.iter();
        let is_done =
            |event: &&Event| matches!(event, Event::Reconfigured { change, .. } if change.outcome.label() == "done");
        done += events.filter(is_done).count();
    }
    assert!(done > steps as usize / 2, "most changes are made all the same: {done}");
}

#[test]
fn a_box_that_is_put_in_may_die_at_every_step() {
    changes_well(1, None, 0, 5);
}

#[test]
fn a_box_that_replaces_another_one_may_die_at_every_step() {
    changes_well(2, Some(name(0)), 1, 5);
}

#[test]
fn a_box_that_is_replaced_may_die_at_every_step() {
    changes_well(2, Some(name(0)), 0, 15);
}
