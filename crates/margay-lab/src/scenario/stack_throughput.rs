//! `stack-throughput`: datagrams as fast as they go, by each stack of datagrams and by plain UDP, one a call and by
//! `UDP_SEGMENT`. What goes by name and what goes plainly take turns many times a second; ratios are of what arrives,
//! medians over turns. Then a thousand flows by `fec`: what they cost the agents.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{Findings, Scenario, is_long, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound, median};
use crate::series::Series;
use crate::traffic::{Heard, Poured};
use crate::turns::take;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "stack-throughput",
    summary: "datagrams by each stack and by plain UDP in turns, one a call and by UDP_SEGMENT; memory of `fec` flows",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 7] = [
    bound("encap_ratio", AtLeast(0.3)),
    bound("secure_ratio", AtLeast(0.22)),
    bound("fec_ratio", AtLeast(0.2)),
    // Each byte is copied six times in place of two, and ciphered twice (docs/decisions/0096).
    bound("encap_ratio_gso", AtLeast(0.25)),
    bound("secure_ratio_gso", AtLeast(0.18)),
    bound("user_bytes_per_flow", AtMost(20_000.0)),
    bound("failed", Exactly(0.0)),
];

/// What figures call a stack, and what is ordered.
const STACKS: [(&str, &str); 4] =
    [("encap", "plain"), ("secure", "secure"), ("fec", "fec"), ("secure_fec", "secure-fec")];
/// Datagrams of a call, and the end of the figures' names. 40 of 1400 bytes are what one call takes at most.
const BATCHES: [(usize, &str); 2] = [(1, ""), (40, "_gso")];
/// Payload of a datagram: with every stack's headers it fits a link of 1500 bytes.
const BYTES: u64 = 1400;
const SERVICE: &str = "pour.shop";
/// Where the sinks listen: plain, and by name.
const PORTS: [u16; 2] = [9, 10];
const MANY_SERVICE: &str = "many.shop";
const MANY_NAME: &str = "many.shop.sal.internal";
const MANY_PORT: u16 = 11;
const MANY: usize = 1000;
/// Time between two datagrams of one of the many flows: none of them falls asleep.
const EVERY_MS: u64 = 1000;
const LIMIT: Duration = Duration::from_secs(30);

const RULE: &str = r#"
[[stack_rule]]
names = ["many.shop"]
when = "true"
use = "fec"
hold_s = 0
"#;

struct Stage<'a> {
    client: &'a Host,
    /// Plain, and by name: where datagrams go, and what has come.
    addresses: [String; 2],
    sinks: [Program; 2],
}

/// What was measured in the turns of one way.
#[derive(Default)]
struct Taken {
    gbit_per_s: Vec<f64>,
    bytes: f64,
    busy_s: f64,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = pair::build(SCENARIO.name, dir)?;
    let client = lab.host("client")?;
    let server = lab.host("server")?;
    // What follows a table belongs to it, so the rule is the last.
    [client, server].into_iter().try_for_each(agent::keep_encapsulated)?;
    client.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{RULE}END"))?;
    let _agents = Agents::start(&lab)?;
    findings.figures.add("failed", 0.0);
    let sinks = [serve(server, "pour-sink", PORTS[0])?, serve(server, "pour-sink", PORTS[1])?];
    agent::publish(server, SERVICE, &format!("0.0.0.0:{}", PORTS[1]), &[])?;
    agent::await_instances(client, SERVICE, 1)?;
    let (named, _) = agent::virtual_addresses(client, SERVICE)?;
    let stage = Stage { client, addresses: [pair::address(server)?, named], sinks };
    for (batch, end) in BATCHES {
        let mut plain = Taken::default();
        for (figure, stack) in STACKS {
            pair::attempt_part(&format!("{stack}, {batch} a call"), findings, |findings| {
                compare(&stage, (stack, batch), (figure, end), &mut plain, findings)
            });
        }
        report("plain", end, &plain, findings);
    }
    pair::attempt_part("a thousand flows", findings, |findings| hold(client, server, findings));
    Ok(())
}

fn serve(server: &Host, kind: &str, port: u16) -> Result<Program> {
    let command = server.traffic([kind, "--listen", &format!("0.0.0.0:{port}")])?;
    let sink = Program::start(command, &server.dir.join(format!("{kind}-{port}.log")))?;
    wait_for("a sink", LIMIT, || sink.log().contains("ready").then_some(()).context("it is not ready"))?;
    Ok(sink)
}

impl Stage<'_> {
    /// Starts a sender; gives it once its datagrams arrive.
    fn start(&self, way: usize, batch: usize) -> Result<Series<Poured>> {
        let [port, bytes, batch] = [PORTS[way].into(), BYTES, batch as u64].map(|number: u64| number.to_string());
        let words = ["pour", &self.addresses[way], &port, "--bytes", &bytes, "--batch", &batch].map(str::to_owned);
        let before = self.received(way);
        let sender = Series::start(self.client, &words)?;
        wait_for("datagrams", LIMIT, || {
            ensure!(self.received(way) > before, "none has come");
            Ok(())
        })?;
        Ok(sender)
    }

    /// Bytes that have come.
    fn received(&self, way: usize) -> u64 {
        let log = self.sinks[way].log();
        // The last line may be half-written.
        log.lines().rev().find_map(|line| serde_json::from_str::<Poured>(line).ok()).unwrap_or_default().bytes
    }

    fn measure(&self, way: usize, turn: Duration, taken: &mut Taken) -> Result<()> {
        let begun = Instant::now();
        let before = self.received(way);
        let busy_before = observe::machine_busy_seconds()?;
        sleep(turn);
        let bytes = (self.received(way) - before) as f64;
        ensure!(bytes > 0.0, "nothing has come in a turn");
        taken.gbit_per_s.push(bytes * 8.0 / begun.elapsed().as_secs_f64() / 1e9);
        taken.bytes += bytes;
        taken.busy_s += observe::machine_busy_seconds()? - busy_before;
        Ok(())
    }
}

