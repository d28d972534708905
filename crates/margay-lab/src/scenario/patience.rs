//! `patience`: hosts that come back are not given up, with `give_up_after` as it is where nobody sets it. A server is
//! off the network for 20 s, and moves while it is off it once more; the router's agent is dead; agents are killed and
//! started again while the other end is cut off. After each of these, connections that only wait, and downloads, go on.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::now_ms;
use crate::command::progress;
use crate::downloads::{self, Downloads, Order};
use crate::entries;
use crate::held::Held;
use crate::host::Host;
use crate::idle::{self, lost};
use crate::interface::{self, Act};
use crate::lab::Lab;
use crate::observe;
use crate::program::{Program, wait_for};
use crate::report::Limit::Exactly;
use crate::report::{Bound, bound};
use crate::series::Series;
use crate::server::{self, Nginx, noise, sha256};
use crate::traffic::Idle;
use crate::wire;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "patience",
    summary: "hosts are cut off, move meanwhile, lose the router and restart agents: no connection that waits is lost",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("resets", Exactly(0.0)),
    // Ended before their server did, or never told that it did.
    bound("idle_lost", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
    // After which all connections went on.
    bound("events", Exactly(EVENTS as f64)),
    bound("flows_left", Exactly(0.0)),
];

const SERVICE: &str = "web.shop";
const NAME: &str = "web.shop.sal.internal";
const WEB_PORT: u16 = 80;
/// Of connections that say something after each event.
const ECHO_PORT: u16 = 7;
/// Of connections that never do.
const IDLE_PORT: u16 = 9;
const IDLE: usize = 16;
const HELD: usize = 8;
const DOWNLOADS: usize = 2;
/// Bytes per second of each: much more in a few seconds than the client's buffers hold.
const PACE: u64 = 1_000_000;
/// Bytes that a connection of the client holds before its program reads them: least, usual, most. A whole file fits the
/// usual most.
const CLIENT_BUFFER: &str = "4096 131072 500000";
/// Of all downloads together, before a cut.
const CALM_BYTES: f64 = PACE as f64;
/// Those that are counted, in either length.
const EVENTS: usize = 5;
/// A host that sleeps for so long is not given up: that takes 30 s.
const SLEEP: Duration = Duration::from_secs(20);
/// The number of an address that the topology has not given away.
const FREE_NUMBER: usize = 100;
const LIMIT: Duration = Duration::from_secs(20);
/// A host that lost its router asks for it less and less often, and so does a TCP that is not answered.
const BACK_LIMIT: Duration = Duration::from_secs(60);

/// An agent that was restarted between a FIN and its acknowledgement cannot know that the connection is over. It keeps
/// the flow for forty seconds, and for twice as long as the last packet has waited.
const ENDING_LIMIT: Duration = Duration::from_secs(90);

/// For how long hosts are away.
struct Length {
    /// In every event but the first.
    cut: Duration,
    router_dead: Duration,
    /// The client alone, with nothing else.
    client_cut: Option<Duration>,
}

const SHORT: Length = Length { cut: Duration::from_secs(4), router_dead: Duration::from_secs(8), client_cut: None };
/// The router and the client are away for longer than a server may be.
const LONG: Length = Length {
    cut: Duration::from_secs(20),
    router_dead: Duration::from_secs(40),
    client_cut: Some(Duration::from_secs(40)),
};

/// What runs on the server.
struct Serving {
    nginx: Nginx,
    greeter: Program,
    _echo: Program,
}

