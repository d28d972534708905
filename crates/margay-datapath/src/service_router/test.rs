//! The program by test run, beside the core that it stands for: one packet for both, and what they send must be the
//! same bytes. They need root; without it they say so and pass.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use libbpf_rs::{MapCore, MapFlags, ProgramInput};
use margay_core::key::{HostId, HostSecret};
use margay_core::name::{Prefix, ServiceId};
use margay_core::output::Output;
use margay_core::rng::Rng;
use margay_core::table::{Action, Allow, Demux, NextHop, Rule, RuleId};
use margay_core::time::Instant;
use margay_core::{AssociationSetup, Config, DropReason, Limits, Ranges, Sal};
use margay_wire::{
    Extension, Flags, FlowId, Kind, MessageWriter, NextProtocol, PORT, ResolvableRepr, SessionId, SessionRepr,
};

use super::layout::{self, hop};
use super::{ServiceRouter, Way};
use crate::checksum::{fold, sum};
use crate::clock;
use crate::kernel::plain::Plain;
use crate::packet::UDP;
use crate::sample::{self, Checksum};

const ETHERNET: usize = 14;
const DROP: u32 = 1;
pub(super) const PASS: u32 = 2;
pub(super) const TX: u32 = 3;
const REDIRECT: u32 = 4;
/// Numbers of next hops that tests come to.
const NUMBERS: u32 = 256;
/// Index of the loopback, where test runs arrive.
const HERE: u32 = 1;
const MTU: u32 = 1500;
const REMOTE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const LOCAL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

pub(super) fn address(text: &str) -> SocketAddr {
    text.parse().expect("literal")
}

pub(super) fn own(v4: bool) -> SocketAddr {
    address(if v4 { "10.1.0.1:54324" } else { "[fd01::1]:54324" })
}

/// Where the n-th neighbour is.
pub(super) fn place(n: u8, v4: bool) -> SocketAddr {
    if v4 {
        SocketAddr::new([10, 1, 0, n].into(), PORT)
    } else {
        SocketAddr::new([0xfd01, 0, 0, 0, 0, 0, 0, n.into()].into(), PORT)
    }
}

fn hop_key(n: u8) -> [u8; 16] {
    std::array::from_fn(|at| n.wrapping_mul(17) ^ at as u8)
}

fn neighbour(n: u8) -> HostSecret {
    HostSecret::from_bytes([n; 32])
}

/// A router's core, and the program that follows it.
pub(super) struct Rig {
    pub router: ServiceRouter,
    pub sal: Sal,
    pub now: Instant,
}

impl Rig {
    /// `None` without root.
    fn new() -> Option<Self> {
        Self::of_size(1 << 10)
    }

    /// For so many rules.
    pub fn of_size(rules_max: u32) -> Option<Self> {
        if !nix::unistd::Uid::effective().is_root() {
            eprintln!("skipped: eBPF needs root");
            return None;
        }
        let now = clock::now();
        let config = Config {
            host_key: neighbour(1),
            epoch: 1,
            boot_id: [1; 16],
            router: true,
            datagram_max: 1472,
            local_addresses: vec![own(true).ip(), own(false).ip()],
            ranges: Ranges::USUAL,
            limits: Limits { answers_per_s: 1_000_000, ..Limits::default() },
        };
        let mut sal = Sal::new(config, now, 1_700_000_000, [7; 32]);
        sal.follow_routes();
        let router = ServiceRouter::open(PORT, rules_max).expect("the verifier takes it");
        router.set_own_addresses(&[own(true).ip(), own(false).ip()]);
        Some(Self { router, sal, now })
    }

    /// Shares a hop key with the n-th neighbour.
    fn meet(&mut self, n: u8, v4: bool) -> HostId {
        let host_key = neighbour(n).public();
        let setup = AssociationSetup {
            host_key: host_key.0,
            key: [n; 32],
            local_id: 1000 + u32::from(n),
            remote_id: 2000 + u32::from(n),
            peer_epoch: 1,
            boot_id: None,
            remote: place(n, v4),
            hop_key: Some(hop_key(n)),
            router: true,
            initiator: false,
        };
        self.sal.install_association(self.now, setup);
        host_key.id()
    }

    pub fn rule(&mut self, prefix: Prefix, priority: u32, weight: u32, action: Action) -> RuleId {
        self.sal.add_rule(self.now, prefix, Rule { priority, weight, action }).expect("room")
    }

