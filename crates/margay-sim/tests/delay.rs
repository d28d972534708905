//! First packets that wait for resolvers, in virtual time: one question per name, what answers and failures lead to,
//! and the bounds.

use std::time::Duration;

use margay_core::delay::{Answer, HELD_TIMEOUT, Question};
use margay_core::name::Prefix;
use margay_core::table::resolver::ResolverId;
use margay_core::table::{Action, Allow, NextHop, Outcome as Said, Rule, RuleId};
use margay_core::{AppVerdict, DropReason, Limits, Ranges};
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Outcome, Weather, World};

const SECOND: Duration = Duration::from_secs(1);
const TTL: Duration = Duration::from_secs(10);
const FIRST: ResolverId = ResolverId(1);
const SECONDARY: ResolverId = ResolverId(2);

/// A router, an instance that is registered for no name, and a client.
struct Shop {
    world: World,
    router: HostId,
    instance: HostId,
    client: HostId,
}

fn shop(seed: u64, limits: Limits) -> Shop {
    let mut world = World::new(seed, Weather::FAIR);
    world.limits = limits;
    let router = world.add_host(true);
    let instance = world.add_host(false);
    let client = world.add_host(false);
    for host in [instance, client] {
        world.register(router, host);
    }
    world.host(instance).serve(service("web.shop"), 80, 1, Allow::Any);
    world.run_for(SECOND);
    Shop { world, router, instance, client }
}

fn question(resolver: ResolverId) -> Question {
    Question { service: service("web.shop"), resolver }
}

impl Shop {
    fn delay(&mut self, host: HostId, prefix: Prefix, priority: u32, resolver: ResolverId) -> RuleId {
        let now = self.world.now;
        let rule = Rule { priority, weight: 100, action: Action::Delay(resolver) };
        self.world.host(host).sal.add_rule(now, prefix, rule).expect("room")
    }

    fn questions(&mut self, host: HostId) -> Vec<Question> {
        let sal = &mut self.world.host(host).sal;
        std::iter::from_fn(|| sal.poll_question()).collect()
    }

    fn answer(&mut self, host: HostId, question: Question, answer: Option<Answer>) {
        let now = self.world.now;
        self.world.host(host).sal.handle_resolution(now, question, answer);
        self.world.touch(host);
    }

    fn found(&mut self) -> Answer {
        let address = (self.world.host(self.instance).address, margay_wire::PORT).into();
        let hop = NextHop { address, host: None, router: false };
        Answer { prefix: service("web.shop").into(), hops: vec![(hop, 100)], ttl: TTL }
    }

    fn outcome(&mut self, client: usize) -> Outcome {
        self.world.host(self.client).clients[client].outcome
    }

    fn connect(&mut self) -> usize {
        let client = self.world.connect(self.client, "web.shop");
        self.world.run_for(SECOND / 20);
        client
    }
}

#[test]
fn one_question_is_put_however_many_packets_wait_and_its_answer_lets_them_go_on() {
    let mut shop = shop(1, Limits::default());
    let rule = shop.delay(shop.client, service("web.shop").into(), 100, FIRST);
    let clients: Vec<usize> = (0..20).map(|_| shop.world.connect(shop.client, "web.shop")).collect();
    // Long enough for each program's TCP to send its SYN again.
    shop.world.run_for(SECOND + SECOND / 2);
    assert_eq!(shop.questions(shop.client), [question(FIRST)]);
    let held = shop.world.host(shop.client).sal.held();
    assert_eq!((held.names, held.packets, held.packets_max), (1, 20, 20), "a SYN that is sent again is the same SYN");
    let usage = shop.world.host(shop.client).sal.rule_usage(rule).expect("there");
    assert_eq!(usage.packets, 20, "nor is it counted twice");
    assert!(clients.iter().all(|client| shop.outcome(*client) == Outcome::Pending));
    let answer = shop.found();
    shop.answer(shop.client, question(FIRST), Some(answer));
    shop.world.run_for(SECOND / 2);
    assert!(clients.iter().all(|client| shop.outcome(*client) == Outcome::Answered(1)));
    let held = shop.world.host(shop.client).sal.held();
    assert_eq!((held.names, held.packets, held.bytes, held.packets_max, held.rules), (0, 0, 0, 20, 1));
    // While the answer holds, nobody is asked; afterwards, the resolver is.
    let next = shop.connect();
    assert_eq!((shop.outcome(next), shop.questions(shop.client)), (Outcome::Answered(1), vec![]));
    shop.world.run_for(TTL);
    shop.connect();
    assert_eq!(shop.questions(shop.client), [question(FIRST)]);
}

