//! Sealed flows in virtual time: who gets one, who is refused, what is on the wire, and what an agent's new start does
//! to them.

use std::net::SocketAddr;
use std::time::Duration;

use margay_core::handover::HandoverRecord;
use margay_core::table::{Action, Allow, Demux, Rule};
use margay_core::{Cipher, Event, FlowInfo, Instant, Ranges, Why};
use margay_sim::host::Start;
use margay_sim::stream::Plan;
use margay_sim::world::service;
use margay_sim::{Datagram, HostId, Outcome, Weather, World};
use margay_wire::{DataRepr, Kind, STACK_ENCAP, is_sealed, kind_of};

const SECOND: Duration = Duration::from_secs(1);
const BOTH: &[Cipher] = &[Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];
const CHACHA: &[Cipher] = &[Cipher::ChaCha20Poly1305];
/// A version that does not know `secure`.
const OLD: &[Cipher] = &[];
const CHAT: Plan = Plan { write: 300, every: Duration::from_millis(20), writes: u32::MAX, closes: false };

struct Pair {
    world: World,
    server: HostId,
    client: HostId,
}

/// What each end has, and whether it demands `secure`.
fn pair(client: (&[Cipher], bool), server: (&[Cipher], bool)) -> Pair {
    let mut world = World::new(7, Weather::FAIR);
    let router = world.add_host(true);
    let (server_host, client_host) = (world.add_host(false), world.add_host(false));
    for (host, (ciphers, demands)) in [(server_host, server), (client_host, client)] {
        world.register(router, host);
        world.set_direct(host, true);
        world.host(host).sal.set_secure(ciphers, demands, Vec::new());
    }
    world.publish(router, server_host, "web.shop", 1);
    world.publish_streams(router, server_host, "talk.shop", CHAT);
    world.recording = Some(Vec::new());
    Pair { world, server: server_host, client: client_host }
}

impl Pair {
    /// One connection, twice: between strangers, and between hosts that have met.
    fn outcomes(&mut self) -> [Outcome; 2] {
        [(); 2].map(|()| {
            let client = self.world.connect(self.client, "web.shop");
            self.world.run_for(SECOND);
            self.world.host(self.client).clients[client].outcome
        })
    }

    fn flow(&mut self, host: HostId) -> FlowInfo {
        self.world.host(host).sal.flows().find(|flow| flow.peer_flow.0 != 0).expect("a flow")
    }

    /// Stacks of all DATA that was sent.
    fn stacks(&self) -> Vec<u8> {
        let sent = self.world.recording.iter().flatten();
        let mut stacks: Vec<u8> = sent.filter_map(|(_, _, bytes)| Some(DataRepr::parse(bytes).ok()?.stack)).collect();
        stacks.sort_unstable();
        stacks.dedup();
        stacks
    }

    fn why_failed(&mut self) -> String {
        let mut failed = self.world.host(self.client).events.iter().filter_map(|event| match event {
            Event::ConnectFailed { why, .. } => Some(why.clone()),
            _ => None,
        });
        failed.next().expect("a connect has failed")
    }

    fn refused(&self) -> u64 {
        self.world.hosts.iter().map(|host| host.cache.refused).sum()
    }

    /// Starts a host's agent again: on the same boot with what it has kept.
    fn restart(&mut self, host: HostId, epoch: u32) {
        let now = self.world.now;
        let old = self.world.host(host);
        let flows: Vec<_> = old.sal.flows().map(|flow| flow.flow).collect();
        let records: Vec<HandoverRecord> = flows.iter().filter_map(|flow| old.sal.export_flow(now, *flow)).collect();
        let records: Vec<_> =
            records.iter().map(|record| HandoverRecord::decode(&record.encode()).expect("whole")).collect();
        let kept = old.sal.keep_associations();
        let (streams, address, key_seed) = (std::mem::take(&mut old.streams), old.address, old.key_seed());
        self.world.start_host(host, address, Start { key_seed, epoch, boot: 1, router: false, ranges: Ranges::USUAL });
        let new = self.world.host(host);
        new.streams = streams;
        new.sal.set_secure(BOTH, false, Vec::new());
        new.sal.take_up_associations(now, &kept).expect("kept whole");
        for record in &records {
            new.sal.adopt_flow(now, record).expect("adopted");
        }
        new.sal.forget_superseded();
        // Whatever is asked of it lets it say what it has to.
        self.world.set_direct(host, true);
    }

