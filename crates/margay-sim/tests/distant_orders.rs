//! Orders on the boxes of running sessions that are given at the host of the server or of a box, in virtual time.

mod line;

use std::time::Duration;

use line::{Line, name, open_line};
use margay_core::Event;
use margay_core::chain::ChainPolicy;
use margay_core::name::ServiceId;
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome, ReconfigurationRefused, Reconfigured, SessionBoxes};
use margay_sim::check::{ends_agree, nothing_left_over};
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{HostId, Weather};
use margay_wire::FlowId;

const SECOND: Duration = Duration::from_secs(1);
const TALK: Plan = Plan { write: 700, every: Duration::from_millis(30), writes: 700, closes: true };
const BYTES: u64 = 700 * 700;

const fn insert(service: ServiceId) -> Edit {
    Edit::Insert { service, before: None }
}

fn before(service: ServiceId, other: ServiceId) -> Edit {
    Edit::Insert { service, before: Some(other) }
}

const fn remove(service: ServiceId) -> Edit {
    Edit::Remove { service }
}

/// A flow of the stream's session at a host: the one by which the client's or the server's program sends, or the left
/// half at a box.
fn flow_at(line: &mut Line, host: HostId) -> FlowId {
    let chat = line.service;
    let flows: Vec<_> = line.world.host(host).sal.flows().filter(|flow| flow.service == chat).collect();
    let is_left = |chain: &margay_core::chain::ChainRecord| chain.place == margay_core::chain::ChainPlace::Left;
    let left = flows.iter().find(|flow| flow.chain.as_ref().is_some_and(is_left));
    left.or(flows.first()).expect("the session").flow
}

/// Gives the number of an order that is given at a host.
fn order_at(line: &mut Line, host: HostId, edit: Edit) -> Result<u64, ReconfigurationRefused> {
    let id = flow_at(line, host);
    let now = line.world.now;
    let begun = line.world.host(host).sal.reconfigure(now, id, edit);
    line.world.touch(host);
    begun
}

/// What the agent of a host has told of reconfigurations.
fn told(line: &mut Line, host: HostId) -> Vec<Reconfigured> {
    let change = |event: &Event| match event {
        Event::Reconfigured { change, .. } => Some(change.clone()),
        _ => None,
    };
    line.world.host(host).events.iter().filter_map(change).collect()
}

fn outcome_of(line: &mut Line, host: HostId, order: u64) -> Vec<ReconfigurationOutcome> {
    told(line, host).into_iter().filter(|one| one.order == Some(order)).map(|one| one.outcome).collect()
}

fn id_of(line: &mut Line, host: HostId) -> margay_core::key::HostId {
    margay_core::key::HostPublic(line.world.host(host).public_key()).id()
}

fn boxes(line: &mut Line) -> Vec<ServiceId> {
    let client = line.client;
    let id = flow_at(line, client);
    let flow = line.world.host(client).sal.flow(id).expect("it is there");
    flow.chain.map(|chain| chain.boxes.iter().map(|one| one.service).collect()).unwrap_or_default()
}

fn ends_well(line: &mut Line, stream: usize) {
    line.world.run_for(360 * SECOND);
    let ends = [line.world.host(line.client).streams[stream].clone(), line.served()];
    for end in ends {
        assert!(!end.was_reset && !end.was_wrong);
        assert_eq!(end.received, BYTES);
    }
    for host in line.all() {
        assert_eq!(line.world.host(host).sal.flow_count(), 0, "{host:?} forgets it");
        let now = line.world.now;
        assert_eq!(line.world.host(host).sal.locked_sessions(now), 0);
    }
    nothing_left_over(&line.world).expect("nothing is");
}

/// A session with its boxes, `through` at first.
fn talking(seed: u64, count: usize, through: &[usize]) -> (Line, usize) {
    let mut line = open_line(seed, Weather::FAIR, count);
    let stream = line.talk(TALK);
    line.world.run_for(SECOND);
    for at in through {
        let client = line.client;
        order_at(&mut line, client, insert(name(*at))).expect("it may");
        line.world.run_for(SECOND);
    }
    (line, stream)
}

