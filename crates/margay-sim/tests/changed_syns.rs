//! SYNs that somebody on the path changes: what their client has not asked for, it does not get, and nobody else does.

use std::time::Duration;

use margay_core::table::{Action, Allow};
use margay_core::{DropReason, Role};
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather, World};
use margay_wire::{Kind, RESOLVABLE_LEN, RESOLVABLE_OFFSET, kind_of};

const NAME: &str = "web.shop";
const OTHER_NAME: &str = "mail.shop";
const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// Where the value of SESSION begins: it is the first extension.
const SESSION: usize = RESOLVABLE_OFFSET + RESOLVABLE_LEN + 4;
const PORT: usize = SESSION + 34;
const CLIENT_PORT: usize = SESSION + 32;
/// Where the serviceID lies in the resolvable part.
const SERVICE: usize = RESOLVABLE_OFFSET + 40;

/// A server whose names have a listener each for port 80, and one of them another one for port 9000.
struct Shop {
    world: World,
    server: HostId,
    client: HostId,
}

fn shop(has_met: bool) -> Shop {
    let mut world = World::new(1, Weather::FAIR);
    let (server, client) = (world.add_host(false), world.add_host(false));
    let (address, key) = (world.host(server).address, world.host(server).public_key());
    for (name, port, number) in [(NAME, 80, 1), (NAME, 9000, 2), (OTHER_NAME, 81, 3)] {
        world.host(server).serve(service(name), port, number, Allow::Any);
    }
    let sal = &mut world.host(server).sal;
    let rules: Vec<_> = sal.rules().map(|(_, id, rule)| (id, rule.clone())).collect();
    for (id, mut rule) in rules {
        let Action::Demux(demux) = &mut rule.action else { panic!("it is served") };
        demux.service_port = Some(if demux.listener.port() == 9000 { 9000 } else { 80 });
        assert!(sal.change_rule(id, rule));
    }
    for name in [NAME, OTHER_NAME] {
        world.host(client).forward(service(name).into(), address, Some(key));
    }
    let mut shop = Shop { world, server, client };
    if has_met {
        assert_eq!(shop.connect(|_| {}), Outcome::Answered(1));
        shop.world.run_for(10 * SECOND);
    }
    shop
}

impl Shop {
    /// The client connects to port 80 of the name, and its first SYN comes as `alter` leaves it.
    fn connect(&mut self, alter: impl Fn(&mut [u8])) -> Outcome {
        let [from, to] = [self.client, self.server].map(|host| self.world.host(host).address);
        self.world.network.cut(from, to);
        self.world.recording = Some(Vec::new());
        let connected = self.world.connect(self.client, NAME);
        self.world.run_for(2 * MILLISECOND);
        self.world.network.heal();
        let sent = self.world.recording.take().expect("set above");
        let is_syn = |bytes: &[u8]| kind_of(bytes) == Ok(Kind::Syn);
        let (of, at, mut syn) = sent.into_iter().find(|(.., bytes)| is_syn(bytes)).expect("a SYN");
        alter(&mut syn);
        self.world.inject(of, at, syn);
        self.world.run_for(3 * SECOND);
        self.world.host(self.client).clients[connected].outcome
    }

    fn accepted(&mut self) -> Vec<usize> {
        self.world.host(self.server).servers.iter().map(|server| server.accepted.len()).collect()
    }

    fn changed(&mut self) -> u64 {
        self.world.host(self.server).sal.counters().drops(DropReason::SynChanged)
    }

    /// No program has anything of it, and nothing is left of it.
    fn assert_refused(&mut self, what: &str, alter: impl Fn(&mut [u8])) {
        let (accepted, changed) = (self.accepted(), self.changed());
        let outcome = self.connect(alter);
        assert!(matches!(outcome, Outcome::Refused | Outcome::Reset), "{what}: {outcome:?}");
        assert_eq!((self.accepted(), self.changed()), (accepted, changed + 1), "{what}");
        self.world.run_for(10 * SECOND);
        for host in [self.server, self.client] {
            let sal = &self.world.host(host).sal;
            assert_eq!((sal.flows().count(), sal.half_open_count()), (0, 0), "{what}");
        }
    }
}

fn put_port(syn: &mut [u8], at: usize, port: u16) {
    syn[at..at + 2].copy_from_slice(&port.to_be_bytes());
}

#[test]
fn a_client_is_connected_to_no_other_port_than_it_asked_for() {
    for has_met in [false, true] {
        let mut shop = shop(has_met);
        shop.assert_refused("port", |syn| put_port(syn, PORT, 9000));
        shop.assert_refused("the client's port", |syn| put_port(syn, CLIENT_PORT, 7));
        assert_eq!(shop.connect(|_| {}), Outcome::Answered(1), "as it was sent");
        assert_eq!(shop.accepted()[1], 0);
    }
}

#[test]
fn a_client_is_connected_to_no_other_name_of_its_server() {
    let mut shop = shop(true);
    shop.assert_refused("name", |syn| syn[SERVICE..SERVICE + 32].copy_from_slice(&service(OTHER_NAME).0));
    assert_eq!(shop.connect(|_| {}), Outcome::Answered(1), "as it was sent");
    assert_eq!(shop.accepted()[2], 0);
}

/// The prologue of the handshake differs: the answer is another session's, and the client asks again.
#[test]
fn at_first_contact_another_name_is_no_answer() {
    let mut shop = shop(false);
    let outcome = shop.connect(|syn| syn[SERVICE..SERVICE + 32].copy_from_slice(&service(OTHER_NAME).0));
    assert_eq!(outcome, Outcome::Answered(1));
    assert_eq!(shop.accepted(), [1, 0, 0]);
    assert!(shop.world.host(shop.client).sal.counters().drops(DropReason::BadHandshake) > 0);
}

/// What routers write, and what differs between copies of a SYN, may differ.
#[test]
fn flags_and_hop_limits_are_not_asked_for() {
    let mut shop = shop(true);
    let outcome = shop.connect(|syn| {
        syn[RESOLVABLE_OFFSET] -= 1;
        syn[margay_wire::FLAGS_OFFSET] |= margay_wire::Flags::COPIED.bits() | margay_wire::Flags::FULL.bits();
    });
    assert_eq!(outcome, Outcome::Answered(1));
    let flows =
        |world: &mut World, host| world.host(host).sal.flows().filter(|flow| flow.role == Role::Responder).count();
    assert_eq!((flows(&mut shop.world, shop.server), shop.changed()), (1, 0));
}