    fn forget_waits(&mut self) {
        let now = self.world.now;
        for host in &mut self.world.hosts {
            host.streams.iter_mut().for_each(|stream| stream.forget_waits(now));
        }
    }

    /// No byte wrong, no reset, no wait longer than `wait`.
    fn check(&self, wait: Duration) {
        for stream in self.world.hosts.iter().flat_map(|host| &host.streams) {
            assert!(!stream.was_wrong && !stream.was_reset, "wrong or reset");
            let longest = stream.longest_wait(self.world.now);
            assert!(longest <= wait, "a stream waited {longest:?}");
        }
    }
}

#[test]
fn whichever_end_demands_it_the_flow_is_sealed_with_the_best_that_both_have() {
    let (aes, chacha) = (Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305);
    for (client, server, cipher) in [(BOTH, BOTH, aes), (BOTH, CHACHA, chacha), (CHACHA, BOTH, chacha)] {
        for (client_demands, server_demands) in [(true, false), (false, true), (true, true)] {
            let mut pair = pair((client, client_demands), (server, server_demands));
            assert_eq!(pair.outcomes(), [Outcome::Answered(1); 2]);
            assert_eq!(pair.stacks(), [cipher.stack()], "no DATA is carried otherwise");
            for host in [pair.client, pair.server] {
                let flow = pair.flow(host);
                assert_eq!((flow.secure, flow.why), (Some(cipher), Why::Secure));
                assert!(!flow.carriage.sends());
            }
            assert_eq!(pair.refused(), 0);
        }
    }
}

#[test]
fn nobody_demands_it_and_nothing_is_sealed() {
    let mut pair = pair((BOTH, false), (BOTH, false));
    assert_eq!(pair.outcomes(), [Outcome::Answered(1); 2]);
    assert_eq!(pair.flow(pair.client).secure, None);
    assert_eq!(pair.stacks(), [STACK_ENCAP]);
}

#[test]
fn a_name_may_demand_it_for_itself() {
    for at_client in [true, false] {
        let mut pair = pair((BOTH, false), (BOTH, false));
        let host = if at_client { pair.client } else { pair.server };
        pair.world.host(host).sal.set_secure(BOTH, false, vec![service("web.shop").into()]);
        assert_eq!(pair.outcomes(), [Outcome::Answered(1); 2]);
        assert_eq!(pair.flow(pair.client).secure, Some(Cipher::Aes256Gcm));
        let stream = pair.world.connect_stream(pair.client, "talk.shop", CHAT);
        pair.world.run_for(SECOND);
        assert_eq!(pair.world.host(pair.client).flow_of(stream).and_then(|flow| flow.secure), None);
    }
}

#[test]
fn an_older_version_at_the_other_end_is_refused_at_once_and_in_words() {
    for (client, server) in [((BOTH, true), (OLD, false)), ((OLD, false), (BOTH, true))] {
        let mut pair = pair(client, server);
        assert_eq!(pair.outcomes(), [Outcome::Refused; 2], "{client:?} {server:?}");
        let why = pair.why_failed();
        assert!(why.contains("secure") && why.contains("same version"), "{why}");
        assert!(pair.stacks().is_empty(), "and nothing is carried");
        pair.world.run_for(SECOND * 10);
        for host in [pair.client, pair.server] {
            assert_eq!(pair.world.host(host).sal.flow_count(), 0, "no half is left");
        }
    }
}

