//! `agent-restart`: agents are killed and started again under transfers, and once left dead while all flows are direct.
//! Flows go on, those that end meanwhile end as they should, connects wait for a router that starts, names of others
//! are found as ever, and nothing is left behind.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::{Findings, Scenario, pair};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::downloads::{self, Downloads, Order};
use crate::entries::{self, Entries};
use crate::host::Host;
use crate::lab::Lab;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Nginx, fetch, noise, sha256};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "agent-restart",
    summary: "100 transfers while agents are killed and started again, left dead, and started while transfers end",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 10] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
    bound("kills", Exactly((3 * KILLS) as f64)),
    bound("goodput_ratio_dead", AtLeast(0.95)),
    bound("ended_while_dead", Exactly(SHORT_COUNT as f64)),
    bound("names_found_while_dead", AtLeast(10.0)),
    bound("starts_while_ending", AtLeast(10.0)),
    bound("leaked_entries", Exactly(0.0)),
    bound("hash_maps_kept", AtLeast(FLOW_MAPS)),
];

/// The hashes of a flow cache: those of sockets that listen are another agent's own each time.
const FLOW_MAPS: f64 = 5.0;
const NAME: &str = "web.shop.sal.internal";
const TRANSFERS: usize = 100;
/// Of each agent.
const KILLS: usize = 3;
/// Long enough for all kills: a minute at a pace that leaves the link room. On a full one some transfers are much
/// faster than others, and end before all agents have been killed.
const PACED_BYTES: usize = 18_000_000;
const PACE: u64 = 300_000;
/// Carried while an agent is dead: what all of them take in a second.
const CARRIED_BYTES: f64 = (TRANSFERS as u64 * PACE) as f64;
const DEAD: Duration = Duration::from_secs(30);
/// What the last of the transfers that end meanwhile may take more: on a busy machine TCPs share the link so badly that
/// nine of twenty lacked 2 % after the half minute.
const LATE: Duration = Duration::from_secs(20);
/// Transfers that end while the agents are dead, by their pace, and those that do not. The first need a quarter of a
/// fair share of the link: TCPs may share it badly.
const SHORT_COUNT: usize = 20;
const SHORT_BYTES: usize = 4_000_000;
const SHORT_PACE: u64 = 125_000;
/// Transfers whose ends lie apart: in groups, each a little slower than the one before.
const BRIEF_BYTES: usize = 5_000_000;
const GROUPS: usize = 10;
const PACE_STEP: u64 = 12_000;
/// All together more than the link takes. Even alone, none of them is so fast that its server has given all away before
/// the agents are back.
const LONG_PACE: u64 = 620_000;
const LONG_BYTES: usize = 40_000_000;
const LONG_COUNT: usize = TRANSFERS - SHORT_COUNT;
/// Starts of the router, each with a connect at once.
const ROUTER_STARTS: usize = 5;
const OPEN_LIMIT: Duration = Duration::from_secs(30);
const END_LIMIT: Duration = Duration::from_secs(180);
/// What an agent that is dead may keep transfers from doing, before it is started again.
const PAUSE: Duration = Duration::from_secs(2);
const OTHER_NAME: &str = "www.example.org";
const OTHER_ADDRESS: &str = "192.0.2.80";

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"

[host.router]
role = "router"
links = [{ subnet = "site" }]

[host.server]
role = "agent"
links = [{ subnet = "site", rate_mbit = 400 }]

[host.client]
role = "agent"
links = [{ subnet = "site" }]
"#;

struct Stage<'a> {
    hosts: [&'a Host; 3],
    client: &'a Host,
    server: &'a Host,
    root: PathBuf,
}

