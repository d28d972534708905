//! `roam`: a client takes running transfers from a network without translator behind one translator, behind another,
//! and to a network that has IPv6 alone. The server stays behind a translator of its own, which filters its IPv6 as
//! well: nobody reaches it who was not asked.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::moved::{self, NAME, Pauses};
use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::observe;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::topology::Topology;
use crate::transfers::{Order, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "roam",
    summary: "a client roams from network to network, behind translators and to IPv6; the server is behind a \
              translator, too",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("networks", Exactly(PLACES.len() as f64)),
    bound("lifted_to_direct", AtLeast(PLACES.len() as f64)),
    bound("failed", Exactly(0.0)),
];

/// Where the client goes, in the order of its links.
const PLACES: [&str; 4] = ["lan", "cafe", "hotel", "mobile"];
const WAYS: [&str; 4] = ["up:cubic", "down:cubic", "up:bbr", "down:bbr"];
/// Bytes per second of each.
const PACE: u64 = 500_000;
const CALM_BYTES: u64 = PACE / 2;
const RESUMED_BYTES: u64 = PACE * 2;
const STEP_LIMIT: Duration = Duration::from_secs(20);
/// For how long a network is given to show that direct packets pass.
const LIFT_LIMIT: Duration = Duration::from_secs(15);

const TOPOLOGY: &str = r#"
[subnet.core]
v4 = "10.1.0.0/24"
v6 = "fd01::/64"
delay_ms = 5

[subnet.home]
v4 = "192.168.1.0/24"
v6 = "fd02::/64"

[subnet.lan]
v4 = "10.2.0.0/24"

[subnet.cafe]
v4 = "192.168.2.0/24"

[subnet.hotel]
v4 = "192.168.3.0/24"

[subnet.mobile]
v6 = "fd03::/64"

[host.router]
role = "router"
links = [{ subnet = "core" }]

[host.homegw]
role = "gateway"
nat = "core"
links = [{ subnet = "core" }, { subnet = "home" }]

[host.langw]
role = "gateway"
links = [{ subnet = "core" }, { subnet = "lan" }]

[host.cafegw]
role = "gateway"
nat = "core"
links = [{ subnet = "core" }, { subnet = "cafe" }]

[host.hotelgw]
role = "gateway"
nat = "core"
links = [{ subnet = "core" }, { subnet = "hotel" }]

[host.mobilegw]
role = "gateway"
firewall = "core"
links = [{ subnet = "core" }, { subnet = "mobile" }]

[host.server]
role = "agent"
links = [{ subnet = "home" }]

[host.client]
role = "agent"
links = [{ subnet = "lan" }, { subnet = "cafe" }, { subnet = "hotel" }, { subnet = "mobile" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("roam", TOPOLOGY)?, dir)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    let elsewhere: Vec<Act> = (1..PLACES.len()).map(Act::Down).collect();
    interface::change(&lab, client, &elsewhere)?;
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[client, server], findings)?;
    let mut serving = moved::serve(server)?;
    [client, server].iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    for figure in ["networks", "lifted_to_direct"] {
        findings.set(figure, 0.0);
    }
    let mut pauses = Pauses::default();
    pair::attempt_part("a walk", findings, |findings| {
        let order = Order { to: NAME, ways: &WAYS, pace: PACE };
        let mut transfers = Transfers::start(client, &mut serving, order)?;
        let walked = walk(&lab, &mut transfers, &mut pauses, findings);
        transfers.finish("a walk", findings)?;
        walked
    });
    pauses.report_ms("", findings);
    pair::report_resets(&[client, server], findings)?;
    moved::report_moves(&[client, server], findings)
}

fn walk(lab: &Lab, transfers: &mut Transfers<'_>, pauses: &mut Pauses, findings: &mut Findings) -> Result<()> {
    let client = lab.host("client")?;
    transfers.await_bytes("calm transfers", CALM_BYTES, STEP_LIMIT)?;
    arrive(lab, 0, findings)?;
    for (link, place) in PLACES.iter().enumerate().skip(1) {
        let went = interface::change(lab, client, &[Act::Down(link - 1), Act::Up(link)])?;
        let stood = pauses
            .enter("transfers that go on", transfers, went.before_us, RESUMED_BYTES, STEP_LIMIT)
            .with_context(|| format!("from {} to {place}", PLACES[link - 1]))?;
        progress(&format!("{} to {place}: {stood}", PLACES[link - 1]));
        arrive(lab, link, findings)?;
    }
    Ok(())
}

/// Transfers go on in a network, and go direct if they can.
fn arrive(lab: &Lab, link: usize, findings: &mut Findings) -> Result<()> {
    let hosts: [&Host; 2] = [lab.host("client")?, lab.host("server")?];
    findings.figures.add("networks", 1.0);
    match agent::await_paths(&hosts, true, WAYS.len(), LIFT_LIMIT) {
        Ok(()) => {
            findings.figures.add("lifted_to_direct", 1.0);
            progress(&format!("{}: direct", PLACES[link]));
        }
        Err(error) => progress(&format!("{}: encapsulated: {error:#}", PLACES[link])),
    }
    Ok(())
}
