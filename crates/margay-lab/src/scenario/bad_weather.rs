//! `bad-weather`: hosts move while signalling is lost, late and doubled: one after the other; again before the first
//! move is done; away from a path that carries messages, in that weather, and no data any more; and both at once, with
//! nobody who could bring them together but the server's old address, which it still has. Else what carries data is not
//! disturbed.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::ends::{Ends, SIDES};
use super::moved::{self, NAME, Pauses};
use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::filter;
use crate::host::Host;
use crate::interface::{self, Act};
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::transfers::{Order, Server, Transfers};
use crate::weather::Weather;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "bad-weather",
    summary: "hosts move while 20 % of all signalling is lost, 20 % late and 20 % doubled; again before they are \
              there; and crosswise; and away from a path that loses data alone",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 12] = [
    bound("failed", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("transfer_resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("changes", Exactly(CHANGES as f64)),
    bound("changes_during", Exactly(OVERTAKEN as f64)),
    bound("during", Exactly(OVERTAKEN as f64)),
    bound("redirected", Exactly(REDIRECTED as f64)),
    bound("left_deaf", Exactly(DEAF as f64)),
    bound("messages_lost", AtLeast(1.0)),
    bound("messages_late", AtLeast(1.0)),
    bound("messages_doubled", AtLeast(1.0)),
];

const CHANGES: usize = 12;
/// Moves during which another one begins.
const OVERTAKEN: usize = 8;
const REDIRECTED: usize = 4;
/// Paths that carry no data any more.
const DEAF: usize = 2;
const WEATHER: Weather = Weather { lost: 0.2, doubled: 0.2, late: 0.2, late_max: Duration::from_millis(60) };
/// Nobody hears anybody.
const SILENCE: Weather = Weather { lost: 1.0, ..WEATHER };
const WAYS: [&str; 2] = ["up:cubic", "down:cubic"];
/// Bytes per second of each.
const PACE: u64 = 100_000;
const CALM_BYTES: u64 = PACE;
/// More than was under way, and time between two changes: hosts that move too often are left where they are.
const RESUMED_BYTES: u64 = PACE * 3 / 2;
const STEP_LIMIT: Duration = Duration::from_secs(20);
/// The link of the gateway `far` behind which the router is.
const HUB_LINK: usize = 2;

/// One kind of change, again and again.
type Part = fn(&mut Ends<'_>, &mut Transfers<'_>, &mut Pauses, &mut Findings) -> Result<()>;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = moved::build_far("bad-weather", dir)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let rtt_ms = moved::measure_rtt_ms(client, server, findings)?;
    let mut ends = Ends::at_one_address(&lab)?;
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[client, server], findings)?;
    let mut serving = moved::serve(server)?;
    [client, server].iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    for figure in ["changes", "changes_during", "during", "redirected", "left_deaf", "resets", "messages_silenced"] {
        findings.set(figure, 0.0);
    }
    lab.sky.set(WEATHER);
    let parts: [(&str, &str, Part); 4] = [
        ("", "moves", move_alone),
        ("during_", "moves during moves", move_twice),
        ("deaf_", "paths without data", leave_deaf),
        // Last, since it costs the hosts their router.
        ("redirect_", "old places", cross),
    ];
    for (prefix, what, part) in parts {
        let mut pauses = Pauses::default();
        pair::attempt_part(what, findings, |findings| {
            carry_out(&mut ends, what, part, &mut serving, &mut pauses, findings)
        });
        pauses.report_rtts(prefix, rtt_ms, findings);
    }
    let fates = lab.sky.fates();
    findings.set("messages", fates.passed as f64);
    findings.set("messages_lost", fates.lost as f64 - findings.figures.get("messages_silenced"));
    findings.set("messages_late", fates.late as f64);
    findings.set("messages_doubled", fates.doubled as f64);
    // Connections that come and go in such weather may leave a RST beside.
    findings.set("resets_beside", observe::virtual_resets(&[client, server])?.0 - findings.figures.get("resets"));
    moved::report_moves(&[client, server], findings)
}

/// Client and server in turn.
fn move_alone(
    ends: &mut Ends<'_>,
    transfers: &mut Transfers<'_>,
    pauses: &mut Pauses,
    findings: &mut Findings,
) -> Result<()> {
    for time in 0..CHANGES {
        let side = time % 2;
        let event_us = ends.change(side)?;
        enter(&format!("the {}", SIDES[side]), transfers, pauses, event_us)?;
        findings.figures.add("changes", 1.0);
    }
    Ok(())
}

/// The same host, or the other one, before the first is there.
fn move_twice(
    ends: &mut Ends<'_>,
    transfers: &mut Transfers<'_>,
    pauses: &mut Pauses,
    findings: &mut Findings,
) -> Result<()> {
    for time in 0..OVERTAKEN {
        let (first, second) = (time % 2, (time / 2 + time) % 2);
        await_settled(ends.lab.host(SIDES[first])?, true)?;
        let sky = &ends.lab.sky;
        let lost_before = sky.fates().lost;
        sky.set(SILENCE);
        let changed = overtake(ends, first, second);
        findings.figures.add("messages_silenced", (sky.fates().lost - lost_before) as f64);
        sky.set(WEATHER);
        let event_us = changed?;
        findings.figures.add("during", 1.0);
        enter(&format!("the {}, then the {}", SIDES[first], SIDES[second]), transfers, pauses, event_us)?;
        findings.figures.add("changes_during", 1.0);
    }
    Ok(())
}

