//! `rebalance`: two hosts serve a name with sessions that talk all the time, and with downloads, which cannot move. A
//! third host is added under requests, and sessions go there until each has its share: by the operator's order, and at
//! full length also by themselves, under a name whose configuration says so.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Findings, Scenario, is_long, pair, site};
use crate::agent::{self, Agents};
use crate::arrivals::{Arrival, Arrivals, now_ms};
use crate::downloads::{self, Downloads, Order};
use crate::host::Host;
use crate::observe;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, AtMost, Below, Exactly};
use crate::report::{Bound, bound, percentile};
use crate::server::{Nginx, noise, sha256};
use crate::sessions::Sessions;
use crate::traffic::Step;
use crate::upgrading::Serving;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "rebalance",
    summary: "a third host comes to two with sessions and downloads: sessions go there until each host has its share",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 12] = [
    bound("share_min", AtLeast(SHARE_MIN)),
    bound("resets", Exactly(0.0)),
    bound("wrong_bytes", Exactly(0.0)),
    bound("lost_sessions", Exactly(0.0)),
    // At full length there are more. Fewer would be no third of all.
    bound("moved", AtLeast((SHORT.sessions / 4) as f64)),
    // More would be no third of all.
    bound("moved_share", AtMost(0.4)),
    // From the order, or from when the third host has come.
    bound("even_after_s", Below(30.0)),
    // Downloads are in the reports, with the reason why they stay.
    bound("stays_wrong", Exactly(0.0)),
    bound("report_wrong", Exactly(0.0)),
    bound("bad_accepted", Exactly(0.0)),
    // Otherwise there were none to speak of.
    bound("requests", AtLeast(100.0)),
    bound("failed", Exactly(0.0)),
];

const SERVERS: [&str; 3] = ["one", "two", "three"];
/// Of three equal shares, within a tenth and some.
const SHARE_MIN: f64 = 0.28;
const WEB_PORT: u16 = 80;
/// The answer ends with the instance's name.
const ASK: &str = "GET /host HTTP/1.0\\r\\n\\r\\n";
const EVERY: Duration = Duration::from_millis(20);
const LIMIT: Duration = Duration::from_secs(30);
/// Longer than downloads take.
const DOWNLOADS_LIMIT: Duration = Duration::from_secs(120);
const PACE: u64 = 100_000;
/// Requests that are there beside what is counted.
const UNDER_WAY: f64 = 4.0;

/// How much, and for how long.
struct Length {
    sessions: usize,
    downloads: usize,
    /// Each takes a hundred-thousandth of this in seconds.
    bytes: usize,
    /// Requests are looked at for so long before anything moves.
    before: Duration,
}

const SHORT: Length = Length { sessions: 48, downloads: 12, bytes: 1_400_000, before: Duration::from_secs(2) };
const LONG: Length = Length { sessions: 240, downloads: 60, bytes: 5_000_000, before: Duration::from_secs(5) };

/// A name, and where it is served.
struct Served {
    service: &'static str,
    /// As clients look it up.
    name: &'static str,
    /// Of the sessions.
    port: u16,
    /// Where the web server listens; clients use port 80.
    web_listener: u16,
    /// Sessions move by themselves; otherwise by an order.
    is_auto: bool,
}

const BY_ORDER: Served =
    Served { service: "web.shop", name: "web.shop.sal.internal", port: 81, web_listener: WEB_PORT, is_auto: false };
const BY_ITSELF: Served =
    Served { service: "chat.shop", name: "chat.shop.sal.internal", port: 82, web_listener: 8080, is_auto: true };

