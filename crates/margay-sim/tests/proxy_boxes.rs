//! Sessions that begin or end at a proxy come to go through other boxes while they run, in virtual time: those before
//! the proxy by orders at the client's host, those behind the proxy by orders at the proxy's.

mod relayed;

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::chain::{ChainPlace, Requirement};
use margay_core::handover::HandoverRecord;
use margay_core::key::SigningKey;
use margay_core::name::{Prefix, ServiceId};
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome, ReconfigurationRefused, SpliceOutcome};
use margay_core::rng::Rng;
use margay_core::table::Allow;
use margay_core::{Event, FlowInfo, Role};
use margay_sim::certificate;
use margay_sim::check::ends_agree;
use margay_sim::world::service;
use margay_sim::{HostId, Weather};
use margay_wire::{Kind, Message, ReconfigurationStep};
use relayed::{CHAT, Relayed, SECOND, TALK, relayed_through};

const GATE: &str = "gate.shop";
const DONE: ReconfigurationOutcome = ReconfigurationOutcome::Done;
/// Longer than a change takes, with the time for which its old way is left.
const CHANGE: Duration = Duration::from_millis(350);

/// An edit of two boxes of one side.
type EditOf = fn(ServiceId, ServiceId) -> Edit;

fn name(at: usize) -> ServiceId {
    service(&format!("box-{at}.shop"))
}

const fn insert(service: ServiceId) -> Edit {
    Edit::Insert { service, before: None }
}

/// A session to a proxy, and the one that its program has begun to the service. `box-0` and `box-1` are before the
/// proxy, `box-2` and `box-3` behind; both sessions go through the first one of the two, or through none.
fn gated(seed: u64, has_boxes: bool) -> Relayed {
    let mut relayed = relayed_through(seed, TALK, Duration::from_millis(5), [2, 2]);
    begin(&mut relayed, has_boxes);
    relayed
}

fn begin(relayed: &mut Relayed, has_boxes: bool) {
    relayed.make_proxy(GATE);
    let chain: &[&str] = if has_boxes { &["box-0.shop", GATE, "box-2.shop"] } else { &[GATE] };
    let others = &["box-0.shop", "box-1.shop", "box-2.shop", "box-3.shop"];
    relayed.go_by(&[(CHAT, chain), ("nobody.shop", others)]);
    relayed.begin_to(CHAT, TALK);
    relayed.world.run_for(SECOND / 2);
}

/// The same with boxes, and all hosts are certified.
fn certified(seed: u64) -> Relayed {
    let mut relayed = relayed_through(seed, TALK, Duration::from_millis(5), [2, 2]);
    let authority = SigningKey::generate(&mut Rng::new([77; 32]));
    let all = relayed.all();
    certificate::trust(&mut relayed.world, &all, CHAT, &authority);
    let boxes = relayed.boxes.clone().into_iter().flatten().enumerate();
    let boxes = boxes.map(|(at, host)| (host, format!("box-{at}.shop")));
    let ends = [(relayed.proxy, GATE.to_owned()), (relayed.server, CHAT.to_owned())];
    for (host, name) in boxes.chain(ends) {
        certificate::certify(&mut relayed.world, host, &name, &authority);
    }
    begin(&mut relayed, true);
    relayed
}

/// The session that a program of a host has begun, or the one that has come there.
fn flow_at(relayed: &mut Relayed, host: HostId, role: Role) -> FlowInfo {
    let is_at_box = |flow: &FlowInfo| {
        flow.chain.as_ref().is_some_and(|chain| matches!(chain.place, ChainPlace::Left | ChainPlace::Right))
    };
    let mut flows = relayed.world.host(host).sal.flows();
    flows.find(|flow| flow.role == role && flow.service == service(CHAT) && !is_at_box(flow)).expect("it has one")
}

fn order(relayed: &mut Relayed, host: HostId, edit: Edit) -> Result<u64, ReconfigurationRefused> {
    let id = flow_at(relayed, host, Role::Initiator).flow;
    let now = relayed.world.now;
    let said = relayed.world.host(host).sal.reconfigure(now, id, edit);
    relayed.world.touch(host);
    said
}

