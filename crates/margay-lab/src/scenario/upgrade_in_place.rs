//! `upgrade-in-place`: a server is replaced by a new process on its own host, three times in turn, while its clients
//! talk and others connect: each process gives its listening socket and its connections to the next one. Before that,
//! it is told to when nobody takes them, and when the process that does is killed. Then nginx and HAProxy, in front of
//! such a server, are reloaded as their manuals advise.

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::signal::Signal;

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::{Arrival, Arrivals, now_ms};
use crate::command::progress;
use crate::entries::{self, Entries};
use crate::host::Host;
use crate::observe;
use crate::program::{tail, wait_for};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::server::await_listener;
use crate::sessions::Sessions;
use crate::traffic::{Step, Talked};
use crate::upgrading::Serving;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "upgrade-in-place",
    summary: "a server gives its connections to the next process, three times under load; nginx and HAProxy beside it",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 11] = [
    bound("resets", Exactly(0.0)),
    bound("wrong_answers", Exactly(0.0)),
    bound("lost_sessions", Exactly(0.0)),
    bound("failed_connects", Exactly(0.0)),
    // Otherwise there were none to speak of.
    bound("connects", AtLeast(100.0)),
    // Told to give when nobody takes, a server goes on with what it has.
    bound("kept", Exactly(2.0)),
    bound("replaced", Exactly(NEXT.len() as f64)),
    // Those that were replaced and had not ended after five seconds.
    bound("old_processes", Exactly(0.0)),
    // At full length there are more.
    bound("handed_over", AtLeast((SHORT * NEXT.len()) as f64)),
    bound("leaked_entries", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "web.shop";
const NAME: &str = "web.shop.sal.internal";
const LISTEN: &str = "0.0.0.0:81";
const PORT: u16 = 81;
/// The first process, and those that replace it.
const FIRST: &str = "a";
const NEXT: [&str; 3] = ["b", "c", "d"];
/// Sessions, by the length of the scenario.
const SHORT: usize = 200;
const LONG: usize = 1000;
/// A line that ends the answer in a way that the clients which come and go know.
const ASK: &str = "END\\r\\n";
const ANSWER: &str = "1 END";
const EVERY: Duration = Duration::from_millis(20);
const LIMIT: Duration = Duration::from_secs(20);
/// A process that is there for longer after it was replaced lingers.
const ENDED_LIMIT: Duration = Duration::from_secs(5);
/// So long a process is stopped with a socket that was handed to it: less than what it has for an answer.
const STOPPED: Duration = Duration::from_millis(500);
/// As the agent counts them.
const HANDED_OVER: &str = "margay_sockets_handed_over_total";

/// Sessions through each of the others.
const BESIDE: usize = 20;
const BACKEND: &str = "127.0.0.1:82";
const NGINX_PORT: &str = "83";
const HAPROXY_PORT: &str = "84";
/// What nginx gives connections of an old configuration, in seconds.
const NGINX_GRACE_S: u64 = 10;
const CUT_LIMIT: Duration = Duration::from_secs(NGINX_GRACE_S + 5);

struct Stage<'a> {
    server: &'a Host,
    serving: Serving,
    sessions: Sessions,
    arrivals: Arrivals,
    /// The longest wait of each session in each replacement.
    waits_ms: Vec<f64>,
}

impl Stage<'_> {
    /// Each session is answered once more. Gives what they have to say since this was asked last.
    fn prove(&mut self) -> Result<Talked> {
        let talked = self.sessions.round()?;
        ensure!(talked.hung == 0, "{} sessions are not answered; {:?}", talked.hung, talked.errors);
        Ok(talked)
    }
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &["server", "client"], dir)?;
    let _agents = Agents::start(&lab)?;
    let server = lab.host("server")?;
    let client = lab.host("client")?;
    let hosts = [client, server];
    pair::demand_kernel(&hosts, findings)?;
    ["kept", "replaced", "old_processes"].into_iter().for_each(|figure| findings.set(figure, 0.0));
    let mut serving = Serving::start(server, SERVICE, FIRST, &["--listen", LISTEN])?;
    serving.await_step("a server", 1, |step| *step == Step::Serves)?;
    agent::publish(server, SERVICE, LISTEN, &[])?;
    agent::await_instances(client, SERVICE, 1)?;
    // What the first of all flows needs is no leak.
    Sessions::open(client, NAME, PORT, 1, &[])?.end()?;
    let before = Entries::settled(&hosts)?;
    hosts.iter().try_for_each(|host| observe::count_virtual_resets(host))?;

    let count = if is_long() { LONG } else { SHORT };
    let sessions = Sessions::open(client, NAME, PORT, count, &[])?;
    let arrivals = Arrivals::start(client, NAME, PORT, EVERY, Some(ASK))?;
    let mut stage = Stage { server, serving, sessions, arrivals, waits_ms: Vec::new() };
    pair::attempt_part("sockets that nobody takes", findings, |findings| give_to_nobody(&mut stage, findings));
    pair::attempt_part("a process that is killed before it takes one", findings, |findings| {
        give_to_killed(&mut stage, findings)
    });
    pair::attempt_part("replacements", findings, |findings| replace_all(&mut stage, findings));
    // The last process serves until nothing is left of what it has served.
    let Stage { serving: _serving, sessions, arrivals, .. } = stage;
    pair::attempt_part("connections that come and go", findings, |findings| judge_connects(arrivals, findings));
    pair::attempt_part("sessions", findings, |findings| judge_sessions(sessions, count, findings));
    pair::attempt_part("resets", findings, |findings| pair::report_resets(&hosts, findings));
    pair::attempt_part("reloads of nginx and HAProxy", findings, |findings| reload_others(server, client, findings));
    pair::attempt_part("what is left", findings, |findings| entries::report_leaks(&hosts, &before, findings));
    Ok(())
}

