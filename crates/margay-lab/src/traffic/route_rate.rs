//! How many first packets a second are forwarded: by the service router in the kernel, by the kernel's own forwarding
//! of IP, and by the core between two sockets. One processor, alternating.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Instant as Moment;

use anyhow::{Context, Result, ensure};
use clap::Args;
use margay_core::key::HostSecret;
use margay_core::output::Output;
use margay_core::table::{Action, NextHop, Rule};
use margay_core::{AssociationSetup, Config, Limits, Sal};
use margay_datapath::clock;
use margay_datapath::service_router::rate::{Generator, HEAD_LEN, Next, prefix};
use margay_datapath::service_router::{ServiceRouter, Way};
use margay_wire::{
    Extension, Flags, FlowId, Kind, MessageWriter, NextProtocol, PORT, ResolvableRepr, SessionId, SessionRepr,
};
use nix::net::if_::if_nametoindex;
use serde::{Deserialize, Serialize};

use crate::host::write_line;

/// Next hops that the prefixes lead to.
pub const HOPS: u8 = 64;
/// The router's addresses, and who asks; the next hops are `REMOTE` + n.
pub const OWN: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 1);
/// On the side where packets leave.
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 50);
const ETHERNET_LEN: usize = 14;
const HEADERS_LEN: usize = ETHERNET_LEN + 20 + 8;
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
/// Changes that are taken up at once.
const PART: usize = 4096;
/// Datagrams between two looks at the time.
const BURST: usize = 64;

/// What was measured: nanoseconds per packet, the quickest of the rounds.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct RouteRate {
    /// The service router in the kernel, with all prefixes.
    pub router_ns: f64,
    /// The same with one rule for everything.
    pub one_rule_ns: f64,
    /// The kernel's forwarding of IP, with one route.
    pub ip_ns: f64,
    /// Sending a frame on, and nothing else.
    pub bare_ns: f64,
    /// Core and sockets in a process.
    pub user_ns: f64,
    /// Memory of the kernel per prefix.
    pub bytes_per_prefix: f64,
    /// Packets that the service router has forwarded, of those that it was given.
    pub forwarded_share: f64,
}

/// Where the n-th next hop is.
pub fn hop(n: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 9, 0, 10 + n)
}

/// What to measure.
#[derive(Debug, Args)]
pub struct Plan {
    /// Names in the table
    #[arg(long)]
    prefixes: u32,
    /// Packets of one round
    #[arg(long)]
    packets: u32,
    /// Rounds
    #[arg(long)]
    rounds: u32,
    /// Payload of each
    #[arg(long)]
    bytes: usize,
}

/// Measures, in a network namespace with the veth pairs `in0`, `in1` and `out0`, `out1`. Says the result as JSON.
pub fn measure(plan: &Plan) -> Result<()> {
    let index = |name| if_nametoindex(name).with_context(|| format!("there is no {name}"));
    let (ingress, egress) = (index("in0")?, index("out0")?);
    let mut generator = Generator::open()?;
    for name in ["in0", "in1", "out1"] {
        generator.throw_away(index(name)?).with_context(|| format!("{name} takes no program"))?;
    }
    let way = |local_mac| Way { local: OUTSIDE.into(), ifindex: egress, mtu: 1500, local_mac, remote_mac: MAC };
    let one = Table::new(1, way([2; 6]), egress)?;
    let mut table = Table::new(plan.prefixes, way([2; 6]), egress)?;
    let (to_router, to_hop) = (head(OWN, plan.bytes)?, head(hop(0), plan.bytes)?);
    let frame_len = HEADERS_LEN + plan.bytes;
    let mut rate = RouteRate { bytes_per_prefix: table.bytes_per_prefix, ..RouteRate::default() };
    let mut given = 0.0;
    for round in 0..=plan.rounds {
        let mut run = |next, head: &[u8], names| {
            generator.set_frames(head, names);
            generator.run(next, ingress, frame_len, plan.packets).context("the kernel runs no frames")
        };
        let all = [
            run(Next::Router(&table.router), &to_router, plan.prefixes)?,
            run(Next::Kernel, &to_hop, plan.prefixes)?,
            run(Next::Router(&one.router), &to_router, plan.prefixes)?,
            run(Next::Interface(egress), &to_hop, plan.prefixes)?,
        ];
        given += f64::from(plan.packets);
        // The first round fills caches.
        if round > 0 {
            let places = [&mut rate.router_ns, &mut rate.ip_ns, &mut rate.one_rule_ns, &mut rate.bare_ns];
            for (place, found) in places.into_iter().zip(all) {
                *place = if *place == 0.0 { found } else { place.min(found) };
            }
        }
    }
    rate.forwarded_share = table.router.forwarded() as f64 / given;
    rate.user_ns = table.user_space(plan)?;
    write_line(&serde_json::to_string(&rate)?)
}

/// A core with rules, and the program that follows it.
struct Table {
    sal: Sal,
    router: ServiceRouter,
    bytes_per_prefix: f64,
}

