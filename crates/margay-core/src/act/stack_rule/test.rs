//! What one end does by its rules.

use alloc::boxed::Box;
use alloc::string::ToString;

use margay_wire::{CHANGES, ChangeStep, LossRepr, Message, STACK_FEC};

use super::*;
use crate::act::handover::HandoverRecord;
use crate::act::handover::tests::{meet_peer, record, sal};
use crate::association::FEC;
use crate::cache::entry::EntryUpdate;
use crate::cache::output::Output;
use crate::leg::loss::FlowCount;
use crate::leg::seal::Cipher;
use crate::machine::input::Input;
use crate::machine::sal::Sal;
use crate::types::config::Limits;
use crate::types::drop_reason::DropReason;
use crate::types::role::{Lifecycle, Role};

const SECOND: Duration = Duration::from_secs(1);

fn outside(name: &str) -> Expression {
    Expression::Outside(name.into(), Kind::Bool)
}

fn rule(number: u16, when: Expression, uses: Stack) -> StackRule {
    StackRule {
        number,
        names: alloc::vec![Prefix::new(ServiceId::default(), 0)],
        text: "a condition".into(),
        when,
        uses,
        hold: SECOND * 3,
        release: SECOND * 10,
        priority: 0,
        is_floor: false,
    }
}

/// A host with one established flow, whose peer can do `stacks`.
fn host(stacks: u32) -> (Sal, FlowId) {
    let mut sal = sal(Limits::default());
    sal.set_secure(&[Cipher::ChaCha20Poly1305], false, Vec::new());
    meet_peer(&mut sal, 77);
    let record =
        HandoverRecord { role: Role::Initiator, lifecycle: Lifecycle::Established, fins: (false, false), ..record() };
    sal.adopt_flow(Instant::ZERO, &record).expect("the peer is known");
    let association = sal.flows.get(record.flow).map_or(0, |flow| flow.association);
    sal.associations.set_stacks(association, stacks);
    said(&mut sal);
    (sal, record.flow)
}

const ABLE: u32 = CHANGES | Cipher::ChaCha20Poly1305.bit();

/// The steps that a host says, each with whether a rule wants it.
fn said(sal: &mut Sal) -> Vec<(ChangeStep, bool)> {
    let mut buf = alloc::vec![0; 65_536];
    let mut steps = Vec::new();
    while let Some(output) = sal.poll(&mut buf) {
        if let Output::Transmit { len, .. } = output {
            let message = Message::parse(&buf[..len]).expect("ours");
            steps.extend(message.change().map(|change| (change.step, change.by_rule)));
        }
    }
    while sal.poll_event().is_some() {}
    steps
}

fn at(millis: u64) -> Instant {
    Instant::from_millis(100_000 + millis)
}

#[test]
fn a_rule_asks_once_its_condition_has_held_for_long_enough() {
    let (mut sal, _) = host(ABLE);
    sal.set_stack_rules(at(0), alloc::vec![rule(1, outside("lockdown"), Stack::Secure)]);
    sal.set_fact(at(0), "lockdown", FactValue::Bool(true), SECOND * 60).expect("room");
    let mut asked = None;
    for millis in (0..5000).step_by(250) {
        sal.judge_stacks(at(millis));
        if said(&mut sal).contains(&(ChangeStep::Request, true)) {
            asked = asked.or(Some(millis));
        }
    }
    assert_eq!(asked, Some(3000));
}

#[test]
fn what_flaps_asks_for_nothing() {
    let (mut sal, id) = host(ABLE);
    sal.set_stack_rules(at(0), alloc::vec![rule(1, outside("lockdown"), Stack::Secure)]);
    for step in 0_u64..40 {
        let now = at(step * 1000);
        sal.set_fact(now, "lockdown", FactValue::Bool(step % 2 == 0), SECOND * 60).expect("room");
        sal.judge_stacks(now);
        assert!(said(&mut sal).is_empty());
    }
    assert!(sal.flow(id).is_some_and(|flow| flow.stack.changes.is_empty()));
}

