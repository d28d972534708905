//! Programs that know names and no ports (DESIGN §9, the second door): a port that means the service, and what the
//! client's end of a flow is called at the server's.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use margay_core::certificate::{CertificateKind, TrustAnchor};
use margay_core::key::SigningKey;
use margay_core::name::{Prefix, ServiceId};
use margay_core::rng::Rng;
use margay_core::table::{Action, Allow, Demux, Rule, SERVICE_PORT};
use margay_core::{DropReason, FlowInfo, Instant, Ranges, Role, Tuple};
use margay_sim::certificate;
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Outcome, Weather, World};
use margay_wire::Kind;

const SECOND: Duration = Duration::from_secs(1);
const TCP: u8 = 6;
const UDP: u8 = 17;

struct Shop {
    world: World,
    router: HostId,
    server: HostId,
    client: HostId,
}

fn shop(seed: u64) -> Shop {
    let mut world = World::new(seed, Weather::FAIR);
    let [router, server, client] = [true, false, false].map(|router| world.add_host(router));
    for host in [server, client] {
        world.register(router, host);
    }
    Shop { world, router, server, client }
}

impl Shop {
    /// Serves a prefix on one port of the service alone.
    fn publish(&mut self, prefix: Prefix, protocol: u8, listen_port: u16, service_port: Option<u16>) {
        let listener = SocketAddr::new("::".parse().expect("literal"), listen_port);
        let demux = Demux {
            listener,
            other_family: None,
            is_looked_up: false,
            service_port,
            protocol: Some(protocol),
            allow: Allow::Any,
        };
        let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
        self.world.host(self.server).sal.add_rule(Instant::ZERO, prefix, rule).expect("room");
        let (address, key) = (self.world.host(self.server).address, self.world.host(self.server).public_key());
        self.world.host(self.router).forward(prefix, address, Some(key));
    }

    /// A datagram from a port of the client's; gives the server's flow of it.
    fn ask(&mut self, name: &str, port: u16) -> FlowInfo {
        let tuple = (SocketAddr::new(Ranges::USUAL.host_v6().into(), port), there(name));
        self.world.send_datagram(self.client, &Datagram::new(tuple.0, tuple.1, b"ask"));
        self.world.run_for(SECOND);
        let asked = self.world.host(self.server).datagrams.pop().expect("delivered").tuple;
        let sal = &self.world.host(self.server).sal;
        sal.flows().find(|flow| flow.app.destination == asked.source).expect("a flow")
    }

    fn peer(&mut self, host: HostId, app: &Tuple) -> Option<ServiceId> {
        self.world.host(host).sal.peer_service(app)
    }

    fn set_source(&mut self, port: u16, source: ServiceId) {
        self.world.host(self.client).sal.set_source(UDP, anywhere(port), source, Arc::new(|_| true)).expect("room");
    }

    fn host_id(&mut self, host: HostId) -> margay_core::key::HostId {
        self.world.host(host).sal.host()
    }
}

/// What a socket is bound to that takes whatever address its packets leave with.
fn anywhere(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::Ipv6Addr::UNSPECIFIED.into(), port)
}

fn there(name: &str) -> SocketAddr {
    SocketAddr::new(Ranges::USUAL.virtual_v6(&service(name)).into(), SERVICE_PORT)
}

#[test]
fn the_service_port_finds_an_instance_on_whatever_port_it_listens() {
    let mut shop = shop(1);
    shop.world.publish(shop.router, shop.server, "web.shop", 1);
    let rules: Vec<_> = shop.world.host(shop.server).sal.rules().map(|(_, id, _)| id).collect();
    for rule in rules.into_iter().skip(1) {
        shop.world.host(shop.server).sal.remove_rule(rule);
    }
    shop.publish(service("web.shop").into(), TCP, 80, Some(8080));
    // The other protocol's listener is none of this one's.
    shop.publish(service("web.shop").into(), UDP, 81, Some(8080));
    for (port, wanted) in [(SERVICE_PORT, Outcome::Answered(1)), (8080, Outcome::Answered(1)), (8081, Outcome::Refused)]
    {
        let (now, to) = (shop.world.now, SocketAddr::new(there("web.shop").ip(), port));
        let at = shop.world.host(shop.client).connect(now, to);
        shop.world.run_for(SECOND);
        assert_eq!(shop.world.host(shop.client).clients[at].outcome, wanted, "port {port}");
    }
}

