//! Connections that go to another host, in virtual time: the client's host fetches the session, and its word decides
//! where the connection is.

mod shop;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use margay_core::key::HostPublic;
use margay_core::name::{Prefix, ServiceId};
use margay_core::stack_rule::{Expression, Fact, Network, StackRule};
use margay_core::{Cipher, Stack};
use margay_core::{Event, HandOver, HandOverError, Instant, Lifecycle, PeerTicket, Role, Ticket, Tuple};
use margay_sim::check::{ends_agree, nothing_left_over};
use margay_sim::stream::{Plan, State, Stream};
use margay_sim::{HostId, Weather};
use margay_wire::{DATA_HEADER_LEN, DataRepr, FlowId, Kind, PORT, is_sealed};
use shop::{Shop, shop};

const SECOND: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(1);
/// What the connection takes from one host to the other.
const TRANSFER: Duration = Duration::from_millis(4);
const NAME: &str = "chat.shop";
const CHAT: Plan = Plan { write: 700, every: Duration::from_millis(7), writes: u32::MAX, closes: false };

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The transfer does not arrive, and the giver cancels.
    TransferLost,
    /// The taker's kernel cannot restore it.
    RestoreFails,
    /// The agent of this host is killed when the given thing has happened, and starts again half a second later.
    Killed(HostId, When),
}

/// A moment in a hand-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    Fetched,
    Awaits,
    Restored,
    Taken,
    Gone,
}

/// One hand-over, as the agents of giver and taker have it.
struct Moving {
    giver: HostId,
    taker: HostId,
    /// Of the giver's program.
    old: Tuple,
    new: Option<Tuple>,
    frozen: Option<(Instant, Stream)>,
    is_restored: bool,
    has_lost_taker: bool,
    fault: Fault,
    outcome: Option<&'static str>,
}

/// All of them, and how far the events of each host are read.
#[derive(Default)]
struct Agents {
    moving: HashMap<Ticket, Moving>,
    read: HashMap<HostId, usize>,
    restarts: Vec<(Instant, HostId)>,
    tickets: u8,
}

impl Agents {
    /// Begins to hand the flow of a program over.
    fn hand_over(
        &mut self,
        shop: &mut Shop,
        flow: FlowId,
        (giver, taker): (HostId, HostId),
        fault: Fault,
    ) -> Result<Ticket, HandOverError> {
        self.tickets += 1;
        let ticket = Ticket([self.tickets; 16]);
        let now = shop.world.now;
        let to = shop.world.host(taker);
        let (key, at) = (HostPublic(to.public_key()).id(), SocketAddr::new(to.address, PORT));
        let host = shop.world.host(giver);
        let old = host.sal.flow(flow).map(|flow| flow.app).ok_or(HandOverError::NotOpen)?;
        host.sal.hand_over(now, flow, ticket, key, at)?;
        shop.world.touch(giver);
        let moving = Moving {
            giver,
            taker,
            old,
            new: None,
            frozen: None,
            is_restored: false,
            has_lost_taker: false,
            fault,
            outcome: None,
        };
        self.moving.insert(ticket, moving);
        Ok(ticket)
    }

    /// Lets time pass, and does what agents do.
    fn run_for(&mut self, shop: &mut Shop, time: Duration) {
        let until = shop.world.now + time;
        while shop.world.now < until {
            shop.world.run_for(STEP);
            for id in 0..shop.world.hosts.len() {
                self.hear(shop, HostId(id));
            }
            self.carry(shop);
            let now = shop.world.now;
            while let Some(at) = self.restarts.iter().position(|(at, _)| *at <= now) {
                shop.world.start_agent(self.restarts.remove(at).1);
            }
        }
    }