#[test]
fn the_servers_host_has_boxes_put_in_replaced_and_taken_out() {
    for is_direct in [false, true] {
        let (mut line, stream) = talking(3, 3, &[]);
        line.set_direct(is_direct);
        let [client, server] = [line.client, line.server];
        let by = id_of(&mut line, server);
        for (edit, wanted) in [
            (insert(name(0)), vec![0]),
            (before(name(1), name(0)), vec![1, 0]),
            (Edit::Replace { service: name(0), by: name(2) }, vec![1, 2]),
            (remove(name(1)), vec![2]),
            (remove(name(2)), vec![]),
        ] {
            let order = order_at(&mut line, server, edit).expect("it may");
            line.world.run_for(SECOND);
            assert_eq!(outcome_of(&mut line, server, order), [ReconfigurationOutcome::Done], "{edit:?}");
            assert_eq!(boxes(&mut line), wanted.iter().map(|at| name(*at)).collect::<Vec<_>>());
            let at_client = told(&mut line, client).pop().expect("it was carried out there");
            assert_eq!((at_client.by, at_client.edit), (Some(by), edit));
            ends_agree(&line.world).expect("they do");
        }
        assert_eq!(line.world.host(client).sal.counters().orders_of_others, [5, 0, 0, 0]);
        ends_well(&mut line, stream);
    }
}

#[test]
fn the_host_of_each_box_has_its_own_taken_out_or_replaced_or_another_one_put_beside_it() {
    for at in 0..3 {
        let own = name(at);
        let mut beside = vec![name(0), name(1), name(2)];
        beside.insert(at, name(3));
        let mut behind = vec![name(0), name(1), name(2)];
        behind.insert(at + 1, name(3));
        let next = (at < 2).then(|| name(at + 1));
        let without: Vec<ServiceId> = (0..3).filter(|one| *one != at).map(name).collect();
        let replaced: Vec<ServiceId> = (0..3).map(|one| name(if one == at { 3 } else { one })).collect();
        for (edit, wanted) in [
            (before(name(3), own), beside),
            (Edit::Insert { service: name(3), before: next }, behind),
            (remove(own), without),
            (Edit::Replace { service: own, by: name(3) }, replaced),
        ] {
            let (mut line, stream) = talking(5, 4, &[0, 1, 2]);
            let host = line.boxes[at];
            let order = order_at(&mut line, host, edit).expect("it may");
            line.world.run_for(2 * SECOND);
            assert_eq!(outcome_of(&mut line, host, order), [ReconfigurationOutcome::Done], "{edit:?} at {at}");
            assert_eq!(boxes(&mut line), wanted, "{edit:?} at {at}");
            ends_well(&mut line, stream);
        }
    }
}

#[test]
fn what_is_not_about_its_own_box_is_refused_at_once_at_a_boxs_host() {
    let (mut line, stream) = talking(7, 4, &[0, 1, 2]);
    let middle = line.boxes[1];
    for edit in
        [remove(name(0)), Edit::Replace { service: name(2), by: name(3) }, insert(name(3)), before(name(3), name(0))]
    {
        assert_eq!(order_at(&mut line, middle, edit), Err(ReconfigurationRefused::NotItsBox), "{edit:?}");
    }
    let unknown = service("unknown.shop");
    let refused = order_at(&mut line, middle, before(unknown, name(1)));
    assert_eq!(refused, Err(ReconfigurationRefused::NotNamed(unknown)));
    let server = line.server;
    assert_eq!(order_at(&mut line, server, insert(unknown)), Err(ReconfigurationRefused::NotNamed(unknown)));
    assert_eq!(boxes(&mut line), [name(0), name(1), name(2)]);
    ends_well(&mut line, stream);
}

#[test]
fn orders_arrive_once_whatever_is_lost_or_doubled() {
    for seed in 0..12 {
        let (mut line, stream) = talking(200 + seed, 3, &[0, 1]);
        line.set_direct(seed.is_multiple_of(2));
        line.world.network.weather = Weather {
            loss_per_mille: 30 + (seed as u32 % 4) * 40,
            duplicate_per_mille: 100,
            delay_max: Duration::from_millis(1 + seed % 20),
            ..Weather::FAIR
        };
        let [server, first, last] = [line.server, line.boxes[0], line.boxes[1]];
        let mut orders = Vec::new();
        for (host, edit) in [(server, insert(name(2))), (first, remove(name(0))), (last, remove(name(1)))] {
            // The session may have left the box by another order meanwhile.
            let order = order_at(&mut line, host, edit);
            orders.push((host, edit, order.expect("it may")));
            line.world.run_for(SECOND);
        }
        line.world.run_for(20 * SECOND);
        line.world.network.weather = Weather::FAIR;
        let client = line.client;
        let carried_out = told(&mut line, client);
        for (host, edit, order) in orders {
            let said = outcome_of(&mut line, host, order);
            assert_eq!(said.len(), 1, "seed {seed}, {edit:?}: told once of each");
            let by = id_of(&mut line, host);
            let its: Vec<_> = carried_out.iter().filter(|one| one.by == Some(by)).collect();
            assert!(its.len() <= 1, "seed {seed}, {edit:?}: carried out once");
            if said[0] == ReconfigurationOutcome::Done {
                assert_eq!(its[0].outcome, ReconfigurationOutcome::Done, "seed {seed}, {edit:?}");
            }
        }
        line.world.run_for(360 * SECOND);
        let ends = [line.world.host(client).streams[stream].clone(), line.served()];
        assert!(ends.iter().all(|end| !end.was_wrong && end.received == BYTES), "seed {seed}");
    }
}

