//! `datagram-failover`: connected UDP sockets that ask their server again and again go on at another instance when
//! theirs is gone: its program is killed, or its host is cut off the network. Sockets that only send do so, too; those
//! of a sticky name stay at a host that is cut off.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Below, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::series::Series;
use crate::traffic::{Answering, Heard, now_ms};
use crate::wire;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "datagram-failover",
    summary: "connected UDP sockets ask servers that are killed and cut off; others only send, or are of a sticky name",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 8] = [
    // From the last answer of an instance to the first one of another.
    bound("gap_ms_killed_p99", Below(300.0)),
    bound("gap_ms_cut_p99", Below(2500.0)),
    // Without an answer at the end.
    bound("dead_sockets", Exactly(0.0)),
    // Of those at an instance that went: heard by others, and not.
    bound("senders_moved", AtLeast(1.0)),
    bound("senders_left", Exactly(0.0)),
    bound("sticky_moved", Exactly(0.0)),
    // Otherwise there was none that could have moved.
    bound("sticky_kept", AtLeast(1.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "web.shop";
const NAME: &str = "web.shop.sal.internal";
const PORT: u16 = 7;
const STICKY_SERVICE: &str = "game.shop";
const STICKY_NAME: &str = "game.shop.sal.internal";
const STICKY_PORT: u16 = 8;
/// What happens to each.
const SERVERS: [&str; 3] = ["killed", "cut", "stays"];
/// Between two datagrams of a socket.
const EVERY_MS: &str = "20";
const LIMIT: Duration = Duration::from_secs(20);
/// After sockets were opened.
const FOLLOWED_AFTER: Duration = Duration::from_secs(1);
/// A socket that another instance has not answered by then is dead.
const DEAD_LIMIT: Duration = Duration::from_secs(10);
/// One without an answer for so long is none that lives: it has asked fifty times.
const SILENT_MS: f64 = 1000.0;
/// After the cut: by then, whoever is to be bound anew has been.
const STICKY_MS: f64 = 4000.0;

/// How many sockets of each kind; so many of those that ask, and of the sticky ones, that all servers have some.
struct Length {
    asking: usize,
    senders: usize,
    sticky: usize,
}

const SHORT: Length = Length { asking: 24, senders: 12, sticky: 24 };
const LONG: Length = Length { asking: 96, senders: 48, sticky: 96 };

/// A host that serves both names.
struct Instance<'a> {
    host: &'a Host,
    web: Program,
    _game: Program,
}

struct Stage<'a> {
    lab: &'a Lab,
    client: &'a Host,
    killed: Instance<'a>,
    cut: Instance<'a>,
    stays: Instance<'a>,
    asking: Series<Answering>,
    senders: Series<Answering>,
    /// Those that ask by the sticky name.
    sticky: Series<Answering>,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &[&SERVERS[..], &["client"]].concat(), dir)?;
    let _agents = Agents::start(&lab)?;
    findings.set("failed", 0.0);
    let stage = prepare(&lab)?;
    pair::attempt_part("a program that is killed", findings, |findings| kill(&stage, findings));
    pair::attempt_part("a host that is cut off", findings, |findings| cut_off(&stage, findings));
    pair::attempt_part("the end", findings, |findings| finish(stage, findings));
    Ok(())
}

/// Starts servers and sockets. All of these are bound then, and no server is without one.
fn prepare(lab: &Lab) -> Result<Stage<'_>> {
    let client = lab.host("client")?;
    let killed = serve(lab.host(SERVERS[0])?)?;
    let cut = serve(lab.host(SERVERS[1])?)?;
    let stays = serve(lab.host(SERVERS[2])?)?;
    agent::await_instances(client, SERVICE, SERVERS.len())?;
    agent::await_instances(client, STICKY_SERVICE, SERVERS.len())?;
    let length = if is_long() { LONG } else { SHORT };
    let asking = open(client, (NAME, PORT), length.asking, &[])?;
    let senders = open(client, (NAME, PORT), length.senders, &["--silent"])?;
    let sticky = open(client, (STICKY_NAME, STICKY_PORT), length.sticky, &[])?;
    let stage = Stage { lab, client, killed, cut, stays, asking, senders, sticky };
    wait_for("answers to all sockets", LIMIT, || {
        let answered = [latest(&stage.asking).len(), latest(&stage.sticky).len()];
        ensure!(answered == [length.asking, length.sticky], "there are {answered:?}");
        let told = heard_by(&[&stage.killed, &stage.cut, &stage.stays]).len();
        ensure!(told == length.senders, "of {} senders {told} were heard", length.senders);
        Ok(())
    })?;
    for host in [&stage.killed, &stage.cut, &stage.stays].map(|instance| instance.host) {
        let here = [sockets_at(&stage.asking, host).len(), sockets_at(&stage.sticky, host).len()];
        progress(&format!("{}: sockets that ask, and sticky ones: {here:?}", host.name()));
        ensure!(here[0] > 0, "no socket is bound to {}", host.name());
    }
    Ok(stage)
}

