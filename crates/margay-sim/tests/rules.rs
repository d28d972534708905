//! Rules that an operator gives, in virtual time: fallback sets, rules that end by themselves, next hops by their
//! address alone.

use std::time::Duration;

use margay_core::lifetime::{Expiry, Lifetime};
use margay_core::name::Prefix;
use margay_core::table::{Action, Outcome, Rule, RuleId};
use margay_core::{Event, Sal};
use margay_sim::world::service;
use margay_sim::{HostId, Outcome as Ended, Weather, World};

const SECOND: Duration = Duration::from_secs(1);

/// A router, two instances that answer 1 and 2 and are registered, and a client.
struct Shop {
    world: World,
    router: HostId,
    instances: [HostId; 2],
    client: HostId,
}

fn shop(seed: u64) -> Shop {
    let mut world = World::new(seed, Weather::FAIR);
    let router = world.add_host(true);
    let instances = [world.add_host(false), world.add_host(false)];
    let client = world.add_host(false);
    for host in [instances[0], instances[1], client] {
        world.register(router, host);
    }
    world.run_for(SECOND);
    Shop { world, router, instances, client }
}

impl Shop {
    fn connect(&mut self) -> Ended {
        let client = self.world.connect(self.client, "web.shop");
        self.world.run_for(SECOND / 2);
        self.world.host(self.client).clients[client].outcome
    }

    fn drop_on_client(&mut self, lifetime: Lifetime) -> RuleId {
        let now = self.world.now;
        let sal = &mut self.world.host(self.client).sal;
        let rule = Rule { priority: 100, weight: 1, action: Action::Drop };
        let id = sal.add_rule(now, service("web.shop").into(), rule).expect("room");
        assert!(sal.set_rule_lifetime(now, id, lifetime));
        self.world.touch(self.client);
        id
    }

    /// Rules of the client's that have ended, with the packets that they decided upon.
    fn ended(&mut self) -> Vec<(RuleId, Expiry, u64)> {
        let of = |event: &Event| match event {
            Event::RuleExpired { id, why, packets, .. } => Some((*id, *why, *packets)),
            _ => None,
        };
        self.world.host(self.client).events.iter().filter_map(of).collect()
    }
}

#[test]
fn a_lower_priority_takes_over_where_none_of_the_higher_can() {
    let mut shop = shop(1);
    for (number, instance) in (1..).zip(shop.instances) {
        shop.world.publish(shop.router, instance, "web.shop", number);
    }
    let ids: Vec<RuleId> =
        shop.world.host(shop.router).sal.rules().filter(|(p, ..)| p.bits == 256).map(|(_, id, _)| id).collect();
    let rules: Vec<Rule> =
        ids.iter().map(|id| shop.world.host(shop.router).sal.rule(*id).expect("there").1.clone()).collect();
    let terms = |rule: &Rule, priority, weight| Rule { priority, weight, ..rule.clone() };
    let router = shop.router;
    assert!(shop.world.host(router).sal.change_rule(ids[0], terms(&rules[0], 10, 1)));
    assert!(shop.world.host(router).sal.change_rule(ids[1], terms(&rules[1], 5, 1)));
    let first = shop.connect();
    assert!(matches!(first, Ended::Answered(_)));
    assert!((0..6).all(|_| shop.connect() == first), "one of the lower priority was taken");
    // It takes no new connections any more.
    assert!(shop.world.host(router).sal.change_rule(ids[0], terms(&rules[0], 10, 0)));
    let second = shop.connect();
    assert!(matches!(second, Ended::Answered(_)) && second != first, "{second:?}");
    assert!(shop.world.host(router).sal.change_rule(ids[0], terms(&rules[0], 10, 1)));
    assert_eq!(shop.connect(), first);
}

/// Whoever watches is told of every connection that fails, also of one that the operator has forbidden.
#[test]
fn what_a_rule_discards_is_told_with_the_rule() {
    let mut shop = shop(7);
    shop.world.publish(shop.router, shop.instances[0], "web.shop", 1);
    let id = shop.drop_on_client(Lifetime::default());
    assert_eq!(shop.connect(), Ended::Refused);
    let said = shop.world.host(shop.client).events.iter().find_map(|event| match event {
        Event::ConnectFailed { service: to, why, .. } if *to == service("web.shop") => Some(why.clone()),
        _ => None,
    });
    let said = said.expect("it was told");
    assert!(said.contains(&format!("rule {}", id.0)), "{said}");
}