fn outcomes(relayed: &mut Relayed, host: HostId) -> Vec<ReconfigurationOutcome> {
    let events = relayed.world.host(host).events.iter();
    let outcome = |event: &Event| match event {
        Event::Reconfigured { change, .. } => Some(change.outcome.clone()),
        _ => None,
    };
    events.filter_map(outcome).collect()
}

fn boxes_at(relayed: &mut Relayed, host: HostId, role: Role) -> Vec<ServiceId> {
    let chain = flow_at(relayed, host, role).chain.expect("a proxy is of its chain");
    chain.boxes.iter().map(|one| one.service).collect()
}

/// All four ends know these boxes before the proxy and behind it, and their hosts alone have halves.
fn goes_through(relayed: &mut Relayed, before: &[usize], behind: &[usize], what: &str) {
    let gate = service(GATE);
    let names = |boxes: &[usize]| boxes.iter().map(|at| name(*at)).collect::<Vec<_>>();
    let left = [names(before), vec![gate]].concat();
    let right = [vec![gate], names(behind)].concat();
    let [client, proxy, server] = [relayed.client, relayed.proxy, relayed.server];
    assert_eq!(boxes_at(relayed, client, Role::Initiator), left, "{what}");
    assert_eq!(boxes_at(relayed, proxy, Role::Responder), left, "{what}");
    assert_eq!(boxes_at(relayed, proxy, Role::Initiator), right, "{what}");
    assert_eq!(boxes_at(relayed, server, Role::Responder), right, "{what}");
    let place = |relayed: &mut Relayed, host| flow_at(relayed, host, Role::Responder).chain.map(|chain| chain.place);
    assert_eq!(place(relayed, proxy), Some(ChainPlace::Proxy), "{what}");
    assert_eq!(place(relayed, server), Some(ChainPlace::Last), "{what}");
    for (at, host) in relayed.boxes.clone().into_iter().flatten().enumerate() {
        let halves = if before.contains(&at) || behind.contains(&at) { 2 } else { 0 };
        assert_eq!(relayed.flows_at(host), halves, "{what}: box {at}");
    }
    ends_agree(&relayed.world).unwrap_or_else(|why| panic!("{what}: {why}"));
}

#[test]
fn boxes_on_both_sides_of_a_proxy_are_put_in_replaced_and_taken_out() {
    for (is_direct, is_together) in [(false, true), (true, true), (true, false)] {
        let mut relayed = gated(7, true);
        relayed.set_direct(is_direct);
        let [client, proxy] = [relayed.client, relayed.proxy];
        // The same of the boxes of either side.
        let before = service(GATE);
        let steps: [(EditOf, &[usize]); 6] = [
            (|_, second| insert(second), &[0, 1]),
            (|first, _| Edit::Remove { service: first }, &[1]),
            (|first, second| Edit::Insert { service: first, before: Some(second) }, &[0, 1]),
            (|_, second| Edit::Remove { service: second }, &[0]),
            (|first, second| Edit::Replace { service: first, by: second }, &[1]),
            (|_, second| Edit::Remove { service: second }, &[]),
        ];
        for (step, (edit, wanted)) in steps.into_iter().enumerate() {
            let what = format!("step {step}, direct {is_direct}, together {is_together}");
            order(&mut relayed, client, edit(name(0), name(1))).expect("it may");
            if !is_together {
                relayed.world.run_for(CHANGE);
            }
            order(&mut relayed, proxy, edit(name(2), name(3))).expect("it may");
            let passed = relayed.passed();
            relayed.world.run_for(CHANGE);
            for host in [client, proxy] {
                assert_eq!(outcomes(&mut relayed, host), vec![DONE; step + 1], "{what}");
            }
            let behind: Vec<usize> = wanted.iter().map(|at| at + 2).collect();
            goes_through(&mut relayed, wanted, &behind, &what);
            let later = relayed.passed();
            for at in wanted.iter().chain(&behind) {
                assert!(later[*at] > passed[*at], "{what}: data pass box {at}");
            }
        }
        if is_together {
            order(&mut relayed, client, Edit::Insert { service: name(0), before: Some(before) }).expect("it may");
            relayed.world.run_for(CHANGE);
            goes_through(&mut relayed, &[0], &[], "before the proxy by name");
        }
        relayed.ends_well("changed");
    }
}

