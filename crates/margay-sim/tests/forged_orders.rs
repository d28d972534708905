//! What a box makes of orders that it passes on: it alters them, makes some up, and shows kept ones again.

mod line;

use std::net::SocketAddr;
use std::time::Duration;

use line::{Line, name, open_line};
use margay_core::key::{HostPublic, HostSecret};
use margay_core::reconfiguration::{Edit, ReconfigurationOutcome};
use margay_core::rng::Rng;
use margay_core::{DropReason, Event, FlowInfo, Role, auth};
use margay_sim::stream::Plan;
use margay_sim::{HostId, Weather};
use margay_wire::{FlowId, Message, OrderRepr, OrderState, PORT, ReconfigurationStep, SessionId};

const SECOND: Duration = Duration::from_secs(1);
const TALK: Plan = Plan { write: 700, every: Duration::from_millis(30), writes: 4000, closes: true };
/// Types of extensions.
const RECONFIGURATION: u8 = 0x9a;
const ORDER: u8 = 0xce;

/// Sessions through box 0, and what its host has passed on of an order of the server's host, which is carried out.
struct Story {
    line: Line,
    sessions: Vec<FlowId>,
    /// To the client's host, the last of them signed as that one wants it.
    wish: Vec<u8>,
    /// To the server's host: that the order is taken.
    taken: Vec<u8>,
}

fn own_flows(line: &mut Line) -> Vec<FlowId> {
    let chat = line.service;
    let flows = line.world.host(line.client).sal.flows();
    flows.filter(|flow| flow.service == chat && flow.role == Role::Initiator).map(|flow| flow.flow).collect()
}

fn address(line: &mut Line, host: HostId) -> SocketAddr {
    SocketAddr::new(line.world.host(host).address, PORT)
}

fn order_of(bytes: &[u8]) -> Option<(ReconfigurationStep, OrderRepr)> {
    let message = Message::parse(bytes).ok()?;
    Some((message.reconfiguration()?.step, message.order()?))
}

fn story(seed: u64) -> Story {
    let mut line = open_line(seed, Weather::FAIR, 3);
    line.talk(TALK);
    line.world.connect_stream(line.client, "chat.shop", TALK);
    line.world.run_for(SECOND);
    for id in own_flows(&mut line) {
        let client = line.client;
        let now = line.world.now;
        let edit = Edit::Insert { service: name(0), before: None };
        line.world.host(client).sal.reconfigure(now, id, edit).expect("it may");
        line.world.touch(client);
        line.world.run_for(SECOND);
    }
    let sessions = own_flows(&mut line);
    let first = line.world.host(line.client).sal.flow(sessions[0]).expect("it is there").session;
    let served = line.world.host(line.server).sal.flows().find(|flow| flow.session == first).expect("its end").flow;
    line.world.recording = Some(Vec::new());
    let now = line.world.now;
    let server = line.server;
    let edit = Edit::Insert { service: name(1), before: None };
    line.world.host(server).sal.reconfigure(now, served, edit).expect("it may");
    line.world.touch(server);
    line.world.run_for(SECOND / 2);
    let said = line.world.recording.take().expect("it was recorded");
    let [client, server, first] = [line.client, line.server, line.boxes[0]].map(|host| address(&mut line, host));
    let find = |to: SocketAddr, state: OrderState| {
        let its = said.iter().filter(|(from, at, _)| (*from, *at) == (first, to));
        let its = its.filter(|(.., bytes)| order_of(bytes).is_some_and(|(_, order)| order.state == state));
        its.map(|(.., bytes)| bytes.clone()).next_back().expect("it was passed on")
    };
    let wish = find(client, OrderState::Wished);
    let taken = find(server, OrderState::Taken);
    assert_ne!(order_of(&wish).expect("it is one").1.start, 0, "it was signed as wanted");
    let mut story = Story { line, sessions, wish, taken };
    assert_eq!(changes(&mut story.line), 3);
    story.sessions = own_flows(&mut story.line);
    story
}