    /// Brings the program up to date; its next hops have been looked after just now.
    pub fn sync(&mut self) {
        let mut told = 0;
        let mut buffer = vec![0; 65_536];
        while let Some(output) = self.sal.poll(&mut buffer) {
            told += u32::from(output == Output::Routes);
        }
        assert!(told <= 1, "said once, until it is asked for");
        self.router.take_hop_keys(&self.sal.take_hop_key_changes(4096));
        self.router.take_routes(&self.sal.take_route_changes(4096));
        self.find_ways(HERE);
        assert_eq!(self.router.failure(), None);
    }

    /// The same where no next hop is new.
    pub fn sync_routes(&mut self) {
        self.router.take_routes(&self.sal.take_route_changes(4096));
    }

    fn find_ways(&self, ifindex: u32) {
        self.router.find_ways(true, |remote| {
            let local = own(remote.is_ipv4()).ip();
            Some(Way { local, ifindex, mtu: MTU, local_mac: LOCAL_MAC, remote_mac: REMOTE_MAC })
        });
        self.look_after(clock::now().micros() * 1000);
    }

    fn look_after(&self, at_ns: u64) {
        let hops = &self.router.maps.hops;
        for number in 0..NUMBERS {
            let key = number.to_ne_bytes();
            let bytes = hops.lookup(&key, MapFlags::ANY).expect("a map").expect("its own key");
            let changed = hop { checked_ns: at_ns, ..hop::read(&bytes).expect("a whole record") };
            hops.update(&key, changed.bytes(), MapFlags::ANY).expect("room");
        }
    }

    /// Verdict, and the frame that came out.
    fn run(&self, frame: &[u8]) -> (u32, Vec<u8>) {
        run_on(&self.router, frame)
    }

    /// The same of the programs for packets in buffers, in XDP's words.
    fn run_buffer(&self, frame: &[u8]) -> (u32, Vec<u8>) {
        let skeleton = self.router.skeleton.lock();
        let (verdict, out) = run(&skeleton.progs.find_buffer, frame);
        let verdict = match verdict.cast_signed() {
            -1 => PASS,
            2 => DROP,
            7 => TX,
            other => panic!("verdict {other}"),
        };
        (verdict, out)
    }

    pub fn counted(&self) -> Vec<&'static str> {
        self.router.counters().into_iter().filter(|(_, count)| *count > 0).map(|(name, _)| name).collect()
    }

    /// What the core does with the datagram: why it dropped it, or what it sends where.
    fn core(&mut self, from: SocketAddr, datagram: &[u8]) -> (Option<DropReason>, Vec<(SocketAddr, Vec<u8>)>) {
        let local = own(from.is_ipv4()).ip();
        let result = self.sal.handle_datagram(self.now, Some(local), from, datagram);
        let (mut buffer, mut sent) = (vec![0; 65_536], Vec::new());
        while let Some(output) = self.sal.poll(&mut buffer) {
            if let Output::Transmit { to, len, .. } = output {
                sent.push((to, buffer[..len].to_vec()));
            }
        }
        (result.err(), sent)
    }

    /// Gives a datagram to both. What the program decides the core must have decided alike; what it leaves it must not
    /// have touched.
    pub fn compare(&mut self, from: SocketAddr, datagram: &[u8]) -> u32 {
        let frame = frame(from, own(from.is_ipv4()), datagram, Checksum::Complete);
        let (in_buffer, from_buffer) = self.run_buffer(&frame);
        let (verdict, out) = self.run(&frame);
        assert_eq!(in_buffer, if verdict == REDIRECT { TX } else { verdict });
        assert!(verdict == DROP || from_buffer == out, "wherever it is decided upon, it is decided alike");
        let (dropped, sent) = self.core(from, datagram);
        match verdict {
            PASS => assert_eq!(out, frame, "what is left to the agent is as it came"),
            DROP => assert!(matches!(dropped, Some(DropReason::HopLimit | DropReason::ServiceDrop)), "{dropped:?}"),
            TX | REDIRECT => {
                assert_eq!(out[..12], [REMOTE_MAC, LOCAL_MAC].concat());
                let seen = sample::see(&out[ETHERNET..]);
                assert_eq!((seen.tuple.source, seen.hop_limit), (own(from.is_ipv4()), 64));
                assert_eq!(vec![(seen.tuple.destination, seen.payload)], sent);
            }
            other => panic!("verdict {other}"),
        }
        verdict
    }
}

/// Verdict, and the frame that came out.
pub(super) fn run_on(router: &ServiceRouter, frame: &[u8]) -> (u32, Vec<u8>) {
    run(&router.skeleton.lock().progs.route_frame, frame)
}

fn run(program: &libbpf_rs::ProgramMut<'_>, frame: &[u8]) -> (u32, Vec<u8>) {
    let mut out = vec![0; 4096];
    let input = ProgramInput { data_in: Some(frame), data_out: Some(&mut out), ..Default::default() };
    let result = program.test_run(input).expect("a run");
    (result.return_value, result.data.expect("bytes out").to_vec())
}