#[test]
fn a_session_that_goes_from_the_client_to_the_proxy_alone_is_changed_too() {
    let mut relayed = gated(8, false);
    let [client, proxy] = [relayed.client, relayed.proxy];
    goes_through(&mut relayed, &[], &[], "at first");
    for (edit, wanted) in [(insert as fn(ServiceId) -> Edit, true), (|service| Edit::Remove { service }, false)] {
        order(&mut relayed, client, edit(name(1))).expect("it may");
        order(&mut relayed, proxy, edit(name(3))).expect("it may");
        relayed.world.run_for(CHANGE);
        let (before, behind): (&[usize], &[usize]) = if wanted { (&[1], &[3]) } else { (&[], &[]) };
        goes_through(&mut relayed, before, behind, &format!("{wanted}"));
    }
    relayed.ends_well("bare");
}

#[test]
fn a_proxy_whose_sessions_were_changed_leaves_and_the_boxes_stay() {
    for is_direct in [false, true] {
        let mut relayed = gated(9, true);
        relayed.set_direct(is_direct);
        let [client, proxy, server] = [relayed.client, relayed.proxy, relayed.server];
        order(&mut relayed, client, Edit::Replace { service: name(0), by: name(1) }).expect("it may");
        order(&mut relayed, proxy, insert(name(3))).expect("it may");
        let refused = relayed.leave().expect_err("both sessions are being changed");
        assert!(refused.is_for_now(), "{refused}");
        relayed.world.run_for(CHANGE);
        relayed.leave().expect("it may");
        relayed.world.run_for(SECOND);
        assert_eq!(relayed.outcomes(), [SpliceOutcome::Done]);
        assert_eq!(relayed.flows_at(proxy), 0);
        let all = [1, 2, 3].map(name).to_vec();
        assert_eq!(boxes_at(&mut relayed, client, Role::Initiator), all);
        assert_eq!(boxes_at(&mut relayed, server, Role::Responder), all);
        order(&mut relayed, client, Edit::Remove { service: name(2) }).expect("it may");
        relayed.world.run_for(CHANGE);
        assert_eq!(boxes_at(&mut relayed, server, Role::Responder), [name(1), name(3)]);
        relayed.ends_well("left");
    }
}

/// A proxy's program that wishes to leave has both sessions until it has left, or cannot.
#[test]
fn an_order_waits_or_is_refused_while_the_proxy_leaves() {
    let mut relayed = gated(10, true);
    let [client, proxy] = [relayed.client, relayed.proxy];
    relayed.leave().expect("it may");
    assert_eq!(order(&mut relayed, proxy, insert(name(3))), Err(ReconfigurationRefused::UnderWay));
    relayed.world.run_for(Duration::from_millis(60));
    order(&mut relayed, client, insert(name(1))).expect("it waits");
    relayed.world.run_for(2 * SECOND);
    assert_eq!(relayed.outcomes(), [SpliceOutcome::Done]);
    assert_eq!(outcomes(&mut relayed, client), [DONE, DONE], "the proxy has left, and then the box was put in");
    assert_eq!(boxes_at(&mut relayed, client, Role::Initiator), [0, 2, 1].map(name));
    relayed.ends_well("waited");
}

#[test]
fn orders_about_the_proxy_and_about_what_is_beyond_say_where_to_order() {
    let mut relayed = gated(11, true);
    let [client, proxy] = [relayed.client, relayed.proxy];
    let gate = service(GATE);
    let at_client = "are changed on the proxy's host";
    let at_proxy = "are changed on the hosts of the proxy's clients";
    for (host, edit, why) in [
        (client, Edit::Remove { service: gate }, "its program can leave"),
        (client, Edit::Replace { service: gate, by: name(1) }, "its program can leave"),
        (client, Edit::Insert { service: name(3), before: Some(name(2)) }, at_client),
        (client, Edit::Remove { service: name(2) }, at_client),
        (client, insert(gate), "already"),
        (proxy, Edit::Remove { service: gate }, "its program can leave"),
        (proxy, Edit::Insert { service: name(1), before: Some(gate) }, at_proxy),
        (proxy, Edit::Remove { service: name(0) }, at_proxy),
        (proxy, insert(gate), "already"),
    ] {
        let refused = order(&mut relayed, host, edit).expect_err("it may not").to_string();
        assert!(refused.contains(why), "{edit:?}: {refused}");
    }
    goes_through(&mut relayed, &[0], &[2], "as it was");
    relayed.ends_well("refused");
}