/// Gives what is wrong.
fn contend(seed: u64) -> Result<usize, String> {
    let (mut line, stream) = talking(300 + seed, 4, &[0]);
    line.set_direct(seed.is_multiple_of(2));
    line.world.network.weather = Weather {
        loss_per_mille: line.world.random() % 40,
        duplicate_per_mille: line.world.random() % 60,
        delay_max: Duration::from_millis(1 + u64::from(line.world.random() % 20)),
        ..Weather::FAIR
    };
    let [client, server, box_host] = [line.client, line.server, line.boxes[0]];
    let mut is_now = boxes(&mut line);
    let mut heard = told(&mut line, client).len();
    let mut awaited: Vec<(HostId, u64)> = Vec::new();
    for _ in 0..60 {
        let (host, service) = match line.world.random() % 3 {
            0 => (client, name(1)),
            1 => (server, name(2)),
            _ => (box_host, name(3)),
        };
        let edit = match (is_now.contains(&service), host == box_host) {
            (true, false) => remove(service),
            (false, false) => insert(service),
            (is_there, true) => {
                let at = is_now.iter().position(|one| *one == name(0)).ok_or("box 0 is never taken out")?;
                // It may be taken out by the server alone.
                if is_there { remove(name(0)) } else { before(service, is_now[at]) }
            }
        };
        if edit != remove(name(0)) {
            // What is asked of the boxes that there are just now may be refused at once.
            awaited.extend(order_at(&mut line, host, edit).ok().map(|order| (host, order)));
        } else {
            awaited.extend(order_at(&mut line, server, remove(name(3))).ok().map(|order| (server, order)));
        }
        let pause = line.world.random() % 400;
        line.world.run_for(Duration::from_millis(pause.into()));
        for change in told(&mut line, client).into_iter().skip(heard) {
            heard += 1;
            if change.outcome == ReconfigurationOutcome::Done {
                let known = SessionBoxes { between: is_now.clone(), ..SessionBoxes::default() };
                is_now = change.edit.of(&known).map_err(|error| format!("{change:?} of {is_now:?}: {error}"))?;
                if is_now != change.boxes {
                    return Err(format!("an update was lost: {change:?}, and {is_now:?} was wanted"));
                }
            }
        }
    }
    line.world.network.weather = Weather::FAIR;
    line.world.run_for(20 * SECOND);
    let mut done = 0;
    for (host, order) in awaited {
        let said = outcome_of(&mut line, host, order);
        if said.len() != 1 {
            return Err(format!("order {order} of {host:?} was told of {} times: {said:?}", said.len()));
        }
        done += usize::from(said[0] == ReconfigurationOutcome::Done);
    }
    let ends = [line.world.host(client).streams[stream].clone(), line.served()];
    if ends.iter().any(|end| end.was_wrong) {
        return Err("the stream was harmed".to_owned());
    }
    Ok(done)
}