fn give_to_nobody(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    stage.serving.give(1)?;
    let errno = stage.serving.await_refusal(1)?;
    ensure!(errno == Some(Errno::ESRCH as i32), "it was refused with errno {errno:?}, not with ESRCH");
    stage.prove()?;
    findings.figures.add("kept", 1.0);
    Ok(())
}

/// The process that takes over is stopped, so that it does not answer, and is killed then.
fn give_to_killed(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let mut killed = Serving::start(stage.server, SERVICE, "killed", &["--take-over"])?;
    killed.await_step("a process that takes over", 1, |step| *step == Step::Takes)?;
    killed.program.signal(Signal::SIGSTOP)?;
    await_stopped(killed.program.pid())?;
    let refusals = stage.serving.refusals().len();
    stage.serving.give(refusals + 1)?;
    // That a socket lies before a process is seen nowhere.
    sleep(STOPPED);
    let early = stage.serving.refusals().len() - refusals;
    killed.program.signal(Signal::SIGKILL)?;
    ensure!(early == 0, "the server has not waited for a process that is stopped");
    let errno = stage.serving.await_refusal(refusals + 1)?;
    progress(&format!("a process that was killed has not taken the socket: errno {errno:?}"));
    stage.prove()?;
    findings.figures.add("kept", 1.0);
    Ok(())
}

fn await_stopped(pid: u32) -> Result<()> {
    wait_for("a process that is stopped", LIMIT, || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).context("it is gone")?;
        let state = stat.rsplit_once(')').context("unreadable stat")?.1.trim_start();
        ensure!(state.starts_with('T'), "its state is {state:?}");
        Ok(())
    })
}