pub(super) fn frame(from: SocketAddr, to: SocketAddr, payload: &[u8], checksum: Checksum) -> Vec<u8> {
    let tuple = margay_core::Tuple { protocol: UDP, source: from, destination: to };
    let packet = sample::packet(tuple, 0, payload, checksum);
    let ethertype = if from.is_ipv4() { [8, 0] } else { [0x86, 0xdd] };
    [&[2; 12][..], &ethertype, &packet].concat()
}

/// A first packet, and what a test may want otherwise.
#[derive(Clone)]
pub(super) struct Syn {
    pub service: ServiceId,
    pub nonce: u64,
    flow: u32,
    dst_flow: u32,
    flags: Flags,
    protocol: u8,
    hop_limit: u8,
    reply_to: Option<SocketAddr>,
    via: Option<SocketAddr>,
    len: usize,
    /// Tagged as the n-th neighbour does.
    tag: Option<u8>,
    session_first: bool,
}

impl Syn {
    pub fn to(service: ServiceId) -> Self {
        Self {
            service,
            nonce: 0x0123_4567_89ab_cdef,
            flow: 0xfeed_0001,
            dst_flow: 0,
            flags: Flags::RESOLVABLE,
            protocol: 6,
            hop_limit: 16,
            reply_to: None,
            via: None,
            len: 1200,
            tag: None,
            session_first: true,
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut buffer = vec![0; 4096];
        let (dst_flow, flow) = (FlowId(self.dst_flow), FlowId(self.flow));
        let mut writer = MessageWriter::new(&mut buffer, Kind::Syn, dst_flow, flow, 0);
        writer.flags(self.flags);
        let resolvable = ResolvableRepr {
            hop_limit: self.hop_limit,
            reply_to: self.reply_to,
            via: self.via,
            service: self.service.0,
            nonce: self.nonce,
            hop_tag: [0x5a; 8],
        };
        writer.resolvable(&resolvable).expect("room");
        let session = Extension::Session(SessionRepr {
            session: SessionId([9; 16]),
            client: address("192.0.2.7:4000"),
            service_port: 80,
            protocol: self.protocol,
        });
        let source = Extension::SourceService([3; 32]);
        let extensions = if self.session_first { [session, source] } else { [source, session] };
        for extension in &extensions {
            writer.extension(extension).expect("room");
        }
        writer.payload(NextProtocol::Ipv4, &[0xab; 60]).expect("room");
        writer.pad_to(self.len);
        let len = writer.finish().expect("whole");
        buffer.truncate(len);
        if let Some(n) = self.tag {
            let tag = margay_core::hop::hop_tag(&hop_key(n), &buffer[..margay_wire::HOP_TAGGED_LEN]);
            buffer[margay_wire::HOP_TAGGED_LEN..margay_wire::HOP_TAGGED_LEN + 8].copy_from_slice(&tag);
        }
        buffer
    }
}

pub(super) const SERVICE: ServiceId = ServiceId([0x77; 32]);

pub(super) fn forward(n: u8, v4: bool, host: Option<HostId>) -> Action {
    Action::Forward(NextHop { address: place(n, v4), host, router: false })
}

/// A program with one rule for everything.
fn rig(v4: bool) -> Option<(Rig, RuleId)> {
    let mut rig = Rig::new()?;
    let host = rig.meet(20, v4);
    let rule = rig.rule(Prefix::default(), 1, 1, forward(20, v4, Some(host)));
    rig.sync();
    Some((rig, rule))
}

#[test]
fn the_layouts_are_of_one_mind() {
    let Some(rig) = Rig::new() else { return };
    let skeleton = rig.router.skeleton.lock();
    assert_eq!(layout::route_lengths::default().of.len(), super::copy::LENGTHS_MAX);
    let counters = skeleton.maps.counters.max_entries() as usize;
    assert_eq!(counters, layout::COUNTERS.len());
}

#[test]
fn a_first_router_says_who_asks_and_tags_the_hop() {
    for v4 in [true, false] {
        let Some((mut rig, rule)) = rig(v4) else { return };
        let from = SocketAddr::new(place(50, v4).ip(), 40_000);
        assert_eq!(rig.compare(from, &Syn::to(SERVICE).bytes()), TX);
        assert_eq!(rig.compare(from, &Syn { flags: Flags::RESOLVABLE | Flags::FULL, ..Syn::to(SERVICE) }.bytes()), TX);
        assert_eq!(rig.counted(), ["forwarded"]);
        let usage = rig.router.usage(rule);
        assert_eq!((usage.packets, rig.router.forwarded()), (4, 4), "by each of the two programs");
        assert!(usage.last.is_some_and(|last| last <= clock::now() && last > Instant::ZERO));
        assert_eq!(rig.router.usage(RuleId(99)).packets, 0);
    }
}

#[test]
fn a_later_router_believes_a_right_tag_alone() {
    for v4 in [true, false] {
        let Some((mut rig, _)) = rig(v4) else { return };
        rig.meet(30, v4);
        rig.sync();
        let asks = Some(SocketAddr::new(place(50, v4).ip(), 4321));
        let unspecified = [address("0.0.0.0:54324"), address("[::]:54324")];
        for via in [place(60, v4), unspecified[0], unspecified[1]] {
            for reply_to in [asks, None] {
                let syn = Syn { reply_to, via: Some(via), tag: Some(30), ..Syn::to(SERVICE) };
                assert_eq!(rig.compare(place(30, v4), &syn.bytes()), TX);
            }
        }
        assert_eq!(rig.counted(), ["forwarded"]);
        let wrong = Syn { reply_to: asks, via: Some(place(60, v4)), tag: Some(31), ..Syn::to(SERVICE) };
        assert_eq!(rig.compare(place(30, v4), &wrong.bytes()), TX);
        // A stranger's, however it is tagged; and one that names no router.
        assert_eq!(rig.compare(place(31, v4), &wrong.bytes()), TX);
        assert_eq!(rig.compare(place(30, v4), &Syn { via: None, tag: Some(30), ..wrong }.bytes()), TX);
        assert_eq!(rig.counted(), ["forwarded", "bad_hop_tag"]);
    }
}

#[test]
fn what_hops_have_run_out_of_or_a_rule_discards_is_dropped_and_counted() {
    let Some((mut rig, rule)) = rig(true) else { return };
    let from = address("10.1.0.50:40000");
    for hop_limit in [0, 1] {
        assert_eq!(rig.compare(from, &Syn { hop_limit, ..Syn::to(SERVICE) }.bytes()), DROP);
    }
    assert_eq!(rig.compare(from, &Syn { hop_limit: 2, ..Syn::to(SERVICE) }.bytes()), TX);
    assert_eq!((rig.router.usage(rule).packets, rig.router.drops(DropReason::HopLimit)), (6, 4));
    let discards = rig.rule(Prefix::from(SERVICE), 1, 1, Action::Drop);
    rig.sync();
    assert_eq!(rig.compare(from, &Syn::to(SERVICE).bytes()), DROP);
    assert_eq!((rig.router.usage(discards).packets, rig.router.drops(DropReason::ServiceDrop)), (2, 2));
}

/// What has passed a router may have to stay below (`way.rs` of the core), and that is not for the program to say.
#[test]
fn what_has_passed_a_router_goes_neither_back_nor_up_without_the_agent() {
    let Some(mut rig) = Rig::new() else { return };
    let [below, outer] = [20, 21].map(|n| rig.meet(n, true));
    let hop = |n, host, router| Action::Forward(NextHop { address: place(n, true), host: Some(host), router });
    let up = ServiceId([0x78; 32]);
    rig.rule(SERVICE.into(), 1, 1, hop(20, below, false));
    rig.rule(up.into(), 1, 1, hop(21, outer, true));
    rig.sync();
    let passed = |service, n| Syn { via: Some(address("10.1.0.9:54324")), tag: Some(n), ..Syn::to(service) };
    let host = address("10.1.0.50:40000");
    for service in [SERVICE, up] {
        assert_eq!(rig.compare(host, &Syn::to(service).bytes()), TX, "from whose program sends it");
    }
    assert_eq!(rig.compare(place(21, true), &passed(SERVICE, 21).bytes()), TX, "down");
    assert_eq!(rig.counted(), ["forwarded"]);
    assert_eq!(rig.compare(place(20, true), &passed(SERVICE, 20).bytes()), PASS, "back");
    assert_eq!(rig.compare(place(20, true), &passed(up, 20).bytes()), PASS, "up");
    assert_eq!(rig.counted(), ["forwarded", "left_no_route"]);
}

#[test]
fn what_is_no_plain_first_packet_is_the_agents() {
    let Some((mut rig, _)) = rig(true) else { return };
    let from = address("10.1.0.50:40000");
    let plain = Syn::to(SERVICE);
    let mut others = vec![
        Syn { dst_flow: 5, ..plain.clone() }.bytes(),
        Syn { protocol: 0, ..plain.clone() }.bytes(),
        Syn { protocol: 132, ..plain.clone() }.bytes(),
        Syn { session_first: false, ..plain.clone() }.bytes(),
        Syn { flags: Flags::RESOLVABLE | Flags::RELAY, ..plain.clone() }.bytes(),
        Syn { flags: Flags::RESOLVABLE | Flags::from_bits_retain(0x40), ..plain.clone() }.bytes(),
        Syn { len: 2400, ..plain.clone() }.bytes(),
        plain.bytes()[..100].to_vec(),
        plain.bytes()[..150].to_vec(),
    ];
    // Another version, another type, a header or a payload that is longer than the datagram, a header of odd length.
    for (at, value) in [(0, 2), (1, 4), (1, 32), (4, 9), (6, 9), (5, plain.bytes()[5] + 1), (111, 39)] {
        let mut bytes = plain.bytes();
        bytes[at] = value;
        others.push(bytes);
    }
    for (number, bytes) in others.iter().enumerate() {
        assert_eq!(rig.compare(from, bytes), PASS, "the {number}th");
    }
    assert_eq!(rig.counted(), ["left_shape"]);
    assert_eq!(rig.compare(from, &plain.bytes()), TX);
}

#[test]
fn packets_that_are_not_for_the_agent_or_not_plain_pass_untouched() {
    let Some((rig, _)) = rig(true) else { return };
    let (from, to, syn) = (address("10.1.0.50:40000"), own(true), Syn::to(SERVICE).bytes());
    let good = frame(from, to, &syn, Checksum::Complete);
    assert_eq!(rig.run(&good).0, TX);
    let mut frames = vec![
        frame(from, address("10.1.0.99:54324"), &syn, Checksum::Complete),
        frame(from, address("10.1.0.1:54325"), &syn, Checksum::Complete),
        frame(address("127.0.0.1:40000"), to, &syn, Checksum::Complete),
        frame(address("224.0.0.5:40000"), to, &syn, Checksum::Complete),
        frame(address("0.0.0.0:40000"), to, &syn, Checksum::Complete),
        good[..60].to_vec(),
        frame(address("[fe80::5]:40000"), own(false), &syn, Checksum::Complete),
        frame(address("[::1]:40000"), own(false), &syn, Checksum::Complete),
    ];
    // Ethertype; IP options, total length, a fragment, TCP, header checksum; the UDP length.
    for (at, value) in [(12, 0x81), (14, 0x46), (16, 0x09), (20, 0x20), (23, 6), (24, 0), (38, 0)] {
        let mut bytes = good.clone();
        bytes[at] ^= if at == 24 { 1 } else { bytes[at] ^ value };
        frames.push(bytes);
    }
    for (number, frame) in frames.iter().enumerate() {
        let (verdict, out) = rig.run(frame);
        assert_eq!((verdict, &out), (PASS, frame), "the {number}th");
    }
    let mut padded = good;
    padded.extend([0; 20]);
    assert_eq!(rig.run(&padded).0, TX, "a short frame's padding is none of the packet's");
}

#[test]
fn checksums_that_are_absent_stay_absent_and_partial_ones_partial() {
    let Some((rig, _)) = rig(true) else { return };
    let (from, syn) = (address("10.1.0.50:40000"), Syn::to(SERVICE).bytes());
    let checksum = |frame: &[u8]| [frame[ETHERNET + 26], frame[ETHERNET + 27]];
    let (verdict, out) = rig.run(&frame(from, own(true), &syn, Checksum::Absent));
    assert_eq!((verdict, checksum(&out)), (TX, [0, 0]));
    let partial = frame(from, own(true), &syn, Checksum::Partial);
    assert_eq!(rig.run(&partial).0, PASS, "nobody would complete it");
    assert_eq!(rig.counted(), ["forwarded", "left_checksum"]);
    let (verdict, out) = rig.run_buffer(&partial);
    let seen = frame(own(true), place(20, true), &[0; 1200], Checksum::Partial);
    assert_eq!((verdict, checksum(&out)), (TX, checksum(&seen)));
    // Complete ones that look partial: the sum of all else is nothing. A word of their payload is made so.
    for more in [0, 1, 7, 8, 9, 72, 1100, 1199] {
        let mut lucky = syn.clone();
        let word = lucky.len() - 2..lucky.len();
        lucky.resize(lucky.len() + more, 0xa5);
        lucky[word.clone()].fill(0);
        let as_if = |how, payload: &[u8]| u16::from_be_bytes(checksum(&frame(from, own(true), payload, how)));
        let wanted = as_if(Checksum::Partial, &lucky);
        let (sum, carry) = (!wanted).overflowing_add(as_if(Checksum::Complete, &lucky));
        lucky[word].copy_from_slice(&(sum + u16::from(carry)).to_be_bytes());
        assert_eq!(as_if(Checksum::Complete, &lucky), wanted);
        let verdict = rig.run_buffer(&frame(from, own(true), &lucky, Checksum::Complete)).0;
        assert_eq!(verdict, PASS, "{more} bytes more: it may be either");
    }
    assert_eq!(rig.run(&frame(from, own(true), &syn, Checksum::Complete)).0, TX);
}

#[test]
fn the_verifier_has_little_to_look_at() {
    let Some(rig) = Rig::new() else { return };
    let programs = &rig.router.skeleton.lock().progs;
    [&programs.route_frame, &programs.route_buffer, &programs.find_buffer, &programs.keep_cell]
        .into_iter()
        .for_each(sample::is_soon_verified);
}

#[test]
fn next_hops_without_a_way_of_this_family_or_size_are_the_agents() {
    let Some((mut rig, _)) = rig(true) else { return };
    let (from, syn) = (address("10.1.0.50:40000"), Syn::to(SERVICE));
    assert_eq!(rig.compare(address("[fd01::50]:40000"), &syn.bytes()), PASS, "from the other family");
    assert_eq!(rig.counted(), ["left_no_way"]);
    rig.rule(Prefix::from(SERVICE), 1, 1, forward(40, true, None));
    rig.router.take_routes(&rig.sal.take_route_changes(4096));
    assert!(rig.router.is_lost());
    assert_eq!(rig.compare(from, &syn.bytes()), PASS, "no way yet");
    rig.find_ways(HERE);
    assert!(!rig.router.is_lost());
    assert_eq!(rig.compare(from, &syn.bytes()), TX);
    assert_eq!(rig.compare(from, &Syn { len: 1472, ..syn.clone() }.bytes()), TX);
    assert_eq!(rig.compare(from, &Syn { len: 1473, ..syn.clone() }.bytes()), PASS, "too large");
    rig.look_after(1);
    assert_eq!(rig.run(&frame(from, own(true), &syn.bytes(), Checksum::Complete)).0, PASS, "the kernel looks after it");
    assert_eq!(rig.compare(from, &syn.bytes()), TX);
    let counted = ["forwarded", "left_no_way", "left_too_large", "left_check"];
    assert_eq!(rig.counted(), counted);
    rig.find_ways(77);
    assert_eq!(rig.run(&frame(from, own(true), &syn.bytes(), Checksum::Complete)).0, DROP, "no such interface");
    assert_eq!(rig.router.drops(DropReason::Environment), 1);
    rig.router.find_ways(true, |_| None);
    assert_eq!(rig.compare(from, &syn.bytes()), PASS);
}

/// A link behind the next router may be narrower. Whoever hears of that is the kernel, which does not send these.
#[test]
fn what_is_sent_on_may_be_cut_on_its_way() {
    let Some((mut rig, _)) = rig(true) else { return };
    let from = address("10.1.0.50:40000");
    let mut whole = frame(from, own(true), &Syn { len: 1472, ..Syn::to(SERVICE) }.bytes(), Checksum::Complete);
    // Don't fragment, as hosts send these.
    whole[ETHERNET + 6] = 0x40;
    whole[ETHERNET + 10..ETHERNET + 12].fill(0);
    let right = !fold(sum(&whole[ETHERNET..ETHERNET + 20]));
    whole[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&right.to_be_bytes());
    let (verdict, out) = rig.run(&whole);
    assert_eq!((verdict, &out[ETHERNET + 6..ETHERNET + 8]), (TX, &[0, 0][..]));
    assert_eq!(fold(sum(&out[ETHERNET..ETHERNET + 20])), 0xffff);
    rig.rule(Prefix::from(SERVICE), 5, 1, forward(50, false, None));
    rig.sync();
    let from = address("[fd01::50]:40000");
    let of_len = |len| Syn { len, ..Syn::to(SERVICE) }.bytes();
    assert_eq!(rig.compare(from, &of_len(1280 - 48)), TX);
    assert_eq!(rig.compare(from, &of_len(1281 - 48)), PASS, "too large for some link");
}

#[test]
fn listeners_and_names_without_rules_are_the_agents() {
    let Some(mut rig) = Rig::new() else { return };
    let (from, syn) = (address("10.1.0.50:40000"), Syn::to(SERVICE).bytes());
    assert_eq!(rig.compare(from, &syn), PASS);
    let none = rig.rule(Prefix::new(SERVICE, 64), 1, 0, forward(20, true, None));
    rig.sync();
    assert_eq!(rig.compare(from, &syn), PASS, "a rule without weight is none");
    let listener = || {
        Action::Demux(Demux {
            listener: ([0; 4], 80).into(),
            other_family: None,
            is_looked_up: false,
            service_port: None,
            protocol: None,
            allow: Allow::Any,
        })
    };
    rig.rule(Prefix::new(SERVICE, 64), 1, 1, forward(20, true, None));
    let above = rig.rule(Prefix::new(SERVICE, 64), 9, 1, listener());
    rig.sync();
    assert_eq!(rig.compare(from, &syn), PASS, "a listener is first");
    rig.sal.remove_rule(above);
    rig.sync();
    assert_eq!(rig.compare(from, &syn), TX);
    rig.rule(Prefix::new(SERVICE, 64), 0, 1, listener());
    rig.sync();
    assert_eq!(rig.compare(from, &syn), TX, "a listener is the last resort");
    rig.rule(Prefix::new(SERVICE, 96), 0, 1, listener());
    rig.sync();
    assert_eq!(rig.compare(from, &syn), PASS, "a longer prefix is a listener's");
    rig.sal.remove_rule(none);
    assert_eq!(rig.counted(), ["forwarded", "left_no_route"]);
}

#[test]
fn more_lengths_than_fit_leave_everything_to_the_agent() {
    let Some((mut rig, _)) = rig(true) else { return };
    let rules: Vec<RuleId> =
        (1..33).map(|bits| rig.rule(Prefix::new(SERVICE, bits), 1, 1, forward(20, true, None))).collect();
    rig.router.take_routes(&rig.sal.take_route_changes(4096));
    let from = address("10.1.0.50:40000");
    assert!(rig.router.failure().is_some());
    assert_eq!(rig.compare(from, &Syn::to(SERVICE).bytes()), PASS);
    rig.sal.remove_rule(rules[7]);
    rig.sync();
    assert_eq!(rig.compare(from, &Syn::to(SERVICE).bytes()), TX);
}

#[test]
fn rules_come_and_go_without_a_trace() {
    let Some((mut rig, _)) = rig(true) else { return };
    let from = address("10.1.0.50:40000");
    let before = rig.router.sizes();
    for round in 0..3 {
        let ids: Vec<RuleId> = (0..40_u8)
            .map(|n| {
                let bits = [96, 128, 256][usize::from(n % 3)];
                let service = ServiceId([n / 6; 32]);
                rig.rule(Prefix::new(service, bits), 1, u32::from(n % 4), forward(n, true, None))
            })
            .collect();
        rig.sync();
        for n in 0..7 {
            for nonce in 0..9 {
                rig.compare(from, &Syn { nonce, ..Syn::to(ServiceId([n; 32])) }.bytes());
            }
        }
        assert!(rig.router.sizes() > before, "round {round}");
        ids.into_iter().for_each(|id| assert!(rig.sal.remove_rule(id)));
        rig.sync();
        assert_eq!(rig.router.sizes(), before, "round {round}");
    }
    // Whoever begins anew ends with the same.
    rig.sal.follow_routes();
    rig.sync();
    assert_eq!((rig.router.sizes(), rig.compare(from, &Syn::to(SERVICE).bytes())), (before, TX));
}

#[test]
fn what_a_rule_has_done_stays_when_others_come_and_go_beside_it() {
    let Some((mut rig, rule)) = rig(true) else { return };
    let from = address("10.1.0.50:40000");
    let send = |rig: &mut Rig| {
        (0..40).for_each(|nonce| assert_eq!(rig.compare(from, &Syn { nonce, ..Syn::to(SERVICE) }.bytes()), TX));
    };
    send(&mut rig);
    let alone = rig.router.usage(rule).packets;
    let other = rig.rule(Prefix::default(), 1, 1, forward(40, true, None));
    rig.sync();
    assert_eq!((alone, rig.router.usage(rule).packets), (80, 80));
    send(&mut rig);
    let both = [rule, other].map(|rule| rig.router.usage(rule).packets);
    assert!(both[0] > 80 && both[1] > 0 && both[0] + both[1] == 160, "{both:?}");
    rig.sal.remove_rule(other);
    rig.sync();
    send(&mut rig);
    assert_eq!(rig.router.usage(rule).packets, both[0] + 80);
    // A listener above takes all: what was done stays done.
    let listener = Demux {
        listener: ([0; 4], 80).into(),
        other_family: None,
        is_looked_up: false,
        service_port: None,
        protocol: None,
        allow: Allow::Any,
    };
    rig.rule(Prefix::default(), 9, 1, Action::Demux(listener));
    rig.sync();
    let credits: Vec<_> = rig.router.take_credits().into_iter().map(|(rule, usage)| (rule, usage.packets)).collect();
    assert_eq!(credits, [(other, both[1]), (rule, both[0] + 80)], "for the core to keep");
    assert_eq!(rig.router.usage(rule).packets, 0);
}

fn listener() -> Demux {
    Demux {
        listener: ([0; 4], 80).into(),
        other_family: None,
        is_looked_up: false,
        service_port: Some(443),
        protocol: None,
        allow: Allow::Any,
    }
}

/// An address that a packet names, or none.
fn some_address(draw: &mut dyn FnMut(u32) -> u32) -> Option<SocketAddr> {
    match draw(4) {
        0 => None,
        1 => Some(address("0.0.0.0:54324")),
        2 => Some(address("[fd01::77]:99")),
        _ => Some(address("10.1.0.77:99")),
    }
}

/// Random tables and random packets: the program decides most of them, and all of those as the core does.
#[test]
fn whatever_the_table_and_the_packet_both_decide_alike() {
    let mut verdicts = HashSet::new();
    for seed in 0..4_u8 {
        let Some(mut rig) = Rig::new() else { return };
        let mut rng = Rng::new([seed; 32]);
        let mut draw = move |below: u32| rng.u32() % below;
        let hosts: Vec<Option<HostId>> = (0..24_u8)
            .map(|n| {
                let v4 = !n.is_multiple_of(3);
                (!n.is_multiple_of(4)).then(|| rig.meet(100 + n, v4))
            })
            .collect();
        let names: Vec<ServiceId> = (0..12_u8).map(|n| ServiceId([n / 4; 32])).collect();
        let mut rules = Vec::new();
        let mut decided = 0;
        for _ in 0..1500 {
            if draw(20) == 0 {
                let n = draw(24) as u8;
                let action = match draw(12) {
                    0 => Action::Drop,
                    1 => Action::Demux(listener()),
                    // Rules that name an address alone find the key of whoever is there.
                    2..4 => forward(100 + n, !n.is_multiple_of(3), None),
                    _ => forward(100 + n, !n.is_multiple_of(3), hosts[usize::from(n)]),
                };
                let mut id = names[draw(12) as usize];
                id.0[31] ^= draw(2) as u8;
                let bits = [0, 8, 64, 96, 255, 256][draw(6) as usize];
                rules.push(rig.rule(Prefix::new(id, bits), draw(3), draw(4), action));
                if rules.len() > 30 {
                    let gone = rules.swap_remove(draw(30) as usize);
                    rig.sal.remove_rule(gone);
                }
                if draw(3) == 0 {
                    // The same rule says something else from now on.
                    let id = rules[draw(rules.len() as u32) as usize];
                    let n = draw(24) as u8;
                    let action = forward(100 + n, !n.is_multiple_of(3), hosts[usize::from(n)]);
                    assert!(rig.sal.change_rule(id, Rule { priority: draw(3), weight: draw(4), action }));
                }
                rig.sync();
            }
            let v4 = draw(3) != 0;
            let n = 100 + draw(24) as u8;
            let mut service = names[draw(12) as usize];
            service.0[31] ^= draw(2) as u8;
            let syn = Syn {
                service,
                nonce: u64::from(draw(u32::MAX)) << 20,
                flow: draw(u32::MAX),
                hop_limit: 16_u8.saturating_sub(draw(20) as u8),
                reply_to: some_address(&mut draw),
                via: some_address(&mut draw),
                tag: (draw(3) != 0).then_some(n),
                len: 1200 + draw(80) as usize,
                ..Syn::to(service)
            };
            let from =
                if draw(2) == 0 { place(n, v4) } else { SocketAddr::new(place(9, v4).ip(), 1 + draw(60_000) as u16) };
            let verdict = rig.compare(from, &syn.bytes());
            decided += u32::from(verdict != PASS);
            verdicts.insert(verdict);
        }
        assert!(decided > 300, "seed {seed}: {decided} were decided");
    }
    assert_eq!(verdicts, HashSet::from([PASS, DROP, TX]));
}

#[test]
fn own_addresses_are_followed() {
    let Some((rig, _)) = rig(true) else { return };
    let run = |to: &str| {
        rig.run(&frame(address("10.1.0.50:40000"), address(to), &Syn::to(SERVICE).bytes(), Checksum::Complete)).0
    };
    let addresses: [IpAddr; 1] = ["10.1.0.2".parse().expect("literal")];
    assert_eq!((run("10.1.0.1:54324"), run("10.1.0.2:54324")), (TX, PASS));
    rig.router.set_own_addresses(&addresses);
    assert_eq!((run("10.1.0.1:54324"), run("10.1.0.2:54324")), (PASS, TX));
}