    fn hear(&mut self, shop: &mut Shop, id: HostId) {
        let read = self.read.entry(id).or_default();
        let events = shop.world.host(id).events[*read..].to_vec();
        *read += events.len();
        for event in events {
            let Event::HandOver(event) = event else { continue };
            let now = shop.world.now;
            let host = shop.world.host(id);
            let (ticket, when) = match &event {
                HandOver::Fetched(ticket) => (*ticket, Some(When::Fetched)),
                HandOver::Awaits { ticket, .. } => (ticket.ticket, Some(When::Awaits)),
                HandOver::Taken(ticket) => (ticket.ticket, Some(When::Taken)),
                HandOver::Gone(ticket) => (*ticket, Some(When::Gone)),
                HandOver::Refused { ticket, .. } => (*ticket, None),
                HandOver::Dropped(ticket) => (ticket.ticket, None),
                HandOver::Stays(ticket) | HandOver::Lost(ticket) => (*ticket, None),
            };
            let moving = self.moving.get_mut(&ticket).expect("one of ours");
            match event {
                HandOver::Fetched(_) => {
                    moving.frozen = host.freeze(&moving.old).map(|frozen| (now + TRANSFER, frozen));
                }
                HandOver::Awaits { app, .. } => moving.new = Some(app),
                HandOver::Taken(_) => host.go_on(now, &moving.new.expect("restored")),
                HandOver::Dropped(_) if moving.is_restored => host.close_silently(&moving.new.expect("restored")),
                HandOver::Stays(_) => {
                    host.go_on(now, &moving.old);
                    moving.outcome = Some("stays");
                }
                HandOver::Gone(_) => {
                    host.close_silently(&moving.old);
                    moving.outcome = Some("gone");
                }
                HandOver::Lost(_) => {
                    host.close_silently(&moving.old);
                    moving.outcome = Some("lost");
                }
                HandOver::Refused { .. } => moving.outcome = Some("refused"),
                HandOver::Dropped(_) => {}
            }
            self.kill_at(shop, ticket, when);
            shop.world.touch(id);
        }
    }

    fn kill_at(&mut self, shop: &mut Shop, ticket: Ticket, when: Option<When>) {
        let Some(moving) = self.moving.get_mut(&ticket) else { return };
        let Fault::Killed(host, at) = moving.fault else { return };
        if when != Some(at) {
            return;
        }
        shop.world.kill_agent(host);
        self.restarts.push((shop.world.now + SECOND / 2, host));
        if host == moving.taker {
            moving.has_lost_taker = true;
            // Its descriptor is the agent's until the program has it.
            if let Some(app) = moving.new.filter(|_| moving.is_restored && !matches!(at, When::Taken | When::Gone)) {
                shop.world.host(host).close_silently(&app);
            }
        }
    }

    /// The connections that are on their way between agents.
    fn carry(&mut self, shop: &mut Shop) {
        let now = shop.world.now;
        let client = HostPublic(shop.world.host(shop.client).public_key()).id();
        let mut restored = Vec::new();
        for (ticket, moving) in &mut self.moving {
            let Moving { giver, taker, .. } = *moving;
            if moving.has_lost_taker && !moving.is_restored && moving.frozen.take().is_some() {
                // The stream between both agents has ended.
                shop.world.host(giver).sal.cancel_hand_over(now, *ticket);
                shop.world.touch(giver);
                continue;
            }
            let is_there = moving.frozen.as_ref().is_some_and(|(at, _)| *at <= now);
            let Some((app, (_, frozen))) = moving.new.zip(moving.frozen.take_if(|_| is_there)) else { continue };
            match moving.fault {
                Fault::TransferLost => shop.world.host(giver).sal.cancel_hand_over(now, *ticket),
                Fault::RestoreFails => {
                    shop.world.host(taker).sal.refuse_hand_over(now, PeerTicket { peer: client, ticket: *ticket });
                    shop.world.host(giver).sal.cancel_hand_over(now, *ticket);
                }
                _ => {
                    moving.is_restored = true;
                    shop.world.host(taker).restore(frozen, app);
                    shop.world.host(taker).sal.take_over(now, PeerTicket { peer: client, ticket: *ticket });
                    shop.world.host(giver).sal.await_word(now, *ticket);
                    restored.push(*ticket);
                }
            }
            shop.world.touch(giver);
            shop.world.touch(taker);
        }
        restored.into_iter().for_each(|ticket| self.kill_at(shop, ticket, Some(When::Restored)));
    }