struct Stage<'a> {
    lab: &'a Lab,
    router: &'a Host,
    server: &'a Host,
    client: &'a Host,
    length: Length,
    serving: Serving,
    /// Connections that say nothing at all.
    idle: Series<Idle>,
    /// Those that say something after each event, and nothing else.
    held: Held,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &["server", "client"], dir)?;
    let _agents = Agents::start(&lab)?;
    let hosts = [lab.host("router")?, lab.host("server")?, lab.host("client")?];
    let [router, server, client] = hosts;
    let ends = [client, server];
    pair::demand_kernel(&ends, findings)?;
    client.shell(&format!("echo {CLIENT_BUFFER} > /proc/sys/net/ipv4/tcp_rmem"))?;
    ["idle_lost", "wrong_bytes"].into_iter().for_each(|figure| findings.set(figure, 0.0));
    let length = if is_long() { LONG } else { SHORT };
    let serving = serve(server, &length)?;
    agent::await_instances(client, SERVICE, 1)?;
    // All is there that the first of all flows has to wait for.
    let warm_up = Downloads::start(client, Order { host: NAME, path: "host", count: 1, pace: 0 })?;
    finish("a warm-up", client, &serving.nginx.root.join("host"), warm_up, findings)?;
    hosts.iter().try_for_each(|host| observe::count_virtual_resets(host))?;

    let idle = idle::open(client, NAME, IDLE_PORT, IDLE)?;
    let held = Held::open(client, NAME, HELD)?;
    let mut stage = Stage { lab: &lab, router, server, client, length, serving, idle, held };
    stage.prove()?;
    let went_on = [
        stage.event("a server that is cut off, as one that sleeps", findings, sleep_through),
        stage.event("a server that moves while it is cut off", findings, move_on),
        stage.event("a router whose agent is dead", findings, leave_router_dead),
        stage.event("the client's agent, while the server is cut off", findings, restart_client),
        stage.event("the server's agent, while the client is cut off", findings, restart_server),
    ];
    findings.set("events", went_on.into_iter().filter(|went_on| *went_on).count() as f64);
    if let Some(time) = stage.length.client_cut {
        // A server waits for ever.
        let cut = |stage: &Stage<'_>, findings: &mut Findings| stage.cut(stage.client, time, || Ok(()), findings);
        stage.event("a client that is cut off for long", findings, cut);
    }

    let Stage { serving, idle, held, .. } = stage;
    pair::attempt_part("the end of all connections", findings, |findings| {
        close(idle, held, &serving.greeter, findings)
    });
    // Not their entries: kernels remember the address that the server has left for minutes.
    findings.set("flows_left", entries::flows_left(&ends, ENDING_LIMIT)?);
    pair::report_resets(&hosts, findings)
}

/// One name with three ports, and a file for each time for which somebody is cut off.
fn serve(server: &Host, length: &Length) -> Result<Serving> {
    let nginx = Nginx::start(server, &["0.0.0.0:80"])?;
    for time in [SLEEP, length.cut].into_iter().chain(length.client_cut) {
        nginx.put(&file_for(time), &noise((PACE * time.as_secs()) as usize, 1))?;
    }
    let echo = server::echo(server, &[([0; 4], ECHO_PORT).into()])?;
    let greeter = server::greeter(server, ([0; 4], IDLE_PORT).into())?;
    for port in [WEB_PORT, ECHO_PORT, IDLE_PORT] {
        agent::publish(server, SERVICE, &format!("0.0.0.0:{port}"), &[])?;
    }
    Ok(Serving { nginx, greeter, _echo: echo })
}

/// The file of which a download takes so long, if nothing holds it up.
fn file_for(time: Duration) -> String {
    format!("for-{}s", time.as_secs())
}

impl Stage<'_> {
    /// Lets something happen, and gives whether all connections went on after it.
    fn event(
        &mut self,
        what: &str,
        findings: &mut Findings,
        work: impl FnOnce(&Self, &mut Findings) -> Result<()>,
    ) -> bool {
        progress(what);
        let mut went_on = false;
        pair::attempt_part(what, findings, |findings| {
            let done = work(self, findings);
            // Whatever became of it, the next event begins in order.
            let settled = self.settle();
            done.and(settled)?;
            self.prove()?;
            went_on = true;
            Ok(())
        });
        self.count_lost(what, findings);
        went_on
    }

    /// Cuts a host off while downloads run. Something may happen meanwhile. The downloads must go on after that.
    fn cut(
        &self,
        host: &Host,
        time: Duration,
        meanwhile: impl FnOnce() -> Result<()>,
        findings: &mut Findings,
    ) -> Result<()> {
        let path = file_for(time);
        let order = Order { host: NAME, path: &path, count: DOWNLOADS, pace: PACE };
        let mut running = Downloads::start(self.client, order)?;
        running.await_open(LIMIT)?;
        running.await_progress("calm downloads", LIMIT, |now| now.bytes >= CALM_BYTES)?;
        let cut_at = Instant::now();
        wire::set_link(&self.lab.topology, host, false)?;
        let done = meanwhile();
        // That nothing happens cannot be waited for.
        sleep(time.saturating_sub(cut_at.elapsed()));
        let before = running.progress()?;
        wire::set_link(&self.lab.topology, host, true)?;
        let mended_at = Instant::now();
        // One that had got everything before the cut would have ended by now, and would not show that it goes on.
        ensure!(before.ended == 0, "{} downloads have ended before {} was back", before.ended, host.name());
        running.await_progress("downloads that go on", BACK_LIMIT, |now| now.bytes > before.bytes)?;
        let back_ms = mended_at.elapsed().as_secs_f64() * 1e3;
        progress(&format!("{} was back: bytes came after {back_ms:.0} ms", host.name()));
        findings.set("back_ms_max", findings.figures.get("back_ms_max").max(back_ms));
        let what = format!("{} cut off for {time:?}", host.name());
        finish(&what, self.client, &self.serving.nginx.root.join(&path), running, findings)?;
        done
    }

    /// All links are whole, all agents run, and the server is found, also by a router that started just now.
    fn settle(&self) -> Result<()> {
        for host in [self.server, self.client] {
            wire::set_link(&self.lab.topology, host, true)?;
        }
        for host in [self.router, self.server, self.client] {
            agent::pid(host).map(drop).or_else(|_| agent::start_again(host))?;
        }
        [self.router, self.client].into_iter().try_for_each(await_server)
    }

    /// The connections that have been silent since the last event are answered.
    fn prove(&mut self) -> Result<()> {
        let before = self.held.exchanges();
        self.held.round()?;
        let answered = self.held.exchanges() - before;
        ensure!(answered == HELD as f64, "of {HELD} connections {answered} were answered: {}", self.held.said());
        Ok(())
    }

    /// Counts the connections that only wait and have ended.
    fn count_lost(&self, what: &str, findings: &mut Findings) {
        let lost = lost(&self.idle);
        let new = lost.len() as f64 - findings.figures.get("idle_lost");
        if let Some(one) = lost.values().next().filter(|_| new > 0.0) {
            findings.note(format!("{what}: {} of {IDLE} idle connections are lost; one: {}", lost.len(), one.error));
        }
        findings.set("idle_lost", lost.len() as f64);
    }
}