fn serve(host: &Host) -> Result<Instance<'_>> {
    let web = answer(host, PORT)?;
    let game = answer(host, STICKY_PORT)?;
    agent::publish(host, SERVICE, &format!("0.0.0.0:{PORT}"), &[])?;
    agent::publish(host, STICKY_SERVICE, &format!("0.0.0.0:{STICKY_PORT}"), &["--sticky"])?;
    Ok(Instance { host, web, _game: game })
}

/// Starts a server that answers datagrams with the host's name.
fn answer(host: &Host, port: u16) -> Result<Program> {
    let listen = format!("0.0.0.0:{port}");
    let command = host.traffic(["asking-server", "--listen", &listen, "--name", host.name()])?;
    let server = Program::start(command, &host.dir.join(format!("asking-{port}.log")))?;
    wait_for("a server of datagrams", LIMIT, || {
        ensure!(server.log().contains("ready"), "it is not ready: {}", server.log());
        Ok(())
    })?;
    Ok(server)
}

fn open(client: &Host, (name, port): (&str, u16), count: usize, options: &[&str]) -> Result<Series<Answering>> {
    let port = port.to_string();
    let count = count.to_string();
    let words = ["asking", name, &port, "--count", &count, "--every-ms", EVERY_MS];
    let words: Vec<String> = words.iter().chain(options).map(|word| (*word).to_owned()).collect();
    Series::start(client, &words)
}

/// Who answers each socket now, of those that have had an answer.
fn latest(sockets: &Series<Answering>) -> BTreeMap<usize, Answering> {
    let mut latest = BTreeMap::new();
    for line in sockets.lines() {
        latest.insert(line.socket, line);
    }
    latest
}

/// The sockets that a server was the last to answer.
fn sockets_at(sockets: &Series<Answering>, server: &Host) -> BTreeSet<usize> {
    let here = latest(sockets).into_values().filter(|line| line.server == server.name());
    here.map(|line| line.socket).collect()
}

