//! A program between two connections leaves, and there are boxes between it and either end, in virtual time.

mod relayed;

use std::time::Duration;

use margay_core::name::ServiceId;
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome, SpliceOutcome};
use margay_sim::Weather;
use margay_sim::stream::{Plan, State};
use margay_sim::world::service;
use relayed::{CHAT, FRONT, Relayed, SECOND, TALK, kept_by_deaths, relayed_through};

/// Milliseconds after the wish to leave: before the new way stands, while both ends turn, until the old way is gone.
const STEPS: [u64; 17] = [0, 4, 9, 60, 160, 164, 167, 169, 171, 173, 175, 177, 250, 374, 377, 420, 481];

/// Boxes before the program, and behind it.
const PLACES: [[usize; 2]; 4] = [[1, 0], [0, 1], [1, 1], [2, 2]];

#[test]
fn a_program_leaves_between_boxes_which_the_session_still_passes() {
    for counts in PLACES {
        for is_direct in [false, true] {
            let what = format!("{counts:?} boxes, direct {is_direct}");
            let mut relayed = relayed_through(7, TALK, Duration::from_millis(20), counts);
            relayed.set_direct(is_direct);
            relayed.begin(TALK);
            relayed.world.run_for(SECOND);
            relayed.leave().expect("it may");
            relayed.world.run_for(SECOND);
            assert_eq!(relayed.outcomes(), [SpliceOutcome::Done], "{what}");
            assert_eq!(relayed.reconfigurations(), [("leave", ReconfigurationOutcome::Done)], "{what}");
            let proxy = relayed.proxy;
            assert_eq!(relayed.flows_at(proxy), 0, "{what}");
            for host in relayed.boxes.clone().into_iter().flatten() {
                assert_eq!(relayed.flows_at(host), 2, "{what}: its two halves of the one session");
            }
            let before = relayed.passed();
            relayed.world.run_for(SECOND / 2);
            let later = relayed.passed();
            assert!(later.iter().zip(&before).all(|(later, before)| later > before), "{what}: {before:?} {later:?}");
            for host in relayed.boxes.clone().into_iter().flatten() {
                let seen = relayed.world.host(host).middlebox.as_ref().expect("it has one");
                assert_eq!(seen.probes, 0, "{what}: what makes a program's TCP speak is not for boxes");
            }
            relayed.ends_well(&what);
        }
    }
}

/// The boxes of a session at its two ends, by their names.
fn boxes_at_ends(relayed: &mut Relayed) -> [Vec<ServiceId>; 2] {
    [relayed.client, relayed.server].map(|host| {
        let mut flows = relayed.world.host(host).sal.flows();
        let chain = flows.find_map(|flow| flow.chain);
        chain.map(|chain| chain.boxes.iter().map(|one| one.service).collect()).unwrap_or_default()
    })
}

#[test]
fn both_ends_know_the_boxes_that_are_left_and_they_can_be_changed_afterwards() {
    let mut relayed = relayed_through(8, TALK, Duration::from_millis(5), [1, 1]);
    relayed.begin(TALK);
    relayed.world.run_for(SECOND);
    relayed.leave().expect("it may");
    relayed.world.run_for(SECOND);
    let [first, second] = ["box-0.shop", "box-1.shop"].map(service);
    assert_eq!(boxes_at_ends(&mut relayed), [vec![first, second], vec![first, second]]);
    let now = relayed.world.now;
    let client = relayed.client;
    let stream = relayed.stream;
    let shown = relayed.world.host(client).flow_of(stream).expect("it goes on");
    assert_eq!(shown.service, service(CHAT));
    let edit = Edit::Remove { service: first };
    relayed.world.host(client).sal.reconfigure(now, shown.flow, edit).expect("it may");
    relayed.world.touch(client);
    relayed.world.run_for(SECOND);
    assert_eq!(boxes_at_ends(&mut relayed), [vec![second], vec![second]]);
    let outcomes = relayed.reconfigurations();
    assert_eq!(
        outcomes,
        [("leave", ReconfigurationOutcome::Done), ("remove", ReconfigurationOutcome::Done)],
        "one after the other"
    );
    relayed.ends_well("changed afterwards");
}

/// Two firewalls of one name: the one session passes it once.
#[test]
fn a_box_that_both_sessions_pass_is_passed_once() {
    let mut relayed = relayed_through(9, TALK, Duration::from_millis(5), [2, 0]);
    let [first, second] = ["box-0.shop", "box-1.shop"];
    relayed.go_by(&[(FRONT, &[first, second]), (CHAT, &[second])]);
    relayed.begin(TALK);
    relayed.world.run_for(SECOND);
    relayed.leave().expect("it may");
    relayed.world.run_for(SECOND);
    assert_eq!(relayed.outcomes(), [SpliceOutcome::Done]);
    let both = [first, second].map(service).to_vec();
    assert_eq!(boxes_at_ends(&mut relayed), [both.clone(), both]);
    relayed.ends_well("passed once");
}

