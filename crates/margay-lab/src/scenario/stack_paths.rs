//! `stack-paths`: a flow of numbered datagrams over two links at once. Over two equal links it is striped; over one of
//! 40 and one of 20 Mbit/s it goes by weights; over two that lose one datagram of twenty each it is redundant, and then
//! repaired by each; and over two of which one is trusted it is sealed by the other alone, as what is recorded on both
//! shows.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use margay_wire::PORT;
use serde_json::Value;

use super::{Findings, Scenario, is_long, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::interface;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::recorder::Recorder;
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::topology::Topology;
use crate::traffic::{Came, Sent, now_ms, read_frames};
use crate::weather::Losses;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "stack-paths",
    summary: "a flow of datagrams over two links at once: striped, by weights, and redundantly where both lose",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 10] = [
    // What arrives over two links, for what arrives over one.
    bound("gain_equal", AtLeast(1.8)),
    // How far the share of a link is from its weight's share, of that.
    bound("weighted_share_error", AtMost(0.1)),
    bound("redundant_lost", AtMost(0.005)),
    // Of datagrams of which each has two chunks: without repairs a tenth.
    bound("repaired_lost", AtMost(0.02)),
    bound("duplicated", Exactly(0.0)),
    // Datagrams that are not as the stack of their link says, and kinds of datagrams that were not seen at all.
    bound("mixed_wrong", Exactly(0.0)),
    // More than one of the two carries.
    bound("mixed_mbit", AtLeast(41.0)),
    // Jitter and loss of a flow with a rule about them.
    bound("measured", Exactly(1.0)),
    bound("wrong", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

/// For each of both networks a client and a server of their own; one router for all.
const TOPOLOGY: &str = r#"
[subnet.upper0]
v4 = "10.1.0.0/24"
rate_mbit = 40
delay_ms = 5.0

[subnet.lower0]
v4 = "10.2.0.0/24"
rate_mbit = 40
delay_ms = 5.0

[subnet.upper1]
v4 = "10.3.0.0/24"
rate_mbit = 40
delay_ms = 5.0

[subnet.lower1]
v4 = "10.4.0.0/24"
rate_mbit = 20
delay_ms = 5.0

[host.router]
role = "router"
links = [{ subnet = "upper0" }, { subnet = "lower0" }, { subnet = "upper1" }, { subnet = "lower1" }]

[host.server0]
role = "agent"
links = [{ subnet = "upper0" }, { subnet = "lower0" }]

[host.client0]
role = "agent"
links = [{ subnet = "upper0" }, { subnet = "lower0" }]

[host.server1]
role = "agent"
links = [{ subnet = "upper1" }, { subnet = "lower1" }]

[host.client1]
role = "agent"
links = [{ subnet = "upper1" }, { subnet = "lower1" }]
"#;

/// It never holds, and has flows of the name measured.
const RULE: &str = r#"
[[stack_rule]]
names = ["paths0.shop"]
when = "path.jitter_ms > 60000"
use = "secure"
"#;

const SINK_PORT: u16 = 9;
const LIMIT: Duration = Duration::from_secs(20);
/// Payload of a datagram: all of it fits into one packet, sealed or not.
const BYTES: u64 = 1400;
/// Datagrams a second: a little more than one link of 40 Mbit/s carries, than one of 40 and one of 20, and than two of
/// 40; and what one carries with ease.
const FOR_ONE: u64 = 4000;
const FOR_UNEQUAL: u64 = 6000;
const FOR_TWO: u64 = 8000;
const LITTLE: u64 = 1500;
/// Packets that are recorded on a link, at most.
const CAPTURED_MAX: usize = 2000;
/// After a change of the policy, until it is measured.
const SETTLING: Duration = Duration::from_millis(1500);

/// A client, its server with a sink, and the name by which they go.
struct Stage<'a> {
    client: &'a Host,
    sink: Program,
    service: String,
    /// The client's address on each link.
    addresses: [String; 2],
    next_run: u32,
}

/// A run of datagrams, and its flow.
struct Run {
    number: u32,
    flow: String,
    series: Series<Sent>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse(SCENARIO.name, TOPOLOGY)?, dir)?;
    let router = lab.host("router")?;
    for number in 0..2 {
        // The token names an address that only the first two hosts reach.
        let home = interface::first_address(&lab, router, number * 2, false)?.addr();
        for role in ["client", "server"] {
            let host = lab.host(&format!("{role}{number}"))?;
            let join = format!("[join]\nrouter = \"{home}:{PORT}\"\n");
            let rule = if number == 0 { RULE } else { "" };
            host.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{join}{rule}END\n"))?;
        }
    }
    let _agents = Agents::start(&lab)?;
    for figure in ["failed", "duplicated", "wrong", "weighted_share_error"] {
        findings.figures.add(figure, 0.0);
    }
    let mut equal = Stage::build(&lab, 0)?;
    let mut unequal = Stage::build(&lab, 1)?;
    pair::attempt_part("links that lose", findings, |findings| over_lossy(&lab, &mut equal, findings));
    let server = lab.host("server0")?;
    pair::attempt_part("links that repair", findings, |findings| over_repaired(&lab, server, &mut equal, findings));
    pair::attempt_part("equal links", findings, |findings| over_equal(&mut equal, findings));
    pair::attempt_part("a plain link and a sealed one", findings, |findings| over_mixed(&mut equal, findings));
    pair::attempt_part("unequal links", findings, |findings| over_unequal(&mut unequal, findings));
    Ok(())
}

