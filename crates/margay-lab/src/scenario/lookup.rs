//! `lookup`: the same web server reached by names that a static file, a DNS server and a DHT resolve, where a router
//! and the server's own host have written them; and names whose resolvers fail or never answer: their programs get an
//! error soon, and what waits meanwhile is bounded.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Findings, Scenario};
use crate::agent::{self, Agents, margay};
use crate::command::progress;
use crate::fabric::margay_program;
use crate::host::Host;
use crate::lab::Lab;
use crate::program::{Program, wait_for};
use crate::report::Limit::{AtMost, Below, Exactly};
use crate::report::{Bound, bound};
use crate::server::{self, Nginx, fetch, fetch_text};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "lookup",
    summary: "the same service by DNS, a DHT and a static file; a resolver that fails, and one that never answers",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 10] = [
    bound("ok", Exactly(((GOOD.len() + 1) * FETCHES) as f64)),
    bound("failed", Exactly(0.0)),
    bound("error_ms", Below(3000.0)),
    bound("held_packets_max", AtMost(HELD_PER_NAME)),
    bound("burst_failed", Exactly(BURST as f64)),
    // Each name is asked for once while its answer holds.
    bound("questions_per_fetch", AtMost(0.5)),
    bound("by_router", Exactly(0.0)),
    bound("dns_written_ms", Below(5000.0)),
    bound("dns_withdrawn_ms", Below(5000.0)),
    bound("dht_found_ms", Below(1000.0)),
];

const FETCHES: usize = 20;
/// Programs that connect at once to a name whose resolver is silent: more than the core holds for one name.
const BURST: usize = 300;
/// What the core holds for one name.
const HELD_PER_NAME: f64 = 256.0;
const LIMIT: Duration = Duration::from_secs(10);
const DHT_PORT: u16 = 6881;
/// `shop`, with all that is of it.
const AUTHORITY: &str = "sid:842add7b70d72e01/64";
/// By which the router may change the zone.
const SECRET: &str = "bWFyZ2F5LWxhYi1zZWNyZXQtb2YtMzItYnl0ZXMhISE=";
/// Names that are found, and by which resolver: of the last, another one has failed before.
const GOOD: [(&str, &str); 4] =
    [("hosts.shop", "hosts"), ("corp.shop", "corp"), ("known.shop", "registry"), ("both.shop", "hosts")];
/// Names that are not: its server refuses, its two servers are silent, its file says nothing of it.
const BAD: [&str; 3] = ["refused.shop", "silent.shop", "absent.shop"];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"

[host.router]
role = "router"
links = [{ subnet = "site" }]

[host.web]
role = "agent"
links = [{ subnet = "site" }]

[host.client]
role = "agent"
links = [{ subnet = "site" }]

[host.names]
role = "plain"
links = [{ subnet = "site" }]

[host.silent]
role = "plain"
links = [{ subnet = "site" }]
"#;

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("lookup", TOPOLOGY)?, dir)?;
    for figure in ["ok", "failed", "error_ms"] {
        findings.set(figure, 0.0);
    }
    let (client, web) = (lab.host("client")?, lab.host("web")?);
    let _names = serve_zone(&lab)?;
    hush(lab.host("silent")?)?;
    configure(&lab)?;
    let _agents = Agents::start(&lab)?;
    let _nginx = Nginx::start(web, &["0.0.0.0:80"])?;
    for name in GOOD.iter().map(|(name, _)| name).chain(&BAD) {
        agent::publish(web, name, "0.0.0.0:80", &[])?;
    }
    let corp = Corp { server: address(&lab, "names")?, client };
    findings.set("dns_written_ms", corp.await_record(true)?);
    fetch_all(client, findings)?;
    fetch_by_key(web, client, findings)?;
    refused(client, findings)?;
    burst(client, findings)?;
    explained(client, lab.host("router")?)?;
    changed(client)?;
    agent::withdraw(web, "corp.shop")?;
    findings.set("dns_withdrawn_ms", corp.await_record(false)?);
    Ok(())
}

