//! Strangers who make themselves known in numbers, with a key of their own each time: what a host keeps of them, and
//! who gets in beside them.

use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use margay_core::keepsake::KEEPSAKE_LEN;
use margay_core::key::HostSecret;
use margay_core::rng::Rng;
use margay_core::table::Allow;
use margay_core::{Config, DropReason, Limits, Output, Sal};
use margay_sim::world::service;
use margay_sim::{HostId, Outcome, Weather, World};
use margay_wire::{Kind, PORT};

const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const NAME: &str = "web.shop";
/// What a host keeps of strangers at one address (a /64), and in one network (a /48).
const PER_ADDRESS: usize = 64;
const PER_NETWORK: usize = 256;
/// Greetings that one address may send at once, and as many again with cookies.
const AT_ONCE: usize = 2 * 32;

/// A key that nobody has met, and where it is.
struct Stranger {
    sal: Sal,
    at: SocketAddr,
}

impl Stranger {
    fn new(world: &mut World, number: u32, at: SocketAddr, server: SocketAddr) -> Self {
        let mut seed = [9; 32];
        seed[..4].copy_from_slice(&number.to_be_bytes());
        let config = Config {
            host_key: HostSecret::generate(&mut Rng::new(seed)),
            epoch: 1,
            boot_id: seed[..16].try_into().expect("sixteen of thirty-two"),
            router: false,
            datagram_max: 1472,
            local_addresses: vec![at.ip()],
            ranges: margay_core::Ranges::USUAL,
            limits: Limits::default(),
        };
        let mut sal = Sal::new(config, world.now, 1_800_000_000, seed);
        sal.greet(world.now, server).expect("room");
        Self { sal, at }
    }

    /// What it sends now.
    fn says(&mut self) -> Vec<Vec<u8>> {
        let (mut said, mut buf) = (Vec::new(), vec![0; 65_536]);
        while let Some(output) = self.sal.poll(&mut buf) {
            if let Output::Transmit { len, .. } = output {
                said.push(buf[..len].to_vec());
            }
        }
        said
    }
}

/// A server, and somebody honest who knows where it is.
fn shop() -> (World, HostId, HostId) {
    let mut world = World::new(1, Weather::FAIR);
    let (server, client) = (world.add_host(false), world.add_host(false));
    let v4 = world.host(server).address;
    world.set_addresses(server, vec![v4, v6(0xfff, 0, 1).ip()]);
    world.host(server).serve(service(NAME), 80, 1, Allow::Any);
    let (address, key) = (world.host(server).address, world.host(server).public_key());
    world.host(client).forward(service(NAME).into(), address, Some(key));
    (world, server, client)
}

/// Does all that it takes to be known to `server`; no time passes. Gives whether it is.
fn greet(world: &mut World, server: HostId, number: u32, at: SocketAddr) -> bool {
    let own = world.host(server).addresses.iter().copied().find(|own| own.is_ipv4() == at.is_ipv4());
    let to = SocketAddr::new(own.expect("it has both"), PORT);
    let mut stranger = Stranger::new(world, number, at, to);
    let mut is_known = false;
    // SYN, perhaps the SYN with a cookie, ACK.
    for _ in 0..3 {
        for said in stranger.says() {
            let now = world.now;
            world.recording = Some(Vec::new());
            // Counted by the core, and judged by what it keeps.
            let _ = world.host(server).sal.handle_datagram(now, None, stranger.at, &said);
            world.touch(server);
            for (_, _, answer) in world.recording.take().expect("recording").into_iter().filter(|(_, to, _)| *to == at)
            {
                is_known |= margay_wire::kind_of(&answer) == Ok(Kind::SynAck);
                let _ = stranger.sal.handle_datagram(now, None, to, &answer);
            }
        }
    }
    is_known
}

fn v6(network: u16, link: u16, host: u16) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::from([0x2001, 0xdb8, network, link, 0, 0, 0, host]).into(), PORT)
}

fn kept(world: &mut World, server: HostId) -> usize {
    world.host(server).sal.association_count()
}

