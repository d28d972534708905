//! A program between two connections leaves, in virtual time: what it stood between becomes one session, with data both
//! ways, with loss, with ends that close, and with programs and agents that die.

mod relayed;

use std::time::Duration;

use margay_core::name::Prefix;
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome, SpliceOutcome, SpliceRefused};
use margay_core::stack_rule::{Constant, Expression, StackRule};
use margay_core::{Cipher, Stack};
use margay_sim::Weather;
use margay_sim::check::ends_agree;
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_wire::{DATA_HEADER_LEN, DataRepr, Message, is_sealed};
use relayed::{CHAT, SECOND, TALK, kept_by_deaths, relayed};

#[test]
fn a_program_leaves_and_its_session_goes_on_without_it() {
    for is_direct in [false, true] {
        for is_sealed in [false, true] {
            for lag in [1, 60] {
                let what = format!("direct {is_direct}, sealed {is_sealed}, lag {lag} ms");
                let mut relayed = relayed(7, TALK, Duration::from_millis(lag));
                relayed.set_direct(is_direct);
                if is_sealed {
                    for host in relayed.all() {
                        relayed.world.host(host).set_secure(&[Cipher::ChaCha20Poly1305], true);
                    }
                }
                relayed.begin(TALK);
                relayed.world.run_for(SECOND);
                relayed.leave().expect("it may");
                assert_eq!(relayed.leave(), Err(SpliceRefused::UnderWay));
                relayed.world.run_for(SECOND);
                assert_eq!(relayed.outcomes(), [SpliceOutcome::Done], "{what}");
                assert_eq!(relayed.reconfigurations(), [("leave", ReconfigurationOutcome::Done)], "{what}");
                let proxy = relayed.proxy;
                assert_eq!(relayed.flows_at(proxy), 0, "{what}");
                let received = relayed.ends().map(|end| end.received);
                relayed.world.run_for(SECOND);
                let later = relayed.ends().map(|end| end.received);
                assert!(later.iter().zip(received).all(|(later, before)| *later > before), "{what}: it goes on");
                let client = relayed.client;
                let stream = relayed.stream;
                let shown = relayed.world.host(client).flow_of(stream).expect("it goes on");
                assert_eq!(shown.service, service(CHAT), "{what}");
                assert_eq!(shown.carriage.sends(), is_direct && !is_sealed, "{what}");
                ends_agree(&relayed.world).expect("they do");
                relayed.ends_well(&what);
            }
        }
    }
}

/// Demands encryption of everything.
fn floor() -> StackRule {
    StackRule {
        number: 1,
        names: vec![Prefix::default()],
        text: String::new(),
        when: Expression::Constant(Constant::Bool(true)),
        uses: Stack::Secure,
        hold: Duration::ZERO,
        release: SECOND,
        priority: 0,
        is_floor: true,
    }
}

#[test]
fn a_floor_that_comes_into_force_while_a_program_leaves_holds_by_whatever_way() {
    let mut ended = Vec::new();
    for by_server in [false, true] {
        for at in (0..60).step_by(4) {
            let what = format!("by server {by_server}, after {at} ms");
            let mut relayed = relayed(7, TALK, Duration::from_millis(20));
            for host in relayed.all() {
                relayed.world.host(host).set_secure(&[Cipher::ChaCha20Poly1305], false);
            }
            relayed.begin(TALK);
            relayed.world.run_for(SECOND / 2);
            relayed.leave().expect("it may");
            relayed.world.run_for(Duration::from_millis(at));
            let ruled = if by_server { relayed.server } else { relayed.client };
            let (now, own) = (relayed.world.now, relayed.world.host(ruled).address);
            relayed.world.host(ruled).sal.set_stack_rules(now, vec![floor()]);
            relayed.world.touch(ruled);
            relayed.world.recording = Some(Vec::new());
            for _ in 0..40 {
                relayed.world.run_for(SECOND / 4);
                let now = relayed.world.now;
                relayed.world.host(ruled).sal.judge_stacks(now);
                relayed.world.touch(ruled);
            }
            let sent = relayed.world.recording.take().expect("recording");
            let is_plain = |bytes: &[u8]| {
                let has_payload = bytes.len() > DATA_HEADER_LEN + 20;
                has_payload && DataRepr::parse(bytes).is_ok_and(|data| !is_sealed(data.stack))
            };
            let plain = sent.iter().filter(|(from, _, bytes)| from.ip() == own && is_plain(bytes)).count();
            assert_eq!(plain, 0, "{what}");
            if relayed.ends_somehow(&what) {
                ended.push((by_server, at));
            }
        }
    }
    // With two ways in use neither can be encrypted, and what is held would have to pass first.
    assert!(ended.iter().all(|(_, at)| (6..28).contains(at)), "{ended:?}");
}