fn address(lab: &Lab, host: &str) -> Result<String> {
    let link = lab.host(host)?.plan.links.first().context("a host without a link")?;
    Ok(link.address(false).context("no IPv4 address")?.to_string())
}

fn url(name: &str) -> String {
    format!("http://{name}.sal.internal/host")
}

/// A DNS server with the zone `shop.test`, by knot.
fn serve_zone(lab: &Lab) -> Result<Program> {
    let host = lab.host("names")?;
    let (own, dir) = (address(lab, "names")?, host.dir.join("knot"));
    std::fs::create_dir_all(&dir)?;
    let zone = format!("$ORIGIN shop.test.\n$TTL 5\n@ SOA ns hostmaster 1 60 60 60 1\n@ NS ns\nns A {own}\n");
    std::fs::write(dir.join("shop.test.zone"), zone)?;
    let dir = dir.display();
    let config = format!(
        "server:\n  rundir: {dir}\n  listen: {own}@53\n  user: root:root\n  udp-workers: 1\n  tcp-workers: 1\n  \
         background-workers: 1\ndatabase:\n  storage: {dir}\nlog:\n  - target: stderr\n    any: info\n\
         key:\n  - id: margay\n    algorithm: hmac-sha256\n    secret: {SECRET}\n\
         acl:\n  - id: margay\n    key: margay\n    action: update\n\
         zone:\n  - domain: shop.test\n    storage: {dir}\n    file: shop.test.zone\n    zonefile-load: whole\n    \
         acl: margay\n"
    );
    let path = host.dir.join("knot/knot.conf");
    std::fs::write(&path, config)?;
    let mut program = host.spawn("knot", [Path::new("knotd"), Path::new("-c"), path.as_path()])?;
    wait_for("the DNS server", LIMIT, || {
        ensure!(program.ended()?.is_none(), "knot has ended: {}", program.log());
        let found = host.shell(&format!("dig +short +time=1 +tries=1 @{own} ns.shop.test A"))?;
        ensure!(found.contains(&own), "it does not answer yet");
        Ok(())
    })?;
    Ok(program)
}

/// Whoever asks this host anything hears nothing.
fn hush(host: &Host) -> Result<()> {
    let rules = "add table inet lab_silent; add chain inet lab_silent input { type filter hook input priority 0; }; \
                 add rule inet lab_silent input meta l4proto { tcp, udp } drop";
    host.run(["nft", rules]).map(drop)
}

fn section(name: &str, kind: &str, rest: &str) -> String {
    format!("[[resolver]]\nname = \"{name}\"\nkind = \"{kind}\"\n{rest}\n")
}

/// Who is asked, and which names wait for whom; and what is written where.
fn configure(lab: &Lab) -> Result<()> {
    let (web, names, silent) = (address(lab, "web")?, address(lab, "names")?, address(lab, "silent")?);
    let client = lab.host("client")?;
    let dns = |server: &str, zone: &str, rest: &str| format!("servers = [\"{server}\"]\nzone = \"{zone}\"\n{rest}");
    let router = address(lab, "router")?;
    let nodes = format!("bootstrap = [\"{router}:{DHT_PORT}\", \"{web}:{DHT_PORT}\"]\n");
    let dht = |rest: &str| section("dht", "dht", &format!("{nodes}port = {DHT_PORT}\n{rest}"));
    let of_client = [
        section(
            "hosts",
            "static",
            "file = \"/etc/margay/names\"\nnames = [\"hosts.shop\", \"both.shop\", \"absent.shop\"]",
        ),
        section("corp", "dns", &dns(&names, "shop.test", "names = [\"corp.shop\"]")),
        section("registry", "registry", &format!("router = \"{router}:54324\"\nnames = [\"known.shop\"]")),
        // That server is not responsible for this zone.
        section(
            "refusing",
            "dns",
            &dns(&names, "other.test", "priority = 200\nnames = [\"refused.shop\", \"both.shop\"]"),
        ),
        section("silent", "dns", &dns(&silent, "shop.test", "timeout_ms = 2000\nnames = [\"silent.shop\"]")),
        // Asked when the other has failed, with what is left of the time.
        section("mute", "dns", &dns(&silent, "shop.test", "priority = 90\nnames = [\"silent.shop\"]")),
        dht(""),
    ];
    let written = "key_file = \"/etc/margay/tsig\"\npublish = [\"corp.shop\"]";
    let of_router = [section("corp", "dns", &dns(&names, "shop.test", written)), dht("")];
    let of_web = [dht(&format!("publish = [\"{AUTHORITY}\"]"))];
    for (host, text) in [("client", of_client.concat()), ("router", of_router.concat()), ("web", of_web.concat())] {
        lab.host(host)?.shell(&format!("cat >> /etc/margay/margay.toml <<'END'\n{text}END"))?;
    }
    lab.host("router")?.shell(&format!("echo hmac-sha256:margay:{SECRET} > /etc/margay/tsig"))?;
    write_names(client, &format!("hosts.shop {web}\\nboth.shop {web}"))
}

