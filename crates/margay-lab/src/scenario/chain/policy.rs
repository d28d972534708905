//! `chain-policy`: the policy is shown before it holds, reaches every host, outlives routers and agents, is demanded by
//! servers, is changed while sessions run, and says which boxes a box that classifies may name.

mod classified;

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Result, bail, ensure};

use super::{PORT, ZONE, apply, await_reason, build, chain, chains, count_sessions, serve, sessions, try_apply, watch};
use crate::agent::{self, Agents, margay};
use crate::host::Host;
use crate::interface::first_address;
use crate::report::Limit::{Below, Exactly};
use crate::report::{Bound, bound};
use crate::scenario::{Findings, Scenario};
use crate::server;

/// The scenario.
pub const SCENARIO: Scenario = Scenario {
    name: "chain-policy",
    summary: "chains as routers sign them, hosts keep them, and servers demand them",
    bounds: &BOUNDS,
    run,
};

const BOUNDS: [Bound; 6] = [
    bound("bypassed", Exactly(0.0)),
    bound("wrong_chain", Exactly(0.0)),
    bound("classified", Exactly(TRIES as f64)),
    bound("waited_for_server", Exactly(0.0)),
    bound("refused_ms_max", Below(2500.0)),
    bound("failed", Exactly(0.0)),
];

const TRIES: u64 = 20;
/// A session that takes longer has waited for somebody.
const WAITED_MS: f64 = 1000.0;
const NAME: &str = "web.shop";

#[derive(Default)]
struct Tally {
    /// Sessions that have reached the server without the box, or in spite of the policy.
    bypassed: f64,
    /// Sessions that went through boxes that the policy does not name for them, or that it names and they did not.
    wrong: f64,
    waited: f64,
    refused_ms: f64,
}

struct Stage<'a> {
    /// The client's.
    address: IpAddr,
    router: &'a Host,
    client: &'a Host,
    other: &'a Host,
    boxes: [&'a Host; 2],
    all: Vec<&'a Host>,
    tally: Tally,
}

fn run(dir: &Path, findings: &mut Findings) -> Result<()> {
    let lab = build("chain-policy", 2, &["other"], dir)?;
    let _agents = Agents::start(&lab)?;
    let server = lab.host("server")?;
    let _echo = server::echo(server, &["0.0.0.0:7".parse()?])?;
    agent::publish(server, NAME, "0.0.0.0:7", &[])?;
    let mut stage = Stage {
        address: first_address(&lab, lab.host("client")?, 0, false)?.addr(),
        router: lab.host("router")?,
        client: lab.host("client")?,
        other: lab.host("other")?,
        boxes: [lab.host("box1")?, lab.host("box2")?],
        all: lab.hosts.iter().collect(),
        tally: Tally::default(),
    };
    for one in stage.boxes {
        count_sessions(one)?;
    }
    pushed(&mut stage, findings)?;
    filtered(&mut stage, findings)?;
    demanded(&mut stage, findings)?;
    classified::judge(&mut stage, findings)?;
    kept(&mut stage, findings)?;
    missing(&mut stage, findings)?;
    refused_input(&stage)?;
    withdrawn(&mut stage, findings)?;
    let Tally { bypassed, wrong, waited, refused_ms } = stage.tally;
    findings.set("bypassed", bypassed);
    findings.set("wrong_chain", wrong);
    findings.set("waited_for_server", waited);
    findings.set("refused_ms_max", refused_ms);
    findings.figures.add("failed", 0.0);
    Ok(())
}

