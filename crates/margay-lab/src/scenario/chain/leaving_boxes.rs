//! `leaving-boxes`: HAProxy as it is leaves running sessions that pass a packet filter before it and a box behind it
//! (docs/decisions/0104): both boxes see the sessions afterwards, and the proxy sees nothing of them.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::leaving::{await_left, bulk_of, gate, gate_of, left_of, order, pair_of};
use super::{ZONE, apply, build, chain, serve};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::wait_for;
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::scenario::af_serval::programs::Programs;
use crate::scenario::{Findings, Scenario, pair};
use crate::transfers::{Order, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "leaving-boxes",
    summary: "HAProxy leaves running sessions between a packet filter and another box, which the sessions still pass",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    bound("with_boxes_completed", Exactly(WAYS.len() as f64)),
    bound("boxes_not_passed", Exactly(0.0)),
    bound("proxy_packets_after", Exactly(0.0)),
    bound("filtered_invalid", Exactly(0.0)),
    bound("staying", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const WAYS: [&str; 6] = ["up:cubic", "down:cubic", "up:cubic", "down:cubic", "up:bbr", "down:bbr"];
/// Bytes per second of each transfer.
const PACE: u64 = 2_000_000;
/// Before the proxy, a filter that drops what belongs to no connection, as an operator's does; and behind it.
const BOXES: [(&str, &str); 2] = [("box1", "fw.shop"), ("box2", "ids.shop")];
const FILTER: &str = "nft 'add table inet fw; add chain inet fw forward { type filter hook forward priority 0; }; add \
                      counter inet fw invalid; add rule inet fw forward ct state invalid counter name invalid drop'";
const LIMIT: Duration = Duration::from_secs(15);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("leaving-boxes", BOXES.len(), &["proxy"], dir)?;
    let _agents = Agents::start(&lab)?;
    let [client, server, proxy] = [lab.host("client")?, lab.host("server")?, lab.host("proxy")?];
    let programs = Programs::make(dir)?;
    for host in [client, server] {
        observe::count_virtual_resets(host)?;
    }
    observe::count(proxy, "passed", Passing::In, "iifname \"sal0\" meta l4proto tcp")?;
    put_boxes(&lab)?;
    let mut bulk = pair_of(&lab, 0)?;
    let (_haproxy, when) = gate(&lab, &programs.shim(), 0)?;
    let to = format!("{}.{ZONE}", gate_of(0));
    let mut transfers = Transfers::start(client, &mut bulk, Order { to: &to, ways: &WAYS, pace: PACE })?;
    transfers.await_bytes("transfers through boxes and proxy", 1_000_000, LIMIT)?;
    for (host, _) in BOXES {
        ensure!(passed(lab.host(host)?)? > 0.0, "{host} is not passed before the proxy leaves");
    }
    order(&when)?;
    await_left(proxy, findings)?;
    let times = left_of(client)?;
    findings.set("with_boxes_completed", times.to_turn.len() as f64);
    // What was on its way to the proxy has come.
    transfers.await_bytes("transfers without the proxy", 500_000, LIMIT)?;
    let at_proxy = passed(proxy)?;
    await_passing(&lab, findings)?;
    transfers.await_bytes("transfers through the boxes alone", 2_000_000, LIMIT)?;
    findings.set("proxy_packets_after", passed(proxy)? - at_proxy);
    let invalid = lab.host(BOXES[0].0)?.shell("nft list counter inet fw invalid")?;
    let invalid = invalid.split_whitespace().skip_while(|word| *word != "packets").nth(1).and_then(|n| n.parse().ok());
    findings.set("filtered_invalid", invalid.unwrap_or(f64::NAN));
    transfers.finish("transfers", findings)?;
    pair::report_resets(&[client, server], findings)
}

fn put_boxes(lab: &Lab) -> Result<()> {
    for (host, name) in BOXES {
        let one = lab.host(host)?;
        observe::count(one, "passed", Passing::In, "iifname \"sal0\" meta l4proto tcp")?;
        serve(one, name, "forward", &[])?;
    }
    lab.host(BOXES[0].0)?.shell(FILTER)?;
    let policy = [
        chain("before", &gate_of(0), &[BOXES[0].1], "protocol = \"tcp\""),
        chain("behind", &bulk_of(0), &[BOXES[1].1], "protocol = \"tcp\""),
    ];
    let hosts = ["router", "client", "proxy", "server", BOXES[0].0, BOXES[1].0];
    let hosts: Vec<&Host> = hosts.into_iter().map(|name| lab.host(name)).collect::<Result<_>>()?;
    apply(hosts[0], &policy.concat(), &hosts, &["before", "behind"])?;
    for (host, (_, name)) in [("client", BOXES[0]), ("proxy", BOXES[1]), ("client", BOXES[1])] {
        agent::await_instances(lab.host(host)?, name, 1)?;
    }
    Ok(())
}

fn passed(host: &Host) -> Result<f64> {
    Ok(observe::counts(host)?.get("passed").map_or(0.0, |count| count.packets))
}

/// Counts the boxes that see nothing more of the sessions.
fn await_passing(lab: &Lab, findings: &mut Findings) -> Result<()> {
    findings.figures.add("boxes_not_passed", 0.0);
    for (host, name) in BOXES {
        let one = lab.host(host)?;
        let before = passed(one)?;
        let passes = wait_for("packets at a box", LIMIT, || {
            ensure!(passed(one)? > before + 100.0, "none passes {name}");
            Ok(())
        });
        if let Err(error) = passes {
            findings.note(format!("{error:#}"));
            findings.figures.add("boxes_not_passed", 1.0);
        }
    }
    Ok(())
}