/// The zone as a client sees it.
struct Corp<'a> {
    server: String,
    client: &'a Host,
}

impl Corp<'_> {
    /// How long it takes until the record of `corp.shop` is there, or is not.
    fn await_record(&self, is_there: bool) -> Result<f64> {
        let begun = Instant::now();
        wait_for("the record of corp.shop", LIMIT, || {
            let dig = format!("dig +short +time=1 +tries=1 @{} _sal._udp.corp.shop.shop.test SRV", self.server);
            let found = self.client.shell(&dig)?;
            ensure!(found.contains("54324") == is_there, "the server says: {found}");
            Ok(())
        })?;
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    }
}

/// As an editor does: the new file takes the place of the old one.
fn write_names(client: &Host, text: &str) -> Result<()> {
    client
        .shell(&format!("printf '{text}\\n' > /etc/margay/names.new && mv /etc/margay/names.new /etc/margay/names"))
        .map(drop)
}

fn fetch_all(client: &Host, findings: &mut Findings) -> Result<()> {
    for (name, _) in GOOD {
        for _ in 0..FETCHES {
            match fetch_text(client, &url(name)) {
                Ok(host) if host == "web" => findings.figures.add("ok", 1.0),
                other => fail(findings, &format!("{name}: {other:?}")),
            }
        }
    }
    let asked = agent::metric(client, "margay_questions_total")?;
    findings.set("questions_per_fetch", asked / (GOOD.len() * FETCHES) as f64);
    // Their way is not the one to the router, where the same names could be found.
    let list: Value = serde_json::from_str(&margay(client, ["route", "list", "--json"])?)?;
    let of = |list: &str, origin: (&str, &str), figure: &str, all: &Value| -> f64 {
        let rows = all[list].as_array().into_iter().flatten();
        rows.filter(|row| row[origin.0] == origin.1).filter_map(|row| row[figure].as_f64()).sum()
    };
    findings.set("by_router", of("routes", ("origin", "router"), "packets", &list));
    for (name, resolver) in GOOD {
        let answered = of("resolvers", ("name", resolver), "answered", &list);
        progress(&format!("{name}: {resolver} has answered {answered} times"));
        ensure!(answered > 0.0, "{resolver} was not asked of {name}");
    }
    Ok(())
}