#[test]
fn a_rule_about_a_program_is_false_until_the_program_is_known() {
    let (mut sal, id) = host(ABLE);
    assert!(sal.flows_to_identify().is_empty(), "no rule asks");
    let unit = |unit: &str| {
        let parts = [Expression::Fact(Fact::Unit), Expression::Constant(Constant::Text(unit.into()))];
        Expression::Compare(Comparison::Equal, Box::new(parts))
    };
    let mut own = rule(1, unit("backup.service"), Stack::Secure);
    own.hold = Duration::ZERO;
    sal.set_stack_rules(at(0), alloc::vec![own]);
    let sought = sal.flows_to_identify();
    assert_eq!(sought, [(id, sal.flow(id).expect("there").app)]);
    sal.judge_stacks(at(0));
    assert!(said(&mut sal).is_empty());
    let shown = sal.rules_of_flow(id).expect("a rule");
    assert_eq!(shown.facts, [("program.unit".into(), "unknown".into())]);
    assert!(shown.rules[0].failure.as_ref().is_some_and(|why| why.contains("program.unit")));
    sal.note_program(id, None);
    assert_eq!(sal.flows_to_identify().len(), 1, "its socket may come");
    let long = "x".repeat(5000);
    let program = Program { executable: Some(long), unit: Some("backup.service".into()), user: None };
    sal.note_program(id, Some(program));
    assert!(sal.flows_to_identify().is_empty(), "it is known");
    sal.judge_stacks(at(250));
    assert_eq!(said(&mut sal), [(ChangeStep::Request, true)]);
    let shown = sal.rules_of_flow(id).expect("a rule");
    assert_eq!(shown.facts, [("program.unit".into(), "\"backup.service\"".into())]);
    assert!(sal.close_flow(at(300), id));
    sal.note_program(id, Some(Program::default()));
    assert!(sal.flows_to_identify().is_empty());
}

#[test]
fn a_program_that_is_nowhere_to_be_found_is_looked_for_no_more() {
    let (mut sal, id) = host(ABLE);
    sal.set_stack_rules(at(0), alloc::vec![rule(1, Expression::IsKnown(Fact::User), Stack::Secure)]);
    for _ in 0..5 {
        assert_eq!(sal.flows_to_identify().len(), 1);
        sal.note_program(id, None);
    }
    assert!(sal.flows_to_identify().is_empty());
}

#[test]
fn an_order_outranks_rules_and_a_floor_outranks_orders() {
    let (mut sal, id) = host(ABLE);
    assert_eq!(sal.set_flow_stack(at(0), id, Stack::Plain), Ok(false));
    let constant = Expression::Constant(Constant::Bool(true));
    sal.set_stack_rules(at(0), alloc::vec![rule(1, constant.clone(), Stack::Secure)]);
    for millis in (0..8000).step_by(250) {
        sal.judge_stacks(at(millis));
        assert!(said(&mut sal).is_empty(), "the order holds");
    }
    let floor = StackRule { is_floor: true, ..rule(1, constant, Stack::Secure) };
    sal.set_stack_rules(at(8000), alloc::vec![floor]);
    sal.judge_stacks(at(8000));
    assert!(said(&mut sal).contains(&(ChangeStep::Request, true)));
    let refused = sal.release_flow_stack(at(8001), id);
    assert_eq!(refused, Err(ChangeRefused::UnderWay));
    let rules = sal.rules_of_flow(id).expect("a rule");
    assert!(rules.rules[0].in_force && rules.rules[0].is_floor && rules.is_guarded);
}

#[test]
fn a_flow_that_loses_datagrams_is_asked_about_and_goes_by_fec() {
    let (mut sal, id) = host(ABLE | FEC);
    sal.flows.get_mut(id).expect("there").app.protocol = 17;
    let parts = [Expression::Fact(Fact::Loss), Expression::Constant(Constant::Number(0.01))];
    let loses = Expression::Compare(Comparison::More, Box::new(parts));
    sal.set_stack_rules(at(0), alloc::vec![rule(1, loses, Stack::Fec)]);
    let mut asked = 0;
    let mut begun = None;
    for millis in (0..10_000).step_by(250) {
        let now = at(u64::from(millis));
        sal.handle(now, Input::Activity(id));
        sal.handle(now, Input::Timeout);
        let mut buf = alloc::vec![0; 65_536];
        while let Some(output) = sal.poll(&mut buf) {
            match output {
                // One datagram each millisecond; after three seconds every tenth is lost.
                Output::Update(EntryUpdate::Count(flow)) => {
                    assert_eq!(flow, id);
                    let count = FlowCount { sent: millis, ..FlowCount::default() };
                    sal.handle(now, Input::Counted { flow: id, count: &count });
                }
                Output::Transmit { len, .. } => {
                    let message = Message::parse(&buf[..len]).expect("ours");
                    if let Some(question) = message.loss() {
                        asked += 1;
                        let received = millis - millis.saturating_sub(3000) / 10;
                        let answer = LossRepr { expected: question.sent, received, ..LossRepr::default() };
                        assert_eq!(sal.note_loss(id, answer, None, true), Ok(()));
                    }
                    let is_begun = message.change().is_some_and(|change| change.stack == STACK_FEC);
                    begun = begun.or(is_begun.then_some(millis));
                }
                _ => {}
            }
        }
        sal.judge_stacks(now);
    }
    assert!((18..=22).contains(&asked), "twice a second: {asked}");
    assert!(begun.is_some_and(|millis| (6000..8000).contains(&millis)), "{begun:?}");
    let loss = sal.flow(id).and_then(|flow| flow.loss.sent).expect("known");
    assert!((80_000..100_000).contains(&loss.ppm), "{loss:?}");
    assert_eq!(sal.associations().find_map(|known| known.loss_ppm), Some(loss.ppm));
    sal.set_stack_rules(at(10_000), Vec::new());
    sal.handle(at(11_000), Input::Timeout);
    assert_eq!(sal.note_loss(id, LossRepr::default(), None, true), Err(DropReason::Unexpected), "nobody asks any more");
}

