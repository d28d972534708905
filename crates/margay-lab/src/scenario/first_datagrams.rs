//! `first-datagrams`: new flows of datagrams, several at once, to a host behind a router that no association may be
//! older than. Programs send from the first moment on and do not wait for answers: all of it comes, once and in order.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::rules::TOPOLOGY;
use super::{Findings, Scenario, is_long};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::topology::Topology;
use crate::traffic::{Came, Sent};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "first-datagrams",
    summary: "new flows of datagrams whose programs do not wait for answers: none of the first is lost or overtaken",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 5] = [
    bound("lost", Exactly(0.0)),
    bound("duplicated", Exactly(0.0)),
    bound("reordered", Exactly(0.0)),
    bound("wrong", Exactly(0.0)),
    bound("flows", AtLeast(64.0)),
];

const SERVICE: &str = "count.shop";
const NAME: &str = "count.shop.sal.internal";
const PORT: u16 = 9;
/// One that fits the first packet of a flow's set-up, one that does not, and one that is cut in two on its way.
const SIZES: [usize; 3] = [100, 1000, 1472];
/// Datagrams a second, of one flow each. All that a program sends until its flow stands is less than a host holds.
const RATES: [u64; 3] = [100, 200, 500];
/// Datagrams of a flow until it is enough.
const ENOUGH: u64 = 50;
const LIMIT: Duration = Duration::from_secs(15);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse(SCENARIO.name, TOPOLOGY)?, dir)?;
    let laptop = lab.host("laptop")?;
    let server = lab.host("server")?;
    let _agents = Agents::start(&lab)?;
    let command = server.traffic(["numbered-sink", "--listen", &format!("0.0.0.0:{PORT}")])?;
    let sink = Program::start(command, &server.dir.join("numbered-sink.log"))?;
    wait_for("a sink", LIMIT, || sink.log().contains("ready").then_some(()).context("it is not ready"))?;
    agent::publish(server, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::await_instances(laptop, SERVICE, 1)?;
    for figure in ["lost", "duplicated", "reordered", "wrong"] {
        findings.figures.add(figure, 0.0);
    }
    for round in 0..if is_long() { 100 } else { 8 } {
        send_round(laptop, &sink, round, findings)?;
    }
    if findings.figures.get("lost") > 0.0 {
        findings.note(format!("dropped by the laptop: {}; by the server: {}", drops(laptop)?, drops(server)?));
    }
    Ok(())
}

/// Flows of each size and each rate, all at once.
fn send_round(laptop: &Host, sink: &Program, round: usize, findings: &mut Findings) -> Result<()> {
    let kinds = SIZES.iter().flat_map(|bytes| RATES.iter().map(move |rate| (bytes, rate)));
    let first = round * SIZES.len() * RATES.len();
    let mut senders: Vec<(u32, Series<Sent>)> = Vec::new();
    for (at, (bytes, rate)) in kinds.enumerate() {
        let run = u32::try_from(first + at)?;
        let [port, number, rate, bytes] = [u64::from(PORT), run.into(), *rate, *bytes as u64].map(|n| n.to_string());
        let words = ["numbered", NAME, &port, "--run", &number, "--rate", &rate, "--bytes", &bytes].map(str::to_owned);
        senders.push((run, Series::start(laptop, &words)?));
    }
    wait_for("datagrams of all flows", LIMIT, || {
        let came = came(sink);
        senders.iter().try_for_each(|(run, _)| {
            let received = came.get(run).map_or(0, |came| came.received);
            ensure!(received >= ENOUGH, "of flow {run} {received} have come");
            Ok(())
        })
    })?;
    for (run, sender) in senders {
        let sent = sender.finish(LIMIT)?.first().context("a sender has said nothing")?.sent;
        // What has not come by then is counted.
        let _ = wait_for("all datagrams", Duration::from_secs(1), || {
            let received = came(sink).get(&run).map_or(0, |came| came.received);
            ensure!(received >= sent, "{received} of {sent} have come");
            Ok(())
        });
        let came = came(sink).get(&run).copied().unwrap_or_default();
        let lost = sent.saturating_sub(came.received);
        if lost + came.duplicated + came.reordered + came.wrong > 0 {
            findings.note(format!("flow {run}: {lost} of {sent} lost, {came:?}"));
        }
        findings.figures.add("flows", 1.0);
        findings.figures.add("lost", lost as f64);
        findings.figures.add("duplicated", came.duplicated as f64);
        findings.figures.add("reordered", came.reordered as f64);
        findings.figures.add("wrong", came.wrong as f64);
    }
    Ok(())
}

/// What a host's agent has dropped, by reason.
fn drops(host: &Host) -> Result<String> {
    let text = agent::margay(host, ["status", "--metrics"])?;
    let counts = text.lines().filter(|line| line.starts_with("margay_drops_total") && !line.ends_with(" 0"));
    Ok(counts.collect::<Vec<_>>().join(", "))
}

/// What has come of each flow so far.
fn came(sink: &Program) -> BTreeMap<u32, Came> {
    let log = sink.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Came>(line).ok());
    lines.map(|came| (came.run, came)).collect()
}