/// Of the sessions that are served at the proxy and at the server.
#[test]
fn orders_at_the_host_of_the_other_end_reach_the_one_where_the_session_begins() {
    let mut relayed = gated(13, true);
    for (host, number) in [(relayed.proxy, 1), (relayed.server, 3)] {
        let served = flow_at(&mut relayed, host, Role::Responder).flow;
        let now = relayed.world.now;
        relayed.world.host(host).sal.reconfigure(now, served, insert(name(number))).expect("it may be asked");
        relayed.world.touch(host);
    }
    relayed.world.run_for(2 * SECOND);
    goes_through(&mut relayed, &[0, 1], &[2, 3], "ordered at the other end");
    relayed.ends_well("ordered at the other end");
}

/// The last outcome of an order that the other end, or a box, has not agreed to.
fn fails(relayed: &mut Relayed, host: HostId, edit: Edit) -> String {
    order(relayed, host, edit).expect("it may be asked");
    relayed.world.run_for(3 * SECOND);
    match outcomes(relayed, host).pop() {
        Some(ReconfigurationOutcome::Failed(why) | ReconfigurationOutcome::Refused(why)) => why,
        other => panic!("{edit:?}: {other:?}"),
    }
}

#[test]
fn the_other_end_agrees_by_its_own_policy() {
    // A box that no chain of the proxy's host names, and one that none of the server's host does.
    for (at_proxy, spare) in [(false, 1), (true, 3)] {
        let mut relayed = gated(12, true);
        let [client, proxy, server] = [relayed.client, relayed.proxy, relayed.server];
        let (orders, agrees) = if at_proxy { (proxy, server) } else { (client, proxy) };
        relayed.go_by_at(agrees, &[(CHAT, &["box-0.shop", GATE, "box-2.shop"])]);
        fails(&mut relayed, orders, insert(name(spare)));
        goes_through(&mut relayed, &[0], &[2], "not named");
        relayed.ends_well("not named");
    }
    // Boxes that the proxy demands, and that the service does.
    let demands = |of: &str, boxes: &[&str]| Requirement {
        services: Prefix::from(service(of)),
        boxes: boxes.iter().map(|name| service(name)).collect(),
    };
    for (at_proxy, one) in [(false, 0), (true, 2)] {
        let mut relayed = certified(13);
        let [client, proxy] = [relayed.client, relayed.proxy];
        let required = vec![demands(GATE, &["box-0.shop"]), demands(CHAT, &[GATE, "box-2.shop"])];
        for host in relayed.all() {
            let sal = &mut relayed.world.host(host).sal;
            let policy = margay_core::chain::ChainPolicy { required: required.clone(), ..sal.chain_policy().clone() };
            sal.set_chain_policy(policy).expect("it can be gone by");
        }
        let orders = if at_proxy { proxy } else { client };
        fails(&mut relayed, orders, Edit::Remove { service: name(one) });
        goes_through(&mut relayed, &[0], &[2], "demanded");
        let before = Some(name(one));
        order(&mut relayed, orders, Edit::Insert { service: name(one + 1), before }).expect("it may");
        relayed.world.run_for(CHANGE);
        assert_eq!(outcomes(&mut relayed, orders).last(), Some(&DONE), "what is demanded is passed still");
        relayed.ends_well("demanded");
    }
}

/// A box of another kind, and one that nobody serves.
#[test]
fn a_way_that_does_not_come_to_stand_leaves_both_sessions_as_they_were() {
    let mut relayed = gated(14, true);
    let [client, proxy] = [relayed.client, relayed.proxy];
    ["box-1.shop", "box-3.shop"].into_iter().for_each(|name| relayed.withdraw(name));
    order(&mut relayed, client, insert(name(1))).expect("it may be asked");
    fails(&mut relayed, proxy, insert(name(3)));
    assert!(matches!(&outcomes(&mut relayed, client)[..], [ReconfigurationOutcome::Failed(_)]));
    goes_through(&mut relayed, &[0], &[2], "nobody serves them");
    relayed.ends_well("nobody serves them");
}

