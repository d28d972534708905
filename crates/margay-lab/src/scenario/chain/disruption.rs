//! `disruption`: one long session while HAProxy, on a slower link, leaves it, with selective acknowledgements and
//! without (Dysco, figure 13), and with order kept and not (docs/decisions/0109). What its program gets by old and new
//! way together is to dip as little as may be.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::leaving::{PROXY_MBIT, SITE_MBIT, bulk_of, flows, gate, gate_of, order, pair_of};
use super::{ZONE, apply, build, chain};
use crate::agent::Agents;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtMost, Exactly};
use crate::report::{Bound, bound, median};
use crate::scenario::af_serval::programs::Programs;
use crate::scenario::{Findings, Scenario, pair};
use crate::timeline::Timeline;
use crate::transfers::{Order, Transfers, now_us};
use crate::wire;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "disruption",
    summary: "one long session while HAProxy on a slower link leaves it: goodput over time, with SACK and order or not",
    bounds: &BOUNDS,
    run,
};

/// What is without SACK, or in order, is told, and has no bound.
const BOUNDS: [Bound; 5] = [
    bound("goodput_dip_share", AtMost(DIP)),
    bound("staying", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// Goodput is looked at by so long.
const BIN_US: u64 = 200_000;
/// The session runs for so long by the proxy before that leaves, and so long afterwards.
const BEFORE: Duration = Duration::from_secs(4);
const AFTER: Duration = Duration::from_secs(4);
/// Of the time before the proxy leaves, what counts: a session that has just begun is slower.
const STEADY_BINS: usize = 10;
/// A bin with so much less than before is one of a dip.
const DIP: f64 = 0.15;
const LIMIT: Duration = Duration::from_secs(15);

/// What a session is like.
struct Kind {
    suffix: &'static str,
    name: &'static str,
    has_sack: bool,
    is_ordered: bool,
}

const fn kind(suffix: &'static str, name: &'static str, has_sack: bool, is_ordered: bool) -> Kind {
    Kind { suffix, name, has_sack, is_ordered }
}

const KINDS: [Kind; 4] = [
    kind("", "SACK", true, false),
    kind("_no_sack", "no SACK", false, false),
    kind("_ordered", "SACK, ordered", true, true),
    kind("_ordered_no_sack", "no SACK, ordered", false, true),
];

/// Goodput of one session in Mbit/s, bin by bin.
struct Run {
    rates: Vec<f64>,
    /// Segments that the receiver's TCP got before their turn, from the wish to leave on.
    reordered: f64,
    /// The bin in which the proxy was told to leave.
    left_at: usize,
}

impl Run {
    fn before(&self) -> f64 {
        median(&self.rates[self.left_at.saturating_sub(STEADY_BINS)..self.left_at])
    }

    /// For how long together goodput is less than what it was before by more than [`DIP`] of it.
    fn dip_ms(&self) -> f64 {
        let least = self.before() * (1.0 - DIP);
        self.rates[self.left_at..].iter().filter(|rate| **rate < least).count() as f64 * BIN_US as f64 / 1e3
    }

    /// By how much of what it was before goodput falls in the worst bin.
    fn dip_share(&self) -> f64 {
        let worst = self.rates[self.left_at..].iter().copied().fold(f64::INFINITY, f64::min);
        (1.0 - worst / self.before().max(f64::MIN_POSITIVE)).max(0.0)
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("disruption", 0, &["proxy"], dir)?;
    let _agents = Agents::start(&lab)?;
    let [client, server] = [lab.host("client")?, lab.host("server")?];
    let programs = Programs::make(dir)?;
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
        wire::set_rate(Some(host), "eth0", SITE_MBIT)?;
    }
    wire::set_rate(Some(lab.host("proxy")?), "eth0", PROXY_MBIT)?;
    findings.figures.add("staying", 0.0);
    keep_order(&lab)?;
    let mut runs = Vec::new();
    for (number, Kind { suffix, has_sack, .. }) in (0..).zip(&KINDS) {
        for host in [client, server] {
            set_sack(host, *has_sack)?;
        }
        let one = session(&lab, &programs, number, findings)?;
        findings.set(&format!("goodput_dip_share{suffix}"), one.dip_share());
        findings.set(&format!("goodput_dip_ms{suffix}"), one.dip_ms());
        findings.set(&format!("reordered{suffix}"), one.reordered);
        findings.set(&format!("before_mbit{suffix}"), one.before());
        findings.set(&format!("after_mbit{suffix}"), median(&one.rates[one.left_at + STEADY_BINS..]));
        runs.push(one);
    }
    draw(&runs, findings)?;
    pair::report_resets(&[client, server], findings)
}

fn set_sack(host: &Host, has_sack: bool) -> Result<()> {
    host.shell(&format!("sysctl -qw net.ipv4.tcp_sack={}", u8::from(has_sack))).map(drop)
}

/// The policy has the order of some sessions kept.
fn keep_order(lab: &Lab) -> Result<()> {
    let ordered = (0..).zip(&KINDS).filter(|(_, kind)| kind.is_ordered).map(|(number, _)| bulk_of(number));
    let ordered: Vec<String> = ordered.collect();
    let rule = |name: &String| chain(name, name, &[], "protocol = \"tcp\"\nordered = true");
    let policy: String = ordered.iter().map(rule).collect();
    let hosts = ["router", "client", "server", "proxy"];
    let hosts: Vec<&Host> = hosts.into_iter().map(|name| lab.host(name)).collect::<Result<_>>()?;
    let names: Vec<&str> = ordered.iter().map(String::as_str).collect();
    apply(hosts[0], &policy, &hosts, &names).map(drop)
}

/// Segments that TCP of a host has got before their turn.
fn reordered(host: &Host) -> Result<f64> {
    Ok(observe::nstat(host)?.get("TcpExtTCPOFOQueue").copied().unwrap_or_default())
}

fn session(lab: &Lab, programs: &Programs, number: u16, findings: &mut Findings) -> Result<Run> {
    let proxy = lab.host("proxy")?;
    let mut bulk = pair_of(lab, number)?;
    let (_haproxy, when) = gate(lab, &programs.shim(), number)?;
    let to = format!("{}.{ZONE}", gate_of(number));
    let mut transfers =
        Transfers::start(lab.host("client")?, &mut bulk, Order { to: &to, ways: &["down:cubic"], pace: 0 })?;
    let begun_us = now_us();
    let_pass(BEFORE)?;
    let left_us = now_us();
    let reordered_before = reordered(lab.host("client")?)?;
    order(&when)?;
    let has_left = wait_for("the proxy to leave", LIMIT, || {
        let left = flows(proxy)?;
        ensure!(left == 0, "it has {left} flows");
        Ok(())
    });
    if let Err(error) = has_left {
        findings.note(format!("{error:#}"));
        findings.figures.add("staying", flows(proxy)? as f64);
    }
    let_pass(AFTER)?;
    let reordered = reordered(lab.host("client")?)? - reordered_before;
    transfers.refresh()?;
    let marks = transfers.received().remove(0).marks;
    transfers.finish(&format!("session {number}"), findings)?;
    // The last bin is over, and the first one has begun.
    let bins = (now_us() - begun_us) / BIN_US - 1;
    let bins = marks.last().map_or(0, |last| bins.min((last.0 - begun_us) / BIN_US));
    let rates: Vec<f64> = (0..bins).map(|bin| rate(&marks, begun_us + bin * BIN_US)).collect();
    let left_at = usize::try_from((left_us - begun_us) / BIN_US)?;
    ensure!(rates.len() > left_at + STEADY_BINS, "too few marks: {} bins", rates.len());
    Ok(Run { rates, reordered, left_at })
}

fn let_pass(time: Duration) -> Result<()> {
    let begun = Instant::now();
    wait_for("the session", 2 * time, || {
        ensure!(begun.elapsed() >= time, "it runs");
        Ok(())
    })
}

/// Goodput of a bin in Mbit/s. Between two marks of the receiver's it is taken to be even.
fn rate(marks: &[(u64, u64)], from_us: u64) -> f64 {
    let until = |us: u64| {
        let behind = marks.partition_point(|(at_us, _)| *at_us <= us);
        match (behind.checked_sub(1).and_then(|at| marks.get(at)), marks.get(behind)) {
            (Some((from_us, from)), Some((to_us, to))) => {
                *from as f64 + (to - from) as f64 * (us - from_us) as f64 / (to_us - from_us) as f64
            }
            (Some((_, bytes)), None) | (None, Some((_, bytes))) => *bytes as f64,
            (None, None) => 0.0,
        }
    };
    (until(from_us + BIN_US) - until(from_us)) * 8.0 / BIN_US as f64
}

/// All sessions, one after the other.
fn draw(runs: &[Run], findings: &Findings) -> Result<()> {
    let step_s = BIN_US as f64 / 1e6;
    let bins: usize = runs.iter().map(|run| run.rates.len()).sum();
    let mut begin = 0;
    let mut rates = Vec::new();
    let mut changes = Vec::new();
    for run in runs {
        let mut of_run = vec![0.0; bins];
        of_run[begin..begin + run.rates.len()].copy_from_slice(&run.rates);
        rates.push(of_run);
        changes.push(((begin + run.left_at) as f64 * step_s, "the proxy leaves".to_owned()));
        begin += run.rates.len();
    }
    let names = KINDS.each_ref().map(|kind| kind.name);
    let timeline = Timeline { names: &names, unit: "Mbit/s", rates: &rates, step_s, changes: &changes };
    findings.draw(SCENARIO.name, &timeline.svg())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_cut_between_marks_and_the_worst_one_is_found() {
        let marks = [(1_000_000, 0), (1_200_000, 1_000_000), (1_600_000, 2_000_000)];
        let rates: Vec<f64> = (0..3).map(|bin| rate(&marks, 1_000_000 + bin * BIN_US)).collect();
        assert_eq!(rates, [40.0, 20.0, 20.0]);
        let run = Run { rates: vec![10.0, 40.0, 40.0, 41.0, 30.0, 90.0], reordered: 0.0, left_at: 3 };
        assert_eq!((run.before(), run.dip_share(), run.dip_ms()), (40.0, 0.25, 200.0));
        assert_eq!(Run { rates: vec![40.0, 80.0], reordered: 0.0, left_at: 1 }.dip_share(), 0.0);
    }
}
