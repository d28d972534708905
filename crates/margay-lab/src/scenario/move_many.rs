//! `move-many`: a client with ten thousand flows to one server gets another address. They move together: as many
//! messages as for one flow, and about as soon.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use ipnet::IpNet;

use super::moved::{self, NAME, Pauses};
use super::{Findings, Scenario, flow_memory, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::held::Held;
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtMost, Exactly};
use crate::report::{Bound, bound, median};
use crate::server;
use crate::topology::Topology;
use crate::transfers::{Order, Transfers};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "move-many",
    summary: "a client with 10,000 flows to one server gets another address; the same with one flow",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 7] = [
    // Fewer do not do. Whoever was answered late has asked again, so the middle of the changes counts.
    bound("signalling_messages", AtMost(4.0)),
    bound("signalling_messages_one", AtMost(4.0)),
    bound("ratio_vs_one", AtMost(3.0)),
    bound("resets", Exactly(0.0)),
    bound("echoed", Exactly(flow_memory::FLOWS as f64)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// Changes of the address with one flow, and with all.
const CHANGES: usize = 3;
const ECHO: &str = "echo.shop.sal.internal";
/// One flow talks all the time: what it notices of a move is the figure.
const WAYS: [&str; 1] = ["down:cubic"];
const PACE: u64 = 500_000;
const RESUMED_BYTES: u64 = PACE * 3 / 2;
const STEP_LIMIT: Duration = Duration::from_secs(20);
const FREE_NUMBER: usize = 100;

/// The server is its own router: messages about moves are those between the two, and no others.
const TOPOLOGY: &str = r#"
[subnet.near]
v4 = "10.1.0.0/24"

[subnet.far]
v4 = "10.2.0.0/24"
delay_ms = 5

[host.gateway]
role = "gateway"
links = [{ subnet = "near" }, { subnet = "far" }]

[host.server]
role = "router"
links = [{ subnet = "far" }]

[host.client]
role = "agent"
links = [{ subnet = "near" }]
"#;

/// The client and its address.
struct Stage<'a> {
    lab: &'a Lab,
    address: IpNet,
    number: usize,
}

/// What changes of the address took.
#[derive(Default)]
struct Moves {
    pauses: Pauses,
    messages: Vec<f64>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("move-many", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let (client, server) = (lab.host("client")?, lab.host("server")?);
    pair::demand_kernel(&[client, server], findings)?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, "echo.shop", "0.0.0.0:7", &[])?;
    let mut serving = moved::serve(server)?;
    [client, server].iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    let address = interface::first_address(&lab, client, 0, false)?;
    let mut stage = Stage { lab: &lab, address, number: FREE_NUMBER };

    let mut transfers = Transfers::start(client, &mut serving, Order { to: NAME, ways: &WAYS, pace: PACE })?;
    agent::await_paths(&[client, server], true, 1, STEP_LIMIT)?;
    let done = with_one_and_with_all(&mut stage, &mut transfers, findings);
    transfers.finish("the flow that talks", findings)?;
    done?;
    moved::report_moves(&[client, server], findings)
}

fn with_one_and_with_all(stage: &mut Stage<'_>, transfers: &mut Transfers<'_>, findings: &mut Findings) -> Result<()> {
    let (client, server) = (stage.lab.host("client")?, stage.lab.host("server")?);
    let one = stage.change("one flow", transfers)?;
    findings.set("move_ms_one", one.pauses.p50_ms());
    findings.set("signalling_messages_one", median(&one.messages));
    let mut held = Held::open(client, ECHO, flow_memory::FLOWS)?;
    ensure!(held.open_count() == flow_memory::FLOWS as f64, "not all flows opened: {}", held.said());
    // All of them have talked, and are direct where that comes to be.
    held.round()?;
    let _ = wait_for("direct flows", STEP_LIMIT, || {
        let (direct, all) = agent::direct_flows(client)?;
        findings.set("flows_direct", direct as f64);
        ensure!(direct > flow_memory::FLOWS, "{direct} of {all} are");
        Ok(())
    });
    let all = stage.change("all flows", transfers);
    let (before, said) = (held.exchanges(), held.round());
    findings.set("echoed", held.exchanges() - before);
    // Before ten thousand connections are closed at once, some of them while data is under way.
    pair::report_resets(&[client, server], findings)?;
    let failed = held.end()?;
    if failed > 0.0 {
        findings.note(format!("{failed} flows did not echo after the moves"));
    }
    findings.figures.add("failed", failed);
    let all = all?;
    said?;
    findings.set("move_ms", all.pauses.p50_ms());
    findings.set("ratio_vs_one", all.pauses.p50_ms() / one.pauses.p50_ms().max(PAUSE_MIN_MS));
    findings.set("signalling_messages", median(&all.messages));
    ensure!(agent::moving_messages(server)? > 0.0, "nobody counts messages of moves");
    Ok(())
}

/// Shorter pauses are not told from the talker's own beat.
const PAUSE_MIN_MS: f64 = 5.0;

impl Stage<'_> {
    /// Changes the client's address some times.
    fn change(&mut self, what: &str, transfers: &mut Transfers<'_>) -> Result<Moves> {
        let (client, server) = (self.lab.host("client")?, self.lab.host("server")?);
        let sent = || Ok(agent::moving_messages(client)? + agent::moving_messages(server)?) as Result<f64>;
        let mut moves = Moves::default();
        for _ in 0..CHANGES {
            transfers.await_bytes("a calm flow", RESUMED_BYTES, STEP_LIMIT)?;
            let before = sent()?;
            self.number += 1;
            let new = interface::address(self.lab, client, 0, false, self.number)?;
            let old = std::mem::replace(&mut self.address, new);
            let moment = interface::change(self.lab, client, &[Act::Add(0, new), Act::Remove(0, old)])?;
            let stood = moves.pauses.enter(what, transfers, moment.before_us, RESUMED_BYTES, STEP_LIMIT)?;
            let messages = sent()? - before;
            progress(&format!("{what}: {old} became {new}: {stood}, {messages} messages"));
            moves.messages.push(messages);
        }
        Ok(moves)
    }
}