fn replace_all(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let mut given = 0;
    let mut taken_ms = 0.0;
    for name in NEXT {
        let (sessions, took_ms) = replace(stage, name, findings)?;
        progress(&format!("{name} has taken {sessions} sessions in {took_ms:.0} ms"));
        findings.set("handover_ms", findings.figures.get("handover_ms").max(took_ms));
        findings.figures.add("replaced", 1.0);
        given += sessions;
        taken_ms += took_ms;
    }
    findings.set("handed_per_s", given as f64 / (taken_ms / 1e3));
    findings.set("pause_ms_p99", percentile(&stage.waits_ms, 99.0));
    findings.set("pause_ms_max", percentile(&stage.waits_ms, 100.0));
    findings.set("handed_over", agent::metric(stage.server, HANDED_OVER)?);
    Ok(())
}

/// Lets the next process take everything. Gives how many sessions it has, and how long that took.
fn replace(stage: &mut Stage<'_>, name: &str, findings: &mut Findings) -> Result<(usize, f64)> {
    // Waits until now are not those for this one.
    stage.prove()?;
    let old_pid = stage.serving.program.pid().to_string();
    let mut next = Serving::start(stage.server, SERVICE, name, &["--take-over", "--of", &old_pid])?;
    next.await_step("a server that has taken over", 1, |step| *step == Step::Serves)?;
    let mut old = std::mem::replace(&mut stage.serving, next);
    let ended = wait_for("the end of what was replaced", ENDED_LIMIT, || old.program.ended()?.context("it is there"));
    let complaints = old.steps().into_iter().filter(|step| {
        matches!(step, Step::Keeps { listening: false, .. } | Step::Loses { .. } | Step::TakesNoMore { .. })
    });
    // The first few tell as much as all of them.
    for complaint in complaints.take(3) {
        findings.note(format!("what {name} has replaced: {complaint:?}"));
    }
    if ended.is_err() {
        findings.figures.add("old_processes", 1.0);
    }
    let status = ended?;
    ensure!(status.success(), "what {name} has replaced has ended with {status}: {}", tail(&old.program.log()));
    let talked = stage.prove()?;
    stage.waits_ms.extend(talked.waits_ms);
    let gave = old.steps().into_iter().find_map(|step| match step {
        Step::Gave { given, by_name, took_ms, .. } => Some((given, by_name, took_ms)),
        _ => None,
    });
    let (given, by_name, took_ms) = gave.context("it has not said what it has given")?;
    findings.figures.add("handed_by_name", by_name as f64);
    Ok((given, took_ms))
}

fn judge_connects(mut arrivals: Arrivals, findings: &mut Findings) -> Result<()> {
    let seen: Vec<&Arrival> = arrivals.until(now_ms(), LIMIT)?.collect();
    let has_failed = |arrival: &&Arrival| !arrival.error.is_empty() || arrival.answered != ANSWER;
    let failed: Vec<&Arrival> = seen.iter().copied().filter(has_failed).collect();
    // The first few tell as much as all of them.
    for arrival in failed.iter().take(3) {
        let at_ms = arrival.begun_ms - seen[0].begun_ms;
        let Arrival { took_ms, answered, error, .. } = arrival;
        findings.note(format!("a connect at {at_ms:.0} ms, after {took_ms:.0} ms: {error}; {answered:?}"));
    }
    findings.set("failed_connects", failed.len() as f64);
    findings.set("connects", seen.len() as f64);
    findings.set("connect_ms_max", seen.iter().map(|arrival| arrival.took_ms).fold(0.0, f64::max));
    arrivals.stop()
}

fn judge_sessions(sessions: Sessions, count: usize, findings: &mut Findings) -> Result<()> {
    let talked = sessions.end()?;
    for error in &talked.errors {
        findings.note(format!("sessions: {error}"));
    }
    findings.set("wrong_answers", talked.wrong as f64);
    findings.set("lost_sessions", (count - talked.open) as f64);
    findings.set("answers", talked.answers as f64);
    Ok(())
}