impl<'a> Stage<'a> {
    fn build(lab: &'a Lab, number: usize) -> Result<Self> {
        let client = lab.host(&format!("client{number}"))?;
        let server = lab.host(&format!("server{number}"))?;
        let listen = format!("0.0.0.0:{SINK_PORT}");
        let sink = Program::start(
            server.traffic(["numbered-sink", "--listen", &listen])?,
            &server.dir.join("numbered-sink.log"),
        )?;
        wait_for("a sink", LIMIT, || sink.log().contains("ready").then_some(()).context("it is not ready"))?;
        let service = format!("paths{number}.shop");
        agent::publish(server, &service, &listen, &[])?;
        agent::await_instances(client, &service, 1)?;
        let address = |link| interface::first_address(lab, client, link, false).map(|one| one.addr().to_string());
        Ok(Self { client, sink, service, addresses: [address(0)?, address(1)?], next_run: 1 })
    }

    /// Begins to send, so many datagrams a second.
    fn begin(&mut self, rate: u64) -> Result<Run> {
        let number = self.next_run;
        self.next_run += 1;
        let name = format!("{}.sal.internal", self.service);
        let [port, run, rate, bytes] = [u64::from(SINK_PORT), number.into(), rate, BYTES].map(|word| word.to_string());
        let words = ["numbered", &name, &port, "--run", &run, "--rate", &rate, "--bytes", &bytes].map(str::to_owned);
        let known: Vec<String> = self.open_flows()?.iter().filter_map(id_of).collect();
        let series = Series::start(self.client, &words)?;
        let flow = wait_for("the flow of a run", LIMIT, || {
            let fresh = self.open_flows()?.iter().filter_map(id_of).find(|flow| !known.contains(flow));
            fresh.context("there is none")
        })?;
        wait_for("datagrams of a run", LIMIT, || self.came(number).last().copied().context("none has come"))?;
        Ok(Run { number, flow, series })
    }

    fn open_flows(&self) -> Result<Vec<Value>> {
        agent::open_flows(self.client, &self.service, "udp")
    }

    /// What the sink has said of a run.
    fn came(&self, run: u32) -> Vec<Came> {
        // The last line may be half-written.
        let log = self.sink.log();
        log.lines().filter_map(|line| serde_json::from_str::<Came>(line).ok()).filter(|came| came.run == run).collect()
    }

    /// Gives a flow a policy, and waits until both of its places work, where it is to have some.
    fn order(&self, run: &Run, words: &[&str]) -> Result<()> {
        let order = ["flow", "policy", &run.flow].into_iter().chain(words.iter().copied());
        agent::margay(self.client, order)?;
        let wanted = if words[0] == "fail-over" { 0 } else { 2 };
        wait_for("the places of a flow", LIMIT, || {
            let shown = agent::stack(self.client, &run.flow)?;
            ensure!(shown["policy"] == words[0], "its policy is {}", shown["policy"]);
            let places = shown["places"]
                .as_array()
                .map_or(0, |places| places.iter().filter(|place| place["state"] == "live").count());
            ensure!(places == wanted, "{places} of {wanted} places are live");
            Ok(())
        })?;
        sleep(SETTLING);
        Ok(())
    }

    /// Bits that arrive in a second, in millions, from now on; and what of them the first link brought.
    fn measure(&self, run: &Run) -> Result<(f64, f64)> {
        let seconds = if is_long() { 10 } else { 2 };
        let before = self.sent_by(&run.flow)?;
        let from_ms = now_ms();
        sleep(Duration::from_secs(seconds));
        let to_ms = now_ms();
        let after = self.sent_by(&run.flow)?;
        let [first, second] = [after[0] - before[0], after[1] - before[1]];
        // The last slice is said by the first datagram behind it.
        sleep(Duration::from_millis(100));
        let within = |came: &Came| (from_ms..to_ms).contains(&(came.unix_ms as f64));
        let count: u64 = self.came(run.number).into_iter().filter(within).map(|came| came.count).sum();
        let mbit = (count * BYTES * 8) as f64 / 1e3 / (to_ms - from_ms);
        Ok((mbit, first / (first + second).max(1.0)))
    }

