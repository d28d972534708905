//! `stack-lossy`: frames of a camera over a path that loses datagrams, at random and in rows: two flows side by side,
//! one plain and one by `fec`, and beside both srt-live-transmit, without Margay. A frame counts when all of it comes
//! within 100 ms; of SRT, which gives everything on 120 ms after it would have come (its latency, which is its time for
//! asking again), within those and 100 ms. And a rule turns `fec` on when a flow loses datagrams, and off when it does
//! not any more.

use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::{Findings, Scenario, is_long, pair};
use crate::agent::{self, Agents};
use crate::host::Host;
use crate::interface;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, AtMost, Exactly};
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::topology::Topology;
use crate::traffic::Sent;
use crate::traffic::frames::{self, Sent as SentFrames, Whole};
use crate::weather::Losses;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "stack-lossy",
    summary: "frames over a path that loses datagrams, plain, by `fec` and by SRT; a rule that turns `fec` on",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 9] = [
    // Of the frames that went by `fec`: at random, in rows of three, at random.
    bound("lost_frames_2", AtMost(0.005)),
    bound("lost_frames_burst", AtMost(0.03)),
    bound("lost_frames_5", AtMost(0.01)),
    // Bytes of repairs over those of datagrams.
    bound("overhead_2", AtMost(0.35)),
    bound("overhead_0", AtMost(0.02)),
    // Otherwise the path has lost nothing.
    bound("plain_lost_frames_2", AtLeast(0.1)),
    // The flow of the rule goes by `fec` where datagrams are lost, and plain where they are not.
    bound("turned_on", Exactly(1.0)),
    bound("turned_off", Exactly(1.0)),
    bound("failed", Exactly(0.0)),
];

/// There and back it is twice that.
const TOPOLOGY: &str = r#"
[subnet.wire]
v4 = "10.1.0.0/24"
delay_ms = 10

[host.server]
role = "router"
links = [{ subnet = "wire" }]

[host.client]
role = "agent"
links = [{ subnet = "wire" }]
"#;

const RULE: &str = r#"
[[stack_rule]]
names = ["ruled.shop"]
when = "path.loss > 0.01"
use = "fec"
hold_s = 1
release_s = 1
"#;

const SERVICE: &str = "film.shop";
const NAME: &str = "film.shop.sal.internal";
const PORT: u16 = 5004;
const RULED_SERVICE: &str = "ruled.shop";
const RULED_NAME: &str = "ruled.shop.sal.internal";
const RULED_PORT: u16 = 9;
/// A share of lost frames that needs no closer look.
const FEW: f64 = 0.005;
/// How much longer it is looked otherwise, and how often at most.
const MORE_S: f64 = 10.0;
const LOOKS_MAX: u32 = 5;
/// Datagrams a second of the flow that has a rule.
const RULED_RATE: u64 = 1000;
const LIMIT: Duration = Duration::from_secs(20);
/// The plain flow, the one that goes by `fec`, and what goes by SRT; and what their figures are called.
const RUNS: [u32; 3] = [1, 2, 3];
const FIGURES: [(&str, &str); 3] = [("plain_", ""), ("", ""), ("", "_srt")];
/// Where the run by `fec` and the one by SRT are among them.
const FEC: usize = 1;
const SRT: usize = 2;
/// Frames of the three are sent at different times: a row of losses is of one of them.
const APART: Duration = Duration::from_millis(11);
/// SRT's latency, in milliseconds, and how much longer a frame by it may take.
const SRT_LATENCY_MS: u32 = 120;
const SRT_IN_TIME_MS: u32 = SRT_LATENCY_MS + frames::IN_TIME_MS;
/// Where SRT's sender takes datagrams, its receiver gives them, and between the two hosts.
const SRT_PORTS: [u16; 3] = [6000, 6001, 6002];

/// How a path loses, and what its figures are called.
struct Stretch {
    name: &'static str,
    losses: Losses,
}

const STRETCHES: [Stretch; 4] = [
    Stretch { name: "0", losses: Losses { share: 0.0, row: 1 } },
    Stretch { name: "2", losses: Losses { share: 0.02, row: 1 } },
    Stretch { name: "burst", losses: Losses { share: 0.02, row: 3 } },
    Stretch { name: "5", losses: Losses { share: 0.05, row: 1 } },
];

