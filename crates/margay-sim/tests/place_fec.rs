//! Striped flows of which a place repairs what it loses, in virtual time (docs/decisions/0095): what is lost there
//! comes back, nothing comes twice, and nothing is given that a floor forbids.

#[path = "pair/mod.rs"]
mod pair;

use std::net::IpAddr;
use std::time::Duration;

use margay_core::{MoveRefused, PlaceStack, PlaceStacks, Policy, Stack};
use margay_sim::stream::Plan;
use margay_sim::{Datagram, HostId};
use margay_wire::{DATA_HEADER_LEN, DataRepr, REPAIR, STACK_FEC, is_sealed};

use pair::{CHAT, EVERY, Pair, SECOND, pair, slow};

/// The client's and the server's addresses by the cable; their first ones are by Wi-Fi.
const CABLE: [u8; 4] = [10, 7, 0, 52];
const SERVERS_CABLE: [u8; 4] = [10, 7, 0, 51];

/// By the air, whose addresses are the hosts' first ones, what is lost is repaired; the cable may be plain besides.
fn by_air(pair: &Pair, host: HostId, is_cable_plain: bool) -> Policy {
    let air = (pair.world.hosts[host.0].address, PlaceStack::Fec);
    let cable = if host == pair.client { CABLE } else { SERVERS_CABLE };
    let cable = is_cable_plain.then_some((IpAddr::from(cable), PlaceStack::Plain));
    Policy::StripePartly(PlaceStacks::new([air].into_iter().chain(cable)).expect("two at most"))
}

impl Pair {
    /// Each end has two addresses, and a flow.
    fn begin(&mut self) {
        self.open();
        for (host, cable) in [(self.client, CABLE), (self.server, SERVERS_CABLE)] {
            let first = self.world.host(host).address;
            self.world.set_addresses(host, vec![first, cable.into()]);
        }
        self.chat(SECOND);
    }

    fn give(&mut self, host: HostId, policy: Policy) -> Result<(), MoveRefused> {
        let now = self.world.now;
        let id = self.flow(host).flow;
        let given = self.world.host(host).sal.set_flow_policy(now, id, policy);
        self.world.touch(host);
        given
    }

    /// Both ends say six datagrams every 5 ms: a block has several.
    fn pour(&mut self, time: Duration) {
        let until = self.world.now + time;
        while self.world.now < until {
            for _ in 0..6 {
                self.ask();
                let tuple = self.answer_tuple().expect("a flow");
                self.said[1] += 1;
                let answer = Datagram { tuple, data: self.said[1].to_be_bytes().to_vec() };
                self.world.say(self.server, &answer);
            }
            self.world.run_for(EVERY);
            self.hear();
        }
    }

    /// One of so many datagrams that go by the air is lost.
    fn lose_in_the_air(&mut self, one_of: usize) {
        let air = self.hosts().map(|host| self.world.host(host).address);
        let mut count = 0;
        self.world.network.losing = Some(Box::new(move |packet| {
            let is_data = packet.data_flags().is_some() && air.contains(&packet.from.ip());
            count += usize::from(is_data);
            // Not in step with blocks.
            is_data && (count * 7919 + count / 13) % one_of == 0
        }));
    }

    /// How many of what both said since then were not heard, and how many were heard twice.
    fn lost_and_doubled(&mut self, from: [u32; 2]) -> [usize; 2] {
        self.world.run_for(SECOND);
        self.hear();
        let mut sums = [0; 2];
        for (at, (said, heard)) in [(self.said[0], &self.heard[1]), (self.said[1], &self.heard[0])].iter().enumerate() {
            let mut heard: Vec<u32> = heard.iter().copied().filter(|number| *number > from[at]).collect();
            let came = heard.len();
            heard.sort_unstable();
            heard.dedup();
            sums[0] += (said - from[at]) as usize - heard.len();
            sums[1] += came - heard.len();
        }
        sums
    }

