//! Links between hosts: veth pairs, bridges where a subnet has more than two ends, TAP pairs where packets are delayed
//! or lost; token buckets for rates; offloads off where segments shall be cut on the way.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::host::Host;
use crate::pump::{Pump, Treatment};
use crate::route::routes;
use crate::topology::{Shape, Topology};
use crate::weather::Sky;

/// Queueing delay of a rate limit before it drops.
const QUEUE_MS: u32 = 50;
/// Smallest burst of a token bucket: one super-packet, else TBF cuts each.
const BURST_MIN_BYTES: u64 = 80_000;

/// One end of a link: interface `eth<index>` of a host.
#[derive(Clone, Copy)]
struct Port {
    host: usize,
    index: usize,
    shape: Shape,
}

/// Joins all hosts as the topology says and gives them addresses and routes. The pumps must be kept.
///
/// # Errors
///
/// `ip`, `tc` or `ethtool` refuse; the message has the reason.
pub fn join(topology: &Topology, hosts: &[Host], sky: &Arc<Sky>) -> Result<Vec<Pump>> {
    let mut pumps = Vec::new();
    for subnet in 0..topology.subnets.len() {
        let ports = ports_of(topology, subnet);
        match ports[..] {
            [left, right] if !left.shape.needs_pump() && !right.shape.needs_pump() => join_pair(hosts, left, right)?,
            _ => join_bridge(hosts, subnet, &ports, &mut pumps, sky)?,
        }
    }
    for (index, host) in hosts.iter().enumerate() {
        configure(topology, index, host)?;
    }
    Ok(pumps)
}

fn ports_of(topology: &Topology, subnet: usize) -> Vec<Port> {
    let mut ports = Vec::new();
    for (host, plan) in topology.hosts.iter().enumerate() {
        for (index, link) in plan.links.iter().enumerate() {
            if link.subnet == subnet {
                ports.push(Port { host, index, shape: link.shape });
            }
        }
    }
    ports
}

fn join_pair(hosts: &[Host], left: Port, right: Port) -> Result<()> {
    let (left_pid, right_pid) = (hosts[left.host].holder_pid(), hosts[right.host].holder_pid());
    ip(
        None,
        &format!(
            "link add eth{} netns {left_pid} type veth peer name eth{} netns {right_pid}\n",
            left.index, right.index
        ),
    )
}

fn join_bridge(hosts: &[Host], subnet: usize, ports: &[Port], pumps: &mut Vec<Pump>, sky: &Arc<Sky>) -> Result<()> {
    let bridge = format!("br{subnet}");
    let mtu = ports.iter().map(|port| port.shape.mtu).max().unwrap_or(1500);
    let mut script = format!("link add name {bridge} type bridge mcast_snooping 0\nlink set {bridge} mtu {mtu} up\n");
    ip(None, &script)?;
    script.clear();
    for (number, port) in ports.iter().enumerate() {
        let pid = hosts[port.host].holder_pid();
        let (inner, outer) = (format!("h{subnet}-{number}"), outer_name(subnet, number));
        if port.shape.needs_pump() {
            pumps.push(Pump::start(
                &inner,
                &outer,
                Treatment {
                    delay: Duration::from_secs_f64(port.shape.delay_ms / 1000.0),
                    loss: port.shape.loss,
                    seed: (subnet * 1000 + number + 1) as u64,
                },
                sky,
            )?);
            writeln!(script, "link set {inner} netns {pid} name eth{}", port.index)?;
        } else {
            writeln!(script, "link add {outer} type veth peer name eth{} netns {pid}", port.index)?;
        }
        writeln!(script, "link set {outer} mtu {} master {bridge} up", port.shape.mtu)?;
    }
    ip(None, &script)?;
    for (number, port) in ports.iter().enumerate() {
        let outer = outer_name(subnet, number);
        shape_device(None, &outer, port.shape)?;
    }
    Ok(())
}