struct Stage<'a> {
    lab: &'a Lab,
    client: &'a Host,
    server: &'a Host,
    sink: Program,
    srt_sink: Program,
    /// Its two ends, the receiver first.
    _srt: [Program; 2],
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse(SCENARIO.name, TOPOLOGY)?, dir)?;
    let client = lab.host("client")?;
    let server = lab.host("server")?;
    client.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{RULE}END"))?;
    let _agents = Agents::start(&lab)?;
    findings.figures.add("failed", 0.0);
    let sink = start_sink(server, "frame-sink", PORT, &[])?;
    let _ruled_sink = start_sink(server, "numbered-sink", RULED_PORT, &[])?;
    let srt_sink = start_sink(server, "frame-sink", SRT_PORTS[1], &["--in-time-ms", &SRT_IN_TIME_MS.to_string()])?;
    let srt = start_srt(&lab, client, server)?;
    agent::publish(server, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::publish(server, RULED_SERVICE, &format!("0.0.0.0:{RULED_PORT}"), &[])?;
    agent::await_instances(client, SERVICE, 1)?;
    agent::await_instances(client, RULED_SERVICE, 1)?;
    let stage = Stage { lab: &lab, client, server, sink, srt_sink, _srt: srt };
    pair::attempt_part("frames", findings, |findings| film(&stage, findings));
    lab.sky.lose(Losses::default());
    pair::attempt_part("a rule", findings, |findings| follow_rule(&stage, findings));
    Ok(())
}

fn start_sink(server: &Host, kind: &str, port: u16, more: &[&str]) -> Result<Program> {
    let listen = format!("0.0.0.0:{port}");
    let command = server.traffic([kind, "--listen", &listen].iter().chain(more))?;
    let sink = Program::start(command, &server.dir.join(format!("{kind}-{port}.log")))?;
    wait_for("a sink", LIMIT, || sink.log().contains("ready").then_some(()).context("it is not ready"))?;
    Ok(sink)
}

/// From a port of the client to a port of the server, by SRT between the hosts' own addresses.
fn start_srt(lab: &Lab, client: &Host, server: &Host) -> Result<[Program; 2]> {
    let [from, to, between] = SRT_PORTS;
    // Its packets bear no more than 1316 bytes unless told.
    let how = format!("latency={SRT_LATENCY_MS}&payloadsize=1456");
    let address = interface::first_address(lab, server, 0, false)?.addr();
    let start = |host: &Host, input: &str, output: &str| {
        let started = host.spawn("srt", ["srt-live-transmit", "-chunk:1456", input, output]);
        started.context("`scripts/setup` installs srt-live-transmit")
    };
    let listener = format!("srt://0.0.0.0:{between}?mode=listener&{how}");
    let receiver = start(server, &listener, &format!("udp://127.0.0.1:{to}"))?;
    let caller = format!("srt://{address}:{between}?mode=caller&{how}");
    Ok([receiver, start(client, &format!("udp://127.0.0.1:{from}"), &caller)?])
}

/// The client's newest flow to a service.
fn newest_flow(client: &Host, service: &str, known: &[String]) -> Result<String> {
    let open = agent::open_flows(client, service, "udp")?;
    let mut own =
        open.iter().filter(|flow| flow["lifecycle"] == "established").filter_map(|flow| flow["flow"].as_str());
    let fresh = own.find(|flow| !known.iter().any(|one| one == flow));
    Ok(fresh.context("there is none")?.to_owned())
}

impl Stage<'_> {
    /// Begins a run of frames; gives its program and its flow.
    fn begin(&self, run: u32, known: &[String]) -> Result<(Series<SentFrames>, String)> {
        let series = self.start(NAME, PORT, run)?;
        let flow = wait_for("the flow of a run", LIMIT, || newest_flow(self.client, SERVICE, known))?;
        Ok((series, flow))
    }

    fn start(&self, host: &str, port: u16, run: u32) -> Result<Series<SentFrames>> {
        let [port, run] = [u32::from(port), run].map(|word| word.to_string());
        Series::start(self.client, &["frames", host, &port, "--run", &run].map(str::to_owned))
    }

    /// The frames of a run that have come whole and in time.
    fn whole(&self, run: u32) -> Vec<u32> {
        // The last line may be half-written.
        let log = if run == RUNS[SRT] { self.srt_sink.log() } else { self.sink.log() };
        let whole = log.lines().filter_map(|line| serde_json::from_str::<Whole>(line).ok());
        whole.filter(|whole| whole.run == run).map(|whole| whole.frame).collect()
    }

    /// The number of the newest frame of each run.
    fn newest(&self) -> Result<[u32; 3]> {
        let newest = |run| self.whole(run).into_iter().max().with_context(|| format!("no frame of run {run} has come"));
        Ok([newest(RUNS[0])?, newest(RUNS[FEC])?, newest(RUNS[SRT])?])
    }

    /// Counts frames from `from` on. `fec` is to leave one frame of a thousand incomplete: of the 90 of a short run the
    /// first one that is lost would be more than any bound. So where frames are lost, more of them are counted. Gives
    /// the counts of bytes, and the newest frame of each run, in the end.
    fn look_long_enough(&self, from: [u32; 3], first_s: f64) -> Result<([f64; 2], [u32; 3])> {
        let mut looks = 0;
        loop {
            sleep(Duration::from_secs_f64(if looks == 0 { first_s } else { MORE_S }));
            looks += 1;
            let bytes = self.fec_bytes()?;
            let until = self.newest()?;
            // Of these nothing comes any more that is in time.
            sleep(Duration::from_millis(300));
            let frames = until[FEC].saturating_sub(from[FEC]).max(1);
            let whole = self.whole(RUNS[FEC]);
            let came = whole.iter().filter(|frame| (from[FEC]..until[FEC]).contains(frame)).count();
            if 1.0 - came as f64 / f64::from(frames) <= FEW || looks == LOOKS_MAX {
                return Ok((bytes, until));
            }
        }
    }

    /// Bytes of datagrams that went by `fec`, and of repairs.
    fn fec_bytes(&self) -> Result<[f64; 2]> {
        let bytes = |name: &str| agent::metric(self.client, &format!("margay_datapath_{name}_total"));
        Ok([bytes("fec_bytes")?, bytes("fec_repair_bytes")?])
    }
}