/// `MARGAY_SEEDS` sets how many are tried.
#[test]
fn of_client_server_and_box_that_contend_none_undoes_what_another_one_has_done() {
    let seeds = std::env::var("MARGAY_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    for seed in 0..seeds {
        let done = contend(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        assert!(done > 10, "seed {seed}: {done}");
    }
}

#[test]
fn an_order_is_answered_however_many_were_before() {
    let (mut line, stream) = talking(10, 2, &[0]);
    let server = line.server;
    for count in 0..200 {
        let order = order_at(&mut line, server, insert(name(0))).expect("it may be asked");
        line.world.run_for(SECOND / 20);
        let said = outcome_of(&mut line, server, order);
        let is_it = |said: &str| said.contains("already");
        assert!(matches!(&said[..], [ReconfigurationOutcome::Refused(said)] if is_it(said)), "{count}: {said:?}");
    }
    ends_well(&mut line, stream);
}

#[test]
fn what_the_clients_host_refuses_comes_back_with_its_reason() {
    let (mut line, stream) = talking(9, 3, &[0]);
    let [client, server] = [line.client, line.server];
    let unknown = ChainPolicy::default();
    let known = line.world.host(client).sal.chain_policy().clone();
    for (edit, service, why) in [(insert(name(0)), 0, "already"), (remove(name(1)), 1, "does not go through")] {
        let order = order_at(&mut line, server, edit).expect("it may be asked");
        line.world.run_for(SECOND);
        let said = outcome_of(&mut line, server, order);
        let called = known.name_of_box(&name(service)).expect("the policy names it");
        let is_it = |said: &str| said.contains(why) && said.contains(called);
        assert!(matches!(&said[..], [ReconfigurationOutcome::Refused(said)] if is_it(said)), "{said:?}");
    }
    line.world.host(client).sal.set_chain_policy(unknown).expect("it can be gone by");
    let order = order_at(&mut line, server, insert(name(1))).expect("it may be asked");
    line.world.run_for(SECOND);
    let said = outcome_of(&mut line, server, order);
    assert!(matches!(&said[..], [ReconfigurationOutcome::Refused(said)] if said.contains("no chain")), "{said:?}");
    assert_eq!(line.world.host(client).sal.counters().orders_of_others, [0, 3, 0, 0]);
    line.world.host(client).sal.set_chain_policy(known).expect("it can be gone by");
    for _ in 0..8 {
        order_at(&mut line, client, insert(name(1))).expect("it may, or waits");
    }
    order_at(&mut line, client, insert(name(2))).expect("it waits");
    let order = order_at(&mut line, server, insert(name(2))).expect("it may be asked");
    line.world.run_for(SECOND / 5);
    let said = outcome_of(&mut line, server, order);
    assert!(matches!(&said[..], [ReconfigurationOutcome::Refused(said)] if said.contains("other orders wait")));
    line.world.run_for(5 * SECOND);
    assert_eq!(boxes(&mut line).len(), 3);
    ends_well(&mut line, stream);
}

#[test]
fn an_order_of_a_session_that_ends_is_told_so() {
    for micros in (0..12).map(|step| step * 12_000) {
        let (mut line, _) = talking(11, 2, &[0]);
        let [client, server, first] = [line.client, line.server, line.boxes[0]];
        let orders = [
            (server, order_at(&mut line, server, insert(name(1))).expect("it may")),
            (first, order_at(&mut line, first, remove(name(0))).expect("it may")),
        ];
        line.world.run_for(Duration::from_micros(micros));
        let id = flow_at(&mut line, client);
        let now = line.world.now;
        assert!(line.world.host(client).sal.close_flow(now, id));
        line.world.touch(client);
        line.world.run_for(30 * SECOND);
        for (host, order) in orders {
            let said = outcome_of(&mut line, host, order);
            assert_eq!(said.len(), 1, "at {micros} us");
        }
        for host in line.all() {
            assert_eq!(line.world.host(host).sal.flow_count(), 0, "{host:?} at {micros} us");
        }
    }
}

#[test]
fn the_agent_of_the_clients_host_may_start_again_at_every_step() {
    let mut restarted = 0;
    for micros in (0..12).map(|step| step * 13_000) {
        let (mut line, stream) = talking(13, 2, &[0]);
        let [client, server] = [line.client, line.server];
        let order = order_at(&mut line, server, insert(name(1))).expect("it may");
        line.world.run_for(Duration::from_micros(micros));
        line.world.kill_agent(client);
        line.world.run_for(SECOND / 4);
        line.world.start_agent(client);
        let router = line.router;
        line.world.register_again(router, client);
        line.world.run_for(12 * SECOND);
        let said = outcome_of(&mut line, server, order);
        assert_eq!(said.len(), 1, "at {micros} us");
        match &said[0] {
            ReconfigurationOutcome::Done => assert_eq!(boxes(&mut line), [name(0), name(1)], "at {micros} us"),
            ReconfigurationOutcome::Failed(why) => {
                assert!(why.contains("started again"), "at {micros} us: {why}");
                restarted += 1;
            }
            other => panic!("at {micros} us: {other:?}"),
        }
        let carried_out = told(&mut line, client).into_iter().filter(|one| one.order.is_some()).count();
        assert!(carried_out <= 2, "at {micros} us");
        ends_well(&mut line, stream);
    }
    assert!(restarted > 2, "{restarted}");
}