/// Changes that the client's host has carried out.
fn changes(line: &mut Line) -> usize {
    let events = line.world.host(line.client).events.iter();
    let is_done = |event: &&Event| match event {
        Event::Reconfigured { change, .. } => change.outcome == ReconfigurationOutcome::Done,
        _ => false,
    };
    events.filter(is_done).count()
}

/// Where the value of an extension begins.
fn value_of(bytes: &[u8], kind: u8) -> usize {
    let mut at = 20;
    while bytes[at] != kind {
        at += 4 + usize::from(u16::from_be_bytes([bytes[at + 2], bytes[at + 3]])).next_multiple_of(4);
    }
    at + 4
}

/// The same message by the flow of a session that a host has now.
fn by_flow(flow: &FlowInfo, bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[8..12].copy_from_slice(&flow.flow.0.to_be_bytes());
    bytes[12..16].copy_from_slice(&flow.peer_flow.0.to_be_bytes());
    bytes
}

/// What the host of box `at` says, tagged as its agent tags it, to a host that it shares an association with. Its
/// number is so much later than any that its agent has used.
fn say_as_box(line: &mut Line, at: usize, to: HostId, mut bytes: Vec<u8>, ahead: u32) {
    let from = line.boxes[at];
    let epoch = line.world.host(from).epoch();
    let kept = line.world.host(from).sal.keep_associations();
    let peer = line.world.host(to).public_key();
    // As `act/moving/keepsake.rs` has them.
    let one = kept.chunks_exact(152).find(|one| one[16..48] == peer).expect("they have met");
    bytes[16..20].copy_from_slice(&(10_000 + ahead).to_be_bytes());
    let auth_value = bytes.len() - 28;
    bytes[auth_value..auth_value + 4].copy_from_slice(&one[8..12]);
    bytes[auth_value + 4..auth_value + 8].copy_from_slice(&epoch.to_be_bytes());
    bytes[auth_value + 8..auth_value + 12].copy_from_slice(&line.world.host(to).epoch().to_be_bytes());
    let mut hasher = blake3::Hasher::new_derive_key("margay 2026 control tag");
    hasher.update(&one[48..80]).update(&[one[1] & 1]).update(&epoch.to_be_bytes());
    auth::sign_with_key(hasher.finalize().as_bytes(), &mut bytes).expect("it has room for a tag");
    let [from, to] = [from, to].map(|host| address(line, host));
    line.world.inject(from, to, bytes);
}

/// The same wish by another host.
fn signed_by(key: &HostSecret, claims: [u8; 16], wish: &[u8]) -> Vec<u8> {
    let mut bytes = wish.to_vec();
    let host = value_of(&bytes, RECONFIGURATION) + 8;
    bytes[host..host + 16].copy_from_slice(&claims);
    let at = value_of(&bytes, ORDER);
    bytes[at + 56..at + 88].copy_from_slice(&key.public().0);
    let mut signed = b"margay 2026 order".to_vec();
    signed.extend_from_slice(&bytes[host - 4..host + 16]);
    signed.extend_from_slice(&bytes[at..at + 88]);
    signed.extend_from_slice(&[0, 0]);
    bytes[at + 88..at + 152].copy_from_slice(&key.sign(&signed));
    bytes
}

fn drops(line: &mut Line, host: HostId, reason: DropReason) -> u64 {
    line.world.host(host).sal.counters().drops(reason)
}

impl Story {
    /// The session that the order is about.
    fn session(&self) -> SessionId {
        order_of(&self.wish).expect("it is one").1.session
    }

    /// Its end at a host.
    fn end(&mut self, host: HostId) -> FlowInfo {
        let session = self.session();
        self.line.world.host(host).sal.flows().find(|flow| flow.session == session).expect("its end").clone()
    }

    /// The wish as the host of box 0 would say it now.
    fn wish_now(&mut self) -> Vec<u8> {
        let client = self.line.client;
        by_flow(&self.end(client), &self.wish)
    }

    /// Gives the number of another order of the server's host.
    fn order(&mut self, edit: Edit) -> u64 {
        let server = self.line.server;
        let id = self.end(server).flow;
        let now = self.line.world.now;
        let order = self.line.world.host(server).sal.reconfigure(now, id, edit).expect("it may");
        self.line.world.touch(server);
        order
    }

