//! What a look at the rules of stacks costs with 10,000 flows and 20 rules: as a share of one processor, at a look
//! every 250 ms. `cargo bench -p margay-sim --bench stack_rules`.

#![expect(clippy::print_stdout, reason = "whoever runs it reads it")]

use std::net::SocketAddr;
use std::time::{Duration, Instant as Clock};

use margay_core::handover::{HandoverRecord, KeyReference, Leg, LegKind};
use margay_core::key::{HostPublic, HostSecret};
use margay_core::name::{Prefix, ServiceId};
use margay_core::stack_rule::{
    Comparison, Constant, Expression, Fact, FactValue, JUDGE_EVERY, Kind, Network, StackRule,
};
use margay_core::{AssociationSetup, Config, Input, Instant, Lifecycle, Limits, Ranges, Role, Sal, Stack, Tuple};
use margay_wire::{FlowId, SessionId};

const FLOWS: u32 = 10_000;
const RULES: u16 = 20;
const LOOKS: u64 = 40;

fn peer() -> HostPublic {
    HostSecret::from_bytes([9; 32]).public()
}

fn sal() -> Sal {
    let config = Config {
        host_key: HostSecret::from_bytes([5; 32]),
        epoch: 1,
        boot_id: [6; 16],
        router: false,
        datagram_max: 1472,
        local_addresses: Vec::new(),
        ranges: Ranges::USUAL,
        limits: Limits::default(),
    };
    let mut sal = Sal::new(config, Instant::ZERO, 0, [7; 32]);
    let setup = AssociationSetup {
        host_key: peer().0,
        key: [1; 32],
        local_id: 77,
        remote_id: 3,
        peer_epoch: 1,
        boot_id: None,
        remote: SocketAddr::new([10, 0, 0, 2].into(), 54324),
        hop_key: None,
        router: false,
        initiator: true,
    };
    sal.install_association(Instant::ZERO, setup);
    for number in 1..=FLOWS {
        sal.adopt_flow(Instant::ZERO, &record(number)).expect("the peer is known");
        while sal.poll(&mut [0; 4096]).is_some() {}
        while sal.poll_event().is_some() {}
    }
    sal
}

fn record(number: u32) -> HandoverRecord {
    let [_, high, middle, low] = number.to_be_bytes();
    let source = SocketAddr::new([198, 18, middle, low].into(), 40_000 + u16::from(high));
    let tuple = Tuple { protocol: 6, source, destination: SocketAddr::new([198, 19, 0, 9].into(), 80) };
    let keys = KeyReference { host: peer().id(), association: 77 };
    HandoverRecord {
        flow: FlowId(number),
        peer_flow: FlowId(number),
        session: SessionId([middle ^ low; 16]),
        key_session: None,
        service: ServiceId([4; 32]),
        port: 0,
        source: None,
        role: Role::Initiator,
        lifecycle: Lifecycle::Established,
        authenticated: true,
        fins: (false, false),
        is_demanded: false,
        is_demanded_by_peer: false,
        is_demanded_by_rule: false,
        is_guarded: false,
        generation: 1,
        age_ms: 0,
        idle_ms: 0,
        egress: None,
        ingress: None,
        give_up_after: None,
        chain: None,
        delta: None,
        way: None,
        fetched: None,
        legs: vec![
            Leg { kind: LegKind::Sal0, stack: 0, tuple: Some(tuple), flow: None, keys: None },
            Leg { kind: LegKind::Stack, stack: 2, tuple: None, flow: Some(FlowId(number)), keys: Some(keys) },
        ],
    }
}

fn rules(when: impl Fn() -> Expression) -> Vec<StackRule> {
    let rule = |number| StackRule {
        number,
        names: vec![Prefix::new(ServiceId::default(), 0)],
        text: String::new(),
        when: when(),
        uses: Stack::Secure,
        hold: Duration::from_secs(3),
        release: Duration::from_secs(10),
        priority: 0,
        is_floor: false,
    };
    (1..=RULES).map(rule).collect()
}

/// `remote in 10.9.0.0/16 && fact.lockdown`: facts that seldom change.
fn seldom() -> Expression {
    let network = Network { address: [10, 9, 0, 0].into(), bits: 16 };
    let remote = Expression::Within(Box::new(Expression::Fact(Fact::Remote)), network);
    Expression::And(Box::new([remote, Expression::Outside("lockdown".into(), Kind::Bool)]))
}

/// `protocol == "tcp" && age_s > 1e9`: the age is another one with each look, and nothing else decides.
fn always() -> Expression {
    let constant = |constant| Expression::Constant(constant);
    let age = Expression::Compare(
        Comparison::More,
        Box::new([Expression::Fact(Fact::AgeS), constant(Constant::Number(1e9))]),
    );
    let tcp = Expression::Compare(
        Comparison::Equal,
        Box::new([Expression::Fact(Fact::Protocol), constant(Constant::Text("tcp".into()))]),
    );
    Expression::And(Box::new([tcp, age]))
}

/// Looks at all flows, of which `active` are; the share of a processor.
fn measure(sal: &mut Sal, active: u32, start: u64) -> f64 {
    let mut spent = Duration::ZERO;
    for look in 0..LOOKS {
        let now = Instant::from_millis(start + look * 250);
        (1..=active).for_each(|flow| sal.handle(now, Input::Activity(FlowId(flow))));
        let begin = Clock::now();
        sal.judge_stacks(now);
        spent += begin.elapsed();
    }
    spent.as_secs_f64() / (JUDGE_EVERY.as_secs_f64() * LOOKS as f64)
}

fn main() {
    let mut sal = sal();
    let mut start = 60_000;
    for (what, when, active) in [
        ("facts that seldom change, all flows active", seldom as fn() -> Expression, FLOWS),
        ("facts that change with every packet, 1000 flows active", always, FLOWS / 10),
        ("facts that change with every packet, all flows active", always, FLOWS),
    ] {
        start += 60_000;
        let now = Instant::from_millis(start);
        sal.set_stack_rules(now, rules(when));
        sal.judge_stacks(now);
        let share = measure(&mut sal, active, start + 20_000);
        println!("{what}: {:.2} % of a processor", share * 100.0);
    }
    let now = Instant::from_millis(start + 60_000);
    sal.set_stack_rules(now, rules(seldom));
    sal.set_fact(now, "lockdown", FactValue::Bool(true), Duration::from_secs(60)).expect("room");
    let begin = Clock::now();
    sal.judge_stacks(now);
    println!("a fact from outside: {:.1} ms once", begin.elapsed().as_secs_f64() * 1e3);
}