fn gets_in_at_once(world: &mut World, client: HostId) {
    let cookies = world.host(HostId(0)).sal.counters().cookies_sent;
    let connected = world.connect(client, NAME);
    world.run_for(100 * MILLISECOND);
    assert_eq!(world.host(client).clients[connected].outcome, Outcome::Answered(1));
    assert_eq!(world.host(HostId(0)).sal.counters().cookies_sent, cookies, "nobody at its address was noisy");
}

#[test]
fn a_strangers_many_addresses_are_one_and_its_rate_is_bounded() {
    let (mut world, server, client) = shop();
    let known = (0..300).filter(|n| greet(&mut world, server, u32::from(*n), v6(1, 1, *n))).count();
    assert_eq!(known, AT_ONCE);
    assert_eq!(kept(&mut world, server), PER_ADDRESS.min(AT_ONCE));
    assert!(world.host(server).sal.counters().drops(DropReason::RateLimited) > 0);
    assert_eq!(world.host(server).sal.half_open_count(), 0);
    gets_in_at_once(&mut world, client);
}

#[test]
fn a_port_for_each_key_takes_no_more_places() {
    let (mut world, server, client) = shop();
    for n in 0..200 {
        // Within its rate.
        world.run_for(40 * MILLISECOND);
        let at = SocketAddr::new([203, 0, 113, 1].into(), 1000 + n);
        assert!(greet(&mut world, server, n.into(), at));
        assert!(kept(&mut world, server) <= PER_ADDRESS);
    }
    assert_eq!(kept(&mut world, server), PER_ADDRESS);
    assert_eq!(world.host(server).sal.counters().associations_displaced, 200 - PER_ADDRESS as u64);
    gets_in_at_once(&mut world, client);
}

#[test]
fn the_links_of_one_network_have_a_share_and_who_came_before_keeps_its_place() {
    let (mut world, server, client) = shop();
    gets_in_at_once(&mut world, client);
    world.run_for(10 * SECOND);
    let before = kept(&mut world, server);
    for n in 0..400 {
        world.run_for(10 * MILLISECOND);
        assert!(greet(&mut world, server, n.into(), v6(7, n, 1)));
    }
    assert_eq!(kept(&mut world, server), before + PER_NETWORK);
    let met = world.host(server).sal.counters().messages_received(Kind::Ack);
    gets_in_at_once(&mut world, client);
    let acks = world.host(server).sal.counters().messages_received(Kind::Ack) - met;
    assert_eq!((acks, kept(&mut world, server)), (1, before + PER_NETWORK), "they knew each other");
}

#[test]
fn whom_nothing_needs_is_forgotten_in_time() {
    let (mut world, server, _) = shop();
    for n in 0..20 {
        assert!(greet(&mut world, server, n.into(), v6(n, 1, 1)));
    }
    assert_eq!(kept(&mut world, server), 20);
    world.run_for(60 * SECOND);
    assert_eq!(kept(&mut world, server), 20);
    world.run_for(80 * SECOND);
    assert_eq!(kept(&mut world, server), 0);
    assert_eq!(world.host(server).sal.counters().associations_expired, 20);
}

#[test]
fn strangers_have_nothing_written_and_a_flow_has() {
    let (mut world, server, client) = shop();
    world.host(server).sal.take_kept_news();
    for n in 0..300 {
        assert!(greet(&mut world, server, n.into(), v6(n, 1, 1)));
    }
    assert_eq!(kept(&mut world, server), 300);
    assert!(!world.host(server).sal.take_kept_news());
    assert_eq!(world.host(server).sal.keep_associations().len(), 256 * KEEPSAKE_LEN);
    world.connect(client, NAME);
    let is_news = |world: &mut World| {
        world.run_for(MILLISECOND);
        world.host(server).sal.take_kept_news()
    };
    assert!((0..200).any(|_| is_news(&mut world)), "a flow needs one");
    assert_eq!(world.host(server).sal.keep_associations().len(), 257 * KEEPSAKE_LEN);
}