/// Waits until a host finds the server by its name.
fn await_server(host: &Host) -> Result<()> {
    wait_for(&format!("the server, as {} finds it", host.name()), BACK_LIMIT, || {
        let found = agent::resolve(host, SERVICE)?["instances"].as_array().map_or(0, Vec::len);
        ensure!(found == 1, "there are {found} instances");
        Ok(())
    })
}

/// Waits for the end of downloads of a file, and counts what became of them.
fn finish(what: &str, client: &Host, file: &Path, running: Downloads, findings: &mut Findings) -> Result<()> {
    let results = running.finish(BACK_LIMIT)?;
    downloads::judge(what, &results, &sha256(client, file)?, findings);
    let stall_ms = downloads::stall_ms_max(&results);
    findings.set("stall_ms_max", findings.figures.get("stall_ms_max").max(stall_ms));
    Ok(())
}

fn sleep_through(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    stage.cut(stage.server, SLEEP, || Ok(()), findings)
}

/// The server has another address when it is back.
fn move_on(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    let old = interface::first_address(stage.lab, stage.server, 0, false)?;
    let new = interface::address(stage.lab, stage.server, 0, false, FREE_NUMBER)?;
    let renumber = || {
        let acts = [Act::Add(0, new), Act::Remove(0, old)];
        interface::change(stage.lab, stage.server, &acts).map(drop)
    };
    stage.cut(stage.server, stage.length.cut, renumber, findings)
}

/// All connections only wait, so that nobody hears anything of the other end.
fn leave_router_dead(stage: &Stage<'_>, _: &mut Findings) -> Result<()> {
    agent::kill(stage.router)?;
    // That nothing happens cannot be waited for.
    sleep(stage.length.router_dead);
    agent::start_again(stage.router)
}

fn restart_client(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    stage.cut(stage.server, stage.length.cut, || restart(stage.client), findings)
}

fn restart_server(stage: &Stage<'_>, findings: &mut Findings) -> Result<()> {
    stage.cut(stage.client, stage.length.cut, || restart(stage.server), findings)
}

fn restart(host: &Host) -> Result<()> {
    agent::kill(host)?;
    agent::start_again(host)
}

/// Ends all connections in order. Those that only wait have their server killed: only connections that still live hear
/// of it, and hear that they are closed.
fn close(idle: Series<Idle>, held: Held, greeter: &Program, findings: &mut Findings) -> Result<()> {
    let killed_ms = now_ms();
    greeter.signal(Signal::SIGKILL)?;
    // Those that do not hear of it are counted.
    let _ = wait_for("the end of idle connections", LIMIT, || {
        let open = IDLE - lost(&idle).len();
        ensure!(open == 0, "{open} are open");
        Ok(())
    });
    let is_closed = |one: &Idle| !one.reset && one.lost_ms.is_some_and(|lost_ms| lost_ms >= killed_ms);
    let closed = lost(&idle).into_values().filter(is_closed).count();
    if closed < IDLE {
        findings.note(format!("of {IDLE} idle connections {closed} heard that their server has closed them"));
    }
    findings.set("idle_lost", (IDLE - closed) as f64);
    idle.finish(LIMIT)?;
    let failed = held.end()?;
    if failed > 0.0 {
        findings.note(format!("{failed} of {HELD} connections that were asked now and then have failed"));
    }
    findings.figures.add("failed", failed);
    Ok(())
}