#[test]
fn a_name_under_a_prefix_reaches_whoever_serves_the_prefix() {
    let mut shop = shop(2);
    let prefix = Prefix::new(service("store.shop"), 100);
    shop.publish(prefix, UDP, 9000, None);
    // Names with more bits than a service's are answered by their own key, or by word of an authority that the client
    // trusts.
    let authority = SigningKey::generate(&mut Rng::new([77; 32]));
    let host_key = shop.world.host(shop.server).public_key();
    let right = certificate::chain(CertificateKind::Service, prefix, host_key, &authority);
    shop.world.host(shop.server).sal.set_service_certificate(prefix, right);
    let anchor = TrustAnchor { authority: prefix.id.authority(), key: authority.public() };
    shop.world.host(shop.client).sal.add_trust_anchor(anchor);
    let mut inside = service("store.shop");
    inside.0[31] = 7;
    let lease = "fd5a:4c00::77".parse().expect("literal");
    shop.world.host(shop.client).sal.bind_name(lease, inside);
    let here = SocketAddr::new(Ranges::USUAL.host_v6().into(), 4000);
    shop.world.send_datagram(shop.client, &Datagram::new(here, SocketAddr::new(lease, SERVICE_PORT), b"ask"));
    shop.world.run_for(SECOND);
    let flow = shop.world.host(shop.server).sal.flows().find(|flow| flow.role == Role::Responder).expect("a flow");
    assert_eq!((flow.service, flow.app.source.port()), (inside, 9000));
}

#[test]
fn a_lease_is_in_use_while_a_flow_goes_there_and_when_a_program_has_tried() {
    let mut shop = shop(2);
    shop.publish(service("web.shop").into(), UDP, 53, None);
    let leases = ["fd5a:4c00::71", "fd5a:4c00::72", "fd5a:4c00::73"].map(|address| address.parse().expect("literal"));
    for (lease, name) in leases.into_iter().zip(["web.shop", "nobody.shop", "unasked.shop"]) {
        shop.world.host(shop.client).sal.bind_name(lease, service(name));
    }
    let here = SocketAddr::new(Ranges::USUAL.host_v6().into(), 4000);
    for lease in &leases[..2] {
        shop.world.send_datagram(shop.client, &Datagram::new(here, SocketAddr::new(*lease, 53), b"ask"));
    }
    shop.world.run_for(SECOND);
    let client = &mut shop.world.host(shop.client).sal;
    assert_eq!(client.take_used_leases().into_iter().collect::<Vec<_>>(), leases[..2], "also where nobody answers");
    assert!(client.take_used_leases().is_empty(), "said once");
    assert_eq!(client.leases_of_flows().into_iter().collect::<Vec<_>>(), leases[..1], "as long as the flow lives");
    client.unbind_name(leases[0]);
    assert!(client.leases_of_flows().is_empty());
    let server = &mut shop.world.host(shop.server).sal;
    assert!(server.take_used_leases().is_empty() && server.leases_of_flows().is_empty(), "who serves uses no lease");
}

#[test]
fn both_ends_know_what_the_other_is_called() {
    let mut shop = shop(3);
    shop.publish(service("dns.shop").into(), UDP, 53, None);
    let client = shop.host_id(shop.client);
    let (server, own) = (shop.server, ServiceId::at_host(client, 0x8000_0001));
    let unnamed = shop.ask("dns.shop", 4000);
    assert_eq!(unnamed.source, None);
    assert_eq!(shop.peer(server, &unnamed.app), Some(ServiceId::at_host(client, 4000)), "after its host");
    shop.set_source(4001, own);
    let named = shop.ask("dns.shop", 4001);
    assert_eq!((named.source, shop.peer(server, &named.app)), (Some(own), Some(own)));
    let of_client = Tuple {
        protocol: UDP,
        source: SocketAddr::new(Ranges::USUAL.host_v6().into(), 4001),
        destination: there("dns.shop"),
    };
    assert_eq!(shop.peer(shop.client, &of_client), Some(service("dns.shop")));
    shop.world.host(shop.client).sal.forget_source(UDP, anywhere(4001));
    assert_eq!(shop.world.host(shop.client).sal.source_count(), 0);
    assert_eq!(shop.peer(server, &named.app), Some(own), "a flow keeps what it said");
    assert_eq!(shop.peer(server, &of_client), None, "no such flow there");
}

/// Another user's socket may have the same port at another address.
#[test]
fn a_name_is_of_one_socket_and_not_of_all_with_its_port() {
    let mut shop = shop(3);
    shop.publish(service("dns.shop").into(), UDP, 53, None);
    let own = ServiceId::at_host(shop.host_id(shop.client), 0x8000_0001);
    let host = Ranges::USUAL.host_v6();
    let elsewhere = SocketAddr::new("fd01::77".parse().expect("literal"), 4001);
    for (bound, is_named) in [(elsewhere, false), (SocketAddr::new(host.into(), 4001), true)] {
        let client = shop.client;
        shop.world.host(client).sal.set_source(UDP, bound, own, Arc::new(|_| true)).expect("room");
        let flow = shop.ask("dns.shop", 4001);
        assert_eq!(flow.source, is_named.then_some(own), "{bound}");
        shop.world.host(client).sal.forget_source(UDP, bound);
        shop.world.run_for(SECOND * 200);
    }
}

