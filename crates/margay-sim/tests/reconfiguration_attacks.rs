//! What strangers make of a session whose boxes are changed: messages that are forged, altered or said again change
//! nothing, and who has lost a session sets no way of it up again.

mod line;

use std::net::SocketAddr;
use std::time::Duration;

use line::{CHAT, Line, MAIL, NAME, line};
use margay_core::chain::{BoxWanted, ChainPolicy, ChainRule};
use margay_core::name::Prefix;
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome};
use margay_core::{DropReason, Event, Role};
use margay_sim::Weather;
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_wire::{Extension, Kind, Message, ReconfigurationStep};

const SECOND: Duration = Duration::from_secs(1);
const TALK: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 1500, closes: true };
const SCRUBBER: &str = "box-0.shop";

/// From whom, to whom, and what.
type Said = (SocketAddr, SocketAddr, Vec<u8>);

/// A session through no boxes, and all that is said while a box is put into it and taken out.
fn changed(seed: u64) -> (Line, usize, Vec<Said>) {
    let mut line = line(seed, Weather::FAIR, 1);
    let one =
        BoxWanted { service: service(SCRUBBER), name: SCRUBBER.to_owned(), may_be_left_out: false, is_proxy: false };
    let rule = ChainRule {
        name: "mail".to_owned(),
        services: Prefix::from(service(MAIL)),
        protocol: None,
        ports: None,
        clients: Vec::new(),
        filter: None,
        boxes: vec![one],
        is_ordered: false,
        may_add: Vec::new(),
    };
    let policy = ChainPolicy { rules: vec![rule], ..ChainPolicy::default() };
    for host in line.all() {
        line.world.host(host).sal.set_chain_policy(policy.clone()).expect("it can be gone by");
    }
    let stream = line.talk(TALK);
    line.world.run_for(SECOND);
    line.world.recording = Some(Vec::new());
    for edit in [Edit::Insert { service: service(SCRUBBER), before: None }, Edit::Remove { service: service(SCRUBBER) }]
    {
        let client = line.client;
        let now = line.world.now;
        let is_it = |flow: &margay_core::FlowInfo| flow.role == Role::Initiator && flow.app.protocol == 6;
        let id = line.world.host(client).sal.flows().find(is_it).expect("the session").flow;
        line.world.host(client).sal.reconfigure(now, id, edit).expect("it may");
        line.world.touch(client);
        line.world.run_for(SECOND);
    }
    let said = line.world.recording.take().expect("it was recorded");
    assert_eq!(done(&mut line), 2);
    (line, stream, said)
}

fn done(line: &mut Line) -> usize {
    let client = line.client;
    let events = line.world.host(client).events.iter();
    let is_done = |event: &&Event| match event {
        Event::Reconfigured { change, .. } => change.outcome == ReconfigurationOutcome::Done,
        _ => false,
    };
    events.filter(is_done).count()
}

fn step_of(bytes: &[u8]) -> Option<(Kind, ReconfigurationStep)> {
    let message = Message::parse(bytes).ok()?;
    Some((message.kind, message.reconfiguration()?.step))
}

fn drops(line: &mut Line, reason: DropReason) -> u64 {
    line.all().into_iter().map(|host| line.world.host(host).sal.counters().drops(reason)).sum()
}

/// The session is as it was, and ends as it should.
fn is_unharmed(line: &mut Line, stream: usize) {
    let scrubber = line.boxes[0];
    assert_eq!(line.world.host(scrubber).sal.flow_count(), 0);
    line.world.run_for(360 * SECOND);
    let client = line.client;
    for end in [line.world.host(client).streams[stream].clone(), line.served()] {
        assert!(!end.was_reset && !end.was_wrong);
        assert_eq!(end.received, 1500 * 700);
    }
    assert_eq!(done(line), 2);
    for host in line.all() {
        assert_eq!(line.world.host(host).sal.flow_count(), 0, "{host:?}");
    }
}

