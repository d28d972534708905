//! `interface-failover`: two hosts with two interfaces each, on two networks that have nothing in common. The client's
//! interface that carries the transfers goes down. The same with MPTCP sockets on the same hosts, in turn.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::moved::{self, NAME, Pauses};
use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::observe;
use crate::report::Limit::{AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;
use crate::transfers::{Order, Server, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "interface-failover",
    summary: "the interface that carries 8 transfers goes down, and there is another; against MPTCP on the same hosts",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("pause_ratio_vs_mptcp", AtMost(1.0)),
    bound("rounds", Exactly(ROUNDS as f64)),
    bound("failed", Exactly(0.0)),
];

const ROUNDS: usize = 4;
const WAYS: [&str; 8] =
    ["up:cubic", "down:cubic", "up:cubic", "down:cubic", "up:cubic", "down:cubic", "up:cubic", "down:cubic"];
const MPTCP_PORT: u16 = 5203;
/// Bytes per second of each.
const PACE: u64 = 500_000;
/// Second halves: more than is under way, and time enough for MPTCP to have its second subflow.
const CALM_BYTES: u64 = PACE;
const RESUMED_BYTES: u64 = PACE / 2;
const STEP_LIMIT: Duration = Duration::from_secs(20);

const TOPOLOGY: &str = r#"
[subnet.upper]
v4 = "10.1.0.0/24"
delay_ms = 2

[subnet.lower]
v4 = "10.2.0.0/24"
delay_ms = 2.5

[host.router]
role = "router"
links = [{ subnet = "upper" }, { subnet = "lower" }]

[host.server]
role = "agent"
links = [{ subnet = "upper" }, { subnet = "lower" }]

[host.client]
role = "agent"
links = [{ subnet = "upper" }, { subnet = "lower" }]
"#;

/// One of those that are compared.
struct Side {
    what: &'static str,
    /// Of its figures.
    prefix: &'static str,
    mptcp: bool,
    /// Somebody tells MPTCP at once that the interface goes down; the kernel's path manager does not look.
    managed: bool,
}

const SIDES: [Side; 3] = [
    Side { what: "by name", prefix: "", mptcp: false, managed: false },
    Side { what: "MPTCP", prefix: "mptcp_", mptcp: true, managed: false },
    Side { what: "MPTCP with a manager", prefix: "mptcp_managed_", mptcp: true, managed: true },
];

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("interface-failover", TOPOLOGY)?, dir)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let address = set_up_mptcp(&lab)?;
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[client, server], findings)?;
    let mut serving = moved::serve(server)?;
    [client, server].iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    let mut serving_mptcp = Server::start(server, MPTCP_PORT, true)?;
    let mut pauses = SIDES.map(|_| Pauses::default());
    findings.set("rounds", 0.0);
    for round in 0..ROUNDS {
        for (side, pauses) in SIDES.iter().zip(&mut pauses) {
            pair::attempt_part(&format!("round {round}, {}", side.what), findings, |findings| {
                let (serving, to) =
                    if side.mptcp { (&mut serving_mptcp, address.as_str()) } else { (&mut serving, NAME) };
                fail_over(&lab, side, serving, to, pauses, findings)?;
                findings.figures.add("rounds", f64::from(u8::from(!side.mptcp)));
                Ok(())
            });
        }
    }
    for (side, pauses) in SIDES.iter().zip(&pauses) {
        pauses.report_ms(side.prefix, findings);
    }
    let [ours, mptcp, _] = &pauses;
    if ours.count() > 0 && mptcp.count() > 0 {
        findings.set("pause_ratio_vs_mptcp", ours.p50_ms() / mptcp.p50_ms());
    }
    pair::report_resets(&[client, server], findings)?;
    moved::report_moves(&[client, server], findings)
}

/// The server tells of both of its addresses, and the client opens a subflow to each: the networks have nothing in
/// common, so the two are disjoint, and either can carry all. Gives the server's first address.
fn set_up_mptcp(lab: &Lab) -> Result<String> {
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    for host in [client, server] {
        host.run(["ip", "mptcp", "limits", "set", "subflows", "4", "add_addr_accepted", "4"])?;
    }
    for link in 0..server.plan.links.len() {
        let address = interface::first_address(lab, server, link, false)?.addr().to_string();
        server.run(["ip", "mptcp", "endpoint", "add", &address, "dev", &format!("eth{link}"), "signal"])?;
    }
    pair::address(server)
}

/// Transfers, and the interface that carries most of them goes down.
fn fail_over(
    lab: &Lab,
    side: &Side,
    serving: &mut Server,
    to: &str,
    pauses: &mut Pauses,
    findings: &mut Findings,
) -> Result<()> {
    let hosts = [lab.host("client")?, lab.host("server")?];
    let resets = || Ok(observe::virtual_resets(&hosts)?.0) as Result<f64>;
    let before = resets()?;
    let mut transfers = Transfers::start(hosts[0], serving, Order { to, ways: &WAYS, pace: PACE })?;
    let failed_over = under(lab, side, &mut transfers, pauses);
    // Those that come when transfers end are another matter than those that come while they run.
    findings.figures.add("resets_while_running", resets()? - before);
    // What they bring is checked in any case.
    transfers.finish(side.what, findings)?;
    failed_over
}

fn under(lab: &Lab, side: &Side, transfers: &mut Transfers<'_>, pauses: &mut Pauses) -> Result<()> {
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    if !side.mptcp {
        agent::await_paths(&[client, server], true, WAYS.len(), STEP_LIMIT)?;
    }
    let before = interface::carried(client)?;
    transfers.await_bytes("calm transfers", CALM_BYTES, STEP_LIMIT)?;
    let link = interface::busiest(client, &before)?;
    // MPTCP's connections begin at the first interface; what a subflow of the second one needs is another word.
    let acts = if side.managed && link == 0 { &[Act::GiveUp(link), Act::Down(link)][..] } else { &[Act::Down(link)] };
    let went = interface::change(lab, client, acts)?;
    let resumed = pauses.enter("transfers that go on", transfers, went.before_us, RESUMED_BYTES, STEP_LIMIT);
    // Those that stand still may go on then.
    interface::change(lab, client, &[Act::Up(link)])?;
    let stood = resumed.with_context(|| format!("eth{link} went down"))?;
    progress(&format!("{}: eth{link} went down; {stood}", side.what));
    Ok(())
}
