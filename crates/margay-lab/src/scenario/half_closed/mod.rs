//! `half-closed`: clients send a request and close their direction; the path dies; the server writes its answer and
//! closes; twelve seconds later the path is back. Every client has the answer, and nobody is reset: by a direct flow,
//! by a sealed one, and by plain TCP beside them, which shows what is asked of them.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::entries;
use crate::filter;
use crate::host::Host;
use crate::lab::Lab;
use crate::observe::{self, Passing};
use crate::program::{Program, wait_for};
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "half-closed",
    summary: "half-closed connections, whose server answers and closes while the path is dead for twelve seconds",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 7] = [
    bound("answered", Exactly((2 * EACH) as f64)),
    // Otherwise the scenario asks for what TCP does not do.
    bound("answered_by_plain_tcp", Exactly(EACH as f64)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("resets", Exactly(0.0)),
    bound("resets_on_the_way", Exactly(0.0)),
    bound("flows_left", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.west]
v4 = "10.1.0.0/24"
delay_ms = 5

[subnet.east]
v4 = "10.2.0.0/24"

[host.way]
role = "gateway"
links = [{ subnet = "west" }, { subnet = "east" }]

[host.router]
role = "router"
links = [{ subnet = "west" }]

[host.client]
role = "agent"
links = [{ subnet = "west" }]

[host.server]
role = "agent"
links = [{ subnet = "east" }]
"#;

/// The ports of what is direct, sealed, and plain.
const PORTS: [u16; 3] = [8001, 8002, 8003];
const DIRECT: &str = "direct.shop";
const SEALED: &str = "sealed.shop";
const SEALED_SERVICE: &str = "[[service]]\nname = \"sealed.shop\"\nlisten = \"0.0.0.0:8002\"\nsecure = true\n";
/// Connections of each kind.
const EACH: usize = 4;
const OUTAGE: Duration = Duration::from_secs(12);
const STEP_LIMIT: Duration = Duration::from_secs(20);
/// What waits for a timer that has backed off for the whole outage waits as long again.
const ANSWER_LIMIT: Duration = Duration::from_secs(40);
/// Late packets of what is over have come by then, and ports have rested.
const AFTER: Duration = Duration::from_secs(5);

struct Client {
    kind: &'static str,
    program: Program,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("half-closed", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    let ends = [lab.host("client")?, lab.host("server")?];
    pair::demand_kernel(&ends, findings)?;
    let script = dir.join("ends.py");
    std::fs::write(&script, include_str!("ends.py")).context("cannot write the ends' script")?;
    let serving = serve(ends[1], &script)?;
    count_resets(&lab, &ends)?;
    let mut clients = connect(&lab, &script)?;
    await_direct(&ends)?;
    // Before, a signal would end it.
    wait_for("connections", STEP_LIMIT, || {
        let connected = clients.iter().filter(|client| client.program.log().contains("connected")).count();
        ensure!(connected == 3 * EACH, "{connected} are there");
        Ok(())
    })?;
    for client in &clients {
        client.program.signal(Signal::SIGUSR1)?;
    }
    wait_for("requests at the server", STEP_LIMIT, || {
        let asked = serving.log().matches("asked ").count();
        ensure!(asked == 3 * EACH, "{asked} have come");
        Ok(())
    })?;
    filter::swallow(lab.host("way")?)?;
    serving.signal(Signal::SIGUSR1)?;
    wait_for("answers that are written", STEP_LIMIT, || {
        let closed = serving.log().matches("closed ").count();
        ensure!(closed == 3 * EACH, "{closed} are");
        Ok(())
    })?;
    std::thread::sleep(OUTAGE);
    filter::relent(lab.host("way")?)?;
    for figure in ["answered", "answered_by_plain_tcp", "wrong_bytes"] {
        findings.set(figure, 0.0);
    }
    for client in &mut clients {
        judge(client, findings)?;
    }
    std::thread::sleep(AFTER);
    report_resets(&lab, &ends, findings)?;
    // Flows that both ends have closed, and whose ends each has acknowledged, go within seconds.
    findings.set("flows_left", entries::flows_left(&ends, STEP_LIMIT)?);
    Ok(())
}

fn serve(server: &Host, script: &Path) -> Result<Program> {
    let ports = PORTS.map(|port| port.to_string());
    let words = ["python3", path(script)?, "serve"].into_iter().chain(ports.iter().map(String::as_str));
    let serving = server.spawn("serving", words)?;
    wait_for("listeners", STEP_LIMIT, || {
        ensure!(serving.log().matches("listens ").count() == PORTS.len(), "{}", serving.log());
        Ok(())
    })?;
    server.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{SEALED_SERVICE}END\n"))?;
    agent::kill(server)?;
    agent::start_again(server)?;
    agent::publish(server, DIRECT, &format!("0.0.0.0:{}", PORTS[0]), &[])?;
    Ok(serving)
}

fn path(script: &Path) -> Result<&str> {
    script.to_str().context("a path that is no text")
}

fn connect(lab: &Lab, script: &Path) -> Result<Vec<Client>> {
    let client = lab.host("client")?;
    [DIRECT, SEALED].iter().try_for_each(|service| agent::await_instances(client, service, 1))?;
    let addresses = [
        ("direct", agent::virtual_addresses(client, DIRECT)?.0),
        ("sealed", agent::virtual_addresses(client, SEALED)?.0),
        ("plain", pair::address(lab.host("server")?)?),
    ];
    let mut clients = Vec::new();
    for ((kind, address), port) in addresses.iter().zip(PORTS) {
        for number in 0..EACH {
            let words = ["python3", path(script)?, "ask", address, &port.to_string()];
            clients.push(Client { kind, program: client.spawn(&format!("{kind}-{number}"), words)? });
        }
    }
    Ok(clients)
}

/// All that can be direct is.
fn await_direct(ends: &[&Host]) -> Result<()> {
    wait_for("direct flows", STEP_LIMIT, || {
        for host in ends {
            let (direct, all) = agent::direct_flows(host)?;
            ensure!((direct, all) == (EACH, 2 * EACH), "{direct} of {all} flows of {} are direct", host.name());
        }
        Ok(())
    })
}

fn judge(client: &mut Client, findings: &mut Findings) -> Result<()> {
    let (kind, program) = (client.kind, &mut client.program);
    let ended = program.finish(ANSWER_LIMIT);
    let log = program.log();
    let said: Value = log.lines().last().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
    let figure = if kind == "plain" { "answered_by_plain_tcp" } else { "answered" };
    match said["right"].as_bool() {
        Some(true) => findings.figures.add(figure, 1.0),
        _ => findings.note(format!("{kind}: no answer, or another one: {said} {ended:?}")),
    }
    if said["right"] == false && said["error"].is_null() {
        findings.figures.add("wrong_bytes", 1.0);
    }
    Ok(())
}

/// Between programs and the virtual interface; and on the way between the hosts, of plain TCP and of flow ports.
fn count_resets(lab: &Lab, ends: &[&Host]) -> Result<()> {
    ends.iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    let way = lab.host("way")?;
    let [.., plain] = PORTS;
    let of_plain = format!("tcp flags & rst == rst tcp sport {plain}");
    let to_plain = format!("tcp flags & rst == rst tcp dport {plain}");
    let of_flows = "tcp flags & rst == rst tcp sport >= 61000 tcp dport >= 61000";
    observe::count(way, "plain_from_server", Passing::In, &of_plain)?;
    observe::count(way, "plain_from_client", Passing::In, &to_plain)?;
    observe::count(way, "of_flows", Passing::In, of_flows)
}

fn report_resets(lab: &Lab, ends: &[&Host], findings: &mut Findings) -> Result<()> {
    pair::report_resets(ends, findings)?;
    let counts = observe::counts(lab.host("way")?)?;
    let of = |name: &str| counts.get(name).copied().unwrap_or_default().packets;
    findings.set("resets_of_plain_tcp", of("plain_from_server") + of("plain_from_client"));
    findings.set("resets_on_the_way", of("of_flows"));
    Ok(())
}