/// The program is a proxy of the policy, in the middle of one chain: the boxes of its rule are passed on either side.
#[test]
fn a_proxy_of_a_chain_leaves_and_its_boxes_stay() {
    let mut relayed = relayed_through(11, TALK, Duration::from_millis(5), [1, 1]);
    relayed.make_proxy("gate.shop");
    relayed.begin_to(CHAT, TALK);
    relayed.world.run_for(SECOND);
    relayed.leave().expect("it may");
    relayed.world.run_for(SECOND);
    assert_eq!(relayed.outcomes(), [SpliceOutcome::Done]);
    let both = ["box-0.shop", "box-1.shop"].map(service).to_vec();
    assert_eq!(boxes_at_ends(&mut relayed), [both.clone(), both]);
    relayed.ends_well("a proxy of a chain");
}

fn leaves_in_bad_weather(seed: u64, counts: [usize; 2]) -> SpliceOutcome {
    let mut relayed = relayed_through(500 + seed, TALK, Duration::from_millis(seed % 5 * 11 + 1), counts);
    relayed.set_direct(seed.is_multiple_of(2));
    relayed.begin(TALK);
    relayed.world.run_for(SECOND);
    let delay_max = Duration::from_millis(1 + seed % 3 * 7);
    relayed.world.network.weather = Weather { loss_per_mille: 40, duplicate_per_mille: 40, delay_max, ..Weather::FAIR };
    relayed.leave().expect("it may");
    relayed.world.run_for(5 * SECOND);
    relayed.world.network.weather = Weather::FAIR;
    relayed.world.run_for(2 * SECOND);
    let outcomes = relayed.outcomes();
    assert_eq!(outcomes.len(), 1, "seed {seed}");
    relayed.ends_well(&format!("seed {seed}, {counts:?} boxes: {outcomes:?}"));
    outcomes[0].clone()
}

#[test]
fn loss_delays_it_and_leaves_nothing_at_any_box() {
    (0..20).for_each(|seed| drop(leaves_in_bad_weather(seed, PLACES[seed as usize % PLACES.len()])));
}

/// No request reaches the server's host: the program's host, which has passed some of them on, hears that nothing comes
/// of them.
#[test]
fn a_program_whose_requests_are_all_lost_stays_and_is_told() {
    let outcome = leaves_in_bad_weather(120, [1, 1]);
    assert!(matches!(&outcome, SpliceOutcome::Failed(_)), "{outcome:?}");
    let mut relayed = relayed_through(24, TALK, Duration::from_millis(5), [1, 1]);
    relayed.begin(TALK);
    relayed.world.run_for(SECOND);
    let [behind, server] = [relayed.boxes[1][0], relayed.server].map(|host| relayed.world.host(host).address);
    relayed.world.network.cut(behind, server);
    relayed.leave().expect("it may");
    relayed.world.run_for(3 * SECOND);
    assert!(matches!(&relayed.outcomes()[..], [SpliceOutcome::Failed(_)]), "{:?}", relayed.outcomes());
    relayed.world.network.heal();
    relayed.leave().expect("it may again");
    relayed.world.run_for(3 * SECOND);
    assert_eq!(relayed.outcomes().last(), Some(&SpliceOutcome::Done));
    relayed.ends_well("asked again");
}

/// Both of the program's connections end while it is leaving, and the last acknowledgement is behind another one.
#[test]
fn connections_that_end_meanwhile_end_in_order() {
    let outcome = leaves_in_bad_weather(269, [1, 1]);
    assert!(matches!(&outcome, SpliceOutcome::Failed(_)), "{outcome:?}");
}

#[test]
fn either_end_may_close_or_reset_at_every_step() {
    const BRIEF: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 100, closes: true };
    const QUIET: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 40, closes: false };
    for (ours, theirs) in [(BRIEF, BRIEF), (QUIET, BRIEF), (BRIEF, QUIET)] {
        for micros in (0..6).map(|step| 560_000 + step * 45_000) {
            let what = format!("{} and {} writes, at {micros} us", ours.writes, theirs.writes);
            let mut relayed = relayed_through(15, theirs, Duration::from_millis(5), [1, 1]);
            relayed.begin(ours);
            relayed.world.run_for(Duration::from_micros(micros));
            if relayed.leave().is_err() {
                continue;
            }
            relayed.world.run_for(400 * SECOND);
            for (end, writes) in relayed.ends().iter().zip([theirs.writes, ours.writes]) {
                let said = (end.was_reset, end.was_wrong, end.received, end.state);
                assert!(
                    !end.was_reset && !end.was_wrong && end.received == u64::from(writes) * 700,
                    "{what}: {said:?}"
                );
            }
            relayed.nothing_stays(&what);
        }
    }
    for at_server in [false, true] {
        for millis in STEPS {
            let what = format!("reset by the server {at_server}, {millis} ms after");
            let mut relayed = relayed_through(16, TALK, Duration::from_millis(10), [1, 1]);
            relayed.begin(TALK);
            relayed.world.run_for(SECOND);
            relayed.leave().expect("it may");
            relayed.world.run_for(Duration::from_millis(millis));
            relayed.abort(at_server);
            relayed.world.run_for(400 * SECOND);
            for end in relayed.ends() {
                assert!(end.state == State::Gone && !end.was_wrong, "{what}: {:?}", (end.state, end.was_reset));
            }
            relayed.nothing_stays(&what);
        }
    }
}