impl Stage<'_> {
    fn ends(&self) -> [&Host; 2] {
        [self.client, self.server]
    }

    /// Starts the agents that do not run.
    fn start_missing(&self) -> Result<()> {
        self.hosts.iter().try_for_each(|host| agent::pid(host).map(drop).or_else(|_| agent::start_again(host)))
    }

    /// Runs a part. Whatever went wrong there, the next one starts with all agents; and resets are said to be of the
    /// part that had them.
    fn part(&self, what: &str, findings: &mut Findings, work: fn(&Self, &mut Findings) -> Result<()>) -> Result<()> {
        pair::attempt_part(what, findings, |findings| work(self, findings));
        self.start_missing()?;
        self.note_resets(what, findings)
    }

    fn note_resets(&self, what: &str, findings: &mut Findings) -> Result<()> {
        let (resets, places) = observe::virtual_resets(&self.ends())?;
        if resets > findings.figures.get("resets") {
            findings.note(format!("{what}: resets by now: {places}"));
        }
        findings.set("resets", resets);
        Ok(())
    }

    fn downloads(&self, path: &str, count: usize, pace: u64) -> Result<Downloads> {
        Downloads::start(self.client, Order { host: NAME, path, count, pace })
    }

    fn finish(&self, what: &str, path: &str, running: Downloads, findings: &mut Findings) -> Result<()> {
        let results = running.finish(END_LIMIT)?;
        downloads::judge(what, &results, &sha256(self.client, &self.root.join(path))?, findings);
        let stall_ms = downloads::stall_ms_max(&results);
        findings.set("stall_ms_max", findings.figures.get("stall_ms_max").max(stall_ms));
        Ok(())
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("agent-restart", TOPOLOGY)?, dir)?;
    let hosts = [lab.host("router")?, lab.host("server")?, lab.host("client")?];
    let [router, server, client] = hosts;
    let _dns = name_server(router, client)?;
    let _agents = Agents::start(&lab)?;
    pair::demand_kernel(&[client, server], findings)?;
    let nginx = Nginx::start(server, &["0.0.0.0:80"])?;
    nginx.put("paced", &noise(PACED_BYTES, 4))?;
    nginx.put("long", &noise(LONG_BYTES, 1))?;
    nginx.put("short", &noise(SHORT_BYTES, 2))?;
    nginx.put("brief", &noise(BRIEF_BYTES, 3))?;
    nginx.put("tiny", b"What the first of all flows needs is no leak.\n")?;
    agent::publish(server, "web.shop", "0.0.0.0:80", &[])?;
    let stage = Stage { hosts, client, server, root: nginx.root.clone() };
    let warm_up = stage.downloads("tiny", 1, 0)?;
    stage.finish("a warm-up", "tiny", warm_up, findings)?;
    let before = Entries::settled(&stage.ends())?;
    stage.ends().iter().try_for_each(|host| observe::count_virtual_resets(host))?;

    stage.part("agents killed and started again", findings, kill_each)?;
    stage.part("agents left dead", findings, leave_dead)?;
    stage.part("transfers that end while agents start", findings, end_meanwhile)?;
    stage.part("connects while a router starts", findings, connect_meanwhile)?;
    entries::report_leaks(&stage.ends(), &before, findings)?;
    stage.note_resets("what was left of them", findings)
}

/// Somebody else's name server, which the client asks for everything before Margay is there.
fn name_server(at: &Host, client: &Host) -> Result<Program> {
    let address = pair::address(at)?;
    let command = at.traffic(["dns", "--listen", &format!("{address}:53"), "--answer", OTHER_ADDRESS])?;
    let program = Program::start(command, &at.dir.join("dns.log"))?;
    wait_for("the name server", OPEN_LIMIT, || {
        if program.log().contains("ready") { Ok(()) } else { bail!("it is not ready: {}", program.log()) }
    })?;
    client.shell(&format!("echo 'nameserver {address}' > /etc/resolv.conf"))?;
    find_other_name(client)?;
    Ok(program)
}

/// As programs do, by the host's resolver.
fn find_other_name(client: &Host) -> Result<()> {
    let found = client.run(["getent", "ahostsv4", OTHER_NAME])?;
    if found.contains(OTHER_ADDRESS) { Ok(()) } else { bail!("{OTHER_NAME} is found at {found:?}") }
}

/// Every agent three times, one after the other, at even distances of the transfers' way.
fn kill_each(stage: &Stage, findings: &mut Findings) -> Result<()> {
    let mut running = stage.downloads("paced", TRANSFERS, PACE)?;
    let killed = kill_in_turn(stage, &mut running, findings);
    // What became of the transfers is said in any case.
    stage.finish("agents killed and started again", "paced", running, findings)?;
    killed
}