/// Its connections are there before both hosts have confirmed their sessions: whoever asks again is taken then.
#[test]
fn a_program_that_is_too_early_may_ask_again() {
    for seed in 0..8 {
        let mut relayed = relayed(seed, TALK, Duration::from_millis(1));
        relayed.begin(TALK);
        let proxy = relayed.proxy;
        while relayed.flows_at(proxy) < 2 {
            relayed.world.run_for(Duration::from_micros(200));
        }
        let mut early = 0;
        while let Err(refused) = relayed.leave() {
            assert!(refused.is_for_now(), "seed {seed}: {refused}");
            early += 1;
            assert!(early < 5000, "seed {seed}: it is never taken");
            relayed.world.run_for(Duration::from_micros(200));
        }
        assert!(early > 0, "seed {seed}: it was not too early");
        relayed.world.run_for(SECOND);
        assert_eq!(relayed.outcomes(), [SpliceOutcome::Done], "seed {seed}");
        relayed.ends_well(&format!("seed {seed}"));
    }
}

#[test]
fn loss_delays_it_and_costs_nobody_the_session() {
    for seed in 0..15 {
        let mut relayed = relayed(100 + seed, TALK, Duration::from_millis(seed % 5 * 11 + 1));
        relayed.set_direct(seed % 2 == 0);
        relayed.begin(TALK);
        relayed.world.run_for(SECOND);
        let delay_max = Duration::from_millis(1 + seed % 3 * 7);
        let bad = Weather { loss_per_mille: 40, duplicate_per_mille: 40, delay_max, ..Weather::FAIR };
        relayed.world.network.weather = bad;
        relayed.leave().expect("it may");
        relayed.world.run_for(4 * SECOND);
        relayed.world.network.weather = Weather::FAIR;
        relayed.world.run_for(2 * SECOND);
        assert_eq!(relayed.outcomes().len(), 1, "seed {seed}");
        let what = format!("seed {seed}: {:?}", relayed.outcomes());
        relayed.ends_well(&what);
    }
}