/// A name that certifies itself, by the DHT: its host has signed the record.
fn fetch_by_key(web: &Host, client: &Host, findings: &mut Findings) -> Result<()> {
    let service = margay(web, ["id", "key", "create", "keyed.shop"])?.trim().to_owned();
    agent::publish(web, &service, "0.0.0.0:80", &[])?;
    wait_for("the writing of the record", LIMIT, || {
        let list = margay(web, ["route", "list"])?;
        ensure!(list.contains("written there: 1 name, 0 failed"), "it is not written:\n{list}");
        Ok(())
    })?;
    margay(client, ["route", "add", &service, "delay", "dht"])?;
    let (v4, _) = agent::virtual_addresses(client, &service)?;
    let url = format!("http://{v4}/host");
    let first = fetch(client, &[], &url)?;
    ensure!(first.status == 0, "by the DHT: {}", first.error);
    findings.set("dht_found_ms", first.took_ms);
    for _ in 0..FETCHES {
        match fetch_text(client, &url) {
            Ok(host) if host == "web" => findings.figures.add("ok", 1.0),
            other => fail(findings, &format!("by the DHT: {other:?}")),
        }
    }
    let list = margay(client, ["route", "list", &service])?;
    ensure!(list.contains("resolved by dht"), "it was not the DHT:\n{list}");
    Ok(())
}

fn refused(client: &Host, findings: &mut Findings) -> Result<()> {
    for name in BAD {
        // The second is answered by what is remembered of the first.
        for what in ["a name", "the name again"] {
            let got = fetch(client, &[], &url(name))?;
            progress(&format!("{what}, {name}: {} after {:.0} ms", got.error, got.took_ms));
            if got.status != 7 {
                fail(findings, &format!("{name}: status {}, {}", got.status, got.error));
            }
            let slowest = findings.figures.get("error_ms").max(got.took_ms);
            findings.set("error_ms", slowest);
        }
    }
    Ok(())
}

/// Many programs at once want a name whose resolver is silent. Each is told, also those beyond what is held.
fn burst(client: &Host, findings: &mut Findings) -> Result<()> {
    // Until the resolver is asked again.
    let program = margay_program()?;
    let argv = || [program.as_os_str(), "trace".as_ref(), "silent.shop".as_ref()];
    wait_for("the end of what is remembered", LIMIT, || {
        let said = String::from_utf8_lossy(&client.output(argv())?.stdout).into_owned();
        ensure!(said.contains("holds it by rule"), "it is remembered still: {said}");
        Ok(())
    })?;
    let burst = server::connects(client, "silent.shop.sal.internal", BURST, BURST)?;
    findings.set("burst_failed", burst.failed as f64);
    findings.set("held_packets_max", agent::metric(client, "margay_held_packets_max")?);
    let (held, left) =
        (agent::metric(client, "margay_held_packets_max")?, agent::metric(client, "margay_held_packets")?);
    ensure!(held > 1.0, "nothing was held at once");
    ensure!(left == 0.0, "{left} packets wait still");
    Ok(())
}

/// What a person sees of it.
fn explained(client: &Host, router: &Host) -> Result<()> {
    let written = margay(router, ["route", "list"])?;
    ensure!(written.contains("written there: 1 name, 0 failed"), "`route list` of the router:\n{written}");
    // What has been found holds for a while; as long as this takes.
    fetch_text(client, &url("hosts.shop"))?;
    let list = margay(client, ["route", "list"])?;
    for words in ["resolved by hosts", "delay", "resolver silent (dns): asked", "configured"] {
        ensure!(list.contains(words), "`route list` does not say `{words}`:\n{list}");
    }
    Ok(())
}

/// The file changes; a rule of the operator's names a resolver that there is, or is refused.
fn changed(client: &Host) -> Result<()> {
    let unknown = margay(client, ["route", "add", "late.shop", "delay", "nobody"]).err().map(|error| error.to_string());
    ensure!(unknown.as_deref().is_some_and(|text| text.contains("no resolver `nobody`")), "{unknown:?}");
    margay(client, ["route", "add", "late.shop", "delay", "hosts"])?;
    let wrong = "hosts.shop nowhere";
    write_names(client, wrong)?;
    let list = margay(client, ["route", "list"])?;
    ensure!(list.contains("names:1: `nowhere` is no address"), "`route list` does not say what is wrong:\n{list}");
    Ok(())
}

fn fail(findings: &mut Findings, what: &str) {
    findings.note(what.to_owned());
    findings.figures.add("failed", 1.0);
}