/// The senders that some of these have heard.
fn heard_by(instances: &[&Instance<'_>]) -> BTreeSet<usize> {
    let mut senders = BTreeSet::new();
    for instance in instances {
        // The last line may be half-written.
        let log = instance.web.log();
        let heard = log.lines().filter_map(|line| serde_json::from_str::<Heard>(line).ok());
        senders.extend(heard.map(|heard| heard.sender));
    }
    senders
}

/// The client's flows of the sticky name that are not over, by their ids, with the name of the host at the other end.
fn sticky_flows(client: &Host) -> Result<BTreeMap<String, String>> {
    let mut flows = agent::open_flows(client, STICKY_SERVICE, "udp")?;
    flows.retain(|flow| flow["role"] == "initiator");
    let text = |text: &serde_json::Value| text.as_str().unwrap_or_default().to_owned();
    Ok(flows.iter().map(|flow| (text(&flow["flow"]), text(&flow["peer_name"]))).collect())
}

/// Lets an instance be gone, and waits until others answer its sockets and hear its senders. Gives when it went.
fn fail_over(
    stage: &Stage<'_>,
    gone: &Instance<'_>,
    others: &[&Instance<'_>],
    end: impl FnOnce() -> Result<()>,
    findings: &mut Findings,
) -> Result<f64> {
    let how = gone.host.name();
    let here = sockets_at(&stage.asking, gone.host);
    let senders = heard_by(&[gone]);
    ensure!(!here.is_empty(), "no socket is bound to {how}");
    let gone_ms = now_ms();
    end()?;
    // Those that are dead are counted at the end.
    let _ = wait_for("answers of other instances", DEAD_LIMIT, || {
        let left = sockets_at(&stage.asking, gone.host).len();
        ensure!(left == 0, "{left} sockets have none");
        Ok(())
    });
    let each_ms = gaps_ms(&stage.asking, &here, gone_ms);
    follow_senders(how, &senders, others, findings);
    if each_ms.len() < here.len() {
        findings.note(format!("{how}: of {} sockets others have answered {}", here.len(), each_ms.len()));
    }
    ensure!(!each_ms.is_empty(), "no other instance has answered a socket of {how}");
    findings.set(&format!("sockets_{how}"), here.len() as f64);
    findings.set(&format!("gap_ms_{how}_p99"), percentile(&each_ms, 99.0));
    findings.set(&format!("gap_ms_{how}_p50"), percentile(&each_ms, 50.0));
    Ok(gone_ms)
}

/// How long each of these sockets was without an answer when another server went on.
fn gaps_ms(sockets: &Series<Answering>, here: &BTreeSet<usize>, gone_ms: f64) -> Vec<f64> {
    let mut gaps_ms = BTreeMap::new();
    for line in sockets.lines().iter().filter(|line| here.contains(&line.socket) && line.first_ms > gone_ms) {
        // What comes after the first one is another matter.
        if let Some(last_ms) = line.last_ms {
            gaps_ms.entry(line.socket).or_insert(line.first_ms - last_ms);
        }
    }
    gaps_ms.into_values().collect()
}

/// Waits until others hear the senders of an instance that is gone.
fn follow_senders(how: &str, senders: &BTreeSet<usize>, others: &[&Instance<'_>], findings: &mut Findings) {
    let count_left = || senders.difference(&heard_by(others)).count();
    // Those that are left are counted.
    let _ = wait_for("senders at other instances", DEAD_LIMIT, || {
        let left = count_left();
        ensure!(left == 0, "{left} are left");
        Ok(())
    });
    let left = count_left();
    if left > 0 {
        findings.note(format!("{how}: of {} senders {left} were not heard elsewhere", senders.len()));
    }
    findings.figures.add("senders_left", left as f64);
    findings.figures.add("senders_moved", (senders.len() - left) as f64);
}

/// Kills the program of an instance.
fn kill(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let gone = &stage.killed;
    let end = || gone.web.signal(Signal::SIGKILL);
    fail_over(stage, gone, &[&stage.cut, &stage.stays], end, findings).map(drop)
}

/// Cuts a host off the network, without a word of it. Sockets of the sticky name stay there.
fn cut_off(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let gone = &stage.cut;
    // Whom routers list is followed from a moment after a flow has opened, of which nothing is seen from outside.
    sleep(FOLLOWED_AFTER);
    let here = sockets_at(&stage.sticky, gone.host);
    let mut kept = BTreeSet::new();
    wait_for("flows of the sticky name", LIMIT, || {
        let flows = sticky_flows(stage.client)?.into_iter().filter(|(_, peer)| peer == gone.host.name());
        kept = flows.map(|(flow, _)| flow).collect();
        ensure!(kept.len() == here.len(), "{} are to {}, not {}", kept.len(), gone.host.name(), here.len());
        Ok(())
    })?;
    let end = || wire::set_link(&stage.lab.topology, gone.host, false);
    let cut_ms = fail_over(stage, gone, &[&stage.stays], end, findings)?;

    // That nothing happens cannot be waited for.
    sleep(Duration::from_secs_f64((cut_ms + STICKY_MS - now_ms()).max(0.0) / 1e3));
    let open = sticky_flows(stage.client)?;
    let bound_anew = kept.iter().filter(|flow| !open.contains_key(*flow)).count();
    let answered_elsewhere = here.difference(&sockets_at(&stage.sticky, gone.host)).count();
    if bound_anew + answered_elsewhere > 0 {
        findings.note(format!(
            "of {} sticky sockets {bound_anew} were bound anew, and others have answered {answered_elsewhere}",
            here.len()
        ));
    }
    let moved = bound_anew.max(answered_elsewhere);
    findings.set("sticky_moved", moved as f64);
    findings.set("sticky_kept", (here.len() - moved) as f64);
    Ok(())
}

/// Ends all sockets, and counts those that nobody answers. A sticky one at the host that is cut off has nobody to.
fn finish(stage: Stage<'_>, findings: &mut Findings) -> Result<()> {
    let stuck = sockets_at(&stage.sticky, stage.cut.host);
    let asked = stage.asking.finish(LIMIT).context("the sockets that ask")?;
    let sticky = stage.sticky.finish(LIMIT).context("the sticky sockets")?;
    let told = stage.senders.finish(LIMIT).context("the senders")?;
    let dead = silent(&asked);
    let dead_sticky: BTreeSet<usize> = silent(&sticky).difference(&stuck).copied().collect();
    if !dead.is_empty() || !dead_sticky.is_empty() {
        findings.note(format!("nobody answers sockets {dead:?}, nor sticky sockets {dead_sticky:?}"));
    }
    findings.set("dead_sockets", (dead.len() + dead_sticky.len()) as f64);
    let errors = asked.iter().chain(&sticky).chain(&told).map(|line| line.errors).sum::<u64>();
    findings.set("send_errors", errors as f64);
    Ok(())
}

/// Those that had no answer for a while when they ended.
fn silent(lines: &[Answering]) -> BTreeSet<usize> {
    let is_answered = |line: &Answering| line.last_ms.is_some_and(|last_ms| line.first_ms - last_ms < SILENT_MS);
    let silent = lines.iter().filter(|line| line.server.is_empty() && !is_answered(line));
    silent.map(|line| line.socket).collect()
}