    /// Whether each end sends, and takes, repairs by one of two places.
    fn repairs(&mut self) -> bool {
        self.hosts().iter().all(|host| {
            let places = self.flow(*host).places;
            places.len() == 2
                && places.iter().filter(|place| [place.sends, place.takes] == [Some(PlaceStack::Fec); 2]).count() == 1
        })
    }

    fn restored(&self) -> u64 {
        [self.client, self.server].iter().map(|host| self.world.hosts[host.0].cache.restored()).sum()
    }

    /// Of DATA with something in it that was recorded: what went as it is by the air, and how many repairs did.
    fn plain_air_and_repairs(&mut self) -> [usize; 2] {
        let air = self.hosts().map(|host| self.world.host(host).address);
        let mut seen = [0; 2];
        for (from, _, bytes) in self.world.recording.iter().flatten() {
            let Ok(data) = DataRepr::parse(bytes) else { continue };
            if !air.contains(&from.ip()) || bytes.len() <= DATA_HEADER_LEN + 8 {
                continue;
            }
            let is_repair = data.stack == STACK_FEC && data.flags & REPAIR != 0;
            seen[0] += usize::from(!is_sealed(data.stack) && !is_repair);
            seen[1] += usize::from(is_repair);
        }
        seen
    }
}

/// Alone, and together with a plain place; ordered at either end.
#[test]
fn what_a_place_loses_comes_back_and_nothing_comes_twice() {
    for is_cable_plain in [false, true] {
        for by_server in [false, true] {
            let what = format!("cable plain {is_cable_plain}, by server {by_server}");
            let mut pair = pair(1, slow(7), false, (false, false), Plan::LISTEN);
            pair.begin();
            let orderer = if by_server { pair.server } else { pair.client };
            let policy = by_air(&pair, orderer, is_cable_plain);
            pair.give(orderer, policy).expect("it can be had");
            pair.chat(SECOND * 2);
            assert!(pair.repairs(), "{what}: {:?}", pair.flow(pair.client).places);
            let stack = if is_cable_plain { Stack::Secure } else { Stack::Plain };
            assert!(pair.is_settled(stack), "{what}: {:?}", pair.stacks());
            let from = pair.said;
            pair.lose_in_the_air(20);
            pair.record();
            pair.pour(SECOND * 3);
            pair.world.network.losing = None;
            let [plain, repairs] = pair.plain_air_and_repairs();
            assert!(repairs > 100 && (plain == 0) == is_cable_plain, "{what}: {plain} plain, {repairs} repairs");
            let restored = pair.restored();
            let [lost, doubled] = pair.lost_and_doubled(from);
            // Without repairs a fortieth of 7200 would be.
            assert!(restored > 100 && lost <= 4 && doubled == 0, "{what}: {lost} lost, {doubled} twice, {restored}");
        }
    }
}

#[test]
fn without_repairs_what_is_lost_stays_lost() {
    let mut pair = pair(2, slow(7), false, (false, false), Plan::LISTEN);
    pair.begin();
    pair.give(pair.client, Policy::Stripe).expect("it can be had");
    pair.chat(SECOND * 2);
    let from = pair.said;
    pair.lose_in_the_air(20);
    pair.pour(SECOND * 3);
    pair.world.network.losing = None;
    let [lost, doubled] = pair.lost_and_doubled(from);
    assert!(lost > 100 && doubled == 0, "{lost} lost, {doubled} twice");
}

/// A datagram that was brought back comes itself, later: by the air everything does twice, and out of order.
#[test]
fn what_was_brought_back_and_comes_late_is_not_given_again() {
    let mut pair = pair(3, slow(7), false, (false, false), Plan::LISTEN);
    pair.begin();
    let policy = by_air(&pair, pair.client, false);
    pair.give(pair.client, policy).expect("it can be had");
    pair.chat(SECOND * 2);
    assert!(pair.repairs());
    let from = pair.said;
    pair.world.network.weather.delay_max = SECOND / 25;
    pair.pour(SECOND * 2);
    assert!(pair.restored() > 20, "repairs overtake what they repair: {}", pair.restored());
    assert_eq!(pair.lost_and_doubled(from), [0, 0]);
}