    /// Bytes that a flow has sent by each of the client's addresses.
    fn sent_by(&self, flow: &str) -> Result<[f64; 2]> {
        let shown = agent::stack(self.client, flow)?;
        let places = shown["places"].as_array().cloned().unwrap_or_default();
        let by = |address: &String| {
            let own = places.iter().filter(|place| place["local"] == **address);
            own.filter_map(|place| place["sent_bytes"].as_f64()).sum()
        };
        Ok([by(&self.addresses[0]), by(&self.addresses[1])])
    }

    /// Ends a run. Gives how many datagrams were sent, and how many have come.
    fn finish(&self, run: Run, findings: &mut Findings) -> Result<(u64, u64)> {
        let sent = run.series.finish(LIMIT)?.first().context("a sender has said nothing")?.sent;
        // What is under way comes within moments, or never.
        sleep(Duration::from_millis(300));
        let came = self.came(run.number).last().copied().context("nothing has come")?;
        findings.figures.add("duplicated", came.duplicated as f64);
        findings.figures.add("wrong", came.wrong as f64);
        Ok((sent, came.received))
    }
}

fn id_of(flow: &Value) -> Option<String> {
    let is_established = flow["lifecycle"] == "established";
    flow["flow"].as_str().filter(|_| is_established).map(str::to_owned)
}

/// Takes note of how far the share of the first link is from the one that its weight gives it, of the smaller share.
fn note_share(findings: &mut Findings, share: f64, wanted: f64) {
    let error = (share - wanted).abs() / wanted.min(1.0 - wanted);
    let worst = findings.figures.get("weighted_share_error").max(error);
    findings.set("weighted_share_error", worst);
}

fn over_equal(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    // With room on both.
    let run = stage.begin(LITTLE)?;
    let weights = [format!("{}=1", stage.addresses[0]), format!("{}=3", stage.addresses[1])];
    stage.order(&run, &["weighted", &weights[0], &weights[1]])?;
    let (_, share) = stage.measure(&run)?;
    let (sent, received) = stage.finish(run, findings)?;
    findings.set("weighted_lost", 1.0 - received as f64 / sent.max(1) as f64);
    note_share(findings, share, 0.25);
    let run = stage.begin(FOR_ONE)?;
    sleep(SETTLING);
    let (one_link, _) = stage.measure(&run)?;
    stage.finish(run, findings)?;
    let run = stage.begin(FOR_TWO)?;
    stage.order(&run, &["stripe"])?;
    let (both, share) = stage.measure(&run)?;
    stage.finish(run, findings)?;
    findings.set("one_link_mbit", one_link);
    findings.set("striped_mbit", both);
    findings.set("striped_share", share);
    findings.set("gain_equal", both / one_link.max(1.0));
    Ok(())
}

/// By the first link as it is, by the second one sealed: as what the client sends and receives there shows.
fn over_mixed(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let run = stage.begin(FOR_ONE)?;
    let plain = format!("{}=plain", stage.addresses[0]);
    stage.order(&run, &["stripe", &plain])?;
    let shown = agent::stack(stage.client, &run.flow)?;
    ensure!(shown["stack"]["stack"] == "secure", "it is carried {}", shown["stack"]["stack"]);
    let places = shown["places"].as_array().cloned().unwrap_or_default();
    let stacks = stage.addresses.each_ref().map(|address| {
        let own = places.iter().find(|place| place["local"] == **address);
        own.and_then(|place| place["stack"].as_str()).unwrap_or_default().to_owned()
    });
    ensure!(stacks == ["plain", "secure"], "its places are {stacks:?}");
    // The kind of message is the second byte, the stack of DATA the third; what carries no packet is shorter.
    let filter = "udp port 54324 and udp[9] = 32 and greater 100";
    let mut recorders = [0, 1].map(|link| Recorder::start_of(stage.client, link, filter, CAPTURED_MAX));
    let (mbit, _) = stage.measure(&run)?;
    findings.set("mixed_mbit", mbit);
    let mut seen = Vec::new();
    for recorder in &mut recorders {
        let recorder = recorder.as_mut().map_err(|error| anyhow::anyhow!("{error:#}"))?;
        seen.push(stacks_of(&recorder.finish()?)?);
    }
    stage.finish(run, findings)?;
    findings.set("mixed_plain", seen[0].0 as f64);
    findings.set("mixed_sealed", seen[1].1 as f64);
    let unseen = usize::from(seen[0].0 == 0) + usize::from(seen[1].1 == 0);
    findings.set("mixed_wrong", (seen[0].1 + seen[1].0 + unseen) as f64);
    Ok(())
}