    fn outcome(&self, ticket: Ticket) -> Option<&'static str> {
        self.moving[&ticket].outcome
    }
}

/// A connection that talks both ways, and which of the two instances has it.
struct Talk {
    shop: Shop,
    client: usize,
    flow: FlowId,
    giver: HostId,
    taker: HostId,
}

fn talk(seed: u64, weather: Weather, is_direct: bool) -> Talk {
    talk_as_demanded(seed, weather, is_direct, false)
}

/// `demands`: every host demands that its flows are encrypted.
fn talk_as_demanded(seed: u64, weather: Weather, is_direct: bool, demands: bool) -> Talk {
    let mut shop = shop(seed, Weather::FAIR);
    if is_direct {
        for id in 0..shop.world.hosts.len() {
            shop.world.set_direct(HostId(id), true);
        }
    }
    for id in 0..shop.world.hosts.len() {
        shop.world.host(HostId(id)).set_secure(&[Cipher::ChaCha20Poly1305], demands);
    }
    for instance in shop.instances {
        shop.world.publish_streams(shop.router, instance, NAME, CHAT);
    }
    let client = shop.world.connect_stream(shop.client, NAME, CHAT);
    shop.world.run_for(2 * SECOND);
    shop.world.network.weather = weather;
    let serves = |shop: &mut Shop, id: HostId| {
        let mut flows = shop.world.host(id).sal.flows();
        flows.find(|flow| flow.role == Role::Responder && flow.app.protocol == 6).map(|flow| flow.flow)
    };
    let [one, other] = shop.instances;
    match serves(&mut shop, one) {
        Some(flow) => Talk { shop, client, flow, giver: one, taker: other },
        None => {
            let flow = serves(&mut shop, other).expect("one of both has it");
            Talk { shop, client, flow, giver: other, taker: one }
        }
    }
}

impl Talk {
    fn client_end(&mut self) -> &Stream {
        let client = self.client;
        &self.shop.world.host(self.shop.client).streams[client]
    }

    /// Flows of established connections of the session that a host serves.
    fn served(&mut self, id: HostId) -> Vec<FlowId> {
        let flows = self.shop.world.host(id).sal.flows();
        let open = flows.filter(|flow| flow.role == Role::Responder && flow.lifecycle == Lifecycle::Established);
        open.map(|flow| flow.flow).collect()
    }

    fn open_ends(&mut self, id: HostId) -> usize {
        self.shop.world.host(id).streams.iter().filter(|stream| stream.state == State::Open).count()
    }

    /// Bytes go both ways from now on, all of them right, and one end alone has the connection: `at`.
    fn assert_goes_on(&mut self, agents: &mut Agents, at: HostId, what: &str) {
        let elsewhere = if at == self.giver { self.taker } else { self.giver };
        let before = (self.client_end().received, self.client_end().acknowledged());
        agents.run_for(&mut self.shop, 6 * SECOND);
        let end = self.client_end();
        assert!(!end.was_reset && !end.was_wrong && end.state == State::Open, "{what}");
        assert!(end.received > before.0 && end.acknowledged() > before.1, "{what}: nothing passes");
        assert_eq!((self.open_ends(at), self.open_ends(elsewhere)), (1, 0), "{what}");
        assert_eq!((self.served(at).len(), self.served(elsewhere).len()), (1, 0), "{what}");
        let is_wrong = |stream: &Stream| stream.was_wrong;
        assert!(!self.shop.world.host(at).streams.iter().any(is_wrong), "{what}");
        ends_agree(&self.shop.world).expect(what);
        nothing_left_over(&self.shop.world).expect(what);
    }
}