#[test]
fn a_failure_refuses_what_waits_at_once_and_is_remembered_for_a_while() {
    let mut shop = shop(2, Limits::default());
    shop.delay(shop.client, service("web.shop").into(), 100, FIRST);
    let client = shop.connect();
    assert_eq!(shop.outcome(client), Outcome::Pending);
    shop.answer(shop.client, question(FIRST), None);
    shop.world.run_for(SECOND / 100);
    assert_eq!(
        shop.outcome(client),
        Outcome::Refused,
        "the way to the router, of a shorter prefix, is not taken instead"
    );
    shop.questions(shop.client);
    for _ in 0..10 {
        let next = shop.connect();
        assert_eq!(shop.outcome(next), Outcome::Refused);
    }
    assert_eq!(shop.questions(shop.client), [], "a storm of connects is no storm of questions");
    shop.world.run_for(2 * SECOND);
    shop.connect();
    assert_eq!(shop.questions(shop.client), [question(FIRST)]);
}

#[test]
fn the_next_resolver_is_asked_when_the_first_fails_and_a_rule_that_forwards_is_a_last_resort() {
    let mut shop = shop(3, Limits::default());
    let name = Prefix::from(service("web.shop"));
    shop.delay(shop.client, name, 100, FIRST);
    shop.delay(shop.client, name, 90, SECONDARY);
    let client = shop.connect();
    assert_eq!(shop.questions(shop.client), [question(FIRST)]);
    shop.answer(shop.client, question(FIRST), None);
    assert_eq!(shop.questions(shop.client), [question(SECONDARY)]);
    assert_eq!(shop.outcome(client), Outcome::Pending);
    let answer = shop.found();
    shop.answer(shop.client, question(SECONDARY), Some(answer));
    shop.world.run_for(SECOND / 10);
    assert_eq!(shop.outcome(client), Outcome::Answered(1));
    let sal = &shop.world.host(shop.client).sal;
    let made: Vec<_> = sal.rules().filter_map(|(_, id, rule)| Some((sal.resolved_by(id)?, rule.priority))).collect();
    assert_eq!(made, [(SECONDARY, 91)]);
}

#[test]
fn a_resolver_that_never_answers_ends_in_an_error_and_several_do_not_add_up() {
    let mut shop = shop(4, Limits::default());
    let name = Prefix::from(service("web.shop"));
    shop.delay(shop.client, name, 100, FIRST);
    shop.delay(shop.client, name, 90, SECONDARY);
    let client = shop.connect();
    assert_eq!(shop.questions(shop.client), [question(FIRST)]);
    shop.world.run_for(HELD_TIMEOUT - SECOND / 10);
    assert_eq!(shop.outcome(client), Outcome::Pending);
    shop.world.run_for(SECOND / 10);
    assert_eq!(shop.outcome(client), Outcome::Refused);
    assert_eq!(shop.questions(shop.client), [question(SECONDARY)]);
    // The second has time left still, for whoever comes now.
    let next = shop.connect();
    let answer = shop.found();
    shop.answer(shop.client, question(SECONDARY), Some(answer.clone()));
    shop.world.run_for(SECOND / 10);
    assert_eq!(shop.outcome(next), Outcome::Answered(1));
    shop.answer(shop.client, question(FIRST), Some(answer));
    let sal = &shop.world.host(shop.client).sal;
    assert_eq!(
        (sal.held().rules, sal.counters().answers_late),
        (1, 1),
        "an answer that comes too late changes nothing"
    );
}