impl Stage<'_> {
    fn passed(&self) -> Result<[f64; 2]> {
        Ok([sessions(self.boxes[0])?, sessions(self.boxes[1])?])
    }

    /// Sessions of a host, each of which is to pass the first box, the second, both or none.
    fn go(&mut self, host: &Host, wanted: [bool; 2], findings: &mut Findings) -> Result<()> {
        let before = self.passed()?;
        let outcome = server::attempt(host, &format!("{NAME}.{ZONE}"), PORT, &["--count", &TRIES.to_string()])?;
        if outcome.failed() > 0 {
            findings.note(format!("of {}: {:?}", host.name(), outcome.errors));
            findings.figures.add("failed", outcome.failed() as f64);
        }
        self.tally.waited += outcome.ok_ms.iter().filter(|ms| **ms > WAITED_MS).count() as f64;
        let after = self.passed()?;
        for at in 0..2 {
            let passed = after[at] - before[at];
            let wanted = if wanted[at] { outcome.ok as f64 } else { 0.0 };
            if passed < wanted {
                self.tally.bypassed += wanted - passed;
            }
            if wanted == 0.0 {
                self.tally.wrong += passed;
            }
        }
        Ok(())
    }

    /// Sessions that are not to come to the server.
    fn refused(&mut self, host: &Host, reason: &str, findings: &mut Findings) -> Result<()> {
        let watching = watch(host)?;
        let outcome = server::attempt(host, &format!("{NAME}.{ZONE}"), PORT, &["--count", "3"])?;
        if outcome.ok > 0 {
            findings.note(format!("{} has come to the server, where it should hear `{reason}`", host.name()));
        }
        self.tally.bypassed += outcome.ok as f64;
        self.tally.refused_ms = outcome.error_ms.iter().copied().fold(self.tally.refused_ms, f64::max);
        await_reason(&watching, reason)
    }
}

/// A dry run changes nothing; then every host goes by the policy, also one whose session is the first.
fn pushed(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let (client, [one, two]) = (stage.client, stage.boxes);
    stage.go(client, [false, false], findings)?;
    let policy = chain("inspect", NAME, &["fw.shop", "ids.shop"], "");
    let shown = try_apply(stage.router, &policy, &["--dry-run"])?;
    ensure!(shown.contains("+ chain inspect: web.shop through fw.shop, ids.shop"), "the dry run shows: {shown}");
    ensure!(shown.contains("warning: nobody serves the box fw.shop"), "the dry run does not warn: {shown}");
    ensure!(chains(stage.router)?.is_empty(), "a dry run changes something");
    serve(one, "fw.shop", "forward", &[])?;
    serve(two, "ids.shop", "sniff", &[])?;
    apply(stage.router, &policy, &stage.all, &["inspect"])?;
    stage.go(client, [true, true], findings)?;
    let trace = margay(client, ["trace", NAME])?;
    ensure!(trace.contains("chain inspect: web.shop through fw.shop, ids.shop"), "trace says: {trace}");
    let again = try_apply(stage.router, &policy, &[])?;
    ensure!(again.contains("nothing to change"), "the same once more: {again}");
    // The first rule that matches decides.
    let exempt = format!("{}{}", chain("exempt", NAME, &["ids.shop"], "port = 7"), policy);
    apply(stage.router, &exempt, &stage.all, &["exempt", "inspect"])?;
    stage.go(client, [false, true], findings)?;
    let said = apply(stage.router, &policy, &stage.all, &["inspect"])?;
    ensure!(said.contains("- chain exempt"), "what is deleted is not shown: {said}");
    stage.go(client, [true, true], findings)
}

