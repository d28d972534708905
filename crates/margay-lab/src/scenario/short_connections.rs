//! `short-connections`: wrk asks nginx with a new connection for each request, by name and without a pause for longer
//! than any supply of ports lasts; plain, and by HAProxy in TCP mode on a third host, before and after; and over
//! persistent connections.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::command::progress;
use crate::host::Host;
use crate::program::{Program, output_within};
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound, median};
use crate::server::{Nginx, await_listener};

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "short-connections",
    summary: "wrk with a connection for each request, sustained, beside plain TCP and HAProxy; then persistent ones",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 7] = [
    bound("ratio_median_window", AtLeast(0.6)),
    // The worst window beside the worst of the others: windows of plain TCP alone differ by a sixth.
    bound("ratio_min_window", AtLeast(0.6)),
    bound("ratio_haproxy_min_window", AtLeast(1.0)),
    // 0.75 to 0.93 here (decision 0049).
    bound("ratio_persistent", AtLeast(0.65)),
    // Otherwise the load was none that kernels set up, and what is shown is something else.
    bound("taken_share", AtLeast(0.9)),
    bound("errors", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const SERVICE: &str = "web.shop";
const NAME: &str = "web.shop.sal.internal";
const LISTEN: &str = "0.0.0.0:80";
const PORT: &str = "80";
const FILE: &str = "host";
const CLOSING: &str = "Connection: close";
const KEEPING: &str = "Connection: keep-alive";
/// Over persistent connections wrk and nginx have a processor each: which of them share one by chance counts for more
/// than the way between them.
const SERVING: &str = "0";
const PINNED: [&str; 3] = ["taskset", "-c", "1"];
const CONNECTIONS: u32 = 32;
const THREADS: u32 = 2;
const WINDOW_S: u32 = 3;
/// What wrk takes beyond its time.
const WRK_GRACE: Duration = Duration::from_secs(20);

/// How long each part lasts.
struct Length {
    /// Windows by name.
    named: usize,
    /// Windows of plain TCP, and as many by HAProxy, before, and again after.
    others: usize,
    /// Pairs of runs over persistent connections, and their seconds.
    pairs: usize,
    pair_s: u32,
}

const SHORT: Length = Length { named: 8, others: 2, pairs: 5, pair_s: 1 };
const LONG: Length = Length { named: 50, others: 5, pairs: 11, pair_s: 2 };

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &["server", "proxy", "client"], dir)?;
    let _agents = Agents::start(&lab)?;
    let router = lab.host("router")?;
    let server = lab.host("server")?;
    let proxy = lab.host("proxy")?;
    let client = lab.host("client")?;
    pair::demand_kernel(&[server, client], findings)?;
    for connecting in [client, proxy] {
        // Whoever closes first keeps the port for a minute, and now and then that is the client: at these rates its own
        // ports run out, of plain TCP as by name, and what is measured is its search for one.
        connecting.shell("echo 1 > /proc/sys/net/ipv4/tcp_tw_reuse")?;
    }
    let nginx = Nginx::start(server, &[LISTEN])?;
    agent::publish(server, SERVICE, LISTEN, &[])?;
    agent::await_instances(router, SERVICE, 1)?;
    let _haproxy = haproxy(proxy, &pair::address(server)?)?;
    let ways = Ways { client, plain: pair::address(server)?, proxied: pair::address(proxy)? };
    let length = if is_long() { LONG } else { SHORT };
    findings.set("errors", 0.0);
    sustained(&ways, &length, findings)?;
    server.run(["taskset", "-cp", SERVING, &nginx.program.pid().to_string()])?;
    persistent(&ways, &length, findings)
}

/// HAProxy as it is in front of a server: each connection to it is one to the server. Returns when it listens.
fn haproxy(host: &Host, server: &str) -> Result<Program> {
    let config = host.dir.join("haproxy.cfg");
    let text = format!(
        "global\n  maxconn 4096\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 30s\n  \
         timeout server 30s\nlisten web\n  bind {LISTEN}\n  server web {server}:80\n"
    );
    std::fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
    let argv = ["haproxy", "-db", "-f"].map(Path::new);
    let mut program = host.spawn("haproxy", argv.into_iter().chain([config.as_path()]))?;
    await_listener(host, &mut program, PORT)?;
    Ok(program)
}

/// The ways from one client to one server.
struct Ways<'a> {
    client: &'a Host,
    plain: String,
    proxied: String,
}

/// How wrk asks.
#[derive(Clone, Copy)]
struct Load {
    header: &'static str,
    seconds: u32,
    /// On one processor, beside nginx's.
    pinned: bool,
}

impl Load {
    /// With a connection for each request.
    const fn closing(seconds: u32) -> Self {
        Self { header: CLOSING, seconds, pinned: false }
    }

    /// Over persistent connections.
    const fn keeping(seconds: u32) -> Self {
        Self { header: KEEPING, seconds, pinned: true }
    }
}

/// What wrk says of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Asked {
    per_s: f64,
    /// Connections that failed or were reset, requests that had no answer in time, and answers other than the file.
    errors: f64,
}