#[test]
fn a_router_holds_the_packets_of_others_and_tells_them_when_nobody_is_found() {
    let mut shop = shop(5, Limits::default());
    let name = Prefix::from(service("web.shop"));
    shop.delay(shop.router, name, 100, FIRST);
    let sal = &mut shop.world.host(shop.router).sal;
    sal.follow_routes();
    let told = sal.take_route_changes(1000).changed.into_iter().find(|(prefix, _)| *prefix == name);
    assert_eq!(told.map(|(_, said)| said), Some(Said::Depends), "a copy of the table leaves the name to the core");
    let client = shop.world.connect(shop.client, "web.shop");
    shop.world.run_for(SECOND);
    assert_eq!(shop.questions(shop.router), [question(FIRST)]);
    assert_eq!(shop.world.host(shop.router).sal.held_for(&service("web.shop")), 1, "the SYN was sent again meanwhile");
    let answer = shop.found();
    shop.answer(shop.router, question(FIRST), Some(answer));
    shop.world.run_for(SECOND / 10);
    assert_eq!(shop.outcome(client), Outcome::Answered(1));
    shop.world.run_for(TTL);
    let client = shop.connect();
    shop.answer(shop.router, question(FIRST), None);
    shop.world.run_for(SECOND / 10);
    assert_eq!(shop.outcome(client), Outcome::Refused);
}

#[test]
fn an_answer_is_for_no_more_than_the_rule_and_never_leads_back_here() {
    let mut shop = shop(6, Limits::default());
    let authority = Prefix::of_authority("shop");
    let delay = shop.delay(shop.client, authority, 100, FIRST);
    let own = shop.world.host(shop.client).address;
    let mut answer = shop.found();
    answer.prefix = Prefix::default();
    let mut astray = answer.hops[0];
    for address in [own, [127, 0, 0, 1].into(), [0, 0, 0, 0].into(), [198, 18, 0, 7].into(), [224, 0, 0, 1].into()] {
        astray.0.address.set_ip(address);
        answer.hops.push(astray);
    }
    shop.connect();
    shop.answer(shop.client, question(FIRST), Some(answer));
    let made = |shop: &mut Shop| {
        let sal = &shop.world.host(shop.client).sal;
        sal.rules().filter(|(_, id, _)| sal.resolved_by(*id).is_some()).map(|(prefix, ..)| prefix).collect::<Vec<_>>()
    };
    assert_eq!(made(&mut shop), [Prefix::from(service("web.shop"))]);
    let wide = Answer { prefix: authority, ..shop.found() };
    let other = Question { service: service("mail.shop"), resolver: FIRST };
    shop.world.connect(shop.client, "mail.shop");
    shop.world.run_for(SECOND / 20);
    shop.answer(shop.client, other, Some(wide));
    assert_eq!(made(&mut shop), [authority, Prefix::from(service("web.shop"))]);
    // What a rule's answers made goes with it.
    assert!(shop.world.host(shop.client).sal.remove_rule(delay));
    assert_eq!(made(&mut shop), []);
}

/// A host that asks a resolver for every name.
fn alone(limits: Limits) -> (World, HostId) {
    let mut world = World::new(7, Weather::FAIR);
    world.limits = limits;
    let host = world.add_host(false);
    let rule = Rule { priority: 100, weight: 1, action: Action::Delay(FIRST) };
    let now = world.now;
    world.host(host).sal.add_rule(now, Prefix::default(), rule).expect("room");
    (world, host)
}

fn datagram(name: &str, port: u16, data: &[u8]) -> Datagram {
    let to = (Ranges::USUAL.virtual_v6(&service(name)), 53).into();
    Datagram::new((Ranges::USUAL.host_v6(), port).into(), to, data)
}

#[test]
fn at_each_bound_the_newcomer_is_refused_and_the_others_are_not() {
    let limits = Limits { held_names: 3, held_per_name: 4, held_packets: 8, held_bytes: 600, ..Limits::default() };
    let (mut world, host) = alone(limits);
    let mut refused = |name: &str, port: u16, len: usize| {
        let verdict = world.send_datagram(host, &datagram(name, port, &vec![7; len]));
        assert!(matches!(verdict, AppVerdict::Consumed | AppVerdict::Drop(DropReason::Full)), "{verdict:?}");
        let held = world.host(host).sal.held();
        (verdict != AppVerdict::Consumed, held.names, held.packets)
    };
    for port in 1..=4 {
        assert_eq!(refused("a.shop", port, 1), (false, 1, usize::from(port)));
    }
    assert_eq!(refused("a.shop", 5, 1), (true, 1, 4), "of one name");
    assert_eq!(refused("b.shop", 5, 1), (false, 2, 5));
    assert_eq!(refused("b.shop", 6, 400), (true, 2, 5), "in bytes");
    assert_eq!(refused("c.shop", 7, 1), (false, 3, 6));
    assert_eq!(refused("d.shop", 8, 1), (true, 3, 6), "of names");
    assert_eq!(refused("b.shop", 8, 1), (false, 3, 7));
    assert_eq!(refused("c.shop", 9, 1), (false, 3, 8));
    assert_eq!(refused("c.shop", 10, 1), (true, 3, 8), "in all");
    let counters = world.host(host).sal.counters().clone();
    assert_eq!((counters.delays_refused, counters.delayed, counters.questions), (4, 8, 3));
}