#[test]
fn who_cannot_be_changed_is_not_tried_again_for_a_minute_and_says_why() {
    let (mut sal, id) = host(0);
    sal.set_stack_rules(at(0), alloc::vec![rule(1, Expression::Constant(Constant::Bool(true)), Stack::Secure)]);
    let mut tries = Vec::new();
    for millis in (0..130_000).step_by(250) {
        let before = sal.flow(id).map_or(0, |flow| flow.stack.changes.len());
        sal.judge_stacks(at(millis));
        if sal.flow(id).map_or(0, |flow| flow.stack.changes.len()) > before {
            tries.push(millis);
        }
    }
    assert_eq!(tries, [3000, 63_000, 123_000]);
    let (why, _) = sal.rules_of_flow(id).and_then(|rules| rules.blocked).expect("refused");
    assert_eq!(why, ChangeRefused::OldPeer);
}

#[test]
fn a_rule_that_fails_is_false_counted_once_and_shown() {
    let (mut sal, id) = host(ABLE);
    sal.set_stack_rules(at(0), alloc::vec![rule(4, outside("lockdown"), Stack::Secure)]);
    for millis in (0..5000).step_by(250) {
        sal.judge_stacks(at(millis));
    }
    let info = &sal.stack_rules()[0];
    assert_eq!((info.flows, info.failing, info.in_force, info.counts.failures), (1, 1, 0, 1));
    assert!(info.counts.evaluations <= 2, "{info:?}: not with each look");
    let rules = sal.rules_of_flow(id).expect("a rule");
    assert!(rules.rules[0].failure.as_ref().is_some_and(|why| why.contains("margay fact set lockdown")));
    assert_eq!(rules.facts, [("fact.lockdown".to_string(), "unknown".to_string())]);
}

#[test]
fn facts_are_bounded_typed_and_end() {
    let (mut sal, _) = host(ABLE);
    sal.set_stack_rules(at(0), alloc::vec![rule(1, outside("lockdown"), Stack::Secure)]);
    let mut set = |name: &str, value: FactValue, ttl| sal.set_fact(at(0), name, value, ttl);
    assert!(matches!(set("Big", FactValue::Bool(true), SECOND), Err(FactRefused::Name(_))));
    assert!(matches!(set("", FactValue::Bool(true), SECOND), Err(FactRefused::Name(_))));
    assert!(matches!(set("a", FactValue::Text("x".repeat(300)), SECOND), Err(FactRefused::Long(300))));
    assert_eq!(set("a", FactValue::Bool(true), Duration::ZERO), Err(FactRefused::Ttl));
    assert_eq!(set("a", FactValue::Bool(true), SECOND * 90_000), Err(FactRefused::Ttl));
    let wrong = set("lockdown", FactValue::Number(1.0), SECOND).expect_err("rule 1 wants a truth value");
    assert!(wrong.to_string().contains("rule 1"), "{wrong}");
    for number in 0..256 {
        set(&alloc::format!("fact_{number}"), FactValue::Number(1.0), SECOND * 5).expect("room");
    }
    assert_eq!(set("more", FactValue::Bool(true), SECOND), Err(FactRefused::Full));
    assert_eq!(sal.outside_facts(at(4999)).len(), 256);
    assert_eq!(sal.outside_facts(at(5000)).len(), 0, "they end");
    assert!(matches!(sal.clear_fact(at(5000), "fact_1"), Err(FactRefused::NotSet(_))));
}