#[test]
fn a_rule_lasts_while_it_is_used_and_then_its_idle_time() {
    let mut shop = shop(2);
    shop.world.publish(shop.router, shop.instances[0], "web.shop", 1);
    let id = shop.drop_on_client(Lifetime { idle: Some(2 * SECOND), until: None });
    for _ in 0..8 {
        assert_eq!(shop.connect(), Ended::Refused);
    }
    assert_eq!(shop.ended(), [], "it was used all the time");
    shop.world.run_for(2 * SECOND);
    assert_eq!(shop.ended(), [(id, Expiry::Idle, 8)]);
    assert_eq!(shop.connect(), Ended::Answered(1));
}

/// A copy in the kernel counts what it decides, and is not asked for it when the idle time is over.
#[test]
fn a_rule_that_lives_by_being_used_is_the_core_s_alone() {
    let mut shop = shop(6);
    let router = shop.router;
    let now = shop.world.now;
    let sal = &mut shop.world.host(router).sal;
    sal.follow_routes();
    let rule = Rule { priority: 100, weight: 1, action: Action::Drop };
    let id = sal.add_rule(now, service("web.shop").into(), rule).expect("room");
    let told = |sal: &mut Sal| {
        let changed = sal.take_route_changes(1000).changed;
        changed.into_iter().find(|(prefix, _)| prefix.bits == 256).map(|(_, outcome)| outcome)
    };
    assert!(matches!(told(sal), Some(Outcome::Shares(_))));
    assert_eq!(told(sal), None);
    assert!(sal.set_rule_lifetime(now, id, Lifetime { idle: Some(SECOND), until: None }));
    assert_eq!(told(sal), Some(Outcome::Depends), "whoever has a copy hears of it");
}

#[test]
fn a_hard_time_is_over_whether_a_rule_is_used_or_not() {
    let mut shop = shop(3);
    shop.world.publish(shop.router, shop.instances[0], "web.shop", 1);
    let until = Some(shop.world.now + 2 * SECOND);
    let id = shop.drop_on_client(Lifetime { idle: Some(60 * SECOND), until });
    for _ in 0..3 {
        assert_eq!(shop.connect(), Ended::Refused);
    }
    assert_eq!(shop.connect(), Ended::Refused, "its time is not over yet");
    assert_eq!(shop.connect(), Ended::Answered(1));
    assert_eq!(shop.ended(), [(id, Expiry::Hard, 4)]);
}

#[test]
fn a_next_hop_that_only_its_address_names_is_tagged_if_it_is_known() {
    let mut shop = shop(4);
    let instance = shop.instances[0];
    let address = shop.world.host(instance).address;
    shop.world.host(instance).serve(service("web.shop"), 80, 1, margay_core::table::Allow::Any);
    shop.world.host(shop.router).forward(Prefix::from(service("web.shop")), address, None);
    assert_eq!(shop.connect(), Ended::Answered(1));
}

/// Nobody has told the next hop's host and the router of each other: the answers come to the router, which knows no
/// such flow. The program hears at the end of the set-up time, and not of a hang.
#[test]
fn answers_of_a_next_hop_that_the_router_does_not_know_do_not_find_back() {
    let mut shop = shop(5);
    let stranger = shop.world.add_host(false);
    let address = shop.world.host(stranger).address;
    shop.world.host(stranger).serve(service("web.shop"), 80, 1, margay_core::table::Allow::Any);
    shop.world.host(shop.router).forward(Prefix::from(service("web.shop")), address, None);
    let client = shop.world.connect(shop.client, "web.shop");
    shop.world.run_for(7 * SECOND);
    let outcome = shop.world.host(shop.client).clients[client].outcome;
    assert!(!matches!(outcome, Ended::Answered(_) | Ended::Pending), "{outcome:?}");
}
