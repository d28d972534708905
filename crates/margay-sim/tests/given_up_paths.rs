//! New paths of running sessions that come to nothing, and what middleboxes' hosts keep of them, in virtual time.

mod line;

use std::time::Duration;

use line::{Line, name, open_line};
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome};
use margay_core::{Event, FlowInfo, Lifecycle, Role};
use margay_sim::stream::Plan;
use margay_sim::{HostId, Weather};

const SECOND: Duration = Duration::from_secs(1);
const MILLISECOND: Duration = Duration::from_millis(1);
/// Longer than every test.
const CHAT: Plan = Plan { write: 70, every: Duration::from_millis(20), writes: u32::MAX, closes: false };
/// Time for one more question of a middlebox's host.
const SETTLED: Duration = Duration::from_secs(12);

fn session(line: &mut Line) -> FlowInfo {
    let chat = line.service;
    let mut flows = line.world.host(line.client).sal.flows();
    flows.find(|flow| flow.service == chat && flow.role == Role::Initiator).expect("the session")
}

fn change(line: &mut Line, edit: Edit) {
    let now = line.world.now;
    let client = line.client;
    let id = session(line).flow;
    let sal = &mut line.world.host(client).sal;
    sal.reconfigure(now, id, edit).expect("it may");
    line.world.touch(client);
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

fn flows_at(line: &mut Line, host: HostId) -> usize {
    line.world.host(host).sal.flow_count()
}

fn goes_on(line: &mut Line, stream: usize, what: &str) {
    let client = line.client;
    let before = line.world.host(client).streams[stream].received;
    line.world.run_for(5 * SECOND);
    let end = line.world.host(client).streams[stream].clone();
    assert!(
        !end.was_reset && !end.was_wrong && end.received > before,
        "{what}: {} bytes, reset {}",
        end.received,
        end.was_reset
    );
}

/// An agent that is killed may have persisted one half of two: the other is confirmed a round trip later.
#[test]
fn a_half_that_was_persisted_alone_is_forgotten() {
    let mut alone = 0;
    for step in 0..12 {
        let what = format!("killed {step} times 100 us after the first half was set up");
        let mut line = open_line(110 + u64::from(step), Weather::FAIR, 1);
        let stream = line.talk(CHAT);
        line.world.run_for(SECOND);
        let middlebox = line.boxes[0];
        let now = line.world.now;
        line.world.host(middlebox).lag_records(now, Duration::ZERO);
        change(&mut line, Edit::Insert { service: name(0), before: None });
        let is_set_up = |line: &mut Line| {
            let mut flows = line.world.host(middlebox).sal.flows();
            flows.any(|flow| flow.lifecycle == Lifecycle::Established)
        };
        while !is_set_up(&mut line) {
            line.world.run_for(MILLISECOND / 20);
        }
        line.world.run_for(MILLISECOND / 10 * step);
        line.world.kill_agent(middlebox);
        line.world.run_for(SECOND / 5);
        alone += usize::from(line.world.host(middlebox).lagging_records() == 1);
        line.world.start_agent(middlebox);
        let router = line.router;
        line.world.register_again(router, middlebox);
        line.world.run_for(SETTLED);
        let is_done = outcomes(&mut line).contains(&ReconfigurationOutcome::Done);
        assert_eq!(flows_at(&mut line, middlebox), if is_done { 2 } else { 0 }, "{what}");
        goes_on(&mut line, stream, &what);
    }
    assert!(alone > 0, "no kill met a half that was persisted alone");
}

/// A middlebox's host answers under keys that the client's agent has lost in a restart: the client asks it for a full
/// handshake, as at a session's first set-up.
#[test]
fn a_client_that_has_lost_the_middleboxs_keys_inserts_it_all_the_same() {
    let mut line = open_line(140, Weather::FAIR, 1);
    let stream = line.talk(CHAT);
    line.world.run_for(SECOND);
    let client = line.client;
    let middlebox = line.boxes[0];
    // What the client's agent knows of the middlebox's host comes later than its last record.
    let now = line.world.now;
    line.world.host(client).lag_records(now, 60 * SECOND);
    let router = line.router;
    line.world.publish(router, middlebox, "other.shop", 4);
    line.world.connect(client, "other.shop");
    line.world.run_for(SECOND);
    line.world.kill_agent(client);
    line.world.run_for(SECOND / 10);
    line.world.start_agent(client);
    line.world.register_again(router, client);
    line.world.run_for(SECOND);
    change(&mut line, Edit::Insert { service: name(0), before: None });
    line.world.run_for(3 * SECOND);
    assert_eq!(outcomes(&mut line), [ReconfigurationOutcome::Done]);
    goes_on(&mut line, stream, "through the middlebox");
}
