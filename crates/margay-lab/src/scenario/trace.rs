//! `trace`: what `margay trace` says of a name, and that it is so: through routers to an instance, with an operator's
//! rules in between that discard, fall back, end by themselves, lead in a circle or to nobody; and with a router that
//! is dead.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::{Findings, Scenario};
use crate::agent::{self, Agents, margay};
use crate::host::Host;
use crate::lab::Lab;
use crate::program::wait_for;
use crate::report::Limit::{AtLeast, Exactly};
use crate::report::{Bound, bound};
use crate::server::{Nginx, echo, fetch_text};
use crate::topology::Topology;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "trace",
    summary: "where first packets go and why, through two routers, with rules that discard, fall back, expire and loop",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 4] = [
    bound("traces", AtLeast(13.0)),
    bound("wrong", Exactly(0.0)),
    bound("counted_by_traces", Exactly(0.0)),
    bound("failed", Exactly(0.0)),
];

const TOPOLOGY: &str = r#"
[subnet.site]
v4 = "10.1.0.0/24"
[host.router]
role = "router"
links = [{ subnet = "site" }]
[host.far]
role = "router"
links = [{ subnet = "site" }]
[host.web1]
role = "agent"
links = [{ subnet = "site" }]
[host.web2]
role = "agent"
links = [{ subnet = "site" }]
[host.client]
role = "agent"
links = [{ subnet = "site" }]
"#;
const URL: &str = "http://web.shop.sal.internal/host";
const LIMIT: Duration = Duration::from_secs(10);

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = Lab::build(Topology::parse("trace", TOPOLOGY)?, dir)?;
    let _agents = Agents::start(&lab)?;
    for figure in ["traces", "wrong", "counted_by_traces", "failed"] {
        findings.set(figure, 0.0);
    }
    let mut servers = Vec::new();
    for (name, service, options) in [
        ("web1", "web.shop", &["--priority", "10"][..]),
        ("web2", "web.shop", &["--priority", "5"]),
        ("far", "far.shop", &[]),
    ] {
        servers.push(Nginx::start(lab.host(name)?, &["0.0.0.0:80"])?);
        agent::publish(lab.host(name)?, service, "0.0.0.0:80", options)?;
    }
    let none = "host:00000000000000000000000000000000";
    agent::publish(lab.host("web1")?, "closed.shop", "0.0.0.0:80", &["--allow", none])?;
    agent::await_instances(lab.host("router")?, "web.shop", 2)?;
    through_routers(&lab, findings)?;
    fall_back(&lab, findings)?;
    discarded(&lab, findings)?;
    copied(&lab, findings)?;
    nowhere(&lab, findings)?;
    refused(&lab)?;
    datagrams(&lab)?;
    kept(lab.host("client")?)?;
    dead_router(&lab, findings)
}

/// A trace of a name: what its last hop does, the hops' names, and all that it says. Its exit status must say the same.
struct Traced {
    end: String,
    path: String,
    said: String,
}

fn trace(host: &Host, name: &str, options: &[&str]) -> Result<Traced> {
    let program = crate::fabric::margay_program()?;
    let argv = |json: Option<&'static str>| {
        let words = ["trace", name].into_iter().chain(options.iter().copied()).chain(json);
        std::iter::once(program.as_os_str().to_owned()).chain(words.map(Into::into)).collect::<Vec<_>>()
    };
    let output = host.output(argv(Some("--json")))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let reply: Value = serde_json::from_str(&said).with_context(|| format!("trace is not JSON: {said}{error}"))?;
    let hops = reply["hops"].as_array().context("a trace without hops")?;
    let text = |hop: &Value, field: &str| hop[field].as_str().unwrap_or_default().to_owned();
    let end = text(hops.last().context("a trace of no hop")?, "act");
    ensure!(output.status.success() == (end == "deliver"), "it ends with {end}, and its status is {}", output.status);
    let path = hops.iter().map(|hop| text(hop, "host_name")).collect::<Vec<_>>().join(" > ");
    Ok(Traced { end, path, said: String::from_utf8_lossy(&host.output(argv(None))?.stdout).into_owned() })
}