    /// After what was forged: the client's host has changed no session.
    fn ends_unharmed(mut self) {
        self.line.world.run_for(10 * SECOND);
        assert_eq!(changes(&mut self.line), 3);
        assert_eq!(own_flows(&mut self.line), self.sessions);
        let client = self.line.client;
        assert_eq!(self.line.world.host(client).sal.counters().orders_of_others, [1, 0, 0, 0]);
    }
}

#[test]
fn what_a_box_alters_of_an_order_is_nobodys_word() {
    let mut story = story(3);
    let client = story.line.client;
    let before = drops(&mut story.line, client, DropReason::BadCertificate);
    let wish = story.wish_now();
    let number = value_of(&wish, RECONFIGURATION) + 7;
    let order = value_of(&wish, ORDER);
    // The order's number, host, box, start, time, key and signature.
    let places = [number, number + 5, order + 20, order + 44, order + 55, order + 60, order + 100];
    for (ahead, at) in (20..).zip(places) {
        let mut bytes = wish.clone();
        bytes[at] ^= 1;
        say_as_box(&mut story.line, 0, client, bytes, ahead);
    }
    let mut removed = wish.clone();
    removed[order + 1] = 2;
    say_as_box(&mut story.line, 0, client, removed, 30);
    let mut before_another = wish;
    before_another[order + 32] = 9;
    say_as_box(&mut story.line, 0, client, before_another, 31);
    story.line.world.run_for(SECOND);
    assert_eq!(drops(&mut story.line, client, DropReason::BadCertificate), before + places.len() as u64 + 2);
    story.ends_unharmed();
}

#[test]
fn what_another_host_has_signed_changes_nothing() {
    let mut story = story(5);
    let client = story.line.client;
    let stranger = HostSecret::generate(&mut Rng::new([5; 32]));
    let before = drops(&mut story.line, client, DropReason::BadCertificate);
    let wish = story.wish_now();
    let ends = [story.line.server, story.line.boxes[0]];
    for (ahead, host) in (20..).zip(ends) {
        let claims = HostPublic(story.line.world.host(host).public_key()).id();
        say_as_box(&mut story.line, 0, client, signed_by(&stranger, claims.0, &wish), ahead);
    }
    story.line.world.run_for(SECOND);
    assert_eq!(drops(&mut story.line, client, DropReason::BadCertificate), before + 2, "as the server, as the box");
    let own = signed_by(&stranger, stranger.public().id().0, &wish);
    assert_eq!(story.shown(own, 30), Some(OrderState::Refused), "it is neither");
    story.ends_unharmed();
}

impl Story {
    /// What the client's host tells of a wish that the host of box 0 shows it.
    fn shown(&mut self, bytes: Vec<u8>, ahead: u32) -> Option<OrderState> {
        let client = self.line.client;
        self.line.world.recording = Some(Vec::new());
        say_as_box(&mut self.line, 0, client, bytes, ahead);
        self.line.world.run_for(SECOND / 2);
        let said = self.line.world.recording.take().expect("it was recorded");
        let told = said.iter().filter_map(|(.., bytes)| order_of(bytes));
        told.filter(|(step, _)| *step == ReconfigurationStep::Told).map(|(_, order)| order.state).next()
    }
}

#[test]
fn an_order_counts_for_its_own_session_alone() {
    let mut story = story(7);
    let client = story.line.client;
    let counts =
        |line: &mut Line| [DropReason::Malformed, DropReason::BadCertificate].map(|why| drops(line, client, why));
    let before = counts(&mut story.line);
    let named = story.session();
    let flows: Vec<_> = story.line.world.host(client).sal.flows().collect();
    let is_other = |flow: &&FlowInfo| flow.session != named && story.sessions.contains(&flow.flow);
    let other = flows.iter().find(is_other).expect("another").clone();
    for (ahead, session) in [(20, named), (21, other.session)] {
        let mut bytes = by_flow(&other, &story.wish);
        let at = value_of(&bytes, ORDER) + 4;
        bytes[at..at + 16].copy_from_slice(&session.0);
        say_as_box(&mut story.line, 0, client, bytes, ahead);
    }
    story.line.world.run_for(SECOND);
    assert_eq!(counts(&mut story.line), before.map(|count| count + 1));
    story.ends_unharmed();
}

