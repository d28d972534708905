//! Boxes that end connections, as they are: HAProxy, nginx and squid. Each is given the session by its listener, and
//! what it connects to by name goes on from there.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::super::{ZONE, count_sessions, serve, sessions};
use super::{Stage, TRIES};
use crate::agent::{self, READY_LIMIT};
use crate::host::Host;
use crate::observe::{self, Passing};
use crate::program::{Program, wait_for};
use crate::scenario::{Findings, pair};
use crate::server::{self, await_listener};

const HAPROXY_PORT: &str = "8101";
const NGINX_PORT: &str = "8102";
const SQUID_PORT: &str = "8103";
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// Where squid, which gives up its rights, may write.
const LOGS: &str = "/run/boxes";

/// All of them on the second box's host, behind the firewall of the first one.
pub(super) fn judge(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    count_sessions(stage.one)?;
    let haproxy = haproxy(stage.two)?;
    proxied(stage, "HAProxy", "ha", HAPROXY_PORT, &haproxy, findings)?;
    drop(haproxy);
    let nginx = nginx(stage.two)?;
    proxied(stage, "nginx", "ng", NGINX_PORT, &nginx, findings)?;
    drop(nginx);
    squid(stage, findings)
}

/// Sessions to `NAME.shop` end at the proxy that is served as `lb-NAME.shop`.
fn proxied(
    stage: &mut Stage<'_>,
    what: &str,
    name: &str,
    port: &str,
    program: &Program,
    findings: &mut Findings,
) -> Result<()> {
    let listen = format!("0.0.0.0:{port}");
    serve(stage.two, &format!("lb-{name}.shop"), "proxy", &["--listen", &listen])?;
    let before = sessions(stage.one)?;
    let passed = stage.pass(&format!("{name}.shop"), &[], findings)?;
    // The proxy's own sessions do not pass the firewall once more, which would double the number; a SYN may come twice.
    let seen = sessions(stage.one)? - before;
    let is_once = (TRIES as f64..2.0 * TRIES as f64).contains(&seen);
    let client = format!("from {} ", pair::address(stage.client)?);
    let is_logged = wait_for("the proxy's log", READY_LIMIT, || {
        let seen = program.log().lines().filter(|line| line.contains(&client)).count() as u64;
        ensure!(seen >= TRIES, "{seen} lines have the client's address: {}", program.log());
        Ok(())
    });
    if let Err(error) = &is_logged {
        findings.note(format!("{what}: {error:#}"));
    }
    stage.judge(what, passed && is_once && is_logged.is_ok(), findings);
    agent::withdraw(stage.two, &format!("lb-{name}.shop"))
}

fn write(host: &Host, name: &str, text: &str) -> Result<String> {
    let path = host.dir.join(name);
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    path.to_str().map(str::to_owned).context("the path is no text")
}

fn haproxy(host: &Host) -> Result<Program> {
    let text = format!(
        "global\n  maxconn 512\n  log stdout format raw local0\ndefaults\n  mode tcp\n  log global\n  log-format \
         \"from %ci port %cp\"\n  timeout connect 5s\n  timeout client 1m\n  timeout server 1m\nlisten lines\n  bind \
         0.0.0.0:{HAPROXY_PORT}\n  server web ha.shop.{ZONE}:7\n"
    );
    let config = write(host, "box-haproxy.cfg", &text)?;
    let mut program = host.spawn("box-haproxy", ["haproxy", "-db", "-f", &config])?;
    await_listener(host, &mut program, HAPROXY_PORT)?;
    Ok(program)
}