/// Of recorded DATA, how many datagrams are not sealed, and how many are.
fn stacks_of(pcap: &Path) -> Result<(usize, usize)> {
    let frames = read_frames(pcap)?;
    let stack = |frame: &Vec<u8>| {
        // Ethernet's header has 14 bytes, IPv4's the length that it says, UDP's 8.
        let ip = frame.get(14..)?;
        ip.get(usize::from(ip[0] & 15) * 4 + 10).copied()
    };
    let stacks: Vec<u8> = frames.iter().filter_map(stack).collect();
    let sealed = stacks.iter().filter(|stack| margay_wire::is_sealed(**stack)).count();
    Ok((stacks.len() - sealed, sealed))
}

fn over_unequal(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let run = stage.begin(FOR_UNEQUAL)?;
    stage.order(&run, &["stripe"])?;
    let (mbit, _) = stage.measure(&run)?;
    findings.set("striped_unequal_mbit", mbit);
    let weight = format!("{}=2", stage.addresses[0]);
    stage.order(&run, &["weighted", &weight])?;
    let (mbit, share) = stage.measure(&run)?;
    findings.set("weighted_mbit", mbit);
    stage.finish(run, findings)?;
    note_share(findings, share, 2.0 / 3.0);
    Ok(())
}

fn over_lossy(lab: &Lab, stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let seconds = if is_long() { 30 } else { 5 };
    let run = stage.begin(LITTLE)?;
    stage.order(&run, &["redundant"])?;
    let received = |stage: &Stage<'_>| stage.came(run.number).last().map_or(0, |came| came.received);
    let before = received(stage);
    lab.sky.lose(Losses { share: 0.05, row: 1 });
    sleep(Duration::from_secs(seconds));
    lab.sky.lose(Losses::default());
    let came = received(stage) - before;
    findings.set("measured", 0.0);
    let measured = wait_for("jitter and loss of a flow", LIMIT, || {
        let shown = agent::stack(stage.client, &run.flow)?;
        let figure = |name: &str| shown[name].as_f64().with_context(|| format!("{name} is not known"));
        Ok([figure("jitter_sent_us")?, figure("lost_sent_ppm")?])
    });
    let [jitter_us, lost_ppm] = measured?;
    findings.set("measured", 1.0);
    findings.set("jitter_ms", jitter_us / 1e3);
    findings.set("lost_as_measured", lost_ppm / 1e6);
    sleep(SETTLING);
    let copies = agent::metric(stage.client, "margay_datapath_egress_copies_total")?;
    ensure!(copies > 0.0, "no datagram went by two places");
    // The links lose nothing but then.
    let (sent, all) = stage.finish(run, findings)?;
    let lost = sent.saturating_sub(all);
    findings.set("redundant_lost", lost as f64 / (came + lost).max(1) as f64);
    findings.set("redundant_datagrams", (came + lost) as f64);
    Ok(())
}

/// By both links with repairs: what each has lost comes back.
fn over_repaired(lab: &Lab, server: &Host, stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let run = stage.begin(LITTLE)?;
    let fec = stage.addresses.each_ref().map(|address| format!("{address}=fec"));
    stage.order(&run, &["stripe", &fec[0], &fec[1]])?;
    let shown = agent::stack(stage.client, &run.flow)?;
    let places = shown["places"].as_array().cloned().unwrap_or_default();
    ensure!(places.iter().all(|place| place["stack"] == "fec"), "its places are {places:?}");
    let restored = || agent::metric(server, "margay_datapath_fec_repaired_total");
    let received = |stage: &Stage<'_>| stage.came(run.number).last().map_or(0, |came| came.received);
    let restored_before = restored()?;
    let before = received(stage);
    lab.sky.lose(Losses { share: 0.05, row: 1 });
    sleep(Duration::from_secs(if is_long() { 30 } else { 5 }));
    lab.sky.lose(Losses::default());
    sleep(SETTLING);
    let came = received(stage) - before;
    findings.set("repaired_chunks", restored()? - restored_before);
    // The links lose nothing but then.
    let (sent, all) = stage.finish(run, findings)?;
    let lost = sent.saturating_sub(all);
    findings.set("repaired_lost", lost as f64 / (came + lost).max(1) as f64);
    Ok(())
}