/// Expressions of libpcap decide, on the first packet as a box would see it, beside the other predicates.
fn filtered(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let (client, other) = (stage.client, stage.other);
    let filter = |name: &str, boxes: &[&str], expression: &str, more: &str| {
        chain(name, NAME, boxes, &format!("filter = \"{expression}\"\n{more}"))
    };
    let here = stage.address;
    let syn = filter("syn", &["fw.shop"], "tcp[tcpflags] & tcp-syn != 0", "");
    for (policy, names, of_client, of_other) in [
        (filter("net", &["fw.shop"], &format!("tcp port 7 and src net {here}/32"), ""), &["net"][..], true, false),
        (filter("port", &["fw.shop"], &format!("tcp port 8 and src net {here}/32"), ""), &["port"], false, false),
        (filter("udp", &["fw.shop"], "udp", ""), &["udp"], false, false),
        (filter("ip6", &["fw.shop"], "ip6", ""), &["ip6"], false, false),
        (syn.clone(), &["syn"], true, true),
        (filter("both", &["fw.shop"], "tcp[tcpflags] & tcp-syn != 0", "port = \"8-9\""), &["both"], false, false),
        // The first one that matches decides, be it one without boxes.
        (
            format!("{}{syn}", filter("exempt", &[], &format!("src host {here}"), "protocol = \"tcp\"")),
            &["exempt", "syn"],
            false,
            true,
        ),
    ] {
        let shown = apply(stage.router, &policy, &stage.all, names)?;
        let filter = policy.lines().find_map(|line| line.strip_prefix("filter = ")).unwrap_or_default();
        ensure!(shown.contains(filter.trim_matches('"')), "the changes do not show the filter: {shown}");
        stage.go(client, [of_client, false], findings)?;
        stage.go(other, [of_other, false], findings)?;
    }
    let trace = |host, port| margay(host, ["trace", &format!("{NAME}:{port}")]);
    let of_client = trace(client, PORT)?;
    ensure!(of_client.contains(&format!("chain exempt: {NAME} tcp filter `src host {here}`")), "{of_client}");
    let of_other = trace(other, PORT)?;
    ensure!(of_other.contains("chain syn: ") && of_other.contains("through fw.shop"), "{of_other}");
    let policy = chain("inspect", NAME, &["fw.shop", "ids.shop"], "");
    apply(stage.router, &policy, &stage.all, &["inspect"]).map(drop)
}

/// A server that demands a box takes nobody who has not passed it, whatever his host goes by.
fn demanded(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let identity = agent::status(stage.client)?;
    let id = identity["host_id"].as_str().unwrap_or_default().to_owned();
    let from = format!("from = [\"host:{id}\"]");
    let required = format!("[[require]]\nname = \"{NAME}\"\nboxes = [\"fw.shop\", \"ids.shop\"]\n");
    let policy = chain("inspect", NAME, &["fw.shop", "ids.shop"], &from);
    apply(stage.router, &format!("{policy}{required}"), &stage.all, &["inspect"])?;
    stage.go(stage.client, [true, true], findings)?;
    // The policy has no chain for this one: it goes straight, and is not let in.
    stage.refused(stage.other, "box", findings)?;
    // Its own operator's words do not help it: what nobody has signed does not count.
    let own = try_apply(stage.other, &chain("own", NAME, &[], ""), &[]);
    ensure!(own.is_err(), "a host without the authority's key has changed the policy");
    stage.refused(stage.other, "box", findings)?;
    // And no more than that: what is not spoken of stays.
    let policy = chain("inspect", NAME, &["fw.shop", "ids.shop"], "");
    apply(stage.router, &policy, &stage.all, &["inspect"])?;
    stage.go(stage.other, [true, true], findings)?;
    apply(stage.router, &format!("require = []\n{policy}"), &stage.all, &["inspect"]).map(drop)
}

/// Without a router, and over the restart of agents, hosts go by what they have.
fn kept(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    agent::kill(stage.router)?;
    agent::kill(stage.client)?;
    agent::start(stage.client)?;
    ensure!(chains(stage.client)? == ["inspect"], "the client's agent has forgotten the policy");
    agent::start_again(stage.router)?;
    for host in &stage.all {
        crate::program::wait_for("joining", agent::READY_LIMIT, || match agent::status(host)?["joined"].as_bool() {
            Some(false) => bail!("{} has not joined", host.name()),
            _ => Ok(()),
        })?;
    }
    agent::await_instances(stage.client, NAME, 1)?;
    stage.go(stage.client, [true, true], findings)
}

/// A box that nobody serves.
fn missing(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    let client = stage.client;
    let two = stage.boxes[1];
    agent::withdraw(two, "ids.shop")?;
    agent::await_instances(client, "ids.shop", 0)?;
    stage.refused(client, "ids.shop", findings)?;
    let policy = chain("inspect", NAME, &["fw.shop", "ids.shop"], "missing = \"bypass\"");
    apply(stage.router, &policy, &stage.all, &["inspect"])?;
    // The core follows a moment after what is shown: the old rule would refuse.
    crate::program::wait_for("the bypass", agent::READY_LIMIT, || {
        let outcome = server::attempt(client, &format!("{NAME}.{ZONE}"), PORT, &["--count", "1"])?;
        if outcome.ok == 1 { Ok(()) } else { bail!("{:?}", outcome.errors) }
    })?;
    stage.go(client, [true, false], findings)?;
    serve(two, "ids.shop", "sniff", &[])?;
    stage.go(client, [true, true], findings)
}