/// The clock of the wall decides what the hour is, and nothing else: neither when a fact from outside ends, nor for how
/// long a condition holds.
#[test]
fn a_clock_that_jumps_changes_no_flow_but_by_rules_about_the_hour() {
    let (mut sal, id) = host(ABLE);
    sal.set_wall_clock(at(0), 1_800_000_000);
    sal.set_stack_rules(at(0), alloc::vec![rule(1, outside("lockdown"), Stack::Secure)]);
    sal.set_fact(at(0), "lockdown", FactValue::Bool(true), SECOND * 60).expect("room");
    let mut asked = None;
    for (millis, unix_s) in [(0, 1_800_000_000), (1000, 0), (2000, u64::from(u32::MAX)), (2999, 1), (3000, 900_000_000)]
    {
        sal.set_wall_clock(at(millis), unix_s);
        sal.judge_stacks(at(millis));
        if said(&mut sal).contains(&(ChangeStep::Request, true)) {
            asked = asked.or(Some(millis));
        }
        assert_eq!(sal.outside_facts(at(millis)).len(), 1);
        assert!(sal.flow(id).is_some_and(|flow| flow.lifecycle == Lifecycle::Established));
    }
    assert_eq!(asked, Some(3000));
}

#[test]
fn of_several_rules_the_greatest_priority_decides_and_then_the_first() {
    let (mut sal, id) = host(ABLE);
    let always = || Expression::Constant(Constant::Bool(true));
    let plain = StackRule { priority: 1, ..rule(3, always(), Stack::Plain) };
    let rules = alloc::vec![rule(1, always(), Stack::Secure), rule(2, always(), Stack::Plain), plain];
    sal.set_stack_rules(at(0), rules.clone());
    for millis in (0..5000).step_by(250) {
        sal.judge_stacks(at(millis));
    }
    assert!(said(&mut sal).is_empty(), "rule 3 wants the flow as it is");
    let order: Vec<u16> = sal.rules_of_flow(id).expect("rules").rules.iter().map(|rule| rule.number).collect();
    assert_eq!(order, [3, 1, 2]);
    sal.set_stack_rules(at(5000), rules[..2].to_vec());
    for millis in (5000..10_000).step_by(250) {
        sal.judge_stacks(at(millis));
    }
    assert!(said(&mut sal).contains(&(ChangeStep::Request, true)), "rule 1");
}

#[test]
fn names_that_rules_are_about_take_no_grants() {
    let (mut sal, _) = host(ABLE);
    let name = ServiceId([7; 32]);
    assert!(!sal.stack_rules.has_any_of(&name));
    let narrow = StackRule { names: alloc::vec![Prefix::new(name, 64)], ..rule(1, outside("a"), Stack::Secure) };
    sal.set_stack_rules(at(0), alloc::vec![narrow]);
    assert!(sal.stack_rules.has_any_of(&name) && !sal.stack_rules.has_any_of(&ServiceId::default()));
}

#[test]
fn conditions_are_evaluated_when_a_fact_changes_or_their_flow_is_active() {
    let (mut sal, id) = host(ABLE);
    let rules: Vec<StackRule> = (1..=20).map(|number| rule(number, outside("lockdown"), Stack::Secure)).collect();
    sal.set_stack_rules(at(0), rules);
    sal.judge_stacks(at(0));
    let before = sal.stack_rules()[0].counts.evaluations;
    for millis in (250..60_000).step_by(250) {
        sal.handle(at(millis), Input::Activity(id));
        sal.judge_stacks(at(millis));
    }
    assert_eq!(sal.stack_rules()[0].counts.evaluations, before, "also of a flow that is active");
    let age = Expression::Compare(
        Comparison::More,
        Box::new([Expression::Fact(Fact::AgeS), Expression::Constant(Constant::Number(1e9))]),
    );
    sal.set_stack_rules(at(60_000), alloc::vec![rule(1, age, Stack::Secure)]);
    for millis in (60_250..120_000).step_by(250) {
        sal.judge_stacks(at(millis));
    }
    let evaluations = sal.stack_rules()[0].counts.evaluations;
    assert_eq!(evaluations, 1, "not before the flow is as old as that");
    // The flow has begun at 99 s or before; it is older than 400 s from some look on.
    let older = |sal: &mut Sal, seconds: f64, from: u64| {
        let age = Expression::Compare(
            Comparison::More,
            Box::new([Expression::Fact(Fact::AgeS), Expression::Constant(Constant::Number(seconds))]),
        );
        sal.set_stack_rules(at(from), alloc::vec![rule(1, age, Stack::Secure)]);
        let mut began = None;
        for millis in (from..from + 100_000).step_by(250) {
            sal.handle(at(millis), Input::Activity(id));
            sal.judge_stacks(at(millis));
            let holds = sal.rules_of_flow(id).is_some_and(|rules| rules.rules[0].holds);
            began = began.or(holds.then_some(millis));
        }
        (began, sal.stack_rules()[0].counts.evaluations)
    };
    let age_s = at(120_000).since(sal.flow(id).expect("it lives").since).as_secs_f64();
    assert_eq!(older(&mut sal, age_s + 49.9, 120_000), (Some(170_000), 2), "once at first, once when it is so old");
}
