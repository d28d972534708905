//! Two acts on one session, in virtual time: the lock at the client's host lets one of them through, and the other one
//! hears that it is not its turn, or waits.

mod shop;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use margay_core::key::HostPublic;
use margay_core::quiet::QuietAnswer;
use margay_core::{
    ChangeRefused, Cipher, DropReason, Event, HandOver, HandOverError, MoveRefused, Role, Stack, Ticket, Towards,
};
use margay_sim::stream::Plan;
use margay_sim::{HostId, Weather};
use margay_wire::{ErrorCode, FlowId, PORT};
use shop::{Shop, shop};

const SECOND: Duration = Duration::from_secs(1);
/// From one host to another.
const WAY: Duration = Duration::from_millis(20);
const NAME: &str = "chat.shop";
const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(50), writes: u32::MAX, closes: false };
const TICKET: Ticket = Ticket([7; 16]);
const OTHER_TICKET: Ticket = Ticket([8; 16]);

/// A connection whose ends both have a second address, and can seal it.
struct Scene {
    shop: Shop,
    stream: usize,
    server: HostId,
    taker: HostId,
    /// The numbers of the flow at the client and at the server.
    own: FlowId,
    served: FlowId,
}

fn second_address(host: HostId) -> IpAddr {
    let n = u8::try_from(host.0).expect("few hosts");
    [10, 7, 1, n].into()
}

fn scene(seed: u64) -> Scene {
    let mut shop = shop(seed, Weather { delay_min: WAY, delay_max: WAY, ..Weather::FAIR });
    let [server, taker] = shop.instances;
    for host in [server, taker, shop.client] {
        shop.world.host(host).set_secure(&[Cipher::ChaCha20Poly1305], false);
    }
    shop.world.publish_streams(shop.router, server, NAME, CHAT);
    let stream = shop.world.connect_stream(shop.client, NAME, CHAT);
    shop.world.run_for(2 * SECOND);
    for host in [server, shop.client] {
        let first = shop.world.host(host).address;
        shop.world.set_addresses(host, vec![first, second_address(host)]);
    }
    // By another flow each learns what the other can do now.
    shop.world.connect_stream(shop.client, NAME, Plan::LISTEN);
    shop.world.run_for(2 * SECOND);
    shop.world.publish_streams(shop.router, taker, NAME, CHAT);
    let own = shop.world.host(shop.client).flow_of(stream).expect("the client's flow");
    let mut of_server = shop.world.host(server).sal.flows();
    let of_session = of_server.find(|flow| flow.session == own.session && flow.role == Role::Responder);
    let served = of_session.expect("the server's flow").flow;
    drop(of_server);
    Scene { shop, stream, server, taker, own: own.flow, served }
}

impl Scene {
    fn run_for(&mut self, time: Duration) {
        self.shop.world.run_for(time);
    }

    fn change_stack(&mut self) -> Result<bool, ChangeRefused> {
        let now = self.shop.world.now;
        let client = self.shop.client;
        let begun = self.shop.world.host(client).sal.set_flow_stack(now, self.own, Stack::Secure);
        self.shop.world.touch(client);
        begun
    }

    fn is_sealed(&mut self) -> bool {
        let flow = self.shop.world.host(self.shop.client).flow_of(self.stream).expect("the client's flow");
        flow.stack.stack == Stack::Secure && flow.stack.changing_to.is_none()
    }

    /// By order of the host's operator, to the second address of that host.
    fn move_at(&mut self, host: HostId) -> Result<(), MoveRefused> {
        let now = self.shop.world.now;
        let flow = if host == self.server { self.served } else { self.own };
        let towards = Towards::Local(second_address(host));
        let begun = self.shop.world.host(host).sal.migrate_flow(now, flow, towards);
        self.shop.world.touch(host);
        begun
    }

    /// Whether the client and the server send to these addresses of each other.
    fn goes_to(&mut self, server_at: IpAddr, client_at: IpAddr) -> bool {
        let client = self.shop.client;
        let of_client = self.shop.world.host(client).sal.flow(self.own).and_then(|flow| flow.remote);
        let of_server = self.shop.world.host(self.server).sal.flow(self.served).and_then(|flow| flow.remote);
        [of_client, of_server] == [server_at, client_at].map(|address| Some(SocketAddr::new(address, PORT)))
    }

    fn hand_over(&mut self, ticket: Ticket) -> Result<(), HandOverError> {
        let now = self.shop.world.now;
        let to = self.shop.world.host(self.taker);
        let key = HostPublic(to.public_key()).id();
        let at = SocketAddr::new(to.address, PORT);
        let begun = self.shop.world.host(self.server).sal.hand_over(now, self.served, ticket, key, at);
        self.shop.world.touch(self.server);
        begun
    }

    fn ask_quiet_end(&mut self) -> bool {
        let now = self.shop.world.now;
        let is_asked = self.shop.world.host(self.server).sal.ask_quiet_end(now, self.served, 50);
        self.shop.world.touch(self.server);
        is_asked
    }

    /// What the client's agent is to look at.
    fn quiet_requests(&mut self) -> usize {
        let now = self.shop.world.now;
        self.shop.world.host(self.shop.client).sal.take_quiet_requests(now).len()
    }

    fn answer_quiet_end(&mut self) {
        let now = self.shop.world.now;
        let busy = QuietAnswer::NotNow(String::new());
        self.shop.world.host(self.shop.client).sal.answer_quiet_end(now, self.own, &busy);
        self.shop.world.touch(self.shop.client);
    }

    fn quiet_answer(&mut self) -> Option<QuietAnswer> {
        self.shop.world.host(self.server).sal.take_quiet_answer(self.served)
    }