/// Changes the STACK extension of SYNs on their way: to nothing that anybody reads.
fn without_stack(bytes: &[u8]) -> Option<Vec<u8>> {
    let at = bytes.windows(8).position(|window| window[..4] == [0x8c, 0, 0, 4])?;
    let mut changed = bytes.to_vec();
    // A type that nobody knows, and that may be skipped.
    changed[at] = 0x7e;
    Some(changed)
}

#[test]
fn a_syn_that_was_changed_on_its_way_does_not_make_the_flow_plain() {
    let mut pair = pair((BOTH, true), (BOTH, false));
    // They have met, so that the answer needs no handshake that covers the SYN.
    assert_eq!(pair.outcomes(), [Outcome::Answered(1); 2]);
    pair.world.recording = Some(Vec::new());
    // Every SYN from now on is lost, and its changed copy comes instead.
    let (client_address, router) = (pair.world.host(pair.client).address, pair.world.hosts[0].address);
    pair.world.network.cut(client_address, router);
    let client = pair.world.connect(pair.client, "web.shop");
    let mut changed = 0;
    for _ in 0..20 {
        pair.world.run_for(Duration::from_millis(50));
        let sent = std::mem::take(pair.world.recording.as_mut().expect("recording"));
        let syns =
            sent.iter().filter(|(from, _, bytes)| from.ip() == client_address && kind_of(bytes) == Ok(Kind::Syn));
        for (from, to, bytes) in syns {
            changed += 1;
            pair.world.inject(*from, *to, without_stack(bytes).expect("it demands it"));
        }
    }
    assert!(changed > 0);
    assert_eq!(pair.world.host(pair.client).clients[client].outcome, Outcome::Refused);
    assert!(pair.why_failed().contains("secure"));
}

#[test]
fn what_is_seen_again_or_changed_is_not_taken() {
    let mut pair = pair((BOTH, true), (BOTH, false));
    let stream = pair.world.connect_stream(pair.client, "talk.shop", CHAT);
    pair.world.run_for(SECOND);
    assert!(pair.world.host(pair.client).flow_of(stream).is_some());
    let sent = std::mem::take(pair.world.recording.as_mut().expect("recording"));
    let sealed: Vec<_> =
        sent.iter().filter(|(_, _, bytes)| DataRepr::parse(bytes).is_ok_and(|data| is_sealed(data.stack))).collect();
    assert!(sealed.len() > 50, "{}", sealed.len());
    for (at, (from, to, bytes)) in sealed.iter().enumerate() {
        let mut changed = bytes.clone();
        let byte = at % changed.len();
        // The flowID would lead to nobody.
        if !(4..8).contains(&byte) {
            changed[byte] ^= 0x40;
        }
        pair.world.inject(*from, *to, bytes.clone());
        pair.world.inject(*from, *to, changed);
        // The same as if it were not sealed.
        let mut plain = bytes.clone();
        plain[2] = STACK_ENCAP;
        pair.world.inject(*from, *to, plain);
    }
    pair.world.run_for(SECOND);
    assert!(pair.refused() as usize >= sealed.len() * 2, "{} of {}", pair.refused(), sealed.len());
    pair.check(Duration::from_millis(300));
}

#[test]
fn forgotten_caches_use_no_number_twice() {
    let mut pair = pair((BOTH, true), (BOTH, false));
    pair.world.connect_stream(pair.client, "talk.shop", CHAT);
    for _ in 0..30 {
        pair.world.run_for(Duration::from_millis(100));
        for host in [pair.client, pair.server] {
            pair.world.host(host).cache.clear();
        }
    }
    assert_eq!(pair.refused(), 0, "the peer would take a number only once");
    pair.check(Duration::from_millis(300));
    let numbers: Vec<_> = pair
        .world
        .recording
        .iter()
        .flatten()
        .filter_map(|(from, _, bytes)| {
            DataRepr::parse(bytes).ok().map(|data| (*from, data.dst_flow, data.packet_number))
        })
        .collect();
    let once: std::collections::BTreeSet<_> = numbers.iter().collect();
    assert_eq!(once.len(), numbers.len());
}