fn kill_in_turn(stage: &Stage, running: &mut Downloads, findings: &mut Findings) -> Result<()> {
    running.await_open(OPEN_LIMIT)?;
    let all = (TRANSFERS * PACED_BYTES) as f64;
    let steps = stage.hosts.len() * KILLS;
    findings.set("kills", 0.0);
    for step in 0..steps {
        let host = stage.hosts[step % stage.hosts.len()];
        // In the first half of the way: some may be faster than others.
        let mark = all * (step + 1) as f64 / (2 * steps) as f64;
        running.await_progress("the next part of the transfers", END_LIMIT, |progress| progress.bytes >= mark)?;
        agent::kill(host)?;
        // Encapsulated flows pause now: so it is not an error when this does not come.
        let dead_at = running.progress()?.bytes;
        let _ = running.await_progress("transfers without it", PAUSE, |now| now.bytes > dead_at + CARRIED_BYTES);
        let carried = running.progress()?.bytes - dead_at;
        let start = Instant::now();
        agent::start_again(host)?;
        progress(&format!(
            "the agent of {} was killed; {:.1} MB were carried without it; it was back after {} ms",
            host.name(),
            carried / 1e6,
            start.elapsed().as_millis()
        ));
        let ended = running.progress()?.ended;
        if ended > TRANSFERS / 10 {
            bail!("{ended} transfers had ended before all agents were killed {KILLS} times");
        }
        findings.figures.add("kills", 1.0);
    }
    Ok(())
}

/// All agents dead at once, for half a minute.
fn leave_dead(stage: &Stage, findings: &mut Findings) -> Result<()> {
    let mut long = stage.downloads("long", LONG_COUNT, LONG_PACE)?;
    let mut short = stage.downloads("short", SHORT_COUNT, SHORT_PACE)?;
    let left = half_a_minute(stage, &mut long, &mut short, findings);
    // Whatever came of that: only agents that live can carry the rest.
    stage.start_missing()?;
    stage.finish("agents left dead", "short", short, findings)?;
    stage.finish("agents left dead", "long", long, findings)?;
    left
}