fn configure(topology: &Topology, index: usize, host: &Host) -> Result<()> {
    let mut script = "link set lo up\n".to_owned();
    for (number, link) in host.plan.links.iter().enumerate() {
        let subnet = &topology.subnets[link.subnet];
        writeln!(script, "link set eth{number} mtu {} up", link.shape.mtu)?;
        if let (Some(address), Some(network)) = (link.v4, subnet.v4) {
            writeln!(script, "addr add {address}/{} brd + dev eth{number}", network.prefix_len())?;
        }
        if let (Some(address), Some(network)) = (link.v6, subnet.v6) {
            writeln!(script, "addr add {address}/{} nodad dev eth{number}", network.prefix_len())?;
        }
    }
    for route in routes(topology, index, |_| true) {
        writeln!(script, "route add {} via {}", route.to, route.via)?;
    }
    ip(Some(host), &script)?;
    for (number, link) in host.plan.links.iter().enumerate() {
        shape_device(Some(host), &format!("eth{number}"), link.shape)?;
    }
    Ok(())
}

/// Rate and offloads of one device, in a host or in the fabric.
fn shape_device(host: Option<&Host>, device: &str, shape: Shape) -> Result<()> {
    if !shape.offload && !shape.needs_pump() {
        set_offload(host, device, false)?;
    }
    match shape.rate_mbit {
        Some(rate_mbit) => set_rate(host, device, rate_mbit),
        None => Ok(()),
    }
}

/// Cuts a host's first link, or mends it. It is cut at the bridge: the host itself has no time for a word, and nobody
/// else on the subnet sees it.
///
/// # Errors
///
/// Its subnet has no bridge.
pub fn set_link(topology: &Topology, host: &Host, up: bool) -> Result<()> {
    let subnet = host.plan.links.first().with_context(|| format!("{} has no link", host.name()))?.subnet;
    let is_it = |port: &Port| topology.hosts[port.host].name == host.name();
    let number = ports_of(topology, subnet).iter().position(is_it).context("no such link")?;
    ip(None, &format!("link set {} {}\n", outer_name(subnet, number), if up { "up" } else { "down" }))
}

/// The end of a link that is at the bridge.
fn outer_name(subnet: usize, number: usize) -> String {
    format!("p{subnet}-{number}")
}

/// Holds what a device sends to a rate, by a token bucket.
///
/// # Errors
///
/// `tc` refuses.
pub fn set_rate(host: Option<&Host>, device: &str, rate_mbit: u32) -> Result<()> {
    let burst = (u64::from(rate_mbit) * 1_000_000 / 8 / 250).max(BURST_MIN_BYTES);
    let words = format!("qdisc replace dev {device} root tbf rate {rate_mbit}mbit burst {burst} latency {QUEUE_MS}ms");
    run(host, "tc", words.split(' '))
}

/// Whether segmentation is left to the far end. Off: as nearly as veth can to a wire, segments are cut by the sender
/// and joined again by the receiver's GRO.
///
/// # Errors
///
/// `ethtool` refuses.
pub fn set_offload(host: Option<&Host>, device: &str, on: bool) -> Result<()> {
    let word = if on { "on" } else { "off" };
    let gro = if on { "off" } else { "on" };
    run(host, "ethtool", ["-K", device, "tso", word, "tx-udp-segmentation", word, "gro", gro])
}

fn run<'a>(host: Option<&Host>, program: &str, args: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let mut command = match host {
        Some(host) => host.command([program]),
        None => Command::new(program),
    };
    let output = command.args(args).output().with_context(|| format!("cannot run {program}; is it installed?"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Runs lines of `ip` commands, in a host or in the fabric.
///
/// # Errors
///
/// One of them fails.
pub fn ip(host: Option<&Host>, script: &str) -> Result<()> {
    let mut command = match host {
        Some(host) => host.command(["ip", "-batch", "-"]),
        None => {
            let mut command = Command::new("ip");
            command.args(["-batch", "-"]);
            command
        }
    };
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot run ip; is iproute2 installed?")?;
    child.stdin.take().context("ip has no input")?.write_all(script.as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("ip failed: {}in:\n{script}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}