/// The flows of datagrams that programs here have begun.
fn flows(host: &Host, service: &str) -> Result<Vec<String>> {
    let open = agent::open_flows(host, service, "udp")?;
    let own = open.iter().filter(|flow| flow["role"] == "initiator" && flow["lifecycle"] == "established");
    Ok(own.filter_map(|flow| flow["flow"].as_str()).map(str::to_owned).collect())
}

/// One stack and plain UDP, in turns.
fn compare(
    stage: &Stage<'_>,
    (stack, batch): (&str, usize),
    (figure, end): (&str, &str),
    plain: &mut Taken,
    findings: &mut Findings,
) -> Result<()> {
    let known = flows(stage.client, SERVICE)?;
    let senders = [stage.start(0, batch)?, stage.start(1, batch)?];
    let flow = wait_for("the sender's flow", LIMIT, || {
        flows(stage.client, SERVICE)?.into_iter().find(|flow| !known.contains(flow)).context("there is none")
    })?;
    if stack != "plain" {
        agent::set_stack(stage.client, &flow, stack)?;
    }
    // A flow's first packets pass the core, and so does what comes behind them, as long as one waits there.
    let begun = Instant::now();
    let misses = || agent::metric(stage.client, "margay_datapath_egress_misses_total");
    wait_for("the flow to be the cache's alone", LIMIT, || {
        let before = misses()?;
        sleep(Duration::from_millis(100));
        ensure!(misses()? == before, "the core still has packets of it");
        Ok(())
    })?;
    findings.set(&format!("begin_s_{figure}{end}"), begun.elapsed().as_secs_f64());
    let (rounds, turn) = if is_long() { (3, Duration::from_millis(200)) } else { (1, Duration::from_millis(100)) };
    let mut named = Taken::default();
    let before = plain.gbit_per_s.len();
    for round in 0..rounds {
        let signal = |way: usize, signal| senders[way].signal(signal);
        take(signal, turn, round, |way| stage.measure(way, turn, if way == 0 { &mut *plain } else { &mut named }))?;
    }
    let shown = agent::stack(stage.client, &flow)?;
    ensure!(shown["stack"]["stack"] == stack, "it is carried {}", shown["stack"]["stack"]);
    let pairs = named.gbit_per_s.iter().zip(&plain.gbit_per_s[before..]);
    let ratios: Vec<f64> = pairs.map(|(named, plain)| named / plain).collect();
    findings.set(&format!("{figure}_ratio{end}"), median(&ratios));
    progress(&format!(
        "{stack}, {batch} a call: {:.2} of {:.2} Gbit/s",
        median(&named.gbit_per_s),
        median(&plain.gbit_per_s)
    ));
    report(figure, end, &named, findings);
    Ok(())
}

/// What a way carries a second, and nanoseconds of the machine's processors for a byte.
fn report(figure: &str, end: &str, taken: &Taken, findings: &mut Findings) {
    findings.set(&format!("gbps_{figure}{end}"), median(&taken.gbit_per_s));
    findings.set(&format!("cpu_per_byte_{figure}{end}"), taken.busy_s * 1e9 / taken.bytes.max(1.0));
}

/// Many flows, which a rule has carried by `fec`: by how much the agent that has grown most has, for each.
fn hold(client: &Host, server: &Host, findings: &mut Findings) -> Result<()> {
    let listen = format!("0.0.0.0:{MANY_PORT}");
    let command = server.traffic(["asking-server", "--listen", &listen, "--name", "server"])?;
    let _server = Program::start(command, &server.dir.join("asking-server.log"))?;
    agent::publish(server, MANY_SERVICE, &listen, &[])?;
    agent::await_instances(client, MANY_SERVICE, 1)?;
    // What both agents need for the first of all flows is not the price of the thousandth.
    let _first = asking(client, 1)?;
    await_fec(client, 1)?;
    let agents = [agent::pid(client)?, agent::pid(server)?];
    let resident = || agents.iter().map(|pid| observe::resident_bytes(*pid)).collect::<Result<Vec<f64>>>();
    let before = resident()?;
    let _many = asking(client, MANY)?;
    await_fec(client, MANY + 1)?;
    let after = resident()?;
    let grown = before.iter().zip(&after).map(|(before, after)| after - before).fold(0.0, f64::max);
    findings.set("user_bytes_per_flow", grown / MANY as f64);
    Ok(())
}

fn asking(client: &Host, count: usize) -> Result<Series<Heard>> {
    let [port, count, every] = [MANY_PORT.into(), count as u64, EVERY_MS].map(|number: u64| number.to_string());
    let words = ["asking", MANY_NAME, &port, "--count", &count, "--every-ms", &every].map(str::to_owned);
    Series::start(client, &words)
}

/// Waits until so many flows go by `fec`.
fn await_fec(client: &Host, count: usize) -> Result<()> {
    wait_for("flows by fec", LIMIT, || {
        let open = agent::open_flows(client, MANY_SERVICE, "udp")?;
        let found = open.iter().filter(|flow| flow["path"] == "fec").count();
        ensure!(found >= count, "of {count} there are {found}");
        Ok(())
    })
}