/// A container's packets may be translated to the port, or another program may have bound it since.
#[test]
fn what_another_socket_sends_from_the_port_has_no_name() {
    let mut shop = shop(3);
    shop.publish(service("dns.shop").into(), UDP, 53, None);
    let own = ServiceId::at_host(shop.host_id(shop.client), 0x8000_0001);
    for (port, is_its) in [(4001, true), (4002, false)] {
        let client = shop.client;
        let owner = Arc::new(move |app: &Tuple| is_its && app.source.port() == port);
        shop.world.host(client).sal.set_source(UDP, anywhere(port), own, owner).expect("room");
        assert_eq!(shop.ask("dns.shop", port).source, is_its.then_some(own));
    }
}

/// The host translates a container's datagrams to the very address of a socket that has a name.
#[test]
fn a_container_with_the_address_of_a_named_socket_has_not_its_name() {
    for is_direct in [false, true] {
        let mut shop = shop(3);
        shop.publish(service("dns.shop").into(), UDP, 53, None);
        let (client, server) = (shop.client, shop.server);
        for host in [client, server] {
            let now = shop.world.now;
            shop.world.host(host).set_direct(now, is_direct);
        }
        let own = ServiceId::at_host(shop.host_id(client), 0x8000_0001);
        [4001, 4002].into_iter().for_each(|port| shop.set_source(port, own));
        let from = |port| {
            let source = SocketAddr::new(Ranges::USUAL.host_v6().into(), port);
            Datagram::new(source, there("dns.shop"), b"forged")
        };
        shop.world.say_from_outside(client, &from(4001));
        shop.world.run_for(SECOND);
        let flow = shop.world.host(server).sal.flows().next().expect("a container has flows, too");
        assert_eq!((flow.source, shop.world.host(server).datagrams.len()), (None, 1));
        assert_eq!(shop.ask("dns.shop", 4002).source, Some(own));
        let given = shop.world.host(server).datagrams.len();
        shop.world.say_from_outside(client, &from(4002));
        shop.world.run_for(SECOND);
        let refused = shop.world.host(client).sal.counters().drops(DropReason::NotItsSocket);
        assert_eq!((shop.world.host(server).datagrams.len(), refused), (given, 1), "{is_direct}");
        shop.world.say(client, &from(4002));
        shop.world.run_for(SECOND);
        assert_eq!(shop.world.host(server).datagrams.len(), given + 1, "the socket's own goes on");
    }
}

#[test]
fn only_what_the_clients_host_may_say_is_believed() {
    let mut shop = shop(4);
    shop.publish(service("dns.shop").into(), UDP, 53, None);
    let (client, server) = (shop.host_id(shop.client), shop.host_id(shop.server));
    let authority = SigningKey::generate(&mut Rng::new([77; 32]));
    let anchor = TrustAnchor { authority: service("x.guests").authority(), key: authority.public() };
    shop.world.host(shop.server).sal.add_trust_anchor(anchor);
    let host_key = shop.world.host(shop.client).public_key();
    let chain = certificate::chain(CertificateKind::Member, Prefix::new(service("x.guests"), 64), host_key, &authority);
    shop.world.host(shop.client).sal.set_membership(chain);
    let mut cases = [
        (service("alice.guests"), true, "a member of its authority"),
        (service("alice.shop"), false, "not of that one"),
        (ServiceId::at_host(client, 9), true, "its host's own"),
        (ServiceId::at_host(server, 9), false, "another host's"),
        (ServiceId::default(), false, "nobody's"),
    ];
    cases[4].0.0[11] = 1;
    for (port, (claimed, is_believed, what)) in (4000..).zip(cases) {
        shop.set_source(port, claimed);
        let flow = shop.ask("dns.shop", port);
        let shown = if is_believed { claimed } else { ServiceId::at_host(client, port.into()) };
        assert_eq!(shop.peer(shop.server, &flow.app), Some(shown), "{what}");
        assert_eq!(flow.source.is_some(), is_believed, "{what}");
    }
}

#[test]
fn a_client_without_a_name_says_nothing_of_it() {
    let mut shop = shop(5);
    shop.publish(service("dns.shop").into(), UDP, 53, None);
    for (port, is_named) in [(4000, false), (4001, true)] {
        if is_named {
            let own = ServiceId::at_host(shop.host_id(shop.client), 1);
            shop.set_source(port, own);
        }
        shop.world.recording = Some(Vec::new());
        shop.ask("dns.shop", port);
        let sent = shop.world.recording.take().expect("recording");
        let messages = sent.iter().filter_map(|(_, _, bytes)| margay_wire::Message::parse(bytes).ok());
        let named: Vec<Kind> = messages.filter(|one| one.source_service().is_some()).map(|one| one.kind).collect();
        assert_eq!(!named.is_empty(), is_named);
        assert!(named.iter().all(|kind| *kind == Kind::Ack), "in the ACK alone, which is proved");
    }
}