#[test]
fn repairs_end_with_the_order_and_with_the_stripe() {
    let mut pair = pair(4, slow(7), false, (false, false), Plan::LISTEN);
    pair.begin();
    let policy = by_air(&pair, pair.client, false);
    pair.give(pair.client, policy).expect("it can be had");
    pair.chat(SECOND * 2);
    assert!(pair.repairs());
    for policy in [Policy::Stripe, Policy::FailOver] {
        pair.give(pair.client, policy).expect("it can be had");
        pair.chat(SECOND);
        pair.record();
        let from = pair.said;
        pair.chat(SECOND);
        assert_eq!(pair.plain_air_and_repairs()[1], 0, "{policy}");
        assert_eq!(pair.lost_and_doubled(from), [0, 0], "{policy}");
    }
    assert_eq!(pair.locked(), 0);
}

/// What an end demands sealed is sealed, with repairs too; a plain place beside them is refused.
#[test]
fn the_floor_holds_with_repairs() {
    for demands in [(true, false), (false, true)] {
        let mut pair = pair(5, slow(7), true, demands, Plan::LISTEN);
        pair.begin();
        for host in pair.hosts() {
            let policy = by_air(&pair, host, true);
            assert_eq!(pair.give(host, policy), Err(MoveRefused::Demanded), "{demands:?}");
        }
        let policy = by_air(&pair, pair.client, false);
        pair.give(pair.client, policy).expect("it can be had");
        pair.chat(SECOND * 2);
        assert!(pair.repairs() && pair.is_settled(Stack::Secure), "{demands:?}");
        let from = pair.said;
        pair.lose_in_the_air(20);
        pair.record();
        pair.pour(SECOND * 2);
        pair.world.network.losing = None;
        let [plain, repairs] = pair.plain_air_and_repairs();
        assert!(plain == 0 && repairs > 50, "{demands:?}: {plain} plain, {repairs} repairs");
        let [lost, doubled] = pair.lost_and_doubled(from);
        assert!(lost <= 4 && doubled == 0, "{demands:?}: {lost} lost, {doubled} twice");
    }
}

#[test]
fn a_connection_has_no_repairs() {
    let mut pair = pair(6, slow(7), true, (false, false), CHAT);
    pair.begin();
    pair.connect(CHAT);
    pair.chat(SECOND);
    let now = pair.world.now;
    let policy = by_air(&pair, pair.client, false);
    let found = pair.world.host(pair.client).sal.flows().find(|flow| flow.app.protocol == 6);
    let id = found.expect("a connection").flow;
    let refused = pair.world.host(pair.client).sal.set_flow_policy(now, id, policy);
    assert_eq!(refused, Err(MoveRefused::DatagramsOnly));
    pair.chat(SECOND);
    pair.check(SECOND * 2, "a connection");
}

/// An order is forgotten where its agent starts again, and known again where the other one does.
#[test]
fn either_agent_starts_again_and_what_is_said_is_heard() {
    for which in [0, 1] {
        let what = format!("host {which}");
        let mut pair = pair(7, slow(7), false, (false, false), Plan::LISTEN);
        pair.begin();
        let policy = by_air(&pair, pair.client, false);
        pair.give(pair.client, policy).expect("it can be had");
        pair.chat(SECOND * 2);
        assert!(pair.repairs(), "{what}");
        let host = pair.hosts()[which];
        pair.world.kill_agent(host);
        pair.world.start_agent(host);
        pair.chat(SECOND * 3);
        assert_eq!(pair.repairs(), which == 1, "{what}: {:?}", pair.flow(pair.client).places);
        let from = pair.said;
        pair.chat(SECOND);
        assert_eq!(pair.lost_and_doubled(from), [0, 0], "{what}");
    }
}