/// The second change begins during the first host's move, which nobody answers. Gives when the first began.
fn overtake(ends: &mut Ends<'_>, first: usize, second: usize) -> Result<u64> {
    let event_us = ends.change(first)?;
    await_settled(ends.lab.host(SIDES[first])?, false)?;
    ends.change(second)?;
    Ok(event_us)
}

fn await_settled(host: &Host, wanted: bool) -> Result<()> {
    let what = if wanted { "the end of a move" } else { "a move" };
    wait_for(what, STEP_LIMIT, || {
        let found = path(host)?;
        ensure!((found["state"] == "settled") == wanted, "{}: {found}", host.name());
        Ok(())
    })
}

/// The server gets a second address and is told to use it, while the client changes its own; neither hears the other,
/// until both are under way. No router helps them: only at the server's old address does the client find it, and is
/// told there where it is now.
fn cross(
    ends: &mut Ends<'_>,
    transfers: &mut Transfers<'_>,
    pauses: &mut Pauses,
    findings: &mut Findings,
) -> Result<()> {
    let lab = ends.lab;
    let (client, server, far) = (lab.host("client")?, lab.host("server")?, lab.host("far")?);
    for _ in 0..REDIRECTED {
        let known = path(server)?;
        let peer = known["peer"].as_str().context("a peer without an identity")?;
        let event_us = filter::swallow(far)?.before_us;
        let new = ends.next(1)?;
        interface::change(lab, server, &[Act::Add(0, new)])?;
        let wanted = new.addr().to_string();
        // One that it has not heard of yet is refused, and nothing happens.
        wait_for("the server's agent to know its new address", STEP_LIMIT, || {
            agent::margay(server, ["path", "migrate", peer, "--to", &wanted])
        })?;
        ends.change(0)?;
        filter::isolate(far, HUB_LINK)?;
        let is_there =
            |path: &Value, word: &str| path[word].as_str().is_some_and(|address| address.starts_with(&wanted));
        wait_for("both ends at the server's new address", STEP_LIMIT, || {
            let (own, peers) = (path(server)?, path(client)?);
            ensure!(is_there(&own, "local") && is_there(&peers, "remote"), "server: {own}, client: {peers}");
            Ok(())
        })?;
        enter(&format!("the server to {new}"), transfers, pauses, event_us)?;
        findings.figures.add("redirected", 1.0);
        let old = std::mem::replace(&mut ends.addresses[1], new);
        interface::change(lab, server, &[Act::Remove(0, old)])?;
        transfers.await_bytes("transfers without the old address", CALM_BYTES, STEP_LIMIT)?;
    }
    Ok(())
}

/// Both hosts have IPv6 besides, and on IPv4 all data is lost.
fn leave_deaf(
    ends: &mut Ends<'_>,
    transfers: &mut Transfers<'_>,
    pauses: &mut Pauses,
    findings: &mut Findings,
) -> Result<()> {
    let lab = ends.lab;
    let hosts = [lab.host("client")?, lab.host("server")?];
    for _ in 0..DEAF {
        for host in hosts {
            interface::change(lab, host, &[Act::Add(0, interface::first_address(lab, host, 0, true)?)])?;
        }
        transfers.await_bytes("transfers with another path", CALM_BYTES, STEP_LIMIT)?;
        let event_us = filter::deafen(lab.host("far")?)?.before_us;
        enter("from a path without data", transfers, pauses, event_us)?;
        findings.figures.add("left_deaf", 1.0);
        filter::relent(lab.host("far")?)?;
        for host in hosts {
            interface::change(lab, host, &[Act::Remove(0, interface::first_address(lab, host, 0, true)?)])?;
        }
        transfers.await_bytes("transfers by the path of before", CALM_BYTES, STEP_LIMIT)?;
    }
    Ok(())
}

/// What a host says of its path to the one peer that is no router.
fn path(host: &Host) -> Result<Value> {
    let paths = agent::paths(host)?;
    let peer = paths.into_iter().find(|path| path["router"] != true && path["flows"].as_u64() > Some(0));
    peer.with_context(|| format!("{} has no peer", host.name()))
}

/// With transfers of its own. Whatever went wrong, the next part begins in order.
fn carry_out(
    ends: &mut Ends<'_>,
    what: &str,
    part: Part,
    serving: &mut Server,
    pauses: &mut Pauses,
    findings: &mut Findings,
) -> Result<()> {
    let order = Order { to: NAME, ways: &WAYS, pace: PACE };
    let hosts = [ends.lab.host("client")?, ends.lab.host("server")?];
    let mut transfers = Transfers::start(hosts[0], serving, order)?;
    let calm = transfers.await_bytes("calm transfers", CALM_BYTES, STEP_LIMIT);
    let resets = observe::virtual_resets(&hosts)?.0;
    let done = calm.and_then(|()| part(ends, &mut transfers, pauses, findings));
    let (all, places) = observe::virtual_resets(&hosts)?;
    if all > resets {
        findings.note(format!("{what}: {} resets; with those before: {places}", all - resets));
    }
    findings.figures.add("resets", all - resets);
    filter::relent(ends.lab.host("far")?)?;
    transfers.finish(what, findings)?;
    done
}

/// Waits until all goes on, and enters the pauses.
fn enter(what: &str, transfers: &mut Transfers<'_>, pauses: &mut Pauses, event_us: u64) -> Result<()> {
    let stood = pauses
        .enter("transfers that go on", transfers, event_us, RESUMED_BYTES, STEP_LIMIT)
        .with_context(|| what.to_owned())?;
    progress(&format!("{what}: {stood}"));
    Ok(())
}