/// Checks how a trace ends, which hosts it names, and that it says these words.
fn expect(findings: &mut Findings, found: &Traced, end: &str, path: &str, words: &[&str]) {
    findings.figures.add("traces", 1.0);
    let missing: Vec<_> = words.iter().filter(|word| !found.said.contains(**word)).collect();
    if found.end != end || found.path != path || !missing.is_empty() {
        findings.figures.add("wrong", 1.0);
        let Traced { end: ended, path: taken, said } = found;
        findings.note(format!("not {end} by {path} but {ended} by {taken}, without {missing:?}:\n{said}"));
    }
}

fn packets(host: &Host) -> Result<f64> {
    let routes: Value = serde_json::from_str(&margay(host, ["route", "list", "--json"])?)?;
    let routes = routes["routes"].as_array().context("no routes")?.iter();
    Ok(routes.filter_map(|route| route["packets"].as_f64()).sum())
}

fn rule_id(output: &str) -> Result<u64> {
    let reply: Value = serde_json::from_str(output)?;
    reply["routes"][0]["id"].as_u64().context("no rule was added")
}

/// From the client over the router to an instance, to a service of the second router, and to one that lets nobody in.
fn through_routers(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let (client, router) = (lab.host("client")?, lab.host("router")?);
    let before = packets(client)? + packets(router)?;
    let found = trace(client, "web.shop:80", &[])?;
    let words = [
        "the way to the router",
        "registered by web1",
        "has a higher priority",
        "0.0.0.0:80",
        "web.shop is reached at web1",
    ];
    expect(findings, &found, "deliver", "client > router > web1", &words);
    let found = trace(client, "far.shop", &[])?;
    expect(findings, &found, "deliver", "client > router > far", &["far.shop is reached at far"]);
    let found = trace(lab.host("far")?, "web.shop", &[])?;
    expect(findings, &found, "deliver", "far > router > web1", &[]);
    let found = trace(client, "closed.shop", &[])?;
    expect(findings, &found, "refuse", "client > router > web1", &["does not let the client in"]);
    let found = trace(client, "web.shop:81", &[])?;
    expect(findings, &found, "nobody", "client > router > web1", &["its listener is for another port"]);
    let found = trace(client, "nobody.shop", &[])?;
    expect(findings, &found, "nobody", "client > router", &["no rule covers it"]);
    findings.figures.add("counted_by_traces", packets(client)? + packets(router)? - before);
    Ok(())
}

/// Of priority 10 nobody can take it; who has priority 5 does.
fn fall_back(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let (client, web1) = (lab.host("client")?, lab.host("web1")?);
    ensure!(fetch_text(client, URL)? == "web1", "the higher priority does not come first");
    let again = |weight: &str| {
        margay(
            web1,
            ["service", "publish", "web.shop", "--listen", "0.0.0.0:80", "--priority", "10", "--weight", weight],
        )
    };
    again("0")?;
    await_end(client, "client > router > web2")?;
    let found = trace(client, "web.shop", &[])?;
    expect(findings, &found, "deliver", "client > router > web2", &["weight 0: it takes no new connections"]);
    ensure!(fetch_text(client, URL)? == "web2", "nobody takes over");
    again("100")?;
    await_end(client, "client > router > web1")?;
    ensure!(fetch_text(client, URL)? == "web1", "the higher priority does not come back");
    Ok(())
}

fn await_end(host: &Host, path: &str) -> Result<()> {
    wait_for(path, LIMIT, || {
        let found = trace(host, "web.shop", &[])?;
        if found.path == path { Ok(()) } else { bail!("it is {}", found.path) }
    })
}