#[test]
fn what_is_said_again_changes_nothing() {
    let (mut line, stream, said) = changed(3);
    let steps: Vec<_> = said.iter().filter(|(.., bytes)| step_of(bytes).is_some()).cloned().collect();
    assert!(steps.len() > 12, "{} messages", steps.len());
    let before = drops(&mut line, DropReason::Replayed);
    for (from, to, bytes) in &steps {
        line.world.inject(*from, *to, bytes.clone());
    }
    line.world.run_for(SECOND);
    let tagged = steps.iter().filter(|(.., bytes)| step_of(bytes).is_some_and(|(kind, _)| kind != Kind::Syn)).count();
    assert!(drops(&mut line, DropReason::Replayed) >= before + tagged as u64);
    line.world.run_for(10 * SECOND);
    is_unharmed(&mut line, stream);
}

#[test]
fn what_is_altered_or_forged_is_nobodys_word() {
    let (mut line, stream, said) = changed(5);
    let before = drops(&mut line, DropReason::BadTag);
    let mut forged = 0;
    for (from, to, bytes) in said {
        let Some((kind, step)) = step_of(&bytes) else { continue };
        if kind == Kind::Syn {
            continue;
        }
        // Another step, and another number: both lie where RECONFIGURATION is.
        for (at, value) in [(0, ReconfigurationStep::Leave as u8), (7, 0xff)] {
            let mut other = bytes.clone();
            let place = place_of_reconfiguration(&other);
            if other[place + at] == value {
                continue;
            }
            other[place + at] = value;
            // A sequence number that was not seen yet: what is seen is dropped before its tag is looked at.
            other[17] ^= 1;
            line.world.inject(from, to, other);
            forged += 1;
        }
        assert!(step != ReconfigurationStep::Begin, "that comes in a SYN alone");
    }
    line.world.run_for(SECOND);
    assert!(forged > 20);
    assert!(drops(&mut line, DropReason::BadTag) >= before + forged);
    is_unharmed(&mut line, stream);
}

/// Where the value of RECONFIGURATION begins.
fn place_of_reconfiguration(bytes: &[u8]) -> usize {
    let header = 20;
    let mut at = header;
    loop {
        let (extension, _, taken) = Extension::parse(&bytes[at..]).expect("it was read");
        if matches!(extension, Some(Extension::Reconfiguration(_))) {
            return at + 4;
        }
        at += taken;
    }
}

/// A service demands a box, and another one of the same host demands none.
#[test]
fn a_way_for_another_name_of_the_server_does_not_evade_what_the_service_demands() {
    let mut line = line(9, Weather::FAIR, 1);
    line.trust_nobody_else();
    line.demand(CHAT, &[SCRUBBER]);
    let stream = line.talk(TALK);
    line.world.run_for(SECOND);
    let client = line.client;
    line.world.kill_agent(client);
    line.world.start_agent_with(client, &|record| record.service = service(NAME));
    let router = line.router;
    assert!(line.world.register_again(router, client));
    line.world.run_for(SECOND / 4);
    let now = line.world.now;
    let id = line.world.host(client).flow_of(stream).expect("the session").flow;
    let edit = Edit::Remove { service: service(SCRUBBER) };
    line.world.host(client).sal.reconfigure(now, id, edit).expect("it may be asked");
    line.world.touch(client);
    line.world.run_for(3 * SECOND);
    assert_eq!(done(&mut line), 0);
    let scrubber = line.boxes[0];
    assert_eq!(line.world.host(scrubber).sal.flow_count(), 2, "it goes through the box still");
    line.world.run_for(360 * SECOND);
    assert!(!line.served().was_reset && line.served().received == 1500 * 700);
}

#[test]
fn a_way_is_not_set_up_again_by_who_has_kept_its_syn() {
    let (mut line, stream, said) = changed(7);
    let server = line.server;
    let to_server = SocketAddr::new(line.world.host(server).address, margay_wire::PORT);
    let syns: Vec<_> = said
        .iter()
        .filter(|(_, to, bytes)| *to == to_server && step_of(bytes).is_some_and(|(kind, _)| kind == Kind::Syn))
        .cloned()
        .collect();
    assert!(!syns.is_empty());
    let flows = line.world.host(server).sal.flow_count();
    for (from, to, bytes) in syns {
        line.world.inject(from, to, bytes);
    }
    line.world.run_for(SECOND / 2);
    assert_eq!(line.world.host(server).sal.flow_count(), flows, "no way of it is half-open");
    line.world.run_for(10 * SECOND);
    is_unharmed(&mut line, stream);
}