#[test]
fn a_connection_goes_to_another_host_and_back_while_bytes_go_both_ways() {
    for (seed, is_direct) in [(1, false), (2, true), (3, false), (4, true)] {
        let mut talk = talk(seed, Weather::FAIR, is_direct);
        let mut agents = Agents::default();
        let Talk { giver, taker, flow, .. } = talk;
        let now = talk.shop.world.now;
        let client = talk.client;
        talk.shop.world.host(talk.shop.client).streams[client].forget_waits(now);
        let there = agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
        agents.run_for(&mut talk.shop, SECOND);
        assert_eq!(agents.outcome(there), Some("gone"), "seed {seed}");
        let now = talk.shop.world.now;
        let wait = talk.client_end().longest_wait(now);
        assert!(wait < Duration::from_millis(100), "seed {seed}: {wait:?}");
        talk.assert_goes_on(&mut agents, taker, "there");
        let flow = talk.served(taker)[0];
        let back = agents.hand_over(&mut talk.shop, flow, (taker, giver), Fault::None).expect("it is open");
        agents.run_for(&mut talk.shop, SECOND);
        assert_eq!(agents.outcome(back), Some("gone"), "seed {seed}");
        talk.assert_goes_on(&mut agents, giver, "back");
    }
}

#[test]
fn what_leaves_is_told_from_the_freeze_until_a_while_after_it_has_gone() {
    let mut talk = talk(8, Weather::FAIR, true);
    let mut agents = Agents::default();
    let Talk { giver, taker, flow, .. } = talk;
    agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
    let mut told: Vec<Vec<bool>> = Vec::new();
    for _ in 0..4000 {
        agents.run_for(&mut talk.shop, STEP);
        let leaving = talk.shop.world.host(giver).sal.leaving_flows();
        assert!(leaving.iter().all(|one| one.flow == flow));
        let now = leaving.into_iter().map(|one| one.has_gone).collect();
        if told.last() != Some(&now) {
            told.push(now);
        }
    }
    assert_eq!(told, [vec![], vec![false], vec![true], vec![]]);
}

#[test]
fn a_session_comes_back_before_what_it_left_behind_is_over() {
    let mut talk = talk(5, Weather::FAIR, true);
    let mut agents = Agents::default();
    let Talk { giver, taker, flow, .. } = talk;
    agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
    agents.run_for(&mut talk.shop, SECOND / 4);
    let flow = talk.served(taker)[0];
    let back = agents.hand_over(&mut talk.shop, flow, (taker, giver), Fault::None).expect("it is open");
    agents.run_for(&mut talk.shop, SECOND / 2);
    assert_eq!(agents.outcome(back), Some("gone"));
    talk.assert_goes_on(&mut agents, giver, "at once");
}

#[test]
fn a_session_comes_back_to_a_host_whose_agent_was_killed_and_still_lists_its_earlier_stay() {
    let mut talk = talk(6, Weather::FAIR, true);
    let mut agents = Agents::default();
    let Talk { giver, taker, flow, .. } = talk;
    let now = talk.shop.world.now;
    let before = talk.shop.world.host(giver).sal.export_flow(now, flow).expect("it is open");
    agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
    agents.run_for(&mut talk.shop, 3 * SECOND);
    assert!(talk.served(giver).is_empty(), "it is over");
    // The record was written before, and its end was not.
    let now = talk.shop.world.now;
    talk.shop.world.host(giver).sal.adopt_flow(now, &before).expect("the client is known");
    talk.shop.world.touch(giver);
    let flow = talk.served(taker)[0];
    let back = agents.hand_over(&mut talk.shop, flow, (taker, giver), Fault::None).expect("it is open");
    agents.run_for(&mut talk.shop, SECOND);
    assert_eq!(agents.outcome(back), Some("gone"));
    talk.assert_goes_on(&mut agents, giver, "beside the record");
}