/// A rule of the client's discards, until its time is over.
fn discarded(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let client = lab.host("client")?;
    for (timeout, words) in [("--hard-timeout", "is over"), ("--idle-timeout", "it decided upon nothing for 1s 500ms")]
    {
        let id = rule_id(&margay(client, ["route", "add", "web.shop", "drop", timeout, "1500ms", "--json"])?)?;
        let found = trace(client, "web.shop", &[])?;
        let rule = format!("discards it by rule {id} (the operator's)");
        expect(findings, &found, "discard", "client", &[&rule, "has a longer prefix"]);
        ensure!(fetch_text(client, URL).is_err(), "what is to be discarded arrives");
        await_end(client, "client > router > web1")?;
        let found = trace(client, "web.shop", &[])?;
        let ended = format!("rule {id} (drop of web.shop) ended");
        expect(findings, &found, "deliver", "client > router > web1", &[&ended, words]);
        ensure!(fetch_text(client, URL)? == "web1", "what is not discarded any more does not arrive");
    }
    Ok(())
}

/// The router sends a copy of each first packet to both hosts, of which one does not serve the name.
fn copied(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let (client, router) = (lab.host("client")?, lab.host("router")?);
    agent::publish(lab.host("web2")?, "half.shop", "0.0.0.0:80", &[])?;
    agent::await_instances(router, "half.shop", 1)?;
    let address = |name: &str| lab.host(name)?.plan.address().with_context(|| format!("{name} has no address"));
    let both = format!("{},{}", address("web1")?, address("web2")?);
    margay(router, ["route", "add", "half.shop", "forward-all", &both, "--priority", "200"])?;
    let found = trace(client, "half.shop", &[])?;
    let words = ["sends a copy to each of", "no rule can take it", "half.shop is reached at web2"];
    expect(findings, &found, "deliver", "client > router > web1 > web2", &words);
    for _ in 0..5 {
        let answered = fetch_text(client, "http://half.shop.sal.internal/host")?;
        ensure!(answered == "web2", "{answered} answers for half.shop");
    }
    Ok(())
}

/// Rules of the router's that lead in a circle, and to nobody.
fn nowhere(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let (client, router) = (lab.host("client")?, lab.host("router")?);
    let far = lab.host("far")?.plan.address().context("far has no address")?.to_string();
    margay(router, ["route", "add", "ring.shop", "forward", &far])?;
    let found = trace(client, "ring.shop", &[])?;
    expect(
        findings,
        &found,
        "loop",
        "client > router > far > router",
        &["the packet has been here before", "(router > far > router)"],
    );
    let warned = margay(router, ["route", "add", "stranger.shop", "forward", "10.1.0.99"])?;
    ensure!(warned.contains("the answers do not find back"), "no warning: {warned}");
    let found = trace(client, "stranger.shop", &[])?;
    expect(
        findings,
        &found,
        "unasked",
        "client > router > 10.1.0.99:54324",
        &["nobody there can be asked", "is not tagged"],
    );
    Ok(())
}

/// Orders that make no sense are refused in words that name what is wrong, and change nothing.
fn refused(lab: &Lab) -> Result<()> {
    let client = lab.host("client")?;
    let own = client.plan.address().context("the client has no address")?.to_string();
    let before = margay(client, ["route", "list", "--json"])?.matches("\"id\"").count();
    for (words, part) in [
        ("web drop", "`web` has no authority"),
        ("sid:0g/64 drop", "character 6 of `sid:0g/64`"),
        ("web.shpo drop", "belongs to: shop"),
        ("sid:01/8 drop", "names of many authorities"),
        ("web.shop forward 10.1.0.300", "`10.1.0.300` is no address of a next hop"),
        ("web.shop forward 10.1.0.9:0", "10.1.0.9:0 has no port"),
        ("web.shop forward 255.255.255.255", "is no host's own address"),
        (&format!("web.shop forward {own}"), "is this host itself"),
        ("web.shop forward 10.1.0.9 --weight 65536", "--weight 65536"),
        (
            "web.shop forward-all \
             10.1.0.11,10.1.0.12,10.1.0.13,10.1.0.14,10.1.0.15,10.1.0.16,10.1.0.17,10.1.0.18,10.1.0.19",
            "8 next hops",
        ),
        ("web.shop drop --idle-timeout 0s", "--idle-timeout 0"),
        ("web.shop drop --hard-timeout 0s", "--hard-timeout 0"),
    ] {
        let error = margay(client, ["route", "add"].into_iter().chain(words.split(' ')));
        let error = error.err().with_context(|| format!("`route add {words}` is taken"))?.to_string();
        // The terminal's width may break the sentence anywhere.
        let plain = |text: &str| text.replace(['│', '\n', ' '], "");
        ensure!(plain(&error).contains(&plain(part)), "`route add {words}`: {error}");
    }
    let after = margay(client, ["route", "list", "--json"])?.matches("\"id\"").count();
    ensure!(before == after, "there are {after} rules, not {before}");
    Ok(())
}