#[test]
fn sealed_flows_outlive_the_agents_under_new_keys() {
    for restarted in [&[0][..], &[1], &[0, 1], &[0, 0, 1], &[0, 1, 0, 1, 1]] {
        let mut pair = pair((BOTH, true), (BOTH, false));
        let stream = pair.world.connect_stream(pair.client, "talk.shop", CHAT);
        pair.world.run_for(SECOND * 2);
        pair.check(Duration::from_millis(300));
        for (turn, which) in (2..).zip(restarted) {
            let host = [pair.client, pair.server][*which];
            // They meet once more, as a router and a host do at each start: the flow keeps its own association.
            pair.world.register(pair.server, pair.client);
            assert!(pair.world.host(host).sal.associations().count() > 2);
            pair.restart(host, turn);
            pair.forget_waits();
            pair.world.run_for(SECOND * 3);
            pair.check(SECOND);
            assert!(pair.world.host(pair.client).flow_of(stream).is_some_and(|flow| flow.secure.is_some()));
        }
        let before = pair.refused();
        pair.world.run_for(SECOND * 2);
        assert_eq!(pair.refused(), before, "both ends know both epochs");
    }
}

#[test]
fn both_agents_start_again_at_once_and_their_words_are_lost() {
    let mut pair = pair((BOTH, true), (BOTH, false));
    pair.world.connect_stream(pair.client, "talk.shop", CHAT);
    pair.world.run_for(SECOND * 2);
    let (client, server) = (pair.world.host(pair.client).address, pair.world.host(pair.server).address);
    pair.world.network.cut(client, server);
    let (one, other) = (pair.client, pair.server);
    pair.restart(one, 4);
    pair.restart(other, 3);
    pair.world.run_for(SECOND);
    // What they told each other at their start is lost; data that nobody can open makes them say it again.
    pair.world.network.heal();
    pair.world.run_for(SECOND * 5);
    pair.forget_waits();
    let before = pair.refused();
    pair.world.run_for(SECOND * 2);
    pair.check(SECOND);
    assert_eq!(pair.refused(), before);
}

#[test]
fn what_was_sent_before_a_start_is_not_taken_after_it() {
    let mut pair = pair((BOTH, true), (BOTH, false));
    pair.world.connect_stream(pair.client, "talk.shop", CHAT);
    pair.world.run_for(SECOND * 2);
    let sent = std::mem::take(pair.world.recording.as_mut().expect("recording"));
    pair.restart(pair.server, 2);
    pair.world.run_for(SECOND * 2);
    let to_server = pair.world.host(pair.server).address;
    let before = pair.refused();
    let mut replayed = 0;
    for (from, to, bytes) in sent.iter().filter(|(_, to, _)| to.ip() == to_server) {
        if DataRepr::parse(bytes).is_ok_and(|data| is_sealed(data.stack)) {
            replayed += 1;
            pair.world.inject(*from, *to, bytes.clone());
        }
    }
    pair.world.run_for(Duration::from_millis(10));
    assert!(replayed > 20);
    assert!(pair.refused() - before >= replayed, "{} of {replayed}", pair.refused() - before);
}