fn half_a_minute(stage: &Stage, long: &mut Downloads, short: &mut Downloads, findings: &mut Findings) -> Result<()> {
    long.await_open(OPEN_LIMIT)?;
    short.await_open(OPEN_LIMIT)?;
    agent::await_paths(&stage.ends(), true, TRANSFERS, OPEN_LIMIT)?;
    let alive = goodput(long, short)?;
    stage.hosts.iter().try_for_each(|host| agent::kill(host))?;
    let start = Instant::now();
    let dead = goodput(long, short);
    pair::attempt_part("names while agents are dead", findings, |findings| names(stage, findings));
    findings.set("goodput_ratio_dead", dead? / alive);
    let rest = |of: Duration| of.saturating_sub(start.elapsed());
    pair::attempt_part("transfers that end while agents are dead", findings, |_| {
        let limit = rest(DEAD + LATE);
        short.await_progress("the end of all of them", limit, |now| now.ended == SHORT_COUNT).map(drop)
    });
    findings.set("ended_while_dead", short.progress()?.ended as f64);
    let still = LONG_COUNT - long.progress()?.ended;
    pair::attempt_part("connections that ended", findings, |_| closed_cleanly(stage, still));
    // The rest of the time that they are to be dead.
    let _ = long.await_progress("the end of it", rest(DEAD), |_| false);
    findings.set("dead_s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Transfers end one after the other while the agents of both hosts are killed and started again all the time: an agent
/// that begins takes over from programs that tell nobody any more.
fn end_meanwhile(stage: &Stage, findings: &mut Findings) -> Result<()> {
    let group = |number| stage.downloads("brief", TRANSFERS / GROUPS, PACE - number * PACE_STEP);
    let mut groups = (0..GROUPS as u64).map(group).collect::<Result<Vec<_>>>()?;
    let ended = starts_until_end(stage, &mut groups, findings);
    stage.start_missing()?;
    for running in groups {
        stage.finish("transfers that end while agents start", "brief", running, findings)?;
    }
    ended
}

fn starts_until_end(stage: &Stage, groups: &mut [Downloads], findings: &mut Findings) -> Result<()> {
    groups.iter_mut().try_for_each(|running| running.await_open(OPEN_LIMIT).map(drop))?;
    agent::await_paths(&stage.ends(), true, TRANSFERS, OPEN_LIMIT)?;
    groups[0].await_progress("the first transfer's end", END_LIMIT, |now| now.ended > 0)?;
    findings.set("starts_while_ending", 0.0);
    while groups[GROUPS - 1].progress()?.ended < TRANSFERS / GROUPS {
        for host in stage.ends() {
            agent::kill(host)?;
            agent::start_again(host)?;
            findings.figures.add("starts_while_ending", 1.0);
        }
    }
    Ok(())
}

/// A router that has just started has not heard from the server yet: who connects waits for that, and is not refused.
/// Nor is who connected while there was no router: the SYNs lie in its socket when it reads for the first time.
fn connect_meanwhile(stage: &Stage, findings: &mut Findings) -> Result<()> {
    let [router, ..] = stage.hosts;
    let url = format!("http://{NAME}/tiny");
    for _ in 0..ROUTER_STARTS {
        agent::kill(router)?;
        // Of two attempts, of which one is given up, the other end would be sent a RST.
        let connect = || fetch(stage.client, &["-4"], &url);
        let [earlier, later] = thread::scope(|scope| -> Result<_> {
            let earlier = scope.spawn(connect);
            agent::start_again(router)?;
            let later = connect()?;
            let Ok(earlier) = earlier.join() else { bail!("the fetch before the router started has panicked") };
            Ok([earlier?, later])
        })?;
        for (fetched, figure) in [(earlier, "connect_ms_router_away"), (later, "connect_ms_router_starting")] {
            if fetched.status != 0 {
                findings.note(format!("{figure}: {}", fetched.error));
                findings.figures.add("failed", 1.0);
            }
            let slowest_ms = findings.figures.get(figure);
            findings.set(figure, slowest_ms.max(fetched.took_ms));
        }
    }
    Ok(())
}

/// Bytes per second of all transfers together, over a fifth of their way.
fn goodput(long: &mut Downloads, short: &mut Downloads) -> Result<f64> {
    let first = long.progress()?.bytes + short.progress()?.bytes;
    let start = Instant::now();
    let wanted = (LONG_COUNT * LONG_BYTES) as f64 / 5.0;
    wait_for("a fifth of the transfers", DEAD, || {
        let now = long.progress()?.bytes + short.progress()?.bytes - first;
        if now >= wanted { Ok(now / start.elapsed().as_secs_f64()) } else { bail!("{now} bytes came") }
    })
}

/// Names that are none of Margay's are found without it, also when the process that answers was killed just now.
fn names(stage: &Stage, findings: &mut Findings) -> Result<()> {
    findings.set("names_found_while_dead", 0.0);
    let mut slowest_ms = 0.0_f64;
    for number in 0..10 {
        if number % 2 == 1 {
            agent::kill_responder(stage.client, false)?;
        }
        let start = Instant::now();
        find_other_name(stage.client)?;
        slowest_ms = slowest_ms.max(start.elapsed().as_secs_f64() * 1e3);
        findings.figures.add("names_found_while_dead", 1.0);
    }
    findings.set("name_ms_max", slowest_ms);
    Ok(())
}

/// On both hosts no connection hangs in its end, and not more are open than are meant to be.
fn closed_cleanly(stage: &Stage, open: usize) -> Result<()> {
    wait_for("the end of connections that are over", PAUSE, || {
        for host in stage.ends() {
            let text = host.run(["ss", "-Htan", "sport = :80 or dport = :80"])?;
            let states: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
            let ending = ["FIN-WAIT-1", "FIN-WAIT-2", "LAST-ACK", "CLOSING", "CLOSE-WAIT"];
            if let Some(state) = states.iter().find(|state| ending.contains(state)) {
                bail!("on {} one is in {state}", host.name());
            }
            let established = states.iter().filter(|state| **state == "ESTAB").count();
            if established > open {
                bail!("on {} there are {established}, not {open}", host.name());
            }
        }
        Ok(())
    })
}