#[test]
fn loss_delays_changes_on_both_sides_and_costs_neither_session() {
    for seed in 0..12 {
        let mut relayed = gated(100 + seed, seed % 3 == 0);
        relayed.set_direct(seed % 2 == 0);
        let [client, proxy] = [relayed.client, relayed.proxy];
        relayed.world.network.weather = Weather { loss_per_mille: 40, duplicate_per_mille: 40, ..Weather::FAIR };
        for edit in [insert as fn(ServiceId) -> Edit, |service| Edit::Remove { service }] {
            // The one before may be at work still, or may have failed.
            let _ = order(&mut relayed, client, edit(name(1)));
            let _ = order(&mut relayed, proxy, edit(name(3)));
            relayed.world.run_for(SECOND);
        }
        relayed.world.run_for(10 * SECOND);
        relayed.world.network.weather = Weather::FAIR;
        assert!([client, proxy].iter().all(|host| !outcomes(&mut relayed, *host).is_empty()), "seed {seed}");
        relayed.ends_well(&format!("seed {seed}"));
    }
}

/// Agents of either end of both sessions may be killed at any moment of a change.
#[test]
fn agents_of_client_proxy_and_server_may_die_at_every_step() {
    for which in 0..3 {
        for (step, takes_out) in (0..18).zip([false, true, true].into_iter().cycle()) {
            let micros = step * 7_000;
            let what = format!("{which} at {micros} us, out {takes_out}");
            let mut relayed = gated(15, true);
            relayed.set_direct(step % 2 == 0);
            let [client, proxy, server] = [relayed.client, relayed.proxy, relayed.server];
            let edit = |spare, first| {
                if takes_out { Edit::Remove { service: name(first) } } else { insert(name(spare)) }
            };
            order(&mut relayed, client, edit(1, 0)).expect("it may");
            order(&mut relayed, proxy, edit(3, 2)).expect("it may");
            relayed.world.run_for(Duration::from_micros(micros));
            let dies = [client, proxy, server][which];
            relayed.world.kill_agent(dies);
            relayed.world.run_for(SECOND / 4);
            relayed.world.start_agent(dies);
            let router = relayed.router;
            for host in [client, proxy, server] {
                relayed.world.register_again(router, host);
            }
            relayed.ends_well(&what);
        }
    }
}

#[test]
fn agents_of_boxes_may_die_at_every_step() {
    for side in 0..2 {
        for micros in (0..8).map(|step| step * 15_000) {
            let what = format!("side {side}, at {micros} us");
            let mut relayed = gated(16, true);
            let [client, proxy] = [relayed.client, relayed.proxy];
            order(&mut relayed, client, insert(name(1))).expect("it may");
            order(&mut relayed, proxy, insert(name(3))).expect("it may");
            relayed.world.run_for(Duration::from_micros(micros));
            let dies = relayed.boxes[side][1];
            relayed.world.kill_agent(dies);
            relayed.world.run_for(2 * SECOND);
            relayed.world.start_agent(dies);
            let router = relayed.router;
            relayed.world.register_again(router, dies);
            relayed.world.run_for(8 * SECOND);
            for host in [client, proxy] {
                assert_eq!(outcomes(&mut relayed, host).len(), 1, "{what}");
            }
            relayed.ends_well(&what);
        }
    }
}

/// Records of the client's host are altered, so that its agent sets up other ways than the session's.
fn forges(relayed: &mut Relayed, alter: &dyn Fn(&mut HandoverRecord)) {
    let client = relayed.client;
    relayed.world.kill_agent(client);
    relayed.world.run_for(SECOND / 20);
    relayed.world.start_agent_with(client, alter);
    let router = relayed.router;
    relayed.world.register_again(router, client);
    relayed.world.run_for(SECOND / 4);
}