fn nginx(host: &Host) -> Result<Program> {
    let module = Path::new("/usr/lib/nginx/modules/ngx_stream_module.so");
    let load = if module.exists() { format!("load_module {};\n", module.display()) } else { String::new() };
    let text = format!(
        "{load}pid {}/box-nginx.pid;\nuser root root;\ndaemon off;\nworker_processes 1;\nevents {{ worker_connections \
         512; }}\nstream {{\n  log_format line 'from $remote_addr port $remote_port';\n  access_log /dev/stdout \
         line;\n  server {{\n    listen 0.0.0.0:{NGINX_PORT};\n    proxy_pass ng.shop.{ZONE}:7;\n  }}\n}}\n",
        host.dir.display()
    );
    let config = write(host, "box-nginx.conf", &text)?;
    let mut program = host.spawn("box-nginx", ["nginx", "-e", "stderr", "-c", &config])?;
    await_listener(host, &mut program, NGINX_PORT)?;
    Ok(program)
}

/// It speaks HTTP alone: as an accelerator in front of a web server.
fn squid(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let two = stage.two;
    let text = format!(
        "http_port 0.0.0.0:{SQUID_PORT} accel defaultsite=sq.shop.{ZONE} no-vhost\ncache_peer sq.shop.{ZONE} parent 80 \
         0 no-query no-digest originserver name=web\nhttp_access allow all\ncache deny all\npid_filename \
         none\ncache_log {LOGS}/cache.log\nlogformat line from %>a port %>p\naccess_log stdio:{LOGS}/access.log \
         line\ncoredump_dir {LOGS}\nshutdown_lifetime 0 seconds\npinger_enable off\n"
    );
    let config = write(two, "box-squid.conf", &text)?;
    // Its shared memory has a name that another squid of this machine may have, too.
    two.shell(&format!(
        "mkdir -p {LOGS}; mount -t tmpfs -o mode=777 boxes {LOGS}; mount -t tmpfs -o mode=1777 boxes /dev/shm"
    ))?;
    let mut program = two.spawn("box-squid", ["squid", "-N", "-f", &config])?;
    await_listener(two, &mut program, SQUID_PORT)?;
    serve(two, "lb-sq.shop", "proxy", &["--listen", &format!("0.0.0.0:{SQUID_PORT}")])?;
    // It tries its web server as soon as it runs, and may have found no box then: it does so again within ten seconds.
    wait_for("an answer by squid", ANSWER_LIMIT, || {
        server::fetch_text(stage.client, &format!("http://sq.shop.{ZONE}/host")).map(drop)
    })?;
    let syn = "iifname \"sal0\" tcp dport 80 tcp flags & (syn|ack) == syn";
    observe::count(stage.one, "web", Passing::In, syn)?;
    let mut right = 0;
    for _ in 0..TRIES {
        let got = server::fetch_text(stage.client, &format!("http://sq.shop.{ZONE}/host"));
        match got {
            Ok(text) if text.trim() == "server" => right += 1,
            Ok(text) => findings.note(format!("squid has brought {text:?}")),
            Err(error) => findings.note(format!("by squid: {error:#}")),
        }
    }
    findings.figures.add("failed", (TRIES - right) as f64);
    let seen = observe::counts(stage.one)?.get("web").map_or(0.0, |count| count.packets);
    // curl may begin by both families. Sessions of the proxy's own would double the number.
    let is_once = (TRIES as f64..2.0 * TRIES as f64).contains(&seen);
    let client = format!("from {} ", pair::address(stage.client)?);
    let is_logged = wait_for("squid's log", READY_LIMIT, || {
        let logged = two.shell(&format!("cat {LOGS}/access.log"))?;
        let lines = logged.lines().filter(|line| line.contains(&client)).count() as u64;
        ensure!(lines >= TRIES, "{lines} lines have the client's address: {logged}");
        Ok(())
    });
    if let Err(error) = &is_logged {
        findings.note(format!("squid: {error:#}"));
    }
    if !is_once {
        findings.note(format!("{seen} sessions have passed the firewall before squid"));
    }
    stage.judge("squid", right == TRIES && is_once && is_logged.is_ok(), findings);
    program.stop();
    two.shell(&format!("umount {LOGS} /dev/shm"))?;
    agent::withdraw(two, "lb-sq.shop")
}