struct Stage<'a> {
    client: &'a Host,
    servers: [&'a Host; 3],
    length: Length,
    served: &'a Served,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = site::build(SCENARIO.name, site::V4, &[&SERVERS[..], &["client"]].concat(), dir)?;
    for server in SERVERS {
        configure(lab.host(server)?, &BY_ITSELF)?;
    }
    let _agents = Agents::start(&lab)?;
    let client = lab.host("client")?;
    let servers = [lab.host(SERVERS[0])?, lab.host(SERVERS[1])?, lab.host(SERVERS[2])?];
    let hosts = [client, servers[0], servers[1], servers[2]];
    pair::demand_kernel(&hosts, findings)?;
    for figure in ["moved", "moved_share", "stays_wrong", "report_wrong", "bad_accepted", "lost_sessions", "requests"] {
        findings.set(figure, 0.0);
    }
    for figure in ["wrong_bytes", "even_after_s", "p99_ratio"] {
        findings.set(figure, 0.0);
    }
    findings.set("share_min", 1.0);
    hosts.iter().try_for_each(|host| observe::count_virtual_resets(host))?;
    let length = || if is_long() { LONG } else { SHORT };
    let stage = Stage { client, servers, length: length(), served: &BY_ORDER };
    pair::attempt_part("by order", findings, |findings| stage.play(findings));
    if is_long() {
        let stage = Stage { served: &BY_ITSELF, length: length(), ..stage };
        pair::attempt_part("by itself", findings, |findings| stage.play(findings));
    }
    pair::report_resets(&hosts, findings)
}

/// Lets a host serve a name by its configuration, while programs listen.
fn configure(host: &Host, served: &Served) -> Result<()> {
    let Served { service, port, web_listener, .. } = served;
    let section = |listener: u16, port: u16| {
        format!(
            "[[service]]\nname = \"{service}\"\nlisten = \"0.0.0.0:{listener}\"\nport = {port}\n\
            rebalance = \"auto\"\n"
        )
    };
    let text = format!("{}{}", section(*web_listener, WEB_PORT), section(*port, *port));
    host.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{text}END\n")).map(drop)
}

/// The programs of one host.
struct Running {
    /// Ends with this.
    _serving: Serving,
    nginx: Nginx,
}

/// What a host has of the name.
#[derive(Clone, Copy, Default)]
struct Standing {
    /// All connections.
    all: f64,
    /// Those of sessions.
    sessions: f64,
}

