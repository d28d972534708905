//! When a silent peer is given up, in virtual time: silent, unanswering, and listed by no router.

mod shop;

use std::time::Duration;

use margay_core::give_up::{GiveUpAfter, GiveUpCause};
use margay_core::{Event, Input, Instant, RemoveReason};
use margay_sim::stream::Plan;
use margay_sim::{HostId, Weather};
use shop::{Shop, shop};

const SECOND: Duration = Duration::from_secs(1);
const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(500), writes: u32::MAX, closes: false };

/// A client that only waits, or talks, and the instance that it waits for.
struct Waiting {
    shop: Shop,
    instance: HostId,
    stream: usize,
}

fn waiting(seed: u64, plan: Plan) -> Waiting {
    waiting_with(seed, plan, None)
}

/// For a service that says how long its clients are to wait.
fn waiting_with(seed: u64, plan: Plan, terms: Option<GiveUpAfter>) -> Waiting {
    let mut shop = shop(seed, Weather::FAIR);
    let instance = shop.instances[0];
    let service = shop.world.publish_streams(shop.router, instance, "chat.shop", Plan::LISTEN);
    shop.world.host(instance).sal.set_own_terms(service.into(), terms);
    let stream = shop.world.connect_stream(shop.client, "chat.shop", plan);
    shop.world.run_for(SECOND);
    Waiting { shop, instance, stream }
}

impl Waiting {
    /// The instance's host is off the network from now on.
    fn cut(&mut self) {
        let [router, instance, client] = [self.shop.router, self.instance, self.shop.client];
        let addresses = [router, instance, client].map(|host| self.shop.world.host(host).address);
        for other in [addresses[0], addresses[2]] {
            self.shop.world.network.cut(addresses[1], other);
        }
    }

    /// What the client's agent hears of routers.
    fn tell(&mut self, is_absent: bool) {
        let now = self.shop.world.now;
        let client = self.shop.client;
        let peer = self.shop.world.host(self.instance).sal.host();
        let absent = is_absent.then_some(peer).into_iter().collect();
        self.shop.world.host(client).sal.set_absent(now, &absent);
        self.shop.world.touch(client);
    }

    /// The flow cache of the client has had packets.
    fn live(&mut self) {
        let now = self.shop.world.now;
        let client = self.shop.client;
        let peer = self.shop.world.host(self.instance).sal.host();
        self.shop.world.host(client).sal.handle_life(now, peer);
    }

    fn is_reset(&mut self) -> bool {
        self.shop.world.host(self.shop.client).streams[self.stream].was_reset
    }

    fn reasons(&mut self) -> Vec<RemoveReason> {
        let events = &self.shop.world.host(self.shop.client).events;
        let reason = |event: &Event| match event {
            Event::FlowClosed { reason, .. } => Some(*reason),
            _ => None,
        };
        events.iter().filter_map(reason).collect()
    }
}

#[test]
fn a_silent_peer_that_no_router_lists_is_given_up_in_time_and_not_before() {
    for (seed, plan) in [(1, Plan::LISTEN), (2, CHAT)] {
        let mut waiting = waiting(seed, plan);
        waiting.cut();
        waiting.tell(true);
        waiting.shop.world.run_for(29 * SECOND);
        assert!(!waiting.is_reset(), "a host may move, or sleep");
        waiting.shop.world.run_for(6 * SECOND);
        assert!(waiting.is_reset());
        assert_eq!(waiting.reasons(), [RemoveReason::GivenUp]);
        let told = |event: &Event| matches!(event, Event::GivenUp { flows: 1, cause: GiveUpCause::Silent(_), .. });
        assert!(waiting.shop.world.host(waiting.shop.client).events.iter().any(told));
    }
}

#[test]
fn the_operator_says_how_long_and_whether_at_all() {
    for (limit, is_given_up) in [(Some(SECOND), true), (Some(Duration::from_millis(500)), true), (None, false)] {
        let mut waiting = waiting(3, Plan::LISTEN);
        let client = waiting.shop.client;
        waiting.shop.world.host(client).sal.set_give_up_after(Some(GiveUpAfter(limit)));
        waiting.cut();
        waiting.tell(true);
        waiting.shop.world.run_for(3 * SECOND);
        assert_eq!(waiting.is_reset(), is_given_up, "{limit:?}");
        if limit.is_none() {
            waiting.shop.world.run_for(600 * SECOND);
            assert!(!waiting.is_reset(), "never");
        }
    }
}

