//! `proxy-boxes`: sessions end at HAProxy and begin at HAProxy, as it is. A scrubber is put into them before the proxy
//! and behind it, replaced and taken out while every byte is checked at both ends; then the proxy leaves.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::insert_remove::{BOUNDS as CHANGES, BULK_PORT, BULK_SERVICE, bulk, prepare};
use super::leaving::{Front, await_left, haproxy, order};
use super::{ZONE, build, chain, serve};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::scenario::af_serval::programs::Programs;
use crate::scenario::{Findings, Scenario, is_long};
use crate::transfers::{Order, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "proxy-boxes",
    summary: "a scrubber is put into running sessions before HAProxy and behind it; HAProxy leaves them afterwards",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 7] =
    [CHANGES[0], CHANGES[1], CHANGES[2], CHANGES[3], CHANGES[4], CHANGES[5], bound("staying", Exactly(0.0))];

const PROXY: &str = "lb.shop";
const WAYS: [&str; 4] = ["up:cubic", "down:cubic", "up:cubic", "down:cubic"];
/// Bytes per second of each transfer.
const PACE: u64 = 1_000_000;
const LIMIT: Duration = Duration::from_secs(20);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("proxy-boxes", 2, &["proxy"], dir)?;
    let _agents = Agents::start(&lab)?;
    let proxy = lab.host("proxy")?;
    let programs = Programs::make(dir)?;
    let more = format!("protocol = \"tcp\"\nproxies = [\"{PROXY}\"]");
    let proxied = ("proxied", chain("proxied", BULK_SERVICE, &[PROXY], &more));
    let mut stage = prepare(&lab, &[proxied], findings)?;
    super::await_chains(proxy, &["proxied", "known"])?;
    let mut server = bulk(&stage)?;
    agent::await_instances(proxy, BULK_SERVICE, 1)?;
    let when = proxy.dir.join("leave");
    let front = Front { port: BULK_PORT, to: BULK_SERVICE, when: &when };
    let _haproxy = haproxy(proxy, &programs.shim(), &front)?;
    serve(proxy, PROXY, "proxy", &["--listen", &format!("0.0.0.0:{BULK_PORT}")])?;
    agent::await_instances(stage.client, PROXY, 1)?;
    let to = format!("{BULK_SERVICE}.{ZONE}");
    let mut transfers = Transfers::start(stage.client, &mut server, Order { to: &to, ways: &WAYS, pace: PACE })?;
    let rounds = if is_long() { 10 } else { 2 };
    for host in [stage.client, proxy] {
        progress(&format!("boxes of the sessions that begin at {}", host.name()));
        stage.orders_at = host;
        stage.rounds(BULK_SERVICE, WAYS.len(), rounds, findings)?;
    }
    transfers.await_bytes("transfers after all changes", 100_000, LIMIT)?;
    order(&when)?;
    await_left(proxy, findings)?;
    transfers.await_bytes("transfers without the proxy", 100_000, LIMIT)?;
    transfers.finish("transfers", findings)?;
    stage.report(findings)
}