impl Table {
    fn new(prefixes: u32, way: Way, egress: u32) -> Result<Self> {
        let now = clock::now();
        let config = Config {
            host_key: HostSecret::from_bytes([1; 32]),
            epoch: 1,
            boot_id: [1; 16],
            router: true,
            datagram_max: 1472,
            local_addresses: vec![OWN.into()],
            ranges: margay_core::Ranges::USUAL,
            limits: Limits::default(),
        };
        let mut sal = Sal::new(config, now, 1_700_000_000, [7; 32]);
        sal.follow_routes();
        let actions: Vec<Action> = (0..HOPS)
            .map(|n| {
                let (host_key, address) =
                    (HostSecret::from_bytes([100 + n; 32]).public(), SocketAddr::new(hop(n).into(), PORT));
                sal.install_association(now, neighbour(n, host_key.0, address));
                Action::Forward(NextHop { address, host: Some(host_key.id()), router: false })
            })
            .collect();
        for number in 0..prefixes {
            let of = if prefixes == 1 { Default::default() } else { prefix(number) };
            let action = actions[number as usize % actions.len()].clone();
            sal.add_rule(now, of, Rule { priority: 1, weight: 1, action })?;
        }
        let router = ServiceRouter::open(PORT, prefixes)?;
        router.set_own_addresses(&[IpAddr::V4(OWN)]);
        router.add_device(egress);
        let before = bpf_bytes()?;
        router.take_hop_keys(&sal.take_hop_key_changes(PART));
        loop {
            let part = sal.take_route_changes(PART);
            router.take_routes(&part);
            if part.changed.len() < PART {
                break;
            }
        }
        router.find_ways(true, |_| Some(way));
        ensure!(router.failure().is_none(), "{:?}", router.failure());
        let bytes = bpf_bytes()? - before + router.table_bytes() as f64;
        let bytes_per_prefix = bytes / f64::from(prefixes) + SEAT_BYTES;
        Ok(Self { sal, router, bytes_per_prefix })
    }

    /// Core and sockets, as the agent's thread has them at best.
    fn user_space(&mut self, plan: &Plan) -> Result<f64> {
        let (client, router) = (UdpSocket::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
        let sink = UdpSocket::bind("127.0.0.1:0")?;
        let (to, away) = (router.local_addr()?, sink.local_addr()?);
        let (mut buffer, mut out) = (vec![0; 65_536], vec![0; 65_536]);
        let (mut spent, mut count) = (0.0, 0_u32);
        while count < plan.packets / 10 {
            for at in 0..BURST as u32 {
                let name = (count + at).wrapping_mul(2_654_435_761) % plan.prefixes;
                client.send_to(&syn(plan.bytes, prefix(name).id.0)?, to)?;
            }
            let start = Moment::now();
            for _ in 0..BURST {
                let (len, _) = router.recv_from(&mut buffer)?;
                let from = SocketAddr::new(CLIENT.into(), 40_000);
                let _ = self.sal.handle_datagram(clock::now(), Some(OWN.into()), from, &buffer[..len]);
                while let Some(output) = self.sal.poll(&mut out) {
                    if let Output::Transmit { len, .. } = output {
                        router.send_to(&out[..len], away)?;
                        count += 1;
                    }
                }
            }
            spent += start.elapsed().as_nanos() as f64;
        }
        Ok(spent / f64::from(count))
    }
}

/// What a rule takes in the array of rules, which is there from the start.
const SEAT_BYTES: f64 = 24.0;

fn neighbour(n: u8, host_key: [u8; 32], remote: SocketAddr) -> AssociationSetup {
    AssociationSetup {
        host_key,
        key: [n; 32],
        local_id: 1000 + u32::from(n),
        remote_id: 2000 + u32::from(n),
        peer_epoch: 1,
        boot_id: None,
        remote,
        hop_key: Some([n; 16]),
        router: true,
        initiator: false,
    }
}

/// Memory of eBPF that this process holds, as the kernel says of its descriptors.
fn bpf_bytes() -> Result<f64> {
    let mut sum = 0.0;
    for entry in fs::read_dir("/proc/self/fdinfo")? {
        let Ok(text) = fs::read_to_string(entry?.path()) else { continue };
        let of = text.lines().find_map(|line| line.strip_prefix("memlock:")?.trim().parse::<f64>().ok());
        sum += of.unwrap_or_default();
    }
    Ok(sum)
}

/// A first packet, without what an initiator's key exchange would add: routers do not look at it.
fn syn(len: usize, service: [u8; 32]) -> Result<Vec<u8>> {
    let mut buffer = vec![0; 2048];
    let mut writer = MessageWriter::new(&mut buffer, Kind::Syn, FlowId(0), FlowId(0xfeed_0001), 0);
    writer.flags(Flags::RESOLVABLE);
    let resolvable = ResolvableRepr { hop_limit: 16, reply_to: None, via: None, service, nonce: 5, hop_tag: [0; 8] };
    let session = SessionRepr {
        session: SessionId([9; 16]),
        client: SocketAddr::new(CLIENT.into(), 40_000),
        service_port: 80,
        protocol: 6,
    };
    writer.resolvable(&resolvable)?.extension(&Extension::Session(session))?;
    writer.payload(NextProtocol::None, &[])?.pad_to(len);
    let len = writer.finish()?;
    buffer.truncate(len);
    Ok(buffer)
}

/// The first bytes of a frame to `to`.
fn head(to: Ipv4Addr, len: usize) -> Result<Vec<u8>> {
    let mut frame = [&MAC[..], &[2; 6], &[8, 0]].concat();
    let total = u16::try_from(HEADERS_LEN - ETHERNET_LEN + len)?;
    let mut ip = [&[0x45, 0][..], &total.to_be_bytes(), &[0, 0, 0x40, 0, 64, 17, 0, 0]].concat();
    ip.extend(CLIENT.octets());
    ip.extend(to.octets());
    let mut sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    ip[10..12].copy_from_slice(&(!u16::try_from(sum)?).to_be_bytes());
    frame.extend(ip);
    frame.extend(40_000_u16.to_be_bytes());
    frame.extend(PORT.to_be_bytes());
    frame.extend((total - 20).to_be_bytes());
    // Nobody on the way looks whether it is right.
    frame.extend([0x12, 0x34]);
    frame.extend(syn(len, [0; 32])?);
    frame.truncate(HEAD_LEN.max(HEADERS_LEN));
    Ok(frame)
}