impl Asked {
    fn parse(text: &str) -> Result<Self> {
        let number = |word: &str| -> Result<f64> { word.trim_end_matches(',').parse().context("no number") };
        let mut asked = Self::default();
        let mut is_whole = false;
        for line in text.lines().map(str::trim) {
            let words: Vec<_> = line.split_whitespace().collect();
            match words.as_slice() {
                ["Requests/sec:", rate] => (asked.per_s, is_whole) = (number(rate)?, true),
                ["Socket", "errors:", counts @ ..] => {
                    for count in counts.chunks(2) {
                        asked.errors += number(count.get(1).context("an error without a count")?)?;
                    }
                }
                ["Non-2xx", "or", "3xx", "responses:", count] => asked.errors += number(count)?,
                _ => {}
            }
        }
        ensure!(is_whole, "wrk says {text:?}");
        Ok(asked)
    }
}

impl Ways<'_> {
    /// Lets wrk ask for the file.
    fn ask(&self, host: &str, load: Load, findings: &mut Findings) -> Result<Asked> {
        let Load { header, seconds, pinned } = load;
        let threads = THREADS.to_string();
        let connections = CONNECTIONS.to_string();
        let duration = format!("{seconds}s");
        let url = format!("http://{host}/{FILE}");
        let words = ["wrk", "-t", &threads, "-c", &connections, "-d", &duration, "-H", header, &url];
        let limit = Duration::from_secs(seconds.into()) + WRK_GRACE;
        let before = if pinned { &PINNED[..] } else { &[] };
        let output = output_within(&mut self.client.command(before.iter().chain(&words)), limit)?;
        let text = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "wrk to {host}: {text} {}", String::from_utf8_lossy(&output.stderr));
        let asked = Asked::parse(&text)?;
        if asked.errors > 0.0 {
            findings.figures.add("errors", asked.errors);
            let said = text.lines().filter(|line| line.contains("errors") || line.contains("Non-2xx"));
            findings.note(format!("to {host}, {header}: {}", said.map(str::trim).collect::<Vec<_>>().join("; ")));
        }
        Ok(asked)
    }

    /// A new connection for each request, by windows; their rates.
    fn windows(&self, what: &str, host: &str, count: usize, findings: &mut Findings) -> Result<Vec<f64>> {
        let mut rates = Vec::new();
        for _ in 0..count {
            rates.push(self.ask(host, Load::closing(WINDOW_S), findings)?.per_s);
        }
        let shown: Vec<_> = rates.iter().map(|rate| format!("{rate:.0}")).collect();
        progress(&format!("{what}: {} per s", shown.join(" ")));
        Ok(rates)
    }
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn sustained(ways: &Ways<'_>, length: &Length, findings: &mut Findings) -> Result<()> {
    let mut plain = vec![];
    let mut proxied = vec![];
    let mut others = |findings: &mut Findings| -> Result<()> {
        plain.extend(ways.windows("plain", &ways.plain, length.others, findings)?);
        proxied.extend(ways.windows("by HAProxy", &ways.proxied, length.others, findings)?);
        Ok(())
    };
    others(findings)?;
    // How long it takes until the kernels set connections up is another figure.
    ways.ask(NAME, Load::closing(1), findings)?;
    let taken = agent::taken(ways.client)?;
    let named = ways.windows("by name", NAME, length.named, findings)?;
    let taken = agent::taken(ways.client)? - taken;
    others(findings)?;
    findings.set("ratio_min_window", least(&named) / least(&plain));
    findings.set("ratio_median_window", median(&named) / median(&plain));
    findings.set("ratio_haproxy_min_window", least(&named) / least(&proxied));
    findings.set("plain_per_s", median(&plain));
    findings.set("haproxy_per_s", median(&proxied));
    findings.set("named_per_s", median(&named));
    findings.set("taken_share", taken / (named.iter().sum::<f64>() * f64::from(WINDOW_S)));
    Ok(())
}

/// Many requests over each connection, plain and by name in turns.
fn persistent(ways: &Ways<'_>, length: &Length, findings: &mut Findings) -> Result<()> {
    let mut ratios = Vec::new();
    for pair in 0..length.pairs {
        let mut ask =
            |host: &str| Ok::<_, anyhow::Error>(ways.ask(host, Load::keeping(length.pair_s), findings)?.per_s);
        // Which goes first alternates, too: neither always meets the warmer machine.
        let (base, ours) = if pair % 2 == 0 {
            let base = ask(&ways.plain)?;
            (base, ask(NAME)?)
        } else {
            let ours = ask(NAME)?;
            (ask(&ways.plain)?, ours)
        };
        progress(&format!("persistent: plain {base:.0} per s; by name {ours:.0} per s"));
        ratios.push(ours / base);
    }
    findings.set("ratio_persistent", median(&ratios));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_wrk_says_is_read_with_all_that_went_wrong() {
        let well = "Running 3s test @ http://10.1.0.1/host\n  2 threads and 32 connections\n  \
                    Thread Stats   Avg      Stdev     Max   +/- Stdev\n    \
                    Latency     2.97ms    1.52ms  21.07ms   79.73%\n    \
                    Req/Sec     5.24k   473.46     6.17k    70.00%\n  31286 requests in 3.01s, 7.25MB read\n\
                    Requests/sec:  10393.87\nTransfer/sec:      2.41MB\n";
        let asked = Asked { per_s: 10_393.87, errors: 0.0 };
        assert_eq!(Asked::parse(well).expect("whole"), asked);
        let wrong = "  Socket errors: connect 1, read 20, write 300, timeout 4000\n  Non-2xx or 3xx responses: 50000\n";
        let asked = Asked { errors: 54_321.0, ..asked };
        assert_eq!(Asked::parse(&format!("{wrong}{well}")).expect("whole"), asked);
        assert!(Asked::parse("unable to connect to 10.1.0.1:http Connection refused").is_err());
    }
}