    fn was_refused(&mut self, ticket: Ticket) -> bool {
        let refused = Event::HandOver(HandOver::Refused { ticket, code: ErrorCode::Overloaded });
        self.shop.world.host(self.server).events.contains(&refused)
    }

    fn is_fetched(&mut self, ticket: Ticket) -> bool {
        self.shop.world.host(self.server).events.contains(&Event::HandOver(HandOver::Fetched(ticket)))
    }

    /// The quiet end was refused by the client's host, since this act has the session.
    fn assert_not_now(&mut self, act: &str) {
        let answer = self.quiet_answer();
        let is_said = matches!(&answer, Some(QuietAnswer::NotNow(text)) if text.contains(act));
        assert!(is_said, "{answer:?}");
        assert_eq!(self.quiet_requests(), 0);
    }

    fn locked(&mut self) -> usize {
        let now = self.shop.world.now;
        self.shop.world.host(self.shop.client).sal.locked_sessions(now)
    }
}

#[test]
fn a_hand_over_keeps_others_away_until_it_is_over() {
    let mut scene = scene(1);
    assert_eq!(scene.hand_over(TICKET), Ok(()));
    assert!(scene.ask_quiet_end(), "nothing is frozen yet");
    scene.run_for(WAY * 2 + WAY / 2);
    scene.assert_not_now("hand-over");
    scene.run_for(SECOND);
    assert!(scene.is_fetched(TICKET) && !scene.ask_quiet_end(), "frozen");
    assert!(matches!(scene.move_at(scene.shop.client), Err(MoveRefused::Busy(_))));
    assert!(scene.change_stack().is_err());
    let now = scene.shop.world.now;
    let server = scene.server;
    scene.shop.world.host(server).sal.cancel_hand_over(now, TICKET);
    scene.shop.world.touch(server);
    scene.run_for(SECOND);
    assert_eq!(scene.locked(), 0);
    assert_eq!(scene.change_stack(), Ok(true));
    scene.run_for(SECOND);
    assert!(scene.is_sealed());
}

#[test]
fn a_quiet_end_keeps_others_away_until_it_is_answered() {
    let mut scene = scene(2);
    assert!(scene.ask_quiet_end());
    assert_eq!(scene.hand_over(TICKET), Ok(()), "the client's host decides");
    scene.run_for(WAY * 3);
    assert!(scene.was_refused(TICKET));
    assert_eq!(scene.quiet_requests(), 1);
    assert!(matches!(scene.change_stack(), Err(ChangeRefused::Busy(_))));
    assert!(matches!(scene.move_at(scene.shop.client), Err(MoveRefused::Busy(_))));
    scene.answer_quiet_end();
    assert_eq!(scene.hand_over(OTHER_TICKET), Ok(()));
    scene.run_for(SECOND);
    assert_eq!(scene.quiet_answer(), Some(QuietAnswer::NotNow(String::new())));
    assert!(scene.is_fetched(OTHER_TICKET));
}

#[test]
fn a_change_of_the_stack_keeps_others_away_until_it_is_made() {
    let mut scene = scene(3);
    assert_eq!(scene.change_stack(), Ok(true));
    assert_eq!(scene.hand_over(TICKET), Ok(()));
    assert!(scene.ask_quiet_end());
    assert!(matches!(scene.move_at(scene.shop.client), Err(MoveRefused::Busy(_))));
    scene.run_for(WAY * 2 + WAY / 2);
    assert!(scene.was_refused(TICKET));
    scene.assert_not_now("stack");
    scene.run_for(SECOND);
    assert!(scene.is_sealed());
    assert_eq!((scene.locked(), scene.move_at(scene.shop.client)), (0, Ok(())));
}

#[test]
fn the_move_of_one_flow_keeps_others_away_once_the_peer_is_ready() {
    let mut scene = scene(4);
    let client = scene.shop.client;
    let first = scene.shop.world.host(scene.server).address;
    assert_eq!(scene.move_at(client), Ok(()));
    scene.run_for(WAY + WAY / 2);
    assert_eq!(scene.locked(), 0, "nothing has changed");
    assert_eq!(scene.hand_over(TICKET), Ok(()));
    assert!(scene.ask_quiet_end());
    scene.run_for(WAY);
    assert_eq!(scene.locked(), 1);
    assert!(matches!(scene.change_stack(), Err(ChangeRefused::Busy(_))));
    scene.run_for(WAY);
    assert!(scene.was_refused(TICKET));
    scene.assert_not_now("move");
    scene.run_for(WAY);
    assert_eq!(scene.locked(), 0);
    assert!(scene.goes_to(first, second_address(client)));
    assert_eq!(scene.change_stack(), Ok(true));
}

#[test]
fn a_move_waits_for_an_act_that_was_earlier_whichever_end_moves() {
    for by_client in [true, false] {
        let mut scene = scene(5 + u64::from(by_client));
        let server = scene.server;
        let client = scene.shop.client;
        let first = [server, client].map(|host| scene.shop.world.host(host).address);
        let moved = if by_client { [first[0], second_address(client)] } else { [second_address(server), first[1]] };
        assert!(scene.ask_quiet_end());
        assert_eq!(scene.move_at(if by_client { client } else { server }), Ok(()), "the lock is free yet");
        scene.run_for(2 * SECOND);
        assert!(scene.goes_to(first[0], first[1]), "by the client: {by_client}");
        assert!(scene.shop.world.host(client).sal.counters().drops(DropReason::Locked) > 0);
        assert_eq!(scene.quiet_requests(), 1);
        scene.answer_quiet_end();
        scene.run_for(3 * SECOND);
        assert!(scene.goes_to(moved[0], moved[1]), "by the client: {by_client}");
        assert_eq!(scene.locked(), 0);
    }
}