fn film(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let (plain, first) = stage.begin(RUNS[0], &[])?;
    sleep(APART);
    let (repaired, second) = stage.begin(RUNS[1], &[first])?;
    sleep(APART);
    let by_srt = stage.start("127.0.0.1", SRT_PORTS[0], RUNS[SRT])?;
    wait_for("frames of all runs", LIMIT, || stage.newest())?;
    // The server may have frames of a flow before the client has heard that the flow is confirmed.
    wait_for("a flow that may be changed", LIMIT, || agent::set_stack(stage.client, &second, "fec"))?;
    for stretch in &STRETCHES {
        pair::attempt_part(stretch.name, findings, |findings| lose(stage, stretch, findings));
    }
    for host in [stage.client, stage.server] {
        findings.note(format!("{} has dropped {:?}", host.name(), agent::drops(host)?));
    }
    let shown = agent::stack(stage.client, &second)?;
    if shown["path"] != "fec" {
        findings.note(format!("in the end the flow goes {}: {}", shown["path"], shown["path_why"]));
        findings.figures.add("failed", 1.0);
    }
    for series in [plain, repaired, by_srt] {
        series.finish(LIMIT)?;
    }
    Ok(())
}

/// Frames while the path loses in one way.
fn lose(stage: &Stage<'_>, stretch: &Stretch, findings: &mut Findings) -> Result<()> {
    let (settling_s, measured_s) = if is_long() { (5.0, 60.0) } else { (2.0, 3.0) };
    stage.lab.sky.lose(stretch.losses);
    let begun = stage.newest()?;
    sleep(Duration::from_secs_f64(settling_s));
    let from = stage.newest()?;
    let before = stage.fec_bytes()?;
    let (after, until) = stage.look_long_enough(from, measured_s)?;
    for (at, (way, of)) in FIGURES.into_iter().enumerate() {
        let whole = stage.whole(RUNS[at]);
        let lost = |from: u32, until: u32| {
            let came = whole.iter().filter(|frame| (from..until).contains(frame)).count();
            1.0 - came as f64 / f64::from(until.saturating_sub(from).max(1))
        };
        findings.set(&format!("{way}lost_frames_{}{of}", stretch.name), lost(from[at], until[at]));
        findings.set(&format!("{way}lost_frames_{}_at_first{of}", stretch.name), lost(begun[at], from[at]));
    }
    let [datagrams, repairs] = [after[0] - before[0], after[1] - before[1]];
    findings.set(&format!("overhead_{}", stretch.name), repairs / datagrams.max(1.0));
    Ok(())
}

/// A rule has a flow go by `fec` while it loses datagrams.
fn follow_rule(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    for figure in ["turned_on", "turned_off"] {
        findings.set(figure, 0.0);
    }
    let [port, rate] = [u64::from(RULED_PORT), RULED_RATE].map(|word| word.to_string());
    let words = ["numbered", RULED_NAME, &port, "--run", "1", "--rate", &rate, "--bytes", "200"].map(str::to_owned);
    let series: Series<Sent> = Series::start(stage.client, &words)?;
    let flow = wait_for("a flow with a rule", LIMIT, || newest_flow(stage.client, RULED_SERVICE, &[]))?;
    stage.lab.sky.lose(Losses { share: 0.05, row: 1 });
    await_stack(stage, &flow, "fec")?;
    findings.set("turned_on", 1.0);
    stage.lab.sky.lose(Losses::default());
    await_stack(stage, &flow, "plain")?;
    findings.set("turned_off", 1.0);
    series.finish(LIMIT)?;
    Ok(())
}

fn await_stack(stage: &Stage<'_>, flow: &str, wanted: &str) -> Result<()> {
    wait_for(&format!("a flow that is {wanted}"), LIMIT, || {
        let shown = agent::stack(stage.client, flow)?;
        let found = shown["stack"]["stack"].as_str().unwrap_or_default();
        let is_calm = shown["stack"]["changing_to"].as_str().is_none_or(str::is_empty);
        if found != wanted || !is_calm {
            bail!("it is {found}, and loses {} of a million: {}", shown["lost_sent_ppm"], shown["stack"]["rules"]);
        }
        Ok(())
    })
}