#[test]
fn what_fails_before_the_clients_word_leaves_the_connection_where_it_is() {
    for (seed, fault) in [(6, Fault::TransferLost), (7, Fault::RestoreFails)] {
        let mut talk = talk(seed, Weather::FAIR, seed == 7);
        let mut agents = Agents::default();
        let Talk { giver, taker, flow, .. } = talk;
        let ticket = agents.hand_over(&mut talk.shop, flow, (giver, taker), fault).expect("it is open");
        agents.run_for(&mut talk.shop, SECOND);
        assert_eq!(agents.outcome(ticket), Some("stays"));
        talk.assert_goes_on(&mut agents, giver, "it stays");
        // Nothing of the first try is in the way of another.
        let again = agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
        agents.run_for(&mut talk.shop, SECOND);
        assert_eq!(agents.outcome(again), Some("gone"));
        talk.assert_goes_on(&mut agents, taker, "it goes");
    }
}

/// The numbers of the flow go on where they were: none is used twice, which the world itself checks, and the client
/// takes none of them for one that it has had.
#[test]
fn an_encrypted_connection_that_stays_goes_on_with_its_own_numbers() {
    for (seed, fault) in [(6, Fault::TransferLost), (7, Fault::RestoreFails)] {
        let mut talk = talk_as_demanded(seed, Weather::FAIR, false, true);
        let mut agents = Agents::default();
        let Talk { giver, taker, flow, .. } = talk;
        for _ in 0..2 {
            let keys = talk.shop.world.nonces.counts().keys;
            let ticket = agents.hand_over(&mut talk.shop, flow, (giver, taker), fault).expect("it is open");
            agents.run_for(&mut talk.shop, SECOND);
            assert_eq!(agents.outcome(ticket), Some("stays"));
            talk.assert_goes_on(&mut agents, giver, "it stays");
            let counts = talk.shop.world.nonces.counts();
            assert_eq!((counts.keys, counts.reused), (keys, 0), "under the keys that it had");
        }
        assert_eq!(talk.shop.world.host(talk.shop.client).cache.refused, 0, "seed {seed}");
        let again = agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
        agents.run_for(&mut talk.shop, SECOND);
        assert_eq!(agents.outcome(again), Some("gone"));
        talk.assert_goes_on(&mut agents, taker, "it goes");
    }
}

#[test]
fn a_taker_that_may_not_or_is_not_there_is_refused_before_anything_is_frozen() {
    let mut talk = talk(8, Weather::FAIR, false);
    let mut agents = Agents::default();
    let (giver, client, router, flow) = (talk.giver, talk.shop.client, talk.shop.router, talk.flow);
    for (taker, what) in [(client, "the client's own host"), (router, "a host that does not serve the name")] {
        let ticket = agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is asked for");
        agents.run_for(&mut talk.shop, 12 * SECOND);
        assert_ne!(agents.outcome(ticket), Some("gone"), "{what}");
        assert!(agents.outcome(ticket).is_some(), "{what}");
        assert!(agents.moving[&ticket].frozen.is_none(), "{what}");
        talk.assert_goes_on(&mut agents, giver, what);
    }
    let busy = agents.hand_over(&mut talk.shop, flow, (giver, talk.taker), Fault::None);
    assert!(busy.is_ok());
    let second = agents.hand_over(&mut talk.shop, flow, (giver, talk.taker), Fault::None);
    assert_eq!(second, Err(HandOverError::Busy));
    assert_eq!(agents.hand_over(&mut talk.shop, flow, (giver, giver), Fault::None), Err(HandOverError::Here));
}

#[test]
fn a_tenth_and_a_third_of_all_messages_lost_leave_one_end() {
    for seed in 20..44 {
        let loss_per_mille = if seed % 2 == 0 { 100 } else { 300 };
        let mut talk = talk(seed, Weather { loss_per_mille, ..Weather::FAIR }, seed % 3 == 0);
        let mut agents = Agents::default();
        let Talk { giver, taker, flow, .. } = talk;
        let ticket = agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
        agents.run_for(&mut talk.shop, 40 * SECOND);
        talk.shop.world.network.weather = Weather::FAIR;
        agents.run_for(&mut talk.shop, 20 * SECOND);
        let at = match agents.outcome(ticket) {
            Some("gone") => taker,
            Some("stays" | "refused") => giver,
            other => panic!("seed {seed}: {other:?}"),
        };
        talk.assert_goes_on(&mut agents, at, &format!("seed {seed}"));
    }
}