/// Reloads nginx and HAProxy in front of such a server, each with sessions through it that go on. None of this is by
/// name, and nobody is asked to do better.
fn reload_others(server: &Host, client: &Host, findings: &mut Findings) -> Result<()> {
    let mut backend = Serving::start(server, SERVICE, "backend", &["--listen", BACKEND, "--upgrade"])?;
    backend.await_step("a server", 1, |step| *step == Step::Serves)?;
    let nginx_config = write_config(server, "nginx-reloaded.conf", &nginx_text(&server.dir))?;
    let nginx = ["nginx", "-e", "stderr", "-c"].map(Path::new);
    let nginx: Vec<&Path> = nginx.into_iter().chain([nginx_config.as_path()]).collect();
    let mut running = server.spawn("nginx-reloaded", &nginx)?;
    await_listener(server, &mut running, NGINX_PORT)?;
    let socket = server.dir.join("haproxy.sock");
    let haproxy_config = write_config(server, "haproxy.cfg", &haproxy_text(&socket))?;
    let haproxy = ["haproxy", "-db", "-f"].map(Path::new);
    let haproxy: Vec<&Path> = haproxy.into_iter().chain([haproxy_config.as_path()]).collect();
    let mut old = server.spawn("haproxy-old", &haproxy)?;
    await_listener(server, &mut old, HAPROXY_PORT)?;
    let address = pair::address(server)?;
    let open = |port: &str| Sessions::open(client, &address, port.parse()?, BESIDE, &["--upgrade"]);
    let mut by_nginx = open(NGINX_PORT)?;
    let by_haproxy = open(HAPROXY_PORT)?;

    server.run(nginx.into_iter().chain(["-s", "reload"].map(Path::new)))?;
    let old_pid = old.pid().to_string();
    let replacing = [Path::new("-x"), socket.as_path(), Path::new("-sf"), Path::new(&old_pid)];
    let _new = server.spawn("haproxy-new", haproxy.into_iter().chain(replacing))?;
    let ended = wait_for("the end of the old HAProxy", ENDED_LIMIT, || old.ended()?.context("it is there"));
    findings.set("haproxy_lingering", f64::from(u8::from(ended.is_err())));
    let mut cut = 0;
    // Those that are cut are counted, and not demanded.
    let _ = wait_for("the end of sessions through nginx", CUT_LIMIT, || {
        cut = BESIDE - by_nginx.round()?.open;
        ensure!(cut == BESIDE, "{cut} are cut");
        Ok(())
    });
    findings.set("nginx_cut", cut as f64);
    findings.set("haproxy_cut", (BESIDE - by_haproxy.end()?.open) as f64);
    Ok(())
}

fn write_config(host: &Host, name: &str, text: &str) -> Result<PathBuf> {
    let path = host.dir.join(name);
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

fn nginx_text(dir: &Path) -> String {
    let dir = dir.display();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary: String =
        temporary.iter().map(|kind| format!("  {kind}_temp_path {dir}/reloaded-{kind};\n")).collect();
    let mut text = format!("pid {dir}/nginx-reloaded.pid;\nworker_shutdown_timeout {NGINX_GRACE_S}s;\n");
    // The one user that every user namespace has.
    text.push_str("user root root;\ndaemon off;\nworker_processes 1;\nevents { worker_connections 1024; }\n");
    text.push_str(&format!("http {{\n  access_log off;\n{temporary}  server {{\n    listen 0.0.0.0:{NGINX_PORT};\n"));
    text.push_str(&format!("    location / {{\n      proxy_pass http://{BACKEND};\n      proxy_http_version 1.1;\n"));
    text.push_str("      proxy_set_header Upgrade $http_upgrade;\n      proxy_set_header Connection upgrade;\n");
    text.push_str("      proxy_read_timeout 2m;\n    }\n  }\n}\n");
    text
}

/// The next process asks for the listening sockets at `socket`.
fn haproxy_text(socket: &Path) -> String {
    format!(
        "global\n  maxconn 1024\n  stats socket {} level admin expose-fd listeners\ndefaults\n  mode tcp\n  \
         timeout connect 5s\n  timeout client 2m\n  timeout server 2m\nlisten lines\n  bind 0.0.0.0:{HAPROXY_PORT}\n  \
         server lines {BACKEND}\n",
        socket.display()
    )
}