#[test]
fn a_service_says_how_long_and_the_operator_has_the_last_word() {
    let never = Some(GiveUpAfter(None));
    let second = Some(GiveUpAfter(Some(SECOND)));
    for (told, of_host, is_given_up) in [(second, None, true), (never, None, false), (second, never, false)] {
        let mut waiting = waiting_with(8, Plan::LISTEN, told);
        let client = waiting.shop.client;
        waiting.shop.world.host(client).sal.set_give_up_after(of_host);
        waiting.cut();
        waiting.tell(true);
        waiting.shop.world.run_for(3 * SECOND);
        assert_eq!(waiting.is_reset(), is_given_up, "{told:?} {of_host:?}");
        waiting.shop.world.run_for(60 * SECOND);
        assert_eq!(waiting.is_reset(), is_given_up, "nor later");
    }
}

#[test]
fn who_is_listed_or_answers_or_whose_packets_come_is_not_given_up() {
    // A router lists it: it may be behind a wall.
    let mut listed = waiting(4, Plan::LISTEN);
    listed.cut();
    listed.tell(false);
    // No router lists it, and it answers: the router has lost it.
    let mut answers = waiting(5, Plan::LISTEN);
    answers.tell(true);
    // Its agent is dead, and its kernel is not.
    let mut carried = waiting(6, Plan::LISTEN);
    carried.cut();
    carried.tell(true);
    for _ in 0..24 {
        carried.live();
        for one in [&mut listed, &mut answers, &mut carried] {
            one.shop.world.run_for(5 * SECOND);
        }
    }
    assert!(![&mut listed, &mut answers, &mut carried].into_iter().any(Waiting::is_reset));
    carried.shop.world.run_for(40 * SECOND);
    assert!(carried.is_reset(), "its packets come no more");
}

#[test]
fn a_peer_that_is_listed_again_has_its_time_anew() {
    let mut waiting = waiting(7, Plan::LISTEN);
    waiting.cut();
    waiting.tell(true);
    waiting.shop.world.run_for(25 * SECOND);
    waiting.tell(false);
    waiting.shop.world.run_for(20 * SECOND);
    waiting.tell(true);
    waiting.shop.world.run_for(25 * SECOND);
    assert!(!waiting.is_reset());
    waiting.shop.world.run_for(15 * SECOND);
    assert!(waiting.is_reset());
    assert!(waiting.shop.world.now > Instant::from_millis(80_000));
}

#[test]
fn the_networks_word_that_a_host_cannot_be_reached_has_it_asked_at_once_and_ends_nothing() {
    let mut waiting = waiting(9, Plan::LISTEN);
    let client = waiting.shop.client;
    let address = waiting.shop.world.host(waiting.instance).address;
    let probes =
        |waiting: &mut Waiting| waiting.shop.world.host(client).sal.counters().messages_sent(margay_wire::Kind::Probe);
    let say = |waiting: &mut Waiting, remote| {
        let now = waiting.shop.world.now;
        waiting.shop.world.host(client).sal.handle(now, Input::Unreachable(remote));
        waiting.shop.world.touch(client);
    };
    let before = probes(&mut waiting);
    say(&mut waiting, "10.9.9.9".parse().expect("literal"));
    assert_eq!(probes(&mut waiting), before, "nobody is there");
    for _ in 0..100 {
        say(&mut waiting, address);
    }
    let asked = probes(&mut waiting) - before;
    assert!((1..10).contains(&asked), "{asked} probes: one round");
    waiting.shop.world.run_for(SECOND / 4);
    let answered = probes(&mut waiting);
    say(&mut waiting, address);
    assert_eq!(probes(&mut waiting), answered, "it has just answered");
    waiting.shop.world.run_for(60 * SECOND);
    assert!(!waiting.is_reset());
}