/// Datagrams of an unconnected socket obey a rule of their own host, too, from soon after it is given until it is gone.
fn datagrams(lab: &Lab) -> Result<()> {
    const ASK: &str = "import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(0.4)
s.sendto(b'hello', (socket.gethostbyname('echo.shop.sal.internal'), 7))
sys.exit(0 if s.recv(100) else 1)";
    let (client, web1) = (lab.host("client")?, lab.host("web1")?);
    let _echo = echo(web1, &["0.0.0.0:7".parse()?])?;
    agent::publish(web1, "echo.shop", "0.0.0.0:7", &["--protocol", "udp"])?;
    let is_answered = || client.run(["python3", "-c", ASK]).is_ok();
    let until = |wanted: bool| {
        wait_for("datagrams that are answered, or not", LIMIT, || {
            ensure!(is_answered() == wanted, "they are{} answered", if wanted { " not" } else { "" });
            Ok(())
        })
    };
    until(true)?;
    let id = rule_id(&margay(client, ["route", "add", "echo.shop", "drop", "--json"])?)?;
    until(false)?;
    margay(client, ["route", "delete", &id.to_string()])?;
    until(true)
}

/// A rule outlives the agent, and one whose time is not over yet keeps the rest of it.
fn kept(client: &Host) -> Result<()> {
    let plain = rule_id(&margay(client, ["route", "add", "kept.shop", "drop", "--json"])?)?;
    let timed = rule_id(&margay(client, ["route", "add", "timed.shop", "drop", "--hard-timeout", "1h", "--json"])?)?;
    let changed = margay(client, ["route", "change", &timed.to_string(), "--priority", "7"])?;
    ensure!(changed.contains("timed.shop"), "{changed}");
    agent::kill(client)?;
    agent::start_again(client)?;
    for (name, id, priority) in [("kept.shop", plain, 100), ("timed.shop", timed, 7)] {
        let routes = agent::routes(client, name)?;
        let rule = routes.iter().find(|route| route["origin"] == "operator").context("an operator's rule is lost")?;
        ensure!(rule["id"].as_u64() == Some(id) && rule["priority"].as_u64() == Some(priority), "{rule}");
        let left = rule["hard_left_ms"].as_u64();
        ensure!(if id == plain { left.is_none() } else { left.is_some_and(|ms| ms < 3_600_000) }, "{rule}");
    }
    margay(client, ["route", "delete", &plain.to_string()])?;
    let refused = margay(client, ["route", "delete", &plain.to_string()]);
    ensure!(refused.is_err_and(|error| error.to_string().contains("there is no rule")), "a rule can be deleted twice");
    Ok(())
}

/// The trace ends at what cannot be asked, and says so.
fn dead_router(lab: &Lab, findings: &mut Findings) -> Result<()> {
    let (client, router) = (lab.host("client")?, lab.host("router")?);
    agent::kill(router)?;
    wait_for("the end of the registration", LIMIT, || match agent::status(client)?["joined"].as_bool() {
        Some(false) => Ok(()),
        _ => bail!("it is joined"),
    })?;
    let address = router.plan.address().context("the router has no address")?;
    let found = trace(client, "web.shop", &[])?;
    let words =
        ["there is no registration between the two now", "is not known: the trace ends before it reaches web.shop"];
    expect(findings, &found, "unasked", &format!("client > {address}:54324"), &words);
    agent::start_again(router)
}