#[test]
fn a_program_that_dies_meanwhile_costs_the_session_and_no_bytes() {
    let kept = kept_by_deaths([1, 1], (0..8).map(|step| step * 70_000));
    assert!(kept > 4, "who has left ends nothing: {kept}");
}

/// Agents of either end may be killed at any moment, as without boxes.
#[test]
fn agents_of_both_ends_may_die_at_every_step() {
    let mut went_on = 0;
    for which in 0..2 {
        for (step, away) in STEPS.into_iter().zip([250, 20, 1500].map(Duration::from_millis).into_iter().cycle()) {
            let mut relayed = relayed_through(14 + step, TALK, Duration::from_millis(10), [1, 1]);
            relayed.set_direct(step % 2 == 0);
            relayed.begin(TALK);
            relayed.world.run_for(SECOND);
            relayed.leave().expect("it may");
            relayed.world.run_for(Duration::from_millis(step));
            let dies = [relayed.client, relayed.server][which];
            let what = format!("{which} at {step} ms, for {away:?}");
            relayed.world.kill_agent(dies);
            relayed.world.run_for(away);
            relayed.world.start_agent(dies);
            let router = relayed.router;
            for host in [relayed.client, relayed.proxy, relayed.server] {
                relayed.world.register_again(router, host);
            }
            relayed.ends_well(&what);
            went_on += usize::from(relayed.outcomes() == [SpliceOutcome::Done]);
        }
    }
    assert!(went_on > 6, "a step that is written down is not lost: {went_on}");
}

/// The agent of a box dies: what it has of the session it takes up again, or the program stays.
#[test]
fn agents_of_boxes_may_die_at_every_step() {
    for side in 0..2 {
        for step in STEPS {
            let mut relayed = relayed_through(40 + step, TALK, Duration::from_millis(10), [1, 1]);
            relayed.begin(TALK);
            relayed.world.run_for(SECOND);
            relayed.leave().expect("it may");
            relayed.world.run_for(Duration::from_millis(step));
            let dies = relayed.boxes[side][0];
            relayed.world.kill_agent(dies);
            relayed.world.run_for(Duration::from_millis(100 + step * 7));
            relayed.world.start_agent(dies);
            let router = relayed.router;
            relayed.world.register_again(router, dies);
            relayed.ends_somehow(&format!("side {side} at {step} ms"));
        }
    }
}

#[test]
fn a_way_that_does_not_come_to_stand_leaves_everything_as_it_was() {
    for is_cut in [false, true] {
        let mut relayed = relayed_through(21, TALK, Duration::from_millis(5), [1, 1]);
        relayed.begin(TALK);
        relayed.world.run_for(SECOND);
        if is_cut {
            // The two boxes have not spoken to each other before.
            let [before, behind] = [0, 1].map(|side| relayed.boxes[side][0]);
            let [before, behind] = [before, behind].map(|host| relayed.world.host(host).address);
            relayed.world.network.cut(before, behind);
        } else {
            relayed.withdraw("box-1.shop");
        }
        for _ in 0..2 {
            relayed.leave().expect("it may be asked");
            relayed.world.run_for(3 * SECOND);
        }
        let outcomes = relayed.outcomes();
        assert!(matches!(&outcomes[..], [SpliceOutcome::Failed(_), SpliceOutcome::Failed(_)]), "{outcomes:?}");
        relayed.ends_well("no way");
    }
}

/// Whoever administers the client's host does not leave out the boxes behind the program.
#[test]
fn the_servers_host_takes_no_way_without_the_boxes_behind_the_program() {
    let mut relayed = relayed_through(22, TALK, Duration::from_millis(5), [0, 1]);
    relayed.begin(TALK);
    relayed.world.run_for(SECOND);
    // For the server's host, a box that no chain names is none.
    relayed.go_by_at(relayed.server, &[]);
    relayed.leave().expect("it may be asked");
    relayed.world.run_for(4 * SECOND);
    assert!(matches!(&relayed.outcomes()[..], [SpliceOutcome::Failed(_)]), "{:?}", relayed.outcomes());
    relayed.ends_well("not named");
}

#[test]
fn more_boxes_than_a_session_may_have_keep_the_program() {
    let mut relayed = relayed_through(23, TALK, Duration::from_millis(5), [5, 4]);
    relayed.begin(TALK);
    relayed.world.run_for(2 * SECOND);
    let refused = relayed.leave().expect_err("nine are too many");
    assert!(refused.to_string().contains("8 boxes"), "{refused}");
    relayed.ends_well("too many");
}