impl Stage<'_> {
    /// Two hosts have all connections; the third one comes, and gets its share.
    fn play(&self, findings: &mut Findings) -> Result<()> {
        let Served { service, name, port, .. } = *self.served;
        let [one, two, three] = self.servers;
        let content = noise(self.length.bytes, 1);
        let running = [self.serve(one, &content)?, self.serve(two, &content)?];
        let sha256 = sha256(self.client, &running[0].nginx.root.join("paced"))?;
        agent::await_instances(self.client, service, running.len())?;
        let (address, _) = agent::virtual_addresses(self.client, service)?;
        let Length { sessions: count, downloads: files, .. } = self.length;
        let mut sessions = Sessions::open(self.client, &address, port, count, &[])?;
        let order = Order { host: name, path: "paced", count: files, pace: PACE };
        let mut downloads = Downloads::start(self.client, order)?;
        downloads.await_open(LIMIT)?;
        let mut arrivals = Arrivals::start(self.client, name, WEB_PORT, EVERY, Some(ASK))?;
        let begun_ms = now_ms();
        arrivals.until(begun_ms + self.length.before.as_secs_f64() * 1e3, LIMIT).map(drop)?;

        // Under requests.
        let added_ms = now_ms();
        let third = self.serve(three, &content)?;
        agent::await_instances(self.client, service, SERVERS.len())?;
        if !self.served.is_auto {
            self.refuse_all(findings)?;
            self.rehearse(findings)?;
        }
        let moved_ms = if self.served.is_auto { added_ms } else { now_ms() };
        let report = self.rebalance()?;
        self.judge_shares(moved_ms, findings)?;
        let over_ms = now_ms();
        let talked = sessions.round()?;
        ensure!(talked.hung == 0, "{} sessions are not answered; {:?}", talked.hung, talked.errors);
        if let Some(report) = report {
            self.judge_report(&report, findings)?;
        }
        self.judge_moves(findings)?;
        let seen: Vec<Arrival> = arrivals.until(over_ms, LIMIT)?.cloned().collect();
        arrivals.stop()?;
        judge_requests(&seen, [begun_ms, moved_ms, over_ms], findings);
        let talked = sessions.end()?;
        talked.errors.iter().for_each(|error| findings.note(format!("sessions: {error}")));
        findings.figures.add("wrong_bytes", talked.wrong as f64);
        findings.figures.add("lost_sessions", (count - talked.open) as f64);
        downloads::judge("downloads that stay", &downloads.finish(DOWNLOADS_LIMIT)?, &sha256, findings);
        drop((running, third));
        Ok(())
    }

    fn serve(&self, host: &Host, content: &[u8]) -> Result<Running> {
        let Served { service, port, web_listener, is_auto, .. } = *self.served;
        let web = format!("0.0.0.0:{web_listener}");
        let lines = format!("0.0.0.0:{port}");
        let name = format!("{}-{service}", host.name());
        let mut serving = Serving::start(host, service, &name, &["--listen", &lines, "--take-over"])?;
        serving.await_step("a server", 1, |step| *step == Step::Takes)?;
        let nginx = Nginx::start(host, &[&web])?;
        nginx.put("paced", content)?;
        if !is_auto {
            agent::publish(host, service, &lines, &[])?;
            agent::publish(host, service, &web, &[])?;
        }
        Ok(Running { _serving: serving, nginx })
    }

    /// What a host has of the name now.
    fn standing(&self, host: &Host) -> Result<Standing> {
        let flows = agent::open_flows(host, self.served.service, "tcp")?;
        // Streams between agents are flows of the name, too.
        let at = |port: u16| {
            let end = format!(":{port}");
            let is_at = |flow: &&Value| {
                flow["role"] == "responder" && flow["app_source"].as_str().is_some_and(|source| source.ends_with(&end))
            };
            flows.iter().filter(is_at).count() as f64
        };
        let sessions = at(self.served.port);
        Ok(Standing { all: sessions + at(self.served.web_listener), sessions })
    }

    /// Wrong commands fail.
    fn refuse_all(&self, findings: &mut Findings) -> Result<()> {
        let [one, ..] = self.servers;
        let service = self.served.service;
        let wrong: [(&Host, &[&str]); 4] = [
            (one, &["none.shop"]),
            (one, &[service, "--max-per-s", "0"]),
            (one, &[service, "--max-per-s", "1001"]),
            // It does not serve the name.
            (self.client, &[service]),
        ];
        for (host, words) in wrong {
            if agent::margay(host, ["rebalance"].iter().chain(words).copied()).is_ok() {
                findings.figures.add("bad_accepted", 1.0);
                findings.note(format!("{}: margay rebalance {} was done", host.name(), words.join(" ")));
            }
        }
        Ok(())
    }

    fn order(&self, options: &[&str]) -> Result<Value> {
        let words = ["rebalance", self.served.service, "--json"];
        let said = agent::margay(self.servers[0], words.iter().chain(options).copied())?;
        serde_json::from_str(&said).with_context(|| format!("margay rebalance said {said:?}"))
    }

    /// A dry run says what would go, and moves nothing.
    fn rehearse(&self, findings: &mut Findings) -> Result<()> {
        let report = self.order(&["--dry-run"])?;
        let all = (self.length.sessions + self.length.downloads) as f64;
        let is_right = report["phase"] == "dry-run"
            && (counted(&report, "given") - all / 3.0).abs() <= UNDER_WAY
            && self.standing(self.servers[2])?.sessions == 0.0;
        self.judge_stays(&report, findings);
        if !is_right {
            findings.figures.add("report_wrong", 1.0);
            findings.note(format!("of {all} connections a third was to go; the dry run: {report}"));
        }
        Ok(())
    }

    /// Has sessions move; gives the report where there is one.
    fn rebalance(&self) -> Result<Option<Value>> {
        if self.served.is_auto { Ok(None) } else { self.order(&[]).map(Some) }
    }

    /// Waits until each has its share.
    fn judge_shares(&self, from_ms: f64, findings: &mut Findings) -> Result<()> {
        let mut least = 0.0;
        let even = wait_for("even shares", LIMIT, || {
            let all = self.servers.iter().map(|host| Ok(self.standing(host)?.all)).collect::<Result<Vec<f64>>>()?;
            let total: f64 = all.iter().sum();
            least = all.iter().copied().fold(total, f64::min) / total.max(1.0);
            ensure!(least >= SHARE_MIN, "the hosts have {all:?}");
            Ok(())
        });
        findings.set("share_min", findings.figures.get("share_min").min(least));
        even?;
        let after_s = (now_ms() - from_ms) / 1e3;
        findings.set("even_after_s", findings.figures.get("even_after_s").max(after_s));
        Ok(())
    }

    /// The report has what has gone, and what stays.
    fn judge_report(&self, report: &Value, findings: &mut Findings) -> Result<()> {
        let here = self.standing(self.servers[2])?.sessions;
        let rests = report["hosts"].as_array().is_some_and(|hosts| {
            hosts.len() == SERVERS.len() && hosts.iter().all(|host| host["giving"] != true && host["why_not"] == "")
        });
        // Flows that have just come may not be listed yet.
        let is_right = report["phase"] == "over" && rests && counted(report, "given") >= here && here > 0.0;
        self.judge_stays(report, findings);
        if !is_right {
            findings.figures.add("report_wrong", 1.0);
            findings.note(format!("{here} sessions stand at the third host; the report: {report}"));
        }
        Ok(())
    }

    /// Downloads stay, since nobody gives them.
    fn judge_stays(&self, report: &Value, findings: &mut Findings) {
        let hosts = report["hosts"].as_array().into_iter().flatten();
        let stays = hosts.flat_map(|host| host["stays"].as_array().into_iter().flatten());
        let flows: f64 = stays.filter_map(|stay| stay["flows"].as_f64()).sum();
        let wanted = self.length.downloads as f64;
        if !(wanted..=wanted + 2.0 * UNDER_WAY).contains(&flows) {
            findings.figures.add("stays_wrong", 1.0);
            findings.note(format!("{wanted} downloads cannot go; the report: {report}"));
        }
    }

    /// By the metrics of those that have given.
    fn judge_moves(&self, findings: &mut Findings) -> Result<()> {
        let row = format!("margay_rebalance_moves_total{{service=\"{}\",outcome=\"moved\"}}", self.served.service);
        let mut moved = 0.0;
        for host in &self.servers[..2] {
            moved += agent::metric(host, &row)?;
        }
        findings.figures.add("moved", moved);
        let share = moved / (self.length.sessions + self.length.downloads) as f64;
        findings.set("moved_share", findings.figures.get("moved_share").max(share));
        Ok(())
    }
}