#[test]
fn agents_of_client_and_taker_that_die_at_any_step_leave_one_end_or_a_clean_end() {
    for (number, when) in [When::Fetched, When::Awaits, When::Restored, When::Taken, When::Gone].into_iter().enumerate()
    {
        for is_clients in [true, false] {
            let seed = 70 + number as u64;
            let mut talk = talk(seed, Weather::FAIR, true);
            let mut agents = Agents::default();
            let Talk { giver, taker, flow, .. } = talk;
            let killed = if is_clients { talk.shop.client } else { taker };
            let fault = Fault::Killed(killed, when);
            let ticket = agents.hand_over(&mut talk.shop, flow, (giver, taker), fault).expect("it is open");
            agents.run_for(&mut talk.shop, 90 * SECOND);
            let what = format!("{when:?}, the agent of host {killed:?}: {:?}", agents.outcome(ticket));
            let end = talk.client_end();
            assert!(!end.was_wrong, "{what}");
            if end.state == State::Open && !end.was_reset {
                let at = if agents.outcome(ticket) == Some("gone") { taker } else { giver };
                talk.assert_goes_on(&mut agents, at, &what);
            } else {
                assert!(!is_clients, "{what}: the client's agent has the last word");
                assert_eq!((talk.open_ends(giver), talk.open_ends(taker)), (0, 0), "{what}");
            }
        }
    }
}

#[test]
fn a_request_that_comes_after_the_word_that_the_connection_stays_begins_nothing() {
    let mut talk = talk(91, Weather::FAIR, true);
    let mut agents = Agents::default();
    let Talk { giver, taker, flow, .. } = talk;
    let addresses = [giver, talk.shop.client].map(|id| talk.shop.world.host(id).address);
    talk.shop.world.network.cut(addresses[0], addresses[1]);
    talk.shop.world.recording = Some(Vec::new());
    let ticket = agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
    agents.run_for(&mut talk.shop, SECOND / 2);
    let recorded = talk.shop.world.recording.take().expect("begun above");
    let requests: Vec<_> = recorded.into_iter().filter(|(.., bytes)| bytes[1] == u8::from(Kind::RequestLock)).collect();
    assert!(requests.len() >= 2, "it is asked again: {}", requests.len());
    let now = talk.shop.world.now;
    talk.shop.world.host(giver).sal.cancel_hand_over(now, ticket);
    talk.shop.world.touch(giver);
    talk.shop.world.network.heal();
    agents.run_for(&mut talk.shop, SECOND);
    assert_eq!(agents.outcome(ticket), Some("stays"));
    for (from, to, bytes) in requests {
        talk.shop.world.inject(from, to, bytes);
        agents.run_for(&mut talk.shop, SECOND / 10);
    }
    assert_eq!(agents.moving[&ticket].new, None, "the taker hears of nothing");
    talk.assert_goes_on(&mut agents, giver, "it has stayed");
    // Another one is another one.
    let again = agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
    agents.run_for(&mut talk.shop, SECOND);
    assert_eq!(agents.outcome(again), Some("gone"));
    talk.assert_goes_on(&mut agents, taker, "it goes");
}

#[test]
fn what_was_recorded_of_a_hand_over_moves_nothing_when_it_is_sent_again() {
    let mut talk = talk(90, Weather::FAIR, true);
    let mut agents = Agents::default();
    let Talk { giver, taker, flow, .. } = talk;
    talk.shop.world.recording = Some(Vec::new());
    let there = agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
    agents.run_for(&mut talk.shop, SECOND);
    assert_eq!(agents.outcome(there), Some("gone"));
    let recorded = talk.shop.world.recording.take().expect("begun above");
    let of_locks = |kind: u8| (12..=16).contains(&kind);
    assert!(recorded.iter().filter(|(.., bytes)| of_locks(bytes[1])).count() >= 3, "the request, the lock, its end");
    for (from, to, bytes) in recorded {
        talk.shop.world.inject(from, to, bytes);
        agents.run_for(&mut talk.shop, STEP);
    }
    talk.assert_goes_on(&mut agents, taker, "after the replay");
    let flow = talk.served(taker)[0];
    let back = agents.hand_over(&mut talk.shop, flow, (taker, giver), Fault::None).expect("it is open");
    agents.run_for(&mut talk.shop, SECOND);
    assert_eq!(agents.outcome(back), Some("gone"));
}