/// What makes no sense is refused with the rule in the error, and changes nothing.
fn refused_input(stage: &Stage<'_>) -> Result<()> {
    let nine: Vec<String> = (0..9).map(|number| format!("box{number}.shop")).collect();
    let nine: Vec<&str> = nine.iter().map(String::as_str).collect();
    let twice = format!("{}{}", chain("one", NAME, &["fw.shop"], ""), chain("other", NAME, &["ids.shop"], "port = 7"));
    let unmet =
        format!("{}[[require]]\nname = \"{NAME}\"\nboxes = [\"av.shop\"]\n", chain("one", NAME, &["fw.shop"], ""));
    let half = format!(
        "{}[[require]]\nname = \"{NAME}\"\nboxes = [\"fw.shop\"]\n",
        chain("one", NAME, &["fw.shop", "ids.shop"], "")
    );
    for (policy, wanted) in [
        (chain("long", NAME, &nine, ""), "chain `long` has 9 boxes"),
        (chain("loop", NAME, &[NAME], ""), "loop"),
        (chain("adds", NAME, &[], "may_add = [\"ids.shop\"]"), "chain `adds` says which boxes may be added"),
        (chain("full", NAME, &nine[..8], "may_add = [\"ids.shop\"]"), "chain `full` has 9 boxes"),
        (chain("again", NAME, &["fw.shop"], "may_add = [\"fw.shop\"]"), "names box 2 twice"),
        (chain("round", NAME, &["fw.shop"], &format!("may_add = [\"{NAME}\"]")), "loop"),
        (chain("foreign", "web.elsewhere", &["fw.shop"], ""), "chain `foreign`"),
        (chain("ports", NAME, &["fw.shop"], "port = \"90-80\""), "chain `ports` is for no port"),
        (chain("wrong", NAME, &["fw shop"], ""), "fw shop"),
        (chain("both", NAME, &["fw.shop"], "proxies = [\"fw.shop\"]"), "chain `both` has the proxy fw.shop"),
        (chain("lost", NAME, &["fw.shop"], "protocol = \"tcp\"\nproxies = [\"lb.shop\"]"), "the proxy lb.shop is none"),
        (
            chain("gone", NAME, &["fw.shop"], "protocol = \"tcp\"\nproxies = [\"fw.shop\"]\nmissing = \"bypass\""),
            "never left out",
        ),
        (chain("words", NAME, &["fw.shop"], "filter = \"tcp portt 80\""), "does not compile: can't parse"),
        (chain("loops", NAME, &["fw.shop"], "filter = \"ip6 protochain 6\""), "jumps back"),
        (chain("beside", NAME, &["fw.shop"], "filter = \"inbound\""), "not in an IP packet"),
        (twice, "chain `other` decides over nothing"),
        (unmet, "av.shop"),
        (half, "require ids.shop as well"),
    ] {
        match try_apply(stage.router, &policy, &[]) {
            Ok(said) => bail!("taken, and should be refused with `{wanted}`: {said}"),
            Err(error) => {
                let text = format!("{error:#}");
                ensure!(text.contains(wanted), "`{wanted}` is not in: {text}");
            }
        }
    }
    ensure!(chains(stage.router)? == ["inspect"], "what was refused has changed something");
    Ok(())
}

/// No chains any more: sessions go straight again.
fn withdrawn(stage: &mut Stage<'_>, findings: &mut Findings) -> Result<()> {
    apply(stage.router, "chain = []", &stage.all, &[])?;
    stage.go(stage.client, [false, false], findings)?;
    stage.go(stage.other, [false, false], findings)
}