#[test]
fn what_is_remembered_of_failures_and_answers_is_bounded() {
    let limits = Limits { failed_names: 2, resolved_rules: 1, ..Limits::default() };
    let mut shop = shop(8, limits);
    shop.delay(shop.client, Prefix::of_authority("shop"), 100, FIRST);
    let names = ["a.shop", "b.shop", "c.shop"];
    for name in names {
        shop.world.connect(shop.client, name);
        shop.world.run_for(SECOND / 20);
        shop.answer(shop.client, Question { service: service(name), resolver: FIRST }, None);
    }
    shop.questions(shop.client);
    for name in names {
        shop.world.connect(shop.client, name);
    }
    shop.world.run_for(SECOND / 20);
    let asked = |name: &str| Question { service: service(name), resolver: FIRST };
    assert_eq!(shop.questions(shop.client), [asked("a.shop")], "the oldest is forgotten");
    let (web, mut two) = (shop.connect(), shop.found());
    two.hops.push(two.hops[0]);
    shop.answer(shop.client, question(FIRST), Some(two));
    shop.world.run_for(SECOND / 20);
    assert_eq!(shop.outcome(web), Outcome::Refused, "there is no room for its rules");
}

#[test]
fn a_host_that_asks_for_many_names_leaves_room_for_others_and_for_programs_of_the_router() {
    let mut shop = shop(9, Limits { held_names: 32, ..Limits::default() });
    shop.delay(shop.router, Prefix::default(), 100, FIRST);
    let names = |shop: &mut Shop| {
        shop.world.run_for(SECOND / 20);
        shop.world.host(shop.router).sal.held().names
    };
    for n in 0..30 {
        shop.world.connect(shop.client, &format!("n{n}.shop"));
    }
    assert_eq!(names(&mut shop), 8, "a sixteenth of what all hosts may have");
    shop.world.connect(shop.instance, "mail.shop");
    assert_eq!(names(&mut shop), 9);
    shop.world.connect(shop.router, "news.shop");
    assert_eq!(names(&mut shop), 10);
}

#[test]
fn a_host_whose_answers_fill_its_share_keeps_no_name_from_others() {
    let mut shop = shop(9, Limits { resolved_rules: 8, ..Limits::default() });
    shop.delay(shop.router, Prefix::default(), 100, FIRST);
    let ask = |shop: &mut Shop, host: HostId, n: u8| {
        let name = format!("n{n}.shop");
        shop.world.connect(host, &name);
        shop.world.run_for(SECOND / 20);
        let found = shop.found();
        shop.answer(shop.router, Question { service: service(&name), resolver: FIRST }, Some(found));
        shop.world.host(shop.router).sal.held().rules
    };
    let [client, instance, router] = [shop.client, shop.instance, shop.router];
    assert_eq!([0, 1, 2].map(|n| ask(&mut shop, client, n)), [1, 2, 2], "a sixteenth");
    assert!(!shop.world.host(router).sal.had_no_answer(&service("n2.shop"), FIRST), "there was one");
    assert_eq!(ask(&mut shop, instance, 2), 3);
    assert_eq!(ask(&mut shop, router, 3), 4);
}

/// Datagrams of one socket are several packets, and each is held; a bounded number of them.
#[test]
fn datagrams_of_one_socket_wait_together() {
    let (mut world, host) = alone(Limits { held_per_flow: 3, ..Limits::default() });
    for n in 0..5 {
        assert_eq!(world.send_datagram(host, &datagram("a.shop", 9, &[n])), AppVerdict::Consumed);
    }
    assert_eq!(world.host(host).sal.held_for(&service("a.shop")), 3);
}