/// A rule demands that what goes between the client and the host to which the connection goes is sealed; whichever of
/// the two has it, and though the connection was plain where it was, nothing of it goes there as it is.
#[test]
fn a_connection_that_comes_to_a_host_under_a_floor_is_never_plain_there() {
    for (seed, loss_per_mille) in [(31, 0), (32, 0), (33, 100), (34, 100), (35, 100), (36, 100)] {
        for by_taker in [false, true] {
            let what = format!("seed {seed}, by taker {by_taker}");
            let mut talk = talk(seed, Weather { loss_per_mille, ..Weather::FAIR }, seed % 2 == 0);
            let Talk { giver, taker, flow, .. } = talk;
            let client = talk.shop.client;
            let now = talk.shop.world.now;
            let at = |host: HostId, talk: &mut Talk| talk.shop.world.host(host).address;
            let network = Network { address: at(if by_taker { client } else { taker }, &mut talk), bits: 32 };
            let rule = StackRule {
                number: 1,
                names: vec![Prefix::new(ServiceId::default(), 0)],
                text: String::new(),
                when: Expression::Within(Box::new(Expression::Fact(Fact::Remote)), network),
                uses: Stack::Secure,
                hold: SECOND,
                release: SECOND,
                priority: 0,
                is_floor: true,
            };
            let demanding = if by_taker { taker } else { client };
            talk.shop.world.host(demanding).sal.set_stack_rules(now, vec![rule]);
            talk.shop.world.touch(demanding);
            let mut agents = Agents::default();
            agents.run_for(&mut talk.shop, SECOND);
            let stack =
                |talk: &mut Talk, host| talk.shop.world.host(host).sal.flows().next().map(|flow| flow.stack.stack);
            assert_eq!(stack(&mut talk, giver), Some(Stack::Plain), "{what}: with the giver nobody demands anything");
            (talk.shop.world.recording, talk.shop.world.direct_recording) = (Some(Vec::new()), Some(Vec::new()));
            let there = agents.hand_over(&mut talk.shop, flow, (giver, taker), Fault::None).expect("it is open");
            for _ in 0..40 {
                agents.run_for(&mut talk.shop, SECOND / 4);
                let now = talk.shop.world.now;
                talk.shop.world.host(demanding).sal.judge_stacks(now);
                talk.shop.world.touch(demanding);
            }
            assert_eq!(agents.outcome(there), Some("gone"), "{what}");
            let takers = at(taker, &mut talk);
            let is_there = |from: SocketAddr, to: SocketAddr| [from.ip(), to.ip()].contains(&takers);
            let mut plain = 0;
            let mut sealed = 0;
            for (from, to, bytes) in talk.shop.world.recording.iter().flatten() {
                let Ok(data) = DataRepr::parse(bytes) else { continue };
                if is_there(*from, *to) && bytes.len() > DATA_HEADER_LEN + 8 {
                    *(if is_sealed(data.stack) { &mut sealed } else { &mut plain }) += 1;
                }
            }
            let direct = talk.shop.world.direct_recording.iter().flatten();
            let direct = direct.filter(|(from, to, _)| is_there(*from, *to)).count();
            assert!(plain + direct == 0 && sealed > 50, "{what}: {plain} plain, {direct} direct, {sealed} sealed");
            assert_eq!(stack(&mut talk, taker), Some(Stack::Secure), "{what}");
        }
    }
}