#[test]
fn an_order_that_is_shown_again_is_not_carried_out_again() {
    let mut story = story(9);
    // What it had put in is taken out again: carried out again, it would undo that.
    story.order(Edit::Remove { service: name(1) });
    story.line.world.run_for(SECOND);
    assert_eq!(changes(&mut story.line), 4);
    let wish = story.wish_now();
    assert_eq!(story.shown(wish.clone(), 10), Some(OrderState::Done), "it was, and is told again");
    story.line.world.run_for(70 * SECOND);
    assert_eq!(story.shown(wish, 20), Some(OrderState::ToSign), "it is forgotten, and too old");
    assert_eq!(changes(&mut story.line), 4);
}

#[test]
fn an_order_that_was_signed_for_another_start_of_the_agent_is_none() {
    let mut story = story(13);
    let client = story.line.client;
    story.order(Edit::Remove { service: name(1) });
    story.line.world.run_for(SECOND);
    story.line.world.kill_agent(client);
    story.line.world.start_agent(client);
    let router = story.line.router;
    story.line.world.register_again(router, client);
    story.line.world.run_for(SECOND / 2);
    let wish = story.wish_now();
    assert_eq!(story.shown(wish, 10), Some(OrderState::ToSign));
    let at_box = story.line.boxes[1];
    story.line.world.run_for(5 * SECOND);
    assert_eq!(story.line.world.host(at_box).sal.flow_count(), 0, "the session goes through it no more");
}

#[test]
fn a_box_does_not_say_what_has_become_of_an_order() {
    let mut story = story(11);
    let server = story.line.server;
    let [client_at, first_at] =
        [story.line.client, story.line.boxes[0]].map(|host| story.line.world.host(host).address);
    // The order waits for the client's host.
    story.line.world.network.cut(client_at, first_at);
    story.line.world.recording = Some(Vec::new());
    let order = story.order(Edit::Remove { service: name(1) });
    story.line.world.run_for(SECOND / 2);
    let said = story.line.world.recording.take().expect("it was recorded");
    let is_wish = |bytes: &&Vec<u8>| order_of(bytes).is_some_and(|(_, order)| order.state == OrderState::Wished);
    let wish = said.iter().map(|(.., bytes)| bytes).find(is_wish).expect("it was said");
    let before = drops(&mut story.line, server, DropReason::BadCertificate);
    let served = story.end(server);
    // What was told of the order before, made this one's: as it was signed, and by another key.
    let mut told = by_flow(&served, &story.taken);
    let [from, to] = [wish, &told].map(|bytes| value_of(bytes, RECONFIGURATION) + 4);
    told[to..to + 4].copy_from_slice(&wish[from..from + 4]);
    let at = value_of(&told, ORDER);
    (told[at], told[at + 1]) = (OrderState::Done as u8, 2);
    say_as_box(&mut story.line, 1, server, told.clone(), 20);
    let stranger = HostSecret::generate(&mut Rng::new([5; 32]));
    let claims = HostPublic(story.line.world.host(server).public_key()).id();
    say_as_box(&mut story.line, 1, server, signed_by(&stranger, claims.0, &told), 21);
    story.line.world.run_for(SECOND / 2);
    assert_eq!(drops(&mut story.line, server, DropReason::BadCertificate), before + 2);
    story.line.world.run_for(10 * SECOND);
    let events = story.line.world.host(server).events.iter();
    let outcomes: Vec<_> = events
        .filter_map(|event| match event {
            Event::Reconfigured { change, .. } if change.order == Some(order) => Some(change.outcome.clone()),
            _ => None,
        })
        .collect();
    assert!(matches!(&outcomes[..], [ReconfigurationOutcome::Failed(why)] if why.contains("has not answered")));
}