#[test]
fn either_end_may_close_at_every_step() {
    const BRIEF: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 100, closes: true };
    const QUIET: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: 40, closes: false };
    for (ours, theirs) in [(BRIEF, BRIEF), (QUIET, BRIEF), (BRIEF, QUIET)] {
        for micros in (0..12).map(|step| 620_000 + step * 15_000) {
            let what = format!("{} and {} writes, at {micros} us", ours.writes, theirs.writes);
            let mut relayed = relayed(15, theirs, Duration::from_millis(5));
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
}

/// Whichever of its packets go by which way, both ends know that a connection is over as soon as of any other.
#[test]
fn a_connection_that_ends_while_a_program_leaves_is_forgotten_as_any_other() {
    /// Ends are kept for 10 s, and then it is asked whether all has arrived.
    const ORDINARY: Duration = Duration::from_secs(13);
    const BRIEF: Plan = Plan { write: 700, every: Duration::from_millis(14), writes: 50, closes: true };
    let mut done = 0;
    for (ours, theirs) in [(BRIEF, Plan::LISTEN), (Plan::LISTEN, BRIEF), (BRIEF, BRIEF)] {
        for millis in (0..30).map(|step| 550 + step * 7) {
            let mut relayed = relayed(16, theirs, Duration::from_millis(5));
            relayed.set_direct(millis % 2 == 0);
            // By its ports a connection has its numbers, and the two differ by others each time.
            let client = relayed.client;
            relayed.world.host(client).come_round(u16::try_from(millis).expect("it is small"));
            relayed.begin(ours);
            relayed.world.run_for(Duration::from_millis(millis));
            if relayed.leave().is_err() {
                continue;
            }
            relayed.world.run_for(SECOND - Duration::from_millis(millis) + ORDINARY);
            let outcomes = relayed.outcomes();
            done += u32::from(outcomes == [SpliceOutcome::Done]);
            let what = format!("{} and {} writes, at {millis} ms: {outcomes:?}", ours.writes, theirs.writes);
            relayed.nothing_stays(&what);
        }
    }
    assert!(done > 30, "programs have left amid the end: {done}");
}

#[test]
fn a_program_that_dies_meanwhile_costs_the_session_and_no_bytes() {
    let kept = kept_by_deaths([0, 0], (0..12).map(|step| step * 9_000));
    assert!(kept > 4, "who has left ends nothing: {kept}");
}

/// The next agent goes on from what was written down, or takes everything back: no end's agent that dies costs the
/// session, however long it is away.
#[test]
fn agents_may_die_at_every_step() {
    let mut went_on = 0;
    for which in 0..3 {
        for (step, away) in
            (0..12).map(|step| step * 3).zip([250, 20, 1500].map(Duration::from_millis).into_iter().cycle())
        {
            let mut relayed = relayed(14 + step, TALK, Duration::from_millis(10));
            relayed.set_direct(step % 4 == 0);
            relayed.begin(TALK);
            relayed.world.run_for(SECOND);
            relayed.leave().expect("it may");
            relayed.world.run_for(Duration::from_millis(step));
            let dies = [relayed.client, relayed.proxy, relayed.server][which];
            let what = format!("{which} at {step} ms, for {away:?}");
            relayed.world.kill_agent(dies);
            relayed.world.run_for(away);
            relayed.world.start_agent(dies);
            let router = relayed.router;
            for host in [relayed.client, relayed.proxy, relayed.server] {
                relayed.world.register_again(router, host);
            }
            if dies == relayed.proxy {
                relayed.ends_somehow(&what);
            } else {
                relayed.ends_well(&what);
                went_on += usize::from(relayed.outcomes() == [SpliceOutcome::Done]);
            }
            for host in relayed.all() {
                let now = relayed.world.now;
                assert_eq!(relayed.world.host(host).sal.locked_sessions(now), 0, "{what}");
            }
        }
    }
    assert!(went_on > 10, "a step that is written down is not lost: {went_on}");
}

/// Both ends' agents die in the phase, one after the other or at once, under loss.
#[test]
fn both_ends_agents_may_die_with_two_ways_in_use() {
    for seed in 0..12 {
        let mut relayed = relayed(308 + seed, TALK, Duration::from_millis(1 + seed % 3 * 60));
        relayed.begin(TALK);
        relayed.world.run_for(SECOND);
        relayed.leave().expect("it may");
        relayed.world.network.weather = Weather { loss_per_mille: 20, duplicate_per_mille: 20, ..Weather::FAIR };
        relayed.world.run_for(Duration::from_millis(6 + seed * 2));
        let what = format!("seed {seed}");
        for host in [relayed.client, relayed.server] {
            relayed.world.kill_agent(host);
            relayed.world.run_for(Duration::from_millis(seed % 4 * 15));
        }
        for host in [relayed.server, relayed.client] {
            relayed.world.start_agent(host);
            relayed.world.run_for(Duration::from_millis(seed % 3 * 40));
        }
        relayed.world.network.weather = Weather::FAIR;
        let router = relayed.router;
        for host in [relayed.client, relayed.server] {
            relayed.world.register_again(router, host);
        }
        relayed.ends_well(&what);
    }
}

#[test]
fn a_way_that_does_not_come_to_stand_leaves_everything_as_it_was() {
    let mut relayed = relayed(21, TALK, Duration::from_millis(5));
    relayed.begin(TALK);
    relayed.world.run_for(SECOND / 4);
    let [client, server] = [relayed.client, relayed.server].map(|host| relayed.world.host(host).address);
    relayed.world.network.cut(client, server);
    for _ in 0..2 {
        relayed.leave().expect("it may be asked");
        relayed.world.run_for(2 * SECOND + SECOND / 8);
    }
    let outcomes = relayed.outcomes();
    assert!(matches!(&outcomes[..], [SpliceOutcome::Failed(_), SpliceOutcome::Failed(_)]), "{outcomes:?}");
    relayed.ends_well("no way");
}

#[test]
fn who_may_not_have_the_service_does_not_get_it_by_a_program_that_leaves() {
    let mut relayed = relayed(22, TALK, Duration::from_millis(5));
    relayed.begin(TALK);
    relayed.world.run_for(SECOND);
    // From now on the service is for the program's host alone.
    let proxy = relayed.world.host(relayed.proxy).sal.host();
    let server = relayed.server;
    let sal = &mut relayed.world.host(server).sal;
    let (id, mut rule) = sal
        .rules()
        .find(|(prefix, ..)| prefix.id == service(CHAT))
        .map(|(_, id, rule)| (id, rule.clone()))
        .expect("its rule");
    let margay_core::table::Action::Demux(demux) = &mut rule.action else { panic!("it is served") };
    demux.allow = margay_core::table::Allow::List(vec![margay_core::table::AllowItem::Host(proxy)]);
    assert!(sal.change_rule(id, rule));
    relayed.leave().expect("it may be asked");
    relayed.world.run_for(4 * SECOND);
    assert!(matches!(&relayed.outcomes()[..], [SpliceOutcome::Failed(_)]), "{:?}", relayed.outcomes());
    relayed.ends_well("not allowed");
}

#[test]
fn two_connections_that_are_none_of_a_program_are_refused() {
    let mut relayed = relayed(23, TALK, Duration::from_millis(5));
    relayed.begin(TALK);
    relayed.world.run_for(SECOND);
    let now = relayed.world.now;
    let proxy = relayed.proxy;
    let flows: Vec<_> = relayed.world.host(proxy).sal.flows().collect();
    let of = |role| flows.iter().find(|flow| flow.role == role).expect("it has one").flow;
    let [accepted, opened] = [margay_core::Role::Responder, margay_core::Role::Initiator].map(of);
    let nobody = margay_core::delta::SocketFacts {
        unread: 0,
        written: 0,
        timestamp: None,
        peer_scale: 0,
        own_scale: 0,
        has_sack: false,
    };
    let facts = margay_core::delta::SpliceFacts { left: nobody, right: nobody };
    let sal = &mut relayed.world.host(proxy).sal;
    assert!(matches!(sal.splice(now, opened, accepted, facts), Err(SpliceRefused::UnknownFlow(..))));
    assert!(matches!(sal.splice(now, accepted, accepted, facts), Err(SpliceRefused::UnknownFlow(..))));
    let client = relayed.client;
    let own = relayed.world.host(client).sal.flows().next().expect("the session").flow;
    let edit = Edit::Insert { service: service("box.shop"), before: None };
    relayed.leave().expect("it may");
    // Another order meanwhile finds the session busy, and waits.
    relayed.world.run_for(Duration::from_millis(5));
    let now = relayed.world.now;
    relayed.world.host(client).sal.reconfigure(now, own, edit).expect("it waits");
    relayed.world.run_for(2 * SECOND);
    assert_eq!(relayed.outcomes(), [SpliceOutcome::Done]);
    relayed.ends_well("another order");
}

#[test]
fn what_is_said_again_or_altered_changes_nothing() {
    let mut relayed = relayed(31, TALK, Duration::from_millis(5));
    relayed.begin(TALK);
    relayed.world.run_for(SECOND);
    relayed.world.recording = Some(Vec::new());
    relayed.leave().expect("it may");
    relayed.world.run_for(SECOND);
    let said = relayed.world.recording.take().expect("it was recorded");
    assert_eq!(relayed.outcomes(), [SpliceOutcome::Done]);
    let is_step = |bytes: &[u8]| Message::parse(bytes).is_ok_and(|message| message.reconfiguration().is_some());
    let steps: Vec<_> = said.into_iter().filter(|(_, _, bytes)| is_step(bytes)).collect();
    let has = |is_it: fn(&Message<'_>) -> bool| {
        steps.iter().any(|(_, _, bytes)| Message::parse(bytes).is_ok_and(|m| is_it(&m)))
    };
    assert!(has(|message| message.splice().is_some()) && has(|message| message.cut().is_some()));
    let before = relayed.reconfigurations().len();
    for (from, to, bytes) in steps {
        for at in [20, bytes.len() / 2, bytes.len() - 30] {
            let mut altered = bytes.clone();
            altered[at] ^= 0x10;
            relayed.world.inject(from, to, altered);
        }
        relayed.world.inject(from, to, bytes);
        relayed.world.run_for(Duration::from_millis(3));
    }
    assert_eq!(relayed.reconfigurations().len(), before);
    assert_eq!(relayed.outcomes(), [SpliceOutcome::Done]);
    relayed.ends_well("said again");
}