#[test]
fn a_sealed_flow_needs_the_very_association() {
    let mut pair = pair((BOTH, true), (BOTH, false));
    let stream = pair.world.connect_stream(pair.client, "talk.shop", CHAT);
    pair.world.run_for(SECOND);
    let now = pair.world.now;
    let id = pair.world.host(pair.client).flow_of(stream).expect("a flow").flow;
    let mut record = pair.world.host(pair.client).sal.export_flow(now, id).expect("a record");
    let keys = record.legs[1].keys.as_mut().expect("keys");
    keys.association ^= 1;
    let kept = pair.world.host(pair.client).sal.keep_associations();
    let (address, key_seed) = (pair.world.host(pair.client).address, pair.world.host(pair.client).key_seed());
    pair.world.start_host(
        pair.client,
        address,
        Start { key_seed, epoch: 2, boot: 1, router: false, ranges: Ranges::USUAL },
    );
    let sal = &mut pair.world.host(pair.client).sal;
    sal.set_secure(BOTH, false, Vec::new());
    sal.take_up_associations(Instant::ZERO, &kept).expect("whole");
    assert!(sal.adopt_flow(now, &record).is_err());
    record.legs[1].keys.as_mut().expect("keys").association ^= 1;
    assert_eq!(sal.adopt_flow(now, &record), Ok(()));
}

const SECRET: &[u8] = b"for the server's eyes alone";

/// One host asks another in a datagram; gives what the server heard, and how often what it says was to be read on the
/// wire.
fn ask(client: (&[Cipher], bool), server: (&[Cipher], bool)) -> (Vec<Vec<u8>>, usize) {
    let mut pair = pair(client, server);
    let listener = "[::]:53".parse().expect("an address");
    let demux = Demux {
        listener,
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: Some(17),
        allow: Allow::Any,
    };
    let rule = Rule { priority: 100, weight: 1, action: Action::Demux(demux) };
    let name = service("ask.shop");
    let (address, key) = (pair.world.host(pair.server).address, pair.world.host(pair.server).public_key());
    pair.world.host(pair.server).sal.add_rule(Instant::ZERO, name.into(), rule).expect("room");
    pair.world.hosts[0].forward(name.into(), address, Some(key));
    let own = SocketAddr::new(Ranges::USUAL.host_v6().into(), 4000);
    let to = SocketAddr::new(Ranges::USUAL.virtual_v6(&name).into(), 53);
    for _ in 0..3 {
        pair.world.say(pair.client, &Datagram::new(own, to, SECRET));
        pair.world.run_for(SECOND);
    }
    let heard = pair.world.host(pair.server).datagrams.iter().map(|datagram| datagram.data.clone()).collect();
    let is_readable = |bytes: &[u8]| bytes.windows(SECRET.len()).any(|window| window == SECRET);
    let readable = pair.world.recording.iter().flatten().filter(|(_, _, bytes)| is_readable(bytes)).count();
    (heard, readable)
}

#[test]
fn not_even_the_first_datagram_is_to_be_read_where_the_client_demands_it() {
    assert_eq!(ask((BOTH, true), (BOTH, false)), (vec![SECRET.to_vec(); 3], 0));
    // A client that is not told shows its first one, to the router and to the server; which takes the sealed copy
    // alone.
    assert_eq!(ask((BOTH, false), (BOTH, true)), (vec![SECRET.to_vec(); 3], 2));
    let (heard, readable) = ask((BOTH, false), (BOTH, false));
    assert!(heard.len() == 3 && readable > 3, "{readable}");
}

#[test]
fn a_sealed_flow_moves_with_its_hosts() {
    let mut pair = pair((BOTH, true), (BOTH, false));
    let stream = pair.world.connect_stream(pair.client, "talk.shop", CHAT);
    pair.world.run_for(SECOND * 2);
    for (turn, host) in (1_u8..).zip([pair.client, pair.server, pair.client]) {
        pair.forget_waits();
        pair.world.set_addresses(host, vec![[10, 7, 0, turn].into()]);
        pair.world.run_for(SECOND * 3);
        pair.check(SECOND);
        let flow = pair.world.host(pair.client).flow_of(stream).expect("a flow");
        assert_eq!((flow.secure, flow.moves), (Some(Cipher::Aes256Gcm), turn.into()));
    }
    assert_eq!(pair.stacks(), [Cipher::Aes256Gcm.stack()]);
    pair.restart(pair.server, 2);
    pair.forget_waits();
    pair.world.run_for(SECOND * 3);
    pair.check(SECOND);
}