/// Requests while sessions moved, beside those before.
fn judge_requests(seen: &[Arrival], [begun_ms, moved_ms, over_ms]: [f64; 3], findings: &mut Findings) {
    let took_ms = |from_ms: f64, until_ms: f64| {
        let meant = seen.iter().filter(|arrival| (from_ms..until_ms).contains(&arrival.begun_ms));
        percentile(&meant.map(|arrival| arrival.took_ms).collect::<Vec<f64>>(), 99.0)
    };
    let before_ms = took_ms(begun_ms, moved_ms);
    let meanwhile_ms = took_ms(moved_ms, over_ms);
    findings.set("p99_ms_before", before_ms);
    findings.set("p99_ms_moving", meanwhile_ms);
    if before_ms > 0.0 {
        findings.set("p99_ratio", findings.figures.get("p99_ratio").max(meanwhile_ms / before_ms));
    }
    findings.figures.add("requests", seen.len() as f64);
    let failed: Vec<&Arrival> = seen.iter().filter(|arrival| !arrival.error.is_empty()).collect();
    findings.figures.add("failed", failed.len() as f64);
    // The first few tell as much as all of them.
    for arrival in failed.iter().take(3) {
        let at_ms = arrival.begun_ms - begun_ms;
        findings.note(format!("a request begun at {at_ms:.0} ms, after {:.0} ms: {}", arrival.took_ms, arrival.error));
    }
}

/// What a report counts of all hosts together.
fn counted(report: &Value, of: &str) -> f64 {
    report["hosts"].as_array().into_iter().flatten().filter_map(|host| host[of].as_f64()).sum()
}