#[test]
fn a_way_that_leaves_out_the_proxy_is_not_taken_by_its_host() {
    // Through a box, and straight.
    for edit in [insert(name(1)), Edit::Remove { service: name(0) }] {
        let mut relayed = gated(17, true);
        let [client, proxy] = [relayed.client, relayed.proxy];
        // The proxy's host serves the service itself, too.
        relayed.world.host(proxy).serve(service(CHAT), 82, 9, Allow::Any).expect("there is room");
        let gate = service(GATE);
        forges(&mut relayed, &|record| {
            let chain = record.chain.as_mut().expect("a proxy is of its chain");
            chain.boxes.retain(|one| one.service != gate);
        });
        fails(&mut relayed, client, edit);
        let came = relayed.world.host(proxy).servers.iter().map(|server| server.accepted.len()).sum::<usize>();
        assert_eq!(came, 0);
        assert_eq!(boxes_at(&mut relayed, proxy, Role::Responder), [name(0), gate], "{edit:?}");
        relayed.ends_well("without the proxy");
    }
}

#[test]
fn a_way_ends_at_the_very_host_of_the_proxy() {
    let mut relayed = gated(18, true);
    let [client, proxy, router] = [relayed.client, relayed.proxy, relayed.router];
    // Another host that is a proxy of this name.
    let other = relayed.world.add_host(false);
    relayed.world.register(router, other);
    let rules = relayed.world.host(proxy).sal.rules();
    let gate = service(GATE);
    let rule = rules.filter(|(prefix, ..)| prefix.id == gate).map(|(.., rule)| rule.clone()).next().expect("it is one");
    let now = relayed.world.now;
    let policy = relayed.world.host(client).sal.chain_policy().clone();
    let machine = relayed.world.host(other);
    machine.sal.add_rule(now, gate.into(), rule).expect("there is room");
    machine.sal.set_chain_policy(policy).expect("it can be gone by");
    let [to_proxy, to_other] =
        [proxy, other].map(|host| SocketAddr::new(relayed.world.host(host).address, margay_wire::PORT));
    relayed.world.recording = Some(Vec::new());
    order(&mut relayed, client, insert(name(1))).expect("it may");
    relayed.world.run_for(CHANGE);
    goes_through(&mut relayed, &[0, 1], &[2], "put in");
    let is_way = |bytes: &[u8]| {
        let message = Message::parse(bytes).ok().filter(|message| message.kind == Kind::Syn);
        message
            .and_then(|message| message.reconfiguration())
            .is_some_and(|said| said.step == ReconfigurationStep::Begin)
    };
    let said = relayed.world.recording.take().expect("it was recorded");
    let syns: Vec<_> = said.into_iter().filter(|(_, to, bytes)| *to == to_proxy && is_way(bytes)).collect();
    assert!(!syns.is_empty());
    for (from, _, bytes) in syns {
        relayed.world.inject(from, to_other, bytes);
        relayed.world.run_for(SECOND / 20);
        assert_eq!(relayed.flows_at(other), 0, "it has no such session");
    }
    // The client's host is told that the session is with that one.
    let other_host = relayed.world.host(other).sal.host();
    forges(&mut relayed, &|record| {
        let chain = record.chain.as_mut().expect("a proxy is of its chain");
        chain.far_end = Some(other_host);
    });
    fails(&mut relayed, client, Edit::Remove { service: name(0) });
    assert_eq!(boxes_at(&mut relayed, proxy, Role::Responder), [name(0), name(1), gate]);
    assert_eq!(relayed.flows_at(other), 0);
    relayed.ends_well("another host");
}

/// Who demands boxes does so by the name that a session is for: its way is for the same one.
#[test]
fn a_way_is_for_the_name_of_its_session() {
    let mut relayed = gated(19, true);
    let [client, proxy] = [relayed.client, relayed.proxy];
    let other = service("other.shop");
    forges(&mut relayed, &|record| record.service = other);
    let id = relayed.world.host(client).sal.flows().find(|flow| flow.service == other).expect("its session").flow;
    let now = relayed.world.now;
    relayed.world.host(client).sal.reconfigure(now, id, insert(name(1))).expect("it may be asked");
    relayed.world.touch(client);
    relayed.world.run_for(3 * SECOND);
    assert!(matches!(&outcomes(&mut relayed, client)[..], [ReconfigurationOutcome::Failed(_)]));
    assert_eq!(boxes_at(&mut relayed, proxy, Role::Responder), [name(0), service(GATE)]);
    relayed.ends_well("another name");
}
